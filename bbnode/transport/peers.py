"""The peers of a node: which connection with each is in use, what waits for it, what is wanted.

Rule: a peer has one primary link, on which everything is sent; all its links are read to
their end. Of two links one is kept by `replaces`, which both sides answer alike. The queue
belongs to the peer and not to the link, so that a change of link loses nothing; it fails as a
whole when the last link is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import (
    Buffer,
    Direction,
    EnvelopeReceived,
    HelloRefused,
    PeerConnected,
    PeerDisconnected,
    PeerInfo,
    ProtocolViolation,
    SendFailed,
    TransportLimits,
    WantedPeer,
)
from bbnode.transport.counters import Counters
from bbnode.transport.errors import (
    EnvelopeTooLargeError,
    NotConnectedError,
    QueueFullError,
)
from bbnode.transport.framing import Lane
from bbnode.transport.inbox import Inbox
from bbnode.transport.link import Link
from bbnode.transport.link_state import LinkState
from bbnode.transport.outbound import Outbound, OutboundQueue


@dataclass(slots=True, eq=False)
class PeerSession:
    """What a node knows of one peer."""

    peer: PeerId
    queue: OutboundQueue
    links: list[Link] = field(default_factory=list)
    primary: Link | None = None
    since_s: float = 0.0
    # Bytes of links that are closed; those of open ones are theirs.
    bytes_in: int = 0
    bytes_out: int = 0
    wanted: tuple[Multiaddr, ...] | None = None
    failed_dials: int = 0
    last_error: str = ""
    # Exactly one of the two is set: whether there is a primary link.
    up: trio.Event = field(default_factory=trio.Event)
    down: trio.Event = field(default_factory=trio.Event)


def replaces(own: PeerId, old: Link, new: Link) -> bool:
    """Whether `new` is kept rather than `old`, both being links of one peer.

    Both sides see the same two connections and must keep the same one: that of the smaller
    PeerId when each dialled one; of two by the same dialler, the one it dialled later.
    """
    old_outbound = old.carrier.direction is Direction.OUTBOUND
    new_outbound = new.carrier.direction is Direction.OUTBOUND
    if old_outbound != new_outbound:
        return new_outbound == (own < new.peer)
    return new.dialled_number > old.dialled_number


class PeerTable:
    """All peers of a node; implements LinkOwner."""

    def __init__(
        self, own: PeerId, *, limits: TransportLimits, inbox: Inbox, counters: Counters
    ) -> None:
        self._own = own
        self._limits = limits
        self._inbox = inbox
        self._counters = counters
        self._sessions: dict[PeerId, PeerSession] = {}
        self._links = 0

    # -- for the backend -------------------------------------------------------------------

    def session(self, peer: PeerId) -> PeerSession:
        """The session of a peer, made when there is none."""
        session = self._sessions.get(peer)
        if session is None:
            session = PeerSession(peer, OutboundQueue(self._limits))
            session.down.set()
            self._sessions[peer] = session
        return session

    def known(self, peer: PeerId) -> PeerSession | None:
        """The session of a peer, if there is one."""
        return self._sessions.get(peer)

    def sessions(self) -> list[PeerSession]:
        """All sessions, in PeerId order."""
        return [self._sessions[peer] for peer in sorted(self._sessions)]

    def links(self) -> list[Link]:
        """All links, in PeerId order."""
        return [link for session in self.sessions() for link in session.links]

    def admits(self, peer: PeerId) -> bool:
        """Whether one more connection with `peer` is within the bounds."""
        session = self._sessions.get(peer)
        of_peer = len(session.links) if session else 0
        return (
            self._links < self._limits.max_connections
            and of_peer < self._limits.max_connections_per_peer
            and not self._inbox.crowded
        )

    def add(self, link: Link) -> None:
        """A new connection: it counts from now on, whether it says hello or not."""
        self.session(link.peer).links.append(link)
        self._links += 1

    def drop_if_unused(self, session: PeerSession) -> None:
        """Forget a peer with which we neither are nor want to be connected."""
        if not session.links and session.wanted is None:
            self._sessions.pop(session.peer, None)

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], tag: int) -> None:
        """Queue an envelope; see Backend.send."""
        session = self._sessions.get(peer)
        try:
            if session is None or session.primary is None:
                raise NotConnectedError(f"{peer} is not connected; wait for its PeerConnected")
            lane = session.queue.put(peer, data, tag)
        except (NotConnectedError, QueueFullError, EnvelopeTooLargeError):
            self._counters.add("outbound.refused")
            raise
        session.primary.wake(lane)

    def infos(self) -> list[PeerInfo]:
        """The connected peers, in PeerId order."""
        infos = []
        for session in self.sessions():
            link = session.primary
            if link is None or link.hello is None:
                continue
            infos.append(
                PeerInfo(
                    peer=session.peer,
                    direction=link.carrier.direction,
                    address=link.carrier.address,
                    hello=link.hello,
                    bytes_in=session.bytes_in + sum(each.bytes_in for each in session.links),
                    bytes_out=session.bytes_out + sum(each.bytes_out for each in session.links),
                    queued_envelopes=session.queue.envelopes,
                    queued_bytes=session.queue.bytes,
                    rtt_s=link.rtt_s,
                    since_s=session.since_s,
                )
            )
        return infos

    def wanted(self) -> list[WantedPeer]:
        """The peers that are kept connected, in PeerId order."""
        return [
            WantedPeer(
                peer=session.peer,
                addresses=session.wanted,
                connected=session.primary is not None,
                failed_dials=session.failed_dials,
                last_error=session.last_error,
            )
            for session in self.sessions()
            if session.wanted is not None
        ]

    # -- LinkOwner -------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        """Make the link primary, or close the one of two that is not kept."""
        session = self.session(link.peer)
        old = session.primary
        if old is None or old.state is not LinkState.UP:
            self._promote(session, link)
            return
        if self._restarted(old, link):
            # The old process is gone, and with it all that this link was for.
            session.primary = None
            old.doom("the peer has restarted")
            self._fall(session, "the peer has restarted")
            self._promote(session, link)
            return
        self._counters.add("links.duplicate")
        if replaces(self._own, old, link):
            session.primary = link
            old.retire("another connection is kept")
        else:
            link.retire("another connection is kept")

    def link_closed(self, link: Link, reason: str) -> None:
        """Fall back to another link of the peer, or report that it is gone."""
        session = self.session(link.peer)
        session.links.remove(link)
        self._links -= 1
        session.bytes_in += link.bytes_in
        session.bytes_out += link.bytes_out
        if session.primary is link:
            session.primary = None
            spare = next((each for each in session.links if each.state is LinkState.UP), None)
            if spare is not None:
                self._promote(session, spare)
            else:
                self._fall(session, reason)
        self.drop_if_unused(session)

    def hello_refused(self, link: Link, reason: str) -> None:
        """Count and report a stranger."""
        self._counters.add("hello.refused")
        if not self._inbox.crowded:
            self._inbox.notify(
                HelloRefused(peer=link.peer, address=link.carrier.address, reason=reason)
            )

    def violation(self, link: Link, reason: str) -> None:
        """Count and report a peer that broke the protocol."""
        self._counters.add("protocol.violations")
        if not self._inbox.crowded:
            self._inbox.notify(ProtocolViolation(peer=link.peer, reason=reason))

    async def deliver(self, link: Link, data: bytes) -> bool:
        """Pass an envelope on to the driver."""
        return await self._inbox.deliver(
            EnvelopeReceived(peer=link.peer, data=data, observed_address=link.carrier.address)
        )

    def take(self, link: Link, lane: Lane) -> Outbound | None:
        """Only the primary link of a peer writes its envelopes."""
        session = self._sessions.get(link.peer)
        if session is None or session.primary is not link or link.state is not LinkState.UP:
            return None
        return session.queue.take(lane)

    def written(self, link: Link, item: Outbound) -> None:
        """Release what was written."""
        self.session(link.peer).queue.done(item)

    def give_back(self, link: Link, item: Outbound) -> None:
        """Keep for the next stream or link what was not written."""
        session = self.session(link.peer)
        session.queue.give_back(item)
        if session.primary is not None:
            session.primary.wake(item.lane)
        elif session.down.is_set():
            # The peer was declared gone while this one was in flight.
            self._fail(session, session.queue.drain(), "the connection was lost")

    # -- changes of the primary link -------------------------------------------------------

    def _restarted(self, old: Link, new: Link) -> bool:
        if old.hello is None or new.hello is None:
            return False
        return old.hello.session_id != new.hello.session_id

    def _promote(self, session: PeerSession, link: Link) -> None:
        old, session.primary = session.primary, link
        if link.hello is None:
            return
        if old is not None and self._restarted(old, link):
            self._fall(session, "the peer has restarted")
            session.primary = link
        if session.down.is_set():
            session.since_s = trio.current_time()
            session.failed_dials = 0
            session.last_error = ""
            session.up.set()
            session.down = trio.Event()
            self._inbox.notify(
                PeerConnected(
                    peer=session.peer,
                    address=link.carrier.address,
                    direction=link.carrier.direction,
                    hello=link.hello,
                )
            )
        for lane in Lane:
            link.wake(lane)

    def _fall(self, session: PeerSession, reason: str) -> None:
        """The peer is gone: say so, and fail what waits for it."""
        session.primary = None
        session.down.set()
        session.up = trio.Event()
        self._inbox.notify(PeerDisconnected(peer=session.peer, reason=reason))
        self._fail(session, session.queue.drain(), reason)

    def _fail(self, session: PeerSession, items: Iterable[Outbound], reason: str) -> None:
        for item in items:
            self._counters.add("outbound.failed")
            self._inbox.notify(SendFailed(peer=session.peer, tag=item.tag, reason=reason))
