"""Kademlia on real nodes: each knows one other, and dials whom it is told of."""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack

import bbnode
from bbnode.components import Kademlia, concrete
from bbnode.components.selectors.kademlia import key_id, node_id
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.ir.peer import PeerId
from tests.patience import PATIENCE_S

NODES = 5


class Find(Module):
    """Look the two members up that are nearest to a key."""

    home = "peer"

    def body(self, g: Graph) -> None:
        key = g.input("key", types.BYTES)
        dht = PeerSelectorSlot("dht", peer_class="peer", concrete=concrete(Kademlia, k=2))
        g.output("near", dht.select(g, key, mode="near_key", n=2))


def test_nodes_that_know_one_other_find_the_nearest_of_all() -> None:
    settings = {"discovery": {"introductions": False}}
    with ExitStack() as stack:
        nodes: list[bbnode.Node] = []
        for _ in range(NODES):
            opened = bbnode.open(Find(), targets="peer", peers=nodes[-1:], settings=settings)
            nodes.append(stack.enter_context(opened))
        peers = [PeerId.parse(node.peer_id) for node in nodes]
        for number, (asker, own) in enumerate(zip(nodes, peers, strict=True)):
            key = b"key %d" % number
            others = [peer for peer in peers if peer != own]
            best = sorted(others, key=lambda peer: node_id(peer) ^ key_id(key))[:2]

            found = None
            begun = time.monotonic()
            while found != sorted(best):  # until all have met
                assert time.monotonic() - begun < PATIENCE_S, (found, best)
                with contextlib.suppress(bbnode.ExecutionFailed):
                    near = asker.invoke("peer", {"key": key}, timeout_s=PATIENCE_S)["near"]
                    found = [PeerId.parse(str(peer)) for peer in near]
