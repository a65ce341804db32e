"""Bonawitz et al., 2017: a sum under masks is the sum, also of those who stay."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.programs import FederatedTraining, SecureTraining
from reproduce._data import digits
from reproduce._federation import Federation
from reproduce.experiment import Cell, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, ROUNDS = 12, 6
AWAY = 2  # clients that are not there from the third round on
COMMON: dict[str, Any] = {
    "model": (64, 10), "batch": 120, "epochs": 2, "learning_rate": 0.5, "deltas": True,
    "clients": CLIENTS, "max_steps": 2,
}  # fmt: skip


def run(seed: int) -> Result:
    """Train with and without masks, on the same clients."""
    curves: dict[str, list[np.ndarray]] = {}
    accuracies: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        shares = examples.shares(CLIENTS, "dirichlet", seed=seed, alpha=1.0)
        programs = {
            "FedAvg": FederatedTraining(**COMMON, quorum=CLIENTS - AWAY),
            "SecureTraining": SecureTraining(**COMMON, weighted=True, max_samples=1000),
        }
        for name, program in programs.items():
            federation = Federation(
                program, [{"data": share} for share in shares], {"test": examples.tested},
                seed=seed, keys=True,
            )  # fmt: skip
            curves[name], accuracies[name] = [], []
            for at in range(ROUNDS):
                if at == 2:
                    federation.online(range(CLIENTS - AWAY))
                found = federation.round()
                curves[name].append(np.asarray(found["model"], np.float64))
                accuracies[name].append(float(found["accuracy"]))
    apart = [
        float(np.abs(a - b).max())
        for a, b in zip(curves["FedAvg"], curves["SecureTraining"], strict=True)
    ]
    rows: list[list[Cell]] = [
        [at + 1, CLIENTS if at < 2 else CLIENTS - AWAY, gap, *accuracy]
        for at, (gap, *accuracy) in enumerate(zip(apart, *accuracies.values(), strict=True))
    ]
    moved = float(np.abs(curves["FedAvg"][-1] - curves["FedAvg"][0]).max())
    gaps = [
        abs(a - b) for a, b in zip(accuracies["FedAvg"], accuracies["SecureTraining"], strict=True)
    ]
    claims = [
        within("weights under masks are those without, in every round", max(apart), 0, 1e-4),
        within("and the model does learn: a weight moves by a tenth or more", moved, 0.1, 1e3),
        within("accuracies differ by one test digit at most", max(gaps), 0, 1.01 / 359),
    ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, style in (("FedAvg", "-"), ("SecureTraining", "o")):
            axes.plot(range(1, 1 + ROUNDS), accuracies[name], style, label=name)
        axes.set(xlabel="round", ylabel="accuracy")
        axes.legend()

    columns = ["round", "clients", "largest difference of a weight", *(
        f"accuracy, {name}" for name in accuracies
    )]  # fmt: skip
    return Result([Table("digits, with and without masks", columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Bonawitz et al., 2017, doi:10.1145/3133956.3133982, section 4",
    says=f"FedAvg of {CLIENTS} clients on scikit-learn's digits with and without masks; "
    f"{AWAY} of them go away (the paper measures time and bytes of up to 500 clients)",
    page="docs/methods/secure-aggregation.md",
    run=run,
    methods=["SecureTraining", "SecureTraining, unweighted"],
)
