"""What `Record` keeps: the newest values of all names together.

Rule: bounded in number and in bytes. A value is charged to the node's byte budget and owns its
memory; what is oldest makes room for what comes, and a value that does not fit even then is
not kept, and counted (`records.dropped`).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from bbnode.engine.ingress import ByteBudget
from bbnode.engine.stores import Kept, detached
from bbnode.ir.caps import MAX_RECORD_BYTES, MAX_RECORDS
from bbnode.ir.values import Value, size_of

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


Row = tuple[int, int, str, Value]  # time, execution, name, value


class Records:
    """The ring of one node."""

    def __init__(self, budget: ByteBudget, counts: Counter[str]) -> None:
        self._budget = budget
        self._counts = counts
        self._rows: deque[tuple[int, int, str, Kept]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[Row]:
        """What is kept, oldest first."""
        return [(at_ns, execution, name, kept.value) for at_ns, execution, name, kept in self._rows]

    def add(self, now_ns: int, execution: int, name: str, value: Value) -> None:
        """Keep a value; older ones go where there is no room."""
        size = size_of(value)
        if size > MAX_RECORD_BYTES:
            self._counts["records.dropped"] += 1
            return
        while self._rows and (
            len(self._rows) >= MAX_RECORDS or self._bytes + size > MAX_RECORD_BYTES
        ):
            self._drop_oldest()
        charge = self._budget.charge(size)
        while charge is None and self._rows:
            self._drop_oldest()
            charge = self._budget.charge(size)
        if charge is None:
            self._counts["records.dropped"] += 1
            return
        self._bytes += size
        self._rows.append((now_ns, execution, name, Kept(detached(value), charge)))

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: what is kept, oldest first."""
        return [
            [at_ns, execution, name, kept.state(names)]
            for at_ns, execution, name, kept in self._rows
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        for at_ns, execution, name, row in plain:
            kept = Kept.loaded(row, names)
            self._rows.append((at_ns, execution, name, kept))
            self._bytes += kept.charge.size

    def _drop_oldest(self) -> None:
        kept = self._rows.popleft()[3]
        self._bytes -= kept.charge.size
        kept.charge.release()
