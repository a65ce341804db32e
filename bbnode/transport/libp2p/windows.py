"""Work-arounds: what may be under way on a stream of py-libp2p 0.8.1, and who waits for room.

Rule: the numbers are those of the list in `libp2p.workarounds`. A window is set here or by
libp2p, never by both.
"""

from __future__ import annotations

from typing import Any

import trio
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, YamuxStream


async def grant_window(stream: Any, window_bytes: int) -> None:
    """Let the peer send `window_bytes` on a stream at once, and tell it of room by quarters (S13).

    How much really comes is bounded by our own acknowledgements.
    """
    steady_window(stream, window_bytes)
    muxed = stream.muxed_stream
    more = window_bytes - DEFAULT_WINDOW_SIZE
    if more > 0:
        muxed.recv_window += more
        await muxed.send_window_update(more)


def steady_window(stream: Any, window_bytes: int = DEFAULT_WINDOW_SIZE) -> None:
    """Let the window not grow, and tell the peer of room by quarters of it.

    For a stream that is new: libp2p would double it with each small read of the negotiation, to
    4 MiB before the first byte of ours (S13).
    """
    muxed = stream.muxed_stream
    pending = 0

    async def release(*, bytes_read: int = 0) -> None:
        nonlocal pending
        pending += bytes_read
        if pending * 4 >= window_bytes:
            released, pending = pending, 0
            muxed.recv_window += released
            await muxed.send_window_update(released)

    muxed._auto_tune_and_send_window_update = release


def growing_window(stream: Any) -> None:
    """Let libp2p do with the window what it does: undoes `steady_window`."""
    vars(stream.muxed_stream).pop("_auto_tune_and_send_window_update", None)


class _RoomyStream(YamuxStream):
    """A stream that tells its writer of room in the window, and of its end (S15)."""

    room: trio.Event

    @property
    def send_window(self) -> int:
        return int(self.__dict__["send_window"])

    @send_window.setter
    def send_window(self, value: int) -> None:
        self.__dict__["send_window"] = value
        self.room.set()

    @property
    def closed(self) -> bool:
        return bool(self.__dict__["closed"])

    @closed.setter
    def closed(self, value: bool) -> None:
        self.__dict__["closed"] = value
        self.room.set()


def make_patient(stream: Any) -> None:
    """Ready a stream for `write_patiently`."""
    muxed = stream.muxed_stream
    muxed.room = trio.Event()
    # libp2p makes its streams itself, of the one class that it knows.
    muxed.__class__ = _RoomyStream


async def write_patiently(stream: Any, data: bytes) -> None:
    """Write no more than the reader's window has room for, and wait for room without end (S15).

    One task writes a stream, so the room stays. It ends when the stream or its connection does.
    libp2p itself would look for room every 10 ms, and give up after 5 s.
    """
    muxed = stream.muxed_stream
    at = 0
    while at < len(data):
        while muxed.send_window <= 0 and not muxed.closed:
            muxed.room = trio.Event()
            await muxed.room.wait()
        part = data[at : at + max(muxed.send_window, 1)]
        await stream.write(part)
        at += len(part)
