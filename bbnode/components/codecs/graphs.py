"""The graphs that codecs run on the bound backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION

Ports = Mapping[str, tuple[int, list[Any]]]


@cache
def quantize_model(levels: int) -> ModelProto:
    """Return the graph of blocks [B, N] to levels int8 [B, N] and scales [B, 1]."""
    consts = {
        "axes": np.array([1], np.int64),
        "most": np.array(levels, np.float32),
        "least": np.array(-levels, np.float32),
        "zero": np.array(0, np.float32),
        "one": np.array(1, np.float32),
    }
    make = helper.make_node
    nodes = [
        make("Abs", ["x"], ["abs"]),
        make("ReduceMax", ["abs", "axes"], ["largest"], keepdims=1),
        make("Div", ["largest", "most"], ["scale"]),
        make("Greater", ["scale", "zero"], ["some"]),
        make("Where", ["some", "scale", "one"], ["by"]),
        make("Div", ["x", "by"], ["unit"]),
        make("Round", ["unit"], ["rounded"]),
        make("Clip", ["rounded", "least", "most"], ["level"]),
        make("Cast", ["level"], ["code"], to=TensorProto.INT8),
    ]
    return _model(
        "quantize", nodes, {"x": (TensorProto.FLOAT, ["b", "n"])},
        {"code": (TensorProto.INT8, ["b", "n"]), "scale": (TensorProto.FLOAT, ["b", 1])}, consts,
    )  # fmt: skip


@cache
def dequantize_model() -> ModelProto:
    """Return the graph of levels int8 [B, N] and scales [B, 1] to blocks [B, N]."""
    make = helper.make_node
    nodes = [
        make("Cast", ["code"], ["level"], to=TensorProto.FLOAT),
        make("Mul", ["level", "scale"], ["x"]),
    ]
    return _model(
        "dequantize", nodes,
        {"code": (TensorProto.INT8, ["b", "n"]), "scale": (TensorProto.FLOAT, ["b", 1])},
        {"x": (TensorProto.FLOAT, ["b", "n"])}, {},
    )  # fmt: skip


@cache
def top_k_model() -> ModelProto:
    """Return the graph of x [n] and k [1] to the indices of the k largest magnitudes, [k]."""
    make = helper.make_node
    nodes = [
        make("Abs", ["x"], ["abs"]),
        make("TopK", ["abs", "k"], ["values", "indices"], axis=0, largest=1, sorted=1),
    ]
    return _model(
        "top_k", nodes, {"x": (TensorProto.FLOAT, ["n"]), "k": (TensorProto.INT64, [1])},
        {"indices": (TensorProto.INT64, ["m"])}, {},
    )  # fmt: skip


def _model(
    name: str, nodes: list[Any], inputs: Ports, outputs: Ports, consts: Mapping[str, Any]
) -> ModelProto:
    def infos(ports: Ports) -> list[Any]:
        return [helper.make_tensor_value_info(n, kind, dims) for n, (kind, dims) in ports.items()]

    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
    graph = helper.make_graph(
        nodes, name, infos(inputs), infos(outputs),
        [numpy_helper.from_array(value, each) for each, value in consts.items()],
    )  # fmt: skip
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )
