"""Each argument of a program that ships changes what is compiled, or is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from bbnode import programs
from bbnode.dsl import BadArgument
from bbnode.programs import FederatedTraining
from tests.programs.files import compiled
from tests.programs.variants import VARIANTS

# Said by a test of its own, or no matter of what is compiled.
ELSEWHERE = {"model", "data", "metrics", "loss"}
OTHERS: dict[str, tuple[Any, ...]] = {
    "selector": ("bbnode.RoundRobin",), "aggregator": ("bbnode.Median",), "accountant": ("pld",),
    "codec": ("bbnode.Float16Codec",), "codec_down": ("bbnode.BFloat16Codec",), "graph": ("torus",),
    "evaluate": ("none", "server", "clients"), "staleness": ("constant", 1), "mix": ("pairwise",),
    "local": (("*.weight",),), "members": (("12D3KooWA",),),
}  # fmt: skip
PROGRAMS = [
    name
    for name in VARIANTS
    if issubclass(getattr(programs, name), FederatedTraining)
    or name in ("GossipTraining", "MoshpitTraining", "DecentralizedSGD", "FederatedSGD")
]


def others(name: str, value: Any) -> Iterator[Any]:
    """Yield values that an argument does not have, of which one is good or all are refused."""
    if name in OTHERS:
        yield from (each for each in OTHERS[name] if each != value)
    elif isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value + 2)
    elif isinstance(value, float):
        yield from (value / 2 + 0.03, value + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_argument_with_another_value_changes_the_program_or_is_refused(name: str) -> None:
    cls, given = getattr(programs, name), VARIANTS[name][""]
    one = cls(**given)
    plain = compiled(one).SerializeToString(deterministic=True)
    of_train = {*cls.train.settings()}
    silent = []
    for argument in cls.arguments().keys() - (ELSEWHERE | of_train | {*cls.PARTS}):
        changed = set()
        for other in others(argument, getattr(one, argument)):
            with contextlib.suppress(BadArgument):
                made = compiled(cls(**{**given, argument: other}))
                changed.add(made.SerializeToString(deterministic=True) != plain)
        if changed == {False}:  # a number may be the one that 0 stands for
            silent.append(argument)
    assert silent == []
