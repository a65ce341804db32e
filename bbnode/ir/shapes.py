"""Declared shapes of tensors, their merging, and the check of a tensor's shape.

Rule: an axis is declared as a length, as a name (ONNX's `dim_param`: all axes of that name have one
length), or as None for any length.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_AXES = 64  # of a declared shape: numpy's maximum

Dim = int | str | None


def shape_fits(declared: Sequence[Dim], shape: Sequence[int], bindings: dict[str, int]) -> bool:
    """Return True if a tensor's shape satisfies a declaration.

    Args:
        declared: axes, as declared by the program.
        shape: the tensor's shape, in elements.
        bindings: known lengths of named axes; the lengths in this tensor are added, if it fits.
    """
    if len(declared) != len(shape):
        return False
    lengths: dict[str, int] = {}
    for axis, length in zip(declared, shape, strict=True):
        if isinstance(axis, str):
            if bindings.get(axis, length) != length or lengths.setdefault(axis, length) != length:
                return False
        elif axis is not None and axis != length:
            return False
    bindings.update(lengths)
    return True


def shape_text(declared: Sequence[Dim], bindings: dict[str, int] | None = None) -> str:
    """Return a declared shape in readable form: `[batch=32, 28, ?]`."""
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
    """Return the shape that two declarations of a tensor imply; None if neither gives one.

    A length is more specific than a name, and a name than None; of two names the first is kept.

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
