"""Ops that are skipped: what depends on them, what only follows them, and who is told."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import Node, steps
from bbnode.ir.values import TRIGGER, Value
from tests.engine.builder import Partition, model
from tests.engine.support import MS, S, bring_up, of

YES, NO = np.array(True), np.array(False)


def run(p: Partition, **inputs: Value) -> tuple[Node, list[steps.Step]]:
    node = bring_up(model(p), "server")
    node.invoke("server", inputs)
    return node, node.poll(1)


def shown(made: list[steps.Step]) -> dict[str, Value]:
    return {step.topic: step.value for step in of(steps.AppEvent, made)}


def skipped(made: list[steps.Step]) -> dict[str, str]:
    return {step.name: step.reason for step in of(steps.OutputSkipped, made)}


def conditional() -> Partition:
    p = Partition("server", inputs=["x", "condition"])
    p.sys("When", ["condition"], "yes", called="yes", expect=1)
    p.sys("When", ["condition"], "no", called="no", expect=0)
    return p


def test_what_needs_a_false_condition_is_skipped_and_the_rest_goes_on() -> None:
    p = conditional()
    p.sys("PassThrough", ["x"], "then", after=["yes"])
    p.sys("PassThrough", ["then"], "further")
    p.sys("PassThrough", ["x"], "otherwise", after=["no"])
    p.output("a", "further")
    p.output("b", "otherwise")
    p.output("c", "x")
    for condition, given, missing in ((YES, {"a", "c"}, "b"), (NO, {"b", "c"}, "a")):
        node, made = run(p, x=np.float32(3), condition=condition)
        assert shown(made).keys() == given
        assert list(skipped(made)) == [missing]
        assert of(steps.OpFailed, made) == []
        (end,) = of(steps.ExecutionFinished, made)
        assert end.ok
        assert node.executions() == []
        assert node.counters()["ingress.bytes"] == 0
    assert "yes is false" in skipped(made)["a"]
    assert node.counters()["ops.skipped"] > 0


@pytest.mark.parametrize("trace", [False, True])
def test_an_output_that_has_readers_is_told_as_well(trace: bool) -> None:
    p = conditional()
    p.output("a", "x", after=["yes"])
    p.sys("AppEmit", ["a"], name="never")
    node = bring_up(model(p), "server")
    node.set_tracing(trace)
    execution = node.invoke("server", {"x": TRIGGER, "condition": NO})
    made = node.poll(1)
    (step,) = of(steps.OutputSkipped, made)
    assert (step.execution, step.target, step.name) == (execution, p.name, "a")
    assert shown(made) == {}


def test_an_op_that_only_follows_a_skipped_one_fires_in_its_place() -> None:
    p = conditional()
    p.sys("Sleep", ["x"], "slept", duration_ns=5 * MS)
    p.sys("AppEmit", ["slept"], name="first", called="first")
    p.sys("AppEmit", ["x"], name="second", called="second", after=["yes"], control=["first"])
    p.sys("AppEmit", ["x"], name="third", called="third", control=["second"])
    node, made = run(p, x=TRIGGER, condition=NO)
    assert shown(made) == {}  # the third waits for what the skipped one had to wait for
    made = node.poll(6 * MS)
    assert list(shown(made)) == ["first", "third"]
    assert node.executions() == []


def test_an_after_on_a_skipped_op_of_the_same_slot_is_a_need_and_its_order_is_none() -> None:
    p = conditional()
    p.sys("AppEmit", ["x"], name="second", called="second", after=["yes"], control=[])
    p.sys("PassThrough", ["x"], "y", called="y", after=["yes"])
    p.sys("AppEmit", ["x"], name="both", called="both", after=["y"], control=["y"])
    node, made = run(p, x=TRIGGER, condition=NO)
    assert shown(made) == {}
    assert node.executions() == []


@pytest.mark.parametrize(
    ("op_type", "attributes", "fires"),
    [
        ("Any", {"group": ""}, True),
        ("DeadlineMatch", {}, True),
        ("Threshold", {"n": 1}, True),
        ("Threshold", {"n": 2}, False),
    ],
)
def test_a_merging_op_is_skipped_only_when_too_few_inputs_are_left(
    op_type: str, attributes: dict[str, object], fires: bool
) -> None:
    p = conditional()
    p.sys("OnTrigger", ["x"], "left", after=["yes"])
    p.sys("OnTrigger", ["x"], "right", after=["no"])
    p.sys(op_type, ["left", "right"], "merged", **attributes)
    p.output("out", "merged")
    for condition in (YES, NO):
        node, made = run(p, x=TRIGGER, condition=condition)
        assert ("out" in shown(made)) is fires
        assert ("out" in skipped(made)) is not fires
        assert node.executions() == []
    q = conditional()
    q.sys("OnTrigger", ["x"], "left", after=["yes"])
    q.sys("OnTrigger", ["x"], "right", after=["yes"])
    q.sys(op_type, ["left", "right"], "merged", **attributes)
    q.output("out", "merged")
    node, made = run(q, x=TRIGGER, condition=NO)
    assert list(skipped(made)) == ["out"]
    assert node.executions() == []


def test_a_call_is_skipped_whole() -> None:
    inner = Partition("inner", inputs=["a", "b"], main=False)
    inner.sys("PassThrough", ["a"], "c")
    inner.sys("AppEmit", ["b"], name="inside")
    inner.function.output.append("c")
    p = conditional()
    p.sys("PassThrough", ["x"], "y", after=["yes"])
    p.op(inner.function.domain, "inner", ["x", "y"], ["z"])
    p.output("out", "z")
    node = bring_up(model(p, functions=[inner.function]), "server")
    node.invoke("server", {"x": TRIGGER, "condition": NO})
    made = node.poll(1)
    assert list(skipped(made)) == ["out"]
    assert shown(made) == {}


def test_a_unit_is_given_back_when_its_release_is_skipped() -> None:
    p = conditional()
    p.sys("Limit.Acquire", ["x"], "unit", name="door", n=1, stamp_ns=S)
    p.sys("AppNotify", ["unit"], name="in")
    p.sys("Limit.Release", ["unit"], "", name="door", after=["yes"])
    node = bring_up(model(p), "server")
    for now in (1, 2):
        node.invoke("server", {"x": TRIGGER, "condition": NO})
        assert list(shown(node.poll(now))) == ["in"]
    assert node.executions() == []


@pytest.mark.parametrize(
    "bad", [np.array([True, False]), np.float32(1), np.zeros((0,), np.bool_), TRIGGER]
)
def test_a_condition_that_is_no_single_bool_is_a_failure(bad: Value) -> None:
    p = conditional()
    p.sys("AppNotify", ["yes"], name="never")
    _, made = run(p, x=TRIGGER, condition=bad)
    assert {step.kind for step in of(steps.OpFailed, made)} == {"InvalidOperand"}
    assert "has to be one bool" in of(steps.OpFailed, made)[0].detail
    assert shown(made) == {}


def test_what_is_skipped_outlives_a_restore() -> None:
    p = conditional()
    p.sys("Sleep", ["x"], "slept", duration_ns=5 * MS)
    p.sys("PassThrough", ["slept"], "y", after=["yes"])
    p.output("out", "y")
    p.sys("OnTrigger", ["slept"], "one", after=["yes"])
    p.sys("OnTrigger", ["x"], "two", after=["yes"])
    p.sys("Any", ["one", "two"], "any", group="")
    p.output("any_out", "any")
    node, made = run(p, x=TRIGGER, condition=NO)
    assert skipped(made) == {}
    again = bring_up(model(p), "server")
    again.restore(node.snapshot(), 2)
    told = skipped(again.poll(10 * MS))
    assert list(told) == ["out", "any_out"] or list(told) == ["any_out", "out"]
    assert again.executions() == []
