"""`RandomWalk`: peers that walks over the connections of a network ended at, each as likely.

Rule: a walk is a Metropolis-Hastings chain whose target is the uniform distribution: from a peer of
degree d it asks a random neighbour, which takes it over with probability min(1, d / its own
degree); else it stays for that hop. Where it ends, that peer itself tells who began it, so that a
walk can lead to nobody who does not say so himself. A walk that is lost is begun once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from multiaddr import Multiaddr

from bbnode.components.contracts import OpContext, inbound
from bbnode.components.registry import register_component
from bbnode.components.selectors.cyclon import AgedRecord
from bbnode.components.selectors.overlay import Overlay, OverlayConfig
from bbnode.components.selectors.records import HINTS, PeerRecord, learn, own_record
from bbnode.components.wire_records import COUNT, FLAG, PEER, WireRecord, count
from bbnode.ir.peer import PeerId

_MAX_HOPS: Final = 256
_MAX_WALKS: Final = 64
_MAX_POOL: Final = 1024
_MAX_PASSED_ON: Final = 512  # walks of others that this node is handing on at a time
_CALLS_OF_ONE: Final = 256
# Periods for which a connected peer that takes no walks is passed by: one of another class, say.
_PASSED_BY_PERIODS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep(WireRecord):
    """A walk that a peer of `degree` neighbours hands on."""

    peer: PeerId = field(metadata=PEER)  # who began it
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    number: int = field(metadata=COUNT)
    hops: int = field(metadata=count(_MAX_HOPS))  # that are left
    degree: int = field(metadata=count(1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer(WireRecord):
    """Says if the walk went on to the peer that was asked."""

    taken: bool = field(metadata=FLAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkEnd(WireRecord):
    """The end of the walk of that number, at the sender."""

    number: int = field(metadata=COUNT)
    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)


@dataclass(frozen=True, kw_only=True)
class RandomWalkConfig(OverlayConfig):
    """Settings of `RandomWalk`; all members should have the same.

    Attributes:
        hops: of a walk, 1 to 256: several times the logarithm of the number of peers.
        walks: that a node begins in a period, 1 to 64.
        pool_size: peers at which walks ended that are kept, the newest; 1 to 1,024.
    """

    hops: int = 16
    walks: int = 2
    pool_size: int = 16


@register_component
class RandomWalk(Overlay):
    """Chooses among peers that its walks ended at, which are drawn evenly from the network."""

    TYPE_NAME: ClassVar[str] = "bbnode.RandomWalk"
    Config: ClassVar[type] = RandomWalkConfig
    config: RandomWalkConfig
    calls_of_one: ClassVar[int] = _CALLS_OF_ONE

    def __init__(self, config: RandomWalkConfig) -> None:
        super().__init__(config)
        for name, most in (("hops", _MAX_HOPS), ("walks", _MAX_WALKS), ("pool_size", _MAX_POOL)):
            self.require(1 <= getattr(config, name) <= most, f"{name} has to be in 1 .. {most}")
        self.pool: dict[PeerId, AgedRecord] = {}  # the newest last
        self.lost = 0  # walks without an end
        self._own: dict[int, bool] = {}  # the walks of this node: True for a second attempt
        self._handed_on: dict[str, WalkStep] = {}  # by tag
        self._passed_by: dict[PeerId, int] = {}  # and for how many periods more

    def neighbours(self) -> Iterable[PeerId]:
        return self.pool

    # -- its own walks ---------------------------------------------------------------------------

    def cycle(self, ctx: OpContext) -> None:
        """Begin walks, and forget peers that no walk has ended at for long."""
        grown = {peer: replace(record, age=record.age + 1) for peer, record in self.pool.items()}
        oldest = 2 * self.config.pool_size // self.config.walks + 2
        self.pool = {peer: record for peer, record in grown.items() if record.age <= oldest}
        self._passed_by = {peer: n - 1 for peer, n in self._passed_by.items() if n > 1}
        for _ in range(self.config.walks):
            self._begin(ctx, again=False)

    def on_timer(self, ctx: OpContext, key: str) -> None:
        """Begin a period, or give a walk up and begin it once more."""
        kind, _, number = key.partition(" ")
        if kind != "walk":
            super().on_timer(ctx, key)
            return
        again = self._own.pop(int(number), None)
        if again is not None:
            self.lost += 1
            if not again:
                self._begin(ctx, again=True)

    def _begin(self, ctx: OpContext, *, again: bool) -> None:
        if len(self._own) >= 2 * _MAX_WALKS or not self._around(ctx):
            return
        number = self.below(ctx, 1 << 63)
        self._own[number] = again
        ctx.set_timer(f"walk {number}", self.deadline_ns)
        where = own_record(ctx)
        walk = WalkStep(
            peer=where.peer,
            addresses=where.addresses,
            number=number,
            hops=self.config.hops,
            degree=1,
        )
        self._go_on(ctx, walk)

    @inbound("Arrived")
    def arrived(self, ctx: OpContext, payload: bytes) -> None:
        """Take the peer at which a walk ended. Raises UnusableMessage and ExchangeRefused."""
        peer = self.caller(ctx, request=False)
        end = self.opened(ctx, WalkEnd, payload)
        if self._own.pop(end.number, None) is None:
            raise self.broken(ctx, "the end of a walk that is not under way")
        ctx.cancel_timer(f"walk {end.number}")
        record = AgedRecord(peer=peer, addresses=end.addresses)
        self.pool.pop(peer, None)
        self.pool[peer] = record
        learn(ctx, record)
        while len(self.pool) > self.config.pool_size:
            del self.pool[next(iter(self.pool))]

    def on_peer_down(self, ctx: OpContext, peer: PeerId) -> None:
        """Leave out a peer whose connection was lost."""
        self.pool.pop(peer, None)

    # -- every walk ----------------------------------------------------------------------------

    def _around(self, ctx: OpContext) -> set[PeerId]:
        """Return the neighbours of this node in the graph that is walked over."""
        return set(ctx.peers.connected()) - {ctx.self_peer} - self._passed_by.keys()

    def _go_on(self, ctx: OpContext, walk: WalkStep) -> None:
        """Hand a walk that is here to a neighbour, or end it."""
        around = self._around(ctx)
        if walk.hops and around:
            if len(self._handed_on) >= _MAX_PASSED_ON:
                # It is lost, and who began it notices.
                ctx.refuse(walk.peer, f"{_MAX_PASSED_ON} walks are handed on already")
                return
            following = self.shuffled(ctx, around)[0]
            passed = replace(walk, hops=walk.hops - 1, degree=len(around))
            tag = str(self._draws)
            self._handed_on[tag] = passed
            payload, limit_ns = passed.encode(), self.deadline_ns
            ctx.request(following, ctx.slot, "Step", payload, tag=tag, deadline_ns=limit_ns)
        elif walk.peer != ctx.self_peer:
            learn(ctx, PeerRecord(peer=walk.peer, addresses=walk.addresses))
            end = WalkEnd(number=walk.number, addresses=own_record(ctx).addresses)
            ctx.send(walk.peer, ctx.slot, "Arrived", end.encode())
        elif (again := self._own.pop(walk.number, None)) is not None:
            # It came home, which is nobody to choose: another one, instead.
            ctx.cancel_timer(f"walk {walk.number}")
            self._begin(ctx, again=again)

    @inbound("Step")
    def step(self, ctx: OpContext, payload: bytes) -> bytes:
        """Take a walk over, or leave it where it is. Raises UnusableMessage and ExchangeRefused."""
        self.caller(ctx, request=True)
        walk = self.opened(ctx, WalkStep, payload)
        if walk.hops >= self.config.hops or walk.degree < 1:
            raise self.broken(
                ctx,
                f"a walk with {walk.hops} hops left, from a degree of {walk.degree}; "
                f"hops here is {self.config.hops}",
            )
        degree = max(1, len(self._around(ctx)))
        taken = degree <= walk.degree or self.below(ctx, degree) < walk.degree
        if taken:
            self._go_on(ctx, walk)
        return StepAnswer(taken=taken).encode()

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Go on with a walk that stays here."""
        walk = self._handed_on.pop(tag, None)
        if walk is not None and not self.opened(ctx, StepAnswer, payload).taken:
            self._go_on(ctx, walk)

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Pass by a peer that takes no walks, and go on without it."""
        self._passed_by[peer] = _PASSED_BY_PERIODS
        self.pool.pop(peer, None)
        walk = self._handed_on.pop(tag, None)
        if walk is not None:
            self._go_on(ctx, walk)

    # -- snapshot ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the pool; walks that are under way are not kept."""
        return self.packed(self.pool)

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take a pool that was saved."""
        (self.pool,) = self.unpacked(saved, AgedRecord, [self.config.pool_size])
