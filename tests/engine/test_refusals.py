"""Requests that are not answered: who says no, to whom, and what it brings about there."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.components.contracts import ComponentError
from bbnode.engine import Limits, steps
from bbnode.engine.messaging.actions import suffix_of
from bbnode.ir import keys, types
from bbnode.ir.address import REFUSED_SUFFIX
from bbnode.ir.caps import MAX_REFUSALS_PER_S
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    decode_envelope,
    encode_envelope,
)
from bbnode.ir.refusal import WireRefusal, decode_refusal, encode_refusal
from bbnode.ir.values import TRIGGER, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.protocols import chatting
from tests.engine.support import Boom, Pump, S, bring_up, component, of, peer
from tests.engine.test_failed_sends import Asker, batch, calling, closed, echo, in_order
from tests.engine.test_network import federated, network, telemetry

NONE, REQUEST, RESPONSE = CorrelationKind
VALUE = np.ones(1, np.float32)


def refusal(source, wire_req_id, why=None, kind=RESPONSE, **fill) -> bytes:
    """What a peer says that it refuses."""
    payload = encode_refusal(why or WireRefusal("OpError", "no data", "train"))
    made = SlotFill(**{"dest_suffix": REFUSED_SUFFIX, "payload": payload, **fill})
    return b"".join(
        encode_envelope(
            WireEnvelope(
                fills=(made,),
                correlation=WireCorrelation(kind=kind, wire_req_id=wire_req_id),
                src_peer_bytes=source.to_bytes(),
            )
        )
    )


def told(made) -> list[tuple]:
    """The refusals among what a node sends: (peer, correlation, id, refusal)."""
    found = []
    for step in of(steps.SendEnvelope, made):
        sent = decode_envelope(b"".join(step.parts))
        said = sent.correlation
        found += [
            (step.peer, said.kind, said.wire_req_id, decode_refusal(fill.payload))
            for fill in sent.fills
            if fill.dest_suffix == REFUSED_SUFFIX
        ]
    return found


def answers(made) -> list[tuple]:
    """All answers that a node sends, yes or no."""
    sent = [decode_envelope(b"".join(step.parts)) for step in of(steps.SendEnvelope, made)]
    return [each.correlation.wire_req_id for each in sent if each.correlation.kind is RESPONSE]


def client(**more):
    node = bring_up(federated(), "client", me=1, **more)
    node.peer_connected(peer(0), ["server"])
    node.peer_connected(peer(9), ["spectator"])
    node.poll(0)
    return node


def asked(source=0, wire_req_id=7, value=VALUE, site=None, **more) -> bytes:
    where = Partition("client").site("weights") if site is None else site
    return envelope(peer(source), where, value, REQUEST, wire_req_id, **more)


# -- a whole round ---------------------------------------------------------------------------


def test_an_op_that_fails_ends_the_round_at_once_with_its_reason() -> None:
    pump, server, clients = network()
    component(clients[0], "local").raises = Boom("no /home/me/data.npz here\nTraceback: …")
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    assert pump.now_ns == 1 * S
    (failed,) = pump.of(server, steps.OpFailed)
    assert failed.kind == "QuorumNotReached"
    why = "UnexpectedException: Boom: no …/data.npz here [load]"
    assert f"{clients[0].peer_id} ({why})" in failed.detail
    (seen,) = telemetry(pump, server, "request.failed")
    assert (seen["peer"], seen["kind"]) == (clients[0].peer_id, "UnexpectedException")
    assert seen["where"] == "load"
    (end,) = telemetry(pump, server, "request.closed")
    assert end["reasons"] == {str(clients[0].peer_id): why}
    assert server.counters()["refusals.accepted"] == 1
    assert clients[0].counters()["refusals.sent"] == 1


def test_a_quorum_goes_on_without_whom_failed_and_says_why() -> None:
    p = Partition("client")
    p.bind("local", "Model", "test.ScriptModel")
    p.recv("weights", request="req", node=types.TENSOR_FLOAT, gates=True, sender="from")
    p.op(keys.role_domain("Model"), "Params", (), ["w"], slot="local", after=["weights"])
    q = Partition("server", inputs=["x", "to"])
    p.respond("w", "from", "req", q.site("answers"))
    q.request("x", "to", p.site("weights"), "answers", quorum=1)
    q.output("out", "answers")
    made = model(q, p)
    server = bring_up(made, "server")
    clients = [bring_up(made, "client", me=i) for i in (1, 2)]
    pump = Pump(server, *clients)
    component(clients[1], "local").raises = ComponentError("no data here")
    to = PeerIdVec([peer(1), peer(2)])
    server.invoke("server", {"x": VALUE, "to": to})
    pump.settle()
    assert pump.now_ns == 1 * S
    (event,) = pump.of(server, steps.AppEvent)
    assert list(event.value.peers) == [peer(1)]
    ((who, why),) = event.value.reasons
    assert (who, why.kind) == (peer(2), "ComponentError")
    assert why.detail.startswith("no data here (raised at support.py:")


def test_a_worker_thread_that_fails_is_told_when_it_does_not_before() -> None:
    pump, server, clients = network(clients=1)
    pump.hold_tasks = True
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    assert not pump.of(server, steps.OpFailed)
    # Over a restart of the responder as well: what is owed is in its snapshot.
    again = bring_up(federated(), "client", me=1)
    again.restore(clients[0].snapshot(), pump.now_ns)
    (task,) = of(steps.RunTask, again.poll(pump.now_ns))
    again.fail(task.token, Boom("full"))
    again.peer_connected(peer(0), ["server"])
    ((who, kind, _, why),) = told(again.poll(pump.now_ns))
    assert (who, kind, why.kind) == (peer(0), RESPONSE, "UnexpectedException")


# -- what is refused on arrival --------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (asked(site=5), "UnknownSite"),
        (asked(value=np.ones(1, np.int64)), "TypeMismatch"),
        (asked(payload=b"\0"), "DecodeFailed"),
        (asked(trigger_only=True), "TypeMismatch"),
        (asked(9), "SenderNotOfClass"),
        (envelope(peer(0), Partition("client").site("weights"), VALUE, NONE, 7), "Correlation"),
    ],
)
def test_what_is_refused_on_arrival_is_told_at_once(data: bytes, kind: str) -> None:
    node = bring_up(restrictive(), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    node.peer_connected(peer(9), ["spectator"])
    source = 9 if kind == "SenderNotOfClass" else 0
    node.deliver_inbound(peer(source), data)
    ((who, said, number, why),) = told(node.poll(0))
    assert (who, number) == (peer(source), 7)
    assert said is (NONE if kind == "Correlation" else RESPONSE)
    assert why.kind.startswith(kind)
    # A stranger does not learn which class may send.
    assert source == 0 or "server" not in why.detail


def restrictive():
    p = Partition("client")
    p.recv("weights", request="req", node=types.TENSOR_FLOAT, sender="from", senders=["server"])
    p.output("got", "weights")
    return model(p)


def test_an_execution_that_ends_without_an_answer_says_so() -> None:
    node = bring_up(restrictive(), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    node.deliver_inbound(peer(0), asked())
    ((_, _, number, why),) = told(node.poll(0))
    assert (number, why.kind) == (7, "NotAnswered")


def test_an_answer_that_is_skipped_says_so() -> None:
    p = Partition("client")
    head = p.recv("w", request="req", node=types.TENSOR_FLOAT, sender="from")
    p.constant("no", np.asarray(False))
    p.sys("When", ["no"], "go")
    p.respond(head, "from", "req", 99, after=["go"])
    node = bring_up(model(p), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    node.deliver_inbound(peer(0), asked(site=p.site("w")))
    made = node.poll(0)
    assert of(steps.OpFailed, made) == []
    ((_, _, number, why),) = told(made)
    assert (number, why.kind) == (7, "Skipped")


def test_no_room_is_told_too() -> None:
    node = client(limits=Limits(envelope_bytes=60))
    node.deliver_inbound(peer(0), asked(value=np.ones(100, np.float32)))
    ((_, _, number, why),) = told(node.poll(1))
    assert (number, why.kind) == (7, "EnvelopeTooLarge")
    node = client(limits=Limits(ingress_bytes=60))
    node.deliver_inbound(peer(0), asked(value=np.ones(100, np.float32)))
    assert [why.kind for *_, why in told(node.poll(1))] == ["BudgetExceeded"]
    node = client(limits=Limits(frames=1, frames_per_peer=1))
    for number in (7, 8):
        node.deliver_inbound(peer(0), asked(wire_req_id=number))
    made = node.poll(1)
    assert [(number, why.kind) for _, _, number, why in told(made)] == [(8, "TooManyExecutions")]
    node = client(limits=Limits(frames=1))
    for number in (7, 8):
        node.deliver_inbound(peer(0), asked(wire_req_id=number))
    assert [why.kind for *_, why in told(node.poll(1))] == ["FramesExceeded"]


def test_a_payload_that_a_thread_finds_broken_is_told() -> None:
    p = Partition("client")
    p.recv("rows", request="req", node=types.METADATA, sender="from")
    p.output("got", "rows")
    node = bring_up(model(p), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    broken = b"\x81" + b"\xa1x" * 200_000
    data = asked(site=p.site("rows"), payload=broken, type_hash=types.METADATA.wire_hash)
    node.deliver_inbound(peer(0), data)
    made = node.poll(0)
    for task in of(steps.RunTask, made):
        node.complete(task.token, task.fn())
    made += node.poll(1)
    assert [why.kind for *_, why in told(made)] == ["DecodeFailed"]
    assert node.executions() == []


def test_each_request_gets_one_answer_whatever_comes_twice() -> None:
    node = client(limits=Limits(frames_per_peer=1))
    for _ in range(3):
        node.deliver_inbound(peer(0), asked())  # two of them are over the limit, and known
    made = node.poll(1)
    (task,) = of(steps.RunTask, made)
    node.deliver_inbound(peer(0), asked())
    made += node.poll(2)
    node.complete(task.token, task.fn())
    made += node.poll(3)
    node.deliver_inbound(peer(0), asked())  # a duplicate of what was answered
    made += node.poll(4)
    assert answers(made) == [7]
    assert told(made) == []
    assert node.counters()["gate.denied.duplicate"] == 1


def test_who_is_denied_hears_nothing() -> None:
    node = client()
    node.block_peer(peer(0))
    node.deliver_inbound(peer(0), asked())
    node.deliver_inbound(peer(0), asked(site=5))
    assert told(node.poll(1)) == []
    assert node.counters()["refusals.withheld"] == 2


def test_a_flood_of_bad_requests_is_not_echoed() -> None:
    node = client()
    data = asked(site=5)
    sent = []
    for number in range(MAX_REFUSALS_PER_S + 100):
        node.deliver_inbound(peer(0), asked(site=5, wire_req_id=number + 1))
        sent += of(steps.SendEnvelope, node.poll(number))
    assert len(sent) == MAX_REFUSALS_PER_S
    assert node.counters()["refusals.withheld"] == 100
    assert all(step.size < 4 * len(data) for step in sent)
    # Others are not affected, nor is the next second.
    node.deliver_inbound(peer(9), asked(9, site=5))
    assert len(told(node.poll(1000))) == 1
    node.deliver_inbound(peer(0), data)
    assert len(told(node.poll(2 * S))) == 1


def test_one_envelope_of_many_bad_fills_is_told_once() -> None:
    node = client()
    fills = tuple(SlotFill(dest_suffix=suffix_of(f"slot{i}", "Op")) for i in range(60))
    data = encode_envelope(
        WireEnvelope(
            fills=fills,
            correlation=WireCorrelation(kind=REQUEST, wire_req_id=7),
            src_peer_bytes=peer(0).to_bytes(),
        )
    )
    node.deliver_inbound(peer(0), b"".join(data))
    assert len(told(node.poll(1))) == 1


@pytest.mark.parametrize(
    "data",
    [
        envelope(peer(0), 5, VALUE, RESPONSE, 7),  # an answer to nobody's request
        refusal(peer(0), 7),
        refusal(peer(0), 7, kind=NONE),
        refusal(peer(0), 7, kind=REQUEST),
        refusal(peer(0), 7, payload=b"rubbish"),
        refusal(peer(0), 7, kind=REQUEST, payload=b""),
        refusal(peer(0), 7, type_hash=1),
        asked(wire_req_id=0, site=5),  # names nothing that could be answered
    ],
)
def test_nothing_is_said_to_answers_and_refusals(data: bytes) -> None:
    node = client()
    node.deliver_inbound(peer(0), data)
    assert of(steps.SendEnvelope, node.poll(1)) == []


def test_malformed_refusals_are_counted() -> None:
    node = client()
    for data in (
        refusal(peer(0), 7, kind=REQUEST),
        refusal(peer(0), 7, payload=b"rubbish"),
        refusal(peer(0), 7, type_hash=1),
    ):
        node.deliver_inbound(peer(0), data)
    node.deliver_inbound(peer(0), refusal(peer(0), 7))
    assert of(steps.WireReceiveFailed, node.poll(1)) == []
    assert node.counters()["refusals.malformed"] == 3
    assert node.counters()["refusals.unknown"] == 1


# -- a plan whose answer does not need what failed ---------------------------------------------


def either(threshold: bool = False):
    """A client that answers with the first of two models, of which either may fail."""
    p = Partition("client")
    for slot in ("a", "b"):
        p.bind(slot, "Model", "test.ScriptModel")
    head = p.recv("weights", request="req", node=types.TENSOR_FLOAT, gates=True, sender="from")
    for slot in ("a", "b"):
        p.op(keys.role_domain("Model"), "Params", (), [slot], slot=slot, after=[head])
    p.sys("Any", ["a", "b"], "w")
    p.respond("w", "from", "req", 99)
    return bring_up(model(p), "client", me=1)


def test_a_failure_that_the_answer_does_not_need_is_no_refusal() -> None:
    node = either()
    node.peer_connected(peer(0), ["server"])
    component(node, "a").raises = Boom("x")
    node.deliver_inbound(peer(0), asked())
    made = node.poll(0)
    assert len(of(steps.OpFailed, made)) == 1
    assert (answers(made), told(made)) == ([7], [])


def test_the_first_failure_is_told_when_nothing_is_left() -> None:
    node = either()
    node.peer_connected(peer(0), ["server"])
    for slot in ("a", "b"):
        component(node, slot).raises = Boom(slot)
    node.deliver_inbound(peer(0), asked())
    ((*_, why),) = told(node.poll(0))
    assert why.detail.startswith("Boom: a (raised at support.py:")


# -- what the requester makes of it --------------------------------------------------------------


def no(a: Asker, number: int, why=None, request: int = 0) -> None:
    who, _, wire = a._sent(number, request)
    a.node.deliver_inbound(who, refusal(who, wire, why))


def test_refusals_end_a_request_as_sends_that_failed_do() -> None:
    a = Asker(quorum=2)
    no(a, 1)
    a.answer(2)
    assert closed(a.poll()) == []
    (waiting,) = a.node.waiting()
    assert f"{peer(1)} (OpError: no data [train])" in waiting.whom
    a.answer(3)
    made = a.poll()
    assert closed(made) == [("quorum", (peer(1),))]
    assert batch(made) == (in_order(2, 3), [peer(1)])
    assert a.node.counters()["ingress.bytes"] == 0
    assert a.node.next_deadline() is None


def test_a_request_for_all_ends_with_the_first_no() -> None:
    a = Asker(quorum=0)
    no(a, 3, WireRefusal("GateDenied", "reason=cooldown"))
    (failed,) = of(steps.OpFailed, a.poll())
    assert "(GateDenied: reason=cooldown)" in failed.detail
    no(a, 1)
    a.poll()
    assert a.node.counters()["refusals.late"] == 1


def test_a_peer_that_says_no_and_then_yes_counts_once_while_it_is_open() -> None:
    a = Asker(quorum=2)
    no(a, 1)
    no(a, 1, WireRefusal("Other"))
    a.answer(1)
    no(a, 1)
    a.answer(1, value=9)
    made = a.poll()
    assert closed(made) == []
    counters = a.node.counters()
    assert (counters["refusals.accepted"], counters["refusals.duplicate"]) == (1, 2)
    assert counters["response.duplicate"] == 1
    a.answer(2)
    a.answer(3)
    made = a.poll()
    assert batch(made) == (in_order(1, 2, 3), [])
    assert of(steps.AppEvent, made)[0].value.reasons == ()


def test_refusals_of_strangers_and_of_the_denied_change_nothing() -> None:
    a = Asker(quorum=0)
    wire = a.sent[0][2]
    a.node.deliver_inbound(peer(8), refusal(peer(8), wire))
    a.node.block_peer(peer(1))
    no(a, 1)
    assert of(steps.OpFailed, a.poll()) == []
    assert a.node.counters()["refusals.stranger"] == 2


def test_an_answer_that_is_refused_here_is_none() -> None:
    a = Asker(quorum=0)
    who, _, wire = a._sent(1, 0)
    data = envelope(who, Partition("server").site("answers"), VALUE, RESPONSE, wire, payload=b"\0")
    a.node.deliver_inbound(who, data)
    (failed,) = of(steps.OpFailed, a.poll())
    assert f"{who} (DecodeFailed" in failed.detail


def test_why_a_peer_failed_is_in_a_snapshot() -> None:
    a = Asker(quorum=2)
    no(a, 1)
    a.poll()
    again = a.install()
    again.restore(a.node.snapshot(), 2)
    who, _, wire = a._sent(2, 0)
    again.deliver_inbound(who, refusal(who, wire, WireRefusal("Late")))
    (failed,) = of(steps.OpFailed, again.poll(3))
    assert f"{peer(1)} (OpError: no data [train])" in failed.detail
    assert f"{peer(2)} (Late)" in failed.detail


@pytest.mark.parametrize("over_a_restart", [False, True])
def test_an_answer_that_can_not_be_sent_is_told_once(over_a_restart: bool) -> None:
    node = client()
    node.deliver_inbound(peer(0), asked())
    (task,) = of(steps.RunTask, node.poll(1))
    node.complete(task.token, task.fn())
    (answer,) = of(steps.SendEnvelope, node.poll(2))
    if over_a_restart:
        saved, node = node.snapshot(), bring_up(federated(), "client", me=1)
        node.restore(saved, 2, same_life=True)
    for _ in range(2):
        node.send_failed(peer(0), "the queue is full", tag=answer.tag, blames_peer=False)
    made = node.poll(3)
    ((who, said, number, why),) = told(made)
    assert (who, said, number, why.kind) == (peer(0), RESPONSE, 7, "AnswerNotSent")
    # Nor is anything said about a refusal that can't be sent.
    (no,) = of(steps.SendEnvelope, made)
    node.send_failed(peer(0), "the queue is full", tag=no.tag, blames_peer=False)
    assert told(node.poll(4)) == []


def test_who_leaves_refuses_what_is_under_way_and_what_comes() -> None:
    node = client()
    node.deliver_inbound(peer(0), asked())
    assert len(of(steps.RunTask, node.poll(1))) == 1
    node.leave()
    node.deliver_inbound(peer(0), asked(wire_req_id=8))
    made = node.poll(2)
    assert [(n, why.kind) for _, _, n, why in told(made)] == [
        (7, "ShuttingDown"),
        (8, "ShuttingDown"),
    ]
    assert node.executions() == []
    assert node.counters()["ingress.bytes"] == 0
    node = chatting(0)
    node.peer_connected(peer(1))
    node.leave()
    data = SlotFill(dest_suffix=suffix_of("chat", "Echo"), payload=b"x")
    node.deliver_inbound(peer(1), refusal(peer(1), 5, kind=REQUEST, **vars_of(data)))
    assert [why.kind for *_, why in told(node.poll(1))] == ["ShuttingDown"]


def vars_of(fill: SlotFill) -> dict:
    return {"dest_suffix": fill.dest_suffix, "payload": fill.payload}


# -- connections -----------------------------------------------------------------------------


def test_a_peer_that_stays_away_is_given_up_after_the_grace() -> None:
    a = Asker(quorum=2, limits=Limits(lost_peer_grace_ms=3000))
    a.node.peer_disconnected(peer(1), "closed by the peer")
    a.node.peer_disconnected(peer(2), "closed by the peer")
    a.poll()
    assert of(steps.OpFailed, a.poll(2 * S)) == []
    a.node.peer_connected(peer(2), ["client"])  # it was only away
    a.poll(2 * S)
    a.answer(3)
    made = a.poll(3 * S + 2)
    assert closed(made) == []
    (failed,) = [s.attributes for s in of(steps.Telemetry, made) if s.name == "request.failed"]
    assert (failed["peer"], failed["kind"]) == (peer(1), "ConnectionLost")
    assert failed["detail"] == "closed by the peer; not back within 3000 ms"
    a.answer(2)
    made = a.poll(4 * S)
    assert closed(made) == [("quorum", (peer(1),))]
    assert a.node.next_deadline() is None


def test_a_grace_ends_with_the_requests_that_it_is_for() -> None:
    a = Asker(quorum=0)
    a.node.peer_disconnected(peer(1), "x")
    for number in (1, 2, 3):
        a.answer(number)  # they were on the way
    a.poll()
    assert a.node.next_deadline() is None


def test_who_comes_back_late_still_counts_while_the_request_is_open() -> None:
    a = Asker(quorum=1, limits=Limits(lost_peer_grace_ms=1000))
    a.node.peer_disconnected(peer(1), "x")
    a.poll(1)
    a.poll(2 * S)
    a.node.peer_connected(peer(1), ["client"])
    for number in (1, 2, 3):
        a.answer(number)
    assert batch(a.poll(3 * S)) == (in_order(1, 2, 3), [])


def test_what_was_asked_after_the_loss_is_not_given_up_with_it() -> None:
    """A transport dials to send it, and says itself when it can't."""
    a = Asker(quorum=0, limits=Limits(lost_peer_grace_ms=1000))
    for number in (1, 2, 3):
        a.node.peer_disconnected(peer(number), "x")
    a.poll(1)
    for number in (2, 3):
        a.node.peer_connected(peer(number), ["client"])
    made = a.poll(2 * S)
    assert len(of(steps.OpFailed, made)) == 1
    assert len(a.node.waiting()) == 0


def test_without_a_grace_nobody_is_given_up_and_who_is_not_awaited_has_no_timer() -> None:
    a = Asker(quorum=1, limits=Limits(lost_peer_grace_ms=None))
    a.node.peer_disconnected(peer(1), "x")
    a.poll(1)
    assert a.node.next_deadline() == 1 + 10 * S
    a = Asker(quorum=1)
    a.answer(1)
    a.poll(1)
    a.node.peer_disconnected(peer(1), "x")
    a.poll(2)
    assert a.node.next_deadline() == 1 + 10 * S


@pytest.mark.parametrize("same_life", [True, False])
def test_a_lost_peer_is_in_a_snapshot(same_life: bool) -> None:
    a = Asker(quorum=0, limits=Limits(lost_peer_grace_ms=1000))
    a.node.peer_disconnected(peer(1), "x")
    a.poll(1)
    again = a.install()
    again.restore(a.node.snapshot(), 2, same_life=same_life)
    assert of(steps.OpFailed, again.poll(3)) == []
    (failed,) = of(steps.OpFailed, again.poll(2 * S))
    assert f"{peer(1)} (ConnectionLost" in failed.detail
    # Of the others nobody is given up because this node was restarted.
    assert failed.detail.count("ConnectionLost") == 1


# -- components ------------------------------------------------------------------------------


def reasons(node) -> list[str]:
    """What `ctx.reason` said, when there was no answer."""
    return component(node, "chat").reasons


def test_a_component_that_asks_hears_why_it_was_refused() -> None:
    asker, other = chatting(0), chatting(1)
    pump = Pump(asker, other)
    component(other, "chat").raises = Boom("no")
    asker.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    assert pump.now_ns == 1 * S
    assert component(asker, "chat").heard == [("no answer", "hello", peer(1))]
    (why,) = reasons(asker)
    assert why.startswith("UnexpectedException: Boom: no (raised at protocols.py:")
    assert why.endswith("[chat.op Echo (request)]")
    assert asker.counters()["calls.open"] == 0
    # An op that returns nothing answers nothing.
    component(other, "chat").raises, component(other, "chat").silent = None, True
    asker.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    assert reasons(asker)[-1].startswith("NotAnswered: ")


def test_a_component_that_is_not_there_says_so() -> None:
    asker, other = chatting(0), bring_up(restrictive(), "client", me=1)
    pump = Pump(asker, other)
    asker.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    (why,) = reasons(asker)
    assert why.startswith("UnknownComponent: no component here has the ref ")
    asker.invoke("talker", {"peers": PeerIdVec([peer(5)])})
    pump.settle()
    assert reasons(asker)[-1] == "NotSent: no address is known and it is not connected"


def test_a_call_ends_by_a_refusal_once_and_only_by_its_peers() -> None:
    node, _, wire = calling()
    node.deliver_inbound(peer(2), refusal(peer(2), wire))
    node.poll(1)
    assert node.counters()["calls.open"] == 1
    node.deliver_inbound(peer(1), refusal(peer(1), wire))
    node.deliver_inbound(peer(1), refusal(peer(1), wire))
    node.deliver_inbound(peer(1), echo(wire))
    node.poll(2)
    assert reasons(node) == ["OpError: no data [train]"]
    counters = node.counters()
    assert (counters["refusals.stranger"], counters["refusals.late"]) == (1, 1)
    assert counters["response.late"] == 1


def test_a_call_ends_with_its_peers_connection_or_deadline_and_says_which() -> None:
    node, _, _ = calling()
    node.peer_disconnected(peer(1), "gone")
    node.poll(1)
    node.poll(5 * S)
    assert reasons(node) == ["DeadlineExceeded: no answer within 5000 ms"]
    node, _, _ = calling(limits=Limits(lost_peer_grace_ms=1000))
    node.peer_disconnected(peer(1), "gone")
    node.poll(1)
    node.poll(2 * S)
    assert reasons(node) == ["ConnectionLost: gone; not back within 1999 ms"]


# -- one-way ---------------------------------------------------------------------------------


def test_the_sender_of_a_message_is_told_that_it_was_refused() -> None:
    node, other = chatting(0), bring_up(restrictive(), "client", me=1)
    pump = Pump(node, other)
    node.invoke("teller", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    (seen,) = telemetry(pump, node, "send.refused")
    assert (seen["peer"], seen["kind"]) == (peer(1), "UnknownComponent")
    assert seen["where"].startswith("/component/")
    assert node.counters()["send.refused"] == 1


def test_a_peer_that_makes_refusals_up_is_reported_so_often() -> None:
    node = client()
    seen = []
    for number in range(MAX_REFUSALS_PER_S + 50):
        node.deliver_inbound(peer(0), refusal(peer(0), number, kind=NONE))
        seen += of(steps.Telemetry, node.poll(number))
    assert len(seen) == MAX_REFUSALS_PER_S
    assert node.counters()["send.refused"] == MAX_REFUSALS_PER_S + 50
