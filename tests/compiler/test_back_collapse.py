"""`collapse_backend_subgraphs`: what is fused, what is not, and that nobody can tell."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from bbnode.compiler.analysis import order
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.driver.pipeline import all_pass_names, load_pass
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import graph, keys, types
from bbnode.ir.graph import Function, OpNode, Program, Subgraph
from bbnode.ir.onnx_file import model_of
from tests.compiler import programs
from tests.compiler.back_units import control, snapshot, unit_until
from tests.compiler.programs import Body, node_making, run
from tests.compiler.test_back_pipeline import ALL, random_programs

PASS = "collapse_backend_subgraphs"
BEFORE = "insert_backoff_gate_tx"


def collapsed(body: Body) -> tuple[CompilationUnit, Function]:
    unit = unit_until(PASS, body, options=ALL)
    (main,) = unit.partitions.values()
    return unit, main


def calls(function: Function) -> list[OpNode]:
    return [n for n in function.nodes if n.domain == keys.BACKEND_SUBGRAPH_DOMAIN]


def subgraph(unit: CompilationUnit, call: OpNode) -> Function:
    return next(f for f in unit.program.functions if f.name == call.op_type)


def run_function(function: Function, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """A subgraph in ONNX Runtime, as an engine would prepare it: by its declared types."""
    graph = Subgraph(function.name, function.inputs, function.outputs, function.types)
    graph.nodes = function.nodes
    model = model_of(Program(name="g", graph=graph, opset_imports=function.opset_imports))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(function.inputs, inputs, strict=True)))


def test_a_chain_becomes_one_call_that_computes_the_same() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    w = body.input("w", types.TENSOR_FLOAT)
    body.onnx("MatMul", [x, w], ["h"])
    body.onnx("Relu", ["h"], ["r"])
    body.onnx("Softmax", ["r"], ["s"], axis=-1)
    body.output("y", "s")
    unit, main = collapsed(body)
    (call,) = calls(main)
    assert list(call.inputs) == ["x", "w"]
    assert list(call.outputs) == ["s"]
    assert call.metadata.get(keys.SLOT_KEY) == "compute"
    assert call.metadata.get(keys.SLOT_ID_KEY) == "0"
    assert call.metadata.get(keys.REQUIRED_TRAIT_KEY) == "BackendRuntime"
    function = subgraph(unit, call)
    assert [n.op_type for n in function.nodes] == ["MatMul", "Relu", "Softmax"]
    assert not any(n.metadata for n in function.nodes)
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(3, 4)).astype("f4"), rng.normal(size=(4, 5)).astype("f4")
    (got,) = run_function(function, [a, b])
    hidden = np.exp(np.maximum(a @ b, 0))
    np.testing.assert_allclose(got, hidden / hidden.sum(-1, keepdims=True), rtol=1e-5)
    assert set(main.types) == {"x", "w", "s", "y"}


def test_equal_graphs_share_one_function_whatever_their_values_are_called() -> None:
    body = Body("P", root=True)
    for index in range(3):
        x = body.input(f"x{index}", types.TENSOR_FLOAT)
        body.onnx("Relu", [x], [f"value_{index}"], line=100 + index)
        body.onnx("Neg", [f"value_{index}"], [f"out_{index}"])
        body.output(f"y{index}", f"out_{index}")
    unit, main = collapsed(body)
    assert len({call.op_type for call in calls(main)}) == 1
    assert len(calls(main)) == 3
    assert len(unit.program.functions) == 1


def test_a_path_through_another_op_splits_the_group() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a"])
    body.role("Model", "Forward", "global", ["a"], ["f"])
    body.onnx("Add", ["a", "f"], ["b"])
    body.output("y", "b")
    _, main = collapsed(body)
    assert [(list(c.inputs), list(c.outputs)) for c in calls(main)] == [
        (["x"], ["a"]),
        (["a", "f"], ["b"]),
    ]


def test_two_slots_never_share_a_group_and_their_calls_do_not_wait_for_each_other() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a1"], slot="left")
    body.onnx("Neg", [x], ["b1"], slot="right")
    body.onnx("Add", ["a1", "b1"], ["a2"], slot="left")
    body.onnx("Mul", ["a1", "b1"], ["b2"], slot="right")
    body.output("y", "a2")
    body.output("z", "b2")
    unit, main = collapsed(body)
    assert order.topological(main) == range(len(main.nodes))
    assert {c.metadata.get(keys.SLOT_KEY) for c in calls(main)} == {"left", "right"}
    for call in calls(main):
        assert {n.op_type for n in subgraph(unit, call).nodes} <= {"Relu", "Add"} or {
            n.op_type for n in subgraph(unit, call).nodes
        } <= {"Neg", "Mul"}


def test_a_value_that_others_read_early_is_not_held_back_by_a_late_one() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["early"])
    body.role("Model", "Forward", "global", [x], ["slow"])
    body.onnx("Add", ["early", "slow"], ["late"])
    body.output("now", "early")
    body.output("then", "late")
    _, main = collapsed(body)
    assert list(node_making(main, "early").inputs) == ["x"]
    assert set(node_making(main, "late").inputs) == {"early", "slow"}


def test_what_only_the_group_reads_may_wait_for_it() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["hidden"])
    body.role("Model", "Forward", "global", [x], ["slow"])
    body.onnx("Add", ["hidden", "slow"], ["late"])
    body.output("then", "late")
    _, main = collapsed(body)
    (call,) = calls(main)
    assert list(call.inputs) == ["x", "slow"]


def test_a_small_constant_goes_into_each_group_that_reads_it_and_a_large_one_is_shared() -> None:
    for size, copies in ((4, 2), (4096, 0)):
        body = Body("P", root=True)
        x = body.input("x", types.TENSOR_FLOAT)
        value = numpy_helper.from_array(np.ones(size, "f4"), "c")
        body.onnx("Constant", [], ["c"], value=value)
        body.onnx("Add", [x, "c"], ["a"])
        body.role("Model", "Forward", "global", ["a"], ["f"])
        body.onnx("Mul", ["f", "c"], ["b"])
        body.output("y", "b")
        unit, main = collapsed(body)
        inside = [
            any(n.op_type == "Constant" for n in subgraph(unit, c).nodes) for c in calls(main)
        ]
        lone = [c for c in calls(main) if not c.inputs]
        assert inside.count(True) == (copies or 1)
        assert len(lone) == (0 if copies else 1)


def test_if_bodies_stay_inside_with_the_values_that_they_capture() -> None:
    def branch(op_type: str) -> GraphProto:
        out = helper.make_tensor_value_info("picked", TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node(op_type, ["doubled", "x"], ["picked"])], op_type, [], [out]
        )

    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    flag = body.input("flag", types.TENSOR_BOOL)
    body.onnx("Add", [x, x], ["doubled"])
    body.onnx("If", [flag], ["y0"], then_branch=branch("Add"), else_branch=branch("Sub"))
    body.output("y", "y0")
    unit, main = collapsed(body)
    (call,) = calls(main)
    assert set(call.inputs) == {"x", "flag"}
    function = subgraph(unit, call)
    one = np.array([1.0], "f4")
    ordered = {"x": one, "flag": np.array(True)}
    for flag_value, expected in ((True, 3.0), (False, 1.0)):
        ordered["flag"] = np.array(flag_value)
        (got,) = run_function(function, [ordered[name] for name in call.inputs])
        assert got[0] == expected


def test_a_call_waits_for_all_that_its_ops_waited_for() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.role("Model", "Forward", "global", [x], ["f"])
    body.role("Model", "Step", "global", [], ["stepped"], after=["f"])
    body.onnx("Relu", [x], ["a"], after=["stepped"])
    body.onnx("Neg", ["a"], ["b"], after=["a", "f"])
    body.output("y", "b")
    _, main = collapsed(body)
    (call,) = calls(main)
    assert call.after == ("stepped", "f")  # "a" is made inside


def test_control_edges_that_named_a_member_name_the_call() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a"], name="relu")
    body.role("Model", "Forward", "global", ["a"], ["f"], name="forward")
    body.output("y", "f")
    unit = unit_until(BEFORE, body, options=ALL)
    (main,) = unit.partitions.values()
    forward = node_making(main, "f")
    forward.metadata[keys.CONTROL_AFTER_KEY] = "relu"
    run(unit, PASS, options=ALL)
    (call,) = calls(main)
    assert control(node_making(main, "f")) == [call.name]


def test_the_border_of_an_inlined_module_does_not_keep_ops_apart() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a"])
    body.syscall("PassThrough", ["a"], ["border"], kinds=[types.TENSOR_FLOAT])
    body.syscall("PassThrough", ["border"], ["border2"], kinds=[types.TENSOR_FLOAT])
    body.onnx("Neg", ["border2"], ["b"])
    body.output("y", "b")
    _, main = collapsed(body)
    (call,) = calls(main)
    assert (list(call.inputs), list(call.outputs)) == (["x"], ["b"])
    assert [n.op_type for n in main.nodes] == [call.op_type, "PassThrough"]


def test_ops_without_a_slot_and_ops_that_refer_to_attributes_stay() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.op("", "Relu", [x], ["a"])
    body.output("y", "a")
    unit, main = collapsed(body)
    assert not calls(main)
    assert not unit.program.functions


def _available(
    function: Function, seeds: Collection[str], dead: Collection[str]
) -> dict[str, bool]:
    """Which values come when inputs `seeds` are there and the ops `dead` never finish."""
    known = dict.fromkeys(function.inputs, False) | dict.fromkeys(seeds, True)
    for node in function.nodes:
        fires = node.name not in dead and all(known[name] for name in node.reads)
        known.update((name, fires) for name in node.outputs if name)
    return known


@given(random_programs(), st.data())
def test_fusing_changes_nothing_of_what_comes_and_what_does_not(
    program: ModelProto, data: st.DataObject
) -> None:
    options = programs.bound(program).options
    unit = admit(program, options)
    for name in all_pass_names()[: all_pass_names().index(PASS)]:
        if name == "validate_deliveries":  # it refuses what never comes
            continue
        load_pass(name).run(unit, options)
    before = {}
    for home, main in unit.partitions.items():
        before[home] = main.copy()
    load_pass(PASS).run(unit, options)
    for home, main in unit.partitions.items():
        late = sorted(n.name for n in main.nodes if graph.is_role(n) or graph.is_wire(n))
        dead = data.draw(st.sets(st.sampled_from(late))) if late else set()
        inputs = list(main.inputs)
        seeds = data.draw(st.sets(st.sampled_from(inputs))) if inputs else set()
        was = _available(before[home], seeds, dead)
        now = _available(main, seeds, dead)
        assert now == {name: was[name] for name in now}


def test_collapsing_is_done_once() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a"])
    body.output("y", "a")
    unit, _ = collapsed(body)
    done = snapshot(unit)
    assert run(unit, PASS, options=ALL) == {"ops_collapsed": 0, "subgraph_calls": 0}
    assert snapshot(unit) == done
