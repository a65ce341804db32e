"""Requests of executions: opening a cohort, suspending on it, and going on.

Rule: a request suspends its execution at its RecvRespBatched and fires once, by the rules of
`requests.py`. What a cohort holds goes with its execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bbnode.engine.errors import InvalidOperand, QuorumNotReached
from bbnode.engine.frame import Frame, Op
from bbnode.engine.limits import cut_text
from bbnode.engine.parking import Why
from bbnode.engine.requests import (
    Cohort,
    CohortState,
    RequestsTable,
    Verdict,
    load_cohort,
    needed_answers,
    save_cohort,
)
from bbnode.engine.scheduler import Timer, TimerKind
from bbnode.ir.address import parse_site_suffix
from bbnode.ir.envelope import CorrelationKind, SlotFill
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

# Of why one peer could not be sent to: a list of failed dials may be long.
_REASON_BYTES = 200


class Cohorts:
    """The requests of one node, between its frames and its table."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self.table = RequestsTable()
        self._frames: dict[int, Frame] = {}  # wire_req_id -> whose request it is
        self._timers: dict[int, Timer] = {}
        self._waiters: dict[int, int] = {}  # wire_req_id -> token of the RecvRespBatched
        self._closed: dict[int, Cohort] = {}  # closed before anybody collected
        self._next_request = 0

    def open(
        self,
        frame: Frame,
        op: Op,
        name: str,
        peers: Sequence[PeerId],
        fill: SlotFill,
        quorum: int,
        budget_ns: int,
        site: int | None,
    ) -> int:
        """Send a request whose answers come to `site` (None: nobody collects them).

        Returns its request id.

        Raises QuorumNotReached when fewer peers can be asked than have to answer.
        """
        rt = self._rt
        size = rt.outbound.check(op, fill, len(peers))
        asked = tuple(sorted(rt.outbound.reachable(frame, op, peers)))
        needed = needed_answers(quorum, len(asked))
        unresolved = tuple(sorted(set(peers) - set(asked)))
        if len(asked) < needed or (peers and not asked):
            raise QuorumNotReached(
                f"{name}: {len(asked)} of {len(peers)} peers can be asked and "
                f"{max(needed, 1)} have to answer; not reachable: {_names(unresolved)}"
            )
        wire_req_id = rt.wire_ids.next_u64()
        deadline_ns = rt.now_ns + budget_ns
        if frame.deadline_ns is not None:
            deadline_ns = min(deadline_ns, frame.deadline_ns)
        for peer in asked:
            rt.outbound.queue(
                peer,
                fill,
                size,
                CorrelationKind.REQUEST,
                wire_req_id,
                max(deadline_ns - rt.now_ns, 1),
            )
        if rt.tracer is not None:
            rt.tracer.sent(frame, op, asked, CorrelationKind.REQUEST, wire_req_id, fill.dest_suffix)
        self._next_request += 1
        request = self._next_request
        rt.telemetry(
            "request.sent",
            request=request,
            execution=frame.execution,
            port=name,
            peers=asked,
            unresolved=unresolved,
            needed=needed,
            deadline_ns=deadline_ns,
        )
        if site is None:
            return request  # nobody waits for answers; they will be dropped as unknown
        cohort = Cohort(
            wire_req_id=wire_req_id,
            request_id=request,
            execution=frame.execution,
            name=name,
            asked=asked,
            unresolved=unresolved,
            needed=needed,
            opened_ns=rt.now_ns,
            deadline_ns=deadline_ns,
            site=site,
            edge=parse_site_suffix(fill.dest_suffix) or 0,
        )
        if frame.cohorts is None:
            frame.cohorts = {}
        frame.cohorts[request] = wire_req_id
        self._frames[wire_req_id] = frame
        self.table.open(cohort)
        if cohort.state is CohortState.OPEN:
            self._timers[wire_req_id] = rt.scheduler.set(
                deadline_ns, TimerKind.REQUEST_DEADLINE, wire_req_id
            )
        else:
            self._close(cohort)
        return request

    def collect(self, frame: Frame, op: Op, request: int) -> Any:
        """The batch, or PARKED until the cohort closes; raises QuorumNotReached."""
        wire_req_id = (frame.cohorts or {}).get(request)
        if wire_req_id is None:
            raise InvalidOperand(f"{op.name}: request {request} is none of this execution")
        closed = self._closed.pop(wire_req_id, None)
        if closed is not None:
            return self._result(closed)
        cohort = self.table.get(wire_req_id)
        if cohort is None or wire_req_id in self._waiters:
            raise InvalidOperand(f"{op.name}: request {request} was collected before")
        token = self._rt.parking.new_token()
        self._waiters[wire_req_id] = token
        return self._rt.suspensions.park(
            frame,
            op,
            Why.RESPONSES,
            cohort.name,
            until_ns=cohort.deadline_ns,
            token=token,
            timer_kind=None,
        )

    def answer(self, wire_req_id: int, peer: PeerId, value: Value) -> Verdict:
        """Take one peer's answer; the caller has counted and classified it."""
        cohort = self.table.get(wire_req_id)
        verdict = self.table.answer(wire_req_id, peer, value)
        if cohort is not None and verdict in (Verdict.ACCEPTED, Verdict.COMPLETE):
            self._rt.telemetry(
                "request.response",
                request=cohort.request_id,
                execution=cohort.execution,
                peer=peer,
                answered=len(cohort.answers),
                asked=len(cohort.asked),
            )
            if verdict is Verdict.COMPLETE:
                self._close(cohort)
        return verdict

    def send_failed(self, tag: int, peer: PeerId, reason: str) -> bool:
        """An envelope did not come to a peer; False when no open request was in it."""
        cohort = self.table.send_failed(tag, peer, cut_text(reason, _REASON_BYTES))
        if cohort is None:
            return False
        self._rt.telemetry(
            "request.unsent",
            request=cohort.request_id,
            execution=cohort.execution,
            peer=peer,
            reason=cohort.unsent[peer],
        )
        if cohort.state is not CohortState.OPEN:
            self._close(cohort)
        return True

    def frame_of(self, wire_req_id: int) -> Frame | None:
        """The execution that waits for an open request."""
        return self._frames.get(wire_req_id)

    def waited_for(self, token: int) -> Cohort | None:
        """The open cohort that a parked RecvRespBatched waits for."""
        for wire_req_id, waiter in self._waiters.items():
            if waiter == token:
                return self.table.get(wire_req_id)
        return None

    def deadline(self, wire_req_id: int) -> None:
        """A cohort's time is over."""
        cohort = self.table.deadline(wire_req_id)
        if cohort is not None:
            self._close(cohort)

    def drop_frame(self, frame: Frame) -> None:
        """Forget everything of an execution that ended."""
        for wire_req_id in (frame.cohorts or {}).values():
            cohort = self.table.abandon(wire_req_id)
            if cohort is not None:
                self._report(cohort)
            self._forget(wire_req_id)
            self._closed.pop(wire_req_id, None)
            self._waiters.pop(wire_req_id, None)

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: the table, and how its requests hang together with executions."""
        return [
            self.table.state(names),
            [[wire, names.frame(frame)] for wire, frame in self._frames.items()],
            [[wire, names.timer(timer)] for wire, timer in self._timers.items()],
            [[wire, token] for wire, token in self._waiters.items()],
            [save_cohort(cohort, names) for cohort in self._closed.values()],
            self._next_request,
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        table, frames, timers, waiters, closed, self._next_request = plain
        self.table.load(table, names)
        self._frames = {wire: names.frame(execution) for wire, execution in frames}
        armed = ((wire, names.timer(order)) for wire, order in timers)
        self._timers = {wire: timer for wire, timer in armed if timer is not None}
        self._waiters = dict(waiters)
        self._closed = {c.wire_req_id: c for c in (load_cohort(row, names) for row in closed)}

    def _forget(self, wire_req_id: int) -> None:
        self._frames.pop(wire_req_id, None)
        timer = self._timers.pop(wire_req_id, None)
        if timer is not None:
            self._rt.scheduler.cancel(timer)

    def _close(self, cohort: Cohort) -> None:
        self._report(cohort)
        self._forget(cohort.wire_req_id)
        token = self._waiters.pop(cohort.wire_req_id, None)
        if token is None:
            self._closed[cohort.wire_req_id] = cohort
            return
        try:
            result = self._result(cohort)
        except QuorumNotReached as error:
            self._rt.suspensions.resume(token, None, error)
        else:
            self._rt.suspensions.resume(token, result, None)

    def _result(self, cohort: Cohort) -> Value:
        if cohort.state is CohortState.BELOW_QUORUM:
            took_ms = (cohort.deadline_ns - cohort.opened_ns) // 1_000_000
            raise QuorumNotReached(
                f"{cohort.name}: {len(cohort.answers)} of {len(cohort.asked)} peers answered"
                f"{'' if cohort.out_of_reach else f' in {took_ms} ms'} and {cohort.needed} "
                f"had to; missing: {_names(cohort.missing)}{_unsent(cohort)}"
            )
        return cohort.batch()

    def _report(self, cohort: Cohort) -> None:
        self._rt.telemetry(
            "request.closed",
            request=cohort.request_id,
            execution=cohort.execution,
            responded=cohort.responded,
            missing=cohort.missing,
            reason=cohort.state.value,
        )


def _names(peers: Sequence[PeerId]) -> str:
    shown = ", ".join(str(peer) for peer in peers[:16])
    return f"{shown} and {len(peers) - 16} more" if len(peers) > 16 else shown or "none"


def _unsent(cohort: Cohort) -> str:
    if not cohort.unsent:
        return ""
    rows = [f"{peer} ({reason})" for peer, reason in sorted(cohort.unsent.items())]
    more = f" and {len(rows) - 16} more" if len(rows) > 16 else ""
    return f"; could not be sent to: {', '.join(rows[:16])}{more}"
