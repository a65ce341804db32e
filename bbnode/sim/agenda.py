"""What will happen, in order: the one heap of a network.

Rule: things of the same time happen in the order in which they were planned. An event is plain
data; whether it still matters (its node may have crashed, its connection may be gone) is found
out when its time has come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bbnode.engine import steps
from bbnode.sim.link import Wire
from bbnode.sim.node import SimNode


@dataclass(frozen=True, slots=True)
class Wakeup:
    """A node wants to be polled."""

    node: SimNode
    life: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """An envelope reaches the end of a wire."""

    wire: Wire
    session: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Offloaded work of a node ends."""

    node: SimNode
    life: int
    task: steps.RunTask


@dataclass(frozen=True, slots=True)
class Call:
    """Something that the simulation's author planned."""

    action: Callable[[], object]


Event: TypeAlias = Wakeup | Arrival | TaskDone | Call


# Below this many wakeups a sweep saves nothing worth its time.
_SWEEP_FROM = 64


class Agenda:
    """Events by time.

    A node that changes its mind about when to be polled leaves a wakeup behind that nobody
    heeds. Those are no events: they do not keep a network from being idle, and they are swept
    out when most of the wakeups are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Event]] = []
        self._order = 0
        self._wakeups = 0
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._heap)

    def plan(self, when_ns: int, event: Event) -> None:
        """Let something happen at a time."""
        self._order += 1
        heapq.heappush(self._heap, (when_ns, self._order, event))
        if type(event) is Wakeup:
            self._wakeups += 1
            if self._wakeups > self._sweep_at:
                self._sweep()

    def next_ns(self) -> int | None:
        """When the next event happens, or None."""
        heap = self._heap
        while heap:
            when_ns, _, event = heap[0]
            if not _is_stale(when_ns, event):
                return when_ns
            heapq.heappop(heap)
            self._wakeups -= 1
        return None

    def take(self) -> tuple[int, Event]:
        """The event that `next_ns` spoke of, with its time."""
        when_ns, _, event = heapq.heappop(self._heap)
        self._wakeups -= type(event) is Wakeup
        return when_ns, event

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if not _is_stale(entry[0], entry[2])]
        heapq.heapify(self._heap)
        self._wakeups = sum(type(event) is Wakeup for _, _, event in self._heap)
        self._sweep_at = max(_SWEEP_FROM, 2 * self._wakeups)


def _is_stale(when_ns: int, event: Event) -> bool:
    """Whether a node does not want to be polled then any more."""
    if type(event) is not Wakeup:
        return False
    return event.life != event.node.life or event.node.wake_ns != when_ns
