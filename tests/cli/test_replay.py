"""`bbnode replay` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state.record_file import RecordFile
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, component, peer
from tests.engine.test_replay import MODEL, vector


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*args: object) -> tuple[int, str, str]:
        code = main([str(a) for a in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def record(path: Path, *, wrong: bool = False) -> Path:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m")
    p.bind("t", "Model", "test.ScriptModel")
    p.op(MODEL, "Train", (), ["s"], slot="t", after=["y"], epochs=1, batch=1)
    p.output("out", "y")
    with RecordFile(path) as sink:
        node = bring_up(model(p), "server", record=sink)
        node.peer_connected(peer(1))
        for now_ns in range(1, 4):
            if wrong and now_ns == 3:
                component(node, "m").returns = vector(8)
            node.invoke("server", {"x": vector(now_ns)})
            node.poll(now_ns)
    return path


def test_a_record_is_run_again(run, tmp_path: Path) -> None:
    code, out, err = run("replay", record(tmp_path / "log"))
    assert (code, out, err) == (exits.OK, "3 polls, all as recorded\n", "")


def test_steps_are_printed_until_a_poll(run, tmp_path: Path) -> None:
    code, out, _ = run("replay", record(tmp_path / "log"), "--until", 2, "--print")
    assert code == exits.OK
    *shown, summary = out.splitlines()
    rows = [json.loads(line) for line in shown]
    assert {row["poll"] for row in rows} == {1, 2}
    assert {"app_event", "peer_up", "run_task"} <= {row["type"] for row in rows}
    assert summary == "2 polls, all as recorded"


def test_the_summary_is_json_too(run, tmp_path: Path) -> None:
    code, out, _ = run("replay", record(tmp_path / "log", wrong=True), "--json")
    assert code == exits.FAILURE
    found = json.loads(out)
    assert (found["polls"], found["differs_at"], found["torn"]) == (3, 3, None)


def test_the_first_poll_that_differs_is_named(run, tmp_path: Path) -> None:
    code, out, err = run("replay", record(tmp_path / "log", wrong=True))
    assert (code, out) == (exits.FAILURE, "")
    assert err.startswith("error: poll 3 (at 3 ns) differs")


def test_a_torn_tail_is_told(run, tmp_path: Path) -> None:
    path = record(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-5])
    code, out, err = run("replay", path)
    assert (code, out) == (exits.OK, "2 polls, all as recorded\n")
    assert "ends early" in err


@pytest.mark.parametrize("content", [None, b"", b"something else"])
def test_what_is_no_record_is_refused_in_one_line(run, tmp_path: Path, content) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    code, _, err = run("replay", path)
    assert code == exits.USAGE
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_record_never_overwrites_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"precious")
    with pytest.raises(StorageError, match="not there yet"):
        RecordFile(path)
    assert path.read_bytes() == b"precious"


def test_modules_that_are_missing_are_named(run, tmp_path: Path) -> None:
    code, _, err = run("replay", record(tmp_path / "log"), "--components", "no.such.module")
    assert code == exits.USAGE
    assert "no.such.module" in err
