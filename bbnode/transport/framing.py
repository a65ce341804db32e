"""Frames on our streams: a fixed header, then the body.

Rule: the header is 16 bytes, big-endian: type (1), flags (1, zero), reserved (2, zero), body
length (4), number (8). Which types a lane carries, and how long each may be, is the table
FRAME_CAPS; a length is checked against it before anything is kept. An end of stream anywhere
but between frames is a truncation. No I/O here: the decoder is fed.

Number: of an ENVELOPE, its place in the order in which this peer numbered its envelopes (what
acknowledgements will speak of); of a PING, what its PONG repeats; of a BYE_ACK, the lane.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bbnode.transport.backend import MAX_CONTROL_ENVELOPE_BYTES, MAX_ENVELOPE_BYTES
from bbnode.transport.errors import FrameError

_HEADER = struct.Struct(">BBHIQ")
HEADER_BYTES = _HEADER.size

# A hello with every field at its bound (see hello.py).
MAX_HELLO_BYTES = 32 * 1024
# The reason of a goodbye, ASCII.
MAX_BYE_BYTES = 64


class Lane(enum.IntEnum):
    """One of the two kinds of stream; each side opens one of each on every connection."""

    CONTROL = 0
    BULK = 1

    @property
    def label(self) -> str:
        """Lower-case name, for messages and protocol ids."""
        return self.name.lower()


class FrameType(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    PING = 2
    PONG = 3
    ENVELOPE = 4
    # No more envelopes come on this lane.
    BYE = 5
    # All of the lane was read, up to its BYE.
    BYE_ACK = 6


FRAME_CAPS: dict[tuple[Lane, FrameType], int] = {
    (Lane.CONTROL, FrameType.HELLO): MAX_HELLO_BYTES,
    (Lane.CONTROL, FrameType.PING): 0,
    (Lane.CONTROL, FrameType.PONG): 0,
    (Lane.CONTROL, FrameType.ENVELOPE): MAX_CONTROL_ENVELOPE_BYTES,
    (Lane.CONTROL, FrameType.BYE): MAX_BYE_BYTES,
    (Lane.CONTROL, FrameType.BYE_ACK): 0,
    (Lane.BULK, FrameType.ENVELOPE): MAX_ENVELOPE_BYTES,
    (Lane.BULK, FrameType.BYE): MAX_BYE_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One decoded frame."""

    type: FrameType
    number: int
    body: bytes


def encode_header(frame_type: FrameType, body_bytes: int, number: int = 0) -> bytes:
    """The 16 header bytes of a frame with a body of `body_bytes` bytes."""
    return _HEADER.pack(frame_type, 0, 0, body_bytes, number)


class FrameDecoder:
    """Turns the bytes of one incoming stream into frames."""

    __slots__ = ("_buffer", "_lane", "_max_envelope_bytes", "_want")

    def __init__(self, lane: Lane, max_envelope_bytes: int = MAX_ENVELOPE_BYTES) -> None:
        self._lane = lane
        self._max_envelope_bytes = max_envelope_bytes
        self._buffer = bytearray()
        # (type, number, length) of the frame whose body is still to come.
        self._want: tuple[FrameType, int, int] | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether an end of stream now would cut a frame short."""
        return self._want is not None or bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes; raises FrameError at the first that is none."""
        self._buffer += data
        while True:
            if self._want is None:
                if len(self._buffer) < HEADER_BYTES:
                    return
                self._want = self._read_header(bytes(self._buffer[:HEADER_BYTES]))
                del self._buffer[:HEADER_BYTES]
            frame_type, number, length = self._want
            if len(self._buffer) < length:
                return
            body = bytes(memoryview(self._buffer)[:length])
            del self._buffer[:length]
            self._want = None
            yield Frame(type=frame_type, number=number, body=body)

    def _read_header(self, header: bytes) -> tuple[FrameType, int, int]:
        code, flags, reserved, length, number = _HEADER.unpack(header)
        where = f"on the {self._lane.label} stream"
        try:
            frame_type = FrameType(code)
        except ValueError as error:
            raise FrameError(f"unknown frame type {code} {where}") from error
        if flags or reserved:
            raise FrameError(f"flags or reserved bits of a frame are set {where}")
        cap = FRAME_CAPS.get((self._lane, frame_type))
        if cap is None:
            raise FrameError(f"a {frame_type.name} frame has no place {where}")
        if frame_type is FrameType.ENVELOPE:
            cap = min(cap, self._max_envelope_bytes)
        if length > cap:
            raise FrameError(
                f"a {frame_type.name} frame of {length} bytes {where}; at most {cap} are taken"
            )
        return frame_type, number, length
