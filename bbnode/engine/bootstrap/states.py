"""How a bootstrap stands, as data, and the turn that one waits for.

Rule: every move is in the table; what is not there is refused before it happens. A bootstrap
that waits for its turn shows as running.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.engine.bootstrap.targets import BootstrapPlan, BootstrapStatus
from bbnode.engine.frame import Frame
from bbnode.engine.ingress import BootstrapStart
from bbnode.engine.scheduler import Timer
from bbnode.engine.snapshot.events import load_start, save_start

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


class State(enum.Enum):
    """What a bootstrap is doing."""

    IDLE = "idle"
    WAITING_FOR_INPUT = "waiting for input"
    QUEUED = "queued"
    RUNNING = "running"


class Move(enum.Enum):
    """What happens to a bootstrap."""

    ASKED = "asked"
    ASKED_WITHOUT_INPUTS = "asked without inputs"  # only All asks so
    STARTED = "started"
    ENDED = "ended"  # drained, refused, or too late for its turn


# (state, move) -> next state; whatever is not here is refused before it happens.
TRANSITIONS: Mapping[tuple[State, Move], State] = {
    (State.IDLE, Move.ASKED): State.QUEUED,
    (State.IDLE, Move.ASKED_WITHOUT_INPUTS): State.WAITING_FOR_INPUT,
    (State.WAITING_FOR_INPUT, Move.ASKED): State.QUEUED,
    (State.WAITING_FOR_INPUT, Move.ASKED_WITHOUT_INPUTS): State.WAITING_FOR_INPUT,
    (State.QUEUED, Move.STARTED): State.RUNNING,
    (State.QUEUED, Move.ENDED): State.IDLE,
    (State.RUNNING, Move.ENDED): State.IDLE,
}

STATUS = {
    State.IDLE: BootstrapStatus.IDLE,
    State.WAITING_FOR_INPUT: BootstrapStatus.WAITING_FOR_INPUT,
    State.QUEUED: BootstrapStatus.RUNNING,
    State.RUNNING: BootstrapStatus.RUNNING,
}


@dataclass(slots=True, eq=False)
class Bootstrap:
    """One bootstrap of a node, and how it stands."""

    plan: BootstrapPlan
    state: State = State.IDLE
    runs: int = 0
    last_ok: bool | None = None

    def __str__(self) -> str:
        return f"bootstrap of {self.plan.name}"

    @property
    def is_under_way(self) -> bool:
        """Whether it runs, or will in its turn."""
        return self.state in (State.QUEUED, State.RUNNING)

    def move(self, move: Move) -> None:
        """Go on to the next state."""
        self.state = TRANSITIONS[self.state, move]


@dataclass(slots=True, eq=False)
class Turn:
    """A bootstrap that was asked for, until it has ended."""

    number: int
    bootstrap: Bootstrap
    execution: int
    request: BootstrapStart | None  # None: it runs
    since_ns: int
    timer: Timer | None
    frame: Frame | None = None

    def state(self, names: SavedNames) -> list[Any]:
        """For a snapshot."""
        return [
            self.number,
            self.bootstrap.plan.name,
            self.execution,
            None if self.request is None else save_start(self.request, names),
            self.since_ns,
            names.timer(self.timer),
            None if self.frame is None else names.frame(self.frame),
        ]

    @classmethod
    def loaded(cls, plain: Any, known: Mapping[str, Bootstrap], names: LoadedNames) -> Turn:
        """What `state` gave."""
        number, name, execution, start, since_ns, timer, frame = plain
        return cls(
            number,
            known[name],
            execution,
            None if start is None else load_start(start, names),
            since_ns,
            names.timer(timer),
            None if frame is None else names.frame(frame),
        )
