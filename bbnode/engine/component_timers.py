"""Timers that components set for themselves.

Rule: a timer is named by (component, key), and setting one again replaces it. It is armed with
the node's scheduler; one that is due while its component works is asked for again a little
later, so that a protocol never loses its heartbeat to a long op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bbnode.engine.scheduler import Scheduler, Timer, TimerKind

if TYPE_CHECKING:
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames

# How soon a timer comes back that found its component at work: well below what any protocol
# calls late, and rare enough to cost nothing.
RETRY_NS = 100_000_000


@dataclass(slots=True)
class _Armed:
    cell_at: int
    key: str
    timer: Timer


class ComponentTimers:
    """All timers of all components of one node."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._armed: dict[int, _Armed] = {}  # number -> timer
        self._numbers: list[dict[str, int]] = []  # by component: key -> number
        self._next = 0

    def __len__(self) -> int:
        return len(self._armed)

    def count(self, cell_at: int) -> int:
        """Timers that a component has armed."""
        return len(self._of(cell_at))

    def has(self, cell_at: int, key: str) -> bool:
        """Whether a component has armed a timer."""
        return key in self._of(cell_at)

    def set(self, cell_at: int, key: str, when_ns: int) -> None:
        """Arm a timer, or arm it anew."""
        self.cancel(cell_at, key)
        self._next += 1
        timer = self._scheduler.set(when_ns, TimerKind.COMPONENT_TIMER, self._next)
        self._armed[self._next] = _Armed(cell_at, key, timer)
        self._of(cell_at)[key] = self._next

    def cancel(self, cell_at: int, key: str) -> None:
        """Disarm a timer, if it is armed."""
        number = self._of(cell_at).pop(key, None)
        if number is not None:
            self._scheduler.cancel(self._armed.pop(number).timer)

    def take(self, number: int) -> tuple[int, str]:
        """A timer that is due: whose it is, and its key. It is armed no more."""
        armed = self._armed.pop(number)
        del self._of(armed.cell_at)[armed.key]
        return armed.cell_at, armed.key

    def _of(self, cell_at: int) -> dict[str, int]:
        while len(self._numbers) <= cell_at:
            self._numbers.append({})
        return self._numbers[cell_at]

    def state(self, names: SavedNames) -> Any:
        """For a snapshot: what is armed, and the count."""
        rows = [[n, a.cell_at, a.key, names.timer(a.timer)] for n, a in self._armed.items()]
        return [self._next, rows]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave, after the scheduler."""
        self._next, rows = plain
        for number, cell_at, key, order in rows:
            timer = names.timer(order)
            if timer is None:
                raise ValueError(f"the timer {key!r} of a component is not armed")
            self._armed[number] = _Armed(cell_at, key, timer)
            self._of(cell_at)[key] = number
