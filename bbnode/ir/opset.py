"""Signatures of every op of the `ai.bytesandbrains.*` opsets, and of those that packages add.

Rule: this table is the only source of an op's ports, attributes and types, used by the DSL to
record, by `validate` and `type_solver` to check, and by the engine to bind. `ai.onnx` ops are not
here, as ONNX has schemas for them. A port's type is a lattice node, or a variable such as "T":
ports with the same variable have the same type.

Ops of a protocol or of another domain are added by the import of their package, which happens, by
its entry point, when one of them is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bbnode.ir import keys, plugins, types
from bbnode.ir.errors import AuthorError
from bbnode.ir.types import TypeNode

REQUIRED = object()  # an attribute without a default

# Groups of entry points: a protocol, or a domain, and the module that registers its ops.
PROTOCOL_OPS = "bbnode.protocol_ops"
CUSTOM_OPS = "bbnode.custom_ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output.

    Attributes:
        type: a TypeNode, or a type variable such as "T".
        bound: upper bound of a type variable.
        parts: children of a composite, or the element of answers or a sequence; empty if any
            are allowed.
        batch: True for a tensor or a composite of tensors, as the component chooses.
    """

    name: str
    type: TypeNode | str
    variadic: bool = False
    optional: bool = False
    bound: TypeNode = types.ANY
    parts: tuple[Port, ...] = ()
    batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One op.

    Attributes:
        attributes: defaults by name, or REQUIRED.
        role: role of the component that runs it.
        suspends: True if it may finish in a later poll, so that it carries a deadline. An op of
            a role always may: its component can offload work from the engine's thread.
        changes: True if it changes the results of other ops of its component.
        feeds: ops of its component that use the state it leaves there.
        version: version of its opset.
        kinds: ONNX's numbers of its attributes' kinds, where defaults do not reveal them.
        package: the Python package that adds it; "" for ours.
    """

    domain: str
    op_type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: dict[str, Any]
    role: str | None = None
    suspends: bool = False
    changes: bool = False
    feeds: frozenset[str] = frozenset()
    doc: str = ""
    version: int = keys.BB_OPSET_VERSION
    kinds: Mapping[str, int] = field(default_factory=dict)
    package: str = ""

    @property
    def method(self) -> str:
        """The name of the contract method or DSL helper: `NextBatch` to `next_batch`."""
        return keys.snake_case(self.op_type.replace(".", ""))

    @property
    def keeps_order(self) -> bool:
        """True if it must not be reordered with other ops of its component."""
        return self.changes or bool(self.feeds)


_TABLE: dict[str, dict[str, OpSpec]] = {}  # by domain and op type


def register_op(spec: OpSpec) -> OpSpec:
    """Add an op. Raises AuthorError if `(domain, op_type)` has another signature already."""
    known = _TABLE.setdefault(spec.domain, {}).setdefault(spec.op_type, spec)
    if known is not spec:
        raise AuthorError(f"op {spec.domain}::{spec.op_type} is registered already")
    return spec


def lookup_op(domain: str, op_type: str) -> OpSpec | None:
    """Return the spec of an op, or None. Raises BrokenPlugin."""
    spec = _TABLE.get(domain, _NONE).get(op_type)
    if spec is None and domain and _load(domain):
        spec = _TABLE.get(domain, _NONE).get(op_type)
    return spec


_NONE: Mapping[str, OpSpec] = {}

# Ports of a Model's ops that hold the parameter vector, or a vector of its size: [P].
_VECTORS = frozenset({"params", "delta", "grads", "anchor", "correction"})


def model_vectors(
    domain: str, op_type: str, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs and the outputs of a Model's op that have the size of its parameters."""
    spec = lookup_op(domain, op_type) if domain == keys.role_domain("Model") else None
    if spec is None:
        return (), ()
    read, made = (
        tuple(v for port, v in zip(ports, values, strict=False) if v and port.name in _VECTORS)
        for ports, values in ((spec.inputs, inputs), (spec.outputs, outputs))
    )
    return read, made


def ops_of(domain: str) -> tuple[OpSpec, ...]:
    """Return all ops of a domain, in table order. Raises BrokenPlugin."""
    _load(domain)
    return tuple(_TABLE.get(domain, _NONE).values())


def is_custom(domain: str) -> bool:
    """Return True if the ops of a domain are functions of other packages."""
    known = ("", keys.ONNX_DOMAIN, keys.ONNX_ML_DOMAIN, keys.RUNTIME_DOMAIN)
    return domain not in known and not domain.startswith(keys.PREFIX)


def _load(domain: str) -> bool:
    """Import the module that registers the ops of a domain, if a package has one."""
    if is_custom(domain):
        group, name = CUSTOM_OPS, domain
    elif domain.startswith(keys.PROTOCOL_DOMAIN_PREFIX):
        group, name = PROTOCOL_OPS, domain.removeprefix(keys.PROTOCOL_DOMAIN_PREFIX)
    else:
        return False
    if name not in plugins.names(group):
        return False
    plugins.load(group, name)
    return True


def ops_of_role(role: str) -> tuple[OpSpec, ...]:
    """Return all ops of a role, in table order."""
    return ops_of(keys.role_domain(role))


# --- table-building shorthand: "name: Type" with * variadic and ? optional ----------------
# `T<tensor` is a type variable with a bound, and `responses[T]` answers of a type, as
# `sequence[T]` is a sequence of one.

_SHORT = {
    "trigger": types.TRIGGER, "tensor": types.TENSOR, "any": types.ANY,
    "peer": types.PEER_ID, "peers": types.PEER_ID_VEC, "address": types.MULTIADDRESS,
    "addresses": types.ADDRESS_VEC, "cmd": types.COMMAND_ID, "time": types.TIMESTAMP,
    "event": types.EVENT_KIND, "token": types.CORRELATION_TOKEN, "u64": types.U64,
    "request": types.REQUEST_ID, "wire_request": types.WIRE_REQUEST_ID,
    "responses": types.RESPONSE_BATCH, "composite": types.COMPOSITE,
    "metadata": types.METADATA, "metadatas": types.METADATA_VEC, "results": types.SEARCH_RESULTS,
    "int64": types.TENSOR_INT64, "batch": types.ANY, "bool": types.TENSOR_BOOL,
    "float": types.TENSOR_FLOAT, "double": types.TENSOR_DOUBLE, "sequence": types.SEQUENCE,
    "bytes": types.BYTES, "uint8": types.TENSOR_UINT8,
}  # fmt: skip


def ports(text: str) -> tuple[Port, ...]:
    """Parse `"a:tensor b?:metadata rest*:T all:responses[T]"` into ports."""
    return tuple(_port(word) for word in text.split())


def _port(word: str) -> Port:
    outer, _, inner = word.partition("[")
    name, _, kind = outer.rpartition(":")
    kind, _, bound = kind.partition("<")
    return Port(
        name=name.rstrip("*?"),
        type=_SHORT.get(kind, kind),
        variadic=name.endswith("*"),
        optional=name.endswith("?"),
        bound=_SHORT[bound] if bound else types.ANY,
        parts=(_port(inner.rstrip("]")),) if inner else (),
        batch=kind == "batch",
    )


def op(
    domain: str,
    op_type: str,
    inputs: str = "",
    outputs: str = "",
    *,
    role: str | None = None,
    suspends: bool = False,
    changes: bool = False,
    feeds: frozenset[str] = frozenset(),
    doc: str = "",
    **attributes: Any,
) -> OpSpec:
    """Register an op written in shorthand."""
    return register_op(
        OpSpec(
            domain=domain,
            op_type=op_type,
            inputs=ports(inputs),
            outputs=ports(outputs),
            attributes=attributes,
            role=role,
            suspends=suspends or role is not None,
            changes=changes,
            feeds=feeds,
            doc=doc,
        )
    )


def protocol_op(
    protocol: str, op_type: str, inputs: str = "", outputs: str = "", *, doc: str
) -> OpSpec:
    """Register an op of a protocol, written in shorthand; it changes its component's state."""
    domain = keys.PROTOCOL_DOMAIN_PREFIX + protocol
    return op(domain, op_type, inputs, outputs, role="Protocol", changes=True, doc=doc)


def _syscalls() -> None:
    d = keys.SYSCALL_DOMAIN
    r = REQUIRED
    op(d, "Pulse", "", "trigger:trigger", doc="Fires once, at bootstrap.")
    op(d, "OnTrigger", "trigger:trigger", "trigger:trigger", doc="Fires on each arrival.")
    op(d, "Threshold", "inputs*:any", "trigger:trigger", n=r, per_peer=0, until_ns=0,
       doc="Fires after n inputs arrived; with more than it has, after n arrivals.")  # fmt: skip
    op(d, keys.OP_COLLECT, "value:T", "batch:responses[T]", n=0, until_ns=0, quorum=0, per_peer=1,
       doc="Gathers a value of several deliveries, and fires once with all.")  # fmt: skip
    op(d, "Interval", "", "tick:time", period_ns=r, doc="Periodic timer.")
    op(d, "EventSource", "", "event:event", kind=r, doc="Fires on each bus event of a kind.")
    op(d, "After", "trigger:trigger", "trigger:trigger", delay_ns=r, suspends=True,
       doc="Delays a trigger.")  # fmt: skip
    op(d, "Limit.Acquire", "trigger:trigger", "trigger:trigger", name=r, n=r, suspends=True,
       doc="Takes one unit of a named semaphore of n units.")  # fmt: skip
    op(d, "Limit.Release", "trigger:trigger", "", name=r, doc="Gives a unit back.")
    op(d, "Any", "inputs*:T", "value:T", group="", doc="The first of its inputs to arrive.")
    op(d, "Gate", "value:T trigger:trigger", "value:T", doc="Holds a value until the trigger.")
    op(d, "Serialize.Enqueue", "value:any", "trigger:trigger", queue=r, doc="FIFO put.")
    op(d, "Serialize.Dequeue", "trigger:trigger", "value:T", queue=r, deadline_ns=0, suspends=True,
       doc="FIFO take.")  # fmt: skip
    op(d, "CorrelateTag", "trigger:trigger", "token:token", doc="Mints a fresh token.")
    op(d, "Hold.Stash", "value:any", "", slot=r, doc="Buffers a value.")
    op(d, "Hold.Flush", "trigger:trigger", "value:T", slot=r, doc="Releases the held value.")
    op(d, "AppEmit", "value:any", "", name=r, doc="Surfaces an AppEvent with the value.")
    op(d, "AppNotify", "trigger:trigger", "", name=r, doc="Surfaces an AppEvent without one.")
    op(d, "Record", "value:any", "", name=r, doc="Pushes to the node's ring buffer.")
    op(d, "IncrMetric", "trigger:trigger", "", name=r, delta=1, doc="Adds to a counter.")
    op(d, "LifecyclePhase", "", "trigger:trigger", phase=r, doc="Shutdown=1, Snapshot=2.")
    op(d, "GateDispatch", "value:T", "value:T", doc="Edge gate made by the compiler.")
    op(d, "MintDispatch", "trigger:trigger", "token:token", doc="Token mint by the compiler.")
    op(d, "GateManyDispatch", "value:T gates*:trigger", "value:T", doc="Waits for all gates.")
    op(d, "Clock", "trigger:trigger", "now:time", doc="Reads the node's clock.")
    op(d, "RngU64", "trigger:trigger", "value:u64", doc="Draws from the node's seeded generator.")
    op(d, "Sleep", "trigger:trigger", "trigger:trigger", duration_ns=r, suspends=True,
       doc="Timer.")  # fmt: skip
    op(d, "DeadlineMatch", "then:trigger timeout:trigger", "winner:trigger", doc="First to fire.")
    op(d, "When", "condition:bool", "trigger:trigger", expect=1,
       doc="Fires if the condition is as expected; else what needs it is skipped.")  # fmt: skip
    op(d, keys.OP_CHOOSE, "condition:bool first:T second:T", "chosen:T",
       doc="The first if the condition is true, else the second.")  # fmt: skip
    op(d, keys.OP_PEERS_FILTER, "peers:peers mask:bool", "kept:peers",
       doc="The peers whose place in the mask is true.")  # fmt: skip
    op(d, keys.OP_PEERS_WITHOUT, "peers:peers peer:peer", "kept:peers", doc="All but one peer.")
    op(d, "Peers.Count", "peers:peers", "count:int64", doc="How many peers are in a list.")
    op(d, "Peers.Contains", "peers:peers peer:peer", "found:bool", doc="True if it has the peer.")
    op(d, "Metadata.Number", "metadata:metadata", "number:float", key=r,
       doc="An entry that is a number.")  # fmt: skip
    op(d, "PassThrough", "value:T", "value:T", doc="Identity.")
    op(d, "Tee", "value:T", "outputs*:T", fanout=r, doc="The input, fanout times.")
    op(d, "Constant", "", "value:any", value=r, doc="A value carried in the attribute.")
    for gate in (keys.OP_DEDUP_GATE_RX, keys.OP_PEER_HEALTH_GATE_RX, keys.OP_BACKOFF_GATE_RX):
        op(d, gate, "value:T", "value:T", doc="Receive gate.")
    for gate in (keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX):
        op(d, gate, "value:T", "trigger:T", peer=r, doc="Send gate.")
    op(d, keys.OP_DEADLINE_CHECK, "value?:T", "value:T", deadline_ns=r,
       doc="Fails when the execution's deadline is over.")  # fmt: skip


def _wire() -> None:
    d = keys.WIRE_DOMAIN
    # As recorded, Send and SendReqBatched also name what lives on the far side; the pass
    # synthesize_wire_recvs moves those outputs to the Recv-flavoured op.
    # `peers` is a PeerIdVec, or one PeerId such as a `.sender`; `validate` checks which.
    op(d, keys.OP_SEND, "data:T peers:any", "received:T sender:peer")
    op(d, keys.OP_SEND_REQ_BATCHED, "data:T peers:any",
       "req_id:request responses:responses[A] received:T sender:peer "
       "remote_req_id:wire_request[A]", quorum=0, deadline_ns=0)  # fmt: skip
    op(d, keys.OP_SEND_RESP, "data:A dest:peer req_id:wire_request[A]", "")
    op(d, keys.OP_RECV, "", "payload:any sender:peer")
    op(d, keys.OP_RECV_REQ, "", "payload:any sender:peer req_id:wire_request")
    op(d, keys.OP_RECV_RESP_BATCHED, "req_id:request", "responses:responses", suspends=True)


def _books() -> None:
    d = keys.ADDRESS_BOOK_DOMAIN
    op(d, "Insert", "peer:peer address:address", "")
    op(d, "InsertMany", "peer:peer addresses:addresses", "")
    op(d, "Lookup", "peer:peer", "addresses:addresses")
    d = keys.COMPOSITE_DOMAIN
    op(d, keys.OP_BUNDLE, "parts*:any", "composite:composite", child_count=0, child_types="")
    op(d, keys.OP_UNBUNDLE, "composite:composite", "parts*:any", child_count=0, child_types="")
    op(keys.TYPES_DOMAIN, "Cast", "value:any", "value:any", to=REQUIRED)
    d = keys.RESPONSES_DOMAIN
    op(d, "Peers", "responses:responses", "peers:peers", doc="Who answered, in PeerId order.")
    op(d, "Missing", "responses:responses", "peers:peers", doc="Who did not answer.")
    op(d, "Count", "responses:responses", "count:int64", doc="How many answered, int64 [].")
    op(d, "Of", "responses:responses[T] peer:peer", "value:T", doc="The answer of one peer.")
    op(d, "Stack", "responses:responses[T]", "stacked:T<tensor",
       doc="All answers, one row per peer.")  # fmt: skip
    op(d, "Concat", "responses:responses[T]", "joined:T<tensor", axis=0,
       doc="All answers, one after the other along an axis.")  # fmt: skip
    op(d, "Values", "responses:responses[T<tensor]", "values:sequence[T]",
       doc="All answers, a sequence of tensors in PeerId order.")  # fmt: skip
    op(d, "Entry", "responses:responses[metadata]", "values:tensor", name=REQUIRED,
       to=types.TENSOR_FLOAT.id, doc="One entry of each answer, a tensor [n].")  # fmt: skip
    op(d, keys.OP_UNBUNDLE, "responses:responses", "parts*:responses", child_count=0,
       child_types="", doc="Answers that are composites, as one batch per part.")  # fmt: skip
    op(d, "Usable", "responses:responses[results] query?:tensor", "usable:responses[results]",
       k=10, doc="Answers that can be true; who gave others is missing.")  # fmt: skip
    op(d, "Merge", "responses:responses[results] query?:tensor", "results:results", k=10,
       distinct=0, share=0, doc="The k nearest of all answers, and who sent each.")  # fmt: skip
    d = keys.SEARCH_DOMAIN
    op(d, "Ids", "results:results", "ids:int64", doc="Ids, nearest first, int64 [k] or [Q, k].")
    op(d, "Distances", "results:results", "distances:float",
       doc="Distances, float32 [k] or [Q, k].")  # fmt: skip
    op(d, "Metadata", "results:results", "metadata:metadatas", doc="Metadata of each hit.")
    op(d, "Senders", "results:results", "senders:peers", doc="Who found each hit.")
    op(d, "Entry", "results:results", "values:tensor", name=REQUIRED,
       to=types.TENSOR_FLOAT.id, doc="One entry of each hit's metadata, a tensor.")  # fmt: skip
    op(d, "WithEntry", "metadata:metadatas values:tensor", "made:metadatas", name=REQUIRED,
       doc="Metadata with one entry more, of each row of a tensor [n].")  # fmt: skip


_NO_FEEDS: Mapping[str, str] = {}


def _role(
    role: str,
    rows: Iterable[tuple[str, str, str, dict[str, Any]]],
    changing: str = "",
    feeding: Mapping[str, str] = _NO_FEEDS,
) -> None:
    for op_type, inputs, outputs, attributes in rows:
        op(
            keys.role_domain(role), op_type, inputs, outputs,
            role=role, changes=op_type in changing.split(),
            feeds=frozenset(feeding.get(op_type, "").split()), **attributes,
        )  # fmt: skip


def _roles() -> None:
    _role("Model", (
        ("Forward", "input:batch", "output:batch", {}),
        ("Backward", "grad:tensor", "cmd:cmd", {}),
        ("Step", "grads?:tensor", "cmd:cmd", {}),
        ("ComputeLoss", "input:batch target:tensor", "loss:tensor", {}),
        ("Evaluate", "input:batch target:tensor", "loss:tensor", {}),
        ("Gradient", "input:batch target:tensor", "grads:tensor loss:tensor", {}),
        ("GradientWithInput", "input:tensor target:tensor",
         "grads:tensor input_grad:tensor loss:tensor", {}),
        ("PullBack", "input:batch grad:tensor", "grads:tensor input_grad:tensor",
         {"to_input": 0}),
        ("SetLearningRate", "rate:tensor", "cmd:cmd", {}),
        ("ApplyDelta", "delta:tensor", "cmd:cmd", {}),
        ("LoadParameters", "params:tensor", "cmd:cmd", {}),
        ("Params", "", "params:tensor", {}),
        ("Train", "", "stats:metadata", {"epochs": 1, "batch": 32}),
        ("TrainAdjusted", "anchor?:tensor correction?:tensor", "stats:metadata work:tensor",
         {"epochs": 1, "batch": 32, "proximal": 0.0, "frozen": ""}),
    ), "Backward Step SetLearningRate ApplyDelta LoadParameters Train TrainAdjusted",
        {"Forward": "Backward"})  # fmt: skip
    _role("Aggregator", (
        ("Contribute", "tensor:tensor metadata:metadata", "cmd:cmd", {}),
        ("ContributeAll", "responses:responses", "cmd:cmd", {}),
        ("Aggregate", "", "tensor:tensor metadata:metadata", {}),
        ("CurrentTensor", "", "tensor:tensor", {}),
    ), feeding={"Contribute": "Aggregate", "ContributeAll": "Aggregate",
                "Aggregate": "CurrentTensor"})  # fmt: skip
    _role("DataSource", (
        ("NextBatch", "", "batch:batch labels:tensor", {}),
        ("Reset", "", "trigger:trigger", {}),
        ("OnDataLoaded", "", "trigger:trigger", {}),
        ("Statistics", "", "statistics:double metadata:metadata", {}),
        ("Standardize", "statistics:double", "cmd:cmd", {}),
    ), "NextBatch Reset Standardize")  # fmt: skip
    _role("Codec", (
        ("Encode", "tensor:tensor", "code:tensor", {}),
        ("Decode", "code:tensor", "tensor:tensor", {}),
        ("DecodeAll", "responses:responses", "decoded:responses", {"parts": ""}),
        ("Train", "training:tensor", "cmd:cmd", {}),
    ), "Train")  # fmt: skip
    _role("Index", (
        ("Add", "vector:tensor metadata?:metadatas id?:int64", "id:int64", {}),
        ("Search", "query:tensor where?:metadata", "results:results", {"k": 10}),
        ("Remove", "id:int64", "cmd:cmd", {}),
        ("Train", "training:tensor", "cmd:cmd", {}),
        ("Centroids", "", "centroids:float", {"n": 16}),
    ), "Add Remove Train")  # fmt: skip
    _role("PeerSelector", (
        ("Select", "key?:any", "peers:peers", {"mode": "all", "n": 0}),
        ("Sample", "", "peers:peers", {"n": REQUIRED}),
        ("CurrentView", "", "peers:peers", {}),
        ("Observed", "responses:responses", "cmd:cmd", {}),
    ), "Observed")  # fmt: skip


_syscalls()
_wire()
_books()
_roles()

# The roles of the contracts; Backend ops are `ai.onnx`, Protocol ops are each protocol's own.
ROLES = (
    "Backend", "Model", "Index", "Aggregator", "Codec", "DataSource", "PeerSelector", "Protocol",
)  # fmt: skip
