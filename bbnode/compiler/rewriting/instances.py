"""Monomorphisation: a body that is called with several types gets one copy per call.

Rule: only bodies with ports of open types are copied, with all their callees; equal copies are
merged again as soon as their types are known (`hoisting.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from bbnode.compiler.analysis.functions import by_key, is_bootstrap
from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import types
from bbnode.ir.graph import Function, call_key

MAX_COPIED_NODES = 200_000  # the cap of inlining, since nested calls multiply


def copy_for_each_call(unit: CompilationUnit) -> int:
    """Copy each body with open ports for each of its calls; return how many copies were made.

    Raises ExpansionFailed if that takes too many ops.
    """
    program = unit.program
    is_open = {f.key: _is_open(f) for f in program.functions[1:]}
    bodies = by_key(program.functions)
    kept = [f for f in program.functions if not is_open.get(f.key, False)]
    names = {f.name for f in program.functions}
    used: set[str] = set()
    copies: list[Function] = []
    copied = 0
    todo = deque(kept)
    while todo:
        body = todo.popleft()
        for node in body.nodes:
            key = call_key(node)
            if not is_open.get(key, False):
                continue
            copy = bodies[key].copy()
            copied += len(copy.nodes)
            if copied > MAX_COPIED_NODES:
                raise ExpansionFailed(
                    op_type=node.op_type,
                    domain=node.domain,
                    reason=f"calls with values of several types take more than {MAX_COPIED_NODES} "
                    "ops; declare the types of the inputs of what is called",
                    node_name=node.name,
                    where=Where.of(node),
                )
            copy.name = _fresh(copy.name, names, used)
            used.add(copy.name)
            unit.home_claims[copy.key] = unit.home_claims.get(key, [])
            node.op_type = copy.name
            copies.append(copy)
            todo.append(copy)
    program.functions = [*kept, *copies]
    return len(copies)


def _is_open(function: Function) -> bool:
    if is_bootstrap(function):
        return False
    known = function.kinds()
    ports = (*function.inputs, *function.outputs)
    return not all(known.get(name, types.ANY).is_leaf for name in ports)


def _fresh(name: str, names: Container[str], used: Container[str]) -> str:
    """Return the name itself for the first copy, then `<name>_2` and so on."""
    if name not in used:
        return name
    number = 2
    while f"{name}_{number}" in used or f"{name}_{number}" in names:
        number += 1
    return f"{name}_{number}"
