"""Instances made by `maker` are those that the class itself makes, and as frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest

from bbnode.ir.making import maker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    first: int
    second: str


def test_what_is_made_is_an_instance_of_the_frozen_class() -> None:
    made = maker(Pair, "second", "first")("b", 1)  # in the order of the names given
    assert type(made) is Pair
    assert made == Pair(first=1, second="b")
    assert hash(made) == hash(Pair(first=1, second="b"))
    with pytest.raises(FrozenInstanceError):
        made.first = 2


def test_all_fields_have_to_be_given() -> None:
    with pytest.raises(TypeError):
        maker(Pair, "first", "second")(1)
    with pytest.raises(TypeError, match="object layout differs"):
        maker(Pair, "first")(1)  # a field that was forgotten shows at the first instance
