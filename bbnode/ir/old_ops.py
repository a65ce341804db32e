"""Old spellings of ops that ONNX's version converter takes for the new ones, or leaves broken.

Rule: each is rewritten in ops of its own opset, whose conversion is right, or refused by its name.
What is here was found by running ONNX's own node tests of earlier releases before and after
a conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.version_converter
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.versions import onnx_version

# The first opset whose BatchNormalization says whether it trains.
_TRAINS_BY_ATTRIBUTE = 14
# The first opset whose Resize says how it maps pixels.
_RESIZE_BY_PIXELS = 11


class NotRewritable(Exception):
    """An old op that no newer one stands for; the text names it. Never leaves the intake."""


@dataclass(slots=True)
class _Old:
    """A model that is being rewritten, and what is known of its values."""

    version: int
    ranks: Mapping[str, int]
    constants: Mapping[str, TensorProto]
    names: set[str]
    nodes: Sequence[NodeProto]

    def name(self, hint: str) -> str:
        """Return a name that no value of the model has."""
        found, count = hint, 0
        while found in self.names:
            count += 1
            found = f"{hint}_{count}"
        self.names.add(found)
        return found


# Of one node: the nodes in its place.
_Rewrite = Callable[[NodeProto, _Old], Sequence[NodeProto]]


def rewritten(model: ModelProto) -> ModelProto:
    """Return a model whose conversion to newer opsets is right; it is not changed.

    Raises NotRewritable.
    """
    version = onnx_version(model)
    wanted = {op for op, (before, _) in _OLD.items() if version < before} | {"Upsample"}
    graphs = _graphs(model)
    if not any(node.op_type in wanted for graph in graphs for node in graph.node):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    graphs = _graphs(made)
    everywhere = [node for graph in graphs for node in graph.node]
    old = _Old(version, _ranks(made), _constants(graphs), _names(graphs), everywhere)
    for graph in reversed(graphs):  # nested ones first: writing a node again makes them others
        nodes: list[NodeProto] = []
        for node in graph.node:
            if node.op_type in wanted & _OLD.keys() and is_onnx_domain(node.domain):
                nodes += _OLD[node.op_type][1](node, old)
            else:
                nodes.append(node)
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
    return _with_asymmetric_resizes(made) if version < _RESIZE_BY_PIXELS else made


def _with_asymmetric_resizes(model: ModelProto) -> ModelProto:
    """Return a model of opset 10 whose resizes say what they mean: ONNX's converter does not.

    Before 11, an index is divided by the scale; a fraction of it is cut off where an axis grows,
    and rounded up where it shrinks, as ONNX's node tests and ONNX Runtime have it.
    """
    graphs = _graphs(model)
    nodes = [node for graph in graphs for node in graph.node]
    if not any(node.op_type in ("Resize", "Upsample") for node in nodes):
        return model
    growing = {node.output[0] for node in nodes if node.op_type == "Upsample"}
    made = onnx.version_converter.convert_version(model, _RESIZE_BY_PIXELS - 1)
    graphs = _graphs(made)
    constants = _constants(graphs)
    for node in [node for graph in graphs for node in graph.node if node.op_type == "Resize"]:
        told = {"coordinate_transformation_mode": "asymmetric"}
        if any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
            pass
        elif node.output[0] in growing:
            told["nearest_mode"] = "floor"
        else:
            scales = constants.get(node.input[1])
            values = None if scales is None else numpy_helper.to_array(scales)
            if values is None or ((values < 1).any() and (values > 1).any()):
                raise NotRewritable(
                    f"Resize {node.name!r} (what it rounds to depends on its scales, which "
                    "the model does not tell, or which grow and shrink at once)"
                )
            told["nearest_mode"] = "ceil" if (values < 1).any() else "floor"
        node.attribute.extend(helper.make_attribute(name, text) for name, text in told.items())
    return made


def _scan(node: NodeProto, _: _Old) -> Sequence[NodeProto]:
    raise NotRewritable(
        f"Scan {node.name!r} (of opset 8 it has a batch axis and lengths of sequences, that of "
        "newer opsets has neither)"
    )


def _hardmax(node: NodeProto, old: _Old) -> Sequence[NodeProto]:
    """Before 13 its input is seen as a matrix, cut before `axis`."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if axis < 0:
        # Flatten has no negative axes before opset 11.
        rank = _rank(node.input[0], node, old)
        axis += rank
    x, y = node.input[0], node.output[0]
    shape, flat, chosen = (old.name(f"{y}.{part}") for part in ("shape", "flat", "chosen"))
    return [
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Flatten", [x], [flat], axis=axis),
        helper.make_node("Hardmax", [flat], [chosen], node.name, axis=1),
        helper.make_node("Reshape", [chosen, shape], [y]),
    ]


def _prelu(node: NodeProto, old: _Old) -> Sequence[NodeProto]:
    """Before 7 a slope [C] is of the channels, the second axis, whatever follows it."""
    x, slope = node.input
    tensor = old.constants.get(slope)
    size = None if tensor is None else math.prod(tensor.dims)
    if size == 1 or _rank(x, node, old) == 2:
        return [node]
    if old.ranks.get(slope, 1) != 1:
        raise NotRewritable(f"PRelu {node.name!r} (its slope is neither [1] nor [C])")
    axes = list(range(1, old.ranks[x] - 1))
    spread = old.name(f"{slope}.of_channels")
    made = helper.make_node("PRelu", [x, spread], [node.output[0]], node.name)
    return [helper.make_node("Unsqueeze", [slope], [spread], axes=axes), made]


def _resize(node: NodeProto, old: _Old) -> Sequence[NodeProto]:
    """Before 13 an empty tensor means an input that is left out; since, both are not allowed."""
    mode = next((a.s for a in node.attribute if a.name == "coordinate_transformation_mode"), b"")
    if mode == b"tf_half_pixel_for_nn":
        raise NotRewritable(f"Resize {node.name!r} (no newer opset has tf_half_pixel_for_nn)")
    if old.version < 11 or len(node.input) < 4 or not node.input[3]:
        return [node]
    made = NodeProto()
    made.CopyFrom(node)
    sizes = old.constants.get(node.input[3])
    if sizes is not None and math.prod(sizes.dims) == 0:
        del made.input[3]
    else:
        made.input[2] = ""
    return [made]


def _norm(node: NodeProto, old: _Old) -> Sequence[NodeProto]:
    """Before 14 further outputs say that it trains; `retrained` says it again afterwards."""
    if not _trains(node):
        return [node]
    read = {name for each in old.nodes for name in each.input}
    if any(name in read for name in node.output[3:]):
        raise NotRewritable(
            f"BatchNormalization {node.name!r} (newer ones do not hand out the statistics of the "
            "batch, which the model reads)"
        )
    made = NodeProto()
    made.CopyFrom(node)
    del made.output[1:]
    return [made]


def _trains(node: NodeProto) -> bool:
    is_norm = node.op_type == "BatchNormalization" and is_onnx_domain(node.domain)
    return is_norm and any(node.output[1:])


def retrained(made: ModelProto, model: ModelProto) -> None:
    """Put BatchNormalization nodes of a converted model into training, where `model` has them so.

    `model` is of an opset before 14, where it is said by outputs alone, and `made` of a newer one.
    """
    training = {
        node.output[0]: node.output[1:3]
        for graph in _graphs(model)
        for node in graph.node
        if _trains(node)
    }
    if not training or onnx_version(model) >= _TRAINS_BY_ATTRIBUTE:
        return
    for node in [node for graph in _graphs(made) for node in graph.node]:
        if node.op_type == "BatchNormalization" and node.output[0] in training:
            kept = [each for each in node.attribute if each.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("training_mode", 1)])
            node.output.extend(training[node.output[0]])


# The opset before which an op is an old one, and what is done then.
_OLD: Mapping[str, tuple[int, _Rewrite]] = {
    "BatchNormalization": (_TRAINS_BY_ATTRIBUTE, _norm),
    "Hardmax": (13, _hardmax),
    "PRelu": (7, _prelu),
    "Resize": (13, _resize),
    "Scan": (9, _scan),
}


def _rank(value: str, node: NodeProto, old: _Old) -> int:
    found = old.ranks.get(value)
    if found is None:
        raise NotRewritable(
            f"{node.op_type} {node.name!r} (it depends on the rank of {value!r}, which the model "
            "does not tell)"
        )
    return found


def _graphs(model: ModelProto) -> list[GraphProto]:
    """Return all graphs of a model, nested ones after those that they stand in."""
    found: list[GraphProto] = []
    todo: list[Any] = [model.graph]
    while todo:
        graph = todo.pop()
        found.append(graph)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    todo.append(attribute.g)
                todo.extend(attribute.graphs)
    return found


def _ranks(model: ModelProto) -> dict[str, int]:
    """Return the ranks that ONNX infers, of values of nested graphs as well."""
    typed = onnx.shape_inference.infer_shapes(model)
    found: dict[str, int] = {}
    for graph in _graphs(typed):
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.HasField("shape"):
                found[info.name] = len(info.type.tensor_type.shape.dim)
        found.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    return found


def _constants(graphs: Sequence[GraphProto]) -> dict[str, TensorProto]:
    found: dict[str, TensorProto] = {}
    for graph in graphs:
        found.update((tensor.name, tensor) for tensor in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return found


def _names(graphs: Sequence[GraphProto]) -> set[str]:
    found: set[str] = set()
    for graph in graphs:
        found.update(info.name for info in graph.input)
        found.update(tensor.name for tensor in graph.initializer)
        for node in graph.node:
            found.update((*node.input, *node.output))
    return found
