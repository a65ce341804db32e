"""The order in which ops fire: that of a plain queue, whatever the loop does to be quick.

Where it can be seen which of several ready ops fires first, that is the first in the program.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.engine import Limits, Node, ProgramPlan, install, plan_program
from bbnode.engine.errors import GateDenied
from bbnode.engine.frame import EntryPlan, Frame, Op
from bbnode.ir.values import TRIGGER
from tests.engine.builder import Partition, model
from tests.engine.support import Boom, S, bring_up, peer

Fired = tuple[int, str]  # execution, op

OK, FAILS, DENIED, SKIPS = "ok", "fails", "denied", "skips"


@dataclass
class Web:
    """Ops that wait for each other in some way, and what becomes of each."""

    program: ProgramPlan
    plan: EntryPlan
    outcomes: dict[str, str]
    fired: list[Fired]
    passed_over: int = 0  # ops whose turn came, and that were skipped or lost then

    def node(self, budget: int | None = None, *, trace: bool = False) -> Node:
        limits = Limits(cycle_ops=budget)
        return install(self.program, peer_id=peer(0), limits=limits, trace=trace)

    def expected(self, executions: int) -> list[Fired]:
        """What a queue of single ops does, one execution after the other being started."""
        plan = self.plan
        self.passed_over = 0
        skipped: set[tuple[int, int]] = set()  # or lost
        pending = {e: plan.pending.copy() for e in range(1, executions + 1)}
        ready = deque((e, op) for e in pending for op in plan.initial)
        ended: set[int] = set()
        seen = []
        while ready:
            execution, op = ready.popleft()
            if execution in ended:
                continue
            if plan.in_order:  # whichever became ready, the first in the program has its turn
                ready.appendleft((execution, op))
                mine = [entry for entry in ready if entry[0] == execution]
                first = min(mine, key=lambda entry: entry[1].index)
                ready[ready.index(first)] = execution, op
                op = first[1]
                ready.popleft()
            outcome = SKIPS
            if (execution, op.index) in skipped:
                self.passed_over += 1
            else:
                seen.append((execution, op.name))
                outcome = self.outcomes.get(op.name, OK)
            if outcome == DENIED:
                ended.add(execution)
            if outcome == DENIED:
                continue
            for consumer in op.consumers:
                if outcome in (SKIPS, FAILS) and consumer.index not in op.order_only:
                    skipped.add((execution, consumer.index))
                pending[execution][consumer.index] -= 1
                if not pending[execution][consumer.index]:
                    ready.append((execution, consumer))
        return seen


def web(
    waits: list[set[int]],
    outcomes: dict[str, str],
    follows: list[set[int]] | None = None,
    *,
    in_order: bool = False,
) -> Web:
    """Op k (from 1 on) waits for the ops of `waits[k - 1]`; 0 is the input.

    It fires after those of `follows[k - 1]`, and needs nothing of them.
    """
    p = Partition("server", inputs=["v0"])
    for number, before in enumerate(waits, 1):
        first, *others = [f"v{k}" for k in sorted(before)] or ["v0"]
        p.sys(
            "OnTrigger", [first], f"v{number}", called=f"op{number}", after=others,
            control=[f"op{k}" for k in sorted(follows[number - 1] - {0})] if follows else (),
        )  # fmt: skip
    program = plan_program(model(p), ["server"])
    made = Web(program, program.by_name[p.name].invoke, outcomes, [])
    made.plan.in_order = in_order
    for op in made.plan.ops:
        op.fire = _told(made, op, op.fire)
    return made


def _told(made: Web, op: Op, fire: Any) -> Any:
    name = op.name

    def told(frame: Frame) -> Any:
        made.fired.append((frame.execution, name))
        outcome = made.outcomes.get(name, OK)
        if outcome == FAILS:
            raise Boom(name)
        if outcome == DENIED:
            raise GateDenied(name, "cooldown", "by the test")
        if outcome == SKIPS:
            return frame.rt.executor.skip(frame, op, f"{name} was")
        return fire(frame)

    return told


@st.composite
def webs(draw: st.DrawFn) -> Web:
    size = draw(st.integers(1, 12))
    waits = [draw(st.sets(st.integers(0, k), max_size=4)) for k in range(size)]
    follows = [draw(st.sets(st.integers(0, k), max_size=2)) for k in range(size)]
    outcomes = draw(
        st.dictionaries(
            st.integers(1, size).map("op{}".format),
            st.sampled_from([FAILS, DENIED, SKIPS, SKIPS]),
            max_size=3,
        )
    )
    return web(waits, outcomes, follows, in_order=draw(st.booleans()))


def drain(made: Web, node: Node, *, restored: bool = False) -> Node:
    """Poll until nothing is ready, perhaps as another node after each poll."""
    now_ns = 0
    while not now_ns or node.next_deadline() is not None:
        node.poll(now_ns)
        now_ns += 1
        if restored:
            again = made.node(node._rt.limits.cycle_ops)
            again.restore(node.snapshot(), now_ns, same_life=True)
            node = again
            node.poll(now_ns)
    return node


@given(webs(), st.integers(1, 3), st.none() | st.integers(1, 5), st.booleans())
@settings(max_examples=150)
def test_ops_fire_in_the_order_in_which_they_became_ready(
    made: Web, executions: int, budget: int | None, trace: bool
) -> None:
    node = made.node(budget, trace=trace)
    for _ in range(executions):
        node.invoke("server", {"v0": TRIGGER})
    drain(made, node)
    assert made.fired == made.expected(executions)
    counts = node.counters()
    assert counts["ops.fired"] == len(made.fired) + made.passed_over
    assert counts["executions.live"] == 0
    assert not node._rt.executor.ready


@given(webs(), st.integers(1, 3), st.integers(1, 5))
def test_the_order_outlives_a_restore_at_any_poll(made: Web, executions: int, budget: int) -> None:
    node = made.node(budget)
    for _ in range(executions):
        node.invoke("server", {"v0": TRIGGER})
    node = drain(made, node, restored=True)
    assert made.fired == made.expected(executions)
    assert node.counters()["ops.fired"] == len(made.fired) + made.passed_over


@given(webs(), st.integers(1, 6))
def test_no_poll_fires_more_than_its_budget(made: Web, budget: int) -> None:
    node = made.node(budget)
    node.invoke("server", {"v0": TRIGGER})
    while True:
        before = node.counters().get("ops.fired", 0)
        node.poll(0)
        came = node.counters().get("ops.fired", 0) - before
        if node.next_deadline() is None:
            break
        assert came == budget
    assert came <= budget


@pytest.mark.parametrize("trace", [False, True])
def test_who_stops_the_process_in_an_op_loses_that_op_alone(trace: bool) -> None:
    made = web([{0}, {0}, {0}, {1, 2, 3}], {})
    node = made.node(trace=trace)
    ops = made.plan.ops
    untouched = ops[1].fire

    def stop(_frame: Frame) -> Any:
        signal.raise_signal(signal.SIGINT)

    node.invoke("server", {"v0": TRIGGER})
    ops[1].fire = stop
    with pytest.raises(KeyboardInterrupt):
        node.poll(0)
    ops[1].fire = untouched
    (frame,) = node._rt.executor.frames.values()
    assert frame.live == 2  # what was stopped, and what is still to come
    node.poll(0)
    assert frame.live == 1
    assert [name for _, name in made.fired] == ["op1", "op3"]
    assert node.counters()["executions.live"] == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_a_snapshot_keeps_the_collector_out_and_leaves_it_as_it_was(is_on: bool) -> None:
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "later", called="nap", duration_ns=S)
    node = bring_up(model(p), "server")
    for _ in range(4000):
        node.invoke("server", {"x": TRIGGER})
    node.poll(0)
    ran: list[str] = []
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(lambda phase, _info: ran.append(phase))
    try:
        data = node.snapshot()
        during = list(ran)
        bring_up(model(p), "server").restore(data)
        after = gc.isenabled()
    finally:
        gc.callbacks.pop()
        (gc.enable if was_on else gc.disable)()
    assert after is is_on
    assert during == []
