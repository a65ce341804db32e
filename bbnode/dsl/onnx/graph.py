"""An ONNX model as the importer sees it: ops, weights, types, and who reads what.

Rule: built once from a checked model and never changed. Initializers are weights, also where
an input has the same name (what older exporters write). Ops that compute with weights alone
are *fixed*: they have no place of their own and are recorded wherever they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TypeProto

from bbnode.dsl import onnx_walk
from bbnode.dsl.core.names import hint
from bbnode.dsl.errors import BrokenModel, UnknownValue, UnsupportedPort, first_line
from bbnode.dsl.onnx.load import ONNX_FAILURES
from bbnode.ir import types
from bbnode.ir.types import TypeNode

_RANDOM_OPS = frozenset({"Bernoulli", "Multinomial"})  # beside those called Random…


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """One model, indexed.

    Attributes:
        nodes: in topological order; those that no output needs are left out.
        reads: of each node, with what its nested graphs capture.
        weights: initializers by name.
        inputs, outputs: of the model, by name; an input with an initializer is none.
        kinds: type of each value that is a tensor of a known element type that can travel.
        maker: index of the node that makes a value.
        fixed: whether a node computes with weights alone.
        opsets: version by domain.
    """

    nodes: Sequence[NodeProto]
    reads: Sequence[Sequence[str]]
    weights: Mapping[str, TensorProto | SparseTensorProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, TypeNode]
    maker: Mapping[str, int]
    fixed: Sequence[bool]
    opsets: Mapping[str, int]

    def fixed_for(self, indices: Iterable[int], values: Iterable[str]) -> set[int]:
        """Fixed ops that these ops and values need, directly or not."""
        todo = [*values, *(name for index in indices for name in self.reads[index])]
        found: set[int] = set()
        while todo:
            index = self.maker.get(todo.pop())
            if index is not None and self.fixed[index] and index not in found:
                found.add(index)
                todo.extend(self.reads[index])
        return found

    def is_fixed_value(self, name: str) -> bool:
        """Whether a value is a weight, or computed from weights alone."""
        index = self.maker.get(name)
        return name in self.weights if index is None else self.fixed[index]

    def weight_bytes(self, indices: Iterable[int], values: Iterable[str] = ()) -> int:
        """Bytes of the weights that these ops read, each weight once."""
        return sum(self._weights_of(indices, values).values())

    def new_weight_bytes(self, indices: Iterable[int]) -> list[int]:
        """Bytes of the weights that each of these ops is the first one to read."""
        seen: set[str] = set()
        found = []
        for index in indices:
            new = {k: v for k, v in self._weights_of((index,), ()).items() if k not in seen}
            seen.update(new)
            found.append(sum(new.values()))
        return found

    def _weights_of(self, indices: Iterable[int], values: Iterable[str]) -> dict[str, int]:
        indices = tuple(indices)
        closure = self.fixed_for(indices, values)
        found: dict[str, int] = {}
        for index in (*indices, *closure):
            for name in self.reads[index]:
                if name in self.weights:
                    found[name] = weight_size(self.weights[name])
            attributes = sum(tensor_bytes(self.nodes[index]))
            if attributes:
                found[f"\0{index}"] = attributes  # no value has such a name
        found.update((n, weight_size(self.weights[n])) for n in values if n in self.weights)
        return found

    def check_value(self, name: object, module: str) -> str:
        """The name of a value of the model; raises UnknownValue."""
        known = (*self.inputs, *self.maker)
        if isinstance(name, str) and (name in self.maker or name in self.inputs):
            return name
        raise UnknownValue(f"the model has no value {name!r:.80}{hint(str(name), known)}", module)


def tensor_bytes(node: NodeProto) -> Iterable[int]:
    """Sizes of the tensors in a node's attributes, nested graphs included."""
    for inner in onnx_walk.all_nodes([node]):
        for attribute in inner.attribute:
            if attribute.HasField("t"):
                yield weight_size(attribute.t)
            if attribute.HasField("sparse_tensor"):
                yield weight_size(attribute.sparse_tensor)
        for graph in onnx_walk.nested_graphs(inner):
            yield from map(weight_size, graph.initializer)
            yield from map(weight_size, graph.sparse_initializer)


def weight_size(tensor: TensorProto | SparseTensorProto) -> int:
    """Bytes of a tensor's elements, however the file writes them down."""
    if isinstance(tensor, SparseTensorProto):
        return weight_size(tensor.values) + weight_size(tensor.indices)
    try:
        size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError):
        return tensor.ByteSize()
    return math.prod(tensor.dims) * size or tensor.ByteSize()


def index_model(model: ModelProto, outputs: Sequence[str] | None, module: str) -> OnnxGraph:
    """Index a checked model without functions.

    Args:
        model: what `load_model` and `to_recorded_opset` gave.
        outputs: those to keep, all when None; ops that only others need are left out.
        module: name of the Module, for error messages.

    Raises:
        BrokenModel: ONNX cannot infer the types of its values.
        UnknownValue, UnsupportedPort: an output that is none, or a port that is no tensor.
    """
    graph = model.graph
    kept = _kept_outputs(graph, outputs, module)
    nodes = _needed(graph, kept)
    reads = [onnx_walk.reads(node) for node in nodes]
    weights: dict[str, TensorProto | SparseTensorProto] = {t.name: t for t in graph.initializer}
    weights.update((sparse.values.name, sparse) for sparse in graph.sparse_initializer)
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    inputs = tuple(port.name for port in graph.input if port.name not in weights)
    protos = _type_protos(model, module)
    for name in inputs:
        _check_port("input", name, protos.get(name), module)
    for name in kept:
        _check_port("output", name, protos.get(name), module)
    return OnnxGraph(
        nodes=nodes,
        reads=reads,
        weights=weights,
        inputs=inputs,
        outputs=kept,
        kinds={n: kind for n, proto in protos.items() if (kind := _kind(proto)) is not None},
        maker=maker,
        fixed=_fixed(nodes, reads, maker, weights),
        opsets={entry.domain: entry.version for entry in model.opset_import},
    )


def _kept_outputs(graph: GraphProto, outputs: Sequence[str] | None, module: str) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(port.name for port in graph.output))
    if outputs is None:
        return known
    listed = isinstance(outputs, list | tuple) and bool(outputs)
    for name in outputs if listed else (outputs,):
        if name not in known:
            raise UnknownValue(
                f"outputs={outputs!r:.60}: the model has no output {name!r:.60}"
                f"{hint(str(name), known)}",
                module,
            )
    return tuple(dict.fromkeys(outputs))


def _needed(graph: GraphProto, outputs: Sequence[str]) -> list[NodeProto]:
    """The nodes that some output needs, in the model's order (the checker held it topological)."""
    wanted = set(outputs)
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if any(name in wanted for name in node.output):
            kept.append(node)
            wanted.update(onnx_walk.reads(node))
    return kept[::-1]


def _type_protos(model: ModelProto, module: str) -> dict[str, TypeProto]:
    """What ONNX knows of the types of the graph's values."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except ONNX_FAILURES as error:
        raise BrokenModel(
            f"ONNX cannot infer the model's types: {first_line(error)}; export it again, and see "
            "that onnx.shape_inference.infer_shapes takes it",
            module,
        ) from error
    infos = (*inferred.value_info, *inferred.input, *inferred.output)
    return {info.name: info.type for info in infos if info.type.WhichOneof("value")}


def _kind(proto: TypeProto) -> TypeNode | None:
    if proto.WhichOneof("value") != "tensor_type":
        return None
    return types.TENSOR_BY_ELEM.get(proto.tensor_type.elem_type)


def _check_port(port: str, name: str, proto: TypeProto | None, module: str) -> None:
    if proto is not None and _kind(proto) is None:
        which = str(proto.WhichOneof("value")).removesuffix("_type")
        if which == "tensor":
            which = f"tensor of {TensorProto.DataType.Name(proto.tensor_type.elem_type).lower()}"
        mend = (
            "keep the others with outputs=[…] (scikit-learn: export with zipmap=False)"
            if port == "output"
            else "export the model with plain tensors for inputs"
        )
        raise UnsupportedPort(
            f"{port} {name!r} is a {which}; ports are tensors of numbers or bools: {mend}",
            module,
        )


def _fixed(
    nodes: Sequence[NodeProto],
    reads: Sequence[Sequence[str]],
    maker: Mapping[str, int],
    weights: Mapping[str, TensorProto | SparseTensorProto],
) -> list[bool]:
    fixed: list[bool] = []
    for node, names in zip(nodes, reads, strict=True):
        draws = any(_is_random(inner) for inner in onnx_walk.all_nodes([node]))
        known = all(n in weights or (n in maker and fixed[maker[n]]) for n in names)
        fixed.append(known and not draws)
    return fixed


def _is_random(node: NodeProto) -> bool:
    return node.op_type.startswith("Random") or node.op_type in _RANDOM_OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some ops of a model: the whole of it, or one stage.

    Attributes:
        nodes: indices of its ops, in order, without fixed ones.
        inputs, outputs: values that come from outside, and that it hands out.
    """

    graph: OnnxGraph = field(repr=False)
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in it."""
        return self.graph.weight_bytes(self.nodes, self.outputs)


def whole(graph: OnnxGraph) -> Part:
    """The whole model as a part."""
    nodes = tuple(index for index, fixed in enumerate(graph.fixed) if not fixed)
    return Part(graph=graph, nodes=nodes, inputs=graph.inputs, outputs=graph.outputs)
