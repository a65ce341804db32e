"""Calls and timers of components that are pending.

Rule: a call ends once: by its answer, by its deadline, or when there can't be an answer: it could
not be sent, the peer refuses, or its connection stays lost. An answer
counts only if it comes from the peer and for the op that were asked; late, duplicate and foreign
answers are distinguished and dropped. A timer is named by (component, key), and setting one again
replaces it. Both are armed with the node's scheduler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from bbnode.engine.cohorts import ResponseStatus
from bbnode.engine.empty import EMPTY
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    ARMED,
    PEER,
    PLAIN,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
)
from bbnode.ir.caps import MAX_ENDED_REMEMBERED
from bbnode.ir.peer import PeerId


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """One request: of the component `cell_at`, to the op at `suffix` of `peer`.

    `tag` is the component's own; `envelope` is the tag of its envelope, once it was sent; `reason`
    is why there is no answer, while its component is too busy to be told.
    """

    wire_req_id: int
    cell_at: int
    tag: str
    peer: PeerId
    suffix: bytes
    opened_ns: int
    timer: Timer
    envelope: int | None = None
    reason: str = ""


_CALL: RowForm[PendingCall] = RowForm(
    PendingCall,
    wire_req_id=PLAIN,
    cell_at=PLAIN,
    tag=PLAIN,
    peer=PEER,
    suffix=PLAIN,
    opened_ns=PLAIN,
    timer=ARMED,
    envelope=PLAIN,
    reason=PLAIN,
)


class PendingCalls:
    """The calls of one node."""

    __slots__ = (
        "_ended",
        "_of_cell",
        "_of_envelope",
        "_open",
        "_scheduler",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._open: dict[int, PendingCall] = EMPTY
        self._of_cell: Counter[int] = Counter()
        self._ended: dict[int, None] = EMPTY
        self._of_envelope: dict[int, PendingCall] = EMPTY

    def __len__(self) -> int:
        return len(self._open)

    def count(self, cell_at: int) -> int:
        """Return the number of a component's calls."""
        return self._of_cell[cell_at]

    def all(self) -> list[PendingCall]:
        """Return all calls, oldest first."""
        return list(self._open.values())

    def open(self, wire_req_id: int, *, until_ns: int, **fields: Any) -> None:
        """Add a call; `fields` are the others of PendingCall."""
        timer = self._scheduler.set(until_ns, TimerKind.CALL_DEADLINE, wire_req_id)
        self._add(PendingCall(wire_req_id=wire_req_id, timer=timer, **fields))

    def answer(self, wire_req_id: int, peer: PeerId, suffix: bytes) -> PendingCall | ResponseStatus:
        """Return the call that an answer ends, or the reason to drop the answer."""
        call = self._open.get(wire_req_id)
        if call is None:
            return ResponseStatus.LATE if wire_req_id in self._ended else ResponseStatus.UNKNOWN
        if call.peer != peer or call.suffix != suffix:
            return ResponseStatus.STRANGER
        self._end(call)
        return call

    def sent(self, wire_req_id: int, envelope: int) -> None:
        """Record the envelope of a call, if the call is open."""
        call = self._open.get(wire_req_id)
        if call is not None:
            call.envelope = envelope
            self._of_envelope[envelope] = call

    def failed_in(self, envelope: int, peer: PeerId) -> PendingCall | None:
        """End the call in an envelope that brings no answer; return it, or None."""
        call = self._of_envelope.get(envelope)
        if call is None or call.peer != peer:
            return None
        self._end(call)
        return call

    def refused(self, wire_req_id: int, peer: PeerId) -> PendingCall | ResponseStatus:
        """End the call that a peer refuses and return it, or the reason to drop the refusal."""
        call = self._open.get(wire_req_id)
        if call is None:
            return ResponseStatus.LATE if wire_req_id in self._ended else ResponseStatus.UNKNOWN
        if call.peer != peer:
            return ResponseStatus.STRANGER
        if call.reason:
            return ResponseStatus.DUPLICATE
        self._end(call)
        return call

    def awaits(self, peer: PeerId) -> bool:
        """Return True if some call waits for a peer."""
        return any(call.peer == peer and not call.reason for call in self._open.values())

    def awaited(self, peer: PeerId) -> dict[int, int]:
        """Return the ids of the calls that wait for a peer, with the tags of their envelopes."""
        return {
            call.wire_req_id: call.envelope
            for call in self._open.values()
            if call.peer == peer and call.envelope is not None and not call.reason
        }

    def lost(self, peer: PeerId, since_ns: int) -> list[PendingCall]:
        """End and return the calls to a peer that were open at a time."""
        ended = [
            call
            for call in self._open.values()
            if call.peer == peer and call.opened_ns <= since_ns and not call.reason
        ]
        for call in ended:
            self._end(call)
        return ended

    def too_late(self, wire_req_id: int) -> PendingCall | None:
        """End a call whose time is over; returns it, or None when it ended before."""
        call = self._open.get(wire_req_id)
        if call is not None:
            self._end(call)
        return call

    def _add(self, call: PendingCall) -> None:
        if self._open is EMPTY:
            self._open, self._of_envelope = {}, {}
        self._open[call.wire_req_id] = call
        self._of_cell[call.cell_at] += 1
        if call.envelope is not None:
            self._of_envelope[call.envelope] = call

    def _end(self, call: PendingCall) -> None:
        self._scheduler.cancel(call.timer)
        del self._open[call.wire_req_id]
        self._of_cell[call.cell_at] -= 1
        if call.envelope is not None:
            del self._of_envelope[call.envelope]
        if self._ended is EMPTY:
            self._ended = {}
        self._ended[call.wire_req_id] = None
        if len(self._ended) > MAX_ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: calls and the ids of ended ones, oldest first."""
        return [[_CALL.save(call, writer) for call in self._open.values()], list(self._ended)]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned, after the scheduler."""
        rows, ended = plain
        self._ended = dict.fromkeys(ended)
        for row in rows:
            self._add(_CALL.load(row, reader))


@dataclass(slots=True)
class _ArmedTimer:
    number: int
    cell_at: int
    key: str
    timer: Timer


_TIMER: RowForm[_ArmedTimer] = RowForm(
    _ArmedTimer, number=PLAIN, cell_at=PLAIN, key=PLAIN, timer=ARMED
)


class ComponentTimers:
    """The timers of all components of one node."""

    __slots__ = (
        "_armed",
        "_next",
        "_numbers",
        "_scheduler",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._armed: dict[int, _ArmedTimer] = EMPTY
        self._numbers: dict[int, dict[str, int]] = EMPTY  # component -> key ->
        self._next = 0

    def __len__(self) -> int:
        return len(self._armed)

    def count(self, cell_at: int) -> int:
        """Return how many timers a component has armed."""
        return len(self._numbers.get(cell_at, EMPTY))

    def has(self, cell_at: int, key: str) -> bool:
        """Return True if a component has armed a timer."""
        return key in self._numbers.get(cell_at, EMPTY)

    def set(self, cell_at: int, key: str, when_ns: int) -> None:
        """Arm a timer, or arm it anew."""
        self.cancel(cell_at, key)
        self._next += 1
        timer = self._scheduler.set(when_ns, TimerKind.COMPONENT_TIMER, self._next)
        self._add(_ArmedTimer(self._next, cell_at, key, timer))

    def cancel(self, cell_at: int, key: str) -> None:
        """Disarm a timer, if it is armed."""
        number = self._numbers.get(cell_at, EMPTY).pop(key, None)
        if number is not None:
            self._scheduler.cancel(self._armed.pop(number).timer)

    def take(self, number: int) -> tuple[int, str]:
        """Remove a timer that is due; returns its component and its key."""
        armed = self._armed.pop(number)
        del self._numbers[armed.cell_at][armed.key]
        return armed.cell_at, armed.key

    def _add(self, armed: _ArmedTimer) -> None:
        if self._armed is EMPTY:
            self._armed, self._numbers = {}, {}
        self._armed[armed.number] = armed
        self._numbers.setdefault(armed.cell_at, {})[armed.key] = armed.number

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all timers, and the count."""
        return [self._next, [_TIMER.save(armed, writer) for armed in self._armed.values()]]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned, after the scheduler."""
        self._next, rows = plain
        for row in rows:
            self._add(_TIMER.load(row, reader))
