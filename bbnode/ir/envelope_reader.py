"""Reading envelopes: protobuf, by hand.

Rule: unknown fields are skipped, caps are checked before anything is allocated, and payloads are
memoryviews of the input. There are two readers: one that knows no more than protobuf, and a
quicker one for what our own encoder writes, which leaves everything else to the first. The tests
hold them to the same answers, and the first to google.protobuf's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from functools import lru_cache

from bbnode.ir.caps import (
    MAX_ADDRESS_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_ENVELOPE_BYTES,
    MAX_ENVELOPE_FIELDS,
    MAX_FILLS,
    MAX_INNER_FIELDS,
    MAX_RTT_REPORTS,
    MAX_SUFFIX_BYTES,
)
from bbnode.ir.decoding import refused
from bbnode.ir.envelope import (
    SCHEMA_VERSION,
    Buffer,
    CorrelationKind,
    EdgeRttReport,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    make_fill,
)
from bbnode.ir.errors import DecodeError
from bbnode.ir.making import maker

_VARINT, _LEN = 0, 2
_FIXED64, _FIXED32 = 1, 5
_SIZED_OR_VALUE = (_VARINT, _LEN)
_MAX_VARINT_BYTES = 10
_U64 = (1 << 64) - 1
# Distinct type hashes and flags of fills that a node meets again and again are those of its
# program; strangers can only push entries out.
_REMEMBERED = 1024

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
    try:
        return _decode_usual(data) or decode_any(data)
    except DecodeError:
        raise
    except Exception as error:
        raise refused(f"an envelope of {len(data)} bytes", error) from error


# --- as our own encoder writes it ----------------------------------------------------

# Tags as they stand on the wire: field number << 3 | wire type.
_TAG_DESTINATION, _TAG_FILL, _TAG_CORRELATION, _TAG_DEADLINE, _TAG_SOURCE = 10, 18, 26, 32, 50
_TAG_SUFFIX, _TAG_PAYLOAD = 10, 18  # of a fill
_TAG_KIND, _TAG_REQUEST = 8, 16  # of a correlation
_DESTINATION_FIELDS = frozenset((1,))
_SOURCE_FIELDS = frozenset((6, 7, 8))
_FLAG_FIELDS = frozenset((3, 4))
_MAX_FLAG_BYTES = 16
# What is remembered of one peer: its id, and addresses as most peers have them.
_MAX_PEER_BYTES = 512
_REMEMBERED_PEERS = 4096  # more than are connected at once; 2 MiB when all are that large


def _decode_usual(data: Buffer) -> WireEnvelope | None:
    """An envelope as `encode_between` writes it; None for any other, be it right or wrong.

    This is what every envelope pays for: one pass, in which the parts that all envelopes of one
    peer share (what it says of itself, and where it believes this node to be) are looked up.
    """
    at = deadline = wire_req_id = 0
    kind = CorrelationKind.NONE
    destination: tuple[bytes, ...] = ()
    fills: list[SlotFill] = []
    view = memoryview(data)
    try:
        while data[at] == _TAG_DESTINATION and at < _MAX_PEER_BYTES:
            at += 2 + data[at + 1]
        if at:
            destination = _destination_of(bytes(data[:at]))
        while data[at] == _TAG_FILL and len(fills) < MAX_FILLS:
            end = data[at + 1]
            at += 2
            if end >= 0x80:
                end, at = _varint_at(data, at - 1)
            end += at
            length = data[at + 1]
            if data[at] != _TAG_SUFFIX or length >= 0x80:
                return None
            at += 2
            suffix = bytes(data[at : at + length])
            at += length
            payload: Buffer = b""
            if data[at] == _TAG_PAYLOAD:
                length = data[at + 1]
                at += 2
                if length >= 0x80:
                    length, at = _varint_at(data, at - 1)
                payload = view[at : at + length]
                at += length
            if not at <= end <= at + _MAX_FLAG_BYTES:
                return None
            trigger_only, type_hash = _flags_of(bytes(data[at:end]))
            fills.append(make_fill(suffix, payload, (), trigger_only, type_hash))
            at = end
        if data[at] == _TAG_CORRELATION:
            end = at + 2 + data[at + 1]
            at += 2
            if data[at] == _TAG_KIND:
                kind = _KINDS[data[at + 1]]
                at += 2
            if at < end and data[at] == _TAG_REQUEST:
                wire_req_id, at = _varint_at(data, at + 1)
            if at != end:
                return None
        if data[at] == _TAG_DEADLINE:
            deadline, at = _varint_at(data, at + 1)
        if data[at] != _TAG_SOURCE or len(data) - at > _MAX_PEER_BYTES:
            return None
        source, claimed = _source_of(bytes(data[at:]))
    except (IndexError, KeyError, DecodeError):
        return None
    made: WireEnvelope = _make_envelope(
        destination,
        tuple(fills),
        _make_correlation(kind, wire_req_id),
        deadline,
        (),
        source,
        SCHEMA_VERSION,
        claimed,
    )
    return made


def _varint_at(data: Buffer, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
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
            raise DecodeError("a varint of more than 64 bits, or a wasteful one")


@lru_cache(_REMEMBERED_PEERS)
def _destination_of(head: bytes) -> tuple[bytes, ...]:
    if len(head) > _MAX_PEER_BYTES:
        raise DecodeError("more than is remembered")
    _only(head, _DESTINATION_FIELDS)
    return _read(head).dest_peer_addresses


@lru_cache(_REMEMBERED_PEERS)
def _source_of(tail: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    _only(tail, _SOURCE_FIELDS)
    read = decode_any(tail)
    return read.src_peer_bytes, read.src_peer_addresses


@lru_cache(_REMEMBERED)
def _flags_of(rest: bytes) -> tuple[bool, int]:
    _only(rest, _FLAG_FIELDS)
    fill = _decode_fill(rest, 0, len(rest))
    return fill.trigger_only, fill.type_hash


def _only(data: bytes, numbers: frozenset[int]) -> None:
    if not all(field[0] in numbers for field in _fields(data, 0, len(data))):
        raise DecodeError("other fields than usual")


# --- any envelope --------------------------------------------------------------------


def decode_any(data: Buffer) -> WireEnvelope:
    """What `decode_envelope` does, whoever wrote the envelope."""
    read = _read(data)
    if read.schema_version != SCHEMA_VERSION:
        raise DecodeError(
            f"envelope schema version {read.schema_version}; this node speaks {SCHEMA_VERSION}"
        )
    return read


def _read(data: Buffer) -> WireEnvelope:
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
    for number, wire, value, end in _fields(data, 0, len(data), MAX_ENVELOPE_FIELDS):
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
            claimed.append(_short(data, value, end, wire, MAX_ADDRESS_BYTES))
        elif number == 1:
            _room(dest, MAX_CLAIMED_ADDRESSES, "destination addresses")
            dest.append(_short(data, value, end, wire, MAX_ADDRESS_BYTES))
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


def _fields(
    data: Buffer, at: int, end: int, most: int = MAX_INNER_FIELDS
) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, value, 0), or (…, start, end) for what is no varint."""
    while at < end:
        most -= 1
        if most < 0:
            raise DecodeError("an envelope with more fields than any has")
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
    made: SlotFill = make_fill(suffix, payload, (), trigger_only, type_hash)
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
