"""Models of exporters' forms in float32, and their gradients against differences of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from tests.components.fakes import CTX, onnx_model

Port = tuple[Any, ...]  # name, dims, and the element type where it is not float32


def forward_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    tensors: dict[str, Any],
    *,
    opset: int = 21,
    producer: str = "",
    **more: Any,
) -> ModelProto:
    """Return a model; floats of `tensors` become float32, other arrays stay as they are."""

    def infos(ports: Sequence[Port]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, kind[0] if kind else TensorProto.FLOAT, dims)
            for name, dims, *kind in ports
        ]

    held = []
    for name, value in tensors.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        held.append(numpy_helper.from_array(array, name))
    graph = helper.make_graph(list(nodes), "g", infos(inputs), infos(outputs), held, **more)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets, producer_name=producer)


def model_with(forward: ModelProto, **settings: Any) -> OnnxModel:
    settings = {"loss": "mse", **settings}
    return onnx_model(OnnxModelConfig(model=forward.SerializeToString(), **settings))


def assert_slope(model: OnnxModel, x: Any, y: Any) -> None:
    """Compare the gradient along a random direction with a central difference of the loss."""
    grads, _ = model.gradient(CTX, x, y)
    start = np.array(model.params(CTX))
    way = np.random.default_rng(1).standard_normal(model.size).astype(np.float32)
    way /= np.linalg.norm(way)
    losses = []
    for step in (1e-2, -1e-2):
        model.load_parameters(CTX, start + np.float32(step) * way)
        losses.append(float(model.compute_loss(CTX, x, y)))
    model.load_parameters(CTX, start)
    wanted = (losses[0] - losses[1]) / 2e-2
    np.testing.assert_allclose(float(grads @ way), wanted, rtol=2e-2, atol=2e-3)
