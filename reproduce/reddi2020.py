"""Reddi et al., 2020: optimizers of the server, under differences of the clients' labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bbnode.programs import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FederatedTraining,
    FedYogi,
)
from reproduce._data import Examples, digits
from reproduce._federation import Federation, rounds_to
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, COHORT = 20, 5
BATCH = 10
ALPHAS = (1.0, 0.5, 0.1)
ERROR = 1.4  # points: of an accuracy of 93 % on 359 digits
ROUNDS, LAST = 25, 5  # the accuracy is the mean of the last ones, as in the paper
TARGET = 0.8
CLIENT_RATES = (0.1, 0.3)
# The rates of the server that each tries, and the accuracy in % of table 1 of the paper, CIFAR-10.
METHODS: dict[str, tuple[type[FederatedTraining], tuple[float, ...], float]] = {
    "FedAvg": (FederatedTraining, (1.0,), 72.8),
    "FedAvgM": (FedAvgM, (0.3,), 77.4),
    "FedAdagrad": (FedAdagrad, (0.1,), 72.1),
    "FedAdam": (FedAdam, (0.03,), 77.4),
    "FedYogi": (FedYogi, (0.03,), 78.0),
}
ADAPTIVE = ("FedAdagrad", "FedAdam", "FedYogi")

Curve = list[float]


@cache
def program_of(method: str) -> FederatedTraining:
    """Return the program of a method."""
    program, _, _ = METHODS[method]
    return program(model=(64, 64, 64, 10), clients=COHORT, batch=BATCH)


def curve(
    examples: Examples, method: str, alpha: float, rates: tuple[float, float], seed: int
) -> Curve:
    """Return the accuracy on the test after each round; `rates` of the clients, of the server."""
    local, server = rates
    shares = examples.shares(CLIENTS, "dirichlet", seed=seed, alpha=alpha)
    clients = [{"data": share, "local": {"learning_rate": local}} for share in shares]
    settings = {"test": examples.tested, "global": {"learning_rate": server}}
    federation = Federation(program_of(method), clients, settings, seed=seed)
    return [float(outputs["accuracy"]) for outputs in federation.rounds(ROUNDS)]


def final(found: Curve) -> float:
    """Return the mean of the last rounds, in per cent."""
    return 100 * float(np.mean(found[-LAST:]))


def run(seed: int) -> Result:
    """Train by each method under each alpha, at the best of its rates."""
    best: dict[tuple[str, float], tuple[Curve, tuple[float, float]]] = {}
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        for alpha in ALPHAS:
            for method, (_, server_rates, _) in METHODS.items():
                tried = [
                    (curve(examples, method, alpha, rates, seed), rates)
                    for rates in (
                        (local, server) for local in CLIENT_RATES for server in server_rates
                    )
                ]
                best[method, alpha] = max(tried, key=lambda each: final(each[0]))
    curves = {key: found for key, (found, _) in best.items()}
    rows: list[list[Cell]] = []
    for method, (_, _, paper) in METHODS.items():
        row: list[Cell] = [method]
        for alpha in ALPHAS:
            found, (local, server) = best[method, alpha]
            row += [round(final(found), 1), rounds_to(found, TARGET), f"{local:g}, {server:g}"]
        rows.append([*row, paper])
    columns = ["", *(
        f"alpha {alpha:g}: {what}" for alpha in ALPHAS for what in ("accuracy", "rounds", "rates")
    ), "paper, CIFAR-10"]  # fmt: skip
    title = (
        f"Accuracy in %, mean of the last {LAST} of {ROUNDS} rounds; rounds to {TARGET:.0%}; best "
        "rates of clients and server"
    )
    return Result([Table(title, columns, rows)], _claims(curves), partial(_draw, curves))


def _claims(curves: Mapping[tuple[str, float], Curve]) -> list[Claim]:
    def told(alpha: float) -> str:
        return ", ".join(f"{method} {final(curves[method, alpha]):.1f}" for method in METHODS)

    better = ("FedAvgM", "FedAdam", "FedYogi")

    def gain(method: str, alpha: float) -> float:
        return final(curves[method, alpha]) - final(curves["FedAvg", alpha])

    return [
        *(
            within(
                f"alpha {alpha:g}: the best adaptive optimizer is as good as FedAvg, within two "
                "standard errors of the test",
                max(gain(each, alpha) for each in ADAPTIVE), -2 * ERROR, 100, told(alpha),
            )
            for alpha in ALPHAS
        ),
        *(
            within(
                f"{each} is as good as FedAvg or better, in the mean over alphas, within two "
                "standard errors of the test",
                sum(gain(each, alpha) for alpha in ALPHAS) / len(ALPHAS), -2 * ERROR, 100,
            )
            for each in better
        ),
    ]  # fmt: skip


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
