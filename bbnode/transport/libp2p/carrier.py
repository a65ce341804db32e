"""A libp2p connection and its streams as our carrier.

Rule: libp2p raises exceptions of every kind; here alone they become ours. Nothing here cancels a
read or write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast

import trio
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction as Libp2pDirection
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.tcp import remote_endpoint
from bbnode.transport.libp2p.workarounds import (
    close_quietly,
    drop_stale_event,
    grant_window,
    growing_window,
    hard_close,
    make_patient,
    reset_quietly,
    steady_window,
    was_reset,
    write_patiently,
)
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import ByteStream, Carrier

log = logging.getLogger(__name__)

# Negotiation has no time-out of its own here: the connection's life signs bound it, and a
# cancelled write would corrupt the connection (S4).
_NEGOTIATE_S: Final = 24 * 3600

LANE_PROTOCOLS: Final[dict[Lane, TProtocol]] = {
    lane: TProtocol(f"/bbnode/{lane.label}/1") for lane in Lane
}


class Libp2pStream(ByteStream):
    """A ByteStream on a libp2p stream; none of its calls may be cancelled."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def raw(self) -> Any:
        """The stream of libp2p."""
        return self._stream

    async def read(self, max_bytes: int) -> bytes:
        try:
            data: bytes = await self._stream.read(max_bytes)
        except StreamEOF:
            drop_stale_event(self._stream)
            if was_reset(self._stream):
                raise StreamBrokenError("the peer has reset the stream") from None
            return b""
        except Exception as error:
            drop_stale_event(self._stream)
            raise StreamBrokenError(f"reading failed: {error!r}") from error
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Write as ByteStream says; libp2p only slices and concatenates, so a view will do."""
        try:
            await self._stream.write(data)
        except Exception as error:
            raise StreamBrokenError(f"writing failed: {error!r}") from error

    async def write_patiently(self, data: bytes) -> None:
        """Write as `write` does, waiting for a slow reader while the connection lives."""
        try:
            await write_patiently(self._stream, data)
        except Exception as error:
            raise StreamBrokenError(f"writing failed: {error!r}") from error

    def make_patient(self) -> None:
        """Prepare it for `write_patiently`."""
        make_patient(self._stream)

    def growing_window(self) -> None:
        """Let libp2p size the receive window from now on."""
        growing_window(self._stream)

    async def grant_window(self, window_bytes: int) -> None:
        """Set the receive window; if the stream is broken, the next call raises."""
        try:
            await grant_window(self._stream, window_bytes)
        except Exception as error:  # noqa: BLE001 - declared boundary, see the module
            log.debug("granting a window failed: %r", error)

    @property
    def gone(self) -> bool:
        """True if its connection has ended, which libp2p shows as a clean end of the stream."""
        return bool(self._stream.muxed_stream.conn.event_shutting_down.is_set())

    async def end(self) -> None:
        try:
            await self._stream.close_write()
        except Exception as error:  # noqa: BLE001 - declared boundary, see the module
            log.debug("ending a stream failed: %r", error)

    async def close(self) -> None:
        """Close both directions of the stream; never raises."""
        await close_quietly(self._stream)

    async def reset(self) -> None:
        await reset_quietly(self._stream)


def raw_of(connection: Any) -> RawConnection:
    """Return the raw connection below a libp2p one; AttributeError if libp2p's layers changed."""
    raw: RawConnection = connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer
    return raw


def socket_of(connection: Any) -> trio.SocketStream:
    """Return the TCP stream under a libp2p connection that is not relayed."""
    stream: trio.SocketStream = cast(Any, raw_of(connection)).stream.stream
    return stream


def remote_address(connection: Any, peer: PeerId) -> Multiaddr:
    """Return the remote address: for a circuit, that of the relay with /p2p-circuit."""
    raw = raw_of(connection)
    if raw.get_connection_type() is ConnectionType.RELAYED:
        (circuit,) = raw.get_transport_addresses()
        return Multiaddr(f"{circuit}/p2p/{peer}")
    host, port = remote_endpoint(socket_of(connection)) or ("0.0.0.0", 0)
    family = "ip6" if ":" in host else "ip4"
    return Multiaddr(f"/{family}/{host}/tcp/{port}/p2p/{peer}")


class Libp2pCarrier(Carrier):
    """A Carrier on a libp2p SwarmConn."""

    def __init__(self, host: Any, connection: Any, on_closed: Callable[[Any], None]) -> None:
        self._host = host
        self._connection = connection
        self._on_closed = on_closed
        self._closed = False
        self._peer = PeerId.from_bytes(connection.muxed_conn.peer_id.to_bytes())
        inbound = connection.direction is Libp2pDirection.INBOUND
        self._direction = Direction.INBOUND if inbound else Direction.OUTBOUND
        self._address = remote_address(connection, self._peer)

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def direction(self) -> Direction:
        return self._direction

    @property
    def address(self) -> Multiaddr:
        return self._address

    async def open(self, lane: Lane) -> ByteStream:
        return await self.open_protocol(LANE_PROTOCOLS[lane])

    async def open_protocol(self, protocol_id: str) -> Libp2pStream:
        """Open a stream of any protocol; raises StreamBrokenError and must not be cancelled.

        It is on this connection; libp2p's host would choose any connection of the peer.
        """
        stream = None
        try:
            stream = await self._connection.new_stream()
            steady_window(stream)
            await self._host.multiselect_client.select_one_of(
                [TProtocol(protocol_id)], MultiselectCommunicator(stream), _NEGOTIATE_S
            )
        except Exception as error:
            if stream is not None:
                await reset_quietly(stream)
            raise StreamBrokenError(f"no stream of {protocol_id}: {error}") from error
        return Libp2pStream(stream)

    def stream_count(self) -> int:
        return len(self._connection.streams)

    def unread_bytes(self) -> int:
        return int(self._connection.muxed_conn.guard.held())

    def allow_unread(self, most_bytes: int) -> None:
        self._connection.muxed_conn.guard.unread_bytes = most_bytes

    async def hard_close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await hard_close(self._host, self._connection)
        except Exception as error:  # noqa: BLE001 - declared boundary, see the module
            log.debug("closing a connection failed: %r", error)
        self._on_closed(self._connection)
