"""Sums of clipped gradients of single examples: an ONNX graph around a model's gradient graph.

Rule: what an example adds to a sum is bounded whatever it holds. It goes through the gradient graph
alone, so that no op of a model and no loss mixes it with others; where layers are such that rows
can't be mixed, all go at once. Lengths are float64; sums are of whole steps, so that they are exact
in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bbnode.components.autodiff import TrainingGraphs
from bbnode.components.autodiff.builder import GraphBuilder, every_name
from bbnode.ir.graph import is_onnx_domain

_FLOAT, _DOUBLE, _INT64 = (
    int(each) for each in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64)
)

_AXES_ARE_INPUTS: Final = 18  # of ReduceSumSquare, from this opset on

# Ops of a matrix [N, F] that compute each number from the one in its place.
_OF_ONE: Final = frozenset(
    {
        "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Neg",
        "Relu", "Selu", "Sigmoid", "Softplus", "Tanh",
    }
)  # fmt: skip


def clipped_sums(graphs: TrainingGraphs, frozen: frozenset[int], *, at_once: bool) -> ModelProto:
    """Return the graph of the sum over examples, for a model that moves no statistics.

    Its inputs: the parameters; the model's inputs and the labels, an example a row; where masks are
    drawn the number of each example's draw, int64 [N]; the norm and the number of steps in 1,
    float64 []. Its outputs: whose gradient is not finite, bool [N, 1], in which case there is no
    sum; for each parameter but those with the numbers `frozen` the sum of the gradients, each
    scaled down to the norm and rounded towards 0 to whole steps, int64 flat.

    `at_once`: a loss is the mean of those of rows, so that these may go together, where the layers
    let them. It is Abadi et al., 2016, arXiv:1607.00133, algorithm 1, "compute gradient" and "clip
    gradient".
    """
    inner = graphs.gradients
    ports, count = [*inner.graph.input], len(graphs.parameter_names)
    own = {port.name for port in (*ports, *inner.graph.output)}
    own |= {tensor.name for tensor in inner.graph.initializer} | every_name(inner.graph.node)
    b = GraphBuilder(
        own, prefix="private/", opsets=[(o.domain, o.version) for o in inner.opset_import]
    )
    norm, per_one = b.fresh("norm"), b.fresh("steps_in_1")
    kept = [name for at, name in enumerate(graphs.gradient_names) if at not in frozen]
    given = ports
    parts = _apart(b, graphs, kept) if at_once else None
    if parts is None:
        given = [*ports[:count], *(_rows(port, b.fresh(port.name)) for port in ports[count:])]
        parts = _one_by_one(b, graphs, given[count:], kept)
        number = b.scalar(1.0, _DOUBLE)
    else:  # these are gradients of the mean, N times too short
        shape = b.op("Shape", parts[0])
        rows = b.op("Gather", shape, b.constant(np.zeros((), np.int64)), axis=0)
        number = b.op("Cast", rows, to=_DOUBLE)
    squares = [_square(b, part) for part in parts]
    square = squares[0]
    for each in squares[1:]:
        square = b.op("Add", square, each)
    wrong = b.op("Or", b.op("IsNaN", square), b.op("IsInf", square))
    length = b.op("Mul", b.op("Sqrt", square), number)
    shrunk = b.op("Div", norm, b.op("Max", length, norm))
    scale = b.op("Cast", b.op("Mul", b.op("Mul", shrunk, number), per_one), to=_FLOAT)
    sums = [
        b.op(
            "ReduceSum", b.op("Cast", b.op("Mul", part, scale), to=_INT64), b.ints([0]), keepdims=0
        )
        for part in parts
    ]

    scalars = [helper.make_tensor_value_info(name, _DOUBLE, []) for name in (norm, per_one)]
    told = [helper.make_tensor_value_info(wrong, int(TensorProto.BOOL), ["examples", 1])]
    told += [helper.make_tensor_value_info(each, _INT64, [None]) for each in sums]
    skipped = "".join(f".{at}" for at in sorted(frozen))
    name = inner.graph.name.removesuffix("gradients") + f"clipped_sums{skipped}"
    tensors = [*inner.graph.initializer, *b.initializers]
    made = ModelProto()
    made.CopyFrom(inner)
    made.graph.CopyFrom(helper.make_graph(b.nodes, name, [*given, *scalars], told, tensors))
    return made


def _square(b: GraphBuilder, part: str) -> str:
    """Emit the squared length of each row of [N, F], float64 [N, 1]."""
    wide, across = b.op("Cast", part, to=_DOUBLE), b.ints([1])
    if dict(b.opsets)[""] >= _AXES_ARE_INPUTS:
        return b.op("ReduceSumSquare", wide, across, keepdims=1)
    return b.op("ReduceSum", b.op("Mul", wide, wide), across, keepdims=1)


def _one_by_one(
    b: GraphBuilder, graphs: TrainingGraphs, rows: Sequence[ValueInfoProto], kept: Sequence[str]
) -> list[str]:
    """Emit a loop over examples; return the gradients of each parameter, float32 [N, F]."""
    inner = graphs.gradients
    ports = inner.graph.input[len(graphs.parameter_names) :]
    first, minus = b.ints([0]), b.ints([-1])
    body, scanned = b.nested(), []
    for port, row in zip(ports, rows, strict=True):
        one = ValueInfoProto()
        one.CopyFrom(row)
        one.name = b.fresh("example")
        if one.type.tensor_type.HasField("shape"):
            del one.type.tensor_type.shape.dim[0]
        is_draw = graphs.draws and port.name == graphs.draw_name
        given = [one.name] if is_draw else [one.name, first]
        op_type = "Identity" if is_draw else "Unsqueeze"
        body.nodes.append(helper.make_node(op_type, given, [port.name], name=port.name))
        scanned.append(one)
    body.nodes.extend(inner.graph.node)
    flat = [body.op("Reshape", name, minus) for name in kept]
    results = [helper.make_tensor_value_info(each, _FLOAT, [None]) for each in flat]
    loop = helper.make_graph(body.nodes, "example", scanned, results, body.initializers)
    given = [row.name for row in rows]
    return b.add("Scan", given, len(flat), body=loop, num_scan_inputs=len(given))


def _apart(b: GraphBuilder, graphs: TrainingGraphs, kept: Sequence[str]) -> list[str] | None:
    """Emit the gradients of all examples at once; return each parameter's over N, float32 [N, F].

    None where layers are no such that the last node of each gradient alone is a sum over rows: of
    products of a layer's input and what comes back to it.
    """
    inner, layers = graphs.gradients, _layers(graphs)
    if layers is None:
        return None
    weights, biases = layers
    made = {node.output[0]: node for node in inner.graph.node}
    names = dict(zip(graphs.gradient_names, graphs.parameter_names, strict=True))
    parts: list[str] = []
    tail = GraphBuilder(b.taken, prefix="private/row/")
    first, last, size = b.ints([1]), b.ints([2]), b.ints([0, -1])
    for name in kept:
        node, parameter = made[name], names[name]
        if parameter in weights and _is_product(node, weights[parameter]):
            left = tail.op("Unsqueeze", node.input[0], last)
            outer = tail.op("Mul", left, tail.op("Unsqueeze", node.input[1], first))
            parts.append(tail.op("Reshape", outer, size))
        elif parameter in biases and _is_sum(node, made):
            parts.append(node.input[1])
        else:
            return None
    dropped = set(graphs.gradient_names)
    b.nodes.extend(node for node in inner.graph.node if node.output[0] not in dropped)
    b.nodes.extend(tail.nodes)
    b.initializers.extend(tail.initializers)
    return parts


def _layers(graphs: TrainingGraphs) -> tuple[Mapping[str, str], frozenset[str]] | None:
    """Return the input of each weight's layer, and the biases, of a model of dense layers alone.

    None for any other. Each value of such a model is a matrix with a row of an example, made of
    that row alone; and so is the first output.
    """
    forward = graphs.forward.graph
    held = {*graphs.parameter_names, *(tensor.name for tensor in forward.initializer)}
    (x, *others) = (port for port in forward.input if port.name not in held)
    if others or len(x.type.tensor_type.shape.dim) != 2 or len(graphs.output_dims) != 2:
        return None
    uses = Counter(name for node in forward.node for name in node.input if name in held)
    matrices, weights, biases = {x.name}, {}, set()
    for node in forward.node:
        given, settings = [*node.input], {each.name: each for each in node.attribute}
        ok = is_onnx_domain(node.domain) and given[0] in matrices and len(node.output) == 1
        if node.op_type == "Gemm":
            ok = ok and not settings and uses[given[1]] == 1 and given[1] in held
            weights[given[1]] = given[0]
            ok = ok and all(uses[name] == 1 and name in held for name in given[2:])
            biases.update(given[2:])
        else:
            ok = ok and node.op_type in _OF_ONE and len(given) == 1
        if not ok:
            return None
        matrices.add(node.output[0])
    shapes = {
        name: tensor.dims
        for name, tensor in zip(graphs.parameter_names, graphs.initial, strict=True)
    }
    flat = all(len(shapes.get(name, ())) == 1 for name in biases)
    return (weights, frozenset(biases)) if flat else None


def _is_product(node: NodeProto, layer_input: str) -> bool:
    """Return True for input' @ gradient."""
    settings: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    plain = settings.pop("alpha", 1.0) == 1.0 and settings == {"transA": 1}
    return (
        node.op_type == "Gemm" and len(node.input) == 2 and plain and node.input[0] == layer_input
    )


def _is_sum(node: NodeProto, made: Mapping[str, NodeProto]) -> bool:
    """Return True for [1, …, 1] @ gradient, whose second input is a matrix."""
    if node.op_type != "MatMul":
        return False
    ones, matrix = (made.get(name) for name in node.input)
    return bool(ones and matrix and ones.op_type == "Expand" and matrix.op_type == "Flatten")


def _rows(port: ValueInfoProto, name: str) -> ValueInfoProto:
    """Return a port of one example as one of several, an example a row."""
    made = ValueInfoProto()
    made.CopyFrom(port)
    made.name = name
    tensor = made.type.tensor_type
    if tensor.HasField("shape"):
        if not tensor.shape.dim:  # the number of a draw
            tensor.shape.dim.add()
        tensor.shape.dim[0].ClearField("dim_value")
        tensor.shape.dim[0].dim_param = "examples"
    return made
