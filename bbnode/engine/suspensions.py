"""Parked ops: what they wait for, until when, and how they are resumed.

Rule: every parked op has a deadline and an entry here, and ends in exactly one way: it is resumed,
its deadline passes, or its execution ends. The component that it held is then given to the next in
line. A worker thread can't be stopped, so an op that runs in one keeps its component until the
thread returns, even if the op has failed by its deadline or with its execution: its entry is then
abandoned.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.deadlines import bound_by, seconds
from bbnode.engine.errors import (
    DeadlineExceeded,
    OversizePayload,
    PendingAsyncExceeded,
)
from bbnode.engine.frame import PARKED, Frame, Marker, Op
from bbnode.engine.ingress import Completed, Ingress
from bbnode.engine.limits import Limits
from bbnode.engine.reports import Reports
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    CELL,
    FRAME,
    LINE,
    PLAIN,
    TIMER,
    VALUE,
    Line,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    Via,
    many,
    member,
    optional,
)
from bbnode.engine.stores import Semaphore
from bbnode.ir import keys
from bbnode.ir.interrupts import let_stop
from bbnode.ir.values import TRIGGER, Value, size_of


class WaitReason(enum.Enum):
    """The reasons for which an op is parked."""

    TASK = "worker thread"
    COMPLETION = "completion by the component"
    COMPONENT = "another op of the same component"
    TIMER = "timer"
    RESPONSES = "responses"
    SEMAPHORE = "semaphore"
    QUEUE = "value of a queue"


@dataclass(slots=True, eq=False, kw_only=True)
class Parked:
    """One parked op; `abandoned` when only its component is still held."""

    token: int
    frame: Frame
    op: Op
    why: WaitReason
    whom: str
    since_ns: int
    until_ns: int
    timer: Timer | None  # None: its deadline is watched elsewhere
    cell: ComponentCell | None = None
    line: Line | None = None  # the line in which its token waits
    arguments: tuple[Value, ...] | None = None  # of a task, so that it can be handed out again
    moves: bool = False  # a task that may change its component's state
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Something that waits, as the node lists it."""

    what: str
    why: str
    whom: str
    execution: int
    target: str
    since_ns: int
    until_ns: int

    def as_json(self, now_ns: int) -> dict[str, Any]:
        """Return it for status displays; times relative to `now_ns`, in seconds."""
        return {
            "what": self.what,
            "why": self.why,
            "whom": self.whom,
            "execution": self.execution,
            "target": self.target,
            "waited_s": round((now_ns - self.since_ns) / 1e9, 3),
            "remaining_s": round((self.until_ns - now_ns) / 1e9, 3),
        }


class Firing(Protocol):
    """The part of the executor that resumes ops."""

    def emit(self, frame: Frame, op: Op, result: Any, started_ns: int | None = None) -> None:
        """Store an op's result and wake its consumers."""

    def fail(self, frame: Frame, op: Op, error: BaseException) -> None:
        """Fail an op."""

    def fire(self, frame: Frame, op: Op) -> None:
        """Fire an op."""


def _parked(*, frame: Frame, op: int, **fields: Any) -> Parked:
    return Parked(frame=frame, op=frame.plan.ops[op], **fields)


_ROW: RowForm[Parked] = RowForm(
    _parked,
    token=PLAIN,
    frame=FRAME,
    op=Via(lambda op, _: op.index, lambda index, _: index),
    why=member(WaitReason),
    whom=PLAIN,
    since_ns=PLAIN,
    until_ns=PLAIN,
    timer=TIMER,
    cell=optional(CELL),
    line=optional(LINE),
    arguments=optional(many(VALUE)),
    moves=PLAIN,
    abandoned=PLAIN,
)


@dataclass(eq=False, repr=False, slots=True)
class Suspensions:
    """Parks and resumes the ops of one node. Tokens are never used twice.

    `keeps_states`: components are asked for their state before a thread may change it.
    """

    firing: Firing
    clock: NodeClock
    scheduler: Scheduler
    ingress: Ingress
    reports: Reports
    limits: Limits
    semaphores: Sequence[Semaphore] = ()
    keeps_states: bool = True
    _parked: dict[int, Parked] = field(init=False, default_factory=dict)
    _next_token: int = field(init=False, default=1)

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, token: object) -> bool:
        return token in self._parked

    def __iter__(self) -> Iterator[Parked]:
        """All parked ops, oldest first."""
        return iter(list(self._parked.values()))

    def get(self, token: int) -> Parked | None:
        """Return the entry of a token, or None."""
        return self._parked.get(token)

    def new_token(self) -> int:
        """Return a token for an op that is about to be parked."""
        token = self._next_token
        self._next_token = token + 1
        return token

    # -- parking -----------------------------------------------------------------------------

    def park(
        self,
        frame: Frame,
        op: Op,
        why: WaitReason,
        whom: str,
        *,
        until_ns: int | None = None,
        token: int | None = None,
        cell: ComponentCell | None = None,
        line: Line | None = None,
        arguments: tuple[Value, ...] | None = None,
        moves: bool = False,
        timer_kind: TimerKind | None = TimerKind.PARKED_DEADLINE,
    ) -> Literal[Marker.PARKED]:
        """Leave an op until `resume`, or until it is too late.

        `until_ns` is by default as the op and its execution say (`until_ns`). A task or completion
        holds its component. `line` is the line in which it waits. With `timer_kind` None its
        deadline is watched elsewhere. Raises PendingAsyncExceeded.
        """
        limit = self.limits.pending_async
        if limit is not None and len(self._parked) >= limit:
            raise PendingAsyncExceeded(f"{op.name}: {limit} ops wait already (limit pending_async)")
        if until_ns is None:
            until_ns = self.until_ns(frame, op)
        elif frame.deadline_ns is not None:
            until_ns = min(until_ns, frame.deadline_ns)
        token = self.new_token() if token is None else token
        timer = None
        if timer_kind is not None:
            timer = self.scheduler.set(until_ns, timer_kind, token)
        parked = Parked(
            token=token,
            frame=frame,
            op=op,
            why=why,
            whom=whom,
            since_ns=self.clock.now_ns,
            until_ns=until_ns,
            timer=timer,
            cell=cell,
            line=line,
            arguments=arguments,
            moves=moves,
        )
        self._add(parked)
        return PARKED

    def until_ns(self, frame: Frame, op: Op) -> int:
        """Return until when an op that fires now may wait."""
        bound = frame.deadline_ns
        if bound is not None and op.deadline_from:
            return bound
        if op.deadline_from == keys.DEADLINE_FROM_NOBODY:
            return self.clock.now_ns + self.limits.wait_ns
        own = self.clock.now_ns + op.deadline_ns
        return own if bound is None else min(own, bound)

    def _add(self, parked: Parked) -> None:
        self._parked[parked.token] = parked
        if not parked.abandoned:
            if parked.frame.parked is None:
                parked.frame.parked = {}
            parked.frame.parked[parked.token] = None
        if parked.line is not None:
            parked.line[parked.token] = None
        if parked.cell is not None and parked.why in (WaitReason.TASK, WaitReason.COMPLETION):
            parked.cell.take(
                parked.token,
                parked.op.name,
                is_task=parked.why is WaitReason.TASK,
                moves=parked.moves,
            )

    def hand_out(
        self,
        frame: Frame,
        op: Op,
        cell: ComponentCell | None,
        arguments: tuple[Value, ...],
        *,
        whom: str,
        moves: bool = False,
    ) -> Literal[Marker.PARKED]:
        """Let the host run an op in a worker thread; `moves`: it may change the component."""
        token = self.new_token()
        self.park(
            frame,
            op,
            WaitReason.TASK,
            whom,
            cell=cell,
            arguments=arguments,
            moves=moves,
            token=token,
        )
        if cell is not None and moves and self.keeps_states:
            cell.keep_states()
        self._run_task(self._parked[token])
        return PARKED

    def _run_task(self, parked: Parked) -> None:
        if parked.op.hand_out is not None:
            self.reports.steps.append(parked.op.hand_out(parked))

    def hand_out_again(self, *, same_life: bool) -> None:
        """Hand out again every task that has not returned, after a restore.

        In a new life those that were given up are dropped, and their components are free.
        """
        done = self.ingress.completed()
        for parked in self:
            if parked.why is not WaitReason.TASK or parked.token in done:
                continue
            if parked.abandoned and not same_life:
                self._pop(parked.token)
                self._release(parked)
            else:
                self._run_task(parked)

    def wait_for_component(
        self, cell: ComponentCell, frame: Frame, op: Op
    ) -> Literal[Marker.PARKED]:
        """Leave an op until its component is free; in the order of coming."""
        return self.park(
            frame,
            op,
            WaitReason.COMPONENT,
            f"{cell.slot} (held by {cell.held_by()})",
            cell=cell,
            line=cell.line,
        )

    # -- resuming ----------------------------------------------------------------------------

    def resume(self, token: int, result: Any, error: BaseException | None) -> None:
        """Resume a parked op with its result, or fail it."""
        parked = self._pop(token)
        if parked is None:
            self.reports.counts["completion.unknown"] += 1
        elif parked.abandoned:
            self.reports.counts["completion.late"] += 1
        elif error is not None:
            self.firing.fail(parked.frame, parked.op, error)
        else:
            self._finish(parked, result)
        if parked is not None:
            self._release(parked)

    def complete(self, completed: Completed) -> None:
        """Resume an op with a result that came through the ingress."""
        self.resume(completed.token, completed.result, completed.error)

    def _finish(self, parked: Parked, result: Any) -> None:
        try:
            if parked.why is WaitReason.COMPLETION:
                self._check_completion(parked, result)
            if parked.op.finish is not None:
                result = parked.op.finish(parked.frame, result)
        except BaseException as error:  # noqa: BLE001 - the boundary to what components hand over
            let_stop(error)
            self.firing.fail(parked.frame, parked.op, error)
        else:
            self.firing.emit(parked.frame, parked.op, result, parked.since_ns)

    def _check_completion(self, parked: Parked, result: Any) -> None:
        # Results of tasks are not capped, like other return values of a component's methods. A
        # completion may be used by anybody who has it.
        cap = self.limits.completion_bytes
        if cap is not None and size_of(result) > cap:
            raise OversizePayload(
                f"{parked.op.name}: a result of {size_of(result)} bytes; limit completion_bytes "
                f"is {cap}"
            )

    def too_late(self, token: int) -> None:
        """Fail a parked op whose deadline is over."""
        parked = self._parked.get(token)
        if parked is None or parked.abandoned:
            return
        waited_ns = self.clock.now_ns - parked.since_ns
        error = DeadlineExceeded(
            f"{parked.op.name} waited {seconds(waited_ns)} for {parked.whom} "
            f"({parked.why.value}): "
            f"{bound_by(parked.frame, parked.op, parked.until_ns, self.limits.wait_ns)}"
        )
        self.give_up(token)
        self.firing.fail(parked.frame, parked.op, error)

    def give_up(self, token: int) -> None:
        """End the wait of an op whose result nobody needs any more."""
        parked = self._parked.get(token)
        if parked is None:
            return
        if parked.why is WaitReason.TASK:
            # The thread can't be stopped: its component stays held until it returns.
            if parked.timer is not None:
                self.scheduler.cancel(parked.timer)
            parked.abandoned = True
            if parked.frame.parked is not None:
                parked.frame.parked.pop(token, None)
            return
        if parked.line is not None:
            parked.line.pop(token, None)
        self._pop(token)
        self._release(parked)

    def drop_frame(self, frame: Frame) -> None:
        """Abandon all ops of an execution that ends."""
        for token in list(frame.parked or ()):
            self.give_up(token)

    def _pop(self, token: int) -> Parked | None:
        parked = self._parked.pop(token, None)
        if parked is not None:
            if parked.frame.parked is not None:
                parked.frame.parked.pop(token, None)
            if parked.timer is not None:
                self.scheduler.cancel(parked.timer)
        return parked

    # -- lines -------------------------------------------------------------------------------

    def give_next(self, line: Line, result: Any) -> None:
        """Resume the first op in a line that is not empty, with what it waited for."""
        token = next(iter(line))
        del line[token]
        self.resume(token, result, None)

    def give_unit(self, semaphore: int) -> None:
        """Pass a free unit of a semaphore to the first in line, or leave it free."""
        found = self.semaphores[semaphore]
        if not found.line:
            found.free += 1
            return
        parked = self._parked.get(next(iter(found.line)))
        if parked is not None:
            parked.frame.take_unit(semaphore)
        self.give_next(found.line, TRIGGER)

    def reclaim(self, frame: Frame) -> None:
        """Return the units that an execution held when it failed."""
        for semaphore in frame.units if frame.units and frame.failures else ():
            self.reports.counts["limit.reclaimed"] += 1
            self.give_unit(semaphore)

    def _release(self, parked: Parked) -> None:
        """Free the component that an op held, and let the next in line have it."""
        cell = parked.cell
        if cell is None or parked.why is WaitReason.COMPONENT:
            return
        for freed in cell.give_back(is_task=parked.why is WaitReason.TASK):
            self.serve(freed)

    def serve(self, cell: ComponentCell) -> None:
        """Let the waiting ops into a component that may enter now.

        Ops of a running bootstrap overtake those that wait for its end.
        """
        while True:
            token = next((t for t in cell.line if self._may_enter(t, cell)), None)
            if token is None:
                return
            del cell.line[token]
            waiting = self._pop(token)
            if waiting is not None:
                self.firing.fire(waiting.frame, waiting.op)

    def _may_enter(self, token: int, cell: ComponentCell) -> bool:
        parked = self._parked.get(token)
        return parked is None or not cell.refuses(parked.frame)

    # -- snapshots ---------------------------------------------------------------------------

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all entries in order, and the next token."""
        return [[_ROW.save(parked, writer) for parked in self], self._next_token]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned; components are held again as they were."""
        rows, self._next_token = plain
        for row in rows:
            self._add(_ROW.load(row, reader))
