"""The DHT of a node: finding peers and providers through others, and what others may say.

py-libp2p's KadDHT as it comes stands on the other side wherever `plain` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_CLOSER_PEERS,
    MAX_KEY_PROVIDERS,
    MAX_PROVIDER_RECORDS,
    MAX_PROVIDER_RECORDS_PER_PEER,
    MAX_ROUTING_ANSWER_BYTES,
    MAX_ROUTING_KEY_BYTES,
    MAX_ROUTING_PEERS,
    MAX_ROUTING_REQUEST_BYTES,
    MAX_ROUTING_STREAMS,
    PROVIDE_EVERY_S,
    PROVIDER_RECORD_S,
    ROUTING_ALL_PER_S,
    ROUTING_BURST,
    ROUTING_LINGER_S,
    ROUTING_PER_S,
    ROUTING_REFRESH_S,
    ROUTING_SETTLE_S,
)
from bbnode.ir.peer import PeerId
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.py_libp2p.dht.checks import Checks
from bbnode.transport.libp2p.py_libp2p.dht.finding import Dht
from bbnode.transport.libp2p.py_libp2p.dht.host import QuestionRates
from bbnode.transport.libp2p.py_libp2p.dht.stores import KnownPeers, Providers
from bbnode.transport.routing import (
    NobodyToAsk,
    NotFound,
    RoutingFault,
    RoutingRefused,
    RoutingSetup,
    dht_protocol,
)
from tests.patience import PATIENCE_S
from tests.transport.hosts import LOOPBACK, OurHost, dial
from tests.transport.plain import plain_dial, plain_host, plain_running

NETWORK = PeerId.from_seed("a private network")
PROGRAM = hashlib.sha256(b"a program").digest()
# As its multihash: what other implementations ask for.
PROGRAM_KEY = b"\x12\x20" + PROGRAM
FIND, GET_PROVIDERS, ADD = (
    getattr(Message.MessageType, name) for name in ("FIND_NODE", "GET_PROVIDERS", "ADD_PROVIDER")
)


class Router:
    """A host of ours with a DHT, and what it blames others for."""

    def __init__(self, seed: int, network: PeerId | None = None, **changes: Any) -> None:
        self.host = OurHost(seed, py_libp2p=True)
        self.faults: list[tuple[PeerId, RoutingFault]] = []
        self.dialled: list[PeerId] = []
        # Where connected peers say that they are; known by a hello in a node.
        self.claims: dict[PeerId, Sequence[Multiaddr]] = {}
        setup: dict[str, Any] = {
            "network": network,
            "serves": True,
            "admits": lambda _peer: True,
            "may_dial": lambda _peer: True,
            **changes,
        }
        self.dht = Dht(
            self.host.other,  # type: ignore[arg-type]
            RoutingSetup(on_fault=lambda *fault: self.faults.append(fault), **setup),
            addresses=lambda: [Multiaddr(f"{a}/p2p/{self.peer}") for a in self.host.listening],
            claims=lambda peer: self.claims.get(peer, ()),
            reach=self._reach,
            release=self._release,
        )
        self.released: list[PeerId] = []

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    @property
    def theirs(self) -> ID:
        return ID(self.peer.to_bytes())

    async def _reach(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        self.dialled.append(peer)
        await self.host.dial(addresses[0], peer)

    def _release(self, peer: PeerId) -> None:
        self.released.append(peer)

    def __getitem__(self, name: str) -> int:
        return self.dht.counters()[name]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Router]:
        async with self.host.running([LOOPBACK]), trio.open_nursery() as nursery:
            nursery.start_soon(self.dht.run)
            yield self
            nursery.cancel_scope.cancel()


async def until(reached: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not reached():  # noqa: ASYNC110
            await trio.sleep(0.01)


@asynccontextmanager
async def chain(count: int, network: PeerId | None, **changes: Any) -> AsyncIterator[list[Router]]:
    """Routers of which each has connected with the next, and knows nobody else."""
    made = [Router(n + 1, network, **changes) for n in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for each in made:
            await stack.enter_async_context(each.running())
        for here, there in itertools.pairwise(made):
            here.claims[there.peer] = there.host.listening
            there.claims[here.peer] = here.host.listening
            await dial(here.host, there.host)
        yield made


@pytest.mark.parametrize("network", [None, NETWORK], ids=["open", "private"])
async def test_a_peer_and_a_program_are_found_over_three_hops(network):
    async with chain(4, network) as (first, *_, last):
        last.dht.provide([PROGRAM])
        await until(lambda: last.dht.as_json()["providing"][PROGRAM.hex()])
        found = await first.dht.find_peer(last.peer)
        assert found.addresses == tuple(last.host.listening)
        (provider,) = await first.dht.find_providers(PROGRAM)
        assert (provider.peer, provider.addresses) == (last.peer, tuple(last.host.listening))
        assert not first.faults
        # In a private network as a member does; elsewhere by py-libp2p's own dial.
        assert bool(first.dialled) == (network is not None)


async def test_a_client_asks_and_is_in_nobodys_table():
    asking = Router(9, serves=False)
    async with chain(2, None) as (first, last), asking.running():
        asking.claims[first.peer] = first.host.listening
        first.claims[asking.peer] = asking.host.listening
        await dial(asking.host, first.host)
        await until(lambda: asking["peers"])
        assert (await asking.dht.find_peer(last.peer)).addresses
        assert asking.dht.as_json()["mode"] == "client"
        with pytest.raises(NotFound):
            await last.dht.find_peer(PeerId.from_seed("nobody"))


async def test_networks_do_not_ask_each_other():
    members, others = Router(1, NETWORK), Router(2, PeerId.from_seed("another"))
    async with members.running(), others.running():
        members.claims[others.peer] = others.host.listening
        await dial(members.host, others.host)
        await until(lambda: members["peers"])
        with pytest.raises(NotFound):
            await members.dht.find_peer(PeerId.from_seed("nobody"))
        assert not others["answered"]
        # Nor does it stay in the table.
        assert not members["peers"]


async def test_without_peers_there_is_nobody_to_ask():
    alone = Router(1)
    async with alone.running():
        with pytest.raises(NobodyToAsk, match=r"routing\.dht"):
            await alone.dht.find_peer(PeerId.from_seed("anybody"))
        assert alone["not_found"] == 1


async def test_who_is_not_admitted_is_neither_asked_nor_answered_nor_told_of():
    blocked: set[PeerId] = set()
    async with chain(3, NETWORK, admits=lambda peer: peer not in blocked) as (first, middle, last):
        await until(lambda: first["peers"] == 2)
        blocked.add(last.peer)
        with pytest.raises(SwarmException, match="not admitted"):
            await middle.dht._host.new_stream(last.theirs, [PROTOCOL_ID])
        asks = await last.host.py.new_stream(middle.theirs, [dht_protocol(NETWORK)])
        with pytest.raises(StreamError):
            await asks.read(1)
        assert middle["streams_refused"]
        assert not middle.dht._store.addrs(last.theirs)


async def test_no_more_are_dialled_than_the_node_allows():
    async with chain(3, NETWORK, may_dial=lambda _peer: False) as (first, _, last):
        await until(lambda: first["over_budget"])
        found = await first.dht.find_peer(last.peer)
        assert found.addresses == tuple(last.host.listening)
        assert not first.dialled


async def test_connections_for_a_search_are_given_back(monkeypatch):
    monkeypatch.setattr("bbnode.transport.libp2p.py_libp2p.dht.host.ROUTING_LINGER_S", 0.05)
    async with chain(3, NETWORK) as (first, _, last):
        await until(lambda: last.peer in first.released or first.peer in last.released)


# -- others on the other side ------------------------------------------------------------------


@asynccontextmanager
async def plain_dht(seed: bytes) -> AsyncIterator[Any]:
    """py-libp2p's KadDHT on a host of its own, as they come."""
    host = plain_host(seed)
    async with plain_running(host, [LOOPBACK]):
        dht = KadDHT(host, DHTMode.SERVER)
        async with background_trio_service(dht):
            yield dht


async def test_an_unpatched_dht_asks_us_and_answers():
    """Ours - theirs - theirs - ours: each end finds what the other has."""
    first, last = Router(1), Router(2)
    async with (
        first.running(),
        last.running(),
        plain_dht(b"p" * 32) as near,
        plain_dht(b"q" * 32) as far,
    ):
        await plain_dial(near.host, first.host.address, first.peer)
        await plain_dial(far.host, last.host.address, last.peer)
        await near.host.connect(PeerInfo(far.host.get_id(), far.host.get_transport_addrs()))
        await until(lambda: first["peers"] and last["peers"])
        for each in (near, far):
            await each.refresh_routing_table()
        last.dht.provide([PROGRAM])
        await until(lambda: last.dht.as_json()["providing"][PROGRAM.hex()])
        assert (await first.dht.find_peer(last.peer)).addresses == tuple(last.host.listening)
        assert last.peer in {each.peer for each in await first.dht.find_providers(PROGRAM)}
        theirs = await near.find_providers(PROGRAM_KEY.hex())
        assert last.theirs in {each.peer_id for each in theirs}
        found = await near.find_peer(last.theirs)
        assert found is not None
        assert not first.faults
        assert not last.faults


async def test_an_unpatched_dht_may_provide_and_its_values_are_not_kept():
    ours = Router(1)
    async with ours.running(), plain_dht(b"p" * 32) as plain:
        await plain_dial(plain.host, ours.host.address, ours.peer)
        await until(lambda: ours["peers"])
        await plain.refresh_routing_table()
        assert await plain.provide(PROGRAM_KEY.hex())
        (provider,) = await ours.dht.find_providers(PROGRAM)
        assert provider.peer.to_bytes() == plain.host.get_id().to_bytes()
        await plain.value_store._store_at_peer(ours.theirs, b"/v/key", b"value")
        await until(lambda: ours["values"])
        assert not ours.dht._kad.value_store.store
        assert not ours.faults


# -- what others may say -------------------------------------------------------------------------

SENDER = Identity.from_seed(b"s" * 32)
NAMED = Identity.from_seed(b"n" * 32)
WAY = Multiaddr("/ip4/192.168.1.9/tcp/4001")
GOOD = Multiaddr("/ip4/192.168.1.20/tcp/4001")


def theirs(identity: Identity) -> ID:
    return ID(identity.peer_id.to_bytes())


def record(of: Identity, *addresses: Multiaddr, signed_by: Identity | None = None) -> bytes:
    """A peer record, which somebody else may have signed."""
    key = create_new_key_pair((signed_by or of).seed).private_key
    return create_signed_peer_record(theirs(of), list(addresses), key).marshal_envelope()


class Reading:
    """Checks without a network."""

    def __init__(self) -> None:
        self.faults: list[tuple[PeerId, RoutingFault]] = []
        self.counts: Counter[str] = Counter()
        self.now_s = 1e9
        swarm: Any = SimpleNamespace(connections={}, peerstore=None)
        own = theirs(Identity.from_seed(b"o" * 32))
        self.store = KnownPeers(own, swarm, lambda _peer: (), dht_protocol(None))
        setup = RoutingSetup(
            network=None,
            serves=True,
            admits=lambda _peer: True,
            may_dial=lambda _peer: True,
            on_fault=lambda *fault: self.faults.append(fault),
        )
        self.checks = Checks(setup, self.store, self.counts)
        host: Any = SimpleNamespace(get_id=lambda: own, get_addrs=list)
        self.providers = self.checks.providers = Providers(host, None, lambda: self.now_s)

    def question(self, message: Message) -> Message:
        raw = self.checks.question(message.SerializeToString(), theirs(SENDER), WAY)
        return Message.FromString(raw)

    def answer(self, message: Message, asked: Message | None = None) -> Message:
        asked = asked or Message(type=message.type, key=b"key")
        raw = self.checks.answer(
            message.SerializeToString(), asked.SerializeToString(), theirs(SENDER), WAY
        )
        return Message.FromString(raw)


def told(*addresses: Multiaddr, of: Identity = NAMED, signed: bytes | None = None) -> Message:
    """An answer that tells of one peer."""
    message = Message(type=FIND)
    entry = message.closerPeers.add()
    entry.id = of.peer_id.to_bytes()
    entry.addrs.extend(each.to_bytes() for each in addresses)
    if signed is not None:
        entry.signedRecord = signed
    return message


def provided(*addresses: Multiaddr, of: Identity = SENDER, key: bytes = PROGRAM_KEY) -> Message:
    message = Message(type=ADD, key=key)
    entry = message.providerPeers.add()
    entry.id = of.peer_id.to_bytes()
    entry.addrs.extend(each.to_bytes() for each in addresses)
    return message


def with_sender(message: Message, raw: bytes) -> Message:
    message.senderRecord = raw
    return message


QUESTIONS = {
    "no key": (Message(type=FIND), RoutingFault.MALFORMED),
    "a long key": (
        Message(type=FIND, key=b"k" * (MAX_ROUTING_KEY_BYTES + 1)),
        RoutingFault.MALFORMED,
    ),
    "a record of another": (
        with_sender(Message(type=FIND, key=b"k"), record(NAMED, GOOD)),
        RoutingFault.FORGED,
    ),
    "a record that another signed": (
        with_sender(Message(type=FIND, key=b"k"), record(SENDER, GOOD, signed_by=NAMED)),
        RoutingFault.FORGED,
    ),
    "a record cut short": (
        with_sender(Message(type=FIND, key=b"k"), record(SENDER, GOOD)[:-3]),
        RoutingFault.FORGED,
    ),
    "another as provider": (provided(GOOD, of=NAMED), RoutingFault.CONTRADICTION),
    "an address of another": (
        provided(Multiaddr(f"{GOOD}/p2p/{NAMED.peer_id}")),
        RoutingFault.CONTRADICTION,
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_bad_question_is_refused(name):
    message, fault = QUESTIONS[name]
    reading = Reading()
    with pytest.raises(RoutingRefused) as refused:
        reading.question(message)
    assert refused.value.fault is fault
    assert not reading.providers.size()


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(RoutingRefused) as refused:
        Reading().checks.question(b"\xff\xff\xff", theirs(SENDER), WAY)
    assert refused.value.fault is RoutingFault.MALFORMED


def test_a_sound_question_has_no_record_left_and_tells_where_its_sender_is():
    reading = Reading()
    asked = reading.question(with_sender(Message(type=FIND, key=b"k"), record(SENDER, GOOD)))
    assert not asked.HasField("senderRecord")
    assert reading.store.addrs(theirs(SENDER)) == [GOOD]


BAD_ENTRIES = {
    "another's record": (told(GOOD, signed=record(SENDER, GOOD)), RoutingFault.FORGED),
    "a record that its teller signed": (
        told(GOOD, signed=record(NAMED, GOOD, signed_by=SENDER)),
        RoutingFault.FORGED,
    ),
    "a record with another's address": (
        told(signed=record(NAMED, Multiaddr(f"{GOOD}/p2p/{SENDER.peer_id}"))),
        RoutingFault.FORGED,
    ),
    "another's address": (
        told(Multiaddr(f"{GOOD}/p2p/{SENDER.peer_id}")),
        RoutingFault.CONTRADICTION,
    ),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_costs_itself_and_a_fault(name):
    message, fault = BAD_ENTRIES[name]
    other = message.closerPeers.add()
    other.id = Identity.from_seed(b"x" * 32).peer_id.to_bytes()
    other.addrs.append(GOOD.to_bytes())
    reading = Reading()
    left = reading.answer(message).closerPeers
    assert [each.id for each in left] == [other.id]
    assert reading.faults == [(SENDER.peer_id, fault)]
    assert reading.counts[f"fault.{fault.value}"] == 1
    assert not reading.store.addrs(theirs(NAMED))


def test_no_peer_id_is_malformed():
    message = told(GOOD)
    message.closerPeers[0].id = b"not one"
    reading = Reading()
    assert not reading.answer(message).closerPeers
    assert reading.faults == [(SENDER.peer_id, RoutingFault.MALFORMED)]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Message(type=GET_PROVIDERS, key=b"key"), RoutingFault.MALFORMED),
        (Message(type=FIND, key=b"another"), RoutingFault.CONTRADICTION),
        (
            with_sender(Message(type=FIND), record(NAMED, GOOD)),
            RoutingFault.FORGED,
        ),
    ],
)
def test_a_bad_answer_is_refused_whole(answer, fault):
    with pytest.raises(RoutingRefused) as refused:
        Reading().answer(answer, Message(type=FIND, key=b"key"))
    assert refused.value.fault is fault


def test_more_peers_than_an_answer_may_have_are_cut():
    message = Message(type=FIND)
    for n in range(MAX_CLOSER_PEERS + 10):
        entry = message.closerPeers.add()
        entry.id = PeerId.from_seed(f"{n}").to_bytes()
        entry.addrs.append(GOOD.to_bytes())
    reading = Reading()
    # The peer that is looked for may come beside them.
    assert len(reading.answer(message).closerPeers) == MAX_CLOSER_PEERS + 1
    assert reading.faults == [(SENDER.peer_id, RoutingFault.FLOOD)]


def test_addresses_nearer_to_us_than_their_teller_are_left_out():
    public = Multiaddr("/ip4/8.8.4.4/tcp/4001")
    named = Multiaddr("/dns4/example.org/tcp/4001")
    loopback, link = Multiaddr("/ip4/127.0.0.1/tcp/22"), Multiaddr("/ip4/169.254.169.254/tcp/80")
    reading = Reading()
    for message in (
        told(loopback, link, named, GOOD, public),
        told(signed=record(NAMED, loopback, link, named, GOOD, public)),
    ):
        (left,) = reading.answer(message).closerPeers
        assert [Multiaddr(each) for each in left.addrs] == [GOOD, public]


def test_what_a_peer_has_signed_stands_above_what_others_say():
    reading = Reading()
    moved = Multiaddr("/ip4/192.168.1.66/tcp/4001")
    reading.answer(told(signed=record(NAMED, GOOD)))
    (left,) = reading.answer(told(moved)).closerPeers
    assert [Multiaddr(each) for each in left.addrs] == [GOOD]
    assert theirs(NAMED) not in reading.checks.told


def test_an_older_record_is_counted_and_changes_nothing():
    reading = Reading()
    moved = Multiaddr("/ip4/192.168.1.66/tcp/4001")
    older = record(NAMED, GOOD)
    newer = record(NAMED, moved)
    reading.answer(told(signed=newer))
    reading.answer(told(GOOD, signed=older))
    assert reading.store.addrs(theirs(NAMED)) == [moved]
    assert reading.counts["stale_records"] == 1
    assert not reading.faults  # a sound peer may have it


def test_who_gave_an_address_is_known():
    reading = Reading()
    reading.answer(told(GOOD))
    assert reading.checks.told[theirs(NAMED)] == {GOOD: SENDER.peer_id}


# -- what is kept --------------------------------------------------------------------------------


def test_a_flood_of_provider_records_is_refused_and_costs_nobody_else():
    reading = Reading()
    for n in range(MAX_PROVIDER_RECORDS_PER_PEER):
        key = n.to_bytes(4, "big")
        reading.question(provided(GOOD, key=key))
        reading.providers.add_provider(key, PeerInfo(theirs(SENDER), [GOOD]))
    with pytest.raises(RoutingRefused) as refused:
        reading.question(provided(GOOD, key=b"one more"))
    assert refused.value.fault is RoutingFault.FLOOD
    # What it has it may renew, and others have room.
    reading.question(provided(GOOD, key=(7).to_bytes(4, "big")))
    assert reading.providers.has_room(b"one more", theirs(NAMED))
    assert reading.providers.size() == MAX_PROVIDER_RECORDS_PER_PEER


def test_a_key_has_so_many_providers():
    reading = Reading()
    for n in range(MAX_KEY_PROVIDERS + 1):
        peer = ID(PeerId.from_seed(f"{n}").to_bytes())
        reading.providers.add_provider(b"key", PeerInfo(peer, [GOOD]))
    assert len(reading.providers.get_providers(b"key")) == MAX_KEY_PROVIDERS


def test_a_provider_record_expires_and_gives_its_room_back():
    reading = Reading()
    reading.providers.add_provider(b"key", PeerInfo(theirs(SENDER), [GOOD]))
    reading.now_s += PROVIDER_RECORD_S
    assert reading.providers.get_providers(b"key")
    reading.now_s += 1
    assert not reading.providers.get_providers(b"key")
    assert not reading.providers.providers
    assert not reading.providers.size()


def test_what_an_answer_says_of_providers_is_no_record_here():
    reading = Reading()
    message = Message(type=GET_PROVIDERS, key=b"key")
    entry = message.providerPeers.add()
    entry.id = NAMED.peer_id.to_bytes()
    entry.addrs.append(GOOD.to_bytes())
    assert reading.answer(message).providerPeers
    assert not reading.providers.size()


def test_a_peer_asks_so_often():
    rates = QuestionRates(ROUTING_BURST, ROUTING_PER_S)
    asked = sum(rates.take(SENDER.peer_id, 0.0) for _ in range(2 * ROUTING_BURST))
    assert asked == ROUTING_BURST
    assert rates.take(NAMED.peer_id, 0.0)
    asked = sum(rates.take(SENDER.peer_id, 1.0) for _ in range(ROUTING_BURST))
    assert asked == ROUTING_PER_S


# -- on the wire ---------------------------------------------------------------------------------


@asynccontextmanager
async def asked_by_plain() -> AsyncIterator[tuple[Router, Any]]:
    """A router, and a connected host of py-libp2p that says what a test wants."""
    ours, plain = Router(1), plain_host(b"p" * 32)
    with trio.fail_after(PATIENCE_S):
        async with ours.running(), plain_running(plain, [LOOPBACK]):
            await plain_dial(plain, ours.host.address, ours.peer)
            await until(lambda: ours.host.py.get_connected_peers())
            yield ours, plain


async def test_what_is_no_message_ends_its_stream_and_nothing_else():
    async with asked_by_plain() as (ours, plain):
        blamed = PeerId.from_bytes(plain.get_id().to_bytes())
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        await stream.write(encode_varint_prefixed(b"\xff\xff\xff"))
        with pytest.raises(StreamError):
            await stream.read(1)
        assert ours.faults == [(blamed, RoutingFault.MALFORMED)]
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        for _ in range(2):
            await stream.write(encode_varint_prefixed(_ping()))
            assert await read_varint_prefixed_bytes_limited(stream, 1024) == _ping()
        assert ours["answered"] == 2


async def test_streams_that_say_nothing_keep_nobody_from_being_answered():
    async with asked_by_plain() as (ours, plain):
        for _ in range(MAX_ROUTING_STREAMS - 1):
            await plain.new_stream(ours.theirs, [dht_protocol(None)])
        asks = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        await asks.write(encode_varint_prefixed(_ping()))
        assert await read_varint_prefixed_bytes_limited(asks, 1024) == _ping()
        beyond = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        with pytest.raises(StreamError):
            await beyond.read(1)
        assert ours["streams_refused"] == 1


async def test_whoever_asks_too_often_is_blamed():
    async with asked_by_plain() as (ours, plain):
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])

        async def asks() -> None:
            for _ in range(4 * ROUTING_BURST):
                await stream.write(encode_varint_prefixed(_ping()))
                await read_varint_prefixed_bytes_limited(stream, 1024)

        with pytest.raises(StreamError):
            await asks()
        assert [fault for _, fault in ours.faults] == [RoutingFault.FLOOD]


async def test_a_liar_loses_its_answer_and_the_search_goes_on():
    async with chain(2, None) as (first, last):
        plain = plain_host(b"p" * 32)

        async def lie(stream: Any) -> None:
            await read_varint_prefixed_bytes_limited(stream, 64 * 1024)
            await stream.write(
                encode_varint_prefixed(Message(type=GET_PROVIDERS).SerializeToString())
            )
            await stream.close()

        plain.set_stream_handler(dht_protocol(None), lie)
        async with plain_running(plain, [LOOPBACK]):
            await plain_dial(plain, first.host.address, first.peer)
            await until(lambda: first["fault.malformed"])
            assert (await first.dht.find_peer(last.peer)).addresses


def _ping() -> bytes:
    return Message(type=Message.MessageType.PING).SerializeToString()


# -- bounds and times ----------------------------------------------------------------------------

CHECKED = "bbnode.transport.libp2p.py_libp2p.dht."


async def test_a_question_that_is_too_long_is_not_read():
    async with asked_by_plain() as (ours, plain):
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        await stream.write(encode_varint_prefixed(bytes(MAX_ROUTING_REQUEST_BYTES + 1))[:64])
        with pytest.raises(StreamError):
            await stream.read(1)
        assert [fault for _, fault in ours.faults] == [RoutingFault.FLOOD]


async def test_a_stream_without_a_question_ends(monkeypatch):
    monkeypatch.setattr(CHECKED + "host.ROUTING_IDLE_S", 0.05)
    async with asked_by_plain() as (ours, plain):
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        with pytest.raises(StreamError):
            await stream.read(1)
        assert not ours.faults


@asynccontextmanager
async def beside_a_stranger(handler: Any) -> AsyncIterator[tuple[Router, Router]]:
    """Two routers that know each other, and a host that answers the first in its own way."""
    async with chain(2, None) as (first, last):
        plain = plain_host(b"p" * 32)
        plain.set_stream_handler(dht_protocol(None), handler)
        async with plain_running(plain, [LOOPBACK]):
            await plain_dial(plain, first.host.address, first.peer)
            theirs = plain.get_id()
            await until(lambda: theirs in first.host.py.get_connected_peers())
            yield first, last


async def test_an_answer_that_is_too_long_is_not_read():
    async def flood(stream: Any) -> None:
        await stream.write(encode_varint_prefixed(bytes(MAX_ROUTING_ANSWER_BYTES + 1))[:64])

    async with beside_a_stranger(flood) as (first, last):
        await until(lambda: first["fault.flood"])
        assert (await first.dht.find_peer(last.peer)).addresses


async def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(CHECKED + "host.ROUTING_ANSWER_S", 0.05)

    async def silence(_stream: Any) -> None:
        await trio.sleep_forever()

    async with beside_a_stranger(silence) as (first, last):
        assert (await first.dht.find_peer(last.peer)).addresses
        assert not first.faults


async def test_a_search_ends_in_time(monkeypatch):
    monkeypatch.setattr(CHECKED + "finding.FIND_S", 0.05)

    async def silence(_stream: Any) -> None:
        await trio.sleep_forever()

    async with beside_a_stranger(silence) as (first, _):
        with pytest.raises(NotFound):
            await first.dht.find_peer(PeerId.from_seed("nobody"))


def test_a_node_keeps_so_many_records_for_others(monkeypatch):
    monkeypatch.setattr(CHECKED + "stores.MAX_PROVIDER_RECORDS", 3)
    reading = Reading()
    for n in range(3):
        reading.providers.add_provider(bytes([n]), PeerInfo(theirs(NAMED), [GOOD]))
    with pytest.raises(RoutingRefused) as refused:
        reading.question(provided(GOOD))
    assert refused.value.fault is RoutingFault.FLOOD
    assert MAX_PROVIDER_RECORDS > 3


async def test_a_server_makes_itself_known_as_peers_come_and_then_now_and_then(autojump_clock):
    router = Router(1)
    looks: list[float] = []

    async def look() -> None:
        await trio.lowlevel.checkpoint()
        looks.append(trio.current_time() - start_s)

    router.dht._look_around = look  # type: ignore[method-assign]
    start_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.dht._be_known)
        await trio.sleep(2 * ROUTING_SETTLE_S)
        # One peer after the other, for a long time: each look comes later, and none is lost.
        for _ in range(1000):
            router.dht._wake.set()
            await trio.sleep(ROUTING_REFRESH_S / 100)
        few = len(looks)
        assert looks[0] == pytest.approx(ROUTING_SETTLE_S)
        assert 10 < few < 30
        await trio.sleep(2.5 * PROVIDE_EVERY_S)
        assert len(looks) - few in (2, 3)
        nursery.cancel_scope.cancel()


async def test_what_a_search_has_dialled_stays_for_a_while(autojump_clock):
    router = Router(1)
    host = router.dht._host
    host._dialled[theirs(NAMED)] = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.tidy)
        with host.searching():
            await trio.sleep(5.5 * ROUTING_LINGER_S)
            assert not router.released
        await trio.sleep(ROUTING_LINGER_S)
        assert router.released == [NAMED.peer_id]
        nursery.cancel_scope.cancel()


async def test_all_peers_together_ask_so_often(monkeypatch):
    monkeypatch.setattr(CHECKED + "host.ROUTING_ALL_PER_S", ROUTING_ALL_PER_S / 1000)
    monkeypatch.setattr(CHECKED + "host.ROUTING_BURST", 2)
    async with asked_by_plain() as (ours, plain):
        stream = await plain.new_stream(ours.theirs, [dht_protocol(None)])
        for _ in range(2):
            await stream.write(encode_varint_prefixed(_ping()))
            await read_varint_prefixed_bytes_limited(stream, 1024)
        monkeypatch.setattr(ours.dht._host._rates, "take", lambda *_: True)
        await stream.write(encode_varint_prefixed(_ping()))
        with pytest.raises(StreamError):
            await stream.read(1)
        assert ours["busy"] == 1
        assert not ours.faults


async def test_a_table_takes_so_many_peers_and_keeps_those_it_has():
    table = Router(1).dht._kad.routing_table
    for n in range(MAX_ROUTING_PEERS + 5):
        peer = ID(PeerId.from_seed(f"{n}").to_bytes())
        assert await table.add_peer(PeerInfo(peer, [GOOD])) == (n < MAX_ROUTING_PEERS)
    assert await table.add_peer(PeerInfo(ID(PeerId.from_seed("0").to_bytes()), [GOOD]))
    assert table.size() == MAX_ROUTING_PEERS


def test_what_is_beyond_a_bound_is_not_even_read():
    """A quarter of a million entries, and as many addresses, cost what their bytes do."""
    many = Message(type=FIND)
    for _ in range(50_000):
        many.closerPeers.add()
    addresses = told(*[GOOD] * 50_000)
    reading = Reading()
    seen: list[bytes] = []
    reading.checks._is_sound = lambda entry, *_: bool(seen.append(entry.id))  # type: ignore[method-assign]
    reading.answer(many)
    assert len(seen) == MAX_CLOSER_PEERS + 1
    (left,) = Reading().answer(addresses).closerPeers
    assert [Multiaddr(each) for each in left.addrs] == [GOOD]
