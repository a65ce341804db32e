"""Lloyd, 1982: steps over all clients are those of the pooled examples."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bbnode.programs import FederatedKMeans
from reproduce._data import digits, written
from reproduce._federation import Federation, Slots
from reproduce.experiment import Cell, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, CLUSTERS, STEPS = 10, 10, 30


def pooled_steps(x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the centroids after so many steps over all examples; an empty one stays.

    They are rounded to float32 in between, as they travel: examples between two are many.
    """
    at = start.astype(np.float32)
    for _ in range(STEPS):
        nearest = np.square(x[:, None] - at[None].astype(np.float64)).sum(axis=2).argmin(axis=1)
        at = np.stack(
            [
                x[nearest == k].mean(axis=0) if (nearest == k).any() else at[k]
                for k in range(CLUSTERS)
            ]
        ).astype(np.float32)
    return at


def run(seed: int) -> Result:
    """Cluster digits of clients that know one or two classes each, beside scikit-learn."""
    from sklearn.cluster import KMeans

    with TemporaryDirectory() as name:
        folder = Path(name)
        with np.load(digits(folder, seed).train) as held:
            x, y = held["x"], held["y"]
        order = np.argsort(y, kind="stable")
        clients: list[Slots] = []
        for at, rows_ in enumerate(np.array_split(order, CLIENTS)):
            clients.append({"data": {"path": str(written(folder, f"c{at}", x[rows_], y[rows_]))}})
        start = x[np.random.default_rng(seed).choice(len(x), CLUSTERS, replace=False)]
        common = {"clients": CLIENTS, "clusters": CLUSTERS}
        given = Federation(FederatedKMeans(**common, start=start.tolist()), clients, seed=seed)
        (*_, ours) = given.rounds(STEPS)
        found = Federation(FederatedKMeans(**common, features=64, seed=seed), clients, seed=seed)
        curve = [float(each["inertia"]) for each in found.rounds(STEPS)]
    lloyd = KMeans(CLUSTERS, init=start, n_init=1, max_iter=STEPS, tol=0, algorithm="lloyd").fit(x)
    wanted = pooled_steps(x.astype(np.float64), start)
    best = KMeans(CLUSTERS, n_init=20, random_state=seed).fit(x)
    again, by_numpy = (
        float(np.square(x[:, None] - at[None].astype(np.float64)).sum(axis=2).min(axis=1).sum())
        for at in (ours["centroids"], wanted)
    )
    rows: list[list[Cell]] = [
        ["a given start", again, float(lloyd.inertia_)],
        ["its own start", curve[-1], float(best.inertia_)],
    ]
    claims = [
        within(
            "from a given start it is where steps of numpy over all examples are",
            float(np.abs(ours["centroids"] - wanted).max()), 0, 1e-4,
            f"{np.abs(ours['centroids'] - wanted).max():.1e} off; inertia {again:.1f}, "
            f"{by_numpy:.1f}, and {float(lloyd.inertia_):.1f} of scikit-learn",
        ),
        within(
            "from its own start it is within a tenth of the best of twenty runs of scikit-learn",
            curve[-1] / float(best.inertia_), 0.99, 1.1,
        ),
        within(
            "a step never makes it worse",
            max(b / a for a, b in itertools.pairwise(curve[1:])),
            0, 1 + 1e-5,
        ),
    ]  # fmt: skip

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(range(1, 1 + STEPS), curve, label="bbnode, its own start")
        axes.axhline(float(best.inertia_), linestyle="--", label="scikit-learn, best of 20")
        axes.set(xlabel="step", ylabel="sum of squared distances")
        axes.legend()

    columns = ["start", "bbnode", "scikit-learn"]
    return Result([Table(f"inertia after {STEPS} steps", columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Lloyd, 1982, doi:10.1109/TIT.1982.1056489",
    says=f"{CLUSTERS} clusters of scikit-learn's digits over {CLIENTS} clients that know one or "
    "two classes each, beside scikit-learn on all of them",
    page="docs/methods/kmeans.md",
    run=run,
    methods=["KMeans"],
)
