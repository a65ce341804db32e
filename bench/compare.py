"""Two revisions compared: every benchmark of both, in turn, and which figures moved beyond noise.

Rule: each revision is measured as a user has it, in a copy and a Python environment of its own. In
each turn both run each benchmark, the one first and then the other, next time the other way round,
so that what else the machine does hits both. A figure has moved if the ranges of the two revisions
do not overlap: all of one revision's turns are above all of the other's. Where nothing differs
that happens with n turns by a chance of 2 / C(2n, n) (the exact two-sided Mann-Whitney test at its
least p), which is 1 in 126 for 5 turns; so of hundreds of figures a few do.

    ./scripts/bench compare main                           every benchmark: main, and this checkout
    ./scripts/bench compare v1 --with v2 compiler engine   two of them, of two revisions
    ./scripts/bench compare main "retrieval --no-daemons"  one of them, with arguments

This checkout is measured with its changes, but for files that git does not know. Nothing is left
behind, also by Ctrl-C, and git remembers nothing of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
ME = Path(__file__).stem
TURNS = LEAST_TURNS = 5
HERE = "the working tree"
# Of one run of one benchmark; then it hangs.
PATIENCE_S = 3600.0
STOPPING_S = 20.0
SHOWN_LINES = 15
# An environment of another checkout, or of a shell, would be measured in place of a revision's own.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Refused(SystemExit):
    """Something that can't be compared; it ends the program, with status 2."""

    def __init__(self, why: str) -> None:
        sys.stderr.write(f"error: {why}\n")
        super().__init__(2)


class BenchFailed(Exception):
    """A benchmark ended without figures."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two revisions.

    Attributes:
        name: as it was asked for.
        commit: its 40 digits.
        folder: of its copy.
        python: of its environment.
    """

    name: str
    commit: str
    folder: Path
    python: Path

    def has(self, bench: str) -> bool:
        """Return True if this revision has such a benchmark."""
        return (self.folder / "bench" / f"{bench}.py").is_file()

    def measure(self, bench: Sequence[str]) -> dict[str, float]:
        """Run a benchmark, with its arguments, and return its figures. Raises BenchFailed."""
        name, *arguments = bench
        out = _run(
            [str(self.python), f"bench/{name}.py", "--json", *arguments], self.folder, PATIENCE_S
        )
        try:
            found = json.loads(out)
            return {key: float(value) for key, value in found.items() if value is not None}
        except (ValueError, TypeError, AttributeError) as error:
            raise BenchFailed(f"it printed no JSON object of numbers: {out[-300:]!r}") from error


@dataclass(slots=True)
class Figure:
    """What one metric was in each turn."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        """Return True if the ranges do not overlap."""
        return max(self.old) < min(self.new) or max(self.new) < min(self.old)

    @property
    def change(self) -> float | None:
        """Return by what part of itself the median grew; None where it was 0."""
        before = median(self.old)
        return median(self.new) / before - 1 if before else None


def chance(turns: int) -> float:
    """Return how probable it is that ranges of equal distributions do not overlap."""
    return 2 / math.comb(2 * turns, turns)


# --- processes -------------------------------------------------------------------------------


def _run(command: Sequence[str], folder: Path, patience_s: float) -> str:
    """Run a command in a folder and return what it prints. Raises BenchFailed.

    It has a process group of its own, which is ended with this program.
    """
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, told = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise BenchFailed(f"it did not end within {patience_s:g} s") from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        lines = "\n".join(told.strip().splitlines()[-SHOWN_LINES:])
        raise BenchFailed(f"it ended with status {process.returncode}\n{lines}".rstrip())
    return out


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a process group, as Ctrl-C does, and kill what is left of it after a while."""
    with _deaf():
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.communicate(timeout=STOPPING_S)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore an impatient second Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _git(*arguments: str) -> str:
    """Return what git prints; Refused with its own words where it fails."""
    # `git stash create` makes a commit, also for a user who has not told git a name.
    who = {
        f"GIT_{role}_{what}": "bench"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, env={**who, **os.environ}, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise Refused("there is no git, by which revisions are found") from None
    if done.returncode:
        raise Refused(f"git {shlex.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


# --- revisions -------------------------------------------------------------------------------


def _commit(revision: str | None) -> str:
    """Return the commit of a revision; None is what stands in the working tree."""
    if revision is None:
        unknown = _git("ls-files", "--others", "--exclude-standard", "bench", "bbnode").split("\n")
        if unknown != [""]:
            _say(f"git does not know these, so they are left out: {', '.join(unknown)}")
        return _git("stash", "create") or _git("rev-parse", "HEAD")
    done = subprocess.run(
        ["git", "rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refused(f"there is no revision {revision!r} here; `git log --oneline` lists them")
    return done.stdout.strip()


def _copied(commit: str, folder: Path) -> None:
    """Write the files of a commit to a new folder. No worktree: git would remember it."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    _git("archive", "--output", str(archive), commit)
    _run(["tar", "-xf", str(archive)], folder, PATIENCE_S)
    archive.unlink()


def _asked(folder: Path) -> Any:
    """Return what an installation depends on: requirements, entry points and how it is built."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"pyproject.toml of {folder.name}: {error}") from None
    return found.get("project"), found.get("build-system")


def _environment(folder: Path) -> Path:
    """Return the Python of a new environment in which a copy is installed.

    A copy that asks for the same as this checkout shares the libraries of this one's environment.
    """
    python = folder / ".venv" / "bin" / "python"
    if _asked(folder) == _asked(ROOT):
        _run([sys.executable, "-m", "venv", "--without-pip", ".venv"], folder, PATIENCE_S)
        (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
        shared = [f"import site; site.addsitedir({each!r})\n" for each in site.getsitepackages()]
        # Read in this order, so that the copy comes before the checkout that the others name.
        (packages / "0-copy.pth").write_text(f"{folder}\n", "utf-8")
        (packages / "1-shared.pth").write_text("".join(shared), "utf-8")
    else:
        _say(f"{folder.name} has other requirements; installing them")
        base: str = sys._base_executable  # type: ignore[attr-defined]
        install = f"export BBNODE_PYTHON={shlex.quote(base)}; . scripts/lib.sh; setup test"
        _run(["bash", "-euo", "pipefail", "-c", install], folder, PATIENCE_S)
    with suppress(BenchFailed):  # so that no turn compiles; it may find a file that is no module
        _run([str(python), "-m", "compileall", "-q", "bbnode", "bench"], folder, PATIENCE_S)
    which = "import bbnode; print(bbnode.__file__)"
    found = Path(_run([str(python), "-P", "-c", which], folder, PATIENCE_S).strip())
    if folder not in found.resolve().parents:
        raise Refused(f"the environment of {folder.name} loads bbnode from {found}, not its copy")
    return python


@contextmanager
def _sides(revisions: Sequence[tuple[str, str]]) -> Iterator[list[Side]]:
    """Make copies of revisions, each a name and a commit, and remove them in the end."""
    place = Path(tempfile.mkdtemp(prefix="bbnode-compare-")).resolve()
    try:
        made = []
        for (name, commit), side in zip(revisions, ("old", "new"), strict=True):
            folder = place / side
            _say(f"making {side}: {name} ({commit[:10]})")
            try:
                _copied(commit, folder)
                python = _environment(folder)
            except BenchFailed as error:
                raise Refused(f"{name} can't be installed: {error}") from error
            made.append(Side(name=name, commit=commit, folder=folder, python=python))
        yield made
    finally:
        with _deaf():
            shutil.rmtree(place, ignore_errors=True)


# --- measuring -------------------------------------------------------------------------------


def compared(
    old: Side, new: Side, benches: Sequence[Sequence[str]], turns: int
) -> tuple[dict[str, dict[str, Figure]], dict[str, str]]:
    """Return the figures by benchmark and metric, and why others have none."""
    found: dict[str, dict[str, Figure]] = {shlex.join(bench): {} for bench in benches}
    failed: dict[str, str] = {}
    for bench in benches:
        lacking = [side.name for side in (old, new) if not side.has(bench[0])]
        if lacking:
            failed[shlex.join(bench)] = f"there is none in {' and '.join(lacking)}"
    for turn in range(turns):
        for bench in benches:
            title = shlex.join(bench)
            for side in (old, new) if turn % 2 == 0 else (new, old):
                if title in failed:
                    break
                _say(f"turn {turn + 1} of {turns}: {title}, {side.name}", end=" … ")
                began = time.monotonic()
                try:
                    figures = side.measure(bench)
                except BenchFailed as error:
                    failed[title] = f"in {side.name}: {error}"
                    _say("failed")
                    continue
                _say(f"{time.monotonic() - began:.0f} s")
                for metric, value in figures.items():
                    figure = found[title].setdefault(metric, Figure())
                    (figure.old if side is old else figure.new).append(value)
    for title in failed:
        del found[title]
    for title, metrics in found.items():
        # A metric that one revision lacks, or that not every run has, can't be compared.
        partial = [m for m, f in metrics.items() if not len(f.old) == len(f.new) == turns]
        for metric in partial:
            figure = metrics.pop(metric)
            times = f"{len(figure.old)} and {len(figure.new)} times"
            _say(f"{title}: {metric} was told {times}; left out")
    return found, failed


def _chosen(asked: Sequence[str], commits: Sequence[str]) -> list[list[str]]:
    """Return the benchmarks that were asked for with their arguments, or all of them."""
    files = {
        Path(line)
        for commit in commits
        for line in _git("ls-tree", "--name-only", commit, "bench/").splitlines()
    }
    names = {each.stem for each in files if each.suffix == ".py" and each.stem[0] != "_"}
    known = sorted(names - {ME})
    chosen = [shlex.split(each) for each in asked] or [[name] for name in known]
    for bench in chosen:
        if not bench or bench[0] not in known:
            name = bench[0] if bench else ""
            raise Refused(f"no benchmark {name!r} in either revision; there is: {' '.join(known)}")
    return chosen


# --- what is told ----------------------------------------------------------------------------


def as_object(
    old: Side, new: Side, turns: int, found: dict[str, dict[str, Figure]], failed: dict[str, str]
) -> dict[str, Any]:
    """Return all that was found, for JSON."""
    return {
        "old": {"revision": old.name, "commit": old.commit},
        "new": {"revision": new.name, "commit": new.commit},
        "turns": turns,
        "chance": chance(turns),
        "benches": {
            title: {
                metric: {"old": f.old, "new": f.new, "moved": f.moved, "change": f.change}
                for metric, f in metrics.items()
            }
            for title, metrics in found.items()
        },
        "failed": failed,
    }


def as_text(
    turns: int, found: dict[str, dict[str, Figure]], failed: dict[str, str], *, every: bool
) -> str:
    """Return a table of what moved, or with `every` of all figures, and what that means."""
    figures = [
        (title, metric, figure)
        for title, metrics in found.items()
        for metric, figure in metrics.items()
    ]
    moved = [each for each in figures if each[2].moved]
    rows = [("benchmark", "metric", "old: median (range)", "new: median (range)", "change", "")]
    for title, metric, figure in figures if every else moved:
        part = "" if figure.change is None else f"{figure.change:+.1%}"
        mark = "moved" if figure.moved and every else ""
        rows.append((title, metric, _spread(figure.old), _spread(figure.new), part, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ] if len(rows) > 1 else []  # fmt: skip
    lines.append(
        f"{len(moved)} of {len(figures)} figures moved, as their ranges over {turns} turns do not "
        f"overlap; by chance {len(figures) * chance(turns):.1f} would, were nothing different"
    )
    lines += [f"{title}: not compared, {why}" for title, why in failed.items()]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _say(text: str, end: str = "\n") -> None:
    sys.stderr.write(text + end)
    sys.stderr.flush()


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what moved, as text or (`--json`) all figures as one object."""
    parser = argparse.ArgumentParser(prog=f"scripts/bench {ME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("revision", help="that is compared with: a branch, a tag, a commit")
    parser.add_argument("bench", nargs="*", help="a benchmark, or one with arguments; else all")
    parser.add_argument("--with", dest="new", metavar="REV", help=f"the other; else {HERE}")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each; {TURNS} or more")
    parser.add_argument("--all", action="store_true", help="show also what did not move")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.turns < LEAST_TURNS:
        parser.error(f"--turns takes {LEAST_TURNS} or more: fewer can't tell a change from noise")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        given = (options.revision, options.new)
        commits = [_commit(each) for each in given]
        benches = _chosen(options.bench, commits)
        names = [HERE if each is None else each for each in given]
        with _sides(list(zip(names, commits, strict=True))) as (old, new):
            found, failed = compared(old, new, benches, options.turns)
    except KeyboardInterrupt:
        _say("\ninterrupted; nothing is left behind")
        sys.exit(128 + signal.SIGINT)
    if options.json:
        print(json.dumps(as_object(old, new, options.turns, found, failed)))
    else:
        print(as_text(options.turns, found, failed, every=options.all))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
