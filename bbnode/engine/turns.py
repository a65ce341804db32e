"""Executions of one entry that take turns, because they share what a component keeps.

Rule: an entry that uses a component twice or more, and changes it, runs one execution at a time,
in the order in which they came: `load_parameters` and `train` of two rounds never mix. An
execution waits for others of its own entry alone; what it waits for on the way are entries
further down the program, so that turns can't wait for each other in a circle. Entries that wait
for other executions by themselves (queues, held values, semaphores) do not take turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from bbnode.engine.errors import DeadlineExceeded
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.parking import Waiting
from bbnode.ir import keys, opset, protos

if TYPE_CHECKING:
    from bbnode.engine.planning.flatten import FlatOp
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.names import LoadedNames, SavedNames

# Ops that another execution, maybe of the same entry, has to release.
_WAIT_FOR_OTHERS: Final = frozenset({"Serialize.Dequeue", "Hold.Flush", "Limit.Acquire"})
# Until when a turn is said to be waited for where the execution has no deadline: each op before it
# has one of its own.
MAX_TURN_NS: Final = 3_600 * 1_000_000_000


def runs_in_turn(ops: Iterable[FlatOp]) -> bool:
    """Whether executions of these ops have to take turns."""
    uses: Counter[str] = Counter()
    changed: set[str] = set()
    for op in ops:
        if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _WAIT_FOR_OTHERS:
            return False
        slot = protos.get_meta(op.node, keys.SLOT_KEY)
        spec = opset.lookup_op(op.domain, op.op_type)
        if slot is not None and spec is not None and spec.role is not None:
            uses[slot] += 1
            if spec.changes:
                changed.add(slot)
    return any(uses[slot] > 1 for slot in changed)


class Turns:
    """Who runs and who waits, by entry."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._running: dict[EntryPlan, Frame] = {}
        self._lines: dict[EntryPlan, deque[Frame]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def take(self, frame: Frame) -> bool:
        """Whether it is the execution's turn; otherwise it waits for it."""
        plan = frame.plan
        if plan not in self._running:
            self._running[plan] = frame
            return True
        self._lines.setdefault(plan, deque()).append(frame)
        return False

    def give_back(self, frame: Frame) -> None:
        """The execution has ended: it is the next one's turn."""
        plan = frame.plan
        line = self._lines.get(plan, deque())
        if self._running.get(plan) is not frame:
            if frame in line:
                line.remove(frame)
            return
        del self._running[plan]
        while line:
            following = line.popleft()
            if self._is_late(following):
                continue
            self._running[plan] = following
            self._rt.begin(following)
            return
        self._lines.pop(plan, None)

    def _is_late(self, frame: Frame) -> bool:
        deadline = frame.deadline_ns
        if deadline is None or self._rt.now_ns < deadline:
            return False
        error = DeadlineExceeded("its turn came after its deadline: those before it took too long")
        frame.failures += 1
        self._rt.fail_start(frame.execution, frame.plan, error, from_bus=frame.from_bus)
        self._rt.end(frame)
        return True

    def waiting(self) -> list[Waiting]:
        """Executions that wait for their turn."""
        return [
            Waiting(
                what=frame.plan.name,
                why="its turn",
                whom=f"execution {self._running[plan].execution}",
                execution=frame.execution,
                target=plan.target,
                since_ns=frame.started_ns,
                until_ns=frame.deadline_ns or frame.started_ns + MAX_TURN_NS,
            )
            for plan, line in self._lines.items()
            for frame in line
        ]

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: the executions of each entry, the running one first."""
        return [
            [names.frame(frame), *(names.frame(f) for f in self._lines.get(plan, ()))]
            for plan, frame in self._running.items()
        ]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, frames being there."""
        for running, *line in plain:
            frame = names.frame(running)
            self._running[frame.plan] = frame
            if line:
                self._lines[frame.plan] = deque(names.frame(number) for number in line)
