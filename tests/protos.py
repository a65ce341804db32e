"""A look into models as files, and small changes of them: metadata, attributes, types of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper

from bbnode.ir import keys, types
from bbnode.ir.onnx_file import attribute_of, function_of
from bbnode.ir.types import TypeNode

Proto = ModelProto | FunctionProto | NodeProto


def all_meta(proto: Proto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def get_meta(proto: Proto, key: str) -> str | None:
    return all_meta(proto).get(key)


def set_meta(proto: Proto, key: str, value: str) -> None:
    for entry in proto.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    proto.metadata_props.add(key=key, value=value)


def del_meta(proto: Proto, key: str) -> None:
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)


def octets(attribute: AttributeProto) -> bytes:
    """The bytes of an attribute, which a file holds as a text or as a tensor."""
    return bytes(attribute_of(attribute).value)


def get_attr(node: NodeProto, name: str, default: Any = None) -> Any:
    found = next((a for a in node.attribute if a.name == name), None)
    if found is None:
        return default
    value = helper.get_attribute_value(found)
    return octets(found) if isinstance(attribute_of(found).value, bytes) else value


def set_attr(node: NodeProto, name: str, value: Any) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def is_wire(node: NodeProto, *op_types: str) -> bool:
    return node.domain == keys.WIRE_DOMAIN and (not op_types or node.op_type in op_types)


def function_key(function: FunctionProto) -> tuple[str, str, str]:
    return (function.domain, function.name, function.overload)


def call_key(node: NodeProto) -> tuple[str, str, str]:
    return (node.domain, node.op_type, node.overload)


def value_types(function: FunctionProto) -> dict[str, TypeNode]:
    return function_of(function).kinds()


def write_types(function: FunctionProto, known: Mapping[str, TypeNode]) -> None:
    """Declare the types of values anew."""
    kept = [info for info in function.value_info if info.name not in known]
    del function.value_info[:]
    function.value_info.extend(kept)
    for name, kind in known.items():
        function.value_info.add(name=name).type.CopyFrom(types.type_to_proto(kind))
