"""Data files and models that the tests of ready programs train on."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.compiler import Compiler
from bbnode.dsl import Module
from bbnode.sim import SimNode

FEATURES = 4
CLASSES = 3
_RULE = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))


def compiled(program: Module) -> ModelProto:
    return Compiler().bind_all(program.bindings()).compile(program.build())


def stating_nothing(*nodes: SimNode) -> None:
    """Connect nodes as those of an earlier release, which do not say what they send and take."""
    for one, other in permutations(nodes, 2):
        one.node.peer_connected(other.peer_id, other.classes, (other.address,), None)


def examples(folder: Path, name: str, count: int, *, seed: int, numbers: bool = False) -> str:
    """Write examples of one rule, labelled by class or number, and return the path."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    scores = x @ _RULE
    y = scores[:, 0].astype(np.float32) if numbers else scores.argmax(axis=1)
    np.savez(folder / f"{name}.npz", x=x, y=y)
    return str(folder / f"{name}.npz")


def linear(
    *, batch: str | int | None = "batch", elem_type: int = TensorProto.FLOAT, inputs: int = 1,
    opset: int = 21,
) -> ModelProto:  # fmt: skip
    """Return x @ w, with as many further inputs added to it as asked for."""
    names = ["x", *(f"extra{n}" for n in range(inputs - 1))]
    weight = numpy_helper.from_array(np.zeros((FEATURES, CLASSES), np.float32), "w")
    nodes = [helper.make_node("Cast", ["x"], ["real"], to=TensorProto.FLOAT)]
    nodes.append(helper.make_node("MatMul", ["real", "w"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info(n, elem_type, [batch, FEATURES]) for n in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
