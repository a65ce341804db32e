"""Gradient rules of the elementwise ops of arithmetic, and of those that choose between values.

Rule: most ops are a row of a table, with one partial derivative per input: a function of the node
that returns the input's gradient, before it is summed back over axes that broadcasting stretched.
The derivatives are the textbook ones; where the output is at hand it is used again. At a kink the
gradient is that of one side, or an even share for inputs of Max and Min that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from bbnode.components.autodiff.builder import FLOAT, HALVES, TRAINABLE, GraphBuilder
from bbnode.components.autodiff.table import Rule, Term, VjpContext, vjp

Grads = Sequence[str | None]
Partial: TypeAlias = Callable[[VjpContext], Term]
Partials: TypeAlias = Mapping[str, tuple[Partial | None, ...]]


def rules_of(table: Partials) -> None:
    """Register a rule for every row: op type to its partial derivatives, by input.

    None stands where an input is a constant to the op.
    """
    for op_type, partials in table.items():
        constants = {index for index, partial in enumerate(partials) if partial is None}
        vjp(op_type, constant_inputs=constants)(_rule(partials))


def _rule(partials: Sequence[Partial | None]) -> Rule:
    def rule(ctx: VjpContext) -> Grads:
        grads: list[str | None] = []
        for index, partial in enumerate(partials):
            if partial is None or not ctx.wants(index):
                grads.append(None)
                continue
            grad = partial(ctx).name
            grads.append(grad if len(partials) == 1 else ctx.sum_to(grad, ctx.inputs[index]))
        return grads

    # The family of a rule is the module that wrote its partial derivatives.
    rule.__module__ = next(each.__module__ for each in partials if each is not None)
    return rule


def _off_one(x: Term) -> Term:
    """Return 1 - x^2; as a product it keeps its digits where x is near 1."""
    return (1.0 - x) * (x + 1.0)


rules_of(
    {
        "Abs": (lambda n: n.dy * n.input(0).op("Sign"),),
        "Acos": (lambda n: -(n.dy / _off_one(n.input(0)).op("Sqrt")),),
        "Acosh": (lambda n: n.dy / (-_off_one(n.input(0))).op("Sqrt"),),
        "Add": (lambda n: n.dy, lambda n: n.dy),
        "Asin": (lambda n: n.dy / _off_one(n.input(0)).op("Sqrt"),),
        "Asinh": (lambda n: n.dy / (n.input(0) * n.input(0) + 1.0).op("Sqrt"),),
        "Atan": (lambda n: n.dy / (n.input(0) * n.input(0) + 1.0),),
        "Atanh": (lambda n: n.dy / _off_one(n.input(0)),),
        "Cast": (lambda n: n.dy.op("Cast", to=n.elem_type(n.inputs[0])),),
        "Cos": (lambda n: -(n.dy * n.input(0).op("Sin")),),
        "Cosh": (lambda n: n.dy * n.input(0).op("Sinh"),),
        "Div": (
            lambda n: n.dy / n.input(1),
            lambda n: -(n.dy / n.input(1) * n.out),  # d(a/c)/dc = -(a/c)/c
        ),
        "Erf": (
            lambda n: n.dy * ((-(n.input(0) * n.input(0))).op("Exp") * (2.0 / math.sqrt(math.pi))),
        ),
        "Exp": (lambda n: n.dy * n.out,),
        "Identity": (lambda n: n.dy,),
        "Log": (lambda n: n.dy / n.input(0),),
        # y = a - q c with a whole number q, which is found again whichever way it was rounded.
        "Mod": (
            lambda n: n.dy,
            lambda n: -(n.dy * ((n.input(0) - n.out) / n.input(1)).op("Round")),
        ),
        "Mul": (lambda n: n.dy * n.input(1), lambda n: n.dy * n.input(0)),
        "Neg": (lambda n: -n.dy,),
        "Reciprocal": (lambda n: -(n.dy * (n.out * n.out)),),
        "Sin": (lambda n: n.dy * n.input(0).op("Cos"),),
        "Sinh": (lambda n: n.dy * n.input(0).op("Cosh"),),
        "Sqrt": (lambda n: n.dy * 0.5 / n.out,),
        "Sub": (lambda n: n.dy, lambda n: -n.dy),
        "Tan": (lambda n: n.dy * (n.out * n.out + 1.0),),
        "Where": (
            None,
            lambda n: n.term(n.inputs[0]).where(n.dy, 0.0),
            lambda n: n.term(n.inputs[0]).where(0.0, n.dy),
        ),
    }
)


@vjp("CastLike", constant_inputs={1})
def _cast_like(ctx: VjpContext) -> Grads:
    return [ctx.dy.op("Cast", to=ctx.elem_type(ctx.inputs[0])).name]


@vjp("Pow", constant_inputs={1})
def _pow(ctx: VjpContext) -> Grads:
    """y = x^p: dx = p x^(p-1), and 0 for p = 0; dp = y log(x), and 0 for x = 0 and p >= 0.

    Of a negative base the exponent has no gradient in real numbers: it is NaN.
    """
    x = ctx.input(0)
    x_type, p_type = (ctx.elem_type(name) for name in ctx.inputs)
    exponent = ctx.input(1).cast(x_type)
    grads: list[str | None] = [None, None]
    if ctx.wants(0):
        # x^0, not x^-1, where p is 0: 0 times the infinity at x = 0 would be NaN.
        reduced = exponent.op("Equal", 0.0).where(0.0, exponent - 1.0)
        grads[0] = ctx.sum_to((ctx.dy * (exponent * x.op("Pow", reduced))).name, x.name)
    if ctx.wants(1):
        flat = x.op("Equal", 0.0).op("And", exponent.op("GreaterOrEqual", 0.0))
        slope = flat.where(0.0, ctx.dy * (ctx.out * x.op("Log")))
        total = ctx.term(ctx.sum_to(slope.name, ctx.inputs[1]), x_type)
        grads[1] = total.cast(p_type).name
    return grads


@vjp("Sum")
def _sum(ctx: VjpContext) -> Grads:
    return [
        ctx.sum_to(ctx.g, name) if ctx.wants(index) else None
        for index, name in enumerate(ctx.inputs)
    ]


@vjp("Mean")
def _mean(ctx: VjpContext) -> Grads:
    share = (ctx.dy / float(len(ctx.inputs))).name
    return [
        ctx.sum_to(share, name) if ctx.wants(index) else None
        for index, name in enumerate(ctx.inputs)
    ]


@vjp("Max")
@vjp("Min")
def _extreme(ctx: VjpContext) -> Grads:
    """Share the gradient evenly among all inputs that equal the result."""
    kind = ctx.elem_type(ctx.y)
    values, out = [ctx.term(name) for name in ctx.inputs], ctx.out
    if kind in HALVES:
        # A runtime may keep one of them in float32 and round another: none would be equal then.
        values = [value.cast(FLOAT) for value in values]
        out = values[0].op(ctx.node.op_type, *values[1:])
    equal = [value.op("Equal", out).where(1.0, 0.0).cast(kind) for value in values]
    share = ctx.dy / (equal[0] if len(equal) == 1 else equal[0].op("Sum", *equal[1:]))
    return [
        ctx.sum_to((share * mask).name, name) if ctx.wants(index) else None
        for index, (name, mask) in enumerate(zip(ctx.inputs, equal, strict=True))
    ]


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# They move or add up elements of their first input (Add, Concat and Sum of all of them).
_MOVES = frozenset(
    {"Add", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Sum", "Transpose",
     "Unsqueeze"}
)  # fmt: skip
_OF_ALL = frozenset({"Add", "Concat", "Sum"})


def _of_products(b: GraphBuilder, grad: str) -> bool:
    """Return True if a gradient is made of products, by nothing but moves, sums and masks."""
    waiting, seen = [grad], {grad}
    while waiting:
        value = waiting.pop()
        node = b.made.get(value)
        if node is None:
            return False
        if node.op_type in _PRODUCTS or value in b.of_products:
            continue
        zeros = b.made.get(node.input[0]) if node.op_type == "ScatterElements" else None
        if zeros is not None and zeros.op_type == "Expand":
            further = [node.input[2]]
        elif node.op_type in _MOVES:
            further = list(node.input if node.op_type in _OF_ALL else node.input[:1])
        else:
            return False
        waiting += [name for name in further if name not in seen]
        seen.update(further)
    return True


def masked(ctx: VjpContext, passes: Term) -> Term:
    """Return the gradient where a condition holds, 0 elsewhere.

    By a Mul, which takes ONNX Runtime a quarter of the time, where the gradient comes from a
    product of matrices or a convolution: an infinity on the way there, which would become NaN, has
    spread over everything already.
    """
    kind = ctx.elem_type(ctx.y)
    if kind in TRAINABLE and _of_products(ctx.b, ctx.g):
        grad = ctx.dy * passes.op("Cast", to=kind)
        ctx.b.of_products.add(grad.name)
        return grad
    return passes.where(ctx.dy, 0.0)


def _in_order(ctx: VjpContext) -> bool:
    """Return True for the bounds of a Clip of which the lower one is known to be no larger."""
    lower, upper = ctx.held(1), ctx.held(2)
    if lower is None or upper is None:
        return not (ctx.has(1) and ctx.has(2))
    return lower.size == upper.size == 1 and float(lower.reshape(())) <= float(upper.reshape(()))


@vjp("Clip", constant_inputs={1, 2})
def _clip(ctx: VjpContext) -> Grads:
    """y = min(upper, max(lower, x)): beyond a bound the gradient is that bound's."""
    x, grad = ctx.input(0), ctx.dy
    of_bounds = ctx.wants(1) or ctx.wants(2)
    if not of_bounds and _in_order(ctx) and ctx.elem_type(ctx.y) in TRAINABLE:
        return [masked(ctx, x.op("Equal", ctx.out)).name]  # it is between them where it is kept
    upper = lower = None
    if ctx.has(2):
        above = x.op("Greater", ctx.input(2))
        if ctx.has(1):
            above = above.op("Or", ctx.input(1).op("Greater", ctx.input(2)))
        upper = above.where(grad, 0.0)
        grad = above.where(0.0, grad)
    if ctx.has(1):
        below = x.op("Less", ctx.input(1))
        lower = below.where(grad, 0.0)
        grad = below.where(0.0, grad)
    grads: list[str | None] = [grad.name, None, None]
    for index, bound in ((1, lower), (2, upper)):
        if bound is not None and ctx.wants(index):
            grads[index] = ctx.sum_to(bound.name, ctx.inputs[index])
    return grads


@vjp("Range", constant_inputs={0, 1, 2})
def _range(ctx: VjpContext) -> Grads:
    """y[i] = start + i step; how many there are jumps, and so the limit has no gradient."""
    b = ctx.b
    grads: list[str | None] = [None, None, None]
    if ctx.wants(0):
        grads[0] = b.reshape_like(b.op("ReduceSum", ctx.g, keepdims=0), ctx.inputs[0])
    if ctx.wants(2):
        zero, one = (b.constant(np.asarray(n, np.int64), "number") for n in (0, 1))
        steps = b.op("Range", zero, b.op("Size", ctx.y), one)
        weighted = b.op("Mul", ctx.g, b.op("Cast", steps, to=ctx.elem_type(ctx.y)))
        grads[2] = b.reshape_like(b.op("ReduceSum", weighted, keepdims=0), ctx.inputs[2])
    return grads
