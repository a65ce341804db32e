"""Topics in the simulator, and what the engine has to do with them."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import (
    BytesTopic,
    OpContext,
    ProtocolComponent,
    Topic,
    TopicConfig,
    register_component,
)
from bbnode.components.contracts import InvalidComponentConfig
from bbnode.components.topics import MAX_WAITING
from bbnode.dsl import Graph, Module, ProtocolSlot, protocol_op, types
from bbnode.engine import Limits, install, steps
from bbnode.engine.errors import SnapshotRefused
from bbnode.engine.snapshot.whole import parse, seal
from bbnode.examples import bulletin
from bbnode.ir.caps import MAX_TOPIC_BYTES, MAX_TOPIC_CHARS
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER
from bbnode.sim import LinkModel, Network, S, SimNode

READING = np.float32([1, 2])
TOO_LONG = "x" * (MAX_TOPIC_CHARS + 1)


def following(network: Network, count: int) -> list[SimNode]:
    stations = bulletin.row(network, count)
    for station in stations:
        station.deliver_event("station", "join", TRIGGER)
    network.run_until_idle()
    return stations


def publish(station: SimNode, value=READING) -> None:
    station.deliver_event("station", "measured", value)


def heard(stations: list[SimNode]) -> list[int]:
    return [len(station.values("reading")) for station in stations]


def test_a_message_reaches_all_that_follow_once_and_not_its_publisher() -> None:
    network = Network(seed=1, mesh=False)
    stations = following(network, 5)
    network.connect(stations[4], stations[0])  # a ring: it comes by two ways
    publish(stations[2])
    network.run_until_idle()
    assert heard(stations) == [1, 1, 0, 1, 1]
    assert stations[0].values("station") == [stations[2].peer_id]
    assert stations[0].values("reading")[0].tolist() == [1, 2]
    assert network.counters()["messages.delivered"] == 4


def test_who_does_not_follow_passes_nothing_on() -> None:
    network = Network(seed=1, mesh=False)
    stations = bulletin.row(network, 3)
    for station in (stations[0], stations[2]):
        station.deliver_event("station", "join", TRIGGER)
    network.run_until_idle()
    publish(stations[0])
    network.run_until_idle()
    assert heard(stations) == [0, 0, 0]


def test_links_delay_and_lose_messages_as_anything_else() -> None:
    network = Network(seed=1, mesh=False, link=LinkModel(latency_ns=S))
    stations = following(network, 3)
    begun = network.now_ns
    publish(stations[0])
    network.run(until=begun + S + S // 2)
    assert heard(stations) == [0, 1, 0]
    network.run(until=begun + 3 * S)
    assert heard(stations) == [0, 1, 1]
    lossy = Network(seed=1, mesh=False, link=LinkModel(loss=1.0))
    stations = following(lossy, 2)
    publish(stations[0])
    lossy.run_until_idle()
    assert heard(stations) == [0, 0]


def test_a_station_that_crashed_follows_again_from_its_checkpoint() -> None:
    network = Network(seed=1, mesh=False)
    stations = following(network, 3)
    stations[1].checkpoint()
    network.crash(stations[1])
    publish(stations[0])
    network.run_until_idle()
    assert heard(stations) == [0, 0, 0]
    network.restart(stations[1])
    network.run_until_idle()
    publish(stations[0])
    network.run_until_idle()
    assert heard(stations) == [0, 1, 1]


def test_the_same_seed_is_the_same_run() -> None:
    digests = set()
    for _ in range(2):
        network = Network(seed=3, mesh=False, link=LinkModel(loss=0.3, duplication=0.3))
        stations = following(network, 6)
        for _ in range(5):
            publish(stations[0])
        network.run_until_idle()
        digests.add(network.trace.digest)
    assert len(digests) == 1


# -- the component ---------------------------------------------------------------------------


def test_what_is_no_tensor_of_the_type_is_refused_and_named() -> None:
    network = Network(seed=1, mesh=False)
    stations = following(network, 2)
    liar = PeerId.from_seed("liar")
    for payload in (b"", b"\xff" * 40, b"\x00" * 12):
        stations[0].node.deliver_message(liar, "readings", payload)
    network.run_until_idle()
    assert heard(stations) == [0, 0]
    refused = [
        step.attributes["peer"]
        for step in stations[0].seen(steps.Telemetry)
        if step.name == "contribution.refused"
    ]
    assert refused == [liar] * 3


def test_what_is_too_large_for_a_topic_fails_the_op() -> None:
    network = Network(seed=1, mesh=False)
    stations = following(network, 2)
    publish(stations[0], np.zeros(MAX_TOPIC_BYTES // 4 + 1, np.float32))
    network.run_until_idle()
    (failed,) = stations[0].failures()
    assert failed.kind == "PayloadTooLarge"
    assert "send what is larger to each peer" in failed.detail
    assert heard(stations) == [0, 0]


def test_messages_wait_and_the_oldest_go() -> None:
    network = Network(seed=1)
    config = {"readings": {"max_waiting": 2, "event": 2000}}  # nobody takes them
    compiled = bulletin.compile_program()
    stations = [network.add(f"s{n}", compiled, ["station"], config=config) for n in range(2)]
    for station in stations:
        station.deliver_event("station", "join", TRIGGER)
    network.run_until_idle()
    for number in range(4):
        publish(stations[0], np.float32([number]))
    network.run_until_idle()
    waiting = stations[1].component("readings")._waiting
    assert [peer for peer, _ in waiting] == [stations[0].peer_id] * 2
    saved = stations[1].component("readings").serialize()
    other = Topic(TopicConfig())
    other.restore(saved)
    assert other.serialize() == saved
    assert Topic(TopicConfig()).serialize() != saved


class Raw(Module):
    home = "one"

    def body(self, g: Graph) -> None:
        topic = ProtocolSlot("raw", "topic")
        topic.subscribe(g, after=g.input("join", types.TRIGGER))
        topic.publish(g, g.input("said", types.TENSOR_UINT8))
        message, _ = topic.take(g, after=g.input("take", types.TRIGGER))
        g.output("message", message)


def test_bytes_are_as_they_are() -> None:
    network = Network(seed=1)
    compiled = Compiler().bind_protocol("raw", BytesTopic).compile(Raw().build())
    one, other = (network.add(name, compiled, ["one"]) for name in "ab")
    for node in (one, other):
        node.deliver_event("one", "join", TRIGGER)
    network.run_until_idle()
    one.deliver_event("one", "said", np.frombuffer(b"plain", np.uint8))
    network.run_until_idle()
    assert other.component("raw")._waiting[0][1] == b"plain"
    other.deliver_event("one", "take", TRIGGER)
    other.deliver_event("one", "take", TRIGGER)
    network.run_until_idle()
    assert other.values("message")[0].tobytes() == b"plain"
    (failed,) = other.failures()
    assert failed.kind == "NothingPublished"


@pytest.mark.parametrize(
    "wrong", [{"max_waiting": 0}, {"max_waiting": MAX_WAITING + 1}, {"event": 5}]
)
def test_settings_are_checked(wrong) -> None:
    with pytest.raises(InvalidComponentConfig):
        Topic(TopicConfig(**wrong))


# -- the engine ------------------------------------------------------------------------------

protocol_op("test_shout", "Shout", {}, {"cmd": types.COMMAND_ID})


class Shouting(Module):
    home = "one"

    def body(self, g: Graph) -> None:
        ProtocolSlot("shout", "test_shout").shout(g, after=g.input("go", types.TRIGGER))


def shouter(ask, **attributes) -> type:
    def shout(self, ctx: OpContext) -> None:
        ask(ctx)

    name = f"test.Shouter{len(shouters)}"
    made = type("Shouter", (ProtocolComponent,), {"TYPE_NAME": name, "shout": shout, **attributes})
    shouters.append(made)
    return register_component(made)


shouters: list[type] = []


@pytest.mark.parametrize(
    ("ask", "attributes", "why"),
    [
        (lambda ctx: ctx.follow("x"), {}, "uses_topics = True"),
        (lambda ctx: ctx.publish("x", b""), {}, "uses_topics = True"),
        (lambda ctx: ctx.follow(""), {"uses_topics": True}, "no name of a topic"),
        (lambda ctx: ctx.follow("~revoked"), {"uses_topics": True}, "no name of a topic"),
        (lambda ctx: ctx.publish("a b", b""), {"uses_topics": True}, "no name of a topic"),
        (
            lambda ctx: ctx.publish("x" * (MAX_TOPIC_CHARS + 1), b""),
            {"uses_topics": True},
            "no name of a topic",
        ),
        (lambda ctx: ctx.publish("x", "text"), {"uses_topics": True}, "a message is bytes"),
        (lambda ctx: ctx.publish_event(5), {}, "1024 and up"),
        (lambda ctx: [ctx.follow(f"t{n}") for n in range(65)], {"uses_topics": True}, "64 topics"),
    ],
)
def test_what_a_component_may_not_do_with_topics_fails_its_op(ask, attributes, why) -> None:
    network = Network(seed=1)
    compiled = (
        Compiler().bind_protocol("shout", shouter(ask, **attributes)).compile(Shouting().build())
    )
    node = network.add("a", compiled, ["one"])
    node.deliver_event("one", "go", TRIGGER)
    network.run_until_idle()
    (failed,) = node.failures()
    assert why in failed.detail


def engine(limits: Limits | None = None):
    peer = PeerId.from_seed("one")
    compiled = bulletin.compile_program()
    return install(compiled, ["station"], peer_id=peer, seed=1, limits=limits)


def test_a_host_hears_once_of_a_topic_and_again_after_a_restart() -> None:
    node = engine()
    for _ in range(2):
        node.deliver_event("station", "join", TRIGGER)
    made = node.poll(1)
    assert [s for s in made if isinstance(s, steps.FollowTopic)] == [
        steps.FollowTopic(topic="readings", on=True)
    ]
    node.deliver_message(PeerId.from_seed("two"), "readings", b"no tensor")
    saved = node.snapshot()
    again = engine()
    again.restore(saved)
    made = again.poll(2)
    assert steps.FollowTopic(topic="readings", on=True) in made
    assert any(isinstance(s, steps.Telemetry) for s in made)  # the message was not lost


def test_a_snapshot_of_before_there_were_topics_is_loaded() -> None:
    fields = parse(engine().snapshot())
    del fields["tables"]["topics"]
    node = engine()
    node.restore(seal(fields))
    assert not [s for s in node.poll(1) if isinstance(s, steps.FollowTopic)]
    del fields["tables"]["calls"]
    with pytest.raises(SnapshotRefused, match="another version"):
        engine().restore(seal(fields))


def test_messages_beyond_the_ingress_are_refused_and_counted() -> None:
    node = engine(Limits(ingress_bytes=100, ingress_events=2))
    publisher = PeerId.from_seed("two")
    assert not node.deliver_message(publisher, "readings", bytes(101))
    assert node.deliver_message(publisher, "readings", bytes(10))
    assert node.deliver_message(publisher, "readings", bytes(10))
    assert not node.deliver_message(publisher, "readings", bytes(10))
    assert node.counters()["ingress.dropped"] == 2
    node.poll(1)
    assert node.deliver_message(publisher, "readings", bytes(100))  # all of it was given back


def test_a_blocked_peer_is_not_heard() -> None:
    node = engine()
    node.deliver_event("station", "join", TRIGGER)
    node.poll(1)
    publisher = PeerId.from_seed("two")
    node.block_peer(publisher)
    node.deliver_message(publisher, "readings", b"")
    node.poll(2)
    assert node.counters()["topics.denied.blocklisted"] == 1
