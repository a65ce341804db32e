"""`./scripts/reproduce NAME`: one experiment, its table, its claims and its figure.

Rule: exit code 0 if every claim holds, 1 if one does not, 2 for a name that there is not, or
where something is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table as Grid

from bbnode.ir.errors import EnvironmentFault
from reproduce.experiment import (
    FIGURES,
    Cell,
    Result,
    UnknownExperiment,
    load,
    names,
    over_seeds,
    save_figure,
)


def shown(cell: Cell) -> str:
    """Return a cell as text: floats with four digits."""
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def show(console: Console, result: Result) -> None:
    """Print tables and claims."""
    for table in result.tables:
        grid = Grid(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            numbers = any(isinstance(row[i], int | float) for row in table.rows)
            grid.add_column(column, justify="right" if numbers else "left")
        for row in table.rows:
            grid.add_row(*map(shown, row))
        console.print(grid)
    for claim in result.claims:
        said = "holds" if claim.holds else "FAILS"
        console.print(f"{said}: {claim.text} ({claim.figures})", soft_wrap=True)


def main(argv: list[str]) -> int:
    """Run one experiment, or list them."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="without one: lists the experiments")
    parser.add_argument(
        "--daemons", action="store_true", help="a smaller run, on daemons of this machine"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="as many runs, from --seed on"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="tables and claims as JSON")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="the SVG (docs/methods/figures/NAME.svg)"
    )
    arguments = parser.parse_args(argv)
    width = None if sys.stdout.isatty() else 140
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    if arguments.name is None:
        for name in names():
            console.print(f"{name:<16} {load(name).says}", soft_wrap=True)
        return 0
    try:
        experiment = load(arguments.name)
        run = experiment.on_daemons if arguments.daemons else experiment.run
        if run is None:
            able = [name for name in names() if load(name).on_daemons]
            raise UnknownExperiment(
                f"{arguments.name} runs in the simulator alone; --daemons is of {', '.join(able)}"
            )
    except UnknownExperiment as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console.print(f"{experiment.paper}\n{experiment.says}", soft_wrap=True)
    began = perf_counter()
    try:
        results = [run(arguments.seed + at) for at in range(max(1, arguments.seeds))]
    except EnvironmentFault as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    result = results[0]
    if len(results) > 1:
        result = replace(result, tables=[*result.tables, over_seeds(results)])
    show(console, result)
    for at, other in enumerate(results[1:], start=arguments.seed + 1):
        for claim in other.claims:
            if not claim.holds:
                console.print(f"FAILS with seed {at}: {claim.text} ({claim.figures})")
    figure = arguments.figure
    if figure is None and not arguments.daemons:
        figure = FIGURES / f"{arguments.name}.svg"
    if figure is not None:
        save_figure(result, figure)
        console.print(f"figure: {figure}", soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.to_json(), indent=1) + "\n", "utf-8")
    console.print(f"{perf_counter() - began:.0f} s")
    return 0 if all(claim.holds for each in results for claim in each.claims) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
