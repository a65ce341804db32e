"""One job: its data, the commands that a user types, and what an independent run says of it.

Rule: nothing here computes what a job claims. A job runs `bbnode` as a user would, in processes of
their own, and another library on the same data; figures are measured and never typed in.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from jobs.typed import Terminal
from reproduce.experiment import Claim

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).with_name("results.json")


class UnknownJob(Exception):
    """There is no job of that name."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job, beside what an independent run makes of the same data.

    Attributes:
        result, reference: a number with its name and unit, "accuracy 0.91".
        claims: what has to hold.
    """

    result: str
    reference: str
    claims: Sequence[Claim]

    @property
    def ok(self) -> bool:
        """True if every claim holds."""
        return all(claim.holds for claim in self.claims)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A piece of real work.

    Attributes:
        says: one line: which data, how many peers, which method, and what checks it.
        run: takes the terminal, in an empty folder, and True for the quick form, which takes
            seconds to a minute and makes the same claims of less data.
        needs: modules beyond those of the tests' extra; without one the job is left out by name.
    """

    says: str
    run: Callable[[Terminal, bool], Outcome]
    needs: Sequence[str] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The modules that it needs and that are not installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job in the table: what it took and what came of it.

    Attributes:
        seconds: of the whole job, the independent run included.
        memory_mib: the most that one of its processes held.
        moved_mib: bytes between peers.
    """

    name: str
    quick: bool
    seconds: float
    memory_mib: float
    moved_mib: float
    result: str
    reference: str
    held: int
    claims: int

    def to_json(self) -> dict[str, Any]:
        """Return it as the file of results has it."""
        return dict(vars(self))


def names() -> list[str]:
    """Return the names of all jobs."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(each.name for each in found if each.ispkg)


def load(name: str) -> Job:
    """Return the job of that name; UnknownJob."""
    if name not in names():
        raise UnknownJob(f"no job {name!r}; there is: {', '.join(names())}")
    made = importlib.import_module(f"jobs.{name}").JOB
    if not isinstance(made, Job):
        raise TypeError(f"jobs/{name}: JOB is no Job")
    return made
