"""Each loss by its formula in numpy, and its gradient against differences, in float64.

What equals torch's own functions to the last digits stands in test_torch_training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from onnx.helper import make_node as node

from bbnode.components.autodiff import LOSSES, training_graphs
from bbnode.components.autodiff.losses import LossSettings
from bbnode.components.autodiff.optimizers import OptimizerSettings
from bbnode.components.autodiff.training import TrainingOptions
from bbnode.components.models.onnx_model import OnnxModelConfig
from tests.components.graphs import model_of, numeric_gradient, run_ort, run_reference

RNG = np.random.default_rng(5)
Y = RNG.normal(size=(4, 3))
NAMES = np.array([2, 0, 1, 0])
SOME = np.array([2, -1, 1, 0])
VALUES = RNG.normal(size=(4, 3))
SHARES = RNG.dirichlet(np.ones(3), size=4)
WEIGHTS = np.array([0.5, 2.0, 1.0])

Formula = Callable[[np.ndarray], np.ndarray]


def log_softmax(y: np.ndarray) -> np.ndarray:
    return y - np.log(np.exp(y).sum(-1, keepdims=True))


def picked(log_p: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """The mean over the labels that are not -1, weighted by class."""
    rows = np.flatnonzero(SOME >= 0)
    weights = WEIGHTS[SOME[rows]]
    hard = -log_p[rows, SOME[rows]] * weights
    soft = -(log_p[rows] * WEIGHTS).mean(1)
    return ((1 - smoothing) * hard + smoothing * soft).sum() / weights.sum()


def size(v: np.ndarray) -> np.ndarray:
    return np.sqrt((v * v).sum(-1))


CASES: dict[str, tuple[str, dict[str, object], np.ndarray, Formula]] = {
    "softmax_cross_entropy": (
        "softmax_cross_entropy", {}, NAMES,
        lambda y: -log_softmax(y)[np.arange(4), NAMES].mean(),
    ),
    "all settings": (
        "softmax_cross_entropy",
        {"label_smoothing": 0.2, "class_weights": tuple(WEIGHTS), "ignore_index": -1},
        SOME, lambda y: picked(log_softmax(y), 0.2),
    ),
    "nll": (
        "nll", {"class_weights": tuple(WEIGHTS), "ignore_index": -1}, SOME, picked,
    ),
    "bce_with_logits": (
        "bce_with_logits", {"pos_weight": tuple(WEIGHTS)}, SHARES,
        lambda y: ((1 - SHARES) * np.log(1 + np.exp(y))
                   + WEIGHTS * SHARES * np.log(1 + np.exp(-y))).mean(),
    ),
    "mse": ("mse", {}, VALUES, lambda y: ((y - VALUES) ** 2).mean()),
    "mae": ("mae", {}, VALUES, lambda y: np.abs(y - VALUES).mean()),
    "huber": (
        "huber", {"huber_delta": 0.7}, VALUES,
        lambda y: np.where(np.abs(y - VALUES) <= 0.7, (y - VALUES) ** 2 / 2,
                           0.7 * (np.abs(y - VALUES) - 0.35)).mean(),
    ),
    "kl": ("kl", {}, SHARES, lambda y: (SHARES * (np.log(SHARES) - y)).sum() / 4),
    "cosine": (
        "cosine", {}, VALUES,
        lambda y: 1 - ((y * VALUES).sum(-1) / (size(y) * size(VALUES))).mean(),
    ),
}  # fmt: skip


def test_every_loss_has_a_case() -> None:
    assert {loss for loss, *_ in CASES.values()} == set(LOSSES)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_its_formula_and_has_its_gradient(case: str) -> None:
    loss, settings, labels, formula = CASES[case]
    model = model_of([node("Identity", ["w"], ["y"])], {"w": Y})
    options = TrainingOptions(loss=LossSettings(**settings))
    graphs = training_graphs(model, loss, ["w"], options)
    feeds = {"w": Y, "labels": labels}
    for run in (run_ort, run_reference):
        got = run(graphs.gradients, feeds)
        np.testing.assert_allclose(got["loss"], formula(Y), rtol=1e-12)
        expected = numeric_gradient(graphs.loss, feeds, "w", "loss", np.ones(()))
        np.testing.assert_allclose(got["grad/w"], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("settings", [LossSettings, OptimizerSettings])
def test_settings_of_a_model_have_the_defaults_of_what_they_set(settings: type) -> None:
    of_model = {each.name: each.default for each in fields(OnnxModelConfig)}
    of_model["name"] = of_model["optimizer"]
    assert {each.name: of_model[each.name] for each in fields(settings)} == {
        each.name: each.default for each in fields(settings)
    }
