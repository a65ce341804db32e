"""A reusable event for one waiting task.

Rule: a `trio.Event` can be set only once, so repeated waits need a new one each time. A Signal is
reusable, and wakes its one waiter directly.
"""

from __future__ import annotations

import trio


class Signal:
    """Set by any task, awaited by one; several `set` calls before the waiter runs count as one."""

    __slots__ = ("_is_set", "_waits")

    def __init__(self) -> None:
        self._is_set = False
        self._waits: trio.lowlevel.Task | None = None

    def set(self) -> None:
        """Wake the waiter, or let its next `wait` return at once."""
        task = self._waits
        if task is None:
            self._is_set = True
        else:
            self._waits = None
            trio.lowlevel.reschedule(task)

    def clear(self) -> None:
        """Reset the signal, when the caller has just checked for work itself."""
        self._is_set = False

    async def wait(self) -> None:
        """Return once the signal has been set since the last return; may be cancelled.

        Raises trio.BusyResourceError if another task waits.
        """
        if self._waits is not None:
            raise trio.BusyResourceError("another task waits for this signal")
        if self._is_set:
            await trio.lowlevel.checkpoint()
        else:
            self._waits = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self._is_set = False

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._waits = None
        return trio.lowlevel.Abort.SUCCEEDED
