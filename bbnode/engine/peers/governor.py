"""Whom we talk with: block list, allow list, and health.

Rule: health is a state machine over (HEALTHY, SHAKY, DOWN) that stands below as data; five
failures in a row are down, one success is healthy. What is denied has a stable reason label.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.engine.peers.backoff_table import BackoffTable
from bbnode.ir.caps import MAX_TRACKED_PEERS
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

DEFAULT_FAILURE_THRESHOLD = 5


class Health(enum.Enum):
    """What we think of a peer."""

    HEALTHY = "healthy"
    SHAKY = "shaky"  # it failed, not often enough in a row to be down
    DOWN = "down"


class Outcome(enum.Enum):
    """What happened with a peer."""

    SUCCESS = "success"
    FAILURE = "failure"  # below the threshold
    LAST_FAILURE = "last_failure"  # the one that reaches the threshold


class Change(enum.Enum):
    """What a host should hear of."""

    WENT_DOWN = "went_down"
    CAME_UP = "came_up"


# (state, outcome) -> (next state, what to tell). Every pair is here: all moves are legal.
TRANSITIONS: dict[tuple[Health, Outcome], tuple[Health, Change | None]] = {
    (Health.HEALTHY, Outcome.SUCCESS): (Health.HEALTHY, None),
    (Health.HEALTHY, Outcome.FAILURE): (Health.SHAKY, None),
    (Health.HEALTHY, Outcome.LAST_FAILURE): (Health.DOWN, Change.WENT_DOWN),
    (Health.SHAKY, Outcome.SUCCESS): (Health.HEALTHY, None),
    (Health.SHAKY, Outcome.FAILURE): (Health.SHAKY, None),
    (Health.SHAKY, Outcome.LAST_FAILURE): (Health.DOWN, Change.WENT_DOWN),
    (Health.DOWN, Outcome.SUCCESS): (Health.HEALTHY, Change.CAME_UP),
    (Health.DOWN, Outcome.FAILURE): (Health.DOWN, None),
    (Health.DOWN, Outcome.LAST_FAILURE): (Health.DOWN, None),
}


class BlockReason(enum.Enum):
    """Why a peer is denied; the value is the label that users match on."""

    BLOCKLISTED = "blocklisted"
    NOT_ALLOWLISTED = "not_allowlisted"
    COOLDOWN = "cooldown"


@dataclass(slots=True)
class _Record:
    health: Health = Health.HEALTHY
    failures: int = 0


class PeerGovernor:
    """Policy and health of all peers."""

    def __init__(self, threshold: int = DEFAULT_FAILURE_THRESHOLD) -> None:
        self._threshold = threshold
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()
        self._blocked: set[PeerId] = set()
        self._allowed: frozenset[PeerId] | None = None
        self._down = 0  # peers in DOWN, so that the common question has a quick answer

    def block(self, peer: PeerId) -> None:
        """Deny a peer."""
        self._blocked.add(peer)

    def unblock(self, peer: PeerId) -> None:
        """Deny a peer no more."""
        self._blocked.discard(peer)

    def allow_only(self, peers: Iterable[PeerId] | None) -> None:
        """Deny everyone but these; None lifts it."""
        self._allowed = None if peers is None else frozenset(peers)

    def check_inbound(self, peer: PeerId) -> BlockReason | None:
        """Why nothing may come from a peer, or None."""
        # A PeerId is hashed in Python; most nodes block nobody.
        if self._blocked and peer in self._blocked:
            return BlockReason.BLOCKLISTED
        if self._allowed is not None and peer not in self._allowed:
            return BlockReason.NOT_ALLOWLISTED
        return None

    def check_outbound(
        self, peer: PeerId, backoff: BackoffTable, now_ns: int
    ) -> BlockReason | None:
        """Why nothing may go to a peer now, or None."""
        reason = self.check_inbound(peer)
        if reason is None and not backoff.should_retry(peer, now_ns):
            return BlockReason.COOLDOWN
        return reason

    def health(self, peer: PeerId) -> Health:
        """What we think of a peer; of a stranger the best."""
        record = self._records.get(peer)
        return Health.HEALTHY if record is None else record.health

    def any_down(self) -> bool:
        """Whether some peer is down."""
        return self._down > 0

    def record_success(self, peer: PeerId) -> Change | None:
        """A peer did what it should; CAME_UP when it was down."""
        record = self._records.pop(peer, None)
        if record is None:
            return None
        change = TRANSITIONS[record.health, Outcome.SUCCESS][1]
        self._down -= change is Change.CAME_UP
        return change

    def record_failure(self, peer: PeerId) -> Change | None:
        """A peer failed us; WENT_DOWN when that was once too often."""
        record = self._records.pop(peer, None) or _Record()
        record.failures += 1
        last = record.failures >= self._threshold
        outcome = Outcome.LAST_FAILURE if last else Outcome.FAILURE
        record.health, change = TRANSITIONS[record.health, outcome]
        self._down += change is Change.WENT_DOWN
        self._records[peer] = record
        if len(self._records) > MAX_TRACKED_PEERS:
            _, forgotten = self._records.popitem(last=False)
            self._down -= forgotten.health is Health.DOWN
        return change

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: health of all peers in order, and the lists."""
        return [
            [[names.peer(p), r.health.value, r.failures] for p, r in self._records.items()],
            [names.peer(p) for p in sorted(self._blocked)],
            None if self._allowed is None else [names.peer(p) for p in sorted(self._allowed)],
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        records, blocked, allowed = plain
        for peer, health, failures in records:
            self._records[names.peer(peer)] = _Record(Health(health), failures)
        self._down = sum(record.health is Health.DOWN for record in self._records.values())
        self._blocked = {names.peer(peer) for peer in blocked}
        self._allowed = None if allowed is None else frozenset(map(names.peer, allowed))
