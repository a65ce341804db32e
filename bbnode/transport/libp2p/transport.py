"""The libp2p transport: TCP, Noise, Yamux, and links on top.

Rule: only the files of this folder know libp2p. We learn of a connection by a notice of the network
or by a stream that arrives before it; both lead to the one link of that connection. We dial each
address with `dial_addr` and keep addresses ourselves: libp2p's peerstore forgets after 120 s.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final

import trio
from libp2p.abc import INotifee
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.utils import get_thin_waist_addresses

from bbnode.ir.address import is_relayed, split_circuit
from bbnode.ir.caps import MAX_STREAMS
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Authorizer, Capability, Hello, ProtocolHandler, ProtocolStream
from bbnode.transport.errors import DialError, ListenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.carrier import (
    LANE_PROTOCOLS,
    Libp2pCarrier,
    Libp2pStream,
    raw_of,
)
from bbnode.transport.libp2p.protocols import ProtocolRules, Protocols
from bbnode.transport.libp2p.relay.client import RelayClient
from bbnode.transport.libp2p.relay.messages import RELAY_PROTOCOL, RELAYED_PROTOCOL
from bbnode.transport.libp2p.relay.server import RelayServer
from bbnode.transport.libp2p.tcp import (
    BoundedTcp,
    ReadAheadStream,
    listen_endpoint,
    remote_endpoint,
)
from bbnode.transport.libp2p.workarounds import (
    Bounds,
    OrphanStreams,
    build_host,
    close_quietly,
    hard_close,
    reset_quietly,
    running,
)
from bbnode.transport.limits import RelaySettings, TransportLimits
from bbnode.transport.links import mappings
from bbnode.transport.links.admission import Place
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import Link, LinkState
from bbnode.transport.links.transport import LinkTransport

# Bytes in flight on each of a circuit's streams: 10 MB/s over a round trip of 50 ms to the relay.
# A circuit whose readers pause costs the relay twice this.
_CIRCUIT_WINDOW_BYTES: Final = 512 * 1024
# Between two checks for streams that are idle or belong to nobody.
_MAINTAIN_S: Final = 2.0
# The time that a circuit waits for the connection with its relay: a dial and a hello.
_RELAY_S: Final = 10.0


class Libp2pTransport(LinkTransport):
    """A Transport on py-libp2p 0.8.1."""

    capabilities = frozenset(Capability)

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[Multiaddr],
        announce: Sequence[Multiaddr] = (),
        hello: Hello | None = None,
        limits: TransportLimits | None = None,
        rng: random.Random | None = None,
        authorizer: Authorizer | None = None,
        relay: RelaySettings | None = None,
    ) -> None:
        """Create the transport; raises ListenError if an address in `listen` is not plain TCP.

        With an empty `listen` the node only dials. `announce` replaces the addresses that others
        are told. Without an `authorizer` everybody may connect.
        """
        super().__init__(
            identity.peer_id,
            hello=hello or Hello(),
            limits=limits,
            rng=rng,
            authorizer=authorizer,
        )
        for address in listen:
            listen_endpoint(address)
        self._listen = tuple(dict.fromkeys(listen))
        self._announce = tuple(announce)
        self._tcp = BoundedTcp()
        relay = relay or RelaySettings()
        # A peer's circuits, and requests under way.
        relay_streams = relay.circuits_per_peer + 4
        self._host = build_host(
            identity,
            self._tcp,
            # `admission` bounds ours; a connection that is being closed takes a moment.
            max_connections=self._limits.max_connections + 2 * self._limits.max_waiting,
            max_per_peer=self._limits.max_connections_per_peer,
            # Those it asked for, and those that others asked for to it.
            max_streams=MAX_STREAMS + 2 * relay_streams,
            bounds=Bounds(
                authenticate_s=self._limits.authenticate_s,
                hello_s=self._limits.hello_timeout_s,
                unread_bytes=self._limits.opening_unread_bytes,
                on_late=lambda: self._counters.add("sockets.late"),
                on_refused=self._frame_refused,
            ),
            on_fault=lambda: self._counters.add("streams.handler_errors"),
        )
        self._tcp.admit = self._admitted
        self._strays = OrphanStreams(self._limits.stray_stream_s)
        self._links: dict[Any, Link] = {}
        self._protocols = Protocols(
            self._counters,
            streams_per_peer=self._limits.protocol_streams_per_peer,
            idle_s=self._limits.stream_idle_s,
        )
        # The newest stream of each lane, by its connection.
        self._lanes: dict[Any, dict[Lane, Any]] = {}
        for protocol_id in (RELAY_PROTOCOL, RELAYED_PROTOCOL):
            self._protocols.set_rules(
                protocol_id,
                ProtocolRules(
                    streams_per_peer=relay_streams,
                    window_bytes=_CIRCUIT_WINDOW_BYTES,
                ),
            )
        self._relay_client: RelayClient | None = None
        self._relay_server: RelayServer | None = None
        if relay.serve:
            self._relay_server = RelayServer(
                relay, self._protocols, self._counters, self._direct_link
            )
            self._handle_protocol(RELAY_PROTOCOL)
        if relay.use:
            self._relay_client = RelayClient(
                self._host,
                self._own,
                self._protocols,
                own_addresses=lambda: self._addresses,
                on_change=lambda: self.on_addresses(),
            )
            self._handle_protocol(RELAYED_PROTOCOL)
        # Called when `listen_addresses` has changed.
        self.on_addresses: Callable[[], None] = lambda: None
        self._addresses: list[Multiaddr] = []
        for lane, protocol in LANE_PROTOCOLS.items():
            self._host.set_stream_handler(protocol, self._stream_handler(lane))
        self._host.get_network().register_notifee(_Notices(self))

    def listen_addresses(self) -> list[Multiaddr]:
        """Return concrete addresses, known once `run` has started; those through relays come first.

        Wildcards are replaced by the addresses of the interfaces, or everything by `announce`.
        """
        relayed = () if self._relay_client is None else self._relay_client.addresses()
        return [*relayed, *self._addresses]

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        self._protocols.register(protocol_id, handler)
        self._handle_protocol(protocol_id)

    def _handle_protocol(self, protocol_id: str) -> None:
        async def serve(stream: Any) -> None:
            link = self._links.get(stream.swarm_conn)
            await self._protocols.serve(link, protocol_id, Libp2pStream(stream))

        self._host.set_stream_handler(TProtocol(protocol_id), serve)

    def open_stream(
        self, peer: PeerId, protocol_id: str
    ) -> AbstractAsyncContextManager[ProtocolStream]:
        session = self._table.known(peer)
        link = None if session is None else session.primary
        return self._protocols.open(link, peer, protocol_id)

    # -- LinkTransport -----------------------------------------------------------------------

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        failure: ListenError | None = None
        async with running(self._host, self._listen):
            # Raised after the host has ended: from within, trio would wrap it in a group.
            failure = self._listen_failure()
            if failure is None:
                self._addresses = self._concrete_addresses()
                yield
        if failure is not None:
            raise failure

    async def _close_listeners(self) -> None:
        # Not `close`: it would cut inbound connections before they have said goodbye.
        for listener in self._host.get_network().listeners.values():
            listener.stop_accepting()
        await trio.lowlevel.checkpoint()

    async def _dial(self, address: Multiaddr, peer: PeerId) -> Link:
        try:
            if is_relayed(address):
                connection = await self._dial_circuit(address, peer)
            else:
                connection = await self._host.get_network().dial_addr(
                    _without_peer(address), ID(peer.to_bytes())
                )
        except DialError:
            raise
        except Exception as error:
            raise DialError(f"cannot dial {address}: {_root_text(error)}") from error
        link = self.link_of(connection)
        if link is None:
            await hard_close(self._host, connection)
            raise DialError(f"cannot use {address}: too many connections, or we are stopping")
        return link

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:
        """Check that `peer` answers at an IP address, by the handshake alone; raises DialError.

        It leaves no connection behind, may be cancelled, and has its own time-outs.
        """
        upgrader = self._host.get_network().upgrader
        try:
            raw = await self._tcp.dial(_without_peer(address))
            try:
                await upgrader.upgrade_security(raw, True, ID(peer.to_bytes()))
            finally:
                with trio.CancelScope(shield=True):
                    await close_quietly(raw)
        except Exception as error:
            raise DialError(f"cannot dial {address}: {_root_text(error)}") from error

    # -- relays ----------------------------------------------------------------------------

    def _relay_routes(self, peer: PeerId) -> Sequence[Multiaddr]:
        return () if self._relay_client is None else self._relay_client.routes(peer)

    def _circuits(self) -> int:
        return 0 if self._relay_server is None else self._relay_server.circuits

    def _direct_link(self, peer: PeerId) -> Link | None:
        """Return the connection with a peer that has said hello, unless it is relayed."""
        session = self._table.known(peer)
        link = None if session is None else session.primary
        if link is None or link.state is not LinkState.UP or is_relayed(link.carrier.address):
            return None
        return link

    async def _dial_circuit(self, address: Multiaddr, peer: PeerId) -> Any:
        """Connect through the relay that an address names; raises DialError, DecodeError."""
        if self._relay_client is None:
            raise DialError(f"cannot dial {address}: no relays are used here; set relay.use")
        way, relay = split_circuit(address)
        if relay in (self._own, peer):
            raise DialError(f"cannot dial {address}: its relay is one of the two ends")
        link = self._direct_link(relay)
        if link is None:
            link = await self._reach_relay(relay, way)
        return await self._relay_client.dial(link, peer)

    async def _reach_relay(self, relay: PeerId, way: Multiaddr) -> Link:
        session = self._table.known(relay)
        reason = "no connection was made"
        if session is not None and session.wanted is not None:
            # Its own dialer is connecting already.
            with trio.move_on_after(_RELAY_S):
                await session.up.wait()
            reason = session.last_error or reason
        elif way.to_bytes():
            link = await self._dial(way, relay)
            await link.settled.wait()
            reason = link.reason or reason
        found = self._direct_link(relay)
        if found is None:
            raise DialError(f"the relay {relay} is not connected: {reason}")
        return found

    # -- connections -----------------------------------------------------------------------

    def link_of(self, connection: Any) -> Link | None:
        """Return the link of a connection, created at the first call; None if it is refused."""
        link = self._links.get(connection)
        if link is None:
            link = self._attach(
                Libp2pCarrier(self._host, connection, self._forget_connection),
                _place_of(connection),
            )
            if link is not None:
                self._links[connection] = link
                # Sooner than libp2p's notice, which comes when all is cleared away.
                connection.muxed_conn.on_end = link.abort
                if self._relay_client is not None and self._nursery is not None:
                    self._nursery.start_soon(
                        self._relay_client.hold_reservation,
                        link,
                        name=f"reservation with {link.peer.short}",
                    )
        return link

    def connection_closed(self, connection: Any) -> None:
        """Abort the link of a connection that libp2p has closed."""
        link = self._links.get(connection)
        if link is not None:
            link.abort("the connection was closed")

    def _frame_refused(self, muxer: Any, reason: str) -> None:
        """Report the peer of a refused frame; the muxer ends the connection."""
        for connection, link in list(self._links.items()):
            if connection.muxed_conn is muxer:
                link.flooded(reason)
                return
        self._counters.add("inbound.flooded")

    @contextmanager
    def _admitted(self, stream: ReadAheadStream) -> Iterator[bool]:
        """Hold a place for an accepted socket until its end; yield False if there is none."""
        admission = self._table.admission
        remote = remote_endpoint(stream.stream)
        place = None
        if remote is not None:
            place = admission.accept(
                remote[0], trio.current_time(), lambda _reason: stream.stream.socket.close()
            )
        if place is None:
            yield False
            return
        stream.place, stream.on_heard = place, lambda: admission.heard(place)
        place.has_spoken = stream.has_come
        try:
            yield True
        finally:
            admission.left(place)

    async def refuse(self, connection: Any) -> None:
        """Close a connection that got no link."""
        await hard_close(self._host, connection)

    def _forget_connection(self, connection: Any) -> None:
        self._links.pop(connection, None)
        self._lanes.pop(connection, None)

    async def _maintain(self) -> None:
        while True:
            await trio.sleep(_MAINTAIN_S)
            now = trio.current_time()
            self._protocols.reap(now)
            mappings.trim()
            for muxed in self._strays.overdue(self._stray_streams(), now):
                if self._nursery is not None:
                    self._counters.add("streams.reaped")
                    self._nursery.start_soon(reset_quietly, muxed)

    def _stray_streams(self) -> set[Any]:
        """Return the streams that nobody here will read or end.

        These are half closed, opened by a peer that does not negotiate, or of a lane that has a
        newer stream.
        """
        used = self._protocols.raw_streams()
        found: set[Any] = set()
        for connection in self._links:
            current = self._lanes.get(connection, {}).values()
            owned = {
                stream.muxed_stream
                for stream in connection.streams
                if stream.muxed_stream.is_initiator or stream in used or stream in current
            }
            found.update(set(connection.muxed_conn.streams.values()) - owned)
        return found

    def _stream_handler(self, lane: Lane) -> Any:
        async def handle(stream: Any) -> None:
            link = self.link_of(stream.swarm_conn)
            if link is None:
                await hard_close(self._host, stream.swarm_conn)
                return
            # Twice what we let the peer send, so that this window never limits it.
            limits = self._limits
            bulk = lane is Lane.BULK
            window = limits.bulk_window_bytes if bulk else limits.control_window_bytes
            self._lanes.setdefault(stream.swarm_conn, {})[lane] = stream
            served = Libp2pStream(stream)
            served.set_window(2 * window)
            await link.serve_inbound(lane, served)

        return handle

    # -- addresses -------------------------------------------------------------------------

    def _listen_failure(self) -> ListenError | None:
        listeners = self._host.get_network().listeners
        for address in self._listen:
            listener = listeners.get(str(address))
            if listener is None or not listener.get_addrs():
                return ListenError(
                    f"cannot listen on {address}: {self._tcp.failure_text(address)}; "
                    "stop the program that has the port, or listen on another "
                    "(port 0 takes any free one)"
                )
        return None

    def _concrete_addresses(self) -> list[Multiaddr]:
        found = list(self._announce)
        if not found:
            for listener in self._host.get_network().listeners.values():
                for bound in listener.get_addrs():
                    found.extend(get_thin_waist_addresses(bound))
        suffix = Multiaddr(f"/p2p/{self._own}")
        return list(dict.fromkeys(_without_peer(each).encapsulate(suffix) for each in found))


class _Notices(INotifee):
    """Passes libp2p's notices on connections to us. `connected` runs inside the dial."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self._transport = transport

    async def connected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
        if self._transport.link_of(conn) is None:
            await self._transport.refuse(conn)

    async def disconnected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
        self._transport.connection_closed(conn)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        pass

    async def closed_stream(self, network: Any, stream: Any) -> None:
        pass

    async def listen(self, network: Any, multiaddr: Any) -> None:
        pass

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        pass


def _place_of(connection: Any) -> Place | None:
    """Return the place of a connection's accepted socket; None for any other connection."""
    stream = raw_of(connection).stream
    return stream.place if isinstance(stream, ReadAheadStream) else None


def _without_peer(address: Multiaddr) -> Multiaddr:
    """Return the address up to its /p2p part: libp2p takes the expected peer separately."""
    names = [protocol.name for protocol in address.protocols()]
    return address.decapsulate_code(0x01A5) if "p2p" in names else address


def _root_text(error: BaseException) -> str:
    """Return the innermost cause, on one line: libp2p wraps the reason several times."""
    seen: set[int] = set()
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None or id(inner) in seen:
            return " ".join(str(error).split()) or type(error).__name__
        seen.add(id(inner))
        error = inner
