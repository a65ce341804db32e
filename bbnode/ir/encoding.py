"""The encoder of graphs into the bytes of an ONNX file.

Rule: the fields of each message are written in the order of their numbers, as in protobuf's
deterministic encoding, so that a model read from these bytes encodes to the same bytes. Protobuf's
own messages take three times as long: a node has a dozen texts, most of which other nodes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import AttributeProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto

from bbnode.ir import keys
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    Body,
    Function,
    OpNode,
    Opset,
    Program,
    Subgraph,
    Tensor,
    ValueType,
)

# Binary attributes are written as uint8 tensors of this name, since ONNX's printer, and every
# strict reader, expect a STRING to be UTF-8.
BYTES_NAME = keys.PREFIX + "bytes"

# The field that holds the value of each kind of attribute.
FIELD_OF = {
    AttributeKind.FLOAT: "f",
    AttributeKind.INT: "i",
    AttributeKind.STRING: "s",
    AttributeKind.TENSOR: "t",
    AttributeKind.GRAPH: "g",
    AttributeKind.FLOATS: "floats",
    AttributeKind.INTS: "ints",
    AttributeKind.STRINGS: "strings",
    AttributeKind.TENSORS: "tensors",
    AttributeKind.GRAPHS: "graphs",
    AttributeKind.SPARSE_TENSOR: "sparse_tensor",
    AttributeKind.SPARSE_TENSORS: "sparse_tensors",
    AttributeKind.TYPE_PROTO: "tp",
    AttributeKind.TYPE_PROTOS: "type_protos",
}
# Kinds of attributes that are too large to compare, or that contain nodes.
WEIGHTS_AND_GRAPHS: frozenset[int] = frozenset(
    {
        *(AttributeKind.TENSOR, AttributeKind.TENSORS, AttributeKind.GRAPH, AttributeKind.GRAPHS),
        *(AttributeKind.SPARSE_TENSOR, AttributeKind.SPARSE_TENSORS),
    }
)
# Size up to which nodes are joined into a piece, while they are in the processor's cache; a node
# with more weights is a piece of its own.
_PIECE_BYTES = 1 << 16
# Texts and entries of metadata that an encoder remembers from one piece to the next.
_REMEMBERED = 4096
# Longer entries are specific to one node, so they are not remembered.
_LONG_ENTRY_BYTES = 128


def _field(number: int, content: bytes) -> bytes:
    """Return a field that holds these bytes."""
    return head_of_field(number, len(content)) + content


def head_of_field(number: int, size: int) -> bytes:
    """Return the head (tag and length) of a field of `size` bytes."""
    return _TAGS[number] + _length(size)


def _length(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SHORT = [_length(number) for number in range(1 << 14)]
_TAGS = [_length(number << 3 | 2) for number in range(32)]


def _text(number: int, text: str) -> bytes:
    data = text.encode()
    size = len(data)
    return _TAGS[number] + (_SHORT[size] if size < len(_SHORT) else _length(size)) + data


def _entry(number: int, key: str, text: str) -> bytes:
    """Return a field that holds one entry of metadata."""
    return _field(number, _text(1, key) + _text(2, text))


class _TextFields(dict[str, bytes]):
    """A cache of encoded text fields, since the same texts occur at many nodes."""

    def __init__(self, number: int) -> None:
        self._tag = _TAGS[number]

    def __missing__(self, text: str) -> bytes:
        data = text.encode()
        size = len(data)
        head = _SHORT[size] if size < len(_SHORT) else _length(size)
        made = self[text] = self._tag + head + data
        return made


class _EntryFields(dict[tuple[str, str], bytes]):
    """A cache of encoded metadata entries; most occur at many nodes, long ones at one."""

    def __init__(self) -> None:
        self._keys = _TextFields(1)

    def __missing__(self, entry: tuple[str, str]) -> bytes:
        key, value = self._keys[entry[0]], entry[1].encode()
        size = len(value)
        head = _SHORT[size] if size < len(_SHORT) else _length(size)
        size += len(key) + len(head) + 1
        whole = _SHORT[size] if size < len(_SHORT) else _length(size)
        made = b"".join((b"\x4a", whole, key, b"\x12", head, value))
        if size < _LONG_ENTRY_BYTES:
            self[entry] = made
        return made


class GraphEncoder:
    """Encodes graphs, with caches of texts, entries and attributes that nodes share."""

    def __init__(self) -> None:
        # One cache per field of a node.
        self._inputs, self._outputs = _TextFields(1), _TextFields(2)
        self._op_types, self._domains = _TextFields(4), _TextFields(7)
        self._entries = _EntryFields()
        self._types: dict[ValueType | None, bytes] = {}
        self._attributes: dict[tuple[str, int], bytes] = {}

    # --- functions and graphs -------------------------------------------------------------

    def function(self, function: Function) -> Iterator[bytes]:
        """Yield a function in pieces of complete fields; pieces with weights are large."""
        parts = [_text(1, function.name)]
        parts += [_text(4, name) for name in function.inputs]
        parts += [_text(5, name) for name in function.outputs]
        parts += [_text(6, name) for name in function.attributes]
        held = 0
        for node in function.nodes:
            content = self.node(node)
            size = len(content)
            if size > _PIECE_BYTES:
                yield b"".join(parts)
                yield b"".join((b"\x3a", _length(size), content))
                parts, held = [], 0
                continue
            parts += (b"\x3a", _SHORT[size] if size < len(_SHORT) else _length(size), content)
            held += size
            if held > _PIECE_BYTES:
                yield b"".join(parts)
                parts, held = [], 0
                self._forget()
        if function.doc_string:
            parts.append(_text(8, function.doc_string))
        parts += [_field(9, _opset(entry)) for entry in function.opset_imports]
        parts.append(_text(10, function.domain))
        parts += self._listed_attributes(11, function.defaults)
        parts += self._infos(12, function, dict.fromkeys((*function.types, *function.notes)))
        if function.overload:
            parts.append(_text(13, function.overload))
        parts += [_entry(14, key, text) for key, text in function.metadata.items()]
        yield b"".join(parts)

    def _forget(self) -> None:
        """Clear caches that have become too large for the processor's cache."""
        for known in (self._inputs, self._outputs, self._entries):
            if len(known) > _REMEMBERED:
                known.clear()

    def graph(self, graph: Subgraph) -> bytes:
        """Return a graph."""
        parts = [_field(1, self.node(node)) for node in graph.nodes]
        parts.append(_text(2, graph.name))
        sparse = []
        for tensor in graph.initializers.values():
            content = tensor.proto.SerializeToString(deterministic=True)
            if tensor.is_sparse:
                sparse.append(_field(15, content))
            else:
                parts += (head_of_field(5, len(content)), content)  # not joined: it is large
        if graph.doc_string:
            parts.append(_text(10, graph.doc_string))
        parts += self._infos(11, graph, graph.inputs)
        parts += self._infos(12, graph, graph.outputs)
        ports = {*graph.inputs, *graph.outputs}
        inside = dict.fromkeys((*graph.types, *graph.notes))
        parts += self._infos(13, graph, [name for name in inside if name not in ports])
        parts.append(graph.extras)  # field 14
        parts += sparse
        parts += [_entry(16, key, text) for key, text in graph.metadata.items()]
        return b"".join(parts)

    def _infos(self, number: int, body: Body, names: Iterable[str]) -> list[bytes]:
        names_of, types, notes, known = self._inputs, body.types, body.notes, self._types
        tag = _TAGS[number]
        made: list[bytes] = []
        for name in names:
            kind = types.get(name)
            content = known.get(kind)
            if content is None:
                content = known[kind] = b"" if kind is None else _field(2, kind.content)
            # It stands in field 1 here as well.
            content = (names_of.get(name) or _text(1, name)) + content
            note = notes.get(name) if notes else None
            if note is not None:
                if note.doc_string:
                    content += _text(3, note.doc_string)
                content += b"".join(_entry(4, key, text) for key, text in note.metadata.items())
            size = len(content)
            made += (tag, _SHORT[size] if size < len(_SHORT) else _length(size), content)
        return made

    # --- nodes and attributes -------------------------------------------------------------

    def node(self, node: OpNode) -> bytes:
        """Return a node."""
        entries = self._entries
        parts = [*map(self._inputs.__getitem__, node.inputs)]
        parts += map(self._outputs.__getitem__, node.outputs)
        if node.name:
            parts.append(_text(3, node.name))  # unique, so not cached
        parts.append(self._op_types[node.op_type])
        if node.attributes:
            parts += self._listed_attributes(5, node.attributes)
        if node.doc_string:
            parts.append(_text(6, node.doc_string))
        if node.domain:
            parts.append(self._domains[node.domain])
        if node.overload:
            parts.append(_text(8, node.overload))
        parts += map(entries.__getitem__, node.metadata.items())
        if node.after:
            parts.append(entries[keys.AFTER_KEY, ",".join(node.after)])
        if node.source_line:
            parts.append(entries[keys.SOURCE_LINE_KEY, node.source_line])
        if node.made_by:
            parts.append(entries[keys.MADE_BY_KEY, node.made_by])
        if node.extras:
            parts.append(_with_names(node))
        return b"".join(parts)

    def _listed_attributes(self, number: int, attributes: Mapping[str, Attribute]) -> list[bytes]:
        known = self._attributes
        made: list[bytes] = []
        for name, attribute in attributes.items():
            content = known.get((name, id(attribute)))
            if content is None and _is_plain_tensor(attribute):
                data = attribute.value.proto.SerializeToString(deterministic=True)
                around = (
                    _text(1, name) + head_of_field(5, len(data)),
                    data,
                    _IS_TENSOR,
                )
                made += (_TAGS[number], _length(sum(map(len, around))), *around)
                continue
            if content is None:
                proto = AttributeProto()
                self.attribute(name, attribute, proto)
                content = proto.SerializeToString(deterministic=True)
                content = _length(len(content)) + content
                if attribute.kind not in WEIGHTS_AND_GRAPHS:
                    known[name, id(attribute)] = content
            made += (_TAGS[number], content)
        return made

    def attribute(self, name: str, attribute: Attribute, into: AttributeProto) -> None:
        """Write an attribute under a name into an empty protobuf."""
        kind, value = attribute.kind, attribute.value
        if kind is AttributeKind.UNDEFINED:
            into.MergeFromString(value)
            into.name = name
            return
        if (
            kind is AttributeKind.STRING
            and value
            and not attribute.reference
            and not _is_text(value)
        ):
            into.name, into.type = name, AttributeProto.TENSOR
            if attribute.doc_string:
                into.doc_string = attribute.doc_string
            into.t.name, into.t.data_type = BYTES_NAME, TensorProto.UINT8
            into.t.dims.append(len(value))
            into.t.raw_data = value
            return
        into.name, into.type = name, int(kind)  # type: ignore[assignment]
        if attribute.reference:
            into.ref_attr_name = attribute.reference
        if attribute.doc_string:
            into.doc_string = attribute.doc_string
        if value is None:
            return
        where = FIELD_OF[kind]
        if kind is AttributeKind.GRAPH:
            into.g.MergeFromString(self.graph(value))
        elif kind is AttributeKind.GRAPHS:
            for graph in value:
                into.graphs.add().MergeFromString(self.graph(graph))
        elif isinstance(value, Tensor):
            getattr(into, where).CopyFrom(value.proto)
        elif isinstance(value, ValueType):
            into.tp.CopyFrom(value.proto())
        elif not isinstance(value, tuple):
            setattr(into, where, value)
        elif value and isinstance(value[0], Tensor):
            getattr(into, where).extend(tensor.proto for tensor in value)
        elif value and isinstance(value[0], ValueType):
            getattr(into, where).extend(kind.proto() for kind in value)
        else:
            getattr(into, where).extend(value)


def _is_plain_tensor(attribute: Attribute) -> bool:
    is_tensor = attribute.kind is AttributeKind.TENSOR and attribute.value is not None
    return is_tensor and not attribute.reference and not attribute.doc_string


# The field `type` of an attribute.
_IS_TENSOR = AttributeProto(type=AttributeProto.TENSOR).SerializeToString()


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _with_names(node: OpNode) -> bytes:
    """Return device configurations with ports replaced by the names of values."""
    proto = NodeProto.FromString(node.extras)
    for configuration in proto.device_configurations:
        kept = []
        for spec in configuration.sharding_spec:
            side, _, index = spec.tensor_name.partition(" ")
            names = node.inputs if side == "input" else node.outputs
            if int(index) < len(names) and names[int(index)]:  # a pass may have taken the port out
                spec.tensor_name = names[int(index)]
                kept.append(spec)
        if len(kept) != len(configuration.sharding_spec):
            del configuration.sharding_spec[:]
            configuration.sharding_spec.extend(kept)
    return proto.SerializeToString(deterministic=True)


# --- models -------------------------------------------------------------------------------


def encoded(
    program: Program, functions: Iterable[Function]
) -> tuple[ModelProto, list[Iterator[bytes]]]:
    """Return a model without functions, and these functions in pieces of whole fields."""
    encoder = GraphEncoder()
    model = ModelProto.FromString(program.extras)
    model.ir_version = program.ir_version
    if program.producer_name:
        model.producer_name = program.producer_name
    if program.graph is not None:
        model.graph.MergeFromString(encoder.graph(program.graph))
    model.graph.name = program.name
    for entry in program.opset_imports:
        model.opset_import.add(domain=entry.domain, version=entry.version)
    for key, value in program.metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model, [encoder.function(function) for function in functions]


def _opset(entry: Opset) -> bytes:
    return OperatorSetIdProto(domain=entry.domain, version=entry.version).SerializeToString()
