"""Randomized gossip on three graphs: the time to the mean, between the bounds of its spectrum.

A start is fixed before the draws; the one that is worst in hindsight is no matter of theorem 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import ConstantView
from bbnode.programs import PairwiseAveraging
from bbnode.sim import MS, LinkModel, Network
from reproduce.experiment import Experiment, Result, Table, near, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = 10
EPSILON = 0.1
RUNS = 20
AT = 10  # the tick at which squared errors are compared: later, a few runs are most of their mean
ERROR = math.sqrt(EPSILON * (1 - EPSILON) / RUNS)  # of a share of runs that is EPSILON
SPREAD_OF = 400  # runs in numpy that say how far runs spread


def graphs(seed: int) -> dict[str, np.ndarray]:
    """Return adjacency matrices: complete, random geometric (connected), ring."""
    complete = ~np.eye(PEERS, dtype=bool)
    ring = np.roll(np.eye(PEERS, dtype=bool), 1, axis=0)
    rng = np.random.default_rng(seed)
    radius = math.sqrt(2 * math.log(PEERS) / PEERS) * 0.8
    while True:
        points = rng.random((PEERS, 2))
        apart = np.linalg.norm(points[:, None] - points[None], axis=2)
        geometric = (apart < radius) & complete
        reach = np.linalg.matrix_power(geometric + np.eye(PEERS), PEERS)
        if (reach > 0).all() and not (geometric == complete).all():
            return {"complete": complete, "random geometric": geometric, "ring": ring | ring.T}


def expected_matrix(graph: np.ndarray) -> np.ndarray:
    """Return E[W] of a tick, for a neighbour that is drawn uniformly."""
    p = graph / graph.sum(axis=1, keepdims=True)
    d = np.diag((p + p.T).sum(axis=1))
    return np.asarray(np.eye(PEERS) - d / (2 * PEERS) + (p + p.T) / (2 * PEERS))


def second_eigenvalue(graph: np.ndarray) -> float:
    """Return lambda_2 of E[W]."""
    return float(np.sort(np.linalg.eigvalsh(expected_matrix(graph)))[-2])


def slowest(graph: np.ndarray) -> np.ndarray:
    """Return the start that is expected to fall by lambda_2 in the first tick, of length 1."""
    _, vectors = np.linalg.eigh(expected_matrix(graph))
    return np.asarray(vectors[:, -2])


def expected_squares(graph: np.ndarray, start: np.ndarray, ticks: int) -> np.ndarray:
    """Return E|x(t) - mean|^2 for t = 0 .. ticks, without any draw.

    E x'Ax after a tick is x'L(A)x before it, with L(A) = E[W A W].
    """
    p = graph / graph.sum(axis=1, keepdims=True)
    form, found = np.eye(PEERS) - 1 / PEERS, []
    pairs = []
    for i, j in np.argwhere(graph):
        w = np.eye(PEERS)
        w[[i, i, j, j], [i, j, i, j]] = 0.5
        pairs.append((p[i, j] / PEERS, w))
    for _ in range(ticks + 1):
        found.append(start @ form @ start)
        form = sum(chance * w @ form @ w for chance, w in pairs)
    return np.array(found)


def drawn_squares(graph: np.ndarray, start: np.ndarray, ticks: int, seed: int) -> np.ndarray:
    """Return |x(t) - mean|^2 of many runs in numpy, [runs, ticks + 1]: how far runs spread."""
    rng = np.random.default_rng([seed, 1])
    near = [np.flatnonzero(row) for row in graph]
    found = np.empty((SPREAD_OF, ticks + 1))
    for run_ in found:
        x = start.copy()
        run_[0] = ((x - x.mean()) ** 2).sum()
        for at in range(ticks):
            i = rng.integers(PEERS)
            j = rng.choice(near[i])
            x[[i, j]] = x[[i, j]].mean()
            run_[at + 1] = ((x - x.mean()) ** 2).sum()
    return found


class Gossip:
    """Peers on a graph, of which one begins an exchange at each tick."""

    def __init__(self, graph: np.ndarray, seed: int) -> None:
        program = PairwiseAveraging(size=1, selector=ConstantView)
        artifact = _artifact(program)
        self.net = Network(seed, link=LinkModel(latency_ns=5 * MS))
        names = [f"peer-{i}" for i in range(PEERS)]
        ids = [str(Network.peer_id(name)) for name in names]
        self.nodes = []
        for i, name in enumerate(names):
            near = tuple(ids[j] for j in np.flatnonzero(graph[i]))
            config: Mapping[str, Any] = {"cohort": {"peers": near, "seed": seed}}
            self.nodes.append(self.net.add(name, artifact, ["peer"], config=config))
        self.net.run_until_idle()
        self.rng = np.random.default_rng([seed, 2])

    def run(self, start: np.ndarray, ticks: int) -> tuple[np.ndarray, float, float]:
        """Return |x(t) - mean|^2 for each tick, how far the sum moved, and a tick from a mean.

        The last is the largest difference of what a tick did from the mean of two peers.
        """
        values = start.astype(np.float32)
        for node, value in zip(self.nodes, values, strict=True):
            # Everybody holds its number before the first exchange counts.
            node.component("mean").contribute(_Here(node.peer_id), value.reshape(1))
        squares, off, held = [float(((start - start.mean()) ** 2).sum())], 0.0, values
        for _ in range(ticks):
            at = int(self.rng.integers(PEERS))
            self.nodes[at].invoke("peer", {"value": values[at].reshape(1)})
            self.net.run_until_idle()
            before = held
            held = np.concatenate([node.component("mean").held for node in self.nodes])
            moved = np.flatnonzero(held != before)
            if len(moved):  # two that hold the same do not move
                off = max(off, float(np.abs(held[moved] - before[moved].mean()).max()))
                off = max(off, float(len(moved) > 2))
            squares.append(float(((held - held.mean()) ** 2).sum()))
        return np.array(squares), float(abs(held.sum() - start.sum())), off


@cache
def _artifact(program: PairwiseAveraging) -> Any:
    return Compiler().bind_all(program.bindings()).compile(program.build())


class _Here:
    """The part of a context that a contribution reads."""

    def __init__(self, peer: Any) -> None:
        self.self_peer = peer


def run(seed: int) -> Result:
    """Run each graph several times from the start that is slowest in expectation."""
    rows, curves, claims = [], {}, []
    moved = off = 0.0
    for name, graph in graphs(seed).items():
        second, start = second_eigenvalue(graph), slowest(graph)
        unit = math.log(1 / EPSILON) / math.log(1 / second)
        lower, upper = math.floor(0.5 * unit), math.ceil(3 * unit)
        found = []
        for at in range(RUNS):
            squares, sum_moved, tick_off = Gossip(graph, RUNS * seed + at).run(start, upper)
            found.append(squares)
            moved, off = max(moved, sum_moved), max(off, tick_off)
        squares = np.stack(found)
        above = np.sqrt(squares) >= EPSILON
        first = np.where(above.all(axis=1), upper + 1, np.argmin(above, axis=1))
        late = float(np.median(first))
        exact = expected_squares(graph, start, upper)
        spread = drawn_squares(graph, start, AT, seed).std(axis=0)[AT]
        rows.append(
            [name, second, float(squares[:, AT].mean()), float(exact[AT]), lower, late, upper]
        )
        curves[name] = (squares.mean(axis=0), exact)
        claims += [
            near(
                f"{name}: after {AT} ticks the mean squared error is what the matrices say",
                float(squares[:, AT].mean()), float(exact[AT]), spread / math.sqrt(RUNS),
            ),
            within(
                f"{name}: theorem 3, from below: at half a unit most runs are not there",
                float(above[:, lower].mean()), EPSILON, 1.0,
            ),
            within(
                f"{name}: theorem 3, from above: at three units no more than one run in ten is not "
                "there, and three standard errors",
                float(above[:, upper].mean()), 0.0, EPSILON + 3 * ERROR,
            ),
        ]  # fmt: skip
    claims += [
        within("a tick is the mean of two peers, and of no others", off, 0.0, 1e-6),
        within("the sum stays", moved, 0.0, 1e-5),
    ]
    title = (
        f"{PEERS} peers from the slowest start, {RUNS} runs: squared error after {AT} ticks, and "
        f"ticks until the error is {EPSILON:g} of that at the start"
    )
    columns = ("graph", "lambda_2", "squared error, ours", "expected", "lower bound",
               "ticks, median", "upper bound")  # fmt: skip

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for color, (name, (found, exact)) in enumerate(curves.items()):
            axes.semilogy(found, color=f"C{color}", label=name)
            axes.semilogy(exact, "--", color=f"C{color}", linewidth=1)
        axes.set_xlabel("ticks (one exchange each)")
        axes.set_ylabel(f"squared error, mean of {RUNS} runs")
        axes.set_title("dashed: expected by the matrices", fontsize="medium")
        axes.legend()

    return Result([Table(title, columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Boyd, Ghosh, Prabhakar and Shah, 2006, doi:10.1109/TIT.2006.874516, theorem 3",
    says=f"the epsilon-averaging time of pairwise gossip on three graphs of {PEERS} peers, "
    f"{RUNS} runs of each from a start that is fixed before, beside the bounds of lambda_2",
    page="docs/methods/gossip-averaging.md",
    run=run,
    methods=["PairwiseAveraging"],
)
