"""One federated round: four peers train on handwritten digits, a fifth averages and evaluates.

This is the whole program of every peer in it. The server asks a cohort of clients to train its
weights, each on its own examples, and takes the mean, weighted by their numbers of examples
(FedAvg: McMahan et al., 2017, arXiv:1602.05629). Where a value lives follows from the request:
what `received` leads to is the clients', what `responses` leads to is the server's.

Run it with `bbnode demo`: five daemons on this machine, over libp2p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    DataSourceSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    types,
)

LAYER_SIZES = (64, 64, 10)  # 8 x 8 pixels, one hidden layer, ten digits
SPLITS = ("iid", "shards")


@dataclass(kw_only=True, eq=False)
class FederatedRound(Module):
    """Sample a cohort, train, average, evaluate; invoke it once per round.

    Input "tick" (Trigger) starts a round on the server. Outputs, all on the server:
    "accuracy" and "loss" on the held-out examples (float32 scalars), "stats" (Metadata of the
    aggregate: num_samples, contributors, …), and "model" (the new weights, [P] float32).
    """

    home = "server"

    clients: int = 4  # peers that a round asks
    quorum: int = 0  # answers that are enough at the deadline; 0: three of four, not all
    deadline_s: float = 10.0  # that a round waits for its answers
    seed: int = 0  # of the initial weights, of the split of the data, and of its shuffling
    epochs: int = 5  # this and the next two: of the training on each client
    batch: int = 32
    learning_rate: float = 0.1
    split: str = "iid"  # deals the training examples at random; "shards": by label

    def body(self, g: Graph) -> None:
        self._check(g)
        server_model, client_model = self._model("global"), self._model("local")
        fedavg, compute = AggregatorSlot("fedavg"), BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        cohort = PeerSelectorSlot("cohort", peer_class="client")
        peers = cohort.sample(g, n=self.clients, after=tick)
        weights = server_model.params(g, after=peers)
        # Not all of them: one wrong answer costs that answer, and not the round.
        most = max(1, self.clients - 1)
        quorum = self.quorum or min(most, math.ceil(3 * self.clients / 4))
        r = g.request("round", peers, weights, quorum=quorum, deadline=self.deadline_s)

        # On each client. Ops of one slot fire in the order in which they stand here.
        client_model.load_parameters(g, r.received)
        trained = client_model.train(g, epochs=self.epochs, batch=self.batch)
        r.respond(g.bundle([client_model.params(g), trained]))

        # Back on the server.
        fedavg.contribute_all(g, r.responses)
        mean, stats = fedavg.aggregate(g)
        loaded = server_model.load_parameters(g, mean)
        images, labels = DataSourceSlot("data").next_batch(g, after=loaded)
        logits = server_model.forward(g, images)
        loss = server_model.compute_loss(g, images, labels)
        predicted = compute.arg_max(g, logits, axis=1, keepdims=False)
        hits = compute.cast(g, compute.equal(g, predicted, labels), to=types.TENSOR_FLOAT)

        g.output("accuracy", compute.reduce_mean(g, hits, keepdims=False))
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
        """Return settings of the slot "data": on the server, or on the client with this shard."""
        common = {"dataset": "digits", "seed": self.seed}
        if shard is None:
            return {**common, "split": "test"}
        share = {"partition": self.split, "shard": shard, "shards": self.clients}
        return {**common, "split": "train", **share}

    def _model(self, slot: str) -> ModelSlot:
        """The same network on both sides; its weights at the start ride in the program."""
        forward = mlp_forward(LAYER_SIZES, "Relu", seed=self.seed)
        content = forward.SerializeToString(deterministic=True)
        config = OnnxModelConfig(model=content, learning_rate=self.learning_rate)
        return ModelSlot(slot, concrete=concrete(OnnxModel, config))

    def _check(self, g: Graph) -> None:
        """Settings come from files and command lines: say which one is wrong."""

        def require(name: str, good: bool, wanted: str) -> None:
            if not good:
                raise g.error(BadArgument, f"{name}={getattr(self, name)!r} has to be {wanted}")

        for name, least in {"clients": 1, "epochs": 1, "batch": 1, "seed": 0, "quorum": 0}.items():
            value = getattr(self, name)
            require(name, type(value) is int and value >= least, f"an integer of at least {least}")
        most = f"an integer between 0 (the default) and clients={self.clients}"
        require("quorum", self.quorum <= self.clients, most)
        for name in ("deadline_s", "learning_rate"):
            value = getattr(self, name)
            number = isinstance(value, int | float)
            require(name, number and 0 < value < math.inf, "a number above 0")
        require("split", self.split in SPLITS, f"one of {', '.join(SPLITS)}")
