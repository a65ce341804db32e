"""The bus: what happened on this node, for programs that asked to hear of it.

Rule: an event is a kind and nothing more; its details are in the step that the host gets.
Only kinds with a subscriber are kept, at most `limit` events; the oldest goes first and is
counted (`bus.dropped`). Each event starts one fresh execution per subscribed `EventSource`.
What fails in such an execution is no event again, or a failing handler would feed itself.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


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


class Bus:
    """Events of one node that wait for the next bus phase."""

    def __init__(self, limit: int | None, subscribed: Iterable[int], counts: Counter[str]) -> None:
        self._limit = limit
        self._subscribed = frozenset(subscribed)
        self._counts = counts
        self._events: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def publish(self, kind: int) -> None:
        """Queue an event, if anybody listens."""
        if kind not in self._subscribed:
            return
        if self._limit is not None and len(self._events) >= self._limit:
            self._events.popleft()
            self._counts["bus.dropped"] += 1
        self._events.append(kind)

    def take(self) -> deque[int]:
        """All events that wait, oldest first; what is published from now on waits again."""
        taken, self._events = self._events, deque()
        return taken

    def state(self, names: SavedNames) -> Any:  # noqa: ARG002 - the convention of tables
        """For a snapshot: the events that wait. Who listens is the program's."""
        return list(self._events)

    def load(self, plain: Any, names: LoadedNames) -> None:  # noqa: ARG002
        """Take up what `state` gave."""
        self._events = deque(plain)
