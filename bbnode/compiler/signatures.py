"""What an op may look like: its ports by our op table, ONNX's schemas, or a function's formals.

Rule: one answer for every kind of op, so that `validate` checks all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import onnx

from bbnode.compiler.flow import ONNX_ML_DOMAIN, is_graph_op
from bbnode.ir import keys, opset, plain, protos
from bbnode.ir.plain import Function, FunctionKey, Node, Opset

UNBOUNDED = 2**31 - 1  # what ONNX's schemas say of a variadic port


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Names of the required inputs, and how many inputs and outputs there may be."""

    required_inputs: tuple[str, ...]
    max_inputs: int
    max_outputs: int
    domain: str  # as opset_import spells it
    version: int  # lowest opset version that has it in this form
    # Of ONNX's ops; `expand_ops` looks after ours. Kinds are AttributeProto.AttributeType.
    required_attributes: tuple[str, ...] = ()
    attribute_kinds: Mapping[str, int] | None = None
    min_outputs: int = 0  # only ONNX's schemas ask for some: nobody has to read what ours make


def opset_versions(*imports: Iterable[Opset]) -> dict[str, int]:
    """Version by domain ("" for `ai.onnx`), earlier opset_import lists first."""
    versions: dict[str, int] = {}
    for entries in imports:
        for entry in entries:
            domain = "" if protos.is_onnx_domain(entry.domain) else entry.domain
            versions.setdefault(domain, entry.version)
    return versions


def imported_domain(node: Node) -> str:
    """The domain under which `opset_import` lists the op."""
    return "" if protos.is_onnx_domain(node.domain) else node.domain


def signature_of(
    node: Node, table: Mapping[FunctionKey, Function], versions: Mapping[str, int]
) -> Signature | None:
    """The signature of an op, or None when nothing knows the op."""
    function = table.get(plain.call_key(node))
    if function is not None:
        return Signature(
            required_inputs=tuple(function.input),
            max_inputs=len(function.input),
            max_outputs=len(function.output),
            domain=node.domain,
            version=versions.get(node.domain, keys.BB_OPSET_VERSION),
        )
    if is_graph_op(node):
        domain = imported_domain(node)
        return _of_schema(domain, node.op_type, versions.get(domain, 0))
    if opset.lookup_op(node.domain, node.op_type) is None:
        return None  # not remembered: a package may bring it later
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
    """ONNX's schema of an op at an opset version ("" is `ai.onnx`), or None."""
    return protos.onnx_schema(op_type, version, domain)


@cache
def _of_schema(domain: str, op_type: str, version: int) -> Signature | None:
    # Without an import the version that the DSL records answers, so that the error is the
    # missing import and not an unknown op.
    assumed = keys.ONNX_OPSET_VERSION if domain != ONNX_ML_DOMAIN else UNBOUNDED
    schema = schema_of(domain, op_type, version or assumed)
    if schema is None:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return Signature(
        required_inputs=tuple(p.name for p in schema.inputs if p.option == single),
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
