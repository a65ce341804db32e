"""The placing of boxes in rows and columns: every edge leads down, and few lines cross.

Rule: rows are common to all panels, and a wire counts as an edge, so that an op always stands
below the ops of other peers that it waits for. A malformed artifact may have rings; the edge that
closes one is ignored. Parts that share no edge stand below each other where no path leads back,
so that a panel is as wide as its widest part. Within a panel an edge over several rows goes through
a point in each row between, which takes part as a narrow slot of its own, so that no edge runs
below a box. Order
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
# The pull of an edge on its ends, by how many of them are points: long edges become straight.
PULLS = (1.0, 3.0, 8.0)


class Stacking:
    """Constraints that put groups of boxes below each other, beside the edges of `count` boxes.

    Each constraint leads through a virtual box; those are numbered from `count` on.
    """

    def __init__(self, count: int, edges: Sequence[tuple[int, int]]) -> None:
        # Edges that close a ring are left out, so that no constraint is dropped for one of them.
        self._edges = _order(count, edges)[1]
        self._below: list[tuple[int, int]] = []
        self._total = count
        self._behind: dict[int, list[int]] = {}
        self._before: dict[int, list[int]] = {}
        for edge in self._edges:
            self._link(*edge)

    def _link(self, source: int, target: int) -> None:
        self._behind.setdefault(source, []).append(target)
        self._before.setdefault(target, []).append(source)

    def leads_back(self, lower: Sequence[int], upper: Sequence[int]) -> bool:
        """Return True if a path leads from `lower` to `upper`, which then can't stand above."""
        return not self._reached(lower).isdisjoint(upper)

    def put_below(self, upper: Sequence[int], lower: Sequence[int]) -> int:
        """Put `lower` below all of `upper`; return the virtual box between them.

        The path back was ruled out with `leads_back`.
        """
        between, self._total = self._total, self._total + 1
        above, under = set(upper), set(lower)
        ends = [box for box in upper if above.isdisjoint(self._behind.get(box, ()))]
        starts = [box for box in lower if under.isdisjoint(self._before.get(box, ()))]
        for edge in (*((box, between) for box in ends), *((between, box) for box in starts)):
            self._below.append(edge)
            self._link(*edge)
        return between

    def stack(self, groups: Sequence[Sequence[int]]) -> None:
        """Put each group below those before it, as far as no path leads back."""
        lowest: list[Sequence[int]] = []
        for group in groups:
            reached = self._reached(group)
            beside = [other for other in lowest if not reached.isdisjoint(other)]
            for other in lowest:
                if reached.isdisjoint(other):
                    self.put_below(other, group)
            lowest = [*beside, group]

    def _reached(self, boxes: Sequence[int]) -> set[int]:
        seen = set(boxes)
        todo = list(boxes)
        while todo:
            for after in self._behind.get(todo.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    def rows(self) -> list[int]:
        """Return the row of each box, virtual ones included."""
        return rows_of(self._total, self._edges, self._below)


def parts_of(boxes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the boxes in groups that share no edge, each in the order of `boxes`."""
    near: dict[int, list[int]] = {box: [] for box in boxes}
    for source, target in edges:
        near[source].append(target)
        near[target].append(source)
    part: dict[int, int] = {}
    for first in boxes:
        todo = [first]
        while todo:
            box = todo.pop()
            if box not in part:
                part[box] = first
                todo.extend(near[box])
    groups: dict[int, list[int]] = {}
    for box in boxes:
        groups.setdefault(part[box], []).append(box)
    return list(groups.values())


def rows_of(
    count: int, edges: Sequence[tuple[int, int]], below: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Return the row of each of `count` boxes, from 0: as high as its needs allow, but sources
    and forks as low as their readers allow, so that edges are short.

    `below` are constraints without a line, which pull at no box.
    """
    order, forward = _order(count, (*edges, *below))
    before: list[list[int]] = [[] for _ in range(count)]
    behind: list[list[int]] = [[] for _ in range(count)]
    for source, target in forward:
        before[target].append(source)
        behind[source].append(target)
    constraints = set(below)
    pull = [0] * count
    for source, target in forward:
        if (source, target) not in constraints:
            pull[source] += 1
            pull[target] -= 1
    rows = [0] * count
    for box in order:
        rows[box] = max((rows[b] + 1 for b in before[box]), default=0)
    for box in reversed(order):
        if pull[box] > 0:
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
        if not ready:  # a ring: its first box goes as if it waited for nothing
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
    """Lay one panel out: parts that share no row stand in the middle, below each other.

    Args:
        boxes: the boxes of the panel, in the order in which they should stand where free.
        rows: row of each box of the picture.
        widths: width of each box of the picture.
        edges: (upper, lower) boxes of this panel; lower stands in a later row.
    """
    slots = {box: _Slot(rows[box], widths[box]) for box in boxes}
    chains = [_chain(slots[upper], slots[lower]) for upper, lower in edges]
    through: dict[int, list[_Slot]] = {}
    for (upper, _), chain in zip(edges, chains, strict=True):
        through.setdefault(upper, []).extend(chain)
    width = 0.0
    bands = []
    for band in _bands(parts_of(boxes, edges), rows):
        every = [slots[box] for box in band]
        every += [point for box in band for point in through.get(box, ())]
        bands.append((every, _spread_out(every)))
        width = max(width, bands[-1][1])
    for every, wide in bands:
        for slot in every:
            slot.x += (width - wide) / 2
    return Columns(
        centres={box: slot.x for box, slot in slots.items()},
        points=[[(point.row, point.x) for point in chain] for chain in chains],
        width=width,
    )


def _bands(parts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
    """Return the parts, those together that have rows in common or between each other's."""
    bands: list[list[int]] = []
    bottom = -1
    for part in sorted(parts, key=lambda part: min(rows[box] for box in part)):
        if bands and min(rows[box] for box in part) <= bottom:
            bands[-1].extend(part)
        else:
            bands.append(list(part))
        bottom = max(bottom, *(rows[box] for box in part))
    return bands


def _spread_out(every: Sequence[_Slot]) -> float:
    """Set the x of all slots of a band, from 0 rightwards; return the band's width."""
    by_row: dict[int, list[_Slot]] = {}
    for slot in every:
        by_row.setdefault(slot.row, []).append(slot)
    _spread(_ordered([by_row[row] for row in sorted(by_row)]))
    left = min(slot.x - slot.width / 2 for slot in every)
    for slot in every:
        slot.x -= left
    return max(slot.x + slot.width / 2 for slot in every)


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
        crossings = _crossings(order)
        if crossings < fewest:
            best, fewest = order, crossings
    _crossings(best)  # restores its places in the slots
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
    # Blocks that are as tight as allowed: [weight, weighted sum of wanted, members].
    blocks: list[list[float]] = []
    for slot, neighbours, offset in zip(row, near, offsets, strict=True):
        weight, wanted = 0.1, slot.x  # without neighbours it stays
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
