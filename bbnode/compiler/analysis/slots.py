"""Slots as the compiler sees them: the component class behind each op.

Rule: a generic slot is filled by a bind call, a concrete one by the type name that its ops
carry; an op without a slot has no component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from bbnode.compiler.analysis.functions import (
    by_key,
    called_from,
    callees_first,
    calls_of,
    is_bootstrap,
)
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import MalformedSlotMetadata, MissingBinding, Where
from bbnode.compiler.unit import CompilationUnit, SlotBinding
from bbnode.components.contracts import CONTRACTS, Component
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_onnx_op
from bbnode.ir.opset import Port
from bbnode.ir.types import TypeNode

TRAIT_SUFFIX = "Runtime"
Storage: TypeAlias = Mapping[str, TypeNode | tuple[TypeNode, ...]]
ALL_PORTS = "*"  # key of a component's `storage` that stands for every port


def component_of(node: OpNode, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
    """Return the component class that runs an op; None if its slot is not bound (yet).

    Raises MissingBinding if the op names a concrete type that is not installed here.
    """
    slot = node.metadata.get(keys.SLOT_KEY)
    if slot is None:
        return None
    type_name = node.metadata.get(keys.CONCRETE_TYPE_KEY)
    if type_name is None:
        binding = bound.get(slot)
        return None if binding is None else binding.component
    try:
        return component_class(type_name)
    except UnknownComponentType as error:
        raise MissingBinding(
            slot=slot, site=f"op {node.name!r}: {error}; it", where=Where.of(node)
        ) from error


def stored_at(node: OpNode, port: Port, storage: Storage) -> TypeNode | tuple[TypeNode, ...] | None:
    """Return the type that a component stores at a port of its op, if the op leaves it open.

    The result is a tuple if the component may store one of several types.
    """
    own = storage.get(f"{node.op_type}.{port.name}")
    if port.type is types.TENSOR or port.batch:
        return own or storage.get(ALL_PORTS)
    return own if port.type is types.ANY else None


def by_slot(bindings: Iterable[SlotBinding]) -> dict[str, SlotBinding]:
    """Return the bind calls by slot."""
    return {binding.slot: binding for binding in bindings}


def slot_roles(function: Function) -> dict[str, str]:
    """Return the role of each slot that a function lists in its `slot_role.<slot>` metadata."""
    roles = {}
    for key, text in function.metadata.items():
        if key.startswith(keys.SLOT_ROLE_PREFIX):
            roles[key.removeprefix(keys.SLOT_ROLE_PREFIX)] = text.split("|")[0]
    return roles


def take_slots(into: Function, source: Function) -> None:
    """Add the slots of `source` to those of `into` (an inlined body brings its slots)."""
    generic = set(into.attributes)
    into.attributes.extend(name for name in source.attributes if name not in generic)
    into.defaults = {**source.defaults, **into.defaults}
    prefixes = (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX)
    for key, text in source.metadata.items():
        if key.startswith(prefixes):
            into.metadata.setdefault(key, text)


def slots_of_calls(functions: Iterable[Function]) -> dict[FunctionKey, list[str]]:
    """Return the slots that a call of each function uses, directly or through its own calls.

    Raises CyclicGraph if functions call each other in a cycle.
    """
    table = by_key(functions)
    calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
    used: dict[FunctionKey, list[str]] = {}
    for key in callees_first(table, calls):
        slots: dict[str, None] = {}
        for node in table[key].nodes:
            slot = node.metadata.get(keys.SLOT_KEY)
            names = [slot] if slot is not None else used.get(call_key(node), [])
            slots.update(dict.fromkeys(names))
        used[key] = list(slots)
    return used


# --- well-formed slot metadata ------------------------------------------------------------
# Rule: an op of a slot names it (`slot`, `slot_id`), and either the trait that it requires
# (`required_trait`) or the component in it (`concrete_type`, `instance`), never both.
#

_ROLE_OF_DOMAIN = {keys.role_domain(role): role for role in opset.ROLES}


def check_slot(node: OpNode) -> None:
    """Raise MalformedSlotMetadata if an op's slot metadata is missing or contradictory."""
    role = role_of(node)
    if role is None and not is_onnx_op(node):
        return
    meta = node.metadata
    if role is None and keys.SLOT_KEY not in meta:
        return  # a plain ONNX op: any backend may run it
    fault = _fault(meta, role or "Backend")
    if fault is not None:
        raise MalformedSlotMetadata(node_name=node.name, detail=fault, where=Where.of(node))


def role_of(node: OpNode) -> str | None:
    """Return the role whose contract an op calls, or None."""
    if node.domain.startswith(keys.PROTOCOL_DOMAIN_PREFIX):
        return "Protocol"
    return _ROLE_OF_DOMAIN.get(node.domain)


def _fault(meta: dict[str, str], role: str) -> str | None:
    if not meta.get(keys.SLOT_KEY):
        return "it names no slot"
    trait = meta.get(keys.REQUIRED_TRAIT_KEY)
    concrete = meta.get(keys.CONCRETE_TYPE_KEY)
    if trait is None and concrete is None:
        return "it carries neither required_trait nor concrete_type"
    if trait is not None and concrete is not None:
        return "it carries required_trait and concrete_type, which exclude each other"
    if not is_natural(meta.get(keys.SLOT_ID_KEY, "")):
        return f"slot_id is {meta.get(keys.SLOT_ID_KEY, 'missing')!r}, not a natural number"
    if trait is not None and trait != role + TRAIT_SUFFIX:
        return f"required_trait is {trait!r}, but the op calls {role + TRAIT_SUFFIX!r}"
    if concrete is not None and not is_natural(meta.get(keys.INSTANCE_KEY, "")):
        return f"instance is {meta.get(keys.INSTANCE_KEY, 'missing')!r}, not a natural number"
    return None


# --- the slots of a target, and their components ------------------------------------------
# Rule: a target needs the slots of its ops, of the functions it calls and of the bootstraps that
# prepare it, and the slots that the components there depend on.
#

# Most ops of a compiled program are in these domains, and none of them belongs to a slot.
SLOTLESS_DOMAINS = frozenset({keys.SYSCALL_DOMAIN, keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN})

NO_SLOT_ID = -1  # for a slot that no op uses, only a component's dependency

# `depends` spells roles in snake case, bindings and errors spell them as the contracts do.
ROLE_OF_DEPENDENCY = {keys.snake_case(role): role for role in CONTRACTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSlot:
    """A slot that the program uses. `concrete` is a type name, or None for a generic slot."""

    name: str
    role: str
    slot_id: int = NO_SLOT_ID
    concrete: str | None = None

    def component(self, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
        """Return the class that fills the slot; None if it is not bound.

        Raises MissingBinding if its concrete type is not installed here.
        """
        if self.concrete is None:
            binding = bound.get(self.name)
            return None if binding is None else binding.component
        try:
            return component_class(self.concrete)
        except UnknownComponentType as error:
            raise MissingBinding(slot=self.name, site=f"the program ({error})") from error


def slots_of(functions: Iterable[Function]) -> dict[str, TargetSlot]:
    """Return the slots that the ops of `functions` use, by name, in order of first use."""
    slots: dict[str, TargetSlot] = {}
    for function in functions:
        roles = slot_roles(function)
        for node in function.nodes:
            if node.domain in SLOTLESS_DOMAINS:
                continue
            name = node.metadata.get(keys.SLOT_KEY)
            if name is None or name in slots:
                continue
            meta = node.metadata
            slot_id = meta.get(keys.SLOT_ID_KEY, "")
            trait = meta.get(keys.REQUIRED_TRAIT_KEY, "")
            slots[name] = TargetSlot(
                name=name,
                role=roles.get(name) or trait.removesuffix(TRAIT_SUFFIX),
                slot_id=int(slot_id) if is_natural(slot_id) else NO_SLOT_ID,
                concrete=meta.get(keys.CONCRETE_TYPE_KEY),
            )
    return slots


def slots_by_target(unit: CompilationUnit) -> dict[str, dict[str, TargetSlot]]:
    """Return the slots of each class's target, without those of dependencies.

    A bootstrap prepares the targets that share a slot with it; one that shares none prepares
    the target of its own home class, or every target when there is no such class.
    """
    used = {home: slots_of([main, *called_from(unit.program, [main])])
             for home, main in unit.partitions.items()}  # fmt: skip
    prepared: dict[str, dict[str, TargetSlot]] = {home: {} for home in used}
    for bootstrap in (f for f in unit.program.functions if is_bootstrap(f)):
        slots = slots_of([bootstrap, *called_from(unit.program, [bootstrap])])
        homes = [home for home, own in used.items() if not own.keys().isdisjoint(slots)]
        if not homes:
            own_home = bootstrap.metadata.get(keys.HOME_KEY)
            homes = [own_home] if own_home in used else list(used)
        for home in homes:
            prepared[home].update(slots)
    return {home: {**prepared[home], **own} for home, own in used.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """One entry of a component's `depends`."""

    role: str
    slot: str


def dependencies_of(component: type[Component]) -> list[Dependency]:
    """Return the dependencies of a component class; an unknown role is kept as it is spelled."""
    return [
        Dependency(role=ROLE_OF_DEPENDENCY.get(role, role), slot=slot)
        for role, slot in component.depends.items()
    ]


def with_dependencies(
    slots: Mapping[str, TargetSlot],
    known: Mapping[str, TargetSlot],
    bound: Mapping[str, SlotBinding],
) -> dict[str, TargetSlot]:
    """Return `slots` and, transitively, the slots that their components depend on.

    Args:
        slots: the slots that a target uses.
        known: all slots of the program; a dependency among them keeps its id.
        bound: the bind calls.
    """
    closure = dict(slots)
    todo = list(slots.values())
    while todo:
        component = todo.pop().component(bound)
        for need in dependencies_of(component) if component is not None else ():
            if need.slot not in closure:
                slot = known.get(need.slot) or TargetSlot(name=need.slot, role=need.role)
                if slot.component(bound) is None:
                    continue  # no op needs it: `resolve_component_dependencies` has checked
                closure[need.slot] = slot
                todo.append(slot)
    return closure
