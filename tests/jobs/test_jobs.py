"""Jobs: each runs, its claims hold, and the table of the docs is of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jobs.__main__ as command
from jobs import page
from jobs.job import Job, Outcome, Row, load, names
from jobs.typed import CommandFailed, Terminal
from reproduce.experiment import Claim


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names())
def test_its_claims_hold_in_the_quick_form(name: str, tmp_path: Path) -> None:
    job = load(name)
    if job.missing:
        pytest.skip(f"{', '.join(job.missing)} is not installed")
    outcome = job.run(Terminal(tmp_path), True)
    assert outcome.claims
    failed = [f"{claim.text} ({claim.figures})" for claim in outcome.claims if not claim.holds]
    assert failed == []


@pytest.mark.parametrize("name", names())
def test_each_says_what_it_is(name: str) -> None:
    said = load(name).says
    assert said
    assert "  " not in said


@pytest.fixture
def coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a job, whose claim holds in the quick form alone."""

    def run(terminal: Terminal, quick: bool) -> Outcome:
        (terminal.folder / "side.txt").write_text("heads")
        claims = [Claim("it falls", True, "it fell"), Claim("it is heads", quick, "one throw")]
        return Outcome(result="heads", reference="a half", claims=claims)

    monkeypatch.setattr(command, "load", lambda _: Job(says="a coin", run=run))


@pytest.mark.parametrize(
    ("arguments", "code", "said"), [(["--quick"], 0, "holds"), ([], 1, "FAILS")]
)
def test_the_exit_code_says_if_every_claim_holds(
    coin: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    rows = tmp_path / "rows.json"
    kept = ["--json", str(rows), "--folder", str(tmp_path / "kept")]
    assert command.main(["trees", *arguments, *kept]) == code
    assert f"{said}: it is heads (one throw)" in capsys.readouterr().out
    assert (tmp_path / "kept" / "trees" / "side.txt").read_text() == "heads"
    (row,) = json.loads(rows.read_text())
    assert command.main(["trees", *arguments, *kept]) == 2  # nothing is written over
    assert "trees is not empty; name another --folder" in capsys.readouterr().out
    assert (row["held"], row["claims"], row["result"]) == (2 - code, 2, "heads")


def test_rows_are_recorded_beside_those_of_others(
    coin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    written = tmp_path / "jobs.md"
    written.write_text("# Jobs\n\n<!-- table -->\n\n-\n\n<!-- end -->\n")
    monkeypatch.setattr(page, "PAGE", written)
    assert command.main(["trees", "night", "--quick", "--record"]) == 0
    assert command.main(["night", "--record"]) == 1
    assert command.main(["night", "--quick", "--record"]) == 0
    rows = [Row(**each) for each in json.loads((tmp_path / "results.json").read_text())]
    assert [(row.name, row.quick) for row in rows] == [
        ("night", False),
        ("night", True),
        ("trees", True),
    ]
    # Of each the long form, where there is one.
    assert page.shown(written) == page.table(rows)
    assert "| `night` |" in page.shown(written)
    assert "| `trees` (quick) |" in page.shown(written)


def test_an_unknown_name_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["tress"]) == 2
    assert "error: no job 'tress'; there is: " in capsys.readouterr().out


def test_one_that_lacks_a_library_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needing = Job(says="no", run=lambda *_: pytest.fail("it ran"), needs=("no_such_library",))
    monkeypatch.setattr(command, "load", lambda _: needing)
    assert command.main(["trees"]) == 2
    assert command.main([]) == 0
    assert "trees: left out, no_such_library is not installed" in capsys.readouterr().out


def test_a_command_that_fails_ends_the_job_with_its_words(tmp_path: Path) -> None:
    shown: list[str] = []
    terminal = Terminal(tmp_path, shown.append)
    with pytest.raises(CommandFailed, match=r"ended with [0-9]+:\n(.|\n)*nothing\.py"):
        terminal.up("nothing.py --times 1")
    assert shown == ["$ bbnode up nothing.py --times 1"]


def test_what_the_docs_show_was_measured() -> None:
    rows = page.recorded()
    assert page.shown() == page.table(rows)
    assert {row.name for row in rows} <= set(names())
    assert [row.name for row in rows if row.held < row.claims] == []
