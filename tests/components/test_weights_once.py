"""A model's weights are in memory once: in the flat vector."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import InvalidForwardModel, training_graphs
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.ir.weightless import without_values, without_weights
from tests.components.fakes import CTX, onnx_model

RNG = np.random.default_rng(0)
LARGE = RNG.normal(size=(160, 160)).astype(np.float32)
SMALL = np.ones(160, np.float32)


def model_with(nodes: list[NodeProto], opset: int, **tensors: np.ndarray) -> ModelProto:
    """A model [n, 160] -> [n, 160] in float32."""
    graph = helper.make_graph(
        nodes, "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 160])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 160])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


MODEL = model_with(
    [node("Gemm", ["x", "a", "s"], ["h"]), node("MatMul", ["h", "b"], ["y"])], 21,
    a=LARGE, s=SMALL, b=LARGE.T.copy(),
)  # fmt: skip


def test_large_tensors_become_inputs_of_a_copy() -> None:
    light, large = without_weights(MODEL)
    assert [tensor.name for tensor in light.graph.initializer] == ["s"]
    assert list(large) == ["a", "b"]
    assert {port.name for port in light.graph.input} == {"x", "a", "b"}
    assert len(MODEL.graph.initializer) == 3
    emptied = without_values(MODEL, {"a"})
    assert [len(t.raw_data) > 0 for t in emptied.graph.initializer] == [False, True, True]
    assert list(emptied.graph.initializer[0].dims) == [160, 160]


def test_a_model_keeps_no_second_copy_and_exports_what_it_was_given() -> None:
    model = onnx_model(OnnxModelConfig(model=MODEL.SerializeToString(), loss="mse"))
    assert len(model.config.model) < LARGE.nbytes
    exported = {t.name: numpy_helper.to_array(t) for t in model.export().graph.initializer}
    np.testing.assert_array_equal(exported["a"], LARGE)
    np.testing.assert_array_equal(exported["b"], LARGE.T)
    found = model.forward(CTX, np.ones((2, 160), np.float32))
    np.testing.assert_allclose(found, (np.ones((2, 160)) @ LARGE + 1) @ LARGE.T, atol=1e-3)


def test_what_is_not_trained_stays_in_the_graphs() -> None:
    config = OnnxModelConfig(model=MODEL.SerializeToString(), loss="mse", trainable=("b",))
    model = onnx_model(config)
    np.testing.assert_array_equal(model.params(CTX), LARGE.T.reshape(-1))
    found = model.forward(CTX, np.ones((2, 160), np.float32))
    np.testing.assert_allclose(found, (np.ones((2, 160)) @ LARGE + 1) @ LARGE.T, atol=1e-3)
    exported = {t.name: numpy_helper.to_array(t) for t in model.export().graph.initializer}
    np.testing.assert_array_equal(exported["a"], LARGE)


def test_a_large_tensor_of_the_wrong_size_or_named_twice_is_refused() -> None:
    broken = type(MODEL)()
    broken.CopyFrom(MODEL)
    broken.graph.initializer[0].raw_data = LARGE.tobytes()[:-4]
    with pytest.raises(InvalidForwardModel, match="the tensor 'a' of element type 1 and shape"):
        training_graphs(broken, "mse")
    twice = type(MODEL)()
    twice.CopyFrom(MODEL)
    twice.graph.initializer.append(twice.graph.initializer[0])
    with pytest.raises(InvalidForwardModel):
        training_graphs(twice, "mse")


def test_an_order_is_that_of_the_authors_model() -> None:
    nodes = [node("Mul", ["x", "s"], ["h"]), node("MatMul", ["h", "a"], ["y"])]
    old = model_with(nodes, 13, s=SMALL, a=LARGE)
    assert training_graphs(old, "mse").parameter_names == ("s", "a")
