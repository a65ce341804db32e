"""`sequence_slot_effects`: the ops of one slot fire in program order.

Rule: components have state, and a program means what its lines say in their order. Backend
ops have none and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from bbnode.compiler.analysis.entries import INVOKE, EntryMap, slot_of
from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.analysis.order import add_control, program_order, reorder
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key


class SequenceSlotEffects(Pass):
    """Adds control edges between the ops of a slot, in every function.

    1. Of two consecutive ops of one slot that fire in executions of the same entry, the later
       has the earlier in `control_after`. Ops of different entries never meet in an execution.
    2. A call of a function counts as an op of every slot that the function uses.
    3. An op that reads from no entry, and from which none reads, continues what the slot's op
       before it does: it gets an output of that op as `after` too, and so fires wherever that
       one fires (`load_parameters` with a received value, then `train`). The first op of a slot
       has none before it: it belongs to the entries for which its inputs are made, or else to
       `invoke`.
    4. Edges follow program order, so they close no cycle.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.bodies())
        calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
        effects: dict[FunctionKey, tuple[str, ...]] = {}
        edges = pins = 0
        for key in callees_first(table, calls):
            sequence = _Sequence(table[key], effects)
            effects[key] = tuple(sequence.slots)
            if sequence.ops:
                sequence.run()
                edges += sequence.edges
                pins += sequence.pins
        return {"control_edges": edges, "ops_pinned": pins}


# Pinning an op moves what reads from it to another entry, which can decide where further ops
# belong. Programs settle in one or two rounds; the cap keeps hostile ones linear.
MAX_ROUNDS = 4


class _Sequence:
    """The work on one function."""

    def __init__(self, function: Function, effects: dict[FunctionKey, tuple[str, ...]]) -> None:
        self._function = function
        self.edges = self.pins = 0
        if any(_slots_of(node, effects) for node in function.nodes):
            reorder(function, program_order(function.nodes, given=function.inputs))
        self._nodes = list(function.nodes)
        # Slot ops and the slots that they touch.
        listed = [_slots_of(node, effects) for node in self._nodes]
        self.ops = [(index, slots) for index, slots in enumerate(listed) if slots]
        self.slots = dict.fromkeys(slot for _, slots in self.ops for slot in slots)
        self._reads: list[tuple[str, ...]] = []

    def run(self) -> None:
        self._reads = [node.reads for node in self._nodes]
        entries = EntryMap.of(self._function, self._reads)
        for _ in range(MAX_ROUNDS):
            if not self._pin(entries, to_invoke=False):
                break
            entries = EntryMap.of(self._function, self._reads)
        # What is left continues `invoke`, unless a pin above gave it another entry.
        if self._pin(entries, to_invoke=True):
            entries = EntryMap.of(self._function, self._reads)
        self._add_edges(entries)

    def _keyed(self, entries: EntryMap) -> Iterator[tuple[int, tuple[str, ...], int, int | None]]:
        """Slot ops with the entries they fire in, and the op that an undecided one continues."""
        last: dict[str, tuple[int, int]] = {}  # slot -> op before, its key
        for index, slots in self.ops:
            key = entries.key(index)
            before: int | None = None
            if not key:
                known = [last[slot] for slot in slots if slot in last]
                before, key = max(known) if known else (None, entries.beside[index] or INVOKE)
            yield index, slots, key, before
            last.update((slot, (index, key)) for slot in slots)

    def _pin(self, entries: EntryMap, *, to_invoke: bool) -> bool:
        pinned = False
        for index, _, key, before in self._keyed(entries):
            if before is None or (key == INVOKE and not to_invoke):
                continue
            value = next((name for name in self._nodes[before].outputs if name), None)
            if value is not None and value not in self._reads[index]:
                node = self._nodes[index]
                node.after = (*node.after, value)
                self._reads[index] = node.reads
                self.pins += 1
                pinned = True
        return pinned

    def _add_edges(self, entries: EntryMap) -> None:
        last: dict[tuple[str, int], str] = {}  # (slot, entry bit) -> node name
        for index, slots, key, _ in self._keyed(entries):
            node = self._nodes[index]
            before: dict[str, None] = {}
            for bit in _bits(key):
                for slot in slots:
                    name = last.get((slot, bit))
                    if name is not None:
                        before[name] = None
                    last[slot, bit] = node.name
            if before:
                add_control(node, before)
                self.edges += len(before)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def _slots_of(node: OpNode, effects: dict[FunctionKey, tuple[str, ...]]) -> tuple[str, ...]:
    slot = slot_of(node)
    if slot is not None:
        return (slot,)
    return effects.get(call_key(node), ()) if effects else ()
