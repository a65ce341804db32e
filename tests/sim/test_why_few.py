"""A failure for want of peers says which are connected, and why they can't be chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bbnode.components import values
from bbnode.components.errors import NotEnoughPeers
from bbnode.engine.errors import QuorumNotReached
from bbnode.engine.node import Node
from bbnode.programs import FederatedTraining, GossipTraining
from bbnode.sim import Network, SimNode
from tests.programs.files import compiled, examples

LONG = "x" * 500
GONE = "slot data: no file …/digits.npz; set `path`"


def without_data(clients: int, reason: str = GONE) -> tuple[Network, SimNode]:
    """Return a server with its clients, none of which is ready."""
    artifact = compiled(FederatedTraining(model=(4, 3), evaluate="none", clients=clients or 1))
    net = Network(1)
    for number in range(clients):
        net.add(f"c{number}", artifact, ["client"], config={"data": {"path": "none.npz"}})
    server = net.add("server", artifact, ["server"])
    net.run_until_idle()
    for peer in server.node.everyone_connected():
        server.node.hold_peer(peer, ("client",), reason)
    net.run_until_idle()
    return net, server


def failure_of_a_round(net: Network, node: SimNode) -> Any:
    node.invoke(node.classes[0], {"tick": values.TRIGGER})
    net.run_until_idle()
    return node.failures()[0]


def test_a_round_without_a_ready_client_names_the_reasons() -> None:
    net, server = without_data(2)
    failed = failure_of_a_round(net, server)
    assert failed.kind == NotEnoughPeers.__name__
    lines = [f"{peer.short}: {GONE}" for peer in sorted(server.node.everyone_connected())]
    assert failed.detail.endswith(f"; connected, and can't be chosen: {', '.join(lines)}")


def test_many_long_reasons_are_shortened() -> None:
    net, server = without_data(7, LONG)
    detail = failure_of_a_round(net, server).detail
    assert detail.count("xxx…") == 4
    assert detail.endswith("and 3 more")
    assert len(detail) < 1000


def test_reasons_against_another_class_are_not_named() -> None:
    net, server = without_data(2)
    one, other = server.node.everyone_connected()
    server.node.hold_peer(other, ("auditor",), "its logs are closed")
    net.run_until_idle()
    readiness = server.node._rt.readiness
    text = readiness.left_out("client", net.now_ns)
    assert (one.short in text, other.short in text) == (True, False)
    # Of a class that nobody plays, as a component calls it that was given a list of peers.
    assert other.short in readiness.left_out("peer", net.now_ns)


def test_a_peer_that_failed_and_is_not_tried_yet_is_named() -> None:
    net, server = without_data(1)
    (client,) = server.node.everyone_connected()
    server.node.hold_peer(client, (), "")
    net.run_until_idle()
    neighbours = server.node._rt.neighbours
    while neighbours.usable(client, net.now_ns):
        neighbours.failed(client, "no answer", net.now_ns)
    text = server.node._rt.readiness.left_out("client", net.now_ns)
    assert text.endswith(f"{client.short}: it failed, and is not tried again yet")


def test_peers_that_gossip_and_do_not_fit_are_named(tmp_path: Path) -> None:
    artifact = compiled(GossipTraining(model=(4, 3), evaluate=False))
    net = Network(1)
    path = examples(tmp_path, "a", 8, seed=0)
    node = net.add("a", artifact, ["peer"], config={"data": {"path": path}})
    other = net.add("b", artifact, ["peer"], config={"data": {"path": path}})
    net.run_until_idle()
    node.node.hold_peer(other.peer_id, ("peer",), "columns b, a; the federation has a, b")
    net.run_until_idle()
    failed = failure_of_a_round(net, node)
    assert failed.kind == NotEnoughPeers.__name__
    assert f"can't be chosen: {other.peer_id.short}: columns b, a; the fed" in failed.detail


def test_nobody_is_named_where_nobody_is_left_out() -> None:
    net, server = without_data(0)
    assert failure_of_a_round(net, server).detail.endswith("or lower min_peers")


@pytest.mark.parametrize("few", [True, False])
def test_a_request_that_asks_too_few_says_so_too(few: bool) -> None:
    _, server = without_data(1)
    node: Node = server.node
    error = QuorumNotReached("answers: 0 of 0 peers answered and 1 had to", too_few_asked=few)
    assert ("can't be chosen" in node._rt.why_few(error)) is few
    assert node._rt.why_few(ValueError("else")) == ""
