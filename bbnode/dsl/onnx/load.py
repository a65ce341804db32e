"""The loader of ONNX models, from any exporter, as one plain graph.

Rule: a loaded program has passed ONNX's own checker, holds all of its tensors and the types that
ONNX infers, has no local functions, and only ops of `ai.onnx` and `ai.onnx.ml`, at the opsets that
programs are recorded in. The caller's model is copied, never changed; no protobuf objects leave
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx
import onnx.shape_inference
from onnx import ModelProto

from bbnode.dsl.errors import (
    BrokenModel,
    ExternalDataMissing,
    MissingModelFile,
    ModelTooLarge,
    NestingTooDeep,
    OnnxImportError,
    UnconvertibleModel,
    UnsupportedDomain,
)
from bbnode.ir import intake
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import Body, Function, FunctionKey, Program, Tensor, call_key, is_onnx_op
from bbnode.ir.intake import MAX_MODEL_BYTES, ModelSource
from bbnode.ir.onnx_file import function_of, program_of, subgraph_of
from bbnode.ir.weightless import without_weights

# Maximum of ops of one program, with all calls inlined.
MAX_OPS = 200_000

_ERRORS: Mapping[type[intake.ModelNotTaken], type[OnnxImportError]] = {
    intake.ModelRefused: BrokenModel,
    intake.ModelFileAbsent: MissingModelFile,
    intake.ModelOverLimit: ModelTooLarge,
    intake.GraphsTooDeep: NestingTooDeep,
    intake.DataFileMissing: ExternalDataMissing,
    intake.OpsetNotReached: UnconvertibleModel,
}


def load_model(source: ModelSource, module: str) -> Program:
    """Load a model as a program with a checked and complete main graph.

    Args:
        source: a file, its bytes, or the model itself.
        module: name of the Module, for error messages.

    Raises:
        BrokenModel, ModelTooLarge, NestingTooDeep, ExternalDataMissing, UnsupportedDomain,
        UnconvertibleModel.
    """
    model = _taken(intake.read_model, source, module)
    try:
        functions = {f.key: f for f in map(function_of, model.functions)}
        graph = subgraph_of(model.graph)
    except OutOfBounds as error:
        raise BrokenModel(str(error), module) from error
    _check_nodes([graph, *functions.values()], functions, module)
    size = inlined_size(graph, functions, module)
    if size > MAX_OPS:
        raise ModelTooLarge(
            f"the model has {size} ops; an artifact holds at most {MAX_MODEL_BYTES} bytes and "
            f"{MAX_OPS} ops: quantize it, or export it in parts",
            module,
        )
    model = _taken(intake.brought_up, model, module)
    try:
        program = _with_shapes(model)
    except (OutOfBounds, *intake.ONNX_FAILURES) as error:
        raise BrokenModel(
            f"ONNX refuses the model: {intake.first_line(error)}; export it again, and see that "
            "onnx.checker.check_model takes it",
            module,
        ) from error
    if program.graph is None:
        raise BrokenModel("its graph is empty; export it again", module)
    _check_nodes(
        [program.graph], {}, module
    )  # inlining may reveal an op that only a function's imports allowed
    return program


def _with_shapes(model: ModelProto) -> Program:
    """Return a program with the types that ONNX infers, without copies of large weights."""
    light, large = without_weights(model)
    graph = model.graph
    named = {port.name for port in (*graph.input, *graph.output, *graph.value_info)}
    if not named.isdisjoint(large):  # a large weight is also declared as a value
        return program_of(onnx.shape_inference.infer_shapes(model))
    program = program_of(onnx.shape_inference.infer_shapes(light))
    if large and program.graph is not None:
        main = program.graph
        main.inputs = [name for name in main.inputs if name not in large]
        main.keep_types(main.types.keys() - large.keys())
        dense = {tensor.name: Tensor(tensor) for tensor in graph.initializer}
        sparse = {name: held for name, held in main.initializers.items() if held.is_sparse}
        main.initializers = {**dense, **sparse}
    return program


def _taken(step: Callable[..., ModelProto], source: Any, module: str) -> ModelProto:
    """Run a step of the intake; its error names the Module and the author's line."""
    try:
        return step(source)
    except intake.ModelNotTaken as error:
        raise _ERRORS[type(error)](str(error), module) from error


def _check_nodes(
    bodies: Iterable[Body], functions: Mapping[FunctionKey, Function], module: str
) -> None:
    """Refuse undefined ops and, outside of functions, references to parameters."""
    for body in bodies:
        for node in body.all_nodes():
            if not is_onnx_op(node) and call_key(node) not in functions:
                raise UnsupportedDomain(
                    f"op {node.name or '(without a name)'!r} is {node.domain}::{node.op_type}, and "
                    f"neither ONNX nor the model defines {node.domain!r}; export the model with "
                    "plain ONNX ops, or with its functions",
                    module,
                )
            for name, attribute in node.attributes.items():
                if attribute.reference and not isinstance(body, Function):
                    raise BrokenModel(
                        f"attribute {name!r} of op {node.op_type} {node.name!r} refers to "
                        f"{attribute.reference!r} of a function, but the op is in no function",
                        module,
                    )


def inlined_size(body: Body, functions: Mapping[FunctionKey, Function], module: str) -> int:
    """Return the number of ops of a body with all calls of `functions` inlined.

    It is checked before any call is inlined, since recursive calls never end and nested ones
    multiply. Raises NestingTooDeep if functions call each other in a cycle.
    """
    sizes: dict[FunctionKey, int] = {}
    calls = {
        key: list(dict.fromkeys(k for n in f.all_nodes() if (k := call_key(n)) in functions))
        for key, f in functions.items()
    }
    for root in functions:
        path = [root]
        while path:
            key = path[-1]
            open_call = next((callee for callee in calls[key] if callee not in sizes), None)
            if open_call in path:
                raise NestingTooDeep(
                    f"function {open_call[1]!r} of the model calls itself, directly or not; ONNX "
                    "has no recursion, export the model again",
                    module,
                )
            if open_call is not None:
                path.append(open_call)
                continue
            sizes[key] = sum(sizes.get(call_key(n), 1) for n in functions[key].all_nodes())
            path.pop()
    return sum(sizes.get(call_key(node), 1) for node in body.all_nodes())
