"""What graphs inside of an op have to be: the branches of an If, the body of a Loop.

Rule: no pass looks into them, so that ONNX's own checker says here what is wrong with them, and
not the backend that gets them at last.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import FunctionProto, GraphProto

from bbnode.compiler.analysis import order
from bbnode.compiler.analysis.signatures import schema_of
from bbnode.compiler.errors import ExpansionFailed, UnknownOp, Where
from bbnode.compiler.opsets import write_canonical_domains
from bbnode.ir import protos
from bbnode.ir.plain import Node
from bbnode.ir.plain_proto import proto_of_node


def check_graphs(node: Node, versions: Mapping[str, int], ir_version: int) -> None:
    """Raise UnknownOp or ExpansionFailed, naming the op that holds the graph.

    Args:
        node: an op with graphs in its attributes.
        versions: opset versions by domain, upstream ONNX as "".
        ir_version: the model's.
    """
    for graph in order.nested_graphs(node):
        _check_ops(node, graph, versions)
    context = onnx.checker.C.CheckerContext()
    context.ir_version = ir_version
    context.opset_imports = dict(versions)
    # In a function of its own, the op has its values around it, whatever their types are.
    own = node.copy()
    write_canonical_domains([own])
    alone = FunctionProto(name="alone", domain="alone", node=[proto_of_node(own)])
    alone.input.extend(dict.fromkeys(order.data_reads(node)))
    alone.output.extend(name for name in node.output if name)
    alone.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in versions.items())
    try:
        onnx.checker.check_function(alone, context)
    except onnx.checker.ValidationError as error:
        raise ExpansionFailed(
            op_type=node.op_type,
            domain=node.domain,
            reason=f"its graph is not valid: {str(error).strip().splitlines()[0]:.300}",
            node_name=node.name,
            where=Where.of(node),
        ) from error


def _check_ops(node: Node, graph: GraphProto, versions: Mapping[str, int]) -> None:
    todo = [graph]
    while todo:
        for inner in todo.pop().node:
            domain = "" if protos.is_onnx_domain(inner.domain) else inner.domain
            if schema_of(domain, inner.op_type, versions.get(domain, 0)) is None:
                raise UnknownOp(
                    node_name=f"{node.name} (its op {inner.name!r:.80})",
                    op_type=inner.op_type,
                    domain=inner.domain,
                    where=Where.of(node),
                )
            todo += order.nested_graphs(inner)
