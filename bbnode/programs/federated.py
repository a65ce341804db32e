"""Federated training of any model, by FedAvg."""

from __future__ import annotations

import itertools
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
from bbnode.programs.training import TEST_SLOT, TRAIN_SLOT, TrainingProgram

PLACES = ("server", "clients", "both", "none")


@dataclass(kw_only=True, eq=False)
class FederatedTraining(TrainingProgram):
    """One round of FedAvg (McMahan et al., 2017, arXiv:1602.05629); invoke it once per round.

    Input "tick" (Trigger) starts a round on the server: it asks a cohort of clients to train its
    weights, each on its own examples, and takes the mean, weighted by their numbers of examples.

    Outputs, all on the server: "loss" and the `metrics` (without any: "accuracy" of a loss of
    classes, "mae" of one of values, "binary_accuracy" of one of probabilities), float32 [];
    "stats" (Metadata of the aggregate: num_samples, contributors, …); "model" (the new weights,
    [P] float32).

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
            _, loss, *means = self.evaluation(g, server_model, self.test_data(), loaded)
            self._hand_out(g, "", loss, means)
        if self.holds_out:
            prefix = "clients_" if self.evaluate == "both" else ""
            loss, *means = self._asked(g, client_model, asked.responses.peers, mean)
            self._hand_out(g, prefix, loss, means)
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
        flat = g.constant([-1])
        found = [
            compute.reshape(g, each, flat)
            for each in self.evaluation(g, model, self.held_out(), loaded)
        ]
        asked.respond(compute.concat(g, *found, axis=0))

        metrics = AggregatorSlot("metrics")
        metrics.contribute_all(g, asked.responses)
        mean, _ = metrics.aggregate(g)
        loss = compute.gather(g, mean, g.constant(0), axis=0)
        begins = list(itertools.accumulate((each.size for each in self.measures), initial=1))
        return [
            loss,
            *(
                compute.slice(g, mean, g.constant([first]), g.constant([last]))
                for first, last in itertools.pairwise(begins)
            ),
        ]

    def _hand_out(self, g: Graph, prefix: str, loss: Output, means: list[Output]) -> None:
        for name, value in self.found(g, loss, means).items():
            g.output(prefix + name, value)


@dataclass(kw_only=True, eq=False)
class FederatedSGD(TrainingProgram):
    """One step of federated SGD (McMahan et al., 2017, section 3); invoke it once per step.

    Input "tick" (Trigger) starts a step on the server: it asks a cohort of clients for the gradient
    at its weights, each of its next `batch` examples, takes the mean, weighted by their numbers,
    and makes one step of `optimizer`, whose state, `schedule` and clipping are the server's.

    Outputs, all on the server: "loss", the mean of what the clients found at the weights before the
    step; "model" (the weights after it, [P] float32); "stats" (Metadata of the mean:
    num_samples, contributors, …); "test_loss" and "test_" with the name of each of `metrics`,
    float32 [], where `evaluate` says so: of the new weights, on its slot "test".
    """

    home = "server"

    clients: int = 4  # peers that a step asks
    quorum: int = 0  # answers that are enough at the deadline; 0: three of four, rounded up
    deadline_s: float = 60.0  # that a step waits for its answers, seconds
    evaluate: bool = True

    def body(self, g: Graph) -> None:
        """Record a step."""
        self.check()
        compute = BackendSlot("compute")
        server_model, client_model = self.held_model("global"), self.held_model("local")

        tick = g.input("tick", types.TRIGGER)
        peers = PeerSelectorSlot("cohort", peer_class="client").sample(
            g, n=self.clients, after=tick
        )
        weights = server_model.params(g, after=peers)
        quorum = self.quorum or math.ceil(3 * self.clients / 4)
        asked = g.request("step", peers, weights, quorum=quorum, deadline=float(self.deadline_s))

        # On each client.
        loaded = client_model.load_parameters(g, asked.received)
        number, examples, labels = self.examples(g, self.batches(), loaded)
        grads, loss = client_model.gradient(g, examples, labels)
        one = g.constant([1])
        found = [compute.reshape(g, each, one) for each in (number, loss)]
        asked.respond(compute.concat(g, *found, grads, axis=0))

        # Back on the server: the mean of [loss, gradient].
        mean_slot = AggregatorSlot("gradients")
        mean_slot.contribute_all(g, asked.responses)
        mean, stats = mean_slot.aggregate(g)
        grads = compute.slice(g, mean, g.constant([1]), g.constant([1 + self.size]))
        stepped = server_model.step(g, grads)
        g.output("loss", compute.gather(g, mean, g.constant(0), axis=0))
        g.output("model", server_model.params(g, after=stepped))
        g.output("stats", stats)
        if self.evaluate:
            _, loss, *means = self.evaluation(g, server_model, self.test_data(), stepped)
            for name, value in self.found(g, loss, means).items():
                g.output(f"test_{name}", value)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" only where it is used."""
        bound = {**super().bindings(), "cohort": ConnectedView, "gradients": MetricsMean}
        if self.batches().concrete is not None:
            del bound[TRAIN_SLOT]
        if self.evaluate and self.test_data().concrete is None:
            bound[TEST_SLOT] = self.source
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(clients=1, quorum=0)
        most = f"an integer between 0 (three of four) and clients={self.clients}"
        self.require("quorum", self.quorum <= self.clients, most)
        self.require_numbers("deadline_s")
        self.require("evaluate", isinstance(self.evaluate, bool), "true or false")
        self.require("epochs", self.epochs == 1, "1: a step has one batch of each client")
        one = self._config.accumulate == 1
        self.require("accumulate", one, "1: the gradients of clients are what is accumulated")
