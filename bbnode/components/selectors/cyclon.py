"""`Cyclon`: a peer's view of a large network, kept random by exchanging neighbours.

Rule: the enhanced shuffling of Voulgaris, Gavidia and van Steen (2005,
doi:10.1007/s10922-005-4441-x). Once in a period a node takes its oldest neighbour out of its view,
and sends it its own address and some of its neighbours; the other answers with some of its own.
What comes fills empty places, then those of the peers that were sent. So a neighbour that is gone
is taken out too, since its answer never comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from multiaddr import Multiaddr

from bbnode.components.contracts import OpContext, inbound
from bbnode.components.registry import register_component
from bbnode.components.selectors.overlay import Overlay, OverlayConfig, passable, put
from bbnode.components.selectors.records import HINTS, PeerRecord, own_record
from bbnode.components.wire_records import WireRecord, count, records
from bbnode.ir.caps import MAX_EXCHANGED
from bbnode.ir.peer import PeerId

_MAX_VIEW: Final = 1024
_MAX_AGE: Final = 1 << 20  # periods


@dataclass(frozen=True, slots=True, kw_only=True)
class AgedRecord(PeerRecord):
    """A neighbour, and for how many periods it has not been heard of."""

    age: int = field(metadata=count(_MAX_AGE), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(WireRecord):
    """A shuffle, or its answer: where the sender is, and some of its neighbours."""

    addresses: tuple[Multiaddr, ...] = field(metadata=HINTS)
    neighbours: tuple[AgedRecord, ...] = field(metadata=records(AgedRecord, MAX_EXCHANGED))


@dataclass(frozen=True, kw_only=True)
class CyclonConfig(OverlayConfig):
    """Settings of `Cyclon`; all members should have the same.

    Attributes:
        view_size: neighbours of a node (the paper's c), 2 to 1,024.
        shuffle_size: peers of one exchange, the sender among them (the paper's l), 1 to 32, and at
            most `view_size`.
    """

    view_size: int = 20
    shuffle_size: int = 8


@register_component
class Cyclon(Overlay):
    """Chooses among a random few of a large network, whom it gets to know from its neighbours."""

    TYPE_NAME: ClassVar[str] = "bbnode.Cyclon"
    Config: ClassVar[type] = CyclonConfig
    config: CyclonConfig

    def __init__(self, config: CyclonConfig) -> None:
        super().__init__(config)
        self.require(2 <= config.view_size <= _MAX_VIEW, f"view_size has to be in 2 .. {_MAX_VIEW}")
        most = min(MAX_EXCHANGED, config.view_size)
        self.require(1 <= config.shuffle_size <= most, f"shuffle_size has to be in 1 .. {most}")
        self.view: dict[PeerId, AgedRecord] = {}
        # What was sent with the shuffle that is under way, and to whom.
        self._sent: tuple[PeerId | None, list[PeerId]] = (None, [])

    def neighbours(self) -> Iterable[PeerId]:
        return self.view

    # -- a shuffle that this node begins ---------------------------------------------------------

    def cycle(self, ctx: OpContext) -> None:
        """Shuffle with the oldest neighbour; with a connected peer where there is none."""
        for peer, record in self.view.items():
            self.view[peer] = replace(record, age=min(record.age + 1, _MAX_AGE))
        oldest = max((each.age for each in self.view.values()), default=0)
        old = [peer for peer, record in self.view.items() if record.age == oldest]
        partner = self.shuffled(ctx, old)[0] if old else self.contact(ctx)
        if partner is None:
            return
        self.view.pop(partner, None)
        sent = self._some(ctx, self.config.shuffle_size - 1, partner)
        self._sent = partner, sent
        payload = self._exchange(ctx, sent).encode()
        ctx.request(partner, ctx.slot, "Shuffle", payload, tag="", deadline_ns=self.deadline_ns)

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Take what the partner answers. Raises UnusableMessage and ExchangeRefused."""
        partner = ctx.source_peer
        found = self._read(ctx, payload, self.config.shuffle_size)
        # After a restart nothing is known of what was sent.
        sent = self._sent[1] if self._sent[0] == partner else []
        was_alone = not self.view
        self._merge(ctx, found.neighbours, sent)
        if was_alone and partner is not None:
            self._merge(ctx, (AgedRecord(peer=partner, addresses=found.addresses),), sent)

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Leave out who does not answer: it is out of the view since it was asked."""

    # -- a shuffle of another ------------------------------------------------------------------

    @inbound("Shuffle")
    def shuffle(self, ctx: OpContext, payload: bytes) -> bytes:
        """Exchange neighbours with the caller. Raises UnusableMessage and ExchangeRefused."""
        caller = self.caller(ctx, request=True)
        found = self._read(ctx, payload, self.config.shuffle_size - 1)
        sent = self._some(ctx, self.config.shuffle_size, caller)
        answer = self._exchange(ctx, sent)
        self._merge(ctx, (AgedRecord(peer=caller, addresses=found.addresses),), sent)
        self._merge(ctx, found.neighbours, sent)
        return answer.encode()

    # -- both --------------------------------------------------------------------------------

    def _read(self, ctx: OpContext, payload: bytes, at_most: int) -> Exchange:
        found = self.opened(ctx, Exchange, payload)
        self.checked(ctx, found.neighbours, at_most)
        return found

    def _some(self, ctx: OpContext, n: int, but: PeerId) -> list[PeerId]:
        able = (peer for peer in passable(self.view.values()) if peer != but)
        return self.shuffled(ctx, able)[:n]

    def _exchange(self, ctx: OpContext, sent: Sequence[PeerId]) -> Exchange:
        known = tuple(self.view[peer] for peer in sent)
        return Exchange(addresses=own_record(ctx).addresses, neighbours=known)

    def _merge(self, ctx: OpContext, found: Iterable[AgedRecord], sent: list[PeerId]) -> None:
        """Take what is new, into empty places and then into those of the peers that were sent."""

        def leave() -> PeerId | None:
            while sent:
                if (peer := sent.pop()) in self.view:
                    return peer
            return None

        for record in found:
            put(ctx, self.view, record, self.config.view_size, leave)

    # -- snapshot ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the view; a shuffle that is under way is not kept."""
        return self.packed(self.view)

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take a view that was saved."""
        (self.view,) = self.unpacked(saved, AgedRecord, [self.config.view_size])
