"""The wire envelope: protobuf, written and read by hand.

Rule: field numbers are fixed (docs/ir.md), unknown fields are skipped, caps are checked
before anything is allocated, and payloads are never copied: encoding returns the buffers
in order, decoding returns memoryviews of the input. The tests compare with google.protobuf.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache

from bbnode.ir.errors import DecodeError
from bbnode.ir.making import maker

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
        size = len(self.payload)
        for part in self.payload_parts:
            size += len(part)
        return size


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
_SIZED_OR_VALUE = (_VARINT, _LEN)
_MAX_VARINT_BYTES = 10
_U64 = (1 << 64) - 1
# Distinct (place, type) pairs and type hashes that a node meets again and again are those of
# its program; strangers can only push entries out.
_REMEMBERED = 1024


def varint(number: int) -> bytes:
    """Protobuf base-128 varint of an unsigned 64-bit integer."""
    if number < 0x80:
        return _ONE_BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    out = []
    number &= _U64
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))


def _uint_field(number: int, value: int) -> bytes:
    return _ONE_BYTE[number << 3 | _VARINT] + varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return _ONE_BYTE[number << 3 | _LEN] + varint(len(value)) + value


def encode_destination(addresses: Iterable[bytes]) -> bytes:
    """The first part of an envelope; the same for all that go to these addresses."""
    return b"".join(_bytes_field(1, address) for address in addresses)


def encode_source(
    peer: bytes, addresses: Iterable[bytes], schema_version: int = SCHEMA_VERSION
) -> bytes:
    """The last part of an envelope; the same for all that a node sends."""
    own = _bytes_field(6, peer) if peer else b""
    claimed = b"".join(_bytes_field(8, address) for address in addresses)
    return own + _uint_field(7, schema_version) + claimed


def encode_between(
    destination: bytes,
    fills: Sequence[SlotFill],
    kind: int,
    wire_req_id: int,
    remaining_deadline_ns: int,
    reports: Sequence[EdgeRttReport],
    source: bytes,
) -> list[Buffer]:
    """An envelope as buffers, between parts that `encode_destination` and `encode_source` made."""
    parts: list[Buffer] = []
    pending = destination
    for fill in fills:
        size = fill.payload_size
        suffix, after = _fill_ends(fill.dest_suffix, fill.trigger_only, fill.type_hash)
        before = suffix + b"\x12" + varint(size) if size else suffix
        pending += b"\x12" + varint(len(before) + size + len(after)) + before
        if size:
            parts.append(pending)
            if fill.payload:
                parts.append(fill.payload)
            parts.extend(fill.payload_parts)
            pending = after
        else:
            pending += after
    correlation = (_ONE_BYTE[8] + varint(kind) if kind else b"") + (
        _ONE_BYTE[16] + varint(wire_req_id) if wire_req_id else b""
    )
    if correlation:
        pending += b"\x1a" + _ONE_BYTE[len(correlation)] + correlation
    if remaining_deadline_ns:
        pending += b"\x20" + varint(remaining_deadline_ns)
    for report in reports:
        body = (
            _uint_field(1, report.site)
            + _uint_field(2, report.srtt_ns)
            + _uint_field(3, report.rttvar_ns)
        )
        pending += _bytes_field(5, body)
    parts.append(pending + source)
    return parts


@lru_cache(_REMEMBERED)
def _fill_ends(suffix: bytes, trigger_only: bool, type_hash: int) -> tuple[bytes, bytes]:
    """What stands before and behind a fill's payload."""
    before = _bytes_field(1, suffix) if suffix else b""
    return before, _uint_field(3, int(trigger_only)) + _uint_field(4, type_hash)


def encode_envelope(envelope: WireEnvelope) -> list[Buffer]:
    """The envelope as buffers to be written in order; payload buffers are passed through."""
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
    )


# --- decoding ----------------------------------------------------------------------


_make_fill = maker(SlotFill, "dest_suffix", "payload", "trigger_only", "type_hash", "payload_parts")
_make_correlation = maker(WireCorrelation, "kind", "wire_req_id")
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


def decode_envelope(data: Buffer, *, max_bytes: int = MAX_ENVELOPE_BYTES) -> WireEnvelope:
    """Read one envelope; payloads are memoryviews of `data`.

    Raises DecodeError for malformed protobuf, a newer schema, or anything over a cap.
    """
    if len(data) > max_bytes:
        raise DecodeError(f"an envelope of {len(data)} bytes; at most {max_bytes} are taken")
    dest: list[bytes] = []
    fills: list[SlotFill] = []
    reports: list[EdgeRttReport] = []
    claimed: list[bytes] = []
    correlation = _NO_CORRELATION
    deadline = 0
    source = b""
    version = 0
    # A length-delimited value is the place where it starts and ends, and nothing is sliced
    # out of the input before it is known to be wanted.
    for number, wire, value, end in _fields(data, 0, len(data)):
        if number == 2:
            _room(fills, MAX_FILLS, "fills")
            fills.append(_decode_fill(data, _sub(value, wire), end))
        elif number == 3:
            correlation = _decode_correlation(data, _sub(value, wire), end)
        elif number == 4:
            deadline = _uint(value, wire)
        elif number == 5:
            _room(reports, MAX_RTT_REPORTS, "round-trip reports")
            reports.append(_decode_report(data, _sub(value, wire), end))
        elif number == 6:
            source = _short(data, value, end, wire, 128)
        elif number == 7:
            version = _uint(value, wire)
        elif number == 8:
            _room(claimed, MAX_CLAIMED_ADDRESSES, "claimed addresses")
            claimed.append(_short(data, value, end, wire, MAX_CLAIMED_ADDRESS_BYTES))
        elif number == 1:
            _room(dest, MAX_CLAIMED_ADDRESSES, "destination addresses")
            dest.append(_short(data, value, end, wire, MAX_CLAIMED_ADDRESS_BYTES))
    if version != SCHEMA_VERSION:
        raise DecodeError(f"envelope schema version {version}; this node speaks {SCHEMA_VERSION}")
    made: WireEnvelope = _make_envelope(
        tuple(dest),
        tuple(fills),
        correlation,
        deadline,
        tuple(reports),
        source,
        version,
        tuple(claimed),
    )
    return made


@lru_cache(_REMEMBERED)
def _wide_varint(window: bytes) -> tuple[int, int]:
    """The varint at the beginning of up to ten bytes, and how many of them it takes."""
    result = shift = 0
    for index, byte in enumerate(window):
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _U64, index + 1
        shift += 7
    raise DecodeError("an envelope holds a varint that is cut short or too long")


def _fields(data: Buffer, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, value, 0), or (…, start, end) for what is no varint."""
    while at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, size = _wide_varint(bytes(data[at - 1 : min(at - 1 + _MAX_VARINT_BYTES, end)]))
            at += size - 1
        wire = tag & 7
        tag >>= 3
        if tag == 0:
            raise DecodeError("an envelope holds field number 0")
        if wire in _SIZED_OR_VALUE:
            if at >= end:
                raise DecodeError("an envelope holds a varint that is cut short or too long")
            value = data[at]
            at += 1
            if value >= 0x80:
                value, size = _wide_varint(
                    bytes(data[at - 1 : min(at - 1 + _MAX_VARINT_BYTES, end)])
                )
                at += size - 1
            if wire == _VARINT:
                yield tag, wire, value, 0
                continue
        elif wire in (_FIXED64, _FIXED32):
            value = 8 if wire == _FIXED64 else 4
        else:
            raise DecodeError(f"field {tag} has wire type {wire}, which is not used")
        if value > end - at:
            raise DecodeError(f"field {tag} announces {value} bytes and {end - at} are left")
        yield tag, wire, at, at + value
        at += value


def _room(items: Sized, cap: int, what: str) -> None:
    if len(items) >= cap:
        raise DecodeError(f"an envelope with more than {cap} {what}")


def _uint(value: int, wire: int) -> int:
    if wire != _VARINT:
        raise DecodeError("an integer field of an envelope has another wire type")
    return value


def _sub(start: int, wire: int) -> int:
    if wire != _LEN:
        raise DecodeError("a length-delimited field of an envelope has another wire type")
    return start


def _short(data: Buffer, start: int, end: int, wire: int, cap: int) -> bytes:
    _sub(start, wire)
    if end - start > cap:
        raise DecodeError(f"an address field of {end - start} bytes; at most {cap} are taken")
    return bytes(data[start:end])


def _decode_fill(data: Buffer, start: int, end: int) -> SlotFill:
    suffix = b""
    payload: Buffer = b""
    trigger_only = False
    type_hash = 0
    for number, wire, value, until in _fields(data, start, end):
        if number == 1:
            suffix = _short(data, value, until, wire, MAX_SUFFIX_BYTES)
        elif number == 2:
            payload = memoryview(data)[_sub(value, wire) : until]
        elif number == 3:
            trigger_only = bool(_uint(value, wire))
        elif number == 4:
            type_hash = _uint(value, wire)
    made: SlotFill = _make_fill(suffix, payload, trigger_only, type_hash, ())
    return made


def _decode_correlation(data: Buffer, start: int, end: int) -> WireCorrelation:
    kind = wire_req_id = 0
    for number, wire, value, _ in _fields(data, start, end):
        if number == 1:
            kind = _uint(value, wire)
        elif number == 2:
            wire_req_id = _uint(value, wire)
    known = _KINDS.get(kind)
    if known is None:
        raise DecodeError(f"correlation kind {kind} is not known")
    made: WireCorrelation = _make_correlation(known, wire_req_id)
    return made


def _decode_report(data: Buffer, start: int, end: int) -> EdgeRttReport:
    numbers = [0, 0, 0]
    for number, wire, value, _ in _fields(data, start, end):
        if 1 <= number <= 3:
            numbers[number - 1] = _uint(value, wire)
    return EdgeRttReport(site=numbers[0], srtt_ns=numbers[1], rttvar_ns=numbers[2])
