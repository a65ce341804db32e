"""From envelopes to executions.

Rule: an envelope is somebody else's claim. Its peer is the authenticated one; size, caps,
correlation, site, the class of the sender and type are checked before a payload is decoded; what
is wrong with one fill is told in a step and its siblings are delivered. Nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from bbnode.components.contracts import Backend
from bbnode.engine.errors import STOPS, describe
from bbnode.engine.ingress import InboundBytes
from bbnode.engine.planning.sites import RecvSite, ResponseSite, accepts
from bbnode.engine.requests import Verdict
from bbnode.ir import codec, types
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireEnvelope,
)
from bbnode.ir.envelope_reader import decode_envelope
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import TRIGGER, Value, WireRequestId

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime


_TENSOR = TypeKind.TENSOR


class Inbound:
    """Takes the envelopes of one node."""

    def __init__(self, rt: Runtime, sites: Mapping[bytes, RecvSite | ResponseSite]) -> None:
        self._rt = rt
        self._sites = sites

    def receive(self, event: InboundBytes) -> None:
        """Take one envelope; its charge is released here unless an execution holds on to it."""
        rt = self._rt
        rt.counts["envelopes.in"] += 1
        envelope = self._open(event)
        if envelope is not None:
            self._learn(event, envelope)
            for index in range(len(envelope.fills)):
                self._fill(event, envelope, index)
        event.charge.release()

    def _open(self, event: InboundBytes) -> WireEnvelope | None:
        rt = self._rt
        limits = rt.limits
        try:
            # Its size was looked at before it was let in.
            envelope = decode_envelope(event.data, max_bytes=len(event.data))
            _check_count(envelope.fills, limits.envelope_fills, "fills")
            _check_count(envelope.src_peer_addresses, limits.sender_addresses, "claimed addresses")
            cap = limits.sender_address_bytes
            for raw in envelope.src_peer_addresses:
                if cap is not None and len(raw) > cap:
                    raise DecodeError(
                        f"an envelope with a claimed address of {len(raw)} bytes; at most {cap} "
                        "are taken"
                    )
        except DecodeError as error:
            rt.refuse(event.peer, -1, 0, len(event.data), "DecodeFailed", str(error))
            rt.show(rt.neighbours.failed(event.peer, "undecodable envelope", rt.now_ns))
            return None
        if envelope.src_peer_bytes != event.peer.to_bytes():
            # Whoever sent it is known from the connection; it claims to be somebody else.
            rt.counts["receive.forged"] += 1
            return None
        return envelope

    def _learn(self, event: InboundBytes, envelope: WireEnvelope) -> None:
        """Take over addresses: claimed ones first, then where it came from."""
        if event.peer == self._rt.self_peer:
            return
        book = self._rt.neighbours.book
        if envelope.src_peer_addresses:
            refused = book.merge_claimed(event.peer, envelope.src_peer_addresses)
            if refused:
                self._rt.counts["addresses.refused"] += refused
        if event.observed is not None and not book.observe(event.peer, event.observed):
            self._rt.counts["addresses.refused"] += 1

    def _fill(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> None:
        fill = envelope.fills[index]
        site = self._sites.get(fill.dest_suffix)
        if site is None:
            if self._rt.control.receive(event, envelope, index):
                return
            self._refuse(
                event.peer,
                index,
                fill,
                "UnknownSite",
                f"nothing here receives at {fill.dest_suffix.hex() or 'an empty suffix'}",
            )
            return
        kind = envelope.correlation.kind
        if isinstance(site, ResponseSite):
            wanted = CorrelationKind.RESPONSE
        else:
            wanted = CorrelationKind.REQUEST if site.is_request else CorrelationKind.NONE
        if kind is not wanted:
            self._refuse(
                event.peer,
                index,
                fill,
                "CorrelationMismatch",
                f"{site.name} takes {wanted.name}, the envelope says {kind.name}",
            )
        elif isinstance(site, ResponseSite):
            self._response(event, envelope, index, site)
        elif self._may_send(event.peer, index, fill, site):
            self._deliver(event, envelope, index, site)

    def _may_send(
        self, peer: PeerId, index: int, fill: SlotFill, site: RecvSite | ResponseSite
    ) -> bool:
        """Whether a peer plays a class that sends to a site; refuses the fill where not.

        What it plays says the hello that was accepted, which in a private network is no more than
        its membership grants. A peer that never said hello, or is gone, plays nothing.
        """
        rt = self._rt
        classes = rt.neighbours.peers.classes_of(peer)
        if not site.senders.isdisjoint(classes) or peer == rt.self_peer:
            return True
        self._refuse(
            peer,
            index,
            fill,
            "SenderNotOfClass",
            f"{site.name} takes from {', '.join(sorted(site.senders))}, the peer plays "
            f"{', '.join(classes) or 'no class'}",
        )
        return False

    # -- one-way and requests ----------------------------------------------------------------

    def _deliver(
        self, event: InboundBytes, envelope: WireEnvelope, index: int, site: RecvSite
    ) -> None:
        rt = self._rt
        fill = envelope.fills[index]
        node = accepts(site, fill.type_hash)
        if fill.trigger_only and not site.trigger_only and not isinstance(node, str):
            node = "TypeMismatch"
        if isinstance(node, str):
            expected = site.type_hash if site.type_hash is not None else 0
            self._refuse(
                event.peer,
                index,
                fill,
                node,
                f"{site.name} expects {_type_text(site.declared, expected)}, the fill is "
                f"{_hash_text(fill.type_hash)}{' without payload' if fill.trigger_only else ''}",
            )
            return
        if fill.trigger_only:
            value: Value = TRIGGER
        else:
            made = self._decode(event.peer, index, fill, node, site.slot)
            if made is None:
                return
            value = made
        frame = rt.start(site.plan, rt.next_execution())
        if frame is None:
            return
        frame.source_peer = event.peer
        frame.wire_req_id = envelope.correlation.wire_req_id
        frame.site = site.site
        frame.charges = [event.charge.hold()]
        if envelope.remaining_deadline_ns:
            frame.deadline_ns = rt.now_ns + envelope.remaining_deadline_ns
        seeds = site.plan.seeds
        values = frame.values
        values[seeds[0]] = value
        values[seeds[1]] = event.peer
        if site.is_request:
            values[seeds[2]] = WireRequestId(envelope.correlation.wire_req_id)
        rt.launch(frame)

    # -- responses ---------------------------------------------------------------------------

    def _response(
        self, event: InboundBytes, envelope: WireEnvelope, index: int, site: ResponseSite
    ) -> None:
        rt = self._rt
        fill = envelope.fills[index]
        wire_req_id = envelope.correlation.wire_req_id
        verdict = rt.cohorts.table.classify(wire_req_id, event.peer)
        cohort = rt.cohorts.table.get(wire_req_id)
        if verdict is Verdict.ACCEPTED and rt.neighbours.governor.check_inbound(event.peer):
            verdict = Verdict.STRANGER  # blocked since it was asked
        if verdict is not Verdict.ACCEPTED or cohort is None:
            rt.counts[f"response.{verdict.value}"] += 1
            if verdict is Verdict.LATE:
                rt.telemetry("response.late", peer=event.peer, wire_req_id=wire_req_id)
            return
        if cohort.site != site.site:
            self._refuse(
                event.peer,
                index,
                fill,
                "UnknownSite",
                f"the answer to {cohort.name} came to {site.name}",
            )
            return
        if not self._may_send(event.peer, index, fill, site):
            return
        node = types.type_by_hash(fill.type_hash)
        if node is None or not node.is_leaf:
            self._refuse(
                event.peer,
                index,
                fill,
                "UnknownTypeHash",
                f"an answer to {cohort.name} of type {_hash_text(fill.type_hash)}",
            )
            return
        value = TRIGGER if fill.trigger_only else self._decode(event.peer, index, fill, node, None)
        if value is None:
            return
        frame = rt.cohorts.frame_of(wire_req_id)
        if frame is not None:
            if frame.charges is None:
                frame.charges = []
            frame.charges.append(event.charge.hold())
        rt.show(rt.neighbours.succeeded(event.peer))
        rt.round_trips.sample(cohort.edge, rt.now_ns - cohort.opened_ns)
        rt.round_trips.learn(envelope.edge_rtt_reports)
        rt.cohorts.answer(wire_req_id, event.peer, value)

    # -- payloads ----------------------------------------------------------------------------

    def _decode(
        self, peer: PeerId, index: int, fill: SlotFill, node: TypeNode, slot: int | None
    ) -> Value | None:
        """The value of a payload; None, with a step, when it is none."""
        rt = self._rt
        component = None if slot is None else rt.cells[slot].component
        try:
            if component is not None and isinstance(component, Backend) and node.kind is _TENSOR:
                return self._materialize(component, node, fill)
            return codec.decode_value(node, fill.payload)
        except DecodeError as error:
            self._refuse(peer, index, fill, "DecodeFailed", str(error))
        except MemoryError:
            self._refuse(
                peer,
                index,
                fill,
                "AllocationFailed",
                f"HeapExhausted: {fill.payload_size} bytes",
            )
        except _MaterializeFailed as error:
            self._refuse(peer, index, fill, "BackendMaterializeFailed", str(error))
        return None

    def _materialize(self, backend: Backend, node: TypeNode, fill: SlotFill) -> Value:
        try:
            return backend.materialize_from_wire(node, memoryview(fill.payload))
        except (DecodeError, MemoryError):
            raise
        except STOPS:
            raise
        except BaseException as error:
            raise _MaterializeFailed(f"{backend.TYPE_NAME}: {describe(error)[1]}") from error

    def _refuse(self, peer: PeerId, index: int, fill: SlotFill, kind: str, detail: str) -> None:
        self._rt.refuse(peer, index, fill.type_hash, fill.payload_size, kind, detail)


def _check_count(items: Sized, cap: int | None, what: str) -> None:
    if cap is not None and len(items) > cap:
        raise DecodeError(f"an envelope with {len(items)} {what}; at most {cap} are taken")


class _MaterializeFailed(BbnodeError):
    """A backend could not adopt a payload."""


def _hash_text(type_hash: int) -> str:
    node = types.type_by_hash(type_hash)
    return f"{type_hash:#018x}" + (f" ({node.name})" if node is not None else "")


def _type_text(declared: TypeNode | None, expected: int) -> str:
    if expected:
        return _hash_text(expected)
    return declared.name if declared is not None else "anything"
