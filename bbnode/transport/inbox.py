"""The inbox: events on their way to the driver.

Rule: envelopes are bounded per peer and in total, in number and in bytes, and refused without
room. Notices (all other events) are always accepted; `crowded` is True if so many are unread that
no new connection should be accepted. A large message is charged as it arrives (`grow`). If room is
short, the slowest of the messages that are being received loses its room, so that the others can
be completed. The one that ranks highest always makes progress, so nothing deadlocks. `base`
describes the fate of refused envelopes.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from bbnode.ir.caps import ROOM_STEP_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import EnvelopeReceived, TransportEvent
from bbnode.transport.limits import TransportLimits
from bbnode.transport.signals import Signal

# Minimum span of a rate: a first chunk alone is no evidence.
_LEAST_SPAN_S: Final = 1.0
# Until this age a message counts as fast, since TCP's slow start takes that long.
FRESH_S: Final = 2.0
# Room for the bytes that will arrive within this time, at the current rate, is reserved. An honest
# burst of the largest messages takes as long; the rest of a slow message may wait for room.
HORIZON_S: Final = 10.0
# A message that needs this long to finish, and has had as long, makes room for one that has waited
# for `HORIZON_S`: otherwise a few just fast enough messages would occupy the room for hours.
TEDIOUS_S: Final = 60.0

_SERIAL = itertools.count()


class SizeClass(enum.Enum):
    """The kinds of messages, each with its own share of the room."""

    # Arrives whole.
    SMALL = "small"
    # Arrives in parts.
    BULK = "bulk"
    # Larger than the share of a peer.
    LARGE = "large"


# The level to which messages of a kind, from a known peer or not, may fill the inbox, in sixteenths
# of `inbox_bytes`. So large messages can't crowd out small ones, nor strangers known peers: the
# room above a mark is reserved for the kinds with a higher one.
FILL_SIXTEENTHS: Final[dict[tuple[SizeClass, bool], int]] = {
    (SizeClass.SMALL, True): 16,
    (SizeClass.SMALL, False): 15,
    (SizeClass.BULK, True): 14,
    (SizeClass.BULK, False): 8,
}


@dataclass(slots=True)
class Meter:
    """The rate of one transfer over its last one or two spans of `span_s` of counted time.

    All times are those of the caller's clock, in seconds.
    """

    begun_at: float
    span_s: float
    moved: int = 0
    # Time that is not counted, and the start of the present pause.
    _lost_s: float = 0.0
    _paused_at: float | None = None
    # Two marks: counted time, and bytes moved by then.
    _older: tuple[float, int] = (0.0, 0)
    _newer: tuple[float, int] = (0.0, 0)

    def counted_s(self, now: float) -> float:
        """Return the counted seconds since the start."""
        return (now if self._paused_at is None else self._paused_at) - self.begun_at - self._lost_s

    def pause(self, now: float) -> None:
        """Stop counting time."""
        if self._paused_at is None:
            self._paused_at = now

    def go_on(self, now: float) -> None:
        """Count time again."""
        if self._paused_at is not None:
            self._lost_s += now - self._paused_at
            self._paused_at = None

    def discount(self, seconds: float) -> None:
        """Exclude time in which the delay was ours."""
        if self._paused_at is None:
            self._lost_s += seconds

    def add(self, size: int, now: float) -> None:
        """Count bytes that arrived."""
        self.moved += size
        self._roll(self.counted_s(now))

    def bytes_per_s(self, now: float) -> float:
        """Return the recent rate."""
        counted = self.counted_s(now)
        self._roll(counted)
        at, moved = self._older
        return (self.moved - moved) / max(counted - at, _LEAST_SPAN_S)

    def is_below(self, bytes_per_s: float, now: float) -> bool:
        """Return True if it has been slower than this for long enough to judge."""
        return self.counted_s(now) >= 2 * self.span_s and self.bytes_per_s(now) < bytes_per_s

    def _roll(self, counted: float) -> None:
        if counted - self._newer[0] >= self.span_s:
            self._older, self._newer = self._newer, (counted, self.moved)


@dataclass(slots=True, eq=False)
class Transfer:
    """A large message that is being received; created by `Inbox.begin`."""

    peer: PeerId
    total: int
    room: SizeClass
    known: bool
    meter: Meter
    # Called when the room was taken back, and with it all received bytes.
    evicted: Callable[[], None]
    # Bytes of the inbox that it occupies.
    charged: int = 0
    # True while there is a connection that could bring more.
    attached: bool = True
    _serial: int = field(default_factory=lambda: next(_SERIAL))

    def wants(self, end: int) -> int:
        """Return the further bytes to charge for its first `end` bytes."""
        return min(self.total, -(-end // ROOM_STEP_BYTES) * ROOM_STEP_BYTES)

    def expected(self, now: float) -> int:
        """Return the bytes that will have arrived within the horizon."""
        if not self.attached:
            return self.charged
        if self.meter.counted_s(now) < FRESH_S:
            return self.total
        return min(self.total, self.charged + int(self.meter.bytes_per_s(now) * HORIZON_S))

    def is_tedious(self, now: float) -> bool:
        """Return True if it is so slow that others may take its room."""
        left_s = (self.total - self.charged) / max(self.meter.bytes_per_s(now), 1.0)
        return self.meter.counted_s(now) >= TEDIOUS_S and left_s >= TEDIOUS_S

    def rank(self, now: float) -> tuple[bool, float, int]:
        """Return its rank: if room is short, the lowest (the slowest, then the oldest) goes."""
        rate = self.meter.bytes_per_s(now) if self.attached else -1.0
        return self.known, rate, self._serial


@dataclass(slots=True)
class _Share:
    """The part of the inbox that one peer occupies, unread or being received."""

    envelopes: int = 0
    # Announced bytes by kind: within its own share a peer may be slow.
    small: int = 0
    bulk: int = 0
    # At most one.
    large: int = 0


@dataclass(slots=True)
class _Pool:
    """Bytes that share a budget: unread ones, and those of messages being received."""

    unread: int = 0
    received: int = 0

    @property
    def used(self) -> int:
        return self.unread + self.received


class Inbox:
    """The queue of events for the driver: the EventStream of a transport."""

    def __init__(
        self, limits: TransportLimits, *, clock: Callable[[], float] = trio.current_time
    ) -> None:
        """Create an empty inbox; `clock` returns monotonic seconds."""
        self._limits = limits
        self.clock = clock
        # Events, with the charge of an envelope, None for others.
        self._events: deque[tuple[TransportEvent, tuple[SizeClass, _Share, int] | None]] = deque()
        self._arrived = Signal()
        self._shares: dict[PeerId, _Share] = {}
        self._transfers: dict[Transfer, None] = {}
        # Large messages have a budget of their own.
        self._shared, self._large = _Pool(), _Pool()
        # Unread envelopes and other events.
        self.envelopes = self.notices = 0
        self._closed = False
        # Called with the peer whose event was read, after room was made.
        self.on_room: Callable[[PeerId], None] | None = None
        # Returns True for a peer that may use the room that is reserved from strangers.
        self.is_known: Callable[[PeerId], bool] = lambda _peer: True
        # A peer's share, and so the largest message that is not a large one.
        self._largest = min(limits.inbox_bytes_per_peer, limits.inbox_bytes)
        self._marks = {
            (room, known): limits.inbox_bytes * sixteenths // 16
            for (room, known), sixteenths in FILL_SIXTEENTHS.items()
        }
        for known in (True, False):
            # The largest message must fit, or it would wait forever.
            for room in (SizeClass.SMALL, SizeClass.BULK):
                self._marks[room, known] = max(self._marks[room, known], self._largest)
        # Up to this level small messages of any peer are accepted.
        self._least_mark = self._marks[SizeClass.SMALL, False]

    @property
    def crowded(self) -> bool:
        """True if too many notices are unread to accept new connections."""
        return self.notices >= self._limits.inbox_notices

    @property
    def envelope_bytes(self) -> int:
        """Bytes of all unread envelopes."""
        return self._shared.unread + self._large.unread

    @property
    def partial_bytes(self) -> int:
        """Bytes charged for the messages that are being received."""
        return self._shared.received + self._large.received

    def notify(self, event: TransportEvent) -> None:
        """Add an event that is not an envelope; it is dropped after `close`."""
        if self._closed:
            return
        self.notices += 1
        self._events.append((event, None))
        self._arrived.set()

    def offer(self, event: EnvelopeReceived) -> bool:
        """Add a small envelope; return False if there is no room."""
        peer, size = event.peer, len(event.data)
        share = self._share_for(peer)
        if share is None:
            return False
        if size > self._largest:
            if share.large or (not self._large_fits(self._large.used, size)):
                return False
            share.large = size
            room, pool = SizeClass.LARGE, self._large
        else:
            if share.small + size > self._limits.inbox_bytes_per_peer:
                return False
            room, pool = SizeClass.SMALL, self._shared
            filled = pool.unread + pool.received + size
            if filled > self._least_mark and (
                filled > self._marks[SizeClass.SMALL, True] or not self.is_known(peer)
            ):
                return False
            share.small += size
        if not share.envelopes:
            self._shares[peer] = share
        share.envelopes += 1
        pool.unread += size
        self._put(event, room, share)
        return True

    def begin(
        self, peer: PeerId, total: int, evicted: Callable[[], None], waited_s: float = 0.0
    ) -> Transfer | None:
        """Start receiving a message of `total` bytes; return None if there is no room for it.

        Nothing is charged yet. `evicted` is called if it loses its room later. `waited_s` is the
        time for which it has been refused.
        """
        share = self._share_for(peer)
        if share is None:
            return None
        large = total > self._largest
        if large and share.large:
            return None
        if not large and share.bulk + total > self._limits.inbox_bytes_per_peer:
            return None
        now = self.clock()
        transfer = Transfer(
            peer=peer,
            total=total,
            room=SizeClass.LARGE if large else SizeClass.BULK,
            known=self.is_known(peer),
            meter=Meter(begun_at=now, span_s=self._limits.slow_s),
            evicted=evicted,
        )
        if not self._make_fit(transfer, now, waited_s):
            return None
        # Evictions may have dropped the share with the last message of its peer.
        share = self._shares.setdefault(peer, share)
        share.envelopes += 1
        if large:
            share.large = total
        else:
            share.bulk += total
        self._transfers[transfer] = None
        return transfer

    def grow(self, transfer: Transfer, end: int) -> bool:
        """Charge a message for its first `end` bytes; return False if it has to wait for room."""
        more = transfer.wants(end) - transfer.charged
        if more <= 0:
            return True
        now = self.clock()
        pool = self._pool(transfer.room)
        while not self._fits(transfer, more, pool.used):
            if self._fits(transfer, more, pool.received):
                return False  # the driver makes room
            victim = self._lowest(transfer, now)
            if victim is None:
                return False
            self._evict(victim)
        self._charge(transfer, more)
        return True

    def deliver(self, transfer: Transfer, event: EnvelopeReceived) -> None:
        """Add a completed message, which is fully charged."""
        size = transfer.charged
        self._charge(transfer, -size)
        del self._transfers[transfer]
        self._pool(transfer.room).unread += size
        self._put(event, transfer.room, self._shares[transfer.peer])

    def drop(self, transfer: Transfer) -> None:
        """Release the room of a message whose reception was given up."""
        self._forget(transfer)
        if self.on_room is not None:
            self.on_room(transfer.peer)

    def close(self) -> None:
        """Stop accepting events; unread ones can still be read."""
        self._closed = True
        self._arrived.set()

    async def receive(self) -> TransportEvent:
        """Return the next event; raises trio.EndOfChannel after `close`, once all are read."""
        if self._events or self._closed:
            await trio.lowlevel.checkpoint()
        while not self._events:
            if self._closed:
                raise trio.EndOfChannel
            self._arrived.clear()
            await self._arrived.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> TransportEvent:
        """Return the next event; raises trio.WouldBlock, or trio.EndOfChannel after `close`."""
        if not self._events:
            raise trio.EndOfChannel if self._closed else trio.WouldBlock
        event, charged = self._events.popleft()
        if charged is None:
            self.notices -= 1
            return event
        self.envelopes -= 1
        self._take_out(event.peer, *charged)
        if self.on_room is not None:
            self.on_room(event.peer)
        return event

    def _pool(self, room: SizeClass) -> _Pool:
        return self._large if room is SizeClass.LARGE else self._shared

    def _share_for(self, peer: PeerId) -> _Share | None:
        """Return the share of a peer, or None if it may have no further envelope."""
        share = self._shares.get(peer) or _Share()
        return share if share.envelopes < self._limits.inbox_envelopes_per_peer else None

    def _put(self, event: EnvelopeReceived, room: SizeClass, share: _Share) -> None:
        size = len(event.data)
        if self._closed:
            self._take_out(event.peer, room, share, size)
            return
        self.envelopes += 1
        self._events.append((event, (room, share, size)))
        self._arrived.set()

    def _take_out(self, peer: PeerId, room: SizeClass, share: _Share, size: int) -> None:
        self._pool(room).unread -= size
        self._give_back(peer, room, share, size)

    def _give_back(self, peer: PeerId, room: SizeClass, share: _Share, size: int) -> None:
        share.envelopes -= 1
        if room is SizeClass.LARGE:
            share.large = 0
        elif room is SizeClass.BULK:
            share.bulk -= size
        else:
            share.small -= size
        if not share.envelopes:
            del self._shares[peer]

    def _large_fits(self, others: int, size: int) -> bool:
        """Return True if it fits. The first always does, so that none waits forever."""
        return not others or others + size <= self._limits.inbox_large_bytes

    def _make_fit(self, transfer: Transfer, now: float, waited_s: float) -> bool:
        """Try to make room for all of a new message, by present rates; return True on success.

        Messages that are too slow lose their room, the lowest rank first, if that helps.
        """
        soon = sum(each.expected(now) for each in self._transfers if each.room is transfer.room)
        if self._will_fit(transfer, soon):
            return True
        slow = self._slow_ones(transfer, now, tedious=waited_s >= HORIZON_S)
        if not self._will_fit(transfer, soon - sum(each.expected(now) for each in slow)):
            return False
        for each in slow:
            soon -= each.expected(now)
            self._evict(each)
            if self._will_fit(transfer, soon):
                break
        return True

    def _will_fit(self, transfer: Transfer, soon: int) -> bool:
        """Return True if it fits together with the bytes that others will soon have received."""
        if transfer.room is SizeClass.LARGE:
            return self._large_fits(self._large.unread + soon, transfer.total)
        return (
            self._shared.unread + soon + transfer.total
            <= self._marks[SizeClass.BULK, transfer.known]
        )

    def _slow_ones(self, transfer: Transfer, now: float, *, tedious: bool) -> list[Transfer]:
        least = self._limits.slow_bytes_per_s
        slow = [
            each
            for each in self._transfers
            if each.room is transfer.room
            and each.known <= transfer.known
            and (
                not each.attached
                or each.meter.is_below(least, now)
                or (tedious and each.is_tedious(now))
            )
        ]
        return sorted(slow, key=lambda each: each.rank(now))

    def _fits(self, transfer: Transfer, more: int, used: int) -> bool:
        if transfer.room is SizeClass.LARGE:
            return self._large_fits(used - transfer.charged, transfer.charged + more)
        return used + more <= self._marks[SizeClass.BULK, transfer.known]

    def _lowest(self, transfer: Transfer, now: float) -> Transfer | None:
        """Return the lowest ranking transfer below `transfer` that occupies any room."""
        rivals = [each for each in self._transfers if each.room is transfer.room and each.charged]
        lowest = min(rivals, key=lambda each: each.rank(now), default=transfer)
        return lowest if lowest.rank(now) < transfer.rank(now) else None

    def _charge(self, transfer: Transfer, more: int) -> None:
        transfer.charged += more
        self._pool(transfer.room).received += more

    def _forget(self, transfer: Transfer) -> None:
        self._charge(transfer, -transfer.charged)
        del self._transfers[transfer]
        share = self._shares[transfer.peer]
        self._give_back(transfer.peer, transfer.room, share, transfer.total)

    def _evict(self, transfer: Transfer) -> None:
        # The room is for the message that needed it, so `on_room` is not called.
        self._forget(transfer)
        transfer.evicted()
