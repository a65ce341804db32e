"""The contracts: one abstract base class per role, and the marks of their methods.

Rule: an op of the table in `ir/opset.py` calls the method of the same name (snake case)
with an `OpContext`, its inputs in port order, and its attributes as keywords. The method
returns its output (a tuple for several; None for a command or a trigger, which the engine
makes), or raises a typed error. It may be marked `@offload`; or it may keep
`ctx.open_completion()`, return `PENDING`, and complete later from any thread. The engine never runs
two ops of one component at the same time. A mark is an attribute of the function, which callers
check first.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import msgpack
import numpy as np
import numpy.typing as npt
from multiaddr import Multiaddr

from bbnode.components.backends.graphs import PreparedGraph as PreparedGraph
from bbnode.components.backends.graphs import WritingGraph as WritingGraph
from bbnode.components.backends.primitives import Primitives
from bbnode.components.data.description import DataDescription as DataDescription
from bbnode.components.data.schema import DataSchema as DataSchema
from bbnode.components.data.shared_schema import SharedSchema as SharedSchema
from bbnode.components.data.shared_schema import compare
from bbnode.components.errors import ComponentError as ComponentError
from bbnode.components.errors import (
    DataDiffers,
    InvalidComponentConfig,
    NotExportable,
    UnsupportedByDataSource,
    UnsupportedByModel,
)
from bbnode.components.libraries import OptionalLibrary
from bbnode.ir import codec
from bbnode.ir.envelope import WireCorrelation
from bbnode.ir.errors import AuthorError, BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.shapes import Dim
from bbnode.ir.types import COMPOSITE, METADATA, TENSOR, TENSOR_FLOAT, TENSOR_INT64, TypeNode
from bbnode.ir.values import (
    Composite,
    Metadata,
    MetadataVec,
    PeerIdVec,
    ResponseBatch,
    SearchResults,
    Value,
)

if TYPE_CHECKING:
    from onnx import ModelProto

Weights: TypeAlias = npt.NDArray[np.generic]
Method = TypeVar("Method", bound=Callable[..., Any])
OutputKind = Literal["", "logits", "log_probabilities", "probabilities", "logit", "value"]

_OFFLOAD_MARK = "__bbnode_offload__"
_CHANGES, _READS = "changes", "reads"
_QUICK_MARK = "__bbnode_quick__"
_INBOUND_MARK = "__bbnode_inbound__"
_WAITS_MARK = "__bbnode_waits__"
_INBOUND_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")


@overload
def offload(method: Method, /) -> Method: ...


@overload
def offload(
    *, reads_only: bool = False, unless: Callable[..., bool] | None = None
) -> Callable[[Method], Method]: ...


def offload(
    method: Any = None,
    /,
    *,
    reads_only: bool = False,
    unless: Callable[..., bool] | None = None,
) -> Any:
    """Mark a contract method as slow: the host runs it in a worker thread.

    `reads_only`: it changes nothing that `serialize` returns, here or in what it depends on. Then
    a node need not save the component's state each time before it hands the method out.

    `unless(component, *inputs)`: True for a call that takes less than handing it out does (some
    tenths of a millisecond); it is then made where other methods are. It has to be a function of
    the inputs, and of the component's settings and saved state, so that a recorded run can be
    replayed.
    """

    def mark(marked: Method) -> Method:
        setattr(marked, _OFFLOAD_MARK, _READS if reads_only else _CHANGES)
        setattr(marked, _QUICK_MARK, unless)
        return marked

    return mark if method is None else mark(method)


def is_offloaded(method: Callable[..., Any], inputs: Sequence[Value] | None = None) -> bool:
    """Return True if `offload` marked the method; of a bound one also by a call's `inputs`."""
    if not getattr(method, _OFFLOAD_MARK, False):
        return False
    quick = getattr(method, _QUICK_MARK, None)
    if quick is None or inputs is None:
        return True
    return not quick(getattr(method, "__self__", None), *inputs)


def only_reads(method: Callable[..., Any]) -> bool:
    """Return True if `offload` marked the method as one that leaves its component's state alone."""
    return getattr(method, _OFFLOAD_MARK, False) == _READS


def waits(method: Method) -> Method:
    """Mark a contract method that may wait for what other peers answer its component.

    While such an op is pending, other ops, answers and timers of the component are carried out;
    otherwise they wait until it is completed. After a restart nobody completes it: it fails at its
    deadline.
    """
    setattr(method, _WAITS_MARK, True)
    return method


def lets_others_run(method: Callable[..., Any]) -> bool:
    """Return True if `waits` marked the method."""
    return bool(getattr(method, _WAITS_MARK, False))


def inbound(name: str) -> Callable[[Method], Method]:
    """Mark a method as an op that other peers may call: `method(ctx, payload) -> bytes | None`.

    It is reached at `/component/<ref of the slot>/op/<name>`. `ctx.source_peer` is the caller,
    `ctx.correlation` describes the message; the encoding of the payload is the component's own.
    The return value answers a request; a one-way message has no answer. It may be `offload`ed.
    """

    def mark(marked: Method) -> Method:
        setattr(marked, _INBOUND_MARK, name)
        return marked

    return mark


def inbound_ops(cls: type[Any]) -> dict[str, str]:
    """Return the ops of a class that peers may call: op name to method name, sorted.

    Raises AuthorError for an invalid op name, or one that is used twice.
    """
    found: dict[str, str] = {}
    for method in sorted({name for base in cls.__mro__ for name in vars(base)}):
        op = getattr(getattr(cls, method, None), _INBOUND_MARK, None)
        if op is None:
            continue
        if not isinstance(op, str) or not _INBOUND_NAME.match(op):
            raise AuthorError(
                f"{cls.__qualname__}.{method}: {op!r} can't name an op; use up to 64 letters, "
                "digits and underscores"
            )
        if op in found:
            raise AuthorError(
                f"{cls.__qualname__}: {found[op]} and {method} are both the inbound op {op!r}"
            )
        found[op] = method
    return dict(sorted(found.items()))


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
    """A component's view of other peers: a snapshot in PeerId order."""

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        """Return connected peers that are not down, blocked or denied; of one class if given."""


class HostSecrets(Protocol):
    """Signatures and randomness that a host gives its node's components."""

    @property
    def random_bytes(self) -> Callable[[int], bytes]:
        """Return so many bytes that nobody else can foresee."""

    def sign(self, component: str, body: bytes) -> bytes:
        """Return the node's signature over `body` for components of that type name."""


class OpContext(Protocol):
    """The parts of the calling node that a contract method may use."""

    now_ns: int
    self_peer: PeerId
    source_peer: PeerId | None  # authenticated sender, inside an inbound execution
    # That it plays, by its accepted hello; in a private network its membership grants them.
    source_classes: Sequence[str]
    # Where its connection comes from, which costs more than to say so; None where that is unknown.
    source_seen_at: Multiaddr | None
    peer_class: str | None  # of the slot (PeerSelector): the class it selects from
    plays_peer_class: bool  # this node is of the slot's class itself, as in gossip
    # The slot has include_self and this node plays `peer_class`: `peers` holds it then, and a
    # selector with a list of its own adds `self_peer`.
    include_self: bool
    execution: int
    op: str  # the name of the op in the program; "" where none is called
    # Of the op's only output, as far as the program declares it: sizes, and names of open axes.
    declared_shape: Sequence[Dim] | None
    slot: str  # of the component, by which it addresses those of its kind on other peers
    peers: PeersView
    addresses: Sequence[Multiaddr]  # of this node
    correlation: WireCorrelation | None  # of the message, inside an inbound op or `on_answer`
    reason: str  # in `on_no_answer`: why, as "<kind>: <text>"; else empty

    def open_completion(self) -> Completion:
        """Park this op until the completion is used; return PENDING afterwards."""

    def refuse(self, peer: PeerId, reason: str) -> None:
        """Report a peer's contribution as refused, even if the method then raises.

        It is counted and shown with the peer's name. In an offloaded method: ComponentError.
        """

    # Secrets: in an offloaded method alone, whose result a record of the node's life holds, so that
    # a replay needs neither the key nor the random bytes. Elsewhere: ComponentError.

    def sign(self, body: bytes) -> bytes:
        """Return this node's Ed25519 signature, 64 bytes, over `body` as of this component's type.

        `bbnode.access.secrets.signed_as` checks it, by the type name and the node's PeerId.
        Raises IdentityError where the node has no key: in a simulator without `keys`.
        """

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody else can foresee: the operating system's.

        In the simulator they follow from its seed.
        """

    # The calls below take effect when the method has returned, and not at all when it raises.
    # In an offloaded method, or after the method has returned, they raise ComponentError.

    def send(self, peer: PeerId, slot: str, op: str, payload: bytes) -> None:
        """Call an inbound op of the component in a peer's slot, without an answer."""

    def request(
        self, peer: PeerId, slot: str, op: str, payload: bytes, *, tag: str, deadline_ns: int
    ) -> int:
        """Call an inbound op and return the id of the correlation.

        The answer comes once, to `on_answer(ctx, tag, payload)`. Without one within `deadline_ns`,
        and as soon as there can't be one, `on_no_answer(ctx, tag, peer)` is called, with
        `ctx.reason`.
        """

    def follow(self, topic: str) -> None:
        """Have `on_message(ctx, topic, payload)` called for what others publish on a topic.

        A topic's name counts in this node's network. A component that does so has the class
        attribute `uses_topics = True`, and is refused where the transport carries none.
        """

    def unfollow(self, topic: str) -> None:
        """Hear no more of a topic."""

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a message on a topic: whoever follows it gets it, this node does not.

        Without a promise: who is away or overloaded misses it. PayloadTooLarge beyond
        MAX_TOPIC_BYTES.
        """

    def publish_event(self, kind: int) -> None:
        """Publish an event of the program's own (1024 and up) for its `EventSource`s."""

    def set_timer(self, key: str, after_ns: int) -> None:
        """Have `on_timer(ctx, key)` called; a timer of the same key is replaced."""

    def cancel_timer(self, key: str) -> None:
        """Disarm a timer, if it is armed."""

    def learn_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """Add addresses that a peer is said to have to the address book."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOver:
    """Parts of a state that a component took over, and why it left the others.

    Both by name; the names are the component's own.
    """

    taken: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedParameter:
    """A tensor of a model, and what becomes of it.

    Attributes:
        name, shape: as the model has them.
        trained: True if steps move it.
        why: the reason for that, in a few words.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    why: str


@dataclass(frozen=True, slots=True)
class ParameterList:
    """The tensors of a model, and what its author should look at."""

    parameters: tuple[ListedParameter, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The shapes of what goes in and out of a model, as far as its settings say them.

    Attributes:
        parameters: the length P of the vector [P] of its parameters.
        output: of what `forward` makes: lengths of axes, None for open ones, such as that of the
            batch; None where nothing is known of it, or where it is several tensors.
    """

    parameters: int
    output: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class NoConfig:
    """The Config of components without settings."""


@contextmanager
def restoring(type_name: str) -> Iterator[None]:
    """Turn a decoder's errors on bytes that a component saved into a ComponentError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, BbnodeError,
            msgpack.exceptions.UnpackException) as error:  # fmt: skip
        raise ComponentError(f"{type_name}: the saved state is not ours: {error}") from error


class Component(ABC):
    """Base of all components.

    `TYPE_NAME` is stable and unique; `Config` is a frozen dataclass whose fields all have
    defaults unless the component can't do without them; those that name files and the like are
    a `path_setting` or `local_setting`. `depends` maps a role
    (snake case) to the slot that supplies it, e.g. `{"backend": "compute"}`. `needed_for` names
    the methods that use a dependency, by role, where the others do without it: on a node whose
    programs call none of these, that slot is neither bound nor prepared.
    """

    TYPE_NAME: ClassVar[str]
    ROLE: ClassVar[str]
    Config: ClassVar[type] = NoConfig
    depends: ClassVar[Mapping[str, str]] = {}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Leaf types of tensor ports that this concrete narrows from the placeholder "Tensor":
    # "<op_type>.<port>" or "*" to the type; compile-time only. Of several, it is the one that the
    # program says, else the first.
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {}

    # Libraries beyond those of bbnode that it can't do without.
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = ()

    # Settings of a node that serves strangers: of an open network, beyond loopback. They count
    # where its configuration says nothing else.
    exposed_settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def needed_libraries(cls, config: Any) -> tuple[OptionalLibrary, ...]:  # noqa: ARG003 - of subclasses
        """Return the libraries that it can't do without where it is set like this."""
        return cls.libraries

    def __init__(self, config: Any) -> None:
        self.config = config
        self._dependencies: Mapping[str, Component] = {}

    def bind(self, dependencies: Mapping[str, Component]) -> None:
        """Receive one component per entry of `depends` that is needed; called once, at install."""
        self._dependencies = dependencies

    def has_dependency(self, role: str) -> bool:
        """Return True if a component is bound for `role`: if a program needs it."""
        return role in self._dependencies

    def dependency(self, role: str) -> Any:
        """Return the component bound for `role`, one of `depends`.

        Raises ComponentError for one that no op of the node's programs needs (`needed_for`).
        """
        if role not in self._dependencies:
            raise ComponentError(
                f"{self.TYPE_NAME} has no {role} here: no op of this node's programs calls one of "
                f"{', '.join(self.needed_for.get(role, ())) or 'its methods'}"
            )
        return self._dependencies[role]

    def serialize(self) -> bytes:
        """Return the state for a snapshot; empty when the component has none.

        Called on the polling thread, never while an offloaded method that changes the state runs;
        but a completion that the component opened may still be unused.
        """
        return b""

    def freeze(self) -> Callable[[], bytes]:
        """Capture the state now; the returned function serializes it, whatever has changed since.

        Called before each offloaded method that changes the state, so that a snapshot can be
        taken while it runs. Where the state is values that are replaced and never changed in
        place, override it to keep these: serializing a large model before every op is expensive.
        """
        data = self.serialize()
        return lambda: data

    def restore(self, data: bytes) -> None:
        """Load the state that `serialize` returned; raise ComponentError for any other bytes."""
        if data:
            raise ComponentError(f"{self.TYPE_NAME} keeps no state but was given {len(data)} bytes")

    def carry_over(self, data: bytes) -> CarriedOver:
        """Load what fits of the state that another version of the program saved in this slot.

        Return what was taken and what was left; by default all of it is loaded by `restore`, and
        nothing told. Raise ComponentError when nothing fits.
        """
        self.restore(data)
        return CarriedOver()

    def facts(self) -> Mapping[str, int | float | str | bool]:
        """Return what people see of the component in `bbnode status`, and its numbers in /metrics.

        At most 32 facts by names of letters, digits and underscores; by default none. Called on the
        polling thread at any time, also while an offloaded method runs: read counters, compute
        nothing.
        """
        return {}

    def on_stop(self) -> None:  # noqa: B027 - most hold nothing of the machine
        """Let go of files, locks and threads: the node has stopped, and calls nothing any more.

        Called in a worker thread, behind the last snapshot. A node that is killed does without, and
        what takes longer than `node.stop_grace_s` is left.
        """

    def twin(self) -> Component:
        """Return another instance of the same settings, to which nothing is bound.

        For a component whose `config` is not what it was made from: a large part that it keeps
        elsewhere, say.
        """
        return type(self)(self.config)

    def require(self, condition: bool, problem: str) -> None:
        """Raise InvalidComponentConfig with the component's name, unless the condition holds."""
        if not condition:
            raise InvalidComponentConfig(f"{self.TYPE_NAME}: {problem}")

    def restoring(self) -> AbstractContextManager[None]:
        """Turn a decoder's errors on saved bytes into a ComponentError."""
        return restoring(self.TYPE_NAME)


class Backend(Primitives, Component):
    """Runs `ai.onnx` graphs. Tensors are owned by the backend; ours are numpy arrays.

    A concrete overrides `prepare`, or `execute`, or some of the thirty primitives; the rest follows
    from these (`Primitives`).
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
        """Return a received tensor of leaf type `node`, without a copy where possible."""
        return codec.decode_value(node, payload)


class Model(Component):
    """A trainable model. Parameters are one flat float32 vector, shape [P].

    A concrete that overrides `export`, `saved_weights` and `initialized` has its weights taken out
    and put in (`bbnode export`, `bbnode compile --init-from`).
    """

    ROLE = "Model"
    # Inputs may be numbers or tokens, and of several inputs or outputs a batch is a composite; what
    # targets are depends on the concrete class.
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "*": TENSOR_FLOAT,
        "Forward.output": (TENSOR_FLOAT, COMPOSITE),
        "Forward.input": (TENSOR_FLOAT, TENSOR_INT64, COMPOSITE),
        "ComputeLoss.input": (TENSOR_FLOAT, TENSOR_INT64, COMPOSITE),
        "Evaluate.input": (TENSOR_FLOAT, TENSOR_INT64, COMPOSITE),
        "Gradient.input": (TENSOR_FLOAT, TENSOR_INT64, COMPOSITE),
        "ComputeLoss.target": TENSOR,
        "Evaluate.target": TENSOR,
        "Gradient.target": TENSOR,
        "GradientWithInput.target": TENSOR,
        "PullBack.input": (TENSOR_FLOAT, TENSOR_INT64, COMPOSITE),
    }

    @abstractmethod
    def forward(self, ctx: OpContext, batch: Value) -> Value:
        """Return the outputs for a batch: [N, ...] float32 to [N, ...] float32.

        A Composite of tensors, in the order of the model, where it has several inputs or outputs.
        """

    @abstractmethod
    def compute_loss(self, ctx: OpContext, batch: Value, target: Value) -> Value:
        """Return the mean loss over a batch, float32 scalar."""

    def evaluate(self, ctx: OpContext, batch: Value, target: Value) -> Value:
        """Return `compute_loss`: its older name."""
        return self.compute_loss(ctx, batch, target)

    def gradient(
        self,
        ctx: OpContext,
        batch: Value,
        target: Value,
    ) -> tuple[Value, Value]:
        """Return the gradient of the mean loss by the parameters, [P] float32, and that loss, [].

        The model stays as it is. UnsupportedByModel where a class does not override it.
        """
        raise UnsupportedByModel(component=self.TYPE_NAME, op="gradient")

    def gradient_with_input(
        self, ctx: OpContext, batch: Value, target: Value
    ) -> tuple[Value, Value, Value]:
        """Return `gradient`'s first, the gradient by the batch, shaped like it, and the loss.

        The model stays as it is. UnsupportedByModel where a class does not override it.
        """
        raise UnsupportedByModel(component=self.TYPE_NAME, op="gradient_with_input")

    def pull_back(
        self, ctx: OpContext, batch: Value, grad: Value, *, to_input: int
    ) -> tuple[Value, Value]:
        """Return the gradients of sum(`grad` · forward(batch)), by the parameters and by the batch.

        Nothing is kept. Without `to_input` the second is float32 [0]. UnsupportedByModel
        where a class does not override it.
        """
        raise UnsupportedByModel(component=self.TYPE_NAME, op="pull_back")

    def vector_size(self) -> int | None:
        """Return P, the number of parameters; None where it changes or is not known.

        Peers compare it before they send each other parameters. It is asked once, when the node
        is made.
        """
        shapes = type(self).shapes_of(self.config)
        return None if shapes is None else shapes.parameters

    @classmethod
    def shapes_of(cls, config: Any) -> ModelShapes | None:  # noqa: ARG003 - for concretes
        """Return the shapes of a model of these settings, for the compiler; None by default."""
        return None

    def output_kind(self) -> OutputKind:
        """Return what the first output of the exported model is; "" where that is not known.

        "logits" and "log_probabilities" are of the classes on the last axis, likewise
        "probabilities"; "logit" is of one yes or no each, "value" a number of the labels' kind.
        """
        return ""

    def output_names(self) -> tuple[str, ...]:
        """Return the names of what `forward` gives, in that order; () where they have none."""
        return ()

    def parts(self, vector: Value) -> Mapping[str, Weights]:
        """Return what a vector [P] has for each trained parameter, by name; empty by default."""
        return {}

    def example_batch(self, rows: int, *, draw: int = 0) -> tuple[Value, Value] | None:
        """Return made-up examples and labels for a dry run; None where the model can't say them.

        Called before the model is trained, with the backend bound.

        Args:
            rows: of the batch.
            draw: 0 and up: of how features are drawn, as `dry_run.draw_features` has it.
        """
        return None

    def set_learning_rate(self, ctx: OpContext, rate: Value) -> None:
        """Take `rate`, a positive float32 scalar, for all steps from now on.

        UnsupportedByModel where a class does not override it.
        """
        raise UnsupportedByModel(component=self.TYPE_NAME, op="set_learning_rate")

    @abstractmethod
    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Pull an output gradient of the last forward back to the parameters, and keep it there."""

    @abstractmethod
    def step(self, ctx: OpContext, grads: Value | None) -> None:
        """Make one optimizer step with `grads` [P], or with the gradients that `backward` kept."""

    @abstractmethod
    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add `delta` [P] to the parameters."""

    @abstractmethod
    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the parameters by `params` [P]."""

    @abstractmethod
    def params(self, ctx: OpContext) -> Value:
        """Return a copy of the parameters, [P] float32."""

    @abstractmethod
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Train on the bound DataSource; return num_samples, loss and steps."""

    def train_adjusted(
        self,
        ctx: OpContext,
        anchor: Value | None,
        correction: Value | None,
        *,
        epochs: int,
        batch: int,
        proximal: float,
        frozen: str,
    ) -> tuple[Metadata, Value]:
        """Train with `proximal` (w - `anchor`) + `correction` added to each gradient, [P] each.

        Without an anchor it is the parameters that the training begins with. Parameters that
        `frozen` names, one a line, stay as they are. Returns the metadata
        of `train`, and float32 [3]: the steps made, the sum of their learning rates, the part of
        the epochs that was done. UnsupportedByModel where a class does not override it.
        """
        raise UnsupportedByModel(component=self.TYPE_NAME, op="train_adjusted")

    def export(self) -> ModelProto:
        """Return the model with its present weights as plain ONNX, with the author's names.

        It is asked of an instance of its own, to which nothing is bound: made from the settings,
        with the state restored. Raise ComponentError when there is none; NotExportable by default.
        """
        raise NotExportable(f"{self.TYPE_NAME} does not export its weights (Model.export)")

    @classmethod
    def saved_weights(cls, data: bytes) -> Mapping[str, Weights]:  # noqa: ARG003 - for concretes
        """Return the weights in a state that `serialize` returned, by name.

        Raise ComponentError for any other bytes, and where they have no names; NotExportable by
        default.
        """
        raise NotExportable(f"{cls.TYPE_NAME} does not name its weights (Model.saved_weights)")

    @classmethod
    def parameters_told(cls, config: Any) -> str:  # noqa: ARG003 - for concretes
        """Return one line that says which parameters a model of these settings trains; or ""."""
        return ""

    @classmethod
    def parameters_listed(cls, config: Any) -> ParameterList:  # noqa: ARG003 - for concretes
        """Return what becomes of each tensor of a model of these settings; empty by default."""
        return ParameterList()

    @classmethod
    def initialized(
        cls,
        config: Any,  # noqa: ARG003 - for concretes
        weights: Mapping[str, Weights],  # noqa: ARG003 - likewise
    ) -> tuple[Any, CarriedOver]:
        """Return `config` (a `cls.Config`) with initial weights, where name, shape and dtype agree.

        Told are the weights that were taken, and those of either side that were left. Raise
        ComponentError when none fits; NotExportable by default.
        """
        raise NotExportable(f"{cls.TYPE_NAME} takes no initial weights (Model.initialized)")


class Aggregator(Component):
    """Combines tensors of many peers into one.

    Attributes:
        answers: of what type each answer is that `contribute_all` takes: one type, or those of a
            composite's parts. TENSOR is the type that `storage` says, ANY is any.
    """

    ROLE = "Aggregator"
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": TENSOR_FLOAT}
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = (TENSOR, METADATA)

    @abstractmethod
    def contribute(self, ctx: OpContext, tensor: Value, metadata: Metadata) -> None:
        """Add the contribution of `ctx.source_peer`; a second one replaces the first."""

    @abstractmethod
    def contribute_all(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Add a cohort's answers, each of the type `answers`: a composite (tensor, metadata)."""

    @abstractmethod
    def aggregate(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Combine and clear the contributions; raises ComponentError without any."""

    @abstractmethod
    def current_tensor(self, ctx: OpContext) -> Value:
        """Return the last aggregate."""


class DataSource(Component):
    """Supplies examples in batches."""

    ROLE = "DataSource"

    @abstractmethod
    def next_batch(self, ctx: OpContext) -> tuple[Value, Value]:
        """Return the next (batch [N, ...], labels [N])."""

    @abstractmethod
    def reset(self, ctx: OpContext) -> None:
        """Start again from the first batch."""

    @abstractmethod
    def on_data_loaded(self, ctx: OpContext) -> None:
        """Return once the examples are in memory."""

    @abstractmethod
    def epoch_batches(self, batch_size: int) -> Iterable[tuple[Value, Value]]:
        """Return the batches of the next epoch, in its shuffled order; each call is one epoch.

        They are made as they are asked for, so that an epoch holds one batch at a time.
        """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """The number of examples in this source."""

    def schema(self) -> DataSchema | None:
        """Return shapes and types of the examples; None where only the batches can tell.

        It may load the data, so it takes its time; DataUnavailable when they can't be used.
        """
        return None

    def describe(self) -> DataDescription | None:
        """Return what the positions of an example mean; None where the source does not know.

        An exported model carries it, so that further examples can be read in the same way. It may
        load the data; it is called in a worker thread, also while ops use the source. Raises
        DataUnavailable when the data can't be used.
        """
        return None

    def own_schema(self) -> SharedSchema | None:
        """Return what the examples mean, as peers compare it, before anything was adopted.

        None where the source does not know; its data are then not compared. It may load the data,
        and is called in a worker thread, also while ops use the source. Raises DataUnavailable.
        """
        return None

    def known_schema(self) -> SharedSchema | None:
        """Return what `own_schema` would, if that is known without loading; else None."""
        return None

    def adopt(self, reference: SharedSchema) -> None:
        """Take the federation's reference; batches are in its order and numbers from then on.

        Called between two uses, in a worker thread. One that can't be taken raises DataDiffers,
        here or at the next use. By default a source can bring nothing into another order.
        """
        own = self.own_schema()
        if own is None:
            return
        agreed = compare(reference, own)
        if agreed.refused:
            raise DataDiffers(agreed.line)
        if agreed.mapped:
            raise DataDiffers(
                f"{self.TYPE_NAME} can't map its examples ({'; '.join(agreed.mapped)}); give them "
                "in the federation's order"
            )

    def statistics(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return count, mean, squared deviations, minimum and maximum of each feature.

        As float64 [5, F], with `num_samples` in the metadata. AuthorError where a source has none.
        """
        raise UnsupportedByDataSource(component=self.TYPE_NAME, op="statistics")

    def standardize(self, ctx: OpContext, statistics: Value) -> None:
        """Take the statistics of all peers; AuthorError where a source can't use any."""
        raise UnsupportedByDataSource(component=self.TYPE_NAME, op="standardize")

    def first(self, rows: int) -> tuple[Value, Value] | None:
        """Return the first examples and their labels, and move nothing; None where it can't.

        Fewer where the source has no more. Raises DataUnavailable when the data can't be used.
        """
        return None

    def forget(self) -> None:
        """Drop what was loaded, so that the next use loads it again: it was of no use."""


class PeerSelector(Component):
    """Chooses peers. Parameters that it does not support are errors.

    Attributes:
        observes: what it has to hear of those that it chose, so that a program records `observed`:
            "" nothing, "answers" who answered, "metadata" what the Metadata in their answers say.
    """

    ROLE = "PeerSelector"
    observes: ClassVar[str] = ""

    @abstractmethod
    def sample(self, ctx: OpContext, *, n: int) -> PeerIdVec:
        """Return `n` different peers of the current view, in PeerId order."""

    @abstractmethod
    def current_view(self, ctx: OpContext) -> PeerIdVec:
        """Return all peers that can be chosen, in PeerId order."""

    @abstractmethod
    def select(self, ctx: OpContext, key: Value | None, *, mode: str, n: int) -> PeerIdVec:
        """Return the peers that `mode` selects: "random" (n), "near_key" (key, n) or "all"."""

    def observed(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Hear who of the chosen peers answered, what and when, and who did not.

        Answers are Metadata, or composites with one; nothing in them is checked yet.
        """


class Codec(Component):
    """Compresses tensors.

    Attributes:
        of_deltas: what it leaves out of a tensor is lost unless a later one makes up for it: it is
            for gradients and deltas, and not for weights.
    """

    ROLE = "Codec"
    of_deltas: ClassVar[bool] = False

    @abstractmethod
    def encode(self, ctx: OpContext, tensor: Value) -> Value:
        """Return the code of a tensor."""

    @abstractmethod
    def decode(self, ctx: OpContext, code: Value) -> Value:
        """Return the tensor of a code."""

    def decode_all(self, ctx: OpContext, responses: ResponseBatch, *, parts: str) -> ResponseBatch:
        """Return a cohort's answers with `decode` of their codes.

        A peer whose answer can't be decoded is reported as refused, and is missing in the result.

        Args:
            ctx, responses: as of every op.
            parts: "" where an answer is a code; of answers that are composites one character for
                each part, "1" where it is a code and "0" where it is not.

        Raises:
            ComponentError: there are answers, and none of them can be decoded.
        """
        kept: list[tuple[PeerId, Value]] = []
        reasons = dict(responses.reasons)
        failed: ComponentError | None = None
        for peer, answer in responses.responses:
            try:
                kept.append((peer, self._decoded(ctx, answer, parts)))
            except ComponentError as error:
                failed = failed or error
                ctx.refuse(peer, str(error))
                reasons[peer] = WireRefusal(type(error).__name__, str(error)).bounded()
        if failed is not None and not kept:
            raise failed
        missing = {peer for peer, _ in responses.responses} - {peer for peer, _ in kept}
        return ResponseBatch(
            responses=tuple(kept),
            missing=tuple(sorted({*responses.missing, *missing})),
            reasons=tuple(sorted(reasons.items())),
            took_ns=tuple(each for each in responses.took_ns if each[0] not in missing),
        )

    def _decoded(self, ctx: OpContext, answer: Value, parts: str) -> Value:
        if not parts:
            return self.decode(ctx, answer)
        if not isinstance(answer, Composite) or len(answer) != len(parts):
            raise ComponentError(
                f"{self.TYPE_NAME}: the answer is no composite of {len(parts)} parts"
            )
        return Composite(
            self.decode(ctx, each) if flag == "1" else each
            for each, flag in zip(answer, parts, strict=True)
        )

    @abstractmethod
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the codebook."""


class Index(Component):
    """Nearest-neighbour search."""

    ROLE = "Index"

    @abstractmethod
    def add(
        self,
        ctx: OpContext,
        vector: Value,
        metadata: MetadataVec | None = None,
        id: Value | None = None,
    ) -> Value:
        """Store vectors, float32 [D] or [N, D], and return their ids, int64 [] or [N].

        A vector with the id of another one replaces it.
        """

    @abstractmethod
    def search(
        self, ctx: OpContext, query: Value, where: Metadata | None = None, *, k: int
    ) -> SearchResults:
        """Return the k nearest to a query [D], or to each of [Q, D], nearest first.

        `where` says which items count, by their metadata (`bbnode.components.indexes.filters`).
        """

    @abstractmethod
    def remove(self, ctx: OpContext, item: Value) -> None:
        """Remove the vectors with these ids, int64 [] or [N], as `add` gave them."""

    @abstractmethod
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the index."""

    def centroids(self, ctx: OpContext, *, n: int) -> Value:
        """Return up to n centres of what it holds, float32 [C, 1 + D], and how many are at each.

        A row is that number, then the centre. ComponentError where it tells none, as by default.
        """
        raise ComponentError(f"{self.TYPE_NAME} tells no centroids, asked for {n}")


class ProtocolComponent(Component):
    """A protocol with its own opset, timers and inbound ops.

    The ops of its opset are registered under `ai.bytesandbrains.protocol.<name>`
    (`bbnode.ir.opset.op`), and are methods as of every role; what peers may call is marked
    `inbound`. A component of another role has the hooks below too, if it inherits this class or
    defines them. No two methods of a component ever run at the same time.
    """

    ROLE = "Protocol"
    uses_topics: ClassVar[bool] = False  # it calls `ctx.follow` or `ctx.publish`

    def on_timer(self, ctx: OpContext, key: str) -> None:
        """Handle a timer that is due. One that becomes due while an op runs is handled after it."""

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Handle the answer to a request; `ctx.source_peer` gave it."""

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Handle a request without an answer in time, or to a peer that can't be reached."""

    def on_message(self, ctx: OpContext, topic: str, payload: bytes) -> None:
        """Handle a message on a topic that is followed; `ctx.source_peer` has published it."""

    # `on_peer_down(ctx, peer)`, where a class defines it, is called when a connection with a peer
    # is lost; not while the component is busy, so that it looks at `ctx.peers` now and then too.


CONTRACTS: Final[Mapping[str, type[Component]]] = {
    contract.ROLE: contract
    for contract in (
        Backend, Model, Index, Aggregator, Codec, DataSource, PeerSelector, ProtocolComponent,
    )
}  # fmt: skip
