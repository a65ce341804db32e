"""One experiment: its tables, the claims that they have to bear out, and its figure.

Rule: figures are computed here and never typed in; what stands in a paper is named as the paper's.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT: Final = Path(__file__).parents[1]
FIGURES: Final = ROOT / "docs" / "methods" / "figures"

Cell: TypeAlias = str | int | float | None


class UnknownExperiment(Exception):
    """There is no experiment of that name."""


@dataclass(frozen=True)
class Table:
    """Rows of an experiment, ours beside the reference.

    A number may be an int or a float, which is shown with four digits; None is shown as "-".
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        """Raise ValueError where a row has another length than the columns."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {list(row)} has not one cell a column")


@dataclass(frozen=True)
class Claim:
    """One thing that the paper says, and if this run shows it; `figures` are what it rests on.

    `value` is the number that was measured, where the claim is of one (see `within`).
    """

    text: str
    holds: bool
    figures: str
    value: float | None = None


def within(text: str, value: float, low: float, high: float, figures: str = "") -> Claim:
    """Return the claim that a number is in a range."""
    shown = figures or f"{value:.4g}, in {low:.4g} to {high:.4g}"
    return Claim(text, bool(low <= value <= high), shown, float(value))


def near(text: str, value: float, expected: float, deviation: float, most: float = 4.0) -> Claim:
    """Return the claim that a number is what is expected of it, by its standard deviation.

    A right one is off by more than four deviations once in 16,000 times.
    """
    off = (value - expected) / deviation
    told = f"{value:.4g}; expected {expected:.4g} ± {deviation:.2g}, {abs(off):.1f} deviations off"
    return Claim(text, bool(abs(off) <= most), told, float(value))


def beside(
    text: str, pairs: Sequence[tuple[float, Sequence[float]]], *, ratio: bool = False
) -> Claim:
    """Return the claim that numbers of nodes are draws of the distribution of numpy's.

    Each pair is a number of nodes and those of as many runs in numpy, two or more. What is judged
    is the mean difference over pairs (`ratio`: the mean of the logarithms' difference), by
    Student's quantile for the deviations of all runs together: right nodes fall once in 10,000
    times.
    """
    from scipy.stats import t

    moved = [
        [math.log(each) for each in (found, *drawn)] if ratio else [found, *drawn]
        for found, drawn in pairs
    ]
    freedom = sum(len(each) - 2 for each in moved)
    squares = sum((len(each) - 2) * statistics.variance(each[1:]) for each in moved)
    spread = squares / freedom * sum(1 + 1 / (len(each) - 1) for each in moved)
    off = statistics.fmean(each[0] - statistics.fmean(each[1:]) for each in moved)
    most = float(t.ppf(1 - 5e-5, freedom)) * math.sqrt(spread) / len(moved)
    holds = math.isfinite(off) and abs(off) <= most
    if ratio:
        told = f"{math.exp(off):.3f} times numpy's; {math.exp(-most):.3f} to {math.exp(most):.3f}"
        return Claim(text, holds, told, math.exp(off))
    return Claim(text, holds, f"{off:+.4f} off numpy's mean; at most {most:.4f}", off)


def by_numpy(methods: Sequence[str]) -> list[Claim]:
    """Return the claims that rounds of methods are those of plain numpy: see `bbnode verify`."""
    from bbnode.verify import all_checks, judged

    checks = {check.name: check for check in all_checks()}
    claims = []
    for outcome in (judged(checks[name]) for name in methods):
        if outcome.missing:
            continue
        told = f"{outcome.deviation:.0e} off in {outcome.numbers} numbers"
        text = f"{outcome.check.name}, by hand: {outcome.check.about}"
        bound = f"{told}; at most {outcome.check.tolerance:g}"
        claims.append(Claim(text, outcome.ok, outcome.error or bound, outcome.deviation))
    return claims


def over_seeds(results: Sequence[Result]) -> Table:
    """Return how often each claim held, and mean and standard error of the numbers."""
    rows: list[list[Cell]] = []
    for claims in zip(*(result.claims for result in results), strict=True):
        values = [each.value for each in claims if each.value is not None]
        mean = error = None
        if len(values) == len(claims):
            mean = statistics.fmean(values)
            error = statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else None
        held = sum(each.holds for each in claims)
        rows.append([claims[0].text, f"{held} of {len(claims)}", mean, error])
    columns = ["claim", "holds", "mean", "standard error"]
    return Table(f"over {len(results)} seeds", columns, rows)


@dataclass(frozen=True)
class Result:
    """One run; `draw` draws its figure."""

    tables: Sequence[Table]
    claims: Sequence[Claim]
    draw: Callable[[Figure], None]

    def to_json(self) -> dict[str, Any]:
        """Return tables and claims as JSON has them."""
        return {
            "tables": [asdict(table) for table in self.tables],
            "claims": [asdict(claim) | {"holds": bool(claim.holds)} for claim in self.claims],
        }


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A paper's experiment.

    Attributes:
        paper: authors, year, identifier, and the table or figure that is reproduced.
        says: one line: what is run, with which data, and where it is smaller than the paper's.
        page: the page of the docs that shows its figure, from the root of the repository.
        run: takes a seed; every claim has to hold for each of the seeds 0 to 4.
        methods: checks of `bbnode verify`, which a run claims as well: its rounds by hand.
        on_daemons: the same, smaller, on daemons of this machine, where there is such a run.
    """

    paper: str
    says: str
    page: str
    run: Callable[[int], Result]
    on_daemons: Callable[[int], Result] | None = None
    methods: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Have a run claim what is by hand, too."""
        if self.methods:
            object.__setattr__(self, "run", partial(_with_hand, self.run, self.methods))


def _with_hand(run: Callable[[int], Result], methods: Sequence[str], seed: int) -> Result:
    found = run(seed)
    return replace(found, claims=[*found.claims, *by_numpy(methods)])


def names() -> list[str]:
    """Return the names of all experiments."""
    found = (each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if name != "experiment" and not name.startswith("_"))


def load(name: str) -> Experiment:
    """Return the experiment of that name; UnknownExperiment."""
    if name not in names():
        raise UnknownExperiment(f"no experiment {name!r}; there is: {', '.join(names())}")
    made = importlib.import_module(f"reproduce.{name}").EXPERIMENT
    if not isinstance(made, Experiment):
        raise TypeError(f"reproduce/{name}.py: EXPERIMENT is no Experiment")
    return made


def save_figure(result: Result, path: Path) -> None:
    """Draw the figure into an SVG file, the same bytes for the same numbers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": "bbnode",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
        result.draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib ends lines of paths with spaces, which editors and diffs take offence at.
    path.write_text(re.sub(r" +$", "", path.read_text("utf-8"), flags=re.MULTILINE), "utf-8")
