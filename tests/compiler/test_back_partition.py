"""`partition_by_wire_ops`: who gets what, and under which name."""

from __future__ import annotations

import json
import re
from hashlib import sha256

import pytest

from bbnode.compiler.analysis.content_hash import AttributePrints, function_digest
from bbnode.compiler.analysis.order import program_order
from bbnode.compiler.analysis.wire import wire_pairs
from bbnode.compiler.errors import CrossClassDataflow, CyclicGraph, Internal, UnpairedWireRequest
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, OpNode, ValueType
from tests.compiler.back_units import meta, of_type, sole, unit_until
from tests.compiler.programs import (
    Body,
    federated_program,
    gossip_program,
    nested_program,
    node_making,
    ring_program,
    run,
    unit_of,
)

PASS = "partition_by_wire_ops"


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_what_is_hashed_is_one_json_text_however_long_the_body_is(count: int) -> None:
    nodes = [
        OpNode("Abs", "", f"n{i}", [f"v{i}"], [f"v{i + 1}"], metadata={"b": "ü", "a": str(i)})
        for i in range(count)
    ]
    kind = ValueType.of(types.TENSOR_FLOAT)
    function = Function("f", inputs=["v0"], outputs=[f"v{count}"])
    function.nodes = nodes
    function.types = {f"v{i}": kind for i in range(count)}
    said = [
        *([], ["v0"], [f"v{count}"], [], []),
        [
            [n.op_type, "", "", n.name, "", n.inputs, n.outputs, [],
             [["a", n.metadata["a"]], ["b", "ü"]], [], ""]
            for n in nodes
        ],
        [[name, kind.content.decode("latin-1")] for name in sorted(function.types)],
    ]  # fmt: skip
    text = json.dumps(said, separators=(",", ":"))
    assert function_digest(function, AttributePrints()) == sha256(text.encode()).digest()


def names(unit: CompilationUnit) -> dict[str, str]:
    return {home: main.name for home, main in unit.partitions.items()}


def test_each_class_gets_its_ops_inputs_outputs_slots_and_types() -> None:
    unit = unit_until(PASS, federated_program())
    assert list(unit.partitions) == ["client", "server"]
    client, server = unit.partitions.values()
    assert [n.op_type for n in client.nodes] == [
        "RecvReq", "LoadParameters", "Train", "Params", "Bundle", "SendResp",
    ]  # fmt: skip
    assert (list(client.inputs), list(client.outputs)) == ([], [])
    assert list(client.attributes) == ["local"]
    assert client.metadata.get(keys.SLOT_ROLE_PREFIX + "local") == "Model|2"
    assert (list(server.inputs), list(server.outputs)) == (["tick"], ["model", "info_out"])
    assert list(server.attributes) == ["pick_client", "global", "fedavg"]
    assert server.metadata.get(keys.TARGET_KEY) == "true"
    assert server.metadata.get(keys.HOME_KEY) == "server"
    declared = set(client.types)
    assert declared == {name for node in client.nodes for name in node.outputs}
    assert not unit.program.functions


def test_edges_name_both_ends_of_a_request_and_of_its_answer() -> None:
    unit = unit_until(PASS, federated_program())
    found = [(e.producer_class, e.consumer_class, e.value_name) for e in unit.wire_edges]
    assert found == [
        ("server", "client", "round.received"),
        ("client", "server", "round.responses"),
    ]
    client, server = unit.partitions.values()
    request, answer = unit.wire_edges
    assert request.send_node == sole(server, "SendReqBatched").name
    assert request.recv_node == sole(client, "RecvReq").name
    assert answer.send_node == sole(client, "SendResp").name
    assert answer.recv_node == sole(server, "RecvRespBatched").name


def test_rings_and_sends_to_the_own_class() -> None:
    ring = unit_until(PASS, ring_program())
    hops = [(e.producer_class, e.consumer_class) for e in ring.wire_edges]
    assert hops == [("a", "b"), ("b", "c"), ("c", "a")]
    gossip = unit_until(PASS, gossip_program())
    assert [(e.producer_class, e.consumer_class) for e in gossip.wire_edges] == [("peer", "peer")]


def test_a_name_is_a_hash_of_content_without_source_lines() -> None:
    first = names(unit_until(PASS, federated_program()))
    assert all(re.fullmatch(rf"{home}#[0-9a-f]{{16}}", name) for home, name in first.items())
    moved = federated_program()
    for node in moved.function.nodes:
        node.source_line = "elsewhere.py:1"
    assert names(unit_until(PASS, moved)) == first
    for node in moved.function.nodes:
        node.metadata.pop(keys.SOURCE_LINE_KEY, None)
    assert names(unit_until(PASS, moved)) == first


def test_a_change_moves_the_name_of_the_class_it_is_on_and_no_other() -> None:
    first = names(unit_until(PASS, federated_program()))
    changed = federated_program()
    node_making(changed.function, "stats").set_attr("epochs", 9)
    second = names(unit_until(PASS, changed))
    assert second["client"] != first["client"]
    assert second["server"] == first["server"]


def test_a_change_in_a_called_function_moves_the_callers_name() -> None:
    first = names(unit_until(PASS, *nested_program()))
    root, pure, stateful, sender = nested_program()
    stateful.function.nodes[0].op_type = "LoadParameters"
    second = names(unit_until(PASS, root, pure, stateful, sender))
    assert second["server"] != first["server"]
    assert second["client"] == first["client"]


def test_functions_that_no_main_calls_are_dropped_and_bootstraps_stay() -> None:
    root, pure, stateful, sender = nested_program()
    boot = Body("Nested__bootstrap")
    boot.function.metadata[keys.MODULE_PHASE_KEY] = keys.BOOTSTRAP_PHASE
    boot.syscall("Pulse", [], ["t"])
    unit = unit_until(PASS, root, pure, stateful, sender, boot)
    hoisted, kept = (f.name for f in unit.program.functions)
    assert re.fullmatch(r"Hoist_Stateful_[0-9a-f]{16}", hoisted)
    assert kept == "Nested__bootstrap"


def test_an_op_without_a_home_lives_on_the_roots() -> None:
    body = Body("P", home="lone", root=True)
    body.output("y", body.input("x", types.TENSOR_FLOAT))
    unit = unit_of(body)
    run(unit, PASS)
    assert list(unit.partitions) == ["lone"]
    assert meta(unit.partitions["lone"].nodes[0], keys.HOME_CLASS_KEY) == "lone"


def test_an_empty_program_is_one_empty_partition() -> None:
    unit = unit_of(Body("P", home="lone", root=True))
    assert run(unit, PASS)["partition_count"] == 1


def test_a_value_may_not_cross_classes_without_a_send() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["a"], meta={keys.HOME_CLASS_KEY: "left"}, name="relu")
    body.onnx("Neg", ["a"], ["b"], meta={keys.HOME_CLASS_KEY: "right"}, name="neg")
    with pytest.raises(CrossClassDataflow) as caught:
        run(unit_of(body), PASS)
    error = caught.value
    assert (error.node_name, error.home_a, error.home_b) == ("neg", "right", "left")
    assert (error.value_b, error.producer_b) == ("a", "relu")


# --- order ----------------------------------------------------------------------------------


def _order(body: Body) -> list[str]:
    nodes = body.function.nodes
    return [nodes[index].name for index in program_order(nodes)]


def test_program_order_keeps_recorded_order_and_moves_needs_up() -> None:
    body = Body("P", root=True)
    body.syscall("OnTrigger", ["late"], ["a"], name="reader")
    body.syscall("Pulse", [], ["free"], name="free")
    body.syscall("Pulse", [], ["late"], name="maker")
    assert _order(body) == ["maker", "reader", "free"]


def test_program_order_follows_after_and_control_edges() -> None:
    body = Body("P", root=True)
    body.syscall("Pulse", [], ["a"], name="first", meta={keys.CONTROL_AFTER_KEY: "third"})
    body.syscall("Pulse", [], ["b"], name="second", after=["c"])
    body.syscall("Pulse", [], ["c"], name="third")
    assert _order(body) == ["third", "first", "second"]


def test_a_ring_is_named() -> None:
    body = Body("P", root=True)
    body.syscall("OnTrigger", ["b"], ["a"], name="one")
    body.syscall("OnTrigger", ["a"], ["b"], name="two")
    with pytest.raises(CyclicGraph) as caught:
        _order(body)
    assert set(caught.value.involves) == {"one", "two"}


# --- pairs ----------------------------------------------------------------------------------


def _split(op_type: str) -> tuple[Function, list]:
    unit = unit_until("synthesize_wire_recvs", federated_program())
    kept = [node for node in unit.root.nodes if node.op_type != op_type]
    assert len(kept) == len(unit.root.nodes) - 1
    return unit.root, kept


@pytest.mark.parametrize("missing", ["RecvReq", "RecvRespBatched"])
def test_a_request_without_one_of_its_receivers_is_named(missing: str) -> None:
    _, nodes = _split(missing)
    with pytest.raises(UnpairedWireRequest) as caught:
        wire_pairs(nodes)
    assert caught.value.node_name in {"SendReqBatched_2", "SendResp_7"}


def test_a_receiver_that_nothing_feeds_is_named() -> None:
    _, nodes = _split("SendResp")
    with pytest.raises(Internal, match="RecvRespBatched"):
        wire_pairs(nodes)


def test_two_receivers_of_one_index_are_refused() -> None:
    unit = unit_until("synthesize_wire_recvs", gossip_program())
    (recv,) = of_type(unit.root, "Recv")
    with pytest.raises(Internal, match="one wire index"):
        wire_pairs([*unit.root.nodes, recv.copy()])
