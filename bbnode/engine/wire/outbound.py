"""The envelopes that a poll sends, packed from the fills of its ops.

Rule: sends of one poll to one peer with one correlation share an envelope, up to the caps on
fills and bytes. A peer that cannot be reached is left out with a PeerResolveFailed, and the others
still get the fill. A node's send to itself is an envelope like any other, and comes back through
the ingress.

An execution sends one-way under a fresh id, not under the id of the message that started it:
otherwise a message that goes around a ring of peers twice would be dropped as a duplicate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol, TypeAlias

from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.engine.bus import BusKind
from bbnode.engine.clock import NodeClock
from bbnode.engine.empty import EMPTY
from bbnode.engine.errors import OutboundFull, PayloadTooLarge
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ingress import Ingress, SendFailed
from bbnode.engine.limits import Limits
from bbnode.engine.newest import Newest
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.reports import Reports
from bbnode.engine.rng import SplitMix64
from bbnode.engine.tracing import Tracer
from bbnode.ir import keys
from bbnode.ir.address import REFUSED_SUFFIX
from bbnode.ir.caps import (
    MAX_ADDRESS_BYTES,
    MAX_ANSWERS_REMEMBERED,
    MAX_CAUSES_REMEMBERED,
    MAX_CLAIMED_ADDRESSES,
    MAX_FILLS,
)
from bbnode.ir.envelope import (
    Buffer,
    CorrelationKind,
    SlotFill,
    encode_between,
    encode_destination,
    encode_source,
)
from bbnode.ir.peer import PeerId

# What an envelope holds besides payloads: own and destination addresses at their caps (8 x 256
# bytes each), ids, and 64 suffixes of 11 bytes with their field heads; with room to spare.
ENVELOPE_OVERHEAD_BYTES = 8192
_FILL_OVERHEAD_BYTES = 64
_MAX_NS = (1 << 63) - 1  # what every reader of an envelope takes as a time
# Every envelope asks for these: looking a member up in its enum takes longer than comparing.
_REQUEST = int(CorrelationKind.REQUEST)
_RESPONSE = int(CorrelationKind.RESPONSE)

# A member of an enum is hashed in Python, and so is a PeerId; as number and bytes they are not.
_Key: TypeAlias = tuple[int, bytes, int]


class _Pack:
    """Fills for one peer under one correlation; made by `_pack`."""

    __slots__ = ("chain", "fills", "peer", "remaining_ns", "size")

    peer: PeerId
    chain: int
    fills: list[SlotFill]
    size: int
    remaining_ns: int


def _pack(peer: PeerId, chain: int, fill: SlotFill, size: int, remaining_ns: int) -> _Pack:
    pack = _Pack()  # without an `__init__`, which would take longer than what it does
    pack.peer = peer
    pack.chain = chain
    pack.fills = [fill]
    pack.size = size
    pack.remaining_ns = remaining_ns
    return pack


class Requests(Protocol):
    """The part of a node that waits for the answers to requests."""

    def request_is_out(self, wire_req_id: int, peer: PeerId, tag: int) -> None:
        """Handle that a request to a peer goes out in the envelope `tag`."""


@dataclass(eq=False, repr=False, kw_only=True)
class EnvelopeOutbox:
    """The fills that wait for the end of the poll.

    `requests` is told of each request that goes out, once it is set.
    """

    __slots__ = (
        "_answers",
        "_causes",
        "_limit",
        "_max_fills",
        "_pending",
        "_source",
        "_source_of",
        "_tag",
        "clock",
        "ingress",
        "max_payload",
        "neighbours",
        "packs",
        "reports",
        "requests",
        "round_trips",
        "tracer",
        "wait_ns",
        "wire_ids",
    )

    neighbours: Neighbours
    round_trips: RoundTrips
    ingress: Ingress
    clock: NodeClock
    reports: Reports
    tracer: Tracer
    limits: InitVar[Limits]
    wire_ids: SplitMix64

    def __post_init__(self, limits: Limits) -> None:
        self._limit = limits.outbound
        self.wait_ns = limits.wait_ns
        self.requests: Requests | None = None
        self.packs: dict[_Key, list[_Pack]] = {}  # what `flush` sends
        # Envelope -> the request that it answers; of the newest, while their transport has them.
        self._answers: OrderedDict[int, int] = EMPTY
        # One-way message -> the one that brought it about, and who sent that; None: this node did.
        self._causes: Newest[int, tuple[PeerId | None, int]] = Newest(MAX_CAUSES_REMEMBERED)
        self._pending = 0
        self._tag = 0
        self._source_of: Sequence[Multiaddr] | None = None
        self._source = b""
        self._max_fills = min(limits.envelope_fills or MAX_FILLS, MAX_FILLS)
        cap = limits.envelope_bytes
        # Bytes of payload that fit into one envelope; None: any number.
        self.max_payload = None if cap is None else max(cap - ENVELOPE_OVERHEAD_BYTES, 0)

    def one_way_id(self, frame: Frame) -> int:
        """Return the id under which an execution sends one-way."""
        made = frame.wire_out_id
        if not made:
            made = frame.wire_out_id = self.wire_ids.next_u64()
            if frame.site:
                self._causes.add(made, (frame.source_peer, frame.wire_req_id))
        return made

    def another_id(self, frame: Frame) -> int:
        """Return an id for one message of an execution that can't go under `one_way_id`."""
        made = self.wire_ids.next_u64()
        own = self.one_way_id(frame)
        if frame.site:
            self._causes.add(made, (frame.source_peer, frame.wire_req_id))
        else:
            self._causes.add(made, (None, own))
        return made

    def cause_of(self, message: int) -> tuple[PeerId | None, int]:
        """Return the message that brought a one-way message about, and who sent that one.

        Without a peer it is this node's own: the first of its chain. Only the newest are known.
        """
        return self._causes.entries.get(message, (None, message))

    def static_ns(self, op: Op, hops: int) -> int:
        """Return the time of a send that has so many hops before it, as the program says; or 0."""
        if op.deadline_ns and op.deadline_from == keys.DEADLINE_FROM_NOBODY:
            return min(hops * self.wait_ns, _MAX_NS)
        return op.deadline_ns

    def remaining_ns(self, frame: Frame, op: Op, hops: int, site: int) -> int:
        """Return the time budget of a send to a site now; 0 for none.

        It is the rest of the execution's deadline; else what the program says of the op; else the
        estimate from measured round trips.
        """
        if frame.deadline_ns is None:
            return self.static_ns(op, hops) or self.round_trips.estimate_ns(site)
        return max(frame.deadline_ns - self.clock.now_ns, 1)  # 0 on the wire would mean "none"

    def reachable(
        self,
        frame: Frame,
        op: Op,
        peers: Sequence[PeerId],
        suffix: bytes = b"",
        why: dict[PeerId, str] | None = None,
    ) -> list[PeerId]:
        """Return those of `peers` that can be sent to; a PeerResolveFailed step for each other.

        `suffix` is the site to send to, which a peer of another version may not have. `why` is
        given the reasons of those others.
        """
        found = []
        for peer in peers:
            reason = self.neighbours.unreachable(peer, suffix)
            if reason is None:
                found.append(peer)
            else:
                self.left_out(frame, op, peer, reason)
                if why is not None:
                    why[peer] = reason
        return found

    def left_out(self, frame: Frame, op: Op, peer: PeerId, reason: str) -> None:
        """Report a peer that a send leaves out."""
        self.reports.counts["send.unresolved"] += 1
        if not frame.from_bus:
            self.reports.bus.publish(BusKind.PEER_RESOLVE_FAILED)
        self.reports.steps.append(
            steps.PeerResolveFailed(
                peer=peer,
                op=op.name,
                execution=frame.execution,
                reason=reason,
                line=frame.plan.place_of(op).line,
            )
        )

    def check(self, op: Op, fill: SlotFill, peers: int) -> int:
        """Raise PayloadTooLarge or OutboundFull before anything of a send is stored.

        Returns the size of the fill's payload in bytes.
        """
        parts = fill.payload_parts
        # Most are one buffer: to ask a property takes longer.
        size = len(parts[0]) if len(parts) == 1 and not fill.payload else fill.payload_size
        if self.max_payload is not None and size > self.max_payload:
            raise PayloadTooLarge(
                f"{op.name}: a payload of {size} bytes; one envelope takes {self.max_payload} "
                "(limit envelope_bytes)"
            )
        limit = self._limit
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
        chain: int = 0,
    ) -> bool:
        """Queue a fill for every peer that can be reached; return False if none can."""
        size = self.check(op, fill, len(peers))
        if len(peers) != 1 or self.neighbours.unreachable(peers[0], fill.dest_suffix) is not None:
            peers = self.reachable(frame, op, peers, fill.dest_suffix)
        self.queue(frame, op, peers, fill, size, kind, wire_req_id, remaining_ns, chain)
        return len(peers) > 0

    def queue(
        self,
        frame: Frame,
        op: Op,
        peers: Sequence[PeerId],
        fill: SlotFill,
        payload_size: int,
        kind: CorrelationKind,
        wire_req_id: int,
        remaining_ns: int,
        chain: int = 0,
    ) -> None:
        """Queue a fill that was checked, for peers that were."""
        if self.tracer.on:
            self.tracer.sent(frame, op, peers, kind, wire_req_id, fill.dest_suffix)
        size = payload_size + _FILL_OVERHEAD_BYTES
        plain_kind = kind + 0
        queued = self.packs
        for peer in peers:
            key = wire_req_id, peer.raw, plain_kind
            packs = queued.get(key) if queued else None
            if packs is None:
                queued[key] = [_pack(peer, chain, fill, size, remaining_ns)]
                self._pending += 1
                continue
            pack = packs[-1]
            if len(pack.fills) >= self._max_fills or (
                self.max_payload is not None and pack.size + size > self.max_payload
            ):
                packs.append(_pack(peer, chain, fill, size, remaining_ns))
                self._pending += 1
                continue
            pack.fills.append(fill)
            pack.size += size
            # The tightest of what travels together; 0 is "none".
            if remaining_ns:
                pack.remaining_ns = min(pack.remaining_ns or remaining_ns, remaining_ns)

    def refuse(self, peer: PeerId, fill: SlotFill, kind: CorrelationKind, wire_req_id: int) -> bool:
        """Queue a refusal, once of each; return False if nothing may be said to this peer."""
        full = self._limit is not None and self._pending >= self._limit
        if full or self.neighbours.unreachable(peer) is not None:
            return False
        packs = self.packs.setdefault((wire_req_id, peer.to_bytes(), kind + 0), [])
        if any(known.dest_suffix == fill.dest_suffix for pack in packs for known in pack.fills):
            return True
        packs.append(_pack(peer, 0, fill, fill.payload_size + _FILL_OVERHEAD_BYTES, 0))
        self._pending += 1
        return True

    def flush(self) -> None:
        """Turn all queued fills into SendEnvelope steps."""
        packs, self.packs, self._pending = self.packs, {}, 0
        neighbours, reports = self.neighbours, self.reports
        source = self._source
        if neighbours.own_addresses is not self._source_of:
            source = self._source_part()
        own = neighbours.self_peer.raw
        for (wire_req_id, raw, kind), queued in packs.items():
            peer = queued[0].peer
            addresses, destination = neighbours.book.routed(peer, _destination_part)
            is_request = kind == _REQUEST
            for pack in queued:
                is_answer = kind == _RESPONSE and pack.fills[0].dest_suffix != REFUSED_SUFFIX
                told = self.round_trips.reports() if is_answer else ()
                parts = encode_between(
                    destination, pack.fills, kind, wire_req_id, pack.remaining_ns, told, source,
                    pack.chain,
                )  # fmt: skip
                if raw == own:
                    refused = self._loop_back(parts)
                    if refused and is_request:
                        self._give_up(peer, wire_req_id, refused)
                    continue
                self._tag += 1
                if is_request and self.requests is not None:
                    self.requests.request_is_out(wire_req_id, peer, self._tag)
                elif is_answer:
                    if self._answers is EMPTY:
                        self._answers = OrderedDict()
                    self._answers[self._tag] = wire_req_id
                    if len(self._answers) > MAX_ANSWERS_REMEMBERED:
                        self._answers.popitem(last=False)
                reports.counts["envelopes.out"] += 1
                reports.steps.append(steps.make_send(peer, addresses, parts, self._tag))

    def take_answered(self, tag: int) -> int:
        """Return the id of the request that an envelope answers, once; 0 if it is no answer."""
        return self._answers.pop(tag, 0)

    def answered_in(self, tags: Container[int]) -> frozenset[int]:
        """Return the ids of the requests that these envelopes answer."""
        return frozenset(wire for tag, wire in self._answers.items() if tag in tags)

    def _source_part(self) -> bytes:
        """Return the end of all envelopes of this node, from when its addresses have changed on."""
        own = self._source_of = self.neighbours.own_addresses
        self._source = encode_source(self.neighbours.self_peer.raw, _address_bytes(own))
        return self._source

    def _give_up(self, peer: PeerId, wire_req_id: int, reason: str) -> None:
        """Fail a request to this node itself, through the ingress like any failed send."""
        self._tag += 1
        if self.requests is not None:
            self.requests.request_is_out(wire_req_id, peer, self._tag)
        event = SendFailed(peer=peer, reason=reason, blames_peer=False, tag=self._tag)
        self.ingress.push(event, must=True)

    def _loop_back(self, parts: Sequence[Buffer]) -> str:
        """Push an envelope into the ingress; returns why it can't be, or ""."""
        peer, data = self.neighbours.self_peer, b"".join(parts)
        taken = self.ingress.push_inbound(peer, data, None)
        if taken == "":
            return ""
        self.reports.receive_failed(peer, -1, 0, len(data), taken, "a send to this node")
        return f"{taken}: this node has no room for its own envelope"

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: the last tag, answers, causes; no envelope waits now."""
        causes = [[i, p and p.to_bytes(), by] for i, (p, by) in self._causes.entries.items()]
        return [self._tag, list(self._answers.items()), causes]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned; of an earlier release it has no causes."""
        self._tag, answers, *causes = plain
        self._answers = OrderedDict(answers)
        for each in causes:
            for message, raw, by in each:
                peer = None if raw is None else PeerId.from_bytes(raw)
                self._causes.add(message, (peer, by))


def _destination_part(addresses: Sequence[Multiaddr]) -> bytes:
    return encode_destination(_address_bytes(addresses))


def _address_bytes(addresses: Sequence[Multiaddr]) -> tuple[bytes, ...]:
    """Return the addresses that fit into an envelope."""
    raws = [bytes(address.to_bytes()) for address in addresses]
    return tuple(raw for raw in raws if len(raw) <= MAX_ADDRESS_BYTES)[:MAX_CLAIMED_ADDRESSES]
