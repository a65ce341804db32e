"""The seam between the driver and whatever moves the bytes.

Rule: nothing here knows libp2p. A backend owns its connections and tasks and reports through
one bounded stream of events; the driver calls plain functions that never block.

Delivery. A message that `send` took is delivered once, in the order of its lane, over as many
connections as that takes; or it comes back as SendFailed with its tag: when no connection came
about for `TransportLimits.resume_s`, when a peer began to be dialled and none of its addresses
answered, when leave was taken, or when the peer was restarted after
the message was begun (it may have been taken then, or not). Messages that were not begun go to
the restarted peer. Never is one delivered twice.

Back-pressure outwards. `send` never blocks: it queues, or raises QueueFullError for this peer
alone.

Back-pressure inwards. Readers of a connection never pause: libp2p resets a stream whose reader
rests for 5 s. The inbox that events go through is bounded in bytes and in number, per peer
and in all; what it refuses is kept beside it, up to the window that the peer was given, and is
not acknowledged: its sender waits, and its engine hears of it through its own queue. So does who
is over its rate. A peer that sends beyond its window is dropped and counted `inbound.flooded`. Of
large messages each byte is charged as it comes; when they are short of room the slowest is given
up and asked for again, and one that comes too slowly though there is room ends its connection
(`links.slow`). Connects, disconnects and failed sends are never lost: their number is bounded by
the number of connections and of queued messages, and a new connection is refused while too many of
them lie unread.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import trio
from multiaddr import Multiaddr

from bbnode.access.decision import Standing
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import Violation as Violation
from bbnode.transport.limits import TransportLimits as TransportLimits
from bbnode.transport.unsent import Unsent as Unsent

# Version of what we speak on our streams; both sides must say the same.
PROTOCOL_VERSION = 1

Buffer: TypeAlias = bytes | bytearray | memoryview


class Direction(enum.Enum):
    """Who dialled a connection, seen from here."""

    INBOUND = "inbound"
    OUTBOUND = "outbound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What each side says first on every connection.

    `session_id` (16 hex digits, new at each start of a backend) shows that a peer has
    restarted; `link` numbers the connections that its sender dialled, so that both sides
    keep the same one of two; `exchange` names our numbering of what we send to this peer. The
    backend fills in these three and `listen_addresses`. `credentials` are for the other side's
    `Authorizer` and mean nothing to the transport.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """A peer said an acceptable hello; envelopes can be sent to it from now on."""

    peer: PeerId
    address: Multiaddr
    direction: Direction
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected:
    """The last connection with a peer is gone.

    `goodbye`: one of the two sides took leave, so that nobody means to come back. False is a loss.
    """

    peer: PeerId
    reason: str
    goodbye: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvelopeReceived:
    """One whole envelope; `peer` is what the connection's handshake proved.

    A large one is a read-only view of memory that is its receiver's alone from now on.
    """

    peer: PeerId
    data: bytes | memoryview
    observed_address: Multiaddr


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A queued envelope was given up; `tag` is the one given to `send`.

    `blames_peer` is False where the peer did nothing wrong that it would do again: it was
    restarted, took leave, or the bound was ours.
    """

    peer: PeerId
    tag: int
    reason: str
    blames_peer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused:
    """A peer connected and said no hello that we accept; its connection was closed."""

    peer: PeerId
    address: Multiaddr
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolViolation:
    """A peer that had said hello sent what it must not; that connection was closed."""

    peer: PeerId
    reason: str
    kind: Violation = Violation.FRAME


TransportEvent: TypeAlias = (
    PeerConnected
    | PeerDisconnected
    | EnvelopeReceived
    | SendFailed
    | HelloRefused
    | ProtocolViolation
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A connected peer, for status and metrics. Times are in seconds."""

    peer: PeerId
    direction: Direction
    address: Multiaddr
    hello: Hello
    bytes_in: int
    bytes_out: int
    queued_envelopes: int
    queued_bytes: int
    # Of the queued ones, under way now.
    unacknowledged_bytes: int
    # Messages, since the first connection that is not forgotten.
    acknowledged: int
    resent: int
    duplicates: int
    rtt_s: float | None
    # trio.current_time() of the connect.
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPeer:
    """A peer given to `keep_connected`, and how its dialling goes."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    connected: bool
    failed_dials: int
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportMetrics:
    """Everything that can be measured of a backend, at one moment."""

    # Connections: with their hello, without it yet, and how many there may be.
    connections: int
    connections_opening: int
    connection_slots: int
    # Streams of all connections, and tasks of the backend.
    streams: int
    tasks: int
    # Bytes: in the muxer and unread; received without room in the inbox; in the inbox; of
    # large messages that are being received; queued; of those, under way.
    unread_bytes: int
    held_bytes: int
    inbox_bytes: int
    partial_bytes: int
    queued_bytes: int
    unacknowledged_bytes: int
    inbox_envelopes: int
    inbox_notices: int
    queued_envelopes: int
    # Circuits between other peers that go through us.
    circuits: int
    # Peers that are remembered, connected or not.
    sessions: int
    # Refusals of the authorizer by its reason.
    denied: Mapping[str, int]
    counters: Mapping[str, int]
    peers: tuple[PeerInfo, ...]


class Decision(Protocol):
    """What an Authorizer answers."""

    @property
    def allowed(self) -> bool:
        """Whether it may be."""
        ...

    @property
    def reason(self) -> str:
        """Why not, one of few short ASCII words: refusals are counted by it."""
        ...

    @property
    def wait_s(self) -> float:
        """Of an envelope that may come in, and not yet: in how many seconds. Else 0."""
        ...

    @property
    def standing(self) -> Standing:
        """What the peer is to this node, of a hello that is allowed."""
        ...


class Authorizer(Protocol):
    """Who may talk. Asked in the trio thread: it must answer at once, and never raise."""

    def connection(self, peer: PeerId, direction: Direction) -> Decision:
        """A connection whose handshake proved `peer`; nothing was said on it yet."""
        ...

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> Decision:
        """The peer's first message, with its credentials."""
        ...

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> Decision:
        """One envelope of `size` bytes from the peer (INBOUND) or to it.

        One from the peer that is told to wait is held, and its sender with it; nothing is lost.
        """
        ...

    def is_known(self, peer: PeerId) -> bool:
        """Whether a peer has shown to be of use: there is room that is kept for such."""
        ...


class ProtocolStream(Protocol):
    """A stream of a protocol other than ours, on a connection that both sides keep.

    Its calls can be cancelled, and so can be given a time-out.
    """

    @property
    def peer(self) -> PeerId:
        """Who the connection's handshake proved the other side to be."""
        ...

    async def read(self, max_bytes: int) -> bytes:
        """Between 1 and `max_bytes` bytes; b"" at the end; StreamBrokenError after a reset."""
        ...

    async def write(self, data: Buffer) -> None:
        """Write all of `data`; raises StreamBrokenError. A cancelled one may still be written."""
        ...

    async def end(self) -> None:
        """Nothing more will be written: the other side reads its end."""
        ...


ProtocolHandler: TypeAlias = Callable[[ProtocolStream], Awaitable[None]]


class ProtocolHost(Protocol):
    """A backend that carries other protocols beside the envelopes."""

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        """Serve `protocol_id` on all connections; before `run`.

        The stream is closed when `handler` returns and reset when it raises; what it raises is
        counted and goes no further. Raises DeploymentError for an id that is taken.
        """
        ...

    def open_stream(
        self, peer: PeerId, protocol_id: str
    ) -> AbstractAsyncContextManager[ProtocolStream]:
        """A stream to a connected peer, closed at the end of the context, reset on an error.

        Entering raises NotConnectedError, TooManyStreamsError, or StreamBrokenError when the peer
        does not speak the protocol.
        """
        ...


class EventStream(Protocol):
    """Where a driver takes events from; one reader."""

    async def receive(self) -> TransportEvent:
        """The next event; raises trio.EndOfChannel when the backend has stopped."""
        ...

    def receive_nowait(self) -> TransportEvent:
        """The next event; raises trio.WouldBlock when there is none now."""
        ...


class Backend(Protocol):
    """What the driver needs of a transport."""

    @property
    def peer_id(self) -> PeerId:
        """Our own PeerId."""
        ...

    @property
    def events(self) -> EventStream:
        """The bounded stream of everything that happens."""
        ...

    def listen_addresses(self) -> list[Multiaddr]:
        """Concrete addresses that others can dial, each ending in /p2p/<our id>."""
        ...

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Own all tasks; say `started` once we listen; return after `stop()`.

        Raises ListenError for an address that cannot be had.
        """
        ...

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        """Queue one envelope; never blocks.

        `bytes` and read-only views are kept by reference until the peer has acknowledged
        them: nobody may change them. Raises NotConnectedError, QueueFullError,
        EnvelopeTooLargeError or NotAllowedError.
        """
        ...

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Dial `peer` whenever it is not connected; a second call replaces the addresses.

        Until its addresses were tried once, `send` takes messages for it already.
        """
        ...

    def unsent(self) -> list[Unsent]:
        """What peers have not acknowledged: of now, and once stopped, of the end."""
        ...

    def forget(self, peer: PeerId) -> None:
        """Dial `peer` no more; an existing connection stays."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Take leave of `peer`; the PeerDisconnected event tells when it is done."""
        ...

    def peers(self) -> list[PeerInfo]:
        """Connected peers in PeerId order."""
        ...

    def wanted(self) -> list[WantedPeer]:
        """Peers given to `keep_connected`, in PeerId order."""
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic counters by name; all names are always there."""
        ...

    def metrics(self) -> TransportMetrics:
        """All gauges and counters."""
        ...

    def set_credentials(self, credentials: bytes) -> None:
        """Show other `credentials` in the hello of every connection from now on."""
        ...

    def reauthorize(self) -> None:
        """Ask the authorizer again about every connection; those now denied are closed."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Send what is queued, wait for its acknowledgement, take leave of all peers;
        all within `grace_s` seconds. What is left then is `unsent`, and no SendFailed.
        """
        ...
