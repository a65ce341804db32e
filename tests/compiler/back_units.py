"""Units as the back half of the compiler meets them.

Rule: a test of a pass runs the passes before it, and looks at one partition.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.compiler.driver import pipeline
from bbnode.compiler.unit import CompilationUnit, CompileOptions
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode
from bbnode.ir.onnx_file import model_of
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


def meta(node: OpNode | Function, key: str) -> str | None:
    return node.metadata.get(key)


def control(node: OpNode) -> list[str]:
    return [name for name in node.metadata.get(keys.CONTROL_AFTER_KEY, "").split(",") if name]


def of_type(function: Function, op_type: str) -> list[OpNode]:
    return [node for node in function.nodes if node.op_type == op_type]


def sole(function: Function, op_type: str) -> OpNode:
    (node,) = of_type(function, op_type)
    return node


def as_model(unit: CompilationUnit) -> ModelProto:
    """A unit as one model, mains of partitions first."""
    return model_of(unit.program, unit.bodies())


def content(unit: CompilationUnit) -> bytes:
    """Everything that a pass may change in a unit's functions and model."""
    return as_model(unit).SerializeToString(deterministic=True)


def snapshot(unit: CompilationUnit) -> tuple[bytes, ...]:
    """Everything a pass may change."""
    return (
        repr(list(unit.partitions)).encode(),
        content(unit),
        repr(unit.wire_edges).encode(),
    )
