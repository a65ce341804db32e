"""Federated training without rounds: clients work when they like, and nobody waits for anybody.

Rule: a client asks the server for weights, trains, and sends what it has; the server counts by its
own versions how stale that is. What clients train, and what the server steps with, are the steps of
`FederatedTraining`, so that other strategies go with these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bbnode.components import ConnectedView, FedAvg, UpdateBuffer, concrete
from bbnode.dsl import (
    BackendSlot,
    Graph,
    Output,
    PeerSelectorSlot,
    ProtocolSlot,
    Request,
    types,
)
from bbnode.programs.federated import FederatedTraining
from bbnode.programs.strategies.drift import FedNova, QFedAvg, Scaffold
from bbnode.programs.strategies.server_optimizers import FedOpt
from bbnode.programs.strategies.topologies import CyclicTraining

STALENESS = ("constant", "hinge", "polynomial")

# Steps of a round that have no place here.
_OF_ROUNDS = {
    name: getattr(FederatedTraining, name)
    for name in (
        "cohort",
        "heard",
        "respond",
        "protected",
        "combined",
        "gathered",
        "aggregated",
        "aggregator_slot",
    )
}


@dataclass(frozen=True)
class _Work:
    """The place of a request of a round: what a client was given."""

    received: Output


@dataclass(kw_only=True, eq=False)
class AsynchronousTraining(FederatedTraining):
    """Base of training without rounds; `clients`, `quorum` and `aggregator` are of rounds only.

    Input "tick" (Trigger) is a client's own: it asks the server for weights, trains them on its
    examples and sends the result, with the version that it began at. The server adds it to a
    buffer, and steps whenever that is full. A client that has answered the server's weights has
    nothing to do until these are new; its tick ends without training.

    Outputs on a client: "trained" (Metadata of its training, none where it had nothing to do).
    Outputs on the server, after each step: those of `FederatedTraining`, of `evaluate` "server" or
    "none"; "version" (int64 []). "stats" has `updates`, `contributors`, `staleness` (the mean),
    `max_staleness` and `version` (before the step).
    """

    home = "client"

    staleness: str = "polynomial"  # how an update counts less: or "constant", "hinge"
    exponent: float = 0.5  # a of the polynomial (1 + d)^-a
    hinge_slope: float = 10.0  # a and b of the hinge: 1 up to d = b, then 1 / (a (d - b) + 1)
    hinge_at: int = 4
    max_staleness: int = 20  # versions; an update that is older is refused

    def body(self, g: Graph) -> None:
        """Record a client's turn, and what the server makes of its update."""
        self.check()
        compute, updates = BackendSlot("compute"), self.updates
        tick = g.input("tick", types.TRIGGER)
        server = PeerSelectorSlot("cohort", peer_class="server").sample(g, n=1, after=tick)
        asked = g.request("work", server, tick, quorum=1, deadline=float(self.deadline_s))

        # On the server.
        weights, version = updates.give(g, self.server_model.params(g, after=asked.received))
        asked.respond(g.bundle([weights, version]), codec=self.codec_of_questions())

        # On the client, if there is something to do.
        there, given, began = updates.begin(g, asked.responses)
        work: Any = _Work(compute.identity(g, given, after=g.when(there)))
        tensor, told = self.client_update(g, work)
        g.output("trained", told)
        update = g.net_out(
            "update", asked.responses.peers, g.bundle([tensor, told, began]),
            codec=self.codec_of_answers(),
        )  # fmt: skip

        # On the server.
        parts = g.unbundle(update, [types.TENSOR_FLOAT, types.METADATA, types.TENSOR_INT64])
        full = updates.take(g, *parts)
        summed, kept, stats = updates.collect(g, after=g.when(full))
        new = self.stepped(g, summed, kept, stats)
        loaded = self.server_model.load_parameters(g, new)
        g.output("version", updates.publish(g, new, after=loaded))
        self.results(g, update.sender, new, stats, loaded)

    @property
    def updates(self) -> ProtocolSlot:
        """The slot of the server's versions and buffer."""
        return ProtocolSlot(
            "updates",
            "updates",
            concrete=concrete(UpdateBuffer, size=self.size, **self.buffering()),
        )

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer."""
        return {
            "staleness": self.staleness, "exponent": float(self.exponent),
            "hinge_slope": float(self.hinge_slope), "hinge_at": self.hinge_at,
            "max_staleness": self.max_staleness, "step_deadline_s": float(self.deadline_s),
        }  # fmt: skip

    def stepped(self, g: Graph, summed: Output, kept: Output, stats: Output) -> Output:  # noqa: ARG002
        """Return the server's new weights [P]."""
        return self.server_update(g, summed, stats)

    def ready(self, g: Graph, after: Output) -> Output:  # noqa: ARG002
        """Train where there is something to do only: what was received is what begins it."""
        return after

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:  # noqa: ARG002
        """Refuse: clients ask."""
        raise self.bad(f"the server asks for nothing here, and so not for {name!r}")

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_one_of("staleness", STALENESS)
        self.require_counts(hinge_at=0, max_staleness=0)
        self.require_numbers("exponent", "hinge_slope")
        self.require("quorum", self.quorum == 0, "0: nobody is waited for")
        alone = "left out: updates are added up as they come"
        self.require("aggregator", self.aggregator is FedAvg, alone)
        self.require(
            "selector", self.selector is ConnectedView, "left out: clients ask by themselves"
        )
        here = '"server" or "none": there is no cohort to ask'
        self.require("evaluate", self.evaluate in ("server", "none"), here)
        self.refuse_extra_numbers("a staleness")
        # A part that never came to be used might be what keeps clients' updates secret.
        changed = [n for n in _OF_ROUNDS if getattr(type(self), n) is not _OF_ROUNDS[n]]
        if changed or isinstance(self, CyclicTraining | FedNova | QFedAvg | Scaffold):
            raise self.bad("what its clients send belongs to a round; leave that strategy out")


@dataclass(kw_only=True, eq=False)
class FedAsync(AsynchronousTraining):
    """Each update is mixed in as it comes (Xie, Koyejo and Gupta, 2019, arXiv:1903.03934).

    w <- (1 - a) w + a x, with x, a client's weights, and a = `mixing` s(d), where d is how many
    versions ago it began, and s is as `staleness` says.
    """

    mixing: float = 0.6  # alpha, above 0 and up to 1

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer: an update is a step."""
        return {**super().buffering(), "mixing": float(self.mixing)}

    def stepped(self, g: Graph, summed: Output, kept: Output, stats: Output) -> Output:  # noqa: ARG002
        """Mix the update into the server's weights."""
        compute = BackendSlot("compute")
        old = self.server_model.params(g, after=summed)
        return compute.add(g, compute.mul(g, old, kept), summed)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_numbers("mixing")
        self.require("mixing", self.mixing <= 1, "a number above 0 and up to 1")
        self.require("deltas", not self.deltas, "false: weights are mixed into weights")
        if isinstance(self, FedOpt):
            raise self.bad("mixing is no step of an optimizer; take FedBuff with buffer=1 instead")


@dataclass(kw_only=True, eq=False)
class FedBuff(AsynchronousTraining, FedOpt):
    """A buffer of updates makes a step (Nguyen et al., 2022, arXiv:2106.06639).

    w <- w + `server_learning_rate` D, where D is the mean of s(d) times each of `buffer` moves; s
    is 1 / sqrt(1 + d) by default. With a server's optimizer D is its gradient: `class
    Training(FedBuff, FedAdam)`.
    """

    deltas: bool = True
    buffer: int = 10  # K: updates that make a step, at most one of a client for each version

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer."""
        return {**super().buffering(), "buffer": self.buffer}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(buffer=1)
        self.require("deltas", self.deltas, "true: moves of the weights are added up")
