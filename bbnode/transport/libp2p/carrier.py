"""A libp2p connection and its streams as our carrier.

Rule: libp2p raises exceptions of every kind; here alone they become ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast

import trio
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction as Libp2pDirection
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.muxer import MuxedStream, Muxer
from bbnode.transport.libp2p.tcp import remote_endpoint
from bbnode.transport.libp2p.workarounds import (
    close_quietly,
    hard_close,
    reset_quietly,
)
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import ByteStream, Carrier

log = logging.getLogger(__name__)

# Negotiation has no time-out of its own here: the connection's life signs bound it.
_NEGOTIATE_S: Final = 24 * 3600

LANE_PROTOCOLS: Final[dict[Lane, TProtocol]] = {
    lane: TProtocol(f"/bbnode/{lane.label}/1") for lane in Lane
}


class Libp2pStream(ByteStream):
    """A ByteStream on a stream of our muxer; its calls may be cancelled."""

    __slots__ = ("_muxed", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._muxed: MuxedStream = stream.muxed_stream

    @property
    def raw(self) -> Any:
        """The stream of libp2p."""
        return self._stream

    async def read(self, max_bytes: int) -> bytes:
        try:
            return await self._muxed.read(max_bytes)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            raise StreamBrokenError(f"reading failed: {error}") from error

    async def feed(self, take: Callable[[memoryview], None]) -> None:
        try:
            await self._muxed.feed(take)
        except MuxedStreamError as error:
            raise StreamBrokenError(f"reading failed: {error}") from error

    async def write(self, *data: bytes | memoryview) -> None:
        try:
            await self._muxed.write(*data)
        except MuxedStreamError as error:
            raise StreamBrokenError(f"writing failed: {error}") from error

    def write_now(self, data: bytes) -> bool:
        try:
            return self._muxed.write_now(data)
        except MuxedStreamError as error:
            raise StreamBrokenError(f"writing failed: {error}") from error

    def set_window(self, window_bytes: int) -> None:
        """Let the peer send this much ahead of the reader."""
        self._muxed.set_window(window_bytes)

    @property
    def broken(self) -> bool:
        """True after a reset of either side, or the end of the connection."""
        return bool(self._muxed.failure)

    def abort(self, reason: str) -> None:
        """Reset the stream at once: its reader and its writer raise `reason`."""
        self._muxed.abort(reason)

    async def end(self) -> None:
        await self._muxed.close_write()

    async def close(self) -> None:
        """Close both directions of the stream; never raises."""
        await close_quietly(self._stream)

    async def reset(self) -> None:
        await reset_quietly(self._stream)


def raw_of(connection: Any) -> RawConnection:
    """Return the raw connection below a libp2p one."""
    muxer: Muxer = connection.muxed_conn
    return muxer.raw


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
        """Open a stream of any protocol; raises StreamBrokenError, and may be cancelled.

        It is on this connection; libp2p's host would choose any connection of the peer.
        """
        stream, agreed = None, False
        try:
            stream = await self._connection.new_stream()
            await self._host.multiselect_client.select_one_of(
                [TProtocol(protocol_id)], MultiselectCommunicator(stream), _NEGOTIATE_S
            )
            agreed = True
        except Exception as error:
            raise StreamBrokenError(f"no stream of {protocol_id}: {error}") from error
        finally:
            if stream is not None and not agreed:
                with trio.CancelScope(shield=True):
                    await reset_quietly(stream)
        return Libp2pStream(stream)

    def stream_count(self) -> int:
        return len(self._connection.streams)

    def unread_bytes(self) -> int:
        return int(self._connection.muxed_conn.held_bytes)

    def allow_unread(self, most_bytes: int) -> None:
        self._connection.muxed_conn.unread_bytes = most_bytes

    async def hard_close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await hard_close(self._host, self._connection)
        except Exception as error:  # noqa: BLE001 - declared boundary, see the module
            log.debug("closing a connection failed: %r", error)
        self._on_closed(self._connection)
