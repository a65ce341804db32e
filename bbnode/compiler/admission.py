"""What a model has to be before any pass looks at it.

Rule: the caller's model is copied here, once; everything behind works on the copy.
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
from bbnode.ir import keys, protos
from bbnode.ir.bounds import OutOfBounds, check_bounds


def admit(model: ModelProto, options: CompileOptions) -> CompilationUnit:
    """The unit of a compile, on a copy of `model`.

    Raises EmptyFunctionTable, AlreadyCompiled, IrVersionMismatch, DuplicateFunction,
    ModelOutOfBounds; TypeError when it is no ModelProto.
    """
    if not isinstance(model, ModelProto):
        raise TypeError(
            f"compile takes the ModelProto of Module.build(), got {type(model).__name__}"
        )
    try:
        check_bounds(model)
    except OutOfBounds as error:
        raise ModelOutOfBounds(detail=str(error)) from error
    if protos.get_meta(model, keys.COMPILED_KEY) is not None:
        raise AlreadyCompiled()
    if not model.functions:
        raise EmptyFunctionTable()
    if model.ir_version != options.target_version:
        raise IrVersionMismatch(expected=options.target_version, got=model.ir_version)
    seen = set()
    for function in model.functions:
        key = protos.function_key(function)
        if key in seen:
            raise DuplicateFunction(domain=function.domain, function=function.name)
        seen.add(key)
    copy = ModelProto()
    copy.CopyFrom(model)
    return CompilationUnit(model=copy)
