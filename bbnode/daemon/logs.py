"""Logging of the daemon: one line an event on stderr, as text or as JSON.

Rule: configured once, by `configure`, before libp2p is imported: its first connection adds a
handler of its own to a root logger that has none. Modules log through
`logging.getLogger(__name__)` and put data in `extra`, not into the sentence.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO, Any

# What a LogRecord has by itself; all else came with `extra`.
_OWN_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

# A log line is for reading; a value beyond this is cut.
MAX_VALUE_CHARS = 1024


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO  bbnode.daemon.app: listening address=/ip4/…`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record on one line; the traceback, where there is one, on lines of its own."""
        data = "".join(f" {name}={_plain(value)}" for name, value in _extra(record).items())
        message = _one_line(record.getMessage())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}{data}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts`, `level`, `logger`, `msg`, what came with `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON; a traceback is the text under `exception`."""
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
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, form: str, *, stream: IO[str] | None = None) -> None:
    """Send everything of at least `level` to stderr in the form "text" or "json".

    Replaces what was configured before. libp2p's loggers, which do not propagate by
    default, are let through from warnings on: their lower levels are one line a packet.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    libp2p = logging.getLogger("libp2p")
    libp2p.propagate = True
    libp2p.setLevel(max(logging.WARNING, root.level))


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _OWN_ATTRIBUTES}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> str:
    text = _one_line(_cut(str(value)))
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _one_line(text: str) -> str:
    # A peer's text must not be able to forge a second log line.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
