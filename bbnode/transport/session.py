"""What a node knows of one peer, beyond its connections.

Rule: the queue to a peer and the record of what came from it belong to the session, so that
a change of link, or a link lost and found, loses nothing and repeats nothing. A session lives
while it has links or is wanted, and for a while after its last link (see TransportLimits).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction, Hello, PeerInfo, WantedPeer
from bbnode.transport.errors import DeniedPeerError, NotConnectedError
from bbnode.transport.links.link import Link
from bbnode.transport.links.receiver import Inflow
from bbnode.transport.outbound import OutboundQueue


def fresh_number() -> int:
    """A number that nobody else has: 63 random bits."""
    return secrets.randbits(63)


@dataclass(slots=True, eq=False)
class PeerSession:
    """What a node knows of one peer."""

    peer: PeerId
    queue: OutboundQueue
    # Names our numbering of the messages in `queue`.
    exchange: int = field(default_factory=fresh_number)
    links: list[Link] = field(default_factory=list)
    # The link on which everything is sent.
    primary: Link | None = None
    # What came from the peer, and the link that brings more.
    flow: Inflow | None = None
    feeder: Link | None = None
    # The process of the peer that we last talked to.
    session_id: str = ""
    # What it said it plays, on the link that is in use; it was announced as that.
    classes: tuple[str, ...] = ()
    since_s: float = 0.0
    # Bytes of links that are closed; those of open ones are theirs.
    bytes_in: int = 0
    bytes_out: int = 0
    wanted: tuple[Multiaddr, ...] | None = None
    failed_dials: int = 0
    last_error: str = ""
    # The last word of our own authorizer on a connection with it was no: what fails until it
    # says yes is no fault of the peer.
    denied: bool = False
    # Without a link: until when the queue is kept, and until when the record is.
    fails_at: float = math.inf
    forgotten_at: float = math.inf
    # The queue is kept because somebody began to dial the peer.
    expected: bool = False
    # Exactly one of the two is set: whether there is a primary link.
    up: trio.Event = field(default_factory=trio.Event)
    down: trio.Event = field(default_factory=trio.Event)

    @property
    def speaks_as(self) -> tuple[str, tuple[str, ...]]:
        """Its process, and the classes that it was announced with."""
        return self.session_id, self.classes

    def why_new(self, hello: Hello) -> str:
        """Why this hello ends the connection as it was: it says another process, or classes."""
        same = self.session_id == hello.session_id
        return "the peer plays other classes now" if same else "the peer has restarted"

    @property
    def takes_messages(self) -> bool:
        """Whether there is a connection, or may be one again soon."""
        return self.primary is not None or self.fails_at < math.inf

    @property
    def unused(self) -> bool:
        """Whether nothing would be lost with this session."""
        kept = self.links or self.takes_messages or self.forgotten_at < math.inf
        return self.wanted is None and not kept

    def wish(self) -> WantedPeer | None:
        """The peer as one that is kept connected, if it is."""
        if self.wanted is None:
            return None
        return WantedPeer(
            peer=self.peer,
            addresses=self.wanted,
            connected=self.primary is not None,
            failed_dials=self.failed_dials,
            last_error=self.last_error,
        )

    def expect(self, until_s: float) -> bool:
        """Take messages until then: the peer is dialled. False when they are taken already."""
        if self.takes_messages:
            return False
        self.expected, self.fails_at = True, until_s
        return True

    def await_nothing(self) -> None:
        """The peer is there, or is given up."""
        self.expected, self.fails_at, self.forgotten_at = False, math.inf, math.inf

    def remove(self, link: Link) -> None:
        """A link is closed; what it moved still counts."""
        self.links.remove(link)
        self.bytes_in += link.bytes_in
        self.bytes_out += link.bytes_out

    def info(self) -> PeerInfo | None:
        """The peer as it is shown; None while there is no connection with a hello."""
        link, queue = self.primary, self.queue
        if link is None or link.hello is None:
            return None
        return PeerInfo(
            peer=self.peer,
            direction=link.carrier.direction,
            address=link.carrier.address,
            hello=link.hello,
            bytes_in=self.bytes_in + sum(each.bytes_in for each in self.links),
            bytes_out=self.bytes_out + sum(each.bytes_out for each in self.links),
            queued_envelopes=queue.envelopes,
            queued_bytes=queue.bytes,
            unacknowledged_bytes=queue.unacknowledged_bytes,
            acknowledged=queue.acknowledged,
            resent=queue.resent,
            duplicates=0 if self.flow is None else self.flow.duplicates,
            rtt_s=link.rtt_s,
            since_s=self.since_s,
        )


def not_connected(peer: PeerId, session: PeerSession | None) -> NotConnectedError:
    """Why nothing can be queued for a peer that takes no messages."""
    if session is not None and session.denied:
        return DeniedPeerError(f"{peer} is not connected: it was not allowed here")
    return NotConnectedError(f"{peer} is not connected; wait for its PeerConnected")


def replaces(own: PeerId, old: Link, new: Link) -> bool:
    """Whether `new` is kept rather than `old`, both being links of one peer.

    Both sides see the same two connections and must keep the same one: the direct one if the
    other is relayed; that of the smaller PeerId when each dialled one; of two by the same
    dialler, the one it dialled later.
    """
    new_relayed = is_relayed(new.carrier.address)
    if is_relayed(old.carrier.address) != new_relayed:
        return not new_relayed
    old_outbound = old.carrier.direction is Direction.OUTBOUND
    new_outbound = new.carrier.direction is Direction.OUTBOUND
    if old_outbound != new_outbound:
        return new_outbound == (own < new.peer)
    return new.dialled_number > old.dialled_number


def restarted(old: Link, new: Link) -> bool:
    """Whether another process of the peer speaks on `new`, or it plays other classes there.

    No process of ours changes its classes. With one that does, the newest word counts: it is
    what the authorizer decided on last.
    """
    if old.hello is None or new.hello is None:
        return False
    was, now = old.hello, new.hello
    return (was.session_id, was.classes) != (now.session_id, now.classes)
