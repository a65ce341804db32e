"""Relays that claim what they have not, and users of relays that ask for what is not theirs."""

from __future__ import annotations

import time
from functools import partial

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_RELAY_ADDRESSES,
    MAX_RELAY_MESSAGE_BYTES,
    MAX_RESERVATION_S,
    MIN_CIRCUIT_BYTES,
    RELAY_BURST,
    RELAY_PER_S,
)
from bbnode.ir.envelope import varint
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, Counters, RelayMisused
from bbnode.transport.errors import DialError, RelayFault, StreamBrokenError
from bbnode.transport.libp2p.keys import encode_field
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay import client as relay_client
from bbnode.transport.libp2p.relay import server as relay_server
from bbnode.transport.libp2p.relay.messages import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    CircuitLimit,
    CircuitOffer,
    RelayAnswer,
    RelayCommand,
    RelayMessageError,
    RelayRequest,
    RelayStatus,
    read_acceptance,
    read_answer,
    read_request,
    write_acceptance,
    write_answer,
    write_offer,
    write_request,
)
from bbnode.transport.limits import RelaySettings
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import next_event
from tests.transport.test_relay import (
    dial_only,
    direct_of,
    join,
    relay_node,
    trio_of_nodes,
    until,
    waiting_events,
)

pytestmark = pytest.mark.usefixtures("each_transport")

OTHER = PeerId.from_seed("other")
RESERVE = RelayRequest(ask=RelayCommand.RESERVE)


def blamed(node, peer) -> list[RelayFault]:
    """The faults of a peer that a node has reported, each of them counted as well."""
    found = [e for e in waiting_events(node) if isinstance(e, RelayMisused)]
    assert all(e.peer == peer and e.reason for e in found)
    for fault in RelayFault:
        assert node.counters()[f"relay.{fault}"] == [e.fault for e in found].count(fault)
    return [e.fault for e in found]


def as_relay(node, serve) -> None:
    """Have `serve` answer what a node is asked as a relay."""
    node._protocols._handlers[HOP_PROTOCOL] = serve


async def dialled(nursery, serve):
    """A node and a relay of an attacker's own kind, which the node has dialled."""
    evil, a = relay_node("e"), dial_only("a")
    as_relay(evil, serve)
    for node in (evil, a):
        await nursery.start(node.run)
    a.keep_connected(evil.peer_id, evil.listen_addresses())
    await next_event(a, ConnectionOpened)
    return evil, a


# -- reservations ----------------------------------------------------------------------------


async def promise(lasts_s: int, stream: LinkedStream) -> None:
    """Give a reservation of so many seconds from now."""
    await read_request(stream)
    expires_s = max(0, int(time.time()) + lasts_s)
    await write_answer(stream, RelayAnswer(status=RelayStatus.OK, expires_s=expires_s))


@pytest.mark.parametrize("lasts_s", [-5, -(2**40)])
async def test_a_reservation_that_is_over_is_none(nursery, lasts_s):
    evil, a = await dialled(nursery, partial(promise, lasts_s))
    await until(lambda: a.counters()["relay.expired"])
    assert a.listen_addresses() == []
    assert blamed(a, evil.peer_id) == [RelayFault.EXPIRED]


async def test_a_reservation_without_an_end_is_renewed_like_any(nursery, monkeypatch):
    monkeypatch.setattr(relay_client, "_ENDLESS_S", 0.01)
    monkeypatch.setattr(relay_client, "_RENEW_S", 0.01)
    evil, a = await dialled(nursery, partial(promise, 2 * MAX_RESERVATION_S))
    await until(lambda: a.counters()["relay.endless"] > 1)
    assert len(a.listen_addresses()) == 1
    assert set(blamed(a, evil.peer_id)) == {RelayFault.ENDLESS}


async def test_the_longest_reservation_is_no_fault(nursery):
    _, a = await dialled(nursery, partial(promise, MAX_RESERVATION_S - 10))
    await until(lambda: len(a.listen_addresses()) == 1)
    assert a.counters()["relay.endless"] == 0


async def test_a_reservation_is_for_who_asks_whoever_is_named(nursery):
    r, a, b = relay_node(), dial_only("a"), dial_only("b")
    for node in (r, a, b):
        await nursery.start(node.run)
    await join([r], a)
    b.keep_connected(r.peer_id, r.listen_addresses())
    await next_event(b, ConnectionOpened)
    await until(lambda: r.peer_id in b._relay_client._reserved)
    r._relay_server._reserved.clear()
    async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
        body = encode_field(1, RelayCommand.RESERVE) + encode_field(
            2, encode_field(1, b.peer_id.to_bytes())
        )
        await stream.write(varint(len(body)) + body)
        assert (await read_answer(stream)).status is RelayStatus.OK
    assert set(r._relay_server._reserved) == {a.peer_id}


# -- circuits --------------------------------------------------------------------------------


async def test_a_circuit_that_carries_nothing_is_not_used(nursery):
    limits = iter([CircuitLimit(seconds=9, bytes=1), CircuitLimit(bytes=MIN_CIRCUIT_BYTES - 1)])

    async def serve(stream) -> None:
        if (await read_request(stream)).ask is RelayCommand.CONNECT:
            await write_answer(stream, RelayAnswer(status=RelayStatus.OK, limit=next(limits)))

    evil, a = await dialled(nursery, serve)
    for _ in range(2):
        with pytest.raises(DialError, match="bytes through"):
            await a._relay_client.dial(direct_of(a, evil.peer_id), OTHER)
    assert blamed(a, evil.peer_id) == [RelayFault.USELESS] * 2


async def test_a_relay_without_bounds_is_used(nursery, monkeypatch):
    """0 is no bound, as libp2p has it; what it cuts all the same is made again."""
    monkeypatch.setattr(relay_server.RelayServer, "_limit", CircuitLimit())
    r, a, b = await trio_of_nodes(nursery, circuit_bytes=2 * 2**20)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await next_event(b, ConnectionOpened)
    data = bytes(5 * 2**20)
    a.send(b.peer_id, data, tag=1)
    await until(lambda: r.counters()["relay.circuits_cut"] > 0)
    assert r.counters()["relay.bytes"] >= 2**20
    assert a.counters()["relay.useless"] == 0


async def test_another_peer_than_was_asked_for_is_the_relays_fault(nursery):
    r, a, b = await trio_of_nodes(nursery)

    async def to_b(stream) -> None:
        await read_request(stream)
        await r._relay_server._connect(stream, b.peer_id)

    as_relay(r, to_b)
    with pytest.raises(DialError, match="another"):
        await a._relay_client.dial(direct_of(a, r.peer_id), OTHER)
    assert blamed(a, r.peer_id) == [RelayFault.ANOTHER_PEER]
    assert [p.peer for p in a.peers()] == [r.peer_id]


async def test_another_source_than_was_said_is_the_relays_fault(nursery, monkeypatch):
    r, a, b = await trio_of_nodes(nursery)

    async def lie(stream, offer) -> None:
        await write_offer(stream, CircuitOffer(source=OTHER, limit=offer.limit))

    monkeypatch.setattr(relay_server, "write_offer", lie)
    with pytest.raises(DialError):
        await a._relay_client.dial(direct_of(a, r.peer_id), b.peer_id)
    await until(lambda: b.counters()["relay.another_peer"])
    assert blamed(b, r.peer_id) == [RelayFault.ANOTHER_PEER]
    assert [p.peer for p in b.peers()] == [r.peer_id]
    # The dialler can't know who lied.
    assert blamed(a, r.peer_id) == []


async def test_a_circuit_of_no_relay_of_ours_is_not_taken(nursery):
    r, a = relay_node(), dial_only("a")
    for node in (r, a):
        await nursery.start(node.run)
    await join([r], a)
    a._relay_client._reserved.clear()
    async with r.open_stream(a.peer_id, STOP_PROTOCOL) as stream:
        await write_offer(stream, CircuitOffer(source=OTHER))
        assert await read_acceptance(stream) is RelayStatus.PERMISSION_DENIED
    assert blamed(a, r.peer_id) == [RelayFault.UNINVITED]


async def test_nobody_is_reached_who_has_not_reserved(nursery):
    r, a, b = await trio_of_nodes(nursery)
    r._relay_server._reserved.pop(b.peer_id)
    for target in (b.peer_id, OTHER):
        async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
            await write_request(stream, RelayRequest(ask=RelayCommand.CONNECT, peer=target))
            assert (await read_answer(stream)).status is RelayStatus.NO_RESERVATION
    assert r.counters()["relay.circuits_opened"] == 0
    assert blamed(r, a.peer_id) == []


# -- bytes -----------------------------------------------------------------------------------


def prefixed(body: bytes) -> bytes:
    return varint(len(body)) + body


BAD = {
    "no protobuf": prefixed(b"\xff\xff"),
    "empty CONNECT": prefixed(encode_field(1, RelayCommand.CONNECT)),
    "no such type": prefixed(encode_field(1, 9)),
    "a peer that is none": prefixed(
        encode_field(1, RelayCommand.CONNECT) + encode_field(2, encode_field(1, b"abc"))
    ),
    "a type that is a text": prefixed(encode_field(1, b"RESERVE")),
    "too large": varint(MAX_RELAY_MESSAGE_BYTES + 1),
    "a length without an end": b"\xff\xff\xff",
}


@pytest.mark.parametrize("garbage", BAD.values(), ids=BAD.keys())
async def test_garbage_to_a_relay_is_answered_and_counts(nursery, garbage):
    r, a = relay_node(), dial_only("a")
    for node in (r, a):
        await nursery.start(node.run)
    await join([r], a)
    async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
        await stream.write(garbage)
        assert (await read_answer(stream)).status is RelayStatus.MALFORMED_MESSAGE
    assert blamed(r, a.peer_id) == [RelayFault.MALFORMED]


async def test_an_answer_where_a_request_is_due_is_unexpected(nursery):
    r, a = relay_node(), dial_only("a")
    for node in (r, a):
        await nursery.start(node.run)
    await join([r], a)
    async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
        await write_answer(stream, RelayAnswer(status=RelayStatus.OK))
        assert (await read_answer(stream)).status is RelayStatus.UNEXPECTED_MESSAGE
    async with r.open_stream(a.peer_id, STOP_PROTOCOL) as stream:
        await write_acceptance(stream, RelayStatus.OK)
        assert await read_acceptance(stream) is RelayStatus.UNEXPECTED_MESSAGE
    assert blamed(r, a.peer_id) == [RelayFault.MALFORMED]
    assert blamed(a, r.peer_id) == [RelayFault.MALFORMED]


@pytest.mark.parametrize("garbage", BAD.values(), ids=BAD.keys())
async def test_garbage_of_a_relay_is_no_answer(nursery, garbage):
    async def serve(stream) -> None:
        await stream.write(garbage)

    evil, a = await dialled(nursery, serve)
    await until(lambda: a.counters()["relay.malformed"])
    with pytest.raises(DialError):
        await a._relay_client.dial(direct_of(a, evil.peer_id), OTHER)
    assert a.listen_addresses() == []
    assert blamed(a, evil.peer_id) == [RelayFault.MALFORMED] * 2


@pytest.mark.parametrize("garbage", BAD.values(), ids=BAD.keys())
async def test_garbage_for_an_offer_is_not_taken(nursery, garbage):
    r, a = relay_node(), dial_only("a")
    for node in (r, a):
        await nursery.start(node.run)
    await join([r], a)
    async with r.open_stream(a.peer_id, STOP_PROTOCOL) as stream:
        await stream.write(garbage)
        status = await read_acceptance(stream)
    expected = {RelayStatus.MALFORMED_MESSAGE, RelayStatus.UNEXPECTED_MESSAGE}
    assert status in expected
    assert blamed(a, r.peer_id) == [RelayFault.MALFORMED]


async def test_a_target_that_answers_garbage_is_not_reached(nursery):
    r, a, b = await trio_of_nodes(nursery)

    async def garbage(stream) -> None:
        await stream.write(b"\x02\xff\xff")

    b._protocols._handlers[STOP_PROTOCOL] = garbage
    with pytest.raises(DialError, match="did not take"):
        await a._relay_client.dial(direct_of(a, r.peer_id), b.peer_id)
    assert blamed(r, b.peer_id) == [RelayFault.MALFORMED]


# -- silence, and too much -------------------------------------------------------------------


async def silent(stream) -> None:
    """Read to the end, and say nothing."""
    try:
        while await stream.read(4096):
            pass
    except StreamBrokenError:
        pass


async def test_a_relay_that_is_silent_is_left(nursery, monkeypatch):
    monkeypatch.setattr(relay_client, "RELAY_ANSWER_S", 0.1)
    evil, a = await dialled(nursery, silent)
    await until(lambda: a.counters()["relay.silent"])
    with pytest.raises(DialError, match="silent"):
        await a._relay_client.dial(direct_of(a, evil.peer_id), OTHER)
    assert blamed(a, evil.peer_id) == [RelayFault.SILENT] * 2


async def test_a_relay_that_is_silent_after_its_yes_makes_no_connection(nursery, monkeypatch):
    monkeypatch.setattr("bbnode.transport.libp2p.host.DIALLED_HANDSHAKE_S", 0.2)

    async def serve(stream) -> None:
        if (await read_request(stream)).ask is RelayCommand.CONNECT:
            await write_answer(stream, RelayAnswer(status=RelayStatus.OK))
            await silent(stream)

    evil, a = await dialled(nursery, serve)
    with pytest.raises(DialError, match="no handshake within"):
        await a._relay_client.dial(direct_of(a, evil.peer_id), OTHER)
    assert [p.peer for p in a.peers()] == [evil.peer_id]


async def test_users_that_are_silent_are_left(nursery, monkeypatch):
    r, a, b = await trio_of_nodes(nursery)
    monkeypatch.setattr(relay_server, "RELAY_REQUEST_S", 0.1)
    async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
        with pytest.raises((StreamBrokenError, RelayMessageError)):
            await read_answer(stream)
    assert blamed(r, a.peer_id) == [RelayFault.SILENT]
    b._protocols._handlers[STOP_PROTOCOL] = silent
    with pytest.raises(DialError, match="did not take"):
        await a._relay_client.dial(direct_of(a, r.peer_id), b.peer_id)
    found = [e for e in waiting_events(r) if isinstance(e, RelayMisused)]
    assert [(e.peer, e.fault) for e in found] == [(b.peer_id, RelayFault.SILENT)]


async def test_a_flood_of_requests_is_refused_and_others_are_served(nursery):
    r, a, b = await trio_of_nodes(nursery)
    statuses = []
    with trio.fail_after(PATIENCE_S):
        while statuses.count(RelayStatus.RESOURCE_LIMIT_EXCEEDED) < 8:
            async with a.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
                await write_request(stream, RESERVE)
                statuses.append((await read_answer(stream)).status)
        assert statuses.count(RelayStatus.OK) >= RELAY_BURST - 2
        async with b.open_stream(r.peer_id, HOP_PROTOCOL) as stream:
            await write_request(stream, RESERVE)
            assert (await read_answer(stream)).status is RelayStatus.OK
    assert blamed(r, a.peer_id) == [RelayFault.FLOOD] * 8
    assert set(r._relay_server._reserved) == {a.peer_id, b.peer_id}


async def test_what_a_peer_may_ask_comes_back_with_time(mock_clock):
    counters = Counters()
    server = relay_server.RelayServer(
        RelaySettings(),
        Protocols(counters, streams_per_peer=8, idle_s=60.0, hello_s=10.0),
        counters,
        lambda _peer: None,
        addresses=list,
        blame=lambda *_: None,
    )
    for most, after_s in ((RELAY_BURST, 1.0), (RELAY_PER_S, 0.0)):
        assert sum(server._may_ask(OTHER) for _ in range(2 * int(RELAY_BURST))) == most
        mock_clock.jump(after_s)


async def test_a_relay_gives_no_more_addresses_than_a_message_has_room_for():
    written = bytearray()

    class Stream:
        peer = OTHER

        async def write(self, data: bytes) -> None:
            written.extend(data)

    address = Multiaddr(f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER}")
    answer = RelayAnswer(status=RelayStatus.OK, expires_s=1, addresses=(address,) * 100)
    await write_answer(Stream(), answer)
    assert bytes(written).count(address.to_bytes()) == MAX_RELAY_ADDRESSES
    assert len(written) <= MAX_RELAY_MESSAGE_BYTES
