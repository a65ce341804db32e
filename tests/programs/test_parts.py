"""Every ordered pair of parts: it trains as both say, or is refused by the names of both."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bbnode.dsl import BadArgument
from bbnode.programs.parts import Coded, ExamplePrivacy, Masks, RoundPart
from tests.programs.composed import PARTS, composed, deviation

EXACT, ROUGH = 3e-5, 2e-3  # of what is neither quantised nor has noise, and of the others


def tolerance(*parts: RoundPart) -> float:
    return ROUGH if any(isinstance(p, Masks | ExamplePrivacy | Coded) for p in parts) else EXACT


def digest(*parts: RoundPart) -> str:
    """Return the digest of a program, "" where it is refused."""
    try:
        program = composed(*parts).build()
    except BadArgument as error:
        unnamed = [type(each).__name__ for each in parts if type(each).__name__ not in str(error)]
        if unnamed:
            raise AssertionError(f"{unnamed} is not in: {error}") from error
        return ""
    return hashlib.sha256(program.SerializeToString(deterministic=True)).hexdigest()


@pytest.mark.parametrize("first", PARTS, ids=lambda each: type(each).__name__)
def test_an_ordered_pair_is_both_parts_or_is_refused_by_their_names(first: RoundPart) -> None:
    alone = {digest(first)}
    for second in PARTS:
        if second is not first:
            both = digest(first, second)
            assert both == digest(second, first)
            assert not both or both not in alone | {digest(second)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", PARTS, ids=lambda each: type(each).__name__)
def test_a_pair_that_is_not_refused_trains_as_numpy_says(tmp_path: Path, first: RoundPart) -> None:
    """Orders make the same program: the test above."""
    far = {}
    for second in PARTS[PARTS.index(first) + 1 :]:
        pair = (first, second)
        if digest(*pair):
            folder = tmp_path / type(second).__name__
            folder.mkdir()
            far[type(second).__name__] = deviation(folder, composed(*pair), pair) / tolerance(*pair)
    assert {name: by for name, by in far.items() if not by <= 1} == {}
