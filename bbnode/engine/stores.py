"""Values and units that outlive executions: semaphores, queues, held values, records.

Rule: each is named in the program and belongs to the node, shared by all of its executions and
targets. Ops wait in line, first come, first served, until their deadline or the end of their
execution. Stored values are charged to the node's byte budget and own their memory: a view would
keep its whole envelope alive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from bbnode.engine.counts import Counts
from bbnode.engine.errors import BudgetExceeded
from bbnode.engine.ingress import ByteBudget, Charge
from bbnode.engine.snapshot.codec import (
    CHARGE,
    PLAIN,
    VALUE,
    RowForm,
    SnapshotReader,
    SnapshotWriter,
    many,
    optional,
)
from bbnode.ir.caps import MAX_RECORD_BYTES, MAX_RECORDS
from bbnode.ir.values import (
    Composite,
    OptionalValue,
    ResponseBatch,
    TensorSequence,
    Value,
    size_of,
)


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
class StoredValue:
    """A value that outlives its execution, and its charge."""

    value: Value
    charge: Charge


# The form of a stored value in snapshots.
STORED = RowForm(StoredValue, value=VALUE, charge=CHARGE)
_QUEUES = many(many(STORED, deque))
_HOLDS = many(optional(STORED), list)


@dataclass(slots=True)
class ValueQueue:
    """Values in the order of their coming."""

    name: str
    values: deque[StoredValue] = field(default_factory=deque)
    line: dict[int, None] = field(default_factory=dict)


class Stores:
    """Semaphores and queues by number, held values by number."""

    __slots__ = (
        "_budget",
        "holds",
        "queues",
        "semaphores",
    )

    def __init__(self, budget: ByteBudget, plan: StorePlan) -> None:
        self._budget = budget
        self.semaphores = tuple(Semaphore(s.name, s.units, s.units) for s in plan.semaphores)
        self.queues = tuple(ValueQueue(name) for name in plan.queues)
        self.holds: list[StoredValue | None] = [None] * len(plan.holds)

    def keep(self, value: Value, what: str) -> StoredValue:
        """Return a value to be stored, charged and detached. Raises BudgetExceeded."""
        charge = self.charge(size_of(value), what)
        return StoredValue(detached(value), charge)

    def charge(self, size: int, what: str) -> Charge:
        """Return the charge of so many bytes. Raises BudgetExceeded."""
        charge = self._budget.charge(size)
        if charge is None:
            raise BudgetExceeded(
                f"{what}: {size} bytes to keep and {self._budget.remaining} are left "
                "(limit ingress_bytes)"
            )
        return charge

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: units and values. Lines are those of parked ops."""
        return [
            [semaphore.free for semaphore in self.semaphores],
            _QUEUES.save([queue.values for queue in self.queues], writer),
            _HOLDS.save(self.holds, writer),
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        free, queues, holds = plain
        for semaphore, units in zip(self.semaphores, free, strict=True):
            semaphore.free = units
        for queue, values in zip(self.queues, _QUEUES.load(queues, reader), strict=True):
            queue.values = values
        self.holds = _HOLDS.load(holds, reader)

    def counters(self) -> dict[str, int]:
        """Return gauges for the host."""
        return {
            "queues.values": sum(len(queue.values) for queue in self.queues),
            "holds.values": sum(kept is not None for kept in self.holds),
            "semaphores.taken": sum(s.units - s.free for s in self.semaphores),
        }


def detached(value: Value) -> Value:
    """Return the value, with arrays that own their memory."""
    if isinstance(value, np.ndarray):
        if value.base is None:
            return value
        array = value.copy()
        array.flags.writeable = False
        return array
    if isinstance(value, Composite):
        return Composite(detached(child) for child in value)
    if isinstance(value, TensorSequence):
        return TensorSequence((detached(tensor) for tensor in value), value.type.element)
    if isinstance(value, OptionalValue) and value.value is not None:
        return OptionalValue(detached(value.value), value.type.element)
    if isinstance(value, ResponseBatch):
        return ResponseBatch(
            responses=tuple((peer, detached(answer)) for peer, answer in value.responses),
            missing=value.missing,
            reasons=value.reasons,
            took_ns=value.took_ns,
        )
    return value


# Time, execution, name, value.
RecordRow: TypeAlias = tuple[int, int, str, Value]


@dataclass(frozen=True, slots=True)
class _Record:
    at_ns: int
    execution: int
    name: str
    kept: StoredValue


_RECORDS = many(RowForm(_Record, at_ns=PLAIN, execution=PLAIN, name=PLAIN, kept=STORED), list)


class Records:
    """The newest values of all Record ops together, bounded in number and in bytes.

    The oldest make room for new ones; a value that does not fit even then is dropped and counted
    (`records.dropped`).
    """

    __slots__ = (
        "_budget",
        "_bytes",
        "_counts",
        "_rows",
    )

    def __init__(self, budget: ByteBudget, counts: Counts) -> None:
        self._budget = budget
        self._counts = counts
        self._rows: list[_Record] = []  # MAX_RECORDS at most
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[RecordRow]:
        """Return all rows, oldest first."""
        return [(row.at_ns, row.execution, row.name, row.kept.value) for row in self._rows]

    def add(self, now_ns: int, execution: int, name: str, value: Value) -> None:
        """Keep a value, dropping older ones to make room."""
        size = size_of(value)
        charge = None
        if size <= MAX_RECORD_BYTES:
            while len(self._rows) >= MAX_RECORDS or self._bytes + size > MAX_RECORD_BYTES:
                self._drop_oldest()
            charge = self._budget.charge(size)
            while charge is None and self._rows:
                self._drop_oldest()
                charge = self._budget.charge(size)
        if charge is None:
            self._counts["records.dropped"] += 1
            return
        self._bytes += size
        self._rows.append(_Record(now_ns, execution, name, StoredValue(detached(value), charge)))

    def _drop_oldest(self) -> None:
        charge = self._rows.pop(0).kept.charge
        self._bytes -= charge.size
        charge.release()

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves, oldest first."""
        return _RECORDS.save(self._rows, writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        self._rows = _RECORDS.load(plain, reader)
        self._bytes = sum(row.kept.charge.size for row in self._rows)
