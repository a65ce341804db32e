"""The contracts: one abstract base class per role.

Rule: an op of the table in `ir/opset.py` calls the method of the same name (snake case)
with an `OpContext`, its inputs in port order, and its attributes as keywords. The method
returns its output (a tuple for several; None for a command or a trigger, which the engine
makes); or raises a typed error; or is marked `@offload`; or keeps
`ctx.open_completion()`, returns `PENDING`, and completes later from any thread. The engine
never runs two ops of one component at the same time.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from multiaddr import Multiaddr

from bbnode.components.backends.primitives import PreparedGraph as PreparedGraph
from bbnode.components.backends.primitives import Primitives
from bbnode.components.errors import ComponentError as ComponentError
from bbnode.components.inbound import inbound as inbound
from bbnode.components.inbound import inbound_ops as inbound_ops
from bbnode.components.offloading import is_offloaded as is_offloaded
from bbnode.components.offloading import offload as offload
from bbnode.components.offloading import only_reads as only_reads
from bbnode.ir import codec
from bbnode.ir.envelope import WireCorrelation
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TENSOR, TENSOR_FLOAT, TypeNode
from bbnode.ir.values import Metadata, PeerIdVec, ResponseBatch, SearchResults, Value


class _Pending(enum.Enum):
    PENDING = "pending"


PENDING: Final = _Pending.PENDING  # returned by a method that completes later


class Completion(Protocol):
    """Completes one parked op, once, from any thread; later calls are dropped and counted."""

    def complete(self, result: Value) -> None:
        """Finish the op with its output (a tuple for several)."""

    def fail(self, error: BaseException) -> None:
        """Finish the op with a failure."""


class PeersView(Protocol):
    """What a component may know of other peers: a snapshot in PeerId order."""

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Peers connected now that are not down, blocked or denied; of one class if given."""


class OpContext(Protocol):
    """What a contract method may see of the node that calls it."""

    now_ns: int
    self_peer: PeerId
    source_peer: PeerId | None  # authenticated sender, inside an inbound execution
    peer_class: str | None  # of the slot (PeerSelector): the class it selects from
    execution: int
    peers: PeersView
    addresses: Sequence[Multiaddr]  # of this node
    correlation: WireCorrelation | None  # of the message, inside an inbound op or `on_answer`

    def open_completion(self) -> Completion:
        """Park this op until the completion is used; return PENDING afterwards."""

    def refuse(self, peer: PeerId, reason: str) -> None:
        """Tell the host that what a peer gave is not taken, also where the method then raises.

        It is counted and shows with the peer's name. In an offloaded method: ComponentError.
        """

    # What follows is carried out when the method has returned, and not at all when it raises.
    # None of it works in an offloaded method, or after the method has returned: ComponentError.

    def send(self, peer: PeerId, slot: str, op: str, payload: bytes) -> None:
        """Call an inbound op of the component that a peer has in a slot, without an answer."""

    def request(
        self, peer: PeerId, slot: str, op: str, payload: bytes, *, tag: str, deadline_ns: int
    ) -> int:
        """The same with an answer: `on_answer(ctx, tag, payload)`, once, or
        `on_no_answer(ctx, tag, peer)` when there is none within `deadline_ns`.

        Returns the correlation's id.
        """

    def set_timer(self, key: str, after_ns: int) -> None:
        """Have `on_timer(ctx, key)` called; a timer of the same key is replaced."""

    def cancel_timer(self, key: str) -> None:
        """Disarm a timer, if it is armed."""

    def learn_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Tell the address book where a peer is said to be."""


@dataclass(frozen=True)
class NoConfig:
    """Config of components that need none."""


class Component(ABC):
    """Base of all components.

    `TYPE_NAME` is stable and unique; `Config` is a frozen dataclass whose fields all have
    defaults unless the component can't do without them; those that name files and the like are
    a `path_setting` or `local_setting` of `bbnode.components.settings`. `depends` maps a role
    (snake case) to the slot that supplies it, e.g. `{"backend": "compute"}`.
    """

    TYPE_NAME: ClassVar[str]
    ROLE: ClassVar[str]
    Config: ClassVar[type] = NoConfig
    depends: ClassVar[Mapping[str, str]] = {}
    # Leaf types of tensor ports that this concrete narrows from the placeholder "Tensor":
    # "<op_type>.<port>" or "*" to the type; compile-time only.
    storage: ClassVar[Mapping[str, TypeNode]] = {}

    def __init__(self, config: Any) -> None:
        self.config = config
        self._dependencies: Mapping[str, Component] = {}

    def bind(self, dependencies: Mapping[str, Component]) -> None:
        """Called once at install, with one component per entry of `depends`."""
        self._dependencies = dependencies

    def dependency(self, role: str) -> Any:
        """The component bound for `role`; only those of `depends` exist."""
        return self._dependencies[role]

    def serialize(self) -> bytes:
        """State for a snapshot; empty when the component has none.

        Called on the polling thread: never while an offloaded method of it runs that changes the
        state, but also while a completion that it opened is unused.
        """
        return b""

    def freeze(self) -> Callable[[], bytes]:
        """What `serialize` would give now, to be had later, when the state has changed.

        Called before each offloaded method that changes the state, so that a snapshot can be
        taken while it runs. Where the state is values that are replaced and never changed in
        place, override it to keep these: serializing a large model before every op is dear.
        """
        data = self.serialize()
        return lambda: data

    def restore(self, data: bytes) -> None:
        """Take up the state that `serialize` gave; raise ComponentError when it is not ours."""
        if data:
            raise ComponentError(f"{self.TYPE_NAME} keeps no state but was given {len(data)} bytes")


class Backend(Primitives, Component):
    """Runs `ai.onnx` graphs. Tensors are owned by the backend; ours are numpy arrays.

    A concrete overrides `prepare`, or `execute`, or some of the thirty primitives; one side gives
    the other (`Primitives`).
    """

    ROLE = "Backend"
    storage: ClassVar[Mapping[str, TypeNode]] = {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not self.runs_graphs() and not self.own_primitives():
            raise AuthorError(
                f"{self.TYPE_NAME} runs nothing; override prepare(), execute(), or primitives"
            )

    def materialize_from_wire(self, node: TypeNode, payload: memoryview) -> Value:
        """A received tensor of leaf type `node`, adopted without a copy where possible."""
        return codec.decode_value(node, payload)


class Model(Component):
    """A trainable model. Parameters are one flat float32 vector, shape [P]."""

    ROLE = "Model"
    # What a loss takes as target (class numbers, or values) is the concrete's own matter.
    storage: ClassVar[Mapping[str, TypeNode]] = {
        "*": TENSOR_FLOAT,
        "ComputeLoss.target": TENSOR,
        "Evaluate.target": TENSOR,
    }

    @abstractmethod
    def forward(self, ctx: OpContext, batch: Value) -> Value:
        """Outputs for a batch: [N, ...] float32 to [N, ...] float32."""

    @abstractmethod
    def compute_loss(self, ctx: OpContext, batch: Value, target: Value) -> Value:
        """Mean loss over a batch, float32 scalar."""

    def evaluate(self, ctx: OpContext, batch: Value, target: Value) -> Value:
        """The older name of `compute_loss`."""
        return self.compute_loss(ctx, batch, target)

    @abstractmethod
    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Pull an output gradient of the last forward back to the parameters and keep it."""

    @abstractmethod
    def step(self, ctx: OpContext, grads: Value | None) -> None:
        """One optimizer step with `grads` [P], or with what `backward` kept."""

    @abstractmethod
    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add `delta` [P] to the parameters."""

    @abstractmethod
    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the parameters by `params` [P]."""

    @abstractmethod
    def params(self, ctx: OpContext) -> Value:
        """A copy of the parameters, [P] float32."""

    @abstractmethod
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Train on the bound DataSource; gives num_samples, loss and steps."""


class Aggregator(Component):
    """Combines tensors of many peers into one."""

    ROLE = "Aggregator"
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": TENSOR_FLOAT}

    @abstractmethod
    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Take the contribution of `ctx.source_peer`; a second one replaces the first."""

    @abstractmethod
    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Take a cohort's answers, each a composite (tensor, metadata)."""

    @abstractmethod
    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Combine and clear what was contributed; ComponentError when there is nothing."""

    @abstractmethod
    def current_tensor(self, ctx: OpContext) -> Value:
        """The last aggregate."""


class DataSource(Component):
    """Hands out examples."""

    ROLE = "DataSource"

    @abstractmethod
    def next_batch(self, ctx: OpContext) -> tuple[Value, Value]:
        """The next (batch [N, ...], labels [N])."""

    @abstractmethod
    def reset(self, ctx: OpContext) -> None:
        """Start from the first batch again."""

    @abstractmethod
    def on_data_loaded(self, ctx: OpContext) -> None:
        """Return once the examples are in memory."""

    @abstractmethod
    def epoch_batches(self, batch_size: int) -> Sequence[tuple[Value, Value]]:
        """All batches of the next epoch, in its shuffled order; each call is one epoch."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Examples in this source."""


class PeerSelector(Component):
    """Chooses peers. Unsupported parameters fail, they do not guess."""

    ROLE = "PeerSelector"

    @abstractmethod
    def sample(self, ctx: OpContext, *, n: int) -> PeerIdVec:
        """`n` different peers of the current view, in PeerId order."""

    @abstractmethod
    def current_view(self, ctx: OpContext) -> PeerIdVec:
        """All peers that can be chosen, in PeerId order."""

    @abstractmethod
    def select(self, ctx: OpContext, key: Value | None, *, mode: str, n: int) -> PeerIdVec:
        """`mode` is "random" (n), "near_key" (key, n) or "all"."""


class Codec(Component):
    """Compresses tensors."""

    ROLE = "Codec"

    @abstractmethod
    def encode(self, ctx: OpContext, tensor: Value) -> Value:
        """Tensor to code."""

    @abstractmethod
    def decode(self, ctx: OpContext, code: Value) -> Value:
        """Code to tensor."""

    @abstractmethod
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the codebook."""


class Index(Component):
    """Nearest-neighbour search."""

    ROLE = "Index"

    @abstractmethod
    def add(self, ctx: OpContext, vector: Value) -> Value:
        """Store a vector, give its id."""

    @abstractmethod
    def search(self, ctx: OpContext, query: Value, *, k: int) -> SearchResults:
        """The k nearest, nearest first."""

    @abstractmethod
    def remove(self, ctx: OpContext, item: Value) -> None:
        """Forget a vector."""

    @abstractmethod
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the index."""


class ProtocolComponent(Component):
    """A protocol with its own opset, timers and inbound ops.

    The ops of its opset are registered under `ai.bytesandbrains.protocol.<name>`
    (`bbnode.ir.opset.op`), and are methods as of every role; what peers may call is marked
    `inbound`. A component of another role has the hooks below too, if it inherits this class or
    defines them. No two methods of a component ever run at the same time.
    """

    ROLE = "Protocol"

    def on_timer(self, ctx: OpContext, key: str) -> None:
        """A timer that the component set is due. One that is due while it works comes after."""

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """A request was answered; `ctx.source_peer` is who did."""

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """A request was not answered in time, or the peer could not be reached."""


CONTRACTS: Final[Mapping[str, type[Component]]] = {
    contract.ROLE: contract
    for contract in (
        Backend, Model, Index, Aggregator, Codec, DataSource, PeerSelector, ProtocolComponent,
    )
}  # fmt: skip
