"""py-libp2p's BasicHost on our connections.

Rule: Swarm gets a connection once the peer is admitted, and the streams of the protocols that
py-libp2p's services have registered. An exception in a handler resets its stream; one in the
host itself ends that host and is reported, while our own protocols go on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream, IRawConnection
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import Service, TrioManager
from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_OTHER_STREAMS
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.errors import DialError, NotSupportedError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.muxer import MuxedStream
from bbnode.transport.libp2p.py_libp2p.peerstore import BoundedPeerStore
from bbnode.transport.libp2p.py_libp2p.streams import LentConnection, LentStream
from bbnode.transport.libp2p.py_libp2p.swarm import NodeSwarm, Plugin, RawCircuit
from bbnode.transport.libp2p.wire import CircuitWire

log = logging.getLogger(__name__)

# Window of a stream for a handler: 20 MB/s over a round trip of 50 ms.
_WINDOW_BYTES: Final = 1024 * 1024

# Returns True once py-libp2p may have the connection, False if it never may.
Admits = Callable[[Connection], Awaitable[bool]]


class NodeHost(BasicHost):
    """A BasicHost that identifies peers only once a service needs it."""

    def __init__(self, swarm: NodeSwarm, announced: Callable[[], list[Multiaddr]]) -> None:
        """Create the host; `announced` returns the addresses to send to peers."""
        self._serves = False
        self._swarm = swarm
        super().__init__(swarm, addrs_factory=lambda _found: announced())

    def set_stream_handler(self, protocol_id: TProtocol, stream_handler: StreamHandlerFn) -> None:
        """Serve a protocol from now on, and identify the connected peers."""
        super().set_stream_handler(protocol_id, stream_handler)
        if not self._serves:
            self._serves = True
            for peer in self.get_connected_peers():
                self._schedule_identify(peer, reason="service")

    async def start_service(self, service: Service) -> None:
        """Run a service such as KadDHT or Pubsub until this host ends; return once it has started.

        An exception ends the service alone, and is logged. Raises NotSupportedError if the host
        does not run.
        """
        manager = TrioManager(service)
        service._manager = manager
        if self._swarm.tasks is None:
            raise NotSupportedError("the host of py-libp2p does not run: start the node first")
        self._swarm.start_soon(manager.run)
        await manager.wait_started()

    async def _on_notifee_connected(self, conn: INetConn) -> None:
        # An identify costs as much as the connection; our own protocols need none.
        if self._serves:
            await super()._on_notifee_connected(conn)


class PyLibp2p:
    """An OtherHost: py-libp2p's host on our connections."""

    def __init__(
        self, identity: Identity, ours: Libp2pHost, admits: Admits, counters: Counters
    ) -> None:
        """Create the host; it runs with `ours`."""
        self._ours = ours
        self._admits = admits
        self._counters = counters
        self._connections: dict[Connection, LentConnection] = {}
        self._on_run: list[Callable[[], None]] = []
        # Streams that py-libp2p uses.
        self._streams: set[MuxedStream] = set()
        pair = create_new_key_pair(identity.seed)
        own = ID.from_pubkey(pair.public_key)
        store = BoundedPeerStore(own, lambda peer: peer in self._swarm.connections)
        store.add_key_pair(own, pair)
        plugin = Plugin(self._dial, lambda: tuple(ours.listening))
        self._swarm = NodeSwarm(own, store, plugin)
        self._swarm.secure_dialled = self._secure_dialled
        self._swarm.secure_accepted = self._secure_accepted
        self._swarm.settled = self._settled
        self.host = NodeHost(self._swarm, lambda: ours.announced or ours.listening)
        self._handle = self._swarm.common_stream_handler
        self._swarm.set_stream_handler(self._guarded)

    @property
    def protocols(self) -> Collection[str]:
        """The protocols that py-libp2p's services have registered."""
        return self.host.get_mux().handlers.keys()  # type: ignore[return-value]  # never None

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the host until cancelled."""
        started = False
        try:
            async with trio.open_nursery() as tasks:
                self._swarm.tasks = tasks
                async with self.host.run(listen_addrs=list(self._ours.listening)):
                    started = True
                    for begin in self._on_run:
                        begin()
                    task_status.started()
                    await trio.sleep_forever()
        except Exception:
            if not started:
                raise
            self._counters.add("libp2p.failed")
            log.exception("py-libp2p's host has failed; this node goes on without its services")
        finally:
            self._swarm.tasks = None
            self._swarm.connections.clear()
            for connection in list(self._connections):
                self.ended(connection)

    @property
    def is_running(self) -> bool:
        """True while services can be started."""
        return self._swarm.tasks is not None

    def when_running(self, begin: Callable[[], None]) -> None:
        """Call `begin` once services can be started. Use it before `run`."""
        self._on_run.append(begin)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run a function of a service in the background; its exceptions end it alone."""
        self._swarm.start_soon(function, *args)

    # -- connections -----------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """Hand a connection to Swarm, once its peer is admitted."""
        if self._swarm.tasks is None:
            return  # Swarm does not run, or has failed
        lent = self._connections[connection] = LentConnection(connection, self._opened)
        if not connection.for_other:
            # Swarm adds the connections that it has dialled itself.
            self._swarm.start_soon(self._join, lent)

    def ended(self, connection: Connection) -> None:
        """Tell Swarm that a connection has ended."""
        lent = self._connections.pop(connection, None)
        if lent is not None:
            lent.ended()

    async def _join(self, lent: LentConnection) -> None:
        try:
            if await self._admits(lent.connection) and not lent.is_closed:
                await self._swarm.add_conn(lent, "outbound" if lent.is_initiator else "inbound")
            else:
                lent.ended()
        finally:
            lent.joined.set()

    async def _settled(self, peer: ID) -> None:
        for lent in list(self._connections.values()):
            if lent.peer_id == peer and not lent.connection.for_other:
                await lent.joined.wait()

    async def _admitted(self, connection: Connection) -> LentConnection:
        """Return a connection for Swarm once its peer is admitted; raises DialError."""
        lent = self._connections.get(connection)
        try:
            if lent is not None and await self._admits(connection) and not lent.is_closed:
                return lent
        except BaseException:
            connection.close()
            raise
        ended = connection.muxer.ended
        connection.close()
        raise DialError(f"{connection.peer} is not admitted: {ended or 'nothing is served here'}")

    async def _dial(self, address: Multiaddr, peer: PeerId) -> IMuxedConn:
        return await self._admitted(await self._ours.dial(address, peer, for_other=True))

    async def _secure_dialled(self, raw: IRawConnection, peer: ID) -> IMuxedConn:
        wire, way = CircuitWire(RawCircuit(raw, self._swarm.start_soon)), _way(raw)
        wanted = PeerId.from_bytes(peer.to_bytes())
        connection = await self._ours.dial_over(wire, way, wanted, for_other=True)
        return await self._admitted(connection)

    async def _secure_accepted(self, raw: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Return a raw connection once it is secured, admitted and added to Swarm."""
        wire = CircuitWire(RawCircuit(raw, self._swarm.start_soon))
        send, receive = trio.open_memory_channel[Connection](1)

        async def serve() -> None:
            with send:
                await self._ours.serve_circuit(wire, _way(raw, maddr), send.send_nowait)

        self._swarm.start_soon(serve)
        try:
            connection = await receive.receive()
        except trio.EndOfChannel:
            raise DialError("a raw connection was not secured") from None
        return await self._admitted(connection)

    # -- streams ---------------------------------------------------------------------------

    def serve(self, connection: Connection, stream: MuxedStream, protocol: str) -> None:
        """Take over a stream that a peer has opened."""
        lent = self._connections.get(connection)
        count = sum(
            each in self._streams and not each.is_initiator
            for each in connection.muxer.streams.values()
        )
        if lent is None or count >= MAX_OTHER_STREAMS or not lent.take(stream, protocol):
            self._counters.add("protocols.refused")
            stream.abort("nobody serves it, or too many are open")
            return
        self._counters.add("protocols.opened")
        self._opened(lent, stream)

    def streams(self) -> set[MuxedStream]:
        """Return the streams that py-libp2p uses and that are not closed."""
        self._streams = {each for each in self._streams if not each.is_closed}
        return self._streams

    def _opened(self, lent: LentConnection, stream: MuxedStream) -> None:
        self._streams.add(stream)
        link = lent.connection.link
        if link is not None and link.hello is not None:
            # Only after the hello: before it, unread bytes are limited to one initial window.
            stream.set_window(_WINDOW_BYTES)

    async def _guarded(self, stream: INetStream) -> None:
        """Handle a stream of a peer, and clean it up in any case."""
        lent = stream.muxed_stream if isinstance(stream, NetStream) else None
        try:
            await self._handle(stream)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a remote caused ends here
            self._counters.add("streams.handler_errors")
            log.debug("a stream handler of py-libp2p failed: %r", error)
            await stream.reset()
        finally:
            if isinstance(lent, LentStream):
                # A stream that the handler leaves open has no owner from here on, and is reaped.
                self._streams.discard(lent.stream)


def _way(raw: IRawConnection, otherwise: Multiaddr | None = None) -> Multiaddr:
    """Return the remote address of a raw connection, without its PeerId."""
    addresses: Any = raw.get_transport_addresses() or [otherwise or Multiaddr("/ip4/0.0.0.0/tcp/0")]
    return Multiaddr(str(addresses[0]))
