"""Services made by hand, of two or three plain objects: no node, no program."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import bbnode.engine
from bbnode.engine import Limits, errors, steps
from bbnode.engine.clock import NodeClock
from bbnode.engine.cohorts import Cohorts
from bbnode.engine.executor import Executor
from bbnode.engine.frame import MISSING, PARKED, EntryPlan, Frame, Op
from bbnode.engine.ingress import Completed, Ingress
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.peers.round_trips import RoundTrips
from bbnode.engine.planning.program import EventSourcePlan
from bbnode.engine.reports import Reports
from bbnode.engine.rng import wire_ids
from bbnode.engine.scheduler import Scheduler, TimerKind
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.engine.sources import Sources
from bbnode.engine.suspensions import Suspensions, WaitReason
from bbnode.engine.tracing import Tracer
from bbnode.engine.turns import Turns
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import CorrelationKind, SlotFill, decode_envelope
from bbnode.ir.values import TRIGGER
from tests.engine.support import S, address, peer


def plan_of(*fires, in_turn: bool = False) -> EntryPlan:
    """A plan whose ops fire one after the other."""
    ops = []
    for index, fire in enumerate(fires):
        op = Op(index, f"op{index}", "Test", 0)
        op.fire = fire
        op.out = index
        ops.append(op)
    for op, following in itertools.pairwise(ops):
        op.consumers = (following,)
    plan = EntryPlan("entry", "target")
    plan.template = [MISSING] * (len(ops) + 1)
    plan.complete(ops, dict.fromkeys(range(1, len(ops)), 1))
    plan.in_turn = in_turn
    return plan


def executor_with(limits: Limits | None = None) -> Executor:
    clock, limits = NodeClock(), limits or Limits()
    reports = Reports(limits)
    return Executor(clock, reports, limits, Tracer(clock, reports), Ingress(limits).executions)


def run(executor: Executor, plan: EntryPlan) -> list[steps.Step]:
    frame = executor.start(plan)
    if frame is not None:
        frame.report = True
        executor.launch(frame)
    executor.run(None)
    return executor.reports.take()


def failing(_frame: Frame):
    raise errors.InvalidOperand("no")


def test_an_executor_runs_a_plan_and_reports_its_end() -> None:
    executor = executor_with()
    seen = []
    plan = plan_of(lambda f: seen.append(list(f.values)) or 3, lambda f: f.values[0] + 4)
    (finished,) = run(executor, plan)
    assert (finished.ok, finished.execution) == (True, 1)
    assert seen == [[MISSING, MISSING, MISSING]]
    assert not executor.frames


def test_an_executor_turns_a_failure_into_a_step_and_goes_on() -> None:
    executor = executor_with()
    failed, finished = run(executor, plan_of(failing, lambda f: f.values[0]))
    assert (failed.kind, failed.op, finished.ok) == ("InvalidOperand", "op0", False)
    assert run(executor, plan_of(lambda _f: 1))[0].ok


def test_an_executor_that_is_full_starts_nothing() -> None:
    executor = executor_with(Limits(frames=1))
    executor.start(plan_of(lambda _f: 1))
    assert executor.is_full
    assert [s.kind for s in run(executor, plan_of(lambda _f: 1))] == ["FramesExceeded"]


def test_an_executor_goes_out_and_comes_back() -> None:
    plan = plan_of(lambda _f: 5, lambda f: f.values[0])
    executor = executor_with()
    executor.launch(executor.start(plan))
    executor.run(1)
    writer = SnapshotWriter([plan])
    saved = executor.state(writer)
    again = executor_with()
    again.load(saved, SnapshotReader(writer.lists(), [plan]))
    assert again.frames[1].values[0] == 5
    assert again.run(None) == 1
    assert not again.frames


class Firing:
    """Notes what became of ops."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def emit(self, _frame, op, result, _started_ns=None) -> None:
        self.said.append((op.name, result))

    def fail(self, _frame, op, error) -> None:
        self.said.append((op.name, type(error)))

    def fire(self, _frame, op) -> None:
        self.said.append((op.name, "fired"))


def parking(limits: Limits | None = None) -> tuple[Suspensions, Firing, Frame]:
    limits = limits or Limits()
    firing = Firing()
    made = Suspensions(firing, NodeClock(), Scheduler(), Ingress(limits), Reports(limits), limits)
    return made, firing, Frame(None, plan_of(lambda _f: PARKED), 1, 0)


def park(table: Suspensions, frame: Frame, why: WaitReason = WaitReason.COMPLETION, **more) -> int:
    token = table.new_token()
    op = frame.plan.ops[0]
    assert table.park(frame, op, why, "somebody", until_ns=S, token=token, **more) is PARKED
    return token


def test_a_parked_op_goes_on_once() -> None:
    table, firing, frame = parking()
    token = park(table, frame)
    table.complete(Completed(token=token, result=TRIGGER, error=None))
    table.complete(Completed(token=token, result=TRIGGER, error=None))
    assert firing.said == [("op0", TRIGGER)]
    assert table.reports.counts["completion.unknown"] == 1
    assert len(table.scheduler) == len(table) == 0


def test_a_parked_op_fails_by_its_deadline() -> None:
    table, firing, frame = parking()
    park(table, frame)
    (timer,) = table.scheduler.matured(S)
    assert timer.kind is TimerKind.PARKED_DEADLINE
    table.too_late(timer.key)
    assert firing.said == [("op0", errors.DeadlineExceeded)]


def test_an_op_in_a_thread_is_abandoned_with_its_execution() -> None:
    table, firing, frame = parking()
    token = park(table, frame, WaitReason.TASK)
    table.drop_frame(frame)
    assert token in table
    table.complete(Completed(token=token, result=TRIGGER, error=None))
    assert (firing.said, len(table)) == ([], 0)
    assert table.reports.counts["completion.late"] == 1


def test_a_line_is_served_in_order_and_left_by_those_that_give_up() -> None:
    table, firing, frame = parking()
    line: dict[int, None] = {}
    first, second, third = (park(table, frame, WaitReason.QUEUE, line=line) for _ in range(3))
    table.give_up(first)
    assert list(line) == [second, third]
    table.give_next(line, 7)
    assert (firing.said, list(line)) == ([("op0", 7)], [third])


def test_the_limit_of_parked_ops_holds() -> None:
    table, _, frame = parking(Limits(pending_async=1))
    park(table, frame)
    with pytest.raises(errors.PendingAsyncExceeded):
        park(table, frame)


class Starter:
    """Notes what a turn begins."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def begin(self, frame: Frame) -> None:
        self.said.append(("begin", frame.execution))

    def fail_start(self, execution, _plan, _error, *, from_bus=False, source_peer=None) -> None:
        self.said.append(("fail", execution))

    def end(self, frame: Frame) -> None:
        self.said.append(("end", frame.execution))


def test_executions_of_an_entry_take_turns_and_late_ones_lose_theirs() -> None:
    starter, clock = Starter(), NodeClock()
    turns = Turns(starter, clock, Limits())
    plan = plan_of(lambda _f: 1, in_turn=True)
    frames = [Frame(None, plan, number, 0) for number in (1, 2, 3)]
    assert [turns.take(frame) for frame in frames] == [True, False, False]
    frames[1].deadline_ns = 5
    clock.tell(5)
    turns.give_back(frames[0])
    assert starter.said == [("fail", 2), ("end", 2), ("begin", 3)]
    assert len(turns) == 0


def outbox(limits: Limits | None = None) -> EnvelopeOutbox:
    clock, limits = NodeClock(), limits or Limits()
    reports = Reports(limits)
    return EnvelopeOutbox(
        neighbours=Neighbours(peer(0), [address(0)]),
        round_trips=RoundTrips(),
        ingress=Ingress(limits),
        clock=clock,
        reports=reports,
        tracer=Tracer(clock, reports),
        limits=limits,
        wire_ids=wire_ids(peer(0).to_bytes(), 1),
    )


def test_fills_for_one_peer_share_an_envelope() -> None:
    box = outbox(Limits(envelope_fills=2))
    box.neighbours.book.add_peer(peer(1), [address(1)])
    frame = Frame(None, plan_of(lambda _f: 1), 1, 0)
    for _ in range(3):
        fill = SlotFill(dest_suffix=site_suffix(9), payload=b"x")
        box.send(frame, frame.plan.ops[0], [peer(1), peer(2)], fill, CorrelationKind.NONE, 5, 0)
    box.flush()
    made = box.reports.take()
    assert [s.peer for s in made if isinstance(s, steps.PeerResolveFailed)] == [peer(2)] * 3
    sent = [s for s in made if isinstance(s, steps.SendEnvelope)]
    assert [len(decode_envelope(b"".join(s.parts)).fills) for s in sent] == [2, 1]


def test_a_cohort_is_collected_by_the_op_that_waits_for_it() -> None:
    table, firing, frame = parking()
    box = outbox()
    box.neighbours.book.add_peer(peer(1), [address(1)])
    cohorts = Cohorts(table.clock, table.reports, table.scheduler, table, box, box.wire_ids)
    op = frame.plan.ops[0]
    fill = SlotFill(dest_suffix=site_suffix(9), payload=b"x")
    request = cohorts.open(frame, op, "ask", [peer(1)], fill, 0, S, 10)
    assert cohorts.collect(frame, op, request) is PARKED
    (cohort,) = cohorts.table.open_cohorts()
    cohorts.answer(cohort.wire_req_id, peer(1), TRIGGER, 5)
    ((name, batch),) = firing.said
    assert (name, batch.responses) == ("op0", ((peer(1), TRIGGER),))
    assert batch.took_ns == ((peer(1), 5 - cohort.opened_ns),)
    assert len(table.scheduler) == 0


def test_sources_fire_by_time_by_phase_and_by_event() -> None:
    executor = executor_with()
    fired: list[object] = []
    plan = plan_of(lambda f: fired.append(f.values[0]))
    plan.seeds = (0,)
    kinds = [("Interval", S), ("LifecyclePhase", 1), ("EventSource", 1024), ("Pulse", 0)]
    sources = Sources(
        [EventSourcePlan(kind=kind, argument=argument, plan=plan) for kind, argument in kinds],
        executor.clock,
        Reports(Limits(), [1024]),
        Scheduler(),
        executor,
    )
    sources.boot()
    sources.enter_phase(1)
    sources.enter_phase(2)
    sources.reports.bus.publish(1024)
    sources.deliver_bus()
    executor.clock.tell(int(3.5 * S))
    for timer in sources.scheduler.matured(executor.clock.now_ns):
        sources.tick(timer.key, timer.when_ns)
    executor.run(None)
    assert fired == [TRIGGER, TRIGGER, 1024, int(3.5 * S)]
    assert sources.reports.counts["interval.missed"] == 2
    assert sources.scheduler.next_deadline() == 4 * S


# -- structure -------------------------------------------------------------------------------

PACKAGE = Path(bbnode.engine.__file__).parent


def imports() -> dict[str, set[str]]:
    """Of each module of the engine, those that it imports, under TYPE_CHECKING as well."""
    found: dict[str, set[str]] = {}
    files = {_name(path): path for path in PACKAGE.rglob("*.py")}
    for name, path in files.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                found[name] |= names & files.keys()
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & files.keys()
        found[name] -= {package for package in found[name] if files[package].stem == "__init__"}
    return found


def _name(path: Path) -> str:
    parts = ("bbnode", "engine", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for each in sorted(graph[name]):
                yield from visit(each, (*path, name))
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, ())


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert list(cycles(imports())) == []
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c", "b"]]


def test_only_ops_and_the_composition_hold_all_services() -> None:
    held = {"bbnode.engine.services", "bbnode.engine.runtime"}
    holders = {name for name, found in imports().items() if found & held}
    tops = {"bbnode.engine.runtime", "bbnode.engine.node", "bbnode.engine.install"}
    tops |= {"bbnode.engine.snapshot.whole", "bbnode.engine.record.recording"}
    assert {name for name in holders if not name.startswith("bbnode.engine.ops.")} <= tops
