"""Gradient rules of the ops that pick, place or order elements by computed indices.

Rule: what was picked at an index gives its gradient back there, added up where an index comes
twice. Where indices of a scatter meet without a reduction, the forward op itself, run on the
updates' numbers, says which of them is left; so a runtime's own order decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import FLOAT, HALVES
from bbnode.components.autodiff.rules.moving import (
    numbers,
    scatter_add,
    zeros_like,
)
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]


@vjp("GatherElements", constant_inputs={1})
def _gather_elements(ctx: VjpContext) -> Grads:
    data, indices = ctx.inputs
    shape = ctx.b.op("Shape", data)
    return [scatter_add(ctx, shape, indices, ctx.g, ctx.axis(data, 0), like=data)]


@vjp("TopK", constant_inputs={1})
def _top_k(ctx: VjpContext) -> Grads:
    """Return the gradients of the values at their indices, which come once each."""
    if ctx.grads[0] is None:
        return []
    x, indices = ctx.inputs[0], ctx.node.output[1]
    axis = ctx.axis(x, -1)
    return [ctx.b.op("ScatterElements", zeros_like(ctx, x), indices, ctx.g, axis=axis)]


@vjp("Trilu", constant_inputs={1})
def _trilu(ctx: VjpContext) -> Grads:
    upper = int(ctx.attribute("upper", 1))
    return [ctx.b.op("Trilu", ctx.g, *ctx.inputs[1:], upper=upper)]


@vjp("CumSum", constant_inputs={1})
def _cum_sum(ctx: VjpContext) -> Grads:
    """Return the sums from the other end: x[i] is in every sum that does not end before it."""
    exclusive, reverse = (int(ctx.attribute(name, 0)) for name in ("exclusive", "reverse"))
    return [
        ctx.b.op("CumSum", ctx.g, ctx.inputs[1], exclusive=exclusive, reverse=1 - reverse),
    ]


@vjp("ReverseSequence", constant_inputs={1})
def _reverse_sequence(ctx: VjpContext) -> Grads:
    """Reverse again: the op undoes itself."""
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    return [ctx.b.op("ReverseSequence", ctx.g, ctx.inputs[1], **settings)]


@vjp("OneHot", constant_inputs={0, 1, 2})
def _one_hot(ctx: VjpContext) -> Grads:
    """Return the gradients of `values`, (off, on): those of all zeros and of all ones."""
    if not ctx.wants(2):
        return []
    b = ctx.b
    indices, depth, values = ctx.inputs
    dtype = helper.tensor_dtype_to_np_dtype(ctx.elem_type(values))
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    levels = b.constant(np.asarray([0, 1], dtype), "levels")
    hot = ctx.term(b.emit("OneHot", [indices, depth, levels], 1, **settings)[0])
    parts = (ctx.dy * (1.0 - hot), ctx.dy * hot)
    flat = [b.op("Reshape", part.op("ReduceSum", keepdims=0).name, b.ints([1])) for part in parts]
    return [None, None, b.op("Concat", *flat, axis=0)]


@vjp("ScatterElements", constant_inputs={1})
@vjp("ScatterND", constant_inputs={1})
def _scatter(ctx: VjpContext) -> Grads:
    reduction = ctx.attribute("reduction", "none")
    made = _Scatter(ctx)
    if reduction == "none":
        return made.replaced()
    if reduction == "add":
        return [ctx.g, None, made.gather(ctx.g).name]
    return made.multiplied() if reduction == "mul" else made.extreme()


class _Scatter:
    """A ScatterElements or ScatterND node: its op applied to other data, and its inverse.

    Halves are worked on in float32: runtimes have no reduction of theirs at indices.
    """

    def __init__(self, ctx: VjpContext) -> None:
        self.ctx = ctx
        self.data, self.indices, self.updates = ctx.inputs
        self.elem_type = ctx.elem_type(self.data)
        self.half = self.elem_type in HALVES
        self.axis = ctx.axis(self.data, 0) if ctx.node.op_type == "ScatterElements" else None

    def scatter(self, data: str, updates: str, reduction: str) -> str:
        b = self.ctx.b
        settings = {} if self.axis is None else {"axis": self.axis}
        return b.op(
            self.ctx.node.op_type, data, self.indices, updates, reduction=reduction, **settings
        )

    def gather(self, data: str) -> Term:
        """Return the elements of `data` that the updates go to, in the updates' shape."""
        b = self.ctx.b
        if self.axis is None:
            return self.term(b.op("GatherND", data, self.indices))
        return self.term(b.op("GatherElements", data, self.indices, axis=self.axis))

    def term(self, name: str) -> Term:
        return self.ctx.term(name, self.data)

    def reduced(self, data: Term, updates: Term, reduction: str) -> Term:
        """Return the scatter of terms, in a type that runtimes reduce."""
        b = self.ctx.b
        if not self.half:
            return self.term(self.scatter(data.name, updates.name, reduction))
        onto, those = (each.cast(FLOAT).name for each in (data, updates))
        return self.term(b.op("Cast", self.scatter(onto, those, reduction), to=self.elem_type))

    def filled(self, number: float) -> Term:
        b = self.ctx.b
        shape = b.op("Shape", self.data)
        return self.term(b.op("Expand", self.ctx.scalar(number, self.data), shape))

    def replaced(self) -> Grads:
        ctx, b = self.ctx, self.ctx.b
        grads: list[str | None] = [None, None, None]
        if ctx.wants(0):
            grads[0] = self.scatter(ctx.g, zeros_like(ctx, self.updates), "none")
        if ctx.wants(2):
            own = numbers(ctx, self.updates)
            nobody = b.op(
                "Expand", b.constant(np.asarray(-1, np.int64), "nobody"), b.op("Shape", self.data)
            )
            left = self.gather(self.scatter(nobody, own, "none")).op("Equal", self.term(own))
            grads[2] = left.where(self.gather(ctx.g), 0.0).name
        return grads

    def multiplied(self) -> Grads:
        """Return the products of all other factors, found without a division by zero."""
        ctx = self.ctx
        updates, ones, dy = self.term(self.updates), self.filled(1.0), self.term(ctx.g)
        grads: list[str | None] = [None, None, None]
        if ctx.wants(0):
            grads[0] = (dy * self.reduced(ones, updates, "mul")).name
        if ctx.wants(2):
            is_zero = updates.op("Equal", 0.0)
            zeros = self.reduced(self.filled(0.0), is_zero.where(1.0, 0.0), "add")
            safe = is_zero.where(1.0, updates)
            product = self.reduced(ones, safe, "mul") * self.term(self.data) * dy
            count, there = self.gather(zeros.name), self.gather(product.name)
            alone = count.op("Equal", 1.0).where(there, 0.0)
            among = count.op("Equal", 0.0).where(there / safe, 0.0)
            grads[2] = is_zero.where(alone, among).name
        return grads

    def extreme(self) -> Grads:
        """Return an even share for the data and all updates that equal the result."""
        ctx = self.ctx
        out, data, updates = self.term(ctx.y), self.term(self.data), self.term(self.updates)
        kept = data.op("Equal", out).where(1.0, 0.0)
        chosen = updates.op("Equal", self.gather(ctx.y)).where(1.0, 0.0)
        share = self.term(ctx.g) / self.reduced(kept, chosen, "add")
        return [(share * kept).name, None, (self.gather(share.name) * chosen).name]


@vjp("TensorScatter", constant_inputs={2})
def _tensor_scatter(ctx: VjpContext) -> Grads:
    """Return the gradients of the elements of the cache and of the update that are left."""
    b = ctx.b
    cache, update = ctx.inputs[:2]
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    behind = b.op("Add", numbers(ctx, update), b.op("Size", cache))
    sources = [numbers(ctx, cache), behind, *ctx.inputs[2:]]
    picked = b.emit("TensorScatter", sources, 1, **settings)[0]
    flat = b.ints([-1])
    both = b.op("Concat", *(b.op("Reshape", each, flat) for each in (cache, update)), axis=0)
    size = b.op("Shape", both)
    total = scatter_add(
        ctx, size, b.op("Reshape", picked, flat), b.op("Reshape", ctx.g, flat), 0, like=cache
    )
    start, middle = b.ints([0]), b.op("Reshape", b.op("Size", cache), b.ints([1]))
    parts = [b.op("Slice", total, *span, b.ints([0])) for span in ((start, middle), (middle, size))]
    return [b.reshape_like(part, x) for part, x in zip(parts, (cache, update), strict=True)]


@vjp("DequantizeLinear", constant_inputs={0, 1, 2})
def _dequantize(ctx: VjpContext) -> Grads:
    """y = (x - zero) scale: the scale's gradient, of a tensor, an axis or its blocks."""
    if not ctx.wants(1):
        return []
    b = ctx.b
    scale = ctx.inputs[1]
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    # The same op with a scale of one gives x - zero.
    ones = b.op("Expand", ctx.scalar(1.0, scale), b.op("Shape", scale))
    levels = b.emit("DequantizeLinear", [ctx.inputs[0], ones, *ctx.inputs[2:]], 1, **settings)[0]
    weighted = b.op("Mul", ctx.g, b.op("Cast", levels, to=ctx.elem_type(ctx.y)))
    y_rank = ctx.rank(ctx.y)
    axis = ctx.axis(ctx.y, 1) if y_rank else 0
    block = int(ctx.attribute("block_size", 0))
    if block:
        # Element i along the axis is scaled by scale i // block; the last block may be short.
        zero, one, size = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1, block))
        length = b.op("Squeeze", b.op("Shape", ctx.y, start=axis, end=axis + 1), b.ints([0]))
        which = b.op("Div", b.op("Range", zero, length, one), size)
        column = b.op("Reshape", which, b.ints([-1, *[1] * (y_rank - axis - 1)]))
        which = b.op("Expand", column, b.op("Shape", ctx.y))
        total = scatter_add(ctx, b.op("Shape", scale), which, weighted, axis, like=scale)
    elif ctx.rank(scale) == 0:
        total = b.op("ReduceSum", weighted, keepdims=0)
    else:  # one scale, or one per element of the axis
        others = [i for i in range(y_rank) if i != axis]
        if ctx.type_of(scale).dims == (1,):
            others = list(range(y_rank))
        total = b.op("ReduceSum", weighted, b.ints(others), keepdims=0)
    return [None, b.op("Cast", b.reshape_like(total, scale), to=ctx.elem_type(scale))]
