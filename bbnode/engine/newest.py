"""A table that knows the newest of what was added, and forgets the oldest.

Rule: what is known is known until so many others were added after it, however often it is added
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from bbnode.engine.empty import EMPTY

Key = TypeVar("Key")
Of = TypeVar("Of")


class Newest(Generic[Key, Of]):
    """At most `most` entries, in the order of coming, in `entries`.

    Every message adds some, of each node, so it is a plain dict as long as it is not full: that
    touches less memory than an OrderedDict. From then on a queue knows the oldest, since the first
    key of a dict lies behind all holes.
    """

    __slots__ = ("_most", "_order", "entries")

    def __init__(self, most: int, entries: Iterable[tuple[Key, Of]] = ()) -> None:
        self._most = most
        self.entries: dict[Key, Of] = dict(entries) or EMPTY
        self._order: deque[Key] | None = None

    def add(self, key: Key, of: Of) -> bool:
        """Add an entry; return False if its key was known, which keeps its age."""
        entries = self.entries
        if entries is EMPTY:
            entries = self.entries = {}
        known = len(entries)
        entries[key] = of
        if len(entries) == known:
            return False
        if known >= self._most:
            if self._order is None:
                self._order = deque(entries)
            else:
                self._order.append(key)
            del entries[self._order.popleft()]
        return True
