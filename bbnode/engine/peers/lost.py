"""Peers whose connection was lost while somebody waits for their answers.

Rule: a peer that is back within the grace was only away, and is waited for as before. One that is
not is given up in every request that was open when its connection was lost. A grace of None gives
nobody up: their requests wait until their deadlines.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine.empty import EMPTY
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    ARMED,
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
)
from bbnode.ir.peer import PeerId


class LostPeer:
    """One such peer, since when, and the reason that was told."""

    __slots__ = ("peer", "reason", "since_ns", "timer")

    def __init__(self, peer: PeerId, reason: str, since_ns: int, timer: Timer) -> None:
        self.peer = peer
        self.reason = reason
        self.since_ns = since_ns
        self.timer = timer


_ROWS = many(RowForm(LostPeer, peer=PEER, reason=PLAIN, since_ns=PLAIN, timer=ARMED), list)


class LostPeers:
    """The lost peers of one node: `away`, by number, for others to look at."""

    __slots__ = (
        "_grace_ns",
        "_next",
        "_numbers",
        "_scheduler",
        "away",
    )

    def __init__(self, scheduler: Scheduler, grace_ms: int | None) -> None:
        self._scheduler = scheduler
        self._grace_ns = None if grace_ms is None else grace_ms * 1_000_000
        self.away: dict[int, LostPeer] = EMPTY
        self._numbers: dict[PeerId, int] = EMPTY
        self._next = 0

    def __len__(self) -> int:
        return len(self.away)

    def lose(self, peer: PeerId, reason: str, now_ns: int) -> None:
        """Begin the grace of a peer that somebody waits for."""
        if self._grace_ns is None or peer in self._numbers:
            return
        self._next += 1
        due_ns = now_ns + self._grace_ns
        timer = self._scheduler.set(due_ns, TimerKind.PEER_LOST, self._next)
        self._add(self._next, LostPeer(peer, reason, now_ns, timer))

    def peers(self) -> tuple[PeerId, ...]:
        """Return all of them, in the order of their loss."""
        return tuple(self._numbers)

    def back(self, peer: PeerId) -> None:
        """End the grace of a peer that is connected again, or not awaited any more."""
        number = self._numbers.pop(peer, None)
        if number is not None:
            self._scheduler.cancel(self.away.pop(number).timer)

    def take(self, number: int) -> LostPeer:
        """Remove and return a peer whose grace is over."""
        lost = self.away.pop(number)
        del self._numbers[lost.peer]
        return lost

    def _add(self, number: int, lost: LostPeer) -> None:
        if self.away is EMPTY:
            self.away, self._numbers = {}, {}
        self.away[number] = lost
        self._numbers[lost.peer] = number

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all of them, by number."""
        return [self._next, list(self.away), _ROWS.save(self.away.values(), writer)]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned, after the scheduler."""
        self._next, numbers, rows = plain
        for number, lost in zip(numbers, _ROWS.load(rows, reader), strict=True):
            self._add(number, lost)
