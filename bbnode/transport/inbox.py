"""The inbox: events on their way to the driver.

Rule: envelopes are bounded per peer and in all, in number and in bytes, and refused when there
is no room; notices (all other events) always go in, and `crowded` says when so many lie
unread that no new connection should be taken. Room for a large message is reserved before the
first byte of it is kept. See `backend` for what becomes of the refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import EnvelopeReceived, TransportEvent
from bbnode.transport.limits import TransportLimits


@dataclass(slots=True)
class _Share:
    """What one peer has lying in the inbox, reserved or unread."""

    envelopes: int = 0
    bytes: int = 0
    # A message over the share itself; at most one.
    large: int = 0


class Inbox:
    """The one EventStream of a backend."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._events: deque[TransportEvent] = deque()
        self._arrived = trio.Event()
        self._shares: dict[PeerId, _Share] = {}
        self._bytes = 0
        self._large_bytes = 0
        self._reserved = 0
        self._envelopes = 0
        self._notices = 0
        self._closed = False
        # Called with the peer after room was made.
        self.on_room: Callable[[PeerId], None] | None = None

    @property
    def crowded(self) -> bool:
        """Whether too many notices lie unread to take new connections."""
        return self._notices >= self._limits.inbox_notices

    @property
    def envelope_bytes(self) -> int:
        """Bytes of all envelopes that lie unread."""
        return self._bytes + self._large_bytes - self._reserved

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the messages that are being received."""
        return self._reserved

    @property
    def envelopes(self) -> int:
        """Envelopes that lie unread."""
        return self._envelopes

    @property
    def notices(self) -> int:
        """Other events that lie unread."""
        return self._notices

    def notify(self, event: TransportEvent) -> None:
        """Put in an event that is not an envelope; dropped when nobody reads any more."""
        if self._closed:
            return
        self._notices += 1
        self._append(event)

    def offer(self, event: EnvelopeReceived) -> bool:
        """Put in an envelope; False when there is no room."""
        if not self._take_room(event.peer, len(event.data)):
            return False
        self._put(event)
        return True

    def reserve(self, peer: PeerId, size: int) -> bool:
        """Keep room for a message that is about to come; False when there is none."""
        if not self._take_room(peer, size):
            return False
        self._reserved += size
        return True

    def deliver_reserved(self, event: EnvelopeReceived) -> None:
        """Put in a message for which there is room kept."""
        self._reserved -= len(event.data)
        self._put(event)

    def unreserve(self, peer: PeerId, size: int) -> None:
        """The message will not come."""
        self._reserved -= size
        self._release(peer, size)

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
            self._envelopes -= 1
            self._release(event.peer, len(event.data))
        else:
            self._notices -= 1
        return event

    def _put(self, event: EnvelopeReceived) -> None:
        if self._closed:
            self._release(event.peer, len(event.data))
            return
        self._envelopes += 1
        self._append(event)

    def _append(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    def _take_room(self, peer: PeerId, size: int) -> bool:
        share = self._shares.get(peer) or _Share()
        limits = self._limits
        if share.envelopes >= limits.inbox_envelopes_per_peer:
            return False
        if size > min(limits.inbox_bytes_per_peer, limits.inbox_bytes):
            # Nobody else's small ones may keep it out for ever, so it has a budget of its own.
            within = self._large_bytes + size <= limits.inbox_large_bytes
            if share.large or (self._large_bytes and not within):
                return False
            share.large = size
            self._large_bytes += size
        else:
            if share.bytes + size > limits.inbox_bytes_per_peer:
                return False
            if self._bytes + size > limits.inbox_bytes:
                return False
            share.bytes += size
            self._bytes += size
        share.envelopes += 1
        self._shares[peer] = share
        return True

    def _release(self, peer: PeerId, size: int) -> None:
        share = self._shares[peer]
        share.envelopes -= 1
        if size == share.large:
            share.large = 0
            self._large_bytes -= size
        else:
            share.bytes -= size
            self._bytes -= size
        if not share.envelopes:
            del self._shares[peer]
        if self.on_room is not None:
            self.on_room(peer)
