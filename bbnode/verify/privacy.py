"""Privacy: sums under masks, clipping, and how much noise there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bbnode.programs import DPFedAvg, DPSGDTraining, FederatedTraining, SecureTraining
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import RATE, Client, Vector
from bbnode.verify.rounds import by_formula, made
from bbnode.verify.runs import Star

QUIET: Final = 1e-6  # a noise that changes no number here
# A model of 4,160 parameters, in which a deviation is known to 1.1 %.
FEATURES, CLASSES = 64, 64
SPREAD: Final = 0.07  # six times that: what a right deviation is off by one time in a billion


@checked("SecureTraining", "secure-aggregation", "the mean of moves that were masked and summed")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(SecureTraining, weighted=True, max_samples=100), numpy_.clients())
    yield from by_formula(star)


@checked("SecureTraining, unweighted", "secure-aggregation", "each client counts once")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(SecureTraining, weighted=False), numpy_.clients())
    yield from by_formula(star, lambda of, w, _: numpy_.mean([c.trained(w) - w for c in of]))


@checked("DPFedAvg", "differential-privacy", "moves of a length at most, over a fixed number")
def _(folder: Path) -> Iterator[Compared]:
    program = made(DPFedAvg, noise=QUIET, epsilon=1e30, clip=0.05)
    yield from by_formula(Star(folder, program, numpy_.clients()), numpy_.clipped(0.05))


@checked("DPFedAvg, both clip", "differential-privacy", "the server by itself, and each client")
def _(folder: Path) -> Iterator[Compared]:
    # A server that clips shorter than its clients, and one that leaves it to them.
    for clip, own in ((0.02, 0.02), (1.0, 0.05)):
        place = folder / str(clip)
        place.mkdir()
        program = made(DPFedAvg, noise=QUIET, epsilon=1e30, clip=0.05)
        server = {"privacy": {"clip": clip}}
        star = Star(place, program, numpy_.clients(), server=server)
        yield from by_formula(star, numpy_.clipped(own))


def _wide() -> list[Client]:
    return [numpy_.table(20, seed, FEATURES, CLASSES) for seed in (1, 2, 3)]


def _noise(folder: Path, noisy: Any, quiet: Any) -> Vector:
    """Return the noise of a round: what it differs by from one that has next to none."""
    found = []
    for at, program in enumerate((noisy, quiet)):
        place = folder / str(at)
        place.mkdir()
        (outputs,) = Star(place, program, _wide()).rounds(1)
        found.append(np.asarray(outputs["model"], np.float64))
    return found[0] - found[1]


@checked("DPFedAvg, noise", "differential-privacy", "deviation noise * clip / clients", SPREAD)
def _(folder: Path) -> Iterator[Compared]:
    given: dict[str, Any] = {"model": (FEATURES, CLASSES), "epsilon": 1e30, "clip": 0.5}
    quiet = made(DPFedAvg, noise=QUIET, **given)
    for noise in (1.0, 2.0):
        place = folder / str(noise)
        place.mkdir()
        found = _noise(place, made(DPFedAvg, noise=noise, **given), quiet)
        deviation = noise * 0.5 / 3
        yield Compared(found.std() / deviation, 1.0, f"deviation of noise {noise:g}")
        yield Compared(found.mean() / deviation, 0.0, f"mean of noise {noise:g}")


@checked("DPFedAvg, epsilon", "differential-privacy", "Renyi's of a Gaussian, by rounds", 0.01)
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(DPFedAvg, noise=1.0, epsilon=1e3), numpy_.clients())
    orders = np.linspace(1.01, 64, 20_000)
    for number, found in enumerate(star.rounds(3), start=1):
        # Mironov, 2017, and the conversion of Canonne, Kamath and Steinke, 2020, proposition 12.
        spent = number * orders / 2 + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)
        yield Compared(found["stats"]["epsilon"] / spent.min(), 1.0, f"round {number}")


def _privately(client: Client, w: Vector, clip: float, steps: int) -> Vector:
    for _ in range(steps):
        each = client.gradients(w)
        lengths = np.linalg.norm(each, axis=1, keepdims=True)
        w = w - RATE * (each * np.minimum(1, clip / lengths)).mean(axis=0)
    return w


@checked("DP-SGD", "dp-sgd", "steps by the clipped gradient of each example")
def _(folder: Path) -> Iterator[Compared]:
    quiet = {"example_noise": QUIET, "example_epsilon": 1e30, "example_clip": 0.4}
    star = Star(folder, made(DPSGDTraining, **quiet), numpy_.clients())
    w = star.start
    for found in star.rounds(2):
        moved = [_privately(client, w, 0.4, 3) for client in star.peers]
        w = numpy_.mean(moved, [each.count for each in star.peers])
        yield Compared(found["model"], w)


@checked("DP-SGD, noise", "dp-sgd", "deviation rate * noise * clip / batch, of each client", SPREAD)
def _(folder: Path) -> Iterator[Compared]:
    given: dict[str, Any] = {
        "model": (FEATURES, CLASSES), "epochs": 1, "batch": 20, "example_epsilon": 1e30,
        "example_clip": 0.5,
    }  # fmt: skip
    programs = [made(DPSGDTraining, example_noise=noise, **given) for noise in (2.0, QUIET)]
    found = _noise(folder, *programs)
    deviation = RATE * 2.0 * 0.5 / 20 / np.sqrt(3)  # of the mean of three clients
    yield Compared(found.std() / deviation, 1.0, "deviation")
    yield Compared(found.mean() / deviation, 0.0, "mean")


@checked("DP-SGD, no clip", "dp-sgd", "where no gradient is longer than the clip: FedAvg")
def _(folder: Path) -> Iterator[Compared]:
    quiet = {"example_noise": QUIET, "example_epsilon": 1e30, "example_clip": 1e3}
    (private,) = Star(folder, made(DPSGDTraining, **quiet), numpy_.clients()).rounds(1)
    star = Star(folder, made(FederatedTraining), numpy_.clients())
    w = star.start + numpy_.fedavg(star.peers, star.start, {})
    yield Compared(private["model"], w, "weights")
