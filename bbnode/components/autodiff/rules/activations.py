"""Gradient rules of the activation functions.

Rule: as in `elementwise`, rows of partial derivatives. Where, not Mul by a mask, parts the pieces
of a function: an infinite gradient times 0 would be NaN. At a kink the gradient is that of the
side on which the function is flat, as PyTorch has it.
"""

from __future__ import annotations

import math

from bbnode.components.autodiff.rules.elementwise import rules_of
from bbnode.components.autodiff.table import Term, VjpContext


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
    # y = x Phi(x);  dy = Phi(x) + x phi(x) = (1 + erf(x / sqrt 2) + sqrt(2/pi) x e^(-x^2/2)) / 2.
    # Half of dy, not of the slope: a runtime makes it part of the product that dy comes from.
    bell = (x * (x * -0.5)).op("Exp")
    slope = (x * math.sqrt(0.5)).op("Erf") + 1.0 + x * bell * math.sqrt(2.0 / math.pi)
    return n.dy * 0.5 * slope


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
        "Relu": (lambda n: (n.out > 0.0).where(n.dy, 0.0),),
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
