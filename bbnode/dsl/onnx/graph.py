"""An indexed ONNX model: its graph, its weights, and parts of it.

Rule: the index is built once from a loaded model and never changed. Initializers are weights, even
if an input has the same name (as older exporters write it). Ops that compute with weights alone
are *fixed*: they have no place of their own and are recorded wherever they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import TensorProto

from bbnode.dsl.core.names import hint
from bbnode.dsl.errors import UnknownValue, UnsupportedPort
from bbnode.dsl.onnx.copying import bare_tensor
from bbnode.dsl.onnx.runtime_ops import completed_kinds
from bbnode.ir import types
from bbnode.ir.graph import Annotations, OpNode, Program, Subgraph, Tensor, ValueType
from bbnode.ir.onnx_file import annotations_of
from bbnode.ir.types import TypeNode, is_onnx

_RANDOM_OPS = frozenset({"Bernoulli", "Multinomial"})  # beside those called Random…


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """One model, indexed.

    Attributes:
        nodes: in topological order, without those that no output needs.
        weights: initializers by name; the tensors themselves carry no name.
        inputs, outputs: names; an input with an initializer is a weight, not an input.
        kinds: type of each value that is a tensor with a known element type that can travel.
        maker: index of the node that makes a value.
        fixed: for each node, True if it computes with weights alone.
        opsets: version by domain.
        annotations: quantization annotations of values.
        extras: device configurations and training graphs of the model.
    """

    nodes: Sequence[OpNode]
    weights: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, TypeNode]
    maker: Mapping[str, int]
    fixed: Sequence[bool]
    opsets: Mapping[str, int]
    annotations: Annotations = field(default_factory=dict)
    extras: bytes = b""

    def fixed_for(self, indices: Iterable[int], values: Iterable[str]) -> set[int]:
        """Return the fixed ops that these ops and values need, directly or indirectly."""
        todo = [*values, *(name for i in indices for name in self.nodes[i].computes_with)]
        fixed_ops: set[int] = set()
        while todo:
            index = self.maker.get(todo.pop())
            if index is not None and self.fixed[index] and index not in fixed_ops:
                fixed_ops.add(index)
                todo.extend(self.nodes[index].computes_with)
        return fixed_ops

    def is_fixed_value(self, name: str) -> bool:
        """Return True if a value is a weight, or computed from weights alone."""
        index = self.maker.get(name)
        return name in self.weights if index is None else self.fixed[index]

    def weight_bytes(self, indices: Iterable[int], values: Iterable[str] = ()) -> int:
        """Return the bytes of the weights that these ops read, each weight once."""
        return sum(self._weights_of(indices, values).values())

    def new_weight_bytes(self, indices: Iterable[int]) -> list[int]:
        """Return the bytes of the weights that each of these ops is the first one to read."""
        seen: set[str] = set()
        sizes = []
        for index in indices:
            new = {k: v for k, v in self._weights_of((index,), ()).items() if k not in seen}
            seen.update(new)
            sizes.append(sum(new.values()))
        return sizes

    def _weights_of(self, indices: Iterable[int], values: Iterable[str]) -> dict[str, int]:
        indices = tuple(indices)
        closure = self.fixed_for(indices, values)
        sizes: dict[str, int] = {}
        for index in (*indices, *closure):
            node = self.nodes[index]
            for name in node.computes_with:
                if name in self.weights:
                    sizes[name] = weight_size(self.weights[name])
            attributes = sum(map(weight_size, _held_tensors(node)))
            if attributes:
                sizes[f"\0{index}"] = attributes  # no value has such a name
        sizes.update((n, weight_size(self.weights[n])) for n in values if n in self.weights)
        return sizes

    def check_value(self, name: object, module: str) -> str:
        """Return the name of a value of the model, or raise UnknownValue."""
        known = (*self.inputs, *self.maker)
        if isinstance(name, str) and (name in self.maker or name in self.inputs):
            return name
        raise UnknownValue(f"the model has no value {name!r:.80}{hint(str(name), known)}", module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A set of ops of a model: the whole model, or one stage.

    Attributes:
        nodes: indices of its ops, in order, without fixed ones.
        inputs, outputs: values that enter and leave the part.
    """

    graph: OnnxGraph = field(repr=False)
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights."""
        return self.graph.weight_bytes(self.nodes, self.outputs)


def whole(graph: OnnxGraph) -> Part:
    """Return the whole model as a part."""
    nodes = tuple(index for index, fixed in enumerate(graph.fixed) if not fixed)
    return Part(graph=graph, nodes=nodes, inputs=graph.inputs, outputs=graph.outputs)


def _held_tensors(node: OpNode) -> Iterable[Tensor]:
    """Yield the tensors in a node's attributes, nested graphs included."""
    for attribute in node.attributes.values():
        if isinstance(attribute.value, Tensor):
            yield attribute.value
        for graph in attribute.graphs:
            yield from graph.initializers.values()
            for inner in graph.nodes:
                yield from _held_tensors(inner)


def weight_size(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes, whatever their encoding in the file."""
    proto = tensor.proto
    if not isinstance(proto, TensorProto):
        return weight_size(Tensor(proto.values)) + weight_size(Tensor(proto.indices))
    try:
        return math.prod(tensor.shape) * tensor.dtype.itemsize or tensor.nbytes
    except (KeyError, ValueError):
        return tensor.nbytes


def index_model(program: Program, outputs: Sequence[str] | None, module: str) -> OnnxGraph:
    """Index a loaded model.

    Args:
        program: the result of `load_model`.
        outputs: outputs to keep, None for all; ops that only the others need are left out.
        module: name of the Module, for error messages.

    Raises:
        UnknownValue, UnsupportedPort: no such output, or a port that is not a tensor.
    """
    graph = program.graph or Subgraph()
    kept = _kept_outputs(graph, outputs, module)
    nodes = _needed(graph, kept)
    maker = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    inputs = tuple(name for name in graph.inputs if name not in graph.initializers)
    for port, names in (("input", inputs), ("output", kept)):
        for name in names:
            _check_port(port, name, graph.types.get(name), module)
    inferred = {n: kind for n, t in graph.types.items() if (kind := _travelling(t)) is not None}
    held = {
        n: types.TENSOR_BY_ELEM[tensor.elem_type]
        for n, tensor in graph.initializers.items()
        if tensor.elem_type in types.TENSOR_BY_ELEM
    }
    opsets = dict(program.opset_imports)
    return OnnxGraph(
        nodes=nodes,
        weights={n: bare_tensor(tensor) for n, tensor in graph.initializers.items()},
        inputs=inputs,
        outputs=kept,
        kinds=completed_kinds(inferred, held, nodes, opsets),
        maker=maker,
        fixed=_fixed(nodes, maker, graph.initializers),
        opsets=opsets,
        annotations=annotations_of(graph),
        extras=program.extras,
    )


def _kept_outputs(graph: Subgraph, outputs: Sequence[str] | None, module: str) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(graph.outputs))
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


def _needed(graph: Subgraph, outputs: Sequence[str]) -> list[OpNode]:
    """Return the nodes that some output needs, in the model's order, which is topological."""
    wanted = set(outputs)
    kept: list[OpNode] = []
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            kept.append(node)
            wanted.update(node.computes_with)
    return kept[::-1]


def _travelling(declared: ValueType) -> TypeNode | None:
    kind = declared.kind
    return kind if kind is not None and kind.is_leaf and is_onnx(kind) else None


def _check_port(port: str, name: str, declared: ValueType | None, module: str) -> None:
    if declared is None or _travelling(declared) is not None:
        return
    which = str(declared.proto().WhichOneof("value")).removesuffix("_type")
    if which == "tensor":
        which = f"tensor of {TensorProto.DataType.Name(declared.elem_type).lower()}"
    mend = (
        "keep the others with outputs=[…] (scikit-learn: export with zipmap=False)"
        if port == "output"
        else "export the model with plain tensors for inputs"
    )
    raise UnsupportedPort(
        f"{port} {name!r} is a {which}; ports are tensors, or sequences of them: {mend}",
        module,
    )


def _fixed(
    nodes: Sequence[OpNode], maker: Mapping[str, int], weights: Mapping[str, Tensor]
) -> list[bool]:
    fixed: list[bool] = []
    for node in nodes:
        known = all(n in weights or (n in maker and fixed[maker[n]]) for n in node.computes_with)
        fixed.append(known and not _draws(node))
    return fixed


def _draws(node: OpNode) -> bool:
    inner = (n for graph in node.graphs for n in graph.all_nodes())
    return any(n.op_type.startswith("Random") or n.op_type in _RANDOM_OPS for n in (node, *inner))
