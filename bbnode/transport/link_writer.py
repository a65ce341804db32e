"""Writing one of our streams.

Rule: what the link owes (pongs, pings, positions, acknowledgements) goes before messages, and
everything small that waits goes in one write. Stream I/O is never cancelled; a broken stream
is given up, and what was not acknowledged on it is written again on the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from bbnode.ir.caps import MAX_BYE_BYTES
from bbnode.transport.carrier import ByteStream
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.link_state import LinkState
from bbnode.transport.links.framing import (
    FrameType,
    Lane,
    encode_ack,
    encode_header,
    encode_open,
    encode_resume,
)
from bbnode.transport.outbound import YAMUX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from bbnode.transport.links.link import Link

# Small messages that go in one write: about a Yamux frame.
_BATCH_BYTES: Final = 64 * 1024


class LaneWriter:
    """The writer of one stream of a link."""

    __slots__ = ("_lane", "_link", "_started", "_stream")

    def __init__(self, link: Link, lane: Lane, stream: ByteStream) -> None:
        self._link = link
        self._lane = lane
        self._stream = stream
        # The round that was started on this stream.
        self._started: int | None = None

    async def run(self) -> None:
        """Write until the link is closed; raises StreamBrokenError."""
        link, lane = self._link, self._lane
        if lane is Lane.CONTROL:
            hello = link.hello_body
            await self._write(encode_header(FrameType.HELLO, len(hello)) + hello)
        step = self._control if lane is Lane.CONTROL else self._bulk
        while not link.is_doomed():
            if not await step() and not await self._bye():
                await link.wakes[lane].wait()

    async def _control(self) -> bool:
        """Write what is owed and small; False when there is nothing."""
        link = self._link
        out = bytearray()
        pulse, farewell = link.pulse, link.farewell
        if pulse.pong_due is not None:
            number, pulse.pong_due = pulse.pong_due, None
            out += encode_header(FrameType.PONG, 0, number)
        if pulse.due:
            out += encode_header(FrameType.PING, 0, pulse.start(trio.current_time()))
        if link.resume_due is not None:
            out += encode_resume(link.resume_due)
            link.resume_due = None
        acked = list(farewell.acks_due)
        sent = self._small(out)
        # Last, so that one acknowledgement speaks for all that came meanwhile; but before a
        # BYE_ACK, after which the other side may be gone.
        self._acks(out, force=bool(out) or bool(acked))
        for lane in acked:
            out += encode_header(FrameType.BYE_ACK, 0, lane)
        if not out:
            return False
        await self._write(bytes(out))
        link.counters.add("outbound.envelopes", sent)
        if acked:
            del farewell.acks_due[: len(acked)]
            if farewell.complete:
                link.doom("goodbye")
        return True

    def _acks(self, out: bytearray, *, force: bool) -> None:
        """What is due; with something else to travel with, all that was taken."""
        flow = self._link.owner.inflow(self._link)
        if flow is None:
            return
        force = force or any(acks.due for acks in flow.acks.values())
        for lane, acks in flow.acks.items():
            if acks.due or (force and acks.since):
                out += encode_ack(lane, flow.position(lane))
                acks.due, acks.since = False, 0

    def _small(self, out: bytearray) -> int:
        """Small messages, as many as go in one write."""
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
        """Write one part of a large message; False when there is nothing, or no window."""
        link = self._link
        if link.granted is None or not link.owner.sends(link):
            return False
        piece = link.queue.next_piece()
        if piece is None:
            return False
        out = bytearray()
        self._start(out)
        if piece.opens:
            item = piece.item
            out += encode_open(piece.number, item.size, piece.offset, item.anchor)
        out += encode_header(FrameType.CHUNK, piece.length, piece.number)
        first, *others = piece.item.bytes_from(piece.offset, piece.length)
        # The first Yamux frame is put together here; the rest is cut out of the message by
        # libp2p, and copied for the first time when it is.
        room = max(0, YAMUX_PAYLOAD_BYTES - len(out))
        out += first[:room]
        await self._write(bytes(out))
        for view in (first[room:], *others):
            if len(view):
                await self._write(view)
        if piece.offset + piece.length == piece.item.size:
            link.counters.add("outbound.envelopes")
        return True

    def _start(self, out: bytearray) -> None:
        granted = self._link.granted
        if self._started != granted and granted is not None:
            out += encode_header(FrameType.START, 0, granted)
            self._started = granted

    async def _bye(self) -> bool:
        """End the lane when leave is taken; False when there is nothing to end."""
        link, lane = self._link, self._lane
        if link.state is not LinkState.RETIRING or lane in link.farewell.bye_out:
            return False
        reason = link.reason.encode("ascii", "replace")[:MAX_BYE_BYTES]
        await self._write(encode_header(FrameType.BYE, len(reason)) + reason)
        link.farewell.bye_out.add(lane)
        return True

    async def _write(self, data: bytes | memoryview) -> None:
        link = self._link
        await self._stream.write(data)
        if link.is_doomed():
            # libp2p lets a write on a connection that we closed end as if it had succeeded.
            raise StreamBrokenError("the connection was closed during a write")
        link.bytes_out += len(data)
        link.counters.add("outbound.bytes", len(data))
