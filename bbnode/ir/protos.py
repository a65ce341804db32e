"""Small helpers over ONNX protobufs: metadata, attributes, names.

Rule: all reading and writing of `metadata_props` goes through here, and writing an entry
that exists replaces it in place, so that every stamp is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from bbnode.ir import keys, types
from bbnode.ir.errors import AuthorError
from bbnode.ir.types import TypeNode

HasMetadata = NodeProto | FunctionProto | ModelProto | GraphProto | onnx.ValueInfoProto


def onnx_schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    """ONNX's schema of an op at an opset version ("" is `ai.onnx`), or None."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except (onnx.defs.SchemaError, TypeError):
        return None  # TypeError: a version that no C integer holds


def get_meta(proto: HasMetadata, key: str) -> str | None:
    """The metadata value under `key`, or None."""
    for entry in proto.metadata_props:
        if entry.key == key:
            return str(entry.value)
    return None


def all_meta(proto: HasMetadata) -> dict[str, str]:
    """All metadata entries; the last of a repeated key wins."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def set_meta(proto: HasMetadata, key: str, value: str) -> None:
    """Write one metadata entry, replacing one of the same key."""
    for entry in proto.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    proto.metadata_props.add(key=key, value=value)


def del_meta(proto: HasMetadata, key: str) -> None:
    """Remove all metadata entries under `key`."""
    kept = [(e.key, e.value) for e in proto.metadata_props if e.key != key]
    if len(kept) != len(proto.metadata_props):
        del proto.metadata_props[:]
        for k, v in kept:
            proto.metadata_props.add(key=k, value=v)


def get_attr(node: NodeProto, name: str, default: Any = None) -> Any:
    """The Python value of an attribute (strings decoded as bytes stay bytes), or `default`.

    Raises AuthorError for one without a value: of no type, or that stands for another.
    """
    for attribute in node.attribute:
        if attribute.name == name:
            try:
                return onnx.helper.get_attribute_value(attribute)
            except ValueError as error:
                raise AuthorError(
                    f"op {node.name!r:.80}: attribute {name!r} has no value; compile it again"
                ) from error
    return default


def get_attr_proto(node: NodeProto, name: str) -> AttributeProto | None:
    """The attribute itself, or None."""
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute
    return None


def set_attr(node: NodeProto, name: str, value: Any) -> None:
    """Write one attribute, replacing one of the same name."""
    for index, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[index]
            break
    node.attribute.append(onnx.helper.make_attribute(name, value))


def is_onnx_domain(domain: str) -> bool:
    """Whether a domain is upstream ONNX (written "" or "ai.onnx")."""
    return domain in ("", keys.ONNX_DOMAIN)


def is_wire(node: NodeProto, *op_types: str) -> bool:
    """Whether a node is a wire op, of one of `op_types` when any are given."""
    return node.domain == keys.WIRE_DOMAIN and (not op_types or node.op_type in op_types)


def is_role(node: NodeProto) -> bool:
    """Whether a node calls a component's method: an op of a role, or of a protocol."""
    return bool(node.domain.startswith((keys.ROLE_DOMAIN_PREFIX, keys.PROTOCOL_DOMAIN_PREFIX)))


def function_key(function: FunctionProto) -> tuple[str, str, str]:
    """`(domain, name, overload)`: what a call resolves against."""
    return (function.domain, function.name, function.overload)


def call_key(node: NodeProto) -> tuple[str, str, str]:
    """The function key that a node would call."""
    return (node.domain, node.op_type, node.overload)


def value_types(function: FunctionProto) -> dict[str, TypeNode]:
    """Types of all values that `value_info` declares; unknown ones are left out."""
    found = {}
    for info in function.value_info:
        node = types.type_from_proto(info.type)
        if node is not None:
            found[info.name] = node
    return found


def write_types(function: FunctionProto, known: Mapping[str, TypeNode]) -> None:
    """Declare or replace the types of many values, new ones in the mapping's order."""
    remaining = dict(known)
    for info in function.value_info:
        node = remaining.pop(info.name, None)
        if node is not None and types.type_from_proto(info.type) is not node:
            shape = None
            if info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape"):
                shape = onnx.TensorShapeProto()
                shape.CopyFrom(info.type.tensor_type.shape)
            info.type.CopyFrom(types.type_to_proto(node))
            if shape is not None and info.type.HasField("tensor_type"):
                info.type.tensor_type.shape.CopyFrom(shape)
    for name, node in remaining.items():
        info = function.value_info.add(name=name)
        info.type.CopyFrom(types.type_to_proto(node))


def opset_imports(pairs: Iterable[tuple[str, int]]) -> list[onnx.OperatorSetIdProto]:
    """OperatorSetIdProtos, sorted by domain."""
    return [onnx.helper.make_opsetid(d, v) for d, v in sorted(set(pairs))]
