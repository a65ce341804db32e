"""Every ordered pair of parts: it trains as both say, or is refused by the names of both."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest

from bbnode.dsl import BadArgument
from bbnode.programs.parts import Coded, ExamplePrivacy, Masks, RoundPart
from tests.programs.composed import PARTS, composed, deviation

EXACT, ROUGH = 3e-5, 2e-3  # of what is neither quantised nor has noise, and of the others


def tolerance(*parts: RoundPart) -> float:
    return ROUGH if any(isinstance(p, Masks | ExamplePrivacy | Coded) for p in parts) else EXACT


def refusal(*parts: RoundPart) -> str:
    """Return why a program is refused where it is made; "" where it is not."""
    try:
        composed(*parts)
    except BadArgument as error:
        return str(error)
    return ""


@cache
def digest(*parts: RoundPart) -> str:
    recorded = composed(*parts).build().SerializeToString(deterministic=True)
    return hashlib.sha256(recorded).hexdigest()


@pytest.mark.parametrize("first", PARTS, ids=lambda each: type(each).__name__)
def test_an_ordered_pair_is_made_or_is_refused_by_the_names_of_both(first: RoundPart) -> None:
    for second in PARTS:
        if second is first:
            continue
        made = [refusal(*pair) for pair in ((first, second), (second, first))]
        assert bool(made[0]) == bool(made[1])
        for why in filter(None, made):
            assert type(first).__name__ in why
            assert type(second).__name__ in why


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", PARTS, ids=lambda each: type(each).__name__)
def test_a_pair_that_is_made_is_neither_of_its_parts_alone(first: RoundPart) -> None:
    for second in PARTS:
        if second is not first and not refusal(first, second):
            both = digest(first, second)
            assert both == digest(second, first)
            assert both not in (digest(first), digest(second))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", PARTS, ids=lambda each: type(each).__name__)
def test_a_pair_that_is_not_refused_trains_as_numpy_says(tmp_path: Path, first: RoundPart) -> None:
    """Orders make the same program: the test above."""
    far = {}
    for second in PARTS[PARTS.index(first) + 1 :]:
        pair = (first, second)
        if not refusal(*pair):
            folder = tmp_path / type(second).__name__
            folder.mkdir()
            far[type(second).__name__] = deviation(folder, composed(*pair), pair) / tolerance(*pair)
    assert {name: by for name, by in far.items() if not by <= 1} == {}
