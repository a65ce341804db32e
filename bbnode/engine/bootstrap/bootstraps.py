"""Bootstraps: what prepares components before, or between, executions of bodies.

Rule: the host asks, nothing starts by itself. A bootstrap has its components to itself: while
it runs, ops of other executions on them wait in line. Bootstraps that share no component run
at once, others in the order in which they were asked for, and none overtakes one that it
shares a component with. A batch is taken whole or not at all. The states of a bootstrap stand
below as data; QUEUED shows as running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.admission import adopt, check_inputs
from bbnode.engine.bootstrap.states import STATUS, Bootstrap, Move, State, Turn
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
from bbnode.engine.errors import (
    AlreadyTransitivelyQueued,
    BudgetExceeded,
    DeadlineExceeded,
    UnknownTarget,
)
from bbnode.engine.frame import EntryPlan
from bbnode.engine.ops.role import component_bootstrap
from bbnode.engine.parking import Waiting
from bbnode.engine.scheduler import TimerKind

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

# How long a bootstrap waits for others that have its components: ten ops that each use up the
# compiler's per-hop budget.
MAX_TURN_NS = 300_000_000_000
SLOT_PREFIX = "slot:"  # no name of a Module has a colon


class Bootstraps:
    """All bootstraps of one node."""

    def __init__(self, rt: Runtime, plans: Sequence[BootstrapPlan]) -> None:
        self._rt = rt
        own = (component_bootstrap(index, cell) for index, cell in enumerate(rt.cells))
        of_slots = [
            BootstrapPlan(
                name=SLOT_PREFIX + plan.target,
                inputs={},
                plan=plan,
                touches=frozenset((index,)),
                includes=frozenset(),
            )
            for index, plan in enumerate(own)
            if plan is not None
        ]
        self._all = {plan.name: Bootstrap(plan) for plan in (*of_slots, *plans)}
        self._queue: list[Turn] = []
        self._running: list[Turn] = []
        self._numbers = 0

    # -- asking ------------------------------------------------------------------------------

    def stage(self, target: BootstrapTarget) -> ev.BootstrapAsked | None:
        """What a request comes to, charged and copied; None when nothing is to be done.

        Raises UnknownTarget, UnknownInput, MissingInput, TooManyInputs, InputTypeMismatch,
        OversizePayload, AlreadyTransitivelyQueued, BudgetExceeded; nothing is staged then.
        """
        if isinstance(target, All):
            asked = [b for b in self._outermost() if _is_asked(target, b.plan.name)]
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
        """The request is in the ingress: nobody else may ask for the same now."""
        for start in asked.starts:
            self._all[start.name].move(Move.ASKED)
        for name in asked.waiting:
            self._all[name].move(Move.ASKED_WITHOUT_INPUTS)

    def _outermost(self) -> Iterator[Bootstrap]:
        """Bootstraps that are not under way, and that no other one calls."""
        called = {name for b in self._all.values() for name in b.plan.includes}
        for bootstrap in self._all.values():
            if bootstrap.plan.name not in called and not bootstrap.is_under_way:
                yield bootstrap

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
        rt = self._rt
        sizes = [
            check_inputs(self._all[request.target].plan, request.inputs, rt.limits)
            for request in requests
        ]
        if not requests and not waiting:
            return None
        charges: list[ev.Charge] = []
        for size in sizes:
            charge = rt.ingress.budget.charge(size)
            if charge is None:
                for taken in charges:
                    taken.release()
                raise BudgetExceeded(
                    f"bootstrap: {sum(sizes)} bytes of input and {rt.ingress.budget.remaining} are "
                    "left (limit ingress_bytes); wait until executions have finished"
                )
            charges.append(charge)
        return ev.BootstrapAsked(
            starts=tuple(
                ev.BootstrapStart(
                    name=request.target,
                    execution=rt.executions(),
                    inputs={name: adopt(value) for name, value in request.inputs.items()},
                    charge=charge,
                )
                for request, charge in zip(requests, charges, strict=True)
            ),
            waiting=waiting,
        )

    # -- running -----------------------------------------------------------------------------

    def take(self, asked: ev.BootstrapAsked) -> None:
        """A request came out of the ingress: queue what it asks for."""
        rt = self._rt
        for start in asked.starts:
            self._numbers += 1
            timer = rt.scheduler.set(
                rt.now_ns + MAX_TURN_NS, TimerKind.BOOTSTRAP_TURN, self._numbers
            )
            bootstrap = self._all[start.name]
            self._queue.append(
                Turn(self._numbers, bootstrap, start.execution, start, rt.now_ns, timer)
            )

    def advance(self) -> bool:
        """End what has drained and start what may start; False when there was nothing to do."""
        if not self._queue and not self._running:
            return False
        drained = [turn for turn in self._running if turn.frame is None or turn.frame.ended]
        freed: set[int] = set()
        for turn in drained:
            self._running.remove(turn)
            freed |= turn.bootstrap.plan.touches
            self._end(turn, ok=turn.frame is not None and turn.frame.failures == 0)
        for index in freed:
            self._rt.cells[index].gate = None
        started = self._start_what_may()
        for index in sorted(freed):
            self._rt.suspensions.serve(self._rt.cells[index])
        return bool(drained or started)

    def turn_is_over(self, number: int) -> None:
        """A bootstrap has waited too long for its turn."""
        for turn in self._queue:
            if turn.number == number:
                self._queue.remove(turn)
                if turn.request is not None:
                    turn.request.charge.release()
                self._rt.fail_start(
                    turn.execution,
                    turn.bootstrap.plan.plan,
                    DeadlineExceeded(
                        f"{turn.bootstrap} waited {MAX_TURN_NS // 1_000_000} ms for "
                        f"{self._holders(turn)}"
                    ),
                )
                self._end(turn, ok=False)
                return

    def _start_what_may(self) -> int:
        taken: set[int] = set()
        for turn in self._running:
            taken |= turn.bootstrap.plan.touches
        waiting, self._queue = self._queue, []
        for turn in waiting:
            touches = turn.bootstrap.plan.touches
            if taken.isdisjoint(touches):
                self._start(turn)
            else:
                self._queue.append(turn)
            taken |= touches
        return len(waiting) - len(self._queue)

    def _start(self, turn: Turn) -> None:
        rt = self._rt
        bootstrap, request = turn.bootstrap, turn.request
        if request is None:
            return
        turn.request = None
        if turn.timer is not None:
            rt.scheduler.cancel(turn.timer)
            turn.timer = None
        bootstrap.move(Move.STARTED)
        self._running.append(turn)
        frame = turn.frame = rt.start(bootstrap.plan.plan, request.execution)
        if frame is None:
            request.charge.release()
            return
        for index in bootstrap.plan.touches:
            rt.cells[index].gate = bootstrap
        frame.bootstrap = bootstrap
        frame.report = True
        frame.hold_charge(request.charge)
        plan = bootstrap.plan.plan
        for name, index in zip(plan.seed_names, plan.seeds, strict=True):
            frame.values[index] = request.inputs[name]
        rt.launch(frame)

    def _end(self, turn: Turn, *, ok: bool) -> None:
        bootstrap = turn.bootstrap
        bootstrap.move(Move.ENDED)
        bootstrap.runs += 1
        bootstrap.last_ok = ok
        self._rt.counts["bootstraps.ended"] += 1
        self._rt.steps.append(
            steps.BootstrapComplete(executions=1, ok=ok, target=bootstrap.plan.name)
        )

    # -- snapshots ---------------------------------------------------------------------------

    def plans(self) -> list[EntryPlan]:
        """What each of them runs."""
        return [bootstrap.plan.plan for bootstrap in self._all.values()]

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: how each stands, and the turns that wait and run."""
        return [
            [[b.plan.name, b.state.value, b.runs, b.last_ok] for b in self._all.values()],
            [turn.state(names) for turn in self._queue],
            [turn.state(names) for turn in self._running],
            self._numbers,
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        stands, queue, running, self._numbers = plain
        for name, state, runs, last_ok in stands:
            bootstrap = self._all[name]
            bootstrap.state, bootstrap.runs, bootstrap.last_ok = State(state), runs, last_ok
        self._queue = [Turn.loaded(row, self._all, names) for row in queue]
        self._running = [Turn.loaded(row, self._all, names) for row in running]
        for turn in self._running:
            if turn.frame is not None:
                turn.frame.bootstrap = turn.bootstrap
                for index in turn.bootstrap.plan.touches:
                    self._rt.cells[index].gate = turn.bootstrap

    # -- looking at it -----------------------------------------------------------------------

    def status(self, name: str | None) -> BootstrapStatus:
        """How one bootstrap stands (of a component: `slot:<slot>`), or the node as a whole."""
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
        """All bootstraps, in the order in which `All` runs them."""
        return [
            BootstrapInfo(
                name=bootstrap.plan.name,
                status=STATUS[bootstrap.state],
                inputs=tuple(bootstrap.plan.inputs),
                touches=tuple(self._rt.cells[i].slot for i in sorted(bootstrap.plan.touches)),
                runs=bootstrap.runs,
                last_ok=bootstrap.last_ok,
            )
            for bootstrap in self._all.values()
        ]

    def waiting(self) -> list[Waiting]:
        """Bootstraps that wait for their turn."""
        return [
            Waiting(
                what=str(turn.bootstrap),
                why="its turn on shared components",
                whom=self._holders(turn),
                execution=turn.execution,
                target=turn.bootstrap.plan.plan.target,
                since_ns=turn.since_ns,
                until_ns=turn.since_ns + MAX_TURN_NS,
            )
            for turn in self._queue
        ]

    def _holders(self, turn: Turn) -> str:
        touches = turn.bootstrap.plan.touches
        before = [t for t in (*self._running, *self._queue) if t.number < turn.number]
        return ", ".join(
            str(t.bootstrap) for t in before if not touches.isdisjoint(t.bootstrap.plan.touches)
        )


def _is_asked(target: All, name: str) -> bool:
    return target.components if name.startswith(SLOT_PREFIX) else target.modules
