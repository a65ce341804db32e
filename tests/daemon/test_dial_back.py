"""A peer dials back: only where the asker is, only now and then, and only as far as the proof."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgpack
import pytest
import trio
from multiaddr import Multiaddr

from bbnode.daemon.network import dial_back
from bbnode.daemon.network.dial_back import DialBackRefused, DialResult, may_dial
from bbnode.transport.base import ConnectionOpened
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def asker(
    *, announce: list[str] | None = None
) -> AsyncIterator[tuple[Libp2pTransport, dial_back.Ask, Libp2pTransport]]:
    """A node, its way of asking, and the one that it is connected with."""
    other = Libp2pTransport(Identity.generate(), listen=[Multiaddr(LOOPBACK)])
    dial_back.register(other)
    one = Libp2pTransport(
        Identity.generate(),
        listen=[Multiaddr(LOOPBACK)],
        announce=[Multiaddr(text) for text in announce or ()],
    )
    ask = dial_back.register(one)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        with trio.fail_after(PATIENCE_S):
            for backend in (other, one):
                await nursery.start(backend.run)
            one.keep_connected(other.peer_id, other.listen_addresses())
            for backend in (one, other):
                while not isinstance(await backend.events.receive(), ConnectionOpened):
                    pass
            yield one, ask, other
            for backend in (one, other):
                await backend.stop(1.0)


async def test_a_peer_reaches_what_is_announced() -> None:
    async with asker() as (one, ask, other):
        told = await ask(None)
        links = len(other.peers())
        again = await _fails(ask, other)
    assert told.peer == other.peer_id
    assert told.seen_at.startswith("/ip4/127.0.0.1/tcp/")
    assert [(t.outcome, t.address) for t in told.tried] == [
        (DialResult.REACHED, one.listen_addresses()[0])
    ]
    assert links == 1  # what looks makes no connection
    assert "too soon" in again


async def test_what_nobody_answers_at_and_what_is_somebody_elses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"
        elsewhere = f"/ip4/192.0.2.1/tcp/{mute.getsockname()[1]}"
        async with asker(announce=[nobody, elsewhere]) as (_, ask, _other):
            told = await ask(None)
    assert [t.outcome for t in told.tried] == [DialResult.FAILED, DialResult.SKIPPED]
    assert "refused" in told.tried[0].detail


async def test_another_peer_at_that_address_is_no_success() -> None:
    async with asker() as (_, _ask, other), asker() as (stranger, _, _):
        (taken,) = stranger.listen_addresses()
        with pytest.raises(dial_back.DialError):
            await other.probe(taken, other.peer_id)
        await other.probe(taken, stranger.peer_id)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        msgpack.packb(1),
        msgpack.packb([1]),
        msgpack.packb([b"not an address"]),
        msgpack.packb([Multiaddr(LOOPBACK).to_bytes()] * 9),
        b"x" * 5000,
    ],
)
async def test_malformed_requests_reset_their_stream_alone(request_bytes: bytes) -> None:
    async with asker() as (one, ask, other):
        assert await _answer_to(one, other, request_bytes) == b""
        assert (await ask(other.peer_id)).tried


async def test_who_has_no_peers_is_told_so() -> None:
    ask = dial_back.register(Libp2pTransport(Identity.generate(), listen=[]))
    with pytest.raises(DialBackRefused, match="no peer is connected directly"):
        await ask(None)


@pytest.mark.parametrize(
    ("address", "seen", "allowed"),
    [
        ("/ip4/203.0.113.5/tcp/1", "/ip4/203.0.113.5/tcp/9", True),
        ("/ip4/8.8.8.8/tcp/1", "/ip4/8.8.4.4/tcp/9", False),
        ("/ip4/10.0.0.2/tcp/1", "/ip4/8.8.4.4/tcp/9", False),
        ("/ip4/10.0.0.2/tcp/1", "/ip4/192.168.1.9/tcp/9", True),
        ("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.9/tcp/9", False),
        ("/ip4/169.254.169.254/tcp/80", "/ip4/192.168.1.9/tcp/9", False),
        ("/ip4/10.0.0.2/tcp/1", "/ip4/127.0.0.1/tcp/9", False),
        ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/9", True),
        ("/ip6/::ffff:127.0.0.1/tcp/1", "/ip4/192.168.1.9/tcp/9", False),
        ("/ip4/0.0.0.0/tcp/1", "/ip4/192.168.1.9/tcp/9", False),
        ("/dns4/example.org/tcp/1", "/ip4/192.168.1.9/tcp/9", False),
        ("/ip4/8.8.8.8/udp/1", "/ip4/8.8.8.8/tcp/9", False),
    ],
)
def test_nobody_is_made_to_dial_somebody_else(address: str, seen: str, allowed: bool) -> None:
    assert may_dial(Multiaddr(address), Multiaddr(seen)) is allowed


async def _answer_to(one: Libp2pTransport, other: Libp2pTransport, request_bytes: bytes) -> bytes:
    """What comes back; nothing when the stream is reset."""
    async with one.open_stream(other.peer_id, dial_back.DIAL_BACK_PROTOCOL) as stream:
        with contextlib.suppress(StreamBrokenError):
            await stream.write(request_bytes)
            await stream.end()
            return await stream.read(100)
    return b""


async def _fails(ask: dial_back.Ask, other: Libp2pTransport) -> str:
    with pytest.raises(DialBackRefused) as caught:
        await ask(other.peer_id)
    return str(caught.value)
