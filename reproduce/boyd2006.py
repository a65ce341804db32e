"""Randomized gossip on three graphs: the time to the mean, between the bounds of its spectrum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import ConstantView
from bbnode.programs import PairwiseAveraging
from bbnode.sim import MS, LinkModel, Network
from reproduce.experiment import Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = 10
EPSILON = 0.1
MOST_TICKS = 2500


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


def second_eigenvalue(graph: np.ndarray) -> float:
    """Return lambda_2 of E[W], for a neighbour that is drawn uniformly."""
    p = graph / graph.sum(axis=1, keepdims=True)
    d = np.diag((p + p.T).sum(axis=1))
    expected = np.eye(PEERS) - d / (2 * PEERS) + (p + p.T) / (2 * PEERS)
    return float(np.sort(np.linalg.eigvalsh(expected))[-2])


def errors(graph: np.ndarray, seed: int) -> tuple[list[float], float]:
    """Return the error of the worst start after each tick, and by how much the sum moved.

    Peer i begins with the i-th unit vector, so that what all hold is the product of all exchanges.
    """
    program = PairwiseAveraging(size=PEERS, selector=ConstantView)
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    net = Network(seed, link=LinkModel(latency_ns=5 * MS))
    names = [f"peer-{i}" for i in range(PEERS)]
    ids = [str(Network.peer_id(name)) for name in names]
    nodes = []
    for i, name in enumerate(names):
        near = tuple(ids[j] for j in np.flatnonzero(graph[i]))
        config: Mapping[str, Any] = {"cohort": {"peers": near, "seed": seed}}
        nodes.append(net.add(name, artifact, ["peer"], config=config))
    net.run_until_idle()
    start = np.eye(PEERS, dtype=np.float32)
    for node, row in zip(nodes, start, strict=True):
        # Everybody holds its vector before the first exchange counts.
        node.component("mean").contribute(_Here(node.peer_id), row)
    rng, found = np.random.default_rng(seed), [1.0]
    while found[-1] > EPSILON and len(found) <= MOST_TICKS:
        at = int(rng.integers(PEERS))
        nodes[at].invoke("peer", {"value": start[at]})
        net.run_until_idle()
        held = np.stack([node.component("mean").held for node in nodes])
        found.append(float(np.linalg.norm(held - 1 / PEERS, 2)))
    return found, float(np.abs(held.sum(axis=0) - 1).max())


class _Here:
    """The part of a context that a contribution reads."""

    def __init__(self, peer: Any) -> None:
        self.self_peer = peer


def run(seed: int) -> Result:
    rows, curves, claims = [], {}, []
    moved = 0.0
    for name, graph in graphs(seed).items():
        second = second_eigenvalue(graph)
        found, off = errors(graph, seed)
        moved, ticks = max(moved, off), len(found) - 1
        unit = math.log(1 / EPSILON) / math.log(1 / second)
        rate = (found[-1] / found[0]) ** (2 / ticks)
        rows.append([name, second, rate, 0.5 * unit, ticks, 3 * unit])
        curves[name] = (found, second)
        claims.append(
            Claim(
                f"{name}: the averaging time lies between the bounds of theorem 3",
                0.5 * unit <= ticks <= 3 * unit,
                f"{0.5 * unit:.0f} <= {ticks} <= {3 * unit:.0f} ticks",
            )
        )
    times = [row[4] for row in rows]
    claims += [
        Claim(
            "a smaller lambda_2 is faster: complete, then random geometric, then ring",
            times == sorted(times),
            ", ".join(f"{row[0]} {row[4]}" for row in rows),
        ),
        Claim("the sum stays", moved < 1e-5, f"moved by {moved:.1e}"),
    ]
    title = f"{PEERS} peers, worst start, until the error is {EPSILON:g} of that at the start"
    columns = (
        "graph",
        "lambda_2",
        "contraction a tick, ours",
        "lower bound",
        "ticks, ours",
        "upper bound",
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, (found, second)) in enumerate(curves.items()):
            ticks = np.arange(len(found))
            axes.semilogy(ticks, found, color=f"C{number}", label=name)
            axes.semilogy(ticks, second ** (ticks / 2), "--", color=f"C{number}", linewidth=1)
        axes.set_xlabel("ticks (one exchange each)")
        axes.set_ylabel("error of the worst start")
        axes.set_title("dashed: the square root of lambda_2, a tick", fontsize="medium")
        axes.legend()

    return Result([Table(title, columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Boyd, Ghosh, Prabhakar and Shah, 2006, doi:10.1109/TIT.2006.874516, theorem 3",
    says=f"the epsilon-averaging time of pairwise gossip on three graphs of {PEERS} peers, one run "
    "of each, beside the bounds that lambda_2 of the expected matrix gives",
    page="docs/methods/gossip-averaging.md",
    run=run,
)
