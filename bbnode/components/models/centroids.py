"""The model that a k-means gives: which centroid is nearest, as ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION


def assigning_model(centroids: npt.NDArray[np.float32]) -> ModelProto:
    """Return a model of x [N, F]: its squared "distances" [N, K], and its "cluster", int64 [N]."""
    node = helper.make_node
    clusters, features = centroids.shape
    tensors: dict[str, npt.NDArray[Any]] = {
        "centroids": centroids,
        "axes": np.array([1], np.int64),
        "first": np.array([0], np.int64),
        "two": np.array(2, np.float32),
    }
    nodes = [
        # From the mean of the centroids, so that little cancels out.
        node("ReduceMean", ["centroids", "first"], ["middle"]),
        node("Sub", ["x", "middle"], ["far"]),
        node("Sub", ["centroids", "middle"], ["near"]),
        node("Transpose", ["near"], ["turned"], perm=[1, 0]),
        node("MatMul", ["far", "turned"], ["products"]),
        node("Mul", ["far", "far"], ["far_squares"]),
        node("ReduceSum", ["far_squares", "axes"], ["far_norms"]),
        node("Mul", ["near", "near"], ["near_squares"]),
        node("ReduceSum", ["near_squares", "axes"], ["near_norms"], keepdims=0),
        node("Mul", ["products", "two"], ["doubled"]),
        node("Sub", ["near_norms", "doubled"], ["compared"]),
        node("Add", ["compared", "far_norms"], ["signed"]),
        node("Relu", ["signed"], ["distances"]),
        node("ArgMin", ["compared"], ["cluster"], axis=1, keepdims=0),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "nearest_centroid",
        [info("x", TensorProto.FLOAT, ["batch", features])],
        [
            info("distances", TensorProto.FLOAT, ["batch", clusters]),
            info("cluster", TensorProto.INT64, ["batch"]),
        ],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opset = [helper.make_opsetid("", ONNX_OPSET_VERSION)]
    return helper.make_model(graph, ir_version=FRAMEWORK_IR_VERSION, opset_imports=opset)
