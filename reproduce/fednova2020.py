"""Wang et al., 2020: unequal local work moves the minimum of FedAvg, and not that of FedNova."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bbnode.programs import FederatedTraining, FedNova
from reproduce._data import written
from reproduce._federation import Federation, Slots
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, within
from reproduce.scaffold2020 import one_weight

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"FedAvg": FederatedTraining, "FedNova": FedNova}
LEAST = (1.0, -1.0)  # the minima of the clients; that of their mean is 0
STEPS = ((5, 5), (3, 7), (1, 9))  # local steps of the clients
RATES = (0.1, 0.01)  # times the curvature, which is 1
ROUNDS_AT = {0.1: 60, 0.01: 400}  # to come to rest


@cache
def program(method: str, rate: float) -> FederatedTraining:
    """Return the program of a method; a client's node bounds its steps."""
    return METHODS[method](
        model=one_weight(), loss="mse", clients=len(LEAST), epochs=max(map(max, STEPS)), batch=1,
        evaluate="none", learning_rate=rate,
    )  # fmt: skip


def distances(folder: Path, method: str, rate: float, steps: tuple[int, ...]) -> list[float]:
    """Return |w| after each round: how far it is from the minimum of the mean."""
    clients: list[Slots] = []
    for at, (least, most) in enumerate(zip(LEAST, steps, strict=True)):
        # The squared error of one example (x, y) with x^2 = 1/2 and y = x times the minimum.
        x = np.full((1, 1), math.sqrt(0.5), np.float32)
        path = written(folder, f"client-{at}", x, x * np.float32(least))
        clients.append({"data": {"path": str(path)}, "local": {"max_steps": most}})
    federation = Federation(program(method, rate), clients)
    return [abs(float(each["model"][0])) for each in federation.rounds(ROUNDS_AT[rate])]


def rest(rate: float, steps: tuple[int, ...]) -> float:
    """Return where FedAvg comes to rest: t steps go 1 - (1 - rate)^t of the way to a minimum."""
    pull = [1 - (1 - rate) ** each for each in steps]
    return abs(sum(a * least for a, least in zip(pull, LEAST, strict=True))) / sum(pull)


def rest_normalised(rate: float, steps: tuple[int, ...]) -> float:
    """Return where FedNova comes to rest: the same moves, over their numbers of steps."""
    pull = [(1 - (1 - rate) ** each) / each for each in steps]
    return abs(sum(a * least for a, least in zip(pull, LEAST, strict=True))) / sum(pull)


def run(seed: int) -> Result:  # noqa: ARG001, nothing is drawn
    """Train two clients with unequal work, at a large and at a small rate."""
    with TemporaryDirectory() as folder:
        curves = {
            (method, rate, steps): distances(Path(folder), method, rate, steps)
            for method in METHODS
            for rate in RATES
            for steps in STEPS
        }
    last = {key: curve[-1] for key, curve in curves.items()}
    rows: list[list[Cell]] = [
        [f"{steps[0]} and {steps[1]}", rate, last["FedAvg", rate, steps], rest(rate, steps),
         abs(steps[1] - steps[0]) / sum(steps), last["FedNova", rate, steps]]
        for steps in STEPS
        for rate in RATES
    ]  # fmt: skip
    columns = ["local steps", "rate", "FedAvg", "formula", "the paper's limit", "FedNova"]
    off = max(abs(row[2] - row[3]) for row in rows)  # type: ignore[operator]
    unequal = STEPS[1:]
    gains = [last["FedNova", 0.1, each] / last["FedNova", 0.01, each] for each in unequal]
    kept = [last["FedAvg", 0.01, each] / last["FedAvg", 0.1, each] for each in unequal]
    claims = [
        Claim(
            "FedAvg rests where clients weigh as much as they worked, however small the rate",
            off < 1e-3 and min(kept) >= 1,
            f"at most {off:.1e} from the formula; at a tenth of the rate {min(kept):.2f} times as "
            "far from the minimum, or more",
        ),
        within(
            "FedNova rests where the mean of the normalised moves is nothing",
            max(
                abs(last["FedNova", rate, steps] - rest_normalised(rate, steps))
                for steps in STEPS
                for rate in RATES
            ),
            0,
            1e-3,
        ),
        Claim(
            "FedNova comes to the minimum as the rate falls",
            min(gains) > 5,
            f"at a tenth of the rate at least {min(gains):.1f} times nearer",
        ),
        Claim(
            "with equal work both are at the minimum",
            all(last[method, rate, STEPS[0]] < 1e-3 for method in METHODS for rate in RATES),
            ", ".join(f"{last[method, 0.01, STEPS[0]]:.1e}" for method in METHODS),
        ),
    ]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(RATES), sharey=True)
        for axes, rate in zip(panels, RATES, strict=True):
            for number, method in enumerate(METHODS):
                for steps, style in zip(STEPS[1:], ("--", "-"), strict=True):
                    label = f"{method}, {steps[0]} and {steps[1]} steps"
                    curve = curves[method, rate, steps]
                    axes.plot(curve, style, color=f"C{number}", label=label)
            axes.set(title=f"rate {rate:g}", xlabel="round", yscale="log")
        panels[0].set_ylabel("distance from the minimum")
        panels[0].legend(fontsize="x-small")

    return Result([Table("distance from the minimum of the mean", columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Wang et al., 2020, arXiv:2007.07481, section 3 and theorem 1",
    says=(
        "two clients whose squared errors have their minima at 1 and -1 make unequal numbers of "
        "local steps; the paper's example has 30 clients, each with a matrix of its own"
    ),
    page="docs/methods/fednova.md",
    run=run,
    methods=[
        "FedNova",
        "FedNova, unequal work",
        "FedNova, momentum",
        "FedNova, proximal",
    ],
)
