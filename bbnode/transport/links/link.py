"""One connection with one peer: its four streams, its pings and its closing handshake.

Rule: each side opens one outgoing control and one outgoing bulk stream and only writes on them; it
only reads the two that the other side opened. A LaneWriter writes each stream, in its own task, or,
for the first message after a pause, in the task that sends; a LaneReader processes data in the turn
in which it arrives. Every change of a link's state is a row of LINK_MOVES; an event without a row
in a state leaves the state as it is.

Closing: a side that will send nothing more ends each of its lanes with BYE; the other side answers
with BYE_ACK once it has read up to there, and ends its own lanes likewise. Once everything is
acknowledged both ways, the connection is cut. Closing earlier would lose unread data, and the
acknowledgements in it.

`Carrier.hard_close` ends everything: each read and write on the connection then returns or raises.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_BYE_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import PEER_CLOSED, Buffer, Counters, Direction, Hello
from bbnode.transport.errors import FrameError, HelloError, StreamBrokenError, Violation
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Place, Stage
from bbnode.transport.links.framing import (
    ChunkData,
    FrameDecoder,
    FrameType,
    Lane,
    LinkFrame,
    Resume,
    decode_ack,
    decode_open,
    decode_resume,
    encode_ack,
    encode_header,
    encode_open,
    encode_resume,
)
from bbnode.transport.links.hello import decode_hello
from bbnode.transport.links.life import COARSE_S
from bbnode.transport.links.receiver import Receiver, WindowIgnoredError
from bbnode.transport.links.shares import (
    LANE_FRAME_US,
    LATE,
    MESSAGE_PAYS_US,
    WASTED_BYTES,
)
from bbnode.transport.outbound import OutboundQueue
from bbnode.transport.signals import Signal


class ByteStream(Protocol):
    """One stream of a connection."""

    @property
    def failure(self) -> str:
        """The reason why it has broken; "" while it works."""

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes; b"" at the end. Raises StreamBrokenError after a reset."""

    async def feed(self, take: Callable[[memoryview], None]) -> None:
        """Pass all bytes to `take` as they arrive, until the end; they are valid during the call.

        Raises StreamBrokenError after a reset, and what `take` raises.
        """

    def listen(
        self, take: Callable[[memoryview], None], on_broken: Callable[[], None] = lambda: None
    ) -> None:
        """Pass all bytes to `take` as they arrive, and call `on_broken` if the stream breaks.

        Neither may raise; the end is not reported.
        """

    async def write(self, *data: Buffer) -> None:
        """Write all of `data`; raises StreamBrokenError."""

    def write_now(self, data: Buffer) -> bool:
        """Write `data` if that needs no wait; else return False. Raises StreamBrokenError."""

    async def end(self) -> None:
        """End this direction: the other side reads the end. Never raises."""

    async def reset(self) -> None:
        """Reset the stream and wake its reader; never raises."""


class Carrier(Protocol):
    """One secured connection with an authenticated peer."""

    @property
    def peer(self) -> PeerId:
        """The other side, as proved by the handshake."""

    @property
    def direction(self) -> Direction:
        """The direction of the dial, seen from here."""

    @property
    def address(self) -> Multiaddr:
        """The remote end of the connection, with /p2p/<peer>."""

    @property
    def wants_lanes(self) -> bool:
        """False if it was dialled for other protocols than bbnode's."""
        return True

    async def open(self, lane: Lane) -> ByteStream:
        """Open a stream for `lane`; raises StreamBrokenError."""

    def stream_count(self) -> int:
        """Return the number of streams, of both sides and all protocols."""

    def unread_bytes(self) -> int:
        """Return the bytes that are buffered on all streams and not yet read."""

    def allow_unread(self, most_bytes: int) -> None:
        """Set the bound of the unread bytes on all streams together."""

    async def hard_close(self) -> None:
        """End the connection at once, whatever the peer does; never raises, never hangs."""


class LinkState(enum.Enum):
    """The states of a link."""

    OPENING = "opening"
    UP = "up"
    CLOSING = "closing"
    # We do not admit the peer, and tell it so; its data is ignored from then on.
    TURNED_AWAY = "turned away"
    CLOSED = "closed"


class LinkEvent(enum.Enum):
    """The events that move a link from one state to the next."""

    HELLO = "hello"
    TURN_AWAY = "turn away"
    CLOSE = "close"
    ABORT = "abort"


LINK_MOVES: Final[dict[tuple[LinkState, LinkEvent], LinkState]] = {
    (LinkState.OPENING, LinkEvent.HELLO): LinkState.UP,
    (LinkState.OPENING, LinkEvent.TURN_AWAY): LinkState.TURNED_AWAY,
    (LinkState.TURNED_AWAY, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.TURNED_AWAY, LinkEvent.ABORT): LinkState.CLOSED,
    # Nothing was exchanged yet that could be lost.
    (LinkState.OPENING, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.OPENING, LinkEvent.ABORT): LinkState.CLOSED,
    (LinkState.UP, LinkEvent.CLOSE): LinkState.CLOSING,
    (LinkState.UP, LinkEvent.ABORT): LinkState.CLOSED,
    (LinkState.CLOSING, LinkEvent.ABORT): LinkState.CLOSED,
}


@dataclass(slots=True)
class CloseHandshake:
    """The progress of the closing handshake, on both sides."""

    # Lanes that the peer has ended, and those of them that still need our BYE_ACK.
    bye_in: set[Lane] = field(default_factory=set)
    acks_due: list[Lane] = field(default_factory=list)
    # Lanes that we have ended, and those the peer has read to their end.
    bye_out: set[Lane] = field(default_factory=set)
    acked: set[Lane] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """True once nothing is in flight in either direction."""
        return self.bye_in == self.acked == set(Lane) and not self.acks_due


@dataclass(slots=True)
class Heartbeat:
    """The pings of a link: one under way at most, and one answer owed at most.

    The dialling side pings after a silence. The dialled side waits longer, so that it need not ping
    while its peer does; it measures the round trip now and then, together with a frame that it
    sends anyway.
    """

    # The silence after which a ping is sent, in seconds.
    after_s: float
    # Times on trio's clock: when a ping is due, and when to measure the round trip.
    due_at: float
    measure_at: float
    due: bool = False
    number: int = 0
    sent_at: float | None = None
    pong_due: int | None = None
    rtt_s: float | None = None

    def next_at(self, last_heard: float) -> float:
        """Return the time at which the next ping is due if nothing arrives."""
        return max(self.due_at, last_heard) + self.after_s

    def start(self, now: float) -> int:
        """Record that a ping is sent; return its number."""
        self.due = False
        self.number += 1
        self.sent_at = now
        return self.number

    def answered(self, number: int, now: float) -> bool:
        """Record a pong; return False unless it answers the last ping."""
        if number != self.number or self.sent_at is None:
            return False
        self.rtt_s = now - self.sent_at
        self.measure_at = now + MEASURE_EVERY_S
        self.sent_at = None
        return True


@dataclass(slots=True)
class StallDetector:
    """Detects a lack of progress; counts only time in which progress was due."""

    seen: int = -1
    since: float = 0.0

    def stalled(self, *, due: bool, value: int, now: float, limit_s: float) -> bool:
        """Return True if `value` has not changed for `limit_s` seconds in which it was due to."""
        if not due or value != self.seen:
            self.seen, self.since = value, now
            return False
        return now - self.since >= limit_s


class LinkOwner(ABC):
    """The manager of peers, which a link asks for decisions and reports to. No method blocks."""

    @abstractmethod
    def look_at(self, link: Link, at_s: float) -> None:
        """Call `link.look` at this time, on trio's clock, or soon after; `math.inf` is never."""

    @abstractmethod
    def admit_hello(self, link: Link, hello: Hello) -> str:
        """Return the reason to refuse a peer with this hello; "" to accept it."""

    @abstractmethod
    def link_up(self, link: Link) -> None:
        """Handle the arrival of the peer's hello, now in `link.hello`."""

    @abstractmethod
    def link_closed(self, link: Link, reason: str) -> None:
        """Handle the end of the connection."""

    @abstractmethod
    def hello_refused(self, link: Link, reason: str) -> None:
        """Count and report a peer without an acceptable hello; the link closes."""

    @abstractmethod
    def violation(self, link: Link, reason: str, kind: Violation) -> None:
        """Count and report a flood, or a breach of protocol after the hello; the link closes."""

    @abstractmethod
    def receiver(self, link: Link) -> Receiver | None:
        """Return the receiver that this link feeds; None if another link feeds it."""

    @abstractmethod
    def announce(self, link: Link) -> None:
        """Send RESUME again, because the last one was lost."""

    @abstractmethod
    def resumed(self, link: Link, resume: Resume) -> None:
        """Handle a RESUME, which has the positions to send from; raises FrameError."""

    @abstractmethod
    def sends(self, link: Link) -> bool:
        """Return True if messages to this peer are sent on this link."""

    @abstractmethod
    def stalled(self, link: Link, reason: str) -> None:
        """Fail the messages to a peer that no longer accepts any; the link closes."""


# A wake-up that is later than this means that our own process was suspended: bytes from the peer
# may be waiting unread, so its silence does not count.
_STALL_S: Final = 2.0

# Factor by which the dialled side pings later than the dialling one.
_ANSWERS_LATER: Final = 1.5
# A ping may be sent early by this much, so that one look serves it too: the last pong arrived a
# round trip after its ping.
_BEAT_SLACK_S: Final = 0.5
# Interval of round trip measurements on the side that only answers pings.
MEASURE_EVERY_S: Final = 30.0


class Link:
    """A running connection; `run` owns its tasks.

    Its public members are for its readers, writers and owner.
    """

    def __init__(
        self,
        carrier: Carrier,
        owner: LinkOwner,
        *,
        queue: OutboundQueue,
        hello: bytes,
        number: int,
        limits: TransportLimits,
        counters: Counters,
    ) -> None:
        self.carrier = carrier
        self.peer = carrier.peer
        self.owner = owner
        self.queue = queue
        self.limits = limits
        self.counters = counters
        # The dialling side's counter of its connections, which its hello tells the other side.
        self.number = number
        # Its place among the connections of this node, once it has been admitted.
        self.place: Place | None = None
        self.hello_body = hello
        self.hello: Hello | None = None
        self.peer_hello_body = b""
        self.state = LinkState.OPENING
        self.bytes_in = self.bytes_out = 0
        self.opened_at = self.last_heard = trio.current_time()
        # Everything received up to this time is acknowledged.
        self.acked_at = -math.inf
        # True once either side has closed on purpose.
        self.said_goodbye = False
        # Set once the hello has arrived or the link is closed.
        self.settled = trio.Event()
        # Set once we want lanes: the peer has opened one, or we dialled for bbnode's protocols.
        self.spoken = trio.Event()
        # Set once the peer is admitted, by its hello or as a foreign host, or the link is closed.
        self.welcome = trio.Event()
        # Set once the connection is gone and the owner knows.
        self.closed = trio.Event()
        # The RESUME still to be sent to the peer, and the one it sent us.
        self.resume_due: Resume | None = None
        self.resume_in: Resume | None = None
        # The round of the peer's RESUME to which our messages belong.
        self.granted: int | None = None
        begins = carrier.direction is Direction.OUTBOUND
        if begins:
            # A service that has dialled does not wait for the peer to speak.
            (self.spoken if carrier.wants_lanes else self.welcome).set()
        self.heartbeat = Heartbeat(
            after_s=limits.ping_interval_s * (1 if begins else _ANSWERS_LATER),
            due_at=self.opened_at,
            measure_at=self.opened_at,
        )
        self.closing = CloseHandshake()
        self.failures = dict.fromkeys(Lane, 0)
        self.wakes = {lane: Signal() for lane in Lane}
        # The reader of the newest incoming stream of each lane.
        self.readers: dict[Lane, LaneReader] = {}
        # The writer of small messages; `hurried` is set after a message that was sent at once,
        # until the task has run or data has arrived. So a burst is sent in two writes.
        self.writer: LaneWriter | None = None
        self.hurried = False
        self.tasks = 0
        self._nursery: trio.Nursery | None = None
        self._aborted = trio.Event()
        # The reason for the end of the link; empty before.
        self.reason = ""
        # A deadline for the hello; afterwards, for a guest, one to leave.
        from_afar = carrier.direction is Direction.OUTBOUND or is_relayed(carrier.address)
        self._hello_s = limits.dialled_hello_s if from_afar else limits.hello_timeout_s
        # The part of its share's waits that precedes the deadline of the hello.
        self._waited_before_s = 0.0
        self._stays_until = math.inf
        self._close_by = math.inf
        self._ack_at = self._pump_at = self._regular_at = math.inf
        self._outgoing = StallDetector()
        self._incoming = StallDetector()

    def is_aborted(self) -> bool:
        """Return True if the connection is being cut."""
        return self.state is LinkState.CLOSED

    @property
    def dialled_number(self) -> int:
        """The number that the dialling side gave this connection."""
        if self.carrier.direction is Direction.OUTBOUND or self.hello is None:
            return self.number
        return self.hello.link

    def wake(self, lane: Lane) -> None:
        """Wake the writer of a lane, which may have something to write."""
        if lane is Lane.CONTROL and self.writer is not None and self.writer.hurry():
            return
        self.wakes[lane].set()

    def wake_all(self) -> None:
        """Wake both writers."""
        for wake in self.wakes.values():
            wake.set()

    def close(self, reason: str) -> None:
        """Start no new messages, and close cleanly within `goodbye_s` seconds."""
        if self.move(LinkEvent.CLOSE, reason) is LinkState.CLOSING:
            self.said_goodbye = True
            self._close_within(self.limits.goodbye_s)
            self.wake_all()

    def turn_away(self, reason: str) -> None:
        """Report a hello that is not admitted, send the reason to the peer, and close."""
        if self.move(LinkEvent.TURN_AWAY, reason) is LinkState.TURNED_AWAY:
            self.owner.hello_refused(self, reason)
            self._close_within(self.limits.goodbye_s)
            self.wake_all()

    def _close_within(self, seconds: float) -> None:
        self._close_by = trio.current_time() + seconds
        self.owner.look_at(self, self._close_by)

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task that ends with the connection; raises StreamBrokenError if it is gone."""
        if self._nursery is None or self.is_aborted():
            raise StreamBrokenError("the connection is gone")
        self._nursery.start_soon(task)

    def abort(self, reason: str) -> None:
        """Close at once; unacknowledged messages stay in their queue."""
        self.move(LinkEvent.ABORT, reason)

    async def run(self) -> None:
        """Own the link's tasks until the connection is gone."""
        self.counters.add("links.opened")
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for lane in Lane:
                    nursery.start_soon(self._write_lane, lane)
                self._look_again(self.opened_at)
                await self._aborted.wait()
                await self.carrier.hard_close()
                # All I/O has returned by now, or belongs to a connection that is gone.
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self.abort("the node stops")
            with trio.CancelScope(shield=True):
                await self.carrier.hard_close()
            self.counters.add("links.closed")
            self.owner.link_closed(self, self.reason)
            self.closed.set()

    async def serve_inbound(self, lane: Lane, stream: ByteStream) -> None:
        """Read one stream that the peer opened, to its end."""
        reader = self.readers[lane] = LaneReader(self, lane)
        self.speak()
        with self._task():
            await reader.run(stream)

    def move(self, event: LinkEvent, reason: str) -> LinkState:
        """Change to the state in LINK_MOVES, if there is a row; return the state."""
        if (self.state, event) not in LINK_MOVES:
            return self.state
        state = self.state = LINK_MOVES[self.state, event]
        self.reason = self.reason or reason
        if state is LinkState.CLOSED:
            self._aborted.set()
            self.settled.set()
            self.welcome.set()
            self.wake_all()
        return state

    def refuse(self, reason: str, kind: Violation = Violation.FRAME) -> None:
        """Report a breach of protocol by the peer, and close."""
        if self.is_aborted():
            return
        if self.hello is None and kind is not Violation.FLOOD:
            self.owner.hello_refused(self, reason)
        else:
            self.owner.violation(self, reason, kind)
        self.abort(reason)

    def acks_changed(self) -> None:
        """Schedule the acknowledgement of received messages: now, or with the next write."""
        receiver = self.owner.receiver(self)
        if receiver is None:
            return
        if receiver.control.due or receiver.bulk.due:
            self.wake(Lane.CONTROL)
        elif receiver.control.since and self._ack_at == math.inf:
            self._ack_at = trio.current_time() + self.limits.ack_delay_s
            self.owner.look_at(self, self._ack_at)
        if receiver.held_bytes and self._pump_at == math.inf:
            self._pump_at = receiver.pump_at
            self.owner.look_at(self, self._pump_at)

    def stay(self, seconds: float) -> None:
        """Close the link of a guest after this time."""
        self._stays_until = trio.current_time() + seconds
        self.owner.look_at(self, self._stays_until)

    def flooded(self, reason: str, kind: Violation = Violation.FLOOD) -> None:
        """Close the link of a peer that exceeds a bound of the muxer or of our memory."""
        if not self.is_aborted():
            self.counters.add("inbound.flooded")
            self.refuse(reason, kind)

    def charge(self, price_us: int) -> None:
        """Charge work that the peer caused to the connection; a negative price is a credit."""
        if self.place is not None:
            self.place.share.due_us += price_us

    def idle(self) -> None:
        """Count a frame without new information; too many end the link."""
        if self.place is not None and (reason := self.place.share.idle(LATE)):
            self.flooded(reason)

    @contextmanager
    def _task(self) -> Iterator[None]:
        self.tasks += 1
        try:
            yield
        finally:
            self.tasks -= 1

    async def _write_lane(self, lane: Lane) -> None:
        with self._task():
            # A foreign host would refuse our lanes: wait until the peer speaks our protocols.
            await self.spoken.wait()
            while not self.is_aborted():
                try:
                    stream = await self.carrier.open(lane)
                except StreamBrokenError as error:
                    reason = f"cannot open a {lane.label} stream: {error}"
                    if self.hello is None:
                        # Most likely the peer does not speak our protocol.
                        self.refuse(reason)
                    self.abort(reason)
                    return
                # The last write may be lost without a further write that would reveal it: watch.
                stream.listen(self._refuse_data, self.wakes[lane].set)
                try:
                    await LaneWriter(self, lane, stream).run()
                except StreamBrokenError as error:
                    if self.is_aborted():
                        return
                    self.counters.add("streams.write_failed")
                    self.failures[lane] += 1
                    if self.failures[lane] >= self.limits.write_failures:
                        self.abort(f"writing on the {lane.label} stream failed again: {error}")
                        return
                    if lane is Lane.CONTROL:
                        self.writer = None
                    # Without a reset the peer would wait for the rest.
                    await stream.reset()
                    # Resend on the next stream what this one may have lost.
                    if self.owner.sends(self):
                        self.queue.rewind(lane)
                    if lane is Lane.CONTROL and self.owner.receiver(self) is not None:
                        self.owner.announce(self)

    def _refuse_data(self, _data: memoryview) -> None:
        """Refuse data on a stream that we opened, where nothing reads it."""
        self.refuse("the peer wrote on a stream that is ours to write on")

    def look(self, due_s: float) -> None:
        """Ping, and close a link that is silent, stalled, late with its hello or slow to close."""
        if self.is_aborted():
            return
        limits, now = self.limits, trio.current_time()
        receiver = self.owner.receiver(self)
        if now > due_s + _STALL_S:
            # The delay was ours, so it does not count against the peer.
            self.last_heard = now
            for timed in (*self.readers.values(), receiver):
                if timed is not None:
                    timed.discount(now - due_s)
        if now >= self._ack_at:
            self._ack_at = math.inf
            if receiver is not None and receiver.control.since:
                # Meanwhile an acknowledgement may have travelled with a message.
                at = self.acked_at + limits.ack_delay_s
                if now < at:
                    self._ack_at = at
                    self.owner.look_at(self, at)
                else:
                    receiver.control.due = True
                    self.wake(Lane.CONTROL)
        if now >= self._pump_at:
            # There may be room now, or the peer's rate may allow more messages.
            self._pump_at = math.inf
            if receiver is not None:
                receiver.pump()
                self.acks_changed()
        if self.is_foreign:
            pass  # TCP detects if it is gone
        elif self.state is LinkState.OPENING and now >= self._hello_by(now):
            self.refuse(f"no hello within {self._hello_s:g} s")
        elif now >= self._stays_until:
            self._stays_until = math.inf
            self.close("a guest's time is over")
        elif now >= self._close_by:
            self.abort("closing took too long")
        elif now >= self.last_heard + limits.silence_s:
            self.counters.add("links.silent")
            self.abort(f"the peer was silent for {limits.silence_s:g} s")
        else:
            self._check_progress(now)
        if now >= self._regular_at and not self.is_aborted():
            self._beat(now)
            self._look_again(now)

    @property
    def is_foreign(self) -> bool:
        """Return True while the peer is a host that has used none of bbnode's protocols."""
        return (
            self.state is LinkState.OPENING
            and not self.spoken.is_set()
            and self.place is not None
            and self.place.stage is Stage.FOREIGN
        )

    def speak(self) -> None:
        """Expect a hello from a foreign host that has just used a protocol of bbnode."""
        was_foreign, self.last_heard = self.is_foreign, trio.current_time()
        self.spoken.set()
        if was_foreign:
            self.opened_at = self.last_heard
            if self.place is not None:
                self._waited_before_s = self.place.share.waited_s(self.last_heard)
            self._look_again(self.last_heard)

    def _look_again(self, now: float) -> None:
        """Request the next regular look; other timers request their own."""
        if self.is_foreign:
            self._regular_at = math.inf
            return
        at = min(now + self.limits.ping_interval_s, self.last_heard + self.limits.silence_s)
        at = min(at, self.heartbeat.next_at(self.last_heard))
        if self.state is LinkState.OPENING:
            at = min(at, self._hello_by(now))
        self._regular_at = max(at, now + COARSE_S)
        self.owner.look_at(self, self._regular_at)

    def _hello_by(self, now: float) -> float:
        """Return the deadline of the hello, extended by the time in which we did not read."""
        ours_s = 0.0 if self.place is None else self.place.share.waited_s(now)
        return self.opened_at + self._hello_s + ours_s - self._waited_before_s

    def _beat(self, now: float) -> None:
        """Ping if that is due."""
        heartbeat = self.heartbeat
        if now + _BEAT_SLACK_S >= heartbeat.next_at(self.last_heard):
            heartbeat.due, heartbeat.due_at = True, now
            self.wake(Lane.CONTROL)
        elif now >= heartbeat.measure_at:
            # The ping is sent with the next frame, mostly the answer to a ping of the peer.
            heartbeat.due, heartbeat.measure_at = True, now + MEASURE_EVERY_S

    def _check_progress(self, now: float) -> None:
        """Close a link that answers pings but moves data too slowly or not at all."""
        limit_s, queue, receiver = self.limits.stall_s, self.queue, self.owner.receiver(self)
        if self._outgoing.stalled(
            due=self.owner.sends(self) and queue.unacknowledged_bytes > 0,
            value=queue.acknowledged + queue.acknowledged_bytes,
            now=now,
            limit_s=limit_s,
        ):
            self.counters.add("links.stalled")
            self.owner.stalled(self, f"the peer took nothing of what we sent for {limit_s:g} s")
        elif receiver is not None and self._incoming.stalled(
            due=receiver.receiving, value=receiver.progress, now=now, limit_s=limit_s
        ):
            self.counters.add("links.stalled")
            receiver.drop_partial()
            self.abort(f"a message stopped arriving half-way, for {limit_s:g} s")
        elif receiver is not None and receiver.too_slow:
            receiver.drop_partial()
            least = self.limits.slow_bytes_per_s
            self._too_slow(f"a large message arrived at less than {least:g} bytes a second")
        elif any(
            now >= reader.frame_since + self.limits.frame_s for reader in self.readers.values()
        ):
            self._too_slow(f"a frame took longer than {self.limits.frame_s:g} s")

    def _too_slow(self, reason: str) -> None:
        self.counters.add("links.slow")
        self.refuse(reason, Violation.SLOW)


class LaneReader:
    """The reader of one incoming stream of a link."""

    __slots__ = ("_decoder", "_lane", "_link", "_messages", "_round", "frame_since")

    def __init__(self, link: Link, lane: Lane) -> None:
        self._link = link
        self._lane = lane
        self._decoder = FrameDecoder(lane)
        # The round of the last START.
        self._round = 0
        # New messages in this turn, which are limited by their own rate.
        self._messages = 0
        # Arrival time of the first byte of an incomplete frame; inf without one.
        self.frame_since = math.inf

    def discount(self, seconds: float) -> None:
        """Exclude time in which our own process was suspended."""
        self.frame_since += seconds

    async def run(self, stream: ByteStream) -> None:
        """Read to the end of the stream, or until another one replaces it."""
        link, lane = self._link, self._lane
        if lane is Lane.BULK:
            # The peer's hello was sent before, on another stream of the connection; its deadline
            # bounds the wait.
            await link.settled.wait()
        try:
            await stream.feed(self._take)
        except WindowIgnoredError as error:
            link.counters.add("inbound.flooded")
            link.refuse(str(error), Violation.FLOOD)
            return
        except FrameError as error:
            link.refuse(str(error))
            return
        except StreamBrokenError:
            # The peer resets a stream after a failed write, and opens another.
            if self._decoder.mid_frame:
                link.counters.add("streams.truncated")
            return
        if self._decoder.mid_frame:
            link.counters.add("streams.truncated")
        if lane not in link.closing.bye_in and link.readers[lane] is self:
            link.abort(f"the peer ended its {lane.label} stream without a goodbye")

    def _take(self, data: memoryview) -> None:
        """Process received bytes in one turn; raises FrameError."""
        link, lane = self._link, self._lane
        link.hurried = False
        link.last_heard = trio.current_time()
        link.bytes_in += len(data)
        link.counters.add("inbound.bytes", len(data))
        if link.readers[lane] is not self:
            raise StreamBrokenError("another stream has taken its place")
        whole = self._decoder.frames
        for frame in self._decoder.feed(data):
            self._on_frame(frame)
            if link.is_aborted():
                return
        if not self._decoder.keeps_bytes:
            self.frame_since = math.inf
        elif self.frame_since == math.inf or self._decoder.frames != whole:
            self.frame_since = link.last_heard
        messages, self._messages = self._messages, 0
        others = self._decoder.frames - whole - messages
        link.charge(others * LANE_FRAME_US - messages * MESSAGE_PAYS_US)
        link.acks_changed()

    def _on_frame(self, frame: LinkFrame | ChunkData) -> None:
        link = self._link
        if link.state is LinkState.TURNED_AWAY:
            link.idle()
            if isinstance(frame, LinkFrame) and frame.type is FrameType.BYE_ACK:
                link.abort("the peer knows")
        elif isinstance(frame, LinkFrame) and frame.type is FrameType.HELLO:
            self._on_hello(frame.body)
        elif link.hello is None:
            name = frame.type.name if isinstance(frame, LinkFrame) else "CHUNK"
            link.refuse(f"the first frame is {name}, not HELLO")
        elif isinstance(frame, ChunkData):
            if (receiver := self._receiver(len(frame.data))) is not None:
                receiver.chunk(frame.number, frame.data)
        elif frame.type is FrameType.ENVELOPE:
            self._no_goodbye(frame)
            if (receiver := self._receiver(len(frame.body))) is not None:
                self._messages += receiver.small(frame.number, frame.body)
        elif frame.type is FrameType.ACK:
            self._on_ack(frame)
        else:
            self._on_rare(frame)

    def _no_goodbye(self, frame: LinkFrame) -> None:
        if self._lane in self._link.closing.bye_in:
            raise FrameError(f"{frame.type.name} after the goodbye of its lane")

    def _on_rare(self, frame: LinkFrame) -> None:
        link = self._link
        match frame.type:
            case FrameType.PING:
                link.idle()
                link.heartbeat.pong_due = frame.number
                link.wake(Lane.CONTROL)
            case FrameType.PONG:
                if not link.heartbeat.answered(frame.number, trio.current_time()):
                    link.idle()
            case FrameType.OPEN:
                self._no_goodbye(frame)
                opening = decode_open(frame)
                if (receiver := self._receiver()) is not None:
                    receiver.open(frame.number, opening)
            case FrameType.START:
                self._no_goodbye(frame)
                if frame.number == self._round:
                    link.idle()
                self._round = frame.number
            case FrameType.RESUME:
                link.idle()
                link.owner.resumed(link, decode_resume(frame))
            case FrameType.BYE:
                self._no_goodbye(frame)
                self._on_bye(frame.body)
            case FrameType.BYE_ACK:
                if frame.number not in (Lane.CONTROL, Lane.BULK):
                    raise FrameError(f"a BYE_ACK for lane {frame.number}, which does not exist")
                link.idle()
                link.closing.acked.add(Lane(frame.number))
                if link.closing.complete:
                    link.abort("goodbye")

    def _receiver(self, size: int = 0) -> Receiver | None:
        """Return the receiver for this reader's data; None if the peer will resend it elsewhere.

        `size` bytes are then counted as received in vain.
        """
        receiver = self._link.owner.receiver(self._link)
        if receiver is not None and self._round == receiver.round:
            return receiver
        if receiver is not None and self._round > receiver.round:
            raise FrameError(f"messages of round {self._round}; the last was {receiver.round}")
        self._link.counters.add("inbound.superseded")
        self._link.charge(LANE_FRAME_US + size // WASTED_BYTES)
        return None

    def _on_hello(self, body: bytes) -> None:
        link = self._link
        if link.hello is not None:
            # Each new control stream of a connection begins with the same hello.
            if body != link.peer_hello_body:
                raise FrameError("a second hello that differs from the first")
            link.idle()
            return
        try:
            hello = decode_hello(body)
        except HelloError as error:
            link.refuse(str(error))
            return
        reason = link.owner.admit_hello(link, hello)
        if reason:
            link.turn_away(reason)
            return
        link.hello, link.peer_hello_body = hello, body
        if link.move(LinkEvent.HELLO, "") is LinkState.UP:
            link.settled.set()
            link.welcome.set()
            link.owner.link_up(link)
            link.wake_all()

    def _on_ack(self, frame: LinkFrame) -> None:
        link = self._link
        lane, position = decode_ack(frame)
        if link.granted is None:
            raise FrameError("an ACK before anything was sent")
        if not link.queue.acknowledge(lane, position):
            link.idle()
        link.failures[lane] = 0
        if link.queue.waits(lane):
            # The acknowledgement has opened the window.
            link.wake(lane)

    def _on_bye(self, body: bytes) -> None:
        reason = body.decode("ascii", "replace")
        if not body.isascii() or not reason.isprintable():
            raise FrameError("the reason of a goodbye is not printable ASCII")
        link = self._link
        link.closing.bye_in.add(self._lane)
        link.closing.acks_due.append(self._lane)
        link.wake(Lane.CONTROL)
        link.close(f"{PEER_CLOSED}{reason}")


# Bytes of small messages in one write: about a packet.
_BATCH_BYTES: Final = 64 * 1024
# Parts of large messages that are handed to the muxer at once, which sends them in turns.
_PIECES: Final = 4


class LaneWriter:
    """The writer of one stream of a link."""

    __slots__ = ("_idle", "_lane", "_link", "_rest", "_started", "_stream")

    def __init__(self, link: Link, lane: Lane, stream: ByteStream) -> None:
        self._link = link
        self._lane = lane
        self._stream = stream
        # The round that was announced on this stream with START.
        self._started: int | None = None
        # True while the task is idle; bytes that could not be written at once.
        self._idle = False
        self._rest = bytearray()

    async def run(self) -> None:
        """Write until the link is closed; raises StreamBrokenError."""
        link, lane = self._link, self._lane
        if lane is Lane.CONTROL:
            hello = link.hello_body
            await self._write(encode_header(FrameType.HELLO, len(hello)) + hello)
            link.writer = self
        step = self._control if lane is Lane.CONTROL else self._bulk
        while not link.is_aborted():
            if not await step() and not await self._bye():
                self._idle = True
                await link.wakes[lane].wait()
                self._idle = False
                link.hurried = False
                if self._stream.failure:
                    raise StreamBrokenError(self._stream.failure)

    def hurry(self) -> bool:
        """Write due frames at once; return False if the task has to do it."""
        link = self._link
        if not self._idle or link.hurried or link.state is not LinkState.UP:
            return False
        if link.closing.acks_due or self._rest:
            return False
        brings_messages = link.queue.waits(Lane.CONTROL)
        out = self._due()
        if not out:
            return True
        link.hurried = brings_messages
        try:
            if self._stream.write_now(out):
                self._count(len(out))
                return True
        except StreamBrokenError:
            # The task gets the error again when it writes.
            pass
        self._rest = out
        return False

    def _due(self, *, all_acks: bool = False) -> bytearray:
        """Return due answers and small messages, and count them as sent."""
        link, heartbeat = self._link, self._link.heartbeat
        out = bytearray()
        if heartbeat.pong_due is not None:
            number, heartbeat.pong_due = heartbeat.pong_due, None
            out += encode_header(FrameType.PONG, 0, number)
        if heartbeat.due:
            out += encode_header(FrameType.PING, 0, heartbeat.start(trio.current_time()))
        if link.resume_due is not None:
            out += encode_resume(link.resume_due)
            link.resume_due = None
        sent = self._small(out)
        if sent:
            link.counters.add("outbound.envelopes", sent)
        # Last, so that one acknowledgement covers everything received meanwhile. It travels with a
        # message, unless another one did just before: then it waits for the next, or for its time.
        rides = bool(out) and link.last_heard >= link.acked_at + link.limits.ack_delay_s / 2
        self._acks(out, force=rides or all_acks)
        return out

    async def _control(self) -> bool:
        """Write answers and small messages; return False if there is nothing to write."""
        link, closing = self._link, self._link.closing
        out, self._rest = self._rest, bytearray()
        acked = list(closing.acks_due)
        # A BYE_ACK comes last, since the other side may close after it.
        out += self._due(all_acks=bool(acked))
        for lane in acked:
            out += encode_header(FrameType.BYE_ACK, 0, lane)
        if not out:
            return False
        await self._write(out)
        if acked:
            del closing.acks_due[: len(acked)]
            if closing.complete:
                link.abort("goodbye")
        return True

    def _acks(self, out: bytearray, *, force: bool) -> None:
        """Append the due acknowledgements; with `force`, all pending ones."""
        receiver = self._link.owner.receiver(self._link)
        if receiver is None:
            return
        if not (force or receiver.control.due or receiver.bulk.due):
            return
        for lane, acks in receiver.lanes.items():
            if acks.due or acks.since:
                out += encode_ack(lane, receiver.position(lane))
                acks.due, acks.since = False, 0
                self._link.acked_at = self._link.last_heard

    def _small(self, out: bytearray) -> int:
        """Append as many small messages as fit in one write; return their number."""
        link, sent = self._link, 0
        if link.granted is None or not link.owner.sends(link):
            return sent
        while len(out) < _BATCH_BYTES:
            item = link.queue.next_control()
            if item is None or item.number is None:
                break
            self._start(out)
            out += encode_header(FrameType.ENVELOPE, item.size, item.number)
            for part in item.parts:
                out += part
            sent += 1
        return sent

    async def _bulk(self) -> bool:
        """Write some parts of large messages; return False if there is none, or no window."""
        link, parts, ended = self._link, list[bytes | memoryview](), 0
        if link.granted is None or not link.owner.sends(link):
            return False
        for _ in range(_PIECES):
            piece = link.queue.next_piece()
            if piece is None:
                break
            out, item = bytearray(), piece.item
            self._start(out)
            if piece.opens:
                out += encode_open(piece.number, item.size, piece.offset, item.anchor)
            out += encode_header(FrameType.CHUNK, piece.length, piece.number)
            parts += (bytes(out), *item.bytes_from(piece.offset, piece.length))
            ended += piece.offset + piece.length == item.size
        if not parts:
            return False
        await self._write(*parts)
        if ended:
            link.counters.add("outbound.envelopes", ended)
        return True

    def _start(self, out: bytearray) -> None:
        """Announce the round that the peer has requested, once on each stream."""
        granted = self._link.granted
        if self._started != granted and granted is not None:
            out += encode_header(FrameType.START, 0, granted)
            self._started = granted

    async def _bye(self) -> bool:
        """End the lane if the link is closing; return False if there is nothing to end."""
        link, lane = self._link, self._lane
        tells = link.state is LinkState.TURNED_AWAY and lane is Lane.CONTROL
        if not (tells or link.state is LinkState.CLOSING) or lane in link.closing.bye_out:
            return False
        reason = link.reason.encode("ascii", "replace")[:MAX_BYE_BYTES]
        await self._write(encode_header(FrameType.BYE, len(reason)) + reason)
        link.closing.bye_out.add(lane)
        return True

    async def _write(self, *data: Buffer) -> None:
        await self._stream.write(*data)
        self._count(sum(map(len, data)))

    def _count(self, size: int) -> None:
        self._link.bytes_out += size
        self._link.counters.add("outbound.bytes", size)
