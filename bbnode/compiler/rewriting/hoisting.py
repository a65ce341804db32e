"""Deduplication of called bodies: equal ones become one, named by its content.

Rule: two bodies are equal if their canonical forms are: values and ops numbered in order
(`__hoist_in_<i>`, `__hoist_out_<j>`, `__hoist_v_<n>`), callees by their own hashes, without
anything that only describes the author's source (op names, source lines, Module names). Equal
bodies have equal names on every machine and in every program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from bbnode.compiler.analysis.content_hash import HEX_DIGITS, AttributePrints, function_digest
from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of, is_bootstrap
from bbnode.compiler.analysis.order import control_of, rename_node
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, OpNode, Program, call_key, is_wire


def join_equal(unit: CompilationUnit, *, typed_only: bool) -> int:
    """Merge equal sub-Module bodies into one function, which all of their callers call.

    Args:
        unit: its program's functions are the root, then the bodies; merged ones are dropped.
        typed_only: merge only bodies whose inputs and outputs have leaf types. Before types
            are solved, two bodies that look equal may still become different ones.

        Returns:
            The number of functions that were dropped.
    """
    table = by_key(unit.program.functions)
    candidates = {
        key for key in _sub_modules(unit.program) if not typed_only or _has_leaf_ports(table[key])
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
            hashes[key] = body_hash(table[key], hashes, unit.prints)
            first = first_of.setdefault(hashes[key], key)
            if first != key:
                joined[key] = first
    program = unit.program
    program.functions = [f for f in program.functions if f.key not in joined]
    return len(joined)


def name_by_content(unit: CompilationUnit) -> int:
    """Name each sub-Module body `Hoist_<Module>_<body hash>`; return the count."""
    wanted = _sub_modules(unit.program)
    if not wanted:
        return 0
    table = by_key(unit.program.functions)
    calls = {key: [k for _, k in calls_of(body, table)] for key, body in table.items()}
    hashes: dict[FunctionKey, str] = {}
    renamed: dict[FunctionKey, FunctionKey] = {}
    for key in callees_first(table, calls):
        body = table[key]
        if key in wanted:
            hashes[key] = body_hash(body, hashes, unit.prints)
        if renamed:
            _redirect(body, renamed)
        if key in hashes and not body.name.startswith(keys.HOIST_PREFIX):
            body.name = f"{keys.HOIST_PREFIX}{body.name}_{hashes[key]}"
            renamed[key] = body.key
    return len(renamed)


def body_hash(body: Function, callees: Mapping[FunctionKey, str], prints: AttributePrints) -> str:
    """Return 16 hex digits over the canonical form of a body.

    Args:
        body: the function.
        callees: hashes of the functions that it calls, by key.
        prints: cache of attribute contents.
    """
    bare = body.copy()
    bare.doc_string = ""
    names = _positions(bare)
    ops = {node.name: f"__hoist_op_{index}" for index, node in enumerate(bare.nodes)}
    for node in bare.nodes:
        called = callees.get(call_key(node))
        if called is not None:
            node.op_type = called
        _canonical(node, names, ops)
    bare.inputs = [names.get(name, name) for name in body.inputs]
    bare.outputs = [names.get(name, name) for name in body.outputs]
    renamed = ((names.get(name, name), kind) for name, kind in body.types.items())
    bare.types = dict(sorted(renamed, key=lambda item: item[0]))
    # Home, roles of slots and concrete types are in the function's metadata.
    metadata = sorted(body.metadata.items())
    text = function_digest(bare, prints).hex() + repr(metadata)
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]


def _positions(body: Function) -> dict[str, str]:
    """Return the canonical names of a body's values."""
    names = {name: f"__hoist_in_{index}" for index, name in enumerate(body.inputs)}
    for index, name in enumerate(body.outputs):
        names.setdefault(name, f"__hoist_out_{index}")
    count = 0
    for node in body.nodes:
        for name in node.outputs:
            if name and name not in names:
                names[name] = f"__hoist_v_{count}"
                count += 1
    return names


def _canonical(node: OpNode, names: Mapping[str, str], ops: Mapping[str, str]) -> None:
    rename_node(node, names)
    node.name = ops[node.name]
    node.doc_string = ""
    node.metadata.pop(keys.MODULE_INSTANCE_KEY, None)
    node.metadata.pop(keys.CALL_KEY, None)
    waits = control_of(node)
    if waits:
        text = ",".join(ops.get(name, name) for name in waits)
        node.metadata[keys.CONTROL_AFTER_KEY] = text


def _redirect(body: Function, renamed: Mapping[FunctionKey, FunctionKey]) -> None:
    for node in body.nodes:
        target = renamed.get(call_key(node))
        if target is not None:
            node.op_type = target[1]


def _sub_modules(program: Program) -> set[FunctionKey]:
    """Return the keys of Module bodies that are called and that send nothing."""
    return {
        body.key
        for body in program.functions[1:]
        if body.domain == keys.MODULE_DOMAIN
        and not body.overload
        and not is_bootstrap(body)
        and not any(is_wire(node) for node in body.nodes)
    }


def _has_leaf_ports(body: Function) -> bool:
    kinds = map(body.kind_of, (*body.inputs, *body.outputs))
    return all(kind is not None and kind.is_leaf for kind in kinds)
