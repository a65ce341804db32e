"""Gradient rules of the ops that pick, repeat or pad elements.

Rule: the op itself, applied to the numbers of its input's elements, says which element each
output came from; every gradient is added to that element. So one rule holds for all settings of
an op, steps, modes and negative indices included, and for elements that were picked twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import INT64
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


def scatter_back(ctx: VjpContext, picked: str, grad: str, x: str, extra: int = 0) -> str:
    """The gradient of `x`, whose elements `picked` (row-major numbers) got `grad`.

    `extra` are numbers behind the last element, for outputs that came from none.
    """
    b = ctx.b
    size = b.op("Size", x)
    flat = b.ints([-1])
    room = b.op("Add", size, b.constant(np.asarray(extra, np.int64), "extra")) if extra else size
    zeros = b.op("Expand", ctx.scalar(0.0, x), b.op("Reshape", room, b.ints([1])))
    total = b.op(
        "ScatterElements",
        zeros,
        b.op("Reshape", picked, flat),
        b.op("Reshape", grad, flat),
        axis=0,
        reduction="add",
    )
    if extra:
        total = b.op("Slice", total, b.ints([0]), b.op("Reshape", size, b.ints([1])), b.ints([0]))
    return b.reshape_like(total, x)


def _numbers(ctx: VjpContext, x: str) -> str:
    """The row-major number of each element of `x`, in its shape."""
    b = ctx.b
    zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
    return b.reshape_like(b.op("Range", zero, b.op("Size", x), one), x)


@vjp("Slice", constant_inputs={1, 2, 3, 4})
@vjp("Gather", constant_inputs={1})
@vjp("GatherND", constant_inputs={1})
@vjp("Tile", constant_inputs={1})
def _picked(ctx: VjpContext) -> Grads:
    x, *rest = ctx.inputs
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    picked = ctx.b.emit(ctx.node.op_type, [_numbers(ctx, x), *rest], 1, **settings)[0]
    return [scatter_back(ctx, picked, ctx.g, x), *([None] * len(rest))]


@vjp("Pad", constant_inputs={1, 2, 3})
def _pad(ctx: VjpContext) -> Grads:
    x, pads, *rest = ctx.inputs
    b = ctx.b
    mode = ctx.attribute("mode", "constant")
    if ctx.wants(2):
        raise ctx.error(
            f"the filling {ctx.inputs[2]!r} depends on what is differentiated",
            "make it a constant, or add it with Concat",
        )
    inputs = [_numbers(ctx, x), pads]
    if mode == "constant":
        # What was filled in came from no element: it goes to a number behind the last one.
        inputs.append(b.op("Cast", b.op("Size", x), to=INT64))
    elif len(rest) > 1 and rest[1]:
        inputs.append("")
    if len(rest) > 1 and rest[1]:
        inputs.append(rest[1])
    picked = b.emit("Pad", inputs, 1, mode=mode)[0]
    found = scatter_back(ctx, picked, ctx.g, x, extra=1 if mode == "constant" else 0)
    return [found, None, *([None] * len(rest))]
