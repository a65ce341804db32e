"""Emits ONNX nodes under fresh names into one flat list, and reads the types of a model's values.

Rule: the same op on the same inputs is emitted once, and names depend only on the order of
the calls, so that one forward model always has the same training graphs, byte for byte. A type
that shape inference does not know is None; nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

AttributeValue: TypeAlias = int | float | str | list[int]
INT64 = int(TensorProto.INT64)
FLOAT = int(TensorProto.FLOAT)

# A dimension: its size, its symbol ("batch"), or None where inference could not tell.
Dim: TypeAlias = int | str | None
Dims: TypeAlias = tuple[Dim, ...]

# Parameters may be of these; values between them may also have half the precision.
TRAINABLE = frozenset({FLOAT, int(TensorProto.DOUBLE)})
HALVES = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
FLOATS = TRAINABLE | HALVES


class GraphBuilder:
    """A growing list of nodes and constants beside a graph whose names are taken.

    Args:
        taken: value names that must not be used again.
        prefix: put before every fresh name; keeps gradient values recognisable in viewers.
    """

    def __init__(self, taken: Iterable[str], prefix: str = "d/") -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._taken = set(taken)
        self._prefix = prefix
        self._counters: dict[str, int] = {}
        self._emitted: dict[tuple[object, ...], list[str]] = {}
        self._constants: dict[tuple[int, tuple[int, ...], bytes], str] = {}

    @property
    def taken(self) -> frozenset[str]:
        """The names that are used, here or before."""
        return frozenset(self._taken)

    def take(self) -> list[NodeProto]:
        """Return the nodes that were emitted since the last call; what follows may read them."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def public(self, name: str) -> str:
        """Return `name` itself where that is free: for inputs and outputs that callers name."""
        return self._unused(name)

    def fresh(self, hint: str) -> str:
        """Return a name that nothing in the graph has, ending in `hint` where that is free."""
        return self._unused(f"{self._prefix}{hint}")

    def _unused(self, base: str) -> str:
        # Counting per hint keeps this linear: probing from 0 each time would not be.
        count = self._counters.get(base, 0)
        name = base if count == 0 else f"{base}.{count}"
        while name in self._taken:
            count += 1
            name = f"{base}.{count}"
        self._counters[base] = count + 1
        self._taken.add(name)
        return name

    def emit(
        self, op_type: str, inputs: Iterable[str], outputs: int = 1, **attributes: AttributeValue
    ) -> list[str]:
        """Emit one `ai.onnx` node and return the names of its `outputs` outputs."""
        names = list(inputs)
        key = (op_type, tuple(names), outputs, repr(sorted(attributes.items())))
        known = self._emitted.get(key)
        if known is not None:
            return known
        results = [self.fresh(op_type) for _ in range(outputs)]
        node = helper.make_node(op_type, names, results, name=results[0])
        for name in sorted(attributes):  # sorted: the bytes must not hang on the rule's spelling
            node.attribute.append(helper.make_attribute(name, attributes[name]))
        self.nodes.append(node)
        self._emitted[key] = results
        return results

    def op(self, op_type: str, *inputs: str, **attributes: AttributeValue) -> str:
        """Emit one node with a single output and return its name."""
        return self.emit(op_type, inputs, 1, **attributes)[0]

    def constant(self, array: npt.NDArray[np.generic], hint: str = "const") -> str:
        """Return the name of an initializer that holds `array`; equal arrays share one."""
        key = (
            helper.np_dtype_to_tensor_dtype(array.dtype),
            array.shape,
            array.tobytes(),
        )
        name = self._constants.get(key)
        if name is None:
            name = self.fresh(hint)
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return name

    def ints(self, values: Iterable[int]) -> str:
        """Return a 1-D int64 constant, as axes and shapes are."""
        return self.constant(np.asarray(list(values), dtype=np.int64), "ints")

    def scalar(self, value: float, elem_type: int) -> str:
        """Return a 0-D constant of the given ONNX element type."""
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        return self.constant(np.asarray(value, dtype=dtype), "scalar")

    def reshape_like(self, value: str, like: str) -> str:
        """Return `value` in the shape of `like`, dimensions of size zero included."""
        # allowzero: without it a 0 in the shape means "copy that dimension".
        return self.op("Reshape", value, self.op("Shape", like), allowzero=1)


def prune(
    nodes: Iterable[NodeProto], initializers: Iterable[TensorProto], outputs: Iterable[str]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return, in order, only the nodes and initializers that the `outputs` need."""
    needed = set(outputs)
    kept: list[NodeProto] = []
    for node in reversed(list(nodes)):
        if any(name in needed for name in node.output if name):
            kept.append(node)
            needed.update(captured_names(node))
    kept.reverse()
    return kept, [tensor for tensor in initializers if tensor.name in needed]


def captured_names(node: NodeProto) -> set[str]:
    """Return the names of the values that a node reads, inside its subgraphs too."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        graphs = list(attribute.graphs)
        if attribute.type == onnx.AttributeProto.GRAPH:
            graphs.append(attribute.g)
        for graph in graphs:
            for inner in graph.node:
                names |= captured_names(inner)
    return names


@dataclass(frozen=True, slots=True)
class InferredType:
    """The inferred element type of a value (ONNX's number, 0: unknown), and its dimensions."""

    elem_type: int
    dims: Dims | None


UNKNOWN = InferredType(0, None)


def inferred_types(model: ModelProto) -> dict[str, InferredType]:
    """Return the types of all inputs, initializers and intermediate values of `model.graph`."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types: dict[str, InferredType] = {}
    for tensor in inferred.initializer:
        types[tensor.name] = InferredType(int(tensor.data_type), tuple(tensor.dims))
    for info in (*inferred.input, *inferred.output, *inferred.value_info):
        if info.type.HasField("tensor_type"):
            types[info.name] = _from_tensor(info.type.tensor_type)
    return types


def _from_tensor(tensor: TypeProto.Tensor) -> InferredType:
    if not tensor.HasField("shape"):
        return InferredType(int(tensor.elem_type), None)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(int(dim.dim_value))
        elif dim.HasField("dim_param") and dim.dim_param:
            dims.append(dim.dim_param)
        else:
            dims.append(None)
    return InferredType(int(tensor.elem_type), tuple(dims))
