"""The comparison of an op's meaning in two versions of ONNX's opsets.

Rule: only ONNX's schemas decide, and a short list of ops whose schemas do not show the change.
"""

from __future__ import annotations

from onnx import ModelProto
from onnx.defs import OpSchema

from bbnode.ir.graph import OpNode, is_onnx_domain
from bbnode.ir.onnx_file import onnx_schema

# Same ports and attributes, but another meaning from a version on: the shape of scale and bias, the
# default of a new attribute, another order of the inputs, what an empty tensor means (13), an
# attribute that became required, and how a slope is broadcast.
_MEANING_CHANGED = {
    "GroupNormalization": (21,), "PRelu": (7,), "Resize": (11, 13), "RoiAlign": (16,),
    "Split": (18,),
}  # fmt: skip
_OPTIONAL = OpSchema.FormalParameterOption.Optional


def means_the_same(node: OpNode, version: int, target: int) -> bool:
    """Return True if an op of upstream ONNX has the same meaning at `target` as at `version`.

    Additions of a newer version (types, optional inputs, optional attributes) change nothing.
    """
    if version == target:
        return True
    before, after = (onnx_schema(node.op_type, v, _short(node.domain)) for v in (version, target))
    if before is None or after is None or after.deprecated:
        return False
    if before.since_version == after.since_version:
        return True
    older, newer = sorted((before, after), key=lambda schema: int(schema.since_version))
    changes = _MEANING_CHANGED.get(node.op_type, ())
    if any(older.since_version < change <= newer.since_version for change in changes):
        return False
    return (
        _only_added(older, newer)
        and all(name in after.attributes for name in node.attributes)
        and len(node.inputs) <= after.max_input
    )


def onnx_version(model: ModelProto) -> int:
    """Return the version of `ai.onnx` that a model imports, 0 if it imports none."""
    return next((int(o.version) for o in model.opset_import if is_onnx_domain(o.domain)), 0)


def relabelled(model: ModelProto, version: int) -> ModelProto:
    """Return a copy of a model that imports another version of `ai.onnx`, with the same ops."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for entry in copy.opset_import:
        if is_onnx_domain(entry.domain):
            entry.version = version
    return copy


def _only_added(older: OpSchema, newer: OpSchema) -> bool:
    """Return True if the newer form only added types, optional inputs and optional attributes."""
    for name, attribute in older.attributes.items():
        kept = newer.attributes.get(name)
        if kept is None or kept.type != attribute.type or kept.required != attribute.required:
            return False
        before, after = attribute.default_value, kept.default_value
        if before.SerializeToString() != after.SerializeToString():
            return False
    if any(a.required for n, a in newer.attributes.items() if n not in older.attributes):
        return False
    if [port.option for port in older.outputs] != [port.option for port in newer.outputs]:
        return False
    if len(older.inputs) > len(newer.inputs):
        return False
    common = zip(older.inputs, newer.inputs, strict=False)
    kept_ports = all(b.option in (a.option, _OPTIONAL) for a, b in common)
    return kept_ports and all(p.option == _OPTIONAL for p in newer.inputs[len(older.inputs) :])


def _short(domain: str) -> str:
    return "" if is_onnx_domain(domain) else domain
