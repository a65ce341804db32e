"""Li et al., 2020: what FedProx gains where many devices are too slow for all epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.programs import FederatedTraining, FedProx
from bbnode.sim import S
from reproduce._data import written
from reproduce._federation import Federation, Slots
from reproduce.experiment import Claim, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEVICES = 30
COHORT = 10
EPOCHS = 20
BATCH = 10
RATE = 0.01
ROUNDS = 25  # the paper has 200
FEATURES, CLASSES = 60, 10
ALPHA = BETA = 1.0  # how much the models of devices differ, and their features
# Sizes of devices' data: the paper's are 50 more than a lognormal of (4, 2), up to thousands.
LEAST, LOGNORMAL = 10, (2.5, 1.0)
STRAGGLERS = (0.0, 0.5, 0.9)
DEADLINE_S, LATE_S = 60.0, 100
LAST = 8  # rounds whose mean is the final value: curves of this data set are rough

# The paper's figure 1, by name: the program, and what its stragglers do.
METHODS = ("FedAvg, drops stragglers", "FedProx, mu = 0", "FedProx, mu = 1")
PROXIMAL = {METHODS[1]: 0.0, METHODS[2]: 1.0}


@dataclass(frozen=True)
class Fleet:
    """The devices: their data, and who is asked and who is slow in each round."""

    clients: list[Slots]
    pooled: Path  # all examples, on which the training loss is measured
    sizes: list[int]


def synthetic(folder: Path, seed: int) -> Fleet:
    """Write the paper's Synthetic(alpha, beta), section 5.1: y = argmax(softmax(W x + b)).

    Of device k: W and b are of N(u_k, 1) with u_k of N(0, alpha); x is of N(v_k, S) with S
    diagonal, j^-1.2, and v_k of N(B_k, 1) with B_k of N(0, beta).
    """
    rng = np.random.default_rng(seed)
    spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    made: list[tuple[Any, Any]] = []
    for _ in range(DEVICES):
        u = rng.normal(0, ALPHA**0.5)
        weights = rng.normal(u, 1, (FEATURES, CLASSES))
        bias = rng.normal(u, 1, CLASSES)
        v = rng.normal(rng.normal(0, BETA**0.5), 1, FEATURES)
        count = LEAST + int(rng.lognormal(*LOGNORMAL))
        x = (v + spread * rng.normal(size=(count, FEATURES))).astype(np.float32)
        made.append((x, (x @ weights + bias).argmax(axis=1).astype(np.int64)))
    paths = [written(folder, f"device-{at}", x, y) for at, (x, y) in enumerate(made)]
    pooled = written(folder, "all", *map(np.concatenate, zip(*made, strict=True)))
    return Fleet(
        [{"data": {"path": str(path)}} for path in paths], pooled, [len(y) for _, y in made]
    )


def curve(fleet: Fleet, method: str, stragglers: float, seed: int) -> list[float]:
    """Return the loss on all training examples after each round.

    Who is asked, who is slow, and how far a slow one comes, is the same for every method.
    """
    common: dict[str, Any] = {
        "model": (FEATURES, CLASSES), "clients": COHORT, "epochs": EPOCHS, "batch": BATCH,
        "learning_rate": RATE, "quorum": 1, "deadline_s": DEADLINE_S, "seed": seed,
    }  # fmt: skip
    drops = method not in PROXIMAL
    program = FederatedTraining(**common) if drops else FedProx(**common, proximal=PROXIMAL[method])
    server = {"test": {"path": str(fleet.pooled)}}
    federation = Federation(program, fleet.clients, server, seed=seed)
    rng = np.random.default_rng([seed, 1])
    found: list[float] = []
    for _ in range(ROUNDS):
        asked = [int(each) for each in rng.permutation(DEVICES)[:COHORT]]
        done = rng.integers(1, EPOCHS, COHORT, endpoint=True)
        slow = dict(zip(asked[: round(stragglers * COHORT)], done, strict=False))
        federation.online(asked)
        for number in asked:
            client = federation.clients[number]
            epochs = int(slow.get(number, EPOCHS))
            # A device that is slow in this round: in FedAvg its answer comes after the deadline; in
            # FedProx it does the epochs that it can. Its owner would set that in its configuration.
            client.task_ns = LATE_S * S if drops and number in slow else 0
            most = 0 if drops else epochs * -(-fleet.sizes[number] // BATCH)
            model = client.component("local")
            model.config = replace(model.config, max_steps=most)
        found.append(float(federation.round()["loss"]))
    return found


def run(seed: int) -> Result:
    """Train by each method with each share of stragglers."""
    with TemporaryDirectory() as folder:
        fleet = synthetic(Path(folder), seed)
        curves = {
            (method, share): curve(fleet, method, share, seed)
            for share in STRAGGLERS
            for method in METHODS
        }
    final = {key: float(np.mean(each[-LAST:])) for key, each in curves.items()}
    rough = {key: float(np.std(np.diff(each))) for key, each in curves.items()}
    columns = [
        "stragglers",
        *(f"{what}{method}" for what in ("", "roughness: ") for method in METHODS),
    ]
    rows = [
        [share, *(what[method, share] for what in (final, rough) for method in METHODS)]
        for share in STRAGGLERS
    ]
    title = (
        f"Training loss, mean of the last {LAST} of {ROUNDS} rounds; roughness: standard deviation "
        "of its change from round to round"
    )
    return Result([Table(title, columns, rows)], _claims(final, rough), partial(_draw, curves))


def _claims(
    final: Mapping[tuple[str, float], float], rough: Mapping[tuple[str, float], float]
) -> list[Claim]:
    drops, partial_work, proximal = METHODS

    def told(figures: Mapping[tuple[str, float], float], *methods: str) -> str:
        return "; ".join(
            f"{share:.0%}: " + " and ".join(f"{figures[each, share]:.3f}" for each in methods)
            for share in STRAGGLERS
        )

    most = STRAGGLERS[-1]
    steadier = [rough[proximal, each] / rough[partial_work, each] for each in STRAGGLERS]
    return [
        within(
            f"with {most:.0%} stragglers, partial work (mu = 0) has at most nine tenths of the "
            "loss of FedAvg, which drops them",
            final[partial_work, most] / final[drops, most], 0, 0.9,
            told(final, drops, partial_work),
        ),
        within(
            "the proximal term (mu = 1) makes training stabler: the loss changes by rounds at most "
            "nine tenths as much, with each share of stragglers",
            max(steadier), 0, 0.9, told(rough, partial_work, proximal),
        ),
        Claim(
            "without stragglers FedAvg and FedProx with mu = 0 are the same, up to rounding",
            math.isclose(final[drops, 0.0], final[partial_work, 0.0], rel_tol=1e-5),
            told(final, drops, partial_work).partition(";")[0],
        ),
    ]  # fmt: skip


def _draw(curves: Mapping[tuple[str, float], list[float]], figure: Figure) -> None:
    panels = figure.subplots(1, len(STRAGGLERS), sharey=True)
    for share, axes in zip(STRAGGLERS, panels, strict=True):
        for method in METHODS:
            axes.plot(range(1, 1 + ROUNDS), curves[method, share], label=method, linewidth=1.4)
        axes.set(title=f"{share:.0%} stragglers", xlabel="rounds", yscale="log")
    panels[0].set_ylabel("training loss")
    panels[0].legend(fontsize="x-small")


EXPERIMENT = Experiment(
    paper="Li et al., 2020, arXiv:1812.06127, figure 1, Synthetic(1,1)",
    says=(
        "training loss of multinomial logistic regression on the paper's Synthetic(1,1), "
        f"{DEVICES} devices of which {COHORT} are asked, {EPOCHS} epochs, 0, 50 and 90 % "
        "stragglers; devices have fewer examples than the paper's, and there are "
        f"{ROUNDS} rounds of its 200"
    ),
    page="docs/methods/fedprox.md",
    run=run,
    methods=[
        "FedProx",
        "FedProx, partial work",
    ],
)
