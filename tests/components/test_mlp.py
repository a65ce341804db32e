from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bbnode.components.models.mlp import mlp_forward
from bbnode.ir.errors import AuthorError
from tests.components.graphs import run_ort


def test_the_graph_computes_an_mlp() -> None:
    model = mlp_forward((5, 7, 3), "Relu", seed=4)
    onnx.checker.check_model(model, full_check=True)
    w0, b0, w1, b1 = (numpy_helper.to_array(t) for t in model.graph.initializer)
    assert [w0.shape, b0.shape, w1.shape, b1.shape] == [(5, 7), (7,), (7, 3), (3,)]
    assert {a.dtype for a in (w0, b0, w1, b1)} == {np.dtype(np.float32)}
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    got = run_ort(model, {"x": x})["logits"]
    np.testing.assert_allclose(got, np.maximum(x @ w0 + b0, 0) @ w1 + b1, rtol=1e-5, atol=1e-6)


def test_same_arguments_same_bytes_other_seed_other_weights() -> None:
    assert mlp_forward(seed=1).SerializeToString() == mlp_forward(seed=1).SerializeToString()
    assert mlp_forward(seed=1).SerializeToString() != mlp_forward(seed=2).SerializeToString()


@pytest.mark.parametrize(("activation", "hidden"), [("Relu", 2 / 400), ("Tanh", 2 / 700)])
def test_variances_are_those_of_he_and_glorot(activation: str, hidden: float) -> None:
    model = mlp_forward((400, 300, 100), activation)
    w0, w1 = (numpy_helper.to_array(t) for t in list(model.graph.initializer)[::2])
    assert w0.var() == pytest.approx(hidden, rel=0.02)
    assert w1.var() == pytest.approx(2 / 400, rel=0.02)


@pytest.mark.parametrize("sizes", [(), (4,), (4, 0, 2)])
def test_sizes_that_make_no_mlp_are_refused(sizes) -> None:
    with pytest.raises(AuthorError, match="do not make an MLP"):
        mlp_forward(sizes)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(AuthorError, match=r"'Softmaxx'.*Relu"):
        mlp_forward((2, 2), "Softmaxx")
