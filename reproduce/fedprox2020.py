"""Li et al., 2020: what FedProx gains where many devices are too slow for all epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from reproduce._numpy import NUMPY_SEED, Perceptron, mean, rows_of, start_of
from reproduce.experiment import Claim, Experiment, Result, Table, beside, within

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
NET = Perceptron((FEATURES, CLASSES))
NUMPY_RUNS = 4
SAME = 1e-5  # relative, of losses that are equal up to rounding
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


def asked_of(stragglers: float, seed: int) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Yield the devices that each round asks, and the epochs that each slow one makes in time."""
    rng = np.random.default_rng([seed, 1])
    for _ in range(ROUNDS):
        asked = [int(each) for each in rng.permutation(DEVICES)[:COHORT]]
        done = rng.integers(1, EPOCHS, COHORT, endpoint=True)
        slow = dict(zip(asked[: round(stragglers * COHORT)], map(int, done), strict=False))
        yield asked, slow


def program_of(method: str, seed: int) -> FederatedTraining:
    """Return the program of a method; its first weights are drawn by the seed."""
    common: dict[str, Any] = {
        "model": (FEATURES, CLASSES), "clients": COHORT, "epochs": EPOCHS, "batch": BATCH,
        "learning_rate": RATE, "quorum": 1, "deadline_s": DEADLINE_S, "seed": seed,
    }  # fmt: skip
    if method not in PROXIMAL:
        return FederatedTraining(**common)
    return FedProx(**common, proximal=PROXIMAL[method])


def curve(fleet: Fleet, method: str, stragglers: float, seed: int) -> list[float]:
    """Return the loss on all training examples after each round.

    Who is asked, who is slow, and how far a slow one comes, is the same for every method.
    """
    drops, program = method not in PROXIMAL, program_of(method, seed)
    server = {"test": {"path": str(fleet.pooled)}}
    federation = Federation(program, fleet.clients, server, seed=seed)
    found: list[float] = []
    for asked, slow in asked_of(stragglers, seed):
        federation.online(asked)
        for number in asked:
            client, epochs = federation.clients[number], slow.get(number, EPOCHS)
            # A device that is slow in this round: in FedAvg its answer comes after the deadline; in
            # FedProx it does the epochs that it can. Its owner would set that in its configuration.
            client.task_ns = LATE_S * S if drops and number in slow else 0
            most = 0 if drops else epochs * -(-fleet.sizes[number] // BATCH)
            model = client.component("local")
            model.config = replace(model.config, max_steps=most)
        found.append(float(federation.round()["loss"]))
    return found


def in_numpy(fleet: Fleet, method: str, stragglers: float, seed: int) -> list[list[float]]:
    """Return the curves of runs in numpy, with the same stragglers and orders drawn anew."""
    rows, pooled = (
        [rows_of(each["data"]) for each in fleet.clients],
        rows_of({"path": fleet.pooled}),
    )
    start = start_of(program_of(method, seed).forward)
    found = []
    for number in range(NUMPY_RUNS):
        rng, w, losses = np.random.default_rng([seed, number, NUMPY_SEED]), start, []
        for asked, slow in asked_of(stragglers, seed):
            counted = [at for at in asked if at not in slow or method in PROXIMAL]
            trained = [
                NET.trained(
                    w, rows[at], rng, epochs=slow.get(at, EPOCHS), batch=BATCH, rate=RATE,
                    proximal=PROXIMAL.get(method, 0.0), anchor=w,
                )
                for at in counted
            ]  # fmt: skip
            w = mean(trained, [fleet.sizes[at] for at in counted])
            losses.append(NET.loss(w, *pooled))
        found.append(losses)
    return found


def final_of(losses: list[float]) -> float:
    """Return the mean loss of the last rounds."""
    return float(np.mean(losses[-LAST:]))


def roughness_of(losses: list[float]) -> float:
    """Return the standard deviation of the loss's change from round to round."""
    return float(np.std(np.diff(losses)))


def run(seed: int) -> Result:
    """Train by each method with each share of stragglers."""
    with TemporaryDirectory() as folder:
        fleet = synthetic(Path(folder), seed)
        curves = {
            (method, share): curve(fleet, method, share, seed)
            for share in STRAGGLERS
            for method in METHODS
        }
        # Without stragglers FedAvg is FedProx with mu = 0.
        runs = {key: in_numpy(fleet, *key, seed) for key in curves if key != (METHODS[0], 0.0)}
    final = {key: final_of(each) for key, each in curves.items()}
    rough = {key: roughness_of(each) for key, each in curves.items()}
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
    return Result([Table(title, columns, rows)], _claims(curves, runs), partial(_draw, curves))


Key = tuple[str, float]


def _claims(
    curves: Mapping[Key, list[float]], runs: Mapping[Key, list[list[float]]]
) -> list[Claim]:
    made = []
    for method in METHODS:
        keys = [key for key in runs if key[0] == method]
        for what, of in (("loss", final_of), ("roughness", roughness_of)):
            pairs = [(of(curves[key]), [of(each) for each in runs[key]]) for key in keys]
            text = f"{method}: the {what} is that of plain numpy, in the mean of stragglers' shares"
            made.append(beside(text, pairs, ratio=True))
    plain, partial_work = (np.array(curves[method, 0.0]) for method in METHODS[:2])
    text = "without stragglers FedAvg and FedProx with mu = 0 are the same, up to rounding"
    off = float(np.abs(plain / partial_work - 1).max())
    return [*made, within(text, off, 0, SAME)]


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
