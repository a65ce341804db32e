"""The executor: the frames of a node, and the queue of ops that can fire.

Rule: ops of all executions fire in the order in which they became ready. Every outcome of an op is
handled here: a result wakes consumers, an exception becomes an OpFailed step, and PARKED leaves the
op to the table of waiting ops. No exception leaves the executor.

An op may be skipped instead (`skip`): then all that needs its result is skipped when its turn
comes, and what was only to come after it goes on. The order of the others stays. An op that fails
loses its result, and what needs it is lost in the same way, without a step of its own. So an order
edge is no data: only behind an op that was to change a component, and failed or was lost, a later
op of that component does not run, since it would work on a state that is not there, and a step says
so (`OpNotRun`).

In an execution with ops whose order can be seen (`EntryPlan.in_order`), of all ops that are ready
at one time the first in the program fires first. So what comes first does not depend on how many
ops stand before it, and therefore not on which of them the compiler has fused.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, astuple, dataclass
from heapq import heappop, heappush
from typing import Any, Final, Literal, Protocol

from bbnode.components.errors import NotEnoughPeers
from bbnode.engine import steps
from bbnode.engine.bus import BusKind
from bbnode.engine.clock import NodeClock
from bbnode.engine.errors import (
    REASON_DUPLICATE,
    FramesExceeded,
    GateDenied,
    QuorumNotReached,
    describe,
)
from bbnode.engine.frame import MISSING, OWED, PARKED, SCRATCH, EntryPlan, Frame, Marker, Op
from bbnode.engine.ingress import Executions
from bbnode.engine.limits import Limits
from bbnode.engine.places import NOWHERE, SourcePlace
from bbnode.engine.reports import Reports
from bbnode.engine.snapshot.codec import (
    CHARGE,
    PEER,
    PLAN,
    VALUE,
    SnapshotReader,
    SnapshotWriter,
    many,
    optional,
)
from bbnode.engine.tracing import Tracer
from bbnode.engine.turns import Turns
from bbnode.ir import keys
from bbnode.ir.errors import BbnodeError
from bbnode.ir.flatten import OP_RELAY
from bbnode.ir.interrupts import let_stop
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal

# Fields of a frame that are saved as they are.
_PLAIN_FIELDS = (
    *("live", "failures", "report", "from_bus", "deadline_ns"),
    *("wire_req_id", "site", "wire_out_id", "units", "chain"),
)
# Failures behind which it is said who is connected and was left out.
_OF_PEERS: Final = NotEnoughPeers, QuorumNotReached
_NOTHING_LOST: Final[frozenset[int]] = frozenset()
# What can fire before there is any execution, for all nodes; it stays empty. A deque takes 760
# bytes, and most nodes of a large simulation rest.
_NOTHING: Final[deque[tuple[Frame, tuple[Op, ...]]]] = deque(maxlen=0)
_PEER = optional(PEER)
_CHARGES = optional(many(CHARGE, list))


class Numbers(Protocol):
    """The source of executions' numbers."""

    def next(self) -> int:
        """Return the next number."""


class Endings(Protocol):
    """The part of a node's services that learns how an execution ends."""

    def unanswered(self, frame: Frame) -> None:
        """Handle that a frame will not answer the request that started it."""

    def undone(self, frame: Frame, op: str, error: BaseException, place: SourcePlace) -> None:
        """Handle the first failure in a frame that a message started and that owes no answer."""

    def drop_frame(self, frame: Frame) -> None:
        """Free what a frame that ends still holds: parked ops, cohorts, units after a failure."""


@dataclass(eq=False, repr=False)
class Executor:
    """Starts, runs and ends the executions of one node.

    Attributes:
        run: fires what is ready, at most so many ops; returns how many fired.
        under_way: executions of each component, by its number.
        frames_of: of the frames, how many each peer's messages started.
        ready: what can fire, oldest first: ops of one execution that became ready together.
        numbers: of what starts here; a record notes them, and a replay repeats them.
        rt: the node's services, for its frames; and whom it tells how they end (`Endings`).
    """

    __slots__ = (
        "_commands",
        "_max_frames",
        "clock",
        "executions",
        "frames",
        "frames_of",
        "numbers",
        "ready",
        "reports",
        "rt",
        "run",
        "tracer",
        "turns",
        "under_way",
    )

    clock: NodeClock
    reports: Reports
    limits: InitVar[Limits]
    tracer: Tracer
    executions: Executions

    def __post_init__(self, limits: Limits) -> None:
        self._max_frames = limits.frames
        self.numbers: Numbers = self.executions
        self.frames: dict[int, Frame] = {}
        self.frames_of: dict[bytes, int] = {}  # by its bytes: a PeerId is hashed in Python
        self.under_way: Counter[int] = Counter()
        self.ready = _NOTHING
        self.turns = Turns(self, self.clock, limits)
        self.run: Callable[[int | None], int] = self._run
        self._commands = 0
        self.rt: Any = None

    # -- frames ------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True when no execution more can start."""
        return self._max_frames is not None and len(self.frames) >= self._max_frames

    def start(
        self,
        plan: EntryPlan,
        execution: int | None = None,
        *,
        from_bus: bool = False,
    ) -> Frame | None:
        """Return a new frame, to be seeded and launched; None, with a step, if there are too many.

        `execution` is its number, by default the next one.
        """
        if execution is None:
            execution = self.numbers.next()
        if self._max_frames is not None and len(self.frames) >= self._max_frames:
            self.fail_start(execution, plan, self._too_many(), from_bus=from_bus)
            return None
        frame = self._new(plan, execution)
        frame.from_bus = from_bus
        return frame

    def start_from(
        self, plan: EntryPlan, peer: PeerId, wire_req_id: int, site: int, chain: int
    ) -> Frame | None:
        """Do as `start`, for a message: of this peer, with this id and chain, to this site."""
        execution = self.numbers.next()
        if self._max_frames is not None and len(self.frames) >= self._max_frames:
            self.fail_start(execution, plan, self._too_many(), source_peer=peer)
            return None
        frame = self._new(plan, execution)
        frame.source_peer = peer
        frame.wire_req_id = wire_req_id
        frame.site = site
        frame.chain = chain
        raw, frames_of = peer.raw, self.frames_of
        frames_of[raw] = frames_of.get(raw, 0) + 1
        return frame

    def _new(self, plan: EntryPlan, execution: int) -> Frame:
        if self.ready is _NOTHING:
            self.ready = deque()
        frame = self.frames[execution] = Frame(self.rt, plan, execution, self.clock.now_ns)
        if plan.component is not None:
            self.under_way[plan.component] += 1
        return frame

    def _too_many(self) -> FramesExceeded:
        return FramesExceeded(f"{len(self.frames)} executions are under way (limit frames)")

    def fail_start(
        self,
        execution: int,
        plan: EntryPlan,
        error: BbnodeError,
        *,
        from_bus: bool = False,
        source_peer: PeerId | None = None,
        place: SourcePlace = NOWHERE,
        chain: int = 0,
    ) -> None:
        """Report an execution that can't be started; `place`: of the op that would start it."""
        self.reports.op_failed(
            *(execution, plan.target, plan.name, error),
            source_peer=source_peer,
            place=place,
            chain=chain,
        )
        if not from_bus:
            self.reports.bus.publish(BusKind.OP_FAILED)

    def launch(self, frame: Frame) -> None:
        """Queue the ops that can fire at once, or the execution until it is its turn."""
        self.reports.counts["executions"] += 1
        plan = frame.plan
        if plan.in_turn:
            if not self.turns.take(frame):
                return
        elif plan.initial and not self.tracer.on and not plan.in_order:  # as most
            frame.live = len(plan.initial)
            self.ready.append((frame, plan.initial))
            return
        self.begin(frame)

    def begin(self, frame: Frame) -> None:
        """Queue the ops that can fire at once."""
        if self.tracer.on:
            self.tracer.started(frame)
        if frame.plan.initial:
            self._push(frame, frame.plan.initial)
        else:
            self.end(frame)

    def end(self, frame: Frame) -> None:
        """Drop a frame that is finished or stopped."""
        if frame.ended:
            return
        frame.ended = frame.apart = True
        del self.frames[frame.execution]
        peer = frame.source_peer
        if peer is not None and frame.site:
            raw, frames_of = peer.raw, self.frames_of
            left = frames_of[raw] - 1
            if left:
                frames_of[raw] = left
            else:
                del frames_of[raw]
        if frame.debt is not None:
            self.rt.unanswered(frame)
        plan = frame.plan
        if plan.component is not None:
            self.under_way[plan.component] -= 1
        if frame.parked or frame.cohorts is not None or (frame.units and frame.failures):
            self.rt.drop_frame(frame)
        if frame.charges is not None:
            for charge in frame.charges:
                charge.release()
        # The queue may still name the frame; its values must not wait for that.
        frame.values = []
        if self.tracer.on:
            self.tracer.ended(frame)
        if frame.report:
            failures, chain = frame.failures, frame.wire_out_id
            self.reports.steps.append(
                steps.make_finished(frame.execution, plan.target, failures == 0, failures, chain)
            )
        if plan.in_turn:
            self.turns.give_back(frame)

    # -- ready ops ---------------------------------------------------------------------------

    def set_tracing(self, on: bool) -> None:
        """Choose the loop that fires ops."""
        self.tracer.on = on
        self.run = self._run_traced if on else self._run

    def _run(self, budget: int | None) -> int:
        """Fire what is ready, at most `budget` ops; returns how many fired.

        This loop is the cost of every op, so it looks nothing up by name and does nothing twice.
        Until the last op of an entry has fired, `frame.live` still counts the fired ones and not
        yet those they woke, so that it can't reach 0 too early. If an op is alone in its entry and
        wakes one op while the queue is empty, that one fires next without going through the queue.
        """
        ready = self.ready
        pop = ready.popleft
        push = ready.append
        parked = PARKED  # a local name is quicker than a global one
        most = left = sys.maxsize if budget is None else budget
        while ready:
            frame, ops = pop()
            if frame.apart:
                if not frame.ended:
                    if not left:
                        ready.appendleft((frame, ops))
                        break
                    left -= self._fire_singly(frame, ops, left)
                continue
            count = len(ops)
            if count > left:
                ready.appendleft((frame, ops[left:]))
                if not left:
                    break
                ops = ops[:left]
                count = left
            left -= count
            values = frame.values
            pending = frame.pending
            gained = -count  # how `live` has to change: woken less fired
            coming = iter(ops)
            for op in coming:
                while True:
                    # Looked up first: what a slot holds is no method, and as one it takes longer.
                    fire = op.fire
                    try:
                        result = fire(frame)
                    except BaseException as error:  # noqa: BLE001 - the boundary to components
                        try:
                            let_stop(error)
                        except BaseException:
                            rest = tuple(coming)
                            frame.live += gained + 1 + len(rest)  # this op stays under way for ever
                            if rest:
                                ready.appendleft((frame, rest))
                            raise
                        gained += 1  # `fail` counts by itself
                        self.fail(frame, op, error)
                        if frame.execution not in self.frames:
                            left += len(tuple(coming))  # it has ended: they will not fire
                        break
                    if result is parked:
                        gained += 1  # it stays live, or `retire` has counted
                        break
                    out = op.out
                    if out is not None:
                        values[out] = result
                    else:
                        for index, value in zip(op.outs or (), result, strict=False):
                            values[index] = value
                    following = op.next
                    if following is not None and count == 1 and left and not ready:
                        left -= 1
                        op = following
                        continue
                    wakes = op.wakes
                    if wakes:
                        push((frame, wakes))
                        gained += len(wakes)
                    elif wakes is None:
                        for consumer in op.consumers:
                            index = consumer.index
                            waits = pending[index] - 1
                            pending[index] = waits
                            if not waits:
                                push((frame, consumer.alone))
                                gained += 1
                    break
            if gained:
                frame.live += gained
                if not frame.live:
                    self.end(frame)
        return most - left

    def _run_traced(self, budget: int | None) -> int:
        """Fire what is ready as `_run` does, op by op, so that each is reported."""
        ready = self.ready
        most = sys.maxsize if budget is None else budget
        fired = 0
        while ready and fired < most:
            frame, ops = ready.popleft()
            fired += self._fire_singly(frame, ops, most - fired)
        return fired

    def _fire_singly(self, frame: Frame, ops: tuple[Op, ...], most: int) -> int:
        """Fire at most so many ops of an entry, one by one; returns how many fired."""
        ready = self.ready
        fired = 0
        in_order = frame.in_order
        for at, op in enumerate(ops):
            if frame.ended:
                break
            if fired == most:
                ready.appendleft((frame, ops[at:]))
                break
            fired += 1
            if in_order is not None:  # the entry says only how many
                op = frame.plan.ops[heappop(in_order)]
            try:
                self.fire(frame, op)
            except BaseException:  # what stops the process; `fire` keeps all else
                if ops[at + 1 :]:
                    ready.appendleft((frame, ops[at + 1 :]))
                raise
        return fired

    def fire(self, frame: Frame, op: Op) -> None:
        """Fire one op outside of the loop, or skip or lose it."""
        reason = None if frame.skipped is None else frame.skipped.get(op.index)
        lost = frame.lost or _NOTHING_LOST
        lacks = not lost.isdisjoint(op.needs)
        result: Any = PARKED
        try:
            if lacks and op.salvage is not None:
                op.salvage(frame, lost, reason)
            elif lacks:
                self._lose(frame, op)
            elif reason is not None:
                self.skip(frame, op, reason)
            elif frame.broken is not None and op.cell >= 0 and _broken_by(frame, op):
                self._not_run(frame, op)
            else:
                result = op.fire(frame)
        except BaseException as error:  # noqa: BLE001 - the boundary to components
            let_stop(error)
            self.fail(frame, op, error)
            return
        if result is not PARKED:
            self.emit(frame, op, result)

    def _not_run(self, frame: Frame, op: Op) -> None:
        """Report an op behind a change of its component that failed, and lose it."""
        plan = frame.plan
        earlier = _broken_by(frame, op)
        reason = f"{earlier}, which was to change its component before it, did not run"
        self.reports.op_not_run(
            *(frame.execution, plan.target, op.name, reason, plan.place_of(op), frame.chain)
        )
        self._lose(frame, op)

    def emit(self, frame: Frame, op: Op, result: Any, started_ns: int | None = None) -> None:
        """Store a result and wake consumers, as `_run` does; the op was parked at `started_ns`."""
        if frame.ended:
            return
        if self.tracer.on:
            self.tracer.completed(frame, op, started_ns)
        if op.out is not None:
            frame.values[op.out] = result
        else:
            for index, value in zip(op.outs or (), result, strict=False):
                frame.values[index] = value
        self._wake(frame, op)
        self.retire(frame)

    def emit_part(
        self,
        frame: Frame,
        op: Op,
        results: Sequence[Any],
        failures: Iterable[tuple[str, BaseException, SourcePlace]],
    ) -> Literal[Marker.PARKED]:
        """End a fused graph of which ops failed; returns what its `fire` returns.

        Args:
            frame: the execution.
            op: the call of the graph.
            results: its outputs, MISSING where a failure took one away.
            failures: names of the ops that failed, each with its error and place.
        """
        for name, error, place in failures:
            self._report(frame, error, name, place)
        if frame.ended:
            return PARKED
        outs = _outs(op)
        for index, value in zip(outs, results, strict=True):
            if value is not MISSING:
                frame.values[index] = value
        pairs = zip(outs, results, strict=True)
        self.take_away(frame, [at for at, value in pairs if value is MISSING])
        self._check_answer(frame)
        self._wake(frame, op)
        return self.retire(frame)

    def skip(self, frame: Frame, op: Op, reason: str) -> Literal[Marker.PARKED]:
        """End an op without a result, and without a failure; returns what its `fire` returns.

        What needs its result is skipped as well, each when everything else that it waits for has
        fired or was skipped: so the order of all others stays.
        """
        if frame.ended:
            return PARKED
        if frame.skipped is None:
            frame.skipped = {}
            frame.apart = True
        skipped = frame.skipped
        skipped[op.index] = reason
        self.reports.counts["ops.skipped"] += 1
        try:
            over = op.skip is None or op.skip(frame, reason)
        except BaseException as error:  # noqa: BLE001 - as of any op
            let_stop(error)
            self.fail(frame, op, error)
            return PARKED
        if over:
            for consumer in op.consumers:
                if consumer.index not in op.order_only:
                    skipped.setdefault(consumer.index, reason)
            self._wake(frame, op)
        return self.retire(frame)

    def _wake(self, frame: Frame, op: Op) -> None:
        """Queue those consumers of an op that wait for nothing else."""
        if op.wakes is not None:
            self._push(frame, op.wakes)
            return
        for consumer in op.consumers:
            frame.pending[consumer.index] -= 1
            if not frame.pending[consumer.index]:
                self._push(frame, consumer.alone)

    def _push(self, frame: Frame, ops: tuple[Op, ...]) -> None:
        if ops:
            if frame.in_order is not None:
                for op in ops:
                    heappush(frame.in_order, op.index)
            self.ready.append((frame, ops))
            frame.live += len(ops)

    def ops_ready(self) -> int:
        """Return how many ops wait in the queue."""
        return sum(len(ops) for _, ops in self.ready)

    def retire(self, frame: Frame) -> Literal[Marker.PARKED]:
        """End an op of the frame without a result; returns what its `fire` returns."""
        frame.live -= 1
        if not frame.live:
            self.end(frame)
        return PARKED

    def fail(self, frame: Frame, op: Op, error: BaseException) -> None:
        """Fail an op: what depends on it does not fire. A receive gate that denies ends it all."""
        if frame.ended:
            return
        self._report(frame, error, op.name, frame.plan.place_of(op, error))
        if isinstance(error, GateDenied):
            self.reports.counts[f"gate.denied.{error.reason}"] += 1
            self.end(frame)
        else:
            self._lose(frame, op, is_first=True)

    def _check_answer(self, frame: Frame) -> None:
        """Say that there is no answer, at once, if what is lost leaves no op that could give it."""
        if frame.debt is not None and _answer_is_lost(frame):
            self.rt.unanswered(frame)

    def _lose(self, frame: Frame, op: Op, *, is_first: bool = False) -> None:
        """End an op whose result will not come, because it or an op before it failed.

        What needs the result is lost as well; what is only to come after the op goes on. Both wait
        for all else that they wait for, as behind an op that is skipped.
        """
        if frame.ended:
            return
        if op.lose is None or op.lose(frame):
            self.take_away(frame, _outs(op))
            for at in _broken_with(op):
                if frame.broken is None:
                    frame.broken = {}
                frame.broken.setdefault(at, op.name)
            if is_first or op.lose is not None:
                self._check_answer(frame)
            self._wake(frame, op)
        self.retire(frame)

    def take_away(self, frame: Frame, values: Iterable[int]) -> None:
        """Record values, by index, that will not come because of a failure."""
        if frame.lost is None:
            frame.lost = set()
            frame.apart = True
        frame.lost.update([at for at in values if at != SCRATCH])

    def _report(self, frame: Frame, error: BaseException, name: str, place: SourcePlace) -> None:
        """Report the failure of an op, or of the op `name` of a fused graph."""
        frame.failures += 1
        reports = self.reports
        plan = frame.plan
        reports.op_failed(
            *(frame.execution, plan.target, name, error),
            place=place,
            source_peer=frame.source_peer,
            chain=frame.chain,
            more=self.rt.why_few(error) if isinstance(error, _OF_PEERS) else "",
        )
        if not frame.from_bus:
            reports.bus.publish(BusKind.OP_FAILED)
        if frame.debt is not None:
            self._owe(frame, error, name, place)
        elif frame.site and frame.failures == 1:
            self.rt.undone(frame, name, error, place)
        if frame.bootstrap is not None:
            frame.bootstrap.failed(error)

    def skip_answer(self, frame: Frame) -> None:
        """Say that there is no answer, at once, if all ops that could give it are skipped."""
        skipped = frame.skipped or {}
        answers = (op for op in frame.plan.ops if op.op_type == keys.OP_SEND_RESP)
        if frame.debt is not None and all(op.index in skipped for op in answers):
            self.rt.unanswered(frame)

    def _owe(self, frame: Frame, error: BaseException, name: str, place: SourcePlace) -> None:
        """Record why an execution may owe its answer for ever."""
        if isinstance(error, GateDenied) and error.reason == REASON_DUPLICATE:
            frame.debt = None  # the request is being answered, or was
            return
        if frame.debt is OWED:
            frame.debt = refusal_of(name, error, place)

    def next_command(self) -> int:
        """Return the number of a finished side effect."""
        self._commands += 1
        return self._commands

    # -- snapshots ---------------------------------------------------------------------------

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all frames, oldest first, ready ops, and counts.

        Other tables restore what belongs to them and refers to a frame (parked ops, bootstraps).
        """
        return [
            [_save(frame, writer) for frame in self.frames.values()],
            [[writer.frame(frame), at] for frame, at in self._ready_ops()],
            self.executions.last,
            self._commands,
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        frames, ready, self.executions.last, self._commands = plain
        for row in frames:
            frame = _load(row, reader)
            self.frames[frame.execution] = frame
            reader.add_frame(frame)
            if frame.site and frame.source_peer is not None:
                raw = frame.source_peer.to_bytes()
                self.frames_of[raw] = self.frames_of.get(raw, 0) + 1
            if frame.plan.component is not None:
                self.under_way[frame.plan.component] += 1
        self.ready = deque()
        for execution, op in ready:
            frame = reader.frame(execution)
            self.ready.append((frame, frame.plan.ops[op].alone))
            if frame.in_order is not None:
                frame.in_order.append(op)  # sorted by `_ready_ops`, and so a heap

    def _ready_ops(self) -> Iterator[tuple[Frame, int]]:
        """Yield what is in the queue, op by op."""
        coming: dict[int, Iterator[int]] = {}
        for frame, ops in self.ready:
            if frame.in_order is not None and frame.execution not in coming:
                coming[frame.execution] = iter(sorted(frame.in_order))
            for op in ops:
                yield frame, next(coming.get(frame.execution, iter((op.index,))))


def _outs(op: Op) -> tuple[int, ...]:
    """Return the indices of all outputs."""
    if op.outs is not None:
        return op.outs
    return () if op.out is None else (op.out,)


def _broken_with(op: Op) -> list[tuple[int, str]]:
    """Return what can't go on without an op's change: components, with op types or "" for all."""
    if op.cell < 0:
        return []
    return [(op.cell, op_type) for op_type in (("",) if op.breaks is None else sorted(op.breaks))]


def _broken_by(frame: Frame, op: Op) -> str | None:
    """Return the op without whose change this one can't go on, or None."""
    broken = frame.broken or {}
    return broken.get((op.cell, "")) or broken.get((op.cell, op.op_type))


def refusal_of(name: str, error: BaseException, place: SourcePlace) -> WireRefusal:
    """Return the refusal for a peer that waits for an execution of which the op `name` failed."""
    where = f"{name} ({place.outer})" if place.line else name
    return WireRefusal(*describe(error), where)


def _answer_is_lost(frame: Frame) -> bool:
    """Return True if no SendResp of an execution can fire any more, for what it has lost.

    What waits for one of several (the relays of an Any) may still fire: the search ends there.
    """
    lost, broken = set(frame.lost or ()), set(frame.broken or ())
    answers = []
    for op in frame.plan.ops:  # each behind what it needs
        is_lost = not lost.isdisjoint(op.needs)
        if (
            not is_lost
            and op.cell >= 0
            and not broken.isdisjoint(((op.cell, ""), (op.cell, op.op_type)))
        ):
            is_lost = all(frame.values[at] is MISSING for at in _outs(op))  # else it has fired
        if op.op_type == keys.OP_SEND_RESP:
            answers.append(is_lost)
        if is_lost and op.op_type != OP_RELAY:
            lost.update(_outs(op))
            broken.update(_broken_with(op))
    return bool(answers) and all(answers)


def _save(frame: Frame, writer: SnapshotWriter) -> list[Any]:
    """Save a frame without scratch and without values that are the template's."""
    plan = frame.plan
    return [
        frame.execution,
        PLAN.save(plan, writer),
        frame.started_ns,
        [
            [index, VALUE.save(value, writer)]
            for index, value in enumerate(frame.values[:-1])
            if value is not plan.template[index]
        ],
        [[at, left] for at, left in enumerate(frame.pending) if left != plan.pending[at]],
        _PEER.save(frame.source_peer, writer),
        _CHARGES.save(frame.charges, writer),
        None if frame.cohorts is None else list(frame.cohorts.items()),
        None if frame.skipped is None else list(frame.skipped.items()),
        None if frame.debt is None else list(astuple(frame.debt)),
        *(getattr(frame, name) for name in _PLAIN_FIELDS),
        None if frame.lost is None else sorted(frame.lost),
        None if frame.broken is None else [[*at, name] for at, name in frame.broken.items()],
    ]


def _load(plain: Any, reader: SnapshotReader) -> Frame:
    execution, plan, started_ns, values, pending, source, charges, cohorts, *rest = plain
    skipped, debt, *rest = rest
    frame = Frame(reader.rt, reader.plans[plan], execution, started_ns)
    for index, number in values:
        frame.values[index] = reader.value(number)
    if pending:
        frame.pending = frame.pending.copy()  # it may be the plan's own
    for index, left in pending:
        frame.pending[index] = left
    frame.source_peer = _PEER.load(source, reader)
    frame.charges = _CHARGES.load(charges, reader)
    frame.cohorts = None if cohorts is None else dict(cohorts)
    if skipped is not None:
        frame.skipped = dict(skipped)
        frame.apart = True
    if debt is not None:
        frame.debt = WireRefusal(*debt) if debt[0] else OWED
    # A snapshot of an earlier release ends after `chain` or before it.
    count = len(_PLAIN_FIELDS)
    plain_fields = rest[:count]
    lost, broken = rest[count:] or (None, None)
    for name, value in zip(_PLAIN_FIELDS, plain_fields, strict=len(plain_fields) != count - 1):
        setattr(frame, name, value)
    if lost is not None:
        frame.lost = set(lost)
        frame.apart = True
    if broken is not None:
        frame.broken = {(cell, op_type): name for cell, op_type, name in broken}
    return frame
