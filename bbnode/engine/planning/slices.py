"""Slices: the ops of each entry of a partition.

Rule: an entry is something that starts an execution: `invoke`, one input as an event, a Recv,
or an event-sourced syscall. Its outputs are the seeds, and it owns what can fire from them:

1. every op that depends on a seed by data or `after` and whose needs can all be met by the
   seeds and by ops that need no seed at all (seedless ops);
2. the seedless ops that those need, by data or `after`;
3. seedless ops that nobody needs so ("orphans", such as a `train` whose result is not
   used) go where the op runs that they follow by `control_after`; else where the op runs
   that follows them; else to `invoke`.

Case 3 keeps calls on one slot in the execution in which their author wrote them, and never
pulls an op into a second entry only because the slot is used there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bbnode.engine.planning.flatten import FlatFunction, FlatOp
from bbnode.ir import keys

INVOKE = "invoke"

EVENT_SOURCES = frozenset({"Pulse", "Interval", "EventSource", "LifecyclePhase"})


@dataclass(slots=True, kw_only=True)
class Slice:
    """One entry: its seeds by name, its ops in program order; `source` makes the seeds."""

    name: str
    seeds: tuple[str, ...]
    source: FlatOp | None
    positions: tuple[int, ...]


def is_entry(op: FlatOp) -> bool:
    """Return True if an op starts executions and never runs inside one."""
    if op.domain == keys.WIRE_DOMAIN:
        return op.op_type in keys.INBOUND_OPS
    return op.domain == keys.SYSCALL_DOMAIN and op.op_type in EVENT_SOURCES


def cut_slices(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]]
) -> tuple[list[Slice], list[int]]:
    """Return all slices, `invoke` first, and the positions of ops that can never fire."""
    cutter = _Cutter(flat, makers)
    sources = [op for op in flat.ops if is_entry(op)]
    entries: list[tuple[str, tuple[str, ...], FlatOp | None]] = [(INVOKE, flat.inputs, None)]
    entries += [(op.name, tuple(n for n in op.outputs if n), op) for op in sources]
    owned = [cutter.dependent(seeds) for _, seeds, _ in entries]
    cutter.place_orphans(owned)
    slices = [
        Slice(name=name, seeds=seeds, source=source, positions=tuple(sorted(mine)))
        for (name, seeds, source), mine in zip(entries, owned, strict=True)
    ]
    covered = {op.position for op in sources}.union(*owned)
    unreachable = [op.position for op in flat.ops if op.position not in covered]
    if len(flat.inputs) > 1:
        # With one input, an event and an invoke are the same thing.
        for name in flat.inputs:
            positions = tuple(sorted(cutter.dependent((name,))))
            slices.append(Slice(name=name, seeds=(name,), source=None, positions=positions))
    return slices, unreachable


class _Cutter:
    def __init__(self, flat: FlatFunction, makers: Mapping[str, Sequence[int]]) -> None:
        self._ops = flat.ops
        self._makers = makers
        self._needs = [tuple(op.needs()) for op in flat.ops]
        self._readers: dict[str, list[int]] = {}
        for position, needs in enumerate(self._needs):
            for name in needs:
                self._readers.setdefault(name, []).append(position)
        self._followers: dict[int, list[int]] = {}
        for op in flat.ops:
            for before in op.control:
                self._followers.setdefault(before, []).append(op.position)
        self._seedless_values, seedless = self._fireable(())
        self._seedless = set(seedless)

    def _fireable(
        self, seeds: Iterable[str], base: Iterable[str] | None = None
    ) -> tuple[set[str], list[int]]:
        """Return values and ops that come from `seeds`; `base` are values made without any."""
        values: set[str] = set(base or ())
        missing: dict[int, int] = {}
        fired: list[int] = []
        fresh = [name for name in seeds if name not in values]
        if base is None:
            for op in self._ops:
                if not self._needs[op.position] and not is_entry(op):
                    self._fire(op, fired, fresh)
        while fresh:
            name = fresh.pop()
            if name in values:
                continue
            values.add(name)
            for reader in self._readers.get(name, ()):
                if reader not in missing:
                    missing[reader] = sum(
                        1 for need in self._needs[reader] if need not in (base or ())
                    )
                missing[reader] -= 1
                if missing[reader] == 0:
                    self._fire(self._ops[reader], fired, fresh)
        return values, fired

    @staticmethod
    def _fire(op: FlatOp, fired: list[int], fresh: list[str]) -> None:
        fired.append(op.position)
        fresh.extend(name for name in op.outputs if name)

    def dependent(self, seeds: Sequence[str]) -> set[int]:
        """Rules 1 and 2 for one entry."""
        _, fired = self._fireable(seeds, self._seedless_values)
        mine = set(fired)
        for position in fired:
            self._add_needed(position, mine)
        return mine

    def _add_needed(self, position: int, mine: set[int]) -> None:
        stack = [position]
        while stack:
            for name in self._needs[stack.pop()]:
                for maker in self._makers[name]:
                    if maker in self._seedless and maker not in mine:
                        mine.add(maker)
                        stack.append(maker)

    def place_orphans(self, owned: list[set[int]]) -> None:
        """Rule 3; `owned` has the invoke entry first."""
        orphans = [p for p in sorted(self._seedless) if not any(p in mine for mine in owned)]
        left = self._follow(orphans, owned)
        for position in reversed(left):
            self._precede(position, owned)
        left = self._follow([p for p in left if not any(p in mine for mine in owned)], owned)
        for position in left:
            owned[0].add(position)
            self._add_needed(position, owned[0])

    def _follow(self, orphans: list[int], owned: list[set[int]]) -> list[int]:
        """Put orphans behind what they follow; return those that follow nothing."""
        left = []
        for position in orphans:
            if any(position in mine for mine in owned):
                continue
            makers = (m for name in self._needs[position] for m in self._makers[name])
            # A constant is everywhere, so that it says nothing about where an op belongs.
            before = [
                *self._ops[position].control,
                *(m for m in makers if self._ops[m].op_type != "Constant"),
            ]
            found = False
            for mine in owned:
                if any(p in mine for p in before):
                    mine.add(position)
                    self._add_needed(position, mine)
                    found = True
            if not found:
                left.append(position)
        return [p for p in left if not any(p in mine for mine in owned)]

    def _precede(self, position: int, owned: list[set[int]]) -> None:
        """Put an orphan in front of what follows it."""
        followers = self._followers.get(position, ())
        for mine in owned:
            if any(follower in mine for follower in followers):
                mine.add(position)
                self._add_needed(position, mine)
