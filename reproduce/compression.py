"""Codecs of updates: bytes on the wire against accuracy, with error feedback and without."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bbnode.components import (
    BFloat16Codec,
    Codec,
    Float16Codec,
    Int4Codec,
    Int8Codec,
    NF4Codec,
    PowerSGDCodec,
    RandomKCodec,
    SignCodec,
    TopKCodec,
    ZstdCodec,
    concrete,
)
from bbnode.dsl import ConcreteSpec
from bbnode.programs import FederatedTraining
from reproduce._data import Examples, digits
from reproduce._federation import Federation
from reproduce._numpy import NUMPY_SEED, Perceptron, Vector, mean, rows_of, start_of
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, beside, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 10
ROUNDS = 30
LAYERS = (64, 64, 10)
BATCH, RATE = 16, 0.3
NET = Perceptron(LAYERS)
NUMPY_RUNS = 6
NEAR, NEAR_RUNS = ("fp16", "bf16", "int8", "int4", "nf4"), 3  # codecs that change little
PARAMETERS = sum((rows + 1) * columns for rows, columns in itertools.pairwise(LAYERS))
FLOAT_BYTES = 4
LARGEST, DRAWN = 49, 481  # of the parameters: 1 % and 10 %, rounded up
INT8_BLOCK, INT4_BLOCK, SIGN_BLOCK = 2048, 64, 4096  # numbers that have a float32 of scale
# Bytes of a code besides its head. PowerSGD: a column and a row of each weight; biases as they are.
BODIES = {
    "fp16": 2 * PARAMETERS,
    "bf16": 2 * PARAMETERS,
    "int8": PARAMETERS + 4 * -(-PARAMETERS // INT8_BLOCK),
    "int4": -(-PARAMETERS // 2) + 4 * -(-PARAMETERS // INT4_BLOCK),
    "nf4": -(-PARAMETERS // 2) + 4 * -(-PARAMETERS // INT4_BLOCK),
    "sign": -(-PARAMETERS // 8) + 4 * -(-PARAMETERS // SIGN_BLOCK),
    "top 1 %": (2 + 4) * LARGEST,
    "random 1 %": 4 * LARGEST,
    "random 10 %": 4 * DRAWN,
    "PowerSGD, rank 1": 4 * sum(rows + 2 * columns for rows, columns in itertools.pairwise(LAYERS)),
}
HEAD = 48  # bytes that say how numbers are stored, at most
SAME = 1e-7  # of a loss in float32

CODECS: dict[str, tuple[type[Codec], dict[str, float]]] = {
    "zstd": (ZstdCodec, {}),
    "fp16": (Float16Codec, {}),
    "bf16": (BFloat16Codec, {}),
    "int8": (Int8Codec, {}),
    "int4": (Int4Codec, {}),
    "nf4": (NF4Codec, {}),
    "sign": (SignCodec, {}),
    "top 1 %": (TopKCodec, {"fraction": 0.01}),
    "random 1 %": (RandomKCodec, {"fraction": 0.01}),
    "random 10 %": (RandomKCodec, {"fraction": 0.1}),
    "PowerSGD, rank 1": (PowerSGDCodec, {"rank": 1}),
}
WHOLE = "float32"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: the bytes of a client's answer, and the server's model after all rounds."""

    bytes_up: float
    accuracy: float
    loss: float


def cases() -> Iterator[tuple[str, bool | None, ConcreteSpec | None]]:
    """Yield each run: a name, if it has error feedback (None: no such setting), and the codec."""
    yield WHOLE, None, None
    for name, (kind, settings) in CODECS.items():
        if "error_feedback" not in {field.name for field in dataclasses.fields(kind.Config)}:
            yield name, None, concrete(kind, **settings)
            continue
        for feedback in (True, False):
            yield name, feedback, concrete(kind, error_feedback=feedback, **settings)


def trained(codec: ConcreteSpec | None, examples: Examples, seed: int) -> Outcome:
    """Train with answers in a codec."""
    program = FederatedTraining(
        model=LAYERS, clients=CLIENTS, epochs=1, batch=BATCH, learning_rate=RATE, seed=seed,
        deltas=True, codec=codec,
    )  # fmt: skip
    shares = [{"data": share} for share in examples.shares(CLIENTS, "iid", seed=seed)]
    federation = Federation(program, shares, {"test": examples.tested}, seed=seed)
    trace, total = federation.network.trace, 0
    for _ in range(ROUNDS):
        before = len(trace)
        last = federation.round()
        fresh = len(trace) - before
        # "… client-3 send server 1234 9f…": each envelope, as long as it is on the wire.
        words = (line.split() for line in trace.lines()[-fresh:])
        total += sum(int(each[4]) for each in words if each[2:4] == ["send", "server"])
    sent = total / (ROUNDS * CLIENTS)
    return Outcome(sent, float(last["accuracy"]), float(last["loss"]))


# Returns what a code of a vector stands for, by the state of its stream.
Code: TypeAlias = Callable[[Vector, dict[Any, Any]], Vector]


def by_blocks(block: int, rounded: Callable[[Vector], Vector]) -> Code:
    """Return the code of numbers over the largest of their block, -1 to 1."""

    def code(v: Vector, _: dict[Any, Any]) -> Vector:
        rows = np.pad(v, (0, -len(v) % block)).reshape(-1, block)
        scales = np.abs(rows).max(axis=1, keepdims=True)
        parts = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
        return np.asarray((rounded(parts) * scales).ravel()[: len(v)])

    return code


def levels(most: int) -> Callable[[Vector], Vector]:
    """Return the code of whole steps, `most` to either side."""
    return lambda v: np.rint(v * most) / most


def near_quantile(v: Vector) -> Vector:
    """Return NF4: the nearest of 16 quantiles of a normal distribution."""
    from scipy.stats import norm

    last = 0.9677083  # the quantile that stands for the largest, Dettmers et al., 2023
    words = np.array([
        *-norm.ppf(np.linspace(last, 0.5, 8)[:-1]), 0.0,
        *norm.ppf(np.linspace(last, 0.5, 9)[:-1])[::-1],
    ]) / norm.ppf(last)  # fmt: skip
    return np.asarray(words[np.searchsorted((words[1:] + words[:-1]) / 2, v)])


def signs(v: Vector, _: dict[Any, Any]) -> Vector:
    """Return the mean size of each block with each sign; nothing counts as positive."""
    blocks = np.split(v, range(SIGN_BLOCK, len(v), SIGN_BLOCK))
    return np.concatenate([np.where(b >= 0, 1.0, -1.0) * np.abs(b).mean() for b in blocks])


def bfloat16(v: Vector) -> Vector:
    """Return the upper half of each float32, rounded to nearest, ties to even."""
    bits = v.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def largest(v: Vector, _: dict[Any, Any]) -> Vector:
    """Return the largest values, and nothing of the others."""
    at = np.argsort(-np.abs(v), kind="stable")[:LARGEST]
    made = np.zeros_like(v)
    made[at] = v[at]
    return made


def drawn(count: int) -> Code:
    """Return the code of drawn values, of which a stream without memory has n / count times.

    The draw is the codec's, the same at all clients: the lowest of raw bits by the tensor's number.
    """

    def code(v: Vector, stream: dict[Any, Any]) -> Vector:
        number = stream["number"] = stream.get("number", -1) + 1
        bits = np.random.PCG64(np.random.SeedSequence((0, number))).random_raw(len(v))
        at = np.argsort(bits)[:count]
        made = np.zeros_like(v)
        made[at] = v[at] * (1 if stream["feedback"] else len(v) / count)
        return made

    return code


def of_rank_one(v: Vector, stream: dict[Any, Any]) -> Vector:
    """Return PowerSGD: of each weight P Q^T, by one step from the last Q; biases as they are."""
    made, at = v.copy(), 0
    for rows, columns in itertools.pairwise(LAYERS):
        matrix = v[at : at + rows * columns].reshape(rows, columns)
        # All clients begin with one Q, as those of one seed do.
        first = np.random.default_rng([*stream["draws"], at]).normal(size=columns)
        left = matrix @ stream.get(at, first)
        left /= np.linalg.norm(left)
        stream[at] = matrix.T @ left
        made[at : at + rows * columns] = np.outer(left, stream[at]).ravel()
        at += (rows + 1) * columns
    return made


IN_NUMPY: dict[str, Code] = {
    WHOLE: lambda v, *_: v,
    "fp16": lambda v, *_: v.astype(np.float16).astype(np.float64),
    "bf16": lambda v, *_: bfloat16(v),
    "int8": by_blocks(INT8_BLOCK, levels(127)),
    "int4": by_blocks(INT4_BLOCK, levels(7)),
    "nf4": by_blocks(INT4_BLOCK, near_quantile),
    "sign": signs,
    "top 1 %": largest,
    "random 10 %": drawn(DRAWN),
    "PowerSGD, rank 1": of_rank_one,
}


def losses_in_numpy(name: str, feedback: bool | None, examples: Examples, seed: int) -> list[float]:
    """Return the last losses of runs in numpy, whose orders and codes are drawn anew."""
    rows = [rows_of(each) for each in examples.shares(CLIENTS, "iid", seed=seed)]
    counts, test, found = [len(y) for _, y in rows], rows_of(examples.tested), []
    program = FederatedTraining(model=LAYERS, clients=CLIENTS, seed=seed)
    for number in range(NEAR_RUNS if name in NEAR else NUMPY_RUNS):
        rng, w = np.random.default_rng([seed, number, NUMPY_SEED]), start_of(program.forward)
        common = {"feedback": feedback, "lost": 0.0, "draws": [seed, number]}
        streams: list[dict[Any, Any]] = [{**common} for _ in rows]
        for _ in range(ROUNDS):
            sent = []
            for mine, stream in zip(rows, streams, strict=True):
                move = NET.trained(w, mine, rng, epochs=1, batch=BATCH, rate=RATE) - w
                move += stream["lost"]
                sent.append(IN_NUMPY[name](move, stream))
                if feedback:
                    stream["lost"] = move - sent[-1]
            w = w + mean(sent, counts)
        found.append(NET.loss(w, *test))
    return found


Key: TypeAlias = tuple[str, bool | None]


def run(seed: int) -> Result:
    """Train with every codec, through nodes and in numpy."""
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        found = {
            (name, feedback): trained(codec, examples, seed) for name, feedback, codec in cases()
        }
        runs = {key: losses_in_numpy(*key, examples, seed) for key in found if key[0] in IN_NUMPY}
    whole = found[WHOLE, None]
    rows: list[list[Cell]] = []
    for (name, feedback), one in found.items():
        told = "-" if feedback is None else "yes" if feedback else "no"
        less = whole.bytes_up / one.bytes_up
        in_numpy = float(np.mean(runs[name, feedback])) if name in IN_NUMPY else None
        rows.append([name, told, round(one.bytes_up), less, one.accuracy, one.loss, in_numpy])
    columns = [
        "codec", "error feedback", "bytes of an answer", "times less", "accuracy", "loss", "numpy",
    ]  # fmt: skip
    off = abs(found["zstd", None].loss - whole.loss)
    lossless = within("zstd is lossless: the loss is float32's", off, 0, SAME)
    return Result(
        [Table(f"after {ROUNDS} rounds of {CLIENTS} clients", columns, rows)],
        [lossless, *of_losses(found, runs), *of_bytes(found)],
        lambda figure: draw(figure, found),
    )


def of_losses(found: dict[Key, Outcome], runs: dict[Key, list[float]]) -> list[Claim]:
    """Return the claims of losses; those of codecs are over float32's."""
    whole, in_numpy = found[WHOLE, None].loss, runs[WHOLE, None]
    made = [beside(f"{WHOLE}: the loss is that of plain numpy", [(whole, in_numpy)], ratio=True)]
    for name in dict.fromkeys(name for name, _ in runs if name != WHOLE):
        # All codecs have one draw of orders, here and there.
        pairs = [
            (found[key].loss / whole, [*np.divide(runs[key], in_numpy[: len(runs[key])])])
            for key in runs
            if key[0] == name
        ]
        text = f"{name}: the loss over float32's is that of plain numpy, in the mean of with and "
        made.append(beside(f"{text}without error feedback", pairs, ratio=True))
    return made


def of_bytes(found: dict[Key, Outcome]) -> list[Claim]:
    """Return the claims of an answer's bytes."""
    envelope = found[WHOLE, None].bytes_up - FLOAT_BYTES * PARAMETERS
    return [
        within(
            f"an answer in {name} {'with' if feedback else 'without'} error feedback is "
            f"{BODIES[name]} bytes, beside float32's envelope and a head of {HEAD} bytes at most",
            one.bytes_up - envelope - BODIES[name],
            0,
            HEAD,
        )
        for (name, feedback), one in found.items()
        if name in BODIES
    ]


def draw(figure: Figure, found: dict[tuple[str, bool | None], Outcome]) -> None:
    """Draw the loss over bytes, a point a run, and a name for all of the same bytes."""
    axes = figure.subplots()
    kinds = {None: ("s", "no setting"), True: ("o", "with error feedback"), False: ("x", "without")}
    for feedback, (marker, label) in kinds.items():
        points = [one for (_, each), one in found.items() if each is feedback]
        axes.scatter(
            [one.bytes_up for one in points], [one.loss for one in points], marker=marker,
            label=label, zorder=3,
        )  # fmt: skip
    alike: dict[float, dict[str, float]] = {}
    for (name, _), one in found.items():
        names = alike.setdefault(round(one.bytes_up, -2), {})
        names[name] = max(names.get(name, 0.0), one.loss)
    for number, at in enumerate(sorted(alike)):
        axes.annotate(
            ", ".join(alike[at]), (at, max(alike[at].values())), ha="center", fontsize=7,
            xytext=(0, 6 + 10 * (number % 2)), textcoords="offset points",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a client's answer on the wire")
    axes.set_ylabel(f"loss on the test after {ROUNDS} rounds")
    axes.legend(loc="upper right", fontsize=8)


EXPERIMENT = Experiment(
    paper=(
        "Alistarh et al., 2017, QSGD, arXiv:1610.02132, table 1; Stich et al., 2018, Sparsified "
        "SGD with Memory, arXiv:1809.07599, figure 2"
    ),
    says=(
        "FedAvg of 10 clients on scikit-learn's digits (the papers: ImageNet, and logistic "
        "regression on epsilon and RCV1), answers in each codec; int8 and int4 round to nearest, "
        "where QSGD draws"
    ),
    page="docs/methods/compression.md",
    run=run,
    methods=[
        "codec: float16",
        "codec: int8",
        "codec: int4",
        "codec: top-k",
        "codec: sign",
    ],
)
