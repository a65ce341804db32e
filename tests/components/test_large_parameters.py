"""Large models, which are read in parts, and stepped in buffers: the same bits as small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from onnx.helper import make_node as node

from bbnode.components.contracts import WritingGraph
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.errors import BackendError, TrainingFailed
from bbnode.components.models import onnx_model as onnx_models
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from tests.components.fakes import CTX, ort
from tests.components.graphs import model_of

RNG = np.random.default_rng(3)
X = RNG.normal(size=(20, 5)).astype(np.float32)


def normalized() -> ModelProto:
    return model_of(
        [node("MatMul", ["x", "w"], ["h"]),
         node("BatchNormalization", ["h", "scale", "shift", "mean", "variance"], ["y"])],
        {"w": RNG.normal(size=(5, 3)), "scale": np.ones(3), "shift": np.zeros(3),
         "mean": np.zeros(3), "variance": np.ones(3)},
        inputs={"x": np.zeros((8, 5))}, dtype=np.float32, symbolic=True,
    )  # fmt: skip


MLP = mlp_forward((5, 7, 3), seed=1)
BATCH_NORM = normalized()
CASES: dict[str, tuple[ModelProto, dict[str, Any]]] = {
    "sgd": (MLP, {}),
    "momentum": (MLP, {"optimizer": "sgd", "momentum": 0.9, "nesterov": True}),
    "adam": (MLP, {"optimizer": "adam", "clip_norm": 0.5}),
    "rmsprop": (MLP, {"optimizer": "rmsprop", "momentum": 0.5, "centered": True}),
    "accumulated": (MLP, {"optimizer": "adam", "accumulate": 2}),
    "mixed": (MLP, {"optimizer": "adam", "precision": "mixed"}),
    "a tail of statistics": (BATCH_NORM, {"mode": "train", "optimizer": "adam"}),
    "statistics beside": (BATCH_NORM, {"mode": "train", "running_statistics": "local"}),
}


@pytest.fixture
def path(tmp_path) -> Path:
    np.savez(tmp_path / "d.npz", x=X, y=np.arange(20) % 3)
    return tmp_path / "d.npz"


def source_of(path: Path) -> ArrayDataSource:
    return ArrayDataSource(ArrayDataSourceConfig(path=str(path)))


def trained(model: ModelProto, path: Path, **settings: Any) -> list[bytes]:
    """Return the state after each of three rounds, and after a step with given gradients."""
    config = OnnxModelConfig(model=model.SerializeToString(), learning_rate=0.05, **settings)
    made = OnnxModel(config)
    made.bind({"backend": ort(), "data_source": source_of(path)})
    states = []
    for _ in range(3):
        before, saved = made.params(CTX), made.serialize()
        frozen = made.freeze()
        made.train(CTX, epochs=2, batch=8)
        assert frozen() == saved  # what others hold stays as it was
        after = made.params(CTX)
        assert not np.shares_memory(before, after)
        assert not after.flags.writeable
        states.append(made.serialize())
    made.step(CTX, np.full(made.size, 0.01, np.float32))
    return [*states, made.serialize()]


@pytest.mark.parametrize("name", CASES)
def test_steps_into_buffers_give_the_same_bits(name: str, path, monkeypatch) -> None:
    model, settings = CASES[name]
    plain = trained(model, path, **settings)
    monkeypatch.setattr(onnx_models, "_LARGE_PARAMS", 0)
    ran: list[int] = []
    run_into = OnnxModel._run_into

    def counted(self: OnnxModel, *given: Any) -> list[Any]:
        ran.append(len(given[2]))
        return run_into(self, *given)

    monkeypatch.setattr(OnnxModel, "_run_into", counted)
    assert trained(model, path, **settings) == plain
    assert len(ran) >= 3
    assert min(ran) > 0


def test_a_run_that_fails_in_buffers_leaves_the_model(path, monkeypatch) -> None:
    monkeypatch.setattr(onnx_models, "_LARGE_PARAMS", 0)
    model = OnnxModel(OnnxModelConfig(model=MLP.SerializeToString(), learning_rate=1e30))
    model.bind({"backend": ort(), "data_source": source_of(path)})
    before = model.params(CTX).copy()
    with pytest.raises(TrainingFailed, match="learning_rate"):
        model.train(CTX, epochs=3, batch=8)
    np.testing.assert_array_equal(model.params(CTX), before)


def test_places_that_do_not_fit_are_refused_and_those_that_do_are_the_outputs() -> None:
    graph = ort().prepare(MLP)
    assert isinstance(graph, WritingGraph)
    (plain,) = graph.run([X])
    place = np.empty((20, 3), np.float32)
    (written,) = graph.run_into([X], {0: place})
    assert written is place
    np.testing.assert_array_equal(place, plain)
    (beside,) = graph.run_into([X[:0]], {})
    assert np.shape(beside) == (0, 3)
    with pytest.raises(BackendError, match=r"inputs were x: float32\[20, 5\]"):
        graph.run_into([X], {0: np.empty((20, 4), np.float32)})
    with pytest.raises(BackendError, match="float64"):
        graph.run_into([X.astype(np.float64)], {0: place})
    with pytest.raises(BackendError, match="2 input"):
        graph.run_into([X, X], {0: place})
