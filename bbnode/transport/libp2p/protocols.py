"""Streams of other protocols on our connections, such as artifact fetch and membership exchange.

Rule: a stream of another protocol needs a connection whose peer has sent an acceptable hello, and
there are at most `protocol_streams_per_peer` of them in each direction. A stream is closed or
reset however its handler ends. libp2p's stream I/O must never be cancelled (S4), so tasks of the
stream do all of it, and callers wait on events and channels. If a reader pauses, so do those tasks,
and libp2p resets the stream after 5 s: protocols request only what they can take, or are `patient`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import trio

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Buffer, Counters, ProtocolStream
from bbnode.transport.errors import NotConnectedError, StreamBrokenError, TooManyStreamsError
from bbnode.transport.libp2p.carrier import LANE_PROTOCOLS, Libp2pCarrier, Libp2pStream
from bbnode.transport.links.link import Link, LinkState

log = logging.getLogger(__name__)

_READ_BYTES: Final = 64 * 1024
# Read ahead of the caller. Under the 256 KiB window that the other side begins with.
_READ_AHEAD_BYTES: Final = 128 * 1024
# The time for the other side to read the rest and end its side, once we are done.
_LINGER_S: Final = 10.0
# One write of a caller goes out in parts of this size, four full Yamux frames.
_WRITE_BYTES: Final = 4 * 65_524


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRules:
    """The bounds of one protocol's streams."""

    # Streams of one peer, in each direction; the protocols that have no rules share
    # `protocol_streams_per_peer`.
    streams_per_peer: int
    # Bytes that the other side may send ahead of the reader.
    window_bytes: int
    # True if a writer waits for a slow reader for as long as the connection lives.
    patient: bool


class PumpedStream(ProtocolStream):
    """A ProtocolStream: two tasks move the bytes, the caller's calls can be cancelled."""

    def __init__(self, link: Link, stream: Libp2pStream, *, patient: bool = False) -> None:
        # The connection it runs on.
        self.link = link
        self._stream = stream
        self._patient = patient
        self._ahead: deque[bytes] = deque()
        self._ahead_bytes = 0
        self._changed = trio.Event()
        self._ended = False
        self._broken: StreamBrokenError | None = None
        self._closing = False
        self._out, self._parts = trio.open_memory_channel[bytes | None](0)
        self._written = trio.Event()
        self._done = trio.Event()
        self._lock = trio.Lock()
        # When bytes last moved, either way.
        self.moved_at = trio.current_time()

    @property
    def raw(self) -> Any:
        """libp2p's stream."""
        return self._stream.raw

    @property
    def peer(self) -> PeerId:
        return self.link.peer

    async def read(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._ahead:
            if self._ended:
                return b""
            if self._broken is not None:
                raise StreamBrokenError(str(self._broken)) from self._broken
            await self._changed.wait()
        data = self._ahead.popleft()
        if len(data) > max_bytes:
            self._ahead.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._ahead_bytes -= len(data)
        self._change()
        return data

    async def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._lock:
            for at in range(0, len(view), _WRITE_BYTES):
                await self._pass_on(bytes(view[at : at + _WRITE_BYTES]))

    async def end(self) -> None:
        async with self._lock:
            await self._pass_on(None)

    async def _pass_on(self, part: bytes | None) -> None:
        """Pass a part to the writer, and wait until it is written."""
        if self._broken is not None:
            raise StreamBrokenError(str(self._broken)) from self._broken
        try:
            await self._out.send(part)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamBrokenError("the stream is closed for writing") from error
        while not self._written.is_set():
            await self._written.wait()
        self._written = trio.Event()
        if self._broken is not None:
            raise StreamBrokenError(str(self._broken)) from self._broken

    def abort(self, reason: str) -> None:
        """Break the stream at once: all calls raise, and `finish` resets it. Does not block."""
        self._break(StreamBrokenError(reason))
        self._out.close()
        self._written.set()

    # -- the tasks -------------------------------------------------------------------------

    async def run(self) -> None:
        """Move bytes until both sides have ended, or the stream is broken or reset."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_parts)
                await self._read_ahead()
                if self._broken is not None:
                    self._out.close()
        finally:
            self._done.set()
            self._break(StreamBrokenError("the connection is gone"))

    async def finish(self, *, clean: bool) -> bool:
        """End our side (`clean`) or reset the stream. Cannot be cancelled; bounded in time.

        True when it was ended here and the other side left it half open.
        """
        with trio.CancelScope(shield=True):
            self._closing = True
            self._out.close()
            self._change()
            if clean and self._broken is None:
                await self._stream.end()
                # A reset would lose data that the other side has not read; when it ends its own
                # side, it has read everything.
                with trio.move_on_after(_LINGER_S):
                    await self._done.wait()
            if self._ended and clean:
                await self._stream.close()
            else:
                await self._stream.reset()
        return clean and not self._ended and self._broken is None

    async def _read_ahead(self) -> None:
        try:
            while True:
                while self._ahead_bytes >= _READ_AHEAD_BYTES and not self._closing:
                    await self._changed.wait()
                data = await self._stream.read(_READ_BYTES)
                if not data:
                    if self._stream.gone:
                        self._break(StreamBrokenError("the connection is gone"))
                        return
                    self._ended = True
                    self._change()
                    return
                self.moved_at = trio.current_time()
                if self._closing:
                    continue  # the reader is gone
                self._ahead.append(data)
                self._ahead_bytes += len(data)
                self._change()
        except StreamBrokenError as error:
            self._break(error)

    async def _write_parts(self) -> None:
        with self._parts:
            async for part in self._parts:
                try:
                    if part is None:
                        await self._stream.end()
                        return
                    if self._patient:
                        await self._stream.write_patiently(part)
                    else:
                        await self._stream.write(part)
                    self.moved_at = trio.current_time()
                except StreamBrokenError as error:
                    self._break(error)
                    return
                finally:
                    self._written.set()

    def _break(self, error: StreamBrokenError) -> None:
        self._broken = self._broken or error
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


PumpedHandler: TypeAlias = Callable[[PumpedStream], Awaitable[None]]


class Protocols:
    """The other protocols of one transport: their handlers, and the open streams."""

    def __init__(self, counters: Counters, *, streams_per_peer: int, idle_s: float) -> None:
        """Create the table; a stream on which nothing moves for `idle_s` seconds is reset."""
        self._counters = counters
        self._idle_s = idle_s
        self._pumped_streams: set[PumpedStream] = set()
        self._streams_per_peer = streams_per_peer
        self._handlers: dict[str, PumpedHandler] = {}
        self._rules: dict[str, ProtocolRules] = {}
        # Streams by peer, True if opened here, and protocol if that has rules of its own.
        self._open: Counter[tuple[PeerId, bool, str]] = Counter()

    def set_rules(self, protocol_id: str, rules: ProtocolRules) -> None:
        """Set rules for the streams of one protocol, in both directions; before `run`."""
        self._rules[protocol_id] = rules

    def raw_streams(self) -> set[Any]:
        """Return libp2p's streams that are in use here."""
        return {stream.raw for stream in self._pumped_streams}

    def reap(self, now_s: float) -> None:
        """Break the streams on which nothing has moved for too long."""
        for stream in self._pumped_streams:
            if now_s - stream.moved_at >= self._idle_s:
                stream.moved_at = now_s
                self._counters.add("streams.reaped")
                stream.abort(f"nothing moved for {self._idle_s:g} s")

    def register(self, protocol_id: str, handler: PumpedHandler) -> None:
        if protocol_id in self._handlers or protocol_id in LANE_PROTOCOLS.values():
            raise DeploymentError(f"protocol {protocol_id} is served already; choose another id")
        if not protocol_id.startswith("/"):
            raise DeploymentError(f"protocol id {protocol_id!r} does not begin with a slash")
        self._handlers[protocol_id] = handler

    async def serve(self, link: Link | None, protocol_id: str, raw: Libp2pStream) -> None:
        """Serve one stream that a peer opened, to its end."""
        place = self._place(link, protocol_id, ours=False)
        if link is None or place is None:
            self._counters.add("protocols.refused")
            await raw.reset()
            return
        clean = False
        stream = await self._pumped(link, protocol_id, raw)
        try:
            link.start_soon(stream.run)
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
    ) -> AsyncIterator[PumpedStream]:
        """See Transport.open_stream."""
        if link is None or not isinstance(link.carrier, Libp2pCarrier):
            raise NotConnectedError(f"{peer} is not connected; wait for its ConnectionOpened")
        place = self._place(link, protocol_id, ours=True)
        if place is None:
            raise TooManyStreamsError(
                f"{self._most(protocol_id)} streams of other protocols are open with {peer} "
                "already; wait until one is closed"
            )
        try:
            raw = await _opened(link, link.carrier, protocol_id)
            stream = await self._pumped(link, protocol_id, raw)
            clean = False
            try:
                link.start_soon(stream.run)
                yield stream
                clean = True
            finally:
                await self._finish(stream, clean=clean)
        finally:
            self._leave(place)

    def _most(self, protocol_id: str) -> int:
        rules = self._rules.get(protocol_id)
        return self._streams_per_peer if rules is None else rules.streams_per_peer

    def _place(
        self, link: Link | None, protocol_id: str, *, ours: bool
    ) -> tuple[PeerId, bool, str] | None:
        """Count one more stream; return its key, or None at the bound."""
        if link is None or (not ours and link.state is not LinkState.UP):
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

    async def _finish(self, stream: PumpedStream, *, clean: bool) -> None:
        try:
            if await stream.finish(clean=clean):
                self._counters.add("streams.reaped")
        finally:
            self._pumped_streams.discard(stream)

    async def _pumped(self, link: Link, protocol_id: str, raw: Libp2pStream) -> PumpedStream:
        rules = self._rules.get(protocol_id)
        stream = PumpedStream(link, raw, patient=rules is not None and rules.patient)
        self._pumped_streams.add(stream)
        if rules is None:
            raw.growing_window()
            return stream
        await raw.grant_window(rules.window_bytes)
        if rules.patient:
            raw.make_patient()
        return stream


async def _opened(link: Link, carrier: Libp2pCarrier, protocol_id: str) -> Libp2pStream:
    """Open a stream in a task of the link: the negotiation is not cancelled with the caller."""
    done = trio.Event()
    result: list[Libp2pStream | StreamBrokenError] = []
    wanted = True

    async def negotiate() -> None:
        try:
            stream = await carrier.open_protocol(protocol_id)
        except StreamBrokenError as error:
            result.append(error)
        else:
            result.append(stream)
            if not wanted:
                await stream.reset()
        finally:
            done.set()

    link.start_soon(negotiate)
    try:
        await done.wait()
    except trio.Cancelled:
        wanted = False
        raise
    opened = result[0] if result else StreamBrokenError("the connection is gone")
    if isinstance(opened, StreamBrokenError):
        raise opened
    return opened
