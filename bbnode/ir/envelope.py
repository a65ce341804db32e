"""The wire envelope: protobuf, written by hand (`envelope_reader.py` reads it).

Rule: field numbers are fixed (docs/ir.md) and payloads are never copied: encoding returns the
buffers in order. The tests compare with google.protobuf.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from bbnode.ir.making import maker

SCHEMA_VERSION = 1


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


make_fill = maker(SlotFill, "dest_suffix", "payload", "payload_parts", "trigger_only", "type_hash")


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
    # Byte by byte, an id of 64 bits would take half again as long. 56 bits are spread to two
    # words of 28, to four of 14, to eight of 7; what is above them are the last two bytes.
    number &= _U64
    word = (number & 0x0FFFFFFF) | (number & 0xFFFFFFF0000000) << 4
    word = (word & 0x00003FFF00003FFF) | (word & 0x0FFFC0000FFFC000) << 2
    word = (word & 0x007F007F007F007F) | (word & 0x3F803F803F803F80) << 1
    word |= (number >> 56 & 0x7F) << 64 | (number >> 63) << 72
    size = (number.bit_length() + 6) // 7
    return (word | _MORE[size]).to_bytes(size, "little")


_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))
# The high bits of all bytes of a varint but the last, by its size.
_MORE = tuple(int.from_bytes(b"\x80" * max(size - 1, 0), "little") for size in range(11))


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
def _fill_ends(suffix: bytes, trigger_only: bool, type_hash: int, size: int) -> tuple[bytes, bytes]:
    """What stands before and behind a fill's payload of `size` bytes.

    What a program sends to a place is as large every time, more often than not.
    """
    before = _bytes_field(1, suffix) if suffix else b""
    if size:
        before += b"\x12" + varint(size)
    after = _uint_field(3, int(trigger_only)) + _uint_field(4, type_hash)
    return b"\x12" + varint(len(before) + size + len(after)) + before, after


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
