"""Components that can't be prepared: tried again, ever more rarely, and told of once."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from bbnode.daemon.lifecycle.preparing import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PATIENCE_S,
    PAUSE_PER_ATTEMPT,
    Preparing,
)
from bbnode.engine import All, Slots, errors, steps
from bbnode.engine.bootstrap.targets import BootstrapTarget


class FakeNode:
    """A node whose bootstraps take a while and fail for the reasons that a test gives."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.takes_s = 0.0
        self.asked: list[tuple[float, BootstrapTarget]] = []
        self.refuses: Exception | None = None

    def run_bootstrap(self, target: BootstrapTarget) -> Mapping[str, int]:
        self.asked.append((trio.current_time(), target))
        if self.refuses is not None:
            raise self.refuses
        names = target.slots if isinstance(target, Slots) else ("data",)
        return {f"slot:{name}": 1 for name in names}

    def not_ready(self) -> Mapping[str, str]:
        return self.reasons

    def pauses(self) -> list[float]:
        times = [at for at, _ in self.asked]
        return [later - at for at, later in itertools.pairwise(times)]


class Bench:
    """The preparation of a fake node; whoever is told writes it down."""

    def __init__(self) -> None:
        self.node = FakeNode()
        self.events: list[Mapping[str, Any]] = []
        self.status: list[str] = []
        self.ready = 0
        self.preparing = Preparing(
            self.node,
            wake=lambda: self._nursery.start_soon(self._end),
            publish=self.events.append,
            ready=self._is_ready,
            notify=self.status.append,
        )

    def _is_ready(self) -> None:
        self.ready += 1

    async def _end(self) -> None:
        """End the bootstraps as an engine does."""
        await trio.sleep(self.node.takes_s)
        for name in self.preparing._under_way.copy():
            ok = name.removeprefix("slot:") not in self.node.reasons
            self.preparing.observe(steps.BootstrapComplete(executions=1, ok=ok, target=name))
        self.preparing.tell()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as self._nursery:
            await self.preparing.first(lambda: False)
            self._nursery.start_soon(self.preparing.run)
            yield
            self._nursery.cancel_scope.cancel()


async def test_what_is_there_is_prepared_once(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    async with bench.running():
        await trio.sleep(1000)
    assert [target for _, target in bench.node.asked] == [All(modules=False)]
    assert (bench.events, bench.status, bench.ready) == ([], [], 0)


async def test_what_is_missing_is_told_once_and_tried_ever_more_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = Bench()
    bench.node.reasons = {"data": "no file", "local": "no file"}
    async with bench.running():
        await trio.sleep(400)
        assert bench.events == [
            {
                "type": "not_ready",
                "reason": "slots data, local: no file",
                "slots": {"data": "no file", "local": "no file"},
            }
        ]
        assert bench.status == ["STATUS=not ready: slots data, local: no file"]
        assert bench.node.pauses()[:6] == pytest.approx(
            [FIRST_PAUSE_S * 2**n for n in range(5)] + [60]
        )
        assert max(bench.node.pauses()) == pytest.approx(LONGEST_PAUSE_S)
        assert bench.node.asked[-1][1] == Slots(("data", "local"))
        bench.node.reasons = {"data": "another reason"}
        await trio.sleep(LONGEST_PAUSE_S)
        assert bench.events[-1]["reason"] == "slot data: another reason"
        bench.node.reasons = {}
        await trio.sleep(LONGEST_PAUSE_S)
        assert bench.ready == 1
        tried = len(bench.node.asked)
        await trio.sleep(1000)
        assert len(bench.node.asked) == tried


async def test_somebody_who_asks_is_heard_at_once(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    bench.node.reasons = {"data": "no file"}
    async with bench.running():
        await trio.sleep(130)
        bench.node.reasons = {}
        bench.preparing.again()
        await trio.testing.wait_all_tasks_blocked()
        await trio.lowlevel.checkpoint()
        assert bench.ready == 1


async def test_what_takes_long_is_tried_more_rarely(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    bench.node.reasons, bench.node.takes_s = {"data": "does not fit"}, 10.0
    async with bench.running():
        await trio.sleep(1000)
    assert min(bench.node.pauses()[1:]) >= PAUSE_PER_ATTEMPT * 10.0


async def test_a_start_waits_only_so_long(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    bench.node.takes_s = 10 * PATIENCE_S
    began = trio.current_time()
    async with bench.running():
        assert trio.current_time() - began == pytest.approx(PATIENCE_S)


async def test_a_node_that_refuses_is_asked_again(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    bench.node.reasons = {"data": "no file"}
    bench.node.refuses = errors.AlreadyTransitivelyQueued("a program has asked for it")
    async with bench.running():
        await trio.sleep(100)
        assert len(bench.node.asked) > 3


def test_the_failures_of_other_bootstraps_are_not_its_own() -> None:
    preparing = Bench().preparing
    failed = {"execution": 1, "kind": "X", "detail": "y"}
    assert preparing.is_own(steps.OpFailed(target="data", op="data.bootstrap", **failed))
    assert not preparing.is_own(steps.OpFailed(target="client#1", op="train", **failed))
    assert not preparing.is_own(steps.BootstrapComplete(executions=1, ok=False, target="Root"))
    assert not preparing.is_own(steps.BootstrapComplete(executions=1, ok=True, target="slot:data"))
