"""The daemon's log, for those who follow it over the control plane.

Rule: whatever thread logs, and however much, the daemon is not held up: a line is cut to a
bound, handed to the trio thread, and the oldest go when nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import trio

from bbnode.daemon.control.feed import Feed
from bbnode.daemon.observing.logs import JsonFormatter

# Lines of other threads that wait for the trio thread; more are dropped and counted.
MAX_IN_TRANSIT = 1024
# A traceback is a few kilobytes.
MAX_EXCEPTION_CHARS = 16 * 1024


class LogFeedHandler(logging.Handler):
    """Publishes each record on a feed, as the JSON that the log has too."""

    outlives_configure = True  # `logs.configure`, when a reload changes the log's form

    def __init__(self, feed: Feed, token: trio.lowlevel.TrioToken) -> None:
        """`token` is that of the thread that owns the feed."""
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._feed = feed
        self._token = token
        self._owner = threading.get_ident()
        self._in_transit = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Publish a record now, or soon when this is another thread."""
        line: dict[str, Any] = json.loads(self.format(record))
        if len(line.get("exception", "")) > MAX_EXCEPTION_CHARS:
            line["exception"] = line["exception"][-MAX_EXCEPTION_CHARS:]
        if threading.get_ident() == self._owner:
            self._feed.publish(line)
            return
        with self.lock if self.lock is not None else contextlib.nullcontext():
            if self._in_transit >= MAX_IN_TRANSIT:
                self._feed.dropped += 1
                return
            self._in_transit += 1
        # The loop may have ended: then nobody follows any more.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._arrived, line)

    def _arrived(self, line: dict[str, Any]) -> None:
        self._in_transit -= 1
        self._feed.publish(line)


@contextlib.contextmanager
def followed(feed: Feed) -> Iterator[None]:
    """Publish everything that is logged while the block runs; enter it on the trio thread."""
    handler = LogFeedHandler(feed, trio.lowlevel.current_trio_token())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
