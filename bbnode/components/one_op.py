"""Graphs of one `ai.onnx` node: how a backend that runs graphs runs a single op.

Rule: a graph is made for dtypes and ranks, never for sizes, so that one prepared graph serves
all tensors of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

from bbnode.components.errors import BackendError
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_OPSET_VERSION
from bbnode.ir.values import Value


def one_op_model(
    op_type: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any
) -> ModelProto:
    """A graph of one node for tensors of these dtypes and ranks, whatever their sizes.

    An input that is None is left out of the node, and is no input of the graph.

    Raises:
        BackendError: ONNX knows no such op, or refuses these dtypes or ranks for it.
    """
    names = ["" if value is None else f"in{i}" for i, value in enumerate(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    infos = []
    for name, value in zip(names, inputs, strict=True):
        if value is None:
            continue
        array = np.asarray(value)
        dims = [f"{name}.{axis}" for axis in range(array.ndim)]
        elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos.append(helper.make_tensor_value_info(name, elem_type, dims))
    try:
        node = helper.make_node(op_type, names, results, name=op_type, **attributes)
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(op_type, ONNX_OPSET_VERSION, ""),
            node,
            {info.name: info.type for info in infos},
            opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
            ir_version=FRAMEWORK_IR_VERSION,
        )
    except (
        onnx.checker.ValidationError,
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        TypeError,
        ValueError,
    ) as error:
        given = [str(np.asarray(v).dtype) for v in inputs if v is not None]
        raise BackendError(
            f"{op_type} of {given}: {error}; see the op's page in the ONNX operator list "
            f"(opset {ONNX_OPSET_VERSION})"
        ) from error
    graph = helper.make_graph(
        [node], op_type, infos, [helper.make_value_info(name, types[name]) for name in results]
    )
    return helper.make_model(
        graph,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )
