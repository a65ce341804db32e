"""The slots of one recording: a name, a role, an id, and perhaps a concrete component.

Rule: one name is one slot is one id, over the whole model; ids count from 0 by first use.
A name that is used both generic and concrete is left for the compiler to refuse
(`AmbiguousRole`); one that means two roles, two configs or two peer classes is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.ir import keys
from bbnode.ir.slots import ConcreteSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """How an op uses a slot, as its author wrote it."""

    name: str
    role: str
    concrete: ConcreteSpec | None = None
    peer_class: str | None = None


class SlotTable:
    """Ids of slots, by first use."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._roles: dict[str, str] = {}
        self._concrete: dict[str, tuple[ConcreteSpec, int]] = {}
        self._peer_class: dict[str, str] = {}
        self._instances: dict[str, int] = {}

    def conflict(self, use: SlotUse) -> str | None:
        """Why this use contradicts an earlier one of the same name, or None."""
        role = self._roles.get(use.name, use.role)
        if role != use.role:
            return f"slot {use.name!r} is a {role} slot already; give the {use.role} its own name"
        known = self._concrete.get(use.name)
        if known is not None and use.concrete is not None and known[0] != use.concrete:
            return (
                f"slot {use.name!r} holds another {known[0].type_name} or another config already; "
                "one name is one component: use a second name, or the same config"
            )
        peer_class = self._peer_class.get(use.name, use.peer_class)
        if peer_class != use.peer_class:
            return (
                f"slot {use.name!r} selects peers of class {peer_class!r} already; "
                f"use a second slot for class {use.peer_class!r}"
            )
        return None

    def take(self, use: SlotUse) -> dict[str, str]:
        """Register a use without conflict; gives the metadata of the op's node."""
        slot_id = self._ids.setdefault(use.name, len(self._ids))
        self._roles.setdefault(use.name, use.role)
        meta = {keys.SLOT_KEY: use.name, keys.SLOT_ID_KEY: str(slot_id)}
        if use.concrete is None:
            meta[keys.REQUIRED_TRAIT_KEY] = f"{use.role}Runtime"
        else:
            type_name = use.concrete.type_name
            if use.name not in self._concrete:
                instance = self._instances.get(type_name, 0)
                self._instances[type_name] = instance + 1
                self._concrete[use.name] = (use.concrete, instance)
            meta[keys.CONCRETE_TYPE_KEY] = type_name
            meta[keys.INSTANCE_KEY] = str(self._concrete[use.name][1])
        if use.peer_class is not None:
            self._peer_class.setdefault(use.name, use.peer_class)
            meta[keys.PEER_CLASS_KEY] = use.peer_class
        return meta

    def slot_id(self, name: str) -> int:
        """The id of a slot that was taken."""
        return self._ids[name]
