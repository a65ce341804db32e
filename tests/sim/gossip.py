"""Gossip averaging that loses nothing: the example's program with books, for tests under faults.

A message carries all that was ever passed on to this neighbour, and the receiver adds what is new
to it (running sums: Hadjicostis et al., IEEE TCNS 2016). The next message makes a lost one good;
one that comes twice or late changes nothing. On every peer, at any time,
held + passed on - taken over = what it began with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, ProtocolComponent, register_component
from bbnode.components.contracts import ComponentError, OpContext
from bbnode.examples import gossip_averaging
from bbnode.examples.gossip_averaging import PERIOD_NS, GossipAveraging, Mass, PushSumConfig
from bbnode.ir.values import PeerIdVec
from bbnode.sim import Network, SimNode

__all__ = ["PERIOD_NS"]

MAX_NEIGHBOURS = 4096  # ever spoken with; each costs two vectors


class UnusableShare(ComponentError):
    """The share of a peer has the wrong length, or is not finite."""


class TooManyNeighbours(ComponentError):
    """There is no room in the books for another peer."""


@register_component
class PushSumWithBooks(ProtocolComponent):
    """Push-sum with running sums. Mass is [D + 1] float64: the vector, and its weight last."""

    TYPE_NAME: ClassVar[str] = "test.PushSumWithBooks"
    Config: ClassVar[type] = PushSumConfig

    def __init__(self, config: PushSumConfig) -> None:
        super().__init__(config)
        self.initial: Mass = np.array([*config.value, 1.0])
        self.held: Mass = self.initial.copy()
        # By the PeerId's text: all that was ever passed on to a peer, and taken over from it.
        self.passed_on: dict[str, Mass] = {}
        self.taken_over: dict[str, Mass] = {}

    def share(self, ctx: OpContext, peers: PeerIdVec) -> Mass:
        """Pass half on to one peer; return [D + 1], all that was ever passed on to it."""
        peer = str(peers[0])
        half = self.held / 2
        total = self._known(self.passed_on, peer) + half
        self.held, self.passed_on[peer] = self.held - half, total
        return total

    def merge(self, ctx: OpContext, share: Mass) -> Mass:
        """Add what is new in the sender's share [D + 1]; return the estimate [D]."""
        sender = str(ctx.source_peer or ctx.self_peer)
        if share.shape != self.initial.shape or not np.isfinite(share).all():
            raise UnusableShare(f"{sender} passed on {share.shape}, not {self.initial.shape}")
        known = self._known(self.taken_over, sender)
        # Weights only grow: what is not more came twice, late, or from before a restart.
        if share[-1] > known[-1]:
            self.held = self.held + (share - known)
            self.taken_over[sender] = share.copy()  # the message's own memory goes with it
        return self.estimate()

    def estimate(self) -> Mass:
        """Return the mean of all peers' vectors, as far as this one knows: [D]."""
        return self.held[:-1] / self.held[-1]

    def imbalance(self) -> float:
        """Return the largest error of the books; more than rounding is a fault of this program."""
        passed_on = sum(self.passed_on.values(), np.zeros_like(self.initial))
        taken_over = sum(self.taken_over.values(), np.zeros_like(self.initial))
        return float(np.abs(self.held + passed_on - taken_over - self.initial).max())

    def serialize(self) -> bytes:
        """Return what it holds and both books; JSON keeps every bit of a float."""
        books = (self.passed_on, self.taken_over)
        rows = [{peer: mass.tolist() for peer, mass in book.items()} for book in books]
        return json.dumps([self.held.tolist(), *rows]).encode()

    def restore(self, data: bytes) -> None:
        """Load what `serialize` returned; ComponentError for anything else."""
        with self.restoring():
            held, *rows = json.loads(data)
            passed_on, taken_over = (
                {peer: np.array(mass, np.float64) for peer, mass in book.items()} for book in rows
            )
            state = [np.array(held, np.float64), *passed_on.values(), *taken_over.values()]
            if {mass.shape for mass in state} != {self.initial.shape}:
                raise ValueError(f"masses of other shapes than {self.initial.shape}")
        self.held, self.passed_on, self.taken_over = state[0], passed_on, taken_over

    def _known(self, book: dict[str, Mass], peer: str) -> Mass:
        if peer not in book and len(book) >= MAX_NEIGHBOURS:
            raise TooManyNeighbours(f"{peer} is one too many; connect up to {MAX_NEIGHBOURS} peers")
        return book.get(peer, np.zeros_like(self.initial))


@cache
def compile_program() -> ModelProto:
    """The program of the example, with the component of the books."""
    compiler = Compiler().bind_peer_selector("neighbours", ConnectedView)
    return compiler.bind_protocol("mass", PushSumWithBooks).compile(GossipAveraging().build())


def add_peer(network: Network, number: int, value: Sequence[float], **options: Any) -> SimNode:
    return gossip_averaging.add_peer(network, compile_program(), number, value, **options)


def push_sum(node: SimNode) -> PushSumWithBooks:
    """The component of a running peer."""
    found = node.component("mass")
    assert isinstance(found, PushSumWithBooks)
    return found


def disagreement(network: Network, mean: Mass) -> float:
    """The distance of the worst estimate from the mean."""
    nodes = [node for node in network.nodes if node.is_up]
    return max(float(np.abs(push_sum(node).estimate() - mean).max()) for node in nodes)
