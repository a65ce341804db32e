"""Messages for a peer that is only being dialled: real hosts on loopback."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    EnvelopeReceived,
)
from bbnode.transport.errors import NotConnectedError
from tests.transport.test_libp2p_backend import make, next_event


async def test_a_message_waits_for_the_first_dial(nursery) -> None:
    a, b = make("a"), make("b")
    for node in (a, b):
        await nursery.start(node.run)
    with pytest.raises(NotConnectedError):
        a.send(b.peer_id, b"too early", tag=0)
    a.keep_connected(b.peer_id, b.listen_addresses())
    a.send(b.peer_id, b"first", tag=1)
    a.send(b.peer_id, bytes(1 << 20), tag=2)
    got = {bytes((await next_event(b, EnvelopeReceived)).data) for _ in range(2)}
    assert got == {b"first", bytes(1 << 20)}


async def test_a_message_to_who_was_here_before_waits_as_well(nursery) -> None:
    a, b = make("a"), make("b")
    for node in (a, b):
        await nursery.start(node.run)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await next_event(a, ConnectionOpened)
    a.forget(b.peer_id)
    a.disconnect(b.peer_id)
    assert (await next_event(a, ConnectionClosed)).goodbye
    with pytest.raises(NotConnectedError):
        a.send(b.peer_id, b"gone", tag=0)
    a.keep_connected(b.peer_id, b.listen_addresses())
    a.send(b.peer_id, b"again", tag=1)
    assert bytes((await next_event(b, EnvelopeReceived)).data) == b"again"


async def test_it_fails_when_no_address_answers(nursery) -> None:
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    a.keep_connected(b.peer_id, [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")])
    a.send(b.peer_id, b"anybody?", tag=7)
    failed = await next_event(a, DeliveryFailed)
    assert (failed.peer, failed.tag, failed.blames_peer) == (b.peer_id, 7, True)
    assert str(port) in failed.reason
    # It is dialled on, and messages fail at once until it is there.
    with pytest.raises(NotConnectedError):
        a.send(b.peer_id, b"still nobody?", tag=8)
    assert [wanted.peer for wanted in a.wanted()] == [b.peer_id]


async def test_it_fails_when_nobody_dials_any_more(nursery) -> None:
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    # It accepts and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as server:
        a.keep_connected(b.peer_id, [Multiaddr(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}")])
        a.send(b.peer_id, b"hello", tag=3)
        await trio.testing.wait_all_tasks_blocked()
        a.forget(b.peer_id)
        assert (await next_event(a, DeliveryFailed)).tag == 3
        with pytest.raises(NotConnectedError):
            a.send(b.peer_id, b"hello", tag=4)
