"""The control plane: inbound ops, answers, who is refused, and one at a time."""

from __future__ import annotations

import pytest

from bbnode.components.contracts import (
    ComponentError,
    ProtocolComponent,
    inbound,
    inbound_ops,
)
from bbnode.engine import Limits, steps
from bbnode.engine.messaging import messenger
from bbnode.engine.messaging.actions import suffix_of
from bbnode.ir import ids
from bbnode.ir.address import REFUSED_SUFFIX, component_suffix, parse_component_suffix, site_suffix
from bbnode.ir.caps import MAX_CALLS
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    decode_envelope,
    encode_envelope,
)
from bbnode.ir.errors import AuthorError
from bbnode.ir.refusal import decode_refusal
from bbnode.ir.values import PeerIdVec
from tests.engine.protocols import chatting
from tests.engine.support import Boom, Pump, S, component, of, peer

NONE, REQUEST, RESPONSE = CorrelationKind


def message(op="Hear", payload=b"hi", *, slot="chat", kind=NONE, wire_req_id=1, source=1, **more):
    fill = SlotFill(
        dest_suffix=more.pop("suffix", None) or suffix_of(slot, op),
        payload=payload,
        type_hash=more.pop("type_hash", 0),
    )
    return b"".join(
        encode_envelope(
            WireEnvelope(
                fills=(fill,),
                correlation=WireCorrelation(kind=kind, wire_req_id=wire_req_id),
                src_peer_bytes=peer(source).to_bytes(),
                **more,
            )
        )
    )


def sent(made):
    found = []
    for step in of(steps.SendEnvelope, made):
        envelope = decode_envelope(b"".join(step.parts))
        found += [
            (step.peer, envelope.correlation, fill.dest_suffix, bytes(fill.payload))
            for fill in envelope.fills
        ]
    return found


def test_a_request_is_answered_and_the_answer_comes_back() -> None:
    asker, other = chatting(0), chatting(1)
    pump = Pump(asker, other)
    asker.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    assert component(other, "chat").heard == [(peer(0), "REQUEST", b"hello")]
    assert component(asker, "chat").heard == [(peer(1), "RESPONSE", "hello", b"olleh")]
    assert asker.counters()["calls.open"] == 0
    assert asker.counters()["ingress.bytes"] == other.counters()["ingress.bytes"] == 0
    assert asker.executions() == other.executions() == []


def test_a_one_way_message_comes_without_a_request() -> None:
    node, other = chatting(0), chatting(1)
    pump = Pump(node, other)
    node.invoke("teller", {"peers": PeerIdVec([peer(0), peer(1)])})
    pump.settle()
    assert component(other, "chat").heard == [(peer(0), "NONE", b"hello")]
    # A message to oneself takes the same way.
    assert component(node, "chat").heard == [(peer(0), "NONE", b"hello")]


def test_what_is_not_answered_is_told_once() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    (request,) = sent(node.poll(0))
    (waiting,) = node.waiting()
    assert (waiting.what, waiting.why, waiting.whom) == ("chat: hello", "answer", str(peer(1)))
    assert node.next_deadline() == 5 * S
    node.poll(5 * S)
    node.poll(5 * S)
    heard = component(node, "chat").heard
    assert heard == [("no answer", "hello", peer(1))]
    # The answer that comes after that is dropped and counted.
    node.deliver_inbound(
        peer(1), message("Echo", kind=RESPONSE, wire_req_id=request[1].wire_req_id)
    )
    node.poll(6 * S)
    assert len(heard) == 1
    assert node.counters()["response.late"] == 1
    assert node.next_deadline() is None


def test_who_cannot_be_reached_does_not_answer() -> None:
    node = chatting(0)
    node.invoke("talker", {"peers": PeerIdVec([peer(7)])})
    made = node.poll(0)
    made += node.poll(0)
    (left_out,) = of(steps.PeerResolveFailed, made)
    assert (left_out.peer, left_out.op) == (peer(7), "call")
    assert not of(steps.OpFailed, made)
    assert component(node, "chat").heard == [("no answer", "hello", peer(7))]


@pytest.mark.parametrize(
    ("kind", "source", "suffix", "counted"),
    [
        (RESPONSE, 2, None, "response.stranger"),
        (RESPONSE, 1, suffix_of("chat", "Hear"), "response.stranger"),
        (RESPONSE, 1, suffix_of("nobody", "Echo"), "response.stranger"),
    ],
)
def test_an_answer_that_nobody_waits_for_is_dropped(kind, source, suffix, counted) -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    (request,) = sent(node.poll(0))
    data = message(
        "Echo", kind=kind, wire_req_id=request[1].wire_req_id, source=source, suffix=suffix
    )
    node.deliver_inbound(peer(source), data)
    node.poll(1)
    assert node.counters()[counted] == 1
    assert component(node, "chat").heard == []
    assert node.counters()["calls.open"] == 1


def test_an_answer_to_nothing_is_unknown() -> None:
    node = chatting(0)
    node.deliver_inbound(peer(1), message("Echo", kind=RESPONSE, wire_req_id=77))
    node.poll(0)
    assert node.counters()["response.unknown"] == 1


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"op": "Nothing"}, "UnknownComponentOp", "no inbound op 'Nothing'"),
        ({"op": "call"}, "UnknownComponentOp", "no inbound op 'call'"),
        ({"op": "on_timer"}, "UnknownComponentOp", "on_timer"),
        ({"slot": "other"}, "UnknownComponent", "no component here"),
        ({"type_hash": 5}, "TypeMismatch", "type hash 0"),
        ({"suffix": suffix_of("chat", "Hear")[:-1]}, "UnknownSite", "nothing here receives"),
        ({"suffix": suffix_of("chat", "Hear") + b"x"}, "UnknownSite", "nothing here receives"),
        ({"suffix": b"\xe3\x01"}, "UnknownSite", "nothing here receives"),
        ({"suffix": site_suffix(3)}, "UnknownSite", "nothing here receives"),
    ],
)
def test_what_names_no_inbound_op_is_refused(more, kind, text) -> None:
    node = chatting(0)
    node.deliver_inbound(peer(1), message(**more))
    (failed,) = of(steps.WireReceiveFailed, node.poll(0))
    assert (failed.peer, failed.fill, failed.kind) == (peer(1), 0, kind)
    assert text in failed.detail
    assert component(node, "chat").heard == []
    assert node.counters()["ingress.bytes"] == 0


def test_the_gates_stand_before_inbound_ops() -> None:
    node = chatting(0)
    node.deliver_inbound(peer(1), message())
    node.deliver_inbound(peer(1), message())
    made = node.poll(0)
    assert [s.detail.split(":")[0] for s in of(steps.WireReceiveFailed, made)] == [
        "reason=duplicate"
    ]
    node.block_peer(peer(1))
    node.deliver_inbound(peer(1), message(wire_req_id=2))
    (failed,) = of(steps.WireReceiveFailed, node.poll(1))
    assert failed.kind == "GateDenied"
    assert "blocklisted" in failed.detail
    node.unblock_peer(peer(1))
    node.send_failed(peer(1), "reset")
    node.deliver_inbound(peer(1), message(wire_req_id=3))
    (failed,) = of(steps.WireReceiveFailed, node.poll(2))
    assert "cooldown" in failed.detail
    assert len(component(node, "chat").heard) == 1
    assert node.counters()["gate.denied.duplicate"] == 1


@pytest.mark.parametrize(
    ("raises", "returns", "kind"),
    [
        (ComponentError("no"), None, "ComponentError"),
        (Boom("no"), None, "UnexpectedException"),
        (BaseException("rude"), None, "UnexpectedException"),
        (None, "text", "WrongResultType"),
        (None, 5, "WrongResultType"),
    ],
)
def test_an_inbound_op_that_fails_is_a_step_and_answers_no(raises, returns, kind) -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    chat = component(node, "chat")
    chat.raises, chat.returns = raises, returns
    node.deliver_inbound(peer(1), message("Echo", kind=REQUEST))
    made = node.poll(0)
    (failed,) = of(steps.OpFailed, made)
    assert (failed.kind, failed.target, failed.op) == (kind, "chat", "chat.op Echo (request)")
    ((who, correlation, suffix, payload),) = sent(made)
    assert (who, correlation.kind, correlation.wire_req_id) == (peer(1), RESPONSE, 1)
    assert suffix == REFUSED_SUFFIX
    told = decode_refusal(payload)
    assert (told.kind, told.where) == (kind, failed.op)
    assert node.counters()["ingress.bytes"] == 0


def test_a_one_way_call_that_returns_something_fails() -> None:
    node = chatting(0)
    node.deliver_inbound(peer(1), message("Echo"))
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.kind == "WrongResultType"


def test_a_method_that_raises_has_sent_nothing() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    component(node, "chat").raises = Boom("after asking")
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    made = node.poll(0)
    assert not sent(made)
    assert node.counters()["calls.open"] == 0


def test_a_context_is_of_no_use_after_its_call() -> None:
    node = chatting(0)
    node.invoke("teller", {"peers": PeerIdVec()})
    node.poll(0)
    with pytest.raises(ComponentError, match="after the method has returned"):
        component(node, "chat").ctx.send(peer(1), "chat", "Hear", b"")


def test_an_answer_may_come_later_and_nothing_else_runs_meanwhile() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.deliver_inbound(peer(1), message("Later", kind=REQUEST, wire_req_id=9))
    node.deliver_inbound(peer(1), message("Hear", wire_req_id=10))
    made = node.poll(0)
    assert not sent(made)
    assert component(node, "chat").heard == []
    component(node, "chat").completion.complete(b"done")
    made = node.poll(1)
    assert sent(made) == [
        (
            peer(1),
            WireCorrelation(kind=RESPONSE, wire_req_id=9),
            suffix_of("chat", "Later"),
            b"done",
        )
    ]
    assert [what[2] for what in component(node, "chat").heard] == [b"hi"]


def test_an_inbound_op_may_run_in_a_worker_thread() -> None:
    node, other = chatting(0), chatting(1)
    pump = Pump(node, other)
    pump.settle()
    other.deliver_inbound(peer(0), message("Slow", b"x", kind=REQUEST, wire_req_id=3, source=0))
    (task,) = of(steps.RunTask, other.poll(pump.now_ns))
    result = task.fn()
    other.complete(task.token, result)
    ((to, correlation, _, payload),) = sent(other.poll(pump.now_ns))
    assert (to, correlation.wire_req_id, payload) == (peer(0), 3, b"slow x")
    assert "offloaded" in component(other, "chat").heard[0]


def test_a_component_that_never_returns_has_a_bounded_line(monkeypatch) -> None:
    monkeypatch.setattr(messenger, "MAX_UNDER_WAY", 4)
    node = chatting(0)
    node.deliver_inbound(peer(1), message("Later", kind=REQUEST, wire_req_id=1))
    for number in range(2, 9):
        node.deliver_inbound(peer(1), message("Hear", wire_req_id=number))
    made = node.poll(0)
    assert [s.kind for s in of(steps.WireReceiveFailed, made)] == ["ComponentBusy"] * 4
    # All of them fail by their deadline, and the component is free again.
    wait_ns = Limits().wait_ns
    made = node.poll(wait_ns + S)
    assert {s.kind for s in of(steps.OpFailed, made)} <= {"DeadlineExceeded"}
    node.poll(2 * wait_ns + 2 * S)
    assert node.executions() == []
    assert node.counters()["ingress.bytes"] == 0
    node.deliver_inbound(peer(1), message("Hear", wire_req_id=100))
    node.poll(2 * wait_ns + 3 * S)
    assert component(node, "chat").heard[-1][2] == b"hi"


def test_the_deadline_of_an_envelope_holds_for_the_call() -> None:
    node = chatting(0)
    node.deliver_inbound(
        peer(1), message("Later", kind=REQUEST, wire_req_id=1, remaining_deadline_ns=S)
    )
    node.poll(0)
    assert node.next_deadline() == S
    (failed,) = of(steps.OpFailed, node.poll(S))
    assert failed.kind == "DeadlineExceeded"


def test_open_requests_are_bounded(monkeypatch) -> None:
    from bbnode.engine.ops import context

    monkeypatch.setattr(context, "MAX_CALLS", 3)
    node = chatting(0)
    for other in range(1, 6):
        node.peer_connected(peer(other))
    node.invoke("talker", {"peers": PeerIdVec(peer(n) for n in range(1, 6))})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert "3 requests" in failed.detail
    assert node.counters()["calls.open"] == 0
    assert MAX_CALLS == 1024


def test_a_message_larger_than_an_envelope_fails_its_op() -> None:
    node = chatting(0, limits=Limits(envelope_bytes=8192 + 3))
    node.peer_connected(peer(1))
    node.invoke("teller", {"peers": PeerIdVec([peer(1)])})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.kind == "PayloadTooLarge"


def test_an_execution_too_many_is_refused() -> None:
    node = chatting(0, limits=Limits(frames=1))
    for number in range(3):
        node.deliver_inbound(peer(1), message("Later", kind=REQUEST, wire_req_id=number))
    made = node.poll(0)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["FramesExceeded"] * 2
    assert len(node.executions()) == 1


class TwoNames(ProtocolComponent):
    TYPE_NAME = "test.TwoNames"

    @inbound("Same")
    def one(self, ctx, payload):
        """One."""

    @inbound("Same")
    def other(self, ctx, payload):
        """Other."""


class BadName(ProtocolComponent):
    TYPE_NAME = "test.BadName"

    @inbound("no/name")
    def one(self, ctx, payload):
        """One."""


@pytest.mark.parametrize("cls", [TwoNames, BadName])
def test_inbound_ops_that_cannot_be_are_the_authors_fault(cls) -> None:
    with pytest.raises(AuthorError, match=cls.__name__):
        inbound_ops(cls)


def test_inbound_ops_are_inherited_and_can_be_overridden() -> None:
    class Base(ProtocolComponent):
        @inbound("Ask")
        def ask(self, ctx, payload):
            """Asked."""

        @inbound("Old")
        def old(self, ctx, payload):
            """Old."""

    class Derived(Base):
        old = None  # not reachable any more

    assert inbound_ops(Base) == {"Ask": "ask", "Old": "old"}
    assert inbound_ops(Derived) == {"Ask": "ask"}


def test_a_component_suffix_is_parsed_as_it_is_written() -> None:
    ref = ids.component_ref("chat")
    assert parse_component_suffix(component_suffix(ref, "Echo")) == (ref, "Echo")
    assert parse_component_suffix(component_suffix(0, "a.b_c")) == (0, "a.b_c")
    assert parse_component_suffix(site_suffix(1)) is None
    assert ids.component_ref("chat") != ids.component_ref("chat2")


def test_a_request_goes_on_after_a_restore() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    (request,) = sent(node.poll(0))
    again = chatting(0)
    again.restore(node.snapshot())
    data = message("Echo", b"late", kind=RESPONSE, wire_req_id=request[1].wire_req_id)
    again.deliver_inbound(peer(1), data)
    again.poll(7)
    assert component(again, "chat").heard == [(peer(1), "RESPONSE", "hello", b"late")]
    assert again.counters()["calls.open"] == 0
    assert again.next_deadline() is None


def test_what_waits_for_a_component_goes_on_after_a_restore() -> None:
    node = chatting(0)
    node.peer_connected(peer(1))
    node.deliver_inbound(peer(1), message("Slow", b"x", kind=REQUEST, wire_req_id=5))
    node.deliver_inbound(peer(1), message("Hear", wire_req_id=6))
    assert len(of(steps.RunTask, node.poll(0))) == 1
    again = chatting(0)
    again.restore(node.snapshot())
    (task,) = of(steps.RunTask, again.poll(0))
    again.peer_connected(peer(1))
    again.complete(task.token, task.fn())
    made = again.poll(1)
    assert [(to, body) for to, _, _, body in sent(made)] == [(peer(1), b"slow x")]
    assert component(again, "chat").heard[-1] == (peer(1), "NONE", b"hi")
    assert again._rt.executor.under_way[0] == 0
    assert again.counters()["ingress.bytes"] == 0
