"""The queue of messages to one peer.

Rule: it is bounded in number and in bytes, whatever the connection does; each lane is FIFO. A
message is numbered when its first byte is sent, kept until the peer has acknowledged it, and
resent from the last acknowledged byte after its stream is lost (`rewind`). No more than the peer's
window is unacknowledged on a lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import trio

from bbnode.ir.caps import MAX_CONTROL_ENVELOPE_BYTES
from bbnode.transport.base import Buffer
from bbnode.transport.errors import EnvelopeTooLargeError, FrameError, QueueFullError
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import HEADER_BYTES, Lane, Position, Resume

# Four full packets of Noise, which the muxer encrypts in place and sends at once.
CHUNK_BYTES: Final = 4 * 65_519


@dataclass(slots=True, eq=False, kw_only=True)
class Outbound:
    """One message that waits for its acknowledgement. All offsets are in bytes."""

    parts: tuple[memoryview, ...]
    size: int
    tag: int
    lane: Lane
    # Assigned when its first byte is sent.
    number: int | None = None
    # Offsets: written to a stream since the last rewind; acknowledged; ever written to a stream.
    sent: int = 0
    acked: int = 0
    reached: int = 0
    # Bytes of its lane's window that it occupies now.
    charged: int = 0
    # True if an OPEN has to precede the next byte; True after a rewind, to count the resend.
    to_open: bool = True
    again: bool = False
    _ends: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The end offset of each part."""
        if not self._ends:
            self._ends = tuple(accumulate(map(len, self.parts)))
        return self._ends

    @property
    def anchor(self) -> int:
        """The offset in bytes of the largest part, the first of several."""
        at = max(range(len(self.parts)), key=lambda index: len(self.parts[index]))
        return self.ends[at] - len(self.parts[at])

    def bytes_from(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield the `length` bytes from `offset` on, uncopied."""
        index = bisect_right(self.ends, offset)
        while length > 0:
            part = self.parts[index]
            at = offset - (self.ends[index] - len(part))
            piece = part[at : at + length]
            yield piece
            offset += len(piece)
            length -= len(piece)
            index += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next part of a large message to write; `opens` if an OPEN precedes it."""

    item: Outbound
    number: int
    offset: int
    length: int
    opens: bool


def size_of(data: Buffer | Sequence[Buffer]) -> int:
    """Return the size of all buffers in bytes."""
    if isinstance(data, bytes):
        return len(data)
    parts = (data,) if isinstance(data, bytearray | memoryview) else data
    sizes = [len(each) if isinstance(each, bytes) else memoryview(each).nbytes for each in parts]
    return sum(sizes)


def freeze(data: Buffer | Sequence[Buffer]) -> tuple[memoryview, ...]:
    """Return the buffers as flat views that no longer change.

    `bytes` and read-only views are not copied, since their owner promises not to change them.
    Writable buffers are copied.
    """
    if isinstance(data, bytes):
        return (memoryview(data),) if data else ()
    parts = (data,) if isinstance(data, bytearray | memoryview) else data
    frozen = []
    for part in parts:
        view = memoryview(part)
        if not view.readonly or not view.c_contiguous:
            view = memoryview(view.tobytes())
        if view.nbytes:
            frozen.append(view.cast("B"))
    return tuple(frozen)


class _LaneQueue:
    """The messages of one lane: those before `cursor` are written, the one at it perhaps partly."""

    __slots__ = ("bytes", "cursor", "items", "next_number", "unacked", "window")

    def __init__(self) -> None:
        self.items: deque[Outbound] = deque()
        self.cursor = 0
        self.bytes = 0
        self.next_number = 1
        # Bytes sent and not acknowledged, including headers of small messages.
        self.unacked = 0
        self.window = 0


class OutboundQueue:
    """Messages for one peer, one queue per lane."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._lanes = {lane: _LaneQueue() for lane in Lane}
        self._idle = trio.Event()
        self._idle.set()
        self._record: int | None = None
        # Waiting and unacknowledged messages together.
        self.envelopes = 0
        # Acknowledged messages, and their bytes; both only grow.
        self.acknowledged = 0
        self.acknowledged_bytes = 0
        self.resent = 0

    @property
    def bytes(self) -> int:
        """Waiting and unacknowledged bytes, on both lanes."""
        return sum(lane.bytes for lane in self._lanes.values())

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not acknowledged, on both lanes."""
        return sum(lane.unacked for lane in self._lanes.values())

    # -- in --------------------------------------------------------------------------------

    def put(
        self, peer: object, data: Buffer | Sequence[Buffer], tag: int, size: int | None = None
    ) -> Lane:
        """Queue a message for `peer`, of `size` bytes if that is known, and return its lane.

        Raises EnvelopeTooLargeError or QueueFullError; nothing is queued then.
        """
        if size is None:
            size = size_of(data)
        limits = self._limits
        if size > limits.max_message_bytes:
            raise EnvelopeTooLargeError(
                f"an envelope of {size} bytes for {peer}; at most {limits.max_message_bytes} "
                "are sent: split the tensor, or raise max_message_bytes on both sides"
            )
        kind = Lane.CONTROL if size <= MAX_CONTROL_ENVELOPE_BYTES else Lane.BULK
        lane = self._lanes[kind]
        # Per lane, so that a large message does not block small ones.
        if self.envelopes >= limits.queue_envelopes or (
            lane.bytes + size > limits.queue_bytes and lane.items
        ):
            raise QueueFullError(
                f"{self.envelopes} envelopes ({self.bytes} bytes) wait for {peer} already; at "
                f"most {limits.queue_envelopes} ({limits.queue_bytes} bytes on a lane) may: it "
                "takes them too slowly, send less or drop it"
            )
        lane.items.append(Outbound(parts=freeze(data), size=size, tag=tag, lane=kind))
        lane.bytes += size
        self.envelopes += 1
        if self._idle.is_set():
            self._idle = trio.Event()
        return kind

    # -- out -------------------------------------------------------------------------------

    def waits(self, kind: Lane) -> bool:
        """Return True if a message of a lane is not completely sent."""
        lane = self._lanes[kind]
        return lane.cursor < len(lane.items)

    def next_control(self) -> Outbound | None:
        """Return the next small message, if the window allows it; it counts as sent."""
        lane = self._lanes[Lane.CONTROL]
        if lane.cursor >= len(lane.items):
            return None
        item = lane.items[lane.cursor]
        # The header counts, so that an empty message is not free.
        cost = item.size + HEADER_BYTES
        if lane.unacked + cost > lane.window:
            return None
        self._begin(lane, item)
        item.sent = item.reached = item.size
        item.charged = cost
        lane.unacked += cost
        lane.cursor += 1
        return item

    def next_piece(self) -> Piece | None:
        """Return the next part of a large message, if the window allows it; it counts as sent."""
        lane = self._lanes[Lane.BULK]
        if lane.cursor >= len(lane.items):
            return None
        item = lane.items[lane.cursor]
        length = min(CHUNK_BYTES, item.size - item.sent, lane.window)
        if lane.unacked + length > lane.window or not lane.window:
            return None
        number = self._begin(lane, item)
        piece = Piece(item=item, number=number, offset=item.sent, length=length, opens=item.to_open)
        item.to_open = False
        item.sent += length
        item.reached = max(item.reached, item.sent)
        item.charged += length
        lane.unacked += length
        if item.sent == item.size:
            lane.cursor += 1
        return piece

    def _begin(self, lane: _LaneQueue, item: Outbound) -> int:
        if item.number is None:
            item.number = lane.next_number
            lane.next_number += 1
        if item.again:
            item.again = False
            self.resent += 1
        return item.number

    # -- acknowledgements ------------------------------------------------------------------

    def acknowledge(self, kind: Lane, position: Position) -> bool:
        """Drop the messages that the peer has acknowledged; return False if that was known.

        Raises FrameError if the peer acknowledges more than was sent.
        """
        before = self.acknowledged, self.acknowledged_bytes
        self._acknowledge(kind, position)
        return before != (self.acknowledged, self.acknowledged_bytes)

    def _acknowledge(self, kind: Lane, position: Position) -> None:
        lane = self._lanes[kind]
        number, offset = position.number, position.offset
        if number > lane.next_number:
            raise FrameError(
                f"message {number} is acknowledged on the {kind.label} lane, where "
                f"{lane.next_number} is the next"
            )
        while lane.items:
            item = lane.items[0]
            if item.number is None or item.number > number:
                return
            if item.number == number:
                if offset:
                    self._acknowledge_part(lane, item, offset)
                return
            if item.reached < item.size:
                raise FrameError(f"message {item.number} is acknowledged and was not sent whole")
            lane.items.popleft()
            lane.cursor = max(0, lane.cursor - 1)
            lane.unacked -= item.charged
            self.acknowledged += 1
            self.acknowledged_bytes += item.size - item.acked
            self._release(item)

    def _acknowledge_part(self, lane: _LaneQueue, item: Outbound, offset: int) -> None:
        if item.lane is Lane.CONTROL or offset > item.reached or offset >= item.size:
            raise FrameError(
                f"{offset} bytes of message {item.number} are acknowledged; {item.reached} of "
                f"{item.size} were sent"
            )
        if offset <= item.acked:
            return  # an older one, overtaken
        self.acknowledged_bytes += offset - item.acked
        item.acked = offset
        if offset > item.sent:
            # It was sent before a rewind: the stream continues from there.
            item.sent, item.to_open = offset, True
        lane.unacked -= item.charged - (item.sent - offset)
        item.charged = item.sent - offset

    def resume(self, resume: Resume) -> list[Outbound]:
        """Continue from the receiver's position; raises FrameError.

        Returns the messages to give up. If the receiver has forgotten us (it was restarted, or we
        were away for too long), these are the messages that were begun and not acknowledged: it is
        unknown whether they have arrived.
        """
        lost: list[Outbound] = []
        if self._record is not None and self._record != resume.record:
            lost = self.give_up_begun()
        else:
            for kind, position in ((Lane.CONTROL, resume.control), (Lane.BULK, resume.bulk)):
                self.acknowledge(kind, position)
                items = self._lanes[kind].items
                if items and items[0].number == position.number:
                    # The receiver may have dropped a part that it had acknowledged.
                    items[0].acked = position.offset
        self._record = resume.record
        limits = self._limits
        windows = (
            (Lane.CONTROL, resume.control_window, limits.control_window_bytes),
            (Lane.BULK, resume.bulk_window, limits.bulk_window_bytes),
        )
        for kind, theirs, ours in windows:
            self._lanes[kind].window = min(theirs, ours)
            self.rewind(kind)
        return lost

    def give_up_begun(self) -> list[Outbound]:
        """Remove and return the messages begun and not acknowledged, as their receiver is gone."""
        lost: list[Outbound] = []
        for lane in self._lanes.values():
            begun = [item for item in lane.items if item.number is not None]
            for item in begun:
                lane.items.remove(item)
                self._release(item)
            lost += begun
            lane.cursor = lane.unacked = 0
        return lost

    def rewind(self, kind: Lane) -> None:
        """Restart a lane after its last acknowledged byte, as its stream is gone."""
        lane = self._lanes[kind]
        lane.cursor = lane.unacked = 0
        for item in lane.items:
            if item.number is None:
                break
            item.sent, item.charged = item.acked, 0
            item.to_open = item.again = True

    # -- giving up -------------------------------------------------------------------------

    def pending(self) -> list[Outbound]:
        """Return all waiting and unacknowledged messages, by lane, in order."""
        return [item for lane in self._lanes.values() for item in lane.items]

    def drain(self) -> list[Outbound]:
        """Remove and return all messages, in that order."""
        items = self.pending()
        for lane in self._lanes.values():
            lane.items.clear()
            lane.cursor = lane.unacked = 0
        for item in items:
            self._release(item)
        return items

    def head(self, kind: Lane) -> Outbound | None:
        """Return the oldest message of a lane (for a transport that delivers at once)."""
        items = self._lanes[kind].items
        return items[0] if items else None

    def pop(self, kind: Lane) -> None:
        """Remove the oldest message of a lane, which was delivered."""
        item = self._lanes[kind].items.popleft()
        self.acknowledged += 1
        self.acknowledged_bytes += item.size
        self._release(item)

    def _release(self, item: Outbound) -> None:
        self.envelopes -= 1
        self._lanes[item.lane].bytes -= item.size
        if not self.envelopes:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until the queue is empty and everything is acknowledged."""
        await self._idle.wait()
