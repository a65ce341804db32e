"""The initializers of a forward model that are trained.

Rule: by default, every float one with at least one use that a gradient can pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto, ModelProto, TensorProto

from bbnode.components.autodiff.builder import TRAINABLE, local_names, subgraphs
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.table import lookup


def parameter_names(model: ModelProto) -> tuple[str, ...]:
    """Return float initializers with at least one use that a gradient can pass."""
    used = _used(model.graph)
    return tuple(
        tensor.name
        for tensor in model.graph.initializer
        if tensor.name in used and tensor.data_type in TRAINABLE
    )


def _used(graph: GraphProto) -> set[str]:
    """Return the names with a use that a gradient can pass, in nested graphs too."""
    used: set[str] = set()
    for node in graph.node:
        entry = lookup(node.domain, node.op_type)
        settings = entry.constant_inputs if entry is not None else frozenset[int]()
        used.update(name for index, name in enumerate(node.input) if index not in settings)
        for inner in subgraphs(node):
            used |= _used(inner) - local_names(inner).keys()
    return used


def check_parameters(model: ModelProto, names: Sequence[str]) -> None:
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
        if tensors[name].data_type not in TRAINABLE:
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
