"""The loader of ONNX models, from any exporter, as one plain graph.

Rule: a loaded program has passed ONNX's own checker, holds all of its tensors and the types that
ONNX infers, has no local functions, and only ops of `ai.onnx` and `ai.onnx.ml`, at the opsets that
programs are recorded in. The caller's model is copied, never changed; no protobuf objects leave
this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
import onnx.version_converter
from onnx import GraphProto, ModelProto, TensorProto

from bbnode.dsl.errors import (
    BrokenModel,
    ExternalDataMissing,
    MissingModelFile,
    ModelTooLarge,
    NestingTooDeep,
    UnconvertibleModel,
    UnsupportedDomain,
    first_line,
)
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.errors import DecodeError
from bbnode.ir.expansion import without_functions
from bbnode.ir.graph import Body, Function, FunctionKey, OpNode, Program, call_key, is_onnx_domain
from bbnode.ir.onnx_file import (
    function_of,
    has_unknown_fields,
    parse_model,
    program_of,
    subgraph_of,
)
from bbnode.ir.versions import means_the_same

# One protobuf message is at most 2 GiB; the artifact holds more than this model.
MAX_MODEL_BYTES = (1 << 31) - (1 << 26)
# Ops of one program, with all calls inlined.
MAX_OPS = 200_000
# A parsed protobuf nests at most 100 messages deep, and every graph takes three of them; what
# exporters write nests two or three graphs deep.
MAX_GRAPH_DEPTH = 24
# The last version before tree ensembles got a new op; ONNX Runtime runs it as well as older ones.
ML_OPSET_VERSION = 4

# Everything that ONNX's C++ parts raise for a model that they refuse.
ONNX_FAILURES = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    RuntimeError,
    ValueError,
    TypeError,
)

ModelSource = str | os.PathLike[str] | ModelProto


def load_model(source: ModelSource, module: str) -> Program:
    """Load a model as a program of its own, whose main graph is checked and whole.

    Args:
        source: a file, or the model itself.
        module: name of the Module, for error messages.

    Raises:
        BrokenModel, ModelTooLarge, NestingTooDeep, ExternalDataMissing, UnsupportedDomain,
        UnconvertibleModel.
    """
    model, folder = _read(source, module)
    check_form(model, module)
    _load_external(model, folder, module)
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise _too_large(f"{model.ByteSize()} bytes", module)
    try:
        functions = {f.key: f for f in map(function_of, model.functions)}
        graph = subgraph_of(model.graph)
    except OutOfBounds as error:
        raise BrokenModel(str(error), module) from error
    _check_nodes([graph, *functions.values()], functions, module)
    size = inlined_size(graph, functions, module)
    if size > MAX_OPS:
        raise _too_large(f"{size} ops", module)
    try:
        check_whole(model)
        if functions:
            model = without_functions(model)
            graph = subgraph_of(model.graph)
        model = _to_recorded_opset(model, list(graph.all_nodes()), module)
        program = program_of(onnx.shape_inference.infer_shapes(model))
    except (OutOfBounds, *ONNX_FAILURES) as error:
        raise BrokenModel(
            f"ONNX refuses the model: {first_line(error)}; export it again, and see that "
            "onnx.checker.check_model takes it",
            module,
        ) from error
    if program.graph is None:
        raise BrokenModel("its graph is empty; export it again", module)
    _check_nodes([program.graph], {}, module)  # an op may have hidden behind a function's imports
    return program


# --- the file ------------------------------------------------------------------------------


def _read(source: ModelSource, module: str) -> tuple[ModelProto, Path | None]:
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
        folder = None
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            size = path.stat().st_size
            if not path.is_file():  # a device has no size, and may have no end
                raise BrokenModel(f"{path.name!r} is not a file; give an ONNX file", module)
            if size > MAX_MODEL_BYTES:
                raise _too_large(f"{size} bytes", module)
            model = parse_model(path.read_bytes())
        except OSError as error:
            absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            raise (MissingModelFile if absent else BrokenModel)(
                f"cannot read {path.name!r}: {error.strerror or error}; relative paths start at "
                "the working directory",
                module,
            ) from error
        except DecodeError as error:
            raise BrokenModel(
                f"{path.name!r} is not an ONNX model, or only a part of one ({first_line(error)}); "
                "export or download it again",
                module,
            ) from error
        folder = path.parent
    else:
        raise BrokenModel(
            f"{source!r:.60} is neither the path of an ONNX file nor an onnx.ModelProto", module
        )
    if not model.HasField("graph") or not model.ir_version:
        raise BrokenModel("there is no graph in it: it is not an ONNX model", module)
    if not model.graph.output:
        raise BrokenModel(
            f"its graph {model.graph.name!r} has no outputs; what bbnode compiled or recorded is "
            "replayed by CompiledModule",
            module,
        )
    return model, folder


def _too_large(what: str, module: str) -> ModelTooLarge:
    return ModelTooLarge(
        f"the model has {what}; an artifact holds at most {MAX_MODEL_BYTES} bytes and {MAX_OPS} "
        "ops: quantize it, or export it in parts",
        module,
    )


def check_form(model: ModelProto, module: str) -> None:
    """Check that texts are texts and that graphs nest no deeper than `MAX_GRAPH_DEPTH`.

    protobuf accepts texts that are not UTF-8; reading such a field later would return bytes, or
    raise an error of another kind.

    Raises BrokenModel, NestingTooDeep.
    """
    todo: list[tuple[Any, int]] = [(model, 0)]
    while todo:
        message, depth = todo.pop()
        where = str(message.DESCRIPTOR.name)
        if isinstance(message, GraphProto):
            depth += 1
            if depth > MAX_GRAPH_DEPTH + 1:  # the main graph is the first
                raise NestingTooDeep(
                    f"an op is nested in more than {MAX_GRAPH_DEPTH} graphs of If, Loop or Scan; "
                    "export the model with fewer",
                    module,
                )
        if has_unknown_fields(message):
            raise BrokenModel(
                f"a {where} in it holds fields that ONNX {onnx.__version__} does not know; install "
                "a newer onnx, or export the model for an older version of the format",
                module,
            )
        try:
            for field, value in message.ListFields():
                where = f"{message.DESCRIPTOR.name}.{field.name}"
                if field.type == field.TYPE_MESSAGE:
                    parts = [value] if hasattr(value, "DESCRIPTOR") else value
                    todo.extend((part, depth) for part in parts)
                elif field.type == field.TYPE_STRING:
                    texts = [value] if isinstance(value, str | bytes) else value
                    if not all(isinstance(text, str) for text in texts):
                        raise UnicodeDecodeError("utf-8", b"", 0, 0, where)
        except UnicodeDecodeError as error:
            raise BrokenModel(
                f"a text in it ({where}) is not UTF-8: it is damaged; export or download it again",
                module,
            ) from error


def _parts(model: ModelProto, kind: type) -> list[Any]:
    """Return all messages of a kind in the model's graphs and functions, in order."""
    found = []
    todo: list[Any] = [model]
    while todo:
        message = todo.pop()
        if isinstance(message, kind):
            found.append(message)
        for name in reversed(_HOLDERS.get(type(message).__name__, ())):
            held = getattr(message, name)
            if not hasattr(held, "DESCRIPTOR"):
                todo.extend(reversed(held))
            elif message.HasField(name):
                todo.append(held)
    return found


# Fields in which graphs and tensors stand, by the message.
_HOLDERS: Mapping[str, tuple[str, ...]] = {
    "ModelProto": ("graph", "functions"),
    "GraphProto": ("node", "initializer", "sparse_initializer"),
    "FunctionProto": ("node",),
    "NodeProto": ("attribute",),
    "AttributeProto": ("t", "g", "sparse_tensor", "tensors", "graphs", "sparse_tensors"),
    "SparseTensorProto": ("values", "indices"),
}


def _load_external(model: ModelProto, folder: Path | None, module: str) -> None:
    """Read weights in other files from beneath the model's folder, and from nowhere else."""
    outside = []
    for tensor in _parts(model, TensorProto):
        if tensor.data_location == TensorProto.EXTERNAL:
            outside.append(tensor)
        else:
            # Left by a tool that read the values in; an artifact names no file.
            tensor.ClearField("external_data")
    if not outside:
        return
    if folder is None:
        raise ExternalDataMissing(
            f"tensor {outside[0].name!r} (and {len(outside) - 1} more) is in another file, "
            "which a ModelProto does not find; give the path of the model, or load it with "
            "onnx.load",
            module,
        )
    _check_external_size(outside, folder, module)
    try:
        # Refuses paths that lead out of the folder, absolute ones and links.
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
    except (OSError, *ONNX_FAILURES) as error:
        raise ExternalDataMissing(
            f"the data of tensor {_location(outside[0])} cannot be read: {first_line(error)}; put "
            "the data files beside the model, as its exporter wrote them",
            module,
        ) from error
    short = next((t for t in outside if t.data_location == TensorProto.EXTERNAL), None)
    if short is not None:
        raise ExternalDataMissing(f"tensor {_location(short)} was not loaded", module)


def _check_external_size(outside: list[TensorProto], folder: Path, module: str) -> None:
    total = 0
    for tensor in outside:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = folder / entries.get("location", "")
        try:
            size = path.stat().st_size
            total += min(size, int(entries.get("length") or size))
        except (OSError, ValueError) as error:
            raise ExternalDataMissing(
                f"the data of tensor {_location(tensor)} is not there: {first_line(error)}; put "
                "the data files beside the model, as its exporter wrote them",
                module,
            ) from error
    if total > MAX_MODEL_BYTES:
        raise _too_large(f"{total} bytes of weights", module)


def _location(tensor: TensorProto) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return f"{tensor.name!r} (in {entries.get('location', 'a file without a name')!r:.80})"


def check_whole(model: ModelProto) -> None:
    """Run ONNX's own check; raises what it raises.

    It requires a shape for every port, unlike the format, and some exporters leave out unknown
    ones; so these ports get one during the check.
    """
    shapeless = [
        info.type.tensor_type
        for graph in _parts(model, GraphProto)
        for info in (*graph.input, *graph.output, *graph.value_info)
        if info.type.HasField("tensor_type") and not info.type.tensor_type.HasField("shape")
    ]
    for tensor_type in shapeless:
        tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    finally:
        for tensor_type in shapeless:
            tensor_type.ClearField("shape")


# --- its ops -------------------------------------------------------------------------------


def _check_nodes(
    bodies: Iterable[Body], functions: Mapping[FunctionKey, Function], module: str
) -> None:
    """Refuse ops that nobody defines and, outside of functions, references to parameters."""
    for body in bodies:
        for node in body.all_nodes():
            is_onnx = is_onnx_domain(node.domain) or node.domain == keys.ONNX_ML_DOMAIN
            if not is_onnx and call_key(node) not in functions:
                raise UnsupportedDomain(
                    f"op {node.name or '(without a name)'!r} is {node.domain}::{node.op_type}, and "
                    f"neither ONNX nor the model defines {node.domain!r}; export the model with "
                    "plain ONNX ops (for ONNX Runtime's own ops: before it was optimized), or with "
                    "its functions",
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
    """Return how many ops a body has when all calls of `functions` are inlined.

    It is checked before any call is followed, since recursive calls never end and nested ones
    multiply. Raises NestingTooDeep when functions call each other in a ring.
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


# --- its opset -----------------------------------------------------------------------------


def _to_recorded_opset(model: ModelProto, nodes: list[OpNode], module: str) -> ModelProto:
    """Return the model at `keys.ONNX_OPSET_VERSION`, and at `ML_OPSET_VERSION` where it can be.

    An op whose schema means the same at both versions is left alone; where one does not, ONNX's
    own converter rewrites the model, and its result is checked again. Raises UnconvertibleModel.
    """
    versions = _versions(model)
    used = {_domain(node) for node in nodes}
    recorded = {"": keys.ONNX_OPSET_VERSION}
    if keys.ONNX_ML_DOMAIN in used:
        version = versions.get(keys.ONNX_ML_DOMAIN, 1)
        changed = _changed(nodes, keys.ONNX_ML_DOMAIN, version, ML_OPSET_VERSION)
        recorded[keys.ONNX_ML_DOMAIN] = version if changed else ML_OPSET_VERSION
    changed = _changed(nodes, "", versions.get("", 1), keys.ONNX_OPSET_VERSION)
    if changed:
        model = _converted(model, versions.get("", 1), changed, module)
    del model.opset_import[:]
    for domain, version in sorted(recorded.items()):
        model.opset_import.add(domain=domain, version=version)
    return model


def _versions(model: ModelProto) -> dict[str, int]:
    return {
        "" if is_onnx_domain(entry.domain) else entry.domain: entry.version
        for entry in model.opset_import
    }


def _domain(node: OpNode) -> str:
    return "" if is_onnx_domain(node.domain) else node.domain


def _changed(nodes: list[OpNode], domain: str, version: int, target: int) -> list[OpNode]:
    """Return the ops that do not mean the same at `target` as they do at `version`."""
    return [
        node for node in nodes
        if _domain(node) == domain and not means_the_same(node, version, target)
    ]  # fmt: skip


def _describe_again(made: ModelProto, model: ModelProto, module: str) -> None:
    """Adds to a converted model what the converter leaves out: devices, training, quantization.

    Raises UnconvertibleModel when what it speaks of has another name after the conversion.
    """
    made.configuration.extend(model.configuration)
    made.training_info.extend(model.training_info)
    graph = made.graph
    nodes = {tuple(node.output): node for node in graph.node}
    values = {name for node in graph.node for name in node.output}
    values.update(info.name for info in graph.input)
    values.update(tensor.name for tensor in graph.initializer)
    lost: list[str] = []
    for node in model.graph.node:
        if node.device_configurations:
            kept = nodes.get(tuple(node.output))
            if kept is None or kept.op_type != node.op_type or kept.input != node.input:
                lost.append(f"the device configuration of {node.name or node.op_type!r}")
            else:
                kept.device_configurations.extend(node.device_configurations)
    for annotation in model.graph.quantization_annotation:
        names = (entry.value for entry in annotation.quant_parameter_tensor_names)
        if values.issuperset((annotation.tensor_name, *names)):
            graph.quantization_annotation.append(annotation)
        else:
            lost.append(f"the quantization annotation of {annotation.tensor_name!r}")
    lost += [
        f"what the nested graph {inner.name!r} says of devices or quantization"
        for inner in _parts(model, GraphProto)[1:]
        if inner.quantization_annotation or any(n.device_configurations for n in inner.node)
    ]
    if lost:
        raise UnconvertibleModel(
            f"{lost[0]:.120} (and {len(lost) - 1} more) would be lost in bringing the model to "
            f"ai.onnx opset {keys.ONNX_OPSET_VERSION}; export it again with that opset, or without "
            "these parts",
            module,
        )


def _converted(model: ModelProto, version: int, changed: list[OpNode], module: str) -> ModelProto:
    target = keys.ONNX_OPSET_VERSION
    reason = ", ".join(dict.fromkeys(node.op_type for node in changed[:20]))
    cause: Exception | None = None
    try:
        made = onnx.version_converter.convert_version(model, target)
        check_whole(made)
        reached = _versions(made).get("")
        if reached == target:
            _describe_again(made, model, module)
            return made
        reason += f" (the converter stopped at {reached})"
    except (onnx.version_converter.ConvertError, *ONNX_FAILURES) as error:
        reason += f" ({first_line(error)})"
        cause = error
    raise UnconvertibleModel(
        f"the model is of ai.onnx opset {version} and cannot be brought to {target}, because of "
        f"{reason}; export it again with opset {target} (opset_version={target})",
        module,
    ) from cause
