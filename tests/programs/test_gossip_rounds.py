"""D-PSGD and Moshpit on real nodes, by their formulas; peers that are late, gone, or lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import values
from bbnode.components.gossip import topology
from bbnode.dsl import BadArgument
from bbnode.programs import DecentralizedSGD, MoshpitAveraging, MoshpitTraining
from bbnode.sim import MS, LinkModel, Network, SimNode
from tests.programs.files import CLASSES, FEATURES, compiled, examples, stating_nothing
from tests.programs.strategies.federation import SOFTMAX, Client, close

TRAINING = {name: value for name, value in SOFTMAX.items() if name not in ("clients", "evaluate")}


class Peers:
    """Peers that train, in the order of their PeerIds, and what numpy says of the same."""

    def __init__(self, folder: Path, program: Any, count: int, link: LinkModel | None = None):
        self.net = Network(1, link=link or LinkModel(latency_ns=5 * MS, jitter_ns=5 * MS))
        artifact = compiled(program)
        names = sorted((f"p{i}" for i in range(count)), key=Network.peer_id)
        self.nodes, self.clients = [], []
        for i, name in enumerate(names):
            path = examples(folder, name, 20 + 5 * i, seed=i)
            config = {"data": {"path": path}}
            self.nodes.append(self.net.add(name, artifact, ["peer"], config=config))
            held = np.load(path)
            self.clients.append(Client(held["x"].astype(np.float64), held["y"]))
        self.net.run_until_idle()
        start = np.asarray(self.nodes[0].component("local").params(None)).astype(np.float64)
        self.weights = np.stack([start] * count)

    @property
    def ids(self) -> list[Any]:
        return [node.peer_id for node in self.nodes]

    def round(self, w: np.ndarray) -> list[dict[str, Any]]:
        """Make a round; all that are up have to end with W times what they trained."""
        up = [node for node in self.nodes if node.is_up]
        executions = [node.invoke("peer", {"tick": values.TRIGGER}) for node in up]
        self.net.run_until_idle()
        moved = [c.trained(x) for c, x in zip(self.clients, self.weights, strict=True)]
        self.weights = w @ np.stack(moved)
        found = [node.outputs(each) for node, each in zip(up, executions, strict=True)]
        for node, told in zip(up, found, strict=True):
            assert node.failures() == []
            close(told["model"], self.weights[self.nodes.index(node)], 1e-6)
        return found


def matrix(peers: Peers, row: Any) -> np.ndarray:
    rows = [row(peer, peers.ids) for peer in peers.ids]
    w = np.array([[found.get(peer, 0.0) for peer in peers.ids] for found in rows])
    return w + np.diag(1 - w.sum(axis=1))


@pytest.mark.parametrize("graph", ["ring", "torus"])
def test_a_round_is_local_steps_and_the_matrix(tmp_path: Path, graph: str) -> None:
    program = DecentralizedSGD(**TRAINING, graph=graph, evaluate=False)
    peers = Peers(tmp_path, program, 6)
    w = matrix(peers, lambda one, all_: topology.on_graph(graph, one, all_))
    for number in (1, 2, 3):
        for told in peers.round(w):
            assert (told["stats"]["round"], told["stats"]["missing"]) == (number, 0)


def test_edges_that_are_given_by_peer_ids(tmp_path: Path) -> None:
    ids = sorted(Network.peer_id(f"p{i}") for i in range(3))
    edges = [(str(ids[0]), str(ids[1])), (str(ids[0]), str(ids[2]))]
    peers = Peers(tmp_path, DecentralizedSGD(**TRAINING, graph=edges, evaluate=False), 3)
    pairs = {(ids[0], ids[1]), (ids[0], ids[2])}
    peers.round(matrix(peers, lambda one, _: topology.on_edges(pairs, one)))


def test_groups_of_moshpit_train_and_average(tmp_path: Path) -> None:
    peers = Peers(tmp_path, MoshpitTraining(**TRAINING, side=2, axes=2, evaluate=False), 4)
    for number in (1, 2, 3):
        peers.round(matrix(peers, lambda p, all_, r=number: topology.on_grid(2, 2, r, p, all_)))


def test_a_neighbour_that_is_gone_leaves_its_weight_with_the_others(tmp_path: Path) -> None:
    """Of a ring of four, given by PeerIds, one crashes: its row and column are the identity's."""
    members = [str(Network.peer_id(f"p{i}")) for i in range(4)]
    program = DecentralizedSGD(**TRAINING, members=members, deadline_s=1.0, evaluate=False)
    peers = Peers(tmp_path, program, 4)
    w = matrix(peers, lambda one, all_: topology.on_graph("ring", one, all_))
    peers.round(w)
    peers.net.crash(peers.nodes[2])
    w[1, 1] += w[1, 2]
    w[3, 3] += w[3, 2]
    w[:, 2] = w[2, :] = 0
    found = peers.round(w)
    assert [told["stats"]["missing"] for told in found] == [0, 1, 1]
    assert found[1]["stats"]["missing_why"] == str(peers.ids[2])


def step(net: Network, nodes: Sequence[SimNode], held: dict[str, Any]) -> dict[str, Any]:
    """Make a round of those that are up, with what they hold; return what they hold then."""
    up = [node for node in nodes if node.is_up]
    done = {node.name: node.invoke("peer", {"value": held[node.name]}) for node in up}
    net.run_until_idle()
    net.run(net.now_ns + 50 * MS)
    return {node.name: node.outputs(done[node.name])["mean"] for node in up}


@pytest.mark.parametrize(("side", "axes"), [(3, 2), (2, 3)])
def test_moshpit_is_exact_after_as_many_rounds_as_axes(side: int, axes: int) -> None:
    net = Network(2, link=LinkModel(latency_ns=5 * MS))
    artifact = compiled(MoshpitAveraging(size=2, side=side, axes=axes))
    nodes = [net.add(f"p{i}", artifact, ["peer"]) for i in range(side**axes)]
    net.run_until_idle()
    held = {n.name: np.array([i, i * i], np.float32) for i, n in enumerate(nodes)}
    mean = np.mean([*held.values()], axis=0)
    for _ in range(axes):
        held = step(net, nodes, held)
    for found in held.values():
        close(found, mean, 1e-5)


def test_moshpit_agrees_though_peers_drop_out_and_come_back() -> None:
    net = Network(2, link=LinkModel(latency_ns=5 * MS, loss=0.05))
    artifact = compiled(MoshpitAveraging(size=2, side=3, axes=2, deadline_s=0.5))
    nodes = [net.add(f"p{i}", artifact, ["peer"]) for i in range(9)]
    net.run_until_idle()
    held = {n.name: np.array([i, 1 - i], np.float32) for i, n in enumerate(nodes)}
    everything = dict(held)
    spread = []
    for number in range(10):
        if number == 2:
            nodes[4].checkpoint()
            net.crash("p4")
        if number == 5:
            net.restart("p4")
            net.run_until_idle()
        everything |= step(net, nodes, everything)
        spread.append(np.ptp([value[0] for value in everything.values()]))
    assert spread[-1] < 0.05 * spread[0]
    assert abs(np.mean([value[0] for value in everything.values()]) - 4) < 1.5
    rounds = {node.values("stats")[-1]["round"] for node in nodes}
    assert len(rounds) == 1, "who came back goes on with the others"


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    program = DecentralizedSGD(**TRAINING, evaluate=False)
    link = LinkModel(latency_ns=5 * MS, jitter_ns=9 * MS, loss=0.05)
    found = []
    for _ in range(2):
        peers = Peers(tmp_path, program, 3, link)
        for node in peers.nodes:
            node.invoke("peer", {"tick": values.TRIGGER})
        peers.net.run_until_idle()
        found.append([value.tobytes() for n in peers.nodes for value in n.values("model")])
    assert found[0] == found[1]


def test_a_neighbour_with_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    class Liar(DecentralizedSGD):
        name = "DecentralizedSGD"

    net = Network(1, compares=False)
    lies = compiled(Liar(**{**TRAINING, "model": (1, 2)}, deadline_s=1.0, evaluate=False))
    true = compiled(DecentralizedSGD(**TRAINING, deadline_s=1.0, evaluate=False))
    path = examples(tmp_path, "d", 20, seed=1)
    honest = net.add("honest", true, ["peer"], config={"data": {"path": path}})
    np.savez(tmp_path / "small.npz", x=np.ones((9, 1), np.float32), y=np.zeros(9, np.int64))
    small = {"data": {"path": str(tmp_path / "small.npz")}}
    liar = net.add("liar", lies, ["peer"], config=small)
    net.run_until_idle()
    stating_nothing(honest, liar)
    for node in (honest, liar):
        node.invoke("peer", {"tick": values.TRIGGER})
    net.run_until_idle()
    assert [failure.kind for failure in honest.failures()] == ["ContributionRefused"]
    (stats,) = honest.values("stats")
    assert (stats["missing"], stats["own_share"]) == (1, pytest.approx(1.0))


def test_arguments_are_checked() -> None:
    good: dict[str, Any] = {"model": (FEATURES, CLASSES)}
    for wrong in (
        {"graph": "star"}, {"graph": []}, {"graph": [("a",)]}, {"graph": [("a", "b")]},
        {"staleness": -1}, {"deadline_s": 0}, {"members": "abc"}, {"members": ["abc"]},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            DecentralizedSGD(**good, **wrong).build()
    for wrong in ({"side": 1}, {"axes": 0}, {"size": 0}):
        with pytest.raises(BadArgument):
            MoshpitAveraging(**wrong).build()
    compiled(DecentralizedSGD(**good, graph="complete"))
    compiled(MoshpitTraining(**good))
