"""The initializers of a forward model that are trained.

Rule: what is trained by default are weights: floats that a gradient reaches, with finite values,
and that are used as weights are. Masks, tables, statistics and other constants are left as they
are, each for a reason that is told. What the exporter says of an initializer decides before its
use, and its use before its values. Where neither tells a weight from a constant, the model is not
trained until its author says which it is (`trainable`).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from bbnode.components.autodiff.builder import FLOATS, TRAINABLE, captured_names, subgraphs
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.table import is_piecewise_constant, lookup

# Returns the values of a tensor.
Values: TypeAlias = Callable[[TensorProto], npt.NDArray[np.generic]]

# Where torch's exporter says of an initializer: PARAMETER, BUFFER or CONSTANT_TENSOR.
_TORCH_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
# Where a tensor says that it was sparse in the file, or the same one as another.
TENSOR_KIND, WAS_SPARSE, WAS_EQUAL = "ai.bytesandbrains.tensor_kind", "SPARSE", "EQUAL"

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
_NORMS = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
     "LpNormalization", "MeanVarianceNormalization", "RMSNormalization"}
)  # fmt: skip
# Inputs that are tables of cosines and sines, by domain and op.
_TABLES: Mapping[tuple[str, str], frozenset[int]] = {
    ("", "RotaryEmbedding"): frozenset({1, 2}),
    ("com.microsoft", "RotaryEmbedding"): frozenset({2, 3}),
    ("com.microsoft", "GroupQueryAttention"): frozenset({7, 8}),
}
# Inputs that are scales and zero points of quantized weights.
_QUANTIZED: Mapping[tuple[str, str], frozenset[int]] = {
    ("com.microsoft", "MatMulNBits"): frozenset({2, 3}),
    ("com.microsoft", "MatMulBnb4"): frozenset({2}),
    ("com.microsoft", "GatherBlockQuantized"): frozenset({2, 3}),
}
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
_UNEVEN = 1e-4  # the largest step out of line in evenly spaced numbers, in parts of their range
# Last words of names that frameworks give to weights alone.
_WEIGHT_NAMES = frozenset({"beta", "bias", "gamma", "kernel", "weight"})
_LINEAR_FLOW = _MOVING | {"Add", "Concat", "Einsum", "Gather", "MatMul", "Mul", "Sub", "Tile"}
_A_NUMBER = "a single number"
_NOT_FINITE = "its values are not finite"
_NUMBER_LEFT = "single numbers are not trained; name in `trainable` those that are parameters"
_WAS_ONE = (
    "the file has these once with other layers' equal ones, as PyTorch's older exporter writes "
    "layers that are not trained yet; they are trained by themselves"
)
_TIED = (
    "one tensor in several layers is trained as one; where the exporter made it of equal weights, "
    "as layers have that are not trained yet, export with bbnode.torch.export"
)
_TOLD = 8  # names in one message


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """Float initializers of a model, as they are trained.

    Attributes:
        trained: names, in the order in which the graph declares them.
        left: the other ones, with the reason.
        why: the reason for each of `trained`, where there is one to say.
        undecided: those of `left` that may be weights as well as constants, with both readings.
        warnings: names of which the choice may not be what the author meant, and why.
    """

    trained: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    undecided: Mapping[str, str] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)

    def told(self) -> str:
        """Return one line that says what is trained, and what is not and why."""
        left = "; ".join(_by_reason(self.left))
        line = f"{len(self.trained)} of {len(self.trained) + len(self.left)} float tensors trained"
        return f"{line}; left are {left}" if left else line

    def warned(self) -> tuple[str, ...]:
        """Return the warnings, a line for each reason, with its names."""
        return _by_reason(self.warnings)

    def check_decided(self) -> None:
        """Raise InvalidForwardModel where a tensor may be a weight as well as a constant."""
        if not self.undecided:
            return
        names = [*self.undecided]
        broken = [name for name, why in self.undecided.items() if why == _NOT_FINITE]
        if broken:
            raise InvalidForwardModel(
                what=f"weight {_listed([*map(repr, broken)])} holds NaN or infinity, as after a "
                "training that broke off",
                remedy="give the model of before, or leave the tensor as it is: "
                f"`trainable` = ({f'!{broken[0]}'!r},)",
            )
        name, why = next(iter(self.undecided.items()))
        others = f" (and so are {_listed(names[1:])})" if len(names) > 1 else ""
        taken = ", ".join([repr("*"), *(repr(each) for each in names[:_TOLD])])
        left = ", ".join(repr(f"!{each}") for each in names[:_TOLD])
        raise InvalidForwardModel(
            what=f"{name!r} may be a weight or a constant: {why}{others}",
            remedy=f"`trainable`=({taken}) trains it, `trainable`=({left},) leaves it as it is; "
            "a model of bbnode.torch.export says which it is",
        )


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
        trained, undecided = _selected(held, default, patterns, values)
        left = {name: why for name, why in default.left.items() if name not in trained}
        left |= {n: "`trainable` leaves it out" for n in default.trained if n not in trained}
        left |= {
            n: "`trainable` leaves it out"
            for n in default.undecided
            if n in left and n not in undecided
        }
        by_name = dict.fromkeys(trained, "`trainable` names it")
        choice = ParameterChoice(
            tuple(name for name in _names(held) if name in trained),
            left,
            by_name | {n: why for n, why in default.why.items() if n in trained},
            {n: why for n, why in default.undecided.items() if n in undecided},
            {
                name: why
                for name, why in default.warnings.items()
                if not {name, f"!{name}"} & {*patterns}
                and (name in trained or (name in default.left and patterns[0].startswith("!")))
            },
        )
    if not choice.trained:
        choice.check_decided()
    check_parameters(held, choice.trained)
    return choice


def exporters_hints(model: ModelProto) -> dict[str, str]:
    """Return PARAMETER, BUFFER or CONSTANT_TENSOR by name, of a model that torch exported.

    `WAS_SPARSE` and `WAS_EQUAL` are told of tensors of any model.

    Read them before the model is converted: ONNX's converter drops them.
    """
    graph = model.graph
    found = {
        info.name: prop.value
        for info in (*graph.value_info, *graph.input)
        for prop in info.metadata_props
        if prop.key == _TORCH_KIND
    }
    for tensor in graph.initializer:
        found.update((tensor.name, p.value) for p in tensor.metadata_props if p.key == TENSOR_KIND)
    return found


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
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that patterns choose, and those that they leave undecided."""
    names = _names(held)
    from_default = patterns[0].startswith("!")
    chosen = set(default.trained) if from_default else set[str]()
    undecided = set(default.undecided) if from_default else set[str]()
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if wanted in names:
            found = {wanted}
        else:
            found = set(fnmatch.filter(names, wanted))
            if not found:
                raise _absent(wanted, names)
            known = default.trained, default.undecided
            if not pattern.startswith("!") and all(map(found.isdisjoint, known)):
                name = min(found)
                why = default.left.get(name, "no float")
                raise InvalidForwardModel(
                    what=f"of what the pattern {wanted!r} fits, nothing is trained by default "
                    f"({name!r}: {why})",
                    remedy="name in full what is to be trained all the same",
                )
        if pattern.startswith("!"):
            chosen -= found
            undecided -= found
        elif wanted in names:
            chosen |= found
            undecided -= found
        else:
            chosen |= found & set(default.trained)
            undecided |= found & default.undecided.keys() - chosen
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
    return frozenset(chosen), frozenset(undecided)


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


def _by_reason(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with the names that it is of."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return tuple(f"{why}: {_listed(found)}" for why, found in names.items())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _TOLD
    return ", ".join([*names[:_TOLD], f"{more} more"] if more > 0 else names)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A decision about one tensor; `is_open` where it may be trained as well as left."""

    trains: bool
    why: str
    is_open: bool = False


def _trained(why: str) -> _Verdict:
    return _Verdict(trains=True, why=why)


def _left(why: str) -> _Verdict:
    return _Verdict(trains=False, why=why)


def _open(why: str) -> _Verdict:
    return _Verdict(trains=False, why=why, is_open=True)


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
        self._held = {tensor.name: tensor for tensor in self._tensors}
        held = self._held.keys()
        self._nodes = [*model.graph.node]
        self._uses: dict[str, list[tuple[NodeProto, int]]] = {}
        self._maker: dict[str, NodeProto] = {}
        for node in _all_nodes(self._nodes):
            for index, name in enumerate(node.input):
                self._uses.setdefault(name, []).append((node, index))
            self._maker.update(dict.fromkeys(node.output, node))
        self._outputs = {info.name for info in model.graph.output}
        self._reached = _reached(self._nodes, [info.name for info in model.graph.output])
        fed = [info for info in model.graph.input if info.name not in held]
        self._fed = self._input_only({info.name for info in fed})
        # Values in which no weight takes part, and those of whole numbers among them: positions.
        self._not_learned, self._whole_numbers = self._constants_and_inputs(fed)

    def make(self) -> ParameterChoice:
        """Return the choice, with the reasons for it."""
        verdicts = [
            (tensor, self._judged(tensor)) for tensor in self._tensors if tensor.data_type in FLOATS
        ]
        numbers = [tensor.name for tensor, verdict in verdicts if verdict.why == _A_NUMBER]
        # y = a x + b: there is nothing else that could be meant.
        alone = not any(verdict.trains or verdict.why == _NOT_FINITE for _, verdict in verdicts)
        trained: dict[str, str] = {}
        left: dict[str, str] = {}
        undecided: dict[str, str] = {}
        for tensor, verdict in verdicts:
            name = tensor.name
            if verdict.trains:
                trained[name] = verdict.why
            elif alone and (verdict.is_open or verdict.why == _A_NUMBER):
                trained[name] = "there is nothing else to train"
            elif verdict.is_open:
                left[name] = f"undecided: {verdict.why}"
                undecided[name] = verdict.why
            else:
                left[name] = verdict.why
        warnings = {name: _NUMBER_LEFT for name in numbers if name in left}
        warnings |= {
            tensor.name: _TIED
            for tensor, _ in verdicts
            if tensor.name in trained and self._is_tied(tensor)
        }
        warnings |= {
            name: _WAS_ONE
            for name, hint in self._hints.items()
            if hint == WAS_EQUAL and name in trained
        }
        return ParameterChoice(tuple(trained), left, trained, undecided, warnings)

    def _judged(self, tensor: TensorProto) -> _Verdict:
        name = tensor.name
        hint = self._hints.get(name, "")
        uses = self._uses.get(name, [])
        if uses and all(n.op_type == "BatchNormalization" and i in _STATISTICS for n, i in uses):
            return _left("running statistics")
        if name not in self._reached:
            return _left("no gradient reaches it")
        if hint in ("BUFFER", "CONSTANT_TENSOR"):
            return _left("the exporter says that it is a buffer")
        if hint == WAS_SPARSE:
            return _left("it was sparse, and training would fill it")
        weighed = [n for n, index in uses if index in _WEIGHT_INPUTS.get(n.op_type, ())]
        if not _is_finite(self._values(tensor)):
            # A mask may hold infinity; a weight that does comes of a training that broke off.
            return _open(_NOT_FINITE) if weighed or hint == "PARAMETER" else _left(_NOT_FINITE)
        if hint == "PARAMETER":
            return _trained("the exporter says that it is a parameter")
        kinds = [(("" if n.domain == "ai.onnx" else n.domain, n.op_type), at) for n, at in uses]
        if any(index in _TABLES.get(kind, ()) for kind, index in kinds):
            return _left("a table of cosines or sines")
        if any(index in _QUANTIZED.get(kind, ()) for kind, index in kinds):
            return _left("the scale of a quantized weight")
        turning = self._turns(tensor)
        if turning is not None:
            return turning
        if weighed:
            if self._is_unit(tensor):
                return _left("the scale and shift before those of a group")
            why = f"a weight of {weighed[0].op_type}"
            # As of weight and direction, or of a Conv and the BatchNormalization behind it.
            made = " that the exporter computed" if "PARAMETER" in self._hints.values() else ""
            return _trained(why + made)
        size = int(np.prod(tensor.dims, dtype=np.int64))
        if size == 1:
            return _trained("a bias") if self._is_bias(tensor) else _left(_A_NUMBER)
        if size == 0:
            return _left("it is empty")
        return self._of_values(tensor, uses)

    def _of_values(self, tensor: TensorProto, uses: Sequence[tuple[NodeProto, int]]) -> _Verdict:
        """Judge a tensor that is no layer's weight by its values and what becomes of it."""
        if uses and all(index in _FIRST_STATES.get(n.op_type, ()) for n, index in uses):
            if self._values(tensor).any():
                return _trained("a first state")
            return _left("the first state, zeros")
        final = [*self._final_uses(tensor.name)]
        elementwise = [
            node
            for node, index in final
            if node.op_type in _ELEMENTWISE or (node.op_type, index) == _ATTENTION_MASK
        ]
        if elementwise and all(self._normalizes(node, tensor.name) for node in elementwise):
            return _left("it normalizes the input")
        values = self._values(tensor)
        looked_up = [node for node, index in final if node.op_type == "Gather" and index == 0]
        if (elementwise or looked_up) and _is_sinusoids(values):
            return _left("a table of sinusoids")
        if not elementwise:
            return _trained("rows that are looked up" if looked_up else "a gradient reaches it")
        if _is_mask(values):
            return _left("a mask")
        if self._is_of_layer(tensor, elementwise):
            return _trained("the scale or bias of a layer")
        if _is_even(values):
            return _open(
                "its numbers are evenly spaced, or grow by one factor, as in a table that is fixed "
                "and in weights that are not trained yet"
            )
        if _is_uniform(values):
            if _is_neutral(float(values.reshape(-1)[0]), elementwise):
                return _trained("a weight with its first value")
            if tensor.name.replace("/", ".").split(".")[-1] not in _WEIGHT_NAMES:
                return _open(
                    "all of its numbers are the same, as in a constant of the formula and in "
                    "weights that are not trained yet"
                )
        elif "PARAMETER" in self._hints.values():
            return _open(
                "the exporter computed it of a parameter or of a buffer, and says not of which"
            )
        return _trained("it takes part in a sum or product")

    def _turns(self, tensor: TensorProto) -> _Verdict | None:
        """Judge a tensor all of which goes into sines and cosines; None for any other.

        It holds frequencies, or the angles themselves: those of positions are constants, those of
        features may be learned.
        """
        ends, others = self._flow(tensor.name)
        if not ends or ends - {"Cos", "Sin"}:
            return None
        if others <= self._not_learned and (others & self._whole_numbers or not others):
            return _left("the frequencies of sines or cosines of positions")
        if _is_even(self._values(tensor)):
            return _left("the frequencies of sines or cosines")
        if "Cos" in ends and others <= self._not_learned:
            return _open(
                "it holds the frequencies of cosines of the input, which random features leave as "
                "they are and others learn"
            )
        return None

    def _flow(self, name: str) -> tuple[set[str], set[str]]:
        """Return the types of the ops that a value flows into linearly, and what it meets there.

        Ops of `_LINEAR_FLOW` pass it on.
        """
        ends: set[str] = set()
        met: set[str] = set()
        seen: set[str] = set()
        todo = [name]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            uses = self._uses.get(value, [])
            if not uses or value in self._outputs:
                ends.add("")
            for node, index in uses:
                if node.op_type not in _LINEAR_FLOW or node.domain not in ("", "ai.onnx"):
                    ends.add(node.op_type)
                elif node.op_type in _MOVING | {"Gather", "Tile"}:
                    if index:
                        ends.add("")
                    todo.append(node.output[0])
                else:
                    met.update(each for each in node.input if each and each != value)
                    todo.append(node.output[0])
            if ends - {"Cos", "Sin"}:
                break
        return ends, met - seen

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

    def _is_bias(self, tensor: TensorProto) -> bool:
        """Return True for the one number that a linear layer of one output adds.

        The layer has none of its own, and the number is a row of one: a number by itself is one of
        the formula, as in 1 + x.
        """
        if not tensor.dims:
            return False
        for node, _ in self._uses.get(tensor.name, []):
            makers = [self._maker[each] for each in node.input if each in self._maker]
            if node.op_type == "Add" and any(
                each.op_type in _LINEAR and len(each.input) < 3 and self._width(each) in (None, 1)
                for each in makers
            ):
                return True
        return False

    def _width(self, layer: NodeProto) -> int | None:
        """Return the number of outputs of a linear layer; None where its weight is computed."""
        weight = self._held.get(layer.input[1]) if len(layer.input) > 1 else None
        if weight is None or len(weight.dims) < 1:
            return None
        if layer.op_type == "Conv":
            return int(weight.dims[0])
        if layer.op_type == "ConvTranspose":
            group = next((a.i for a in layer.attribute if a.name == "group"), 1)
            return int(weight.dims[1]) * int(group)
        turned = any(a.name == "transB" and a.i for a in layer.attribute)
        return int(weight.dims[0 if turned else -1])

    def _is_of_layer(self, tensor: TensorProto, nodes: Sequence[NodeProto]) -> bool:
        """Return True for a bias behind a product without one, and what a normalization has.

        That is a factor or summand of its result, or the divisor of one that exporters wrote out:
        the square root of a mean.
        """
        return all(self._behind_layer(tensor, node) for node in nodes)

    def _behind_layer(self, tensor: TensorProto, node: NodeProto) -> bool:
        if node.op_type not in ("Add", "Mul"):
            return False
        size = int(np.prod(tensor.dims, dtype=np.int64))
        for other in node.input:
            maker = self._made_by(other)
            if maker is None:
                continue
            if node.op_type == "Add" and maker.op_type in _LINEAR and len(maker.input) < 3:
                return self._width(maker) in (None, size)
            if node.op_type == "Add" and maker.op_type == "Mul":
                found = [self._made_by(each) for each in maker.input]
                maker = next((each for each in found if each and self._normalized(each)), maker)
            if self._normalized(maker):
                return True
        return False

    def _normalized(self, node: NodeProto) -> bool:
        """Return True for a node whose result is normalized: x / sqrt(mean(x x) + eps)."""
        if node.op_type in _NORMS:
            return True
        if node.op_type not in ("Div", "Mul"):
            return False
        divisor = self._made_by(node.input[1])
        if divisor is not None and divisor.op_type == "Reciprocal":
            divisor = self._made_by(divisor.input[0])
        elif node.op_type == "Mul":
            return False
        return divisor is not None and divisor.op_type == "Sqrt"

    def _made_by(self, name: str) -> NodeProto | None:
        """Return the node that computes a value, through ops that only move it."""
        maker = self._maker.get(name)
        while maker is not None and maker.op_type in _MOVING:
            maker = self._maker.get(maker.input[0])
        return maker

    def _is_tied(self, tensor: TensorProto) -> bool:
        """Return True for what several layers of one kind have as their weight.

        It may be meant; but the same numbers everywhere are those that each layer begins with, and
        PyTorch's exporter makes one tensor of all that are equal.
        """
        uses = [
            (node.op_type, index)
            for node, index in self._final_uses(tensor.name)
            if index in _WEIGHT_INPUTS.get(node.op_type, ()) or node.op_type in ("Add", "Mul")
        ]
        makes_one = "PARAMETER" in self._hints.values()
        several = len(uses) > len({*uses})
        return several and (makes_one or _is_uniform(self._values(tensor)))

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
            held = self._held.keys()
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

    def _constants_and_inputs(self, fed: Sequence[ValueInfoProto]) -> tuple[set[str], set[str]]:
        """Return the values in which no initializer of floats takes part, and the whole ones."""
        constants = {t.name for t in self._tensors if t.data_type not in FLOATS}
        whole = constants | {
            info.name for info in fed if info.type.tensor_type.elem_type not in FLOATS
        }
        plain = constants | {info.name for info in fed}
        for node in self._nodes:
            names = {*captured_names(node)}
            if names <= plain:
                plain.update(node.output)
                makes_whole = node.op_type in ("Range", "Shape", "Size", "ArgMax", "NonZero")
                if makes_whole or (names and names <= whole):
                    whole.update(node.output)
        return plain, whole & plain


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


def _is_uniform(values: npt.NDArray[np.generic]) -> bool:
    """Return True where all numbers are the same."""
    flat = values.reshape(-1)
    return bool((flat == flat[0]).all())


def _is_neutral(number: float, nodes: Iterable[NodeProto]) -> bool:
    """Return True for the 0 of a sum and the 1 of a product, which nobody writes as constants."""
    return all(
        number == (1 if node.op_type in ("Mul", "Div") else 0)
        for node in nodes
        if node.op_type in ("Add", "Sub", "Sum", "Mul", "Div")
    )


def _is_even(values: npt.NDArray[np.generic]) -> bool:
    """Return True for numbers that grow by one step, or by one factor, along an axis.

    Each row of the axis may have a step of its own.
    """
    table = values.astype(np.float64)
    for axis in range(table.ndim):
        if table.shape[axis] < _LEAST_ROWS:
            continue
        seen = np.moveaxis(table, axis, 0)[:_MOST_ROWS]
        scales = [seen]
        if (seen > 0).all():
            scales.append(np.log(seen))
        for each in scales:
            steps = np.diff(each, axis=0)
            span = np.abs(each[-1] - each[0])
            off = np.abs(np.diff(steps, axis=0)).max(axis=0)
            if span.max() > 0 and (off <= _UNEVEN * np.where(span > 0, span, 1)).all():
                return True
    return False


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
