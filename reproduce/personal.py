"""Personal layers and personal models: lines that differ, and clients that know two digits each."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.programs import Ditto, FederatedTraining, FedPer, FedRep
from reproduce._data import Examples, Settings, digits, written
from reproduce._federation import Federation, Slots
from reproduce._numpy import NUMPY_SEED, Perceptron, Vector, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
ROUNDS = 12
EPOCHS, BATCH, RATE = 2, 10, 0.1
PARTITIONS = {"two shards each": "shards", "IID": "iid"}
HEAD = ("layer1.*",)
LAYERS = (64, 32, 10)
NET = Perceptron(LAYERS)
NUMPY_RUNS = 5
PROXIMAL = 0.1
COMMON: dict[str, Any] = {
    "model": LAYERS, "clients": CLIENTS, "epochs": EPOCHS, "batch": BATCH, "learning_rate": RATE,
    "evaluate": "clients",
}  # fmt: skip
# Methods, and the arguments that they need.
METHODS: dict[str, tuple[type[FederatedTraining], dict[str, Any]]] = {
    "FedAvg": (FederatedTraining, {}),
    "FedPer": (FedPer, {"local": HEAD}),
    "FedRep": (FedRep, {"local": HEAD}),
    "Ditto": (Ditto, {"proximal": PROXIMAL}),
}

# Lines: client i has y = SLOPE x + INTERCEPTS[i] at x = -1 and 1, so that the mean squared error is
# (w - SLOPE)^2 + (b - INTERCEPTS[i])^2, and a step goes 2 LINE_RATE of the way to both minima.
SLOPE, INTERCEPTS = 2.0, (-3.0, 1.0, 5.0)
LINE_RATE, LINE_STEPS, HEAD_STEPS, LINE_ROUNDS = 0.05, 3, 2, 5
RESTED = 60  # rounds after which all are at rest
LINE_PROXIMAL = 0.5
FLOAT32 = 3e-5  # that rounds in float32 are off by at most, as in `bbnode verify`
LINE_METHODS: dict[str, tuple[type[FederatedTraining], dict[str, Any]]] = {
    "FedAvg": (FederatedTraining, {}),
    "FedPer": (FedPer, {"local": ("b",)}),
    "FedRep": (FedRep, {"local": ("b",), "head_epochs": HEAD_STEPS}),
    "Ditto": (Ditto, {"proximal": LINE_PROXIMAL, "personal_epochs": LINE_STEPS}),
}


def line() -> ModelProto:
    """Return the model y = w x + b, which begins at nothing."""
    shape: list[str | int | None] = ["batch", 1]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["wx"]),
            helper.make_node("Add", ["wx", "b"], ["y"]),
        ],
        "line",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(np.zeros((1, 1), np.float32), "w"),
            numpy_helper.from_array(np.zeros(1, np.float32), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def lines_after(folder: Path, method: str, rounds: int) -> Vector:
    """Return each client's own slope and intercept after rounds, [3, 2]."""
    clients: list[Slots] = []
    for at, intercept in enumerate(INTERCEPTS):
        x = np.array([[-1.0], [1.0]], np.float32)
        path = written(folder, f"line-{at}", x, SLOPE * x + np.float32(intercept))
        clients.append({"data": {"path": str(path)}})
    program, given = LINE_METHODS[method]
    made = program(
        model=line(), loss="mse", clients=len(INTERCEPTS), epochs=LINE_STEPS, batch=2,
        learning_rate=LINE_RATE, evaluate="none", **given,
    )  # fmt: skip
    federation = Federation(made, clients)
    outputs = [*federation.rounds(rounds)]
    # The common parameters come back to a client with the next round; what stays is in its slot.
    shared = np.asarray(outputs[-1]["model"], np.float64)
    slot = "personal" if method == "Ditto" else "local"
    own = np.stack([each.component(slot).params(None) for each in federation.clients])
    if method == "FedAvg":
        return np.stack([shared] * len(INTERCEPTS))
    if method != "Ditto":
        own[:, 0] = shared[0]
    return own.astype(np.float64)


def line_by_formula(method: str, rounds: int) -> Vector:
    """Return the same by the methods' recursions: each step goes 2 LINE_RATE of the way."""
    least = np.array([[SLOPE, each] for each in INTERCEPTS])
    kept = 1 - 2 * LINE_RATE
    if method in ("FedPer", "FedRep"):
        of_heads = HEAD_STEPS if method == "FedRep" else LINE_STEPS
        return least * (1 - kept ** (rounds * np.array([LINE_STEPS, of_heads])))
    common, own = np.zeros(2), np.zeros_like(least)
    for _ in range(rounds):
        for _ in range(LINE_STEPS):
            pull = 2 * (own - least) + LINE_PROXIMAL * (own - common)
            own = own - LINE_RATE * pull
        common = least.mean(axis=0) + (common - least.mean(axis=0)) * kept**LINE_STEPS
    return own if method == "Ditto" else np.stack([common] * len(least))


def of_lines(folder: Path) -> list[Claim]:
    """Return the claims of clients whose lines have one slope and an intercept each."""
    made = []
    for method in LINE_METHODS:
        off = np.abs(
            lines_after(folder, method, LINE_ROUNDS) - line_by_formula(method, LINE_ROUNDS)
        )
        text = f"lines: after {LINE_ROUNDS} rounds of {method} each client is where its formula is"
        made.append(within(text, float(off.max()), 0, FLOAT32))
    common = np.array([SLOPE, np.mean(INTERCEPTS)])
    own = np.array([[SLOPE, each] for each in INTERCEPTS])
    rests = {
        "FedAvg": ("at the mean line", np.stack([common] * len(own))),
        "FedPer": ("each at its own line", own),
        "Ditto": (
            "between its own line and the mean one, as 2 to the proximal weight",
            (2 * own + LINE_PROXIMAL * common) / (2 + LINE_PROXIMAL),
        ),
    }
    for method, (where, point) in rests.items():
        off = np.abs(lines_after(folder, method, RESTED) - point)
        made.append(within(f"lines: {method} rests {where}", float(off.max()), 0, FLOAT32))
    return made


def clients_of(examples: Examples, partition: str, seed: int) -> list[dict[str, Settings]]:
    """Return each client's settings: examples that it trains on, and those that it does not."""
    found = []
    for share in examples.shares(CLIENTS, partition, seed=seed):
        halves = ({**share, "split": split, "split_seed": seed} for split in ("train", "test"))
        found.append(dict(zip(("data", "held_out"), halves, strict=True)))
    return found


def curve(examples: Examples, method: str, partition: str, seed: int) -> list[float]:
    """Return the mean accuracy of clients, on examples of their own that they do not train on."""
    program, given = METHODS[method]
    clients = clients_of(examples, partition, seed)
    federation = Federation(program(**COMMON, **given), clients, seed=seed)
    return [float(each["accuracy"]) for each in federation.rounds(ROUNDS)]


def last_in_numpy(examples: Examples, method: str, partition: str, seed: int) -> list[float]:
    """Return the accuracy after all rounds of runs in numpy, whose orders are drawn anew."""
    clients = clients_of(examples, partition, seed)
    rows = [rows_of(each["data"]) for each in clients]
    held = [rows_of(each["held_out"]) for each in clients]
    counts, tested = [len(y) for _, y in rows], [len(y) for _, y in held]
    start = start_of(FederatedTraining(**COMMON).forward)
    body = np.arange(len(start)) < LAYERS[0] * LAYERS[1] + LAYERS[1]
    how: dict[str, Any] = {"batch": BATCH, "rate": RATE}
    found = []
    for number in range(NUMPY_RUNS):
        rng, w = np.random.default_rng([seed, number, NUMPY_SEED]), start
        own = [start] * CLIENTS
        for _ in range(ROUNDS):
            trained = []
            for at, mine in enumerate(rows):
                y = w if method in ("FedAvg", "Ditto") else np.where(body, w, own[at])
                if method == "FedRep":
                    y = NET.trained(y, mine, rng, epochs=1, part=~body, **how)
                part = body if method == "FedRep" else 1.0
                trained.append(NET.trained(y, mine, rng, epochs=EPOCHS, part=part, **how))
                if method == "Ditto":
                    own[at] = NET.trained(
                        own[at], mine, rng, epochs=1, proximal=PROXIMAL, anchor=w, **how
                    )
            w = mean(trained, counts)
            if method == "FedAvg":
                own = [w] * CLIENTS
            elif method != "Ditto":
                own = [np.where(body, w, each) for each in trained]
        right = [NET.accuracy(v, *mine) for v, mine in zip(own, held, strict=True)]
        found.append(float(np.average(right, weights=tested)))
    return found


def of_digits(
    examples: Examples, last: dict[tuple[str, str], float], seed: int
) -> tuple[list[Claim], dict[tuple[str, str], float]]:
    """Return the claims that accuracies are those of numpy, and numpy's."""
    made, means = [], {}
    for method in METHODS:
        pairs = []
        for name, partition in PARTITIONS.items():
            drawn = last_in_numpy(examples, method, partition, seed)
            means[method, name] = float(np.mean(drawn))
            pairs.append((last[method, name], drawn))
        text = f"digits: {method}'s accuracy is that of plain numpy, in the mean of both kinds"
        made.append(beside(text, pairs))
    return made, means


def run(seed: int) -> Result:
    """Train by each method, where clients differ and where they are alike."""
    with TemporaryDirectory() as name_of:
        folder = Path(name_of)
        lines = of_lines(folder)
        examples = digits(folder, seed)
        curves = {
            (method, name): curve(examples, method, partition, seed)
            for name, partition in PARTITIONS.items()
            for method in METHODS
        }
        last = {key: found[-1] for key, found in curves.items()}
        claims, means = of_digits(examples, last, seed)
    rows: list[list[Cell]] = [
        [method, *(each[method, name] for name in PARTITIONS for each in (last, means))]
        for method in METHODS
    ]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(PARTITIONS), sharey=True)
        for axes, name in zip(panels, PARTITIONS, strict=True):
            for method in METHODS:
                axes.plot(range(1, 1 + ROUNDS), curves[method, name], label=method)
            axes.set(title=name, xlabel="round", ylim=(0, 1))
        panels[0].set_ylabel("mean accuracy on clients' own test")
        panels[1].legend()

    title = f"mean accuracy on clients' own test after {ROUNDS} rounds"
    columns = ["", *(f"{name}{what}" for name in PARTITIONS for what in ("", ", numpy"))]
    return Result([Table(title, columns, rows)], [*lines, *claims], draw)


EXPERIMENT = Experiment(
    paper=(
        "Arivazhagan et al., 2019, arXiv:1912.00818; Collins et al., 2021, arXiv:2102.07078; "
        "Li et al., 2021, arXiv:2012.04221"
    ),
    says=(
        "three clients whose lines have intercepts of their own; 20 clients with 72 of "
        "scikit-learn's digits each, an MLP 64-32-10, measured on examples of their own (the "
        "papers: CIFAR, FEMNIST and others, up to thousands of clients)"
    ),
    page="docs/methods/fedper.md",
    run=run,
    methods=[
        "FedPer",
        "FedRep",
        "Ditto",
    ],
)
