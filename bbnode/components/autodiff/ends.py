"""The range that the last ops of a model confine its output to, and the losses that fit it.

Rule: only what is certain is refused. A loss that has a Softmax or Sigmoid of its own takes any
number, and one of log probabilities takes numbers up to 0; an output that is something else by its
ops, whatever the weights are, trains towards a wrong result without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.autodiff.builder import constant_nodes
from bbnode.components.autodiff.errors import LossDoesNotFit

# Nodes that are looked at behind one another; a longer tail of such ops is taken for anything.
_MOST_NODES: Final = 64
_MOST_ELEMENTS: Final = 1 << 16  # of a constant that is looked at
# A loss that comes within this share of that of guessing is as good as one that comes to 0.
_NEGLIGIBLE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Ends:
    """The range of an output, and the op that confines it.

    Attributes:
        low, high: that the output stays within, whatever the weights are.
        op: type of the op that makes it so, such as "Softmax"; "" where none does.
        node: its name, or that of its output.
        certain: True if the output can have all numbers of the range; False where nothing more
            than the range is known of it.
    """

    low: float = -math.inf
    high: float = math.inf
    op: str = ""
    node: str = ""
    certain: bool = False

    @property
    def probabilities(self) -> bool:
        """True if it is within 0 and 1."""
        return self.low >= 0 and self.high <= 1

    @property
    def log_probabilities(self) -> bool:
        """True if it is up to 0, and without a bound below it."""
        return self.high <= 0 and self.low == -math.inf

    @property
    def anything(self) -> bool:
        """True if it can be every number."""
        return self.certain and self.low == -math.inf and self.high == math.inf


_UNKNOWN: Final = Ends()
_ANYTHING: Final = Ends(certain=True)

_INF = math.inf
# Of ops that confine their outputs alone. Names of torch's backward functions stand beside ONNX's.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "Softmax": (0, 1),
    "Sigmoid": (0, 1),
    "HardSigmoid": (0, 1),
    "Hardsigmoid": (0, 1),
    "Hardmax": (0, 1),
    "LogSoftmax": (-_INF, 0),
    "LogSigmoid": (-_INF, 0),
    "Tanh": (-1, 1),
    "Softsign": (-1, 1),
    "Sin": (-1, 1),
    "Cos": (-1, 1),
    "Erf": (-1, 1),
    "LpNormalization": (-1, 1),
    "Relu": (0, _INF),
    "Abs": (0, _INF),
    "Sqrt": (0, _INF),
    "Softplus": (0, _INF),
    "Exp": (0, _INF),
    "ThresholdedRelu": (0, _INF),
    "ReduceL1": (0, _INF),
    "ReduceL2": (0, _INF),
    "ReduceSumSquare": (0, _INF),
}
# Ops of sums of products with weights.
_LINEAR: Final = frozenset(
    {
        "Gemm", "MatMul", "Conv", "ConvTranspose", "Einsum", "BatchNormalization",
        "LayerNormalization", "InstanceNormalization", "GroupNormalization",
        "Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "NativeLayerNorm",
        "NativeBatchNorm", "NativeGroupNorm",
    }
)  # fmt: skip
# Ops whose outputs are numbers of their first input, or means of these.
_SAME: Final = frozenset(
    {
        "AveragePool", "Cast", "CastLike", "Dropout", "Expand", "Flatten", "Gather",
        "GatherElements", "GatherND", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool",
        "ReduceMax", "ReduceMean", "ReduceMin", "Reshape", "Slice", "Split", "Squeeze", "Tile",
        "Transpose", "Unsqueeze",
        "Alias", "AsStrided", "Clone", "Index", "IndexSelect", "Mean", "NativeDropout", "Permute",
        "Repeat", "ReshapeAlias", "Select", "T", "ToCopy", "UnsafeSplit", "UnsafeView", "View",
    }
)  # fmt: skip
_JOINS: Final = frozenset({"Concat", "Max", "Min", "Where", "Cat", "Stack"})


def output_ends(
    nodes: Iterable[NodeProto],
    output: str,
    constants: Iterable[TensorProto],
    free: Iterable[str],
) -> Ends:
    """Return what the last nodes of a flat graph make of an output.

    Args:
        nodes: of the graph.
        output: name of the value.
        constants: initializers that are not trained.
        free: names of inputs and parameters, which may be anything.
    """
    nodes = list(nodes)
    makers = {name: node for node in nodes for name in node.output}
    known = {tensor.name: tensor for tensor in (*constants, *constant_nodes(nodes))}
    return _Walk(makers, known, frozenset(free)).of(output, _MOST_NODES)


def chain_ends(ops: Iterable[str]) -> Ends:
    """Return what ops that stand one behind the other, the last one first, make of an output.

    Their types are those of ONNX, or of torch's backward functions without "Backward".
    """
    for op in ops:
        if op in _RANGES:
            return Ends(*_RANGES[op], op=op, node=op, certain=True)
        if op in _LINEAR:
            return _ANYTHING
        if op not in _SAME:
            break
    return _UNKNOWN


class _Walk:
    """Goes from a value to the nodes before it, as far as these confine it."""

    def __init__(
        self,
        makers: Mapping[str, NodeProto],
        constants: Mapping[str, TensorProto],
        free: frozenset[str],
    ) -> None:
        self._makers, self._constants, self._free = makers, constants, free
        self._seen: dict[str, Ends] = {}

    def of(self, name: str, left: int) -> Ends:
        """Return the range of a value, from at most `left` nodes one behind the other."""
        if name not in self._seen:
            self._seen[name] = self._found(name, left)
        return self._seen[name]

    def _found(self, name: str, left: int) -> Ends:
        if name in self._constants:
            return self._constant(self._constants[name])
        if name in self._free:
            return _ANYTHING
        node = self._makers.get(name)
        if node is None or left == 0 or node.domain not in ("", "ai.onnx"):
            return _UNKNOWN
        op = node.op_type
        if op in _RANGES:
            return Ends(*_RANGES[op], op=op, node=node.name or name, certain=True)
        if op in _LINEAR:
            return _ANYTHING
        if op in _SAME:
            return self.of(node.input[0], left - 1)
        if op in _JOINS:
            parts = node.input[1:] if op == "Where" else node.input
            return _hull([self.of(part, left - 1) for part in parts])
        rule = _ARITHMETIC.get(op)
        if rule is None:
            return _UNKNOWN
        if op == "Div" and self._is_share(node):
            return Ends(0, 1, op="Softmax", node=node.name or name, certain=True)
        inputs = [self.of(part, left - 1) if part else _UNKNOWN for part in node.input]
        fixed = [part in self._constants or part in self._free for part in node.input]
        if len(inputs) == 2 and not any(fixed):
            # Of two values that may hang together, as in x - logsumexp(x), nothing is known.
            return _UNKNOWN
        found = rule(node, inputs)
        named = next((each for each in inputs if each.op), _UNKNOWN)
        return replace(found, op=found.op or named.op, node=found.node or named.node)

    def _is_share(self, node: NodeProto) -> bool:
        """Return True for x / sum(x) of what is never below 0, as some exporters write Softmax."""
        total = self._makers.get(node.input[1])
        while total is not None and total.op_type in ("Expand", "Identity", "Unsqueeze"):
            total = self._makers.get(total.input[0])
        if total is None or total.op_type != "ReduceSum" or total.input[0] != node.input[0]:
            return False
        return self.of(node.input[0], _MOST_NODES).low >= 0

    def _constant(self, tensor: TensorProto) -> Ends:
        if not 0 < math.prod(tensor.dims) <= _MOST_ELEMENTS:
            return _UNKNOWN
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
            return _UNKNOWN
        return Ends(float(values.min()), float(values.max()), certain=True)


def _hull(parts: list[Ends]) -> Ends:
    first = next((each for each in parts if each.op), parts[0])
    return Ends(
        min(each.low for each in parts),
        max(each.high for each in parts),
        op=first.op,
        node=first.node,
        certain=all(each.certain for each in parts),
    )


def _add(_: NodeProto, x: list[Ends]) -> Ends:
    return Ends(x[0].low + x[1].low, x[0].high + x[1].high, certain=_all(x))


def _sub(_: NodeProto, x: list[Ends]) -> Ends:
    return Ends(x[0].low - x[1].high, x[0].high - x[1].low, certain=_all(x))


def _mul(_: NodeProto, x: list[Ends]) -> Ends:
    ends = [_times(a, b) for a in (x[0].low, x[0].high) for b in (x[1].low, x[1].high)]
    return Ends(min(ends), max(ends), certain=_all(x))


def _div(node: NodeProto, x: list[Ends]) -> Ends:
    return _mul(node, [x[0], _reciprocal(node, [x[1]])])


def _reciprocal(_: NodeProto, x: list[Ends]) -> Ends:
    (low, high) = x[0].low, x[0].high
    if low < 0 < high or low == high == 0:
        return Ends(certain=x[0].certain)
    ends = [
        math.copysign(_INF, high if end == low else low) if end == 0 else 1 / end
        for end in (low, high)
    ]
    return Ends(min(ends), max(ends), certain=x[0].certain)


def _neg(_: NodeProto, x: list[Ends]) -> Ends:
    return Ends(-x[0].high, -x[0].low, certain=x[0].certain)


def _log(_: NodeProto, x: list[Ends]) -> Ends:
    # Of what only might be probabilities, the logarithm may be their log probabilities.
    if x[0].low < 0 or x[0].high == _INF:
        return _UNKNOWN
    low = math.log(x[0].low) if x[0].low > 0 else -_INF
    high = math.log(x[0].high) if x[0].high > 0 else -_INF
    return Ends(low, high, op="Log", certain=x[0].certain)


def _clip(node: NodeProto, x: list[Ends]) -> Ends:
    bounds = {each.name: float(helper.get_attribute_value(each)) for each in node.attribute}
    low, high = bounds.get("min", -_INF), bounds.get("max", _INF)
    if len(node.input) > 1 and node.input[1]:
        low = x[1].low
    if len(node.input) > 2 and node.input[2]:
        high = x[2].high
    low, high = max(x[0].low, low), min(x[0].high, high)
    return Ends(low, max(low, high), op=x[0].op or "Clip", certain=x[0].certain)


def _all(x: list[Ends]) -> bool:
    return all(each.certain for each in x)


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


_ARITHMETIC: Final[Mapping[str, Callable[[NodeProto, list[Ends]], Ends]]] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Reciprocal": _reciprocal,
    "Neg": _neg,
    "Log": _log,
    "Clip": _clip,
}

_WITHOUT: Final[Mapping[str, str]] = {
    "softmax_cross_entropy": "applies Softmax itself",
    "bce_with_logits": "applies Sigmoid itself",
}


def check_loss(loss: str, ends: Ends, output: str, classes: int | None) -> str:
    """Check that a loss can be computed from an output; return what else is to be said of it.

    Args:
        loss: its name; of others than those of logits and log probabilities all fits.
        ends: of the output.
        output: its name, for messages.
        classes: the size of the axis of classes, where the loss has one and it is known.

    Raises:
        LossDoesNotFit: the output is something else than the loss takes, by its ops.
    """
    if loss in ("softmax_cross_entropy", "nll") and classes == 1:
        raise LossDoesNotFit(
            loss=loss,
            why=f"its output {output!r} has one class alone, so that it is always right, and "
            "nothing is learned",
            remedy="for two classes give it two outputs, or take loss='bce_with_logits' with "
            "labels 0 and 1; for a number take 'mse'",
        )
    end = f"its output {output!r} ends in {ends.op} ({ends.node!r})" if ends.op else ""
    if loss in _WITHOUT:
        return _check_logits(loss, ends, end, classes or 2)
    if loss in ("nll", "kl"):
        _check_log_probabilities(loss, ends, end or f"its output {output!r}")
    return ""


def check_values(loss: str, outputs: npt.NDArray[np.generic], axis: int = -1) -> None:
    """Check outputs of a few examples: what the ops that make them do not show, numbers may.

    Args:
        loss: its name; of others than those of classes nothing is certain.
        outputs: of two examples or more, the batch first.
        axis: of classes.

    Raises:
        LossDoesNotFit: all are probabilities that add up to 1, or are no logarithms of such.
    """
    values = np.asarray(outputs, np.float64)
    if values.ndim < 2 or values.shape[axis] < 2 or not np.isfinite(values).all():
        return
    total = values.sum(axis)
    if loss == "softmax_cross_entropy" and (values >= 0).all() and np.allclose(total, 1, atol=1e-5):
        raise LossDoesNotFit(
            loss=loss,
            why="its outputs are probabilities that add up to 1, and softmax_cross_entropy "
            "applies Softmax itself",
            remedy="train the model without its Softmax",
        )
    whole = np.exp(np.minimum(values, 50.0)).sum(axis)
    if loss in ("nll", "kl") and (whole > 1.01).any():
        raise LossDoesNotFit(
            loss=loss,
            why=f"its outputs are no logarithms of probabilities: these add up to "
            f"{float(whole.max()):.3g}",
            remedy="put LogSoftmax behind it, or take loss='softmax_cross_entropy', which has one",
        )


def _check_logits(loss: str, ends: Ends, end: str, classes: int) -> str:
    if not end:
        return ""
    if loss == "bce_with_logits":
        # Of a label 0 whose output is the least, and of a 1 whose output is the greatest.
        guess, least = math.log(2), max(_softplus(ends.low), _softplus(-ends.high))
        bound = f"its loss of one of the labels can't fall below {least:.3g}"
    else:
        width = ends.high - ends.low
        guess, least = math.log(classes), math.log1p((classes - 1) * math.exp(-width))
        bound = f"its loss can't fall below {least:.3g}"
    logged = loss == "bce_with_logits" and ends.op in ("LogSoftmax", "LogSigmoid")
    if ends.probabilities or logged:
        kind = "logarithms of probabilities" if logged else "from 0 to 1"
        raise LossDoesNotFit(
            loss=loss,
            why=f"{end}, {kind}, and {loss} {_WITHOUT[loss]}: {bound}",
            remedy=f"train the model without {ends.op}",
        )
    if least <= _NEGLIGIBLE * guess:
        return ""
    return (
        f"{end}, from {ends.low:g} to {ends.high:g}, and with {loss} {bound}; leave {ends.op} out, "
        "or scale what it gives"
    )


def _softplus(x: float) -> float:
    return x if x > 30 else math.log1p(math.exp(x))


def _check_log_probabilities(loss: str, ends: Ends, end: str) -> None:
    if ends.probabilities and ends.op:
        raise LossDoesNotFit(
            loss=loss,
            why=f"{end}, from 0 to 1, and {loss} takes logarithms of probabilities",
            remedy=f"put LogSoftmax in the place of {ends.op}, or leave it out and take "
            "loss='softmax_cross_entropy'",
        )
    if ends.anything or (ends.low >= 0 and ends.op):
        raise LossDoesNotFit(
            loss=loss,
            why=f"{end} has no LogSoftmax at its end, and {loss} takes logarithms of "
            "probabilities: of other numbers it falls without end",
            remedy="put LogSoftmax behind it, or take loss='softmax_cross_entropy', which has one",
        )
