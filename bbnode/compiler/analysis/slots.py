"""Slots as the compiler sees them: which component class stands behind an op.

Rule: a generic slot is filled by a bind call, a concrete one by the type name that its ops
carry; an op of no slot has no component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.errors import MissingBinding, Where
from bbnode.compiler.unit import SlotBinding
from bbnode.components.contracts import Component
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, FunctionKey, Node

TRAIT_SUFFIX = "Runtime"


def component_of(node: Node, bound: Mapping[str, SlotBinding]) -> type[Component] | None:
    """The component class that runs an op; None when its slot is not bound (yet).

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


def by_slot(bindings: Iterable[SlotBinding]) -> dict[str, SlotBinding]:
    """The bind calls by slot."""
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
    generic = set(into.attribute)
    into.attribute.extend(name for name in source.attribute if name not in generic)
    concrete = {attribute.name for attribute in into.attribute_proto}
    into.attribute_proto.extend(a for a in source.attribute_proto if a.name not in concrete)
    prefixes = (keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX)
    for key, text in source.metadata.items():
        if key.startswith(prefixes):
            into.metadata.setdefault(key, text)


def slots_of_calls(functions: Iterable[Function]) -> dict[FunctionKey, list[str]]:
    """Slots that a call of each function uses, directly or through its own calls.

    Raises CyclicGraph when functions call each other in a ring.
    """
    table = by_key(functions)
    calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
    found: dict[FunctionKey, list[str]] = {}
    for key in callees_first(table, calls):
        slots: dict[str, None] = {}
        for node in table[key].node:
            slot = node.metadata.get(keys.SLOT_KEY)
            names = [slot] if slot is not None else found.get(plain.call_key(node), [])
            slots.update(dict.fromkeys(names))
        found[key] = list(slots)
    return found
