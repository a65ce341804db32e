"""The inbox: events on their way to the driver.

Rule: envelopes are bounded per peer and in all, in number and in bytes, and refused when there
is no room; notices (all other events) always go in, and `crowded` says when so many lie
unread that no new connection should be taken. See `backend` for what readers do then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import EnvelopeReceived, TransportEvent, TransportLimits


@dataclass(slots=True)
class _Share:
    """What one peer has lying in the inbox."""

    envelopes: int = 0
    bytes: int = 0


class Inbox:
    """The one EventStream of a backend."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._events: deque[TransportEvent] = deque()
        self._arrived = trio.Event()
        # Set and replaced whenever an envelope is taken: wakes the readers that wait.
        self._freed = trio.Event()
        self._shares: dict[PeerId, _Share] = {}
        self._bytes = 0
        self._notices = 0
        self._closed = False
        # Called after an envelope was taken; the in-memory network moves on then.
        self.on_taken: Callable[[PeerId], None] | None = None

    @property
    def crowded(self) -> bool:
        """Whether too many notices lie unread to take new connections."""
        return self._notices >= self._limits.inbox_notices

    @property
    def envelope_bytes(self) -> int:
        """Bytes of all envelopes that lie unread."""
        return self._bytes

    def notify(self, event: TransportEvent) -> None:
        """Put in an event that is not an envelope; dropped when nobody reads any more."""
        if self._closed:
            return
        self._notices += 1
        self._append(event)

    def offer(self, event: EnvelopeReceived) -> bool:
        """Put in an envelope; False when there is no room."""
        share = self._shares.get(event.peer)
        limits, size = self._limits, len(event.data)
        if share is None:
            share = _Share()
        # A share that is empty takes any envelope: a cap under the envelope cap must not
        # make a size undeliverable for ever.
        if share.envelopes and (
            share.envelopes >= limits.inbox_envelopes_per_peer
            or share.bytes + size > limits.inbox_bytes_per_peer
        ):
            return False
        if self._events and self._bytes + size > limits.inbox_bytes:
            return False
        if self._closed:
            return True
        self._shares[event.peer] = share
        share.envelopes += 1
        share.bytes += size
        self._bytes += size
        self._append(event)
        return True

    async def deliver(self, event: EnvelopeReceived) -> bool:
        """`offer`, waiting for room for at most `inbox_patience_s` seconds."""
        taken = self.offer(event)
        with trio.move_on_after(self._limits.inbox_patience_s):
            while not taken:
                await self._freed.wait()
                taken = self.offer(event)
        return taken

    def close(self) -> None:
        """No more events; what lies there can still be taken."""
        self._closed = True
        self._arrived.set()

    async def receive(self) -> TransportEvent:
        """The next event; raises trio.EndOfChannel after `close`, when all is taken."""
        await trio.lowlevel.checkpoint()
        while not self._events:
            if self._closed:
                raise trio.EndOfChannel
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> TransportEvent:
        """The next event; raises trio.WouldBlock, or trio.EndOfChannel after `close`."""
        if not self._events:
            raise trio.EndOfChannel if self._closed else trio.WouldBlock
        event = self._events.popleft()
        if isinstance(event, EnvelopeReceived):
            self._release(event)
        else:
            self._notices -= 1
        return event

    def _append(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    def _release(self, event: EnvelopeReceived) -> None:
        share = self._shares[event.peer]
        share.envelopes -= 1
        share.bytes -= len(event.data)
        self._bytes -= len(event.data)
        if not share.envelopes:
            del self._shares[event.peer]
        self._freed.set()
        self._freed = trio.Event()
        if self.on_taken is not None:
            self.on_taken(event.peer)
