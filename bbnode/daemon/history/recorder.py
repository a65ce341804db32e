"""The worker thread that writes rounds, so that a disk never delays or fails a round.

Rule: a round is queued and forgotten. A round that can't be written is counted and dropped; each
reason is logged once, and so is the first round that could be written again. A file that turns out
to be damaged is moved aside, as at the start.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bbnode.daemon.history.store import FoundRounds, RoundStore, read_rounds, rounds_file
from bbnode.daemon.paths import StorageError

logger = logging.getLogger(__name__)

# Rounds that wait for the disk; a round takes seconds, and writing one a few milliseconds.
MAX_QUEUED: Final = 256
# The wait for the last rounds when the node stops, and for those that a reader asks for.
DRAIN_S: Final = 2.0
# Reasons that are logged until a round can be written again.
_MAX_REASONS: Final = 8

_Job = Callable[[], None]


class RoundRecorder:
    """Writes the rounds of one node to its state directory."""

    def __init__(
        self, state_dir: Path, *, keep: int, open_store: Callable[..., RoundStore] = RoundStore
    ) -> None:
        """Open the file; if that fails, nothing is kept, and the log has the reason."""
        self._path = rounds_file(state_dir)
        self._keep = keep
        self._open_store = open_store
        self._store: RoundStore | None = None
        self._queue: queue.Queue[_Job | None] = queue.Queue(MAX_QUEUED)
        self._lock = threading.Lock()
        self._trouble: set[str] = set()
        self.lost = 0
        self._runs: dict[str, int] = {}
        self._open()
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)
        self._thread.start()

    def begin(self, target: str, done: int, maker: Mapping[str, str], *, anew: bool = False) -> int:
        """Continue a target's rounds after `done` of them, and return the number of the run.

        `maker` and `anew` are as in `RoundStore.run_of`. Call it before any of them is added.
        """
        # The rounds of the previous run must be in the file.
        self._drain(DRAIN_S)
        with self._lock:
            try:
                self._runs[target] = (
                    self._store.run_of(target, done, maker, anew=anew) if self._store else 1
                )
            except (sqlite3.Error, ValueError) as error:
                self._runs[target] = 1
                self._troubled(str(error))
            return self._runs[target]

    def series(self, target: str, metric: str) -> list[tuple[int, bool, float | None]]:
        """Return number, outcome and metric of the rounds of a target's run, oldest first."""
        with self._lock:
            if self._store is None:
                return []
            try:
                return self._store.series(target, self._runs.get(target, 1), metric)
            except sqlite3.Error as error:
                self._troubled(str(error))
                return []

    def add(self, finished: Mapping[str, Any]) -> None:
        """Queue a round; never waits."""
        plain = dict(finished)
        try:
            self._queue.put_nowait(lambda: self._write(plain))
        except queue.Full:
            self.lost += 1
            self._troubled(f"{MAX_QUEUED} rounds wait for the disk")

    def read(
        self, *, last: int | None = None, since: int = 0, max_bytes: int | None = None
    ) -> FoundRounds:
        """Return rounds as `read_rounds`, queued ones included. Blocks: use a thread.

        Raises StorageError.
        """
        self._drain(DRAIN_S)
        return read_rounds(self._path, last=last, since=since, max_bytes=max_bytes)

    def close(self) -> None:
        """Write the rest, for a bounded time, and close the file. Idempotent.

        Blocks: use a thread.
        """
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=DRAIN_S)
        except queue.Full:
            return
        self._thread.join(DRAIN_S)

    def _drain(self, seconds: float) -> None:
        done = threading.Event()
        try:
            self._queue.put_nowait(done.set)
        except queue.Full:
            return
        done.wait(seconds)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _open(self) -> None:
        try:
            self._store = self._open_store(self._path, keep=self._keep)
        except StorageError as error:
            self._store = None
            self._troubled(str(error))

    def _write(self, finished: Mapping[str, Any]) -> None:
        with self._lock:
            if self._store is None:
                self._open()
            run = self._runs.get(finished["target"], 1)
            for again in (True, False):
                if self._store is None:
                    break
                try:
                    self._store.add(finished, run)
                except sqlite3.DatabaseError as error:
                    self._troubled(str(error))
                    # A damaged file is detected when it is opened again.
                    self._store.close()
                    self._store = None
                    if again:
                        self._open()
                except (TypeError, ValueError, OverflowError) as error:
                    self._troubled(f"round {finished.get('round')} can't be stored: {error}")
                    break
                else:
                    if self._trouble:
                        logger.info("rounds are kept on disk again")
                        self._trouble.clear()
                    return
            self.lost += 1

    def _troubled(self, reason: str) -> None:
        if reason not in self._trouble and len(self._trouble) < _MAX_REASONS:
            self._trouble.add(reason)
            logger.warning(
                "a round is not kept on disk", extra={"path": str(self._path), "reason": reason}
            )
