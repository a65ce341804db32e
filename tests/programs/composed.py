"""Programs of two parts, and what numpy makes of these, in float64.

Rule: a part is one formula here, as its paper has it; a pair is both formulas, and nothing that
knows of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.components import values
from bbnode.programs import FederatedTraining
from bbnode.programs.parts import (
    SGD,
    Adagrad,
    Adam,
    Alternating,
    Buffered,
    Bulyan,
    ClientPrivacy,
    Coded,
    ControlVariates,
    ExamplePrivacy,
    Fair,
    GeometricMedian,
    InnerSteps,
    InTurn,
    Krum,
    Layers,
    Masks,
    Median,
    Mixed,
    Momentum,
    MultiKrum,
    Normalised,
    NormClipping,
    OwnModel,
    Proximal,
    RoundPart,
    TrimmedMean,
    Trusted,
    TwoLevels,
    Yogi,
)
from bbnode.sim import Network, SimNode
from bbnode.verify import reference
from bbnode.verify.reference import CLASSES, FEATURES, RATE, STEPS, Client, Vector, table
from tests.programs.files import compiled

ROOT = table(12, 9)
# As many clients on each edge, and as many edges, as the rule with the greatest need of them takes.
COUNTS = (20, 30, 45, 25, 35, 40, 22, 28, 33)
EDGES = 3
LOUD = {"example_noise": 1e-6, "example_clip": 50.0, "example_epsilon": 1e30}
# Each part with settings by which it differs from all others.
PARTS: tuple[RoundPart, ...] = (
    InTurn(clients=len(COUNTS)),
    TwoLevels(clients=len(COUNTS) // EDGES, quorum=1, edges=EDGES, selector="bbnode.ConstantView"),
    Mixed(),
    Buffered(buffer=3),
    Masks(clip=4.0),
    ClientPrivacy(noise=1e-6, clip=9.0, epsilon=1e30),
    ExamplePrivacy(**LOUD),
    Layers(local=("*.bias",)),
    Alternating(local=("*.bias",), head_epochs=2),
    OwnModel(proximal=0.5, personal_epochs=2),
    Proximal(0.5),
    ControlVariates(),
    Normalised(),
    Fair(q=2.0),
    InnerSteps(inner_steps=2),
    Median(),
    TrimmedMean(byzantine=1),
    Krum(byzantine=0),
    MultiKrum(byzantine=0),
    Bulyan(byzantine=0),
    GeometricMedian(max_share=1.0),
    NormClipping(max_share=1.0),
    Trusted(),
    SGD(0.5),
    Momentum(0.5, server_momentum=0.8),
    Adagrad(tau=0.02),
    Adam(tau=0.02),
    Yogi(tau=0.02),
    Coded("bbnode.Float16Codec"),
)  # fmt: skip


def composed(*parts: RoundPart) -> FederatedTraining:
    """Return a program of parts: softmax regression, an epoch a step. Raises BadArgument."""
    given: dict[str, Any] = {part.slot: part for part in parts}
    if len(given) < len(parts):  # two of one slot
        given[parts[0].slot] = parts
    if {"course"} - given.keys():
        given |= {"clients": len(COUNTS), "quorum": 0 if "privacy" in given else len(COUNTS)}
    alone = not any(isinstance(part, InnerSteps) for part in parts)
    if "compress" in given and not any(isinstance(part, Mixed) for part in parts):
        given["deltas"] = True
    return FederatedTraining(
        model=(FEATURES, CLASSES), batch=max(COUNTS), learning_rate=RATE, evaluate="none",
        epochs=STEPS if alone else 1, **given,
    )  # fmt: skip


@dataclass
class Said:
    """A program in numpy: its parts, and what lasts from round to round."""

    parts: Sequence[RoundPart]
    start: Vector
    state: dict[Any, Any] = field(default_factory=dict)
    stepped: dict[Any, Any] = field(default_factory=dict)

    def part(self, *kinds: type) -> Any:
        """Return the part of a kind; None where there is none."""
        return next((each for each in self.parts if isinstance(each, kinds)), None)

    @property
    def weighted(self) -> bool:
        """True if answers weigh numbers of examples."""
        of_clients = ControlVariates, Fair, InnerSteps, Masks, ClientPrivacy
        return self.part(*of_clients) is None

    # --- a client ---

    def trained(self, client: Client, w: Vector) -> Vector:
        """Return what a client has after its training from w, which is all that it loaded."""
        alternating, proximal = self.part(Alternating), self.part(Proximal)
        if alternating:
            y = w
            for part, count in ((KEPT, alternating.head_epochs), (~KEPT, STEPS)):
                for _ in range(count):
                    y = y - RATE * part * client.gradient(y)
            return y
        if self.part(InnerSteps):
            return client.trained(w, self.part(InnerSteps).inner_steps)
        return client.trained(w, proximal=proximal.proximal if proximal else 0.0)

    def move(self, client: Client, w: Vector) -> Vector:
        """Return how far a client moves from w; what it keeps, it keeps in the state."""
        own = self.part(OwnModel)
        if own:
            mine = self.state.get(("own", id(client)), self.start)
            self.state["own", id(client)] = client.trained(
                mine, own.personal_epochs, proximal=own.proximal, anchor=w
            )
        if self.part(Layers):
            begin = np.where(KEPT, self.state.get(id(client), w), w)
            y = self.state[id(client)] = self.trained(client, begin)
            return np.where(KEPT, 0.0, y - begin)
        return self.trained(client, w) - w

    # --- the server ---

    def mean_move(self, of: Sequence[Client], w: Vector) -> Vector:
        """Return what the server makes of the answers of clients to w."""
        answers = [self.answer(client, w) for client in of]
        counts = [client.count if self.weighted else 1 for client in of]
        if self.part(TwoLevels):
            below = len(of) // EDGES
            ranges = [slice(at, at + below) for at in range(0, len(of), below)]
            answers = [self._rule(answers[each], counts[each], w) for each in ranges]
            counts = [sum(counts[each]) for each in ranges]
        made = self._rule(answers, counts, w)
        if self.part(Fair):
            return np.asarray(made[:-1] / made[-1])
        if self.part(ControlVariates):
            self.state["c"] = self.state.get("c", 0.0) + made[len(w) :]
            return made[: len(w)]
        return made

    def answer(self, client: Client, w: Vector) -> Vector:
        """Return what a client answers: its move, and what is behind it."""
        fair = self.part(Fair)
        if fair:
            loss, steep = client.loss(w), 1 / RATE
            down = steep * (client.trained(w) - w)
            h = fair.q * loss ** (fair.q - 1) * float(down @ down) + steep * loss**fair.q
            return np.append(loss**fair.q * down, h)
        if self.part(ControlVariates):
            c, own = self.state.get("c", np.zeros_like(w)), self.state.setdefault("c_i", {})
            c_i = own.get(id(client), np.zeros_like(w))
            move = client.trained(w, correction=c - c_i) - w
            own[id(client)] = c_i - c - move / (STEPS * RATE)
            return np.concatenate([move, own[id(client)] - c_i])
        # FedNova's norm is that of all others too, who make as many steps, and cancels.
        return self.move(client, w)

    def _rule(self, answers: Sequence[Vector], counts: Sequence[int], w: Vector) -> Vector:
        shared = ~KEPT if self.part(Layers) else slice(None)
        points, made = np.stack(answers)[:, shared], np.zeros(len(answers[0]))
        if self.part(Trusted):
            # The server's own training has the epochs of `train`.
            made = _trusting(points, ROOT.trained(w, 1 if self.part(InnerSteps) else STEPS) - w)
        else:
            rule = next((RULES[kind] for kind in RULES if self.part(kind)), _mean)
            made[shared] = rule(points, np.array(counts, np.float64))
        return made

    def step(self, d: Vector) -> Vector:
        """Return the server's step by a mean move."""
        part = next((each for each in self.parts if each.slot == "server"), None)
        return SERVERS[type(part)](part)(d, self.stepped) if part else d


KEPT = np.arange(FEATURES * CLASSES + CLASSES) >= FEATURES * CLASSES


def _mean(points: Vector, numbers: Vector) -> Vector:
    return np.asarray(np.average(points, axis=0, weights=numbers))


def _shortened(points: Vector, numbers: Vector) -> Vector:
    lengths = np.linalg.norm(points, axis=1)
    return _mean(points * np.minimum(1, np.median(lengths) / lengths)[:, None], numbers)


def _trusting(points: Vector, own: Vector) -> Vector:
    sizes, length = np.linalg.norm(points, axis=1), float(np.linalg.norm(own))
    trust = np.maximum(points @ own / (sizes * length), 0.0)
    return _mean(points * (length / sizes)[:, None], trust)


RULES: dict[type, Callable[[Vector, Vector], Vector]] = {
    Median: lambda points, _: np.median(points, axis=0),
    TrimmedMean: lambda points, _: np.sort(points, axis=0)[1:-1].mean(axis=0),
    Krum: lambda points, _: points[reference.krum_order(points, 0)[0]],
    MultiKrum: lambda points, _: points[reference.krum_order(points, 0)[: len(points) - 2]].mean(
        axis=0
    ),
    Bulyan: lambda points, _: reference.bulyan(points, 0),
    GeometricMedian: reference.geometric_median,
    NormClipping: _shortened,
}
SERVERS: dict[type, Callable[[Any], reference.Step]] = {
    SGD: lambda part: reference.added(part.server_learning_rate),
    Momentum: lambda part: reference.momentum(part.server_learning_rate, part.server_momentum),
    Adagrad: lambda part: reference.adaptive("adagrad", 0.1, part.tau),
    Adam: lambda part: reference.adaptive("adam", 0.1, part.tau),
    Yogi: lambda part: reference.adaptive("yogi", 0.1, part.tau),
}


class Composed:
    """A program on real nodes in the simulator, and its rounds."""

    def __init__(self, folder: Path, program: Any) -> None:
        self.program, self.net = program, Network(1, keys=True)
        artifact = compiled(program)
        # One has opposite labels; but in turn the server trusts no such client, and says so.
        alike = isinstance(program.course, InTurn) and isinstance(program.combine, Trusted)
        self.clients = [
            table(count, at + 1, opposite=not at and not alike) for at, count in enumerate(COUNTS)
        ]
        self.nodes: list[SimNode] = []
        self.edges: list[SimNode] = []
        for at, client in enumerate(self.clients):
            data = {"data": _written(folder, f"c{at}", client)}
            self.nodes.append(self.net.add(f"c{at}", artifact, ["client"], config=data))
        course = program.course
        if isinstance(course, TwoLevels):
            ids = [str(node.peer_id) for node in self.nodes]
            half = len(ids) // EDGES
            for at in range(EDGES):
                peers = {"cohort": {"peers": ids[at * half : (at + 1) * half]}}
                self.edges.append(self.net.add(f"edge-{at}", artifact, ["edge"], config=peers))
        own = isinstance(program.combine, Trusted)
        config = {"data": _written(folder, "root", ROOT)} if own else {}
        self.server = self.net.add("server", artifact, ["server"], config=config)
        self.net.run_until_idle()

    @property
    def weights(self) -> Vector:
        """The server's weights, float64."""
        return np.asarray(self.server.component("global").params(None)).astype(np.float64)

    @property
    def in_order(self) -> list[Client]:
        """The clients by their PeerIds, and those of an edge by that of the edge first."""
        pairs, below = [*zip(self.nodes, self.clients, strict=True)], len(self.nodes) // EDGES
        groups = [pairs]
        if self.edges:
            asked = sorted(range(EDGES), key=lambda at: self.edges[at].peer_id)
            groups = [pairs[at * below : (at + 1) * below] for at in asked]
        return [c for each in groups for _, c in sorted(each, key=lambda pair: pair[0].peer_id)]

    def round(self, node: SimNode | None = None) -> None:
        """Make a round of the server, or a turn of a client; none of it may fail."""
        one = node or self.server
        (target,) = one.classes
        one.invoke(target, {"tick": values.TRIGGER})
        self.net.run_until_idle()
        failed = [str(each) for every in self.net.nodes for each in every.failures()]
        assert not failed, failed


def _written(folder: Path, name: str, client: Client) -> dict[str, str]:
    path = folder / f"{name}.npz"
    np.savez(path, x=client.x.astype(np.float32), y=client.y)
    return {"path": str(path)}


def deviation(folder: Path, program: Any, parts: Sequence[RoundPart], rounds: int = 2) -> float:
    """Make rounds of a program; return how far its weights are from numpy's, and own models."""
    made = Composed(folder, program)
    w, order = made.weights, made.in_order
    said = Said(parts, w)
    for _ in range(rounds):
        if said.part(Mixed):
            for node, client in zip(made.nodes, made.clients, strict=True):
                made.round(node)
                w = w + 0.6 * said.move(client, w)
        elif said.part(Buffered):
            for at in range(0, len(made.nodes), 3):
                for node in made.nodes[at : at + 3]:
                    made.round(node)
                moves = [said.move(client, w) for client in made.clients[at : at + 3]]
                w = w + said.step(_mean(np.stack(moves), np.ones(3)))
        elif said.part(InTurn):
            made.round()
            for client in order:
                w = w + said.step(said.mean_move([client], w))
        else:
            made.round()
            w = w + said.step(said.mean_move(order, w))
    far = float(np.abs(made.weights - w).max())
    if said.part(OwnModel):
        for node, client in zip(made.nodes, made.clients, strict=True):
            own = np.asarray(node.component("personal").params(None))
            far = max(far, float(np.abs(own - said.state["own", id(client)]).max()))
    return far
