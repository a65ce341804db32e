"""Recall against queries per second of each index, over settings of its search; and the picture.

Rule: each point is a batch of all queries in one thread, by its processor time, the fastest of
three turns; in each turn there are all settings of all indexes, so that what else the machine does
hits all of them. The picture of the same numbers is the same text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np
from _retrieval_data import Vectors

from bbnode.components.indexes.collection import Collection
from bbnode.components.indexes.ivf_pq import IvfPqSearcher

TURNS = 3
EXPANSIONS = (10, 16, 24, 32, 48, 64, 96, 128, 256)
PROBES = (1, 2, 4, 8, 16, 32, 64)
FLAT_QUERIES = 100
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 300, 62, 44, 76
_COLOURS = {"FlatIndex": "#54616e", "HnswIndex": "#0b6bcb", "IvfPqIndex": "#c2410c"}


@dataclass(frozen=True)
class Point:
    """One setting of one index: recall of the k nearest, and queries per second."""

    index: str
    setting: str
    recall: float
    per_second: float


def curves(data: Vectors, k: int, graph: Collection) -> list[Point]:
    """Measure all settings; `graph` holds the items already."""
    flat = Collection("l2")
    lists = Collection("l2", searcher=IvfPqSearcher(threads=os.cpu_count() or 1))
    held = {"FlatIndex": flat, "HnswIndex": graph, "IvfPqIndex": lists}
    for collection in (flat, lists):
        collection.add(data.items)
        collection.search(data.queries[:1], k)  # trains the lists
    searcher: Any = lists.searcher
    searcher.threads = 1
    nearest = flat.search(data.queries, k).ids
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for _ in range(TURNS):
        for index, setting in settings(held):
            queries = data.queries[: FLAT_QUERIES if index == "FlatIndex" else None]
            started = thread_time()
            found = held[index].search(queries, k).ids
            rate = len(queries) / (thread_time() - started)
            pairs = zip(found, nearest[: len(queries)], strict=True)
            right = sum(len(np.intersect1d(a, b)) for a, b in pairs) / found.size
            known = best.get((index, setting), (0.0, 0.0))
            best[index, setting] = (right, max(rate, known[1]))
    return [Point(index, setting, *told) for (index, setting), told in best.items()]


def settings(held: dict[str, Collection]) -> Iterator[tuple[str, str]]:
    """Set each setting of each index, and name both."""
    yield "FlatIndex", ""
    graph: Any = held["HnswIndex"].searcher
    for graph.ef_search in EXPANSIONS:
        yield "HnswIndex", f"ef_search = {graph.ef_search}"
    lists: Any = held["IvfPqIndex"].searcher
    for lists.probes in PROBES:
        yield "IvfPqIndex", f"probes = {lists.probes}"


def table(points: Sequence[Point]) -> str:
    """Return the points as a table in Markdown."""
    rows = [
        f"| {each.index} | {each.setting} | {each.recall:.4f} | {each.per_second:,.0f} |"
        for each in points
    ]
    return "\n".join(["| index | setting | recall@10 | queries/s |", "|---|---|---|---|", *rows])


def drawn(shown: Sequence[tuple[str, Sequence[Point]]], k: int) -> str:
    """Return an SVG with a diagram of each data set: recall to the right, rate upwards."""
    width = _LEFT + len(shown) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 84
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="12" fill="#1b2733">'
        ),
        f"<title>Recall of the {k} nearest against queries per second</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (told, points) in enumerate(shown):
        parts += _diagram(_LEFT + number * (_WIDTH + _GAP), told, points, k)
    for number, (index, colour) in enumerate(_COLOURS.items()):
        x, y = _LEFT + 110 * number, height - 14
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{y}">{index}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _diagram(left: int, told: str, points: Sequence[Point], k: int) -> Iterator[str]:
    rates = [math.log10(each.per_second) for each in points]
    low, high = math.floor(min(rates)), math.ceil(max(rates))
    # Misses on a logarithmic axis, so that 0.99 and 0.999 are told apart.
    worst = max(0.5, *(1 - each.recall for each in points))
    scale = math.log10(worst / 1e-4)

    def across(recall: float) -> float:
        return left + _WIDTH * math.log10(worst / max(1 - recall, 1e-4)) / scale

    def up(rate: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(rate)) / max(high - low, 1)

    bottom = _TOP + _HEIGHT
    yield f'<text x="{left}" y="{_TOP - 18}" font-weight="bold">{told}</text>'
    for exponent in range(low, high + 1):
        y = up(10**exponent)
        yield f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#d9dee3" fill="none"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10**exponent:,}</text>'
    for recall in (0.5, 0.9, 0.99, 0.999, 1.0):
        x = across(recall)
        yield f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="#d9dee3" fill="none"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{recall:g}</text>'
    yield (
        f'<text x="{left + _WIDTH / 2:.1f}" y="{bottom + 38}" text-anchor="middle">'
        f"recall of the {k} nearest (1 for all at the right)</text>"
    )
    yield (
        f'<text x="{left}" y="{_TOP - 4}" fill="#54616e" font-size="11">'
        "queries a second of processor time, one thread</text>"
    )
    for index, colour in _COLOURS.items():
        placed = sorted(
            (across(each.recall), up(each.per_second)) for each in points if each.index == index
        )
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for x, y in placed:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
