"""Gradient rules of the elementwise ops.

Rule: `ctx.g` is the gradient of the output; an op that broadcasts sums back with `sum_to`.
The derivatives are the textbook ones; where the output is at hand it is used again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


def _binary(ctx: VjpContext, left: str | None, right: str | None) -> Grads:
    a, c = ctx.inputs
    return [
        ctx.sum_to(left, a) if left is not None else None,
        ctx.sum_to(right, c) if right is not None else None,
    ]


@vjp("Add")
def _add(ctx: VjpContext) -> Grads:
    return _binary(ctx, ctx.g if ctx.wants(0) else None, ctx.g if ctx.wants(1) else None)


@vjp("Sub")
def _sub(ctx: VjpContext) -> Grads:
    right = ctx.b.op("Neg", ctx.g) if ctx.wants(1) else None
    return _binary(ctx, ctx.g if ctx.wants(0) else None, right)


@vjp("Mul")
def _mul(ctx: VjpContext) -> Grads:
    a, c = ctx.inputs
    left = ctx.b.op("Mul", ctx.g, c) if ctx.wants(0) else None
    right = ctx.b.op("Mul", ctx.g, a) if ctx.wants(1) else None
    return _binary(ctx, left, right)


@vjp("Div")
def _div(ctx: VjpContext) -> Grads:
    _, c = ctx.inputs
    quotient = ctx.b.op("Div", ctx.g, c)
    right = None
    if ctx.wants(1):  # d(a/c)/dc = -(a/c)/c
        right = ctx.b.op("Neg", ctx.b.op("Mul", quotient, ctx.y))
    return _binary(ctx, quotient if ctx.wants(0) else None, right)


@vjp("Pow", constant_inputs={1})
def _pow(ctx: VjpContext) -> Grads:
    x, exponent = ctx.inputs
    if ctx.wants(1):
        raise ctx.error(
            f"the exponent {exponent!r} depends on what is differentiated",
            "make it a constant, or write the power as Exp(Mul(exponent, Log(x)))",
        )
    b = ctx.b
    elem_type = ctx.elem_type(x)
    if ctx.elem_type(exponent) != elem_type:
        exponent = b.op("Cast", exponent, to=elem_type)
    lower = b.op("Pow", x, b.op("Sub", exponent, ctx.scalar(1.0, x)))
    return [ctx.sum_to(b.op("Mul", ctx.g, b.op("Mul", exponent, lower)), x), None]


@vjp("Sum")
def _sum(ctx: VjpContext) -> Grads:
    return [
        ctx.sum_to(ctx.g, name) if ctx.wants(index) else None
        for index, name in enumerate(ctx.inputs)
    ]


@vjp("Where", constant_inputs={0})
def _where(ctx: VjpContext) -> Grads:
    condition, a, c = ctx.inputs
    zero = ctx.scalar(0.0, ctx.y)
    left = right = None
    if ctx.wants(1):
        left = ctx.sum_to(ctx.b.op("Where", condition, ctx.g, zero), a)
    if ctx.wants(2):
        right = ctx.sum_to(ctx.b.op("Where", condition, zero, ctx.g), c)
    return [None, left, right]


@vjp("Identity")
def _identity(ctx: VjpContext) -> Grads:
    return [ctx.g]


@vjp("Cast")
def _cast(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Cast", ctx.g, to=ctx.elem_type(ctx.inputs[0]))]


@vjp("Neg")
def _neg(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Neg", ctx.g)]


@vjp("Abs")
def _abs(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Mul", ctx.g, ctx.b.op("Sign", ctx.inputs[0]))]


@vjp("Exp")
def _exp(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Mul", ctx.g, ctx.y)]


@vjp("Log")
def _log(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Div", ctx.g, ctx.inputs[0])]


@vjp("Sqrt")
def _sqrt(ctx: VjpContext) -> Grads:
    half = ctx.b.op("Mul", ctx.g, ctx.scalar(0.5, ctx.y))
    return [ctx.b.op("Div", half, ctx.y)]


@vjp("Relu")
def _relu(ctx: VjpContext) -> Grads:
    # Where, not Mul by a mask: an infinite gradient times 0 would be NaN.
    zero = ctx.scalar(0.0, ctx.y)
    return [ctx.b.op("Where", ctx.b.op("Greater", ctx.y, zero), ctx.g, zero)]


@vjp("LeakyRelu")
def _leaky_relu(ctx: VjpContext) -> Grads:
    x = ctx.inputs[0]
    slope = ctx.scalar(float(ctx.attribute("alpha", 0.01)), x)  # ONNX's default
    positive = ctx.b.op("Greater", x, ctx.scalar(0.0, x))
    return [ctx.b.op("Where", positive, ctx.g, ctx.b.op("Mul", ctx.g, slope))]


@vjp("Sigmoid")
def _sigmoid(ctx: VjpContext) -> Grads:
    b = ctx.b
    slope = b.op("Mul", ctx.y, b.op("Sub", ctx.scalar(1.0, ctx.y), ctx.y))
    return [b.op("Mul", ctx.g, slope)]


@vjp("Tanh")
def _tanh(ctx: VjpContext) -> Grads:
    b = ctx.b
    slope = b.op("Sub", ctx.scalar(1.0, ctx.y), b.op("Mul", ctx.y, ctx.y))
    return [b.op("Mul", ctx.g, slope)]


@vjp("Softplus")
def _softplus(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Mul", ctx.g, ctx.b.op("Sigmoid", ctx.inputs[0]))]


@vjp("Erf")
def _erf(ctx: VjpContext) -> Grads:
    x = ctx.inputs[0]
    b = ctx.b
    bell = b.op("Exp", b.op("Neg", b.op("Mul", x, x)))
    scaled = b.op("Mul", bell, ctx.scalar(2.0 / math.sqrt(math.pi), x))
    return [b.op("Mul", ctx.g, scaled)]


@vjp("Gelu")
def _gelu(ctx: VjpContext) -> Grads:
    """Hendrycks and Gimpel, 2016 (arXiv:1606.08415): exact, and the tanh approximation."""
    x = ctx.inputs[0]
    b = ctx.b
    half, one = ctx.scalar(0.5, x), ctx.scalar(1.0, x)
    if ctx.attribute("approximate", "none") == "tanh":
        # y = x/2 (1 + t), t = tanh(k (x + c x^3));  dy = (1+t)/2 + x/2 (1-t^2) k (1 + 3 c x^2)
        k, c = math.sqrt(2.0 / math.pi), 0.044715
        square = b.op("Mul", x, x)
        cubic = b.op("Add", b.op("Mul", square, ctx.scalar(c, x)), one)
        t = b.op("Tanh", b.op("Mul", b.op("Mul", x, cubic), ctx.scalar(k, x)))
        inner = b.op("Add", b.op("Mul", square, ctx.scalar(3.0 * c, x)), one)
        inner = b.op("Mul", inner, ctx.scalar(k, x))
        curve = b.op("Mul", b.op("Sub", one, b.op("Mul", t, t)), inner)
        slope = b.op("Add", b.op("Add", one, t), b.op("Mul", x, curve))
        return [b.op("Mul", ctx.g, b.op("Mul", slope, half))]
    # y = x Phi(x);  dy = Phi(x) + x phi(x)
    erf = b.op("Erf", b.op("Mul", x, ctx.scalar(math.sqrt(0.5), x)))
    phi_big = b.op("Mul", b.op("Add", erf, one), half)
    bell = b.op("Exp", b.op("Neg", b.op("Mul", b.op("Mul", x, x), half)))
    phi = b.op("Mul", bell, ctx.scalar(1.0 / math.sqrt(2.0 * math.pi), x))
    return [b.op("Mul", ctx.g, b.op("Add", phi_big, b.op("Mul", x, phi)))]


@vjp("Max")
@vjp("Min")
def _extreme(ctx: VjpContext) -> Grads:
    """All inputs that equal the result share its gradient evenly."""
    b = ctx.b
    elem_type = ctx.elem_type(ctx.y)
    equal = [b.op("Cast", b.op("Equal", name, ctx.y), to=elem_type) for name in ctx.inputs]
    share = b.op("Div", ctx.g, equal[0] if len(equal) == 1 else b.op("Sum", *equal))
    return [
        ctx.sum_to(b.op("Mul", share, mask), name) if ctx.wants(index) else None
        for index, (name, mask) in enumerate(zip(ctx.inputs, equal, strict=True))
    ]


@vjp("Clip", constant_inputs={1, 2})
def _clip(ctx: VjpContext) -> Grads:
    b = ctx.b
    x = ctx.inputs[0]
    zero = ctx.scalar(0.0, x)
    grad = ctx.g
    for index, beyond in ((1, "Less"), (2, "Greater")):
        if ctx.wants(index):
            raise ctx.error(
                f"the bound {ctx.inputs[index]!r} depends on what is differentiated",
                "make it a constant, or use Max and Min",
            )
        if ctx.has(index):
            grad = b.op("Where", b.op(beyond, x, ctx.inputs[index]), zero, grad)
    return [grad, *([None] * (len(ctx.inputs) - 1))]


@vjp("Elu")
def _elu(ctx: VjpContext) -> Grads:
    """Clevert et al., 2016 (arXiv:1511.07289): below zero alpha (e^x - 1), so y + alpha."""
    b = ctx.b
    slope = b.op("Add", ctx.y, ctx.scalar(float(ctx.attribute("alpha", 1.0)), ctx.y))
    positive = b.op("Greater", ctx.inputs[0], ctx.scalar(0.0, ctx.y))
    return [b.op("Where", positive, ctx.g, b.op("Mul", ctx.g, slope))]


@vjp("PRelu")
def _prelu(ctx: VjpContext) -> Grads:
    x, slope = ctx.inputs
    b = ctx.b
    zero = ctx.scalar(0.0, x)
    positive = b.op("Greater", x, zero)
    left = right = None
    if ctx.wants(0):
        left = b.op("Where", positive, ctx.g, b.op("Mul", ctx.g, slope))
    if ctx.wants(1):
        right = ctx.sum_to(b.op("Where", positive, zero, b.op("Mul", ctx.g, x)), slope)
    return [left, right]


@vjp("Reciprocal")
def _reciprocal(ctx: VjpContext) -> Grads:
    b = ctx.b
    return [b.op("Neg", b.op("Mul", ctx.g, b.op("Mul", ctx.y, ctx.y)))]


@vjp("Sin")
def _sin(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Mul", ctx.g, ctx.b.op("Cos", ctx.inputs[0]))]


@vjp("Cos")
def _cos(ctx: VjpContext) -> Grads:
    return [ctx.b.op("Neg", ctx.b.op("Mul", ctx.g, ctx.b.op("Sin", ctx.inputs[0])))]


@vjp("Dropout", constant_inputs={1, 2})
def _dropout(ctx: VjpContext) -> Grads:
    """Without its training mode it is the identity."""
    if ctx.has(2):
        raise ctx.error(
            "with a training_mode it draws at random, and the same draw can't be had again",
            "leave its third input out",
        )
    return [ctx.g, *([None] * (len(ctx.inputs) - 1))]
