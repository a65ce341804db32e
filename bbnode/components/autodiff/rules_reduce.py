"""Gradient rules of reductions and of the softmax family.

Rule: a reduction hands its gradient to every element that it summed.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.components.autodiff.rules.layers import share_among_equals
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


def _spread(ctx: VjpContext, grad: str) -> str:
    """`grad` of the reduced value, expanded to the shape of the reduction's input."""
    b = ctx.b
    if ctx.has(1) and int(ctx.attribute("keepdims", 1)) == 0:
        grad = b.op("Unsqueeze", grad, ctx.inputs[1])
    # Without axes everything was summed: a scalar expands as it is.
    return b.op("Expand", grad, b.op("Shape", ctx.inputs[0]))


@vjp("ReduceSum", constant_inputs={1})
def _reduce_sum(ctx: VjpContext) -> Grads:
    rest: list[str | None] = [None] * (len(ctx.inputs) - 1)
    return [_spread(ctx, ctx.g), *rest]


@vjp("ReduceMean", constant_inputs={1})
def _reduce_mean(ctx: VjpContext) -> Grads:
    b = ctx.b
    elem_type = ctx.elem_type(ctx.inputs[0])
    # Counts as floats: an integer division by the size of an empty batch would trap.
    count_in = b.op("Cast", b.op("Size", ctx.inputs[0]), to=elem_type)
    count_out = b.op("Cast", b.op("Size", ctx.y), to=elem_type)
    share = b.op("Div", ctx.g, b.op("Div", count_in, count_out))
    rest: list[str | None] = [None] * (len(ctx.inputs) - 1)
    return [_spread(ctx, share), *rest]


@vjp("Softmax")
def _softmax(ctx: VjpContext) -> Grads:
    b = ctx.b
    weighted = b.op("Mul", ctx.g, ctx.y)
    axes = b.ints([int(ctx.attribute("axis", -1))])
    total = b.op("ReduceSum", weighted, axes, keepdims=1)
    return [b.op("Sub", weighted, b.op("Mul", ctx.y, total))]


@vjp("LogSoftmax")
def _log_softmax(ctx: VjpContext) -> Grads:
    b = ctx.b
    axes = b.ints([int(ctx.attribute("axis", -1))])
    total = b.op("ReduceSum", ctx.g, axes, keepdims=1)
    return [b.op("Sub", ctx.g, b.op("Mul", b.op("Exp", ctx.y), total))]


@vjp("ReduceMax", constant_inputs={1})
@vjp("ReduceMin", constant_inputs={1})
def _reduce_extreme(ctx: VjpContext) -> Grads:
    if int(ctx.attribute("noop_with_empty_axes", 0)):
        raise ctx.error("it may reduce nothing (noop_with_empty_axes)", "give it the axes")
    b = ctx.b
    chosen, grad = ctx.y, ctx.g
    axes = ctx.inputs[1] if ctx.has(1) else None
    if axes is not None and int(ctx.attribute("keepdims", 1)) == 0:
        chosen, grad = b.op("Unsqueeze", chosen, axes), b.op("Unsqueeze", grad, axes)
    rest: list[str | None] = [None] * (len(ctx.inputs) - 1)
    return [share_among_equals(ctx, ctx.inputs[0], chosen, grad, axes), *rest]
