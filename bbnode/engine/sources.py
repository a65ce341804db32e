"""Entries that fire by themselves: Pulse, Interval, EventSource and LifecyclePhase.

Rule: each firing is a fresh execution. An Interval that missed ticks fires once and counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bbnode.engine import steps
from bbnode.engine.clock import NodeClock
from bbnode.engine.executor import Executor
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.planning.planner import EventSourcePlan
from bbnode.engine.reports import Reports
from bbnode.engine.scheduler import Scheduler, TimerKind
from bbnode.engine.snapshot.codec import FRAME, SnapshotReader, SnapshotWriter, many, optional
from bbnode.ir.values import TRIGGER, EventKind, Timestamp, Value

_BOOTING = optional(many(FRAME, list))


@dataclass(eq=False, repr=False)
class Sources:
    """The sources of one node."""

    __slots__ = (
        "booting",
        "clock",
        "executor",
        "reports",
        "scheduler",
        "sources",
    )

    sources: Sequence[EventSourcePlan]
    clock: NodeClock
    reports: Reports
    scheduler: Scheduler
    executor: Executor

    def __post_init__(self) -> None:
        self.booting: list[Frame] | None = None

    def boot(self) -> None:
        """Fire every Pulse and arm every Interval, at the first poll."""
        self.booting = []
        for index, source in enumerate(self.sources):
            if source.kind == "Interval":
                due_ns = self.clock.now_ns + source.argument
                self.scheduler.set(due_ns, TimerKind.INTERVAL, index)
            elif source.kind == "Pulse":
                frame = self._fire(source.plan, TRIGGER)
                if frame is not None:
                    self.booting.append(frame)

    def check_booted(self) -> None:
        """Report once that all executions that `boot` fired have ended."""
        if self.booting is None or not all(frame.ended for frame in self.booting):
            return
        ok = not any(frame.failures for frame in self.booting)
        self.reports.steps.append(steps.BootstrapComplete(executions=len(self.booting), ok=ok))
        self.booting = None

    def tick(self, index: int, when_ns: int) -> None:
        """Fire an Interval that was due at `when_ns`, and arm it again."""
        source, now_ns = self.sources[index], self.clock.now_ns
        missed = (now_ns - when_ns) // source.argument
        self.reports.counts["interval.missed"] += missed
        following_ns = when_ns + (missed + 1) * source.argument
        self.scheduler.set(following_ns, TimerKind.INTERVAL, index)
        self._fire(source.plan, Timestamp(now_ns))

    def enter_phase(self, phase: int) -> None:
        """Fire the sources that wait for a phase of the host."""
        self._fire_all("LifecyclePhase", phase, TRIGGER)

    def deliver_bus(self) -> None:
        """Fire the sources that are subscribed to the events on the bus."""
        for kind in self.reports.bus.take():
            self._fire_all("EventSource", kind, EventKind(kind), from_bus=True)

    def _fire_all(self, kind: str, argument: int, value: Value, *, from_bus: bool = False) -> None:
        for source in self.sources:
            if source.kind == kind and source.argument == argument:
                self._fire(source.plan, value, from_bus=from_bus)

    def _fire(self, plan: EntryPlan, value: Value, *, from_bus: bool = False) -> Frame | None:
        frame = self.executor.start(plan, from_bus=from_bus)
        if frame is not None:
            for index in plan.seeds:
                frame.values[index] = value
            self.executor.launch(frame)
        return frame

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: what the first poll fired and has not ended yet."""
        return _BOOTING.save(self.booting, writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self.booting = _BOOTING.load(plain, reader)
