"""Forward graphs of multilayer perceptrons, as plain ONNX.

Rule: the graph is a function of the arguments alone: same arguments, same bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.ir.errors import AuthorError
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION, PRODUCER_NAME

# Activations that keep about half of the variance, and so want He's factor 2.
_RECTIFIERS = frozenset({"Relu", "LeakyRelu", "Gelu"})
_OTHERS = frozenset({"Sigmoid", "Tanh", "Identity", "Softplus"})


def mlp_forward(
    layer_sizes: Sequence[int] = (64, 64, 10), activation: str = "Relu", seed: int = 0
) -> ModelProto:
    """Return an MLP with `activation` between its layers and logits at the end.

    Args:
        layer_sizes: width of the input, of each hidden layer, and of the output; at least two.
        activation: op type of an elementwise ONNX op: Relu, LeakyRelu, Gelu, Sigmoid, Tanh,
            Softplus or Identity.
        seed: of the initial weights.

    Returns:
        Input "x" [batch, layer_sizes[0]] float32, output "logits" [batch, layer_sizes[-1]]
        float32; initializers "layer<i>.weight" [in, out] and "layer<i>.bias" [out], in order.

    Raises:
        AuthorError: fewer than two layers, a width below 1, or an unknown activation.
    """
    sizes = [int(size) for size in layer_sizes]
    if len(sizes) < 2 or min(sizes) < 1:
        raise AuthorError(
            f"layer_sizes {tuple(layer_sizes)} do not make an MLP; give at least an input and an "
            "output width, each 1 or more, e.g. (64, 64, 10)"
        )
    if activation not in _RECTIFIERS | _OTHERS:
        known = ", ".join(sorted(_RECTIFIERS | _OTHERS))
        raise AuthorError(f"unknown activation {activation!r}; choose one of {known}")

    rng = np.random.default_rng(seed)
    nodes, tensors = [], []
    value = "x"
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        last = index == len(sizes) - 2
        weight, bias = f"layer{index}.weight", f"layer{index}.bias"
        rectified = not last and activation in _RECTIFIERS
        tensors.append(
            numpy_helper.from_array(_initial_weight(rng, fan_in, fan_out, rectified), weight)
        )
        tensors.append(numpy_helper.from_array(np.zeros(fan_out, np.float32), bias))
        out = "logits" if last else f"layer{index}.out"
        nodes.append(
            helper.make_node("Gemm", [value, weight, bias], [out], name=f"layer{index}.gemm")
        )
        if not last:
            value = f"layer{index}.active"
            nodes.append(helper.make_node(activation, [out], [value], name=f"layer{index}.act"))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", sizes[0]])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", sizes[-1]])],
        tensors,
    )
    return helper.make_model(
        graph,
        producer_name=PRODUCER_NAME,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )


def _initial_weight(
    rng: np.random.Generator, fan_in: int, fan_out: int, rectified: bool
) -> npt.NDArray[np.float32]:
    """Return weights, uniform on [-limit, limit], shape [fan_in, fan_out].

    Before a rectifier the variance is 2 / fan_in (He et al., 2015, arXiv:1502.01852, eq. 10);
    elsewhere 2 / (fan_in + fan_out) (Glorot and Bengio, AISTATS 2010, eq. 16). A uniform
    distribution has the variance limit^2 / 3.
    """
    variance = 2.0 / fan_in if rectified else 2.0 / (fan_in + fan_out)
    limit = math.sqrt(3.0 * variance)
    return rng.uniform(-limit, limit, size=(fan_in, fan_out)).astype(np.float32)
