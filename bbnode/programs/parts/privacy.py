"""Differential privacy, of clients and of examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import PrivateModel, PrivateModelConfig, PrivateSum, concrete
from bbnode.dsl import (
    BackendSlot,
    Fence,
    Function,
    Graph,
    ModelSlot,
    Output,
    PeerSelectorSlot,
    ProtocolSlot,
    Request,
    peer_lists,
)
from bbnode.ir.errors import BbnodeError
from bbnode.programs.arguments import enough
from bbnode.programs.composing import ArgumentChecks, Inner, RoundPart

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining

PRIVACY_SLOT = "privacy"
ACCOUNTANTS = ("rdp", "pld")
LEAST_NOISE = 1e-6  # of `PrivateSum`

# Steps of a round that the guarantee is about, so that nobody else may have its own.
_OWN_STEPS = (
    "body", "cohort", "sent", "outgoing", "respond", "client_update", "client_loads", "answer",
    "protected", "combined", "gathered", "results", "answer_size",
)  # fmt: skip
_RELEASED = Fence(gates=("privacy.Release",), answers=True)
_TRAINED_PRIVATELY = Fence(trains=PrivateModel.TYPE_NAME)


@dataclass(frozen=True)
class PrivatePart(RoundPart):
    """Base of what keeps clients' examples private."""

    slot: ClassVar[str] = "privacy"
    several: ClassVar[bool] = True


@dataclass(frozen=True)
class ClientPrivacy(PrivatePart):
    """DPFedAvg: differential privacy of clients (McMahan et al., 2018, arXiv:1710.06963).

    Each client's move of the weights is clipped to the L2 norm `clip`, by itself and by the server
    again, and the server adds Gaussian noise of deviation `noise` * `clip` to the sum, which it
    divides by `clients`, whoever answers. The models of all rounds together are (`epsilon`,
    `delta`)-private for one client, with all its examples. A round that would spend more fails as
    BudgetSpent before anybody is asked.
    "stats" has `epsilon`, spent so far.

    With `population`, each of so many clients is asked with the chance clients / population, by
    random bytes of the server that nobody else sees, and `clients` is how many are expected
    (Poisson sampling); this is what makes many rounds cheap. Without, a cohort is chosen as
    elsewhere, and each round is charged in full.

    With `quantile` the norm follows that quantile of the updates' norms (Andrew et al., 2021,
    arXiv:1905.03871), and begins with `clip`.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "extra": "the clip would bend the numbers that an answer has behind the move",
        "codes": "a code may make a move longer than the clip",
        "rule": "moves are summed",
    }
    claims: ClassVar[tuple[str, ...]] = (*_OWN_STEPS, "ask")
    guards: ClassVar[tuple[str, ...]] = _OWN_STEPS
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True, "weighted": False}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "deltas": (True, "what is clipped is the move of the weights"),
        "weighted": (False, "a weight would tell, and be no bound"),
    }

    noise: float = 1.0  # deviation of the sum's noise over the clip
    clip: float = 1.0  # the largest L2 norm of a client's move
    epsilon: float = 8.0  # the budget
    delta: float = 1e-5
    population: int = 0  # clients that there are, for Poisson sampling; 0: no sampling is claimed
    accountant: str = "rdp"  # or "pld", closer and slower
    quantile: float = 0.0  # the part of updates that the norm shall leave as they are; 0: it stays
    clip_rate: float = 0.2  # how far the norm goes in a round, with `quantile`
    count_noise: float = 0.0  # deviation of the number of unclipped updates; 0: clients / 20

    def cohort(self, p: FederatedTraining, inner: Inner, g: Graph, tick: Output) -> Output:
        """Choose the clients of a round, once it is charged."""
        if self.population:
            peers = PeerSelectorSlot("cohort", peer_class="client").current_view(g, after=tick)
        else:
            peers = inner(g, tick)
        return peer_lists.filter_list(g, peers, self._slot(p).begin(g, peers))

    def ask(
        self, p: FederatedTraining, _: Inner, g: Graph, name: str, peers: Output, value: Output
    ) -> Request:
        """Ask clients; with `population`, whose cohorts differ in size, one answer is enough."""
        quorum = p.quorum or (1 if self.population else enough(p.clients))
        return p.requested(g, name, peers, value, quorum)

    def sent(self, p: FederatedTraining, inner: Inner, g: Graph, peers: Output) -> Output:
        """Return the server's weights [P], and with `quantile` the norm behind them."""
        weights: Output = inner(g, peers)
        if not self.quantile:
            return weights
        norm = self._slot(p).norm(g, after=peers)
        return BackendSlot("compute").concat(g, weights, norm, axis=0)

    def client_update(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Train from the weights that were received, without the norm behind them."""
        weights = asked.received
        if self.quantile:
            ends = g.constant([0]), g.constant([p.size])
            weights = BackendSlot("compute").slice(g, asked.received, *ends)
        p.client_loads(g, weights)
        return p.local_training(g, weights)

    def protected(
        self,
        p: FederatedTraining,
        _: Inner,
        g: Graph,
        asked: Request,
        tensor: Output,
        told: Output,
    ) -> tuple[Output, Output]:
        """Clip the move; with `quantile` 1 or 0 follows: 1 where it was not clipped."""
        compute, one = BackendSlot("compute"), g.constant([1])
        norm = g.constant([float(self.clip)])
        if self.quantile:
            ends = g.constant([p.size]), g.constant([p.size + 1])
            norm = compute.slice(g, asked.received, *ends)
        squares = compute.reduce_sum(g, compute.mul(g, tensor, tensor), keepdims=False)
        length = compute.reshape(g, compute.sqrt(g, squares), one)
        # length >= norm in the divisor, so that nothing is divided by 0, and nothing grows.
        factor = compute.div(g, norm, compute.max(g, length, norm))
        clipped = compute.mul(g, tensor, factor)
        if not self.quantile:
            return clipped, told
        inside = compute.cast(g, compute.less_or_equal(g, length, norm), to=1)
        return compute.concat(g, clipped, inside, axis=0), told

    def gathered(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Return the noisy mean of the clipped moves, and what is told of it."""
        mean, stats = self._slot(p).release(g, asked.responses)
        return mean, stats

    def answer_size(self, p: FederatedTraining, _: Inner) -> int:
        """Return the length of the tensor that a client answers."""
        return p.size + bool(self.quantile)

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        here = "'server' or 'none': what clients measure has no noise"
        program.require("evaluate", program.evaluate in ("server", "none"), here)
        own.require_numbers("noise", "clip", "epsilon", "delta", "clip_rate")
        own.require("noise", self.noise >= LEAST_NOISE, f"at least {LEAST_NOISE:g}")
        own.require_counts(population=0)
        own.require_one_of("accountant", ACCOUNTANTS)
        own.require_shares("delta", "quantile")
        own.require_not_negative("count_noise")
        most = f"0, or at least clients={program.clients}"
        own.require("population", not 0 < self.population < program.clients, most)
        if self.quantile:
            above = f"0 (clients / 20) or a number, and above noise / 2 = {self.noise / 2:g}"
            count = self.count_noise or program.clients / 20
            own.require("count_noise", 2 * count > self.noise, above)
            whole = "left out with quantile: a code would change the norm that is sent"
            program.require("codec_down", program.codec_down is None, whole)

    def check_recorded(self, p: FederatedTraining, inner: Inner, function: Function) -> None:
        """Check that the server makes nothing of answers but their noisy mean. BadArgument."""
        inner(function)
        p.keep_fence(self, _RELEASED, function)

    def _slot(self, p: FederatedTraining) -> ProtocolSlot:
        settings = {
            "size": p.size, "clients": p.clients, "noise": float(self.noise),
            "epsilon": float(self.epsilon), "delta": float(self.delta), "clip": float(self.clip),
            "population": self.population, "accountant": self.accountant,
            "quantile": float(self.quantile), "clip_rate": float(self.clip_rate),
            "count_noise": float(self.count_noise),
        }  # fmt: skip
        return ProtocolSlot(PRIVACY_SLOT, "privacy", concrete=concrete(PrivateSum, **settings))


@dataclass(frozen=True)
class ExamplePrivacy(PrivatePart):
    """DP-SGD: differential privacy of examples (Abadi et al., 2016, arXiv:1607.00133).

    A client draws each of its examples into a batch with the chance `batch` / its number of
    examples, clips the gradient of each to the L2 norm `example_clip`, adds Gaussian noise of
    deviation `example_noise` * `example_clip` to their sum, and divides by the expected size of a
    batch. All that a client sends in all rounds together is (`example_epsilon`,
    `example_delta`)-private for each of its examples, against the server too. A client whose
    training would spend more fails with BudgetSpent, and is missing from then on. "stats" has
    `epsilon`, the most that a client of the round has spent so far, and `delta`; beside Masks and
    ClientPrivacy clients tell no `epsilon`.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "loss": "it answers more than what was trained privately, and that has no noise"
    }
    claims: ClassVar[tuple[str, ...]] = ("trained_model",)
    guards: ClassVar[tuple[str, ...]] = ("trained_model", "client_update", "respond")

    example_clip: float = 1.0  # the largest L2 norm of an example's gradient
    example_noise: float = 1.0  # deviation of a sum's noise over the clip
    example_epsilon: float = 8.0  # the budget of each client, unless its node sets its own
    example_delta: float = 1e-5
    accountant: str = "rdp"  # or "pld", closer and slower

    def trained_model(self, p: FederatedTraining, _: Inner, slot: str, **other: Any) -> ModelSlot:
        """Return a slot for the model where it is trained, privately."""
        return ModelSlot(slot, concrete=concrete(PrivateModel, self._private(p, **other)))

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        here = "'server' or 'none': what clients measure has no noise"
        program.require("evaluate", program.evaluate in ("server", "none"), here)
        own.require_numbers("example_clip", "example_noise", "example_epsilon", "example_delta")
        own.require_one_of("accountant", ACCOUNTANTS)
        try:
            PrivateModel(self._private(program))
        except BbnodeError as error:
            raise own.bad(f"model can't be trained privately: {error}") from error

    def check_recorded(self, p: FederatedTraining, inner: Inner, function: Function) -> None:
        """Check that clients send nothing but what was trained privately. Raises BadArgument."""
        inner(function)
        p.keep_fence(self, _TRAINED_PRIVATELY, function)

    def _private(self, p: FederatedTraining, **other: Any) -> PrivateModelConfig:
        given = {each.name: getattr(p._config, each.name) for each in fields(p._config)}
        return PrivateModelConfig(
            **{**given, **other},
            clip=float(self.example_clip),
            noise=float(self.example_noise),
            epsilon=float(self.example_epsilon),
            delta=float(self.example_delta),
            accountant=self.accountant,
        )
