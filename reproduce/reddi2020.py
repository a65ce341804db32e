"""Reddi et al., 2020: optimizers of the server, under differences of the clients' labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.programs import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FederatedTraining,
    FedYogi,
)
from bbnode.verify.reference import Step, adaptive, added, momentum
from reproduce._data import Examples, digits
from reproduce._federation import Federation, rounds_to
from reproduce._numpy import NUMPY_SEED, Perceptron, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, COHORT = 20, 5
BATCH = 10
ALPHAS = (1.0, 0.5, 0.1)
ROUNDS, LAST = 25, 5  # the accuracy is the mean of the last ones, as in the paper
TARGET = 0.8
RATE = 0.3  # of the clients: of 0.1 and 0.3 the better one of every method
LAYERS = (64, 64, 64, 10)
NET = Perceptron(LAYERS)
NUMPY_RUNS = 5
# Each one's rate of the server, its step in numpy, and the accuracy in % of table 1 of the paper,
# CIFAR-10.
TAU, MOMENTUM = 1e-3, 0.9
METHODS: dict[str, tuple[type[FederatedTraining], float, Step, float]] = {
    "FedAvg": (FederatedTraining, 1.0, added(), 72.8),
    "FedAvgM": (FedAvgM, 0.3, momentum(0.3, MOMENTUM), 77.4),
    "FedAdagrad": (FedAdagrad, 0.1, adaptive("adagrad", 0.1, TAU), 72.1),
    "FedAdam": (FedAdam, 0.03, adaptive("adam", 0.03, TAU), 77.4),
    "FedYogi": (FedYogi, 0.03, adaptive("yogi", 0.03, TAU), 78.0),
}

Curve = list[float]


@cache
def program_of(method: str) -> FederatedTraining:
    """Return the program of a method."""
    program, *_ = METHODS[method]
    return program(model=LAYERS, clients=COHORT, batch=BATCH, learning_rate=RATE)


def curve(examples: Examples, method: str, alpha: float, seed: int) -> Curve:
    """Return the accuracy on the test after each round."""
    shares = examples.shares(CLIENTS, "dirichlet", seed=seed, alpha=alpha)
    settings = {"test": examples.tested, "global": {"learning_rate": METHODS[method][1]}}
    clients = [{"data": share} for share in shares]
    federation = Federation(program_of(method), clients, settings, seed=seed)
    return [float(outputs["accuracy"]) for outputs in federation.rounds(ROUNDS)]


def in_numpy(examples: Examples, method: str, alpha: float, seed: int) -> list[float]:
    """Return the last accuracies of runs in numpy, whose cohorts and orders are drawn anew."""
    shares = examples.shares(CLIENTS, "dirichlet", seed=seed, alpha=alpha)
    rows, test = [rows_of(each) for each in shares], rows_of(examples.tested)
    start, step, found = start_of(program_of(method).forward), METHODS[method][2], []
    for number in range(NUMPY_RUNS):
        rng, w = np.random.default_rng([seed, number, NUMPY_SEED]), start
        state: dict[Any, Any] = {}
        accuracies = []
        for _ in range(ROUNDS):
            asked = [rows[at] for at in rng.permutation(CLIENTS)[:COHORT]]
            moves = [
                NET.trained(w, each, rng, epochs=1, batch=BATCH, rate=RATE) - w for each in asked
            ]
            w = w + step(mean(moves, [len(y) for _, y in asked]), state)
            accuracies.append(NET.accuracy(w, *test))
        found.append(final(accuracies))
    return found


def final(found: Curve) -> float:
    """Return the mean of the last rounds, in per cent."""
    return 100 * float(np.mean(found[-LAST:]))


def run(seed: int) -> Result:
    """Train by each method under each alpha."""
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        keys = [(method, alpha) for method in METHODS for alpha in ALPHAS]
        curves = {key: curve(examples, *key, seed) for key in keys}
        runs = {key: in_numpy(examples, *key, seed) for key in keys}
    rows: list[list[Cell]] = []
    for method, (_, rate, _, paper) in METHODS.items():
        row: list[Cell] = [method, rate]
        for alpha in ALPHAS:
            found = curves[method, alpha]
            row += [round(final(found), 1), round(float(np.mean(runs[method, alpha])), 1)]
            row.append(rounds_to(found, TARGET))
        rows.append([*row, paper])
    columns = ["", "rate", *(
        f"alpha {alpha:g}: {what}" for alpha in ALPHAS for what in ("accuracy", "numpy", "rounds")
    ), "paper, CIFAR-10"]  # fmt: skip
    title = (
        f"Accuracy in %, mean of the last {LAST} of {ROUNDS} rounds; rounds to {TARGET:.0%}; rate "
        "of the server"
    )
    return Result([Table(title, columns, rows)], _claims(curves, runs), partial(_draw, curves))


Key = tuple[str, float]


def _claims(curves: Mapping[Key, Curve], runs: Mapping[Key, list[float]]) -> list[Claim]:
    plain, *others = METHODS
    pairs = [(final(curves[plain, alpha]), runs[plain, alpha]) for alpha in ALPHAS]
    text = "the accuracy in % is that of plain numpy, in the mean over alphas"
    made = [beside(f"{plain}: {text}", pairs)]
    for method in others:
        # All methods have one draw of cohorts and orders, here and there.
        pairs = [
            (
                final(curves[method, alpha]) - final(curves[plain, alpha]),
                [*np.subtract(runs[method, alpha], runs[plain, alpha])],
            )
            for alpha in ALPHAS
        ]
        text = f"{method}: the points it is ahead of {plain} are those of plain numpy, in the mean"
        made.append(beside(f"{text} over alphas", pairs))
    return made


def _draw(curves: Mapping[tuple[str, float], Curve], figure: Figure) -> None:
    panels = figure.subplots(1, len(ALPHAS), sharey=True)
    for alpha, axes in zip(ALPHAS, panels, strict=True):
        for method in METHODS:
            axes.plot(range(1, 1 + ROUNDS), curves[method, alpha], label=method, linewidth=1.4)
        axes.set(title=f"alpha = {alpha:g}", xlabel="rounds", ylim=(0, 1))
    panels[0].set_ylabel("accuracy")
    panels[-1].legend(fontsize="small")


EXPERIMENT = Experiment(
    paper="Reddi et al., 2020, arXiv:2003.00295, table 1",
    says=(
        "accuracy of FedAvg, FedAvgM, FedAdagrad, FedAdam and FedYogi on scikit-learn's digits "
        "(not CIFAR-10; an MLP, 20 clients), labels dealt by Dirichlet of alpha 1, 0.5 and 0.1"
    ),
    page="docs/methods/fedadam.md",
    run=run,
    methods=[
        "FedOpt",
        "FedAvgM",
        "FedAvgM, Nesterov",
        "FedAdagrad",
        "FedAdam",
        "FedYogi",
    ],
)
