"""The interface of transports, which carry a node's envelopes to its peers.

A transport owns its connections and tasks and reports through one bounded stream of events; the
driver calls plain functions that never block.

Delivery. A message that `send` accepted is delivered once, in the order of its lane, over as many
connections as that takes, or comes back as DeliveryFailed with its tag: when there was no
connection for `TransportLimits.resume_s`, when none of the peer's addresses answered, when one side
closed on purpose, or when the peer was restarted after part of the message had been sent (it may
have arrived then, or not). Unsent messages go to the restarted peer. None is delivered twice.

Outbound back-pressure. `send` never blocks: it queues, or raises QueueFullError for this peer
alone.

Inbound back-pressure. The inbox of events is bounded in bytes and in number, per peer and in
total. What does not fit is held beside it, up to the window that the peer was given, and is not
acknowledged, so that the sender waits; the same holds for a peer that is over its rate. Connects,
disconnects and failed deliveries are never lost: their number is bounded by the number of
connections and of queued messages, and new connections are refused while too many are unread.

Access. A transport asks the `Authorizer` about each connection, each hello, and each envelope in
either direction, before it acts on them.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

from multiaddr import Multiaddr

from bbnode.access.decision import Decision
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import (
    DialError,
    NotSupportedError,
    RelayFault,
    StreamBrokenError,
    Violation,
)
from bbnode.transport.identity import Identity
from bbnode.transport.limits import RelaySettings, TransportLimits
from bbnode.transport.routing import Routing, RoutingSetup
from bbnode.transport.topics import Topics, TopicSetup

if TYPE_CHECKING:
    # Deferred, to save the import time in commands that only read a key or a configuration.
    import trio

# Version of the protocol on our streams; both sides must say the same.
PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 1

Buffer: TypeAlias = bytes | bytearray | memoryview


# Prefix of the reason for which a connection ended if the peer closed it.
PEER_CLOSED: Final = "the peer said goodbye: "
# Prefix of a refusal by an authorizer, which is sent to the peer.
NOT_ALLOWED: Final = "not allowed"


def turned_away(reason: str) -> str:
    """Return a peer's reason for not admitting us, if a ConnectionClosed has one, else ""."""
    refusal = reason.removeprefix(PEER_CLOSED)
    if refusal == reason or not refusal.startswith(NOT_ALLOWED):
        return ""
    return refusal.partition(": ")[2] or refusal


class Direction(enum.Enum):
    """The side that dialled a connection, seen from here."""

    INBOUND = "inbound"
    OUTBOUND = "outbound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of each side on every connection.

    The node fills in its identity, and in `crossings` the values that its targets send and take
    (`bbnode.ir.crossing`; empty: undisclosed); `credentials` are for the other side's
    `Authorizer` and opaque to the transport. The transport fills in the rest: `listen_addresses`;
    `session_id`, 16 hex digits that change at each start, so that a restart is noticed; `link`,
    the number of the connection among those that its sender dialled, by which both sides keep the
    same one of two; `exchange`, which identifies our numbering of the messages to this peer.
    """

    protocol_version: int = PROTOCOL_VERSION
    agent_version: str = ""
    artifact_sha256: str = ""
    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    listen_addresses: tuple[Multiaddr, ...] = ()
    session_id: str = "0" * 16
    link: int = 0
    exchange: int = 0
    credentials: bytes = b""
    crossings: bytes = b""


# -- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOpened:
    """A peer has sent an acceptable hello; envelopes can be sent to it from now on."""

    peer: PeerId
    address: Multiaddr
    direction: Direction
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionClosed:
    """The last connection with a peer is gone.

    `goodbye`: one side closed it on purpose and does not intend to come back; False is a loss.
    """

    peer: PeerId
    reason: str
    goodbye: bool = False


class EnvelopeReceived(NamedTuple):
    """One whole envelope; `peer` is the id that the connection's handshake proved.

    A large one is a read-only view of memory that belongs to its receiver from now on.
    """

    peer: PeerId
    data: bytes | memoryview
    observed_address: Multiaddr


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFailed:
    """A queued envelope was given up; `tag` is the one passed to `send`.

    `blames_peer` is False if the peer was restarted or said goodbye, or the bound was ours;
    `in_doubt`: the peer is connected, and was restarted or forgot us: it may have the envelope.
    """

    peer: PeerId
    tag: int
    reason: str
    blames_peer: bool = True
    in_doubt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused:
    """A peer connected without an acceptable hello; its connection was closed."""

    peer: PeerId
    address: Multiaddr
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolViolation:
    """A peer broke the protocol after its hello; that connection was closed."""

    peer: PeerId
    reason: str
    kind: Violation = Violation.FRAME


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayMisused:
    """A relay, or a user of this one, did what `fault` says."""

    peer: PeerId
    fault: RelayFault
    reason: str


TransportEvent: TypeAlias = (
    ConnectionOpened
    | ConnectionClosed
    | EnvelopeReceived
    | DeliveryFailed
    | HelloRefused
    | ProtocolViolation
    | RelayMisused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A connected peer, for status and metrics. Times are in seconds."""

    peer: PeerId
    direction: Direction
    address: Multiaddr
    hello: Hello
    bytes_in: int = 0
    bytes_out: int = 0
    queued_envelopes: int = 0
    queued_bytes: int = 0
    # Bytes of the queue that are in flight.
    unacknowledged_bytes: int = 0
    # Messages since the session with the peer began.
    acknowledged: int = 0
    resent: int = 0
    duplicates: int = 0
    rtt_s: float | None = None
    # trio.current_time() of the connect.
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPeer:
    """A peer passed to `keep_connected`, and the state of its dialling."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    connected: bool
    failed_dials: int
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportMetrics:
    """All gauges and counters of a transport at one moment."""

    # Connections: with their hello, without it yet, and the maximum of both.
    connections: int = 0
    connections_opening: int = 0
    connection_slots: int = 0
    # Streams of all connections, and tasks of the transport.
    streams: int = 0
    tasks: int = 0
    # Bytes: in the muxer and unread; received without room in the inbox; in the inbox; of
    # large messages that are being received; queued; queued and in flight.
    unread_bytes: int = 0
    held_bytes: int = 0
    inbox_bytes: int = 0
    partial_bytes: int = 0
    queued_bytes: int = 0
    unacknowledged_bytes: int = 0
    inbox_envelopes: int = 0
    inbox_notices: int = 0
    queued_envelopes: int = 0
    # Circuits between other peers that are relayed by us.
    circuits: int = 0
    # Connections with hosts of libp2p that speak no protocol of bbnode.
    foreign: int = 0
    # Peers that are remembered, connected or not.
    sessions: int = 0
    # Refusals by the authorizer, by reason.
    denied: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    peers: tuple[PeerInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """An envelope that its peer has not acknowledged: it may have arrived, or not."""

    peer: PeerId
    tag: int
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """The total size of all parts in bytes."""
        return sum(len(part) for part in self.parts)


# Every counter and its meaning. All exist from the start, and none ever decreases.
COUNTERS: Final[dict[str, str]] = {
    "dial.attempts": "addresses dialled",
    "dial.failed": "addresses that could not be dialled, or where somebody else answered",
    "links.opened": "secured connections, in both directions",
    "links.closed": "connections that ended, for whatever reason",
    "links.duplicate": "second connections with one peer that were closed",
    "links.refused": "connections refused because a bound was reached",
    "links.evicted": "strangers' connections closed to make room for another peer",
    "links.silent": "connections closed because the peer sent nothing for too long",
    "links.stalled": "connections closed because a transfer made no progress for too long",
    "links.slow": "connections closed because a large message or a frame came too slowly",
    "sockets.refused": "sockets closed at once: too many wait for a hello, in all or of a prefix",
    "sockets.cooling": "sockets closed at once: a stranger of the same prefix has flooded us",
    "sockets.dropped": "connections without a hello that were closed to make room for another",
    "sockets.late": "connections that did not prove in time who they are",
    "foreign.taken": "connections that stayed with a host that speaks no protocol of bbnode",
    "foreign.refused": "connections with such hosts that found no room",
    "foreign.dropped": "silent connections with such hosts that were closed for another one",
    "hello.refused": "connections closed because of their first message, or for want of one",
    "protocol.violations": "connections closed because of what came after the hello",
    "streams.write_failed": "outgoing streams that broke and were opened again",
    "streams.truncated": "incoming streams that ended in the middle of a frame",
    "streams.too_many": "streams of peers that were reset because too many were open",
    "streams.reaped": "streams reset because they were idle, half closed or never negotiated",
    "streams.handler_errors": "exceptions caught at the edge of a stream handler",
    "inbound.envelopes": "envelopes received",
    "inbound.bytes": "bytes read from our streams",
    "inbound.duplicates": "envelopes that had come before and were dropped",
    "inbound.superseded": "frames of a connection or round that another has replaced",
    "inbound.unallocated": "large envelopes thrown away for want of memory",
    "inbound.flooded": "connections dropped because the peer ignored its window, or sent what a "
    "muxer must not",
    "inbound.throttled": "times that a connection had to wait because what it had sent cost more "
    "than its share of a core",
    "inbound.evicted": "large envelopes whose room went to a faster one: they begin again later",
    "inbound.delayed": "times that an envelope was held because its sender was over its rate",
    "access.denied": "connections, hellos and envelopes that the authorizer refused",
    "outbound.envelopes": "envelopes written to our streams, those written again included",
    "outbound.bytes": "bytes written to our streams",
    "outbound.refused": "sends refused: not connected, queue full, too large, not allowed",
    "outbound.failed": "queued envelopes that were given up",
    "protocols.opened": "streams of other protocols, in both directions",
    "protocols.refused": "streams of other protocols refused: no hello yet, or too many",
    "protocols.failed": "handlers of other protocols that ended with an exception",
    "libp2p.failed": "times that py-libp2p's host ended by a fault of its own (once at most)",
    "topics.published": "messages of this node on topics",
    "topics.received": "messages of others on topics that were taken",
    "topics.known": "messages that came again, by another way",
    "topics.dropped": "messages of this node that could not be published",
    "topics.malformed": "messages and topics refused: they are none",
    "topics.forged": "messages refused: the signature is not the publisher's",
    "topics.replayed": "messages refused: they are of long ago",
    "topics.oversized": "messages refused: too large",
    "topics.not_allowed": "messages refused: the publisher is no member, or not allowed here",
    "topics.flood": "messages and topics refused: too many of one peer",
    "relay.reserved": "reservations given to peers, renewals included",
    "relay.refused": "requests to relay that were refused",
    "relay.circuits_opened": "circuits that were made here between two peers",
    "relay.circuits_closed": "circuits that ended, for whatever reason",
    "relay.circuits_cut": "circuits that were cut at their bound of time or bytes",
    "relay.bytes": "bytes passed on between peers",
    "relay.malformed": "messages of relays and their users refused: they are none",
    "relay.expired": "reservations of relays refused: they were over already",
    "relay.endless": "reservations of relays that are longer than any relay keeps them",
    "relay.useless": "circuits refused: the relay lets too little through",
    "relay.another_peer": "circuits refused: another peer was there than the relay had said",
    "relay.uninvited": "circuits refused: offered by a peer with which there is no reservation",
    "relay.addresses": "addresses that peers behind relays gave, at which another peer was",
    "relay.silent": "times that a relay, or a user of it, owed a message that did not come",
    "relay.flood": "requests to relay refused: too many of one peer",
    "punch.tried": "attempts to replace a circuit, which a peer dialled, by a direct connection",
    "punch.done": "those that have made one",
    "punch.failed": "those that have not; the circuit stays",
}


class Counters:
    """The counters of one transport: the names of COUNTERS."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter; `name` is one of COUNTERS."""
        self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return a copy of all values."""
        return dict(self._values)


# -- what a node gives a transport -----------------------------------------------------------


class Authorizer(Protocol):
    """The policy of a node, asked in the trio thread; it never blocks and never raises."""

    def connection(self, peer: PeerId, direction: Direction) -> Decision:
        """Decide on a connection whose handshake proved `peer`, before any hello."""

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> Decision:
        """Decide on a peer by its first message, which has its credentials."""

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> Decision:
        """Decide on one envelope of `size` bytes from the peer (INBOUND) or to it.

        An inbound one whose decision says to wait is held, and its sender slowed down.
        """

    def is_known(self, peer: PeerId) -> bool:
        """Return True if a peer has been useful before; some room is reserved for such peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSetup:
    """Everything that a node passes to the factory of its transport.

    Attributes:
        identity: the node's key; others know the node by its `peer_id`.
        hello: the hello to send on every connection.
        listen: addresses to listen on, as in `network.listen`.
        announce: addresses to tell peers instead of those listened on.
        limits: bounds of the transport.
        authorizer: the policy; None admits everybody.
        settings: the table `[network.settings]`, as it was written.
        relay: the table `[relay]`, for transports with Capability.RELAYS.
        on_addresses: the transport calls it when `Transport.listen_addresses` has changed.
    """

    identity: Identity
    hello: Hello = field(default_factory=Hello)
    listen: tuple[Multiaddr, ...] = ()
    announce: tuple[Multiaddr, ...] = ()
    limits: TransportLimits = field(default_factory=TransportLimits)
    authorizer: Authorizer | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    relay: RelaySettings = field(default_factory=RelaySettings)
    on_addresses: Callable[[], None] = lambda: None


def check_can_be_dialled(own: PeerId, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
    """Raise DeploymentError for our own id, or an empty list of addresses."""
    if peer == own:
        raise DeploymentError(f"{peer} is this node itself; remove it from the peers to dial")
    if not addresses:
        raise DeploymentError(f"no address given for {peer}; name at least one")


# -- the transport ---------------------------------------------------------------------------


class Capability(enum.Enum):
    """An optional feature of transports that a configuration may ask for."""

    # Other protocols beside the envelopes (`open_stream`): private networks, pings, dial-back,
    # and fetching an artifact from a peer.
    STREAMS = "streams"
    # Connections through a third peer: the table `[relay]`.
    RELAYS = "relays"
    # Messages on topics: components that use them, and `topics.revocations`.
    TOPICS = "topics"
    # Addresses of IP and TCP: `discovery.mdns`, and the default of `network.listen`.
    IP = "ip"


class ProtocolStream(Protocol):
    """A stream of a protocol other than ours. Its calls may be cancelled."""

    @property
    def peer(self) -> PeerId:
        """The other side, as the connection's handshake proved it."""

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes; b"" at the end. Raises StreamBrokenError."""

    async def write(self, data: Buffer) -> None:
        """Write all of `data`; raises StreamBrokenError. Data may go out after a cancellation."""

    async def end(self) -> None:
        """Close our direction: the other side reads the end of the stream."""


ProtocolHandler: TypeAlias = Callable[[ProtocolStream], Awaitable[None]]


async def read_exactly(stream: ProtocolStream, count: int) -> bytes:
    """Return the next `count` bytes; raises StreamBrokenError when the stream ends before."""
    data = bytearray()
    while len(data) < count:
        part = await stream.read(count - len(data))
        if not part:
            raise StreamBrokenError(f"{stream.peer} ended in the middle of a message")
        data += part
    return bytes(data)


class EventStream(Protocol):
    """The events of a transport; one reader."""

    async def receive(self) -> TransportEvent:
        """Return the next event; raises trio.EndOfChannel once the transport has stopped."""

    def receive_nowait(self) -> TransportEvent:
        """Return the next event; raises trio.WouldBlock if there is none yet."""


class Transport(ABC):
    """Carries the envelopes of one node. Everything runs in one trio thread."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    @property
    @abstractmethod
    def peer_id(self) -> PeerId:
        """Our own PeerId."""

    @property
    @abstractmethod
    def events(self) -> EventStream:
        """The bounded stream of all events."""

    @abstractmethod
    def listen_addresses(self) -> list[Multiaddr]:
        """Return concrete addresses that others can dial, each ending in /p2p/<our id>."""

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run all tasks until `stop`; call `task_status.started` once we listen.

        Raises ListenError for an address that cannot be listened on.
        """

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Send the queued envelopes, wait for their acknowledgement and close all connections.

        It takes at most `grace_s` seconds. Envelopes left then are `unsent`, without a
        DeliveryFailed.
        """

    @abstractmethod
    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        """Queue one envelope; never blocks.

        `bytes` and read-only views are kept by reference until the peer has acknowledged
        them: nobody may change them. Raises NotConnectedError, QueueFullError,
        EnvelopeTooLargeError or NotAllowedError.
        """

    @abstractmethod
    def unsent(self) -> list[Unsent]:
        """Return the unacknowledged envelopes, now or as of the stop of the transport."""

    @abstractmethod
    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Dial `peer` whenever it is not connected; a second call replaces the addresses.

        `send` accepts messages for it at once, until its addresses have been tried in vain. Raises
        DeploymentError for our own id, or without any address.
        """

    @abstractmethod
    def forget(self, peer: PeerId) -> None:
        """Stop dialling `peer`; an existing connection stays."""

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """Close the connection with `peer` cleanly; ConnectionClosed reports when it is done."""

    @abstractmethod
    def peers(self) -> list[PeerInfo]:
        """Return the connected peers in PeerId order."""

    def peer_info(self, peer: PeerId) -> PeerInfo | None:
        """Return one connected peer; None if it is not connected."""
        return next((info for info in self.peers() if info.peer == peer), None)

    def moved(self) -> dict[PeerId, tuple[int, int]]:
        """Return the bytes in and out of the connected peers, in PeerId order."""
        return {info.peer: (info.bytes_in, info.bytes_out) for info in self.peers()}

    @abstractmethod
    def wanted(self) -> list[WantedPeer]:
        """Return the peers passed to `keep_connected`, in PeerId order."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return all of COUNTERS with their values."""

    @abstractmethod
    def metrics(self) -> TransportMetrics:
        """Return all gauges and counters."""

    @abstractmethod
    def set_credentials(self, credentials: bytes) -> None:
        """Send these `credentials` in the hello of every new connection."""

    @abstractmethod
    def reauthorize(self) -> None:
        """Ask the authorizer about every connection again, and close those that it denies."""

    # -- optional features -------------------------------------------------------------------

    def register_protocol(  # noqa: B027 - nothing to do without streams
        self, protocol_id: str, handler: ProtocolHandler
    ) -> None:
        """Serve `protocol_id` on all connections; before `run`.

        The stream is closed when `handler` returns and reset when it raises; its exceptions are
        counted and not raised again. Raises DeploymentError for an id that is taken. Without
        Capability.STREAMS this does nothing.
        """

    def register_for_any(self, protocol_id: str, handler: ProtocolHandler) -> None:
        """Serve a protocol as `register_protocol` does, also for guests, which send no hello."""
        self.register_protocol(protocol_id, handler)

    def open_stream(
        self, peer: PeerId, protocol_id: str
    ) -> AbstractAsyncContextManager[ProtocolStream]:
        """Open a stream to a connected peer, closed with the context and reset on an error.

        Raises NotSupportedError without Capability.STREAMS; entering raises NotConnectedError,
        TooManyStreamsError, or StreamBrokenError if the peer does not speak the protocol.
        """
        raise NotSupportedError(
            f"{type(self).__name__} carries envelopes only, so {protocol_id} can't be spoken with "
            f"{peer}; choose another network.transport"
        )

    @property
    def libp2p_host(self) -> Any:
        """The `BasicHost` of py-libp2p on the connections of this transport.

        Raises NotSupportedError if there is none.
        """
        raise NotSupportedError(
            "this transport has no host of py-libp2p: network.transport has to be libp2p"
        )

    def routing(self, setup: RoutingSetup) -> Routing:  # noqa: ARG002
        """Return the routing, which finds peers through others. Raises NotSupportedError."""
        raise NotSupportedError(
            'this transport has no DHT: routing.dht needs network.transport = "libp2p"'
        )

    def topics(self, setup: TopicSetup) -> Topics:  # noqa: ARG002
        """Return the topics of this node; to be called once. Raises NotSupportedError."""
        raise NotSupportedError(
            'this transport carries no topics: they need network.transport = "libp2p"'
        )

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:  # noqa: ARG002
        """Check that `peer` answers at `address`, without a connection; raises DialError."""
        raise DialError(f"{type(self).__name__} can't look at {address} without a connection")
