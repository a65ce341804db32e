"""Bodies that are called from several places: equal ones are one, named by their content.

Rule: two bodies are equal when their canonical forms are: values and ops numbered in order
(`__hoist_in_<i>`, `__hoist_out_<j>`, `__hoist_v_<n>`), callees by their own hashes, and nothing
that only speaks of the author's source (op names, source lines, Module names). Equal bodies
have equal names on every machine and in every program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.compiler import flow
from bbnode.compiler.content_hash import HEX_DIGITS, function_content
from bbnode.compiler.function_table import (
    FunctionKey,
    by_key,
    callees_first,
    calls_of,
    is_bootstrap,
)
from bbnode.ir import keys, protos

# What an op carries for readers only. (`source_line` is no content of any hash.)
_FOR_READERS = (keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY)


def join_equal(model: ModelProto, *, typed_only: bool) -> int:
    """Let equal sub-Module bodies be one function, which all of their callers call.

    Args:
        model: `functions` holds the root first, then the bodies; those that leave are deleted.
        typed_only: join only those whose inputs and outputs have leaf types. As long as types
            are not solved, two bodies that look equal may still become different ones.

    Returns:
        How many functions left the model.
    """
    table = by_key(model.functions)
    candidates = {
        key for key in _sub_modules(model) if not typed_only or _has_leaf_ports(table[key])
    }
    if len(candidates) < 2:
        return 0
    calls = {key: [k for _, k in calls_of(body, table)] for key, body in table.items()}
    first_of: dict[str, FunctionKey] = {}
    hashes: dict[FunctionKey, str] = {}
    joined: dict[FunctionKey, FunctionKey] = {}
    for key in callees_first(table, calls):
        if joined:
            _redirect(table[key], joined)
        if key in candidates:
            hashes[key] = body_hash(table[key], hashes)
            first = first_of.setdefault(hashes[key], key)
            if first != key:
                joined[key] = first
    for index in range(len(model.functions) - 1, -1, -1):
        if protos.function_key(model.functions[index]) in joined:
            del model.functions[index]
    return len(joined)


def name_by_content(model: ModelProto) -> int:
    """Call each sub-Module body `Hoist_<Module>_<body hash>`; gives how many."""
    table = by_key(model.functions)
    wanted = _sub_modules(model)
    calls = {key: [k for _, k in calls_of(body, table)] for key, body in table.items()}
    hashes: dict[FunctionKey, str] = {}
    renamed: dict[FunctionKey, FunctionKey] = {}
    for key in callees_first(table, calls):
        body = table[key]
        if key in wanted:
            hashes[key] = body_hash(body, hashes)
        if renamed:
            _redirect(body, renamed)
        if key in hashes and not body.name.startswith(keys.HOIST_PREFIX):
            body.name = f"{keys.HOIST_PREFIX}{body.name}_{hashes[key]}"
            renamed[key] = protos.function_key(body)
    return len(renamed)


def body_hash(body: FunctionProto, callees: Mapping[FunctionKey, str]) -> str:
    """16 hex digits over the canonical form of a body.

    Args:
        body: the function.
        callees: hashes of the functions that it calls, by what the calls name them.
    """
    bare = FunctionProto()
    bare.CopyFrom(body)
    bare.name = bare.doc_string = ""
    names = _positions(bare)
    ops = {node.name: f"__hoist_op_{index}" for index, node in enumerate(bare.node)}
    for node in bare.node:
        called = callees.get(protos.call_key(node))
        if called is not None:
            node.op_type = called
        _canonical(node, names, ops)
    for port in (bare.input, bare.output):
        renamed = [names.get(name, name) for name in port]
        del port[:]
        port.extend(renamed)
    for info in bare.value_info:
        info.name = names.get(info.name, info.name)
    infos = sorted(bare.value_info, key=lambda info: info.name)
    imports = sorted(bare.opset_import, key=lambda entry: entry.domain)
    fresh = FunctionProto(value_info=infos, opset_import=imports)
    del bare.value_info[:], bare.opset_import[:]
    bare.MergeFrom(fresh)
    # Home, roles of slots and concrete types stand in the function's metadata.
    metadata = sorted((entry.key, entry.value) for entry in bare.metadata_props)
    text = function_content(bare) + repr(metadata)
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]


def _positions(body: FunctionProto) -> dict[str, str]:
    """Canonical names of the values that a body takes and makes."""
    names = {name: f"__hoist_in_{index}" for index, name in enumerate(body.input)}
    for index, name in enumerate(body.output):
        names.setdefault(name, f"__hoist_out_{index}")
    count = 0
    for node in body.node:
        for name in node.output:
            if name and name not in names:
                names[name] = f"__hoist_v_{count}"
                count += 1
    return names


def _canonical(node: NodeProto, names: Mapping[str, str], ops: Mapping[str, str]) -> None:
    flow.rename_node(node, names)
    node.name = ops[node.name]
    node.doc_string = ""
    for key in _FOR_READERS:
        protos.del_meta(node, key)
    waits = flow.split_names(protos.get_meta(node, keys.CONTROL_AFTER_KEY))
    if waits:
        text = ",".join(ops.get(name, name) for name in waits)
        protos.set_meta(node, keys.CONTROL_AFTER_KEY, text)


def _redirect(body: FunctionProto, renamed: Mapping[FunctionKey, FunctionKey]) -> None:
    for node in body.node:
        target = renamed.get(protos.call_key(node))
        if target is not None:
            node.op_type = target[1]


def _sub_modules(model: ModelProto) -> set[FunctionKey]:
    """Bodies of Modules that others call and that send nothing."""
    return {
        protos.function_key(body)
        for body in model.functions[1:]
        if body.domain == keys.MODULE_DOMAIN
        and not body.overload
        and not is_bootstrap(body)
        and not any(protos.is_wire(node) for node in body.node)
    }


def _has_leaf_ports(body: FunctionProto) -> bool:
    known = protos.value_types(body)
    ports = (*body.input, *body.output)
    return all(name in known and known[name].is_leaf for name in ports)
