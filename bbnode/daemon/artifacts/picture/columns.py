"""Where the boxes of one panel stand in their rows: few crossings, straight edges.

Rule: an edge over several rows goes through a point in each row between, which takes part as a
narrow item of its own, so that no edge runs below a box. Order within rows by the barycentre
method (Sugiyama, Tagawa, Toda 1981); positions by least squares against the neighbours' with
a least distance, solved exactly per row by pooling adjacent violators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

POINT_WIDTH = 10.0
ITEM_GAP = 26.0
ORDER_SWEEPS = 12
PLACE_SWEEPS = 16
# How much an edge pulls on its ends, by how many of them are points: long edges get straight.
PULLS = (1.0, 3.0, 8.0)


@dataclass(slots=True)
class Item:
    """A box, or a point of a long edge."""

    row: int
    width: float
    box: int = -1  # -1: a point
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    x: float = 0.0  # centre


@dataclass(frozen=True, slots=True)
class Columns:
    """The centres of boxes, and the points of each edge (x by row), from x = 0 rightwards."""

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
    items = [Item(row=rows[box], width=widths[box], box=box) for box in boxes]
    index_of = {box: index for index, box in enumerate(boxes)}
    chains = [_chain(items, index_of[s], index_of[t]) for s, t in edges]
    by_row: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        by_row.setdefault(item.row, []).append(index)
    order = [by_row[row] for row in sorted(by_row)]
    order = _ordered(items, order)
    _spread(items, order)
    left = min((item.x - item.width / 2 for item in items), default=0.0)
    right = max((item.x + item.width / 2 for item in items), default=0.0)
    for item in items:
        item.x -= left
    return Columns(
        centres={item.box: item.x for item in items if item.box >= 0},
        points=[[(items[i].row, items[i].x) for i in chain] for chain in chains],
        width=right - left,
    )


def _chain(items: list[Item], upper: int, lower: int) -> list[int]:
    """Insert the points of one edge; gives their indices."""
    chain = []
    last = upper
    for row in range(items[upper].row + 1, items[lower].row):
        items.append(Item(row=row, width=POINT_WIDTH))
        _link(items, last, len(items) - 1)
        last = len(items) - 1
        chain.append(last)
    _link(items, last, lower)
    return chain


def _link(items: list[Item], upper: int, lower: int) -> None:
    items[upper].down.append(lower)
    items[lower].up.append(upper)


# --- order ---------------------------------------------------------------------------------


def _ordered(items: list[Item], order: list[list[int]]) -> list[list[int]]:
    """The best of the orders that some sweeps down and up find."""
    best, fewest = order, _crossings(items, order)
    for sweep in range(ORDER_SWEEPS):
        if not fewest:
            break
        downwards = sweep % 2 == 0
        order = _sweep(items, order, downwards)
        found = _crossings(items, order)
        if found < fewest:
            best, fewest = order, found
    return best


def _sweep(items: list[Item], order: list[list[int]], downwards: bool) -> list[list[int]]:
    place: dict[int, float] = {i: float(at) for row in order for at, i in enumerate(row)}
    rows = list(order) if downwards else list(reversed(order))
    done = []
    for row in rows:
        wanted = {}
        for at, index in enumerate(row):
            near = items[index].up if downwards else items[index].down
            wanted[index] = sum(place[n] for n in near) / len(near) if near else float(at)
        ranked = sorted(row, key=wanted.__getitem__)
        place.update((index, float(at)) for at, index in enumerate(ranked))
        done.append(ranked)
    return done if downwards else done[::-1]


def _crossings(items: list[Item], order: list[list[int]]) -> int:
    place = {index: at for row in order for at, index in enumerate(row)}
    total = 0
    for row in order:
        ends = [place[down] for i in row for down in sorted(items[i].down, key=place.__getitem__)]
        total += _inversions(ends)
    return total


def _inversions(values: list[int]) -> int:
    """Pairs out of order, by merging."""
    if len(values) < 2:
        return 0
    middle = len(values) // 2
    left, right = values[:middle], values[middle:]
    total = _inversions(left) + _inversions(right)
    at = 0
    merged = []
    for value in left:
        while at < len(right) and right[at] < value:
            merged.append(right[at])
            at += 1
        total += at
        merged.append(value)
    values[:] = merged + right[at:]
    return total


# --- position ------------------------------------------------------------------------------


def _spread(items: list[Item], order: list[list[int]]) -> None:
    for row in order:
        x = 0.0
        for index in row:
            items[index].x = x + items[index].width / 2
            x += items[index].width + ITEM_GAP
    both: Callable[[Item], list[int]] = lambda item: item.up + item.down  # noqa: E731
    for sweep in range(PLACE_SWEEPS):
        near: Callable[[Item], list[int]] = both
        if sweep < PLACE_SWEEPS // 2:
            near = (lambda item: item.up) if sweep % 2 == 0 else (lambda item: item.down)
        for row in order if sweep % 2 == 0 else reversed(order):
            _place_row(items, row, near)


def _place_row(items: list[Item], row: list[int], near: Callable[[Item], list[int]]) -> None:
    """Move one row as close to its neighbours as its order and distances allow."""
    offsets, total = [], 0.0
    for at, index in enumerate(row):
        if at:
            total += (items[row[at - 1]].width + items[index].width) / 2 + ITEM_GAP
        offsets.append(total)
    # Blocks that stand as tightly as they may: [weight, weighted sum of wanted, members].
    blocks: list[list[float]] = []
    for at, index in enumerate(row):
        item = items[index]
        weight, wanted = _pull(items, item, near(item))
        blocks.append([weight, weight * (wanted - offsets[at]), 1])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    at = 0
    for block in blocks:
        for _ in range(int(block[2])):
            items[row[at]].x = _mean(block) + offsets[at]
            at += 1


def _mean(block: list[float]) -> float:
    return block[1] / block[0]


def _pull(items: list[Item], item: Item, near: list[int]) -> tuple[float, float]:
    """Weight and position of what an item's neighbours want; its own place when it has none."""
    if not near:
        return 0.1, item.x
    weights = [PULLS[(item.box < 0) + (items[n].box < 0)] for n in near]
    total = sum(weights)
    return total, sum(w * items[n].x for w, n in zip(weights, near, strict=True)) / total
