"""Reads and changes recorded protobufs and the compiler's plain objects alike.

Rule: tests record protobufs, let passes run over plain objects, and look at both in the same
words: those of `bbnode.ir.protos`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto

from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import plain, protos
from bbnode.ir.plain import Function, Node, Program
from bbnode.ir.plain_proto import model_of
from bbnode.ir.protos import is_onnx_domain, opset_imports
from bbnode.ir.types import TypeNode

__all__ = ["is_onnx_domain", "opset_imports"]

AnyNode = Node | NodeProto
AnyFunction = Function | FunctionProto
Any_ = AnyNode | AnyFunction | Program | ModelProto


def all_meta(one: Any_) -> dict[str, str]:
    if isinstance(one, Node | Function | Program):
        return one.metadata
    return protos.all_meta(one)


def get_meta(one: Any_, key: str) -> str | None:
    return all_meta(one).get(key)


def set_meta(one: Any_, key: str, value: str) -> None:
    if isinstance(one, Node | Function | Program):
        one.metadata[key] = value
    else:
        protos.set_meta(one, key, value)


def del_meta(one: Any_, key: str) -> None:
    if isinstance(one, Node | Function | Program):
        one.metadata.pop(key, None)
    else:
        protos.del_meta(one, key)


def get_attr(node: AnyNode, name: str, default: Any = None) -> Any:
    if isinstance(node, Node):
        return node.get_attr(name, default)
    return protos.get_attr(node, name, default)


def get_attr_proto(node: AnyNode, name: str) -> AttributeProto | None:
    return node.find_attr(name) if isinstance(node, Node) else protos.get_attr_proto(node, name)


def set_attr(node: AnyNode, name: str, value: Any) -> None:
    if isinstance(node, Node):
        node.set_attr(name, value)
    else:
        protos.set_attr(node, name, value)


def is_wire(node: AnyNode, *op_types: str) -> bool:
    return plain.is_wire(node, *op_types)


def is_role(node: AnyNode) -> bool:
    return plain.is_role(node) if isinstance(node, Node) else protos.is_role(node)


def function_key(function: AnyFunction) -> tuple[str, str, str]:
    return (function.domain, function.name, function.overload)


def call_key(node: AnyNode) -> tuple[str, str, str]:
    return (node.domain, node.op_type, node.overload)


def value_types(function: AnyFunction) -> dict[str, TypeNode]:
    return function.kinds() if isinstance(function, Function) else protos.value_types(function)


def write_types(function: AnyFunction, known: Mapping[str, TypeNode]) -> None:
    if isinstance(function, Function):
        function.declare(known)
    else:
        protos.write_types(function, known)


def declared(function: AnyFunction) -> Iterator[str]:
    """Names of the values that declare a type."""
    if isinstance(function, Function):
        yield from function.types
    else:
        yield from (info.name for info in function.value_info)


def as_model(unit: CompilationUnit) -> ModelProto:
    """A unit as one model, mains of partitions first."""
    return model_of(unit.program, unit.bodies())


def content(unit: CompilationUnit) -> bytes:
    """Everything that a pass may change in a unit's functions and model."""
    return as_model(unit).SerializeToString(deterministic=True)
