"""The libp2p backend as a driver sees it: real hosts on loopback."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_CREDENTIALS_BYTES
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    Hello,
    HelloRefused,
    ProtocolViolation,
)
from bbnode.transport.errors import EnvelopeTooLargeError, ListenError, NotConnectedError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import FrameType, encode_header
from bbnode.transport.links.hello import HelloError, encode_hello
from tests.patience import PATIENCE_S
from tests.transport.hosts import LOOPBACK, OurHost

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")

CONTROL = "/bbnode/control/1"
BULK = "/bbnode/bulk/1"


# Nobody is cut off because this machine stood still: a farewell that is not answered hangs.
CALM = TransportLimits(
    authenticate_s=PATIENCE_S,
    hello_timeout_s=PATIENCE_S,
    dialled_hello_s=PATIENCE_S,
    goodbye_s=PATIENCE_S,
)


def make(name: str, listen: Multiaddr = LOOPBACK, **options) -> Libp2pTransport:
    return Libp2pTransport(
        Identity.from_seed(name.encode() * 32), listen=[listen], **{"limits": CALM, **options}
    )


async def next_event(backend: Libp2pTransport, kind: type):
    """The next event of this kind; others before it are skipped."""
    with trio.fail_after(PATIENCE_S):
        while True:
            event = await backend.events.receive()
            if isinstance(event, kind):
                return event


async def connected(nursery, *backends: Libp2pTransport) -> None:
    """Start them, and connect all with the first."""
    for backend in backends:
        await nursery.start(backend.run)
    hub, *others = backends
    for other in others:
        other.keep_connected(hub.peer_id, hub.listen_addresses())
        await next_event(other, ConnectionOpened)
        await next_event(hub, ConnectionOpened)


async def test_the_first_message_after_a_rest_is_written_where_it_is_sent(nursery):
    a, b = make("a"), make("b")
    await connected(nursery, a, b)
    for n in range(3):
        # What came was acknowledged on its own before this, as nothing went back.
        b.send(a.peer_id, b"ping", tag=n)
        await next_event(a, EnvelopeReceived)
        with trio.fail_after(PATIENCE_S):
            await b._table.session(a.peer_id).queue.wait_idle()
        a.send(b.peer_id, b"pong", tag=n)
        assert a.counters()["outbound.envelopes"] == n + 1
        await next_event(b, EnvelopeReceived)


async def test_two_nodes_exchange_envelopes_and_part(nursery):
    hello = Hello(agent_version="test/1", artifact_sha256="ab" * 32, classes=("server",))
    a, b = make("a", hello=hello), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    b.keep_connected(a.peer_id, a.listen_addresses())
    up = await next_event(b, ConnectionOpened)
    assert (up.peer, up.direction) == (a.peer_id, Direction.OUTBOUND)
    assert (up.hello.classes, up.hello.artifact_sha256) == (("server",), "ab" * 32)
    assert list(up.hello.listen_addresses) == a.listen_addresses()
    assert up.address in a.listen_addresses()
    inbound = await next_event(a, ConnectionOpened)
    assert (inbound.peer, inbound.direction) == (b.peer_id, Direction.INBOUND)
    big = bytes(range(256)) * 8192
    b.send(a.peer_id, [big, memoryview(big)], tag=1)
    b.send(a.peer_id, b"small", tag=2)
    got = [await next_event(a, EnvelopeReceived) for _ in range(2)]
    assert sorted(bytes(e.data) for e in got) == sorted([big + big, b"small"])
    assert {e.peer for e in got} == {b.peer_id}
    (info,) = a.peers()
    assert info.bytes_in > 2 * len(big)
    assert a.peer_info(b.peer_id) == info
    assert a.peer_info(a.peer_id) is None
    # Far less than it is given: it ends when both have taken leave.
    before = trio.current_time()
    await b.stop(2 * PATIENCE_S)
    assert trio.current_time() - before < PATIENCE_S / 2
    gone = await next_event(a, ConnectionClosed)
    assert gone.reason == "the peer said goodbye: the node stops"
    assert gone.goodbye
    with pytest.raises(NotConnectedError):
        a.send(b.peer_id, b"", tag=3)
    with pytest.raises(trio.EndOfChannel):
        await next_event(b, DeliveryFailed)
    assert a.counters()["links.closed"] == a.counters()["links.opened"] == 1


async def test_new_credentials_are_shown_on_new_connections(nursery):
    a, b, c = make("a", hello=Hello(credentials=b"old")), make("b"), make("c")
    await connected(nursery, a, b)
    with pytest.raises(HelloError):
        a.set_credentials(b"x" * (MAX_CREDENTIALS_BYTES + 1))
    a.set_credentials(b"new")
    await nursery.start(c.run)
    a.keep_connected(c.peer_id, c.listen_addresses())
    assert (await next_event(c, ConnectionOpened)).hello.credentials == b"new"
    (info,) = b.peers()
    assert info.hello.credentials == b"old"


async def test_who_was_dialled_takes_leave_as_well(nursery):
    a, b = make("a"), make("b")
    await connected(nursery, a, b)
    for dialled in (a, b):
        assert dialled.peers()
    a.send(b.peer_id, b"x" * 500_000, tag=1)
    await a.stop(PATIENCE_S)
    assert len((await next_event(b, EnvelopeReceived)).data) == 500_000
    gone = await next_event(b, ConnectionClosed)
    assert gone.reason == "the peer said goodbye: the node stops"


async def test_largest_envelopes_both_ways_at_once(nursery):
    limits = replace(CALM, max_message_bytes=16 * 2**20)
    a, b = make("a", limits=limits), make("b", limits=limits)
    await connected(nursery, a, b)
    data = bytes(16 * 2**20)
    for tag in range(2):
        a.send(b.peer_id, data, tag=tag)
        b.send(a.peer_id, data, tag=tag)
    with pytest.raises(EnvelopeTooLargeError):
        a.send(b.peer_id, [data, b"x"], tag=9)
    for backend in (a, b):
        for _ in range(2):
            assert len((await next_event(backend, EnvelopeReceived)).data) == len(data)


async def test_stop_sends_what_is_queued_first(nursery):
    a, b = make("a"), make("b")
    await connected(nursery, a, b)
    for n in range(4):
        b.send(a.peer_id, bytes([n]) * 2**21, tag=n)
        b.send(a.peer_id, bytes([n]), tag=n)
    await b.stop(PATIENCE_S)
    for _ in range(8):
        await next_event(a, EnvelopeReceived)


async def test_simultaneous_dials_end_in_one_connection(nursery):
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    a.keep_connected(b.peer_id, b.listen_addresses())
    b.keep_connected(a.peer_id, a.listen_addresses())
    for backend in (a, b):
        await next_event(backend, ConnectionOpened)
    a.send(b.peer_id, b"x", tag=1)
    b.send(a.peer_id, b"y", tag=1)
    for backend in (a, b):
        await next_event(backend, EnvelopeReceived)
    with trio.fail_after(PATIENCE_S):
        while any(
            backend.counters()["links.opened"] - backend.counters()["links.closed"] != 1
            for backend in (a, b)
        ):
            await trio.lowlevel.checkpoint()
    assert a.peers()[0].direction is not b.peers()[0].direction


async def test_peer_that_comes_late_and_comes_back_on_its_port(nursery):
    port = free_port()
    address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
    a = make("a", limits=replace(CALM, redial_max_s=0.4))
    await nursery.start(a.run)
    late = Identity.from_seed(b"b" * 32).peer_id
    a.keep_connected(late, [address])
    with trio.fail_after(PATIENCE_S):
        while not a.wanted()[0].failed_dials:
            await trio.lowlevel.checkpoint()
    assert "refused" in a.wanted()[0].last_error
    for _ in range(2):
        b = make("b", address)
        await nursery.start(b.run)
        assert (await next_event(a, ConnectionOpened)).peer == late
        await b.stop(PATIENCE_S)
        await next_event(a, ConnectionClosed)
    a.forget(late)
    assert a.wanted() == []


async def test_wrong_peer_at_an_address_is_never_connected(nursery):
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    a.keep_connected(PeerId.from_seed("somebody else"), b.listen_addresses())
    with trio.fail_after(PATIENCE_S):
        while not a.counters()["dial.failed"]:
            await trio.lowlevel.checkpoint()
    assert a.peers() == []


async def test_second_address_is_tried(nursery):
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    dead = Multiaddr(f"/ip4/127.0.0.1/tcp/{free_port()}")
    a.keep_connected(b.peer_id, [dead, *b.listen_addresses()])
    assert (await next_event(a, ConnectionOpened)).address in b.listen_addresses()


async def test_disconnect_fails_what_is_not_sent(nursery):
    a, b = make("a"), make("b")
    await connected(nursery, a, b)
    b.forget(a.peer_id)
    for tag in range(3):
        a.send(b.peer_id, bytes(2**20), tag=tag)
    a.disconnect(b.peer_id)
    sent = 0
    failed = []
    with trio.fail_after(PATIENCE_S):
        while len(failed) + sent < 3:
            event = await a.events.receive()
            if isinstance(event, DeliveryFailed):
                failed.append(event.tag)
            sent = a.counters()["outbound.envelopes"]
    assert failed == list(range(sent, 3))
    gone = await next_event(b, ConnectionClosed)
    assert "disconnected on purpose" in gone.reason


def stranger(seed: int, protocols: tuple[str, ...]) -> OurHost:
    """A host that takes our streams and says nothing on its own."""
    host = OurHost(seed)

    async def sink(_connection, stream) -> None:
        while await stream.read(4096):
            pass

    for protocol in protocols:
        host.handlers[protocol] = sink
    return host


async def test_strangers_and_liars_are_dropped_and_the_rest_goes_on(nursery):
    a, b = make("a"), make("b")
    await connected(nursery, a, b)
    network_address = a.listen_addresses()[0]

    async def attack(seed: int, control: bytes, expect: type) -> None:
        host = stranger(seed, (CONTROL, BULK))
        async with host.running([]):
            connection = await host.dial(network_address, a.peer_id)
            stream = await connection.open_protocol(CONTROL)
            await stream.write(control)
            event = await next_event(a, expect)
            assert event.peer == host.peer_id
            with trio.fail_after(PATIENCE_S):
                await connection.ended.wait()

    hello = encode_hello(Hello())
    good = encode_header(FrameType.HELLO, len(hello)) + hello
    await attack(101, b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", HelloRefused)
    await attack(102, encode_header(FrameType.HELLO, 4) + b"\xc1\xc1\xc1\xc1", HelloRefused)
    await attack(103, good + b"\xee" * 64, ProtocolViolation)
    await attack(104, good + encode_header(FrameType.ENVELOPE, 2**32 - 1), ProtocolViolation)
    assert a.counters()["hello.refused"] == 2
    assert a.counters()["protocol.violations"] == 2
    b.send(a.peer_id, b"unharmed", tag=1)
    assert (await next_event(a, EnvelopeReceived)).data == b"unharmed"


@pytest.mark.parametrize(
    ("protocols", "speaks", "hello_s", "reason"),
    [
        ((), False, 0.3, "no hello within"),
        ((CONTROL, BULK), True, 0.3, "no hello within"),
        ((), True, PATIENCE_S, "cannot open a"),
    ],
)
async def test_peer_without_a_hello_is_closed(nursery, protocols, speaks, hello_s, reason):
    a = make("a", limits=TransportLimits(hello_timeout_s=hello_s))
    await nursery.start(a.run)
    host = stranger(122, protocols)
    async with host.running([]):
        connection = await host.dial(a.listen_addresses()[0], a.peer_id)
        if speaks:
            # We open lanes only where the peer opens one.
            await connection.open_protocol(CONTROL)
        assert reason in (await next_event(a, HelloRefused)).reason
        with trio.fail_after(PATIENCE_S):
            await connection.ended.wait()
    assert a.counters()["hello.refused"] == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("by_us", [True, False])
async def test_port_in_use_names_the_address(nursery, by_us):
    with socket.socket() as taken:
        if by_us:
            first = make("a")
            await nursery.start(first.run)
            port = int(first.listen_addresses()[0].value_for_protocol("tcp"))
        else:
            # As py-libp2p does: shared by whoever sets the option too.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
        with pytest.raises(ListenError, match="address already in use") as caught:
            await nursery.start(make("b", address).run)
        assert str(address) in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_wildcard_is_announced_as_concrete_addresses(nursery):
    a = make("a", Multiaddr("/ip4/0.0.0.0/tcp/0"))
    await nursery.start(a.run)
    assert a.listen_addresses()
    for address in a.listen_addresses():
        assert address.value_for_protocol("ip4") != "0.0.0.0"
        assert address.value_for_protocol("tcp") != "0"
        assert address.value_for_protocol("p2p") == str(a.peer_id)
    announce = Multiaddr("/dns4/node.example/tcp/4001")
    b = make("b", announce=[announce])
    await nursery.start(b.run)
    assert [str(each) for each in b.listen_addresses()] == [f"{announce}/p2p/{b.peer_id}"]


async def test_misuse():
    with pytest.raises(ListenError, match="udp"):
        make("a", Multiaddr("/ip4/127.0.0.1/udp/1/quic-v1"))
    a = make("a")
    with pytest.raises(DeploymentError, match="itself"):
        a.keep_connected(a.peer_id, [LOOPBACK])
    with pytest.raises(DeploymentError, match="no address"):
        a.keep_connected(PeerId.from_seed("b"), [])


async def test_cancelling_a_busy_backend_leaves_nothing_behind():
    a, b = make("a"), make("b")
    async with trio.open_nursery() as outer:
        await connected(outer, a, b)
        for tag in range(4):
            b.send(a.peer_id, bytes(2**22), tag=tag)
        await next_event(a, EnvelopeReceived)
        outer.cancel_scope.cancel()
    assert a.peers() == b.peers() == []
    assert a.counters()["links.opened"] == a.counters()["links.closed"]


async def test_what_is_under_way_when_the_connection_dies_arrives_once(nursery):
    limits = replace(CALM, redial_max_s=0.4)
    a, b = make("a", limits=limits), make("b", limits=limits)
    await connected(nursery, a, b)
    messages = [bytes([n]) * size for n, size in enumerate((10, 3_000_000, 20, 5_000_000))]
    for tag, message in enumerate(messages):
        b.send(a.peer_id, message, tag=tag)
    for cut_after in (200_000, 2_000_000):
        with trio.fail_after(PATIENCE_S):
            while not b.peers() or b.peers()[0].bytes_out < cut_after:
                await trio.lowlevel.checkpoint()
        # As if the cable was pulled: neither side takes leave.
        for link in b._table.links():
            link.abort("cut")
        await next_event(b, ConnectionClosed)
    got = [bytes((await next_event(a, EnvelopeReceived)).data) for _ in messages]
    assert sorted(got) == sorted(messages)
    with trio.fail_after(PATIENCE_S):
        while not b.peers() or b.peers()[0].queued_envelopes:
            await trio.lowlevel.checkpoint()
    info = b.peers()[0]
    assert (info.acknowledged, info.queued_bytes, info.unacknowledged_bytes) == (4, 0, 0)
    assert a.metrics().inbox_envelopes == 0
    assert b.counters()["outbound.failed"] == 0


async def test_gauges_go_up_and_come_back(nursery):
    a, b = make("a"), make("b")
    await nursery.start(a.run)
    await nursery.start(b.run)
    idle = a.metrics()
    assert (idle.connections, idle.streams, idle.queued_bytes, idle.sessions) == (0, 0, 0, 0)
    for _ in range(2):
        b.keep_connected(a.peer_id, a.listen_addresses())
        await next_event(a, ConnectionOpened)
        a.send(b.peer_id, bytes(300_000), tag=1)
        busy = a.metrics()
        assert (busy.connections, busy.queued_bytes, busy.queued_envelopes) == (1, 300_000, 1)
        event = await next_event(b, EnvelopeReceived)
        assert len(event.data) == 300_000
        with trio.fail_after(PATIENCE_S):
            while a.metrics().queued_envelopes or a.metrics().streams != 4:
                await trio.lowlevel.checkpoint()
        assert a.metrics().tasks > idle.tasks
        assert a.metrics().peers[0].acknowledged >= 1
        b.forget(a.peer_id)
        b.disconnect(a.peer_id)
        await next_event(a, ConnectionClosed)
        with trio.fail_after(PATIENCE_S):
            while a.metrics().tasks != idle.tasks or a.metrics().connections:
                await trio.lowlevel.checkpoint()
    done = a.metrics()
    assert (done.streams, done.unread_bytes, done.partial_bytes, done.inbox_bytes) == (0, 0, 0, 0)


async def test_ipv6_loopback(nursery):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    a, b = make("a", Multiaddr("/ip6/::1/tcp/0")), make("b")
    try:
        await nursery.start(a.run)
    except ListenError as error:
        pytest.skip(str(error))
    await nursery.start(b.run)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(b, ConnectionOpened)
    assert (await next_event(a, ConnectionOpened)).address.value_for_protocol("ip6") == "::1"
