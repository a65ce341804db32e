"""Targets of a compiled model.

Rule: a target is a function with metadata `target = "true"`; what it needs is what it calls,
every bootstrap, and its own entries of the binding table.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto, ModelProto

from bbnode.ir import keys, protos
from bbnode.ir.plain import FunctionKey
from bbnode.ir.seal import seal


def target_names(model: ModelProto) -> tuple[str, ...]:
    """Names of the targets, in the model's order."""
    return tuple(f.name for f in model.functions if _is_target(f))


def split_targets(model: ModelProto) -> dict[str, ModelProto]:
    """Each target of a compiled model as a compiled model of its own."""
    return {f.name: _only(model, f) for f in model.functions if _is_target(f)}


def _is_target(function: FunctionProto) -> bool:
    return protos.get_meta(function, keys.TARGET_KEY) is not None


def _is_bootstrap(function: FunctionProto) -> bool:
    return protos.get_meta(function, keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE


def _called_from(model: ModelProto, roots: Iterable[FunctionProto]) -> set[FunctionKey]:
    """Keys of the functions that `roots` call, directly or not."""
    table = {protos.function_key(function): function for function in model.functions}
    found: set[FunctionKey] = set()
    todo = list(roots)
    while todo:
        calls = {protos.call_key(node) for node in todo.pop().node} & table.keys()
        todo.extend(table[key] for key in calls - found)
        found |= calls
    return found


def _only(model: ModelProto, main: FunctionProto) -> ModelProto:
    part = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    part.graph.name = model.graph.name
    bootstraps = [f for f in model.functions if _is_bootstrap(f)]
    # By key: a protobuf's wrapper, and so its id, lasts only as long as somebody holds it.
    needed = {protos.function_key(f) for f in bootstraps}
    needed |= _called_from(model, [main, *bootstraps])
    part.functions.append(main)
    part.functions.extend(f for f in model.functions if protos.function_key(f) in needed)
    part.opset_import.extend(model.opset_import)
    own = keys.BINDING_PREFIX + main.name + "."
    for entry in model.metadata_props:
        if not entry.key.startswith(keys.BINDING_PREFIX) or entry.key.startswith(own):
            part.metadata_props.add(key=entry.key, value=entry.value)
    seal(part)
    return part
