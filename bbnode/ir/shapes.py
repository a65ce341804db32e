"""Shapes of tensors: what a declaration says of the axes, and whether a tensor has them.

Rule: an axis is declared as a length, as a name (ONNX's `dim_param`: all axes of that name have one
length), or as None, which says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

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
