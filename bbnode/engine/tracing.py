"""Tracing: one step per execution, op and fill, for who wants to follow them.

Rule: only while it is on. The loop that fires ops is chosen when tracing is switched, so that
a node that does not trace pays nothing per op. Times are those of the polls: the engine has no
clock of its own, and what fires within one poll takes no time. One message is followed across
peers by (sender, wire_req_id, site): `FillSent` here, `ExecutionStarted` there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bbnode.engine import steps
from bbnode.engine.errors import STOPS
from bbnode.engine.frame import PARKED, Frame, Op
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.peer import PeerId

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime


class Tracer:
    """Makes the steps of a node that traces."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt

    def run(self, budget: int | None) -> int:
        """What `Runtime.run` does, op by op."""
        rt = self._rt
        ready = rt.ready
        most = sys.maxsize if budget is None else budget
        fired = 0
        while ready and fired < most:
            frame, ops = ready.popleft()
            for at, op in enumerate(ops):
                if frame.ended:
                    break
                if fired == most:
                    ready.appendleft((frame, ops[at:]))
                    break
                fired += 1
                try:
                    self._fire(frame, op)
                except STOPS:
                    if ops[at + 1 :]:
                        ready.appendleft((frame, ops[at + 1 :]))
                    raise
        return fired

    def _fire(self, frame: Frame, op: Op) -> None:
        rt = self._rt
        try:
            result = op.fire(frame)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - the same boundary as there
            rt.fail(frame, op, error)
            return
        if result is not PARKED:
            rt.emit(frame, op, result)

    def started(self, frame: Frame) -> None:
        """An execution begins."""
        self._rt.steps.append(
            steps.ExecutionStarted(
                execution=frame.execution,
                target=frame.plan.target,
                entry=frame.plan.name,
                at_ns=frame.started_ns,
                source_peer=frame.source_peer,
                wire_req_id=frame.wire_req_id,
                site=frame.site,
            )
        )

    def ended(self, frame: Frame) -> None:
        """An execution is over."""
        self._rt.steps.append(
            steps.ExecutionEnded(
                execution=frame.execution,
                target=frame.plan.target,
                entry=frame.plan.name,
                started_ns=frame.started_ns,
                ended_ns=self._rt.now_ns,
                failures=frame.failures,
            )
        )

    def completed(self, frame: Frame, op: Op, started_ns: int | None) -> None:
        """An op has its result; `started_ns` is when it was parked, None when it was not."""
        now_ns = self._rt.now_ns
        self._rt.steps.append(
            steps.OpCompleted(
                execution=frame.execution,
                target=frame.plan.target,
                op=op.name,
                op_type=op.op_type,
                started_ns=now_ns if started_ns is None else started_ns,
                ended_ns=now_ns,
            )
        )

    def sent(
        self,
        frame: Frame,
        op: Op,
        peers: Sequence[PeerId],
        kind: CorrelationKind,
        wire_req_id: int,
        suffix: bytes,
    ) -> None:
        """An op sends a fill to `peers`."""
        for peer in peers:
            self._rt.steps.append(
                steps.FillSent(
                    execution=frame.execution,
                    target=frame.plan.target,
                    op=op.name,
                    peer=peer,
                    correlation=kind.name,
                    wire_req_id=wire_req_id,
                    suffix=suffix,
                    at_ns=self._rt.now_ns,
                )
            )
