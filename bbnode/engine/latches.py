"""Latches: "the first of several" where the several come in executions of their own.

Rule: `DeadlineMatch`, and `Any` with a group, fire once. Where their inputs meet in one execution,
its frame counts them. Where they don't (a reply that is delivered, against a timer of the execution
that asked), a latch does:

- If one side waits for a timer, each of its executions opens a round. Its own input closes that
  round; one from another execution closes the oldest round that is open. Who finds none was not
  the first: what reads it is skipped.
- If no side waits for a timer, a round begins with the first input to come and ends when each has
  come, or when one comes again; the first alone fires.

A round counts no longer than the execution that opened it is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bbnode.engine.frame import Frame
from bbnode.engine.reports import Reports


@dataclass(frozen=True, slots=True, kw_only=True)
class LatchPlan:
    """One latch of the program.

    Attributes:
        inputs: how many it has.
        timed: some executions open rounds, by number.
    """

    inputs: int
    timed: bool


@dataclass(slots=True)
class _Latch:
    opened: dict[int, None]  # executions whose rounds are open, oldest first
    came: set[int]  # inputs of the running round, where nothing opens one


class Latches:
    """The latches of one node, by number."""

    __slots__ = (
        "_frames",
        "_latches",
        "_plans",
        "_reports",
    )

    def __init__(
        self, plans: Sequence[LatchPlan], frames: Mapping[int, Frame], reports: Reports
    ) -> None:
        """Start with no round open; `frames` are the executions that are under way."""
        self._plans = plans
        self._frames = frames
        self._reports = reports
        self._latches = tuple(_Latch({}, set()) for _ in plans)

    def open(self, number: int, execution: int) -> None:
        """Open the round of an execution."""
        latch = self._latches[number]
        if len(latch.opened) > 2 * len(self._frames):
            # Executions that failed leave theirs: at most as many as there are under way.
            latch.opened = {each: None for each in latch.opened if each in self._frames}
        latch.opened[execution] = None

    def close(self, number: int, execution: int) -> None:
        """Close the round of an execution if nothing has: it will bring nothing any more."""
        self._latches[number].opened.pop(execution, None)

    def is_first(self, number: int, frame: Frame, index: int, *, opens: bool) -> bool:
        """Take what an execution brings for an input; `opens`: it has opened a round."""
        plan, latch = self._plans[number], self._latches[number]
        if not plan.timed:
            first = not latch.came or index in latch.came
            if index in latch.came:
                latch.came.clear()
            latch.came.add(index)
            if len(latch.came) == plan.inputs:
                latch.came.clear()
        elif opens:
            first = frame.execution in latch.opened
            latch.opened.pop(frame.execution, None)
        else:
            first = self._take_oldest(latch)
        if not first:
            self._reports.counts["latch.late"] += 1
        return first

    def _take_oldest(self, latch: _Latch) -> bool:
        while latch.opened:
            execution = next(iter(latch.opened))
            del latch.opened[execution]
            if execution in self._frames:
                return True
        return False

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: the open rounds, and what has come of running ones."""
        return [[list(latch.opened), sorted(latch.came)] for latch in self._latches]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned."""
        for latch, (opened, came) in zip(self._latches, plain, strict=True):
            latch.opened = dict.fromkeys(opened)
            latch.came = set(came)
