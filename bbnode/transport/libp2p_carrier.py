"""A libp2p connection and its streams as our carrier.

Rule: libp2p lets exceptions of every kind out; this is the one boundary where they become ours.
Reads and writes are never cancelled from here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction as Libp2pDirection
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import Direction
from bbnode.transport.carrier import ByteStream
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.framing import Lane
from bbnode.transport.libp2p_tcp import remote_endpoint
from bbnode.transport.libp2p_workarounds import hard_close, reset_quietly

log = logging.getLogger(__name__)

# Negotiation has no time-out of its own here: the connection's life signs bound it, and a
# cancelled write would corrupt the connection (S4).
_NEGOTIATE_S: Final = 24 * 3600

LANE_PROTOCOLS: Final[dict[Lane, TProtocol]] = {
    lane: TProtocol(f"/bbnode/{lane.label}/1") for lane in Lane
}


class Libp2pStream:
    """A ByteStream on a libp2p stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self, max_bytes: int) -> bytes:
        """See ByteStream."""
        try:
            data: bytes = await self._stream.read(max_bytes)
        except StreamEOF:
            return b""
        except Exception as error:
            raise StreamBrokenError(f"reading failed: {error!r}") from error
        return data

    async def write(self, data: bytes) -> None:
        """See ByteStream."""
        try:
            await self._stream.write(data)
        except Exception as error:
            raise StreamBrokenError(f"writing failed: {error!r}") from error

    async def reset(self) -> None:
        """See ByteStream."""
        await reset_quietly(self._stream)


def socket_of(connection: Any) -> trio.SocketStream:
    """The TCP stream under a libp2p connection; AttributeError if libp2p's layers changed."""
    noise_packets = connection.muxed_conn.secured_conn.conn.read_writer
    stream: trio.SocketStream = noise_packets.read_write_closer.stream.stream
    return stream


class Libp2pCarrier:
    """A Carrier on a libp2p SwarmConn."""

    def __init__(self, host: Any, connection: Any, on_closed: Callable[[Any], None]) -> None:
        self._host = host
        self._connection = connection
        self._on_closed = on_closed
        self._closed = False
        self._peer = PeerId.from_bytes(connection.muxed_conn.peer_id.to_bytes())
        inbound = connection.direction is Libp2pDirection.INBOUND
        self._direction = Direction.INBOUND if inbound else Direction.OUTBOUND
        endpoint = remote_endpoint(socket_of(connection)) or ("0.0.0.0", 0)
        family = "ip6" if ":" in endpoint[0] else "ip4"
        self._address = Multiaddr(f"/{family}/{endpoint[0]}/tcp/{endpoint[1]}/p2p/{self._peer}")

    @property
    def peer(self) -> PeerId:
        """Who the Noise handshake proved the other side to be."""
        return self._peer

    @property
    def direction(self) -> Direction:
        """Who dialled."""
        return self._direction

    @property
    def address(self) -> Multiaddr:
        """The remote end, with /p2p/<peer>."""
        return self._address

    async def open(self, lane: Lane) -> ByteStream:
        """See Carrier. On this very connection: libp2p's host would choose one of the peer's."""
        stream = None
        try:
            stream = await self._connection.new_stream()
            await self._host.multiselect_client.select_one_of(
                [LANE_PROTOCOLS[lane]], MultiselectCommunicator(stream), _NEGOTIATE_S
            )
        except Exception as error:
            if stream is not None:
                await reset_quietly(stream)
            raise StreamBrokenError(f"no {lane.label} stream: {error}") from error
        return Libp2pStream(stream)

    def unread_bytes(self) -> int:
        """See Carrier."""
        return sum(map(len, self._connection.muxed_conn.stream_buffers.values()))

    async def hard_close(self) -> None:
        """See Carrier."""
        if self._closed:
            return
        self._closed = True
        try:
            await hard_close(self._host, self._connection)
        except Exception as error:  # noqa: BLE001 - declared boundary, see the module
            log.debug("closing a connection failed: %r", error)
        self._on_closed(self._connection)
