"""`sequence_slot_effects`: program order for the ops of one slot, where it matters.

Rule: components have state, and a program's lines take effect in their order. Two ops that both
leave the component unchanged need no order, and backend ops change nothing. The op table lists
the ops that do (`OpSpec.keeps_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bbnode.compiler.analysis.entries import INVOKE, EntryMap, slot_of
from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.analysis.order import add_control, program_order, reorder
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key
from bbnode.ir.opset import lookup_op
from bbnode.ir.slices import starts_executions

# Slots that an op or a function uses; True if it changes the component.
Uses = Mapping[str, bool]


class SequenceSlotEffects(Pass):
    """Adds control edges between the ops of a slot, in every function.

    1. Of two ops of one slot that fire in executions of the same entry, and of which one changes
       the component, the later has the earlier in `control_after`, or one between them. Ops of
       different entries never meet in an execution.
    2. A call of a function counts as an op of every slot that the function uses.
    3. An op that reads from no entry, and from which none reads, belongs where the slot's op before
       it does. It gets an output of the last op there that changed the component as `after`, and
       so does not fire without it (`load_parameters` with a received value, then `train`); if none
       did, what starts these executions, where that is not `invoke`. The first op of a slot has
       none before it: it belongs to the entries for which its inputs are made, or else to `invoke`.
    4. Edges follow program order, so they close no cycle.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.bodies())
        calls = {key: [k for _, k in calls_of(f, table)] for key, f in table.items()}
        effects: dict[FunctionKey, Uses] = {}
        edges = pins = 0
        for key in callees_first(table, calls):
            sequence = _Sequence(table[key], effects)
            effects[key] = sequence.slots
            if sequence.ops:
                sequence.run()
                edges += sequence.edges
                pins += sequence.pins
        return {"control_edges": edges, "ops_pinned": pins}


class _Pin(NamedTuple):
    """An op without an entry of its own: it joins the entries `key` of the op `before`."""

    op: int
    key: int
    before: int
    changed: int | None  # last op there that changed the component


# Pinning an op moves its readers to another entry, which can determine the entries of further
# ops. Programs settle in one or two rounds; the cap keeps hostile ones linear.
MAX_ROUNDS = 4


class _Sequence:
    """Sequences the slot ops of one function."""

    def __init__(self, function: Function, effects: Mapping[FunctionKey, Uses]) -> None:
        self._function = function
        self.edges = self.pins = 0
        if any(_uses(node, effects) for node in function.nodes):
            reorder(function, program_order(function.nodes, given=function.inputs))
        self._nodes = list(function.nodes)
        # Slot ops and the slots that they use.
        listed = [_uses(node, effects) for node in self._nodes]
        self.ops = [(index, uses) for index, uses in enumerate(listed) if uses]
        self.slots: dict[str, bool] = {}
        for _, uses in self.ops:
            for slot, changes in uses.items():
                self.slots[slot] = self.slots.get(slot, False) or changes
        self._reads: list[tuple[str, ...]] = []

    def run(self) -> None:
        self._reads = [node.reads for node in self._nodes]
        entries = EntryMap.of(self._function, self._reads)
        for _ in range(MAX_ROUNDS):
            if not self._pin(entries, to_invoke=False):
                break
            entries = EntryMap.of(self._function, self._reads)
        # The remaining ops continue `invoke`, unless a pin above gave them another entry.
        if self._pin(entries, to_invoke=True):
            entries = EntryMap.of(self._function, self._reads)
        self._add_edges(entries)

    def _keyed(self, entries: EntryMap) -> Iterator[tuple[int, Uses, int, int | None]]:
        """Yield slot ops, the entries they fire in, and the op that an undecided one continues."""
        last: dict[str, tuple[int, int]] = {}  # slot -> previous op, its key
        for index, uses in self.ops:
            key = entries.key(index)
            before: int | None = None
            if not key:
                known = [last[slot] for slot in uses if slot in last]
                before, key = max(known) if known else (None, entries.beside[index] or INVOKE)
            yield index, uses, key, before
            last.update((slot, (index, key)) for slot in uses)

    def _continued(self, keyed: Iterable[tuple[int, Uses, int, int | None]]) -> Iterator[_Pin]:
        """Yield undecided ops with the previous op and the op whose change they continue."""
        changed: dict[tuple[str, int], int] = {}  # slot and key -> last op that changed it
        for index, uses, key, before in keyed:
            if before is not None:
                known = [changed[slot, key] for slot in uses if (slot, key) in changed]
                yield _Pin(index, key, before, max(known, default=None))
            changed.update(((slot, key), index) for slot, changes in uses.items() if changes)

    def _pin(self, entries: EntryMap, *, to_invoke: bool) -> bool:
        pinned = False
        for pin in self._continued(self._keyed(entries)):
            if pin.key == INVOKE and not to_invoke:
                continue
            is_one = not pin.key & (
                pin.key - 1
            )  # with several entries, only `changed` exists in all of them
            if pin.changed is None and is_one:
                value = self._started_by(pin.key)
            else:
                at = pin.before if pin.changed is None else pin.changed
                value = next((name for name in self._nodes[at].outputs if name), None)
            if value is not None and value not in self._reads[pin.op]:
                node = self._nodes[pin.op]
                node.after = (*node.after, value)
                self._reads[pin.op] = node.reads
                self.pins += 1
                pinned = True
        return pinned

    def _started_by(self, key: int) -> str | None:
        """Return a value that starts each execution of an entry; None for `invoke`."""
        bit = INVOKE
        for node in self._nodes:
            if starts_executions(node):
                bit <<= 1
                if bit == key:
                    return next((name for name in node.outputs if name), None)
        return None

    def _add_edges(self, entries: EntryMap) -> None:
        # Slot and entry bit -> the last op that changed the component, and the ops since then.
        changed: dict[tuple[str, int], str] = {}
        since: dict[tuple[str, int], list[str]] = {}
        for index, uses, key, _ in self._keyed(entries):
            node = self._nodes[index]
            before: dict[str, None] = {}
            for bit in _bits(key):
                for slot, changes in uses.items():
                    at = slot, bit
                    others = since.setdefault(at, [])
                    if at in changed and not (changes and others):
                        before[changed[at]] = None
                    if changes:
                        before.update(dict.fromkeys(others))
                        changed[at], since[at] = node.name, []
                    else:
                        others.append(node.name)
            before.pop(node.name, None)
            if before:
                add_control(node, before)
                self.edges += len(before)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def _uses(node: OpNode, effects: Mapping[FunctionKey, Uses]) -> Uses:
    slot = slot_of(node)
    if slot is not None:
        spec = lookup_op(node.domain, node.op_type)
        return {slot: spec is None or spec.keeps_order}
    return effects.get(call_key(node), _NO_USES) if effects else _NO_USES


_NO_USES: Uses = {}
