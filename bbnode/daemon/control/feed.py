"""What happens, handed to whoever listens: events of the node, lines of the log.

Rule: publishing never waits and never fails. The last items are kept for those that come later;
each subscriber has a bounded queue of its own, loses the oldest when it is too slow, and learns
how many it lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from bbnode.daemon.control.errors import ControlProtocolError
from bbnode.daemon.control.json_lines import encode
from bbnode.ir.caps import KEPT_ITEMS, QUEUED_ITEMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that happened; `seq` counts from 1, `time_s` is seconds since the epoch."""

    seq: int
    time_s: float
    data: Mapping[str, Any]


class Feed:
    """One kind of news. All methods are for the trio thread."""

    def __init__(
        self,
        name: str,
        *,
        kept: int = KEPT_ITEMS,
        queued: int = QUEUED_ITEMS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`name` is the key under which an item stands in its line."""
        self.name = name
        self.dropped = 0
        self._clock = clock
        self._queued = queued
        self._kept: deque[Item] = deque(maxlen=kept)
        self._seq = 0
        self._subscribers: set[Subscription] = set()
        self._closed = False
        self._left = trio.Event()

    @property
    def subscribers(self) -> int:
        """How many listen now."""
        return len(self._subscribers)

    def publish(self, data: Mapping[str, Any]) -> None:
        """Tell everybody."""
        self._seq += 1
        item = Item(seq=self._seq, time_s=self._clock(), data=data)
        self._kept.append(item)
        for subscriber in self._subscribers:
            if not subscriber.push(item):
                self.dropped += 1

    def kept(self, wanted: Callable[[Mapping[str, Any]], bool] | None = None) -> list[Item]:
        """What is kept, oldest first; of it what is wanted."""
        return [item for item in self._kept if wanted is None or wanted(item.data)]

    def subscribe(
        self,
        *,
        last: int = 0,
        wanted: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Subscription:
        """Listen from now on, after the `last` kept items that are wanted. Close it afterwards."""
        made = Subscription(self, self._queued, wanted)
        for item in self.kept(wanted)[-last:] if last else ():
            made.push(item)
        if self._closed:
            made.end()
        else:
            self._subscribers.add(made)
        return made

    def close(self) -> None:
        """Nothing comes any more: every subscriber takes what waits for it, and ends."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.end()

    async def drained(self) -> None:
        """Return when every subscriber has left."""
        while self._subscribers:
            self._left = trio.Event()
            await self._left.wait()

    def discard(self, subscription: Subscription) -> None:
        """A subscriber left."""
        self._subscribers.discard(subscription)
        self._left.set()


class Subscription:
    """The items that wait for one listener, as lines of JSON; a `http.Source`."""

    def __init__(
        self, feed: Feed, limit: int, wanted: Callable[[Mapping[str, Any]], bool] | None
    ) -> None:
        self._feed = feed
        self._limit = limit
        self._wanted = wanted
        self._waiting: deque[Item] = deque()
        self._dropped = 0
        self._more = trio.Event()
        self._ended = False

    def push(self, item: Item) -> bool:
        """Queue an item; False when an older one had to go for it."""
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
        """Nothing comes any more."""
        self._ended = True
        self._more.set()

    def close(self) -> None:
        """Listen no more."""
        self._feed.discard(self)

    async def next(self) -> bytes | None:
        """The next line; None when there will be none."""
        while not self._waiting:
            if self._ended:
                return None
            self._more = trio.Event()
            await self._more.wait()
        dropped, self._dropped = self._dropped, 0
        return self._line(self._waiting.popleft(), dropped)

    def _line(self, item: Item, dropped: int) -> bytes:
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
