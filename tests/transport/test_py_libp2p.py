"""py-libp2p's host on our connections: what its services get, and what its habits cannot touch.

The letters S1 to S10 in names are what py-libp2p 0.8.1 does by itself: `docs/transport.md`.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from libp2p.abc import INotifee
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.host.ping import PingService
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamReset
from libp2p.tools.anyio_service import Service, background_trio_service
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_KNOWN_ADDRESSES,
    MAX_KNOWN_PEERS,
    MAX_KNOWN_PROTOCOLS,
    MAX_OTHER_STREAMS,
    MAX_PEER_RECORD_BYTES,
)
from bbnode.transport import (
    ConnectionOpened,
    EnvelopeReceived,
    Identity,
    NotSupportedError,
    TransportSetup,
    TransportWrapper,
    make_transport,
)
from bbnode.transport.errors import OTHER_KEY, Libp2pMissing, StreamBrokenError
from bbnode.transport.libp2p.py_libp2p.peerstore import BoundedPeerStore
from bbnode.transport.libp2p.py_libp2p.swarm import NOTIFEE_S
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S
from tests.transport.hosts import ECHO, LOOPBACK, OurHost, dial, echoes
from tests.transport.plain import plain_dial, plain_host, plain_running

REVERSE = "/test/reverse/1"


async def until(reached) -> None:
    with trio.fail_after(PATIENCE_S):
        while not reached():
            await trio.lowlevel.checkpoint()


async def reverse(stream) -> None:
    """Give back the first part that comes, from its end to its beginning."""
    await stream.write((await stream.read(4096))[::-1])
    await stream.close()


def host(seed: int, **settings) -> OurHost:
    """A host of ours with py-libp2p's on its connections."""
    made = OurHost(seed, py_libp2p=True, **settings)
    made.py.set_stream_handler(REVERSE, reverse)
    return made


def where(our: OurHost) -> PeerInfo:
    """A host as py-libp2p is told of it."""
    return PeerInfo(our.py.get_id(), [our.address])


def swarm_of(our: OurHost) -> Swarm:
    return our.py.get_network()


async def reversed_by(asking, peer: ID) -> bytes:
    stream = await asking.new_stream(peer, ["/test/nobody/1", REVERSE])
    await stream.write(b"abc")
    return await stream.read(16)


async def reading(asking, peer: ID, protocol: str) -> None:
    await (await asking.new_stream(peer, [protocol])).read(1)


@asynccontextmanager
async def pair(**settings) -> AsyncIterator[tuple[OurHost, OurHost]]:
    """Two connected hosts, each in the Swarm of the other."""
    server, client = host(1, **settings), host(2, **settings)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            await dial(client, server)
            await until(lambda: swarm_of(server).connections and swarm_of(client).connections)
            yield server, client


# -- a host like any other -------------------------------------------------------------------


async def test_a_node_has_a_real_host_with_its_own_identity_and_addresses():
    async with pair() as (server, client):
        assert isinstance(server.py, BasicHost)
        assert isinstance(swarm_of(server), Swarm)
        assert server.py.get_id().to_bytes() == server.peer_id.to_bytes()
        assert server.py.get_addrs() == [Multiaddr(f"{server.address}/p2p/{server.peer_id}")]
        assert server.py.get_connected_peers() == [client.py.get_id()]
        (seen,) = swarm_of(server).get_connections()
        assert seen.get_connection_type() is ConnectionType.DIRECT
        assert seen.get_transport_addresses() == [server.connection.way]
        assert seen.muxed_conn.get_remote_address()[0] == "127.0.0.1"
        assert not seen.muxed_conn.is_initiator


async def test_both_speak_on_one_connection():
    async with pair() as (server, client):
        assert await echoes(client.connection)
        assert await reversed_by(client.py, server.py.get_id()) == b"cba"
        assert await reversed_by(server.py, client.py.get_id()) == b"cba"
        assert await PingService(client.py).ping(server.py.get_id(), ping_amt=3)
        assert len(server.connections) == len(client.connections) == 1


async def test_an_unpatched_py_libp2p_speaks_both_on_one_port():
    ours, plain = host(1), plain_host(b"p" * 32)
    with trio.fail_after(PATIENCE_S):
        async with ours.running([LOOPBACK]), plain_running(plain, [LOOPBACK]):
            await plain.connect(where(ours))
            assert await PingService(plain).ping(ours.py.get_id())
            assert await reversed_by(plain, ours.py.get_id()) == b"cba"
            stream = await plain.new_stream(ours.py.get_id(), [ECHO])
            await stream.write(b"same")
            assert await stream.read(4) == b"same"
            # It asks who we are, and we who it is, since a service is there.
            assert {ECHO, REVERSE} <= set(await protocols_of(plain, ours.py.get_id()))
            assert "/ipfs/ping/1.0.0" in await protocols_of(ours.py, plain.get_id())


async def protocols_of(asking, peer: ID) -> list[str]:
    store, found = asking.get_peerstore(), []

    def known() -> bool:
        with contextlib.suppress(Exception):
            found[:] = store.get_protocols(peer)
        return bool(found)

    await until(known)
    return found


async def test_a_host_of_ours_dials_for_py_libp2p():
    ours, plain = host(1), plain_host(b"p" * 32)
    plain.set_stream_handler(REVERSE, reverse)
    with trio.fail_after(PATIENCE_S):
        async with ours.running([]), plain_running(plain, [LOOPBACK]):
            await ours.py.connect(PeerInfo(plain.get_id(), plain.get_transport_addrs()))
            assert await reversed_by(ours.py, plain.get_id()) == b"cba"
            assert ours.connection.for_other
            await ours.py.disconnect(plain.get_id())
            await until(lambda: not ours.connections)


async def test_nobody_is_asked_who_it_is_before_a_service_wants_to_know():
    server, client = OurHost(1, py_libp2p=True), OurHost(2, py_libp2p=True)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            await dial(client, server)
            await until(lambda: swarm_of(client).connections)
            await trio.testing.wait_all_tasks_blocked()
            assert not client.py.get_peerstore().has_peer(server.py.get_id())
            client.py.set_stream_handler(REVERSE, reverse)
            assert ECHO in await protocols_of(client.py, server.py.get_id())


async def test_a_dht_and_gossip_of_three_with_an_unpatched_host_in_the_middle():
    """Neither end knows the other: what one puts, or says, comes through py-libp2p as it comes."""
    first, last, plain = host(1), host(2), plain_host(b"p" * 32)
    hosts = [first.py, plain, last.py]
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(2 * PATIENCE_S))
        for ours in (first, last):
            await stack.enter_async_context(ours.running([LOOPBACK]))
        await stack.enter_async_context(plain_running(plain, [LOOPBACK]))
        dhts = [KadDHT(each, DHTMode.SERVER) for each in hosts]
        gossips = [
            GossipSub(
                protocols=["/meshsub/1.1.0"],
                degree=3,
                degree_low=2,
                degree_high=4,
                heartbeat_interval=0.1,
                heartbeat_initial_delay=0.1,
            )
            for _ in hosts
        ]
        pubsubs = [Pubsub(*both) for both in zip(hosts, gossips, strict=True)]
        for n, service in enumerate([*dhts, *pubsubs, *gossips]):
            if hosts[n % 3] is plain:
                await stack.enter_async_context(background_trio_service(service))
            else:
                await hosts[n % 3].start_service(service)
        for ours in (first, last):
            await ours.py.connect(PeerInfo(plain.get_id(), plain.get_transport_addrs()))
            plain.get_peerstore().add_addrs(ours.py.get_id(), [ours.address], 3600)
        subscriptions = [await each.subscribe("news") for each in pubsubs]
        for dht, others in ((dhts[0], hosts[1:2]), (dhts[1], hosts[::2]), (dhts[2], hosts[1:2])):
            for other in others:
                await dht.add_peer(other.get_id())
        key = "/here-and-there"
        await dhts[0].put_value(key, b"found")
        assert await dhts[2].get_value(key) == b"found"
        assert await heard(pubsubs[0], subscriptions[2]) == b"news"
        assert await heard(pubsubs[2], subscriptions[0]) == b"news"
        # Before its services end: py-libp2p as it comes ends with a handler that fails.
        for ours in (first, last):
            await ours.py.disconnect(plain.get_id())
        await until(lambda: not plain.get_network().connections)


async def heard(pubsub, subscription) -> bytes:
    """What the other end hears; what is said before a mesh is there is lost."""
    while True:
        await pubsub.publish("news", b"news")
        with trio.move_on_after(0.2):
            return (await subscription.get()).data


# -- who is there ----------------------------------------------------------------------------


async def test_an_address_that_names_another_peer_is_not_dialled_for_one():
    async with pair() as (server, client):
        third = host(3)
        address = Multiaddr(f"{server.address}/p2p/{server.peer_id}")
        with pytest.raises(SwarmException, match="Peer ID mismatch"):
            await swarm_of(client).dial_addr(address, third.py.get_id())
        client.py.get_peerstore().add_addrs(third.py.get_id(), [address], 60)
        with pytest.raises(SwarmException):
            await client.py.new_stream(third.py.get_id(), [REVERSE])
        assert client.py.get_connected_peers() == [server.py.get_id()]


async def test_another_peer_at_an_address_is_refused():
    async with pair() as (server, client):
        third = host(3)
        with pytest.raises(SwarmException) as caught:
            await swarm_of(client).dial_addr(server.address, third.py.get_id())
        assert OTHER_KEY in str(caught.value.__cause__)
        assert len(client.connections) == 1


async def test_an_address_without_a_peer_is_no_address_of_the_plugin():
    async with pair() as (server, client):
        (plugin,) = swarm_of(client).transport_manager.get_transports()
        with pytest.raises(Exception, match="names no peer"):
            await plugin.dial(server.address)
        assert not plugin.can_dial(Multiaddr("/ip4/127.0.0.1/udp/1/quic-v1"))
        assert not plugin.can_dial(Multiaddr("/ip4/127.0.0.1/tcp/1/ws"))
        assert not await swarm_of(client).listen(LOOPBACK)


async def test_a_raw_connection_is_secured_like_any_other():
    """As a relay of py-libp2p brings them; whoever is there has to prove it."""
    server, client, third = host(1), host(2), host(3)
    with trio.fail_after(PATIENCE_S):
        async with server.running([]), client.running([]):
            network, other = swarm_of(client), swarm_of(server)
            for asked, is_right in ((server, True), (third, False)):
                ends = [Pipe(each) for each in trio.testing.memory_stream_pair()]
                raws = [RawConnection(end, n == 0) for n, end in enumerate(ends)]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accepted, other, raws[1])
                    if is_right:
                        await network.upgrade_outbound_raw_conn(raws[0], asked.py.get_id())
                        await until(lambda: other.connections)
                        assert await reversed_by(client.py, server.py.get_id()) == b"cba"
                        await client.py.disconnect(server.py.get_id())
                        await until(lambda: not server.connections and not client.connections)
                    else:
                        with pytest.raises(SwarmException, match=OTHER_KEY):
                            await network.upgrade_outbound_raw_conn(raws[0], asked.py.get_id())
                    nursery.cancel_scope.cancel()
                await until(lambda end=ends[0]: end.closed)


async def accepted(network: Swarm, raw: RawConnection) -> None:
    with contextlib.suppress(SwarmException):
        await network.upgrade_inbound_raw_conn(raw, Multiaddr("/ip4/127.0.0.1/tcp/1"))


class Pipe:
    """A stream of trio, as py-libp2p reads and writes one."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self.closed = False

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        self.closed = True
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1


# -- admission -------------------------------------------------------------------------------


async def test_py_libp2p_hears_of_a_connection_once_its_peer_is_admitted():
    """No notifee, no stream and no dial of it before that; what came meanwhile waits."""
    answer, asked = trio.Event(), trio.Event()

    async def admits(_connection) -> bool:
        asked.set()
        await answer.wait()
        return True

    server, client = host(1), host(2)
    server.other._admits = admits
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            await dial(client, server)
            await until(lambda: swarm_of(client).connections)
            stream = await client.py.new_stream(server.py.get_id(), [REVERSE])
            await stream.write(b"abc")
            await asked.wait()
            assert server.py.get_connected_peers() == []
            # Our own protocols have their own rules.
            assert await echoes(client.connection)
            answer.set()
            assert await stream.read(8) == b"cba"


@pytest.mark.parametrize("dials", ["it", "we"])
async def test_py_libp2p_never_gets_the_connection_of_a_peer_that_is_not_admitted(dials):
    async def admits(_connection) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    server, client = host(1), host(2)
    (client if dials == "we" else server).other._admits = admits
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            if dials == "we":
                with pytest.raises(SwarmException) as caught:
                    await client.py.connect(where(server))
                (failure,) = caught.value.__cause__.errors
                assert "not admitted" in str(failure.__cause__)
                assert client.connections == set()
            else:
                await dial(client, server)
                await until(lambda: swarm_of(client).connections)
                with pytest.raises((StreamError, StreamFailure)):
                    await reversed_by(client.py, server.py.get_id())
                assert await echoes(client.connection)
                await until(lambda: server.counters.snapshot()["protocols.refused"])
                assert server.py.get_connected_peers() == []


async def test_streams_of_services_are_bounded_and_others_go_on():
    async def hold(stream) -> None:
        await stream.read(1)

    async with pair(max_streams=4 * MAX_OTHER_STREAMS) as (server, client):
        server.py.set_stream_handler("/test/hold/1", hold)
        for _ in range(MAX_OTHER_STREAMS):
            await client.py.new_stream(server.py.get_id(), ["/test/hold/1"])
        await until(lambda: len(server.other.streams()) >= MAX_OTHER_STREAMS)
        with pytest.raises((StreamError, StreamFailure)):
            await reading(client.py, server.py.get_id(), "/test/hold/1")
        assert server.counters.snapshot()["protocols.refused"] == 1
        assert await echoes(client.connection)


# -- what a handler or a notifee does --------------------------------------------------------


async def test_s2_an_exception_in_a_handler_ends_its_stream_alone():
    async def fail(_stream) -> None:
        raise ValueError("on purpose")

    async with pair() as (server, client):
        server.py.set_stream_handler("/test/fail/1", fail)
        other = await client.py.new_stream(server.py.get_id(), [REVERSE])
        stream = await client.py.new_stream(server.py.get_id(), ["/test/fail/1"])
        with pytest.raises(StreamError):
            await stream.read(1)
        await other.write(b"abc")
        assert await other.read(8) == b"cba"
        assert server.counters.snapshot()["streams.handler_errors"] == 1
        await until(lambda: not server.other.streams())


async def test_s2_bytes_that_are_no_text_end_a_negotiation_alone():
    async with pair() as (server, client):
        stream = client.connection.muxer.open_stream()
        await stream.write(b"\x04\xff\xfe\xfd\n")
        with pytest.raises(StreamBrokenError, match="reset"):
            await to_the_end(stream)
        assert await reversed_by(client.py, server.py.get_id()) == b"cba"


async def to_the_end(stream) -> None:
    while await stream.read():
        pass


class Notifee(INotifee):
    """A notifee that does one and the same, whatever happens."""

    def __init__(self, does) -> None:
        self._does = does

    async def opened_stream(self, network, stream) -> None:
        await self._does()

    async def closed_stream(self, network, stream) -> None:
        await self._does()

    async def connected(self, network, conn) -> None:
        await self._does()

    async def disconnected(self, network, conn) -> None:
        await self._does()

    async def listen(self, network, multiaddr) -> None:
        await self._does()

    async def listen_close(self, network, multiaddr) -> None:
        await self._does()


async def fails() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("does", [fails, trio.sleep_forever])
async def test_a_notifee_that_fails_or_hangs_touches_no_connection(does):
    server, client = host(1), host(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            # What it is told at first is told to all.
            swarm_of(server).register_notifee(Notifee(does))
            await dial(client, server)
            assert await echoes(client.connection)
            if does is fails:
                assert await reversed_by(client.py, server.py.get_id()) == b"cba"


async def test_a_notifee_that_hangs_is_left_after_a_while(autojump_clock, caplog):
    swarm = swarm_of(host(1))
    heard = []

    async def hears() -> None:
        heard.append(trio.current_time())

    swarm.register_notifee(Notifee(trio.sleep_forever))
    swarm.register_notifee(Notifee(hears))
    began = trio.current_time()
    await swarm.notify_listen_close(LOOPBACK)
    assert heard == [began]
    assert trio.current_time() - began == pytest.approx(NOTIFEE_S)
    assert "a notifee of py-libp2p took over 30 s for listen_close" in caplog.text


async def test_a_service_that_fails_ends_alone():
    class Failing(Service):
        async def run(self) -> None:
            await fails()

    async with pair() as (server, client):
        await server.py.start_service(Failing())
        await trio.testing.wait_all_tasks_blocked()
        assert await reversed_by(client.py, server.py.get_id()) == b"cba"
        with pytest.raises(NotSupportedError, match="start the node first"):
            await OurHost(4, py_libp2p=True).py.start_service(Failing())


async def test_a_node_goes_on_without_a_host_that_has_failed(monkeypatch, caplog):
    server, client = host(1), host(2)
    crash = trio.Event()

    async def run(_swarm) -> None:
        await crash.wait()
        raise ValueError("on purpose")

    monkeypatch.setattr(type(swarm_of(server).connection_pruner), "start", lambda _: crash.wait())
    with trio.fail_after(PATIENCE_S):
        async with client.running([LOOPBACK]):
            monkeypatch.setattr(Swarm, "run", run)
            swarm_of(server).event_background_nursery_created.set()
            async with server.running([]):
                connection = await dial(server, client)
                crash.set()
                await until(lambda: server.counters.snapshot()["libp2p.failed"])
                assert await echoes(connection)
                assert await echoes(await dial(server, client))
                # What is left of it refuses, and waits for nothing.
                client.py.set_stream_handler(REVERSE, reverse)
                with pytest.raises(SwarmException):
                    await server.py.new_stream(client.py.get_id(), [REVERSE])
                await until(lambda: swarm_of(client).connections)
                with pytest.raises((StreamError, StreamFailure)):
                    await reading(client.py, server.py.get_id(), REVERSE)
                assert not server.other.streams()
    assert "goes on without its services" in caplog.text


# -- Swarm's own habits ----------------------------------------------------------------------


async def test_s3_an_accepted_connection_holds_no_place_of_swarms():
    async with pair() as (server, _client):
        limiter = swarm_of(server)._inbound_limiter
        assert limiter.borrowed_tokens == 0
        assert limiter.total_tokens > 2**30


async def unread_stream(server, client):
    """A stream to a handler that reads nothing."""

    async def hold(_stream) -> None:
        await trio.sleep_forever()

    server.py.set_stream_handler("/test/hold/1", hold)
    return await client.py.new_stream(server.py.get_id(), ["/test/hold/1"])


async def test_s4_a_cancelled_write_leaves_the_connection_whole():
    async with pair() as (server, client):
        stream = await unread_stream(server, client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on, stream)
            await until(lambda: stream.muxed_stream.stream.is_writing)
            nursery.cancel_scope.cancel()
        assert await reversed_by(client.py, server.py.get_id()) == b"cba"


async def write_on(stream) -> None:
    while True:
        await stream.write(bytes(65_536))


async def test_s5_a_blocked_writer_does_not_hold_up_the_end():
    async with pair() as (server, client):
        blocked = await unread_stream(server, client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broken, blocked)
            await until(lambda: blocked.muxed_stream.stream.is_writing)
            await client.py.disconnect(server.py.get_id())
        await until(lambda: not server.connections and not swarm_of(server).connections)


async def broken(stream) -> None:
    with pytest.raises(StreamError):
        await write_on(stream)


async def test_s7_cancelled_dials_leave_nothing():
    server, client = host(1), host(2)
    accepted_ones = []
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = silent[0].socket.getsockname()[1]
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            for _ in range(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(
                        swarm_of(client).dial_addr,
                        Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"),
                        server.py.get_id(),
                    )
                    accepted_ones.append(await silent[0].accept())
                    nursery.cancel_scope.cancel()
            assert client.connections == set()
            assert swarm_of(client)._global_dial_limiter.borrowed_tokens == 0
            await client.py.connect(where(server))
    for each in (*accepted_ones, *silent):
        await each.aclose()


async def test_s8_a_failed_connect_does_not_keep_us_from_dialling():
    server, client = host(1), host(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            gone = Multiaddr("/ip4/127.0.0.1/tcp/1")
            with pytest.raises(SwarmException):
                await client.py.connect(PeerInfo(server.py.get_id(), [gone]))
            await dial(client, server)
            await until(lambda: swarm_of(client).connections)
            assert await reversed_by(client.py, server.py.get_id()) == b"cba"


async def test_s9_a_sender_waits_for_who_does_not_read():
    async def hold(_stream) -> None:
        await trio.sleep_forever()

    async with pair() as (server, client):
        server.py.set_stream_handler("/test/hold/1", hold)
        stream = await client.py.new_stream(server.py.get_id(), ["/test/hold/1"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on, stream)
            await until(lambda: stream.muxed_stream.stream.is_writing)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert server.connection.unread_bytes() <= 256 * 1024
            nursery.cancel_scope.cancel()


async def test_s10_nobody_is_dialled_unasked_and_nobody_is_closed():
    server, client = host(1), host(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([LOOPBACK]):
            # More of one peer than Swarm's own bound.
            for _ in range(6):
                await dial(client, server)
            for each in (server, client):
                await until(lambda each=each: len(swarm_of(each).get_connections()) == 6)
            for each in (server, client):
                network = swarm_of(each)
                network._schedule_prune()
                await network.connection_pruner.maybe_prune_connections()
                await network.auto_connector.maybe_connect()
            assert len(server.connections) == len(client.connections) == 6
            await client.py.disconnect(server.py.get_id())
            await until(lambda: not server.connections)
            swarm_of(client).peerstore.add_addrs(server.py.get_id(), [server.address], 60)
            await swarm_of(client).auto_connector.maybe_connect()
            await trio.testing.wait_all_tasks_blocked()
            assert server.connections == client.connections == set()


async def test_a_connection_that_has_ended_is_gone_from_swarm():
    async with pair() as (server, client):
        stream = await client.py.new_stream(server.py.get_id(), [REVERSE])
        client.connection.close()
        for each in (server, client):
            await until(lambda each=each: not swarm_of(each).connections)
            assert not each.other._connections
        with pytest.raises(StreamError):
            await stream.read(1)


async def test_a_lent_stream_ends_and_breaks_as_py_libp2p_expects():
    async with pair() as (server, client):
        stream = (await client.py.new_stream(server.py.get_id(), [REVERSE])).muxed_stream
        assert await stream.read(0) == b""
        stream.set_deadline(5)
        with pytest.raises(ValueError, match="deadline"):
            stream.set_deadline(-1)
        await stream.close()
        with pytest.raises(MuxedStreamClosed):
            await stream.write(b"more")
        other = (await client.py.new_stream(server.py.get_id(), [REVERSE])).muxed_stream
        async with other:
            await other.reset()
        assert other.is_closed
        for call in (other.read(1), other.write(b"x")):
            with pytest.raises(MuxedStreamReset):
                await call


# -- what is remembered of peers -------------------------------------------------------------


def peer_number(n: int) -> ID:
    return ID(b"\x00\x24\x08\x01\x12\x20" + n.to_bytes(32, "big"))


def test_what_peers_say_of_themselves_is_bounded():
    key = create_new_key_pair(b"s" * 32)
    own = ID.from_pubkey(key.public_key)
    store = BoundedPeerStore(own, lambda peer: peer == peer_number(0))
    store.add_key_pair(own, key)
    for n in range(MAX_KNOWN_PEERS + 10):
        store.add_addrs(peer_number(n), [Multiaddr("/ip4/192.0.2.1/tcp/1")], 60)
    assert len(store.peer_ids()) == MAX_KNOWN_PEERS
    # py-libp2p's own forgets itself first, for it has no addresses.
    assert store.privkey(own) == key.private_key
    assert store.has_peer(peer_number(0))
    assert not store.has_peer(peer_number(1))
    assert store.has_peer(peer_number(MAX_KNOWN_PEERS + 9))
    many = [Multiaddr(f"/ip4/192.0.2.1/tcp/{n}") for n in range(1, 1000)]
    for each in many:
        store.add_addr(peer_number(0), each, 60)
    assert len(store.addrs(peer_number(0))) == MAX_KNOWN_ADDRESSES
    protocols = [f"/p/{n}" for n in range(1000)]
    for add in (store.set_protocols, store.add_protocols):
        add(peer_number(0), ["/" + "x" * 5000, *protocols])
        assert len(store.get_protocols(peer_number(0))) == MAX_KNOWN_PROTOCOLS
        assert store.get_protocols(peer_number(0))[0] == "/p/0"


async def test_who_says_too_much_of_itself_is_remembered_within_bounds():
    ours, plain = host(1), plain_host(b"p" * 32)
    for n in range(5 * MAX_KNOWN_PROTOCOLS):
        plain.set_stream_handler(f"/test/many/{n}", reverse)
    with trio.fail_after(PATIENCE_S):
        async with ours.running([LOOPBACK]), plain_running(plain, []):
            await plain_dial(plain, ours.address, ours.peer_id)
            known = await protocols_of(ours.py, plain.get_id())
            assert len(known) == MAX_KNOWN_PROTOCOLS
            # What a service asks of it goes on.
            plain.set_stream_handler(REVERSE, reverse)
            assert await reversed_by(ours.py, plain.get_id()) == b"cba"


def test_a_record_that_is_too_large_is_not_kept():
    key = create_new_key_pair(b"s" * 32)
    own = ID.from_pubkey(key.public_key)
    store = BoundedPeerStore(peer_number(0), lambda _: False)
    many = [Multiaddr(f"/ip4/192.0.2.1/tcp/{n}") for n in range(1, 3000)]
    large = create_signed_peer_record(own, many, key.private_key)
    assert len(large.marshal_envelope()) > MAX_PEER_RECORD_BYTES
    assert not store.consume_peer_record(large, 60)
    assert store.consume_peer_record(create_signed_peer_record(own, many[:3], key.private_key), 60)
    assert len(store.addrs(own)) == 3


# -- transports ------------------------------------------------------------------------------


def made(name: str, seed: bytes, **settings):
    identity = Identity.from_seed(seed * 32)
    return make_transport(name, TransportSetup(identity=identity, listen=(LOOPBACK,), **settings))


async def test_a_nodes_transport_carries_envelopes_and_services_on_one_connection(nursery):
    a, b = made("libp2p", b"a"), made("libp2p", b"b")
    for each in (a, b):
        each.libp2p_host.set_stream_handler(REVERSE, reverse)
        await nursery.start(each.run)
    a.keep_connected(b.peer_id, b.listen_addresses())
    with trio.fail_after(PATIENCE_S):
        while not isinstance(await a.events.receive(), ConnectionOpened):
            pass
        a.send(b.peer_id, b"hello", tag=1)
        while not isinstance(event := await b.events.receive(), EnvelopeReceived):
            pass
        assert bytes(event.data) == b"hello"
        await until(lambda: a.libp2p_host.get_connected_peers())
        assert await reversed_by(a.libp2p_host, b.libp2p_host.get_id()) == b"cba"
        assert await reversed_by(TransportWrapper(b).libp2p_host, a.libp2p_host.get_id()) == b"cba"
        assert a.metrics().connections == 1
        assert b.libp2p_host.get_addrs() == b.listen_addresses()
        await a.stop(1)
        await b.stop(1)


@pytest.mark.parametrize("name", ["lean", "memory"])
def test_a_transport_without_it_says_so(name):
    setup = TransportSetup(identity=Identity.generate())
    with pytest.raises(NotSupportedError, match=r"network\.transport has to be libp2p"):
        _ = make_transport(name, setup).libp2p_host


async def test_a_service_that_dials_a_node_gets_a_connection_that_is_admitted(nursery):
    a, b = made("libp2p", b"a"), made("libp2p", b"b")
    for each in (a, b):
        each.libp2p_host.set_stream_handler(REVERSE, reverse)
        await nursery.start(each.run)
    with trio.fail_after(PATIENCE_S):
        info = PeerInfo(b.libp2p_host.get_id(), [b.listen_addresses()[0].decapsulate_code(0x01A5)])
        await a.libp2p_host.connect(info)
        assert await reversed_by(a.libp2p_host, b.libp2p_host.get_id()) == b"cba"
        assert a.counters()["links.opened"] == 1
        await a.stop(1)
        await b.stop(1)


@pytest.mark.parametrize("listens", [False, True])
async def test_plaintext_and_other_muxers_are_refused_with_it_too(listens):
    """S1: what the plug-in offers is Noise and Yamux, whatever py-libp2p has."""
    ours = host(1)
    plain = plain_host(b"p" * 32)
    plain.get_network().upgrader.security_multistream.transports.clear()
    with trio.fail_after(PATIENCE_S):
        async with (
            ours.running([LOOPBACK] if not listens else []),
            plain_running(plain, [LOOPBACK] if listens else []),
        ):
            to = plain.get_transport_addrs()[0] if listens else ours.address
            dials = (
                swarm_of(ours).dial_addr(to, plain.get_id())
                if listens
                else plain_dial(plain, to, ours.peer_id)
            )
            with pytest.raises(SwarmException):
                await dials
            assert ours.connections == set()


# -- what is imported ------------------------------------------------------------------------

UNTOUCHED = """
import logging, sys
{code}
assert "libp2p" not in sys.modules
assert logging.getLogger().handlers == [], logging.getLogger().handlers
"""
LEAN = """
from bbnode.transport import Identity, TransportSetup, make_transport
make_transport("lean", TransportSetup(identity=Identity.generate()))
"""


@pytest.mark.parametrize(
    "code",
    [
        "import bbnode; bbnode.open, bbnode.connect, bbnode.aio.open, bbnode.on_trio.open",
        "import bbnode.cli.main",
        "import bbnode.daemon.lifecycle.app",
        "import bbnode.daemon.join.dial",
        "import bbnode.transport.libp2p.transport",
        LEAN,
    ],
)
def test_who_makes_no_such_transport_does_not_import_it(code):
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED.format(code=code)], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_what_only_certificates_of_the_web_need_is_loaded_when_it_is_used():
    code = """
import sys
import bbnode.transport.libp2p.py_libp2p.host
assert not {each.partition(".")[0] for each in sys.modules} & {"httpx", "requests", "urllib3"}
from libp2p.security.tls.autotls import acme
import requests
assert acme.requests is not requests
assert acme.requests.get is requests.get
assert acme.httpx.AsyncClient is sys.modules["httpx"].AsyncClient
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_the_logging_of_who_embeds_a_node_is_left_alone():
    code = """
import logging, trio
from tests.transport.hosts import *
async def main():
    a, b = (OurHost(n, py_libp2p=True) for n in (1, 2))
    async with a.running([LOOPBACK]), b.running([]):
        await dial(b, a)
        while not b.py.get_connected_peers():
            await trio.lowlevel.checkpoint()
        await b.py.disconnect(a.py.get_id())
        while b.py.get_connected_peers() or a.connections:
            await trio.lowlevel.checkpoint()
trio.run(main)
assert logging.getLogger().handlers == [], logging.getLogger().handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert logging.getLogger("libp2p").handlers


def test_without_py_libp2p_both_ways_to_get_it_are_told_in_a_line(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("bbnode.transport.libp2p.py_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libp2p", None)
    for each in [each for each in sys.modules if each.startswith("libp2p.")]:
        monkeypatch.delitem(sys.modules, each)
    with pytest.raises(Libp2pMissing) as caught:
        make_transport("libp2p", TransportSetup(identity=Identity.generate()))
    for part in ("uv pip install", "--override", "libgmp-dev", 'network.transport = "lean"'):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    Libp2pTransport(Identity.generate(), listen=[])
