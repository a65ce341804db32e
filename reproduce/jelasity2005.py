"""How fast push-pull averaging takes the variance away, by how the pairs are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bbnode.compiler import Compiler
from bbnode.components import DrawingSelector, OpContext, register_component
from bbnode.ir.peer import PeerId
from bbnode.programs import PairwiseAveraging
from bbnode.sim import MS, LinkModel, Network, S, SimNode
from reproduce.experiment import Claim, Experiment, Result, Table, near, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = 100
CYCLES = 4
COLUMNS = 400  # independent values that each peer averages at once
DRAWN = 60  # runs in numpy, that say what so few peers are expected to do, and how they spread


def matching(peers: Sequence[PeerId], number: int, seed: int) -> dict[PeerId, PeerId]:
    """Return the pairs of a perfect matching, both ways; those of 2k and 2k + 1 are disjoint."""
    order = np.random.default_rng([seed, number // 2]).permutation(len(peers))
    order = np.roll(order, number % 2)
    pairs = [(peers[a], peers[b]) for a, b in order.reshape(-1, 2)]
    return {**dict(pairs), **{b: a for a, b in pairs}}


@register_component
class MatchedView(DrawingSelector):
    """A peer's partner in the matching of the present second (GETPAIR_PM)."""

    TYPE_NAME: ClassVar[str] = "reproduce.MatchedView"

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        peers = sorted({*ctx.peers.connected(ctx.peer_class), ctx.self_peer})
        return [matching(peers, ctx.now_ns // S, self._seed)[ctx.self_peer]]


Begin = Callable[[SimNode], None]


def perfect(
    net: Network,
    nodes: Sequence[SimNode],
    begin: Begin,
    rng: Any,  # noqa: ARG001
    seed: int,
) -> None:
    """Let two disjoint perfect matchings exchange."""
    first = net.now_ns // S + 1
    for number in (first + first % 2, first + first % 2 + 1):
        net.run(number * S)
        pairs = matching(sorted(node.peer_id for node in nodes), number, seed)
        for node in nodes:
            if node.peer_id < pairs[node.peer_id]:
                begin(node)


def sequential(
    net: Network,  # noqa: ARG001
    nodes: Sequence[SimNode],
    begin: Begin,
    rng: Any,
    seed: int,  # noqa: ARG001
) -> None:
    """Let each peer begin one exchange."""
    for at in rng.permutation(len(nodes)):
        begin(nodes[at])


def random(
    net: Network,  # noqa: ARG001
    nodes: Sequence[SimNode],
    begin: Begin,
    rng: Any,
    seed: int,  # noqa: ARG001
) -> None:
    """Let as many peers begin an exchange, drawn at random."""
    for at in rng.integers(len(nodes), size=len(nodes)):
        begin(nodes[at])


KINDS: dict[str, tuple[Any, float, str, dict[str, Any]]] = {
    "perfect matchings (PM)": (perfect, 1 / 4, "1/4", {"selector": MatchedView}),
    "each peer in turn (SEQ)": (sequential, 1 / (2 * math.sqrt(math.e)), "1/(2 sqrt e)", {}),
    "random pairs (RAND)": (random, 1 / math.e, "1/e", {}),
}


def drawn_factors(cycle: Any, seed: int) -> np.ndarray:
    """Return the factor a cycle of many runs in numpy, of as many peers and columns."""
    rng, found = np.random.default_rng([seed, 3]), []
    for _ in range(DRAWN):
        held = rng.normal(size=(PEERS, COLUMNS))
        before = held.var(axis=0, ddof=1).mean()
        for _ in range(CYCLES):
            if cycle is perfect:
                order = rng.permutation(PEERS)
                for turn in (0, 1):
                    pairs = np.roll(order, turn).reshape(-1, 2)
                    held[pairs] = held[pairs].mean(axis=1, keepdims=True)
                continue
            begins = rng.permutation(PEERS)
            for i in begins if cycle is sequential else rng.integers(PEERS, size=PEERS):
                j = (i + rng.integers(1, PEERS)) % PEERS
                held[[i, j]] = held[[i, j]].mean(axis=0)
        found.append((held.var(axis=0, ddof=1).mean() / before) ** (1 / CYCLES))
    return np.array(found)


def variances(seed: int, cycle: Any, given: dict[str, Any]) -> Iterator[float]:
    """Yield the variance over the peers, at the start and after each cycle."""
    program = PairwiseAveraging(size=COLUMNS, **given)
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    net = Network(seed, link=LinkModel(latency_ns=1 * MS))
    nodes = [
        net.add(f"peer-{i}", artifact, ["peer"], config={"cohort": {"seed": seed}})
        for i in range(PEERS)
    ]
    net.run_until_idle()
    rng = np.random.default_rng(seed)
    values = dict(zip(nodes, rng.normal(size=(PEERS, COLUMNS)).astype(np.float32), strict=True))
    for node, value in values.items():
        node.component("mean").contribute(_Here(node.peer_id), value)

    def begin(node: SimNode) -> None:
        node.invoke("peer", {"value": values[node]})
        net.run(net.now_ns + 10 * MS)

    def variance() -> float:
        held = np.stack([node.component("mean").held for node in nodes])
        return float(held.var(axis=0, ddof=1).mean())

    yield variance()
    for _ in range(CYCLES):
        cycle(net, nodes, begin, rng, seed)
        yield variance()


class _Here:
    """The part of a context that a contribution reads."""

    def __init__(self, peer: Any) -> None:
        self.self_peer = peer


def run(seed: int) -> Result:
    rows, claims, curves = [], [], {}
    for name, (cycle, factor, text, given) in KINDS.items():
        found = list(variances(seed, cycle, given))
        ours = (found[-1] / found[0]) ** (1 / CYCLES)
        curves[name] = (found, factor)
        drawn = drawn_factors(cycle, seed)
        rows.append([name, ours, float(drawn.mean()), factor, text])
        claims += [
            near(
                f"{name}: the factor of a cycle is that of as many peers in numpy",
                ours, float(drawn.mean()), float(drawn.std()),
            ),
            within(f"{name}: it is {text} to a tenth", ours / factor, 0.9, 1.1),
        ]  # fmt: skip
    order = [row[1] for row in rows]
    claims.append(
        Claim(
            "matchings are faster than peers in turn, and these than random pairs",
            order == sorted(order),
            ", ".join(f"{each:.3f}" for each in order),
        )
    )
    title = f"Variance after a cycle, as a part of that before; {PEERS} peers, {CYCLES} cycles"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for color, (name, (found, factor)) in enumerate(curves.items()):
            cycles = np.arange(len(found))
            axes.semilogy(cycles, found, "o-", color=f"C{color}", label=name)
            axes.semilogy(cycles, found[0] * factor**cycles, "--", color=f"C{color}", linewidth=1)
        axes.set_xlabel("cycle")
        axes.set_ylabel("variance over the peers")
        axes.set_title("dashed: the paper's factors", fontsize="medium")
        axes.legend()

    return Result(
        [Table(title, ("pairs", "ours", "numpy", "paper", "formula"), rows)], claims, draw
    )


EXPERIMENT = Experiment(
    paper="Jelasity, Montresor and Babaoglu, 2005, doi:10.1145/1082469.1082470, section 3",
    says=f"variance a cycle of push-pull averaging for three ways to draw pairs, {PEERS} peers "
    f"and {COLUMNS} values each; the paper has thousands of peers",
    page="docs/methods/gossip-averaging.md",
    run=run,
    methods=["PairwiseAveraging"],
)
