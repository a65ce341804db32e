"""`scripts/bench compare` on a small repository with benchmarks whose figures are known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).parent.parent / "bench" / "compare.py"
PYPROJECT = '[project]\nname = "bbnode"\nversion = "1"\ndependencies = [{}]\n'
# "drifts" differs with the run, by a count that a file keeps, and is the same for both sides.
BENCH = """
import json, os, pathlib, bbnode
count = pathlib.Path(os.environ["COUNT"])
count.write_text(count.read_text() + "x" if count.exists() else "x")
runs = len(count.read_text())
print(json.dumps({"steady": 3, "speed": bbnode.SPEED, "drifts": runs, "untold": None}))
"""


class Repository:
    """A repository of git with the tool and a package, and a folder for what is temporary."""

    def __init__(self, place: Path) -> None:
        self.root, self.temporary = place / "repository", place / "temporary"
        self.temporary.mkdir()
        self.write("pyproject.toml", PYPROJECT.format(""))
        self.write("bbnode/__init__.py", "SPEED = 10\n")
        self.write("bench/speed.py", BENCH)
        self.write("bench/_shared.py", "")
        shutil.copy(COMPARE, self.root / "bench" / "compare.py")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=a change")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # Neither a user's name nor their settings are there for git.
        env = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "HOME": str(self.temporary.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "COUNT": str(self.temporary.parent / "count"),
        }
        return subprocess.Popen(
            [sys.executable, "bench/compare.py", *arguments],
            cwd=self.root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def compare(self, *arguments: str) -> tuple[int, str, str]:
        """Return the status and what is printed; nothing may be left behind."""
        before = self.state()
        with self.start(*arguments) as process:
            out, told = process.communicate()
        assert self.state() == before
        return process.returncode, out, told

    def state(self) -> Any:
        """What a comparison may not change."""
        return (
            self.git("status", "--porcelain"),
            self.git("worktree", "list"),
            self.git("for-each-ref"),
            self.git("stash", "list"),
            sorted(self.temporary.iterdir()),
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_it_tells_what_moved_between_a_revision_and_the_working_tree(
    repository: Repository,
) -> None:
    repository.write("bbnode/__init__.py", "SPEED = 25\n")  # not committed
    status, out, told = repository.compare("main", "--json")
    assert status == 0, told
    found = json.loads(out)
    head = repository.git("rev-parse", "HEAD")
    assert found["old"] == {"revision": "main", "commit": head}
    assert found["new"]["commit"] != head
    assert (found["turns"], found["chance"], found["failed"]) == (5, 2 / 252, {})
    speed = found["benches"].pop("speed")
    assert not found["benches"]  # neither the tool itself nor what benchmarks share
    assert speed["speed"] == {"old": [10] * 5, "new": [25] * 5, "moved": True, "change": 1.5}
    assert not speed["steady"]["moved"]
    # In turn, and the other way round in every second turn.
    assert speed["drifts"]["old"] == [1, 4, 5, 8, 9]
    assert speed["drifts"]["new"] == [2, 3, 6, 7, 10]
    assert not speed["drifts"]["moved"]
    assert "untold" not in speed


def test_the_table_has_what_moved_and_with_all_everything(repository: Repository) -> None:
    repository.write("bbnode/__init__.py", "SPEED = 5\n")
    repository.commit()
    status, out, _ = repository.compare("HEAD~1", "--with", "HEAD", "--turns", "6")
    lines = out.splitlines()
    assert status == 0
    assert lines[1].split("  ")[0] == "speed"
    assert lines[1].endswith("-50.0%")
    assert "10 (10 to 10)" in lines[1]
    assert "5 (5 to 5)" in lines[1]
    assert lines[2].startswith("1 of 3 figures moved, as their ranges over 6 turns")
    _, out, _ = repository.compare("HEAD~1", "--all")
    assert [line.split()[1] for line in out.splitlines()[1:4]] == ["steady", "speed", "drifts"]


def test_a_benchmark_that_fails_or_is_new_is_told_and_the_others_are_compared(
    repository: Repository,
) -> None:
    repository.write("bench/broken.py", "raise SystemExit('no such machine')\n")
    repository.write("bench/talks.py", "print('about 3 ms')\n")
    repository.commit()
    repository.write("bench/newer.py", BENCH)
    repository.git("add", "bench/newer.py")
    status, out, _ = repository.compare("main", "--json")
    found = json.loads(out)
    assert status == 1
    assert set(found["benches"]) == {"speed"}
    assert "no such machine" in found["failed"]["broken"]
    assert "no JSON object of numbers" in found["failed"]["talks"]
    assert found["failed"]["newer"] == "there is none in main"


def test_arguments_of_a_benchmark_are_passed_on(repository: Repository) -> None:
    repository.write("bench/echo.py", "import json, sys\nprint(json.dumps({'n': sys.argv[2]}))\n")
    repository.commit()
    status, out, told = repository.compare("main", "echo 7", "--json")
    assert status == 0, told
    assert json.loads(out)["benches"] == {
        "echo 7": {"n": {"old": [7] * 5, "new": [7] * 5, "moved": False, "change": 0}}
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "there is no revision 'nowhere'"),
        (["main", "--with", "nowhere"], "there is no revision 'nowhere'"),
        (["main", "sped"], "no benchmark 'sped' in either revision; there is: speed"),
        (["main", "_shared"], "no benchmark '_shared'"),
        (["main", "compare"], "no benchmark 'compare'"),
        (["main", "../speed"], "no benchmark '../speed'"),
        (["main", "--turns", "4"], "--turns takes 5 or more"),
        ([], "required: revision"),
    ],
)
def test_what_can_not_be_compared_is_refused(
    repository: Repository, arguments: list[str], why: str
) -> None:
    status, out, told = repository.compare(*arguments)
    assert (status, out) == (2, "")
    assert why in told


def test_files_that_git_does_not_know_are_told_of(repository: Repository) -> None:
    repository.write("bbnode/forgotten.py", "")
    _, _, told = repository.compare("main", "nosuch")
    assert "git does not know these, so they are left out: bbnode/forgotten.py" in told


def test_a_revision_with_other_requirements_is_installed_by_its_own_script(
    repository: Repository,
) -> None:
    repository.write("pyproject.toml", PYPROJECT.format('"other"'))
    setup = (
        '"$BBNODE_PYTHON" -m venv --without-pip .venv; '
        "echo $PWD >$(echo .venv/lib/*/site-packages)/a.pth; echo $1 >installed"
    )
    repository.write("scripts/lib.sh", f"setup() {{ {setup}; }}\n")
    repository.write(
        "bench/speed.py",
        "import json, os\nprint(json.dumps({'installed': os.path.exists('installed')}))\n",
    )
    repository.commit()
    repository.write("pyproject.toml", PYPROJECT.format(""))
    status, out, told = repository.compare("main", "--json")
    assert status == 0, told
    assert told.count("has other requirements") == 1
    installed = json.loads(out)["benches"]["speed"]["installed"]
    assert (installed["old"], installed["new"]) == ([1] * 5, [0] * 5)


def test_a_revision_that_can_not_be_installed_is_refused(repository: Repository) -> None:
    repository.write("pyproject.toml", PYPROJECT.format('"other"'))
    repository.write("scripts/lib.sh", "setup() { echo 'no such library' >&2; return 3; }\n")
    repository.commit()
    repository.write("pyproject.toml", PYPROJECT.format(""))
    status, _, told = repository.compare("main")
    assert status == 2
    assert "main can't be installed: it ended with status 3\nno such library" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_benchmark_and_what_it_started(
    repository: Repository, number: signal.Signals
) -> None:
    started, ended = (repository.temporary.parent / name for name in ("started", "ended"))
    os.mkfifo(started)
    os.mkfifo(ended)
    # Both processes hold the second pipe open for as long as they are there.
    repository.write(
        "bench/speed.py",
        "import os, signal, sys\n"
        f"held = os.open({str(ended)!r}, os.O_WRONLY)\n"
        "if os.fork():\n"
        f"    open({str(started)!r}, 'w').close()\n"
        "signal.pause()\n",
    )
    repository.commit()
    before = repository.state()
    with repository.start("main") as process, ended.open() as held:
        started.open().close()
        process.send_signal(number)
        assert held.read() == ""
        _, told = process.communicate()
    assert process.returncode == 128 + number, told
    assert repository.state() == before
