"""`resolve_component_dependencies`: a check that every component's dependencies exist.

Rule: it changes nothing. A component names the slot that supplies it; a bind call or a concrete
slot of the program must have that name.
"""

from __future__ import annotations

from collections.abc import Mapping

from bbnode.compiler.analysis.slots import TargetSlot, by_slot, dependencies_of, slots_of
from bbnode.compiler.errors import NOWHERE, BindingMismatch, UnboundDependency, Where
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.components.contracts import CONTRACTS, Component
from bbnode.ir import keys, opset
from bbnode.ir.graph import OpNode


class ResolveComponentDependencies(Pass):
    """Checks `depends` of every bound and every concrete component.

    1. The slot of each dependency is bound or concrete (UnboundDependency), unless the component
       needs it only for some methods (`needed_for`) and no op calls one of them.
    2. What fills it implements the role's contract (BindingMismatch).
    3. Components do not depend on each other in a ring (BindingMismatch): they are
       constructed one after the other.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bound = by_slot(options.bindings)
        slots = dict(slots_of(unit.bodies()))
        for binding in options.bindings:
            slots.setdefault(binding.slot, TargetSlot(name=binding.slot, role=binding.role))
        filled: dict[str, type[Component]] = {}
        for name, slot in slots.items():
            component = slot.component(bound)
            if component is not None:
                filled[name] = component
        calls = _calls(unit)
        supplies = {slot for component in filled.values() for slot in component.depends.values()}
        count = 0
        for name in filled:
            # Any method may be called on a component that others depend on.
            count += _check(name, filled, None if name in supplies else calls.get(name, {}))
        _refuse_rings(filled)
        return {"dependencies": count}


def _calls(unit: CompilationUnit) -> dict[str, dict[str, OpNode]]:
    """Return the methods that ops call, by slot, each with the first op that calls it."""
    calls: dict[str, dict[str, OpNode]] = {}
    for body in unit.bodies():
        for node in body.nodes:
            slot = node.metadata.get(keys.SLOT_KEY)
            spec = None if slot is None else opset.lookup_op(node.domain, node.op_type)
            if slot is not None and spec is not None:
                calls.setdefault(slot, {}).setdefault(spec.method, node)
    return calls


def _check(
    slot: str, filled: dict[str, type[Component]], called: Mapping[str, OpNode] | None
) -> int:
    """Check the dependencies of a slot's component; `called` None: any method may be called."""
    component = filled[slot]
    checked = 0
    for need in dependencies_of(component):
        supplier = filled.get(need.slot)
        if supplier is None:
            methods = component.needed_for.get(keys.snake_case(need.role), ())
            callers = [called[method] for method in methods if method in called] if called else []
            if methods and called is not None and not callers:
                continue
            raise UnboundDependency(
                component=component.TYPE_NAME,
                bound_at_slot=slot,
                required_role=need.role,
                required_slot=need.slot,
                for_op=callers[0].op_type if callers else "",
                others=tuple(
                    other.TYPE_NAME
                    for other in component.__subclasses__()
                    if need.role not in {each.role for each in dependencies_of(other)}
                    and other.__module__ == component.__module__
                ),
                where=Where.of(callers[0]) if callers else NOWHERE,
            )
        checked += 1
        contract = CONTRACTS.get(need.role)
        if contract is None or not issubclass(supplier, contract):
            raise BindingMismatch(
                slot=need.slot,
                role=need.role,
                detail=f"{component.TYPE_NAME!r} at slot {slot!r} depends on it, and "
                f"{supplier.TYPE_NAME!r} is no {need.role}",
            )
    return checked


def _refuse_rings(filled: dict[str, type[Component]]) -> None:
    done: set[str] = set()
    for root in filled:
        path: dict[str, list[str]] = {root: _suppliers(root, filled)}
        while path:
            slot = next(reversed(path))
            if slot in done or not path[slot]:
                done.add(slot)
                del path[slot]
                continue
            need = path[slot].pop()
            if need in path:
                ring = [*list(path)[list(path).index(need) :], need]
                raise BindingMismatch(
                    slot=need,
                    role=filled[need].ROLE,
                    detail=f"its component depends on itself: {' -> '.join(ring)}",
                )
            if need not in done:
                path[need] = _suppliers(need, filled)


def _suppliers(slot: str, filled: Mapping[str, type[Component]]) -> list[str]:
    return [need.slot for need in dependencies_of(filled[slot]) if need.slot in filled]
