"""`type_solver`: the type of every value.

Rule: all functions are solved at once, since a call ties the caller's values to the callee's.
Constraints come from the op table, from ONNX's schemas and from declarations; the author has to
declare whatever stays abstract.
"""

from __future__ import annotations

from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.slots import by_slot, role_of
from bbnode.compiler.errors import (
    NOWHERE,
    IncompatibleStorageOnEdge,
    TypeConstraintFailed,
    UnboundSlot,
    UnresolvedType,
    Where,
)
from bbnode.compiler.passes.inline_for_partition import InlineForPartition
from bbnode.compiler.rewriting.instances import copy_for_each_call
from bbnode.compiler.typing.constraints import FunctionTypes, TypeNetwork
from bbnode.compiler.typing.stored import Choices, unite_stored
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.graph import FunctionKey, OpNode
from bbnode.ir.types import TypeNode


class TypeSolver(Pass):
    """Resolves the type of every value to a leaf of the lattice.

    1. Ports of one type variable have one type; a port of a fixed type narrows its value to it.
       What can't be both is TypeConstraintFailed; across a send it is
       IncompatibleStorageOnEdge.
    2. `ai.onnx` ops follow ONNX's schemas and its inference, node by node; those that move peers
       or addresses about follow `peer_list_ops.py`.
    3. A call's values have the types of the callee's inputs and outputs, at every call. Where
       calls of one body disagree, each body whose ports' types are open is copied for each of
       its calls (`instances.py`); copies that turn out equal are one again, and one that a
       single place calls is inlined.
    4. Peers of a send that say nothing else are a PeerIdVec; a function input that nothing
       computes with (only `after`, or nobody at all) is a Trigger.
    5. `Unbundle` takes its parts' types from `child_types`, `Bundle` records them there; parts
       have the types that were put in, across calls and sends. Answers are of the type of what
       the request is answered with, and `responses.Values` is a sequence of that; an aggregator
       takes those that its class says (`answers`).
    6. What `Hold.Flush` and `Serialize.Dequeue` take has the type of what is put under that name,
       anywhere in the program (StoredTypesDiffer); where nothing is, it is NothingStored.
    7. Where a component's `storage` gives several types for a port, it is the one that the
       program says (TypeConstraintFailed for another one), else the first.
    8. A type that stays abstract is UnresolvedType, unless types are permissive; UnboundSlot
       where no component is there whose `storage` could narrow it. A function input, or what a
       component gives, may stay a Tensor where nothing computes with it: it never gets anywhere.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        copied = 0
        try:
            functions = _solved(unit, options)
        except (TypeConstraintFailed, IncompatibleStorageOnEdge):
            copied = copy_for_each_call(unit)
            if not copied:
                raise
            functions = _solved(unit, options)
        resolved = unresolved = 0
        for one in functions.values():
            one.check_allowed()
            open_values = one.abstract_values()
            if open_values and not options.permissive_types:
                raise _unresolved(one, *open_values[0], options)
            resolved += one.write()
            unresolved += len(open_values)
        if copied:  # a copy with a single caller is inlined, like any body
            InlineForPartition().run(unit, options)
        return {
            "types_resolved": resolved,
            "types_unresolved": unresolved,
            "bodies_copied": copied,
        }


def _solved(unit: CompilationUnit, options: CompileOptions) -> dict[FunctionKey, FunctionTypes]:
    network = TypeNetwork()
    table = by_key(unit.bodies())
    bound = by_slot(options.bindings)
    functions = {
        key: FunctionTypes(function, unit.program, network, bound)
        for key, function in table.items()
    }
    for one in functions.values():
        one.constrain(functions)
    unite_stored(functions.values(), network)
    _infer_until_settled(list(functions.values()), network)
    for one in functions.values():
        one.default_peers()
    _infer_until_settled(list(functions.values()), network)
    choices = Choices(functions.values(), bound)
    choices.settle(network)
    _infer_until_settled(list(functions.values()), network)
    choices.check(network)
    for one in functions.values():
        one.settle_movers(finally_tensors=True)
    _infer_until_settled(list(functions.values()), network)
    for one in functions.values():
        one.default_triggers()
    return functions


def _infer_until_settled(functions: list[FunctionTypes], network: TypeNetwork) -> None:
    """Run ONNX's inference until nothing changes.

    Nodes are tried in recorded order, so that one round is enough for a chain.
    """
    while True:
        before = network.changes
        for one in functions:
            one.infer()
        if network.changes == before:
            return


def _unresolved(
    one: FunctionTypes, value: str, known: TypeNode, options: CompileOptions
) -> UnresolvedType | UnboundSlot:
    for node in one.function.nodes:
        if value in node.outputs:
            where = Where.of(node)
            slot, role = _unbound(node, options)
            if slot:
                return UnboundSlot(slot=slot, role=role, where=where)
            return UnresolvedType(value=value, known=known.name, op=node.name, where=where)
    reader = next((node for node in one.function.nodes if value in node.computes_with), None)
    where = NOWHERE if reader is None else Where.of(reader)  # an input has no line of its own
    return UnresolvedType(value=value, known=known.name, where=where)


def _unbound(node: OpNode, options: CompileOptions) -> tuple[str, str]:
    """Return the slot and role of an op whose generic slot is unbound, else two empty texts."""
    slot = node.metadata.get(keys.SLOT_KEY, "")
    role = role_of(node)
    is_filled = keys.CONCRETE_TYPE_KEY in node.metadata or slot in by_slot(options.bindings)
    return (slot, role) if slot and role is not None and not is_filled else ("", "")
