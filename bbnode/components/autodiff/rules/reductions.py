"""Gradient rules of the reductions, and of the pools over a whole plane.

Rule: a gradient goes back to every element that was reduced, times its partial derivative. With
`noop_with_empty_axes` and no axes nothing is reduced, but the rest of an op (the square, the
logarithm) is still done; the same formulas hold, as every sum here is over the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import FLOAT, HALVES, TRAINABLE
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]

_MOST_ONES = 256  # in a constant to multiply by; a longer row is as fast without


class _Reduction:
    """A reduction's node: its input, and its output and gradient with the reduced axes as ones."""

    def __init__(self, ctx: VjpContext) -> None:
        self.ctx = ctx
        self.x = ctx.input(0)
        self.axes = ctx.inputs[1] if ctx.has(1) else None
        self.noop = int(ctx.attribute("noop_with_empty_axes", 0))
        self.out = self._kept(ctx.y)
        self.dy = self._kept(ctx.g)

    def _kept(self, value: str) -> Term:
        ctx = self.ctx
        # Without axes all were reduced or none, and a scalar broadcasts as it is.
        if self.axes is not None and int(ctx.attribute("keepdims", 1)) == 0:
            value = ctx.b.op("Unsqueeze", value, self.axes)
        return ctx.term(value)

    def again(self, op_type: str, value: Term) -> Term:
        """Return another reduction of a value of the input's shape, over the same axes."""
        names = [value.name] if self.axes is None else [value.name, self.axes]
        settings = {"noop_with_empty_axes": self.noop} if self.noop else {}
        return self.ctx.term(self.ctx.b.op(op_type, *names, keepdims=1, **settings))

    def spread(self, value: Term) -> Grads:
        """Return a value as it is, expanded to the shape of the input."""
        ctx, found = self.ctx, None
        axes = ctx.held(1) if ctx.has(1) else None
        if axes is not None:
            found = spread_over(ctx, value.name, self.x.name, [int(axis) for axis in axes])
        return [found or ctx.b.op("Expand", value.name, ctx.b.op("Shape", self.x.name))]


def spread_over(ctx: VjpContext, value: str, x: str, axes: Sequence[int]) -> str | None:
    """Return a value that has ones at some axes with their sizes in x; None if these are many.

    It is multiplied by ones: a runtime's Expand and its broadcasting go from one element of the
    value to the next, here there is a whole row of ones (512 planes of 2 x 2: 4 times as fast).
    """
    kind = ctx.type_of(x)
    if kind.dims is None or kind.elem_type not in TRAINABLE or not axes:
        return None
    rank = len(kind.dims)
    sizes = {axis % rank: kind.dims[axis] for axis in axes}
    first = min(sizes)
    shape = [sizes.get(axis, 1) for axis in range(first, rank)]
    known = [size for size in shape if isinstance(size, int)]
    if len(known) != len(shape) or not 1 < math.prod(known) <= _MOST_ONES:
        return None
    ones = np.ones(known, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return ctx.b.op("Mul", value, ctx.b.constant(ones, "ones"))


@vjp("ReduceSum", constant_inputs={1})
def _reduce_sum(ctx: VjpContext) -> Grads:
    r = _Reduction(ctx)
    return r.spread(r.dy)


@vjp("ReduceMean", constant_inputs={1})
def _reduce_mean(ctx: VjpContext) -> Grads:
    r = _Reduction(ctx)
    return r.spread(r.dy / count_of(ctx, r.x.name, ctx.y))


def count_of(ctx: VjpContext, x: str, y: str) -> Term:
    """Return the number of elements of `x` for each one of `y`, in the element type of `x`."""
    # As floats: an integer division by the size of an empty batch would trap.
    into, out = (ctx.b.op("Cast", ctx.b.op("Size", each), to=ctx.elem_type(x)) for each in (x, y))
    return ctx.term(into) / ctx.term(out)


@vjp("ReduceL1", constant_inputs={1})
def _reduce_l1(ctx: VjpContext) -> Grads:
    r = _Reduction(ctx)
    return [(r.dy * r.x.op("Sign")).name]


@vjp("ReduceL2", constant_inputs={1})
def _reduce_l2(ctx: VjpContext) -> Grads:
    """Differentiate the root of the sum of squares: x / y; at its kink, where all are 0, 0."""
    r = _Reduction(ctx)
    return [(r.x * r.out.op("Equal", 0.0).where(0.0, r.dy / r.out)).name]


@vjp("ReduceSumSquare", constant_inputs={1})
def _reduce_sum_square(ctx: VjpContext) -> Grads:
    r = _Reduction(ctx)
    return [(r.x * (r.dy * 2.0)).name]


@vjp("ReduceLogSum", constant_inputs={1})
def _reduce_log_sum(ctx: VjpContext) -> Grads:
    r = _Reduction(ctx)
    return r.spread(r.dy / r.again("ReduceSum", r.x))


@vjp("ReduceLogSumExp", constant_inputs={1})
def _reduce_log_sum_exp(ctx: VjpContext) -> Grads:
    """Differentiate log(sum(exp(x))): exp(x - y), which no large x makes overflow."""
    r = _Reduction(ctx)
    return [(r.dy * (r.x - r.out).op("Exp")).name]


@vjp("ReduceProd", constant_inputs={1})
def _reduce_prod(ctx: VjpContext) -> Grads:
    """Return the product of all other factors: of a zero, that of the rest; beside a zero, 0."""
    r = _Reduction(ctx)
    is_zero = r.x.op("Equal", 0.0)
    zeros = r.again("ReduceSum", is_zero.where(1.0, 0.0))
    safe = is_zero.where(1.0, r.x)
    product = r.dy * r.again("ReduceProd", safe)
    alone = zeros.op("Equal", 1.0).where(product, 0.0)
    among = zeros.op("Equal", 0.0).where(product / safe, 0.0)
    return [is_zero.where(alone, among).name]


@vjp("ReduceMax", constant_inputs={1})
@vjp("ReduceMin", constant_inputs={1})
def _reduce_extreme(ctx: VjpContext) -> Grads:
    """Share the gradient evenly among all elements that equal the result."""
    r = _Reduction(ctx)
    x, out = r.x, r.out
    if ctx.elem_type(x.name) in HALVES:
        # A runtime may keep one of them in float32 and round the other: none would be equal then.
        x = x.cast(FLOAT)
        out = r.again(ctx.node.op_type, x)
    equal = x.op("Equal", out).where(1.0, 0.0).cast(ctx.elem_type(r.x.name))
    return [(equal * (r.dy / r.again("ReduceSum", equal))).name]


@vjp("GlobalAveragePool")
def _global_average_pool(ctx: VjpContext) -> Grads:
    x = ctx.inputs[0]
    share = (ctx.dy / count_of(ctx, x, ctx.y)).name
    found = spread_over(ctx, share, x, range(2, ctx.rank(x)))
    return [found or ctx.b.op("Expand", share, ctx.b.op("Shape", x))]


@vjp("GlobalMaxPool")
def _global_max_pool(ctx: VjpContext) -> Grads:
    x, out = ctx.input(0), ctx.out
    axes = ctx.term(ctx.b.ints(range(2, ctx.rank(x.name))))
    if ctx.elem_type(x.name) in HALVES:
        x = x.cast(FLOAT)
        out = x.op("ReduceMax", axes, keepdims=1)
    equal = x.op("Equal", out).where(1.0, 0.0).cast(ctx.elem_type(ctx.y))
    return [(equal * (ctx.dy / equal.op("ReduceSum", axes, keepdims=1))).name]
