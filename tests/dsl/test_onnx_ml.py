"""What scikit-learn's exporters write (`ai.onnx.ml`) runs on a node like any other model."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from bbnode.dsl import OnnxModule
from tests.dsl import onnx_models as models


def scaled_logistic_regression() -> tuple[ModelProto, np.ndarray]:
    """A scaler and a classifier, as skl2onnx writes them, and the classes scikit-learn says."""
    x, y = load_iris(return_X_y=True)
    scaler = StandardScaler().fit(x)
    classifier = LogisticRegression().fit(scaler.transform(x), y)
    nodes = [
        helper.make_node(
            "Scaler", ["X"], ["scaled"], domain="ai.onnx.ml",
            offset=scaler.mean_.tolist(), scale=(1 / scaler.scale_).tolist(),
        ),
        helper.make_node(
            "LinearClassifier", ["scaled"], ["label", "raw"], domain="ai.onnx.ml",
            coefficients=classifier.coef_.ravel().tolist(),
            intercepts=classifier.intercept_.tolist(),
            classlabels_ints=[0, 1, 2], multi_class=1, post_transform="SOFTMAX",
        ),
        helper.make_node("Normalizer", ["raw"], ["probabilities"], domain="ai.onnx.ml", norm="L1"),
    ]  # fmt: skip
    model = models.model_of(
        nodes,
        [models.port("X", [None, 4])],
        [
            models.port("label", [None], TensorProto.INT64),
            models.port("probabilities", [None, 3]),
        ],
        opset=21,
        ai_onnx_ml=3,
    )
    return model, classifier.predict(scaler.transform(x))


def decision_tree() -> ModelProto:
    """A small tree as skl2onnx writes it."""
    x, y = load_iris(return_X_y=True)
    tree = DecisionTreeRegressor(max_depth=3, random_state=0).fit(x, y).tree_
    ids = range(tree.node_count)
    leaf = [tree.children_left[i] < 0 for i in ids]
    node = helper.make_node(
        "TreeEnsembleRegressor", ["X"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=[0] * len(leaf), nodes_nodeids=list(ids),
        nodes_featureids=[max(0, int(f)) for f in tree.feature],
        nodes_values=tree.threshold.tolist(),
        nodes_modes=["LEAF" if is_leaf else "BRANCH_LEQ" for is_leaf in leaf],
        nodes_truenodeids=[max(0, int(i)) for i in tree.children_left],
        nodes_falsenodeids=[max(0, int(i)) for i in tree.children_right],
        target_treeids=[0] * sum(leaf), target_nodeids=[i for i in ids if leaf[i]],
        target_ids=[0] * sum(leaf),
        target_weights=[float(tree.value[i, 0, 0]) for i in ids if leaf[i]],
    )  # fmt: skip
    ports = [models.port("X", [None, 4])], [models.port("y", [None, 1])]
    return models.model_of([node], *ports, opset=21, ai_onnx_ml=3)


def test_a_pipeline_of_scikit_learn_runs_on_a_node() -> None:
    model, expected = scaled_logistic_regression()
    x = load_iris().data.astype(np.float32)
    got = models.run(OnnxModule(model), X=x)
    models.assert_same(got, models.ort(model, X=x))
    assert got["label"].tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 150])
def test_a_tree_runs_on_a_node(rows: int) -> None:
    model = decision_tree()
    x = load_iris().data[:rows].astype(np.float32)
    models.assert_same(models.run(OnnxModule(model), X=x), models.ort(model, X=x))
