"""Other forms of a graph for a runtime that lacks the kernel of one of its ops, or has a wrong one.

Rule: the numbers stay those that ONNX defines. An op that ONNX defines by other ops becomes these;
else the whole graph is said to be of the opset before the op's last change, where each of its ops
means the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from bbnode.ir.expansion import is_function_op, without_op
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.onnx_file import onnx_schema, subgraph_of
from bbnode.ir.versions import means_the_same, onnx_version, relabelled


def lowered(model: ModelProto, op_type: str) -> ModelProto | None:
    """Return a model that means the same without the newest form of an `ai.onnx` op, or None.

    Args:
        model: a model with that op in its graph; it is not changed.
        op_type: the op that the runtime has no kernel for.
    """
    version = onnx_version(model)
    schema = onnx_schema(op_type, version, "")
    if schema is None:
        return None
    if is_function_op(op_type, version):
        return _expanded(model, op_type)
    target = int(schema.since_version) - 1
    other: ModelProto | None = model
    for newer in _changed(model, version, target):
        other = _expanded(other, newer) if other and is_function_op(newer, version) else None
    if target < 1 or other is None or _changed(other, version, target):
        return None
    return relabelled(other, target)


_NORM_MOMENTUM = 0.9  # ONNX's default: the share of the old statistic


def mended(model: ModelProto) -> ModelProto:
    """Return a model without the nodes that ONNX Runtime gets wrong; itself where it has none.

    - A BatchNormalization in training mode writes the new mean and variance over those that it
      reads, even over an array that was fed, and whatever else reads these gets the new ones. It
      gets zeros of its own to write to, and the new statistics are computed beside it.
    - A Pad of named axes beside a Transpose is moved past it with its pads in the wrong order. It
      pads all axes.
    - A Concat takes an empty input whose other sizes are not those of the rest, and leaves its part
      as memory was. Inputs whose sizes are not known to be the same have those of the first, or
      fail by a Reshape.
    """
    ops = {node.op_type for node in all_nodes(model)}
    wrong: dict[str, Callable[[NodeProto], bool]]
    wrong = {"BatchNormalization": _trains} if "BatchNormalization" in ops else {}
    if {"Pad", "Transpose"} <= ops:
        wrong["Pad"] = _names_axes
    if "Concat" in ops and onnx_version(model) >= _SHAPE_HAS_ENDS:
        wrong["Concat"] = partial(_may_differ, _known_shapes(model))
    if not any(node.op_type in wrong and wrong[node.op_type](node) for node in all_nodes(model)):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    taken = {name for node in all_nodes(made) for name in (*node.input, *node.output)}
    bodies: list[GraphProto | FunctionProto] = [made.graph, *made.functions]
    while bodies:
        body = bodies.pop()
        nodes: list[NodeProto] = []
        for node in body.node:
            held = NodeProto.FromString(node.SerializeToString())
            is_wrong = held.op_type in wrong and wrong[held.op_type](held)
            nodes += _INSTEAD[held.op_type](held, taken) if is_wrong else [held]
        del body.node[:]
        body.node.extend(nodes)
        bodies += [graph for node in body.node for graph in graphs_of(node)]
    return made


class Emitter:
    """Nodes beside one node, with names of their own."""

    def __init__(self, node: NodeProto, what: str, taken: set[str]) -> None:
        self._stem = f"{node.output[0]}/{what}"
        while any(name.startswith(self._stem) for name in taken):
            self._stem += "_"
        taken.add(self._stem)
        self.nodes: list[NodeProto] = []

    def __call__(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        made = name or f"{self._stem}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [made], name=made, **attributes))
        return made


def _norm_apart(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """Return nodes for a BatchNormalization in training mode; new = old m + batch (1 - m)."""
    emit = Emitter(node, "statistics", taken)
    given: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    momentum = float(given.pop("momentum", _NORM_MOMENTUM))

    def number(value: float, like: str) -> str:
        return emit("CastLike", emit("Constant", value_float=value), like)

    olds = list(node.input[3:5])
    # Zeros that nothing else reads: a sum of none of the values of x, times a number of its own,
    # is no constant to an optimizer and like no other node.
    none = emit("Constant", value_ints=[0])
    zero = emit("ReduceSum", emit("Slice", node.input[0], none, none), keepdims=0)
    zeros = []
    for at, old in enumerate(olds):
        own_zero = emit("Mul", emit("CastLike", zero, old), number(len(taken) + at / 2, old))
        zeros.append(emit("Expand", own_zero, emit("Shape", old)))
    # With a momentum of 0 what it makes are the batch's own mean and variance.
    own = momentum == 0.0
    batch = list(node.output[1:]) if own else [f"{zeros[0]}/mean", f"{zeros[0]}/variance"]
    made = [node.output[0], *batch]
    norm = helper.make_node(node.op_type, [*node.input[:3], *zeros], made, node.name, **given)
    norm.domain = node.domain
    norm.attribute.append(helper.make_attribute("momentum", 0.0))
    emit.nodes.append(norm)
    for old, new, name in zip(olds, batch, node.output[1:], strict=False):
        if name and not own:
            kept = emit("Mul", old, number(momentum, old))
            emit("Add", kept, emit("Mul", new, number(1 - momentum, old)), name=name)
    return emit.nodes


def _pad_of_all(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """Return nodes for a Pad that names axes: the same with a pad for each axis, mostly 0."""
    emit = Emitter(node, "pads", taken)
    rank = emit("Size", emit("Shape", node.input[0]))
    as_int64 = emit("Cast", node.input[3], to=TensorProto.INT64)
    begins = emit("Mod", as_int64, rank)  # from 0, also of those that count from the end
    places = emit("Concat", begins, emit("Add", begins, rank), axis=0)
    one = emit("Constant", value_ints=[1])
    none = emit("ConstantOfShape", emit("Reshape", emit("Add", rank, rank), one),
                value=helper.make_tensor("zero", TensorProto.INT64, [1], [0]))  # fmt: skip
    pads = emit("ScatterElements", none, places, node.input[1])
    del node.input[3]
    node.input[1] = pads
    return [*emit.nodes, node]


def _joined_alike(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """Return nodes for a Concat, each input with the first one's sizes but that of the axis."""
    emit, first, axis = Emitter(node, "sizes", taken), node.input[0], _axis(node)
    inner: dict[str, Any] = {} if axis == -1 else {"end": axis + 1}
    for i, name in enumerate(node.input[1:], 1):
        sizes = [emit("Shape", first, end=axis)] if axis else []
        sizes.append(emit("Shape", name, start=axis, **inner))
        if inner:
            sizes.append(emit("Shape", first, start=axis + 1))
        wanted = emit("Concat", *sizes, axis=0)
        node.input[i] = emit("Reshape", name, wanted, allowzero=1)
    return [*emit.nodes, node]


_INSTEAD: Final = {
    "BatchNormalization": _norm_apart,
    "Concat": _joined_alike,
    "Pad": _pad_of_all,
}


def _trains(node: NodeProto) -> bool:
    return is_onnx_domain(node.domain) and any(
        each.name == "training_mode" and each.i for each in node.attribute
    )


def _names_axes(node: NodeProto) -> bool:
    return is_onnx_domain(node.domain) and len(node.input) > 3 and bool(node.input[3])


_SHAPE_HAS_ENDS: Final = 15  # the opset since which Shape has start and end

# By name: its sizes, with None where one is open.
_Shapes: TypeAlias = dict[str, list[int | None]]


def _known_shapes(model: ModelProto) -> _Shapes:
    """Return the shapes that the main graph states."""
    graph = model.graph
    found: _Shapes = {each.name: list(each.dims) for each in graph.initializer}
    for port in (*graph.input, *graph.value_info, *graph.output):
        tensor = port.type.tensor_type
        if tensor.HasField("shape"):
            found[port.name] = [
                each.dim_value if each.HasField("dim_value") else None for each in tensor.shape.dim
            ]
    return found


def _may_differ(shapes: _Shapes, node: NodeProto) -> bool:
    """Return True for a Concat whose inputs may be of other sizes than its first one."""
    if not is_onnx_domain(node.domain) or len(node.input) < 2:
        return False
    axis = _axis(node)
    known = [shapes.get(name) for name in node.input]
    if axis == 0 and (known[0] is None or len(known[0]) == 1):
        return False  # sizes of shapes, mostly
    rest = []
    for shape in known:
        if shape is None or not -len(shape) <= axis < len(shape):
            return True
        kept = list(shape)
        del kept[axis]
        rest.append(kept)
    return any(None in each or each != rest[0] for each in rest)


def _axis(node: NodeProto) -> int:
    return next((int(each.i) for each in node.attribute if each.name == "axis"), 0)


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of a model, of its functions, and of the graphs inside of nodes."""
    bodies: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while bodies:
        for node in bodies.pop().node:
            yield node
            bodies += graphs_of(node)


def graphs_of(node: NodeProto) -> list[GraphProto]:
    found: list[GraphProto] = []
    for each in node.attribute:  # whatever their types say
        if each.graphs:
            found += each.graphs
        if each.HasField("g"):
            found.append(each.g)
    return found


def _changed(model: ModelProto, version: int, target: int) -> list[str]:
    """Return the op types that do not mean the same at `target`, in the order of the graph."""
    nodes = subgraph_of(model.graph).all_nodes()
    return list(
        dict.fromkeys(
            node.op_type
            for node in nodes
            if is_onnx_domain(node.domain) and not means_the_same(node, version, target)
        )
    )


def _expanded(model: ModelProto, op_type: str) -> ModelProto | None:
    try:
        made = without_op(model, op_type)
    except (RuntimeError, ValueError):  # whatever ONNX's C++ parts refuse
        return None
    left = any(node.op_type == op_type for node in subgraph_of(made.graph).all_nodes())
    return None if left else made
