"""Peers agree on the mean of what each of them knows, without a server and without training."""

from __future__ import annotations

from bbnode.components import PairwiseMean, concrete
from bbnode.dsl import Graph, Output, ProtocolSlot, peer_lists, types
from bbnode.programs.gossip.peers import PeersProgram

EXCHANGES = ("pairwise", "push_pull")


class ExchangingProgram(PeersProgram):
    """Base of programs in which pairs of peers take the mean of what they hold."""

    deadline_s: float = 10.0  # that an exchange waits for its answer, seconds

    def mean_slot(self, size: int, *, overlapping: bool) -> ProtocolSlot:
        """Return the slot that holds a peer's vector, of `size` numbers."""
        settings = concrete(
            PairwiseMean, size=size, overlapping=overlapping, deadline_s=float(self.deadline_s)
        )
        return ProtocolSlot("mean", "pairwise", concrete=settings)

    def exchange(self, g: Graph, mean: ProtocolSlot, after: Output) -> tuple[Output, Output]:
        """Make one exchange with a peer that the cohort draws; return what is held, and stats.

        Nothing fails where the peer does not answer: the request goes to this peer too, who
        answers that there is nothing to do.
        """
        peer = self.cohort.sample(g, n=1, after=after)
        offer, head = mean.offer(g, peer)
        both = peer_lists.concat_lists(g, peer, self.own(g, head))
        asked = g.request(
            "exchange", both, g.bundle([offer, head]), quorum=1, deadline=float(self.deadline_s)
        )
        parts = g.unbundle(asked.received, [types.TENSOR_FLOAT, types.TENSOR_INT64])
        asked.respond(mean.answer(g, *parts))
        closing, held, stats = mean.settle(g, asked.responses)
        mean.close(g, g.net_out("close", peer, closing))
        return held, stats


class PairwiseAveraging(ExchangingProgram):
    """The mean of all peers' vectors, by exchanges of pairs.

    Input "value" (float32 [size]) is what this peer has to say now, and begins an exchange with one
    peer that the selector draws: both take the mean of what they hold. A value that changes later
    moves the mean by its change. The sum of what peers hold is the sum of their values, but for
    what crashed peers take along; `bbnode.components.PairwiseMean` says how.

    `mix`: "pairwise" (Boyd et al., 2006, doi:10.1109/TIT.2006.874516), or "push_pull" (Jelasity,
    Montresor and Babaoglu, 2005, doi:10.1145/1082469.1082470), where a peer that waits for its
    answer answers one other peer meanwhile: more exchanges where all peers tick at once.

    Outputs: "mean" (float32 [size]): what this peer holds after the exchange; "stats" (Metadata:
    `exchanged`, `why`, `answered`, `busy`, `taken_back`, `presumed`).
    """

    size: int = 1  # numbers of the vector
    mix: str = "pairwise"

    def body(self, g: Graph) -> None:
        """Record an exchange."""
        self.check_selector()
        self.require_one_of("mix", EXCHANGES)
        self.require_counts(size=1)
        self.require_numbers("deadline_s")
        mean = self.mean_slot(self.size, overlapping=self.mix == "push_pull")
        value = g.input("value", types.TENSOR_FLOAT, shape=[self.size])
        held, stats = self.exchange(g, mean, mean.contribute(g, value))
        g.output("mean", held)
        g.output("stats", stats)
