"""The libp2p transport: TCP, Noise, Yamux, and links on top.

Rule: only the files of this folder know libp2p. The host hands over each connection before its
first stream; from then on it has one link, or is closed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from multiaddr import Multiaddr

from bbnode.access.decision import Standing
from bbnode.ir import installation
from bbnode.ir.address import is_relayed, peer_of_address, split_circuit
from bbnode.ir.caps import MAX_RELAY_MESSAGE_BYTES, MAX_STREAMS
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Authorizer,
    Buffer,
    Capability,
    Direction,
    Hello,
    ProtocolHandler,
    ProtocolStream,
    RelayMisused,
)
from bbnode.transport.errors import DialError, Libp2pMissing, RelayFault, StreamBrokenError
from bbnode.transport.hints import dialable
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS, Connection, with_peer
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.muxer import MuxedStream
from bbnode.transport.libp2p.protocols import ProtocolRules, Protocols
from bbnode.transport.libp2p.relay.client import RelayClient
from bbnode.transport.libp2p.relay.messages import HOP_PROTOCOL, STOP_PROTOCOL
from bbnode.transport.libp2p.relay.punching import PUNCH_PROTOCOL, HolePuncher
from bbnode.transport.libp2p.relay.server import RelayServer
from bbnode.transport.libp2p.tcp import listen_endpoint
from bbnode.transport.limits import RelaySettings, TransportLimits
from bbnode.transport.links import mappings
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.link import Link, LinkState
from bbnode.transport.links.transport import STEADY_S, DialBackoff, LinkTransport
from bbnode.transport.routing import Routing, RoutingSetup
from bbnode.transport.topics import Topics, TopicSetup

if TYPE_CHECKING:
    from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p
log = logging.getLogger(__name__)

# Bytes in flight on each of a circuit's streams: 10 MB/s over a round trip of 50 ms to the relay.
# A circuit whose readers pause costs the relay twice this.
_CIRCUIT_WINDOW_BYTES: Final = 512 * 1024
# Interval of the checks for streams that are idle or have no owner.
_MAINTAIN_S: Final = 2.0
# The time that a circuit waits for the connection with its relay: a dial and a hello.
_RELAY_S: Final = 10.0


class Libp2pTransport(LinkTransport):
    """A Transport over TCP, Noise and Yamux, as libp2p specifies them."""

    capabilities = frozenset(Capability) - {Capability.TOPICS}

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
        py_libp2p: bool = False,
    ) -> None:
        """Create the transport; raises ListenError if an address in `listen` is not plain TCP.

        With an empty `listen` the node only dials. `announce` replaces the addresses sent to
        peers. Without an `authorizer` everybody may connect. With `py_libp2p` there is a
        `libp2p_host`; raises Libp2pMissing if py-libp2p is not installed.
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
        self._authorizer = authorizer
        relay = relay or RelaySettings()
        # A peer's circuits, and requests under way.
        relay_streams = relay.circuits_per_peer + 4
        # A peer's circuits are those that it requested, and those that others requested to it;
        # ending streams still count for a while.
        self._max_streams = 2 * (MAX_STREAMS + 2 * relay_streams)
        self._host = Libp2pHost(
            identity,
            admission=self._table.admission,
            limits=self._limits,
            counters=self._counters,
            max_streams=self._max_streams,
            on_connection=self._connected,
            on_foreign=self._foreign,
            on_refused=self._frame_refused,
        )
        self._strays = OrphanStreams(self._limits.stray_stream_s)
        self._protocols = Protocols(
            self._counters,
            streams_per_peer=self._limits.protocol_streams_per_peer,
            idle_s=self._limits.stream_idle_s,
            hello_s=self._limits.dialled_hello_s,
        )
        for protocol_id in (HOP_PROTOCOL, STOP_PROTOCOL):
            self._host.for_guests.add(protocol_id)
            self._protocols.set_rules(
                protocol_id,
                ProtocolRules(
                    streams_per_peer=relay_streams,
                    window_bytes=_CIRCUIT_WINDOW_BYTES,
                    for_guests=True,
                ),
            )
        self._relays = relay.through
        self._relay_client: RelayClient | None = None
        self._puncher: HolePuncher | None = None
        self._host.for_guests.add(PUNCH_PROTOCOL)
        self._protocols.set_rules(
            PUNCH_PROTOCOL,
            ProtocolRules(
                streams_per_peer=1, window_bytes=MAX_RELAY_MESSAGE_BYTES, for_guests=True
            ),
        )
        self._relay_server: RelayServer | None = None
        if relay.serve:
            self._relay_server = RelayServer(
                relay,
                self._protocols,
                self._counters,
                self._direct_link,
                addresses=lambda: self._addresses,
                blame=self._misused,
            )
            self._handle_protocol(HOP_PROTOCOL)
        if relay.use:
            self._relay_client = RelayClient(
                self._host,
                self._own,
                self._protocols,
                own_addresses=lambda: self._addresses,
                on_change=lambda: self.on_addresses(),
                blame=self._misused,
            )
            self._puncher = HolePuncher(
                self._host,
                self._protocols,
                self._counters,
                link_of=self._direct_link,
                is_good=self._is_good,
                blame=self._misused,
                retry_s=self._limits.direct_retry_s,
            )
            self._handle_protocol(PUNCH_PROTOCOL)
            self._host.dial_circuit = partial(self._dial_circuit, self._relay_client)
            self._handle_protocol(STOP_PROTOCOL)
        self._py_libp2p: PyLibp2p | None = None
        if py_libp2p:
            self._py_libp2p = self._host.other = self._with_py_libp2p(identity)
            self.capabilities = frozenset(Capability)  # type: ignore[misc]  # of this one
        # Called when `listen_addresses` has changed.
        self.on_addresses: Callable[[], None] = lambda: None
        self._addresses: list[Multiaddr] = []
        for lane, protocol in LANE_PROTOCOLS.items():
            self._host.handlers[protocol] = partial(self._serve_lane, lane)

    def listen_addresses(self) -> list[Multiaddr]:
        """Return concrete addresses, known once `run` has started; relayed ones come first.

        Wildcards are replaced by the addresses of the interfaces, or everything by `announce`.
        """
        relayed = () if self._relay_client is None else self._relay_client.addresses()
        return [*relayed, *self._addresses]

    @property
    def libp2p_host(self) -> Any:
        if self._py_libp2p is None:
            return super().libp2p_host
        return self._py_libp2p.host

    def routing(self, setup: RoutingSetup) -> Routing:
        if self._py_libp2p is None:
            return super().routing(setup)
        from bbnode.transport.libp2p.py_libp2p.dht.finding import Dht

        return Dht(
            self._py_libp2p,
            setup,
            addresses=self.listen_addresses,
            claims=self._claims,
            reach=self._reach,
            release=self._release,
        )

    def _claims(self, peer: PeerId) -> Sequence[Multiaddr]:
        """Return the addresses that a connected peer claims and that may be dialled."""
        session = self._table.known(peer)
        link = None if session is None else session.primary
        if link is None or link.hello is None:
            return ()
        return dialable(link.hello.listen_addresses, seen=link.carrier.address, good=True)

    async def _reach(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Connect with a peer for a service, not for the program; raises DialError."""
        reason = "nobody said where it is"
        for address in sorted(addresses, key=is_relayed):
            try:
                link = await self._dial(address, peer)
            except DialError as error:
                reason = str(error)
                continue
            await link.settled.wait()
            if link.state is LinkState.UP:
                return
            reason = link.reason or reason
        raise DialError(f"{peer} is not reached: {reason}")

    def _release(self, peer: PeerId) -> None:
        """Close the connection that we dialled for a search, unless it is used otherwise."""
        session = self._table.known(peer)
        if session is not None and (session.wanted is not None or session.exchanged):
            return
        used = set() if self._host.other is None else self._host.other.streams()
        for connection in list(self._host.connections):
            if connection.peer != peer or connection.direction is Direction.INBOUND:
                continue
            if used.isdisjoint(connection.muxer.streams.values()):
                if connection.link is None:
                    connection.close()
                else:
                    connection.link.close("the search is over")

    def topics(self, setup: TopicSetup) -> Topics:
        if self._py_libp2p is None:
            return super().topics(setup)
        from bbnode.transport.libp2p.py_libp2p.topics import GossipTopics

        return GossipTopics(self._py_libp2p, setup, self._authorizer, self._counters)

    def _with_py_libp2p(self, identity: Identity) -> PyLibp2p:
        try:
            from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p
        except ImportError as error:
            raise Libp2pMissing(
                f'network.transport = "libp2p" needs py-libp2p ({error}); install it, '
                f'{installation.libp2p_ways()}; or do without it: network.transport = "lean"'
            ) from error
        return PyLibp2p(identity, self._host, self._admits_other, self._counters)

    async def _admits_other(self, connection: Connection) -> bool:
        """Return True once the peer of a connection may stay, False if it never may."""
        link = connection.link
        if link is None:
            return False
        await link.welcome.wait()
        return link.state is LinkState.UP or link.is_foreign

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        self._protocols.register(protocol_id, handler)
        self._handle_protocol(protocol_id)

    def register_for_any(self, protocol_id: str, handler: ProtocolHandler) -> None:
        async def serve(connection: Connection, stream: MuxedStream) -> None:
            if not await self._admits_other(connection):
                raise StreamBrokenError("its peer is not admitted")
            await handler(AnyStream(connection, stream))

        self._host.handlers[protocol_id] = serve

    def _handle_protocol(self, protocol_id: str) -> None:
        async def serve(connection: Connection, stream: MuxedStream) -> None:
            await self._protocols.serve(connection.link, protocol_id, stream)

        self._host.handlers[protocol_id] = serve

    def open_stream(
        self, peer: PeerId, protocol_id: str
    ) -> AbstractAsyncContextManager[ProtocolStream]:
        session = self._table.known(peer)
        link = None if session is None else session.primary
        return self._protocols.open(link, peer, protocol_id)

    # -- LinkTransport -----------------------------------------------------------------------

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        async with self._host.running(self._listen):
            self._host.announced = self._concrete_addresses()
            self._addresses = [with_peer(each, self._own) for each in self._host.announced]
            yield

    async def _close_listeners(self) -> None:
        self._host.stop_accepting()
        await trio.lowlevel.checkpoint()

    async def _dial(self, address: Multiaddr, peer: PeerId) -> Link:
        try:
            link = (await self._host.dial(address, peer)).link
        except DialError:
            raise
        except BbnodeError as error:
            raise DialError(f"cannot dial {address}: {error}") from error
        if link is None:
            raise DialError(f"cannot use {address}: we are stopping")
        return link

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:
        """Check that `peer` answers at an IP address, by the handshake alone; raises DialError.

        It leaves no connection behind, may be cancelled, and has its own time-outs.
        """
        await self._host.probe(address, peer)

    # -- relays ----------------------------------------------------------------------------

    def _relay_routes(self, peer: PeerId) -> Sequence[Multiaddr]:
        return () if self._relay_client is None else self._relay_client.routes(peer)

    def _circuits(self) -> int:
        return 0 if self._relay_server is None else self._relay_server.circuits

    def _misused(self, peer: PeerId, fault: RelayFault, reason: str) -> None:
        """Count and report what a relay, or a user of ours, did wrong."""
        log.info("%s as a relay, or as its user: %s", peer, reason)
        self._counters.add(f"relay.{fault}")
        if not self._inbox.crowded:
            self._inbox.notify(RelayMisused(peer=peer, fault=fault, reason=reason))

    def _direct_link(self, peer: PeerId) -> Link | None:
        """Return the connection with a peer that is admitted, unless it is relayed.

        That of a guest is one without a hello.
        """
        session = self._table.known(peer)
        if session is None:
            return None
        link = session.primary
        if link is None:
            link = next((each for each in session.links if each.is_foreign), None)
        is_there = link is not None and (link.state is LinkState.UP or link.is_foreign)
        return None if link is None or not is_there or is_relayed(link.carrier.address) else link

    async def _keep_relay(self, client: RelayClient, address: Multiaddr) -> None:
        """Be reached through a relay that speaks no protocol of bbnode, until cancelled."""
        redial = DialBackoff(self._limits, self._random)
        way, relay = _without_peer(address), peer_of_address(address)
        while True:
            since_s = trio.current_time()
            try:
                link = (await self._host.dial(way, relay, for_other=True)).link
            except DialError as error:
                log.info("the relay %s is not reached: %s", relay, error)
            else:
                if link is not None:
                    await client.hold_reservation(link)
                    await link.closed.wait()
            if trio.current_time() - since_s >= STEADY_S:
                redial.reset()
            await trio.sleep(redial.next_delay_s())

    async def _dial_circuit(
        self, client: RelayClient, address: Multiaddr, peer: PeerId, *, for_other: bool = False
    ) -> Connection:
        """Connect through the relay that an address names; raises DialError, DecodeError."""
        way, relay = split_circuit(address)
        if relay in (self._own, peer):
            raise DialError(f"cannot dial {address}: its relay is one of the two ends")
        link = self._direct_link(relay)
        if link is None:
            link = await self._reach_relay(client, relay, way)
        return await client.dial(link, peer, for_other=for_other)

    async def _reach_relay(self, client: RelayClient, relay: PeerId, way: Multiaddr) -> Link:
        session = self._table.known(relay)
        reason = "no connection was made"
        if session is not None and session.wanted is not None:
            # The relay's own dialer is connecting already.
            with trio.move_on_after(_RELAY_S):
                await session.up.wait()
            reason = session.last_error or reason
        elif way.to_bytes():
            link = await self._dial(way, relay)
            await link.settled.wait()
            reason = link.reason or reason
            if link.state is LinkState.CLOSED and self._limits.foreign_hosts:
                # A relay of libp2p that speaks no protocol of bbnode.
                visited = (await self._host.dial(way, relay, for_other=True)).link
                if visited is not None:
                    client.visits(visited)
        direct = self._direct_link(relay)
        if direct is None:
            raise DialError(f"the relay {relay} is not connected: {reason}")
        return direct

    # -- connections -----------------------------------------------------------------------

    def _connected(self, connection: Connection) -> bool:
        """Run a link on a new connection; return False if it is refused."""
        link = connection.link = self._attach(connection, connection.place)
        if link is None:
            return False
        client, tasks = self._relay_client, self._nursery
        # Whom libp2p's services dial is not asked for more than they want of it.
        if client is not None and tasks is not None and not connection.for_other:
            tasks.start_soon(
                client.hold_reservation,
                link,
                name=f"reservation with {link.peer.short}",
            )
            if self._puncher is not None and is_relayed(connection.way):
                tasks.start_soon(
                    self._puncher.upgrade, link, name=f"hole punch with {link.peer.short}"
                )
        return True

    def _is_good(self, link: Link) -> bool:
        """Return True for a member, and for a peer that we want or have dealt with."""
        place = link.place
        return place is not None and (
            place.standing is Standing.MEMBER or self._table.knows(link.peer)
        )

    def _foreign(self, connection: Connection) -> bool:
        """Admit a host that uses only libp2p's general protocols, if there is room."""
        link = connection.link
        if link is None or link.state is not LinkState.OPENING or link.spoken.is_set():
            return False
        if not self._table.admission.take_foreign(connection.place, trio.current_time()):
            return False
        connection.muxer.max_streams = self._limits.foreign_streams
        link.welcome.set()
        return True

    def _frame_refused(self, connection: Connection, reason: str) -> None:
        """Report the peer of a refused frame; the muxer ends the connection."""
        if connection.link is not None:
            connection.link.flooded(reason, connection.muxer.violation)
        else:
            self._counters.add("inbound.flooded")

    async def _maintain(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_after_streams)
            if self._relay_client is not None:
                for address in self._relays:
                    nursery.start_soon(self._keep_relay, self._relay_client, address)

    async def _look_after_streams(self) -> None:
        while True:
            await trio.sleep(_MAINTAIN_S)
            now = trio.current_time()
            self._protocols.reap(now)
            mappings.trim()
            for stream in self._strays.overdue(self._stray_streams(), now):
                self._counters.add("streams.reaped")
                stream.abort("the stream belongs to nobody")

    def _stray_streams(self) -> set[MuxedStream]:
        """Return the streams without an owner that would read or end them.

        Such a stream is half closed, opened by a peer that does not negotiate, or of a lane that
        has a newer stream.
        """
        used = self._protocols.streams() | self._host.streams()
        if self._host.other is not None:
            used |= self._host.other.streams()
        return {
            stream
            for connection in self._host.connections
            for stream in connection.muxer.streams.values()
            if stream not in used
            and (stream.end_out if stream.is_initiator else not connection.has_lane(stream))
        }

    async def _serve_lane(self, lane: Lane, connection: Connection, stream: MuxedStream) -> None:
        if connection.link is None:
            raise StreamBrokenError("the connection has no link")
        # Twice the link's own window, so that the stream's window is never the limit.
        limits = self._limits
        window = limits.bulk_window_bytes if lane is Lane.BULK else limits.control_window_bytes
        connection.lanes[lane] = stream
        connection.muxer.max_streams = self._max_streams
        stream.set_window(2 * window)
        await connection.link.serve_inbound(lane, stream)

    # -- addresses -------------------------------------------------------------------------

    def _concrete_addresses(self) -> list[Multiaddr]:
        """Return the addresses to send to peers, without our PeerId."""
        addresses = [_without_peer(each) for each in self._announce]
        if not addresses:
            for bound in self._host.listening:
                addresses.extend(_of_each_interface(bound) if _is_wildcard(bound) else [bound])
        return list(dict.fromkeys(addresses))


class AnyStream:
    """A ProtocolStream of a peer that may have sent no hello; `address` is the peer's."""

    def __init__(self, connection: Connection, stream: MuxedStream) -> None:
        self.peer = connection.peer
        self.address = connection.way
        self._stream = stream

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, b"" at the end; raises StreamBrokenError."""
        return await self._stream.read(max_bytes)

    async def write(self, data: Buffer) -> None:
        """Write all of `data`; raises StreamBrokenError."""
        await self._stream.write(data)

    async def end(self) -> None:
        """End our direction."""
        await self._stream.end()


class OrphanStreams:
    """Streams without an owner, and the times since when."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[MuxedStream, float] = {}

    def overdue(self, found: set[MuxedStream], now_s: float) -> list[MuxedStream]:
        """Return those of the orphaned streams that have been orphaned for long enough."""
        self._since = {each: self._since.get(each, now_s) for each in found}
        due = [each for each, since in self._since.items() if now_s - since >= self._after_s]
        for each in due:
            del self._since[each]
        return due


def _is_wildcard(address: Multiaddr) -> bool:
    return str(address).split("/")[2] in ("0.0.0.0", "::")


def _of_each_interface(address: Multiaddr) -> list[Multiaddr]:
    # Imported here, since it loads psutil, which nothing else needs.
    from multiaddr.utils import get_thin_waist_addresses

    return list(get_thin_waist_addresses(address))


def _without_peer(address: Multiaddr) -> Multiaddr:
    """Return the address up to its /p2p part."""
    names = [protocol.name for protocol in address.protocols()]
    return address.decapsulate_code(0x01A5) if "p2p" in names else address
