"""A forward model in the one form that is differentiated.

Rule: one flat graph at one opset, nothing hidden in functions, in inputs that shadow initializers,
or in files beside the model; its initializers are parted into those that are trained and constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    version_converter,
)

from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.parameters import choose_parameters, exporters_hints
from bbnode.ir.bounds import FileReference, OutOfBounds, check_bounds
from bbnode.ir.expansion import without_functions
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.keys import ONNX_OPSET_VERSION
from bbnode.ir.onnx_file import subgraph_of
from bbnode.ir.versions import means_the_same, relabelled


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
        left: float ones of these, with the reason why they are not trained.
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
    left: Mapping[str, str]
    outputs: tuple[ValueInfoProto, ...]
    producer: str


def read_forward(forward: ModelProto, wrt: Sequence[str] | None = None) -> ForwardGraph:
    """Check, flatten and upgrade `forward`, and split its initializers.

    Args:
        forward: an ONNX model, any opset that ONNX's version converter knows.
        wrt: names and patterns of the initializers to train (see `choose_parameters`).

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
    model = _upgrade(forward)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    chosen = choose_parameters(model, wrt or (), exporters_hints(forward))
    if not graph.output:
        raise InvalidForwardModel(what="it has no output", remedy="give the graph an output")
    trained = frozenset(chosen.trained)
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
        parameters=tuple(tensor for tensor in graph.initializer if tensor.name in trained),
        constants=tuple(tensor for tensor in graph.initializer if tensor.name not in trained),
        left=chosen.left,
        outputs=tuple(graph.output),
        producer=forward.producer_name,
    )


def _upgrade(forward: ModelProto) -> ModelProto:
    try:
        onnx.checker.check_model(forward)
        _check_opset(forward)
        model = without_functions(forward)
        if not _means_the_same(model):
            model = version_converter.convert_version(model, ONNX_OPSET_VERSION)
        elif _onnx_opset(model) != ONNX_OPSET_VERSION:
            model = relabelled(model, ONNX_OPSET_VERSION)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        # RuntimeError is what ONNX's C++ converter and inliner raise for whatever they refuse.
        summary = str(error).strip().splitlines()
        raise InvalidForwardModel(
            what=f"ONNX refuses it: {summary[0] if summary else type(error).__name__}",
            remedy="run onnx.checker.check_model on it and fix what that reports",
        ) from error
    return model


def _check_opset(model: ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    if _onnx_opset(model) > newest:
        raise InvalidForwardModel(
            what=f"its opset {_onnx_opset(model)} is newer than {newest}, the last one that the "
            f"installed onnx {onnx.__version__} knows",
            remedy=f"export it with opset {ONNX_OPSET_VERSION}, or install a newer onnx",
        )


def _means_the_same(model: ModelProto) -> bool:
    """Return True if every op means at the opset of programs what it means at the model's."""
    version = _onnx_opset(model)
    if version == ONNX_OPSET_VERSION:
        return True
    return all(
        means_the_same(node, version, ONNX_OPSET_VERSION)
        for node in subgraph_of(model.graph).all_nodes()
        if is_onnx_domain(node.domain)
    )


def _onnx_opset(model: ModelProto) -> int:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return int(entry.version)
    raise InvalidForwardModel(
        what="it does not import the ai.onnx opset",
        remedy=f"add helper.make_opsetid('', {ONNX_OPSET_VERSION}) to its opset_import",
    )
