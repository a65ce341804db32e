"""The program that is broken: one whose results show at once if anything was counted twice.

Each client answers with the weights that it was sent and exactly 1 more, and reports one sample;
the server takes the mean. So the weights are the number of rounds that were made, whoever took
part, and the samples of a round are its contributors. At named phases the components stop at a
gate (see `gate.py`), where a test has a node in a known state.

What a client answers flows from what it received, and not through its model: a client that slept
through rounds runs several at once when it wakes, and those share the model's state.
"""

from __future__ import annotations

import sys
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
    offload,
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
from tests.chaos.gate import pass_gate


@dataclass(frozen=True, kw_only=True)
class CounterConfig:
    """Settings of `Counter`: how many weights it has."""

    size: int = 4


@register_component
class Counter(Model):
    """A model whose training only passes its gate."""

    TYPE_NAME: ClassVar[str] = "chaos.Counter"
    Config: ClassVar[type] = CounterConfig
    config: CounterConfig

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self._weights = np.zeros(config.size, np.float32)

    @offload
    def load_parameters(self, ctx: OpContext, params: Any) -> None:
        pass_gate("load")
        # A mean of equal floats is off by a last bit; rounded, errors do not add up.
        self._weights = np.rint(params).astype(np.float32)

    def params(self, ctx: OpContext) -> Any:
        return self._weights.copy()

    @offload
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> values.Metadata:
        pass_gate("train")
        return values.Metadata(num_samples=1, loss=0.0, steps=1)

    def serialize(self) -> bytes:
        # A node also saves a component before it lends it to a worker thread; that is no phase.
        if _called_by("snapshot"):
            pass_gate("save")
        return self._weights.tobytes()

    def restore(self, data: bytes) -> None:
        if data:
            self._weights = np.frombuffer(data, np.float32).copy()

    # What no round here uses.

    def forward(self, ctx: OpContext, batch: Any) -> Any:
        return batch

    def compute_loss(self, ctx: OpContext, batch: Any, target: Any) -> Any:
        return np.float32(0)

    def backward(self, ctx: OpContext, grad: Any) -> None:
        return None

    def step(self, ctx: OpContext, grads: Any) -> None:
        return None

    def apply_delta(self, ctx: OpContext, delta: Any) -> None:
        self._weights = self._weights + delta


@register_component
class GatedMean(FedAvg):
    """FedAvg that stops at the gate "aggregate"."""

    TYPE_NAME: ClassVar[str] = "chaos.GatedMean"

    @offload
    def aggregate(self, ctx: OpContext) -> tuple[Any, values.Metadata]:
        pass_gate("aggregate")
        return super().aggregate(ctx)


class CountingRound(Module):
    """A round; outputs on the server: "first" (the first weight), "stats" of the aggregate."""

    home = "server"

    def __init__(
        self, *, clients: int = 3, quorum: int = 2, deadline_s: float = 4.0, size: int = 4
    ) -> None:
        """`clients` are asked, `quorum` is enough at the deadline; `size` weights."""
        self.clients = clients
        self.quorum = quorum
        self.deadline_s = deadline_s
        self.size = size

    def body(self, g: Graph) -> None:
        cohort = PeerSelectorSlot("cohort", peer_class="client")
        model = concrete(Counter, CounterConfig(size=self.size))
        held, local = ModelSlot("global", concrete=model), ModelSlot("local", concrete=model)
        mean_of = AggregatorSlot("mean")
        compute = BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        peers = cohort.sample(g, n=self.clients, after=tick)
        weights = held.params(g, after=peers)
        r = g.request("round", peers, weights, quorum=self.quorum, deadline=self.deadline_s)

        local.load_parameters(g, r.received)
        trained = local.train(g, epochs=1, batch=1)
        r.respond(g.bundle([compute.add(g, r.received, g.constant(1.0)), trained]))

        mean_of.contribute_all(g, r.responses)
        mean, stats = mean_of.aggregate(g)
        held.load_parameters(g, mean)
        g.output("first", compute.reduce_max(g, mean, keepdims=False))
        g.output("stats", stats)

    def bindings(self) -> Mapping[str, Any]:
        return {"cohort": ConnectedView, "mean": GatedMean, "compute": OrtBackend}


def _called_by(name: str) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
