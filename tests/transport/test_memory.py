"""The in-memory backend: the same seam, at once and in order."""

from __future__ import annotations

import pytest
import trio

from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    Hello,
)
from bbnode.transport.errors import (
    EnvelopeTooLargeError,
    NotAllowedError,
    NotConnectedError,
    QueueFullError,
)
from bbnode.transport.limits import TransportLimits
from bbnode.transport.memory import MemoryNetwork, MemoryTransport
from tests.transport.test_authorizer import Rules

A, B, C = sorted(PeerId.from_seed(name) for name in "abc")


def drain(backend: MemoryTransport) -> list[object]:
    events: list[object] = []
    while True:
        try:
            events.append(backend.events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return events


@pytest.fixture
async def network(nursery):
    return MemoryNetwork()


async def start(network, nursery, peer, **options) -> MemoryTransport:
    backend = network.transport(peer, **options)
    await nursery.start(backend.run)
    return backend


async def test_connect_send_and_stop(network, nursery):
    a = await start(network, nursery, A, hello=Hello(classes=("server",)))
    b = network.transport(B)
    b.keep_connected(A, a.listen_addresses())
    assert not b.wanted()[0].connected
    await nursery.start(b.run)
    (up,) = drain(b)
    assert isinstance(up, ConnectionOpened)
    assert (up.peer, up.direction, up.hello.classes) == (A, Direction.OUTBOUND, ("server",))
    drain(a)
    b.send(A, [b"in ", bytearray(b"parts")], tag=1)
    (got,) = drain(a)
    assert isinstance(got, EnvelopeReceived)
    assert (got.peer, got.data) == (B, b"in parts")
    assert got.observed_address in b.listen_addresses()
    assert [info.peer for info in a.peers()] == [B]
    await b.stop(1)
    assert [type(e) for e in drain(a)] == [ConnectionClosed]
    with pytest.raises(NotConnectedError):
        a.send(B, b"", tag=1)
    assert a.counters()["outbound.refused"] == 1


async def test_wanted_peer_is_connected_when_it_comes_and_comes_back(network, nursery):
    a = await start(network, nursery, A)
    a.keep_connected(B, [network.transport(B).listen_addresses()[0]])
    assert drain(a) == []
    for _ in range(2):
        b = await start(network, nursery, B)
        assert [type(e) for e in drain(a)] == [ConnectionOpened]
        await b.stop(1)
        assert [type(e) for e in drain(a)] == [ConnectionClosed]


async def test_cut_and_heal(network, nursery):
    a = await start(network, nursery, A)
    b = await start(network, nursery, B)
    b.keep_connected(A, a.listen_addresses())
    network.cut(A, B)
    assert [type(e) for e in drain(a)] == [ConnectionOpened, ConnectionClosed]
    with pytest.raises(NotConnectedError):
        b.send(A, b"", tag=1)
    network.heal(A, B)
    assert [type(e) for e in drain(a)] == [ConnectionOpened]


async def test_slow_driver_fills_the_senders_queue(network, nursery):
    limits = TransportLimits(inbox_envelopes_per_peer=2, queue_envelopes=3, max_message_bytes=9)
    a = await start(network, nursery, A, limits=limits)
    b = await start(network, nursery, B, limits=limits)
    b.keep_connected(A, a.listen_addresses())
    drain(a)
    drain(b)
    for n in range(5):
        b.send(A, bytes([n]), tag=n)
    with pytest.raises(QueueFullError):
        b.send(A, b"", tag=9)
    with pytest.raises(EnvelopeTooLargeError):
        b.send(A, bytes(10), tag=9)
    assert b.peers()[0].queued_envelopes == 3
    assert [e.data[0] for e in drain(a)] == [0, 1, 2, 3, 4]
    assert b.peers()[0].queued_envelopes == 0
    for n in range(4):
        b.send(A, bytes([n]), tag=n)
    network.cut(A, B)
    assert [e.tag for e in drain(b) if isinstance(e, DeliveryFailed)] == [2, 3]


async def test_disconnect_comes_back_when_wanted(network, nursery):
    a = await start(network, nursery, A)
    b = await start(network, nursery, B)
    b.keep_connected(A, a.listen_addresses())
    a.disconnect(B)
    assert [type(e) for e in drain(b)] == [ConnectionOpened, ConnectionClosed, ConnectionOpened]
    b.forget(A)
    a.disconnect(B)
    assert [type(e) for e in drain(b)] == [ConnectionClosed]


async def test_misuse(network, nursery):
    a = await start(network, nursery, A)
    with pytest.raises(DeploymentError):
        a.keep_connected(A, a.listen_addresses())
    with pytest.raises(DeploymentError):
        a.keep_connected(B, [])
    with pytest.raises(DeploymentError, match="already"):
        await network.transport(A).run()


async def test_the_authorizer_is_asked_as_by_any_transport(network, nursery):
    rules = Rules(blocked={B})
    a = await start(network, nursery, A, authorizer=rules)
    b = await start(network, nursery, B)
    b.keep_connected(A, a.listen_addresses())
    assert (drain(a), drain(b)) == ([], [])
    assert a.metrics().denied == {"blocked": 1}
    rules.blocked.clear()
    network.connect_wanted()
    assert [type(e) for e in drain(b)] == [ConnectionOpened]
    rules.largest_in, rules.largest_out = 10, 5
    b.send(A, bytes(11), tag=1)
    b.send(A, bytes(10), tag=2)
    up, got = drain(a)
    assert (type(up), len(got.data)) == (ConnectionOpened, 10)
    with pytest.raises(NotAllowedError):
        a.send(B, bytes(6), tag=1)
    rules.blocked.add(B)
    a.reauthorize()
    (gone,) = drain(b)
    assert isinstance(gone, ConnectionClosed)
    assert gone.reason == "not allowed any more: blocked"
