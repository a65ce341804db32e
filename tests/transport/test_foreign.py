"""Hosts of libp2p that speak no protocol of bbnode: guests in places that nobody else wants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing
from libp2p.host.ping import PingService
from libp2p.peer.id import ID

from bbnode.access.decision import Standing
from bbnode.ir.peer import PeerId
from bbnode.transport import Identity
from bbnode.transport.base import ConnectionOpened, Counters, Hello
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.connection import LANE_PROTOCOLS
from bbnode.transport.libp2p.identify import IDENTIFY_PROTOCOL, PING_PROTOCOL
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Admission, Place, Stage
from bbnode.transport.links.framing import FrameType, Lane, encode_header
from bbnode.transport.links.hello import encode_hello
from tests.patience import PATIENCE_S
from tests.transport.hosts import OurHost
from tests.transport.plain import plain_dial, plain_host, plain_running
from tests.transport.test_libp2p_backend import CALM, make, next_event

OPEN = replace(CALM, foreign_hosts=True, hello_timeout_s=1.0, dialled_hello_s=1.0)
SHUT = replace(OPEN, foreign_hosts=False)


async def ping(connection) -> bytes:
    stream = await connection.open_protocol(PING_PROTOCOL)
    await stream.write(bytes(range(32)))
    answer = await stream.read()
    await stream.end()
    return answer


async def foreign(nursery, limits, seed=50):
    """A node, and the connection of a host without lanes with it."""
    node, host = make("a", limits=limits), OurHost(seed)
    await nursery.start(node.run)
    await nursery.start(_run, host)
    return node, host, await host.dial(node.listen_addresses()[0], node.peer_id)


async def _run(host, *, task_status) -> None:
    async with host.running([]):
        task_status.started()
        await trio.sleep_forever()


async def test_who_pings_and_says_no_hello_stays(nursery):
    node, _, connection = await foreign(nursery, OPEN)
    with trio.fail_after(PATIENCE_S):
        assert await ping(connection) == bytes(range(32))
        await trio.sleep(1.2 * OPEN.hello_timeout_s)  # beyond the time for a hello
        assert await ping(connection) == bytes(range(32))
        stream = await connection.open_protocol(IDENTIFY_PROTOCOL)
        assert b"bbnode" in await stream.read()
    assert node.metrics().foreign == 1
    assert node.peers() == []
    assert node.counters()["hello.refused"] == 0
    # It was asked for nothing: no lane came.
    assert connection.muxer.streams.keys().isdisjoint(range(2, 100, 2))


@pytest.mark.parametrize("limits", [SHUT, replace(OPEN, max_foreign=0)], ids=["shut", "full"])
async def test_where_guests_are_not_wanted_the_hello_has_its_time(nursery, limits):
    node, _, connection = await foreign(nursery, limits)
    with trio.fail_after(PATIENCE_S):
        assert await ping(connection) == bytes(range(32))
        await connection.ended.wait()
    assert node.counters()["hello.refused"] == 1


async def test_a_silent_host_is_no_guest(nursery):
    node, _, connection = await foreign(nursery, OPEN)
    with trio.fail_after(PATIENCE_S):
        await connection.ended.wait()
    assert node.metrics().foreign == 0


async def test_a_guest_that_says_hello_is_a_peer_like_any_other(nursery):
    node, host, connection = await foreign(nursery, OPEN)

    async def sink(_connection, stream) -> None:
        while await stream.read(4096):
            pass

    host.handlers.update(dict.fromkeys(LANE_PROTOCOLS.values(), sink))
    with trio.fail_after(PATIENCE_S):
        await ping(connection)
        await trio.sleep(1.2 * OPEN.hello_timeout_s)
        control = await connection.open(Lane.CONTROL)
        hello = encode_hello(Hello())
        await control.write(encode_header(FrameType.HELLO, len(hello)) + hello)
        event = await next_event(node, ConnectionOpened)
    assert event.peer == host.peer_id
    assert node.metrics().foreign == 0


async def test_what_is_for_peers_is_refused_to_guests(nursery):
    node, _, connection = await foreign(nursery, OPEN)
    node.register_protocol("/test/members/1", lambda stream: stream.write(b"secret"))
    with trio.fail_after(PATIENCE_S):
        await ping(connection)
        stream = await connection.open_protocol("/test/members/1")
        with pytest.raises(StreamBrokenError):
            await stream.read()
        assert await ping(connection) == bytes(range(32))
    assert node.counters()["protocols.refused"] == 1


async def test_a_guest_has_few_streams_at_a_time(nursery):
    node, _, connection = await foreign(nursery, replace(OPEN, foreign_streams=4))
    with trio.fail_after(PATIENCE_S):
        await ping(connection)
        held = [await connection.open_protocol(PING_PROTOCOL) for _ in range(4)]
        with pytest.raises(StreamBrokenError):
            await connection.open_protocol(PING_PROTOCOL)
        await held[0].reset()
        assert await ping(connection) == bytes(range(32))
    assert node.counters()["streams.too_many"] == 1


async def test_members_meet_while_all_places_of_guests_are_taken(nursery):
    a, b = make("a", limits=replace(OPEN, max_foreign=1)), make("b", limits=OPEN)
    await nursery.start(a.run)
    for seed in (60, 61):
        host = OurHost(seed)
        await nursery.start(_run, host)
        with trio.fail_after(PATIENCE_S):
            await ping(await host.dial(a.listen_addresses()[0], a.peer_id))
    await nursery.start(b.run)
    b.keep_connected(a.peer_id, a.listen_addresses())
    with trio.fail_after(PATIENCE_S):
        await next_event(b, ConnectionOpened)
    assert a.metrics().foreign == 1
    assert a.counters()["foreign.refused"] == 1


async def test_py_libp2p_as_it_comes_stays_and_pings(nursery):
    node = make("a", limits=OPEN)
    await nursery.start(node.run)
    plain = plain_host(b"p" * 32)
    async with plain_running(plain, []):
        with trio.fail_after(PATIENCE_S):
            await plain_dial(plain, node.listen_addresses()[0], node.peer_id)
            service, peer = PingService(plain), node.peer_id
            for _ in range(2):
                assert len(await service.ping(ID(peer.to_bytes()), 3)) == 3
                await trio.sleep(1.2 * OPEN.hello_timeout_s)
    assert node.counters()["foreign.taken"] == 1


# -- the places ------------------------------------------------------------------------------


def places(**limits: int) -> Admission:
    made = TransportLimits(foreign_hosts=True, **limits)
    return Admission(made, Counters(), lambda _peer: False)


async def arrive(admission: Admission, address: str, number: int) -> Place:
    place = admission.accept(address, 0.0, lambda _reason: None)
    assert place is not None
    admission.secured(place, make_peer(number))
    return place


def make_peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


async def test_ten_thousand_guests_take_no_place_of_others():
    admission = places()
    taken = 0
    for number in range(10_000):
        address = f"9.{number >> 8 & 255}.{number & 255}.1"
        place = await arrive(admission, address, number)
        taken += admission.take_foreign(place, 0.0)
        if place.stage is Stage.SECURED:
            admission.left(place)
    assert taken == admission.foreign == TransportLimits().max_foreign
    assert (admission.settled, admission.waiting) == (0, 0)
    member = await arrive(admission, "8.8.8.8", 20_000)
    assert admission.hello(member, make_peer(20_000), Standing.MEMBER, 0.0) == ""


async def test_one_address_and_one_network_have_a_part_of_the_places():
    admission = places()
    at_one = [admission.take_foreign(await arrive(admission, "9.9.9.9", n), 0.0) for n in range(20)]
    assert sum(at_one) == TransportLimits().foreign_per_address
    near = [
        admission.take_foreign(await arrive(admission, f"9.9.9.{n}", n), 0.0) for n in range(10, 60)
    ]
    assert sum(near) == TransportLimits().foreign_per_network - sum(at_one)


async def test_hosts_that_services_dial_have_places_of_their_own():
    admission = places(max_foreign_dialled=3, max_foreign=1)
    peer = make_peer(1)
    visited = [admission.visit(peer, 0.0, lambda _reason: None) for _ in range(4)]
    assert [each is not None for each in visited] == [True, True, True, False]
    assert admission.take_foreign(await arrive(admission, "9.9.9.9", 2), 0.0)
    assert visited[0] is not None
    admission.left(visited[0])
    assert admission.visit(peer, 0.0, lambda _reason: None) is not None
    assert not visited[0].share.is_admitted
