"""The receiving side of a peer: its messages to us, across all its connections.

Rule: a receiver outlives its connections. It knows the next number of each lane, so that no message
is delivered twice, and keeps the received part of a large one. One link at a time feeds it:
`announce` starts a round on that link, and the sender repeats the round (START) before its
messages. Data of an older round or on another link is ignored, and will be resent. Messages for
which the inbox has no room, or which the sender's rate does not allow yet, are held here, within
the peer's window, and not acknowledged. A large message whose room went to a faster one is dropped
and requested again. A sender may skip numbers of messages that it has given up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters, EnvelopeReceived
from bbnode.transport.errors import FrameError
from bbnode.transport.inbox import Inbox, Meter, Transfer
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import HEADER_BYTES, Lane, Open, Position, Resume
from bbnode.transport.links.mappings import allocate

# The shortest wait of a held message, in seconds, so that the rate is not polled constantly.
_RATE_WAIT_S: Final = 0.05

# An acknowledgement is due after this fraction of a window: a quarter.
_ACK_PART: Final = 4

# Size of an envelope in bytes -> seconds until it is admitted: 0 is now, `math.inf` never.
Admit = Callable[[int], float]


class WindowIgnoredError(FrameError):
    """The peer sends more than its window allows."""


@dataclass(slots=True, eq=False)
class Partial:
    """A large message that is being received; without a transfer its bytes are discarded."""

    number: int
    total: int
    meter: Meter
    transfer: Transfer | None = None
    buffer: memoryview | None = None
    stored: int = 0


@dataclass(slots=True)
class HeldSmall:
    """A held small message; `admitted` once the authorizer has admitted it."""

    number: int
    data: bytes
    admitted: bool = False


@dataclass(slots=True)
class HeldOpen:
    """A held OPEN; `admitted` is the authorizer's decision, None before it was asked."""

    number: int
    opening: Open
    admitted: bool | None = None
    # Time at which it first found no room; inf if it may not take room from others.
    waits_since: float | None = None


@dataclass(slots=True)
class HeldBytes:
    """Held bytes of a CHUNK."""

    number: int
    data: bytes


@dataclass(slots=True)
class LaneState:
    """One lane of a sender: its window, the pending acknowledgement, and held messages."""

    window: int
    # True if an acknowledgement is due; bytes accepted since the last one.
    due: bool = False
    since: int = 0
    # The next expected number.
    next: int = 1
    held: deque[Any] = field(default_factory=deque)
    held_bytes: int = 0
    # The time until which the sender's rate delays a message.
    not_before: float = 0.0

    def accept(self, size: int) -> None:
        """Count accepted bytes; enough of them make an acknowledgement due."""
        self.since += size
        if self.since * _ACK_PART >= self.window:
            self.due = True

    def wait_s(self, size: int, admit: Admit, clock: Callable[[], float]) -> float:
        """Return the seconds that a message has to wait; `admit` is not asked during a wait."""
        if self.not_before and (left_s := self.not_before - clock()) > 0:
            return left_s
        wait_s = admit(size)
        if 0 < wait_s < math.inf:
            wait_s = max(wait_s, _RATE_WAIT_S)
            self.not_before = clock() + wait_s
        return wait_s

    def hold(self, item: object, size: int, lane: Lane) -> None:
        """Hold an item until there is room for it; raises WindowIgnoredError."""
        self.held.append(item)
        self.held_bytes += size
        # Tolerance for OPENs on the bulk lane, which senders do not charge; 64 KiB follow each.
        window = self.window if lane is Lane.CONTROL else self.window + self.window // 8
        if self.held_bytes > window:
            raise WindowIgnoredError(
                f"the peer ignores its window: {self.held_bytes} bytes are held on the "
                f"{lane.label} lane, where {window} may be"
            )

    def drop_held(self, following: int) -> None:
        """Drop all held messages, which will be resent from the number `following` on."""
        self.held.clear()
        self.held_bytes, self.next = 0, following


@dataclass(slots=True, eq=False)
class Receiver:
    """The messages of one sender, by its numbering."""

    peer: PeerId
    exchange: int
    record: int
    limits: TransportLimits
    inbox: Inbox
    counters: Counters
    admit: Admit
    address: Multiaddr
    # Called when a large message has lost its room to a faster one.
    on_evicted: Callable[[], None]
    # Called when an item is held to wait for room in the inbox.
    on_held: Callable[[], object] = lambda: None
    round: int = 0
    duplicates: int = 0
    # Bytes accepted of large messages; only grows.
    progress: int = 0
    control: LaneState = field(init=False)
    bulk: LaneState = field(init=False)
    lanes: dict[Lane, LaneState] = field(init=False)
    # The number of the first small message that is not in the inbox yet.
    _accepted: int = 1
    _partial: Partial | None = None
    # Number of the large message that lost its room last; it may not evict another in turn.
    _evicted_number: int = 0
    _pumping: bool = False

    def __post_init__(self) -> None:
        self.control = LaneState(self.limits.control_window_bytes)
        self.bulk = LaneState(self.limits.bulk_window_bytes)
        self.lanes = {Lane.CONTROL: self.control, Lane.BULK: self.bulk}

    # -- state ------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Received bytes for which the inbox has no room."""
        return self.control.held_bytes + self.bulk.held_bytes

    @property
    def receiving(self) -> bool:
        """True while more of a large message should be arriving."""
        return self._partial is not None and not self.bulk.held

    @property
    def too_slow(self) -> bool:
        """True if a large message arrives more slowly than it has to."""
        partial = self._partial
        if partial is None or not self.receiving:
            return False
        return partial.meter.is_below(self.limits.slow_bytes_per_s, self.inbox.clock())

    @property
    def pump_at(self) -> float:
        """The time to `pump` even if no room was made; `math.inf` if nothing is held."""
        waiting = [lane for lane in self.lanes.values() if lane.held]
        if not waiting:
            return math.inf
        now = self.inbox.clock()
        ends = [lane.not_before for lane in waiting if lane.not_before > now]
        return min([now + self.limits.room_check_s, *ends])

    def discount(self, seconds: float) -> None:
        """Leave this time out: our own process was suspended."""
        if self._partial is not None:
            self._partial.meter.discount(seconds)

    def position(self, lane: Lane) -> Position:
        """Return the position up to which a lane was accepted; its sender may forget all before."""
        if lane is Lane.CONTROL:
            return Position(number=self._accepted)
        if self._partial is not None:
            return Position(number=self._partial.number, offset=self._partial.stored)
        first = next((each for each in self.bulk.held if isinstance(each, HeldOpen)), None)
        return Position(number=self.bulk.next if first is None else first.number)

    # -- links ------------------------------------------------------------------------------

    def announce(self) -> Resume:
        """Start a round; return the RESUME to send on the link that feeds it."""
        self.rewind()
        self._attach(attached=True)
        self.round += 1
        return Resume(
            round=self.round,
            record=self.record,
            control=self.position(Lane.CONTROL),
            bulk=self.position(Lane.BULK),
            control_window=self.limits.control_window_bytes,
            bulk_window=self.limits.bulk_window_bytes,
        )

    def rewind(self) -> None:
        """Drop unaccepted data of a lost link, which will be resent."""
        for kind, lane in self.lanes.items():
            lane.drop_held(self.position(kind).number)
            lane.due, lane.since = False, 0
        self._attach(attached=False)

    def _attach(self, *, attached: bool) -> None:
        """Record whether a link can deliver more: time without one does not count."""
        partial = self._partial
        if partial is None:
            return
        if partial.transfer is not None:
            partial.transfer.attached = attached
        if attached:
            partial.meter.go_on(self.inbox.clock())
        else:
            partial.meter.pause(self.inbox.clock())

    def drop_partial(self) -> None:
        """Release the memory of an incomplete message; it starts again when it is resent."""
        partial, self._partial = self._partial, None
        if partial is not None and partial.transfer is not None:
            partial.buffer = None
            self.inbox.drop(partial.transfer)

    def _evicted(self) -> None:
        """Request a message again from its beginning, since the inbox took its room."""
        partial, self._partial = self._partial, None
        if partial is None:
            return
        partial.buffer = None
        self._evicted_number = partial.number
        self.counters.add("inbound.evicted")
        # All held items follow it on its lane.
        self.bulk.drop_held(partial.number)
        self.on_evicted()

    # -- small messages ---------------------------------------------------------------------

    def small(self, number: int, data: bytes) -> bool:
        """Accept a small message, or hold it; return False for a duplicate. Raises FrameError."""
        lane = self.control
        self._check_size(len(data))
        if number < lane.next:
            self._duplicate(lane)
            return False
        lane.next = number + 1
        held = HeldSmall(number, data)
        if lane.held or not self._take_small(held):
            self._hold(held, len(data) + HEADER_BYTES, Lane.CONTROL)
        return True

    def _take_small(self, held: HeldSmall) -> bool:
        """Deliver a message to the inbox, or drop a refused one; return False if it must wait."""
        lane, size = self.control, len(held.data)
        if not held.admitted:
            wait_s = lane.wait_s(size, self.admit, self.inbox.clock)
            if 0 < wait_s < math.inf:
                self.counters.add("inbound.delayed")
                return False
            if wait_s == math.inf:
                self._accepted = held.number + 1
                lane.accept(HEADER_BYTES)
                return True
            held.admitted = True
        if not self.inbox.offer(EnvelopeReceived(self.peer, held.data, self.address)):
            return False
        self.counters.add("inbound.envelopes")
        self._accepted = held.number + 1
        lane.accept(size + HEADER_BYTES)
        return True

    # -- large messages ---------------------------------------------------------------------

    def open(self, number: int, opening: Open) -> None:
        """Start or continue a large message; raises FrameError."""
        self._check_size(opening.total)
        lane, partial = self.bulk, self._partial
        if number < lane.next and (partial is None or partial.number != number):
            self._duplicate(lane)
            return
        lane.next = number + 1
        held = HeldOpen(number, opening)
        if lane.held or not self._open(held):
            self._hold(held, HEADER_BYTES, Lane.BULK)

    def _open(self, held: HeldOpen) -> bool:
        """Prepare to receive the bytes of a message; return False if it has to wait."""
        number, total, offset = held.number, held.opening.total, held.opening.offset
        partial = self._partial
        if partial is not None and partial.number == number:
            if total != partial.total or offset > partial.stored:
                raise FrameError(
                    f"message {number} continues at byte {offset} of {total}; "
                    f"{partial.stored} of {partial.total} have arrived"
                )
            partial.stored = offset
            return True
        if offset:
            raise FrameError(f"message {number} continues at byte {offset}; nothing of it arrived")
        self.drop_partial()
        if held.admitted is None:
            wait_s = self.bulk.wait_s(total, self.admit, self.inbox.clock)
            if 0 < wait_s < math.inf:
                self.counters.add("inbound.delayed")
                return False
            held.admitted = wait_s == 0
        if not held.admitted:
            self._partial = Partial(number, total, self._meter())
            return True
        now = self.inbox.clock()
        if held.waits_since is None:
            held.waits_since = math.inf if number == self._evicted_number else now
        transfer = self.inbox.begin(self.peer, total, self._evicted, now - held.waits_since)
        if transfer is None:
            return False
        try:
            buffer = allocate(total, held.opening.anchor)
        except (MemoryError, OSError):
            self.inbox.drop(transfer)
            self.counters.add("inbound.unallocated")
            self._partial = Partial(number, total, self._meter())
            return True
        self._partial = Partial(number, total, transfer.meter, transfer, buffer)
        return True

    def _meter(self) -> Meter:
        return Meter(begun_at=self.inbox.clock(), span_s=self.limits.slow_s)

    def chunk(self, number: int, data: memoryview) -> None:
        """Accept the next bytes of a large message, or hold them; raises FrameError."""
        if self.bulk.held or not self._store(number, data):
            self._hold(HeldBytes(number, bytes(data)), len(data), Lane.BULK)
            if self._partial is not None:
                self._partial.meter.pause(self.inbox.clock())

    def _store(self, number: int, data: memoryview | bytes) -> bool:
        """Store received bytes; return False if they have to wait for room."""
        partial = self._partial
        if partial is None or partial.number != number:
            if number < self.bulk.next:
                return True  # the rest of a duplicate
            raise FrameError(f"a part of message {number}, which was not opened")
        end = partial.stored + len(data)
        if end > partial.total:
            raise FrameError(f"message {number} exceeds the {partial.total} bytes it announced")
        transfer = partial.transfer
        if transfer is not None and not self.inbox.grow(transfer, end):
            return False
        if partial.buffer is not None:
            partial.buffer[partial.stored : end] = data
        partial.stored = end
        partial.meter.add(len(data), self.inbox.clock())
        self.progress += len(data)
        self.bulk.accept(len(data))
        if end < partial.total:
            return True
        self._partial = None
        self.bulk.due = True
        if transfer is not None and partial.buffer is not None:
            self.counters.add("inbound.envelopes")
            whole = partial.buffer.toreadonly()
            self.inbox.deliver(
                transfer,
                EnvelopeReceived(self.peer, whole, self.address),
            )
        return True

    def _hold(self, item: object, size: int, lane: Lane) -> None:
        self.on_held()
        self.lanes[lane].hold(item, size, lane)

    # -- room -------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Accept as many held items as there is room for; return True if there were any."""
        if self._pumping:
            return False  # called back for room that this very pump has made
        self._pumping = True
        try:
            return self._pump()
        finally:
            self._pumping = False

    def _pump(self) -> bool:
        before, small, bulk = self.held_bytes, self.control, self.bulk
        while small.held and self._take_small(small.held[0]):
            small.held_bytes -= len(small.held.popleft().data) + HEADER_BYTES
            if not small.held:
                self._accepted = small.next
        while bulk.held:
            each = bulk.held[0]
            if isinstance(each, HeldBytes):
                taken, size = self._store(each.number, each.data), len(each.data)
            else:
                taken, size = self._open(each), HEADER_BYTES
            if not taken:
                break
            bulk.held.popleft()
            bulk.held_bytes -= size
        if self._partial is not None:
            meter, now = self._partial.meter, self.inbox.clock()
            meter.pause(now) if bulk.held else meter.go_on(now)
        return self.held_bytes < before

    def _duplicate(self, lane: LaneState) -> None:
        # The sender has missed our acknowledgement: repeat it.
        self.duplicates += 1
        self.counters.add("inbound.duplicates")
        lane.due = True

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_message_bytes:
            raise FrameError(
                f"a message of {size} bytes; at most {self.limits.max_message_bytes} are taken"
            )
