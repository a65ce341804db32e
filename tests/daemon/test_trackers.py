"""Trackers: what they wrote is read back, offline; and none disturbs a round."""

from __future__ import annotations

import importlib
import logging
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon.config import NodeConfig
from bbnode.daemon.history import trackers, tracking
from bbnode.daemon.history.history import RoundHistory
from bbnode.daemon.history.trackers import (
    RunInfo,
    Tracker,
    TrackerLibraryMissing,
    TrackerRefused,
    UnknownTracker,
    make_tracker,
    register_tracker,
)
from bbnode.daemon.history.trackers.mlflow import MlflowTracker
from bbnode.daemon.history.trackers.tensorboard import TensorBoardTracker
from bbnode.daemon.history.trackers.wandb import WandbTracker
from bbnode.daemon.history.tracking import TrackerThread, join_all, metrics_of
from tests.daemon.test_round_history import made
from tests.patience import PATIENCE_S

ROUNDS = ((1, {"accuracy": 0.5, "stats.loss": float("nan")}, 100.0), (2, {"accuracy": 0.75}, 101.5))


def run_info(state_dir: Path, first_round: int = 1) -> RunInfo:
    return RunInfo(
        name="n-server-1",
        key="QmNode/server/1",
        node="n",
        peer_id="QmNode",
        target="server",
        artifact="ab" * 32,
        first_round=first_round,
        state_dir=state_dir,
        settings={"times": 3},
    )


def work(tracker: Tracker, state_dir: Path, first_round: int = 1) -> None:
    """A life of a node, in a thread as in the daemon."""

    def life() -> None:
        tracker.start(run_info(state_dir, first_round))
        for number, metrics, at in ROUNDS:
            tracker.log(number + first_round - 1, metrics, at)
        tracker.end()

    thread = threading.Thread(target=life)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def records(file: Path) -> Iterator[bytes]:
    """The records of an event file: length, its checksum, content, its checksum."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_tensorboard(tmp_path: Path) -> None:
    event_class = importlib.import_module("tensorboardX.proto.event_pb2").Event
    work(TensorBoardTracker({"logdir": str(tmp_path / "tb")}), tmp_path)
    (file,) = (tmp_path / "tb" / "n-server-1").iterdir()
    found = [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in map(event_class.FromString, records(file))
        for value in event.summary.value
    ]
    assert found == [("accuracy", 1, 0.5, 100.0), ("accuracy", 2, 0.75, 101.5)]


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    for first_round in (1, 3):
        work(MlflowTracker({"experiment": "mine"}), tmp_path, first_round)
    client = importlib.import_module("mlflow.tracking").MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("n-server-1", "FINISHED")
    assert run.data.params == {"times": "3"}
    assert run.data.tags["bbnode.artifact"] == "ab" * 32
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        *((1, 0.5, 100_000), (2, 0.75, 101_500), (3, 0.5, 100_000), (4, 0.75, 101_500))
    ]


def test_wandb_is_offline_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # the configuration decides, not the environment
    work(WandbTracker({"project": "mine"}), tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for written in (b"accuracy", b"0.75", b"n-server-1", b"mine"):
        assert written in content


@pytest.mark.parametrize(
    ("made_by", "settings", "told"),
    [
        (TensorBoardTracker, {"log_dir": "x"}, "no setting 'log_dir'; there are logdir"),
        (TensorBoardTracker, {"logdir": 3}, "logdir is 3, it has to be a str"),
        (MlflowTracker, {"url": "x"}, "there are uri, experiment"),
        (WandbTracker, {"mode": "on"}, "give one of offline, online, disabled"),
    ],
)
def test_settings_are_checked_before_anything_runs(
    made_by: Any, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(TrackerRefused, match=told):
        made_by(settings)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TrackerLibraryMissing, match=r"pip install 'mlflow-skinny>=3.17'"):
        MlflowTracker({})


def test_a_tracker_that_nobody_brings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTracker, match="kind 'tensorbord'"):
        make_tracker("tensorbord", {})
    with pytest.raises(UnknownTracker):
        RoundHistory(tmp_path, config(kind="nothing"), artifact_sha256="", peer_id="Qm")
    assert list(tmp_path.iterdir()) == []


class Notes:
    """A tracker of somebody's own."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.heard: list[Any] = []
        _NOTES.append(self)

    def start(self, run: RunInfo) -> None:
        self.heard.append((run.name, run.first_round))

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        self.heard.append((number, metrics["accuracy"], metrics["round/ok"]))

    def end(self) -> None:
        self.heard.append("end")


_NOTES: list[Notes] = []


def config(kind: str = "notes") -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "artifact": {"path": Path("a.onnx"), "targets": ["server"]},
            "invoke": [{"target": "server", "times": 3}],
            "trackers": [{"kind": kind, "settings": {"a": 1}}],
        }
    )


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Notes]:
    monkeypatch.setattr(trackers, "_REGISTERED", {})
    register_tracker("notes", Notes)
    _NOTES.clear()
    return _NOTES


def test_an_own_tracker_hears_all_rounds(tmp_path: Path, notes: list[Notes]) -> None:
    for done in (0, 2):
        history = RoundHistory(tmp_path, config(), artifact_sha256="ab", peer_id="Qm")
        history.begin(config().invoke[0], done)
        history.add({**made(done + 1), "artifact": "ab"})
        history.add({**made(done + 2), "artifact": "ab"})
        history.close()
        assert history.counters() == {"rounds.lost": 0, "trackers.lost": 0}
    # The first of each history only checks the settings.
    assert [n.heard for n in notes if n.heard] == [
        [("bbnode-server-1", 1), (1, 0.1, 1.0), (2, 0.2, 1.0), "end"],
        [("bbnode-server-1", 3), (3, pytest.approx(0.3), 1.0), (4, 0.4, 1.0), "end"],
    ]


def test_a_node_without_rounds_of_its_own_keeps_nothing(tmp_path: Path, notes: list[Notes]) -> None:
    plain = config().model_copy(update={"invoke": []})
    history = RoundHistory(tmp_path, plain, artifact_sha256="ab", peer_id="Qm")
    assert (history.read(), history.counters()) == ([], {})
    history.close()
    assert list(tmp_path.iterdir()) == []


class Broken(Notes):
    """A tracker that raises each time."""

    def start(self, run: RunInfo) -> None:
        if len(self.heard) < 2:
            self.heard.append("start")
            raise OSError("no route to host\nand more")

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        raise ValueError(f"step {number}")


def test_a_tracker_that_raises_is_logged_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken({})
    thread = TrackerThread("broken", broken, run_info(tmp_path))
    for number in range(1, 30):
        thread.add(made(number))
    join_all([thread])
    reasons = [r.reason for r in caplog.records]  # type: ignore[attr-defined]
    assert reasons[:2] == ["OSError: no route to host", "ValueError: step 3"]
    assert len(reasons) <= 8
    assert thread.lost == 29
    assert broken.heard == ["start", "start", "end"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_tracker_that_exits_ends_nothing_but_its_call(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Exits(Notes):
        def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
            if number == 1:
                raise error

    exits = Exits({})
    thread = TrackerThread("exits", exits, run_info(tmp_path))
    thread.add(made(1))
    thread.add(made(2))
    join_all([thread])
    assert thread.lost == 1
    (record,) = caplog.records
    assert record.reason.startswith(type(error).__name__)  # type: ignore[attr-defined]


def test_a_tracker_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "MAX_QUEUED", 2)
    monkeypatch.setattr(tracking, "END_S", 0.01)
    go_on, inside = threading.Event(), threading.Event()

    class Hangs(Notes):
        def start(self, run: RunInfo) -> None:
            inside.set()
            go_on.wait(PATIENCE_S)

    thread = TrackerThread("hangs", Hangs({}), run_info(tmp_path))
    thread.add(made(1))
    assert inside.wait(PATIENCE_S)
    for number in range(2, 7):
        thread.add(made(number))
    join_all([thread])
    assert thread.lost == 3
    messages = [r.message for r in caplog.records]
    assert "a tracker did not end in time" in messages
    go_on.set()
    caplog.set_level(logging.CRITICAL)


def test_what_a_tracker_gets_of_a_round() -> None:
    told = metrics_of(made(3, responded=["A", "B"], missing=["C"], bytes_in=7))
    assert told == {
        "accuracy": 0.3,
        "round/seconds": 0.0,
        "round/bytes_in": 7.0,
        "round/bytes_out": 0.0,
        "round/answered": 2.0,
        "round/missing": 1.0,
        "round/ok": 1.0,
    }
