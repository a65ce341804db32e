"""Gradient rules of the ops that move values about without changing them.

Rule: the gradient goes back the way the values came; shapes are read from the forward values
inside the graph, so that a dynamic batch works.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


@vjp("Reshape", constant_inputs={1})
@vjp("Flatten")
@vjp("Squeeze", constant_inputs={1})
@vjp("Unsqueeze", constant_inputs={1})
def _back_to_shape(ctx: VjpContext) -> Grads:
    rest: list[str | None] = [None] * (len(ctx.inputs) - 1)
    return [ctx.b.reshape_like(ctx.g, ctx.inputs[0]), *rest]


@vjp("Transpose")
def _transpose(ctx: VjpContext) -> Grads:
    perm: list[int] = list(ctx.attribute("perm", []))
    if not perm:  # the default reverses the axes, and so undoes itself
        return [ctx.b.op("Transpose", ctx.g)]
    inverse = [int(axis) for axis in np.argsort(perm)]
    return [ctx.b.op("Transpose", ctx.g, perm=inverse)]


@vjp("Expand", constant_inputs={1})
def _expand(ctx: VjpContext) -> Grads:
    return [ctx.sum_to(ctx.g, ctx.inputs[0]), None]


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
    parts: list[str] = []
    for output, grad in zip(ctx.node.output, ctx.grads, strict=True):
        parts.append(grad if grad is not None else _zeros_like(ctx, output))
    joined = b.op("Concat", *parts, axis=int(ctx.attribute("axis", 0)))
    return [joined, *([None] * (len(ctx.inputs) - 1))]


def _zeros_like(ctx: VjpContext, value: str) -> str:
    return ctx.b.op("Expand", ctx.scalar(0.0, value), ctx.b.op("Shape", value))


@vjp("GatherElements", constant_inputs={1})
def _gather_elements(ctx: VjpContext) -> Grads:
    data, indices = ctx.inputs
    axis = ctx.axis(data, 0)
    # "add": an element that was gathered twice gets both gradients.
    zeros = _zeros_like(ctx, data)
    return [
        ctx.b.op("ScatterElements", zeros, indices, ctx.g, axis=axis, reduction="add"),
        None,
    ]
