"""Messages over connections that die: each is delivered once, or fails with its reason."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbnode.ir.caps import ROOM_STEP_BYTES
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    EnvelopeReceived,
)
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import FrameType, Lane, encode_header, encode_open
from tests.patience import PATIENCE_S
from tests.transport.fakes import carrier_pair
from tests.transport.test_link import HELLO, LARGE, SMALL, Side, connect, frame, never, quiet

BIG = bytes(range(256)) * 8192


def received(side: Side) -> list[bytes]:
    return [bytes(e.data) for e in side.drain() if isinstance(e, EnvelopeReceived)]


async def idle(side: Side, peer=LARGE) -> None:
    with trio.fail_after(PATIENCE_S):
        await side.table.session(peer).queue.wait_idle()


async def cut(link) -> None:
    link.abort("cut")
    await link.closed.wait()


def break_after(stream, writes: int) -> list[int]:
    """After so many more writes this stream's connection hangs: nothing gets through."""
    original, passed = stream.write, []

    async def write(*data: bytes) -> None:
        if len(passed) == writes:
            await trio.sleep_forever()
        passed.append(sum(map(len, data)))
        await original(*data)

    stream.write = write
    return passed


@pytest.mark.parametrize("writes", range(0, 17, 2))
async def test_a_large_message_goes_on_where_it_was_cut(nursery, writes):
    limits = TransportLimits(bulk_window_bytes=2**23)
    a, b = Side(SMALL, limits), Side(LARGE, limits)
    one, other = connect(a, b, nursery)
    await quiet()
    passed = break_after(next(s for lane, s in one.carrier.opened if lane is Lane.BULK), writes)
    a.table.send(LARGE, BIG, 1)
    await quiet()
    await cut(one)
    with trio.fail_after(PATIENCE_S):
        await other.closed.wait()
    a.table.send(LARGE, b"while it was away", 2)
    written = a.count("outbound.bytes")
    connect(a, b, nursery)
    await idle(a)
    assert sorted(received(b)) == sorted([BIG, b"while it was away"])
    assert not any(isinstance(e, DeliveryFailed) for e in a.drain())
    assert b.count("inbound.duplicates") == 0
    # What the other side had is not sent again.
    again = a.count("outbound.bytes") - written
    assert again < len(BIG) - sum(passed) + 10_000


async def test_a_lost_acknowledgement_is_no_second_delivery(nursery):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    # Whatever b writes from now on is lost.
    for _, stream in other.carrier.opened:
        stream.write = never
    a.table.send(LARGE, b"small", 1)
    a.table.send(LARGE, BIG, 2)
    await quiet()
    got = received(b)
    assert b"small" in got
    await cut(one)
    connect(a, b, nursery)
    await idle(a)
    got += received(b)
    assert sorted(got) == sorted([b"small", BIG])
    (info,) = a.table.infos()
    assert (info.acknowledged, info.queued_envelopes, info.unacknowledged_bytes) == (2, 0, 0)


async def test_a_restarted_peer_gets_what_was_not_begun_and_the_rest_fails(nursery):
    a, old = Side(SMALL), Side(LARGE)
    one, other = connect(a, old, nursery)
    await quiet()
    for _, stream in other.carrier.opened:
        stream.write = never
    a.table.send(LARGE, b"begun", 1)
    await quiet()
    await cut(one)
    a.table.send(LARGE, b"not begun", 2)
    new = Side(LARGE, session="1" * 16)
    connect(a, new, nursery)
    await idle(a)
    assert received(new) == [b"not begun"]
    events = a.drain()
    assert [e.tag for e in events if isinstance(e, DeliveryFailed)] == [1]
    # The failure comes before the new process is up: the engine holds back whom it heard of last.
    assert [type(e) for e in events] == [
        ConnectionOpened,
        ConnectionClosed,
        DeliveryFailed,
        ConnectionOpened,
    ]


async def test_two_connections_at_once_lose_and_repeat_nothing(nursery):
    """The kept one takes over in the middle of a large message."""
    a, b = Side(SMALL), Side(LARGE)
    dropped, _ = connect(b, a, nursery)
    await quiet()
    a.table.send(LARGE, BIG, 1)
    b.table.send(SMALL, BIG[::-1], 1)
    connect(a, b, nursery)
    await idle(a)
    await idle(b, SMALL)
    with trio.fail_after(PATIENCE_S):
        await dropped.closed.wait()
    assert received(b) == [BIG]
    assert received(a) == [BIG[::-1]]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from([0, 10, 65_536, 65_537, 300_000, 1_000_000]), min_size=1),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4),
)
def test_whatever_is_cut_all_arrives_once_and_in_order(sizes, cuts):
    async def scenario() -> None:
        a, b = Side(SMALL), Side(LARGE)
        messages = [n.to_bytes(2, "big") + bytes(size) for n, size in enumerate(sizes)]
        got: list[bytes] = []
        async with trio.open_nursery() as nursery:
            link, _ = connect(a, b, nursery)
            await quiet()
            for tag, message in enumerate(messages):
                a.table.send(LARGE, message, tag)
            for turns, from_a in cuts:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                await cut(link)
                got += received(b)
                link, _ = connect(a, b, nursery) if from_a else connect(b, a, nursery)[::-1]
            with trio.fail_after(PATIENCE_S):
                await a.table.session(LARGE).queue.wait_idle()
            got += received(b)
            nursery.cancel_scope.cancel()
        assert sorted(got) == sorted(messages)
        for small in (True, False):
            lane = [m for m in messages if (len(m) <= 65_536) is small]
            assert [m for m in got if (len(m) <= 65_536) is small] == lane

    trio.run(scenario)


async def test_a_large_message_is_charged_as_it_comes_and_given_back(nursery):
    limits = TransportLimits(inbox_bytes_per_peer=2**20, inbox_large_bytes=2**26)
    a = Side(SMALL, limits)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    await (await inward.open(Lane.CONTROL)).write(HELLO)
    bulk = await inward.open(Lane.BULK)
    await bulk.write(frame(FrameType.START, number=1) + encode_open(1, 2**26, 0))
    await quiet()
    assert a.inbox.partial_bytes == 0
    await bulk.write(frame(FrameType.CHUNK, bytes(1000), 1))
    await quiet()
    assert a.inbox.partial_bytes == ROOM_STEP_BYTES
    await cut(link)
    assert a.inbox.partial_bytes == ROOM_STEP_BYTES, "it may go on"
    a.table.expire(trio.current_time() + limits.resume_s)
    assert a.inbox.partial_bytes == 0


@pytest.mark.parametrize("size", [70_000, 2**21 + 8])
@pytest.mark.parametrize("head", [b"h" * 37, b"", b"h" * 200])
async def test_the_largest_part_is_aligned_where_it_is_received(nursery, head, size):
    a, b = Side(SMALL), Side(LARGE)
    tensor = np.arange(size // 8)
    tensor.flags.writeable = False
    connect(a, b, nursery)
    await quiet()
    a.table.send(LARGE, [head, b"16 bytes of head", tensor.data.cast("B"), b"tail"], 1)
    await idle(a)
    (event,) = (e for e in b.drain() if isinstance(e, EnvelopeReceived))
    start = len(head) + 16
    got = np.frombuffer(event.data, np.int64, len(tensor), start)
    assert got.flags.aligned
    assert (got == tensor).all()
    assert event.data.readonly
    assert len(event.data) == start + tensor.nbytes + 4


async def test_a_burst_arrives_one_by_one_in_the_room_that_there_is(nursery):
    limits = TransportLimits(inbox_bytes_per_peer=len(BIG), inbox_large_bytes=len(BIG))
    a, b = Side(SMALL, limits), Side(LARGE, limits)
    connect(a, b, nursery)
    await quiet()
    b.drain()
    for tag in range(4):
        a.table.send(LARGE, [bytes([tag]), BIG], tag)
    for tag in range(4):
        # Nobody reads: the next ones wait at their sender but for a window.
        await quiet()
        assert (b.inbox.envelopes, b.inbox.partial_bytes) == (1, 0)
        assert b.table.session(SMALL).receiver.held_bytes <= limits.bulk_window_bytes * 9 // 8
        assert a.table.session(LARGE).queue.envelopes == 3 - tag
        with trio.fail_after(PATIENCE_S):
            event = await b.inbox.receive()
        assert bytes(event.data) == bytes([tag]) + BIG
    await idle(a)
    assert not any(isinstance(e, DeliveryFailed) for e in a.drain())


@pytest.mark.parametrize(
    "raw",
    [
        encode_open(1, 2**40, 0),
        encode_open(1, 2**20, 5),
        encode_open(1, 2**20, 0) + encode_open(1, 2**21, 0),
        encode_open(1, 2**20, 0) + encode_open(1, 2**20, 7),
        encode_header(FrameType.CHUNK, 4, 1) + b"aaaa",
        encode_open(1, 70_000, 0) + encode_header(FrameType.CHUNK, 70_001, 1) + bytes(70_001),
    ],
)
async def test_a_message_that_contradicts_itself_ends_the_connection(nursery, raw):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    await (await inward.open(Lane.CONTROL)).write(HELLO)
    await (await inward.open(Lane.BULK)).write(frame(FrameType.START, number=1) + raw)
    with trio.fail_after(PATIENCE_S):
        await link.closed.wait()
    assert a.count("protocol.violations") == 1


async def test_stalls_are_by_progress_in_either_direction(nursery, autojump_clock):
    limits = TransportLimits(stall_s=30.0, slow_s=60.0, slow_bytes_per_s=1024)
    a, b = Side(SMALL, limits), Side(LARGE, limits)
    one, _ = connect(a, b, nursery)
    await quiet()
    a.drain(), b.drain()
    bulk = next(s for lane, s in one.carrier.opened if lane is Lane.BULK)
    original = bulk.write

    async def trickle(*parts: bytes) -> None:
        data = b"".join(parts)
        for at in range(0, len(data), 50_000):
            await trio.sleep(20)
            await original(data[at : at + 50_000])

    bulk.write = trickle
    a.table.send(LARGE, BIG[:600_000], 1)
    # Slow is not dead: this takes several minutes.
    start = trio.current_time()
    event = await b.inbox.receive()
    assert bytes(event.data) == BIG[:600_000]
    assert trio.current_time() - start > 200
    bulk.write = never
    a.table.send(LARGE, BIG, 2)
    start = trio.current_time()
    with trio.fail_after(limits.stall_s + 20):
        await one.closed.wait()
    # It answered pings all the time.
    assert trio.current_time() - start >= limits.stall_s
    failed = [e for e in a.drain() if isinstance(e, DeliveryFailed)]
    assert [e.tag for e in failed] == [2]
    assert "took nothing" in failed[0].reason
    assert a.count("links.stalled") == 1
