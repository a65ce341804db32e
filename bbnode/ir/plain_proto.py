"""Between a ModelProto and the plain objects of `plain.py`.

Rule: nothing of a node, a function or a model is lost on the way there and back; only the
model's graph stays behind, since a program lives in its functions. The caller's model is never
changed: attributes are shared with it and copied into the new model at the end, once.

What comes from elsewhere is held to `bounds.py` on the way: an ordinary node by a look at what is
read anyway, and where anything is out of the ordinary, `check_bounds` goes through the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

from bbnode.ir.bounds import check_bounds, check_type, holds_plain_values, nests
from bbnode.ir.caps import MAX_FUNCTION_PARTS, MAX_NAME_CHARS, MAX_NODE_PARTS
from bbnode.ir.plain import Function, Node, Opset, Program, ValueType

# Newer versions of ONNX have these; no pass looks at them.
_NODE_EXTRAS = ("device_configurations",)
_MODEL_EXTRAS = ("training_info", "configuration")
_MODEL_TEXTS = ("producer_version", "domain", "doc_string", "model_version")


class _Texts(dict[str, str]):
    """Equal texts of one program as one object.

    A protobuf gives a new text at each look. Names and metadata keys recur at every op, and
    passes look them up all the time: one object each is hashed once, and fits the cache.
    """

    def __missing__(self, text: str) -> str:
        self[text] = text
        return text


class _OrdinaryTexts(_Texts):
    """Texts of a model that nobody has checked; each is looked at when it is first met."""

    def __missing__(self, text: str) -> str:
        if type(text) is not str or len(text) > MAX_NAME_CHARS:
            raise _Unusual
        self[text] = text
        return text


class _Unusual(Exception):
    """Something that may be out of bounds; never leaves this file."""


@dataclass(slots=True)
class _Shared:
    """What the nodes and functions of one program have in common."""

    texts: _Texts = field(default_factory=_Texts)
    types: dict[bytes, ValueType] = field(default_factory=dict)
    checked: bool = True  # whether the bounds are known to hold


def program_of(model: ModelProto) -> Program:
    """The plain form of a model. The first of several metadata entries of one key counts.

    Raises OutOfBounds when the model is larger or deeper than anything here is made for.
    """
    try:
        _watch_model(model)
        return _program(model, _Shared(_OrdinaryTexts(), checked=False))
    except _Unusual:
        check_bounds(model)
        return _program(model, _Shared())


def _watch_model(model: ModelProto) -> None:
    graph = model.graph
    if model.training_info:
        raise _Unusual
    if graph.node or graph.value_info or graph.input or graph.output or graph.initializer:
        raise _Unusual
    for text in (model.producer_name, model.domain, graph.name):
        if type(text) is not str or len(text) > MAX_NAME_CHARS:
            raise _Unusual
    if max(len(model.metadata_props), len(model.opset_import)) > MAX_FUNCTION_PARTS:
        raise _Unusual


def _watch_function(function: FunctionProto, texts: _Texts) -> None:
    parts = (
        *(function.metadata_props, function.attribute, function.attribute_proto),
        *(function.opset_import, function.input, function.output),
    )
    if max(map(len, parts)) > MAX_FUNCTION_PARTS or type(function.overload) is not str:
        raise _Unusual
    for attribute in function.attribute_proto:
        texts[attribute.name]
        if not holds_plain_values(attribute):
            raise _Unusual


def _watch_node(node: NodeProto, texts: _Texts) -> None:
    attributes = node.attribute
    parts = (node.input, node.output, node.metadata_props, attributes)
    if max(map(len, parts)) > MAX_NODE_PARTS:
        raise _Unusual
    for attribute in attributes:
        texts[attribute.name], texts[attribute.ref_attr_name]
        is_elsewhere = attribute.HasField("t") and (
            attribute.t.data_location or attribute.t.external_data
        )
        if is_elsewhere or nests(attribute):
            raise _Unusual


def _program(model: ModelProto, shared: _Shared) -> Program:
    return Program(
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        graph_name=model.graph.name,
        functions=[_function(function, shared) for function in model.functions],
        opset_import=_opsets(model.opset_import, shared.texts),
        metadata=_metadata(model.metadata_props, shared.texts),
        extras=_model_extras(model),
    )


def function_of(function: FunctionProto) -> Function:
    """The plain form of one function."""
    return _function(function, _Shared())


def _function(function: FunctionProto, shared: _Shared) -> Function:
    texts = shared.texts
    if not shared.checked:
        _watch_function(function, texts)
    types: dict[str, ValueType] = {}
    notes: dict[str, ValueInfoProto] = {}
    for info in function.value_info:
        name = texts[info.name]
        if info.HasField("type"):
            content = info.type.SerializeToString()
            found = shared.types.get(content)
            if found is None:
                if not shared.checked:
                    check_type(f"function {function.name!r:.80}", info.type)
                found = shared.types[content] = ValueType.of_proto(info.type)
            types[name] = found
        if info.doc_string or info.metadata_props:
            notes[name] = info
    return Function(
        texts[function.name],
        texts[function.domain],
        function.overload,
        function.doc_string,
        [texts[name] for name in function.input],
        [texts[name] for name in function.output],
        [texts[name] for name in function.attribute],
        list(function.attribute_proto),
        [_node(node, shared) for node in function.node],
        _opsets(function.opset_import, texts),
        types,
        notes,
        _metadata(function.metadata_props, texts),
    )


def _node(node: NodeProto, shared: _Shared) -> Node:
    texts = shared.texts
    if not shared.checked:
        _watch_node(node, texts)
    return Node(
        texts[node.op_type],
        texts[node.domain],
        texts[node.name],
        [texts[name] for name in node.input],
        [texts[name] for name in node.output],
        list(node.attribute),
        _metadata(node.metadata_props, texts),
        texts[node.overload],
        texts[node.doc_string],
        _extras(node),
    )


def _opsets(entries: Iterable[Any], texts: _Texts) -> list[Opset]:
    return [Opset(texts[entry.domain], entry.version) for entry in entries]


def _metadata(entries: Iterable[Any], texts: _Texts) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        key = texts[entry.key]
        if key not in found:
            found[key] = texts[entry.value]
    return found


def _extras(node: NodeProto) -> NodeProto | None:
    for name in _NODE_EXTRAS:
        values = getattr(node, name, ())
        if values:
            extras = NodeProto()
            getattr(extras, name).extend(values)
            return extras
    return None


def _model_extras(model: ModelProto) -> ModelProto | None:
    extras = ModelProto()
    for name in _MODEL_TEXTS:
        value = getattr(model, name)
        if value:
            setattr(extras, name, value)
    for name in _MODEL_EXTRAS:
        getattr(extras, name, []).extend(getattr(model, name, ()))
    return extras if extras.ListFields() else None


def model_of(program: Program, functions: Iterable[Function] | None = None) -> ModelProto:
    """A model of its own, with `functions` in the place of the program's if they are given."""
    model = ModelProto()
    if program.extras is not None:
        model.CopyFrom(program.extras)
    model.ir_version = program.ir_version
    if program.producer_name:
        model.producer_name = program.producer_name
    model.graph.name = program.graph_name
    for entry in program.opset_import:
        model.opset_import.add(domain=entry.domain, version=entry.version)
    _write_metadata(model, program.metadata)
    for function in program.functions if functions is None else functions:
        write_function(function, model.functions.add())
    return model


def write_function(function: Function, into: FunctionProto) -> None:
    """Fill an empty FunctionProto."""
    into.name, into.domain = function.name, function.domain
    if function.overload:
        into.overload = function.overload
    if function.doc_string:
        into.doc_string = function.doc_string
    into.input.extend(function.input)
    into.output.extend(function.output)
    into.attribute.extend(function.attribute)
    into.attribute_proto.extend(function.attribute_proto)
    for entry in function.opset_import:
        into.opset_import.add(domain=entry.domain, version=entry.version)
    nodes = into.node
    for node in function.node:
        write_node(node, nodes.add())
    infos = into.value_info
    for name, kind in function.types.items():
        note = function.notes.get(name) if function.notes else None
        info = infos.add(name=name, type=kind.proto)
        if note is not None:
            info.doc_string = note.doc_string
            info.metadata_props.extend(note.metadata_props)
    _write_metadata(into, function.metadata)


def proto_of_node(node: Node) -> NodeProto:
    """A NodeProto of its own."""
    proto = NodeProto()
    write_node(node, proto)
    return proto


def write_node(node: Node, into: NodeProto) -> None:
    """Fill an empty NodeProto."""
    if node.extras is not None:
        into.CopyFrom(node.extras)
    into.op_type, into.name = node.op_type, node.name
    into.domain = node.domain
    if node.overload:
        into.overload = node.overload
    if node.doc_string:
        into.doc_string = node.doc_string
    into.input.extend(node.input)
    into.output.extend(node.output)
    if node.attribute:
        into.attribute.extend(node.attribute)
    _write_metadata(into, node.metadata)


def _write_metadata(into: Any, metadata: Mapping[str, str]) -> None:
    add = into.metadata_props.add
    for key, value in metadata.items():
        add(key=key, value=value)
