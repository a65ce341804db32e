"""The program that `_daemon_metrics` times: a federated round of which only the moving is left.

Rule: the model does nothing, so that a round's time is what bbnode takes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bbnode.components import (
    ConnectedView,
    FedAvg,
    OpContext,
    OrtBackend,
    concrete,
    register_component,
)
from bbnode.components.contracts import Model
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    types,
    values,
)


@dataclass(frozen=True, kw_only=True)
class IdleModelConfig:
    """Settings of `IdleModel`: how many float32 weights it has."""

    size: int


@register_component
class IdleModel(Model):
    """Weights that are taken and given, and never trained."""

    TYPE_NAME: ClassVar[str] = "bench.IdleModel"
    Config: ClassVar[type] = IdleModelConfig

    def __init__(self, config: IdleModelConfig) -> None:
        super().__init__(config)
        self._weights = np.zeros(config.size, np.float32)
        # What can be written to is copied before it is sent.
        self._weights.flags.writeable = False

    def params(self, ctx: OpContext) -> Any:
        """The weights; nobody writes to them, so they need no copy."""
        return self._weights

    def load_parameters(self, ctx: OpContext, params: Any) -> None:
        """Take new weights."""
        self._weights = params

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> values.Metadata:
        """Do nothing."""
        return values.Metadata(num_samples=1, loss=0.0, steps=1)

    def forward(self, ctx: OpContext, batch: Any) -> Any:
        """Do nothing."""
        return batch

    def compute_loss(self, ctx: OpContext, batch: Any, target: Any) -> Any:
        """Do nothing."""
        return np.float32(0)

    def backward(self, ctx: OpContext, grad: Any) -> None:
        """Do nothing."""

    def step(self, ctx: OpContext, grads: Any) -> None:
        """Do nothing."""

    def apply_delta(self, ctx: OpContext, delta: Any) -> None:
        """Do nothing."""


class IdleRound(Module):
    """Weights to all clients and back, averaged."""

    home = "server"

    def __init__(self, *, clients: int, size: int) -> None:
        """`size` weights, `clients` that are asked."""
        self.clients = clients
        self.size = size

    def body(self, g: Graph) -> None:
        """One round."""
        model = concrete(IdleModel, IdleModelConfig(size=self.size))
        held, local = ModelSlot("global", concrete=model), ModelSlot("local", concrete=model)
        fedavg = AggregatorSlot("fedavg")
        BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        cohort = PeerSelectorSlot("cohort", peer_class="client").sample(
            g, n=self.clients, after=tick
        )
        weights = held.params(g, after=cohort)
        r = g.request("round", cohort, weights, deadline=60.0)
        local.load_parameters(g, r.received)
        trained = local.train(g, epochs=1, batch=1)
        r.respond(g.bundle([local.params(g), trained]))
        fedavg.contribute_all(g, r.responses)
        mean, stats = fedavg.aggregate(g)
        held.load_parameters(g, mean)
        g.output("stats", stats)

    def bindings(self) -> Mapping[str, Any]:
        """What fills the slots."""
        return {"cohort": ConnectedView, "fedavg": FedAvg, "compute": OrtBackend}


class OneWay(Module):
    """Weights to one client, which says that it has them."""

    home = "server"

    def __init__(self, *, clients: int, size: int) -> None:
        """`size` weights, `clients` that are asked."""
        self.clients = clients
        self.size = size

    def body(self, g: Graph) -> None:
        """One transfer."""
        model = concrete(IdleModel, IdleModelConfig(size=self.size))
        tick = g.input("tick", types.TRIGGER)
        cohort = PeerSelectorSlot("cohort", peer_class="client").sample(
            g, n=self.clients, after=tick
        )
        weights = ModelSlot("global", concrete=model).params(g, after=cohort)
        r = g.request("take", cohort, weights, deadline=60.0)
        local = ModelSlot("local", concrete=model)
        local.load_parameters(g, r.received)
        r.respond(local.train(g, epochs=1, batch=1))
        g.output("answers", r.responses)

    def bindings(self) -> Mapping[str, Any]:
        """What fills the slots."""
        return {"cohort": ConnectedView}
