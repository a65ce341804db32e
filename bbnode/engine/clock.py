"""The node's own time, and how it lies to the host's.

Rule: everything in a node is in its own time. It is the host's until the node is restored from a
snapshot: then it goes on from the snapshot's, and the host's is translated at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime


class NodeClock:
    """Sets a node's time at each poll.

    `resumed`: not None between a restore and the first poll; whether the same life goes on.
    """

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._ahead_ns = 0  # of the host's clock
        self._set_by_poll = False
        self.resumed: bool | None = None

    @property
    def must_poll(self) -> bool:
        """Whether a restored node waits for its first poll."""
        return self.resumed is not None

    def resume(self, now_ns: int | None, *, same_life: bool) -> None:
        """The node was restored at the host's `now_ns`; None: it is the time of the first poll."""
        self.resumed = same_life
        if not self._rt.booted:
            return  # it was saved before it knew any time
        self._set_by_poll = now_ns is None
        self._ahead_ns = self._rt.now_ns - (now_ns or 0)

    def tell(self, now_ns: int) -> None:
        """The host's time at a poll; one that goes back stands still."""
        if self._set_by_poll:
            self._set_by_poll = False
            self._ahead_ns = self._rt.now_ns - now_ns
        self._rt.now_ns = max(self._rt.now_ns, now_ns + self._ahead_ns)

    @contextmanager
    def shown(self, now_ns: int | None) -> Iterator[None]:
        """Meanwhile the node's time is that of the host's `now_ns`, and never an earlier one.

        Only for what is written down: until the next poll, nothing is to happen at that time.
        """
        last_ns = self._rt.now_ns
        if now_ns is not None and self._rt.booted and not self._set_by_poll:
            self._rt.now_ns = max(last_ns, now_ns + self._ahead_ns)
        try:
            yield
        finally:
            self._rt.now_ns = last_ns

    def host_ns(self, node_ns: int) -> int:
        """A time of the node in the host's."""
        return node_ns - self._ahead_ns
