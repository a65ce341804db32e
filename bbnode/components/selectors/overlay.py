"""The base of selectors that find their peers by talking with those of the same kind.

Rule: members are nodes with the same component in the slot of the same name. A period is of the
node's own time. All random choices are a pure function of the seed, of the node's PeerId and of the
number of the choice; what one member, and all together, may ask for in a period is bounded.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from bbnode.components.contracts import OpContext
from bbnode.components.errors import ExchangeRefused
from bbnode.components.selectors.records import PeerRecord, faults, learn
from bbnode.components.selectors.views import DrawingConfig, DrawingSelector
from bbnode.components.wire_records import UnusableMessage, WireRecord
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec

Record = TypeVar("Record", bound=PeerRecord)
Message = TypeVar("Message", bound=WireRecord)

S: Final = 1_000_000_000
_PERIOD: Final = "period"
# Members whose clocks and periods differ a little never come near either. Of many newcomers that
# know one member alone, those beyond are refused, and come again.
CALLS_OF_ONE: Final = 4
CALLS_OF_ALL: Final = 512
# The longest first wait: the nodes of a network that starts do not all speak at once.
_SOON_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class OverlayConfig(DrawingConfig):
    """Settings of a selector with an overlay.

    Attributes:
        period_s: seconds between two exchanges that this node begins.
        deadline_s: seconds that an answer is waited for, at most a period.
    """

    period_s: float = 10.0
    deadline_s: float = 5.0


class Overlay(DrawingSelector):
    """The contract over the neighbours that a protocol keeps, which a subclass carries out.

    Before it has any, it chooses among the connected peers, whom it asks to let it in.
    """

    Config: ClassVar[type] = OverlayConfig
    calls_of_one: ClassVar[int] = CALLS_OF_ONE  # in a period

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(0.05 <= config.period_s <= 3600, "period_s has to be in 0.05 .. 3600")
        within = 0 < config.deadline_s <= config.period_s
        self.require(within, "deadline_s has to be positive, and at most period_s")
        self.period_ns = int(config.period_s * S)
        self.deadline_ns = int(config.deadline_s * S)
        self._armed = False  # in this life of the node
        self._window_ends_ns = 0
        self._calls: Counter[PeerId] = Counter()
        self._salt = b""

    # -- what a subclass has to have -----------------------------------------------------------

    @abstractmethod
    def neighbours(self) -> Iterable[PeerId]:
        """Return the peers that the overlay has given this node."""

    @abstractmethod
    def cycle(self, ctx: OpContext) -> None:
        """Do what is to be done once in a period."""

    # -- its own time --------------------------------------------------------------------------

    def bootstrap(self, ctx: OpContext) -> None:
        """Begin, some time within the first second."""
        self._arm(ctx)

    def on_timer(self, ctx: OpContext, key: str) -> None:
        """Begin a period."""
        if key == _PERIOD:
            self._armed = True
            alone = not any(True for _ in self.neighbours())
            soon_ns = min(self.period_ns, int(_SOON_S * S))
            ctx.set_timer(_PERIOD, soon_ns if alone else self.period_ns)
            self.cycle(ctx)

    def _arm(self, ctx: OpContext) -> None:
        if not self._armed:
            self._armed = True
            ctx.set_timer(_PERIOD, self.below(ctx, min(self.period_ns, int(_SOON_S * S))))

    # -- the selector ------------------------------------------------------------------------

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        """Return the neighbours; the connected peers of the class while there is none."""
        self._arm(ctx)
        return sorted(self.neighbours()) or sorted(ctx.peers.connected(ctx.peer_class))

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        """Return `n` of `peers`, others on each node."""
        return PeerIdVec(sorted(self.shuffled(ctx, peers)[:n]))

    # -- chance ------------------------------------------------------------------------------

    def shuffled(self, ctx: OpContext, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return peers in a random order."""
        salt = self._next_salt(ctx)
        return sorted(peers, key=lambda peer: hashlib.sha256(salt + peer.to_bytes()).digest())

    def below(self, ctx: OpContext, end: int) -> int:
        """Return a random integer of 0 to end - 1, for an `end` far below 2^64."""
        return int.from_bytes(hashlib.sha256(self._next_salt(ctx)).digest()[:8], "big") % end

    def contact(self, ctx: OpContext, *, but: Iterable[PeerId] = ()) -> PeerId | None:
        """Return a random connected peer that is not among `but`, or None."""
        found = set(ctx.peers.connected()) - {ctx.self_peer, *but}
        return self.shuffled(ctx, found)[0] if found else None

    def _next_salt(self, ctx: OpContext) -> bytes:
        if not self._salt:
            seed = self._seed.to_bytes(8, "big", signed=True)
            self._salt = seed + ctx.self_peer.to_bytes()
        self._draws += 1
        return self._salt + self._draws.to_bytes(8, "big")

    # -- what others say ---------------------------------------------------------------------

    def caller(self, ctx: OpContext, *, request: bool) -> PeerId:
        """Return who calls; ExchangeRefused if too often, or with a message of the wrong kind."""
        self._arm(ctx)
        peer, said = ctx.source_peer, ctx.correlation
        if peer is None or said is None or (said.kind is CorrelationKind.REQUEST) != request:
            raise self.broken(ctx, "a message that asks for nothing" if request else "a request")
        if ctx.now_ns >= self._window_ends_ns:
            self._window_ends_ns = ctx.now_ns + self.period_ns
            self._calls.clear()
        if peer not in self._calls and len(self._calls) >= CALLS_OF_ALL:
            raise self.broken(ctx, f"over {CALLS_OF_ALL} members call in one period")
        if self._calls[peer] >= self.calls_of_one:
            raise self.broken(ctx, f"over {self.calls_of_one} calls in one period")
        self._calls[peer] += 1
        return peer

    def opened(self, ctx: OpContext, of: type[Message], payload: bytes) -> Message:
        """Return the message of a peer; UnusableMessage, which is told with the peer's name."""
        try:
            return of.decode(payload)
        except UnusableMessage as error:
            if ctx.source_peer is not None:
                ctx.refuse(ctx.source_peer, str(error))
            raise

    def broken(self, ctx: OpContext, reason: str) -> ExchangeRefused:
        """Return the error for what breaks the rules, and tell of it with the peer's name."""
        if ctx.source_peer is not None:
            ctx.refuse(ctx.source_peer, reason)
        return ExchangeRefused(component=self.TYPE_NAME, reason=reason)

    def checked(
        self, ctx: OpContext, records: Sequence[PeerRecord], at_most: int, of: PeerId | None = None
    ) -> None:
        """Raise ExchangeRefused for a list that no honest member would send, the caller or `of`."""
        wrong = faults(records, at_most, of or ctx.source_peer or ctx.self_peer)
        if wrong:
            raise self.broken(ctx, wrong)

    # -- snapshot ----------------------------------------------------------------------------

    def packed(self, *tables: Mapping[PeerId, PeerRecord]) -> dict[str, Any]:
        """Return tables of records as a `state`."""
        return {"tables": [[record.pack() for record in table.values()] for table in tables]}

    def unpacked(
        self, saved: Mapping[str, Any], of: type[Record], caps: Sequence[int]
    ) -> list[dict[PeerId, Record]]:
        """Return the tables of a `state`, with as many records of each as `caps` says."""
        tables = saved["tables"]
        if len(tables) != len(caps):
            raise ValueError(f"{len(tables)} tables; expected {len(caps)}")
        return [
            {record.peer: record for record in map(of.read, rows[:cap])}
            for rows, cap in zip(tables, caps, strict=True)
        ]


def put(
    ctx: OpContext,
    view: dict[PeerId, Record],
    record: Record,
    size: int,
    leave: Callable[[], PeerId | None],
) -> bool:
    """Add a record to a view of at most `size`, in the place of what `leave` names if it is full.

    False, and nothing changes, for this node, for a peer that is there, and where none leaves.
    """
    if record.peer == ctx.self_peer or record.peer in view:
        return False
    if len(view) >= size:
        gone = leave()
        if gone is None:
            return False
        del view[gone]
    view[record.peer] = record
    learn(ctx, record)
    return True


def passable(records: Iterable[Record]) -> list[PeerId]:
    """Return the peers of records that others can use: those with an address."""
    return [record.peer for record in records if record.addresses]
