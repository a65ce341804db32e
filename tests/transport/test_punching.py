"""Hole punching: two peers behind a relay that come to a direct connection, or stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_PUNCH_ADDRESSES, MAX_PUNCHES
from bbnode.transport import Identity
from bbnode.transport.base import ConnectionOpened, Direction, EnvelopeReceived, RelayMisused
from bbnode.transport.errors import DialError, RelayFault, StreamBrokenError
from bbnode.transport.libp2p import host as libp2p_host
from bbnode.transport.libp2p.relay import punching
from bbnode.transport.libp2p.relay.punching import (
    PUNCH_PROTOCOL,
    PunchStep,
    read_step,
    write_step,
)
from bbnode.transport.libp2p.tcp import connect, tcp_address
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import LOOPBACK, next_event
from tests.transport.test_relay import (
    QUICK,
    USE,
    dial_only,
    direct_of,
    join,
    payload,
    relay_node,
    trio_of_nodes,
    until,
    waiting_events,
)

pytestmark = pytest.mark.usefixtures("each_transport")

# The dialler does not come to a direct connection by itself.
SLOW = replace(QUICK, direct_retry_s=3600.0)


async def relayed(nursery, **options):
    """A relay, a node that has dialled another one through it, and that one."""
    r, a, b = await trio_of_nodes(nursery, **options)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await next_event(a, ConnectionOpened)
    await next_event(b, ConnectionOpened)
    return r, a, b


def know(node: Libp2pTransport, *peers: Libp2pTransport) -> None:
    """Have a node take peers for good ones, as after messages."""
    node._table._known.update(dict.fromkeys(each.peer_id for each in peers))


def faults(node: Libp2pTransport) -> list[RelayFault]:
    return [e.fault for e in waiting_events(node) if isinstance(e, RelayMisused)]


class Meeting:
    """A network between two nodes: who dials an address there meets who dials the other."""

    def __init__(self, *nodes: Libp2pTransport) -> None:
        self.ports: list[int] = []
        self._first: trio.MemorySendChannel | None = None

    async def connect(self, address: Multiaddr, source: int = 0) -> trio.SocketStream:
        """Return one end of the connection of the two that dial with a port of their own."""
        if not source:
            return await connect(address)
        self.ports.append(source)
        if self._first is None:
            self._first, wait = trio.open_memory_channel(1)
            with trio.fail_after(PATIENCE_S):
                return await wait.receive()
        first, self._first = self._first, None
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        mine = await connect(tcp_address(*listener.socket.getsockname()[:2]))
        first.send_nowait(await listener.accept())
        await listener.aclose()
        return mine


async def test_two_that_dial_at_once_have_a_direct_connection(nursery, monkeypatch):
    """Both are seen by the relay alone; who had dialled the circuit is the client of it."""
    meeting = Meeting()
    monkeypatch.setattr(libp2p_host, "connect", meeting.connect)
    r, a, b = await relayed(nursery)
    ports = {direct_of(node, r.peer_id).carrier.local_port for node in (a, b)}
    know(b, a)
    await until(lambda: not any(is_relayed(p.address) for n in (a, b) for p in n.peers()))
    assert set(meeting.ports) == ports
    assert len(ports) == 2
    directions = {
        name: next(p.direction for p in node.peers() if p.peer == other.peer_id)
        for name, node, other in (("a", a, b), ("b", b, a))
    }
    assert directions == {"a": Direction.OUTBOUND, "b": Direction.INBOUND}
    await until(lambda: r.counters()["relay.circuits_closed"] == 1)
    assert (b.counters()["punch.done"], b.counters()["punch.failed"]) == (1, 0)
    for sender, receiver in ((a, b), (b, a)):
        data = payload(2**20)
        sender.send(receiver.peer_id, data, tag=1)
        with trio.fail_after(PATIENCE_S):
            event = await next_event(receiver, EnvelopeReceived)
        assert bytes(event.data) == data
        assert not is_relayed(event.observed_address)
    assert faults(a) == faults(b) == []


async def test_who_can_be_dialled_is_dialled(nursery):
    """The one that was dialled through the relay dials back, which needs no punch."""
    r, b = relay_node(), dial_only("b", limits=QUICK)
    a = Libp2pTransport(Identity.from_seed(b"a" * 32), listen=[LOOPBACK], relay=USE, limits=SLOW)
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], b)
    know(b, a)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await until(lambda: b.counters()["punch.done"] == 1)
    await until(lambda: a.peers() and not any(is_relayed(p.address) for p in b.peers()))
    await until(lambda: r.counters()["relay.circuits_closed"] == 1)
    assert a.counters()["dial.attempts"] == 1


async def test_a_stranger_is_not_dialled_at_its_word(nursery):
    _, a, b = await relayed(nursery)
    for _ in range(5):
        await trio.testing.wait_all_tasks_blocked(0.05)
    assert b.counters()["punch.tried"] == 0
    assert any(is_relayed(p.address) for p in a.peers())


async def test_a_punch_that_fails_leaves_the_circuit(nursery, monkeypatch):
    r, a, b = await relayed(nursery)

    async def refused(address, source=0):
        raise DialError(f"cannot dial {address}: nobody is there")

    monkeypatch.setattr(libp2p_host, "connect", refused)
    know(b, a)
    await until(lambda: b.counters()["punch.failed"] == MAX_PUNCHES)
    a.send(b.peer_id, b"still here", tag=1)
    event = await next_event(b, EnvelopeReceived)
    assert event.data == b"still here"
    assert is_relayed(event.observed_address)
    assert r.counters()["relay.circuits_closed"] == 0
    assert b.counters()["punch.tried"] == MAX_PUNCHES


# -- peers that lie --------------------------------------------------------------------------


async def punched_by(nursery, monkeypatch, *addresses: str, seen: str | None = None):
    """Have b, dialled by a, begin a punch in which it names these addresses; what a dialled."""
    dialled = []

    async def note(address, source=0):
        dialled.append(str(address))
        return await connect(address)

    r, a, b = await relayed(nursery)
    monkeypatch.setattr(libp2p_host, "connect", note)
    async with b.open_stream(a.peer_id, PUNCH_PROTOCOL) as stream:
        await write_step(stream, PunchStep.CONNECT, [Multiaddr(each) for each in addresses])
        try:
            with trio.fail_after(PATIENCE_S):
                await read_step(stream, PunchStep.CONNECT)
                await write_step(stream, PunchStep.SYNC)
                await stream.end()
                while await stream.read(100):
                    pass
        except StreamBrokenError:
            pass
    return r, a, b, dialled


async def test_another_peer_at_its_address_counts(nursery, monkeypatch):
    other = relay_node("o")
    await nursery.start(other.run)
    there = str(other.listen_addresses()[0]).partition("/p2p/")[0]
    _, a, _, dialled = await punched_by(nursery, monkeypatch, there)
    assert dialled == [there]
    assert faults(a) == [RelayFault.ADDRESSES]
    assert any(is_relayed(p.address) for p in a.peers())


async def test_names_and_relays_are_not_dialled(nursery, monkeypatch):
    relay = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed(b'z' * 32).peer_id}/p2p-circuit"
    _, a, _, dialled = await punched_by(
        nursery, monkeypatch, "/dns4/internal.example/tcp/1", relay, "/ip4/0.0.0.0/tcp/1"
    )
    assert dialled == []
    assert faults(a) == []


async def test_what_is_private_here_is_not_dialled_for_a_peer_from_afar(nursery, monkeypatch):
    monkeypatch.setattr(
        punching,
        "dialable",
        lambda claimed, *, seen, good: inner(
            claimed, seen=Multiaddr(str(seen).replace("127.0.0.1", "8.8.8.8")), good=good
        ),
    )
    _, _, _, dialled = await punched_by(
        nursery, monkeypatch, "/ip4/127.0.0.1/tcp/22", "/ip4/10.0.0.1/tcp/22", "/ip6/fe80::1/tcp/1"
    )
    assert dialled == []


inner = punching.dialable


async def test_too_many_addresses_are_refused(nursery, monkeypatch):
    many = [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, MAX_PUNCH_ADDRESSES + 2)]
    _, a, _, dialled = await punched_by(nursery, monkeypatch, *many)
    assert dialled == []
    assert faults(a) == [RelayFault.MALFORMED]


async def test_garbage_and_whose_turn_it_is(nursery):
    _, a, b = await relayed(nursery)
    async with b.open_stream(a.peer_id, PUNCH_PROTOCOL) as stream:
        await stream.write(b"\x02\xff\xff")
        with pytest.raises(StreamBrokenError):
            await read_step(stream, PunchStep.CONNECT)
    async with b.open_stream(a.peer_id, PUNCH_PROTOCOL) as stream:
        await write_step(stream, PunchStep.SYNC)
        with pytest.raises(StreamBrokenError):
            await read_step(stream, PunchStep.CONNECT)
    # It is not for who has dialled to begin.
    with pytest.raises(StreamBrokenError):
        async with a.open_stream(b.peer_id, PUNCH_PROTOCOL) as stream:
            await read_step(stream, PunchStep.CONNECT)
    assert faults(a) == [RelayFault.MALFORMED] * 2
    assert faults(b) == [RelayFault.UNINVITED]
