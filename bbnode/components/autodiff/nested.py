"""Graphs inside of nodes: read out under names of their own, typed, and written again.

Rule: a copy of a nested graph has no name that anything around it has, so that it may stand
anywhere; what it reads from around it keeps its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bbnode.components.autodiff.builder import (
    BOOL,
    INT64,
    UNKNOWN,
    Dims,
    GraphBuilder,
    InferredType,
    captured_names,
    constant_nodes,
    every_name,
    free_names,
    inferred_types,
    local_names,
    prune,
    subgraphs,
)
from bbnode.components.autodiff.sizes import with_equal_sizes
from bbnode.components.autodiff.table import VjpContext
from bbnode.ir.keys import FRAMEWORK_IR_VERSION

# Constants of at most as many elements are looked at to infer shapes: axes, shapes, pads.
_SMALL_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class NestedBody:
    """A nested graph under fresh names.

    Attributes:
        formals: its inputs, by position, with the types that the graph declares.
        nodes: in topological order.
        tensors: its initializers.
        outputs: by position; two may be the same value, or one from around it.
        declared: the types that the graph declares for them.
        captured: what it reads from around it, in order.
    """

    formals: tuple[tuple[str, InferredType], ...]
    nodes: tuple[NodeProto, ...]
    tensors: tuple[TensorProto, ...]
    outputs: tuple[str, ...]
    declared: tuple[InferredType, ...]
    captured: tuple[str, ...]

    def types(
        self,
        b: GraphBuilder,
        around: Mapping[str, InferredType],
        formals: Mapping[str, InferredType],
    ) -> dict[str, InferredType]:
        """Return the types of the values in it, of what is around it, and of `formals` as given."""
        inputs = {name: around.get(name, UNKNOWN) for name in self.captured} | dict(formals)
        known = [
            tensor
            for name in self.captured
            if (tensor := b.known.get(name)) is not None
            and math.prod(tensor.dims) <= _SMALL_ELEMENTS
        ]
        held = {tensor.name for tensor in known}
        graph = GraphProto(name="body")
        graph.node.extend(self.nodes)
        graph.initializer.extend([*self.tensors, *known])
        graph.input.extend(
            value_info(name, kind)
            for name, kind in inputs.items()
            if kind.elem_type and name not in held
        )
        graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(self.outputs))
        types = {**around, **model_types(_whole(b, graph)), **formals}
        for name, declared in zip(self.outputs, self.declared, strict=True):
            found = types.get(name, UNKNOWN)
            if found.elem_type == 0:
                types[name] = declared
        return types


def _whole(b: GraphBuilder, graph: GraphProto) -> ModelProto:
    """Return a model of a graph with the opsets of the one that is differentiated."""
    domains = dict(b.opsets)
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid(*entry) for entry in domains.items()],
    )


def value_info(name: str, kind: InferredType) -> ValueInfoProto:
    """Return the declaration of a tensor."""
    dims = None if kind.dims is None else list(kind.dims)
    return helper.make_tensor_value_info(name, kind.elem_type, dims)


def body_of(ctx: VjpContext, name: str) -> NestedBody:
    """Read the graph in attribute `name` of the node.

    Raises:
        GradientRuleError: there is none, or it has sparse initializers.
    """
    graph: GraphProto | None = ctx.attribute(name, None)
    if graph is None:
        raise ctx.error(f"it has no graph {name!r}", "run onnx.checker.check_model on the model")
    if graph.sparse_initializer:
        raise ctx.error(f"its {name} has sparse initializers", "make them dense")
    return read_body(ctx.b, graph)


def read_body(b: GraphBuilder, graph: GraphProto) -> NestedBody:
    """Read a graph that stands in a node of the graph beside which `b` emits."""
    fresh = {own: b.fresh(own) for own in local_names(graph)}
    tensors = []
    for tensor in graph.initializer:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = fresh[tensor.name]
        tensors.append(copy)
    nodes = tuple(_renamed(node, fresh) for node in graph.node)
    b.known.update((tensor.name, tensor) for tensor in (*tensors, *constant_nodes(nodes)))
    return NestedBody(
        formals=tuple((fresh[port.name], declared_type(port)) for port in graph.input),
        nodes=nodes,
        tensors=tuple(tensors),
        outputs=tuple(fresh.get(port.name, port.name) for port in graph.output),
        declared=tuple(declared_type(port) for port in graph.output),
        captured=tuple(free_names(graph)),
    )


def declared_type(port: ValueInfoProto) -> InferredType:
    """Return the type that a port of a graph declares; UNKNOWN where it is no tensor."""
    kind = port.type
    if not kind.HasField("tensor_type"):
        return UNKNOWN
    return InferredType.of(kind.tensor_type)


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    made = NodeProto()
    made.CopyFrom(node)
    for ports in (made.input, made.output):
        ports[:] = [names.get(name, name) for name in ports]
    for graph in subgraphs(made):
        own = local_names(graph)
        # A name that the inner graph gives anew is another value.
        visible = {old: new for old, new in names.items() if old not in own}
        if visible:
            _rename_within(graph, visible)
    return made


def _rename_within(graph: GraphProto, names: Mapping[str, str]) -> None:
    nodes = [_renamed(node, names) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for port in graph.output:
        port.name = names.get(port.name, port.name)


def closed_graph(
    name: str,
    b: GraphBuilder,
    inputs: Sequence[tuple[str, InferredType]],
    outputs: Sequence[tuple[str, InferredType]],
    nodes: Sequence[NodeProto] = (),
    tensors: Iterable[TensorProto] = (),
) -> GraphProto:
    """Return the graph of `nodes` and of what a nested builder emitted, pruned to its outputs.

    Runtimes refuse a graph that hands out an input, a value from around it, or one value twice:
    these are copied.
    """
    made = {value for node in (*nodes, *b.nodes) for value in node.output}
    ends: list[str] = []
    copies: list[NodeProto] = []
    for value, _ in outputs:
        end = value
        if value not in made or value in ends:
            end = b.fresh("out")
            copies.append(helper.make_node("Identity", [value], [end], name=end))
        ends.append(end)
    kept, constants = prune(
        [*nodes, *b.nodes, *copies], [*tensors, *b.initializers], ends, b.instead
    )
    return helper.make_graph(
        kept,
        name,
        [value_info(*port) for port in inputs],
        [value_info(end, kind) for end, (_, kind) in zip(ends, outputs, strict=True)],
        constants,
    )


def seeds_of(
    b: GraphBuilder, outputs: Iterable[str], grads: Iterable[str | None]
) -> dict[str, str]:
    """Return the gradient of each value of `outputs`: summed where a value is there twice."""
    seeds: dict[str, str] = {}
    for value, grad in zip(outputs, grads, strict=True):
        if grad is not None:
            seeds[value] = b.op("Add", seeds[value], grad) if value in seeds else grad
    return seeds


def common_type(one: InferredType, other: InferredType) -> InferredType:
    """Return the type of a value that is sometimes of one type, sometimes of the other."""
    dims: Dims | None = None
    if one.dims is not None and other.dims is not None and len(one.dims) == len(other.dims):
        dims = tuple(a if a == c else None for a, c in zip(one.dims, other.dims, strict=True))
    return InferredType(one.elem_type, dims)


def model_types(model: ModelProto) -> dict[str, InferredType]:
    """Return the types of the values of `model.graph`, those behind an If or a Loop included.

    ONNX's inference forgets the shapes of what a Loop carries, as a step may change them, and
    so the ranks of all that is computed from them. Here the body is looked at.
    """
    types = inferred_types(model)
    holders = [node for node in model.graph.node if node.op_type in ("If", "Loop")]
    if all(types.get(n, UNKNOWN).dims is not None for node in holders for n in node.output if n):
        return with_equal_sizes(model.graph.node, types)
    taken = every_name(model.graph.node)
    known = [*model.graph.initializer, *constant_nodes(model.graph.node)]
    opsets = [(entry.domain, int(entry.version)) for entry in model.opset_import]
    b = GraphBuilder({*taken, *types}, opsets=opsets, known=known)
    told = ModelProto()
    told.CopyFrom(model)
    for node in holders:
        found = {
            name: kind
            for name, kind in _output_types(b, node, types).items()
            if kind.dims is not None and types.get(name, UNKNOWN).dims is None
        }
        if found:
            for port in told.graph.output:
                if port.name in found:
                    port.CopyFrom(value_info(port.name, found[port.name]))
            told.graph.value_info.extend(value_info(*entry) for entry in found.items())
            types = inferred_types(told)
    return with_equal_sizes(model.graph.node, types)


def _output_types(
    b: GraphBuilder, node: NodeProto, types: Mapping[str, InferredType]
) -> dict[str, InferredType]:
    """Return what the bodies of an If or a Loop tell of its outputs."""
    bodies = [read_body(b, graph) for graph in subgraphs(node)]
    if node.op_type == "If" and len(bodies) == 2:
        one, other = (
            [body.types(b, types, {}).get(name, UNKNOWN) for name in body.outputs]
            for body in bodies
        )
        kinds = [common_type(*pair) for pair in zip(one, other, strict=False)]
    elif node.op_type == "Loop" and len(bodies) == 1:
        initial = [types.get(name, UNKNOWN) for name in node.input[2:]]
        inner = loop_types(b, bodies[0], types, initial, 2)
        states = [inner[name] for name, _ in bodies[0].formals[2:]]
        steps = [inner.get(name, UNKNOWN) for name in bodies[0].outputs[1 + len(states) :]]
        kinds = [*states, *(InferredType(s.elem_type, _rows(s.dims)) for s in steps)]
    else:
        return {}
    return {
        name: kind
        for name, kind in zip(node.output, kinds, strict=False)
        if name and kind.elem_type
    }


def _rows(dims: Dims | None) -> Dims | None:
    return None if dims is None else (None, *dims)


def loop_types(
    b: GraphBuilder,
    body: NestedBody,
    around: Mapping[str, InferredType],
    initial: Sequence[InferredType],
    leading: int,
    slices: Mapping[str, InferredType] | None = None,
) -> dict[str, InferredType]:
    """Return the types in and around the body of a Scan or Loop that hold at every step.

    `leading` is 2 for a Loop, whose body begins with the number of the step and the condition,
    and 0 for a Scan, which gives its body `slices`. A carried value has the type of its initial
    one, less the sizes that a step changes.
    """
    formals = dict(body.formals) | dict(slices or {})
    if leading:
        for (name, _), elem_type in zip(body.formals, (INT64, BOOL), strict=False):
            formals[name] = InferredType(elem_type, ())
    states = [name for name, _ in body.formals[leading : leading + len(initial)]]
    ends = body.outputs[leading // 2 : leading // 2 + len(initial)]
    for state, kind in zip(states, initial, strict=True):
        formals[state] = kind if kind.elem_type else formals[state]
    while True:  # each round takes a size or a rank away, or is the last
        types = body.types(b, around, formals)
        after = {
            state: common_type(formals[state], types.get(end, UNKNOWN))
            for state, end in zip(states, ends, strict=True)
        }
        if all(formals[state] == kind for state, kind in after.items()):
            return types
        formals |= after


def reads(nodes: Iterable[NodeProto]) -> dict[str, None]:
    """Return, in order, the names that nodes read and none of them makes."""
    made = {name for node in nodes for name in node.output}
    read: dict[str, None] = {}
    for node in nodes:
        read.update(dict.fromkeys(name for name in node.input if name))
        read.update(dict.fromkeys(sorted(captured_names(node))))
    return {name: None for name in read if name not in made}
