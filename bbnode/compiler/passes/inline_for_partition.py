"""`inline_for_partition`: inlining of the calls that partitioning has to look into.

Rule: after it, every reachable wire op is in the root itself. Bootstraps are neither inlined nor
inlined into.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from bbnode.compiler.analysis.functions import (
    by_key,
    called_from,
    callees_first,
    calls_of,
    is_bootstrap,
)
from bbnode.compiler.analysis.signatures import versions_of
from bbnode.compiler.analysis.slots import take_slots
from bbnode.compiler.errors import (
    ExpansionFailed,
    OpsetNotImported,
    TypeConstraintFailed,
    Where,
)
from bbnode.compiler.rewriting.hoisting import join_equal
from bbnode.compiler.rewriting.inlining import home_of, merge_opsets, references, splice
from bbnode.compiler.typing.shapes import take_shape
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, HomeClaim, Pass
from bbnode.ir import keys, types
from bbnode.ir.flatten import is_join
from bbnode.ir.graph import Function, FunctionKey, OpNode, ValueType, call_key, is_onnx_op, is_wire
from bbnode.ir.types import TypeNode

# Ten times the largest program that the compiler is designed for. Nested calls multiply: thirty
# functions of two calls each would be a billion ops.
MAX_COPIED_NODES = 200_000
# Up to this size, a copy of a pure body is worth it: the backend then sees one graph.
MAX_REPEATED_NODES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The inlining plan of one function, made before anything is copied."""

    touches_wire: bool
    pure_onnx: bool
    size: int  # nodes after inlining
    chosen: list[tuple[OpNode, FunctionKey]]  # calls that are inlined, in order
    versions: dict[str, int]  # opset versions that it imports after inlining


class InlineForPartition(Pass):
    """Inlines three classes of function wherever they are called.

    1. Functions whose closure holds a wire op, or a join over executions, so that partitioning sees
       it (the whole chain of callers with them). One that imports another version of an opset is
       OpsetNotImported.
    2. Functions whose closure is `ai.onnx` only, so that a backend sees one graph (up to
       `MAX_REPEATED_NODES`).
    3. Functions that are called from one place, and calls that give a value to an attribute
       that the body refers to.
    4. All others stay calls; functions that nothing calls any more leave the model.
    5. Functions of equal bodies, with ports of leaf types, are one function from here on
       (`hoisting.py`; `partition_by_wire_ops` joins the others, whose types the solver finds).
    6. Functions that call each other in a ring are CyclicGraph; a program that takes more than
       `MAX_COPIED_NODES` copies is ExpansionFailed.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        _drop_unused(unit)  # an unused function must not count as a caller
        joined = join_equal(unit, typed_only=True)
        table = by_key(unit.program.functions)
        calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
        root_key = unit.root.key
        order = callees_first([root_key, *table], calls)
        wire_before = sum(map(is_wire, unit.root.nodes))
        sites = Counter(key for callees in calls.values() for key in callees)
        plans: dict[FunctionKey, _Plan] = {}
        copied = 0
        for key in order:
            if not is_bootstrap(table[key]):
                plans[key] = plan = _plan(table[key], table, plans, sites)
                copied += sum(plans[callee].size for _, callee in plan.chosen)
                if copied > MAX_COPIED_NODES:
                    raise _too_large(plan.chosen[0][0])
        for key, plan in plans.items():
            if plan.chosen:
                _inline(unit, key, table, {call.name: callee for call, callee in plan.chosen})
        _drop_unused(unit)
        unit.recording.observe(unit.program, made_by=self.name)
        return {
            "bodies_joined": joined,
            "calls_inlined": sum(len(plan.chosen) for plan in plans.values()),
            "surfaced_wire_ops": sum(map(is_wire, unit.root.nodes)) - wire_before,
        }


def _plan(
    function: Function,
    table: dict[FunctionKey, Function],
    plans: dict[FunctionKey, _Plan],
    sites: Counter[FunctionKey],
) -> _Plan:
    touches_wire, pure_onnx = False, True
    size = len(function.nodes)
    chosen = []
    versions = versions_of(function)
    for node in function.nodes:
        key = call_key(node)
        callee = plans.get(key)
        if callee is None:  # no call, or a call of a bootstrap
            touches_wire = touches_wire or is_wire(node) or is_join(node)
            pure_onnx = pure_onnx and _is_plain(node) and key not in table
            continue
        touches_wire = touches_wire or callee.touches_wire
        pure_onnx = pure_onnx and callee.pure_onnx
        repeatable = callee.pure_onnx and callee.size <= MAX_REPEATED_NODES
        wanted = sites[key] == 1 or repeatable
        needed = callee.touches_wire or _gives_attributes(node, table[key])
        other = _other_version(versions, callee.versions)
        if needed and other is not None:
            raise OpsetNotImported(
                domain=other,
                version_used=callee.versions[other],
                node_name=node.name,
                where=Where.of(node),
            )
        if needed or (wanted and other is None):
            chosen.append((node, key))
            size += callee.size
            versions.update(callee.versions)
    return _Plan(
        touches_wire=touches_wire, pure_onnx=pure_onnx, size=size, chosen=chosen, versions=versions
    )


def _gives_attributes(call: OpNode, callee: Function) -> bool:
    names = call.attributes.keys()
    return bool(names) and not all(names.isdisjoint(references(node)) for node in callee.nodes)


def _other_version(versions: dict[str, int], wanted: dict[str, int]) -> str | None:
    """Return a domain that both import in different versions; None if they are compatible."""
    return next((d for d, version in wanted.items() if versions.get(d, version) != version), None)


def _too_large(call: OpNode) -> ExpansionFailed:
    return ExpansionFailed(
        op_type=call.op_type,
        domain=call.domain,
        reason=f"inlining what the program calls takes more than {MAX_COPIED_NODES} ops",
        node_name=call.name,
        where=Where.of(call),
    )


def _is_plain(node: OpNode) -> bool:
    # `g.output` records a PassThrough, so a pure body contains those as well.
    passes = node.domain == keys.SYSCALL_DOMAIN and node.op_type == "PassThrough"
    return passes or is_onnx_op(node)


def _inline(
    unit: CompilationUnit,
    key: FunctionKey,
    table: dict[FunctionKey, Function],
    chosen: dict[str, FunctionKey],
) -> None:
    """Replace the calls with these names by the bodies of their callees."""
    function = table[key]
    claims = unit.home_claims.setdefault(key, [])
    home = function.metadata.get(keys.HOME_KEY) or keys.SELF_CLASS
    nodes: list[OpNode] = []
    known = function.kinds()
    changed: dict[str, TypeNode] = {}
    shaped: list[tuple[OpNode, str, ValueType]] = []
    for node in function.nodes:
        called = chosen.get(node.name)
        if called is None or node.op_type != table[called].name:
            nodes.append(node)
            continue
        callee = table[called]
        spliced = splice(node, callee, home)
        claims.extend(claims_of_call(node, callee))
        claims.extend(
            dataclasses.replace(claim, value=value)
            for claim in unit.home_claims.get(called, ())
            if (value := spliced.names.get(claim.value))
        )
        nodes.extend(spliced.nodes)
        for name, kind in spliced.types.items():
            before = known.get(name, types.ANY)
            after = types.meet(before, kind)
            if after is None:
                raise TypeConstraintFailed(
                    op=node.name,
                    detail=f"{name!r} is {before.name} here and {kind.name} in {callee.name!r}",
                    where=Where.of(node),
                )
            if name not in known or after is not before:
                known[name] = changed[name] = after
        shaped += ((node, name, declared) for name, declared in spliced.shaped)
        take_slots(function, callee)
        merge_opsets(function, callee, spliced)
    function.nodes = nodes
    function.declare(changed)
    for call, name, declared in shaped:
        take_shape(function, call, name, declared)


def claims_of_call(call: OpNode, callee: Function) -> list[HomeClaim]:
    """Return the claims that a called Module's `home` makes about the values passed to it."""
    home = home_of(callee)
    if home is None:
        return []
    where = Where.of(call)
    return [
        HomeClaim(value=value, called=callee.name, home=home, where=where)
        for value in (*call.computes_with, *call.after)
    ]


def _drop_unused(unit: CompilationUnit) -> None:
    roots = [unit.root, *(f for f in unit.program.functions[1:] if is_bootstrap(f))]
    kept = [*roots, *called_from(unit.program, roots)]
    names = {function.key for function in kept}
    others = unit.program.functions[1:]
    unit.program.functions[1:] = [f for f in others if f.key in names]
