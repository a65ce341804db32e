"""A quantiser that a program trains on both sides, so that codes travel without their codebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, ProductQuantizer, ScalarQuantizer, concrete
from bbnode.dsl import CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import Network, SimNode, steps

DIMENSIONS = 16


@dataclass(eq=False)
class Compressed(Module):
    """The sender's corpus trains its codec and the reader's; then vectors travel as codes."""

    home = "sender"
    kind: Any = field(default_factory=lambda: concrete(ScalarQuantizer))

    def body(self, g: Graph) -> None:
        """Record it."""
        readers = PeerSelectorSlot("readers", peer_class="reader")
        codec = CodecSlot("codec", concrete=self.kind)
        corpus = g.input("corpus", types.TENSOR_FLOAT)
        g.output("trained", codec.train(g, corpus))
        there = g.net_out("corpus", readers.current_view(g, after=corpus), corpus)
        g.output("trained_there", codec.train(g, there))
        x = g.input("x", types.TENSOR_FLOAT)
        code = codec.encode(g, x)
        g.output("code", code)
        sent = g.net_out("code", readers.current_view(g, after=code), code)
        g.output("decoded", codec.decode(g, sent))


def ran(kind: Any) -> tuple[dict[str, np.ndarray], list[Any], np.ndarray]:
    told: dict[str, np.ndarray] = {}
    failed: list[Any] = []

    def seen(now_ns: int, who: SimNode, step: steps.Step) -> None:
        if isinstance(step, steps.AppEvent):
            told[step.topic] = step.value
        elif isinstance(step, steps.OpFailed):
            failed.append(step)

    compiler = Compiler().bind_peer_selector("readers", ConnectedView)
    compiled = compiler.compile(Compressed(kind).build())
    network = Network(seed=0, observe=seen)
    sender = network.add("sender", compiled, ["sender"])
    network.add("reader", compiled, ["reader"])
    network.run_until_idle()
    rng = np.random.default_rng(0)
    corpus = rng.standard_normal((600, DIMENSIONS), dtype=np.float32)
    sender.deliver_event("sender", "corpus", corpus)
    network.run_until_idle()
    sender.deliver_event("sender", "x", corpus[:200] + np.float32(0.01))
    network.run_until_idle()
    return told, failed, corpus[:200] + np.float32(0.01)


@pytest.mark.parametrize(
    ("kind", "most_bytes", "most_off"),
    [(concrete(ProductQuantizer, words=64), 0.25, 0.5), (concrete(ScalarQuantizer), 1, 0.02)],
)
def test_both_sides_train_on_what_the_program_brings(
    kind: Any, most_bytes: float, most_off: float
) -> None:
    told, failed, x = ran(kind)
    assert not failed
    # Bytes of the codes, and a header; the codebook of 4 KiB, or 128 bytes, stays at home.
    assert told["code"].nbytes <= most_bytes * x.size + 64
    assert np.linalg.norm(told["decoded"] - x) <= most_off * np.linalg.norm(x)
