"""Rounds without a server: each peer mixes its vector with those of its neighbours on a graph.

Rule: a peer's round ends in the execution of its tick, so that whoever paces the ticks paces the
rounds. What ends it, the last neighbour's vector or the end of the time, comes in an execution of
its own, and puts a token into the queue that the tick waits at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from bbnode.components import RoundMixing, concrete
from bbnode.dsl import Graph, Output, ProtocolSlot, peer_lists, syscalls, types
from bbnode.ir.errors import BbnodeError
from bbnode.programs.gossip.peers import PeersProgram
from bbnode.programs.gossip.training import PeerTraining

QUEUE = "mixed"
# Beyond a round's deadline: until its token would be missed.
GRACE_S = 30.0
S_NS = 1_000_000_000


class MixingProgram(PeersProgram):
    """Base of programs of rounds on a graph."""

    with_self: ClassVar[bool] = True

    members: Sequence[str] = ()  # PeerIds of all peers; none: those selected, and oneself
    deadline_s: float = 10.0  # that a round waits for neighbours once its own vector is there

    def mixing_settings(self) -> dict[str, Any]:
        """Return settings of `RoundMixing` beside the size."""
        return {"members": tuple(self.members), "deadline_s": float(self.deadline_s)}

    def mixing_slot(self, size: int) -> ProtocolSlot:
        """Return the slot with a peer's rounds. Raises BadArgument."""
        settings = {"size": size, **self.mixing_settings()}
        try:
            RoundMixing(RoundMixing.Config(**settings))
        except BbnodeError as error:
            raise self.bad(str(error)) from error
        return ProtocolSlot("mixing", "mixing", concrete=concrete(RoundMixing, **settings))

    def begin(self, g: Graph, mixing: ProtocolSlot, tick: Output) -> tuple[Output, Output]:
        """Begin a round; return its number and its neighbours."""
        view = self.cohort.current_view(g, after=tick)
        number, mask = mixing.begin(g, view)
        return number, peer_lists.filter_list(g, view, mask)

    def mixed(
        self, g: Graph, mixing: ProtocolSlot, number: Output, neighbours: Output, vector: Output
    ) -> tuple[Output, Output]:
        """Send a vector to the neighbours, wait for theirs, and return the mean, and stats."""
        budget = float(self.deadline_s) + GRACE_S
        came = g.net_out("vector", neighbours, g.bundle([vector, number]))
        parts = g.unbundle(came, [types.TENSOR_FLOAT, types.TENSOR_INT64])
        self._end_when(g, mixing.arrive(g, *parts))

        watched = g.net_out("watch", self.own(g, vector), number, budget=budget)
        begun = syscalls.threshold(g, watched, n=1)
        late = syscalls.after(g, begun, delay_ns=round(self.deadline_s * S_NS))
        self._end_when(g, mixing.overdue(g, watched, after=late))

        full = mixing.own(g, vector)
        self._end_when(g, full)
        ready = syscalls.threshold(g, full, n=1)
        token = syscalls.serialize_dequeue(g, ready, queue=QUEUE, deadline_ns=round(budget * S_NS))
        mean, stats = mixing.mix(g, after=token)
        return mean, stats

    def _end_when(self, g: Graph, over: Output) -> None:
        syscalls.serialize_enqueue(g, over, queue=QUEUE, after=g.when(over))

    def check_rounds(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.check_selector()
        self.require_numbers("deadline_s")
        listed: Any = self.members
        texts = isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed)
        self.require("members", texts, "a list of PeerIds")


class DecentralizedSGD(MixingProgram, PeerTraining):
    """D-PSGD: local steps, and a mean with one's neighbours on a graph.

    Lian et al., 2017, arXiv:1705.09056. Input "tick" (Trigger) is a peer's own round: it trains
    its weights on its own examples, sends them to its neighbours and waits for theirs of the same
    round, at most `deadline_s`; then x_i <- sum_j W_ij x_j, with Metropolis-Hastings' weights. Who
    is late leaves its weight with the peer itself, and is named in the stats.

    `graph` is "ring", "torus" or "complete", over the sorted list of members; or a list of edges,
    each a pair of PeerIds. All peers have to know the same members: give them, or select those that
    everybody is connected to.

    Outputs, on each peer: "loss" and the `metrics` of the mean, as of `GossipTraining`; "stats"
    (Metadata: round, contributors, missing, missing_why, stale, own_share, moved); "model" (the
    mean, [P] float32).
    """

    graph: str | Sequence[tuple[str, str]] = "ring"
    staleness: int = 0  # rounds that weights may be behind, where newer ones are not there in time

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        mixing = self.mixing_slot(self.size)
        number, neighbours = self.begin(g, mixing, g.input("tick", types.TRIGGER))
        weights, _ = self.trained(g, number)
        self.results(g, *self.mixed(g, mixing, number, neighbours, weights))

    def mixing_settings(self) -> dict[str, Any]:
        """Return settings of `RoundMixing` beside the size."""
        graph = {"graph": self.graph}
        if not isinstance(self.graph, str):
            graph = {"graph": "edges", "edges": tuple((a, b) for a, b in self.graph)}
        return {**super().mixing_settings(), **graph, "staleness": self.staleness}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.check_rounds()
        self.require_counts(staleness=0)
        graph: Any = self.graph
        if not isinstance(graph, str):
            pairs = isinstance(graph, list | tuple) and len(graph) > 0
            pairs = pairs and all(
                isinstance(edge, list | tuple)
                and len(edge) == 2
                and all(isinstance(end, str) for end in edge)
                for edge in graph
            )
            self.require("graph", pairs, "ring, torus, complete, or a list of pairs of PeerIds")
        else:
            self.require_one_of("graph", ("ring", "torus", "complete"))


class GridProgram(MixingProgram):
    """Base of programs of Moshpit's groups: lines of a grid, along another axis in each round.

    Ryabinin et al., 2021, arXiv:2103.03239. Peers have their places by the order of their PeerIds.
    A group takes the mean of those that are there; with a full grid of `side`^`axes` peers all have
    the mean of all after `axes` rounds.
    """

    side: int = 0  # M: peers of a group; 0: as many as it takes for all members
    axes: int = 2  # d

    def mixing_settings(self) -> dict[str, Any]:
        """Return settings of `RoundMixing` beside the size."""
        grid = {"graph": "grid", "side": self.side, "axes": self.axes, "absent": "present"}
        return {**super().mixing_settings(), **grid}

    def check_rounds(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check_rounds()
        self.require_counts(side=0, axes=1)
        self.require("side", self.side != 1, "0 (as many as it takes), or 2 and more")


class MoshpitAveraging(GridProgram):
    """Rounds of means within Moshpit's groups, without training.

    Input "value" (float32 [size]) begins a round: the peer brings it in, and its output "mean"
    (float32 [size]) is the mean of its group. Bring that into the next round. "stats" as of
    `DecentralizedSGD`.
    """

    size: int = 1  # numbers of the vector

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check_rounds()
        self.require_counts(size=1)
        mixing = self.mixing_slot(self.size)
        value = g.input("value", types.TENSOR_FLOAT, shape=[self.size])
        mean, stats = self.mixed(g, mixing, *self.begin(g, mixing, value), value)
        g.output("mean", mean)
        g.output("stats", stats)


class MoshpitTraining(GridProgram, PeerTraining):
    """Moshpit SGD: local steps, and a mean within a group, another one in each round.

    Input "tick" (Trigger) is a peer's own round. Outputs as of `DecentralizedSGD`.
    """

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        mixing = self.mixing_slot(self.size)
        number, group = self.begin(g, mixing, g.input("tick", types.TRIGGER))
        weights, _ = self.trained(g, number)
        self.results(g, *self.mixed(g, mixing, number, group, weights))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.check_rounds()
