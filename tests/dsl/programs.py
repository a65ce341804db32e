"""Helpers of the DSL tests: a Module from a function, and a look at what it recorded."""

from __future__ import annotations

from collections.abc import Callable

from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.dsl import Graph, Module
from tests import protos


class FromFunction(Module):
    """A Module whose body is the given function."""

    def __init__(self, body: Callable[[Graph], object], name: str = "Program", home: str = "a"):
        self.recorded = body
        self.name = name
        self.home = home

    def body(self, g: Graph) -> None:
        self.recorded(g)


def build(body: Callable[[Graph], object], **kwargs: str) -> ModelProto:
    return FromFunction(body, **kwargs).build()


def root(body: Callable[[Graph], object], **kwargs: str) -> FunctionProto:
    return build(body, **kwargs).functions[0]


def only(body: Callable[[Graph], object], op_type: str) -> tuple[FunctionProto, NodeProto]:
    """The root function and its one node of that op type."""
    function = root(body)
    (node,) = [n for n in function.node if n.op_type == op_type]
    return function, node


def meta(proto: object, key: str) -> str | None:
    return protos.get_meta(proto, "ai.bytesandbrains." + key)  # type: ignore[arg-type]
