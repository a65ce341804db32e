"""The in-memory transport: nodes of one process, without a network and without time.

Rule: everything is deterministic. A MemoryNetwork holds the transports; connecting, sending and
delivering happen at once, in the order of the calls; nothing here sleeps, draws random numbers or
runs a task of its own. Bounds, errors, counters, events and the calls of the authorizer are those
of any transport, except that a lost connection fails its queue at once, and that a rate causes no
delay. Messages wait only for a slow driver: what its inbox refuses stays in the sender's queue
until there is room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Authorizer,
    Buffer,
    ConnectionClosed,
    ConnectionOpened,
    Counters,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    Hello,
    PeerInfo,
    Transport,
    TransportMetrics,
    TransportSetup,
    Unsent,
    WantedPeer,
    check_can_be_dialled,
)
from bbnode.transport.errors import (
    EnvelopeTooLargeError,
    ListenError,
    NotAllowedError,
    NotConnectedError,
    QueueFullError,
)
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Gate
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.hello import decode_hello, encode_hello
from bbnode.transport.outbound import OutboundQueue, size_of


@dataclass(slots=True)
class _Connection:
    """One side of a connection between two transports."""

    other: MemoryTransport
    direction: Direction
    hello: Hello
    queue: OutboundQueue
    since_s: float
    bytes_in: int = 0
    bytes_out: int = 0


class MemoryNetwork:
    """The nodes of one process that can reach each other."""

    def __init__(self) -> None:
        self._running: dict[PeerId, MemoryTransport] = {}
        self._cut: set[frozenset[PeerId]] = set()
        # The loop that all transports run in, since nothing here is thread-safe.
        self._loop: trio.lowlevel.TrioToken | None = None
        self._ports = itertools.count(1)
        self._sessions = itertools.count(1)

    def transport(
        self,
        peer: PeerId,
        *,
        hello: Hello | None = None,
        limits: TransportLimits | None = None,
        authorizer: Authorizer | None = None,
    ) -> MemoryTransport:
        """Return a new transport for `peer` on this network; it takes part once it runs."""
        return MemoryTransport(
            self,
            peer,
            port=next(self._ports),
            hello=replace(hello or Hello(), session_id=f"{next(self._sessions):016x}"),
            limits=limits or TransportLimits(),
            authorizer=authorizer,
        )

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Break the connection between two peers and allow none until `heal`."""
        self._cut.add(frozenset((one, other)))
        transport = self._running.get(one)
        if transport is not None:
            transport.drop(other, "the network was cut")

    def heal(self, one: PeerId, other: PeerId) -> None:
        """Allow connections of two peers again; wanted ones come back at once."""
        self._cut.discard(frozenset((one, other)))
        self.connect_wanted()

    def reachable(self, source: PeerId, target: PeerId) -> MemoryTransport | None:
        """Return the running transport of `target`, if `source` can reach it."""
        if frozenset((source, target)) in self._cut:
            return None
        return self._running.get(target)

    def join(self, transport: MemoryTransport) -> None:
        """Add a started transport.

        Raises DeploymentError if its PeerId runs already, or others run in another loop of trio.
        """
        loop = trio.lowlevel.current_trio_token()
        if self._running and loop is not self._loop:
            raise DeploymentError(
                "the nodes of this in-memory network run in another loop: open all of them in the "
                "same way, or give these another network.settings.network"
            )
        self._loop = loop
        if transport.peer_id in self._running:
            raise DeploymentError(f"{transport.peer_id} runs on this network already")
        self._running[transport.peer_id] = transport
        self.connect_wanted()

    def leave(self, transport: MemoryTransport) -> None:
        """Remove a stopped transport."""
        self._running.pop(transport.peer_id, None)

    def connect_wanted(self) -> None:
        """Open all connections that are wanted and possible, in PeerId order."""
        for peer in sorted(self._running):
            self._running[peer].connect_wanted()


# Networks by name, for nodes that are created from configurations.
_NETWORKS: dict[str, MemoryNetwork] = {}


def from_setup(setup: TransportSetup) -> MemoryTransport:
    """Return the transport of a node whose configuration says `network.transport = "memory"`.

    All nodes of this process whose `[network.settings]` have the same `network` reach each other.
    Raises DeploymentError for other settings, and ListenError for an address to listen on.
    """
    settings = dict(setup.settings)
    name = settings.pop("network", "")
    if settings or not isinstance(name, str):
        raise DeploymentError(
            "the in-memory transport has one setting, network.settings.network, the name of its "
            f"network; found {', '.join(settings) or repr(name)}"
        )
    if setup.listen or setup.announce:
        raise ListenError("the in-memory transport listens on no address: leave network.listen out")
    return _NETWORKS.setdefault(name, MemoryNetwork()).transport(
        setup.identity.peer_id, hello=setup.hello, limits=setup.limits, authorizer=setup.authorizer
    )


class MemoryTransport(Transport):
    """A Transport on a MemoryNetwork; created by `MemoryNetwork.transport`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer: PeerId,
        *,
        port: int,
        hello: Hello,
        limits: TransportLimits,
        authorizer: Authorizer | None = None,
    ) -> None:
        self._network = network
        self._peer = peer
        self._address = Multiaddr(f"/memory/{port}/p2p/{peer}")
        self._hello = replace(hello, listen_addresses=(self._address,))
        self._limits = limits
        self._counters = Counters()
        self._gate = Gate(authorizer, self._counters)
        self._inbox = Inbox(limits)
        self._inbox.on_room, self._inbox.is_known = self._room_made, self._gate.is_known
        self._connections: dict[PeerId, _Connection] = {}
        self._wanted: dict[PeerId, tuple[Multiaddr, ...]] = {}
        # Envelopes undelivered at the stop.
        self._kept: list[Unsent] = []
        self._running = False
        self._stopping = trio.Event()
        self._stopped = trio.Event()

    # -- Transport -------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return self._peer

    @property
    def events(self) -> Inbox:
        return self._inbox

    def listen_addresses(self) -> list[Multiaddr]:
        """Return one `/memory/<port>/p2p/<id>` address."""
        return [self._address]

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Join the network until `stop`; raises DeploymentError if the PeerId is taken."""
        self._network.join(self)
        self._running = True
        try:
            self._network.connect_wanted()
            task_status.started()
            await self._stopping.wait()
        finally:
            self._running = False
            self._network.leave(self)
            self._kept = self.unsent()
            for peer in sorted(self._connections):
                self.drop(peer, "the node stops", goodbye=True)
            self._inbox.close()
            self._stopped.set()

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        connection = self._connections.get(peer)
        try:
            if connection is None:
                raise NotConnectedError(f"{peer} is not connected; wait for its ConnectionOpened")
            if reason := self._gate.envelope(peer, Direction.OUTBOUND, size_of(data)):
                raise NotAllowedError(f"nothing may be sent to {peer}: {reason}")
            connection.queue.put(peer, data, tag)
        except (NotConnectedError, QueueFullError, EnvelopeTooLargeError, NotAllowedError):
            self._counters.add("outbound.refused")
            raise
        self._pump(connection)

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        check_can_be_dialled(self._peer, peer, addresses)
        self._wanted[peer] = tuple(addresses)
        if self._running:
            self.connect_wanted()

    def unsent(self) -> list[Unsent]:
        queued = [
            Unsent(peer=peer, tag=item.tag, parts=item.parts)
            for peer, connection in sorted(self._connections.items())
            for item in connection.queue.pending()
        ]
        return [*self._kept, *queued]

    def forget(self, peer: PeerId) -> None:
        self._wanted.pop(peer, None)

    def disconnect(self, peer: PeerId) -> None:
        """Close the connection. A peer that is still wanted, by either side, comes back at once."""
        self.drop(peer, "disconnected on purpose", goodbye=True)
        self._network.connect_wanted()

    def peers(self) -> list[PeerInfo]:
        return [
            PeerInfo(
                peer=peer,
                direction=connection.direction,
                address=connection.other._address,
                hello=connection.hello,
                bytes_in=connection.bytes_in,
                bytes_out=connection.bytes_out,
                queued_envelopes=connection.queue.envelopes,
                queued_bytes=connection.queue.bytes,
                acknowledged=connection.queue.acknowledged,
                rtt_s=0.0,
                since_s=connection.since_s,
            )
            for peer, connection in sorted(self._connections.items())
        ]

    def wanted(self) -> list[WantedPeer]:
        return [
            WantedPeer(
                peer=peer,
                addresses=addresses,
                connected=peer in self._connections,
                failed_dials=0,
                last_error="" if peer in self._connections else "not on the network",
            )
            for peer, addresses in sorted(self._wanted.items())
        ]

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def metrics(self) -> TransportMetrics:
        """Return the gauges. There are no streams, no tasks and nothing under way."""
        queues = [connection.queue for connection in self._connections.values()]
        return TransportMetrics(
            connections=len(self._connections),
            connection_slots=self._limits.max_connections,
            inbox_bytes=self._inbox.envelope_bytes,
            queued_bytes=sum(queue.bytes for queue in queues),
            inbox_envelopes=self._inbox.envelopes,
            inbox_notices=self._inbox.notices,
            queued_envelopes=sum(queue.envelopes for queue in queues),
            sessions=len(self._connections),
            denied=dict(self._gate.denied),
            counters=self._counters.snapshot(),
            peers=tuple(self.peers()),
        )

    def set_credentials(self, credentials: bytes) -> None:
        self._hello = replace(self._hello, credentials=credentials)

    def reauthorize(self) -> None:
        for peer, connection in sorted(self._connections.items()):
            if reason := self._refusal(connection.other, connection.direction):
                self.drop(peer, f"not allowed any more: {reason}", goodbye=True)

    async def stop(self, grace_s: float) -> None:
        """Stop; envelopes that slow drivers have no room for within `grace_s` are `unsent`."""
        if self._running:
            with trio.move_on_after(grace_s):
                for _, connection in sorted(self._connections.items()):
                    await connection.queue.wait_idle()
        self._stopping.set()
        if self._running:
            await self._stopped.wait()

    # -- connections -----------------------------------------------------------------------

    def connect_wanted(self) -> None:
        """Connect with every wanted peer that runs and can be reached."""
        for peer in sorted(self._wanted):
            other = self._network.reachable(self._peer, peer)
            if other is None or peer in self._connections or not self._running:
                continue
            self._counters.add("dial.attempts")
            if self._refusal(other, Direction.OUTBOUND) or other._refusal(self, Direction.INBOUND):
                self._counters.add("dial.failed")
                continue
            self._open(other, Direction.OUTBOUND)
            other._open(self, Direction.INBOUND)

    def _refusal(self, other: MemoryTransport, direction: Direction) -> str:
        """Return the authorizer's reason to refuse a connection, or ""."""
        return (
            self._gate.connection(other._peer, direction, None)
            or self._gate.hello(other._peer, direction, other._hello)[0]
        )

    def drop(self, peer: PeerId, reason: str, *, goodbye: bool = False) -> None:
        """End the connection with a peer on both sides."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._close(peer, reason, goodbye=goodbye)
            connection.other._close(self._peer, reason, goodbye=goodbye)

    def _open(self, other: MemoryTransport, direction: Direction) -> None:
        # Encoded and decoded, so that a hello that a real peer would refuse is refused here.
        hello = decode_hello(encode_hello(other._hello))
        self._connections[other._peer] = _Connection(
            other=other,
            direction=direction,
            hello=hello,
            queue=OutboundQueue(self._limits),
            since_s=trio.current_time(),
        )
        self._counters.add("links.opened")
        self._inbox.notify(
            ConnectionOpened(
                peer=other._peer, address=other._address, direction=direction, hello=hello
            )
        )

    def _close(self, peer: PeerId, reason: str, *, goodbye: bool) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._counters.add("links.closed")
        self._inbox.notify(ConnectionClosed(peer=peer, reason=reason, goodbye=goodbye))
        for item in connection.queue.drain():
            self._counters.add("outbound.failed")
            self._inbox.notify(DeliveryFailed(peer=peer, tag=item.tag, reason=reason))

    # -- delivery --------------------------------------------------------------------------

    def _pump(self, connection: _Connection) -> None:
        """Move queued envelopes into the other side's inbox until it refuses one."""
        for lane in Lane:
            while (item := connection.queue.head(lane)) is not None:
                if not connection.other._receive(self, b"".join(item.parts)):
                    return
                connection.bytes_out += item.size
                self._counters.add("outbound.envelopes")
                self._counters.add("outbound.bytes", item.size)
                connection.queue.pop(lane)

    def _receive(self, sender: MemoryTransport, data: bytes) -> bool:
        connection = self._connections[sender._peer]
        if self._gate.admits_from(sender._peer)(len(data)) == math.inf:
            return True  # refused, and counted
        if not self._inbox.offer(
            EnvelopeReceived(peer=sender._peer, data=data, observed_address=sender._address)
        ):
            return False
        connection.bytes_in += len(data)
        self._counters.add("inbound.envelopes")
        self._counters.add("inbound.bytes", len(data))
        return True

    def _room_made(self, peer: PeerId) -> None:
        """Deliver more after an envelope of `peer` was read: first from it, then from others."""
        for each in [peer, *sorted(self._connections)]:
            connection = self._connections.get(each)
            if connection is not None:
                back = connection.other._connections.get(self._peer)
                if back is not None:
                    connection.other._pump(back)
