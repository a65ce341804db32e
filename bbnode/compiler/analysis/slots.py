"""Slots as the compiler sees them: which component class stands behind an op.

Rule: a generic slot is filled by a bind call, a concrete one by the type name that its ops
carry; an op of no slot has no component.
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
ALL_PORTS = "*"  # of a component's `storage`


def component_of(node: OpNode, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
    """Return the component class that runs an op; None when its slot is not bound (yet).

    Raises MissingBinding when the op names a concrete type that is not installed here.
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
    """Return the type that a component keeps at a port of its op, if the op leaves that to it.

    Several where the component may keep each of them.
    """
    own = storage.get(f"{node.op_type}.{port.name}")
    if port.type is types.TENSOR or port.batch:
        return own or storage.get(ALL_PORTS)
    return own if port.type is types.ANY else None


def by_slot(bindings: Iterable[SlotBinding]) -> dict[str, SlotBinding]:
    """Return the bind calls by slot."""
    return {binding.slot: binding for binding in bindings}


def slot_roles(function: Function) -> dict[str, str]:
    """Role of each slot that a function lists, from its `slot_role.<slot>` metadata."""
    found = {}
    for key, text in function.metadata.items():
        if key.startswith(keys.SLOT_ROLE_PREFIX):
            found[key.removeprefix(keys.SLOT_ROLE_PREFIX)] = text.split("|")[0]
    return found


def take_slots(into: Function, source: Function) -> None:
    """List the slots of `source` on `into` as well (an inlined body brings its slots)."""
    generic = set(into.attributes)
    into.attributes.extend(name for name in source.attributes if name not in generic)
    into.defaults = {**source.defaults, **into.defaults}
    prefixes = (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX)
    for key, text in source.metadata.items():
        if key.startswith(prefixes):
            into.metadata.setdefault(key, text)


def slots_of_calls(functions: Iterable[Function]) -> dict[FunctionKey, list[str]]:
    """Return slots that a call of each function uses, directly or through its own calls.

    Raises CyclicGraph when functions call each other in a ring.
    """
    table = by_key(functions)
    calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
    found: dict[FunctionKey, list[str]] = {}
    for key in callees_first(table, calls):
        slots: dict[str, None] = {}
        for node in table[key].nodes:
            slot = node.metadata.get(keys.SLOT_KEY)
            names = [slot] if slot is not None else found.get(call_key(node), [])
            slots.update(dict.fromkeys(names))
        found[key] = list(slots)
    return found


# --- is the slot metadata of an op well-formed? -------------------------------------------
# Rule: an op of a slot says which one (`slot`, `slot_id`), and either what it requires
# (`required_trait`) or what stands there (`concrete_type`, `instance`), never both.
#

_ROLE_OF_DOMAIN = {keys.role_domain(role): role for role in opset.ROLES}


def check_slot(node: OpNode) -> None:
    """Raise MalformedSlotMetadata when an op does not say, or contradicts, its slot."""
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


# --- which slots a target needs, and what fills them --------------------------------------
# Rule: a target needs the slots of its ops, of the functions it calls, of the bootstraps that
# prepare it, and whatever the components at those slots depend on.
#

# Most ops of a compiled program are of these, and none of them belongs to a slot.
SLOTLESS_DOMAINS = frozenset({keys.SYSCALL_DOMAIN, keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN})

NO_SLOT_ID = -1  # of a slot that no op uses, only a component's dependency

# `depends` writes roles in snake case, bindings and errors as the contracts do.
ROLE_OF_DEPENDENCY = {keys.snake_case(role): role for role in CONTRACTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSlot:
    """A slot as the program uses it. `concrete` is a type name, or None for a generic slot."""

    name: str
    role: str
    slot_id: int = NO_SLOT_ID
    concrete: str | None = None

    def component(self, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
        """Return the class that fills the slot; None when it is not bound.

        Raises MissingBinding when its concrete type is not installed here.
        """
        if self.concrete is None:
            binding = bound.get(self.name)
            return None if binding is None else binding.component
        try:
            return component_class(self.concrete)
        except UnknownComponentType as error:
            raise MissingBinding(slot=self.name, site=f"the program ({error})") from error


def slots_of(functions: Iterable[Function]) -> dict[str, TargetSlot]:
    """Return slots that the ops of `functions` use, by name, in the order of their first use."""
    found: dict[str, TargetSlot] = {}
    for function in functions:
        roles = slot_roles(function)
        for node in function.nodes:
            if node.domain in SLOTLESS_DOMAINS:
                continue
            name = node.metadata.get(keys.SLOT_KEY)
            if name is None or name in found:
                continue
            meta = node.metadata
            slot_id = meta.get(keys.SLOT_ID_KEY, "")
            trait = meta.get(keys.REQUIRED_TRAIT_KEY, "")
            found[name] = TargetSlot(
                name=name,
                role=roles.get(name) or trait.removesuffix(TRAIT_SUFFIX),
                slot_id=int(slot_id) if is_natural(slot_id) else NO_SLOT_ID,
                concrete=meta.get(keys.CONCRETE_TYPE_KEY),
            )
    return found


def slots_by_target(unit: CompilationUnit) -> dict[str, dict[str, TargetSlot]]:
    """Return slots of each class's target, without those of dependencies.

    A bootstrap prepares the targets that share a slot with it; one that shares none prepares
    the target of its own home class, or every target when there is no such class.
    """
    found = {home: slots_of([main, *called_from(unit.program, [main])])
             for home, main in unit.partitions.items()}  # fmt: skip
    prepared: dict[str, dict[str, TargetSlot]] = {home: {} for home in found}
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
    """Return what a component class depends on; a role it misspells is kept as it stands."""
    return [
        Dependency(role=ROLE_OF_DEPENDENCY.get(role, role), slot=slot)
        for role, slot in component.depends.items()
    ]


def with_dependencies(
    slots: Mapping[str, TargetSlot],
    known: Mapping[str, TargetSlot],
    bound: Mapping[str, SlotBinding],
) -> dict[str, TargetSlot]:
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
                slot = known.get(need.slot) or TargetSlot(name=need.slot, role=need.role)
                if slot.component(bound) is None:
                    continue  # no op needs it, or `resolve_component_dependencies` had said so
                found[need.slot] = slot
                todo.append(slot)
    return found
