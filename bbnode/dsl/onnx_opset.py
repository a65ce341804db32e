"""From the opset of a model to the one that programs are recorded in.

Rule: an op whose schema means the same at both versions is left alone, graphs of If and Loop
included; where one does not, ONNX's own converter rewrites the model, and what comes out is
checked again. A model that cannot be converted is refused with the ops that stand in the way.
"""

from __future__ import annotations

from functools import cache

import onnx
import onnx.version_converter
from onnx import ModelProto, NodeProto
from onnx.defs import OpSchema

from bbnode.dsl.errors import UnconvertibleModel, first_line
from bbnode.dsl.onnx.load import ONNX_FAILURES, check_whole
from bbnode.dsl.onnx_walk import ONNX_ML_DOMAIN, every_node
from bbnode.ir import keys, protos

# The last version before tree ensembles got a new op; ONNX Runtime runs it as well as older ones.
ML_OPSET_VERSION = 4

# Same ports and attributes, but another meaning: the shape of scale and bias (21), the default
# of a new attribute (16), an attribute that became required (18).
_MEANING_CHANGED = frozenset({"GroupNormalization", "RoiAlign", "Split"})

_OPTIONAL = OpSchema.FormalParameterOption.Optional


def to_recorded_opset(model: ModelProto, module: str) -> ModelProto:
    """The model at `keys.ONNX_OPSET_VERSION` (and `ML_OPSET_VERSION` where its ops allow it).

    Raises:
        UnconvertibleModel: ONNX has no way from the model's opset to that one.
    """
    versions = _versions(model)
    used = {_domain(node) for node in every_node(model)}
    target = keys.ONNX_OPSET_VERSION
    recorded = {}
    if ONNX_ML_DOMAIN in used:
        recorded[ONNX_ML_DOMAIN] = _ml_version(model, versions.get(ONNX_ML_DOMAIN, 1))
    if "" in used and (version := versions.get("", 1)) != target:
        changed = _changed(model, "", version, target)
        if changed:
            model = _converted(model, version, changed, module)
    del model.opset_import[:]
    recorded[""] = target
    model.opset_import.extend(protos.opset_imports(recorded.items()))
    return model


def _versions(model: ModelProto) -> dict[str, int]:
    return {
        "" if protos.is_onnx_domain(entry.domain) else entry.domain: entry.version
        for entry in model.opset_import
    }


def _domain(node: NodeProto) -> str:
    return "" if protos.is_onnx_domain(node.domain) else node.domain


def _ml_version(model: ModelProto, version: int) -> int:
    changed = _changed(model, ONNX_ML_DOMAIN, version, ML_OPSET_VERSION)
    return version if changed else ML_OPSET_VERSION


def _changed(model: ModelProto, domain: str, version: int, target: int) -> list[NodeProto]:
    """Ops that do not mean the same at `target` as they do at `version`."""
    return [
        node for node in every_node(model)
        if _domain(node) == domain and not _means_the_same(node, domain, version, target)
    ]  # fmt: skip


def _means_the_same(node: NodeProto, domain: str, version: int, target: int) -> bool:
    before = _schema(node.op_type, version, domain)
    after = _schema(node.op_type, target, domain)
    if before is None or after is None or after.deprecated:
        return False
    if before.since_version == after.since_version:
        return True
    if node.op_type in _MEANING_CHANGED:
        return False
    older, newer = sorted((before, after), key=lambda schema: int(schema.since_version))
    return (
        _only_added(older, newer)
        and all(attribute.name in after.attributes for attribute in node.attribute)
        and len(node.input) <= after.max_input
    )


def _only_added(older: OpSchema, newer: OpSchema) -> bool:
    """Whether the newer form only added types, optional inputs and optional attributes."""
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


@cache
def _schema(op_type: str, version: int, domain: str) -> OpSchema | None:
    return protos.onnx_schema(op_type, version, domain)


def _converted(
    model: ModelProto, version: int, changed: list[NodeProto], module: str
) -> ModelProto:
    target = keys.ONNX_OPSET_VERSION
    listed = ", ".join(dict.fromkeys(node.op_type for node in changed[:20]))
    try:
        made = onnx.version_converter.convert_version(model, target)
        check_whole(made)
    except (onnx.version_converter.ConvertError, *ONNX_FAILURES) as error:
        raise _unconvertible(version, f"{listed} ({first_line(error)})", module) from error
    reached = _versions(made).get("")
    if reached != target:
        raise _unconvertible(version, f"{listed} (the converter stopped at {reached})", module)
    return made


def _unconvertible(version: int, ops: str, module: str) -> UnconvertibleModel:
    target = keys.ONNX_OPSET_VERSION
    return UnconvertibleModel(
        f"the model is of ai.onnx opset {version} and cannot be brought to {target}, because of "
        f"{ops}; export it again with opset {target} (opset_version={target})",
        module,
    )
