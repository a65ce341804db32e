"""Swarm learning: federated rounds without a server, since another peer is the server each time."""

from __future__ import annotations

from typing import ClassVar

from bbnode.components import Aggregator, FedAvg, SwarmRounds, concrete
from bbnode.dsl import AggregatorSlot, Graph, Output, ProtocolSlot, peer_lists, syscalls, types
from bbnode.programs.gossip.rounds import GRACE_S, S_NS
from bbnode.programs.gossip.training import PeerTraining
from bbnode.programs.training import component_of

QUEUE = "round"


class SwarmTraining(PeerTraining):
    """Rounds of FedAvg whose coordinator is another peer in each.

    As Warnat-Herresthal et al., 2021, doi:10.1038/s41586-021-03583-3. Input "tick" (Trigger) is a
    peer's own round: it trains the newest weights on its own examples and sends them to the round's
    coordinator, which follows from the round's number. That one waits for `peers` updates, or
    `collect_s` for `quorum` of them, combines them, and sends the result to all that it knows. Who
    has heard nothing for `deadline_s` passes it over and sends to the next one; after `attempts` it
    goes on with its own weights.

    All peers have to know the same others: select those that everybody is connected to.

    Outputs, on each peer: "loss" and the `metrics` of the new weights, as of `GossipTraining`;
    "stats" (Metadata: round, coordinator, attempt, alone, contributors, num_samples, …); "model"
    (the new weights, [P] float32).
    """

    with_self: ClassVar[bool] = True

    peers: int = 4  # updates that complete a round, with the coordinator's own
    quorum: int = 0  # that are enough after `collect_s`; 0: more than half of `peers`
    collect_s: float = 5.0  # that a coordinator waits after the first update, seconds
    deadline_s: float = 10.0  # that a peer waits for a coordinator, seconds
    attempts: int = 2  # coordinators that a round tries
    aggregator: str | type[Aggregator] = FedAvg  # a class, or its TYPE_NAME

    def body(self, g: Graph) -> None:
        """Record a round: the peer's part, the coordinator's, and what ends it."""
        self.check()
        swarm, local = self._swarm, self.trained_model("local")
        budget = float(self.deadline_s) + GRACE_S

        # A peer's tick.
        tick = g.input("tick", types.TRIGGER)
        view = self.cohort.current_view(g, after=tick)
        weights, number, mask = swarm.begin(g, view, local.params(g, after=view))
        trained, metadata = self.trained(g, local.load_parameters(g, weights))
        kept = swarm.keep(g, trained, metadata)
        coordinator = peer_lists.filter_list(g, view, mask, after=kept)
        update = g.net_out("update", coordinator, g.bundle([trained, metadata, number]))
        watched = g.net_out("watch", self.own(g, kept), number, budget=budget)
        token = syscalls.serialize_dequeue(
            g, kept, queue=QUEUE, deadline_ns=round(self.attempts * budget * S_NS)
        )
        self.results(g, *swarm.result(g, after=token))

        # The coordinator was late: on with the next one.
        begun = syscalls.threshold(g, watched, n=1)
        late = syscalls.after(g, begun, delay_ns=round(self.deadline_s * S_NS))
        view = self.cohort.current_view(g, after=late)
        again, mask, weights, metadata, number, failed = swarm.next(g, view, watched, after=late)
        goes_on = g.when(again)
        coordinator = peer_lists.filter_list(g, view, mask, after=goes_on)
        g.net_out("update", coordinator, g.bundle([weights, metadata, number]), after=goes_on)
        g.net_out("watch", self.own(g, again), number, budget=budget, after=goes_on)
        self._end_when(g, failed)

        # The coordinator.
        trained, metadata, number = g.unbundle(
            update, [types.TENSOR_FLOAT, types.METADATA, types.TENSOR_INT64]
        )
        view = self.cohort.current_view(g, after=number)
        fits = swarm.admit(g, view, trained, metadata, number)
        batch = g.collect(
            g.bundle([trained, metadata]), n=self.peers, until=float(self.collect_s),
            quorum=self.quorum or self.peers // 2 + 1, after=g.when(fits),
        )  # fmt: skip
        combined = self._combined
        mean, stats = combined.aggregate(g, after=combined.contribute_all(g, batch))
        number = swarm.publish(g, mean)
        everybody = self.cohort.current_view(g, after=number)
        model = g.net_out("model", everybody, g.bundle([mean, stats, number]))

        # Everybody, with the new weights.
        mean, stats, number = g.unbundle(
            model, [types.TENSOR_FLOAT, types.METADATA, types.TENSOR_INT64]
        )
        view = self.cohort.current_view(g, after=number)
        self._end_when(g, swarm.accept(g, view, mean, stats, number))

    @property
    def _swarm(self) -> ProtocolSlot:
        settings = concrete(
            SwarmRounds, size=self.size, attempts=self.attempts, seed=self.seed,
            collect_s=float(self.collect_s), deadline_s=float(self.deadline_s),
        )  # fmt: skip
        return ProtocolSlot("swarm", "swarm", concrete=settings)

    @property
    def _combined(self) -> AggregatorSlot:
        found = self._aggregator_class
        # All peers have the model, so a tensor of another size is a lie, whoever has sent more.
        return AggregatorSlot("combined", concrete=concrete(found, shape=(self.size,)))

    @property
    def _aggregator_class(self) -> type[Aggregator]:
        return component_of(self, "aggregator", Aggregator, "bbnode.FedAvg")

    def _end_when(self, g: Graph, over: Output) -> None:
        syscalls.serialize_enqueue(g, over, queue=QUEUE, after=g.when(over))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(peers=2, quorum=0, attempts=1)
        self.require("quorum", self.quorum <= self.peers, f"at most peers={self.peers}")
        self.require_numbers("collect_s", "deadline_s")
        self.require(
            "collect_s", self.collect_s < self.deadline_s, f"below deadline_s={self.deadline_s}"
        )
        found = self._aggregator_class
        weights = not getattr(found, "of_deltas", False) and hasattr(found.Config(), "shape")
        self.require("aggregator", weights, "one that combines weights, such as bbnode.FedAvg")
