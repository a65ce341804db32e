"""Gradients by the batch: what a part of a model hands to the part before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import HeldModel, OnnxModelConfig, OrtBackend, mlp_forward
from bbnode.components.contracts import ComponentError, Model
from bbnode.components.errors import ParameterMismatch, UnsupportedByModel

CTX: Any = None
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)
Y = np.array([0, 1, 2, 1, 0])
G = RNG.normal(size=(5, 3)).astype(np.float32)


def made(**settings: Any) -> HeldModel:
    model = mlp_forward((4, 6, 3)).SerializeToString()
    found = HeldModel(OnnxModelConfig(model=model, **settings))
    found.bind({"backend": OrtBackend(OrtBackend.Config())})
    return found


def numpy_pulled(model: HeldModel, grad: Any) -> tuple[Any, Any]:
    """Pull a gradient back through x @ a + b, ReLU, @ c + d, in float64."""
    parts = iter(np.split(np.asarray(model.params(CTX), np.float64), [24, 30, 48]))
    a, b, c, _ = next(parts).reshape(4, 6), next(parts), next(parts).reshape(6, 3), next(parts)
    hidden = np.maximum(X @ a + b, 0)
    by_hidden = (grad @ c.T) * (hidden > 0)
    found = [X.T @ by_hidden, by_hidden.sum(0), hidden.T @ grad, grad.sum(0)]
    return np.concatenate([each.reshape(-1) for each in found]), by_hidden @ a.T


def test_a_gradient_is_pulled_back_to_parameters_and_batch() -> None:
    model = made()
    by_parameters, by_batch = numpy_pulled(model, G.astype(np.float64))
    found = model.pull_back(CTX, X, G, to_input=1)
    np.testing.assert_allclose(found[0], by_parameters, atol=1e-6)
    np.testing.assert_allclose(found[1], by_batch, atol=1e-6)
    again, empty = model.pull_back(CTX, X, G, to_input=0)
    np.testing.assert_allclose(again, by_parameters, atol=1e-6)
    assert np.shape(empty) == (0,)


def test_the_loss_has_a_gradient_by_the_batch() -> None:
    model = made()
    grads, by_batch, loss = model.gradient_with_input(CTX, X, Y)
    alone, same = model.gradient(CTX, X, Y)
    np.testing.assert_allclose(grads, alone, atol=1e-7)
    np.testing.assert_allclose(loss, same, atol=1e-7)
    scores = np.asarray(model.forward(CTX, X), np.float64)
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    _, expected = numpy_pulled(model, (shares - np.eye(3)[Y]) / len(Y))
    np.testing.assert_allclose(by_batch, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "labels", "error"),
    [
        (np.where(X > 1, np.nan, X).astype(np.float32), Y, ParameterMismatch),
        (X[:, :3], Y, ComponentError),
        (X[:, None], Y, ComponentError),
        (X.astype(np.float64), Y, ComponentError),
        (X[:3], Y, ComponentError),
        (X[:0], Y[:0], ComponentError),
        (X, Y + 9, ComponentError),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Any, labels: Any, error: Any) -> None:
    with pytest.raises(error):
        made().gradient_with_input(CTX, batch, labels)


@pytest.mark.parametrize(
    "grad", [G[:3], G[:1], G[:, :2], G[:, :1], G.astype(np.float64), G * np.inf]
)
def test_a_gradient_that_does_not_fit_is_refused(grad: Any) -> None:
    with pytest.raises((ComponentError, ParameterMismatch), match="the gradient"):
        made().pull_back(CTX, X, grad, to_input=0)


def test_a_model_that_trains_in_another_form_is_refused() -> None:
    with pytest.raises(ComponentError, match="a form of its own"):
        made(precision="mixed").pull_back(CTX, X, G, to_input=0)
    for op, arguments in (("gradient_with_input", (X, Y)), ("pull_back", (X, G))):
        more = {} if op == "gradient_with_input" else {"to_input": 0}
        with pytest.raises(UnsupportedByModel, match=op):
            getattr(Model, op)(made(), CTX, *arguments, **more)
