"""The training graphs of whole models, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnx.helper import make_node as node

from bbnode.components import autodiff
from bbnode.components.autodiff import (
    GradientRuleError,
    InvalidForwardModel,
    TrainingGraphs,
    UnknownLoss,
    UnsupportedGradient,
    VjpContext,
    gradient_graph,
    pull_back_through,
    training_graphs,
    vjp,
)
from bbnode.components.autodiff.optimizers import OptimizerSettings
from bbnode.components.autodiff.table import _TABLE, lookup
from bbnode.components.autodiff.training import TrainingOptions
from bbnode.components.models.mlp import mlp_forward
from tests.components.graphs import check, model_of, numeric_gradient, run_ort, run_reference

GRAPHS = ("forward", "loss", "gradients", "pullback", "step", "train_step")


def as_float64(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    for info in (*copy.graph.input, *copy.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return copy


def params_of(graphs: TrainingGraphs) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graphs.initial}


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "Gelu"])
def test_gradients_of_an_mlp_agree_with_finite_differences(activation: str) -> None:
    graphs = training_graphs(
        as_float64(mlp_forward((5, 4, 3), activation, seed=3)), "softmax_cross_entropy"
    )
    rng = np.random.default_rng(0)
    feeds = {
        **params_of(graphs),
        "x": rng.normal(size=(6, 5)),
        "labels": rng.integers(0, 3, size=6),
    }
    got = run_reference(graphs.gradients, feeds)
    h, tol = (1e-3, 1e-3) if activation == "Gelu" else (1e-6, 1e-6)  # its Erf is float32
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        expected = numeric_gradient(graphs.loss, feeds, name, "loss", np.ones(()), h)
        np.testing.assert_allclose(got[gradient], expected, rtol=tol, atol=tol / 10)


def test_mse_is_the_mean_over_all_elements() -> None:
    graphs = training_graphs(as_float64(mlp_forward((3, 2), seed=1)), "mse")
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    feeds = {**params_of(graphs), "x": x, "labels": t}
    got = run_ort(graphs.gradients, feeds)
    w, b = params_of(graphs).values()
    np.testing.assert_allclose(got["loss"], ((x @ w + b - t) ** 2).mean(), rtol=1e-12)
    np.testing.assert_allclose(got["grad/layer0.bias"], 2 * (x @ w + b - t).mean(0) / 2, rtol=1e-9)


def test_train_step_equals_plain_numpy() -> None:
    graphs = training_graphs(mlp_forward((8, 6, 4), seed=2), "softmax_cross_entropy")
    values = params_of(graphs)
    w0, b0, w1, b1 = (v.astype(np.float64) for v in values.values())
    rng = np.random.default_rng(5)
    lr = 0.1
    for batch in (32, 7, 1):  # the batch dimension is dynamic
        x = rng.normal(size=(batch, 8)).astype(np.float32)
        labels = rng.integers(0, 4, size=batch)
        out = run_ort(
            graphs.train_step,
            {**values, "x": x, "labels": labels, "learning_rate": np.float32(lr)},
        )
        hidden = np.maximum(x @ w0 + b0, 0)
        logits = hidden @ w1 + b1
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        loss = -np.log(p[np.arange(batch), labels]).mean()
        g = p.copy()
        g[np.arange(batch), labels] -= 1
        g /= batch
        gh = (g @ w1.T) * (hidden > 0)
        w0, b0 = w0 - lr * x.T @ gh, b0 - lr * gh.sum(0)
        w1, b1 = w1 - lr * hidden.T @ g, b1 - lr * g.sum(0)
        np.testing.assert_allclose(out["loss"], loss, rtol=1e-5)
        values = {n: out[f"updated/{n}"] for n in graphs.parameter_names}
        for got, expected in zip(values.values(), (w0, b0, w1, b1), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_train_step_is_gradients_then_sgd_step(momentum: float) -> None:
    options = TrainingOptions(optimizer=OptimizerSettings(momentum=momentum))
    forward = mlp_forward((8, 6, 4), seed=2)
    graphs = training_graphs(forward, "softmax_cross_entropy", options=options)
    rng = np.random.default_rng(5)
    feeds = {
        **params_of(graphs),
        "x": rng.normal(size=(9, 8)).astype(np.float32),
        "labels": rng.integers(0, 4, size=9),
        "learning_rate": np.float32(0.3),
    }
    if momentum:
        feeds |= {f"momentum/{name}": value for name, value in params_of(graphs).items()}
    fused = run_ort(graphs.train_step, feeds)
    gradients = run_ort(graphs.gradients, feeds)
    stepped = run_ort(graphs.step, {**feeds, **gradients})
    assert fused["loss"].tobytes() == gradients["loss"].tobytes()
    for name in graphs.updated_names:
        if momentum:
            assert fused[name].tobytes() == stepped[name].tobytes()
        else:  # the rate is in the gradients from the start: rounded at another place
            np.testing.assert_allclose(fused[name], stepped[name], rtol=1e-6, atol=1e-7)


def test_graphs_are_valid_onnx_and_the_same_every_time() -> None:
    first = training_graphs(mlp_forward(), "softmax_cross_entropy")
    second = training_graphs(mlp_forward(), "softmax_cross_entropy")
    for name in GRAPHS:
        model = getattr(first, name)
        check(model)
        assert not {"ai.bytesandbrains"} & {entry.domain for entry in model.opset_import}
        assert model.SerializeToString(deterministic=True) == getattr(
            second, name
        ).SerializeToString(deterministic=True)
    assert gradient_graph(mlp_forward(), "softmax_cross_entropy") == first.gradients
    # Only what a graph gives is in it: a step needs no matrix product.
    assert {n.op_type for n in first.step.graph.node} == {"Mul", "Sub"}
    assert {n.op_type for n in first.forward.graph.node} == {"Gemm", "Relu"}


def test_an_old_opset_is_upgraded() -> None:
    w = np.random.default_rng(0).normal(size=(3, 2))
    model = model_of(
        [node("MatMul", ["x", "w"], ["h"]), node("ReduceSum", ["h"], ["y"], axes=[1], keepdims=0)],
        {"w": w}, inputs={"x": np.zeros((4, 3))}, opset=11,
    )  # fmt: skip
    graphs = training_graphs(model, "mse")
    check(graphs.gradients)
    x = np.random.default_rng(1).normal(size=(4, 3))
    feeds = {"w": w, "x": x, "output_gradient": np.ones(4)}
    np.testing.assert_allclose(
        run_ort(graphs.pullback, feeds)["grad/w"], np.outer(x.sum(0), np.ones(2))
    )


def test_settings_integers_and_the_unused_are_no_parameters() -> None:
    model = model_of(
        [node("Pow", ["x", "exponent"], ["p"]), node("Reshape", ["p", "shape"], ["r"]),
         node("Mul", ["r", "w"], ["y"])],
        {"w": np.ones(2), "exponent": np.array(2.0), "unused": np.ones(3)},
        inputs={"x": np.ones((2, 2))}, constants={"shape": np.array([-1, 2])},
    )  # fmt: skip
    graphs = training_graphs(model, "mse")
    assert graphs.parameter_names == ("w",)
    assert {t.name for t in graphs.forward.graph.initializer} == {"exponent", "shape"}


def test_wrt_freezes_the_others() -> None:
    graphs = training_graphs(mlp_forward((4, 3, 2)), "mse", ["layer1.weight", "layer1.bias"])
    assert graphs.parameter_names == ("layer1.weight", "layer1.bias")
    assert "layer0.weight" in {t.name for t in graphs.train_step.graph.initializer}


def test_a_parameter_without_influence_gets_zeros() -> None:
    model = model_of(
        [node("Mul", ["x", "a"], ["y"]), node("Add", ["x", "b"], ["z"])],
        {"a": np.ones(2), "b": np.zeros(2)}, inputs={"x": np.ones(2)},
    )  # fmt: skip
    graphs = training_graphs(model, "mse")
    feeds = {"a": np.ones(2), "b": np.ones(2), "x": np.ones(2), "output_gradient": np.ones(2)}
    got = run_ort(graphs.pullback, feeds)
    np.testing.assert_array_equal(got["grad/b"], np.zeros(2))
    np.testing.assert_array_equal(got["grad/a"], np.ones(2))


def test_an_empty_batch_gives_zero_gradients() -> None:
    model = model_of(
        [node("MatMul", ["x", "w"], ["h"]), node("Unsqueeze", ["h", "front"], ["y"])],
        {"w": np.ones((3, 2))}, inputs={"x": np.ones((4, 3))}, constants={"front": np.array([0])},
        symbolic=True,
    )  # fmt: skip
    graphs = training_graphs(model, "mse")
    feeds = {"w": np.ones((3, 2)), "x": np.ones((0, 3)), "output_gradient": np.ones((1, 0, 2))}
    np.testing.assert_array_equal(run_ort(graphs.pullback, feeds)["grad/w"], np.zeros((3, 2)))


def test_names_that_are_taken_are_kept_apart() -> None:
    model = model_of(
        [node("Mul", ["labels", "loss"], ["learning_rate"])],
        {"loss": np.ones(2)}, inputs={"labels": np.ones((3, 2))}, output="learning_rate",
    )  # fmt: skip
    graphs = training_graphs(model, "mse")
    for name in GRAPHS:
        check(getattr(graphs, name))
    assert graphs.labels_name != "labels"
    assert graphs.loss_name != "loss"


def test_an_op_without_a_rule_is_named() -> None:
    model = model_of(
        [node("MatMul", ["x", "w"], ["h"]), node("Det", ["h"], ["y"], name="wave")],
        {"w": np.ones((2, 2))}, inputs={"x": np.ones((2, 2))},
    )  # fmt: skip
    with pytest.raises(UnsupportedGradient, match=r"'wave'.*Det.*@bbnode.*vjp") as caught:
        training_graphs(model, "mse")
    assert (caught.value.node, caught.value.op_type) == ("wave", "Det")


def test_an_op_without_a_rule_off_the_path_does_not_matter() -> None:
    model = model_of(
        [node("Det", ["x"], ["s"]), node("Mul", ["s", "w"], ["y"])],
        {"w": np.ones((2, 2))}, inputs={"x": np.ones((2, 2))},
    )  # fmt: skip
    check(training_graphs(model, "mse").gradients)


def test_a_rule_can_be_added(monkeypatch) -> None:
    monkeypatch.delitem(_TABLE, ("", "Tan"))

    @vjp("Tan")
    def tan(ctx):
        slope = ctx.b.op("Add", ctx.scalar(1.0, ctx.y), ctx.b.op("Mul", ctx.y, ctx.y))
        return [ctx.b.op("Mul", ctx.g, slope)]

    at = np.array([0.5], np.float32)
    graphs = training_graphs(
        model_of([node("Tan", ["a"], ["y"])], {"a": at}, dtype=np.float32), "mse"
    )
    got = run_ort(graphs.pullback, {"a": at, "output_gradient": np.ones(1, np.float32)})
    np.testing.assert_allclose(got["grad/a"], 1 + np.tan(at) ** 2, rtol=1e-6)


def test_a_rule_by_way_of_simpler_ops(monkeypatch) -> None:
    monkeypatch.delitem(_TABLE, ("", "Tan"))

    @vjp("Tan")
    def tan(ctx):
        x = ctx.inputs[0]
        return pull_back_through(ctx, [ctx.b.op("Div", ctx.b.op("Sin", x), ctx.b.op("Cos", x))])

    at = np.array([0.5], np.float32)
    graphs = training_graphs(
        model_of([node("Tan", ["a"], ["y"])], {"a": at}, dtype=np.float32), "mse"
    )
    got = run_ort(graphs.pullback, {"a": at, "output_gradient": np.ones(1, np.float32)})
    np.testing.assert_allclose(got["grad/a"], 1 + np.tan(at) ** 2, rtol=1e-6)


def test_a_rule_that_is_called_on_a_made_up_node_is_refused(monkeypatch) -> None:
    monkeypatch.delitem(_TABLE, ("", "Tan"))

    @vjp("Tan")
    def tan(ctx):  # the output is the one of another node; that one would be written anew
        made = node("MaxPool", [ctx.y], [ctx.inputs[0]], kernel_shape=[1])
        inner = VjpContext(ctx.b, made, ctx.grads, ctx.types, {ctx.y}, {ctx.y: ctx.node})
        return lookup("", "MaxPool").rule(inner)

    nodes = [node("Relu", ["a"], ["h"]), node("Tan", ["h"], ["y"])]
    model = model_of(nodes, {"a": np.ones((1, 1, 2))}, dtype=np.float32)
    with pytest.raises(GradientRuleError, match=r"is in no graph.*pull_back_through"):
        training_graphs(model, "mse")


def test_rules_are_called_by_the_sweep_alone() -> None:
    """What a rule has written anew stands under a node's name, which has to be its own."""
    folder = Path(autodiff.__file__).parent
    texts = {path.name: path.read_text() for path in folder.rglob("*.py")}
    assert [name for name, text in texts.items() if "VjpContext(" in text] == ["reverse.py"]
    assert [name for name, text in texts.items() if "instead[key] = " in text] == ["table.py"]
    assert not [name for name, text in texts.items() if "instead[" in text and name != "table.py"]


def test_what_cannot_be_trained_is_refused() -> None:
    good = mlp_forward((4, 3, 2))
    with pytest.raises(UnknownLoss, match=r"hinge.*softmax_cross_entropy"):
        training_graphs(good, "hinge")
    with pytest.raises(InvalidForwardModel, match="no initializer 'nope'"):
        training_graphs(good, "mse", ["nope"])
    with pytest.raises(InvalidForwardModel, match="ONNX refuses the model"):
        training_graphs(ModelProto(), "mse")
    none = model_of([node("Relu", ["x"], ["y"])], {}, inputs={"x": np.ones(2)})
    with pytest.raises(InvalidForwardModel, match="no float initializer"):
        training_graphs(none, "mse")
    scalar = model_of([node("ReduceSum", ["a"], ["y"], keepdims=0)], {"a": np.ones(2)})
    with pytest.raises(InvalidForwardModel, match="one logit per class"):
        training_graphs(scalar, "softmax_cross_entropy")
    whole = ModelProto()
    whole.CopyFrom(good)
    whole.graph.node.append(node("ArgMax", ["logits"], ["best"]))
    whole.graph.output[0].name = "best"
    whole.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    whole.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(InvalidForwardModel, match="not a float32 or float64"):
        training_graphs(whole, "mse")


def test_local_functions_are_inlined() -> None:
    function = onnx.helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])],
        [onnx.helper.make_opsetid("", 21)],
    )  # fmt: skip
    model = model_of([node("Mul", ["x", "w"], ["h"])], {"w": np.ones(2)}, inputs={"x": np.ones(2)},
                     output="h")  # fmt: skip
    model.functions.append(function)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    model.graph.node.append(node("Twice", ["h"], ["y"], domain="local"))
    model.graph.output[0].name = "y"
    graphs = training_graphs(model, "mse")
    feeds = {"w": np.ones(2), "x": np.array([1.0, 3.0]), "output_gradient": np.ones(2)}
    np.testing.assert_array_equal(run_ort(graphs.pullback, feeds)["grad/w"], [2.0, 6.0])


def test_training_graphs_is_immutable() -> None:
    graphs = training_graphs(mlp_forward((2, 2)), "mse")
    with pytest.raises(dataclasses.FrozenInstanceError):
        graphs.loss_name = "other"
