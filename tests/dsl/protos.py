"""A look into built models, which are protobufs: metadata, attributes, types of values."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.ir.onnx_file import function_of
from bbnode.ir.types import TypeNode


def get_meta(proto: NodeProto | FunctionProto | ModelProto, key: str) -> str | None:
    return next((str(entry.value) for entry in proto.metadata_props if entry.key == key), None)


def del_meta(proto: NodeProto, key: str) -> None:
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)


def get_attr(node: NodeProto, name: str, default: Any = None) -> Any:
    found = (onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name)
    return next(found, default)


def function_key(function: FunctionProto) -> tuple[str, str, str]:
    return (function.domain, function.name, function.overload)


def call_key(node: NodeProto) -> tuple[str, str, str]:
    return (node.domain, node.op_type, node.overload)


def value_types(function: FunctionProto) -> dict[str, TypeNode]:
    return function_of(function).kinds()
