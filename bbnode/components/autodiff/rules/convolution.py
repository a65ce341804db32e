"""Gradient rules of Conv and of the pools that slide a window.

Rule: data are laid out as ONNX has them, (batch, channels, spatial axes …), with any number of
spatial axes. A convolution's gradients are convolutions again (Dumoulin and Visin, 2016,
arXiv:1603.07285, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.rules_index import scatter_back
from bbnode.components.autodiff.table import VjpContext, vjp
from bbnode.components.autodiff.windows import Windows, channels, read_windows

Grads = Sequence[str | None]


@vjp("Conv")
def _conv(ctx: VjpContext) -> Grads:
    x, weight = ctx.inputs[:2]
    b = ctx.b
    dims = ctx.type_of(weight).dims
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        raise ctx.error(f"the shape of the kernel {weight!r} is unknown ({dims})")
    shape = [int(dim) for dim in dims if isinstance(dim, int)]
    windows = read_windows(ctx, shape[2:])
    groups = int(ctx.attribute("group", 1))
    grads: list[str | None] = [None, None]
    if ctx.wants(0):
        grads[0] = _spread(ctx, ctx.g, weight, windows, groups)
    if ctx.wants(1):
        grads[1] = _kernel_gradient(ctx, x, windows, groups, shape[1])
    if len(ctx.inputs) > 2:
        axes = b.ints([0, *range(2, len(shape))])
        bias = b.op("ReduceSum", ctx.g, axes, keepdims=0) if ctx.wants(2) else None
        grads.append(bias)
    return grads


def _spread(ctx: VjpContext, grad: str, weight: str, windows: Windows, groups: int) -> str:
    """Every position gets the gradients of the windows that it is in, weighted."""
    return ctx.b.op(
        "ConvTranspose",
        grad,
        weight,
        strides=list(windows.strides),
        dilations=list(windows.dilations),
        pads=windows.pads,
        # Positions behind the last window are in none; they get zeros.
        output_padding=windows.slack(),
        group=groups,
        kernel_shape=list(windows.kernel),
    )


def _kernel_gradient(ctx: VjpContext, x: str, windows: Windows, groups: int, inner: int) -> str:
    """A convolution of the input with the gradient, in which batch and channels change places.

    `inner` is the number of input channels of a group. The kernel then slides by what was the
    dilation, and its own entries are as far apart as the windows were.
    """
    b = ctx.b
    rank = len(windows.kernel) + 2
    swap = [1, 0, *range(2, rank)]
    if groups == 1:
        data = b.op("Transpose", x, perm=swap)
    else:
        # (N, G * C, …) to (C, G * N, …): the examples of a group are its input channels.
        batch, space = b.op("Shape", x, start=0, end=1), b.op("Shape", x, start=2)
        apart = b.op("Concat", batch, b.ints([groups, inner]), space, axis=0)
        data = b.op("Reshape", x, apart, allowzero=1)
        data = b.op("Transpose", data, perm=[2, 1, 0, *range(3, rank + 1)])
        rows = b.op("Mul", batch, b.ints([groups]))
        data = b.op("Reshape", data, b.op("Concat", b.ints([inner]), rows, space, axis=0),
                    allowzero=1)  # fmt: skip
    found = b.op(
        "Conv",
        data,
        b.op("Transpose", ctx.g, perm=swap),
        strides=list(windows.dilations),
        dilations=list(windows.strides),
        pads=windows.pads,
        group=groups,
    )
    if any(windows.slack()):
        # The positions behind the last window make room for entries that no kernel has.
        axes = range(2, rank)
        found = b.op("Slice", found, b.ints([0] * len(axes)), b.ints(windows.kernel), b.ints(axes))
    return b.op("Transpose", found, perm=swap)


@vjp("MaxPool")
def _max_pool(ctx: VjpContext) -> Grads:
    """Each window's gradient goes to its maximum, the first one of several."""
    if len(ctx.grads) > 1 and ctx.grads[1] is not None:
        raise ctx.error("its indices have no gradient", "use its first output alone")
    settings = {
        attribute.name: helper.get_attribute_value(attribute)
        for attribute in ctx.node.attribute
        if attribute.name != "storage_order"  # of the indices; here they are row-major
    }
    settings = {k: v.decode() if isinstance(v, bytes) else v for k, v in settings.items()}
    _, indices = ctx.b.emit("MaxPool", [ctx.inputs[0]], 2, **settings)
    return [scatter_back(ctx, indices, ctx.g, ctx.inputs[0])]


@vjp("AveragePool")
def _average_pool(ctx: VjpContext) -> Grads:
    """Each position gets an even share of the gradients of the windows that it is in."""
    x = ctx.inputs[0]
    kernel: list[int] = list(ctx.attribute("kernel_shape", []))
    windows = read_windows(ctx, kernel, need_sizes=True)
    if int(ctx.attribute("ceil_mode", 0)) and any(windows.slack()):
        raise ctx.error(
            "ceil_mode gives it windows that reach beyond the padding",
            "set ceil_mode to 0, and pad so that the windows fit",
        )
    dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(x))
    if int(ctx.attribute("count_include_pad", 0)):
        counts = np.full((), np.prod(kernel), dtype)
    else:
        counts = windows.counts().astype(dtype)
    share = ctx.b.op("Div", ctx.g, ctx.b.constant(counts, "counts"))
    planes = channels(ctx, x)
    ones = ctx.b.constant(np.ones((planes, 1, *kernel), dtype), "ones")
    return [_spread(ctx, share, ones, windows, planes)]
