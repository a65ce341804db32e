"""Circuits beside py-libp2p as it comes: as a relay, as who dials, and as who is reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID, CircuitV2Protocol
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.transport import Identity
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.limits import RelaySettings
from tests.patience import PATIENCE_S
from tests.transport.plain import plain_host, plain_running
from tests.transport.test_libp2p_backend import LOOPBACK, next_event
from tests.transport.test_relay import QUICK, join, payload, until

OPEN = replace(QUICK, foreign_hosts=True)


def make(name: str, *, listen=(), **settings: Any) -> Libp2pTransport:
    """A node that takes guests; `py_libp2p` says whether it has their host, where it is given."""
    own = {"py_libp2p": settings.pop("py_libp2p")} if "py_libp2p" in settings else {}
    return Libp2pTransport(
        Identity.from_seed(name.encode() * 32),
        listen=list(listen),
        relay=RelaySettings(**settings),
        limits=OPEN,
        **own,
    )


@dataclass
class Plain:
    """A host of py-libp2p with its own circuit relay."""

    host: Any
    transport: CircuitV2Transport

    @property
    def id(self) -> ID:
        return self.host.get_id()

    async def connect(self, node: Libp2pTransport) -> None:
        (address,) = node.listen_addresses()
        await self.host.connect(PeerInfo(of(node), [address]))

    async def ping(self, peer: ID) -> int:
        return len(await PingService(self.host).ping(peer, 3))


def of(node: Libp2pTransport) -> ID:
    return ID(node.peer_id.to_bytes())


@asynccontextmanager
async def plain(seed: bytes, roles: RelayRole, listen=()) -> AsyncIterator[Plain]:
    host = plain_host(seed * 32)
    is_hop = bool(roles & RelayRole.HOP)
    async with plain_running(host, list(listen)):
        protocol = CircuitV2Protocol(host, allow_hop=is_hop)
        async with background_trio_service(protocol):
            await protocol.event_started.wait()
            yield Plain(host, CircuitV2Transport(host, protocol, RelayConfig(roles=roles)))


# -- our relay -------------------------------------------------------------------------------


async def test_py_libp2p_reaches_a_node_through_our_relay(nursery, each_transport):
    r, b = make("r", listen=[LOOPBACK], serve=True), make("b", use=True)
    for node in (r, b):
        await nursery.start(node.run)
    await join([r], b)
    async with plain(b"p", RelayRole.CLIENT | RelayRole.STOP) as py:
        with trio.fail_after(PATIENCE_S):
            await py.connect(r)
            (address,) = b.listen_addresses()
            await py.transport.dial(address)
            assert await py.ping(of(b)) == 3
    # Its own place among the reservations, as a guest.
    assert r.counters()["relay.circuits_opened"] == 1
    assert b.counters()["foreign.taken"] == 1


async def test_a_node_reaches_py_libp2p_through_our_relay(nursery):
    r = make("r", listen=[LOOPBACK], serve=True)
    b = make("b", use=True, py_libp2p=True)
    for node in (r, b):
        await nursery.start(node.run)
    await join([r], b)
    async with plain(b"p", RelayRole.CLIENT | RelayRole.STOP) as py:
        with trio.fail_after(PATIENCE_S):
            await py.connect(r)
            stream = await py.host.new_stream(of(r), [PROTOCOL_ID])
            assert await py.transport._make_reservation(stream, of(r))
            await stream.close()
            address = Multiaddr(f"{r.listen_addresses()[0]}/p2p-circuit/p2p/{py.id}")
            # Its `connect` leaves relayed addresses out, as a host without relays.
            host = b.libp2p_host
            await host.get_network().dial_addr(address, py.id)
            assert len(await PingService(host).ping(py.id, 3)) == 3
    assert r._relay_server._reserved.keys() >= {b.peer_id}
    assert r.counters()["relay.circuits_opened"] == 1


async def test_guests_have_a_part_of_the_reservations(nursery):
    r = make("r", listen=[LOOPBACK], serve=True, reservations=4)
    await nursery.start(r.run)
    roles = RelayRole.CLIENT | RelayRole.STOP
    async with plain(b"p", roles) as first, plain(b"q", roles) as second:
        with trio.fail_after(PATIENCE_S):
            taken = []
            for py in (first, second):
                await py.connect(r)
                stream = await py.host.new_stream(of(r), [PROTOCOL_ID])
                taken.append(await py.transport._make_reservation(stream, of(r)))
    assert taken == [True, False]
    assert r.counters()["relay.refused"] == 1


async def test_where_guests_are_not_wanted_they_do_not_reserve(nursery):
    r = Libp2pTransport(
        Identity.from_seed(b"r" * 32),
        listen=[LOOPBACK],
        relay=RelaySettings(serve=True),
        limits=replace(QUICK, hello_timeout_s=1.0, dialled_hello_s=1.0),
    )
    await nursery.start(r.run)
    async with plain(b"p", RelayRole.CLIENT | RelayRole.STOP) as py:
        with trio.fail_after(PATIENCE_S):
            await py.connect(r)
            stream = await py.host.new_stream(of(r), [PROTOCOL_ID])
            assert not await py.transport._make_reservation(stream, of(r))
    assert r.counters()["relay.reserved"] == 0


# -- a relay of py-libp2p --------------------------------------------------------------------


async def test_two_nodes_meet_through_a_relay_of_py_libp2p(nursery, each_transport):
    async with plain(b"p", RelayRole.HOP, [LOOPBACK]) as py:
        (there,) = py.host.get_addrs()
        relay = Multiaddr(str(there))
        a, b = make("a", use=True, through=(relay,)), make("b", use=True)
        for node in (a, b):
            await nursery.start(node.run)
        await until(lambda: len(a.listen_addresses()) == 1)
        assert str(a.listen_addresses()[0]) == f"{relay}/p2p-circuit/p2p/{a.peer_id}"
        b.keep_connected(a.peer_id, a.listen_addresses())
        opened = await next_event(b, ConnectionOpened)
        assert is_relayed(opened.address)
        await next_event(a, ConnectionOpened)
        for sender, receiver in ((a, b), (b, a)):
            data = payload(2**20)
            sender.send(receiver.peer_id, data, tag=1)
            with trio.fail_after(PATIENCE_S):
                assert bytes((await next_event(receiver, EnvelopeReceived)).data) == data
        # The relay was dialled for the circuit alone, and goes with it.
        b.forget(a.peer_id)
        b.disconnect(a.peer_id)
        await until(lambda: b.metrics().foreign == 0)
        for node in (a, b):
            counters = node.counters()
            assert not any(counters[f"relay.{each}"] for each in ("malformed", "another_peer"))
