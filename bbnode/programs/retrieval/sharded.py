"""Search over the indexes of many peers, each of which keeps its own items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bbnode.components import ConnectedView, ItemPlacement, PeerSelector, concrete
from bbnode.dsl import (
    ConcreteSpec,
    Graph,
    Output,
    PeerSelectorSlot,
    ProtocolSlot,
    ResultsOutput,
    peer_lists,
    types,
)
from bbnode.programs.parts.plain import Selects
from bbnode.programs.retrieval.base import RetrievalProgram
from bbnode.programs.training import component_of


class ShardedSearch(RetrievalProgram):
    """A search that asks the indexes of many peers, and merges what they find.

    Input "query" (float32 [D], or [Q, D]) at an asker: it asks the connected shards, or `ask` of
    them drawn at random, and waits until all have answered, or, once `quorum` have, for
    `deadline_s`; with fewer the search fails. Outputs: "results" (SearchResults: the `k` nearest of
    all, each with the shard that found it) and "missing" (PeerIdVec: the shards that were asked
    and gave no answer that can be true). With `filtered`, "where" (a Metadata) says which items
    count.

    Each shard has items of its own. Its owner gives it the inputs "vectors", "metadata", "remove"
    and "training" (with `numbered`, "ids" too), as of a `VectorStore`.

    With `replicas` the items are the asker's: its inputs "vectors" (float32 [D] or [N, D]),
    "metadata" (a MetadataVec: of each, or of none) and "ids" (int64 [] or [N]) put each item on so
    many of the connected shards, which follow from its id (rendezvous hashing: Thaler and
    Ravishankar, 1998, doi:10.1109/90.663936); an id that is there is replaced. Its input "remove"
    (ids) removes items from all shards. Outputs "added" and "removed" are the ids, "not_added" and
    "not_removed" the shards that have not done it; do it again until there are none. An item is
    found while `agree` of its shards live; with 2 of 3, a shard that makes hits up, or denies
    them, changes nothing. What was added or removed while a shard was away it has not
    heard of: add and remove are to be done again when it is back.

    A node may play both classes; it is one of its own shards then.
    """

    home = "asker"

    asker: str = "asker"  # the class of those who search
    shard: str = "shard"  # the class of those who keep the items
    ask: int = 0  # shards that a search asks; 0: all
    quorum: int = 1  # answers that are enough at the deadline; 0: all
    share: int = 0  # of the k hits, those of one shard at most; 0: any number
    deadline_s: float = 5.0  # that an asker waits for answers, seconds
    numbered: bool = False  # who adds items gives their ids
    replicas: int = 0  # shards that keep an item of the asker's; 0: shards have their own items
    agree: int = 1  # shards that have to find an item of the asker's, at most `replicas`
    selector: Selects = ConnectedView  # chooses the shards: a PeerSelector, as `concrete(…)` too

    def __post_init__(self) -> None:
        """Take the askers' class as the home."""
        super().__post_init__()
        self.home = self.asker

    def body(self, g: Graph) -> None:
        """Record a search, and how shards get their items."""
        self.check()
        query, where = self.question(g)
        shards = self.chosen(g, query)
        value = query if where is None else g.bundle([query, where])
        asked = g.request(
            "search", shards, value, quorum=self.quorum, deadline=float(self.deadline_s)
        )

        # On a shard.
        sought = asked.received
        condition = None
        if where is not None:
            sought, condition = g.unbundle(sought, [types.TENSOR_FLOAT, types.METADATA])
        asked.respond(self.items.search(g, sought, condition, k=self.k))

        # On the asker.
        answers = asked.responses.usable(k=self.k, query=query)
        distinct = self.agree if self.replicas else 0
        merged = answers.merged(k=self.k, query=query, distinct=distinct, share=self.share)
        self.found(g, merged)
        g.output("missing", answers.missing)
        if self.replicas:
            self._placed(g)
        else:
            self.filled_here(g, self.shard, numbered=self.numbered)

    def found(self, g: Graph, results: ResultsOutput) -> None:
        """Record the outputs of a search."""
        g.output("results", results)

    def chosen(self, g: Graph, query: Output) -> Output:
        """Return the shards that are asked for a query."""
        if self.ask:
            return self.shards.sample(g, n=self.ask, after=query)
        return self.shards.current_view(g, after=query)

    def _placed(self, g: Graph) -> None:
        """Record how items of the asker's get to their shards."""
        place = ProtocolSlot(
            "placement", "placement", concrete=concrete(ItemPlacement, replicas=self.replicas)
        )
        kinds = [types.TENSOR_FLOAT, types.METADATA_VEC, types.TENSOR_INT64]
        vectors, metadata = self.arriving(g)
        ids = g.input("ids", kinds[2])
        view = self.shards.current_view(g, after=ids)
        mask = place.placed(g, view, vectors, metadata, ids)
        adding = self._tell(
            g, "add", peer_lists.filter_list(g, view, mask),
            g.bundle([vectors, metadata, ids, view]),
        )  # fmt: skip
        *given, among = g.unbundle(adding.received, [*kinds, types.PEER_ID_VEC])
        adding.respond(self.items.add(g, *place.keep(g, among, *given)))
        g.output("added", ids, after=adding.responses)
        g.output("not_added", adding.responses.missing)

        gone = g.input("remove", types.TENSOR_INT64)
        removing = self._tell(g, "remove", self.shards.current_view(g, after=gone), gone)
        removed = self.items.remove(g, removing.received)
        removing.respond(removing.received, after=removed)
        g.output("removed", gone, after=removing.responses)
        g.output("not_removed", removing.responses.missing)

    def _tell(self, g: Graph, port: str, peers: Output, value: Output) -> Any:
        return g.request(port, peers, value, quorum=1, deadline=float(self.deadline_s))

    @property
    def shards(self) -> PeerSelectorSlot:
        """The slot that selects shards."""
        given = self.selector
        return PeerSelectorSlot(
            "shards", peer_class=self.shard, include_self=True,
            concrete=given if isinstance(given, ConcreteSpec) else None,
        )  # fmt: skip

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        if isinstance(self.selector, ConcreteSpec):
            return super().bindings()
        return {**super().bindings(), "shards": self._selector_class}

    @property
    def _selector_class(self) -> type[PeerSelector]:
        found: type[PeerSelector] = component_of(
            self, "selector", PeerSelector, "bbnode.ConnectedView"
        )
        return found

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(ask=0, quorum=0, replicas=0, share=0, agree=1)
        self.require_numbers("deadline_s")
        self.require_flags("numbered")
        self.require("shard", self.shard != self.asker, f"another class than asker={self.asker!r}")
        most = f"an integer between 0 (all) and ask={self.ask}"
        self.require("quorum", not self.ask or self.quorum <= self.ask, most)
        few = f"an integer from 1 to replicas={self.replicas}"
        self.require("agree", 1 <= self.agree <= max(1, self.replicas), few)
        self.require("agree", self.agree == 1 or not self.ask, "1 where only some shards are asked")
        alone = "left out: with replicas items always have ids of the asker's"
        self.require("numbered", not (self.numbered and self.replicas), alone)
        _ = self._selector_class
