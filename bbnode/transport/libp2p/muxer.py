"""Yamux over Noise: the streams of one connection, with one task that reads and one that writes.

Rule: the wire format and the windows are those of the Yamux specification
(github.com/hashicorp/yamux/blob/master/spec.md), whoever the peer is. Everything between two waits
is synchronous: a turn of the reader decrypts the whole packets from one system call, hands on the
whole frames in them, and then sends the responses. A caller that writes encrypts and sends at once
if the system takes bytes; otherwise the writing task continues, with frames and small messages
first and large ones in turns of a batch each. So reads, writes and waits for room may be cancelled
at any time, and only whole frames are sent.

Behaviour that no honest peer shows ends its connection with the reason: a frame beyond the window,
requests for answers that it does not read, a flood of meaningless frames. A stream beyond the limit
is reset alone, and a burst of streams is slowed: each stream and each frame has a price, and a
reader yields after a long turn or while it is in debt (`links.shares`). Frames in flight when a
stream ends are no fault, as far as that stream could have sent them.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from bbnode.transport.base import Buffer
from bbnode.transport.errors import StreamBrokenError, Violation
from bbnode.transport.libp2p.noise_channel import (
    OPENED_AT_ONCE,
    OVERHEAD_BYTES,
    PACKET_BYTES,
    PLAIN_BYTES,
    NoiseChannel,
    PacketError,
)
from bbnode.transport.libp2p.wire import BROKEN, READ_BYTES, ByteWire, ReusedBuffers
from bbnode.transport.links.shares import (
    ANSWER_US,
    FED_DATA_US,
    FRAME_US,
    LATE,
    LATE_DATA_US,
    PACKET_US,
    PAYING_BYTES,
    READ_DATA_US,
    SENSELESS,
    STREAM_US,
    WASTED_BYTES,
    CoreShare,
)
from bbnode.transport.signals import Signal

YAMUX_ID: Final = "/yamux/1.0.0"

_HEADER: Final = struct.Struct(">BBHII")
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_NORMAL, _PROTOCOL_ERROR = 0, 1
_AWAY_WORDS: Final = {0: "normal end", 1: "protocol error", 2: "internal error"}
# The initial window of each stream, in both directions; the maximum in an update's field.
INITIAL_WINDOW_BYTES: Final = 256 * 1024
_MOST_WINDOW_BYTES: Final = 2**32 - 1
# A window update is sent when this fraction of the window was read.
_UPDATE_PART: Final = 4

# Packets of a large message that are sent at once; a small frame waits for no more than these.
_BATCH_PACKETS: Final = 4
_BATCH_BYTES: Final = _BATCH_PACKETS * PLAIN_BYTES + 1024
# Data of up to this size shares a packet with other frames.
_SMALL_BYTES: Final = 8 * 1024
# And up to this size while no stream waits for a turn: a copy costs less than a second packet.
_ALONE_BYTES: Final = 48 * 1024
# Immediate writes of a stream before other tasks get a turn.
_WRITES_A_STEP: Final = 16
# Unsent bytes up to this size are copied, so that their large buffer is released.
_KEPT_BYTES: Final = 64 * 1024
# Unread answers beyond this size mean that the peer requests answers without reading them.
_ANSWERS_BYTES: Final = 128 * 1024
# This many bytes for a stream that never existed count like a frame.
_SENSELESS_BYTES: Final = 4 * 1024
# Small frames of a stream that may be in flight when it ends: the answer to its opening, window
# updates, its end, its reset, and data in pieces of less than 256 bytes.
_CROSSING_FRAMES: Final = 16
_SPLIT_BYTES: Final = 256

# Read at once from a peer without standing, since unprocessed bytes occupy our memory.
_STRANGER_BYTES: Final = 64 * 1024

# Room for the beginning of an incomplete packet and one read after it, and as much for the
# plaintext.
_TURN_BYTES: Final = PACKET_BYTES + 2 + READ_BYTES
_READ_BUFFERS: Final = ReusedBuffers(2 * _TURN_BYTES)
_SEALED_BUFFERS: Final = ReusedBuffers((_BATCH_PACKETS + 2) * (PLAIN_BYTES + OVERHEAD_BYTES))


class UnreadBytes:
    """The unread bytes on all connections of a node."""

    __slots__ = ("_most", "_on_over", "count")

    def __init__(self, most_bytes: int, on_over: Callable[[], bool]) -> None:
        """Create a counter that calls `on_over` while there are more than `most_bytes`.

        `on_over` ends a connection, and returns False if there is none.
        """
        self.count = 0
        self._most = most_bytes
        self._on_over = on_over

    def add(self, more: int) -> None:
        """Count received bytes; a negative number counts read ones."""
        self.count += more
        if more > 0:
            while self.count > self._most and self._on_over():
                pass


class _Sending:
    """A write that waits for the window of its stream, or for its turn."""

    __slots__ = ("changed", "left", "parts")

    def __init__(self, parts: tuple[memoryview, ...]) -> None:
        self.parts = deque(parts)
        self.left = sum(map(len, parts))
        self.changed = trio.Event()


class MuxedStream:
    """One stream of a Muxer. One task reads it and one writes it at a time.

    Its reads, writes and waits may be cancelled.
    """

    __slots__ = (
        "_arrived",
        "_buffer",
        "_muxer",
        "_on_broken",
        "_owed",
        "_queued",
        "_recv_window",
        "_send_window",
        "_sending",
        "_sink",
        "_sink_error",
        "_window",
        "_writes",
        "end_in",
        "end_out",
        "failure",
        "is_initiator",
        "stream_id",
    )

    def __init__(self, muxer: Muxer, number: int, *, ours: bool) -> None:
        self._muxer = muxer
        self.stream_id = number
        self.is_initiator = ours
        self._buffer = bytearray()
        # Wakes the one task that reads or feeds.
        self._arrived = Signal()
        # Set while `feed` runs: the consumer of the bytes, and the error that ends it.
        self._sink: Callable[[memoryview], None] | None = None
        self._sink_error: Exception | None = None
        # Bytes that the peer may still send, the full window, and bytes read but not yet credited.
        self._recv_window = self._window = INITIAL_WINDOW_BYTES
        self._owed = 0
        self._send_window = INITIAL_WINDOW_BYTES
        self._sending: _Sending | None = None
        self._queued = False
        self._writes = 0
        self._on_broken: Callable[[], None] | None = None
        # True after the peer's FIN, and after ours.
        self.end_in = self.end_out = False
        # The reason why the stream is dead: a reset, or the end of the connection.
        self.failure = ""

    @property
    def unread_bytes(self) -> int:
        """Bytes received and not yet read."""
        return len(self._buffer)

    @property
    def room_bytes(self) -> int:
        """Bytes that the peer may still send within its window."""
        return max(0, self._recv_window)

    @property
    def is_fed(self) -> bool:
        """True if received data is handled in the turn in which it arrives."""
        return self._sink is not None

    @property
    def broken(self) -> bool:
        """True after a reset of either side, or the end of the connection."""
        return bool(self.failure)

    @property
    def is_closed(self) -> bool:
        """True if both directions are closed."""
        return bool(self.failure) or (self.end_in and self.end_out)

    @property
    def is_writing(self) -> bool:
        """True while a write waits for the window, or for its turn."""
        return self._sending is not None

    # -- reading ---------------------------------------------------------------------------

    async def read(self, max_bytes: int = _MOST_WINDOW_BYTES) -> bytes:
        """Return 1 to `max_bytes` bytes; b"" at the end.

        Raises StreamBrokenError if the stream or its connection has broken, after all data
        received before was read.
        """
        if self._buffer:
            await trio.lowlevel.checkpoint()
        while not self._buffer:
            self._raise_if_broken()
            if self.end_in:
                return b""
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(memoryview(self._buffer)[:max_bytes])
        del self._buffer[: len(data)]
        self._muxer.count_unread(self, -len(data))
        self._credit(len(data))
        return data

    def put_back(self, data: bytes) -> None:
        """Return `data`, the end of the last read, so that the next read begins with it."""
        self._buffer[:0] = data
        self._muxer.count_unread(self, len(data))
        # It counts as read when it is read again.
        self._owed -= len(data)

    async def feed(self, take: Callable[[memoryview], None]) -> None:
        """Pass data to `take` in the turn in which it arrives, until the end of the stream.

        The view is valid during the call. Raises what `take` raises, and StreamBrokenError.
        """
        self.listen(take)
        try:
            while self._sink_error is None and not self.failure and not self.end_in:
                await self._arrived.wait()
        finally:
            self._sink = None
        if self._sink_error is not None:
            raise self._sink_error
        self._raise_if_broken()

    def listen(
        self, take: Callable[[memoryview], None], on_broken: Callable[[], None] = lambda: None
    ) -> None:
        """Pass data to `take` in the turn in which it arrives; the end is not reported.

        The view is valid during the call. `on_broken` is called when the stream breaks.
        """
        self._sink, self._on_broken = take, on_broken
        if self.failure:
            on_broken()
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._muxer.count_unread(self, -len(data))
            self._pass_on(memoryview(data))

    def _pass_on(self, data: memoryview) -> None:
        if self._sink is None or self._sink_error is not None:
            return  # the feeding task is about to end
        size = len(data)
        try:
            self._sink(data)
        except Exception as error:  # noqa: BLE001 - raised where it is fed
            self._sink_error = error
            self._arrived.set()
        self._owed += size
        if self._owed * _UPDATE_PART >= self._window:
            self._credit(0)

    def _raise_if_broken(self) -> None:
        if self.failure:
            raise StreamBrokenError(self.failure)

    def set_window(self, window_bytes: int) -> None:
        """Raise the window to `window_bytes`; it never shrinks."""
        more = window_bytes - self._window
        if more > 0 and not self.is_closed:
            self._window = window_bytes
            self._grant(more)

    def _credit(self, size: int) -> None:
        """Count read bytes, and send a window update after each quarter of the window."""
        self._owed += size
        if self._owed * _UPDATE_PART >= self._window and not self.end_in and not self.failure:
            owed, self._owed = self._owed, 0
            self._grant(owed)

    def _grant(self, size: int) -> None:
        self._recv_window += size
        self._muxer.put_frame(_WINDOW, 0, self.stream_id, size)

    def take_window(self, size: int) -> int:
        """Charge a frame to the window; return the rest, which is negative for too much."""
        self._recv_window -= size
        return self._recv_window

    def arrived(self, data: memoryview) -> None:
        """Store received data; called by the muxer."""
        if self._sink is not None:
            self._pass_on(data)
            return
        self._buffer += data
        self._muxer.count_unread(self, len(data))
        self._arrived.set()

    def ended_by_peer(self) -> None:
        """Record the FIN of the peer; called by the muxer."""
        self.end_in = True
        self._arrived.set()
        self._forget_if_over()

    def fail(self, reason: str) -> None:
        """End both directions for this reason, and wake all waiting tasks; called by the muxer."""
        if not self.failure:
            self.failure = reason
            self._arrived.set()
            if self._sending is not None:
                self._sending.changed.set()
            if self._on_broken is not None:
                self._on_broken()

    # -- writing ---------------------------------------------------------------------------

    async def write(self, *data: Buffer) -> None:
        """Send all of `data`, as the window allows. A cancelled write may be partly sent.

        Raises StreamBrokenError after our own end, or if the stream or its connection has broken.
        """
        self._raise_if_unwritable()
        sending = None
        if len(data) != 1 or not self._goes_whole(data[0]):
            while not (sending := self._begin(data)):
                await self._until(self._sending)
        try:
            self._writes += 1
            if (sending is not None and sending.left) or self._writes % _WRITES_A_STEP == 0:
                await trio.lowlevel.checkpoint()
                await self._until(sending)
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            if sending is not None and self._sending is sending:
                self._sending = None
            raise

    def write_now(self, data: Buffer) -> bool:
        """Send `data` without waiting, now or soon; return False if an earlier write still waits.

        Raises what `write` does.
        """
        self._raise_if_unwritable()
        return self._goes_whole(data) or self._begin((data,)) is not None

    def _goes_whole(self, data: Buffer) -> bool:
        """Send `data` if the window takes all of it and it needs no turn; else return False."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if (
            self._sending is None
            and 0 < size <= _ALONE_BYTES
            and size <= self._send_window
            and self._muxer.put_data(self.stream_id, data, size)
        ):
            self._send_window -= size
            return True
        return False

    def _begin(self, data: tuple[Buffer, ...]) -> _Sending | None:
        """Start a write; return None if another one is under way."""
        self._raise_if_unwritable()
        if self._sending is not None:
            return None
        sending = self._sending = _Sending(tuple(memoryview(each).cast("B") for each in data))
        if sending.left:
            self._queue()
            self._muxer.send()
        else:
            self._sending = None
        return sending

    async def _until(self, sending: _Sending | None) -> None:
        """Wait until a write is sent."""
        while sending is not None and sending.left:
            self._raise_if_unwritable()
            await sending.changed.wait()
            sending.changed = trio.Event()

    def _raise_if_unwritable(self) -> None:
        self._raise_if_broken()
        if self.end_out:
            raise StreamBrokenError("the stream is closed for writing")

    def _queue(self) -> None:
        if self._sending is not None and self._send_window > 0 and not self._queued:
            self._queued = True
            self._muxer.queue(self)

    def next_parts(self, most_bytes: int) -> list[memoryview]:
        """Return the next bytes to send, charged to the window; called by the muxer in turn."""
        self._queued = False
        sending, parts = self._sending, []
        if sending is None or self.failure:
            return []
        room = min(most_bytes, self._send_window)
        while room and sending.parts:
            part = sending.parts.popleft()
            if len(part) > room:
                sending.parts.appendleft(part[room:])
                part = part[:room]
            room -= len(part)
            sending.left -= len(part)
            self._send_window -= len(part)
            parts.append(part)
        if sending.left:
            self._queue()
        else:
            self._sending = None
            sending.changed.set()
        return parts

    def opened_window(self, size: int) -> bool:
        """Apply the peer's window update; return False if the window exceeds the maximum."""
        self._send_window += size
        self._queue()
        return self._send_window <= _MOST_WINDOW_BYTES

    # -- the end ---------------------------------------------------------------------------

    async def end(self) -> None:
        """End our direction after pending writes; reading goes on. Never raises."""
        with contextlib.suppress(StreamBrokenError):
            await self._until(self._sending)
        if not self.end_out and not self.failure:
            self.end_out = True
            self._muxer.put_frame(_WINDOW, _FIN, self.stream_id, 0)
            self._forget_if_over()

    async def reset(self) -> None:
        """End both directions at once, and drop unread data."""
        self.abort("the stream was reset here")

    def abort(self, reason: str) -> None:
        """Reset the stream; its reader and its writer see `reason`."""
        if not self.is_closed:
            self.fail(reason)
            self._muxer.put_frame(_WINDOW, _RST, self.stream_id, 0)
        self.drop()

    def drop(self) -> None:
        """Forget the stream with its unread bytes; called by the muxer after a reset."""
        self._muxer.forget(self)
        self._buffer.clear()

    def _forget_if_over(self) -> None:
        if self.end_in and self.end_out:
            self._muxer.forget(self)


class Muxer:
    """One secured connection and its streams; `run` reads and writes."""

    def __init__(
        self,
        wire: ByteWire,
        channel: NoiseChannel,
        *,
        is_initiator: bool,
        ahead: tuple[bytes, bytes] = (b"", b""),
        unread_bytes: int,
        max_streams: int,
        share: CoreShare,
        all_unread: UnreadBytes,
        on_stream: Callable[[MuxedStream], None],
        on_refused: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Take over a connection; `ahead` is plaintext, and packets, that were read already.

        `unread_bytes` bounds the unread bytes of all streams, of which there are at most
        `max_streams`; they also count in `all_unread`. `share` pays for received data. `on_stream`
        is called with each stream that the peer opens, `on_refused` with the reason if the peer
        broke the rules (`violation` is the kind), after which the connection ends, and `on_end`
        with the reason once it has ended.
        """
        # The bounds, which may be changed at any time.
        self.unread_bytes = unread_bytes
        self.max_streams = max_streams
        self.streams: dict[int, MuxedStream] = {}
        # The reason for the end of the connection; "" while it is open.
        self.ended = ""
        # The kind of the peer's violation, if there was one.
        self.violation = Violation.FRAME
        self._on_end = on_end
        self._share = share
        self._all_unread = all_unread
        self._wire = wire
        self._channel = channel
        self._is_initiator = is_initiator
        self._on_stream = on_stream
        self._on_refused = on_refused
        self._next_number = 1 if is_initiator else 2
        # The highest number of a stream that the peer has opened.
        self._latest = 0
        # The code of the peer's GO_AWAY, if it sent one.
        self._away_code: int | None = None
        # Allowances for frames without data, and for bytes, still in flight for ended streams.
        self._crossing_frames = self._crossing_bytes = 0
        self._held = 0
        # Inbound: plaintext that waits for its turn, the incomplete packet and header, and the
        # frame whose body is arriving.
        plain, self._packet = ahead
        self._plain = memoryview(plain)
        self._more = False
        self._begun = len(plain) + len(self._packet)
        all_unread.add(self._begun)
        self._header = b""
        self._body = 0
        self._body_flags = 0
        self._body_of: MuxedStream | None = None
        # Outbound: frames and small data, streams with more to send, and encrypted bytes that the
        # system has not taken yet, with their buffer.
        self._frames = bytearray()
        self._writers: deque[MuxedStream] = deque()
        self._sealed: memoryview | None = None
        self._sealed_buffer: memoryview | None = None
        self._in_turn = False
        self._to_write = Signal()

    async def run(self) -> None:
        """Read and write until the connection ends; never raises because of the peer."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            try:
                await self._read()
            finally:
                self.end("this side has stopped")
                nursery.cancel_scope.cancel()

    def open_stream(self) -> MuxedStream:
        """Return a new stream, which the peer learns of with the next write.

        Raises StreamBrokenError.
        """
        if self.ended or self._away_code is not None:
            raise StreamBrokenError(
                self.ended or f"the peer takes no new streams{self._away_words()}"
            )
        if len(self.streams) >= self.max_streams:
            raise StreamBrokenError(f"{self.max_streams} streams are open already; close some")
        number, self._next_number = self._next_number, self._next_number + 2
        stream = self.streams[number] = MuxedStream(self, number, ours=True)
        self._crossing_frames += _CROSSING_FRAMES
        self._frames += _HEADER.pack(0, _WINDOW, _SYN, number, 0)
        return stream

    def close(self) -> None:
        """Send GO_AWAY and end the connection; pending data may be lost."""
        if not self.ended:
            self.put_frame(_GO_AWAY, 0, 0, _NORMAL)
        self.end("the connection was closed here")

    def end(self, reason: str) -> None:
        """End the connection at once: close the socket, and wake waiting tasks with the reason."""
        if self.ended:
            return
        self.ended = reason
        self._wire.close()
        for stream in list(self.streams.values()):
            stream.fail(f"the connection has ended: {reason}")
        self.streams.clear()
        self._all_unread.add(-self._held - self._begun)
        self._held = self._begun = 0
        self._writers.clear()
        self._frames.clear()
        self._plain, self._packet = memoryview(b""), b""
        self._drop_sealed()
        self._to_write.set()
        self._on_end(reason)

    def refuse(self, reason: str, kind: Violation | None = None) -> None:
        """End the connection because the peer broke the rules."""
        if not self.ended:
            self.violation = kind or self.violation
            self._on_refused(reason)
            self.put_frame(_GO_AWAY, 0, 0, _PROTOCOL_ERROR)
            if not self._wire.blocked:
                self._send_batch()
            self.end(reason)

    # -- inbound ---------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """The unread bytes on all streams."""
        return self._held

    @property
    def kept_bytes(self) -> int:
        """The unread bytes, plus those that wait for their turn or for the rest of their packet."""
        return self._held + self._begun

    def count_unread(self, stream: MuxedStream, more: int) -> None:
        """Count received (or, negative, read) bytes of a stream, unless it is forgotten."""
        if self.streams.get(stream.stream_id) is stream:
            self._held += more
            self._all_unread.add(more)

    def forget(self, stream: MuxedStream) -> None:
        """Remove a closed stream."""
        if self.streams.get(stream.stream_id) is stream:
            del self.streams[stream.stream_id]
            if not stream.end_in:
                self._crossing_bytes += stream.room_bytes
            self._held -= stream.unread_bytes
            self._all_unread.add(-stream.unread_bytes)

    async def _read(self) -> None:
        await self._in_its_turn(None)
        while not self.ended:
            try:
                if self._plain or self._more:
                    # Yield to all others after a turn that was cut short.
                    await trio.lowlevel.checkpoint()
                else:
                    await self._wire.readable()
                await self._in_its_turn(self._wire)
            except BROKEN as error:
                self.end(f"reading failed: {error!r}{self._away_words()}")

    async def _in_its_turn(self, wire: ByteWire | None) -> None:
        """Read once, when it is this connection's turn."""
        share = self._share
        if share.is_free:
            self._turn(wire)
            share.pay()
            return
        if reason := await share.begin():
            self.refuse(reason, Violation.FLOOD)
            return
        try:
            self._turn(wire)
        finally:
            await share.end()

    def _turn(self, wire: ByteWire | None) -> None:
        """Read once, and process everything read, or as much as one turn allows."""
        buffer = _READ_BUFFERS.take()
        self._in_turn = True
        try:
            self._take_in(wire, buffer[:_TURN_BYTES], buffer[_TURN_BYTES:])
        except PacketError as error:
            self.refuse(str(error))
        finally:
            self._in_turn = False
            _READ_BUFFERS.give(buffer)
        self.send()

    def _take_in(self, wire: ByteWire | None, view: memoryview, scratch: memoryview) -> None:
        plain, self._plain = self._plain, memoryview(b"")
        if plain:
            # First the rest of the last turn, even if there is nothing more to read.
            self.take(plain)
        if not self._plain and (wire is None or not plain):
            self._read_once(wire, view, scratch)
        if not self.ended:
            begun, self._begun = self._begun, len(self._plain) + len(self._packet)
            self._all_unread.add(self._begun - begun)

    def _read_once(self, wire: ByteWire | None, view: memoryview, scratch: memoryview) -> None:
        end = rest = len(self._packet)
        if rest:
            view[:rest] = self._packet
        if wire is not None and not self._more:
            most = READ_BYTES if self._share.is_admitted else _STRANGER_BYTES
            received = wire.receive(view[rest : rest + most])
            if received is None:
                return
            if received == 0:
                self.end(f"the peer has closed the connection{self._away_words()}")
                return
            end += received
        channel, share = self._channel, self._share
        opened, empty = channel.opened, channel.empty
        at = channel.open(view[:end], scratch, self.take)
        opened = channel.opened - opened
        share.due_us += opened * PACKET_US
        self._packet = bytes(view[at:end]) if at < end and not self.ended else b""
        # There may be whole packets among the rest.
        self._more = opened >= OPENED_AT_ONCE
        if channel.empty > empty and (reason := self._idle(SENSELESS * (channel.empty - empty))):
            self.refuse(reason)

    def take(self, data: memoryview) -> bool:
        """Process plaintext, cut anywhere; return False if the connection has ended."""
        at, end, share = 0, len(data), self._share
        most_us = share.turn_us if self._in_turn else math.inf
        while at < end:
            if share.due_us >= most_us:
                # The buffer is valid during this turn only, so copy the rest unless it is a copy.
                rest = data[at:]
                self._plain = rest if type(data.obj) is bytes else memoryview(bytes(rest))
                return True
            if self._body:
                part = data[at : at + self._body]
                at += len(part)
                self._body -= len(part)
                stream = self._body_of
                if stream is None or stream.failure:
                    share.due_us += len(part) // WASTED_BYTES
                else:
                    stream.arrived(part)
                    if self.ended:
                        return False
                if not self._body and self._body_flags:
                    self._finish_body()
                continue
            if self._header or end - at < _HEADER.size:
                missing = _HEADER.size - len(self._header)
                self._header += data[at : at + missing]
                at += missing
                if len(self._header) < _HEADER.size:
                    break
                header, self._header = self._header, b""
                fields = _HEADER.unpack(header)
            else:
                fields = _HEADER.unpack_from(data, at)
                at += _HEADER.size
            version, kind, flags, number, length = fields
            share.due_us += FRAME_US
            if length and not (version or kind or flags):
                # The common case: a data frame.
                stream = self.streams.get(number)
                reason = self._charge(stream, number, length)
                self._body, self._body_flags, self._body_of = length, 0, stream
            else:
                reason = self._on_frame(version, kind, flags, number, length)
            if reason:
                self.refuse(reason)
            if self.ended:
                return False
        return not self.ended

    def _on_frame(self, version: int, kind: int, flags: int, number: int, length: int) -> str:
        """Handle the header of a frame (a DATA body follows); return its fault, or ""."""
        if version != 0 or kind > _GO_AWAY:
            return f"no frame of the muxer: version {version}, type {kind}"
        if kind == _PING:
            if not flags & _SYN:
                # We never ping, so nothing can be a reply.
                return self._idle(SENSELESS)
            self._share.due_us += ANSWER_US
            return self._answer(_PING, _ACK, 0, length) or self._idle(LATE)
        if kind == _GO_AWAY:
            again, self._away_code = self._away_code is not None, length
            return self._idle(SENSELESS) if again else ""
        stream = self.streams.get(number)
        if flags & _SYN:
            reason = self._opened_by_peer(number, stream)
            if reason:
                return reason
            stream = self.streams.get(number)  # None if it exceeded the limit
        elif not (kind == _DATA and length) and (
            reason := self._without_data(stream, number, flags, length)
        ):
            return reason
        if kind == _DATA and length:
            reason = self._charge(stream, number, length)
            if reason:
                return reason
            self._body, self._body_flags, self._body_of = length, flags, stream
        elif stream is not None:
            if length and not stream.opened_window(length):
                return f"a window of over {_MOST_WINDOW_BYTES} bytes"
            if flags & _FIN and stream.end_in and not flags & _RST:
                return self._idle(LATE)
            self._on_flags(stream, flags)
        return ""

    def _was_there(self, number: int) -> bool:
        """Return True if a stream with this number was opened before."""
        ours = (number % 2 == 1) == self._is_initiator
        return 0 < number <= (self._next_number - 1 if ours else self._latest)

    def _without_data(self, stream: MuxedStream | None, number: int, flags: int, room: int) -> str:
        """Judge a frame without data; return the reason to end the connection, or "".

        A new stream is answered once, and frames may be in flight when a stream ends; any other
        frame of this kind is meaningless.
        """
        if stream is not None and (room or flags & (_FIN | _RST)):
            return ""
        if stream is None and not self._was_there(number):
            return self._idle(SENSELESS)
        return self._crossing()

    def _crossing(self) -> str:
        """Count a small frame of an ended stream; return why the connection must end, or ""."""
        if self._crossing_frames:
            self._crossing_frames -= 1
            return ""
        return self._idle(LATE)

    def _away_words(self) -> str:
        """Return the reason in the peer's GO_AWAY, in brackets, or ""."""
        code = self._away_code
        if code is None:
            return ""
        return f" (it says: {_AWAY_WORDS.get(code, 'unknown reason')}, GO_AWAY {code})"

    def _answer(self, kind: int, flags: int, number: int, length: int) -> str:
        """Send an answer; return the reason to end the connection if too many are unread, or ""."""
        self.put_frame(kind, flags, number, length)
        if len(self._frames) > _ANSWERS_BYTES:
            return self._flood(f"the peer does not read the answers, {len(self._frames)} bytes")
        return ""

    def _idle(self, weight: int) -> str:
        """Count a meaningless frame; return the reason to end the connection, or ""."""
        reason = self._share.idle(weight)
        return self._flood(reason) if reason else ""

    def _flood(self, reason: str) -> str:
        """Return the reason, and mark it as a flood."""
        self.violation = Violation.FLOOD
        return reason

    def _opened_by_peer(self, number: int, known: MuxedStream | None) -> str:
        """Add a stream of the peer; return the reason to refuse it, or ""."""
        # The dialling side uses odd numbers.
        if known is not None or number == 0 or (number % 2 == 1) == self._is_initiator:
            return f"a new stream has number {number}, which is not the peer's to give"
        self._crossing_frames += _CROSSING_FRAMES
        if len(self.streams) >= self.max_streams:
            self._latest = max(self._latest, number)
            self._crossing_bytes += INITIAL_WINDOW_BYTES
            self._share.refuse_stream()
            return self._answer(_WINDOW, _RST, number, 0)
        self._latest = max(self._latest, number)
        self._share.work(STREAM_US)
        stream = self.streams[number] = MuxedStream(self, number, ours=False)
        if reason := self._answer(_WINDOW, _ACK, number, 0):
            return reason
        self._on_stream(stream)
        return ""

    def _charge(self, stream: MuxedStream | None, number: int, length: int) -> str:
        """Charge the body of a frame; return the reason to refuse it, or ""."""
        if stream is None:
            if self._was_there(number) and length <= self._crossing_bytes:
                self._crossing_bytes -= length
                self._share.due_us += LATE_DATA_US
                return "" if length >= _SPLIT_BYTES else self._crossing()
            if length > INITIAL_WINDOW_BYTES:
                return self._flood(
                    f"the peer ignores our receive window: {length} bytes for no stream"
                )
            return self._idle(SENSELESS + length // _SENSELESS_BYTES)
        if stream.end_in:
            return f"data of stream {stream.stream_id} after its end"
        left = stream.take_window(length)
        if left < 0:
            return self._flood(
                f"the peer ignores our receive window: {length} bytes, {left + length} are open"
            )
        if self._held + length > self.unread_bytes:
            return self._flood(
                f"the peer ignores our receive windows: over {self.unread_bytes} bytes"
            )
        data_us = FED_DATA_US if stream.is_fed else READ_DATA_US
        if self._share.byte_us:
            self._share.due_us += data_us
            self._share.work(length * self._share.byte_us)
        else:
            self._share.due_us += max(0, data_us - length // PAYING_BYTES)
        return ""

    def _finish_body(self) -> None:
        stream, self._body_of = self._body_of, None
        if stream is not None:
            self._on_flags(stream, self._body_flags)

    def _on_flags(self, stream: MuxedStream, flags: int) -> None:
        if flags & _RST:
            stream.fail("the peer has reset the stream")
            stream.drop()
        elif flags & _FIN and not stream.end_in:
            stream.ended_by_peer()

    # -- outbound --------------------------------------------------------------------------

    def put_frame(self, kind: int, flags: int, number: int, length: int) -> None:
        """Send a frame without a body, now or with the next batch."""
        if not self.ended:
            self._frames += _HEADER.pack(0, kind, flags, number, length)
            self.send()

    def put_data(self, number: int, data: Buffer, size: int) -> bool:
        """Send a small piece of a stream like a frame; return False if it has to wait."""
        if self._wire.blocked or self._sealed is not None or len(self._frames) > _SMALL_BYTES:
            return False
        if size > _SMALL_BYTES and self._writers:
            return False
        self._frames += _HEADER.pack(0, _DATA, 0, number, size)
        self._frames += data
        self.send()
        return True

    def queue(self, stream: MuxedStream) -> None:
        """Append a stream to those that wait for their turn."""
        self._writers.append(stream)

    def send(self) -> None:
        """Send a batch, unless a turn is under way; the writing task sends the rest."""
        if self._in_turn or self._wire.blocked:
            return
        if not (self._frames or self._writers or self._sealed is not None):
            return
        self._send_batch()
        if self._frames or self._writers or self._wire.blocked:
            self._to_write.set()

    async def _write(self) -> None:
        """Send data that could not be sent at once, until the connection ends."""
        while not self.ended:
            await self._to_write.wait()
            try:
                while self._frames or self._writers or self._wire.blocked:
                    if self._wire.blocked:
                        await self._wire.drain()
                    else:
                        await trio.lowlevel.checkpoint()
                    self._send_batch()
            except BROKEN as error:
                self.end(f"writing failed: {error!r}")

    def _send_batch(self) -> None:
        """Pass one batch to the system, after the rest of the last one."""
        if self.ended:
            return
        try:
            if self._sealed is None:
                self._seal_batch()
            if self._sealed is not None:
                taken = self._wire.send(self._sealed)
                if taken == len(self._sealed):
                    self._drop_sealed()
                    return
                rest = self._sealed[taken:]
                if len(rest) <= _KEPT_BYTES:
                    # Release the large buffer, since the peer may be slow.
                    self._drop_sealed()
                    rest = memoryview(bytes(rest))
                self._sealed = rest
        except BROKEN as error:
            self.end(f"writing failed: {error!r}")

    def _seal_batch(self) -> None:
        """Encrypt frames, then data of the streams in turn, up to a batch."""
        plain, self._frames = self._frames, bytearray()
        if len(plain) > PLAIN_BYTES:
            # Frames exceed a packet only if a peer requests answers in a burst.
            plain, self._frames = plain[:PLAIN_BYTES], plain[PLAIN_BYTES:]
        if not self._writers:
            # Usually one small message, for which a buffer of its size is cheap.
            if plain:
                self._sealed = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
                self._channel.seal(plain, self._sealed, 0)
            return
        buffer, at, room = _SEALED_BUFFERS.take(), 0, _BATCH_BYTES
        while room > 0 and self._writers and len(plain) <= _SMALL_BYTES:
            stream = self._writers.popleft()
            parts = stream.next_parts(room)
            size = sum(map(len, parts))
            if size:
                room -= size
                plain += _HEADER.pack(0, _DATA, 0, stream.stream_id, size)
            for part in parts:
                if len(part) <= _SMALL_BYTES:
                    plain += part
                    continue
                # In packets of its own, encrypted without a copy.
                at = self._channel.seal(plain, buffer, at)
                at = self._channel.seal(part, buffer, at)
                plain = bytearray()
        at = self._channel.seal(plain, buffer, at)
        self._sealed, self._sealed_buffer = buffer[:at] if at else None, buffer
        if not at:
            self._drop_sealed()

    def _drop_sealed(self) -> None:
        buffer, self._sealed, self._sealed_buffer = self._sealed_buffer, None, None
        if buffer is not None:
            _SEALED_BUFFERS.give(buffer)
