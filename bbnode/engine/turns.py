"""Executions of one entry that take turns, because they share what a component keeps.

Rule: an entry that uses a component twice or more, and changes it, runs one execution at a time,
in the order in which they came: `load_parameters` and `train` of two rounds never mix. An execution
waits for a turn only behind others of its own entry, and otherwise only for entries further down
the program, so turns can't deadlock. Payloads that are decoded in a thread take turns by peer and
site. Entries that wait for other executions anyway (queues, held values, semaphores) do not take
turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from bbnode.engine.clock import NodeClock
from bbnode.engine.deadlines import bound_of
from bbnode.engine.empty import EMPTY
from bbnode.engine.errors import DeadlineExceeded
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.limits import Limits
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.engine.suspensions import Waiting
from bbnode.ir import keys, opset
from bbnode.ir.errors import BbnodeError
from bbnode.ir.flatten import FlatOp
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal

# Ops that another execution, maybe of the same entry, has to release.
_WAIT_FOR_OTHERS: Final = frozenset({"Serialize.Dequeue", "Hold.Flush", "Limit.Acquire"})

# The turns of an entry, or of what one peer sends to one site.
_Key: TypeAlias = EntryPlan | tuple[EntryPlan, PeerId | None, int]


def _key(frame: Frame) -> _Key:
    plan = frame.plan
    return (plan, frame.source_peer, frame.site) if plan.by_sender else plan


def runs_in_turn(ops: Iterable[FlatOp]) -> bool:
    """Return True if executions of these ops have to take turns."""
    uses: Counter[str] = Counter()
    changed: set[str] = set()
    for op in ops:
        if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _WAIT_FOR_OTHERS:
            return False
        slot = op.node.metadata.get(keys.SLOT_KEY)
        spec = opset.lookup_op(op.domain, op.op_type)
        if slot is not None and spec is not None and spec.role is not None:
            uses[slot] += 1
            if spec.changes:
                changed.add(slot)
    return any(uses[slot] > 1 for slot in changed)


class Starter(Protocol):
    """The part of the executor that begins, refuses and ends executions."""

    def begin(self, frame: Frame) -> None:
        """Let an execution run."""

    def fail_start(
        self,
        execution: int,
        plan: EntryPlan,
        error: BbnodeError,
        *,
        from_bus: bool = False,
        source_peer: PeerId | None = None,
    ) -> None:
        """Report an execution that will not run."""

    def end(self, frame: Frame) -> None:
        """Drop an execution."""


@dataclass(eq=False, repr=False)
class Turns:
    """The executions that run in turn and those that wait for theirs, by entry."""

    __slots__ = (
        "_lines",
        "clock",
        "limits",
        "running",
        "starter",
    )

    starter: Starter
    clock: NodeClock
    limits: Limits

    def __post_init__(self) -> None:
        self.running: dict[_Key, Frame] = {}
        self._lines: dict[_Key, deque[Frame]] = EMPTY

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def take(self, frame: Frame) -> bool:
        """Return True if it is the execution's turn; otherwise the execution waits for it."""
        key = _key(frame)
        if key not in self.running:
            self.running[key] = frame
            return True
        if self._lines is EMPTY:
            self._lines = {}
        self._lines.setdefault(key, deque()).append(frame)
        return False

    def give_back(self, frame: Frame) -> None:
        """End an execution's turn, or its wait: the next one begins."""
        key = _key(frame)
        line = self._lines.get(key, deque())
        if self.running.get(key) is not frame:
            if frame in line:
                line.remove(frame)
            return
        del self.running[key]
        while line:
            following = line.popleft()
            if self._is_late(following):
                continue
            self.running[key] = following
            self.starter.begin(following)
            return
        self._lines.pop(key, None)

    def _is_late(self, frame: Frame) -> bool:
        deadline = frame.deadline_ns
        if deadline is None or self.clock.now_ns < deadline:
            return False
        error = DeadlineExceeded(
            "its turn came after its deadline, those before it took too long; it was "
            f"{bound_of(frame)}"
        )
        frame.failures += 1
        if frame.debt is not None:
            frame.debt = WireRefusal(type(error).__name__, str(error), frame.plan.name)
        self.starter.fail_start(
            *(frame.execution, frame.plan, error),
            from_bus=frame.from_bus,
            source_peer=frame.source_peer,
        )
        self.starter.end(frame)
        return True

    def waiting(self) -> list[Waiting]:
        """Return the executions that wait for their turn."""
        return [
            Waiting(
                what=frame.plan.name,
                why="its turn",
                whom=f"execution {self.running[key].execution}",
                execution=frame.execution,
                target=frame.plan.target,
                since_ns=frame.started_ns,
                # Without a deadline each op of those before it has one.
                until_ns=frame.deadline_ns or frame.started_ns + self.limits.wait_ns,
            )
            for key, line in self._lines.items()
            for frame in line
        ]

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: the executions of each entry, the running one first."""
        return [
            [writer.frame(frame), *(writer.frame(f) for f in self._lines.get(key, ()))]
            for key, frame in self.running.items()
        ]

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned, frames being there."""
        for running, *line in plain:
            frame = reader.frame(running)
            self.running[_key(frame)] = frame
            if line:
                if self._lines is EMPTY:
                    self._lines = {}
                self._lines[_key(frame)] = deque(reader.frame(number) for number in line)
