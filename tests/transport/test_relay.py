"""Circuit relay: two nodes that nobody can dial, and a third one between them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from dataclasses import replace

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.access.decision import Standing
from bbnode.ir.address import is_relayed, parse_address, peer_of_address, split_circuit
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
)
from bbnode.transport.errors import DialError, RelayRefusedError, StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.protocols import LinkedStream
from bbnode.transport.libp2p.relay import client as libp2p_relay_client
from bbnode.transport.libp2p.relay.client import can_be_dialled
from bbnode.transport.libp2p.relay.messages import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    CircuitLimit,
    RelayCommand,
    RelayRequest,
    RelayStatus,
    read_answer,
    read_offer,
    write_acceptance,
    write_request,
)
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.limits import RelaySettings
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import CALM, LOOPBACK, next_event

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")

USE = RelaySettings(use=True)
MIB = 2**20
# Redials at once: a test has no time to lose.
QUICK = replace(CALM, redial_max_s=0.4, direct_retry_s=0.1)


def relay_node(name: str = "r", **settings) -> Libp2pTransport:
    return Libp2pTransport(
        Identity.from_seed(name.encode() * 32),
        listen=[LOOPBACK],
        relay=RelaySettings(serve=True, **settings),
        limits=CALM,
    )


def dial_only(name: str, relay: RelaySettings = USE, **options) -> Libp2pTransport:
    return Libp2pTransport(
        Identity.from_seed(name.encode() * 32),
        listen=[],
        relay=relay,
        **{"limits": QUICK, **options},
    )


def waiting_events(backend: Libp2pTransport) -> list[object]:
    """What lies unread."""
    found: list[object] = []
    with contextlib.suppress(trio.WouldBlock):
        while True:
            found.append(backend.events.receive_nowait())
    return found


async def until(condition) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.lowlevel.checkpoint()


async def join(relays: list[Libp2pTransport], *nodes: Libp2pTransport) -> None:
    """Have nodes that run connected with all relays, and reachable through each."""
    for node in nodes:
        for relay in relays:
            node.keep_connected(relay.peer_id, relay.listen_addresses())
            await next_event(node, ConnectionOpened)
        await until(lambda node=node: len(node.listen_addresses()) == len(relays))


async def trio_of_nodes(
    nursery, **settings
) -> tuple[Libp2pTransport, Libp2pTransport, Libp2pTransport]:
    """A relay and two nodes that hold reservations with it."""
    r, a, b = relay_node(**settings), dial_only("a"), dial_only("b")
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a, b)
    return r, a, b


async def connect(a: Libp2pTransport, b: Libp2pTransport) -> None:
    a.keep_connected(b.peer_id, b.listen_addresses())
    for one, other in ((a, b), (b, a)):
        assert (await next_event(one, ConnectionOpened)).peer == other.peer_id


def payload(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_256(bytes([seed])).digest(size)


def direct_of(node: Libp2pTransport, peer: PeerId):
    link = node._direct_link(peer)
    assert link is not None
    return link


async def test_five_megabytes_through_a_relay_that_reads_none_of_it(nursery, monkeypatch):
    r, a, b = await trio_of_nodes(nursery)
    passed = bytearray()
    inner = LinkedStream.read

    async def spy(self, max_bytes):
        data = await inner(self, max_bytes)
        if self.link.owner is r._table:
            passed.extend(data)
        return data

    monkeypatch.setattr(LinkedStream, "read", spy)
    (address,) = b.listen_addresses()
    assert str(address) == f"{r.listen_addresses()[0]}/p2p-circuit/p2p/{b.peer_id}"
    a.keep_connected(b.peer_id, [address])
    up, inbound = await next_event(a, ConnectionOpened), await next_event(b, ConnectionOpened)
    assert (up.address, up.direction) == (address, Direction.OUTBOUND)
    assert list(up.hello.listen_addresses) == [address]
    assert inbound.peer == peer_of_address(inbound.address) == a.peer_id
    assert is_relayed(inbound.address)
    for sender, receiver in ((a, b), (b, a)):
        data = payload(5 * MIB)
        sender.send(receiver.peer_id, data, tag=1)
        assert bytes((await next_event(receiver, EnvelopeReceived)).data) == data
        assert data[:64] not in passed
    assert len(passed) > 10 * MIB
    info = next(each for each in a.peers() if each.peer == b.peer_id)
    assert info.address == address
    await until(lambda: not a.metrics().queued_bytes)
    assert [each.metrics().circuits for each in (a, b, r)] == [0, 0, 1]
    await a.stop(PATIENCE_S)
    gone = await next_event(b, ConnectionClosed)
    assert (gone.peer, gone.reason) == (a.peer_id, "the peer said goodbye: the node stops")
    counters = r.counters()
    assert counters["relay.reserved"] == 2
    await until(lambda: r.counters()["relay.circuits_closed"] == 1)
    assert r.metrics().circuits == 0
    # Of the connection with b: two lanes in each direction.
    await until(lambda: r.metrics().streams == 4)
    assert (counters["relay.circuits_opened"], counters["relay.refused"]) == (1, 0)


async def test_other_protocols_run_over_a_circuit(nursery):
    r, a, b = relay_node(), dial_only("a"), dial_only("b")

    async def echo(stream) -> None:
        while part := await stream.read(4096):
            await stream.write(part)

    b.register_protocol("/test/echo/1", echo)
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a, b)
    await connect(a, b)
    with trio.fail_after(PATIENCE_S):
        async with a.open_stream(b.peer_id, "/test/echo/1") as stream:
            await stream.write(b"over there")
            assert await stream.read(100) == b"over there"


async def test_another_relay_takes_over_and_nothing_is_lost_or_doubled(nursery):
    relays = {node.peer_id: node for node in (relay_node("r"), relay_node("s"))}
    scopes = {peer: trio.CancelScope() for peer in relays}

    async def run(peer: PeerId, task_status) -> None:
        with scopes[peer]:
            await relays[peer].run(task_status=task_status)

    for peer in relays:
        await nursery.start(run, peer)
    a, b = dial_only("a"), dial_only("b")
    for node in (a, b):
        await nursery.start(node.run)
    await join(list(relays.values()), a, b)
    # Only the way through one of them is given.
    a.keep_connected(b.peer_id, b.listen_addresses()[:1])
    await next_event(a, ConnectionOpened)
    sent = [payload(5 * MIB, seed=n) for n in range(4)]
    for n, data in enumerate(sent):
        a.send(b.peer_id, data, tag=n)

    def carrying() -> PeerId:
        return split_circuit(next(p for p in a.peers() if p.peer == b.peer_id).address)[1]

    # In the middle of a message.
    moved = lambda: relays[carrying()].counters()["relay.bytes"]  # noqa: E731
    await until(lambda: b.metrics().partial_bytes and moved() > 7 * MIB)
    killed = carrying()
    scopes[killed].cancel()
    got = []
    with trio.fail_after(PATIENCE_S):
        while len(got) < len(sent):
            event = await b.events.receive()
            if isinstance(event, EnvelopeReceived):
                got.append(event.data)
    assert [bytes(data) for data in got] == sent
    assert carrying() != killed
    assert is_relayed(next(p for p in b.peers() if p.peer == a.peer_id).address)
    await until(lambda: a.metrics().queued_envelopes == 0)
    assert not any(isinstance(event, DeliveryFailed) for event in waiting_events(a))


async def test_a_direct_connection_replaces_a_circuit(nursery):
    r, b = relay_node(), dial_only("b")
    a = Libp2pTransport(Identity.from_seed(b"a" * 32), listen=[LOOPBACK], relay=USE, limits=QUICK)
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], b)
    a.keep_connected(r.peer_id, r.listen_addresses())
    await next_event(a, ConnectionOpened)
    await connect(a, b)
    assert is_relayed(b.peers()[0].address) or is_relayed(b.peers()[1].address)
    sent = [payload(2 * MIB, seed=n) for n in range(8)]
    for n, data in enumerate(sent):
        a.send(b.peer_id, data, tag=n)
    # b knows only a detour to a, and a's own address from its hello.
    b.keep_connected(
        a.peer_id, [Multiaddr(f"{r.listen_addresses()[0]}/p2p-circuit/p2p/{a.peer_id}")]
    )
    for data in sent:
        event = await next_event(b, EnvelopeReceived)
        assert bytes(event.data) == data
    await until(lambda: not any(is_relayed(p.address) for p in (*a.peers(), *b.peers())))
    await until(lambda: r.counters()["relay.circuits_closed"] == 1)
    a.send(b.peer_id, b"directly", tag=9)
    event = await next_event(b, EnvelopeReceived)
    assert event.data == b"directly"
    assert not is_relayed(event.observed_address)
    # Nobody was ever told that the other was gone.
    assert a.counters()["outbound.failed"] == 0


# -- bounds --------------------------------------------------------------------------------


async def test_reservations_are_bounded(nursery):
    r, a, b = relay_node(reservations=1), dial_only("a"), dial_only("b")
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a)
    b.keep_connected(r.peer_id, r.listen_addresses())
    await next_event(b, ConnectionOpened)
    await until(lambda: r.counters()["relay.refused"] == 1)
    assert b.listen_addresses() == []
    with pytest.raises(RelayRefusedError, match="no reservation") as refused:
        await a._relay_client.dial(direct_of(a, r.peer_id), b.peer_id)
    assert refused.value.status == RelayStatus.NO_RESERVATION
    # One whose holder has gone makes room.
    await a.stop(PATIENCE_S)
    await until(lambda: r._table.known(a.peer_id).primary is None)
    async with b.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
        await write_request(stream, RelayRequest(ask=RelayCommand.RESERVE))
        answer = await read_answer(stream)
    assert answer.status is RelayStatus.OK
    assert answer.limit == CircuitLimit(seconds=3600, bytes=4 * 1024**3)
    assert 3590 < answer.expires_s - time.time() <= 3600


@pytest.mark.parametrize("bound", ["circuits", "circuits_per_peer"])
async def test_circuits_are_bounded(nursery, bound):
    r, a, b = await trio_of_nodes(nursery, **{bound: 1})
    c = dial_only("c")
    await nursery.start(c.run)
    await join([r], c)
    await connect(a, b)
    with pytest.raises(RelayRefusedError, match="as many circuits") as refused:
        await c._relay_client.dial(direct_of(c, r.peer_id), b.peer_id)
    assert refused.value.status == RelayStatus.RESOURCE_LIMIT_EXCEEDED
    await a.stop(PATIENCE_S)
    await until(lambda: r.counters()["relay.circuits_closed"] == 1)
    await connect(c, b)


async def test_a_message_over_the_bound_of_a_circuit_takes_several(nursery):
    r, a, b = await trio_of_nodes(nursery, circuit_bytes=2 * MIB)
    await connect(a, b)
    data = payload(7 * MIB)
    a.send(b.peer_id, data, tag=1)
    assert bytes((await next_event(b, EnvelopeReceived)).data) == data
    assert r.counters()["relay.circuits_opened"] >= 4


async def test_a_circuit_is_replaced_before_its_time_is_over(nursery, monkeypatch):
    # Replaced after 0.4 s, with 20 s of room for a busy machine before it would be cut.
    monkeypatch.setattr(libp2p_relay_client, "USED_UP", 0.02)
    r, a, b = await trio_of_nodes(nursery, circuit_s=20)
    await connect(a, b)
    await until(lambda: r.counters()["relay.circuits_closed"] >= 2)
    a.send(b.peer_id, b"still here", tag=1)
    assert (await next_event(b, EnvelopeReceived)).data == b"still here"
    assert r.counters()["relay.circuits_cut"] == 0
    assert not any(isinstance(event, ConnectionClosed) for event in waiting_events(a))


async def test_a_circuit_that_nobody_replaces_is_cut(nursery, monkeypatch):
    monkeypatch.setattr(libp2p_relay_client, "USED_UP", math.inf)
    # A machine too busy to secure a connection in that time has the next circuit to do it.
    r, a, b = await trio_of_nodes(nursery, circuit_s=2)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await next_event(a, ConnectionOpened)
    assert (await next_event(a, ConnectionClosed)).peer == b.peer_id
    assert r.counters()["relay.circuits_cut"] >= 1


async def test_a_relay_keeps_nothing_for_an_end_that_does_not_read(nursery):
    r, a, b = await trio_of_nodes(nursery)
    read_on, got = trio.Event(), bytearray()

    async def rest(stream) -> None:
        await read_offer(stream)
        await write_acceptance(stream, RelayStatus.OK)
        await read_on.wait()
        while part := await stream.read(65_536):
            got.extend(part)

    b._protocols._handlers[STOP_PROTOCOL] = rest
    data, written = payload(8 * MIB), 0
    with trio.fail_after(PATIENCE_S):
        async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
            await write_request(stream, RelayRequest(ask=RelayCommand.CONNECT, peer=b.peer_id))
            assert (await read_answer(stream)).status is RelayStatus.OK

            async def write_all() -> None:
                nonlocal written
                for at in range(0, len(data), 65_536):
                    await stream.write(data[at : at + 65_536])
                    written = at + 65_536
                await stream.end()

            nursery.start_soon(write_all)
            before = -1
            while written != before or written <= MIB // 2:
                before = written
                await trio.testing.wait_all_tasks_blocked(0.05)
            # Windows of two hops, and what each side has in hand.
            assert written < 3 * MIB
            assert r.metrics().unread_bytes < MIB
            read_on.set()
            await until(lambda: len(got) == len(data))
    assert bytes(got) == data


# -- who may -------------------------------------------------------------------------------


class Deny:
    """An authorizer that knows one peer it does not want."""

    def __init__(self, denied: PeerId) -> None:
        self.denied = denied

    def connection(self, peer, direction):
        return Decision(peer != self.denied)

    def hello(self, peer, direction, hello):
        return Decision(peer != self.denied)

    def envelope(self, peer, direction, size):
        return Decision(peer != self.denied)

    def is_known(self, peer):
        return True


class Decision:
    reason = "blocked"
    wait_s = 0.0
    standing = Standing.STRANGER

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed


async def test_whom_the_relay_denies_has_no_circuit(nursery):
    a, b = dial_only("a"), dial_only("b")
    r = Libp2pTransport(
        Identity.from_seed(b"r" * 32),
        listen=[LOOPBACK],
        relay=RelaySettings(serve=True),
        authorizer=Deny(a.peer_id),
    )
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], b)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await until(lambda: any(w.failed_dials > 1 for w in a.wanted()))
    assert "not connected" in a.wanted()[0].last_error
    assert r.counters()["relay.circuits_opened"] == 0
    assert [p.peer for p in b.peers()] == [r.peer_id]


async def test_whom_the_other_end_denies_gets_no_link(nursery):
    r, a = relay_node(), dial_only("a")
    b = dial_only("b", authorizer=Deny(a.peer_id))
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a, b)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await until(lambda: b.metrics().denied.get("blocked"))
    await until(lambda: a.wanted() and any(w.failed_dials for w in a.wanted()))
    assert [p.peer for p in b.peers()] == [r.peer_id]
    # The circuits of refused connections end.
    a.forget(b.peer_id)
    await until(
        lambda: r.counters()["relay.circuits_closed"] == r.counters()["relay.circuits_opened"] > 0
    )


async def test_nobody_relays_over_a_connection_that_is_relayed_itself(nursery):
    r, a = relay_node(), dial_only("a")
    b = dial_only("b", RelaySettings(use=True, serve=True))
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a, b)
    await connect(a, b)
    # b would relay, but not over a connection that is relayed itself.
    async with a.open_stream(b.peer_id, HOP_PROTOCOL) as stream:
        await write_request(stream, RelayRequest(ask=RelayCommand.RESERVE))
        assert (await read_answer(stream)).status is RelayStatus.PERMISSION_DENIED


async def test_dials_that_lead_nowhere_say_why(nursery, monkeypatch):
    r, a, b = await trio_of_nodes(nursery)
    base, other = r.listen_addresses()[0], PeerId.from_seed("other")
    for address, why in (
        (f"{base}/p2p-circuit/p2p/{other}", "not connected with it"),
        (f"{base}/p2p-circuit/p2p/{other}/p2p-circuit/p2p/{other}", "not through one relay"),
        (f"/p2p/{other}/p2p-circuit/p2p/{b.peer_id}", "is not connected"),
        (f"/p2p/{b.peer_id}/p2p-circuit/p2p/{b.peer_id}", "one of the two ends"),
    ):
        with pytest.raises(DialError, match=why):
            await a._dial(Multiaddr(address), peer_of_address(Multiaddr(address)))
    with pytest.raises(DialError, match=r"relay\.use"):
        await r._dial(b.listen_addresses()[0], b.peer_id)

    async def silent(stream) -> None:
        with contextlib.suppress(StreamBrokenError):
            while await stream.read(4096):
                pass

    r._protocols._handlers[HOP_PROTOCOL] = silent
    monkeypatch.setattr(libp2p_relay_client, "RELAY_ANSWER_S", 0.1)
    with pytest.raises(DialError, match="was silent"):
        await a._dial(b.listen_addresses()[0], b.peer_id)


async def test_without_relays_nothing_is_reserved(nursery):
    r, a = relay_node(), dial_only("a", RelaySettings())
    for node in (r, a):
        await nursery.start(node.run)
    a.keep_connected(r.peer_id, r.listen_addresses())
    await next_event(a, ConnectionOpened)
    assert a.listen_addresses() == []
    assert r.counters()["protocols.opened"] == 0


async def test_a_relay_too_many_takes_the_place_of_one_that_goes(nursery, monkeypatch):
    monkeypatch.setattr(libp2p_relay_client, "MAX_RELAYS", 1)
    relays, a = [relay_node(name) for name in "rst"], dial_only("a")
    for node in (*relays, a):
        await nursery.start(node.run)
    await join(relays[:1], a)
    for relay in relays[1:]:
        a.keep_connected(relay.peer_id, relay.listen_addresses())
        await next_event(a, ConnectionOpened)
    assert [split_circuit(each)[1] for each in a.listen_addresses()] == [relays[0].peer_id]
    # Those that wait for a place go with their connection as well.
    a.forget(relays[1].peer_id)
    await relays[1].stop(PATIENCE_S)
    tasks = a.metrics().tasks
    changed = []
    a.on_addresses = lambda: changed.append(a.listen_addresses())
    a.forget(relays[0].peer_id)
    await relays[0].stop(PATIENCE_S)
    await until(lambda: changed and changed[-1])
    assert [split_circuit(each)[1] for each in changed[-1]] == [relays[2].peer_id]
    await until(lambda: a.metrics().tasks < tasks)


async def test_a_relay_that_is_not_connected_is_dialled_for_a_circuit(nursery):
    r, a, b = relay_node(), dial_only("a"), dial_only("b")
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], b)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await until(lambda: {p.peer for p in a.peers()} == {r.peer_id, b.peer_id})


# -- parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "by", "dialled"),
    [
        ([], "/ip4/127.0.0.1/tcp/1", False),
        (["/ip4/127.0.0.1/tcp/1"], "/ip4/127.0.0.1/tcp/2", True),
        (["/ip4/127.0.0.1/tcp/1"], "/ip4/192.168.1.2/tcp/2", False),
        (["/ip4/192.168.1.3/tcp/1"], "/ip4/192.168.1.2/tcp/2", True),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"], "/ip4/8.8.8.8/tcp/2", False),
        (["/ip4/8.8.4.4/tcp/1"], "/ip4/8.8.8.8/tcp/2", True),
        (["/ip6/::1/tcp/1"], "/ip6/2606:4700::1111/tcp/2", False),
        (["/dns4/node.example/tcp/1"], "/ip4/8.8.8.8/tcp/2", True),
    ],
)
def test_who_needs_a_relay(own, by, dialled):
    assert can_be_dialled([Multiaddr(each) for each in own], Multiaddr(by)) is dialled


def test_relayed_addresses_are_taken_apart():
    relay, peer = PeerId.from_seed("relay"), PeerId.from_seed("peer")
    address = parse_address(f"/ip4/1.2.3.4/tcp/5/p2p/{relay}/p2p-circuit/p2p/{peer}")
    assert split_circuit(address) == (parse_address("/ip4/1.2.3.4/tcp/5"), relay)
    assert peer_of_address(address) == peer
    with pytest.raises(DecodeError, match="names no peer"):
        peer_of_address(parse_address(f"/ip4/1.2.3.4/tcp/5/p2p/{relay}/p2p-circuit"))
    for bad in (
        "/ip4/1.2.3.4/tcp/5/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/5/p2p/{peer}/tcp/1/p2p-circuit",
    ):
        with pytest.raises(DecodeError, match="through one relay"):
            split_circuit(parse_address(bad))
