"""What a stranger announces is not read, kept or waited for. Real hosts on loopback."""

from __future__ import annotations

import contextlib
import struct

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux import yamux
from libp2p.utils import encode_delim, encode_uvarint

from bbnode.ir.caps import MAX_NEGOTIATION_MESSAGES, MAX_UNSECURED_BYTES
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived, HelloRefused
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.limits import TransportLimits
from tests.patience import PATIENCE_S
from tests.transport.hosts import LOOPBACK, TAKE, OurHost
from tests.transport.plain import plain_dial, plain_host, plain_running
from tests.transport.test_host import closed, never, tcp, until
from tests.transport.test_libp2p_backend import CALM, make, next_event

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")

HEADER = encode_delim(b"/multistream/1.0.0")
KIB = 1024


def watched(**limits) -> OurHost:
    """A host that reads nothing of the streams that are opened to it, and tells what it refused."""
    host = OurHost(7, **limits)
    host.handlers[TAKE] = never
    return host


def late(host: OurHost) -> int:
    """The handshakes that took too long."""
    return host.counters.snapshot()["sockets.late"]


def attacker():
    """A host with libp2p's own muxer, which does what it is told to."""
    return plain_host(b"x" * 32)


@pytest.mark.parametrize(
    "data",
    [
        encode_uvarint(2**33) + bytes(100),
        encode_uvarint(64 * KIB) + bytes(100),
        encode_uvarint(2 * KIB) + bytes(100),
        b"\x80" * 20,
        b"\x00" + bytes(20),
        encode_uvarint(4) + b"abcd",
        encode_delim(b"\xff\xfe"),
        HEADER + encode_delim(b"ls") * (MAX_NEGOTIATION_MESSAGES + 1),
        HEADER + encode_delim(b"/noise") + b"\xff\xff" + bytes(MAX_UNSECURED_BYTES),
    ],
)
async def test_nothing_long_is_read_before_the_handshake(data):
    """the connection ends at what it announced, long before its time is over."""
    server = watched()
    async with server.running([LOOPBACK]):
        stream = await tcp(server.address)
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data)
            await closed(stream)
    assert late(server) == 0


async def test_who_does_not_authenticate_in_time_goes():
    server = watched(authenticate_s=0.2)
    async with server.running([LOOPBACK]):
        for data in (b"", HEADER, HEADER + encode_delim(b"/noise")):
            stream = await tcp(server.address)
            async with stream:
                if data:
                    await stream.send_all(data)
                await closed(stream)
    assert late(server) == 3


@pytest.mark.parametrize("data", [encode_uvarint(2**33) + bytes(KIB), encode_delim(b"\xff\xfe")])
async def test_nothing_long_is_read_before_a_stream_has_its_protocol(data):
    """the stream is reset, the connection and its other streams go on."""
    server, client = watched(), attacker()
    async with server.running([LOOPBACK]), plain_running(client, []):
        connection = await plain_dial(client, server.address, server.peer_id)
        stream = await connection.new_stream()
        await stream.write(data)
        with trio.fail_after(PATIENCE_S), contextlib.suppress(BaseLibp2pError):
            while await stream.read(4096):
                pass
        assert not connection.event_closed.is_set()
        await client.new_stream(ID(server.peer_id.to_bytes()), [TAKE])
    assert server.refused == []


async def test_a_window_is_enforced():
    """a sender that takes the window for endless."""
    server, client = watched(), attacker()
    async with server.running([LOOPBACK]), plain_running(client, []):
        connection = await plain_dial(client, server.address, server.peer_id)
        stream = await client.new_stream(ID(server.peer_id.to_bytes()), [TAKE])
        stream.muxed_stream.send_window = 2**40
        with trio.fail_after(PATIENCE_S):
            with contextlib.suppress(BaseLibp2pError):
                await stream.write(bytes(400 * KIB))
            await connection.event_closed.wait()
    (reason,) = server.refused
    assert "receive window" in reason


async def test_all_streams_together_have_a_bound():
    """each within its window; negotiated, and not."""
    server, client = watched(opening_unread_bytes=500 * KIB), attacker()
    async with server.running([LOOPBACK]), plain_running(client, []):
        connection = await plain_dial(client, server.address, server.peer_id)
        with trio.fail_after(PATIENCE_S):
            with contextlib.suppress(BaseLibp2pError):
                for _ in range(3):
                    stream = await client.new_stream(ID(server.peer_id.to_bytes()), [TAKE])
                    await stream.write(bytes(200 * KIB))
            await connection.event_closed.wait()
    assert "over 512000 bytes" in server.refused[0]


def frame(kind: int, flags: int, number: int, length: int, *, version: int = 0) -> bytes:
    return struct.pack(yamux.YAMUX_HEADER_FORMAT, version, kind, flags, number, length)


DATA, WINDOW, SYN = yamux.TYPE_DATA, yamux.TYPE_WINDOW_UPDATE, yamux.FLAG_SYN


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        # Lengths are refused before what follows is read: nothing follows here.
        ([frame(DATA, SYN, 101, 2**24)], "receive window"),
        ([frame(DATA, 0, 101, 2**24)], "receive window"),
        ([frame(DATA, yamux.FLAG_ACK, 101, 2**32 - 1)], "receive window"),
        ([frame(WINDOW, SYN, 2, 0)], "not the peer's"),
        ([frame(WINDOW, SYN, 0, 0)], "not the peer's"),
        ([frame(7, 0, 1, 0)], "no frame"),
        ([frame(DATA, 0, 1, 0, version=3)], "no frame"),
    ],
)
async def test_frames_that_must_not_be(frames, reason):
    server, client = watched(), attacker()
    async with server.running([LOOPBACK]), plain_running(client, []):
        connection = await plain_dial(client, server.address, server.peer_id)
        with trio.fail_after(PATIENCE_S):
            for each in frames:
                await connection.muxed_conn._write_frame(each)
            await connection.event_closed.wait()
    assert reason in server.refused[0]


async def test_streams_that_nobody_looked_at_are_counted():
    """libp2p makes them as they come, and hands them on one after the other."""
    server, client = watched(), attacker()
    async with server.running([LOOPBACK]), plain_running(client, []):
        connection = await plain_dial(client, server.address, server.peer_id)
        burst = b"".join(frame(WINDOW, SYN, 101 + 2 * n, 0) for n in range(1000))
        await connection.muxed_conn.secured_conn.write(burst)
        await until(lambda: server.counters.snapshot()["streams.too_many"] == 1000 - 64)
        assert len(server.connection.muxer.streams) == 64
    assert server.refused == []


async def test_a_reset_stream_keeps_nothing():
    """its handler gives up with much unread."""
    server, client = watched(), attacker()
    unread = trio.Event()

    async def gives_up(_connection, _stream) -> None:
        await unread.wait()
        raise ValueError("on purpose")

    server.handlers[TAKE] = gives_up
    async with server.running([LOOPBACK]), plain_running(client, []):
        await plain_dial(client, server.address, server.peer_id)
        stream = await client.new_stream(ID(server.peer_id.to_bytes()), [TAKE])
        await stream.write(bytes(200 * KIB))
        muxer = server.connection.muxer
        with trio.fail_after(PATIENCE_S):
            while muxer.held_bytes < 200 * KIB:
                await trio.lowlevel.checkpoint()
            unread.set()
            while muxer.streams:
                await trio.lowlevel.checkpoint()
        assert not muxer.held_bytes


async def test_bytes_of_all_connections_count_as_they_come():
    """Ten strangers, each within its own bound; whoever has most goes in the same moment."""
    most = 700 * KIB
    server = watched(all_unread_bytes=most)
    async with server.running([LOOPBACK]), contextlib.AsyncExitStack() as stack:
        clients = [plain_host(bytes([n]) * 32) for n in range(1, 11)]
        for size, client in enumerate(clients, 1):
            await stack.enter_async_context(plain_running(client, []))
            await plain_dial(client, server.address, server.peer_id)
            stream = await client.new_stream(ID(server.peer_id.to_bytes()), [TAKE])
            with trio.fail_after(PATIENCE_S), contextlib.suppress(BaseLibp2pError):
                await stream.write(bytes((100 + 10 * size) * KIB))
            assert server._unread.count <= most
        await until(lambda: len(server.refused) >= 3)
        assert server._unread.count <= most
        assert all("more unread bytes than any other" in each for each in server.refused)
    assert server._unread.count == 0


# -- a whole node ----------------------------------------------------------------------------


def limits(**changes) -> TransportLimits:
    fields = {name: getattr(CALM, name) for name in TransportLimits.__slots__}
    return TransportLimits(**{**fields, **changes})


async def test_silent_sockets_shut_no_newcomer_out(nursery):
    a = make("a", limits=limits(authenticate_s=10 * PATIENCE_S, max_waiting=4))
    b = make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    for _ in range(12):
        nursery.start_soon(closed_late, await tcp(a.listen_addresses()[0]))
    b.keep_connected(a.peer_id, a.listen_addresses())
    assert (await next_event(a, ConnectionOpened)).peer == b.peer_id
    assert a.counters()["sockets.dropped"] >= 1
    assert a.metrics().connections_opening <= 4


async def closed_late(stream: trio.SocketStream) -> None:
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some(4096):
                pass


async def test_strangers_with_hellos_leave_room_for_whom_we_know(nursery):
    a = make("a", limits=limits(max_connections=4, idle_stranger_s=10 * PATIENCE_S))
    friend, *strangers = (make(name) for name in "fbcde")
    for node in (a, friend, *strangers):
        await nursery.start(node.run)
    friend.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(a, ConnectionOpened)
    a.send(friend.peer_id, b"we deal with each other", tag=1)
    await until(lambda: a.peers()[0].acknowledged)
    friend.forget(a.peer_id)
    friend.disconnect(a.peer_id)
    await until(lambda: not a.peers())
    for stranger in strangers[:3]:
        stranger.keep_connected(a.peer_id, a.listen_addresses())
        await next_event(a, ConnectionOpened)
    strangers[3].keep_connected(a.peer_id, a.listen_addresses())
    assert "places for strangers" in (await next_event(a, HelloRefused)).reason
    strangers[3].forget(a.peer_id)
    friend.keep_connected(a.peer_id, a.listen_addresses())
    assert (await next_event(a, ConnectionOpened)).peer == friend.peer_id


@pytest.mark.parametrize("newer", [False, True])
async def test_streams_that_belong_to_nobody_are_reset(nursery, newer):
    """One that is not negotiated, and one of a lane that has a newer one."""
    a, b = make("a", limits=limits(stray_stream_s=0.1)), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(b, ConnectionOpened)
    # Two lanes of each side.
    await until(lambda: a.metrics().streams == 4)
    (connection,) = b._host.connections
    if newer:
        # Its lanes are taken over, and nothing is written there.
        await connection.open_protocol("/bbnode/bulk/1")
    else:
        stream = connection.muxer.open_stream()
        await stream.write(HEADER[:5])
    await until(lambda: a.counters()["streams.reaped"])
    if not newer:
        with trio.fail_after(PATIENCE_S), contextlib.suppress(StreamBrokenError):
            while await stream.read(100):
                pass
    await until(lambda: a.metrics().streams == 4)
    assert a.counters()["streams.reaped"] == 1
    # A lane that was taken from its writer is opened again.
    b.send(a.peer_id, bytes(100_000), tag=1)
    assert len((await next_event(a, EnvelopeReceived)).data) == 100_000


async def test_a_stream_on_which_nothing_moves_is_reset(nursery):
    a, b = make("a", limits=limits(stream_idle_s=0.1)), make("b")
    ended = trio.Event()

    async def waits(stream) -> None:
        try:
            await stream.read(1)
        finally:
            ended.set()

    a.register_protocol(TAKE, waits)
    await nursery.start(a.run)
    await nursery.start(b.run)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(b, ConnectionOpened)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(b.open_stream(a.peer_id, TAKE))
        with trio.fail_after(PATIENCE_S):
            await ended.wait()
    assert a.counters()["streams.reaped"] == 1
