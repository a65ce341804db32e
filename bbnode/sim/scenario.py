"""Scenarios: whole simulations that pass or fail, as functions of a seed.

Rule: a scenario takes a seed, a Trace to record into, and integer settings; it returns the network
that it ran, or raises InvariantBroken. A failure names the command that runs it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TypeAlias

from bbnode.ir.errors import BbnodeError
from bbnode.sim.errors import ScenarioFailed
from bbnode.sim.network import Network
from bbnode.sim.trace import Trace

Scenario: TypeAlias = Callable[..., Network]


def check(scenario: Scenario, seed: int, **settings: int) -> Network:
    """Run a scenario with one seed and return the network that it ran.

    Raises:
        ScenarioFailed: an invariant is broken, or a BbnodeError or AssertionError was raised; the
            message has the command that runs it again.
    """
    return run(scenario, seed, Trace(), settings)


def run(scenario: Scenario, seed: int, trace: Trace, settings: Mapping[str, int]) -> Network:
    """Run as `check` does, with a trace that can be inspected after a failure."""
    try:
        return scenario(seed, trace, **settings)
    except (BbnodeError, AssertionError) as error:
        raise ScenarioFailed(
            f"{_name(scenario)} with seed {seed}: {type(error).__name__}: {error}\n"
            f"To run it again: {command(scenario, seed, settings)}"
        ) from error


def command(scenario: Scenario, seed: int, settings: Mapping[str, int]) -> str:
    """Return the command that repeats a scenario, to run in the folder of its module."""
    words = ["python", "-m", "bbnode.sim.replay", _name(scenario), "--seed", str(seed)]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def _name(scenario: Scenario) -> str:
    return f"{scenario.__module__}:{scenario.__qualname__}"
