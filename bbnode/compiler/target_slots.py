"""Which slots a target needs, and what fills them.

Rule: a target needs the slots of its ops, of the functions it calls, of the bootstraps that
prepare it, and whatever the components at those slots depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bbnode.compiler.analysis.functions import called_from, is_bootstrap
from bbnode.compiler.analysis.slots import TRAIT_SUFFIX, slot_roles
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import MissingBinding
from bbnode.compiler.unit import CompilationUnit, SlotBinding
from bbnode.components.contracts import CONTRACTS, Component
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.ir import keys
from bbnode.ir.plain import Function

# Most ops of a compiled program are of these, and none of them belongs to a slot.
SLOTLESS_DOMAINS = frozenset({keys.SYSCALL_DOMAIN, keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN})

NO_SLOT_ID = -1  # of a slot that no op uses, only a component's dependency

# `depends` writes roles in snake case, bindings and errors as the contracts do.
ROLE_OF_DEPENDENCY = {keys.snake_case(role): role for role in CONTRACTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A slot as the program uses it. `concrete` is a type name, or None for a generic slot."""

    name: str
    role: str
    slot_id: int = NO_SLOT_ID
    concrete: str | None = None

    def component(self, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
        """The class that fills the slot; None when it is not bound.

        Raises MissingBinding when its concrete type is not installed here.
        """
        if self.concrete is None:
            binding = bound.get(self.name)
            return None if binding is None else binding.component
        try:
            return component_class(self.concrete)
        except UnknownComponentType as error:
            raise MissingBinding(slot=self.name, site=f"the program ({error})") from error


def slots_of(functions: Iterable[Function]) -> dict[str, Slot]:
    """Slots that the ops of `functions` use, by name, in the order of their first use."""
    found: dict[str, Slot] = {}
    for function in functions:
        roles = slot_roles(function)
        for node in function.node:
            if node.domain in SLOTLESS_DOMAINS:
                continue
            name = node.metadata.get(keys.SLOT_KEY)
            if name is None or name in found:
                continue
            meta = node.metadata
            slot_id = meta.get(keys.SLOT_ID_KEY, "")
            trait = meta.get(keys.REQUIRED_TRAIT_KEY, "")
            found[name] = Slot(
                name=name,
                role=roles.get(name) or trait.removesuffix(TRAIT_SUFFIX),
                slot_id=int(slot_id) if is_natural(slot_id) else NO_SLOT_ID,
                concrete=meta.get(keys.CONCRETE_TYPE_KEY),
            )
    return found


def slots_by_target(unit: CompilationUnit) -> dict[str, dict[str, Slot]]:
    """Slots of each class's target, without those of dependencies.

    A bootstrap prepares the targets that share a slot with it; one that shares none prepares
    the target of its own home class, or every target when there is no such class.
    """
    found = {home: slots_of([main, *called_from(unit.program, [main])])
             for home, main in unit.partitions.items()}  # fmt: skip
    prepared: dict[str, dict[str, Slot]] = {home: {} for home in found}
    for bootstrap in (f for f in unit.program.functions if is_bootstrap(f)):
        slots = slots_of([bootstrap, *called_from(unit.program, [bootstrap])])
        homes = [home for home, own in found.items() if not own.keys().isdisjoint(slots)]
        if not homes:
            own_home = bootstrap.metadata.get(keys.HOME_KEY)
            homes = [own_home] if own_home in found else list(found)
        for home in homes:
            prepared[home].update(slots)
    return {home: {**prepared[home], **own} for home, own in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """One entry of a component's `depends`."""

    role: str
    slot: str


def dependencies_of(component: type[Component]) -> list[Dependency]:
    """What a component class depends on; a role it misspells is kept as it stands."""
    return [
        Dependency(role=ROLE_OF_DEPENDENCY.get(role, role), slot=slot)
        for role, slot in component.depends.items()
    ]


def with_dependencies(
    slots: Mapping[str, Slot], known: Mapping[str, Slot], bound: Mapping[str, SlotBinding]
) -> dict[str, Slot]:
    """`slots` and, transitively, those that their components depend on.

    Args:
        slots: what a target uses.
        known: all slots of the program: a dependency that is one of them keeps its id.
        bound: the bind calls.
    """
    found = dict(slots)
    todo = list(slots.values())
    while todo:
        component = todo.pop().component(bound)
        for need in dependencies_of(component) if component is not None else ():
            if need.slot not in found:
                slot = known.get(need.slot) or Slot(name=need.slot, role=need.role)
                found[need.slot] = slot
                todo.append(slot)
    return found
