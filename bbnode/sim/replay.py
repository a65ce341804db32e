"""Runs a scenario of the simulator again: `python -m bbnode.sim.replay MODULE:SCENARIO --seed N`.

Rule: what it prints of a run follows from the scenario, the settings and the seed alone. Exit
code 0: all invariants hold; 1: one is broken, and the message says which; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from bbnode.sim.errors import ScenarioFailed
from bbnode.sim.scenario import Scenario, run
from bbnode.sim.trace import Trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenario, report the outcome and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bbnode.sim.replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", help="MODULE:FUNCTION, as a failure names it")
    parser.add_argument("--seed", type=int, required=True, metavar="N", help="the first seed")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="K", help="try K seeds, up to the first failure"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=N", help="a setting of the scenario"
    )
    parser.add_argument(
        "--trace", type=int, default=0, metavar="LINES", help="print the last lines of the trace"
    )
    options = parser.parse_args(argv)
    scenario = _find(parser, options.scenario)
    settings = dict(_setting(parser, text) for text in options.set)
    for seed in range(options.seed, options.seed + options.seeds):
        trace = Trace(kept=max(options.trace, 1))
        try:
            network = run(scenario, seed, trace, settings)
        except TypeError as error:
            parser.error(f"{options.scenario} can't be called so: {error}")
        except ScenarioFailed as failed:
            _show(trace, options.trace)
            sys.stdout.write(f"FAILED after {len(trace)} lines of trace\n{failed}\n")
            return 1
        _show(trace, options.trace)
        counts = ", ".join(f"{name} {count}" for name, count in network.counters().items())
        sys.stdout.write(f"seed {seed}: all invariants hold; {network.now_ns} ns, {counts}\n")
        sys.stdout.write(f"trace {len(trace)} lines {trace.digest}\n")
    return 0


def _show(trace: Trace, lines: int) -> None:
    for line in trace.lines()[-lines:] if lines else ():
        sys.stdout.write(line + "\n")


def _find(parser: argparse.ArgumentParser, text: str) -> Scenario:
    module, _, name = text.partition(":")
    if not module or not name:
        parser.error(f"{text!r} is not of the form MODULE:FUNCTION")
    try:
        scenario_ = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        parser.error(f"{error}; run it from the folder that {module} is found in")
    if not callable(scenario_):
        parser.error(f"module {module} has no function {name!r}")
    scenario: Scenario = scenario_
    return scenario


def _setting(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        parser.error(f"--set {text!r}; write NAME=N with an integer")


if __name__ == "__main__":
    sys.exit(main())
