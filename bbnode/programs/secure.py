"""Federated training in which the server sees the sum of the updates, and no client's update."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from bbnode.components import (
    DeploymentError,
    FedAvg,
    RoundPlan,
    SecAggClient,
    SecAggConfig,
    SecAggServer,
    concrete,
)
from bbnode.dsl import (
    CodecSlot,
    Fence,
    Function,
    Graph,
    Output,
    ProtocolSlot,
    Request,
    peer_lists,
)
from bbnode.programs.federated import FederatedTraining

_PROTOCOL = "secagg"
SERVER_SLOT, CLIENT_SLOT = "secagg", "masking"
MAX_SAMPLES = SecAggConfig().max_samples

# The protocol, all of which has to be in a program; updates leave by `Mask` alone.
_STEPS = (
    "Begin", "AdvertiseKeys", "CollectKeys", "ShareKeys", "CollectLetters", "Mail",
    "CollectVectors", "Confirm", "CollectSignatures", "Reveal", "Unmask",
)  # fmt: skip
_FENCE = Fence(
    gates=(f"{_PROTOCOL}.Mask",),
    steps=tuple(f"{_PROTOCOL}.{step}" for step in _STEPS),
)


@dataclass(kw_only=True, eq=False)
class SecureTraining(FederatedTraining):
    """FedAvg by secure aggregation (Bonawitz et al., 2017, doi:10.1145/3133956.3133982).

    A round is one of `FederatedTraining`, with its input and outputs; but clients answer what they
    moved the weights by, quantised and under masks that cancel in the sum. The server learns the
    sum of the updates of at least `threshold` clients, and of their numbers of examples.
    Clients may drop out at any time, as long as `threshold` stay; with fewer the round fails.

    It is a base for strategies too: `class Mine(SecureTraining, FedAdam)`, in any order. Masks are
    put on an answer last, after all that strategies make of it; a class by which an update would
    leave without them is refused.

    Nobody sees an update, so nobody can check one: a client that lies can move the mean by as much
    as all others together, and with `weighted` it can claim any number of examples. With `groups`
    it spoils the sum of its group alone, and the median of the groups' means is what counts.
    """

    deltas: bool = True
    weighted: bool = False  # a client weighs the examples that it claims; nobody can check them
    corrupt: float = 1 / 3  # part of the clients that may collude with the server
    threshold: int = 0  # clients that have to stay, of each group; 0: the fewest that are safe
    groups: int = 1  # with sums of their own, whose median counts; 1, or 3 and more
    neighbours: int = 0  # with which a client shares masks (SecAgg+), an even number; 0: all
    clip: float = 1.0  # the largest absolute value of a number of an update
    levels: int = 0  # steps from 0 to clip; 0: as many as words of 32 bits leave
    max_samples: int = MAX_SAMPLES  # with `weighted`: the largest weight of an honest client
    norm: float = 0.0  # the largest L2 norm of an update, which is scaled down to it; 0: any
    client_noise: float = 0.0  # of the sum, in units of norm, drawn by clients; 0: none

    def cohort(self, g: Graph, tick: Output) -> Output:
        """Choose clients, and have them exchange keys and shares; return those that did."""
        peers = super().cohort(g, tick)
        server, client = self._sides()
        asked = self._ask(g, "secagg_keys", peers, server.begin(g, peers))
        asked.respond(client.advertise_keys(g, asked.received))
        kept, listing = server.collect_keys(g, asked.responses)

        asked = self._ask(g, "secagg_shares", _of(g, asked, kept), listing)
        asked.respond(client.share_keys(g, asked.received))
        return _of(g, asked, server.collect_letters(g, asked.responses))

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Ask clients; answers of `threshold` of them are enough at the deadline."""
        return self._ask(g, name, peers, value, self.codec_of_questions())

    def protected(
        self, g: Graph, asked: Request, tensor: Output, told: Output
    ) -> tuple[Output, Output]:
        """Fetch the letters of other clients, and mask the answer."""
        server, client = self._sides()
        current = client.current_round(g, after=asked.received)
        mail = g.request("secagg_mail", asked.received.sender, current)
        mail.respond(server.mail(g, mail.received))
        letters = mail.responses.of(asked.received.sender)
        masked, nothing = client.mask(g, letters, tensor, told)
        return masked, nothing

    def gathered(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Have the survivors sign their list and reveal shares; return the mean."""
        server, client = self._sides()
        kept, listing = server.collect_vectors(g, asked.responses)

        asked = self._ask(g, "secagg_survivors", _of(g, asked, kept), listing)
        asked.respond(client.confirm(g, asked.received))
        kept, signatures = server.collect_signatures(g, asked.responses)

        asked = self._ask(g, "secagg_unmask", _of(g, asked, kept), signatures)
        asked.respond(client.reveal(g, asked.received))
        mean, stats = server.unmask(g, asked.responses)
        return mean, stats

    @property
    def answers_tell(self) -> bool:
        """Return False: answers are masked."""
        return False

    @property
    def settings(self) -> SecAggConfig:
        """The settings that both sides have."""
        return SecAggConfig(
            size=self.answer_size,
            clients=self.clients,
            corrupt=float(self.corrupt),
            threshold=self.threshold,
            groups=self.groups,
            neighbours=self.neighbours,
            clip=float(self.clip),
            levels=self.levels,
            max_samples=self.max_samples,
            equal_weights=not self.weighted,
            norm=float(self.norm),
            client_noise=float(self.client_noise),
        )

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self._keep_masks()
        self.refuse_extra_numbers("the clip of masked answers")
        self.require_counts(clients=2, threshold=0, groups=1, neighbours=0, levels=0, max_samples=1)
        self.require_numbers("clip")
        for name in ("norm", "client_noise"):
            self.require(name, _is_number(getattr(self, name)), "0 or a number above")
        self.require("corrupt", _is_part(self.corrupt), "a number from 0 to below 1")
        self.require("codec", self.codec is None, "left out: sums of codes say nothing")
        self.require("deltas", self.deltas, "true: weights are no small numbers, as updates are")
        self.require("quorum", not self.quorum, "0: `threshold` says how many have to stay")
        self.require("aggregator", self.aggregator is FedAvg, "left out: masked updates are summed")
        here = "'server' or 'none': what clients measure would be no secret"
        self.require("evaluate", self.evaluate in ("server", "none"), here)
        counted = self.weighted or self.max_samples == MAX_SAMPLES
        self.require(
            "max_samples", counted, "left out: without weighted=True nobody counts samples"
        )
        try:
            _ = RoundPlan.of(self.settings)
        except DeploymentError as error:
            raise self.bad(str(error)) from error

    def check_recorded(self, function: Function) -> None:
        """Check that updates leave their clients under masks alone. Raises BadArgument."""
        super().check_recorded(function)
        self._keep_masks()
        self.keep_fence(SecureTraining, _FENCE, function)

    def _keep_masks(self) -> None:
        self.keep_steps(SecureTraining, FederatedTraining, "body", "respond")
        self.keep_steps(SecureTraining, SecureTraining, "protected", "gathered")

    def _ask(
        self, g: Graph, name: str, peers: Output, value: Output, codec: CodecSlot | None = None
    ) -> Request:
        return g.request(
            name, peers, value, quorum=RoundPlan.of(self.settings).quorum,
            deadline=float(self.deadline_s), codec=codec,
        )  # fmt: skip

    def _sides(self) -> tuple[ProtocolSlot, ProtocolSlot]:
        agreed = asdict(self.settings)
        del agreed["members"], agreed["pardoned"]  # each node's own
        return (
            ProtocolSlot(SERVER_SLOT, _PROTOCOL, concrete=concrete(SecAggServer, **agreed)),
            ProtocolSlot(CLIENT_SLOT, _PROTOCOL, concrete=concrete(SecAggClient, **agreed)),
        )


def _of(g: Graph, asked: Request, kept: Output) -> Output:
    """Return the peers that answered and whose answers count."""
    return peer_lists.filter_list(g, asked.responses.peers, kept)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_part(value: object) -> bool:
    return _is_number(value) and value < 1  # type: ignore[operator]
