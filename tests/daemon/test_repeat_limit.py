"""Lines of one kind are bounded."""

from __future__ import annotations

import logging

from bbnode.daemon.observing.logs import RepeatLimit
from bbnode.ir.caps import LOG_BURST, LOG_WINDOW_S, MAX_LOG_KINDS


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def line(message: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.WARNING, "", 0, message, None, None)


def test_what_is_said_too_often_is_counted_and_told_later() -> None:
    clock = Clock()
    limit = RepeatLimit(clock)
    assert sum(limit.filter(line("refused")) for _ in range(LOG_BURST + 7)) == LOG_BURST
    # Others are not held back for it.
    assert limit.filter(line("round finished"))
    clock.now_s = LOG_WINDOW_S
    told = line("refused")
    assert limit.filter(told)
    assert told.__dict__["left_out"] == 7
    clock.now_s = 2 * LOG_WINDOW_S
    quiet = line("refused")
    assert limit.filter(quiet)
    assert "left_out" not in quiet.__dict__


def test_messages_without_end_take_no_memory_without_end() -> None:
    limit = RepeatLimit(Clock())
    assert all(limit.filter(line(f"made of data {n}")) for n in range(3 * MAX_LOG_KINDS))
    assert len(limit._kinds) == MAX_LOG_KINDS
