"""Shapes of tensors: what a declaration says of the axes, and whether a tensor has them.

Rule: an axis is declared as a length, as a name (ONNX's `dim_param`: all axes of that name have one
length), or as None, which says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_AXES = 64  # of a declared shape: what numpy's arrays have at most

Dim = int | str | None


def shape_fits(declared: Sequence[Dim], shape: Sequence[int], bindings: dict[str, int]) -> bool:
    """Return True if a tensor of this shape is what was declared.

    Args:
        declared: axes, as the program declares them.
        shape: of the tensor, in elements.
        bindings: the lengths of named axes that are known already; those that this tensor tells are
            added, if it fits.
    """
    if len(declared) != len(shape):
        return False
    told: dict[str, int] = {}
    for axis, length in zip(declared, shape, strict=True):
        if isinstance(axis, str):
            if bindings.get(axis, length) != length or told.setdefault(axis, length) != length:
                return False
        elif axis is not None and axis != length:
            return False
    bindings.update(told)
    return True


def shape_text(declared: Sequence[Dim], bindings: dict[str, int] | None = None) -> str:
    """Return a declared shape as people read it: `[batch=32, 28, ?]`."""
    known = bindings or {}
    parts = [
        f"{axis}={known[axis]}"
        if isinstance(axis, str) and axis in known
        else ("?" if axis is None else str(axis))
        for axis in declared
    ]
    return f"[{', '.join(parts)}]"


class ShapesDiffer(Exception):
    """No tensor has both of two declared shapes."""


def merge_shapes(
    known: Sequence[Dim] | None, other: Sequence[Dim] | None
) -> tuple[Dim, ...] | None:
    """Return what two declarations of one tensor say together; None: nothing about its shape.

    A length says more than a name, and a name more than nothing; of two names the first is kept.

    Raises ShapesDiffer.
    """
    if known is None or other is None:
        found = other if known is None else known
        return None if found is None else tuple(found)
    if len(known) != len(other):
        raise ShapesDiffer
    merged: list[Dim] = []
    for one, two in zip(known, other, strict=True):
        if isinstance(one, int) and isinstance(two, int) and one != two:
            raise ShapesDiffer
        best = one if one is not None else two
        merged.append(two if isinstance(two, int) and isinstance(best, str) else best)
    return tuple(merged)
