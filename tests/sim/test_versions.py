"""Nodes of two versions of a program in one network."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import steps
from bbnode.engine.peers.neighbours import VERSION_REASON
from bbnode.ir.values import ResponseBatch
from bbnode.sim import Network
from tests.sim.versions import version, version_crossings

X = np.array([1.0, 2.0], np.float32)

AGREEING = [(), ("client_body",), ("server_body",), ("added",), ("client_body", "server_body")]


@pytest.mark.parametrize("new", AGREEING)
@pytest.mark.parametrize("old", [(), ("added",)])
def test_versions_whose_crossings_agree_work_together(
    old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    net = Network(0)
    server = net.add("server", version(*old), ["server"])
    net.add("client-old", version(*old), ["client"])
    net.add("client-new", version(*new), ["client"])
    net.run_until_idle()
    execution = server.invoke("server", {"x": X})
    net.run_until_idle()
    for name, factor in (("answers", 2), ("scaled", 3)):
        batch = server.outputs(execution)[name]
        assert isinstance(batch, ResponseBatch)
        assert len(batch.responses) == 2
        assert all(np.array_equal(answer, X * factor) for _, answer in batch.responses)
    assert len(server.values("back")) == 2
    assert all(not node.seen(steps.WireReceiveFailed) for node in net.nodes)
    missed = server.seen(steps.PeerResolveFailed)
    assert [step.peer for step in missed] == (
        [net["client-new"].peer_id] if "added" in old and "added" not in new else []
    )


@pytest.mark.parametrize("edit", ["renamed_port", "changed_type", "bundled"])
def test_what_differs_is_refused_and_the_rest_works(edit: str) -> None:
    net = Network(0)
    server = net.add("server", version(), ["server"])
    client = net.add("client", version(edit), ["client"])
    net.run_until_idle()
    execution = server.invoke("server", {"x": X})
    net.run_until_idle()
    batch = server.outputs(execution)["answers"]
    assert isinstance(batch, ResponseBatch)
    assert len(batch.responses) == 1
    sender, wanted = (server, client) if edit == "renamed_port" else (client, server)
    (left_out,) = sender.seen(steps.PeerResolveFailed)
    assert left_out.peer == wanted.peer_id
    assert left_out.reason == VERSION_REASON
    assert not wanted.seen(steps.WireReceiveFailed)


def test_a_request_that_could_not_be_answered_is_not_sent() -> None:
    net = Network(0)
    server = net.add("server", version(), ["server"])
    other = net.add("other", version("other_answer"), ["client"])
    net.run_until_idle()
    execution = server.invoke("server", {"x": X})
    net.run(until=net.now_ns)  # at once, and not when the deadline is over
    (failed,) = (step for step in server.failures() if step.execution == execution)
    assert failed.kind == "QuorumNotReached"
    assert {step.peer for step in server.seen(steps.PeerResolveFailed)} == {other.peer_id}


def test_a_peer_that_comes_back_upgraded_is_sent_to_again() -> None:
    net = Network(0)
    server = net.add("server", version(), ["server"])
    client = net.add("client", version("renamed_port"), ["client"])
    net.run_until_idle()
    server.checkpoint()
    server.invoke("server", {"x": X})
    net.run_until_idle()
    assert len(server.seen(steps.PeerResolveFailed)) == 1
    net.crash(server)
    net.restart(server)  # the checkpoint knows what the client does not take
    net.run_until_idle()
    server.invoke("server", {"x": X})
    net.run_until_idle()
    assert len(server.seen(steps.PeerResolveFailed)) == 2
    server.node.peer_disconnected(client.peer_id, "upgraded")
    server.node.peer_connected(
        client.peer_id, ("client",), (client.address,), version_crossings("client")
    )
    server.invoke("server", {"x": X})
    net.run_until_idle()
    assert len(server.seen(steps.PeerResolveFailed)) == 2


def test_a_port_of_another_declared_size_is_left_out_and_the_rest_works() -> None:
    net = Network(0)
    server = net.add("server", version("sized"), ["server"])
    client = net.add("client", version("sized", "resized"), ["client"])
    net.run_until_idle()
    server.invoke("server", {"x": np.zeros(4, np.float32)})
    net.run_until_idle()
    missed = server.seen(steps.PeerResolveFailed)
    assert {step.peer for step in missed} == {client.peer_id}
    assert all(
        step.reason
        == "size: response port 'ask' of class 'server': it sends Tensor.FLOAT of [5], we take "
        "Tensor.FLOAT of [4]; let both run the same program"
        for step in missed
    )
    assert not server.seen(steps.WireReceiveFailed)
    assert server.node.connected_peers("client") == (client.peer_id,)
    assert server.node.peers_not_ready() == {}
    assert len(client.seen(steps.PeerResolveFailed)) == 1  # "update", which the server takes of [4]
