"""Kademlia: who is in the table, what a lookup makes of lies, and networks in the simulator."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.compiler import Compiler
from bbnode.components import (
    PENDING,
    ComponentError,
    Kademlia,
    KademliaConfig,
    NotEnoughPeers,
    PeerIdVec,
    UnsupportedSelection,
    WireCorrelation,
    concrete,
)
from bbnode.components.errors import ExchangeRefused, InvalidComponentConfig
from bbnode.components.selectors.kademlia import FindNode, Nearest, key_id, node_id
from bbnode.components.selectors.records import PeerRecord, subnet_of
from bbnode.components.wire_records import UnusableMessage
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.engine import All
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.peer import PeerId
from bbnode.sim import MS, Network, S, SimNode
from tests.components.fakes import Peers

ME = PeerId.from_seed("me")
MANY = [PeerId.from_seed(i) for i in range(400)]
FAR = [peer for peer in MANY if (node_id(peer) ^ node_id(ME)) >> 255]  # of the first bucket


def at(peer: PeerId, ip: str = "10.0.0.1") -> PeerRecord:
    return PeerRecord(peer=peer, addresses=(Multiaddr(f"/ip4/{ip}/tcp/4001"),))


@dataclass
class Waiting:
    result: Any = None

    def complete(self, result: Any) -> None:
        self.result = result

    def fail(self, error: BaseException) -> None:
        self.result = error


@dataclass
class Context:
    """A context that keeps what is asked of it."""

    now_ns: int = 0
    self_peer: PeerId = ME
    source_peer: PeerId | None = None
    source_seen_at: Multiaddr | None = None
    peer_class: str | None = "peer"
    plays_peer_class: bool = False
    include_self: bool = False
    slot: str = "dht"
    addresses: tuple[Multiaddr, ...] = ()
    peers: Peers = field(default_factory=Peers)
    correlation: WireCorrelation | None = None
    requests: list[tuple[PeerId, str, str]] = field(default_factory=list)
    refused: dict[PeerId, str] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)

    def open_completion(self) -> Waiting:
        return self.waiting

    def request(self, peer, slot, op, payload, *, tag, deadline_ns) -> int:
        self.requests.append((peer, op, tag))
        return len(self.requests)

    def refuse(self, peer: PeerId, reason: str) -> None:
        self.refused[peer] = reason

    def set_timer(self, key: str, after_ns: int) -> None: ...
    def cancel_timer(self, key: str) -> None: ...
    def learn_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None: ...


def dht(**config: Any) -> Kademlia:
    return Kademlia(KademliaConfig(**{"k": 4, **config}))


def seen(ip: str) -> Multiaddr:
    return Multiaddr(f"/ip4/{ip}/tcp/50000")


def asks(
    component: Kademlia,
    peer: PeerId,
    *,
    record: PeerRecord | None = None,
    now_s=0.0,
    ip: str | None = None,
):
    request = WireCorrelation(kind=CorrelationKind.REQUEST, wire_req_id=1)
    where = None if ip is None else seen(ip)
    ctx = Context(
        now_ns=int(now_s * S), source_peer=peer, correlation=request, source_seen_at=where
    )
    said = FindNode(target=node_id(peer), addresses=(record or at(peer)).addresses)
    answer = component.find_node(ctx, said.encode())
    assert answer is not None
    return Nearest.decode(answer), ctx


# --- the table -------------------------------------------------------------------------------


def test_ids_are_those_of_libp2p_s_dht() -> None:
    assert node_id(ME) == int.from_bytes(hashlib.sha256(ME.to_bytes()).digest(), "big")
    assert key_id(b"key") == key_id(np.frombuffer(b"key", np.uint8))
    assert key_id(ME) == node_id(ME)
    for wrong in ("key", 3, np.zeros(3, np.float32), None):
        with pytest.raises(UnsupportedSelection, match="a key is bytes"):
            key_id(wrong)


def test_who_asks_is_entered_and_the_nearest_are_told() -> None:
    component = dht()
    for peer in MANY[:12]:
        asks(component, peer)
    told, _ = asks(component, MANY[20])
    nearest = sorted(component.table(Context()), key=lambda p: node_id(p) ^ node_id(MANY[20]))
    assert {r.peer for r in told.peers} <= {MANY[20], *nearest[:5]}
    assert len(told.peers) == 4
    assert MANY[20] not in {r.peer for r in told.peers}


def test_a_flood_of_new_peers_pushes_out_nobody_who_lives() -> None:
    component = dht()
    old, flood = FAR[:4], FAR[4:]
    for peer in old:
        asks(component, peer)
    pings = []
    for number, peer in enumerate(flood):
        _, ctx = asks(component, peer, now_s=number)
        pings += [who for who, op, _ in ctx.requests if op == "Ping"]
        for who, _, tag in ctx.requests:  # it answers
            component.on_answer(Context(source_peer=who), tag, b"")
    assert set(component.table(Context())) == set(old)
    assert len(pings) <= len(flood) / component.config.deadline_s + 1
    assert len(component._spare[0]) == 4
    # Whoever was not heard of for longest, and does not answer, gives way to the newest.
    component.on_no_answer(Context(), "ping", old[0])
    assert set(component.table(Context())) == {*old[1:], flood[-1]}


def test_peers_of_one_public_subnet_do_not_fill_a_bucket() -> None:
    component = dht()
    for number, peer in enumerate(FAR[:10]):
        asks(component, peer, record=at(peer, f"8.8.8.{number}"))
    assert set(component.table(Context())) == set(FAR[:2])
    asks(component, FAR[20], record=at(FAR[20], "8.8.4.1"))
    asks(component, FAR[21], record=at(FAR[21], "192.168.0.1"))
    assert len(component.table(Context())) == 4
    assert subnet_of(at(ME, "127.0.0.1")) == ""
    assert subnet_of(PeerRecord(peer=ME, addresses=(Multiaddr("/ip6/2a00:1450:4001::1"),))) != ""


def test_peers_count_where_they_are_seen_and_not_where_they_say_they_are() -> None:
    component = dht()
    for number, peer in enumerate(FAR[:10]):  # one machine that claims ten networks
        asks(component, peer, record=at(peer, f"9.{number}.0.1"), ip="8.8.8.8")
    assert set(component.table(Context())) == set(FAR[:2])
    for peer in FAR[10:12]:  # and two that say they are where others are
        asks(component, peer, record=at(peer, "8.8.8.9"), ip=f"9.9.{FAR.index(peer)}.9")
    assert set(component.table(Context())) == {*FAR[:2], *FAR[10:12]}


def test_who_was_passed_over_takes_the_place_of_one_that_fails() -> None:
    component = dht()
    for peer in FAR[:6]:
        asks(component, peer, ip="8.8.8.8")
    asks(component, FAR[10], ip="9.9.9.9")
    assert set(component.table(Context())) == {*FAR[:2], FAR[10]}
    component.on_no_answer(Context(), "find:99", FAR[0])  # the newest of its subnet is there
    assert set(component.table(Context())) == {FAR[1], FAR[5], FAR[10]}
    # Nobody of another subnet makes way for one that has enough.
    component.on_no_answer(Context(), "find:99", FAR[10])
    assert FAR[10] in component.table(Context())


def test_a_flood_of_one_subnet_does_not_crowd_out_who_stands_by() -> None:
    component = dht()
    for number, peer in enumerate(FAR[:4]):
        asks(component, peer, ip=f"9.{number}.0.1")
    asks(component, FAR[4], ip="9.77.0.1")  # stands by: the bucket is full
    for peer in FAR[5:40]:
        asks(component, peer, ip="8.8.8.8")
    (spare,) = component._spare.values()
    assert FAR[4] in spare
    assert len(spare) == 3
    assert component._subnets.keys() == {*FAR[:4], *spare}


def test_where_peers_were_seen_outlives_a_restart() -> None:
    component = dht()
    for peer in FAR[:3]:
        asks(component, peer, record=at(peer, "9.9.9.9"), ip="8.8.8.8")
    restored = dht()
    restored.restore(component.serialize())
    restored.table(Context())
    asks(restored, FAR[5], ip="8.8.8.7")
    assert FAR[5] not in restored.table(Context())
    older = component.state()
    del older["seen"]  # as a version before saved it
    restored.load_state(older)
    assert set(restored.table(Context())) == set(FAR[:2])


def test_one_caller_has_a_rate() -> None:
    component = dht()
    for _ in range(512):
        asks(component, MANY[1])
    with pytest.raises(ExchangeRefused, match="too many calls"):
        asks(component, MANY[1])
    asks(component, MANY[1], now_s=11)


def test_a_peer_without_answers_is_kept_while_there_is_no_other() -> None:
    component = dht()
    asks(component, FAR[0])
    for _ in range(2):
        component.on_no_answer(Context(), "find:99", FAR[0])
    assert FAR[0] in component.table(Context())
    told, _ = asks(component, FAR[1])
    assert told.peers == ()  # but nobody is sent to it
    component.on_no_answer(Context(), "find:99", FAR[0])
    assert FAR[0] not in component.table(Context())


# --- lookups ---------------------------------------------------------------------------------


def begun(**config: Any) -> tuple[Kademlia, Context]:
    """Return a component that knows four peers and looks for the two nearest to a key."""
    component = dht(**config)
    for peer in FAR[:4]:
        asks(component, peer)
    ctx = Context()
    assert component.select(ctx, b"key", mode="near_key", n=2) is PENDING
    return component, ctx


def answer(component: Kademlia, ctx: Context, peer: PeerId, peers: Sequence[PeerRecord], tag: str):
    then = Context(source_peer=peer, waiting=ctx.waiting, requests=ctx.requests)
    component.on_answer(then, tag, Nearest(addresses=(), peers=tuple(peers)).encode())
    return then


def test_a_lookup_asks_alpha_at_a_time_and_trusts_answers_alone() -> None:
    component, ctx = begun(alpha=2)
    assert [op for _, op, _ in ctx.requests] == ["FindNode"] * 2
    near = sorted(MANY[100:], key=lambda p: node_id(p) ^ key_id(b"key"))[:3]
    answered: list[PeerId] = []
    for peer, _, tag in ctx.requests:  # grows while it is read
        if peer == near[0]:
            component.on_no_answer(Context(waiting=ctx.waiting, requests=ctx.requests), tag, peer)
            continue
        answer(component, ctx, peer, [at(p) for p in near if p != peer], tag)
        answered.append(peer)
    best = sorted(answered, key=lambda p: node_id(p) ^ key_id(b"key"))[:2]
    assert best == near[1:]
    assert ctx.waiting.result == PeerIdVec(sorted(best))
    done = component.finished[-1]
    assert (done.hops, done.failed, done.nearest[:2]) == (2, 1, tuple(best))


def test_lies_in_answers_end_no_lookup() -> None:
    component, ctx = begun(alpha=4)
    twice = [at(MANY[200]), at(MANY[200])]
    (a, _, tag), (b, *_), (c, *_), (d, *_) = ctx.requests
    for peer, said in ((a, twice), (b, [at(b)])):
        assert answer(component, ctx, peer, said, tag).refused
    too_many = msgpack.packb([[], [at(p).pack() for p in MANY[:33]]])
    for peer, raw in ((c, too_many), (d, b"\xc1")):
        then = Context(source_peer=peer, waiting=ctx.waiting, requests=ctx.requests)
        component.on_answer(then, tag, raw)
        assert "message" in then.refused[peer] or "list" in then.refused[peer]
    assert isinstance(ctx.waiting.result, NotEnoughPeers)
    assert len(ctx.requests) == 4
    assert not component._lookups


def test_a_liar_does_not_have_a_lookup_ask_more_than_its_share() -> None:
    component, ctx = begun(alpha=4)
    liar, _, tag = ctx.requests[0]
    made_up = sorted(MANY, key=lambda p: node_id(p) ^ key_id(b"key"))[:30]
    answer(component, ctx, liar, [at(p) for p in made_up], tag)
    lookup = component._lookups[1]
    assert len(lookup.found) <= 4 + component.config.k
    lookup_in_one_net, net_ctx = begun(alpha=4)
    one_net = [at(p, f"8.8.8.{i}") for i, p in enumerate(made_up)]
    answer(lookup_in_one_net, net_ctx, net_ctx.requests[0][0], one_net, tag)
    assert len(lookup_in_one_net._lookups[1].found) == 4 + 2


def near(n: int) -> list[PeerId]:
    """Return peers that are near the key, the nearest first."""
    return sorted(MANY[100:], key=lambda peer: node_id(peer) ^ key_id(b"key"))[:n]


def answered(
    component: Kademlia, ctx: Context, peer: PeerId, peers: Sequence[PeerRecord], tag: str, ip: str
) -> None:
    then = Context(
        source_peer=peer, waiting=ctx.waiting, requests=ctx.requests, source_seen_at=seen(ip)
    )
    component.on_answer(then, tag, Nearest(addresses=(), peers=tuple(peers)).encode())


def test_a_lookup_hears_again_whom_it_passed_over() -> None:
    component, ctx = begun(k=8, alpha=8)
    tag = ctx.requests[0][2]
    crowd = near(5)
    answer(component, ctx, FAR[0], [at(peer, "8.8.8.8") for peer in crowd], tag)
    asked = {peer for peer, *_ in ctx.requests}
    assert asked & set(crowd) == set(crowd[:2])  # two of a subnet at a time
    for peer in crowd[:2]:
        component.on_no_answer(ctx, tag, peer)
    asked = {peer for peer, *_ in ctx.requests}
    assert asked & set(crowd) == set(crowd[:4])
    answered(component, ctx, crowd[2], [], tag, "8.8.8.8")
    assert crowd[4] not in {peer for peer, *_ in ctx.requests}
    component.on_no_answer(ctx, tag, crowd[3])
    assert crowd[4] in {peer for peer, *_ in ctx.requests}


def test_claims_of_many_networks_get_one_machine_no_more_of_a_lookup() -> None:
    component, ctx = begun(k=4, alpha=4, max_per_subnet=1)
    tag = ctx.requests[0][2]
    liars, honest = near(3), near(5)[3:]
    named = [at(peer, f"9.{number}.0.1") for number, peer in enumerate(liars)]
    named += [at(honest[0], "11.0.0.1"), at(honest[1], "12.0.0.1")]
    answer(component, ctx, FAR[0], named[:4], tag)
    answer(component, ctx, FAR[1], named[4:], tag)
    for peer in liars:  # all of them are one machine
        answered(component, ctx, peer, [], tag, "8.8.8.8")
    for peer in (*FAR[2:4], *honest):
        if peer in {each for each, *_ in ctx.requests}:
            where = f"1{honest.index(peer) + 1}.0.0.1" if peer in honest else "10.0.0.1"
            answered(component, ctx, peer, [], tag, where)
    (done,) = component.finished
    assert sum(peer in liars for peer in done.nearest) == 1
    assert set(honest) <= set(done.nearest)


def test_what_can_not_be_looked_up_is_refused() -> None:
    component, _ = begun()
    for key, n in ((None, 1), (b"key", 0), (b"key", 5)):
        with pytest.raises(UnsupportedSelection, match="near_key needs a key"):
            component.select(Context(), key, mode="near_key", n=n)
    for _ in range(63):
        component.select(Context(), b"key", mode="near_key", n=1)
    with pytest.raises(UnsupportedSelection, match="under way"):
        component.select(Context(), b"key", mode="near_key", n=1)
    with pytest.raises(UnsupportedSelection):
        component.select(Context(), None, mode="nearest", n=1)
    with pytest.raises(NotEnoughPeers):
        dht(lookups=False).select(Context(), b"key", mode="near_key", n=1)


@pytest.mark.parametrize(
    "config", [{"k": 0}, {"k": 33}, {"alpha": 0}, {"deadline_s": 0.0}, {"max_per_subnet": -1}]
)
def test_settings_have_bounds(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidComponentConfig, match=next(iter(config))):
        dht(**config)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_the_one_error(payload: bytes) -> None:
    for kind in (FindNode, Nearest):
        with contextlib.suppress(UnusableMessage):
            kind.decode(payload)
    component = dht()
    with contextlib.suppress(ComponentError):
        component.restore(payload)


def test_the_table_outlives_a_restart() -> None:
    component, fresh = dht(), dht()
    for peer in MANY[:30]:
        asks(component, peer)
    fresh.restore(component.serialize())
    assert fresh.table(Context()) == component.table(Context())
    assert fresh._buckets == component._buckets


# --- networks --------------------------------------------------------------------------------


class Find(Module):
    """Look the three members up that are nearest to a key."""

    home = "peer"

    def body(self, g: Graph) -> None:
        key = g.input("key", types.BYTES)
        dht = PeerSelectorSlot(
            "dht", peer_class="peer", concrete=concrete(Kademlia, k=4, deadline_s=0.5)
        )
        g.output("near", dht.select(g, key, mode="near_key", n=3))


def network(count: int, seed: int = 1) -> tuple[Network, list[SimNode]]:
    """Return nodes that came one by one, each of which knew one that was there."""
    made = Find()
    artifact = Compiler().compile(made.build())
    net, nodes = Network(seed, mesh=False, dials=True), []
    for i in range(count):
        node = net.add(f"p{i}", artifact, ["peer"])
        if nodes:
            net.connect(node, nodes[(i * 7) % len(nodes)])
        nodes.append(node)
        node.node.run_bootstrap(All())
        net.run(until=net.now_ns + 300 * MS)
    net.run(until=net.now_ns + 3 * S)
    return net, nodes


def nearest(nodes: Sequence[SimNode], asker: SimNode, key: bytes) -> tuple[PeerId, ...]:
    others = (node.peer_id for node in nodes if node is not asker)
    return tuple(sorted(sorted(others, key=lambda p: node_id(p) ^ key_id(key))[:3]))


def test_a_network_agrees_on_who_is_nearest_and_outlives_half_of_itself() -> None:
    net, nodes = network(24)
    table = len(nodes[5].component("dht").table(Context(self_peer=nodes[5].peer_id)))
    assert table < len(nodes) - 1  # so that a lookup has to ask others
    for number, asker in enumerate(nodes[:8]):
        key = b"key %d" % number
        execution = asker.invoke("peer", {"key": key})
        net.run(until=net.now_ns + 1 * S)
        assert asker.outputs(execution)["near"] == nearest(nodes, asker, key)
    for node in nodes[12:]:
        net.crash(node)
    right = 0
    for number, asker in enumerate(nodes[:6]):
        key = b"later %d" % number
        execution = asker.invoke("peer", {"key": key})
        net.run(until=net.now_ns + 6 * S)
        found = asker.outputs(execution)["near"]
        assert not set(found) & {node.peer_id for node in nodes[12:]}  # they did not answer
        right += found == nearest(nodes[:12], asker, key)
    assert right >= 5


def test_the_same_seed_is_the_same_run() -> None:
    traces = []
    for _ in range(2):
        net, nodes = network(6, seed=3)
        nodes[2].invoke("peer", {"key": b"key"})
        net.run(until=net.now_ns + 1 * S)
        traces.append(net.trace.lines())
    assert traces[0] == traces[1]
