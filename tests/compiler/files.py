"""Metadata and attributes of a file: what tests that damage or write files look at."""

from __future__ import annotations

from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, helper

Proto = ModelProto | FunctionProto | NodeProto


def all_meta(proto: Proto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def get_meta(proto: Proto, key: str) -> str | None:
    return all_meta(proto).get(key)


def set_meta(proto: Proto, key: str, value: str) -> None:
    del_meta(proto, key)
    proto.metadata_props.add(key=key, value=value)


def del_meta(proto: Proto, key: str) -> None:
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)


def get_attr(node: NodeProto, name: str, default: Any = None) -> Any:
    found = (helper.get_attribute_value(a) for a in node.attribute if a.name == name)
    return next(found, default)


def set_attr(node: NodeProto, name: str, value: Any) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
