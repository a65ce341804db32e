"""Training on a client: optimizers, their settings, losses and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.programs import FederatedTraining
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import CLASSES, Client, Vector
from bbnode.verify.rounds import ROUNDS, made
from bbnode.verify.runs import Star

EPOCHS = 4


def _optimizer(name: str, kind: str, rate: float, more: dict[str, Any], about: str) -> None:
    @checked(f"client: {name}", "fedavg", about)
    def _(folder: Path) -> Iterator[Compared]:
        given = {"optimizer": kind, "learning_rate": rate, "keep_optimizer_state": True, **more}
        program = made(FederatedTraining, clients=1, epochs=EPOCHS, **given)
        star = Star(folder, program, [numpy_.table(40, 3)])
        (client,), w = star.peers, star.start
        own = numpy_.Local(kind, rate, more)
        for number, found in enumerate(star.rounds(ROUNDS), start=1):
            for _ in range(EPOCHS):
                w = own.step(w, client.gradient(w))
            yield Compared(found["model"], w, f"round {number}")


for _kind in ("sgd", "adam", "adamw", "adagrad", "rmsprop", "yogi", "lion"):
    _optimizer(_kind, _kind, 0.02, {}, "steps on all examples, the state kept over rounds")
for _name, _kind, _more in (
    ("momentum", "sgd", {"momentum": 0.9}),
    ("Nesterov", "sgd", {"momentum": 0.9, "nesterov": True}),
    ("weight decay", "sgd", {"weight_decay": 0.1}),
    ("decoupled weight decay", "adamw", {"weight_decay": 0.3}),
    ("RMSprop with momentum", "rmsprop", {"momentum": 0.5}),
    ("betas", "adam", {"betas": (0.5, 0.6)}),
    ("clip_norm", "sgd", {"clip_norm": 0.05}),
    ("clip_value", "sgd", {"clip_value": 0.02}),
):
    _optimizer(_name, _kind, 0.05, _more, f"steps of {_kind} with {', '.join(_more)}")


@checked("client: state begun anew", "fedavg", "a momentum that each round begins with 0")
def _(folder: Path) -> Iterator[Compared]:
    program = made(FederatedTraining, clients=1, epochs=EPOCHS, momentum=0.9)
    star = Star(folder, program, [numpy_.table(40, 3)])
    (client,), w = star.peers, star.start
    for found in star.rounds(ROUNDS):
        own = numpy_.Local("sgd", 0.1, {"momentum": 0.9})
        for _ in range(EPOCHS):
            w = own.step(w, client.gradient(w))
        yield Compared(found["model"], w)


@checked("client: batches", "fedavg", "the mean of two batches is one step, and a rest is one too")
def _(folder: Path) -> Iterator[Compared]:
    # Forty equal examples: batches of twenty differ in nothing but their number.
    one = numpy_.table(1, 3)
    client = Client(np.repeat(one.x, 40, axis=0), np.repeat(one.y, 40))
    for accumulate, steps in ((1, 2), (2, 1), (3, 1)):
        given = {"batch": 20, "epochs": 1, "accumulate": accumulate}
        star = Star(folder, made(FederatedTraining, clients=1, **given), [client])
        w = star.start
        (found,) = star.rounds(1)
        yield Compared(found["model"], client.trained(w, steps), f"accumulate={accumulate}")


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "step": ({"decay_steps": 3, "decay_factor": 0.5}, lambda n: 0.5 ** (n // 3)),
    "exponential": ({"decay_steps": 3, "decay_factor": 0.5}, lambda n: 0.5 ** (n / 3)),
    "linear": (
        {"decay_steps": 8, "final_rate": 0.01}, lambda n: 1 + (0.1 - 1) * min(n / 8, 1),
    ),
    "cosine": (
        {"decay_steps": 8, "final_rate": 0.01},
        lambda n: 0.1 + 0.9 * (1 + np.cos(np.pi * min(n / 8, 1))) / 2,
    ),
}  # fmt: skip


def _schedule(name: str) -> None:
    more, factor = SCHEDULES[name]

    @checked(f"client: {name} schedule", "fedavg", "the learning rate over the steps of all rounds")
    def _(folder: Path) -> Iterator[Compared]:
        program = made(FederatedTraining, clients=1, epochs=EPOCHS, schedule=name, **more)
        star = Star(folder, program, [numpy_.table(40, 3)])
        (client,), w, n = star.peers, star.start, 0
        for found in star.rounds(ROUNDS):
            for _ in range(EPOCHS):
                w = w - 0.1 * factor(n) * client.gradient(w)
                n += 1
            yield Compared(found["model"], w)


for _name in SCHEDULES:
    _schedule(_name)


def _loss(name: str, labels: bool, loss: Callable[[Vector, Any], tuple[float, Vector]]) -> None:
    """Check a loss of scores [N, C] and labels: its value, and its gradient by the scores."""

    @checked(f"loss: {name}", "fedavg", "a step down the gradient, and the loss on a test")
    def _(folder: Path) -> Iterator[Compared]:
        width = CLASSES if labels else 1
        given = {"model": (4, width), "loss": name, "evaluate": "server", "epochs": 1}
        of = numpy_.table(40, 3)
        y = of.y if labels else (of.x[:, :1] * 0.7 + 0.2).astype(np.float32).astype(np.float64)
        if name in ("bce_with_logits",):
            y = (of.y % 2).reshape(-1, 1).astype(np.float64)
        client = Client(of.x, y)
        server = {"test": {"path": str(folder / "c0.npz")}}
        program = made(FederatedTraining, clients=1, **given)
        np.savez(folder / "c0.npz", x=client.x.astype(np.float32), y=_stored(y, labels))
        star = Star(folder, program, [Client(of.x, _stored(y, labels))], server=server)
        w = star.start
        for found in star.rounds(2):
            at = 4 * width
            _, by_scores = loss(client.x @ w[:at].reshape(4, width) + w[at:], y)
            grads = np.concatenate([(client.x.T @ by_scores).ravel(), by_scores.sum(axis=0)])
            w = w - 0.1 * grads
            value, _ = loss(client.x @ w[:at].reshape(4, width) + w[at:], y)
            yield Compared(found["model"], w, "weights")
            yield Compared(float(found["loss"]), value, "loss")


def _stored(y: Any, labels: bool) -> Any:
    return y if labels else y.astype(np.float32)


def _cross_entropy(scores: Vector, y: Any) -> tuple[float, Vector]:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    value = float(-np.log(shares[rows, y]).mean())
    shares[rows, y] -= 1
    return value, shares / len(y)


def _bce(scores: Vector, y: Vector) -> tuple[float, Vector]:
    shares = 1 / (1 + np.exp(-scores))
    value = float(-(y * np.log(shares) + (1 - y) * np.log(1 - shares)).mean())
    return value, (shares - y) / y.size


def _mse(scores: Vector, y: Vector) -> tuple[float, Vector]:
    return float(np.square(scores - y).mean()), 2 * (scores - y) / y.size


def _mae(scores: Vector, y: Vector) -> tuple[float, Vector]:
    return float(np.abs(scores - y).mean()), np.sign(scores - y) / y.size


def _huber(scores: Vector, y: Vector) -> tuple[float, Vector]:
    apart = scores - y
    inside = np.abs(apart) <= 1
    value = np.where(inside, apart**2 / 2, np.abs(apart) - 0.5).mean()
    return float(value), np.where(inside, apart, np.sign(apart)) / y.size


_loss("softmax_cross_entropy", True, _cross_entropy)
_loss("bce_with_logits", False, _bce)
_loss("mse", False, _mse)
_loss("mae", False, _mae)
_loss("huber", False, _huber)
