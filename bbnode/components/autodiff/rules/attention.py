"""Gradient rules of Attention and RotaryEmbedding.

Rule: Attention is written as the products, masks and softmax of its operator page, in the forward
pass as well, and the sweep goes back through them. Halves, and a further output that the page
leaves open, keep the node itself in the forward pass, and the sweep computes what it needs again.
A row that sees nothing has the output 0 and the gradient 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from bbnode.components.autodiff.builder import (
    FLOATS,
    INT64,
    TRAINABLE,
    OtherNodes,
)
from bbnode.components.autodiff.composition import pull_back_through
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]

_RAW, _PROBABILITIES = 0, 3  # values of qk_matmul_output_mode on which all versions agree


@vjp("Attention", constant_inputs={3, 6})
def _attention(ctx: VjpContext) -> Grads:
    """Vaswani et al., 2017 (arXiv:1706.03762); grouped queries: Ainslie et al., arXiv:2305.13245.

    Y = softmax(cap(scale Q K^T) + mask) V, per head.
    """
    mode = int(ctx.attribute("qk_matmul_output_mode", 0))
    if len(ctx.grads) > 3 and ctx.grads[3] is not None and mode not in (_RAW, _PROBABILITIES):
        raise ctx.error(
            f"releases of ONNX differ in what qk_matmul_output_mode {mode} puts out",
            "take its output 3 in mode 0 or 3, or work the scores out with MatMul",
        )
    names = list(ctx.node.output)
    known = len(names) < 4 or not names[3] or mode in (_RAW, _PROBABILITIES)
    if ctx.elem_type(ctx.y) not in TRAINABLE or not known:
        return pull_back_through(ctx, _written_out(ctx, mode)[: len(ctx.grads)])
    b = ctx.b

    def make() -> OtherNodes:
        ctx.b = b.nested()  # what the sweep emits stands too late for the forward pass
        outputs, early, ctx.b = _written_out(ctx, mode), ctx.b, b
        b.initializers += early.initializers
        ends = [
            helper.make_node("Identity", [value], [name], name=name)
            for value, name in zip(outputs, names, strict=False)
            if name
        ]
        read = tuple(name for node in early.nodes for name in node.output)
        return OtherNodes((*early.nodes, *ends), read)

    nodes = ctx.instead(OtherNodes, make).nodes()
    equal = {node.output[0]: node.input[0] for node in nodes if node.output[0] in names}
    return pull_back_through(ctx, [equal.get(name) for name in names], nodes)


def _written_out(ctx: VjpContext, mode: int) -> list[str]:
    """Emit all four outputs by simpler ops."""
    b = ctx.b
    rank = ctx.rank(ctx.inputs[0])
    heads = [int(ctx.attribute(name, 0)) for name in ("q_num_heads", "kv_num_heads")]
    if rank == 3 and not all(heads):
        raise ctx.error("inputs of 3 axes need q_num_heads and kv_num_heads", "set both")
    query, key, value = (
        _per_head(ctx, name, count) if rank == 3 else name
        for name, count in zip(ctx.inputs[:3], (heads[0], heads[1], heads[1]), strict=True)
    )
    if ctx.has(4):
        key = b.op("Concat", ctx.inputs[4], key, axis=2)
        value = b.op("Concat", ctx.inputs[5], value, axis=2)
    presents = (key, value)
    share = _queries_per_key(ctx, heads)
    if share != 1:
        key, value = _repeat(ctx, key, share), _repeat(ctx, value, share)

    turned = b.op("Transpose", key, perm=[0, 1, 3, 2])
    scaled = ctx.term(query) * _scale(ctx, query)
    raw = ctx.term(b.op("MatMul", scaled.name, turned))
    scores = raw
    cap = float(ctx.attribute("softcap", 0.0))
    if cap > 0.0:
        scores = (scores / cap).op("Tanh") * cap
    scores, sees = _masked(ctx, scores, query, key)
    own = ctx.elem_type(ctx.y)
    precision = int(ctx.attribute("softmax_precision", 0)) or own
    wide = b.op("Cast", scores.name, to=precision) if precision != own else scores.name
    soft = b.op("Softmax", wide, axis=-1)
    if precision != own:
        soft = b.op("Cast", soft, to=own)
    if sees is not None:
        soft = sees.where(ctx.term(soft), 0.0).name
    made = b.op("MatMul", soft, value)
    if rank == 3:
        made = b.op("Transpose", made, perm=[0, 2, 1, 3])
        width = b.op("Mul", b.ints([heads[0]]), b.op("Shape", value, start=3))
        shape = b.op("Concat", b.op("Shape", made, start=0, end=2), width, axis=0)
        made = b.op("Reshape", made, shape, allowzero=1)
    return [made, *presents, raw.name if mode == _RAW else soft]


def _per_head(ctx: VjpContext, value: str, heads: int) -> str:
    """Return (batch, heads, sequence, size) for (batch, sequence, heads * size)."""
    b = ctx.b
    dims = ctx.type_of(value).dims
    width = None if dims is None else dims[2]
    if isinstance(width, int):
        size = b.ints([width // heads])
    else:
        size = b.op("Div", b.op("Shape", value, start=2), b.ints([heads]))
    shape = b.op("Concat", b.op("Shape", value, start=0, end=2), b.ints([heads]), size, axis=0)
    return b.op("Transpose", b.op("Reshape", value, shape, allowzero=1), perm=[0, 2, 1, 3])


def _queries_per_key(ctx: VjpContext, heads: Sequence[int]) -> int:
    """Return how many heads of queries share a head of keys."""
    if ctx.rank(ctx.inputs[0]) == 4:
        sizes = [ctx.type_of(name).dims for name in ctx.inputs[:2]]
        found = [None if dims is None else dims[1] for dims in sizes]
        if found[0] == found[1] and found[0] is not None:
            return 1
        if not isinstance(found[0], int) or not isinstance(found[1], int):
            raise ctx.error(f"its numbers of heads are unknown ({found[0]}, {found[1]})")
        heads = [found[0], found[1]]
    if heads[1] < 1 or heads[0] % heads[1]:
        raise ctx.error(
            f"{heads[0]} heads of queries do not share {heads[1]} of keys evenly",
            "make the first a multiple of the second",
        )
    return heads[0] // heads[1]


def _repeat(ctx: VjpContext, value: str, count: int) -> str:
    """Return a value whose heads (axis 1) are each there `count` times, side by side."""
    b = ctx.b
    batch, tail = b.op("Shape", value, start=0, end=1), b.op("Shape", value, start=2)
    heads = b.op("Shape", value, start=1, end=2)
    wide = b.op("Concat", batch, heads, b.ints([count]), tail, axis=0)
    spread = b.op("Expand", b.op("Unsqueeze", value, b.ints([2])), wide)
    total = b.op("Mul", heads, b.ints([count]))
    return b.op("Reshape", spread, b.op("Concat", batch, total, tail, axis=0), allowzero=1)


def _scale(ctx: VjpContext, query: str) -> Term:
    scale = float(ctx.attribute("scale", 0.0))
    if scale:
        return ctx.term(ctx.scalar(scale, ctx.y))
    dims = ctx.type_of(ctx.inputs[0]).dims or ()
    width = dims[-1] if dims else None
    if isinstance(width, int):
        heads = int(ctx.attribute("q_num_heads", 0)) if len(dims) == 3 else 1
        return ctx.term(ctx.scalar(1.0 / math.sqrt(width // heads), ctx.y))
    size = ctx.b.op("Cast", ctx.b.op("Shape", query, start=3), to=ctx.elem_type(ctx.y))
    return ctx.term(size).op("Sqrt").op("Reciprocal")


def _masked(ctx: VjpContext, scores: Term, query: str, key: str) -> tuple[Term, Term | None]:
    """Return scores with all biases, and which rows see anything; None where each one does.

    What is not seen has a bias that leaves its probability 0, and so its gradient.
    """
    b = ctx.b
    seen = _windows(ctx, query, key)
    # Key 0 comes before every query, but where the keys are counted or limited at the left.
    all_see = not ctx.has(3) and not ctx.has(6)
    all_see = all_see and int(ctx.attribute("left_window_size", -1)) < 0
    bias = ctx.term(ctx.scalar(0.0, ctx.y))
    if ctx.has(3):
        mask = _full_mask(ctx, key)
        if ctx.elem_type(ctx.inputs[3]) in FLOATS:
            hidden = b.op("IsInf", mask, detect_positive=0)
            bias = ctx.term(mask)
            seen.append(b.op("Not", hidden))
        else:
            seen.append(mask)
    if not seen:
        return scores, None
    allowed = seen[0]
    for each in seen[1:]:
        allowed = b.op("And", allowed, each)
    bias = ctx.term(allowed).where(bias, -math.inf)
    if all_see:
        return scores + bias, None
    counted = b.op("Cast", allowed, to=int(TensorProto.INT32))
    any_seen = b.op("Cast", b.op("ReduceMax", counted, b.ints([-1]), keepdims=1),
                    to=int(TensorProto.BOOL))  # fmt: skip
    # A row of infinities would be NaN, on the way back too: it keeps its scores, and counts 0.
    sees = ctx.term(any_seen)
    return scores + sees.where(bias, 0.0), sees


def _full_mask(ctx: VjpContext, key: str) -> str:
    """Return the mask, with what it lacks at the end of the keys filled up as not seen."""
    b, mask = ctx.b, ctx.inputs[3]
    rank = ctx.rank(mask)
    dims, keys = ctx.type_of(mask).dims or (), ctx.type_of(ctx.inputs[1]).dims or ()
    axis = 2 if len(keys) == 4 else 1
    if not ctx.has(4) and dims and keys and dims[-1] is not None and dims[-1] == keys[axis]:
        return mask
    total = b.op("Shape", key, start=2, end=3)
    lacking = b.op("Sub", total, b.op("Shape", mask, start=rank - 1))
    pads = b.op("Concat", b.ints([0] * (2 * rank - 1)), lacking, axis=0)
    if ctx.elem_type(mask) in FLOATS:
        return b.op("Pad", mask, pads, ctx.scalar(-math.inf, mask))
    # Not every runtime pads truth values.
    numbers = b.op("Cast", mask, to=int(TensorProto.INT32))
    return b.op("Cast", b.op("Pad", numbers, pads), to=int(TensorProto.BOOL))


def _windows(ctx: VjpContext, query: str, key: str) -> list[str]:
    """Return the conditions on positions: padding, causality, windows of both sides.

    Query i is at position offset + i, where offset counts the keys before the first query.
    """
    b = ctx.b
    found: list[str] = []
    zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
    none = b.ints([0])

    def count(value: str) -> str:
        return b.op("Squeeze", b.op("Shape", value, start=2, end=3), none)

    columns = b.op("Unsqueeze", b.op("Range", zero, count(key), one), none)  # (1, keys)
    lengths = None
    if ctx.has(6):
        known = b.op("Cast", ctx.inputs[6], to=INT64)
        lengths = b.op("Unsqueeze", known, b.ints([1, 2, 3]))  # (batch, 1, 1, 1)
        found.append(b.op("Less", columns, lengths))
    causal = bool(int(ctx.attribute("is_causal", 0)))
    left = int(ctx.attribute("left_window_size", -1))
    right = int(ctx.attribute("right_window_size", -1))
    if not (causal or left >= 0 or right >= 0):
        return found
    rows = b.op("Unsqueeze", b.op("Range", zero, count(query), one), b.ints([1]))
    if ctx.has(4):
        rows = b.op("Add", rows, count(ctx.inputs[4]))
    elif lengths is not None:
        rows = b.op("Add", rows, b.op("Sub", lengths, count(query)))
    ahead = b.op("Sub", columns, rows)
    for limit in ([0] if causal else []) + ([right] if right >= 0 else []):
        bound = b.constant(np.asarray(limit, np.int64), "number")
        found.append(b.op("LessOrEqual", ahead, bound))
    if left >= 0:
        bound = b.constant(np.asarray(-left, np.int64), "number")
        found.append(b.op("GreaterOrEqual", ahead, bound))
    return found


@vjp("RotaryEmbedding", constant_inputs={1, 2, 3})
def _rotary_embedding(ctx: VjpContext) -> Grads:
    """Su et al., 2021 (arXiv:2104.09864): a rotation's transpose has the sine's sign turned."""
    b, (cosine, sine) = ctx.b, ctx.inputs[1:3]
    if ctx.wants(1) or ctx.wants(2):
        return pull_back_through(ctx, [_rotated(ctx)])
    settings = {a.name: helper.get_attribute_value(a) for a in ctx.node.attribute}
    inputs = [ctx.g, cosine, b.op("Neg", sine), *ctx.inputs[3:]]
    return [b.emit("RotaryEmbedding", inputs, 1, **settings)[0]]


def _rotated(ctx: VjpContext) -> str:
    """Return the output, written out: (x1 c - x2 s, x2 c + x1 s) of two halves of a head."""
    b, (x, cosine, sine) = ctx.b, ctx.inputs[:3]
    rank = ctx.rank(x)
    heads = int(ctx.attribute("num_heads", 0))
    if rank == 3 and not heads:
        raise ctx.error("an input of 3 axes needs num_heads", "set it")
    data = _per_head(ctx, x, heads) if rank == 3 else x
    if ctx.has(3):
        cosine, sine = (b.op("Gather", each, ctx.inputs[3], axis=0) for each in (cosine, sine))
    cos, sin = (ctx.term(b.op("Unsqueeze", each, b.ints([1]))) for each in (cosine, sine))
    half = b.op("Shape", cosine, start=-1)
    turned = b.op("Mul", half, b.ints([2]))
    last = b.ints([3])
    rotated = b.op("Slice", data, b.ints([0]), turned, last)
    rest = b.op("Slice", data, turned, b.ints([np.iinfo(np.int64).max]), last)
    if int(ctx.attribute("interleaved", 0)):
        shape = b.op("Concat", b.op("Shape", data, start=0, end=3), half, b.ints([2]), axis=0)
        pairs = b.op("Reshape", rotated, shape, allowzero=1)
        sides = b.emit("Split", [pairs], 2, axis=4, num_outputs=2)
        first, second = (ctx.term(b.op("Squeeze", side, b.ints([4]))) for side in sides)
    else:
        first = ctx.term(b.op("Slice", rotated, b.ints([0]), half, last))
        second = ctx.term(b.op("Slice", rotated, half, turned, last))
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    if int(ctx.attribute("interleaved", 0)):
        both = [b.op("Unsqueeze", each.name, b.ints([4])) for each in (real, imaginary)]
        whole = b.op("Reshape", b.op("Concat", *both, axis=4), b.op("Shape", rotated), allowzero=1)
    else:
        whole = b.op("Concat", real.name, imaginary.name, axis=3)
    whole = b.op("Concat", whole, rest, axis=3)
    if rank == 3:
        whole = b.op("Transpose", whole, perm=[0, 2, 1, 3])
        whole = b.reshape_like(whole, x)
    return whole
