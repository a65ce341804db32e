"""A circuit as libp2p's raw connection: Noise and Yamux run over it from end to end.

Rule: libp2p reads, writes and closes it like a socket. Closing it takes no time and waits for
nobody, since `hard_close` relies on that: the stream itself is reset by the task that owns it.
"""

from __future__ import annotations

import math
from typing import Final

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException

from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.protocols import PumpedStream

_READ_BYTES: Final = 64 * 1024


class CircuitPipe(ReadWriteCloser):
    """One end of a circuit. Unlike a socket's, its reads and writes may be cancelled."""

    def __init__(self, stream: PumpedStream, *, wear_bytes: float = math.inf) -> None:
        """`worn` is set once `wear_bytes` of both directions have gone through, or it is closed."""
        self._stream = stream
        self._rest = memoryview(b"")
        self._left = wear_bytes
        self.worn = trio.Event()
        self.closed = trio.Event()

    async def read(self, n: int | None = None) -> bytes:
        """Between 1 and `n` bytes, b"" at the end; raises IOException."""
        if not self._rest:
            try:
                data = await self._stream.read(_READ_BYTES)
            except StreamBrokenError as error:
                raise IOException(f"the circuit is gone: {error}") from error
            self._count(len(data))
            self._rest = memoryview(data)
        count = len(self._rest) if n is None or n < 0 else n
        part, self._rest = self._rest[:count], self._rest[count:]
        return bytes(part)

    async def write(self, data: bytes) -> None:
        """All of `data`; raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except StreamBrokenError as error:
            raise ConnectionClosedError(f"the circuit is gone: {error}") from error
        self._count(len(data))

    async def close(self) -> None:
        """End it at once; whoever reads or writes comes back with an error."""
        self.closed.set()
        self.worn.set()
        self._stream.abort("the circuit was closed here")
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> tuple[str, int] | None:
        """None: the address of a circuit is no IP address."""
        return None

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left <= 0:
            self.worn.set()
