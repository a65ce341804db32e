"""Gradient rules of the pools that are norms, and of normalization across channels.

Rule: sums over windows go back as transposed convolutions with a kernel of ones, per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.rules.convolution import channels, read_windows, spread
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]


def _norm_slope(x: Term, over: Term, order: int) -> Term:
    """Return x's gradient of (sum |x|^p)^(1/p); `over` is dy y^(1-p), put back to x's places."""
    if order == 1:
        return x.op("Sign") * over
    if order == 2:
        return x * over
    return x.op("Sign") * x.op("Abs").op("Pow", float(order - 1)) * over


def _per_norm(ctx: VjpContext, order: int) -> Term:
    """Return dy y^(1-p); nothing where y is 0, for there every element is."""
    if order == 1:
        return ctx.dy
    powered = ctx.out if order == 2 else ctx.out.op("Pow", float(order - 1))
    return (ctx.out > 0.0).where(ctx.dy / (ctx.out > 0.0).where(powered, 1.0), 0.0)


@vjp("LpPool")
def _lp_pool(ctx: VjpContext) -> Grads:
    x, order = ctx.input(0), int(ctx.attribute("p", 2))
    kernel: list[int] = list(ctx.attribute("kernel_shape", []))
    rounds_up = bool(ctx.attribute("ceil_mode", 0))
    windows = read_windows(ctx, kernel, need_sizes=rounds_up)
    if rounds_up:
        windows = windows.rounded_up()
    planes = channels(ctx, x.name)
    dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(x.name))
    ones = ctx.b.constant(np.ones((planes, 1, *kernel), dtype), "ones")
    back = spread(ctx, _per_norm(ctx, order).name, ones, windows, planes)
    return [_norm_slope(x, ctx.term(back), order).name]


@vjp("GlobalLpPool")
def _global_lp_pool(ctx: VjpContext) -> Grads:
    order = int(ctx.attribute("p", 2))
    return [_norm_slope(ctx.input(0), _per_norm(ctx, order), order).name]


@vjp("LRN")
def _lrn(ctx: VjpContext) -> Grads:
    """Krizhevsky et al., 2012: y = x d^-beta, d = bias + alpha/size * sum of x^2 over channels.

    dx = dy d^-beta - 2 alpha beta/size x S(dy x d^(-beta-1)), S: the sum over the windows that a
    channel is in.
    """
    x = ctx.input(0)
    size = int(ctx.attribute("size", 0))
    alpha, beta = float(ctx.attribute("alpha", 1e-4)), float(ctx.attribute("beta", 0.75))
    left, right = (size - 1) // 2, size - 1 - (size - 1) // 2

    def summed(value: Term, before: int, after: int) -> Term:
        # One plane per example, whose rows are the channels.
        b = ctx.b
        space = b.op("ReduceProd", b.op("Shape", x.name, start=2), keepdims=1)
        shape = b.op("Concat", b.op("Shape", x.name, start=0, end=2), space, axis=0)
        rows = b.op("Unsqueeze", b.op("Reshape", value.name, shape, allowzero=1), b.ints([1]))
        dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(x.name))
        ones = b.constant(np.ones((1, 1, size, 1), dtype), "ones")
        sums = b.op("Conv", rows, ones, pads=[before, 0, after, 0], kernel_shape=[size, 1])
        return ctx.term(b.reshape_like(sums, x.name))

    divisor = summed(x * x, left, right) * (alpha / size) + float(ctx.attribute("bias", 1.0))
    direct = ctx.dy * divisor.op("Pow", -beta)
    crossed = summed(ctx.dy * x * divisor.op("Pow", -beta - 1.0), right, left)
    return [(direct - x * crossed * (2.0 * alpha * beta / size)).name]
