"""Other protocols beside the envelopes: streams that can be cancelled, bounded and cleaned up."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import trio
import trio.testing

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived, Hello
from bbnode.transport.errors import NotConnectedError, StreamBrokenError, TooManyStreamsError
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS
from bbnode.transport.links.framing import FrameType, Lane, encode_header
from bbnode.transport.links.hello import encode_hello
from tests.patience import PATIENCE_S
from tests.transport.hosts import OurHost
from tests.transport.test_libp2p_backend import CALM, connected, make, next_event

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")

FETCH = "/test/fetch/1"
DATA = bytes(range(256)) * 8192


async def fetch(stream) -> None:
    """Answer a request of 4 bytes with as many bytes."""
    request = b""
    while len(request) < 4:
        part = await stream.read(4 - len(request))
        if not part:
            return
        request += part
    await stream.write(memoryview(DATA)[: int.from_bytes(request, "big")])


async def all_of(stream) -> bytes:
    data = bytearray()
    while part := await stream.read(50_000):
        data += part
    return bytes(data)


async def settled(backend, streams: int) -> None:
    """Wait until the backend has only so many streams open."""
    with trio.fail_after(PATIENCE_S):
        while backend.metrics().streams > streams:
            await trio.lowlevel.checkpoint()


async def test_a_stream_that_overtakes_the_hello_waits_for_it(nursery):
    a, early = make("a"), OurHost(99)

    async def sink(_connection, stream) -> None:
        while await stream.read(4096):
            pass

    early.handlers.update(dict.fromkeys(LANE_PROTOCOLS.values(), sink))
    a.register_protocol(FETCH, fetch)
    await nursery.start(a.run)
    async with early.running([]):
        with trio.fail_after(PATIENCE_S):
            connection = await early.dial(a.listen_addresses()[0], a.peer_id)
            stream = await connection.open_protocol(FETCH)
            await stream.write((5).to_bytes(4, "big"))
            await stream.end()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert stream.unread_bytes == 0
            control = await connection.open(Lane.CONTROL)
            hello = encode_hello(Hello())
            await control.write(encode_header(FrameType.HELLO, len(hello)) + hello)
            assert await all_of(stream) == DATA[:5]
    assert a.counters()["protocols.refused"] == 0


async def test_a_protocol_over_the_connection_of_the_envelopes(nursery):
    a, b = make("a"), make("b")
    for backend in (a, b):
        backend.register_protocol(FETCH, fetch)
    await connected(nursery, a, b)
    # Both ways: who dialled does not matter.
    for one, other in ((a, b), (b, a)):
        for size in (0, 1, len(DATA)):
            with trio.fail_after(PATIENCE_S):
                async with one.open_stream(other.peer_id, FETCH) as stream:
                    assert stream.peer == other.peer_id
                    await stream.write(size.to_bytes(4, "big"))
                    await stream.end()
                    assert await all_of(stream) == DATA[:size]
                    assert await stream.read(1) == b""
    for backend in (a, b):
        # Two lanes in each direction.
        await settled(backend, 4)
        assert backend.counters()["protocols.opened"] == 6
    assert a.counters()["links.opened"] == 1


async def test_many_short_streams_one_after_the_other_and_in_a_rush(nursery):
    a, b = make("a"), make("b")
    for backend in (a, b):
        backend.register_protocol(FETCH, fetch)
    await connected(nursery, a, b)
    for one, other in ((a, b), (b, a)):
        with trio.fail_after(PATIENCE_S):
            for _ in range(150):
                async with one.open_stream(other.peer_id, FETCH) as stream:
                    await stream.write((5).to_bytes(4, "big"))
                    await stream.end()
                    assert await all_of(stream) == DATA[:5]
            for _ in range(150):  # let go of before an answer has come
                async with one.open_stream(other.peer_id, FETCH) as stream:
                    await stream.write((100_000).to_bytes(4, "big"))
    for backend in (a, b):
        assert backend.counters()["protocol.violations"] == 0
        assert backend.counters()["links.closed"] == 0


async def test_what_a_handler_raises_resets_its_stream_alone(nursery):
    async def fails(stream) -> None:
        await stream.read(1)
        raise ZeroDivisionError

    a, b = make("a"), make("b")
    a.register_protocol(FETCH, fails)
    await connected(nursery, a, b)
    async with b.open_stream(a.peer_id, FETCH) as stream:
        await stream.write(b"x")
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamBrokenError):
            await stream.read(1)
    assert a.counters()["protocols.failed"] == 1
    b.send(a.peer_id, b"unharmed", tag=1)
    assert (await next_event(a, EnvelopeReceived)).data == b"unharmed"
    await settled(a, 4)
    await settled(b, 4)


async def test_cancelled_in_the_middle_leaves_the_connection_whole(nursery):
    a, b = make("a"), make("b")
    a.register_protocol(FETCH, fetch)
    await connected(nursery, a, b)
    for read_first in (0, 1, 100_000):
        with trio.CancelScope() as scope:
            async with b.open_stream(a.peer_id, FETCH) as stream:
                await stream.write(len(DATA).to_bytes(4, "big"))
                got = 0
                while got < read_first:
                    got += len(await stream.read(10_000))
                scope.cancel()
                await stream.read(1)
        assert scope.cancelled_caught
    await settled(a, 4)
    await settled(b, 4)
    for n in range(3):
        b.send(a.peer_id, bytes([n]) * 100_000, tag=n)
        assert (await next_event(a, EnvelopeReceived)).data == bytes([n]) * 100_000
    assert a.counters()["links.opened"] == b.counters()["links.opened"] == 1


async def test_streams_of_a_peer_are_bounded_on_both_sides(nursery):
    limits = replace(CALM, protocol_streams_per_peer=3)
    a, b = make("a", limits=limits), make("b")
    a.register_protocol(FETCH, fetch)
    await connected(nursery, a, b)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(b.open_stream(a.peer_id, FETCH))
        # One more than the other side takes: it is reset, the others live.
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamBrokenError):
            async with b.open_stream(a.peer_id, FETCH) as stream:
                await stream.read(1)
        assert a.counters()["protocols.refused"] == 1
    limits = replace(CALM, protocol_streams_per_peer=1)
    c = make("c", limits=limits)
    await connected(nursery, c)
    c.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(c, ConnectionOpened)
    async with c.open_stream(a.peer_id, FETCH):
        with pytest.raises(TooManyStreamsError):
            await c.open_stream(a.peer_id, FETCH).__aenter__()
    await settled(b, 4)


async def test_the_death_of_the_connection_ends_its_streams(nursery):
    a, b = make("a"), make("b")
    a.register_protocol(FETCH, fetch)
    await connected(nursery, a, b)
    async with b.open_stream(a.peer_id, FETCH) as stream:
        for link in b._table.links():
            link.abort("cut")
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamBrokenError):
            await stream.read(1)
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamBrokenError):
            await stream.write(b"x")


async def test_misuse(nursery):
    a, b = make("a"), make("b")
    a.register_protocol(FETCH, fetch)
    with pytest.raises(DeploymentError, match="already"):
        a.register_protocol(FETCH, fetch)
    with pytest.raises(DeploymentError, match="slash"):
        a.register_protocol("fetch", fetch)
    await connected(nursery, a, b)
    with pytest.raises(NotConnectedError):
        async with a.open_stream(PeerId.from_seed("x"), FETCH):
            pass
    with trio.fail_after(PATIENCE_S), pytest.raises(StreamBrokenError, match="test/fetch"):
        async with a.open_stream(b.peer_id, FETCH):
            pass
