"""One connection with one peer: its four streams, its life signs and its end.

Rule: each side opens one outgoing control and one outgoing bulk stream and only writes on
them; it only reads the two that the other side opened. One task writes (`link_writer`) and one
reads (`link_reader`) each stream. Its states and moves are the table in `link_state`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from bbnode.ir.address import is_relayed
from bbnode.transport.base import Direction, Hello, Violation
from bbnode.transport.carrier import ByteStream, Carrier
from bbnode.transport.counters import Counters
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.limits import TransportLimits
from bbnode.transport.link_reader import LaneReader
from bbnode.transport.link_state import (
    LINK_MOVES,
    Farewell,
    LinkEvent,
    LinkOwner,
    LinkState,
    Progress,
    Pulse,
)
from bbnode.transport.link_writer import LaneWriter
from bbnode.transport.links.admission import Place
from bbnode.transport.links.framing import Lane, Resume
from bbnode.transport.outbound import OutboundQueue
from bbnode.transport.wakeup import Signal

# A wake-up later than this means that this process itself stood still: bytes of the peer
# may be waiting, so its silence so far does not count.
_STALL_S: Final = 2.0


class Link:
    """A running connection; `run` owns its tasks. What is public is for its readers, its
    writers and its owner.
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
        # Counts the connections that its dialler made; the other side learns it by hello.
        self.number = number
        # Its place among the connections of this node, once it has one.
        self.place: Place | None = None
        self.hello_body = hello
        self.hello: Hello | None = None
        self.peer_hello_body = b""
        self.state = LinkState.OPENING
        self.bytes_in = self.bytes_out = 0
        self.opened_at = self.last_heard = trio.current_time()
        # Whether leave was taken, by either side.
        self.took_leave = False
        # Set once the hello has come or the link is closed.
        self.settled = trio.Event()
        # Set once the connection is gone and the owner knows.
        self.closed = trio.Event()
        # What we tell the peer to begin with, until it is told; what it told us.
        self.resume_due: Resume | None = None
        self.resume_in: Resume | None = None
        # The round of the RESUME that our messages answer.
        self.granted: int | None = None
        self.pulse = Pulse()
        self.farewell = Farewell()
        self.failures = dict.fromkeys(Lane, 0)
        self.wakes = {lane: Signal() for lane in Lane}
        # The stream of each lane that the peer opened last.
        self.readers: dict[Lane, LaneReader] = {}
        self.tasks = 0
        self._nursery: trio.Nursery | None = None
        self._doomed = trio.Event()
        self._reason = ""
        # Until the hello has come; then until when a guest may stay.
        from_afar = carrier.direction is Direction.OUTBOUND or is_relayed(carrier.address)
        self._hello_s = limits.dialled_hello_s if from_afar else limits.hello_timeout_s
        self._stays_until = math.inf
        self._retire_by = math.inf
        self._ack_at = self._pump_at = math.inf
        self._life = Signal()
        self._outgoing = Progress()
        self._incoming = Progress()

    @property
    def reason(self) -> str:
        """Why the link ends or ended; empty before."""
        return self._reason

    def is_doomed(self) -> bool:
        """Whether the connection is being cut."""
        return self._doomed.is_set()

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the last ping in seconds, with the time it waited to be written."""
        return self.pulse.rtt_s

    @property
    def dialled_number(self) -> int:
        """The number its dialler gave this connection."""
        if self.carrier.direction is Direction.OUTBOUND or self.hello is None:
            return self.number
        return self.hello.link

    def wake(self, lane: Lane) -> None:
        """Tell the writer of a lane that there may be something to write."""
        self.wakes[lane].set()

    def wake_all(self) -> None:
        """Tell both writers."""
        for wake in self.wakes.values():
            wake.set()

    def retire(self, reason: str) -> None:
        """Begin no more messages, take leave, and close; at most `farewell_s` seconds."""
        if self.move(LinkEvent.RETIRE, reason) is LinkState.RETIRING:
            self.took_leave = True
            self._retire_by = trio.current_time() + self.limits.farewell_s
            self.wake_all()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task that ends with the connection; raises StreamBrokenError when it is gone."""
        if self._nursery is None or self.is_doomed():
            raise StreamBrokenError("the connection is gone")
        self._nursery.start_soon(task)

    def doom(self, reason: str) -> None:
        """Close at once; what is not acknowledged stays in its queue."""
        self.move(LinkEvent.DOOM, reason)

    async def run(self) -> None:
        """Own the link's tasks until the connection is gone."""
        self.counters.add("links.opened")
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for lane in Lane:
                    nursery.start_soon(self._write_lane, lane, nursery)
                nursery.start_soon(self._watch_life)
                await self._doomed.wait()
                await self.carrier.hard_close()
                # All I/O has come back by now, or belongs to a connection that is gone.
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self.doom("the node stops")
            with trio.CancelScope(shield=True):
                await self.carrier.hard_close()
            self.counters.add("links.closed")
            self.owner.link_closed(self, self._reason)
            self.closed.set()

    async def serve_inbound(self, lane: Lane, stream: ByteStream) -> None:
        """Read one stream that the peer opened, to its end."""
        reader = self.readers[lane] = LaneReader(self, lane)
        with self._task():
            await reader.run(stream)

    # -- for readers and writers -------------------------------------------------------------

    def move(self, event: LinkEvent, reason: str) -> LinkState:
        """Go to the state that LINK_MOVES names, if it names one."""
        if (self.state, event) not in LINK_MOVES:
            return self.state
        state = self.state = LINK_MOVES[self.state, event]
        self._reason = self._reason or reason
        if state is LinkState.CLOSED:
            self._doomed.set()
            self.settled.set()
            self.wake_all()
        self._life.set()
        return state

    def refuse(self, reason: str, kind: Violation = Violation.FRAME) -> None:
        """The peer sent what it must not: say so, and close."""
        if self.is_doomed():
            return
        if self.hello is None:
            self.owner.hello_refused(self, reason)
        else:
            self.owner.violation(self, reason, kind)
        self.doom(reason)

    def acks_changed(self) -> None:
        """Something was taken: have it acknowledged, at once or with what goes out next."""
        flow = self.owner.inflow(self)
        if flow is None:
            return
        if any(acks.due for acks in flow.acks.values()):
            self.wake(Lane.CONTROL)
        elif flow.acks[Lane.CONTROL].since and self._ack_at == math.inf:
            self._ack_at = trio.current_time() + self.limits.ack_delay_s
            self._life.set()
        if flow.held_bytes and self._pump_at == math.inf:
            self._pump_at = flow.pump_at
            self._life.set()

    def stay(self, seconds: float) -> None:
        """Leave after so long: for a guest."""
        self._stays_until = trio.current_time() + seconds
        self._life.set()

    def check_flood(self) -> int:
        """Close when the peer's unread bytes are more than its streams' windows allow.

        How many they are.
        """
        unread = self.carrier.unread_bytes()
        if unread > self.limits.unread_bytes:
            self.flooded(f"the peer ignores our receive window: {unread} bytes lie unread")
        return unread

    def flooded(self, reason: str) -> None:
        """The peer sends what the muxer did not allow, or more than there is room for."""
        if not self.is_doomed():
            self.counters.add("inbound.flooded")
            self.refuse(reason)

    # -- tasks -------------------------------------------------------------------------------

    @contextmanager
    def _task(self) -> Iterator[None]:
        self.tasks += 1
        try:
            yield
        finally:
            self.tasks -= 1

    async def _write_lane(self, lane: Lane, nursery: trio.Nursery) -> None:
        with self._task():
            while not self.is_doomed():
                try:
                    stream = await self.carrier.open(lane)
                except StreamBrokenError as error:
                    reason = f"cannot open a {lane.label} stream: {error}"
                    if self.hello is None:
                        # Most likely the peer does not speak our protocol at all.
                        self.refuse(reason)
                    self.doom(reason)
                    return
                nursery.start_soon(self._watch_outgoing, stream)
                try:
                    await LaneWriter(self, lane, stream).run()
                except StreamBrokenError as error:
                    if self.is_doomed():
                        return
                    self.counters.add("streams.write_failed")
                    self.failures[lane] += 1
                    if self.failures[lane] >= self.limits.write_failures:
                        self.doom(f"writing on the {lane.label} stream failed again: {error}")
                        return
                    # libp2p sends no reset by itself, and the peer would wait for the rest.
                    await stream.reset()
                    self._write_again(lane)

    def _write_again(self, lane: Lane) -> None:
        """A new stream takes the place of one that broke: say again what it may have lost."""
        if self.owner.sends(self):
            self.queue.rewind(lane)
        if lane is Lane.CONTROL and self.owner.inflow(self) is not None:
            self.owner.announce(self)

    async def _watch_outgoing(self, stream: ByteStream) -> None:
        """Nothing comes on a stream that we opened; unread data would pile up there."""
        with self._task():
            try:
                data = await stream.read(1)
            except StreamBrokenError:
                return
            if data:
                self.refuse("the peer wrote on a stream that is ours to write on")

    async def _watch_life(self) -> None:
        """Ping, and close what is silent, stalled, late with its hello, or slow to leave."""
        limits = self.limits
        next_ping = self.opened_at + limits.ping_interval_s
        while not self.is_doomed():
            due = min(next_ping, self.last_heard + limits.silence_s, self._retire_by, self._ack_at)
            if self.state is LinkState.OPENING:
                due = min(due, self.opened_at + self._hello_s)
            due = min(due, self._stays_until, self._pump_at)
            with trio.move_on_at(due):
                await self._life.wait()
            if self.is_doomed():
                return
            now = trio.current_time()
            if now > due + _STALL_S:
                self.last_heard = now
                self._excuse(now - due)
            if now >= self._ack_at:
                self._ack_at = math.inf
                self._acknowledge_now()
            if now >= self._pump_at:
                self._pump_now()
            if self.state is LinkState.OPENING and now >= self.opened_at + self._hello_s:
                self.refuse(f"no hello within {self._hello_s:g} s")
            elif now >= self._stays_until:
                self._stays_until = math.inf
                self.retire("a guest's time is over")
            elif now >= self._retire_by:
                self.doom("the farewell took too long")
            elif now >= self.last_heard + limits.silence_s:
                self.counters.add("links.silent")
                self.doom(f"the peer was silent for {limits.silence_s:g} s")
            else:
                self._check_progress(now)
            if now >= next_ping:
                next_ping = now + limits.ping_interval_s
                self.pulse.due = True
                self.wake(Lane.CONTROL)

    def _pump_now(self) -> None:
        """Look whether there is room now, or the peer's rate allows more."""
        self._pump_at = math.inf
        flow = self.owner.inflow(self)
        if flow is not None:
            flow.pump()
            self.acks_changed()

    def _acknowledge_now(self) -> None:
        flow = self.owner.inflow(self)
        if flow is not None and flow.acks[Lane.CONTROL].since:
            flow.acks[Lane.CONTROL].due = True
            self.wake(Lane.CONTROL)

    def _excuse(self, seconds: float) -> None:
        """This process stood still: nothing of that time is held against the peer."""
        for reader in self.readers.values():
            reader.excuse(seconds)
        flow = self.owner.inflow(self)
        if flow is not None:
            flow.excuse(seconds)

    def _check_progress(self, now: float) -> None:
        """A peer that answers pings and moves nothing else, in either direction, or too little."""
        limit_s, queue, flow = self.limits.stall_s, self.queue, self.owner.inflow(self)
        if self._outgoing.stalled(
            due=self.owner.sends(self) and queue.unacknowledged_bytes > 0,
            value=queue.acknowledged + queue.acknowledged_bytes,
            now=now,
            limit_s=limit_s,
        ):
            self.counters.add("links.stalled")
            self.owner.stalled(self, f"the peer took nothing of what we sent for {limit_s:g} s")
        elif flow is not None and self._incoming.stalled(
            due=flow.receiving, value=flow.progress, now=now, limit_s=limit_s
        ):
            self.counters.add("links.stalled")
            flow.drop_partial()
            self.doom(f"nothing more of a message that was begun came for {limit_s:g} s")
        elif flow is not None and flow.too_slow:
            flow.drop_partial()
            least = self.limits.slow_bytes_per_s
            self._too_slow(f"a large message came at less than {least:g} bytes a second")
        elif any(
            now >= reader.frame_since + self.limits.frame_s for reader in self.readers.values()
        ):
            self._too_slow(f"a frame took longer than {self.limits.frame_s:g} s")

    def _too_slow(self, reason: str) -> None:
        self.counters.add("links.slow")
        self.refuse(reason, Violation.SLOW)
