"""Executions that share what a component keeps take turns; others do not."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import Limits, steps
from bbnode.engine.turns import Turns
from bbnode.ir import keys
from bbnode.ir.types import TENSOR_FLOAT
from tests.engine.builder import SENDERS, Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import S, bring_up, component, of, peer

MODEL = keys.role_domain("Model")


def trainer(*, last: str = "Params") -> Partition:
    """What a client does with the weights of a round: load, train, answer."""
    p = Partition("server")
    p.bind("m", "Model", "test.ScriptModel")
    weights = p.recv("weights", node=TENSOR_FLOAT)
    p.op(MODEL, "LoadParameters", [weights], ["loaded"], slot="m")
    p.op(MODEL, "Train", [], ["stats"], after=["loaded"], epochs=1, batch=1, slot="m")
    p.op(MODEL, last, [], ["answer"], after=["stats"], slot="m")
    p.output("made", "answer")
    return p


def round_of(value: float):
    return np.full(1, value, np.float32)


def deliver(node, p: Partition, value: float, *, remaining_ns: int = 0) -> None:
    node.deliver_inbound(
        peer(3), envelope(peer(3), p.site("weights"), round_of(value), remaining_ns=remaining_ns)
    )


def tasks(made) -> list[steps.RunTask]:
    return of(steps.RunTask, made)


def run(node, task: steps.RunTask) -> None:
    node.complete(task.token, task.fn())


def answers(made) -> list[float]:
    return [float(step.value[0]) for step in of(steps.AppEvent, made)]


def test_two_rounds_at_once_do_not_mix():
    p = trainer()
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    deliver(node, p, 10.0)
    deliver(node, p, 20.0)
    made = node.poll(0)
    (first,) = tasks(made)
    assert component(node, "m").calls == ["load 10.0"]
    assert node.counters()["executions.in_line"] == 1
    (waits,) = [w for w in node.waiting() if w.why == "its turn"]
    assert waits.whom.startswith("execution ")
    run(node, first)
    made = node.poll(1)
    assert answers(made) == [11.0]
    (second,) = tasks(made)
    run(node, second)
    assert answers(node.poll(2)) == [21.0]
    assert component(node, "m").calls == [
        "load 10.0", "train 1 1", "params", "load 20.0", "train 1 1", "params",
    ]  # fmt: skip
    assert node.counters()["executions.live"] == 0


def test_the_next_one_has_its_turn_when_the_one_before_fails():
    p = trainer()
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    deliver(node, p, 10.0)
    deliver(node, p, 20.0)
    (first,) = tasks(node.poll(0))
    node.fail(first.token, ValueError("no data"))
    (second,) = tasks(node.poll(1))
    run(node, second)
    assert answers(node.poll(2)) == [21.0]


def test_whose_turn_comes_too_late_is_told_so():
    p = trainer()
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    deliver(node, p, 10.0)
    for value in (20.0, 30.0):
        deliver(node, p, value, remaining_ns=S)
    deliver(node, p, 40.0)
    (first,) = tasks(node.poll(0))
    run(node, first)
    made = node.poll(2 * S)
    late = [s.kind for s in of(steps.OpFailed, made)]
    assert late == ["DeadlineExceeded", "DeadlineExceeded"]
    (last,) = tasks(made)
    run(node, last)
    assert answers(node.poll(2 * S + 1)) == [41.0]
    assert node.counters()["executions.live"] == 0


def test_turns_outlive_a_restart():
    p = trainer()
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    for value in (10.0, 20.0, 30.0):
        deliver(node, p, value)
    node.poll(0)
    again = bring_up(model(p), "server")
    again.restore(node.snapshot())
    seen = []
    made = again.poll(0)
    for now in range(1, 4):
        (task,) = tasks(made)
        run(again, task)
        made = again.poll(now)
        seen += answers(made)
    assert seen == [11.0, 21.0, 31.0]
    assert again.counters()["executions.in_line"] == 0


def test_reading_alone_needs_no_turn():
    p = Partition("server")
    p.bind("m", "Model", "test.ScriptModel")
    x = p.recv("weights", node=TENSOR_FLOAT)
    p.op(MODEL, "Forward", [x], ["a"], slot="m")
    p.op(MODEL, "Params", [], ["b"], after=["a"], slot="m")
    p.sys("Sleep", ["b"], "slept", duration_ns=S)
    p.output("made", "slept")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    deliver(node, p, 1.0)
    deliver(node, p, 2.0)
    node.poll(0)
    assert node.counters()["executions.in_line"] == 0
    assert node.counters()["ops.parked"] == 2


def test_who_waits_for_other_executions_takes_no_turns():
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["x"], ["loaded"], slot="m")
    p.op(MODEL, "Params", [], ["params"], after=["loaded"], slot="m")
    p.sys("Limit.Acquire", ["loaded"], "unit", name="one", n=1)
    p.output("made", "unit")
    p.type("x", TENSOR_FLOAT)
    node = bring_up(model(p), "server")
    for value in (1.0, 2.0):
        node.invoke("server", {"x": round_of(value)})
    node.poll(0)
    assert node.counters()["executions.in_line"] == 0


@pytest.mark.parametrize("gone", [False, True])
def test_an_execution_that_ends_in_the_line_leaves_it(gone: bool):
    p = trainer()
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    for value in (10.0, 20.0, 30.0):
        deliver(node, p, value)
    (first,) = tasks(node.poll(0))
    turns: Turns = node._rt.executor.turns
    if gone:
        middle = sorted(node._rt.executor.frames)[1]
        node._rt.executor.end(node._rt.executor.frames[middle])
    assert len(turns) == (1 if gone else 2)
    run(node, first)
    (second,) = tasks(node.poll(1))
    run(node, second)
    assert answers(node.poll(2)) == [31.0 if gone else 21.0]


def test_one_peer_does_not_fill_the_node_and_others_go_on():
    p = trainer()
    node = bring_up(model(p), "server", limits=Limits(frames_per_peer=3))
    for each in (peer(3), peer(4)):
        node.peer_connected(each, SENDERS)

    def send(sender, value: float) -> list[steps.Step]:
        envelope_of = envelope(sender, p.site("weights"), round_of(value))
        node.deliver_inbound(sender, envelope_of)
        return node.poll(0)

    made = [step for value in range(5) for step in send(peer(3), float(value))]
    assert [(f.peer, f.kind) for f in of(steps.WireReceiveFailed, made)] == [
        (peer(3), "TooManyExecutions")
    ] * 2
    assert not of(steps.WireReceiveFailed, send(peer(4), 7.0))
    # One that ends makes room for one, also after a restart from a snapshot.
    saved = node.snapshot()
    node = bring_up(model(p), "server", limits=Limits(frames_per_peer=3))
    node.restore(saved)
    node.peer_connected(peer(3), SENDERS)
    run(node, tasks(node.poll(0))[0])
    node.poll(0)
    assert not of(steps.WireReceiveFailed, send(peer(3), 8.0))
    assert of(steps.WireReceiveFailed, send(peer(3), 9.0))
