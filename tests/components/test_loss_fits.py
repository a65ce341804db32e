"""A loss and what it is computed from: the end of the model, its labels, the metrics beside it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.autodiff.ends import chain_ends, check_loss, check_values
from bbnode.components.autodiff.errors import LossDoesNotFit
from bbnode.components.contracts import ComponentError
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.data.tables import TableDataSource, TableDataSourceConfig
from bbnode.components.errors import DataDoesNotFit, DataUnavailable
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.models.trees import BoostedTrees, BoostedTreesConfig
from tests.components.fakes import CTX, onnx_model, ort

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
CE, NLL, BCE, KL = "softmax_cross_entropy", "nll", "bce_with_logits", "kl"


def node(op: str, *names: str, **attributes: Any) -> NodeProto:
    *inputs, output = names
    return helper.make_node(op, inputs, [output], **attributes)


# What stands behind the logits "l" [N, C], and makes "y".
ENDS: dict[str, list[NodeProto]] = {
    "logits": [node("Identity", "l", "y")],
    "softmax": [node("Softmax", "l", "y", axis=1)],
    "sigmoid": [node("Sigmoid", "l", "y")],
    "hard sigmoid": [node("HardSigmoid", "l", "y")],
    "log softmax": [node("LogSoftmax", "l", "y", axis=1)],
    "identity": [node("Softmax", "l", "p"), node("Identity", "p", "y")],
    "reshape": [node("Softmax", "l", "p"), node("Reshape", "p", "shape", "y")],
    "cast": [
        node("Cast", "l", "d", to=TensorProto.DOUBLE),
        node("Softmax", "d", "p"),
        node("Cast", "p", "y", to=TensorProto.FLOAT),
    ],
    "transpose": [
        node("Transpose", "l", "t", perm=[1, 0]),
        node("Softmax", "t", "p", axis=0),
        node("Transpose", "p", "y", perm=[1, 0]),
    ],
    "flatten": [node("Softmax", "l", "p"), node("Flatten", "p", "y")],
    "unsqueeze": [
        node("Sigmoid", "l", "p"),
        node("Unsqueeze", "p", "axis", "q"),
        node("Squeeze", "q", "axis", "y"),
    ],
    "by hand": [
        node("Exp", "l", "e"),
        node("ReduceSum", "e", "axis", "s", keepdims=1),
        node("Div", "e", "s", "y"),
    ],
    "sigmoid by hand": [
        node("Neg", "l", "n"),
        node("Exp", "n", "e"),
        node("Add", "e", "one", "d"),
        node("Div", "one", "d", "y"),
    ],
    "clipped": [node("Softmax", "l", "p"), node("Clip", "p", "low", "high", "y")],
    "log of softmax": [node("Softmax", "l", "p"), node("Log", "p", "y")],
    "log by hand": [
        node("ReduceLogSumExp", "l", "axis", "s", keepdims=1),
        node("Sub", "l", "s", "y"),
    ],
    "tanh": [node("Tanh", "l", "y")],
    "capped": [node("Tanh", "l", "t"), node("Mul", "t", "cap", "y")],
    "relu": [node("Relu", "l", "y")],
    "inverted": [node("Sigmoid", "l", "p"), node("Sub", "one", "p", "y")],
    "scaled": [node("Softmax", "l", "p"), node("Mul", "p", "weight", "y")],
}


def ending(end: str, classes: int = 3) -> ModelProto:
    weight = RNG.normal(size=(4, classes)).astype(np.float32)
    constants = {
        "shape": np.array([-1, classes]),
        "axis": np.array([1]),
        "one": np.float32(1),
        "low": np.float32(1e-7),
        "high": np.float32(1 - 1e-7),
        "cap": np.float32(30),
        "weight": np.full((1,), 2.5, np.float32),
    }
    nodes = [helper.make_node("MatMul", ["x", "w"], ["l"]), *ENDS[end]]
    used = {name for each in nodes for name in each.input}
    tensors = [numpy_helper.from_array(weight, "w")]
    tensors += [numpy_helper.from_array(a, n) for n, a in constants.items() if n in used]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def model(forward: ModelProto, loss: str, data: Any = None, **settings: Any) -> Any:
    content = forward.SerializeToString()
    config = OnnxModelConfig(model=content, loss=loss, trainable=("w",), **settings)
    return onnx_model(config, data)


PROBABILITIES = (
    "softmax", "sigmoid", "hard sigmoid", "identity", "reshape", "cast", "transpose", "flatten",
    "unsqueeze", "by hand", "sigmoid by hand", "clipped", "inverted",
)  # fmt: skip


@pytest.mark.parametrize("loss", [CE, NLL, BCE, KL])
@pytest.mark.parametrize("end", PROBABILITIES)
def test_probabilities_are_refused_by_a_loss_of_logits_or_logarithms(end: str, loss: str) -> None:
    with pytest.raises(LossDoesNotFit) as caught:
        model(ending(end), loss).check_trains()
    text = str(caught.value)
    assert "ends in" in text
    assert "\n" not in text
    wanted = {CE: "applies Softmax itself", BCE: "applies Sigmoid itself"}
    assert wanted.get(loss, "takes logarithms of probabilities") in text


def test_the_refusal_says_how_low_the_loss_can_get() -> None:
    with pytest.raises(LossDoesNotFit, match=r"can't fall below 0\.313; train .* without Softmax"):
        model(ending("softmax", 2), CE).check_trains()


def test_each_of_several_losses_is_looked_at() -> None:
    forward = ending("softmax")
    forward.graph.output.insert(0, helper.make_tensor_value_info("l", TensorProto.FLOAT, ["n", 3]))
    good = model(forward, CE, losses=(("l", CE, 1.0), ("y", "mse", 0.3)), outputs=("l",),
                 labels_apart=True)  # fmt: skip
    good.check_trains()
    bad = model(forward, CE, losses=(("l", CE, 1.0), ("y", CE, 0.3)), outputs=("l",))
    with pytest.raises(LossDoesNotFit, match="its output 'y' ends in Softmax"):
        bad.check_trains()


@pytest.mark.parametrize(
    ("end", "loss"),
    [
        ("logits", NLL), ("logits", KL), ("relu", NLL), ("log softmax", BCE),
    ],
)  # fmt: skip
def test_an_end_that_a_loss_is_not_of_is_refused(end: str, loss: str) -> None:
    with pytest.raises(LossDoesNotFit, match="does not fit the model"):
        model(ending(end), loss).check_trains()


@pytest.mark.parametrize(
    ("end", "loss"),
    [
        ("logits", CE), ("log softmax", CE), ("log softmax", NLL), ("log softmax", KL),
        ("log of softmax", NLL), ("log by hand", NLL), ("log by hand", KL), ("logits", BCE),
        ("capped", CE), ("relu", CE), ("softmax", "mse"), ("sigmoid", "mae"), ("tanh", "huber"),
        ("softmax", "cosine"), ("logits", "mse"),
    ],
)  # fmt: skip
def test_an_end_that_a_loss_is_of_is_taken_without_a_word(
    end: str, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    model(ending(end), loss).check_trains()
    assert not caplog.records


@pytest.mark.parametrize(
    ("end", "loss", "part"),
    [
        ("tanh", CE, "ends in Tanh ('y'), from -1 to 1, and with softmax_cross_entropy its loss"),
        ("tanh", BCE, "its loss of one of the labels can't fall below 0.313"),
        ("relu", BCE, "ends in Relu ('y'), from 0 to inf"),
        ("scaled", CE, "ends in Softmax ('p'), from 0 to 2.5"),
    ],
)
def test_an_end_that_holds_a_loss_up_is_said_once(
    end: str, loss: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    made = model(ending(end), loss)
    made.check_trains()
    made.check_trains()
    labels = np.zeros(12, np.int64) if loss == CE else np.zeros((12, 3), np.float32)
    made.gradient(CTX, X, labels)
    (record,) = caplog.records
    assert part in record.getMessage()


def test_a_gradient_of_a_loss_that_does_not_fit_is_refused() -> None:
    made = model(ending("softmax"), CE)
    for call in (made.gradient, made.gradient_with_input):
        with pytest.raises(LossDoesNotFit):
            call(CTX, X, np.zeros(12, np.int64))


def test_a_model_that_is_not_trained_may_end_in_what_it_likes() -> None:
    made = model(ending("softmax"), CE)
    np.testing.assert_allclose(made.forward(CTX, X).sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("loss", [CE, NLL])
def test_one_class_is_none(loss: str) -> None:
    with pytest.raises(LossDoesNotFit, match=r"one class alone.*bce_with_logits.*'mse'"):
        model(ending("log softmax", 1), loss).check_trains()


def test_one_of_several_axes_may_be_that_of_the_classes() -> None:
    forward = ending("logits")
    del forward.graph.output[0].type.tensor_type.shape.dim[:]
    forward.graph.node.append(node("Unsqueeze", "y", "axis", "z"))
    forward.graph.initializer.append(numpy_helper.from_array(np.array([2]), "axis"))
    forward.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3, 1])
    )
    model(forward, CE, class_axis=1).check_trains()
    with pytest.raises(LossDoesNotFit, match="one class alone"):
        model(forward, CE).check_trains()


def stored(folder: Path, y: Any, **settings: Any) -> ArrayDataSource:
    np.savez(folder / "d.npz", x=X, y=y)
    return ArrayDataSource(ArrayDataSourceConfig(path=str(folder / "d.npz"), **settings))


SIDES = np.where(np.arange(12) % 2, 1, -1)
LABELS: dict[str, tuple[str, tuple[int, ...], Any, dict[str, Any], str]] = {
    "floats": (CE, (4, 3), np.arange(12.0) % 3, {}, "set label_dtype = 'int64'"),
    "one-hot": (CE, (4, 3), np.eye(3)[np.arange(12) % 3], {}, "(argmax)"),
    "multi-label": (CE, (4, 3), np.ones((12, 3), int), {}, "loss='bce_with_logits'"),
    "a column": (CE, (4, 3), np.zeros((12, 1), int), {}, "leave out the last axis"),
    "signs": (CE, (4, 2), SIDES, {}, "store 0 for -1"),
    "torch's": (CE, (4, 3), np.where(np.arange(12) % 2, 0, -100), {}, "set ignore_index=-100"),
    "below": (CE, (4, 3), np.arange(12) % 3 - 2, {}, "number the classes from 0"),
    "none": (CE, (4, 3), np.full(12, -1), {"ignore_index": -1}, "are ignore_index (-1)"),
    "beyond": (CE, (4, 3), np.arange(12) % 4, {}, "compile the program for 4"),
    "two for one": (BCE, (4, 2), np.arange(12) % 2, {}, "or the model for one output"),
    "signs of one": (BCE, (4, 1), SIDES, {}, "store 0 for -1"),
    "float signs": (BCE, (4, 1), SIDES.astype(float), {}, "store 0 for -1"),
    "classes of one": (BCE, (4, 1), np.arange(12) % 3, {}, "loss='softmax_cross_entropy'"),
    "quantities": (BCE, (4, 1), np.arange(12) / 3, {}, "with loss='mse'"),
    "classes": ("mse", (4, 3), np.arange(12) % 3, {}, "compile with loss='softmax_cross_entropy'"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_a_loss_is_not_of_are_refused_with_a_remedy(case: str, tmp_path: Path) -> None:
    loss, layers, y, settings, part = LABELS[case]
    content = mlp_forward(layers).SerializeToString()
    made = onnx_model(OnnxModelConfig(model=content, loss=loss, **settings), stored(tmp_path, y))
    with pytest.raises(DataDoesNotFit) as caught:
        made.bootstrap(CTX)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["floats", "signs", "torch's"])
def test_labels_that_come_with_a_batch_are_refused_likewise(case: str) -> None:
    loss, layers, y, settings, part = LABELS[case]
    content = mlp_forward(layers).SerializeToString()
    made = onnx_model(OnnxModelConfig(model=content, loss=loss, **settings))
    with pytest.raises(ComponentError, match=re.escape(part)):
        made.compute_loss(CTX, X, np.asarray(y))


def test_classes_that_are_stored_as_floats_are_taken_where_the_owner_says_so(tmp_path) -> None:
    content = mlp_forward((4, 3)).SerializeToString()
    source = stored(tmp_path, np.arange(12.0) % 3, label_dtype="int64")
    made = onnx_model(OnnxModelConfig(model=content), source)
    made.bootstrap(CTX)
    assert made.train(CTX, epochs=1, batch=12)["steps"] == 1
    broken = stored(tmp_path, np.where(np.arange(12) == 7, 1.5, 1.0), label_dtype="int64")
    with pytest.raises(DataUnavailable, match=r"label of row 7 is 1\.5, which is no whole number"):
        broken.schema()


@pytest.mark.parametrize(
    ("classes", "y", "part"),
    [
        (2, SIDES, "the label -1 in 'y'; store 0 for -1"),
        (3, np.arange(12) % 4, "tells 3 classes apart, 0 to 2, and labels in 'y' are up to 3"),
        (3, np.eye(3)[np.arange(12) % 3], "one number for each example is taken"),
    ],
)
def test_trees_say_before_the_first_round_what_they_do_not_take(
    classes: int, y: Any, part: str, tmp_path: Path
) -> None:
    trees = BoostedTrees(BoostedTreesConfig(features=4, classes=classes))
    trees.bind({"backend": ort(), "data_source": stored(tmp_path, y)})
    with pytest.raises(DataDoesNotFit, match=re.escape(part)):
        trees.bootstrap(CTX)


def test_names_of_classes_are_no_quantities(tmp_path: Path) -> None:
    rows = "\n".join(f"{n},{'good' if n % 2 else 'bad'}" for n in range(8))
    (tmp_path / "t.csv").write_text(f"a,label\n{rows}\n")
    config = TableDataSourceConfig(path=str(tmp_path / "t.csv"), label_dtype="float32")
    content = mlp_forward((1, 1)).SerializeToString()
    made = onnx_model(OnnxModelConfig(model=content, loss="mse"), TableDataSource(config))
    with pytest.raises(DataDoesNotFit, match=r"in 'label' are names \(bad, good\)"):
        made.bootstrap(CTX)


@pytest.mark.parametrize(
    ("metric", "y", "told"),
    [
        ("auc", np.ones(12, int), "needs examples of both classes, and all 12 label(s) in 'y'"),
        ("r2", np.full(12, 2.5), "needs labels that differ, and all 12 label(s) in 'y' are 2.5"),
        ("auc", np.arange(12) % 2, ""),
        ("r2", np.arange(12.0), ""),
        ("accuracy", np.ones(12, int), ""),
    ],
)
def test_examples_without_a_value_of_a_metric_are_refused(
    metric: str, y: Any, told: str, tmp_path: Path
) -> None:
    source = stored(tmp_path, y, metrics=(metric,))
    if not told:
        source.bootstrap(CTX)
        return
    with pytest.raises(DataDoesNotFit, match=re.escape(told)):
        source.bootstrap(CTX)


@pytest.mark.parametrize("loss", [CE, NLL, KL])
def test_outputs_say_what_ops_do_not(loss: str) -> None:
    """As of a function of somebody else's, or a loop."""
    logits = RNG.normal(size=(3, 4))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    fits = logits if loss == CE else np.log(shares)
    check_values(loss, fits)
    check_values("mse", shares)
    with pytest.raises(LossDoesNotFit):
        check_values(loss, shares)
    if loss != CE:
        with pytest.raises(LossDoesNotFit, match="no logarithms of probabilities"):
            check_values(loss, logits)


def test_ops_of_other_engines_end_alike() -> None:
    assert chain_ends(["View", "Softmax"]).probabilities
    assert chain_ends(["T", "Addmm"]).anything
    assert chain_ends(["Mul", "Softmax"]) == chain_ends([])
    assert check_loss(CE, chain_ends(["Mul", "Softmax"]), "Net", 3) == ""
