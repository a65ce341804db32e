"""Streams of other protocols on our connections, such as artifact fetch and membership exchange.

Rule: a stream of another protocol needs a connection whose peer has sent an acceptable hello, or
is a guest where the protocol is for guests as well, and there are at most
`protocol_streams_per_peer` of them in each direction. A stream is closed or reset however its
handler ends. A reader that rests makes the writer wait, for as long as something moves now and then
(`stream_idle_s`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import trio

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Buffer, Counters, ProtocolStream
from bbnode.transport.errors import NotConnectedError, StreamBrokenError, TooManyStreamsError
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS, Connection
from bbnode.transport.libp2p.muxer import MuxedStream
from bbnode.transport.links.link import Link, LinkState

log = logging.getLogger(__name__)

_READ_BYTES: Final = 64 * 1024
# The time for the other side to read the rest and end its side, after our end.
_LINGER_S: Final = 10.0
# The window of a stream without rules: 20 MB/s over a round trip of 50 ms.
_WINDOW_BYTES: Final = 1024 * 1024
# A write of a caller goes out in parts of this size, each of which counts as movement.
_WRITE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRules:
    """The bounds of one protocol's streams."""

    # Maximum of streams with one peer, in each direction; protocols without rules share
    # `protocol_streams_per_peer`.
    streams_per_peer: int
    # Bytes that the other side may send before they are read.
    window_bytes: int
    # True if hosts that speak no protocol of bbnode may open them.
    for_guests: bool = False


class LinkedStream(ProtocolStream):
    """A ProtocolStream on the connection of a link; all calls can be cancelled."""

    def __init__(self, link: Link, stream: MuxedStream) -> None:
        # The link of its connection, and the muxer's stream.
        self.link = link
        self.stream = stream
        self._broken = ""
        self._lock = trio.Lock()
        # The time of the last movement of bytes, in either direction.
        self.moved_at = trio.current_time()

    @property
    def peer(self) -> PeerId:
        return self.link.peer

    async def read(self, max_bytes: int) -> bytes:
        try:
            data = await self.stream.read(max_bytes)
        except StreamBrokenError as error:
            raise self._told(error) from error
        self.moved_at = trio.current_time()
        return data

    async def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if 0 < len(view) <= _WRITE_BYTES and not (self._lock.locked() or self.stream.is_writing):
            # A single write of the stream, which is atomic.
            await self._write(view)
            return
        async with self._lock:
            for at in range(0, len(view), _WRITE_BYTES):
                await self._write(view[at : at + _WRITE_BYTES])

    async def _write(self, data: memoryview) -> None:
        try:
            await self.stream.write(data)
        except StreamBrokenError as error:
            raise self._told(error) from error
        self.moved_at = trio.current_time()

    async def end(self) -> None:
        async with self._lock:
            await self.stream.end()

    def _told(self, error: StreamBrokenError) -> StreamBrokenError:
        """Return the error to raise: with the reason of `abort`, if that broke the stream."""
        return StreamBrokenError(self._broken or str(error))

    def abort(self, reason: str) -> None:
        """Break the stream at once: all calls raise, and the other side sees a reset."""
        self._broken = self._broken or reason
        self.stream.abort(reason)

    async def finish(self, *, clean: bool) -> bool:
        """End our side (`clean`) or reset the stream. Cannot be cancelled; bounded in time.

        Returns True if we ended it and the other side left it half open.
        """
        ended = False
        with trio.CancelScope(shield=True):
            if clean:
                await self.stream.end()
                # A reset would lose data that the other side has not read; when it ends its own
                # side, it has read everything.
                with trio.move_on_after(_LINGER_S), suppress(StreamBrokenError):
                    while await self.stream.read(_READ_BYTES):
                        pass
                    ended = True
            broken = bool(self._broken) or self.stream.broken
            if not ended:
                self.stream.abort("the stream was reset here")
        return clean and not ended and not broken


StreamHandler: TypeAlias = Callable[[LinkedStream], Awaitable[None]]


class Protocols:
    """The other protocols of one transport: their handlers, and the open streams."""

    def __init__(
        self, counters: Counters, *, streams_per_peer: int, idle_s: float, hello_s: float
    ) -> None:
        """Create the table; a stream on which nothing moves for `idle_s` seconds is reset.

        A stream that a peer opens waits `hello_s` seconds for the peer's hello.
        """
        self._hello_s = hello_s
        self._counters = counters
        self._idle_s = idle_s
        self._streams: set[LinkedStream] = set()
        self._streams_per_peer = streams_per_peer
        self._handlers: dict[str, StreamHandler] = {}
        self._rules: dict[str, ProtocolRules] = {}
        # Count by peer, True if opened here, and protocol if that has rules of its own.
        self._open: Counter[tuple[PeerId, bool, str]] = Counter()

    def set_rules(self, protocol_id: str, rules: ProtocolRules) -> None:
        """Set rules for the streams of one protocol, in both directions; before `run`."""
        self._rules[protocol_id] = rules

    def streams(self) -> set[MuxedStream]:
        """Return the muxer's streams that are in use here."""
        return {stream.stream for stream in self._streams}

    def reap(self, now_s: float) -> None:
        """Break the streams on which nothing has moved for too long."""
        for stream in self._streams:
            if now_s - stream.moved_at >= self._idle_s:
                stream.moved_at = now_s
                self._counters.add("streams.reaped")
                stream.abort(f"nothing moved for {self._idle_s:g} s")

    def register(self, protocol_id: str, handler: StreamHandler) -> None:
        if protocol_id in self._handlers or protocol_id in LANE_PROTOCOLS.values():
            raise DeploymentError(f"protocol {protocol_id} is served already; choose another id")
        if not protocol_id.startswith("/"):
            raise DeploymentError(f"protocol id {protocol_id!r} does not begin with a slash")
        self._handlers[protocol_id] = handler

    async def serve(self, link: Link | None, protocol_id: str, raw: MuxedStream) -> None:
        """Serve one stream that a peer opened, to its end."""
        if link is not None:
            # It may overtake the peer's hello, which arrives on another stream. A foreign host
            # sends none.
            with trio.move_on_after(self._hello_s):
                await (link.welcome if self._for_guests(protocol_id) else link.settled).wait()
        place = self._place(link, protocol_id, ours=False)
        if link is None or place is None:
            self._counters.add("protocols.refused")
            await raw.reset()
            return
        clean = False
        stream = self._linked(link, protocol_id, raw)
        try:
            await self._handlers[protocol_id](stream)
            clean = True
        except Exception as error:  # noqa: BLE001 - declared boundary: others' handlers
            self._counters.add("protocols.failed")
            log.warning("handling %s failed: %r", protocol_id, error)
        finally:
            await self._finish(stream, clean=clean)
            self._leave(place)

    @asynccontextmanager
    async def open(
        self, link: Link | None, peer: PeerId, protocol_id: str
    ) -> AsyncIterator[LinkedStream]:
        """Open a stream; see `Transport.open_stream`."""
        if link is None or not isinstance(link.carrier, Connection):
            raise NotConnectedError(f"{peer} is not connected; wait for its ConnectionOpened")
        place = self._place(link, protocol_id, ours=True)
        if place is None:
            raise TooManyStreamsError(
                f"{self._most(protocol_id)} streams of other protocols are open with {peer} "
                "already; wait until one is closed"
            )
        try:
            raw = await link.carrier.open_protocol(protocol_id)
            stream = self._linked(link, protocol_id, raw)
            clean = False
            try:
                yield stream
                clean = True
            finally:
                await self._finish(stream, clean=clean)
        finally:
            self._leave(place)

    def _most(self, protocol_id: str) -> int:
        rules = self._rules.get(protocol_id)
        return self._streams_per_peer if rules is None else rules.streams_per_peer

    def _for_guests(self, protocol_id: str) -> bool:
        rules = self._rules.get(protocol_id)
        return rules is not None and rules.for_guests

    def _place(
        self, link: Link | None, protocol_id: str, *, ours: bool
    ) -> tuple[PeerId, bool, str] | None:
        """Count one more stream; return its key, or None at the bound."""
        if link is None:
            return None
        is_guest = link.is_foreign and self._for_guests(protocol_id)
        if not ours and link.state is not LinkState.UP and not is_guest:
            return None
        place = (link.peer, ours, protocol_id if protocol_id in self._rules else "")
        if self._open[place] >= self._most(protocol_id):
            return None
        self._open[place] += 1
        self._counters.add("protocols.opened")
        return place

    def _leave(self, place: tuple[PeerId, bool, str]) -> None:
        self._open[place] -= 1
        if not self._open[place]:
            del self._open[place]

    async def _finish(self, stream: LinkedStream, *, clean: bool) -> None:
        try:
            if await stream.finish(clean=clean):
                self._counters.add("streams.reaped")
        finally:
            self._streams.discard(stream)

    def _linked(self, link: Link, protocol_id: str, raw: MuxedStream) -> LinkedStream:
        rules = self._rules.get(protocol_id)
        raw.set_window(_WINDOW_BYTES if rules is None else rules.window_bytes)
        stream = LinkedStream(link, raw)
        self._streams.add(stream)
        return stream
