"""`validate_runtime_complete`: the last check before the bindings.

Rule: it changes nothing; the engine can install every partition that passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.gate_contracts import PartitionView, gate_contracts
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import RuntimeIncomplete, Where
from bbnode.compiler.rewriting.gates import destination_of
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import address, keys, opset
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_onnx_op, is_wire

TRANSPORTS = frozenset({keys.TRANSPORT_DATA, keys.TRANSPORT_TRIGGER_ONLY})


class ValidateRuntimeComplete(Pass):
    """Checks every partition; what is missing is RuntimeIncomplete.

    1. Every registered gate contract holds: peer-routed Sends have their TX gates, receivers
       their RX gates, and what carries a deadline its `DeadlineCheck`.
    2. Every wire op says its transport and its batch group.
    3. Every Send says where its data lands, and that is the site of a receiver of the program;
       every receiver has a site id, and says which class sends to it.
    4. Every op is of upstream ONNX, in the op table, or a function of the model; an op of a
       slot says the slot's id.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        functions = by_key(unit.bodies())
        sites = {site for main in unit.partitions.values() for site in _sites(main)}
        for main in unit.partitions.values():
            view = PartitionView.of(main)
            for contract in gate_contracts():
                for missing in contract.missing(view):
                    raise RuntimeIncomplete(missing=missing, target=main.name)
            for node in main.nodes:
                if is_wire(node):
                    _check(main, node, _wire_fault(node, sites))
        for function in functions.values():
            if function.domain != keys.BACKEND_SUBGRAPH_DOMAIN:
                for node in function.nodes:
                    if not is_onnx_op(node):
                        _check(function, node, _op_fault(node, functions))
        return {"preflight_errors": 0, "gate_contracts": len(gate_contracts())}


def _check(function: Function, node: OpNode, fault: str | None) -> None:
    if fault is not None:
        missing = f"op {node.name!r} ({node.op_type}) {fault}"
        raise RuntimeIncomplete(missing=missing, target=function.name, where=Where.of(node))


def _sites(main: Function) -> Iterator[bytes]:
    for node in main.nodes:
        if is_wire(node) and node.op_type in keys.RECV_OPS:
            site = node.metadata.get(keys.SITE_ID_KEY) or ""
            if is_natural(site) and int(site) < 1 << 64:
                yield address.site_suffix(int(site))


def _wire_fault(node: OpNode, sites: set[bytes]) -> str | None:
    meta = node.metadata
    if meta.get(keys.WIRE_TRANSPORT_KEY) not in TRANSPORTS:
        return "does not say what it transports (analyze_wire_edges)"
    if keys.BATCH_GROUP_KEY not in meta:
        return "has no batch group (analyze_wire_edges)"
    if node.op_type in keys.SEND_OPS:
        suffix = destination_of(node)
        if suffix is None:
            return "does not say where its data lands"
        return None if suffix in sites else "sends to a site that no receiver of the program has"
    if keys.SITE_ID_KEY not in meta:
        return "has no site id"
    if not meta.get(keys.SENDER_CLASS_KEY):
        return "does not say which class sends to it (analyze_wire_edges)"
    return None


def _op_fault(node: OpNode, functions: dict[FunctionKey, Function]) -> str | None:
    if call_key(node) in functions:
        return None
    spec = opset.lookup_op(node.domain, node.op_type)
    if spec is None:
        return f"is of the unknown type {node.domain}::{node.op_type}"
    if spec.role is not None and node.metadata.get(keys.SLOT_ID_KEY) is None:
        return "does not say the id of its slot"
    return None
