"""Training without a server: peers train on their own data and average with whom they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ConnectedView, FedAvg, FedAvgConfig, concrete
from bbnode.dsl import AggregatorSlot, Graph, PeerSelectorSlot, types
from bbnode.programs.training import TrainingProgram


@dataclass(kw_only=True, eq=False)
class GossipTraining(TrainingProgram):
    """Gossip learning (Ormándi, Hegedűs and Jelasity, 2013, doi:10.1002/cpe.2858), by averaging.

    Input "tick" (Trigger) is a peer's own round: it trains its weights on its own examples, takes
    the mean of them and of what others have sent it since its last round, weighted by
    numbers of examples, and sends what it trained to `neighbours` peers, drawn at random. Nobody
    waits for anybody: who is away is missed only.

    Outputs, on each peer: "loss" and the `metrics` (see `FederatedTraining`) of the mean, on
    examples that the peer does not train on (its slots "data" and "held_out" are
    the parts "train" and "test" of one data set), float32 [], unless `evaluate` is false;
    "stats" (Metadata of the mean: num_samples, contributors, …); "model" (the mean, [P] float32).
    """

    home = "peer"

    neighbours: int = 1  # peers that a round's weights are sent to
    evaluate: bool = True

    def body(self, g: Graph) -> None:
        """Record a peer's round, and what it does with the weights of others."""
        self.check()
        # All peers have the model, so a tensor of another size is a lie, whoever has sent more.
        own_shape = concrete(FedAvg, FedAvgConfig(shape=(self.size,)))
        model, average = self.trained_model("local"), AggregatorSlot("average", concrete=own_shape)

        tick = g.input("tick", types.TRIGGER)
        ready = self.train_part(g, tick) if self.holds_out else tick
        trained = model.train(g, epochs=self.epochs, batch=self.batch, after=ready)
        weights = model.params(g, after=trained)

        others = PeerSelectorSlot("cohort", peer_class="peer")
        peers = others.sample(g, n=self.neighbours, after=weights)
        update = g.net_out("update", peers, g.bundle([weights, trained]))
        # On a neighbour, which keeps them for its next mean.
        average.contribute(g, *g.unbundle(update, [types.TENSOR_FLOAT, types.METADATA]))

        own = average.contribute(g, weights, trained)
        mean, stats = average.aggregate(g, after=own)
        loaded = model.load_parameters(g, mean)
        if self.evaluate:
            _, loss, *means = self.evaluation(g, model, self.held_out(), loaded)
            for name, value in self.found(g, loss, means).items():
                g.output(name, value)
        g.output("stats", stats)
        g.output("model", mean)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        return {**super().bindings(), "cohort": ConnectedView}

    @property
    def holds_out(self) -> bool:
        """Return True where peers evaluate."""
        return self.evaluate

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(neighbours=1)
        self.require("evaluate", isinstance(self.evaluate, bool), "true or false")
