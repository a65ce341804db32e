"""Program order: the recorded order, made topological.

Rule: an op stands where its author recorded it, or as much later as what it needs allows;
an op made by the compiler moves up to whoever needs it. So two ops without a path between
them keep their recorded order, which is what "program order" means for slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bbnode.compiler.analysis import order
from bbnode.compiler.errors import CyclicGraph
from bbnode.ir import keys
from bbnode.ir.plain import Node


def program_order(nodes: Sequence[Node], needs: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Indices of `nodes` in program order. Raises CyclicGraph naming one cycle.

    `needs` is what `order.needs_of` gives, where it is known already.
    """
    if needs is None:
        needs = order.needs_of(nodes)
    if order.is_sorted(needs):
        return list(range(len(needs)))
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


def in_program_order(nodes: Sequence[Node]) -> list[Node]:
    """The nodes themselves, in program order."""
    return [nodes[index] for index in program_order(nodes)]


def add_control(node: Node, names: Iterable[str]) -> bool:
    """Add node names to a node's `control_after`; says whether that changed anything."""
    known = order.split_names(node.metadata.get(keys.CONTROL_AFTER_KEY))
    merged = list(dict.fromkeys([*known, *names]))
    if merged == known:
        return False
    node.metadata[keys.CONTROL_AFTER_KEY] = ",".join(merged)
    return True
