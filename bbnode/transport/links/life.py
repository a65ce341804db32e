"""The timers of all links of a node, in one task.

Rule: a link requests a look at a time, as often as it likes; times that are close together share
one wake-up, so that a thousand idle links wake the process only a few times a second. A look is
never early, and at most `COARSE_S` late (`FINE_S` for a time less than `SOON_S` away).
"""

from __future__ import annotations

import heapq
import math
from typing import Final, Protocol

import trio

# Distant times are deadlines of seconds; near ones are for acknowledgements.
SOON_S: Final = 1.0
COARSE_S: Final = 0.1
FINE_S: Final = 0.001


class Looked(Protocol):
    """The interface of a link that `Looks` calls."""

    def look(self, due_s: float) -> None:
        """Do the due work; `due_s` is the time for which this look was requested."""


class Looks:
    """The requested looks, on trio's clock in seconds."""

    def __init__(self) -> None:
        # Links by time in units of FINE_S, and these times as a heap.
        self._asked: dict[int, dict[Looked, None]] = {}
        self._times: list[int] = []
        self._sooner = trio.Event()

    def ask(self, link: Looked, at_s: float) -> None:
        """Request a look at a link; `math.inf` is never."""
        if at_s == math.inf:
            return
        step_s = FINE_S if at_s - trio.current_time() < SOON_S else COARSE_S
        time = round(math.ceil(at_s / step_s) * (step_s / FINE_S))
        while time * FINE_S < at_s:  # by a rounding error
            time += 1
        there = self._asked.get(time)
        if there is None:
            there = self._asked[time] = {}
            heapq.heappush(self._times, time)
            if self._times[0] == time:
                self._sooner.set()
        there[link] = None

    async def run(self) -> None:
        """Look at links at the times that they requested, forever."""
        while True:
            self._sooner = trio.Event()
            due_s = self._times[0] * FINE_S if self._times else math.inf
            with trio.move_on_at(due_s):
                await self._sooner.wait()
                continue
            links = self._asked.pop(heapq.heappop(self._times))
            for link in links:
                link.look(due_s)
