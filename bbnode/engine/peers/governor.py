"""The governor of peers: block list, allow list, and health.

Rule: health is a state machine over (HEALTHY, SHAKY, DOWN), given by the table below: five failures
in a row lead to DOWN, one success to HEALTHY. A denial has a stable reason label.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from bbnode.engine.empty import EMPTY
from bbnode.engine.peers.backoff_table import BackoffTable
from bbnode.engine.snapshot.codec import (
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
    mapping,
    member,
    optional,
)
from bbnode.ir.caps import MAX_TRACKED_PEERS
from bbnode.ir.peer import PeerId

DEFAULT_FAILURE_THRESHOLD = 5


class Health(enum.Enum):
    """The health of a peer."""

    HEALTHY = "healthy"
    SHAKY = "shaky"  # it failed, but not often enough in a row to be down
    DOWN = "down"


class Outcome(enum.Enum):
    """The outcome of an exchange with a peer."""

    SUCCESS = "success"
    FAILURE = "failure"  # below the threshold
    LAST_FAILURE = "last_failure"  # the one that reaches the threshold


class Change(enum.Enum):
    """A change that is reported to the host."""

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
class _PeerHealth:
    health: Health = Health.HEALTHY
    failures: int = 0


_HEALTHS = mapping(PEER, RowForm(_PeerHealth, health=member(Health), failures=PLAIN))
_PEERS = many(PEER, frozenset)
_NOBODY: Final[frozenset[PeerId]] = frozenset()


class PeerGovernor:
    """Policy and health of all peers.

    Most nodes deny nobody: what asks with every envelope looks at `denies` first.
    """

    __slots__ = (
        "_allowed",
        "_blocked",
        "_down",
        "_records",
        "_threshold",
        "denies",
    )

    def __init__(self, threshold: int = DEFAULT_FAILURE_THRESHOLD) -> None:
        self._threshold = threshold
        self._records: OrderedDict[PeerId, _PeerHealth] = EMPTY
        self._blocked: frozenset[PeerId] = _NOBODY
        self._allowed: frozenset[PeerId] | None = None
        self.denies = False
        self._down = 0  # the number of peers in DOWN, for a quick `any_down`

    def block(self, peer: PeerId) -> None:
        """Deny a peer."""
        self._set_lists(self._blocked | {peer}, self._allowed)

    def unblock(self, peer: PeerId) -> None:
        """Deny a peer no more."""
        self._set_lists(self._blocked - {peer}, self._allowed)

    def allow_only(self, peers: Iterable[PeerId] | None) -> None:
        """Deny all peers but these; None lifts this."""
        self._set_lists(self._blocked, None if peers is None else frozenset(peers))

    def _set_lists(self, blocked: frozenset[PeerId], allowed: frozenset[PeerId] | None) -> None:
        self._blocked, self._allowed = blocked, allowed
        self.denies = bool(blocked) or allowed is not None

    def check_inbound(self, peer: PeerId) -> BlockReason | None:
        """Return the reason to refuse messages from a peer, or None."""
        if peer in self._blocked:
            return BlockReason.BLOCKLISTED
        if self._allowed is not None and peer not in self._allowed:
            return BlockReason.NOT_ALLOWLISTED
        return None

    def check_outbound(
        self, peer: PeerId, backoff: BackoffTable, now_ns: int
    ) -> BlockReason | None:
        """Return the reason not to send to a peer now, or None."""
        reason = self.check_inbound(peer)
        if reason is None and not backoff.should_retry(peer, now_ns):
            return BlockReason.COOLDOWN
        return reason

    def health(self, peer: PeerId) -> Health:
        """Return the health of a peer; of an unknown one, HEALTHY."""
        record = self._records.get(peer)
        return Health.HEALTHY if record is None else record.health

    def any_down(self) -> bool:
        """Return True if some peer is down."""
        return self._down > 0

    def record_success(self, peer: PeerId) -> Change | None:
        """Record a success of a peer; return CAME_UP if it was down."""
        record = self._records.pop(peer, None)
        if record is None:
            return None
        change = TRANSITIONS[record.health, Outcome.SUCCESS][1]
        self._down -= change is Change.CAME_UP
        return change

    def record_failure(self, peer: PeerId) -> Change | None:
        """Record a failure of a peer; return WENT_DOWN if that was one too many."""
        record = self._records.pop(peer, None) or _PeerHealth()
        record.failures += 1
        last = record.failures >= self._threshold
        outcome = Outcome.LAST_FAILURE if last else Outcome.FAILURE
        record.health, change = TRANSITIONS[record.health, outcome]
        self._down += change is Change.WENT_DOWN
        if self._records is EMPTY:
            self._records = OrderedDict()
        self._records[peer] = record
        if len(self._records) > MAX_TRACKED_PEERS:
            _, forgotten = self._records.popitem(last=False)
            self._down -= forgotten.health is Health.DOWN
        return change

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: health of all peers in order, and the lists."""
        allowed = None if self._allowed is None else sorted(self._allowed)
        return [
            _HEALTHS.save(self._records, writer),
            _PEERS.save(sorted(self._blocked), writer),
            optional(_PEERS).save(allowed, writer),
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        records, blocked, allowed = plain
        self._records = OrderedDict(_HEALTHS.load(records, reader))
        self._down = sum(record.health is Health.DOWN for record in self._records.values())
        self._set_lists(_PEERS.load(blocked, reader), optional(_PEERS).load(allowed, reader))
