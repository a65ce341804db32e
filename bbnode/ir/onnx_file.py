"""Between protobuf and the graph: the one place that knows both.

Rule: nothing of a model is lost on the way there and back, but the order of metadata entries,
what stands twice under one name, and the difference between an empty text and none. The caller's
model is never changed; its weights are shared, and copied once, into the new file. What a model
of any origin may hold (`bounds.py`) is checked on the way in: an ordinary node by a look at what
is read anyway, and where anything is out of the ordinary, `check_bounds` goes through the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import (
    AttributeProto,
    DeviceConfigurationProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
)

from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds, check_type, holds_plain_values, nests
from bbnode.ir.caps import MAX_ARTIFACT_BYTES, MAX_FUNCTION_PARTS, MAX_NAME_CHARS, MAX_NODE_PARTS
from bbnode.ir.encoding import BYTES_NAME, FIELD_OF, WEIGHTS_AND_GRAPHS, GraphEncoder, encoded
from bbnode.ir.errors import AuthorError, DecodeError, ProgramTooLarge
from bbnode.ir.graph import (
    Annotations,
    Attribute,
    AttributeKind,
    Body,
    Function,
    OpNode,
    Opset,
    Program,
    Subgraph,
    Tensor,
    ValueNote,
    ValueType,
    make_node,
)

# What no pass looks at.
_NODE_EXTRAS = ("device_configurations",)
_GRAPH_EXTRAS = ("quantization_annotation",)
_MODEL_EXTRAS = (
    *("producer_version", "domain", "doc_string", "model_version"),
    *("training_info", "configuration"),
)

# The first version of the format that has device configurations.
_CONFIGURATION_IR_VERSION = 11
_KINDS = {int(kind): (kind, name) for kind, name in FIELD_OF.items()}
_NO_VALUE_FIELDS = frozenset({"name", "type", "doc_string", "ref_attr_name"})


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
    """Texts, types and attributes that the nodes of one program share."""

    texts: _Texts = field(default_factory=_Texts)
    types: dict[bytes, ValueType] = field(default_factory=dict)
    attributes: dict[bytes, tuple[str, Attribute]] = field(default_factory=dict)
    checked: bool = True  # True if the bounds are known to hold


@cache
def onnx_schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    """Return ONNX's schema of an op at an opset version ("" is `ai.onnx`), or None."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except (onnx.defs.SchemaError, TypeError):
        return None  # TypeError: a version that no C integer holds


# --- in -----------------------------------------------------------------------------------


def program_of(model: ModelProto) -> Program:
    """Return the graph of a model. The first of several metadata entries of one key counts.

    Raises OutOfBounds when the model is larger or deeper than anything here is made for, or gives
    one op two attributes of one name.
    """
    try:
        _watch_model(model)
        return _program(model, _Shared(_OrdinaryTexts(), checked=False))
    except _Unusual:
        check_bounds(model)
        return _program(model, _Shared())


def parse_model(data: bytes) -> ModelProto:
    """Return the model in `data`; DecodeError when it is none, or only a part of one."""
    try:
        return ModelProto.FromString(data)
    except (ProtobufDecodeError, RecursionError) as error:
        raise DecodeError(f"{len(data)} bytes that are no ONNX model: {error}") from error


def function_of(function: FunctionProto) -> Function:
    """Return the graph of one function; bounds are not checked."""
    return _function(function, _Shared())


def subgraph_of(graph: GraphProto) -> Subgraph:
    """Return the graph of a GraphProto; bounds are not checked."""
    return _subgraph(graph, _Shared())


def node_of(node: NodeProto) -> OpNode:
    """Return one node, in no body; bounds are not checked."""
    return _node(node, _Shared())


def attribute_of(attribute: AttributeProto) -> Attribute:
    """Return one attribute; bounds are not checked."""
    return _attribute(attribute, _Shared())


def has_unknown_fields(message: Message) -> bool:
    """Return True if a protobuf was read with fields that this version of ONNX does not know."""
    return len(UnknownFieldSet(message)) > 0


def type_of(proto: TypeProto) -> ValueType:
    """Return the type that a TypeProto declares."""
    return ValueType.of_content(proto.SerializeToString(deterministic=True))


# Lists of protobufs are read as slices (`[:]`): protobuf makes a list at once, but ends each walk
# by its own iterator with an exception.


def _watch_model(model: ModelProto) -> None:
    graph = model.graph
    if model.training_info or model.configuration or _has_content(graph):
        raise _Unusual
    for text in (model.producer_name, model.domain, graph.name):
        if type(text) is not str or len(text) > MAX_NAME_CHARS:
            raise _Unusual
    if max(len(model.metadata_props), len(model.opset_import)) > MAX_FUNCTION_PARTS:
        raise _Unusual


def _has_content(graph: GraphProto) -> bool:
    return any(found.name != "name" for found, _ in graph.ListFields())


def _watch_function(function: FunctionProto) -> None:
    parts = (
        *(function.metadata_props, function.attribute, function.attribute_proto),
        *(function.opset_import, function.input, function.output),
    )
    if max(map(len, parts)) > MAX_FUNCTION_PARTS or type(function.overload) is not str:
        raise _Unusual
    if not all(holds_plain_values(a) or _is_bytes(a) for a in function.attribute_proto):
        raise _Unusual


def _is_bytes(attribute: AttributeProto) -> bool:
    return attribute.t.name == BYTES_NAME and not (
        nests(attribute) or attribute.t.external_data or attribute.t.data_location
    )


def _watch_attribute(attribute: AttributeProto, texts: _Texts) -> None:
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
        name=model.graph.name,
        functions=[_function(function, shared) for function in model.functions],
        opset_imports=_opsets(model.opset_import, shared.texts),
        metadata=_metadata(model.metadata_props, shared.texts),
        graph=_subgraph(model.graph, shared) if _has_content(model.graph) else None,
        extras=_extras(model, _MODEL_EXTRAS),
    )


def _function(function: FunctionProto, shared: _Shared) -> Function:
    texts = shared.texts
    if not shared.checked:
        _watch_function(function)
    made = Function(
        name=texts[function.name],
        inputs=[texts[name] for name in function.input[:]],
        outputs=[texts[name] for name in function.output[:]],
        metadata=_metadata(function.metadata_props, texts),
        doc_string=function.doc_string,
        domain=texts[function.domain],
        overload=function.overload,
        attributes=[texts[name] for name in function.attribute],
        defaults=_attributes(function.attribute_proto, shared),
        opset_imports=_opsets(function.opset_import, texts),
    )
    _take_infos(made, function.value_info[:], shared)
    made.nodes = [_node(node, shared) for node in function.node[:]]
    return made


def _subgraph(graph: GraphProto, shared: _Shared) -> Subgraph:
    texts = shared.texts
    made = Subgraph(
        name=graph.name,
        inputs=[texts[info.name] for info in graph.input],
        outputs=[texts[info.name] for info in graph.output],
        initializers={tensor.name: Tensor(tensor) for tensor in graph.initializer},
        metadata=_metadata(graph.metadata_props, texts),
        doc_string=graph.doc_string,
        extras=_extras(graph, _GRAPH_EXTRAS),
    )
    made.initializers.update((t.values.name, Tensor(t)) for t in graph.sparse_initializer)
    for infos in (graph.input, graph.output, graph.value_info):
        _take_infos(made, infos, shared)
    made.nodes = [_node(node, shared) for node in graph.node[:]]
    return made


def _take_infos(body: Body, infos: Iterable[ValueInfoProto], shared: _Shared) -> None:
    for info in infos:
        name = shared.texts[info.name]
        if info.HasField("type"):
            content = info.type.SerializeToString()
            found = shared.types.get(content)
            if found is None:
                if not shared.checked:
                    check_type(f"function {body.name!r:.80}", info.type)
                found = shared.types[content] = type_of(info.type)
            body.types[name] = found
        if info.doc_string or info.metadata_props:
            entries = _metadata(info.metadata_props, shared.texts)
            body.notes[name] = ValueNote(info.doc_string, entries)


def _node(node: NodeProto, shared: _Shared) -> OpNode:
    texts = shared.texts
    given, entries, placed = node.attribute, node.metadata_props[:], node.device_configurations
    attributes = _attributes(given, shared) if given else {}
    metadata = _metadata(entries, texts)
    after = metadata.pop(keys.AFTER_KEY, "")
    inputs = tuple(map(texts.__getitem__, node.input[:]))
    outputs = tuple(map(texts.__getitem__, node.output[:]))
    if not shared.checked:
        count = max(len(inputs), len(outputs), len(entries), len(given) if attributes else 0)
        if count > MAX_NODE_PARTS or placed:
            raise _Unusual
    return make_node(
        texts[node.op_type],
        texts[node.domain],
        texts[node.name],
        inputs,
        outputs,
        attributes,
        tuple([texts[name] for name in after.split(",") if name]) if after else (),
        metadata,
        metadata.pop(keys.SOURCE_LINE_KEY, ""),
        metadata.pop(keys.MADE_BY_KEY, ""),
        texts[node.overload],
        texts[node.doc_string],
        _node_extras(node, inputs, outputs) if placed else b"",
    )


def _node_extras(node: NodeProto, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """A node's device configurations, which name its values by port: renaming leaves them right."""
    made = NodeProto.FromString(_extras(node, _NODE_EXTRAS))
    ports = {name: f"output {index}" for index, name in enumerate(outputs)}
    ports.update((name, f"input {index}") for index, name in enumerate(inputs))
    for configuration in made.device_configurations:
        for spec in configuration.sharding_spec:
            if spec.tensor_name not in ports:
                raise OutOfBounds(
                    f"op {node.name!r:.80}: its device configuration shards "
                    f"{spec.tensor_name!r:.80}, which it neither reads nor makes; correct the name"
                )
            spec.tensor_name = ports[spec.tensor_name]
    return made.SerializeToString(deterministic=True)


def _attributes(attributes: Iterable[AttributeProto], shared: _Shared) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for attribute in attributes:
        known = None
        if attribute.type not in WEIGHTS_AND_GRAPHS:
            data = attribute.SerializeToString()
            known = shared.attributes.get(data)
        if known is None:
            if not shared.checked:
                _watch_attribute(attribute, shared.texts)
            known = (shared.texts[attribute.name], _attribute(attribute, shared))
            if attribute.type not in WEIGHTS_AND_GRAPHS:
                shared.attributes[data] = known
        if known[0] in found:
            raise OutOfBounds(f"the attribute {known[0]!r:.80} is given twice; give it once")
        found[known[0]] = known[1]
    return found


def _attribute(attribute: AttributeProto, shared: _Shared) -> Attribute:
    kind, name = _KINDS.get(attribute.type, (AttributeKind.UNDEFINED, ""))
    if kind is AttributeKind.TENSOR and attribute.t.name == BYTES_NAME:
        return _bytes_of(attribute)
    reference = attribute.ref_attr_name
    held = {found.name for found, _ in attribute.ListFields()} - _NO_VALUE_FIELDS
    value: Any = None
    if not held and reference and name:
        pass
    elif held == {name} or (not held and _is_list(name)):
        value = getattr(attribute, name)
        if _is_list(name):
            value = tuple([_value(each, shared) for each in value])
        else:
            value = _value(value, shared)
    else:  # it says it is one kind, and holds another or none
        return Attribute(
            AttributeKind.UNDEFINED, attribute.SerializeToString(deterministic=True), reference
        )
    if kind in _TOLD_BY_VALUE and not reference and not attribute.doc_string:
        return Attribute.of(value)
    return Attribute(kind, value, reference, attribute.doc_string)


def _bytes_of(attribute: AttributeProto) -> Attribute:
    tensor = attribute.t
    if tensor.data_type != TensorProto.UINT8 or len(tensor.dims) != 1 or tensor.external_data:
        raise OutOfBounds(
            f"the attribute {attribute.name!r:.80} is a tensor called {BYTES_NAME}, but no row of "
            "bytes; compile the program again"
        )
    if not tensor.HasField("raw_data"):  # a tool wrote its numbers one by one
        return Attribute(AttributeKind.STRING, bytes(tensor.int32_data), "", attribute.doc_string)
    return Attribute(AttributeKind.STRING, tensor.raw_data, "", attribute.doc_string)


# Kinds that the Python value tells; equal ones are one object in all programs.
_TOLD_BY_VALUE = frozenset({AttributeKind.INT, AttributeKind.STRING})


def _is_list(name: str) -> bool:
    return name.endswith("s") and name != "s"


def _value(value: Any, shared: _Shared) -> Any:
    if isinstance(value, TensorProto | SparseTensorProto):
        return Tensor(value)
    if isinstance(value, GraphProto):
        return _subgraph(value, shared)
    if isinstance(value, TypeProto):
        return type_of(value)
    return value


def _opsets(entries: Iterable[Any], texts: _Texts) -> list[Opset]:
    return [Opset(texts[entry.domain], entry.version) for entry in entries]


def _metadata(entries: Iterable[Any], texts: _Texts) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        key = texts[entry.key]
        if key not in found:
            found[key] = texts[entry.value]
    return found


def _extras(proto: Any, names: Iterable[str]) -> bytes:
    extras = None
    for name in names:
        value = getattr(proto, name, None)
        if value:
            extras = extras or type(proto)()
            if isinstance(value, str | int):
                setattr(extras, name, value)
            else:
                getattr(extras, name).extend(value)
    return b"" if extras is None else extras.SerializeToString(deterministic=True)


# --- out ----------------------------------------------------------------------------------


_SEAL_BYTES = 1 << 20  # that a program grows by behind its functions: heads of fields, and its seal


def model_of(program: Program, functions: Iterable[Function] | None = None) -> ModelProto:
    """Return a model of its own, with `functions` in the place of the program's if given.

    Raises ProgramTooLarge for one that protobuf can't hold.
    """
    made, encoders = encoded(program, program.functions if functions is None else functions)
    add_functions(made, encoders)
    return made


def add_functions(model: ModelProto, encoders: Iterable[Iterable[bytes]]) -> None:
    """Put functions, each in pieces of whole fields, behind those that a model has.

    Raises ProgramTooLarge where they are more than protobuf holds in one message.
    """
    size = model.ByteSize()
    for pieces in encoders:
        function = model.functions.add()
        for piece in pieces:
            size += len(piece)
            if size > MAX_ARTIFACT_BYTES - _SEAL_BYTES:
                raise ProgramTooLarge(
                    f"the program is larger than {MAX_ARTIFACT_BYTES} bytes (2 GiB) with its "
                    "weights, the most that protobuf holds in one message, and an artifact is "
                    "one; each slot has a model of its own, so that one with a server's and the "
                    "clients' can be half as large: take a smaller model, or train adapters of it "
                    "(lora)"
                )
            function.MergeFromString(piece)


def function_proto(function: Function) -> FunctionProto:
    """Return a function as a protobuf."""
    return FunctionProto.FromString(b"".join(GraphEncoder().function(function)))


def graph_proto(graph: Subgraph) -> GraphProto:
    """Return a graph as a protobuf."""
    return GraphProto.FromString(GraphEncoder().graph(graph))


def node_proto(node: OpNode) -> NodeProto:
    """Return a node as a protobuf."""
    return NodeProto.FromString(GraphEncoder().node(node))


def attribute_proto(name: str, attribute: Attribute) -> AttributeProto:
    """Return an attribute as a protobuf."""
    proto = AttributeProto()
    GraphEncoder().attribute(name, attribute, proto)
    return proto


def attribute_content(attribute: Attribute) -> bytes:
    """Return bytes that are those of equal attributes alone, whichever form a file gives them."""
    proto = attribute_proto("", attribute)
    if attribute.kind is AttributeKind.STRING and proto.type == AttributeProto.TENSOR:
        proto.ClearField("t")
        proto.type, proto.s = AttributeProto.STRING, attribute.value
    return proto.SerializeToString(deterministic=True)


# --- what programs share with the models they are made of -----------------------------------


class ConflictingConfiguration(AuthorError):
    """Two models of one program describe the same device configuration differently."""


def annotations_of(graph: Subgraph) -> Annotations:
    """Return the quantization annotations of a graph; the first of several of a key counts."""
    found: Annotations = {}
    for annotation in GraphProto.FromString(graph.extras).quantization_annotation:
        held = found.setdefault(annotation.tensor_name, {})
        for entry in annotation.quant_parameter_tensor_names:
            held.setdefault(entry.key, entry.value)
    return found


def annotated(graph: Subgraph, annotations: Annotations) -> Subgraph:
    """Set the quantization annotations of a graph and return it."""
    made = GraphProto()
    for value, held in annotations.items():
        entries = made.quantization_annotation.add(tensor_name=value).quant_parameter_tensor_names
        for key, name in held.items():
            entries.add(key=key, value=name)
    graph.extras = made.SerializeToString(deterministic=True)
    return graph


def joined_extras(first: bytes, second: bytes) -> bytes:
    """Return the device configurations and training graphs of two models, each once.

    Args:
        first, second: `Program.extras`; other fields of theirs are left out.

    Raises:
        ConflictingConfiguration: one name means two configurations.
    """
    made = ModelProto()
    known: dict[str, DeviceConfigurationProto] = {}
    for model in map(ModelProto.FromString, (first, second)):
        for configuration in model.configuration:
            before = known.setdefault(configuration.name, configuration)
            if before is configuration:
                made.configuration.append(configuration)
            elif before != configuration:
                raise ConflictingConfiguration(
                    f"two models of the program describe the device configuration "
                    f"{configuration.name!r:.80} differently; give one of them another name"
                )
        made.training_info.extend(t for t in model.training_info if t not in made.training_info)
    return made.SerializeToString(deterministic=True)


def ir_version_for(extras: bytes, version: int) -> int:
    """Return the version of the format that a program of these extras needs, at least `version`."""
    needs = bool(ModelProto.FromString(extras).configuration)
    return max(version, _CONFIGURATION_IR_VERSION) if needs else version
