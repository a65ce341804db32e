"""Bootstraps: asked for, staged whole, alone with their components."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from bbnode import dsl
from bbnode.compiler import Compiler
from bbnode.components.contracts import ComponentError, offload
from bbnode.dsl import syscalls
from bbnode.engine import (
    All,
    BootstrapRequest,
    BootstrapStatus,
    Limits,
    ModuleNames,
    ModuleRequests,
    Slots,
    errors,
    steps,
)
from bbnode.engine.bootstrap.bootstraps import TRANSITIONS, Move, State
from bbnode.ir import keys, types
from bbnode.ir.values import TRIGGER, Metadata
from tests import protos
from tests.engine.builder import Partition, model
from tests.engine.support import S, ScriptModel, _once, bring_up, component, of

MODEL = keys.role_domain("Model")
ONE = np.ones(1, np.float32)


@_once
class PreparedModel(ScriptModel):
    """Has a bootstrap of its own, in a worker thread."""

    TYPE_NAME: ClassVar[str] = "test.PreparedModel"

    @offload
    def bootstrap(self, ctx):
        self._note("bootstrap")


def bootstrap(
    module: str, slots: tuple[str, ...] = (), inputs: tuple[str, ...] = (), home="server"
):
    """A bootstrap that trains every model of `slots`, each for 20 s at most."""
    p = Partition(f"{module}{keys.BOOTSTRAP_SUFFIX}", inputs=inputs, main=False)
    protos.set_meta(p.function, keys.MODULE_PHASE_KEY, keys.BOOTSTRAP_PHASE)
    protos.set_meta(p.function, keys.HOME_KEY, home)
    for slot in slots:
        p.bind(slot, "Model", "test.ScriptModel")
    for slot in slots:
        p.op(MODEL, "Train", (), [f"stats.{slot}"], slot=slot, epochs=1, batch=1, stamp_ns=20 * S)
    p.sys("Pulse", (), "start")
    p.sys("AppNotify", ["start"], name=module)
    for name in inputs:
        p.type(name, types.TENSOR_FLOAT)
    return p


def node_with(*bootstraps: Partition, slots: str = "ab", kind="test.ScriptModel", **more):
    """`x` asks model `a` for its parameters."""
    p = Partition("server", inputs=["x"])
    for slot in slots:
        p.bind(slot, "Model", kind)
    p.op(MODEL, "Params", (), ["w"], slot="a", after=["x"], stamp_ns=30 * S)
    p.output("w_out", "w")
    return bring_up(model(p, functions=[b.function for b in bootstraps]), "server", **more)


def topics(made):
    return [step.topic for step in of(steps.AppEvent, made)]


def completed(made):
    return [(s.target, s.ok) for s in of(steps.BootstrapComplete, made) if s.target]


def finish(node, *tasks, now=0):
    for task in tasks:
        node.complete(task.token, Metadata())
    return node.poll(now)


def test_nothing_starts_before_the_host_asks() -> None:
    node = node_with(bootstrap("Root", ("a",)))
    node.poll(0)
    assert component(node, "a").calls == []
    assert node.bootstrap_status() is BootstrapStatus.IDLE
    started = node.run_bootstrap(ModuleNames(("Root",)))
    assert list(started) == ["Root"]
    assert node.bootstrap_status("Root") is BootstrapStatus.RUNNING
    made = node.poll(1)
    assert topics(made) == ["Root"]
    (task,) = of(steps.RunTask, made)
    made = finish(node, task, now=2)
    assert completed(made) == [("Root", True)]
    assert [e.execution for e in of(steps.ExecutionFinished, made)] == [started["Root"]]
    (info,) = node.bootstraps()
    assert (info.name, info.status, info.touches) == ("Root", BootstrapStatus.IDLE, ("a",))
    assert (info.runs, info.last_ok) == (1, True)
    # It may run again.
    node.run_bootstrap(All())
    assert len(of(steps.RunTask, node.poll(3))) == 1


def test_bodies_wait_while_a_bootstrap_has_their_component_and_others_do_not() -> None:
    node = node_with(bootstrap("Root", ("a",)), bootstrap("Other", ("b",)))
    node.run_bootstrap(ModuleNames(("Root",)))
    (task,) = of(steps.RunTask, node.poll(0))
    waiting = node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(1)) == []
    (found,) = [w for w in node.waiting() if w.execution == waiting]
    assert found.why == "another op of the same component"
    made = finish(node, task, now=2)
    assert completed(made) == [("Root", True)]
    assert topics(made) == ["w_out"]
    # A bootstrap that has only `b` does not hold `a`.
    node.run_bootstrap(ModuleNames(("Other",)))
    node.poll(3)
    node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(4)) == ["w_out"]


def test_the_gate_holds_between_the_ops_of_a_bootstrap() -> None:
    # `a` is free in the middle: the bootstrap is at `b` then.
    p = bootstrap("Root")
    for slot in "ab":
        p.bind(slot, "Model", "test.ScriptModel")
    p.op(MODEL, "Params", (), ["w"], slot="a", after=["start"], called="first")
    p.op(MODEL, "Train", (), ["s"], slot="b", after=["w"], epochs=1, batch=1, stamp_ns=20 * S)
    p.op(MODEL, "Backward", ["w"], ["c"], slot="a", after=["s"])
    node = node_with(p)
    node.run_bootstrap(All())
    (task,) = of(steps.RunTask, node.poll(0))
    node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(1)) == []
    assert component(node, "a").calls == ["params"]
    assert "w_out" in topics(finish(node, task, now=2))
    assert component(node, "a").calls == ["params", "backward", "params"]


def test_who_waits_too_long_at_the_gate_fails() -> None:
    p = bootstrap("Root", ("a",))
    p.sys("Sleep", ["start"], "end", duration_ns=60 * S)
    node = node_with(p)
    node.run_bootstrap(All())
    finish(node, *of(steps.RunTask, node.poll(0)), now=0)
    node.invoke("server", {"x": TRIGGER})
    node.poll(1 * S)
    assert [w.whom for w in node.waiting()] == ["clock", "a (held by bootstrap of Root)"]
    made = node.poll(31 * S)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["DeadlineExceeded"]
    assert completed(node.poll(60 * S)) == [("Root", True)]
    node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(61 * S)) == ["w_out"]


def test_disjoint_bootstraps_run_at_once_and_conflicting_ones_in_turn() -> None:
    node = node_with(
        bootstrap("A", ("a",)), bootstrap("AB", ("a", "b")), bootstrap("B", ("b",)), slots="ab"
    )
    node.run_bootstrap(ModuleNames(("A", "AB", "B")))
    made = node.poll(0)
    # B is not let past AB, though `b` is free: AB could wait for ever.
    assert topics(made) == ["A"]
    assert [w.what for w in node.waiting()][-2:] == ["bootstrap of AB", "bootstrap of B"]
    assert node.waiting()[-1].whom == "bootstrap of AB"
    made = finish(node, *of(steps.RunTask, made), now=1)
    assert (completed(made), topics(made)) == ([("A", True)], ["AB"])
    made = finish(node, *of(steps.RunTask, made), now=2)
    assert (completed(made), topics(made)) == ([("AB", True)], ["B"])
    finish(node, *of(steps.RunTask, made), now=3)
    assert node.bootstrap_status() is BootstrapStatus.IDLE
    node.run_bootstrap(ModuleNames(("A", "B")))
    assert sorted(topics(node.poll(4))) == ["A", "B"]


def test_touch_sets_go_through_calls_and_a_called_bootstrap_is_queued_with_its_caller() -> None:
    child = bootstrap("Child", ("b",))
    body = Partition("Helper", main=False)
    body.bind("a", "Model", "test.ScriptModel")
    body.op(MODEL, "Params", (), ["w"], slot="a")
    parent = bootstrap("Parent")
    parent.op(keys.MODULE_DOMAIN, "Child__bootstrap", (), (), after=["start"])
    parent.op(keys.MODULE_DOMAIN, "Helper", (), (), after=["start"])
    node = node_with(child, parent, body)
    by_name = {info.name: info.touches for info in node.bootstraps()}
    assert by_name == {"Child": ("b",), "Parent": ("a", "b")}
    assert list(node.run_bootstrap(All())) == ["Parent"]
    for names in (("Child",), ("Parent",)):
        with pytest.raises(errors.AlreadyTransitivelyQueued, match="Parent"):
            node.run_bootstrap(ModuleNames(names))
    made = node.poll(0)
    assert topics(made) == ["Parent", "Child"]
    finish(node, *of(steps.RunTask, made), now=1)
    with pytest.raises(errors.AlreadyTransitivelyQueued, match="Parent, which calls it"):
        node.run_bootstrap(ModuleNames(("Child", "Parent")))
    with pytest.raises(errors.AlreadyTransitivelyQueued, match="earlier in this batch"):
        node.run_bootstrap(ModuleNames(("Child", "Child")))
    assert node.bootstrap_status() is BootstrapStatus.IDLE


def loading(module: str = "Root"):
    p = bootstrap(module, inputs=("p",))
    p.bind("a", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["p"], ["c"], slot="a")
    return p


def test_inputs_are_copied_and_used() -> None:
    node = node_with(loading())
    value = np.array([3], np.float32)
    node.run_bootstrap(ModuleRequests((BootstrapRequest("Root", {"p": value}),)))
    value[:] = 9
    assert completed(node.poll(0)) == [("Root", True)]
    assert component(node, "a").calls == ["load 3.0"]
    assert node.counters()["ingress.bytes"] == 0


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([("Root", {"p": ONE}), ("Rot", {})], errors.UnknownTarget),
        ([("Root", {"p": ONE}), ("Other", {"p": ONE, "q": ONE})], errors.UnknownInput),
        ([("Root", {"p": ONE}), ("Other", {})], errors.MissingInput),
        ([("Root", {"p": ONE}), ("Other", {"p": TRIGGER})], errors.InputTypeMismatch),
        ([("Root", {"p": ONE}), ("Root", {"p": ONE})], errors.AlreadyTransitivelyQueued),
        ([("Root", {"p": ONE}), ("Other", {"p": np.ones(99, np.float32)})], errors.OversizePayload),
        ([(n, {"p": np.ones(40, np.float32)}) for n in ("Root", "Other")], errors.BudgetExceeded),
    ],
)
def test_a_batch_is_taken_whole_or_not_at_all(requests, error) -> None:
    limits = Limits(invoke_bytes=300, ingress_bytes=310)
    node = node_with(loading(), loading("Other"), limits=limits)
    batch = tuple(BootstrapRequest(name, inputs) for name, inputs in requests)
    with pytest.raises(error):
        node.run_bootstrap(ModuleRequests(batch))
    assert node.bootstrap_status() is BootstrapStatus.IDLE
    assert node.counters()["ingress.bytes"] == 0
    assert completed(node.poll(0)) == []
    assert component(node, "a").calls == []


def test_a_closed_or_full_node_takes_no_bootstrap() -> None:
    node = node_with(loading(), limits=Limits(ingress_events=1))
    request = ModuleRequests((BootstrapRequest("Root", {"p": ONE}),))
    node.fire_lifecycle(9)
    with pytest.raises(errors.IngressFull):
        node.run_bootstrap(request)
    node.poll(0)
    node.close()
    with pytest.raises(errors.IngressClosed):
        node.run_bootstrap(request)
    assert node.bootstrap_status() is BootstrapStatus.IDLE
    assert node.counters()["ingress.bytes"] == 0


def test_all_leaves_those_waiting_that_need_inputs() -> None:
    node = node_with(loading(), bootstrap("Free", ("b",)))
    assert list(node.run_bootstrap(All())) == ["Free"]
    assert node.bootstrap_status() is BootstrapStatus.RUNNING
    made = node.poll(0)
    assert topics(made) == ["Free"]
    finish(node, *of(steps.RunTask, made), now=1)
    assert node.bootstrap_status() is BootstrapStatus.WAITING_FOR_INPUT
    assert node.bootstrap_status("Free") is BootstrapStatus.IDLE
    # It holds nothing while it waits.
    node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(2)) == ["w_out"]
    with pytest.raises(errors.MissingInput):
        node.run_bootstrap(ModuleNames(("Root",)))
    node.run_bootstrap(ModuleRequests((BootstrapRequest("Root", {"p": ONE}),)))
    assert completed(node.poll(3)) == [("Root", True)]
    assert node.bootstrap_status() is BootstrapStatus.IDLE


def test_components_bootstrap_by_slot_and_before_modules() -> None:
    node = node_with(bootstrap("Root", ("a",)), kind="test.PreparedModel")
    assert [info.name for info in node.bootstraps()] == ["slot:a", "slot:b", "Root"]
    assert list(node.run_bootstrap(Slots(("b",)))) == ["slot:b"]
    made = node.poll(0)
    (task,) = of(steps.RunTask, made)
    assert task.op == "b.bootstrap"
    task.fn()
    assert component(node, "b").calls == ["bootstrap"]
    assert completed(finish(node, task, now=1)) == [("slot:b", True)]
    assert list(node.run_bootstrap(All())) == ["slot:a", "slot:b", "Root"]
    made = node.poll(2)
    assert [task.op for task in of(steps.RunTask, made)] == ["a.bootstrap", "b.bootstrap"]
    made = finish(node, *of(steps.RunTask, made), now=3)
    assert topics(made) == ["Root"]


def test_only_components_that_have_one_bootstrap_by_slot() -> None:
    node = node_with(bootstrap("Root", ("a",)))
    with pytest.raises(errors.UnknownTarget):
        node.run_bootstrap(Slots(("a",)))
    with pytest.raises(errors.UnknownTarget):
        node.bootstrap_status("slot:a")
    assert node_with().run_bootstrap(All()) == {}


def test_a_component_whose_bootstrap_raises_fails_and_is_let_go() -> None:
    node = node_with(kind="test.PreparedModel")
    node.run_bootstrap(Slots(("a",)))
    (task,) = of(steps.RunTask, node.poll(0))
    node.fail(task.token, ComponentError("no data"))
    made = node.poll(1)
    assert completed(made) == [("slot:a", False)]
    assert [s.kind for s in of(steps.OpFailed, made)] == ["ComponentError"]
    node.invoke("server", {"x": TRIGGER})
    assert topics(node.poll(2)) == ["w_out"]


def test_a_bootstrap_that_never_gets_its_turn_fails() -> None:
    p = bootstrap("Slow", ("a",))
    p.sys("Sleep", ["start"], "end", duration_ns=2 * Limits().wait_ns)
    node = node_with(p, bootstrap("Late", ("a",)))
    node.run_bootstrap(ModuleNames(("Slow", "Late")))
    finish(node, *of(steps.RunTask, node.poll(0)), now=1)
    made = node.poll(Limits().wait_ns)
    assert completed(made) == [("Late", False)]
    (failed,) = of(steps.OpFailed, made)
    assert failed.kind == "DeadlineExceeded"
    assert "bootstrap of Slow" in failed.detail
    assert node.bootstrap_status("Late") is BootstrapStatus.IDLE
    assert completed(node.poll(2 * Limits().wait_ns)) == [("Slow", True)]


def test_too_many_frames_end_a_bootstrap_with_a_failure() -> None:
    node = node_with(bootstrap("Root", ("a",)), bootstrap("Two", ("b",)), limits=Limits(frames=1))
    node.run_bootstrap(ModuleNames(("Root", "Two")))
    made = node.poll(0)
    assert completed(made) == [("Two", False)]
    assert [s.kind for s in of(steps.OpFailed, made)] == ["FramesExceeded"]


def test_a_node_has_the_bootstraps_whose_slots_it_binds() -> None:
    here = [bootstrap("Root", ("a",)), bootstrap("Plain"), bootstrap("Nowhere", home="@self")]
    elsewhere = [bootstrap("Far", ("z",)), bootstrap("Theirs", home="client")]
    p = Partition("server", inputs=["x"])
    p.bind("a", "Model", "test.ScriptModel")
    p.output("out", "x")
    other = Partition("client", inputs=["x"])
    other.output("out", "x")
    made = model(p, other, functions=[b.function for b in (*elsewhere, *here)])
    node = bring_up(made, "server")
    assert [info.name for info in node.bootstraps()] == ["Root", "Plain", "Nowhere"]
    both = bring_up(made, "client", "server")
    assert [i.name for i in both.bootstraps()] == ["Theirs", "Root", "Plain", "Nowhere"]


def test_what_starts_executions_is_refused_in_a_bootstrap() -> None:
    p = bootstrap("Root")
    p.sys("Interval", (), "tick", period_ns=5)
    with pytest.raises(errors.UnsupportedOps, match="never fires"):
        node_with(p)


def test_every_move_that_the_engine_makes_is_in_the_table() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert {move for _, move in TRANSITIONS} == set(Move)
    for state in State:
        ends = TRANSITIONS.get((state, Move.ENDED))
        assert ends is (State.IDLE if state in (State.QUEUED, State.RUNNING) else None)


class _Child(dsl.Module):
    def __init__(self, model: dsl.ModelSlot) -> None:
        self.model = model

    def bootstrap(self, g: dsl.Graph) -> None:
        self.model.load_parameters(g, g.input("start", types.TENSOR_FLOAT))

    def body(self, g: dsl.Graph) -> None:
        g.output("y", self.model.forward(g, g.input("x", types.TENSOR_FLOAT)))


class _Root(dsl.Module):
    def __init__(self) -> None:
        self.child = _Child(dsl.ModelSlot("m"))

    def bootstrap(self, g: dsl.Graph) -> None:
        syscalls.app_notify(g, syscalls.pulse(g), name="ready")

    def body(self, g: dsl.Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("z", self.child.call().input("x", x).build(g).output("y"))


def test_recorded_and_compiled_bootstraps_run() -> None:
    made = Compiler().bind_model("m", ScriptModel).compile(_Root().build())
    node = bring_up(made, "@self")
    assert node.run_bootstrap(All()).keys() == {"_Root"}
    assert topics(node.poll(0)) == ["ready"]
    assert node.bootstrap_status("_Child") is BootstrapStatus.WAITING_FOR_INPUT
    node.run_bootstrap(ModuleRequests((BootstrapRequest("_Child", {"start": 5 * ONE}),)))
    node.invoke("@self", {"x": ONE})
    (event,) = of(steps.AppEvent, node.poll(1))
    assert event.value.tolist() == [6.0]
