"""A network of three classes: documents go around a ring, questions are gathered.

Run it with `python -m bbnode.examples.multi_target`.

One program, three kinds of peer. The door takes documents and questions from outside, encoders
turn them into unit vectors, stores keep a part of the vectors each:

    document:  door -> encoder -> store -> door            (a ring: the door hears the id)
    question:  door -> encoder => all stores => encoder -> door      (=> is a request)

`g.request` waits until every store has answered or refused, and goes on once, with all answers: one
(`quorum`) is enough, so that a store that is broken costs its own answer alone. `Encode` is a
Module too: it is called in two places, and runs where its input is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler, target_names
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, IndexSlot, Module, PeerSelectorSlot, types
from bbnode.examples.custom_index import BruteForceIndex
from bbnode.sim import Network, SimNode

DOCUMENTS = {
    "apples": (9, 1, 0),
    "pears": (8, 3, 0),
    "cars": (0, 1, 9),
    "bicycles": (1, 4, 7),
    "bread": (4, 9, 0),
}


class Encode(Module):
    """ "raw" ([D] float32) to "unit": the same direction, of length 1."""

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        raw = g.input("raw", types.TENSOR_FLOAT)
        g.output("unit", compute.div(g, raw, compute.reduce_l2(g, raw, keepdims=True)))


class Retrieval(Module):
    """Events "document" and "question" ([D] float32) on the door, where the outputs are as well.

    Outputs: "keeper" (PeerId, the store of a document), "stored" (CommandId, its number there) and
    "nearest" (ResponseBatch, what each store has that is most like the question).
    """

    home = "door"

    def body(self, g: Graph) -> None:
        encoders = PeerSelectorSlot("encoders", peer_class="encoder")
        stores = PeerSelectorSlot("stores", peer_class="store")
        doors = PeerSelectorSlot("doors", peer_class="door")
        index = IndexSlot("index")

        # The ring.
        document = g.input("document", types.TENSOR_FLOAT)
        raw = g.net_out("document", encoders.sample(g, n=1, after=document), document)
        unit = Encode().call().input("raw", raw).build(g).output("unit")
        number = index.add(g, g.net_out("vector", stores.sample(g, n=1, after=unit), unit))
        stored = g.net_out("stored", doors.current_view(g, after=number), number)
        g.output("stored", stored)
        g.output("keeper", stored.sender)

        # The gather.
        question = g.input("question", types.TENSOR_FLOAT)
        asked = g.net_out("question", encoders.sample(g, n=1, after=question), question)
        wanted = Encode().call().input("raw", asked).build(g).output("unit")
        near = stores.current_view(g, after=wanted)
        r = g.request("search", near, wanted, quorum=1, deadline=5.0)
        r.respond(index.search(g, r.received, k=1))
        g.output("nearest", g.net_out("nearest", asked.sender, r.responses))


def compile_program() -> ModelProto:
    """Compile the program with the index of `custom_index`."""
    compiler = Compiler().bind_backend("compute", OrtBackend).bind_index("index", BruteForceIndex)
    for selector in ("encoders", "stores", "doors"):
        compiler = compiler.bind_peer_selector(selector, ConnectedView)
    return compiler.compile(Retrieval().build())


def build_network(compiled: ModelProto, seed: int = 0) -> tuple[Network, SimNode]:
    """Build a network of a door, two encoders and three stores, and return it with the door."""
    network = Network(seed)
    door = network.add("door", compiled, ["door"])
    for i in range(2):
        config = {"stores": {"seed": seed + 10 + i}}  # each draws its stores for itself
        network.add(f"encoder-{i}", compiled, ["encoder"], config=config)
    for i in range(3):
        network.add(f"store-{i}", compiled, ["store"])
    return network, door


def store_documents(network: Network, door: SimNode) -> dict[tuple[Any, int], str]:
    """Send all documents around the ring, one by one; return titles by (store, number)."""
    titles = {}
    for title, features in DOCUMENTS.items():
        door.deliver_event("door", "document", np.array(features, np.float32))
        network.run_until_idle()
        titles[door.values("keeper")[-1], int(door.values("stored")[-1])] = title
    return titles


def main() -> None:
    """Store five documents and ask for what is like fruit."""
    compiled = compile_program()
    print("one program, cut into:", ", ".join(target_names(compiled)))
    network, door = build_network(compiled)
    titles = store_documents(network, door)
    door.deliver_event("door", "question", np.array([10, 2, 0], np.float32))
    network.run_until_idle()
    print("most like (10, 2, 0), the best of each store:")
    (nearest,) = door.values("nearest")
    for peer, results in nearest.responses:
        for hit in results.hits():
            print(f"  {titles[peer, hit.id]} (distance {hit.distance:.3f})")


if __name__ == "__main__":
    main()
