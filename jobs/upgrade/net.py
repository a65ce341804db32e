"""The network of the first versions, and that of the third, which has one layer more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

FEATURES, HIDDEN, CLASSES = 20, 64, 4


def network(*, deeper: bool) -> ModelProto:
    """Return a network from numbers [N, 20] to logits [N, 4].

    The layer that the deeper one has adds what it makes of its input to it, and begins with zeros:
    whoever has trained the other layers loses nothing by it.
    """
    rng = np.random.default_rng(0)
    weights = {
        "hidden.weight": drawn(rng, FEATURES, HIDDEN),
        "hidden.bias": np.zeros(HIDDEN),
        "out.weight": drawn(rng, HIDDEN, CLASSES),
        "out.bias": np.zeros(CLASSES),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "hidden.weight", "hidden.bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
    ]
    last = "active"
    if deeper:
        weights |= {"more.weight": np.zeros((HIDDEN, HIDDEN)), "more.bias": np.zeros(HIDDEN)}
        nodes += [
            helper.make_node("Gemm", ["active", "more.weight", "more.bias"], ["more"]),
            helper.make_node("Tanh", ["more"], ["bent"]),
            helper.make_node("Add", ["active", "bent"], ["sum"]),
        ]
        last = "sum"
    nodes.append(helper.make_node("Gemm", [last, "out.weight", "out.bias"], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def drawn(rng: np.random.Generator, inputs: int, outputs: int) -> npt.NDArray[Any]:
    """Return the first weights of a layer."""
    return rng.normal(scale=np.sqrt(2 / inputs), size=(inputs, outputs))
