"""Timers: a heap of things to do at a time that the caller supplies.

Rule: a timer is data, `(when, order, kind, key)`; timers due at the same time mature in the
order in which they were set. Cancelling is O(1): the entry stays in the heap as a
tombstone, and the heap is swept when most of it is tombstones.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass
from typing import Any, Protocol


class TimerKind(enum.IntEnum):
    """The purpose of a timer."""

    PARKED_DONE = 1  # a Sleep or After is over; key: token
    PARKED_DEADLINE = 2  # a parked op waited too long; key: token
    REQUEST_DEADLINE = 3  # a cohort has to close; key: wire_req_id
    INTERVAL = 4  # the next tick; key: index of the entry
    BOOTSTRAP_TURN = 5  # a bootstrap waited too long for its turn; key: its number
    COMPONENT_TIMER = 6  # a component set it; key: its number
    CALL_DEADLINE = 7  # a component's request has no answer; key: wire_req_id
    JOIN_DEADLINE = 8  # a join has to close; key: its number
    PEER_LOST = 9  # a peer's connection was not restored in time; key: its number


@dataclass(slots=True, eq=False)
class Timer:
    """One timer; `live` turns false when it matured or was cancelled."""

    when_ns: int
    order: int
    kind: TimerKind
    key: int
    live: bool = True


class TimerIndex(Protocol):
    """The index of loaded timers, for tables that refer to them."""

    def add_timer(self, timer: Timer) -> None:
        """Enter a timer."""


# Below this many entries a sweep saves nothing worth its time.
_SWEEP_FROM = 64


class Scheduler:
    """The timers of one node; if the `heap` is empty, there are none."""

    __slots__ = (
        "_live",
        "_order",
        "heap",
    )

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Timer]] = []
        self._order = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def set(self, when_ns: int, kind: TimerKind, key: int) -> Timer:
        """Arm a timer."""
        self._order += 1
        timer = Timer(when_ns, self._order, kind, key)
        heapq.heappush(self.heap, (when_ns, self._order, timer))
        self._live += 1
        return timer

    def cancel(self, timer: Timer) -> None:
        """Disarm a timer; harmless when it is not armed any more."""
        if not timer.live:
            return
        timer.live = False
        self._live -= 1
        if len(self.heap) > _SWEEP_FROM and self._live * 2 < len(self.heap):
            self.heap = [entry for entry in self.heap if entry[2].live]
            heapq.heapify(self.heap)

    def next_deadline(self) -> int | None:
        """Return when the next timer matures, or None."""
        heap = self.heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def matured(self, now_ns: int) -> list[Timer]:
        """Remove and return the timers that are due at `now_ns`, earliest first."""
        due = []
        heap = self.heap
        while heap and (heap[0][0] <= now_ns or not heap[0][2].live):
            timer = heapq.heappop(heap)[2]
            if timer.live:
                timer.live = False
                self._live -= 1
                due.append(timer)
        return due

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: timers that are armed, in order, and the count."""
        live = sorted((entry for entry in self.heap if entry[2].live), key=lambda e: e[:2])
        return [[t.when_ns, t.order, int(t.kind), t.key] for _, _, t in live], self._order

    def load(self, plain: Any, reader: TimerIndex) -> None:
        """Load what `state` returned."""
        rows, self._order = plain
        for when_ns, order, kind, key in rows:
            timer = Timer(when_ns, order, TimerKind(kind), key)
            self.heap.append((when_ns, order, timer))  # in order: a sorted list is a heap
            reader.add_timer(timer)
        self._live = len(self.heap)
