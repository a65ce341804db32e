from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.daemon.invoke.numbers import numbers
from bbnode.ir import types
from bbnode.ir.values import U64, dtype_of, type_of

BY_NAME = {node.name.removeprefix("Tensor."): node for node in types.TENSOR_BY_ELEM.values()}
LEAVES = st.booleans() | st.integers() | st.floats() | st.text(max_size=1) | st.none()
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=8)


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        (True, "bool"),
        (3, "int64"),
        (0.5, "float32"),
        ([], "float32"),
        ([1, 2], "int64"),
        ([1, 0.5], "float32"),
        ([[1, 2], [3, 4]], "int64"),
        ([True, False], "bool"),
    ],
)
def test_what_is_not_declared_is_of_its_usual_dtype(written: Any, dtype: str) -> None:
    made = numbers(written)
    assert str(made.dtype) == dtype
    assert made.tolist() == written
    assert numbers(written, types.TENSOR).dtype == made.dtype


@pytest.mark.parametrize(
    ("written", "declared", "dtype"),
    [
        ([1, 2, 3], "FLOAT", "float32"),
        (1, "DOUBLE", "float64"),
        (1, "FLOAT16", "float16"),
        ([1, 2], "BFLOAT16", "bfloat16"),
        (0.5, "BFLOAT16", "bfloat16"),
        (0.1, "DOUBLE", "float64"),
        ([[255]], "UINT8", "uint8"),
        (2**64 - 1, "UINT64", "uint64"),
        ([], "INT32", "int32"),
        (math.inf, "FLOAT16", "float16"),
    ],
)
def test_the_declared_dtype_decides(written: Any, declared: str, dtype: str) -> None:
    made = numbers(written, BY_NAME[declared])
    assert str(made.dtype) == dtype
    assert made.tolist() == written


@pytest.mark.parametrize(
    ("written", "declared"),
    # Something would be lost, or truth made a number: the node says what it takes.
    [(0.5, "INT64"), (True, "FLOAT"), (1, "BOOL"), ([1.0], "UINT8")],
)
def test_no_kind_becomes_another(written: Any, declared: str) -> None:
    assert numbers(written, BY_NAME[declared]).dtype == numbers(written).dtype


@pytest.mark.parametrize(
    ("written", "declared", "why"),
    [
        (300, "UINT8", "300 out of bounds for uint8"),
        (-1, "UINT64", "out of bounds for uint64"),
        (1e39, "FLOAT", "out of the range of float32"),
        (70_000, "FLOAT16", "out of the range of float16"),
        (10**400, "FLOAT", "too large"),
        ([math.inf, 1e39], "FLOAT", "out of the range"),
        ([1, [2]], "FLOAT", "one length"),
        ([[1], [2, 3]], "FLOAT", "one length"),
        (["1"], "FLOAT", "give numbers"),
        ([True, 1], "FLOAT", "give numbers"),
        ([None], "FLOAT", "give numbers"),
    ],
)
def test_what_does_not_fit_is_refused(written: Any, declared: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        numbers(written, BY_NAME[declared])


def test_a_declared_u64_is_one() -> None:
    assert type(numbers(7, types.U64)) is U64
    for wrong in (-1, 1 << 64):
        with pytest.raises(ValueError, match="64 bits"):
            numbers(wrong, types.U64)
    assert type_of(numbers(0.5, types.U64)) is types.TENSOR_FLOAT


def test_deep_lists_end() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ValueError, match="one length"):
        numbers(deep)


@given(written=ANYTHING, declared=st.none() | st.sampled_from(sorted(BY_NAME)))
def test_anything_is_a_tensor_or_refused(written: Any, declared: str | None) -> None:
    node = None if declared is None else BY_NAME[declared]
    try:
        made = numbers(written, node)
    except ValueError:
        return
    assert isinstance(made, np.ndarray)
    assert made.dtype in {
        np.dtype(np.bool_),
        np.dtype(np.int64),
        np.dtype(np.float32),
        *([] if node is None else [dtype_of(node)]),
    }


def test_texts_are_a_tensor_where_that_is_declared() -> None:
    made = numbers([["a"], ["bé"]], types.TENSOR_STRING)
    assert type_of(made) is types.TENSOR_STRING
    assert made.tolist() == [["a"], ["bé"]]
    for wrong in (["a", 1], [1], [["a"], "b"], [["a"], ["b", "c"]]):
        with pytest.raises(ValueError, match="give texts"):
            numbers(wrong, types.TENSOR_STRING)
    with pytest.raises(ValueError, match="give numbers"):
        numbers(["a"], types.TENSOR_FLOAT)
