"""Which messages came already.

Rule: a message is named by (source peer, wire_req_id, site); the last 8,192 names are kept
and the oldest goes. It is not named by a hash of its payload: the same weights sent twice
are two messages, and a retransmission of one message is one, whatever it carries.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from bbnode.ir.caps import DEDUP_WINDOW
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


DedupKey = tuple[PeerId, int, int]


class InboundDedup:
    """A sliding window of names."""

    def __init__(self, window: int = DEDUP_WINDOW) -> None:
        self._window = window
        # A dict would keep the order as well, but walks over all holes to find its first key.
        self._order: deque[DedupKey] = deque()
        self._seen: set[DedupKey] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, source: PeerId, wire_req_id: int, site: int) -> bool:
        """Remember a message; True when it was there already (its age stays)."""
        key = (source, wire_req_id, site)
        if key in self._seen:
            return True
        self._seen.add(key)
        self._order.append(key)
        if len(self._order) > self._window:
            self._seen.discard(self._order.popleft())
        return False

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: the window, oldest first."""
        return [[names.peer(peer), wire_req_id, site] for peer, wire_req_id, site in self._order]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        self._order = deque((names.peer(p), wire_req_id, site) for p, wire_req_id, site in plain)
        self._seen = set(self._order)
