"""Slots: a name, a role, and perhaps a concrete component.

Rule: a slot is named by its author; a generic slot is filled by the compiler's bind chain,
a concrete one carries the construction config of its component in the artifact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bbnode.ir.errors import DeploymentError

# At most 64 bits; -1 stands for no id.
_SLOT_ID = re.compile("-1|[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcreteSpec:
    """A component type with its construction config (msgpack map), as the artifact holds it."""

    role: str
    type_name: str
    config: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One entry of a target's binding table; `slot_id` is -1 for dependency-only slots."""

    target: str
    slot: str
    role: str
    type_name: str
    slot_id: int

    @classmethod
    def decode(cls, target: str, slot: str, value: str) -> Binding:
        """Parse `<role>|<TYPE_NAME>|<slot_id>`; DeploymentError when it is malformed."""
        fields = value.split("|")
        if len(fields) != 3 or not _SLOT_ID.fullmatch(fields[2]):
            raise DeploymentError(
                f"binding of slot {slot!r} in target {target!r} is malformed: {value!r}; "
                "compile the program again"
            )
        return cls(
            target=target, slot=slot, role=fields[0], type_name=fields[1], slot_id=int(fields[2])
        )
