"""Tensors from numbers in JSON or TOML.

Rule: the declared type of the input decides the dtype, unless that would lose precision; without a
declared type, whole numbers are int64 and others float32. Booleans and numbers do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from bbnode.ir import types
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import U64, Value, dtype_of

Given: TypeAlias = bool | int | float | list[Any]
_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
_BOOL = np.dtype(np.bool_)
_EXPECTED_TEXTS = "give texts, in lists of one length"
_EXPECTED = "give numbers, or true and false, alone or in lists of one length"


def numbers(values: Given, declared: TypeNode | None = None) -> Value:
    """Return a number, or nested lists of numbers of equal lengths, as a tensor of that rank.

    A whole number that is declared as a `U64` becomes one, and texts that are declared as a tensor
    of texts become that. Raises ValueError for anything but numbers and booleans, for lists of
    several lengths, and for a number that does not fit.
    """
    kinds = {type(leaf) for leaf in _leaves(values)}
    if declared is types.TENSOR_STRING:
        texts = np.array(values, object)  # lists of several lengths stay lists in it
        if kinds <= {str} and not any(isinstance(each, list) for each in texts.flat):
            return texts
        raise ValueError(_EXPECTED_TEXTS)
    if not kinds <= {bool, int, float} or (bool in kinds and len(kinds) > 1):
        raise ValueError(_EXPECTED)
    if declared is types.U64 and type(values) is int:
        if not 0 <= values < 1 << 64:
            raise ValueError(f"{values} is not an unsigned integer of 64 bits")
        return U64(values)
    dtype = _dtype(kinds, declared)
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(_EXPECTED) from error
    if dtype.kind not in "biu":
        infinite = sum(isinstance(leaf, float) and math.isinf(leaf) for leaf in _leaves(values))
        if int(np.isinf(array).sum()) > infinite:
            raise ValueError(f"a number is out of the range of {dtype}")
    return array


def _leaves(values: Given) -> Iterator[Any]:
    """Yield everything that is not a list."""
    stack: list[Iterator[Any]] = [iter((values,))]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            yield item
        else:
            stack.pop()


def _dtype(kinds: set[type], declared: TypeNode | None) -> np.dtype[Any]:
    """Return the declared dtype if these numbers fit it, else that of their kind."""
    usual = _BOOL if bool in kinds else _FLOAT32 if float in kinds or not kinds else _INT64
    if declared is None or declared.kind is not TypeKind.TENSOR:
        return usual
    wanted = dtype_of(declared)
    if not kinds or wanted.kind == usual.kind:
        return wanted
    fits = {"i": "iufV", "f": "fV"}.get(usual.kind, "")  # V: bfloat16
    return wanted if wanted.kind in fits else usual
