"""The connections of one node, from the socket or the circuit to their end.

Rule: a connection is one task that owns its resources: whatever ends it, the socket is closed and
its place is released. Each stream that a peer opens is a task as well; an exception of its handler
ends that stream alone. The host dials only on request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeAlias

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import DIALLED_HANDSHAKE_S
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters, Direction
from bbnode.transport.errors import DialError, NegotiationError, OtherPeerError, StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import Connection, choose
from bbnode.transport.libp2p.handshake import NoiseKeys
from bbnode.transport.libp2p.identify import (
    IDENTIFY_PROTOCOL,
    PING_PROTOCOL,
    answer_pings,
    ask_observed,
    identify_message,
)
from bbnode.transport.libp2p.muxer import MuxedStream, UnreadBytes
from bbnode.transport.libp2p.securing import Secured, secure_accepted, secure_dialled
from bbnode.transport.libp2p.tcp import (
    connect,
    has_come,
    listen_on,
    remote_endpoint,
    set_link_options,
    tcp_address,
)
from bbnode.transport.libp2p.wire import BROKEN, ByteWire, SocketWire
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Admission, Place
from bbnode.transport.links.shares import CONNECTION_US, SERVICE_US

log = logging.getLogger(__name__)

_ANY_HOST: Final = frozenset({PING_PROTOCOL, IDENTIFY_PROTOCOL})

Handler: TypeAlias = Callable[[Connection, MuxedStream], Awaitable[None]]


class DialCircuit(Protocol):
    """Connects with a peer through the relay that an address names, as `Libp2pHost.dial` does."""

    async def __call__(
        self, address: Multiaddr, peer: PeerId, *, for_other: bool = False
    ) -> Connection:
        """Return the connection; raises DialError and DecodeError."""


class OtherHost(Protocol):
    """A second host on our connections, which owns the streams of protocols that are not ours.

    It is py-libp2p's host, whose details are hidden here (`py_libp2p`). No method but `run` waits.
    """

    @property
    def protocols(self) -> Collection[str]:
        """The protocols that it speaks at present."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run until cancelled; a failure of this host ends it alone."""

    def connected(self, connection: Connection) -> None:
        """Register a new connection, which is handed over once the peer is admitted."""

    def ended(self, connection: Connection) -> None:
        """Forget a connection."""

    def serve(self, connection: Connection, stream: MuxedStream, protocol: str) -> None:
        """Take over a stream for which the peer has requested one of `protocols`, to its end."""

    def streams(self) -> set[MuxedStream]:
        """Return the streams that it owns."""


class _Spoken(Collection[str]):
    """A live view of the protocols of two tables."""

    def __init__(self, ours: Collection[str], others: Collection[str]) -> None:
        self._ours, self._others = ours, others

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._ours or protocol in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._ours, *self._others]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Libp2pHost:
    """Listens, dials and secures connections, which it hands to `on_connection`."""

    def __init__(
        self,
        identity: Identity,
        *,
        admission: Admission,
        limits: TransportLimits,
        counters: Counters,
        max_streams: int,
        on_connection: Callable[[Connection], bool],
        on_foreign: Callable[[Connection], bool],
        on_refused: Callable[[Connection, str], None],
    ) -> None:
        """Create a host.

        `on_connection` returns False to refuse a connection, which is then closed at once.
        `on_foreign` is called with a connection whose peer uses one of libp2p's general protocols,
        and returns False if it may not stay for that alone. `on_refused` is called with the reason
        if a peer broke the rules of the muxer, before its connection ends. At most `max_streams`
        are open on a connection.
        """
        self.peer_id = identity.peer_id
        # Handlers by protocol; an exception of a handler ends its stream.
        self.handlers: dict[str, Handler] = {
            PING_PROTOCOL: answer_pings,
            IDENTIFY_PROTOCOL: self._identify,
        }
        self.connections: set[Connection] = set()
        # Protocols of ours that hosts of libp2p may use, too, which speak none of bbnode's.
        self.for_guests: set[str] = set()
        # Connects through a relay; raises DialError.
        self.dial_circuit: DialCircuit | None = None
        # None where only our own protocols are spoken.
        self.other: OtherHost | None = None
        # The addresses to listen on, and those to announce; without our PeerId.
        self.listening: list[Multiaddr] = []
        self.announced: list[Multiaddr] = []
        self._keys = NoiseKeys(identity)
        self._admission = admission
        self._limits = limits
        self._counters = counters
        self._max_streams = max_streams
        self._unread = UnreadBytes(limits.all_unread_bytes, self._shed)
        self._on_connection = on_connection
        self._on_foreign = on_foreign
        self._on_refused = on_refused
        # Streams of libp2p's general protocols, while their handlers run.
        self._handled: set[MuxedStream] = set()
        self._tasks: trio.Nursery | None = None
        self._accepting = trio.CancelScope()

    @asynccontextmanager
    async def running(self, listen: Sequence[Multiaddr]) -> AsyncIterator[None]:
        """Listen on these addresses and run connections while the context is open.

        Raises ListenError on entry.
        """
        listeners: list[trio.SocketListener] = []
        try:
            for address in listen:
                listeners += await listen_on(address)
        except BaseException:
            for listener in listeners:
                listener.socket.close()
            raise
        self.listening = [tcp_address(*listener.socket.getsockname()[:2]) for listener in listeners]
        async with trio.open_nursery() as nursery:
            self._tasks = nursery
            if self.other is not None:
                await nursery.start(self.other.run)
            await nursery.start(self._accept, listeners, nursery)
            try:
                yield
            finally:
                self._tasks = None
                for connection in list(self.connections):
                    connection.close()
                nursery.cancel_scope.cancel()

    def stop_accepting(self) -> None:
        """Close the listening sockets; accepted connections live on."""
        self._accepting.cancel()

    # -- inbound -----------------------------------------------------------------------------

    async def _accept(
        self,
        listeners: list[trio.SocketListener],
        nursery: trio.Nursery,
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        if not listeners:
            task_status.started()
            return
        with self._accepting:
            # Connections run in their own nursery, since they outlive the acceptor.
            await trio.serve_listeners(
                self._accepted, listeners, handler_nursery=nursery, task_status=task_status
            )

    async def _accepted(self, stream: trio.SocketStream) -> None:
        wire, remote, place = SocketWire(stream), remote_endpoint(stream), None
        if remote is not None:
            place = self._admission.accept(
                remote[0], trio.current_time(), lambda _reason: wire.close()
            )
        if remote is None or place is None:
            wire.close()
            return
        place.has_spoken = lambda: has_come(stream)
        try:
            set_link_options(stream)
            await self._serve(wire, tcp_address(*remote), place)
        except OSError as error:
            log.debug("an accepted connection failed: %r", error)
        finally:
            self._admission.left(place)

    async def serve_circuit(
        self,
        wire: ByteWire,
        way: Multiaddr,
        on_made: Callable[[Connection], None] = lambda _: None,
        *,
        source: PeerId | None = None,
    ) -> None:
        """Secure a connection that a peer made through a relay, and return when it has ended.

        `way` leads to its other end, without the PeerId there. `on_made` is called once the peer is
        proved and its connection is wanted. Raises OtherPeerError if it is not `source`, where that
        is given.
        """
        place = self._admission.accept("", trio.current_time(), lambda _reason: wire.close())
        if place is None:
            wire.close()
            return
        try:
            await self._serve(wire, way, place, on_made, source=source)
        finally:
            self._admission.left(place)

    async def _serve(
        self,
        wire: ByteWire,
        way: Multiaddr,
        place: Place,
        on_made: Callable[[Connection], None] = lambda _: None,
        *,
        source: PeerId | None = None,
    ) -> None:
        try:
            secured = await self._secure_accepted(wire, place, source)
            if secured is not None:
                connection = self._connection(wire, secured, Direction.INBOUND, way, place)
                if connection is not None:
                    on_made(connection)
                    await self._run(connection)
        except OtherPeerError:
            raise  # whoever brought it had said who it would be
        except (PeerError, *BROKEN) as error:
            log.debug("an inbound connection failed: %s", error)
        except Exception:
            # A fault of ours, which must end this connection alone.
            log.exception("an inbound connection failed")
        finally:
            wire.close()

    async def _secure_accepted(
        self, wire: ByteWire, place: Place, source: PeerId | None
    ) -> Secured | None:
        """Secure a connection, or return None when it took too long."""
        proved = False

        def on_proved() -> None:
            nonlocal proved
            proved = True
            scope.deadline = trio.current_time() + self._limits.hello_timeout_s

        with trio.move_on_after(self._limits.authenticate_s) as scope:
            return await secure_accepted(
                wire,
                self._keys,
                source,
                share=place.share,
                scope=scope,
                on_heard=lambda: self._admission.heard(place),
                on_proved=on_proved,
            )
        if not proved:
            self._counters.add("sockets.late")
        return None

    # -- outbound ----------------------------------------------------------------------------

    async def dial(
        self, address: Multiaddr, peer: PeerId, *, for_other: bool = False, source: int = 0
    ) -> Connection:
        """Connect with `peer` at an address of TCP, or through a relay; raises DialError.

        `for_other`: the other host wants it. It has time-outs of its own; cancelled, it leaves
        nothing behind. `source` is that of `tcp.connect`. Raises DecodeError for an address through
        more than one relay.
        """
        if is_relayed(address):
            if self.dial_circuit is None:
                raise DialError(f"cannot dial {address}: no relays are used here; set relay.use")
            return await self.dial_circuit(address, peer, for_other=for_other)
        stream = await connect(address, source)
        endpoint = remote_endpoint(stream) or ("0.0.0.0", 0)
        local_port = stream.socket.getsockname()[1]
        way = tcp_address(*endpoint)
        made = await self.dial_over(SocketWire(stream), way, peer, for_other=for_other)
        made.local_port = local_port
        return made

    async def meet(self, address: Multiaddr, peer: PeerId, *, source: int) -> Connection:
        """Connect with `peer`, which dials us at the same moment and begins; raises DialError.

        `source` is that of `tcp.connect`. Cancelled, it leaves nothing behind.
        """
        stream = await connect(address, source)
        remote, tasks = remote_endpoint(stream), self._tasks
        wire = SocketWire(stream)
        place = None
        if remote is not None and tasks is not None:
            place = self._admission.accept(
                remote[0], trio.current_time(), lambda _reason: wire.close()
            )
        if remote is None or tasks is None or place is None:
            wire.close()
            raise DialError(f"cannot use {address}: too many connections, or we are stopping")
        send, receive = trio.open_memory_channel[Connection | OtherPeerError](1)

        async def serve() -> None:
            with send:
                try:
                    await self._serve(
                        wire, tcp_address(*remote), place, send.send_nowait, source=peer
                    )
                except OtherPeerError as error:
                    send.send_nowait(error)
                finally:
                    self._admission.left(place)

        tasks.start_soon(serve, name=f"connection with {peer.short}")
        try:
            made = await receive.receive()
        except trio.EndOfChannel:
            raise DialError(f"cannot use {address}: {peer} did not begin there") from None
        except trio.Cancelled:
            wire.close()
            raise
        if isinstance(made, OtherPeerError):
            raise DialError(f"cannot use {address}: {made}") from made
        return made

    async def observed(self, connection: Connection) -> Multiaddr | None:
        """Return where a peer sees us come from, None if it does not say so in time."""
        with trio.move_on_after(DIALLED_HANDSHAKE_S):
            try:
                return await ask_observed(connection)
            except (PeerError, StreamBrokenError) as error:
                log.debug("%s does not say where it sees us: %s", connection.peer, error)
        return None

    async def dial_over(
        self, wire: ByteWire, way: Multiaddr, peer: PeerId, *, for_other: bool = False
    ) -> Connection:
        """Turn a wire into a connection with `peer`, which runs in a task; raises DialError.

        `way` is the address of its other end, without the PeerId.
        """

        def drop(_reason: str) -> None:
            wire.close()

        foreign = for_other and self._limits.foreign_hosts
        visit = self._admission.visit if foreign else self._admission.dial
        place = visit(peer, trio.current_time(), drop)
        if place is None:
            wire.close()
            raise DialError(
                f"cannot use {way}: {self._limits.max_foreign_dialled} hosts are dialled already"
            )
        try:
            secured = await self._secure_dialled(wire, way, peer)
            connection = self._connection(
                wire, secured, Direction.OUTBOUND, way, place, for_other=for_other
            )
            if connection is None or self._tasks is None:
                raise DialError(f"cannot use {way}: too many connections, or we are stopping")
        except BaseException:
            wire.close()
            if foreign:
                self._admission.left(place)
            raise
        self._tasks.start_soon(self._run, connection, name=f"connection with {peer.short}")
        return connection

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:
        """Check that `peer` answers at an address, by the handshake alone; raises DialError."""
        wire = SocketWire(await connect(address))
        try:
            await self._secure_dialled(wire, address, peer)
        finally:
            wire.close()

    async def _secure_dialled(self, wire: ByteWire, way: Multiaddr, peer: PeerId) -> Secured:
        try:
            with trio.move_on_after(DIALLED_HANDSHAKE_S):
                return await secure_dialled(wire, self._keys, peer)
        except (PeerError, *BROKEN) as error:
            raise DialError(f"cannot dial {way}: {error}") from error
        raise DialError(f"cannot dial {way}: no handshake within {DIALLED_HANDSHAKE_S:g} s")

    # -- connections -------------------------------------------------------------------------

    def _connection(
        self,
        wire: ByteWire,
        secured: Secured,
        direction: Direction,
        way: Multiaddr,
        place: Place,
        *,
        for_other: bool = False,
    ) -> Connection | None:
        """Return a new connection, or None if it was refused."""
        place.share.due_us += CONNECTION_US
        connection = Connection(
            wire,
            secured,
            direction=direction,
            way=way,
            place=place,
            unread_bytes=self._limits.opening_unread_bytes,
            max_streams=self._max_streams,
            all_unread=self._unread,
            on_stream=self._opened,
            on_refused=self._on_refused,
            on_closed=self._closed,
        )
        connection.for_other = for_other
        self.connections.add(connection)
        if not self._on_connection(connection):
            connection.close()
            return None
        if self.other is not None:
            self.other.connected(connection)
        return connection

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.other is not None:
            self.other.ended(connection)

    def _shed(self) -> bool:
        """End the connection with the most unread bytes; return False if there is none."""
        most = max(self.connections, key=lambda each: each.muxer.kept_bytes, default=None)
        if most is not None:
            most.muxer.refuse("this connection has more unread bytes than any other")
        return most is not None

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.muxer.run()
        except Exception:
            # A fault of ours, which must end this connection alone.
            log.exception("a connection failed")
            connection.close()

    def _opened(self, connection: Connection, stream: MuxedStream) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._handle, connection, stream)

    async def _handle(self, connection: Connection, stream: MuxedStream) -> None:
        """Handle a stream that a peer has opened, to its end."""
        try:
            protocol = await choose(stream, self._spoken())
        except (NegotiationError, StreamBrokenError) as error:
            stream.abort(f"its protocol was not agreed on: {error}")
            return
        is_open = protocol in _ANY_HOST or protocol in self.for_guests
        if is_open or protocol not in self.handlers:
            self._on_foreign(connection)
        if protocol not in self.handlers and self.other is not None:
            connection.place.share.work(SERVICE_US)
            self.other.serve(connection, stream, protocol)
            return
        if protocol in _ANY_HOST:
            # Other streams are tracked by their owners.
            self._handled.add(stream)
        try:
            await self.handlers[protocol](connection, stream)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a remote caused ends here
            self._counters.add("streams.handler_errors")
            log.debug("a stream handler failed: %r", error)
            stream.abort("its handler failed")
        else:
            await stream.end()
        finally:
            self._handled.discard(stream)

    def streams(self) -> set[MuxedStream]:
        """Return the streams of libp2p's general protocols whose handlers run."""
        return self._handled

    def _spoken(self) -> Collection[str]:
        """Return all protocols of this node, our own first."""
        return self.handlers if self.other is None else _Spoken(self.handlers, self.other.protocols)

    async def _identify(self, connection: Connection, stream: MuxedStream) -> None:
        """Answer identify, which other implementations request on each new connection."""
        await stream.write(
            identify_message(self.peer_id, self.announced, tuple(self._spoken()), connection.way)
        )
