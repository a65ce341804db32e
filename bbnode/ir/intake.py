"""The one way in for ONNX models of authors, from any exporter: whole, flat, at our opset.

Rule: what comes out holds all of its tensors, has no local functions and no input that is a weight
of an old file, and is of the opset that programs are recorded in. A conversion that would change
what an op computes is refused by the op's name. The caller's model is copied, never changed.

Only what an author names is read from files; models of peers and of artifacts go through
`bounds.check_bounds`, which refuses every reference to one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
import onnx.version_converter
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto

from bbnode.ir import keys
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.expansion import is_function_op, without_functions, without_op
from bbnode.ir.graph import OpNode, Tensor, is_onnx_domain
from bbnode.ir.old_ops import NotRewritable, retrained, rewritten
from bbnode.ir.onnx_file import has_unknown_fields, parse_model, subgraph_of
from bbnode.ir.onnx_spelling import with_onnx_ops, with_onnx_spelling
from bbnode.ir.pieces import Content, InMemory, NotRead, OpenFiles, open_files
from bbnode.ir.versions import means_the_same, onnx_version
from bbnode.ir.weightless import (
    StoredTensor,
    described,
    is_large,
    is_whole,
    parted,
    without_weights,
)

# One protobuf message is at most 2 GiB; the artifact holds more than this model.
MAX_MODEL_BYTES = (1 << 31) - (1 << 26)
# A parsed protobuf nests at most 100 messages deep, and every graph takes three of them; what
# exporters write nests two or three graphs deep.
MAX_GRAPH_DEPTH = 24
# The last version before tree ensembles got a new op; ONNX Runtime runs it as well as older ones.
ML_OPSET_VERSION = 4
# The first version of the format in which weights are not listed as inputs, too.
_WEIGHTS_ALONE_IR_VERSION = 4

_ELEMENT_TYPES = frozenset(TensorProto.DataType.values())

# Everything that ONNX's C++ parts raise for a model that they refuse.
ONNX_FAILURES = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    RuntimeError,
    ValueError,
    TypeError,
)

ModelSource = str | bytes | os.PathLike[str] | ModelProto


class ModelNotTaken(AuthorError):
    """An ONNX model cannot be taken in.

    Attributes:
        what: the fault.
        remedy: what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}; {remedy}")


class ModelRefused(ModelNotTaken):
    """It cannot be read, is no ONNX model, or is one that ONNX's own checker refuses."""


class ModelFileAbsent(ModelRefused):
    """The file is not there."""


class ModelOverLimit(ModelNotTaken):
    """It has more bytes than one artifact can hold."""


class GraphsTooDeep(ModelNotTaken):
    """Graphs of If, Loop or Scan nest too deep."""


class DataFileMissing(ModelNotTaken):
    """Tensors are in other files, which are missing or must not be read."""


class OpsetNotReached(ModelNotTaken):
    """Its opset cannot be brought to the one that programs are recorded in."""


def first_line(error: BaseException) -> str:
    """Return the first line of another package's error text, cut to what a message can hold."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


# --- the file ------------------------------------------------------------------------------


def read_model(source: ModelSource) -> ModelProto:
    """Return the model in a file, in bytes, or a copy of one, with the tensors of other files.

    Such files are read from beneath the folder of the model's own file, and from nowhere else.

    Raises ModelRefused, ModelFileAbsent, ModelOverLimit, GraphsTooDeep, DataFileMissing.
    """
    model, folder = _parsed(source)
    check_form(model)
    _load_external(model, folder)
    size = _size(model)
    if size > MAX_MODEL_BYTES:
        raise _too_large(f"{size} bytes")
    return model


def _size(model: ModelProto) -> int:
    """Return the size in bytes, without weights that are plainly whole being encoded for it."""
    light, large = without_weights(model)
    if not all(map(is_whole, large.values())):
        return model.ByteSize()
    return light.ByteSize() + sum(len(tensor.raw_data) for tensor in large.values())


@contextmanager
def opened_model(
    source: bytes | str | os.PathLike[str],
) -> Iterator[tuple[ModelProto, dict[str, StoredTensor]]]:
    """Yield a model without the values of its large initializers, and these tensors by name.

    Their values are read when they are asked for, until the end of the context, from the bytes
    given, or from the file at a path and the files of tensors beneath its folder. In bytes it may
    name such files, as `bounds.check_bounds` tells. NotRead within
    the context becomes ModelRefused, and so does a file that changed meanwhile.

    Raises what `read_model` raises.
    """
    if isinstance(source, bytes):
        model, large = _parted(InMemory(source), f"what is given ({len(source)} bytes)")
        yield model, large
        return
    path = Path(source)
    try:
        with open_files() as files:
            with _reading(path):
                file = files.open(path)
            if file.size > MAX_MODEL_BYTES:
                raise _too_large(f"{file.size} bytes")
            model, large = _parted(file, repr(path.name))
            large |= _external(model, path.parent, files)
            _load_external(model, path.parent)
            yield model, large
    except NotRead as error:
        raise ModelRefused(
            str(error), "let nobody write to the file while it is read, and start again"
        ) from error


def _parted(content: Content, name: str) -> tuple[ModelProto, dict[str, StoredTensor]]:
    try:
        model, large = parted(content)
    except ProtobufDecodeError as error:
        raise _no_model(name, error) from error
    _check_has_graph(model)
    return model, large


def _external(model: ModelProto, folder: Path, files: OpenFiles) -> dict[str, StoredTensor]:
    """Return the large initializers in other files; in the model they have no values then."""
    outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    _check_external_size(outside, folder)
    times = Counter(tensor.name for tensor in model.graph.initializer)
    found = {}
    for tensor in outside:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        made = described(tensor)
        if times[tensor.name] > 1 or not is_large(made):
            continue  # which onnx reads, or refuses
        try:
            file = files.open(_beneath(folder, entries["location"]), follow=False)
            start = int(entries.get("offset") or 0)
            size = int(entries.get("length") or file.size - start)
            if start < 0 or size < 0 or start + size > file.size:
                raise ValueError(f"bytes {start} to {start + size}, and it has {file.size}")
        except (OSError, ValueError, TypeError, KeyError, NotRead) as error:
            raise DataFileMissing(
                f"the data of tensor {_location(tensor)} cannot be read: {first_line(error)}",
                "put the data files beside the model, as its exporter wrote them",
            ) from error
        if is_whole(made, size):
            tensor.CopyFrom(made)
            found[made.name] = StoredTensor(made, file, start)
    return found


def _beneath(folder: Path, location: str) -> Path:
    """Return the path of a data file. ValueError for one that is elsewhere, or a link."""
    path = folder / location
    if Path(location).is_absolute() or ".." in Path(location).parts:
        raise ValueError("it is not beneath the folder of the model")
    if path.parent.resolve() != (folder.resolve() / location).parent:
        raise ValueError("a link leads to it")
    return path


def _parsed(source: ModelSource) -> tuple[ModelProto, Path | None]:
    folder = None
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
    elif isinstance(source, bytes):
        model = _model_in(source, f"what is given ({len(source)} bytes)")
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        folder = path.parent
        model = _model_in(_content(path), repr(path.name))
    else:
        raise ModelRefused(
            f"{source!r:.60} is neither the path of an ONNX file nor an onnx.ModelProto",
            "give one of them, or the bytes of such a file",
        )
    _check_has_graph(model)
    return model, folder


def _check_has_graph(model: ModelProto) -> None:
    if not model.HasField("graph") or not model.ir_version:
        raise ModelRefused("there is no graph in it", "it is not an ONNX model")
    if not model.graph.output:
        raise ModelRefused(
            f"its graph {model.graph.name!r} has no outputs",
            "what bbnode compiled or recorded is replayed by CompiledModule",
        )


def _content(path: Path) -> bytes:
    with _reading(path):
        size = path.stat().st_size
        if not path.is_file():  # a device has no size, and may have no end
            raise NotRead(f"{path.name!r} is not a file")
        if size > MAX_MODEL_BYTES:
            raise _too_large(f"{size} bytes")
        return path.read_bytes()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except NotRead as error:
        raise ModelRefused(str(error), "give an ONNX file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise (ModelFileAbsent if absent else ModelRefused)(
            f"cannot read {path.name!r}: {getattr(error, 'strerror', None) or error}",
            "relative paths start at the working directory",
        ) from error


def _model_in(content: bytes, name: str) -> ModelProto:
    try:
        return parse_model(content)
    except DecodeError as error:
        raise _no_model(name, error) from error


def _no_model(name: str, error: Exception) -> ModelRefused:
    return ModelRefused(
        f"{name} is not an ONNX model, or only a part of one ({first_line(error)})",
        "export or download it again",
    )


def _too_large(what: str) -> ModelOverLimit:
    return ModelOverLimit(
        f"the model has {what}, and an artifact holds at most {MAX_MODEL_BYTES}",
        "quantize it, or export it in parts",
    )


def check_form(model: ModelProto) -> None:
    """Check that texts are texts and that graphs nest no deeper than `MAX_GRAPH_DEPTH`.

    protobuf accepts texts that are not UTF-8; reading such a field later would return bytes, or
    raise an error of another kind.

    Raises ModelRefused, GraphsTooDeep.
    """
    todo: list[tuple[Any, int]] = [(model, 0)]
    while todo:
        message, depth = todo.pop()
        where = str(message.DESCRIPTOR.name)
        if isinstance(message, GraphProto):
            depth += 1
            if depth > MAX_GRAPH_DEPTH + 1:  # the main graph is the first
                raise GraphsTooDeep(
                    f"an op is nested in more than {MAX_GRAPH_DEPTH} graphs of If, Loop or Scan",
                    "export the model with fewer",
                )
        if has_unknown_fields(message):
            raise ModelRefused(
                f"a {where} in it holds fields that ONNX {onnx.__version__} does not know",
                "install a newer onnx, or export the model for an older version of the format",
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
            raise ModelRefused(
                f"a text in it ({where}) is not UTF-8: it is damaged",
                "export or download it again",
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


def _load_external(model: ModelProto, folder: Path | None) -> None:
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
        raise DataFileMissing(
            f"tensor {outside[0].name!r} (and {len(outside) - 1} more) is in another file, "
            "which a ModelProto or bytes do not find",
            "give the path of the model, or load it with onnx.load",
        )
    _check_external_size(outside, folder)
    try:
        # Refuses paths that lead out of the folder, absolute ones and links.
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
    except (OSError, *ONNX_FAILURES) as error:
        raise DataFileMissing(
            f"the data of tensor {_location(outside[0])} cannot be read: {first_line(error)}",
            "put the data files beside the model, as its exporter wrote them",
        ) from error
    short = next((t for t in outside if t.data_location == TensorProto.EXTERNAL), None)
    if short is not None:
        raise DataFileMissing(
            f"the data of tensor {_location(short)} was not read", "export the model again"
        )
    for tensor in outside:  # so that it is what the same tensor in the model's own file is
        tensor.ClearField("data_location")


def _check_external_size(outside: list[TensorProto], folder: Path) -> None:
    total = 0
    for tensor in outside:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = folder / entries.get("location", "")
        try:
            size = path.stat().st_size
            total += min(size, int(entries.get("length") or size))
        except (OSError, ValueError) as error:
            raise DataFileMissing(
                f"the data of tensor {_location(tensor)} is not there: {first_line(error)}",
                "put the data files beside the model, as its exporter wrote them",
            ) from error
    if total > MAX_MODEL_BYTES:
        raise _too_large(f"{total} bytes of weights")


def _location(tensor: TensorProto) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return f"{tensor.name!r} (in {entries.get('location', 'a file without a name')!r:.80})"


def check_whole(model: ModelProto) -> None:
    """Run ONNX's own check, and what it leaves out; raises what it raises, and ModelRefused.

    It looks neither at what element types are called nor at how many values a tensor holds. It
    requires a shape for every port, unlike the format, and some exporters leave out unknown
    ones; so these ports get one during the check. It copies all that it looks at, so that weights
    that are plainly whole are left out.
    """
    light, large = without_weights(model)
    if all(map(is_whole, large.values())):
        model = light
    declared = [
        (info.name, info.type)
        for graph in (*_parts(model, GraphProto), *_parts(model, FunctionProto))
        for info in (*getattr(graph, "input", ()), *getattr(graph, "output", ()), *graph.value_info)
        if isinstance(info, ValueInfoProto)  # a function's ports are names alone
    ]
    for name, kind in declared:
        _check_elements(name, kind)
    shapeless = [
        kind.tensor_type
        for _, kind in declared
        if kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
    ]
    for tensor_type in shapeless:
        tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    finally:
        for tensor_type in shapeless:
            tensor_type.ClearField("shape")
    check_values(_parts(model, TensorProto))


def check_values(tensors: Iterable[TensorProto]) -> None:
    """Raise ModelRefused for a tensor without just as many values as it declares."""
    for tensor in tensors:
        if not is_whole(tensor):
            try:
                Tensor(tensor).numpy()
            except AuthorError as error:
                what, _, remedy = str(error).rpartition("; ")
                raise ModelRefused(what, remedy) from error


def _check_elements(name: str, kind: TypeProto) -> None:
    """Raise ModelRefused where a declared type is of elements that ONNX does not know."""
    while (which := kind.WhichOneof("value")) not in (None, "tensor_type", "sparse_tensor_type"):
        held = getattr(kind, which)
        if which == "opaque_type":
            return
        kind = held.value_type if which == "map_type" else held.elem_type
    if which is not None and getattr(kind, which).elem_type not in _ELEMENT_TYPES:
        raise ModelRefused(
            f"{name!r:.80} is declared to be of element type {getattr(kind, which).elem_type}, "
            "which is none of ONNX's",
            "export or download it again",
        )


def brought_up(model: ModelProto) -> ModelProto:
    """Return a model of the author as one flat graph at the opset of programs.

    `ai.onnx` is at `keys.ONNX_OPSET_VERSION`, or for ops that came after it at the first version
    that has all of them, up to `keys.NEWEST_OPSET_VERSION`; and `ai.onnx.ml` at `ML_OPSET_VERSION`
    where its ops mean the same there. Ops that only ONNX Runtime has in `ai.onnx` are those that
    ONNX has in their place, and maps of probabilities are the tensors in them. Bounds
    (`check_form`, `bounds.check_bounds`) are for the caller to check.

    Raises ModelRefused, OpsetNotReached.
    """
    try:
        model = with_onnx_spelling(model)
        check_whole(model)
        newest = onnx.defs.onnx_opset_version()
        if onnx_version(model) > newest:
            raise OpsetNotReached(
                f"its opset {onnx_version(model)} is newer than {newest}, the last one that the "
                f"installed onnx {onnx.__version__} knows",
                f"export it with opset {keys.ONNX_OPSET_VERSION}, or install a newer onnx",
            )
        made = _without_weight_inputs(without_functions(model))
        made = _without_new_functions(made)
        made = _to_recorded_opset(made, list(subgraph_of(made.graph).all_nodes()))
        return with_onnx_ops(made)
    except ONNX_FAILURES as error:
        raise ModelRefused(
            f"ONNX refuses the model: {first_line(error)}",
            "export it again, and see that onnx.checker.check_model takes it",
        ) from error


def _without_new_functions(model: ModelProto) -> ModelProto:
    """Return the model with what they stand for in the place of ops that came after our opset.

    Of those that ONNX defines by others: runtimes come to kernels of their own later, and inline
    them only where they know all ranks. What else is new stays.
    """
    version = onnx_version(model)
    if version <= keys.ONNX_OPSET_VERSION:
        return model
    changed = _changed(
        list(subgraph_of(model.graph).all_nodes()), "", version, keys.ONNX_OPSET_VERSION
    )
    for op_type in dict.fromkeys(node.op_type for node in changed):
        if is_function_op(op_type, version):
            model = without_op(model, op_type)
    return model


def _without_weight_inputs(model: ModelProto) -> ModelProto:
    """Return the model without the inputs that old files have for each of their weights.

    ONNX's converter adds weights of its own to such files, without the inputs.
    """
    if model.ir_version >= _WEIGHTS_ALONE_IR_VERSION:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    held = {tensor.name for tensor in made.graph.initializer}
    kept = [port for port in made.graph.input if port.name not in held]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    made.ir_version = _WEIGHTS_ALONE_IR_VERSION
    return made


# --- its opset -----------------------------------------------------------------------------


def _to_recorded_opset(model: ModelProto, nodes: list[OpNode]) -> ModelProto:
    """Return the model at `keys.ONNX_OPSET_VERSION`, and at `ML_OPSET_VERSION` where it can be.

    An op whose schema means the same at both versions is left alone; where one does not, ONNX's
    own converter rewrites the model, and its result is checked again. Raises OpsetNotReached.
    """
    versions = _versions(model)
    used = {_domain(node) for node in nodes}
    target = _target(nodes, versions.get("", 1))
    recorded = {"": target}
    if keys.ONNX_ML_DOMAIN in used:
        version = versions.get(keys.ONNX_ML_DOMAIN, 1)
        changed = _changed(nodes, keys.ONNX_ML_DOMAIN, version, ML_OPSET_VERSION)
        recorded[keys.ONNX_ML_DOMAIN] = version if changed else ML_OPSET_VERSION
    for domain in used - {"", keys.ONNX_ML_DOMAIN}:
        recorded[domain] = versions.get(domain, 1)
    changed = _changed(nodes, "", versions.get("", 1), target)
    if changed:
        made = _converted(model, versions.get("", 1), changed)
    else:
        made = ModelProto()
        made.CopyFrom(model)
    del made.opset_import[:]
    for domain, version in sorted(recorded.items()):
        made.opset_import.add(domain=domain, version=version)
    return made


def _target(nodes: list[OpNode], version: int) -> int:
    """Return the opset that a model is recorded at: ours, or the first one that has all its ops."""
    newest = min(version, keys.NEWEST_OPSET_VERSION)
    for target in range(keys.ONNX_OPSET_VERSION, newest + 1):
        if not _changed(nodes, "", version, target):
            return target
    return keys.ONNX_OPSET_VERSION


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


def _describe_again(made: ModelProto, model: ModelProto) -> None:
    """Adds to a converted model what the converter leaves out: devices, training, quantization.

    Raises OpsetNotReached when what it speaks of has another name after the conversion.
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
        raise OpsetNotReached(
            f"{lost[0]:.120} (and {len(lost) - 1} more) would be lost in bringing the model to "
            f"ai.onnx opset {keys.ONNX_OPSET_VERSION}",
            "export it again with that opset, or without these parts",
        )


def _converted(model: ModelProto, version: int, changed: list[OpNode]) -> ModelProto:
    target = keys.ONNX_OPSET_VERSION
    reason = ", ".join(dict.fromkeys(node.op_type for node in changed[:20]))
    cause: Exception | None = None
    try:
        made = onnx.version_converter.convert_version(rewritten(model), target)
        check_whole(made)
        reached = _versions(made).get("")
        if reached == target:
            retrained(made, model)
            _describe_again(made, model)
            return made
        reason += f" (the converter stopped at {reached})"
    except NotRewritable as error:
        reason, cause = str(error), error
    except (onnx.version_converter.ConvertError, *ONNX_FAILURES) as error:
        reason += f" ({first_line(error)})"
        cause = error
    raise OpsetNotReached(
        f"the model is of ai.onnx opset {version} and cannot be brought to {target}, because of "
        f"{reason}",
        f"export it again with opset {target} (opset_version={target})",
    ) from cause
