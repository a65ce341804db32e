"""Reading an ONNX model, whatever exported it, into one plain graph.

Rule: what leaves this file passed ONNX's own checker, holds all of its tensors, has no local
functions, and no ops but those of `ai.onnx` and `ai.onnx.ml`. The caller's model is copied,
never changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.external_data_helper
import onnx.inliner
from onnx import ModelProto, TensorProto

from bbnode.dsl.onnx_calls import MAX_OPS, inlined_size
from bbnode.dsl.onnx_errors import (
    BrokenModel,
    ExternalDataMissing,
    ModelTooLarge,
    UnsupportedDomain,
    fault,
    first_line,
)
from bbnode.dsl.onnx_walk import (
    ONNX_ML_DOMAIN,
    broken_text,
    check_depth,
    every_node,
    graphs,
    tensors,
)
from bbnode.ir import protos
from bbnode.ir.errors import DecodeError
from bbnode.ir.onnx_file import parse_model

# One protobuf message is at most 2 GiB; the artifact holds more than this model.
MAX_MODEL_BYTES = (1 << 31) - (1 << 26)
# Everything that ONNX's C++ parts raise for a model that they do not like.
ONNX_FAILURES = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    RuntimeError,
    ValueError,
    TypeError,
)

ModelSource = str | os.PathLike[str] | ModelProto


def load_model(source: ModelSource, module: str) -> ModelProto:
    """A model of its own, checked, whole and without functions.

    Args:
        source: a file, or the model itself.
        module: name of the Module, for error messages.

    Raises:
        BrokenModel, ModelTooLarge, NestingTooDeep, ExternalDataMissing, UnsupportedDomain.
    """
    model, folder = _read(source, module)
    check_depth(model, module)
    broken = broken_text(model)
    if broken is not None:
        raise fault(
            BrokenModel,
            f"a text in it ({broken}) is no UTF-8: it is damaged; export or download it again",
            module,
        )
    _load_external(model, folder, module)
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise _too_large(f"{model.ByteSize()} bytes", module)
    _check_domains(model, module)
    size = inlined_size([*model.graph.node], model.functions, module)
    if size > MAX_OPS:
        raise _too_large(f"{size} ops", module)
    try:
        check_whole(model)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model, convert_version=True)
    except ONNX_FAILURES as error:
        raise fault(
            BrokenModel,
            f"ONNX refuses the model: {first_line(error)}; export it again, and see that "
            "onnx.checker.check_model takes it",
            module,
        ) from error
    _check_domains(model, module)  # an op may have hidden behind a function's own imports
    _check_references(model, module)
    return model


def check_whole(model: ModelProto) -> None:
    """ONNX's own check; raises what it raises.

    It wants a shape of every port, which the format does not and some exporters leave out where
    they do not know it; so these ports have one while it looks.
    """
    shapeless = [
        info.type.tensor_type
        for graph in graphs(model)
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
                raise fault(BrokenModel, f"{path.name!r} is no file; give an ONNX file", module)
            if size > MAX_MODEL_BYTES:
                raise _too_large(f"{size} bytes", module)
            model = parse_model(path.read_bytes())
        except OSError as error:
            raise fault(
                BrokenModel,
                f"cannot read {path.name!r}: {error.strerror or error}; relative paths start at "
                "the working directory",
                module,
            ) from error
        except DecodeError as error:
            raise fault(
                BrokenModel,
                f"{path.name!r} is no ONNX model, or only a part of one ({first_line(error)}); "
                "export or download it again",
                module,
            ) from error
        folder = path.parent
    else:
        raise fault(
            BrokenModel,
            f"{source!r:.60} is neither the path of an ONNX file nor an onnx.ModelProto",
            module,
        )
    if not model.HasField("graph") or not model.ir_version:
        raise fault(BrokenModel, "there is no graph in it: it is no ONNX model", module)
    if not model.graph.output:
        raise fault(
            BrokenModel,
            f"its graph {model.graph.name!r} has no outputs; what bbnode compiled or recorded is "
            "replayed by CompiledModule",
            module,
        )
    return model, folder


def _too_large(what: str, module: str) -> ModelTooLarge:
    return fault(
        ModelTooLarge,
        f"the model has {what}; an artifact holds at most {MAX_MODEL_BYTES} bytes and {MAX_OPS} "
        "ops: quantize it, or export it in parts",
        module,
    )


def _load_external(model: ModelProto, folder: Path | None, module: str) -> None:
    """Weights in other files are read from beneath the model's folder, and from nowhere else."""
    outside = []
    for tensor in tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            outside.append(tensor)
        else:
            # Left by a tool that read the values in; an artifact names no file.
            tensor.ClearField("external_data")
    if not outside:
        return
    if folder is None:
        raise fault(
            ExternalDataMissing,
            f"tensor {outside[0].name!r} (and {len(outside) - 1} more) stands in another file, "
            "which a ModelProto does not find; give the path of the model, or load it with "
            "onnx.load",
            module,
        )
    _check_external_size(outside, folder, module)
    try:
        # Refuses paths that lead out of the folder, absolute ones and links.
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
    except (OSError, *ONNX_FAILURES) as error:
        raise fault(
            ExternalDataMissing,
            f"the data of tensor {_location(outside[0])} cannot be read: {first_line(error)}; put "
            "the data files beside the model, as its exporter wrote them",
            module,
        ) from error
    short = next((t for t in outside if t.data_location == TensorProto.EXTERNAL), None)
    if short is not None:
        raise fault(ExternalDataMissing, f"tensor {_location(short)} was not loaded", module)


def _check_external_size(outside: list[TensorProto], folder: Path, module: str) -> None:
    total = 0
    for tensor in outside:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = folder / entries.get("location", "")
        try:
            size = path.stat().st_size
            total += min(size, int(entries.get("length") or size))
        except (OSError, ValueError) as error:
            raise fault(
                ExternalDataMissing,
                f"the data of tensor {_location(tensor)} is not there: {first_line(error)}; put "
                "the data files beside the model, as its exporter wrote them",
                module,
            ) from error
    if total > MAX_MODEL_BYTES:
        raise _too_large(f"{total} bytes of weights", module)


def _location(tensor: TensorProto) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return f"{tensor.name!r} (in {entries.get('location', 'a file without a name')!r:.80})"


def _check_domains(model: ModelProto, module: str) -> None:
    known = {protos.function_key(function) for function in model.functions}
    for node in every_node(model):
        if protos.is_onnx_domain(node.domain) or node.domain == ONNX_ML_DOMAIN:
            continue
        if protos.call_key(node) not in known:
            raise fault(
                UnsupportedDomain,
                f"op {node.name or '(without a name)'!r} is {node.domain}::{node.op_type}, and "
                f"neither ONNX nor the model defines {node.domain!r}; export the model with plain "
                "ONNX ops (for ONNX Runtime's own ops: before it was optimized), or with its "
                "functions",
                module,
            )


def _check_references(model: ModelProto, module: str) -> None:
    for node in every_node(model):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise fault(
                    BrokenModel,
                    f"attribute {attribute.name!r} of op {node.op_type} {node.name!r} refers to "
                    f"{attribute.ref_attr_name!r} of a function, and it stands in none",
                    module,
                )
