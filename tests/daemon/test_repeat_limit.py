"""Lines of one kind are bounded."""

from __future__ import annotations

import logging

from bbnode.daemon.observing.logs import RepeatLimit
from bbnode.ir.caps import LOG_BURST, LOG_REPEAT_S, LOG_WINDOW_S, MAX_LOG_KINDS


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def line(message: str, level: int = logging.INFO, **data: object) -> logging.LogRecord:
    record = logging.LogRecord("a", level, "", 0, message, None, None)
    vars(record).update(data)
    return record


def failed(execution: int, detail: str = "nobody is there") -> logging.LogRecord:
    return line("op_failed", logging.WARNING, execution=execution, detail=detail)


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
    assert len(limit._kinds.kinds) == MAX_LOG_KINDS


def test_a_failure_that_goes_on_is_said_once_and_counted_each_minute() -> None:
    clock = Clock()
    limit = RepeatLimit(clock)
    written = []
    for number in range(20 * 150):  # 20 a second
        clock.now_s = number / 20
        record = failed(number)
        if limit.filter(record):
            written.append((clock.now_s, vars(record).get("repeated")))
    per_minute = int(20 * LOG_REPEAT_S)
    assert written == [(0.0, None), (60.0, per_minute - 1), (120.0, per_minute - 1)]


def test_news_among_repeated_failures_is_written_at_once() -> None:
    limit = RepeatLimit(Clock())
    assert limit.filter(failed(1))
    assert not limit.filter(failed(2))
    assert limit.filter(failed(3, "1 peer is there, 2 are needed"))
    assert limit.filter(line("op_failed", logging.ERROR, execution=4, detail="nobody is there"))
    # Another one in between does not begin the first anew.
    assert not limit.filter(failed(5))


def test_failures_for_ever_take_no_place_of_others_of_their_kind() -> None:
    limit = RepeatLimit(Clock())
    assert sum(limit.filter(failed(number)) for number in range(3 * LOG_BURST)) == 1
    assert limit.filter(failed(0, "another"))


def test_rounds_that_fail_alike_are_one_line() -> None:
    limit = RepeatLimit(Clock())

    def ends(number: int, **missing: str) -> logging.LogRecord:
        said = {"round": number, "seconds": number / 7, "missing": missing}
        return line("round failed", logging.WARNING, **said)

    assert [limit.filter(ends(n)) for n in (1, 2, 3)] == [True, False, False]
    assert limit.filter(ends(4, a="no answer"))


def test_what_ends_well_and_what_somebody_asked_for_is_written_each_time() -> None:
    limit = RepeatLimit(Clock())
    assert all(limit.filter(line("reloaded", changed="nothing")) for _ in range(3))
    asked = {"reason": "no such key", "by": "reload"}
    assert all(limit.filter(line("reload refused", logging.WARNING, **asked)) for _ in range(3))


def test_failures_without_end_take_no_memory_without_end() -> None:
    limit = RepeatLimit(Clock())
    assert all(limit.filter(failed(1, f"of a peer {n}")) for n in range(LOG_BURST))
    for n in range(3 * MAX_LOG_KINDS):
        limit.filter(failed(1, f"of another peer {n}"))
    assert len(limit._same.kinds) == MAX_LOG_KINDS
