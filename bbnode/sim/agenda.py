"""The schedule of a simulation: a queue of events that are due now, and a heap of later ones.

Rule: events at the same time happen in the order in which they were planned. An event is plain
data; whether it still matters (its node may have crashed, its connection may be gone) is checked
when it is due.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from bbnode.engine import steps
from bbnode.sim.node import SimNode, Wire

# Events are named tuples: a simulation makes several for each envelope, and a frozen dataclass
# takes three times as long to make.


class Wakeup(NamedTuple):
    """A node asked to be polled."""

    node: SimNode
    life: int


class Arrival(NamedTuple):
    """An envelope reaches the end of a wire; `checksum` is that of its bytes."""

    wire: Wire
    session: int
    data: bytes
    checksum: str


class TaskDone(NamedTuple):
    """Offloaded work of a node ends."""

    node: SimNode
    life: int
    task: steps.RunTask


class Call(NamedTuple):
    """A call that the simulation's author scheduled."""

    action: Callable[[], object]


Event: TypeAlias = Wakeup | Arrival | TaskDone | Call


# Below this many wakeups a sweep saves nothing worth its time.
_SWEEP_FROM = 64


class Agenda:
    """Events by time.

    A node that moves its next poll leaves a stale wakeup behind. Stale wakeups do not count as
    events, so the network may be idle with them, and they are removed when they are the majority.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        # Planned for now, when it was now already: all of the heap that is due comes before.
        self._due: deque[Event] = deque()
        self._heap: list[tuple[int, int, Event]] = []
        self._order = 0
        self._wakeups = 0
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._due) + len(self._heap)

    def plan(self, when_ns: int, event: Event) -> None:
        """Schedule an event; one in the past happens now."""
        if when_ns <= self._now_ns:
            self._due.append(event)
            return
        self._order += 1
        heapq.heappush(self._heap, (when_ns, self._order, event))
        if type(event) is Wakeup:
            event.node.planned_ns = when_ns
            self._wakeups += 1
            if self._wakeups > self._sweep_at:
                self._sweep()

    def wake(self, node: SimNode, when_ns: int) -> None:
        """Have a node polled at a time, unless it is polled before."""
        if node.wake_ns is not None and when_ns >= node.wake_ns:
            return
        node.wake_ns = when_ns
        # The usual case: something came to a node whose timer is where it was before.
        if when_ns != node.planned_ns:
            self.plan(when_ns, Wakeup(node, node.life))

    def next_ns(self) -> int | None:
        """Return when the next event happens, or None."""
        due = self._due
        while due and _is_stale(self._now_ns, due[0]):
            due.popleft()
        if due:
            return self._now_ns
        heap = self._heap
        while heap:
            when_ns, _, event = heap[0]
            if not _is_stale(when_ns, event):
                return when_ns
            self._pop()
        return None

    def take(self, until_ns: int) -> tuple[int, Event] | None:
        """Remove and return the next event up to `until_ns` with its time, or None.

        That time becomes the present.
        """
        due, heap = self._due, self._heap
        while True:
            if due and not (heap and heap[0][0] <= self._now_ns):
                when_ns, event = self._now_ns, due[0]
                if when_ns > until_ns:
                    return None
                due.popleft()
            elif heap:
                when_ns, _, event = heap[0]
                if when_ns > until_ns and not _is_stale(when_ns, event):
                    return None
                self._pop()
            else:
                return None
            if not _is_stale(when_ns, event):
                self._now_ns = when_ns
                return when_ns, event

    def _pop(self) -> None:
        when_ns, _, event = heapq.heappop(self._heap)
        if type(event) is Wakeup:
            self._wakeups -= 1
            _forget(when_ns, event)

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            when_ns, _, event = entry
            if not _is_stale(when_ns, event):
                kept.append(entry)
            else:
                _forget(when_ns, event)
        self._heap[:] = kept
        heapq.heapify(self._heap)
        self._wakeups = sum(type(event) is Wakeup for _, _, event in self._heap)
        self._sweep_at = max(_SWEEP_FROM, 2 * self._wakeups)


def _is_stale(when_ns: int, event: Event) -> bool:
    """Return True for a wakeup that its node has replaced."""
    if type(event) is not Wakeup:
        return False
    return event.life != event.node.life or event.node.wake_ns != when_ns


def _forget(when_ns: int, event: Event) -> None:
    if type(event) is Wakeup and event.life == event.node.life and event.node.planned_ns == when_ns:
        event.node.planned_ns = None
