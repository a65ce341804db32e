"""Guests that flood, sit, or cost more than they bring; and peers that do not read the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from bbnode.transport.libp2p.identify import PING_PROTOCOL
from bbnode.transport.limits import TransportLimits
from tests.patience import PATIENCE_S
from tests.transport.hosts import OurHost
from tests.transport.test_foreign import OPEN, _run, foreign, ping
from tests.transport.test_libp2p_backend import make
from tests.transport.test_muxer import ACK, RST, SYN, WINDOW, Peer, frame, share_of


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("most", [64, 1])
async def test_who_does_not_read_the_answers_to_its_streams_is_cut(
    nursery, autojump_clock, known, most
):
    """Each stream has an answer, which waits here if nobody reads it."""
    peer = Peer(share=share_of(known=known), max_streams=most)
    peer.wire.room = 0
    nursery.start_soon(peer.muxer.run)
    for number in range(1, 200_000, 200):
        ids = range(number, number + 200, 2)
        flags = (SYN, RST) if most > 1 else (SYN,)
        peer.wire.bring(peer.sealed(b"".join(frame(WINDOW, f, n, 0) for n in ids for f in flags)))
        while peer.wire.incoming and not peer.refused:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
        if peer.refused:
            break
    print(trio.current_time(), len(peer.muxer._frames))
    assert "does not read the answers" in peer.refused[0]


async def test_pings_in_bulk_are_answered_at_a_bounded_rate(nursery):
    import time
    node, _, connection = await foreign(nursery, OPEN)
    await ping(connection)
    stream = await connection.open_protocol(PING_PROTOCOL)
    got = 0
    async def read():
        nonlocal got
        while d := await stream.read(2**20):
            got += len(d)
    nursery.start_soon(read)
    t=time.process_time(); w=time.monotonic()
    for _ in range(64):
        with trio.move_on_after(5) as s:
            await stream.write(bytes(64*1024))
        if s.cancelled_caught: break
    print("cpu", time.process_time()-t, "wall", time.monotonic()-w, "got", got)
    assert 0


async def test_a_service_that_dials_a_silent_host_does_not_wait_for_ever(nursery):
    node = make("a", limits=OPEN, py_libp2p=True)
    await nursery.start(node.run)
    silent = OurHost(77)
    from libp2p.peer.peerinfo import PeerInfo
    from libp2p.peer.id import ID
    from tests.transport.hosts import LOOPBACK
    async with silent.running([LOOPBACK]):
        with trio.fail_after(10):
            await node.libp2p_host.connect(PeerInfo(ID(silent.peer_id.to_bytes()), [silent.address]))
        assert node.metrics().foreign == 1


async def test_guests_are_not_shown_as_opening(nursery):
    node, _, connection = await foreign(nursery, OPEN)
    await ping(connection)
    assert node.metrics().connections_opening == 0


async def test_guests_that_flood_leave_a_newcomers_handshake_its_time(nursery, autojump_clock):
    from bbnode.transport.base import Counters
    from bbnode.transport.links.shares import CoreShare, CoreShares, STREAM_US
    shares = CoreShares(TransportLimits(), Counters(), lambda _: False)
    async def flood():
        share = CoreShare(shares)
        while True:
            await share.begin()
            for _ in range(4):
                share.take_stream()
            await share.end()
    for _ in range(64):
        nursery.start_soon(flood)
    await trio.sleep(60)
    newcomer, begun = CoreShare(shares), trio.current_time()
    for _ in range(8):
        assert await newcomer.begin() == ""
        newcomer.due_us += 300
        await newcomer.end()
    print("took", trio.current_time() - begun)
    assert trio.current_time() - begun < 1
