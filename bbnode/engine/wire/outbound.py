"""From fills to envelopes.

Rule: sends of one poll to one peer with one correlation share an envelope, up to the caps on
fills and bytes. Whoever cannot be reached is left out with a PeerResolveFailed, and the
fan-out goes on. What a node sends to itself is an envelope like any other, and comes back
through the ingress.

Every one-way send of an execution has the execution's own fresh id; it does not go on under
the id that it came with: a message that goes around a ring of peers twice would be dropped
as a duplicate of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.engine.bus import BusKind
from bbnode.engine.errors import OutboundFull, PayloadTooLarge
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ingress import InboundBytes, SendFailed
from bbnode.ir.caps import MAX_ADDRESS_BYTES, MAX_CLAIMED_ADDRESSES, MAX_FILLS
from bbnode.ir.envelope import (
    Buffer,
    CorrelationKind,
    SlotFill,
    encode_between,
    encode_destination,
    encode_source,
)
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

# What an envelope holds besides payloads: own and destination addresses at their caps (8 x 256
# bytes each), ids, and 64 suffixes of 11 bytes with their field heads; with room to spare.
ENVELOPE_OVERHEAD_BYTES = 8192
_FILL_OVERHEAD_BYTES = 64
# Every envelope asks for these: looking a member up in its enum takes longer than comparing.
_REQUEST = CorrelationKind.REQUEST
_RESPONSE = CorrelationKind.RESPONSE

_Key = tuple[PeerId, CorrelationKind, int]


class _Pack:
    """Fills for one peer under one correlation."""

    __slots__ = ("fills", "remaining_ns", "size")

    def __init__(self) -> None:
        self.fills: list[SlotFill] = []
        self.size = 0
        self.remaining_ns = 0


class Outbound:
    """What this poll sends."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._packs: dict[_Key, list[_Pack]] = {}
        self._pending = 0
        self._tag = 0
        self._source_of: Sequence[Multiaddr] | None = None
        self._source = b""
        self._max_fills = min(rt.limits.envelope_fills or MAX_FILLS, MAX_FILLS)
        cap = rt.limits.envelope_bytes
        # Bytes of payload that fit into one envelope; None: any number.
        self.max_payload = None if cap is None else max(cap - ENVELOPE_OVERHEAD_BYTES, 0)

    def reachable(self, frame: Frame, op: Op, peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Those of `peers` that can be sent to; a PeerResolveFailed step for each other."""
        rt = self._rt
        found = []
        for peer in peers:
            reason = rt.neighbours.unreachable(peer)
            if reason is None:
                found.append(peer)
                continue
            rt.counts["send.unresolved"] += 1
            rt.publish(BusKind.PEER_RESOLVE_FAILED, frame)
            rt.steps.append(
                steps.PeerResolveFailed(
                    peer=peer, op=op.name, execution=frame.execution, reason=reason
                )
            )
        return tuple(found)

    def check(self, op: Op, fill: SlotFill, peers: int) -> int:
        """Raise PayloadTooLarge or OutboundFull before anything of a send is stored.

        Returns the size of the fill's payload in bytes.
        """
        size = fill.payload_size
        if self.max_payload is not None and size > self.max_payload:
            raise PayloadTooLarge(
                f"{op.name}: a payload of {size} bytes; one envelope takes {self.max_payload} "
                "(limit envelope_bytes)"
            )
        limit = self._rt.limits.outbound
        if limit is not None and self._pending + peers > limit:
            raise OutboundFull(
                f"{op.name}: {self._pending} envelopes wait and {peers} would come; "
                f"limit outbound is {limit}"
            )
        return size

    def send(
        self,
        frame: Frame,
        op: Op,
        peers: Sequence[PeerId],
        fill: SlotFill,
        kind: CorrelationKind,
        wire_req_id: int,
        remaining_ns: int,
    ) -> None:
        """Queue a fill for every peer that can be reached."""
        size = self.check(op, fill, len(peers))
        found = self.reachable(frame, op, peers)
        if self._rt.tracer is not None:
            self._rt.tracer.sent(frame, op, found, kind, wire_req_id, fill.dest_suffix)
        for peer in found:
            self.queue(peer, fill, size, kind, wire_req_id, remaining_ns)

    def queue(
        self,
        peer: PeerId,
        fill: SlotFill,
        payload_size: int,
        kind: CorrelationKind,
        wire_req_id: int,
        remaining_ns: int,
    ) -> None:
        """Queue a fill that was checked, for a peer that was."""
        packs = self._packs.setdefault((peer, kind, wire_req_id), [])
        size = payload_size + _FILL_OVERHEAD_BYTES
        pack = packs[-1] if packs else None
        full = pack is not None and (
            len(pack.fills) >= self._max_fills
            or (self.max_payload is not None and pack.size + size > self.max_payload)
        )
        if pack is None or full:
            pack = _Pack()
            packs.append(pack)
            self._pending += 1
        pack.fills.append(fill)
        pack.size += size
        # The tightest of what travels together; 0 is "none".
        if remaining_ns:
            pack.remaining_ns = min(pack.remaining_ns or remaining_ns, remaining_ns)

    def state(self, names: SavedNames) -> Any:  # noqa: ARG002 - the convention of tables
        """For a snapshot: how many were sent; between two polls nothing waits here."""
        return self._tag

    def load(self, plain: Any, names: LoadedNames) -> None:  # noqa: ARG002
        """Take up what `state` gave."""
        self._tag = plain

    def flush(self) -> None:
        """Turn everything that is queued into SendEnvelope steps."""
        if not self._packs:
            return
        packs, self._packs, self._pending = self._packs, {}, 0
        rt = self._rt
        source = self._source_part()
        for (peer, kind, wire_req_id), queued in packs.items():
            addresses, destination = rt.neighbours.book.routed(peer, _destination_part)
            reports = rt.round_trips.reports() if kind is _RESPONSE else ()
            is_request = kind is _REQUEST
            for pack in queued:
                parts = encode_between(
                    destination, pack.fills, kind, wire_req_id, pack.remaining_ns, reports, source
                )
                if peer == rt.self_peer:
                    refused = self._loop_back(parts)
                    if refused and is_request:
                        self._give_up(peer, wire_req_id, refused)
                    continue
                self._tag += 1
                if is_request:
                    self._note_request(peer, wire_req_id)
                rt.counts["envelopes.out"] += 1
                rt.steps.append(steps.make_send(peer, addresses, tuple(parts), self._tag))

    def _source_part(self) -> bytes:
        """What all envelopes of this node end with; made anew when its addresses change."""
        own = self._rt.neighbours.own_addresses
        if own is not self._source_of:
            self._source_of = own
            self._source = encode_source(self._rt.self_peer.to_bytes(), _address_bytes(own))
        return self._source

    def _note_request(self, peer: PeerId, wire_req_id: int) -> None:
        """A request goes out in the envelope of this tag: who waits for its answer is to know."""
        if not self._rt.cohorts.table.sent(wire_req_id, peer, self._tag):
            self._rt.control.calls.sent(wire_req_id, self._tag)

    def _give_up(self, peer: PeerId, wire_req_id: int, reason: str) -> None:
        """A request to this node itself did not get through: as of any failed send, it is heard
        through the ingress.
        """
        self._tag += 1
        self._note_request(peer, wire_req_id)
        event = SendFailed(peer=peer, reason=reason, blames_peer=False, tag=self._tag)
        self._rt.ingress.push(event, must=True)

    def _loop_back(self, parts: Sequence[Buffer]) -> str:
        """Take an envelope in again; why it can't be, or ""."""
        rt = self._rt
        data = b"".join(parts)
        charge = rt.ingress.budget.charge(len(data))
        if charge is None:
            rt.refuse(rt.self_peer, -1, 0, len(data), "BudgetExceeded", "a send to this node")
            return "BudgetExceeded: this node has no room for its own envelope"
        event = InboundBytes(peer=rt.self_peer, data=data, observed=None, charge=charge)
        if not rt.ingress.push(event):
            charge.release()
            rt.refuse(rt.self_peer, -1, 0, len(data), "IngressFull", "a send to this node")
            return "IngressFull: this node has no room for its own envelope"
        return ""


def _destination_part(addresses: Sequence[Multiaddr]) -> bytes:
    return encode_destination(_address_bytes(addresses))


def _address_bytes(addresses: Sequence[Multiaddr]) -> tuple[bytes, ...]:
    """What fits of the addresses into an envelope."""
    raws = [bytes(address.to_bytes()) for address in addresses]
    return tuple(raw for raw in raws if len(raw) <= MAX_ADDRESS_BYTES)[:MAX_CLAIMED_ADDRESSES]
