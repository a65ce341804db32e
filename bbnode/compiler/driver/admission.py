"""What a model has to be before any pass looks at it.

Rule: the caller's model becomes plain objects here, once; everything behind works on those and
never changes the caller's.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.compiler.errors import (
    AlreadyCompiled,
    DuplicateFunction,
    EmptyFunctionTable,
    IrVersionMismatch,
    ModelOutOfBounds,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions
from bbnode.ir import keys, plain, protos
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.plain_proto import program_of


def admit(model: ModelProto, options: CompileOptions) -> CompilationUnit:
    """The unit of a compile.

    Raises EmptyFunctionTable, AlreadyCompiled, IrVersionMismatch, DuplicateFunction,
    ModelOutOfBounds; TypeError when it is no ModelProto.
    """
    if not isinstance(model, ModelProto):
        raise TypeError(
            f"compile takes the ModelProto of Module.build(), got {type(model).__name__}"
        )
    if protos.get_meta(model, keys.COMPILED_KEY) is not None:
        raise AlreadyCompiled()
    if not model.functions:
        raise EmptyFunctionTable()
    if model.ir_version != options.target_version:
        raise IrVersionMismatch(expected=options.target_version, got=model.ir_version)
    try:
        program = program_of(model)
    except OutOfBounds as error:
        raise ModelOutOfBounds(detail=str(error)) from error
    seen = set()
    for function in program.functions:
        key = plain.function_key(function)
        if key in seen:
            raise DuplicateFunction(domain=function.domain, function=function.name)
        seen.add(key)
    return CompilationUnit(program=program)
