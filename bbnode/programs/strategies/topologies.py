"""Rounds of another shape than a star: from client to client, and in two levels.

Rule: who asks whom is all that differs; what clients train and what servers make of it are the
steps of `FederatedTraining`, so that other strategies go with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ConnectedView
from bbnode.dsl import Graph, Output, PeerSelectorSlot, Request, peer_lists, types
from bbnode.programs.arguments import enough
from bbnode.programs.federated import FederatedTraining
from bbnode.programs.strategies.drift import Scaffold


@dataclass(kw_only=True, eq=False)
class CyclicTraining(FederatedTraining):
    """Weights that go from client to client, each of which trains them further (Chang et al., 2018,
    doi:10.1093/jamia/ocy017, cyclical weight transfer).

    A round is one turn of each of `clients`, in PeerId order, by way of the server, which checks
    and loads what each answers before the next one gets it. Where a client does not answer in
    `deadline_s`, or its answer is refused, the round fails by its name, and the server has the
    weights of the one before. "stats" is of the last turn.
    """

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        peers = self.cohort(g, g.input("tick", types.TRIGGER))
        loaded, weights, stats = peers, peers, peers
        for turn in range(self.clients):
            # Nobody where there are fewer: the turn fails by its name, as one without an answer.
            one = peer_lists.slice_list(g, peers, turn, turn + 1)
            asked = self.ask(g, f"turn{turn}", one, self.sent(g, loaded))
            self.respond(g, asked)
            # Back on the server.
            self.heard(g, asked)
            answer, stats = self.combined(g, asked)
            weights = self.server_update(g, answer, stats)
            loaded = self.server_model.load_parameters(g, weights)
        self.results(g, peers, weights, stats, loaded)

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Send a value to a client and wait for its answer."""
        return g.request(
            name, peers, value, quorum=1, deadline=float(self.deadline_s),
            codec=self.codec_of_questions(),
        )  # fmt: skip

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("quorum", self.quorum == 0, "0: each client is waited for by itself")
        if isinstance(self, Scaffold):
            raise self.bad("control variates are of clients that train at once; leave one out")


@dataclass(kw_only=True, eq=False)
class HierarchicalTraining(FederatedTraining):
    """Training in two levels: clients, edges that combine these, and a server that combines edges
    (Liu et al., 2020, arXiv:1905.06641, with one combination at an edge per round).

    The server asks `edges` peers of the class "edge"; each asks `clients` of those that its slot
    "cohort" has, waits `edge_deadline_s` for `quorum` of them, and answers what it has combined,
    with the sum of their examples as its weight. So the result is the mean of all clients. On an
    edge `selector` chooses: by default among the peers that it is connected to; with
    "bbnode.ConstantView" among those that its node lists.
    """

    edges: int = 2  # peers of the class "edge" that a round asks
    edge_quorum: int = 0  # edges that are enough at the deadline; 0: as `enough` says
    edge_deadline_s: float = 30.0  # that an edge waits for its clients; below `deadline_s`

    def cohort(self, g: Graph, tick: Output) -> Output:
        """Choose the edges of a round."""
        return PeerSelectorSlot("edges", peer_class="edge").sample(g, n=self.edges, after=tick)

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Send a value to edges and wait for their answers."""
        quorum = self.edge_quorum or enough(self.edges)
        return g.request(
            name, peers, value, quorum=quorum, deadline=float(self.deadline_s),
            codec=self.codec_of_questions(),
        )  # fmt: skip

    def respond(self, g: Graph, asked: Request) -> None:
        """Answer the server, on an edge, with what its clients answered."""
        members = super().cohort(g, asked.received)
        inner = g.request(
            "members", members, asked.received, codec=self.codec_of_questions(),
            quorum=self.quorum or enough(self.clients),
            deadline=float(self.edge_deadline_s),
        )  # fmt: skip
        super().respond(g, inner)
        # Back on the edge.
        super().heard(g, inner)
        combined = self.aggregated(g, inner, "edge_aggregator")
        asked.respond(g.bundle([*combined]), codec=self.codec_of_answers())

    def heard(self, g: Graph, asked: Request) -> None:
        """Tell the edges' selectors nothing of what edges answer."""

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        return {**super().bindings(), "edges": ConnectedView}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(edges=1, edge_quorum=0)
        most = f"an integer between 0 (the default) and edges={self.edges}"
        self.require("edge_quorum", self.edge_quorum <= self.edges, most)
        self.require_numbers("edge_deadline_s")
        sooner = f"below deadline_s={self.deadline_s:g}, in which the server hears of it"
        self.require("edge_deadline_s", self.edge_deadline_s < self.deadline_s, sooner)
        good = self.evaluate in ("server", "none")
        self.require("evaluate", good, '"server" or "none": the server does not know the clients')
        if isinstance(self, Scaffold):
            raise self.bad("control variates are of clients that the server asks; leave one out")
