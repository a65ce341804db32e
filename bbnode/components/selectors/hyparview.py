"""`HyParView`: a small active view that is symmetric and connected, a larger passive one behind it.

Rule: the protocol of Leitão, Pereira and Rodrigues (2007, doi:10.1109/DSN.2007.56). Active
neighbours have each other; a lost connection is noticed at once, and a peer of the passive view
takes the place. Joins and shuffles are random walks over active views. Where a neighbour turns
out not to have this node any more, it is told so, which makes views symmetric again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from multiaddr import Multiaddr

from bbnode.components.contracts import OpContext, inbound
from bbnode.components.registry import register_component
from bbnode.components.selectors.overlay import Overlay, OverlayConfig, passable, put
from bbnode.components.selectors.records import HINTS, PeerRecord, learn, own_record
from bbnode.components.wire_records import COUNT, FLAG, PEER, WireRecord, count, records
from bbnode.ir.caps import MAX_EXCHANGED
from bbnode.ir.peer import PeerId

_MAX_ACTIVE: Final = 64
_MAX_PASSIVE: Final = 1024
_MAX_WALK: Final = 32  # hops
# A member passes on the joins and shuffles of others: of many that join at once, too.
_CALLS_OF_ONE: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction(WireRecord):
    """The addresses of the sender: a join, and its answer."""

    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourRequest(WireRecord):
    """Asks to be an active neighbour; `urgent`: of one that has none, which is not turned away."""

    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    urgent: bool = field(metadata=FLAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourAnswer(WireRecord):
    """Says if who asked is a neighbour now, and where the sender is."""

    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    accepted: bool = field(metadata=FLAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedJoin(WireRecord):
    """A newcomer, on its walk."""

    peer: PeerId = field(metadata=PEER)
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    hops: int = field(metadata=count(_MAX_WALK))  # that are left


@dataclass(frozen=True, slots=True, kw_only=True)
class PassiveShuffle(WireRecord):
    """Peers that a member offers, on their walk to one that answers it."""

    peer: PeerId = field(metadata=PEER)  # who began it
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    hops: int = field(metadata=count(_MAX_WALK))
    number: int = field(metadata=COUNT)
    offered: tuple[PeerRecord, ...] = field(metadata=records(PeerRecord, MAX_EXCHANGED))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleReply(WireRecord):
    """The answer to the shuffle of that number."""

    number: int = field(metadata=COUNT)
    offered: tuple[PeerRecord, ...] = field(metadata=records(PeerRecord, MAX_EXCHANGED))


@dataclass(frozen=True, kw_only=True)
class HyParViewConfig(OverlayConfig):
    """Settings of `HyParView`; all members should have the same. The defaults are the paper's.

    Attributes:
        active_size: neighbours of a node, which it floods to; 2 to 64.
        passive_size: peers that stand by, 2 to 1,024.
        active_walk: hops of a join until the newcomer is taken as a neighbour (ARWL), 1 to 32.
        passive_walk: hops before that end at which it is taken into a passive view (PRWL).
        shuffle_active: peers of the active view that a shuffle offers (ka).
        shuffle_passive: peers of the passive view that a shuffle offers (kp).
    """

    active_size: int = 5
    passive_size: int = 30
    active_walk: int = 6
    passive_walk: int = 3
    shuffle_active: int = 3
    shuffle_passive: int = 4


@register_component
class HyParView(Overlay):
    """Chooses among a few active neighbours, which are replaced as soon as they fail."""

    TYPE_NAME: ClassVar[str] = "bbnode.HyParView"
    Config: ClassVar[type] = HyParViewConfig
    config: HyParViewConfig
    calls_of_one: ClassVar[int] = _CALLS_OF_ONE

    def __init__(self, config: HyParViewConfig) -> None:
        super().__init__(config)
        for name, least, most in (
            ("active_size", 2, _MAX_ACTIVE),
            ("passive_size", 2, _MAX_PASSIVE),
            ("active_walk", 1, _MAX_WALK),
            ("passive_walk", 0, config.active_walk),
            ("shuffle_active", 0, MAX_EXCHANGED),
            ("shuffle_passive", 0, MAX_EXCHANGED - config.shuffle_active),
        ):
            within = least <= getattr(config, name) <= most
            self.require(within, f"{name} has to be in {least} .. {most}")
        self.active: dict[PeerId, PeerRecord] = {}
        self.passive: dict[PeerId, PeerRecord] = {}
        self._asked: PeerId | None = None  # to be a neighbour; one at a time
        self._tried: set[PeerId] = set()  # in this period
        self._shuffle: tuple[int, list[PeerId]] | None = None  # its number, and what was offered

    def neighbours(self) -> Iterable[PeerId]:
        return self.active

    # -- once in a period ------------------------------------------------------------------------

    def cycle(self, ctx: OpContext) -> None:
        """Replace who is gone, join where nobody is left, and shuffle the passive view."""
        for peer in self.active.keys() - set(ctx.peers.connected()):
            del self.active[peer]
        self._tried.clear()
        self._asked = None
        if not self.active and not self.passive:
            known = self.contact(ctx)
            if known is not None:
                self._request(ctx, known, "Join", _where(ctx, Introduction))
            return
        self._fill(ctx)
        if self.active:
            self._begin_shuffle(ctx)

    def on_peer_down(self, ctx: OpContext, peer: PeerId) -> None:
        """Replace an active neighbour whose connection was lost."""
        if self.active.pop(peer, None) is not None:
            self._fill(ctx)

    def _fill(self, ctx: OpContext) -> None:
        """Ask a passive peer to be a neighbour, if there is room for one."""
        if self._asked is not None or len(self.active) >= self.config.active_size:
            return
        standing_by = self.shuffled(ctx, self.passive.keys() - self._tried)
        if standing_by:
            self._asked = standing_by[0]
            self._ask_to_be_neighbour(ctx, self._asked, urgent=not self.active)

    def _ask_to_be_neighbour(self, ctx: OpContext, peer: PeerId, *, urgent: bool) -> None:
        self._request(ctx, peer, "Neighbour", _where(ctx, NeighbourRequest, urgent=urgent))

    def _request(self, ctx: OpContext, peer: PeerId, op: str, message: WireRecord) -> None:
        payload = message.encode()
        ctx.request(peer, ctx.slot, op, payload, tag=op, deadline_ns=self.deadline_ns)

    # -- answers -----------------------------------------------------------------------------

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Take whom this node joined, or who agreed to be a neighbour. Raises UnusableMessage."""
        peer = ctx.source_peer or ctx.self_peer
        if tag == "Join":
            found = self.opened(ctx, Introduction, payload)
            self._activate(ctx, PeerRecord(peer=peer, addresses=found.addresses))
            return
        if peer == self._asked:
            self._asked = None
        self._tried.add(peer)
        answer = self.opened(ctx, NeighbourAnswer, payload)
        if answer.accepted:
            self._activate(ctx, PeerRecord(peer=peer, addresses=answer.addresses))
        self._fill(ctx)

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Forget a peer that does not answer, and ask the next."""
        if peer == self._asked:
            self._asked = None
        self._tried.add(peer)
        self.passive.pop(peer, None)
        self._fill(ctx)

    # -- neighbours ----------------------------------------------------------------------------

    @inbound("Join")
    def join(self, ctx: OpContext, payload: bytes) -> bytes:
        """Take a newcomer as a neighbour and send it on walks. Raises UnusableMessage."""
        peer = self.caller(ctx, request=True)
        said = self.opened(ctx, Introduction, payload)
        self._activate(ctx, PeerRecord(peer=peer, addresses=said.addresses))
        walk = ForwardedJoin(peer=peer, addresses=said.addresses, hops=self.config.active_walk)
        for other in sorted(self.active.keys() - {peer}):
            ctx.send(other, ctx.slot, "ForwardJoin", walk.encode())
        return _where(ctx, Introduction).encode()

    @inbound("ForwardJoin")
    def forward_join(self, ctx: OpContext, payload: bytes) -> None:
        """Take a newcomer, or pass it on. Raises UnusableMessage and ExchangeRefused."""
        sender = self.caller(ctx, request=False)
        walk = self.opened(ctx, ForwardedJoin, payload)
        self._check_walk(ctx, walk.hops)
        newcomer = PeerRecord(peer=walk.peer, addresses=walk.addresses)
        if walk.peer == ctx.self_peer:
            return
        if walk.hops == self.config.passive_walk:
            self._stand_by(ctx, newcomer, [])
        following = self._next(ctx, sender, walk.peer) if walk.hops else None
        if following is not None and len(self.active) > 1:
            passed = replace(walk, hops=walk.hops - 1)
            ctx.send(following, ctx.slot, "ForwardJoin", passed.encode())
        elif walk.peer not in self.active:
            learn(ctx, newcomer)
            self._ask_to_be_neighbour(ctx, walk.peer, urgent=True)

    @inbound("Neighbour")
    def neighbour(self, ctx: OpContext, payload: bytes) -> bytes:
        """Become a neighbour of the caller if it is urgent or there is room."""
        peer = self.caller(ctx, request=True)
        said = self.opened(ctx, NeighbourRequest, payload)
        record = PeerRecord(peer=peer, addresses=said.addresses)
        has_room = len(self.active) < self.config.active_size
        accepted = said.urgent or has_room or peer in self.active
        if accepted:
            self._activate(ctx, record)
        else:
            self._stand_by(ctx, record, [])
        return _where(ctx, NeighbourAnswer, accepted=accepted).encode()

    @inbound("Disconnect")
    def disconnect(self, ctx: OpContext, payload: bytes) -> None:
        """Move who gives this node up to those that stand by, and look for another."""
        peer = self.caller(ctx, request=False)
        record = self.active.pop(peer, None)
        if record is not None:
            self._tried.add(peer)
            self._stand_by(ctx, record, [])
            self._fill(ctx)

    def _activate(self, ctx: OpContext, record: PeerRecord) -> None:
        """Make a peer a neighbour, in the place of a random one where there is no room."""

        def leave() -> PeerId:
            return self.shuffled(ctx, self.active)[0]

        full = dict(self.active)
        if not put(ctx, self.active, record, self.config.active_size, leave):
            return
        self.passive.pop(record.peer, None)
        for gone in full.keys() - self.active.keys():
            ctx.send(gone, ctx.slot, "Disconnect", b"")
            self._stand_by(ctx, full[gone], [])

    # -- the passive view ------------------------------------------------------------------------

    def _begin_shuffle(self, ctx: OpContext) -> None:
        partner = self.shuffled(ctx, self.active)[0]
        near = self.shuffled(ctx, (p for p in passable(self.active.values()) if p != partner))
        far = self.shuffled(ctx, passable(self.passive.values()))
        near, far = near[: self.config.shuffle_active], far[: self.config.shuffle_passive]
        offered = [self.active[p] for p in near] + [self.passive[p] for p in far]
        number = self.below(ctx, 1 << 63)
        self._shuffle = number, far
        walk = PassiveShuffle(
            peer=ctx.self_peer,
            addresses=own_record(ctx).addresses,
            hops=self.config.active_walk,
            number=number,
            offered=tuple(offered),
        )
        ctx.send(partner, ctx.slot, "Shuffle", walk.encode())

    @inbound("Shuffle")
    def shuffle(self, ctx: OpContext, payload: bytes) -> None:
        """Answer a shuffle, or pass it on. Raises UnusableMessage and ExchangeRefused."""
        sender = self.caller(ctx, request=False)
        walk = self.opened(ctx, PassiveShuffle, payload)
        self._check_walk(ctx, walk.hops)
        self._check_offer(ctx, walk.offered, walk.peer)
        if sender not in self.active:
            ctx.send(sender, ctx.slot, "Disconnect", b"")
        if walk.peer == ctx.self_peer:
            return
        following = self._next(ctx, sender, walk.peer) if walk.hops else None
        if following is not None and len(self.active) > 1:
            passed = replace(walk, hops=walk.hops - 1)
            ctx.send(following, ctx.slot, "Shuffle", passed.encode())
            return
        origin = PeerRecord(peer=walk.peer, addresses=walk.addresses)
        able = (p for p in passable(self.passive.values()) if p != walk.peer)
        sent = self.shuffled(ctx, able)[: len(walk.offered) + 1]
        learn(ctx, origin)
        reply = ShuffleReply(number=walk.number, offered=tuple(self.passive[p] for p in sent))
        ctx.send(walk.peer, ctx.slot, "ShuffleReply", reply.encode())
        for record in (origin, *walk.offered):
            self._stand_by(ctx, record, sent)

    @inbound("ShuffleReply")
    def shuffle_reply(self, ctx: OpContext, payload: bytes) -> None:
        """Take what a member answers. Raises UnusableMessage and ExchangeRefused."""
        peer = self.caller(ctx, request=False)
        reply = self.opened(ctx, ShuffleReply, payload)
        if self._shuffle is None or self._shuffle[0] != reply.number:
            raise self.broken(ctx, "an answer that nobody asked for")
        self._check_offer(ctx, reply.offered, peer)
        sent, self._shuffle = self._shuffle[1], None
        for record in reply.offered:
            self._stand_by(ctx, record, sent)

    def _stand_by(self, ctx: OpContext, record: PeerRecord, sent: list[PeerId]) -> None:
        """Put a peer into the passive view, first into the places of those that were `sent`."""

        def leave() -> PeerId:
            while sent:
                if (peer := sent.pop()) in self.passive:
                    return peer
            return self.shuffled(ctx, self.passive)[0]

        if record.peer not in self.active:
            put(ctx, self.passive, record, self.config.passive_size, leave)

    # -- walks -------------------------------------------------------------------------------

    def _next(self, ctx: OpContext, *but: PeerId) -> PeerId | None:
        able = self.shuffled(ctx, self.active.keys() - {*but})
        return able[0] if able else None

    def _check_walk(self, ctx: OpContext, hops: int) -> None:
        if hops > self.config.active_walk:
            most = self.config.active_walk
            raise self.broken(ctx, f"a walk of {hops} more hops; active_walk here is {most}")

    def _check_offer(self, ctx: OpContext, offered: Sequence[PeerRecord], origin: PeerId) -> None:
        most = self.config.shuffle_active + self.config.shuffle_passive + 1
        self.checked(ctx, offered, most, origin)

    # -- snapshot ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return both views; requests that are under way are not kept."""
        return self.packed(self.active, self.passive)

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take views that were saved."""
        caps = self.config.active_size, self.config.passive_size
        self.active, self.passive = self.unpacked(saved, PeerRecord, caps)


def _where(ctx: OpContext, of: type[WireRecord], **fields: Any) -> WireRecord:
    """Return a message that says where this node is."""
    made: Any = of
    said: WireRecord = made(addresses=own_record(ctx).addresses, **fields)
    return said
