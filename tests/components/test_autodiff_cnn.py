"""A small convolutional network, trained on digits through the components that a node binds."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import training_graphs
from bbnode.components.data.sklearn import SklearnDataSource, SklearnDataSourceConfig
from bbnode.components.models.onnx_model import OnnxModelConfig
from tests.components.fakes import CTX, onnx_model
from tests.components.graphs import check, numeric_gradient, run_reference

SIDE, CLASSES = 8, 10


def cnn(seed: int = 0, channels: int = 8, dtype: type = np.float32) -> ModelProto:
    """Two convolutions with normalization and pools, over images that come as rows of 64."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
        return rng.normal(0, np.sqrt(2 / fan_in), shape).astype(dtype)

    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = {
        "conv0.weight": weight(channels, 1, 3, 3),
        "conv0.bias": np.zeros(channels, dtype),
        "norm.scale": np.ones(channels, dtype),
        "norm.bias": np.zeros(channels, dtype),
        "norm.mean": np.full(channels, 0.1, dtype),
        "norm.variance": np.full(channels, 0.5, dtype),
        "conv1.weight": weight(2 * channels, channels, 3, 3),
        "dense.weight": weight(2 * channels * 4, CLASSES),
        "dense.bias": np.zeros(CLASSES, dtype),
        "image": np.array([-1, 1, SIDE, SIDE], np.int64),
    }
    norm = [f"norm.{part}" for part in ("scale", "bias", "mean", "variance")]
    nodes = [
        node("Reshape", ["x", "image"], ["pixels"]),
        node("Conv", ["pixels", "conv0.weight", "conv0.bias"], ["h0"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["h0", *norm], ["h1"]),
        node("Relu", ["h1"], ["h2"]),
        node("MaxPool", ["h2"], ["h3"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["h3", "conv1.weight"], ["h4"], auto_pad="SAME_UPPER"),
        node("Relu", ["h4"], ["h5"]),
        node("AveragePool", ["h5"], ["h6"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["h6"], ["h7"]),
        node("Gemm", ["h7", "dense.weight", "dense.bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "cnn",
        [helper.make_tensor_value_info("x", elem, ["batch", SIDE * SIDE])],
        [helper.make_tensor_value_info("logits", elem, ["batch", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def test_the_running_statistics_are_not_trained() -> None:
    graphs = training_graphs(cnn(), "softmax_cross_entropy")
    check(graphs.train_step)
    assert [name for name in graphs.parameter_names if name.startswith("norm")] == [
        "norm.scale",
        "norm.bias",
    ]


def test_gradients_of_the_whole_network_agree_with_finite_differences() -> None:
    graphs = training_graphs(cnn(channels=2, dtype=np.float64), "softmax_cross_entropy")
    rng = np.random.default_rng(1)
    feeds = {tensor.name: numpy_helper.to_array(tensor) for tensor in graphs.initial}
    feeds |= {"x": rng.uniform(0, 1, (3, SIDE * SIDE)), "labels": np.array([1, 0, 9])}
    found = run_reference(graphs.gradients, feeds)
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        expected = numeric_gradient(graphs.loss, feeds, name, graphs.loss_name, np.ones(()))
        np.testing.assert_allclose(found[gradient], expected, rtol=1e-5, atol=1e-7)


def test_it_learns_the_digits() -> None:
    config = OnnxModelConfig(model=cnn().SerializeToString(), learning_rate=0.3)
    model = onnx_model(config, SklearnDataSource(SklearnDataSourceConfig(seed=1)))
    held_out = SklearnDataSource(SklearnDataSourceConfig(split="test"))
    images, labels = held_out.next_batch(CTX)
    before = float(model.compute_loss(CTX, images, labels))
    model.train(CTX, epochs=8, batch=32)
    assert float(model.compute_loss(CTX, images, labels)) < before / 10
    right = np.argmax(model.forward(CTX, images), axis=1) == labels
    assert right.mean() > 0.93
