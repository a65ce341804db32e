"""What `invoke` and `deliver_event` refuse, and that nothing is started then."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import Limits, errors, steps
from bbnode.ir import types
from bbnode.ir.values import TRIGGER, Composite
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, of


def two_inputs(**more):
    p = Partition("server", inputs=["x", "go"])
    p.type("x", types.TENSOR)
    p.type("go", types.TRIGGER)
    p.output("x_out", "x")
    p.output("go_out", "go")
    p.sys("Gate", ["x", "go"], "both")
    p.output("both_out", "both")
    return bring_up(model(p), "server", **more)


X = np.ones(10, np.float32)


@pytest.mark.parametrize(
    ("target", "inputs", "error", "says"),
    [
        ("servr", {}, errors.UnknownTarget, "did you mean"),
        (None, {}, errors.UnknownTarget, "there is: "),
        ("server", {1: X}, errors.UnknownInput, "has no input 1; it has: "),
        ("server", {"x": X}, errors.MissingInput, "go"),
        ("server", {"x": X, "go": TRIGGER, "goo": TRIGGER}, errors.UnknownInput, "'go'"),
        ("server", {"x": TRIGGER, "go": TRIGGER}, errors.InputTypeMismatch, "takes Tensor"),
        ("server", {"x": "text", "go": TRIGGER}, errors.InputTypeMismatch, "str"),
        ("server", {"x": X, "go": X}, errors.InputTypeMismatch, "takes Trigger"),
        ("server", {str(i): X for i in range(4)}, errors.TooManyInputs, "limit invoke_inputs"),
        ("server", {"x": np.ones(99), "go": TRIGGER}, errors.OversizePayload, "invoke_bytes"),
    ],
)
def test_a_wrong_invoke_is_refused(target, inputs, error, says) -> None:
    node = two_inputs(limits=Limits(invoke_inputs=3, invoke_bytes=500))
    with pytest.raises(error, match=says):
        node.invoke(target, inputs)
    assert node.counters()["ingress.bytes"] == 0
    assert node.poll(0) == [steps.BootstrapComplete(executions=0, ok=True)]


def test_an_event_runs_what_can_fire_from_it_alone() -> None:
    node = two_inputs()
    node.deliver_event("server", "go", TRIGGER)
    made = node.poll(0)
    assert [e.topic for e in of(steps.AppEvent, made)] == ["go_out"]
    assert of(steps.ExecutionFinished, made)[0].ok
    node.invoke("server", {"x": X, "go": TRIGGER})
    assert len(of(steps.AppEvent, node.poll(0))) == 3


def test_an_event_that_leaves_an_output_without_a_value_says_so() -> None:
    node = two_inputs()
    execution = node.deliver_event("server", "go", TRIGGER)
    (skipped,) = of(steps.OutputSkipped, node.poll(0))
    assert (skipped.execution, skipped.name) == (execution, "both_out")
    assert skipped.reason == "it needs x too, and go alone was given"


def joined(op: str, **attributes):
    """Two inputs that meet in one op; whatever is before it makes values and nothing else."""
    p = Partition("server", inputs=["x", "y"])
    p.type("x", types.TRIGGER)
    p.type("y", types.TRIGGER)
    p.sys("PassThrough", ["x"], "same")
    p.sys("DeadlineCheck", ["same"], "checked", deadline_ns=5)
    p.sys(op, ["checked", "y"], "both", **attributes)
    p.sys("AppEmit", ["both"], name="out")
    return bring_up(model(p), "server")


@pytest.mark.parametrize(("op", "attributes"), [("Gate", {}), ("Threshold", {"n": 2})])
@pytest.mark.parametrize(("given", "needed"), [("x", "y"), ("y", "x")])
def test_an_event_of_one_of_two_inputs_that_are_needed_together_is_refused(
    op, attributes, given, needed
) -> None:
    node = joined(op, **attributes)
    with pytest.raises(errors.MissingInput, match=f"{given!r} starts nothing without {needed}"):
        node.deliver_event("server", given, TRIGGER)
    assert node.counters()["ingress.bytes"] == 0
    node.invoke("server", {"x": TRIGGER, "y": TRIGGER})
    assert [e.topic for e in of(steps.AppEvent, node.poll(0))] == ["out"]


@pytest.mark.parametrize(("op", "attributes"), [("Any", {}), ("Threshold", {"n": 1})])
def test_an_event_of_one_of_two_inputs_that_are_enough_alone_runs(op, attributes) -> None:
    node = joined(op, **attributes)
    node.deliver_event("server", "y", TRIGGER)
    assert [e.topic for e in of(steps.AppEvent, node.poll(0))] == ["out"]


def test_a_wrong_event_is_refused() -> None:
    node = two_inputs(limits=Limits(app_event_bytes=30))
    with pytest.raises(errors.OversizePayload, match="app_event_bytes"):
        node.deliver_event("server", "x", X)
    with pytest.raises(errors.UnknownInput):
        node.deliver_event("server", "y", X)
    with pytest.raises(errors.UnknownTarget):
        node.deliver_event("client", "x", X)


def test_targets_go_by_class_and_by_full_name() -> None:
    node = two_inputs()
    for name in ("server", node.targets[0]):
        node.invoke(name, {"x": X, "go": TRIGGER})
    assert len(of(steps.ExecutionFinished, node.poll(0))) == 2
    assert node.classes == ("server",)


def test_what_waits_is_bounded_in_number_and_bytes() -> None:
    node = two_inputs(limits=Limits(ingress_events=1, ingress_bytes=250))
    node.invoke("server", {"x": X, "go": TRIGGER})
    with pytest.raises(errors.IngressFull):
        node.invoke("server", {"x": X, "go": TRIGGER})
    assert node.counters()["ingress.bytes"] == 104
    with pytest.raises(errors.BudgetExceeded, match="146 are left"):
        node.invoke("server", {"x": np.ones(50, np.float32), "go": TRIGGER})
    assert len(of(steps.ExecutionFinished, node.poll(0))) == 1
    assert node.counters()["ingress.bytes"] == 0


def test_a_closed_node_takes_nothing() -> None:
    node = two_inputs()
    node.close()
    with pytest.raises(errors.IngressClosed):
        node.invoke("server", {"x": X, "go": TRIGGER})


def test_buffers_of_the_caller_may_be_reused() -> None:
    p = Partition("server", inputs=["x"])
    p.output("out", "x")
    node = bring_up(model(p), "server")
    inner = np.ones(3)
    node.invoke("server", {"x": Composite((inner, TRIGGER))})
    inner[:] = 0
    (event,) = of(steps.AppEvent, node.poll(0))
    assert event.value[0].tolist() == [1, 1, 1]
    assert not event.value[0].flags.writeable


def test_wake_is_called_when_the_first_event_comes() -> None:
    node = two_inputs()
    woken = []
    node.set_wake(lambda: woken.append(1))
    node.fire_lifecycle(1)
    node.fire_lifecycle(1)
    assert len(woken) == 1
    node.poll(0)
    node.fire_lifecycle(1)
    assert len(woken) == 2
