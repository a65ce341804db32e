"""A federation in the simulator, and what numpy says of the same clients, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components import values
from bbnode.programs import FederatedTraining
from bbnode.sim import Network, SimNode
from tests.programs.files import CLASSES, FEATURES, compiled, examples

SIZES = (20, 30, 50)
RATE = 0.1
Vector = np.ndarray


# The arguments of a federation whose clients' training is a formula: a linear model with
# cross-entropy, and batches of all examples, so that each epoch is one step.
SOFTMAX: dict[str, Any] = {
    "model": (FEATURES, CLASSES),
    "clients": len(SIZES),
    "batch": max(SIZES),
    "epochs": 3,
    "learning_rate": RATE,
    "evaluate": "none",
}


@dataclass(frozen=True)
class Client:
    """The examples of a client."""

    x: Vector
    y: Vector

    @property
    def count(self) -> int:
        return len(self.y)

    def loss(self, w: Vector) -> float:
        return float(-np.log(self._shares(w)[np.arange(self.count), self.y]).mean())

    def gradient(self, w: Vector) -> Vector:
        wrong = self._shares(w)
        wrong[np.arange(self.count), self.y] -= 1
        wrong /= self.count
        return np.concatenate([(self.x.T @ wrong).reshape(-1), wrong.sum(axis=0)])

    def trained(self, w: Vector, steps: int = 3, rate: float = RATE, **more: Any) -> Vector:
        """Return the weights after steps by g + `proximal` (w - `anchor`) + `correction`."""
        anchor, correction = more.get("anchor", w), more.get("correction", 0.0)
        for _ in range(steps):
            pull = more.get("proximal", 0.0) * (w - anchor) + correction
            w = w - rate * (self.gradient(w) + pull)
        return w

    def _shares(self, w: Vector) -> Vector:
        at = FEATURES * CLASSES
        scores = self.x @ w[:at].reshape(FEATURES, CLASSES) + w[at:]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


class Federation:
    """A server and its clients, in the order of their PeerIds."""

    def __init__(
        self,
        folder: Path,
        program: FederatedTraining,
        others: Sequence[FederatedTraining | None] = (),
        slots: Sequence[str] = ("data",),
        settings: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        keys: bool = False,
    ) -> None:
        """Set up the program; client i runs `others[i]` where it is there.

        `settings`: of the slots of clients, by name; `server`: of the server's slots; `keys`: nodes
        have some to sign with.
        """
        self.net, self.program = Network(1, keys=keys), program
        artifact = compiled(program)
        self.server = self.net.add("server", artifact, ["server"], config=server or {})
        self.nodes: list[SimNode] = []
        self.clients: list[Client] = []
        for i, count in enumerate(SIZES):
            data = {"path": examples(folder, f"c{i}", count, seed=i)}
            other = others[i] if i < len(others) else None
            made = artifact if other is None else compiled(other)
            config = {**dict.fromkeys(slots, data), **(settings or {}).get(f"c{i}", {})}
            self.nodes.append(self.net.add(f"c{i}", made, ["client"], config=config))
            held = np.load(data["path"])
            self.clients.append(Client(held["x"].astype(np.float64), held["y"]))
        self.weights = [client.count / sum(SIZES) for client in self.clients]

    @property
    def start(self) -> Vector:
        """The weights that the server begins with."""
        self.net.run_until_idle()
        return np.asarray(self.server.component("global").params(None)).astype(np.float64)

    def rounds(self, count: int, server: str = "server") -> Iterator[dict[str, Any]]:
        """Make rounds, none of which may fail on the server; yield what each gives."""
        for _ in range(count):
            execution = self.server.invoke(server, {"tick": values.TRIGGER})
            self.net.run_until_idle()
            assert self.server.failures() == []
            yield self.server.outputs(execution)

    def mean(self, vectors: Sequence[Vector]) -> Vector:
        """Return the mean by numbers of examples."""
        return sum(w * v for w, v in zip(self.weights, vectors, strict=True))


def close(found: Any, expected: Vector, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance)


def normalised() -> ModelProto:
    """x @ w, normalised, then @ head."""
    rng = np.random.default_rng(3)
    tensors = {
        "w": rng.normal(size=(FEATURES, 5)), "bn.scale": np.ones(5), "bn.bias": np.zeros(5),
        "bn.mean": np.zeros(5), "bn.var": np.ones(5), "head": rng.normal(size=(5, CLASSES)),
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node(
            "BatchNormalization", ["h", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["n"]
        ),
        helper.make_node("MatMul", ["n", "head"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "normalised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(t.astype(np.float32), name) for name, t in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
