"""Wire edges, gates, and the last look: passes 10 to 15 and 17."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bbnode.compiler.analysis.gate_contracts import (
    GateContract,
    PartitionView,
    gate_contracts,
    register_gate_contract,
    unregister_gate_contract,
)
from bbnode.compiler.errors import PassInvariantBroken, RuntimeIncomplete
from bbnode.compiler.unit import DEFAULT_PER_HOP_BUDGET_NS
from bbnode.ir import address, ids, keys, types
from bbnode.ir.graph import Function
from tests.compiler.back_units import meta, of_type, sole, unit_until
from tests.compiler.programs import (
    Body,
    federated_program,
    gossip_program,
    node_making,
    ring_program,
    run,
)

EDGES = "analyze_wire_edges"
RX = "insert_backoff_gate_rx"
TX = "insert_backoff_gate_tx"
LAST = "validate_runtime_complete"


def one(body: Body, last: str) -> Function:
    (main,) = unit_until(last, body).partitions.values()
    return main


# --- edges ----------------------------------------------------------------------------------


def test_both_ends_agree_on_the_site() -> None:
    unit = unit_until(EDGES, federated_program())
    client, server = unit.partitions.values()
    request, received = sole(server, "SendReqBatched"), sole(client, "RecvReq")
    site = ids.site_id(unit.program_name, "client", "round", "RecvReq", "Tensor.FLOAT")
    assert meta(received, keys.SITE_ID_KEY) == str(site)
    assert meta(request, keys.DEST_SITE_NAME_PREFIX + "weights") == "round.received"
    suffix = request.attr(keys.DEST_SUFFIX_PREFIX + "weights")
    assert address.parse_site_suffix(suffix) == site
    answer, responses = sole(client, "SendResp"), sole(server, "RecvRespBatched")
    site = ids.site_id(
        *(unit.program_name, "server", "round", "RecvRespBatched"),
        "Composite[Tensor.FLOAT,Metadata]",
    )
    assert meta(responses, keys.SITE_ID_KEY) == str(site)
    suffix = answer.attr(keys.DEST_SUFFIX_PREFIX + "both")
    assert address.parse_site_suffix(suffix) == site


def test_a_receiver_says_which_class_sends_to_it() -> None:
    unit = unit_until(EDGES, federated_program())
    client, server = unit.partitions.values()
    assert meta(sole(client, "RecvReq"), keys.SENDER_CLASS_KEY) == "server"
    assert meta(sole(server, "RecvRespBatched"), keys.SENDER_CLASS_KEY) == "client"
    (peer,) = unit_until(EDGES, gossip_program()).partitions.values()
    own = {meta(node, keys.SENDER_CLASS_KEY) for node in of_type(peer, "Recv")}
    assert own == {meta(peer, keys.HOME_KEY)}


def test_receivers_keep_the_deadline_of_their_send() -> None:
    unit = unit_until(EDGES, federated_program())
    for main in unit.partitions.values():
        for node in main.nodes:
            if node.domain == keys.WIRE_DOMAIN:
                hops = 1 if node.op_type == "SendResp" else 2  # there, and back again
                assert meta(node, keys.DEADLINE_NS_KEY) == str(hops * DEFAULT_PER_HOP_BUDGET_NS)
                # The requests of the program bring no deadline.
                assert meta(node, keys.DEADLINE_FROM_KEY) == keys.DEADLINE_FROM_NOBODY


def _signal(payload: str, consumer: str) -> Body:
    body = Body("Signal", home="a", root=True)
    value = body.input("value", types.TENSOR_FLOAT if payload == "tensor" else types.TRIGGER)
    got, _ = body.send(value, body.sample("b", "bs", slot="pick_b"), "got")
    if consumer == "after":
        body.role("Model", "Step", "local", [], ["stepped"], after=[got])
    elif consumer == "trigger":
        body.syscall("AppNotify", [got], [], name="Notify")
        body.function.nodes[-1].set_attr("name", "seen")
    elif consumer == "both":
        body.role("Model", "ApplyDelta", "local", [got], ["applied"], after=[got])
    elif consumer == "output":
        body.output("result", got)
    return body


@pytest.mark.parametrize(
    ("payload", "consumer", "transport"),
    [
        ("tensor", "nobody", "trigger_only"),
        ("tensor", "after", "trigger_only"),
        ("tensor", "both", "data"),
        ("tensor", "output", "data"),
        ("trigger", "trigger", "trigger_only"),
        ("trigger", "output", "trigger_only"),
    ],
)
def test_an_edge_carries_a_payload_only_where_somebody_reads_it(
    payload: str, consumer: str, transport: str
) -> None:
    unit = unit_until(EDGES, _signal(payload, consumer))
    send = sole(unit.partitions["a"], "Send")
    recv = sole(unit.partitions["b"], "Recv")
    assert meta(send, keys.WIRE_TRANSPORT_KEY) == transport
    assert meta(recv, keys.WIRE_TRANSPORT_KEY) == transport
    received = unit.partitions["b"].kinds()["got"]
    if transport == "trigger_only":
        assert received is types.TRIGGER
        assert meta(recv, keys.TYPE_HASH_KEY) == str(types.TRIGGER.wire_hash)
    else:
        assert received is types.TENSOR_FLOAT


def test_sends_to_one_peers_value_share_a_batch_group() -> None:
    body = Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    peers = body.sample("b", "bs", slot="pick_b")
    others = body.sample("b", "others", slot="pick_b")
    body.send(x, peers, "one", name="one")
    body.send(x, others, "three", name="three")
    body.send(x, peers, "two", name="two")
    unit = unit_until(EDGES, body)
    groups = {
        node.name: meta(node, keys.BATCH_GROUP_KEY)
        for main in unit.partitions.values()
        for node in main.nodes
        if node.domain == keys.WIRE_DOMAIN
    }
    assert groups["one"] == groups["two"] == groups["one/Recv"] == "a/0"
    assert groups["three"] == groups["three/Recv"] == "a/1"


# --- gates ----------------------------------------------------------------------------------


def test_the_chain_behind_a_receiver() -> None:
    main = one(gossip_program(), RX)
    recv = sole(main, "Recv")
    dedup, health = sole(main, "DedupGateRx"), sole(main, "PeerHealthGateRx")
    backoff = sole(main, "BackoffGateRx")
    name = recv.name
    assert list(recv.outputs) == ["theirs", "theirs.sender"]
    assert (list(dedup.inputs), list(dedup.outputs)) == (["theirs"], [f"{name}#dedup_rx_out"])
    assert list(health.inputs) == list(dedup.outputs)
    assert list(health.outputs) == [f"{name}#peer_health_rx_out"]
    assert list(backoff.inputs) == list(health.outputs)
    assert list(backoff.outputs) == [f"{name}#backoff_rx_out"]
    assert list(sole(main, "ApplyDelta").inputs) == list(backoff.outputs)
    assert meta(recv, keys.RX_CHAIN_HEAD_KEY) == backoff.outputs[0]
    for gate in (dedup, health, backoff):
        assert gate.domain == keys.SYSCALL_DOMAIN
        assert meta(gate, keys.GATE_SOURCES[gate.op_type]) == name
        assert meta(recv, keys.GATE_STAMPS[gate.op_type]) == "true"
        assert meta(gate, keys.HOME_CLASS_KEY) == "peer"
        assert main.kinds()[gate.outputs[0]] is types.TENSOR_FLOAT
    order = [n.op_type for n in main.nodes if n.domain != keys.role_domain("Model")]
    assert order[-4:] == ["Recv", "DedupGateRx", "PeerHealthGateRx", "BackoffGateRx"]


def test_what_waits_for_a_payload_waits_for_its_gates_and_senders_are_not_gated() -> None:
    body = Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    got, sender = body.send(x, body.sample("b", "bs", slot="pick_b"), "got")
    body.role("Model", "ApplyDelta", "local", [got], ["applied"])
    body.role("Model", "Params", "local", [], ["mine"], after=[got])
    body.send("mine", sender, "back")
    main = unit_until(RX, body).partitions["b"]
    recv = sole(main, "Recv")
    head = meta(recv, keys.RX_CHAIN_HEAD_KEY)
    assert head in node_making(main, "mine").after
    assert "got" not in node_making(main, "mine").after
    assert sole(main, "Send").inputs[1] == "got.sender"


def test_a_payload_that_is_sent_on_keeps_its_destination_stamps() -> None:
    unit = unit_until(RX, ring_program())
    main = unit.partitions["b"]
    send, recv = sole(main, "Send"), sole(main, "Recv")
    head = meta(recv, keys.RX_CHAIN_HEAD_KEY)
    assert send.inputs[0] == head
    assert meta(send, f"{keys.DEST_SITE_NAME_PREFIX}{head}") == "at_c"
    assert send.attr(f"{keys.DEST_SUFFIX_PREFIX}{head}") is not None
    assert meta(send, keys.DEST_SITE_NAME_PREFIX + "at_b") is None


def test_tx_gates_stand_before_sends_to_a_fixed_peer_only() -> None:
    body = gossip_program()
    assert not of_type(one(body, TX), "PeerHealthGateTx")
    send = node_making(body.function, "theirs")
    send.set_attr(keys.ATTR_PEER, b"\x00\x24peer")
    send.after = ("others",)
    main = one(body, TX)
    health, backoff = sole(main, "PeerHealthGateTx"), sole(main, "BackoffGateTx")
    send = sole(main, "Send")
    assert list(health.inputs) == ["mine"]
    assert list(health.outputs) == [f"{send.name}#peer_health_tx_gated"]
    assert list(backoff.inputs) == list(health.outputs)
    assert list(send.inputs) == [f"{send.name}#backoff_tx_gated", "others"]
    for gate in (health, backoff):
        assert gate.attr(keys.ATTR_PEER) == b"\x00\x24peer"
        assert meta(gate, keys.GATE_SOURCES[gate.op_type]) == send.name
        assert meta(send, keys.GATE_STAMPS[gate.op_type]) == "true"
        assert gate.after == ("others",)
    assert meta(send, keys.DEST_SITE_NAME_PREFIX + send.inputs[0]) == "theirs"


# --- the last look --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dropped",
    [
        "insert_dedup_gate_rx",
        "insert_peer_health_gate_rx",
        "insert_backoff_gate_rx",
        "insert_async_deadlines",
    ],
)
def test_a_pass_left_out_is_noticed(dropped: str) -> None:
    unit = unit_until("insert_async_deadlines", gossip_program(), without=(dropped,))
    with pytest.raises(RuntimeIncomplete) as caught:
        run(unit, LAST)
    assert caught.value.target == unit.partitions["peer"].name
    assert "has no" in caught.value.missing


@pytest.mark.parametrize("dropped", ["insert_peer_health_gate_tx", "insert_backoff_gate_tx"])
def test_a_tx_pass_left_out_is_noticed(dropped: str) -> None:
    body = gossip_program()
    node_making(body.function, "theirs").set_attr(keys.ATTR_PEER, b"\x00\x24peer")
    unit = unit_until("insert_async_deadlines", body, without=(dropped,))
    with pytest.raises(RuntimeIncomplete, match="has no"):
        run(unit, LAST)


@pytest.mark.parametrize(
    ("op_type", "spoil", "says"),
    [
        ("Send", keys.WIRE_TRANSPORT_KEY, "transports"),
        ("Recv", keys.BATCH_GROUP_KEY, "batch group"),
        ("Recv", keys.SITE_ID_KEY, "site"),
        ("Recv", keys.SENDER_CLASS_KEY, "which class sends"),
        ("Params", keys.SLOT_ID_KEY, "id of its slot"),
    ],
)
def test_a_missing_stamp_is_named(op_type: str, spoil: str, says: str) -> None:
    unit = unit_until("insert_async_deadlines", gossip_program())
    node = sole(unit.partitions["peer"], op_type)
    node.metadata.pop(spoil, None)
    with pytest.raises(RuntimeIncomplete, match=says):
        run(unit, LAST)


def test_a_send_that_lands_nowhere_is_named() -> None:
    unit = unit_until("insert_async_deadlines", gossip_program())
    send = sole(unit.partitions["peer"], "Send")
    send.set_attr(keys.DEST_SUFFIX_PREFIX + send.inputs[0], address.site_suffix(7))
    with pytest.raises(RuntimeIncomplete, match="no receiver"):
        run(unit, LAST)
    send.attributes = {}
    with pytest.raises(RuntimeIncomplete, match="where its data lands"):
        run(unit, LAST)


def test_an_op_of_no_table_is_named() -> None:
    unit = unit_until("insert_async_deadlines", gossip_program())
    sole(unit.partitions["peer"], "ApplyDelta").op_type = "Levitate"
    with pytest.raises(RuntimeIncomplete, match="Levitate"):
        run(unit, LAST)


def test_contracts_are_an_open_list() -> None:
    assert [c.name for c in gate_contracts()] == [*keys_in_order()]

    def missing(view: PartitionView) -> Iterator[str]:
        if not of_type(view.main, "Record"):
            yield "nothing is recorded"

    contract = register_gate_contract(GateContract(name="test.recorded", missing=missing))
    try:
        register_gate_contract(contract)  # the same one again is no second one
        with pytest.raises(PassInvariantBroken, match="registered already"):
            register_gate_contract(GateContract(name="test.recorded", missing=missing))
        unit = unit_until("insert_async_deadlines", gossip_program())
        with pytest.raises(RuntimeIncomplete, match="nothing is recorded"):
            run(unit, LAST)
    finally:
        unregister_gate_contract("test.recorded")
    run(unit, LAST)


def keys_in_order() -> tuple[str, ...]:
    return (
        keys.OP_DEDUP_GATE_RX,
        keys.OP_PEER_HEALTH_GATE_RX,
        keys.OP_BACKOFF_GATE_RX,
        keys.OP_PEER_HEALTH_GATE_TX,
        keys.OP_BACKOFF_GATE_TX,
        keys.OP_DEADLINE_CHECK,
    )
