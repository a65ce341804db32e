"""Frames on our streams: a fixed header, then the body.

Rule: the header is 16 bytes, big-endian: type (1), flags (1, zero), reserved (2, zero), body
length (4), number (8). The table FRAME_CAPS has the types that a lane carries and the maximum
length of each; a length is checked against it before anything is stored. An end of stream within a
frame is a truncation. This module does no I/O.

The number is: for ENVELOPE, OPEN and CHUNK, the message's position in its lane; for ACK, the
message that is expected next; for RESUME and START, the round (see `receiver`); for PING, the
number that the PONG repeats; for BYE_ACK, the lane.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from bbnode.ir.caps import (
    MAX_BYE_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_ENVELOPE_BYTES,
    MAX_HELLO_BYTES,
)
from bbnode.transport.errors import FrameError

_HEADER = struct.Struct(">BBHIQ")
HEADER_BYTES = _HEADER.size
# ACK: lane, received bytes of the message that is expected next.
_ACK = struct.Struct(">BQ")
_ACK_FRAME = struct.Struct(_HEADER.format + _ACK.format[1:])
# RESUME: record, next on control, next on bulk, bytes of the latter, the two windows.
_RESUME = struct.Struct(">QQQQII")
# OPEN: size of the message in bytes, offset at which its chunks begin, its anchor.
_OPEN = struct.Struct(">QQQ")


class Lane(enum.IntEnum):
    """One of the two kinds of stream; each side opens one of each on every connection."""

    CONTROL = 0
    BULK = 1

    @property
    def label(self) -> str:
        """Lower-case name, for messages and protocol ids."""
        return self.name.lower()


_LANES: Final = tuple(Lane)


class FrameType(enum.IntEnum):
    """The type of a frame."""

    HELLO = 1
    PING = 2
    PONG = 3
    # A whole small message.
    ENVELOPE = 4
    # No more messages come on this lane.
    BYE = 5
    # The lane was read up to its BYE.
    BYE_ACK = 6
    # A request to send on this connection, from these positions on.
    RESUME = 7
    # The frames that follow on this stream answer the RESUME of this round.
    START = 8
    # The position up to which a lane was accepted.
    ACK = 9
    # The start, or continuation, of a large message.
    OPEN = 10
    # The next bytes of a large message.
    CHUNK = 11


FRAME_CAPS: dict[tuple[Lane, FrameType], int] = {
    (Lane.CONTROL, FrameType.HELLO): MAX_HELLO_BYTES,
    (Lane.CONTROL, FrameType.PING): 0,
    (Lane.CONTROL, FrameType.PONG): 0,
    (Lane.CONTROL, FrameType.ENVELOPE): MAX_CONTROL_ENVELOPE_BYTES,
    (Lane.CONTROL, FrameType.BYE): MAX_BYE_BYTES,
    (Lane.CONTROL, FrameType.BYE_ACK): 0,
    (Lane.CONTROL, FrameType.RESUME): _RESUME.size,
    (Lane.CONTROL, FrameType.START): 0,
    (Lane.CONTROL, FrameType.ACK): _ACK.size,
    (Lane.BULK, FrameType.BYE): MAX_BYE_BYTES,
    (Lane.BULK, FrameType.START): 0,
    (Lane.BULK, FrameType.OPEN): _OPEN.size,
    (Lane.BULK, FrameType.CHUNK): MAX_CHUNK_BYTES,
}


class LinkFrame(NamedTuple):
    """One complete decoded frame."""

    type: FrameType
    number: int
    body: bytes


class ChunkData(NamedTuple):
    """Some of a CHUNK's bytes, as received; valid until the next `feed`."""

    number: int
    data: memoryview


class Position(NamedTuple):
    """A position in a lane: all messages before `number`, and `offset` bytes of that one."""

    number: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The header of a large message, sent before its chunks; all in bytes.

    `anchor` is the offset of the message's largest part, such as the numbers of a tensor. The
    receiver allocates the message so that this byte is aligned, and the tensor can be used without
    a copy.
    """

    total: int
    offset: int
    anchor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The first frame of a receiver to a sender: the positions to send from, and the windows.

    `record` identifies the receiver's state for this sender; a new one means it has forgotten all.
    """

    round: int
    record: int
    control: Position
    bulk: Position
    control_window: int
    bulk_window: int


def encode_header(frame_type: FrameType, body_bytes: int, number: int = 0) -> bytes:
    """Encode the header of a frame with a body of `body_bytes` bytes."""
    return _HEADER.pack(frame_type, 0, 0, body_bytes, number)


def encode_ack(lane: Lane, position: Position) -> bytes:
    """Encode an ACK."""
    return _ACK_FRAME.pack(FrameType.ACK, 0, 0, _ACK.size, position.number, lane, position.offset)


def decode_ack(frame: LinkFrame) -> tuple[Lane, Position]:
    """Return the lane and position of an ACK; raises FrameError."""
    lane, offset = _unpack(_ACK, frame)
    if lane >= len(_LANES):
        raise FrameError(f"an ACK of lane {lane}, which does not exist")
    return _LANES[lane], Position(frame.number, offset)


def encode_resume(resume: Resume) -> bytes:
    """Encode a RESUME."""
    body = _RESUME.pack(
        resume.record,
        resume.control.number,
        resume.bulk.number,
        resume.bulk.offset,
        resume.control_window,
        resume.bulk_window,
    )
    return encode_header(FrameType.RESUME, len(body), resume.round) + body


def decode_resume(frame: LinkFrame) -> Resume:
    """Decode a RESUME; raises FrameError."""
    record, control, bulk, offset, control_window, bulk_window = _unpack(_RESUME, frame)
    least = MAX_CONTROL_ENVELOPE_BYTES + HEADER_BYTES
    if min(control_window, bulk_window) < least:
        raise FrameError(f"a RESUME with a window under {least} bytes, in which nothing can move")
    return Resume(
        round=frame.number,
        record=record,
        control=Position(number=control),
        bulk=Position(number=bulk, offset=offset),
        control_window=control_window,
        bulk_window=bulk_window,
    )


def encode_open(number: int, total: int, offset: int, anchor: int = 0) -> bytes:
    """Encode an OPEN."""
    return encode_header(FrameType.OPEN, _OPEN.size, number) + _OPEN.pack(total, offset, anchor)


def decode_open(frame: LinkFrame) -> Open:
    """Decode an OPEN; raises FrameError."""
    total, offset, anchor = _unpack(_OPEN, frame)
    if offset >= total:
        raise FrameError(f"a message of {total} bytes is opened at byte {offset}")
    if anchor >= total:
        raise FrameError(f"a message of {total} bytes has its largest part at byte {anchor}")
    return Open(total=total, offset=offset, anchor=anchor)


def _unpack(layout: struct.Struct, frame: LinkFrame) -> tuple[int, ...]:
    if len(frame.body) != layout.size:
        raise FrameError(
            f"a {frame.type.name} frame of {len(frame.body)} bytes; it has {layout.size}"
        )
    return layout.unpack(frame.body)


# Lane -> code of a frame type that it carries -> type and cap.
_CARRIED: Final[dict[Lane, dict[int, tuple[FrameType, int]]]] = {
    lane: {int(kind): (kind, cap) for (on, kind), cap in FRAME_CAPS.items() if on is lane}
    for lane in Lane
}


class FrameDecoder:
    """Turns the bytes of one incoming stream into frames; chunks pass through in pieces."""

    __slots__ = ("_buffer", "_carried", "_chunk", "_chunk_left", "_lane", "_want", "frames")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._carried = _CARRIED[lane]
        # An incomplete header or small body.
        self._buffer = bytearray()
        # (type, number, length) of the frame whose body is still to come.
        self._want: tuple[FrameType, int, int] | None = None
        # Number and remaining bytes of the CHUNK that is passing through.
        self._chunk = 0
        self._chunk_left = 0
        # Frames that were yielded; a CHUNK counts once its header has arrived.
        self.frames = 0

    @property
    def mid_frame(self) -> bool:
        """True if an end of stream now would cut a frame short."""
        return self._want is not None or bool(self._buffer) or self._chunk_left > 0

    @property
    def keeps_bytes(self) -> bool:
        """True if an incomplete header or body is buffered."""
        return self._want is not None or bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[LinkFrame | ChunkData]:
        """Yield the frames that `data` completes; raises FrameError at the first bad bytes."""
        view, at, end = memoryview(data), 0, len(data)
        while at < end:
            if self._chunk_left:
                piece = view[at : at + self._chunk_left]
                at += len(piece)
                self._chunk_left -= len(piece)
                yield ChunkData(self._chunk, piece)
                continue
            want = self._want
            if want is None:
                missing = HEADER_BYTES - len(self._buffer)
                if missing > end - at:
                    self._buffer += view[at:]
                    return
                want = self._read_header(self._whole(view[at : at + missing]))
                at += missing
                if want is None:
                    continue
            kind, number, length = want
            missing = length - len(self._buffer)
            if missing > end - at:
                self._want = want
                self._buffer += view[at:]
                return
            body = bytes(self._whole(view[at : at + missing]))
            at += missing
            self._want = None
            self.frames += 1
            yield LinkFrame(kind, number, body)

    def _whole(self, rest: memoryview) -> bytes | memoryview:
        """Return a complete header or body: the buffered part and the rest."""
        if not self._buffer:
            return rest
        self._buffer += rest
        whole = bytes(self._buffer)
        self._buffer.clear()
        return whole

    def _read_header(self, header: bytes | memoryview) -> tuple[FrameType, int, int] | None:
        """Return the frame whose body follows, None for a CHUNK; raises FrameError."""
        code, flags, reserved, length, number = _HEADER.unpack(header)
        carried = self._carried.get(code)
        if carried is None or flags or reserved or length > carried[1]:
            raise FrameError(self._fault(code, flags or reserved, length))
        if carried[0] is not FrameType.CHUNK:
            return carried[0], number, length
        if not length:
            raise FrameError(f"an empty CHUNK on the {self._lane.label} stream")
        self._chunk, self._chunk_left = number, length
        self.frames += 1
        return None

    def _fault(self, code: int, bits: int, length: int) -> str:
        """Describe the fault of a header."""
        where = f"on the {self._lane.label} stream"
        if code not in list(FrameType):
            return f"unknown frame type {code} {where}"
        name = FrameType(code).name
        if bits:
            return f"flags or reserved bits of a frame are set {where}"
        if code not in self._carried:
            return f"a {name} frame does not belong {where}"
        cap = self._carried[code][1]
        return f"a {name} frame of {length} bytes {where}; at most {cap} are taken"
