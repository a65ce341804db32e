"""Weights that a file keeps elsewhere than in initializers of their own.

Rule: what a layer reads is made an initializer under the name that the file gives it there, so that
it is trained, saved and exported like any other; values and results stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from bbnode.components.autodiff.builder import FLOATS, subgraphs
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.parameters import TENSOR_KIND, WAS_EQUAL, WAS_SPARSE
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.weightless import StoredTensor, copied

# PyTorch's older exporter keeps one of all initializers with equal values, and writes an Identity
# in the place of each other one, under that one's name.
_KEEPS_ONE_OF_EQUALS = "pytorch"
# Of a sparse tensor that is made dense: 256 MiB of float32.
_MOST_ELEMENTS = 1 << 26
# Inputs that hold the weights of a layer.
_WEIGHTS = {
    "MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "LSTM": 1, "GRU": 1, "RNN": 1,
}  # fmt: skip


def with_own_weights(
    model: ModelProto,
    wanted: Sequence[str] = (),
    apart: Mapping[str, StoredTensor] | None = None,
) -> ModelProto:
    """Return a model in which each weight is an initializer; the model itself where it is so.

    - An Identity of an initializer goes: its readers read the initializer. Where PyTorch's older
      exporter made one of several equal tensors, as layers have that are not trained yet, they
      become initializers of their own again: those whose numbers are all the same, and those that
      layers of one kind read. A weight that an embedding shares with a product stays shared.
    - Sparse initializers are dense ones, which are trained only where `trainable` names them.
    - Constant nodes become initializers where no layer has an initializer as its weight, or
      `wanted` names them.

    Args:
        model: of the author; it is not changed.
        wanted: names and patterns of what is to be trained (see `choose_parameters`).
        apart: initializers by name of which `model` has no values.

    Raises InvalidForwardModel for a sparse tensor of too many elements.
    """
    named = {each.removeprefix("!") for each in wanted}
    held = {tensor.name for tensor in model.graph.initializer}
    copies = [
        node
        for node in model.graph.node
        if node.op_type == "Identity" and is_onnx_domain(node.domain) and node.input[0] in held
    ]
    constants = [node for node in model.graph.node if _constant(node) is not None]
    if not _reads_one_of(model.graph, {node.output[0] for node in constants}, held):
        constants = [node for node in constants if node.output[0] in named]
    if not copies and not constants and not model.graph.sparse_initializer:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    graph.initializer.extend(_dense(tensor) for tensor in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    for tensor in [found for node in constants if (found := _constant(node)) is not None]:
        graph.initializer.append(tensor)
    gone = {node.output[0] for node in constants}
    _without_copies(graph, gone, apart or {}, unties=model.producer_name == _KEEPS_ONE_OF_EQUALS)
    kept = [node for node in graph.node if gone.isdisjoint(node.output)]
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(nodes)
    return made


def _without_copies(
    graph: GraphProto, gone: set[str], apart: Mapping[str, StoredTensor], *, unties: bool
) -> None:
    """Let readers of an Identity of an initializer read that one, or one of its own."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {info.name for info in graph.output}
    readers = _readers(graph)
    names: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "Identity" or not is_onnx_domain(node.domain):
            continue
        source = names.get(node.input[0], node.input[0])
        copy = node.output[0]
        if source not in held or copy in outputs:
            continue
        gone.add(copy)
        tensor = held[source]
        is_fresh = unties and _is_fresh(tensor, apart)
        if is_fresh or (unties and readers.get(copy, set()) & readers.get(source, set())):
            own = apart[source].whole() if source in apart else copied(tensor)
            own.name = copy
            if not is_fresh:
                own.metadata_props.add(key=TENSOR_KIND, value=WAS_EQUAL)
            graph.initializer.append(own)
            held[copy] = own
        else:
            names[copy] = source
    for node in _all_nodes(graph):
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]


def _readers(graph: GraphProto) -> dict[str, set[tuple[str, int]]]:
    """Return the ops that read each value, and as which of their inputs.

    A Transpose between is looked through, and so is no Identity.
    """
    found: dict[str, set[tuple[str, int]]] = {}
    for node in reversed([*_all_nodes(graph)]):
        if node.op_type == "Identity":
            continue
        for index, name in enumerate(node.input):
            through = found.get(node.output[0], set()) if node.op_type == "Transpose" else set()
            found.setdefault(name, set()).update(through or {(node.op_type, index)})
    return found


def _is_fresh(tensor: TensorProto, apart: Mapping[str, StoredTensor]) -> bool:
    """Return True if all numbers are the same: only such tensors are equal without being shared."""
    if tensor.data_type not in FLOATS or not math.prod(tensor.dims):
        return False
    stored = apart.get(tensor.name)
    values = numpy_helper.to_array(tensor) if stored is None else stored.array()
    flat = values.reshape(-1)
    return bool((flat == flat[0]).all())


def _constant(node: NodeProto) -> TensorProto | None:
    """Return the float tensor of a Constant node, under its name."""
    if node.op_type != "Constant" or not is_onnx_domain(node.domain):
        return None
    tensor = next((each.t for each in node.attribute if each.name == "value"), None)
    if tensor is None or tensor.data_type not in FLOATS:
        return None
    found = copied(tensor)
    found.name = node.output[0]
    return found


def _dense(tensor: SparseTensorProto) -> TensorProto:
    """Return a sparse tensor with its zeros; it says that it was sparse."""
    size = math.prod(tensor.dims)
    name = tensor.values.name
    if size > _MOST_ELEMENTS:
        raise InvalidForwardModel(
            what=f"the sparse tensor {name!r} has {size} elements, and training holds their zeros "
            f"too, of at most {_MOST_ELEMENTS}",
            remedy="make it smaller, or train the model without it",
        )
    values = numpy_helper.to_array(tensor.values)
    indices = numpy_helper.to_array(tensor.indices)
    flat = indices if indices.ndim == 1 else np.ravel_multi_index(indices.T, [*tensor.dims])
    dense = np.zeros(size, values.dtype)
    dense[flat] = values
    made = numpy_helper.from_array(dense.reshape([*tensor.dims]), name)
    made.metadata_props.add(key=TENSOR_KIND, value=WAS_SPARSE)
    return made


def _reads_one_of(graph: GraphProto, constants: set[str], held: set[str]) -> bool:
    """Return True if layers have some of `constants` as their weights, and none of `held`."""
    source: dict[str, str] = {}
    found = False
    for node in graph.node:
        if node.op_type in ("Cast", "Identity", "Reshape", "Transpose", "Unsqueeze"):
            source[node.output[0]] = source.get(node.input[0], node.input[0])
        at = _WEIGHTS.get(node.op_type)
        if at is None or not is_onnx_domain(node.domain) or len(node.input) <= at:
            continue
        weight = source.get(node.input[at], node.input[at])
        if weight in held:
            return False
        found = found or weight in constants
    return found


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from _all_nodes(inner)
