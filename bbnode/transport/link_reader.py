"""Reading one stream that a peer opened.

Rule: a reader hands on what comes and never waits for anybody who takes it, but for the hello,
which comes first on the other stream. Whatever is wrong with a frame ends the connection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import trio

from bbnode.transport.base import Violation
from bbnode.transport.carrier import ByteStream
from bbnode.transport.errors import FrameError, HelloError, StreamBrokenError
from bbnode.transport.link_state import LinkEvent, LinkState
from bbnode.transport.links.framing import (
    ChunkData,
    Frame,
    FrameDecoder,
    FrameType,
    Lane,
    decode_ack,
    decode_open,
    decode_resume,
)
from bbnode.transport.links.hello import decode_hello
from bbnode.transport.links.receiver import Inflow, WindowIgnoredError

if TYPE_CHECKING:
    from bbnode.transport.links.link import Link

# libp2p returns at most about this much at once.
READ_BYTES: Final = 64 * 1024

_MESSAGES: Final = (FrameType.ENVELOPE, FrameType.OPEN, FrameType.START, FrameType.BYE)


class LaneReader:
    """The reader of one incoming stream of a link."""

    __slots__ = ("_decoder", "_lane", "_link", "_round", "frame_since")

    def __init__(self, link: Link, lane: Lane) -> None:
        self._link = link
        self._lane = lane
        self._decoder = FrameDecoder(lane)
        # The last START.
        self._round = 0
        # When the first byte came of a frame that has not come whole; inf when there is none.
        self.frame_since = math.inf

    def excuse(self, seconds: float) -> None:
        """This process stood still for so long."""
        self.frame_since += seconds

    async def run(self, stream: ByteStream) -> None:
        """Read to the end of the stream, or until another one takes its place."""
        link, lane = self._link, self._lane
        try:
            while data := await stream.read(READ_BYTES):
                link.last_heard = trio.current_time()
                link.bytes_in += len(data)
                link.counters.add("inbound.bytes", len(data))
                if link.readers[lane] is not self:
                    return
                whole = self._decoder.frames
                for frame in self._decoder.feed(data):
                    if isinstance(frame, ChunkData) and link.hello is not None:
                        if (flow := self._flow()) is not None:
                            flow.chunk(frame.number, frame.data)
                        continue
                    await self._on_frame(frame)
                    if link.is_doomed():
                        return
                if not self._decoder.keeps_bytes:
                    self.frame_since = math.inf
                elif self.frame_since == math.inf or self._decoder.frames != whole:
                    self.frame_since = link.last_heard
                link.acks_changed()
                link.check_flood()
        except WindowIgnoredError as error:
            link.counters.add("inbound.flooded")
            link.refuse(str(error), Violation.FLOOD)
            return
        except FrameError as error:
            link.refuse(str(error))
            return
        except StreamBrokenError:
            # The peer resets a stream on which its write failed, and opens another.
            if self._decoder.mid_frame:
                link.counters.add("streams.truncated")
            return
        if self._decoder.mid_frame:
            link.counters.add("streams.truncated")
        if lane not in link.farewell.bye_in and link.readers[lane] is self:
            # libp2p shows the death of the other process as a clean end of stream.
            link.doom(f"the peer ended its {lane.label} stream without a goodbye")

    async def _on_frame(self, frame: Frame | ChunkData) -> None:
        link = self._link
        if isinstance(frame, Frame) and frame.type is FrameType.HELLO:
            self._on_hello(frame.body)
            return
        if link.hello is None and not await self._hello_came(frame):
            return
        if isinstance(frame, ChunkData):
            if (flow := self._flow()) is not None:
                flow.chunk(frame.number, frame.data)
            return
        if frame.type in _MESSAGES and self._lane in link.farewell.bye_in:
            raise FrameError(f"{frame.type.name} after the goodbye of its lane")
        match frame.type:
            case FrameType.PING:
                link.pulse.pong_due = frame.number
                link.wake(Lane.CONTROL)
            case FrameType.PONG:
                link.pulse.answered(frame.number, trio.current_time())
            case FrameType.ENVELOPE:
                if (flow := self._flow()) is not None:
                    flow.small(frame.number, frame.body)
            case FrameType.OPEN:
                opening = decode_open(frame)
                if (flow := self._flow()) is not None:
                    flow.open(frame.number, opening)
            case FrameType.START:
                self._round = frame.number
            case FrameType.RESUME:
                link.owner.resumed(link, decode_resume(frame))
            case FrameType.ACK:
                self._on_ack(frame)
            case FrameType.BYE:
                self._on_bye(frame.body)
            case FrameType.BYE_ACK:
                if frame.number not in (Lane.CONTROL, Lane.BULK):
                    raise FrameError(f"a BYE_ACK for lane {frame.number}, which does not exist")
                link.farewell.acked.add(Lane(frame.number))
                if link.farewell.complete:
                    link.doom("goodbye")

    async def _hello_came(self, frame: Frame | ChunkData) -> bool:
        link = self._link
        if self._lane is Lane.CONTROL:
            name = frame.type.name if isinstance(frame, Frame) else "CHUNK"
            link.refuse(f"the first frame is {name}, not HELLO")
            return False
        # The hello went out before this frame, on the other stream of the same connection:
        # its reader only has to get its turn. The hello's deadline bounds it.
        await link.settled.wait()
        return link.hello is not None

    def _flow(self) -> Inflow | None:
        """The record that takes what comes here; None when it will be sent again elsewhere."""
        flow = self._link.owner.inflow(self._link)
        if flow is not None and self._round == flow.round:
            return flow
        if flow is not None and self._round > flow.round:
            raise FrameError(f"messages of round {self._round}; the last was {flow.round}")
        self._link.counters.add("inbound.superseded")
        return None

    def _on_hello(self, body: bytes) -> None:
        link = self._link
        if link.hello is not None:
            # Each new control stream of a connection begins with the same hello.
            if body != link.peer_hello_body:
                raise FrameError("a second hello that differs from the first")
            return
        try:
            hello = decode_hello(body)
        except HelloError as error:
            link.refuse(str(error))
            return
        reason = link.owner.admit_hello(link, hello)
        if reason:
            link.refuse(reason)
            return
        link.hello, link.peer_hello_body = hello, body
        if link.move(LinkEvent.HELLO, "") is LinkState.UP:
            link.settled.set()
            link.owner.link_up(link)
            link.wake_all()

    def _on_ack(self, frame: Frame) -> None:
        link = self._link
        lane, position = decode_ack(frame)
        if link.granted is None:
            raise FrameError("an ACK before anything was sent")
        link.queue.acknowledge(lane, position)
        link.failures[lane] = 0
        # The window is open again.
        link.wake(lane)

    def _on_bye(self, body: bytes) -> None:
        reason = body.decode("ascii", "replace")
        if not body.isascii() or not reason.isprintable():
            raise FrameError("the reason of a goodbye is not printable ASCII")
        link = self._link
        link.farewell.bye_in.add(self._lane)
        link.farewell.acks_due.append(self._lane)
        link.wake(Lane.CONTROL)
        link.retire(f"the peer took leave: {reason}")
