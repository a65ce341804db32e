"""Gradient rules of GridSample and AffineGrid, over any number of spatial axes.

Rule: a sample is a sum over taps, elements around a point times weights that depend on where the
point lies between them; so GridSample is written as a GatherElements, and the sweep goes back
through that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import INT64
from bbnode.components.autodiff.composition import pull_back_through
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]

# Keys, 1981: cubic convolution; the constant of ONNX's operator page.
_CUBIC = -0.75


@vjp("GridSample")
def _grid_sample(ctx: VjpContext) -> Grads:
    b, (x, grid) = ctx.b, ctx.inputs
    count = ctx.rank(x) - 2
    if count < 1:
        raise ctx.error(f"its input {x!r} has no spatial axes")
    one = ctx.term(b.ints([1]), grid)
    # Coordinates [N, P, 1] of all P points, one value per spatial axis; the grid has x first.
    points = b.op("ReduceProd", b.op("Shape", grid, start=1, end=count + 1), keepdims=1)
    flat = b.op("Concat", b.op("Shape", grid, start=0, end=1), points, b.ints([count]), axis=0)
    rows = b.op("Reshape", grid, flat, allowzero=1)
    parts = [rows] if count == 1 else b.emit("Split", [rows], count, axis=2, num_outputs=count)
    numbers: Term | None = None
    weights: Term | None = None
    for axis in range(count):
        number, weight = _taps(ctx, ctx.term(parts[count - 1 - axis], grid), axis)
        # The taps of this axis, [N, P, 1 …, T, … 1].
        others = b.ints([2 + i for i in range(count) if i != axis])
        if count > 1:
            number = ctx.term(b.op("Unsqueeze", number.name, others), grid)
            weight = ctx.term(b.op("Unsqueeze", weight.name, others), grid)
        if numbers is None or weights is None:
            numbers, weights = number, weight
        else:
            numbers = numbers.op("Mul", ctx.term(_length(ctx, axis))).op("Add", number)
            weights = weights * weight
    assert numbers is not None
    assert weights is not None  # there is a spatial axis
    taps = {"nearest": 1, "cubic": 4, "bicubic": 4}.get(ctx.attribute("mode", "linear"), 2)
    taps **= count
    batch, planes = (b.op("Shape", x, start=i, end=i + 1) for i in (0, 1))
    # Elements [N, C, P * T], and their weights [N, 1, P, T].
    elements = b.op("ReduceProd", b.op("Shape", x, start=2), keepdims=1)
    flat_x = b.op("Reshape", x, b.op("Concat", batch, planes, elements, axis=0), allowzero=1)
    wide = b.op("Mul", points, b.ints([taps]))
    chosen = b.op("Reshape", numbers.name, b.op("Concat", batch, one.name, wide, axis=0),
                  allowzero=1)  # fmt: skip
    chosen = b.op("Expand", chosen, b.op("Concat", batch, planes, wide, axis=0))
    values = b.op("GatherElements", flat_x, chosen, axis=2)
    apart = b.op("Concat", batch, planes, points, b.ints([taps]), axis=0)
    values = b.op("Reshape", values, apart, allowzero=1)
    shape = b.op("Concat", batch, one.name, points, b.ints([taps]), axis=0)
    factor = b.op("Reshape", weights.name, shape, allowzero=1)
    summed = b.op("ReduceSum", b.op("Mul", values, factor), b.ints([3]), keepdims=0)
    space = b.op("Shape", grid, start=1, end=count + 1)
    made = b.op("Reshape", summed, b.op("Concat", batch, planes, space, axis=0), allowzero=1)
    return pull_back_through(ctx, [made])


def _taps(ctx: VjpContext, at: Term, axis: int) -> tuple[Term, Term]:
    """Return the numbers (int64) of the elements around each point on an axis, and their weights.

    `at` are normalized coordinates [N, P, 1]; results are [N, P, taps].
    """
    b = ctx.b
    mode = ctx.attribute("mode", "linear")
    padding = ctx.attribute("padding_mode", "zeros")
    aligned = bool(int(ctx.attribute("align_corners", 0)))
    size = _size(ctx, axis)
    last = size - 1.0
    point = (at + 1.0) * 0.5 * last if aligned else ((at + 1.0) * size - 1.0) * 0.5
    low, high = (size * 0.0, last) if aligned else (size * 0.0 - 0.5, size - 0.5)

    def inside(value: Term) -> Term:
        return value.op("Max", 0.0).op("Min", last)

    cubic = mode in ("cubic", "bicubic")
    if mode == "nearest":
        point = point.op("Round")
    # A cubic between a border and what repeats it still bends: there the taps alone are moved, as
    # ONNX Runtime and torch do it.
    if padding == "border" and not cubic:
        point = inside(point)
    elif padding == "reflection":
        point = _reflected(point, low, high)
    if mode == "nearest":
        places, weights = point.op("Round"), point * 0.0 + 1.0
    else:
        first = point.op("Floor")
        offset = (-1.0, 0.0, 1.0, 2.0) if cubic else (0.0, 1.0)
        dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(ctx.inputs[1]))
        offsets = ctx.term(b.constant(np.asarray(offset, dtype), "offsets"), ctx.inputs[1])
        places = first + offsets
        distance = (point - places).op("Abs")
        weights = _cubic(distance) if cubic else 1.0 - distance
    if padding == "zeros":
        kept = inside(places)
        weights = kept.op("Equal", places).where(weights, 0.0)
        places = kept
    elif padding == "reflection":
        places = _reflected(places, low, high).op("Round")
    # Once more as whole numbers: what a point that is NaN becomes is no element.
    numbers = b.op("Cast", inside(places).name, to=INT64)
    final = b.op("Sub", b.op("Squeeze", _length(ctx, axis), b.ints([0])), b.scalar(1, INT64))
    return ctx.term(b.op("Min", b.op("Max", numbers, b.scalar(0, INT64)), final), at.name), weights


def _cubic(distance: Term) -> Term:
    """Return the weight of an element at a distance below 2."""
    near = (distance * (_CUBIC + 2.0) - (_CUBIC + 3.0)) * distance * distance + 1.0
    far = ((distance - 5.0) * distance + 8.0) * distance - 4.0
    return (distance > 1.0).where(far * _CUBIC, near)


def _reflected(value: Term, low: Term, high: Term) -> Term:
    """Return coordinates between two borders, a triangular wave of those beyond."""
    span = (high - low).op("Max", 1e-6)  # one aligned element has no span
    steps = (value - low) / (span * 2.0)
    within = (steps - steps.op("Floor")) * (span * 2.0)
    return low + span - (within - span).op("Abs")


def _size(ctx: VjpContext, axis: int) -> Term:
    """Return the size of a spatial axis as a float, 0-D."""
    b, grid = ctx.b, ctx.inputs[1]
    size = b.op("Squeeze", _length(ctx, axis), b.ints([0]))
    return ctx.term(b.op("Cast", size, to=ctx.elem_type(grid)), grid)


def _length(ctx: VjpContext, axis: int) -> str:
    """Return the size of a spatial axis, [1] int64."""
    return ctx.b.op("Shape", ctx.inputs[0], start=axis + 2, end=axis + 3)


@vjp("AffineGrid", constant_inputs={1})
def _affine_grid(ctx: VjpContext) -> Grads:
    """Sum, over all points, the gradient times the point; the unit matrix gives the points."""
    b, (theta, size) = ctx.b, ctx.inputs
    dims = ctx.type_of(theta).dims
    count = dims[1] if dims is not None and len(dims) == 3 else None
    if not isinstance(count, int):
        raise ctx.error(f"the shape of {theta!r} is unknown ({dims})")
    dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(theta))
    unit = b.constant(np.eye(count, count + 1, dtype=dtype)[None], "unit")
    single = b.op("Concat", b.ints([1]), b.op("Slice", size, b.ints([1]), b.ints([9])), axis=0)
    points = b.op("AffineGrid", unit, single, align_corners=int(ctx.attribute("align_corners", 0)))
    points = b.op("Reshape", points, b.ints([-1, count]))
    ones = b.constant(np.ones((1, 1), dtype), "ones")
    column = b.op("Expand", ones, b.op("Concat", b.op("Shape", points, start=0, end=1),
                                       b.ints([1]), axis=0))  # fmt: skip
    full = b.op("Concat", points, column, axis=1)
    batch, rows = b.op("Shape", theta, start=0, end=1), b.op("Shape", points, start=0, end=1)
    shape = b.op("Concat", batch, rows, b.ints([count]), axis=0)
    flat = b.op("Reshape", ctx.g, shape, allowzero=1)
    return [b.op("MatMul", b.op("Transpose", flat, perm=[0, 2, 1]), full)]
