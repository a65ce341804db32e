"""Li et al., 2021: clients whose features are shifted keep their own normalisation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.programs import FedBN, FederatedTraining
from reproduce._data import digits, written
from reproduce._federation import Federation, Slots
from reproduce.experiment import Cell, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, ROUNDS, HIDDEN = 6, 15, 32
METHODS: dict[str, type[FederatedTraining]] = {"FedAvg": FederatedTraining, "FedBN": FedBN}


def network(seed: int) -> ModelProto:
    """Return 64 - 32 - 10 with BatchNormalization of the inputs and of the hidden layer."""
    rng = np.random.default_rng(seed)
    held = {"w": rng.normal(0, 0.15, (64, HIDDEN)), "head": rng.normal(0, 0.2, (HIDDEN, 10))}
    for name, size in (("bn0", 64), ("bn1", HIDDEN)):
        held |= {f"{name}.scale": np.ones(size), f"{name}.bias": np.zeros(size)}
        held |= {f"{name}.mean": np.zeros(size), f"{name}.var": np.ones(size)}
    parts = ("scale", "bias", "mean", "var")
    nodes = [
        helper.make_node("BatchNormalization", ["x", *(f"bn0.{p}" for p in parts)], ["n0"]),
        helper.make_node("MatMul", ["n0", "w"], ["h"]),
        helper.make_node("BatchNormalization", ["h", *(f"bn1.{p}" for p in parts)], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r"]),
        helper.make_node("MatMul", ["r", "head"], ["y"]),
    ]
    x, y = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in (("x", 64), ("y", 10))
    )
    tensors = [numpy_helper.from_array(t.astype(np.float32), name) for name, t in held.items()]
    graph = helper.make_graph(nodes, "network", x, y, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def shifted(folder: Path, seed: int) -> list[Slots]:
    """Write each client's digits, seen by a camera of its own: other contrast and brightness."""
    examples = digits(folder, seed)
    with np.load(examples.train) as held:
        x, y = held["x"], held["y"]
    rng = np.random.default_rng([seed, 1])
    clients: list[Slots] = []
    for at, rows in enumerate(np.array_split(rng.permutation(len(y)), CLIENTS)):
        contrast, brightness = rng.uniform(0.3, 3), rng.normal(0, 2, 64)
        seen = (x[rows] * contrast + brightness).astype(np.float32)
        path = str(written(folder, f"camera-{at}", seen, y[rows]))
        halves = ({"path": path, "split": split} for split in ("train", "test"))
        clients.append(dict(zip(("data", "held_out"), halves, strict=True)))
    return clients


def run(seed: int) -> Result:
    """Train by both."""
    curves: dict[str, list[float]] = {}
    common: dict[str, Any] = {
        "model": network(seed), "clients": CLIENTS, "epochs": 1, "batch": 16, "mode": "train",
        "learning_rate": 0.05, "evaluate": "clients",
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        clients = shifted(Path(folder), seed)
        for name, method in METHODS.items():
            rounds = Federation(method(**common), clients, seed=seed).rounds(ROUNDS)
            curves[name] = [float(each["accuracy"]) for each in rounds]
    rows: list[list[Cell]] = [[name, *curve[::5], curve[-1]] for name, curve in curves.items()]
    gain = curves["FedBN"][-1] - curves["FedAvg"][-1]
    claims = [
        within("FedBN is better by five points or more", 100 * gain, 5, 100),
        within("FedBN comes to 80 %", 100 * curves["FedBN"][-1], 80, 100),
    ]
    columns = ["", *(f"round {at + 1}" for at in range(0, ROUNDS, 5)), f"round {ROUNDS}"]
    title = "mean accuracy of clients on examples of their own"
    return Result([Table(title, columns, rows)], claims, partial(_draw, curves))


def _draw(curves: dict[str, list[float]], figure: Figure) -> None:
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(range(1, 1 + ROUNDS), curve, label=name)
    axes.set(xlabel="round", ylabel="mean accuracy of clients", ylim=(0, 1))
    axes.legend()


EXPERIMENT = Experiment(
    paper="Li et al., 2021, arXiv:2102.07623, section 5",
    says=f"{CLIENTS} clients whose digits have contrast and brightness of their own (the paper: "
    "five kinds of digits, Office and DomainNet), an MLP with BatchNormalization",
    page="docs/methods/fedbn.md",
    run=run,
    methods=["FedBN"],
)
