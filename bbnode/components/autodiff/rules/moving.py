"""Gradient rules of the ops that move, pick, repeat or pad values without changing them.

Rule: the gradient goes back the way the values came; shapes are read from the forward values
inside the graph, so that a dynamic batch works. What Slice cut out is padded back, and what Gather
took goes back by whole rows. Of any other op that picks elements, the op itself, applied to the
numbers of its input's elements, says which element each output came from, and every gradient is
added to that element. So one rule holds for all settings of an op, steps, modes and negative
indices included, and for elements that were picked twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from bbnode.components.autodiff.builder import FLOAT, HALVES, INT64, TRAINABLE, Padded
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


@vjp("Reshape", constant_inputs={1})
@vjp("Flatten")
@vjp("Squeeze", constant_inputs={1})
@vjp("Unsqueeze", constant_inputs={1})
def _back_to_shape(ctx: VjpContext) -> Grads:
    return [ctx.b.reshape_like(ctx.g, ctx.inputs[0])]


@vjp("Transpose")
def _transpose(ctx: VjpContext) -> Grads:
    perm: list[int] = list(ctx.attribute("perm", []))
    if not perm:  # the default reverses the axes, and so undoes itself
        return [ctx.b.op("Transpose", ctx.g)]
    inverse = [int(axis) for axis in np.argsort(perm)]
    return [ctx.b.op("Transpose", ctx.g, perm=inverse)]


@vjp("Expand", constant_inputs={1})
def _expand(ctx: VjpContext) -> Grads:
    return [ctx.sum_to(ctx.g, ctx.inputs[0])]


@vjp("Concat")
def _concat(ctx: VjpContext) -> Grads:
    b = ctx.b
    axis = ctx.axis(ctx.y, 0)
    sizes = [b.op("Shape", name, start=axis, end=axis + 1) for name in ctx.inputs]
    parts = b.emit("Split", [ctx.g, b.op("Concat", *sizes, axis=0)], len(sizes), axis=axis)
    return [part if ctx.wants(index) else None for index, part in enumerate(parts)]


@vjp("Split", constant_inputs={1})
def _split(ctx: VjpContext) -> Grads:
    b = ctx.b
    parts = [
        zeros_like(ctx, output) if grad is None else grad
        for output, grad in zip(ctx.node.output, ctx.grads, strict=True)
    ]
    return [b.op("Concat", *parts, axis=int(ctx.attribute("axis", 0)))]


def zeros_like(ctx: VjpContext, value: str) -> str:
    return ctx.b.op("Expand", ctx.scalar(0.0, value), ctx.b.op("Shape", value))


def scatter_add(
    ctx: VjpContext, shape: str, indices: str, updates: str, axis: int, like: str
) -> str:
    """Return zeros of `shape` to which `updates` were added at `indices` along `axis`.

    `like` is a forward value of the element type. Halves are summed in float32: runtimes add no
    others at indices, and many small numbers would be lost in a large half.
    """
    b = ctx.b
    elem_type = ctx.elem_type(like)
    half = elem_type in HALVES
    if half:
        updates = b.op("Cast", updates, to=FLOAT)
    zeros = b.op("Expand", b.scalar(0.0, FLOAT if half else elem_type), shape)
    total = b.op("ScatterElements", zeros, indices, updates, axis=axis, reduction="add")
    return b.op("Cast", total, to=elem_type) if half else total


def scatter_back(ctx: VjpContext, picked: str, grad: str, x: str, extra: int = 0) -> str:
    """Return the gradient of `x`, whose elements `picked` (row-major numbers) got `grad`.

    `extra` are numbers behind the last element, for outputs that came from none.
    """
    b = ctx.b
    size = b.op("Size", x)
    flat = b.ints([-1])
    room = b.op("Add", size, b.constant(np.asarray(extra, np.int64), "extra")) if extra else size
    room = b.op("Reshape", room, b.ints([1]))
    picked, grad = b.op("Reshape", picked, flat), b.op("Reshape", grad, flat)
    total = scatter_add(ctx, room, picked, grad, 0, like=x)
    if extra:
        total = b.op("Slice", total, b.ints([0]), b.op("Reshape", size, b.ints([1])), b.ints([0]))
    return b.reshape_like(total, x)


def numbers(ctx: VjpContext, x: str) -> str:
    """Return the row-major number of each element of `x`, in its shape."""
    b = ctx.b
    zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
    return b.reshape_like(b.op("Range", zero, b.op("Size", x), one), x)


@vjp("Slice", constant_inputs={1, 2, 3, 4})
def _slice(ctx: VjpContext) -> Grads:
    x = ctx.inputs[0]
    axes, steps = _sliced_axes(ctx), ctx.held(4)
    if axes is None or (ctx.has(4) and (steps is None or bool(np.any(steps != 1)))):
        return _picked(ctx)
    b = ctx.b
    # All axes, not those that are cut alone: ONNX Runtime's transpose optimizer reorders the pads
    # as if they were of all.
    none = b.ints([0])
    ends = {axis: _cut_off(ctx, index, axis) for index, axis in enumerate(axes)}
    pairs = [ends.get(axis, (none, none)) for axis in range(ctx.rank(x))]
    pads = b.op("Concat", *(end for side in zip(*pairs, strict=True) for end in side), axis=0)
    elem_type = ctx.elem_type(x)
    half = elem_type not in TRAINABLE  # runtimes pad halves late
    grad = b.op("Cast", ctx.g, to=int(TensorProto.FLOAT)) if half else ctx.g
    zero = b.scalar(0.0, int(TensorProto.FLOAT) if half else elem_type)
    whole = b.op("Pad", grad, pads, zero)
    if len(axes) == 1 and not half and (bounds := _bounds(ctx, 0, axes[0])) is not None:
        b.padded[whole] = Padded(grad, axes[0], *bounds)
    return [b.op("Cast", whole, to=elem_type) if half else whole]


def _sliced_axes(ctx: VjpContext) -> list[int] | None:
    """Return the axes that a Slice cuts, counted from the front; None where that is unknown."""
    dims, given = ctx.type_of(ctx.inputs[0]).dims, ctx.type_of(ctx.inputs[1]).dims
    held = ctx.held(3)
    if dims is None or not given or not isinstance(given[0], int) or given[0] == 0:
        return None
    if not ctx.has(3):
        return list(range(given[0]))
    return None if held is None else [int(axis) % len(dims) for axis in held]


def _bounds(ctx: VjpContext, index: int, axis: int) -> tuple[int, int, int] | None:
    """Return where a Slice with step 1 begins and ends, and the axis' size; None if unknown."""
    size = (ctx.type_of(ctx.inputs[0]).dims or ())[axis]
    starts, ends = ctx.held(1), ctx.held(2)
    if not isinstance(size, int) or starts is None or ends is None:
        return None
    first, last, _ = slice(int(starts[index]), int(ends[index])).indices(size)
    return first, max(first, last), size


def _cut_off(ctx: VjpContext, index: int, axis: int) -> tuple[str, str]:
    """Return how much a Slice with step 1 leaves out before and behind, each as [1] int64."""
    b, x = ctx.b, ctx.inputs[0]
    if (bounds := _bounds(ctx, index, axis)) is not None:
        first, last, size = bounds
        return b.ints([first]), b.ints([size - last])
    length = b.op("Shape", x, start=axis, end=axis + 1)
    zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
    numbers = b.op("Range", zero, b.op("Squeeze", length), one)
    at = b.ints([index]), b.ints([index + 1]), b.ints([0])
    ends = [b.op("Slice", name, *at) for name in ctx.inputs[1:3]]
    if ctx.elem_type(ctx.inputs[1]) != INT64:  # all of a Slice are of one type
        ends = [b.op("Cast", end, to=INT64) for end in ends]
    kept = b.op("Slice", numbers, *ends, b.ints([0]))
    # Where nothing is kept, all of it counts as left out before.
    before = b.op("ReduceMin", b.op("Concat", kept, length, axis=0), keepdims=1)
    return before, b.op("Sub", b.op("Sub", length, before), b.op("Shape", kept))


def _as_slice(ctx: VjpContext, axis: int) -> str | None:
    """Return the gradient of a Gather that picks one place of an axis; None for any other.

    As of a slice: of loops over time that are written out, the sweep joins them.
    """
    b, (x, _) = ctx.b, ctx.inputs
    picked, dims = ctx.held(1), ctx.type_of(x).dims or ()
    size = dims[axis] if axis < len(dims) else None
    if picked is None or picked.size != 1 or picked.ndim > 1 or ctx.elem_type(x) not in TRAINABLE:
        return None
    at = int(picked.reshape(()))
    if not isinstance(size, int) or not -size <= at < size:
        return None
    at %= size
    grad = ctx.g if picked.ndim else b.op("Unsqueeze", ctx.g, b.ints([axis]))
    others = [0] * (len(dims) - axis - 1)
    pads = [*[0] * axis, at, *others, *[0] * axis, size - 1 - at, *others]
    whole = b.op("Pad", grad, b.ints(pads), ctx.scalar(0.0, x))
    b.padded[whole] = Padded(grad, axis, at, at + 1, size)
    return whole


@vjp("Gather", constant_inputs={1})
def _gather(ctx: VjpContext) -> Grads:
    """Add the gradients of whole rows: along the first axis, whichever it was."""
    b = ctx.b
    x, indices = ctx.inputs
    axis, rank, depth = ctx.axis(x, 0), ctx.rank(x), ctx.rank(indices)
    if (slice_of := _as_slice(ctx, axis)) is not None:
        return [slice_of]
    shape, grad = b.op("Shape", x), ctx.g
    order = [axis, *range(axis), *range(axis + 1, rank)]
    if axis:
        picked = range(axis, axis + depth)
        behind = range(axis + depth, rank + depth - 1)
        grad = b.op("Transpose", grad, perm=[*picked, *range(axis), *behind])
        shape = b.op("Gather", shape, b.ints(order))
    rows = b.op("Unsqueeze", indices, b.ints([-1]))
    if ctx.elem_type(indices) != INT64:
        rows = b.op("Cast", rows, to=INT64)
    elem_type = ctx.elem_type(x)
    half = elem_type not in TRAINABLE  # runtimes add no halves at indices
    if half:
        grad = b.op("Cast", grad, to=int(TensorProto.FLOAT))
    zeros = b.op("Expand", b.scalar(0.0, int(TensorProto.FLOAT) if half else elem_type), shape)
    total = b.op("ScatterND", zeros, rows, grad, reduction="add")
    if half:
        total = b.op("Cast", total, to=elem_type)
    if axis:
        total = b.op("Transpose", total, perm=[int(place) for place in np.argsort(order)])
    return [total]


@vjp("GatherND", constant_inputs={1})
@vjp("Tile", constant_inputs={1})
@vjp("Compress", constant_inputs={1})
def _picked(ctx: VjpContext) -> Grads:
    x, *rest = ctx.inputs
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    picked = ctx.b.emit(ctx.node.op_type, [numbers(ctx, x), *rest], 1, **settings)[0]
    return [scatter_back(ctx, picked, ctx.g, x)]


@vjp("Pad", constant_inputs={1, 2, 3})
def _pad(ctx: VjpContext) -> Grads:
    x, pads, *rest = ctx.inputs
    b = ctx.b
    mode = ctx.attribute("mode", "constant")
    inputs = [numbers(ctx, x), pads]
    if mode == "constant":
        # What was filled in came from no element: it goes to a number behind the last one.
        inputs.append(b.op("Cast", b.op("Size", x), to=INT64))
    elif len(rest) > 1 and rest[1]:
        inputs.append("")
    if len(rest) > 1 and rest[1]:
        inputs.append(rest[1])
    picked = b.emit("Pad", inputs, 1, mode=mode)[0]
    extra = 1 if mode == "constant" else 0
    grads: list[str | None] = [None, None, None]
    if ctx.wants(0):
        grads[0] = scatter_back(ctx, picked, ctx.g, x, extra=extra)
    if extra and ctx.wants(2):
        filled = b.op("Equal", picked, b.op("Cast", b.op("Size", x), to=INT64))
        share = ctx.term(filled).where(ctx.dy, 0.0)
        grads[2] = b.reshape_like(share.op("ReduceSum", keepdims=0).name, ctx.inputs[2])
    return grads
