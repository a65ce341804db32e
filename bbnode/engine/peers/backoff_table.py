"""Backoff: when a peer that failed may be tried again.

Rule: the state of a peer is untracked, or (attempts, next_retry). A failure adds an attempt
and waits 10 ms x 2^(attempts-1), at most 60 s; a success forgets the peer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from bbnode.engine.empty import EMPTY
from bbnode.engine.snapshot.codec import (
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    mapping,
)
from bbnode.ir.caps import MAX_TRACKED_PEERS
from bbnode.ir.peer import PeerId

BASE_DELAY_NS = 10_000_000  # 10 ms
MAX_DELAY_NS = 60_000_000_000  # 60 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """A peer that failed `attempts` times in a row."""

    attempts: int
    next_retry_ns: int


_PEERS = mapping(PEER, RowForm(Backoff, attempts=PLAIN, next_retry_ns=PLAIN))


def delay_for(attempts: int) -> int:
    """Return the nanoseconds to wait after the given number of failures in a row (1 or more)."""
    doublings = min(attempts - 1, 32)  # far beyond the cap; keeps the shift small
    return min(BASE_DELAY_NS << doublings, MAX_DELAY_NS)


class BackoffTable:
    """Backoff of all peers that failed."""

    __slots__ = ("peers",)

    def __init__(self) -> None:
        self.peers: OrderedDict[PeerId, Backoff] = EMPTY

    def __len__(self) -> int:
        return len(self.peers)

    def get(self, peer: PeerId) -> Backoff | None:
        """Return the state of a peer, or None when it is untracked."""
        return self.peers.get(peer)

    def record_failure(self, peer: PeerId, now_ns: int) -> Backoff:
        """Count one more failure in a row."""
        known = self.peers.pop(peer, None)
        attempts = 1 if known is None else known.attempts + 1
        state = Backoff(attempts=attempts, next_retry_ns=now_ns + delay_for(attempts))
        if self.peers is EMPTY:
            self.peers = OrderedDict()
        self.peers[peer] = state
        if len(self.peers) > MAX_TRACKED_PEERS:
            self.peers.popitem(last=False)
        return state

    def record_success(self, peer: PeerId) -> None:
        """Forget a peer's failures."""
        self.peers.pop(peer, None)

    def should_retry(self, peer: PeerId, now_ns: int) -> bool:
        """Return True if a peer may be tried at `now_ns`."""
        if not self.peers:
            return True
        state = self.peers.get(peer)
        return state is None or now_ns >= state.next_retry_ns

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all peers, the one that failed longest ago first."""
        return _PEERS.save(self.peers, writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self.peers = OrderedDict(_PEERS.load(plain, reader))
