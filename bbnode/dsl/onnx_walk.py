"""Walking the graphs of an ONNX model, those inside of If, Loop and Scan included.

Rule: no walk recurses deeper than `MAX_GRAPH_DEPTH`, which `check_depth` holds before anything
else looks at a model; what a node reads includes what its graphs take from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from bbnode.dsl.errors import NestingTooDeep
from bbnode.ir import keys

ONNX_ML_DOMAIN = keys.ONNX_ML_DOMAIN

# A parsed protobuf nests at most 100 messages deep, and every graph takes three of them; what
# exporters write nests two or three graphs deep.
MAX_GRAPH_DEPTH = 24


def nested_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def check_depth(model: ModelProto, module: str) -> None:
    """Raise NestingTooDeep when graphs nest deeper than `MAX_GRAPH_DEPTH`."""
    level: list[NodeProto] = [*model.graph.node]
    for function in model.functions:
        level.extend(function.node)
    for _ in range(MAX_GRAPH_DEPTH):
        level = [inner for node in level for graph in nested_graphs(node) for inner in graph.node]
        if not level:
            return
    raise NestingTooDeep(
        f"op {level[0].op_type} {level[0].name!r} stands in more than {MAX_GRAPH_DEPTH} graphs of "
        "If, Loop or Scan, one inside of the other; export the model with fewer",
        module,
    )


def broken_text(model: ModelProto) -> str | None:
    """The kind of a field whose text is no UTF-8, or None; protobuf takes such bytes as they are.

    Whoever reads such a field later would get bytes, or an error that is none of ours.
    """
    todo: list[Any] = [model]
    while todo:
        message = todo.pop()
        where = str(message.DESCRIPTOR.name)
        try:
            for field, value in message.ListFields():
                where = f"{message.DESCRIPTOR.name}.{field.name}"
                if field.type == field.TYPE_MESSAGE:
                    todo.extend([value] if hasattr(value, "DESCRIPTOR") else value)
                elif field.type == field.TYPE_STRING:
                    texts = [value] if isinstance(value, str | bytes) else value
                    if not all(isinstance(text, str) for text in texts):
                        return where
        except UnicodeDecodeError:
            return where
    return None


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and all nodes inside of their graphs."""
    todo = list(nodes)[::-1]
    while todo:
        node = todo.pop()
        yield node
        for graph in nested_graphs(node):
            todo.extend(graph.node)


def every_node(model: ModelProto) -> Iterator[NodeProto]:
    """All nodes of the model: graph, functions, nested graphs."""
    yield from all_nodes([*model.graph.node, *(n for f in model.functions for n in f.node)])


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The model's graph and all nested ones."""
    yield model.graph
    for node in every_node(model):
        yield from nested_graphs(node)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor that the model holds: initializers and attributes."""
    for node in every_node(model):
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [*attribute.sparse_tensors]
    if attribute.HasField("sparse_tensor"):
        sparse.append(attribute.sparse_tensor)
    for each in sparse:
        yield each.values
        yield each.indices


def reads(node: NodeProto) -> list[str]:
    """Values that a node computes with, each once: its inputs, and what its graphs capture."""
    found = dict.fromkeys(name for name in node.input if name)
    for graph in nested_graphs(node):
        _collect_free(graph, frozenset(), found)
    return list(found)


def _collect_free(graph: GraphProto, outer: frozenset[str], found: dict[str, None]) -> None:
    bound = {*outer, *_defined(graph)}
    for node in graph.node:
        found.update((name, None) for name in node.input if name and name not in bound)
        for inner in nested_graphs(node):
            _collect_free(inner, frozenset(bound), found)
    found.update((port.name, None) for port in graph.output if port.name not in bound)


def _defined(graph: GraphProto) -> Iterator[str]:
    """Names that a graph itself gives to values."""
    yield from (port.name for port in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from (name for name in node.output if name)


def rename_graph(
    graph: GraphProto, outer: Mapping[str, str], fresh: Callable[[], str]
) -> GraphProto:
    """A copy in which captured values are called as in `outer`, and its own ones by `fresh`.

    Texts and metadata that nothing computes with are left out.
    """
    copy = GraphProto()
    copy.CopyFrom(graph)
    _rename(copy, outer, fresh)
    return copy


def _rename(graph: GraphProto, outer: Mapping[str, str], fresh: Callable[[], str]) -> None:
    names = dict(outer)
    names.update((name, fresh()) for name in dict.fromkeys(_defined(graph)))
    for port in (*graph.input, *graph.output):
        port.name = names.get(port.name, port.name)
        port.ClearField("doc_string")
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
        tensor.ClearField("doc_string")
    for sparse in graph.sparse_initializer:
        sparse.values.name = names[sparse.values.name]
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for index, name in enumerate(node.output):
            node.output[index] = names.get(name, name)
        for inner in nested_graphs(node):
            _rename(inner, names, fresh)
        _strip(node)
    del graph.value_info[:]  # inference finds the types again, under the new names
    del graph.quantization_annotation[:]
    del graph.metadata_props[:]
    graph.ClearField("doc_string")


def _strip(node: NodeProto) -> None:
    node.ClearField("doc_string")
    node.ClearField("name")
    del node.metadata_props[:]
    for attribute in node.attribute:
        attribute.ClearField("doc_string")


def rename_captured(graph: GraphProto, outer: Mapping[str, str]) -> None:
    """Call values that a graph takes from outside as in `outer`; its own ones keep their names."""
    own = set(_defined(graph))
    names = {old: new for old, new in outer.items() if old not in own}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for inner in nested_graphs(node):
            rename_captured(inner, names)
    for port in graph.output:
        port.name = names.get(port.name, port.name)
