"""The placing of boxes in rows and columns: every edge leads down, and few lines cross.

Rule: rows are common to all panels, and a wire counts as an edge, so that an op always stands
below the ops of other peers that it waits for. A malformed artifact may have rings; the edge that
closes one is ignored. Within a panel an edge over several rows goes through a point in each row
between, which takes part as a narrow slot of its own, so that no edge runs below a box. Order
within rows by the barycentre method (Sugiyama, Tagawa, Toda 1981); positions by least squares
against the neighbours' with a least distance, exact per row by pooling adjacent violators.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

POINT_WIDTH = 10.0
GAP = 26.0
ORDER_SWEEPS = 12
PLACE_SWEEPS = 16
# How much an edge pulls on its ends, by how many of them are points: long edges get straight.
PULLS = (1.0, 3.0, 8.0)


def rows_of(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the row of each of `count` boxes, from 0: as high as its needs allow, but sources
    and forks as low as their readers allow, so that edges are short."""
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
    """Return a topological order, low numbers first, and the edges that agree with it."""
    unique = [(s, t) for s, t in dict.fromkeys(edges) if s != t]
    waiting = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for source, target in unique:
        waiting[target] += 1
        behind[source].append(target)
    ready = [box for box in range(count) if not waiting[box]]
    place: dict[int, int] = {}
    first_open = 0
    while len(place) < count:
        if not ready:  # a ring: the first box of it goes as if it waited for nothing
            while first_open in place:
                first_open += 1
            ready.append(first_open)
        box = heapq.heappop(ready)
        if box in place:
            continue
        place[box] = len(place)
        for target in behind[box]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    return list(place), [(s, t) for s, t in unique if place[s] < place[t]]


def without_implied(
    rows: Sequence[int], edges: Sequence[tuple[int, int]], optional: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return those of the `optional` edges that no other path of edges implies."""
    behind: dict[int, list[int]] = {}
    for source, target in edges:
        behind.setdefault(source, []).append(target)
    kept = set()
    for source, target in optional:
        todo = [b for b in behind.get(source, ()) if b != target]
        seen = set(todo)
        while todo and target not in seen:
            for after in behind.get(todo.pop(), ()):
                if after not in seen and rows[after] <= rows[target]:
                    seen.add(after)
                    todo.append(after)
        if target not in seen:
            kept.add((source, target))
    return kept


@dataclass(slots=True, eq=False)
class _Slot:
    """A box, or a point of a long edge."""

    row: int
    width: float
    is_point: bool = False
    up: list[_Slot] = field(default_factory=list)
    down: list[_Slot] = field(default_factory=list)
    x: float = 0.0  # centre
    place: int = 0  # in its row


@dataclass(frozen=True, slots=True)
class Columns:
    """The centres of boxes, and the points of each edge (row, x), from x = 0 rightwards."""

    centres: dict[int, float]
    points: list[list[tuple[int, float]]]
    width: float


def place(
    boxes: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[float],
    edges: Sequence[tuple[int, int]],
) -> Columns:
    """Lay one panel out.

    Args:
        boxes: the boxes of the panel, in the order in which they should stand where free.
        rows: row of each box of the picture.
        widths: width of each box of the picture.
        edges: (upper, lower) boxes of this panel; lower stands in a later row.
    """
    slots = {box: _Slot(rows[box], widths[box]) for box in boxes}
    chains = [_chain(slots[upper], slots[lower]) for upper, lower in edges]
    by_row: dict[int, list[_Slot]] = {}
    for slot in (*slots.values(), *(point for chain in chains for point in chain)):
        by_row.setdefault(slot.row, []).append(slot)
    order = _ordered([by_row[row] for row in sorted(by_row)])
    _spread(order)
    every = [slot for row in order for slot in row]
    left = min((slot.x - slot.width / 2 for slot in every), default=0.0)
    right = max((slot.x + slot.width / 2 for slot in every), default=0.0)
    return Columns(
        centres={box: slot.x - left for box, slot in slots.items()},
        points=[[(point.row, point.x - left) for point in chain] for chain in chains],
        width=right - left,
    )


def _chain(upper: _Slot, lower: _Slot) -> list[_Slot]:
    """Return the points of one edge, linked with its ends."""
    chain = [_Slot(row, POINT_WIDTH, is_point=True) for row in range(upper.row + 1, lower.row)]
    ends = [upper, *chain, lower]
    for above, below in pairwise(ends):
        above.down.append(below)
        below.up.append(above)
    return chain


def _ordered(order: list[list[_Slot]]) -> list[list[_Slot]]:
    """Return the best of the orders that some sweeps down and up find."""
    best, fewest = order, _crossings(order)
    for sweep in range(ORDER_SWEEPS):
        if not fewest:
            break
        step = 1 if sweep % 2 == 0 else -1
        order = [_by_neighbours(row, downwards=step > 0) for row in order[::step]][::step]
        found = _crossings(order)
        if found < fewest:
            best, fewest = order, found
    _crossings(best)  # leaves its places in the slots
    return best


def _by_neighbours(row: list[_Slot], *, downwards: bool) -> list[_Slot]:
    """Return a row in the order of the mean places of each slot's neighbours."""

    def wanted(slot: _Slot) -> float:
        near = slot.up if downwards else slot.down
        return sum(each.place for each in near) / len(near) if near else slot.place

    ranked = sorted(row, key=wanted)
    for at, slot in enumerate(ranked):
        slot.place = at
    return ranked


def _crossings(order: list[list[_Slot]]) -> int:
    for row in order:
        for at, slot in enumerate(row):
            slot.place = at
    total = 0
    for row in order:
        seen: list[int] = []
        for slot in row:
            for end in sorted(below.place for below in slot.down):
                total += len(seen) - bisect_right(seen, end)
                insort(seen, end)
    return total


def _spread(order: list[list[_Slot]]) -> None:
    for row in order:
        x = 0.0
        for slot in row:
            slot.x = x + slot.width / 2
            x += slot.width + GAP
    for sweep in range(PLACE_SWEEPS):
        up = sweep % 2 == 0
        both = sweep >= PLACE_SWEEPS // 2
        for row in order if up else reversed(order):
            _place_row(
                row, [slot.up + slot.down if both else slot.up if up else slot.down for slot in row]
            )


def _place_row(row: list[_Slot], near: Sequence[list[_Slot]]) -> None:
    """Move one row as close to its neighbours as its order and distances allow."""
    offsets = [0.0]
    for before, slot in pairwise(row):
        offsets.append(offsets[-1] + (before.width + slot.width) / 2 + GAP)
    # Blocks that stand as tightly as they may: [weight, weighted sum of wanted, members].
    blocks: list[list[float]] = []
    for slot, neighbours, offset in zip(row, near, offsets, strict=True):
        weight, wanted = 0.1, slot.x  # without neighbours, where it is
        if neighbours:
            weights = [PULLS[slot.is_point + each.is_point] for each in neighbours]
            weight = sum(weights)
            wanted = sum(w * n.x for w, n in zip(weights, neighbours, strict=True)) / weight
        blocks.append([weight, weight * (wanted - offset), 1])
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][0] > blocks[-1][1] / blocks[-1][0]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    starts = [block[1] / block[0] for block in blocks for _ in range(int(block[2]))]
    for slot, start, offset in zip(row, starts, offsets, strict=True):
        slot.x = start + offset
