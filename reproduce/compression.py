"""Codecs of updates: bytes on the wire against accuracy, with error feedback and without."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bbnode.components import (
    BFloat16Codec,
    Codec,
    Float16Codec,
    Int4Codec,
    Int8Codec,
    NF4Codec,
    PowerSGDCodec,
    ProductQuantizer,
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
from reproduce.experiment import Cell, Claim, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 10
ROUNDS = 30
LAYERS = (64, 64, 10)
FLOAT_BYTES = 4
# Bytes of a number in an answer; four bits come with a float32 for each 64 numbers.
BYTES = {
    "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 64, "nf4": 0.5 + 4 / 64, "sign": 0.125,
}  # fmt: skip
HEAD = 64  # bytes that say how numbers are stored
MEMORY = 0.8  # times the loss without it, at most

CODECS: dict[str, tuple[type[Codec], dict[str, float]]] = {
    "zstd": (ZstdCodec, {}),
    "fp16": (Float16Codec, {}),
    "bf16": (BFloat16Codec, {}),
    "int8": (Int8Codec, {}),
    "int4": (Int4Codec, {}),
    "nf4": (NF4Codec, {}),
    "product quantizer": (ProductQuantizer, {}),
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
        model=LAYERS, clients=CLIENTS, epochs=1, batch=16, learning_rate=0.3, seed=seed,
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


def run(seed: int) -> Result:
    """Train with every codec; claims are those of QSGD and of sparsification with memory."""
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        found = {
            (name, feedback): trained(codec, examples, seed) for name, feedback, codec in cases()
        }
    whole = found[WHOLE, None]
    rows: list[list[Cell]] = []
    for (name, feedback), one in found.items():
        told = "-" if feedback is None else "yes" if feedback else "no"
        less = whole.bytes_up / one.bytes_up
        rows.append([name, told, round(one.bytes_up), less, one.accuracy, one.loss])
    columns = ["codec", "error feedback", "bytes of an answer", "times less", "accuracy", "loss"]
    return Result(
        [Table(f"after {ROUNDS} rounds of {CLIENTS} clients", columns, rows)],
        claims(found),
        lambda figure: draw(figure, found),
    )


def claims(found: dict[tuple[str, bool | None], Outcome]) -> list[Claim]:
    """Return what the papers say, and what was found."""
    whole = found[WHOLE, None]
    made = []
    for name in ("int8", "int4"):
        one = found[name, True]
        made.append(
            within(
                f"{name} loses half a point of accuracy against float32, and a standard error of "
                "the test (QSGD, table 1: 4 and 8 bits lose less than half a point)",
                100 * (whole.accuracy - one.accuracy),
                -100,
                0.5 + 1.4,
                f"{one.accuracy:.4f} and {whole.accuracy:.4f}, "
                f"{whole.bytes_up / one.bytes_up:.1f} times fewer bytes",
            )
        )
    for name, source in (
        ("top 1 %", "Stich et al., section 2"),
        ("sign", "Karimireddy et al., 2019, arXiv:1901.09847"),
        ("PowerSGD, rank 1", "Vogels et al., 2019, arXiv:1905.13727"),
    ):
        kept, lost = found[name, True], found[name, False]
        made.append(
            within(
                f"{name} learns better with memory than without: a loss of {MEMORY:g} of that at "
                f"most ({source})",
                kept.loss / lost.loss,
                0,
                MEMORY,
                f"accuracy {kept.accuracy:.4f} with and {lost.accuracy:.4f} without; "
                f"loss {kept.loss:.3f} and {lost.loss:.3f}",
            )
        )
    top, drawn = found["top 1 %", True], found["random 1 %", True]
    made.append(
        within(
            "with memory, top-k learns faster than random-k: a loss of "
            f"{MEMORY:g} of that at most (Stich et al., figure 2)",
            top.loss / drawn.loss,
            0,
            MEMORY,
            f"loss {top.loss:.3f} and {drawn.loss:.3f}",
        )
    )
    count = sum((rows + 1) * columns for rows, columns in itertools.pairwise(LAYERS))
    beside = whole.bytes_up - FLOAT_BYTES * count
    for name, size in BYTES.items():
        feedback = next(each for codec, each in found if codec == name)
        made.append(
            within(
                f"an answer in {name} has {size:g} bytes a number; at most {HEAD} more than "
                "float32 has besides",
                found[name, feedback].bytes_up - beside - size * count,
                -1,
                HEAD,
            )
        )
    return made


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
    alike: dict[int, dict[str, float]] = {}
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
