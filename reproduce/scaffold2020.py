"""Karimireddy et al., 2020: the drift of clients slows FedAvg down, and not SCAFFOLD."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.programs import FederatedSGD, FederatedTraining, Scaffold
from reproduce._data import Examples, digits, written
from reproduce._federation import Federation, Slots, rounds_to
from reproduce._numpy import NUMPY_SEED, Perceptron, Vector, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"FedAvg": FederatedTraining, "SCAFFOLD": Scaffold}

# Quadratics: f1 = 1.5/2 (w - G)^2 and f2 = 0.5/2 (w + 3 G)^2, whose mean is least at w = 0, where
# their gradients are G apart from it: -1.5 G and 1.5 G.
CURVATURES, LEAST = (1.5, 0.5), (1.0, -3.0)
DIFFERENCES = (1.0, 10.0, 100.0)  # G
STEPS = (1, 2, 10)  # K
RATE, ROUNDS = 0.1, 60
SMALLEST = 1e-7  # that the figure shows

# Digits by similarity: that percentage of each client's examples is dealt, the others by label.
SIMILARITIES = (0, 100)
EPOCHS = (1, 5, 20)
EACH_HAS = 72  # examples
CLIENTS, COHORT, BATCHES = 20, 4, 5  # a fifth of the clients in each round, as in the paper
BATCH = -(-EACH_HAS // BATCHES)
TARGET = 0.85
RATES = (0.5, 0.1)  # each row has the best; the faster one first, so that the other stops early
MOST_ROUNDS = 100
LAYERS = (64, 10)
NET = Perceptron(LAYERS)
NUMPY_RUNS = 5
BESIDE = EPOCHS[:2]  # what has more local steps costs numpy as many
# The paper's table 3 (EMNIST, logistic regression, rounds to 0.5): by epochs, then by similarity.
PAPER: dict[tuple[str, int], tuple[int | str, int]] = {
    ("SGD", 1): (317, 416),
    ("FedAvg", 1): (258, 83),
    ("FedAvg", 5): (428, 10),
    ("FedAvg", 20): ("> 1000", 4),
    ("SCAFFOLD", 1): (77, 60),
    ("SCAFFOLD", 5): (152, 10),
    ("SCAFFOLD", 20): (266, 4),
}


def one_weight() -> ModelProto:
    """Return the model y = x w."""
    shape: list[str | int | None] = ["batch", 1]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one_weight",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones((1, 1), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@cache
def quadratic(method: str, steps: int) -> FederatedTraining:
    """Return the program of a method that makes so many local steps."""
    return METHODS[method](
        model=one_weight(), loss="mse", clients=2, epochs=steps, batch=1, evaluate="none",
        learning_rate=RATE,
    )  # fmt: skip


def distance(folder: Path, method: str, difference: float, steps: int) -> list[float]:
    """Return |w| after each round: how far it is from the minimum."""
    clients: list[Slots] = []
    for at, (curvature, least) in enumerate(zip(CURVATURES, LEAST, strict=True)):
        # The squared error of one example (x, y): x = sqrt(curvature / 2), y = x times the minimum.
        x = np.full((1, 1), math.sqrt(curvature / 2), np.float32)
        path = written(folder, f"{difference}-{at}", x, x * np.float32(least * difference))
        clients.append({"data": {"path": str(path)}})
    federation = Federation(quadratic(method, steps), clients)
    return [abs(float(each["model"][0])) for each in federation.rounds(ROUNDS)]


def by_similarity(folder: Path, examples: Examples, similarity: int, seed: int) -> list[Slots]:
    """Deal the part `similarity` of examples, and give out the others sorted by label."""
    with np.load(examples.train) as held:
        x, y = held["x"], held["y"]
    order = np.random.default_rng([seed, similarity]).permutation(len(y))
    dealt, rest = np.split(order, [len(y) * similarity // 100])
    by_label = rest[np.argsort(y[rest], kind="stable")]
    shares = zip(np.array_split(dealt, CLIENTS), np.array_split(by_label, CLIENTS), strict=True)
    found: list[Slots] = []
    for at, parts in enumerate(shares):
        rows = np.concatenate(parts)
        path = written(folder, f"{similarity}-{at}", x[rows], y[rows])
        found.append({"data": {"path": str(path)}})
    return found


@cache
def softmax(method: str, epochs: int) -> FederatedTraining | FederatedSGD:
    """Return the program of a method that makes so many local epochs."""
    common: dict[str, Any] = {"model": LAYERS, "clients": COHORT}
    if method == "SGD":
        return FederatedSGD(**common, batch=2 * EACH_HAS)
    more: dict[str, Any] = {"population": CLIENTS} if method == "SCAFFOLD" else {}
    return METHODS[method](**common, **more, batch=BATCH, epochs=epochs)


def rounds_of(accuracies: Callable[[float], Iterator[float]]) -> tuple[float, float]:
    """Return the rounds to the target at the best of `RATES`, and that rate."""
    best, at = math.inf, math.nan
    for rate in RATES:
        curve: list[float] = []
        # A rate that has come no nearer after as many rounds as the best one is not better.
        for accuracy in itertools.islice(accuracies(rate), math.ceil(min(best, MOST_ROUNDS))):
            curve.append(accuracy)
            if accuracy >= TARGET:
                break
        found = rounds_to(curve, TARGET)
        if found < best:
            best, at = found, rate
    return best, at


def by_nodes(
    method: str, epochs: int, clients: list[Slots], examples: Examples, seed: int, rate: float
) -> Iterator[float]:
    """Yield the accuracy on the test after each round."""
    told = {"learning_rate": rate}
    federation = Federation(
        softmax(method, epochs),
        [{**each, "local": told} for each in clients],
        # Of SGD the server makes the steps; SCAFFOLD's has a rate of its own, 1 as in the paper.
        {"test": examples.tested, **({"global": told} if method == "SGD" else {})},
        seed=seed,
    )
    for outputs in federation.rounds(MOST_ROUNDS):
        yield float(outputs["test_accuracy" if method == "SGD" else "accuracy"])


def in_numpy(
    method: str, epochs: int, rows: Sequence[Any], test: Any, draws: Sequence[int], rate: float
) -> Iterator[float]:
    """Yield the same of a run in numpy, whose cohorts and orders are drawn anew."""
    rng, w = np.random.default_rng(draws), start_of(softmax("FedAvg", 1).forward)
    control, own = np.zeros_like(w), [np.zeros_like(w)] * CLIENTS
    batch = 2 * EACH_HAS if method == "SGD" else BATCH
    for _ in range(MOST_ROUNDS):
        moves: list[Vector] = []
        turns: list[Vector] = []
        asked = [int(at) for at in rng.permutation(CLIENTS)[:COHORT]]
        for at in asked:
            correction = control - own[at] if method == "SCAFFOLD" else 0.0
            y = NET.trained(
                w, rows[at], rng, epochs=epochs, batch=batch, rate=rate, correction=correction
            )
            moves.append(y - w)
            if method == "SCAFFOLD":
                steps = epochs * -(-len(rows[at][1]) // BATCH)
                turns.append((w - y) / (steps * rate) - control)
                own[at] = own[at] + turns[-1]
        counts = None if turns else [len(rows[at][1]) for at in asked]
        w = w + mean(moves, counts)
        if turns:
            control = control + COHORT / CLIENTS * mean(turns)
        yield NET.accuracy(w, *test)


def rounds_in_numpy(
    method: str, epochs: int, clients: list[Slots], examples: Examples, seed: int
) -> list[float]:
    """Return the rounds to the target of runs in numpy, each at its best rate."""
    rows, test = [rows_of(each["data"]) for each in clients], rows_of(examples.tested)
    return [
        rounds_of(partial(in_numpy, method, epochs, rows, test, [seed, number, NUMPY_SEED]))[0]
        for number in range(NUMPY_RUNS)
    ]


def run(seed: int) -> Result:
    """Measure both on quadratics, and rounds to a target on digits."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        curves = {
            (method, difference, steps): distance(folder, method, difference, steps)
            for method in METHODS
            for difference in DIFFERENCES
            for steps in STEPS
        }
        examples = digits(folder, seed)
        found: dict[tuple[str, int, int], tuple[float, float]] = {}
        runs: dict[tuple[str, int, int], list[float]] = {}
        for similarity in SIMILARITIES:
            clients = by_similarity(folder, examples, similarity, seed)
            for method, epochs in PAPER:
                given = method, epochs, clients, examples, seed
                found[method, epochs, similarity] = rounds_of(partial(by_nodes, *given))
                if epochs in BESIDE:
                    runs[method, epochs, similarity] = rounds_in_numpy(*given)
    rounds = {key: each for key, (each, _) in found.items()}
    return Result(
        [_table(curves), _digits(found)],
        [*_claims(curves), *_claims_of_digits(rounds, runs)],
        partial(_draw, curves, rounds),
    )


Curves = Mapping[tuple[str, float, int], list[float]]
Rounds = Mapping[tuple[str, int, int], float]


def _table(curves: Curves) -> Table:
    rows: list[list[Cell]] = []
    for steps in STEPS:
        row: list[Cell] = [steps]
        for method in METHODS:
            row += [curves[method, difference, steps][-1] for difference in DIFFERENCES]
        row.append(round(fixed_point(steps), 9))
        rows.append(row)
    columns = [
        "local steps",
        *(f"{method}, G = {difference:g}" for method in METHODS for difference in DIFFERENCES),
        "FedAvg / G, by formula",
    ]
    return Table(f"Quadratics: distance from the minimum after {ROUNDS} rounds", columns, rows)


def fixed_point(steps: int) -> float:
    """Return where FedAvg stays, over G: the mean of the minima, weighted by 1 - (1 - rate a)^K."""
    weights = [1 - (1 - RATE * a) ** steps for a in CURVATURES]
    return abs(sum(w * x for w, x in zip(weights, LEAST, strict=True)) / sum(weights))


def _digits(found: Mapping[tuple[str, int, int], tuple[float, float]]) -> Table:
    rows: list[list[Cell]] = []
    for (method, epochs), paper in PAPER.items():
        row: list[Cell] = [method, epochs]
        for similarity, theirs in zip(SIMILARITIES, paper, strict=True):
            rounds, rate = found[method, epochs, similarity]
            row += [_count(rounds), rate, theirs]
        rows.append(row)
    columns = ["", "epochs", *(
        f"{similarity} %{what}" for similarity in SIMILARITIES for what in ("", ": rate", ", paper")
    )]  # fmt: skip
    return Table(f"Digits: rounds to {TARGET:.0%}, by similarity of the clients", columns, rows)


def _claims(curves: Curves) -> list[Claim]:
    def last(method: str, difference: float, steps: int) -> float:
        return curves[method, difference, steps][-1]

    one, few, many = STEPS
    drift = [last("FedAvg", each, many) for each in DIFFERENCES]
    found = [last("SCAFFOLD", each, many) for each in DIFFERENCES]
    formula = [fixed_point(many) * each for each in DIFFERENCES]
    return [
        Claim(
            "FedAvg with several steps stays away from the minimum, further the more "
            "clients differ and the more steps they make",
            drift == sorted(drift)
            and all(last("FedAvg", each, many) > last("FedAvg", each, few) for each in DIFFERENCES),
            f"{many} steps: " + ", ".join(f"{each:.3g}" for each in drift),
        ),
        Claim(
            "that far away is where the mean of the local minima draws it, to one per cent",
            bool(np.allclose(drift, formula, rtol=0.01)),
            "by formula: " + ", ".join(f"{each:.3g}" for each in formula),
        ),
        Claim(
            "SCAFFOLD comes to the minimum however clients differ: a thousand times nearer",
            all(ours < 1e-3 * theirs for ours, theirs in zip(found, drift, strict=True)),
            f"{many} steps: " + ", ".join(f"{each:.3g}" for each in found),
        ),
        Claim(
            "SCAFFOLD gains by more local steps",
            all(
                last("SCAFFOLD", each, steps) < last("SCAFFOLD", each, one)
                for each in DIFFERENCES
                for steps in (few, many)
            ),
            "; ".join(
                f"{steps} steps: "
                + ", ".join(f"{last('SCAFFOLD', each, steps):.2g}" for each in DIFFERENCES)
                for steps in STEPS
            ),
        ),
    ]


def _claims_of_digits(
    rounds: Rounds, runs: Mapping[tuple[str, int, int], Sequence[float]]
) -> list[Claim]:
    made = []
    for method in ("SGD", *METHODS):
        keys = [key for key in runs if key[0] == method]
        text = (
            f"{method}: rounds to {TARGET:.0%} are those of plain numpy, in the mean of "
            f"similarities and up to {max(key[1] for key in keys)} epochs"
        )
        made.append(beside(text, [(rounds[key], runs[key]) for key in keys], ratio=True))
    return made


def _count(rounds: float) -> str:
    return f"{rounds:.1f}" if math.isfinite(rounds) else f"> {MOST_ROUNDS}"


def _draw(curves: Curves, rounds: Rounds, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    styles = dict(zip(STEPS, (":", "--", "-"), strict=True))
    for method, color in zip(METHODS, ("tab:orange", "tab:blue"), strict=True):
        for steps, style in styles.items():
            curve = [max(each, SMALLEST) for each in curves[method, DIFFERENCES[-1], steps]]
            label = f"{method}, {steps} step{'s' * (steps > 1)}"
            left.plot(range(1, 1 + len(curve)), curve, color=color, linestyle=style, label=label)
        for similarity, style in zip(SIMILARITIES, ("-", ":"), strict=True):
            found = [min(rounds[method, each, similarity], MOST_ROUNDS) for each in EPOCHS]
            label = f"{method}, {similarity} %"
            right.plot(EPOCHS, found, color=color, linestyle=style, marker="o", label=label)
    left.set(
        title=f"Quadratics, G = {DIFFERENCES[-1]:g}", xlabel="rounds", yscale="log",
        ylabel="distance from the minimum",
    )  # fmt: skip
    most = max(min(each, MOST_ROUNDS) for each in rounds.values())
    right.set(
        title="Digits, by similarity", xlabel="local epochs", ylim=(0, 1.1 * most), xticks=EPOCHS,
        ylabel=f"rounds to {TARGET:.0%}",
    )  # fmt: skip
    left.legend(fontsize="x-small", loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.16))
    right.legend(fontsize="x-small", loc="upper center", ncols=2)


EXPERIMENT = Experiment(
    paper="Karimireddy et al., 2020, arXiv:1910.06378, figure 3 and table 3",
    says=(
        "FedAvg and SCAFFOLD on two quadratics (others than the paper's), and rounds to 85 % of "
        "logistic regression on scikit-learn's digits by similarity (not EMNIST; 20 clients)"
    ),
    page="docs/methods/scaffold.md",
    run=run,
    methods=[
        "SCAFFOLD",
        "SCAFFOLD, a part of all",
    ],
)
