"""The losses that a model can be trained with, by name.

Rule: a loss is a scalar, the mean over its elements; it needs no gradient rule because its ops have
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bbnode.components.autodiff.builder import INT64, GraphBuilder, InferredType
from bbnode.components.autodiff.errors import InvalidForwardModel, UnknownLoss

# (builder, prediction, labels, type of the prediction) -> name of the scalar loss
Emitter: TypeAlias = Callable[[GraphBuilder, str, str, InferredType], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss: how it is emitted, and what its labels are."""

    name: str
    emit: Emitter
    class_labels: bool  # int64 class numbers without the last axis; else like the prediction

    def label_type(self, prediction: InferredType) -> InferredType:
        """Return the element type and dimensions of the labels input."""
        if not self.class_labels:
            return prediction
        dims = None if prediction.dims is None else prediction.dims[:-1]
        return InferredType(INT64, dims)


def _softmax_cross_entropy(b: GraphBuilder, y: str, labels: str, kind: InferredType) -> str:
    """Emit the mean of -log softmax(y)[label]; classes are the last axis. LogSoftmax is stable."""
    if not kind.dims:
        raise InvalidForwardModel(
            what="its output is a scalar, softmax_cross_entropy wants (batch, classes)",
            remedy="give the model an output with one logit per class",
        )
    # Counted from the front: onnx's reference evaluator mistakes -1 in GatherElements.
    axis = len(kind.dims) - 1
    log_p = b.op("LogSoftmax", y, axis=axis)
    column = b.op("Unsqueeze", labels, b.ints([axis]))
    picked = b.op("GatherElements", log_p, column, axis=axis)
    return b.op("Neg", b.op("ReduceMean", picked, keepdims=0))


def _mse(b: GraphBuilder, y: str, labels: str, _: InferredType) -> str:
    """Emit the mean of the squared differences, over all elements."""
    difference = b.op("Sub", y, labels)
    return b.op("ReduceMean", b.op("Mul", difference, difference), keepdims=0)


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("softmax_cross_entropy", _softmax_cross_entropy, class_labels=True),
        Loss("mse", _mse, class_labels=False),
    )
}


def find_loss(name: str) -> Loss:
    """Return the loss of that name.

    Raises:
        UnknownLoss: there is no such loss.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise UnknownLoss(loss=name, known=tuple(sorted(LOSSES)))
    return loss
