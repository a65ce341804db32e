"""The best round, and rounds that stop early: on a virtual clock, and over restarts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bbnode.daemon.config import InvokeSection
from bbnode.daemon.history.recorder import RoundRecorder
from bbnode.daemon.invoke.best import BestSoFar, mode_of
from bbnode.daemon.invoke.rounds import Rounds, Traffic
from bbnode.daemon.paths import StorageError
from bbnode.engine import steps
from tests.daemon.test_rounds import FakeNode


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *(("accuracy", "max"), ("f1", "max"), ("auc", "max"), ("stats.num_samples", "max")),
        *(("loss", "min"), ("stats.loss", "min"), ("val_loss", "min"), ("Loss", "min")),
        *(("error", "min"), ("eval/rmse", "min"), ("perplexity", "min"), ("lossless", "max")),
    ],
)
def test_losses_and_errors_are_best_when_they_are_least(metric: str, mode: str) -> None:
    assert mode_of(metric) == mode


def test_a_round_is_best_by_more_than_the_least_difference() -> None:
    best = BestSoFar(metric="accuracy", mode="max", min_delta=0.1, patience=2)
    assert [best.take(n, v) for n, v in enumerate((0.5, 0.6, 0.61, 0.6), 1)] == [
        *(True, False, True, False)
    ]
    assert not best.exhausted
    best.take(5, 0.65)
    assert best.exhausted
    assert str(best) == "best accuracy 0.61 in round 3"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_no_number_is_never_best(value: float | None) -> None:
    for mode in ("max", "min"):
        best = BestSoFar(metric="x", mode=mode, patience=1)
        assert not best.take(1, value)
        assert best.exhausted
        assert best.as_json()["value"] is None


def test_a_failed_round_says_nothing() -> None:
    best = BestSoFar(metric="x", mode="max", patience=1)
    assert best.take(1, 1.0)
    for number in range(2, 10):
        assert not best.take(number, 2.0, ok=False)
    assert (best.exhausted, best.round) == (False, 1)


@given(
    st.lists(st.tuples(st.booleans(), st.none() | st.floats(width=32)), max_size=20),
    st.integers(0, 20),
    st.sampled_from(["max", "min"]),
)
def test_a_restart_changes_nothing(
    made: list[tuple[bool, float | None]], at: int, mode: str
) -> None:
    series = [(number, ok, value) for number, (ok, value) in enumerate(made, 1)]
    whole = BestSoFar(metric="x", mode=mode, patience=3)
    whole.replay(series, len(series))
    again = BestSoFar(metric="x", mode=mode, patience=3)
    again.replay(series, at)
    for number, ok, value in series[at:]:
        again.take(number, value, ok=ok)
    assert again == whole


@pytest.mark.parametrize(
    "given",
    [
        *({"patience": 3}, {"mode": "max"}, {"min_delta": 0.1}, {"best": ""}),
        *({"best": "x", "mode": "most"}, {"best": "x", "patience": -1}),
        {"best": "x", "min_delta": math.nan},
        *({"until": 0.5}, {"until": 0.0}, {"best": "x", "until": math.nan}),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        InvokeSection.model_validate({"target": "server", **given})


class Course:
    """Rounds whose metric is what the test says, one after the other."""

    def __init__(
        self,
        values: list[float | None],
        tmp_path: Path,
        *,
        done: int = 0,
        fails: bool = False,
        program: str = "",
        **entry: Any,
    ) -> None:
        self.values = values
        self.node = FakeNode()
        self.saved: list[tuple[int, str, float]] = []
        self.fails = fails
        self.events: list[dict[str, Any]] = []
        self.recorder = RoundRecorder(tmp_path, keep=1000)
        self.recorder.begin("server", done, {"artifact": program})
        section = {"target": "server", "inputs": {"tick": "trigger"}, "times": 0, **entry}
        parsed = InvokeSection.model_validate(section)
        best = BestSoFar.of(parsed)
        if best is not None:
            best.replay(self.recorder.series("server", best.metric), done)
        self.rounds = Rounds(
            parsed,
            self.node,  # type: ignore[arg-type]
            wake=self.wake,
            traffic=Traffic,
            publish=self.events.append,
            done=done,
            best=best,
            save_best=self.save_best,
            keep=self.recorder.add,
            artifact=program,
            wall_clock=lambda: 1e9,
        )

    async def save_best(self, target: str, number: int, metric: str, value: float) -> None:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise StorageError("no room")
        self.saved.append((number, metric, value))

    async def save(self, written: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        written()

    def wake(self) -> None:
        execution = self.node.invoked[-1]
        value = self.values[self.rounds.done]
        if value is not None:
            topic = self.rounds.entry.best or "accuracy"
            self.rounds.observe(
                steps.AppEvent(
                    target="s", topic=topic, value=np.float64(value), execution=execution
                )
            )
        self.rounds.observe(
            steps.ExecutionFinished(execution=execution, target="s", ok=True, failures=0)
        )

    async def run(self) -> None:
        await self.rounds.run(self.save)
        await trio.to_thread.run_sync(self.recorder.close)


async def test_rounds_stop_when_none_is_better_and_the_best_is_kept(
    tmp_path: Path, autojump_clock: Any
) -> None:
    course = Course([0.1, 0.5, 0.4, math.nan, 0.5, 0.9], tmp_path, best="accuracy", patience=3)
    await course.run()
    assert course.rounds.done == 5
    assert course.saved == [(1, "accuracy", 0.1), (2, "accuracy", 0.5)]
    told = course.rounds.as_json()
    assert told["stopped"] == "nothing better in 3 rounds: best accuracy 0.5 in round 2"
    assert (told["complete"], told["best"]["round"]) == (True, 2)
    assert course.events[-1]["type"] == "rounds_complete"
    assert [made["best"] for made in course.rounds.finished()] == [True, True, False, False, False]


async def test_rounds_stop_when_one_is_good_enough(tmp_path: Path, autojump_clock: Any) -> None:
    """Also by less than `min_delta`; and they stay so over a restart, until more is wanted."""
    entry: dict[str, Any] = {"best": "accuracy", "min_delta": 0.2}
    course = Course([math.inf, 0.85, 0.9, 1.5], tmp_path, **entry, until=0.9)
    await course.run()
    assert course.rounds.done == 3
    why = "accuracy 0.9 reached until=0.9: best accuracy 0.85 in round 2"
    assert course.rounds.as_json()["stopped"] == why
    over = Course([], tmp_path, done=3, **entry, until=0.9)
    await over.run()
    assert (over.rounds.done, over.node.invoked) == (3, [])


def test_less_is_enough_of_a_loss_and_a_failed_round_is_never() -> None:
    best = BestSoFar(metric="loss", mode="min", until=0.1)
    best.take(1, 0.05, ok=False)
    best.take(2, 0.11)
    assert best.reached is None
    best.take(3, 0.1)
    assert best.reached == 0.1


async def test_patience_goes_on_after_a_restart(tmp_path: Path, autojump_clock: Any) -> None:
    first = Course([0.5, 0.4], tmp_path, best="accuracy", patience=3, times=2)
    await first.run()
    assert first.rounds.stopped == ""
    again = Course([0.0, 0.0, 0.4, 0.4, 0.9], tmp_path, done=2, best="accuracy", patience=3)
    assert again.rounds.best is not None
    assert (again.rounds.best.round, again.rounds.best.worse) == (1, 1)
    await again.run()
    assert again.rounds.done == 4
    assert again.saved == []
    once_more = Course([], tmp_path, done=4, best="accuracy", patience=3)
    await once_more.run()  # it is over: no further round is made
    assert (once_more.rounds.done, once_more.node.invoked) == (4, [])


async def test_an_early_stop_ends_with_its_program(tmp_path: Path, autojump_clock: Any) -> None:
    """Another program has rounds of its own, and its first one is its best so far."""
    entry: dict[str, Any] = {"best": "accuracy", "patience": 2, "until": 0.9}
    first = Course([0.8, 0.7, 0.6], tmp_path, program="a", **entry)
    await first.run()
    assert first.rounds.stopped.startswith("nothing better in 2 rounds")
    second = Course([0.0] * 3 + [0.5, 0.95], tmp_path, done=3, program="b", **entry)
    await second.run()
    assert second.saved == [(4, "accuracy", 0.5), (5, "accuracy", 0.95)]
    assert second.rounds.stopped.startswith("accuracy 0.95 reached")
    third = Course([0.0] * 5 + [0.1, 0.0, 0.0], tmp_path, done=5, program="c", **entry)
    await third.run()
    assert third.rounds.done == 8


async def test_another_metric_begins_anew_from_the_same_history(
    tmp_path: Path, autojump_clock: Any
) -> None:
    await Course([0.5, 0.4], tmp_path, best="loss", times=2).run()
    again = Course([0.0, 0.0, 0.1], tmp_path, done=2, best="accuracy", times=3)
    assert again.rounds.best is not None
    assert again.rounds.best.value is None
    await again.run()
    assert again.saved == [(3, "accuracy", 0.1)]


async def test_a_metric_that_is_not_there_is_told_once(
    tmp_path: Path, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    course = Course([None, None, None], tmp_path, best="acuracy", times=3)
    await course.run()
    told = [r for r in caplog.records if "no such metric" in r.message]
    assert [(r.best, r.metrics) for r in told] == [("acuracy", "none")]  # type: ignore[attr-defined]


async def test_weights_that_can_t_be_kept_fail_no_round(
    tmp_path: Path, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    course = Course([0.1, 0.2], tmp_path, best="accuracy", times=2, fails=True)
    await course.run()
    assert course.rounds.done == 2
    assert all(made["ok"] for made in course.rounds.finished())
    assert "the best round is not kept" in caplog.text
