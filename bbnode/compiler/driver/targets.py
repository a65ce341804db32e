"""Targets of a compiled model.

Rule: a target is a function with metadata `target = "true"`. It needs the functions that it
calls, every bootstrap, and its own entries of the binding table.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.compiler.analysis.functions import called_from, is_bootstrap
from bbnode.ir import keys
from bbnode.ir.graph import Function, Program
from bbnode.ir.onnx_file import program_of
from bbnode.ir.seal import sealed


def target_names(model: ModelProto) -> tuple[str, ...]:
    """Return the names of the targets, in the model's order."""
    return tuple(f.name for f in program_of(model).functions if is_target(f))


def split_targets(model: ModelProto) -> dict[str, ModelProto]:
    """Return each target of a compiled model as a compiled model of its own."""
    program = program_of(model)
    return {f.name: _only(program, f) for f in program.functions if is_target(f)}


def is_target(function: Function) -> bool:
    """Return True if a function is the main of a class of peer."""
    return keys.TARGET_KEY in function.metadata


def _only(program: Program, main: Function) -> ModelProto:
    bootstraps = [f for f in program.functions if is_bootstrap(f)]
    needed = {*bootstraps, *called_from(program, [main, *bootstraps])}
    own = keys.BINDING_PREFIX + main.name + "."
    metadata = {
        key: text
        for key, text in program.metadata.items()
        if key != keys.SEAL_KEY and (not key.startswith(keys.BINDING_PREFIX) or key.startswith(own))
    }
    part = Program(
        ir_version=program.ir_version,
        producer_name=program.producer_name,
        name=program.name,
        functions=[main, *(f for f in program.functions if f in needed)],
        opset_imports=program.opset_imports,
        metadata=metadata,
        extras=program.extras,
    )
    return sealed(part)
