"""Slices: the ops of each entry of a partition, and those that no entry can fire.

Rule: an entry starts executions. It is `invoke`, with all inputs or with those of one part of the
program, one input as an event, a Recv, an event-sourced syscall, or a join over executions. Its
outputs are the seeds, and it owns the ops that can fire from them:

1. every op that depends on a seed by data or `after` and whose dependencies can all be met by the
   seeds and by ops that need no seed at all (seedless ops);
2. the seedless ops that those depend on, by data or `after`;
3. seedless ops without such a dependent op ("orphans", such as a `train` whose result is not
   used) go to the slice of the op that they follow by `control_after`; else to that of the op
   that follows them; else to `invoke`.

Case 3 keeps calls on one slot in the execution in which their author wrote them, and never
pulls an op into a second entry only because the slot is used there as well.

An op that needs values of two entries is in no slice. The same holds for the readers of a Threshold
whose inputs do not meet in one execution, since its relays count per execution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bbnode.ir import keys
from bbnode.ir.flatten import (
    ENGINE_DOMAIN,
    OP_DEPOSIT,
    OP_JOINED,
    OP_RELAY,
    FlatFunction,
    FlatOp,
    is_join,
)
from bbnode.ir.graph import OpNode, is_onnx_domain
from bbnode.ir.opset import is_custom, lookup_op

INVOKE = "invoke"

EVENT_SOURCES = frozenset({"Pulse", "Interval", "EventSource", "LifecyclePhase"})


@dataclass(slots=True, kw_only=True)
class Slice:
    """One entry: its seeds by name, its ops in program order; `source` makes the seeds."""

    name: str
    seeds: tuple[str, ...]
    source: FlatOp | None
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """An op that can never fire, because it needs values of two executions.

    `first`, `second`: each value with the entry in whose executions it exists.
    """

    op: FlatOp
    first: tuple[str, Slice]
    second: tuple[str, Slice]


def is_entry(op: FlatOp) -> bool:
    """Return True if an op starts executions and never runs inside one."""
    return op.is_a(ENGINE_DOMAIN, OP_JOINED) or _is_source(op.domain, op.op_type)


def starts_executions(node: OpNode) -> bool:
    """Return True if an op starts executions, to which its outputs belong."""
    return _is_source(node.domain, node.op_type) or is_join(node)


def _is_source(domain: str, op_type: str) -> bool:
    if domain == keys.WIRE_DOMAIN:
        return op_type in keys.INBOUND_OPS
    return domain == keys.SYSCALL_DOMAIN and op_type in EVENT_SOURCES


def cut_slices(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]]
) -> tuple[list[Slice], list[int]]:
    """Return all slices, `invoke` first, and the positions of ops that can never fire."""
    cutter = _Cutter(flat, makers)
    entries = _entries(flat)
    owned = [cutter.dependent(seeds) for _, seeds, _ in entries]
    cutter.place_orphans(owned)
    slices = [
        Slice(name=name, seeds=seeds, source=source, positions=tuple(sorted(mine)))
        for (name, seeds, source), mine in zip(entries, owned, strict=True)
    ]
    covered = {source.position for _, _, source in entries if source}.union(*owned)
    never = set(cutter.never_complete())
    unreachable = [p for p in range(len(flat.ops)) if p not in covered or p in never]
    if len(flat.inputs) > 1:
        # With a single input, an event and an invoke are the same.
        parts = [part for part in input_parts(flat) if 1 < len(part) < len(flat.inputs)]
        for seeds in (*((name,) for name in flat.inputs), *parts):
            positions = tuple(sorted(cutter.dependent(seeds)))
            name = part_name(seeds)
            slices.append(Slice(name=name, seeds=seeds, source=None, positions=positions))
    return slices, unreachable


def part_name(inputs: Iterable[str]) -> str:
    """Return the name of the slice of several inputs; for one input it is the input's name."""
    return "+".join(inputs)


def input_parts(flat: FlatFunction) -> list[tuple[str, ...]]:
    """Return the inputs in independent parts: no op depends on inputs of two parts."""
    readers: dict[str, list[FlatOp]] = {}
    for op in flat.ops:
        for name in () if is_entry(op) else op.needs:
            readers.setdefault(name, []).append(op)
    part = {name: [name] for name in flat.inputs}
    first: dict[int, str] = {}  # of a group of ops: the input that reached it first
    passed: set[int] = set()
    for seed in flat.inputs:
        fresh = [seed]
        while fresh:
            for op in readers.get(fresh.pop(), ()):
                other = part[first.setdefault(op.group, seed)]
                if other is not part[seed]:
                    other += part[seed]
                    part.update(dict.fromkeys(part[seed], other))
                if op.position not in passed:
                    passed.add(op.position)
                    fresh += op.outputs
    together = {id(names): set(names) for names in part.values()}
    return [tuple(n for n in flat.inputs if n in names) for names in together.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """An input delivered as an event, while some ops need further inputs with it.

    `needs`: these further inputs; `lost`: outputs without a value then; `acts`: True if the event
    still has an effect (an output, a send, a change of a component).
    """

    needs: tuple[str, ...]
    lost: tuple[str, ...]
    acts: bool


def inputs_alone(flat: FlatFunction, makers: Mapping[str, Sequence[int]]) -> dict[str, Alone]:
    """Return the inputs whose events leave some ops of the program unfired."""
    alone_: dict[str, Alone] = {}
    shared = [part for part in input_parts(flat) if len(part) > 1]
    cutter = _Cutter(flat, makers) if shared else None
    for part in shared:
        for name in part:
            if cutter is not None:
                alone = cutter.alone(name, part)
                if alone is not None:
                    alone_[name] = alone
    return alone_


def _acts(op: FlatOp) -> bool:
    """Return True if an op has an effect beside its outputs."""
    if op.domain == ENGINE_DOMAIN:
        return op.op_type == OP_DEPOSIT
    if is_onnx_domain(op.domain) or op.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        return False
    spec = lookup_op(op.domain, op.op_type)
    if spec is None or is_custom(op.domain):
        return True
    if spec.role is not None:
        return spec.changes or spec.role == "Protocol"
    return not op.outputs or op.domain == keys.WIRE_DOMAIN or op.op_type in _STORES


# Framework ops that use the node's stores.
_STORES = frozenset({"Serialize.Enqueue", "Serialize.Dequeue", "Hold.Flush", "Limit.Acquire"})


def _entries(flat: FlatFunction) -> list[tuple[str, tuple[str, ...], FlatOp | None]]:
    """Return name, seeds and source of each entry, `invoke` first."""
    found: list[tuple[str, tuple[str, ...], FlatOp | None]] = [(INVOKE, flat.inputs, None)]
    found += [(op.name, tuple(n for n in op.outputs if n), op) for op in flat.ops if is_entry(op)]
    return found


def left_out(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], piece: Slice
) -> list[tuple[FlatOp, list[str]]]:
    """Return the ops that depend on a slice of some inputs, and also need other inputs.

    Ops downstream of these are not listed. Each comes with the inputs that it lacks.
    """
    mine = set(piece.positions)
    arrived: dict[int, int] = {}
    there, fed = set(piece.seeds), set(piece.seeds)  # what the slice makes, and makes of its seeds
    found: dict[int, tuple[FlatOp, list[str]]] = {}
    for op in flat.ops:
        if is_entry(op) or (op.position in mine and not op.is_a(ENGINE_DOMAIN, OP_RELAY)):
            is_fed = not fed.isdisjoint(op.needs)
        elif op.position in mine:
            arrived[op.group] = arrived.get(op.group, 0) + 1
            if arrived[op.group] < _arrivals(op):
                continue
            is_fed = True
        else:
            if not op.is_a(ENGINE_DOMAIN, OP_RELAY) and not fed.isdisjoint(op.needs):
                found[op.position] = op, _lacking(flat, makers, op, there)
            continue
        there.update(op.outputs)
        if is_fed and not is_entry(op):
            fed.update(op.outputs)
    for op in flat.ops:
        if arrived.get(op.position, 0) and arrived[op.group] < _arrivals(op):
            rivals = [other for other in flat.ops if other.group == op.group]
            names = [name for each in rivals for name in _lacking(flat, makers, each, there)]
            found[op.position] = op, list(dict.fromkeys(names))
    return [found[position] for position in sorted(found) if found[position][1]]


def _lacking(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], op: FlatOp, there: Collection[str]
) -> list[str]:
    """Return the target's inputs that an op needs, directly or indirectly, beyond `there`."""
    seen: set[str] = set()
    stack = list(op.needs)
    while stack:
        name = stack.pop()
        if name in seen or name in there:
            continue
        seen.add(name)
        stack += [need for position in makers[name] for need in flat.ops[position].needs]
    return [name for name in flat.inputs if name in seen]


def find_apart(
    flat: FlatFunction, makers: Mapping[str, Sequence[int]], unreachable: Sequence[int]
) -> Apart | None:
    """Return the first op whose values never meet, of those that can never fire or complete.

    `unreachable` is the result of `cut_slices`; the other ops in it wait for such an op.
    """
    if not unreachable:
        return None
    cutter = _Cutter(flat, makers)
    entries = [
        Slice(name=name, seeds=seeds, source=source, positions=())
        for name, seeds, source in _entries(flat)
    ]
    values = [cutter.values(entry.seeds) for entry in entries]
    for position in sorted(unreachable):
        where = {
            name: [at for at, known in enumerate(values) if name in known]
            for name in cutter.needs_of(position)
            if name not in cutter.everywhere
        }
        best = max(range(len(entries)), key=lambda at: sum(at in found for found in where.values()))
        there = next((name for name in where if best in where[name]), None)
        away = next((n for n, found in where.items() if found and best not in found), None)
        if there is not None and away is not None and all(where.values()):
            return Apart(
                op=flat.ops[position],
                first=(there, entries[best]),
                second=(away, entries[where[away][0]]),
            )
    return None


def _arrivals(op: FlatOp) -> int:
    """Return the number of relays of an op's group that must fire before its output exists."""
    count = op.node.attr("n") if op.node.op_type == keys.OP_THRESHOLD else 1
    return count if type(count) is int else 1


class _Cutter:
    def __init__(self, flat: FlatFunction, makers: Mapping[str, Sequence[int]]) -> None:
        self._ops = flat.ops
        self._outputs = tuple(dict.fromkeys(flat.outputs))
        self._makers = makers
        # An op that starts executions waits for nothing; its `after` only determines its home.
        self._needs = [() if is_entry(op) else op.needs for op in flat.ops]
        self._readers: dict[str, list[int]] = {}
        for position, needs in enumerate(self._needs):
            for name in needs:
                self._readers.setdefault(name, []).append(position)
        self._followers: dict[int, list[int]] = {}
        for op in flat.ops:
            for before in op.control:
                self._followers.setdefault(before, []).append(op.position)
        # Threshold that needs several inputs -> the relays that count them.
        self._counted: dict[int, list[int]] = {}
        for op in flat.ops:
            if op.is_a(ENGINE_DOMAIN, OP_RELAY) and _arrivals(op) > 1:
                self._counted.setdefault(op.group, []).append(op.position)
        self._complete: set[int] = set()
        self._arrived: dict[int, int] = {}  # of each Threshold, inputs that need no seed
        self.everywhere, seedless = self._fireable(())  # the values that need no seed
        self._seedless = set(seedless)

    def values(self, seeds: Sequence[str]) -> set[str]:
        """Return the values that exist only in executions with these seeds."""
        return self._fireable(seeds, self.everywhere)[0]

    def alone(self, name: str, part: Sequence[str]) -> Alone | None:
        """Return the effects of one input of a part as an event, None if nothing is left out."""
        values, fires = self._fireable((name,), self.everywhere)
        fired = set(fires)
        behind, waits, fresh = {name}, False, [name]
        while fresh:
            for reader in self._readers.get(fresh.pop(), ()):
                made = [each for each in self._ops[reader].outputs if each not in behind]
                behind.update(made)
                fresh += made
                waits = waits or not values.issuperset(filter(None, self._ops[reader].outputs))
                waits = waits or reader not in fired
        lost = tuple(out for out in self._outputs if out in behind and out not in values)
        if not waits and not lost:
            return None
        shown = any(out in values for out in self._outputs)
        return Alone(
            needs=tuple(other for other in part if other != name),
            lost=lost,
            acts=shown or any(_acts(self._ops[position]) for position in fired),
        )

    def never_complete(self) -> list[int]:
        """Return the relays of each Threshold for which no entry has brought enough inputs."""
        return [
            position
            for group, relays in self._counted.items()
            if group not in self._complete
            for position in relays
        ]

    def needs_of(self, position: int) -> list[str]:
        """Return the values that must meet for an op, or for the Threshold of a relay."""
        relays = self._counted.get(self._ops[position].group, (position,))
        return list(dict.fromkeys(name for each in relays for name in self._needs[each]))

    def _fireable(
        self, seeds: Iterable[str], base: Collection[str] | None = None
    ) -> tuple[set[str], list[int]]:
        """Return values and ops that come from `seeds`; `base` are values made without any."""
        values: set[str] = set()
        there = frozenset() if base is None else base
        arrived = self._arrived if base is None else self._arrived.copy()
        missing: dict[int, int] = {}
        fired: list[int] = []
        fresh = [name for name in seeds if name not in there]
        if base is None:
            for op in self._ops:
                if not self._needs[op.position] and not is_entry(op):
                    self._fire(op, fired, fresh, arrived)
        while fresh:
            name = fresh.pop()
            if name in values or name in there:
                continue
            values.add(name)
            for reader in self._readers.get(name, ()):
                if reader not in missing:
                    missing[reader] = sum(need not in there for need in self._needs[reader])
                missing[reader] -= 1
                if missing[reader] == 0:
                    self._fire(self._ops[reader], fired, fresh, arrived)
        return values, fired

    def _fire(
        self, op: FlatOp, fired: list[int], fresh: list[str], arrived: dict[int, int]
    ) -> None:
        fired.append(op.position)
        if op.group in self._counted:
            arrived[op.group] = arrived.get(op.group, 0) + 1
            if arrived[op.group] != _arrivals(op):
                return
            self._complete.add(op.group)
        fresh.extend(name for name in op.outputs if name)

    def dependent(self, seeds: Sequence[str]) -> set[int]:
        """Return the ops of one entry by rules 1 and 2."""
        _, fired = self._fireable(seeds, self.everywhere)
        mine = set(fired)
        for position in fired:
            self._add_needed(position, mine)
            for relay in self._counted.get(self._ops[position].group, ()):
                if relay in self._seedless and relay not in mine:
                    mine.add(relay)
                    self._add_needed(relay, mine)
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
        """Assign the orphans by rule 3; `owned` has the invoke entry first."""
        orphans = sorted(self._seedless.difference(*owned))
        left = self._follow(orphans, owned)
        for position in reversed(left):
            self._precede(position, owned)
        left = self._follow([p for p in left if not any(p in mine for mine in owned)], owned)
        for position in left:
            owned[0].add(position)
            self._add_needed(position, owned[0])

    def _follow(self, orphans: list[int], owned: list[set[int]]) -> list[int]:
        """Assign orphans to the entries of the ops that they follow; return the others."""
        left = []
        for position in orphans:
            if any(position in mine for mine in owned):
                continue
            makers = (m for name in self._needs[position] for m in self._makers[name])
            # Constants are everywhere, so they do not determine an op's entry.
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
        """Assign an orphan to the entry of the op that follows it."""
        followers = self._followers.get(position, ())
        for mine in owned:
            if any(follower in mine for follower in followers):
                mine.add(position)
                self._add_needed(position, mine)
