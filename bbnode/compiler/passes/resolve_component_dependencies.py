"""`resolve_component_dependencies`: every component finds what it depends on.

Rule: looks, changes nothing. A component names the slot that supplies it; a bind call or a
concrete slot of the program has to be there under that name.
"""

from __future__ import annotations

from bbnode.compiler.analysis.slots import TargetSlot, by_slot, dependencies_of, slots_of
from bbnode.compiler.errors import BindingMismatch, UnboundDependency
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.components.contracts import CONTRACTS, Component


class ResolveComponentDependencies(Pass):
    """Checks `depends` of every bound and every concrete component.

    1. The slot of each dependency is bound or concrete (UnboundDependency).
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
        count = sum(_check(name, filled) for name in filled)
        _refuse_rings(filled)
        return {"dependencies": count}


def _check(slot: str, filled: dict[str, type[Component]]) -> int:
    component = filled[slot]
    needs = dependencies_of(component)
    for need in needs:
        supplier = filled.get(need.slot)
        if supplier is None:
            raise UnboundDependency(
                component=component.TYPE_NAME,
                bound_at_slot=slot,
                required_role=need.role,
                required_slot=need.slot,
            )
        contract = CONTRACTS.get(need.role)
        if contract is None or not issubclass(supplier, contract):
            raise BindingMismatch(
                slot=need.slot,
                role=need.role,
                detail=f"{component.TYPE_NAME!r} at slot {slot!r} depends on it, and "
                f"{supplier.TYPE_NAME!r} is no {need.role}",
            )
    return len(needs)


def _refuse_rings(filled: dict[str, type[Component]]) -> None:
    done: set[str] = set()
    for root in filled:
        path: dict[str, list[str]] = {root: [d.slot for d in dependencies_of(filled[root])]}
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
                path[need] = [d.slot for d in dependencies_of(filled[need])]
