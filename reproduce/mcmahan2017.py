"""McMahan et al., 2017: more local computation, fewer rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.programs import FederatedSGD, FederatedTraining
from reproduce._daemons import beside_simulator, draw_curves, rounds_on_daemons
from reproduce._data import Examples, digits
from reproduce._federation import MAX_SHARE, Federation, rounds_to
from reproduce._numpy import NUMPY_SEED, Perceptron, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
COHORT = 10  # in each round; the paper has 10 of 100
TARGET = 0.95
RATE = 0.3  # of 0.1, 0.3 and 1 the best of most rows, and near the best of all
ALL = 1_000  # a batch that no client's examples fill: the paper's B of infinity
MOST_ROUNDS = 200
NUMPY_RUNS = 5
LAYERS = (64, 64, 64, 10)
NET = Perceptron(LAYERS)
HAND_ROUNDS = 3
FLOAT32 = 3e-5  # that some rounds in float32 are off by at most, as in `bbnode verify`
PARTITIONS = {"IID": "iid", "non-IID": "shards"}


@dataclass(frozen=True)
class Setting:
    """One row of the paper's table 2 (MNIST, CNN): epochs, batch, and its rounds to 99 %."""

    epochs: int  # 0: FedSGD
    batch: int
    paper: tuple[int, int]  # IID, non-IID

    @property
    def name(self) -> str:
        """The row as the paper names it."""
        batch = "∞" if self.batch == ALL else str(self.batch)
        return f"FedAvg E={self.epochs} B={batch}" if self.epochs else "FedSGD"


SETTINGS = (
    Setting(0, ALL, (626, 483)),
    Setting(5, ALL, (179, 1000)),
    Setting(1, 10, (34, 350)),
    Setting(5, 10, (20, 229)),
)
# The paper's table 1 (MNIST, 2NN, E = 1, B = 10): clients in a round, of 100, and rounds to 97 %.
FRACTIONS: dict[float, tuple[int, int]] = {
    0.0: (316, 3275), 0.1: (87, 664), 0.5: (75, 443), 1.0: (70, 380),
}  # fmt: skip
# One client at a time does not always come to the target in time: that has no mean to compare.
COHORTS_BESIDE = ((1.0, "IID"), (1.0, "non-IID"))


@cache
def program_of(setting: Setting, cohort: int) -> FederatedTraining | FederatedSGD:
    """Return the program of a row."""
    common: dict[str, Any] = {
        "model": LAYERS, "clients": cohort, "batch": setting.batch,
        "learning_rate": RATE,
    }  # fmt: skip
    if not setting.epochs:
        return FederatedSGD(**common)
    return FederatedTraining(**common, epochs=setting.epochs)


def federation_of(
    examples: Examples, setting: Setting, partition: str, seed: int, cohort: int
) -> Federation:
    """Return a federation of a row."""
    shares = examples.shares(CLIENTS, PARTITIONS[partition], seed=seed)
    clients = [{"data": share} for share in shares]
    server = {"test": examples.tested}
    return Federation(program_of(setting, cohort), clients, server, seed=seed)


def curve(
    examples: Examples, setting: Setting, partition: str, seed: int, *, cohort: int = COHORT
) -> list[float]:
    """Return the accuracy on the test after each round, up to the target or `MOST_ROUNDS`."""
    name = "accuracy" if setting.epochs else "test_accuracy"
    federation = federation_of(examples, setting, partition, seed, cohort)
    found: list[float] = []
    for outputs in federation.rounds(MOST_ROUNDS):
        found.append(float(outputs[name]))
        if found[-1] >= TARGET:
            break
    return found


def rounds_in_numpy(
    examples: Examples, setting: Setting, partition: str, seed: int, cohort: int = COHORT
) -> list[float]:
    """Return the rounds to the target of runs in numpy, whose cohorts and orders are drawn anew."""
    shares = examples.shares(CLIENTS, PARTITIONS[partition], seed=seed)
    rows, test = [rows_of(each) for each in shares], rows_of(examples.tested)
    start, found = start_of(program_of(setting, cohort).forward), []
    for number in range(NUMPY_RUNS):
        rng, w = np.random.default_rng([seed, number, NUMPY_SEED]), start
        accuracies: list[float] = []
        while len(accuracies) < MOST_ROUNDS and (not accuracies or accuracies[-1] < TARGET):
            asked = [rows[at] for at in rng.permutation(CLIENTS)[:cohort]]
            trained = [
                NET.trained(w, each, rng, epochs=max(1, setting.epochs), batch=setting.batch,
                            rate=RATE)
                for each in asked
            ]  # fmt: skip
            w = mean(trained, [len(y) for _, y in asked])
            accuracies.append(NET.accuracy(w, *test))
        found.append(rounds_to(accuracies, TARGET))
    return found


def by_hand(examples: Examples, seed: int) -> list[Claim]:
    """Return claims of rounds of all clients, non-IID, that have a formula."""
    setting = Setting(1, ALL, (0, 0))
    averaged, summed = (
        [each["model"] for each in made.rounds(HAND_ROUNDS)]
        for made in (
            federation_of(examples, each, "non-IID", seed, CLIENTS)
            for each in (setting, SETTINGS[0])
        )
    )
    x, y = np.load(examples.train)["x"].astype(np.float64), np.load(examples.train)["y"]
    w = start_of(program_of(setting, CLIENTS).forward)
    off = 0.0
    for found in averaged:
        w = w - RATE * NET.gradient(w, x, y)
        off = max(off, float(np.abs(found - w).max()))
    apart = float(np.abs(np.subtract(averaged, summed)).max())
    made = [
        within("FedAvg of one epoch and one batch (E = 1, B = ∞) is FedSGD", apart, 0, FLOAT32),
        within(
            "with all clients that is gradient descent on all examples, however they are dealt",
            off, 0, FLOAT32,
        ),
    ]  # fmt: skip
    for each in SETTINGS[1:]:
        federation = federation_of(examples, each, "IID", seed, CLIENTS)
        federation.round()
        steps = [client.component("local").progress.steps for client in federation.clients]
        expected = each.epochs * (1 if each.batch == ALL else -(-1_438 // CLIENTS // each.batch))
        told = f"{min(steps)} to {max(steps)}"
        made.append(
            within(
                f"{each.name}: a client makes {expected} steps in a round (E times its batches)",
                float(np.mean(steps)), expected, expected, told,
            )
        )  # fmt: skip
    return made


def run(seed: int) -> Result:
    """Measure rounds to the target by local work, and by the clients of a round."""
    small = SETTINGS[2]
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        curves = {
            (setting, partition): curve(examples, setting, partition, seed)
            for partition in PARTITIONS
            for setting in SETTINGS
        }
        rounds = {key: rounds_to(found, TARGET) for key, found in curves.items()}
        by_cohort: dict[tuple[float, str], float] = {}
        for fraction, partition in product(FRACTIONS, PARTITIONS):
            cohort = cohort_of(fraction)
            by_cohort[fraction, partition] = (
                rounds[small, partition]
                if cohort == COHORT
                else rounds_to(curve(examples, small, partition, seed, cohort=cohort), TARGET)
            )
        claims = [*by_hand(examples, seed), *_beside(examples, rounds, by_cohort, seed)]
    return Result(
        [_by_work(rounds), _by_cohort(by_cohort)],
        claims,
        partial(_draw, curves),
    )


def cohort_of(fraction: float) -> int:
    """Return the number of clients in a round; 0 is one client."""
    return max(1, round(fraction * CLIENTS))


def _beside(
    examples: Examples, rounds: dict[Any, float], by_cohort: dict[tuple[float, str], float],
    seed: int,
) -> list[Claim]:  # fmt: skip
    """Return the claims that rounds to the target are those of plain numpy."""
    made = []
    for partition in PARTITIONS:
        pairs = [
            (rounds[each, partition], rounds_in_numpy(examples, each, partition, seed))
            for each in SETTINGS
        ]
        made.append(
            beside(
                f"{partition}: rounds to {TARGET:.0%} are those of plain numpy, in the mean of "
                "FedSGD and three kinds of local work",
                pairs,
                ratio=True,
            )
        )
    pairs = [
        (
            by_cohort[fraction, partition],
            rounds_in_numpy(examples, SETTINGS[2], partition, seed, cohort_of(fraction)),
        )
        for fraction, partition in COHORTS_BESIDE
    ]
    made.append(
        beside(
            f"all clients in each round: rounds to {TARGET:.0%} are those of plain numpy, in the "
            "mean of IID and non-IID",
            pairs,
            ratio=True,
        )
    )
    return made


DAEMONS = 10  # clients, and all in each round
DAEMON_ROUNDS = 6


def on_daemons(seed: int) -> Result:
    """Compare little with much local work, in some rounds of daemons and of simulated nodes."""
    found = {}
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        for setting, partition in product(SETTINGS[2:4], PARTITIONS):
            made = program_of(setting, DAEMONS)
            shares = examples.shares(DAEMONS, PARTITIONS[partition], seed=seed)
            nodes = [{"data": share} for share in shares], {"test": examples.tested}
            given = {
                name: getattr(made, name)
                for name in ("model", "clients", "batch", "learning_rate", "epochs")
            }
            server = {**nodes[1], "aggregator": MAX_SHARE}
            ways = (
                rounds_on_daemons(
                    "bbnode.programs:FederatedTraining", given, nodes[0], server, DAEMON_ROUNDS
                ),
                Federation(made, *nodes, seed=seed).rounds(DAEMON_ROUNDS),
            )
            real, simulated = ([float(each["accuracy"]) for each in way] for way in ways)
            found[f"{partition}, {setting.name}"] = real, simulated
    table, same = beside_simulator(found)
    last = {name: real[-1] for name, (real, _) in found.items()}
    one, five = (f"IID, {setting.name}" for setting in SETTINGS[2:4])
    ahead = Claim(
        "IID: five epochs a round are ahead of one",
        last[five] > last[one],
        f"{last[five]:.3f} and {last[one]:.3f} after {DAEMON_ROUNDS} rounds",
    )
    return Result([table], [ahead, same], lambda figure: draw_curves(figure, found))


def _by_work(rounds: dict[Any, float]) -> Table:
    rows: list[list[Cell]] = []
    for setting in SETTINGS:
        row: list[Cell] = [setting.name, _updates(setting)]
        for at, partition in enumerate(PARTITIONS):
            key = setting, partition
            row += [_count(rounds[key]), _faster(rounds[SETTINGS[0], partition], rounds[key])]
            row.append(_faster(SETTINGS[0].paper[at], setting.paper[at]))
        rows.append(row)
    columns = ["", "u", *(
        f"{partition}{what}" for partition in PARTITIONS for what in ("", ": faster by", ", paper")
    )]  # fmt: skip
    title = f"Rounds to {TARGET:.0%}, by local work; u: updates of a client in a round"
    return Table(title, columns, rows)


def _by_cohort(found: dict[tuple[float, str], float]) -> Table:
    rows: list[list[Cell]] = []
    for fraction, paper in FRACTIONS.items():
        row: list[Cell] = [fraction]
        for at, partition in enumerate(PARTITIONS):
            row += [_count(found[fraction, partition])]
            row += [_faster(found[0.0, partition], found[fraction, partition])]
            row += [_faster(FRACTIONS[0.0][at], paper[at])]
        rows.append(row)
    columns = ["C", *(
        f"{partition}{what}" for partition in PARTITIONS for what in ("", ": faster by", ", paper")
    )]  # fmt: skip
    return Table(
        f"Rounds to {TARGET:.0%}, by the part C of clients in a round (E=1, B=10; 0: one client)",
        columns,
        rows,
    )


def _updates(setting: Setting) -> float:
    # The paper's u = E n / (K B), with B infinite: E.
    examples = 1_438 / CLIENTS
    return max(1, setting.epochs) * (1 if setting.batch == ALL else examples / setting.batch)


def _count(rounds: float) -> str:
    return f"{rounds:.1f}" if math.isfinite(rounds) else f"> {MOST_ROUNDS}"


def _faster(base: float, rounds: float) -> float | str | None:
    if math.isfinite(base):
        return round(base / rounds, 1)
    return f"> {MOST_ROUNDS / rounds:.1f}" if math.isfinite(rounds) else None


def _draw(curves: dict[tuple[Setting, str], list[float]], figure: Figure) -> None:
    panels = figure.subplots(1, len(PARTITIONS), sharey=True)
    for partition, axes in zip(PARTITIONS, panels, strict=True):
        for setting in SETTINGS:
            best = [
                max(curves[setting, partition][:end])
                for end in range(1, 1 + len(curves[setting, partition]))
            ]
            axes.plot(range(1, 1 + len(best)), best, label=setting.name, linewidth=1.5)
        axes.axhline(TARGET, color="grey", linewidth=1, linestyle="--")
        axes.set(title=partition, xlabel="rounds", xscale="log", ylim=(0, 1))
    panels[0].set_ylabel("best accuracy so far")
    panels[0].legend(fontsize="small")


EXPERIMENT = Experiment(
    paper="McMahan et al., 2017, arXiv:1602.05629, tables 1 and 2",
    says=(
        "rounds to 95 % on scikit-learn's 1,797 digits of 8 x 8 pixels (not MNIST), 20 clients "
        "of 72 examples, IID and two shards each, an MLP 64-64-64-10; FedAvg against FedSGD"
    ),
    page="docs/methods/fedavg.md",
    run=run,
    methods=[
        "FedAvg",
        "FedAvg, deltas",
        "FedAvg, unweighted",
        "FederatedSGD",
    ],
    on_daemons=on_daemons,
)
