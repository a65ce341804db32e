"""`validate`, `expand_ops`, `derive_wire_deadlines`, `inline_for_partition` and the bootstraps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, TensorProto, helper

from bbnode.compiler import errors
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.errors import (
    BootstrapCompositionCycle,
    BootstrapCompositionGap,
    CompileError,
    CyclicGraph,
    DanglingInput,
    ExpansionFailed,
    OpsetNotImported,
    TypeConstraintFailed,
    WireOpInBootstrap,
)
from bbnode.compiler.unit import CompileOptions
from bbnode.ir import graph, keys, types
from bbnode.ir.graph import Attribute, AttributeKind, Opset
from tests.compiler import programs
from tests.compiler.programs import Body, node_making, node_named, run, unit_of


def small() -> Body:
    body = Body("Small", home="server", root=True)
    body.input("x", types.TENSOR_FLOAT)
    return body


# --- validate: one broken program per rule --------------------------------------------------


def unknown_op() -> Body:
    body = small()
    body.op("org.example", "Frobnicate", ["x"], ["y"], name="F", line=9)
    return body


def dangling_call() -> Body:
    body = small()
    body.op(keys.MODULE_DOMAIN, "Gone", ["x"], ["y"], name="C")
    return body


def dangling_input() -> Body:
    body = small()
    body.onnx("Neg", ["nothing"], ["y"], name="N")
    return body


def dangling_after() -> Body:
    body = small()
    body.onnx("Neg", ["x"], ["y"], name="N", after=["nothing"])
    return body


def duplicate_output() -> Body:
    body = small()
    body.onnx("Neg", ["x"], ["y"], name="A")
    body.onnx("Abs", ["x"], ["y"], name="B")
    return body


def duplicate_node() -> Body:
    body = small()
    body.onnx("Neg", ["x"], ["y"], name="A")
    body.onnx("Abs", ["x"], ["z"], name="A")
    return body


def unanswered() -> Body:
    body = small()
    body.request("x", body.sample("client", "cs"), "r", name="R")
    return body


def answered_twice() -> Body:
    body = small()
    request = body.request("x", body.sample("client", "cs"), "r", name="R")
    body.respond(request[2], request)
    body.respond(request[2], request)
    return body


def response_to_nothing() -> Body:
    body = small()
    body.input("id", types.WIRE_REQUEST_ID)
    body.input("peer", types.PEER_ID)
    body.op(keys.WIRE_DOMAIN, keys.OP_SEND_RESP, ["x", "peer", "id"], [], name="R")
    return body


def authored_recv() -> Body:
    body = small()
    body.op(keys.WIRE_DOMAIN, keys.OP_RECV, [], ["p", "s"], name="R")
    return body


def untyped_input() -> Body:
    body = small()
    body.function.inputs.append("untyped")
    return body


def slotless_role() -> Body:
    body = small()
    body.op(keys.role_domain("Model"), "Params", [], ["p"], name="P")
    return body


def two_faced_slot() -> Body:
    body = small()
    body.role("Model", "Params", "m", [], ["p"], name="P", meta={keys.CONCRETE_TYPE_KEY: "a.B"})
    return body


def slot_of_another_role() -> Body:
    body = small()
    trait = {keys.REQUIRED_TRAIT_KEY: "IndexRuntime"}
    body.role("Model", "Params", "m", [], ["p"], name="P", meta=trait)
    return body


def unnumbered_slot() -> Body:
    body = small()
    body.role("Model", "Params", "m", [], ["p"], name="P", meta={keys.SLOT_ID_KEY: "first"})
    return body


def cyclic() -> Body:
    body = small()
    body.onnx("Add", ["x", "z"], ["y"], name="A")
    body.onnx("Neg", ["y"], ["z"], name="B")
    return body


def cyclic_by_after() -> Body:
    body = small()
    body.onnx("Neg", ["x"], ["y"], name="A", after=["z"])
    body.onnx("Neg", ["x"], ["z"], name="B", after=["y"])
    return body


BROKEN: list[tuple[Callable[[], Body], type[CompileError], dict[str, object]]] = [
    (unknown_op, errors.UnknownOp,
     {"node_name": "F", "op_type": "Frobnicate", "domain": "org.example",
      "source_line": "program.py:9", "module": "Small"}),
    (dangling_call, errors.DanglingCall, {"node_name": "C", "function": "Gone"}),
    (dangling_input, errors.DanglingInput, {"node_name": "N", "input_name": "nothing"}),
    (dangling_after, errors.DanglingInput, {"node_name": "N", "input_name": "nothing"}),
    (duplicate_output, errors.DuplicateOutput,
     {"value_name": "y", "node_a": "A", "node_b": "B"}),
    (duplicate_node, errors.DuplicateNodeName, {"node_name": "A", "function": "Small"}),
    (unanswered, errors.UnpairedWireRequest, {"node_name": "R"}),
    (answered_twice, errors.UnpairedWireRequest, {"node_name": "R"}),
    (response_to_nothing, errors.UnpairedWireRequest, {"node_name": "R"}),
    (authored_recv, errors.UnpairedWireRequest, {"node_name": "R"}),
    (untyped_input, errors.MissingTypeInfo, {"input_name": "untyped", "function": "Small"}),
    (slotless_role, errors.MalformedSlotMetadata, {"node_name": "P"}),
    (two_faced_slot, errors.MalformedSlotMetadata, {"node_name": "P"}),
    (slot_of_another_role, errors.MalformedSlotMetadata, {"node_name": "P"}),
    (unnumbered_slot, errors.MalformedSlotMetadata, {"node_name": "P"}),
    (cyclic, errors.CyclicGraph, {"involves": ("B", "A")}),
    (cyclic_by_after, errors.CyclicGraph, {"involves": ("B", "A")}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "fields"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_validate_names_what_is_broken(
    make: Callable[[], Body], kind: type[CompileError], fields: dict[str, object]
) -> None:
    with pytest.raises(kind) as caught:
        run(unit_of(make()), "validate")
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert str(caught.value).rstrip().rpartition(". ")[2]  # how to mend it


def test_validate_takes_every_good_program(program: ModelProto) -> None:
    unit = admit(program, CompileOptions())
    assert run(unit, "validate")["validation_errors"] == 0


@pytest.mark.parametrize("version", [0, 12])
def test_an_opset_has_to_be_imported_in_a_version_that_has_the_op(version: int) -> None:
    body = small()
    body.onnx("HardSwish", ["x"], ["y"], name="H")  # since opset 14
    unit = unit_of(body)
    for owner in (unit.root, unit.program):
        owner.opset_imports = [e for e in owner.opset_imports if e.domain]
    if version:
        unit.root.opset_imports.append(Opset("", version))
        with pytest.raises(errors.UnknownOp):
            run(unit, "validate")
        return
    with pytest.raises(OpsetNotImported) as caught:
        run(unit, "validate")
    assert (caught.value.node_name, caught.value.version_used) == ("H", 22)


@pytest.mark.parametrize(("op", "other"), [("If", True), ("Neg", False)])
def test_an_op_is_the_same_in_the_models_opset(op: str, other: bool) -> None:
    """ONNX's rule for local functions; `If` changed in opset 25, `Neg` last in 13."""
    body = small()
    if op == "If":
        body.input("c", types.TENSOR_BY_ELEM[TensorProto.BOOL])
        branch = helper.make_graph(
            [helper.make_node("Neg", ["x"], ["n"])],
            "branch",
            [],
            [helper.make_tensor_value_info("n", 1, None)],
        )
        body.onnx("If", ["c"], ["y"], name="I", then_branch=branch, else_branch=branch)
    else:
        body.onnx("Neg", ["x"], ["y"], name="I")
    unit = unit_of(body)
    kept = [e for e in unit.program.opset_imports if e.domain]
    unit.program.opset_imports = [*kept, graph.Opset("", 23)]
    if not other:
        run(unit, "validate")
        return
    with pytest.raises(OpsetNotImported, match="another op in version 23 of the model") as caught:
        run(unit, "validate")
    assert (caught.value.version_used, caught.value.version_imported) == (25, 23)


def test_an_op_takes_or_gives_something() -> None:
    body = small()
    body.syscall("Pulse", [], [], name="P")
    with pytest.raises(TypeConstraintFailed, match="Pulse takes nothing and gives nothing"):
        run(unit_of(body), "validate")


def test_an_op_has_its_required_inputs_and_no_more_than_it_may() -> None:
    body = small()
    body.onnx("Add", ["x"], ["y"], name="A")
    with pytest.raises(DanglingInput) as caught:
        run(unit_of(body), "validate")
    assert (caught.value.node_name, caught.value.input_name) == ("A", "B")
    body = small()
    body.onnx("Neg", ["x", "x"], ["y"], name="N")
    with pytest.raises(TypeConstraintFailed, match="at most 1 inputs"):
        run(unit_of(body), "validate")


def test_peers_have_to_be_peers() -> None:
    body = small()
    body.send("x", "x", "there", name="S")
    with pytest.raises(TypeConstraintFailed, match="PeerIdVec or PeerId"):
        run(unit_of(body), "validate")


def test_a_graph_in_an_attribute_reads_from_outside() -> None:
    body = small()
    flag = body.input("flag", types.TENSOR_BOOL)
    made = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Neg", ["gone"], ["o"])], "b", [], [made])
    body.onnx("If", [flag], ["y"], name="I", then_branch=branch, else_branch=branch)
    with pytest.raises(DanglingInput) as caught:
        run(unit_of(body), "validate")
    assert caught.value.input_name == "gone"


def test_a_long_chain_is_no_recursion() -> None:
    body = small()
    last = "x"
    for number in range(3_000):
        body.onnx("Neg", [last], [f"v{number}"])
        last = f"v{number}"
    body.output("y", last)
    unit = unit_of(body)
    unit.root.nodes = unit.root.nodes[::-1]  # recorded order does not matter
    assert run(unit, "validate")["nodes"] == 3_001


# --- expand_ops -----------------------------------------------------------------------------


def test_defaults_are_written_down() -> None:
    body = small()
    body.role("Model", "Train", "m", [], ["stats"], name="T")
    unit = unit_of(body)
    assert run(unit, "expand_ops")["expansion_count"] == 2
    node = node_named(unit.root, "T")
    assert (node.attr("epochs"), node.attr("batch")) == (1, 32)
    assert run(unit, "expand_ops")["expansion_count"] == 0


def test_a_constant_takes_its_value_from_the_functions_default() -> None:
    body = small()
    node = body.syscall("Constant", [], ["c"], name="C", kinds=[types.TENSOR_FLOAT])
    node.set_attr("value", Attribute(AttributeKind.TENSOR, None, "bias"))
    bias = helper.make_tensor("bias", TensorProto.FLOAT, [1], [0.5])
    body.function.defaults["bias"] = Attribute.of(bias)
    unit = unit_of(body)
    run(unit, "expand_ops")
    attribute = node_named(unit.root, "C").attributes.get("value")
    assert attribute is not None
    assert not attribute.reference
    assert list(attribute.value.numpy()) == [0.5]


def wrong_attribute(case: str) -> Body:
    body = small()
    if case == "needs the attribute 'n'":
        body.role("PeerSelector", "Sample", "s", [], ["p"], name="O")
    elif case == "has no attribute 'speed'":
        body.role("Model", "Train", "m", [], ["stats"], name="O", speed=3)
    elif case == "has to be int":
        body.role("Model", "Train", "m", [], ["stats"], name="O", epochs="many")
    elif case == "only 2 peers":
        request = body.request("x", body.sample("client", "cs", n=2), "r", name="O", quorum=3)
        body.respond(request[2], request)
    elif case == "child_types lists 1":
        body.op(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE, ["x", "x"], ["b"], name="O",
                child_types=types.TENSOR_FLOAT.id)  # fmt: skip
    elif case == "unknown type":
        body.op(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE, ["x"], ["b"], name="O", child_types="a.B")
    elif case == "but it has 1 outputs":
        body.syscall("Tee", ["x"], ["y"], name="O", fanout=2)
    elif case == "n is 0":
        body.syscall("Threshold", ["x"], ["y"], name="O", n=0)
    return body


@pytest.mark.parametrize(
    "case",
    ["needs the attribute 'n'", "has no attribute 'speed'", "has to be int", "only 2 peers",
     "child_types lists 1", "unknown type", "but it has 1 outputs", "n is 0"],
)  # fmt: skip
def test_attributes_that_do_not_fit_name_the_op(case: str) -> None:
    with pytest.raises(ExpansionFailed, match=case) as caught:
        run(unit_of(wrong_attribute(case)), "expand_ops")
    assert caught.value.node_name == "O"


# --- derive_wire_deadlines ------------------------------------------------------------------


def test_a_deadline_is_depth_times_budget_or_the_requests_own() -> None:
    body = small()
    peers = body.sample("client", "cs")
    body.send("x", peers, "one", name="One")
    body.send("x", peers, "three", name="Three", meta={keys.CHAIN_DEPTH_KEY: "3"})
    body.request("x", peers, "r", name="Own", deadline_ns=7)
    body.request("x", peers, "q", name="Default", deadline_ns=0)
    unit = unit_of(body)
    run(unit, "derive_wire_deadlines", options=CompileOptions(per_hop_budget_ns=50))
    names = ("One", "Three", "Own", "Default")
    found = [node_named(unit.root, n).metadata.get(keys.DEADLINE_NS_KEY) for n in names]
    assert found == ["50", "150", "7", "50"]


@pytest.mark.parametrize("depth", ["0", "-1", "deep", "9" * 30, ""])
def test_a_chain_depth_is_a_small_number(depth: str) -> None:
    body = small()
    body.send("x", body.sample("client", "cs"), "there", name="S",
              meta={keys.CHAIN_DEPTH_KEY: depth})  # fmt: skip
    with pytest.raises(ExpansionFailed, match="chain_depth"):
        run(unit_of(body), "derive_wire_deadlines")


# --- inline_for_partition -------------------------------------------------------------------


def test_three_classes_of_function_are_inlined_and_others_stay() -> None:
    unit = unit_of(*programs.nested_program())
    counters = run(unit, "inline_for_partition")
    assert counters == {"bodies_joined": 0, "calls_inlined": 3, "surfaced_wire_ops": 1}
    assert [f.name for f in unit.program.functions] == ["Nested", "Stateful"]
    called = [n.op_type for n in unit.root.nodes if n.domain == keys.MODULE_DOMAIN]
    assert called == ["Stateful", "Stateful"]
    assert node_making(unit.root, "Sender_5/received").op_type == keys.OP_SEND
    assert node_making(unit.root, "far").op_type == "PassThrough"
    run(unit, "validate")


def test_inlining_carries_slots_attributes_waits_and_graphs_over() -> None:
    child = Body("Child")
    x = child.input("x", types.TENSOR_FLOAT)
    flag = child.input("flag", types.TENSOR_BOOL)
    made = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Neg", [x], ["o"])], "b", [], [made])
    child.onnx("If", [flag], ["y"], then_branch=branch, else_branch=branch, slot="gpu")
    train = child.role("Model", "Train", "m", [], ["stats"], concrete="test.FakeModel")
    train.set_attr("epochs", Attribute(AttributeKind.INT, None, "rounds"))
    child.output("out", "y")
    root = Body("Root", root=True)
    values = [root.input("a", types.TENSOR_FLOAT), root.input("go", types.TENSOR_BOOL)]
    tick = root.input("tick", types.TRIGGER)
    root.call(child.function, values, ["got"], name="Call", after=[tick], rounds=4)
    unit = unit_of(root, child)
    run(unit, "inline_for_partition")
    train = node_making(unit.root, "Call/stats")
    assert train.attr("epochs") == 4
    assert train.after == ("tick",)
    chosen = node_named(unit.root, "Call/If_0")
    assert chosen.graphs[0].nodes[0].inputs[0] == "a"
    assert list(unit.root.attributes) == ["gpu"]
    assert list(unit.root.defaults) == ["m"]
    assert unit.root.metadata.get(keys.SLOT_ROLE_PREFIX + "m") == "Model|1"
    assert unit.root.metadata.get(keys.CONCRETE_TYPE_SLOT_PREFIX + "m") == "test.FakeModel"
    run(unit, "validate")


def test_an_output_that_is_an_input_is_passed_through() -> None:
    child = Body("Child")
    child.input("x", types.TENSOR_FLOAT)
    child.function.outputs.extend(["x", "x"])
    root = Body("Root", root=True)
    root.input("a", types.TENSOR_FLOAT)
    root.call(child.function, ["a"], ["b", "c"], name="Call")
    unit = unit_of(root, child)
    run(unit, "inline_for_partition", "validate", "type_solver")
    assert unit.root.kinds()["c"] is types.TENSOR_FLOAT


def test_functions_that_call_each_other_are_a_cycle() -> None:
    a, b = Body("A"), Body("B")
    a.call(b.function, [], [])
    b.call(a.function, [], [])
    root = Body("Root", root=True)
    root.call(a.function, [], [])
    with pytest.raises(CyclicGraph) as caught:
        run(unit_of(root, a, b), "inline_for_partition")
    assert caught.value.involves == ("A", "B")


@pytest.mark.parametrize("sends", [False, True])
def test_calls_of_calls_do_not_explode(sends: bool) -> None:
    bodies = [Body("F0")]
    x = bodies[0].input("x", types.TENSOR_FLOAT)
    bodies[0].onnx("Neg", [x], ["y0"])
    if sends:
        bodies[0].send("y0", bodies[0].sample("client", "cs"), "there")
    bodies[0].output("y", "y0")
    for level in range(1, 40):
        body = Body(f"F{level}")
        x = body.input("x", types.TENSOR_FLOAT)
        body.call(bodies[-1].function, [x], ["m"], name="One")
        body.call(bodies[-1].function, ["m"], ["n"], name="Two")
        body.output("y", "n")
        bodies.append(body)
    root = Body("Root", root=True)
    root.call(bodies[-1].function, [root.input("x", types.TENSOR_FLOAT)], ["y"])
    unit = unit_of(root, *bodies)
    if sends:
        with pytest.raises(ExpansionFailed, match="more than"):
            run(unit, "inline_for_partition")
    else:
        run(unit, "inline_for_partition", "validate")
        assert sum(len(f.nodes) for f in unit.bodies()) < 50_000


def test_types_that_caller_and_callee_declare_have_to_meet() -> None:
    child = Body("Child")
    child.onnx("Neg", [child.input("x", types.TENSOR_FLOAT)], ["y"])
    child.function.outputs.append("y")
    root = Body("Root", root=True)
    root.call(child.function, [root.input("a", types.TENSOR_INT64)], ["b"], name="Call")
    with pytest.raises(TypeConstraintFailed) as caught:
        run(unit_of(root, child), "inline_for_partition")
    assert caught.value.op == "Call"


# --- bootstraps -----------------------------------------------------------------------------


def bootstrap(name: str) -> Body:
    body = Body(name + keys.BOOTSTRAP_SUFFIX)
    body.function.metadata[keys.MODULE_PHASE_KEY] = keys.BOOTSTRAP_PHASE
    return body


def test_bootstraps_that_compose_are_taken_and_stay() -> None:
    parent, child = bootstrap("P"), bootstrap("C")
    child.syscall("Pulse", [], ["beat"])
    parent.call(child.function, [], [])
    unit = unit_of(small(), parent, child)
    assert run(unit, "validate_bootstrap_composition") == {"bootstraps": 2}
    run(unit, "inline_for_partition")
    assert len(unit.program.functions) == 3


def test_a_child_bootstrap_that_is_missing_is_a_gap() -> None:
    parent = bootstrap("P")
    parent.call(bootstrap("C").function, [], [])
    with pytest.raises(BootstrapCompositionGap) as caught:
        run(unit_of(small(), parent), "validate_bootstrap_composition")
    assert (caught.value.parent, caught.value.child) == ("P__bootstrap", "C__bootstrap")


def test_bootstraps_in_a_ring_are_a_cycle() -> None:
    a, b = bootstrap("A"), bootstrap("B")
    a.call(b.function, [], [])
    b.call(a.function, [], [])
    with pytest.raises(BootstrapCompositionCycle) as caught:
        run(unit_of(small(), a, b), "validate_bootstrap_composition")
    assert caught.value.path == ("A__bootstrap", "B__bootstrap")


def test_a_bootstrap_does_not_send() -> None:
    parent = bootstrap("P")
    x = parent.input("x", types.TENSOR_FLOAT)
    parent.send(x, parent.sample("client", "cs"), "there", name="S")
    with pytest.raises(WireOpInBootstrap) as caught:
        run(unit_of(small(), parent), "validate_bootstrap_composition")
    assert (caught.value.node_name, caught.value.function) == ("S", "P__bootstrap")


@pytest.mark.parametrize("sends", [False, True])
def test_a_body_of_another_opset_is_inlined_only_if_it_has_to_be(sends: bool) -> None:
    child = Body("Child")
    x = child.input("x", types.TENSOR_FLOAT)
    child.onnx("Neg", [x], ["y"])
    if sends:
        child.send("y", child.sample("client", "cs"), "there")
    child.function.outputs.append("y")
    root = Body("Root", root=True)
    root.call(child.function, [root.input("x", types.TENSOR_FLOAT)], ["z"], name="Call")
    root.onnx("Abs", ["z"], ["w"])
    unit = unit_of(root, child)
    called = unit.program.functions[1]
    called.opset_imports = [e if e.domain else e._replace(version=17) for e in called.opset_imports]
    if not sends:
        assert run(unit, "inline_for_partition")["calls_inlined"] == 0
        return
    with pytest.raises(OpsetNotImported) as caught:
        run(unit, "inline_for_partition")
    assert (caught.value.domain, caught.value.version_used) == ("", 17)
