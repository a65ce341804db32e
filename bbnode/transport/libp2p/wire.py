"""The byte stream below a secured connection: a socket, or a circuit through a relay.

Rule: `receive` and `send` never wait, so whole turns of the muxer are synchronous; `readable` and
`drain` wait, and may be cancelled without losing a byte. A wire holds a buffer only during a turn
or while bytes wait in it: an idle connection has none.
"""

from __future__ import annotations

import os
from typing import Final, Protocol

import trio

from bbnode.transport.errors import StreamBrokenError

# The exceptions of a broken wire.
BROKEN: Final = (OSError, StreamBrokenError, trio.ClosedResourceError, trio.BrokenResourceError)
# The most that is read in one turn: half a millisecond of decryption.
READ_BYTES: Final = 512 * 1024
# Maximum of free buffers of each size that a process keeps.
_KEPT_BUFFERS: Final = 4


class ReusedBuffers:
    """A pool of buffers of one size; thread-safe."""

    __slots__ = ("_free", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return an uninitialised buffer of `size` bytes."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(self.size))

    def give(self, buffer: memoryview) -> None:
        """Return a buffer to the pool; it must not be used any more."""
        if len(self._free) < _KEPT_BUFFERS:
            self._free.append(buffer)


class ByteWire(Protocol):
    """Two directions of bytes; every method but `close` may raise BROKEN."""

    # True while bytes wait or the system accepts none, so that `drain` must be awaited.
    blocked: bool

    async def readable(self) -> None:
        """Wait until `receive` returns bytes or the end."""

    def receive(self, into: memoryview) -> int | None:
        """Return the number of bytes written to `into`; 0 is the end, None is nothing yet."""

    def send(self, data: memoryview) -> int:
        """Send from the beginning of `data`; return the number of bytes accepted."""

    async def drain(self) -> None:
        """Wait until `send` accepts bytes again."""

    def close(self) -> None:
        """End both directions at once; waiting tasks get an exception."""


class SocketWire:
    """A TCP connection, which owns its socket."""

    __slots__ = ("_number", "_socket", "blocked")

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = stream.socket
        # The socket's file descriptor; -1, which system calls refuse, once it is closed.
        self._number = self._socket.fileno()
        self.blocked = False

    async def readable(self) -> None:
        await trio.lowlevel.wait_readable(self._number)

    def receive(self, into: memoryview) -> int | None:
        try:
            return os.readv(self._number, [into])
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        try:
            taken = os.write(self._number, data)
        except BlockingIOError:
            taken = 0
        self.blocked = taken < len(data)
        return taken

    async def drain(self) -> None:
        await trio.lowlevel.wait_writable(self._number)
        self.blocked = False

    def close(self) -> None:
        self._number = -1
        self._socket.close()


class Circuit(Protocol):
    """One end of a circuit; its reads and writes may be cancelled."""

    async def read(self) -> bytes:
        """Return at least one byte, b"" at the end; raises StreamBrokenError."""

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raises StreamBrokenError."""

    def cut(self) -> None:
        """End it at once, without waiting: pending reads and writes raise."""


class CircuitWire:
    """A circuit as a ByteWire."""

    __slots__ = ("_ahead", "_circuit", "_out", "blocked")

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        # Received bytes, None before the first; bytes to write.
        self._ahead: memoryview | None = None
        self._out = b""
        self.blocked = False

    async def readable(self) -> None:
        if self._ahead is None:
            self._ahead = memoryview(await self._circuit.read())

    def receive(self, into: memoryview) -> int | None:
        if self._ahead is None:
            return None
        part = self._ahead[: len(into)]
        into[: len(part)] = part
        self._ahead = self._ahead[len(part) :] or None
        return len(part)

    def send(self, data: memoryview) -> int:
        if self.blocked:
            return 0
        self._out, self.blocked = bytes(data), True
        return len(data)

    async def drain(self) -> None:
        if self._out:
            # A cancelled write breaks the circuit, so its bytes need not be kept.
            data, self._out = self._out, b""
            await self._circuit.write(data)
        self.blocked = False

    def close(self) -> None:
        self._circuit.cut()
