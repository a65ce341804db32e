"""Bounds of a model of any origin, checked before anything else is done with it.

Rule: one walk, linear in the size of the model and without recursion. All other code relies on the
result: texts are valid, names fit into messages, no node or function is so large that a walk
through its parts costs more than its bytes, and graphs nest no deeper than they are followed.
Nothing in the model names a file: a runtime would read that file on the machine it runs on, and
the program could send it away. The weights themselves are not inspected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
)

from bbnode.ir import keys
from bbnode.ir.caps import (
    MAX_FUNCTION_PARTS,
    MAX_GRAPH_DEPTH,
    MAX_NAME_CHARS,
    MAX_NODE_PARTS,
    MAX_PORTS,
    MAX_TEXT_CHARS,
    MAX_TYPE_DEPTH,
)
from bbnode.ir.errors import AuthorError
from bbnode.ir.shapes import MAX_AXES

# Characters of a file's name in an error.
_SHOWN_CHARS = 80

_LISTS = frozenset({keys.AFTER_KEY, keys.CONTROL_AFTER_KEY})

# ONNX Runtime's op that may load code from a file named by an attribute.
_FILE_OPS = frozenset({"EPContext"})
# ONNX Runtime's settings in a model, which may name files to write.
_RUNTIME_SETTINGS = frozenset({"ort_config"})


class OutOfBounds(AuthorError):
    """A model exceeds a bound that no legitimate program needs."""


class FileReference(OutOfBounds):
    """A model names a file, which running it would read or write."""


def check_bounds(model: ModelProto) -> None:
    """Raise OutOfBounds if a model is larger or deeper than the code is designed for.

    Raises FileReference if anything in it names a file.
    """
    _parts("the model", model.metadata_props, MAX_FUNCTION_PARTS, "metadata entries")
    _metadata("the model", model.metadata_props)
    for entry in model.metadata_props:
        if entry.key in _RUNTIME_SETTINGS:
            raise FileReference(
                f"the model brings settings of its runtime ({entry.key!r}); remove that metadata"
            )
    _parts("the model", model.opset_import, MAX_FUNCTION_PARTS, "opset imports")
    _names("the model", (entry.domain for entry in model.opset_import))
    _names("the model", (model.producer_name, model.domain, model.graph.name))
    for function in model.functions:
        _check_function(function)
    _check_graph("the graph of the model", model.graph)
    _parts("the model", model.configuration, MAX_NODE_PARTS, "device configurations")
    for configuration in model.configuration:
        _parts("the model", configuration.device, MAX_FUNCTION_PARTS, "devices")
        _names("the model", (configuration.name, *configuration.device))
    for training in model.training_info:
        _check_graph("the training graph of the model", training.initialization)
        _check_graph("the training graph of the model", training.algorithm)


def _check_function(function: FunctionProto) -> None:
    _names("a function", (function.name, function.domain, function.overload))
    where = f"function {function.name!r:.80}"
    for listed, kind in (
        (function.metadata_props, "metadata entries"),
        (function.attribute, "slots"),
        (function.attribute_proto, "slots"),
        (function.opset_import, "opset imports"),
        (function.input, "inputs"),
        (function.output, "outputs"),
    ):
        _parts(where, listed, MAX_FUNCTION_PARTS, kind)
    _metadata(where, function.metadata_props)
    _names(where, function.input)
    _names(where, function.output)
    _names(where, function.attribute)
    _names(where, (entry.domain for entry in function.opset_import))
    _check_values(where, function.value_info)
    todo: list[tuple[GraphProto, int]] = []
    for attribute in function.attribute_proto:
        _check_attribute(where, attribute, 1, todo)
    _check_nodes(where, function.node, todo)


def _check_graph(where: str, graph: GraphProto) -> None:
    _check_nodes(where, (), [(graph, 0)])


def _check_nodes(
    where: str, nodes: Iterable[NodeProto], todo: list[tuple[GraphProto, int]]
) -> None:
    """Check the nodes, and those of the graphs in `todo` and in their attributes."""
    for node in nodes:
        _check_node(where, node, 1, todo)
    while todo:
        graph, depth = todo.pop()
        if depth > MAX_GRAPH_DEPTH:
            raise OutOfBounds(f"{where}: graphs nest deeper than {MAX_GRAPH_DEPTH}; flatten them")
        _check_values(where, graph.value_info)
        _check_values(where, graph.input)
        _check_values(where, graph.output)
        for annotation in graph.quantization_annotation:
            entries = annotation.quant_parameter_tensor_names
            _parts(where, entries, MAX_NODE_PARTS, "quantization parameters")
            _names(where, (annotation.tensor_name, *(e.key for e in entries)))
            _names(where, (entry.value for entry in entries))
        for tensor in graph.initializer:
            _names(where, (tensor.name,))
            check_tensor(where, tensor)
        for sparse in graph.sparse_initializer:
            _names(where, (sparse.values.name,))
            _check_sparse(where, sparse)
        for node in graph.node:
            _check_node(where, node, depth + 1, todo)


def _check_node(
    where: str, node: NodeProto, depth: int, todo: list[tuple[GraphProto, int]]
) -> None:
    for ports in (node.input, node.output):
        if len(ports) > MAX_PORTS:
            _parts(f"{where}, op {node.name!r:.80}", ports, MAX_PORTS, "ports")
    texts = (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
    try:
        long = len("".join(texts)) > MAX_NAME_CHARS
    except TypeError:  # bytes, which are not valid UTF-8
        long = True
    if long:
        _names(where, texts)
    if node.op_type in _FILE_OPS:
        raise FileReference(
            f"{where}, op {node.name!r:.80}: {node.domain}::{node.op_type} has its code in a file "
            "of whoever runs it; export the model with plain ONNX ops"
        )
    for configuration in node.device_configurations:
        specs = configuration.sharding_spec
        _parts(f"{where}, op {node.name!r:.80}", specs, MAX_NODE_PARTS, "sharded values")
        _names(where, (configuration.configuration_id, *(spec.tensor_name for spec in specs)))
    metadata = node.metadata_props
    if metadata:
        if len(metadata) > MAX_NODE_PARTS:
            _parts(f"{where}, op {node.name!r:.80}", metadata, MAX_NODE_PARTS, "metadata entries")
        _metadata(where, metadata)
    attributes = node.attribute
    if attributes:
        if len(attributes) > MAX_NODE_PARTS:
            _parts(f"{where}, op {node.name!r:.80}", attributes, MAX_NODE_PARTS, "attributes")
        for attribute in attributes:
            _check_attribute(where, attribute, depth, todo, node)


def _check_attribute(
    where: str,
    attribute: AttributeProto,
    depth: int,
    todo: list[tuple[GraphProto, int]],
    node: NodeProto | None = None,
) -> None:
    # Check all fields, whatever `type` is: other readers may ignore it.
    _names(where, (attribute.name, attribute.ref_attr_name))
    if holds_plain_values(attribute):
        return
    if node is not None:
        where = f"{where}, op {node.name!r:.80}"
    if attribute.HasField("t"):
        check_tensor(where, attribute.t)
    if attribute.HasField("sparse_tensor"):
        _check_sparse(where, attribute.sparse_tensor)
    if attribute.HasField("g"):
        todo.append((attribute.g, depth))
    if attribute.HasField("tp"):
        check_type(where, attribute.tp)
    for listed, kind in (
        (attribute.graphs, "graphs"),
        (attribute.type_protos, "types"),
    ):
        _parts(where, listed, MAX_NODE_PARTS, kind)
    todo.extend((graph, depth) for graph in attribute.graphs)
    for each in attribute.type_protos:
        check_type(where, each)
    for tensor in attribute.tensors:
        check_tensor(where, tensor)
    for sparse in attribute.sparse_tensors:
        _check_sparse(where, sparse)


def holds_plain_values(attribute: AttributeProto) -> bool:
    """Return True if an attribute holds only numbers and texts, which can name no value."""
    return not (attribute.HasField("t") or nests(attribute))


def nests(attribute: AttributeProto) -> bool:
    """Return True if an attribute holds more than numbers, texts and one tensor."""
    return bool(
        attribute.HasField("g")
        or attribute.HasField("tp")
        or attribute.HasField("sparse_tensor")
        or attribute.tensors
        or attribute.graphs
        or attribute.type_protos
        or attribute.sparse_tensors
    )


def _check_sparse(where: str, sparse: SparseTensorProto) -> None:
    check_tensor(where, sparse.values)
    check_tensor(where, sparse.indices)


def check_tensor(where: str, tensor: TensorProto) -> None:
    """Raise FileReference if a tensor's values are in a file."""
    if tensor.data_location == TensorProto.DEFAULT and not tensor.external_data:
        return
    place = next((e.value for e in tensor.external_data if e.key == "location"), "")
    raise FileReference(
        f"{where}: tensor {tensor.name!r:.80} is to be read from a file ({place[:_SHOWN_CHARS]!r}) "
        "of whoever runs it; write it into the model: onnx.load(path) reads such files in, then "
        "save it without external data"
    )


def _check_values(where: str, infos: Iterable[Any]) -> None:
    for info in infos:
        kind = info.type
        for text in (info.name, kind.denotation):
            if type(text) is not str or len(text) > MAX_NAME_CHARS:
                _names(where, (text,))
        if not kind.HasField("tensor_type"):
            check_type(where, kind)
        elif kind.tensor_type.HasField("shape"):
            _check_axes(where, kind.tensor_type.shape.dim)


def _check_axes(where: str, axes: Any) -> None:
    if len(axes) > MAX_AXES:
        raise OutOfBounds(f"{where}: a shape of {len(axes)} axes; at most {MAX_AXES} are taken")
    for axis in axes:
        _names(where, (axis.dim_param, axis.denotation))


def check_type(where: str, kind: Any) -> None:
    """Raise OutOfBounds if a TypeProto nests too deep or holds a long text."""
    for _ in range(MAX_TYPE_DEPTH):
        _names(where, (kind.denotation, kind.opaque_type.domain, kind.opaque_type.name))
        inner = kind.WhichOneof("value")
        if inner == "tensor_type":
            _check_axes(where, kind.tensor_type.shape.dim)
        if inner == "sequence_type":
            kind = kind.sequence_type.elem_type
        elif inner == "optional_type":
            kind = kind.optional_type.elem_type
        elif inner == "map_type":
            kind = kind.map_type.value_type
        else:
            return
    raise OutOfBounds(f"{where}: a type nests deeper than {MAX_TYPE_DEPTH}; declare a simpler one")


def _metadata(where: str, entries: Iterable[Any]) -> None:
    for entry in entries:
        key, value = entry.key, entry.value
        if type(key) is not str or len(key) > MAX_NAME_CHARS:
            _names(where, (key,))
        if type(value) is not str or len(value) > MAX_NAME_CHARS:
            if type(value) is not str:
                _names(where, (value,))
            is_long = key in _LISTS or not key.startswith(keys.PREFIX)
            limit = MAX_TEXT_CHARS if is_long else MAX_NAME_CHARS
            if len(value) > limit:
                raise OutOfBounds(
                    f"{where}: the text under {key[:80]!r} has {len(value)} characters, at most "
                    f"{limit} are taken; shorten it"
                )


def _names(where: str, names: Iterable[str]) -> None:
    for name in names:
        if type(name) is not str:
            raise OutOfBounds(f"{where} holds a name that is not UTF-8 text; make the file again")
        if len(name) > MAX_NAME_CHARS:
            raise OutOfBounds(
                f"{where} holds a name of {len(name)} characters ({name[:40]!r}…), at most "
                f"{MAX_NAME_CHARS} are taken; shorten it"
            )


def _parts(where: str, listed: Sized, limit: int, kind: str) -> None:
    if len(listed) > limit:
        raise OutOfBounds(
            f"{where} has {len(listed)} {kind}, at most {limit} are taken; split it up"
        )
