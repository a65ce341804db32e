"""The ops that fire once over several executions, found in the slices of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bbnode.engine.latches import LatchPlan
from bbnode.ir import keys
from bbnode.ir.flatten import ENGINE_DOMAIN, OP_RELAY, FlatFunction, FlatOp
from bbnode.ir.slices import INVOKE, Slice

_TIMERS = frozenset({"After", "Sleep"})  # ops that let time pass
_TIMEOUT = 1  # input of DeadlineMatch


@dataclass(frozen=True, slots=True)
class FoundLatch:
    """One latch, and the names of the slices whose executions open its rounds."""

    plan: LatchPlan
    opened_by: frozenset[str]


def latches_of(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], pieces: Sequence[Slice]
) -> dict[int, FoundLatch]:
    """Return the latches by the group of their relays.

    The slices that open rounds are those in which an input waits for a timer: of DeadlineMatch, the
    timeout. If deliveries are among them, the others are meant. If all slices with an input are, no
    one does.
    """
    relays: dict[int, list[FlatOp]] = {}
    for op in flat.ops:
        if op.is_a(ENGINE_DOMAIN, OP_RELAY) and _fires_once(op):
            relays.setdefault(op.group, []).append(op)
    found: dict[int, FoundLatch] = {}
    for group, rivals in relays.items():
        positions = {relay.position for relay in rivals}
        having = [piece for piece in pieces if positions.intersection(piece.positions)]
        # An input as an event is an execution that the host starts: the same as an invoke.
        entries = [piece for piece in having if not _is_event(piece)]
        if len(entries) < 2:
            continue
        clock = _clocked(rivals)
        timed = [piece for piece in having if _waits(flat, makers, piece, clock)]
        opening = [piece for piece in timed if not _is_delivery(piece)] or timed
        if all(piece in opening for piece in entries):
            opening = []
        plan = LatchPlan(inputs=len(rivals), timed=bool(opening))
        found[group] = FoundLatch(plan, frozenset(piece.name for piece in opening))
    return found


def _fires_once(op: FlatOp) -> bool:
    return op.node.op_type == keys.OP_DEADLINE_MATCH or (
        op.node.op_type == keys.OP_ANY and bool(op.node.attr("group", ""))
    )


def _is_event(piece: Slice) -> bool:
    return piece.source is None and piece.name != INVOKE


def _is_delivery(piece: Slice) -> bool:
    return piece.source is not None and piece.source.domain == keys.WIRE_DOMAIN


def _clocked(rivals: Sequence[FlatOp]) -> set[int]:
    """Return the positions of the relays whose wait for a timer opens a round."""
    if rivals[0].node.op_type == keys.OP_DEADLINE_MATCH:
        return {relay.position for relay in rivals[_TIMEOUT:]}
    return {relay.position for relay in rivals}


def _waits(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], piece: Slice, relays: set[int]
) -> bool:
    """Return True if one of the relays waits for a timer in the executions of a slice."""
    mine = set(piece.positions)
    stack = list(relays & mine)
    seen: set[int] = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        op = flat.ops[position]
        if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _TIMERS:
            return True
        stack += [p for name in op.needs for p in makers[name] if p in mine]
    return False
