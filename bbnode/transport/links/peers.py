"""The peers of a node: the connection in use with each, and the fate of its messages.

Rule: a peer has one primary link, on which everything is sent, and one feeder, from which
messages are received; mostly they are the same. `replaces` decides which of two links is kept, and
gives the same answer on both sides. A peer that the authorizer refuses has no link; a refused
envelope is counted under the reason and dropped.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from bbnode.access.decision import Standing
from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_RECOGNISED
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    NOT_ALLOWED,
    Authorizer,
    Buffer,
    ConnectionClosed,
    ConnectionOpened,
    Counters,
    DeliveryFailed,
    Direction,
    Hello,
    HelloRefused,
    PeerInfo,
    ProtocolViolation,
    Unsent,
    WantedPeer,
)
from bbnode.transport.errors import (
    DeniedPeerError,
    EnvelopeTooLargeError,
    NotAllowedError,
    NotConnectedError,
    QueueFullError,
    Violation,
)
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Admission, Gate, Place, Stage
from bbnode.transport.links.framing import Lane, Resume
from bbnode.transport.links.life import Looks
from bbnode.transport.links.link import Link, LinkOwner, LinkState
from bbnode.transport.links.receiver import Receiver
from bbnode.transport.outbound import Outbound, OutboundQueue, size_of


def fresh_number() -> int:
    """Return 63 random bits: a unique number."""
    return secrets.randbits(63)


@dataclass(slots=True, eq=False)
class PeerSession:
    """The state that a node keeps for one peer, beyond its connections."""

    peer: PeerId
    queue: OutboundQueue
    # Identifies our numbering of the messages in `queue`.
    exchange: int = field(default_factory=fresh_number)
    links: list[Link] = field(default_factory=list)
    # The link on which everything is sent.
    primary: Link | None = None
    # The receiving side, and the link that feeds it.
    receiver: Receiver | None = None
    feeder: Link | None = None
    # The peer's process, from its last hello.
    session_id: str = ""
    # The classes that it claims to play on the link in use, as in its ConnectionOpened.
    classes: tuple[str, ...] = ()
    since_s: float = 0.0
    # Bytes of closed links; an open link counts its own.
    bytes_in: int = 0
    bytes_out: int = 0
    wanted: tuple[Multiaddr, ...] | None = None
    failed_dials: int = 0
    last_error: str = ""
    # True if our own authorizer refused the last connection with it: until it allows one, a
    # failure is not the peer's fault.
    denied: bool = False
    # Without a link: the times at which the queue fails and the session is forgotten.
    fails_at: float = math.inf
    forgotten_at: float = math.inf
    # True if the queue is kept because the peer is being dialled.
    expected: bool = False
    # Exactly one of the two is set: `up` with a primary link, else `down`.
    up: trio.Event = field(default_factory=trio.Event)
    down: trio.Event = field(default_factory=trio.Event)

    @property
    def speaks_as(self) -> tuple[str, tuple[str, ...]]:
        """The peer's process, and the classes in its ConnectionOpened."""
        return self.session_id, self.classes

    def why_new(self, hello: Hello) -> str:
        """Return the reason why this hello ends the old connection."""
        same = self.session_id == hello.session_id
        return "the peer plays other classes now" if same else "the peer has restarted"

    @property
    def takes_messages(self) -> bool:
        """True if there is a connection, or may be one again soon."""
        return self.primary is not None or self.fails_at < math.inf

    @property
    def unused(self) -> bool:
        """True if the session can be dropped without a loss."""
        kept = self.links or self.takes_messages or self.forgotten_at < math.inf
        return self.wanted is None and not kept

    def wish(self) -> WantedPeer | None:
        """Return the peer as a WantedPeer; None if it is not kept connected."""
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
        """Accept messages until `until_s`, while the peer is dialled; False if already accepted."""
        if self.takes_messages:
            return False
        self.expected, self.fails_at = True, until_s
        return True

    def await_nothing(self) -> None:
        """Clear the deadlines of a peer that is connected or given up."""
        self.expected, self.fails_at, self.forgotten_at = False, math.inf, math.inf

    def remove(self, link: Link) -> None:
        """Remove a closed link; its bytes still count."""
        self.links.remove(link)
        self.bytes_in += link.bytes_in
        self.bytes_out += link.bytes_out

    @property
    def moved(self) -> tuple[int, int]:
        """Return the bytes in and out, on all connections."""
        came, went = self.bytes_in, self.bytes_out
        for each in self.links:
            came += each.bytes_in
            went += each.bytes_out
        return came, went

    @property
    def exchanged(self) -> bool:
        """True if messages were sent either way, or wait to be sent."""
        received = self.receiver is not None and any(
            lane.next > 1 or lane.held for lane in self.receiver.lanes.values()
        )
        return received or bool(self.queue.envelopes or self.queue.acknowledged)

    @property
    def is_shown(self) -> bool:
        """True while there is a connection with a hello."""
        return self.primary is not None and self.primary.hello is not None

    def info(self) -> PeerInfo | None:
        """Return the peer for status; None while there is no connection with a hello."""
        link, queue = self.primary, self.queue
        if link is None or link.hello is None:
            return None
        bytes_in, bytes_out = self.moved
        return PeerInfo(
            peer=self.peer,
            direction=link.carrier.direction,
            address=link.carrier.address,
            hello=link.hello,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            queued_envelopes=queue.envelopes,
            queued_bytes=queue.bytes,
            unacknowledged_bytes=queue.unacknowledged_bytes,
            acknowledged=queue.acknowledged,
            resent=queue.resent,
            duplicates=0 if self.receiver is None else self.receiver.duplicates,
            rtt_s=link.heartbeat.rtt_s,
            since_s=self.since_s,
        )


def not_connected(peer: PeerId, session: PeerSession | None) -> NotConnectedError:
    """Return the error for a peer that accepts no messages."""
    if session is not None and session.denied:
        return DeniedPeerError(f"{peer} is not connected: it was not allowed here")
    return NotConnectedError(f"{peer} is not connected; wait for its ConnectionOpened")


def replaces(own: PeerId, old: Link, new: Link) -> bool:
    """Return True if `new` is kept rather than `old`, both being links of one peer.

    Both sides see the same two connections and must keep the same one: the direct one if the
    other is relayed; the one dialled by the smaller PeerId if each side dialled one; the later
    one of two by the same dialler.
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
    """Return True if the hello of `new` is from another process, or names other classes.

    A bbnode process never changes its classes. If a peer does, the newest hello counts, since
    the authorizer decided on that one last.
    """
    if old.hello is None or new.hello is None:
        return False
    was, now = old.hello, new.hello
    return (was.session_id, was.classes) != (now.session_id, now.classes)


_FORGOTTEN = "the peer has restarted or forgotten us: it may have come or not"


class PeerTable(LinkOwner):
    """All peers of a node."""

    def __init__(
        self,
        own: PeerId,
        *,
        limits: TransportLimits,
        inbox: Inbox,
        counters: Counters,
        authorizer: Authorizer | None = None,
    ) -> None:
        self._own = own
        self._limits = limits
        self._inbox = inbox
        self._counters = counters
        self.gate = Gate(authorizer, counters)
        self.looks = Looks()
        # True once the node stops: from then on given up messages are `unsent`, not reported.
        self.stopping = False
        self._kept: list[Unsent] = []
        self._sessions: dict[PeerId, PeerSession] = {}
        # Sessions by link, from `add` until the link is closed.
        self._session_of: dict[Link, PeerSession] = {}
        self.admission = Admission(limits, counters, self.knows)
        self._known: OrderedDict[PeerId, None] = OrderedDict()
        # Peers with messages for which the inbox had no room.
        self._held: dict[PeerId, None] = {}
        inbox.on_room, inbox.is_known = self._room_made, self.gate.is_known
        # Called when `expire` has a new deadline to look at.
        self.on_lost: Callable[[], None] = lambda: None

    # -- for the transport -----------------------------------------------------------------

    def session(self, peer: PeerId) -> PeerSession:
        """Return the session of a peer, created if necessary."""
        session = self._sessions.get(peer)
        if session is None:
            session = PeerSession(peer, OutboundQueue(self._limits))
            session.down.set()
            self._sessions[peer] = session
        return session

    def known(self, peer: PeerId) -> PeerSession | None:
        """Return the session of a peer, or None."""
        return self._sessions.get(peer)

    def sessions(self) -> list[PeerSession]:
        """Return all sessions, in PeerId order."""
        return [self._sessions[peer] for peer in sorted(self._sessions)]

    def links(self) -> list[Link]:
        """Return all links, in PeerId order."""
        return [link for session in self.sessions() for link in session.links]

    def admits(self, peer: PeerId, direction: Direction) -> bool:
        """Return True if one more connection with `peer` is allowed and within the bounds."""
        session = self._sessions.get(peer)
        of_peer = len(session.links) if session else 0
        if of_peer >= self._limits.max_connections_per_peer or self._inbox.crowded:
            self._counters.add("links.refused")
            return False
        denied = bool(self.gate.connection(peer, direction, None))
        if session is not None:
            session.denied = denied
        return not denied

    def add(self, link: Link, place: Place | None = None) -> bool:
        """Add a new connection, before its hello; return False if there is no place for it.

        `place` is that of its socket; without one, the link gets its own.
        """
        now = trio.current_time()
        if place is None and link.carrier.direction is Direction.OUTBOUND:
            place = self.admission.dial(link.peer, now, link.abort)
        elif place is None:
            place = self.admission.accept("", now, link.abort)
        if place is None or place.stage is Stage.GONE:
            self.drop_if_unused(self.session(link.peer))
            return False
        self.admission.secured(place, link.peer)
        place.drop = link.abort
        link.place = place
        session = self._session_of[link] = self.session(link.peer)
        session.links.append(link)
        return True

    def knows(self, peer: PeerId) -> bool:
        """Return True if we want the peer, or it has ever acknowledged a message of ours."""
        session = self._sessions.get(peer)
        if session is not None and (session.wanted is not None or session.queue.acknowledged):
            return True
        return peer in self._known

    def drop_if_unused(self, session: PeerSession) -> None:
        """Remove a session that can be dropped without a loss."""
        if session.unused:
            self._drop_flow(session)
            self._sessions.pop(session.peer, None)

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], tag: int) -> None:
        """Queue an envelope; see `Transport.send`."""
        session = self._sessions.get(peer)
        try:
            if session is None or not session.takes_messages:
                raise not_connected(peer, session)
            size = size_of(data)
            if reason := self.gate.envelope(peer, Direction.OUTBOUND, size):
                raise NotAllowedError(
                    f"nothing may be sent to {peer}: {reason}; see the access lists"
                )
            lane = session.queue.put(peer, data, tag, size)
        except (NotConnectedError, QueueFullError, EnvelopeTooLargeError, NotAllowedError):
            self._counters.add("outbound.refused")
            raise
        if session.primary is not None:
            session.primary.wake(lane)

    def unsent(self) -> list[Unsent]:
        """Return the unacknowledged messages, and those given up at the stop."""
        queued = [_unsent(session, session.queue.pending()) for session in self.sessions()]
        return [*self._kept, *(each for items in queued for each in items)]

    def _fail(
        self,
        session: PeerSession,
        items: Iterable[Outbound],
        reason: str,
        *,
        blames_peer: bool = True,
        in_doubt: bool = False,
    ) -> None:
        """Report messages as failed; a peer that our authorizer denies is not blamed."""
        if self.stopping:
            self._kept += _unsent(session, items)
            return
        blames = blames_peer and not session.denied
        for item in items:
            self._counters.add("outbound.failed")
            self._inbox.notify(
                DeliveryFailed(
                    peer=session.peer,
                    tag=item.tag,
                    reason=reason,
                    blames_peer=blames,
                    in_doubt=in_doubt,
                )
            )

    def expect(self, session: PeerSession) -> None:
        """Accept messages for a peer that is about to be dialled."""
        if session.expect(trio.current_time() + self._limits.resume_s):
            self.on_lost()

    def not_reached(self, session: PeerSession, reason: str) -> None:
        """Fail the queue of a peer that could not be reached, or is no longer dialled."""
        if session.expected:
            session.expected, session.fails_at = False, math.inf
            self._fail(session, session.queue.drain(), f"it can't be reached: {reason}")

    def infos(self) -> list[PeerInfo]:
        """Return the connected peers, in PeerId order."""
        return [info for session in self.sessions() if (info := session.info()) is not None]

    def moved(self) -> dict[PeerId, tuple[int, int]]:
        """Return the bytes in and out of the connected peers, in PeerId order."""
        return {each.peer: each.moved for each in self.sessions() if each.is_shown}

    def wanted(self) -> list[WantedPeer]:
        """Return the peers that are kept connected, in PeerId order."""
        return [wish for session in self.sessions() if (wish := session.wish()) is not None]

    def expire(self, now: float) -> float:
        """Drop expired state; return the time to call again (`math.inf`: never)."""
        following = math.inf
        for session in list(self._sessions.values()):
            if now >= session.fails_at:
                session.expected, session.fails_at = False, math.inf
                self._fail(session, session.queue.drain(), "the peer did not come back")
                if session.receiver is not None:
                    session.receiver.drop_partial()
                self.drop_if_unused(session)
            if now >= session.forgotten_at:
                session.forgotten_at = math.inf
                self._drop_flow(session)
                self.drop_if_unused(session)
            following = min(following, session.fails_at, session.forgotten_at)
        return following

    def reauthorize(self) -> None:
        """Close the connections that are not allowed any more."""
        for link in self.links():
            direction = link.carrier.direction
            reason = self.gate.connection(link.peer, direction, None)
            if not reason and link.hello is not None:
                reason = self.gate.connection(link.peer, direction, link.hello)
            self.session(link.peer).denied = bool(reason)
            if reason:
                link.close(f"{NOT_ALLOWED} any more: {reason}")

    # -- LinkOwner -------------------------------------------------------------------------

    def look_at(self, link: Link, at_s: float) -> None:
        self.looks.ask(link, at_s)

    def admit_hello(self, link: Link, hello: Hello) -> str:
        """Ask the authorizer for admission, and the admission for a place."""
        reason, standing = self.gate.hello(link.peer, link.carrier.direction, hello)
        self.session(link.peer).denied = bool(reason)
        if reason:
            return f"{NOT_ALLOWED}: {reason}"
        if link.place is not None:
            reason = self.admission.hello(link.place, link.peer, standing, trio.current_time())
            if reason:
                self._counters.add("links.refused")
                return f"no room: {reason}"
        if standing is Standing.GUEST:
            link.stay(self._limits.guest_s)
        link.carrier.allow_unread(self._limits.unread_bytes)
        return ""

    def link_up(self, link: Link) -> None:
        """Make the link primary, or close the one of two that is not kept."""
        session = self.session(link.peer)
        old = session.primary
        if old is None or old.state is not LinkState.UP:
            self._promote(session, link)
            return
        if restarted(old, link):
            # The old process is gone, and this link with it.
            session.primary = None
            old.abort("the peer has restarted, or plays other classes now")
            self._promote(session, link)
            return
        self._counters.add("links.duplicate")
        if replaces(self._own, old, link):
            self._promote(session, link)
            old.close("another connection is kept")
        else:
            link.close("another connection is kept")

    def link_closed(self, link: Link, reason: str) -> None:
        """Fall back to another link of the peer, or report the loss of the peer."""
        session = self._session_of.pop(link)
        session.remove(link)
        if link.place is not None:
            self.admission.left(link.place)
        if session.queue.acknowledged:
            self._remember(session.peer)
        if session.feeder is link:
            session.feeder = None
            if session.receiver is not None:
                session.receiver.rewind()
                self._held.pop(session.peer, None)
        if session.primary is link:
            session.primary = None
            spare = next((each for each in session.links if each.state is LinkState.UP), None)
            if spare is not None:
                self._promote(session, spare)
            else:
                self._lose(session, reason, for_good=link.said_goodbye)
        self.drop_if_unused(session)

    def hello_refused(self, link: Link, reason: str) -> None:
        self._counters.add("hello.refused")
        if not self._inbox.crowded:
            self._inbox.notify(
                HelloRefused(peer=link.peer, address=link.carrier.address, reason=reason)
            )

    def violation(self, link: Link, reason: str, kind: Violation) -> None:
        self._counters.add("protocol.violations")
        if kind is Violation.FLOOD and link.place is not None:
            self.admission.flooded(link.place, trio.current_time())
        if not self._inbox.crowded:
            self._inbox.notify(ProtocolViolation(peer=link.peer, reason=reason, kind=kind))

    def receiver(self, link: Link) -> Receiver | None:
        session = self._session_of.get(link)
        if session is None or session.feeder is not link:
            return None
        return session.receiver

    def announce(self, link: Link | None) -> None:
        """Make the link the feeder, and ask the peer to send from the receiver's position."""
        if link is None or (hello := link.hello) is None:
            return
        session = self.session(link.peer)
        receiver = session.receiver
        if receiver is None or receiver.exchange != hello.exchange:
            self._drop_flow(session)
            receiver = session.receiver = Receiver(
                peer=session.peer,
                exchange=hello.exchange,
                record=fresh_number(),
                limits=self._limits,
                inbox=self._inbox,
                counters=self._counters,
                admit=self.gate.admits_from(session.peer),
                address=link.carrier.address,
                on_evicted=lambda: self.announce(session.feeder),
                on_held=lambda: self._held.setdefault(session.peer),
            )
        receiver.address = link.carrier.address
        session.feeder = link
        self._held.pop(session.peer, None)
        link.resume_due = receiver.announce()
        link.wake(Lane.CONTROL)

    def resumed(self, link: Link, resume: Resume) -> None:
        link.resume_in = resume
        session = self.session(link.peer)
        if session.primary is link:
            self._send_on(session, link)

    def sends(self, link: Link) -> bool:
        session = self._session_of.get(link)
        return session is not None and session.primary is link and link.state is LinkState.UP

    def stalled(self, link: Link, reason: str) -> None:
        session = self.session(link.peer)
        self._fail(session, session.queue.drain(), reason)
        link.abort(reason)

    # -- room in the inbox -----------------------------------------------------------------

    def _room_made(self, _peer: PeerId) -> None:
        """Accept held messages of all peers, since some room is shared."""
        for peer in list(self._held) if self._held else ():
            session = self._sessions.get(peer)
            if session is not None and session.receiver is not None and session.feeder is not None:
                if session.receiver.pump():
                    session.feeder.acks_changed()
                if session.receiver.held_bytes:
                    continue
            self._held.pop(peer, None)

    # -- changes of the links --------------------------------------------------------------

    def _promote(self, session: PeerSession, link: Link) -> None:
        hello = link.hello
        if hello is None:
            return
        if not session.down.is_set() and session.speaks_as != (hello.session_id, hello.classes):
            self._lose(session, session.why_new(hello), for_good=False)
        if session.session_id not in ("", hello.session_id):
            # Before the peer is reported as connected: otherwise the engine would blame the new
            # process for messages that the old one did not accept.
            self._fail(session, session.queue.give_up_begun(), _FORGOTTEN, in_doubt=True)
        session.session_id, session.classes = hello.session_id, hello.classes
        session.primary = link
        session.await_nothing()
        if session.down.is_set():
            session.since_s = trio.current_time()
            session.failed_dials = 0
            session.last_error = ""
            session.up.set()
            session.down = trio.Event()
            self._inbox.notify(
                ConnectionOpened(
                    peer=session.peer,
                    address=link.carrier.address,
                    direction=link.carrier.direction,
                    hello=hello,
                )
            )
        self.announce(link)
        if link.resume_in is not None:
            self._send_on(session, link)

    def _send_on(self, session: PeerSession, link: Link) -> None:
        resume = link.resume_in
        if resume is None:
            return
        lost = session.queue.resume(resume)
        self._fail(session, lost, _FORGOTTEN, blames_peer=False, in_doubt=True)
        link.granted = resume.round
        link.wake_all()

    def _lose(self, session: PeerSession, reason: str, *, for_good: bool) -> None:
        """Report that the peer is gone, and keep its queue for a while."""
        session.primary = None
        session.down.set()
        session.up = trio.Event()
        self._inbox.notify(ConnectionClosed(peer=session.peer, reason=reason, goodbye=for_good))
        now = trio.current_time()
        session.forgotten_at = now + self._limits.remember_s
        if for_good:
            self._fail(session, session.queue.drain(), reason, blames_peer=False)
            if session.receiver is not None:
                session.receiver.drop_partial()
        else:
            session.fails_at = now + self._limits.resume_s
        self._forget_oldest()
        self.on_lost()

    def _remember(self, peer: PeerId) -> None:
        self._known[peer] = None
        self._known.move_to_end(peer)
        if len(self._known) > MAX_RECOGNISED:
            self._known.popitem(last=False)

    def _forget_oldest(self) -> None:
        """Forget the oldest lost peer when more are remembered than may be connected."""
        lost = [each for each in self._sessions.values() if each.forgotten_at < math.inf]
        if len(lost) <= self._limits.max_connections:
            return
        oldest = min(lost, key=lambda each: each.forgotten_at)
        oldest.await_nothing()
        self._fail(oldest, oldest.queue.drain(), "too many peers are waited for", blames_peer=False)
        self._drop_flow(oldest)
        self.drop_if_unused(oldest)

    def _drop_flow(self, session: PeerSession) -> None:
        receiver, session.receiver, session.feeder = session.receiver, None, None
        self._held.pop(session.peer, None)
        if receiver is not None:
            receiver.rewind()
            receiver.drop_partial()


def _unsent(session: PeerSession, items: Iterable[Outbound]) -> list[Unsent]:
    return [Unsent(peer=session.peer, tag=item.tag, parts=item.parts) for item in items]
