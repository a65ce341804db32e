"""Gradient rules of products, reductions, the softmax family, normalizations and global pools.

Rule: for Y = A B the gradients are G B^T and A^T G; a reduction hands its gradient to every
element that it summed. Statistics of a normalization are computed again from the input (a runtime
shares what the forward pass computes alike); where they are constants, as in BatchNormalization
when a model is run, they stay constants.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.components.autodiff.builder import Dims
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]

_EPSILON = 1e-5  # ONNX's default of both normalizations


# --- products -------------------------------------------------------------------------------


def _swap_last_two(ctx: VjpContext, value: str, rank: int) -> str:
    perm = [*range(rank - 2), rank - 1, rank - 2]
    return ctx.b.op("Transpose", value, perm=perm)


@vjp("MatMul")
def _matmul(ctx: VjpContext) -> Grads:
    a, c = ctx.inputs
    b = ctx.b
    rank_a, rank_c = ctx.rank(a), ctx.rank(c)
    grad = ctx.g
    # numpy's rule: a vector on the left is a row, on the right a column; Y loses that axis.
    left, right = a, c
    if rank_c == 1:
        right = b.op("Unsqueeze", c, b.ints([1]))
        grad = b.op("Unsqueeze", grad, b.ints([-1]))
    if rank_a == 1:
        left = b.op("Unsqueeze", a, b.ints([0]))
        grad = b.op("Unsqueeze", grad, b.ints([-2]))
    grad_a = grad_c = None
    if ctx.wants(0):
        full = b.op("MatMul", grad, _swap_last_two(ctx, right, max(rank_c, 2)))
        grad_a = ctx.sum_to(full, a, _matmul_dims(ctx, 0))
    if ctx.wants(1) and rank_a > 2 and rank_c == 2:
        # One product over all rows: a sum over products of each batch would write them all.
        rows = (b.op("Flatten", value, axis=rank_a - 1) for value in (left, grad))
        grad_c = b.op("Gemm", *rows, transA=1)
    elif ctx.wants(1):
        full = b.op("MatMul", _swap_last_two(ctx, left, max(rank_a, 2)), grad)
        if rank_c == 1:
            full = b.op("Squeeze", full, b.ints([-1]))
        grad_c = ctx.sum_to(full, c, _matmul_dims(ctx, 1))
    return [grad_a, grad_c]


def _matmul_dims(ctx: VjpContext, index: int) -> Dims | None:
    """Return the dimensions of an operand's gradient before it is summed: Y's batch axes first."""
    operands = [ctx.type_of(name).dims for name in ctx.inputs]
    own, out = operands[index], ctx.type_of(ctx.y).dims
    if own is None or out is None:
        return None
    vectors = sum(dims is not None and len(dims) == 1 for dims in operands)
    batch = out[: len(out) - 2 + vectors]
    if len(own) == 1 and index == 0:
        return (*batch, 1, *own)  # the unit axis that made a row of the vector
    return (*batch, *own[-2:])


@vjp("Gemm")
def _gemm(ctx: VjpContext) -> Grads:
    a, c = ctx.inputs[:2]
    b = ctx.b
    alpha = float(ctx.attribute("alpha", 1.0))
    beta = float(ctx.attribute("beta", 1.0))
    trans_a = int(ctx.attribute("transA", 0))
    trans_c = int(ctx.attribute("transB", 0))
    grads: list[str | None] = [None, None, None]
    if ctx.wants(0):
        if trans_a:
            grads[0] = b.op("Gemm", c, ctx.g, alpha=alpha, transA=trans_c, transB=1)
        else:
            grads[0] = b.op("Gemm", ctx.g, c, alpha=alpha, transB=1 - trans_c)
    if ctx.wants(1):
        if trans_c:
            grads[1] = b.op("Gemm", ctx.g, a, alpha=alpha, transA=1, transB=trans_a)
        else:
            grads[1] = b.op("Gemm", a, ctx.g, alpha=alpha, transA=1 - trans_a)
    if ctx.wants(2):
        scaled = ctx.g if beta == 1.0 else b.op("Mul", ctx.g, ctx.scalar(beta, ctx.inputs[2]))
        grads[2] = ctx.sum_to(scaled, ctx.inputs[2])
    return grads


# --- reductions and softmax ------------------------------------------------------------------


def _spread(ctx: VjpContext, grad: str) -> str:
    """Return `grad` of the reduced value, expanded to the shape of the reduction's input."""
    b = ctx.b
    if ctx.has(1) and int(ctx.attribute("keepdims", 1)) == 0:
        grad = b.op("Unsqueeze", grad, ctx.inputs[1])
    # Without axes everything was summed: a scalar expands as it is.
    return b.op("Expand", grad, b.op("Shape", ctx.inputs[0]))


@vjp("ReduceSum", constant_inputs={1})
def _reduce_sum(ctx: VjpContext) -> Grads:
    return [_spread(ctx, ctx.g)]


@vjp("ReduceMean", constant_inputs={1})
def _reduce_mean(ctx: VjpContext) -> Grads:
    return [_spread(ctx, _average(ctx))]


def _average(ctx: VjpContext) -> str:
    """Return the output's gradient divided by how many elements each output was averaged from."""
    b, x = ctx.b, ctx.inputs[0]
    # Counts as floats: an integer division by the size of an empty batch would trap.
    into, out = (b.op("Cast", b.op("Size", each), to=ctx.elem_type(x)) for each in (x, ctx.y))
    return b.op("Div", ctx.g, b.op("Div", into, out))


@vjp("Softmax")
def _softmax(ctx: VjpContext) -> Grads:
    weighted = ctx.dy * ctx.out
    return [(weighted - ctx.out * _sum_over_axis(ctx, weighted)).name]


@vjp("LogSoftmax")
def _log_softmax(ctx: VjpContext) -> Grads:
    return [(ctx.dy - ctx.out.op("Exp") * _sum_over_axis(ctx, ctx.dy)).name]


def _sum_over_axis(ctx: VjpContext, value: Term) -> Term:
    axes = ctx.term(ctx.b.ints([int(ctx.attribute("axis", -1))]))
    return value.op("ReduceSum", axes, keepdims=1)


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
    return [_share_among_equals(ctx, ctx.inputs[0], chosen, grad, axes)]


# --- normalizations and pools over a whole plane ------------------------------------------------


@vjp("BatchNormalization", constant_inputs={3, 4})
def _batch_normalization(ctx: VjpContext) -> Grads:
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel (axis 1)."""
    if int(ctx.attribute("training_mode", 0)):
        raise ctx.error(
            "in training mode it keeps running statistics, which a graph has nowhere to keep",
            "set training_mode to 0, or use LayerNormalization, which needs no statistics",
        )
    x, scale, _, mean, variance = (ctx.input(index) for index in range(5))
    b, rank = ctx.b, ctx.rank(x.name)
    # A channel's numbers, so that they broadcast over the spatial axes behind it.
    column = ctx.term(b.ints([-1, *[1] * (rank - 2)]))
    others = ctx.term(b.ints([0, *range(2, rank)]))
    spread = variance + float(ctx.attribute("epsilon", _EPSILON))
    inverse = ctx.term(ctx.scalar(1.0, variance.name)) / spread.op("Sqrt")
    grads: list[str | None] = [None] * 5
    if ctx.wants(0):
        grads[0] = (ctx.dy * (scale * inverse).op("Reshape", column)).name
    if ctx.wants(1):
        normal = (x - mean.op("Reshape", column)) * inverse.op("Reshape", column)
        grads[1] = (ctx.dy * normal).op("ReduceSum", others, keepdims=0).name
    if ctx.wants(2):
        grads[2] = ctx.dy.op("ReduceSum", others, keepdims=0).name
    return grads


@vjp("LayerNormalization")
def _layer_normalization(ctx: VjpContext) -> Grads:
    """Ba, Kiros and Hinton, 2016 (arXiv:1607.06450): over `axis` and all axes behind it.

    With n = (x - mean) / deviation and h = g * scale: dx = (h - mean(h) - n mean(h n)) / deviation.
    """
    if any(grad is not None for grad in ctx.grads[1:]):
        raise ctx.error("only its first output has a gradient", "work out mean and variance apart")
    x, scale = ctx.input(0), ctx.input(1)
    axes = ctx.term(ctx.b.ints(range(ctx.axis(x.name, -1), ctx.rank(x.name))))

    def mean(value: Term) -> Term:
        return value.op("ReduceMean", axes, keepdims=1)

    centred = x - mean(x)
    spread = mean(centred * centred) + float(ctx.attribute("epsilon", _EPSILON))
    deviation = spread.op("Sqrt")
    normal = centred / deviation
    grads: list[str | None] = [None] * len(ctx.inputs)
    if ctx.wants(0):
        scaled = ctx.dy * scale
        along = mean(scaled * normal)
        grads[0] = ((scaled - mean(scaled) - normal * along) / deviation).name
    if ctx.wants(1):
        grads[1] = ctx.sum_to((ctx.dy * normal).name, scale.name)
    if ctx.wants(2):
        grads[2] = ctx.sum_to(ctx.g, ctx.inputs[2])
    return grads


@vjp("GlobalAveragePool")
def _global_average_pool(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Expand", _average(ctx), ctx.b.op("Shape", ctx.inputs[0]))]


@vjp("GlobalMaxPool")
def _global_max_pool(ctx: VjpContext) -> Grads:
    axes = ctx.b.ints(range(2, ctx.rank(ctx.inputs[0])))
    return [_share_among_equals(ctx, ctx.inputs[0], ctx.y, ctx.g, axes)]


def _share_among_equals(ctx: VjpContext, x: str, chosen: str, grad: str, axes: str | None) -> str:
    """Return the gradient of a maximum or minimum: an even share to all elements that equal it."""
    b = ctx.b
    equal = b.op("Cast", b.op("Equal", x, chosen), to=ctx.elem_type(x))
    inputs = [equal] if axes is None else [equal, axes]
    count = b.op("ReduceSum", *inputs, keepdims=1)
    return b.op("Mul", equal, b.op("Div", grad, count))
