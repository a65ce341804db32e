"""The server's optimizers: a round's mean move of the weights is a gradient to step with.

Rule: the step is one of the server's own model, so that its state is saved and restored with the
node, and its graph runs on the bound backend. (Reddi et al., 2020, arXiv:2003.00295, algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import HeldModel, OnnxModelConfig, concrete
from bbnode.components.autodiff.optimizers import OptimizerSettings
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output
from bbnode.programs.composing import ArgumentChecks, Inner, RoundPart

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining

# Settings of `OnnxModel` by which a step is made: on the server they are not the clients'.
_OF_STEPS = {each.name for each in fields(OptimizerSettings)} - {"name"} | {
    "optimizer", "accumulate", "schedule", "warmup_steps", "decay_steps", "decay_factor",
    "final_rate",
}  # fmt: skip
_PLAIN = OnnxModelConfig(model=b"")


@dataclass(frozen=True)
class SGD(RoundPart):
    """A step of the server by an optimizer of its own (Reddi et al., 2020).

    With D, the mean move of the clients' weights, the server makes a step of its optimizer with the
    gradient -D at the rate `server_learning_rate`: here w <- w + `server_learning_rate` D. Running
    statistics are no matter of a step: they are the clients' mean.
    """

    changes: ClassVar[frozenset[str]] = frozenset({"step"})
    slot: ClassVar[str] = "server"
    claims: ClassVar[tuple[str, ...]] = ("server_model", "server_update")

    server_learning_rate: float = 1.0

    def optimizer(self) -> Mapping[str, Any]:
        """Return the optimizer of the server as settings of `OnnxModel`; plain SGD by default."""
        return {}

    def server_model(self, p: FederatedTraining, _: Inner) -> ModelSlot:
        """Return the slot of the server's model, with the server's optimizer."""
        settings = {name: getattr(_PLAIN, name) for name in _OF_STEPS}
        settings |= {**self.optimizer(), "learning_rate": float(self.server_learning_rate)}
        # A round ends with the new weights being loaded, which does not begin the state anew.
        own = replace(p._config, keep_optimizer_state=True, **settings)
        return ModelSlot("global", concrete=concrete(HeldModel, own))

    def server_update(
        self, p: FederatedTraining, _: Inner, g: Graph, mean: Output, _stats: Output
    ) -> Output:
        """Make a step of the server's optimizer; return the new weights."""
        compute, model = BackendSlot("compute"), p.server_model
        old = model.params(g, after=mean)
        gradient = compute.neg(g, mean) if p.deltas else compute.sub(g, old, mean)
        stepped = model.params(g, after=model.step(g, gradient))
        trained = p.trained_size
        if trained == p.size:
            return stepped
        averaged = compute.add(g, old, mean) if p.deltas else mean
        ends = g.constant([0]), g.constant([trained]), g.constant([p.size])
        parts = [
            compute.slice(g, stepped, ends[0], ends[1]),
            compute.slice(g, averaged, ends[1], ends[2]),
        ]
        return compute.concat(g, *parts, axis=0)

    def check(self, program: Any, own: ArgumentChecks) -> None:  # noqa: ARG002
        """Check the settings. Raises BadArgument."""
        own.require_numbers("server_learning_rate")


@dataclass(frozen=True)
class Momentum(SGD):
    """Momentum on the server (Hsu, Qi and Brown, 2019, arXiv:1909.06335).

    v <- `server_momentum` v + D; w <- w + `server_learning_rate` v, or with `server_nesterov`
    w + `server_learning_rate` (D + `server_momentum` v), as the authors have it.
    """

    server_momentum: float = 0.9
    server_nesterov: bool = False

    def optimizer(self) -> Mapping[str, Any]:
        """Return SGD with momentum."""
        nesterov = self.server_nesterov
        return {"optimizer": "sgd", "momentum": float(self.server_momentum), "nesterov": nesterov}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_shares("server_momentum")
        own.require("server_nesterov", isinstance(self.server_nesterov, bool), "true or false")
        if self.server_nesterov and not self.server_momentum:
            raise own.bad("server_nesterov looks ahead by server_momentum, which is 0")


@dataclass(frozen=True)
class Adaptive(SGD):
    """Base of the adaptive ones: w <- w + `server_learning_rate` m / (sqrt(v) + `tau`).

    v begins with tau^2; there is no bias correction.
    """

    server_learning_rate: float = 0.1
    tau: float = 1e-3  # the degree of adaptivity: the smaller, the more

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_numbers("tau")
        own.require("tau", float(self.tau) ** 2 > 1e-37, "a number whose square a float32 holds")


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """Adagrad on the server: m is D, and v <- v + D^2 (Reddi et al., 2020, arXiv:2003.00295)."""

    def optimizer(self) -> Mapping[str, Any]:
        """Return Adagrad."""
        square = float(self.tau) ** 2
        return {"optimizer": "adagrad", "eps": float(self.tau), "initial_square": square}


@dataclass(frozen=True)
class Adam(Adaptive):
    """Adam on the server (Reddi et al., 2020, arXiv:2003.00295).

    m <- `beta1` m + (1 - `beta1`) D; v <- `beta2` v + (1 - `beta2`) D^2.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def optimizer(self) -> Mapping[str, Any]:
        """Return Adam without bias correction."""
        return {
            "optimizer": "adam", "betas": (float(self.beta1), float(self.beta2)),
            "bias_correction": False, "eps": float(self.tau),
            "initial_square": float(self.tau) ** 2,
        }  # fmt: skip

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_shares("beta1", "beta2")


@dataclass(frozen=True)
class Yogi(Adam):
    """Yogi on the server (Reddi et al., 2020, arXiv:2003.00295).

    m <- `beta1` m + (1 - `beta1`) D; v <- v - (1 - `beta2`) D^2 sign(v - D^2).
    """

    def optimizer(self) -> Mapping[str, Any]:
        """Return Yogi without bias correction."""
        return {**super().optimizer(), "optimizer": "yogi"}
