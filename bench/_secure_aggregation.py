"""One round of secure aggregation in the simulator: clients, of which some drop out, and a server.

`secagg_seconds` is what `bench/aggregate.py` reports as `secagg_100x1m_s`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import (
    ComponentError,
    OpContext,
    ProtocolComponent,
    neighbours_for,
    register_component,
    types,
    values,
)
from bbnode.dsl import Graph, Output, ProtocolSlot, Request, protocol_op
from bbnode.engine import Limits
from bbnode.programs import FederatedTraining, SecureTraining
from bbnode.sim import Network, SimNode

# Of the clients, for which the neighbours are chosen.
CORRUPT = 0.1
DROPOUTS = 0.05

protocol_op(
    "bench_vectors",
    "Vector",
    {"go": types.ANY},
    {"vector": types.TENSOR_FLOAT, "metadata": types.METADATA},
)


@dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """`size`: numbers in each client's vector; `seed`: of this client's."""

    size: int = 1
    seed: int = 0


@register_component
class Vectors(ProtocolComponent):
    """The vector of a client, which stands for what it has trained."""

    TYPE_NAME: ClassVar[str] = "bench.Vectors"
    Config: ClassVar[type] = VectorsConfig

    def vector(self, ctx: OpContext, go: Any) -> tuple[Any, Any]:
        """Return the vector, [size], and a weight."""
        return vector_of(self.config.size, self.config.seed), values.Metadata(num_samples=1)


@cache
def _drawn(size: int) -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal(2 * size, np.float32) / np.float32(10)
    drawn.flags.writeable = False
    return drawn


def vector_of(size: int, seed: int) -> np.ndarray:
    """Return the vector of one client, float32 [size]: a part of one that all share."""
    begin = 7919 * seed % size
    return _drawn(size)[begin : begin + size]


@dataclass(kw_only=True, eq=False)
class GivenUpdates(FederatedTraining):
    """Clients that train nothing: their updates are given."""

    def sent(self, g: Graph, peers: Output) -> Output:
        """Return a number in the place of the weights."""
        return g.constant(0, after=peers)

    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Return the given vector."""
        vector, metadata = ProtocolSlot("vectors", "bench_vectors").vector(g, asked.received)
        return vector, metadata


@dataclass(kw_only=True, eq=False)
class SecureSums(SecureTraining, GivenUpdates):
    """Secure aggregation of given updates."""

    evaluate: str = "none"
    weighted: bool = False

    def bindings(self) -> dict[str, Any]:
        """Return the classes of the slots."""
        return {**super().bindings(), "vectors": Vectors}


def _drop(node: SimNode, step: str) -> None:
    def fail(*_: Any) -> Any:
        raise ComponentError("dropped out")

    setattr(node.component("masking"), step, fail)


def secagg_seconds(clients: int = 100, numbers: int = 1_000_000, dropouts: int = 5) -> float:
    """Return the seconds of one round with SecAgg+, drop-outs spread over its steps.

    The result is checked against the mean of the survivors' vectors.
    """
    outputs = 1000 if numbers % 1000 == 0 else 1
    inputs = numbers // outputs - 1  # of one layer, with its bias
    program = SecureSums(
        model=(inputs, outputs),
        clients=clients,
        corrupt=CORRUPT,
        neighbours=neighbours_for(clients, corrupt=CORRUPT, dropouts=DROPOUTS),
    )
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    network = Network(1, keys=True)
    # All masked vectors are held at once.
    room = Limits(ingress_bytes=2 * clients * numbers * 4 + (64 << 20))
    server = network.add("server", artifact, ["server"], limits=room)
    steps = ("advertise_keys", "share_keys", "mask", "confirm", "reveal")
    summed = []
    for number in range(clients):
        config = {"vectors": {"size": numbers, "seed": number}}
        node = network.add(f"client-{number}", artifact, ["client"], config=config)
        if number < dropouts:
            _drop(node, steps[number % len(steps)])
        if number >= dropouts or number % len(steps) > 2:
            summed.append(number)
    before = server.component("global").params(None)

    began = time.perf_counter()
    execution = server.invoke("server", {"tick": values.TRIGGER})
    network.run_until_idle()
    took = time.perf_counter() - began

    found = server.outputs(execution)
    if server.failures():
        raise AssertionError(server.failures())
    wanted = np.mean([vector_of(numbers, n) for n in summed], axis=0, dtype=np.float64)
    if found["stats"]["contributors"] != len(summed):
        raise AssertionError(f"{found['stats']} of {len(summed)} survivors")
    np.testing.assert_allclose(found["model"] - before, wanted, atol=1e-5)
    return took
