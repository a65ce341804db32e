"""The bus: what programs hear of the engine, and of their hosts."""

from __future__ import annotations

import pytest

from bbnode.engine import Limits, errors, steps
from bbnode.engine.bus import FIRST_PROGRAM_KIND, BusKind
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER, EventKind, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, of, peer

KIND = FIRST_PROGRAM_KIND + 7


def heard(made):
    return [(step.topic, step.value) for step in of(steps.AppEvent, made)]


def listener(*kinds: int, **more):
    """Emits each event of `kinds`; its input fails when it is no Composite."""
    p = Partition("server", inputs=["x"])
    for index, kind in enumerate(kinds):
        p.sys("EventSource", (), f"e{index}", kind=kind)
        p.sys("AppEmit", [f"e{index}"], name=f"heard.{index}")
    p.op(keys.COMPOSITE_DOMAIN, "Unbundle", ["x"], ["a"], child_count=1)
    p.sys("AppNotify", ["a"], name="never")
    return bring_up(model(p), "server", **more)


def test_each_subscriber_hears_each_event_of_its_kind_once_and_in_order() -> None:
    node = listener(KIND, KIND + 1, KIND)
    node.publish_event(KIND + 1)
    node.publish_event(KIND)
    node.publish_event(KIND + 2)  # nobody listens
    made = node.poll(0)
    assert heard(made) == [
        ("heard.1", EventKind(KIND + 1)),
        ("heard.0", EventKind(KIND)),
        ("heard.2", EventKind(KIND)),
    ]
    assert len({step.execution for step in of(steps.AppEvent, made)}) == 3
    assert all(type(value) is EventKind for _, value in heard(made))
    assert node.counters()["bus.waiting"] == 0
    assert heard(node.poll(1)) == []


def test_a_refused_envelope_and_a_failed_op_are_events() -> None:
    node = listener(BusKind.WIRE_RECEIVE_FAILED, BusKind.OP_FAILED)
    node.deliver_inbound(peer(1), b"\xff")
    assert heard(node.poll(0)) == [("heard.0", EventKind(BusKind.WIRE_RECEIVE_FAILED))]
    node.invoke("server", {"x": TRIGGER})
    assert heard(node.poll(1)) == [("heard.1", EventKind(BusKind.OP_FAILED))]


def test_peers_that_come_and_go_are_events() -> None:
    node = listener(BusKind.PEER_UP, BusKind.PEER_DOWN)
    node.peer_connected(peer(1))
    node.peer_disconnected(peer(1), "bye")
    assert [topic for topic, _ in heard(node.poll(0))] == ["heard.0", "heard.1"]


def test_a_send_that_leaves_out_a_peer_is_an_event_unless_an_event_made_it() -> None:
    p = Partition("server", inputs=["peers"])
    p.sys("EventSource", (), "e", kind=BusKind.PEER_RESOLVE_FAILED)
    p.sys("AppEmit", ["e"], name="heard")
    p.constant("nobody", PeerIdVec((peer(9),)))
    p.send("e", "nobody", 1)
    p.send("peers", "peers", 1)
    node = bring_up(model(p), "server")
    node.invoke("server", {"peers": PeerIdVec((peer(8),))})
    made = node.poll(0)
    assert [step.peer for step in of(steps.PeerResolveFailed, made)] == [peer(8), peer(9)]
    assert len(heard(made)) == 1
    assert node.next_deadline() is None


def test_a_handler_that_fails_does_not_feed_itself() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("EventSource", (), "e", kind=BusKind.OP_FAILED)
    for source in ("e", "x"):
        p.op(keys.COMPOSITE_DOMAIN, "Unbundle", [source], [f"{source}.part"], child_count=1)
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": TRIGGER})
    made = node.poll(0)
    assert [step.kind for step in of(steps.OpFailed, made)] == ["CompositeMismatch"] * 2
    assert node.next_deadline() is None


def test_a_full_bus_drops_the_oldest_and_counts_it() -> None:
    node = listener(KIND, KIND + 1, limits=Limits(bus_events=2))
    for kind in (KIND, KIND, KIND, KIND + 1):
        node.publish_event(kind)
    assert [topic for topic, _ in heard(node.poll(0))] == ["heard.0", "heard.1"]
    assert node.counters()["bus.dropped"] == 2


@pytest.mark.parametrize("kind", [0, BusKind.OP_FAILED, FIRST_PROGRAM_KIND - 1, 1 << 64, "x", True])
def test_a_host_publishes_only_kinds_of_programs(kind) -> None:
    node = listener(KIND)
    with pytest.raises(errors.InvalidEventKind):
        node.publish_event(kind)
