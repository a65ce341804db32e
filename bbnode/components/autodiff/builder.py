"""Emits ONNX nodes under fresh names into one flat list, and reads the types of a model's values.

Rule: the same op on the same inputs is emitted once, and names depend only on the order of
the calls, so that one forward model always has the same training graphs, byte for byte. A type
that shape inference does not know is None; nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from bbnode.ir.keys import ONNX_OPSET_VERSION

AttributeValue: TypeAlias = int | float | str | list[int]
INT64 = int(TensorProto.INT64)
BOOL = int(TensorProto.BOOL)
FLOAT = int(TensorProto.FLOAT)

# A dimension: its size, its symbol ("batch"), or None where inference could not tell.
Dim: TypeAlias = int | str | None
Dims: TypeAlias = tuple[Dim, ...]

# Parameters may be of these; values between them may also have half the precision.
TRAINABLE = frozenset({FLOAT, int(TensorProto.DOUBLE)})
HALVES = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
FLOATS = TRAINABLE | HALVES


class Instead(Protocol):
    """Another way to write a forward node, where a gradient needs more than its outputs."""

    def names(self) -> Iterable[str]:
        """Return the values that are made beyond the node's own outputs."""

    def nodes(self) -> Sequence[NodeProto]:
        """Return the nodes that make them, and the node's outputs."""


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """Nodes that give a forward node's outputs, and on the way a value that its gradient reads.

    Attributes:
        made: the nodes, in order.
        read: the values beyond the outputs that the gradient reads.
    """

    made: tuple[NodeProto, ...]
    read: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Return the values that the gradient reads."""
        return self.read

    def nodes(self) -> tuple[NodeProto, ...]:
        """Return the nodes."""
        return self.made


@dataclass(frozen=True, slots=True)
class Padded:
    """A value that stands from `first` to `last` of an axis of `size`, in zeros otherwise."""

    value: str
    axis: int
    first: int
    last: int
    size: int


_GRAPH, _GRAPHS = AttributeProto.GRAPH, AttributeProto.GRAPHS
_HOLD_GRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})  # of ai.onnx


class GraphBuilder:
    """A growing list of nodes and constants beside a graph whose names are taken.

    Args:
        taken: value names that must not be used again.
        prefix: put before every fresh name; keeps gradient values recognisable in viewers.
        opsets: imports of the model, as (domain, version).
        known: initializers of the graph; small ones are looked at to infer shapes.

    Attributes:
        nodes: what was emitted, in order.
        made: every node that was emitted, taken ones too, by each of its outputs.
        of_products: gradients that rules found to be made of products alone, and masked.
        initializers: the constants that these read.
        instead: forward nodes, by their first output, that are written in another way where the
            gradient needs it; `prune` does so.
        padded: values emitted here that are another one with zeros around it.
        sizes: values with the product of these dimensions, [1] int64.
    """

    def __init__(
        self,
        taken: Iterable[str],
        prefix: str = "d/",
        *,
        opsets: Iterable[tuple[str, int]] = (("", ONNX_OPSET_VERSION),),
        known: Iterable[TensorProto] = (),
    ) -> None:
        self.nodes: list[NodeProto] = []
        self.made: dict[str, NodeProto] = {}
        self.of_products: set[str] = set()
        self.initializers: list[TensorProto] = []
        self.instead: dict[str, Instead] = {}
        self.padded: dict[str, Padded] = {}
        self.sizes: dict[Dims, str] = {}
        self.opsets = tuple(opsets)
        self.known = {tensor.name: tensor for tensor in known}
        self._taken = set(taken)
        self._prefix = prefix
        self._counters: dict[str, int] = {}
        self._emitted: dict[tuple[object, ...], list[str]] = {}
        self._constants: dict[tuple[int, tuple[int, ...], bytes], str] = {}
        self._attributes: dict[tuple[str, str], AttributeProto] = {}

    @property
    def taken(self) -> frozenset[str]:
        """The names that are used, here or before."""
        return frozenset(self._taken)

    def take(self) -> list[NodeProto]:
        """Return the nodes that were emitted since the last call; what follows may read them."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def nested(self) -> GraphBuilder:
        """Return an empty builder for a graph inside of a node: no name of it is used twice."""
        made = GraphBuilder((), self._prefix, opsets=self.opsets)
        made.known, made._taken, made._counters = self.known, self._taken, self._counters
        return made

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
        said = repr(sorted(attributes.items())) if attributes else ""
        key = (op_type, tuple(names), outputs, said)
        known = self._emitted.get(key)
        if known is not None:
            return known
        results = [self.fresh(op_type) for _ in range(outputs)]
        node = NodeProto(op_type=op_type, input=names, output=results, name=results[0])
        for name in sorted(attributes):  # sorted: the bytes must not hang on the rule's spelling
            self._write(name, attributes[name], node)
        self.nodes.append(node)
        self.made.update(dict.fromkeys(results, node))
        self._emitted[key] = results
        return results

    def _write(self, name: str, value: AttributeValue, node: NodeProto) -> None:
        """Add an attribute to a node; most are like one that was made before."""
        key = name, repr(value)
        known = self._attributes.get(key)
        if known is None:
            known = self._attributes[key] = helper.make_attribute(name, value)
        node.attribute.append(known)

    def op(self, op_type: str, *inputs: str, **attributes: AttributeValue) -> str:
        """Emit one node with a single output and return its name."""
        return self.emit(op_type, inputs, 1, **attributes)[0]

    def add(
        self,
        op_type: str,
        inputs: Iterable[str],
        outputs: int = 1,
        **attributes: AttributeValue | GraphProto,
    ) -> list[str]:
        """Emit a node that may hold graphs, and is never shared with an equal one."""
        results = [self.fresh(op_type) for _ in range(outputs)]
        node = helper.make_node(op_type, list(inputs), results, name=results[0])
        for name in sorted(attributes):
            node.attribute.append(helper.make_attribute(name, attributes[name]))
        self.nodes.append(node)
        return results

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
    nodes: Iterable[NodeProto],
    initializers: Iterable[TensorProto],
    outputs: Iterable[str],
    instead: Mapping[str, Instead] | None = None,
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return, in order, only the nodes and initializers that the `outputs` need.

    A node that `instead` has another way to write is written so where that makes more that is
    needed.
    """
    needed = {*outputs} - {""}
    kept: list[NodeProto] = []
    waiting = list(nodes)
    ways = dict(instead or {})
    while waiting:
        node = waiting.pop()
        other = ways.get(first_output(node)) if ways else None
        if other is not None and not needed.isdisjoint(other.names()):
            del ways[first_output(node)]  # what stands there makes that output too
            waiting += other.nodes()
        elif not needed.isdisjoint(node.output):
            kept.append(node)
            needed |= captured_names(node)
    kept.reverse()
    return kept, [tensor for tensor in initializers if tensor.name in needed]


def first_output(node: NodeProto) -> str:
    """Return the first name that a node gives, or "" where it gives none."""
    return next((name for name in node.output if name), "")


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Return the graphs that a node's attributes hold."""
    graphs: list[GraphProto] = []
    if not node.domain and node.op_type not in _HOLD_GRAPHS:  # without a look at each attribute
        return graphs
    for attribute in node.attribute:
        kind = attribute.type
        if kind == _GRAPH:
            graphs.append(attribute.g)
        elif kind == _GRAPHS:
            graphs += attribute.graphs
    return graphs


def captured_names(node: NodeProto) -> set[str]:
    """Return the names of the values that a node reads, inside its subgraphs too.

    A name that a subgraph gives to a value of its own is not among them.
    """
    names = {*node.input}
    names.discard("")
    for graph in subgraphs(node):
        names |= free_names(graph).keys()
    return names


def free_names(graph: GraphProto) -> dict[str, None]:
    """Return, in order, the names that a nested graph reads from the graphs around it."""
    own = local_names(graph)
    read: dict[str, None] = {}
    for node in graph.node:
        read.update(dict.fromkeys(name for name in node.input if name))
        for inner in subgraphs(node):
            read.update(free_names(inner))
    read.update(dict.fromkeys(output.name for output in graph.output))
    return {name: None for name in read if name not in own}


def local_names(graph: GraphProto) -> dict[str, None]:
    """Return, in order, the names that a graph gives: inputs, initializers, outputs of nodes."""
    own = dict.fromkeys(port.name for port in graph.input)
    own.update(dict.fromkeys(tensor.name for tensor in graph.initializer))
    own.update(dict.fromkeys(tensor.values.name for tensor in graph.sparse_initializer))
    for node in graph.node:
        own.update(dict.fromkeys(name for name in node.output if name))
    return own


def constant_nodes(nodes: Iterable[NodeProto]) -> list[TensorProto]:
    """Return the tensors of Constant nodes under the names of their outputs."""
    found = []
    for node in nodes:
        if node.op_type == "Constant" and node.attribute:
            value = helper.get_attribute_value(node.attribute[0])
            if node.attribute[0].name.startswith(("value_int", "value_float")):
                dtype = np.int64 if node.attribute[0].name.startswith("value_int") else np.float32
                value = numpy_helper.from_array(np.asarray(value, dtype))
            if isinstance(value, TensorProto):
                tensor = TensorProto()
                tensor.CopyFrom(value)
                tensor.name = node.output[0]
                found.append(tensor)
    return found


def every_name(nodes: Iterable[NodeProto]) -> set[str]:
    """Return all names of values in nodes and in the graphs inside of them."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input, node.output)
        for graph in subgraphs(node):
            names |= local_names(graph).keys() | every_name(graph.node)
    return names


@dataclass(frozen=True, slots=True)
class InferredType:
    """The inferred element type of a value (ONNX's number, 0: unknown), and its dimensions."""

    elem_type: int
    dims: Dims | None

    @classmethod
    def of(cls, tensor: TypeProto.Tensor) -> InferredType:
        """Return the type that a protobuf says."""
        if not tensor.HasField("shape"):
            return cls(int(tensor.elem_type), None)
        dims: list[Dim] = []
        for dim in tensor.shape.dim:
            if dim.HasField("dim_value"):
                dims.append(int(dim.dim_value))
            elif dim.HasField("dim_param") and dim.dim_param:
                dims.append(dim.dim_param)
            else:
                dims.append(None)
        return cls(int(tensor.elem_type), tuple(dims))


UNKNOWN = InferredType(0, None)


def inferred_types(model: ModelProto) -> dict[str, InferredType]:
    """Return the types of all inputs, initializers and intermediate values of `model.graph`.

    Values inside of nested graphs are not among them. `model_types` knows more of what comes out of
    such graphs.
    """
    inferred = onnx.shape_inference.infer_shapes(_inferrable(model), data_prop=True).graph
    types: dict[str, InferredType] = {}
    for tensor in inferred.initializer:
        types[tensor.name] = InferredType(int(tensor.data_type), tuple(tensor.dims))
    for info in (*inferred.input, *inferred.output, *inferred.value_info):
        if info.type.HasField("tensor_type"):
            types[info.name] = InferredType.of(info.type.tensor_type)
    return types


# ONNX infers no output of these; it has the type of the first input.
_NOT_INFERRED = frozenset({"GroupNormalization", "MeanVarianceNormalization"})


def _inferrable(model: ModelProto) -> ModelProto:
    """Return the model with an Identity for each node that ONNX's inference does not follow."""
    if not any(node.op_type in _NOT_INFERRED for node in model.graph.node):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        if node.op_type in _NOT_INFERRED and node.domain in ("", "ai.onnx"):
            same = helper.make_node("Identity", [node.input[0]], list(node.output))
            node.CopyFrom(same)
    return made
