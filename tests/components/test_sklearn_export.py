"""Estimators of scikit-learn as models: what they give is the reference."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.sklearn import EstimatorNotExportable, export
from tests.components.fakes import CTX, onnx_model, ort

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 4)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5, 0.0] + 3).astype(np.float32)
CLASSES = np.digitize(Y, [2.0, 4.0])

# A perceptron that has not converged says so; how well it is fitted is nothing to these tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*Maximum iterations")


@pytest.mark.parametrize(
    ("estimator", "labels"),
    [
        (LogisticRegression(), CLASSES),
        (LogisticRegression(), CLASSES > 0),
        (MLPClassifier((6, 5), activation="tanh", max_iter=20), CLASSES),
        (MLPClassifier((6,), max_iter=20), CLASSES > 0),
        (make_pipeline(StandardScaler(), MinMaxScaler(), LogisticRegression()), CLASSES),
    ],
)
def test_classifiers_are_trained_further(estimator, labels) -> None:
    estimator.fit(X, labels)
    model = export(estimator, X[:20], train=True)
    ours = onnx_model(OnnxModelConfig(model=model.SerializeToString(), learning_rate=0.1))
    weights = [*getattr(estimator, "coefs_", [])]
    if weights and len(estimator.classes_) > 2:
        assert ours.size == sum(w.size for w in (*weights, *estimator.intercepts_))
    logits = ours.forward(CTX, X)
    np.testing.assert_array_equal(logits.argmax(1), np.asarray(estimator.predict(X), np.int64))
    target = np.asarray(labels, np.int64)
    before = float(ours.compute_loss(CTX, X, target))
    for _ in range(5):
        ours.step(CTX, ours.gradient(CTX, X, target)[0])
    assert float(ours.compute_loss(CTX, X, target)) < before


@pytest.mark.parametrize(
    "estimator",
    [LinearRegression(), Ridge(),
     MLPRegressor(hidden_layer_sizes=(6,), activation="logistic", max_iter=20),
     make_pipeline(StandardScaler(), LinearRegression(fit_intercept=False))],
)  # fmt: skip
def test_regressors_are_trained_further(estimator) -> None:
    model = export(estimator.fit(X, Y), X, train=True)
    ours = onnx_model(OnnxModelConfig(model=model.SerializeToString(), loss="mse"))
    np.testing.assert_allclose(
        ours.forward(CTX, X)[:, 0], estimator.predict(X), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), RandomForestClassifier(3, random_state=0),
     make_pipeline(StandardScaler(), MLPClassifier((5,), max_iter=20))],
)  # fmt: skip
def test_any_estimator_runs(estimator) -> None:
    pytest.importorskip("skl2onnx")
    model = export(estimator.fit(X, CLASSES), X)
    labels, chances = ort().prepare(model).run([X])
    np.testing.assert_array_equal(labels, estimator.predict(X))
    np.testing.assert_allclose(chances, estimator.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize(
    ("estimator", "example", "message"),
    [
        (LogisticRegression(), X, "not fitted"),
        (RandomForestClassifier(3).fit(X, CLASSES), X, "RandomForestClassifier has no graph"),
        (make_pipeline(MinMaxScaler(clip=True), Ridge()).fit(X, Y), X, "MinMaxScaler in a"),
        (Ridge().fit(X, Y), X[0], "no table of numbers"),
        (Ridge().fit(X, Y), [["a"]], "no table of numbers"),
        (Ridge().fit(X, Y), X[:, :3], "does not run"),
        (object(), X, "object"),
    ],
)
def test_what_can_not_be_trained_is_told(estimator, example, message) -> None:
    with pytest.raises(EstimatorNotExportable, match=message):
        export(estimator, example, train=True)
