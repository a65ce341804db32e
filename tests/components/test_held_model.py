"""Models that are not trained: they need no data, and whoever trains is told that it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import UnboundDependency
from bbnode.components import ArrayDataSource, HeldModel, OnnxModel, OrtBackend, mlp_forward
from bbnode.components.registry import ConfigTypeMismatch
from bbnode.dsl import Graph, ModelSlot, Module, types
from bbnode.engine.errors import MissingDependency
from bbnode.ir import keys
from bbnode.ir.onnx_file import program_of
from bbnode.ir.seal import sealed
from bbnode.sim import Network

MODEL = {"model": mlp_forward((2, 2), seed=1).SerializeToString(), "loss": "mse"}
X = np.zeros((1, 2), np.float32)


class Written(Module):
    """A Module made of a function of the slot "a" and its input."""

    def __init__(self, body: Callable[[Graph, ModelSlot, Any], Any]) -> None:
        self._body = body

    def body(self, g: Graph) -> None:
        g.output("y", self._body(g, ModelSlot("a"), g.input("x", types.TENSOR_FLOAT)))


def forward(g: Graph, model: ModelSlot, x: Any) -> Any:
    return model.forward(g, x)


def evaluate(g: Graph, model: ModelSlot, x: Any) -> Any:
    return model.compute_loss(g, x, x)


def hand_on(g: Graph, model: ModelSlot, x: Any) -> Any:
    return model.params(g, after=model.apply_delta(g, model.params(g, after=x)))


def train(g: Graph, model: ModelSlot, x: Any) -> Any:
    return model.train(g, after=x)


def adjust(g: Graph, model: ModelSlot, x: Any) -> Any:
    return model.train_adjusted(g, after=x)[1]


COMPILER = Compiler().bind_model("a", OnnxModel).bind_backend("compute", OrtBackend)


@pytest.mark.parametrize("body", [forward, evaluate, hand_on])
def test_a_program_that_does_not_train_needs_no_data(body: Any) -> None:
    made = COMPILER.compile(Written(body).build())
    bound = [p.key.rpartition(".")[2] for p in made.metadata_props if "binding" in p.key]
    assert bound == ["a", "compute"]
    node = Network(0).add("n", made, ["@self"], config={"a": MODEL})
    execution = node.invoke("@self", {"x": X})
    node._network.run_until_idle()
    assert node.failures() == []
    assert "y" in node.outputs(execution)


@pytest.mark.parametrize(("body", "op"), [(train, "Train"), (adjust, "TrainAdjusted")])
def test_one_that_trains_does_and_the_error_names_the_op_and_the_model_without(
    body: Any, op: str
) -> None:
    with pytest.raises(UnboundDependency) as caught:
        COMPILER.compile(Written(body).build())
    assert (caught.value.for_op, caught.value.others) == (op, ("bbnode.HeldModel",))
    assert caught.value.source_line.startswith("test_held_model.py:")
    text = str(caught.value)
    assert f"depends on a DataSource at slot 'data' for {op}" in text
    assert "a model that is never trained here is 'bbnode.HeldModel'" in text


def test_data_that_are_bound_and_not_used_need_no_settings(tmp_path: Path) -> None:
    """The artifact stays as it was: its `data` can be given settings, and need not be."""
    made = COMPILER.bind_data_source("data", ArrayDataSource).compile(Written(forward).build())
    assert any(p.key.endswith(".data") for p in made.metadata_props)
    network = Network(0)
    node = network.add("n", made, ["@self"], config={"a": MODEL})
    execution = node.invoke("@self", {"x": X})
    network.run_until_idle()
    assert node.outputs(execution)["y"].shape == (1, 2)
    node.checkpoint()
    network.crash(node)
    network.restart(node)
    assert node.node.not_ready() == {}
    np.savez(tmp_path / "d.npz", x=X, y=X)
    data = {"path": str(tmp_path / "d.npz")}
    network.add("with", made, ["@self"], config={"a": MODEL, "data": data})
    with pytest.raises(ConfigTypeMismatch, match="no setting 'pth'"):
        network.add("wrong", made, ["@self"], config={"a": MODEL, "data": {"pth": "x"}})
    trains = COMPILER.bind_data_source("data", ArrayDataSource).compile(Written(train).build())
    with pytest.raises(ConfigTypeMismatch, match="needs 'path'"):
        network.add("lacks", trains, ["@self"], config={"a": MODEL})


def test_an_artifact_that_trains_and_lacks_its_data_is_refused() -> None:
    made = COMPILER.bind_data_source("data", ArrayDataSource).compile(Written(train).build())
    kept = [p for p in made.metadata_props if not p.key.endswith(".data")]
    del made.metadata_props[:]
    made.metadata_props.extend(p for p in kept if p.key != keys.SEAL_KEY)
    with pytest.raises(MissingDependency, match="slot 'data'"):
        Network(0).add("n", sealed(program_of(made)), ["@self"], config={"a": MODEL})


def test_a_held_model_binds_nothing_beside_its_backend() -> None:
    made = Compiler().bind_model("a", HeldModel).bind_backend("compute", OrtBackend)
    assert made.compile(Written(forward).build())
