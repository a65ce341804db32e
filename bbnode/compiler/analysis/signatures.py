"""Signatures of ops, from our op table, ONNX's schemas, or a function's formal parameters.

Rule: one form for every kind of op, so that `validate` checks all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx

from bbnode.ir import keys, opset
from bbnode.ir.graph import (
    Function,
    FunctionKey,
    OpNode,
    Program,
    call_key,
    is_onnx_op,
    sorted_opsets,
)
from bbnode.ir.onnx_file import onnx_schema

UNBOUNDED = 2**31 - 1  # the count that ONNX's schemas give for a variadic port


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Names of required inputs, and the allowed counts of inputs and outputs."""

    required_inputs: tuple[str, ...]
    max_inputs: int
    max_outputs: int
    domain: str  # as opset_import spells it
    version: int  # lowest opset version that has it in this form
    # Only for ONNX's ops: `expand_ops` checks ours. Kinds are AttributeProto.AttributeType.
    required_attributes: tuple[str, ...] = ()
    attribute_kinds: Mapping[str, int] | None = None
    # Only ONNX's schemas require outputs; the outputs of our ops may all stay unread.
    min_outputs: int = 0
    required_outputs: tuple[str, ...] = ()
    min_inputs: int = 0  # also counts a variadic last port


def versions_of(*importers: Program | Function) -> dict[str, int]:
    """Return imported versions by domain ("" for `ai.onnx`); earlier importers take precedence."""
    versions: dict[str, int] = {}
    for importer in importers:
        for entry in importer.opset_imports:
            versions.setdefault(canonical(entry.domain), entry.version)
    return versions


def canonical(domain: str) -> str:
    """Return the domain as ONNX's own tools write it."""
    return "" if domain == keys.ONNX_DOMAIN else domain


def signature_of(
    node: OpNode, table: Mapping[FunctionKey, Function], versions: Mapping[str, int]
) -> Signature | None:
    """Return the signature of an op, or None for an unknown op."""
    function = table.get(call_key(node))
    if function is not None:
        return Signature(
            required_inputs=tuple(function.inputs),
            max_inputs=len(function.inputs),
            max_outputs=len(function.outputs),
            domain=node.domain,
            version=versions.get(node.domain, keys.BB_OPSET_VERSION),
        )
    if is_onnx_op(node):
        domain = canonical(node.domain)
        if domain == keys.RUNTIME_DOMAIN:  # schemas of this domain are known to the backend only
            return Signature(
                required_inputs=(),
                max_inputs=UNBOUNDED,
                max_outputs=UNBOUNDED,
                domain=domain,
                version=versions.get(domain, keys.RUNTIME_OPSET_VERSION),
            )
        return _of_schema(domain, node.op_type, versions.get(domain, 0))
    if opset.lookup_op(node.domain, node.op_type) is None:
        return None  # not cached: a package may bring it later
    return _of_table(node.domain, node.op_type)


@cache
def _of_table(domain: str, op_type: str) -> Signature | None:
    spec = opset.lookup_op(domain, op_type)
    if spec is None:
        return None
    return Signature(
        required_inputs=tuple(p.name for p in spec.inputs if not p.optional and not p.variadic),
        max_inputs=UNBOUNDED if any(p.variadic for p in spec.inputs) else len(spec.inputs),
        max_outputs=UNBOUNDED if any(p.variadic for p in spec.outputs) else len(spec.outputs),
        domain=domain,
        version=spec.version,
    )


@cache
def schema_of(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """Return ONNX's schema of an op at an opset version ("" is `ai.onnx`), or None."""
    return onnx_schema(op_type, version, domain)


@cache
def _of_schema(domain: str, op_type: str, version: int) -> Signature | None:
    # Without an import the version that the DSL records is assumed, so that the error is the
    # missing import and not an unknown op.
    assumed = keys.ONNX_OPSET_VERSION if domain != keys.ONNX_ML_DOMAIN else UNBOUNDED
    schema = schema_of(domain, op_type, version or assumed)
    if schema is None:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return Signature(
        required_inputs=tuple(p.name for p in schema.inputs if p.option == single),
        min_inputs=schema.min_input,
        required_outputs=tuple(p.name for p in schema.outputs if p.option == single),
        max_inputs=schema.max_input,
        max_outputs=schema.max_output,
        min_outputs=schema.min_output,
        required_attributes=tuple(sorted(n for n, a in schema.attributes.items() if a.required)),
        # ONNX's stubs do not say that the kind is an enum.
        attribute_kinds={
            name: int(a.type.value)  # type: ignore[attr-defined]
            for name, a in schema.attributes.items()
        },
        domain=domain,
        version=schema.since_version,
    )


# --- the opsets that a body uses ------------------------------------------------------------
#
# A compiled function imports exactly what its ops use. Upstream ONNX is written "" there:
# `onnx.checker` knows it under no other name.


def used_domains(nodes: Sequence[OpNode]) -> set[str]:
    """Return the domains of all ops, nested graphs included."""
    domains = {node.domain for node in nodes}
    for node in nodes:
        for graph in node.graphs:
            domains.update(inner.domain for inner in graph.all_nodes())
    return set(map(canonical, domains))


def version(domain: str, known: Mapping[str, int]) -> int:
    """Return the version that `known` imports, else the one that the DSL records."""
    fallback = keys.ONNX_OPSET_VERSION if not domain else keys.BB_OPSET_VERSION
    return known.get(domain, fallback)


def import_used(function: Function, known: Mapping[str, int]) -> dict[str, int]:
    """Set a function's imports to the opsets of its ops, sorted by domain; return them."""
    used = {domain: version(domain, known) for domain in used_domains(function.nodes)}
    function.opset_imports = sorted_opsets(used.items())
    return used


def write_canonical_domains(nodes: Iterable[OpNode]) -> None:
    """Write "" for `ai.onnx` on all ops, nested graphs included."""
    for node in nodes:
        if node.domain == keys.ONNX_DOMAIN:
            _shorten_domain(node)
        if node.graphs:
            node.change_graphs(_has_long_domain, _shorten_domain)


def _has_long_domain(node: OpNode) -> bool:
    return node.domain == keys.ONNX_DOMAIN


def _shorten_domain(node: OpNode) -> None:
    node.domain = ""
