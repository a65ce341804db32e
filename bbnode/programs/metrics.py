"""Metrics of an evaluation, as graphs of the backend.

Rule: a metric is a function of means over examples. Each peer measures the means of its own; their
mean by numbers of examples is that of all examples, and the metric of it is that of all examples
pooled, but for rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from bbnode.dsl import BackendSlot, BadArgument, Graph, Output, types

# (graph, backend, outputs, labels, number of classes, which labels count) -> the means, float32
# [K]; what counts is float32 like the labels, 1 or 0, or None where all do
Means: TypeAlias = Callable[[Graph, BackendSlot, Output, Output, int, Output | None], Output]
# (graph, backend, means [K], number of classes) -> the metric, float32 []
Value: TypeAlias = Callable[[Graph, BackendSlot, Output, int], Output]

AUC_BINS = 1024
_TOP_K = re.compile(r"top([1-9][0-9]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of outputs and labels.

    ```python
    f1 = metric("f1_macro", classes=10)
    means = f1.means(g, compute, model.forward(g, batch), labels)  # [K]; may be averaged
    score = f1.value(g, compute, means)  # []
    ```

    Attributes:
        name: as in `metric`.
        labels: "classes", int64 numbers without the outputs' last axis; "values", float32 like the
            outputs.
        classes: of the outputs, 0 where the metric does not need it.
        size: K, the number of means.
        ignore_index: a label that does not count, as in the loss; None counts all.
    """

    name: str
    labels: str
    classes: int
    size: int
    ignore_index: int | None = None
    _means: Means
    _value: Value

    def means(self, g: Graph, compute: BackendSlot, outputs: Output, labels: Output) -> Output:
        """Return what is averaged over examples, float32 [K]."""
        counted = None
        if self.ignore_index is not None:
            is_out = compute.equal(g, labels, g.constant(self.ignore_index))
            out = compute.cast(g, is_out, to=types.TENSOR_FLOAT)
            counted = compute.sub(g, g.constant(1.0), out)
        return self._means(g, compute, outputs, labels, self.classes, counted)

    def value(self, g: Graph, compute: BackendSlot, means: Output) -> Output:
        """Return the metric of means over all examples, float32 []."""
        return self._value(g, compute, means, self.classes)


def metric(name: str, *, classes: int = 0, ignore_index: int | None = None) -> Metric:
    """Return a metric by its name.

    Args:
        name: of classes "accuracy", "top2" to "top99", "f1_macro", "f1_micro"; of two classes,
            or of one logit and labels 0 and 1, "auc"; of values "mae", "mse", "r2", and
            "binary_accuracy" of logits.
        classes: the size of the outputs' last axis.
        ignore_index: of metrics of classes: a label that counts for nothing, as in the loss.

    Raises:
        BadArgument: there is no such metric, or not of so many classes.
    """
    top = _TOP_K.fullmatch(name)
    if top is not None:
        count = int(top[1])
        if not 1 <= count <= classes:
            raise BadArgument(f"metric {name!r} of {classes} classes; take at most as many")
        size_of_top, value_of_top = (1, _only) if ignore_index is None else (2, _share)
        return Metric(
            name=name, labels="classes", classes=count, size=size_of_top,
            ignore_index=ignore_index, _means=_top, _value=value_of_top,
        )  # fmt: skip
    found = _KNOWN.get(name)
    if found is None:
        known = ", ".join([*_KNOWN, "top5 and the like"])
        raise BadArgument(f"there is no metric {name!r:.40}; choose among {known}")
    if name.startswith("f1") and classes < 2:
        raise BadArgument(f"metric {name!r} of {classes} classes; it wants two or more")
    if name == "auc" and classes not in (1, 2):
        raise BadArgument(f"metric 'auc' of {classes} classes; it wants two, or one logit")
    labels, means, value = found
    size = {"f1_macro": 3 * classes, "f1_micro": 3 * classes, "auc": 2 * AUC_BINS, "r2": 3}
    if name == "auc" and classes == 1:
        labels = "values"
    if labels != "classes":
        ignore_index = None
    elif name == "accuracy" and ignore_index is not None:
        size["accuracy"], value = 2, _share
    return Metric(
        name=name, labels=labels, classes=classes, size=size.get(name, 1),
        ignore_index=ignore_index, _means=means, _value=value,
    )  # fmt: skip


def _vector(g: Graph, compute: BackendSlot, *numbers: Output) -> Output:
    one = g.constant([1])
    return compute.concat(g, *[compute.reshape(g, each, one) for each in numbers], axis=0)


def _mean(g: Graph, compute: BackendSlot, values: Output) -> Output:
    return compute.reduce_mean(g, compute.cast(g, values, to=types.TENSOR_FLOAT), keepdims=False)


def _flat(g: Graph, compute: BackendSlot, value: Output) -> Output:
    return compute.reshape(g, value, g.constant([-1]))


def _only(g: Graph, compute: BackendSlot, means: Output, _: int) -> Output:
    return _at(g, compute, means, 0)


def _share(g: Graph, compute: BackendSlot, means: Output, _: int) -> Output:
    """Return the hits among what counts, of their share of all and its share."""
    return compute.div(g, _at(g, compute, means, 0), _at(g, compute, means, 1))


def _at(g: Graph, compute: BackendSlot, vector: Output, index: int) -> Output:
    return compute.gather(g, vector, g.constant(index), axis=0)


def _hits(g: Graph, compute: BackendSlot, hits: Output, counted: Output | None) -> Output:
    if counted is None:
        return _vector(g, compute, _mean(g, compute, hits))
    right = compute.mul(g, compute.cast(g, hits, to=types.TENSOR_FLOAT), counted)
    return _vector(g, compute, _mean(g, compute, right), _mean(g, compute, counted))


def _accuracy(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, _: int, counted: Output | None
) -> Output:
    best = compute.arg_max(g, y, axis=-1, keepdims=False)
    return _hits(g, compute, compute.equal(g, best, labels), counted)


def _top(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, count: int, counted: Output | None
) -> Output:
    _, best = compute.top_k(g, y, g.constant([count]), axis=-1)
    hit = compute.equal(g, best, compute.unsqueeze(g, labels, g.constant([-1])))
    hits = compute.cast(g, hit, to=types.TENSOR_FLOAT)
    found = compute.reduce_max(g, hits, g.constant([-1]), keepdims=False)
    return _hits(g, compute, found, counted)


def _counts(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, classes: int, counted: Output | None
) -> Output:
    """The parts of examples that are rightly, wrongly and not said to be of each class, [3 C]."""
    best = _flat(g, compute, compute.arg_max(g, y, axis=-1, keepdims=False))
    depth, on = g.constant(classes), g.constant([0.0, 1.0])
    said = _counting(g, compute, compute.one_hot(g, best, depth, on), counted)
    true = _counting(g, compute, compute.one_hot(g, _flat(g, compute, labels), depth, on), counted)
    both = compute.mul(g, said, true)
    rows = g.constant([0])
    parts = [
        compute.reduce_mean(g, each, rows, keepdims=False)
        for each in (both, compute.sub(g, said, both), compute.sub(g, true, both))
    ]
    return compute.concat(g, *parts, axis=0)


def _counting(g: Graph, compute: BackendSlot, rows: Output, counted: Output | None) -> Output:
    """Return rows, [N, M], with zeros for those that do not count."""
    if counted is None:
        return rows
    return compute.mul(g, rows, compute.reshape(g, counted, g.constant([-1, 1])))


def _f1(g: Graph, compute: BackendSlot, counts: Output, classes: int) -> tuple[Output, Output]:
    """Twice the right ones, and these with the wrong and the missed ones, of each class."""
    by_kind = compute.reshape(g, counts, g.constant([3, classes]))
    right, wrong, missed = (_at(g, compute, by_kind, index) for index in range(3))
    twice = compute.add(g, right, right)
    return twice, compute.add(g, compute.add(g, twice, wrong), missed)


def _f1_macro(g: Graph, compute: BackendSlot, counts: Output, classes: int) -> Output:
    """The mean over classes that are there, or are said to be."""
    twice, whole = _f1(g, compute, counts, classes)
    there = compute.greater(g, whole, g.constant(0.0))
    one = g.constant(1.0)
    scores = compute.div(g, twice, compute.where(g, there, whole, one))
    number = compute.reduce_sum(g, compute.cast(g, there, to=types.TENSOR_FLOAT), keepdims=False)
    return compute.div(g, compute.reduce_sum(g, scores, keepdims=False), number)


def _f1_micro(g: Graph, compute: BackendSlot, counts: Output, classes: int) -> Output:
    twice, whole = _f1(g, compute, counts, classes)
    return compute.div(
        g,
        compute.reduce_sum(g, twice, keepdims=False),
        compute.reduce_sum(g, whole, keepdims=False),
    )


def _histogram(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, classes: int, counted: Output | None
) -> Output:
    """The parts of examples that are of either class and in each bin of probability, [2 B]."""
    if classes == 2:
        pair = compute.reshape(g, y, g.constant([-1, 2]))
        first, second = (compute.gather(g, pair, g.constant(index), axis=1) for index in (0, 1))
        logit = compute.sub(g, second, first)
        positive = compute.cast(g, _flat(g, compute, labels), to=types.TENSOR_FLOAT)
    else:
        logit, positive = _flat(g, compute, y), _flat(g, compute, labels)
    chance = compute.sigmoid(g, logit)
    scaled = compute.mul(g, chance, g.constant(float(AUC_BINS)))
    last = g.constant(AUC_BINS - 1.0)
    whole = compute.cast(g, compute.min(g, compute.floor(g, scaled), last), to=types.TENSOR_INT64)
    bins = compute.max(g, whole, g.constant(0))  # NaN is no place
    # Each example is added to its bin: a row of bins for each would take 4 KiB an example.
    zero = compute.mul(g, chance, g.constant(0.0))
    count = compute.add(g, zero, g.constant(1.0))  # 1, or NaN where the output is
    examples = compute.cast(g, compute.size(g, bins), to=types.TENSOR_FLOAT)
    if counted is not None:
        count = compute.mul(g, count, _flat(g, compute, counted))
    empty = g.constant([0.0] * AUC_BINS)

    def binned(weights: Output) -> Output:
        sums = compute.scatter_elements(g, empty, bins, weights, axis=0, reduction="add")
        return compute.div(g, sums, examples)

    right = binned(compute.mul(g, count, positive))
    return compute.concat(g, right, compute.sub(g, binned(count), right), axis=0)


def _auc(g: Graph, compute: BackendSlot, counts: Output, _: int) -> Output:
    """The part of pairs of both classes that are in their order; a pair in one bin counts half."""
    pair = compute.reshape(g, counts, g.constant([2, AUC_BINS]))
    positive, negative = (_at(g, compute, pair, index) for index in (0, 1))
    below = compute.cum_sum(g, negative, g.constant(0), exclusive=1)
    half = compute.mul(g, negative, g.constant(0.5))
    ordered = compute.mul(g, positive, compute.add(g, below, half))
    pairs = compute.mul(
        g,
        compute.reduce_sum(g, positive, keepdims=False),
        compute.reduce_sum(g, negative, keepdims=False),
    )
    return compute.div(g, compute.reduce_sum(g, ordered, keepdims=False), pairs)


def _off(g: Graph, compute: BackendSlot, y: Output, labels: Output) -> Output:
    return compute.sub(g, _flat(g, compute, y), _flat(g, compute, labels))


def _mae(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, _: int, _all: Output | None
) -> Output:
    return _vector(g, compute, _mean(g, compute, compute.abs(g, _off(g, compute, y, labels))))


def _mse(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, _: int, _all: Output | None
) -> Output:
    off = _off(g, compute, y, labels)
    return _vector(g, compute, _mean(g, compute, compute.mul(g, off, off)))


def _moments(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, _: int, _all: Output | None
) -> Output:
    """The means of squared errors, of labels and of their squares."""
    off, true = _off(g, compute, y, labels), _flat(g, compute, labels)
    kept = (compute.mul(g, off, off), true, compute.mul(g, true, true))
    return _vector(g, compute, *[_mean(g, compute, each) for each in kept])


def _r2(g: Graph, compute: BackendSlot, means: Output, _: int) -> Output:
    off, mean, square = (_at(g, compute, means, index) for index in range(3))
    variance = compute.sub(g, square, compute.mul(g, mean, mean))
    one = g.constant(1.0)
    return compute.sub(g, one, compute.div(g, off, variance))


def _binary(
    g: Graph, compute: BackendSlot, y: Output, labels: Output, _: int, _all: Output | None
) -> Output:
    zero, half = g.constant(0.0), g.constant(0.5)
    said = compute.greater(g, _flat(g, compute, y), zero)
    true = compute.greater(g, _flat(g, compute, labels), half)
    return _vector(g, compute, _mean(g, compute, compute.equal(g, said, true)))


# Labels, means and value of each metric.
_KNOWN: Mapping[str, tuple[str, Means, Value]] = {
    "accuracy": ("classes", _accuracy, _only),
    "f1_macro": ("classes", _counts, _f1_macro),
    "f1_micro": ("classes", _counts, _f1_micro),
    "auc": ("classes", _histogram, _auc),
    "mae": ("values", _mae, _only),
    "mse": ("values", _mse, _only),
    "r2": ("values", _moments, _r2),
    "binary_accuracy": ("values", _binary, _only),
}
