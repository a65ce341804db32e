"""D-PSGD on three graphs: as fast a rounds as with all to all, and how far peers are apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.components.gossip import topology
from bbnode.programs import DecentralizedSGD
from bbnode.sim import Network
from reproduce._data import Examples, digits
from reproduce._numpy import NUMPY_SEED, Perceptron, Vector, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = 16
ROUNDS = 12
BATCH, RATE = 45, 0.5
LAYERS = (64, 10)
NET = Perceptron(LAYERS)
NUMPY_RUNS = 8
GRAPHS = ("ring", "torus", "complete")
# 1 less the second largest absolute eigenvalue of weights that are the same on each edge, with
# circulant rows: (1 + 2 cos a) / 3 on a ring, (1 + 2 cos a + 2 cos b) / 5 on a torus of 4 by 4.
GAPS = {"ring": (2 - 2 * np.cos(2 * np.pi / PEERS)) / 3, "torus": 2 / 5, "complete": 1.0}
FLOAT32 = 3e-5  # that a round in float32 is off by at most, as in `bbnode verify`
PARTITIONS = {"iid": "iid", "shards": "two classes each"}


def gap(graph: str) -> float:
    """Return 1 - rho: rho is the second largest absolute eigenvalue of the mixing matrix."""
    peers = sorted(Network.peer_id(f"peer-{i}") for i in range(PEERS))
    rows = [topology.on_graph(graph, peer, peers) for peer in peers]
    w = np.array([[row.get(peer, 0.0) for peer in peers] for row in rows])
    w += np.diag(1 - w.sum(axis=1))
    return float(1 - np.sort(np.abs(np.linalg.eigvalsh(w)))[-2])


def program_of(graph: str, seed: int) -> DecentralizedSGD:
    """Return the program of a graph."""
    return DecentralizedSGD(
        model=LAYERS, graph=graph, batch=BATCH, learning_rate=RATE, seed=seed, evaluate=False
    )


def trained(graph: str, partition: str, data: Examples, seed: int) -> tuple[list[float], Vector]:
    """Return after each round the loss of the mean model, and the distance from it when mixed.

    The loss is on the examples of test; the distance is the mean over peers of its square.
    """
    program = program_of(graph, seed)
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    net = Network(seed)
    shares = data.shares(PEERS, partition, seed=seed)
    nodes = [
        net.add(f"peer-{i}", artifact, ["peer"], config={"data": share})
        for i, share in enumerate(shares)
    ]
    net.run_until_idle()
    test = rows_of(data.tested)
    losses, apart = [], []
    for _ in range(ROUNDS):
        began = [node.invoke("peer", {"tick": values.TRIGGER}) for node in nodes]
        net.run_until_idle()
        found = [node.outputs(each) for node, each in zip(nodes, began, strict=True)]
        models = np.stack([each["model"] for each in found]).astype(np.float64)
        losses.append(NET.loss(models.mean(axis=0), *test))
        apart.append(spread_of(models))
    return losses, np.array(apart)


def spread_of(models: Vector) -> float:
    """Return the mean over peers of the squared distance from the mean model."""
    return float(((models - models.mean(axis=0)) ** 2).sum(axis=1).mean())


def in_numpy(
    graph: str, partition: str, data: Examples, seed: int
) -> tuple[list[float], list[float]]:
    """Return the last loss, and the mean distance, of runs in numpy; orders are drawn anew."""
    peers = [Network.peer_id(f"peer-{i}") for i in range(PEERS)]
    order = sorted(range(PEERS), key=peers.__getitem__)  # by which a graph numbers its peers
    shares = data.shares(PEERS, partition, seed=seed)
    rows, test = [rows_of(shares[at]) for at in order], rows_of(data.tested)
    places = range(PEERS)
    matrix = np.zeros((PEERS, PEERS))
    for at in places:
        around = {
            "ring": [at + 1, at - 1],
            "torus": [at + 4, at - 4, at - at % 4 + (at + 1) % 4,
                      at - at % 4 + (at - 1) % 4],
            "complete": [other for other in places if other != at],
        }[graph]  # fmt: skip
        matrix[at, [other % PEERS for other in around]] = 1 / (1 + len(around))
        matrix[at, at] = 1 / (1 + len(around))
    start = start_of(program_of(graph, seed).forward)
    losses, distances = [], []
    for number in range(NUMPY_RUNS):
        rng, models, apart = np.random.default_rng([seed, number, NUMPY_SEED]), [start] * PEERS, []
        for _ in range(ROUNDS):
            moved = [
                NET.trained(w, mine, rng, epochs=1, batch=BATCH, rate=RATE)
                for w, mine in zip(models, rows, strict=True)
            ]
            mixed = matrix @ np.stack(moved)
            models = [*mixed]
            apart.append(spread_of(mixed))
        losses.append(NET.loss(np.mean(models, axis=0), *test))
        distances.append(float(np.mean(apart[ROUNDS // 2 :])))
    return losses, distances


def of_gaps() -> list[Claim]:
    """Return the claims of the mixing matrices."""
    return [
        within(f"{graph}: the spectral gap is {GAPS[graph]:.4f}, by the eigenvalues' formula",
               gap(graph), GAPS[graph] - 1e-9, GAPS[graph] + 1e-9)
        for graph in GRAPHS
    ]  # fmt: skip


Found = Mapping[tuple[str, str], tuple[list[float], Vector]]


def run(seed: int) -> Result:
    """Train on each graph with both kinds of data."""
    with TemporaryDirectory() as folder:
        data = digits(Path(folder), seed)
        keys = [(partition, graph) for partition in PARTITIONS for graph in GRAPHS]
        curves = {key: trained(key[1], key[0], data, seed) for key in keys}
        runs = {key: in_numpy(key[1], key[0], data, seed) for key in keys}
    last = {key: losses[-1] for key, (losses, _) in curves.items()}
    distance = {key: float(np.mean(apart[ROUNDS // 2 :])) for key, (_, apart) in curves.items()}
    rows: list[list[Cell]] = [
        [PARTITIONS[p], g, gap(g), last[p, g], float(np.mean(runs[p, g][0])), distance[p, g],
         float(np.mean(runs[p, g][1]))]
        for p, g in curves
    ]  # fmt: skip
    claims = of_gaps()
    for partition, name in PARTITIONS.items():
        for graph in GRAPHS:
            losses, distances = runs[partition, graph]
            claims.append(
                beside(
                    f"{name}, {graph}: the loss of the mean model is that of plain numpy",
                    [(last[partition, graph], losses)],
                    ratio=True,
                )
            )
            text = f"{name}, {graph}: peers' squared distance from it is "
            found = distance[partition, graph]
            if graph == "complete":
                claims.append(within(f"{text}nothing, as each mixes all", found, 0, FLOAT32**2))
            else:
                text += "that of plain numpy"
                claims.append(beside(text, [(found, distances)], ratio=True))
    title = f"Digits, {PEERS} peers, {ROUNDS} rounds of one epoch"
    columns = (
        "data",
        "graph",
        "spectral gap",
        "loss of the mean model",
        "numpy",
        "squared distance from it",
        "numpy",
    )
    return Result([Table(title, columns, rows)], claims, partial(_draw, curves))


def _draw(curves: Found, figure: Figure) -> None:
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
