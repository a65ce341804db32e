"""Gradient rules of the ops that move, pick, repeat or pad values without changing them.

Rule: the gradient goes back the way the values came; shapes are read from the forward values
inside the graph, so that a dynamic batch works. Of an op that picks elements, the op itself,
applied to the numbers of its input's elements, says which element each output came from, and
every gradient is added to that element. So one rule holds for all settings of an op, steps, modes
and negative indices included, and for elements that were picked twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import FLOAT, HALVES, INT64
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
@vjp("Gather", constant_inputs={1})
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
