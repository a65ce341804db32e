"""Rounds asked for from Python: made, kept, tracked and stopped as the node's own are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bbnode
from bbnode.api.training import TrainResult, result_of
from bbnode.daemon.control.errors import ControlError
from tests.daemon.trainer import X, trainer
from tests.patience import PATIENCE_S


@pytest.fixture
def data(tmp_path: Path) -> Path:
    labels = np.random.default_rng(1).integers(0, 3, size=len(X))
    np.savez(tmp_path / "data.npz", x=X, y=labels)
    return tmp_path / "data.npz"


def opened(tmp_path: Path, data: Path, **more: Any) -> Any:
    return bbnode.open(
        trainer(),
        targets="trainer",
        transport="memory",
        state_dir=tmp_path / "state",
        settings={"slots.data.path": str(data)},
        **more,
    )


@pytest.fixture
def node(tmp_path: Path, data: Path) -> Iterator[Any]:
    with opened(tmp_path, data) as made:
        yield made


def test_rounds_come_back_with_their_history(node: Any) -> None:
    result = node.train(rounds=3, best="stats_net.loss")
    assert [made["round"] for made in result.rounds] == [1, 2, 3]
    losses = result.history["stats_net.loss"]
    assert losses[0] > losses[1] > losses[2]
    assert result.best == {"metric": "stats_net.loss", "value": losses[2], "round": 3}
    assert result.stopped == ""
    again = node.train(rounds=2)
    assert [made["round"] for made in again.rounds] == [4, 5]
    kept = node.rounds()["rounds"]
    assert [made["round"] for made in kept] == [1, 2, 3, 4, 5]
    assert {made["run"] for made in kept} == {1, 2}


def test_each_call_has_its_own_patience(node: Any) -> None:
    for first in (1, 3):
        result = node.train(rounds=9, best="stats_net.loss", mode="max", patience=1, min_delta=0.0)
        assert [made["round"] for made in result.rounds] == [first, first + 1]
        assert result.stopped.startswith("nothing better in 1 rounds")
        assert result.best is not None
        assert result.best["round"] == first


def test_they_are_kept_over_a_restart(tmp_path: Path, data: Path) -> None:
    with opened(tmp_path, data) as node:
        node.train(rounds=2)
    with opened(tmp_path, data) as node:
        assert [made["round"] for made in node.rounds()["rounds"]] == [1, 2]
        assert [made["round"] for made in node.train(rounds=1).rounds] == [3]
        assert [made["round"] for made in node.rounds()["rounds"]] == [1, 2, 3]


def test_a_tracker_hears_them(node: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    settings = {"logdir": str(tmp_path / "t")}
    node.train(rounds=1, trackers=[{"kind": "tensorboard", "settings": settings}])
    node.stop()
    assert list((tmp_path / "t").rglob("events*"))


def test_they_can_be_stopped(node: Any) -> None:
    started = node.start_rounds({"times": 0, "every_s": PATIENCE_S})
    assert (started["target"], started["run"], started["done_before"]) == ("trainer", 1, 0)
    with pytest.raises(ControlError, match="makes rounds already"):
        node.train(rounds=1)
    with node.events(["rounds_complete"]) as ends:
        assert node.stop_rounds("trainer")["stopping"]
        assert next(ends)["event"]["stopped"] == "asked to stop"
    assert not node.stop_rounds()["stopping"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"target": "trainr"}, "no target 'trainr'; did you mean 'trainer'"),
        ({"inputs": {"tack": 1.0}}, "there is no input 'tack'"),
        ({"bst": "loss"}, "bst: "),
        ({"patience": 3}, "belong to a metric"),
        ({"trackers": [{"kind": "tensorbord"}]}, "tensorbord"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_begins(
    node: Any, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(ControlError, match=why):
        node.train(rounds=1, **asked)
    with pytest.raises(bbnode.InputRefused, match="give 1 or more"):
        node.train(rounds=0)
    assert node.rounds()["rounds"] == []


def test_rounds_that_all_fail_are_an_error_with_the_reason() -> None:
    started = {"target": "t", "run": 1, "done_before": 0}
    failed = {"round": 1, "target": "t", "ok": False, "metrics": {}, "failures": ["Train: no data"]}
    with pytest.raises(bbnode.RoundsFailed, match="all 1 rounds failed: round 1: Train") as told:
        result_of(started, {"invoke": []}, [failed])
    assert told.value.result.rounds == (failed,)
    well = {**failed, "round": 2, "ok": True, "metrics": {"loss": 0.5}, "failures": []}
    result = result_of(started, {"invoke": []}, [failed, well])
    assert result == TrainResult(target="t", rounds=(failed, well))
    assert result.history == {"loss": (None, 0.5)}
