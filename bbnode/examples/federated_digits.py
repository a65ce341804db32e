"""One federated round: four peers train on handwritten digits, a fifth averages and evaluates.

Rule: this is the whole program of every peer in it. The server asks a cohort of clients to
train its weights, each on its own examples, and takes the mean, weighted by their numbers of
examples (FedAvg: McMahan et al., 2017, arXiv:1602.05629). Where a value lives follows from the
request: what `received` leads to is the clients', what `responses` leads to is the server's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bbnode.components import (
    ConnectedView,
    FedAvg,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    SklearnDataSource,
    concrete,
    mlp_forward,
)
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    BadArgument,
    ConcreteSpec,
    DataSourceSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    types,
)

LAYER_SIZES = (64, 64, 10)  # 8 x 8 pixels, one hidden layer, ten digits

SPLITS = ("iid", "shards")


class FederatedRound(Module):
    """Sample a cohort, train, average, evaluate; invoke it once per round.

    Input "tick" (Trigger) starts a round on the server. Outputs, all on the server:
    "accuracy" and "loss" on the held-out examples (float32 scalars), "stats" (Metadata of the
    aggregate: num_samples, contributors, …), and "model" (the new weights, [P] float32).

    Slots to be configured on each peer: "data" holds the test part on the server, and the
    peer's shard of the training part on a client (`data_config` gives both).
    """

    home = "server"

    def __init__(
        self,
        *,
        clients: int = 4,
        quorum: int = 0,
        deadline_s: float = 10.0,
        seed: int = 0,
        epochs: int = 5,
        batch: int = 32,
        learning_rate: float = 0.1,
        split: str = "iid",
    ) -> None:
        """Settings of the program; all can be given as JSON.

        Args:
            clients: how many peers a round asks.
            quorum: answers that are enough at the deadline; 0 for three of four, rounded up.
            deadline_s: seconds that a round waits for its answers.
            seed: of the initial weights, of the split of the data, and of its shuffling.
            epochs, batch, learning_rate: of the training on each client.
            split: how the training examples are dealt, "iid" or "shards" (by label).
        """
        self.clients = clients
        self.quorum = quorum
        self.deadline_s = deadline_s
        self.seed = seed
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.split = split

    def body(self, g: Graph) -> None:
        self._check(g)
        cohort = PeerSelectorSlot("cohort", peer_class="client")
        server_model = ModelSlot("global", concrete=self._model())
        client_model = ModelSlot("local", concrete=self._model())
        fedavg = AggregatorSlot("fedavg")
        test_data = DataSourceSlot("data")
        compute = BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        peers = cohort.sample(g, n=self.clients, after=tick)
        weights = server_model.params(g, after=peers)
        r = g.request("round", peers, weights, quorum=self._quorum(), deadline=self.deadline_s)

        # On each client. Ops of one slot fire in the order in which they stand here.
        client_model.load_parameters(g, r.received)
        trained = client_model.train(g, epochs=self.epochs, batch=self.batch)
        r.respond(g.bundle([client_model.params(g), trained]))

        # Back on the server.
        fedavg.contribute_all(g, r.responses)
        mean, stats = fedavg.aggregate(g)
        loaded = server_model.load_parameters(g, mean)
        images, labels = test_data.next_batch(g, after=loaded)
        logits = server_model.forward(g, images)
        loss = server_model.compute_loss(g, images, labels)
        predicted = compute.arg_max(g, logits, axis=1, keepdims=False)
        hits = compute.cast(g, compute.equal(g, predicted, labels), to=types.TENSOR_FLOAT)
        accuracy = compute.reduce_mean(g, hits, keepdims=False)

        g.output("accuracy", accuracy)
        g.output("loss", loss)
        g.output("stats", stats)
        g.output("model", mean)

    def bindings(self) -> Mapping[str, Any]:
        return {
            "cohort": ConnectedView,
            "fedavg": FedAvg,
            "data": SklearnDataSource,
            "compute": OrtBackend,
        }

    def data_config(self, shard: int | None = None) -> dict[str, Any]:
        """Settings of the slot "data" on the server, or on the client that has this shard."""
        common = {"dataset": "digits", "seed": self.seed}
        if shard is None:
            return {**common, "split": "test"}
        return {
            **common,
            "split": "train",
            "partition": self.split,
            "shard": shard,
            "shards": self.clients,
        }

    def _quorum(self) -> int:
        return self.quorum or math.ceil(3 * self.clients / 4)

    def _check(self, g: Graph) -> None:
        """Settings come from files and command lines: say which one is wrong."""
        counts = {"clients": self.clients, "epochs": self.epochs, "batch": self.batch}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise g.error(BadArgument, f"{name}={count!r} has to be an integer of at least 1")
        if type(self.seed) is not int or self.seed < 0:
            raise g.error(BadArgument, f"seed={self.seed!r} has to be an integer of at least 0")
        if type(self.quorum) is not int or not 0 <= self.quorum <= self.clients:
            raise g.error(
                BadArgument,
                f"quorum={self.quorum!r} has to be an integer between 0 (three of four) and "
                f"clients={self.clients}",
            )
        numbers: dict[str, object] = {
            "deadline_s": self.deadline_s,
            "learning_rate": self.learning_rate,
        }
        for name, number in numbers.items():
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                raise g.error(BadArgument, f"{name}={number!r} has to be a number above 0")
        if self.split not in SPLITS:
            raise g.error(BadArgument, f"split={self.split!r} has to be one of {', '.join(SPLITS)}")

    def _model(self) -> ConcreteSpec:
        """The same network on both sides; its weights at the start ride in the program."""
        forward = mlp_forward(LAYER_SIZES, "Relu", seed=self.seed)
        config = OnnxModelConfig(
            model=forward.SerializeToString(deterministic=True),
            loss="softmax_cross_entropy",
            learning_rate=self.learning_rate,
        )
        return concrete(OnnxModel, config)
