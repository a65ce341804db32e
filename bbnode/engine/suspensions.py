"""Ops that go to sleep and wake up, and the line in front of a component.

Rule: a parked op ends in exactly one way: it is resumed, its deadline passes, or its
execution ends. Whatever it held of a component is then given to the next in line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from bbnode.engine.cells import ComponentCell
from bbnode.engine.errors import (
    STOPS,
    DeadlineExceeded,
    OversizePayload,
    PendingAsyncExceeded,
)
from bbnode.engine.frame import PARKED, Frame, Op, _Marker
from bbnode.engine.ingress import Completed
from bbnode.engine.parking import DEFAULT_PARK_DEADLINE_NS, Parked, Why
from bbnode.engine.scheduler import TimerKind
from bbnode.ir.values import TRIGGER, Value, size_of

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime


class Suspensions:
    """Parks and resumes the ops of one node."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt

    def park(
        self,
        frame: Frame,
        op: Op,
        why: Why,
        whom: str,
        *,
        until_ns: int,
        token: int | None = None,
        cell: ComponentCell | None = None,
        line: dict[int, None] | None = None,
        arguments: tuple[Value, ...] | None = None,
        moves: bool = False,
        timer_kind: TimerKind | None = TimerKind.PARKED_DEADLINE,
    ) -> Literal[_Marker.PARKED]:
        """Leave an op until `resume`, or until it is too late.

        A task or completion holds its component. `line` is where it waits for its turn.
        `timer_kind` None: somebody else watches the time. Raises PendingAsyncExceeded.
        """
        limit = self._rt.limits.pending_async
        if limit is not None and len(self._rt.parking) >= limit:
            raise PendingAsyncExceeded(f"{op.name}: {limit} ops wait already (limit pending_async)")
        if frame.deadline_ns is not None:
            until_ns = min(until_ns, frame.deadline_ns)
        token = self._rt.parking.new_token() if token is None else token
        timer = None
        if timer_kind is not None:
            timer = self._rt.scheduler.set(until_ns, timer_kind, token)
        parked = Parked(
            token=token,
            frame=frame,
            op=op,
            why=why,
            whom=whom,
            since_ns=self._rt.now_ns,
            until_ns=until_ns,
            timer=timer,
            cell=cell,
            line=line,
            arguments=arguments,
            moves=moves,
        )
        self._rt.parking.add(parked)
        parked.take_hold()
        if line is not None:
            line[token] = None
        return PARKED

    def hand_out(
        self,
        frame: Frame,
        op: Op,
        cell: ComponentCell,
        arguments: tuple[Value, ...],
        *,
        until_ns: int,
        moves: bool,
    ) -> Literal[_Marker.PARKED]:
        """Let the host run an op in a worker thread; `moves`: it may change the component."""
        token = self._rt.parking.new_token()
        self.park(
            frame,
            op,
            Why.TASK,
            cell.slot,
            until_ns=until_ns,
            cell=cell,
            arguments=arguments,
            moves=moves,
            token=token,
        )
        if moves and self._rt.saves_states:
            cell.keep_states()
        parked = self._rt.parking.get(token)
        if parked is not None and op.hand_out is not None:
            self._rt.steps.append(op.hand_out(parked))
        return PARKED

    def hand_out_again(self, *, same_life: bool) -> None:
        """After a restore: every task that has not returned goes to a thread once more.

        In a new life nobody waits for those that were given up: their components are free.
        """
        done = self._rt.ingress.completed()
        for parked in self._rt.parking.entries():
            if parked.why is not Why.TASK or parked.token in done:
                continue
            if parked.abandoned and not same_life:
                self._rt.parking.pop(parked.token)
                self._release(parked)
            elif parked.op.hand_out is not None:
                self._rt.steps.append(parked.op.hand_out(parked))

    def wait_for_component(
        self, cell: ComponentCell, frame: Frame, op: Op
    ) -> Literal[_Marker.PARKED]:
        """Leave an op until its component is free; in the order of coming."""
        return self.park(
            frame,
            op,
            Why.COMPONENT,
            f"{cell.slot} (held by {cell.held_by()})",
            until_ns=self._rt.now_ns + (op.deadline_ns or DEFAULT_PARK_DEADLINE_NS),
            cell=cell,
            line=cell.line,
        )

    def give_next(self, line: dict[int, None], result: Any) -> None:
        """The first op in a line that is not empty goes on with what it waited for."""
        token = next(iter(line))
        del line[token]
        self.resume(token, result, None)

    def reclaim(self, units: Iterable[int]) -> None:
        """Give back what an execution held when it failed."""
        for semaphore in units:
            self._rt.counts["limit.reclaimed"] += 1
            self.give_unit(semaphore)

    def give_unit(self, semaphore: int) -> None:
        """A unit of a semaphore is free: it goes to the first in line, or stays free."""
        found = self._rt.stores.semaphores[semaphore]
        if not found.line:
            found.free += 1
            return
        parked = self._rt.parking.get(next(iter(found.line)))
        if parked is not None:
            parked.frame.take_unit(semaphore)
        self.give_next(found.line, TRIGGER)

    def resume(self, token: int, result: Any, error: BaseException | None) -> None:
        """A parked op goes on with its outputs, or fails."""
        parked = self._rt.parking.pop(token)
        if parked is None:
            self._rt.counts["completion.unknown"] += 1
            return
        if parked.timer is not None:
            self._rt.scheduler.cancel(parked.timer)
        if parked.abandoned:
            self._rt.counts["completion.late"] += 1
        elif error is not None:
            self._rt.fail(parked.frame, parked.op, error)
        else:
            self._finish(parked, result)
        self._release(parked)

    def _finish(self, parked: Parked, result: Any) -> None:
        try:
            if parked.why is Why.COMPLETION:
                self._check_completion(parked, result)
            if parked.op.finish is not None:
                result = parked.op.finish(parked.frame, result)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary to what components hand over
            self._rt.fail(parked.frame, parked.op, error)
        else:
            self._rt.emit(parked.frame, parked.op, result, parked.since_ns)

    def _check_completion(self, parked: Parked, result: Any) -> None:
        # Results of tasks are not capped: they are the return value of the component's own
        # method, as when it returns at once. A completion may be used by anybody who got it.
        cap = self._rt.limits.completion_bytes
        if cap is not None and size_of(result) > cap:
            raise OversizePayload(
                f"{parked.op.name}: a result of {size_of(result)} bytes; limit completion_bytes "
                f"is {cap}"
            )

    def complete(self, completed: Completed) -> None:
        """A result that came through the ingress."""
        self.resume(completed.token, completed.result, completed.error)

    def too_late(self, token: int) -> None:
        """A parked op's deadline is over."""
        parked = self._rt.parking.get(token)
        if parked is None or parked.abandoned:
            return
        waited_ms = (self._rt.now_ns - parked.since_ns) // 1_000_000
        error = DeadlineExceeded(
            f"{parked.op.name} waited {waited_ms} ms for {parked.whom} ({parked.why.value})"
        )
        frame, op = parked.frame, parked.op
        self.give_up(token)
        self._rt.fail(frame, op, error)

    def give_up(self, token: int) -> None:
        """Nobody waits for an op's result any more."""
        parked = self._rt.parking.get(token)
        if parked is None:
            return
        if parked.timer is not None:
            self._rt.scheduler.cancel(parked.timer)
        if parked.why is Why.TASK:
            # The thread can't be taken back: its component stays taken until it returns.
            self._rt.parking.abandon(parked)
            return
        if parked.line is not None:
            parked.line.pop(token, None)
        self._rt.parking.pop(token)
        self._release(parked)

    def _release(self, parked: Parked) -> None:
        """Free the component that an op held, and let the next in line have it."""
        cell = parked.cell
        if cell is None or parked.why is Why.COMPONENT:
            return
        for freed in cell.give_back(is_task=parked.why is Why.TASK):
            self.serve(freed)

    def serve(self, cell: ComponentCell) -> None:
        """Let those into a component that wait in line and may be let in now.

        A running bootstrap's ops pass those that wait for the bootstrap.
        """
        while True:
            token = next((t for t in cell.line if self._may_enter(t, cell)), None)
            if token is None:
                return
            del cell.line[token]
            waiting = self._rt.parking.pop(token)
            if waiting is None:
                continue
            if waiting.timer is not None:
                self._rt.scheduler.cancel(waiting.timer)
            self._fire_waiting(waiting.frame, waiting.op)

    def _may_enter(self, token: int, cell: ComponentCell) -> bool:
        parked = self._rt.parking.get(token)
        return parked is None or not cell.refuses(parked.frame)

    def _fire_waiting(self, frame: Frame, op: Op) -> None:
        try:
            result = op.fire(frame)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - as in `run`
            self._rt.fail(frame, op, error)
            return
        if result is not PARKED:
            self._rt.emit(frame, op, result)
