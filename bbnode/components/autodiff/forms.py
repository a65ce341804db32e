"""Other forms of a forward model's nodes, which give the same numbers and train faster.

Rule: a form is used in the graphs that train; a model is evaluated as its author wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from onnx import NodeProto, helper, numpy_helper

from bbnode.components.autodiff.builder import (
    UNKNOWN,
    Dims,
    GraphBuilder,
    InferredType,
    captured_names,
)
from bbnode.ir.graph import is_onnx_domain


def pools_first(
    b: GraphBuilder, nodes: Sequence[NodeProto], outputs: Iterable[str]
) -> list[NodeProto]:
    """Return nodes in which each Relu that a MaxPool alone reads comes after that pool.

    Relu does not change which element is the greatest, so values are the same bits, and so are
    gradients: a window whose greatest element is not positive gets none in either order. Relu and
    the mask of its gradient are then of as many elements as there are windows.
    """
    uses = Counter(name for node in nodes for name in captured_names(node))
    uses.update(outputs)
    active = {
        node.output[0]: node.input[0]
        for node in nodes
        if node.op_type == "Relu" and is_onnx_domain(node.domain)
    }
    made: list[NodeProto] = []
    late: set[str] = set()
    for node in nodes:
        # A window of padding alone, which ceil_mode may have, would become 0.
        ceils = any(each.name == "ceil_mode" and each.i for each in node.attribute)
        if (
            node.op_type != "MaxPool"
            or not is_onnx_domain(node.domain)
            or len(node.output) > 1
            or ceils
            or node.input[0] not in active
            or uses[node.input[0]] != 1
        ):
            made.append(node)
            continue
        relu = node.input[0]
        pool, after = NodeProto(), NodeProto()
        pool.CopyFrom(node)
        pool.input[0], pool.output[0] = active[relu], b.fresh("pooled")
        after.op_type, after.name = "Relu", relu
        after.input.append(pool.output[0])
        after.output.append(node.output[0])
        late.add(relu)
        made += [pool, after]
    return [node for node in made if late.isdisjoint(node.output)]


def pads_by_size(
    b: GraphBuilder, nodes: Iterable[NodeProto], types: Mapping[str, InferredType]
) -> list[NodeProto]:
    """Return nodes in which a Conv that pads by the size of an open axis has a Pad before it.

    With a stride the numbers of auto_pad follow from the size (ONNX's operator page of Conv); as a
    node of its own they are computed where the size is met.
    """
    made: list[NodeProto] = []
    for node in nodes:
        settings = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        auto = settings.get("auto_pad", b"NOTSET")
        dims = types.get(node.input[0], UNKNOWN).dims if node.input else None
        strides = settings.get("strides", [])
        kernel = settings.get("kernel_shape", ())
        if not kernel and node.op_type == "Conv":
            kernel = (types.get(node.input[1], UNKNOWN).dims or ())[2:]
        if (
            node.op_type != "Conv"
            or not is_onnx_domain(node.domain)
            or auto not in (b"SAME_UPPER", b"SAME_LOWER")
            or all(stride == 1 for stride in strides)
            or dims is None
            or all(isinstance(dim, int) for dim in dims[2:])
            or not all(isinstance(size, int) for size in kernel)
        ):
            made.append(node)
            continue
        dilations = settings.get("dilations", [1] * len(strides))
        extent = b.ints(d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True))
        one, none, two = b.ints([1]), b.ints([0]), b.ints([2])
        size, stride = b.op("Shape", node.input[0], start=2), b.ints(strides)
        steps = b.op("Div", b.op("Sub", size, one), stride)
        reached = b.op("Add", b.op("Mul", steps, stride), extent)
        total = b.op("Max", b.op("Sub", reached, size), none)
        less = b.op("Div", total, two)
        more = b.op("Sub", total, less)
        first, last = (less, more) if auto == b"SAME_UPPER" else (more, less)
        outer = b.ints([0, 0])
        pads = b.op("Concat", outer, first, outer, last, axis=0)
        conv = NodeProto()
        conv.CopyFrom(node)
        conv.input[0] = b.op("Pad", node.input[0], pads)
        kept = [each for each in node.attribute if each.name not in ("auto_pad", "pads")]
        del conv.attribute[:]
        conv.attribute.extend(kept)
        made += [*b.take(), conv]
    return made


# Axes of a recurrent layer's Y: steps, directions (one), sequences, units.
_STEPS, _SINGLE, _BATCH, _UNITS = range(4)
_REORDER = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def last_states(
    b: GraphBuilder,
    nodes: Sequence[NodeProto],
    types: Mapping[str, InferredType],
    outputs: Iterable[str],
) -> list[NodeProto]:
    """Return nodes that take the last step of a recurrent layer's Y from its Y_h.

    What an exporter writes for `states[:, -1]` reorders all steps and picks one; its gradient is
    one of all steps, and zero in all but one. A Y that nothing else reads is not made then.
    """
    makers = {name: node for node in nodes for name in node.output if name}
    layers: dict[int, NodeProto] = {}
    made: list[NodeProto] = []
    for node in nodes:
        found = _last_step(b, node, makers, types)
        if found is None:
            made.append(node)
            continue
        layer, sizes = found
        own = layers.get(id(layer))
        if own is None:
            own = layers[id(layer)] = NodeProto()
            own.CopyFrom(layer)
            own.output.extend([""] * (2 - len(own.output)))
            own.output[1] = own.output[1] or b.fresh("last")
        made.append(
            helper.make_node(
                "Reshape", [own.output[1], b.ints(sizes)], list(node.output), name=node.name
            )
        )
    if not layers:
        return made
    needed = set(outputs)
    for node in reversed(made):
        if not needed.isdisjoint(node.output):
            needed |= captured_names(node)
    for layer in layers.values():
        if layer.output[0] not in needed:
            layer.output[0] = ""
    return [layers.get(id(node), node) for node in made]


def _last_step(
    b: GraphBuilder,
    node: NodeProto,
    makers: Mapping[str, NodeProto],
    types: Mapping[str, InferredType],
) -> tuple[NodeProto, list[int]] | None:
    """Return the layer whose last step a Gather picks, and the sizes of that; else None."""
    if node.op_type != "Gather" or not is_onnx_domain(node.domain):
        return None
    index = b.known.get(node.input[1])
    if index is None or list(index.dims):
        return None
    way: list[NodeProto] = []
    value = node.input[0]
    while (maker := makers.get(value)) is not None and maker.op_type in _REORDER:
        way.append(maker)
        value = maker.input[0]
    sizes = types.get(value, UNKNOWN).dims
    if maker is None or sizes is None or not _ends_in_its_last_state(maker, value):
        return None
    axes = [_STEPS, _SINGLE, _BATCH, _UNITS]
    for each in reversed(way):
        after = _axes_after(each, axes, sizes, types.get(each.output[0], UNKNOWN).dims)
        if after is None:
            return None
        axes = after
    axis = next((int(each.i) for each in node.attribute if each.name == "axis"), 0)
    steps = sizes[_STEPS]
    last = (-1, steps - 1) if isinstance(steps, int) else (-1,)
    if axes.pop(axis) != _STEPS or int(numpy_helper.to_array(index)) not in last:
        return None
    units = sizes[_UNITS]
    if axes.index(_BATCH) > axes.index(_UNITS) or not isinstance(units, int):
        return None
    return maker, [{_SINGLE: 1, _BATCH: -1, _UNITS: units}[each] for each in axes]


def _ends_in_its_last_state(node: NodeProto, value: str) -> bool:
    """Return True if a node is a recurrent layer, `value` its Y, and that ends in its Y_h."""
    settings = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return (
        node.op_type in ("GRU", "LSTM", "RNN")
        and is_onnx_domain(node.domain)
        and node.output[0] == value
        and settings.get("direction", b"forward") == b"forward"
        and not settings.get("layout", 0)
        and not (len(node.input) > 4 and node.input[4])  # or sequences end before
    )


def _axes_after(
    node: NodeProto, axes: Sequence[int], sizes: Dims, dims: Dims | None
) -> list[int] | None:
    """Return the axes of Y behind one of `_REORDER`, whose output has `dims`; None if unknown."""
    if node.op_type == "Identity":
        return [*axes]
    if node.op_type == "Transpose":
        perm = next((each.ints for each in node.attribute if each.name == "perm"), None)
        return [axes[at] for at in perm] if perm else [*reversed(axes)]
    # Axes of one element come and go; the others stay in order, and all but one of the same size.
    kept = [each for each in axes if each != _SINGLE]
    if dims is None or any(sizes[each] == 1 for each in kept):
        return None
    places = [at for at, dim in enumerate(dims) if dim != 1]
    if len(places) != len(kept):
        return None
    other = [dims[at] for at, each in zip(places, kept, strict=True) if dims[at] != sizes[each]]
    if len(other) > 1 or any(isinstance(dim, int) for dim in other):
        return None
    made = [_SINGLE] * len(dims)
    for at, each in zip(places, kept, strict=True):
        made[at] = each
    return made


def swaps(nodes: Iterable[NodeProto], types: Mapping[str, InferredType]) -> list[NodeProto]:
    """Return nodes in which the last two axes change places in one node, where three do it.

    Exporters transpose keys so: all axes in front are made one, the last two change places, and
    the axes come back, with arithmetic of shapes beside them. Values and names stay.
    """
    made: dict[str, NodeProto] = {}
    found: list[NodeProto] = []
    for node in nodes:
        source = _swapped(node, made, types)
        if source:
            rank = len(types[source].dims or ())
            perm = [*range(rank - 2), rank - 1, rank - 2]
            names = [source], list(node.output)
            node = helper.make_node("Transpose", *names, name=node.name, perm=perm)
        made.update(dict.fromkeys(node.output, node))
        found.append(node)
    return found


def _swapped(
    node: NodeProto, made: Mapping[str, NodeProto], types: Mapping[str, InferredType]
) -> str:
    """Return the value of which a node gives the last two axes in each other's place, or ""."""
    middle = _input_of(node, "Reshape", made)
    first = _input_of(middle, "Transpose", made)
    if middle is None or first is None or not _is_op(first, "Reshape"):
        return ""
    perms = [list(each.ints) for each in middle.attribute if each.name == "perm"]
    source = first.input[0]
    before, flat, after = (
        types[name].dims if name in types else None
        for name in (source, first.output[0], node.output[0])
    )
    if perms != [[0, 2, 1]] or not before or not flat or not after:
        return ""
    # What is open is equal where it has one symbol.
    rows, columns = before[-2:] if len(before) > 2 else (None, None)
    sizes = isinstance(rows, int) and isinstance(columns, int) and rows * columns > 0
    same = after == (*before[:-2], columns, rows) and flat[1:] == (rows, columns)
    return source if sizes and same and None not in before else ""


def _input_of(
    node: NodeProto | None, op_type: str, made: Mapping[str, NodeProto]
) -> NodeProto | None:
    """Return the node that makes the first input of a node of that type."""
    if node is None or not _is_op(node, op_type) or not node.input:
        return None
    return made.get(node.input[0])


def _is_op(node: NodeProto, op_type: str) -> bool:
    return node.op_type == op_type and is_onnx_domain(node.domain)
