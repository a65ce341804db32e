"""Steps: the output of a poll, for the host.

Rule: a step is a fact or a request, complete in itself; the host shows it or carries it out, and
reports back only through the node's entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from multiaddr import Multiaddr

from bbnode.ir.envelope import Buffer
from bbnode.ir.making import maker
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import failure_text
from bbnode.ir.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEnvelope:
    """Send one envelope: `parts` are its bytes, to be written in order and never copied.

    `addresses` are the peer's addresses in the address book, best first; `tag` is unique on this
    node.
    """

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    parts: tuple[Buffer, ...]
    tag: int

    @property
    def size(self) -> int:
        """Bytes of the whole envelope."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishMessage:
    """Publish a message on a topic of the network."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowTopic:
    """Hand over what is published on a topic, by `Node.deliver_message`, or no more (not `on`)."""

    topic: str
    on: bool


make_send = maker(SendEnvelope, "peer", "addresses", "parts", "tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppEvent:
    """A value for the application: an output of the target, an AppEmit or an AppNotify.

    `chain`, if it is not 0, names the execution of which it comes in the end, over messages: that
    of the ExecutionFinished with this `chain`. `source_peer` sent the last of those messages.
    """

    target: str
    topic: str
    value: Value
    execution: int
    chain: int = 0
    source_peer: PeerId | None = None


make_app_event = maker(AppEvent, "target", "topic", "value", "execution", "chain", "source_peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSkipped:
    """An output of the target will have no value in this execution, and why; `chain` as above."""

    execution: int
    target: str
    name: str
    reason: str
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFailed:
    """An op failed, and nothing that depends on it will fire. `kind` is an error class name.

    `op` is the author's, also where the compiler has fused it with others; then `inner` is its name
    too. `line` is where the author wrote it, `<file>:<line>`, and `module` in which Module. Each is
    "" where the artifact does not say.
    `source_peer` sent the message that started the execution, if one did; `chain` as of AppEvent.
    `is_final`: another execution would fail in the same way.
    """

    execution: int
    target: str
    op: str
    kind: str
    detail: str
    line: str = ""
    module: str = ""
    inner: str = ""
    source_peer: PeerId | None = None
    chain: int = 0
    is_final: bool = False

    def as_json(self) -> dict[str, str]:
        """Return what `failure_text` makes a line of; without a peer, `source_peer` is ""."""
        peer = "" if self.source_peer is None else str(self.source_peer)
        told = ("op", "kind", "detail", "line", "module", "inner")
        return {**{name: getattr(self, name) for name in told}, "source_peer": peer}

    def __str__(self) -> str:
        return failure_text(self.as_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNotRun:
    """An op did not run, nor will what needs it, and nothing else says why.

    So it is behind an op that was to change its component and did not, because it or another one
    failed (which has its own OpFailed), and in an execution of an event where the op needs another
    input too. `line`, `module` and `chain` as of OpFailed. It is no failure, and does not count as
    one.
    """

    execution: int
    target: str
    op: str
    reason: str
    line: str = ""
    module: str = ""
    chain: int = 0

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.line, self.module and f"in Module {self.module}")))
        text = f"{self.op} did not run: {self.reason}"
        return f"{text} ({where})" if where else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFinished:
    """An execution that the host started has ended; `ok` when no op of it failed.

    `chain` names it in what comes of its one-way messages; 0: it has sent none.
    """

    execution: int
    target: str
    ok: bool
    failures: int
    chain: int = 0


make_finished = maker(ExecutionFinished, "execution", "target", "ok", "failures", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResolveFailed:
    """A send left out one peer, which has no known address or is denied.

    `line` is where the author wrote the send, as for OpFailed.
    """

    peer: PeerId
    op: str
    execution: int
    reason: str
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp:
    """A peer can be used from now on."""

    peer: PeerId
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDown:
    """A peer is gone, or failed too often."""

    peer: PeerId
    reason: str


# Every `kind` of WireReceiveFailed: a label of metrics, whose values have to be known in advance.
RECEIVE_FAILURES: Final[dict[str, str]] = {
    "DecodeFailed": "the bytes are not an envelope, or the payload is not a value of its type",
    "EnvelopeTooLarge": "over `envelope_bytes`",
    "BudgetExceeded": "no room left in `ingress_bytes`",
    "AllocationFailed": "no memory for the payload",
    "IngressFull": "too many events wait",
    "UnknownSite": "nothing here receives there",
    "UnknownComponent": "no component here has that ref",
    "UnknownComponentOp": "the component has no such op",
    "TypeMismatch": "another type than the site takes",
    "ShapeMismatch": "a tensor of another shape than the program declares",
    "UnknownTypeHash": "a type that is not known here",
    "CorrelationMismatch": "a request where a message is expected, or the like",
    "BackendMaterializeFailed": "the component that the tensor is for refused it",
    "GateDenied": "component messages: a gate before the component",
    "ComponentBusy": "component messages: too many calls of it are under way",
    "SenderNotOfClass": "the peer plays no class that sends there",
    "ShuttingDown": "a request that came after the host said that it leaves",
    "TooManyExecutions": "as many as `frames_per_peer` of its messages are being worked on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireReceiveFailed:
    """One fill of an envelope, or with `fill` -1 the whole of it, was refused.

    `kind` is one of RECEIVE_FAILURES.
    """

    peer: PeerId
    fill: int
    type_hash: int
    payload_size: int
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """Run `fn` in a worker thread, then call `Node.complete(token, …)` or `Node.fail`."""

    token: int
    fn: Callable[[], Value]
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapComplete:
    """A bootstrap has drained; `ok` when nothing of it failed.

    `target`: the Module, or `slot:<slot>`; empty for all that fires by itself at the start
    (Pulse), which may be several `executions`.
    """

    executions: int
    ok: bool
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleBudgetExceeded:
    """This poll stopped after `budget` ops; `remaining` wait for the next one."""

    budget: int
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """A named observation, for logs, metrics and progress displays."""

    name: str
    attributes: Mapping[str, Any]


# --- only while tracing -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionStarted:
    """An execution began, of whatever origin.

    `source_peer`, `wire_req_id` and `site` name the message that started it; None, 0 and 0
    where none did.
    """

    execution: int
    target: str
    entry: str
    at_ns: int
    source_peer: PeerId | None
    wire_req_id: int
    site: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCompleted:
    """An op has fired with a result; one that failed has its OpFailed instead.

    `started_ns` is before `ended_ns` where the op waited for something.
    """

    execution: int
    target: str
    op: str
    op_type: str
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSent:
    """An op sent a fill: with `wire_req_id`, to the place `suffix` (multiaddr bytes) of `peer`.

    `correlation` is NONE, REQUEST or RESPONSE.
    """

    execution: int
    target: str
    op: str
    peer: PeerId
    correlation: str
    wire_req_id: int
    suffix: bytes
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionEnded:
    """An execution is over, of whatever origin."""

    execution: int
    target: str
    entry: str
    started_ns: int
    ended_ns: int
    failures: int


Step: TypeAlias = (
    SendEnvelope
    | PublishMessage
    | FollowTopic
    | AppEvent
    | OutputSkipped
    | OpFailed
    | OpNotRun
    | ExecutionFinished
    | PeerResolveFailed
    | PeerUp
    | PeerDown
    | WireReceiveFailed
    | RunTask
    | BootstrapComplete
    | CycleBudgetExceeded
    | Telemetry
    | ExecutionStarted
    | OpCompleted
    | FillSent
    | ExecutionEnded
)
