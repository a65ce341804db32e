"""A wake-up call for one task that can be given again and again."""

from __future__ import annotations

import trio


class Signal:
    """Set by anyone, awaited by one task; calls between two waits are one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the waiter, or let its next `wait` return at once."""
        self._event.set()

    async def wait(self) -> None:
        """Return once the signal was set since the last return."""
        await self._event.wait()
        self._event = trio.Event()
