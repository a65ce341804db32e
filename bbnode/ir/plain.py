"""A program as plain Python objects: what the compiler's passes work on.

Rule: `plain_proto.py` makes these of a ModelProto, once, and a ModelProto of these, once; between
the two nothing touches a protobuf but the attributes. An AttributeProto (it may hold hundreds of
megabytes of weights) is shared by all nodes and functions that carry it and is never changed:
whoever wants another one replaces it in the node's list. So are the types of values.

The objects have the names of their protobufs' fields, so that both read alike; metadata and types
of values are dicts, in recorded order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import onnx
from onnx import AttributeProto, NodeProto, TypeProto

from bbnode.ir import keys, types
from bbnode.ir.types import TypeNode

FunctionKey = tuple[str, str, str]

# Defaults and stamps that a compile writes again and again; a few hundred bytes each.
_SHARED_ATTRIBUTES = 4096


class Opset(NamedTuple):
    """One entry of `opset_import`."""

    domain: str
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class ValueType:
    """The declared type of a value; equal ones within a program are one object.

    Attributes:
        kind: the type of our lattice, or None when it holds no such.
        proto: the declaration itself, with the shape where there is one; never changed.
        content: its deterministic bytes.
        is_foreign: whether it is a type of ONNX's that our lattice does not hold.
    """

    kind: TypeNode | None
    proto: TypeProto
    content: bytes
    is_foreign: bool

    @classmethod
    def of_proto(cls, proto: TypeProto) -> ValueType:
        """The type that a TypeProto declares."""
        kind = types.type_from_proto(proto)
        content = proto.SerializeToString(deterministic=True)
        return cls(kind, proto, content, _is_foreign(proto, kind))

    @classmethod
    def of(cls, kind: TypeNode) -> ValueType:
        """A type of the lattice, without a shape."""
        return _of_kind(kind)


@cache
def _of_kind(kind: TypeNode) -> ValueType:
    proto = types.type_to_proto(kind)
    return ValueType(kind, proto, proto.SerializeToString(deterministic=True), is_foreign=False)


def _is_foreign(proto: TypeProto, kind: TypeNode | None) -> bool:
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        element = proto.tensor_type.elem_type
        return element not in types.TENSOR_BY_ELEM and element != onnx.TensorProto.UNDEFINED
    return which is not None and kind is None


@dataclass(slots=True, eq=False)
class Node:
    """One op. Inputs, outputs and metadata are the node's own and may be changed in place.

    `extras` are the NodeProto's fields that no pass knows, as an otherwise empty NodeProto.
    """

    op_type: str
    domain: str = ""
    name: str = ""
    input: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    attribute: list[AttributeProto] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    overload: str = ""
    doc_string: str = ""
    extras: NodeProto | None = None

    def copy(self) -> Node:
        """A node of its own; attributes are shared."""
        return Node(
            self.op_type,
            self.domain,
            self.name,
            self.input.copy(),
            self.output.copy(),
            self.attribute.copy(),
            self.metadata.copy(),
            self.overload,
            self.doc_string,
            self.extras,
        )

    def content(self) -> tuple[object, ...]:
        """Everything that the node says; equal tuples mean equal nodes."""
        return (
            *(self.op_type, self.domain, self.name, self.overload, self.doc_string),
            *(tuple(self.input), tuple(self.output), tuple(self.metadata.items())),
            *(a.SerializeToString(deterministic=True) for a in self.attribute),
        )

    def find_attr(self, name: str) -> AttributeProto | None:
        """The attribute itself, to be looked at only, or None."""
        for attribute in self.attribute:
            if attribute.name == name:
                return attribute
        return None

    def get_attr(self, name: str, default: Any = None) -> Any:
        """The Python value of an attribute (strings stay bytes), or `default`."""
        for attribute in self.attribute:
            if attribute.name == name:
                return onnx.helper.get_attribute_value(attribute)
        return default

    def set_attr(self, name: str, value: Any) -> None:
        """Write one attribute, replacing one of the same name; the new one is the last."""
        for index, attribute in enumerate(self.attribute):
            if attribute.name == name:
                del self.attribute[index]
                break
        self.attribute.append(make_attribute(name, value))


@dataclass(slots=True, eq=False)
class Function:
    """One function. `types` are the declared types of values, in the order of `value_info`.

    `notes` are doc strings and metadata of values, where there are any, as ValueInfoProtos.
    """

    name: str = ""
    domain: str = ""
    overload: str = ""
    doc_string: str = ""
    input: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    attribute: list[str] = field(default_factory=list)
    attribute_proto: list[AttributeProto] = field(default_factory=list)
    node: list[Node] = field(default_factory=list)
    opset_import: list[Opset] = field(default_factory=list)
    types: dict[str, ValueType] = field(default_factory=dict)
    notes: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Function:
        """A function of its own, with nodes of its own."""
        return Function(
            self.name,
            self.domain,
            self.overload,
            self.doc_string,
            self.input.copy(),
            self.output.copy(),
            self.attribute.copy(),
            self.attribute_proto.copy(),
            [node.copy() for node in self.node],
            self.opset_import.copy(),
            self.types.copy(),
            self.notes.copy(),
            self.metadata.copy(),
        )

    def kinds(self) -> dict[str, TypeNode]:
        """Lattice types of all values that declare one."""
        return {name: t.kind for name, t in self.types.items() if t.kind is not None}

    def kind_of(self, value: str) -> TypeNode | None:
        """The lattice type of one value, if it declares one."""
        found = self.types.get(value)
        return None if found is None else found.kind

    def declare(self, known: Mapping[str, TypeNode]) -> None:
        """Declare or replace the types of many values, new ones in the mapping's order.

        A tensor keeps the shape that it was declared with.
        """
        for name, kind in known.items():
            before = self.types.get(name)
            if before is None or before.kind is not kind:
                self.types[name] = _with_shape(kind, before)

    def declare_as(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Declare each new value with the type of another one: `(new, like)`, in order.

        `like` may be a new value as well. One whose type nobody knows is declared as Any.
        """
        for new, like in pairs:
            if new not in self.types:
                self.types[new] = self.types.get(like) or ValueType.of(types.ANY)

    def keep_types(self, names: Container[str]) -> None:
        """Forget the declarations of all values but `names`."""
        self.types = {name: kind for name, kind in self.types.items() if name in names}


def _with_shape(kind: TypeNode, before: ValueType | None) -> ValueType:
    plain = ValueType.of(kind)
    if before is None or not before.proto.HasField("tensor_type"):
        return plain
    if not before.proto.tensor_type.HasField("shape") or not plain.proto.HasField("tensor_type"):
        return plain
    proto = TypeProto()
    proto.CopyFrom(plain.proto)
    proto.tensor_type.shape.CopyFrom(before.proto.tensor_type.shape)
    return ValueType.of_proto(proto)


@dataclass(slots=True, eq=False)
class Program:
    """A model without its graph, of which only the name is left.

    `extras` are the ModelProto's fields that no pass knows, as an otherwise empty ModelProto.
    """

    ir_version: int = keys.FRAMEWORK_IR_VERSION
    producer_name: str = ""
    graph_name: str = ""
    functions: list[Function] = field(default_factory=list)
    opset_import: list[Opset] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    extras: onnx.ModelProto | None = None


def make_attribute(name: str, value: Any) -> AttributeProto:
    """An attribute of a Python value; small equal ones are one object."""
    if type(value) is int:
        return _int_attribute(name, value)
    if type(value) is str:
        return _text_attribute(name, value.encode())
    if type(value) is bytes:
        return _text_attribute(name, value)
    return onnx.helper.make_attribute(name, value)


@lru_cache(maxsize=_SHARED_ATTRIBUTES)
def _int_attribute(name: str, value: int) -> AttributeProto:
    return AttributeProto(name=name, type=AttributeProto.INT, i=value)


@lru_cache(maxsize=_SHARED_ATTRIBUTES)
def _text_attribute(name: str, value: bytes) -> AttributeProto:
    return AttributeProto(name=name, type=AttributeProto.STRING, s=value)


def renamed_attribute(attribute: AttributeProto, name: str) -> AttributeProto:
    """A copy of an attribute under another name."""
    copy = AttributeProto()
    copy.CopyFrom(attribute)
    copy.name = name
    return copy


def is_wire(node: Node | NodeProto, *op_types: str) -> bool:
    """Whether a node is a wire op, of one of `op_types` when any are given."""
    return node.domain == keys.WIRE_DOMAIN and (not op_types or node.op_type in op_types)


def is_role(node: Node) -> bool:
    """Whether a node calls a component's method: an op of a role, or of a protocol."""
    return node.domain.startswith((keys.ROLE_DOMAIN_PREFIX, keys.PROTOCOL_DOMAIN_PREFIX))


def function_key(function: Function) -> FunctionKey:
    """`(domain, name, overload)`: what a call resolves against."""
    return (function.domain, function.name, function.overload)


def call_key(node: Node) -> FunctionKey:
    """The function key that a node would call."""
    return (node.domain, node.op_type, node.overload)


def sorted_opsets(pairs: Iterable[tuple[str, int]]) -> list[Opset]:
    """Opset imports, each once, sorted by domain."""
    return [Opset(domain, version) for domain, version in sorted(set(pairs))]


def inherit(node: Node, source: Node, wanted: Sequence[str]) -> None:
    """Take over those metadata entries of `source` that it has."""
    for key in wanted:
        text = source.metadata.get(key)
        if text is not None:
            node.metadata[key] = text
