"""The inbox: events on their way to the driver.

Rule: envelopes are bounded per peer and in all, in number and in bytes, and refused when there
is no room; notices (all other events) always go in, and `crowded` says when so many lie
unread that no new connection should be taken. A large message is charged as it comes (`room`);
when room is short the slowest of those that are being received is taken back, so that the
others come whole. The one that ranks highest can always go on: nothing is stuck. See `backend`
for what becomes of the refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from bbnode.ir.peer import PeerId
from bbnode.transport.base import EnvelopeReceived, TransportEvent
from bbnode.transport.limits import TransportLimits
from bbnode.transport.room import FILL_SIXTEENTHS, HORIZON_S, Claim, Meter, Room


@dataclass(slots=True)
class _Share:
    """What one peer has lying in the inbox, unread or being received."""

    envelopes: int = 0
    # By kind, announced bytes: of its own share a peer takes what it likes, in its own time.
    small: int = 0
    bulk: int = 0
    # At most one.
    large: int = 0


class Inbox:
    """The one EventStream of a backend."""

    def __init__(
        self, limits: TransportLimits, *, clock: Callable[[], float] = trio.current_time
    ) -> None:
        """`clock` gives seconds that never go back."""
        self._limits = limits
        self.clock = clock
        # With the kind of room that an envelope has; None of the others.
        self._events: deque[tuple[TransportEvent, Room | None]] = deque()
        self._arrived = trio.Event()
        self._shares: dict[PeerId, _Share] = {}
        self._claims: dict[Claim, None] = {}
        # What lies unread and what is being received, without and with only the large ones.
        self._unread = self._received = 0
        self._large_unread = self._large_received = 0
        self._envelopes = 0
        self._notices = 0
        self._closed = False
        # Called with the peer after room was made.
        self.on_room: Callable[[PeerId], None] | None = None
        # Whether a peer is known for good: it gets room that is kept from strangers.
        self.is_known: Callable[[PeerId], bool] = lambda _peer: True
        # A peer's share, and so the largest message that is not a large one.
        self._largest = min(limits.inbox_bytes_per_peer, limits.inbox_bytes)
        self._marks = {
            (room, known): limits.inbox_bytes * sixteenths // 16
            for (room, known), sixteenths in FILL_SIXTEENTHS.items()
        }
        for known in (True, False):
            # One message has to fit, or it would wait for ever.
            for room in (Room.SMALL, Room.BULK):
                self._marks[room, known] = max(self._marks[room, known], self._largest)

    @property
    def crowded(self) -> bool:
        """Whether too many notices lie unread to take new connections."""
        return self._notices >= self._limits.inbox_notices

    @property
    def envelope_bytes(self) -> int:
        """Bytes of all envelopes that lie unread."""
        return self._unread + self._large_unread

    @property
    def partial_bytes(self) -> int:
        """Bytes charged for the messages that are being received."""
        return self._received + self._large_received

    @property
    def envelopes(self) -> int:
        """Envelopes that lie unread."""
        return self._envelopes

    @property
    def notices(self) -> int:
        """Other events that lie unread."""
        return self._notices

    def notify(self, event: TransportEvent) -> None:
        """Put in an event that is not an envelope; dropped when nobody reads any more."""
        if self._closed:
            return
        self._notices += 1
        self._append(event, None)

    def offer(self, event: EnvelopeReceived) -> bool:
        """Put in an envelope that came whole; False when there is no room."""
        peer, size = event.peer, len(event.data)
        share = self._share_for(peer)
        if share is None:
            return False
        if size > self._largest:
            if share.large or (self._large_used and not self._large_fits(self._large_used, size)):
                return False
            share.large = size
            self._large_unread += size
            room = Room.LARGE
        else:
            if share.small + size > self._limits.inbox_bytes_per_peer:
                return False
            filled = self._used + size
            if filled > self._marks[Room.SMALL, False] and (
                filled > self._marks[Room.SMALL, True] or not self.is_known(peer)
            ):
                return False
            share.small += size
            self._unread += size
            room = Room.SMALL
        share.envelopes += 1
        self._shares[peer] = share
        self._put(event, room)
        return True

    # -- messages that come in parts ----------------------------------------------------------

    def begin(
        self, peer: PeerId, total: int, evicted: Callable[[], None], waited_s: float = 0.0
    ) -> Claim | None:
        """Take up a message of `total` bytes; None when its bytes would not find room.

        Nothing is charged yet. `evicted` is called when its room was taken back since. `waited_s`
        is for how long it has been refused.
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
        claim = Claim(
            peer=peer,
            total=total,
            room=Room.LARGE if large else Room.BULK,
            known=self.is_known(peer),
            meter=Meter(begun_at=now, span_s=self._limits.slow_s),
            evicted=evicted,
        )
        if not self._make_fit(claim, now, waited_s):
            return None
        # It may have gone with the last message of its peer.
        share = self._shares.setdefault(peer, share)
        share.envelopes += 1
        if large:
            share.large = total
        else:
            share.bulk += total
        self._claims[claim] = None
        return claim

    def grow(self, claim: Claim, end: int) -> bool:
        """Charge a message for its first `end` bytes; False when it has to wait for room."""
        more = claim.wants(end) - claim.charged
        if more <= 0:
            return True
        now = self.clock()
        while not self._fits(claim, more):
            received = self._large_received if claim.room is Room.LARGE else self._received
            if self._fits(claim, more, received):
                return False  # the driver makes room
            victim = self._lowest(claim, now)
            if victim is None:
                return False
            self._evict(victim)
        self._charge(claim, more)
        return True

    def deliver(self, claim: Claim, event: EnvelopeReceived) -> None:
        """Put in a message that has come whole; all of it is charged."""
        size = claim.charged
        self._charge(claim, -size)
        del self._claims[claim]
        if claim.room is Room.LARGE:
            self._large_unread += size
        else:
            self._unread += size
        self._put(event, claim.room)

    def drop(self, claim: Claim) -> None:
        """A message is not received any more."""
        self._forget(claim)
        if self.on_room is not None:
            self.on_room(claim.peer)

    def close(self) -> None:
        """No more events; what lies there can still be taken."""
        self._closed = True
        self._arrived.set()

    async def receive(self) -> TransportEvent:
        """The next event; raises trio.EndOfChannel after `close`, when all is taken."""
        await trio.lowlevel.checkpoint()
        while not self._events:
            if self._closed:
                raise trio.EndOfChannel
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> TransportEvent:
        """The next event; raises trio.WouldBlock, or trio.EndOfChannel after `close`."""
        if not self._events:
            raise trio.EndOfChannel if self._closed else trio.WouldBlock
        event, room = self._events.popleft()
        if room is not None and isinstance(event, EnvelopeReceived):
            self._envelopes -= 1
            self._take_out(event, room)
            if self.on_room is not None:
                self.on_room(event.peer)
        else:
            self._notices -= 1
        return event

    # -- inside --------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        return self._unread + self._received

    @property
    def _large_used(self) -> int:
        return self._large_unread + self._large_received

    def _share_for(self, peer: PeerId) -> _Share | None:
        """The share of a peer that may have one envelope more."""
        share = self._shares.get(peer) or _Share()
        return share if share.envelopes < self._limits.inbox_envelopes_per_peer else None

    def _put(self, event: EnvelopeReceived, room: Room) -> None:
        if self._closed:
            self._take_out(event, room)
            return
        self._envelopes += 1
        self._append(event, room)

    def _append(self, event: TransportEvent, room: Room | None) -> None:
        self._events.append((event, room))
        self._arrived.set()

    def _take_out(self, event: EnvelopeReceived, room: Room) -> None:
        size = len(event.data)
        if room is Room.LARGE:
            self._large_unread -= size
        else:
            self._unread -= size
        self._give_back(event.peer, room, size)

    def _give_back(self, peer: PeerId, room: Room, size: int) -> None:
        share = self._shares[peer]
        share.envelopes -= 1
        if room is Room.LARGE:
            share.large = 0
        elif room is Room.BULK:
            share.bulk -= size
        else:
            share.small -= size
        if not share.envelopes:
            del self._shares[peer]

    def _large_fits(self, others: int, size: int) -> bool:
        """The first is always taken: nobody else's small ones may keep it out for ever."""
        return not others or others + size <= self._limits.inbox_large_bytes

    def _make_fit(self, claim: Claim, now: float, waited_s: float) -> bool:
        """Have room for all of a new message, as far as can be said now.

        Those that are slower than they have to be make room, the lowest first, if that helps.
        """
        soon = sum(each.expected(now) for each in self._claims if each.room is claim.room)
        if self._will_fit(claim, soon):
            return True
        slow = self._slow_ones(claim, now, tedious=waited_s >= HORIZON_S)
        if not self._will_fit(claim, soon - sum(each.expected(now) for each in slow)):
            return False
        for each in slow:
            soon -= each.expected(now)
            self._evict(each)
            if self._will_fit(claim, soon):
                break
        return True

    def _will_fit(self, claim: Claim, soon: int) -> bool:
        """Whether all of it fits beside what will have come of others soon."""
        if claim.room is Room.LARGE:
            return self._large_fits(self._large_unread + soon, claim.total)
        return self._unread + soon + claim.total <= self._marks[Room.BULK, claim.known]

    def _slow_ones(self, claim: Claim, now: float, *, tedious: bool) -> list[Claim]:
        least = self._limits.slow_bytes_per_s
        slow = [
            each
            for each in self._claims
            if each.room is claim.room
            and each.known <= claim.known
            and (
                not each.attached
                or each.meter.is_below(least, now)
                or (tedious and each.is_tedious(now))
            )
        ]
        return sorted(slow, key=lambda each: each.rank(now))

    def _fits(self, claim: Claim, more: int, used: int | None = None) -> bool:
        """Whether `more` bytes fit beside what is used, which is by default what is there now."""
        if claim.room is Room.LARGE:
            used = self._large_used if used is None else used
            return self._large_fits(used - claim.charged, claim.charged + more)
        used = self._used if used is None else used
        return used + more <= self._marks[Room.BULK, claim.known]

    def _lowest(self, claim: Claim, now: float) -> Claim | None:
        """The lowest of those that rank lower and have any room."""
        rivals = [each for each in self._claims if each.room is claim.room and each.charged]
        lowest = min(rivals, key=lambda each: each.rank(now), default=claim)
        return lowest if lowest.rank(now) < claim.rank(now) else None

    def _charge(self, claim: Claim, more: int) -> None:
        claim.charged += more
        if claim.room is Room.LARGE:
            self._large_received += more
        else:
            self._received += more

    def _forget(self, claim: Claim) -> None:
        self._charge(claim, -claim.charged)
        del self._claims[claim]
        self._give_back(claim.peer, claim.room, claim.total)

    def _evict(self, claim: Claim) -> None:
        # The room is for whoever asked: others are not told of it.
        self._forget(claim)
        claim.evicted()
