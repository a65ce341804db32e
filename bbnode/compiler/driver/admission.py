"""Admission: from the caller's model to the unit of a compile.

Rule: the caller's model becomes plain objects here, once; all later steps work on those and
never change the caller's model.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.compiler.driver.opsets import take_highest_opsets
from bbnode.compiler.errors import (
    AlreadyCompiled,
    DuplicateFunction,
    EmptyFunctionTable,
    IrVersionMismatch,
    ModelOutOfBounds,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import Program
from bbnode.ir.keys import OLDEST_IR_VERSION
from bbnode.ir.onnx_file import ir_version_for, program_of
from bbnode.ir.reopen import NotReopenable, is_compiled, reopen


def admit(model: ModelProto | Program, options: CompileOptions) -> CompilationUnit:
    """Return the unit of a compile.

    Raises EmptyFunctionTable, AlreadyCompiled, IrVersionMismatch, DuplicateFunction,
    ModelOutOfBounds; TypeError if the model is neither a ModelProto nor a Program.
    """
    program = _program(model)
    if is_compiled(program):
        try:
            program = reopen(program)
        except NotReopenable as error:
            raise AlreadyCompiled(detail=str(error)) from error
    if not program.functions:
        raise EmptyFunctionTable()
    newest = ir_version_for(program.extras, options.target_version)
    oldest = ir_version_for(program.extras, min(OLDEST_IR_VERSION, options.target_version))
    if not oldest <= program.ir_version <= newest:
        raise IrVersionMismatch(oldest=oldest, newest=newest, got=program.ir_version)
    seen = set()
    for function in program.functions:
        key = function.key
        if key in seen:
            raise DuplicateFunction(domain=function.domain, function=function.name)
        seen.add(key)
    take_highest_opsets(program)
    unit = CompilationUnit(program=program)
    unit.recording.observe(program)
    return unit


def _program(model: ModelProto | Program) -> Program:
    """Return a program that the compile owns and may change."""
    if isinstance(model, Program):
        return model.copy()
    if not isinstance(model, ModelProto):
        raise TypeError(
            f"compile takes what Module.build() or record() returns, got {type(model).__name__}"
        )
    try:
        return program_of(model)
    except OutOfBounds as error:
        raise ModelOutOfBounds(detail=str(error)) from error
