"""Rounds on disk: what is kept over restarts and crashes, on full disks and in damaged files."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon.history import recorder as recording
from bbnode.daemon.history.recorder import RoundRecorder
from bbnode.daemon.history.scalars import MAX_METRICS, metric_name, scalars_of
from bbnode.daemon.history.store import (
    MAX_ROUND_BYTES,
    RoundStore,
    newest,
    read_rounds,
    rounds_file,
)
from bbnode.daemon.invoke.rounds import Round, Traffic
from bbnode.daemon.observing.events import MAX_SHOWN_ENTRIES
from bbnode.daemon.paths import StorageError
from bbnode.ir.values import Metadata
from tests.patience import PATIENCE_S

np = pytest.importorskip("numpy")


def made(number: int, target: str = "server", **fields: Any) -> dict[str, Any]:
    """A round as the daemon hands it over."""
    a_round = Round(number=number, target=target, execution=number, ok=True)
    a_round.started_at = 1e9 + number
    a_round.metrics = {"accuracy": number / 10}
    return {**a_round.as_json(), **fields}


def numbers(rounds: list[dict[str, Any]]) -> list[int]:
    return [each["round"] for each in rounds]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return rounds_file(tmp_path)


def test_rounds_are_read_as_they_were_written(file: Path) -> None:
    store = RoundStore(file, keep=100)
    first = made(1, metrics={"loss": float("nan"), "x": math.inf}, failures=["\ud800 half"])
    store.add(first, 1)
    for number in (2, 3):
        store.add(made(number), 1)
    store.add(made(1, "other"), 1)
    found = read_rounds(file)  # while it is open for writing
    assert [(each["target"], each["round"]) for each in found] == [
        *(("other", 1), ("server", 1), ("server", 2), ("server", 3))
    ]
    assert math.isnan(found[1]["metrics"].pop("loss"))
    assert found[1]["metrics"] == {"x": math.inf}
    assert found[1]["failures"] == ["\ud800 half"]
    assert found[2] == {**made(2), "run": 1}
    assert numbers(read_rounds(file, last=1)) == [1, 3]
    assert numbers(read_rounds(file, since=2)) == [3]
    store.close()
    assert list(file.parent.iterdir()) == [file]
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert numbers(read_rounds(file, last=1)) == [1, 3]
    assert list(file.parent.iterdir()) == [file]  # nothing is left by who reads


def test_a_round_that_is_made_again_replaces_the_one_of_its_number(file: Path) -> None:
    store = RoundStore(file, keep=100)
    for ok in (False, True):
        store.add(made(4, ok=ok), 1)
    assert [(each["round"], each["ok"]) for each in read_rounds(file)] == [(4, True)]
    assert store.series("server", 1, "accuracy") == [(4, True, 0.4)]
    store.close()


def test_a_count_that_begins_anew_is_another_run(file: Path) -> None:
    store = RoundStore(file, keep=100)
    assert store.run_of("server", 0, {}) == 1
    store.add(made(1), 1)
    assert store.run_of("server", 1, {}) == 1
    assert store.run_of("server", 0, {}) == 2
    store.add(made(1), 2)
    assert [(each["run"], each["round"]) for each in read_rounds(file)] == [(1, 1), (2, 1)]
    store.close()


@pytest.mark.parametrize("changed", ["artifact", "settings"])
def test_another_program_or_other_settings_make_another_run(file: Path, changed: str) -> None:
    store = RoundStore(file, keep=100)
    maker = {"artifact": "a", "settings": "1"}
    store.add({**made(1), **maker}, 1)
    assert store.run_of("server", 1, maker) == 1
    other = {**maker, changed: "other"}
    assert store.run_of("server", 1, other) == 2
    store.add({**made(2), **other}, 2)
    assert store.run_of("server", 2, other) == 2
    store.close()


def test_rounds_of_a_release_that_kept_no_settings_go_on(file: Path) -> None:
    store = RoundStore(file, keep=100)
    old = {name: value for name, value in made(1).items() if name != "settings"}
    store.add({**old, "artifact": "a"}, 1)
    assert store.run_of("server", 1, {"artifact": "a", "settings": "1"}) == 1
    store.close()


def test_the_newest_rounds_stay_and_their_metrics(file: Path) -> None:
    store = RoundStore(file, keep=3)
    for number in range(1, 11):
        store.add(made(number), 1)
    assert numbers(read_rounds(file)) == [8, 9, 10]
    store.close()
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT count(*) FROM metrics").fetchone() == (3,)
    db.close()


def test_a_clock_that_jumps_back_changes_no_order(file: Path) -> None:
    store = RoundStore(file, keep=3)
    for number, at in ((1, 1e9), (2, 5e8), (3, -1.0)):
        store.add(made(number, started_at=at), 1)
    assert numbers(read_rounds(file)) == [1, 2, 3]
    store.close()


def test_answers_are_bounded_in_bytes(file: Path) -> None:
    store = RoundStore(file, keep=100)
    for number in range(1, 6):
        store.add(made(number, failures=["x" * 1000]), 1)
    assert numbers(read_rounds(file, max_bytes=3500)) == [4, 5]
    store.close()


def test_what_peers_make_large_is_cut(file: Path) -> None:
    huge = made(
        1,
        outputs={"stats": "x" * MAX_ROUND_BYTES},
        missing_why={f"peer {i}": "y" * 5000 for i in range(500)},
        failures=["z" * 5000] * 500,
    )
    store = RoundStore(file, keep=100)
    store.add(huge, 1)
    (found,) = read_rounds(file)
    store.close()
    assert found["outputs"] == {}
    assert found["outputs_left_out"] is True
    assert len(json.dumps(found)) < MAX_ROUND_BYTES


def test_metadata_that_a_peer_made_is_bounded() -> None:
    a_round = Round(number=1, target="server", execution=1)
    absurd = Metadata({f"{'n' * 5000}{i}": float(i) for i in range(3000)}, text="t" * 10**6)
    a_round.take_output("stats", absurd)
    told = a_round.as_json()
    assert len(told["metrics"]) <= MAX_METRICS
    assert len(told["outputs"]["stats"]) <= MAX_SHOWN_ENTRIES + 1
    assert len(json.dumps(told)) < MAX_ROUND_BYTES
    assert metric_name("a\x1b[31m\nb") == "a�[31m�b"


def test_metrics_are_single_numbers_and_entries_of_metadata() -> None:
    assert dict(scalars_of("loss", np.float32(0.5))) == {"loss": 0.5}
    assert dict(scalars_of("n", np.array([3]))) == {"n": 3.0}
    assert dict(scalars_of("ok", np.array(True))) == {"ok": 1.0}
    assert dict(scalars_of("w", np.zeros(2))) == {}
    assert dict(scalars_of("t", np.array("x", object))) == {}
    told = Metadata(n=3, loss=0.25, name="x", raw=b"y", good=True, big=10**400)
    assert dict(scalars_of("s", told)) == {"s.n": 3.0, "s.loss": 0.25, "s.good": 1.0}


def test_bytes_of_a_peer_that_connected_again_count_from_there() -> None:
    a_round = Round(number=1, target="server", execution=1)
    a_round.at_start = Traffic(bytes_in=10, bytes_out=10, peers={"A": (500, 5), "B": (1, 1)})
    a_round.take_traffic(Traffic(bytes_in=40, bytes_out=20, peers={"A": (7, 3), "B": (1, 1)}))
    assert (a_round.bytes_in, a_round.bytes_out, a_round.bytes) == (30, 10, 40)
    assert a_round.peers == {"A": {"bytes_in": 7, "bytes_out": 3}}


def spoiled(file: Path, kind: str) -> None:
    if kind == "no data base":
        file.write_bytes(b"this is no data base" * 1000)
    elif kind == "torn":
        store = RoundStore(file, keep=1000)
        for number in range(200):
            store.add(made(number), 1)
        store.close()
        data = bytearray(file.read_bytes())
        data[4096 : len(data) // 2] = bytes(len(data) // 2 - 4096)
        file.write_bytes(data)
    elif kind == "newer":
        with sqlite3.connect(file) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    else:
        with sqlite3.connect(file) as db:
            db.execute("CREATE TABLE something (x)")
        db.close()


@pytest.mark.parametrize("kind", ["no data base", "torn", "newer", "somebody else's"])
def test_a_file_that_can_t_be_used_is_moved_aside(
    tmp_path: Path, file: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled(file, kind)
    before = file.read_bytes()
    kept = RoundRecorder(tmp_path, keep=10)
    kept.begin("server", 5, {})
    kept.add(made(6))
    assert numbers(kept.read()) == [6]
    kept.close()
    assert kept.lost == 0
    assert file.with_name("rounds.sqlite.broken").read_bytes() == before
    assert "moved aside" in caplog.text


def test_a_file_that_is_no_data_base_is_a_typed_error_to_readers(file: Path) -> None:
    assert read_rounds(file) == []
    spoiled(file, "no data base")
    with pytest.raises(StorageError, match=r"rounds\.sqlite"):
        read_rounds(file)


class FullDisk(RoundStore):
    """A store whose disk is full while `full` is set."""

    full = True

    def add(self, made: Any, run: int) -> None:
        if FullDisk.full:
            raise sqlite3.OperationalError("database or disk is full")
        super().add(made, run)


def test_a_full_disk_is_logged_once_and_rounds_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(FullDisk, "full", True)
    kept = RoundRecorder(tmp_path, keep=10, open_store=FullDisk)
    kept.begin("server", 0, {})
    for number in range(1, 5):
        kept.add(made(number))
    assert kept.read() == []
    assert kept.lost == 4
    assert caplog.text.count("disk is full") == 0  # the reason is a field
    assert [r.reason for r in caplog.records if "not kept" in r.message] == [
        "database or disk is full"
    ]
    monkeypatch.setattr(FullDisk, "full", False)
    kept.add(made(5))
    assert numbers(kept.read()) == [5]
    kept.close()
    assert "kept on disk again" in caplog.text


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED", 4)
    monkeypatch.setattr(recording, "DRAIN_S", 0.01)
    go_on, writing = threading.Event(), threading.Event()

    class Hangs(RoundStore):
        def add(self, made: Any, run: int) -> None:
            writing.set()
            go_on.wait(PATIENCE_S)
            super().add(made, run)

    kept = RoundRecorder(tmp_path, keep=100, open_store=Hangs)
    kept.begin("server", 0, {})
    kept.add(made(1))
    assert writing.wait(PATIENCE_S)
    for number in range(2, 11):
        kept.add(made(number))
    assert kept.lost == 5
    assert kept.read() == []
    go_on.set()


def test_a_directory_that_can_t_be_written_keeps_nothing_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rounds.sqlite").mkdir()
    kept = RoundRecorder(tmp_path, keep=10)
    assert kept.begin("server", 3, {}) == 1
    kept.add(made(4))
    assert kept.series("server", "accuracy") == []
    kept.close()
    assert kept.lost == 1
    assert "not kept on disk" in caplog.text


def test_what_is_no_round_is_dropped(tmp_path: Path) -> None:
    kept = RoundRecorder(tmp_path, keep=10)
    kept.begin("server", 0, {})
    kept.add(made(1, seconds=None))
    kept.add(made(2))
    assert numbers(kept.read()) == [2]
    assert kept.lost == 1
    kept.close()


WRITER = """
import sys
from pathlib import Path
from bbnode.daemon.history.store import RoundStore, rounds_file
from tests.daemon.test_round_history import made
store = RoundStore(rounds_file(Path(sys.argv[1])), keep=10**6)
number = 0
while True:
    number += 1
    store.add(made(number, failures=["x" * 2000]), 1)
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path, file: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 20:
                assert len(read_rounds(file)) >= 20  # another process, while it writes
                os.kill(writer.pid, signal.SIGKILL)
                break
    found = numbers(read_rounds(file))
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 20
    store = RoundStore(file, keep=10**6)
    assert len(store.series("server", 1, "accuracy")) == len(found)
    store.close()


def test_a_hundred_thousand_rounds_are_asked_for_by_an_index(file: Path) -> None:
    RoundStore(file, keep=10**6).close()
    content = json.dumps(made(7))
    with sqlite3.connect(file) as db:
        db.executemany(
            "INSERT INTO rounds (target, run, number, ok, started_at, seconds, content) "
            "VALUES ('server', 1, ?, 1, 0, 0, ?)",
            ((n, content.replace(": 7", f": {n}")) for n in range(1, 100_001)),
        )
    db.close()
    assert numbers(read_rounds(file, last=3)) == [99_998, 99_999, 100_000]
    with sqlite3.connect(file) as db:
        plan = db.execute(
            "EXPLAIN QUERY PLAN SELECT run, content FROM rounds WHERE target = 'server' "
            "AND number > 0 ORDER BY run DESC, number DESC LIMIT 3"
        ).fetchall()
    db.close()
    assert "USING INDEX" in plan[0][-1]
    assert file.stat().st_size < 100_000 * 1024


def test_the_newest_of_each_target() -> None:
    rounds = [made(1), made(1, "other"), made(2), made(3)]
    assert [(each["target"], each["round"]) for each in newest(rounds, 2)] == [
        *(("server", 2), ("server", 3), ("other", 1))
    ]


def test_two_thousand_rounds_are_kept_read_and_pruned(file: Path) -> None:
    store = RoundStore(file, keep=1500)
    for number in range(1, 2001):
        store.add(made(number), 1)
    assert len(store.series("server", 1, "accuracy")) == 1500
    store.close()
    assert numbers(read_rounds(file, last=20)) == [*range(1981, 2001)]
    assert numbers(read_rounds(file)) == [*range(501, 2001)]
    assert file.stat().st_size < 4 << 20
