"""Gradient rules of ops that enlarge, rearrange or sample images, of any number of spatial axes.

Rule: data are laid out as ONNX has them, (batch, channels, spatial axes …). What is linear in its
input is turned around: a transposed convolution is a convolution's gradient and the other way
around, and a resampling is a matrix per axis, which the op itself computes from a unit matrix. So
one rule holds for all modes of an op, and for what a runtime makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import InferredType
from bbnode.components.autodiff.reverse import pull_back
from bbnode.components.autodiff.rules.convolution import channels, spatial_sizes
from bbnode.components.autodiff.rules.moving import scatter_back
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


# --- ConvTranspose ----------------------------------------------------------------------------


@vjp("ConvTranspose")
def _conv_transpose(ctx: VjpContext) -> Grads:
    """Differentiate the transpose of a convolution: dx is that convolution of the gradient.

    The kernel's gradient is that of the same convolution, from the output's gradient to the input.
    """
    b, weight = ctx.b, ctx.inputs[1]
    dims = ctx.type_of(weight).dims
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        raise ctx.error(f"the shape of the kernel {weight!r} is unknown ({dims})")
    kernel = [int(dim) for dim in dims[2:] if isinstance(dim, int)]
    axes = range(2, len(kernel) + 2)
    before, after = _transposed_pads(ctx, kernel)
    grads: list[str | None] = [None, None, None]
    if ctx.wants(2):
        grads[2] = b.op("ReduceSum", ctx.g, b.ints([0, *axes]), keepdims=0)
    if not (ctx.wants(0) or ctx.wants(1)):
        return grads
    # Positions behind all that any input reaches: they are there by output_padding alone.
    beyond = [max(-pad, 0) for pad in after]
    grad, kind = ctx.g, ctx.type_of(ctx.y)
    if any(beyond):
        cut = [axis for axis, count in zip(axes, beyond, strict=True) if count]
        ends = [-count for count in beyond if count]
        grad = b.op("Slice", grad, b.ints([0] * len(cut)), b.ints(ends), b.ints(cut))
        sizes = [
            dim - beyond[axis - 2] if axis >= 2 and isinstance(dim, int) else dim
            for axis, dim in enumerate(kind.dims or ())
        ]
        kind = InferredType(kind.elem_type, None if kind.dims is None else tuple(sizes))
    settings: dict[str, list[int]] = {
        "strides": list(ctx.attribute("strides", [1] * len(kernel))),
        "dilations": list(ctx.attribute("dilations", [1] * len(kernel))),
        "pads": [*before, *(max(pad, 0) for pad in after)],
        "kernel_shape": kernel,
    }
    groups = int(ctx.attribute("group", 1))
    x = ctx.inputs[0]
    back = b.op("Conv", grad, weight, group=groups, **settings)
    if ctx.wants(0):
        grads[0] = back
    if ctx.wants(1):
        # x's own name may not stand for what that Conv gives: another node of the graph makes it,
        # which Conv's rule would then have written anew.
        types = {grad: kind, weight: ctx.type_of(weight), back: ctx.type_of(x)}
        grads[1] = pull_back(b, [b.made[back]], types, {back: x}, [weight])[weight]
    return grads


def _transposed_pads(ctx: VjpContext, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return what is cut off before and after the whole output, per axis; after may be negative.

    From the operator page of ConvTranspose: output_shape and SAME_UPPER, SAME_LOWER set the pads.
    """
    count = len(kernel)
    ones, zeros = [1] * count, [0] * count
    strides = ctx.attribute("strides", ones)
    dilations = ctx.attribute("dilations", ones)
    extra = ctx.attribute("output_padding", zeros)
    auto = ctx.attribute("auto_pad", "NOTSET")
    wanted: list[int] = list(ctx.attribute("output_shape", []))
    if not wanted and auto not in ("SAME_UPPER", "SAME_LOWER"):
        pads = zeros * 2 if auto == "VALID" else ctx.attribute("pads", zeros * 2)
        return list(pads[:count]), [
            pad - more for pad, more in zip(pads[count:], extra, strict=True)
        ]
    sizes = spatial_sizes(ctx, ctx.inputs[0])
    outputs = spatial_sizes(ctx, ctx.y)
    before, after = [], []
    for i, k in enumerate(kernel):
        whole = strides[i] * (sizes[i] - 1) + dilations[i] * (k - 1) + 1
        total = max(whole + extra[i] - outputs[i], 0)
        first = total // 2 if auto == "SAME_UPPER" else total - total // 2
        before.append(first)
        after.append(whole - first - outputs[i])
    return before, after


# --- resampling -------------------------------------------------------------------------------


@vjp("Resize", constant_inputs={1, 2, 3})
def _resize(ctx: VjpContext) -> Grads:
    """Multiply by the transposed interpolation matrix of every axis that is resized."""
    b, x = ctx.b, ctx.inputs[0]
    if ctx.wants(1):
        raise ctx.error(
            f"the region {ctx.inputs[1]!r} depends on what is differentiated",
            "make it a constant, or sample with GridSample",
        )
    rank = ctx.rank(x)
    axes = [axis % rank for axis in ctx.attribute("axes", list(range(rank)))]
    scales = ctx.held(2)
    dims = ctx.type_of(x).dims
    if scales is not None and any(scales != 1) and dims == ctx.type_of(ctx.y).dims and dims:
        raise ctx.error(
            f"its scales {scales.tolist()} leave all sizes as they are, and runtimes then differ",
            "leave it out, or give it scales that change a size",
        )
    blocks = _repeats(ctx, axes)
    if blocks is not None:
        return [_sum_blocks(ctx, blocks)]
    grad = ctx.g
    for position, axis in enumerate(axes):
        if not _changes(ctx, axis, None if scales is None else float(scales[position])):
            continue
        matrix = _interpolation(ctx, axes, position)  # (in, out)
        if axis == rank - 1:
            grad = b.op("MatMul", grad, b.op("Transpose", matrix, perm=[1, 0]))
        elif axis == rank - 2:
            grad = b.op("MatMul", matrix, grad)
        else:
            swap = [*range(axis), rank - 1, *range(axis + 1, rank - 1), axis]
            turned = b.op("Transpose", grad, perm=swap)
            turned = b.op("MatMul", turned, b.op("Transpose", matrix, perm=[1, 0]))
            grad = b.op("Transpose", turned, perm=swap)
    return [grad]


def _changes(ctx: VjpContext, axis: int, scale: float | None) -> bool:
    """Return False if the values of an axis stay as they are."""
    if ctx.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return True
    if scale is not None:
        return scale != 1.0
    if ctx.has(2) or ctx.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        return True
    old, new = ctx.type_of(ctx.inputs[0]).dims, ctx.type_of(ctx.y).dims
    if old is None or new is None or old[axis] is None:
        return True
    return old[axis] != new[axis]  # the same symbol is the same size


def _interpolation(ctx: VjpContext, axes: Sequence[int], position: int) -> str:
    """Return the weights (in, out) of one axis: the node itself, applied to a unit matrix."""
    b, x = ctx.b, ctx.inputs[0]
    axis = axes[position]
    policy = ctx.attribute("keep_aspect_ratio_policy", "stretch")
    settings = {
        a.name: helper.get_attribute_value(a) for a in ctx.node.attribute if a.name != "axes"
    }
    settings["extrapolation_value"] = 0.0  # what lies outside is a constant
    size = _length(ctx, x, axis)
    shape = b.op("Concat", size, size, axis=0)
    zero = b.constant(np.zeros(1, _dtype(ctx, x)), "zero")
    unit = b.op("EyeLike", b.op("Expand", zero, shape))
    if ctx.has(3) and policy != "stretch":
        # One scale for all axes: they have to be there, and every other one is constant.
        rank = len(axes)
        every = [_length(ctx, x, each) for each in axes]
        unit = b.op("Unsqueeze", unit, b.ints([1 + i for i in range(rank) if i != position]))
        unit = b.op("Expand", unit, b.op("Concat", size, *every, axis=0))
        settings["axes"] = list(range(1, rank + 1))
        roi = ctx.inputs[1] if ctx.has(1) else ""
        whole = b.emit("Resize", [unit, roi, "", ctx.inputs[3]], 1, **settings)[0]
        for other in reversed(range(rank)):
            if other != position:
                first = b.constant(np.asarray(0, np.int64), "first")
                whole = b.op("Gather", whole, first, axis=other + 1)
        return whole

    def of_axis(name: str, at: int) -> str:
        return b.op("Slice", name, b.ints([at]), b.ints([at + 1]), b.ints([0]))

    # An axis of one element between, which is doubled: ONNX Runtime leaves a tensor as it is where
    # its sizes stay, whatever the scales say.
    unit = b.op("Unsqueeze", unit, b.ints([1, 2]))
    one = b.ints([1])
    roi = ""
    if ctx.has(1) and settings.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        dtype = _dtype(ctx, ctx.inputs[1])
        starts, ends = (b.constant(np.full(3, n, dtype), "region") for n in (0, 1))
        first, last = (of_axis(ctx.inputs[1], at) for at in (position, position + len(axes)))
        roi = b.op("Concat", starts, first, ends, last, axis=0)
    if ctx.has(3):
        sizes = b.op("Concat", size, one, b.ints([2]), of_axis(ctx.inputs[3], position), axis=0)
        made = b.emit("Resize", [unit, roi, "", sizes], 1, **settings)[0]
    else:
        others = b.constant(np.array([1, 1, 2], np.float32), "scales")
        scales = b.op("Concat", others, of_axis(ctx.inputs[2], position), axis=0)
        made = b.emit("Resize", [unit, roi, scales], 1, **settings)[0]
    half = b.op("Slice", made, b.ints([0]), one, b.ints([2]))
    return b.op("Squeeze", half, b.ints([1, 2]))


def _repeats(ctx: VjpContext, axes: Sequence[int]) -> list[int] | None:
    """Return how often Resize repeats each element of each axis; None if it does anything else."""
    dims, out = ctx.type_of(ctx.inputs[0]).dims, ctx.type_of(ctx.y).dims
    mode = ctx.attribute("coordinate_transformation_mode", "half_pixel")
    if dims is None or out is None or ctx.attribute("mode", "nearest") != "nearest":
        return None
    if mode not in ("asymmetric", "half_pixel", "pytorch_half_pixel"):
        return None
    if ctx.has(3) and ctx.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    scales = ctx.held(2)
    if ctx.has(2) and scales is None:
        return None
    counts = [1] * len(dims)
    for position, axis in enumerate(axes):
        scale = 1.0 if scales is None else float(scales[position])
        if not _changes(ctx, axis, None if scales is None else scale):
            continue
        old, new = dims[axis], out[axis]
        if not isinstance(old, int) or not isinstance(new, int) or not old or new % old:
            return None
        count = new // old
        if scales is not None and scale != count:
            return None
        at = np.arange(count)
        source = at / count if mode == "asymmetric" else (at + 0.5) / count - 0.5
        if not _stays(ctx, source):
            return None
        counts[axis] = count
    return counts


def _stays(ctx: VjpContext, source: np.ndarray) -> bool:
    """Return True if the nearest element of all these coordinates is number 0."""
    rounding = ctx.attribute("nearest_mode", "round_prefer_floor")
    if rounding == "floor":
        return bool((source >= 0).all() and (source < 1).all())
    if rounding == "ceil":
        return bool((source > -1).all() and (source <= 0).all())
    if rounding == "round_prefer_ceil":
        return bool((source >= -0.5).all() and (source < 0.5).all())
    return bool((source > -0.5).all() and (source <= 0.5).all())


def _sum_blocks(ctx: VjpContext, counts: Sequence[int]) -> str:
    """Return the sums over the blocks of positions that repeat one element."""
    b, x = ctx.b, ctx.inputs[0]
    sizes: list[str] = []
    summed: list[int] = []
    for axis, count in enumerate(counts):
        sizes.append(_length(ctx, x, axis))
        if count > 1:
            summed.append(len(sizes))
            sizes.append(b.ints([count]))
    if not summed:
        return ctx.g
    apart = b.op("Reshape", ctx.g, b.op("Concat", *sizes, axis=0), allowzero=1)
    return b.op("ReduceSum", apart, b.ints(summed), keepdims=0)


def _length(ctx: VjpContext, value: str, axis: int) -> str:
    """Return the size of one axis, [1] int64; a constant where it is known."""
    dims = ctx.type_of(value).dims
    size = None if dims is None else dims[axis]
    if isinstance(size, int):
        return ctx.b.ints([size])
    return ctx.b.op("Shape", value, start=axis, end=axis + 1)


def _dtype(ctx: VjpContext, value: str) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(ctx.elem_type(value)))


# --- rearranging ------------------------------------------------------------------------------


@vjp("DepthToSpace")
def _depth_to_space(ctx: VjpContext) -> Grads:
    block = int(ctx.attribute("blocksize", 1))
    if ctx.attribute("mode", "DCR") == "DCR":
        return [ctx.b.op("SpaceToDepth", ctx.g, blocksize=block)]
    # CRD: a channel's blocks are neighbours; (N, C, H, b, W, b) to (N, C, b, b, H, W).
    b = ctx.b
    rows, columns = (_length(ctx, ctx.inputs[0], axis) for axis in (2, 3))
    side = b.ints([block])
    outer = [_length(ctx, ctx.y, axis) for axis in (0, 1)]
    shape = b.op("Concat", *outer, rows, side, columns, side, axis=0)
    apart = b.op("Reshape", ctx.g, shape, allowzero=1)
    turned = b.op("Transpose", apart, perm=[0, 1, 3, 5, 2, 4])
    return [b.reshape_like(turned, ctx.inputs[0])]


@vjp("SpaceToDepth")
def _space_to_depth(ctx: VjpContext) -> Grads:
    block = int(ctx.attribute("blocksize", 1))
    return [ctx.b.op("DepthToSpace", ctx.g, blocksize=block, mode="DCR")]


@vjp("CenterCropPad", constant_inputs={1})
def _center_crop_pad(ctx: VjpContext) -> Grads:
    """Apply it to the elements' numbers from 1 on: what it pads with comes from element 0, none."""
    b, (x, shape) = ctx.b, ctx.inputs
    one = b.constant(np.asarray(1, np.int64), "number")
    size = b.op("Size", x)
    numbers = b.reshape_like(b.op("Range", one, b.op("Add", size, one), one), x)
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    picked = b.emit("CenterCropPad", [numbers, shape], 1, **settings)[0]
    # Number 0 turns into -1, which is the last place: the one behind all elements.
    return [scatter_back(ctx, b.op("Sub", picked, one), ctx.g, x, extra=1)]


@vjp("Col2Im", constant_inputs={1, 2})
def _col2im(ctx: VjpContext) -> Grads:
    """Cut the gradient into its blocks again: a convolution with one kernel per place in a block.

    Every kernel is 1 at its place and 0 elsewhere.
    """
    b, x = ctx.b, ctx.inputs[0]
    held = ctx.held(2)
    if held is None:
        raise ctx.error("its block_shape is no constant", "make it an initializer")
    block = [int(size) for size in held]
    count = len(block)
    places = int(np.prod(block))
    planes = channels(ctx, x) // places
    kernels = np.tile(np.eye(places).reshape(places, 1, *block), (planes, 1, *[1] * count))
    blocks = b.op(
        "Conv",
        ctx.g,
        b.constant(kernels.astype(_dtype(ctx, x)), "places"),
        strides=list(ctx.attribute("strides", [1] * count)),
        dilations=list(ctx.attribute("dilations", [1] * count)),
        pads=list(ctx.attribute("pads", [0] * (2 * count))),
        group=planes,
        kernel_shape=block,
    )
    return [b.reshape_like(blocks, x)]


@vjp("MaxUnpool", constant_inputs={1, 2})
def _max_unpool(ctx: VjpContext) -> Grads:
    """Read the gradient where the values were put; the indices count in the whole output."""
    b, (x, indices) = ctx.b, ctx.inputs[:2]
    if ctx.has(2):
        raise ctx.error(
            "its indices count in a tensor of another size than its output (output_shape)",
            "leave output_shape out, and pad or crop its output",
        )
    flat = b.ints([-1])
    found = b.op(
        "GatherElements", b.op("Reshape", ctx.g, flat), b.op("Reshape", indices, flat), axis=0
    )
    return [b.reshape_like(found, x)]
