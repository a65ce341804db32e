"""The in-memory backend: the same seam, within one process and without any time.

Rule: deterministic. A MemoryNetwork holds the backends; connecting, sending and delivering
happen at once, in the order of the calls; nothing here sleeps, draws or runs a task of its
own. Bounds, errors, counters and events are those of a real backend, but that a lost
connection fails at once what is queued. Time passes only where a driver is slow: what its
inbox refuses stays in the sender's queue until room is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Buffer,
    Direction,
    EnvelopeReceived,
    Hello,
    PeerConnected,
    PeerDisconnected,
    PeerInfo,
    SendFailed,
    TransportLimits,
    TransportMetrics,
    Unsent,
    WantedPeer,
)
from bbnode.transport.counters import Counters
from bbnode.transport.errors import EnvelopeTooLargeError, NotConnectedError, QueueFullError
from bbnode.transport.inbox import Inbox
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.hello import decode_hello, encode_hello
from bbnode.transport.outbound import OutboundQueue


@dataclass(slots=True)
class _Connection:
    """One side of a connection between two backends."""

    backend: MemoryBackend
    direction: Direction
    hello: Hello
    queue: OutboundQueue
    since_s: float
    bytes_in: int = 0
    bytes_out: int = 0


class MemoryNetwork:
    """The hub: who runs, and who can reach whom."""

    def __init__(self) -> None:
        self._running: dict[PeerId, MemoryBackend] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._ports = itertools.count(1)
        self._sessions = itertools.count(1)

    def backend(
        self, peer: PeerId, *, hello: Hello | None = None, limits: TransportLimits | None = None
    ) -> MemoryBackend:
        """A new backend for `peer` on this network; it takes part once it runs."""
        return MemoryBackend(
            self,
            peer,
            port=next(self._ports),
            hello=replace(hello or Hello(), session_id=f"{next(self._sessions):016x}"),
            limits=limits or TransportLimits(),
        )

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Break the connection of two peers and allow none until `heal`."""
        self._cut.add(frozenset((one, other)))
        backend = self._running.get(one)
        if backend is not None:
            backend.drop(other, "the network was cut")

    def heal(self, one: PeerId, other: PeerId) -> None:
        """Allow connections of two peers again; wanted ones come back at once."""
        self._cut.discard(frozenset((one, other)))
        self.connect_wanted()

    def reachable(self, source: PeerId, target: PeerId) -> MemoryBackend | None:
        """The running backend of `target`, if `source` can reach it."""
        if frozenset((source, target)) in self._cut:
            return None
        return self._running.get(target)

    def join(self, backend: MemoryBackend) -> None:
        """Take a started backend in; raises DeploymentError when its PeerId runs already."""
        if backend.peer_id in self._running:
            raise DeploymentError(f"{backend.peer_id} runs on this network already")
        self._running[backend.peer_id] = backend
        self.connect_wanted()

    def leave(self, backend: MemoryBackend) -> None:
        """Take a stopped backend out."""
        self._running.pop(backend.peer_id, None)

    def connect_wanted(self) -> None:
        """Make all connections that are wanted and possible, in PeerId order."""
        for peer in sorted(self._running):
            self._running[peer].connect_wanted()


class MemoryBackend:
    """A Backend on a MemoryNetwork; made by `MemoryNetwork.backend`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer: PeerId,
        *,
        port: int,
        hello: Hello,
        limits: TransportLimits,
    ) -> None:
        self._network = network
        self._peer = peer
        self._address = Multiaddr(f"/memory/{port}/p2p/{peer}")
        self._hello = replace(hello, listen_addresses=(self._address,))
        self._limits = limits
        self._counters = Counters()
        self._inbox = Inbox(limits)
        self._inbox.on_room = self._room_made
        self._connections: dict[PeerId, _Connection] = {}
        self._wanted: dict[PeerId, tuple[Multiaddr, ...]] = {}
        # What was not delivered when it stopped.
        self._kept: list[Unsent] = []
        self._running = False
        self._stopping = trio.Event()
        self._stopped = trio.Event()

    # -- Backend ---------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """Our own PeerId."""
        return self._peer

    @property
    def events(self) -> Inbox:
        """The bounded stream of everything that happens."""
        return self._inbox

    def listen_addresses(self) -> list[Multiaddr]:
        """One `/memory/<port>/p2p/<id>` address."""
        return [self._address]

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Take part in the network until `stop`; raises DeploymentError for a PeerId twice."""
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
        """See Backend."""
        connection = self._connections.get(peer)
        try:
            if connection is None:
                raise NotConnectedError(f"{peer} is not connected; wait for its PeerConnected")
            connection.queue.put(peer, data, tag)
        except (NotConnectedError, QueueFullError, EnvelopeTooLargeError):
            self._counters.add("outbound.refused")
            raise
        self._pump(connection)

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """See Backend; raises DeploymentError for our own id or without any address."""
        if peer == self._peer:
            raise DeploymentError(f"{peer} is this node itself; remove it from the peers to dial")
        if not addresses:
            raise DeploymentError(f"no address given for {peer}; name at least one")
        self._wanted[peer] = tuple(addresses)
        if self._running:
            self.connect_wanted()

    def unsent(self) -> list[Unsent]:
        """See Backend."""
        queues = ((peer, each.queue) for peer, each in sorted(self._connections.items()))
        queued = [
            Unsent(peer=peer, tag=item.tag, parts=item.parts)
            for peer, queue in queues
            for item in queue.pending()
        ]
        return [*self._kept, *queued]

    def forget(self, peer: PeerId) -> None:
        """See Backend."""
        self._wanted.pop(peer, None)

    def disconnect(self, peer: PeerId) -> None:
        """See Backend. A peer that is still wanted, by either side, comes back at once."""
        self.drop(peer, "disconnected on purpose", goodbye=True)
        self._network.connect_wanted()

    def peers(self) -> list[PeerInfo]:
        """See Backend."""
        return [
            PeerInfo(
                peer=peer,
                direction=connection.direction,
                address=connection.backend._address,
                hello=connection.hello,
                bytes_in=connection.bytes_in,
                bytes_out=connection.bytes_out,
                queued_envelopes=connection.queue.envelopes,
                queued_bytes=connection.queue.bytes,
                unacknowledged_bytes=0,
                acknowledged=connection.queue.acknowledged,
                resent=0,
                duplicates=0,
                rtt_s=0.0,
                since_s=connection.since_s,
            )
            for peer, connection in sorted(self._connections.items())
        ]

    def wanted(self) -> list[WantedPeer]:
        """See Backend."""
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
        """See Backend."""
        return self._counters.snapshot()

    def metrics(self) -> TransportMetrics:
        """See Backend. There are no streams, no tasks and nothing under way."""
        queues = [connection.queue for connection in self._connections.values()]
        return TransportMetrics(
            connections=len(self._connections),
            connections_opening=0,
            connection_slots=self._limits.max_connections,
            streams=0,
            tasks=0,
            unread_bytes=0,
            held_bytes=0,
            inbox_bytes=self._inbox.envelope_bytes,
            partial_bytes=0,
            queued_bytes=sum(queue.bytes for queue in queues),
            unacknowledged_bytes=0,
            inbox_envelopes=self._inbox.envelopes,
            inbox_notices=self._inbox.notices,
            queued_envelopes=sum(queue.envelopes for queue in queues),
            circuits=0,
            sessions=len(self._connections),
            denied={},
            counters=self._counters.snapshot(),
            peers=tuple(self.peers()),
        )

    def set_credentials(self, credentials: bytes) -> None:
        """See Backend."""
        self._hello = replace(self._hello, credentials=credentials)

    def reauthorize(self) -> None:
        """See Backend. Nobody is kept out of this network."""

    async def stop(self, grace_s: float) -> None:
        """See Backend. What a slow driver has not made room for by then is `unsent`."""
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
            if other is not None and peer not in self._connections and self._running:
                self._counters.add("dial.attempts")
                self._open(other, Direction.OUTBOUND)
                other._open(self, Direction.INBOUND)

    def drop(self, peer: PeerId, reason: str, *, goodbye: bool = False) -> None:
        """End the connection with a peer on both sides."""
        connection = self._connections.get(peer)
        if connection is not None:
            other = connection.backend
            self._close(peer, reason, goodbye=goodbye)
            other._close(self._peer, reason, goodbye=goodbye)

    def _open(self, other: MemoryBackend, direction: Direction) -> None:
        # Through its bytes, so that what a real peer would refuse is refused here.
        hello = decode_hello(encode_hello(other._hello))
        self._connections[other._peer] = _Connection(
            backend=other,
            direction=direction,
            hello=hello,
            queue=OutboundQueue(self._limits),
            since_s=trio.current_time(),
        )
        self._counters.add("links.opened")
        self._inbox.notify(
            PeerConnected(
                peer=other._peer, address=other._address, direction=direction, hello=hello
            )
        )

    def _close(self, peer: PeerId, reason: str, *, goodbye: bool) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._counters.add("links.closed")
        self._inbox.notify(PeerDisconnected(peer=peer, reason=reason, goodbye=goodbye))
        for item in connection.queue.drain():
            self._counters.add("outbound.failed")
            self._inbox.notify(SendFailed(peer=peer, tag=item.tag, reason=reason))

    # -- delivery --------------------------------------------------------------------------

    def _pump(self, connection: _Connection) -> None:
        """Move queued envelopes into the other side's inbox until it refuses one."""
        for lane in Lane:
            while (item := connection.queue.head(lane)) is not None:
                if not connection.backend._receive(self, b"".join(item.parts)):
                    return
                connection.bytes_out += item.size
                self._counters.add("outbound.envelopes")
                self._counters.add("outbound.bytes", item.size)
                connection.queue.pop(lane)

    def _receive(self, sender: MemoryBackend, data: bytes) -> bool:
        connection = self._connections[sender._peer]
        if not self._inbox.offer(
            EnvelopeReceived(peer=sender._peer, data=data, observed_address=sender._address)
        ):
            return False
        connection.bytes_in += len(data)
        self._counters.add("inbound.envelopes")
        self._counters.add("inbound.bytes", len(data))
        return True

    def _room_made(self, peer: PeerId) -> None:
        """An envelope of `peer` was taken: it may have more, and so may others."""
        for each in [peer, *sorted(self._connections)]:
            connection = self._connections.get(each)
            if connection is not None:
                back = connection.backend._connections.get(self._peer)
                if back is not None:
                    connection.backend._pump(back)
