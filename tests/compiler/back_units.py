"""Units as the back half of the compiler meets them.

Rule: a test of a pass runs the passes before it, and looks at one partition.
"""

from __future__ import annotations

from onnx import FunctionProto, NodeProto

from bbnode.compiler.driver import pipeline
from bbnode.compiler.unit import CompilationUnit, CompileOptions
from bbnode.ir import keys
from tests.compiler import either
from tests.compiler.programs import BOUND, Body, run, unit_of

BACK = tuple(
    name
    for name in pipeline.all_pass_names()
    if pipeline.all_pass_names().index(name)
    >= pipeline.all_pass_names().index("partition_by_wire_ops")
)


def unit_until(
    last: str,
    *bodies: Body,
    options: CompileOptions = BOUND,
    without: tuple[str, ...] = (),
) -> CompilationUnit:
    """A unit on which all passes up to `last` have run, but those of `without`."""
    unit = unit_of(*bodies)
    for name in pipeline.all_pass_names():
        if name not in without:
            run(unit, name, options=options)
        if name == last:
            break
    return unit


def meta(node: NodeProto, key: str) -> str | None:
    return either.get_meta(node, key)


def control(node: NodeProto) -> list[str]:
    return [
        name for name in (either.get_meta(node, keys.CONTROL_AFTER_KEY) or "").split(",") if name
    ]


def after(node: NodeProto) -> list[str]:
    return [name for name in (either.get_meta(node, keys.AFTER_KEY) or "").split(",") if name]


def of_type(function: FunctionProto, op_type: str) -> list[NodeProto]:
    return [node for node in function.node if node.op_type == op_type]


def sole(function: FunctionProto, op_type: str) -> NodeProto:
    (node,) = of_type(function, op_type)
    return node


def snapshot(unit: CompilationUnit) -> tuple[bytes, ...]:
    """Everything a pass may change."""
    return (
        repr(list(unit.partitions)).encode(),
        either.content(unit),
        repr(unit.wire_edges).encode(),
    )
