"""Loss functions, as nodes that the reverse sweep differentiates like any others.

Rule: a loss is a scalar, the mean over everything it is computed for; it needs no rule of
its own because it is built from ops that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from onnx import TensorProto

from bbnode.components.autodiff.builder import INT64, GraphBuilder
from bbnode.components.autodiff.errors import InvalidForwardModel, UnknownLoss
from bbnode.components.autodiff.values import Dims, ValueType

# (builder, prediction, labels, type of the prediction) -> name of the scalar loss
Emitter: TypeAlias = Callable[[GraphBuilder, str, str, ValueType], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss: how it is emitted, and what its labels are."""

    name: str
    emit: Emitter
    class_labels: bool  # int64 class numbers without the last axis; else like the prediction

    def label_type(self, prediction: ValueType) -> ValueType:
        """Element type and dimensions of the labels input."""
        if not self.class_labels:
            return prediction
        dims: Dims | None = None if prediction.dims is None else prediction.dims[:-1]
        return ValueType(INT64, dims)


def _softmax_cross_entropy(b: GraphBuilder, y: str, labels: str, kind: ValueType) -> str:
    """Mean of -log softmax(y)[label]; classes are the last axis. LogSoftmax keeps it stable."""
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


def _mse(b: GraphBuilder, y: str, labels: str, _: ValueType) -> str:
    """Mean of the squared differences, over all elements."""
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
    """The loss of that name.

    Raises:
        UnknownLoss: there is none.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise UnknownLoss(loss=name, known=tuple(sorted(LOSSES)))
    return loss


def is_trainable_type(elem_type: int) -> bool:
    """Element types that a parameter may have: what the training ops of ORT run in."""
    return elem_type in (int(TensorProto.FLOAT), int(TensorProto.DOUBLE))
