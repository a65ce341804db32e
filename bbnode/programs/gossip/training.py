"""Training without a server: peers train on their own data and average with whom they meet."""

from __future__ import annotations

from bbnode.components import FedAvg, FedAvgConfig, concrete
from bbnode.dsl import AggregatorSlot, Graph, Output, types
from bbnode.programs.gossip.averaging import EXCHANGES, ExchangingProgram
from bbnode.programs.gossip.peers import PeersProgram
from bbnode.programs.training import TrainingProgram

MIXES = ("push", *EXCHANGES)


class PeerTraining(PeersProgram, TrainingProgram):
    """Base of training in which each peer has its own weights, and evaluates them itself."""

    evaluate: bool = True

    def trained(self, g: Graph, after: Output) -> tuple[Output, Output]:
        """Train the peer's weights on its examples; return them, [P], and the Metadata."""
        model = self.trained_model("local")
        ready = self.train_part(g, after) if self.holds_out else after
        told = model.train(g, epochs=self.epochs, batch=self.batch, after=ready)
        return model.params(g, after=told), told

    def results(self, g: Graph, weights: Output, stats: Output) -> None:
        """Load the weights of a round's end, evaluate them, and make the outputs."""
        model = self.trained_model("local")
        loaded = model.load_parameters(g, weights)
        if self.evaluate:
            _, loss, *means = self.evaluation(g, model, self.held_out(), loaded)
            for name, value in self.found(g, loss, means).items():
                g.output(name, value)
        g.output("stats", stats)
        g.output("model", weights)

    @property
    def holds_out(self) -> bool:
        """Return True where peers evaluate."""
        return self.evaluate

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.check_selector()
        self.require("evaluate", isinstance(self.evaluate, bool), "true or false")


class GossipTraining(ExchangingProgram, PeerTraining):
    """Gossip learning (Ormándi, Hegedűs and Jelasity, 2013, doi:10.1002/cpe.2858), by averaging.

    Input "tick" (Trigger) is a peer's own round: it trains its weights on its own examples and
    averages them as `mix` says. Nobody waits for all: who is away is missed only.

    - "push": it takes the mean of its weights and of what others have sent it since its last round,
      weighted by numbers of examples, and sends what it trained to `neighbours` peers, drawn by the
      selector. A message is all; who is sent to more often counts for more.
    - "pairwise": it and one peer both take the mean of what they hold (`PairwiseMean`), so that the
      mean over all peers is moved by their training alone.
    - "push_pull": likewise, and a peer answers one other one while it waits for its answer.

    Outputs, on each peer: "loss" and the `metrics` (see `FederatedTraining`) of the mean, on
    examples that the peer does not train on (its slots "data" and "held_out" are
    the parts "train" and "test" of one data set), float32 [], unless `evaluate` is false;
    "stats" (Metadata of the mean: num_samples, contributors, … of "push"; exchanged, answered, … of
    the others); "model" (the mean, [P] float32).
    """

    mix: str = "push"
    neighbours: int = 1  # of "push": peers that a round's weights are sent to

    def body(self, g: Graph) -> None:
        """Record a peer's round, and what it does with the weights of others."""
        self.check()
        tick = g.input("tick", types.TRIGGER)
        self.results(g, *(self._pushed(g, tick) if self.mix == "push" else self._pairs(g, tick)))

    def _pushed(self, g: Graph, tick: Output) -> tuple[Output, Output]:
        # All peers have the model, so a tensor of another size is a lie, whoever has sent more.
        own_shape = concrete(FedAvg, FedAvgConfig(shape=(self.size,)))
        average = AggregatorSlot("average", concrete=own_shape)
        weights, told = self.trained(g, tick)
        peers = self.cohort.sample(g, n=self.neighbours, after=weights)
        update = g.net_out("update", peers, g.bundle([weights, told]))
        # On a neighbour, which keeps them for its next mean.
        average.contribute(g, *g.unbundle(update, [types.TENSOR_FLOAT, types.METADATA]))
        own = average.contribute(g, weights, told)
        mean, stats = average.aggregate(g, after=own)
        return mean, stats

    def _pairs(self, g: Graph, tick: Output) -> tuple[Output, Output]:
        mean, model = (
            self.mean_slot(self.size, overlapping=self.mix == "push_pull"),
            self.trained_model("local"),
        )
        # Others' exchanges have moved what is held since the last round, and not the model.
        held = mean.take(g, model.params(g, after=tick))
        weights, _ = self.trained(g, model.load_parameters(g, held))
        return self.exchange(g, mean, mean.contribute(g, weights))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_one_of("mix", MIXES)
        self.require_counts(neighbours=1)
        self.require_numbers("deadline_s")
        waits = self.mix != "push" or self.deadline_s == ExchangingProgram.deadline_s
        self.require("deadline_s", waits, 'left out with mix="push": nobody is waited for')
        one = self.mix == "push" or self.neighbours == 1
        self.require("neighbours", one, '1 but with mix="push": an exchange is one of two')
