"""When each link of a node is looked at next: one task for all of them.

Rule: a link asks to be looked at by a time, as often as it likes; times that are close together
share one wake-up, so that a thousand idle links wake the process a few times a second. A link is
never looked at sooner than it asked for, and the wake-up is at most `COARSE_S` later (`FINE_S` for
a time that is less than `SOON_S` away).
"""

from __future__ import annotations

import heapq
import math
from typing import Final, Protocol

import trio

# Times that are far away are deadlines of seconds; those that are near, acknowledgements.
SOON_S: Final = 1.0
COARSE_S: Final = 0.1
FINE_S: Final = 0.001


class Looked(Protocol):
    """A link, as far as it is looked at."""

    def look(self, due_s: float) -> None:
        """Do what is due; `due_s` is when this look should have been."""


class Looks:
    """The looks that are due, by trio's time in seconds."""

    def __init__(self) -> None:
        # By the time in units of FINE_S, and these times as a heap.
        self._asked: dict[int, dict[Looked, None]] = {}
        self._times: list[int] = []
        self._sooner = trio.Event()

    def ask(self, link: Looked, at_s: float) -> None:
        """Have a link looked at; `math.inf` is never."""
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
        """Look at links when they asked for it, for ever."""
        while True:
            self._sooner = trio.Event()
            due_s = self._times[0] * FINE_S if self._times else math.inf
            with trio.move_on_at(due_s):
                await self._sooner.wait()
                continue
            links = self._asked.pop(heapq.heappop(self._times))
            for link in links:
                link.look(due_s)
