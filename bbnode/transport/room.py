"""How fast a large message comes, and what it takes of the inbox meanwhile.

Rule: a message is charged for the memory that it has filled, never for what it announces. Only
time in which its sender could have sent counts: not while we held its bytes, not while its
connection was gone, not while this process stood still.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bbnode.ir.caps import ROOM_STEP_BYTES
from bbnode.ir.peer import PeerId

# A rate is taken over no less than this: a first chunk says nothing yet.
_LEAST_SPAN_S: Final = 1.0
# Until then a message counts as if all of it came soon; so long does a slow start of TCP take.
FRESH_S: Final = 2.0
# What will come within this, at the rate of now, is not given to another message. As long as an
# honest burst of the largest messages takes; the rest of a slow one may wait for room.
HORIZON_S: Final = 10.0
# One that will take longer still, and has had as long, makes room for one that has waited for
# `HORIZON_S`: else a few that are just fast enough would keep the room for hours.
TEDIOUS_S: Final = 60.0

_SERIAL = itertools.count()


class Room(enum.Enum):
    """The kinds of message, which have room of their own each."""

    # Whole when it comes.
    SMALL = "small"
    # Comes in parts.
    BULK = "bulk"
    # Larger than the share of a peer.
    LARGE = "large"


# How full the inbox may become by a message of this kind, from a peer that is known or not, in
# sixteenths of `inbox_bytes`. So large ones can't keep small ones out, nor strangers those who are
# known: the difference is kept for whoever has the higher mark.
FILL_SIXTEENTHS: Final[dict[tuple[Room, bool], int]] = {
    (Room.SMALL, True): 16,
    (Room.SMALL, False): 15,
    (Room.BULK, True): 14,
    (Room.BULK, False): 8,
}


@dataclass(slots=True)
class Meter:
    """The rate of one transfer over the last one or two spans of `span_s` in which it could move.

    All times are those of the caller's clock, in seconds.
    """

    begun_at: float
    span_s: float
    moved: int = 0
    # Time that does not count, and since when it has not been counting.
    _lost_s: float = 0.0
    _paused_at: float | None = None
    # Two marks: counted time, and bytes moved by then.
    _older: tuple[float, int] = (0.0, 0)
    _newer: tuple[float, int] = (0.0, 0)

    def counted_s(self, now: float) -> float:
        """Seconds since the beginning that count."""
        return (now if self._paused_at is None else self._paused_at) - self.begun_at - self._lost_s

    def pause(self, now: float) -> None:
        """From now on time does not count."""
        if self._paused_at is None:
            self._paused_at = now

    def go_on(self, now: float) -> None:
        """Time counts again."""
        if self._paused_at is not None:
            self._lost_s += now - self._paused_at
            self._paused_at = None

    def excuse(self, seconds: float) -> None:
        """So much of the time that counted was ours."""
        if self._paused_at is None:
            self._lost_s += seconds

    def add(self, size: int, now: float) -> None:
        """So many bytes came."""
        self.moved += size
        self._roll(self.counted_s(now))

    def bytes_per_s(self, now: float) -> float:
        """The rate of late."""
        counted = self.counted_s(now)
        self._roll(counted)
        at, moved = self._older
        return (self.moved - moved) / max(counted - at, _LEAST_SPAN_S)

    def is_below(self, bytes_per_s: float, now: float) -> bool:
        """Whether it has been slower than that, and had the time to show it."""
        return self.counted_s(now) >= 2 * self.span_s and self.bytes_per_s(now) < bytes_per_s

    def _roll(self, counted: float) -> None:
        if counted - self._newer[0] >= self.span_s:
            self._older, self._newer = self._newer, (counted, self.moved)


@dataclass(slots=True, eq=False)
class Claim:
    """A large message that is being received; made by `Inbox.begin`."""

    peer: PeerId
    total: int
    room: Room
    known: bool
    meter: Meter
    # Told when the room was taken back: nothing of the message is kept.
    evicted: Callable[[], None]
    # Bytes of the inbox that it has.
    charged: int = 0
    # Whether there is a connection that could bring more.
    attached: bool = True
    _serial: int = field(default_factory=lambda: next(_SERIAL))

    def wants(self, end: int) -> int:
        """Bytes that it has to have when it is written up to there."""
        return min(self.total, -(-end // ROOM_STEP_BYTES) * ROOM_STEP_BYTES)

    def expected(self, now: float) -> int:
        """Bytes that it will have soon."""
        if not self.attached:
            return self.charged
        if self.meter.counted_s(now) < FRESH_S:
            return self.total
        return min(self.total, self.charged + int(self.meter.bytes_per_s(now) * HORIZON_S))

    def is_tedious(self, now: float) -> bool:
        """Whether it takes, and will take, so long that others need not wait for it."""
        left_s = (self.total - self.charged) / max(self.meter.bytes_per_s(now), 1.0)
        return self.meter.counted_s(now) >= TEDIOUS_S and left_s >= TEDIOUS_S

    def rank(self, now: float) -> tuple[bool, float, int]:
        """Of two that can't both have room the lower one goes: the slower, then the older."""
        rate = self.meter.bytes_per_s(now) if self.attached else -1.0
        return self.known, rate, self._serial
