"""Bootstraps: executions that prepare components before, or between, others.

Rule: a bootstrap runs only when the host asks for it. It has its components to itself: while it
runs, ops of other executions on them wait in line. Bootstraps that share no component run at once,
others in the order in which they were requested, and none overtakes one that it shares a component
with. A batch is accepted whole or not at all. The table below lists the states of a bootstrap;
QUEUED is reported as running.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.admission import adopt, check_inputs
from bbnode.engine.bootstrap.targets import (
    All,
    BootstrapInfo,
    BootstrapPlan,
    BootstrapRequest,
    BootstrapStatus,
    BootstrapTarget,
    ModuleNames,
    Slots,
)
from bbnode.engine.cells import ComponentCell
from bbnode.engine.clock import NodeClock
from bbnode.engine.deadlines import bound_of_node, seconds
from bbnode.engine.errors import (
    AlreadyTransitivelyQueued,
    BudgetExceeded,
    DeadlineExceeded,
    UnknownTarget,
    describe,
)
from bbnode.engine.executor import Executor
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.limits import Limits
from bbnode.engine.ops.role import component_bootstrap
from bbnode.engine.readiness import SlotReadiness
from bbnode.engine.reports import Reports
from bbnode.engine.scheduler import Scheduler, Timer, TimerKind
from bbnode.engine.snapshot.codec import (
    FRAME,
    PLAIN,
    TIMER,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    Via,
    many,
    optional,
)
from bbnode.engine.snapshot.events import BOOTSTRAP_START
from bbnode.engine.suspensions import Suspensions, Waiting

SLOT_PREFIX = "slot:"  # no name of a Module has a colon


class State(enum.Enum):
    """The states of a bootstrap."""

    IDLE = "idle"
    WAITING_FOR_INPUT = "waiting for input"
    QUEUED = "queued"
    RUNNING = "running"


class Move(enum.Enum):
    """The events that move a bootstrap on."""

    ASKED = "asked"
    ASKED_WITHOUT_INPUTS = "asked without inputs"  # only All asks so
    STARTED = "started"
    ENDED = "ended"  # drained, refused, or too late for its turn


# (state, move) -> next state; any other move is refused before it happens.
TRANSITIONS: Mapping[tuple[State, Move], State] = {
    (State.IDLE, Move.ASKED): State.QUEUED,
    (State.IDLE, Move.ASKED_WITHOUT_INPUTS): State.WAITING_FOR_INPUT,
    (State.WAITING_FOR_INPUT, Move.ASKED): State.QUEUED,
    (State.WAITING_FOR_INPUT, Move.ASKED_WITHOUT_INPUTS): State.WAITING_FOR_INPUT,
    (State.QUEUED, Move.STARTED): State.RUNNING,
    (State.QUEUED, Move.ENDED): State.IDLE,
    (State.RUNNING, Move.ENDED): State.IDLE,
}

STATUS = {
    State.IDLE: BootstrapStatus.IDLE,
    State.WAITING_FOR_INPUT: BootstrapStatus.WAITING_FOR_INPUT,
    State.QUEUED: BootstrapStatus.RUNNING,
    State.RUNNING: BootstrapStatus.RUNNING,
}


@dataclass(slots=True, eq=False)
class Bootstrap:
    """One bootstrap of a node, and its state."""

    plan: BootstrapPlan
    state: State = State.IDLE
    runs: int = 0
    last_ok: bool | None = None
    failure: str = ""  # of the run that is under way, or was last: its first

    def __str__(self) -> str:
        return f"bootstrap of {self.plan.name}"

    @property
    def is_under_way(self) -> bool:
        """True when it runs, or will in its turn."""
        return self.state in (State.QUEUED, State.RUNNING)

    def failed(self, error: BaseException) -> None:
        """Note the failure of an op, if it is the first of the run."""
        self.failure = self.failure or describe(error)[1]

    def move(self, move: Move) -> None:
        """Change to the next state."""
        self.state = TRANSITIONS[self.state, move]


@dataclass(slots=True, eq=False)
class Turn:
    """A bootstrap that was asked for, until it has ended."""

    number: int
    bootstrap: Bootstrap
    execution: int
    request: ev.BootstrapStart | None  # None: it runs
    since_ns: int
    timer: Timer | None
    frame: Frame | None = None


@dataclass(eq=False, repr=False)
class Bootstraps:
    """All bootstraps of one node: those that wait for their turn (`queue`), and those that run."""

    __slots__ = (
        "_all",
        "_numbers",
        "cells",
        "clock",
        "executor",
        "ingress",
        "limits",
        "queue",
        "readiness",
        "reports",
        "running",
        "scheduler",
        "suspensions",
    )

    plans: InitVar[Sequence[BootstrapPlan]]
    cells: Sequence[ComponentCell]
    clock: NodeClock
    reports: Reports
    limits: Limits
    ingress: ev.Ingress
    scheduler: Scheduler
    executor: Executor
    suspensions: Suspensions
    readiness: SlotReadiness

    def __post_init__(self, plans: Sequence[BootstrapPlan]) -> None:
        own = (component_bootstrap(index, cell) for index, cell in enumerate(self.cells))
        of_slots = [
            BootstrapPlan(
                name=SLOT_PREFIX + plan.target,
                inputs={},
                shapes={},
                plan=plan,
                touches=frozenset((index,)),
                includes=frozenset(),
            )
            for index, plan in enumerate(own)
            if plan is not None
        ]
        self._all = {plan.name: Bootstrap(plan) for plan in (*of_slots, *plans)}
        self.queue: list[Turn] = []
        self.running: list[Turn] = []
        self._numbers = 0

    # -- asking ------------------------------------------------------------------------------

    def stage(self, target: BootstrapTarget) -> ev.BootstrapAsked | None:
        """Return a request as an event, charged and copied; None when nothing is to be done.

        Raises UnknownTarget, UnknownInput, MissingInput, TooManyInputs, InputTypeMismatch,
        OversizePayload, AlreadyTransitivelyQueued, BudgetExceeded; nothing is staged then.
        """
        if isinstance(target, All):
            asked = [b for b in self._outermost() if self._is_asked(target, b.plan)]
            return self._stage(
                [BootstrapRequest(b.plan.name) for b in asked if not b.plan.inputs],
                waiting=tuple(b.plan.name for b in asked if b.plan.inputs),
            )
        if isinstance(target, Slots):
            requests = [BootstrapRequest(SLOT_PREFIX + slot) for slot in target.slots]
        elif isinstance(target, ModuleNames):
            requests = [BootstrapRequest(name) for name in target.names]
        else:
            requests = list(target.requests)
        for request in requests:
            self._check_known(request.target, slots=isinstance(target, Slots))
        self._check_not_covered(requests)
        return self._stage(requests, waiting=())

    def accepted(self, asked: ev.BootstrapAsked) -> None:
        """Mark the bootstraps of a request as queued, so that they can't be requested again."""
        for start in asked.starts:
            self._all[start.name].move(Move.ASKED)
        for name in asked.waiting:
            self._all[name].move(Move.ASKED_WITHOUT_INPUTS)

    def _outermost(self) -> Iterator[Bootstrap]:
        """Yield bootstraps that are not under way, and that no other one calls."""
        called = {name for b in self._all.values() for name in b.plan.includes}
        for bootstrap in self._all.values():
            if bootstrap.plan.name not in called and not bootstrap.is_under_way:
                yield bootstrap

    def _is_asked(self, target: All, plan: BootstrapPlan) -> bool:
        if not plan.name.startswith(SLOT_PREFIX):
            return target.modules
        return target.components and all(self.cells[at].is_needed for at in plan.touches)

    def _check_known(self, name: str, *, slots: bool) -> None:
        known = [key for key in self._all if key.startswith(SLOT_PREFIX) is slots]
        if name not in known:
            shown = [key.removeprefix(SLOT_PREFIX) for key in known]
            raise UnknownTarget(name.removeprefix(SLOT_PREFIX) if slots else name, shown)

    def _check_not_covered(self, requests: Sequence[BootstrapRequest]) -> None:
        under_way = [b for b in self._all.values() if b.is_under_way]
        covered = {b.plan.name: str(b) for b in under_way}
        for other in (*under_way, *(self._all[request.target] for request in requests)):
            covered.update((name, f"{other}, which calls it") for name in other.plan.includes)
        for request in requests:
            by = covered.get(request.target)
            if by is not None:
                raise AlreadyTransitivelyQueued(
                    f"the {self._all[request.target]} is asked for already, by the {by}; leave it "
                    "out, or wait until that has ended"
                )
            covered[request.target] = f"{self._all[request.target]}, earlier in this batch"

    def _stage(
        self, requests: Sequence[BootstrapRequest], waiting: tuple[str, ...]
    ) -> ev.BootstrapAsked | None:
        budget = self.ingress.budget
        sizes = [
            check_inputs(self._all[request.target].plan, request.inputs, self.limits)
            for request in requests
        ]
        if not requests and not waiting:
            return None
        charges: list[ev.Charge] = []
        for size in sizes:
            charge = budget.charge(size)
            if charge is None:
                for taken in charges:
                    taken.release()
                raise BudgetExceeded(
                    f"bootstrap: {sum(sizes)} bytes of input and {budget.remaining} are left "
                    "(limit ingress_bytes); wait until executions have finished"
                )
            charges.append(charge)
        return ev.BootstrapAsked(
            starts=tuple(
                ev.BootstrapStart(
                    name=request.target,
                    execution=self.ingress.executions.next(),
                    inputs={name: adopt(value) for name, value in request.inputs.items()},
                    charge=charge,
                )
                for request, charge in zip(requests, charges, strict=True)
            ),
            waiting=waiting,
        )

    # -- running -----------------------------------------------------------------------------

    def take(self, asked: ev.BootstrapAsked) -> None:
        """Queue the bootstraps of a request from the ingress."""
        now_ns = self.clock.now_ns
        for start in asked.starts:
            self._numbers += 1
            timer = self.scheduler.set(
                now_ns + self.limits.wait_ns, TimerKind.BOOTSTRAP_TURN, self._numbers
            )
            bootstrap = self._all[start.name]
            self.queue.append(Turn(self._numbers, bootstrap, start.execution, start, now_ns, timer))

    def advance(self) -> bool:
        """End what has finished and start what may start; return False if nothing changed."""
        drained = [turn for turn in self.running if turn.frame is None or turn.frame.ended]
        freed: set[int] = set()
        for turn in drained:
            self.running.remove(turn)
            freed |= turn.bootstrap.plan.touches
            self._end(turn, ok=turn.frame is not None and turn.frame.failures == 0)
        for index in freed:
            self.cells[index].gate = None
        started = self._start_what_may()
        for index in sorted(freed):
            self.suspensions.serve(self.cells[index])
        return bool(drained or started)

    def turn_is_over(self, number: int) -> None:
        """Fail a bootstrap that has waited too long for its turn."""
        for turn in self.queue:
            if turn.number == number:
                self.queue.remove(turn)
                if turn.request is not None:
                    turn.request.charge.release()
                error = DeadlineExceeded(
                    f"{turn.bootstrap} waited {seconds(self.limits.wait_ns)} for "
                    f"{self._holders(turn)}: {bound_of_node(self.limits.wait_ns)}"
                )
                plan = turn.bootstrap.plan.plan
                self.executor.fail_start(turn.execution, plan, error)
                turn.bootstrap.failed(error)
                self._end(turn, ok=False)
                return

    def _start_what_may(self) -> int:
        taken: set[int] = set()
        for turn in self.running:
            taken |= turn.bootstrap.plan.touches
        waiting, self.queue = self.queue, []
        for turn in waiting:
            touches = turn.bootstrap.plan.touches
            if taken.isdisjoint(touches):
                self._start(turn)
            else:
                self.queue.append(turn)
            taken |= touches
        return len(waiting) - len(self.queue)

    def _start(self, turn: Turn) -> None:
        bootstrap, request = turn.bootstrap, turn.request
        if request is None:
            return
        turn.request = None
        if turn.timer is not None:
            self.scheduler.cancel(turn.timer)
            turn.timer = None
        bootstrap.move(Move.STARTED)
        bootstrap.failure = ""
        self.running.append(turn)
        frame = turn.frame = self.executor.start(bootstrap.plan.plan, request.execution)
        if frame is None:
            request.charge.release()
            return
        for index in bootstrap.plan.touches:
            self.cells[index].gate = bootstrap
        frame.bootstrap = bootstrap
        frame.report = True
        frame.hold_charge(request.charge)
        plan = bootstrap.plan.plan
        for name, index in zip(plan.seed_names, plan.seeds, strict=True):
            frame.values[index] = request.inputs[name]
        self.executor.launch(frame)

    def _end(self, turn: Turn, *, ok: bool) -> None:
        bootstrap = turn.bootstrap
        bootstrap.move(Move.ENDED)
        bootstrap.runs += 1
        bootstrap.last_ok = ok
        if bootstrap.plan.name.startswith(SLOT_PREFIX):
            (number,) = bootstrap.plan.touches
            why = bootstrap.failure or "too many executions are under way to prepare it"
            self.readiness.prepared(number, "" if ok else self.reports.one_line(why))
        self.reports.counts["bootstraps.ended"] += 1
        self.reports.steps.append(
            steps.BootstrapComplete(executions=1, ok=ok, target=bootstrap.plan.name)
        )

    # -- snapshots ---------------------------------------------------------------------------

    def entry_plans(self) -> list[EntryPlan]:
        """Return the plans of all bootstraps."""
        return [bootstrap.plan.plan for bootstrap in self._all.values()]

    @property
    def _turns(self) -> Via:
        """The form of turns in a snapshot."""
        turn: RowForm[Turn] = RowForm(
            Turn,
            number=PLAIN,
            bootstrap=Via(lambda it, _: it.plan.name, lambda name, _: self._all[name]),
            execution=PLAIN,
            request=optional(BOOTSTRAP_START),
            since_ns=PLAIN,
            timer=TIMER,
            frame=optional(FRAME),
        )
        return many(turn, list)

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the state of each, and the turns that wait and run."""
        return [
            [
                [b.plan.name, b.state.value, b.runs, b.last_ok, b.failure]
                for b in self._all.values()
            ],
            self._turns.save(self.queue, writer),
            self._turns.save(self.running, writer),
            self._numbers,
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        stands, queue, running, self._numbers = plain
        for name, state, runs, last_ok, failure in stands:
            bootstrap = self._all[name]
            bootstrap.state, bootstrap.runs, bootstrap.last_ok = State(state), runs, last_ok
            bootstrap.failure = failure
        self.queue = self._turns.load(queue, reader)
        self.running = self._turns.load(running, reader)
        for turn in self.running:
            if turn.frame is not None:
                turn.frame.bootstrap = turn.bootstrap
                for index in turn.bootstrap.plan.touches:
                    self.cells[index].gate = turn.bootstrap

    # -- views -------------------------------------------------------------------------------

    def status(self, name: str | None) -> BootstrapStatus:
        """Return the status of one bootstrap (`slot:<slot>`: a component's), or of the node."""
        if name is not None:
            if name not in self._all:
                raise UnknownTarget(name, self._all)
            return STATUS[self._all[name].state]
        found = {STATUS[bootstrap.state] for bootstrap in self._all.values()}
        for status in (BootstrapStatus.RUNNING, BootstrapStatus.WAITING_FOR_INPUT):
            if status in found:
                return status
        return BootstrapStatus.IDLE

    def infos(self) -> list[BootstrapInfo]:
        """Return all bootstraps, in the order in which `All` runs them."""
        return [
            BootstrapInfo(
                name=bootstrap.plan.name,
                status=STATUS[bootstrap.state],
                inputs=tuple(bootstrap.plan.inputs),
                touches=tuple(self.cells[i].slot for i in sorted(bootstrap.plan.touches)),
                runs=bootstrap.runs,
                last_ok=bootstrap.last_ok,
            )
            for bootstrap in self._all.values()
        ]

    def waiting(self) -> list[Waiting]:
        """Return the bootstraps that wait for their turn."""
        return [
            Waiting(
                what=str(turn.bootstrap),
                why="its turn on shared components",
                whom=self._holders(turn),
                execution=turn.execution,
                target=turn.bootstrap.plan.plan.target,
                since_ns=turn.since_ns,
                until_ns=turn.since_ns + self.limits.wait_ns,
            )
            for turn in self.queue
        ]

    def _holders(self, turn: Turn) -> str:
        touches = turn.bootstrap.plan.touches
        before = [t for t in (*self.running, *self.queue) if t.number < turn.number]
        return ", ".join(
            str(t.bootstrap) for t in before if not touches.isdisjoint(t.bootstrap.plan.touches)
        )
