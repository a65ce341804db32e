"""Work-arounds: what a peer can make py-libp2p 0.8.1 read, keep and wait for.

Rule: the numbers are those of the list in `libp2p.workarounds`. What a peer announces is checked
before anything of it is read; what is over a bound ends the connection there and then.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

from libp2p.io.exceptions import IOException
from libp2p.io.utils import read_exactly
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import DEFAULT_NEGOTIATE_TIMEOUT
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.yamux import yamux

from bbnode.ir.caps import MAX_NEGOTIATION_BYTES, MAX_NEGOTIATION_MESSAGES

log = logging.getLogger(__name__)

# Bytes of a length up to that: more are refused before they are read.
_LENGTH_BYTES: Final = 2

_HEADER: Final = struct.Struct(yamux.YAMUX_HEADER_FORMAT)
# The frame of a stream that we have forgotten; and all that fits into a new stream's window.
_UNKNOWN_STREAM_BYTES: Final = yamux.DEFAULT_WINDOW_SIZE


class BoundedCommunicator(MultiselectCommunicator):
    """One side of a negotiation: short messages, and few of them (S16)."""

    def __init__(self, read_writer: Any) -> None:
        super().__init__(read_writer)
        self._left = MAX_NEGOTIATION_MESSAGES

    async def read(self) -> str:
        """The next message; raises MultiselectCommunicatorError for what is none."""
        self._left -= 1
        if self._left < 0:
            raise MultiselectCommunicatorError("the negotiation does not come to an end")
        try:
            size = await self._length()
            if not 0 < size <= MAX_NEGOTIATION_BYTES:
                raise MultiselectCommunicatorError(f"a message of {size} bytes")
            message = await read_exactly(self.read_writer, size)
            if message[-1:] != b"\n":
                raise MultiselectCommunicatorError("a message without its end of line")
            return message[:-1].decode()
        except (IOException, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError("fail to read a message") from error

    async def _length(self) -> int:
        length = 0
        for at in range(_LENGTH_BYTES):
            (byte,) = await read_exactly(self.read_writer, 1)
            length |= (byte & 0x7F) << (7 * at)
            if byte < 0x80:
                return length
        raise MultiselectCommunicatorError("a message of a length that no message has")


def bound_negotiations(host: Any) -> None:
    """Negotiate by short messages alone: of connections, of muxers and of each stream (S16)."""
    upgrader = host.get_network().upgrader
    stages = (upgrader.security_multistream, upgrader.muxer_multistream)
    for owner in (host, *(stage._selector for stage in stages)):
        _bound_server(owner.multiselect)
        _bound_client(owner.multiselect_client)


def _bound_server(server: Any) -> None:
    inner = server.negotiate

    async def negotiate(
        communicator: Any, negotiate_timeout: float = DEFAULT_NEGOTIATE_TIMEOUT
    ) -> Any:
        return await inner(BoundedCommunicator(communicator.read_writer), negotiate_timeout)

    server.negotiate = negotiate


def _bound_client(client: Any) -> None:
    inner = client.select_one_of

    async def select_one_of(
        protocols: Any, communicator: Any, negotiate_timeout: float = DEFAULT_NEGOTIATE_TIMEOUT
    ) -> Any:
        bounded = BoundedCommunicator(communicator.read_writer)
        return await inner(protocols, bounded, negotiate_timeout)

    client.select_one_of = select_one_of


class FrameGuard:
    """Looks at the header of each Yamux frame of a connection before libp2p does (S17).

    `read` takes the place of the secured connection's: libp2p asks it for a header, and then for
    the body of a DATA frame, whatever it will do with it.
    """

    __slots__ = ("_body", "_max_streams", "_muxer", "_on_refused", "_read", "unread_bytes")

    def __init__(
        self,
        muxer: Any,
        *,
        unread_bytes: int,
        max_streams: int,
        on_refused: Callable[[Any, str], None],
    ) -> None:
        self._muxer = muxer
        self._read: Callable[[int | None], Awaitable[bytes]] = muxer.secured_conn.read
        self._max_streams = max_streams
        self._on_refused = on_refused
        # What is left of the frame that is being read.
        self._body = 0
        # What all streams together may hold.
        self.unread_bytes = unread_bytes

    async def read(self, n: int | None = None) -> bytes:
        """As the secured connection reads; raises IOException at a frame that must not be."""
        data = await self._read(n)
        if self._body:
            self._body -= len(data)
        elif len(data) == yamux.HEADER_SIZE:
            reason = self._fault(data)
            if reason:
                self._on_refused(self._muxer, reason)
                raise IOException(reason)
        return data

    def _fault(self, header: bytes) -> str:
        """Why a frame must not be; "" when it may."""
        version, kind, flags, number, length = _HEADER.unpack(header)
        if version != 0 or kind > yamux.TYPE_GO_AWAY:
            return f"no frame of the muxer: version {version}, type {kind}"
        if kind > yamux.TYPE_WINDOW_UPDATE:
            return ""
        streams = self._muxer.streams
        stream = streams.get(number)
        if stream is None and flags & yamux.FLAG_SYN:
            # The side that dialled has the odd numbers.
            if number == 0 or (number % 2 == 1) == self._muxer.is_initiator_value:
                return f"a new stream has number {number}, which is not the peer's to give"
            if len(streams) >= self._max_streams:
                return f"more than {self._max_streams} streams"
        if kind == yamux.TYPE_DATA and length:
            self._body = length
            window = _UNKNOWN_STREAM_BYTES if stream is None else stream.recv_window
            if length > window:
                return f"the peer ignores our receive window: {length} bytes, {window} are open"
            if self.held() + length > self.unread_bytes:
                return f"the peer ignores our receive windows: over {self.unread_bytes} bytes"
        return ""

    def held(self) -> int:
        """What lies unread on all streams."""
        return sum(map(len, self._muxer.stream_buffers.values()))


def guard_frames(
    host: Any,
    *,
    unread_bytes: int,
    max_streams: int,
    on_refused: Callable[[Any, str], None],
) -> None:
    """Have each connection's frames checked before they are read (S17).

    `on_refused` is given the muxer and the reason; the connection ends by itself.
    """
    upgrader = host.get_network().upgrader
    inner = upgrader.upgrade_connection

    async def upgrade_connection(secured: Any, peer_id: Any) -> Any:
        muxer = await inner(secured, peer_id)
        muxer.guard = guard = FrameGuard(
            muxer, unread_bytes=unread_bytes, max_streams=max_streams, on_refused=on_refused
        )
        secured.read = guard.read
        return muxer

    upgrader.upgrade_connection = upgrade_connection


def drop_stream(muxed: Any) -> None:
    """Forget a stream that was reset, with what lies unread on it (S18)."""
    muxer, number = muxed.conn, muxed.stream_id
    if muxer.streams.get(number) is not muxed:
        return
    del muxer.streams[number]
    muxer.stream_buffers.pop(number, None)
    arrived = muxer.stream_events.pop(number, None)
    if arrived is not None:
        arrived.set()


class OrphanStreams:
    """Streams that belong to nobody any more, and since when (S18)."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[Any, float] = {}

    def overdue(self, found: set[Any], now_s: float) -> list[Any]:
        """Those of what was found at this look that have been there for long enough."""
        self._since = {each: self._since.get(each, now_s) for each in found}
        due = [each for each, since in self._since.items() if now_s - since >= self._after_s]
        for each in due:
            del self._since[each]
        return due


async def reset_muxed(muxed: Any) -> None:
    """Reset a stream that has no owner, and wake the task that reads on it (S12).

    It waits for its turn to write, at most until the end of the connection.
    """
    arrived = muxed.conn.stream_events.get(muxed.stream_id)
    try:
        await muxed.reset()
    except Exception as error:  # noqa: BLE001 - declared boundary: libp2p lets anything out
        log.debug("a reset failed: %r", error)
    drop_stream(muxed)
    if arrived is not None:
        arrived.set()
