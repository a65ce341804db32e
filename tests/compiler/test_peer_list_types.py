"""`ai.onnx` ops on lists of peers and addresses: their types, and that no backend gets them."""

from __future__ import annotations

import pytest

from bbnode.compiler.errors import TypeConstraintFailed
from bbnode.ir import peer_list_ops, types
from bbnode.ir.types import TypeNode
from tests.compiler.back_units import unit_until
from tests.compiler.programs import Body, run, unit_of
from tests.compiler.test_back_pipeline import ALL

PASS = "type_solver"
INDICES = {"Slice": 2, "Gather": 1, "Unsqueeze": 1}
CASES = [
    (op_type, source, result)
    for op_type, results in peer_list_ops.RESULT_TYPES.items()
    for source, result in results.items()
]


def moving(op_type: str, source: TypeNode, result: TypeNode | None = None, data: int = 1) -> Body:
    """Inputs of type `source` and what an op makes of them, declared as `result`."""
    body = Body("P", root=True)
    values = [body.input(f"v{n}", source) for n in range(data)]
    values += [body.input(f"i{n}", types.TENSOR_INT64) for n in range(INDICES.get(op_type, 0))]
    attributes = {"axis": 0} if op_type == "Concat" else {}
    kinds = None if result is None else [result]
    body.onnx(op_type, values, ["moved"], kinds=kinds, **attributes)
    body.output("out", "moved")
    return body


def solved(body: Body) -> dict[str, TypeNode]:
    unit = unit_of(body)
    run(unit, PASS)
    return unit.root.kinds()


@pytest.mark.parametrize(("op_type", "source", "result"), CASES)
def test_what_goes_in_says_what_comes_out(op_type: str, source: TypeNode, result: TypeNode) -> None:
    data = 2 if op_type == "Concat" else 1
    known = solved(moving(op_type, source, types.ANY, data))
    assert known["moved"] is known["out"] is result


@pytest.mark.parametrize(("op_type", "source", "result"), CASES)
def test_what_comes_out_says_what_goes_in(op_type: str, source: TypeNode, result: TypeNode) -> None:
    assert solved(moving(op_type, types.ANY, result))["v0"] is source


def test_peers_of_a_send_go_back_through_what_moves_them() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    peers = body.input("worker", types.ANY)
    at = body.input("at", types.TENSOR_INT64)
    body.onnx("Slice", [peers, at, at], ["some"], kinds=[types.ANY])
    body.onnx("Concat", ["some", "some"], ["twice"], axis=0, kinds=[types.ANY])
    body.send(x, "twice", "there")
    known = solved(body)
    assert known["worker"] is known["some"] is known["twice"] is types.PEER_ID_VEC


def test_one_known_part_says_what_the_others_are() -> None:
    body = Body("P", root=True)
    a = body.input("a", types.ADDRESS_VEC)
    b = body.input("b", types.ANY)
    body.onnx("Concat", [a, b], ["both"], axis=0, kinds=[types.ANY])
    known = solved(body)
    assert known["b"] is known["both"] is types.ADDRESS_VEC


def test_tensors_go_by_the_schemas_as_ever() -> None:
    known = solved(moving("Gather", types.TENSOR_DOUBLE, types.TENSOR))
    assert known["moved"] is types.TENSOR_DOUBLE
    body = Body("P", root=True)
    v = body.input("v", types.ANY)
    body.onnx("Identity", [v], ["same"], kinds=[types.ANY])
    body.onnx("Relu", ["same"], ["positive"], kinds=[types.TENSOR_FLOAT])
    assert solved(body)["v"] is types.TENSOR_FLOAT


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (moving("Unsqueeze", types.PEER_ID_VEC, types.ANY), "reads PeerIdVec"),
        (moving("Squeeze", types.PEER_ID, types.ANY), "takes PeerIdVec or address_vec"),
        (moving("Slice", types.PEER_ID_VEC, types.PEER_ID), "PeerId meets PeerIdVec"),
    ],
)
def test_what_does_not_fit_is_refused(body: Body, said: str) -> None:
    with pytest.raises(TypeConstraintFailed, match=said):
        solved(body)


def test_peers_and_addresses_can_not_be_joined() -> None:
    body = Body("P", root=True)
    parts = [body.input("p", types.PEER_ID_VEC), body.input("a", types.ADDRESS_VEC)]
    body.onnx("Concat", parts, ["both"], axis=0, kinds=[types.ANY], name="Join")
    with pytest.raises(TypeConstraintFailed, match="PeerIdVec and address_vec") as caught:
        solved(body)
    assert caught.value.op == "Join"


def test_an_index_is_an_int64_tensor() -> None:
    body = Body("P", root=True)
    peers, at = body.input("p", types.PEER_ID_VEC), body.input("at", types.TENSOR_FLOAT)
    body.onnx("Gather", [peers, at], ["some"], kinds=[types.ANY])
    with pytest.raises(TypeConstraintFailed):
        solved(body)


def test_no_backend_gets_an_op_on_peers_even_if_it_was_recorded_on_one() -> None:
    unit = unit_until("collapse_backend_subgraphs", moving("Gather", types.PEER_ID_VEC, types.ANY),
                      options=ALL)  # fmt: skip
    (main,) = unit.partitions.values()
    assert [node.op_type for node in main.nodes if node.op_type == "Gather"] == ["Gather"]
    assert not unit.program.functions
