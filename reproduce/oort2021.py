"""Lai et al., 2021: who learns much and is fast is asked more often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.components import ConnectedView, Oort
from bbnode.programs import FederatedTraining
from bbnode.sim import S
from reproduce._data import digits
from reproduce._federation import Federation
from reproduce.experiment import Cell, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, COHORT, ROUNDS = 30, 5, 40
FAST_S, SLOW_S = 1, 10
SELECTORS: dict[str, Any] = {"uniform": ConnectedView, "Oort": Oort}


def trained(name: str, seed: int, folder: Path) -> tuple[list[float], list[float], float]:
    """Return the time and the accuracy after each round, and the share of slow clients asked.

    Every second client is slow; all have shares of one kind.
    """
    examples = digits(folder, seed)
    program = FederatedTraining(
        model=(64, 10), clients=COHORT, batch=16, learning_rate=0.1, quorum=COHORT,
        deadline_s=1e6, selector=SELECTORS[name],
    )  # fmt: skip
    shares = examples.shares(CLIENTS, "iid", seed=seed)
    federation = Federation(
        program, [{"data": share} for share in shares], {"test": examples.tested}, seed=seed
    )
    for at, client in enumerate(federation.clients):
        client.task_ns = (SLOW_S if at % 2 else FAST_S) * S
    times, accuracies = [], []
    asked: Counter[int] = Counter()
    steps = [0] * CLIENTS
    for number_ in range(ROUNDS):
        found = federation.round()
        times.append(federation.network.now_ns / S)
        accuracies.append(float(found["accuracy"]))
        now = [client.component("local").progress.steps for client in federation.clients]
        if number_ >= ROUNDS // 2:  # once it knows most of them
            asked.update(at for at in range(CLIENTS) if now[at] > steps[at])
        steps = now
    slow = sum(count for at, count in asked.items() if at % 2)
    return times, accuracies, slow / asked.total()


def run(seed: int) -> Result:
    """Train with uniform draws and with Oort's."""
    curves = {}
    with TemporaryDirectory() as folder:
        for name in SELECTORS:
            curves[name] = trained(name, seed, Path(folder))
    rows: list[list[Cell]] = [
        [name, slow, times[-1], accuracy[-1]] for name, (times, accuracy, slow) in curves.items()
    ]
    draws = COHORT * (ROUNDS - ROUNDS // 2)
    error = float(np.sqrt(0.25 / draws))
    claims = [
        within(
            "uniform draws ask slow clients as often as they are: half the time",
            curves["uniform"][2], 0.5 - 4 * error, 0.5 + 4 * error,
        ),
        within("Oort asks them in a third of its draws at most", curves["Oort"][2], 0, 1 / 3),
        within(
            "its rounds take less time: 0.8 of that of uniform draws at most",
            curves["Oort"][0][-1] / curves["uniform"][0][-1], 0, 0.8,
        ),
        within(
            "and the model is as good, within five points",
            100 * (curves["Oort"][1][-1] - curves["uniform"][1][-1]), -5, 100,
        ),
    ]  # fmt: skip

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, (times, accuracies, _) in curves.items():
            axes.plot(times, accuracies, label=name)
        axes.set(xlabel="virtual seconds", ylabel="accuracy")
        axes.legend()

    columns = ["", "slow clients asked", "virtual seconds", "accuracy"]
    return Result([Table(f"{ROUNDS} rounds of {COHORT} of {CLIENTS}", columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Lai et al., 2021, arXiv:2010.06081, section 7",
    says=f"{COHORT} of {CLIENTS} clients, of which every second one takes ten times as long, on "
    "scikit-learn's digits; the paper has up to 14,000 phones, images and speech",
    page="docs/methods/oort.md",
    run=run,
    methods=["Oort"],
)
