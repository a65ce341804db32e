"""`infer_peer_classes` and `synthesize_wire_recvs`: where ops live, and both halves of a send."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from bbnode.compiler.analysis.wire import wire_pairs
from bbnode.compiler.errors import (
    AmbiguousHome,
    CrossClassDataflow,
    IncompatibleStorageOnEdge,
    UnresolvedPeerClass,
)
from bbnode.ir import graph, keys, peer_list_ops, types
from bbnode.ir.graph import Function
from tests.compiler import programs
from tests.compiler.programs import BOUND, Body, home_of, node_making, node_named, run, unit_of


def placed(*bodies: Body) -> Function:
    unit = unit_of(*bodies)
    run(unit, "inline_for_partition", "validate", "type_solver", "infer_peer_classes",
        options=programs.CompileOptions(permissive_types=True))  # fmt: skip
    return unit.root


def test_a_federated_round_is_cut_at_its_request() -> None:
    root = placed(programs.federated_program())
    homes = {v: home_of(root, v) for v in ("weights", "loaded", "stats", "both", "counted", "mean")}
    assert homes == {
        "weights": "server", "loaded": "client", "stats": "client", "both": "client",
        "counted": "server", "mean": "server",
    }  # fmt: skip
    request = node_making(root, "round.req_id")
    assert request.metadata.get(keys.PEER_CLASS_KEY) == "client"
    response = next(n for n in root.nodes if n.op_type == keys.OP_SEND_RESP)
    assert response.metadata.get(keys.HOME_CLASS_KEY) == "client"
    assert response.metadata.get(keys.PEER_CLASS_KEY) == "server"


def test_a_ring_comes_back_to_where_it_began() -> None:
    root = placed(programs.ring_program())
    classes = [
        (n.metadata.get(keys.HOME_CLASS_KEY), n.metadata.get(keys.PEER_CLASS_KEY))
        for n in root.nodes
        if graph.is_wire(n)
    ]
    assert classes == [("a", "b"), ("b", "c"), ("c", "a")]
    assert home_of(root, "result") == "a"


def test_a_class_may_send_to_itself() -> None:
    root = placed(programs.gossip_program())
    assert {n.metadata.get(keys.HOME_CLASS_KEY) for n in root.nodes} == {"peer"}
    assert node_making(root, "theirs").metadata.get(keys.PEER_CLASS_KEY) == "peer"


def test_a_sender_leads_back_to_the_class_that_sent() -> None:
    body = Body("Back", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    received, sender = body.send(x, body.sample("client", "cs"), "there")
    body.send(received, sender, "home_again")
    root = placed(body)
    assert home_of(root, "home_again") == "client"
    assert node_making(root, "home_again").metadata.get(keys.PEER_CLASS_KEY) == "server"


@pytest.mark.parametrize("mover", ["Identity", "Slice", "Gather", "Squeeze", "Unsqueeze"])
def test_peers_from_an_input_are_of_the_class_it_is_named_after(mover: str) -> None:
    body = Body("Named", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    (kind, moved), *_ = peer_list_ops.RESULT_TYPES[mover].items()
    peers = body.input("worker", kind)
    extra = {"Identity": 0, "Slice": 2, "Gather": 1, "Squeeze": 0, "Unsqueeze": 1}[mover]
    index = [body.input(f"i{n}", types.TENSOR_INT64) for n in range(extra)]
    body.onnx(mover, [peers, *index], ["some"], kinds=[moved])
    body.send(x, "some", "there")
    root = placed(body)
    assert node_making(root, "there").metadata.get(keys.PEER_CLASS_KEY) == "worker"


def test_peers_of_one_class_may_be_joined_and_of_two_may_not() -> None:
    def joined(second: str) -> Body:
        body = Body("Joined", home="server", root=True)
        x = body.input("x", types.TENSOR_FLOAT)
        body.sample("client", "a", slot="one")
        body.sample(second, "b", slot="two")
        body.onnx("Concat", ["a", "b"], ["both"], axis=0, kinds=[types.PEER_ID_VEC])
        body.send(x, "both", "there", name="TheSend")
        return body

    root = placed(joined("client"))
    assert node_making(root, "there").metadata.get(keys.PEER_CLASS_KEY) == "client"
    with pytest.raises(UnresolvedPeerClass) as caught:
        placed(joined("server"))
    assert (caught.value.node_name, caught.value.peer_input) == ("TheSend", "both")


def test_peers_that_nothing_names_are_unresolved() -> None:
    body = Body("Nameless", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.syscall("Constant", [], ["peer"], value=types.PEER_ID.id.encode() + b"\0abc",
                 kinds=[types.PEER_ID])  # fmt: skip
    body.send(x, "peer", "there", line=7)
    with pytest.raises(UnresolvedPeerClass, match="peer_class=") as caught:
        placed(body)
    assert caught.value.peer_input == "peer"
    assert caught.value.source_line == "program.py:7"
    assert caught.value.module == "Nameless"


def test_an_op_without_data_lives_where_its_slot_is_used() -> None:
    body = programs.federated_program()
    root = placed(body)
    assert home_of(root, "update") == "client"  # slot `local`: loads what the client received
    assert home_of(root, "weights") == "server"


def test_a_slot_on_two_classes_asks_for_after_and_after_decides() -> None:
    def two_sided(**more: list[str]) -> Body:
        body = Body("TwoSided", home="server", root=True)
        x = body.input("x", types.TENSOR_FLOAT)
        body.role("Model", "LoadParameters", "m", [x], ["here"])
        received, _ = body.send(x, body.sample("client", "cs"), "there")
        body.role("Model", "LoadParameters", "m", [received], ["loaded"])
        body.role("Model", "Params", "m", [], ["params"], name="Asked", **more)
        return body

    with pytest.raises(AmbiguousHome, match="after=") as caught:
        placed(two_sided())
    assert caught.value.node_name == "Asked"
    assert caught.value.slot == "m"
    assert caught.value.homes == ("client", "server")
    assert home_of(placed(two_sided(after=["loaded"])), "params") == "client"
    assert home_of(placed(two_sided(after=["here"])), "params") == "server"


def test_a_default_that_later_proves_ambiguous_is_refused() -> None:
    body = Body("Late", home="server", root=True)
    body.role("Model", "Params", "m", [], ["params"], name="First")
    received, _ = body.send("params", body.sample("client", "cs"), "there")
    body.role("Model", "LoadParameters", "m", [received], ["loaded"])
    with pytest.raises(AmbiguousHome) as caught:
        placed(body)
    assert caught.value.node_name == "First"


def test_reading_from_two_classes_names_both_sides_and_the_mend() -> None:
    body = Body("Crossed", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    received, _ = body.send(x, body.sample("client", "cs"), "there")
    body.onnx("Neg", [received], ["far"], name="FarNeg")
    body.onnx("Add", [x, "far"], ["sum"], name="Mixed", line=42)
    with pytest.raises(CrossClassDataflow, match=r"net_out\(") as caught:
        placed(body)
    error = caught.value
    assert (error.node_name, error.source_line) == ("Mixed", "program.py:42")
    assert (error.home_a, error.value_a, error.producer_a) == ("server", "x", "function input")
    assert (error.home_b, error.value_b, error.producer_b) == ("client", "far", "FarNeg")


def test_waiting_for_a_value_of_another_class_is_refused_too() -> None:
    body = Body("Waits", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    received, _ = body.send(x, body.sample("client", "cs"), "there")
    body.onnx("Neg", [x], ["negated"], after=[received])
    with pytest.raises(CrossClassDataflow):
        placed(body)


def constants_program() -> Body:
    body = Body("Constants", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    body.syscall("Constant", [], ["one"], value=one, kinds=[types.TENSOR_FLOAT], name="One")
    body.onnx("Neg", ["one"], ["minus"], name="Minus")
    body.onnx("Add", [x, "minus"], ["near"])
    received, _ = body.send("near", body.sample("client", "cs"), "there")
    body.onnx("Add", [received, "minus"], ["far"], name="Far")
    body.output("result", "far")
    return body


def test_constants_live_wherever_they_are_read() -> None:
    root = placed(constants_program())
    assert home_of(root, "minus") == "server"
    assert home_of(root, "minus@client") == home_of(root, "one@client") == "client"
    assert list(node_named(root, "Far").inputs) == ["there", "minus@client"]
    assert list(node_named(root, "Minus@client").inputs) == ["one@client"]
    assert root.kinds()["minus@client"] is types.TENSOR_FLOAT


def test_an_inlined_module_keeps_its_own_home() -> None:
    child = Body("Child", home="client")
    child.syscall("Pulse", [], ["beat"])
    child.output("out", "beat")
    root = Body("Parent", home="server", root=True)
    root.syscall("Pulse", [], ["own"], name="Own")
    root.call(child.function, [], ["beaten"], kinds=[types.TRIGGER], name="Call")
    body = placed(root, child)
    assert node_named(body, "Call/Pulse_0").metadata.get(keys.HOME_CLASS_KEY) == "client"
    assert node_named(body, "Own").metadata.get(keys.HOME_CLASS_KEY) == "server"


# --- synthesis ------------------------------------------------------------------------------


def synthesized(*bodies: Body) -> Function:
    unit = unit_of(*bodies)
    run(unit, "refine_polymorphic_value_info", "inline_for_partition", "derive_wire_deadlines",
        "validate", "type_solver", "infer_peer_classes", "synthesize_wire_recvs",
        options=BOUND)  # fmt: skip
    return unit.root


def test_a_send_keeps_a_sentinel_and_its_recv_takes_the_values() -> None:
    root = synthesized(programs.gossip_program())
    send = next(n for n in root.nodes if n.op_type == keys.OP_SEND)
    recv = next(n for n in root.nodes if n.op_type == keys.OP_RECV)
    assert list(send.outputs) == ["__send_sentinel_0"]
    assert list(recv.outputs) == ["theirs", "theirs.sender"]
    assert not recv.inputs
    meta = recv.metadata
    assert meta[keys.SYNTHESIZED_FROM_KEY] == "0"
    assert meta[keys.HOME_CLASS_KEY] == "peer"
    assert meta[keys.TYPE_HASH_KEY] == str(types.TENSOR_FLOAT.wire_hash)
    assert meta[keys.DEADLINE_NS_KEY] == send.metadata.get(keys.DEADLINE_NS_KEY)
    payload = recv.attr(keys.ATTR_PAYLOAD_TYPE)
    assert payload.kind is types.TENSOR_FLOAT
    assert meta[keys.WIRE_CORRELATION_KEY] == "none"


def test_a_request_becomes_four_ops_with_one_index() -> None:
    root = synthesized(programs.federated_program())
    wires = {n.op_type: n for n in root.nodes if graph.is_wire(n)}
    assert {n.metadata.get(keys.SYNTHESIZED_FROM_KEY) for n in wires.values()} == {"0"}
    assert list(wires["SendReqBatched"].outputs) == ["round.req_id"]
    assert list(wires["RecvReq"].outputs) == [
        "round.received",
        "round.sender",
        "round.remote_req_id",
    ]
    assert list(wires["RecvRespBatched"].inputs) == ["round.req_id"]
    assert list(wires["RecvRespBatched"].outputs) == ["round.responses"]
    assert wires["RecvRespBatched"].metadata.get(keys.HOME_CLASS_KEY) == "server"
    pairs = {(p.send.op_type, p.recv.op_type) for p in wire_pairs(list(root.nodes))}
    assert pairs == {("SendReqBatched", "RecvReq"), ("SendResp", "RecvRespBatched")}


def test_sends_are_numbered_in_program_order() -> None:
    root = synthesized(programs.ring_program())
    sent = [n.outputs[0] for n in root.nodes if n.op_type == keys.OP_SEND]
    assert sent == ["__send_sentinel_0", "__send_sentinel_1", "__send_sentinel_2"]


def test_an_edge_whose_ends_store_different_types_is_refused() -> None:
    body = Body("Edge", home="server", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.send(x, body.sample("client", "cs"), "there", name="TheSend")
    body.typed("there", types.TENSOR_DOUBLE)
    body.role("Model", "LoadParameters", "m", ["there"], [], name="Load")
    with pytest.raises(IncompatibleStorageOnEdge, match="Codec") as caught:
        synthesized(body)
    assert caught.value.send_node == "TheSend"
    assert caught.value.recv_node == "Load"
    assert {caught.value.sent, caught.value.received} == {"Tensor.FLOAT", "Tensor.DOUBLE"}
    unit = unit_of(body)  # the pass itself holds the rule as well
    run(unit, "infer_peer_classes")
    with pytest.raises(IncompatibleStorageOnEdge):
        run(unit, "synthesize_wire_recvs")


def test_a_send_that_nobody_placed_is_unresolved() -> None:
    unit = unit_of(programs.gossip_program())
    with pytest.raises(UnresolvedPeerClass):
        run(unit, "synthesize_wire_recvs")
