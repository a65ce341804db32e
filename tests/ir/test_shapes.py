"""`shape_fits`: tensors and the shapes that programs declare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir.shapes import Dim, shape_fits, shape_text


@pytest.mark.parametrize(
    ("declared", "shape", "fits"),
    [
        ((), (), True),
        ((), (1,), False),
        ((2, 3), (2, 3), True),
        ((2, 3), (3, 2), False),
        ((None, 3), (0, 3), True),
        (("n", "n"), (4, 4), True),
        (("n", "n"), (4, 5), False),
        (("n", "m"), (4, 5), True),
    ],
)
def test_lengths_names_and_unknown_axes(
    declared: tuple[Dim, ...], shape: tuple[int, ...], fits: bool
) -> None:
    assert shape_fits(declared, shape, {}) is fits


def test_a_name_has_one_length_over_several_tensors() -> None:
    bindings: dict[str, int] = {}
    assert shape_fits(("batch", 3), (32, 3), bindings)
    assert bindings == {"batch": 32}
    assert not shape_fits(("other", "batch"), (5, 31), bindings)
    assert bindings == {"batch": 32}  # what does not fit tells nothing
    assert shape_text(("batch", 3, None, "other"), bindings) == "[batch=32, 3, ?, other]"


@given(st.lists(st.integers(0, 9), max_size=5), st.data())
def test_every_weakening_of_a_shape_fits_it(shape: list[int], data: st.DataObject) -> None:
    declared: list[Dim] = [
        data.draw(st.sampled_from([length, None, f"n{length}"])) for length in shape
    ]
    assert shape_fits(declared, shape, {})
    assert not shape_fits(declared, [*shape, 1], {})
