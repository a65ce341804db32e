"""Each optimizer and schedule by its formula in numpy.

What equals torch's own optimizers over 20 steps stands in test_torch_training.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bbnode.components.autodiff import training_graphs
from bbnode.components.autodiff.optimizers import OPTIMIZERS, OptimizerSettings
from bbnode.components.autodiff.training import TrainingOptions
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.models.schedule import Schedule
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import check

RATE = 0.1
MLP = mlp_forward((3, 4, 2), seed=1)

State = dict[str, Any]
Step = Callable[[np.ndarray, np.ndarray, int, State], np.ndarray]


def momentum(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    g = g + 0.01 * p
    s["v"] = 0.9 * s.get("v", 0) + g
    return p - RATE * (g + 0.9 * s["v"])


def moments(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    mean, square = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - RATE * mean / (np.sqrt(square) + 1e-8)


def uncorrected(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    """Reddi et al., 2020, algorithm 2, FedAdam: tau is 0.01, and v begins with its square."""
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 1e-4) + 0.01 * g * g
    return p - RATE * s["m"] / (np.sqrt(s["v"]) + 1e-2)


def yogi(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    v = s.get("v", 1e-6)
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = v - 0.001 * g * g * np.sign(v - g * g)
    mean, square = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - RATE * mean / (np.sqrt(square) + 1e-3)


def adamw(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    return moments(p * (1 - RATE * 0.01), g, t, s)


def adagrad(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    s["v"] = s.get("v", 0) + g * g
    return p - RATE * g / (np.sqrt(s["v"]) + 1e-10)


def rmsprop(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g * g
    s["a"] = 0.99 * s.get("a", 0) + 0.01 * g
    s["m"] = 0.5 * s.get("m", 0) + g / (np.sqrt(s["v"] - s["a"] ** 2) + 1e-8)
    return p - RATE * s["m"]


def lion(p: np.ndarray, g: np.ndarray, t: int, s: State) -> np.ndarray:
    m = s.get("m", np.zeros_like(g))
    s["m"] = 0.99 * m + 0.01 * g
    return p * (1 - RATE * 0.1) - RATE * np.sign(0.9 * m + 0.1 * g)


STEPS: dict[str, tuple[dict[str, Any], Step]] = {
    "sgd": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, momentum),
    "adam": ({}, moments),
    "adam, uncorrected": (
        {"betas": (0.9, 0.99), "bias_correction": False, "initial_square": 1e-4, "eps": 1e-2},
        uncorrected,
    ),
    "adamw": ({}, adamw),
    "yogi": ({}, yogi),
    "adagrad": ({}, adagrad),
    "rmsprop": ({"momentum": 0.5, "centered": True}, rmsprop),
    "lion": ({"weight_decay": 0.1}, lion),
}


def test_every_optimizer_has_a_formula_here() -> None:
    assert {name.partition(",")[0] for name in STEPS} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", STEPS)
def test_steps_follow_the_formula(name: str) -> None:
    settings, formula = STEPS[name]
    config = OnnxModelConfig(
        model=MLP.SerializeToString(),
        optimizer=name.partition(",")[0],
        learning_rate=RATE,
        **settings,
    )
    model = onnx_model(config)
    expected, state = model.params(CTX).astype(np.float64), {}
    rng = np.random.default_rng(0)
    for t in range(1, 6):
        grads = rng.normal(size=model.size).astype(np.float32)
        model.step(CTX, grads)
        expected = formula(expected, grads.astype(np.float64), t, state)
    np.testing.assert_allclose(model.params(CTX), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_one_graph_makes_a_batch_and_its_step_as_two_do(name: str) -> None:
    optimizer = OptimizerSettings(
        name=name.partition(",")[0], clip_norm=0.1, clip_value=0.05, **STEPS[name][0]
    )
    graphs = training_graphs(MLP, "mse", options=TrainingOptions(optimizer=optimizer))
    for each in (graphs.step, graphs.train_step):
        check(each)
    settings = {**STEPS[name][0], "clip_norm": 0.1, "clip_value": 0.05}
    config = OnnxModelConfig(
        model=MLP.SerializeToString(), loss="mse", optimizer=name.partition(",")[0], **settings
    )
    one, two = onnx_model(config), onnx_model(config)
    rng = np.random.default_rng(1)
    stepper = one._stepper()
    for _ in range(3):
        x, t = rng.normal(size=(2, 5, 3)).astype(np.float32), rng.normal(size=(5, 2))
        stepper.train([x[0]], t.astype(np.float32))
        grads, _ = two.gradient(CTX, x[0], t)
        two.step(CTX, grads)
    assert one._joined(stepper).tobytes() == two.params(CTX).tobytes()


def test_clipping_is_of_the_whole_gradient() -> None:
    config = OnnxModelConfig(model=MLP.SerializeToString(), learning_rate=1.0, clip_norm=2.0)
    model = onnx_model(config)
    before = model.params(CTX)
    grads = np.random.default_rng(0).normal(size=model.size).astype(np.float32) * 9
    model.step(CTX, grads)
    moved = before - model.params(CTX)
    assert np.linalg.norm(moved) == pytest.approx(2, rel=1e-5)
    np.testing.assert_allclose(moved, grads * 2 / np.linalg.norm(grads), rtol=1e-3, atol=1e-6)
    small = np.full(model.size, 1e-3, np.float32)
    before = model.params(CTX)
    model.step(CTX, small)
    np.testing.assert_allclose(before - model.params(CTX), small, rtol=1e-3)


RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [1.0] * 6),
    "step": ({"decay_steps": 2, "decay_factor": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
    "exponential": ({"decay_steps": 2, "decay_factor": 0.25}, [0.5**n for n in range(6)]),
    "linear": ({"decay_steps": 4, "final_rate": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    "cosine": ({"decay_steps": 4}, [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(5)] + [0]),
    "warmup_linear": ({"warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 0.5, 0, 0]),
    "warmup_cosine": ({"warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 0.5, 0, 0]),
}


@pytest.mark.parametrize("name", RATES)
def test_a_schedule_gives_each_step_its_rate(name: str) -> None:
    numbers, rates = RATES[name]
    schedule = Schedule(name=name, rate=1.0, **numbers)
    schedule.check()
    assert [schedule.at(step) for step in range(6)] == pytest.approx(rates, abs=1e-12)


def test_the_schedule_counts_all_steps_of_the_model() -> None:
    config = OnnxModelConfig(
        model=MLP.SerializeToString(), learning_rate=1.0, schedule="linear", decay_steps=4
    )
    model = onnx_model(config)
    moves = []
    for _ in range(5):
        before = model.params(CTX)
        model.step(CTX, np.ones(model.size, np.float32))
        moves.append(float((before - model.params(CTX)).mean()))
        model.load_parameters(CTX, model.params(CTX))  # as each round does
    assert moves == pytest.approx([1, 0.75, 0.5, 0.25, 0], abs=1e-5)
