"""Bytes of an answer with a codec over those without, as envelopes of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, Int8Codec, OrtBackend
from bbnode.dsl import BackendSlot, CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import steps
from bbnode.sim import Network


class Contribution(Module):
    """A request of one number, answered by a vector of `numbers` float32."""

    home = "server"

    def __init__(self, numbers: int, codec: CodecSlot | None) -> None:
        self.numbers, self.codec = numbers, codec

    def body(self, g: Graph) -> None:
        """Record it."""
        number = g.input("number", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("peers", peer_class="client").current_view(g, after=number)
        asked = g.request("ask", peers, number)
        compute = BackendSlot("compute")
        shape = g.constant([self.numbers], after=asked.received)
        wide = compute.expand(g, asked.received, shape)
        ramp = compute.cum_sum(g, wide, g.constant(0, after=asked.received))
        asked.respond(compute.sin(g, ramp), codec=self.codec)
        g.output("all", asked.responses.stacked)


def int8_bytes_vs_fp32(numbers: int = 10_000_000) -> float:
    """Return the bytes of one answer as int8 over those as float32, all of its envelope."""
    coded, plain = (_bytes(numbers, codec) for codec in (CodecSlot("codec"), None))
    return coded / plain


def _bytes(numbers: int, codec: CodecSlot | None) -> int:
    sizes: list[int] = []

    def watch(_at: int, _node: Any, step: steps.Step) -> None:
        if isinstance(step, steps.SendEnvelope):
            sizes.append(step.size)

    compiler = Compiler().bind_peer_selector("peers", ConnectedView)
    compiler = compiler.bind_backend("compute", OrtBackend)
    if codec is not None:
        compiler = compiler.bind_codec("codec", Int8Codec)
    artifact = compiler.compile(Contribution(numbers, codec).build())
    net = Network(observe=watch)
    server = net.add("server", artifact, ["server"])
    net.add("client", artifact, ["client"])
    execution = server.invoke("server", {"number": np.array([0.37], np.float32)})
    net.run_until_idle()
    found = server.outputs(execution)["all"]
    if found.shape != (1, numbers):
        raise RuntimeError(f"the answer came as {found.shape}")
    return max(sizes)


if __name__ == "__main__":
    print(f"int8_bytes_vs_fp32 {int8_bytes_vs_fp32():.4f}")
