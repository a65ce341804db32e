"""Programs on one node: entries, order, calls, constants, failures."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from bbnode.engine import Limits, errors, steps
from bbnode.ir import keys, types
from bbnode.ir.values import TRIGGER, Composite, Metadata, Timestamp
from tests.engine.builder import SYS, Partition, model, subgraph
from tests.engine.support import MS, Boom, S, bring_up, component, of, peer

MODEL = keys.role_domain("Model")
DATA = keys.role_domain("DataSource")


def events(made):
    return [(step.topic, step.value) for step in of(steps.AppEvent, made)]


def test_an_invoke_runs_and_reports_its_outputs() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("PassThrough", ["x"], "y")
    p.output("out", "y")
    node = bring_up(model(p), "server")
    value = np.arange(3, dtype=np.float32)
    execution = node.invoke("server", {"x": value})
    value[:] = 7  # the node has its own copy
    made = node.poll(5)
    (event,) = of(steps.AppEvent, made)
    assert (event.topic, event.target, event.execution) == ("out", p.name, execution)
    assert event.value.tolist() == [0, 1, 2]
    (end,) = of(steps.ExecutionFinished, made)
    assert (end.execution, end.ok, end.failures) == (execution, True, 0)
    assert node.executions() == []
    assert node.counters()["ingress.bytes"] == 0
    assert node.next_deadline() is None


def test_the_first_poll_says_that_the_start_is_over() -> None:
    p = Partition("server")
    p.sys("Pulse", (), "start")
    p.sys("AppNotify", ["start"], name="started")
    node = bring_up(model(p), "server")
    assert node.next_deadline() == 0
    made = node.poll(1)
    assert events(made) == [("started", TRIGGER)]
    assert of(steps.BootstrapComplete, made) == [steps.BootstrapComplete(executions=1, ok=True)]
    assert of(steps.BootstrapComplete, node.poll(2)) == []


def test_ops_fire_in_the_order_in_which_they_became_ready() -> None:
    p = Partition("server", inputs=["x"])
    for name in "abcd":
        p.sys("AppEmit", ["x"], name=name)
    p.sys("PassThrough", ["x"], "y")
    p.sys("AppEmit", ["y"], name="last")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": TRIGGER})
    assert [topic for topic, _ in events(node.poll(0))] == ["a", "b", "c", "d", "last"]


def test_control_edges_and_after_hold_an_op_back() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["x"], ["c1"], slot="m", called="load")
    p.op(MODEL, "Params", (), ["w"], slot="m", called="params", control=["load"])
    p.op(MODEL, "Step", (), ["c2"], slot="m", called="step", after=["w"])
    p.output("w_out", "w")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": np.array([4], np.float32)})
    made = node.poll(0)
    assert component(node, "m").calls == ["load 4.0", "params", "step None"]
    assert [float(value[0]) for _, value in events(made)] == [4.0]


def test_a_constant_is_there_in_every_execution() -> None:
    p = Partition("server", inputs=["x"])
    p.constant("k", np.array([2, 3], np.int64))
    p.constant("meta", Metadata(a=1))
    kinds = (types.TRIGGER.id, types.TENSOR_INT64.id, types.METADATA.id)
    p.op(keys.COMPOSITE_DOMAIN, "Bundle", ["x", "k", "meta"], ["b"], child_count=3,
         child_types=",".join(kinds))  # fmt: skip
    p.output("out", "b")
    node = bring_up(model(p), "server")
    for _ in range(2):
        node.invoke("server", {"x": TRIGGER})
    made = node.poll(0)
    for _, value in events(made):
        assert isinstance(value, Composite)
        assert value[1].tolist() == [2, 3]
        assert value[2] == Metadata(a=1)
        assert not value[1].flags.writeable
    assert len(events(made)) == 2


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Composite((TRIGGER, np.zeros(1, np.int64))), None),
        (Composite((TRIGGER,)), "CompositeMismatch"),
        (Composite((TRIGGER, np.zeros(1, np.float32))), "CompositeMismatch"),
        (TRIGGER, "CompositeMismatch"),
    ],
)
def test_unbundle_checks_what_it_takes_apart(value, kind) -> None:
    p = Partition("server", inputs=["x"])
    p.op(keys.COMPOSITE_DOMAIN, "Unbundle", ["x"], ["a", "b"], child_count=2,
         child_types=f"{types.TRIGGER.id},{types.TENSOR_INT64.id}")  # fmt: skip
    p.output("out", "b")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": value})
    made = node.poll(0)
    failed = of(steps.OpFailed, made)
    assert [step.kind for step in failed] == ([kind] if kind else [])
    assert len(events(made)) == (0 if kind else 1)


@pytest.mark.parametrize("naps", [0, 1])
def test_the_first_input_of_any_wins_and_the_others_are_dropped(naps: int) -> None:
    """Of two that come at one time the first listed, however many ops stand before it."""
    p = Partition("server", inputs=["x"])
    p.sys("Sleep" if naps else "OnTrigger", ["x"], "slow1", **{"duration_ns": 1} if naps else {})
    p.sys("PassThrough", ["slow1"], "slow")
    p.constant("k", np.array(5, np.int64))
    p.sys("Gate", ["k", "x"], "quick")
    p.sys("Any", ["slow", "quick"], "first")
    p.sys("Threshold", ["slow", "quick"], "both", n=2)
    p.output("out", "first")
    p.output("all", "both")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": TRIGGER})
    made = [*node.poll(0), *node.poll(2)]
    shown = [(topic, str(value)) for topic, value in events(made)]
    assert sorted(shown) == [("all", "TRIGGER"), ("out", "5" if naps else "TRIGGER")]
    assert of(steps.ExecutionFinished, made)[0].ok


def test_what_depends_on_a_failed_op_does_not_fire_and_the_rest_does() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m", called="forward")
    p.sys("AppEmit", ["y"], name="never")
    p.sys("AppEmit", ["x"], name="still")
    node = bring_up(model(p), "server")
    component(node, "m").raises = Boom("oops")
    execution = node.invoke("server", {"x": np.zeros(1, np.float32)})
    made = node.poll(0)
    (failed,) = of(steps.OpFailed, made)
    assert (failed.execution, failed.op, failed.kind) == (
        execution, "forward", "UnexpectedException",
    )  # fmt: skip
    assert failed.detail.startswith("Boom: oops (raised at support.py:")
    assert [topic for topic, _ in events(made)] == ["still"]
    (end,) = of(steps.ExecutionFinished, made)
    assert (end.ok, end.failures) == (False, 1)


def test_a_component_that_returns_something_else_fails_its_op() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m")
    node = bring_up(model(p), "server")
    for bad in (object(), TRIGGER):
        component(node, "m").returns = bad
        node.invoke("server", {"x": np.zeros(1, np.float32)})
        assert [step.kind for step in of(steps.OpFailed, node.poll(0))] == ["WrongResultType"]


def test_failure_details_are_cut() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m")
    node = bring_up(model(p), "server", limits=Limits(failure_detail_bytes=10))
    component(node, "m").raises = Boom("ö" * 100)
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.detail == "Boom: öö"


def test_calls_have_values_of_their_own_and_are_strict() -> None:
    body = Partition("Inner", inputs=["v", "go"], main=False)
    body.sys("PassThrough", ["v"], "mid")
    body.constant("k", np.array(9, np.int64))
    body.sys("PassThrough", ["mid"], "result")
    body.sys("AppEmit", ["k"], name="inside")
    body.function.output.extend(["result", "v"])
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "later", duration_ns=5 * MS)
    p.op(keys.MODULE_DOMAIN, "Inner", ["x", "x"], ["r1", "same"], called="one")
    p.op(keys.MODULE_DOMAIN, "Inner", ["x", "later"], ["r2", ""], called="two", control=["one"])
    p.output("first", "r1")
    p.output("handed_through", "same")
    p.output("second", "r2")
    node = bring_up(model(p, functions=[body.function]), "server")
    node.invoke("server", {"x": TRIGGER})
    assert [topic for topic, _ in events(node.poll(0))] == ["inside", "handed_through", "first"]
    assert [topic for topic, _ in events(node.poll(5 * MS))] == ["inside", "second"]


def test_side_effects_of_a_called_body_wait_for_the_call() -> None:
    body = Partition("Inner", inputs=["v"], main=False)
    body.bind("m", "Model", "test.ScriptModel")
    body.op(MODEL, "Params", (), ["w"], slot="m")
    body.function.output.append("w")
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["x"], ["c"], slot="m", called="load")
    p.op(keys.MODULE_DOMAIN, "Inner", ["x"], ["w"], called="call", control=["load"])
    p.op(MODEL, "Backward", ["x"], ["d"], slot="m", called="back", control=["call"])
    p.output("out", "w")
    node = bring_up(model(p, functions=[body.function]), "server")
    node.invoke("server", {"x": np.array([3], np.float32)})
    (event,) = of(steps.AppEvent, node.poll(0))
    assert float(event.value[0]) == 3.0
    assert component(node, "m").calls == ["load 3.0", "params", "backward"]


def test_timing_ops_and_the_clock() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("After", ["x"], "later", delay_ns=3 * S)
    p.sys("Clock", ["later"], "now")
    p.output("out", "now")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": TRIGGER})
    node.poll(1 * S)
    assert node.next_deadline() == 4 * S
    (waiting,) = node.waiting()
    assert waiting.why == "timer"
    assert waiting.as_json(2 * S)["remaining_s"] == 2.0
    assert events(node.poll(4 * S - 1)) == []
    assert events(node.poll(4 * S)) == [("out", Timestamp(4 * S))]
    assert node.waiting() == []


def test_an_interval_ticks_and_skips_what_it_missed() -> None:
    p = Partition("server")
    p.sys("Interval", (), "tick", period_ns=10 * MS)
    p.sys("AppEmit", ["tick"], name="tick")
    node = bring_up(model(p), "server")
    node.poll(0)
    assert node.next_deadline() == 10 * MS
    assert events(node.poll(10 * MS)) == [("tick", Timestamp(10 * MS))]
    assert events(node.poll(45 * MS)) == [("tick", Timestamp(45 * MS))]
    assert node.counters()["interval.missed"] == 2
    assert node.next_deadline() == 50 * MS


def test_a_lifecycle_phase_fires_what_waits_for_it() -> None:
    p = Partition("server")
    p.sys("LifecyclePhase", (), "bye", phase=1)
    p.sys("AppNotify", ["bye"], name="bye")
    node = bring_up(model(p), "server")
    node.fire_lifecycle(2)
    node.fire_lifecycle(1)
    assert events(node.poll(0)) == [("bye", TRIGGER)]


@pytest.mark.parametrize("entry", [3, 2.5])
def test_a_number_is_read_out_of_metadata(entry: float) -> None:
    p = Partition("server", inputs=["m"])
    p.sys("Metadata.Number", ["m"], "y", key="n")
    p.output("out", "y")
    node = bring_up(model(p), "server")
    node.invoke("server", {"m": Metadata(n=entry)})
    ((_, found),) = events(node.poll(0))
    assert (float(found), found.dtype, found.shape) == (entry, np.float32, ())
    for wrong in (Metadata(), Metadata(n=True), Metadata(n="3")):
        node.invoke("server", {"m": wrong})
        (failure,) = of(steps.OpFailed, node.poll(0))
        assert failure.kind == "InvalidOperand"
        assert "'n'" in failure.detail


def test_metrics_records_and_random_numbers() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("IncrMetric", ["x"], name="rounds", delta=3)
    p.sys("RngU64", ["x"], "r")
    p.sys("Record", ["r"], name="draws")
    p.op(SYS, "Tee", ["x"], ["t1", "t2"], fanout=2)
    p.sys("CorrelateTag", ["t2"], "token")
    node = bring_up(model(p), "server", seed=7)
    again = bring_up(model(p), "server", seed=7)
    other = bring_up(model(p), "server", seed=8)
    for each in (node, again, other):
        for _ in range(2):
            each.invoke("server", {"x": TRIGGER})
        each.poll(3)
    draws = [row[3] for row in node.records("draws")]
    assert len(set(draws)) == 2
    assert draws == [row[3] for row in again.records()]
    assert draws != [row[3] for row in other.records()]
    assert node.counters()["metric.rounds"] == 6


def test_a_budget_of_ops_stops_a_poll_and_the_next_goes_on() -> None:
    p = Partition("server", inputs=["v0"])
    for i in range(10):
        p.sys("PassThrough", [f"v{i}"], f"v{i + 1}")
    p.output("out", "v10")
    node = bring_up(model(p), "server", limits=Limits(cycle_ops=4))
    node.invoke("server", {"v0": TRIGGER})
    made = node.poll(0)
    assert of(steps.CycleBudgetExceeded, made) == [steps.CycleBudgetExceeded(budget=4, remaining=1)]
    assert node.next_deadline() == 0
    seen = [events(node.poll(0)) for _ in range(3)]
    assert seen == [[], [("out", TRIGGER)], []]


def test_backend_graphs_are_prepared_once_and_run_by_position() -> None:
    fused = subgraph(
        "g1", ["a", "b"], ["s", "d"],
        [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Sub", ["a", "b"], ["d"])],
        {"a": types.TENSOR_FLOAT, "b": types.TENSOR_FLOAT},
    )  # fmt: skip
    p = Partition("server", inputs=["x"])
    p.bind("compute", "Backend", "test.EvalBackend")
    p.type("x", types.TENSOR_FLOAT)
    p.constant("k", np.array([1, 2], np.float32))
    p.op(keys.BACKEND_SUBGRAPH_DOMAIN, "g1", ["x", "k"], ["s", "d"], slot="compute")
    p.op(keys.BACKEND_SUBGRAPH_DOMAIN, "g1", ["s", "d"], ["s2", ""], slot="compute")
    p.op("", "Mul", ["s2", "x"], ["m"], slot="compute")
    p.output("diff", "d")
    p.output("out", "m")
    node = bring_up(model(p, functions=[fused]), "server")
    backend = component(node, "compute")
    assert backend.prepared == ["g1"]
    for _ in range(2):
        node.invoke("server", {"x": np.array([3, 4], np.float32)})
        made = dict(events(node.poll(0)))
        assert made["diff"].tolist() == [2, 2]
        assert made["out"].tolist() == [18, 32]
    assert backend.prepared == ["g1", "Mul"]  # the type of s2 is open: prepared when it came


def test_a_graph_that_gets_no_tensor_fails_its_op() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("compute", "Backend", "test.EvalBackend")
    p.op("", "Neg", ["x"], ["m"], slot="compute")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": TRIGGER})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.kind == "InvalidOperand"
    assert "Trigger" in failed.detail


def test_the_address_book_is_open_to_programs() -> None:
    from multiaddr import Multiaddr

    from bbnode.ir.values import AddressVec

    p = Partition("server", inputs=["peer", "address"])
    p.op(keys.ADDRESS_BOOK_DOMAIN, "Insert", ["peer", "address"], (), called="insert")
    p.op(keys.ADDRESS_BOOK_DOMAIN, "Lookup", ["peer"], ["found"], control=["insert"])
    p.output("out", "found")
    node = bring_up(model(p), "server")
    address = Multiaddr("/ip4/127.0.0.1/tcp/4001")
    node.invoke("server", {"peer": peer(5), "address": address})
    assert events(node.poll(0)) == [("out", AddressVec((address,)))]
    node.invoke("server", {"peer": peer(6), "address": TRIGGER})
    kinds = [s.kind for s in of(steps.OpFailed, node.poll(0))]
    assert kinds == ["InvalidOperand", "CannotRoute"]  # the second comes after, and needs nothing


def test_concurrent_executions_do_not_see_each_other() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "t", duration_ns=MS)
    p.sys("Gate", ["x", "t"], "y")
    p.output("out", "y")
    node = bring_up(model(p), "server")
    started = [node.invoke("server", {"x": np.array(i)}) for i in range(5)]
    node.poll(0)
    assert [info.execution for info in node.executions()] == started
    made = of(steps.AppEvent, node.poll(MS))
    assert [(e.execution, int(e.value)) for e in made] == list(zip(started, range(5), strict=True))


def test_an_op_that_nothing_can_fire_is_refused() -> None:
    p = Partition("server")
    p.recv("a")
    p.recv("b")
    p.sys("Gate", ["a", "b"], "both", called="meeting")
    with pytest.raises(errors.UnreachableOps, match=r"1 op\(s\) can never fire") as caught:
        bring_up(model(p), "server")
    assert caught.value.ops == (f"{p.name}: meeting",)


def test_frames_beyond_the_cap_are_refused_with_a_step() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "t", duration_ns=MS)
    node = bring_up(model(p), "server", limits=Limits(frames=1))
    node.invoke("server", {"x": TRIGGER})
    second = node.invoke("server", {"x": TRIGGER})
    made = node.poll(0)
    assert [(s.execution, s.kind) for s in of(steps.OpFailed, made)] == [(second, "FramesExceeded")]
    assert [s.execution for s in of(steps.ExecutionFinished, made)] == [second]
    node.poll(MS)
    assert node.counters()["ingress.bytes"] == 0


def test_reserved_topics_are_refused() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("AppEmit", ["x"], name="bb.secret")
    with pytest.raises(errors.ReservedName, match=r"bb\.secret"):
        bring_up(model(p), "server")
