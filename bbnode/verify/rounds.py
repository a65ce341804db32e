"""Rounds of a server and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bbnode.components import values
from bbnode.programs import (
    CyclicTraining,
    DiLoCo,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvgM,
    FedBuff,
    FederatedSGD,
    FederatedTraining,
    FedNova,
    FedOpt,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    FLTrustTraining,
    HierarchicalTraining,
    QFedAvg,
    Scaffold,
)
from bbnode.programs.parts import ControlVariates, InTurn, Trusted
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import RATE, SIZES, STEPS, Client, Move, Step, Vector
from bbnode.verify.runs import SOFTMAX, Star, written

ROUNDS = 3
ROOT = numpy_.table(12, 9)  # that a server trusts
EDGES: Final[Mapping[str, Any]] = {
    "selector": "bbnode.ConstantView", "clients": 2, "quorum": 1, "edges": 2,
}  # fmt: skip


def made(program: type[Any], **given: Any) -> Any:
    """Return a program of softmax regression."""
    known = {name: value for name, value in SOFTMAX.items() if name in program.arguments()}
    return program(**{**known, **given})


def by_formula(
    star: Star, move: Move = numpy_.fedavg, step: Step | None = None, rounds: int = ROUNDS
) -> Iterator[Compared]:
    """Compare the server's weights after each round with those of a move and a server's step."""
    w = star.start
    moved: dict[Any, Any] = {}
    stepped: dict[Any, Any] = {}
    step = step or numpy_.added()
    in_turn = isinstance(star.program.course, InTurn)
    groups = [[each] for each in star.in_turn] if in_turn else [star.peers]
    for number, found in enumerate(star.rounds(rounds), start=1):
        for group in groups:
            w = w + step(move(group, w, moved), stepped)
        yield Compared(found["model"], w, f"round {number}")


# --- FedAvg -------------------------------------------------------------------------------------


@checked("FedAvg", "fedavg", "the mean of clients' weights, by numbers of examples")
def _(folder: Path) -> Iterator[Compared]:
    yield from by_formula(Star(folder, made(FederatedTraining), numpy_.clients()))


@checked("FedAvg, deltas", "fedavg", "clients answer their moves, which the server adds")
def _(folder: Path) -> Iterator[Compared]:
    yield from by_formula(Star(folder, made(FederatedTraining, deltas=True), numpy_.clients()))


@checked("FedAvg, unweighted", "fedavg", "each client counts once")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(FederatedTraining, weighted=False), numpy_.clients())
    w = star.start
    for found in star.rounds(ROUNDS):
        w = numpy_.mean([client.trained(w) for client in star.peers])
        yield Compared(found["model"], w)


@checked("FedAvg, the largest", "fedavg", "a client counts for half of all at most")
def _(folder: Path) -> Iterator[Compared]:
    few = [numpy_.table(count, count) for count in (10, 20, 70)]
    star = Star(folder, made(FederatedTraining, batch=70), few)
    w = star.start
    for found in star.rounds(ROUNDS):
        w = numpy_.mean([client.trained(w) for client in few], [10, 20, 30])
        yield Compared(found["model"], w)


@checked("FedAvg, evaluation", "fedavg", "loss and accuracy of the new weights on the test")
def _(folder: Path) -> Iterator[Compared]:
    test = numpy_.table(40, 7)
    program = made(FederatedTraining, evaluate="server")
    server = {"test": written(folder, "test", test)}
    for found in Star(folder, program, numpy_.clients(), server=server).rounds(2):
        w = np.asarray(found["model"], np.float64)
        right = float((test.shares(w).argmax(axis=1) == test.y).mean())
        yield Compared(float(found["loss"]), test.loss(w), "loss")
        yield Compared(float(found["accuracy"]), right, "accuracy")


@checked("FederatedSGD", "fedavg", "steps by the mean gradient of clients, by their examples")
def _(folder: Path) -> Iterator[Compared]:
    program = made(FederatedSGD, epochs=1, evaluate=False)
    star = Star(folder, program, numpy_.clients())
    w, counts = star.start, [each.count for each in star.peers]
    for found in star.rounds(ROUNDS):
        loss = np.average([each.loss(w) for each in star.peers], weights=counts)
        w = w - RATE * numpy_.mean([each.gradient(w) for each in star.peers], counts)
        yield Compared(float(found["loss"]), loss, "loss")
        yield Compared(found["model"], w, "model")


# --- optimizers of the server ---------------------------------------------------------------------

SERVERS: dict[str, tuple[type[FedOpt], dict[str, Any], Step, str]] = {
    "FedOpt": (FedOpt, {"server_learning_rate": 0.5}, numpy_.added(0.5), "fedavg"),
    "FedAvgM": (
        FedAvgM, {"server_momentum": 0.8, "server_learning_rate": 0.5},
        numpy_.momentum(0.5, 0.8), "fedavgm",
    ),
    "FedAvgM, Nesterov": (
        FedAvgM, {"server_nesterov": True}, numpy_.momentum(1.0, 0.9, nesterov=True), "fedavgm",
    ),
    "FedAdagrad": (FedAdagrad, {"tau": 0.02}, numpy_.adaptive("adagrad", 0.1, 0.02), "fedadagrad"),
    "FedAdam": (FedAdam, {"tau": 0.02}, numpy_.adaptive("adam", 0.1, 0.02), "fedadam"),
    "FedYogi": (FedYogi, {"tau": 0.02}, numpy_.adaptive("yogi", 0.1, 0.02), "fedyogi"),
}  # fmt: skip


def _server(name: str) -> None:
    program, given, step, page = SERVERS[name]

    @checked(name, page, "the server's step with the mean move as its gradient")
    def _(folder: Path) -> Iterator[Compared]:
        star = Star(folder, made(program, **given), numpy_.clients())
        yield from by_formula(star, step=step, rounds=4)


for _name in SERVERS:
    _server(_name)


# --- clients that differ --------------------------------------------------------------------------

SLOW = {1: {"local": {"max_steps": 1}}}  # a client that makes one step of three
SLOW_STEPS = (STEPS, 1, STEPS)

CLIENTS: dict[str, tuple[type[FederatedTraining], dict[str, Any], Move, str, str]] = {
    "FedProx": (
        FedProx, {"proximal": 0.5}, numpy_.fedprox(0.5), "fedprox", "steps with mu (w - w0)",
    ),
    "SCAFFOLD": (
        Scaffold, {}, numpy_.scaffold(), "scaffold", "control variates, algorithm 1, option II",
    ),
    "SCAFFOLD, a part of all": (
        Scaffold, {"population": 10}, numpy_.scaffold(10), "scaffold", "c moves by |S| / N",
    ),
    "FedNova": (FedNova, {}, numpy_.fednova(), "fednova", "moves by the norm of their steps"),
    "q-FedAvg": (QFedAvg, {"q": 2.0}, numpy_.qfedavg(2.0), "qfedavg", "losses as weights"),
    "q-FedAvg, L": (
        QFedAvg, {"q": 0.5, "lipschitz": 5.0}, numpy_.qfedavg(0.5, 5.0), "qfedavg",
        "with a Lipschitz constant that is given",
    ),
    "FedPer": (
        FedPer, {"local": ("*.bias",)}, numpy_.fedper(), "fedper", "what is local stays",
    ),
    "FedRep": (
        FedRep, {"local": ("*.bias",), "head_epochs": 2}, numpy_.fedper(2), "fedrep",
        "the head first, then the shared part",
    ),
    "FLTrust": (FLTrustTraining, {}, numpy_.fltrust(ROOT), "fltrust", "trust by the cosine"),
}  # fmt: skip


def server_slots(folder: Path, program: Any) -> dict[str, Any]:
    """Return the settings of a server that has examples of its own, where it needs them."""
    needs = isinstance(program.combine, Trusted)
    return {"data": written(folder, "root", ROOT)} if needs else {}


def _client(name: str) -> None:
    program, given, move, page, about = CLIENTS[name]

    @checked(name, page, about)
    def _(folder: Path) -> Iterator[Compared]:
        one = made(program, **given)
        star = Star(folder, one, numpy_.clients(), server=server_slots(folder, one))
        start = star.start
        yield from by_formula(star, move)
        if isinstance(one.client, ControlVariates):
            # Once more in numpy: the variates themselves, which the weights show a round later.
            w = start
            state: dict[Any, Any] = {}
            for _ in range(ROUNDS):
                w = w + move(star.peers, w, state)
            yield Compared(star.server.component("control").params(None), state["c"], "c")
            for node, client in zip(star.nodes, star.peers, strict=True):
                own = node.component("own_control").params(None)
                yield Compared(own, state["own"][id(client)], "c_i")


for _name in CLIENTS:
    _client(_name)


@checked("FedProx, partial work", "fedprox", "a client that makes fewer steps counts as it is")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(FedProx, proximal=0.5), numpy_.clients(), settings=SLOW)
    w, counts = star.start, [each.count for each in star.peers]
    for found in star.rounds(ROUNDS):
        pairs = zip(star.peers, SLOW_STEPS, strict=True)
        w = numpy_.mean([c.trained(w, steps, proximal=0.5) for c, steps in pairs], counts)
        yield Compared(found["model"], w)


def _unequal(name: str, more: dict[str, float], about: str) -> None:
    @checked(f"FedNova, {name}", "fednova", about)
    def _(folder: Path) -> Iterator[Compared]:
        mu, share = more.get("proximal", 0.0), more.get("momentum", 0.0)
        star = Star(folder, made(FedNova, **more), numpy_.clients(), settings=SLOW)
        yield from by_formula(star, numpy_.fednova(SLOW_STEPS, share, mu))


_unequal("unequal work", {}, "the norm is the sum of the rates of the steps")
_unequal("momentum", {"momentum": 0.9}, "the norm of steps with a momentum")
_unequal("proximal", {"proximal": 0.5}, "the norm of steps with a proximal term")


@checked("Ditto", "ditto", "the common model, and each client's own near it")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(Ditto, proximal=0.5, personal_epochs=2), numpy_.clients())
    w = star.start
    own = [w] * len(star.peers)
    for found in star.rounds(ROUNDS):
        own = [
            client.trained(v, 2, proximal=0.5, anchor=w)
            for client, v in zip(star.peers, own, strict=True)
        ]
        w = w + numpy_.fedavg(star.peers, w, {})
        yield Compared(found["model"], w, "common")
        for node, v in zip(star.nodes, own, strict=True):
            yield Compared(node.component("personal").params(None), v, "own")


@checked("DiLoCo", "diloco", "steps of AdamW whose state stays, then Nesterov's momentum")
def _(folder: Path) -> Iterator[Compared]:
    steps = {"epochs": 1, "inner_steps": 5, "learning_rate": 0.01, "codec": None}
    star = Star(folder, made(DiLoCo, **steps), numpy_.clients())
    inner = [numpy_.Local("adamw", 0.01, {"weight_decay": 0.1}) for _ in star.peers]

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        moves = []
        for client, own in zip(of, inner, strict=True):
            y = w
            for _ in range(5):
                y = own.step(y, client.gradient(y))
            moves.append(y - w)
        return numpy_.mean(moves)

    yield from by_formula(star, move, numpy_.momentum(0.7, 0.9, nesterov=True), rounds=4)


# --- rounds of another shape ----------------------------------------------------------------------


@checked("Cyclic", "cyclic", "weights that go from client to client")
def _(folder: Path) -> Iterator[Compared]:
    yield from by_formula(Star(folder, made(CyclicTraining), numpy_.clients()))


@checked("Hierarchical", "hierarchical", "two levels are the mean of all clients")
def _(folder: Path) -> Iterator[Compared]:
    yield from by_formula(Star(folder, made(HierarchicalTraining, **EDGES), numpy_.clients()))


STALENESS: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 1.0,
    "polynomial": lambda d: (1 + d) ** -0.5,
    "hinge": lambda d: 1.0 if d <= 1 else 1 / (2.0 * (d - 1) + 1),
}


def _mixed_in(kind: str) -> None:
    @checked(f"FedAsync, {kind}", "fedasync", "updates of 0, 1 and 2 versions ago are mixed in")
    def _(folder: Path) -> Iterator[Compared]:
        given = {} if kind != "hinge" else {"hinge_slope": 2.0, "hinge_at": 1}
        star = Star(folder, made(FedAsync, staleness=kind, **given), numpy_.clients())
        w = start = star.start
        for node in star.nodes:
            node.invoke("client", {"tick": values.TRIGGER})
        star.net.run_until_idle()
        told = star.server.values("stats")
        for late, stats in enumerate(told):
            client = star.peers[SIZES.index(stats["num_samples"])]
            a = 0.6 * STALENESS[kind](late)
            w = (1 - a) * w + a * client.trained(start)
        yield Compared([stats["staleness"] for stats in told], [0, 1, 2], "staleness")
        yield Compared(star.start, w, "weights")


for _name in STALENESS:
    _mixed_in(_name)


@checked("FedBuff", "fedbuff", "the mean of a buffer of moves, each by 1 / sqrt(1 + staleness)")
def _(folder: Path) -> Iterator[Compared]:
    program = made(FedBuff, buffer=2, server_learning_rate=0.5)
    star = Star(folder, program, numpy_.clients())
    w = star.start
    # All begin at version 0; the third one's update is in the buffer when the others go on.
    for node in star.nodes:
        node.invoke("client", {"tick": values.TRIGGER})
    star.net.run_until_idle()
    (first,) = star.server.values("stats")
    late = _others(first["num_samples"])
    moves = {each.count: each.trained(w) - w for each in star.peers}
    w = w + 0.5 * sum(m for count, m in moves.items() if count != late) / 2
    yield Compared(star.start, w, "a full buffer")
    fresh = next(at for at, each in enumerate(star.peers) if each.count != late)
    star.begin(star.nodes[fresh])
    buffer = [moves[late] / np.sqrt(2), star.peers[fresh].trained(w) - w]
    yield Compared(star.start, w + 0.5 * sum(buffer) / 2, "one of them late")


def _others(of_two: int) -> int:
    """Return the size of the client whose examples are not in a sum of two."""
    return sum(SIZES) - of_two
