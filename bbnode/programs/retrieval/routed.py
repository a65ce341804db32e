"""Search that asks the shards whose items are near a query, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bbnode.components import CentroidSelector, ConnectedView, OrtBackend, concrete
from bbnode.components.indexes.summary import MAX_CENTROIDS
from bbnode.dsl import BackendSlot, Graph, Output, PeerSelectorSlot, peer_lists, syscalls, types
from bbnode.programs.retrieval.sharded import ShardedSearch

_NS = 1_000_000_000


class RoutedSearch(ShardedSearch):
    """A search over shards of items that are alike: a query is asked of the `ask` nearest ones.

    As `ShardedSearch`, and each shard tells an asker up to `centroids` centres of its items (an
    owner may refuse: `tell_centroids` of the index). The asker asks for them every `refresh_s`
    seconds, and by its input "refresh" (Trigger), whose output "told" (PeerIdVec) are those that
    answered. A query goes to the shards with the nearest centre, one of a batch to those of each of
    its queries, up to `most` in all; `untold` of those that have told nothing are drawn besides.
    Until some have told it goes to `most` of all.
    """

    ask: int = 3  # shards for each query
    centroids: int = 16  # that a shard tells
    refresh_s: float = 30.0  # between two questions for them, seconds; 0: by "refresh" alone
    most: int = 32  # shards that a batch of queries is asked of
    untold: int = 1  # shards that have told nothing and are asked besides

    def body(self, g: Graph) -> None:
        """Record a search, and how askers learn what is where."""
        super().body(g)
        if self.refresh_s:
            tick = syscalls.interval(g, period_ns=round(self.refresh_s * _NS))
            self._learn(g, "centroids", tick)
        told = self._learn(g, "refresh", g.input("refresh", types.TRIGGER))
        g.output("told", told)

    def chosen(self, g: Graph, query: Output) -> Output:
        """Return the shards that are asked for a query."""
        return self.shards.select(g, query, mode="near_key", n=self.ask, after=query)

    def _learn(self, g: Graph, port: str, tick: Output) -> Output:
        """Ask all shards for their centres; return those that answered."""
        view = self.shards.current_view(g, after=tick)
        there = BackendSlot("compute").greater(g, peer_lists.length(g, view), g.constant(0))
        asked = g.request(
            port, view, tick, quorum=1, deadline=float(self.deadline_s), after=g.when(there)
        )
        asked.respond(self.items.centroids(g, n=self.centroids, after=asked.received))
        heard = self.shards.observed(g, asked.responses)
        return peer_lists.slice_list(g, asked.responses.peers, after=heard)

    @property
    def shards(self) -> PeerSelectorSlot:
        """The slot that selects shards."""
        settings = concrete(
            CentroidSelector, metric=self.metric, max_centroids=self.centroids,
            max_asked=self.most, untold=self.untold,
        )  # fmt: skip
        return PeerSelectorSlot(
            "shards", peer_class=self.shard, include_self=True, concrete=settings
        )

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        bound = {**super().bindings(), "compute": OrtBackend}
        del bound["shards"]
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(ask=1, centroids=1, most=1, untold=0)
        self.require("centroids", self.centroids <= MAX_CENTROIDS, f"at most {MAX_CENTROIDS}")
        self.require_not_negative("refresh_s")
        where = "left out: a query goes where centroids are near"
        self.require("selector", self.selector is ConnectedView, where)
        own = "0: items that are spread by their ids are alike on no shard"
        self.require("replicas", self.replicas == 0, own)
