"""The initializers of a forward model that are trained.

Rule: what is trained by default are weights: floats that a gradient reaches, with finite values.
Masks, tables, statistics and other constants are left as they are, each for a reason that is
told. What the exporter says of an initializer decides before anything that is read off its values.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from bbnode.components.autodiff.builder import FLOATS, TRAINABLE, captured_names, subgraphs
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.table import is_piecewise_constant, lookup

# Returns the values of a tensor.
Values: TypeAlias = Callable[[TensorProto], npt.NDArray[np.generic]]

# Where torch's exporter says of an initializer: PARAMETER, BUFFER or CONSTANT_TENSOR.
_TORCH_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"

# Inputs of ops that hold nothing but weights, even of one element.
_WEIGHT_INPUTS: Mapping[str, frozenset[int]] = {
    "MatMul": frozenset({0, 1}), "Gemm": frozenset({0, 1, 2}), "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}), "BatchNormalization": frozenset({1, 2}),
    "LayerNormalization": frozenset({1, 2}), "InstanceNormalization": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}), "RMSNormalization": frozenset({1}),
    "PRelu": frozenset({1}), "LSTM": frozenset({1, 2, 3, 7}), "GRU": frozenset({1, 2, 3}),
    "RNN": frozenset({1, 2, 3}),
}  # fmt: skip
_LINEAR = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_STATISTICS = frozenset({3, 4})  # inputs of a BatchNormalization
_FIRST_STATES: Mapping[str, frozenset[int]] = {
    "LSTM": frozenset({5, 6}), "GRU": frozenset({5}), "RNN": frozenset({5}),
}  # fmt: skip
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Sum"})
_ATTENTION_MASK = ("Attention", 3)
# Ops that only move values, or change their type: what is said of their input holds of the output.
_MOVING = frozenset(
    {"Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze",
     "Transpose", "Unsqueeze"}
)  # fmt: skip

_MASKING = -30.0  # a score that a softmax turns to nothing
_ONE_SINUSOID = 1e-2  # the largest part of a column that no sinusoid explains
_LEAST_ROWS, _MOST_ROWS = 4, 64  # of a table: three always fit; more than these are not looked at
_A_NUMBER = "a single number"
_TOLD = 8  # names in one message


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """Float initializers of a model, as they are trained.

    Attributes:
        trained: names, in the order in which the graph declares them.
        left: the other ones, with the reason.
    """

    trained: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def told(self) -> str:
        """Return one line that says what is trained, and what is not and why."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.left.items():
            reasons.setdefault(why, []).append(name)
        left = "; ".join(f"{why}: {_listed(names)}" for why, names in reasons.items())
        line = f"{len(self.trained)} of {len(self.trained) + len(self.left)} float tensors trained"
        return f"{line}; left are {left}" if left else line


def choose_parameters(
    model: ModelProto,
    patterns: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
    tensors: Sequence[TensorProto] | None = None,
    values: Values = numpy_helper.to_array,
) -> ParameterChoice:
    """Return which float initializers of `model` are trained.

    Args:
        model: one flat graph.
        patterns: names, or patterns as of `fnmatch` ("encoder.*"), each of which adds to what is
            trained; with "!" before it, it takes away. They count in their order. Where the first
            one takes away, it does so from what is trained by default, which is what there is
            without any. A name adds whatever it names; a pattern, of what is trained by default.
        hints: `exporters_hints` of the model as it was exported.
        tensors: its initializers, where they are kept beside it.
        values: returns the values of one.

    Raises:
        InvalidForwardModel: a name or pattern fits nothing, or nothing is left to train; a
            parameter is of another type than float32 or float64, or is not finite.
    """
    held = list(model.graph.initializer if tensors is None else tensors)
    default = _Choice(
        model, exporters_hints(model) if hints is None else hints, held, values
    ).make()
    if not patterns:
        choice = default
    else:
        trained = _selected(held, default, patterns, values)
        left = {name: why for name, why in default.left.items() if name not in trained}
        left |= {n: "`trainable` leaves it out" for n in default.trained if n not in trained}
        choice = ParameterChoice(tuple(name for name in _names(held) if name in trained), left)
    check_parameters(held, choice.trained)
    return choice


def exporters_hints(model: ModelProto) -> dict[str, str]:
    """Return PARAMETER, BUFFER or CONSTANT_TENSOR by name, of a model that torch exported.

    Read them before the model is converted: ONNX's converter drops them.
    """
    graph = model.graph
    return {
        info.name: prop.value
        for info in (*graph.value_info, *graph.input)
        for prop in info.metadata_props
        if prop.key == _TORCH_KIND
    }


def check_parameters(held: Sequence[TensorProto], names: Sequence[str]) -> None:
    """Raise InvalidForwardModel unless these of the initializers `held` can be trained."""
    tensors = {tensor.name: tensor for tensor in held}
    if not names:
        raise InvalidForwardModel(
            what="it has no float initializer to train",
            remedy="store the weights as float32 initializers of the graph",
        )
    for name in names:
        if name not in tensors:
            raise _absent(name, tensors)
        if tensors[name].data_type not in TRAINABLE:
            kind = TensorProto.DataType.Name(tensors[name].data_type)
            raise InvalidForwardModel(
                what=f"parameter {name!r} is {kind}",
                remedy="weights are trained in float32: export the model in float32 (precision = "
                '"mixed" computes products in float16 all the same), or leave it out of '
                f"`trainable` (add {'!' + name!r})",
            )
    kinds = {tensors[name].data_type for name in names}
    if len(kinds) > 1:
        raise InvalidForwardModel(
            what="its parameters mix float32 and float64", remedy="convert them to float32"
        )


def _selected(
    held: Sequence[TensorProto],
    default: ParameterChoice,
    patterns: Sequence[str],
    values: Values,
) -> frozenset[str]:
    names = _names(held)
    chosen = set(default.trained) if patterns[0].startswith("!") else set[str]()
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if wanted in names:
            found = {wanted}
        else:
            found = set(fnmatch.filter(names, wanted))
            if not found:
                raise _absent(wanted, names)
            if not pattern.startswith("!") and found.isdisjoint(default.trained):
                name = min(found)
                why = default.left.get(name, "no float")
                raise InvalidForwardModel(
                    what=f"of what the pattern {wanted!r} fits, nothing is trained by default "
                    f"({name!r}: {why})",
                    remedy="name in full what is to be trained all the same",
                )
        if pattern.startswith("!"):
            chosen -= found
        else:
            chosen |= found if wanted in names else found & set(default.trained)
    if not chosen:
        raise InvalidForwardModel(
            what=f"`trainable` ({', '.join(patterns)}) leaves nothing to train",
            remedy="take less away",
        )
    for tensor in held:
        trained = tensor.name in chosen and tensor.data_type in TRAINABLE
        if trained and not _is_finite(values(tensor)):
            raise InvalidForwardModel(
                what=f"parameter {tensor.name!r} holds NaN or infinity",
                remedy=f"leave it out of `trainable` (add {'!' + tensor.name!r})",
            )
    return frozenset(chosen)


def _names(held: Sequence[TensorProto]) -> list[str]:
    return [tensor.name for tensor in held]


def _absent(name: str, known: Iterable[str]) -> InvalidForwardModel:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    if any(sign in name for sign in "*?["):
        what = f"no initializer fits the pattern {name!r} of `trainable`"
    else:
        what = f"there is no initializer {name!r} to train"
    if near:
        remedy = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        remedy = f"choose among {_listed(names) if names else '(none)'}"
    return InvalidForwardModel(what=what, remedy=remedy)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _TOLD
    return ", ".join([*names[:_TOLD], f"{more} more"] if more > 0 else names)


class _Choice:
    """The choice that is made where nobody says one."""

    def __init__(
        self,
        model: ModelProto,
        hints: Mapping[str, str],
        tensors: list[TensorProto],
        values: Values,
    ) -> None:
        self._values = values
        self._tensors = tensors
        self._hints = hints
        held = {tensor.name for tensor in self._tensors}
        self._nodes = [*model.graph.node]
        self._uses: dict[str, list[tuple[NodeProto, int]]] = {}
        self._maker: dict[str, NodeProto] = {}
        for node in _all_nodes(self._nodes):
            for index, name in enumerate(node.input):
                self._uses.setdefault(name, []).append((node, index))
            self._maker.update(dict.fromkeys(node.output, node))
        self._reached = _reached(self._nodes, [info.name for info in model.graph.output])
        self._fed = self._input_only({i.name for i in model.graph.input if i.name not in held})

    def make(self) -> ParameterChoice:
        trained: list[str] = []
        left: dict[str, str] = {}
        numbers: list[str] = []
        for tensor in self._tensors:
            if tensor.data_type not in FLOATS:
                continue
            why = self._why_left(tensor)
            if why is None:
                trained.append(tensor.name)
            else:
                left[tensor.name] = why
                if why == _A_NUMBER:
                    numbers.append(tensor.name)
        if not trained:  # y = a x + b: there is nothing else that could be meant
            trained = numbers
            left = {name: why for name, why in left.items() if why != _A_NUMBER}
        return ParameterChoice(tuple(trained), left)

    def _why_left(self, tensor: TensorProto) -> str | None:
        name = tensor.name
        hint = self._hints.get(name, "")
        uses = self._uses.get(name, [])
        if uses and all(n.op_type == "BatchNormalization" and i in _STATISTICS for n, i in uses):
            return "running statistics"
        if name not in self._reached:
            return "no gradient reaches it"
        if hint in ("BUFFER", "CONSTANT_TENSOR"):
            return "the exporter says that it is a buffer"
        if not _is_finite(self._values(tensor)):
            return "its values are not finite"
        if hint == "PARAMETER":
            return None
        if any(index in _WEIGHT_INPUTS.get(n.op_type, ()) for n, index in uses):
            return "the scale and shift before those of a group" if self._is_unit(tensor) else None
        size = int(np.prod(tensor.dims, dtype=np.int64))
        if size == 1:
            return None if self._is_bias(name) else _A_NUMBER
        if size == 0:
            return "it is empty"
        return self._why_constant(tensor, uses)

    def _why_constant(
        self, tensor: TensorProto, uses: Sequence[tuple[NodeProto, int]]
    ) -> str | None:
        """Return what the values and their use tell of a tensor that is no layer's weight."""
        if uses and all(index in _FIRST_STATES.get(n.op_type, ()) for n, index in uses):
            return None if self._values(tensor).any() else "the first state, zeros"
        elementwise = [
            node
            for node, index in self._final_uses(tensor.name)
            if node.op_type in _ELEMENTWISE or (node.op_type, index) == _ATTENTION_MASK
        ]
        if not elementwise:
            return None
        if all(self._normalizes(node, tensor.name) for node in elementwise):
            return "it normalizes the input"
        values = self._values(tensor)
        if _is_mask(values):
            return "a mask"
        if _is_sinusoids(values):
            return "a table of sinusoids"
        return None

    def _final_uses(self, name: str) -> Iterator[tuple[NodeProto, int]]:
        """Return the uses of a value, through ops that only move it."""
        for node, index in self._uses.get(name, []):
            if node.op_type in _MOVING and index == 0:
                yield from self._final_uses(node.output[0])
            else:
                yield node, index

    def _normalizes(self, node: NodeProto, name: str) -> bool:
        """Return True for the subtrahend or divisor of an input, and a factor or summand after."""
        others = [each for each in node.input if each != name]
        if len(others) != 1 or others[0] not in self._fed:
            return False
        if node.op_type in ("Sub", "Div"):
            return node.input[0] == others[0]
        before = self._maker.get(others[0])
        return before is not None and before.op_type in ("Sub", "Div")

    def _is_bias(self, name: str) -> bool:
        """Return True for what is added to what a linear layer made."""
        return any(
            node.op_type == "Add"
            and any(
                each in self._maker and self._maker[each].op_type in _LINEAR for each in node.input
            )
            for node, _ in self._uses.get(name, [])
        )

    def _is_unit(self, tensor: TensorProto) -> bool:
        """Return True for ones and zeros of an InstanceNormalization that stands for a group's.

        Exporters write GroupNormalization as it, with a scale and a shift of their own behind.
        """
        for node, index in self._uses[tensor.name]:
            if node.op_type != "InstanceNormalization" or index not in (1, 2):
                return False
            values = self._values(tensor)
            if not np.all(values == (1 if index == 1 else 0)):
                return False
            behind = [each for each, _ in self._final_uses(node.output[0])]
            held = {each.name for each in self._tensors}
            if not any(each.op_type == "Mul" and held & {*each.input} for each in behind):
                return False
        return True

    def _input_only(self, inputs: set[str]) -> set[str]:
        """Return the values that are made of a graph's inputs and initializers, elementwise."""
        found = set(inputs)
        for node in self._nodes:
            known = [name for name in node.input if name in found]
            others = [name for name in node.input if name in self._maker and name not in found]
            if known and not others and node.op_type in (_ELEMENTWISE | _MOVING):
                found.update(node.output)
        return found


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, and those of the graphs inside of them."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def _reached(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> set[str]:
    """Return the values that a gradient of the outputs, and of what nothing reads, comes to.

    An op without a rule lets it through: training then refuses that op by its name, and leaves
    no weight untrained without a word.
    """
    ends = set(outputs)
    read = {name for node in nodes for name in captured_names(node)}
    found = ends | {name for node in nodes for name in node.output if name not in read}
    for node in reversed(nodes):
        constant = is_piecewise_constant(node.domain, node.op_type) or _casts_to_integers(node)
        if found.isdisjoint(node.output) or (constant and ends.isdisjoint(node.output)):
            continue
        entry = lookup(node.domain, node.op_type)
        settings = entry.constant_inputs if entry is not None else frozenset[int]()
        if node.op_type == "Where" and node.domain in ("", "ai.onnx"):
            settings = settings | {0}
        direct = set(node.input)
        found.update(name for index, name in enumerate(node.input) if index not in settings)
        found |= captured_names(node) - direct
    return found


def _casts_to_integers(node: NodeProto) -> bool:
    return node.op_type == "Cast" and any(
        attribute.name == "to" and attribute.i not in FLOATS for attribute in node.attribute
    )


def _is_finite(values: npt.NDArray[np.generic]) -> bool:
    if values.dtype.kind == "V":  # bfloat16, of which numpy has no sums
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        # A sum is NaN or infinite if a part is; the reverse does not hold.
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _is_mask(values: npt.NDArray[np.generic]) -> bool:
    """Return True for zeros and ones of which there are both, and for zeros and one low score."""
    flat = values.reshape(-1)
    low, high = float(flat.min()), float(flat.max())
    if not (low == 0 and high == 1) and not (high == 0 and low <= _MASKING):
        return False
    return bool(np.all((flat == low) | (flat == high)))


def _is_sinusoids(values: npt.NDArray[np.generic]) -> bool:
    """Return True if each column over the rows p is a sine or cosine of p, as of positions.

    Of a sinusoid x[p + 1] + x[p - 1] = 2 cos(w) x[p] at every p; w is fitted. The rows are the axis
    before the last one.
    """
    if values.ndim < 2 or values.shape[-2] < _LEAST_ROWS or values.shape[-1] < 2:
        return False
    seen = values[..., :_MOST_ROWS, :]
    table = seen.astype(np.float64).reshape(-1, seen.shape[-2], seen.shape[-1])
    if np.abs(table).max() > 1 + _ONE_SINUSOID:
        return False
    middle, sides = table[:, 1:-1], table[:, 2:] + table[:, :-2]
    power = (middle * middle).sum(axis=1, keepdims=True)
    factor = (middle * sides).sum(axis=1, keepdims=True) / np.where(power > 0, power, 1)
    if np.abs(factor).max() > 2 + _ONE_SINUSOID:
        return False
    off = np.abs(sides - factor * middle).max()
    return bool(off <= _ONE_SINUSOID and np.ptp(table, axis=1).max() > _ONE_SINUSOID)
