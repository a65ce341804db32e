"""Ops that wait: for whom, until when, and why.

Rule: every parked op has a deadline and an entry here. A worker thread cannot be taken back,
so an op that runs in one keeps its component until the thread returns, even when the op
itself has failed by its deadline or with its execution: its entry is then ABANDONED.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.engine.cells import ComponentCell
from bbnode.engine.frame import Frame, Op
from bbnode.engine.scheduler import Timer
from bbnode.ir.values import Value

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

# An op that may suspend and has no deadline of its own; the compiler's per-hop budget.
DEFAULT_PARK_DEADLINE_NS = 30_000_000_000


class Why(enum.Enum):
    """What a parked op waits for."""

    TASK = "worker thread"
    COMPLETION = "completion by the component"
    COMPONENT = "another op of the same component"
    TIMER = "timer"
    RESPONSES = "responses"
    SEMAPHORE = "semaphore"
    QUEUE = "value of a queue"


@dataclass(slots=True, eq=False, kw_only=True)
class Parked:
    """One parked op; `abandoned` when only its component is still held."""

    token: int
    frame: Frame
    op: Op
    why: Why
    whom: str
    since_ns: int
    until_ns: int
    timer: Timer | None  # None: somebody else watches the time
    cell: ComponentCell | None = None
    line: dict[int, None] | None = None  # where its token stands and waits for its turn
    arguments: tuple[Value, ...] | None = None  # of a task, so that it can be handed out again
    moves: bool = False  # a task that may change its component's state
    abandoned: bool = False

    def take_hold(self) -> None:
        """Take the component of an op that works elsewhere."""
        if self.cell is not None and self.why in (Why.TASK, Why.COMPLETION):
            self.cell.take(self.token, self.op.name, is_task=self.why is Why.TASK, moves=self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Something that waits, as the node lists it."""

    what: str
    why: str
    whom: str
    execution: int
    target: str
    since_ns: int
    until_ns: int

    def as_json(self, now_ns: int) -> dict[str, Any]:
        """For status displays; times relative to `now_ns`, in seconds."""
        return {
            "what": self.what,
            "why": self.why,
            "whom": self.whom,
            "execution": self.execution,
            "target": self.target,
            "waited_s": round((now_ns - self.since_ns) / 1e9, 3),
            "remaining_s": round((self.until_ns - now_ns) / 1e9, 3),
        }


class ParkingTable:
    """Parked ops by token. Tokens are never used twice."""

    def __init__(self) -> None:
        self._by_token: dict[int, Parked] = {}
        self._next_token = 1

    def __len__(self) -> int:
        return len(self._by_token)

    def __contains__(self, token: object) -> bool:
        return token in self._by_token

    def new_token(self) -> int:
        """A token for an op that is about to be parked."""
        token = self._next_token
        self._next_token = token + 1
        return token

    def add(self, parked: Parked) -> None:
        """Take up an op; it stays until `pop`."""
        self._by_token[parked.token] = parked
        if parked.frame.parked is None:
            parked.frame.parked = {}
        parked.frame.parked[parked.token] = None

    def get(self, token: int) -> Parked | None:
        """The entry of a token, or None."""
        return self._by_token.get(token)

    def pop(self, token: int) -> Parked | None:
        """Take out an entry."""
        parked = self._by_token.pop(token, None)
        if parked is not None and parked.frame.parked is not None:
            parked.frame.parked.pop(token, None)
        return parked

    def abandon(self, parked: Parked) -> None:
        """Keep only the hold on the component; the execution does not wait any more."""
        parked.abandoned = True
        if parked.frame.parked is not None:
            parked.frame.parked.pop(parked.token, None)

    def entries(self) -> list[Parked]:
        """All entries, oldest first."""
        return list(self._by_token.values())

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: all entries in order, and the next token."""
        rows = [
            [
                p.token,
                names.frame(p.frame),
                p.op.index,
                p.why.name,
                p.whom,
                p.since_ns,
                p.until_ns,
                names.timer(p.timer),
                None if p.cell is None else names.cell(p.cell),
                None if p.line is None else names.line(p.line),
                None if p.arguments is None else [names.value(v) for v in p.arguments],
                p.moves,
                p.abandoned,
            ]
            for p in self._by_token.values()
        ]
        return [rows, self._next_token]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave; components come to be held as they were."""
        rows, self._next_token = plain
        for token, execution, op, why, whom, since, until, timer, cell, line, *rest in rows:
            arguments, moves, abandoned = rest
            frame = names.frame(execution)
            parked = Parked(
                token=token,
                frame=frame,
                op=frame.plan.ops[op],
                why=Why[why],
                whom=whom,
                since_ns=since,
                until_ns=until,
                timer=names.timer(timer),
                cell=None if cell is None else names.cell(cell),
                line=None if line is None else names.line(line),
                arguments=None if arguments is None else tuple(map(names.value, arguments)),
                moves=moves,
                abandoned=abandoned,
            )
            if abandoned:
                self._by_token[token] = parked
            else:
                self.add(parked)
            if parked.line is not None:
                parked.line[token] = None
            parked.take_hold()
