"""A network of three classes: documents go around a ring, questions are gathered.

Run it with `python -m bbnode.examples.multi_target`.

One program, three kinds of peer. The door takes documents and questions from outside, encoders
turn them into unit vectors, stores keep a part of the vectors each:

    document:  door -> encoder -> store -> door            (a ring: the door hears the id)
    question:  door -> encoder => all stores => encoder -> door      (=> is a request)

`g.request` waits until every store has answered and then continues once, with all answers.
`Nearest` merges them; it keeps them by `ctx.execution`, since an encoder may have several questions
under way. `Encode` is a Module too: it is called in two places, and runs where its input is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.compiler import Compiler, target_names
from bbnode.components import (
    Aggregator,
    ComponentError,
    ConnectedView,
    OpContext,
    OrtBackend,
    register_component,
)
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    Graph,
    IndexSlot,
    Module,
    PeerSelectorSlot,
    types,
    values,
)
from bbnode.examples.custom_index import BruteForceIndex
from bbnode.sim import MS, LinkModel, Network, SimNode

IDS_PER_STORE = 1000  # store 0 numbers from 0, store 1 from 1000, store 2 from 2000

DOCUMENTS: Mapping[str, tuple[float, float, float]] = {
    "apples": (9, 1, 0),
    "pears": (8, 3, 0),
    "cars": (0, 1, 9),
    "bicycles": (1, 4, 7),
    "bread": (4, 9, 0),
}


@register_component
class Nearest(Aggregator):
    """Merges the SearchResults of many stores into one tensor [k, 2] of (id, distance)."""

    TYPE_NAME: ClassVar[str] = "example.Nearest"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._found: dict[int, list[tuple[float, int]]] = {}
        self._last: npt.NDArray[np.float32] = np.zeros((0, 2), np.float32)

    def contribute(self, ctx: OpContext, tensor: Any, metadata: values.Metadata) -> None:
        raise ComponentError(f"{self.TYPE_NAME} takes the answers to a request, all at once")

    def contribute_all(self, ctx: OpContext, responses: values.ResponseBatch) -> None:
        self._found[ctx.execution] = sorted(
            (far, number) for _, results in responses.responses for number, far in results
        )

    def aggregate(self, ctx: OpContext) -> tuple[Any, values.Metadata]:
        rows = [(number, far) for far, number in self._found.pop(ctx.execution, [])]
        self._last = np.array(rows, np.float32).reshape(-1, 2)
        return self._last, values.Metadata(found=len(rows))

    def current_tensor(self, ctx: OpContext) -> Any:
        return self._last


class Encode(Module):
    """ "raw" ([D] float32) to "unit": the same direction, of length 1."""

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        raw = g.input("raw", types.TENSOR_FLOAT)
        g.output("unit", compute.div(g, raw, compute.reduce_l2(g, raw, keepdims=True)))


class Retrieval(Module):
    """Events "document" and "question" ([D] float32) on the door, where the outputs are as well.

    Outputs: "stored" (CommandId, the id of a document) and "nearest" ([found, 2] float32, rows
    of id and distance, nearest first).
    """

    home = "door"

    def body(self, g: Graph) -> None:
        encoders = PeerSelectorSlot("encoders", peer_class="encoder")
        stores = PeerSelectorSlot("stores", peer_class="store")
        doors = PeerSelectorSlot("doors", peer_class="door")
        index = IndexSlot("index")
        nearest = AggregatorSlot("nearest")

        # The ring.
        document = g.input("document", types.TENSOR_FLOAT)
        raw = g.net_out("document", encoders.sample(g, n=1, after=document), document)
        unit = Encode().call().input("raw", raw).build(g).output("unit")
        number = index.add(g, g.net_out("vector", stores.sample(g, n=1, after=unit), unit))
        stored = g.net_out("stored", doors.current_view(g, after=number), number)
        g.output("stored", stored)

        # The gather.
        question = g.input("question", types.TENSOR_FLOAT)
        asked = g.net_out("question", encoders.sample(g, n=1, after=question), question)
        wanted = Encode().call().input("raw", asked).build(g).output("unit")
        r = g.request("search", stores.current_view(g, after=wanted), wanted, deadline=5.0)
        r.respond(index.search(g, r.received, k=1))
        nearest.contribute_all(g, r.responses)
        merged, _ = nearest.aggregate(g)
        g.output("nearest", g.net_out("nearest", asked.sender, merged))


def compile_program() -> ModelProto:
    """Compile the program with our two components."""
    compiler = Compiler().bind_backend("compute", OrtBackend)
    for selector in ("encoders", "stores", "doors"):
        compiler = compiler.bind_peer_selector(selector, ConnectedView)
    compiler = compiler.bind_index("index", BruteForceIndex).bind_aggregator("nearest", Nearest)
    return compiler.compile(Retrieval().build())


def build_network(compiled: ModelProto, seed: int = 0) -> tuple[Network, SimNode]:
    """Build a network of a door, two encoders and three stores, and return it with the door."""
    network = Network(seed, link=LinkModel(latency_ns=2 * MS, jitter_ns=MS))
    door = network.add("door", compiled, ["door"])
    for i in range(2):
        config = {"stores": {"seed": seed + 10 + i}}  # each draws its stores for itself
        network.add(f"encoder-{i}", compiled, ["encoder"], config=config)
    for i in range(3):
        config = {"index": {"first_id": i * IDS_PER_STORE}}
        network.add(f"store-{i}", compiled, ["store"], config=config)
    return network, door


def store_documents(network: Network, door: SimNode) -> dict[int, str]:
    """Send all documents around the ring, one by one; return their titles by id."""
    titles = {}
    for title, features in DOCUMENTS.items():
        door.deliver_event("door", "document", np.array(features, np.float32))
        network.run_until_idle()
        titles[int(door.values("stored")[-1])] = title
    return titles


def main() -> None:
    """Store five documents and ask for what is like fruit."""
    compiled = compile_program()
    print("one program, cut into:", ", ".join(target_names(compiled)))
    network, door = build_network(compiled)
    titles = store_documents(network, door)
    for number, title in sorted(titles.items()):
        print(f"  store {number // IDS_PER_STORE} keeps {title} as {number}")
    asked_ns = network.now_ns
    door.deliver_event("door", "question", np.array([10, 2, 0], np.float32))
    network.run_until_idle()
    print("most like (10, 2, 0), the best of each store:")
    for number, far in door.values("nearest")[-1]:
        print(f"  {titles[int(number)]} (distance {far:.3f})")
    print(f"asked, searched and gathered in {(network.now_ns - asked_ns) / MS:.1f} virtual ms")


if __name__ == "__main__":
    main()
