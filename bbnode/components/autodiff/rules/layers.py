"""Gradient rules of matrix products and of the softmax family.

Rule: for Y = A B the gradients are G B^T and A^T G, summed over axes that were broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.components.autodiff.builder import Dims
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]


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


@vjp("Softmax")
def _softmax(ctx: VjpContext) -> Grads:
    # Of the two ways to write it the one whose passes can be done in place.
    return [((ctx.dy - _sum_over_axis(ctx, ctx.dy * ctx.out)) * ctx.out).name]


@vjp("LogSoftmax")
def _log_softmax(ctx: VjpContext) -> Grads:
    return [(ctx.dy - ctx.out.op("Exp") * _sum_over_axis(ctx, ctx.dy)).name]


def _sum_over_axis(ctx: VjpContext, value: Term) -> Term:
    axes = ctx.term(ctx.b.ints([int(ctx.attribute("axis", -1))]))
    return value.op("ReduceSum", axes, keepdims=1)
