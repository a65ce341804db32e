"""Values that are known before a graph runs, computed once: shapes, zeros, scales of constants.

Rule: only ops of which numpy gives the bits that a runtime gives, on few numbers. Every op less is
time less in each later stage: the sweep, the inference of shapes, the preparation in a runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.autodiff.builder import (
    UNKNOWN,
    InferredType,
    captured_names,
    constant_nodes,
    subgraphs,
)

Array: TypeAlias = npt.NDArray[Any]

_MOST_ELEMENTS = 1 << 14  # of a value that is computed here, and kept in the graph
_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
     "RandomUniformLike"}
)  # fmt: skip
_EXACT = frozenset("fdlq?")  # dtypes: float32, float64, int64, bool


def folded(
    nodes: Iterable[NodeProto],
    tensors: Collection[TensorProto],
    outputs: Collection[str],
    types: Mapping[str, InferredType] | None = None,
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes that remain, and initializers that hold what the others would make.

    Args:
        nodes: in topological order.
        tensors: initializers; those that nothing reads any more are left out of the result.
        outputs: names that a node has to make.
        types: of values, where they are known; sizes among them are read.
    """
    known = _Known(tensors, types or {})
    # In this order: a node is looked at once all before it are.
    kept = [known.without_zero_bias(node) for node in nodes if not known.takes(node, outputs)]
    read = set(outputs)
    for node in kept:
        read |= captured_names(node)
    made = [
        numpy_helper.from_array(value, name) for name, value in known.made.items() if name in read
    ]
    return kept, [*(tensor for tensor in tensors if tensor.name in read), *made]


def shared(
    nodes: Iterable[NodeProto], tensors: Iterable[TensorProto], outputs: Collection[str]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return nodes and initializers of which none is there twice, and none is a mere copy.

    A runtime looks for both, and infers all shapes anew where it finds one.
    """
    nodes = list(nodes)
    # What goes by its name: outputs, and what graphs inside of nodes read.
    fixed = set(outputs)
    for node in nodes:
        if subgraphs(node):
            fixed |= captured_names(node)
    names = _made_as_outputs(nodes, outputs, fixed)
    held: dict[tuple[object, ...], TensorProto] = {}
    for tensor in tensors:
        content = tensor.raw_data if math.prod(tensor.dims) <= _MOST_ELEMENTS else b""
        key: tuple[object, ...] = (tensor.data_type, tuple(tensor.dims), content)
        first = held.setdefault(
            key if content and tensor.name not in fixed else (tensor.name,), tensor
        )
        if first is not tensor:
            names[tensor.name] = first.name
    kept: list[NodeProto] = []
    seen: dict[tuple[object, ...], NodeProto] = {}
    for node in nodes:
        made = _with_names(node, names)
        if _is_copy(made) and (made.output[0] not in fixed or made.input[0] == made.output[0]):
            if made.input[0] != made.output[0]:
                names[made.output[0]] = made.input[0]
        elif not fixed.isdisjoint(made.output) or not _is_pure(made):
            kept.append(made)
        else:
            twin = seen.setdefault(_content(made), made)
            if twin is made:
                kept.append(made)
            else:
                names.update(zip(made.output, twin.output, strict=True))
    return kept, list(held.values())


def _made_as_outputs(
    nodes: Collection[NodeProto], outputs: Collection[str], fixed: Collection[str]
) -> dict[str, str]:
    """Return the outputs that are copies of what a node makes, by the names of these."""
    copies = [node for node in nodes if _is_copy(node) and node.output[0] in outputs]
    made = {name for node in nodes for name in node.output} if copies else set()
    found: dict[str, str] = {}
    for node in copies:
        if node.input[0] in made and node.input[0] not in fixed:
            found.setdefault(node.input[0], node.output[0])
    return found


def _with_names(node: NodeProto, names: dict[str, str]) -> NodeProto:
    changed = names.keys()
    if changed.isdisjoint(node.input) and changed.isdisjoint(node.output):
        return node
    made = NodeProto()
    made.CopyFrom(node)
    made.input[:] = [names.get(name, name) for name in node.input]
    made.output[:] = [names.get(name, name) for name in node.output]
    return made


def _is_copy(node: NodeProto) -> bool:
    return node.op_type == "Identity" and node.domain in ("", "ai.onnx")


def _is_pure(node: NodeProto) -> bool:
    """Return True for an op that gives the same whenever it is given the same."""
    return node.domain in ("", "ai.onnx") and node.op_type not in _RANDOM and not subgraphs(node)


def _content(node: NodeProto) -> tuple[object, ...]:
    written = [each.SerializeToString(deterministic=True) for each in node.attribute]
    return node.op_type, (*node.input,), (*map(bool, node.output),), (*sorted(written),)


class _Known:
    """The values that are known, and those of nodes that were made of them."""

    def __init__(self, tensors: Iterable[TensorProto], types: Mapping[str, InferredType]) -> None:
        self.made: dict[str, Array] = {}
        self._types = types
        self._tensors = {t.name: t for t in tensors if math.prod(t.dims) <= _MOST_ELEMENTS}
        self._read: dict[str, Array] = {}

    def takes(self, node: NodeProto, outputs: Collection[str]) -> bool:
        """Return True for a node whose output is known from here on."""
        rule = _RULES.get(node.op_type)
        if rule is None or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
            return False
        if node.output[0] in outputs:
            return False
        with np.errstate(all="ignore"):
            value = rule(self, node)
        if value is None or value.size > _MOST_ELEMENTS:
            return False
        self.made[node.output[0]] = value
        return True

    def without_zero_bias(self, node: NodeProto) -> NodeProto:
        """Return a Conv without a bias of zeros, which some exporters compute for it."""
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx") or len(node.input) != 3:
            return node
        bias = self.array(node.input[2])
        if bias is None or bias.any():
            return node
        made = NodeProto()
        made.CopyFrom(node)
        del made.input[2:]
        return made

    def array(self, name: str) -> Array | None:
        """Return a value, None where it is not known or of a dtype that is left alone."""
        value = self.made.get(name)
        if value is None:
            value = self._read.get(name)
        if value is None:
            tensor = self._tensors.get(name)
            if tensor is None:
                return None
            value = self._read[name] = numpy_helper.to_array(tensor)
        return value if value.dtype.char in _EXACT else None

    def arrays(self, names: Iterable[str]) -> list[Array] | None:
        """Return values, None where one is not known."""
        found = []
        for name in names:
            value = self.array(name)
            if value is None:
                return None
            found.append(value)
        return found

    def kind(self, name: str) -> InferredType:
        """Return the type of a value."""
        value = self.made.get(name)
        if value is not None:
            return InferredType(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        tensor = self._tensors.get(name)
        if tensor is not None:
            return InferredType(int(tensor.data_type), tuple(tensor.dims))
        return self._types.get(name, UNKNOWN)


Rule: TypeAlias = Callable[[_Known, NodeProto], Array | None]


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _constant(_: _Known, node: NodeProto) -> Array | None:
    tensors = constant_nodes([node])
    if not tensors or math.prod(tensors[0].dims) > _MOST_ELEMENTS:
        return None
    value = numpy_helper.to_array(tensors[0])
    return value if value.dtype.char in _EXACT else None


def _shape(known: _Known, node: NodeProto) -> Array | None:
    dims = known.kind(node.input[0]).dims
    if dims is None:
        return None
    part = dims[slice(_attribute(node, "start", 0), _attribute(node, "end", None))]
    sizes = [dim for dim in part if isinstance(dim, int)]
    return np.asarray(sizes, np.int64) if len(sizes) == len(part) else None


def _size(known: _Known, node: NodeProto) -> Array | None:
    dims = known.kind(node.input[0]).dims
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        return None
    return np.asarray(math.prod(dims), np.int64)  # type: ignore[arg-type]


def _cast(known: _Known, node: NodeProto) -> Array | None:
    value = known.array(node.input[0])
    if node.op_type == "Cast":
        target = int(_attribute(node, "to", 0))
    else:
        target = known.kind(node.input[1]).elem_type
    if value is None:
        return None
    if target == TensorProto.INT64 and value.dtype.char in "lq":  # sizes, as exporters cast them
        return value.astype(np.int64)
    if target not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return None
    return value.astype(helper.tensor_dtype_to_np_dtype(target))


def _expand(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if given is None or (given[1] < 0).any():
        return None
    try:
        shape = np.broadcast_shapes(given[0].shape, tuple(map(int, given[1])))
    except ValueError:  # which the op itself refuses
        return None
    if math.prod(shape) > _MOST_ELEMENTS:
        return None
    return np.ascontiguousarray(np.broadcast_to(given[0], shape))


def _reshape(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if given is None or not given[1].all():  # a 0 stands for a size of the input, or for none
        return None
    return _or_none(lambda: given[0].reshape(tuple(map(int, given[1]))))


def _squeeze(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if given is None or len(given) != 2:
        return None
    axes = tuple(map(int, given[1]))
    move = np.squeeze if node.op_type == "Squeeze" else np.expand_dims
    return _or_none(lambda: move(given[0], axes))


def _concat(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if not given or len({each.dtype for each in given}) != 1:
        return None
    return _or_none(lambda: np.concatenate(given, int(_attribute(node, "axis", 0))))


def _gather(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if given is None or _attribute(node, "axis", 0) or not given[0].ndim:
        return None
    return _or_none(lambda: np.asarray(given[0][given[1]]))


def _slice(known: _Known, node: NodeProto) -> Array | None:
    given = known.arrays(node.input)
    if given is None or len(given) < 3:
        return None
    data, starts, ends, *rest = given
    axes = rest[0] if rest else np.arange(len(starts))
    steps = rest[1] if len(rest) > 1 else np.ones(len(starts), np.int64)
    # Backwards the first element has no number that Python's slices end at.
    if (steps < 1).any():
        return None
    cut = [slice(None)] * data.ndim
    for axis, *span in zip(axes, starts, ends, steps, strict=True):
        cut[int(axis)] = slice(*map(int, span))
    return _or_none(lambda: np.ascontiguousarray(data[tuple(cut)]))


def _elementwise(compute: Callable[..., Array], dtypes: str) -> Rule:
    def rule(known: _Known, node: NodeProto) -> Array | None:
        given = known.arrays(node.input)
        if given is None or len({each.dtype for each in given}) != 1:
            return None
        if given[0].dtype.char not in dtypes:
            return None
        return _or_none(lambda: np.asarray(compute(*given)))

    return rule


def _divide(known: _Known, node: NodeProto) -> Array | None:
    floats = _elementwise(np.divide, "fd")(known, node)
    return _whole(known, node, np.floor_divide) if floats is None else floats


def _remainder(known: _Known, node: NodeProto) -> Array | None:
    return None if _attribute(node, "fmod", 0) else _whole(known, node, np.remainder)


def _whole(known: _Known, node: NodeProto, compute: Callable[..., Array]) -> Array | None:
    """Return what sizes and positions give: whole numbers none of which is negative."""
    given = known.arrays(node.input)
    if given is None or any(each.dtype.char not in "lq" for each in given):
        return None
    if (given[0] < 0).any() or (given[1] <= 0).any():  # where runtimes round in other ways
        return None
    return _or_none(lambda: np.asarray(compute(*given)))


def _or_none(compute: Callable[[], Array]) -> Array | None:
    """Return a result, None for what the op itself refuses when it runs."""
    try:
        return compute()
    except (ValueError, IndexError):
        return None


_RULES: Mapping[str, Rule] = {
    "Constant": _constant,
    "Shape": _shape,
    "Size": _size,
    "Cast": _cast,
    "CastLike": _cast,
    "Expand": _expand,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _squeeze,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Mod": _remainder,
    "Identity": lambda known, node: known.array(node.input[0]),
    "Add": _elementwise(np.add, "fdlq"),
    "Sub": _elementwise(np.subtract, "fdlq"),
    "Mul": _elementwise(np.multiply, "fdlq"),
    "Div": _divide,
    "Neg": _elementwise(np.negative, "fdlq"),
    "Sqrt": _elementwise(np.sqrt, "fd"),
}
