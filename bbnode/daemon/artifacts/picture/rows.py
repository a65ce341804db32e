"""Which row each box stands in: time flows down, and every edge leads down.

Rule: rows are common to all panels, and a wire counts as an edge, so that an op always stands
below the ops of other peers that it waits for. A malformed artifact may have rings; the edge
that closes one is ignored here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def rows_of(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Row of each of `count` boxes, from 0: as high as its needs allow, but sources and forks
    as low as their readers allow, so that edges are short."""
    order, forward = _order(count, edges)
    before: list[list[int]] = [[] for _ in range(count)]
    behind: list[list[int]] = [[] for _ in range(count)]
    for source, target in forward:
        before[target].append(source)
        behind[source].append(target)
    rows = [0] * count
    for box in order:
        rows[box] = max((rows[b] + 1 for b in before[box]), default=0)
    for box in reversed(order):
        if len(behind[box]) > len(before[box]):
            rows[box] = min(rows[b] for b in behind[box]) - 1
    return rows


def _order(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """A topological order, low numbers first, and the edges that agree with it."""
    unique = [(s, t) for s, t in dict.fromkeys(edges) if s != t]
    waiting = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for source, target in unique:
        waiting[target] += 1
        behind[source].append(target)
    ready = [box for box in range(count) if not waiting[box]]
    placed = [False] * count
    order: list[int] = []
    first_open = 0
    while len(order) < count:
        if not ready:  # a ring: the first box of it goes as if it waited for nothing
            while placed[first_open]:
                first_open += 1
            ready.append(first_open)
        box = heapq.heappop(ready)
        if placed[box]:
            continue
        placed[box] = True
        order.append(box)
        for target in behind[box]:
            waiting[target] -= 1
            if not waiting[target] and not placed[target]:
                heapq.heappush(ready, target)
    place = {box: index for index, box in enumerate(order)}
    return order, [(s, t) for s, t in unique if place[s] < place[t]]


def without_implied(
    rows: Sequence[int], edges: Sequence[tuple[int, int]], optional: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Those of the `optional` edges that no other path of edges implies."""
    behind: dict[int, list[int]] = {}
    for source, target in edges:
        behind.setdefault(source, []).append(target)
    kept = set()
    for source, target in optional:
        todo = [b for b in behind.get(source, ()) if b != target]
        seen = set(todo)
        while todo and target not in seen:
            box = todo.pop()
            for after in behind.get(box, ()):
                if after not in seen and rows[after] <= rows[target]:
                    seen.add(after)
                    todo.append(after)
        if target not in seen:
            kept.add((source, target))
    return kept
