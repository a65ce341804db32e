"""A peer dials back: only where the asker is, only now and then, and only as far as the proof."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgpack
import pytest
import trio
from libp2p.host.autonat import AutoNATService
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.daemon.network import dial_back
from bbnode.daemon.network.autonat import AUTONAT_PROTOCOL, AutonatStatus
from bbnode.daemon.network.dial_back import DialBackRefused, DialResult, may_dial
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S
from tests.transport.plain import plain_dial, plain_host, plain_running

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def joined(one: Libp2pTransport, other: Libp2pTransport) -> AsyncIterator[None]:
    """Run both, connected with each other."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        with trio.fail_after(PATIENCE_S):
            for backend in (other, one):
                await nursery.start(backend.run)
            one.keep_connected(other.peer_id, other.listen_addresses())
            for backend in (one, other):
                while not isinstance(await backend.events.receive(), ConnectionOpened):
                    pass
            yield
            for backend in (one, other):
                await backend.stop(1.0)


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
    async with joined(one, other):
        yield one, ask, other


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


# -- AutoNAT, as other implementations speak it --------------------------------------------------


@asynccontextmanager
async def autonat(*, listen: str = LOOPBACK) -> AsyncIterator[tuple[AutoNATService, Any, Any]]:
    """py-libp2p's own client on one node, and the node that it asks."""
    other = Libp2pTransport(Identity.generate(), listen=[Multiaddr(LOOPBACK)], py_libp2p=True)
    dial_back.register(other)
    one = Libp2pTransport(Identity.generate(), listen=[Multiaddr(listen)], py_libp2p=True)
    async with joined(one, other):
        service = AutoNATService(one.libp2p_host, serve=False)
        yield service, ID(other.peer_id.to_bytes()), one


async def test_py_libp2ps_client_is_told_where_it_is_reached() -> None:
    async with autonat() as (service, other, one):
        status, address = await service.query_server(other)
        assert (status, Multiaddr(address)) == (AutonatStatus.OK, one.listen_addresses()[0])
        # Now and then alone.
        status, address = await service.query_server(other)
        assert (status, address) == (AutonatStatus.DIAL_REFUSED, None)


async def test_py_libp2ps_client_is_told_that_it_is_not_reached() -> None:
    """The two are connected: py-libp2p's own service would say that it reached the asker."""
    async with autonat() as (service, other, _):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = Multiaddr(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
            status, address = await service.query_server(other, [nobody.to_bytes()])
        assert (status, address) == (AutonatStatus.DIAL_ERROR, None)


async def test_py_libp2ps_own_service_says_yes_to_everybody() -> None:
    """The reason for which ours answers; once this fails, look at theirs again."""
    server, client = plain_host(b"s" * 32), plain_host(b"c" * 32)
    AutoNATService(server)
    with trio.fail_after(PATIENCE_S):
        async with plain_running(server, [Multiaddr(LOOPBACK)]), plain_running(client, []):
            where = server.get_transport_addrs()[0]
            await plain_dial(client, where, PeerId.from_bytes(server.get_id().to_bytes()))
            asking = AutoNATService(client, serve=False)
            nobody = Multiaddr("/ip4/127.0.0.1/tcp/9").to_bytes()
            assert await asking.query_server(server.get_id(), [nobody]) == (
                AutonatStatus.OK,
                nobody,
            )


async def test_nobody_is_dialled_for_somebody_else() -> None:
    async with autonat() as (service, other, one):
        elsewhere = Multiaddr("/ip4/192.0.2.1/tcp/4001")
        status, _ = await service.query_server(other, [elsewhere.to_bytes()])
        assert status == AutonatStatus.DIAL_REFUSED
        service.host.get_id = lambda: ID(Identity.generate().peer_id.to_bytes())
        status, _ = await service.query_server(other)
        assert status == AutonatStatus.BAD_REQUEST
        assert one.counters()["protocols.failed"] == 0


@pytest.mark.parametrize(
    "raw", [b"", b"\x80" * 6, b"\xff\xff\x7f", b"\x01\xff", b"\x02\x08\x01", b"\x03\x12\x01\xff"]
)
async def test_a_malformed_request_of_autonat_resets_its_stream_alone(raw: bytes) -> None:
    async with autonat() as (service, other, one):
        stream = await service.host.new_stream(other, [AUTONAT_PROTOCOL])
        if raw:
            await stream.write(raw)
        await stream.close()
        with pytest.raises(StreamError):
            await read_all(stream)
        status, _ = await service.query_server(other)
        assert status == AutonatStatus.OK
        assert one.peers()


async def read_all(stream: Any) -> None:
    while await stream.read(100):
        pass
