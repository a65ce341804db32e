"""One task that waits until others have something for it.

Rule: a `trio.Event` is used once, so who waits again and again makes one each time. A Signal is
used for ever, and wakes its one waiter without anything in between.
"""

from __future__ import annotations

import trio


class Signal:
    """Set by any task and awaited by one; calls of `set` before that one runs count once."""

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
        """Forget what was set; the caller has just looked for itself."""
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
