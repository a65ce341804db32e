"""Commands of installed packages: listed unseen, run like ours, and broken ones told by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bbnode.cli import exits, main
from bbnode.ir import plugins

ROOT = Path(__file__).parent.parent.parent
CODE = """
from typing import Annotated
import typer
from bbnode.cli import output
from bbnode.cli.common import LocalNode, group

def hello(name: Annotated[str, typer.Argument()], node: LocalNode = LocalNode()) -> int:
    "Greet."
    node.show({"name": name}, f"hello {name}")
    return 4

app = group("Greet in many ways.")

def fails() -> None:
    "Fail."
    raise LookupError("nobody to greet")  # here

@app.command()
def loudly(name: str) -> None:
    "Greet aloud."
    output.data(f"HELLO {name}")
"""
ENTRIES = """[bbnode.commands]
broken = greetings_that_are_not_there
hello = greetings_of_a_test:hello
greet = greetings_of_a_test
fails = greetings_of_a_test:fails
number = greetings_of_a_test:ROOT
status = greetings_of_a_test:hello
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that adds commands."""
    (tmp_path / "greetings_of_a_test.py").write_text(f"ROOT = 1\n{CODE}")
    info = tmp_path / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return tmp_path


@pytest.fixture
def run(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    monkeypatch.syspath_prepend(str(package))
    _forget()

    def call(*args: str) -> tuple[int, str, str]:
        code = main.main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    plugins.rescan()
    main.added.cache_clear()
    main.shadowed.cache_clear()


def test_help_lists_them_with_their_package_and_imports_none(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    listed = out.partition("Commands of installed packages:")[2]
    for name in ("broken", "greet", "hello", "number"):
        assert f"\n  {name}" in listed
        assert name in main.command_names()
    assert listed.count("from greetings\n") == 5
    assert "greetings_of_a_test" not in sys.modules


def test_a_function_and_a_module_are_commands(run: Run) -> None:
    assert run("hello", "you") == (4, "hello you\n", "")
    assert run("hello", "you", "--json")[1].startswith('{\n  "schema": "bbnode/hello/1"')
    assert run("greet", "loudly", "you") == (0, "HELLO you\n", "")
    assert "--state-dir" in run("hello", "--help")[1]


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "No module named"), ("number", "it is not a command")]
)
def test_a_broken_one_is_one_line_that_names_its_package(run: Run, name: str, said: str) -> None:
    for arguments in ((name,), (name, "--help")):
        code, out, err = run(*arguments)
        assert (code, out) == (exits.USAGE, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "package greetings" in err
        assert said in err
    assert run("version")[0] == 0


def test_a_shipped_name_stays_ours_and_that_is_told(run: Run) -> None:
    assert main.command_names().count("status") == 1
    code, out, err = run("status", "--help")
    assert code == 0
    assert "Greet" not in out
    assert "the package greetings brings a command 'status' too" in err
    listed = run("--help")[1].partition("that can't be run:")[2]
    assert "status" in listed
    assert "from greetings; bbnode has a command of this name" in listed
    assert "greetings" not in run("version")[2]


def test_what_a_command_raises_is_one_line_with_its_package_and_line(run: Run) -> None:
    code, out, err = run("fails")
    assert (code, out) == (exits.FAILURE, "")
    assert err.startswith(
        "error: the command 'fails' of the package greetings failed: LookupError: nobody to greet "
        "(greetings_of_a_test.py:"
    )
    assert "bbnode --traceback fails" in err
    assert err.count("\n") == 1
    with pytest.raises(LookupError):
        run("--traceback", "fails")


def test_a_fault_of_ours_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(main.output, "data", broken)
    with pytest.raises(LookupError, match="ours"):
        run("--version")


def test_completion_goes_on_beside_a_broken_one(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from bbnode.cli.main import main; main()"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(package), str(ROOT))),
            "_BBNODE_COMPLETE": "complete_bash",
            "COMP_WORDS": "bbnode ",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hello" in done.stdout.split()
    assert "status" in done.stdout.split()
    assert "broken" not in done.stdout.split()
    assert done.stderr == ""
