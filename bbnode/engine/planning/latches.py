"""The ops that fire once over several executions, found in the slices of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bbnode.engine.latches import LatchPlan
from bbnode.ir import keys
from bbnode.ir.flatten import ENGINE_DOMAIN, OP_RELAY, FlatFunction, FlatOp
from bbnode.ir.slices import INVOKE, Slice

# Ops that let time pass: an execution in which an input waits for one opens a round.
_TIMERS = frozenset({"After", "Sleep"})


def latches_of(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], pieces: Sequence[Slice]
) -> dict[int, LatchPlan]:
    """Return the latches by the group of their relays."""
    found: dict[int, LatchPlan] = {}
    relays: dict[int, list[FlatOp]] = {}
    for op in flat.ops:
        if op.is_a(ENGINE_DOMAIN, OP_RELAY) and _fires_once(op):
            relays.setdefault(op.group, []).append(op)
    # An input as an event is an execution that the host starts: the same as an invoke.
    entries = [piece for piece in pieces if piece.source is not None or piece.name == INVOKE]
    for group, rivals in relays.items():
        places = [{r.position for r in rivals}.intersection(e.positions) for e in entries]
        if len([place for place in places if place]) > 1:
            timed = any(opens_round(flat, makers, entry, group) for entry in entries)
            found[group] = LatchPlan(inputs=len(rivals), timed=timed)
    return found


def _fires_once(op: FlatOp) -> bool:
    return op.node.op_type == keys.OP_DEADLINE_MATCH or (
        op.node.op_type == keys.OP_ANY and bool(op.node.attr("group", ""))
    )


def opens_round(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], piece: Slice, group: int
) -> bool:
    """Return True if an input of the group waits for a timer in the executions of a slice."""
    mine = set(piece.positions)
    stack = [p for p in piece.positions if flat.ops[p].group == group]
    seen: set[int] = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        op = flat.ops[position]
        if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _TIMERS:
            return True
        stack += [p for name in op.needs() for p in makers[name] if p in mine]
    return False
