"""What comes in: fills, caps, garbage, addresses and deadlines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.engine import Limits, steps
from bbnode.ir import codec, keys, types
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    encode_envelope,
)
from bbnode.ir.values import TRIGGER, Composite
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import MS, S, bring_up, of, peer

MODEL = keys.role_domain("Model")


def listener(**more):
    """A node with one gated Recv of a float tensor, one of anything and one of a trigger."""
    p = Partition("server")
    head = p.recv("x", node=types.TENSOR_FLOAT, gates=True)
    p.output("x_out", head)
    p.recv("anything")
    p.output("any_out", "anything")
    p.recv("go", node=types.TRIGGER)
    p.sys("OnTrigger", ["go"], "went")
    p.output("go_out", "went")
    node = bring_up(model(p), "server", **more)
    node.peer_connected(peer(3), ["client"])
    node.poll(0)
    return node, p


def test_a_bad_fill_is_told_and_its_siblings_are_delivered() -> None:
    node, p = listener()
    value = np.ones(2, np.float32)
    good = SlotFill(
        dest_suffix=site_suffix(p.site("x")), payload=codec.encode_value(value),
        type_hash=types.TENSOR_FLOAT.wire_hash,
    )  # fmt: skip
    bad = [
        SlotFill(dest_suffix=site_suffix(99), type_hash=1),
        SlotFill(dest_suffix=b"nonsense", type_hash=1),
        SlotFill(dest_suffix=good.dest_suffix, payload=b"", type_hash=types.TRIGGER.wire_hash),
        SlotFill(dest_suffix=good.dest_suffix, payload=b"x", type_hash=good.type_hash),
        SlotFill(dest_suffix=site_suffix(p.site("anything")), type_hash=4711),
        SlotFill(dest_suffix=good.dest_suffix, trigger_only=True, type_hash=good.type_hash),
    ]
    data = b"".join(
        encode_envelope(WireEnvelope(fills=(*bad, good), src_peer_bytes=peer(3).to_bytes()))
    )
    node.deliver_inbound(peer(3), data)
    made = node.poll(0)
    failed = of(steps.WireReceiveFailed, made)
    assert [(s.fill, s.kind) for s in failed] == [
        (0, "UnknownSite"), (1, "UnknownSite"), (2, "TypeMismatch"), (3, "DecodeFailed"),
        (4, "UnknownTypeHash"), (5, "TypeMismatch"),
    ]  # fmt: skip
    assert failed[3].payload_size == 1
    assert [e.value.tolist() for e in of(steps.AppEvent, made)] == [[1.0, 1.0]]
    assert node.counters()["ingress.bytes"] == 0


def test_a_trigger_needs_no_payload() -> None:
    node, p = listener()
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("go"), TRIGGER, trigger_only=True))
    assert [e.topic for e in of(steps.AppEvent, node.poll(0))] == ["go_out"]


def test_an_envelope_of_somebody_else_is_dropped_and_counted() -> None:
    node, p = listener()
    node.deliver_inbound(peer(3), envelope(peer(4), p.site("go"), TRIGGER))
    made = node.poll(0)
    assert of(steps.AppEvent, made) == []
    assert of(steps.WireReceiveFailed, made) == []
    assert node.counters()["receive.forged"] == 1


def test_correlation_has_to_fit_the_site() -> None:
    node, p = listener()
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("go"), TRIGGER, CorrelationKind.REQUEST))
    assert [s.kind for s in of(steps.WireReceiveFailed, node.poll(0))] == ["CorrelationMismatch"]


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (Limits(envelope_bytes=100), "EnvelopeTooLarge"),
        (Limits(ingress_bytes=100), "BudgetExceeded"),
        (Limits(sender_addresses=1), "DecodeFailed"),
        (Limits(sender_address_bytes=3), "DecodeFailed"),
    ],
)
def test_caps_refuse_an_envelope_whole(limits, kind) -> None:
    node, p = listener(limits=limits)
    claimed = tuple(bytes(Multiaddr(f"/ip4/10.0.0.{i}/tcp/1").to_bytes()) for i in range(2))
    data = envelope(peer(3), p.site("x"), np.zeros(50, np.float32), claimed=claimed)
    node.deliver_inbound(peer(3), data)
    made = node.poll(0)
    assert [(s.kind, s.fill) for s in of(steps.WireReceiveFailed, made)] == [(kind, -1)]
    assert of(steps.AppEvent, made) == []
    assert node.counters()["ingress.bytes"] == 0


def test_events_beyond_the_ingress_cap_are_refused_and_counted() -> None:
    node, p = listener(limits=Limits(ingress_events=2))
    data = envelope(peer(3), p.site("go"), TRIGGER)
    for _ in range(5):
        node.deliver_inbound(peer(3), data)
    node.peer_connected(peer(9), ["x"])  # never lost
    made = node.poll(0)
    assert node.counters()["ingress.dropped"] == 3
    assert len(of(steps.AppEvent, made)) == 2
    assert len(of(steps.PeerUp, made)) == 1
    assert node.counters()["ingress.bytes"] == 0


def test_a_peer_that_sends_garbage_has_to_cool_down() -> None:
    node, p = listener()
    node.deliver_inbound(peer(3), b"garbage")
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("x"), np.ones(1, np.float32)))
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.detail == f"BackoffGateRx reason=cooldown: from {peer(3)}"
    node.deliver_inbound(
        peer(3), envelope(peer(3), p.site("x"), np.ones(1, np.float32), wire_req_id=2)
    )
    assert len(of(steps.AppEvent, node.poll(10 * MS))) == 1


@given(st.binary(max_size=200))
def test_garbage_never_leaves_poll(data) -> None:
    node, _ = listener()
    node.deliver_inbound(peer(3), data)
    made = node.poll(0)
    assert of(steps.AppEvent, made) == []
    assert len(of(steps.WireReceiveFailed, made)) + node.counters().get("receive.forged", 0) == 1
    assert node.executions() == []


@given(st.data())
def test_changed_envelopes_never_leave_poll(data) -> None:
    node, p = listener()
    raw = bytearray(envelope(peer(3), p.site("anything"), Composite((TRIGGER, np.zeros(3)))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    node.deliver_inbound(peer(3), bytes(raw))
    node.poll(0)
    assert node.executions() == []
    assert node.counters()["ingress.bytes"] == 0


def test_addresses_are_learned_and_replaced_only_when_they_change() -> None:
    node, p = listener()
    one, two = (Multiaddr(f"/ip4/10.0.0.{i}/tcp/1") for i in (1, 2))
    claimed = (bytes(one.to_bytes()), b"rubbish")
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("go"), TRIGGER, claimed=claimed), two)
    node.poll(0)
    assert node._rt.neighbours.book.lookup(peer(3)) == (one, two)
    assert node.counters()["addresses.refused"] == 1
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("go"), TRIGGER, claimed=claimed), two)
    node.poll(0)
    assert node.counters()["addresses.refused"] == 1


def test_an_inbound_deadline_bounds_the_execution() -> None:
    p = Partition("server")
    p.recv("x")
    p.sys("Sleep", ["x"], "t", duration_ns=5 * S)
    p.sys("DeadlineCheck", ["x"], "checked", deadline_ns=30 * S)
    p.output("early", "checked")
    p.output("late", "t")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("x"), TRIGGER, remaining_ns=2 * S))
    assert [e.topic for e in of(steps.AppEvent, node.poll(1 * S))] == ["early"]
    assert node.executions()[0].deadline_ns == 3 * S
    assert node.next_deadline() == 3 * S
    (failed,) = of(steps.OpFailed, node.poll(3 * S))
    assert failed.kind == "DeadlineExceeded"
    assert node.executions() == []


def test_a_deadline_check_fails_when_it_is_over() -> None:
    p = Partition("server")
    p.recv("x")
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Train", (), ["s"], slot="m", after=["x"], epochs=1, batch=1)
    p.sys("DeadlineCheck", (), "dc", after=["s"], deadline_ns=30 * S)
    p.sys("AppNotify", ["x"], after=["dc"], name="done")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    node.deliver_inbound(peer(3), envelope(peer(3), p.site("x"), TRIGGER, remaining_ns=2 * S))
    (task,) = of(steps.RunTask, node.poll(0))
    node.complete(task.token, task.fn())
    made = node.poll(2 * S)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["DeadlineExceeded"]
    assert of(steps.AppEvent, made) == []


def test_what_looks_as_before_is_checked_as_before() -> None:
    node, p = listener(limits=Limits(frames_per_peer=2))
    value = np.ones(2, np.float32)
    numbers = iter(range(1, 100))

    def sent(payload: bytes | None = None, number: int | None = None, **more):
        """What comes of an envelope that differs from the ones before as little as this says."""
        fill = SlotFill(
            dest_suffix=site_suffix(p.site("x")),
            payload=codec.encode_value(value) if payload is None else payload,
            type_hash=types.TENSOR_FLOAT.wire_hash,
        )
        said = WireCorrelation(
            kind=more.pop("kind", CorrelationKind.NONE),
            wire_req_id=(1 << 40) + (next(numbers) if number is None else number),
        )
        whole = WireEnvelope(
            fills=(fill,), correlation=said, src_peer_bytes=peer(3).to_bytes(), **more
        )
        node.deliver_inbound(peer(3), b"".join(encode_envelope(whole)))
        made = node.poll(0)
        failed = [(s.fill, s.kind, s.type_hash, s.payload_size)
                  for s in of(steps.WireReceiveFailed, made)]  # fmt: skip
        denied = [s.kind for s in of(steps.OpFailed, made)]
        return failed or denied or [s.topic for s in of(steps.AppEvent, made)]

    of_type = types.TENSOR_FLOAT.wire_hash
    size = len(codec.encode_value(value))
    for _ in range(3):
        assert sent() == ["x_out"]
    assert sent(remaining_deadline_ns=5 * S) == ["x_out"]
    assert sent(number=1) == ["GateDenied"]
    assert sent(b"\xff" * size) == [(0, "DecodeFailed", of_type, size)]
    assert sent(kind=CorrelationKind.REQUEST) == [(0, "CorrelationMismatch", of_type, size)]
    node.block_peer(peer(3))
    assert sent() == ["GateDenied"]
    node.unblock_peer(peer(3))
    assert sent() == ["x_out"]
    told = bytes(Multiaddr("/ip4/10.0.0.9/tcp/1").to_bytes())
    for _ in range(2):
        assert sent(src_peer_addresses=(told,)) == ["x_out"]
    assert node.peer_standing(peer(3)).addresses == (Multiaddr("/ip4/10.0.0.9/tcp/1"),)
    node.peer_connected(peer(3), ["somebody"])
    node.poll(0)
    assert sent() == [(0, "SenderNotOfClass", of_type, size)]
    node.peer_connected(peer(3), ["client"])
    node.poll(0)
    assert sent() == ["x_out"]


def test_an_envelope_that_claims_another_sender_is_never_as_before() -> None:
    node, p = listener()
    fill = SlotFill(
        dest_suffix=site_suffix(p.site("x")), payload=codec.encode_value(np.ones(2, np.float32)),
        type_hash=types.TENSOR_FLOAT.wire_hash,
    )  # fmt: skip
    for number in range(1, 5):
        whole = WireEnvelope(
            fills=(fill,),
            correlation=WireCorrelation(wire_req_id=number),
            src_peer_bytes=peer(4).to_bytes(),
        )
        node.deliver_inbound(peer(3), b"".join(encode_envelope(whole)))
        assert not of(steps.AppEvent, node.poll(0))
        assert node.counters()["receive.forged"] == number
