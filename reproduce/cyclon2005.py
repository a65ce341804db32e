"""Cyclon's overlay beside a random graph: in-degrees, clustering, path length, survivors."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean, pstdev
from typing import TYPE_CHECKING

from bbnode.components import Cyclon
from reproduce._overlays import (
    PERIOD_NS,
    clustering,
    in_degrees,
    joined,
    outside_largest,
    path_length,
    random_views,
    undirected,
    views,
    without,
)
from reproduce.experiment import Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES, VIEW, SHUFFLE = 500, 20, 8
CYCLES = (2, 5, 10, 20, 40)
REMOVED = (50, 60, 70, 75, 80, 85, 90, 95)  # percent
DRAWS = 20  # sets of nodes that are removed, of each size
SOURCES = 100  # nodes that paths are measured from


def run(seed: int) -> Result:
    """Let nodes that know one another through a single one shuffle, and measure their graph."""
    network = joined(Cyclon, NODES, seed, {"view_size": VIEW, "shuffle_size": SHUFFLE})
    chance = random_views(NODES, VIEW, seed)
    measures = []
    for cycle in CYCLES:
        network.run(until=cycle * PERIOD_NS)
        graph = views(network)
        degrees = in_degrees(graph)
        row = [clustering(graph), path_length(graph, SOURCES), pstdev(degrees), max(degrees)]
        measures.append([cycle, *row, outside_largest(graph)])
    own, reference = in_degrees(graph), in_degrees(chance)
    expected = [clustering(chance), path_length(chance, SOURCES), pstdev(reference), max(reference)]

    draw = random.Random(seed)
    survivors: list[list[float]] = []
    for percent in REMOVED:
        gone = [set(draw.sample(range(NODES), NODES * percent // 100)) for _ in range(DRAWS)]
        rows = [
            mean(outside_largest(without(kind, each)) / (NODES - len(each)) for each in gone)
            for kind in (graph, chance)
        ]
        survivors.append([percent, 100 * rows[0], 100 * rows[1]])

    last = measures[-1]
    at_70 = next(row for row in survivors if row[0] == 70)
    claims = [
        Claim(
            "the clustering coefficient and the path length come to those of a random graph",
            abs(last[1] / expected[0] - 1) < 0.1 and abs(last[2] / expected[1] - 1) < 0.02,
            f"{last[1]:.4f} and {last[2]:.3f}; random {expected[0]:.4f} and {expected[1]:.3f}",
        ),
        Claim(
            "in-degrees lie closer to the size of a view than in a random graph",
            pstdev(own) < pstdev(reference),
            f"standard deviation {pstdev(own):.2f}; random {pstdev(reference):.2f}",
        ),
        Claim(
            "from a star, which is the worst start, no node is ever cut off",
            all(row[-1] == 0 for row in measures),
            f"outside the largest cluster: {[row[-1] for row in measures]}",
        ),
        Claim(
            "without 70 % of the nodes hardly one of the others is cut off",
            at_70[1] < 0.5,
            f"{at_70[1]:.2f} % of them; random {at_70[2]:.2f} %",
        ),
    ]
    tables = [
        Table(
            f"{NODES} nodes, views of {VIEW}, shuffles of {SHUFFLE}",
            ["cycles", "clustering", "path length", "in-degree std", "in-degree max", "cut off"],
            [*measures, ["random graph", *expected, outside_largest(chance)]],
        ),
        Table(
            f"survivors outside the largest cluster, mean of {DRAWS} draws",
            ["removed %", "Cyclon %", "random graph %"],
            survivors,
        ),
    ]

    def draw_figure(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for label, degrees in (("Cyclon", own), ("random graph", reference)):
            counts = Counter(degrees)
            axis = range(min(counts), max(counts) + 1)
            left.plot(axis, [counts[d] for d in axis], marker=".", label=label)
        left.set(xlabel="in-degree", ylabel="nodes")
        left.legend()
        for column, label in ((1, "Cyclon"), (2, "random graph")):
            right.plot(REMOVED, [row[column] for row in survivors], marker=".", label=label)
        right.set(xlabel="nodes removed, %", ylabel="survivors cut off, %")

    assert len(undirected(graph)) == NODES
    return Result(tables, claims, draw_figure)


EXPERIMENT = Experiment(
    paper="Voulgaris, Gavidia and van Steen, 2005, doi:10.1007/s10922-005-4441-x",
    says=(
        f"Cyclon against a random graph, {NODES} nodes in the simulator (the paper: 100,000), from "
        "a star: clustering, path length, in-degrees, survivors of a failure of 50 to 95 %"
    ),
    page="docs/methods/cyclon.md",
    run=run,
)
