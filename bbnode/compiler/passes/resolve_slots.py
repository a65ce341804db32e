"""`resolve_slots`: a check that every slot of every partition has one provider.

Rule: slots are identified by name, not by role: a program may have several of one role.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.compiler.analysis.slots import TRAIT_SUFFIX, by_slot, component_of, slot_roles
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import (
    AmbiguousRole,
    BindingMismatch,
    MalformedSlotMetadata,
    Where,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass, SlotBinding
from bbnode.components.registry import roles_of
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode


@dataclass(slots=True)
class _Use:
    """The uses of one slot, as stated by its ops."""

    role: str
    concrete: OpNode | None = None
    generic: OpNode | None = None


class ResolveSlots(Pass):
    """Checks that each slot has one provider.

    1. A slot that is concrete in one place and generic in another, over all functions, is
       AmbiguousRole; two concrete types for one slot are MalformedSlotMetadata.
    2. A concrete type is installed here (MissingBinding) and fulfils the slot's role
       (BindingMismatch).
    3. A concrete slot has no bind call (BindingMismatch): its component is the author's choice.
    4. A generic slot may still be unbound: `validate_all_slots_bound` names those.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bound = by_slot(options.bindings)
        uses: dict[str, _Use] = {}
        for function in unit.bodies():
            _collect(function, uses)
        for slot, use in uses.items():
            _check(slot, use, bound)
        resolved = sum(use.concrete is not None or slot in bound for slot, use in uses.items())
        return {"slots_resolved": resolved, "slots_unbound": len(uses) - resolved}


def _collect(function: Function, uses: dict[str, _Use]) -> None:
    roles = slot_roles(function)
    for node in function.nodes:
        slot = node.metadata.get(keys.SLOT_KEY)
        if not slot:
            continue
        type_name = node.metadata.get(keys.CONCRETE_TYPE_KEY)
        trait = node.metadata.get(keys.REQUIRED_TRAIT_KEY, "")
        use = uses.setdefault(slot, _Use(roles.get(slot, trait.removesuffix(TRAIT_SUFFIX))))
        if type_name:
            known = use.concrete or node
            use.concrete = known
            other = known.metadata.get(keys.CONCRETE_TYPE_KEY)
            if other != type_name:
                raise MalformedSlotMetadata(
                    node_name=node.name,
                    detail=f"slot {slot!r} holds {type_name!r} here and {other!r} elsewhere",
                    where=Where.of(node),
                )
        else:
            use.generic = use.generic or node
        if use.concrete is not None and use.generic is not None:
            raise _ambiguous(slot, use.role, use.concrete, use.generic)


def _ambiguous(slot: str, role: str, concrete: OpNode, generic: OpNode) -> AmbiguousRole:
    slot_id = generic.metadata.get(keys.SLOT_ID_KEY) or ""
    return AmbiguousRole(
        role=role,
        concrete_type=concrete.metadata.get(keys.CONCRETE_TYPE_KEY) or "",
        generic_slot_id=int(slot_id) if is_natural(slot_id) else -1,
        slot=slot,
        where=Where.of(generic),
    )


def _check(slot: str, use: _Use, bound: dict[str, SlotBinding]) -> None:
    if use.concrete is None:
        return
    component = component_of(use.concrete, bound)
    if slot in bound:
        raise BindingMismatch(
            slot=slot,
            role=bound[slot].role,
            detail="the program declares it with a concrete component",
            where=Where.of(use.concrete),
        )
    if component is not None and use.role and use.role not in roles_of(component):
        raise BindingMismatch(
            slot=slot,
            role=use.role,
            detail=f"{component.TYPE_NAME!r} fulfils the roles {', '.join(roles_of(component))}",
            where=Where.of(use.concrete),
        )
