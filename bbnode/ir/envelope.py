"""The wire envelope: protobuf, written and read by hand.

Rule: field numbers are fixed (docs/ir.md), unknown fields are skipped, caps are checked
before anything is allocated, and payloads are never copied: encoding returns the buffers
in order, decoding returns memoryviews of the input. The tests compare with google.protobuf.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field

from bbnode.ir.errors import DecodeError

SCHEMA_VERSION = 1

# FACTS, "Caps and budgets": default preset.
MAX_ENVELOPE_BYTES = 16 << 20
MAX_FILLS = 64
MAX_CLAIMED_ADDRESSES = 8
MAX_CLAIMED_ADDRESS_BYTES = 256
MAX_RTT_REPORTS = 64
MAX_SUFFIX_BYTES = 256

Buffer = bytes | memoryview


class CorrelationKind(enum.IntEnum):
    """What an envelope is to a request."""

    NONE = 0
    REQUEST = 1
    RESPONSE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCorrelation:
    """Pairs responses with requests; of one-way envelopes, names the delivery."""

    kind: CorrelationKind = CorrelationKind.NONE
    wire_req_id: int = 0


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
        return len(self.payload) + sum(len(part) for part in self.payload_parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRttReport:
    """Round-trip estimate of a downstream edge (Jacobson 1988), in nanoseconds."""

    site: int
    srtt_ns: int
    rttvar_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEnvelope:
    """What one peer sends another in one piece."""

    dest_peer_addresses: tuple[bytes, ...] = ()
    fills: tuple[SlotFill, ...] = ()
    correlation: WireCorrelation = field(default_factory=WireCorrelation)
    remaining_deadline_ns: int = 0  # 0: no deadline
    edge_rtt_reports: tuple[EdgeRttReport, ...] = ()
    src_peer_bytes: bytes = b""
    schema_version: int = SCHEMA_VERSION
    src_peer_addresses: tuple[bytes, ...] = ()


# --- encoding ----------------------------------------------------------------------

_VARINT, _LEN = 0, 2
_FIXED64, _FIXED32 = 1, 5
_MAX_VARINT_BYTES = 10
_U64 = (1 << 64) - 1


def varint(number: int) -> bytes:
    """Protobuf base-128 varint of an unsigned 64-bit integer."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    number &= _U64
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _uint_field(number: int, value: int) -> bytes:
    return bytes((number << 3 | _VARINT,)) + varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | _LEN,)) + varint(len(value)) + value


def encode_envelope(envelope: WireEnvelope) -> list[Buffer]:
    """The envelope as buffers to be written in order; payload buffers are passed through."""
    head = b"".join(_bytes_field(1, a) for a in envelope.dest_peer_addresses)
    parts: list[Buffer] = [head] if head else []
    for fill in envelope.fills:
        size = fill.payload_size
        before = _bytes_field(1, fill.dest_suffix) if fill.dest_suffix else b""
        if size:
            before += b"\x12" + varint(size)
        after = _uint_field(3, int(fill.trigger_only)) + _uint_field(4, fill.type_hash)
        parts.append(b"\x12" + varint(len(before) + size + len(after)) + before)
        if fill.payload:
            parts.append(fill.payload)
        parts.extend(fill.payload_parts)
        if after:
            parts.append(after)
    correlation = _uint_field(1, int(envelope.correlation.kind)) + _uint_field(
        2, envelope.correlation.wire_req_id
    )
    tail = [
        _bytes_field(3, correlation) if correlation else b"",
        _uint_field(4, envelope.remaining_deadline_ns),
    ]
    for report in envelope.edge_rtt_reports:
        body = (
            _uint_field(1, report.site)
            + _uint_field(2, report.srtt_ns)
            + _uint_field(3, report.rttvar_ns)
        )
        tail.append(_bytes_field(5, body))
    if envelope.src_peer_bytes:
        tail.append(_bytes_field(6, envelope.src_peer_bytes))
    tail.append(_uint_field(7, envelope.schema_version))
    tail.extend(_bytes_field(8, a) for a in envelope.src_peer_addresses)
    parts.append(b"".join(tail))
    return parts


# --- decoding ----------------------------------------------------------------------


def decode_envelope(data: Buffer, *, max_bytes: int = MAX_ENVELOPE_BYTES) -> WireEnvelope:
    """Read one envelope; payloads are memoryviews of `data`.

    Raises DecodeError for malformed protobuf, a newer schema, or anything over a cap.
    """
    view = memoryview(data)
    if len(view) > max_bytes:
        raise DecodeError(f"an envelope of {len(view)} bytes; at most {max_bytes} are taken")
    dest: list[bytes] = []
    fills: list[SlotFill] = []
    reports: list[EdgeRttReport] = []
    claimed: list[bytes] = []
    correlation = WireCorrelation()
    deadline = 0
    source = b""
    version = 0
    for number, wire, value in _fields(view):
        if number == 1:
            _room(dest, MAX_CLAIMED_ADDRESSES, "destination addresses")
            dest.append(_short(value, wire, MAX_CLAIMED_ADDRESS_BYTES))
        elif number == 2:
            _room(fills, MAX_FILLS, "fills")
            fills.append(_decode_fill(_sub(value, wire)))
        elif number == 3:
            correlation = _decode_correlation(_sub(value, wire))
        elif number == 4:
            deadline = _uint(value, wire)
        elif number == 5:
            _room(reports, MAX_RTT_REPORTS, "round-trip reports")
            reports.append(_decode_report(_sub(value, wire)))
        elif number == 6:
            source = _short(value, wire, 128)
        elif number == 7:
            version = _uint(value, wire)
        elif number == 8:
            _room(claimed, MAX_CLAIMED_ADDRESSES, "claimed addresses")
            claimed.append(_short(value, wire, MAX_CLAIMED_ADDRESS_BYTES))
    if version != SCHEMA_VERSION:
        raise DecodeError(f"envelope schema version {version}; this node speaks {SCHEMA_VERSION}")
    return WireEnvelope(
        dest_peer_addresses=tuple(dest),
        fills=tuple(fills),
        correlation=correlation,
        remaining_deadline_ns=deadline,
        edge_rtt_reports=tuple(reports),
        src_peer_bytes=source,
        schema_version=version,
        src_peer_addresses=tuple(claimed),
    )


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    result = shift = 0
    for index in range(offset, min(offset + _MAX_VARINT_BYTES, len(view))):
        byte = view[index]
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _U64, index + 1
        shift += 7
    raise DecodeError("an envelope holds a varint that is cut short or too long")


def _fields(view: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    offset, end = 0, len(view)
    while offset < end:
        tag, offset = _read_varint(view, offset)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise DecodeError("an envelope holds field number 0")
        if wire == _VARINT:
            value, offset = _read_varint(view, offset)
            yield number, wire, value
        elif wire == _LEN:
            size, offset = _read_varint(view, offset)
            if size > end - offset:
                raise DecodeError(
                    f"field {number} announces {size} bytes and {end - offset} are left"
                )
            yield number, wire, view[offset : offset + size]
            offset += size
        elif wire in (_FIXED64, _FIXED32):
            width = 8 if wire == _FIXED64 else 4
            if width > end - offset:
                raise DecodeError(f"field {number} is cut short")
            yield number, wire, view[offset : offset + width]
            offset += width
        else:
            raise DecodeError(f"field {number} has wire type {wire}, which is not used")


def _room(items: Sized, cap: int, what: str) -> None:
    if len(items) >= cap:
        raise DecodeError(f"an envelope with more than {cap} {what}")


def _uint(value: int | memoryview, wire: int) -> int:
    if wire != _VARINT or not isinstance(value, int):
        raise DecodeError("an integer field of an envelope has another wire type")
    return value


def _sub(value: int | memoryview, wire: int) -> memoryview:
    if wire != _LEN or not isinstance(value, memoryview):
        raise DecodeError("a length-delimited field of an envelope has another wire type")
    return value


def _short(value: int | memoryview, wire: int, cap: int) -> bytes:
    view = _sub(value, wire)
    if len(view) > cap:
        raise DecodeError(f"an address field of {len(view)} bytes; at most {cap} are taken")
    return bytes(view)


def _decode_fill(view: memoryview) -> SlotFill:
    suffix = b""
    payload: Buffer = b""
    trigger_only = False
    type_hash = 0
    for number, wire, value in _fields(view):
        if number == 1:
            suffix = _short(value, wire, MAX_SUFFIX_BYTES)
        elif number == 2:
            payload = _sub(value, wire)
        elif number == 3:
            trigger_only = bool(_uint(value, wire))
        elif number == 4:
            type_hash = _uint(value, wire)
    return SlotFill(
        dest_suffix=suffix, payload=payload, trigger_only=trigger_only, type_hash=type_hash
    )


def _decode_correlation(view: memoryview) -> WireCorrelation:
    kind = wire_req_id = 0
    for number, wire, value in _fields(view):
        if number == 1:
            kind = _uint(value, wire)
        elif number == 2:
            wire_req_id = _uint(value, wire)
    try:
        return WireCorrelation(kind=CorrelationKind(kind), wire_req_id=wire_req_id)
    except ValueError as error:
        raise DecodeError(f"correlation kind {kind} is not known") from error


def _decode_report(view: memoryview) -> EdgeRttReport:
    numbers = [0, 0, 0]
    for number, wire, value in _fields(view):
        if 1 <= number <= 3:
            numbers[number - 1] = _uint(value, wire)
    return EdgeRttReport(site=numbers[0], srtt_ns=numbers[1], rttvar_ns=numbers[2])
