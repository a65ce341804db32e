"""Networks of nodes with a selector that keeps an overlay, and measures of the graph of views."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import PeerSelector
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.engine import All
from bbnode.sim import Network, S

PERIOD_NS = 10 * S  # the default of the selectors

Views: TypeAlias = dict[int, set[int]]  # node to its neighbours, by number


class Greeting(Module):
    """At a tick a peer greets one peer of its cohort."""

    home = "peer"

    def body(self, g: Graph) -> None:
        """Record the greeting."""
        tick = g.input("tick", types.TRIGGER)
        others = PeerSelectorSlot("overlay", peer_class="peer")
        g.output("greeted", g.net_out("hello", others.sample(g, n=1, after=tick), tick))


def joined(
    selector: type[PeerSelector],
    nodes: int,
    seed: int,
    config: Mapping[str, Any],
    program: ModelProto | None = None,
) -> Network:
    """Return a network of nodes that know the first one alone, and dial whom they hear of."""
    model = program or Compiler().bind_peer_selector("overlay", selector).compile(
        Greeting().build()
    )
    network = Network(seed, mesh=False, dials=True, kept_steps=16)
    for i in range(nodes):
        settings = {"overlay": {"seed": seed, **config}}
        node = network.add(f"peer-{i}", model, ["peer"], config=settings)
        if i:
            network.connect("peer-0", node)
        node.node.run_bootstrap(All())
    return network


def views(network: Network) -> Views:
    """Return the views of the nodes that are up, of each other."""
    numbers = {node.peer_id: i for i, node in enumerate(network.nodes) if node.is_up}
    return {
        number: {
            numbers[peer]
            for peer in network.find(f"peer-{number}").component("overlay").neighbours()
            if peer in numbers
        }
        for number in numbers.values()
    }


def random_views(nodes: int, size: int, seed: int) -> Views:
    """Return views of `size` peers drawn evenly: the random graph of the papers."""
    draw = random.Random(seed)
    return {i: set(draw.sample([j for j in range(nodes) if j != i], size)) for i in range(nodes)}


def undirected(graph: Views) -> Views:
    """Return the graph with each edge in both directions."""
    both: Views = {node: set(others) for node, others in graph.items()}
    for node, others in graph.items():
        for other in others:
            both[other].add(node)
    return both


def without(graph: Views, gone: set[int]) -> Views:
    """Return what is left of a graph without some nodes."""
    return {node: others - gone for node, others in graph.items() if node not in gone}


def outside_largest(graph: Views) -> int:
    """Return the number of nodes that are not in the largest cluster."""
    left, best = set(graph), 0
    both = undirected(graph)
    while left:
        size = len(_distances(both, left.pop(), left)) + 1
        best = max(best, size)
    return len(graph) - best


def clustering(graph: Views) -> float:
    """Return the mean clustering coefficient: of the pairs of a node's neighbours, those linked."""
    both = undirected(graph)
    found = []
    for others in both.values():
        pairs = len(others) * (len(others) - 1)
        linked = sum(len(both[other] & others) for other in others)
        found.append(linked / pairs if pairs else 0.0)
    return sum(found) / len(found)


def path_length(graph: Views, sources: int) -> float:
    """Return the mean length of the shortest paths from some nodes to all that they reach."""
    both = undirected(graph)
    lengths: list[int] = []
    for source in list(both)[:sources]:
        lengths += _distances(both, source, set(both) - {source}).values()
    return sum(lengths) / len(lengths)


def in_degrees(graph: Views) -> Sequence[int]:
    """Return for each node the number of views that it is in."""
    counts = Counter(other for others in graph.values() for other in others)
    return [counts[node] for node in graph]


def _distances(both: Views, source: int, left: set[int]) -> dict[int, int]:
    """Return the distances of the nodes of `left` that can be reached; takes them out of it."""
    found: dict[int, int] = {}
    edge = deque([(source, 0)])
    while edge:
        node, far = edge.popleft()
        fresh = both[node] & left
        left -= fresh
        for other in fresh:
            found[other] = far + 1
            edge.append((other, far + 1))
    return found
