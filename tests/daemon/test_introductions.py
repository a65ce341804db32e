"""A bootstrap peer introduces those that the program has talk with each other, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.daemon.config import DiscoverySection, NetworkSection
from bbnode.daemon.network import introductions
from bbnode.daemon.network.discovery import Discovery, Origin
from bbnode.daemon.network.introductions import (
    INTRODUCE_PROTOCOL,
    Introductions,
    NotIntroduced,
    decode_introductions,
)
from bbnode.engine import install
from bbnode.examples import gossip_averaging, registry
from bbnode.ir.caps import MAX_INTRODUCED, MAX_INTRODUCTION_BYTES
from bbnode.ir.crossing import Crossing, encode_crossings, sites_of
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionClosed, ConnectionOpened, Direction, Hello
from bbnode.transport.driver import Driver
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S


def crossing(site: int, *, sends: bool = False, takes: bool = False) -> Crossing:
    return Crossing(site=site, sends=sends, takes=takes, kind="send", port="", receiver="", type="")


ASKS = encode_crossings([crossing(1, sends=True), crossing(2, takes=True)])
ANSWERS = encode_crossings([crossing(1, takes=True), crossing(2, sends=True)])
GOSSIPS = encode_crossings([crossing(3, sends=True, takes=True)])


def test_who_talks_to_whom_is_what_one_sends_and_the_other_takes() -> None:
    def talk(one: bytes, other: bytes) -> bool:
        return sites_of(one).talk_with(sites_of(other))

    assert talk(ASKS, ANSWERS)
    assert talk(ANSWERS, ASKS)
    assert talk(GOSSIPS, GOSSIPS)
    assert not talk(ASKS, ASKS)
    assert not talk(ASKS, GOSSIPS)
    assert not talk(b"", ANSWERS)


# -- what is told --------------------------------------------------------------------------------


class NoNetwork:
    """A transport of which nothing but its name is asked."""

    peer_id = PeerId.from_seed("hub")

    def register_protocol(self, protocol_id: str, handler: Any) -> None:
        pass

    def peer_info(self, peer: PeerId) -> None:
        return None


@dataclass
class Trusting:
    """A finder with these bootstrap peers, that knows those peers well."""

    bootstrap: Sequence[PeerId] = ()
    good: Sequence[PeerId] = ()
    told: list[tuple[PeerId, Sequence[Multiaddr]]] = field(default_factory=list)

    def is_bootstrap(self, peer: PeerId) -> bool:
        return peer in self.bootstrap

    def knows_well(self, peer: PeerId) -> bool:
        return peer in self.good

    def introduced(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> bool:
        self.told.append((peer, addresses))
        return True


class Hub:
    """The introductions of a node with peers that only say where they are."""

    def __init__(self, *good: PeerId) -> None:
        self.introductions = Introductions(
            NoNetwork(),  # type: ignore[arg-type]
            Trusting(good=good),
            crossings=b"",
        )

    def joins(self, peer: PeerId, crossings: bytes, *claimed: str, seen: str = "") -> None:
        addresses = [Multiaddr(f"{text}/p2p/{peer}") for text in claimed]
        seen = seen or "/ip4/203.0.113.7/tcp/9999"
        self.introductions.heard(
            ConnectionOpened(
                peer=peer,
                address=Multiaddr(seen),
                direction=Direction.INBOUND,
                hello=Hello(crossings=crossings, listen_addresses=tuple(addresses)),
            )
        )

    def leaves(self, peer: PeerId) -> None:
        self.introductions.heard(ConnectionClosed(peer=peer, reason="gone"))

    def tells(self, asker: PeerId) -> dict[PeerId, list[str]]:
        answer = msgpack.packb(["", self.introductions._rows(asker)])
        return {
            peer: [str(each).partition("/p2p/")[0] for each in addresses]
            for peer, addresses in decode_introductions(answer)
        }


A, B, C = (PeerId.from_seed(name) for name in "abc")
HOME = "/ip4/203.0.113.7/tcp/4001"


def test_those_that_talk_are_introduced_and_others_are_not() -> None:
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    hub.joins(B, ANSWERS, HOME)
    hub.joins(C, GOSSIPS, HOME)
    assert hub.tells(A).keys() == {B}
    assert hub.tells(B).keys() == {A}
    assert hub.tells(C) == {}  # not itself either


def test_who_left_or_tells_nothing_is_not_introduced() -> None:
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    hub.joins(B, ANSWERS, HOME)
    hub.joins(C, b"", HOME)
    hub.leaves(B)
    assert hub.tells(A) == {}
    assert hub.tells(C) == {}
    assert hub.introductions._peers.keys() == {sites_of(ASKS)}


def test_a_new_hello_replaces_the_one_before() -> None:
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    hub.joins(B, GOSSIPS, HOME)
    hub.joins(B, ANSWERS, HOME)
    assert hub.tells(A).keys() == {B}


def test_a_stranger_cannot_have_us_send_others_to_somebody_else() -> None:
    victim = "/ip4/198.51.100.1/tcp/443"
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    hub.joins(B, ANSWERS, victim, HOME, "/dns4/victim.example/tcp/80", "/ip4/10.0.0.1/tcp/1")
    assert hub.tells(A) == {B: [HOME]}
    hub.joins(B, ANSWERS, victim)
    assert hub.tells(A) == {}


def test_a_peer_that_the_program_dealt_with_may_name_other_public_addresses() -> None:
    other = "/ip4/8.8.4.4/tcp/4001"
    hub = Hub(B)
    hub.joins(A, ASKS, HOME)
    hub.joins(B, ANSWERS, other, "/ip4/10.0.0.1/tcp/1", seen="/ip4/8.8.8.8/tcp/1")
    assert hub.tells(A) == {B: [other]}


def test_who_is_reached_through_us_is_introduced_there() -> None:
    ours = f"/ip4/192.0.2.9/tcp/4001/p2p/{NoNetwork.peer_id}/p2p-circuit"
    elses = f"/ip4/192.0.2.9/tcp/4001/p2p/{C}/p2p-circuit"
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    hub.joins(B, ANSWERS, ours, elses)
    rows = decode_introductions(msgpack.packb(["", hub.introductions._rows(A)]))
    assert [str(each) for each in rows[0][1]] == [f"{ours}/p2p/{B}"]


def test_of_many_each_gets_some_and_together_they_reach_everybody() -> None:
    hub = Hub()
    peers = [PeerId.from_seed(str(number)) for number in range(200)]
    for peer in peers:
        hub.joins(peer, GOSSIPS, HOME)
    told = {peer: hub.tells(peer).keys() for peer in peers}
    assert {len(each) for each in told.values()} == {MAX_INTRODUCED}
    reached, new = {peers[0]}, {peers[0]}
    while new:
        new = {other for peer in new for other in told[peer]} - reached
        reached |= new
    assert reached == set(peers)
    assert len({tuple(sorted(each)) for each in told.values()}) > 190


def test_a_request_reads_no_hello_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many different ones strangers have made up."""
    hub = Hub()
    hub.joins(A, ASKS, HOME)
    for number in range(100):
        invented = encode_crossings([crossing(1, takes=True), crossing(100 + number, sends=True)])
        hub.joins(PeerId.from_seed(f"stranger {number}"), invented, HOME)
    monkeypatch.setattr(introductions, "sites_of", None)
    assert len(hub.tells(A)) == MAX_INTRODUCED


# -- what is taken -------------------------------------------------------------------------------

GOOD_ROW = [B.to_bytes(), [Multiaddr(f"{HOME}/p2p/{B}").to_bytes()]]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        msgpack.packb(["", [GOOD_ROW] * (MAX_INTRODUCED + 1)]),
        msgpack.packb(["", [[B.to_bytes(), []]]]),
        msgpack.packb(["", [[B.to_bytes(), GOOD_ROW[1] * 5]]]),
        msgpack.packb(["", [[A.to_bytes(), GOOD_ROW[1]]]]),
        msgpack.packb(["", [[b"x", GOOD_ROW[1]]]]),
        msgpack.packb(["", [[B.to_bytes(), [b"x"]]]]),
        msgpack.packb(["", [GOOD_ROW], 1]),
        msgpack.packb(["no", []]),
        b"x" * (MAX_INTRODUCTION_BYTES + 1),
    ],
)
def test_a_bad_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(NotIntroduced):
        decode_introductions(answer)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(answer: bytes) -> None:
    with suppress(NotIntroduced):
        assert len(decode_introductions(answer)) <= MAX_INTRODUCED


# -- on a network --------------------------------------------------------------------------------


@dataclass
class Peer:
    """A node of a program with its discovery, on the loopback interface."""

    backend: Libp2pTransport
    discovery: Discovery
    introductions: Introductions
    driver: Driver
    news: trio.Event = field(default_factory=trio.Event)

    async def until_up(self, *others: Peer) -> None:
        wanted = {other.backend.peer_id for other in others}
        with trio.fail_after(PATIENCE_S):
            while not wanted <= self.discovery._up:
                self.news = trio.Event()
                await self.news.wait()


@asynccontextmanager
async def running(model: Any, target: str, *bootstrap: Multiaddr) -> AsyncIterator[Peer]:
    identity = Identity.generate()
    node = install(model, [target], peer_id=identity.peer_id)
    crossings = encode_crossings(node.crossings)
    backend = Libp2pTransport(
        identity,
        listen=[Multiaddr("/ip4/127.0.0.1/tcp/0")],
        hello=Hello(classes=node.classes, targets=node.targets, crossings=crossings),
    )
    network = NetworkSection(bootstrap=[str(address) for address in bootstrap])
    discovery = Discovery(node, backend, network, DiscoverySection())
    told = Introductions(backend, discovery, crossings=crossings)

    def heard(event: Any) -> None:
        discovery.heard(event)
        told.heard(event)

    def observe(step: Any) -> None:
        discovery.observe(step)
        peer.news.set()

    driver = Driver(node, backend, observe=observe, heard=heard, reach=discovery.reach)
    peer = Peer(backend, discovery, told, driver)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        node.set_addresses(backend.listen_addresses())
        await nursery.start(driver.run)
        await nursery.start(discovery.run)
        nursery.start_soon(told.run)
        try:
            yield peer
        finally:
            driver.stop()
            discovery.stop()
            told.stop()
            with trio.CancelScope(shield=True):
                await backend.stop(1.0)
            nursery.cancel_scope.cancel()


async def test_peers_that_know_one_of_each_other_meet() -> None:
    model = gossip_averaging.compile_program()
    async with running(model, "peer") as hub:
        address = hub.backend.listen_addresses()[0]
        async with running(model, "peer", address) as one, running(model, "peer", address) as two:
            await one.until_up(hub, two)
            await two.until_up(hub, one)
            origins = {
                one.discovery.origin(two.backend.peer_id),
                two.discovery.origin(one.backend.peer_id),
            }
            assert Origin.INTRODUCED in origins


async def test_peers_that_do_not_talk_are_left_alone_and_a_flood_is_refused() -> None:
    model = registry.compile_program()
    async with running(model, "registry") as hub:
        address = hub.backend.listen_addresses()[0]
        async with running(model, "registry", address) as one:
            await one.until_up(hub)
            with suppress(NotIntroduced):  # this node may have asked already
                assert await introductions.ask(one.backend, hub.backend.peer_id) == []
            with pytest.raises(NotIntroduced, match="too soon"):
                await introductions.ask(one.backend, hub.backend.peer_id)


async def test_a_request_with_a_body_resets_its_stream_alone() -> None:
    model = registry.compile_program()
    async with running(model, "registry") as hub:
        address = hub.backend.listen_addresses()[0]
        async with running(model, "registry", address) as one:
            await one.until_up(hub)
            answer = b""
            async with one.backend.open_stream(hub.backend.peer_id, INTRODUCE_PROTOCOL) as stream:
                with suppress(StreamBrokenError):
                    await stream.write(b"x" * 1000)
                    await stream.end()
                    answer = await stream.read(100)
            assert answer == b""
            assert hub.backend.peers()
