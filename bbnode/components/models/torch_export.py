"""From a PyTorch module to a forward model, and weights back into the module.

Rule: each parameter of the module is one initializer with the name and shape that
`named_parameters()` gives it, in that order; whatever else the exporter made is no initializer,
but for running statistics. So weights go back by name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.contracts import Weights
from bbnode.components.errors import BackendError
from bbnode.components.libraries import ONNXSCRIPT, TORCH
from bbnode.components.models.torch_errors import ExportFailed as ExportFailed
from bbnode.components.models.torch_gradients import check_module_gradients, leaves_of
from bbnode.components.models.torch_plain import embedding_faults, plain_ops
from bbnode.ir.errors import AuthorError, DeploymentError
from bbnode.ir.installation import install
from bbnode.ir.keys import ONNX_OPSET_VERSION

# A torch.nn.Module, a torch.Tensor: PyTorch is not there when this is type-checked.
Module: TypeAlias = Any
Tensor: TypeAlias = Any

# How far an output may be from PyTorch's, absolute and relative: float32 sums in another order.
TOLERANCE: Final = 1e-4

BATCH: Final = "batch"  # the name of the open first axis

# Loggers that tell what PyTorch lacks, or where in its own code a module fails; the error says it.
_LOUD: Final = (
    "torch.onnx._internal.exporter._registration",
    "torch.export._trace",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
)

# Where the exporter says of an initializer: PARAMETER, or BUFFER for what is not trained.
_KIND: Final = "pkg.torch.export.graph_signature.InputSpec.kind"

_TRAINING: Final = "bbnode.training"  # a value that is there while constants are folded

# Indices of inputs of BatchNormalization that are running statistics.
_RUNNING: Final = (3, 4)


class TorchMissing(DeploymentError):
    """PyTorch, or the library that it exports with, is not installed."""


class WeightsDoNotFit(AuthorError):
    """Weights are not those of the module that they are to be loaded into."""


def require_torch(*more: str) -> Any:
    """Return the module `torch`. Raises TorchMissing without it, or without one of `more`."""
    for name in ("torch", *more):
        try:
            importlib.import_module(name)
        except ImportError as error:
            wanted = {each.module: each for each in (TORCH, ONNXSCRIPT)}[name].requirement
            raise TorchMissing(f"{name} can't be imported ({error}); {install(wanted)}") from error
    return importlib.import_module("torch")


def export(
    module: Module,
    example: Any,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    check_gradients: bool = True,
) -> ModelProto:
    """Export a module as a forward model, and check that it gives what the module gives.

    Args:
        module: a torch.nn.Module, in training or evaluation mode; it is left as it was.
        example: its arguments: a tensor or numpy array, or a tuple of several. The first axis of
            each is the batch, which stays open.
        inputs: names of the inputs; those of the arguments of `forward` by default.
        outputs: names of the outputs; "output", or "output0" and so on, by default.
        dynamic: further open axes: name of the input to {axis: name of the axis}.
        check_gradients: compare the gradient of each parameter with PyTorch's, in training mode
            without dropout, and refuse what stops or changes gradients. False means that the model
            is trained by the gradients of what is exported, whatever the module says of its own.

    Returns:
        A model at the opset that programs are recorded in. Its initializers are the module's
        parameters by `named_parameters()`, and the running statistics of its BatchNorm modules.
        A parameter that several modules share is one initializer. Those that have
        `requires_grad=False` are told as buffers: they are trained only if `trainable` names them.
        The model is in evaluation form; `mode="train"` of OnnxModel turns dropout and
        batch statistics on.

    Raises:
        TorchMissing: PyTorch or onnxscript is not installed.
        ExportFailed: PyTorch can't export the module with an open batch axis, a parameter got lost
            on the way, outputs differ by more than 1e-4, or a gradient does by more than 1e-3 of
            its greatest number; says which and what to do.
    """
    torch = require_torch("onnxscript")
    if not isinstance(module, torch.nn.Module):
        raise ExportFailed(f"{type(module).__name__} is not a torch.nn.Module; give an instance")
    tensors = _example(torch, module, example)
    names = _input_names(module, len(tensors), inputs)
    extra = _checked_axes(dynamic or {}, names, tensors)
    _check_names(module, names)
    _check_momenta(module)
    modes = {each: each.training for each in module.modules()}
    with torch.no_grad():
        try:
            _check_buffers(torch, module, tensors)
            module.eval()
            if check_gradients:
                _check_gradients_flow(torch, module, tensors)
            wanted = leaves_of(torch, _called(module, tensors))
            if outputs is not None and len(outputs) != len(wanted):
                raise ExportFailed(
                    f"{len(outputs)} output name(s) for {len(wanted)} output(s); give one of each"
                )
            told = tuple(outputs or _output_names(len(wanted)))
            model = _in_training_form(torch, module, tensors, names, told, extra)
            if model is None or _fault(torch, model, module, tensors) is not None:
                module.eval()
                model = _exported(torch, module, tensors, names, told, extra)
                fault = _fault(torch, model, module, tensors)
                if fault is not None:
                    raise ExportFailed(f"{type(module).__name__}: {fault}")
            if check_gradients:
                check_module_gradients(torch, model, module, tensors)
        finally:
            for each, mode in modes.items():
                each.training = mode
    return model


def load_weights(
    module: Module, weights: ModelProto | Mapping[str, Weights] | bytes | str | os.PathLike[str]
) -> None:
    """Put weights into a module: those of a model that `bbnode export` wrote, or arrays by name.

    Parameters and running statistics are replaced in place, all or none. A model's initializers of
    other names are left alone (it may have constants); a mapping may have no others.

    Args:
        module: a torch.nn.Module of the class that was exported.
        weights: an ONNX model, its bytes, the path of one, or arrays by the module's names.

    Raises:
        TorchMissing: PyTorch is not installed.
        WeightsDoNotFit: a parameter of the module is missing, is of another shape or dtype, or
            holds NaN or infinity; or the file is no ONNX model.
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise WeightsDoNotFit(f"{type(module).__name__} is not a torch.nn.Module; give an instance")
    given: Mapping[str, Weights]
    if isinstance(weights, Mapping):
        given = weights
    else:
        model = weights if isinstance(weights, ModelProto) else read_model(weights)
        given = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    needed = [name for name, _ in module.named_parameters()]
    missing = [name for name in needed if name not in given]
    if missing:
        raise WeightsDoNotFit(
            f"no weights for {_few(missing)} of {type(module).__name__}; given are "
            f"{_few(list(given))}; load them into the module that was exported"
        )
    unknown = [name for name in given if name not in own]
    if isinstance(weights, Mapping) and unknown:
        raise WeightsDoNotFit(
            f"{type(module).__name__} has no {_few(unknown)}; it has {_few(list(own))}"
        )
    new = {name: _fitting(torch, name, given[name], own[name]) for name in own if name in given}
    with torch.no_grad():
        for name, tensor in new.items():
            own[name].copy_(tensor)


def aliases(module: Module) -> dict[str, str]:
    """Return all names of a module's parameters and buffers, each to the first name of the same."""
    found: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def read_model(weights: bytes | str | os.PathLike[str]) -> ModelProto:
    """Return the model of bytes, or of the file at a path. Raises WeightsDoNotFit for no model."""
    try:
        if isinstance(weights, bytes):
            return onnx.load_model_from_string(weights)
        return onnx.load(Path(weights))
    except (OSError, ValueError, onnx.checker.ValidationError, ProtobufDecodeError) as error:
        what = f"{len(weights)} bytes" if isinstance(weights, bytes) else repr(str(weights))
        raise WeightsDoNotFit(
            f"{what}: no ONNX model can be read: {str(error).partition(chr(10))[0]}; give what "
            "`bbnode export` wrote"
        ) from error


def _fitting(torch: Any, name: str, value: Weights, own: Tensor) -> Tensor:
    array = np.asarray(value)
    if tuple(array.shape) != tuple(own.shape):
        raise WeightsDoNotFit(
            f"{name!r} has the shape {list(array.shape)}, the module's has {list(own.shape)}"
        )
    if array.dtype.kind not in "fiub" or (array.dtype.kind == "f") != own.is_floating_point():
        raise WeightsDoNotFit(f"{name!r} is {array.dtype}, the module's is {own.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise WeightsDoNotFit(f"{name!r} holds NaN or infinity")
    return torch.from_numpy(array.copy()).to(own.dtype)


def _example(torch: Any, module: Module, example: Any) -> tuple[Tensor, ...]:
    given = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not given:
        raise ExportFailed("the example is empty; give one tensor for each argument of forward")
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    found = []
    for index, each in enumerate(given):
        if isinstance(each, np.ndarray) and each.dtype.kind in "fiub":
            each = torch.from_numpy(np.array(each))
        if not isinstance(each, torch.Tensor):
            raise ExportFailed(
                f"argument {index} of the example is {type(each).__name__}; give a tensor or a "
                "numpy array of numbers"
            )
        if each.dim() == 0 or 0 in each.shape:
            raise ExportFailed(
                f"argument {index} of the example has the shape {list(each.shape)}; give a batch "
                "of one example or more, on the first axis"
            )
        found.append(each.detach().to(device))
    sizes = {len(each) for each in found}
    if len(sizes) > 1:
        raise ExportFailed(
            f"the arguments of the example have batches of {sorted(sizes)}; give them the same, "
            "[batch, …] each: what is of no one example, such as the edges of one graph, is given "
            "with each example ([batch, 2, edges]), or is a buffer of the module"
        )
    # A batch of one would be taken for a fixed size.
    return tuple(torch.cat([each, each]) if len(each) == 1 else each for each in found)


def _input_names(module: Module, count: int, given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        known = [
            each.name
            for each in inspect.signature(module.forward).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        names = tuple(known[:count])
        if len(names) < count:  # *args
            names = tuple(f"input{index}" for index in range(count)) if count > 1 else ("input",)
    else:
        names = (given,) if isinstance(given, str) else tuple(given)
    if len(names) != count or len(set(names)) != count:
        raise ExportFailed(
            f"{len(names)} input name(s) ({', '.join(names)}) for {count} argument(s); give each "
            "argument one of its own"
        )
    return names


def _check_names(module: Module, names: Sequence[str]) -> None:
    """Refuse an input that is called like a parameter or buffer: the graph has one of a name."""
    own = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    both = [name for name in names if name in own]
    if both:
        raise ExportFailed(
            f"{type(module).__name__}: the input {both[0]!r} is called like a parameter or buffer "
            f"of the module; give the inputs other names: inputs={[f'in_{n}' for n in names]}"
        )


def _check_momenta(module: Module) -> None:
    """Refuse running statistics that are the mean of all batches, which ONNX can't say."""
    for name, each in module.named_modules():
        if getattr(each, "track_running_stats", False) and each.momentum is None:
            raise ExportFailed(
                f"{type(module).__name__}: {name!r} ({type(each).__name__}) has momentum=None, and "
                "ONNX has no running statistics of all batches alike; give it a number, such as 0.1"
            )


def _output_names(count: int) -> tuple[str, ...]:
    return ("output",) if count == 1 else tuple(f"output{index}" for index in range(count))


def _checked_axes(
    dynamic: Mapping[str, Mapping[int, str]], names: Sequence[str], tensors: Sequence[Tensor]
) -> dict[str, dict[int, str]]:
    for name, axes in dynamic.items():
        if name not in names:
            raise ExportFailed(f"dynamic names {name!r}; the inputs are {', '.join(names)}")
        rank = tensors[names.index(name)].dim()
        wrong = [axis for axis in axes if type(axis) is not int or not 0 <= axis < rank]
        if wrong:
            raise ExportFailed(f"dynamic: {name!r} has no axis {wrong[0]!r}; it has {rank} axes")
    return {name: dict(axes) for name, axes in dynamic.items()}


def _in_training_form(
    torch: Any,
    module: Module,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    extra: Mapping[str, Mapping[int, str]],
) -> ModelProto | None:
    """Return the model with its Dropout nodes in it; None where that is not to be had.

    In evaluation mode PyTorch leaves dropout out, and nothing could turn it on. So the module is
    exported as in training, but for statistics of batches.
    """
    if not any(_drops(each) for each in module.modules()):
        return None
    module.train()
    for each in module.modules():
        if hasattr(each, "running_mean"):
            each.eval()
    try:
        return _exported(torch, module, tensors, names, outputs, extra)
    except ExportFailed:
        return None


def _drops(module: Module) -> bool:
    rates = (getattr(module, name, 0) for name in ("p", "dropout", "drop_prob", "dropout_p"))
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _exported(
    torch: Any,
    module: Module,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    extra: Mapping[str, Mapping[int, str]],
) -> ModelProto:
    dims: dict[str, Any] = {BATCH: torch.export.Dim(BATCH)}
    shapes = []
    for name in names:
        axes = {0: BATCH, **extra.get(name, {})}
        shapes.append({a: dims.setdefault(d, torch.export.Dim(d)) for a, d in axes.items()})
    try:
        with _quiet(), plain_ops(torch):
            program = torch.onnx.export(
                module,
                tuple(tensors),
                dynamo=True,
                opset_version=ONNX_OPSET_VERSION,
                input_names=list(names),
                output_names=list(outputs),
                dynamic_shapes=tuple(shapes),
                optimize=False,  # it would fold and transpose weights, under other names
                verbose=False,
            )
            _fold(program.model)
            model = program.model_proto
    except Exception as error:
        raise ExportFailed(
            f"PyTorch can't export {type(module).__name__} with an open batch axis: "
            f"{first_line(error)}; avoid branches on values, and sizes that are taken from the "
            "example"
        ) from error
    return _cleaned(model, module)


def _fold(model: Any) -> None:
    """Compute what depends on no weight, and leave Dropout and all that reads a weight alone."""
    optimizer = importlib.import_module("onnxscript.optimizer")
    ir = importlib.import_module("onnxscript").ir
    # A Dropout that does not say it is in training would be taken for an identity.
    training = ir.Value(name=_TRAINING, const_value=ir.tensor(np.array(True), name=_TRAINING))
    model.graph.register_initializer(training)
    for each in model.graph:
        if each.op_type == "Dropout":
            each.resize_inputs(3)
            each.replace_input_with(2, training)

    def should_fold(node: Any) -> bool | None:
        reads_weight = any(value is not None and value.is_initializer() for value in node.inputs)
        return False if reads_weight or node.op_type == "Dropout" else None

    optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=should_fold)


def first_line(error: BaseException) -> str:
    """Return the first line of the error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"


def _cleaned(model: ModelProto, module: Module) -> ModelProto:
    """Return the model with the module's names and order, without what it has no use for."""
    graph = model.graph
    names = aliases(module)
    renamed = {old: new for old, new in names.items() if old != new}
    for node in _all_nodes(graph):
        for index, name in enumerate(node.input):
            if name in renamed:
                node.input[index] = renamed[name]
        if node.op_type == "Dropout":
            del node.input[2:]  # training_mode
        del node.metadata_props[:]
        node.ClearField("doc_string")
    tensors = {renamed.get(t.name, t.name): t for t in graph.initializer}
    for name, tensor in tensors.items():
        tensor.name = name
    parameters = dict(module.named_parameters())
    _add_unused(parameters, tensors, module)
    statistics = {
        name
        for node in graph.node
        if node.op_type == "BatchNormalization"
        for name in (node.input[index] for index in _RUNNING)
    }
    kept = [name for name in names if name in tensors and names[name] == name
            and (name in parameters or name in statistics)]  # fmt: skip
    constants = [_constant(t) for name, t in tensors.items() if name not in set(kept)]
    constants += [_constant(shape) for shape in _fixed_shapes(graph)]
    nodes = _used([*constants, *graph.node], [port.name for port in graph.output])
    initializers = [tensors[name] for name in kept]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)
    del graph.value_info[:], graph.metadata_props[:], model.metadata_props[:]
    for name in kept:
        trained = name in parameters and parameters[name].requires_grad
        told = helper.make_tensor_value_info(name, tensors[name].data_type, tensors[name].dims)
        told.metadata_props.add(key=_KIND, value="PARAMETER" if trained else "BUFFER")
        graph.value_info.append(told)
    for port in (*graph.input, *graph.output):
        del port.metadata_props[:]
    graph.name = type(module).__name__
    return model


def _fixed_shapes(graph: onnx.GraphProto) -> list[TensorProto]:
    """Set sizes of Reshapes that PyTorch knows, where at most one is open; return the shapes.

    The exporter computes shapes from those of inputs, and ONNX's inference loses sizes there that
    gradients need: the heads of an Attention whose keys are repeated.
    """
    known = {info.name: info.type.tensor_type.shape.dim for info in graph.value_info}
    taken = {name for node in _all_nodes(graph) for name in node.output}
    found = []
    for node in graph.node:
        if node.op_type != "Reshape" or not known.get(node.output[0]):
            continue
        sizes = [dim.dim_value or -1 for dim in known[node.output[0]]]
        name = f"{node.output[0]}/shape"
        if sizes.count(-1) <= 1 and name not in taken:
            found.append(numpy_helper.from_array(np.array(sizes, np.int64), name))
            node.input[1] = name
    return found


def _add_unused(
    parameters: Mapping[str, Any], tensors: dict[str, TensorProto], module: Module
) -> None:
    """Add the parameters that outputs do not depend on, so that weights go back by name.

    Raises ExportFailed for one that the exporter lost or changed, though outputs depend on it.
    """
    for name, parameter in parameters.items():
        shape = list(parameter.shape)
        if name not in tensors and not parameter.requires_grad:
            tensors[name] = numpy_helper.from_array(parameter.detach().cpu().numpy(), name)
        elif name not in tensors or list(tensors[name].dims) != shape:
            what = f"made {list(tensors[name].dims)} of" if name in tensors else "lost"
            raise ExportFailed(
                f"{type(module).__name__}: the exporter {what} the parameter {name!r}, which is "
                f"{shape}; delete it where forward does not use it, or set its requires_grad to "
                "False"
            )


def _used(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    """Return the nodes that outputs depend on, in their order."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
            for inner in _inner_nodes(node):
                wanted.update(inner.input)
    return kept[::-1]


def _all_nodes(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        yield from _inner_nodes(node)


def _inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            yield from _all_nodes(graph)


def _constant(tensor: TensorProto) -> NodeProto:
    return helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor)


def _fault(torch: Any, model: ModelProto, module: Module, tensors: Sequence[Tensor]) -> str | None:
    """Say where the model differs from the module in evaluation mode, for two sizes of batch."""
    module.eval()
    try:
        prepared = OrtBackend(OrtBackendConfig()).prepare(model)
        for batch in (tensors, [torch.cat([each, each[:1]]) for each in tensors]):
            wanted = leaves_of(torch, _called(module, batch))
            made = prepared.run([each.cpu().numpy() for each in batch])
            for port, have, want in zip(model.graph.output, made, wanted, strict=True):
                told = _difference(np.asarray(have), want.detach().cpu().numpy())
                if told:
                    return (
                        f"output {port.name!r} of the exported model is not what PyTorch gives for "
                        f"a batch of {len(batch[0])}: {told}; export the module in parts to find "
                        "the one that differs"
                    )
    except BackendError as error:
        return f"the exported model does not run: {error}"
    return None


def _difference(have: Weights, want: Weights) -> str:
    if have.shape != want.shape:
        return f"shape {list(have.shape)} instead of {list(want.shape)}"
    if have.dtype != want.dtype:
        return f"{have.dtype} instead of {want.dtype}"
    if have.dtype.kind != "f":
        wrong = int((have != want).sum())
        return f"{wrong} of {have.size} values differ" if wrong else ""
    with np.errstate(invalid="ignore"):
        if np.allclose(have, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return ""
        return f"by up to {float(np.nanmax(np.abs(np.subtract(have, want)))):.3g}"


def _check_gradients_flow(torch: Any, module: Module, tensors: Sequence[Tensor]) -> None:
    """Refuse a module that stops gradients: ONNX has no op that says so, and they would pass."""
    stops = {torch.Tensor.detach: "detach()", torch.detach: "detach()",
             torch.Tensor.data.__get__: ".data"}  # fmt: skip
    overrides = importlib.import_module("torch.overrides")
    found: list[str] = []

    class GradientStops(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in stops and args[0].requires_grad:
                found.append(f"forward stops gradients with {stops[func]}")
            if func is torch.Tensor.register_hook:
                found.append("forward changes gradients by a hook")
            found.extend(embedding_faults(torch, func, args, kwargs or {}))
            if getattr(func, "__name__", "") == "_set_grad_enabled" and args == (False,):
                found.append("forward stops gradients with torch.no_grad()")
            return func(*args, **(kwargs or {}))

    found += _hooks(module)
    with torch.enable_grad(), GradientStops():
        outputs = _called(module, tensors)
    found += _own_gradients(leaves_of(torch, outputs))
    if found:
        raise ExportFailed(
            f"{type(module).__name__}: {found[0]}, which ONNX can't say, so training would differ; "
            "take it out, train with bbnode.TorchModel, or export with check_gradients=False where "
            "gradients of the exported model are what you mean"
        )


def _hooks(module: Module) -> list[str]:
    """Return what changes the gradients of parameters or modules behind the graph's back."""
    found = []
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            found.append(f"a hook changes the gradient of {name!r}")
    for name, each in module.named_modules():
        if each._backward_hooks or getattr(each, "_backward_pre_hooks", None):
            found.append(f"a backward hook of {name or type(each).__name__!r} may change gradients")
    return found


def _own_gradients(outputs: Sequence[Tensor]) -> list[str]:
    """Return the functions behind outputs whose gradient is written in Python, not derived."""
    custom = importlib.import_module("torch.autograd.function").BackwardCFunction
    todo = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen = set()
    while todo:
        step = todo.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        name = type(step).__name__.removesuffix("Backward")
        # Which computes the same gradient again.
        if isinstance(step, custom) and name != "CheckpointFunction":
            return [f"{name} (a torch.autograd.Function) has a gradient of its own"]
        todo.extend(before for before, _ in step.next_functions)
    return []


def _check_buffers(torch: Any, module: Module, tensors: Sequence[Tensor]) -> None:
    """Refuse a module whose buffers move while it trains, but for running statistics."""
    statistics = {
        id(buffer)
        for each in module.modules()
        if getattr(each, "track_running_stats", False)
        for buffer in each.buffers(recurse=False)
    }
    buffers = dict(module.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    module.train()
    try:
        with torch.random.fork_rng(devices=[]):  # of dropout
            _called(module, tensors)
        for name, buffer in module.named_buffers():
            old = before.get(name)
            same = old is not None and torch.equal(buffer.nan_to_num(), old.nan_to_num())
            if not same and id(buffer) not in statistics:
                raise ExportFailed(
                    f"{type(module).__name__}: forward changes the buffer {name!r} in training "
                    "mode, and only running statistics of BatchNorm move in a model; take it out "
                    "of forward"
                )
    finally:
        for name, buffer in buffers.items():
            buffer.copy_(before[name])


def _called(module: Module, tensors: Sequence[Tensor]) -> Any:
    try:
        return module(*(each.clone() for each in tensors))
    except Exception as error:
        raise ExportFailed(
            f"{type(module).__name__} does not take the example: {first_line(error)}; give the "
            "arguments of its forward, each with the batch on the first axis"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what PyTorch says about its own parts while it exports.

    As errors, which they are in tests, its warnings would end the export. What the module itself
    warns of is told when it is called.
    """
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _few(names: Sequence[str]) -> str:
    told = [repr(name) for name in itertools.islice(names, 4)]
    return (
        ", ".join([*told, f"{len(names) - len(told)} more"] if len(names) > 4 else told) or "none"
    )
