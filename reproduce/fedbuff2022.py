"""FedBuff against rounds and against FedAsync, with clients of very unequal speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.components import values
from bbnode.engine import steps
from bbnode.programs import AsynchronousTraining, FedAsync, FedBuff, FederatedTraining
from bbnode.sim import MS, S, SimNode
from reproduce._data import Examples, digits
from reproduce._federation import Federation
from reproduce.experiment import Cell, Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
BUFFER = 10  # K of the paper's experiments
TARGET = 0.85
LIMIT_S = 400
MEDIAN_NS = S  # of the times that clients train for
SPREAD = 1.25  # deviation of their logarithm
RETRY_NS = 100 * MS  # after which a client asks again for work
SLICE_NS = 500 * MS
MAX_STALENESS = 1000  # versions; slow clients count less, and are not refused


@dataclass(frozen=True)
class Point:
    """What the server's weights were worth, and after how many updates of clients."""

    at_s: float
    updates: int
    accuracy: float


def run(seed: int) -> Result:
    """Train in three ways until the target, or the limit of time, is reached."""
    drawn = np.random.default_rng(seed).lognormal(0, SPREAD, CLIENTS)
    times = [int(MEDIAN_NS * each) for each in drawn]
    common: dict[str, Any] = {
        "model": (64, 32, 10), "epochs": 2, "batch": 16, "learning_rate": 0.3, "seed": seed,
        "deadline_s": 2.0 * LIMIT_S,
    }  # fmt: skip
    ways: dict[str, FederatedTraining] = {
        "FedAvg, rounds of all": FederatedTraining(clients=CLIENTS, quorum=CLIENTS, **common),
        "FedAsync": FedAsync(max_staleness=MAX_STALENESS, **common),
        "FedBuff, K = 10": FedBuff(buffer=BUFFER, max_staleness=MAX_STALENESS, **common),
    }
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        curves = {name: curve(way, examples, times, seed) for name, way in ways.items()}
    # A way that does not come to it within the limit counts as all of that time.
    reached = {
        name: next(
            (p for p in each if p.accuracy >= TARGET),
            replace(each[-1] if each else Point(0, 0, 0), at_s=LIMIT_S),
        )
        for name, each in curves.items()
    }
    buffered = reached["FedBuff, K = 10"]
    theirs = {"FedAvg, rounds of all": 3.3, "FedAsync": 2.5, "FedBuff, K = 10": 1.0}
    rows: list[list[Cell]] = [
        [
            name,
            p.at_s,
            p.at_s / buffered.at_s,
            p.updates,
            p.updates / buffered.updates,
            theirs[name],
        ]
        for name, p in reached.items()
    ]
    columns = [
        "", "virtual seconds", "of FedBuff's", "updates of clients", "of FedBuff's",
        "paper: less efficient by",
    ]  # fmt: skip
    title = f"to an accuracy of {TARGET}: {CLIENTS} clients, the slowest of which trains for "
    title += (
        f"{max(times) / S:.1f} s and the median one for {sorted(times)[CLIENTS // 2] / S:.1f} s"
    )
    return Result(
        [Table(title, columns, rows)],
        claims(reached),
        lambda figure: draw(figure, curves),
    )


def claims(reached: dict[str, Point]) -> list[Claim]:
    """Return what the paper's abstract says, and what was found."""
    rounds, mixed, buffered = reached.values()
    return [
        Claim(
            "FedBuff is faster than rounds that wait for stragglers",
            buffered.at_s < rounds.at_s,
            f"{rounds.at_s:.1f} s and {buffered.at_s:.1f} s",
        ),
        Claim(
            "FedBuff is no slower than FedAsync",
            buffered.at_s <= mixed.at_s,
            f"{mixed.at_s:.1f} s and {buffered.at_s:.1f} s",
        ),
    ]


def curve(
    program: FederatedTraining, examples: Examples, times: Sequence[int], seed: int
) -> list[Point]:
    """Train until the target; return each accuracy of the server. Client i takes `times[i]` ns."""
    shares = examples.shares(CLIENTS, "dirichlet", seed=seed, alpha=1.0)
    federation = Federation(
        program, [{"data": share} for share in shares], {"test": examples.tested}, seed=seed
    )
    for client, task_ns in zip(federation.clients, times, strict=True):
        client.task_ns = task_ns
    network, server = federation.network, federation.server
    if isinstance(program, AsynchronousTraining):
        for client in federation.clients:
            always(federation, client)
    else:
        always(federation, server)
    found: list[Point] = []
    began_ns, seen_ns, updates = network.now_ns, network.now_ns, 0
    while network.now_ns < LIMIT_S * S:
        network.run(until=network.now_ns + SLICE_NS)
        for at_ns, accuracy, stats in fresh(server, seen_ns):
            updates += stats["contributors"] if "updates" not in stats else stats["updates"]
            found.append(Point((at_ns - began_ns) / S, updates, accuracy))
        seen_ns = network.now_ns
        if found and found[-1].accuracy >= TARGET:
            break
    return found


def always(federation: Federation, node: SimNode) -> None:
    """Invoke a node's target for ever, one turn after the other."""
    network, target = federation.network, node.classes[0]
    turn: int | None = None

    def again() -> None:
        nonlocal turn
        if turn is None or node.has_finished(turn):
            turn = node.invoke(target, {"tick": values.TRIGGER})
        network.at(network.now_ns + RETRY_NS, again)

    again()


def fresh(server: SimNode, since_ns: int) -> Iterator[tuple[int, float, Any]]:
    """Yield the time, the accuracy and the stats of each step after a time."""
    found: dict[int, dict[str, Any]] = {}
    for at_ns, event in server.history():
        if at_ns > since_ns and isinstance(event, steps.AppEvent):
            found.setdefault(event.execution, {"at_ns": at_ns})[event.topic] = event.value
    for each in found.values():
        yield each["at_ns"], float(each["accuracy"]), each["stats"]


def draw(figure: Figure, curves: dict[str, list[Point]]) -> None:
    """Draw accuracy over time, and over updates."""
    panels = figure.subplots(1, 2, sharey=True)
    for name, points in curves.items():
        accuracies = [p.accuracy for p in points]
        panels[0].plot([p.at_s for p in points], accuracies, label=name)
        panels[1].plot([p.updates for p in points], accuracies, label=name)
    for axes, says in zip(panels, ("virtual seconds", "updates of clients"), strict=True):
        axes.axhline(TARGET, color="grey", linewidth=0.8)
        axes.set_xlabel(says)
    panels[0].set_xscale("log")
    panels[0].set_ylabel("accuracy")
    panels[1].legend(fontsize=8)


EXPERIMENT = Experiment(
    paper="Nguyen et al., 2022, arXiv:2106.06639, abstract and table 1",
    says=(
        "FedAvg, FedAsync and FedBuff to one accuracy on scikit-learn's digits, 20 clients whose "
        "speeds are log-normal (the paper: CelebA, Sent140 and CIFAR-10, 1,000 at work at once, "
        "times as its production system has them), in the simulator's virtual time"
    ),
    page="docs/methods/fedbuff.md",
    run=run,
    methods=[
        "FedBuff",
        "FedAsync, constant",
        "FedAsync, polynomial",
        "FedAsync, hinge",
    ],
)
