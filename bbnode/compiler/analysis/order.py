"""How values flow through one function: who makes them, who reads them, in which order.

Rule: every pass asks here, so that all agree on what an op reads: its inputs, what the
graphs nested in its attributes (If, Loop, Scan) take from outside, and its `after` values.
All of it is linear in the size of the function.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from bbnode.compiler.errors import CyclicGraph, ExpansionFailed, Where
from bbnode.ir import keys
from bbnode.ir.plain import Function, Node

# `ai.onnx.ml` is upstream ONNX as well: what scikit-learn's exporters write.
ONNX_ML_DOMAIN = keys.ONNX_ML_DOMAIN
GRAPH_DOMAINS = frozenset({"", keys.ONNX_DOMAIN, ONNX_ML_DOMAIN})
_GRAPH_KINDS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
# Parsed protobufs nest at most 100 messages deep, which is about 30 graphs.
MAX_GRAPH_DEPTH = 32


def is_graph_op(node: Node | NodeProto) -> bool:
    """Whether a node is an op of upstream ONNX, whose schemas describe it."""
    return node.domain in GRAPH_DOMAINS


def split_names(text: str | None) -> list[str]:
    """The names in a comma-joined metadata value."""
    return [name for name in text.split(",") if name] if text else []


def after_of(node: Node) -> list[str]:
    """Values that have to exist before the op fires, beside its inputs."""
    return split_names(node.metadata.get(keys.AFTER_KEY))


def nested_graphs(node: Node | NodeProto) -> list[GraphProto]:
    """Graphs in the node's attributes."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type in _GRAPH_KINDS:
            found += _graphs_in(attribute)
    return found


def _graphs_in(attribute: AttributeProto) -> list[GraphProto]:
    own = [attribute.g] if attribute.HasField("g") else []
    return [*own, *attribute.graphs]


def captured(node: Node) -> list[str]:
    """Outer values that the node's nested graphs read, in the order of their first use.

    Raises ExpansionFailed when graphs nest deeper than `MAX_GRAPH_DEPTH`.
    """
    if not any(attribute.type in _GRAPH_KINDS for attribute in node.attribute):
        return []
    found: dict[str, None] = {}
    for graph in nested_graphs(node):
        _collect_free(node, graph, set(), found, 1)
    return list(found)


def _collect_free(
    owner: Node, graph: GraphProto, bound: set[str], found: dict[str, None], depth: int
) -> None:
    if depth > MAX_GRAPH_DEPTH:
        raise ExpansionFailed(
            op_type=owner.op_type,
            domain=owner.domain,
            reason=f"its graphs nest deeper than {MAX_GRAPH_DEPTH}",
            node_name=owner.name,
            where=Where.of(owner),
        )
    made = [port.name for port in graph.input]
    made += [tensor.name for tensor in graph.initializer]
    made += [tensor.values.name for tensor in graph.sparse_initializer]
    made += [name for inner in graph.node for name in inner.output]
    # One set for all levels: a copy per nested graph would be quadratic in a wide graph.
    own = set(made) - bound
    bound |= own
    for inner in graph.node:
        found.update((name, None) for name in inner.input if name and name not in bound)
        for nested in nested_graphs(inner):
            _collect_free(owner, nested, bound, found, depth + 1)
    found.update((port.name, None) for port in graph.output if port.name not in bound)
    bound -= own


def data_reads(node: Node) -> list[str]:
    """Values that the op computes with: inputs and what nested graphs capture."""
    names = node.input.copy()
    if "" in names:
        names = [name for name in names if name]
    if node.attribute and node.domain in GRAPH_DOMAINS:
        names += captured(node)
    return names


def reads(node: Node) -> list[str]:
    """All values that have to exist before the op fires."""
    names = data_reads(node)
    if keys.AFTER_KEY in node.metadata:
        names += after_of(node)
    return names


def rename_node(node: Node, names: Mapping[str, str]) -> None:
    """Rename the values that a node reads, waits for and makes; unknown names stay."""
    node.input = [names.get(name, name) for name in node.input]
    node.output = [names.get(name, name) for name in node.output]
    waits = after_of(node)
    if waits:
        set_after(node, (names.get(name, name) for name in waits))
    if node.domain == keys.WIRE_DOMAIN:
        joined = node.metadata.get(keys.FAN_IN_KEY)
        if joined is not None and joined in names:
            node.metadata[keys.FAN_IN_KEY] = names[joined]
    if node.attribute and is_graph_op(node):
        renamed = {name: names[name] for name in captured(node) if name in names}
        if renamed:
            rewrite_graphs(node, lambda _: True, lambda graph: _rename_free(graph, renamed))


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of all graphs in them."""
    todo = [graph]
    while todo:
        for node in todo.pop().node:
            yield node
            if node.attribute and is_graph_op(node):
                todo += nested_graphs(node)


def rewrite_graphs(
    node: Node, wanted: Callable[[GraphProto], bool], change: Callable[[GraphProto], None]
) -> None:
    """Change the graphs in a node's attributes, on copies: attributes are shared.

    An attribute without a graph that `wanted` asks for stays as it is.
    """
    for index, attribute in enumerate(node.attribute):
        if attribute.type in _GRAPH_KINDS and any(map(wanted, _graphs_in(attribute))):
            copy = AttributeProto()
            copy.CopyFrom(attribute)
            for graph in _graphs_in(copy):
                change(graph)
            node.attribute[index] = copy


def _rename_free(graph: GraphProto, names: Mapping[str, str]) -> None:
    # ONNX is in SSA form: a name that is captured is not defined again inside.
    for inner in graph.node:
        for index, name in enumerate(inner.input):
            if name in names:
                inner.input[index] = names[name]
        for nested in nested_graphs(inner):
            _rename_free(nested, names)
    for port in graph.output:
        if port.name in names:
            port.name = names[port.name]


def set_after(node: Node, names: Iterable[str]) -> None:
    """Write a node's `after` values, each once; none removes the entry."""
    text = ",".join(dict.fromkeys(name for name in names if name))
    if text:
        node.metadata[keys.AFTER_KEY] = text
    else:
        node.metadata.pop(keys.AFTER_KEY, None)


def producers(function: Function) -> dict[str, int]:
    """Index of the node that makes each value (the first one, in a malformed function)."""
    made: dict[str, int] = {}
    for index, node in enumerate(function.node):
        for name in node.output:
            if name:
                made.setdefault(name, index)
    return made


def needs_of(nodes: Sequence[Node]) -> list[list[int]]:
    """Per node, the indices of the nodes that must fire before it: data, `after`, control."""
    made: dict[str, int] = {}
    by_name: dict[str, int] = {}
    for index, node in enumerate(nodes):
        by_name[node.name] = index
        for name in node.output:
            made.setdefault(name, index)
    made.pop("", None)
    needs = []
    for node in nodes:
        before = [made[name] for name in node.input if name in made]
        if node.attribute and node.domain in GRAPH_DOMAINS:
            before += [made[name] for name in captured(node) if name in made]
        metadata = node.metadata
        if keys.AFTER_KEY in metadata:
            before += [made[name] for name in after_of(node) if name in made]
        if keys.CONTROL_AFTER_KEY in metadata:
            names = split_names(metadata[keys.CONTROL_AFTER_KEY])
            before += [by_name[name] for name in names if name in by_name]
        needs.append(before)
    return needs


def is_sorted(needs: Iterable[Sequence[int]]) -> bool:
    """Whether nodes that need these (`needs_of`) stand behind all that they need."""
    return not any(before and max(before) >= index for index, before in enumerate(needs))


def topological(function: Function, needs: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Indices of the nodes, sorted over data, `after` and `control_after`.

    Where the order is free, recorded order stays. `needs` is what `needs_of` gives, where it is
    known already. Raises CyclicGraph naming one cycle.
    """
    if needs is None:
        needs = needs_of(function.node)
    if is_sorted(needs):
        return list(range(len(needs)))
    return _kahn(needs, [node.name for node in function.node])


def _kahn(needs: Sequence[Sequence[int]], names: Sequence[str]) -> list[int]:
    waiting = [len(set(before)) for before in needs]
    consumers: list[list[int]] = [[] for _ in needs]
    for index, before in enumerate(needs):
        for producer in set(before):
            consumers[producer].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for consumer in consumers[index]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, consumer)
    if len(order) < len(needs):
        raise CyclicGraph(involves=tuple(names[i] for i in _one_cycle(needs, set(order))))
    return order


def _one_cycle(needs: Sequence[Sequence[int]], done: set[int]) -> Iterator[int]:
    """Walks back from an unsorted node: every one of them waits for another unsorted one."""
    at = next(index for index in range(len(needs)) if index not in done)
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(before for before in needs[at] if before not in done)
    return reversed(path[seen[at] :])


def reorder(function: Function, order: Sequence[int]) -> None:
    """Put the nodes in the given order."""
    if list(order) == list(range(len(function.node))):
        return
    function.node = [function.node[index] for index in order]
