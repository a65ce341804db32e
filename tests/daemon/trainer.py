"""A program of one class that trains a model, and one whose node has several models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bbnode.compiler import Compiler
from bbnode.components import (
    ArrayDataSource,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    concrete,
    mlp_forward,
    register_component,
)
from bbnode.dsl import Graph, ModelSlot, Module, types
from bbnode.engine import Node, install
from bbnode.engine.steps import RunTask
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER

SIZES = (4, 5, 3)
X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
ME = PeerId.from_seed("trainer")


@register_component
class SilentModel(OnnxModel):
    """A model of a package that does not let its weights out."""

    TYPE_NAME = "tests.SilentModel"

    def export(self) -> Any:
        return super(OnnxModel, self).export()


class Train(Module):
    """Trains the model in each of `slots` when "tick" comes."""

    home = "trainer"

    def __init__(
        self,
        slots: Sequence[str] = ("net",),
        sizes: Sequence[int] = SIZES,
        learning_rate: float = 0.1,
        model: type[OnnxModel] = OnnxModel,
        seed: int = 0,
    ) -> None:
        self.slots, self.model = tuple(slots), model
        content = mlp_forward(tuple(sizes), seed=seed).SerializeToString(deterministic=True)
        self.config = OnnxModelConfig(model=content, learning_rate=learning_rate)

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        for name in self.slots:
            slot = ModelSlot(name, concrete=concrete(self.model, self.config))
            g.output(f"stats_{name}", slot.train(g, epochs=1, batch=4, after=tick))

    def bindings(self) -> dict[str, Any]:
        return {"data": ArrayDataSource, "compute": OrtBackend}


@cache
def trainer(
    slots: tuple[str, ...] = ("net",),
    sizes: tuple[int, ...] = SIZES,
    learning_rate: float = 0.1,
    model: type[OnnxModel] = OnnxModel,
) -> onnx.ModelProto:
    program = Train(slots, sizes, learning_rate, model)
    compiler = Compiler().bind_data_source("data", ArrayDataSource)
    return compiler.bind_backend("compute", OrtBackend).compile(program.build())


def node_of(model: onnx.ModelProto, folder: Path, **more: Any) -> Node:
    """A node with its examples in a folder."""
    labels = np.random.default_rng(1).integers(0, 3, size=len(X))
    np.savez(folder / "data.npz", x=X, y=labels)
    config = {"data": {"path": str(folder / "data.npz")}}
    return install(model, ["trainer"], peer_id=ME, config=config, **more)


def training(node: Node, now_ns: int = 0) -> RunTask:
    """The task of a training that has begun."""
    node.invoke("trainer", {"tick": TRIGGER})
    tasks = [step for step in node.poll(now_ns) if isinstance(step, RunTask)]
    return tasks[-1]


def train(node: Node, now_ns: int = 0) -> None:
    """Train once, to the end."""
    task = training(node, now_ns)
    node.complete(task.token, task.fn())
    for step in node.poll(now_ns + 1):
        if isinstance(step, RunTask):
            node.complete(step.token, step.fn())
    node.poll(now_ns + 2)
