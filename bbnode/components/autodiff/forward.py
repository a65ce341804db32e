"""Brings a forward model into the one form that is differentiated.

Rule: one flat graph at one opset, parameters found, nothing hidden in functions, in inputs
that shadow initializers, or in files beside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, inliner, version_converter

from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.losses import is_trainable_type
from bbnode.components.autodiff.table import lookup
from bbnode.ir.bounds import FileReference, OutOfBounds, check_bounds
from bbnode.ir.keys import ONNX_OPSET_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """A forward model taken apart.

    Attributes:
        name: of the graph.
        opset: version of `ai.onnx`.
        other_opsets: imports of further domains, as (domain, version).
        nodes: in topological order.
        inputs: what a caller feeds, parameters not among them.
        parameters: the tensors that are trained, in the order of the flat vector.
        constants: all other initializers.
        output: the value that the loss is computed from.
    """

    name: str
    opset: int
    other_opsets: tuple[tuple[str, int], ...]
    nodes: tuple[NodeProto, ...]
    inputs: tuple[ValueInfoProto, ...]
    parameters: tuple[TensorProto, ...]
    constants: tuple[TensorProto, ...]
    output: ValueInfoProto


def read_forward(forward: ModelProto, wrt: Sequence[str] | None = None) -> ForwardGraph:
    """Check, flatten and upgrade `forward`, and split its initializers.

    Args:
        forward: an ONNX model, any opset that ONNX's version converter knows.
        wrt: names of the initializers to train; by default every float one that is not only
            used as a setting (the exponent of a Pow, the shape of a Reshape).

    Raises:
        InvalidForwardModel: it is no valid model, or has nothing to train.
    """
    try:
        # Before ONNX's checker, which looks whether files that a model names are there.
        check_bounds(forward)
    except FileReference as error:
        raise InvalidForwardModel(
            what=str(error), remedy="load it with onnx.load(path), which reads such files in"
        ) from error
    except OutOfBounds as error:
        raise InvalidForwardModel(what=str(error), remedy="give a smaller model") from error
    model = _upgrade(forward)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    names = _parameter_names(model) if wrt is None else tuple(wrt)
    _check_parameters(model, names)
    if not graph.output:
        raise InvalidForwardModel(what="it has no output", remedy="give the graph an output")
    chosen = set(names)
    return ForwardGraph(
        name=graph.name or "model",
        opset=_onnx_opset(model),
        other_opsets=tuple(
            (entry.domain, int(entry.version))
            for entry in model.opset_import
            if entry.domain not in ("", "ai.onnx")
        ),
        nodes=tuple(graph.node),
        inputs=tuple(info for info in graph.input if info.name not in held),
        parameters=tuple(tensor for tensor in graph.initializer if tensor.name in chosen),
        constants=tuple(tensor for tensor in graph.initializer if tensor.name not in chosen),
        output=graph.output[0],
    )


def _upgrade(forward: ModelProto) -> ModelProto:
    try:
        onnx.checker.check_model(forward)
        model = inliner.inline_local_functions(forward) if forward.functions else forward
        if _onnx_opset(model) < ONNX_OPSET_VERSION:
            model = version_converter.convert_version(model, ONNX_OPSET_VERSION)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        # RuntimeError is what ONNX's C++ converter and inliner raise for whatever they refuse.
        summary = str(error).strip().splitlines()
        raise InvalidForwardModel(
            what=f"ONNX refuses it: {summary[0] if summary else type(error).__name__}",
            remedy="run onnx.checker.check_model on it and mend what that says",
        ) from error
    return model


def _onnx_opset(model: ModelProto) -> int:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return int(entry.version)
    raise InvalidForwardModel(
        what="it does not import the ai.onnx opset",
        remedy=f"add helper.make_opsetid('', {ONNX_OPSET_VERSION}) to its opset_import",
    )


def _parameter_names(model: ModelProto) -> tuple[str, ...]:
    """Float initializers with at least one use that a gradient can come through."""
    used: set[str] = set()
    for node in model.graph.node:
        entry = lookup(node.domain, node.op_type)
        settings = entry.constant_inputs if entry is not None else frozenset[int]()
        used.update(name for index, name in enumerate(node.input) if index not in settings)
    return tuple(
        tensor.name
        for tensor in model.graph.initializer
        if tensor.name in used and is_trainable_type(tensor.data_type)
    )


def _check_parameters(model: ModelProto, names: Sequence[str]) -> None:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if not names:
        raise InvalidForwardModel(
            what="it has no float initializer to train",
            remedy="store the weights as float32 initializers of the graph",
        )
    for name in names:
        if name not in tensors:
            raise InvalidForwardModel(
                what=f"there is no initializer {name!r} to train",
                remedy=f"choose among {', '.join(sorted(tensors)) or '(none)'}",
            )
        if not is_trainable_type(tensors[name].data_type):
            kind = TensorProto.DataType.Name(tensors[name].data_type)
            raise InvalidForwardModel(
                what=f"parameter {name!r} is {kind}",
                remedy="train float32 or float64 initializers; leave others out of `wrt`",
            )
    kinds = {tensors[name].data_type for name in names}
    if len(kinds) > 1:
        raise InvalidForwardModel(
            what="its parameters mix float32 and float64", remedy="convert them to one of the two"
        )
