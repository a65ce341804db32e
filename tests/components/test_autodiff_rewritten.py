"""Forward nodes that are written in another way for their gradients: results stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import TrainingGraphs, training_graphs
from tests.components.graphs import numeric_gradient, run_ort, run_reference

BATCH = 3


def model_of(
    forward: list[object],
    tensors: dict[str, np.ndarray],
    shape: list[object],
    dtype: type,
) -> ModelProto:
    """A model whose nodes `forward` make h of x, and its classes of that by a product."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [node("Flatten", ["h"], ["rows"]), node("MatMul", ["rows", "head"], ["y"])]
    graph = helper.make_graph(
        [*forward, *ends],
        "rewritten",
        [helper.make_tensor_value_info("x", elem, shape)],
        [helper.make_tensor_value_info("y", elem, ["batch", 3])],
        [numpy_helper.from_array(array.astype(dtype), name) for name, array in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def convolution(side: int, stride: int, dtype: type, *, bias: bool = True) -> ModelProto:
    rng = np.random.default_rng(0)
    out = (side - 1) // stride + 1
    tensors = {
        "first": rng.normal(0, 0.3, (4, 4, 1, 1)),
        "kernel": rng.normal(0, 0.3, (5, 4, 3, 3)),
        "head": rng.normal(0, 0.3, (5 * out * out, 3)),
    }
    names = ["a", "kernel"]
    if bias:
        tensors["bias"] = rng.normal(0, 0.3, 5)
        names.append("bias")
    forward = [
        node("Conv", ["x", "first"], ["a"]),
        node("Conv", names, ["h"], pads=[1, 1, 1, 1], strides=[stride, stride]),
    ]
    return model_of(forward, tensors, ["batch", 4, side, side], dtype)


def layer_norm(dtype: type) -> ModelProto:
    rng = np.random.default_rng(0)
    tensors = {
        "first": rng.normal(0, 0.3, (6, 6)),
        "scale": rng.normal(1, 0.3, 6),
        "bias": rng.normal(0, 0.3, 6),
        "head": rng.normal(0, 0.3, (6, 3)),
    }
    forward = [
        node("MatMul", ["x", "first"], ["a"]),
        node("LayerNormalization", ["a", "scale", "bias"], ["h"]),
    ]
    return model_of(forward, tensors, ["batch", 6], dtype)


def feeds_of(graphs: TrainingGraphs, shape: tuple[int, ...], dtype: type) -> dict[str, np.ndarray]:
    feeds = {tensor.name: numpy_helper.to_array(tensor) for tensor in graphs.initial}
    x = np.random.default_rng(1).normal(size=(BATCH, *shape)).astype(dtype)
    return feeds | {"x": x, "labels": np.array([1, 0, 2])}


def gradients_in(graphs: TrainingGraphs, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    made = run_ort(graphs.gradients, feeds)
    return [made[name] for name in graphs.gradient_names]


@pytest.mark.parametrize(("side", "stride"), [(2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_few_windows_are_one_convolution_of_the_batch(side: int, stride: int, bias: bool) -> None:
    exact = training_graphs(
        convolution(side, stride, np.float64, bias=bias), "softmax_cross_entropy"
    )
    own = exact.gradients.graph.node
    kernels = [n for n in own if n.op_type == "Conv" and len(n.attribute) > 0]
    assert any(list(a.ints) == [1, 3, 3] for n in kernels for a in n.attribute)
    # The forward pass alone has no gradient to share with, and stays as it is.
    assert all(len(a.ints) < 5 for n in exact.forward.graph.node for a in n.attribute)
    feeds = feeds_of(exact, (4, side, side), np.float64)
    found = run_reference(exact.gradients, feeds)
    expected = [
        numeric_gradient(exact.loss, feeds, name, exact.loss_name, np.ones(()))
        for name in exact.parameter_names
    ]
    for name, gradient in zip(exact.gradient_names, expected, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-7)
    single = training_graphs(
        convolution(side, stride, np.float32, bias=bias), "softmax_cross_entropy"
    )
    made = gradients_in(single, feeds_of(single, (4, side, side), np.float32))
    for one, gradient in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_layer_normalization_gives_its_statistics(offset: float) -> None:
    single = training_graphs(layer_norm(np.float32), "softmax_cross_entropy")
    (normal,) = (n for n in single.gradients.graph.node if n.op_type == "LayerNormalization")
    assert len(normal.output) == 3
    assert not any(n.op_type == "Sqrt" for n in single.gradients.graph.node)
    (alone,) = (n for n in single.forward.graph.node if n.op_type == "LayerNormalization")
    assert len(alone.output) == 1
    exact = training_graphs(layer_norm(np.float64), "softmax_cross_entropy")
    # In float64 the statistics would be float32: they are computed again.
    assert any(n.op_type == "Sqrt" for n in exact.gradients.graph.node)
    feeds = feeds_of(single, (6,), np.float32)
    feeds["x"] = feeds["x"] * (1 + np.float32(offset))
    wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in feeds.items()}
    expected = run_reference(exact.gradients, wide)
    for one, name in zip(gradients_in(single, feeds), exact.gradient_names, strict=True):
        np.testing.assert_allclose(one, expected[name], rtol=2e-3, atol=1e-5)


def test_statistics_that_the_model_takes_itself_are_read_where_they_are() -> None:
    model = layer_norm(np.float32)
    model.graph.node[1].output.extend(["mean", "inverse"])
    graphs = training_graphs(model, "softmax_cross_entropy")
    (normal,) = (n for n in graphs.gradients.graph.node if n.op_type == "LayerNormalization")
    assert list(normal.output) == ["h", "mean", "inverse"]
    same = training_graphs(layer_norm(np.float32), "softmax_cross_entropy")
    feeds = feeds_of(graphs, (6,), np.float32)
    for one, other in zip(gradients_in(graphs, feeds), gradients_in(same, feeds), strict=True):
        np.testing.assert_array_equal(one, other)
