"""The event queue of a simulation.

Rule: the order depends on the events alone and not on the process that computes them, so that it is
the same in one process and in several. At one time the author's calls come first, in planning
order; then the nodes, in the order of their addition: each gets its arrivals (by sender, in sending
order), then the ends of its tasks, and is polled. An envelope without latency arrives in the next
round of the same time.

Events are tuples for speed: a simulation creates several per envelope. An event that has become
obsolete (its node may have crashed, its connection may be gone) is discarded when it is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from bbnode.engine import steps
from bbnode.sim.node import SimNode, Wire

# The ranks of the events of one node within a round.
ARRIVAL: Final = 0
TASK_DONE: Final = 1
POLL: Final = 2

# A key consists of round, number of the node, and rank.
_RANK_BITS: Final = 2
ROUND_BITS: Final = 34
_RANKS: Final = (1 << _RANK_BITS) - 1
_NODE: Final = (1 << ROUND_BITS) - 1 - _RANKS
NO_KEY: Final = -1  # no event of a node: the author calls, or nothing happens
LAST_KEY: Final = 1 << 128  # beyond all keys

# (time, key, two numbers that make it unique, payload)
Entry: TypeAlias = tuple[int, int, int, int, Any]

# An envelope in flight: wire, session, its bytes, and their checksum.
Flight: TypeAlias = tuple[Wire, int, bytes, str]

# Below this many polls a sweep is not worth its time.
_SWEEP_FROM = 64


class Agenda:
    """Events by time.

    A node that moves its next poll leaves a stale poll in the queue. Stale polls do not count as
    events, so the network may be idle with them; they are removed once they are the majority.
    """

    def __init__(self) -> None:
        self.key = NO_KEY  # key of the present event
        self._now_ns = 0
        # The node of the present event, if its poll is next, and the key of that poll: a poll right
        # after an arrival then needs no place in the heap.
        self._visited: SimNode | None = None
        self._visit_key = NO_KEY
        self._heap: list[Entry] = []
        # The author's calls: time, order, call.
        self.calls: list[tuple[int, int, Callable[[], object]]] = []
        self._order = 0
        self._polls = 0
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._heap) + len(self.calls) + (self._visited is not None)

    # -- planning ----------------------------------------------------------------------------

    def call(self, when_ns: int, action: Callable[[], object]) -> None:
        """Plan a call of the author."""
        self._order += 1
        heapq.heappush(self.calls, (when_ns, self._order, action))

    def arrive(self, when_ns: int, flight: Flight) -> None:
        """Plan the arrival of an envelope sent at present."""
        heapq.heappush(self._heap, self.arrival(when_ns, flight))

    def arrival(self, when_ns: int, flight: Flight) -> Entry:
        """Return the entry of an arrival, for the process that runs its target."""
        wire = flight[0]
        wire.count += 1
        key = wire.target.index << _RANK_BITS
        if when_ns == self._now_ns:
            key |= ((self.key >> ROUND_BITS) + 1) << ROUND_BITS
        return when_ns, key, wire.source.index, wire.count, flight

    def enter(self, arrival: Entry) -> None:
        """Enter an arrival that was planned elsewhere."""
        heapq.heappush(self._heap, arrival)

    def end_task(self, when_ns: int, node: SimNode, task: steps.RunTask) -> None:
        """Plan the end of work that a node has offloaded."""
        self._order += 1
        key = node.index << _RANK_BITS | TASK_DONE
        if when_ns == self._now_ns:  # planned by a poll of the node: same round
            key = self.key & ~_RANKS | TASK_DONE
        heapq.heappush(self._heap, (when_ns, key, self._order, 0, (node, node.life, task)))

    def wake(self, node: SimNode, when_ns: int) -> None:
        """Plan a poll of a node, unless an earlier one is planned."""
        if node.wake_ns is not None and when_ns >= node.wake_ns:
            return
        node.wake_ns = when_ns
        here = node.index << _RANK_BITS
        if when_ns == self._now_ns and here == self.key & _NODE:
            here = self.key & ~_RANKS
            if self._visited is None:
                self._visited, self._visit_key = node, here | POLL
                return
        # The usual case: an arrival at a node whose timer is unchanged.
        if when_ns != node.planned_ns:
            self._order += 1
            heapq.heappush(self._heap, (when_ns, here | POLL, self._order, node.life, node))
            node.planned_ns = when_ns
            self._polls += 1
            if self._polls > self._sweep_at:
                self._sweep()

    # -- execution ---------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Return True if no event is left."""
        return not self.calls and self.next() is None

    def rest(self) -> None:
        """End the present event: from now on plans are the author's."""
        self.key = NO_KEY

    def next_call_ns(self) -> int | None:
        """Return when the author's next call is due, or None."""
        return self.calls[0][0] if self.calls else None

    def take_call(self) -> Callable[[], object]:
        """Remove and return the author's next call."""
        self.key = NO_KEY
        return heapq.heappop(self.calls)[2]

    def next(self) -> tuple[int, int] | None:
        """Return time and key of the next event of a node, or None."""
        heap = self._heap
        while heap and heap[0][1] & _RANKS == POLL and _is_stale(heap[0]):
            self._forget(heapq.heappop(heap))
        visited = self._visited
        if visited is not None and visited.wake_ns != self._now_ns:
            visited = self._visited = None
        if visited is None:
            return heap[0][:2] if heap else None
        mine = self._now_ns, self._visit_key
        return min(mine, heap[0][:2]) if heap else mine

    def take(self, until_ns: int, last_key: int = LAST_KEY) -> tuple[int, int, Any] | None:
        """Remove the next event of a node up to a time (and then a key); make it the present.

        Returns its time, its rank and its payload; or None.
        """
        heap = self._heap
        while True:
            visited = self._visited
            if visited is not None:
                now_ns, visit_key = self._now_ns, self._visit_key
                ahead = heap[0] if heap else None
                # Compared field by field, to create no tuples for each envelope.
                if (
                    ahead is None
                    or ahead[0] > now_ns
                    or (ahead[0] == now_ns and ahead[1] >= visit_key)
                ):
                    if now_ns > until_ns:
                        return None
                    self._visited = None
                    if visited.wake_ns != now_ns:
                        continue
                    self.key = visit_key
                    return now_ns, POLL, visited
            if not heap:
                return None
            when_ns, key, _, _, what = entry = heap[0]
            if when_ns > until_ns or (when_ns == until_ns and key > last_key):
                return None
            heapq.heappop(heap)
            rank = key & _RANKS
            if rank == POLL:
                stale = _is_stale(entry)
                self._forget(entry)
                if stale:
                    continue
            self._now_ns, self.key = when_ns, key
            return when_ns, rank, what

    def _forget(self, entry: Entry) -> None:
        """Record that a poll was removed from the heap."""
        self._polls -= 1
        when_ns, _, _, life, node = entry
        if life == node.life and node.planned_ns == when_ns:
            node.planned_ns = None

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            if entry[1] & _RANKS == POLL and _is_stale(entry):
                self._forget(entry)
            else:
                kept.append(entry)
        self._heap[:] = kept
        heapq.heapify(self._heap)
        self._sweep_at = max(_SWEEP_FROM, 2 * self._polls)


def _is_stale(poll: Entry) -> bool:
    """Return True for a poll that its node has replaced."""
    when_ns, _, _, life, node = poll
    return life != node.life or bool(node.wake_ns != when_ns)
