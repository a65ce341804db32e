"""Gradient rules of normalizations and of pools over a whole plane.

Rule: statistics are worked out again from the input; a runtime shares what the forward pass
computes alike. Where statistics are constants (BatchNormalization as a model is run), they stay
constants.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]

_EPSILON = 1e-5  # ONNX's default of both normalizations


@vjp("BatchNormalization", constant_inputs={3, 4})
def _batch_normalization(ctx: VjpContext) -> Grads:
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel (axis 1)."""
    if int(ctx.attribute("training_mode", 0)):
        raise ctx.error(
            "in training mode it keeps running statistics, which a graph has nowhere to keep",
            "set training_mode to 0, or use LayerNormalization, which needs no statistics",
        )
    x, scale, _, mean, variance = ctx.inputs
    b = ctx.b
    rank = ctx.rank(x)
    # A channel's numbers, so that they broadcast over the spatial axes behind it.
    column = b.ints([-1, *[1] * (rank - 2)])
    others = b.ints([0, *range(2, rank)])
    spread = b.op("Add", variance, ctx.scalar(float(ctx.attribute("epsilon", _EPSILON)), variance))
    inverse = b.op("Div", ctx.scalar(1.0, variance), b.op("Sqrt", spread))
    grads: list[str | None] = [None] * 5
    if ctx.wants(0):
        factor = b.op("Reshape", b.op("Mul", scale, inverse), column)
        grads[0] = b.op("Mul", ctx.g, factor)
    if ctx.wants(1):
        centred = b.op("Sub", x, b.op("Reshape", mean, column))
        normal = b.op("Mul", centred, b.op("Reshape", inverse, column))
        grads[1] = b.op("ReduceSum", b.op("Mul", ctx.g, normal), others, keepdims=0)
    if ctx.wants(2):
        grads[2] = b.op("ReduceSum", ctx.g, others, keepdims=0)
    return grads


@vjp("LayerNormalization")
def _layer_normalization(ctx: VjpContext) -> Grads:
    """Ba, Kiros and Hinton, 2016 (arXiv:1607.06450): over `axis` and all axes behind it.

    With n = (x - mean) / deviation and h = g * scale: dx = (h - mean(h) - n mean(h n)) / deviation.
    """
    if any(grad is not None for grad in ctx.grads[1:]):
        raise ctx.error("only its first output has a gradient", "work out mean and variance apart")
    x, scale = ctx.inputs[:2]
    b = ctx.b
    axes = b.ints(range(ctx.axis(x, -1), ctx.rank(x)))
    centred = b.op("Sub", x, b.op("ReduceMean", x, axes, keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=1)
    spread = b.op("Add", variance, ctx.scalar(float(ctx.attribute("epsilon", _EPSILON)), x))
    deviation = b.op("Sqrt", spread)
    normal = b.op("Div", centred, deviation)
    grads: list[str | None] = [None] * len(ctx.inputs)
    if ctx.wants(0):
        scaled = b.op("Mul", ctx.g, scale)
        along = b.op("ReduceMean", b.op("Mul", scaled, normal), axes, keepdims=1)
        rest = b.op("Sub", scaled, b.op("ReduceMean", scaled, axes, keepdims=1))
        grads[0] = b.op("Div", b.op("Sub", rest, b.op("Mul", normal, along)), deviation)
    if ctx.wants(1):
        grads[1] = ctx.sum_to(b.op("Mul", ctx.g, normal), scale)
    if ctx.wants(2):
        grads[2] = ctx.sum_to(ctx.g, ctx.inputs[2])
    return grads


@vjp("GlobalAveragePool")
def _global_average_pool(ctx: VjpContext) -> Grads:
    b = ctx.b
    x = ctx.inputs[0]
    elem_type = ctx.elem_type(x)
    count = b.op("Div", b.op("Cast", b.op("Size", x), to=elem_type),
                 b.op("Cast", b.op("Size", ctx.y), to=elem_type))  # fmt: skip
    return [b.op("Expand", b.op("Div", ctx.g, count), b.op("Shape", x))]


@vjp("GlobalMaxPool")
def _global_max_pool(ctx: VjpContext) -> Grads:
    axes = ctx.b.ints(range(2, ctx.rank(ctx.inputs[0])))
    return [share_among_equals(ctx, ctx.inputs[0], ctx.y, ctx.g, axes)]


def share_among_equals(ctx: VjpContext, x: str, chosen: str, grad: str, axes: str | None) -> str:
    """The gradient of a maximum or minimum over `axes`: an even share to all that equal it."""
    b = ctx.b
    equal = b.op("Cast", b.op("Equal", x, chosen), to=ctx.elem_type(x))
    inputs = [equal] if axes is None else [equal, axes]
    count = b.op("ReduceSum", *inputs, keepdims=1)
    return b.op("Mul", equal, b.op("Div", grad, count))
