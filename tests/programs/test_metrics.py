"""Metrics of programs are scikit-learn's, on one node and from the means of several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics as known

from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, BadArgument, Graph, Module, types
from bbnode.programs.metrics import metric
from bbnode.sim import Network

RNG = np.random.default_rng(0)
N, C = 400, 5
LOGITS = RNG.normal(size=(N, C)).astype(np.float32)
LABELS = np.where(RNG.random(N) < 0.4, LOGITS.argmax(1), RNG.integers(0, C - 1, N))
PAIRS = RNG.normal(size=(N, 2)).astype(np.float32)
SIDES = (PAIRS[:, 1] - PAIRS[:, 0] + RNG.normal(size=N) > 0).astype(np.int64)
MADE = RNG.normal(size=(N, 1)).astype(np.float32)
TRUE = (MADE + RNG.normal(size=(N, 1)) * 0.5).astype(np.float32)
BEST = LOGITS.argmax(1)
ONE = (PAIRS[:, 1:] - PAIRS[:, :1]).astype(np.float32)

CASES: dict[str, tuple[str, int, Any, Any, float]] = {
    "accuracy": ("accuracy", C, LOGITS, LABELS, known.accuracy_score(LABELS, BEST)),
    "top2": ("top2", C, LOGITS, LABELS,
             known.top_k_accuracy_score(LABELS, LOGITS, k=2, labels=range(C))),
    "f1_macro": ("f1_macro", C, LOGITS, LABELS, known.f1_score(LABELS, BEST, average="macro")),
    "f1_micro": ("f1_micro", C, LOGITS, LABELS, known.f1_score(LABELS, BEST, average="micro")),
    "f1 of an absent class": ("f1_macro", C, np.where(np.arange(C) == 2, -9, LOGITS),
        np.where(LABELS == 2, 0, LABELS), known.f1_score(
            np.where(LABELS == 2, 0, LABELS),
            np.where(np.arange(C) == 2, -9, LOGITS).argmax(1), average="macro")),
    "auc": ("auc", 2, PAIRS, SIDES, known.roc_auc_score(SIDES, PAIRS[:, 1] - PAIRS[:, 0])),
    "auc of one logit": ("auc", 1, ONE, SIDES[:, None].astype(np.float32),
                         known.roc_auc_score(SIDES, ONE[:, 0])),
    "mae": ("mae", 1, MADE, TRUE, known.mean_absolute_error(TRUE, MADE)),
    "mse": ("mse", 1, MADE, TRUE, known.mean_squared_error(TRUE, MADE)),
    "r2": ("r2", 1, MADE, TRUE, known.r2_score(TRUE, MADE)),
    "binary_accuracy": ("binary_accuracy", 1, ONE, SIDES[:, None].astype(np.float32),
                        known.accuracy_score(SIDES, ONE[:, 0] > 0)),
}  # fmt: skip


class Measuring(Module):
    home = "peer"

    def __init__(self, name: str, classes: int, ignore_index: int | None = None) -> None:
        super().__init__()
        self.metric = metric(name, classes=classes, ignore_index=ignore_index)

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        of_classes = self.metric.labels == "classes"
        outputs = g.input("outputs", types.TENSOR_FLOAT)
        labels = g.input("labels", types.TENSOR_INT64 if of_classes else types.TENSOR_FLOAT)
        means = self.metric.means(g, compute, outputs, labels)
        g.output("means", means)
        given = g.input("given", types.TENSOR_FLOAT)
        g.output("value", self.metric.value(g, compute, given))
        g.output("own", self.metric.value(g, compute, means))


@pytest.mark.parametrize("case", CASES)
def test_pooled_and_averaged_metrics_are_those_of_scikit_learn(case: str) -> None:
    name, classes, outputs, labels, wanted = CASES[case]
    program = Measuring(name, classes)
    artifact = Compiler().bind_backend("compute", OrtBackend).compile(program.build())
    net = Network(1)
    node = net.add("node", artifact, ["peer"])

    def measured(part: slice, given: Any) -> dict[str, Any]:
        made = np.ascontiguousarray(outputs[part], np.float32)
        fed = {"outputs": made, "labels": np.ascontiguousarray(labels[part]), "given": given}
        execution = node.invoke("peer", fed)
        net.run_until_idle()
        return node.outputs(execution)

    nothing = np.ones(program.metric.size, np.float32)
    whole = measured(slice(None), nothing)
    tolerance = 2e-3 if name == "auc" else 1e-5
    assert whole["means"].shape == (program.metric.size,)
    assert float(whole["own"]) == pytest.approx(wanted, abs=tolerance)
    parts = [slice(0, 37), slice(37, 250), slice(250, N)]
    means = [measured(part, nothing)["means"] for part in parts]
    pooled = np.average(means, axis=0, weights=[37, 213, N - 250]).astype(np.float32)
    assert float(measured(parts[0], pooled)["value"]) == pytest.approx(wanted, abs=tolerance)


def test_many_examples_are_binned_where_they_lie() -> None:
    """A row of 1,024 bins for each would take 1.6 GB, and as much again for each class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400_000)
    outputs = np.stack([rng.normal(size=labels.size), rng.normal(size=labels.size) + labels], 1)
    fed = {"outputs": outputs.astype(np.float32), "labels": labels}
    program = Measuring("auc", 2)
    artifact = Compiler().bind_backend("compute", OrtBackend).compile(program.build())
    assert "OneHot" not in {node.op_type for each in artifact.functions for node in each.node}
    node = (net := Network(1)).add("node", artifact, ["peer"])

    def measured(outputs: Any) -> float:
        given = np.ones(program.metric.size, np.float32)
        execution = node.invoke("peer", {**fed, "outputs": outputs, "given": given})
        net.run_until_idle()
        return float(node.outputs(execution)["own"])

    wanted = known.roc_auc_score(labels, outputs[:, 1] - outputs[:, 0])
    assert measured(fed["outputs"]) == pytest.approx(wanted, abs=1e-4)
    wrong = fed["outputs"].copy()
    wrong[7] = np.nan
    assert np.isnan(measured(wrong))


@pytest.mark.parametrize("ignored", [-100, -1, 1, 255])
@pytest.mark.parametrize("name", ["accuracy", "top2", "f1_macro", "f1_micro", "auc"])
def test_labels_that_the_loss_ignores_count_in_no_metric(name: str, ignored: int) -> None:
    outputs, labels, classes = (PAIRS, SIDES, 2) if name == "auc" else (LOGITS, LABELS, C)
    if name == "auc" and ignored == 1:
        pytest.skip("one class would be left")
    out = RNG.random(N) < 0.3
    marked = np.where(out, ignored, labels)
    kept = marked != ignored
    best = outputs.argmax(1)[kept]
    wanted = {
        "accuracy": lambda: known.accuracy_score(labels[kept], best),
        "top2": lambda: known.top_k_accuracy_score(
            labels[kept], outputs[kept], k=2, labels=range(C)
        ),
        "f1_macro": lambda: known.f1_score(labels[kept], best, average="macro"),
        "f1_micro": lambda: known.f1_score(labels[kept], best, average="micro"),
        "auc": lambda: known.roc_auc_score(labels[kept], outputs[kept, 1] - outputs[kept, 0]),
    }[name]()
    program = Measuring(name, classes, ignored)
    artifact = Compiler().bind_backend("compute", OrtBackend).compile(program.build())
    net = Network(1)
    peer = net.add("node", artifact, ["peer"])
    parts = [slice(0, 37), slice(37, N)]
    means = []
    for part in parts:
        fed = {"outputs": outputs[part], "labels": marked[part],
               "given": np.ones(program.metric.size, np.float32)}  # fmt: skip
        execution = peer.invoke("peer", fed)
        net.run_until_idle()
        means.append(peer.outputs(execution)["means"])
    pooled = np.average(means, axis=0, weights=[37, N - 37]).astype(np.float32)
    execution = peer.invoke("peer", {**fed, "given": pooled})
    net.run_until_idle()
    value = float(peer.outputs(execution)["value"])
    assert value == pytest.approx(float(wanted), abs=2e-3 if name == "auc" else 1e-5)


@pytest.mark.parametrize(
    ("name", "classes", "problem"),
    [
        ("accurracy", 3, "no metric 'accurracy'; choose among accuracy"),
        ("top4", 3, "'top4' of 3 classes; take at most as many"),
        ("f1_macro", 1, "'f1_macro' of 1 classes; it wants two or more"),
        ("auc", 3, "'auc' of 3 classes; it wants two, or one logit"),
    ],
)
def test_a_metric_that_there_is_not_is_refused(name: str, classes: int, problem: str) -> None:
    with pytest.raises(BadArgument, match=problem):
        metric(name, classes=classes)
