"""An index of your own that searches in a worker thread.

Run it with `python -m bbnode.examples.custom_index`.

A search that compares with every vector is slow, and a node has one loop that also answers its
peers. So `search` is marked `@offload`: the host runs it in a worker thread, and the engine parks
the op until the result is there. No lock is needed: two ops of one component never run at once.

Below a search takes 200 ms of virtual time. A ping of the same node is answered meanwhile; a book
that is added meanwhile comes after the search.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import (
    ComponentError,
    ConnectedView,
    Index,
    OpContext,
    offload,
    register_component,
)
from bbnode.dsl import Graph, IndexSlot, Module, PeerSelectorSlot, types, values
from bbnode.sim import MS, Network, SimNode, steps


@register_component
class BruteForceIndex(Index):
    """Exact nearest neighbours by Euclidean distance; numbers its vectors from 0."""

    TYPE_NAME: ClassVar[str] = "example.BruteForceIndex"
    storage: ClassVar[Any] = {"*": types.TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._vectors: dict[int, npt.NDArray[np.float32]] = {}
        self._next_id = 0

    def add(
        self,
        ctx: OpContext,
        vector: Any,
        metadata: values.MetadataVec | None = None,
        id: Any | None = None,  # noqa: A002
    ) -> npt.NDArray[np.int64]:
        """Store a vector [D] and return its id."""
        if metadata is not None or id is not None:
            raise ComponentError("this index keeps no metadata, and numbers its vectors itself")
        known = next(iter(self._vectors.values()), vector)
        if np.shape(vector) != np.shape(known):
            raise ComponentError(f"shape {np.shape(vector)}; the index holds {np.shape(known)}")
        number, self._next_id = self._next_id, self._next_id + 1
        self._vectors[number] = np.array(vector, np.float32)
        return np.array(number, np.int64)

    @offload
    def search(
        self, ctx: OpContext, query: Any, where: values.Metadata | None = None, *, k: int
    ) -> values.SearchResults:
        """Return the k nearest to `query` [D], nearest first; of equal distances the older one."""
        if where is not None:
            raise ComponentError("this index keeps no metadata to filter by")
        far = [(n, float(np.linalg.norm(vector - query))) for n, vector in self._vectors.items()]
        return values.SearchResults.of_pairs(sorted(far, key=lambda found: found[1])[:k])

    def remove(self, ctx: OpContext, item: Any) -> None:
        """Remove the vector with this id (int64 scalar), if it is there."""
        self._vectors.pop(int(np.asarray(item).reshape(())), None)

    def train(self, ctx: OpContext, training: Any) -> None:
        """There is nothing to fit."""


class Library(Module):
    """Three inputs on the reader: "book", "question" (both [D] float32) and "ping" (Trigger)."""

    home = "reader"

    def body(self, g: Graph) -> None:
        libraries = PeerSelectorSlot("libraries", peer_class="library")
        books = IndexSlot("books")

        book = g.input("book", types.TENSOR_FLOAT)
        kept = g.net_out("store", libraries.current_view(g, after=book), book)
        g.output("stored", books.add(g, kept))

        question = g.input("question", types.TENSOR_FLOAT)
        asked = g.net_out("ask", libraries.current_view(g, after=question), question)
        found = books.search(g, asked, k=2)
        g.output("nearest", g.net_out("tell", asked.sender, found))

        ping = g.input("ping", types.TRIGGER)
        heard = g.net_out("ping", libraries.current_view(g, after=ping), ping)
        g.output("pong", g.net_out("pong", heard.sender, heard))


def compile_program() -> ModelProto:
    """Compile the program with our index."""
    compiler = Compiler().bind_peer_selector("libraries", ConnectedView)
    return compiler.bind_index("books", BruteForceIndex).compile(Library().build())


def main() -> None:
    """Store three books, ask, and do other things while the search runs."""

    def say(now_ns: int, who: SimNode, step: steps.Step) -> None:
        if isinstance(step, steps.AppEvent):
            print(f"{now_ns / MS:6.1f} ms  {who.name}: {step.topic} {step.value}")

    compiled = compile_program()
    # With threads=True the search really runs in a thread, as it does in a daemon.
    network = Network(seed=0, threads=True, observe=say)
    reader = network.add("reader", compiled, ["reader"])
    network.add("library", compiled, ["library"], task_ns=200 * MS)
    for position in (0.0, 1.0, 5.0):
        reader.deliver_event("reader", "book", np.array([position, 0], np.float32))
    network.run_until_idle()

    reader.deliver_event("reader", "question", np.array([0.9, 0], np.float32))
    network.run(until=network.now_ns + 10 * MS)
    reader.deliver_event("reader", "ping", values.TRIGGER)
    reader.deliver_event("reader", "book", np.array([0.9, 0], np.float32))
    network.run_until_idle()


if __name__ == "__main__":
    main()
