"""The methods in numpy, float64: softmax regression on each client, and what a server makes of it.

Rule: numpy alone, and one formula for each, as its paper has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[Any]  # float64

FEATURES: Final = 4
CLASSES: Final = 3
SIZES: Final = (20, 30, 45)  # examples of the clients
RATE: Final = 0.1
STEPS: Final = 3  # of each client in a round, each on all of its examples


@dataclass(frozen=True)
class Client:
    """The examples of a client, and softmax regression on them."""

    x: npt.NDArray[Any]  # [N, F]
    y: npt.NDArray[Any]  # [N] class numbers

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.y)

    def shares(self, w: Vector) -> Vector:
        """Return the probabilities of the classes, [N, C]."""
        features = self.x.shape[1]
        classes = len(w) // (features + 1)
        at = features * classes
        scores = self.x @ w[:at].reshape(features, classes) + w[at:]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def loss(self, w: Vector) -> float:
        """Return the mean cross-entropy."""
        return float(-np.log(self.shares(w)[np.arange(self.count), self.y]).mean())

    def gradients(self, w: Vector) -> Vector:
        """Return the gradient of each example's cross-entropy, [N, P]."""
        wrong = self.shares(w)
        wrong[np.arange(self.count), self.y] -= 1
        products = self.x[:, :, None] * wrong[:, None, :]
        return np.concatenate([products.reshape(self.count, -1), wrong], axis=1)

    def gradient(self, w: Vector) -> Vector:
        """Return the gradient of the mean cross-entropy, [P]."""
        return np.asarray(self.gradients(w).mean(axis=0))

    def trained(
        self, w: Vector, steps: int = STEPS, rate: float = RATE, *, proximal: float = 0.0,
        anchor: Vector | None = None, correction: Any = 0.0,
    ) -> Vector:  # fmt: skip
        """Return the weights after steps by g + `proximal` (w - `anchor`) + `correction`."""
        anchor = w if anchor is None else anchor
        for _ in range(steps):
            w = w - rate * (self.gradient(w) + proximal * (w - anchor) + correction)
        return w


def table(
    count: int, seed: int, features: int = FEATURES, classes: int = CLASSES, *,
    opposite: bool = False,
) -> Client:  # fmt: skip
    """Return examples that are labelled by one rule, or its opposite; float32 as in a file."""
    rule = np.random.default_rng(0).normal(size=(features, classes))
    x = np.random.default_rng([seed, count]).normal(size=(count, features)).astype(np.float32)
    return Client(x.astype(np.float64), (x @ (-rule if opposite else rule)).argmax(axis=1))


def clients() -> list[Client]:
    """Return clients that differ: in size, and the first one has the opposite labels."""
    return [table(count, at + 1, opposite=not at) for at, count in enumerate(SIZES)]


def mean(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """Return the mean, by weights where they are given."""
    return np.asarray(np.average(np.stack(vectors), axis=0, weights=weights))


# --- moves of the clients ---------------------------------------------------------------------

# What one round of clients says to the server: how it should move. State lasts from round to round.
Move = Callable[[Sequence[Client], Vector, dict[Any, Any]], Vector]


def fedavg(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
    """FedAvg: the mean move, by numbers of examples."""
    return mean([each.trained(w) - w for each in of], [each.count for each in of])


def fedprox(mu: float) -> Move:
    """FedProx: as FedAvg, with mu (w - w0) in each gradient."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        moves = [each.trained(w, proximal=mu) - w for each in of]
        return mean(moves, [each.count for each in of])

    return move


def scaffold(population: int = len(SIZES)) -> Move:
    """SCAFFOLD, algorithm 1, option II; the mean is of clients."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:
        c = state.setdefault("c", np.zeros_like(w))
        own = state.setdefault("own", {})
        moves, turns = [], []
        for client in of:
            c_i = own.get(id(client), np.zeros_like(w))
            y = client.trained(w, correction=c - c_i)
            own[id(client)] = c_i - c + (w - y) / (STEPS * RATE)
            moves.append(y - w)
            turns.append(own[id(client)] - c_i)
        state["c"] = c + len(of) / population * mean(turns)
        return mean(moves)

    return move


def fednova(
    steps: Sequence[int] = (STEPS,) * len(SIZES), momentum: float = 0.0, mu: float = 0.0
) -> Move:
    """FedNova, with the norms of section 5: client i makes `steps[i]`."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        directions, scales = [], []
        for client, count in zip(of, steps, strict=False):
            y, velocity = w, np.zeros_like(w)
            a: Vector = np.zeros(count)
            for k in range(count):
                velocity = momentum * velocity + client.gradient(y) + mu * (y - w)
                y = y - RATE * velocity
                a[: k + 1] += momentum ** (k - np.arange(k + 1))
            if mu:
                a = (1 - RATE * mu) ** (count - 1 - np.arange(count))
            directions.append((y - w) / a.sum())
            scales.append(count if mu else a.sum())
        counts = [each.count for each in of]
        return np.asarray(mean(directions, counts) * np.average(scales, weights=counts))

    return move


def qfedavg(q: float, lipschitz: float = 1 / RATE) -> Move:
    """q-FedAvg, algorithm 2."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        moves, hs = [], []
        for client in of:
            loss = client.loss(w)
            down = lipschitz * (w - client.trained(w))
            moves.append(loss**q * down)
            hs.append(q * loss ** (q - 1) * float(down @ down) + lipschitz * loss**q)
        return np.asarray(-sum(moves) / sum(hs))

    return move


def fedper(head_epochs: int = 0) -> Move:
    """FedPer with the bias local; FedRep where the head is trained for epochs of its own, first."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:
        kept = np.arange(len(w)) >= len(w) - CLASSES
        moves = []
        for client in of:
            y = np.where(kept, state.get(id(client), w), w)
            parts = [(kept, head_epochs), (~kept, STEPS)] if head_epochs else [(kept | True, STEPS)]
            for part, steps in parts:
                for _ in range(steps):
                    y = y - RATE * part * client.gradient(y)
            state[id(client)] = y
            moves.append(np.where(kept, 0, y - w))
        return mean(moves, [each.count for each in of])

    return move


def clipped(clip: float) -> Move:
    """DPFedAvg without its noise: moves of a length at most, over the number of clients."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        moves = [each.trained(w) - w for each in of]
        return mean([each * min(1.0, clip / float(np.linalg.norm(each))) for each in moves])

    return move


def fltrust(root: Client) -> Move:
    """FLTrust, algorithm 2: by the cosine with the server's own move, and of its length."""

    def move(of: Sequence[Client], w: Vector, state: dict[Any, Any]) -> Vector:  # noqa: ARG001
        own = root.trained(w) - w
        length = float(np.linalg.norm(own))
        moves = [each.trained(w) - w for each in of]
        sizes = [float(np.linalg.norm(each)) for each in moves]
        trust = [
            max(float(m @ own) / (size * length), 0.0) for m, size in zip(moves, sizes, strict=True)
        ]
        scaled = [m * length / size for m, size in zip(moves, sizes, strict=True)]
        return mean(scaled, trust)

    return move


# --- steps of the server ------------------------------------------------------------------------

Step = Callable[[Vector, dict[Any, Any]], Vector]


def added(rate: float = 1.0) -> Step:
    """The mean move, times a rate."""
    return lambda d, _: rate * d


def momentum(rate: float, share: float, *, nesterov: bool = False) -> Step:
    """FedAvgM; with Nesterov's look ahead, as DiLoCo has it."""

    def step(d: Vector, state: dict[Any, Any]) -> Vector:
        state["v"] = share * state.get("v", 0.0) + d
        return np.asarray(rate * (d + share * state["v"] if nesterov else state["v"]))

    return step


def adaptive(kind: str, rate: float, tau: float, betas: tuple[float, float] = (0.9, 0.99)) -> Step:
    """Algorithm 2 of Reddi et al.: "adagrad", "adam" or "yogi"; v begins with tau^2."""

    def step(d: Vector, state: dict[Any, Any]) -> Vector:
        v, square = state.get("v2", np.full_like(d, tau**2)), d**2
        if kind == "adagrad":
            state["m"], v = d, v + square
        else:
            state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * d
            if kind == "adam":
                v = betas[1] * v + (1 - betas[1]) * square
            else:
                v = v - (1 - betas[1]) * square * np.sign(v - square)
        state["v2"] = v
        return np.asarray(rate * state["m"] / (np.sqrt(v) + tau))

    return step


# --- optimizers of a client -----------------------------------------------------------------------


@dataclass
class Local:
    """Steps of an optimizer on a client's gradients; its state lasts."""

    kind: str
    rate: float
    more: dict[str, Any] = field(default_factory=dict)
    m: Any = 0.0
    v: Any = 0.0
    t: int = 0

    def step(self, w: Vector, g: Vector) -> Vector:
        """Return the weights after a step."""
        o, self.t = self.more, self.t + 1
        decay = o.get("weight_decay", 0.01 if self.kind == "adamw" else 0.0)
        if o.get("clip_value"):
            g = np.clip(g, -o["clip_value"], o["clip_value"])
        if o.get("clip_norm"):
            g = g * min(1.0, o["clip_norm"] / (float(np.linalg.norm(g)) + 1e-6))
        if self.kind not in ("adamw", "lion"):
            g = g + decay * w
        return np.asarray(getattr(self, f"_{self.kind}")(w, g, decay))

    def _sgd(self, w: Vector, g: Vector, _: float) -> Vector:
        share = self.more.get("momentum", 0.0)
        self.m = share * self.m + g
        ahead = g + share * self.m if self.more.get("nesterov") else self.m
        return np.asarray(w - self.rate * ahead)

    def _adam(self, w: Vector, g: Vector, _: float) -> Vector:
        a, b = self.more.get("betas", (0.9, 0.999))
        self.m, self.v = a * self.m + (1 - a) * g, b * self.v + (1 - b) * g**2
        m, v = self.m / (1 - a**self.t), self.v / (1 - b**self.t)
        return np.asarray(w - self.rate * m / (np.sqrt(v) + 1e-8))

    def _adamw(self, w: Vector, g: Vector, decay: float) -> Vector:
        return self._adam(w * (1 - self.rate * decay), g, decay)

    def _adagrad(self, w: Vector, g: Vector, _: float) -> Vector:
        self.v = self.v + g**2
        return np.asarray(w - self.rate * g / (np.sqrt(self.v) + 1e-10))

    def _rmsprop(self, w: Vector, g: Vector, _: float) -> Vector:
        self.v = 0.99 * self.v + 0.01 * g**2
        self.m = self.more.get("momentum", 0.0) * self.m + g / (np.sqrt(self.v) + 1e-8)
        return np.asarray(w - self.rate * self.m)

    def _yogi(self, w: Vector, g: Vector, _: float) -> Vector:
        if self.t == 1:
            self.v = np.full_like(g, 1e-6)
        self.m = 0.9 * self.m + 0.1 * g
        self.v = self.v - 0.001 * g**2 * np.sign(self.v - g**2)
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return np.asarray(w - self.rate * m / (np.sqrt(v) + 1e-3))

    def _lion(self, w: Vector, g: Vector, decay: float) -> Vector:
        way = np.sign(0.9 * self.m + 0.1 * g)
        self.m = 0.99 * self.m + 0.01 * g
        return np.asarray(w * (1 - self.rate * decay) - self.rate * way)


# --- rules against liars --------------------------------------------------------------------------


def krum_order(points: npt.NDArray[Any], liars: int) -> npt.NDArray[Any]:
    """Return the points by Krum's score, best first: to the n - f - 2 nearest others."""
    return _by_score(_squared_distances(points), liars)


def _squared_distances(points: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.stack([np.square(points - each).sum(axis=1) for each in points])


def _by_score(squared: npt.NDArray[Any], liars: int) -> npt.NDArray[Any]:
    near = max(len(squared) - liars - 2, 1)
    scores = [np.sort(np.delete(row, at))[:near].sum() for at, row in enumerate(squared)]
    return np.argsort(scores, kind="stable")


def bulyan(points: npt.NDArray[Any], liars: int) -> Vector:
    """n - 2 f by Krum one after the other; of each coordinate the mean of the n - 4 f near its
    median.
    """
    rest, squared = [*range(len(points))], _squared_distances(points)
    for _ in range(len(points) - 2 * liars):
        rest.remove(rest[int(_by_score(squared[np.ix_(rest, rest)], liars)[0])])
    picked = np.delete(points, rest, axis=0)
    order = np.argsort(np.abs(picked - np.median(picked, axis=0)), axis=0, kind="stable")
    kept = np.take_along_axis(picked, order, axis=0)[: len(points) - 4 * liars]
    return np.asarray(kept.mean(axis=0))


def geometric_median(points: npt.NDArray[Any], weights: npt.NDArray[Any]) -> Vector:
    """Return the point of least summed distance, by Weiszfeld's steps until they stand still."""
    alpha = weights / weights.sum()
    at = alpha @ points
    for _ in range(10_000):
        beta = alpha / np.maximum(np.linalg.norm(points - at, axis=1), 1e-6)
        new = beta @ points / beta.sum()
        if np.abs(new - at).max() < 1e-12:
            break
        at = new
    return np.asarray(at)
