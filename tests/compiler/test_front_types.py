"""`type_solver` and `refine_polymorphic_value_info`."""

from __future__ import annotations

import pytest
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from bbnode.compiler.errors import (
    BindingMismatch,
    IncompatibleStorageOnEdge,
    MissingBinding,
    RoleMethodFailed,
    TypeConstraintFailed,
    UnboundSlot,
    UnresolvedType,
)
from bbnode.compiler.unit import CompileOptions, SlotBinding
from bbnode.ir import keys, types
from bbnode.ir.graph import Function
from bbnode.ir.onnx_file import type_of
from bbnode.ir.types import TypeNode
from tests.compiler import programs
from tests.compiler.programs import BOUND, Body, node_making, run, unit_of

PERMISSIVE = CompileOptions(permissive_types=True)


def solved(*bodies: Body, options: CompileOptions | None = None) -> dict[str, TypeNode]:
    unit = unit_of(*bodies)
    run(unit, "type_solver", options=options)
    return unit.root.kinds()


def body_with(*inputs: tuple[str, TypeNode]) -> Body:
    body = Body("Typed", root=True)
    for name, kind in inputs:
        body.input(name, kind)
    return body


def test_onnx_types_flow_both_ways_through_a_schemas_variables() -> None:
    known = solved(programs.local_program())
    assert known["b"] is types.TENSOR_FLOAT  # backwards: Add has one type for all
    assert known["sum"] is known["result"] is types.TENSOR_FLOAT
    assert known["shape"] is known["size"] is types.TENSOR_INT64


def branch(op_type: str) -> GraphProto:
    """A branch of an If that reads `as_int` from outside."""
    made = helper.make_tensor_value_info(op_type, TensorProto.INT64, None)
    return helper.make_graph([helper.make_node(op_type, ["as_int"], [op_type])], "b", [], [made])


def test_onnx_infers_what_the_schema_leaves_open() -> None:
    body = body_with(("x", types.TENSOR_FLOAT), ("flag", types.TENSOR_BOOL))
    body.onnx("Cast", ["x"], ["as_int"], to=TensorProto.INT64)
    one = helper.make_tensor("one", TensorProto.DOUBLE, [1], [1.0])
    body.onnx("Constant", [], ["one"], value=one)
    body.onnx("Equal", ["as_int", "as_int"], ["same"])
    then, other = (branch(op_type) for op_type in ("Identity", "Neg"))
    body.onnx("If", ["flag"], ["picked"], then_branch=then, else_branch=other)
    known = solved(body)
    assert known["as_int"] is known["picked"] is types.TENSOR_INT64
    assert known["one"] is types.TENSOR_DOUBLE
    assert known["same"] is types.TENSOR_BOOL


def test_ports_of_the_op_table_narrow_and_variables_unite() -> None:
    body = body_with(("t", types.ANY), ("v", types.ANY))
    body.syscall("OnTrigger", ["t"], ["fired"])
    body.syscall("Gate", ["v", "fired"], ["gated"])
    body.role("Model", "ApplyDelta", "m", ["gated"], [])
    body.typed("v", types.TENSOR_FLOAT)
    known = solved(body)
    assert known["t"] is types.TRIGGER
    assert known["gated"] is types.TENSOR_FLOAT


def test_what_nothing_computes_with_is_a_trigger() -> None:
    body = body_with(("tick", types.ANY), ("unused", types.ANY))
    body.syscall("Pulse", [], ["p"], after=["tick"])
    known = solved(body)
    assert known["tick"] is known["unused"] is types.TRIGGER


def test_peers_that_say_nothing_are_a_list_of_peers() -> None:
    body = body_with(("x", types.TENSOR_FLOAT), ("client", types.ANY))
    body.send("x", "client", "there")
    assert solved(body)["client"] is types.PEER_ID_VEC


def test_bundles_record_and_unbundles_take_the_types_of_their_parts() -> None:
    body = body_with(("x", types.TENSOR_FLOAT), ("m", types.METADATA))
    body.op(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE, ["x", "m"], ["both"])
    listed = f"{types.TENSOR_FLOAT.id},{types.METADATA.id}"
    body.op(keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE, ["both"], ["x2", "m2"], child_types=listed)
    unit = unit_of(body)
    run(unit, "type_solver")
    known = unit.root.kinds()
    assert (known["x2"], known["m2"]) == (types.TENSOR_FLOAT, types.METADATA)
    assert node_making(unit.root, "both").attr("child_types") == listed.encode()


def test_a_call_ties_the_callers_values_to_the_callees() -> None:
    callee = Body("Callee")
    callee.input("x", types.ANY)
    callee.onnx("Neg", ["x"], ["n"])
    callee.output("y", "n")
    root = body_with(("a", types.TENSOR_DOUBLE))
    root.call(callee.function, ["a"], ["b"], kinds=[types.ANY])
    unit = unit_of(root, callee)
    run(unit, "type_solver")
    assert unit.root.kinds()["b"] is types.TENSOR_DOUBLE
    assert unit.program.functions[1].kinds()["x"] is types.TENSOR_DOUBLE


def test_constants_of_carriers_say_their_type() -> None:
    body = Body("Typed", root=True)
    body.syscall("Constant", [], ["n"], value=types.U64.id.encode() + b"\0x", kinds=[types.ANY])
    assert solved(body)["n"] is types.U64


def test_a_value_that_can_not_be_both_names_the_op() -> None:
    body = body_with(("x", types.TENSOR_FLOAT))
    body.syscall("OnTrigger", ["x"], ["fired"], name="Wrong", line=3)
    with pytest.raises(TypeConstraintFailed, match=r"Tensor.FLOAT meets Trigger") as caught:
        solved(body)
    assert (caught.value.op, caught.value.source_line) == ("Wrong", "program.py:3")
    # No Cast makes a Trigger of a tensor.
    assert str(caught.value).endswith("`syscalls.threshold(g, value, n=1)`")


def test_a_list_where_one_peer_is_wanted_is_told_how_to_take_one() -> None:
    body = body_with(("peers", types.PEER_ID_VEC))
    body.syscall("Peers.Contains", ["peers", "peers"], ["found"], name="Wrong")
    with pytest.raises(TypeConstraintFailed, match=r"peer_lists.only_one\(g, peers\)"):
        solved(body)


def test_a_type_that_the_schema_does_not_take_is_refused() -> None:
    body = body_with(("x", types.TENSOR_BOOL))
    body.onnx("Sqrt", ["x"], ["y"], name="RootOfTruth")
    with pytest.raises(TypeConstraintFailed, match="takes Tensor") as caught:
        solved(body)
    assert caught.value.op == "RootOfTruth"


def test_strict_types_name_what_stays_open_and_permissive_ones_let_it_be() -> None:
    body = Body("Open", root=True)
    body.role("Model", "Params", "global", [], ["code"], name="E")
    assert solved(body)["code"] is types.TENSOR  # nobody reads it
    body.output("y", "code")
    with pytest.raises(UnboundSlot, match="bind_model"):
        solved(body)
    with pytest.raises(UnresolvedType, match="with_permissive_types") as caught:
        solved(body, options=BOUND)
    assert (caught.value.value, caught.value.known, caught.value.op) == ("code", "Tensor", "E")
    assert solved(body, options=PERMISSIVE)["code"] is types.TENSOR


def test_types_outside_the_lattice_stay_inside_onnx() -> None:
    body = body_with(("x", types.TENSOR_FLOAT))
    body.onnx("SequenceConstruct", ["x"], ["seq"])
    body.onnx("SequenceLength", ["seq"], ["count"])
    unit = unit_of(body)
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, None))
    unit.root.types["seq"] = type_of(sequence)
    run(unit, "type_solver")
    assert unit.root.kinds()["count"] is types.TENSOR_INT64


# --- refinement -----------------------------------------------------------------------------


def refined(body: Body, *bindings: SlotBinding) -> Function:
    unit = unit_of(body)
    run(unit, "refine_polymorphic_value_info", options=CompileOptions(bindings=bindings))
    return unit.root


def test_a_bound_component_narrows_the_tensors_at_its_ports() -> None:
    body = Body("Refined", root=True)
    body.role("DataSource", "NextBatch", "data", [], ["images", "labels"])
    binding = SlotBinding(slot="data", role="DataSource", component=programs.FakeData)
    known = refined(body, binding).kinds()
    assert (known["images"], known["labels"]) == (types.TENSOR_FLOAT, types.TENSOR_INT64)
    unbound = refined(body).kinds()  # a batch may be several tensors
    assert (unbound["images"], unbound["labels"]) == (types.ANY, types.TENSOR)


def test_a_concrete_slot_narrows_by_its_type_name() -> None:
    body = Body("Refined", root=True)
    body.role("Model", "Params", "m", [], ["p"], concrete="test.DoubleModel")
    assert refined(body).kinds()["p"] is types.TENSOR_DOUBLE


def test_two_storages_at_one_value_are_refused() -> None:
    body = Body("Refined", root=True)
    body.role("Model", "Params", "m", [], ["p"], concrete="test.DoubleModel")
    body.role("Model", "LoadParameters", "n", ["p"], [], concrete="test.FakeModel", name="Load")
    with pytest.raises(TypeConstraintFailed, match=r"test\.FakeModel") as caught:
        refined(body)
    assert caught.value.op == "Load"


def test_two_storages_across_a_send_ask_for_a_codec() -> None:
    body = Body("Refined", home="server", root=True)
    body.role("Model", "Params", "m", [], ["p"], concrete="test.DoubleModel")
    received, _ = body.send("p", body.sample("client", "cs"), "there")
    body.role("Model", "LoadParameters", "n", [received], [], concrete="test.FakeModel")
    unit = unit_of(body)
    with pytest.raises(IncompatibleStorageOnEdge, match="Codec"):
        run(unit, "refine_polymorphic_value_info", "type_solver", options=BOUND)


def test_a_component_without_the_method_is_named() -> None:
    body = Body("Refined", root=True)
    body.role("DataSource", "OnDataLoaded", "data", [], ["loaded"])
    silent = type("Silent", (programs.FakeData,), {"on_data_loaded": None})
    binding = SlotBinding(slot="data", role="DataSource", component=silent)
    with pytest.raises(RoleMethodFailed, match="on_data_loaded") as caught:
        refined(body, binding)
    assert (caught.value.slot, caught.value.op_type) == ("data", "OnDataLoaded")


def test_a_concrete_type_that_is_not_installed_is_missing() -> None:
    body = Body("Refined", root=True)
    body.role("Model", "Params", "m", [], ["p"], concrete="nowhere.Model")
    with pytest.raises(MissingBinding, match=r"nowhere\.Model") as caught:
        refined(body)
    assert caught.value.slot == "m"


def test_a_slot_bound_under_another_role_is_refused() -> None:
    body = Body("Refined", root=True)
    body.role("Model", "Params", "m", [], ["p"])
    binding = SlotBinding(slot="m", role="DataSource", component=programs.FakeData)
    with pytest.raises(BindingMismatch, match="uses it as a Model slot") as caught:
        refined(body, binding)
    assert caught.value.role == "DataSource"


def loop_body() -> GraphProto:
    """A body that says no type of what it carries."""
    return helper.make_graph(
        [
            helper.make_node("Neg", ["carried"], ["made"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            ValueInfoProto(name="carried"),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), ValueInfoProto(name="made")],
    )


def test_what_a_loop_carries_is_typed_by_what_goes_in() -> None:
    body = body_with(("x", types.TENSOR_DOUBLE), ("n", types.TENSOR_INT64))
    body.onnx("Loop", ["n", "", "x"], ["y"], body=loop_body())
    assert solved(body)["y"] is types.TENSOR_DOUBLE
