"""The node's own time, and its offset from the host's.

Rule: all times in a node are its own. This is the host's time until the node is restored from a
snapshot: then it continues from the snapshot's, and host times are translated at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NodeClock:
    """The time of one node, set at each poll.

    Attributes:
        now_ns: the node's time.
        started: True once the node has polled, in this life or before the snapshot.
        resumed: not None between a restore and the first poll: True if the same life continues.
    """

    __slots__ = (
        "_offset_ns",
        "_set_by_poll",
        "now_ns",
        "resumed",
        "started",
    )

    def __init__(self) -> None:
        self.now_ns = 0
        self.started = False
        self.resumed: bool | None = None
        self._offset_ns = 0  # the node's time minus the host's
        self._set_by_poll = False

    def resume(self, now_ns: int | None, *, same_life: bool) -> None:
        """Continue at the host's `now_ns` after a restore; None: at the time of the first poll."""
        self.resumed = same_life
        if not self.started:
            return  # it was saved before it knew any time
        self._set_by_poll = now_ns is None
        self._offset_ns = self.now_ns - (now_ns or 0)

    def tell(self, now_ns: int) -> None:
        """Set the time to that of the host at a poll; if the host's clock goes back, time stops."""
        if self._set_by_poll:
            self._set_by_poll = False
            self._offset_ns = self.now_ns - now_ns
        own_ns = now_ns + self._offset_ns
        if own_ns > self.now_ns:
            self.now_ns = own_ns

    @contextmanager
    def shown(self, now_ns: int | None) -> Iterator[None]:
        """Show the host's `now_ns` in the block, but never an earlier time.

        It is for writing a snapshot only: nothing may happen at that time before the next poll.
        """
        last_ns = self.now_ns
        if now_ns is not None and self.started and not self._set_by_poll:
            self.now_ns = max(last_ns, now_ns + self._offset_ns)
        try:
            yield
        finally:
            self.now_ns = last_ns

    def host_ns(self, node_ns: int) -> int:
        """Return a time of the node in the host's."""
        return node_ns - self._offset_ns

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves."""
        return [self.now_ns, self.started]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned."""
        self.now_ns, self.started = plain
