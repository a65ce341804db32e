"""Gradient rules of the elementwise ops.

Rule: most ops are a row of a table, with one partial derivative per input: a function of the node
that returns the input's gradient, before it is summed back over axes that broadcasting stretched.
The derivatives are the textbook ones; where the output is at hand it is used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from bbnode.components.autodiff.table import Rule, Term, VjpContext, vjp

Grads = Sequence[str | None]
Partial: TypeAlias = Callable[[VjpContext], Term]


def _gelu(n: VjpContext) -> Term:
    """Differentiate Gelu (Hendrycks and Gimpel, arXiv:1606.08415), exact or by tanh."""
    x = n.input(0)
    if n.attribute("approximate", "none") == "tanh":
        # y = x/2 (1 + t), t = tanh(k (x + c x^3));  dy = (1+t)/2 + x/2 (1-t^2) k (1 + 3 c x^2)
        k, c = math.sqrt(2.0 / math.pi), 0.044715
        square = x * x
        t = (x * (square * c + 1.0) * k).op("Tanh")
        curve = (1.0 - t * t) * ((square * (3.0 * c) + 1.0) * k)
        return n.dy * ((t + 1.0 + x * curve) * 0.5)
    # y = x Phi(x);  dy = Phi(x) + x phi(x)
    cumulative = ((x * math.sqrt(0.5)).op("Erf") + 1.0) * 0.5
    density = (-(x * x * 0.5)).op("Exp") * (1.0 / math.sqrt(2.0 * math.pi))
    return n.dy * (cumulative + x * density)


# Op type to its partial derivatives, by input; None where an input is a constant to the op.
PARTIALS: Mapping[str, tuple[Partial | None, ...]] = {
    "Abs": (lambda n: n.dy * n.input(0).op("Sign"),),
    "Add": (lambda n: n.dy, lambda n: n.dy),
    "Cast": (lambda n: n.dy.op("Cast", to=n.elem_type(n.inputs[0])),),
    "Cos": (lambda n: -(n.dy * n.input(0).op("Sin")),),
    "Div": (
        lambda n: n.dy / n.input(1),
        lambda n: -(n.dy / n.input(1) * n.out),  # d(a/c)/dc = -(a/c)/c
    ),
    # Clevert et al., 2016 (arXiv:1511.07289): below zero alpha (e^x - 1), so y + alpha.
    "Elu": (
        lambda n: (n.input(0) > 0.0).where(n.dy, n.dy * (n.out + float(n.attribute("alpha", 1.0)))),
    ),
    "Erf": (
        lambda n: n.dy * ((-(n.input(0) * n.input(0))).op("Exp") * (2.0 / math.sqrt(math.pi))),
    ),
    "Exp": (lambda n: n.dy * n.out,),
    "Gelu": (_gelu,),
    "Identity": (lambda n: n.dy,),
    "LeakyRelu": (
        lambda n: (n.input(0) > 0.0).where(n.dy, n.dy * float(n.attribute("alpha", 0.01))),
    ),
    "Log": (lambda n: n.dy / n.input(0),),
    "Mul": (lambda n: n.dy * n.input(1), lambda n: n.dy * n.input(0)),
    "Neg": (lambda n: -n.dy,),
    "PRelu": (
        lambda n: (n.input(0) > 0.0).where(n.dy, n.dy * n.input(1)),
        lambda n: (n.input(0) > 0.0).where(0.0, n.dy * n.input(0)),
    ),
    "Reciprocal": (lambda n: -(n.dy * (n.out * n.out)),),
    # Where, not Mul by a mask: an infinite gradient times 0 would be NaN.
    "Relu": (lambda n: (n.out > 0.0).where(n.dy, 0.0),),
    "Sigmoid": (lambda n: n.dy * (n.out * (1.0 - n.out)),),
    "Sin": (lambda n: n.dy * n.input(0).op("Cos"),),
    "Softplus": (lambda n: n.dy * n.input(0).op("Sigmoid"),),
    "Sqrt": (lambda n: n.dy * 0.5 / n.out,),
    "Sub": (lambda n: n.dy, lambda n: -n.dy),
    "Tanh": (lambda n: n.dy * (1.0 - n.out * n.out),),
    "Where": (
        None,
        lambda n: n.term(n.inputs[0]).where(n.dy, 0.0),
        lambda n: n.term(n.inputs[0]).where(0.0, n.dy),
    ),
}


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

    return rule


for _op_type, _partials in PARTIALS.items():
    _constants = {index for index, partial in enumerate(_partials) if partial is None}
    vjp(_op_type, constant_inputs=_constants)(_rule(_partials))


@vjp("Pow", constant_inputs={1})
def _pow(ctx: VjpContext) -> Grads:
    x, exponent = ctx.input(0), ctx.input(1)
    if ctx.wants(1):
        raise ctx.error(
            f"the exponent {exponent.name!r} depends on what is differentiated",
            "make it a constant, or write the power as Exp(Mul(exponent, Log(x)))",
        )
    elem_type = ctx.elem_type(x.name)
    if ctx.elem_type(exponent.name) != elem_type:
        exponent = ctx.term(ctx.b.op("Cast", exponent.name, to=elem_type), x.name)
    slope = exponent * x.op("Pow", exponent - 1.0)
    return [ctx.sum_to((ctx.dy * slope).name, x.name)]


@vjp("Sum")
def _sum(ctx: VjpContext) -> Grads:
    return [
        ctx.sum_to(ctx.g, name) if ctx.wants(index) else None
        for index, name in enumerate(ctx.inputs)
    ]


@vjp("Max")
@vjp("Min")
def _extreme(ctx: VjpContext) -> Grads:
    """Share the gradient evenly among all inputs that equal the result."""
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
    x, grad = ctx.input(0), ctx.dy
    for index, beyond in ((1, "Less"), (2, "Greater")):
        if ctx.wants(index):
            raise ctx.error(
                f"the bound {ctx.inputs[index]!r} depends on what is differentiated",
                "make it a constant, or use Max and Min",
            )
        if ctx.has(index):
            grad = x.op(beyond, ctx.input(index)).where(0.0, grad)
    return [grad.name]


@vjp("Dropout", constant_inputs={1, 2})
def _dropout(ctx: VjpContext) -> Grads:
    """Differentiate the identity, which it is without its training mode."""
    if ctx.has(2):
        raise ctx.error(
            "with a training_mode it draws at random, and the same draw can't be had again",
            "leave its third input out",
        )
    return [ctx.g]
