"""Which messages came already.

Rule: a message is named by (source peer, wire_req_id, site); the last 8,192 names are kept
and the oldest goes. It is not named by a hash of its payload: the same weights sent twice
are two messages, and a retransmission of one message is one, whatever it carries.
"""

from __future__ import annotations

from bbnode.ir.peer import PeerId

DEFAULT_WINDOW = 8192

DedupKey = tuple[PeerId, int, int]


class InboundDedup:
    """A sliding window of names."""

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self._window = window
        # A dict keeps insertion order, and forgets its first key in O(1) amortised.
        self._seen: dict[DedupKey, None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, source: PeerId, wire_req_id: int, site: int) -> bool:
        """Remember a message; True when it was there already (its age stays)."""
        key = (source, wire_req_id, site)
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > self._window:
            del self._seen[next(iter(self._seen))]
        return False
