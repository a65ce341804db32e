"""Gradient rules of SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss.

Rule: both are written as their operator pages say, with classes on axis 1, and the sweep goes back
through that. A label that is ignored picks class 0 with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.components.autodiff.builder import INT64
from bbnode.components.autodiff.composition import pull_back_through
from bbnode.components.autodiff.table import VjpContext, vjp

Grads = Sequence[str | None]


@vjp("SoftmaxCrossEntropyLoss", constant_inputs={1, 2})
def _softmax_cross_entropy_loss(ctx: VjpContext) -> Grads:
    log_p = ctx.b.op("LogSoftmax", ctx.inputs[0], axis=1)
    wants_loss = ctx.grads[0] is not None
    outputs = [_likelihood(ctx, log_p) if wants_loss else None, log_p]
    return pull_back_through(ctx, outputs[: len(ctx.grads)])


@vjp("NegativeLogLikelihoodLoss", constant_inputs={1, 2})
def _negative_log_likelihood_loss(ctx: VjpContext) -> Grads:
    return pull_back_through(ctx, [_likelihood(ctx, ctx.inputs[0])])


def _likelihood(ctx: VjpContext, log_p: str) -> str:
    """Return -w[label] log_p[label], reduced as the node says; "mean" divides by the weights."""
    b, labels = ctx.b, ctx.inputs[1]
    reduction = ctx.attribute("reduction", "mean")
    if reduction not in ("none", "sum", "mean"):
        raise ctx.error(f"there is no reduction {reduction!r}", "use none, sum or mean")
    ignored: int | None = ctx.attribute("ignore_index", None)
    labels = b.op("Cast", labels, to=INT64)
    kept = None
    if ignored is not None:
        skipped = b.op("Equal", labels, b.scalar(int(ignored), INT64))
        labels = b.op("Where", skipped, b.scalar(0, INT64), labels)
        one, zero = ctx.scalar(1.0, ctx.inputs[0]), ctx.scalar(0.0, ctx.inputs[0])
        kept = ctx.term(b.op("Where", skipped, zero, one))
    one_axis = b.ints([1])
    picked = b.op("GatherElements", log_p, b.op("Unsqueeze", labels, one_axis), axis=1)
    loss = -ctx.term(b.op("Squeeze", picked, one_axis))
    weight = kept
    if ctx.has(2):
        weight = ctx.term(b.op("Gather", ctx.inputs[2], labels, axis=0))
        weight = weight if kept is None else weight * kept
    if weight is not None:
        # By choice: an infinite loss of an ignored label is none.
        loss = loss * weight if kept is None else (kept > 0.0).where(loss * weight, 0.0)
    if reduction == "none":
        return loss.name
    if reduction == "sum":
        return loss.op("ReduceSum", keepdims=0).name
    if weight is None:
        return loss.op("ReduceMean", keepdims=0).name
    return (loss.op("ReduceSum", keepdims=0) / weight.op("ReduceSum", keepdims=0)).name
