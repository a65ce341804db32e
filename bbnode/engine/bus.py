"""The bus: events of this node, for programs that subscribe to them.

Rule: an event is only a kind; its details are in the step that the host gets.
Only kinds with a subscriber are kept, at most `limit` events; the oldest goes first and is
counted (`bus.dropped`). Each event starts one fresh execution per subscribed `EventSource`.
A failure in such an execution publishes nothing, or a failing handler would feed itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from bbnode.engine.counts import Counts


class BusKind(enum.IntEnum):
    """Kinds that the engine itself publishes."""

    WIRE_RECEIVE_FAILED = 1
    OP_FAILED = 2
    PEER_RESOLVE_FAILED = 3
    PEER_UP = 4
    PEER_DOWN = 5


# Kinds from here on belong to programs and their hosts (`Node.publish_event`).
FIRST_PROGRAM_KIND = 1024
# An EventKind is an unsigned 64-bit integer on the wire.
MAX_KIND = (1 << 64) - 1


_NOBODY: Final[frozenset[int]] = frozenset()


class Bus:
    """Events of one node that wait for the next bus phase.

    Each poll asks whether there are any: of `waiting`, since `len` of this takes longer.
    """

    __slots__ = (
        "_counts",
        "_limit",
        "_subscribed",
        "waiting",
    )

    def __init__(self, limit: int | None, subscribed: Iterable[int], counts: Counts) -> None:
        self._subscribed = frozenset(subscribed) or _NOBODY
        self._limit = limit
        self._counts = counts
        self.waiting: list[int] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def publish(self, kind: int) -> None:
        """Queue an event, if anybody subscribed to it."""
        if kind not in self._subscribed:
            return
        if self._limit is not None and len(self.waiting) >= self._limit:
            del self.waiting[0]
            self._counts["bus.dropped"] += 1
        self.waiting.append(kind)

    def take(self) -> list[int]:
        """Remove and return all events that wait, oldest first."""
        taken, self.waiting = self.waiting, []
        return taken

    def state(self) -> list[int]:
        """Return the events that wait. Subscriptions are the program's."""
        return list(self.waiting)

    def load(self, events: Iterable[int]) -> None:
        """Load what `state` returned."""
        self.waiting = list(events)
