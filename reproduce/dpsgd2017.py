"""D-PSGD on three graphs: as fast a rounds as with all to all, and how far peers are apart."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.components.gossip import topology
from bbnode.programs import DecentralizedSGD
from bbnode.sim import Network
from reproduce._data import digits
from reproduce.experiment import Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = 16
ROUNDS = 15
GRAPHS = ("ring", "torus", "complete")
PARTITIONS = {"iid": "iid", "shards": "two classes each"}


def gap(graph: str) -> float:
    """Return 1 - rho: rho is the second largest absolute eigenvalue of the mixing matrix."""
    peers = sorted(Network.peer_id(f"peer-{i}") for i in range(PEERS))
    rows = [topology.on_graph(graph, peer, peers) for peer in peers]
    w = np.array([[row.get(peer, 0.0) for peer in peers] for row in rows])
    w += np.diag(1 - w.sum(axis=1))
    return float(1 - np.sort(np.abs(np.linalg.eigvalsh(w)))[-2])


def trained(graph: str, partition: str, folder: Path, seed: int) -> tuple[list[float], list[float]]:
    """Return after each round the loss of the mean model, and the distance from it before mixing.

    The loss is on the examples of test; the distance is the mean over peers of its square.
    """
    data = digits(folder, seed)
    program = DecentralizedSGD(
        model=(64, 10), graph=graph, batch=45, learning_rate=0.5, seed=seed, evaluate=False
    )
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    net = Network(seed)
    shares = data.shares(PEERS, partition, seed=seed)
    nodes = [
        net.add(f"peer-{i}", artifact, ["peer"], config={"data": share})
        for i, share in enumerate(shares)
    ]
    net.run_until_idle()
    held = np.load(data.test)
    losses, apart = [], []
    for _ in range(ROUNDS):
        began = [node.invoke("peer", {"tick": values.TRIGGER}) for node in nodes]
        net.run_until_idle()
        found = [node.outputs(each) for node, each in zip(nodes, began, strict=True)]
        models = np.stack([each["model"] for each in found]).astype(np.float64)
        mean = models.mean(axis=0)
        scores = held["x"] @ mean[:640].reshape(64, 10) + mean[640:]
        scores -= scores.max(axis=1, keepdims=True)
        right = scores[np.arange(len(scores)), held["y"]]
        losses.append(float((np.log(np.exp(scores).sum(axis=1)) - right).mean()))
        apart.append(float(((models - mean) ** 2).sum(axis=1).mean()))
    return losses, apart


def run(seed: int) -> Result:
    curves = {}
    with TemporaryDirectory() as folder:
        for partition in PARTITIONS:
            for graph in GRAPHS:
                curves[partition, graph] = trained(graph, partition, Path(folder), seed)
    gaps = {graph: gap(graph) for graph in GRAPHS}
    last = {key: losses[-1] for key, (losses, _) in curves.items()}
    distance = {key: float(np.mean(apart[ROUNDS // 2 :])) for key, (_, apart) in curves.items()}
    rows = [[PARTITIONS[p], g, gaps[g], last[p, g], distance[p, g]] for p, g in curves]
    worst = max(abs(last["iid", graph] / last["iid", "complete"] - 1) for graph in GRAPHS)
    skewed = [last["shards", graph] for graph in GRAPHS]
    claims = [
        Claim(
            "with data of one kind the mean model learns as fast on a sparse graph as with all",
            worst < 0.1,
            f"after {ROUNDS} rounds the loss differs by {worst:.1%} at most",
        ),
        Claim(
            "where peers' data differ, a smaller spectral gap is slower",
            skewed == sorted(skewed, reverse=True),
            ", ".join(f"{graph} {each:.3f}" for graph, each in zip(GRAPHS, skewed, strict=True)),
        ),
    ]
    for partition, name in PARTITIONS.items():
        found = [distance[partition, graph] for graph in GRAPHS]
        claims.append(
            Claim(
                f"{name}: peers are the further apart, the smaller the spectral gap is",
                found == sorted(found, reverse=True),
                ", ".join(f"{graph} {each:.2e}" for graph, each in zip(GRAPHS, found, strict=True)),
            )
        )
    title = f"Digits, {PEERS} peers, {ROUNDS} rounds of one epoch"
    columns = (
        "data",
        "graph",
        "spectral gap",
        "loss of the mean model",
        "squared distance from it",
    )

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for (partition, graph), (losses, apart) in curves.items():
            style = {
                "color": f"C{GRAPHS.index(graph)}",
                "label": f"{graph}, {PARTITIONS[partition]}",
            }
            style["linestyle"] = "-" if partition == "iid" else "--"
            rounds = np.arange(1, ROUNDS + 1)
            left.plot(rounds, losses, **style)
            if graph != "complete":
                right.semilogy(rounds, apart, **style)
        left.set_ylabel("loss of the mean model")
        right.set_ylabel("squared distance from it")
        for axes in (left, right):
            axes.set_xlabel("round")
        left.legend(fontsize="small")

    return Result([Table(title, columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Lian et al., 2017, arXiv:1705.09056, theorem 1 and figure 2",
    says="loss and consensus distance on ring, torus and complete graph, of iid data as in the "
    f"paper and of peers with two classes each; {PEERS} peers "
    "and softmax regression of digits where the paper has 7 to 112 and ResNets of CIFAR-10",
    page="docs/methods/d-psgd.md",
    run=run,
    methods=[
        "D-PSGD, ring",
        "D-PSGD, a star",
    ],
)
