"""Search without a server: each item is on the peers that its place among keys says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bbnode.components import GuestItems, Kademlia, OrtBackend, PeerSelector, concrete
from bbnode.dsl import (
    BackendSlot,
    ConcreteSpec,
    Graph,
    Output,
    PeerSelectorSlot,
    ProtocolSlot,
    peer_lists,
    types,
)
from bbnode.programs.parts.plain import Selects
from bbnode.programs.retrieval.base import RetrievalProgram
from bbnode.programs.training import component_of

_MAX_BITS = 24
_FLIPPED = 8  # of the bits that a query is least sure of, so many may be flipped


class PeerToPeerSearch(RetrievalProgram):
    """A search over items that peers keep for each other, without anybody who knows where they are.

    The cell of a vector are its signs by `bits` random hyperplanes (Charikar, 2002,
    doi:10.1145/509907.509965), which follow from `seed`: vectors at a small angle are in one cell,
    or in neighbouring ones. An item lives on the `replicas` peers that are nearest to the key of
    its cell, which `selector` finds: Kademlia, in logarithmic steps. A search asks those of the
    query's cell and of the `probes` - 1 cells that are next likely (Lv et al., 2007, "Multi-probe
    LSH": those beyond the hyperplanes that the query is nearest to).

    All is on the class "peer". Input "query" (float32 [dimensions]): outputs "results" and
    "missing" as of `ShardedSearch`. Inputs "vectors" (float32 [dimensions], one), "metadata" (a
    MetadataVec of one, or of none) and "ids" (int64 []) bring an item; output "added" is the id,
    and "kept_by" (PeerIdVec) are the peers that keep it. "remove" (int64 []) and "removed_vector"
    (its vector) take it back: "removed", and "removed_by".

    An item is its bringer's: the same peer may bring it again, which replaces it, and which is to
    be done now and then (each hour, say), since peers come and go: who is near its key now gets
    it. What a peer keeps for others is bounded by its slot "guests" (`max_items`,
    `max_items_of_one`).
    """

    home = "peer"

    dimensions: int = 0  # of the vectors
    bits: int = 6  # hyperplanes: there are 2^bits cells
    probes: int = 6  # cells that a search looks into
    replicas: int = 3  # peers that keep an item
    share: int = 0  # of the k hits, those of one peer at most; 0: any number
    seed: int = 0  # of the hyperplanes; all peers have the same
    quorum: int = 1  # answers that are enough at the deadline
    deadline_s: float = 5.0  # that answers are waited for, seconds
    selector: Selects = Kademlia  # a PeerSelector with the mode near_key

    compute: ClassVar[BackendSlot] = BackendSlot("compute")

    def body(self, g: Graph) -> None:
        """Record a search, and how items come and go."""
        self.check()
        self._searched(g)
        self._brought(g)
        self._taken_back(g)

    def _searched(self, g: Graph) -> None:
        query, where = self.question(g)
        query = g.expect(query, shape=[self.dimensions])
        cells = self._cells(g, query, self._probed())
        near = [self._near(g, cells, row) for row in range(len(self._probed()))]
        peers = peer_lists.concat_lists(g, *near) if len(near) > 1 else near[0]
        value = query if where is None else g.bundle([query, where])
        asked = self._ask(g, "search", peers, value)
        sought, condition = asked.received, None
        if where is not None:
            sought, condition = g.unbundle(sought, [types.TENSOR_FLOAT, types.METADATA])
        asked.respond(self.items.search(g, sought, condition, k=self.k))
        answers = asked.responses.usable(k=self.k, query=query)
        merged = answers.merged(k=self.k, query=query, distinct=1, share=self.share)
        g.output("results", merged)
        g.output("missing", answers.missing)

    def _brought(self, g: Graph) -> None:
        kinds = [types.TENSOR_FLOAT, types.METADATA_VEC, types.TENSOR_INT64]
        vector = g.input("vectors", kinds[0], shape=[self.dimensions])
        metadata = g.input("metadata", kinds[1])
        number = g.input("ids", kinds[2], shape=[])
        item = g.bundle([vector, metadata, number])
        asked = self._ask(g, "bring", self._keepers(g, vector), item)
        vector, metadata, given = g.unbundle(asked.received, kinds)
        given = self._guests.admit(g, asked.received.sender, given)
        asked.respond(self.items.add(g, vector, metadata, given))
        g.output("added", number, after=asked.responses)
        g.output("kept_by", asked.responses.peers)

    def _taken_back(self, g: Graph) -> None:
        number = g.input("remove", types.TENSOR_INT64, shape=[])
        vector = g.input("removed_vector", types.TENSOR_FLOAT, shape=[self.dimensions])
        asked = self._ask(g, "take_back", self._keepers(g, vector), number)
        given = self._guests.release(g, asked.received.sender, asked.received)
        asked.respond(given, after=self.items.remove(g, given))
        g.output("removed", number, after=asked.responses)
        g.output("removed_by", asked.responses.peers)

    # -- cells -------------------------------------------------------------------------------

    def _keepers(self, g: Graph, vector: Output) -> Output:
        return self._near(g, self._cells(g, vector, [()]), 0)

    def _near(self, g: Graph, cells: Output, row: int) -> Output:
        """Return the peers that are nearest to the key of a cell."""
        compute = self.compute
        key = compute.squeeze(g, compute.slice(g, cells, [row], [row + 1], [0]), [0])
        return self.dht.select(g, key, mode="near_key", n=self.replicas)

    def _cells(self, g: Graph, vector: Output, probed: list[tuple[int, ...]]) -> Output:
        """Return cells as bits, uint8 [P, bits]: that of the vector with some of the bits flipped.

        `probed` says which, by their rank: 0 is the bit whose hyperplane is nearest.
        """
        compute = self.compute
        draws = np.random.default_rng(self.seed)
        planes = g.tensor(draws.normal(size=(self.dimensions, self.bits)), types.TENSOR_FLOAT)
        row = compute.reshape(g, vector, g.constant([1, self.dimensions]))
        away = compute.mat_mul(g, row, planes)
        above = compute.cast(
            g, compute.greater(g, away, g.tensor(0.0, types.TENSOR_FLOAT)), to=types.TENSOR_INT64
        )
        most = min(_FLIPPED, self.bits)
        _, nearest = compute.top_k(
            g, compute.abs(g, away), g.constant([most]), axis=1, largest=0, sorted=1
        )
        column = compute.reshape(g, nearest, g.constant([most, 1]))
        which = compute.equal(g, column, g.constant([list(range(self.bits))]))
        chosen = np.array([[int(rank in flips) for rank in range(most)] for flips in probed])
        flipped = compute.mat_mul(
            g, g.tensor(chosen, types.TENSOR_FLOAT), compute.cast(g, which, to=types.TENSOR_FLOAT)
        )
        turned = compute.greater(g, flipped, g.tensor(0.5, types.TENSOR_FLOAT))
        back = compute.sub(g, g.constant(1), above)
        return compute.cast(g, compute.where(g, turned, back, above), to=types.TENSOR_UINT8)

    def _probed(self) -> list[tuple[int, ...]]:
        """Return which bits a search flips in each cell it looks into, the likeliest cell first.

        The expected distance from the hyperplane of rank r grows about as r + 1, and a cell is as
        far as the squares of those that are crossed add up to.
        """
        ranks = range(min(_FLIPPED, self.bits))
        sets = (s for n in range(len(ranks) + 1) for s in itertools.combinations(ranks, n))
        ordered = sorted(sets, key=lambda flips: (sum((r + 1) ** 2 for r in flips), flips))
        return ordered[: self.probes]

    # -- slots and arguments -------------------------------------------------------------------

    def _ask(self, g: Graph, port: str, peers: Output, value: Output) -> Any:
        return g.request(port, peers, value, quorum=self.quorum, deadline=float(self.deadline_s))

    @property
    def dht(self) -> PeerSelectorSlot:
        """The slot that finds peers by a key."""
        given = self.selector
        return PeerSelectorSlot(
            "dht", peer_class="peer", include_self=True,
            concrete=given if isinstance(given, ConcreteSpec) else None,
        )  # fmt: skip

    @property
    def _guests(self) -> ProtocolSlot:
        return ProtocolSlot("guests", "guests", concrete=concrete(GuestItems))

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        bound = {**super().bindings(), "compute": OrtBackend}
        return bound if isinstance(self.selector, ConcreteSpec) else {**bound, "dht": self._finder}

    @property
    def _finder(self) -> type[PeerSelector]:
        found: type[PeerSelector] = component_of(self, "selector", PeerSelector, "bbnode.Kademlia")
        return found

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(dimensions=1, bits=1, probes=1, replicas=1, share=0, seed=0, quorum=1)
        self.require("bits", self.bits <= _MAX_BITS, f"at most {_MAX_BITS}")
        cells = len(self._probed())
        self.require("probes", self.probes <= cells, f"at most {cells} with bits={self.bits}")
        self.require_numbers("deadline_s")
        _ = self._finder
