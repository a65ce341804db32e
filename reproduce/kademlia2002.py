"""Hops of Kademlia's lookups over the size of a network, and lookups after many nodes are gone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bbnode.compiler import Compiler
from bbnode.components import Kademlia, concrete
from bbnode.components.selectors.kademlia import LookupDone, key_id, node_id
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.engine import All
from bbnode.sim import MS, Network, S, SimNode
from reproduce.experiment import Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(1 << power for power in range(5, 9))
BUCKETS = (4, 20)  # k; the paper's is 20
LOOKUPS = 40  # of each size
ALPHA = 3
GONE = (0.0, 0.25, 0.5)  # parts of the largest network that leave at once
DEADLINE_S = 0.5


class Find(Module):
    """Look the member up that is nearest to a key."""

    home = "peer"

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def body(self, g: Graph) -> None:
        """Record a lookup."""
        key = g.input("key", types.BYTES)
        kept = concrete(Kademlia, k=self.k, alpha=ALPHA, deadline_s=DEADLINE_S, refresh_s=7200.0)
        dht = PeerSelectorSlot("dht", peer_class="peer", concrete=kept)
        g.output("near", dht.select(g, key, mode="near_key", n=1))


@dataclass(frozen=True)
class Row:
    """Lookups in one network."""

    nodes: int
    found: int  # lookups that found the nearest of all
    done: Sequence[LookupDone]

    def mean(self, name: str) -> float:
        """Return the mean of a number of the lookups."""
        return sum(getattr(each, name) for each in self.done) / len(self.done)


def run(seed: int) -> Result:
    """Let a network grow and look keys up at each size, then take nodes away."""
    grown: dict[int, list[Row]] = {}
    left: dict[int, list[Row]] = {}
    for k in BUCKETS:
        grown[k], left[k] = _one(k, seed)
    columns = [
        "k",
        "nodes",
        "hops",
        "most hops",
        "log2 n (paper's bound)",
        "asked",
        "nearest found",
    ]
    rows = [
        [
            k, row.nodes, row.mean("hops"), max(each.hops for each in row.done),
            math.log2(row.nodes), row.mean("asked"), f"{row.found} of {LOOKUPS}",
        ]
        for k in BUCKETS
        for row in grown[k]
    ]  # fmt: skip
    churned = [
        [k, f"{part:.0%}", row.mean("hops"), row.mean("failed"), f"{row.found} of {LOOKUPS}"]
        for k in BUCKETS
        for part, row in zip(GONE, left[k], strict=True)
    ]
    ends = {k: (grown[k][0].mean("hops"), grown[k][-1].mean("hops")) for k in BUCKETS}
    doublings = len(SIZES) - 1
    slopes = {k: (last - first) / doublings for k, (first, last) in ends.items()}
    all_rows = [row for k in BUCKETS for row in grown[k]]
    claims = [
        Claim(
            "a lookup takes at most about log2 n hops",
            all(row.mean("hops") <= math.log2(row.nodes) for row in all_rows),
            f"of {math.log2(SIZES[-1]):g}, "
            + ", ".join(f"k={k}: {last:.2f}" for k, (_, last) in ends.items()),
        ),
        Claim(
            "each doubling of the network adds a constant number of hops, below one",
            all(0 <= slope < 1 for slope in slopes.values()),
            ", ".join(f"k={k}: {slope:.2f} hops a doubling" for k, slope in slopes.items()),
        ),
        Claim(
            "larger buckets take fewer hops",
            ends[BUCKETS[-1]][1] < ends[BUCKETS[0]][1],
            ", ".join(f"k={k}: {last:.2f}" for k, (_, last) in ends.items()),
        ),
        Claim(
            "with k=20, lookups find the nearest node, also where half of the nodes are gone",
            all(row.found >= 0.95 * LOOKUPS for row in (*grown[20], *left[20])),
            ", ".join(
                f"{part:.0%} gone: {row.found}" for part, row in zip(GONE, left[20], strict=True)
            ),
        ),
    ]  # fmt: skip
    tables = [
        Table(f"Lookups of {LOOKUPS} keys", columns, rows),
        Table(
            f"The same with {SIZES[-1]} nodes, when a part of them left at once",
            ["k", "gone", "hops", "failed", "nearest found"],
            churned,
        ),
    ]
    return Result(tables=tables, claims=claims, draw=partial(_draw, grown))


def _one(k: int, seed: int) -> tuple[list[Row], list[Row]]:
    chance = random.Random(seed)
    made = Find(k)
    artifact = Compiler().compile(made.build())
    network = Network(seed, mesh=False, dials=True, kept_steps=8)
    nodes: list[SimNode] = []
    grown: list[Row] = []
    for size in SIZES:
        while len(nodes) < size:
            node = network.add(f"n{seed}-{len(nodes)}", artifact, ["peer"])
            if nodes:
                network.connect(node, chance.choice(nodes))
            nodes.append(node)
            node.node.run_bootstrap(All())
            network.run(until=network.now_ns + 200 * MS)
        network.run(until=network.now_ns + 2 * S)
        grown.append(_looked_up(network, nodes, chance))
    left = [grown[-1]]
    for before, after in itertools.pairwise(GONE):
        going = round((after - before) * SIZES[-1])
        for node in chance.sample(nodes, going):
            network.crash(node)
            nodes.remove(node)
        left.append(_looked_up(network, nodes, chance))
    return grown, left


def _looked_up(network: Network, nodes: Sequence[SimNode], chance: random.Random) -> Row:
    done, found = [], 0
    for _ in range(LOOKUPS):
        asker, key = chance.choice(nodes), chance.randbytes(16)
        others = (node.peer_id for node in nodes if node is not asker)
        nearest = min(others, key=lambda peer: node_id(peer) ^ key_id(key))
        execution = asker.invoke("peer", {"key": key})
        network.run_until(lambda asker=asker, of=execution: asker.has_finished(of))
        found += asker.outputs(execution).get("near") == (nearest,)
        component: Any = asker.component("dht")
        done.append(
            next(each for each in reversed(component.finished) if each.target == key_id(key))
        )
    return Row(len(nodes), found, done)


def _draw(grown: dict[int, list[Row]], figure: Figure) -> None:
    axes = figure.subplots()
    for k, rows in grown.items():
        axes.plot(SIZES, [row.mean("hops") for row in rows], "o-", label=f"bbnode, k = {k}")
    axes.plot(SIZES, [math.log2(size) for size in SIZES], "k--", label="log2 n")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes")
    axes.set_ylabel("hops of a lookup (mean)")
    axes.legend()


EXPERIMENT = Experiment(
    paper="Maymounkov and Mazières, 2002, doi:10.1007/3-540-45748-8_5, sections 2.3 and 3",
    says=(
        "lookups of random keys by real nodes in the simulator, 32 to 256 of them; the paper "
        "proves the bound and has no figure of its own"
    ),
    page="docs/methods/kademlia.md",
    run=run,
)
