"""Averaging and training by exchanges of pairs, with messages lost and peers gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import ConnectedView, OrtBackend, concrete, values
from bbnode.dsl import BadArgument
from bbnode.engine.errors import InputShapeMismatch
from bbnode.programs import GossipTraining, PairwiseAveraging
from bbnode.sim import MS, LinkModel, Network, SimNode
from tests.programs.files import CLASSES, FEATURES, compiled, examples
from tests.programs.strategies.federation import SOFTMAX, Client, close

VALUES = [np.array([i, i * i, 1 - i], np.float32) for i in range(6)]
MEAN = np.mean(VALUES, axis=0)


def averaging(link: LinkModel | None = None, **given: Any) -> tuple[Network, list[SimNode]]:
    net = Network(3, link=link or LinkModel(latency_ns=5 * MS))
    artifact = compiled(PairwiseAveraging(size=3, **given))
    nodes = [net.add(f"p{i}", artifact, ["peer"]) for i in range(len(VALUES))]
    net.run_until_idle()
    return net, nodes


def tick(net: Network, nodes: list[SimNode], rounds: int, apart_ns: int = 0) -> None:
    """Let each peer exchange in each round, so much after the one before it."""
    for _ in range(rounds):
        for node, value in zip(nodes, VALUES, strict=True):
            if node.is_up:
                node.invoke("peer", {"value": value})
            if apart_ns:
                net.run(net.now_ns + apart_ns)
        net.run_until_idle()


def total(nodes: list[SimNode]) -> np.ndarray:
    return sum(node.component("mean").held for node in nodes)


def test_peers_one_after_the_other_come_to_the_mean() -> None:
    net, nodes = averaging()
    tick(net, nodes, 14, apart_ns=100 * MS)
    for node in nodes:
        close(node.values("mean")[-1], MEAN, 2e-3)
        assert [stats["exchanged"] for stats in node.values("stats")[1:]] == [1] * 13
        assert node.failures() == []
    np.testing.assert_allclose(total(nodes), 6 * MEAN, atol=1e-6)


@pytest.mark.parametrize("mix", ["pairwise", "push_pull"])
def test_the_sum_stays_where_all_tick_at_once_and_messages_are_lost(mix: str) -> None:
    link = LinkModel(latency_ns=5 * MS, jitter_ns=8 * MS, loss=0.3)
    net, nodes = averaging(link, mix=mix, deadline_s=0.2)
    tick(net, nodes, 12)
    assert any(stats["taken_back"] for node in nodes for stats in node.values("stats"))
    net.set_links(LinkModel(latency_ns=5 * MS))
    tick(net, nodes, 22, apart_ns=30 * MS)
    np.testing.assert_allclose(total(nodes), 6 * MEAN, atol=1e-5)
    for node in nodes:
        close(node.component("mean").held, MEAN, 1e-3)


def test_a_peer_that_crashes_takes_what_it_held_and_no_more() -> None:
    net, nodes = averaging(deadline_s=0.5)
    tick(net, nodes, 2, apart_ns=50 * MS)
    lost = nodes[0].component("mean").held
    net.crash("p0")
    tick(net, nodes, 18, apart_ns=50 * MS)
    np.testing.assert_allclose(total(nodes[1:]), 6 * MEAN - lost, atol=1e-5)
    for node in nodes[1:]:
        close(node.component("mean").held, (6 * MEAN - lost) / 5, 1e-3)
        assert node.failures() == []


def test_the_same_seed_gives_the_same_bits() -> None:
    found = []
    for _ in range(2):
        net, nodes = averaging(LinkModel(latency_ns=5 * MS, jitter_ns=9 * MS, loss=0.1))
        tick(net, nodes, 2, apart_ns=20 * MS)
        found.append(b"".join(node.component("mean").serialize() for node in nodes))
    assert found[0] == found[1]


def test_training_in_pairs_is_local_steps_and_means(tmp_path: Path) -> None:
    program = GossipTraining(**without_clients(), mix="pairwise", evaluate=False)
    net, artifact = Network(1), compiled(program)
    nodes, clients = [], []
    for i, count in enumerate((20, 30)):
        path = examples(tmp_path, f"c{i}", count, seed=i)
        nodes.append(net.add(f"p{i}", artifact, ["peer"], config={"data": {"path": path}}))
        held = np.load(path)
        clients.append(Client(held["x"].astype(np.float64), held["y"]))
    net.run_until_idle()
    start = np.asarray(nodes[0].component("local").params(None)).astype(np.float64)
    found = [start, start]
    for turn in range(6):
        mine, other = turn % 2, 1 - turn % 2
        began = turn < 1
        execution = nodes[mine].invoke("peer", {"tick": values.TRIGGER})
        net.run_until_idle()
        found[mine] = clients[mine].trained(found[mine])
        if not began:
            found[mine] = found[other] = (found[0] + found[1]) / 2
        told = nodes[mine].outputs(execution)
        assert told["stats"]["exchanged"] == (not began)
        close(told["model"], found[mine], 1e-5)


def without_clients() -> dict[str, Any]:
    return {name: value for name, value in SOFTMAX.items() if name not in ("clients", "evaluate")}


def test_arguments_are_checked() -> None:
    good = {"model": (FEATURES, CLASSES)}
    with pytest.raises(BadArgument, match="mix='pull'"):
        GossipTraining(**good, mix="pull").build()
    with pytest.raises(BadArgument, match="neighbours=2"):
        GossipTraining(**good, mix="push_pull", neighbours=2).build()
    with pytest.raises(BadArgument, match="selector"):
        PairwiseAveraging(selector=OrtBackend).build()
    with pytest.raises(BadArgument, match="selector"):
        PairwiseAveraging(selector=concrete(OrtBackend)).build()
    with pytest.raises(BadArgument, match="size=0"):
        PairwiseAveraging(size=0).build()
    compiled(PairwiseAveraging(selector=concrete(ConnectedView, seed=3)))
    compiled(GossipTraining(**good, selector="bbnode.ConnectedView"))


def test_a_value_of_another_length_is_refused() -> None:
    _, nodes = averaging()
    with pytest.raises(InputShapeMismatch):
        nodes[0].invoke("peer", {"value": np.zeros(2, np.float32)})
