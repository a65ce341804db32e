"""From whom a site takes: from peers that play a class that sends to it in the program."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import Node, errors, steps
from bbnode.ir import types
from bbnode.ir.envelope import CorrelationKind, decode_envelope
from bbnode.ir.values import PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import bring_up, of, peer

VALUE = np.ones(2, np.float32)
CLIENT = 7


def client() -> tuple[Node, Partition]:
    """A client whose one site takes a request from the server, and another from either class."""
    p = Partition("client")
    p.recv("weights", node=types.TENSOR_FLOAT, senders=["server"], gates=True)
    p.output("trained", "weights")
    p.recv("news", node=types.TENSOR_FLOAT, senders=["server", "client"])
    p.output("heard", "news")
    return bring_up(model(p), "client", me=CLIENT), p


def sent(node: Node, p: Partition, site: str, *, source: int = 1) -> list[str]:
    """What comes of a value for a site: topics that it reached, and kinds of refusal."""
    node.deliver_inbound(peer(source), envelope(peer(source), p.site(site), VALUE))
    made = node.poll(0)
    refused = of(steps.WireReceiveFailed, made)
    assert all(step.peer == peer(source) for step in refused)
    return [e.topic for e in of(steps.AppEvent, made)] + [step.kind for step in refused]


@pytest.mark.parametrize(
    ("classes", "trained", "heard"),
    [
        (["server"], True, True),
        (["other", "server"], True, True),
        (["client"], False, True),
        (["other"], False, False),
        ([], False, False),
        (["server,client"], False, False),
        (["Server"], False, False),
    ],
)
def test_a_site_takes_from_the_classes_that_send_to_it(classes, trained, heard) -> None:
    node, p = client()
    node.peer_connected(peer(1), classes)
    refusal = ["SenderNotOfClass"]
    assert sent(node, p, "weights") == (["trained"] if trained else refusal)
    assert sent(node, p, "news") == (["heard"] if heard else refusal)
    assert node.counters().get("receive.failed.SenderNotOfClass", 0) == 2 - trained - heard
    assert node.executions() == []
    assert node.counters()["ingress.bytes"] == 0


def test_the_refusal_names_both_classes() -> None:
    node, p = client()
    node.peer_connected(peer(1), ["client"])
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("weights"), VALUE))
    node.deliver_inbound(peer(2), envelope(peer(2), p.site("news"), VALUE))
    one, two = of(steps.WireReceiveFailed, node.poll(0))
    assert one.detail.endswith("takes from server, the peer plays client")
    assert two.detail.endswith("takes from client, server, the peer plays no class")
    assert (one.fill, one.payload_size > 0) == (0, True)


def test_nothing_is_decoded_of_what_nobody_may_send() -> None:
    node, p = client()
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("weights"), VALUE, payload=b"\xff"))
    (refused,) = of(steps.WireReceiveFailed, node.poll(0))
    assert refused.kind == "SenderNotOfClass"


def test_what_came_before_the_connection_ended_counts_and_later_nothing() -> None:
    node, p = client()
    node.peer_connected(peer(1), ["server"])
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("weights"), VALUE))
    node.peer_disconnected(peer(1), "gone")
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("weights"), VALUE, wire_req_id=2))
    made = node.poll(0)
    assert [e.topic for e in of(steps.AppEvent, made)] == ["trained"]
    assert [s.kind for s in of(steps.WireReceiveFailed, made)] == ["SenderNotOfClass"]


def test_a_peer_that_comes_back_with_fewer_classes_has_those() -> None:
    node, p = client()
    node.peer_connected(peer(1), ["server"])
    assert sent(node, p, "news") == ["heard"]
    node.peer_connected(peer(1), ["client"])
    assert sent(node, p, "weights") == ["SenderNotOfClass"]
    node.peer_connected(peer(1), ())
    assert sent(node, p, "news") == ["SenderNotOfClass"]


def test_what_a_snapshot_says_of_classes_ends_with_the_life_it_was_made_in() -> None:
    node, p = client()
    node.peer_connected(peer(1), ["server"])
    node.poll(0)
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("news"), VALUE))  # waits in there
    data = node.snapshot()
    again, _ = client()
    again.restore(data)
    # What had come in time is taken; who comes back has to say hello again.
    assert sent(again, p, "weights") == ["heard", "SenderNotOfClass"]
    again.peer_connected(peer(1), ["server"])
    assert sent(again, p, "news") == ["heard"]


def test_a_node_of_two_classes_sends_to_itself() -> None:
    p = Partition("client", inputs=["x", "to"])
    p.send("x", "to", p.site("weights"))
    p.recv("weights", node=types.TENSOR_FLOAT, senders=["server"])
    p.output("trained", "weights")
    node = bring_up(model(p), "client", me=CLIENT)
    node.invoke("client", {"x": VALUE, "to": PeerIdVec([peer(CLIENT)])})
    made = [*node.poll(0), *node.poll(0)]
    assert of(steps.WireReceiveFailed, made) == []
    assert [e.topic for e in of(steps.AppEvent, made)] == ["trained"]


def test_an_answer_has_to_come_from_the_class_that_was_asked() -> None:
    p = Partition("server", inputs=["x", "to"])
    p.request("x", "to", 99, "answers", quorum=1)
    p.output("out", "answers")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(1), ["client"])
    node.peer_connected(peer(2), ["spectator"])
    node.invoke("server", {"x": VALUE, "to": PeerIdVec([peer(1), peer(2)])})
    (one, two) = of(steps.SendEnvelope, node.poll(0))
    number = decode_envelope(b"".join(one.parts)).correlation.wire_req_id
    assert {one.peer, two.peer} == {peer(1), peer(2)}
    for seed in (2, 1):
        who = peer(seed)
        answer = envelope(who, p.site("answers"), VALUE, CorrelationKind.RESPONSE, number)
        node.deliver_inbound(who, answer)
    made = node.poll(1)
    (refused,) = of(steps.WireReceiveFailed, made)
    assert (refused.kind, refused.peer) == ("SenderNotOfClass", peer(2))
    (event,) = of(steps.AppEvent, made)
    ((missing, why),) = event.value.reasons
    assert (missing, why.kind) == (peer(2), "SenderNotOfClass")
    assert list(event.value.peers) == [peer(1)]
    assert list(event.value.missing) == [peer(2)]


def test_a_site_that_names_no_sender_is_not_installed() -> None:
    p = Partition("client")
    p.recv("weights", senders=[])
    with pytest.raises(errors.InvalidArtifact, match="compile the program"):
        bring_up(model(p), "client")
