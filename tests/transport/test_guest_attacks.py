"""Guests that flood, sit still, or cost more than they bring; peers that read no answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from bbnode.access.decision import Standing
from bbnode.transport.base import Counters
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS
from bbnode.transport.libp2p.identify import answer_pings
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Stage
from bbnode.transport.links.framing import Lane
from bbnode.transport.links.shares import FRAME_US, STREAM_US, CoreShare, CoreShares
from tests.patience import PATIENCE_S
from tests.transport.hosts import ECHO, LOOPBACK, OurHost
from tests.transport.test_foreign import OPEN, arrive, foreign, make_peer, ping, places
from tests.transport.test_libp2p_backend import make
from tests.transport.test_muxer import (
    RST,
    SYN,
    WINDOW,
    Peer,
    data,
    frame,
    share_of,
    stream_of,
)

LIMITS = TransportLimits()


def guest_share(**limits: float) -> CoreShare:
    share = share_of(known=False, **limits)
    share.visit()
    return share


# -- what they make us do ----------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("most", [64, 1])
async def test_who_does_not_read_the_answers_to_its_streams_is_cut(
    nursery, autojump_clock, known, most
):
    """Each stream has an answer, which waits here if nobody reads it."""
    peer = Peer(share=share_of(known=known), max_streams=most)
    peer.wire.room = 0
    nursery.start_soon(peer.muxer.run)
    flags = (SYN, RST) if most > 1 else (SYN,)
    for first in range(1, 40_000, 200):
        ids = range(first, first + 200, 2)
        peer.wire.bring(peer.sealed(b"".join(frame(WINDOW, f, n, 0) for n in ids for f in flags)))
        while peer.wire.incoming and not peer.refused:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
        if peer.refused:
            break
    assert "does not read the answers" in peer.refused[0]


async def test_pings_that_wait_for_no_answer_are_slowed_to_the_share(nursery, autojump_clock):
    share = guest_share()
    peer = Peer(share=share)
    nursery.start_soon(peer.muxer.run)
    stream = await stream_of(peer)
    connection = SimpleNamespace(place=SimpleNamespace(share=share))
    nursery.start_soon(answer_pings, connection, stream)
    sent = got = 0
    while trio.current_time() < 120:
        if sent - got < 128 * 1024:
            peer.wire.bring(peer.sealed(data(1, bytes(32 * 1024))))
            sent += 32 * 1024
        await trio.sleep(0.1)
        for kind, _, _, length in peer.frames():
            if kind == 0:
                got += length
                # The other side reads them.
                peer.wire.bring(peer.sealed(frame(WINDOW, 0, 1, length)))
    assert peer.refused == []
    # What a twentieth of a core answers in two minutes, and what is under way.
    assert 1_000_000 < got < 120 * 32 * LIMITS.stranger_core * 1e6 / 60 + 256 * 1024


async def test_pings_one_after_the_other_without_a_pause_are_no_flood(nursery, autojump_clock):
    """As go-libp2p's service for pings asks, for longer than a debt may last."""
    share = guest_share()
    peer = Peer(share=share)
    nursery.start_soon(peer.muxer.run)
    stream = await stream_of(peer)
    connection = SimpleNamespace(place=SimpleNamespace(share=share))
    nursery.start_soon(answer_pings, connection, stream)
    while trio.current_time() < 1.5 * LIMITS.indebted_s and not peer.refused:
        peer.wire.bring(peer.sealed(data(1, bytes(32))))
        while not (peer.wire.outgoing or peer.refused):  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.001)
        peer.wire.outgoing.clear()
    assert peer.refused == []


async def test_data_of_guests_has_a_rate(nursery, autojump_clock):
    peer, got = Peer(share=guest_share()), 0
    nursery.start_soon(peer.muxer.run)
    stream = await stream_of(peer)

    async def read() -> None:
        nonlocal got
        while got < 20 * 2**20:
            got += len(await stream.read())

    begun = trio.current_time()
    with trio.fail_after(1000):
        async with trio.open_nursery() as reader:
            reader.start_soon(read)
            for _ in range(20 * 16):
                peer.wire.bring(peer.sealed(data(1, bytes(2**16))))
                while peer.wire.incoming:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.01)
    assert peer.refused == []  # slowed, not cut
    took_s = 20 * 2**20 / LIMITS.foreign_bytes_per_s
    assert 0.8 * took_s < trio.current_time() - begun < 2 * took_s


async def test_guests_that_say_nothing_in_small_frames_are_cut(nursery, autojump_clock):
    peer = Peer(share=guest_share())
    nursery.start_soon(peer.muxer.run)
    stream = await stream_of(peer)
    stream.listen(lambda _: None)
    while not peer.refused and trio.current_time() < 1000:
        peer.wire.bring(peer.sealed(data(1, b"x") * 4000))
        while peer.wire.incoming and not peer.refused:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.05)
    assert "all of its share for 10 s" in peer.refused[0]


async def flood(share: CoreShare, streams: list[int]) -> None:
    while True:
        assert await share.begin() == ""
        for _ in range(4):
            share.work(STREAM_US)
            streams[0] += 1
        await share.end()


async def handshake_s(shares: CoreShares) -> float:
    newcomer, begun = CoreShare(shares), trio.current_time()
    for _ in range(8):
        assert await newcomer.begin() == ""
        newcomer.due_us += 300
        await newcomer.end()
    return trio.current_time() - begun


async def test_guests_that_flood_leave_newcomers_their_time(nursery, autojump_clock):
    shares, streams = CoreShares(LIMITS, Counters(), lambda _: False), [0]
    for _ in range(LIMITS.max_foreign):
        share = CoreShare(shares)
        share.visit()
        nursery.start_soon(flood, share, streams)
    await trio.sleep(60)
    most_s = LIMITS.foreign_burst_s + 60 * LIMITS.foreign_core
    assert 0.8 * most_s < streams[0] * STREAM_US / 1e6 < 1.2 * most_s
    assert await handshake_s(shares) < 0.1


async def test_a_guest_that_turns_peer_leaves_the_line_that_it_waited_in(nursery, autojump_clock):
    shares = CoreShares(LIMITS, Counters(), lambda _: False)
    share = CoreShare(shares)
    share.visit()
    assert await share.begin() == ""
    share.stay()
    share.due_us += FRAME_US
    await share.end()
    assert not shares.foreign.line.locked()
    assert not shares.strangers.line.locked()
    share.admit()
    assert share.byte_us == 0


# -- the places that they take -----------------------------------------------------------------


async def test_who_sits_still_goes_for_another_and_who_pings_stays():
    admission = places(max_foreign=3)
    guests = [await arrive(admission, f"9.9.{n}.9", n) for n in range(3)]
    dropped: list[int] = []
    for n, place in enumerate(guests):
        assert admission.take_foreign(place, 0.0)
        place.drop = lambda _reason, n=n: dropped.append(n)
    busy, quiet, _ = guests
    late_s = LIMITS.idle_foreign_s + 1
    newcomer = await arrive(admission, "9.8.7.6", 9)
    assert not admission.take_foreign(newcomer, late_s - 2)
    for each in (busy, guests[2]):
        each.share._own.take(1, 100.0)
    assert admission.take_foreign(newcomer, late_s)
    assert dropped == [1]
    assert quiet.stage is Stage.GONE
    assert admission.foreign == 3


async def test_a_guest_that_becomes_a_member_frees_its_place_and_its_budget():
    admission = places(max_foreign=1)
    first = await arrive(admission, "9.9.9.9", 1)
    assert admission.take_foreign(first, 0.0)
    assert admission.hello(first, make_peer(1), Standing.MEMBER, 1.0) == ""
    assert first.share.is_admitted
    assert first.share.byte_us == 0
    assert (admission.foreign, admission.settled) == (0, 1)
    assert admission.take_foreign(await arrive(admission, "9.9.9.9", 2), 1.0)


async def test_guests_are_counted_apart_from_what_opens(nursery):
    node, _, connection = await foreign(nursery, OPEN)
    with trio.fail_after(PATIENCE_S):
        await ping(connection)
    metrics = node.metrics()
    assert (metrics.foreign, metrics.connections, metrics.connections_opening) == (1, 0, 0)


async def takes_lanes(_connection, stream) -> None:
    while await stream.read(4096):
        pass


async def test_who_opens_a_lane_and_says_no_hello_is_no_guest_any_more(nursery):
    node, host, connection = await foreign(nursery, OPEN)
    host.handlers.update(dict.fromkeys(LANE_PROTOCOLS.values(), takes_lanes))
    with trio.fail_after(PATIENCE_S):
        await ping(connection)
        # What its share made it wait as a guest is no time for its hello.
        (link,) = node._table.links()
        link.place.share._waited_s += 1000.0
        await connection.open_protocol(LANE_PROTOCOLS[Lane.CONTROL])
        await connection.ended.wait()
    assert node.counters()["hello.refused"] == 1
    assert node.metrics().foreign == 0


async def test_lanes_that_newer_ones_replaced_do_not_pile_up(nursery):
    node, host, connection = await foreign(nursery, replace(OPEN, hello_timeout_s=PATIENCE_S))
    host.handlers.update(dict.fromkeys(LANE_PROTOCOLS.values(), takes_lanes))
    (ours,) = node._host.connections
    with trio.fail_after(PATIENCE_S):
        older = await connection.open_protocol(LANE_PROTOCOLS[Lane.CONTROL])
        newer = await connection.open_protocol(LANE_PROTOCOLS[Lane.CONTROL])
        newest = ours.muxer.streams[newer.stream_id]
        while ours.lanes.get(Lane.CONTROL) is not newest:  # noqa: ASYNC110 - the other host's tasks
            await trio.sleep(0.01)
    assert {each.stream_id for each in node._stray_streams()} == {older.stream_id}


async def test_a_service_that_dials_a_host_waits_for_no_word_of_it(nursery):
    """It may speak neither identify nor ping to us."""
    node, silent = make("a", limits=OPEN, py_libp2p=True), OurHost(77)
    await nursery.start(node.run)
    async with silent.running([LOOPBACK]):
        peer = PeerInfo(ID(silent.peer_id.to_bytes()), [silent.address])
        with trio.fail_after(PATIENCE_S):
            await node.libp2p_host.connect(peer)
            stream = await node.libp2p_host.new_stream(peer.peer_id, [ECHO])
            await stream.write(b"hello")
            assert await stream.read(5) == b"hello"
        assert node.metrics().foreign == 1
