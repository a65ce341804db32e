"""Tracing: one step per execution, op and fill, for hosts that follow them.

Rule: while tracing is on, the executor runs another loop, so that a node that does not trace pays
nothing per op. Times are those of the polls: the engine has no clock of its own, and an op that
fires within one poll takes no time. A message is followed across peers by (sender, wire_req_id,
site): `FillSent` here, `ExecutionStarted` there.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.engine import steps
from bbnode.engine.clock import NodeClock
from bbnode.engine.frame import Frame, Op
from bbnode.engine.reports import Reports
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.peer import PeerId


class Tracer:
    """Makes the steps of a node that traces; to be asked only while it is `on`."""

    __slots__ = (
        "_clock",
        "_reports",
        "on",
    )

    def __init__(self, clock: NodeClock, reports: Reports) -> None:
        self.on = False
        self._clock = clock
        self._reports = reports

    def started(self, frame: Frame) -> None:
        """Report that an execution begins."""
        self._reports.steps.append(
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
        """Report that an execution is over."""
        self._reports.steps.append(
            steps.ExecutionEnded(
                execution=frame.execution,
                target=frame.plan.target,
                entry=frame.plan.name,
                started_ns=frame.started_ns,
                ended_ns=self._clock.now_ns,
                failures=frame.failures,
            )
        )

    def completed(self, frame: Frame, op: Op, started_ns: int | None) -> None:
        """Report an op's result; `started_ns` is when it was parked, None when it was not."""
        now_ns = self._clock.now_ns
        self._reports.steps.append(
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
        """Report that an op sends a fill to `peers`."""
        self._reports.steps.extend(
            steps.FillSent(
                execution=frame.execution,
                target=frame.plan.target,
                op=op.name,
                peer=peer,
                correlation=kind.name,
                wire_req_id=wire_req_id,
                suffix=suffix,
                at_ns=self._clock.now_ns,
            )
            for peer in peers
        )
