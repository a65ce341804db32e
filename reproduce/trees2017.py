"""Trees that clients grow together, beside LightGBM on all examples and on one client's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.programs import FederatedTrees
from reproduce._data import digits
from reproduce._federation import Federation
from reproduce.experiment import Cell, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, ROUNDS = 5, 25
LEAVES, RATE, LEAST = 7, 0.2, 5


def reference(x: Any, y: Any, x_test: Any, y_test: Any) -> float:
    """Return the accuracy of LightGBM with the same settings."""
    import lightgbm

    settings = {
        "objective": "multiclass", "num_class": 10, "num_leaves": LEAVES, "learning_rate": RATE,
        "min_data_in_leaf": LEAST, "verbosity": -1, "num_threads": 1, "deterministic": True,
        "force_row_wise": True,
    }  # fmt: skip
    made = lightgbm.train(settings, lightgbm.Dataset(x, y), ROUNDS)
    return float((np.asarray(made.predict(x_test)).argmax(axis=1) == y_test).mean())


def run(seed: int) -> Result:
    """Grow trees together, and each alone."""
    program = FederatedTrees(
        clients=CLIENTS, features=64, classes=10, leaves=LEAVES, learning_rate=RATE, min_leaf=LEAST,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        clients = [{"data": share} for share in examples.shares(CLIENTS, "iid", seed=seed)]
        federation = Federation(program, clients, {"test": examples.tested}, seed=seed)
        curve = [float(each["accuracy"]) for each in federation.rounds(ROUNDS + 1)]
        with np.load(examples.train) as held, np.load(examples.test) as test:
            x, y, x_test, y_test = held["x"], held["y"], test["x"], test["y"]
    order = np.random.default_rng(seed).permutation(len(y))
    part = order[: len(y) // CLIENTS]
    whole = reference(x, y, x_test, y_test)
    alone = reference(x[part], y[part], x_test, y_test)
    rows: list[list[Cell]] = [["together", curve[-1]], ["LightGBM, all", whole],
                              ["LightGBM, a fifth", alone]]  # fmt: skip
    claims = [
        within("together is within 4 points of all examples", 100 * (whole - curve[-1]), -4, 4),
        within("and 2 points better than one client alone", 100 * (curve[-1] - alone), 2, 100),
    ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(range(1, 2 + ROUNDS), curve, label=f"{CLIENTS} clients together")
        axes.axhline(whole, linestyle="--", label="LightGBM, all examples")
        axes.axhline(alone, linestyle=":", color="grey", label="LightGBM, a fifth of them")
        axes.set(xlabel="round", ylabel="accuracy on test digits")
        axes.legend()

    return Result([Table(f"{ROUNDS} rounds", ["", "accuracy"], rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Ke et al., 2017, LightGBM (NIPS 30), and bagging (Breiman, 1996)",
    says=f"boosted trees of {CLIENTS} clients on scikit-learn's digits, beside LightGBM on all "
    "examples and on a fifth of them",
    page="docs/methods/trees.md",
    run=run,
    methods=["Trees"],
)
