"""Floods over HyParView and over Cyclon, right after many nodes failed at once."""

from __future__ import annotations

import random
from statistics import mean
from typing import TYPE_CHECKING

from bbnode.components import Cyclon, HyParView
from bbnode.sim import S
from reproduce._overlays import PERIOD_NS, Views, joined, views, without
from reproduce.experiment import Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = 200
FAILED = (10, 30, 50, 60, 70, 80, 90)  # percent
FANOUT = 4  # of a flood over Cyclon's views; of HyParView's, all active neighbours
MESSAGES = 50
HYPARVIEW_PERIODS, CYCLON_PERIODS = 5, 15
# As the paper has them: Cyclon's view is as large as both of HyParView's.
CYCLON = {"view_size": 35, "shuffle_size": 14}


def reliability(graph: Views, fanout: int | None, draw: random.Random) -> float:
    """Return the mean part of the nodes that a flood from a random node reaches, in percent."""
    parts = []
    for _ in range(MESSAGES):
        source = draw.choice(sorted(graph))
        reached, edge = {source}, [source]
        while edge:
            others = sorted(graph[edge.pop()])
            chosen = others if fanout is None else draw.sample(others, min(fanout, len(others)))
            fresh = set(chosen) & graph.keys() - reached
            reached |= fresh
            edge.extend(sorted(fresh))
        parts.append(len(reached) / len(graph))
    return 100 * mean(parts)


def run(seed: int) -> Result:
    """Let both overlays form, then fail parts of them, each from the same formed state."""
    draw = random.Random(seed)
    cyclon = joined(Cyclon, NODES, seed, CYCLON)
    cyclon.run(until=CYCLON_PERIODS * PERIOD_NS)
    # Who sends does not know who failed: a message to such a node is lost.
    believed = views(cyclon)
    network = joined(HyParView, NODES, seed, {})
    network.run(until=HYPARVIEW_PERIODS * PERIOD_NS)
    formed = views(network)
    for node in network.nodes:
        node.checkpoint()

    rows: list[list[float]] = []
    for percent in FAILED:
        gone = set(draw.sample(range(NODES), NODES * percent // 100))
        alive = {i: others for i, others in believed.items() if i not in gone}
        found = [
            percent,
            reliability(alive, FANOUT, draw),
            reliability(without(formed, gone), None, draw),
        ]
        for node in network.nodes:
            network.crash(node)
        for node in network.nodes:
            network.restart(node)
        for i in sorted(gone):
            network.crash(f"peer-{i}")
        for wait_ns in (S, 2 * PERIOD_NS):
            network.run(until=network.now_ns + wait_ns)
            found.append(reliability(views(network), None, draw))
        rows.append(found)

    def at(percent: int) -> list[float]:
        return next(row for row in rows if row[0] == percent)

    claims = [
        Claim(
            "up to 80 % failures, floods over HyParView reach nearly all once it has mended itself",
            all(row[4] > 99 for row in rows if row[0] <= 80),
            f"two periods later: {[round(row[4], 1) for row in rows]} %",
        ),
        Claim(
            "lost connections alone mend most of it within a second",
            all(row[3] >= row[2] for row in rows) and at(70)[3] > 90,
            f"at 70 %: {at(70)[2]:.1f} % before, {at(70)[3]:.1f} % after a second",
        ),
        Claim(
            "over Cyclon, whose views keep the dead for long, reliability falls below 90 % from "
            "50 % failures on",
            all(row[1] < 90 for row in rows if row[0] >= 50),
            f"{[round(row[1], 1) for row in rows]} %",
        ),
    ]
    table = Table(
        f"{NODES} nodes: mean reliability of {MESSAGES} floods, %",
        ["failed %", "Cyclon", "HyParView, at once", "after 1 s", "after two periods"],
        rows,
    )

    def draw_figure(figure: Figure) -> None:
        axes = figure.subplots()
        labels = (
            f"Cyclon, fanout {FANOUT}",
            "HyParView, at once",
            "HyParView, after 1 s",
            "HyParView, after two periods",
        )
        for column, label in enumerate(labels, start=1):
            axes.plot(FAILED, [row[column] for row in rows], marker=".", label=label)
        axes.set(xlabel="nodes failed, %", ylabel="reliability, %", ylim=(0, 105))
        axes.legend()

    return Result([table], claims, draw_figure)


EXPERIMENT = Experiment(
    paper="Leitão, Pereira and Rodrigues, 2007, doi:10.1109/DSN.2007.56",
    says=(
        f"reach of floods over the views of {NODES} nodes in the simulator (the paper: 10,000), "
        "after 10 to 90 % failed at once, HyParView beside Cyclon"
    ),
    page="docs/methods/hyparview.md",
    run=run,
)
