"""One connection with one peer: its four streams, its life signs and its end.

Rule: each side opens one outgoing control and one outgoing bulk stream and only writes on
them; it only reads the two that the other side opened. One task writes and one reads each
stream. Its states and moves are the table in `link_state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from bbnode.transport.backend import Direction, Hello, TransportLimits
from bbnode.transport.carrier import ByteStream, Carrier
from bbnode.transport.counters import Counters
from bbnode.transport.errors import FrameError, HelloError, StreamBrokenError
from bbnode.transport.framing import (
    MAX_BYE_BYTES,
    Frame,
    FrameDecoder,
    FrameType,
    Lane,
    encode_header,
)
from bbnode.transport.hello import decode_hello
from bbnode.transport.link_state import LINK_MOVES, Farewell, LinkEvent, LinkOwner, LinkState, Pulse
from bbnode.transport.outbound import Outbound, envelope_chunks
from bbnode.transport.wakeup import Signal

# libp2p returns at most about this much at once.
READ_BYTES: Final = 64 * 1024
# How often unread bytes are looked at while a reader waits for the driver.
_FLOOD_CHECK_S: Final = 0.2
# A wake-up later than this means that this process itself stood still: bytes of the peer
# may be waiting, so its silence so far does not count.
_STALL_S: Final = 2.0


class Link:
    """A running connection; `run` owns its tasks."""

    def __init__(
        self,
        carrier: Carrier,
        owner: LinkOwner,
        *,
        hello: bytes,
        number: int,
        limits: TransportLimits,
        counters: Counters,
    ) -> None:
        self.carrier = carrier
        self.peer = carrier.peer
        # Counts the connections that its dialler made; the other side learns it by hello.
        self.number = number
        self.hello: Hello | None = None
        self.state = LinkState.OPENING
        self.bytes_in = self.bytes_out = 0
        self.opened_at = trio.current_time()
        # Set once the hello has come or the link is closed.
        self.settled = trio.Event()
        # Set once the connection is gone and the owner knows.
        self.closed = trio.Event()
        self._owner = owner
        self._hello_body = hello
        self._peer_hello_body = b""
        self._limits = limits
        self._counters = counters
        self._last_heard = self.opened_at
        self._paused = 0
        self._doomed = trio.Event()
        self._reason = ""
        self._retire_by = math.inf
        self._life = Signal()
        self._wakes = {lane: Signal() for lane in Lane}
        self._failures = dict.fromkeys(Lane, 0)
        self._pulse = Pulse()
        self._farewell = Farewell()

    @property
    def reason(self) -> str:
        """Why the link ends or ended; empty before."""
        return self._reason

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the last ping in seconds, with the time it waited to be written."""
        return self._pulse.rtt_s

    @property
    def dialled_number(self) -> int:
        """The number its dialler gave this connection."""
        if self.carrier.direction is Direction.OUTBOUND or self.hello is None:
            return self.number
        return self.hello.link

    def wake(self, lane: Lane) -> None:
        """Tell the writer of a lane that there may be something to write."""
        self._wakes[lane].set()

    def retire(self, reason: str) -> None:
        """Write what is in flight, take leave, and close; at most `farewell_s` seconds."""
        if self._move(LinkEvent.RETIRE, reason) is LinkState.RETIRING:
            self._retire_by = trio.current_time() + self._limits.farewell_s
            self._wake_all()

    def doom(self, reason: str) -> None:
        """Close at once; what is in flight is given back."""
        self._move(LinkEvent.DOOM, reason)

    async def run(self) -> None:
        """Own the link's tasks until the connection is gone."""
        self._counters.add("links.opened")
        try:
            async with trio.open_nursery() as nursery:
                for lane in Lane:
                    nursery.start_soon(self._write_lane, lane, nursery)
                nursery.start_soon(self._watch_life)
                await self._doomed.wait()
                await self.carrier.hard_close()
                # All I/O has come back by now, or belongs to a connection that is gone.
                nursery.cancel_scope.cancel()
        finally:
            self.doom("the node stops")
            with trio.CancelScope(shield=True):
                await self.carrier.hard_close()
            self._counters.add("links.closed")
            self._owner.link_closed(self, self._reason)
            self.closed.set()

    async def serve_inbound(self, lane: Lane, stream: ByteStream) -> None:
        """Read one stream that the peer opened, to its end."""
        decoder = FrameDecoder(lane, self._limits.max_envelope_bytes)
        try:
            while data := await stream.read(READ_BYTES):
                self._last_heard = trio.current_time()
                self.bytes_in += len(data)
                self._counters.add("inbound.bytes", len(data))
                for frame in decoder.feed(data):
                    await self._on_frame(lane, frame)
                    if self._doomed.is_set():
                        return
                self._check_flood()
        except FrameError as error:
            self._refuse(str(error))
            return
        except StreamBrokenError:
            # The peer resets a stream on which its write failed, and opens another.
            if decoder.mid_frame:
                self._counters.add("streams.truncated")
            return
        if decoder.mid_frame:
            self._counters.add("streams.truncated")
        if lane not in self._farewell.bye_in:
            # libp2p shows the death of the other process as a clean end of stream.
            self.doom(f"the peer ended its {lane.label} stream without a goodbye")

    # -- states ----------------------------------------------------------------------------

    def _move(self, event: LinkEvent, reason: str) -> LinkState:
        if (self.state, event) not in LINK_MOVES:
            return self.state
        state = self.state = LINK_MOVES[self.state, event]
        self._reason = self._reason or reason
        if state is LinkState.CLOSED:
            self._doomed.set()
            self.settled.set()
            self._wake_all()
        self._life.set()
        return state

    def _wake_all(self) -> None:
        for wake in self._wakes.values():
            wake.set()

    def _refuse(self, reason: str) -> None:
        """The peer sent what it must not: say so, and close."""
        if self._doomed.is_set():
            return
        report = self._owner.hello_refused if self.hello is None else self._owner.violation
        report(self, reason)
        self.doom(reason)

    # -- reading ---------------------------------------------------------------------------

    async def _on_frame(self, lane: Lane, frame: Frame) -> None:
        if frame.type is FrameType.HELLO:
            self._on_hello(frame.body)
            return
        if self.hello is None:
            if lane is Lane.CONTROL:
                self._refuse(f"the first frame is {frame.type.name}, not HELLO")
                return
            # The hello went out before this frame, on the other stream of the same
            # connection: its reader only has to get its turn. The hello's deadline bounds it.
            with self._pause():
                await self.settled.wait()
            if self.hello is None:
                return
        match frame.type:
            case FrameType.PING:
                self._pulse.pong_due = frame.number
                self.wake(Lane.CONTROL)
            case FrameType.PONG:
                self._pulse.answered(frame.number, trio.current_time())
            case FrameType.ENVELOPE | FrameType.BYE if lane in self._farewell.bye_in:
                raise FrameError(f"{frame.type.name} after the goodbye of its lane")
            case FrameType.ENVELOPE:
                await self._on_envelope(frame.body)
            case FrameType.BYE:
                self._on_bye(lane, frame.body)
            case FrameType.BYE_ACK:
                if frame.number not in (Lane.CONTROL, Lane.BULK):
                    raise FrameError(f"a BYE_ACK for lane {frame.number}, which does not exist")
                self._farewell.acked.add(Lane(frame.number))
                if self._farewell.complete:
                    self.doom("goodbye")

    def _on_hello(self, body: bytes) -> None:
        if self.hello is not None:
            # Each new control stream of a connection begins with the same hello.
            if body != self._peer_hello_body:
                raise FrameError("a second hello that differs from the first")
            return
        try:
            hello = decode_hello(body)
        except HelloError as error:
            self._refuse(str(error))
            return
        self.hello, self._peer_hello_body = hello, body
        if self._move(LinkEvent.HELLO, "") is LinkState.UP:
            self.settled.set()
            self._owner.link_up(self)
            self._wake_all()

    async def _on_envelope(self, data: bytes) -> None:
        self._counters.add("inbound.envelopes")
        with self._pause():
            delivered = await self._owner.deliver(self, data)
        if not delivered:
            self._counters.add("inbound.flooded")
            self.doom("the peer sent more than the driver could take")

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """A reader waits for something else than its stream: watch what piles up meanwhile."""
        self._paused += 1
        self._life.set()
        try:
            yield
        finally:
            self._paused -= 1

    def _check_flood(self) -> None:
        unread = self.carrier.unread_bytes()
        if unread > self._limits.unread_bytes and not self._doomed.is_set():
            self._counters.add("inbound.flooded")
            self.doom(f"the peer ignores our receive window: {unread} bytes lie unread")

    def _on_bye(self, lane: Lane, body: bytes) -> None:
        reason = body.decode("ascii", "replace")
        if not body.isascii() or not reason.isprintable():
            raise FrameError("the reason of a goodbye is not printable ASCII")
        self._farewell.bye_in.add(lane)
        self._farewell.acks_due.append(lane)
        self.wake(Lane.CONTROL)
        self.retire(f"the peer took leave: {reason}")

    # -- writing ---------------------------------------------------------------------------

    async def _write_lane(self, lane: Lane, nursery: trio.Nursery) -> None:
        while not self._doomed.is_set():
            try:
                stream = await self.carrier.open(lane)
            except StreamBrokenError as error:
                reason = f"cannot open a {lane.label} stream: {error}"
                if self.hello is None:
                    # Most likely the peer does not speak our protocol at all.
                    self._refuse(reason)
                self.doom(reason)
                return
            nursery.start_soon(self._watch_outgoing, stream)
            try:
                await self._write_on(lane, stream)
            except StreamBrokenError as error:
                if self._doomed.is_set():
                    return
                self._counters.add("streams.write_failed")
                self._failures[lane] += 1
                if self._failures[lane] >= self._limits.write_failures:
                    self.doom(f"writing on the {lane.label} stream failed again: {error}")
                    return
                # libp2p sends no reset by itself, and the peer would wait for the rest.
                await stream.reset()

    async def _write_on(self, lane: Lane, stream: ByteStream) -> None:
        """Write frames until the link is closed; raises StreamBrokenError."""
        if lane is Lane.CONTROL:
            await self._write_frame(stream, FrameType.HELLO, self._hello_body)
        while not self._doomed.is_set():
            if lane is Lane.CONTROL and await self._write_due(stream):
                continue
            item = self._owner.take(self, lane)
            if item is not None:
                await self._write_envelope(stream, item)
            elif self.state is LinkState.RETIRING and lane not in self._farewell.bye_out:
                reason = self._reason.encode("ascii", "replace")[:MAX_BYE_BYTES]
                await self._write_frame(stream, FrameType.BYE, reason)
                self._farewell.bye_out.add(lane)
            else:
                await self._wakes[lane].wait()

    async def _write_due(self, stream: ByteStream) -> bool:
        """Write one frame that the link itself owes; False when there is none."""
        if self._pulse.pong_due is not None:
            number, self._pulse.pong_due = self._pulse.pong_due, None
            await self._write_frame(stream, FrameType.PONG, number=number)
        elif self._pulse.due:
            number = self._pulse.start(trio.current_time())
            await self._write_frame(stream, FrameType.PING, number=number)
        elif self._farewell.acks_due:
            lane = self._farewell.acks_due[0]
            await self._write_frame(stream, FrameType.BYE_ACK, number=lane)
            self._farewell.acks_due.remove(lane)
            if self._farewell.complete:
                self.doom("goodbye")
        else:
            return False
        return True

    async def _write_envelope(self, stream: ByteStream, item: Outbound) -> None:
        try:
            for chunk in envelope_chunks(item):
                await self._write(stream, chunk)
        except BaseException:
            self._owner.give_back(self, item)
            raise
        self._failures[item.lane] = 0
        self._counters.add("outbound.envelopes")
        self._owner.written(self, item)

    async def _write_frame(
        self, stream: ByteStream, frame_type: FrameType, body: bytes = b"", number: int = 0
    ) -> None:
        await self._write(stream, encode_header(frame_type, len(body), number) + body)

    async def _write(self, stream: ByteStream, data: bytes) -> None:
        await stream.write(data)
        if self._doomed.is_set():
            # libp2p lets a write on a connection that we closed end as if it had succeeded.
            raise StreamBrokenError("the connection was closed during a write")
        self.bytes_out += len(data)
        self._counters.add("outbound.bytes", len(data))

    async def _watch_outgoing(self, stream: ByteStream) -> None:
        """Nothing comes on a stream that we opened; unread data would pile up there."""
        try:
            data = await stream.read(1)
        except StreamBrokenError:
            return
        if data:
            self._refuse("the peer wrote on a stream that is ours to write on")

    # -- life signs ------------------------------------------------------------------------

    async def _watch_life(self) -> None:
        """Ping, and close what is silent, late with its hello, or slow to take leave."""
        limits = self._limits
        next_ping = self.opened_at + limits.ping_interval_s
        while not self._doomed.is_set():
            due = min(next_ping, self._last_heard + limits.silence_s, self._retire_by)
            if self.state is LinkState.OPENING:
                due = min(due, self.opened_at + limits.hello_timeout_s)
            if self._paused:
                due = min(due, trio.current_time() + _FLOOD_CHECK_S)
            with trio.move_on_at(due):
                await self._life.wait()
            if self._doomed.is_set():
                return
            now = trio.current_time()
            if now > due + _STALL_S:
                self._last_heard = now
            if self._paused:
                self._check_flood()
            if self.state is LinkState.OPENING and now >= self.opened_at + limits.hello_timeout_s:
                self._refuse(f"no hello within {limits.hello_timeout_s:g} s")
            elif now >= self._retire_by:
                self.doom("the farewell took too long")
            elif now >= self._last_heard + limits.silence_s:
                self._counters.add("links.silent")
                self.doom(f"the peer was silent for {limits.silence_s:g} s")
            if now >= next_ping:
                next_ping = now + limits.ping_interval_s
                self._pulse.due = True
                self.wake(Lane.CONTROL)
