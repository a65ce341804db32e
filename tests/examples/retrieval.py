"""The program of the example `multi_target`, whose encoders merge the answers of all stores.

Rule: `Nearest` keeps what it merges by `ctx.execution`: an encoder may have several questions under
way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import (
    Aggregator,
    ComponentError,
    ConnectedView,
    OpContext,
    OrtBackend,
    register_component,
)
from bbnode.dsl import AggregatorSlot, Graph, IndexSlot, Module, PeerSelectorSlot, types, values
from bbnode.examples.custom_index import BruteForceIndex
from bbnode.examples.multi_target import DOCUMENTS, Encode
from bbnode.sim import MS, LinkModel, Network, SimNode

IDS_PER_STORE = 1000  # store 0 numbers from 0, store 1 from 1000, store 2 from 2000


@dataclass(frozen=True, kw_only=True)
class NumberedConfig:
    first_id: int = 0


@register_component
class NumberedIndex(BruteForceIndex):
    """Numbers its vectors from the setting on, so that ids of several stores differ."""

    TYPE_NAME: ClassVar[str] = "test.NumberedIndex"
    Config: ClassVar[type] = NumberedConfig

    def __init__(self, config: NumberedConfig) -> None:
        super().__init__(config)
        self._next_id = config.first_id


@register_component
class Nearest(Aggregator):
    """Merges the SearchResults of many stores into one tensor [k, 2] of (id, distance)."""

    TYPE_NAME: ClassVar[str] = "test.Nearest"
    answers = types.SEARCH_RESULTS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._found: dict[int, list[tuple[float, int]]] = {}
        self._last: npt.NDArray[np.float32] = np.zeros((0, 2), np.float32)

    def contribute(self, ctx: OpContext, tensor: Any, metadata: values.Metadata) -> None:
        raise ComponentError(f"{self.TYPE_NAME} takes the answers to a request, all at once")

    def contribute_all(self, ctx: OpContext, responses: values.ResponseBatch) -> None:
        self._found[ctx.execution] = sorted(
            (hit.distance, hit.id) for _, results in responses.responses for hit in results.hits()
        )

    def aggregate(self, ctx: OpContext) -> tuple[Any, values.Metadata]:
        rows = [(number, far) for far, number in self._found.pop(ctx.execution, [])]
        self._last = np.array(rows, np.float32).reshape(-1, 2)
        return self._last, values.Metadata(found=len(rows))

    def current_tensor(self, ctx: OpContext) -> Any:
        return self._last


class MergedRetrieval(Module):
    """Events "document" and "question" ([D] float32) on the door, where the outputs are as well.

    Outputs: "stored" (int64 [], the id of a document) and "nearest" ([found, 2] float32, rows
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
    compiler = compiler.bind_index("index", NumberedIndex).bind_aggregator("nearest", Nearest)
    return compiler.compile(MergedRetrieval().build())


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
