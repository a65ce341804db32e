"""Ops without a gradient rule that ONNX defines by other ops.

Rule: such an op is replaced by its definition only where a gradient has to pass it; an op with a
rule, and one that nothing trained flows through, stays what the author wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import ModelProto, NodeProto

from bbnode.components.autodiff.builder import inferred_types, subgraphs
from bbnode.components.autodiff.reverse import active_values
from bbnode.components.autodiff.table import is_piecewise_constant, lookup
from bbnode.ir.expansion import is_function_op, without_op
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.versions import onnx_version


def expand_functions(model: ModelProto, wanted: Collection[str]) -> ModelProto:
    """Return a model whose ops between `wanted` and its outputs have rules, as far as possible.

    Args:
        model: without local functions; it is not changed.
        wanted: names of the values whose gradient is wanted.

    Raises:
        RuntimeError or ValueError: ONNX refuses to expand an op.
    """
    tried: set[str] = set()
    while True:
        lacking = [op for op in _without_rule(model, wanted) if op not in tried]
        if not lacking:
            return model
        for op_type in lacking:
            tried.add(op_type)  # a definition for other dtypes leaves it there
            model = without_op(model, op_type)


def _without_rule(model: ModelProto, wanted: Collection[str]) -> list[str]:
    """Return the function ops without a rule that gradients pass, in the order of the graph."""
    nodes = list(_all_nodes(model.graph.node))
    version = onnx_version(model)
    lacking = {
        node.op_type
        for node in nodes
        if is_onnx_domain(node.domain)
        and lookup("", node.op_type) is None
        and not is_piecewise_constant("", node.op_type)
        and is_function_op(node.op_type, version)
    }
    if not lacking:
        return []
    active = active_values(model.graph.node, inferred_types(model), wanted)
    passed = [node for node in model.graph.node if not active.isdisjoint(node.output)]
    return list(
        dict.fromkeys(node.op_type for node in _all_nodes(passed) if node.op_type in lacking)
    )


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)
