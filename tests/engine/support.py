"""Components and a pump for engine tests.

Rule: virtual time only; what a test's components do is decided by the test.
"""

# ruff: noqa: ARG005 - components and policies have fixed signatures

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx
from multiaddr import Multiaddr

from bbnode.components.contracts import (
    PENDING,
    Aggregator,
    Backend,
    DataSource,
    Model,
    PeerSelector,
    PreparedGraph,
    offload,
)
from bbnode.components.registry import component_class, register_component
from bbnode.engine import Limits, Node, install, steps
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, PeerIdVec, Value

MS = 1_000_000
S = 1_000_000_000


def address(i: int) -> Multiaddr:
    return Multiaddr(f"/ip4/10.0.{i // 256}.{i % 256}/tcp/1")


def peer(seed: int) -> PeerId:
    return PeerId.from_seed(seed)


class Boom(Exception):
    """What a careless component raises."""


def _once(cls):
    """Register a test component, also when this module is imported a second time."""
    try:
        return component_class(cls.TYPE_NAME)
    except BbnodeError:
        return register_component(cls)


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    start: float = 0.0
    peers: tuple[str, ...] = ()


@_once
class ScriptModel(Model):
    """A model whose parameters are one number; what it was asked is in `calls`."""

    TYPE_NAME: ClassVar[str] = "test.ScriptModel"
    Config = ScriptConfig

    def __init__(self, config: ScriptConfig) -> None:
        super().__init__(config)
        self.value = np.full(1, config.start, np.float32)
        self.calls: list[str] = []
        self.completion: Any = None
        self.raises: BaseException | None = None
        self.returns: Any = None

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.raises is not None:
            raise self.raises

    def forward(self, ctx, batch):
        self._note("forward")
        return self.returns if self.returns is not None else np.asarray(batch) + self.value

    def compute_loss(self, ctx, batch, target):
        self._note("compute_loss")
        self.completion = ctx.open_completion()
        return PENDING

    def backward(self, ctx, grad):
        self._note("backward")

    def step(self, ctx, grads):
        self._note(f"step {grads}")

    def apply_delta(self, ctx, delta):
        self._note("apply_delta")

    def load_parameters(self, ctx, params):
        self._note(f"load {float(np.asarray(params)[0])}")
        self.value = np.array(params, np.float32)

    def params(self, ctx):
        self._note("params")
        return self.value.copy()

    @offload
    def train(self, ctx, *, epochs, batch):
        self._note(f"train {epochs} {batch}")
        self.value = self.value + epochs
        return Metadata(num_samples=batch)

    def serialize(self) -> bytes:
        return self.value.tobytes()

    def restore(self, data: bytes) -> None:
        self.value = np.frombuffer(data, np.float32)


@_once
class ScriptSelector(PeerSelector):
    TYPE_NAME: ClassVar[str] = "test.ScriptSelector"
    Config = ScriptConfig

    def sample(self, ctx, *, n):
        return PeerIdVec(list(ctx.peers.connected(ctx.peer_class))[:n])

    def current_view(self, ctx):
        return PeerIdVec(ctx.peers.connected(ctx.peer_class))

    def select(self, ctx, key, *, mode, n):
        return self.current_view(ctx)


@_once
class DependentData(DataSource):
    TYPE_NAME: ClassVar[str] = "test.DependentData"
    depends: ClassVar[Mapping[str, str]] = {"model": "model"}

    def next_batch(self, ctx):
        return np.ones(2, np.float32), np.zeros(2, np.int64)

    def reset(self, ctx):
        return None

    def on_data_loaded(self, ctx):
        return None

    def epoch_batches(self, batch_size):
        return []

    @property
    def num_samples(self) -> int:
        return 0


@_once
class SumAggregator(Aggregator):
    """Keeps what it was given, in the order in which it was given it."""

    TYPE_NAME: ClassVar[str] = "test.SumAggregator"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.got: list[Any] = []

    def contribute(self, ctx, tensor, metadata):
        self.got.append((ctx.source_peer, tensor))

    def contribute_all(self, ctx, responses):
        self.got.extend(responses.responses)

    def aggregate(self, ctx):
        total = sum((value for _, value in self.got), np.zeros(1, np.float32))
        return total, Metadata(contributors=len(self.got))

    def current_tensor(self, ctx):
        return np.zeros(1, np.float32)


class _NumpyGraph:
    """Runs a graph with ONNX's reference evaluator."""

    def __init__(self, model: onnx.ModelProto) -> None:
        from onnx.reference import ReferenceEvaluator

        self._names = [port.name for port in model.graph.input]
        self._evaluator = ReferenceEvaluator(model)

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        return list(self._evaluator.run(None, dict(zip(self._names, inputs, strict=True))))


@_once
class EvalBackend(Backend):
    TYPE_NAME: ClassVar[str] = "test.EvalBackend"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.prepared: list[str] = []

    def prepare(self, model: onnx.ModelProto) -> PreparedGraph:
        self.prepared.append(model.graph.name)
        return _NumpyGraph(model)

    def supports(self, op_type: str, opset_version: int, domain: str = "") -> bool:
        return op_type != "Einsum"


def bring_up(
    made: onnx.ModelProto, *targets: str, me: int = 0, limits: Limits | None = None, **more: Any
) -> Node:
    return install(made, list(targets), peer_id=peer(me), limits=limits, **more)


def component(node: Node, slot: str) -> Any:
    """The component of a slot: tests script it."""
    return node.component(slot)


def of(kind: type, made: Sequence[steps.Step]) -> list[Any]:
    return [step for step in made if isinstance(step, kind)]


class Pump:
    """Nodes wired by plain function calls, in virtual time.

    `keep` decides which envelopes arrive: `(source, step) -> copies`. Tasks run at once unless
    `hold_tasks` is set; then they wait in `tasks`.
    """

    def __init__(self, *nodes: Node) -> None:
        self.nodes = {node.peer_id: node for node in nodes}
        self.now_ns = 1 * S
        self.steps: dict[PeerId, list[steps.Step]] = {node.peer_id: [] for node in nodes}
        self.keep: Callable[[PeerId, steps.SendEnvelope], int] = lambda source, step: 1
        self.hold_tasks = False
        self.tasks: deque[tuple[Node, steps.RunTask]] = deque()
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.peer_connected(other.peer_id, other.classes)

    def settle(self, limit: int = 1000) -> None:
        """Poll everybody until nobody has anything to do now."""
        for _ in range(limit):
            busy = False
            for node in self.nodes.values():
                due = node.next_deadline()
                if due is None or due > self.now_ns:
                    continue
                busy = True
                for step in node.poll(self.now_ns):
                    self.steps[node.peer_id].append(step)
                    self._carry_out(node, step)
            if not busy:
                return
        raise AssertionError(f"not settled after {limit} turns")

    def advance(self, to_ns: int) -> None:
        """Let time pass, from deadline to deadline."""
        self.settle()
        while True:
            due = [d for n in self.nodes.values() if (d := n.next_deadline()) is not None]
            if not due or min(due) > to_ns:
                break
            self.now_ns = max(self.now_ns, min(due))
            self.settle()
        self.now_ns = max(self.now_ns, to_ns)
        self.settle()

    def run_task(self) -> None:
        node, task = self.tasks.popleft()
        try:
            result = task.fn()
        except Exception as error:  # noqa: BLE001 - what the driver does
            node.fail(task.token, error)
        else:
            node.complete(task.token, result)

    def of(self, node: Node, kind: type) -> list[Any]:
        return of(kind, self.steps[node.peer_id])

    def _carry_out(self, node: Node, step: steps.Step) -> None:
        if isinstance(step, steps.SendEnvelope):
            target = self.nodes.get(step.peer)
            for _ in range(self.keep(node.peer_id, step)):
                if target is None:
                    node.send_failed(step.peer, "nobody there")
                else:
                    target.deliver_inbound(node.peer_id, b"".join(step.parts))
        elif isinstance(step, steps.RunTask):
            self.tasks.append((node, step))
            if not self.hold_tasks:
                self.run_task()
