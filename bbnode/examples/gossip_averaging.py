"""Peers without a server agree on the mean of what each of them knows.

Run it with `python -m bbnode.examples.gossip_averaging`.

A peer holds a vector and a weight, at first its own vector and 1. At every tick it passes half of
both to a random neighbour, which adds them to its own; vector / weight converges to the mean
everywhere (push-sum: Kempe, Dobra and Gehrke, FOCS 2003).

So that nothing is lost, a message carries the sum of all that was ever passed on to this neighbour,
and the receiver adds only what is new (running sums: Hadjicostis et al., IEEE TCNS 2016). The next
message makes up for a lost one; a duplicate or late one changes nothing. On every peer, at any
time, held + passed on - taken over = its initial values. In the run below links lose, duplicate and
reorder messages, the network is split for a second, and a peer crashes and restores its snapshot.
"""

from __future__ import annotations

import json
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
from bbnode.dsl import (
    Graph,
    Module,
    PeerSelectorSlot,
    ProtocolSlot,
    protocol_op,
    syscalls,
    types,
    values,
)
from bbnode.sim import MS, LinkModel, Network, S, SimNode

PERIOD_NS = 50 * MS
PEERS = 8
MAX_NEIGHBOURS = 4096  # ever spoken with; each costs two vectors

Mass: TypeAlias = npt.NDArray[np.float64]

_MASS = types.TENSOR_DOUBLE
protocol_op("push_sum", "Share", {"peers": types.PEER_ID_VEC}, {"share": _MASS})
protocol_op("push_sum", "Merge", {"share": _MASS}, {"estimate": _MASS})


class UnusableShare(ComponentError):
    """The share of a peer has the wrong length, or is not finite."""


class TooManyNeighbours(ComponentError):
    """The peer has no room for another neighbour."""


@dataclass(frozen=True, kw_only=True)
class PushSumConfig:
    """Settings of `PushSum`.

    Attributes:
        value: the vector that the peer begins with; as long on every peer.
    """

    value: tuple[float, ...] = (0.0,)


@register_component
class PushSum(ProtocolComponent):
    """Push-sum with running sums. Mass is [D + 1] float64: the vector, and its weight last."""

    TYPE_NAME: ClassVar[str] = "example.PushSum"
    Config: ClassVar[type] = PushSumConfig

    def __init__(self, config: PushSumConfig) -> None:
        super().__init__(config)
        self.initial: Mass = np.array([*config.value, 1.0])
        self.held: Mass = self.initial.copy()
        # By the PeerId's text: all that was ever passed on to a peer, and taken over from it.
        self.passed_on: dict[str, Mass] = {}
        self.taken_over: dict[str, Mass] = {}

    def share(self, ctx: OpContext, peers: values.PeerIdVec) -> Mass:
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
            wanted = f"{len(self.initial)} finite numbers; give every peer a `value` of this length"
            raise UnusableShare(f"{sender} passed on {share.shape}, not {wanted}")
        known = self._known(self.taken_over, sender)
        # Weights only grow: a smaller or equal one is duplicate, late, or from before a restart.
        if share[-1] > known[-1]:
            self.held = self.held + (share - known)
            self.taken_over[sender] = share.copy()  # the message's own memory goes with it
        return self.estimate()

    def estimate(self) -> Mass:
        """Return the mean of all peers' vectors, as far as this one knows: [D]."""
        estimate: Mass = self.held[:-1] / self.held[-1]
        return estimate

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


class GossipAveraging(Module):
    """Every peer goes to the mean of all peers' vectors; nobody has to start it.

    Output "estimate" ([D] float64) on every peer, with each message that comes.
    """

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
    own: dict[str, dict[str, Any]] = {
        "mass": {"value": list(value)},
        "neighbours": {"seed": network.seed + number},
    }
    return network.add(f"peer-{number}", compiled, ["peer"], config=own, **options)


def push_sum(node: SimNode) -> PushSum:
    """Return the component of a running peer."""
    found = node.component("mass")
    assert isinstance(found, PushSum)
    return found


def disagreement(network: Network, mean: Mass) -> float:
    """Return the distance of the worst estimate from the mean."""
    nodes = [node for node in network.nodes if node.is_up]
    return max(float(np.abs(push_sum(node).estimate() - mean).max()) for node in nodes)


def main() -> None:
    """Run eight peers, a bad network, a split and a crash."""
    link = LinkModel(latency_ns=5 * MS, jitter_ns=10 * MS, loss=0.1, duplication=0.1, reorder=0.2)
    network = Network(seed=1, link=link)
    compiled = compile_program()
    vectors = [(float(i), float(i * i)) for i in range(PEERS)]
    nodes = [add_peer(network, compiled, i, vector) for i, vector in enumerate(vectors)]
    mean = np.mean(vectors, axis=0)
    print(f"{PEERS} peers; the mean of their vectors is {mean.tolist()}")

    network.at(S, lambda: network.partition(nodes[: PEERS // 2], nodes[PEERS // 2 :]))
    network.at(2 * S, network.heal_all)
    network.at(S // 2, nodes[3].checkpoint)
    network.at(S + S // 2, lambda: network.crash(nodes[3]))
    network.at(2 * S, lambda: network.restart(nodes[3]))
    for second in (1, 2, 3, 4, 6, 8, 10, 12):
        network.run(until=second * S)
        far = disagreement(network, mean)
        print(f"  after {second:2} s the worst estimate is off by {far:.2e}")

    names = {"sent": "messages", "lost": "lost", "duplicated": "doubled"}
    counts = network.counters()
    print(", ".join(f"{counts[f'envelopes.{key}']} {word}" for key, word in names.items()))
    print(f"peer-3 came back from what it had saved and says {push_sum(nodes[3]).estimate()}")
    print(f"books are even to {max(push_sum(node).imbalance() for node in nodes):.0e}")


if __name__ == "__main__":
    main()
