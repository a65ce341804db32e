"""Peers without a server agree on the mean of what each of them knows.

Run it with `python -m bbnode.examples.gossip_averaging`.

One class of peer, which sends to itself. At every tick a peer keeps half of what it has and
passes the other half on to one neighbour, drawn at random; whoever receives something adds it
to its own. "What it has" is a vector and a weight, at first its own vector and 1; vector over
weight goes to the mean everywhere (push-sum: Kempe, Dobra and Gehrke, FOCS 2003).

Push-sum needs that nothing gets lost on the way. So a message does not carry what is passed on
now, but all that was ever passed on to this neighbour; the receiver adds the difference to
what it has had from there (running sums: Hadjicostis, Vaidya and Domínguez-García, IEEE
Transactions on Control of Network Systems, 2016). What a lost message carried is in the next
one; what comes twice or late changes nothing. On every peer, at any time, holds

    what it has + what it passed on - what it took over = what it began with

also after it came back from an old snapshot. In the run below links lose, double and reorder
messages, the network is split for a second, and a peer crashes.
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
from bbnode.components import ConnectedView, OpContext, register_component
from bbnode.components.contracts import ComponentError, ProtocolComponent
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
from bbnode.sim import MS, Clock, LinkModel, Network, S, SimNode

PERIOD_NS = 50 * MS
PEERS = 8
MAX_NEIGHBOURS = 4096  # ever spoken with; each costs two vectors

Mass: TypeAlias = npt.NDArray[np.float64]

_MASS = types.TENSOR_DOUBLE
protocol_op("push_sum", "Share", {"peers": types.PEER_ID_VEC}, {"share": _MASS})
protocol_op("push_sum", "Merge", {"share": _MASS}, {"estimate": _MASS})


class UnusableShare(ComponentError):
    """A peer passed on what is no mass."""


class TooManyNeighbours(ComponentError):
    """There is no room in the books for another peer."""


@dataclass(frozen=True, kw_only=True)
class PushSumConfig:
    """Settings of `PushSum`: the vector that the peer begins with; as long on every peer."""

    value: tuple[float, ...] = (0.0,)


@register_component
class PushSum(ProtocolComponent):
    """Mass is [D + 1] float64: the vector, and its weight last."""

    TYPE_NAME: ClassVar[str] = "example.PushSum"
    Config: ClassVar[type] = PushSumConfig
    config: PushSumConfig

    def __init__(self, config: PushSumConfig) -> None:
        super().__init__(config)
        self.initial: Mass = np.array([*config.value, 1.0])
        self.held: Mass = self.initial.copy()
        # By the PeerId's text: what was ever passed on to a peer, and taken over from it.
        self.passed_on: dict[str, Mass] = {}
        self.taken_over: dict[str, Mass] = {}

    def share(self, ctx: OpContext, peers: values.PeerIdVec) -> Mass:
        """Give half away to one peer; [D + 1], all that was ever passed on to it."""
        peer = str(peers[0])
        half = self.held / 2
        total = self._known(self.passed_on, peer) + half
        self.held = self.held - half
        self.passed_on[peer] = total
        return total

    def merge(self, ctx: OpContext, share: Mass) -> Mass:
        """Take over what is new in the sender's share [D + 1]; gives the estimate [D].

        Raises:
            UnusableShare: it is no mass of this program.
        """
        sender = str(ctx.source_peer or ctx.self_peer)
        if share.shape != self.initial.shape or not np.isfinite(share).all():
            raise UnusableShare(
                f"{sender} passed on {share.shape} numbers; {self.initial.shape} finite ones are "
                "expected: give every peer a `value` of the same length"
            )
        known = self._known(self.taken_over, sender)
        # Weights only grow: what is not more came twice, late, or from before a restart.
        if share[-1] > known[-1]:
            self.held = self.held + (share - known)
            self.taken_over[sender] = share.copy()  # the message's own memory goes with it
        return self.estimate()

    def estimate(self) -> Mass:
        """The mean of all peers' vectors, as far as this one knows: [D]."""
        estimate: Mass = self.held[:-1] / self.held[-1]
        return estimate

    def imbalance(self) -> float:
        """How far the books are from even; more than rounding is an error of this program."""
        passed_on, taken_over = (
            sum(book.values(), np.zeros_like(self.initial))
            for book in (self.passed_on, self.taken_over)
        )
        return float(np.abs(self.held + passed_on - taken_over - self.initial).max())

    def serialize(self) -> bytes:
        """What it has and both books; JSON keeps every bit of a float."""
        books = [
            {peer: mass.tolist() for peer, mass in book.items()}
            for book in (self.passed_on, self.taken_over)
        ]
        return json.dumps([self.held.tolist(), *books]).encode()

    def restore(self, data: bytes) -> None:
        """Take up what `serialize` gave; ComponentError when it is not ours."""
        try:
            held, *saved = json.loads(data)
            passed_on, taken_over = (
                {peer: self._mass(mass) for peer, mass in book.items()} for book in saved
            )
            self.held = self._mass(held)
        except (ValueError, TypeError, AttributeError) as error:
            raise ComponentError(
                f"{self.TYPE_NAME}: the saved state is not ours; start this node without it"
            ) from error
        self.passed_on, self.taken_over = passed_on, taken_over

    def _mass(self, numbers: object) -> Mass:
        mass = np.array(numbers, np.float64)
        if mass.shape != self.initial.shape:
            raise ValueError(f"shape {mass.shape}, expected {self.initial.shape}")
        return mass

    def _known(self, book: dict[str, Mass], peer: str) -> Mass:
        if peer in book:
            return book[peer]
        if len(book) >= MAX_NEIGHBOURS:
            raise TooManyNeighbours(
                f"{peer} would be neighbour {MAX_NEIGHBOURS + 1}; connect fewer peers"
            )
        return np.zeros_like(self.initial)


class GossipAveraging(Module):
    """Every peer goes to the mean of all peers' vectors; nobody has to start it.

    Output "estimate" ([D] float64) on every peer, with each message that comes.
    """

    home = "peer"

    def __init__(self, *, period_ms: int = PERIOD_NS // MS) -> None:
        """`period_ms`: how often a peer passes on half of what it has."""
        self.period_ms = period_ms

    def body(self, g: Graph) -> None:
        neighbours = PeerSelectorSlot("neighbours", peer_class="peer")
        mass = ProtocolSlot("mass", "push_sum")

        tick = syscalls.interval(g, period_ns=self.period_ms * MS)
        neighbour = neighbours.sample(g, n=1, after=tick)
        share = g.net_out("share", neighbour, mass.share(g, neighbour))
        g.output("estimate", mass.merge(g, share))

    def bindings(self) -> Mapping[str, Any]:
        return {"neighbours": ConnectedView, "mass": PushSum}


def compile_program() -> ModelProto:
    """The program with its two components."""
    return (
        Compiler()
        .bind_peer_selector("neighbours", ConnectedView)
        .bind_protocol("mass", PushSum)
        .compile(GossipAveraging().build())
    )


def add_peer(
    network: Network,
    compiled: ModelProto,
    number: int,
    value: Sequence[float],
    clock: Clock | None = None,
) -> SimNode:
    """A peer that begins with `value`, and draws its neighbours from a seed of its own."""
    config: dict[str, dict[str, Any]] = {
        "mass": {"value": list(value)},
        "neighbours": {"seed": network.seed + number},
    }
    return network.add(f"peer-{number}", compiled, ["peer"], config=config, clock=clock)


def push_sum(node: SimNode) -> PushSum:
    """The component of a running peer."""
    found = node.component("mass")
    if not isinstance(found, PushSum):
        raise TypeError(f"{node.name} has {type(found).__name__} in the slot mass")
    return found


def disagreement(network: Network, mean: Mass) -> float:
    """How far the worst estimate is from the mean."""
    nodes = [node for node in network.nodes if node.is_up]
    return max(float(np.abs(push_sum(node).estimate() - mean).max()) for node in nodes)


def main() -> None:
    """Eight peers, a bad network, a split and a crash."""
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

    counts = network.counters()
    print(
        f"{counts['envelopes.sent']} messages, {counts['envelopes.lost']} lost, "
        f"{counts['envelopes.duplicated']} doubled"
    )
    print(f"peer-3 came back from what it had saved and says {push_sum(nodes[3]).estimate()}")
    print(f"books are even to {max(push_sum(node).imbalance() for node in nodes):.0e}")


if __name__ == "__main__":
    main()
