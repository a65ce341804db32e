"""Gossip averaging with books (`gossip.py`): what is under way comes back, and nothing grows."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.components.contracts import ComponentError
from bbnode.sim import MS, LinkModel, Network, S
from tests.sim import gossip

PEERS = 8


def test_gossip_with_books_gets_to_the_mean_whatever_happens() -> None:
    """A bad link throughout, a split, and a crash to an old snapshot."""
    link = LinkModel(latency_ns=5 * MS, jitter_ns=10 * MS, loss=0.1, duplication=0.1, reorder=0.2)
    network = Network(seed=1, link=link)
    vectors = [(float(i), float(i * i)) for i in range(PEERS)]
    nodes = [gossip.add_peer(network, i, vector) for i, vector in enumerate(vectors)]
    mean = np.mean(vectors, axis=0)
    network.at(S, lambda: network.partition(nodes[: PEERS // 2], nodes[PEERS // 2 :]))
    network.at(2 * S, network.heal_all)
    network.at(S // 2, nodes[3].checkpoint)
    network.at(S + S // 2, lambda: network.crash(nodes[3]))
    network.at(2 * S, lambda: network.restart(nodes[3]))
    network.run(until=S)
    assert gossip.disagreement(network, mean) > 0.05
    network.run(until=12 * S)
    assert gossip.disagreement(network, mean) < 1e-9
    counts = network.counters()
    assert all(counts[f"envelopes.{name}"] > 50 for name in ("sent", "lost", "duplicated"))
    assert gossip.push_sum(nodes[3]).estimate() == pytest.approx([3.5, 17.5])
    assert max(gossip.push_sum(node).imbalance() for node in nodes) < 1e-9


def gossiping(values, link: LinkModel | None = None) -> Network:
    network = Network(link=link)
    for number, value in enumerate(values):
        gossip.add_peer(network, number, value)
    return network


def test_mass_that_is_under_way_comes_back_with_the_next_message() -> None:
    """All messages are lost for a while: what they carried is only late."""
    network = gossiping([(0.0,), (10.0,)], LinkModel(loss=1.0))
    network.run(until=S)
    peers = [gossip.push_sum(node) for node in network.nodes]
    assert sum(peer.held[-1] for peer in peers) < 1e-5
    network.set_links(LinkModel())
    network.run(until=4 * S + 10 * MS)  # between two ticks, with nothing under way
    assert sum(peer.held[-1] for peer in peers) == pytest.approx(2)
    assert [peer.estimate()[0] for peer in peers] == [pytest.approx(5)] * 2


def test_a_share_of_another_length_is_refused() -> None:
    network = gossiping([(1.0,), (1.0, 2.0)])
    network.run(until=S)
    for node in network.nodes:
        assert {failed.kind for failed in node.failures()} == {"UnusableShare"}
        assert not node.values("estimate")
        assert gossip.push_sum(node).imbalance() < 1e-12


def test_a_peer_saves_its_books_to_the_last_bit() -> None:
    network = gossiping([(0.1,), (0.2,), (0.7,)])
    network.run(until=S)
    known = gossip.push_sum(network.nodes[0])
    fresh = gossip.PushSumWithBooks(known.config)
    fresh.restore(known.serialize())
    assert fresh.serialize() == known.serialize()
    assert fresh.held.tolist() == known.held.tolist()
    for garbage in (b"", b"[]", b"[1, 2, 3]", b'[[1], {}, {"a": "b"}]', b"\xff"):
        with pytest.raises(ComponentError, match="not ours"):
            fresh.restore(garbage)
    assert fresh.serialize() == known.serialize()


def test_books_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(gossip, "MAX_NEIGHBOURS", 1)
    network = gossiping([(0.0,)] * 3)
    network.run(until=S)
    assert {f.kind for n in network.nodes for f in n.failures()} == {"TooManyNeighbours"}
    assert all(gossip.push_sum(node).imbalance() < 1e-12 for node in network.nodes)
