"""Work-arounds for the faults of py-libp2p 0.8.1.

Rule: one function or class per fault, named after its effect; `harden` applies those that change a
host, before it runs; each has a test against real hosts. S1 to S10 are show-stoppers that were
measured on 0.8.1; S11 to S19 were found in its source.

S1  the default host accepts plaintext      `build_host`, `require_noise_alone`
S2  an exception in a handler ends the host `guard_streams`
S3  inbound slots are never given back      `free_inbound_slots`
S5  disconnect hangs on a stuck peer        `hard_close`
S6  dead links are not noticed              socket options in `libp2p.tcp`, pings in `link`
S7  cancelled dials leak slots              `drop_resource_manager`, time-outs inside the dial
S8  a failed dial blacklists the peer       `dial_addr` per address, never `connect`
S10 every known peer is dialled             `dial_nobody_unasked`
S16 a negotiation, before Noise and on each stream, has no bound on the length or number of its
    messages, which need not be text `bound_negotiations`
S18 a stream that only we have ended stays for ever `OrphanStreams`
S19 a read asks the system for as much as the peer announced `ReadAheadStream` in `libp2p.tcp`

The other numbers are faults of its secure session and its Yamux, in whose place `use_own_muxer`
puts ours (`libp2p.muxer`): cancelled I/O corrupts the connection (S4), windows and the number of
streams are not enforced (S9, S17), pings are answered by the task that reads (S11), a reset wakes
no reader, looks like the end and keeps the unread bytes (S12, S14, S18), each read sends an update
of a window that grows to 4 MiB (S13), and a write gives up after 5 s without room (S15).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_pair
from libp2p.io.exceptions import IOException
from libp2p.io.utils import read_exactly
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError, MultiselectError
from libp2p.protocol_muxer.multiselect import DEFAULT_NEGOTIATE_TIMEOUT
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    DIALLED_HANDSHAKE_S,
    MAX_NEGOTIATION_BYTES,
    MAX_NEGOTIATION_MESSAGES,
    MAX_STREAMS,
)
from bbnode.transport.errors import InsecureTransportError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.muxer import YAMUX_ID, Muxer, take_over
from bbnode.transport.libp2p.tcp import BoundedTcp, ReadAheadStream

log = logging.getLogger(__name__)

# Bytes of a length up to that: more are refused before they are read.
_LENGTH_BYTES: Final = 2


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


def use_own_muxer(
    host: Any,
    *,
    unread_bytes: int,
    max_streams: int,
    on_refused: Callable[[Muxer, str], None],
) -> None:
    """Run our own Yamux, and the packets of Noise, on each connection (S4, S9, S11 to S18).

    `on_refused` is called with what a peer did against the rules; its connection ends by itself.
    """
    upgrader = host.get_network().upgrader

    async def upgrade_connection(secured: Any, peer_id: Any) -> Muxer:  # noqa: ARG001
        try:
            await upgrader.muxer_multistream.select_transport(secured)
        except MultiselectError as error:
            raise MuxerUpgradeFailure("no muxer was agreed on") from error
        return take_over(
            secured, unread_bytes=unread_bytes, max_streams=max_streams, on_refused=on_refused
        )

    upgrader.upgrade_connection = upgrade_connection


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


# Over the 15 s after which our own pings end a silent connection, and its negotiations with it.
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
        muxer_opt={YAMUX_ID: Muxer},
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
    on_refused: Callable[[Muxer, str], None] = lambda _muxer, _reason: None


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
    use_own_muxer(
        host,
        unread_bytes=bounds.unread_bytes,
        # Streams that are ending still count for a while.
        max_streams=2 * max_streams,
        on_refused=bounds.on_refused,
    )
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
    if offers != [{str(NOISE_ID)}, {str(YAMUX_ID)}]:
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
    """Reset a stream of libp2p's, whatever its state; never raises."""
    try:
        await stream.reset()
    except Exception as error:  # noqa: BLE001 - declared boundary: libp2p lets anything out
        log.debug("a reset failed: %r", error)


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
    """End a connection in about 0.1 s, whatever its peer does; leaves no entry behind (S5)."""
    with trio.CancelScope(shield=True):
        connection.muxed_conn.end("the connection was closed here")
        with trio.move_on_after(_HARD_CLOSE_S):
            await close_quietly(connection)
        host.get_network().remove_conn(connection)
