"""What a node keeps for its programs between executions: semaphores, queues, held values.

Rule: each is named in the program and belongs to the node, shared by all of its executions
and targets. Who has to wait stands in line, first come, first served, and leaves the line by
its deadline or with its execution. Values that stay here are charged to the node's byte
budget, and own their memory: a view would keep the whole envelope alive that it came in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bbnode.engine.errors import BudgetExceeded
from bbnode.engine.ingress import ByteBudget, Charge
from bbnode.ir.values import Composite, ResponseBatch, Value, size_of

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


@dataclass(frozen=True, slots=True, kw_only=True)
class SemaphoreSpec:
    """A semaphore as the program declares it."""

    name: str
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """All that the installed targets name; numbers in ops are positions in these."""

    semaphores: tuple[SemaphoreSpec, ...] = ()
    queues: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


@dataclass(slots=True)
class Semaphore:
    """Units that are taken and given back."""

    name: str
    units: int
    free: int
    line: dict[int, None] = field(default_factory=dict)  # tokens of ops that wait


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that outlives its execution, and what it costs."""

    value: Value
    charge: Charge

    def state(self, names: SavedNames) -> Any:
        """For a snapshot."""
        return [names.value(self.value), names.charge(self.charge)]

    @classmethod
    def loaded(cls, plain: Any, names: LoadedNames) -> Kept:
        """What `state` gave."""
        value, charge = plain
        return cls(names.value(value), names.charge(charge))


@dataclass(slots=True)
class ValueQueue:
    """Values in the order of their coming."""

    name: str
    values: deque[Kept] = field(default_factory=deque)
    line: dict[int, None] = field(default_factory=dict)


class Stores:
    """Semaphores and queues by number, held values by number."""

    def __init__(self, budget: ByteBudget, plan: StorePlan) -> None:
        self._budget = budget
        self.semaphores = [Semaphore(s.name, s.units, s.units) for s in plan.semaphores]
        self.queues = [ValueQueue(name) for name in plan.queues]
        self.holds: list[Kept | None] = [None] * len(plan.holds)

    def keep(self, value: Value, what: str) -> Kept:
        """A value to be stored; raises BudgetExceeded when there is no room."""
        charge = self._budget.charge(size_of(value))
        if charge is None:
            raise BudgetExceeded(
                f"{what}: {size_of(value)} bytes to keep and {self._budget.remaining} are left "
                "(limit ingress_bytes)"
            )
        return Kept(detached(value), charge)

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: units, values and held values. Lines are those of parked ops."""
        return [
            [semaphore.free for semaphore in self.semaphores],
            [[kept.state(names) for kept in queue.values] for queue in self.queues],
            [None if kept is None else kept.state(names) for kept in self.holds],
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        free, queues, holds = plain
        for semaphore, units in zip(self.semaphores, free, strict=True):
            semaphore.free = units
        for queue, rows in zip(self.queues, queues, strict=True):
            queue.values = deque(Kept.loaded(row, names) for row in rows)
        self.holds = [None if row is None else Kept.loaded(row, names) for row in holds]

    def counters(self) -> dict[str, int]:
        """Gauges for the host."""
        return {
            "queues.values": sum(len(queue.values) for queue in self.queues),
            "holds.values": sum(kept is not None for kept in self.holds),
            "semaphores.taken": sum(s.units - s.free for s in self.semaphores),
        }


def detached(value: Value) -> Value:
    """The value, with arrays that own their memory."""
    if isinstance(value, np.ndarray):
        if value.base is None:
            return value
        array = value.copy()
        array.flags.writeable = False
        return array
    if isinstance(value, Composite):
        return Composite(detached(child) for child in value)
    if isinstance(value, ResponseBatch):
        return ResponseBatch(
            responses=tuple((peer, detached(answer)) for peer, answer in value.responses),
            missing=value.missing,
        )
    return value
