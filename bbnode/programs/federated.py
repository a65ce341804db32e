"""Federated training of any model, by FedAvg."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ConnectedView, FedAvg, MetricsMean
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    Graph,
    ModelSlot,
    Output,
    PeerSelectorSlot,
    types,
)
from bbnode.programs.training import TEST_SLOT, TrainingProgram

PLACES = ("server", "clients", "both", "none")


@dataclass(kw_only=True, eq=False)
class FederatedTraining(TrainingProgram):
    """One round of FedAvg (McMahan et al., 2017, arXiv:1602.05629); invoke it once per round.

    Input "tick" (Trigger) starts a round on the server: it asks a cohort of clients to train its
    weights, each on its own examples, and takes the mean, weighted by their numbers of examples.

    Outputs, all on the server: "loss" and, beside it, "accuracy" (softmax_cross_entropy) or "mae"
    (mse), float32 []; "stats" (Metadata of the aggregate: num_samples, contributors, …); "model"
    (the new weights, [P] float32).

    `evaluate` says where the new weights are evaluated:

    - "server": on the examples of its slot "test".
    - "clients": on each client that took part, on examples that it does not train on: its slots
      "data" and "held_out" are the parts "train" and "test" of one data set. The outputs are
      the means, weighted by numbers of examples.
    - "both": then what the clients measured is "clients_loss" and so on.
    - "none".
    """

    home = "server"

    clients: int = 4  # peers that a round asks
    quorum: int = 0  # answers that are enough at the deadline; 0: three of four, rounded up
    deadline_s: float = 60.0  # that a round waits for its answers, seconds
    evaluate: str = "server"

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        server_model, client_model = self.held_model("global"), self.trained_model("local")

        tick = g.input("tick", types.TRIGGER)
        peers = PeerSelectorSlot("cohort", peer_class="client").sample(
            g, n=self.clients, after=tick
        )
        weights = server_model.params(g, after=peers)
        quorum = self.quorum or math.ceil(3 * self.clients / 4)
        asked = g.request("round", peers, weights, quorum=quorum, deadline=float(self.deadline_s))

        # On each client. Ops of one slot fire in the order in which they stand here.
        client_model.load_parameters(g, asked.received)
        ready = self.train_part(g, asked.received) if self.holds_out else None
        trained = client_model.train(g, epochs=self.epochs, batch=self.batch, after=ready)
        asked.respond(g.bundle([client_model.params(g), trained]))

        # Back on the server.
        fedavg = AggregatorSlot("fedavg")
        fedavg.contribute_all(g, asked.responses)
        mean, stats = fedavg.aggregate(g)
        loaded = server_model.load_parameters(g, mean)
        if self.evaluate in ("server", "both"):
            _, *found = self.evaluation(g, server_model, self.test_data(), loaded)
            self._hand_out(g, "", found)
        if self.holds_out:
            prefix = "clients_" if self.evaluate == "both" else ""
            self._hand_out(g, prefix, self._asked(g, client_model, asked.responses.peers, mean))
        g.output("stats", stats)
        g.output("model", mean)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" and "metrics" only where they are used."""
        bound = {**super().bindings(), "cohort": ConnectedView, "fedavg": FedAvg}
        if self.evaluate in ("server", "both") and self.test_data().concrete is None:
            bound[TEST_SLOT] = self.source
        if self.holds_out:
            bound["metrics"] = MetricsMean
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(clients=1, quorum=0)
        most = f"an integer between 0 (three of four) and clients={self.clients}"
        self.require("quorum", self.quorum <= self.clients, most)
        self.require_numbers("deadline_s")
        self.require_one_of("evaluate", PLACES)

    @property
    def holds_out(self) -> bool:
        """Return True where clients evaluate."""
        return self.evaluate in ("clients", "both")

    def _asked(self, g: Graph, model: ModelSlot, peers: Output, weights: Output) -> list[Output]:
        """Have those that took part evaluate the weights; return the weighted means."""
        asked = g.request("evaluation", peers, weights, quorum=1, deadline=float(self.deadline_s))
        loaded = model.load_parameters(g, asked.received)
        compute = BackendSlot("compute")
        one = g.constant([1])
        found = [
            compute.reshape(g, each, one)
            for each in self.evaluation(g, model, self.held_out(), loaded)
        ]
        asked.respond(compute.concat(g, *found, axis=0))

        metrics = AggregatorSlot("metrics")
        metrics.contribute_all(g, asked.responses)
        mean, _ = metrics.aggregate(g)
        return [compute.gather(g, mean, g.constant(index), axis=0) for index in (0, 1)]

    def _hand_out(self, g: Graph, prefix: str, found: list[Output]) -> None:
        for name, value in zip(self.metrics, found, strict=True):
            g.output(prefix + name, value)
