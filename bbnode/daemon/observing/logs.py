"""Logging of the daemon: one line per event on stderr, for people, machines or the journal.

Rule: configured once, by `configure`. Modules log through `logging.getLogger(__name__)` and put
data in `extra`, not into the sentence. A repeated failure is written once in LOG_REPEAT_S; its next
line counts those that were not written (`repeated`). A peer can cause a line a million times, so at
most LOG_BURST lines of one logger's message are written in LOG_WINDOW_S (`left_out`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from bbnode.ir.caps import (
    LOG_BURST,
    LOG_REPEAT_S,
    LOG_WINDOW_S,
    MAX_LOG_KINDS,
    MAX_LOG_VALUE_CHARS,
)
from bbnode.ir.texts import escaped, escaped_json

# The attributes of every LogRecord; all others come from `extra`.
_OWN_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


# Fields that differ between occurrences of one failure, and are no news.
_OF_ONE_OCCURRENCE = frozenset({"execution", "round", "seconds"})
# The field that names who asked, on a line that answers a request and is written each time.
_ASKED = "by"


# The ANSI colour of each level, and its syslog number.
_LEVELS = {
    "DEBUG": ("36", 7),
    "INFO": ("32", 6),
    "WARNING": ("33", 4),
    "ERROR": ("31", 3),
    "CRITICAL": ("1;31", 2),
}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO  bbnode.daemon.lifecycle.app: listening address=/ip4/…`.

    In the form "color" the level is in colour. In "journal" each line begins with the level as
    sd-daemon(3) writes it, and there is no time, which the journal adds.
    """

    def __init__(self, form: str = "text") -> None:
        """Create a formatter; `form` is "text", "color" or "journal"."""
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return the record on one line; the traceback, if there is one, on lines of its own."""
        color, _ = _LEVELS.get(record.levelname, ("0", 6))
        level = f"{record.levelname:<7}"
        if self._form == "color":
            level = f"\x1b[{color}m{level}\x1b[0m"
        for_journal = self._form == "journal"
        head = record.name if for_journal else f"{_time(record)} {level} {record.name}"
        data = "".join(f" {name}={_plain(value)}" for name, value in _extra(record).items())
        # A peer's text must not be able to forge a second log line.
        text = f"{head}: {escaped(record.getMessage())}{data}"
        if record.exc_info:
            # The message of an exception may be a peer's.
            text += "\n" + escaped(self.formatException(record.exc_info), keep="\n")
        return with_priority(record.levelname, text) if for_journal else text


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `ts`, `level`, `logger`, `msg`, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON; a traceback is the text under `exception`."""
        return escaped_json(json.dumps(self.fields(record), ensure_ascii=False))

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of the line."""
        entry: dict[str, Any] = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        for name, value in _extra(record).items():
            plain = value if isinstance(value, bool | int | float | None) else _cut(str(value))
            entry.setdefault(name, plain)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return entry


@dataclass(slots=True)
class _Kind:
    ends_s: float
    passed: int = 0
    left_out: int = 0


class LogWindows:
    """Lets `most` lines of each kind pass in each window of time, and counts the others."""

    def __init__(self, window_s: float, most: int) -> None:
        self._window_s = window_s
        self._most = most
        self.kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def take(self, key: Hashable, now_s: float) -> int | None:
        """Return the number of lines left out since one last passed; None: leave this one out."""
        left_out = 0
        kind = self.kinds.get(key)
        if kind is None or now_s >= kind.ends_s:
            if kind is not None:
                left_out = kind.left_out
            kind = self.kinds[key] = _Kind(ends_s=now_s + self._window_s)
            self.kinds.move_to_end(key)
            if len(self.kinds) > MAX_LOG_KINDS:
                self.kinds.popitem(last=False)
        if kind.passed >= self._most:
            kind.left_out += 1
            return None
        kind.passed += 1
        return left_out


class RepeatLimit(logging.Filter):
    """A filter that limits the lines of each kind, and repeated failures; add it to a handler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a filter; `clock` gives seconds that never go back."""
        super().__init__()
        self._clock = clock
        # A handler filters before it takes its own lock, and worker threads log too.
        self._lock = threading.Lock()
        self._kinds = LogWindows(LOG_WINDOW_S, LOG_BURST)
        self._same = LogWindows(LOG_REPEAT_S, 1)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if this line is to be written."""
        failure = _failure(record)
        with self._lock:
            now_s = self._clock()
            # First, so that a continuing failure takes no place of other lines of its kind.
            repeated = self._same.take(failure, now_s) if failure is not None else 0
            if repeated is None:
                return False
            left_out = self._kinds.take((record.name, str(record.msg)), now_s)
        if left_out is None:
            return False
        if repeated:
            record.repeated = repeated
        if left_out:
            record.left_out = left_out
        return True


def _failure(record: logging.LogRecord) -> Hashable | None:
    """Return a failure without the fields that differ in each occurrence, as a key.

    Failures are warnings, errors, and outcomes of executions. None for all other lines, and for
    answers to a request.
    """
    data = _extra(record)
    if _ASKED in data or (record.levelno < logging.WARNING and "execution" not in data):
        return None
    values = [f"{name}={value}" for name, value in data.items() if name not in _OF_ONE_OCCURRENCE]
    raised = repr(record.exc_info[1]) if record.exc_info else ""
    # A hash, since the texts may have any length, and many of them are kept.
    return hash((record.name, record.levelno, record.getMessage(), *values, raised))


def configure(level: str, form: str, *, stream: IO[str] | None = None) -> None:
    """Send everything of at least `level` to stderr, in one of the forms of `node.log_format`.

    It replaces an earlier configuration, except for handlers with `outlives_configure`, so that
    followers of the log keep their stream.
    """
    out = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(out)
    form = _form_for(out) if form == "auto" else form
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(form))
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    for old in root.handlers[:]:
        if not getattr(old, "outlives_configure", False):
            root.removeHandler(old)
            old.close()
    root.addHandler(handler)
    logging.captureWarnings(capture=True)
    set_level(level)


def is_journal(stream: IO[str]) -> bool:
    """Return True for a stream that systemd's journal reads, line by line."""
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False  # a stream object of Python without a descriptor
    # systemd.exec(5): set to device and inode of the stream that is connected to the journal.
    return os.environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


def with_priority(level: str, text: str) -> str:
    """Return text with a level's number before each line, for the journal (sd-daemon(3))."""
    number = _LEVELS.get(level, ("0", 6))[1]
    return "\n".join(f"<{number}>{line}" for line in text.splitlines())


def set_level(level: str, logger_name: str = "") -> None:
    """Set the least severe level that is logged, while the daemon runs; "" is the root logger."""
    logging.getLogger(logger_name).setLevel(level.upper())


def _form_for(stream: IO[str]) -> str:
    """Return the form that suits a stream: the journal, a terminal, or anything else."""
    if is_journal(stream):
        return "journal"
    # https://no-color.org
    return "color" if stream.isatty() and not os.environ.get("NO_COLOR") else "text"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _OWN_ATTRIBUTES}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> str:
    text = escaped(_cut(str(value)))
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LOG_VALUE_CHARS else text[:MAX_LOG_VALUE_CHARS] + "…"
