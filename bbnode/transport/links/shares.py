"""The CPU cost of a peer's traffic, and the share of a core that its connections may use.

Rule: work that a connection causes has a price in microseconds of a core (the constants below,
measured and rounded up), which it owes once the work is done. A connection in debt is not read
until time has paid the debt, so that TCP makes its peer wait. Data within its windows is free,
since the windows and the inbox bound it. All connections without standing share one account and
take turns in the order of their requests, with one pass of all other tasks between two turns. The
connection of a member, of a known peer or of one that we dialled has its own account. Meaningless
frames (unsolicited answers, frames of no stream) are counted separately: too many are a flood,
which ends the connection. Opening streams is ordinary work: a peer that opens them in a burst
waits for each, and is not cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.limits import TransportLimits

_US_PER_S: Final = 1_000_000

# A reader's turn, whatever it reads; an empty packet; an empty frame.
TURN_US: Final = 20
PACKET_US: Final = 2
FRAME_US: Final = 1
# An answer of the muxer, which is encrypted and sent.
ANSWER_US: Final = 3
# Data for a task that has to wake up; data that is handled in the same turn.
READ_DATA_US: Final = 30
FED_DATA_US: Final = 5
# Bytes of data that offset one of these microseconds, so that a large frame is free.
PAYING_BYTES: Final = 256
# Bytes decrypted in vain that cost one microsecond.
WASTED_BYTES: Final = 1024
# Data of a stream that is gone.
LATE_DATA_US: Final = 3
# A stream: its task, its negotiation and the answer.
STREAM_US: Final = 300
# A ping of libp2p, with the turn and the frame that bring it.
PING_US: Final = 60
# A stream for a service of py-libp2p, in addition.
SERVICE_US: Final = 2_000
# A frame of a lane that brings no new message.
LANE_FRAME_US: Final = 10
# Credit for a new message, for its turn, packet and frames: messages have their own rate.
MESSAGE_PAYS_US: Final = TURN_US + PACKET_US + FRAME_US + FED_DATA_US
# A handshake; a connection, with its link, its lanes and our hello.
HANDSHAKE_US: Final = 1000
CONNECTION_US: Final = 1500

# Debts up to this amount are paid with a later turn.
_PAID_AT_ONCE_US: Final = 500

# Weights of a meaningless frame: one that may have crossed with the end of its stream, and one
# that no conforming peer sends.
LATE: Final = 1
SENSELESS: Final = 4


class Bucket:
    """A credit that grows with time up to a bound, and may be overdrawn."""

    __slots__ = ("_left", "_most", "at_s", "per_s")

    def __init__(self, per_s: float, most: float) -> None:
        self.per_s, self._most = per_s, most
        self._left, self.at_s = most, 0.0

    def take(self, amount: float, now_s: float) -> float:
        """Take `amount`, and return the balance; a debt is negative."""
        grown = self._left + max(0.0, now_s - self.at_s) * self.per_s
        self._left, self.at_s = min(self._most, grown) - amount, now_s
        return self._left

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the debt is paid; 0 without one."""
        return max(0.0, -self.take(0.0, now_s)) / self.per_s


def _core(share: float, burst_s: float) -> Bucket:
    """Return an account of microseconds that grows by `share` of a core."""
    return Bucket(share * _US_PER_S, burst_s * _US_PER_S)


class _Together:
    """The account of all connections of a kind, and the order in which they are served."""

    __slots__ = ("account", "line")

    def __init__(self, share: float, burst_s: float) -> None:
        self.account = _core(share, burst_s)
        self.line = trio.Lock()


class CoreShares:
    """The accounts of all connections of a node."""

    def __init__(
        self, limits: TransportLimits, counters: Counters, known: Callable[[PeerId], bool]
    ) -> None:
        """Create the accounts; `known` is as for `Admission`."""
        self.limits = limits
        self.counters = counters
        self.known = known
        self.strangers = _Together(limits.strangers_core, limits.strangers_burst_s)
        # Hosts that never send a hello must not delay the hellos of others.
        self.foreign = _Together(limits.foreign_core, limits.foreign_burst_s)


class CoreShare:
    """The account of one connection: call `begin`, do work that does not wait, call `end`.

    `end` must be called even if the work fails. If `is_free`, a single `pay`, which does not wait,
    replaces both: this is the usual case.
    """

    __slots__ = (
        "_idle",
        "_in_line",
        "_limits",
        "_own",
        "_peer",
        "_shares",
        "_since_s",
        "_together",
        "_waited_s",
        "_waits_since_s",
        "byte_us",
        "due_us",
        "is_admitted",
        "is_free",
        "turn_us",
    )

    def __init__(self, shares: CoreShares) -> None:
        limits = shares.limits
        self._shares = shares
        self._limits = limits
        # The PeerId of a stranger that has sent its hello, and may become known.
        self._peer: PeerId | None = None
        self._own = _core(limits.stranger_core, limits.core_burst_s)
        self._idle = Bucket(limits.idle_frames_per_s, limits.idle_frames)
        # The shared account of connections without standing, and the queue at whose head this
        # connection is, if it has its turn.
        self._together = shares.strangers
        self._in_line: trio.Lock | None = None
        # The price of a byte of data, which is 0 for all but foreign hosts.
        self.byte_us = 0.0
        # The start of the present debt; None without one.
        self._since_s: float | None = None
        # The price of the present turn so far.
        self.due_us: float = 0
        # A turn ends at this price, so that others get theirs.
        self.turn_us = limits.stranger_turn_us
        # True for a peer with standing; True while such a peer also has no debt.
        self.is_admitted = self.is_free = False
        # Seconds for which it had to wait, and the start of the present wait.
        self._waited_s = 0.0
        self._waits_since_s: float | None = None

    def admit(self) -> None:
        """Move the connection of a peer with standing to a share of its own. Idempotent."""
        if not self.is_admitted:
            self.is_admitted = self.is_free = True
            self.byte_us = 0.0
            self.turn_us = self._limits.turn_us
            self._own = _core(self._limits.member_core, self._limits.core_burst_s)

    def settle(self, peer: PeerId) -> None:
        """Admit the connection once its peer becomes known, which is checked later."""
        self._peer = peer

    def visit(self) -> None:
        """Use the account of foreign hosts from now on, where data has its price as well."""
        self._together = self._shares.foreign
        self.byte_us = self._own.per_s / self._limits.foreign_bytes_per_s

    def stay(self) -> None:
        """Use the account of strangers again, where data is free."""
        self._together, self.byte_us = self._shares.strangers, 0.0

    @property
    def active_at_s(self) -> float:
        """The time of the last received data."""
        return self._own.at_s

    def work(self, price_us: float) -> None:
        """Charge work that an honest peer may cause: too much of it waits, but is no flood."""
        self.due_us += price_us
        if self._since_s is not None:
            # The time that pays for it, and for as much overhead, does not count as a flood.
            paid_s = 2 * price_us / self._own.per_s
            self._since_s = min(self._since_s + paid_s, trio.current_time())

    def refuse_stream(self) -> None:
        """Charge a stream beyond the bound, which is reset."""
        self.due_us += ANSWER_US + LATE_DATA_US
        self._shares.counters.add("streams.too_many")

    def idle(self, weight: int) -> str:
        """Count a meaningless frame; return the reason to end the connection, or ""."""
        self.due_us += FRAME_US
        if self._idle.take(weight, trio.current_time()) >= 0:
            return ""
        return (
            f"the peer floods us with frames that mean nothing: over {self._limits.idle_frames} at "
            f"once, and {self._limits.idle_frames_per_s:g} a second"
        )

    def waited_s(self, now_s: float) -> float:
        """Return the seconds for which we made it wait, which are no delay of the peer."""
        since_s = self._waits_since_s
        return self._waited_s + (0.0 if since_s is None else now_s - since_s)

    async def begin(self, scope: trio.CancelScope | None = None) -> str:
        """Wait until the connection may work; return the reason to end it instead, or "".

        The deadline of `scope` is extended by the wait.
        """
        now_s = trio.current_time()
        if self._peer is not None and not self.is_admitted and self._shares.known(self._peer):
            self.admit()
        own_s = self._own.wait_s(now_s)
        if not own_s:
            self._since_s = None
            self.is_free = self.is_admitted
        if self.is_admitted and not own_s:
            return ""
        line = self._together.line
        if not (own_s or line.locked() or self._together.account.wait_s(now_s)):
            line.acquire_nowait()
            self._in_line = line
            return ""
        if own_s:
            self._since_s = now_s if self._since_s is None else self._since_s
            if self.is_admitted or now_s - self._since_s < self._limits.indebted_s:
                await self._wait(own_s, now_s, scope)
                return ""
            return (
                f"the peer has taken all of its share for {self._limits.indebted_s:g} s with "
                "frames that bring nothing"
            )
        await self._wait(own_s, now_s, scope)
        return ""

    async def _wait(self, own_s: float, now_s: float, scope: trio.CancelScope | None) -> None:
        """Wait until its own debt and that of all strangers is paid, and for its turn."""
        deadline_s = math.inf
        if scope is not None:
            deadline_s, scope.deadline = scope.deadline, math.inf
        self._waits_since_s = now_s
        try:
            if own_s:
                self._shares.counters.add("inbound.throttled")
                await trio.sleep(own_s)
            if not self.is_admitted:
                together = self._together
                await together.line.acquire()
                self._in_line = together.line
                all_s = together.account.wait_s(trio.current_time())
                if all_s:
                    self._shares.counters.add("inbound.throttled")
                    await trio.sleep(all_s)
        except trio.Cancelled:
            self._leave_line()
            raise
        finally:
            self._waits_since_s = None
            waited_s = trio.current_time() - now_s
            self._waited_s += waited_s
            if scope is not None:
                scope.deadline = deadline_s + waited_s

    def _leave_line(self) -> None:
        line, self._in_line = self._in_line, None
        if line is not None:
            line.release()

    def pay(self) -> None:
        """Pay for a turn, with all work for the connection since the last one."""
        self.due_us = max(0, self.due_us + TURN_US)
        if self.is_free and self.due_us < _PAID_AT_ONCE_US:
            return
        due_us, self.due_us, now_s = self.due_us, 0, trio.current_time()
        self.is_free = self._own.take(due_us, now_s) >= 0 and self.is_admitted
        if not self.is_admitted:
            self._together.account.take(due_us, now_s)

    async def end(self) -> None:
        """Pay for a turn, and pass the turn to the next in the queue."""
        self.pay()
        if self._in_line:
            # All other runnable tasks run before the next in the queue.
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._leave_line()
