"""A forward model in the one form that is differentiated.

Rule: one flat graph at one opset, nothing hidden in functions, in inputs that shadow initializers,
or in files beside the model; its initializers are parted into those that are trained and constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.functions import expand_functions
from bbnode.components.autodiff.own_weights import with_own_weights
from bbnode.components.autodiff.parameters import (
    ParameterChoice,
    choose_parameters,
    exporters_hints,
)
from bbnode.ir.bounds import FileReference, OutOfBounds, check_bounds
from bbnode.ir.intake import ModelNotTaken, brought_up, check_values, first_line
from bbnode.ir.keys import ONNX_OPSET_VERSION
from bbnode.ir.versions import onnx_version
from bbnode.ir.weightless import StoredTensor, copied, without_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """A forward model taken apart.

    Attributes:
        name: of the graph.
        opset: version of `ai.onnx`.
        other_opsets: imports of further domains, as (domain, version).
        nodes: in topological order.
        inputs: what a caller feeds, parameters not among them.
        parameters: the tensors that are trained, in the order of the flat vector; without values
            where these were kept apart.
        constants: all other initializers.
        choice: which float ones are trained, and why.
        outputs: in the order of the graph; the loss is computed from the first.
        producer: the name of the tool that wrote the model.
    """

    name: str
    opset: int
    other_opsets: tuple[tuple[str, int], ...]
    nodes: tuple[NodeProto, ...]
    inputs: tuple[ValueInfoProto, ...]
    parameters: tuple[TensorProto, ...]
    constants: tuple[TensorProto, ...]
    choice: ParameterChoice
    outputs: tuple[ValueInfoProto, ...]
    producer: str


def read_forward(
    forward: ModelProto,
    wrt: Sequence[str] | None = None,
    apart: Mapping[str, StoredTensor] | None = None,
) -> ForwardGraph:
    """Check, flatten and upgrade `forward`, and split its initializers.

    Args:
        forward: an ONNX model, any opset that ONNX's version converter knows.
        wrt: names and patterns of the initializers to train (see `choose_parameters`).
        apart: initializers by name of which `forward` has no values (`weightless.parted`).

    Raises:
        InvalidForwardModel: it is not a valid model, or has nothing to train.
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
    alone = apart or {}
    forward = with_own_weights(forward, wrt or (), alone)
    light, large = without_weights(forward, alone)
    _forget_notes(light)
    try:
        check_values(tensor for tensor in large.values() if tensor.name not in alone)
        model = brought_up(light)
    except ModelNotTaken as error:
        raise InvalidForwardModel(what=error.what, remedy=error.remedy) from error
    if not onnx_version(forward):
        raise InvalidForwardModel(
            what="it does not import the ai.onnx opset",
            remedy=f"add helper.make_opsetid('', {ONNX_OPSET_VERSION}) to its opset_import",
        )
    graph = model.graph
    tensors = _in_order(forward, large, graph.initializer)
    held = {tensor.name for tensor in tensors}

    def values(tensor: TensorProto) -> npt.NDArray[np.generic]:
        found = alone.get(tensor.name)
        return numpy_helper.to_array(tensor) if found is None else found.array()

    chosen = choose_parameters(model, wrt or (), exporters_hints(forward), tensors, values)
    if not graph.output:
        raise InvalidForwardModel(what="it has no output", remedy="give the graph an output")
    trained = frozenset(chosen.trained)
    try:
        graph = expand_functions(model, trained).graph
    except (RuntimeError, ValueError) as error:  # whatever ONNX's C++ parts refuse
        raise InvalidForwardModel(
            what=f"ONNX can't expand one of its function ops: {first_line(error)}",
            remedy="export it with the ops that the function stands for",
        ) from error
    return ForwardGraph(
        name=graph.name or "model",
        opset=onnx_version(model),
        other_opsets=tuple(
            (entry.domain, int(entry.version))
            for entry in model.opset_import
            if entry.domain not in ("", "ai.onnx")
        ),
        nodes=tuple(graph.node),
        inputs=tuple(info for info in graph.input if info.name not in held),
        parameters=tuple(tensor for tensor in tensors if tensor.name in trained),
        constants=tuple(
            _alone(tensor, large, alone) for tensor in tensors if tensor.name not in trained
        ),
        choice=chosen,
        outputs=tuple(graph.output),
        producer=forward.producer_name,
    )


def _alone(
    tensor: TensorProto, large: Mapping[str, TensorProto], apart: Mapping[str, StoredTensor]
) -> TensorProto:
    """Return a tensor with its values, which keeps nothing else of the author's in memory."""
    if tensor.name in apart:
        return apart[tensor.name].whole()
    return copied(tensor) if tensor.name in large else tensor


def _forget_notes(model: ModelProto) -> None:
    """Clear what exporters note beside nodes (lines of source): longer than all else together."""
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")


def _in_order(
    forward: ModelProto, large: Mapping[str, TensorProto], small: Iterable[TensorProto]
) -> list[TensorProto]:
    """Return all tensors in the order of the author's model, then those that conversion added."""
    rest = {tensor.name: tensor for tensor in small}
    own = (tensor.name for tensor in forward.graph.initializer)
    ordered = [large[name] if name in large else rest.pop(name, None) for name in own]
    return [*(tensor for tensor in ordered if tensor is not None), *rest.values()]
