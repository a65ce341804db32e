"""The course of a round: a star, from client to client, or in two levels.

Rule: who asks whom is all that differs; what clients train and what servers make of it are the
steps of `FederatedTraining`, so that other parts go with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import ConnectedView
from bbnode.dsl import Graph, Output, PeerSelectorSlot, Request, peer_lists, types
from bbnode.programs.arguments import enough
from bbnode.programs.composing import ArgumentChecks, Inner
from bbnode.programs.parts.plain import AllAtOnce, Asking

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining


@dataclass(frozen=True)
class InTurn(Asking):
    """Weights that go from client to client, each of which trains them further (Chang et al., 2018,
    doi:10.1093/jamia/ocy017, cyclical weight transfer).

    A round is one turn of each of `clients`, in PeerId order, by way of the server, which checks
    and loads what each answers before the next one gets it. Where a client does not answer in
    `deadline_s`, or its answer is refused, the round fails by its name, and the server has the
    weights of the one before. "stats" is of the last turn.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "variates": "control variates are of clients that train at once",
        "compared": "it compares answers with each other, and in turn each is alone",
    }
    claims: ClassVar[tuple[str, ...]] = ("body", "ask")
    lacks: ClassVar[Mapping[str, str]] = {"quorum": "each client is waited for by itself"}

    def body(self, p: FederatedTraining, _: Inner, g: Graph) -> None:
        """Record a round."""
        p.check()
        peers = p.cohort(g, g.input("tick", types.TRIGGER))
        loaded, weights, stats = peers, peers, peers
        for turn in range(self.clients):
            # Nobody where there are fewer: the turn fails by its name, as one without an answer.
            one = peer_lists.slice_list(g, peers, turn, turn + 1)
            asked = p.ask(g, f"turn{turn}", one, p.sent(g, loaded))
            p.respond(g, asked)
            # Back on the server.
            p.heard(g, asked)
            answer, stats = p.combined(g, asked)
            weights = p.server_update(g, answer, stats)
            loaded = p.server_model.load_parameters(g, weights)
        p.results(g, peers, weights, stats, loaded)

    def ask(
        self, p: FederatedTraining, _: Inner, g: Graph, name: str, peers: Output, value: Output
    ) -> Request:
        """Send a value to a client and wait for its answer."""
        return p.requested(g, name, peers, value, 1)


@dataclass(frozen=True)
class TwoLevels(AllAtOnce):
    """Training in two levels: clients, edges that combine these, and a server that combines edges
    (Liu et al., 2020, arXiv:1905.06641, with one combination at an edge per round).

    The server asks `edges` peers of the class "edge"; each asks `clients` of those that its slot
    "cohort" has, waits `edge_deadline_s` for `quorum` of them, and answers what it has combined,
    with the sum of their examples as its weight. So the result is the mean of all clients. On an
    edge `selector` chooses: by default among the peers that it is connected to; with
    "bbnode.ConstantView" among those that its node lists.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "variates": "control variates are of clients that the server asks",
        "root": "edges train nothing of their own to trust others by",
    }
    claims: ClassVar[tuple[str, ...]] = ("cohort", "ask", "heard", "respond")

    edges: int = 2  # peers of the class "edge" that a round asks
    edge_quorum: int = 0  # edges that are enough at the deadline; 0: as `enough` says
    edge_deadline_s: float = 30.0  # that an edge waits for its clients; below `deadline_s`

    def cohort(self, _p: FederatedTraining, _: Inner, g: Graph, tick: Output) -> Output:
        """Choose the edges of a round."""
        return PeerSelectorSlot("edges", peer_class="edge").sample(g, n=self.edges, after=tick)

    def ask(
        self, p: FederatedTraining, _: Inner, g: Graph, name: str, peers: Output, value: Output
    ) -> Request:
        """Send a value to edges and wait for their answers."""
        return p.requested(g, name, peers, value, self.edge_quorum or enough(self.edges))

    def respond(self, p: FederatedTraining, inner: Inner, g: Graph, asked: Request) -> None:
        """Answer the server, on an edge, with what its clients answered."""
        members = p.cohort_slot.sample(g, n=self.clients, after=asked.received)
        below = g.request(
            "members", members, asked.received, codec=p.codec_of_questions(),
            quorum=self.quorum or enough(self.clients),
            deadline=float(self.edge_deadline_s),
        )  # fmt: skip
        inner(g, below)
        # Back on the edge.
        if p.selector_class.observes:
            p.cohort_slot.observed(g, below.responses)
        combined = p.aggregated(g, below, "edge_aggregator")
        asked.respond(g.bundle([*combined]), codec=p.codec_of_answers())

    def heard(self, _p: FederatedTraining, _: Inner, _g: Graph, _asked: Request) -> None:
        """Tell the edges' selectors nothing of what edges answer."""

    def bindings(self, _p: FederatedTraining, inner: Inner) -> Mapping[str, Any]:
        """Return the classes of the slots, with that of the edges."""
        return {**inner(), "edges": ConnectedView}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_counts(edges=1, edge_quorum=0)
        most = f"an integer between 0 (the default) and edges={self.edges}"
        own.require("edge_quorum", self.edge_quorum <= self.edges, most)
        own.require_numbers("edge_deadline_s")
        sooner = f"below deadline_s={self.deadline_s:g}, in which the server hears of it"
        own.require("edge_deadline_s", self.edge_deadline_s < self.deadline_s, sooner)
        good = program.evaluate in ("server", "none")
        program.require(
            "evaluate", good, '"server" or "none": the server does not know the clients'
        )
