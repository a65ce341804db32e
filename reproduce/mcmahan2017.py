"""McMahan et al., 2017: more local computation, fewer rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bbnode.programs import FederatedSGD, FederatedTraining
from reproduce._daemons import beside_simulator, draw_curves, rounds_on_daemons
from reproduce._data import Examples, digits
from reproduce._federation import MAX_SHARE, Federation, rounds_to
from reproduce.experiment import Cell, Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
COHORT = 10  # in each round; the paper has 10 of 100
TARGET = 0.95
RATE = 0.3  # of 0.1, 0.3 and 1 the best of most rows, and near the best of all
ALL = 1_000  # a batch that no client's examples fill: the paper's B of infinity
MOST_ROUNDS = 400
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
    Setting(20, ALL, (234, 672)),
    Setting(5, 10, (20, 229)),
    Setting(20, 10, (18, 173)),
)
# The paper's table 1 (MNIST, 2NN, E = 1, B = 10): clients in a round, of 100, and rounds to 97 %.
FRACTIONS: dict[float, tuple[int, int]] = {
    0.0: (316, 3275), 0.1: (87, 664), 0.2: (77, 619), 0.5: (75, 443), 1.0: (70, 380),
}  # fmt: skip


@cache
def program_of(setting: Setting, cohort: int) -> FederatedTraining | FederatedSGD:
    """Return the program of a row."""
    common: dict[str, Any] = {
        "model": (64, 64, 64, 10), "clients": cohort, "batch": setting.batch,
        "learning_rate": RATE,
    }  # fmt: skip
    if not setting.epochs:
        return FederatedSGD(**common)
    return FederatedTraining(**common, epochs=setting.epochs)


def curve(
    examples: Examples, setting: Setting, partition: str, seed: int, *, cohort: int = COHORT
) -> list[float]:
    """Return the accuracy on the test after each round, up to the target or `MOST_ROUNDS`."""
    name = "accuracy" if setting.epochs else "test_accuracy"
    shares = examples.shares(CLIENTS, PARTITIONS[partition], seed=seed)
    clients = [{"data": share} for share in shares]
    federation = Federation(
        program_of(setting, cohort), clients, {"test": examples.tested}, seed=seed
    )
    found: list[float] = []
    for outputs in federation.rounds(MOST_ROUNDS):
        found.append(float(outputs[name]))
        if found[-1] >= TARGET:
            break
    return found


def run(seed: int) -> Result:
    """Measure rounds to the target by local work, and by the clients of a round."""
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        curves = {
            (setting, partition): curve(examples, setting, partition, seed)
            for partition in PARTITIONS
            for setting in SETTINGS
        }
        by_cohort: dict[tuple[float, str], float] = {}
        for fraction, partition in product(FRACTIONS, PARTITIONS):
            cohort = max(1, round(fraction * CLIENTS))
            found = (
                curves[SETTINGS[2], partition]
                if cohort == COHORT
                else curve(examples, SETTINGS[2], partition, seed, cohort=cohort)
            )
            by_cohort[fraction, partition] = rounds_to(found, TARGET)
    rounds = {key: rounds_to(found, TARGET) for key, found in curves.items()}
    speed = {
        (setting, partition): rounds[SETTINGS[0], partition] / rounds[setting, partition]
        for setting, partition in rounds
    }
    return Result(
        [_by_work(rounds), _by_cohort(by_cohort)],
        _claims(rounds, speed, by_cohort),
        partial(_draw, curves),
    )


DAEMONS = 10  # clients, and all in each round
DAEMON_ROUNDS = 6


def on_daemons(seed: int) -> Result:
    """Compare little with much local work, in some rounds of daemons and of simulated nodes."""
    found = {}
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        for setting, partition in product(SETTINGS[2:5:2], PARTITIONS):
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
    one, five = (f"IID, {setting.name}" for setting in SETTINGS[2:5:2])
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


def _claims(
    rounds: dict[Any, float], speed: dict[Any, float], by_cohort: dict[tuple[float, str], float]
) -> list[Claim]:
    def figures(partition: str) -> str:
        return ", ".join(f"{each.name}: {_count(rounds[each, partition])}" for each in SETTINGS)

    def best(partition: str) -> float:
        return max(speed[each, partition] for each in SETTINGS)

    averaged = SETTINGS[1:]
    small = [by_cohort[0.0, each] for each in PARTITIONS]
    large = [by_cohort[1.0, each] for each in PARTITIONS]
    return [
        Claim(
            "IID: FedAvg needs fewer rounds than FedSGD in each row, ten times fewer in the best",
            all(speed[each, "IID"] > 1 for each in averaged) and best("IID") >= 10,
            figures("IID"),
        ),
        Claim(
            "non-IID: FedAvg with small batches needs fewer rounds too, but gains less than IID",
            all(speed[each, "non-IID"] > 1 for each in averaged if each.batch != ALL)
            and best("non-IID") < best("IID"),
            figures("non-IID"),
        ),
        Claim(
            "IID: more local work by small batches gains each time (E=1, 5, 20 at B=10)",
            rounds[SETTINGS[2], "IID"] > rounds[SETTINGS[4], "IID"] > rounds[SETTINGS[5], "IID"],
            figures("IID"),
        ),
        Claim(
            "all clients in a round need fewer rounds than one client, most of all non-IID",
            all(map(float.__gt__, small, large)) and small[1] / large[1] > small[0] / large[0],
            ", ".join(
                f"{partition}: {_count(one)} and {_count(every)}"
                for partition, one, every in zip(PARTITIONS, small, large, strict=True)
            ),
        ),
    ]


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
