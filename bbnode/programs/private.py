"""Federated training whose model tells little of any one client, or of any one example."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bbnode.components import FedAvg, PrivateModel, PrivateModelConfig, PrivateSum, concrete
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
from bbnode.programs.federated import AskingProgram, FederatedTraining
from bbnode.programs.secure import SecureTraining
from bbnode.programs.strategies.drift import Scaffold
from bbnode.programs.strategies.topologies import HierarchicalTraining

PRIVACY_SLOT = "privacy"
ACCOUNTANTS = ("rdp", "pld")
LEAST_NOISE = 1e-6  # of `PrivateSum`

# Steps of a round that the guarantee is about, so that no other base may have its own.
_OWN_STEPS = (
    "body", "cohort", "sent", "outgoing", "respond", "client_update", "client_loads", "answer",
    "protected", "combined", "gathered", "results", "answer_size",
)  # fmt: skip
_RELEASED = Fence(gates=("privacy.Release",), answers=True)
_TRAINED_PRIVATELY = Fence(trains=PrivateModel.TYPE_NAME)


@dataclass(kw_only=True, eq=False)
class DPFedAvg(FederatedTraining):
    """FedAvg with differential privacy of clients (McMahan et al., 2018, arXiv:1710.06963).

    A round is one of `FederatedTraining`, with its input and outputs; but each client's move of the
    weights is clipped to the L2 norm `clip`, by itself and by the server again, and the server adds
    Gaussian noise of deviation `noise` * `clip` to the sum, which it divides by `clients`, whoever
    answers. The models of all rounds together are (`epsilon`, `delta`)-private for one client, with
    all its examples. A round that would spend more fails as BudgetSpent before anybody is asked.
    "stats" has `epsilon`, spent so far.

    With `population`, each of so many clients is asked with the chance clients / population, by
    random bytes of the server that nobody else sees, and `clients` is how many are expected
    (Poisson sampling); this is what makes many rounds cheap. Without, a cohort is chosen as
    elsewhere, and each round is charged in full.

    With `quantile` the norm follows that quantile of the updates' norms (Andrew et al., 2021,
    arXiv:1905.03871), and begins with `clip`.

    It is a base for strategies of the server too: `class Mine(DPFedAvg, FedAdam)`.
    """

    deltas: bool = True
    weighted: bool = False
    noise: float = 1.0  # deviation of the sum's noise over the clip
    clip: float = 1.0  # the largest L2 norm of a client's move
    epsilon: float = 8.0  # the budget
    delta: float = 1e-5
    population: int = 0  # clients that there are, for Poisson sampling; 0: no sampling is claimed
    accountant: str = "rdp"  # or "pld", closer and slower
    quantile: float = 0.0  # the part of updates that the norm shall leave as they are; 0: it stays
    clip_rate: float = 0.2  # how far the norm goes in a round, with `quantile`
    count_noise: float = 0.0  # deviation of the number of unclipped updates; 0: clients / 20

    def cohort(self, g: Graph, tick: Output) -> Output:
        """Choose the clients of a round, once it is charged."""
        if self.population:
            peers = PeerSelectorSlot("cohort", peer_class="client").current_view(g, after=tick)
        else:
            peers = super().cohort(g, tick)
        return peer_lists.filter_list(g, peers, self._slot.begin(g, peers))

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Ask clients; with `population`, whose cohorts differ in size, one answer is enough."""
        quorum = self.quorum or (1 if self.population else enough(self.clients))
        return g.request(
            name, peers, value, quorum=quorum, deadline=float(self.deadline_s),
            codec=self.codec_of_questions(),
        )  # fmt: skip

    def sent(self, g: Graph, peers: Output) -> Output:
        """Return the server's weights [P], and with `quantile` the norm behind them."""
        weights = super().sent(g, peers)
        if not self.quantile:
            return weights
        norm = self._slot.norm(g, after=peers)
        return BackendSlot("compute").concat(g, weights, norm, axis=0)

    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Train from the weights that were received, without the norm behind them."""
        weights = asked.received
        if self.quantile:
            ends = g.constant([0]), g.constant([self.size])
            weights = BackendSlot("compute").slice(g, asked.received, *ends)
        self.client_loads(g, weights)
        return self.local_training(g, weights)

    def protected(
        self, g: Graph, asked: Request, tensor: Output, told: Output
    ) -> tuple[Output, Output]:
        """Clip the move; with `quantile` 1 or 0 follows: 1 where it was not clipped."""
        compute, one = BackendSlot("compute"), g.constant([1])
        norm = g.constant([float(self.clip)])
        if self.quantile:
            ends = g.constant([self.size]), g.constant([self.size + 1])
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

    def gathered(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Return the noisy mean of the clipped moves, and what is told of it."""
        mean, stats = self._slot.release(g, asked.responses)
        return mean, stats

    @property
    def answer_size(self) -> int:
        """The length of the tensor that a client answers."""
        return self.size + bool(self.quantile)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.refuse_extra_numbers("the clip")
        self._keep_released()
        self.require("deltas", self.deltas, "true: what is clipped is the move of the weights")
        self.require("weighted", not self.weighted, "false: a weight would tell, and be no bound")
        self.require("aggregator", self.aggregator is FedAvg, "left out: moves are summed")
        self.require("codec", self.codec is None, "left out: a code may make a move longer")
        here = "'server' or 'none': what clients measure has no noise"
        self.require("evaluate", self.evaluate in ("server", "none"), here)
        self.require_numbers("noise", "clip", "epsilon", "delta", "clip_rate")
        self.require("noise", self.noise >= LEAST_NOISE, f"at least {LEAST_NOISE:g}")
        self.require_counts(population=0)
        self.require_one_of("accountant", ACCOUNTANTS)
        self.require_shares("delta", "quantile")
        self.require_not_negative("count_noise")
        most = f"0, or at least clients={self.clients}"
        self.require("population", not 0 < self.population < self.clients, most)
        if self.quantile:
            above = f"0 (clients / 20) or a number, and above noise / 2 = {self.noise / 2:g}"
            count = self.count_noise or self.clients / 20
            self.require("count_noise", 2 * count > self.noise, above)
            whole = "left out with quantile: a code would change the norm that is sent"
            self.require("codec_down", self.codec_down is None, whole)

    def check_recorded(self, function: Function) -> None:
        """Check that the server makes nothing of answers but their noisy mean. BadArgument."""
        super().check_recorded(function)
        self._keep_released()
        self.keep_fence(DPFedAvg, _RELEASED, function)

    def _keep_released(self) -> None:
        for name in _OWN_STEPS:
            for base in type(self).__mro__:
                if base in (DPFedAvg, FederatedTraining) or base in AskingProgram.__mro__:
                    continue
                if name in vars(base):
                    raise self.bad(
                        f"{base.__name__} has a {name} of its own, for which the privacy of "
                        "DPFedAvg does not hold; take a strategy of local_training or of "
                        "server_update, such as FedProx or FedAdam"
                    )

    @property
    def _slot(self) -> ProtocolSlot:
        settings = {
            "size": self.size, "clients": self.clients, "noise": float(self.noise),
            "epsilon": float(self.epsilon), "delta": float(self.delta), "clip": float(self.clip),
            "population": self.population, "accountant": self.accountant,
            "quantile": float(self.quantile), "clip_rate": float(self.clip_rate),
            "count_noise": float(self.count_noise),
        }  # fmt: skip
        return ProtocolSlot(PRIVACY_SLOT, "privacy", concrete=concrete(PrivateSum, **settings))


@dataclass(kw_only=True, eq=False)
class DPSGDTraining(FederatedTraining):
    """FedAvg whose clients train by DP-SGD (Abadi et al., 2016, arXiv:1607.00133).

    A round is one of `FederatedTraining`, with its input and outputs; but a client draws each of
    its examples into a batch with the chance `batch` / its number of examples, clips the gradient
    of each to the L2 norm `example_clip`, adds Gaussian noise of deviation `example_noise` *
    `example_clip` to their sum, and divides by the expected size of a batch. All that a client
    sends in all rounds together is (`example_epsilon`, `example_delta`)-private for each of its
    examples, against the server too. A client whose training would spend more fails with
    BudgetSpent, and is missing from then on. "stats" has `epsilon`, the most that a client of the
    round has spent so far, and `delta`.

    It is a base for other strategies: `class Mine(DPSGDTraining, FedAdam)`, and for `DPFedAvg` and
    `SecureTraining`, which tell no `epsilon` of clients.
    """

    example_clip: float = 1.0  # the largest L2 norm of an example's gradient
    example_noise: float = 1.0  # deviation of a sum's noise over the clip
    example_epsilon: float = 8.0  # the budget of each client, unless its node sets its own
    example_delta: float = 1e-5
    accountant: str = "rdp"  # or "pld", closer and slower

    def trained_model(self, slot: str, **other: Any) -> ModelSlot:
        """Return a slot for the model where it is trained, privately."""
        return ModelSlot(slot, concrete=concrete(PrivateModel, self._private(**other)))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        here = "'server' or 'none': what clients measure has no noise"
        self.require("evaluate", self.evaluate in ("server", "none"), here)
        names = ("example_clip", "example_noise", "example_epsilon", "example_delta")
        self.require_numbers(*names)
        self.require_one_of("accountant", ACCOUNTANTS)
        self._keep_trained_privately()
        try:
            PrivateModel(self._private())
        except BbnodeError as error:
            raise self.bad(f"model can't be trained privately: {error}") from error

    def check_recorded(self, function: Function) -> None:
        """Check that clients send nothing but what was trained privately. Raises BadArgument."""
        super().check_recorded(function)
        self._keep_trained_privately()
        self.keep_fence(DPSGDTraining, _TRAINED_PRIVATELY, function)

    def _keep_trained_privately(self) -> None:
        self.keep_steps(DPSGDTraining, DPSGDTraining, "trained_model")
        for base in type(self).__mro__:
            own = "client_update" in vars(base) or "respond" in vars(base)
            if own and base not in _PRIVATE_ANSWERS and base not in AskingProgram.__mro__:
                raise self.bad(
                    f"{base.__name__} answers more than what DPSGDTraining trained, and that would "
                    "have no noise; take a strategy of local_training or of server_update, such "
                    "as FedProx or FedAdam"
                )

    def _private(self, **other: Any) -> PrivateModelConfig:
        given = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
        return PrivateModelConfig(
            **{**given, **other},
            clip=float(self.example_clip),
            noise=float(self.example_noise),
            epsilon=float(self.example_epsilon),
            delta=float(self.example_delta),
            accountant=self.accountant,
        )


# Whose clients answer functions of trained weights, and nothing else of their data.
_PRIVATE_ANSWERS = (
    FederatedTraining, DPFedAvg, SecureTraining, Scaffold, HierarchicalTraining,
)  # fmt: skip
