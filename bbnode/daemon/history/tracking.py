"""Threads in which trackers work, so that one that raises or hangs never disturbs a round.

Rule: one thread, and one bounded queue, for each tracker of a run. A round that does not fit is
dropped and counted; the first failure of each kind is logged, and the next round is tried again. A
tracker whose run could not begin gets another try with the next round.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from bbnode.daemon.history.trackers import RunInfo, Tracker
from bbnode.ir.interrupts import let_stop

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 256
# The time that all trackers together get when the node stops.
END_S: Final = 2.0
_MAX_REASONS: Final = 8
_MAX_REASON_CHARS: Final = 300


class TrackerThread:
    """A running tracker of one run."""

    def __init__(self, kind: str, tracker: Tracker, run: RunInfo) -> None:
        """Begin the run in a new thread; returns at once."""
        self.kind = kind
        self._tracker = tracker
        self._run = run
        self._queue: queue.Queue[tuple[int, dict[str, float], float] | None] = queue.Queue(
            MAX_QUEUED
        )
        self._reasons: set[str] = set()
        self._started = False
        self.lost = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def add(self, finished: Mapping[str, Any]) -> None:
        """Queue a round in the form of `Round.as_json`; never waits."""
        ended_at = float(finished["started_at"]) + float(finished["seconds"])
        try:
            self._queue.put_nowait((int(finished["round"]), metrics_of(finished), ended_at))
        except queue.Full:
            self.lost += 1
            self._failed(f"{MAX_QUEUED} rounds wait for it")

    def end(self) -> None:
        """Ask the tracker to end, if it has not; `join` waits for that."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._failed(f"{MAX_QUEUED} rounds wait for it, and are lost")

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the thread."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("a tracker did not end in time", extra={"tracker": self.kind})

    def _work(self) -> None:
        while True:
            queued = self._queue.get()
            try:
                if not self._started and queued is not None:
                    self._tracker.start(self._run)
                    self._started = True
                if queued is not None:
                    self._tracker.log(*queued)
                elif self._started:
                    self._tracker.end()
            except BaseException as error:  # noqa: BLE001 - the boundary to trackers
                let_stop(error)
                self.lost += queued is not None
                self._failed(f"{type(error).__name__}: {error}")
            if queued is None:
                return

    def _failed(self, reason: str) -> None:
        shown = reason.strip().partition("\n")[0][:_MAX_REASON_CHARS]
        if shown not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(shown)
            logged = {"tracker": self.kind, "run": self._run.name, "reason": shown}
            logger.warning("a tracker failed", extra=logged)


def join_all(threads: list[TrackerThread]) -> None:
    """End all threads, within the time that they have together."""
    for thread in threads:
        thread.end()
    until = time.monotonic() + END_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def metrics_of(finished: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a round, and the node's measurements of it under `round/`."""
    own = {
        "round/seconds": finished["seconds"],
        "round/bytes_in": finished["bytes_in"],
        "round/bytes_out": finished["bytes_out"],
        "round/answered": len(finished["responded"]),
        "round/missing": len(finished["missing"]),
        "round/ok": finished["ok"],
    }
    return {**finished["metrics"], **{name: float(value) for name, value in own.items()}}
