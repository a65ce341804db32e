"""Gradient rule of Einsum.

Rule: a gradient of a sum of products is such a sum again: of the output's gradient and the other
operands, towards the labels of the operand. What only the operand has is repeated, a size that was
stretched is summed, and a label that it has twice goes back to the diagonal.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


@vjp("Einsum")
def _einsum(ctx: VjpContext) -> Grads:
    operands, output = _labels(ctx)
    return [
        _gradient(ctx, index, operands, output) if ctx.wants(index) else None
        for index in range(len(operands))
    ]


def _labels(ctx: VjpContext) -> tuple[list[str], str]:
    """Return the labels of every operand and of the output, an ellipsis spelt out."""
    equation = str(ctx.attribute("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ctx.inputs):
        raise ctx.error(
            f"the equation {equation!r} has {len(terms)} terms for {len(ctx.inputs)} inputs",
            "write one term per input",
        )
    if not arrow:
        counts = Counter(letter for letter in left if letter.isalpha())
        once = sorted(letter for letter, count in counts.items() if count == 1)
        if "".join(once).swapcase() != "".join(once) and not (
            all(c.islower() for c in once) or all(c.isupper() for c in once)
        ):
            raise ctx.error(
                f"the order of capital and small letters in the output of {equation!r} is open",
                "write the output behind ->",
            )
        right = ("..." if "..." in left else "") + "".join(once)
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [
        ctx.rank(name) - len(term.replace("...", "")) if "..." in term else 0
        for name, term in zip(ctx.inputs, terms, strict=True)
    ]
    widest = max(widths)
    if widest > len(unused):
        raise ctx.error(f"the equation {equation!r} has no letters left", "use fewer axes")
    shared = "".join(unused[:widest])  # aligned at the right, as in broadcasting
    spelt = [
        term.replace("...", shared[widest - width :])
        for term, width in zip(terms, widths, strict=True)
    ]
    return spelt, right.replace("...", shared)


def _gradient(ctx: VjpContext, index: int, operands: Sequence[str], output: str) -> str:
    b, x = ctx.b, ctx.inputs[index]
    own = operands[index]
    distinct = "".join(dict.fromkeys(own))
    terms = [(ctx.g, output)]
    terms += [
        (name, labels)
        for place, (name, labels) in enumerate(zip(ctx.inputs, operands, strict=True))
        if place != index
    ]
    present = "".join(label for label in distinct if any(label in term for _, term in terms))
    # Runtimes differ in what they make of a term without labels: these are factors.
    factors = [name for name, labels in terms if not labels]
    labelled = [(name, labels) for name, labels in terms if labels]
    if len(labelled) == 1 and labelled[0][1] == present:
        found = labelled[0][0]
    elif labelled:
        equation = ",".join(labels for _, labels in labelled) + "->" + present
        found = b.op("Einsum", *(name for name, _ in labelled), equation=equation)
    else:
        found = factors.pop(0)
    for factor in factors:
        found = b.op("Mul", found, factor)
    absent = [axis for axis, label in enumerate(distinct) if label not in present]
    if absent and present:
        found = b.op("Unsqueeze", found, b.ints(absent))
    shape = b.op("Shape", x)
    if len(distinct) < len(own):
        firsts = b.ints([own.index(label) for label in distinct])
        shape = b.op("Gather", shape, firsts, axis=0)
    if absent or _stretches(ctx, operands):
        found = b.op("Expand", found, shape)
    if _stretches(ctx, operands):
        found = _sum_ones(ctx, found, shape)
    return found if len(distinct) == len(own) else _to_diagonal(ctx, found, x, own)


def _stretches(ctx: VjpContext, operands: Sequence[str]) -> bool:
    """Return False if every label is known to have one size in all operands."""
    sizes: dict[str, set[object]] = {}
    for name, labels in zip(ctx.inputs, operands, strict=True):
        dims = ctx.type_of(name).dims
        if dims is None:
            return True
        for label, dim in zip(labels, dims, strict=True):
            sizes.setdefault(label, set()).add(object() if dim is None else dim)
    return any(len(each) > 1 for each in sizes.values())


def _sum_ones(ctx: VjpContext, value: str, shape: str) -> str:
    """Sum `value` along the axes whose size in `shape` is 1."""
    b = ctx.b
    one = b.constant(np.asarray(1, np.int64), "one")
    axes = b.op("Squeeze", b.op("NonZero", b.op("Equal", shape, one)), b.ints([0]))
    return b.op("ReduceSum", value, axes, keepdims=1, noop_with_empty_axes=1)


def _to_diagonal(ctx: VjpContext, value: str, x: str, own: str) -> str:
    """Return `value`, which has each label once, on the diagonals of zeros shaped like `x`."""
    b = ctx.b
    again = [axis for axis, label in enumerate(own) if own.index(label) < axis]
    wide = b.op("Unsqueeze", value, b.ints(again))
    mask: str | None = None
    zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
    for axis in again:
        size = b.op("Squeeze", b.op("Shape", x, start=axis, end=axis + 1), b.ints([0]))
        numbers = b.op("Range", zero, size, one)
        along = [
            b.op("Unsqueeze", numbers, b.ints([i for i in range(len(own)) if i != each]))
            for each in (own.index(own[axis]), axis)
        ]
        equal = b.op("Equal", *along)
        mask = equal if mask is None else b.op("And", mask, equal)
    assert mask is not None  # there is a repeated label
    return b.op("Where", mask, wide, ctx.scalar(0.0, x))
