"""The queue of envelopes on their way to one peer.

Rule: bounded in number and in bytes, whatever the connection does; first in, first out on each
lane. An envelope stays charged until it is written or given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from bbnode.transport.backend import MAX_CONTROL_ENVELOPE_BYTES, Buffer, TransportLimits
from bbnode.transport.errors import EnvelopeTooLargeError, QueueFullError
from bbnode.transport.framing import FrameType, Lane, encode_header

# A multiple of the 65,524 payload bytes of a Yamux frame: full frames are the fastest.
WRITE_BYTES: Final = 4 * 65_524


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbound:
    """One envelope that waits. `number` counts up per peer and stays when it is sent again."""

    parts: tuple[bytes, ...]
    size: int
    tag: int
    number: int
    lane: Lane


def freeze(data: Buffer | Sequence[Buffer]) -> tuple[bytes, ...]:
    """The buffers as bytes that nobody can change any more; `bytes` are not copied."""
    parts = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    return tuple(part if type(part) is bytes else bytes(part) for part in parts)


def envelope_chunks(item: Outbound) -> Iterator[bytes]:
    """The frame of an envelope in pieces of at most WRITE_BYTES; only pieces are copied."""
    chunk = bytearray(encode_header(FrameType.ENVELOPE, item.size, item.number))
    for part in item.parts:
        view = memoryview(part)
        while len(view):
            room = WRITE_BYTES - len(chunk)
            chunk += view[:room]
            view = view[room:]
            if len(chunk) == WRITE_BYTES:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)


class OutboundQueue:
    """Envelopes for one peer, one first-in-first-out queue per lane."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._lanes: dict[Lane, deque[Outbound]] = {lane: deque() for lane in Lane}
        self._next_number = 1
        self._idle = trio.Event()
        self._idle.set()
        # Waiting and in flight together.
        self.envelopes = 0
        self.bytes = 0

    def put(self, peer: object, data: Buffer | Sequence[Buffer], tag: int) -> Lane:
        """Queue an envelope for `peer` and say on which lane.

        Raises EnvelopeTooLargeError or QueueFullError and keeps nothing then.
        """
        parts = (data,) if isinstance(data, bytes | bytearray | memoryview) else tuple(data)
        size = sum(memoryview(part).nbytes for part in parts)
        limits = self._limits
        if size > limits.max_envelope_bytes:
            raise EnvelopeTooLargeError(
                f"an envelope of {size} bytes for {peer}; at most {limits.max_envelope_bytes} "
                "travel whole: send the tensor in chunks"
            )
        if self.envelopes >= limits.queue_envelopes or self.bytes + size > limits.queue_bytes:
            raise QueueFullError(
                f"{self.envelopes} envelopes ({self.bytes} bytes) wait for {peer} already; at "
                f"most {limits.queue_envelopes} ({limits.queue_bytes} bytes) may: it reads too "
                "slowly, send less or drop it"
            )
        lane = Lane.CONTROL if size <= MAX_CONTROL_ENVELOPE_BYTES else Lane.BULK
        item = Outbound(
            parts=freeze(parts), size=size, tag=tag, number=self._next_number, lane=lane
        )
        self._next_number += 1
        self._lanes[lane].append(item)
        self.envelopes += 1
        self.bytes += size
        if self._idle.is_set():
            self._idle = trio.Event()
        return lane

    def take(self, lane: Lane) -> Outbound | None:
        """The next envelope of a lane; it stays charged until `done` or `give_back`."""
        queue = self._lanes[lane]
        return queue.popleft() if queue else None

    def give_back(self, item: Outbound) -> None:
        """Put an envelope that was taken and not written at the head of its lane again."""
        self._lanes[item.lane].appendleft(item)

    def done(self, item: Outbound) -> None:
        """Release an envelope that was taken."""
        self.envelopes -= 1
        self.bytes -= item.size
        if not self.envelopes:
            self._idle.set()

    def drain(self) -> list[Outbound]:
        """Take out and release all that wait, in the order of their numbers."""
        items = sorted((i for q in self._lanes.values() for i in q), key=lambda i: i.number)
        for queue in self._lanes.values():
            queue.clear()
        for item in items:
            self.done(item)
        return items

    async def wait_idle(self) -> None:
        """Return when nothing waits and nothing is in flight."""
        await self._idle.wait()
