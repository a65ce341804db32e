"""The wire envelope: one message between two peers, as protobuf.

Rule: field numbers are fixed (`_SCHEMA`) and payloads are never copied. Encoding returns buffers
in order. Decoding walks the fills, whose payloads become memoryviews of the input, and leaves the
rest to protobuf's parser; parts that all envelopes of a peer share are parsed once and cached.

Fields come in the order of their numbers, as every protobuf library writes them. Those besides the
fills may come in any order, together with unknown fields, up to a few KiB.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError as ProtobufDecodeError

from bbnode.ir.caps import (
    MAX_ADDRESS_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_ENVELOPE_BYTES,
    MAX_ENVELOPE_HEAD_BYTES,
    MAX_FILL_HEAD_BYTES,
    MAX_FILLS,
    MAX_RTT_REPORTS,
    MAX_SOURCE_BYTES,
    MAX_SUFFIX_BYTES,
)
from bbnode.ir.decoding import refused
from bbnode.ir.errors import DecodeError
from bbnode.ir.making import maker

SCHEMA_VERSION = 1

Buffer = bytes | memoryview


class CorrelationKind(enum.IntEnum):
    """The role of an envelope in a request."""

    NONE = 0
    REQUEST = 1
    RESPONSE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCorrelation:
    """Pairs responses with requests; of one-way envelopes, names the delivery.

    `chain`, if it is not 0, is the id of the first one-way message of those of which this envelope
    comes; the first itself does not say it.
    """

    kind: CorrelationKind = CorrelationKind.NONE
    wire_req_id: int = 0
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFill:
    """One value for one place: `dest_suffix` is multiaddr bytes such as `/site/<id>`."""

    dest_suffix: bytes
    payload: Buffer = b""
    payload_parts: tuple[Buffer, ...] = ()  # outbound alternative to `payload`, uncopied
    trigger_only: bool = False
    type_hash: int = 0

    @property
    def payload_size(self) -> int:
        """Bytes of the payload, whichever way it is held."""
        parts = self.payload_parts
        if len(parts) == 1:
            return len(self.payload) + len(parts[0])
        return len(self.payload) + sum(map(len, parts))


make_fill = maker(SlotFill, "dest_suffix", "payload", "payload_parts", "trigger_only", "type_hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRttReport:
    """Round-trip estimate of a downstream edge (Jacobson 1988), in nanoseconds."""

    site: int
    srtt_ns: int
    rttvar_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEnvelope:
    """A message between two peers."""

    dest_peer_addresses: tuple[bytes, ...] = ()
    fills: tuple[SlotFill, ...] = ()
    correlation: WireCorrelation = field(default_factory=WireCorrelation)
    remaining_deadline_ns: int = 0  # 0: no deadline
    edge_rtt_reports: tuple[EdgeRttReport, ...] = ()
    src_peer_bytes: bytes = b""
    schema_version: int = SCHEMA_VERSION
    src_peer_addresses: tuple[bytes, ...] = ()


# --- the schema --------------------------------------------------------------------

_U64_TYPE = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
_BYTES_TYPE = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_BOOL_TYPE = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
# Message -> its fields from number 1 on; "*" repeats.
_SCHEMA: dict[str, dict[str, int | str]] = {
    "SlotFill": {
        "dest_suffix": _BYTES_TYPE, "payload": _BYTES_TYPE, "trigger_only": _BOOL_TYPE,
        "type_hash": _U64_TYPE,
    },
    "WireCorrelation": {"kind": _U64_TYPE, "wire_req_id": _U64_TYPE, "chain": _U64_TYPE},
    "EdgeRttReport": {"site": _U64_TYPE, "srtt_ns": _U64_TYPE, "rttvar_ns": _U64_TYPE},
    "WireEnvelope": {
        "dest_peer_addresses*": _BYTES_TYPE, "fills*": "SlotFill",
        "correlation": "WireCorrelation", "remaining_deadline_ns": _U64_TYPE,
        "edge_rtt_reports*": "EdgeRttReport", "src_peer_bytes": _BYTES_TYPE,
        "schema_version": _U64_TYPE, "src_peer_addresses*": _BYTES_TYPE,
    },
}  # fmt: skip


def _message_classes() -> dict[str, Any]:
    # proto2 has the same bytes as proto3, and tells a field that is absent from an empty one.
    file = descriptor_pb2.FileDescriptorProto(
        name="bbnode/envelope.proto", package="bbnode", syntax="proto2"
    )
    for message_name, described in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for number, (name, kind) in enumerate(described.items(), 1):
            made = message.field.add(name=name.rstrip("*"), number=number)
            made.label = made.LABEL_REPEATED if name.endswith("*") else made.LABEL_OPTIONAL
            if isinstance(kind, str):
                made.type, made.type_name = made.TYPE_MESSAGE, f".bbnode.{kind}"
            else:
                made.type = kind  # type: ignore[assignment]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"bbnode.{name}"))
        for name in _SCHEMA
    }


_classes = _message_classes()
_EnvelopeMessage, _FillMessage = _classes["WireEnvelope"], _classes["SlotFill"]
_parse_envelope, _parse_fill = _EnvelopeMessage.FromString, _FillMessage.FromString
_Correlation = _classes["WireCorrelation"]
_parse_correlation = _Correlation.FromString

_U64 = (1 << 64) - 1
# Tag and length of a correlation: three numbers of ten bytes and a tag at most.
_CORRELATION_HEADS = tuple(bytes((26, length)) for length in range(3 * 11 + 1))
# Copying this few bytes takes less time than making a view of them.
SMALL_BYTES = 512
# The (place, type) pairs and type hashes that recur are those of the node's program; strangers can
# only push entries out.
_REMEMBERED = 1024

# --- encoding ----------------------------------------------------------------------


def varint(number: int) -> bytes:
    """Return the protobuf varint of an unsigned integer."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def encode_destination(addresses: Iterable[bytes]) -> bytes:
    """Return the first part of an envelope, the same for all envelopes to these addresses."""
    made: bytes = _EnvelopeMessage(dest_peer_addresses=addresses).SerializeToString()
    return made


def encode_source(
    peer: bytes, addresses: Iterable[bytes], schema_version: int = SCHEMA_VERSION
) -> bytes:
    """Return the last part of an envelope, the same for all envelopes of a node."""
    message = _EnvelopeMessage(schema_version=schema_version, src_peer_addresses=addresses)
    if peer:
        message.src_peer_bytes = peer
    made: bytes = message.SerializeToString()
    return made


def encode_between(
    destination: bytes,
    fills: Sequence[SlotFill],
    kind: int,
    wire_req_id: int,
    remaining_deadline_ns: int,
    reports: Sequence[EdgeRttReport],
    source: bytes,
    chain: int = 0,
) -> tuple[Buffer, ...]:
    """Return an envelope as buffers; its ends are from `encode_destination` and `encode_source`."""
    rest = source
    if reports:
        message = _EnvelopeMessage()
        for report in reports:
            message.edge_rtt_reports.add(
                site=report.site, srtt_ns=report.srtt_ns, rttvar_ns=report.rttvar_ns
            )
        rest = message.SerializeToString() + source
    if remaining_deadline_ns:
        rest = _deadline_bytes(remaining_deadline_ns) + rest
    head = raw = b""
    if kind or wire_req_id or chain:
        said = _Correlation()
        if kind:
            said.kind = kind
        if wire_req_id:
            said.wire_req_id = wire_req_id
        if chain:
            said.chain = chain
        raw = said.SerializeToString()
        head = _CORRELATION_HEADS[len(raw)]
    if len(fills) == 1:
        (fill,) = fills
        payload, others = fill.payload, fill.payload_parts
        if len(others) == 1 and not payload:
            (payload,), others = others, ()
        size = len(payload) if not others else fill.payload_size
        if size <= SMALL_BYTES:  # as most: all in one buffer
            if others:
                payload = b"".join((payload, *others))
            before, after = _fill_ends(fill.dest_suffix, fill.trigger_only, fill.type_hash, size)
            return (b"".join((destination, before, payload, after, head, raw, rest)),)
    parts: list[Buffer] = []
    pending = destination
    for fill in fills:
        size = fill.payload_size
        before, after = _fill_ends(fill.dest_suffix, fill.trigger_only, fill.type_hash, size)
        pending += before
        if size:
            parts.append(pending)
            if fill.payload:
                parts.append(fill.payload)
            parts.extend(fill.payload_parts)
            pending = after
        else:
            pending += after
    parts.append(pending + head + raw + rest)
    return tuple(parts)


@lru_cache(_REMEMBERED)
def _fill_ends(suffix: bytes, trigger_only: bool, type_hash: int, size: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after a fill's payload of `size` bytes.

    They are cached, since most payloads to a place have the same size.
    """
    before: bytes = _FillMessage(dest_suffix=suffix or None).SerializeToString()
    if size:
        before += bytes((_TAG_PAYLOAD,)) + varint(size)
    flags = _FillMessage(trigger_only=trigger_only or None, type_hash=type_hash or None)
    after: bytes = flags.SerializeToString()
    whole = len(before) + size + len(after)
    return bytes((_TAG_FILL,)) + varint(whole) + before, after


@lru_cache(_REMEMBERED)
def _deadline_bytes(remaining_ns: int) -> bytes:
    """Return the field of a deadline: most are whole ones of the program, not the rest of one."""
    made: bytes = _EnvelopeMessage(remaining_deadline_ns=remaining_ns).SerializeToString()
    return made


def encode_envelope(envelope: WireEnvelope) -> tuple[Buffer, ...]:
    """Return the envelope as buffers to be written in order; payload buffers are passed through."""
    return encode_between(
        encode_destination(envelope.dest_peer_addresses),
        envelope.fills,
        int(envelope.correlation.kind),
        envelope.correlation.wire_req_id,
        envelope.remaining_deadline_ns,
        envelope.edge_rtt_reports,
        encode_source(
            envelope.src_peer_bytes, envelope.src_peer_addresses, envelope.schema_version
        ),
        envelope.correlation.chain,
    )


# --- decoding ----------------------------------------------------------------------

_make_correlation = maker(WireCorrelation, "kind", "wire_req_id", "chain")
_make_envelope = maker(
    WireEnvelope,
    "dest_peer_addresses",
    "fills",
    "correlation",
    "remaining_deadline_ns",
    "edge_rtt_reports",
    "src_peer_bytes",
    "schema_version",
    "src_peer_addresses",
)
_KINDS = {int(kind): kind for kind in CorrelationKind}
_NO_CORRELATION = WireCorrelation()

# Tags on the wire: field number << 3 | wire type.
_TAG_DESTINATION, _TAG_FILL, _TAG_CORRELATION, _TAG_DEADLINE, _TAG_SOURCE = 10, 18, 26, 32, 50
_VARINT_BYTES = 10  # of 64 bits
_TAG_SUFFIX, _TAG_PAYLOAD = 10, 18  # of a fill
_SOURCE_FIELDS = frozenset((6, 7, 8))
# The bytes cached per peer: its id, and the usual number of addresses.
_MAX_PEER_BYTES = 512
_REMEMBERED_PEERS = 4096  # more than are connected at once; 2 MiB when all are that large
_MAX_FLAG_BYTES = 16  # of a fill, as ours are


def correlation_of(data: Buffer) -> WireCorrelation:
    """Return what an envelope that will not be taken says of itself; nothing if it is none."""
    try:
        return decode_envelope(data, max_bytes=len(data)).correlation
    except DecodeError:
        return WireCorrelation()


# Of an envelope that is otherwise as the last one of its sender: payload, kind, id and chain of its
# correlation, and deadline.
Differing: TypeAlias = tuple[bytes, CorrelationKind, int, int, int]


class Layout:
    """The bytes of an envelope that the next ones of its sender have as well.

    These are all but a small payload, correlation and deadline: before the payload, between it and
    the correlation, and after the deadline. `made` is the envelope that it was learned from, with
    its `fill` and the addresses that it `claimed`.
    """

    __slots__ = (
        "_after",
        "_before",
        "_between",
        "_payload_at",
        "_payload_end",
        "_said_at",
        "claimed",
        "fill",
        "made",
        "misses",
    )

    def __init__(
        self, data: bytes, made: WireEnvelope, payload_at: int, payload_end: int, rest: int, at: int
    ) -> None:
        self._before, self._between = data[:payload_at], data[payload_end : rest + 1]
        self._after = data[at:]
        self._payload_at, self._payload_end, self._said_at = payload_at, payload_end, rest + 1
        self.made = made
        self.fill = made.fills[0]
        self.claimed = made.src_peer_addresses
        self.misses = 0

    def read(self, data: bytes) -> Differing | None:
        """Return what an envelope has of its own; None if `decode_envelope` has to look at it."""
        payload_end, after = self._payload_end, self._after
        if not (
            data.startswith(self._before)
            and data.startswith(self._between, payload_end)
            and data.endswith(after)
        ):
            return None
        at, rest, deadline = self._said_at, len(data) - len(after), 0
        try:
            length = data[at]
            end = at + 1 + length
            if length >= 0x80 or end > rest:
                return None
            if end != rest:
                # A cache keeps what follows: no more than a number, whatever a peer puts there.
                if data[end] != _TAG_DEADLINE or rest - end - 1 > _VARINT_BYTES:
                    return None
                deadline, size = _deadline(data[end + 1 : rest])
                if end + 1 + size != rest:
                    return None
            said = _parse_correlation(data[at + 1 : end])
            payload = data[self._payload_at : payload_end]
            return payload, _KINDS[said.kind], said.wire_req_id, said.chain, deadline
        except (IndexError, KeyError, DecodeError, ProtobufDecodeError):
            return None

    def envelope(
        self, payload: bytes, kind: CorrelationKind, wire_req_id: int, chain: int, deadline: int
    ) -> WireEnvelope:
        """Return the envelope of which `read` has returned this."""
        last, fill = self.made, self.fill
        made: WireEnvelope = _make_envelope(
            last.dest_peer_addresses,
            (make_fill(fill.dest_suffix, payload, (), fill.trigger_only, fill.type_hash),),
            _make_correlation(kind, wire_req_id, chain),
            deadline,
            (),
            last.src_peer_bytes,
            SCHEMA_VERSION,
            last.src_peer_addresses,
        )
        return made

    def decode(self, data: bytes) -> WireEnvelope | None:
        """Return what `decode_envelope` would; None if that has to look at it."""
        found = self.read(data)
        return None if found is None else self.envelope(*found)


def decode_envelope(
    data: Buffer, *, max_bytes: int = MAX_ENVELOPE_BYTES, learn: Callable[..., object] | None = None
) -> WireEnvelope:
    """Return the envelope in `data`; large payloads are memoryviews of it.

    `learn` is called with the arguments of its Layout, if it has one.

    Raises DecodeError for malformed protobuf, another schema version, or anything over a cap.
    """
    if len(data) > max_bytes:
        raise DecodeError(f"an envelope of {len(data)} bytes; at most {max_bytes} are taken")
    try:
        return _decode(data, learn)
    except DecodeError:
        raise
    except Exception as error:
        raise refused(f"an envelope of {len(data)} bytes", error) from error


def _decode(data: Buffer, learn: Callable[..., object] | None) -> WireEnvelope:
    size = len(data)
    payload_at = payload_end = 0
    fills: list[SlotFill] = []
    at = 0
    # Lengths of one byte, as most are, are read in place: this runs for every envelope.
    while at < size and data[at] == _TAG_DESTINATION and at < MAX_ENVELOPE_HEAD_BYTES:
        length, at = data[at + 1], at + 2
        if length >= 0x80:
            length, at = _varint_at(data, at - 1)
        at += length
    head = at
    while at < size and data[at] == _TAG_FILL:
        if len(fills) >= MAX_FILLS:
            raise DecodeError(f"an envelope with more than {MAX_FILLS} fills")
        length, at = data[at + 1], at + 2
        if length >= 0x80:
            length, at = _varint_at(data, at - 1)
        end = at + length
        if end > size:
            raise DecodeError("an envelope that is cut short")
        suffix = b""
        payload: Buffer = b""
        if at < end and data[at] == _TAG_SUFFIX:
            length, at = data[at + 1], at + 2
            if length >= 0x80:
                length, at = _varint_at(data, at - 1)
            if length > MAX_SUFFIX_BYTES:
                raise _too_long(length, MAX_SUFFIX_BYTES)
            suffix = bytes(data[at : at + length])
            at += length
        if at < end and data[at] == _TAG_PAYLOAD:
            length, at = data[at + 1], at + 2
            if length >= 0x80:
                length, at = _varint_at(data, at - 1)
            payload_at, payload_end = at, at + length
            if length <= SMALL_BYTES:
                payload = bytes(data[at:payload_end])
            else:
                payload = memoryview(data)[at:payload_end]
            at = payload_end
        if at > end:
            raise DecodeError("a fill of an envelope that is cut short")
        if end - at <= _MAX_FLAG_BYTES:
            again, trigger_only, type_hash = _fill_rest(bytes(data[at:end]))
        elif end - at <= MAX_FILL_HEAD_BYTES:
            again, trigger_only, type_hash = _fill_rest.__wrapped__(bytes(data[at:end]))
        else:
            raise _out_of_order(end - at, "a fill")
        if again:
            suffix, payload = again.get("dest_suffix", suffix), again.get("payload", payload)
        fills.append(make_fill(suffix, payload, (), trigger_only, type_hash))
        at = end
    if at > size:
        raise DecodeError("an envelope that is cut short")
    # Correlation, deadline and source as `encode_between` writes them. The first two differ in
    # each envelope, so a cache would not help; protobuf's parser takes a quarter of the time that
    # reading two ids of ten bytes takes here.
    rest, deadline, correlation = at, 0, _NO_CORRELATION
    try:
        if data[at] == _TAG_CORRELATION and data[at + 1] < 0x80:
            end = at + 2 + data[at + 1]
            said = _parse_correlation(bytes(data[at + 2 : end]))
            correlation = _make_correlation(_KINDS[said.kind], said.wire_req_id, said.chain)
            at = end
        if data[at] == _TAG_DEADLINE:
            deadline, at = _varint_at(data, at + 1)
        if data[at] == _TAG_SOURCE and size - at <= _MAX_PEER_BYTES >= head:
            source, claimed = _source(bytes(data[at:]))
            made: WireEnvelope = _make_envelope(
                _destination(bytes(data[:head])) if head else (),
                tuple(fills),
                correlation,
                deadline,
                (),
                source,
                SCHEMA_VERSION,
                claimed,
            )
            if (
                learn is not None
                and len(fills) == 1
                and payload_at
                and not again
                and correlation is not _NO_CORRELATION
            ):
                learn(data, made, payload_at, payload_end, rest, at)
            return made
    except (IndexError, KeyError, DecodeError, ProtobufDecodeError):
        pass  # it is not as usual: the parser says what is wrong, if anything is
    if head + size - rest > MAX_ENVELOPE_HEAD_BYTES:
        raise _out_of_order(head + size - rest, "an envelope")
    return _from_message(_parse_envelope(bytes(data[:head]) + bytes(data[rest:])), fills)


@lru_cache(_REMEMBERED)
def _deadline(raw: bytes) -> tuple[int, int]:
    """Return the varint in front, and its size: most deadlines are whole ones of the program."""
    return _varint_at(raw, 0)


def _varint_at(data: Buffer, at: int) -> tuple[int, int]:
    """Return a varint, and where it ends."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value <= _U64:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("an envelope holds a varint of more than 64 bits")


@lru_cache(_REMEMBERED)
def _fill_rest(raw: bytes) -> tuple[dict[str, bytes], bool, int]:
    """Return the fields after a payload: suffix and payload, if repeated, and the flags."""
    message = _parse_fill(raw)
    again = {
        name: getattr(message, name)
        for name in ("dest_suffix", "payload")
        if message.HasField(name)
    }
    if len(again.get("dest_suffix", b"")) > MAX_SUFFIX_BYTES:
        raise _too_long(len(again["dest_suffix"]), MAX_SUFFIX_BYTES)
    return again, message.trigger_only, message.type_hash


def forget_senders() -> None:
    """Clear what is cached of the heads and tails of envelopes, which differ from peer to peer."""
    _destination.cache_clear()
    _source.cache_clear()


@lru_cache(_REMEMBERED_PEERS)
def _destination(head: bytes) -> tuple[bytes, ...]:
    return _addresses(_parse_envelope(head).dest_peer_addresses, "destination")


@lru_cache(_REMEMBERED_PEERS)
def _source(tail: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the sender and its addresses from an envelope's last part."""
    message = _parse_envelope(tail)
    if any(each.number not in _SOURCE_FIELDS for each, _ in message.ListFields()):
        raise DecodeError("other fields than usual")
    read = _from_message(message, [])
    return read.src_peer_bytes, read.src_peer_addresses


def _from_message(message: Any, fills: list[SlotFill]) -> WireEnvelope:
    """Return the envelope of a parsed message and of fills that were read before."""
    if message.schema_version != SCHEMA_VERSION:
        raise DecodeError(
            f"envelope schema version {message.schema_version}; this node speaks {SCHEMA_VERSION}"
        )
    _at_most(len(fills) + len(message.fills), MAX_FILLS, "fills")
    _at_most(len(message.edge_rtt_reports), MAX_RTT_REPORTS, "round-trip reports")
    for fill in message.fills:
        if len(fill.dest_suffix) > MAX_SUFFIX_BYTES:
            raise _too_long(len(fill.dest_suffix), MAX_SUFFIX_BYTES)
        payload = memoryview(fill.payload)
        fills.append(make_fill(fill.dest_suffix, payload, (), fill.trigger_only, fill.type_hash))
    if len(message.src_peer_bytes) > MAX_SOURCE_BYTES:
        raise _too_long(len(message.src_peer_bytes), MAX_SOURCE_BYTES)
    kind = _KINDS.get(message.correlation.kind)
    if kind is None:
        raise DecodeError(f"correlation kind {message.correlation.kind} is not known")
    made: WireEnvelope = _make_envelope(
        _addresses(message.dest_peer_addresses, "destination"),
        tuple(fills),
        _make_correlation(kind, message.correlation.wire_req_id, message.correlation.chain),
        message.remaining_deadline_ns,
        tuple(
            EdgeRttReport(site=each.site, srtt_ns=each.srtt_ns, rttvar_ns=each.rttvar_ns)
            for each in message.edge_rtt_reports
        ),
        message.src_peer_bytes,
        SCHEMA_VERSION,
        _addresses(message.src_peer_addresses, "claimed"),
    )
    return made


def _addresses(listed: Sequence[bytes], what: str) -> tuple[bytes, ...]:
    _at_most(len(listed), MAX_CLAIMED_ADDRESSES, f"{what} addresses")
    found = tuple(listed)
    for address in found:
        if len(address) > MAX_ADDRESS_BYTES:
            raise _too_long(len(address), MAX_ADDRESS_BYTES)
    return found


def _at_most(count: int, cap: int, what: str) -> None:
    if count > cap:
        raise DecodeError(f"an envelope with more than {cap} {what}")


def _too_long(size: int, cap: int) -> DecodeError:
    return DecodeError(f"an address field of {size} bytes; at most {cap} are taken")


def _out_of_order(size: int, what: str) -> DecodeError:
    return DecodeError(
        f"{what} with {size} bytes beside its payloads; more than any has, unless its fields are "
        "not in the order of their numbers"
    )
