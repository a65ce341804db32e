"""A program over a selector with an overlay, networks of many nodes, and a context of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components.contracts import OpContext
from bbnode.components.selectors.overlay import Overlay, S
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.engine import All
from bbnode.ir.envelope import CorrelationKind, WireCorrelation
from bbnode.ir.peer import PeerId
from bbnode.sim import Network
from tests.components.fakes import Peers


class Greeting(Module):
    """At a tick a peer greets one of its cohort; output "greeted" on that one."""

    home = "peer"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        somebody = PeerSelectorSlot("cohort", peer_class="peer").sample(g, n=1, after=tick)
        g.output("greeted", g.net_out("hello", somebody, tick))


def compiled(selector: type[Overlay]) -> ModelProto:
    return Compiler().bind_peer_selector("cohort", selector).compile(Greeting().build())


def grown(
    selector: type[Overlay], nodes: int, periods: int, seed: int = 1, **config: Any
) -> Network:
    """A network whose nodes know the first one alone at the beginning."""
    network = Network(seed, mesh=False, dials=True, kept_steps=64)
    model = compiled(selector)
    for i in range(nodes):
        node = network.add(f"peer-{i}", model, ["peer"], config={"cohort": config})
        if i:
            network.connect("peer-0", node)
        node.node.run_bootstrap(All())
    network.run(until=periods * 10 * S)
    return network


def views(network: Network) -> dict[PeerId, set[PeerId]]:
    """The neighbours of each node that is up."""
    return {
        node.peer_id: set(node.component("cohort").neighbours())
        for node in network.nodes
        if node.is_up
    }


def largest(graph: dict[PeerId, set[PeerId]]) -> int:
    """The number of nodes in the largest component of a graph, whose edges go both ways."""
    both: dict[PeerId, set[PeerId]] = {peer: set() for peer in graph}
    for peer, others in graph.items():
        for other in others & graph.keys():
            both[peer].add(other)
            both[other].add(peer)
    left, best = set(both), 0
    while left:
        edge, size = [left.pop()], 1
        while edge:
            fresh = both[edge.pop()] & left
            left -= fresh
            edge.extend(fresh)
            size += len(fresh)
        best = max(best, size)
    return best


def in_degrees(graph: dict[PeerId, set[PeerId]]) -> list[int]:
    counts = Counter(other for others in graph.values() for other in others)
    return [counts[peer] for peer in graph]


def peer(i: int) -> PeerId:
    return PeerId.from_seed(i)


def address(i: int) -> Multiaddr:
    return Multiaddr(f"/ip4/10.0.{i // 250}.{i % 250}/tcp/4001")


@dataclass
class Context:
    """A context of one call, which keeps what is asked of it."""

    now_ns: int = 0
    self_peer: PeerId = field(default_factory=lambda: peer(0))
    source_peer: PeerId | None = None
    peer_class: str | None = None
    plays_peer_class: bool = False
    include_self: bool = False
    slot: str = "cohort"
    reason: str = ""
    peers: Peers = field(default_factory=Peers)
    addresses: tuple[Multiaddr, ...] = (Multiaddr("/ip4/10.9.9.9/tcp/1"),)
    correlation: WireCorrelation | None = None
    learned: dict[PeerId, tuple[Multiaddr, ...]] = field(default_factory=dict)
    requests: list[tuple[PeerId, str, bytes]] = field(default_factory=list)
    sent: list[tuple[PeerId, str, bytes]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)
    refused: list[tuple[PeerId, str]] = field(default_factory=list)

    def learn_addresses(self, who: PeerId, addresses: tuple[Multiaddr, ...]) -> None:
        self.learned[who] = addresses

    def request(self, who, slot, op, payload, *, tag, deadline_ns) -> int:
        self.requests.append((who, op, payload))
        return len(self.requests)

    def send(self, who, slot, op, payload) -> None:
        self.sent.append((who, op, payload))

    def set_timer(self, key: str, after_ns: int) -> None:
        self.timers[key] = after_ns

    def cancel_timer(self, key: str) -> None:
        self.timers.pop(key, None)

    def refuse(self, who: PeerId, reason: str) -> None:
        self.refused.append((who, reason))


def called(i: int, kind: CorrelationKind = CorrelationKind.REQUEST, **more: Any) -> OpContext:
    """A context of a call of peer `i`."""
    said = WireCorrelation(kind=kind, wire_req_id=1)
    return Context(source_peer=peer(i), correlation=said, **more)  # type: ignore[return-value]
