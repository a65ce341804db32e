"""Robust aggregation against clients that lie: attacks, and the rules that withstand them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bbnode.components import (
    ArrayDataSource,
    Bulyan,
    Component,
    FedAvg,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    OnnxModel,
    OpContext,
    TrimmedMean,
    concrete,
    register_component,
)
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.dsl import ModelSlot
from bbnode.ir.values import Metadata
from bbnode.programs import FederatedTraining, FLTrustTraining
from bbnode.verify.reference import bulyan, geometric_median, krum_order
from reproduce._daemons import beside_simulator, draw_curves, rounds_on_daemons
from reproduce._data import Settings, digits, written
from reproduce._federation import MAX_SHARE, Federation
from reproduce._numpy import NUMPY_SEED, Perceptron, Rng, Vector, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
ROUNDS = 15
CLASSES = 10
LAYERS = (64, 32, CLASSES)
NET = Perceptron(LAYERS)
NUMPY_RUNS = 3
ROOT_EXAMPLES = 100  # that the server of FLTrust trusts, as in its paper
TRAINING: Mapping[str, Any] = {
    "model": LAYERS, "clients": CLIENTS, "deltas": True, "batch": 8, "max_steps": 3,
    "learning_rate": 0.7, "quorum": CLIENTS,
}  # fmt: skip

SIGN, NOISE, LABEL, LITTLE = "sign flip", "noise", "label flip", "a little is enough"
STRENGTH = {
    SIGN: 4.0,  # times the own move, backwards
    NOISE: 10.0,  # the deviation of each coordinate
    LITTLE: 1.5,  # deviations from the mean: z of Baruch et al., section 4
}

FEW, MANY = 2, 6  # attackers
# Two who say a little change nothing.
CELLS = (
    (0, ""), *((FEW, each) for each in (SIGN, NOISE, LABEL)),
    *((MANY, each) for each in (SIGN, NOISE, LABEL, LITTLE)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttackerConfig(OnnxModelConfig):
    """Settings of `Attacker`.

    Attributes:
        attack: a key of `STRENGTH`; empty for an honest one.
        draws: seed of the noise.
        accomplices: files with the examples of each attacker: they tell each other theirs.
    """

    attack: str = ""
    draws: int = 0
    accomplices: tuple[str, ...] = ()


@register_component
class Attacker(OnnxModel):
    """A model whose training ends at weights that are a lie."""

    TYPE_NAME: ClassVar[str] = "reproduce.Attacker"
    Config: ClassVar[type] = AttackerConfig

    def __init__(self, config: AttackerConfig) -> None:
        super().__init__(config)
        self._attack, self._rng = config.attack, np.random.default_rng(config.draws)
        plain = OnnxModelConfig(
            **{each.name: getattr(config, each.name) for each in fields(OnnxModelConfig)}
        )
        self._workers = [(OnnxModel(plain), path) for path in config.accomplices]

    def bind(self, dependencies: Mapping[str, Component]) -> None:
        """Receive what it depends on; each of the accomplices' models has data of its own."""
        super().bind(dependencies)
        for model, path in self._workers:
            data = ArrayDataSource(ArrayDataSource.Config(path=path))
            model.bind({**dependencies, "data_source": data})

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Train as an honest client does, and then lie."""
        start = np.array(self.params(ctx))
        told = super().train(ctx, epochs=epochs, batch=batch)
        move = np.asarray(self.params(ctx)) - start
        if not self._attack:
            return told
        if self._attack == SIGN:
            move = -STRENGTH[SIGN] * move
        elif self._attack == NOISE:
            move = self._rng.normal(scale=STRENGTH[NOISE], size=move.shape)
        else:
            moves = []
            for model, _ in self._workers:
                model.load_parameters(ctx, start)
                model.train(ctx, epochs=epochs, batch=batch)
                moves.append(np.asarray(model.params(ctx)) - start)
            move = np.mean(moves, axis=0) - STRENGTH[LITTLE] * np.std(moves, axis=0)
        self.load_parameters(ctx, (start + move).astype(np.float32))
        return told


class Honest(FederatedTraining):
    """Rounds of FedAvg; the name makes these programs versions of one."""

    name = "Training"


class Trusting(FLTrustTraining):
    """Rounds of FLTrust."""

    name = "Training"


class Attacking(FederatedTraining):
    """The program of an attacker: honest but for the model that it trains, if its node says so."""

    name = "Training"

    @property
    def client_model(self) -> ModelSlot:
        """The slot of the model that lies."""
        return ModelSlot("local", concrete=concrete(Attacker, **vars(self._config)))


def rules(byzantine: int) -> dict[str, Any]:
    """Return the aggregators for so many attackers; None where they are too many for one."""
    return {
        "FedAvg": FedAvg,
        "Median": Median,
        "TrimmedMean": concrete(TrimmedMean, byzantine=byzantine),
        "Krum": concrete(Krum, byzantine=byzantine),
        "MultiKrum": concrete(MultiKrum, byzantine=byzantine),
        "Bulyan": concrete(Bulyan, byzantine=byzantine) if 4 * byzantine + 3 <= CLIENTS else None,
        "GeometricMedian": GeometricMedian,
        "NormClipping": NormClipping,
        "FLTrust": FLTrust,
    }


def combined(name: str, moves: Vector, counts: Vector, byzantine: int, own: Vector) -> Vector:
    """Return by numpy what a rule makes of moves [N, P]; `own` is the server's move, of FLTrust."""
    lengths = np.linalg.norm(moves, axis=1)
    if name == "Median":
        return np.asarray(np.median(moves, axis=0))
    if name == "TrimmedMean":
        return np.asarray(np.sort(moves, axis=0)[byzantine : len(moves) - byzantine].mean(axis=0))
    if name == "Krum":
        return np.asarray(moves[krum_order(moves, byzantine)[0]])
    if name == "MultiKrum":
        chosen = krum_order(moves, byzantine)[: len(moves) - byzantine - 2]
        return np.asarray(moves[chosen].mean(axis=0))
    if name == "Bulyan":
        return bulyan(moves, byzantine)
    if name == "GeometricMedian":
        return geometric_median(moves, counts)
    if name == "NormClipping":
        moves = moves * np.minimum(1, np.median(lengths) / lengths)[:, None]
    if name == "FLTrust":
        length = np.linalg.norm(own)
        counts = np.maximum(moves @ own / (lengths * length), 0)  # the trust in each
        moves = moves * (length / lengths)[:, None]
    return mean([*moves], [*counts])


class Trial:
    """The files of one seed, and runs with them."""

    def __init__(self, folder: Path, seed: int) -> None:
        examples = digits(folder, seed)
        stored = np.load(examples.train)
        x, y = stored["x"], stored["y"]
        order = np.random.default_rng(seed).permutation(len(y))
        root, rest = order[:ROOT_EXAMPLES], order[ROOT_EXAMPLES:]
        parts = np.array_split(rest, CLIENTS)
        self.seed, self.test = seed, examples.tested
        self.root = {"path": str(written(folder, "root", x[root], y[root]))}
        self.honest: list[Settings] = []
        self.flipped: list[Settings] = []
        for i, at in enumerate(parts):
            self.honest.append({"path": str(written(folder, f"c{i}", x[at], y[at]))})
            wrong = CLASSES - 1 - y[at]  # as Yin et al., section 7, have it
            self.flipped.append({"path": str(written(folder, f"f{i}", x[at], wrong))})
        self.attacking = Attacking(**TRAINING, seed=seed)

    def accuracy(self, aggregator: Any, attack: str = "", attackers: int = 0) -> float:
        """Train with a rule, and the first clients as attackers; return the last accuracy."""
        base = Trusting if aggregator is FLTrust else Honest
        clients: list[dict[str, Settings]] = [{"data": data} for data in self.honest]
        for i in range(attackers):
            if attack == LABEL:
                clients[i] = {"data": self.flipped[i]}
                continue
            told: Settings = {"attack": attack, "draws": self.seed * CLIENTS + i}
            if attack == LITTLE:
                told["accomplices"] = [each["path"] for each in self.honest[:attackers]]
            clients[i]["local"] = told
        server = {"test": self.test}
        if base is Trusting:
            server["data"] = self.root
        lying = range(0 if attack == LABEL else attackers)
        program = base(**TRAINING, aggregator=aggregator, seed=self.seed)
        others = dict.fromkeys(lying, self.attacking)
        federation = Federation(program, clients, server, seed=self.seed, others=others)
        *_, last = federation.rounds(ROUNDS)
        return float(last["accuracy"])

    def in_numpy(self, name: str, attack: str = "", attackers: int = 0) -> list[float]:
        """Return the last accuracies of runs in numpy, whose orders and noise are drawn anew."""
        liars = self.flipped[:attackers] if attack == LABEL else self.honest[:attackers]
        rows = [rows_of(each) for each in (*liars, *self.honest[attackers:])]
        root, test = rows_of(self.root), rows_of(self.test)
        counts = np.array([len(y) for _, y in rows], float)
        how = {"batch": TRAINING["batch"], "rate": TRAINING["learning_rate"]}
        steps, found = TRAINING["max_steps"], []
        for number in range(NUMPY_RUNS):
            rng = np.random.default_rng([self.seed, number, NUMPY_SEED])
            w = start_of(self.attacking.forward)
            for _ in range(ROUNDS):
                moves, own = (
                    np.stack(
                        [NET.trained(w, each, rng, epochs=1, most=steps, **how) for each in of]
                    )
                    - w
                    for of in (rows, [root])
                )
                moves[:attackers] = lies(attack, moves[:attackers], rng)
                w = w + combined(name, moves, counts, attackers or FEW, own[0])
            found.append(NET.accuracy(w, *test))
        return found


def lies(attack: str, moves: Vector, rng: Rng) -> Vector:
    """Return what attackers say in the place of their own moves."""
    if attack == SIGN:
        return -STRENGTH[SIGN] * moves
    if attack == NOISE:
        return rng.normal(scale=STRENGTH[NOISE], size=moves.shape)
    if attack == LITTLE:
        # All of them say the same.
        return np.asarray(moves.mean(axis=0) - STRENGTH[LITTLE] * moves.std(axis=0))
    return moves


DAEMONS = 10
LYING = 3
DAEMON_ROUNDS = 6


def on_daemons(seed: int) -> Result:
    """Flip the signs of three of ten daemons' moves, against a mean and two rules."""
    given = {**TRAINING, "clients": DAEMONS, "quorum": DAEMONS}
    found = {}
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        ways: list[tuple[str, int, type[Component], Settings]] = [
            ("FedAvg, no attacker", 0, FedAvg, MAX_SHARE),
            ("FedAvg", LYING, FedAvg, MAX_SHARE),
            ("Median", LYING, Median, {}),
            ("MultiKrum", LYING, MultiKrum, {"byzantine": LYING}),
        ]
        for name, lying, rule, settings in ways:
            clients: list[dict[str, Settings]] = []
            for number, share in enumerate(examples.shares(DAEMONS, "iid", seed=seed)):
                lies: Settings = {"attack": SIGN} if number < lying else {}
                clients.append({"data": share, "local": lies})
            server = {"test": examples.tested, "aggregator": settings}
            arguments = {**given, "aggregator": rule.TYPE_NAME}
            both = (
                rounds_on_daemons(
                    "reproduce.byzantine:Attacking", arguments, clients, server, DAEMON_ROUNDS
                ),
                Federation(Attacking(**arguments), clients, server, seed=seed).rounds(
                    DAEMON_ROUNDS
                ),
            )
            real, simulated = ([float(each["accuracy"]) for each in way] for way in both)
            found[name] = real, simulated
    table, same = beside_simulator(found)
    last = {name: real[-1] for name, (real, _) in found.items()}
    held = Claim(
        f"sign flip by {LYING} of {DAEMONS}: the mean loses more than every robust rule",
        last["FedAvg"] < min(last["Median"], last["MultiKrum"]),
        ", ".join(f"{name} {value:.3f}" for name, value in last.items()),
    )
    return Result([table], [held, same], lambda figure: draw_curves(figure, found))


Found = dict[tuple[int, str], dict[str, float | None]]


def run(seed: int) -> Result:
    """Run every rule against every attack, with a tenth and with three tenths of attackers."""
    found: Found = {}
    runs: dict[tuple[int, str], dict[str, list[float]]] = {}
    with TemporaryDirectory() as folder:
        trial = Trial(Path(folder), seed)
        for attackers, attack in CELLS:
            which = {
                name: rule for name, rule in rules(attackers or FEW).items() if rule is not None
            }
            cells: dict[str, float | None] = dict.fromkeys(rules(FEW))
            for name, rule in which.items():
                cells[name] = trial.accuracy(rule, attack, attackers)
            found[attackers, attack or "none"] = cells
            runs[attackers, attack or "none"] = {
                name: trial.in_numpy(name, attack, attackers) for name in which
            }
    rows: list[list[Cell]] = [
        [f"{attackers} of {CLIENTS}", attack, *cells.values()]
        for (attackers, attack), cells in found.items()
    ]
    columns = ["attackers", "attack", *found[0, "none"]]
    tables = [Table(f"accuracy after {ROUNDS} rounds", columns, rows), beside_yin(found)]
    claims = []
    for name in rules(FEW):
        pairs = [
            (value, runs[key][name])
            for key, cells in found.items()
            if (value := cells[name]) is not None
        ]
        text = f"{name}: the accuracy is that of plain numpy, in the mean of {len(pairs)} cases"
        claims.append(beside(text, pairs))
    return Result(tables, claims, lambda figure: draw(figure, found))


def lost(found: Found, key: tuple[int, str], rule: str) -> float:
    """Return the points of accuracy that an attack costs a rule."""
    clean, attacked = found[0, "none"][rule], found[key][rule]
    assert clean is not None
    assert attacked is not None
    return 100 * (clean - attacked)


def beside_yin(found: Found) -> Table:
    """Return what flipped labels cost, beside the paper's figures."""
    names = ("FedAvg", "Median", "TrimmedMean")
    ours: list[list[Cell]] = [
        [f"ours, {n} of {CLIENTS}", *(lost(found, (n, LABEL), name) for name in names)]
        for n in (FEW, MANY)
    ]
    theirs: list[list[Cell]] = [
        ["Yin et al., table 2: linear, 2 of 40", 88.0 - 76.8, 88.0 - 87.2, 88.0 - 86.9],
        ["Yin et al., table 3: CNN, 1 of 10", 94.3 - 77.3, 94.3 - 87.4, 94.3 - 90.7],
    ]
    return Table("points of accuracy that flipped labels cost", ["", *names], [*ours, *theirs])


def draw(figure: Figure, found: Found) -> None:
    """Draw accuracies as two maps, attacks by rules."""
    panels = figure.subplots(2, 1, sharex=True)
    names = list(found[0, "none"])
    for axes, attackers in zip(panels, (FEW, MANY), strict=True):
        keys = [(0, "none"), *(key for key in found if key[0] == attackers)]
        cells = np.array([[found[key][name] for name in names] for key in keys], float)
        axes.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                told = "-" if np.isnan(value) else f"{100 * value:.0f}"
                axes.text(column, row, told, ha="center", va="center", fontsize=8)
        axes.set_yticks(range(len(keys)), [attack for _, attack in keys], fontsize=8)
        axes.set_xticks(range(len(names)), names, fontsize=6)
        axes.set_title(f"{attackers} attackers of {CLIENTS}: accuracy, %", fontsize=9)
        axes.grid(visible=False)


EXPERIMENT = Experiment(
    paper=(
        "Blanchard et al., 2017, arXiv:1703.02757; Yin et al., 2018, arXiv:1803.01498, tables 2 "
        "and 3; El Mhamdi et al., 2018, arXiv:1802.07927; Pillutla et al., 2019, arXiv:1912.13445; "
        "Baruch et al., 2019, arXiv:1902.06156; Cao et al., 2021, arXiv:2012.13995"
    ),
    says=(
        "20 clients with equal shares of scikit-learn's digits (the papers: MNIST and CIFAR-10, 10 "
        "to 100 clients), of which 2 or 6 attack in four ways, against nine aggregators"
    ),
    page="docs/methods/robust.md",
    run=run,
    methods=[
        "Median",
        "TrimmedMean",
        "Krum",
        "MultiKrum",
        "Bulyan",
        "GeometricMedian",
        "NormClipping",
        "FLTrust",
        "RunningMean",
    ],
    on_daemons=on_daemons,
)
