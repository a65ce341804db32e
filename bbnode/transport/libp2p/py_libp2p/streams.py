"""Adapters of our connections and streams for py-libp2p's Swarm.

Rule: they keep no state of their own. A connection lives and ends with ours; a stream is ours, with
its protocol already negotiated when py-libp2p gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_OTHER_STREAMS
from bbnode.transport.base import Direction
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.handshake import NOISE_ID
from bbnode.transport.libp2p.muxer import YAMUX_ID, MuxedStream
from bbnode.transport.libp2p.negotiation import Proposal

if TYPE_CHECKING:
    from multiaddr import Multiaddr


class LentStream(IMuxedStream):
    """A stream that py-libp2p uses.

    Its reads and writes may be cancelled; one task reads, and any number write.
    """

    def __init__(self, conn: LentConnection, stream: MuxedStream, agreed: str = "") -> None:
        """Wrap a stream; `agreed` is the protocol that we have negotiated with the peer.

        py-libp2p negotiates it once more, against bytes that are replayed here; its answers are
        discarded, since they were sent before.
        """
        self.muxed_conn: LentConnection = conn
        self.stream = stream
        self.stream_id = stream.stream_id
        self._ahead = Proposal(agreed).opening if agreed else b""
        self._answered = len(self._ahead)
        self._writing = trio.Lock()
        self._deadline_s: float | None = None

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to `n` bytes. Raises MuxedStreamEOF, and MuxedStreamReset."""
        if n == 0:
            return b""
        bounded = n is not None and n > 0
        if self._ahead:
            most = n if bounded else None
            data, self._ahead = self._ahead[:most], self._ahead[len(self._ahead[:most]) :]
            return data
        try:
            data = await (self.stream.read(n) if bounded and n else self.stream.read())
        except StreamBrokenError as error:
            raise MuxedStreamReset(str(error)) from error
        if not data:
            raise MuxedStreamEOF("the stream has ended")
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`. Raises MuxedStreamClosed after our end, and MuxedStreamReset."""
        if self._answered:
            skipped = min(self._answered, len(data))
            self._answered -= skipped
            data = data[skipped:]
            if not data:
                return
        async with self._writing:
            try:
                await self.stream.write(data)
            except StreamBrokenError as error:
                closed = self.stream.end_out and not self.stream.broken
                raise (MuxedStreamClosed if closed else MuxedStreamReset)(str(error)) from error

    async def close(self) -> None:
        """End our direction; inbound data can still be read."""
        await self.stream.end()

    async def reset(self) -> None:
        """End both directions at once."""
        self.stream.abort("the stream was reset here")
        await trio.lowlevel.checkpoint()

    def set_deadline(self, ttl: int) -> None:
        """Only check the argument: py-libp2p's own time-outs cancel its waits."""
        if ttl < 0:
            raise ValueError(f"a deadline of {ttl} s")
        self._deadline_s = ttl

    @property
    def is_closed(self) -> bool:
        """True if both directions are closed."""
        return self.stream.is_closed

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return IP address and port of the peer, None through a relay."""
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> Self:
        return self


class LentConnection(IMuxedConn):
    """One of our connections, as a muxed connection for Swarm."""

    muxed_conn: Any
    negotiated_security_protocol: Final = NOISE_ID
    negotiated_muxer_protocol: Final = YAMUX_ID

    def __init__(
        self, connection: Connection, on_open: Callable[[LentConnection, MuxedStream], None]
    ) -> None:
        """Wrap a connection; `on_open` is called with each stream that py-libp2p opens."""
        self.connection = connection
        self.peer_id = ID(connection.peer.to_bytes())
        self.event_started = trio.Event()
        # Set once Swarm has added it, or never will.
        self.joined = trio.Event()
        # Swarm sets it and calls it when it closes; it learns of the end from `accept_stream`.
        self.on_close: Any = None
        self._on_open = on_open
        self._arrived, self._arriving = trio.open_memory_channel[LentStream](MAX_OTHER_STREAMS)

    @property
    def is_initiator(self) -> bool:
        """True if we dialled."""
        return self.connection.direction is Direction.OUTBOUND

    @property
    def is_established(self) -> bool:
        """True while it can have streams."""
        return not self.connection.muxer.ended

    @property
    def is_closed(self) -> bool:
        """True once it has ended."""
        return bool(self.connection.muxer.ended)

    async def start(self) -> None:
        """Do nothing more: our own host runs the muxer."""
        self.event_started.set()
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """End the connection; a peer that is to be kept connected is dialled again."""
        self.connection.close()
        await trio.lowlevel.checkpoint()

    async def open_stream(self) -> LentStream:
        """Open a stream, before its protocol is negotiated; raises MuxedConnUnavailable."""
        await trio.lowlevel.checkpoint()
        try:
            stream = self.connection.muxer.open_stream()
        except StreamBrokenError as error:
            raise MuxedConnUnavailable(str(error)) from error
        self._on_open(self, stream)
        return LentStream(self, stream)

    def take(self, stream: MuxedStream, protocol: str) -> bool:
        """Queue a stream of the peer for Swarm; return False if nothing will accept it."""
        try:
            self._arrived.send_nowait(LentStream(self, stream, protocol))
        except (trio.ClosedResourceError, trio.BrokenResourceError, trio.WouldBlock):
            return False
        return True

    async def accept_stream(self) -> LentStream:
        """Return the next stream of the peer; raises MuxedConnUnavailable at the end."""
        try:
            return await self._arriving.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise MuxedConnUnavailable(self.connection.muxer.ended or "closed") from error

    def ended(self) -> None:
        """Report the end to Swarm, and reset the streams that it has not accepted."""
        self.joined.set()
        self._arrived.close()
        while True:
            try:
                self._arriving.receive_nowait().stream.abort("nobody serves it")
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return IP address and port of the peer, None through a relay."""
        parts = str(self.connection.way).split("/")
        if self.get_connection_type() is not ConnectionType.DIRECT or len(parts) < 5:
            return None
        return parts[2], int(parts[4])

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the address of the peer, or of the circuit that leads there."""
        return [self.connection.way]

    def get_connection_type(self) -> ConnectionType:
        """Return the connection type: direct or relayed."""
        relayed = is_relayed(self.connection.way)
        return ConnectionType.RELAYED if relayed else ConnectionType.DIRECT
