"""The losses that a model can be trained with, by name.

Rule: a loss is a scalar, the mean over its elements; it needs no gradient rule because its ops have
one. Each has the value and the gradient of the function of torch that is named beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np
from onnx import helper

from bbnode.components.autodiff.builder import INT64, GraphBuilder, InferredType
from bbnode.components.autodiff.errors import (
    InvalidForwardModel,
    TrainingSettingRefused,
    UnknownLoss,
)

# Below it a length counts as this: torch.nn.functional.cosine_similarity's eps.
_LEAST_LENGTH = 1e-8
# Logarithms are of nothing smaller, where a probability of 0 hides the result.
_LEAST_PROBABILITY = 1e-30

LabelKind: TypeAlias = Literal["classes", "values", "probabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Numbers of a loss; one that the loss does not know has to keep its default.

    Attributes:
        label_smoothing: e in [0, 1): the target is 1 - e for the class and e / C for all C.
        class_weights: one weight for each class, 0 or more; empty weighs all alike.
        pos_weight: of the positive labels, one number or one for each value of the last axis.
        ignore_index: a label that counts for nothing; None takes every label for a class.
        class_axis: of the output that has one number for each class.
        huber_delta: where the loss turns from quadratic to linear.
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    pos_weight: tuple[float, ...] = ()
    ignore_index: int | None = None
    class_axis: int = -1
    huber_delta: float = 1.0


# (builder, prediction, labels, type of the prediction, settings) -> name of the scalar loss
Emitter: TypeAlias = Callable[[GraphBuilder, str, str, InferredType, LossSettings], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss: how it is emitted, what its labels are, and which settings it knows.

    `labels`: "classes" are int64 numbers without the axis of classes, "values" are like the
    prediction, and "probabilities" are those from 0 to 1.
    """

    name: str
    emit: Emitter
    labels: LabelKind
    settings: frozenset[str] = frozenset()

    @property
    def class_labels(self) -> bool:
        """True if labels are numbers of classes."""
        return self.labels == "classes"

    def label_type(
        self, prediction: InferredType, settings: LossSettings | None = None
    ) -> InferredType:
        """Return the element type and dimensions of the labels input."""
        if not self.class_labels:
            return prediction
        if not prediction.dims:
            return InferredType(INT64, None)
        axis = class_axis(prediction, settings or LossSettings())
        return InferredType(INT64, prediction.dims[:axis] + prediction.dims[axis + 1 :])

    def check(self, settings: LossSettings) -> None:
        """Raise TrainingSettingRefused for a setting that is out of range, or means nothing."""
        plain = LossSettings()
        for field in fields(LossSettings):
            name, value = field.name, getattr(settings, field.name)
            if value != getattr(plain, name) and name not in self.settings:
                known = ", ".join(sorted(self.settings)) or "no such setting"
                raise TrainingSettingRefused(
                    f"{name}={value!r}", f"the loss {self.name!r} has {known}", f"leave {name} out"
                )
        if not 0 <= settings.label_smoothing < 1:
            raise TrainingSettingRefused(
                f"label_smoothing={settings.label_smoothing!r}",
                "it is the share of the target that goes to all classes",
                "give a number from 0 to below 1",
            )
        for name in ("class_weights", "pos_weight"):
            weights = getattr(settings, name)
            if weights and not (all(0 <= w < math.inf for w in weights) and any(weights)):
                raise TrainingSettingRefused(
                    f"{name}={weights!r}", "weights are finite, 0 or more, and not all 0",
                    "correct them",
                )  # fmt: skip
        if not 0 < settings.huber_delta < math.inf:
            raise TrainingSettingRefused(
                f"huber_delta={settings.huber_delta!r}", "it is no positive number", "give one"
            )


def class_axis(kind: InferredType, settings: LossSettings) -> int:
    """Return the axis of classes of a prediction, counted from the front.

    Raises:
        InvalidForwardModel: the prediction is a scalar.
        TrainingSettingRefused: it has no such axis.
    """
    if not kind.dims:
        raise InvalidForwardModel(
            what="its output is a scalar, a loss of classes wants (batch, classes)",
            remedy="give the model an output with one logit per class",
        )
    rank = len(kind.dims)
    # Counted from the front: onnx's reference evaluator mistakes -1 in GatherElements.
    axis = settings.class_axis + rank if settings.class_axis < 0 else settings.class_axis
    if not 0 <= axis < rank:
        raise TrainingSettingRefused(
            f"class_axis={settings.class_axis}", f"the output has {rank} axes",
            f"give one from {-rank} to {rank - 1}",
        )  # fmt: skip
    return axis


def _softmax_cross_entropy(
    b: GraphBuilder, y: str, labels: str, kind: InferredType, s: LossSettings
) -> str:
    """Emit the mean of -log softmax(y)[label]: torch's cross_entropy. LogSoftmax is stable."""
    log_p = b.op("LogSoftmax", y, axis=class_axis(kind, s))
    return _likelihood(b, log_p, labels, kind, s)


def _likelihood(
    b: GraphBuilder, log_p: str, labels: str, kind: InferredType, s: LossSettings
) -> str:
    """Emit the mean of -log_p[label]: torch's nll_loss, here with smoothing too."""
    axis = class_axis(kind, s)
    classes = (kind.dims or ())[axis]
    if s.class_weights and isinstance(classes, int) and len(s.class_weights) != classes:
        raise TrainingSettingRefused(
            f"class_weights of {len(s.class_weights)}", f"the output tells {classes} classes apart",
            "give one weight for each",
        )  # fmt: skip
    axes = b.ints([axis])
    known = labels
    counted = None  # 1 where the label counts, else 0; float, like the labels
    if s.ignore_index is not None:
        ignored = b.op("Equal", labels, b.constant(np.asarray(s.ignore_index, np.int64)))
        known = b.op("Where", ignored, b.constant(np.asarray(0, np.int64)), labels)
        counted = b.op("Cast", b.op("Not", ignored), to=kind.elem_type)
    picked = b.op("GatherElements", log_p, b.op("Unsqueeze", known, axes), axis=axis)
    if counted is None and not s.class_weights and not s.label_smoothing:
        return b.op("Neg", b.op("ReduceMean", picked, keepdims=0))

    weight, per_class = counted, None
    if s.class_weights:
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        table = b.constant(np.asarray(s.class_weights, dtype), "class_weights")
        weight = b.op("Gather", table, known, axis=0)
        if counted is not None:
            weight = b.op("Mul", weight, counted)
        behind = len(kind.dims or ()) - axis - 1
        shape = (len(s.class_weights), *(1,) * behind)
        per_class = b.constant(np.asarray(s.class_weights, dtype).reshape(shape), "class_weights")
    each = b.op("Squeeze", picked, axes)
    if weight is not None:
        each = b.op("Mul", each, weight)
    if s.label_smoothing:
        weighted = log_p if per_class is None else b.op("Mul", log_p, per_class)
        smooth = b.op("ReduceMean", weighted, axes, keepdims=0)
        if counted is not None:
            smooth = b.op("Mul", smooth, counted)
        rest = b.scalar(1.0 - s.label_smoothing, kind.elem_type)
        share = b.scalar(s.label_smoothing, kind.elem_type)
        each = b.op("Add", b.op("Mul", each, rest), b.op("Mul", smooth, share))
    if weight is None:
        return b.op("Neg", b.op("ReduceMean", each, keepdims=0))
    total = b.op("ReduceSum", each, keepdims=0)
    return b.op("Neg", b.op("Div", total, b.op("ReduceSum", weight, keepdims=0)))


def _nll(b: GraphBuilder, y: str, labels: str, kind: InferredType, s: LossSettings) -> str:
    """Emit the mean of -y[label]: torch's nll_loss; the prediction is log probabilities."""
    return _likelihood(b, y, labels, kind, s)


def _bce_with_logits(
    b: GraphBuilder, y: str, labels: str, kind: InferredType, s: LossSettings
) -> str:
    """Emit the mean of (1 - t) y + w log(1 + exp(-y)): binary_cross_entropy_with_logits.

    w = 1 + (pos_weight - 1) t.
    """
    one = b.scalar(1.0, kind.elem_type)
    # log(1 + exp(-y)) without overflow, and with the gradient -1/2 at 0, which |y| would lose.
    positive = b.op("GreaterOrEqual", y, b.scalar(0.0, kind.elem_type))
    negated = b.op("Neg", y)
    power = b.op("Exp", b.op("Where", positive, negated, y))
    beyond = b.op("Where", positive, b.scalar(0.0, kind.elem_type), negated)
    soft = b.op("Add", b.op("Log", b.op("Add", power, one)), beyond)
    if s.pos_weight:
        last = kind.dims[-1] if kind.dims else 1
        if len(s.pos_weight) > 1 and isinstance(last, int) and len(s.pos_weight) != last:
            raise TrainingSettingRefused(
                f"pos_weight of {len(s.pos_weight)}", f"the last axis of the output has {last}",
                "give one weight for each, or one for all",
            )  # fmt: skip
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        more = b.constant(np.asarray(s.pos_weight, dtype) - dtype.type(1), "pos_weight")
        soft = b.op("Mul", b.op("Add", b.op("Mul", more, labels), one), soft)
    each = b.op("Add", b.op("Mul", b.op("Sub", one, labels), y), soft)
    return b.op("ReduceMean", each, keepdims=0)


def _mse(b: GraphBuilder, y: str, labels: str, _: InferredType, _s: LossSettings) -> str:
    """Emit the mean of the squared differences, over all elements: torch's mse_loss."""
    difference = b.op("Sub", y, labels)
    return b.op("ReduceMean", b.op("Mul", difference, difference), keepdims=0)


def _mae(b: GraphBuilder, y: str, labels: str, _: InferredType, _s: LossSettings) -> str:
    """Emit the mean of the absolute differences: torch's l1_loss."""
    return b.op("ReduceMean", b.op("Abs", b.op("Sub", y, labels)), keepdims=0)


def _huber(b: GraphBuilder, y: str, labels: str, kind: InferredType, s: LossSettings) -> str:
    """Emit the mean of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2): huber_loss."""
    difference = b.op("Sub", y, labels)
    size = b.op("Abs", difference)
    delta = b.scalar(s.huber_delta, kind.elem_type)
    half = b.scalar(0.5, kind.elem_type)
    square = b.op("Mul", b.op("Mul", difference, difference), half)
    beyond = b.op("Sub", size, b.scalar(s.huber_delta / 2, kind.elem_type))
    each = b.op("Where", b.op("LessOrEqual", size, delta), square, b.op("Mul", beyond, delta))
    return b.op("ReduceMean", each, keepdims=0)


def _kl(b: GraphBuilder, y: str, labels: str, kind: InferredType, _: LossSettings) -> str:
    """Emit the sum of t (log t - y) over the size of the batch: kl_div with "batchmean".

    The prediction is log probabilities, and where t is 0 the term is.
    """
    if not kind.dims:
        raise InvalidForwardModel(
            what="its output is a scalar, kl wants (batch, classes)",
            remedy="give the model an output with one log probability per class",
        )
    least = b.scalar(_LEAST_PROBABILITY, kind.elem_type)
    entropy = b.op("Mul", labels, b.op("Log", b.op("Max", labels, least)))
    total = b.op("ReduceSum", b.op("Sub", entropy, b.op("Mul", labels, y)), keepdims=0)
    rows = b.op("Gather", b.op("Shape", y), b.constant(np.asarray(0, np.int64)), axis=0)
    return b.op("Div", total, b.op("Cast", rows, to=kind.elem_type))


def _cosine(b: GraphBuilder, y: str, labels: str, kind: InferredType, _: LossSettings) -> str:
    """Emit 1 - the mean of cosine_similarity over the last axis."""
    if not kind.dims:
        raise InvalidForwardModel(
            what="its output is a scalar, cosine compares vectors",
            remedy="give the model an output of (batch, size)",
        )
    last = b.ints([len(kind.dims) - 1])
    least = b.scalar(_LEAST_LENGTH**2, kind.elem_type)

    def length(value: str) -> str:
        square = b.op("ReduceSum", b.op("Mul", value, value), last, keepdims=0)
        return b.op("Sqrt", b.op("Max", square, least))

    product = b.op("ReduceSum", b.op("Mul", y, labels), last, keepdims=0)
    cosine = b.op("Div", product, b.op("Mul", length(y), length(labels)))
    one = b.scalar(1.0, kind.elem_type)
    return b.op("Sub", one, b.op("ReduceMean", cosine, keepdims=0))


_OF_CLASSES = frozenset({"class_weights", "ignore_index", "class_axis"})

LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            "softmax_cross_entropy",
            _softmax_cross_entropy,
            "classes",
            _OF_CLASSES | {"label_smoothing"},
        ),
        Loss("nll", _nll, "classes", _OF_CLASSES),
        Loss("bce_with_logits", _bce_with_logits, "probabilities", frozenset({"pos_weight"})),
        Loss("mse", _mse, "values"),
        Loss("mae", _mae, "values"),
        Loss("huber", _huber, "values", frozenset({"huber_delta"})),
        Loss("kl", _kl, "probabilities"),
        Loss("cosine", _cosine, "values"),
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
