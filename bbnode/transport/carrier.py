"""What a link needs of one secured connection. The libp2p files implement it.

Rule: stream I/O is never cancelled (a cancelled write corrupts the whole connection in
py-libp2p 0.8.1); whoever wants out of it calls `hard_close`, which makes every read and write
on the connection return or raise.
"""

from __future__ import annotations

from typing import Protocol

from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.links.framing import Lane


class ByteStream(Protocol):
    """One stream of a connection."""

    async def read(self, max_bytes: int) -> bytes:
        """Between 1 and `max_bytes` bytes; b"" at the end; StreamBrokenError after a reset."""
        ...

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`; raises StreamBrokenError."""
        ...

    async def end(self) -> None:
        """Write no more: the other side reads the end; never raises."""
        ...

    async def reset(self) -> None:
        """Throw the stream away, and wake who reads on it; never raises."""
        ...


class Carrier(Protocol):
    """One secured connection with an authenticated peer."""

    @property
    def peer(self) -> PeerId:
        """Who the handshake proved the other side to be."""
        ...

    @property
    def direction(self) -> Direction:
        """Who dialled."""
        ...

    @property
    def address(self) -> Multiaddr:
        """The remote end of the connection, with /p2p/<peer>."""
        ...

    async def open(self, lane: Lane) -> ByteStream:
        """A new outgoing stream for `lane`; raises StreamBrokenError."""
        ...

    def stream_count(self) -> int:
        """Streams of the connection, of both sides and all protocols."""
        ...

    def unread_bytes(self) -> int:
        """What the connection has buffered on all its streams and nobody has read."""
        ...

    def allow_unread(self, most_bytes: int) -> None:
        """How much may lie unread from now on, on all streams together."""
        ...

    async def hard_close(self) -> None:
        """End the connection at once, whatever the peer does; never raises, never hangs."""
        ...
