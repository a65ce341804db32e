"""A node finds its peers: through a registry, again after a loss, and not after a goodbye."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Never

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.access.decision import Decision, Reason
from bbnode.daemon.config import DiscoverySection, NetworkSection
from bbnode.daemon.network import discovery as discovery_file
from bbnode.daemon.network.discovery import Discovery, Origin
from bbnode.engine import Node, install, steps
from bbnode.examples import registry as program
from bbnode.ir.peer import PeerId
from bbnode.transport import mdns as mdns_file
from bbnode.transport.base import (
    Authorizer,
    ConnectionClosed,
    Direction,
    Hello,
    Transport,
    TransportEvent,
)
from bbnode.transport.driver import Driver
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.memory import MemoryNetwork
from tests.patience import PATIENCE_S
from tests.transport.multicast import needs_multicast


@dataclass
class Peer:
    """A node with its transport and its discovery."""

    node: Node
    backend: Transport
    discovery: Discovery
    driver: Driver | None = None
    seen: list[steps.Step] = field(default_factory=list)
    events: list[TransportEvent] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    def observe(self, step: steps.Step) -> None:
        self.discovery.observe(step)
        self.seen.append(step)
        self.news.set()

    def heard(self, event: TransportEvent) -> None:
        self.discovery.heard(event)
        self.events.append(event)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait, step by step of this node, for something to be true."""
        with trio.fail_after(PATIENCE_S):
            while not condition():
                self.news = trio.Event()
                await self.news.wait()

    def is_up(self, other: Peer) -> bool:
        return other.node.peer_id in self.discovery._up

    def found(self, other: Peer) -> Origin | None:
        return self.discovery.origin(other.node.peer_id)


def bring_up(role: str, seed: int) -> Node:
    config = {"others": {"min_peers": 0, "seed": seed}} if role == "peer" else {}
    return install(
        program.compile_program(), [role], peer_id=PeerId.from_seed(f"{role} {seed}"), config=config
    )


def with_discovery(node: Node, backend: Transport, *bootstrap: Multiaddr, **settings) -> Peer:
    network = NetworkSection(bootstrap=[str(address) for address in bootstrap])
    found = Discovery(node, backend, network, DiscoverySection(**settings))
    return Peer(node, backend, found)


@asynccontextmanager
async def running(peer: Peer) -> AsyncIterator[Peer]:
    async with trio.open_nursery() as nursery:
        await nursery.start(peer.backend.run)
        peer.node.set_addresses(peer.backend.listen_addresses())
        driver = peer.driver = Driver(
            peer.node,
            peer.backend,
            observe=peer.observe,
            heard=peer.heard,
            reach=peer.discovery.reach,
        )
        await nursery.start(driver.run)
        await nursery.start(peer.discovery.run)
        try:
            yield peer
        finally:
            driver.stop()
            peer.discovery.stop()
            with trio.CancelScope(shield=True):
                await peer.backend.stop(PATIENCE_S)
            nursery.cancel_scope.cancel()


def in_memory(network: MemoryNetwork, role: str, seed: int, *bootstrap: Multiaddr, **settings):
    node = bring_up(role, seed)
    backend = network.transport(
        node.peer_id, hello=Hello(classes=node.classes, targets=node.targets)
    )
    return with_discovery(node, backend, *bootstrap, **settings)


def on_loopback(
    role: str,
    seed: int,
    *bootstrap: Multiaddr,
    authorizer: Authorizer | None = None,
    **settings: Any,
) -> Peer:
    identity = Identity.generate()
    config = {"others": {"min_peers": 0, "seed": seed}} if role == "peer" else {}
    node = install(
        program.compile_program(), [role], peer_id=identity.peer_id, config=config, seed=seed
    )
    backend = Libp2pTransport(
        identity,
        listen=[Multiaddr("/ip4/127.0.0.1/tcp/0")],
        hello=Hello(classes=node.classes, targets=node.targets),
        authorizer=authorizer,
    )
    return with_discovery(node, backend, *bootstrap, **settings)


async def test_peers_that_a_registry_told_of_connect_directly(autojump_clock) -> None:
    network = MemoryNetwork()
    async with running(in_memory(network, "registry", 0)) as registry:
        (address,) = registry.backend.listen_addresses()
        async with (
            running(in_memory(network, "peer", 1, address)) as one,
            running(in_memory(network, "peer", 2, address)) as two,
        ):
            await one.until(lambda: one.is_up(two))
            await two.until(lambda: two.is_up(one))
            assert one.found(registry) is Origin.BOOTSTRAP
            # Whichever of them sent first.
            assert {one.found(two), two.found(one)} <= {Origin.REGISTRY, Origin.INBOUND}
            assert Origin.REGISTRY in {one.found(two), two.found(one)}
            assert registry.found(one) is Origin.INBOUND
            greeted = len(_values(two, "greeted"))
            await two.until(lambda: len(_values(two, "greeted")) > greeted)
            # It is not dialled for ever: only the bootstrap peer is kept.
            await trio.testing.wait_all_tasks_blocked()
            assert [w.peer for w in one.backend.wanted()] == [registry.node.peer_id]
            shown = {p["peer"]: p for p in one.discovery.as_json()["peers"]}
            assert shown[str(registry.node.peer_id)]["bootstrap"] == "up"
            assert shown[str(two.node.peer_id)]["connected"]


class Closed:
    """An authorizer that admits nobody until it is told to."""

    admits = False

    def connection(self, peer: PeerId, direction: Direction) -> Decision:
        return ADMITTED

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> Decision:
        return ADMITTED if self.admits else REVOKED

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> Decision:
        return ADMITTED

    def is_known(self, peer: PeerId) -> bool:
        return False


ADMITTED = Decision(allowed=True, reason=Reason.ALLOWED, rule="all", detail="")
REVOKED = Decision(
    allowed=False, reason=Reason.NOT_A_MEMBER, rule="membership", detail="revoked: by the owner"
)


async def test_a_node_that_is_not_admitted_is_told_and_does_not_flap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Closed()
    async with running(on_loopback("registry", 0, authorizer=door)) as registry:
        (address,) = registry.backend.listen_addresses()
        async with running(on_loopback("peer", 1, address)) as one:
            await one.until(one.discovery.refused_by)
            told = one.discovery.refused_by()
            assert "not_a_member (revoked)" in told
            assert str(registry.node.peer_id) in told
            assert "ask its owner for a new ticket" in told
            with trio.fail_after(PATIENCE_S):
                while one.backend.wanted():
                    await trio.lowlevel.checkpoint()
            assert one.discovery.counters()["discovery.turned_away"] == 1
            assert caplog.text.count("does not admit this node") == 1
            door.admits = True
            one.discovery.forgive()
            await one.until(lambda: one.is_up(registry))
            assert one.discovery.refused_by() == ""


async def test_without_learning_nobody_else_is_dialled(autojump_clock) -> None:
    network = MemoryNetwork()
    async with running(in_memory(network, "registry", 0)) as registry:
        (address,) = registry.backend.listen_addresses()
        async with (
            running(in_memory(network, "peer", 1, address, learn=False)) as one,
            running(in_memory(network, "peer", 2, address, learn=False)) as two,
        ):
            knows = lambda: one.node.peer_standing(two.node.peer_id).addresses  # noqa: E731
            await one.until(knows)
            missed = lambda: [  # noqa: E731
                s for s in one.seen if isinstance(s, steps.SendEnvelope)
                and s.peer == two.node.peer_id
            ]  # fmt: skip
            await one.until(missed)
            await trio.testing.wait_all_tasks_blocked()
            assert not one.is_up(two)
            assert one.discovery.counters()["discovery.learned"] == 0


async def test_a_lost_peer_is_dialled_where_it_was_and_given_up_after_a_while(
    autojump_clock,
) -> None:
    network = MemoryNetwork()
    async with running(in_memory(network, "registry", 0)) as registry:
        (address,) = registry.backend.listen_addresses()
        one = in_memory(network, "peer", 1, address)
        peer = one.node.peer_id
        async with running(one):
            await registry.until(lambda: registry.is_up(one))
            network.cut(peer, registry.node.peer_id)
            await registry.until(lambda: not registry.is_up(one))
            await trio.testing.wait_all_tasks_blocked()
            assert [w.peer for w in registry.backend.wanted()] == [peer]
            assert registry.discovery.counters()["discovery.redialled"] == 1
            # The client is cut off from its only bootstrap peer: it goes on trying.
            await trio.sleep_until(trio.current_time() + 1000)
            assert registry.backend.wanted() == []
            assert [w.peer for w in one.backend.wanted()] == [registry.node.peer_id]
            network.heal(peer, registry.node.peer_id)
            await registry.until(lambda: registry.is_up(one))


async def test_k_bootstrap_peers_are_enough_and_the_next_replaces_one_that_goes(
    autojump_clock,
) -> None:
    network = MemoryNetwork()
    async with (
        running(in_memory(network, "registry", 0)) as first,
        running(in_memory(network, "registry", 1)) as second,
        running(in_memory(network, "registry", 2)) as third,
    ):
        listed = [p.backend.listen_addresses()[0] for p in (first, second, third)]
        async with running(in_memory(network, "peer", 1, *listed, min_peers=1)) as one:
            await one.until(lambda: one.is_up(first))
            await trio.testing.wait_all_tasks_blocked()
            assert not one.is_up(second)
            network.cut(one.node.peer_id, first.node.peer_id)
            await one.until(lambda: one.is_up(second))
            await trio.testing.wait_all_tasks_blocked()
            assert not one.is_up(third)
            assert [w.peer for w in one.backend.wanted()] == [second.node.peer_id]
            # A reload: the third alone is wanted now.
            one.discovery.configure(
                NetworkSection(bootstrap=[str(listed[2])]), DiscoverySection(learn=False)
            )
            await one.until(lambda: one.is_up(third))
            assert [w.peer for w in one.backend.wanted()] == [third.node.peer_id]


async def test_a_new_peer_makes_it_list_no_others() -> None:
    def peers() -> Never:
        raise AssertionError("a thousand peers would each make it list a thousand")

    registry = on_loopback("registry", 0)
    registry.backend.peers = peers
    async with running(registry):
        (address,) = registry.backend.listen_addresses()
        async with running(on_loopback("peer", 1, address)) as one:
            await registry.until(lambda: registry.is_up(one))
            assert registry.found(one) is Origin.INBOUND


async def test_a_peer_that_somebody_had_dialled_is_no_inbound_one(autojump_clock) -> None:
    network = MemoryNetwork()
    async with (
        running(in_memory(network, "registry", 0)) as one,
        running(in_memory(network, "peer", 1)) as two,
    ):
        one.backend.keep_connected(two.node.peer_id, two.backend.listen_addresses())
        await one.until(lambda: one.is_up(two))
        await two.until(lambda: two.is_up(one))
        assert one.found(two) is Origin.ASKED
        assert two.found(one) is Origin.INBOUND
        # Discovery leaves alone what it did not begin, also after a loss.
        network.cut(one.node.peer_id, two.node.peer_id)
        await one.until(lambda: not one.is_up(two))
        network.heal(one.node.peer_id, two.node.peer_id)
        await one.until(lambda: one.is_up(two))
        await trio.testing.wait_all_tasks_blocked()
        assert [w.peer for w in one.backend.wanted()] == [two.node.peer_id]


async def test_a_flood_of_peers_to_be_dialled_is_bounded(autojump_clock) -> None:
    network = MemoryNetwork()
    async with running(in_memory(network, "registry", 0)) as registry:
        for i in range(1000):
            peer = PeerId.from_seed(f"flood {i}")
            registry.observe(
                steps.SendEnvelope(
                    peer=peer, addresses=(Multiaddr("/memory/1"),), parts=(b"",), tag=i
                )
            )
        await trio.testing.wait_all_tasks_blocked()
        assert len(registry.backend.wanted()) == 64
        assert registry.discovery.counters()["discovery.dialling"] == 64


async def test_who_is_blocked_is_not_dialled(autojump_clock) -> None:
    network = MemoryNetwork()
    one = in_memory(network, "registry", 0)
    blocked = PeerId.from_seed("blocked")
    one.node.block_peer(blocked)
    async with running(one):
        one.discovery._missed(blocked, (Multiaddr("/memory/1"),))
        one.discovery._found_nearby(blocked, (Multiaddr("/memory/1"),))
        await trio.testing.wait_all_tasks_blocked()
        assert one.backend.wanted() == []


async def test_a_node_without_multicast_runs_on(autojump_clock, monkeypatch, caplog) -> None:
    async def unavailable(*_args, **_more) -> None:
        await trio.lowlevel.checkpoint()
        raise mdns_file.MdnsUnavailable("no multicast here")

    monkeypatch.setattr(mdns_file.Mdns, "run", unavailable)
    network = MemoryNetwork()
    async with running(in_memory(network, "registry", 0, mdns=True)):
        await trio.testing.wait_all_tasks_blocked()
    assert "no mDNS" in caplog.text


async def test_what_is_nearby_is_dialled_for_as_long_as_it_is(autojump_clock) -> None:
    network = MemoryNetwork()
    async with (
        running(in_memory(network, "registry", 0)) as one,
        running(in_memory(network, "peer", 1)) as two,
    ):
        one.discovery._found_nearby(two.node.peer_id, tuple(two.backend.listen_addresses()))
        await one.until(lambda: one.is_up(two))
        assert one.found(two) is Origin.MDNS
        await trio.testing.wait_all_tasks_blocked()
        assert [w.peer for w in one.backend.wanted()] == [two.node.peer_id]
        one.discovery._lost_nearby(two.node.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        assert one.backend.wanted() == []
        assert one.discovery.counters()["discovery.nearby"] == 0


def test_how_peers_were_found_is_remembered_of_so_many(monkeypatch) -> None:
    monkeypatch.setattr(discovery_file, "MAX_BOOK_PEERS", 10)
    found = in_memory(MemoryNetwork(), "registry", 0).discovery
    for i in range(50):
        found.note(PeerId.from_seed(i), Origin.MDNS)
    assert found.origin(PeerId.from_seed(39)) is None
    assert found.origin(PeerId.from_seed(49)) is Origin.MDNS
    found.note(PeerId.from_seed(49), Origin.INBOUND)
    assert found.origin(PeerId.from_seed(49)) is Origin.MDNS


@pytest.mark.parametrize("who", ["it", "we"])
async def test_on_real_connections_peers_meet_and_a_goodbye_is_respected(who: str) -> None:
    """Over libp2p: what the transport says of a goodbye is understood by discovery."""
    async with running(on_loopback("registry", 0)) as registry:
        (address,) = registry.backend.listen_addresses()
        async with running(on_loopback("peer", 1, address)) as one:
            two = on_loopback("peer", 2, address)
            async with running(two):
                await one.until(lambda: one.is_up(two))
                await two.until(lambda: two.is_up(one))
                # Whoever greeted first had the other dialled, and the greeting waited for it.
                assert not any("driver.send_failed" in p.driver.counters() for p in (one, two))
                assert not any(
                    "driver.NotConnectedError" in p.driver.counters() for p in (one, two)
                )
                if who == "we":
                    registry.backend.disconnect(two.node.peer_id)
                    await registry.until(lambda: _lost(registry, two))
                    assert registry.discovery.counters()["discovery.dialling"] == 0
            await registry.until(lambda: _lost(registry, two))
            # It stopped, and said so.
            gone = [e for e in registry.events if isinstance(e, ConnectionClosed)]
            assert gone[-1].peer == two.node.peer_id
            assert gone[-1].goodbye
            assert not registry.discovery._left
            assert registry.discovery.counters()["discovery.dialling"] == 0


@needs_multicast
async def test_two_of_one_network_meet_by_mdns_alone() -> None:
    nearby = {"mdns": True, "mdns_interfaces": ["127.0.0.1"]}
    async with (
        running(on_loopback("registry", 0, **nearby)) as one,
        running(on_loopback("peer", 1, **nearby)) as two,
    ):
        await one.until(lambda: one.is_up(two))
        assert Origin.MDNS in {one.found(two), two.found(one)}


def _lost(peer: Peer, other: Peer) -> list[steps.PeerDown]:
    return [s for s in peer.seen if isinstance(s, steps.PeerDown) and s.peer == other.node.peer_id]


def _values(peer: Peer, topic: str) -> list[object]:
    return [s.value for s in peer.seen if isinstance(s, steps.AppEvent) and s.topic == topic]
