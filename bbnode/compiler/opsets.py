"""Which opsets a body uses, and at which version.

Rule: a compiled function imports exactly what its ops use. Upstream ONNX is written "" here:
`onnx.checker` knows it under no other name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import GraphProto, NodeProto

from bbnode.compiler.analysis import order
from bbnode.ir import keys, plain, protos
from bbnode.ir.plain import Function, Node, Program


def canonical(domain: str) -> str:
    """The domain as ONNX's own tools write it."""
    return "" if protos.is_onnx_domain(domain) else domain


def used_domains(nodes: Iterable[Node]) -> set[str]:
    """Domains of all ops, nested graphs included."""
    found: set[str] = set()
    todo: list[Node | NodeProto] = list(nodes)
    while todo:
        node = todo.pop()
        found.add(node.domain)
        if node.attribute and order.is_graph_op(node):
            for graph in order.nested_graphs(node):
                todo += graph.node
    return {canonical(domain) for domain in found}


def versions_of(*importers: Program | Function) -> dict[str, int]:
    """Imported versions by domain; an earlier importer goes before a later one."""
    found: dict[str, int] = {}
    for importer in importers:
        for entry in importer.opset_import:
            found.setdefault(canonical(entry.domain), entry.version)
    return found


def version(domain: str, known: Mapping[str, int]) -> int:
    """What `known` imports, else the version that this package records."""
    fallback = keys.ONNX_OPSET_VERSION if not domain else keys.BB_OPSET_VERSION
    return known.get(domain, fallback)


def import_used(function: Function, known: Mapping[str, int]) -> dict[str, int]:
    """Make a function import what its ops use, sorted by domain; gives the same as a dict."""
    used = {domain: version(domain, known) for domain in used_domains(function.node)}
    function.opset_import = plain.sorted_opsets(used.items())
    return used


def write_canonical_domains(nodes: Iterable[Node]) -> None:
    """Write "" for `ai.onnx` on all ops, nested graphs included."""
    for node in nodes:
        if node.domain == keys.ONNX_DOMAIN:
            node.domain = ""
        if node.attribute and order.is_graph_op(node):
            order.rewrite_graphs(node, _has_long_domain, _shorten_domains)


def _has_long_domain(graph: GraphProto) -> bool:
    return any(node.domain == keys.ONNX_DOMAIN for node in order.all_nodes(graph))


def _shorten_domains(graph: GraphProto) -> None:
    for node in order.all_nodes(graph):
        if node.domain == keys.ONNX_DOMAIN:
            node.domain = ""
