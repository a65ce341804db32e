"""A bound on lines of one kind: what a peer can cause, it can cause a million times.

Rule: of one logger's message at most LOG_BURST lines in LOG_WINDOW_S are let through; the first
one after that says in `left_out` how many were not. Metrics and events count all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from bbnode.ir.caps import LOG_BURST, LOG_WINDOW_S, MAX_LOG_KINDS


@dataclass(slots=True)
class _Kind:
    ends_s: float
    passed: int = 0
    left_out: int = 0


class RepeatLimit(logging.Filter):
    """Lets through so many lines of each kind; to be added to a handler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        super().__init__()
        self._clock = clock
        # A handler filters before it takes its own lock, and worker threads log too.
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        with self._lock:
            return self._passes(record, (record.name, str(record.msg)))

    def _passes(self, record: logging.LogRecord, key: tuple[str, str]) -> bool:
        now_s = self._clock()
        kind = self._kinds.get(key)
        if kind is None or now_s >= kind.ends_s:
            if kind is not None and kind.left_out:
                record.left_out = kind.left_out
            kind = self._kinds[key] = _Kind(ends_s=now_s + LOG_WINDOW_S)
            self._kinds.move_to_end(key)
            if len(self._kinds) > MAX_LOG_KINDS:
                self._kinds.popitem(last=False)
        if kind.passed >= LOG_BURST:
            kind.left_out += 1
            return False
        kind.passed += 1
        return True
