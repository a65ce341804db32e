"""Peers that find each other through a registry and then talk without it.

Run it with `python -m bbnode.examples.registry`.

Every second a peer announces itself to the registry (most of these calls are silent: one
announcement per heartbeat is enough), reads what changed there since it last looked, and greets
one of the peers that it knows of; the greeting goes straight to that peer. In the run below a
peer crashes: the registry drops it when its time is over, and the others hear of it with their
next look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import (
    ConnectedView,
    GlobalRegistryClient,
    GlobalRegistryServer,
    GlobalRegistryView,
)
from bbnode.dsl import (
    Graph,
    Module,
    PeerSelectorSlot,
    ProtocolSlot,
    peer_lists,
    syscalls,
    types,
    values,
)
from bbnode.sim import Network, S, SimNode

PERIOD_NS = 1 * S
PEERS = 6


class Meeting(Module):
    """Peers announce themselves, read the registry and greet each other.

    Output "greeted" (the time at which the greeting was sent) on the peer that was greeted;
    "known" (PeerIdVec) on the registry, with each input "count" of a peer.
    """

    home = "peer"

    def body(self, g: Graph) -> None:
        directory = ProtocolSlot("directory", "global_registry")
        registries = PeerSelectorSlot("registries", peer_class="registry")

        tick = syscalls.interval(g, period_ns=PERIOD_NS)
        server = peer_lists.only_one(g, registries.sample(g, n=1, after=tick))
        directory.announce(g, server, as_class="peer")
        directory.discover(g, server)
        somebody = PeerSelectorSlot("others", peer_class="peer").sample(g, n=1, after=tick)
        g.output("greeted", g.net_out("hello", somebody, tick))

        count = g.input("count", types.TRIGGER)
        asked = g.net_out("count", registries.current_view(g, after=count), count)
        known = PeerSelectorSlot("registry", peer_class="peer").current_view(g, after=asked)
        g.output("known", known)

    def bindings(self) -> Mapping[str, Any]:
        return {
            "registries": ConnectedView,
            "directory": GlobalRegistryClient,
            "others": GlobalRegistryView,
            "registry": GlobalRegistryServer,
        }


def compile_program() -> ModelProto:
    """Compile the program with its components."""
    return (
        Compiler()
        .bind_peer_selector("registries", ConnectedView)
        .bind_protocol("directory", GlobalRegistryClient)
        .bind_peer_selector("others", GlobalRegistryView)
        .bind_peer_selector("registry", GlobalRegistryServer)
        .compile(Meeting().build())
    )


def add_peer(network: Network, compiled: ModelProto, number: int) -> SimNode:
    """Add a peer that draws whom it greets from a seed of its own, once it knows somebody."""
    config = {"others": {"seed": number, "min_peers": 0}}
    return network.add(f"peer-{number}", compiled, ["peer"], config=config)


def main() -> None:
    """Run six peers, a registry, and a crash."""
    network, compiled = Network(seed=1), compile_program()
    registry = network.add("registry", compiled, ["registry"])
    peers = [add_peer(network, compiled, i) for i in range(PEERS)]
    for second in (5, 60, 120, 180, 240):
        if second == 120:
            network.crash(peers[3])
        network.run(until=second * S)
        peers[0].invoke("peer", {"count": values.TRIGGER})
        network.run(until=second * S + S // 2)
        known = registry.values("known")[-1]
        greeted = sum(len(peer.values("greeted")) for peer in peers)
        print(f"after {second:3} s: {len(known)} of {PEERS} peers known, {greeted:3} greetings")


if __name__ == "__main__":
    main()
