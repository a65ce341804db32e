"""`validate_all_slots_bound`: a check that every slot of every target has a component.

Rule: it changes nothing; the error for a missing component gives the call that adds it.
"""

from __future__ import annotations

from bbnode.compiler.analysis.slots import by_slot, slots_by_target
from bbnode.compiler.errors import UnboundSlot
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass


class ValidateAllSlotsBound(Pass):
    """Checks each target's slots, those of the functions it calls and bootstraps included.

    1. A generic slot has a bind call (UnboundSlot: slot, role, target, the call that is missing).
    2. A concrete slot's type is installed here (MissingBinding).
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bound = by_slot(options.bindings)
        checked = 0
        for home, slots in slots_by_target(unit).items():
            for slot in slots.values():
                if slot.component(bound) is None:
                    target = unit.partitions[home].name
                    raise UnboundSlot(slot=slot.name, role=slot.role, target=target)
                checked += 1
        return {"slots_bound": checked}
