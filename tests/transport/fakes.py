"""A pair of connected carriers without libp2p: links are tested on these, in virtual time."""

from __future__ import annotations

import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import Link


class PipeStream:
    """One direction of a pipe as a ByteStream; the other end has the same `_Pipe`."""

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._inward = inward
        self._outward = outward

    async def read(self, max_bytes: int) -> bytes:
        return await self._inward.read(max_bytes)

    async def feed(self, take) -> None:
        while data := await self.read(65_536):
            take(memoryview(data))

    @property
    def failure(self) -> str:
        return "reset" if self._inward.broken else ""

    def listen(self, take, on_broken=lambda: None) -> None:
        self._inward.take, self._inward.on_broken = take, on_broken

    async def write(self, *data: bytes) -> None:
        await self._outward.write(b"".join(data))

    def write_now(self, data: bytes) -> bool:
        return False

    async def end(self) -> None:
        self._outward.end()

    async def reset(self) -> None:
        self._inward.break_off()
        self._outward.break_off()


class _Pipe:
    """Bytes in one direction, with a window like a muxed stream's."""

    WINDOW_BYTES = 256 * 1024

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.ended = False
        self.broken = False
        self.take = None
        self.on_broken = lambda: None
        self._changed = trio.Event()

    def _change(self) -> None:
        if self.take is not None and self.buffer:
            data = bytes(self.buffer)
            self.buffer.clear()
            self.take(memoryview(data))
        self._changed.set()
        self._changed = trio.Event()

    def break_off(self) -> None:
        self.broken = True
        self._change()
        self.on_broken()

    def end(self) -> None:
        self.ended = True
        self._change()

    async def read(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self.buffer and not self.ended and not self.broken:
            await self._changed.wait()
        if self.broken:
            raise StreamBrokenError("reset")
        data = bytes(self.buffer[:max_bytes])
        del self.buffer[:max_bytes]
        self._change()
        return data

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while len(view):
            while len(self.buffer) >= self.WINDOW_BYTES and not (self.broken or self.ended):
                await self._changed.wait()
            if self.broken or self.ended:
                raise StreamBrokenError("reset")
            room = self.WINDOW_BYTES - len(self.buffer)
            self.buffer += view[:room]
            view = view[room:]
            self._change()


class PipeCarrier:
    """One end of a connection; `serve` (if set) gets each stream that the other end opens."""

    def __init__(self, peer: PeerId, direction: Direction, nursery: trio.Nursery) -> None:
        self.peer = peer
        self.direction = direction
        self.address = Multiaddr(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}")
        self.other: PipeCarrier | None = None
        self.link: Link | None = None
        self.opened: list[tuple[Lane, PipeStream]] = []
        self.closed = False
        self._pipes: list[_Pipe] = []
        self._nursery = nursery

    wants_lanes = True

    async def open(self, lane: Lane) -> PipeStream:
        await trio.lowlevel.checkpoint()
        assert self.other is not None
        if self.closed:
            raise StreamBrokenError("closed")
        there, back = _Pipe(), _Pipe()
        self._pipes += [there, back]
        mine, theirs = PipeStream(back, there), PipeStream(there, back)
        self.opened.append((lane, mine))
        if self.other.link is not None:
            self._nursery.start_soon(self.other.link.serve_inbound, lane, theirs)
        return mine

    def stream_count(self) -> int:
        return len(self._pipes)

    def unread_bytes(self) -> int:
        return sum(len(pipe.buffer) for pipe in self._pipes)

    def allow_unread(self, most_bytes: int) -> None:
        pass

    async def hard_close(self) -> None:
        await trio.lowlevel.checkpoint()
        for end in (self, self.other):
            assert end is not None
            end.closed = True
            for pipe in end._pipes:
                pipe.end()


def carrier_pair(
    dialler: PeerId, listener: PeerId, nursery: trio.Nursery
) -> tuple[PipeCarrier, PipeCarrier]:
    """(what the dialler holds, what the listener holds)."""
    out = PipeCarrier(listener, Direction.OUTBOUND, nursery)
    inward = PipeCarrier(dialler, Direction.INBOUND, nursery)
    out.other, inward.other = inward, out
    return out, inward
