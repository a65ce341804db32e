"""Training with what is added to each gradient: a proximal term and a correction."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import ArrayDataSource, ArrayDataSourceConfig, HeldModel, Model, OnnxModel
from bbnode.components.contracts import ComponentError
from bbnode.components.errors import (
    InvalidComponentConfig,
    ParameterMismatch,
    TrainingFailed,
    UnsupportedByModel,
)
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.models.weights import named
from tests.components.fakes import CTX, onnx_model, ort

FORWARD = mlp_forward((4, 3), seed=1).SerializeToString()
SIZE = 15
RNG = np.random.default_rng(0)
ANCHOR, CORRECTION = RNG.normal(size=(2, SIZE)).astype(np.float32)
ASKED: dict[str, Any] = {"epochs": 3, "batch": 20, "proximal": 0.5}


@pytest.fixture
def source(tmp_path: Path) -> ArrayDataSource:
    x = RNG.normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=RNG.integers(0, 3, size=60))
    return ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "data.npz")))


def made(source: ArrayDataSource, **settings: Any) -> OnnxModel:
    return onnx_model(OnnxModelConfig(model=FORWARD, learning_rate=0.2, **settings), source)


def by_steps(
    model: OnnxModel, source: ArrayDataSource,
    anchor: np.ndarray = ANCHOR, correction: np.ndarray = CORRECTION,
) -> np.ndarray:  # fmt: skip
    """The same training, said by gradients and steps."""
    for _ in range(ASKED["epochs"]):
        for x, y in source.epoch_batches(ASKED["batch"]):
            grads, _ = model.gradient(CTX, x, y)
            w = model.params(CTX)
            pull = ASKED["proximal"] * (w.astype(np.float64) - anchor) + correction
            model.step(CTX, (grads + pull).astype(np.float32))
    return np.asarray(model.params(CTX))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adam"},
        {"momentum": 0.9, "clip_norm": 0.3},
        {"schedule": "linear", "decay_steps": 20},
    ],
    ids=str,
)
def test_it_is_training_with_gradients_that_are_moved(
    source: ArrayDataSource, settings: dict[str, Any]
) -> None:
    expected = by_steps(made(source, **settings), source)
    source.reset(CTX)
    model = made(source, **settings)
    told, work = model.train_adjusted(CTX, ANCHOR, CORRECTION, **ASKED)
    np.testing.assert_allclose(model.params(CTX), expected, rtol=0, atol=2e-6)
    assert (told["num_samples"], told["steps"], "work" in told) == (60, 9, False)
    rates = 9 * 0.2 if "schedule" not in settings else sum(0.2 * (1 - k / 20) for k in range(9))
    np.testing.assert_allclose(work, [9, rates, 1], rtol=1e-6)
    assert work.dtype == np.float32


def test_accumulated_gradients_are_moved_once(source: ArrayDataSource) -> None:
    model, plain = made(source, accumulate=3), made(source)
    _, work = model.train_adjusted(CTX, ANCHOR, CORRECTION, **{**ASKED, "epochs": 1})
    x, y = source.next_batch(CTX)
    w = plain.params(CTX)
    grads, _ = plain.gradient(CTX, x, y)
    plain.step(CTX, (grads + 0.5 * (w - ANCHOR) + CORRECTION).astype(np.float32))
    np.testing.assert_allclose(model.params(CTX), plain.params(CTX), rtol=0, atol=2e-6)
    assert work[0] == 1


def test_without_either_it_is_training_and_the_anchor_is_where_it_begins(
    source: ArrayDataSource,
) -> None:
    plain, without, proximal, given = (made(source) for _ in range(4))
    start = plain.params(CTX)
    plain.train(CTX, epochs=3, batch=20)
    for model, anchor, share in (
        (without, None, 0.0), (proximal, None, 0.5), (given, start, 0.5),
    ):  # fmt: skip
        source.reset(CTX)
        model.train_adjusted(CTX, anchor, None, epochs=3, batch=20, proximal=share)
    np.testing.assert_allclose(without.params(CTX), plain.params(CTX), rtol=0, atol=1e-7)
    assert proximal.params(CTX).tobytes() == given.params(CTX).tobytes()
    moved = [np.linalg.norm(each.params(CTX) - start) for each in (proximal, plain)]
    assert moved[0] < moved[1]


def test_a_node_that_makes_fewer_steps_says_how_much_it_did(source: ArrayDataSource) -> None:
    model, other = made(source, max_steps=4), made(source)
    told, work = model.train_adjusted(CTX, None, None, epochs=3, batch=20, proximal=0.0)
    assert (told["steps"], told["num_samples"]) == (4, 60)
    assert told["work"] == pytest.approx(4 / 9)
    np.testing.assert_allclose(work, [4, 0.8, 4 / 9], rtol=1e-6)
    source.reset(CTX)
    other.train(CTX, epochs=1, batch=20)
    (x, y), *_ = source.epoch_batches(20)
    other.step(CTX, other.gradient(CTX, x, y)[0])
    np.testing.assert_allclose(model.params(CTX), other.params(CTX), rtol=0, atol=1e-6)
    assert made(source, max_steps=9).train(CTX, epochs=3, batch=20).get("work") is None


@pytest.mark.parametrize("batches", [1, 5])
def test_a_node_that_has_no_time_left_ends_with_its_batch(
    source: ArrayDataSource, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """A clock that goes on by a second each time that it is read."""
    model = made(source, max_train_s=float(batches))
    seconds = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(seconds)))
    told, work = model.train_adjusted(CTX, None, None, epochs=3, batch=20, proximal=0.0)
    monkeypatch.undo()
    steps = told["steps"]
    assert 1 <= steps <= batches
    assert work[2] == pytest.approx(steps / 9)
    source.reset(CTX)
    other = made(source, max_steps=steps)
    other.train_adjusted(CTX, None, None, epochs=3, batch=20, proximal=0.0)
    assert model.params(CTX).tobytes() == other.params(CTX).tobytes()


@pytest.mark.parametrize(
    ("anchor", "correction", "proximal", "error", "said"),
    [
        (ANCHOR[1:], None, 0.5, ParameterMismatch, r"anchor have the shape \[14\]"),
        (np.full(SIZE, np.nan, np.float32), None, 0.5, ParameterMismatch, "hold NaN"),
        (None, CORRECTION[None], 0.5, ParameterMismatch, r"correction have the shape \[1, 15\]"),
        (None, CORRECTION.astype(np.float64), 0.0, ParameterMismatch, "correction are float64"),
        (None, None, -1.0, TrainingFailed, "proximal is -1.0"),
        (None, None, np.inf, TrainingFailed, "proximal is inf"),
        (None, np.full(SIZE, 3e38, np.float32), 0.0, TrainingFailed, "lower learning_rate"),
    ],
)
def test_wrong_vectors_are_refused_and_the_parameters_stay(
    source: ArrayDataSource, anchor: Any, correction: Any, proximal: float,
    error: type[ComponentError], said: str,
) -> None:  # fmt: skip
    model = made(source)
    before = model.params(CTX)
    with pytest.raises(error, match=said):
        model.train_adjusted(CTX, anchor, correction, epochs=9, batch=2, proximal=proximal)
    assert model.params(CTX) is before


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "adamw"}, {"optimizer": "lion"}, {"momentum": 0.9}], ids=str
)
def test_what_is_frozen_stays_and_the_rest_is_trained(
    source: ArrayDataSource, settings: dict[str, Any]
) -> None:
    """Also what a decay or an earlier momentum would move."""
    model = made(source, **settings)
    model.train(CTX, epochs=1, batch=20)
    before = model.params(CTX)
    asked = {"epochs": 1, "batch": 20, "proximal": 0.5}
    model.train_adjusted(CTX, None, None, **asked, frozen="layer0.weight")
    after = model.params(CTX)
    assert after[:12].tobytes() == before[:12].tobytes()
    assert (after[12:] != before[12:]).all()


@pytest.mark.parametrize(
    ("settings", "frozen", "said"),
    [
        ({}, "layer0.wait", "there is no parameter 'layer0.wait'"),
        ({}, "layer0.weight\nlayer0.bias", "nothing is left"),
        ({"clip_norm": 1.0}, "layer0.bias", "use clip_value"),
    ],
)
def test_wrong_names_of_what_is_frozen_are_refused(
    source: ArrayDataSource, settings: dict[str, Any], frozen: str, said: str
) -> None:
    with pytest.raises(TrainingFailed, match=said):
        made(source, **settings).train_adjusted(CTX, None, None, **ASKED, frozen=frozen)


def test_models_without_it_say_so(source: ArrayDataSource) -> None:
    config = OnnxModelConfig(model=FORWARD)
    with pytest.raises(UnsupportedByModel, match="has no train_adjusted"):
        Model.train_adjusted(
            HeldModel(config), CTX, None, None, epochs=1, batch=1, proximal=0.0, frozen=""
        )
    with pytest.raises(ComponentError, match="has no data to train on"):
        HeldModel(config).train_adjusted(CTX, None, None, epochs=1, batch=1, proximal=0.0)
    for wrong in ({"max_steps": -1}, {"max_train_s": -1.0}, {"max_train_s": float("inf")}):
        with pytest.raises(InvalidComponentConfig, match=r"max_\w+ is \S+; 0 or more"):
            OnnxModel(dataclasses.replace(config, **wrong))


def test_torch_trains_the_same(source: ArrayDataSource) -> None:
    pytest.importorskip("torch")
    from bbnode.components.models.torch_model import TorchModel, TorchModelConfig

    config = TorchModelConfig(
        module="tests.components.test_torch_model:Net", learning_rate=0.2, momentum=0.9,
        mode="as_written",
    )  # fmt: skip
    one, other = TorchModel(config), TorchModel(config)
    for model in (one, other):
        model.bind({"backend": ort(), "data_source": source})
    anchor, correction = RNG.normal(size=(2, one.size)).astype(np.float32)
    expected = by_steps(one, source, anchor, correction)
    source.reset(CTX)
    told, work = other.train_adjusted(CTX, anchor, correction, **ASKED)
    np.testing.assert_allclose(other.params(CTX), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(work, [9, 1.8, 1], rtol=1e-6)
    assert told["steps"] == 9
    before = other.params(CTX)
    frozen = ("first.weight", "norm.weight", "norm.bias", "last.weight")
    other.train_adjusted(CTX, None, None, **ASKED, frozen="\n".join(frozen))
    moved = [
        name
        for name, old in named(before, other.layout).items()
        if not np.array_equal(old, named(other.params(CTX), other.layout)[name])
    ]
    assert moved == ["first.bias", "last.bias"]
