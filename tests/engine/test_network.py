"""Nodes that talk: one-way sends, whole cohorts, and what hostile peers send."""

# ruff: noqa: ARG005 - link policies have one signature

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.engine import Limits, steps
from bbnode.ir import codec, ids, keys, types
from bbnode.ir.envelope import CorrelationKind, decode_envelope
from bbnode.ir.values import TRIGGER, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import MS, Pump, S, bring_up, component, of, peer

MODEL = keys.role_domain("Model")
SELECTOR = keys.role_domain("PeerSelector")
AGGREGATOR = keys.role_domain("Aggregator")


def federated(quorum: int = 0):
    """A round: sample, ask, train there, answer, add up here."""
    client = Partition("client")
    server = Partition("server", inputs=["tick"])
    client.bind("local", "Model", "test.ScriptModel")
    head = client.recv("weights", request="req", node=types.TENSOR_FLOAT, gates=True, sender="from")
    client.op(MODEL, "LoadParameters", [head], ["c"], slot="local", called="load")
    client.op(MODEL, "Train", (), ["stats"], slot="local", called="train", control=["load"],
              epochs=2, batch=8, stamp_ns=20 * S)  # fmt: skip
    client.op(MODEL, "Params", (), ["w"], slot="local", called="params", control=["train"])
    client.respond("w", "from", "req", server.site("answers"))
    server.bind("cohort", "PeerSelector", "test.ScriptSelector")
    server.bind("global", "Model", "test.ScriptModel")
    server.bind("sum", "Aggregator", "test.SumAggregator")
    server.op(SELECTOR, "Sample", (), ["peers"], slot="cohort", after=["tick"], n=10,
              meta={keys.PEER_CLASS_KEY: "client"})  # fmt: skip
    server.op(MODEL, "Params", (), ["w"], slot="global", after=["tick"])
    server.request("w", "peers", client.site("weights"), "answers", quorum=quorum)
    server.op(AGGREGATOR, "ContributeAll", ["answers"], ["c"], slot="sum", called="all")
    server.op(AGGREGATOR, "Aggregate", (), ["m", "i"], slot="sum", control=["all"])
    server.output("mean", "m")
    server.output("info", "i")
    return model(server, client)


def network(quorum: int = 0, clients: int = 3, **more):
    made = federated(quorum)
    server = bring_up(made, "server", me=0, config={"global": {"start": 5.0}}, **more)
    others = [bring_up(made, "client", me=i + 1) for i in range(clients)]
    pump = Pump(server, *others)
    pump.settle()
    return pump, server, others


def telemetry(pump, node, name):
    return [s.attributes for s in pump.of(node, steps.Telemetry) if s.name == name]


def test_a_whole_cohort_answers_once_in_peer_order() -> None:
    pump, server, clients = network()
    execution = server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    assert pump.now_ns == 1 * S
    (end,) = pump.of(server, steps.ExecutionFinished)
    assert (end.execution, end.ok) == (execution, True)
    values = {e.topic: e.value for e in pump.of(server, steps.AppEvent)}
    assert values["mean"].tolist() == [21.0]
    assert values["info"]["contributors"] == 3
    order = sorted(client.peer_id for client in clients)
    assert [who for who, _ in component(server, "sum").got] == order
    (sent,) = telemetry(pump, server, "request.sent")
    assert list(sent["peers"]) == order
    assert len(telemetry(pump, server, "request.response")) == 3
    (closed,) = telemetry(pump, server, "request.closed")
    assert list(closed["responded"]) == order
    assert (closed["missing"], closed["reason"]) == ((), "all_answered")
    assert closed["execution"] == execution
    assert component(clients[0], "local").calls == ["load 5.0", "train 2 8", "params"]
    for node in (server, *clients):
        assert node.executions() == []
        assert node.counters()["ingress.bytes"] == 0
        assert node.next_deadline() is None
        assert node.waiting() == []


def test_the_envelope_says_who_when_and_which() -> None:
    pump, server, _ = network(clients=1)
    server.set_addresses([Multiaddr("/ip4/127.0.0.1/tcp/4001")])
    server.invoke("server", {"tick": TRIGGER})
    made = server.poll(pump.now_ns)
    (send,) = of(steps.SendEnvelope, made)
    envelope = decode_envelope(b"".join(send.parts))
    assert send.size == len(b"".join(send.parts))
    assert envelope.src_peer_bytes == server.peer_id.to_bytes()
    assert [Multiaddr(a) for a in envelope.src_peer_addresses] == [
        Multiaddr("/ip4/127.0.0.1/tcp/4001")
    ]
    assert envelope.correlation.kind is CorrelationKind.REQUEST
    assert envelope.remaining_deadline_ns == 10 * S
    (fill,) = envelope.fills
    assert fill.type_hash == types.TENSOR_FLOAT.wire_hash
    assert codec.decode_value(types.TENSOR_FLOAT, fill.payload).tolist() == [5.0]
    (waiting,) = server.waiting()
    assert (waiting.why, waiting.whom) == ("responses", str(peer(1)))
    assert waiting.until_ns == pump.now_ns + 10 * S


def test_a_quorum_goes_on_at_the_deadline_and_late_answers_are_dropped() -> None:
    pump, server, clients = network(quorum=2)
    held = []
    slow = clients[2].peer_id

    def keep(source, step):
        if source == slow:
            held.append(step)
            return 0
        return 1

    pump.keep = keep
    execution = server.invoke("server", {"tick": TRIGGER})
    pump.advance(1 * S + 10 * S - 1)
    assert pump.of(server, steps.ExecutionFinished) == []
    assert server.waiting()[0].whom == str(slow)
    pump.advance(1 * S + 10 * S)
    (end,) = pump.of(server, steps.ExecutionFinished)
    assert end.ok
    (closed,) = telemetry(pump, server, "request.closed")
    assert (closed["missing"], closed["reason"]) == ((slow,), "quorum")
    assert len(component(server, "sum").got) == 2
    server.deliver_inbound(slow, b"".join(held[0].parts))
    pump.settle()
    assert server.counters()["response.late"] == 1
    (late,) = telemetry(pump, server, "response.late")
    assert late["peer"] == slow
    assert len(component(server, "sum").got) == 2
    assert execution not in [info.execution for info in server.executions()]


def test_below_quorum_the_op_fails_and_names_who_is_missing() -> None:
    pump, server, clients = network(quorum=3)
    dead = clients[1].peer_id
    pump.keep = lambda source, step: 0 if source == dead else 1
    server.invoke("server", {"tick": TRIGGER})
    pump.advance(12 * S)
    (failed,) = pump.of(server, steps.OpFailed)
    assert failed.kind == "QuorumNotReached"
    assert str(dead) in failed.detail
    assert "2 of 3" in failed.detail
    assert not pump.of(server, steps.ExecutionFinished)[0].ok
    assert component(server, "sum").got == []


def test_a_cohort_smaller_than_the_quorum_fails_at_once() -> None:
    pump, server, _ = network(quorum=4)
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (failed,) = pump.of(server, steps.OpFailed)
    assert failed.kind == "QuorumNotReached"
    assert pump.of(server, steps.SendEnvelope) == []


def test_duplicate_answers_and_envelopes_count_once() -> None:
    pump, server, clients = network()
    # The last one's answer is held back, so that the others' duplicates meet an open cohort.
    last = clients[-1].peer_id
    pump.keep = lambda source, step: 0 if source == last else 2
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    assert server.counters()["response.duplicate"] == 2
    denied = [s for c in clients for s in pump.of(c, steps.OpFailed)]
    assert {s.kind for s in denied} == {"GateDenied"}
    assert all("reason=duplicate" in s.detail for s in denied)
    assert len(denied) == 3
    assert clients[0].counters()["gate.denied.duplicate"] == 1
    assert component(clients[0], "local").calls.count("train 2 8") == 1


def test_answers_of_strangers_and_to_nobodys_request_are_dropped() -> None:
    pump, server, _ = network(clients=2)
    pump.keep = lambda source, step: 0
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (request, _) = pump.of(server, steps.SendEnvelope)
    wire_req_id = decode_envelope(b"".join(request.parts)).correlation.wire_req_id
    site = ids.fnv1a_64(f"{server.targets[0]}/answers".encode())
    answer = np.ones(1, np.float32)
    for who, number in ((peer(77), wire_req_id), (peer(1), wire_req_id + 1)):
        server.deliver_inbound(who, envelope(who, site, answer, CorrelationKind.RESPONSE, number))
    made = server.poll(pump.now_ns)
    assert of(steps.WireReceiveFailed, made) == []
    assert server.counters()["response.stranger"] == 1
    assert server.counters()["response.unknown"] == 1
    # The right one, of an unknown type: told in a step, and the peer has no other answer.
    for wrong in ({"type_hash": 12345}, {"payload": b"\0"}):
        server.deliver_inbound(
            peer(1), envelope(peer(1), site, answer, CorrelationKind.RESPONSE, wire_req_id, **wrong)
        )
    made = server.poll(pump.now_ns)
    assert [s.kind for s in of(steps.WireReceiveFailed, made)] == ["UnknownTypeHash"]
    (failed,) = of(steps.OpFailed, made)
    assert f"{peer(1)} (UnknownTypeHash: an answer to" in failed.detail
    assert server.counters()["response.late"] == 1


def gossip():
    """Whoever gets a number sends it on to whom it is told to."""
    p = Partition("node", inputs=["start", "to"])
    q = p.recv("number", node=types.TENSOR_INT64, gates=True)
    p.output("got", q)
    p.send("start", "to", p.site("number"))
    return model(p), p


def test_a_node_may_send_to_itself() -> None:
    made, _ = gossip()
    node = bring_up(made, "node")
    execution = node.invoke("node", {"start": np.array(3), "to": PeerIdVec([peer(0)])})
    first = node.poll(0)
    assert of(steps.SendEnvelope, first) == []
    assert of(steps.ExecutionFinished, first)[0].execution == execution
    assert node.next_deadline() == 0
    (event,) = of(steps.AppEvent, node.poll(0))
    assert int(event.value) == 3
    assert event.execution != execution


def test_the_same_weights_sent_twice_are_two_messages() -> None:
    made, _ = gossip()
    a, b = bring_up(made, "node", me=0), bring_up(made, "node", me=1)
    pump = Pump(a, b)
    for _ in range(2):
        a.invoke("node", {"start": np.array(3), "to": peer(1)})
        pump.settle()
    assert len(pump.of(b, steps.AppEvent)) == 2


def test_a_message_may_go_around_a_ring_more_than_once() -> None:
    p = Partition("node", inputs=["start", "to"])
    q = p.recv("number", node=types.TENSOR_INT64, gates=True, sender="from")
    p.output("got", q)
    p.send(q, "from", p.site("number"), called="back")
    p.send("start", "to", p.site("number"), called="first")
    made = model(p)
    a, b = bring_up(made, "node", me=0), bring_up(made, "node", me=1)
    pump = Pump(a, b)
    left = [7]

    def keep(source, step):
        left[0] -= 1
        return 1 if left[0] >= 0 else 0

    pump.keep = keep
    a.invoke("node", {"start": np.array(3), "to": peer(1)})
    pump.settle()
    assert len(pump.of(a, steps.AppEvent)) == 3
    assert len(pump.of(b, steps.AppEvent)) == 4


def test_sends_of_one_execution_to_one_peer_share_an_envelope() -> None:
    p = Partition("node", inputs=["x", "to"])
    for name in ("r1", "r2", "r3"):
        p.recv(name)
        p.output(f"{name}_out", name)
        p.send("x", "to", p.site(name))
    made = model(p)
    node = bring_up(made, "node", limits=Limits(envelope_fills=2))
    other = bring_up(made, "node", me=1)
    node.peer_connected(peer(1), ["node"])
    other.peer_connected(peer(0), ["node"])
    node.invoke("node", {"x": np.array(1), "to": peer(1)})
    sent = of(steps.SendEnvelope, node.poll(0))
    assert [len(decode_envelope(b"".join(s.parts)).fills) for s in sent] == [2, 1]
    assert len({s.tag for s in sent}) == 2
    for step in sent:
        other.deliver_inbound(peer(0), b"".join(step.parts))
    assert sorted(e.topic for e in of(steps.AppEvent, other.poll(0))) == [
        "r1_out", "r2_out", "r3_out",
    ]  # fmt: skip


def test_who_cannot_be_reached_is_left_out_with_a_step() -> None:
    made, _ = gossip()
    node = bring_up(made, "node")
    node.peer_connected(peer(1), ["node"])
    node.peer_connected(peer(2), ["node"], [Multiaddr("/ip4/10.0.0.1/tcp/1")])
    node.poll(0)
    node.peer_disconnected(peer(2), "gone")
    node.block_peer(peer(1))
    execution = node.invoke(
        "node", {"start": np.array(3), "to": PeerIdVec([peer(1), peer(2), peer(3)])}
    )
    made_steps = node.poll(0)
    assert [(s.peer, s.execution) for s in of(steps.PeerResolveFailed, made_steps)] == [
        (peer(1), execution), (peer(3), execution),
    ]  # fmt: skip
    assert of(steps.PeerResolveFailed, made_steps)[0].reason == "blocklisted"
    (send,) = of(steps.SendEnvelope, made_steps)
    assert send.peer == peer(2)
    assert send.addresses == (Multiaddr("/ip4/10.0.0.1/tcp/1"),)
    assert of(steps.OpFailed, made_steps) == []


def test_an_empty_list_of_peers_sends_nothing() -> None:
    made, _ = gossip()
    node = bring_up(made, "node")
    node.invoke("node", {"start": np.array(3), "to": PeerIdVec()})
    result = node.poll(0)
    assert of(steps.SendEnvelope, result) == []
    assert of(steps.ExecutionFinished, result)[0].ok


def test_a_payload_beyond_one_envelope_fails_its_send() -> None:
    made, _ = gossip()
    node = bring_up(made, "node", limits=Limits(envelope_bytes=10_000))
    node.peer_connected(peer(1), ["node"])
    node.invoke("node", {"start": np.zeros(2000, np.int64), "to": peer(1)})
    assert [s.kind for s in of(steps.OpFailed, node.poll(0))] == ["PayloadTooLarge"]


def test_outbound_beyond_the_cap_fails_its_send() -> None:
    made, _ = gossip()
    node = bring_up(made, "node", limits=Limits(outbound=1))
    for i in (1, 2):
        node.peer_connected(peer(i), ["node"])
    node.invoke("node", {"start": np.array(1), "to": PeerIdVec([peer(1), peer(2)])})
    result = node.poll(0)
    assert [s.kind for s in of(steps.OpFailed, result)] == ["OutboundFull"]
    assert of(steps.SendEnvelope, result) == []


def test_peers_come_and_go() -> None:
    made, _ = gossip()
    node = bring_up(made, "node")
    node.peer_connected(peer(1), ["node", "a"])
    node.peer_connected(peer(1), ["node", "a"])
    node.peer_connected(peer(2), ["node"])
    assert of(steps.PeerUp, node.poll(0)) == [
        steps.PeerUp(peer=peer(1), classes=("node", "a")),
        steps.PeerUp(peer=peer(2), classes=("node",)),
    ]
    assert list(node.connected_peers()) == sorted([peer(1), peer(2)])
    assert list(node.connected_peers("a")) == [peer(1)]
    for _ in range(5):
        node.send_failed(peer(1), "queue full")
    assert of(steps.PeerDown, node.poll(0)) == [steps.PeerDown(peer=peer(1), reason="queue full")]
    assert list(node.connected_peers()) == [peer(2)]
    node.poll(1 * S)  # its cooldown is over: it may be tried again
    assert len(node.connected_peers()) == 2
    node.peer_disconnected(peer(2), "bye")
    node.peer_disconnected(peer(2), "bye")
    assert of(steps.PeerDown, node.poll(2 * S)) == [steps.PeerDown(peer=peer(2), reason="bye")]


def test_an_answer_makes_a_failing_peer_healthy() -> None:
    pump, server, _ = network(clients=1)
    for _ in range(5):
        server.send_failed(peer(1), "queue full")
    pump.advance(2 * S)
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    assert pump.of(server, steps.ExecutionFinished)[0].ok
    assert [s.peer for s in pump.of(server, steps.PeerUp)] == [peer(1), peer(1)]


def test_an_execution_that_ends_abandons_its_request() -> None:
    """The client's gate denies after it asked: its request closes with its execution."""
    p = Partition("server")
    head = p.recv("x", gates=False, sender="from")
    p.request("x", "from", p.site("x"), "answers")
    p.sys("Sleep", [head], "t", duration_ns=S)
    p.sys(keys.OP_BACKOFF_GATE_RX, ["t"], "gated")
    p.output("a", "answers")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("x"), TRIGGER))
    node.poll(0)
    node.send_failed(peer(3), "gone")
    for _ in range(8):
        node.send_failed(peer(3), "gone")
    node.poll(1)
    made = node.poll(S)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["GateDenied"]
    (closed,) = [s for s in of(steps.Telemetry, made) if s.name == "request.closed"]
    assert closed.attributes["reason"] == "abandoned"
    assert node.next_deadline() is None
    assert node.counters()["requests.open"] == 0


@given(st.permutations(range(4)), st.integers(0, 4))
def test_the_order_of_answers_does_not_matter(order, lost) -> None:
    pump, server, clients = network(quorum=1, clients=4)
    held: dict[int, list] = {}

    def keep(source, step):
        for index, client in enumerate(clients):
            if client.peer_id == source:
                held.setdefault(index, []).append(step)
                return 0
        return 1

    pump.keep = keep
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    kept = [index for index in order if index >= lost]
    for index in kept:
        for step in held[index]:
            server.deliver_inbound(clients[index].peer_id, b"".join(step.parts))
        pump.settle()
    pump.advance(20 * S)
    got = component(server, "sum").got
    assert [who for who, _ in got] == sorted(clients[i].peer_id for i in kept)
    assert pump.of(server, steps.ExecutionFinished)[0].ok is bool(kept)
    assert server.counters()["ingress.bytes"] == 0


def test_the_same_ingress_gives_the_same_steps() -> None:
    def run():
        pump, server, clients = network()
        pump.keep = lambda source, step: 2
        for _ in range(3):
            server.invoke("server", {"tick": TRIGGER})
            pump.advance(pump.now_ns + 7 * MS)
        return [[plain(step) for step in pump.steps[node.peer_id]] for node in (server, *clients)]

    assert run() == run()


def plain(step):
    """A step as something that compares."""
    if isinstance(step, steps.SendEnvelope):
        return ("send", step.peer, step.tag, b"".join(step.parts))
    if isinstance(step, steps.AppEvent):
        return ("event", step.topic, step.execution, codec.encode_value(step.value))
    if isinstance(step, steps.RunTask):
        return ("task", step.token, step.op)
    return repr(step)


def test_a_send_that_failed_without_the_peers_fault_costs_it_nothing():
    p = Partition("server")
    p.output("a", p.recv("x", gates=False))
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    for _ in range(20):
        node.send_failed(peer(3), "the peer has restarted", blames_peer=False)
    node.poll(1)
    standing = node.peer_standing(peer(3))
    assert (standing.usable, standing.failures) == (True, 0)
    assert node.counters()["send.failed"] == 20
