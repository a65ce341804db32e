"""Gradient rules of the activation functions.

Rule: as in `elementwise`, rows of partial derivatives. Where, not Mul by a mask, parts the pieces
of a function: an infinite gradient times 0 would be NaN. Where the function is flat on one side and
straight on the other, `masked` knows when a Mul will do. At a kink the gradient is that of
the side on which the function is flat, as PyTorch has it.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto

from bbnode.components.autodiff.builder import FLOAT, OtherNodes
from bbnode.components.autodiff.rules.elementwise import masked, rules_of
from bbnode.components.autodiff.table import Term, VjpContext


def _relu(n: VjpContext) -> Term:
    return masked(n, n.out > 0.0)


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
    # y = x Phi(x);  dy = Phi(x) + x phi(x).  With u = x / sqrt 2 and s = (1 + erf u) / sqrt 2, that
    # is y = u s and dy = (s + sqrt(2/pi) u e^(-u^2)) / sqrt 2.
    if n.elem_type(n.y) == FLOAT:
        u, s = _gelu_parts(n)
    else:
        u = x * math.sqrt(0.5)
        s = (u.op("Erf") + 1.0) * math.sqrt(0.5)
    bell = u / (u * u).op("Exp") * math.sqrt(2.0 / math.pi)
    # A factor of dy, not of the slope: a runtime makes it part of the product that dy comes from.
    return n.dy * math.sqrt(0.5) * (bell + s)


def _gelu_parts(n: VjpContext) -> tuple[Term, Term]:
    """Return u and s of a float32 Gelu, which the forward pass then computes its output from.

    The scale of u goes into the product that x comes from, beside its bias; a BatchNormalization
    of one channel is s in one pass over the memory.
    """
    root = n.scalar(math.sqrt(0.5), FLOAT)
    u, s = n.instead(OtherNodes, lambda: _in_parts(n, root)).names()
    return n.term(u, FLOAT), n.term(s, FLOAT)


def _in_parts(n: VjpContext, root: str) -> OtherNodes:
    """Return the nodes of a Gelu that make u and s; `root` is the root of 1/2."""
    b, early = n.b, n.b.nested()  # what the sweep emits stands too late for the forward pass
    product = n.made.get(n.inputs[0])
    terms = [n.made.get(name) for name in product.input] if product is not None else []
    if product is not None and product.op_type == "Add" and "MatMul" in map(_op_type, terms):
        u = early.op("Add", *(early.op("Mul", name, root) for name in product.input))
    else:
        u = early.op("Mul", n.inputs[0], root)
    row = early.op("Reshape", early.op("Erf", u), b.ints([1, 1, -1]))
    half, zero, one = (b.constant(np.asarray([c], np.float32)) for c in (math.sqrt(0.5), 0.0, 1.0))
    made = early.op("BatchNormalization", row, half, half, zero, one, epsilon=0.0)
    s = early.reshape_like(made, u)
    output = NodeProto(op_type="Mul", input=[u, s], output=[n.y], name=n.y)
    return OtherNodes((*early.nodes, output), (u, s))


def _op_type(node: NodeProto | None) -> str:
    return "" if node is None else node.op_type


def _celu(n: VjpContext) -> Term:
    """Differentiate Celu (Barron, arXiv:1704.07483): below zero e^(x/alpha), so y/alpha + 1."""
    slope = n.out / float(n.attribute("alpha", 1.0)) + 1.0
    return (n.input(0) > 0.0).where(n.dy, n.dy * slope)


def _selu(n: VjpContext) -> Term:
    """Differentiate Selu (Klambauer et al., arXiv:1706.02515): below zero y + gamma alpha."""
    gamma = float(n.attribute("gamma", 1.0507009873554805))
    alpha = float(n.attribute("alpha", 1.6732632423543772))
    return (n.input(0) > 0.0).where(n.dy * gamma, n.dy * (n.out + gamma * alpha))


def _hard_sigmoid(n: VjpContext) -> Term:
    inside = (n.out > 0.0).op("And", n.out.op("Less", 1.0))
    return inside.where(n.dy * float(n.attribute("alpha", 0.2)), 0.0)


def _hard_swish(n: VjpContext) -> Term:
    """Differentiate x max(0, min(1, x/6 + 1/2)) (Howard et al., arXiv:1905.02244)."""
    x = n.input(0)
    bent = (x > -3.0).where(n.dy * (x / 3.0 + 0.5), 0.0)
    return x.op("Less", 3.0).where(bent, n.dy)


def _mish(n: VjpContext) -> Term:
    """Differentiate x tanh(softplus(x)) (Misra, arXiv:1908.08681)."""
    x = n.input(0)
    t = x.op("Softplus").op("Tanh")
    return n.dy * (t + x * (1.0 - t * t) * x.op("Sigmoid"))


def _swish(n: VjpContext) -> Term:
    """Differentiate x sigmoid(alpha x) (Ramachandran et al., arXiv:1710.05941)."""
    x = n.input(0)
    scaled = x * float(n.attribute("alpha", 1.0))
    s = scaled.op("Sigmoid")
    return n.dy * (s + scaled * (s * (1.0 - s)))


def _softsign(n: VjpContext) -> Term:
    whole = n.input(0).op("Abs") + 1.0
    return n.dy / (whole * whole)


rules_of(
    {
        "Celu": (_celu,),
        # Clevert et al., 2016 (arXiv:1511.07289): below zero alpha (e^x - 1), so y + alpha.
        "Elu": (
            lambda n: (n.input(0) > 0.0).where(
                n.dy, n.dy * (n.out + float(n.attribute("alpha", 1.0)))
            ),
        ),
        "Gelu": (_gelu,),
        "HardSigmoid": (_hard_sigmoid,),
        "HardSwish": (_hard_swish,),
        "LeakyRelu": (
            lambda n: (n.input(0) > 0.0).where(n.dy, n.dy * float(n.attribute("alpha", 0.01))),
        ),
        "Mish": (_mish,),
        "PRelu": (
            lambda n: (n.input(0) > 0.0).where(n.dy, n.dy * n.input(1)),
            lambda n: (n.input(0) > 0.0).where(0.0, n.dy * n.input(0)),
        ),
        "Relu": (_relu,),
        "Selu": (_selu,),
        "Shrink": (
            lambda n: (n.input(0).op("Abs") > float(n.attribute("lambd", 0.5))).where(n.dy, 0.0),
        ),
        "Sigmoid": (lambda n: n.dy * (n.out * (1.0 - n.out)),),
        "Softplus": (lambda n: n.dy * n.input(0).op("Sigmoid"),),
        "Softsign": (_softsign,),
        "Swish": (_swish,),
        "Tanh": (lambda n: n.dy * (1.0 - n.out * n.out),),
        "ThresholdedRelu": (
            lambda n: (n.input(0) > float(n.attribute("alpha", 1.0))).where(n.dy, 0.0),
        ),
    }
)
