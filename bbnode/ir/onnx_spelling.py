"""The translation of ONNX Runtime's own `ai.onnx` ops into ONNX's ops.

Rule: the translation computes the same. It has two steps: before ONNX's checker sees the model, ops
that it does not know are moved to another domain; at the opset of programs, where ONNX has an op
for each of them, they are replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    helper,
    numpy_helper,
)

from bbnode.ir import keys
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.versions import onnx_version

logger = logging.getLogger(__name__)

# Ops that ONNX Runtime has in `ai.onnx` at every opset: the version from which on ONNX has the op
# (0: never), and the op that it has in its place.
_OF_THE_RUNTIME = {"LayerNormalization": (17, "LayerNormalization"),
                   "SimplifiedLayerNormalization": (0, "RMSNormalization")}  # fmt: skip
_WAITING = keys.PREFIX + "waiting"  # the domain of such ops between the two steps
_MAP_LABELS = ("classlabels_int64s", "classlabels_strings")


def with_onnx_spelling(model: ModelProto) -> ModelProto:
    """Return a model without ops that ONNX's checker does not know, and without maps.

    - Ops of `_OF_THE_RUNTIME` wait in a domain of their own for `with_onnx_ops`.
    - A ZipMap at the end, as exporters of scikit-learn and LightGBM write it, goes: the output is
      the tensor of what it would put into a map for each row, its columns in the order of classes.
      That is logged.

    - Sizes that are no sizes, -1 or "?", are open ones without a name.

    The model is not changed.
    """
    version = onnx_version(model)
    nameless = any(True for _ in _nameless_sizes(model.graph))
    waiting = [node for node in all_nodes(model.graph) if _waits(node, version)]
    maps = [node for node in model.graph.node if _ends_in_a_map(node, model.graph)]
    if not (waiting or maps or nameless):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    for dim in _nameless_sizes(made.graph):
        dim.Clear()
    for node in all_nodes(made.graph):
        if _waits(node, version):
            node.domain = _WAITING
    if waiting:
        made.opset_import.append(helper.make_opsetid(_WAITING, 1))
    for node in [node for node in made.graph.node if _ends_in_a_map(node, made.graph)]:
        _unzip(made.graph, node)
    return made


def with_onnx_ops(model: ModelProto) -> ModelProto:
    """Return a model at the opset of programs, with the ops that ONNX has for those that wait.

    The axes of a Pad are int64 in it, as ONNX's inference gives the result no type where they are
    int32. Raises ValueError for an op that gives what ONNX's does not.
    """
    axes = _small_axes(model)
    if not axes and not any(node.domain == _WAITING for node in all_nodes(model.graph)):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    taken = {name for node in all_nodes(made.graph) for name in (*node.input, *node.output)}
    for name, tensor in axes.items():
        wide = f"{name}_int64"
        while wide in taken or wide in axes:
            wide += "_"
        values = numpy_helper.to_array(tensor).astype(np.int64)
        made.graph.initializer.append(numpy_helper.from_array(values, wide))
        for node in all_nodes(made.graph):
            if _reads_axes(node) == name:
                node.input[3] = wide
    for node in all_nodes(made.graph):
        if node.domain != _WAITING:
            continue
        own, node.domain = node.op_type, ""
        node.op_type = _OF_THE_RUNTIME[own][1]
        if node.op_type == "RMSNormalization":
            if any(node.output[1:]):
                raise ValueError(
                    f"{own} {node.name!r} hands out its factor, and ONNX has no op that does"
                )
            del node.output[1:]
    kept = [entry for entry in made.opset_import if entry.domain != _WAITING]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    return made


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph, and those of nested graphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)
            for inner in attribute.graphs:
                yield from all_nodes(inner)


def _waits(node: NodeProto, version: int) -> bool:
    if node.op_type not in _OF_THE_RUNTIME or not is_onnx_domain(node.domain):
        return False
    since = _OF_THE_RUNTIME[node.op_type][0]
    return not since or version < since


def _nameless_sizes(graph: GraphProto) -> Iterator[TensorShapeProto.Dimension]:
    """Yield the sizes of ports and values that stand for any, each for its own.

    Two of one symbol would be taken for equal.
    """
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            text = dim.dim_param
            if dim.dim_value < 0 or (text and not any(map(str.isalpha, text))):
                yield dim


def _ends_in_a_map(node: NodeProto, graph: GraphProto) -> bool:
    """Return True for a ZipMap whose maps are an output, and nothing else."""
    if node.op_type != "ZipMap" or node.domain != keys.ONNX_ML_DOMAIN:
        return False
    name = node.output[0]
    read = any(name in each.input for each in all_nodes(graph))
    return not read and any(info.name == name for info in graph.output)


def _unzip(graph: GraphProto, node: NodeProto) -> None:
    """Replace the output of a ZipMap by the tensor that it reads."""
    tensor, name = node.input[0], node.output[0]
    labels: Sequence[Any] = next(
        (helper.get_attribute_value(a) for a in node.attribute if a.name in _MAP_LABELS), ()
    )
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in labels]
    logger.warning(
        "output %r is a map in the file, and a tensor [rows, %d] here; its columns are %s",
        name, len(texts), ", ".join(texts[:20]) + (", …" if len(texts) > 20 else ""),
    )  # fmt: skip
    for info in graph.output:
        if info.name == name:
            rows = helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, len(texts)])
            info.type.CopyFrom(rows.type)
    at = next(at for at, each in enumerate(graph.node) if each.output[:1] == [name])
    graph.node[at].CopyFrom(helper.make_node("Identity", [tensor], [name], name=node.name))


def _small_axes(model: ModelProto) -> dict[str, TensorProto]:
    """Return the int32 tensors that are the axes of a Pad."""
    axes = {}
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in all_nodes(model.graph):
        if node.op_type == "Constant":
            known.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        name = _reads_axes(node)
        if name in known and known[name].data_type == TensorProto.INT32:
            axes[name] = known[name]
    return axes


def _reads_axes(node: NodeProto) -> str:
    """Return the name of a Pad's axes, "" if it has none."""
    is_pad = node.op_type == "Pad" and is_onnx_domain(node.domain)
    return node.input[3] if is_pad and len(node.input) > 3 else ""
