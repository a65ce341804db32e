"""Rules of the server against clients that lie: nine clients of one size, two of which lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.components import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    TrimmedMean,
    concrete,
)
from bbnode.programs import FederatedTraining
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import CLASSES, Client, Vector
from bbnode.verify.rounds import ROUNDS, made
from bbnode.verify.runs import Star

Points = npt.NDArray[np.float64]
COUNTS = (20, 30, 25, 40, 35, 22, 28, 33, 50, 27, 31)
LIARS = 2
FIRST_SEED = 5432  # of examples whose Krum is another one with a neighbour more, or one less


def crowd() -> list[Client]:
    """Return eleven clients, of which the first two have other labels than the rest."""
    found = [numpy_.table(count, seed) for seed, count in enumerate(COUNTS, start=FIRST_SEED)]
    wrong = [Client(each.x, (each.y + 1) % CLASSES) for each in found[:LIARS]]
    return [*wrong, *found[LIARS:]]


def _rule(
    name: str, page: str, about: str, aggregator: Any, rule: Callable[[Points, Points], Vector],
    **more: Any,
) -> None:  # fmt: skip
    @checked(name, page, about)
    def _(folder: Path) -> Iterator[Compared]:
        given = {"clients": len(COUNTS), "batch": max(COUNTS), "quorum": len(COUNTS), **more}
        star = Star(folder, made(FederatedTraining, aggregator=aggregator, **given), crowd())
        # Two that are each other's nearest have one score: the first by PeerId is taken.
        order = star.in_turn
        counts, w = np.array([each.count for each in order], float), star.start
        for number, found in enumerate(star.rounds(ROUNDS), start=1):
            trained = np.stack([client.trained(w) for client in order])
            moved = rule(trained - w, counts) + w if more.get("deltas") else rule(trained, counts)
            w = np.asarray(moved)
            yield Compared(found["model"], w, f"round {number}")


def _trimmed(points: Points, _: Points) -> Vector:
    return np.asarray(np.sort(points, axis=0)[LIARS:-LIARS].mean(axis=0))


def _multikrum(points: Points, _: Points) -> Vector:
    chosen = numpy_.krum_order(points, LIARS)[: len(points) - LIARS - 2]
    return np.asarray(points[chosen].mean(axis=0))


def _shortened(points: Points, counts: Points) -> Vector:
    lengths = np.linalg.norm(points, axis=1)
    bound = np.median(lengths)
    return np.asarray(
        np.average(points * np.minimum(1, bound / lengths)[:, None], axis=0, weights=counts)
    )


_two = {"byzantine": LIARS}
_rule("Median", "median", "the middle value of each parameter", Median,
      lambda points, _: np.asarray(np.median(points, axis=0)))  # fmt: skip
_rule("TrimmedMean", "trimmed-mean", "the mean without the two lowest and highest",
      concrete(TrimmedMean, **_two), _trimmed)  # fmt: skip
_rule("Krum", "krum", "the contribution nearest to its n - f - 2 nearest", concrete(Krum, **_two),
      lambda points, _: points[numpy_.krum_order(points, LIARS)[0]])  # fmt: skip
_rule("MultiKrum", "multikrum", "the mean of the best n - f - 2", concrete(MultiKrum, **_two),
      _multikrum)  # fmt: skip
_rule("Bulyan", "bulyan", "Krum one by one, then the values near the median",
      concrete(Bulyan, **_two), lambda points, _: numpy_.bulyan(points, LIARS))  # fmt: skip
_rule("GeometricMedian", "geometric-median", "the point of least summed distance",
      concrete(GeometricMedian, max_share=1.0), numpy_.geometric_median)  # fmt: skip
_rule("NormClipping", "norm-clipping", "moves shortened to the median length",
      concrete(NormClipping, max_share=1.0), _shortened, deltas=True)  # fmt: skip
_rule("RunningMean", "running-mean", "the mean in the memory of three vectors",
      "bbnode.RunningMean", lambda points, counts: numpy_.mean([*points], [*counts]))  # fmt: skip
