"""What is known of each node, for whoever clicks on it.

Rule: plain data, all of it text; long values are cut, since a weight is no reading matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypedDict

from onnx import AttributeProto, FunctionProto, NodeProto

from bbnode.compiler.analysis import order
from bbnode.daemon.attributes import cut, show
from bbnode.ir import keys, protos
from bbnode.ir.onnx_file import function_of
from bbnode.ir.slots import Binding
from bbnode.ir.types import TypeNode

MAX_LISTED_OPS = 400
# A line of a box has room for this much.
MAX_ARGUMENTS = 4
MAX_ARGUMENT_CHARS = 24

_NUMBERS = frozenset(
    {AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.INTS, AttributeProto.FLOATS}
)


class Value(TypedDict):
    """One input or output: `boxes` are keys of who makes or reads it."""

    name: str
    type: str
    boxes: list[str]


class Detail(TypedDict):
    """One op; the ops guarding it are in `guards`."""

    name: str
    op: str
    domain: str
    inputs: list[Value]
    outputs: list[Value]
    waits: list[Value]
    attributes: dict[str, str]
    metadata: dict[str, str]
    graph: list[str]
    guards: list[str]


def of_function(
    function: FunctionProto,
    keys_of: Mapping[int, str],
    types: Mapping[str, TypeNode],
    graphs: Mapping[str, FunctionProto],
) -> dict[str, Detail]:
    """Details by key.

    Args:
        function: the function.
        keys_of: key of the box or pill of each node, by index; a check shares its op's.
        types: of the function's values.
        graphs: backend subgraphs, by name.
    """
    made = {name: keys_of[i] for i, node in enumerate(function.node) for name in node.output}
    read: dict[str, list[str]] = {}
    for index, op in enumerate(function_of(function).nodes):
        for name in op.reads:
            read.setdefault(name, []).append(keys_of[index])

    def value(name: str, boxes: Sequence[str]) -> Value:
        known = types.get(name)
        listed = list(dict.fromkeys(boxes))
        return Value(name=name, type=known.name if known is not None else "", boxes=listed)

    found: dict[str, Detail] = {}
    guards: dict[str, list[str]] = {}
    for index, node in enumerate(function.node):
        key = keys_of[index]
        if node.op_type == keys.OP_DEADLINE_CHECK and node.domain == keys.SYSCALL_DOMAIN:
            guards.setdefault(key, []).append(node.name)
            if protos.get_meta(node, keys.DEADLINE_CHECK_SOURCE_KEY) is not None:
                continue
        after = order.split_names(protos.get_meta(node, keys.AFTER_KEY))
        graph = graphs.get(node.op_type) if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN else None
        found[key] = Detail(
            name=node.name,
            op=node.op_type,
            domain=node.domain or keys.ONNX_DOMAIN,
            inputs=[value(n, [made[n]] if n in made else []) for n in node.input if n],
            outputs=[value(n, read.get(n, [])) for n in node.output if n],
            waits=[value(n, [made[n]] if n in made else []) for n in after],
            attributes={_short(a.name): show(a) for a in node.attribute},
            metadata={_short(k): cut(v) for k, v in protos.all_meta(node).items()},
            graph=[] if graph is None else list(graph_lines(graph)),
            guards=[],
        )
    for key, names in guards.items():
        if key in found:
            found[key]["guards"] = names
    return found


def role_of(node: NodeProto, binding: Binding | None) -> str:
    """The role whose slot an op uses, or ""."""
    if node.domain.startswith(keys.PROTOCOL_DOMAIN_PREFIX):
        return "Protocol"
    if protos.is_role(node):
        snake = node.domain.removeprefix(keys.ROLE_DOMAIN_PREFIX)
        return "".join(part.capitalize() for part in snake.split("_"))
    if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        return "Backend"
    return binding.role if binding is not None else ""


def arguments(node: NodeProto) -> str:
    """The attributes that are numbers or short texts, as `epochs=5, batch=32`."""
    shown = []
    for attribute in node.attribute:
        if attribute.name.startswith(keys.PREFIX) or attribute.name == keys.ATTR_DEADLINE_NS:
            continue
        if attribute.type in _NUMBERS or attribute.type == AttributeProto.STRING:
            value = show(attribute)
            if len(value) <= MAX_ARGUMENT_CHARS:
                shown.append(f"{attribute.name}={value}")
        elif attribute.type == AttributeProto.TENSOR:
            shown.append(show(attribute))
    return ", ".join(shown[:MAX_ARGUMENTS])


def graph_lines(graph: FunctionProto) -> Iterator[str]:
    """A backend subgraph, an op a line."""
    for node in graph.node[:MAX_LISTED_OPS]:
        yield f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)})"
    if len(graph.node) > MAX_LISTED_OPS:
        yield f"… and {len(graph.node) - MAX_LISTED_OPS} more"


def runs(ops: Sequence[str]) -> Iterator[str]:
    """Op types in order, repeats counted: `Relu`, `3 Add`."""
    for op, group in groupby(ops):
        count = sum(1 for _ in group)
        yield op if count == 1 else f"{count} {op}"


def _short(key: str) -> str:
    return key.removeprefix(keys.PREFIX)
