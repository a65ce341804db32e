"""The server's optimizers: a round's mean move of the weights is a gradient to step with.

Rule: the step is one of the server's own model, so that its state is saved and restored with the
node, and its graph runs on the bound backend. (Reddi et al., 2020, arXiv:2003.00295, algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bbnode.components import HeldModel, Int8Codec, OnnxModelConfig, concrete
from bbnode.components.autodiff.optimizers import OptimizerSettings
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output
from bbnode.programs.federated import Codes, FederatedTraining

# Settings of `OnnxModel` by which a step is made: on the server they are not the clients'.
_OF_STEPS = {each.name for each in fields(OptimizerSettings)} - {"name"} | {
    "optimizer", "accumulate", "schedule", "warmup_steps", "decay_steps", "decay_factor",
    "final_rate",
}  # fmt: skip
_PLAIN = OnnxModelConfig(model=b"")


@dataclass(kw_only=True, eq=False)
class FedOpt(FederatedTraining):
    """FedAvg in which the server steps with an optimizer of its own (Reddi et al., 2020).

    With D, the mean move of the clients' weights, the server makes a step of its optimizer with the
    gradient -D at the rate `server_learning_rate`: here w <- w + `server_learning_rate` D. Running
    statistics are no matter of a step: they are the clients' mean.
    """

    server_learning_rate: float = 1.0

    def server_optimizer(self) -> Mapping[str, Any]:
        """Return the optimizer of the server as settings of `OnnxModel`; plain SGD by default."""
        return {}

    @property
    def server_model(self) -> ModelSlot:
        """The slot of the server's model, with the server's optimizer."""
        settings = {name: getattr(_PLAIN, name) for name in _OF_STEPS}
        settings |= {**self.server_optimizer(), "learning_rate": float(self.server_learning_rate)}
        # A round ends with the new weights being loaded, which does not begin the state anew.
        own = replace(self._config, keep_optimizer_state=True, **settings)
        return ModelSlot("global", concrete=concrete(HeldModel, own))

    def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:  # noqa: ARG002
        """Make a step of the server's optimizer; return the new weights."""
        compute, model = BackendSlot("compute"), self.server_model
        old = model.params(g, after=mean)
        gradient = compute.neg(g, mean) if self.deltas else compute.sub(g, old, mean)
        stepped = model.params(g, after=model.step(g, gradient))
        trained = self.trained_size
        if trained == self.size:
            return stepped
        averaged = compute.add(g, old, mean) if self.deltas else mean
        ends = g.constant([0]), g.constant([trained]), g.constant([self.size])
        parts = [
            compute.slice(g, stepped, ends[0], ends[1]),
            compute.slice(g, averaged, ends[1], ends[2]),
        ]
        return compute.concat(g, *parts, axis=0)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_numbers("server_learning_rate")


@dataclass(kw_only=True, eq=False)
class FedAvgM(FedOpt):
    """FedAvg with momentum on the server (Hsu, Qi and Brown, 2019, arXiv:1909.06335).

    v <- `server_momentum` v + D; w <- w + `server_learning_rate` v, or with `server_nesterov`
    w + `server_learning_rate` (D + `server_momentum` v), as the authors have it.
    """

    server_momentum: float = 0.9
    server_nesterov: bool = False

    def server_optimizer(self) -> Mapping[str, Any]:
        """Return SGD with momentum."""
        nesterov = self.server_nesterov
        return {"optimizer": "sgd", "momentum": float(self.server_momentum), "nesterov": nesterov}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_shares("server_momentum")
        self.require("server_nesterov", isinstance(self.server_nesterov, bool), "true or false")
        if self.server_nesterov and not self.server_momentum:
            raise self.bad("server_nesterov looks ahead by server_momentum, which is 0")


@dataclass(kw_only=True, eq=False)
class _Adaptive(FedOpt):
    """Base of the adaptive ones: w <- w + `server_learning_rate` m / (sqrt(v) + `tau`).

    v begins with tau^2; there is no bias correction.
    """

    server_learning_rate: float = 0.1
    tau: float = 1e-3  # the degree of adaptivity: the smaller, the more

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_numbers("tau")
        self.require("tau", float(self.tau) ** 2 > 1e-37, "a number whose square a float32 holds")


@dataclass(kw_only=True, eq=False)
class FedAdagrad(_Adaptive):
    """Adagrad on the server: m is D, and v <- v + D^2 (Reddi et al., 2020, arXiv:2003.00295)."""

    def server_optimizer(self) -> Mapping[str, Any]:
        """Return Adagrad."""
        square = float(self.tau) ** 2
        return {"optimizer": "adagrad", "eps": float(self.tau), "initial_square": square}


@dataclass(kw_only=True, eq=False)
class FedAdam(_Adaptive):
    """Adam on the server (Reddi et al., 2020, arXiv:2003.00295).

    m <- `beta1` m + (1 - `beta1`) D; v <- `beta2` v + (1 - `beta2`) D^2.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def server_optimizer(self) -> Mapping[str, Any]:
        """Return Adam without bias correction."""
        return {
            "optimizer": "adam", "betas": (float(self.beta1), float(self.beta2)),
            "bias_correction": False, "eps": float(self.tau),
            "initial_square": float(self.tau) ** 2,
        }  # fmt: skip

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_shares("beta1", "beta2")


@dataclass(kw_only=True, eq=False)
class FedYogi(FedAdam):
    """Yogi on the server (Reddi et al., 2020, arXiv:2003.00295).

    m <- `beta1` m + (1 - `beta1`) D; v <- v - (1 - `beta2`) D^2 sign(v - D^2).
    """

    def server_optimizer(self) -> Mapping[str, Any]:
        """Return Yogi without bias correction."""
        return {**super().server_optimizer(), "optimizer": "yogi"}


@dataclass(kw_only=True, eq=False)
class DiLoCo(FedAvgM):
    """Many steps on each client, and Nesterov's momentum between (Douillard et al., 2023,
    arXiv:2311.08105).

    Each client makes `inner_steps` of AdamW, whose state it keeps from round to round, and answers
    how far it moved the weights, as int8. With D, the mean of the moves (each counts once, unless
    `weighted`): v <- 0.9 v + D; w <- w + 0.7 (D + 0.9 v).
    """

    inner_steps: int = 500  # H: of each client in a round, in as many epochs as it takes
    optimizer: str = "adamw"  # and the next three: of the clients
    learning_rate: float = 4e-4
    weight_decay: float = 0.1
    keep_optimizer_state: bool = True
    server_learning_rate: float = 0.7
    server_momentum: float = 0.9
    server_nesterov: bool = True
    deltas: bool = True
    codec: Codes | None = Int8Codec
    weighted: bool = False

    @property
    def client_model(self) -> ModelSlot:
        """The slot of the model that a client trains: `inner_steps` steps, and no more."""
        return self.trained_model("local", max_steps=self.inner_steps)

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train until the steps are made: an epoch has one batch at least."""
        model, ready = self.client_model, self.ready(g, weights)
        trained = model.train(g, epochs=self.inner_steps, batch=self.batch, after=ready)
        return self.answer(g, model.params(g), weights), trained

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(inner_steps=1)
        self.require("epochs", self.epochs == 1, "left out: inner_steps says how much is trained")
        own = "0: inner_steps says how many"
        self.require("max_steps", self._config.max_steps == 0, own)
        one = self._config.accumulate == 1
        self.require("accumulate", one, "1: a batch is an inner step")
        self.require("deltas", self.deltas, "true: moves of the weights are what is averaged")
