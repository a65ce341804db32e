"""Peers without a server agree on the mean of what each of them knows: a protocol of your own.

Run it with `python -m bbnode.examples.gossip_averaging`.

A peer holds a vector and a weight, at first its own vector and 1. At every tick it passes half of
both to a neighbour, drawn at random, who adds them to its own; vector over weight goes to the
mean everywhere (push-sum: Kempe, Dobra and Gehrke, FOCS 2003). `protocol_op` says which ops the
protocol has; `PushSum` carries them out. A share that is lost takes its part of the sum along:
then the peers still agree, but not quite on the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import (
    ComponentError,
    ConnectedView,
    OpContext,
    ProtocolComponent,
    register_component,
)
from bbnode.dsl import Graph, Module, PeerSelectorSlot, ProtocolSlot, protocol_op, syscalls, types
from bbnode.sim import MS, LinkModel, Network, S, SimNode

PERIOD_NS = 50 * MS

Mass: TypeAlias = npt.NDArray[np.float64]  # [D + 1]: a vector, and its weight last

protocol_op("push_sum", "Share", {"peers": types.PEER_ID_VEC}, {"share": types.TENSOR_DOUBLE})
protocol_op("push_sum", "Merge", {"share": types.TENSOR_DOUBLE}, {"estimate": types.TENSOR_DOUBLE})


@dataclass(frozen=True, kw_only=True)
class PushSumConfig:
    """`value`: the vector that the peer begins with, as long on every peer."""

    value: tuple[float, ...] = (0.0,)


@register_component
class PushSum(ProtocolComponent):
    """The part of the sum that a peer holds."""

    TYPE_NAME: ClassVar[str] = "example.PushSum"
    Config: ClassVar[type] = PushSumConfig

    def __init__(self, config: PushSumConfig) -> None:
        super().__init__(config)
        self.held: Mass = np.array([*config.value, 1.0])

    def share(self, ctx: OpContext, peers: Any) -> Mass:
        """Halve what is held, and return the other half."""
        self.held = self.held / 2
        return self.held

    def merge(self, ctx: OpContext, share: Mass) -> Mass:
        """Add a share; return the estimate [D]."""
        if share.shape != self.held.shape or not np.isfinite(share).all() or share[-1] <= 0:
            raise ComponentError(f"{ctx.source_peer} passed on {share}; not {self.held.shape}")
        self.held = self.held + share
        estimate: Mass = self.held[:-1] / self.held[-1]
        return estimate

    def serialize(self) -> bytes:
        """Return the state, for a snapshot."""
        return self.held.tobytes()

    def restore(self, data: bytes) -> None:
        """Load what `serialize` returned; ComponentError for anything else."""
        with self.restoring():
            self.held = np.frombuffer(data).reshape(self.held.shape)


class GossipAveraging(Module):
    """Nobody has to start it. Output "estimate" ([D] float64), with each share that comes."""

    home = "peer"

    def body(self, g: Graph) -> None:
        mass = ProtocolSlot("mass", "push_sum")
        tick = syscalls.interval(g, period_ns=PERIOD_NS)
        neighbour = PeerSelectorSlot("neighbours", peer_class="peer").sample(g, n=1, after=tick)
        share = g.net_out("share", neighbour, mass.share(g, neighbour))
        g.output("estimate", mass.merge(g, share))

    def bindings(self) -> Mapping[str, Any]:
        return {"neighbours": ConnectedView, "mass": PushSum}


def compile_program() -> ModelProto:
    """Compile the program with its two components."""
    compiler = Compiler().bind_peer_selector("neighbours", ConnectedView)
    return compiler.bind_protocol("mass", PushSum).compile(GossipAveraging().build())


def add_peer(
    network: Network, compiled: ModelProto, number: int, value: Sequence[float], **options: Any
) -> SimNode:
    """Add a peer that begins with `value`, and draws its neighbours from a seed of its own."""
    own: Any = {"mass": {"value": list(value)}, "neighbours": {"seed": network.seed + number}}
    return network.add(f"peer-{number}", compiled, ["peer"], config=own, **options)


def main() -> None:
    """Run eight peers, and compare what they say with the mean."""
    network = Network(seed=1, link=LinkModel(latency_ns=5 * MS, jitter_ns=10 * MS))
    vectors = [(float(i), float(i * i)) for i in range(8)]
    compiled, mean = compile_program(), np.mean(vectors, axis=0)
    peers = [add_peer(network, compiled, i, vector) for i, vector in enumerate(vectors)]
    print(f"8 peers; the mean of their vectors is {mean.tolist()}")
    for second in (1, 2, 3, 4):
        network.run(until=second * S)
        off = [np.abs(peer.values("estimate")[-1] - mean).max() for peer in peers]
        print(f"  after {second} s the worst estimate is off by {max(off):.1e}")


if __name__ == "__main__":
    main()
