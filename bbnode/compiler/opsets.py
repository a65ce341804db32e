"""Which opsets a body uses, and at which version.

Rule: a compiled function imports exactly what its ops use. Upstream ONNX is written "" here:
`onnx.checker` knows it under no other name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.compiler import flow
from bbnode.ir import keys, protos


def canonical(domain: str) -> str:
    """The domain as ONNX's own tools write it."""
    return "" if protos.is_onnx_domain(domain) else domain


def used_domains(nodes: Iterable[NodeProto]) -> set[str]:
    """Domains of all ops, nested graphs included."""
    found: set[str] = set()
    for node in nodes:
        found.add(canonical(node.domain))
        if node.attribute and flow.is_graph_op(node):
            for graph in flow.nested_graphs(node):
                found |= used_domains(graph.node)
    return found


def versions_of(*protos_with_imports: ModelProto | FunctionProto) -> dict[str, int]:
    """Imported versions by domain; an earlier proto goes before a later one."""
    found: dict[str, int] = {}
    for proto in protos_with_imports:
        for entry in proto.opset_import:
            found.setdefault(canonical(entry.domain), entry.version)
    return found


def version(domain: str, known: Mapping[str, int]) -> int:
    """What `known` imports, else the version that this package records."""
    fallback = keys.ONNX_OPSET_VERSION if not domain else keys.BB_OPSET_VERSION
    return known.get(domain, fallback)


def import_used(function: FunctionProto, known: Mapping[str, int]) -> dict[str, int]:
    """Make a function import what its ops use, sorted by domain; gives the same as a dict."""
    used = {domain: version(domain, known) for domain in used_domains(function.node)}
    imports = protos.opset_imports(used.items())
    del function.opset_import[:]
    function.opset_import.extend(imports)
    return used


def write_canonical_domains(nodes: Iterable[NodeProto]) -> None:
    """Write "" for `ai.onnx` on all ops, nested graphs included."""
    for node in nodes:
        if node.domain == keys.ONNX_DOMAIN:
            node.domain = ""
        if node.attribute and flow.is_graph_op(node):
            for graph in flow.nested_graphs(node):
                write_canonical_domains(graph.node)
