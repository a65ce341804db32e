"""Inbound envelopes: from bytes to executions and answers.

Rule: an envelope is untrusted; only its authenticated peer is certain. Size, caps, correlation,
site, class of the sender and type are checked before a payload is decoded. A bad fill becomes a
step, and the other fills of its envelope are delivered. Nothing here raises. Payloads that take
long to decode are left to `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from multiaddr import Multiaddr

from bbnode.components.contracts import Backend
from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.cohorts import Cohort, Cohorts, ResponseStatus
from bbnode.engine.errors import FramesExceeded, GateDenied, describe
from bbnode.engine.executor import Executor, refusal_of
from bbnode.engine.frame import OWED, Frame
from bbnode.engine.ingress import Charge, InboundBytes, InboundRefused
from bbnode.engine.limits import Limits
from bbnode.engine.newest import Newest
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.places import SourcePlace
from bbnode.engine.planning.sites import RecvSite, ResponseSite, accepts, answers_with
from bbnode.engine.readiness import NOT_READY, READY, SlotReadiness
from bbnode.engine.reports import Reports
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.engine.wire.decoder import (
    CLAIMED_US_PER_BYTE,
    ENVELOPE_US,
    FILL_US,
    Decoder,
    NotDecoded,
)
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.engine.wire.refusals import (
    FURTHER_ON,
    LEAVING,
    PerSecond,
    Refusals,
    public,
    public_text,
)
from bbnode.ir import codec, types
from bbnode.ir.address import REFUSED_SUFFIX, site_suffix
from bbnode.ir.caps import DEDUP_WINDOW, MAX_REFUSALS_PER_S
from bbnode.ir.envelope import (
    Buffer,
    CorrelationKind,
    Layout,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    decode_envelope,
)
from bbnode.ir.errors import AllocationFailed, DecodeError
from bbnode.ir.interrupts import let_stop
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal, decode_refusal
from bbnode.ir.shapes import shape_fits, shape_text
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import TRIGGER, Value, WireRequestId

_TENSOR = TypeKind.TENSOR
_ABOUT_ITSELF = WireCorrelation(kind=CorrelationKind.NONE, wire_req_id=0)

# An envelope up to this size is likely to be one of many that differ in few bytes.
_MAX_LEARNED_BYTES: Final = 2048
_MAX_LAYOUTS: Final = 1024  # of a node; less than 1 KiB each
_MISSES: Final = 8  # a peer that sends several things by turns: its layout changes this seldom

_NO_LAYOUT: Final = (None, None)

# Of a PeerId its bytes: it is hashed in Python.
MessageName: TypeAlias = tuple[bytes, int, int]


class InboundDedup:
    """The messages that have arrived: a sliding window of names.

    A message is named by (source peer, wire_req_id, site); the last 8,192 names are kept. A hash of
    the payload would not do: the same weights sent twice are two messages, and a retransmission is
    the same message.
    """

    __slots__ = ("_known",)

    def __init__(self, window: int = DEDUP_WINDOW) -> None:
        self._known: Newest[MessageName, None] = Newest(window)

    def __len__(self) -> int:
        return len(self._known.entries)

    def has(self, source: PeerId, wire_req_id: int, site: int) -> bool:
        """Return True for a message that is remembered."""
        return (source.raw, wire_req_id, site) in self._known.entries

    def record(self, source: PeerId, wire_req_id: int, site: int) -> bool:
        """Remember a message; return True for a known one, which keeps its age."""
        return not self._known.add((source.raw, wire_req_id, site), None)

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the window, oldest first."""
        return [
            [writer.peer(PeerId.from_bytes(raw)), wire_req_id, site]
            for raw, wire_req_id, site in self._known.entries
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        for peer, wire_req_id, site in plain:
            self.record(reader.peer(peer), wire_req_id, site)


class ComponentReceiver(Protocol):
    """The receiver of fills for components: the messenger."""

    def receive(self, event: InboundBytes, envelope: WireEnvelope, index: int) -> bool:
        """Accept a fill; return False if its suffix names no component."""

    def refused(self, peer: PeerId, wire_req_id: int, why: WireRefusal) -> ResponseStatus:
        """Handle a peer's refusal of a component's request; UNKNOWN if there is none such."""


class _RefusedFill(Exception):
    """A fill is refused, for a reason that a step reports."""

    def __init__(self, kind: str, detail: str, public: str = "") -> None:
        """`public` is what the sender is told, by default the detail."""
        self.kind = kind
        self.detail = detail
        self.public = public or detail


@dataclass(eq=False, repr=False)
class Inbound:
    """Receives the envelopes of one node."""

    __slots__ = (
        "_layouts",
        "_told",
        "cells",
        "clock",
        "cohorts",
        "components",
        "decoder",
        "dedup",
        "executor",
        "limits",
        "neighbours",
        "outbound",
        "readiness",
        "refusals",
        "reports",
        "round_trips",
        "sites",
    )

    sites: Mapping[bytes, RecvSite | ResponseSite]
    cells: Sequence[ComponentCell]
    limits: Limits
    clock: NodeClock
    reports: Reports
    executor: Executor
    neighbours: Neighbours
    round_trips: RoundTrips
    cohorts: Cohorts
    decoder: Decoder
    components: ComponentReceiver
    dedup: InboundDedup
    refusals: Refusals
    outbound: EnvelopeOutbox
    readiness: SlotReadiness

    def __post_init__(self) -> None:
        self.decoder.landing = self
        self._told = PerSecond(MAX_REFUSALS_PER_S)
        # Of each peer: what its envelopes look like, and the site that they go to if it is a Recv's
        # and all that the layout holds is as it has to be.
        self._layouts: dict[PeerId, tuple[Layout, RecvSite | None]] = {}

    def receive(self, event: InboundBytes) -> None:
        """Handle one envelope; its charge is released here unless an execution keeps it.

        All errors are handled here, so that the next envelope is not affected.
        """
        self.reports.counts["envelopes.in"] += 1
        try:
            if self._is_usual(event):
                return
            envelope = self._open(event)
            if envelope is not None:
                fills = envelope.fills
                self.decoder.left_us -= ENVELOPE_US + FILL_US * len(fills)
                for index, fill in enumerate(fills):
                    try:
                        self._fill(event, envelope, index, fill)
                    except BaseException as error:  # noqa: BLE001 - its siblings are taken
                        let_stop(error)
                        self._refuse(event.peer, envelope, index, error)
        except BaseException as error:  # noqa: BLE001 - the boundary to what peers send
            let_stop(error)
            self.reports.receive_failed(event.peer, -1, 0, len(event.data), *describe(error))
        finally:
            event.charge.release()

    def _is_usual(self, event: InboundBytes) -> bool:
        """Take an envelope that differs from an earlier one of its sender in nothing but content.

        Returns False for any other. Of what `_open` checks, the layout answers for all but the
        addresses, which may have changed since; no object is made of what it holds.
        """
        peer, data = event.peer, event.data
        layout, site = self._layouts.get(peer, _NO_LAYOUT)
        if layout is None or site is None or len(data) > _MAX_LEARNED_BYTES:
            return False
        found = layout.read(data if type(data) is bytes else bytes(data))
        if found is None:
            return False
        payload, kind, wire_req_id, chain, remaining_ns = found
        known = self.neighbours.book.is_unchanged(peer, layout.claimed, event.observed)
        if not known or kind is not site.kind:
            return False
        self.decoder.left_us -= ENVELOPE_US + FILL_US
        fill = layout.fill
        try:
            # No stars: they would make a list and a tuple of this, for each envelope.
            self._deliver(
                event, site, 0, fill.type_hash, fill.trigger_only, payload,
                wire_req_id, chain, remaining_ns,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - as in `receive`
            let_stop(error)
            self._refuse(peer, layout.envelope(*found), 0, error)
        return True

    def _open(self, event: InboundBytes) -> WireEnvelope | None:
        """Return an envelope that its sender may send, and learn its addresses; None, reported."""
        peer, data, reports = event.peer, event.data, self.reports
        try:
            # Its size was checked at the boundary.
            envelope = self._decode(peer, data)
            _check_count(len(envelope.fills), self.limits.envelope_fills, "fills")
            claimed = envelope.src_peer_addresses
            is_known = self.neighbours.book.is_unchanged(peer, claimed, event.observed)
            if not is_known:
                self._check_claimed(claimed)
        except DecodeError as error:
            reports.receive_failed(peer, -1, 0, len(data), "DecodeFailed", str(error))
            reports.peers_changed(
                self.neighbours.failed(peer, "undecodable envelope", self.clock.now_ns)
            )
            return None
        if envelope.src_peer_bytes != peer.to_bytes():
            # The connection proved the sender; the envelope claims another one.
            reports.counts["receive.forged"] += 1
            reports.telemetry("receive.forged", peer=peer)
            return None
        if not is_known and peer != self.neighbours.self_peer:
            self._learn(peer, claimed, event.observed)
        return envelope

    def _decode(self, peer: PeerId, data: Buffer) -> WireEnvelope:
        """Return an envelope, by the layout of an earlier one of its sender if it is the same."""
        if len(data) > _MAX_LEARNED_BYTES:
            return decode_envelope(data, max_bytes=len(data))
        raw = bytes(data)
        layout, _ = self._layouts.get(peer, _NO_LAYOUT)
        if layout is not None:
            found = layout.decode(raw)
            if found is not None:
                return found
            layout.misses += 1
            if layout.misses % _MISSES:
                return decode_envelope(raw)

        def learn(data: bytes, made: WireEnvelope, *places: int) -> None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            site = self.sites.get(made.fills[0].dest_suffix)
            if type(site) is not RecvSite or made.src_peer_bytes != peer.to_bytes():
                site = None
            self._layouts[peer] = Layout(data, made, *places), site

        return decode_envelope(raw, learn=learn)

    def _check_claimed(self, claimed: Sequence[bytes]) -> None:
        """Raise DecodeError for addresses beyond the limits; those in the book were checked."""
        _check_count(len(claimed), self.limits.sender_addresses, "claimed addresses")
        cap = self.limits.sender_address_bytes
        for raw in claimed:
            if cap is not None and len(raw) > cap:
                raise DecodeError(
                    f"an envelope with a claimed address of {len(raw)} bytes; at most {cap} "
                    "are taken"
                )

    def _learn(self, peer: PeerId, claimed: tuple[bytes, ...], observed: Multiaddr | None) -> None:
        """Add addresses to the book: claimed ones first, then the one that it came from."""
        book = self.neighbours.book
        if claimed and not book.has_claimed(peer, claimed):
            self.decoder.left_us -= CLAIMED_US_PER_BYTE * sum(map(len, claimed))
            refused = book.merge_claimed(peer, claimed)
            if refused:
                self.reports.counts["addresses.refused"] += refused
        if observed is not None and not book.observe(peer, observed):
            self.reports.counts["addresses.refused"] += 1

    def _fill(
        self, event: InboundBytes, envelope: WireEnvelope, index: int, fill: SlotFill
    ) -> None:
        site = self.sites.get(fill.dest_suffix)
        if site is None:
            if fill.dest_suffix == REFUSED_SUFFIX:
                self._refused(event.peer, envelope.correlation, fill)
                return
            if self.components.receive(event, envelope, index):
                return
            suffix = fill.dest_suffix.hex() or "an empty suffix"
            raise _RefusedFill("UnknownSite", f"nothing here receives at {suffix}")
        kind = envelope.correlation.kind
        if isinstance(site, RecvSite):
            wanted = site.kind
            if kind is wanted:
                said = envelope.correlation
                self._deliver(
                    *(event, site, index, fill.type_hash, fill.trigger_only, fill.payload),
                    *(said.wire_req_id, said.chain, envelope.remaining_deadline_ns),
                )
                return
        else:
            wanted = CorrelationKind.RESPONSE
            if kind is wanted:
                self._response(event, envelope, index, fill, site)
                return
        raise _RefusedFill(
            "CorrelationMismatch",
            f"{site.name} takes {wanted.name}, the envelope says {kind.name}",
        )

    def _check_sender(self, peer: PeerId, site: RecvSite | ResponseSite) -> None:
        """Refuse the fill of a peer that plays no class that sends to a site.

        Its classes are those of its accepted hello; in a private network the membership has to
        grant them. A peer without a connection plays no class.
        """
        classes = self.neighbours.peers.classes.get(peer, ())
        if site.senders.isdisjoint(classes) and peer != self.neighbours.self_peer:
            raise _RefusedFill(
                "SenderNotOfClass",
                f"{site.name} takes from {', '.join(sorted(site.senders))}, the peer plays "
                f"{', '.join(classes) or 'no class'}",
                "the sender plays no class that sends there",
            )

    # -- one-way and requests ----------------------------------------------------------------

    def _deliver(
        self,
        event: InboundBytes,
        site: RecvSite,
        index: int,
        type_hash: int,
        trigger_only: bool,
        payload: Buffer,
        wire_req_id: int,
        chain: int,
        remaining_ns: int,
    ) -> None:
        peer = event.peer
        self._check_sender(peer, site)
        node = accepts(site, type_hash)
        if trigger_only and not site.trigger_only and not isinstance(node, str):
            node = "TypeMismatch"
        if isinstance(node, str):
            expected = site.type_hash if site.type_hash is not None else 0
            raise _RefusedFill(
                node,
                f"{site.name} expects {_type_text(site.declared, expected)}, the fill is "
                f"{_hash_text(type_hash)}{' without payload' if trigger_only else ''}",
            )
        if site.is_request and self.refusals.leaving:
            raise _RefusedFill("ShuttingDown", LEAVING.detail)
        if self.readiness.failed:
            why = self.readiness.refusal(site.plan)
            if why:
                raise _RefusedFill(NOT_READY, why, public_text(why))
        limit = self.limits.frames_per_peer
        if limit is not None and self.executor.frames_of.get(peer.raw, 0) >= limit:
            raise _RefusedFill(
                "TooManyExecutions",
                f"{limit} executions that this peer started are under way (limit frames_per_peer)",
            )
        if not chain and not site.is_request:
            chain = wire_req_id
        deadline_ns = self.clock.now_ns + remaining_ns if remaining_ns else None
        if not self.decoder.takes_now(event, site.site, node, payload):
            if not self.decoder.later(
                *(event, wire_req_id, deadline_ns, site.site),
                *(type_hash, trigger_only, payload, index),
                is_request=site.is_request,
                chain=chain,
            ):
                self._too_full(site, peer, wire_req_id)
            return
        value = TRIGGER if trigger_only else self._make(node, payload, site)
        if type(value) is tuple:
            raise _RefusedFill(*value)
        self._launch(site, peer, wire_req_id, chain, deadline_ns, event.charge, value)

    def _launch(
        self,
        site: RecvSite,
        peer: PeerId,
        wire_req_id: int,
        chain: int,
        deadline_ns: int | None,
        charge: Charge,
        value: Value,
    ) -> None:
        executor, plan = self.executor, site.plan
        frame = executor.start_from(plan, peer, wire_req_id, site.site, chain)
        if frame is None:
            self._too_full(site, peer, wire_req_id)
            return
        frame.charges = [charge.hold()]
        frame.deadline_ns = deadline_ns
        seeds = plan.seeds
        values = frame.values
        values[seeds[0]] = value
        values[seeds[1]] = peer
        if site.is_request:
            values[seeds[2]] = WireRequestId(wire_req_id)
            frame.debt = OWED
        executor.launch(frame)

    def _too_full(self, site: RecvSite, peer: PeerId, wire_req_id: int) -> None:
        """Tell a peer that its message can't start an execution; a step has told it here."""
        kind = CorrelationKind.REQUEST if site.is_request else CorrelationKind.NONE
        why = WireRefusal(FramesExceeded.__name__, "too many executions are under way", site.name)
        self.refusals.at_arrival(peer, kind, wire_req_id, why)

    # -- responses ---------------------------------------------------------------------------

    def _response(
        self,
        event: InboundBytes,
        envelope: WireEnvelope,
        index: int,
        fill: SlotFill,
        site: ResponseSite,
    ) -> None:
        peer, wire_req_id = event.peer, envelope.correlation.wire_req_id
        cohort = self._wanted(peer, wire_req_id)
        if cohort is None:
            return
        if cohort.site != site.site:
            raise _RefusedFill("UnknownSite", f"the answer to {cohort.name} came to {site.name}")
        self._check_sender(peer, site)
        node = answers_with(site, fill.type_hash, trigger_only=fill.trigger_only)
        if isinstance(node, str):
            wanted = " or ".join(kind.name for kind in site.answers) or "a value"
            raise _RefusedFill(
                node,
                f"an answer to {cohort.name} of type {_hash_text(fill.type_hash)}; expected "
                f"{wanted}",
            )
        self.round_trips.learn(envelope.edge_rtt_reports)
        if not self.decoder.takes_now(event, site.site, node, fill.payload):
            self.decoder.later(
                *(event, wire_req_id, None, site.site),
                *(fill.type_hash, fill.trigger_only, fill.payload, index),
                is_request=False,
                chain=0,
            )
            return
        value = TRIGGER if fill.trigger_only else self._make(node, fill.payload, site)
        if type(value) is tuple:
            raise _RefusedFill(*value)
        self._answer(peer, wire_req_id, self.clock.now_ns, event.charge, value)

    def _wanted(self, peer: PeerId, wire_req_id: int) -> Cohort | None:
        """Return the cohort that waits for an answer of a peer; None, counted, when none does."""
        cohort = self.cohorts.table.get(wire_req_id)
        status = self.cohorts.table.classify(wire_req_id, peer)
        if status is ResponseStatus.ACCEPTED and self.neighbours.governor.check_inbound(peer):
            status = ResponseStatus.STRANGER  # blocked since it was asked
        if status is ResponseStatus.ACCEPTED and cohort is not None:
            return cohort
        self.reports.counts[f"response.{status.value}"] += 1
        if status is ResponseStatus.LATE:
            self.reports.telemetry("response.late", peer=peer, wire_req_id=wire_req_id)
        return None

    def _answer(
        self,
        peer: PeerId,
        wire_req_id: int,
        came_ns: int,
        charge: Charge,
        value: Value,
    ) -> None:
        """Add an answer that is wanted, and came at `came_ns`."""
        cohort = self.cohorts.table.get(wire_req_id)
        frame = self.cohorts.frame_of(wire_req_id)
        if frame is not None:
            frame.hold_charge(charge.hold())
        self.reports.peers_changed(self.neighbours.succeeded(peer))
        if cohort is not None:
            self.round_trips.sample(cohort.edge, came_ns - cohort.opened_ns)
        self.cohorts.answer(wire_req_id, peer, value, came_ns)

    # -- decoded in threads ----------------------------------------------------------------

    def is_wanted(self, frame: Frame) -> bool:
        """Return True if the payload of a frame of the decoder is still awaited."""
        if isinstance(self._site_of(frame), RecvSite):
            return True
        peer = frame.source_peer
        return peer is not None and self._wanted(peer, frame.wire_req_id) is not None

    def maker(
        self, frame: Frame, node: TypeNode, payload: Buffer
    ) -> Callable[[], Value | NotDecoded]:
        """Return a function that decodes a payload, to a value or a refusal."""
        return partial(self._make, node, payload, self._site_of(frame))

    def land(self, frame: Frame, value: Value) -> None:
        """Deliver a value that was decoded in a thread."""
        site, peer = self._site_of(frame), frame.source_peer
        if site is None or peer is None or frame.charges is None:
            return
        charge = frame.charges[0]
        frame.debt = None  # whoever gets it owes the answer
        if isinstance(site, RecvSite):
            chain, deadline_ns = frame.chain, frame.deadline_ns
            self._launch(site, peer, frame.wire_req_id, chain, deadline_ns, charge, value)
        else:
            self._answer(peer, frame.wire_req_id, frame.started_ns, charge, value)

    def refuse_decoded(self, frame: Frame, kind: str, detail: str) -> None:
        """Tell a requester that its payload is no value, or count an answer that is none."""
        site, peer = self._site_of(frame), frame.source_peer
        if site is None or peer is None:
            return
        why = WireRefusal(kind, detail, site.name)
        if isinstance(site, ResponseSite):
            self.cohorts.refused(frame.wire_req_id, peer, why)
            return
        frame.debt = None
        kind_of = CorrelationKind.REQUEST if site.is_request else CorrelationKind.NONE
        self.refusals.at_arrival(peer, kind_of, frame.wire_req_id, why)

    def _site_of(self, frame: Frame) -> RecvSite | ResponseSite | None:
        return self.sites.get(site_suffix(frame.site))

    # -- payloads ----------------------------------------------------------------------------

    def _make(
        self, node: TypeNode, payload: Buffer, site: RecvSite | ResponseSite | None
    ) -> Value | NotDecoded:
        """Return the value of a payload, or why it has none. From any thread, backends too."""
        backend = None
        if type(site) is RecvSite and site.slot is not None and node.kind is _TENSOR:
            component = self.cells[site.slot].component
            backend = component if isinstance(component, Backend) else None
        try:
            if backend is None:
                value = codec.decode_value(node, payload)
            else:
                value = backend.materialize_from_wire(node, memoryview(payload))
        except (AllocationFailed, MemoryError):
            return "AllocationFailed", f"HeapExhausted: {len(payload)} bytes"
        except DecodeError as error:
            return "DecodeFailed", str(error)
        except BaseException as error:  # noqa: BLE001 - the boundary to codecs and backends
            let_stop(error)
            if backend is None:
                return "DecodeFailed", describe(error)[1]
            return "BackendMaterializeFailed", f"{backend.TYPE_NAME}: {describe(error)[1]}"
        if type(site) is not RecvSite or site.shape is None:
            return value
        shape = getattr(value, "shape", None)
        if type(shape) is not tuple or shape_fits(site.shape, shape, {}):
            return value
        wanted = shape_text(site.shape)
        return "ShapeMismatch", f"{site.name} takes {wanted}, the fill is {shape_text(shape)}"

    # -- refusals ----------------------------------------------------------------------------

    def refuse_unread(self, event: InboundRefused) -> None:
        """Report an envelope that was dropped at the boundary."""
        peer, said = event.peer, event.correlation
        self.reports.receive_failed(peer, -1, 0, event.size, event.kind, event.detail)
        why = WireRefusal(event.kind, f"{event.size} bytes; {event.detail}")
        if said.kind is CorrelationKind.RESPONSE:
            self.cohorts.refused(said.wire_req_id, peer, why)
        else:
            self.refusals.at_arrival(peer, said.kind, said.wire_req_id, why)

    def _refuse(
        self, peer: PeerId, envelope: WireEnvelope, index: int, error: BaseException
    ) -> None:
        """Report a fill that is refused, and tell whoever waits for what comes of it."""
        refused = error if isinstance(error, _RefusedFill) else _RefusedFill(*describe(error))
        said, fill, kind = envelope.correlation, envelope.fills[index], refused.kind
        self.reports.receive_failed(
            peer, index, fill.type_hash, fill.payload_size, kind, refused.detail
        )
        site = self.sites.get(fill.dest_suffix)
        where = fill.dest_suffix.hex() if site is None else site.name
        if said.kind is CorrelationKind.RESPONSE:
            why = WireRefusal(kind, refused.detail, where)
            self.cohorts.refused(said.wire_req_id, peer, why)
        else:
            why = WireRefusal(kind, refused.public, where)
            self.refusals.at_arrival(
                peer,
                said.kind,
                said.wire_req_id,
                why,
                has_come=lambda: site is not None and self._has_come(peer, said, site.site),
            )

    def _has_come(self, peer: PeerId, said: WireCorrelation, site: int) -> bool:
        """Return True if a message was taken before: its execution is under way, or was."""
        wire_req_id = said.wire_req_id
        return self.dedup.has(peer, wire_req_id, site) or any(
            frame.wire_req_id == wire_req_id and frame.site == site and frame.source_peer == peer
            for frame in self.executor.frames.values()
        )

    def _refused(self, peer: PeerId, said: WireCorrelation, fill: SlotFill) -> None:
        """Handle what a peer says that it refuses: our request, or our one-way message."""
        counts = self.reports.counts
        if fill.type_hash or fill.trigger_only or said.kind is CorrelationKind.REQUEST:
            counts["refusals.malformed"] += 1
            return
        try:
            why = decode_refusal(fill.payload)
        except DecodeError:
            counts["refusals.malformed"] += 1
            return
        if self.neighbours.governor.check_inbound(peer):
            counts[f"refusals.{ResponseStatus.STRANGER.value}"] += 1
        elif why.kind in (NOT_READY, READY) and said == _ABOUT_ITSELF:
            self._notice(peer, why)
        elif said.kind is CorrelationKind.RESPONSE:
            status = self.components.refused(peer, said.wire_req_id, why)
            if status is ResponseStatus.UNKNOWN:
                status = self.cohorts.refused(said.wire_req_id, peer, why)
            counts[f"refusals.{status.value}"] += 1
            if status is ResponseStatus.ACCEPTED:  # it is there, and speaks
                self.reports.peers_changed(self.neighbours.succeeded(peer))
        else:
            counts["send.refused"] += 1
            if self._told.take(peer, self.clock.now_ns):
                cause, message = self.outbound.cause_of(said.wire_req_id)
                self.reports.telemetry(
                    "send.refused",
                    peer=peer,
                    wire_req_id=said.wire_req_id,
                    chain=0 if cause else message,
                    kind=why.kind,
                    detail=why.detail,
                    where=why.where,
                )
                if cause is not None:
                    where = f"{why.where or why.kind}, {FURTHER_ON} {peer}"
                    why = WireRefusal(why.kind, why.detail, where)
                    self.refusals.at_arrival(cause, CorrelationKind.NONE, message, why)

    def undone(self, frame: Frame, op: str, error: BaseException, place: SourcePlace) -> None:
        """Tell the sender of a one-way message that what it started has failed, and how."""
        site, peer = self._site_of(frame), frame.source_peer
        is_message = isinstance(site, RecvSite) and not site.is_request
        if peer is None or not is_message or isinstance(error, GateDenied):
            return
        why = public(refusal_of(op, error, place))
        self.refusals.at_arrival(peer, CorrelationKind.NONE, frame.wire_req_id, why)

    def _notice(self, peer: PeerId, said: WireRefusal) -> None:
        """Handle what a peer says of itself, as often as one may tell."""
        if self._told.take(peer, self.clock.now_ns):
            self.readiness.heard(peer, said)
        else:
            self.reports.counts["notices.ignored"] += 1

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: how much each peer has told in this second."""
        return self._told.state(writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self._told.load(plain, reader)


def _check_count(count: int, cap: int | None, what: str) -> None:
    if cap is not None and count > cap:
        raise DecodeError(f"an envelope with {count} {what}; at most {cap} are taken")


def _hash_text(type_hash: int) -> str:
    node = types.type_by_hash(type_hash)
    return f"{type_hash:#018x}" + (f" ({node.name})" if node is not None else "")


def _type_text(declared: TypeNode | None, expected: int) -> str:
    if expected:
        return _hash_text(expected)
    return declared.name if declared is not None else "anything"
