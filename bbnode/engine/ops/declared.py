"""The declared types of what ops make, and the check of a value against them.

Rule: a value is checked where it arises: at the op whose component, function or backend made it, or
at the call that brought it in. What passed is not looked at again on its way. The common case, an
array of the declared dtype, costs two comparisons.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bbnode.engine.admission import check_parts
from bbnode.ir import types
from bbnode.ir.errors import AuthorError
from bbnode.ir.shapes import Dim, shape_fits, shape_text
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import Value, dtype_of, type_of


class Declared:
    """The declared type of one output of an op: `dtype` of a tensor leaf, `shape` if declared."""

    __slots__ = ("dtype", "kind", "shape")

    def __init__(self, kind: TypeNode, shape: tuple[Dim, ...] | None = None) -> None:
        self.kind = kind
        self.shape = shape
        # Only where the dtype says it all; the caller compares it in line. An array of objects
        # may hold anything.
        plain = kind.kind is TypeKind.TENSOR and shape is None and kind is not types.TENSOR_STRING
        self.dtype: np.dtype[Any] | None = dtype_of(kind) if plain else None

    def misfit(self, value: Value) -> str:
        """Return what is wrong with a value, as "expected …, got …"; "" if it fits."""
        if type(value) is np.ndarray and value.dtype is self.dtype:
            return ""
        try:
            actual = type_of(value)
            check_parts(value)
        except AuthorError as error:
            return f"expected {self}, got {type(value).__name__}: {error}"
        fits = actual.is_a(self.kind)
        if fits and (self.shape is None or shape_fits(self.shape, _shape_of(value), {})):
            return ""
        return f"expected {self}, got {told(value, actual)}"

    def __str__(self) -> str:
        return type_text(self.kind, self.shape)


def type_text(kind: TypeNode, shape: tuple[Dim, ...] | None) -> str:
    """Return a declared type for messages."""
    return kind.name if shape is None else f"{kind.name} {shape_text(shape)}"


def told(value: Value, actual: TypeNode) -> str:
    """Return the type of a value for messages, of a tensor with its shape."""
    return f"{actual.name} {_shape_of(value)}" if actual.is_a(types.TENSOR) else actual.name


def _shape_of(value: Value) -> list[int]:
    # Not numpy's `shape`, which would copy the tensor of another library.
    return [int(length) for length in getattr(value, "shape", ())]


def narrower(table: TypeNode, declared: TypeNode | None) -> TypeNode:
    """Return what the program declares of a value, if that is a case of what the op table says."""
    return declared if declared is not None and declared.is_a(table) else table
