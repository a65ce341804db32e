"""Statistics, clusters and trees of all clients' examples."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.programs import (
    FederatedHistograms,
    FederatedKMeans,
    FederatedQuantiles,
    FederatedStatistics,
    FederatedTrees,
)
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import Client
from bbnode.verify.runs import Star

Table = npt.NDArray[np.float64]
COUNTS = (70, 30, 110)


def tables(columns: int = 3) -> list[Client]:
    """Return clients whose columns have large means, where sums of squares cancel out."""
    found = []
    for at, count in enumerate(COUNTS):
        draw = np.random.default_rng(60 + at)
        x = draw.normal(1e3 * np.arange(1, columns + 1), 1 + at, (count, columns))
        found.append(Client(x.astype(np.float32).astype(np.float64), draw.integers(0, 4, count)))
    return found


def pooled(clients: list[Client]) -> Table:
    """Return all examples together."""
    return np.concatenate([each.x for each in clients])


@checked("Statistics", "federated-statistics", "mean, deviation and ends of all examples")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, FederatedStatistics(clients=3), tables())
    found, x = star.begin(star.server), pooled(star.peers)
    yield Compared(found["mean"], x.mean(axis=0), "mean")
    yield Compared(found["std"], x.std(axis=0), "std")
    yield Compared(found["minimum"], x.min(axis=0), "minimum")
    yield Compared(found["maximum"], x.max(axis=0), "maximum")
    counts = np.bincount(np.concatenate([each.y for each in star.peers]))
    told = [int(each) for each in found["stats"]["label_counts"].split(",")]
    yield Compared(told, counts, "labels")


@checked("Histograms", "federated-statistics", "counts between equal edges, as numpy's")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, FederatedHistograms(clients=3, bins=8), tables())
    found, x = star.begin(star.server), pooled(star.peers)
    for at in range(x.shape[1]):
        counts, edges = np.histogram(x[:, at], bins=8)
        yield Compared(found["counts"][:, at], counts, "counts")
        yield Compared(found["edges"][:, at], edges, "edges")


@checked("Quantiles", "federated-statistics", "the least values with so many up to them")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, FederatedQuantiles(clients=3, quantiles=(0.1, 0.5, 0.9)), tables())
    found, x = star.begin(star.server), pooled(star.peers)
    wanted = np.quantile(x, (0.1, 0.5, 0.9), axis=0, method="inverted_cdf")
    yield Compared(found["quantiles"], wanted)


@checked("KMeans", "kmeans", "Lloyd's steps over all examples")
def _(folder: Path) -> Iterator[Compared]:
    clusters = 4
    draw = np.random.default_rng(7)
    centres = draw.normal(size=(clusters, 3)) * 3
    clients = []
    for count in COUNTS:
        x = centres[draw.integers(0, clusters, count)] + draw.normal(size=(count, 3))
        x = x.astype(np.float32).astype(np.float64)
        clients.append(Client(x, np.zeros(count, np.int64)))
    x = pooled(clients)
    start = x[:clusters]
    program = FederatedKMeans(clients=3, clusters=clusters, start=start.tolist())
    star, at = Star(folder, program, clients), start
    for found in star.rounds(4):
        squares = np.square(x[:, None] - at[None]).sum(axis=2)
        nearest, before = squares.argmin(axis=1), at
        counts = np.bincount(nearest, minlength=clusters)
        yield Compared(float(found["inertia"]), squares.min(axis=1).sum(), "inertia")
        at = np.stack(
            [x[nearest == k].mean(axis=0) if counts[k] else at[k] for k in range(clusters)]
        )
        yield Compared(found["counts"], counts, "counts")
        yield Compared(found["centroids"], at, "centroids")
        shift = np.linalg.norm(at - before, axis=1).max()
        yield Compared(float(found["shift"]), shift, "shift")


def _stump(x: Table, residual: Table, rate: float) -> tuple[float, float, float]:
    """Return the threshold and the leaves of the split that takes the most squared error away."""
    best, made = -1.0, (0.0, 0.0, 0.0)
    for low, high in itertools.pairwise(np.unique(x)):
        left, right = residual[x <= low], residual[x >= high]
        gain = left.sum() ** 2 / len(left) + right.sum() ** 2 / len(right)
        if gain > best:
            best = gain
            made = ((low + high) / 2, rate * float(left.mean()), rate * float(right.mean()))
    return made


@checked("Trees", "trees", "stumps that each client grows on what is left, by their examples")
def _(folder: Path) -> Iterator[Compared]:
    import onnxruntime

    importlib.import_module("lightgbm")  # which grows them; an extra
    clients, rate = [], 0.3
    for at, count in enumerate((60, 40, 90)):
        draw = np.random.default_rng(80 + at)
        x = draw.integers(0, 8, (count, 1)).astype(np.float64)  # few values: no bins
        y = (x[:, 0] ** 2 / 10 + draw.normal(size=count)).astype(np.float32)
        clients.append(Client(x, y))
    program = FederatedTrees(
        clients=3, features=1, leaves=2, min_leaf=1, learning_rate=rate, evaluate="none"
    )
    star = Star(folder, program, clients)
    grid = np.arange(8, dtype=np.float64)
    counts = [each.count for each in clients]
    mean = np.average([each.y.mean(dtype=np.float64) for each in clients], weights=counts)
    sums = [np.full(each.count, mean) for each in clients]
    values = np.full(len(grid), mean)
    for number, _ in enumerate(star.rounds(3)):
        if number:  # the first round is the mean
            grown = [
                _stump(each.x[:, 0], each.y - own, rate)
                for each, own in zip(clients, sums, strict=True)
            ]

            def added(x: Table, grown: Any = grown) -> Table:
                parts = [np.where(x <= cut, low, high) for cut, low, high in grown]
                return np.asarray(np.average(parts, axis=0, weights=counts))

            sums = [own + added(each.x[:, 0]) for each, own in zip(clients, sums, strict=True)]
            values = values + added(grid)
        held = star.server.component("global")
        twin = held.twin()
        twin.restore(held.serialize())
        session = onnxruntime.InferenceSession(twin.export().SerializeToString())
        (found, *_) = session.run(None, {"x": grid.astype(np.float32).reshape(-1, 1)})
        yield Compared(np.ravel(found), values, f"round {number + 1}")
