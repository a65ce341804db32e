"""Peers without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.components import values
from bbnode.programs import (
    DecentralizedSGD,
    GossipTraining,
    MoshpitAveraging,
    MoshpitTraining,
    PairwiseAveraging,
    SwarmTraining,
)
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import Client, Vector
from bbnode.verify.rounds import ROUNDS
from bbnode.verify.runs import SOFTMAX, Line

TRAINING = {key: value for key, value in SOFTMAX.items() if key not in ("clients", "evaluate")}
TICK = {"tick": values.TRIGGER}


def crowd(count: int) -> list[Client]:
    """Return peers that differ in size and examples."""
    return [numpy_.table(20 + 5 * at, 40 + at) for at in range(count)]


def metropolis(edges: set[frozenset[int]], count: int) -> Vector:
    """Return the mixing matrix of a graph: 1 / (1 + the greater degree) for each edge."""
    degrees = [sum(at in edge for edge in edges) for at in range(count)]
    w = np.zeros((count, count))
    for edge in edges:
        a, b = edge
        w[a, b] = w[b, a] = 1 / (1 + max(degrees[a], degrees[b]))
    return w + np.diag(1 - w.sum(axis=1))


def ring(count: int) -> set[frozenset[int]]:
    """Return the edges of a circle."""
    return {frozenset({at, (at + 1) % count}) for at in range(count)}


def grid(side: int, axes: int, number: int) -> Vector:
    """Return Moshpit's matrix of a round: means along one axis of a full grid."""
    count, axis = side**axes, number % axes
    lines = [at // side ** (axis + 1) * side**axis + at % side**axis for at in range(count)]
    return np.array([[(a == b) / side for b in lines] for a in lines], float)


def _mixed(program: Any, folder: Path, count: int, matrices: list[Vector]) -> Iterator[Compared]:
    peers = crowd(count)
    line = Line(program, count, folder=folder, clients=peers)
    start = np.asarray(line.nodes[0].component("local").params(None), np.float64)
    held: Vector = np.stack([start] * count)
    for number, matrix in enumerate(matrices, start=1):
        found = line.step([TICK] * count)
        moved = [client.trained(w) for client, w in zip(peers, held, strict=True)]
        held = matrix @ np.stack(moved)
        yield Compared([each["model"] for each in found], held, f"round {number}")


@checked("D-PSGD, ring", "d-psgd", "local steps, and Metropolis-Hastings' weights on a ring")
def _(folder: Path) -> Iterator[Compared]:
    program = DecentralizedSGD(**TRAINING, graph="ring", evaluate=False)
    yield from _mixed(program, folder, 5, [metropolis(ring(5), 5)] * ROUNDS)


@checked("D-PSGD, a star", "d-psgd", "edges that are given, with unequal degrees")
def _(folder: Path) -> Iterator[Compared]:
    from bbnode.sim import Network

    ids = sorted(Network.peer_id(f"p{at}") for at in range(4))
    pairs = {frozenset({0, at}) for at in (1, 2, 3)} | {frozenset({1, 2})}
    ends = [sorted(pair) for pair in sorted(pairs, key=sorted)]
    edges = [(str(ids[a]), str(ids[b])) for a, b in ends]
    program = DecentralizedSGD(**TRAINING, graph=edges, evaluate=False)
    yield from _mixed(program, folder, 4, [metropolis(pairs, 4)] * ROUNDS)


@checked("Moshpit, training", "moshpit", "local steps, and means along one axis after the other")
def _(folder: Path) -> Iterator[Compared]:
    program = MoshpitTraining(**TRAINING, side=2, axes=2, evaluate=False)
    yield from _mixed(program, folder, 4, [grid(2, 2, number) for number in (1, 2, 3)])


@checked("Moshpit, averaging", "moshpit", "the mean of all after as many rounds as axes")
def _(folder: Path) -> Iterator[Compared]:  # noqa: ARG001
    for side, axes in ((3, 2), (2, 3)):
        count = side**axes
        line = Line(MoshpitAveraging(size=3, side=side, axes=axes), count)
        held = np.random.default_rng(side).normal(size=(count, 3)).astype(np.float32)
        whole = held.mean(axis=0, dtype=np.float64)
        for number in range(1, axes + 1):
            expected = grid(side, axes, number) @ held.astype(np.float64)
            found = line.step([{"value": each} for each in held])
            held = np.stack([each["mean"] for each in found])
            yield Compared(held, expected, f"{side}^{axes}, round {number}")
        yield Compared(held, np.stack([whole] * count), f"{side}^{axes}, the mean of all")


@checked("PairwiseAveraging", "gossip-averaging", "an exchange makes both hold their mean")
def _(folder: Path) -> Iterator[Compared]:  # noqa: ARG001
    for mix in ("pairwise", "push_pull"):
        line = Line(PairwiseAveraging(size=3, mix=mix), 2)
        held = np.random.default_rng(5).normal(size=(2, 3)).astype(np.float32)
        for at in (0, 1, 0):
            line.nodes[at].invoke("peer", {"value": held[at]})
            line.net.run_until_idle()
        mean = np.stack([held.mean(axis=0, dtype=np.float64)] * 2)
        yield Compared([node.component("mean").held for node in line.nodes], mean, mix)


@checked("Gossip, push", "gossip-averaging", "the mean with what others sent, by their examples")
def _(folder: Path) -> Iterator[Compared]:
    peers = crowd(2)
    line = Line(GossipTraining(**TRAINING, evaluate=False), 2, folder=folder, clients=peers)
    held = [np.asarray(each.component("local").params(None), np.float64) for each in line.nodes]
    inbox: list[list[tuple[int, Vector]]] = [[], []]
    for at in (0, 1, 0, 1, 1):
        execution = line.nodes[at].invoke("peer", TICK)
        line.net.run_until_idle()
        found = line.nodes[at].outputs(execution)
        trained = peers[at].trained(held[at])
        inbox[1 - at].append((peers[at].count, trained))
        parts = [(peers[at].count, trained), *inbox[at]]
        held[at] = numpy_.mean([w for _, w in parts], [n for n, _ in parts])
        inbox[at] = []
        yield Compared(found["model"], held[at])


@checked("Swarm", "swarm", "FedAvg whose coordinator is another peer in each round")
def _(folder: Path) -> Iterator[Compared]:
    peers = crowd(4)
    program = SwarmTraining(**TRAINING, peers=4, evaluate=False)
    line = Line(program, 4, folder=folder, clients=peers)
    w = np.asarray(line.nodes[0].component("local").params(None), np.float64)
    for _ in range(ROUNDS):
        w = numpy_.mean([each.trained(w) for each in peers], [each.count for each in peers])
        found = line.step([TICK] * 4)
        yield Compared([each["model"] for each in found], np.stack([w] * 4))
