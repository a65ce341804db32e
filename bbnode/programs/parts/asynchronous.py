"""Federated training without rounds: clients work when they like, and nobody waits for anybody.

Rule: a client asks the server for weights, trains, and sends what it has; the server counts by its
own versions how stale that is. What clients train, and what the server steps with, are the steps of
`FederatedTraining`, so that other parts go with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import UpdateBuffer, concrete
from bbnode.dsl import BackendSlot, Graph, Output, PeerSelectorSlot, ProtocolSlot, Request, types
from bbnode.programs.composing import ArgumentChecks, Inner
from bbnode.programs.parts.plain import Course

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining

STALENESS = ("constant", "hinge", "polynomial")
# Steps of a round that have no place here. One that never came to be used might be what keeps
# clients' updates secret.
_OF_ROUNDS = ("cohort", "heard", "respond", "protected", "combined", "gathered")


@dataclass(frozen=True)
class _Work:
    """The place of a request of a round: what a client was given."""

    received: Output


@dataclass(frozen=True)
class Asynchronous(Course):
    """Base of courses without rounds.

    Input "tick" (Trigger) is a client's own: it asks the server for weights, trains them on its
    examples and sends the result, with the version that it began at. The server adds it to a
    buffer, and steps whenever that is full. A client that has answered the server's weights has
    nothing to do until these are new; its tick ends without training.

    Outputs on a client: "trained" (Metadata of its training, none where it had nothing to do).
    Outputs on the server, after each step: those of `FederatedTraining`, of `evaluate` "server" or
    "none"; "version" (int64 []). "stats" has `updates`, `contributors`, `staleness` (the mean),
    `max_staleness` and `version` (before the step).
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "rule": "updates are added up as they come",
        "extra": "a staleness would bend the numbers that an answer has behind the move",
        "variates": "what its clients send belongs to a round",
    }
    home: ClassVar[str] = "client"
    claims: ClassVar[tuple[str, ...]] = ("body", "ask", "ready", *_OF_ROUNDS)
    guards: ClassVar[tuple[str, ...]] = ("aggregated", "aggregator_slot")

    lacks: ClassVar[Mapping[str, str]] = {
        "clients": "clients ask by themselves, however many there are",
        "selector": "clients ask by themselves",
        "quorum": "nobody is waited for",
    }

    staleness: str = "polynomial"  # how an update counts less: or "constant", "hinge"
    exponent: float = 0.5  # a of the polynomial (1 + d)^-a
    hinge_slope: float = 10.0  # a and b of the hinge: 1 up to d = b, then 1 / (a (d - b) + 1)
    hinge_at: int = 4
    max_staleness: int = 20  # versions; an update that is older is refused
    deadline_s: float = 60.0  # that a client waits for weights, and the server for its step

    def body(self, p: FederatedTraining, _: Inner, g: Graph) -> None:
        """Record a client's turn, and what the server makes of its update."""
        p.check()
        compute, updates = BackendSlot("compute"), self._updates(p)
        tick = g.input("tick", types.TRIGGER)
        server = PeerSelectorSlot("cohort", peer_class="server").sample(g, n=1, after=tick)
        asked = g.request("work", server, tick, quorum=1, deadline=float(self.deadline_s))

        # On the server.
        weights, version = updates.give(g, p.server_model.params(g, after=asked.received))
        asked.respond(g.bundle([weights, version]), codec=p.codec_of_questions())

        # On the client, if there is something to do.
        there, given, began = updates.begin(g, asked.responses)
        work: Any = _Work(compute.identity(g, given, after=g.when(there)))
        tensor, told = p.client_update(g, work)
        g.output("trained", told)
        update = g.net_out(
            "update", asked.responses.peers, g.bundle([tensor, told, began]),
            codec=p.codec_of_answers(),
        )  # fmt: skip

        # On the server.
        parts = g.unbundle(update, [types.TENSOR_FLOAT, types.METADATA, types.TENSOR_INT64])
        full = updates.take(g, *parts)
        summed, kept, stats = updates.collect(g, after=g.when(full))
        new = self.stepped(p, g, summed, kept, stats)
        loaded = p.server_model.load_parameters(g, new)
        g.output("version", updates.publish(g, new, after=loaded))
        p.results(g, update.sender, new, stats, loaded)

    def _updates(self, p: FederatedTraining) -> ProtocolSlot:
        """Return the slot of the server's versions and buffer."""
        settings = concrete(UpdateBuffer, size=p.size, **self.buffering())
        return ProtocolSlot("updates", "updates", concrete=settings)

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer."""
        return {
            "staleness": self.staleness, "exponent": float(self.exponent),
            "hinge_slope": float(self.hinge_slope), "hinge_at": self.hinge_at,
            "max_staleness": self.max_staleness, "step_deadline_s": float(self.deadline_s),
        }  # fmt: skip

    def stepped(
        self, p: FederatedTraining, g: Graph, summed: Output, _kept: Output, stats: Output
    ) -> Output:
        """Return the server's new weights [P]."""
        return p.server_update(g, summed, stats)

    def ready(self, _p: FederatedTraining, _: Inner, _g: Graph, after: Output) -> Output:
        """Train where there is something to do only: what was received is what begins it."""
        return after

    def ask(
        self, p: FederatedTraining, _: Inner, _g: Graph, name: str, _peers: Output, _value: Output
    ) -> Request:
        """Refuse: clients ask."""
        raise p.bad(f"the server asks for nothing here, and so not for {name!r}")

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        own.require_one_of("staleness", STALENESS)
        own.require_counts(hinge_at=0, max_staleness=0)
        own.require_numbers("exponent", "hinge_slope", "deadline_s")
        here = '"server" or "none": there is no cohort to ask'
        program.require("evaluate", program.evaluate in ("server", "none"), here)
        by_age = "left out: an update counts by its staleness, not by numbers of examples"
        program.require("weighted", program.combine.weighted is None, by_age)


@dataclass(frozen=True)
class Mixed(Asynchronous):
    """FedAsync: each update is mixed in (Xie, Koyejo and Gupta, 2019, arXiv:1903.03934).

    w <- (1 - a) w + a x, with x, a client's weights, and a = `mixing` s(d), where d is how many
    versions ago it began, and s is as `staleness` says.
    """

    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "deltas": (False, "weights are mixed into weights")
    }

    mixing: float = 0.6  # alpha, above 0 and up to 1

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """Return what is of rounds, and steps of the server."""
        no_step = "mixing is no step of an optimizer; take FedBuff with buffer=1 instead"
        return {**super().refuses, "step": no_step}

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer: an update is a step."""
        return {**super().buffering(), "mixing": float(self.mixing)}

    def stepped(
        self, p: FederatedTraining, g: Graph, summed: Output, kept: Output, _stats: Output
    ) -> Output:
        """Mix the update into the server's weights."""
        compute = BackendSlot("compute")
        old = p.server_model.params(g, after=summed)
        return compute.add(g, compute.mul(g, old, kept), summed)

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_numbers("mixing")
        own.require("mixing", self.mixing <= 1, "a number above 0 and up to 1")


@dataclass(frozen=True)
class Buffered(Asynchronous):
    """FedBuff: a buffer of updates makes a step (Nguyen et al., 2022, arXiv:2106.06639).

    w <- w + `server_learning_rate` D, where D is the mean of s(d) times each of `buffer` moves; s
    is 1 / sqrt(1 + d) by default. With a server's optimizer D is its gradient.
    """

    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "deltas": (True, "moves of the weights are added up")
    }

    buffer: int = 10  # K: updates that make a step, at most one of a client for each version

    def buffering(self) -> dict[str, Any]:
        """Return settings of the buffer."""
        return {**super().buffering(), "buffer": self.buffer}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_counts(buffer=1)
