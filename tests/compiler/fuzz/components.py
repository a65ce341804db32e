"""Components of the random programs: small enough that the oracle can say what they do.

Rule: a model is one vector that the program sets before it reads it, an aggregator a sum, an
index finds what was added first, and a codec adds one. A fuse that is
lit makes one call fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from bbnode.components import ReferenceBackend
from bbnode.components.contracts import (
    Aggregator,
    Codec,
    ComponentError,
    Index,
    Model,
    PeerSelector,
    PreparedGraph,
)
from bbnode.components.registry import component_class, register_component
from bbnode.ir import types
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import Metadata, PeerIdVec, SearchResults


class Fuse:
    """Counts the calls of ops on components, and fails one of them once it is lit."""

    def __init__(self) -> None:
        self.calls = 0
        self.burns_at: int | None = None

    def light(self, number: int | None) -> None:
        """Count anew; the call of that number, from 0, will fail."""
        self.calls, self.burns_at = 0, number

    def call(self, op: str) -> None:
        self.calls += 1
        if self.calls - 1 == self.burns_at:
            raise ComponentError(f"the fuse burned in {op}")


FUSE = Fuse()  # of all components of this file
_OPS = (
    "forward", "load_parameters", "apply_delta", "params", "current_view", "contribute_all",
    "aggregate", "encode", "decode", "add", "search",
)  # fmt: skip


def _fused(op: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        FUSE.call(op)
        return method(*given, **named)

    return called


def _once(cls: Any) -> Any:
    for op in _OPS:
        if op in vars(cls):
            setattr(cls, op, _fused(op, vars(cls)[op]))
    try:
        return component_class(cls.TYPE_NAME)
    except BbnodeError:
        return register_component(cls)


class _FusedGraph:
    def __init__(self, graph: PreparedGraph) -> None:
        self._graph = graph

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        FUSE.call("graph")
        return self._graph.run(inputs)


@_once
class FusedBackend(ReferenceBackend):
    TYPE_NAME: ClassVar[str] = "fuzz.FusedBackend"

    def build_graph(self, model: ModelProto) -> PreparedGraph:
        return _FusedGraph(super().build_graph(model))


@_once
class VectorModel(Model):
    TYPE_NAME: ClassVar[str] = "fuzz.VectorModel"
    # One type at each port: what nobody reads would else keep the type of all of them.
    storage: ClassVar[dict[str, types.TypeNode]] = {"*": types.TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state = np.zeros(1, np.float32)

    def forward(self, ctx, batch):
        return np.asarray(batch) + self.state

    def load_parameters(self, ctx, params):
        self.state = np.array(params)

    def apply_delta(self, ctx, delta):
        self.state = self.state + np.asarray(delta)

    def params(self, ctx):
        return self.state.copy()

    def compute_loss(self, ctx, batch, target):
        raise ComponentError("not used here")

    def backward(self, ctx, grad):
        raise ComponentError("not used here")

    def step(self, ctx, grads):
        raise ComponentError("not used here")

    def train(self, ctx, *, epochs, batch):
        raise ComponentError("not used here")


@_once
class Everybody(PeerSelector):
    TYPE_NAME: ClassVar[str] = "fuzz.Everybody"

    def current_view(self, ctx):
        return PeerIdVec(ctx.peers.connected(ctx.peer_class))

    def sample(self, ctx, *, n):
        return PeerIdVec(list(self.current_view(ctx))[:n])

    def select(self, ctx, key, *, mode, n):
        raise ComponentError("not used here")


@_once
class Sum(Aggregator):
    TYPE_NAME: ClassVar[str] = "fuzz.Sum"
    answers = types.TENSOR

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state = np.zeros(1, np.float32)

    def contribute(self, ctx, tensor, metadata):
        raise ComponentError("not used here")

    def contribute_all(self, ctx, responses):
        self.state = sum((np.asarray(v) for _, v in responses.responses), np.zeros(1, np.float32))

    def aggregate(self, ctx):
        return self.state, Metadata()

    def current_tensor(self, ctx):
        return self.state


@_once
class PlusOne(Codec):
    TYPE_NAME: ClassVar[str] = "fuzz.PlusOne"
    storage: ClassVar[dict[str, types.TypeNode]] = {"*": types.TENSOR_FLOAT}

    def encode(self, ctx, tensor):
        return np.asarray(tensor) + 1

    def decode(self, ctx, code):
        return np.asarray(code) - 1

    def train(self, ctx, training):
        raise ComponentError("not used here")


@_once
class FirstAdded(Index):
    TYPE_NAME: ClassVar[str] = "fuzz.FirstAdded"
    storage: ClassVar[dict[str, types.TypeNode]] = {"*": types.TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state: list[Any] = []

    def add(self, ctx, vector, metadata=None, id=None):  # noqa: A002
        self.state.append(np.array(vector))
        return np.array(len(self.state) - 1)

    def search(self, ctx, query, where=None, *, k):
        total = np.sum(query)
        found = (float(np.sum(v) + total) for v in self.state[:k])
        return SearchResults.of_pairs(enumerate(found))

    def remove(self, ctx, item):
        raise ComponentError("not used here")

    def train(self, ctx, training):
        raise ComponentError("not used here")
