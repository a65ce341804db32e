"""The seam between the driver and whatever moves the bytes.

Rule: nothing here knows libp2p. A backend owns its connections and tasks and reports through
one bounded stream of events; the driver calls plain functions that never block.

Back-pressure inwards. Readers of a connection must not pause: libp2p resets a stream whose
reader rests for 5 s. The inbox that events go through is bounded in bytes and in number,
per peer and in all. A reader that finds it full waits for at most
`TransportLimits.inbox_patience_s`, well under those 5 s, in which a sender that keeps to the
rules is held by its window; then the connection is dropped and counted `inbound.flooded`.
Connects, disconnects and failed sends are never lost: their number is bounded by the number
of connections and of queued envelopes, and a new connection is refused while too many of them
lie unread.

Back-pressure outwards. `send` never blocks: it queues, or raises QueueFullError for this peer
alone. An envelope that was queued and did not reach the operating system before the last
connection with its peer was gone comes back as SendFailed with its tag.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId

# Version of what we speak on our streams; both sides must say the same.
PROTOCOL_VERSION = 1

# The whole of one envelope, from FACTS (caps and budgets).
MAX_ENVELOPE_BYTES = 16 * 1024 * 1024
# Envelopes over this travel on the bulk stream, so that small ones are not held up.
MAX_CONTROL_ENVELOPE_BYTES = 64 * 1024

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
    keep the same one of two. The backend fills in these two and `listen_addresses`.
    """

    protocol_version: int = PROTOCOL_VERSION
    agent_version: str = ""
    artifact_sha256: str = ""
    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    listen_addresses: tuple[Multiaddr, ...] = ()
    session_id: str = "0" * 16
    link: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """A peer said an acceptable hello; envelopes can be sent to it from now on."""

    peer: PeerId
    address: Multiaddr
    direction: Direction
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected:
    """The last connection with a peer is gone."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvelopeReceived:
    """One whole envelope; `peer` is what the connection's handshake proved."""

    peer: PeerId
    data: bytes
    observed_address: Multiaddr


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A queued envelope was not sent; `tag` is the one given to `send`."""

    peer: PeerId
    tag: int
    reason: str


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
class TransportLimits:
    """Bounds of a backend. Each has a typed failure or a counter."""

    max_envelope_bytes: int = MAX_ENVELOPE_BYTES
    # Per peer, not yet handed to the operating system. Four of the largest envelopes.
    queue_envelopes: int = 1024
    queue_bytes: int = 4 * MAX_ENVELOPE_BYTES
    # Received and not yet taken by the driver: per peer, and of all peers together (the
    # engine's own ingress budget in FACTS).
    inbox_envelopes_per_peer: int = 1024
    inbox_bytes_per_peer: int = 4 * MAX_ENVELOPE_BYTES
    inbox_bytes: int = 16 * MAX_ENVELOPE_BYTES
    # Events other than envelopes that lie unread before new connections are refused.
    inbox_notices: int = 4096
    # Under the 5 s after which libp2p resets a stream that nobody reads.
    inbox_patience_s: float = 2.0
    # Buffered by a connection and not read. The other side's window is 256 KiB, and at most
    # 16 MiB once it has grown; libp2p does not enforce it, so two of the largest are a flood.
    unread_bytes: int = 2 * MAX_ENVELOPE_BYTES
    # Writes on one lane that may fail in a row before the connection is given up.
    write_failures: int = 3
    max_connections: int = 1024
    # One in use, one that replaces it, and as many again for simultaneous dials.
    max_connections_per_peer: int = 4
    hello_timeout_s: float = 10.0
    ping_interval_s: float = 5.0
    # Three pings without any byte in return.
    silence_s: float = 15.0
    # How long two sides take leave before the connection is cut anyway.
    farewell_s: float = 5.0
    redial_min_s: float = 0.2
    redial_max_s: float = 30.0


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

        Raises NotConnectedError, QueueFullError or EnvelopeTooLargeError.
        """
        ...

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Dial `peer` whenever it is not connected; a second call replaces the addresses."""
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

    async def stop(self, grace_s: float) -> None:
        """Send what is queued, take leave of all peers, and end within `grace_s` seconds."""
        ...
