"""Other forms of a graph for a runtime that lacks the kernel of one of its ops.

Rule: the numbers stay those that ONNX defines. An op that ONNX defines by other ops becomes these;
else the whole graph is said to be of the opset before the op's last change, where each of its ops
means the same there.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.ir.expansion import is_function_op, without_op
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.onnx_file import onnx_schema, subgraph_of
from bbnode.ir.versions import means_the_same, onnx_version, relabelled


def lowered(model: ModelProto, op_type: str) -> ModelProto | None:
    """Return a model that means the same without the newest form of an `ai.onnx` op, or None.

    Args:
        model: a model with that op in its graph; it is not changed.
        op_type: the op that the runtime has no kernel for.
    """
    version = onnx_version(model)
    schema = onnx_schema(op_type, version, "")
    if schema is None:
        return None
    if is_function_op(op_type, version):
        return _expanded(model, op_type)
    target = int(schema.since_version) - 1
    other: ModelProto | None = model
    for newer in _changed(model, version, target):
        other = _expanded(other, newer) if other and is_function_op(newer, version) else None
    if target < 1 or other is None or _changed(other, version, target):
        return None
    return relabelled(other, target)


def _changed(model: ModelProto, version: int, target: int) -> list[str]:
    """Return the op types that do not mean the same at `target`, in the order of the graph."""
    nodes = subgraph_of(model.graph).all_nodes()
    return list(
        dict.fromkeys(
            node.op_type
            for node in nodes
            if is_onnx_domain(node.domain) and not means_the_same(node, version, target)
        )
    )


def _expanded(model: ModelProto, op_type: str) -> ModelProto | None:
    try:
        made = without_op(model, op_type)
    except (RuntimeError, ValueError):  # whatever ONNX's C++ parts refuse
        return None
    left = any(node.op_type == op_type for node in subgraph_of(made.graph).all_nodes())
    return None if left else made
