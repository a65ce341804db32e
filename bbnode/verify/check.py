"""A check: a method, and pairs of arrays that have to be the same."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from bbnode.ir.errors import BbnodeError, EnvironmentFault

# float32 has 7 digits; a few rounds of sums of some dozens of numbers cost one or two of them.
TOLERANCE: Final = 3e-5

_ROOMS = ("rounds", "robust", "local", "peers", "privacy", "pooled", "parts", "codes")


class Compared(NamedTuple):
    """An array of nodes and the same by numpy; `what` names it, where a check has several."""

    found: Any
    expected: Any
    what: str = ""

    @property
    def deviation(self) -> float:
        """The largest difference, over the expected size where that is above 1; inf for NaN."""
        found, expected = (np.asarray(each, np.float64) for each in (self.found, self.expected))
        if found.shape != expected.shape or not (np.isfinite(found) & np.isfinite(expected)).all():
            return math.inf
        apart = np.abs(found - expected) / np.maximum(np.abs(expected), 1)
        return float(apart.max(initial=0.0))


Run = Callable[[Path], Iterator[Compared]]


@dataclass(frozen=True, kw_only=True)
class MethodCheck:
    """A comparison of one method with numpy.

    Attributes:
        name: unique; the method, and after a comma what of it.
        page: the page of docs/methods that describes the method, without its ending.
        about: one line: what is computed, on both sides.
        run: takes an empty folder for files; yields what is compared.
        tolerance: the largest deviation that passes.
    """

    name: str
    page: str
    about: str
    run: Run
    tolerance: float = TOLERANCE


@dataclass(frozen=True, kw_only=True)
class MethodOutcome:
    """Result of a check: how many numbers were compared, and how far apart they are at most.

    `error` says why nothing could be compared; "" where it could.
    """

    check: MethodCheck
    numbers: int = 0
    deviation: float = math.inf
    at: str = ""
    error: str = ""
    missing: bool = False  # a library that the method needs is not installed

    @property
    def ok(self) -> bool:
        """Return True if what nodes computed is what numpy says."""
        return self.deviation <= self.check.tolerance and not self.error

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it; a deviation that is no number as null."""
        return {
            "name": self.check.name, "page": self.check.page, "about": self.check.about,
            "ok": self.ok, "missing": self.missing, "numbers": self.numbers,
            "deviation": self.deviation if math.isfinite(self.deviation) else None,
            "tolerance": self.check.tolerance, "at": self.at, "error": self.error,
        }  # fmt: skip


_CHECKS: dict[str, MethodCheck] = {}


def checked(name: str, page: str, about: str, tolerance: float = TOLERANCE) -> Callable[[Run], Run]:
    """Register a generator of comparisons as a check; see `MethodCheck`."""

    def add(run: Run) -> Run:
        assert name not in _CHECKS, name
        _CHECKS[name] = MethodCheck(name=name, page=page, about=about, run=run, tolerance=tolerance)
        return run

    return add


def all_checks() -> list[MethodCheck]:
    """Return all checks, in the order in which they are written."""
    for room in _ROOMS:
        importlib.import_module(f"bbnode.verify.{room}")
    return [*_CHECKS.values()]


def judged(check: MethodCheck) -> MethodOutcome:
    """Run a check in a folder of its own."""
    numbers, worst, at = 0, 0.0, ""
    try:
        with TemporaryDirectory() as folder:
            for each in check.run(Path(folder)):
                numbers += np.asarray(each.expected).size
                if each.deviation > worst:
                    worst, at = each.deviation, each.what
    except (ImportError, EnvironmentFault) as error:
        return MethodOutcome(check=check, error=str(error), missing=True)
    except (BbnodeError, RoundFailed) as error:
        return MethodOutcome(check=check, error=f"{type(error).__name__}: {error}")
    if not numbers:
        return MethodOutcome(check=check, error="nothing was compared")
    return MethodOutcome(check=check, numbers=numbers, deviation=worst, at=at)


class RoundFailed(Exception):
    """A round in the simulator gave no outputs, or an op failed; the message has each failure."""
