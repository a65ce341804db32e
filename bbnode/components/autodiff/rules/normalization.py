"""Gradient rules of the normalizations, and of Dropout.

Rule: of y = n scale + bias with n = (x - mean) / deviation, where both statistics are of x over
some axes, and h = dy scale:  dx = (h - mean(h) - n mean(h n)) / deviation  (Ioffe and Szegedy,
arXiv:1502.03167, section 3). Statistics are those of LayerNormalization's further outputs in
float32; else they are computed again from the input (a runtime shares what the forward pass
computes alike). Halves are normalized in float32, as ONNX's `stash_type` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import NodeProto

from bbnode.components.autodiff.builder import FLOAT, HALVES, OtherNodes
from bbnode.components.autodiff.rules.reductions import count_of, spread_over
from bbnode.components.autodiff.table import Term, VjpContext, vjp

Grads = Sequence[str | None]

_EPSILON = 1e-5  # ONNX's default of all that have an `epsilon`
_MEAN_VARIANCE_EPSILON = 1e-9  # a fixed number of MeanVarianceNormalization


def _wide(ctx: VjpContext) -> int:
    """Return the element type that a node computes in: float32 for halves, else its input's."""
    kind = ctx.elem_type(ctx.inputs[0])
    return FLOAT if kind in HALVES else kind


def _grad(ctx: VjpContext, output: int) -> Term | None:
    """Return the gradient of an output in the type that the node computes in."""
    name = ctx.grads[output] if output < len(ctx.grads) else None
    return None if name is None else ctx.term(name, ctx.node.output[output]).cast(_wide(ctx))


def _dy(ctx: VjpContext) -> Term:
    return ctx.dy.cast(_wide(ctx))


def _input(ctx: VjpContext, index: int) -> Term:
    return ctx.input(index).cast(_wide(ctx))


def _narrow(ctx: VjpContext, grad: Term, index: int) -> str:
    """Return a gradient in the type of the input that it is of."""
    return grad.cast(ctx.elem_type(ctx.inputs[index])).name


def _summed(ctx: VjpContext, grad: Term, index: int) -> str:
    """Return a gradient of the output's shape, summed to an input's and in its type."""
    return _narrow(ctx, ctx.term(ctx.sum_to(grad.name, ctx.inputs[index]), _wide(ctx)), index)


def _axes(ctx: VjpContext, axes: Sequence[int]) -> Term:
    return ctx.term(ctx.b.ints(axes))


def _column(ctx: VjpContext, value: Term) -> Term:
    """Return a channel's numbers [C] so that they broadcast over the spatial axes behind it."""
    x = ctx.inputs[0]
    rank = ctx.rank(x)
    column = value.op("Reshape", _axes(ctx, [-1, *[1] * (rank - 2)]))
    return ctx.term(spread_over(ctx, column.name, x, range(2, rank)) or column.name)


def _over_others(ctx: VjpContext) -> Term:
    """Return all axes but that of the channels."""
    rank = ctx.rank(ctx.inputs[0])
    if rank < 2:
        raise ctx.error("its input has no axis of channels", "give it the shape (batch, channels)")
    return _axes(ctx, [0, *range(2, rank)])


class _Normal:
    """The input without its mean (unless `centred` is False), over its deviation.

    `known` are the mean and 1 / deviation where they are at hand.

    Attributes:
        value: n.
        inverse: 1 / deviation, with the axes that were averaged as ones.
    """

    def __init__(
        self,
        ctx: VjpContext,
        x: Term,
        axes: Term,
        *,
        centred: bool = True,
        known: tuple[Term, Term] | None = None,
    ) -> None:
        self._axes = axes
        self._centred = centred
        if known is not None:
            mean, self.inverse = known
            self.value = (x - mean) * self.inverse
            return
        apart = x - self.mean(x) if centred else x
        spread = self.mean(apart * apart) + float(ctx.attribute("epsilon", _EPSILON))
        self.inverse = 1.0 / spread.op("Sqrt")
        self.value = apart * self.inverse

    def mean(self, value: Term) -> Term:
        return value.op("ReduceMean", self._axes, keepdims=1)

    def back(self, h: Term, means: tuple[Term, Term] | None = None) -> Term:
        """Return the gradient of the input, given that of n; `means` of h and h n, where known."""
        along = means[1] if means else self.mean(h * self.value)
        inner = h - self.value * along
        if self._centred:
            inner = inner - (means[0] if means else self.mean(h))
        return inner * self.inverse


@vjp("BatchNormalization", constant_inputs={3, 4})
def _batch_normalization(ctx: VjpContext) -> Grads:
    """Per channel (axis 1); by given statistics, or in training mode by those of the batch."""
    if int(ctx.attribute("training_mode", 0)):
        if any(grad is not None for grad in ctx.grads[1:]):
            raise ctx.error(
                "its running statistics have no gradient",
                "train by its first output, and work out other statistics with ReduceMean",
            )
        normal = _Normal(ctx, _input(ctx, 0), _over_others(ctx))
        return _per_channel(ctx, _dy(ctx), normal.value, normal.back)
    dy = _dy(ctx)
    x, scale, _, mean, variance = (_input(ctx, index) for index in range(5))
    inverse = 1.0 / (variance + float(ctx.attribute("epsilon", _EPSILON))).op("Sqrt")
    others = _over_others(ctx)
    grads: list[str | None] = [None] * 5
    # What is a number per channel is multiplied as such, not as many times as there are elements.
    along = None
    if ctx.wants(1) or ctx.wants(4):
        apart = dy * (x - _column(ctx, mean))
        along = apart.op("ReduceSum", others, keepdims=0) * inverse
    if ctx.wants(0):
        grads[0] = _narrow(ctx, dy * _column(ctx, scale * inverse), 0)
    if ctx.wants(1) and along is not None:
        grads[1] = _narrow(ctx, along, 1)
    if ctx.wants(2):
        grads[2] = _narrow(ctx, dy.op("ReduceSum", others, keepdims=0), 2)
    if ctx.wants(3):
        total = dy.op("ReduceSum", others, keepdims=0)
        grads[3] = _narrow(ctx, -(total * scale * inverse), 3)
    if ctx.wants(4) and along is not None:
        grads[4] = _narrow(ctx, along * scale * (inverse * inverse) * -0.5, 4)
    return grads


def _per_channel(
    ctx: VjpContext, dy: Term, normal: Term, back: Callable[[Term], Term]
) -> list[str | None]:
    """Return the gradients of X, scale [C] and bias [C] of  y = n scale + bias."""
    others = _over_others(ctx)
    grads: list[str | None] = [None, None, None]
    if ctx.wants(0):
        grads[0] = _narrow(ctx, back(dy * _column(ctx, _input(ctx, 1))), 0)
    if ctx.wants(1):
        grads[1] = _narrow(ctx, (dy * normal).op("ReduceSum", others, keepdims=0), 1)
    if ctx.wants(2):
        grads[2] = _narrow(ctx, dy.op("ReduceSum", others, keepdims=0), 2)
    return grads


@vjp("InstanceNormalization")
def _instance_normalization(ctx: VjpContext) -> Grads:
    """Over the spatial axes of each example and channel (Ulyanov et al., arXiv:1607.08022)."""
    dy = _dy(ctx)
    normal = _Normal(ctx, _input(ctx, 0), _axes(ctx, range(2, ctx.rank(ctx.inputs[0]))))
    return _per_channel(ctx, dy, normal.value, normal.back)


@vjp("GroupNormalization")
def _group_normalization(ctx: VjpContext) -> Grads:
    """Over groups of channels, all their spatial axes with them (Wu and He, arXiv:1803.08494)."""
    b, x = ctx.b, ctx.inputs[0]
    dy = _dy(ctx)
    groups = int(ctx.attribute("num_groups", 1))
    # (N, C, …) to (N, G, the rest); its size is worked out, as an empty batch has no -1.
    batch, rest = b.op("Shape", x, start=0, end=1), b.op("Shape", x, start=1)
    each = b.op("Div", b.op("ReduceProd", rest, keepdims=1), b.ints([groups]))
    apart = ctx.term(b.op("Concat", batch, b.ints([groups]), each, axis=0))

    def grouped(value: Term) -> Term:
        return value.op("Reshape", apart, allowzero=1)

    def whole(value: Term) -> Term:
        return ctx.term(b.reshape_like(value.name, x), _wide(ctx))

    normal = _Normal(ctx, grouped(_input(ctx, 0)), _axes(ctx, [2]))
    return _per_channel(ctx, dy, whole(normal.value), lambda h: whole(normal.back(grouped(h))))


@vjp("LayerNormalization")
def _layer_normalization(ctx: VjpContext) -> Grads:
    """Over `axis` and all axes behind it (Ba, Kiros and Hinton, arXiv:1607.06450).

    Its further outputs are mean and r = 1 / deviation:  dmean/dx = 1/N,  dr/dx = -r^2 n / N.
    """
    x = ctx.inputs[0]
    axes = _axes(ctx, range(ctx.axis(x, -1), ctx.rank(x)))
    normal = _Normal(ctx, _input(ctx, 0), axes, known=_statistics(ctx))
    grads: list[str | None] = [None] * len(ctx.inputs)
    dy, d_mean, d_inverse = (_grad(ctx, output) for output in range(3))
    parts: list[Term] = []
    if dy is not None:
        along = dy * normal.value
        weighing = _weighing(ctx) if ctx.wants(1) else None
        means = None
        if weighing is not None:
            means = dy.op("MatMul", weighing), along.op("MatMul", weighing)
        parts.append(normal.back(dy * _input(ctx, 1), means))
        if ctx.wants(1):
            grads[1] = _summed(ctx, along, 1)
        if ctx.wants(2):
            grads[2] = _summed(ctx, dy, 2)
    statistics: list[Term] = []
    if d_mean is not None:
        statistics.append(d_mean)
    if d_inverse is not None:
        statistics.append(-(d_inverse * (normal.inverse * normal.inverse) * normal.value))
    # Each is a mean over as many elements as one deviation is of.
    parts += [each / count_of(ctx, x, normal.inverse.name).cast(_wide(ctx)) for each in statistics]
    if ctx.wants(0):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        shaped = ctx.b.op("Expand", total.name, ctx.b.op("Shape", x)) if dy is None else total.name
        grads[0] = _narrow(ctx, ctx.term(shaped, _wide(ctx)), 0)
    return grads


def _weighing(ctx: VjpContext) -> Term | None:
    """Return scale / N as a column, a product with which is a mean of what is times the scale.

    None unless that is over the last axis alone, in float32. The mean of h n is then of the
    product that the scale's gradient is a sum of, too.
    """
    dims, scale = (ctx.type_of(name).dims for name in ctx.inputs[:2])
    width = dims[-1] if dims else None
    if ctx.elem_type(ctx.inputs[0]) != FLOAT or scale != (width,) or not isinstance(width, int):
        return None
    # As a vector: a runtime makes a single number a factor of the product, which slows it down.
    shares = ctx.b.constant(np.full(width, 1 / max(width, 1), np.float32), "shares")
    return (ctx.input(1) * ctx.term(shares)).op("Unsqueeze", _axes(ctx, [1]))


def _statistics(ctx: VjpContext) -> tuple[Term, Term] | None:
    """Return the mean and 1 / deviation of a LayerNormalization that computes in its own type."""
    node = ctx.node
    if ctx.elem_type(ctx.inputs[0]) != FLOAT or int(ctx.attribute("stash_type", 1)) != FLOAT:
        return None
    outputs = [*node.output, "", ""][:3]
    if not all(outputs):

        def make() -> OtherNodes:
            more = tuple(name or ctx.b.fresh(node.op_type) for name in outputs)
            made = NodeProto()
            made.CopyFrom(node)
            made.output[:] = more
            return OtherNodes((made,), tuple(name for name in more if name not in node.output))

        outputs = list(ctx.instead(OtherNodes, make).nodes()[0].output)
    mean, inverse = (ctx.term(name, FLOAT) for name in outputs[1:])
    return mean, inverse


@vjp("RMSNormalization")
def _rms_normalization(ctx: VjpContext) -> Grads:
    """Over `axis` and all behind it, without a mean (Zhang and Sennrich, arXiv:1910.07467)."""
    x = ctx.inputs[0]
    dy = _dy(ctx)
    axes = _axes(ctx, range(ctx.axis(x, -1), ctx.rank(x)))
    normal = _Normal(ctx, _input(ctx, 0), axes, centred=False)
    grads: list[str | None] = [None, None]
    if ctx.wants(0):
        grads[0] = _narrow(ctx, normal.back(dy * _input(ctx, 1)), 0)
    if ctx.wants(1):
        grads[1] = _summed(ctx, dy * normal.value, 1)
    return grads


@vjp("LpNormalization")
def _lp_normalization(ctx: VjpContext) -> Grads:
    """y = x / norm along an axis: dx = (g - dnorm/dx sum(g y)) / norm; 0 where the norm is 0."""
    dy = _dy(ctx)
    x, y = _input(ctx, 0), ctx.out.cast(_wide(ctx))
    axes = _axes(ctx, [int(ctx.attribute("axis", -1))])
    absolute = int(ctx.attribute("p", 2)) == 1
    norm = x.op("ReduceL1" if absolute else "ReduceL2", axes, keepdims=1)
    slope = x.op("Sign") if absolute else y
    inner = dy - slope * (dy * y).op("ReduceSum", axes, keepdims=1)
    return [_narrow(ctx, norm.op("Equal", 0.0).where(0.0, inner / norm), 0)]


@vjp("MeanVarianceNormalization")
def _mean_variance_normalization(ctx: VjpContext) -> Grads:
    """y = (x - mean) / (deviation + 1e-9), over `axes`."""
    dy = _dy(ctx)
    x = _input(ctx, 0)
    axes = _axes(ctx, list(ctx.attribute("axes", [0, 2, 3])))

    def mean(value: Term) -> Term:
        return value.op("ReduceMean", axes, keepdims=1)

    apart = x - mean(x)
    deviation = mean(apart * apart).op("Sqrt")
    # Where all are equal the deviation has a kink; its gradient there is taken as 0.
    normal = deviation.op("Equal", 0.0).where(0.0, apart / deviation)
    whole = deviation + _MEAN_VARIANCE_EPSILON
    grad = (dy - mean(dy) - normal * mean(dy * (apart / whole))) / whole
    return [_narrow(ctx, grad, 0)]


@vjp("Dropout", constant_inputs={1, 2})
def _dropout(ctx: VjpContext) -> Grads:
    """In training mode what the mask kept, over the share that is kept; else the identity."""
    if ctx.wants(1):
        raise ctx.error(
            f"the ratio {ctx.inputs[1]!r} depends on what is differentiated", "make it a constant"
        )
    if not ctx.has(2):
        return [ctx.g]
    mask = ctx.node.output[1] if len(ctx.node.output) > 1 else ""
    if not mask:
        raise ctx.error(
            "with a training_mode it draws at random, and its draw is not among its outputs",
            "give it its second output, the mask",
        )
    kind = ctx.elem_type(ctx.inputs[0])
    ratio = ctx.input(1).cast(kind) if ctx.has(1) else ctx.term(ctx.scalar(0.5, kind), kind)
    drawn = ctx.term(ctx.inputs[2], kind).where(1.0 / (1.0 - ratio), 1.0)
    return [ctx.term(mask, kind).where(ctx.dy * drawn, 0.0).name]
