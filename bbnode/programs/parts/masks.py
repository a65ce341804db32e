"""Masks by which the server sees the sum of the updates, and no client's update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import (
    DeploymentError,
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
from bbnode.programs.composing import ArgumentChecks, Inner
from bbnode.programs.parts.privacy import PrivatePart

if TYPE_CHECKING:
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


@dataclass(frozen=True)
class Masks(PrivatePart):
    """Secure aggregation (Bonawitz et al., 2017, doi:10.1145/3133956.3133982).

    Clients answer what they moved the weights by, quantised and under masks that cancel in the sum.
    The server learns the sum of the updates of at least `threshold` clients, and of their numbers
    of examples. Clients may drop out at any time, as long as `threshold` stay; with fewer the round
    fails. Masks are put on an answer last, after all that other parts make of it; a program by
    which an update would leave without them is refused.

    Nobody sees an update, so nobody can check one: a client that lies can move the mean by as much
    as all others together, and with `weighted` it can claim any number of examples. With `groups`
    it spoils the sum of its group alone, and the median of the groups' means is what counts.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "extra": "the clip of masked answers would bend the numbers behind the move of weights",
        "codes": "sums of codes say nothing",
        "rule": "masked updates are summed",
    }
    claims: ClassVar[tuple[str, ...]] = (
        "body", "ask", "respond", "protected", "gathered", "answers_tell",
    )  # fmt: skip
    guards: ClassVar[tuple[str, ...]] = ("protected", "gathered")
    # With `weighted` a client weighs the examples that it claims; nobody can check them.
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True, "weighted": False}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "deltas": (True, "weights are no small numbers, as updates are")
    }

    corrupt: float = 1 / 3  # part of the clients that may collude with the server
    threshold: int = 0  # clients that have to stay, of each group; 0: the fewest that are safe
    groups: int = 1  # with sums of their own, whose median counts; 1, or 3 and more
    neighbours: int = 0  # with which a client shares masks (SecAgg+), an even number; 0: all
    clip: float = 1.0  # the largest absolute value of a number of an update
    levels: int = 0  # steps from 0 to clip; 0: as many as words of 32 bits leave
    max_samples: int = MAX_SAMPLES  # with `weighted`: the largest weight of an honest client
    norm: float = 0.0  # the largest L2 norm of an update, which is scaled down to it; 0: any
    client_noise: float = 0.0  # of the sum, in units of norm, drawn by clients; 0: none

    def cohort(self, p: FederatedTraining, inner: Inner, g: Graph, tick: Output) -> Output:
        """Choose clients, and have them exchange keys and shares; return those that did."""
        peers = inner(g, tick)
        server, client = self._sides(p)
        asked = self._ask(p, g, "secagg_keys", peers, server.begin(g, peers))
        asked.respond(client.advertise_keys(g, asked.received))
        kept, listing = server.collect_keys(g, asked.responses)

        asked = self._ask(p, g, "secagg_shares", _of(g, asked, kept), listing)
        asked.respond(client.share_keys(g, asked.received))
        return _of(g, asked, server.collect_letters(g, asked.responses))

    def ask(
        self, p: FederatedTraining, _: Inner, g: Graph, name: str, peers: Output, value: Output
    ) -> Request:
        """Ask clients; answers of `threshold` of them are enough at the deadline."""
        return self._ask(p, g, name, peers, value, p.codec_of_questions())

    def protected(
        self,
        p: FederatedTraining,
        _: Inner,
        g: Graph,
        asked: Request,
        tensor: Output,
        told: Output,
    ) -> tuple[Output, Output]:
        """Fetch the letters of other clients, and mask the answer."""
        server, client = self._sides(p)
        current = client.current_round(g, after=asked.received)
        mail = g.request("secagg_mail", asked.received.sender, current)
        mail.respond(server.mail(g, mail.received))
        letters = mail.responses.of(asked.received.sender)
        masked, nothing = client.mask(g, letters, tensor, told)
        return masked, nothing

    def gathered(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Have the survivors sign their list and reveal shares; return the mean."""
        server, client = self._sides(p)
        kept, listing = server.collect_vectors(g, asked.responses)

        asked = self._ask(p, g, "secagg_survivors", _of(g, asked, kept), listing)
        asked.respond(client.confirm(g, asked.received))
        kept, signatures = server.collect_signatures(g, asked.responses)

        asked = self._ask(p, g, "secagg_unmask", _of(g, asked, kept), signatures)
        asked.respond(client.reveal(g, asked.received))
        mean, stats = server.unmask(g, asked.responses)
        return mean, stats

    def answers_tell(self, _p: FederatedTraining, _: Inner) -> bool:
        """Return False: answers are masked."""
        return False

    def agreed(self, p: FederatedTraining) -> SecAggConfig:
        """Return the settings that both sides have."""
        return SecAggConfig(
            size=p.answer_size,
            clients=p.clients,
            corrupt=float(self.corrupt),
            threshold=self.threshold,
            groups=self.groups,
            neighbours=self.neighbours,
            clip=float(self.clip),
            levels=self.levels,
            max_samples=self.max_samples,
            equal_weights=not p.weighted,
            norm=float(self.norm),
            client_noise=float(self.client_noise),
        )

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        program.require_counts(clients=2)
        own.require_counts(threshold=0, groups=1, neighbours=0, levels=0, max_samples=1)
        own.require_numbers("clip")
        for name in ("norm", "client_noise"):
            own.require(name, _is_number(getattr(self, name)), "0 or a number above")
        own.require("corrupt", _is_part(self.corrupt), "a number from 0 to below 1")
        stay = "0: `threshold` says how many have to stay"
        program.require("quorum", not program.quorum, stay)
        here = "'server' or 'none': what clients measure would be no secret"
        program.require("evaluate", program.evaluate in ("server", "none"), here)
        counted = program.weighted or self.max_samples == MAX_SAMPLES
        own.require("max_samples", counted, "left out: without weighted=True nobody counts samples")
        try:
            _ = RoundPlan.of(self.agreed(program))
        except DeploymentError as error:
            raise own.bad(str(error)) from error

    def check_recorded(self, p: FederatedTraining, inner: Inner, function: Function) -> None:
        """Check that updates leave their clients under masks alone. Raises BadArgument."""
        inner(function)
        p.keep_fence(self, _FENCE, function)

    def _ask(
        self,
        p: FederatedTraining,
        g: Graph,
        name: str,
        peers: Output,
        value: Output,
        codec: CodecSlot | None = None,
    ) -> Request:
        return g.request(
            name, peers, value, quorum=RoundPlan.of(self.agreed(p)).quorum,
            deadline=float(p.deadline_s), codec=codec,
        )  # fmt: skip

    def _sides(self, p: FederatedTraining) -> tuple[ProtocolSlot, ProtocolSlot]:
        agreed = asdict(self.agreed(p))
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
