"""Work-arounds for the faults of py-libp2p 0.8.1.

Rule: one function or class per fault, named after its effect; `harden` applies those that change a
host, before it runs; each has a test against real hosts. S1 to S10 are show-stoppers that were
measured on 0.8.1; S11 to S19 were found in its source.

S1  the default host accepts plaintext      `build_host`, `require_noise_alone`
S2  an exception in a handler ends the host `guard_streams`
S3  inbound slots are never given back      `free_inbound_slots`
S4  cancelled I/O corrupts the connection   rule of `carrier`; time-outs of negotiation raised
S5  disconnect hangs on a stuck peer        `hard_close`
S6  dead links are not noticed              socket options in `libp2p.tcp`, pings in `link`
S7  cancelled dials leak slots              `drop_resource_manager`, time-outs inside the dial
S8  a failed dial blacklists the peer       `dial_addr` per address, never `connect`
S9  the receive window is not enforced      S17, and `PeerTable.check_unread` for the sum
S10 every known peer is dialled             `dial_nobody_unasked`
S11 ping replies are written by the task that reads: with both sides sending, and both send
    buffers full, neither reads any more    `silence_muxer_pings`
S12 a reset does not wake its own reader    `reset_quietly`, `drop_stale_event`
S13 each read sends a window update, so half of all packets and system calls are of 12 bytes; and
    the window begins with 256 KiB, and grows to 4 MiB before our first byte
    `grant_window`, `steady_window`
S14 a reset during a read looks like a clean end `was_reset`
S15 a write gives up after 5 s without room in the reader's window, so that a relay would have to
    buffer everything `make_patient`, `write_patiently`
S16 a negotiation, before Noise and on each stream, has no bound on the length or number of its
    messages, which need not be text `bound_negotiations`
S17 frames beyond the window are read and kept, and the number of streams has no bound
    `guard_frames`
S18 a stream that was reset keeps its unread bytes for 60 s, and one that only we have ended
    stays for ever `drop_stream`, `OrphanStreams`
S19 a read asks the system for as much as the peer announced `ReadAheadStream` in `libp2p.tcp`
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.io.utils import read_exactly
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import DEFAULT_NEGOTIATE_TIMEOUT
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, Yamux, YamuxStream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.transport.exceptions import SecurityUpgradeFailure
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    DIALLED_HANDSHAKE_S,
    MAX_NEGOTIATION_BYTES,
    MAX_NEGOTIATION_MESSAGES,
    MAX_STREAMS,
)
from bbnode.transport.errors import InsecureTransportError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.tcp import BoundedTcp, ReadAheadStream


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
    """Keep the window from growing, and send updates by quarters of it.

    It is for a new stream: libp2p would double the window with each small read of the negotiation,
    to 4 MiB before our first byte (S13).
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
    """Undo `steady_window`: libp2p sizes the window again."""
    vars(stream.muxed_stream).pop("_auto_tune_and_send_window_update", None)


class _RoomyStream(YamuxStream):
    """A stream that wakes its writer when the window has room, or when it ends (S15)."""

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
    """Prepare a stream for `write_patiently`."""
    muxed = stream.muxed_stream
    muxed.room = trio.Event()
    # libp2p makes its streams itself, of the one class that it knows.
    muxed.__class__ = _RoomyStream


async def write_patiently(stream: Any, data: bytes) -> None:
    """Write as the reader's window has room, and wait for room without a time-out (S15).

    Only one task writes a stream, so nobody else uses the room. It ends with the stream or its
    connection. libp2p itself would check for room every 10 ms, and give up after 5 s.
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
        """Return the next message; raises MultiselectCommunicatorError for anything else."""
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
    """Checks the header of each Yamux frame of a connection before libp2p reads it (S17).

    `read` replaces that of the secured connection: libp2p asks it for a header, and then for the
    body of a DATA frame.
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
        # Bytes left of the frame that is being read.
        self._body = 0
        # Bytes that all streams together may hold.
        self.unread_bytes = unread_bytes

    async def read(self, n: int | None = None) -> bytes:
        """Read as the secured connection does; raises IOException at a refused frame."""
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
        """Return why a frame is refused; "" when it is not."""
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
        """Return the bytes that lie unread on all streams."""
        return sum(map(len, self._muxer.stream_buffers.values()))


def guard_frames(
    host: Any,
    *,
    unread_bytes: int,
    max_streams: int,
    on_refused: Callable[[Any, str], None],
) -> None:
    """Check the frames of each connection before they are read (S17).

    `on_refused` is called with the muxer and the reason; the connection ends by itself.
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
    """Forget a stream that was reset, with its unread bytes (S18)."""
    muxer, number = muxed.conn, muxed.stream_id
    if muxer.streams.get(number) is not muxed:
        return
    del muxer.streams[number]
    muxer.stream_buffers.pop(number, None)
    arrived = muxer.stream_events.pop(number, None)
    if arrived is not None:
        arrived.set()


class OrphanStreams:
    """Streams without an owner, and since when (S18)."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[Any, float] = {}

    def overdue(self, found: set[Any], now_s: float) -> list[Any]:
        """Return those of the found streams that have been there for long enough."""
        self._since = {each: self._since.get(each, now_s) for each in found}
        due = [each for each, since in self._since.items() if now_s - since >= self._after_s]
        for each in due:
            del self._since[each]
        return due


# Over the 15 s after which our own pings end a silent connection: negotiations end with
# their connection and are never cancelled in the middle of a write (S4).
_NEGOTIATION_S: Final = 60.0
# After the socket is closed nothing is waited for but other tasks' turns.
_HARD_CLOSE_S: Final = 2.0


def quiet_logging() -> None:
    """Keep libp2p's records away from the root logger and from stderr.

    0.8.1 calls `logging.debug` in one module, which installs a root handler on first use; and its
    own logger, without a handler, prints warnings through Python's last resort. Our own events and
    errors have what matters of them. LIBP2P_DEBUG still works: with it the logger has handlers,
    and is left alone.
    """
    own = logging.getLogger("libp2p.network.connection.swarm_connection")
    # setattr: to the module's users it has no such name.
    setattr(swarm_connection, "logging", own)  # noqa: B010
    logger = logging.getLogger("libp2p")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


def build_host(
    identity: Identity,
    tcp: BoundedTcp,
    *,
    max_connections: int,
    max_per_peer: int,
    max_streams: int = MAX_STREAMS,
    bounds: Bounds | None = None,
    on_fault: Callable[[], None] = lambda: None,
) -> Any:
    """Return a libp2p host with TCP, Noise and Yamux and nothing else (S1), hardened, not running.

    `on_fault` is called for each exception that a stream handler let out. Raises
    InsecureTransportError when anything else would be on offer.
    """
    bounds = bounds or Bounds()
    quiet_logging()
    pair = create_new_key_pair(identity.seed)
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE_ID: NoiseTransport(pair, noise_privkey=create_x25519_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
        transports=[tcp],
        connection_config=ConnectionConfig(
            max_connections=max_connections,
            high_watermark=max_connections,
            low_watermark=0,
            min_connections=0,
            # We decide which of several connections with one peer is closed; libp2p would cut any
            # of them, with data under way.
            max_connections_per_peer=max_per_peer + 1,
            inbound_upgrade_timeout=bounds.authenticate_s + bounds.hello_s,
            outbound_upgrade_timeout=DIALLED_HANDSHAKE_S,
            inbound_stream_protocol_negotiation_timeout=_NEGOTIATION_S,
        ),
    )
    harden(host, on_fault, max_streams=max_streams, bounds=bounds)
    require_noise_alone(host)
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of a connection, and the functions to call at a breach."""

    # Seconds for Noise on an inbound connection, and for the muxer after it.
    authenticate_s: float = DIALLED_HANDSHAKE_S
    hello_s: float = DIALLED_HANDSHAKE_S
    # On all streams of a connection together, until it is allowed more.
    unread_bytes: int = 32 * 1024 * 1024
    # A connection whose handshake took too long.
    on_late: Callable[[], None] = lambda: None
    # The muxer whose frames were refused, and the reason.
    on_refused: Callable[[Any, str], None] = lambda _muxer, _reason: None


def harden(
    host: Any,
    on_fault: Callable[[], None] = lambda: None,
    *,
    max_streams: int = MAX_STREAMS,
    bounds: Bounds | None = None,
) -> None:
    """Apply all work-arounds that change a host; call it before the host runs.

    `on_fault` is called for each exception that a stream handler let out.
    """
    guard_streams(host, on_fault, max_streams)
    free_inbound_slots(host)
    drop_resource_manager(host)
    bounds = bounds or Bounds()
    bound_negotiations(host)
    bound_handshakes(host, inbound_s=bounds.authenticate_s, on_late=bounds.on_late)
    guard_frames(
        host,
        unread_bytes=bounds.unread_bytes,
        # Streams that are ending still count for a while.
        max_streams=2 * max_streams,
        on_refused=bounds.on_refused,
    )
    silence_muxer_pings(host)
    dial_nobody_unasked(host)
    ask_for_no_identity(host)


def require_noise_alone(host: Any) -> None:
    """Raise InsecureTransportError if a dialer could negotiate anything but Noise and Yamux."""
    upgrader = host.get_network().upgrader
    offers = []
    for stage in (upgrader.security_multistream, upgrader.muxer_multistream):
        selector = stage._selector
        # The protocols that we would choose, and those that a dialer is told we support.
        offers.append({str(each) for each in (*selector.handlers, *selector.multiselect.handlers)})
    if offers != [{str(NOISE_ID)}, {YAMUX_ID}]:
        raise InsecureTransportError(
            f"libp2p offers security {sorted(offers[0])} and muxers {sorted(offers[1])}; only "
            f"{NOISE_ID} and {YAMUX_ID} may be offered: install libp2p 0.8.1 exactly"
        )


def guard_streams(host: Any, on_fault: Callable[[], None], max_streams: int = MAX_STREAMS) -> None:
    """Keep exceptions of a stream within its task (S2), and bound a connection's streams."""
    network = host.get_network()
    inner = network.common_stream_handler

    async def guarded(stream: Any) -> None:
        connection = stream.swarm_conn
        try:
            if len(connection.streams) > max_streams:
                await hard_close(host, connection)
                return
            steady_window(stream)
            await inner(stream)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a remote caused ends here
            on_fault()
            log.debug("a stream handler failed: %r", error)
            await reset_quietly(stream)
        else:
            # A stream whose handler returns without closing leaks on both sides.
            await close_quietly(stream)

    network.set_stream_handler(guarded)


async def reset_quietly(stream: Any) -> None:
    """Reset a stream, or a muxed one without owner, and wake the task that reads on it (S12).

    It may have to wait to write, at most until the connection ends.
    """
    muxed = getattr(stream, "muxed_stream", stream)
    arrived = muxed.conn.stream_events.get(muxed.stream_id)
    try:
        await stream.reset()
    except Exception as error:  # noqa: BLE001 - declared boundary: libp2p lets anything out
        log.debug("a reset failed: %r", error)
    drop_stream(muxed)
    if arrived is not None:
        arrived.set()


def drop_stale_event(stream: Any) -> None:
    """Remove the entry that a reader leaves for a stream that is gone already (S12)."""
    muxed = stream.muxed_stream
    if muxed.stream_id not in muxed.conn.streams:
        muxed.conn.stream_events.pop(muxed.stream_id, None)


def was_reset(stream: Any) -> bool:
    """Return True if what looks like the end of a stream is a reset by the peer (S14).

    The death of the connection is not: that marks all its streams.
    """
    muxed = stream.muxed_stream
    return bool(muxed.reset_received and not muxed.conn.event_shutting_down.is_set())


def free_inbound_slots(host: Any) -> None:
    """Hold the inbound slot, and its task, until the connection closes, not for ever (S3)."""

    async def serve(stream: Any, address: Multiaddr, failure: Any) -> None:  # noqa: ARG001
        await serve_inbound(host, RawConnection(stream, False), address)

    host.get_network()._do_handle_inbound_connection = serve


async def serve_inbound(host: Any, raw: RawConnection, address: Multiaddr) -> None:
    """Secure an inbound raw connection, and return when it has closed."""
    try:
        muxed = await host.get_network().upgrade_inbound_raw_conn(raw, address)
        await muxed.event_closed.wait()
    except Exception as error:  # noqa: BLE001 - the edge: strangers connect here
        log.debug("an inbound connection failed: %r", error)
    finally:
        with trio.CancelScope(shield=True):
            await close_quietly(raw)


async def close_quietly(closable: Any) -> None:
    """Close something, whatever its state; never raises."""
    try:
        await closable.close()
    except Exception as error:  # noqa: BLE001 - declared boundary: libp2p lets anything out
        log.debug("a close failed: %r", error)


def drop_resource_manager(host: Any) -> None:
    """Remove libp2p's resource manager, which loses a slot with each cancelled dial (S7).

    We bound the same things ourselves: connections, connections of one peer, streams of one
    connection, unread bytes.
    """
    host.get_network().set_resource_manager(None)


def bound_handshakes(
    host: Any,
    timeout_s: float = DIALLED_HANDSHAKE_S,
    *,
    inbound_s: float | None = None,
    on_late: Callable[[], None] = lambda: None,
) -> None:
    """Set a time-out for the security handshake, and keep libp2p from repeating failed dials.

    `inbound_s` is the time-out of inbound connections; `on_late` is called when one is too late.
    """
    network = host.get_network()
    network.retry_config = RetryConfig(max_retries=0)
    upgrader = network.upgrader
    inner = upgrader.upgrade_security

    async def upgrade_security(raw: Any, is_initiator: bool, peer_id: Any = None) -> Any:
        most_s = timeout_s if is_initiator or inbound_s is None else inbound_s
        with trio.move_on_after(most_s):
            secured = await inner(raw, is_initiator, peer_id)
            # A circuit has another time-out.
            stream = getattr(raw, "stream", None)
            if isinstance(stream, ReadAheadStream):
                stream.secured()
            return secured
        if not is_initiator:
            on_late()
        raise SecurityUpgradeFailure(f"no handshake within {most_s:g} s")

    upgrader.upgrade_security = upgrade_security


def silence_muxer_pings(host: Any) -> None:
    """Keep Yamux from sending pings of its own (S11); ours travel on the control stream.

    Set on each connection: libp2p makes its own Yamux, whatever class it was given.
    """
    upgrader = host.get_network().upgrader
    inner = upgrader.upgrade_connection

    async def no_pings() -> None:
        return

    async def upgrade_connection(secured: Any, peer_id: Any) -> Any:
        muxer = await inner(secured, peer_id)
        muxer._measure_rtt_loop = no_pings
        return muxer

    upgrader.upgrade_connection = upgrade_connection


def dial_nobody_unasked(host: Any) -> None:
    """Switch off the auto-connector, which dials every peer it has heard of (S10)."""

    async def maybe_connect() -> None:
        return

    host.get_network().auto_connector.maybe_connect = maybe_connect


def ask_for_no_identity(host: Any) -> None:
    """Keep libp2p from opening an identify stream on each connection; our hello says more."""

    def schedule(peer_id: Any, *, reason: str) -> None:  # noqa: ARG001
        return

    host._schedule_identify = schedule


@asynccontextmanager
async def running(host: Any, listen: Sequence[Multiaddr]) -> AsyncIterator[None]:
    """Run a host, and end it without leaking the sockets of open connections.

    0.8.1 would be cancelled before it has closed them.
    """
    async with host.run(listen_addrs=list(listen)):
        try:
            yield
        finally:
            for connection in host.get_network().get_connections():
                await hard_close(host, connection)


async def hard_close(host: Any, connection: Any) -> None:
    """End a connection in about 0.2 s, whatever its peer does; leaves no entry behind (S5).

    The socket is closed first: every task that is blocked on it returns, and libp2p's own close,
    which writes, can't hang.
    """
    with trio.CancelScope(shield=True):
        await close_quietly(connection.muxed_conn.secured_conn)
        with trio.move_on_after(_HARD_CLOSE_S):
            await close_quietly(connection)
        host.get_network().remove_conn(connection)
