"""The heart of a node: its frames and the queue of what can fire.

Rule: ops fire in the order in which they became ready, over all executions. Everything that
an op does goes through here and ends here: a result wakes consumers, an exception becomes an
OpFailed step, PARKED leaves the op to the table of waiting ops. Nothing leaves as an exception.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from bbnode.engine import steps
from bbnode.engine.bus import Bus, BusKind
from bbnode.engine.cells import ComponentCell
from bbnode.engine.cohorts import Cohorts
from bbnode.engine.errors import (
    FramesExceeded,
    GateDenied,
    UnexpectedException,
)
from bbnode.engine.frame import PARKED, EntryPlan, Frame, Op, _Marker
from bbnode.engine.inbound_dedup import InboundDedup
from bbnode.engine.ingress import Ingress
from bbnode.engine.limits import Limits, cut_text
from bbnode.engine.neighbours import Neighbours
from bbnode.engine.ops.graphs import GraphRunner
from bbnode.engine.outbound import Outbound
from bbnode.engine.parking import ParkingTable
from bbnode.engine.rng import program_rng, wire_ids
from bbnode.engine.scheduler import Scheduler
from bbnode.engine.stores import StorePlan, Stores
from bbnode.engine.suspensions import Suspensions
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value

# What Record keeps: the newest of all names together.
MAX_RECORDS = 1024


class Runtime:
    """State of one node; ops reach it as `frame.rt`."""

    def __init__(
        self,
        *,
        neighbours: Neighbours,
        cells: Sequence[ComponentCell],
        graphs: Sequence[GraphRunner],
        limits: Limits,
        seed: int,
        incarnation: int,
        stores: StorePlan,
        subscribed: Sequence[int],
    ) -> None:
        self.self_peer: PeerId = neighbours.self_peer
        self.neighbours = neighbours
        self.cells = tuple(cells)
        self.graphs = tuple(graphs)
        self.limits = limits
        self.seed = seed
        self.now_ns = 0
        self.steps: list[steps.Step] = []
        self.counts: Counter[str] = Counter()
        self.records: deque[tuple[int, int, str, Value]] = deque(maxlen=MAX_RECORDS)
        self.frames: dict[int, Frame] = {}
        self.ready: deque[tuple[Frame, Op]] = deque()
        self.ingress = Ingress(limits)
        self.stores = Stores(self.ingress.budget, stores)
        self.bus = Bus(limits.bus_events, subscribed, self.counts)
        self.scheduler = Scheduler()
        self.parking = ParkingTable()
        self.dedup = InboundDedup()
        self.suspensions = Suspensions(self)
        self.outbound = Outbound(self)
        self.cohorts = Cohorts(self)
        self._commands = 0
        # Called from any thread: a C-level counter gives each number once.
        self.next_execution: Callable[[], int] = itertools.count(1).__next__
        self.set_incarnation(incarnation)

    def set_incarnation(self, incarnation: int) -> None:
        """Start the streams of ids and random numbers of one life of the node."""
        self.incarnation = incarnation
        raw = self.self_peer.to_bytes()
        self.wire_ids = wire_ids(raw, incarnation)
        self.rng = program_rng(self.seed, incarnation, raw)

    # -- frames ------------------------------------------------------------------------------

    def start(self, plan: EntryPlan, execution: int, *, from_bus: bool = False) -> Frame | None:
        """A new frame, to be seeded and launched; None, with a step, when there are too many."""
        limit = self.limits.frames
        if limit is not None and len(self.frames) >= limit:
            error = FramesExceeded(f"{len(self.frames)} executions are under way (limit frames)")
            self.fail_start(execution, plan, error, from_bus=from_bus)
            return None
        frame = Frame(self, plan, execution, self.now_ns)
        frame.from_bus = from_bus
        self.frames[execution] = frame
        return frame

    def fail_start(
        self, execution: int, plan: EntryPlan, error: BbnodeError, *, from_bus: bool = False
    ) -> None:
        """An execution that can't be started."""
        self._failed_step(execution, plan.target, plan.name, error)
        if not from_bus:
            self.bus.publish(BusKind.OP_FAILED)

    def launch(self, frame: Frame) -> None:
        """Queue what can fire at once."""
        self.counts["executions"] += 1
        initial = frame.plan.initial
        frame.live = len(initial)
        for op in initial:
            self.ready.append((frame, op))
        if not initial:
            self.end(frame)

    def end(self, frame: Frame) -> None:
        """Drop a frame: it is finished, or stopped."""
        if frame.ended:
            return
        frame.ended = True
        del self.frames[frame.execution]
        if frame.parked:
            for token in list(frame.parked):
                self.suspensions.give_up(token)
        if frame.cohorts is not None:
            self.cohorts.drop_frame(frame)
        if frame.charges is not None:
            for charge in frame.charges:
                charge.release()
        if frame.units and frame.failures:
            for semaphore in frame.units:
                self.counts["limit.reclaimed"] += 1
                self.suspensions.give_unit(semaphore)
        # The queue may still name the frame; its values must not wait for that.
        frame.values = []
        frame.pending = []
        if frame.report:
            self.steps.append(
                steps.ExecutionFinished(
                    execution=frame.execution,
                    target=frame.plan.target,
                    ok=frame.failures == 0,
                    failures=frame.failures,
                )
            )

    # -- the frontier ------------------------------------------------------------------------

    def run(self, budget: int | None) -> int:
        """Fire what is ready, at most `budget` ops; returns how many fired.

        This loop is what every op pays for: it does nothing by name, and nothing twice.
        """
        ready = self.ready
        pop = ready.popleft
        push = ready.append
        for fired in range(sys.maxsize if budget is None else budget):
            if not ready:
                return fired
            frame, op = pop()
            if frame.ended:
                continue
            try:
                result = op.fire(frame)
            except Exception as error:  # noqa: BLE001 - the boundary to components and programs
                self.fail(frame, op, error)
                continue
            if result is PARKED:
                continue
            outs = op.outs
            if outs is None:
                frame.values[op.out] = result
            else:
                values = frame.values
                for index, value in zip(outs, result, strict=False):
                    values[index] = value
            woken = -1
            pending = frame.pending
            for consumer in op.consumers:
                index = consumer.index
                left = pending[index] - 1
                pending[index] = left
                if not left:
                    push((frame, consumer))
                    woken += 1
            if woken:
                frame.live += woken
                if not frame.live:
                    self.end(frame)
        return budget or 0

    def emit(self, frame: Frame, op: Op, result: Any) -> None:
        """What `run` does with a result, for an op that was parked."""
        if frame.ended:
            return
        if op.outs is None:
            frame.values[op.out] = result
        else:
            for index, value in zip(op.outs, result, strict=False):
                frame.values[index] = value
        for consumer in op.consumers:
            frame.pending[consumer.index] -= 1
            if not frame.pending[consumer.index]:
                self.ready.append((frame, consumer))
                frame.live += 1
        self.retire(frame)

    def retire(self, frame: Frame) -> Literal[_Marker.PARKED]:
        """An op of the frame is done without a result; returns what its `fire` returns."""
        frame.live -= 1
        if not frame.live:
            self.end(frame)
        return PARKED

    def fail(self, frame: Frame, op: Op, error: BaseException) -> None:
        """An op failed: what depends on it does not fire; a denied gate ends everything."""
        if frame.ended:
            return
        frame.failures += 1
        self._failed_step(frame.execution, frame.plan.target, op.name, error)
        self.publish(BusKind.OP_FAILED, frame)
        if isinstance(error, GateDenied):
            self.counts[f"gate.denied.{error.reason}"] += 1
            self.end(frame)
        else:
            self.retire(frame)

    def _failed_step(self, execution: int, target: str, op: str, error: BaseException) -> None:
        if isinstance(error, BbnodeError):
            kind, detail = type(error).__name__, str(error)
        else:
            kind, detail = UnexpectedException.__name__, f"{type(error).__name__}: {error}"
        self.counts["ops.failed"] += 1
        self.steps.append(
            steps.OpFailed(
                execution=execution,
                target=target,
                op=op,
                kind=kind,
                detail=cut_text(detail, self.limits.failure_detail_bytes),
            )
        )

    # -- small services of ops ---------------------------------------------------------------

    def next_command(self) -> int:
        """Names a finished side effect."""
        self._commands += 1
        return self._commands

    def one_way_id(self, frame: Frame) -> int:
        """The id under which an execution sends one-way."""
        if not frame.wire_out_id:
            frame.wire_out_id = self.wire_ids.next_u64()
        return frame.wire_out_id

    def publish(self, kind: BusKind, frame: Frame) -> None:
        """What went wrong in an execution, as an event; not if an event started it."""
        if not frame.from_bus:
            self.bus.publish(kind)

    def show(self, made: Sequence[steps.Step]) -> None:
        """Surface what the tables about peers say, and tell it on the bus."""
        self.steps.extend(made)
        for step in made:
            if isinstance(step, steps.PeerUp):
                self.bus.publish(BusKind.PEER_UP)
            elif isinstance(step, steps.PeerDown):
                self.bus.publish(BusKind.PEER_DOWN)

    def telemetry(self, name: str, **attributes: Any) -> None:
        """Surface an observation."""
        self.steps.append(steps.Telemetry(name=name, attributes=attributes))

    def refuse(
        self, peer: PeerId, fill: int, type_hash: int, size: int, kind: str, detail: str
    ) -> None:
        """Surface a fill, or with `fill` -1 an envelope, that was not taken."""
        self.counts[f"receive.failed.{kind}"] += 1
        self.bus.publish(BusKind.WIRE_RECEIVE_FAILED)
        self.steps.append(
            steps.WireReceiveFailed(
                peer=peer,
                fill=fill,
                type_hash=type_hash,
                payload_size=size,
                kind=kind,
                detail=cut_text(detail, self.limits.failure_detail_bytes),
            )
        )
