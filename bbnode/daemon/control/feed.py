"""Streams of events and of log lines, for any number of subscribers.

Rule: publishing never waits and never fails. The last items are kept for later subscribers; each
subscriber has a bounded queue of its own, loses the oldest when it is too slow, and learns how many
it lost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import trio

from bbnode.daemon.control.errors import ControlProtocolError
from bbnode.daemon.control.json_lines import encode
from bbnode.daemon.observing.logs import JsonFormatter
from bbnode.ir.caps import KEPT_ITEMS, QUEUED_ITEMS

# Lines of other threads that wait for the trio thread; beyond that, lines are dropped and counted.
MAX_IN_TRANSIT = 1024
# A traceback is a few kilobytes.
MAX_EXCEPTION_CHARS = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedItem:
    """A published item; `seq` counts from 1, `time_s` is seconds since the epoch."""

    seq: int
    time_s: float
    data: Mapping[str, Any]


class Feed:
    """A stream of one kind of items. All methods are for the trio thread."""

    def __init__(
        self,
        name: str,
        *,
        kept: int = KEPT_ITEMS,
        queued: int = QUEUED_ITEMS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a feed; `name` is the key of an item in its line."""
        self.name = name
        self.dropped = 0
        self._clock = clock
        self._queued = queued
        self._kept: deque[FeedItem] = deque(maxlen=kept)
        self._seq = 0
        self._subscribers: set[Subscription] = set()
        self._closed = False
        self._left = trio.Event()

    @property
    def subscribers(self) -> int:
        """Return the number of subscribers."""
        return len(self._subscribers)

    def publish(self, data: Mapping[str, Any]) -> None:
        """Pass an item to every subscriber; never waits."""
        self._seq += 1
        item = FeedItem(seq=self._seq, time_s=self._clock(), data=data)
        self._kept.append(item)
        for subscriber in self._subscribers:
            if not subscriber.push(item):
                self.dropped += 1

    def kept(self, wanted: Callable[[Mapping[str, Any]], bool] | None = None) -> list[FeedItem]:
        """Return the kept items that `wanted` accepts, oldest first."""
        return [item for item in self._kept if wanted is None or wanted(item.data)]

    def subscribe(
        self,
        *,
        last: int = 0,
        wanted: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Subscription:
        """Subscribe, beginning with the `last` wanted items that are kept; the caller closes it."""
        subscription = Subscription(self, self._queued, wanted)
        for item in self.kept(wanted)[-last:] if last else ():
            subscription.push(item)
        if self._closed:
            subscription.end()
        else:
            self._subscribers.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription, once its subscriber has read the queued items."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.end()

    async def drained(self) -> None:
        """Wait until every subscriber has left."""
        while self._subscribers:
            self._left = trio.Event()
            await self._left.wait()

    def discard(self, subscription: Subscription) -> None:
        """Remove a subscription that was closed."""
        self._subscribers.discard(subscription)
        self._left.set()


class Subscription:
    """The items that wait for one subscriber, as an iterator of JSON lines."""

    def __init__(
        self, feed: Feed, limit: int, wanted: Callable[[Mapping[str, Any]], bool] | None
    ) -> None:
        self._feed = feed
        self._limit = limit
        self._wanted = wanted
        self._waiting: deque[FeedItem] = deque()
        self._dropped = 0
        self._more = trio.Event()
        self._ended = False

    def push(self, item: FeedItem) -> bool:
        """Queue an item; False if an older one had to be dropped for it."""
        if self._wanted is not None and not self._wanted(item.data):
            return True
        fits = len(self._waiting) < self._limit
        if not fits:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(item)
        self._more.set()
        return fits

    def end(self) -> None:
        """End after the queued items."""
        self._ended = True
        self._more.set()

    def close(self) -> None:
        """Unsubscribe."""
        self._feed.discard(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        line = await self.next()
        if line is None:
            raise StopAsyncIteration
        return line

    async def next(self) -> bytes | None:
        """Return the next line; None when there will be none."""
        while not self._waiting:
            if self._ended:
                return None
            self._more = trio.Event()
            await self._more.wait()
        dropped, self._dropped = self._dropped, 0
        return self._line(self._waiting.popleft(), dropped)

    def _line(self, item: FeedItem, dropped: int) -> bytes:
        envelope = {
            "schema": f"bbnode/{self._feed.name}/1",
            "seq": item.seq,
            "time_s": round(item.time_s, 6),
            "dropped": dropped,
        }
        try:
            return encode({**envelope, self._feed.name: item.data})
        except ControlProtocolError as error:
            self._feed.dropped += 1
            return encode(
                {**envelope, self._feed.name: {"type": "unprintable", "reason": str(error)}}
            )


class LogFeedHandler(logging.Handler):
    """A logging handler that publishes each record on a feed, in the JSON form of the log."""

    outlives_configure = True  # kept by `logs.configure` when a reload changes the form of the log

    def __init__(self, feed: Feed, token: trio.lowlevel.TrioToken) -> None:
        """Publish on `feed`; `token` is that of the thread that owns it."""
        super().__init__()
        self._form = JsonFormatter()
        self._feed = feed
        self._token = token
        self._owner = threading.get_ident()
        self._in_transit = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Publish a record now, or soon if this is another thread."""
        line = self._form.fields(record)
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
        # The loop may have ended, and with it all subscribers.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._arrived, line)

    def _arrived(self, line: dict[str, Any]) -> None:
        self._in_transit -= 1
        self._feed.publish(line)


@contextlib.contextmanager
def followed(feed: Feed, logger_name: str = "") -> Iterator[None]:
    """Publish all records of a logger and its children while the block runs.

    Enter it on the trio thread. "" is the root logger.
    """
    handler = LogFeedHandler(feed, trio.lowlevel.current_trio_token())
    logger = logging.getLogger(logger_name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
