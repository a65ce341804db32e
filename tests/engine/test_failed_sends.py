"""What a send that failed for good means for the request that waits for its answer."""

from __future__ import annotations

import pytest

from bbnode.engine import Limits, steps
from bbnode.engine.messaging import messenger
from bbnode.engine.messaging.actions import suffix_of
from bbnode.ir import keys
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    decode_envelope,
    encode_envelope,
)
from bbnode.ir.values import PeerIdVec
from tests.engine.builder import WIRE, Partition, model
from tests.engine.envelopes import envelope
from tests.engine.protocols import chatting
from tests.engine.support import S, bring_up, component, of, peer
from tests.engine.test_snapshot_everywhere import vector

ANSWERS = ("answers", "others")
SITE = 77


class Asker:
    """A node that asks `peers` others (peer 1, 2, …), `requests` times in one execution."""

    def __init__(self, quorum: int = 2, *, peers: int = 3, requests: int = 1, limits=None) -> None:
        p = Partition("server", inputs=["ask"])
        p.constant("peers", PeerIdVec([peer(i) for i in range(1, peers + 1)]))
        for name in ANSWERS[:requests]:
            p.request("ask", "peers", SITE, name, quorum=quorum)
            p.output(f"{name}_out", name)
        self.made = model(p)
        self.limits = limits
        self.node = self.install()
        for i in range(1, peers + 1):
            self.node.peer_connected(peer(i), ["client"])
        self.node.invoke("server", {"ask": vector(1)})
        self.seen = self.node.poll(1)
        # (peer, tag, wire_req_id), in the order of the requests
        self.sent = [
            (step.peer, step.tag, decode_envelope(b"".join(step.parts)).correlation.wire_req_id)
            for step in of(steps.SendEnvelope, self.seen)
        ]

    def install(self):
        return bring_up(self.made, "server", limits=self.limits)

    def tag(self, number: int, request: int = 0) -> int:
        return self._sent(number, request)[1]

    def fail(self, number: int, why: str = "no route", *, request: int = 0, **more) -> None:
        who, tag, _ = self._sent(number, request)
        self.node.send_failed(who, why, tag=tag, **more)

    def answer(self, number: int, request: int = 0, value: int = 0) -> None:
        who, _, wire = self._sent(number, request)
        site = Partition("server").site(ANSWERS[request])
        data = envelope(who, site, vector(value or number), CorrelationKind.RESPONSE, wire)
        self.node.deliver_inbound(who, data)

    def poll(self, now_ns: int = 2) -> list[steps.Step]:
        self.seen = self.node.poll(now_ns)
        return self.seen

    def _sent(self, number: int, request: int):
        return [row for row in self.sent if row[0] == peer(number)][request]


def closed(made) -> list[tuple[str, tuple]]:
    return [
        (s.attributes["reason"], s.attributes["missing"])
        for s in of(steps.Telemetry, made)
        if s.name == "request.closed"
    ]


def batch(made):
    (event,) = of(steps.AppEvent, made)
    return [who for who, _ in event.value.responses], list(event.value.missing)


def in_order(*numbers: int) -> list:
    return sorted(peer(number) for number in numbers)


# -- requests of executions --------------------------------------------------------------------


def test_a_round_ends_when_all_that_can_answer_have() -> None:
    a = Asker(quorum=2)
    a.fail(1, "nobody at that address")
    a.answer(2)
    made = a.poll()
    # The quorum is not there, and one is still out.
    assert of(steps.ExecutionFinished, made) == []
    (unsent,) = [s.attributes for s in of(steps.Telemetry, made) if s.name == "request.failed"]
    assert (unsent["peer"], unsent["kind"]) == (peer(1), "NotSent")
    assert unsent["detail"] == "nobody at that address"
    (waiting,) = a.node.waiting()
    rows = {peer(1): f"{peer(1)} (NotSent: nobody at that address)", peer(3): f"{peer(3)}"}
    assert waiting.whom == ", ".join(rows[who] for who in in_order(1, 3))
    a.answer(3)
    made = a.poll()
    assert of(steps.ExecutionFinished, made)[0].ok
    assert closed(made) == [("quorum", (peer(1),))]
    assert batch(made) == (in_order(2, 3), [peer(1)])
    assert a.node.next_deadline() is None
    assert a.node.counters()["requests.open"] == 0


def test_a_failure_after_all_other_answers_ends_the_round() -> None:
    a = Asker(quorum=1)
    a.answer(2)
    a.answer(3)
    # A quorum alone ends nothing before the deadline.
    assert of(steps.ExecutionFinished, a.poll()) == []
    a.fail(1, blames_peer=False)
    made = a.poll()
    assert of(steps.ExecutionFinished, made)[0].ok
    assert closed(made) == [("quorum", (peer(1),))]


def test_a_quorum_out_of_reach_fails_at_once_and_says_why() -> None:
    a = Asker(quorum=2)
    a.answer(3)
    a.fail(1, "the queue is full")
    assert of(steps.OpFailed, a.poll()) == []
    a.fail(2, "no route")
    made = a.poll()
    (failed,) = of(steps.OpFailed, made)
    assert failed.kind == "QuorumNotReached"
    reasons = {peer(1): "the queue is full", peer(2): "no route"}
    told = ", ".join(f"{who} (NotSent: {reasons[who]})" for who in in_order(1, 2))
    assert failed.detail == f"round: 1 of 3 peers answered and 2 had to; missing: {told}"
    assert closed(made) == [("below_quorum", tuple(in_order(1, 2)))]
    assert not of(steps.ExecutionFinished, made)[0].ok
    # What comes after the end is late, whatever became of its question.
    a.answer(1)
    assert closed(a.poll()) == []
    assert a.node.counters()["response.late"] == 1
    assert a.node.counters()["ingress.bytes"] == 0


def test_a_request_for_all_fails_with_the_first_that_is_not_reached() -> None:
    a = Asker(quorum=0)
    a.fail(2)
    made = a.poll()
    assert [f.kind for f in of(steps.OpFailed, made)] == ["QuorumNotReached"]
    assert a.node.executions() == []


def test_at_the_deadline_it_is_told_as_well_who_could_not_be_sent_to() -> None:
    a = Asker(quorum=2, peers=3)
    a.fail(1)
    a.answer(2)
    a.poll()
    (failed,) = of(steps.OpFailed, a.poll(1 + 10 * S))
    assert (
        "1 of 3 peers answered in 10 s (the request's deadline, g.request(deadline=…)) and 2 had to"
        in failed.detail
    )
    rows = {peer(1): f"{peer(1)} (NotSent: no route)", peer(3): f"{peer(3)}"}
    assert failed.detail.endswith("; missing: " + ", ".join(rows[who] for who in in_order(1, 3)))


def test_an_answer_of_whom_it_was_given_up_for_counts_once_while_the_request_is_open() -> None:
    """A peer that was restarted: "it may have come or not"."""
    a = Asker(quorum=2)
    a.fail(1, "the peer has restarted", blames_peer=False)
    a.poll()
    a.answer(1)
    a.answer(1, value=9)
    a.fail(1)
    made = a.poll()
    assert closed(made) == []
    assert a.node.counters()["response.duplicate"] == 1
    assert "NotSent" not in a.node.waiting()[0].whom
    a.answer(2)
    assert closed(a.poll()) == []  # with it, the third is waited for
    a.answer(3)
    made = a.poll()
    assert closed(made) == [("all_answered", ())]
    assert batch(made) == (in_order(1, 2, 3), [])


def test_a_failure_after_the_answer_changes_nothing() -> None:
    a = Asker(quorum=3)
    a.answer(1)
    a.fail(1)
    assert of(steps.OpFailed, a.poll()) == []
    assert a.node.counters()["send.failed"] == 1
    a.answer(2)
    a.answer(3)
    assert closed(a.poll()) == [("all_answered", ())]


def test_only_the_tag_of_its_envelope_ends_a_wait() -> None:
    a = Asker(quorum=2)
    for tag in (None, 999, 0):
        a.node.send_failed(peer(1), "x", tag=tag)
    a.node.send_failed(peer(2), "x", tag=a.tag(1))  # another's envelope
    a.fail(1)
    a.fail(1)  # the same twice counts once: the quorum is still possible
    made = a.poll()
    assert of(steps.OpFailed, made) == []
    assert [s.name for s in of(steps.Telemetry, made)].count("request.failed") == 1
    assert a.node.counters()["send.failed"] == 6
    assert a.node.counters()["requests.open"] == 1


def test_requests_to_one_peer_have_an_envelope_each_and_end_apart() -> None:
    a = Asker(quorum=0, peers=2, requests=2)
    assert len({tag for _, tag, _ in a.sent}) == 4
    a.fail(1, request=1)
    (failed,) = of(steps.OpFailed, a.poll())
    assert failed.kind == "QuorumNotReached"
    assert len(a.node.waiting()) == 1
    a.answer(1)
    a.answer(2)
    assert batch(a.poll()) == (in_order(1, 2), [])


def test_a_request_that_closed_before_anybody_asked_for_its_answers() -> None:
    p = Partition("server", inputs=["ask"])
    p.constant("peers", PeerIdVec([peer(1), peer(2)]))
    p.sys("Sleep", ["ask"], "slept", duration_ns=3 * S, called="nap")
    destination = p._dest("ask", SITE)
    p.op(WIRE, keys.OP_SEND_REQ_BATCHED, ["ask", "peers"], ["req"], quorum=1, deadline_ns=9 * S,
         meta={keys.PORT_KEY: "round"}, **destination)  # fmt: skip
    p.op(WIRE, keys.OP_RECV_RESP_BATCHED, ["req"], ["answers"], control=["nap"],
         meta=p.answers_at("answers"), stamp_ns=9 * S)  # fmt: skip
    p.output("out", "answers")
    node = bring_up(model(p), "server")
    for i in (1, 2):
        node.peer_connected(peer(i), ["client"])
    node.invoke("server", {"ask": vector(1)})
    sent = of(steps.SendEnvelope, node.poll(1))
    for step in sent:
        node.send_failed(step.peer, "no route", tag=step.tag)
    assert closed(node.poll(2)) == [("below_quorum", tuple(in_order(1, 2)))]
    (failed,) = of(steps.OpFailed, node.poll(1 + 3 * S))
    assert failed.kind == "QuorumNotReached"
    assert "NotSent: no route" in failed.detail
    assert " ms " not in failed.detail


def test_a_long_reason_is_cut() -> None:
    a = Asker(quorum=0, peers=1)
    a.fail(1, "refused; " * 500)
    (failed,) = of(steps.OpFailed, a.poll())
    assert 200 < len(failed.detail) < 500


def test_a_failed_send_is_heard_even_by_a_full_ingress() -> None:
    a = Asker(quorum=1, peers=2, limits=Limits(ingress_events=3))
    assert len(a.sent) == 2
    for _ in range(4):
        a.node.send_failed(peer(1), "x")  # of nobody's request: the fourth is dropped
    a.fail(1)
    a.fail(2)
    assert [f.kind for f in of(steps.OpFailed, a.poll())] == ["QuorumNotReached"]
    assert a.node.counters()["ingress.dropped"] == 1


def test_a_request_to_this_node_itself_that_finds_no_room() -> None:
    p = Partition("server", inputs=["ask"])
    p.constant("peers", PeerIdVec([peer(0)]))
    for name in ANSWERS:
        p.request("ask", "peers", SITE, name)
    node = bring_up(model(p), "server", limits=Limits(ingress_events=1))
    node.invoke("server", {"ask": vector(1)})
    node.poll(1)
    (failed,) = of(steps.OpFailed, node.poll(1))
    assert failed.kind == "QuorumNotReached"
    assert "IngressFull: this node has no room" in failed.detail
    assert len(node.waiting()) == 1  # the first one has come


@pytest.mark.parametrize("same_life", [True, False])
def test_what_went_out_in_which_envelope_is_in_a_snapshot(same_life) -> None:
    a = Asker(quorum=2)
    a.answer(3)
    a.fail(2)
    a.poll()
    a.fail(1, "no route")  # one that waits in the ingress, and one that comes
    again = a.install()
    again.restore(a.node.snapshot(), 2, same_life=same_life)
    (failed,) = of(steps.OpFailed, again.poll(2))
    assert failed.kind == "QuorumNotReached"
    assert failed.detail.count("(NotSent: no route)") == 2
    assert again.counters()["requests.open"] == 0


# -- requests of components --------------------------------------------------------------------


def calling(**more):
    """A node whose component has asked peer 1; with the envelope's step and its request id."""
    node = chatting(0, **more)
    node.peer_connected(peer(1))
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    (step,) = of(steps.SendEnvelope, node.poll(0))
    return node, step, decode_envelope(b"".join(step.parts)).correlation.wire_req_id


def echo(wire_req_id: int) -> bytes:
    fill = SlotFill(dest_suffix=suffix_of("chat", "Echo"), payload=b"olleh")
    correlation = WireCorrelation(kind=CorrelationKind.RESPONSE, wire_req_id=wire_req_id)
    return b"".join(
        encode_envelope(
            WireEnvelope(fills=(fill,), correlation=correlation, src_peer_bytes=peer(1).to_bytes())
        )
    )


def test_a_component_hears_at_once_that_its_request_was_not_sent() -> None:
    node, step, wire_req_id = calling()
    node.send_failed(peer(1), "no route", tag=step.tag)
    made = node.poll(1)
    heard = component(node, "chat").heard
    assert heard == [("no answer", "hello", peer(1))]
    (unsent,) = [s.attributes for s in of(steps.Telemetry, made) if s.name == "call.failed"]
    assert (unsent["slot"], unsent["tag"], unsent["kind"]) == ("chat", "hello", "NotSent")
    assert unsent["detail"] == "no route"
    assert node.counters()["calls.unanswered"] == 1
    assert node.counters()["calls.open"] == 0
    assert node.next_deadline() is None
    node.send_failed(peer(1), "no route", tag=step.tag)
    node.deliver_inbound(peer(1), echo(wire_req_id))
    node.poll(2)
    assert len(heard) == 1
    assert node.counters()["response.late"] == 1


def test_a_call_that_was_answered_or_is_anothers_does_not_end_by_a_failed_send() -> None:
    node, step, wire_req_id = calling()
    node.send_failed(peer(2), "x", tag=step.tag)
    node.send_failed(peer(1), "x", tag=step.tag + 1)
    node.send_failed(peer(1), "x", blames_peer=False)
    node.poll(1)
    assert node.counters()["calls.open"] == 1
    node.deliver_inbound(peer(1), echo(wire_req_id))
    node.send_failed(peer(1), "x", tag=step.tag)
    node.poll(2)
    assert component(node, "chat").heard == [(peer(1), "RESPONSE", "hello", b"olleh")]


def test_a_component_that_is_busy_hears_of_it_when_it_can() -> None:
    node, step, _ = calling()
    inbox = SlotFill(dest_suffix=suffix_of("chat", "Slow"), payload=b"x")
    node.deliver_inbound(
        peer(1),
        b"".join(
            encode_envelope(
                WireEnvelope(
                    fills=(inbox,),
                    correlation=WireCorrelation(kind=CorrelationKind.REQUEST, wire_req_id=5),
                    src_peer_bytes=peer(1).to_bytes(),
                )
            )
        ),
    )
    (task,) = of(steps.RunTask, node.poll(1))
    node.send_failed(peer(1), "no route", tag=step.tag, blames_peer=False)
    node.poll(2)
    heard = component(node, "chat").heard
    assert heard == []
    node.complete(task.token, task.fn())
    node.poll(3)
    node.poll(2 + messenger.RETRY_NS)
    assert heard[-1] == ("no answer", "hello", peer(1))
    assert heard.count(heard[-1]) == 1


def test_a_call_under_way_is_in_a_snapshot_with_its_envelope() -> None:
    node, step, _ = calling()
    again = chatting(0)
    again.restore(node.snapshot(), 1, same_life=True)
    again.send_failed(peer(1), "no route", tag=step.tag)
    again.poll(1)
    assert component(again, "chat").heard == [("no answer", "hello", peer(1))]


def test_a_one_way_send_that_failed_is_counted_and_nothing_else() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.invoke("teller", {"peers": PeerIdVec([peer(1)])})
    (step,) = of(steps.SendEnvelope, node.poll(0))
    node.send_failed(peer(1), "x", tag=step.tag)
    assert node.poll(1) == []
    assert node.counters()["send.failed"] == 1


# -- a peer that was restarted -----------------------------------------------------------------


def test_who_was_restarted_without_the_request_is_missing_at_once_and_says_so() -> None:
    a = Asker(quorum=2)
    wires = {who: wire for who, _, wire in a.sent}
    assert a.node.awaited(peer(1)) == {wires[peer(1)]: a.tag(1)}
    a.node.request_lost(peer(1), a.tag(1))
    # Of another peer, or twice: nothing.
    a.node.request_lost(peer(2), a.tag(1))
    a.answer(2)
    made = a.poll()
    (lost,) = [s.attributes for s in of(steps.Telemetry, made) if s.name == "request.failed"]
    assert (lost["peer"], lost["kind"]) == (peer(1), "PeerRestarted")
    assert a.node.counters()["requests.lost"] == 1
    assert a.node.awaited(peer(1)) == a.node.awaited(peer(2)) == {}
    a.answer(3)
    made = a.poll()
    assert closed(made) == [("quorum", (peer(1),))]
    assert batch(made) == (in_order(2, 3), [peer(1)])


def test_a_quorum_that_restarts_put_out_of_reach_fails_at_once() -> None:
    a = Asker(quorum=0)
    a.node.request_lost(peer(3), a.tag(3))
    (failed,) = of(steps.OpFailed, a.poll())
    assert "PeerRestarted: it was restarted after it had got the request" in failed.detail


def test_a_component_hears_that_its_request_was_lost() -> None:
    node, step, wire_req_id = calling()
    assert node.awaited(peer(1)) == {wire_req_id: step.tag}
    node.request_lost(peer(1), step.tag)
    node.poll(1)
    assert component(node, "chat").heard == [("no answer", "hello", peer(1))]
    assert node.awaited(peer(1)) == {}


def test_a_lost_request_that_nobody_polled_yet_is_in_a_snapshot() -> None:
    a = Asker(quorum=0)
    a.node.request_lost(peer(3), a.tag(3))
    again = a.install()
    again.restore(a.node.snapshot(), 2, same_life=True)
    assert "PeerRestarted" in of(steps.OpFailed, again.poll(2))[0].detail


def asked(node, wire_req_id: int, op: str = "Slow") -> None:
    """Peer 1 asks the component of a node."""
    fill = SlotFill(dest_suffix=suffix_of("chat", op), payload=b"x")
    correlation = WireCorrelation(kind=CorrelationKind.REQUEST, wire_req_id=wire_req_id)
    raw = peer(1).to_bytes()
    made = encode_envelope(WireEnvelope(fills=(fill,), correlation=correlation, src_peer_bytes=raw))
    node.deliver_inbound(peer(1), b"".join(made))


def test_a_node_knows_the_requests_that_it_has_from_their_arrival_to_their_answer() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    asked(node, 5)
    ids = (4, 5, 6)
    # In the ingress, in an execution, in one that was restored; nobody else's.
    assert node.has_requests(peer(1), ids, ()) == {5}
    assert node.has_requests(peer(2), ids, ()) == set()
    (task,) = of(steps.RunTask, node.poll(1))
    assert node.has_requests(peer(1), ids, ()) == {5}
    again = chatting(0)
    again.restore(node.snapshot(), 1)
    assert again.has_requests(peer(1), ids, ()) == {5}
    assert chatting(0).has_requests(peer(1), ids, ()) == set()
    node.complete(task.token, task.fn())
    (answer,) = of(steps.SendEnvelope, node.poll(2))
    # Answered: while the answer is on its way, and no longer.
    assert node.has_requests(peer(1), ids, {answer.tag}) == {5}
    assert node.has_requests(peer(1), ids, ()) == set()
