"""Our Yamux over Noise: what a peer may send and must not, whatever the cuts, and what it costs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import struct
import tracemalloc
from collections import deque
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.errors import StreamBrokenError, Violation
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.muxer import INITIAL_WINDOW_BYTES, MuxedStream, Muxer, UnreadBytes
from bbnode.transport.libp2p.noise_channel import PLAIN_BYTES, NoiseChannel, PacketError
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.shares import STREAM_US, CoreShare, CoreShares
from tests.patience import PATIENCE_S
from tests.transport.hosts import ECHO, LOOPBACK, TAKE, OurHost, dial
from tests.transport.plain import plain_dial, plain_host, plain_running

KIB = 1024
HEADER = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
KEYS = (b"a" * 32, b"b" * 32)


def frame(kind: int, flags: int, number: int, length: int) -> bytes:
    return HEADER.pack(0, kind, flags, number, length)


def data(number: int, body: bytes, flags: int = 0) -> bytes:
    return frame(DATA, flags, number, len(body)) + body


def share_of(*, known: bool = True, counters: Counters | None = None, **limits: float) -> CoreShare:
    """The account of a connection alone, of a peer with standing or a stranger."""
    made = TransportLimits(**limits)  # type: ignore[arg-type]
    share = CoreShare(CoreShares(made, counters or Counters(), lambda _peer: False))
    if known:
        share.admit()
    return share


class Pipe:
    """A ByteWire without a system below it; `taken` is what the system would take at once."""

    def __init__(self) -> None:
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.room = 2**40
        self.blocked = self.closed = self.hung_up = False
        self.changed = trio.Event()

    def _change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def bring(self, packets: bytes) -> None:
        self.incoming += packets
        self._change()

    def hang_up(self) -> None:
        """End what comes, as a peer does that closes its socket."""
        self.hung_up = True
        self._change()

    def make_room(self, room: int) -> None:
        self.room = room
        self._change()

    async def readable(self) -> None:
        while not (self.incoming or self.closed or self.hung_up):
            await self.changed.wait()

    def receive(self, into: memoryview) -> int | None:
        count = min(len(into), len(self.incoming))
        into[:count] = self.incoming[:count]
        del self.incoming[:count]
        return count

    def send(self, data: memoryview) -> int:
        count = min(len(data), self.room)
        self.outgoing += data[:count]
        self.room -= count
        self.blocked = count < len(data)
        return count

    async def drain(self) -> None:
        while not self.room and not self.closed:
            await self.changed.wait()
        self.blocked = False

    def close(self) -> None:
        self.closed = True
        self._change()


class Peer:
    """A connection that we accepted, and its other side, which writes what it likes."""

    def __init__(
        self,
        *,
        unread_bytes: int = 2**25,
        max_streams: int = 64,
        share: CoreShare | None = None,
        all_unread: UnreadBytes | None = None,
    ) -> None:
        self.wire = Pipe()
        self.refused: list[str] = []
        self.ends: list[str] = []
        # Those that the other side opened, in turn.
        self.opened: deque[MuxedStream] = deque()
        self.muxer = Muxer(
            self.wire,
            NoiseChannel(*KEYS),
            is_initiator=False,
            unread_bytes=unread_bytes,
            max_streams=max_streams,
            share=share_of() if share is None else share,
            all_unread=UnreadBytes(2**40, lambda: False) if all_unread is None else all_unread,
            on_stream=self.opened.append,
            on_refused=self.refused.append,
            on_end=self.ends.append,
        )
        self._theirs = NoiseChannel(*KEYS[::-1])

    def sealed(self, plain: bytes) -> bytes:
        out = memoryview(bytearray(len(plain) + 64 + len(plain) // 1000))
        return bytes(out[: self._theirs.seal(plain, out, 0)])

    async def send(self, plain: bytes) -> None:
        self.wire.bring(self.sealed(plain))
        await trio.testing.wait_all_tasks_blocked()

    def heard(self) -> bytes:
        """The plaintext that has come since the last call."""
        got = bytearray()

        def take(part: memoryview) -> bool:
            got.extend(part)
            return True

        packets = bytes(self.wire.outgoing)
        read = self._theirs.open(memoryview(packets), memoryview(bytearray(len(packets))), take)
        del self.wire.outgoing[:read]
        return bytes(got)

    def frames(self) -> list[tuple[int, int, int, int]]:
        """The frames of `heard`, without their bodies."""
        heard, at, found = self.heard(), 0, []
        while at < len(heard):
            _, kind, flags, number, length = HEADER.unpack_from(heard, at)
            found.append((kind, flags, number, length))
            at += HEADER.size + (length if kind == DATA else 0)
        return found


@pytest.fixture
async def peer(nursery: trio.Nursery) -> Peer:
    made = Peer()
    nursery.start_soon(made.muxer.run)
    await trio.testing.wait_all_tasks_blocked()
    return made


async def stream_of(peer: Peer, number: int = 1) -> MuxedStream:
    """A stream that the peer has opened; its ACK has been read."""
    await peer.send(frame(WINDOW, SYN, number, 0))
    assert peer.frames()[-1] == (WINDOW, ACK, number, 0)
    return peer.opened.popleft()


async def read_to_end(stream: MuxedStream) -> None:
    with contextlib.suppress(StreamBrokenError):
        while await stream.read():
            pass


# -- packets ---------------------------------------------------------------------------------


def test_packets_are_those_of_noise():
    """Counter, length, and the keys of a handshake, against another library."""
    from noise.connection import NoiseConnection

    sides = [NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2)]
    sides[0].set_as_initiator()
    sides[1].set_as_responder()
    for side in sides:
        side.start_handshake()
    sides[1].read_message(bytes(sides[0].write_message()))
    sides[0].read_message(bytes(sides[1].write_message()))
    assert sides[1].decrypt(sides[0].encrypt(b"one before")) == b"one before"
    states = sides[0].noise_protocol
    # The other library has sent one packet: the counters go on.
    ours = NoiseChannel(states.cipher_state_encrypt.k, states.cipher_state_decrypt.k)
    ours.seal(b"one before", memoryview(bytearray(64)), 0)
    plain = bytes(range(256)) * 600
    out = memoryview(bytearray(200 * KIB))
    end, at, got = ours.seal(plain, out, 0), 0, b""
    while at < end:
        size = int.from_bytes(out[at : at + 2], "big")
        got += sides[1].decrypt(bytes(out[at + 2 : at + 2 + size]))
        at += 2 + size
    assert got == plain
    answer = sides[1].encrypt(b"answer")
    parts: list[bytes] = []
    packet = len(answer).to_bytes(2, "big") + answer
    read = ours.open(
        memoryview(packet), memoryview(bytearray(PLAIN_BYTES)), lambda p: not parts.append(bytes(p))
    )
    assert (read, parts) == (len(packet), [b"answer"])


@pytest.mark.parametrize("packet", [b"\x00\x0f" + bytes(15), b"\x00\x20" + bytes(32)])
def test_packets_that_nobody_made_are_refused(packet):
    channel = NoiseChannel(*KEYS)
    with pytest.raises(PacketError):
        channel.open(memoryview(packet), memoryview(bytearray(PLAIN_BYTES)), lambda _: True)


# -- what comes ------------------------------------------------------------------------------


class Deaf:
    """A ByteWire that takes everything."""

    blocked = False

    def send(self, data: memoryview) -> int:
        return len(data)

    def close(self) -> None:
        pass


def events_of(plain: bytes, cuts: list[int]) -> list[object]:
    """What a muxer makes of bytes that are cut there: its streams, what came, and the end."""
    refused: list[object] = []
    known: list[MuxedStream] = []

    async def run() -> list[object]:
        muxer = Muxer(
            Deaf(),
            NoiseChannel(*KEYS),
            is_initiator=False,
            unread_bytes=600 * KIB,
            max_streams=8,
            share=share_of(),
            all_unread=UnreadBytes(2**40, lambda: False),
            on_stream=known.append,
            on_refused=refused.append,
            on_end=lambda _reason: None,
        )
        ends = [0, *sorted(cuts), len(plain)]
        for start, end in itertools.pairwise(ends):
            if not muxer.take(memoryview(plain[start:end])):
                break
        return [
            *refused,
            muxer.held_bytes,
            [(s.stream_id, bytes(s._buffer), s.end_in, s.failure) for s in known],
        ]

    return trio.run(run)


numbers = st.sampled_from([1, 3, 5, 2, 0, 2**32 - 1])
frames = st.one_of(
    st.builds(
        lambda number, body, flags: data(number, body, flags),
        numbers,
        st.binary(max_size=30),
        st.sampled_from([0, SYN, FIN, RST, SYN | FIN]),
    ),
    st.builds(
        frame,
        st.sampled_from([WINDOW, PING, GO_AWAY]),
        st.sampled_from([0, SYN, ACK, FIN, RST]),
        numbers,
        st.integers(0, 2**32 - 1),
    ),
    st.builds(frame, st.integers(0, 255), st.integers(0, 2**16 - 1), numbers, st.just(2**24)),
    st.binary(max_size=20),
)


@given(st.lists(frames, max_size=12), st.data())
def test_cuts_do_not_matter(parts, draw):
    plain = b"".join([frame(WINDOW, SYN, 1, 0), *parts])
    cuts = draw.draw(st.lists(st.integers(0, len(plain)), max_size=12))
    whole = events_of(plain, [])
    assert events_of(plain, cuts) == whole
    assert events_of(plain, list(range(1, len(plain)))) == whole


@pytest.mark.parametrize("step", [1, 7, 65_536])
async def test_packets_may_come_in_any_pieces(peer, step):
    stream = await stream_of(peer)
    body = bytes(range(256)) * 700
    packets = peer.sealed(data(1, body, FIN))
    step = max(step, len(packets) // 500)
    for at in range(0, len(packets), step):
        peer.wire.bring(packets[at : at + step])
        await trio.testing.wait_all_tasks_blocked()
    assert await stream.read() == body
    assert await stream.read() == b""


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (frame(DATA, 0, 1, INITIAL_WINDOW_BYTES + 1), "receive window"),
        (data(1, bytes(INITIAL_WINDOW_BYTES)) + data(1, b"x"), "receive window"),
        (frame(DATA, 0, 99, 2**24), "receive window"),
        (frame(WINDOW, SYN, 1, 0), "not the peer's"),
        (frame(WINDOW, SYN, 2, 0), "not the peer's"),
        (frame(WINDOW, 0, 1, 2**32 - 1), "a window of over"),
        (frame(9, 0, 1, 0), "no frame"),
        (frame(WINDOW, FIN, 1, 0) + data(1, b"x"), "after its end"),
    ],
)
async def test_a_breach_ends_the_connection_with_its_reason(peer, plain, reason):
    stream = await stream_of(peer)
    await peer.send(plain)
    (told,) = peer.refused
    assert reason in told
    assert reason in peer.muxer.ended
    assert peer.frames()[-1] == (GO_AWAY, 0, 0, 1)
    assert peer.wire.closed
    assert peer.ends == [peer.muxer.ended]
    await read_to_end(stream)
    with pytest.raises(StreamBrokenError):
        peer.muxer.open_stream()


async def test_all_streams_together_are_bounded(nursery):
    peer = Peer(unread_bytes=300 * KIB)
    nursery.start_soon(peer.muxer.run)
    for number in (1, 3):
        await peer.send(frame(WINDOW, SYN, number, 0) + data(number, bytes(200 * KIB)))
    assert "over 307200 bytes" in peer.refused[0]


async def test_pings_are_answered_and_a_flood_of_them_is_not_kept(nursery):
    peer = Peer(share=share_of(idle_frames=2**20, core_burst_s=10.0))
    nursery.start_soon(peer.muxer.run)
    await peer.send(frame(PING, SYN, 0, 7) + frame(PING, ACK, 0, 8))
    assert peer.frames() == [(PING, ACK, 0, 7)]
    peer.wire.room = 0
    for _ in range(4):
        await peer.send(frame(PING, SYN, 0, 1) * 5000)
    assert "does not read the answers" in peer.refused[0]


async def test_frames_for_streams_that_are_gone_are_dropped(peer):
    stream = await stream_of(peer)
    await stream.reset()
    await peer.send(data(1, b"on its way") + frame(WINDOW, 0, 1, 5) + frame(WINDOW, RST, 1, 0))
    assert peer.refused == []
    assert peer.muxer.held_bytes == 0


# -- streams ---------------------------------------------------------------------------------


async def test_the_window_is_given_back_by_quarters(peer):
    stream = await stream_of(peer)
    for _ in range(8):
        await peer.send(data(1, bytes(32 * KIB)))
        assert len(await stream.read(32 * KIB)) == 32 * KIB
    assert peer.frames() == [(WINDOW, 0, 1, 64 * KIB)] * 4
    stream.set_window(2**20)
    assert peer.frames() == [(WINDOW, 0, 1, 2**20 - INITIAL_WINDOW_BYTES)]
    await peer.send(data(1, bytes(2**20)))
    assert stream.unread_bytes == peer.muxer.held_bytes == 2**20


async def test_a_writer_keeps_to_the_window_and_waits_for_as_long_as_it_takes(
    peer, nursery, autojump_clock
):
    stream, done = await stream_of(peer), trio.Event()
    body = bytes(range(256)) * 2000

    async def write() -> None:
        await stream.write(body[:100], body[100:])
        done.set()

    nursery.start_soon(write)
    await trio.sleep(3600)
    heard = peer.heard()
    assert len(heard) == INITIAL_WINDOW_BYTES + HEADER.size
    await peer.send(frame(WINDOW, 0, 1, 1000))
    assert not done.is_set()
    rest = peer.heard()
    assert len(rest) == 1000 + HEADER.size
    await peer.send(frame(WINDOW, 0, 1, 2**30))
    assert done.is_set()
    last = peer.heard()
    assert body == b"".join(each[HEADER.size :] for each in (heard, rest, last))


async def test_small_frames_go_before_a_large_message_that_waits(peer, nursery):
    one = await stream_of(peer)
    await peer.send(frame(WINDOW, SYN, 3, 0))
    other = peer.opened.popleft()
    await peer.send(frame(WINDOW, 0, 1, 2**24))
    peer.heard()
    peer.wire.room = 0
    nursery.start_soon(one.write, bytes(2**21))
    await trio.testing.wait_all_tasks_blocked()
    assert other.write_now(b"small")
    assert not other.write_now(b"next")
    peer.wire.make_room(2**30)
    await trio.testing.wait_all_tasks_blocked()
    order = [(number, length) for _, _, number, length in peer.frames()]
    # Behind the batch that was sealed already, and one of the first stream's at most.
    assert order.index((3, 5)) <= 2
    assert sum(length for number, length in order if number == 1) == 2**21


async def test_what_is_cancelled_leaves_whole_frames(peer, nursery):
    stream = await stream_of(peer)
    peer.wire.room = 1000
    with trio.move_on_after(0.05):
        await stream.write(bytes(INITIAL_WINDOW_BYTES - 10))
    with trio.move_on_after(0.05):
        await stream.read()
    peer.wire.make_room(2**30)
    await trio.testing.wait_all_tasks_blocked()
    with trio.fail_after(PATIENCE_S):
        await stream.write(b"and on")
    heard = peer.heard()
    _, kind, _, _, length = HEADER.unpack_from(heard)
    assert (kind, heard[HEADER.size + length :][HEADER.size :]) == (DATA, b"and on")
    await peer.send(data(1, b"late"))
    assert await stream.read() == b"late"


@pytest.mark.parametrize("how", ["reset here", "reset there", "closed here", "lost"])
async def test_the_end_wakes_readers_and_writers(peer, nursery, how):
    stream, woken = await stream_of(peer), []

    async def read() -> None:
        with pytest.raises(StreamBrokenError):
            await stream.read()
        woken.append("reader")

    async def write() -> None:
        with pytest.raises(StreamBrokenError):
            await stream.write(bytes(2**20))
        woken.append("writer")

    nursery.start_soon(read)
    nursery.start_soon(write)
    await trio.testing.wait_all_tasks_blocked()
    if how == "reset here":
        await stream.reset()
    elif how == "reset there":
        await peer.send(frame(WINDOW, RST, 1, 0))
    elif how == "closed here":
        peer.muxer.close()
    else:
        peer.wire.close()
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(woken) == ["reader", "writer"]
    assert peer.muxer.streams == {}


async def test_each_direction_ends_by_itself(peer):
    stream = await stream_of(peer)
    await stream.end()
    with pytest.raises(StreamBrokenError, match="closed for writing"):
        await stream.write(b"x")
    await peer.send(data(1, b"still"))
    assert await stream.read() == b"still"
    await peer.send(data(1, b"last", FIN))
    assert await stream.read() == b"last"
    assert await stream.read() == b""
    assert stream.is_closed
    assert peer.muxer.streams == {}
    assert peer.frames() == [(WINDOW, FIN, 1, 0)]


async def test_a_fed_reader_is_told_of_everything(peer, nursery):
    stream, got = await stream_of(peer), bytearray()
    await peer.send(data(1, b"before"))

    def take(part: memoryview) -> None:
        got.extend(part)
        if got.endswith(b"bad"):
            raise ValueError("on purpose")

    async def feed() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            await stream.feed(take)

    nursery.start_soon(feed)
    await trio.testing.wait_all_tasks_blocked()
    await peer.send(data(1, bytes(200 * KIB)) + data(1, b"bad"))
    assert bytes(got) == b"before" + bytes(200 * KIB) + b"bad"
    assert peer.refused == []
    assert peer.muxer.held_bytes == 0


async def test_a_peer_that_goes_away_gets_no_new_streams(peer):
    await peer.send(frame(GO_AWAY, 0, 0, 0))
    with pytest.raises(StreamBrokenError, match="no new streams"):
        peer.muxer.open_stream()


async def test_a_new_stream_and_its_first_data_are_one_packet(peer):
    stream = peer.muxer.open_stream()
    assert peer.frames() == []
    await stream.write(b"hello")
    packets = bytes(peer.wire.outgoing)
    assert int.from_bytes(packets[:2], "big") == len(packets) - 2
    assert peer.frames() == [(WINDOW, SYN, 2, 0), (DATA, 0, 2, 5)]


@pytest.mark.parametrize("size", [5, 40_000, 48 * 1024])
async def test_what_fits_is_one_packet_while_nobody_waits(peer, size):
    stream = await stream_of(peer)
    await stream.write(bytes(size))
    packets = bytes(peer.wire.outgoing)
    assert int.from_bytes(packets[:2], "big") == len(packets) - 2
    assert peer.frames() == [(DATA, 0, 1, size)]


async def test_only_what_is_small_goes_before_those_that_wait_for_a_turn(peer):
    large = await stream_of(peer)
    await peer.send(frame(WINDOW, SYN, 3, 0) + frame(WINDOW, SYN, 5, 0))
    medium, small = peer.opened
    await peer.send(frame(WINDOW, 0, 1, 2**24))
    peer.heard()
    assert large.write_now(bytes(2**20))
    assert medium.write_now(bytes(40_000))
    assert small.write_now(b"small")
    await trio.testing.wait_all_tasks_blocked()
    order = [number for _, _, number, _ in peer.frames()]
    assert order[:4] == [1, 1, 5, 3]


async def test_our_own_streams_are_bounded(nursery):
    peer = Peer(max_streams=3)
    nursery.start_soon(peer.muxer.run)
    for number in (2, 4, 6):
        assert peer.muxer.open_stream().stream_id == number
    with pytest.raises(StreamBrokenError, match="3 streams"):
        peer.muxer.open_stream()


async def test_an_idle_connection_is_small(nursery):
    async def measure(made: Callable[[], Peer], count: int) -> float:
        gc.collect()
        tracemalloc.start()
        try:
            kept = [made() for _ in range(count)]
            for each in kept:
                nursery.start_soon(each.muxer.run)
            await trio.testing.wait_all_tasks_blocked()
            for each in kept:
                await each.send(frame(WINDOW, SYN, 1, 0) + data(1, bytes(100 * KIB)))
                await each.opened.popleft().read()
                each.wire.outgoing = bytearray()
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / count
        finally:
            tracemalloc.stop()

    assert await measure(Peer, 100) < 24 * KIB


# -- with libp2p's own -----------------------------------------------------------------------


@pytest.mark.parametrize("ours_dials", [True, False])
async def test_libp2ps_own_muxer_understands_ours(ours_dials):
    """Both roles, both directions at once, more than a window, and both ends."""
    ours, plain = OurHost(1), plain_host(b"p" * 32)
    name = PeerId.from_bytes(plain.get_id().to_bytes())
    body = bytes(range(256)) * 4 * KIB

    async def give_back(stream) -> None:
        got = bytearray()
        while len(got) < len(body):
            got += await stream.read(65_536)
        await stream.write(bytes(got))

    async def give_back_ours(_connection, stream) -> None:
        await give_back(stream)

    async def give_back_plain(stream) -> None:
        await give_back(stream)
        await stream.close()

    ours.handlers[TAKE] = give_back_ours
    plain.set_stream_handler(TAKE, give_back_plain)
    async with (
        ours.running([] if ours_dials else [LOOPBACK]),
        plain_running(plain, [LOOPBACK] if ours_dials else []),
    ):
        with trio.fail_after(PATIENCE_S):
            if ours_dials:
                address = plain.get_transport_addrs()[0].decapsulate_code(0x01A5)
                await ours.dial(address, name)
            else:
                await plain_dial(plain, ours.address, ours.peer_id)
            while not plain.get_network().get_connections():
                await trio.lowlevel.checkpoint()
            answers: dict[str, bytes] = {}

            async def ask(name: str, stream, end: type[Exception] | None) -> None:
                for at in range(0, len(body), 100_000):
                    await stream.write(body[at : at + 100_000])
                got = bytearray()
                while len(got) < len(body):
                    got += await stream.read(65_536)
                answers[name] = bytes(got)
                if end is None:
                    assert await stream.read(1) == b""
                else:
                    with pytest.raises(end):
                        await stream.read(1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "ours", await ours.connection.open_protocol(TAKE), None)
                other = await plain.new_stream(ID(ours.peer_id.to_bytes()), [TAKE])
                nursery.start_soon(ask, "plain", other, StreamError)
            assert answers == {"ours": body, "plain": body}


@pytest.mark.parametrize("what", ["reset", "end", "death"])
async def test_a_reset_is_told_from_an_end(what):
    client, server = OurHost(1), OurHost(2)
    go = trio.Event()

    async def finish(connection: Connection, stream: MuxedStream) -> None:
        await go.wait()
        if what == "reset":
            await stream.reset()
        elif what == "death":
            connection.muxer.end("on purpose")

    server.handlers[TAKE] = finish
    async with server.running([LOOPBACK]), client.running([]):
        stream = await (await dial(client, server)).open_protocol(TAKE)
        go.set()
        with trio.fail_after(PATIENCE_S):
            if what == "end":
                assert await stream.read(10) == b""
            else:
                with pytest.raises(StreamBrokenError):
                    await stream.read(10)
        assert stream.broken is (what != "end")


async def test_echoes_of_many_streams_at_once():
    client, server = OurHost(1), OurHost(2)
    async with server.running([LOOPBACK]), client.running([]):
        connection = await dial(client, server)

        async def one(number: int) -> None:
            stream = await connection.open_protocol(ECHO)
            for size in (1, 5000, 100_000):
                body = bytes([number]) * size
                await stream.write(body)
                got = b""
                while len(got) < size:
                    got += await stream.read()
                assert got == body
            await stream.end()

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(one, number)


async def test_what_came_behind_the_negotiation_is_read_first(peer):
    """It counts as read once, so that the window opens by what was read."""
    stream = await stream_of(peer)
    await peer.send(data(1, bytes(range(100)) * 1000))
    got = await stream.read()
    stream.put_back(got[-90_000:])
    assert peer.muxer.held_bytes == stream.unread_bytes == 90_000
    assert await stream.read(90_000) == got[-90_000:]
    assert peer.muxer.held_bytes == 0
    assert sum(length for _, _, _, length in peer.frames()) <= 100_000


async def test_a_writer_that_never_waits_gives_others_their_turn(peer, nursery):
    stream, turns = await stream_of(peer), 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    nursery.start_soon(other)
    for _ in range(320):
        await stream.write(b"x")
    assert turns >= 10


# -- the price of frames ---------------------------------------------------------------------

SENSELESS = {
    "a window of no stream": frame(WINDOW, 0, 9, 0),
    "room of no stream": frame(WINDOW, 0, 9, 5),
    "nothing for no stream": frame(DATA, 0, 9, 0),
    "data of no stream": data(9, b"x"),
    "data of a stream that is ours to open": data(8, b"x"),
    "much data of no stream": data(9, bytes(60_000)),
    "the end of no stream": frame(WINDOW, FIN, 9, 0),
    "the reset of no stream": frame(WINDOW, RST, 9, 0),
    "a stream of no number": frame(WINDOW, 0, 0, 1),
    "an answer to no ping": frame(PING, ACK, 0, 1),
    "no ping": frame(PING, 0, 0, 1),
    "a ping": frame(PING, SYN, 0, 1),
    "goodbye again": frame(GO_AWAY, 0, 0, 0),
    "nothing for a stream": frame(DATA, 0, 1, 0),
    "no room for a stream": frame(WINDOW, 0, 1, 0),
    "an answer for a stream": frame(WINDOW, ACK, 1, 0),
    "the end of a stream again": frame(WINDOW, FIN, 1, 0),
    "data of a stream that was reset": data(3, b"x"),
    "the reset of a stream that was reset": frame(WINDOW, RST, 3, 0),
}


@pytest.mark.parametrize("known", [True, False], ids=["a member", "a stranger"])
@pytest.mark.parametrize("what", SENSELESS)
async def test_a_flood_of_senseless_frames_ends_the_connection(
    nursery, autojump_clock, what, known
):
    peer = Peer(share=share_of(known=known))
    nursery.start_soon(peer.muxer.run)
    await peer.send(frame(WINDOW, SYN, 1, 0) + frame(WINDOW, SYN, 3, 0) + frame(WINDOW, RST, 3, 0))
    if "end of a stream" in what:
        await peer.send(SENSELESS[what])
    few = 4
    await peer.send(SENSELESS[what] * few)
    assert peer.refused == []
    for _ in range(4000 // few):
        peer.wire.bring(peer.sealed(SENSELESS[what] * few))
        await trio.sleep(0.001)
    (reason,) = peer.refused
    assert "frames that mean nothing" in reason
    assert peer.muxer.violation is Violation.FLOOD
    assert peer.ends


async def test_senseless_frames_now_and_then_are_nobodys_fault(peer, autojump_clock):
    for _ in range(100):
        for each in SENSELESS.values():
            if each[1] != GO_AWAY:
                await peer.send(each)
        await trio.sleep(1.0)
    assert peer.refused == []


async def test_empty_packets_are_a_flood_too(nursery, autojump_clock):
    peer = Peer()
    nursery.start_soon(peer.muxer.run)
    nothing = memoryview(bytearray(18))
    for _ in range(600):
        nothing[:2] = (16).to_bytes(2, "big")
        peer._theirs._seal(struct.pack("<4xQ", peer._theirs._sealed), b"", None, nothing[2:])
        peer._theirs._sealed += 1
        peer.wire.incoming += nothing
    peer.wire.bring(b"")
    await trio.testing.wait_all_tasks_blocked()
    assert "frames that mean nothing" in peer.refused[0]


class Rounds:
    """Counts how often the loop comes round."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("known", "turns"), [(True, 4), (False, 20)])
async def test_a_turn_is_short_and_others_go_first(nursery, known, turns):
    """20,000 frames that cost a microsecond each and are no offence."""
    share = share_of(known=known, core_burst_s=9.0)
    peer, rounds = Peer(share=share), Rounds()
    nursery.start_soon(peer.muxer.run)
    await peer.send(frame(WINDOW, SYN, 1, 0))
    stream = peer.opened.popleft()
    nursery.start_soon(rounds.run)
    await trio.lowlevel.checkpoint()
    begun = rounds.count
    sent = 0
    while sent < 20_000:
        peer.wire.bring(peer.sealed(frame(WINDOW, 0, 1, 1) * 5000))
        sent += 5000
        while peer.wire.incoming or peer.muxer.kept_bytes:
            await trio.lowlevel.checkpoint()
    assert rounds.count - begun >= turns
    assert stream._send_window == INITIAL_WINDOW_BYTES + 20_000
    assert peer.refused == []


async def test_a_stranger_in_debt_waits_and_what_waits_is_counted(nursery, autojump_clock):
    total = UnreadBytes(2**40, lambda: False)
    share = share_of(known=False, stranger_core=0.01, core_burst_s=0.001)
    peer = Peer(share=share, all_unread=total)
    nursery.start_soon(peer.muxer.run)
    await peer.send(frame(WINDOW, SYN, 1, 0))
    start = trio.current_time()
    peer.wire.bring(peer.sealed(frame(WINDOW, 0, 1, 1) * 5000) * 1)
    await trio.testing.wait_all_tasks_blocked()
    assert total.count == peer.muxer.kept_bytes > 12 * 3000
    while peer.muxer.kept_bytes:  # noqa: ASYNC110 - virtual time
        await trio.sleep(0.01)
    # 5 ms of a core, at a hundredth of one.
    assert trio.current_time() - start == pytest.approx(0.5, abs=0.15)
    assert total.count == 0
    assert peer.refused == []


@pytest.mark.parametrize(
    "flood",
    [
        lambda _n: frame(WINDOW, 0, 1, 1) * 4000,
        lambda _n: data(1, b"x") * 4000,
        # One stream in each, which is paid for, does not hide what is not.
        lambda n: frame(WINDOW, SYN, 3 + 2 * n, 0) + data(1, b"x") * 4000,
    ],
    ids=["room", "bytes", "streams between"],
)
async def test_who_asks_for_more_than_its_share_for_long_is_cut(nursery, autojump_clock, flood):
    peer = Peer(share=share_of(known=False), max_streams=2**20)
    nursery.start_soon(peer.muxer.run)
    await peer.send(frame(WINDOW, SYN, 1, 0))
    peer.opened.popleft().listen(lambda _data: None)
    for number in range(10_000):
        if peer.refused:
            break
        peer.wire.bring(peer.sealed(flood(number)))
        while peer.wire.incoming and not peer.refused:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.05)
    assert "all of its share for 10 s" in peer.refused[0]
    assert peer.muxer.violation is Violation.FLOOD


@pytest.mark.parametrize(("known", "count"), [(True, 10_000), (False, 2_000)])
async def test_ten_thousand_streams_one_after_the_other(nursery, autojump_clock, known, count):
    """Slowed to the share of a member or a stranger, whatever crosses with their ends."""
    peer, begun = Peer(share=share_of(known=known)), trio.current_time()
    nursery.start_soon(peer.muxer.run)
    for number in range(1, 2 * count, 2):
        peer.wire.bring(peer.sealed(frame(WINDOW, SYN, number, 0) + data(number, b"hi", FIN)))
        while not peer.opened:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.001)
        stream = peer.opened.popleft()
        assert await stream.read() == b"hi"
        await stream.write(b"answer")
        await stream.end()
        # It has read the answer after our end: room for what will not come, and its own end.
        peer.wire.bring(peer.sealed(frame(WINDOW, 0, number, 6) + frame(WINDOW, FIN, number, 0)))
    await trio.testing.wait_all_tasks_blocked()
    assert peer.refused == []
    assert peer.muxer.streams == {}
    core = TransportLimits().member_core if known else TransportLimits().stranger_core
    assert trio.current_time() - begun > count * STREAM_US / 1e6 / core - 1


async def test_openings_and_resets_without_end_are_slowed(nursery, autojump_clock):
    peer, begun = Peer(share=share_of(known=False)), trio.current_time()
    nursery.start_soon(peer.muxer.run)
    rush = b"".join(frame(WINDOW, flag, n, 0) for n in range(1, 4001, 2) for flag in (SYN, RST))
    peer.wire.bring(peer.sealed(rush))
    while peer.muxer.kept_bytes or peer.wire.incoming:  # noqa: ASYNC110 - virtual time
        await trio.sleep(0.1)
    assert peer.refused == []
    assert (
        trio.current_time() - begun > 2000 * STREAM_US / 1e6 / TransportLimits().stranger_core - 3
    )


async def test_a_stream_too_many_is_reset_alone(nursery, autojump_clock):
    counters = Counters()
    peer = Peer(max_streams=8, share=share_of(counters=counters))
    nursery.start_soon(peer.muxer.run)
    # The data of those that are refused is on its way already.
    for number in range(1, 41, 2):
        await peer.send(frame(WINDOW, SYN, number, 0) + data(number, bytes(10_000)))
    resets = [number for kind, flags, number, _ in peer.frames() if flags & RST]
    assert resets == [*range(17, 41, 2)]
    assert counters.snapshot()["streams.too_many"] == 12
    assert len(peer.opened) == 8
    await peer.send(frame(WINDOW, RST, 1, 0) + frame(WINDOW, SYN, 41, 0))
    assert len(peer.opened) == 9
    assert peer.refused == []


async def test_data_that_comes_late_is_dropped_up_to_the_window_that_was_open(peer):
    for number in (1, 3, 5):
        stream = await stream_of(peer, number)
        await stream.reset()
        await peer.send(data(number, bytes(100_000)) + data(number, bytes(50_000), FIN))
    assert peer.refused == []
    assert peer.muxer.kept_bytes == 0
    left = 3 * (INITIAL_WINDOW_BYTES - 150_000)
    await peer.send(data(3, bytes(left // 2)) + data(3, bytes(left // 2)))
    assert peer.refused == []
    await peer.send(data(3, bytes(200_000)) * 40)
    assert "mean nothing" in peer.refused[0]


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "normal end, GO_AWAY 0"), (1, "protocol error, GO_AWAY 1"),
     (2, "internal error, GO_AWAY 2"), (77, "unknown reason, GO_AWAY 77")],
)  # fmt: skip
async def test_the_reason_that_a_peer_gives_for_going_is_kept(peer, code, said):
    await peer.send(frame(GO_AWAY, 0, 0, code))
    with pytest.raises(StreamBrokenError, match=said):
        peer.muxer.open_stream()
    peer.wire.hang_up()
    await trio.testing.wait_all_tasks_blocked()
    assert peer.muxer.ended == f"the peer has closed the connection (it says: {said})"


async def test_bulk_data_is_free(nursery, autojump_clock):
    """As a member and as a stranger: nobody waits for its share."""
    for known in (True, False):
        peer = Peer(share=share_of(known=known), unread_bytes=2**30)
        nursery.start_soon(peer.muxer.run)
        await peer.send(frame(WINDOW, SYN, 1, 0))
        stream, came = peer.opened.popleft(), 0
        stream.set_window(2**31)

        def take(part: memoryview) -> None:
            nonlocal came
            came += len(part)

        stream.listen(take)
        start, chunk = trio.current_time(), data(1, bytes(64 * KIB)) * 16
        for _ in range(64):
            await peer.send(chunk)
        assert peer.refused == []
        assert came == 64 * 2**20
        assert trio.current_time() == start
