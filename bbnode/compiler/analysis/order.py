"""The order of the ops of one body: dependencies, topological order, program order.

Rule: an op depends on its inputs, on the outer values that the graphs in its attributes capture,
on its `after` values and on the ops in its `control_after`. Everything here is linear in the size
of a body.

Program order is the recorded order, made topological: an op keeps its recorded position, or comes
later where its dependencies require it; an op that the compiler added moves up to its first
reader. So two ops without a path between them keep their recorded order, which is what "program
order" means for slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bbnode.compiler.errors import CyclicGraph
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode


def split_names(text: str | None) -> list[str]:
    """Return the names in a comma-joined metadata value."""
    return [name for name in text.split(",") if name] if text else []


def control_of(node: OpNode) -> list[str]:
    """Return the names of the ops that must fire before this one."""
    return split_names(node.metadata.get(keys.CONTROL_AFTER_KEY))


def rename_node(node: OpNode, names: Mapping[str, str]) -> None:
    """Rename the values that a node reads, waits for, makes and joins; other names stay."""
    node.rename(names)
    if node.domain == keys.WIRE_DOMAIN:
        joined = node.metadata.get(keys.FAN_IN_KEY)
        if joined is not None and joined in names:
            node.metadata[keys.FAN_IN_KEY] = names[joined]


def needs_of(nodes: Sequence[OpNode]) -> list[list[int]]:
    """Return, per node, the indices of the nodes that it depends on: data, `after`, control."""
    makers: dict[str, int] = {}
    by_name: dict[str, int] = {}
    for index, node in enumerate(nodes):
        by_name[node.name] = index
        for name in node.outputs:
            makers.setdefault(name, index)
    makers.pop("", None)
    needs = []
    for node in nodes:
        before = [makers[name] for name in node.reads if name in makers]
        if keys.CONTROL_AFTER_KEY in node.metadata:
            before += [by_name[name] for name in control_of(node) if name in by_name]
        needs.append(before)
    return needs


def stands_in_order(nodes: Sequence[OpNode], given: Iterable[str]) -> bool:
    """Return True if all nodes are known to come after their dependencies; False is inconclusive.

    `given` are the values available before the first node: the inputs of the body.
    """
    there = set(given)
    fired: set[str] = set()
    known = 0  # nodes whose names are in `fired`
    for index, node in enumerate(nodes):
        if not there.issuperset(node.reads):
            return False
        if keys.CONTROL_AFTER_KEY in node.metadata:
            fired.update([before.name for before in nodes[known:index]])
            known = index
            if not fired.issuperset(control_of(node)):
                return False
        there.update(node.outputs)
    return True


def is_sorted(needs: Iterable[Sequence[int]]) -> bool:
    """Return True if nodes with these dependencies (`needs_of`) are in topological order."""
    return not any(before and max(before) >= index for index, before in enumerate(needs))


def topological(function: Function, needs: Sequence[Sequence[int]] | None = None) -> Sequence[int]:
    """Return indices of the nodes, sorted over data, `after` and `control_after`.

    Independent nodes keep their recorded order. `needs` is the result of `needs_of`, if the caller
    has it. Raises CyclicGraph naming one cycle.
    """
    if needs is None:
        if stands_in_order(function.nodes, function.inputs):
            return range(len(function.nodes))
        needs = needs_of(function.nodes)
    if is_sorted(needs):
        return range(len(needs))
    return _kahn(needs, [node.name for node in function.nodes])


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
    """Yield a cycle: each unsorted node depends on another one, so a walk back must repeat."""
    at = next(index for index in range(len(needs)) if index not in done)
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(before for before in needs[at] if before not in done)
    return reversed(path[seen[at] :])


def reorder(function: Function, order: Sequence[int]) -> None:
    """Put the nodes in the given order; a range means their present order."""
    if not isinstance(order, range):
        function.nodes = [function.nodes[index] for index in order]


def program_order(
    nodes: Sequence[OpNode],
    needs: Sequence[Sequence[int]] | None = None,
    *,
    given: Iterable[str] = (),
) -> Sequence[int]:
    """Return indices of `nodes` in program order. Raises CyclicGraph naming one cycle.

    Args:
        nodes: nodes of one body.
        needs: the result of `needs_of`, if the caller has it.
        given: the inputs of the body, which speed up the common case.
    """
    if needs is None:
        if stands_in_order(nodes, given):
            return range(len(nodes))
        needs = needs_of(nodes)
    if is_sorted(needs):
        return range(len(needs))
    order: list[int] = []
    state = [0] * len(nodes)  # 0 new, 1 on the path, 2 placed
    for root in range(len(nodes)):
        if state[root]:
            continue
        state[root] = 1
        path = [(root, iter(needs[root]))]
        while path:
            index, rest = path[-1]
            before = next(rest, None)
            if before is None:
                state[index] = 2
                order.append(index)
                path.pop()
            elif not state[before]:
                state[before] = 1
                path.append((before, iter(needs[before])))
            elif state[before] == 1:
                ring = [i for i, _ in path]
                ring = ring[ring.index(before) :]
                raise CyclicGraph(involves=tuple(nodes[i].name for i in reversed(ring)))
    return order


def in_program_order(function: Function) -> list[OpNode]:
    """Return the nodes of a body, in program order."""
    nodes = function.nodes
    order = program_order(nodes, given=function.inputs)
    return list(nodes) if isinstance(order, range) else [nodes[index] for index in order]


def add_control(node: OpNode, names: Iterable[str]) -> bool:
    """Add node names to a node's `control_after`; return True if that changed it."""
    known = control_of(node)
    merged = list(dict.fromkeys([*known, *names]))
    if merged == known:
        return False
    node.metadata[keys.CONTROL_AFTER_KEY] = ",".join(merged)
    return True
