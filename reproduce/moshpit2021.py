"""Ryabinin et al., 2021: means along one axis of a grid after the other are the mean of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bbnode.compiler import Compiler
from bbnode.programs import MoshpitAveraging
from bbnode.sim import MS, LinkModel, Network
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, near, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRIDS = ((4, 2), (3, 3), (2, 5))  # side, axes
COLUMNS = 200
DRAWN = 400


def variances(side: int, axes: int, seed: int) -> tuple[list[float], float]:
    """Return the variance over peers before and after each round, and how far the mean moved."""
    count = side**axes
    program = MoshpitAveraging(size=COLUMNS, side=side, axes=axes)
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    net = Network(seed, link=LinkModel(latency_ns=5 * MS), kept_steps=200)
    nodes = [net.add(f"peer-{at}", artifact, ["peer"]) for at in range(count)]
    net.run_until_idle()
    held = np.random.default_rng(seed).normal(size=(count, COLUMNS)).astype(np.float32)
    mean, found = held.mean(axis=0, dtype=np.float64), [_variance(held)]
    for _ in range(axes):
        begun = [
            node.invoke("peer", {"value": value}) for node, value in zip(nodes, held, strict=True)
        ]
        net.run_until_idle()
        outputs = [node.outputs(each) for node, each in zip(nodes, begun, strict=True)]
        held = np.stack([each["mean"] for each in outputs])
        found.append(_variance(held))
    return found, float(np.abs(held - mean).max())


def _variance(held: np.ndarray) -> float:
    return float(held.astype(np.float64).var(axis=0, ddof=1).mean())


def spread(side: int, count: int, seed: int) -> float:
    """Return the deviation of the variance that a round leaves, over runs in numpy."""
    rng = np.random.default_rng([seed, 1])
    left = []
    for _ in range(DRAWN):
        held = rng.normal(size=(count // side, side, COLUMNS))
        before = held.reshape(count, COLUMNS).var(axis=0, ddof=1).mean()
        means = np.repeat(held.mean(axis=1), side, axis=0)
        left.append(means.var(axis=0, ddof=1).mean() / before)
    return float(np.std(left))


def run(seed: int) -> Result:
    """Average on each grid."""
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    curves = {}
    for side, axes in GRIDS:
        count = side**axes
        found, off = variances(side, axes, seed)
        name = f"{side}^{axes} = {count} peers"
        expected = (count / side - 1) / (count - 1)
        rows.append([name, found[1] / found[0], expected, found[-1] / found[0], off])
        claims += [
            near(
                f"{name}: a round leaves (N/M - 1) / (N - 1) of the variance", found[1] / found[0],
                expected, spread(side, count, seed),
            ),
            within(f"{name}: after {axes} rounds all have the mean of all", off, 0, 1e-5),
            within(
                f"{name}: and not one round before", found[-2] / found[0], 1e-3, 1.0
            ),
        ]  # fmt: skip
        curves[name] = found

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        for name, found in curves.items():
            panel.semilogy([max(each, 1e-14) for each in found], "o-", label=name)
        panel.set(xlabel="round", ylabel="variance over peers")
        panel.legend()

    columns = [
        "grid", "variance after a round", "expected", "after as many rounds as axes",
        "largest difference from the mean",
    ]  # fmt: skip
    return Result([Table("values of a normal distribution", columns, rows)], claims, draw)


EXPERIMENT = Experiment(
    paper="Ryabinin et al., 2021, arXiv:2103.03239, section 3.2",
    says="variance over 16, 27 and 32 peers after each round of Moshpit's groups on a full grid; "
    "the paper has 512 to 1,024 peers, some of which fail",
    page="docs/methods/moshpit.md",
    run=run,
    methods=["Moshpit, averaging", "Moshpit, training"],
)
