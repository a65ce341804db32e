"""Statistics of the features of all peers together, by which each standardises its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ConnectedView, OrtBackend, PooledStatistics
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    DataSourceSlot,
    Graph,
    PeerSelectorSlot,
    types,
)
from bbnode.programs.arguments import ReadyProgram
from bbnode.programs.training import TEST_SLOT, TRAIN_SLOT, Source, source_class


@dataclass(kw_only=True, eq=False)
class FederatedStatistics(ReadyProgram):
    """Count, mean and standard deviation of each feature over the examples of all clients.

    Input "tick" (Trigger): the server asks a cohort of clients for the statistics of the examples
    in their slots "data", merges them, and sends the result back to these. No example leaves
    its peer; what does are statistics of each one's examples, minimum and maximum among them.

    Each client keeps the result: in the file of its setting `statistics`, for other programs, and
    in the source itself, where `standardize` is "federated".

    Outputs, all on the server: "mean", "std", "minimum" and "maximum" (float64 [F]), "stats"
    (Metadata: num_samples, label_counts, contributors, refused, …), and "told" (int64 []): how
    many clients have taken the result.
    """

    home = "server"

    clients: int = 4  # peers that are asked
    quorum: int = 0  # answers that are enough at the deadline; 0: all
    deadline_s: float = 60.0  # that the server waits for answers, seconds, twice
    data: Source = "bbnode.ArrayDataSource"  # a DataSource, or its TYPE_NAME
    test: bool = False  # the server's own slot "test" takes the result too

    def body(self, g: Graph) -> None:
        """Record the two requests."""
        self.check()
        quorum, deadline = self.quorum or self.clients, float(self.deadline_s)
        data, pool = DataSourceSlot(TRAIN_SLOT), AggregatorSlot("statistics")
        compute = BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        cohort = PeerSelectorSlot("cohort", peer_class="client")
        peers = cohort.sample(g, n=self.clients, after=tick)
        asked = g.request("statistics", peers, tick, quorum=quorum, deadline=deadline)
        asked.respond(g.bundle(data.statistics(g, after=asked.received)))

        pool.contribute_all(g, asked.responses)
        merged, stats = pool.aggregate(g)
        told = g.request(
            "standardize", asked.responses.peers, merged, quorum=quorum, deadline=deadline
        )
        taken = data.standardize(g, told.received)
        told.respond(data.on_data_loaded(g, after=taken))

        if self.test:
            DataSourceSlot(TEST_SLOT).standardize(g, merged)
        count, mean, squares, low, high = (
            compute.gather(g, merged, g.constant(row), axis=0) for row in range(5)
        )
        g.output("mean", mean)
        g.output("std", compute.sqrt(g, compute.div(g, squares, count)))
        g.output("minimum", low)
        g.output("maximum", high)
        g.output("stats", stats)
        g.output("told", told.responses.count)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" only where it is used."""
        source = source_class(self, self.data)
        bound = {
            "cohort": ConnectedView,
            "statistics": PooledStatistics,
            TRAIN_SLOT: source,
            "compute": OrtBackend,
        }
        return {**bound, TEST_SLOT: source} if self.test else bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.require_counts(clients=1, quorum=0)
        most = f"an integer between 0 (all) and clients={self.clients}"
        self.require("quorum", self.quorum <= self.clients, most)
        self.require_numbers("deadline_s")
        self.require("test", isinstance(self.test, bool), "True or False")
        source_class(self, self.data)
