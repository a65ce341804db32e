"""`inline_for_partition`: what the root calls and has to see through.

Rule: after it, every wire op that a program can reach stands in the root itself. Bootstraps
are neither inlined nor inlined into.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from onnx import FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.compiler.errors import (
    ExpansionFailed,
    OpsetNotImported,
    TypeConstraintFailed,
    Where,
)
from bbnode.compiler.function_table import (
    FunctionKey,
    by_key,
    called_from,
    callees_first,
    calls_of,
    is_bootstrap,
)
from bbnode.compiler.inlining import merge_opsets, opsets_agree, splice
from bbnode.compiler.slots import take_slots
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, protos, types
from bbnode.ir.types import TypeNode

# Ten times the largest program that the compiler is made for. Calls of calls multiply: thirty
# functions of two calls each would be a billion ops.
MAX_INLINED_NODES = 200_000


@dataclass(slots=True)
class _Body:
    """What is known of a function once everything it calls is."""

    function: FunctionProto
    touches_wire: bool
    pure_onnx: bool
    size: int  # nodes after inlining


class InlineForPartition:
    """Inlines three classes of function wherever they are called.

    1. Functions whose closure holds a wire op, so that partitioning sees it (the whole chain of
       callers with them). One that makes the root larger than `MAX_INLINED_NODES`, or imports
       another version of an opset, is ExpansionFailed or OpsetNotImported.
    2. Functions whose closure is `ai.onnx` only, so that a backend sees one graph.
    3. Functions that are called from one place.
    4. All others stay calls; functions that nothing calls any more leave the model.
    5. Functions that call each other in a ring are CyclicGraph.
    """

    name: ClassVar[str] = "inline_for_partition"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        _drop_unused(unit)  # what nobody calls must not count as a place that calls
        table = by_key(unit.model.functions)
        calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
        root_key = protos.function_key(unit.root)
        order = callees_first([root_key, *table], calls)
        sites = Counter(key for callees in calls.values() for key in callees)
        done: dict[FunctionKey, _Body] = {}
        inlined = surfaced = 0
        for key in order:
            function = table[key]
            if is_bootstrap(function):
                continue
            chosen = self._choose(function, table, done, sites)
            for call, callee_key in chosen:
                inlined += 1
                surfaced += sum(protos.is_wire(node) for node in done[callee_key].function.node) * (
                    key == root_key
                )
                _check_opsets(call, function, done[callee_key].function)
            if chosen:
                _inline(function, {c.name: done[k].function for c, k in chosen})
            done[key] = _body(function, table, done)
        _drop_unused(unit)
        return {"calls_inlined": inlined, "surfaced_wire_ops": surfaced}

    @staticmethod
    def _choose(
        function: FunctionProto,
        table: dict[FunctionKey, FunctionProto],
        done: dict[FunctionKey, _Body],
        sites: Counter[FunctionKey],
    ) -> list[tuple[NodeProto, FunctionKey]]:
        """The calls of one function that are inlined, in order."""
        size = len(function.node)
        chosen = []
        for call, key in calls_of(function, table):
            body = done.get(key)
            if body is None:  # a bootstrap
                continue
            fits = size + body.size <= MAX_INLINED_NODES
            if not fits and body.touches_wire:
                raise ExpansionFailed(
                    op_type=call.op_type,
                    domain=call.domain,
                    reason=f"inlining it makes more than {MAX_INLINED_NODES} ops",
                    node_name=call.name,
                    where=Where.of(call),
                )
            wanted = body.pure_onnx or sites[key] == 1
            optional = wanted and fits and opsets_agree(function, body.function)
            if body.touches_wire or optional:
                chosen.append((call, key))
                size += body.size
        return chosen


def _body(
    function: FunctionProto,
    table: dict[FunctionKey, FunctionProto],
    done: dict[FunctionKey, _Body],
) -> _Body:
    touches_wire, pure_onnx = False, True
    for node in function.node:
        callee = done.get(protos.call_key(node))
        if callee is not None:
            touches_wire = touches_wire or callee.touches_wire
            pure_onnx = pure_onnx and callee.pure_onnx
        else:
            touches_wire = touches_wire or protos.is_wire(node)
            pure_onnx = pure_onnx and _is_plain(node) and protos.call_key(node) not in table
    return _Body(
        function=function,
        touches_wire=touches_wire,
        pure_onnx=pure_onnx,
        size=len(function.node),
    )


def _is_plain(node: NodeProto) -> bool:
    # `g.output` records a PassThrough, so a pure body has those as well.
    passes = node.domain == keys.SYSCALL_DOMAIN and node.op_type == "PassThrough"
    return passes or flow.is_graph_op(node)


def _check_opsets(call: NodeProto, caller: FunctionProto, callee: FunctionProto) -> None:
    if opsets_agree(caller, callee):
        return
    versions = {entry.domain: entry.version for entry in caller.opset_import}
    for entry in callee.opset_import:
        if versions.get(entry.domain, entry.version) != entry.version:
            raise OpsetNotImported(
                domain=entry.domain,
                version_used=entry.version,
                node_name=call.name,
                where=Where.of(call),
            )


def _inline(function: FunctionProto, bodies: dict[str, FunctionProto]) -> None:
    """Put the bodies in the place of the calls of these names."""
    home = protos.get_meta(function, keys.HOME_KEY) or keys.SELF_CLASS
    nodes: list[NodeProto] = []
    known = protos.value_types(function)
    changed: dict[str, TypeNode] = {}
    for node in function.node:
        callee = bodies.get(node.name)
        if callee is None or node.op_type != callee.name:
            nodes.append(node)
            continue
        spliced = splice(node, callee, home)
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
        take_slots(function, callee)
        merge_opsets(function, callee)
    flow.replace_nodes(function, nodes)
    protos.write_types(function, changed)


def _drop_unused(unit: CompilationUnit) -> None:
    roots = [unit.root, *(f for f in unit.model.functions[1:] if is_bootstrap(f))]
    kept = [*roots, *called_from(unit.model, roots)]
    names = {protos.function_key(function) for function in kept}
    for index in range(len(unit.model.functions) - 1, 0, -1):
        if protos.function_key(unit.model.functions[index]) not in names:
            del unit.model.functions[index]
