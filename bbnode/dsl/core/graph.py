"""`Graph`: one function that is being recorded, with its values and requests.

Rule: only `Graph.emit` creates nodes. Names are counted per op type, so that the same calls in the
same order record the same function; every node carries the author's source line. Ports, attributes
and types of an op in the op table come from `ir/opset.py`: `Graph.record` writes all attributes,
defaults too, so that an artifact keeps its meaning when a default changes. Types are not compared
here but by the type solver, which knows more of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar, cast

from bbnode.dsl.core.attributes import (
    CONSTANT_ATTRIBUTE,
    WrongKind,
    constant_attribute,
    schema_attribute,
    table_attribute,
    tensor_type,
    typed_array,
)
from bbnode.dsl.core.names import check_class, check_name, hint
from bbnode.dsl.core.recorder import ModelRecorder, SlotUse
from bbnode.dsl.core.shapes import Shape, declared_type
from bbnode.dsl.errors import (
    BadArgument,
    BranchMisuse,
    DuplicateName,
    ForeignOutput,
    GraphClosed,
    NotReceived,
    RecordingError,
    UnknownName,
    author_line,
)
from bbnode.ir import keys, opset, types
from bbnode.ir.address import parse_address
from bbnode.ir.caps import MAX_DEADLINE_S
from bbnode.ir.errors import DecodeError
from bbnode.ir.flatten import join_fault
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    Function,
    OpNode,
    ValueNote,
    ValueType,
    annotation_text,
    annotations_on,
    sorted_opsets,
)
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import AddressVec, PeerIdVec

LEFT_OUT = object()  # default of an attribute that is written only if the caller sets it
# Outputs of one node: as many as codec.MAX_CHILDREN allows a composite to hold.
MAX_VARIADIC_OUTPUTS = 65_536
NS_PER_S = 1_000_000_000
MAX_HOPS = 100_000  # the compiler's limit for a chain depth

_ANY_ADDRESS = parse_address(
    "/ip4/127.0.0.1"
)  # an example from which the type of multiaddrs is taken

Error = TypeVar("Error", bound=RecordingError)
Carrier = TypeVar("Carrier")


def spec_of(domain: str, op_type: str) -> OpSpec:
    """Return the row of an op that this package names itself."""
    spec = opset.lookup_op(domain, op_type)
    if spec is None:  # a helper without its row is our bug, which the first test finds
        raise LookupError(f"{domain}::{op_type} is not in the op table")
    return spec


_PASS_THROUGH = spec_of(keys.SYSCALL_DOMAIN, "PassThrough")
_CONSTANT = spec_of(keys.SYSCALL_DOMAIN, "Constant")
_BUNDLE = spec_of(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE)
_UNBUNDLE = spec_of(keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE)
_SEND = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND)
_REQUEST = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND_REQ_BATCHED)
_COLLECT = spec_of(keys.SYSCALL_DOMAIN, keys.OP_COLLECT)
_RESPOND = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND_RESP)
_WHEN = spec_of(keys.SYSCALL_DOMAIN, "When")


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A value of a recording: `name` in its function, and `type` as far as it is known.

    It stands for a value that will exist when the program runs; it belongs to the one Graph
    that recorded it and has no content of its own.
    """

    graph: Graph = field(repr=False)
    name: str
    type: TypeNode
    from_peer: Output | None = field(default=None, repr=False)

    @property
    def sender(self) -> Output:
        """The peer that a received value came from (PeerId, on the receiver's class).

        Raises:
            NotReceived: no peer sent it; only results of `net_out` and `request` have a sender.
        """
        if self.from_peer is None:
            raise self.graph.error(
                NotReceived,
                f"{self.name!r} was not received, so that it has no sender; only results "
                "of g.net_out, and r.received of a g.request, have one",
            )
        return self.from_peer

    def __bool__(self) -> NoReturn:
        raise self.graph.error(
            BadArgument,
            f"{self.name!r} has no truth value while the program is recorded; "
            "decide at run time with `Where` or `If` of a BackendSlot",
        )

    def _not_by_operators(self, *_: object) -> NoReturn:
        raise self.graph.error(
            BadArgument,
            f"operators of Python compute nothing with {self.name!r} while the program is "
            "recorded; record an op of a BackendSlot: compute.add(g, a, b), compute.less(g, a, b)",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _not_by_operators
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = _not_by_operators
    __lt__ = __le__ = __gt__ = __ge__ = _not_by_operators

    def _has_no_content(self, *_: object, **__: object) -> NoReturn:
        raise self.graph.error(
            BadArgument,
            f"{self.name!r} has no content while the program is recorded: it is no number, has no "
            "length, items or text, and numpy can't read it; use ops of a BackendSlot, as "
            "compute.gather(g, x, i) or compute.reduce_mean(g, x)",
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = _has_no_content
    # This also prevents iteration, for which Python falls back to __getitem__.
    __len__ = __contains__ = __getitem__ = __array__ = _has_no_content

    def __format__(self, spec: str) -> str:
        return self._has_no_content() if spec else repr(self)


class AnswersOutput(Output):
    """The answers to a request: a ResponseBatch in PeerId order, on the requesting class.

    Each property and method is an op of the engine, which needs no backend; its result is a value
    like any other. A property always returns the same value.
    """

    __slots__ = ()

    @property
    def peers(self) -> Output:
        """The peers that answered, a PeerIdVec in PeerId order, of the requested class."""
        return self.graph.opened("Peers", self)[0]

    @property
    def missing(self) -> Output:
        """The requested peers that have not answered, a PeerIdVec in PeerId order."""
        return self.graph.opened("Missing", self)[0]

    @property
    def count(self) -> Output:
        """The number of peers that answered, int64 []."""
        return self.graph.opened("Count", self)[0]

    @property
    def stacked(self) -> Output:
        """All answers in one tensor, [n, …] where each is one of […]; row i is of peer i.

        At run time the op fails if the answers have several shapes (AnswersDiffer, which names the
        peers) or the batch is empty (NoAnswer).
        """
        return self.graph.opened("Stack", self)[0]

    def concatenated(self, *, axis: int = 0) -> Output:
        """All answers in one tensor, concatenated along `axis`; errors as for `stacked`."""
        return self.graph.opened("Concat", self, axis=axis)[0]

    @property
    def values(self) -> Output:
        """All answers, in PeerId order, as an ONNX sequence of tensors of any shapes.

        Ops of a BackendSlot read it: `sequence_at`, `sequence_length`, `concat_from_sequence`. An
        empty batch gives an empty sequence.
        """
        return self.graph.opened("Values", self)[0]

    def of(self, peer: Output) -> Output:
        """The answer of one peer; the op fails if it has not answered (NoAnswer)."""
        return self.graph.record(spec_of(keys.RESPONSES_DOMAIN, "Of"), (self, peer))[0]

    def entry(self, name: str, type: TypeNode = types.TENSOR_FLOAT) -> Output:  # noqa: A002
        """One entry of answers that are Metadata, as a tensor [n] of the given type."""
        kind = need_tensor_type("type", type)
        return self.graph.opened("Entry", self, name=name, to=kind.id)[0]

    def unbundled(self, part_types: Sequence[TypeNode]) -> tuple[AnswersOutput, ...]:
        """One batch for each part of answers that are composites, from the same peers.

        Raises:
            BadArgument: `part_types` is empty, or holds something that is not a type.
        """
        g = self.graph
        given = g.part_types("unbundled", part_types)
        made = g.record(
            spec_of(keys.RESPONSES_DOMAIN, keys.OP_UNBUNDLE), (self,), given,
            variadic=[types.RESPONSE_BATCH] * len(part_types),
        )  # fmt: skip
        return cast("tuple[AnswersOutput, ...]", made)

    def usable(self, *, k: int = 10, query: Output | None = None) -> AnswersOutput:
        """The plausible ones of answers that are SearchResults; the other peers count as missing.

        An implausible answer is reported under the peer's name: more than `k` hits for a query, a
        duplicate id among them, a distance that is NaN or minus infinity, an order that is not
        nearest first, or another number of queries than in `query`, as for `merged`.
        """
        inputs = (self,) if query is None else (self, query)
        outputs = self.graph.record(spec_of(keys.RESPONSES_DOMAIN, "Usable"), inputs, {"k": k})
        return cast(AnswersOutput, outputs[0])

    def merged(
        self, *, k: int = 10, query: Output | None = None, distinct: int = 0, share: int = 0
    ) -> ResultsOutput:
        """The `k` nearest of answers that are SearchResults, nearest first; `.senders` found them.

        Args:
            k: number of hits for each query.
            query: the query, [D] or [Q, D]: answers for another number of queries are left out and
                reported. Without it, answers that differ from the majority are.
            distinct: 1: only the nearest of the hits with one id, for peers that hold the same
                items. n of 2 or more: only ids that n peers have found, each at the distance that
                n of them support, so that n - 1 liars can't invent an id or bring one nearer.
                0: all hits.
            share: maximum of hits of one peer for a query; 0: any number. It limits the places
                that a peer gets by calling all its items near.
        """
        inputs = (self,) if query is None else (self, query)
        spec = spec_of(keys.RESPONSES_DOMAIN, "Merge")
        outputs = self.graph.record(
            spec, inputs, {"k": k, "distinct": int(distinct), "share": share}
        )
        return cast(ResultsOutput, outputs[0])


class ResultsOutput(Output):
    """The results of a search: SearchResults, nearest first."""

    __slots__ = ()

    @property
    def ids(self) -> Output:
        """The ids, int64 [k]; for a batch of queries [Q, k], with -1 at the end of short rows."""
        return self.graph.opened("Ids", self, domain=keys.SEARCH_DOMAIN)[0]

    @property
    def distances(self) -> Output:
        """The distances, float32 of the same shape; +inf beside an id of -1."""
        return self.graph.opened("Distances", self, domain=keys.SEARCH_DOMAIN)[0]

    @property
    def metadata(self) -> Output:
        """The metadata of each hit, row by row, a MetadataVec; empty if no item has any."""
        return self.graph.opened("Metadata", self, domain=keys.SEARCH_DOMAIN)[0]

    @property
    def senders(self) -> Output:
        """The peer that found each hit, row by row, a PeerIdVec; empty if all were found here."""
        return self.graph.opened("Senders", self, domain=keys.SEARCH_DOMAIN)[0]

    def entry(self, name: str, type: TypeNode = types.TENSOR_STRING) -> Output:  # noqa: A002
        """One entry of the hits' metadata, row by row, as a tensor [hits] of the given type.

        A hit without it, or with one of another kind, has "", 0, False or, for floats, NaN.
        """
        kind = need_tensor_type("type", type)
        made = self.graph.opened("Entry", self, domain=keys.SEARCH_DOMAIN, name=name, to=kind.id)
        return made[0]


_OUTPUT_OF = {types.RESPONSE_BATCH: AnswersOutput, types.SEARCH_RESULTS: ResultsOutput}


# The argument `after=`: values that must be there before the op fires.
After = Output | list[Output] | tuple[Output, ...] | None


class TensorCoder(Protocol):
    """The methods of a CodecSlot that a port with `codec=` calls."""

    def encode(self, g: Graph, tensor: Output) -> Output:
        """Record the encoding of a tensor."""

    def decode(self, g: Graph, code: Output) -> Output:
        """Record the decoding of a code."""

    def decode_all(self, g: Graph, responses: Output, *, parts: str) -> AnswersOutput:
        """Record the decoding of all answers of a batch."""


# The argument `codec=`: a CodecSlot, or several in encoding order.
Coding = TensorCoder | Sequence[TensorCoder] | None


class Request:
    """One request to a cohort of peers and its one batch of answers.

    Attributes:
        port: the author's name of the request.
        received: the value, on the peers' class; its `.sender` is the requester.
        request_id: the request's id, on the requesting class.
    """

    __slots__ = (
        *("_answered", "_remote_id", "_responses", "_responses_read"),
        *("port", "received", "request_id"),
    )

    def __init__(self, port: str, recorded: tuple[Output, ...]) -> None:
        request_id, responses, received, sender, remote_id = recorded
        self.port = port
        self.received = dataclasses.replace(received, from_peer=sender)
        self._responses = cast(AnswersOutput, responses)
        self._responses_read = False
        self.request_id = request_id
        self._remote_id = remote_id
        self._answered = ""

    @property
    def responses(self) -> AnswersOutput:
        """The answers, back on the requesting class."""
        self._responses_read = True
        return self._responses

    def respond(self, value: Output, *, after: After = None, codec: Coding = None) -> None:
        """Answer the request, on the peers' class, once.

        With `codec` the answer travels as its code, as in `net_out`, and `responses` are the
        decoded answers.

        Raises:
            BadArgument: the request is answered already; `codec` has nothing to encode; or
                `responses` were read before a `codec` was set.
        """
        g = self.received.graph
        if self._answered:
            raise g.error(
                BadArgument,
                f"request {self.port!r} is answered already at {self._answered}; a request has "
                "one answer: put several values into one with g.bundle([…])",
            )
        coders = g.coders(codec)
        if coders and self._responses_read:
            raise g.error(
                BadArgument,
                f"the responses of request {self.port!r} were read before respond(…, codec=…); "
                "record the answer first, and then what reads the responses",
            )
        kinds = [part.type for part in g.parts_of(value)]
        value, marks = g.encoded(value, coders)
        g.record(
            _RESPOND, (value, self.received.sender, self._remote_id), after=after,
            metadata={keys.PORT_KEY: self.port},
        )  # fmt: skip
        for coder in reversed(coders):
            self._responses = coder.decode_all(g, self._responses, parts=marks)
        if coders:
            known = ",".join(kind.id if kind.is_leaf else "" for kind in kinds)
            g.last_node.metadata[keys.DECODED_TYPES_KEY] = known
        self._answered = author_line()


class Graph:
    """One Module body that is being recorded; the argument of `body` and `bootstrap`.

    Attributes:
        recorder: the recorder of the whole program.
        name, home: name and home of the Module.
        is_bootstrap: True if it records a Module's `bootstrap`.
    """

    def __init__(self, recorder: ModelRecorder, *, name: str, home: str) -> None:
        self.recorder = recorder
        self.name = name
        self.home = home
        self.is_bootstrap = False
        self._function = Function(name=name, domain=keys.MODULE_DOMAIN)
        self._counts: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self._slots: dict[str, SlotUse] = {}
        self._opsets: set[tuple[str, int]] = set()
        self._scopes: list[str] = []
        self._closed = False
        self._branch = ""  # title of this Graph's branch that is being recorded, if any
        self._received: dict[str, Output] = {}
        # Port -> the value of its first send, as it travels, and the slots that encode it.
        self._sent: dict[str, tuple[Output, tuple[TensorCoder, ...]]] = {}
        self._bundled: dict[str, tuple[Output, ...]] = {}
        self._request_ports: set[str] = set()
        self._opened: dict[tuple[object, ...], tuple[Output, ...]] = {}

    def error(self, kind: type[Error], what: str) -> Error:
        """Return an error to raise, with the Module and the source line of this recording."""
        error = kind(what)
        return error if error.module else kind(what, self.name)

    # --- ports -----------------------------------------------------------------------------

    def input(
        self, name: str, type: TypeNode = types.ANY,  # noqa: A002
        *, shape: Shape | None = None, denotation: str = "",
        axes: Sequence[str | None] | None = None, home: str | None = None,
    ) -> Output:  # fmt: skip
        """Declare a value that the invoker or caller of the Module passes in.

        Args:
            name: name of the input, which is also the name of the value.
            type: type of the value, as far as it is known.
            shape: shape of a tensor; for each axis its length, a name (axes with one name have
                one length), or None. A value of another shape is refused.
            denotation: ONNX's type denotation of the tensor: IMAGE, AUDIO, TEXT, TENSOR.
            axes: ONNX's denotation of each axis, such as DATA_BATCH, or None.
            home: the class of peer that receives the value; None for the Module's home. Only the
                program itself has inputs on several classes, not a Module that another one calls.

        Raises:
            BadName, DuplicateName: the name is invalid, or is taken.
            BadArgument: `type` is not a type, or the shape or a denotation is invalid.
        """
        self.check_open()
        check_name("input name", name)
        if not isinstance(type, TypeNode):
            raise BadArgument(
                f"type={type!r:.60} of input {name!r} is not a type; use one of bbnode.dsl.types, "
                "e.g. types.TENSOR_FLOAT"
            )
        declared = declared_type(f"input {name!r}", type, shape, denotation, axes)
        value = self.declare(name, declared.kind or type)
        self.declare_as(value, declared)
        self._function.inputs.append(name)
        if home is not None and check_class(home) != self.home:
            note = self._function.notes.setdefault(name, ValueNote())
            note.metadata[keys.INPUT_HOME_KEY] = home
        return value

    def output(
        self, name: str, value: Output, *, after: After = None, shape: Shape | None = None,
        denotation: str = "", axes: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        """Hand a value out under a name (recorded as a `PassThrough`).

        Args:
            name: name of the output.
            value: the value to hand out.
            after: values that must be there before.
            shape, denotation, axes: of the value, as for `input`.

        Raises:
            BadName, DuplicateName: the name is invalid, or is taken.
            BadArgument: the shape or a denotation is invalid.
        """
        check_name("output name", name)
        self.value_name(value)
        declared = declared_type(f"output {name!r}", value.type, shape, denotation, axes)
        (handed_out,) = self.emit(
            _PASS_THROUGH.domain, _PASS_THROUGH.op_type, inputs=(value,),
            outputs=(("value", declared.kind or value.type),), after=after, value_names=(name,),
        )  # fmt: skip
        if declared.shape is not None or declared.denotation:
            self._function.types[handed_out.name] = declared
        self._function.outputs.append(name)

    def expect(
        self, value: Output, type: TypeNode | None = None,  # noqa: A002
        *, shape: Shape | None = None, denotation: str = "",
        axes: Sequence[str | None] | None = None,
    ) -> Output:  # fmt: skip
        """Declare the type or shape of a value that is not known otherwise, such as a component's.

        The compiler refuses a program that contradicts the declaration.

        Args:
            value: a value of this Graph.
            type: type of the value; None if it is known.
            shape, denotation, axes: as for `input`.

        Returns:
            The same value, with that type.

        Raises:
            BadArgument: the value is of another type, or the shape or a denotation is invalid.
            ForeignOutput: the value belongs to another recording.
        """
        self.check_open()
        name = self.value_name(value)
        if value.graph is not self:
            raise self.error(ForeignOutput, f"{name!r} is declared where it is recorded")
        wanted = value.type if type is None else type
        if not isinstance(wanted, TypeNode):
            raise BadArgument(f"type={type!r:.60} of {name!r} is not a type; see bbnode.dsl.types")
        kind = types.meet(value.type, wanted)
        if kind is None:
            raise self.error(BadArgument, f"{name!r} is {value.type.name}, not {wanted.name}")
        declared = declared_type(repr(name), kind, shape, denotation, axes)
        if shape is None and not denotation:
            declared = self._function.types[name].narrowed(declared.kind)
        self._function.types[name] = declared
        self.declare_as(value, declared)
        return dataclasses.replace(value, type=declared.kind or kind)

    def declare_as(self, value: Output, declared: ValueType) -> None:
        """Record a shape or denotation, and the source line, for which an input has no op."""
        if declared.shape is None and not declared.denotation:
            return
        self._function.types[value.name] = declared
        note = self._function.notes.setdefault(value.name, ValueNote())
        note.metadata[keys.SOURCE_LINE_KEY] = author_line()

    # --- the wire --------------------------------------------------------------------------

    def net_out(
        self, port: str, peers: Output, value: Output, *, after: After = None,
        hops: int | None = None, budget: float | None = None, shape: Shape | None = None,
        codec: Coding = None,
    ) -> Output:  # fmt: skip
        """Send `value` to `peers` and return the received value, on the class of those peers.

        Values arrive at ports. Several sends to one port of one class arrive as one value
        there: its readers fire for each delivery, and its `.sender` is the sender of that
        delivery. Sends of one port to several classes arrive on each of them; they have one
        type. A class may send to itself.

        Args:
            port: where the value arrives; `lookup_output` finds the received value by it.
            peers: a PeerIdVec (of a selector, an input, a constant with a `peer_class`), or
                one PeerId such as the `.sender` of a received value.
            value: the value to send.
            after: values that must be there before.
            hops: number of successive sends that the time budget of this one has to cover,
                itself included; None: as many as the program shows.
            budget: seconds for everything that this message starts, further sends included: a
                budget of its own. None: the rest of the budget of the message that started this
                execution, if one did. A loop over the network renews its budget this way.
            shape: shape of the received value, as for `input`; None: that of `value`, as far as
                the compiler can infer it. A value that arrives in another shape is refused.
            codec: a CodecSlot that encodes the value for the way, or each part of a bundle that is
                a tensor of floats; the result is decoded. With a list of slots the first one
                encodes first. All sends to one port must have the same.

        Returns:
            The received value; its `.sender` is the peer that sent it.

        Raises:
            DuplicateName: a request has that port.
            BadArgument: `hops` is not a number of hops, or `budget` not a number of seconds;
                `codec` is no CodecSlot, not that of an earlier send, or has nothing to encode.
        """
        # The compiler makes the receiving op from the outputs on the receiver's side.
        if port in self._request_ports:
            self._check_new_port(port)
        check_name("port name", port)
        coders = self.coders(codec)
        first, known = self._sent.get(port, (None, coders))
        if [*map(id, coders)] != [*map(id, known)]:
            raise self.error(
                BadArgument,
                f"port {port!r} is sent to with another codec; give all its sends the same one",
            )
        metadata = self._port_metadata(port, hops)
        if budget is not None:
            metadata[keys.BUDGET_NS_KEY] = str(_budget_ns(port, budget, hops))
        if first is not None:
            metadata[keys.FAN_IN_KEY] = first.name
        code, marks = self.encoded(value, coders)
        wire, sender = self.record(_SEND, (code, peers), after=after, metadata=metadata)
        self._sent.setdefault(port, (wire, coders))
        received = self.decoded(wire, value, coders, marks)
        if shape is not None:
            received = self.expect(received, shape=shape)
        received = dataclasses.replace(received, from_peer=sender)
        self._received.setdefault(port, received)
        return received

    def request(
        self, port: str, peers: Output, value: Output, *, quorum: int = 0,
        deadline: float = 0.0, after: After = None, hops: int | None = None, codec: Coding = None,
    ) -> Request:  # fmt: skip
        """Ask `peers` and wait for their answers, as one batch.

        The execution waits until all have answered, or until the deadline when at least
        `quorum` have; with fewer the op fails.

        Args:
            port: a unique name of the request; `lookup_output` finds `received` by it.
            peers, value, after, hops, codec: as for `net_out`; answers have a codec of their own.
            quorum: number of answers that is enough at the deadline; 0 for all.
            deadline: seconds to wait, which also bound the peers' work; 0 for the rest of the
                request, message or call that started the execution, else for the limit `wait_s`
                of the node, for the way there and again for the way back.

        Raises:
            DuplicateName: the port is taken.
            BadArgument: `deadline`, `quorum` or `hops` is out of range, or as for `net_out`.
        """
        self._check_new_port(port)
        own_ns = deadline_ns_of(f"deadline={deadline!r:.40} of request {port!r}", deadline)
        attributes = {keys.ATTR_QUORUM: quorum, keys.ATTR_DEADLINE_NS: own_ns}
        metadata = self._port_metadata(port, hops)
        coders = self.coders(codec)
        code, marks = self.encoded(value, coders)
        request = Request(
            port, self.record(_REQUEST, (code, peers), attributes, after=after, metadata=metadata)
        )
        if coders:
            received = self.decoded(request.received, value, coders, marks)
            request.received = dataclasses.replace(received, from_peer=request.received.sender)
        self._received[port] = request.received
        self._request_ports.add(port)
        return request

    def when(self, condition: Output, *, after: After = None) -> Output:
        """A trigger that fires if `condition`, one bool, is true: for `after=` of any op.

        If it is false, ops that wait for the trigger are skipped, with all ops that need their
        values; everything else goes on. The host is notified of a skipped output. The condition
        has to live on the class of the ops that wait for it.

        Raises:
            BadArgument: `condition` is no tensor of bools.
        """
        return self._when(condition, 1, after)

    def unless(self, condition: Output, *, after: After = None) -> Output:
        """The opposite of `when`: a trigger that fires if `condition` is false."""
        return self._when(condition, 0, after)

    def _when(self, condition: Output, expect: int, after: After) -> Output:
        self.value_name(condition)
        kind = condition.type
        if types.meet(kind, types.TENSOR_BOOL) is None:
            raise self.error(
                BadArgument,
                f"the condition {condition.name!r} is {kind.name} where one bool is needed; a "
                "BackendSlot compares: greater(g, value, limit)",
            )
        return self.record(_WHEN, (condition,), {"expect": expect}, after=after)[0]

    def respond(
        self, request: Request, value: Output, *, after: After = None, codec: Coding = None
    ) -> None:
        """Answer a request, on the peers' class: the same as `request.respond(value)`."""
        if not isinstance(request, Request):
            raise self.error(
                BadArgument, f"{request!r:.60} is not a request; g.request returns one"
            )
        self.value_name(request.received)
        request.respond(value, after=after, codec=codec)

    def collect(
        self, value: Output, *, n: int = 0, until: float = 0.0, quorum: int = 0,
        per_peer: bool = True, after: After = None,
    ) -> AnswersOutput:  # fmt: skip
        """Gather a value of several deliveries, and go on once with all of them.

        Each delivery is an execution of its own; this op joins their values. Readers of the
        result run in an execution that starts when the batch is complete, and see nothing else.
        The next delivery begins the next batch.

        Args:
            value: a received value, or one computed from it.
            n: number of deliveries that complete a batch; 0 for as many as arrive in `until`.
            until: seconds from the first delivery of a batch to its end; 0 for the limit `wait_s`
                of the node, allowed only with `n`.
            quorum: number of deliveries that is enough at the end of the time; 0 for `n`, or for
                one if `n` is 0. With fewer the batch fails, with an error that names the senders.
            per_peer: a peer counts once in a batch, and its second value is refused; False
                accepts all deliveries.
            after: as for `net_out`.

        Returns:
            The values with their peers, in PeerId order: a batch like `r.responses` of a
            `g.request`.

        Raises:
            BadArgument: a number is out of range, or neither `n` nor `until` ends a batch.
        """
        given: object = until
        seconds = given if isinstance(given, int | float) else math.nan
        if not 0 <= seconds <= MAX_DEADLINE_S:
            raise BadArgument(
                f"until={until!r:.40} of g.collect has to be a number of seconds between 0 and "
                f"{MAX_DEADLINE_S:.0f}"
            )
        attributes = {
            "n": n,
            "until_ns": round(seconds * NS_PER_S),
            "quorum": quorum,
            "per_peer": int(per_peer),
        }
        (batch,) = self.record(_COLLECT, (value,), attributes, after=after)
        self.check_join()
        return cast(AnswersOutput, batch)

    def check_join(self) -> None:
        """Raise BadArgument if the numbers of the Collect or Threshold recorded last don't fit."""
        fault = join_fault(self.last_node)
        if fault is not None:
            raise self.error(BadArgument, f"{self.last_node.op_type}: {fault}")

    def lookup_output(self, port: str) -> Output:
        """Return the value that the `net_out` or `request` of that name delivers.

        For a port with several sends it is the value that arrives from any of the sends to the
        class of the first one. The value on another class is the result of that `net_out`.

        Raises:
            UnknownName: no send of that name was recorded yet.
        """
        received = self._received.get(port)
        if received is None:
            raise UnknownName(f"nothing was sent as {port!r}{hint(str(port), self._received)}")
        return received

    def _check_new_port(self, port: str) -> None:
        check_name("port name", port)
        if port in self._received:
            raise DuplicateName(
                f"port {port!r} is sent to already; give each request a name of its own"
            )

    def _port_metadata(self, port: str, hops: object) -> dict[str, str]:
        if hops is None:
            return {keys.PORT_KEY: port}
        if type(hops) is not int or not 0 < hops <= MAX_HOPS:
            raise BadArgument(
                f"hops={hops!r:.40} of {port!r} has to be an integer from 1 (the receiver sends "
                f"nothing on) to {MAX_HOPS}, or None to let the compiler count them"
            )
        return {keys.PORT_KEY: port, keys.CHAIN_DEPTH_KEY: str(hops)}

    # --- codecs ----------------------------------------------------------------------------

    def coders(self, given: Coding) -> tuple[TensorCoder, ...]:
        """Return the slots in an argument `codec`. Raises BadArgument for anything else."""
        listed = given if isinstance(given, list | tuple) else () if given is None else (given,)
        for each in listed:
            if getattr(each, "ROLE", None) != "Codec" or isinstance(each, type):
                raise self.error(
                    BadArgument,
                    f"codec={each!r:.60} is no CodecSlot; write codec=CodecSlot(name), and bind a "
                    "codec such as bbnode.Int8Codec to that slot",
                )
        return cast("tuple[TensorCoder, ...]", tuple(listed))

    def parts_of(self, value: Output) -> tuple[Output, ...]:
        """Return the parts of a value that was bundled here; any other value is its only part."""
        return self._bundled.get(value.name, (value,))

    def encoded(self, value: Output, coders: Sequence[TensorCoder]) -> tuple[Output, str]:
        """Return a value as it travels, and per part of a bundle "1" if it is encoded, else "0".

        Raises:
            BadArgument: it is no tensor, and no bundle made here with a tensor of floats in it.
        """
        self.value_name(value)
        if not coders:
            return value, ""
        if value.type.is_a(types.TENSOR):
            for coder in coders:
                value = coder.encode(self, value)
            return value, ""
        parts = self.parts_of(value)
        marks = "".join("01"[_is_of_floats(part.type)] for part in parts)
        if "1" not in marks:
            raise self.error(
                BadArgument,
                f"codec= has nothing to encode in {value.name!r} ({value.type.name}); give it a "
                "tensor, or a g.bundle of this Graph in which a part is known as a tensor of "
                "floats (g.expect says what a value is)",
            )
        sent = [
            self.encoded(part, coders)[0] if mark == "1" else part
            for part, mark in zip(parts, marks, strict=True)
        ]
        return self.bundle(sent), marks

    def decoded(
        self, code: Output, value: Output, coders: Sequence[TensorCoder], marks: str
    ) -> Output:
        """Return the decoded form of `code`, which was encoded from `value`."""
        if not coders:
            return code
        if marks:
            kinds = [part.type for part in self._bundled[value.name]]
            sent = [types.TENSOR if m == "1" else k for m, k in zip(marks, kinds, strict=True)]
            parts = zip(self.unbundle(code, sent), self._bundled[value.name], marks, strict=True)
            return self.bundle(
                [self.decoded(p, was, coders, "") if m == "1" else p for p, was, m in parts]
            )
        for coder in reversed(coders):
            code = coder.decode(self, code)
        if not value.type.is_leaf:
            return code
        known = self._function.types.get(value.name)  # the codec bounds its output by the shape
        return self.expect(code, value.type, shape=None if known is None else known.shape)

    def with_entry(
        self, metadata: Output, name: str, values: Output, *, after: After = None
    ) -> Output:
        """Return metadata of several items with one more entry: `values` [N], texts or numbers.

        `metadata` is a MetadataVec of N, or an empty one. `.entry(name)` of search results reads
        it. At run time, another number of values fails the op.
        """
        spec = spec_of(keys.SEARCH_DOMAIN, "WithEntry")
        return self.record(spec, (metadata, values), {"name": name}, after=after)[0]

    # --- composites ------------------------------------------------------------------------

    def bundle(self, parts: Sequence[Output], *, after: After = None) -> Output:
        """Pack values into one composite value.

        Raises:
            BadArgument: `parts` is empty or not a list.
        """
        self._need_items("bundle", parts, "values")
        for part in parts:
            self.value_name(part)
        attributes = _children([part.type for part in parts])
        (composite,) = self.record(_BUNDLE, parts, attributes, after=after)
        self._bundled[composite.name] = tuple(parts)
        return composite

    def unbundle(
        self, composite: Output, part_types: Sequence[TypeNode], *, after: After = None
    ) -> tuple[Output, ...]:
        """Take a composite apart; `part_types` are the types of its parts, in order.

        Raises:
            BadArgument: `part_types` is empty, or holds something that is not a type.
        """
        attributes = self.part_types("unbundle", part_types)
        return self.record(_UNBUNDLE, (composite,), attributes, after=after, variadic=part_types)

    def part_types(self, what: str, given: Sequence[TypeNode]) -> dict[str, Any]:
        """Return the attributes that hold the types of parts, or raise BadArgument."""
        self._need_items(what, given, "types")
        for part in given:
            if not isinstance(part, TypeNode):
                raise BadArgument(
                    f"{part!r:.60} is not a type; use bbnode.dsl.types, e.g. types.TENSOR"
                )
        return _children(given)

    def opened(
        self, op_type: str, value: Output, *, domain: str = keys.RESPONSES_DOMAIN,
        **attributes: Any,
    ) -> tuple[Output, ...]:  # fmt: skip
        """Return the outputs of an op that opens a value; equal calls are recorded once."""
        key = (domain, op_type, value.name, *attributes.items())
        try:
            known = self._opened.get(key)
        except TypeError:  # an unhashable attribute is invalid; recording reports it
            known = None
        if known is None:
            known = self.record(spec_of(domain, op_type), (value,), attributes)
            self._opened[key] = known
        return known

    def _need_items(self, what: str, items: object, kind: str) -> None:
        if not isinstance(items, Sequence) or isinstance(items, str | bytes) or not items:
            raise BadArgument(f"g.{what} takes a list of one or more {kind}, got {items!r:.60}")

    # --- constants -------------------------------------------------------------------------

    def constant(self, value: Any, *, after: After = None) -> Output:
        """Record a constant value of the program.

        Args:
            value: an array, number, bool or list of them (a tensor: Python floats are
                float32, ints int64); a PeerId or a list of them; a multiaddr; or any other
                carrier of `bbnode.dsl.values`.
            after: values that must be there before; they also determine the class of peer on
                which the constant lives, if that is not the Module's home.

        Raises:
            BadArgument: `value` is not a value.
        """
        return self._constant(value, after)

    def _constant(self, value: Any, after: After, **metadata: str) -> Output:
        try:
            attribute, kind = constant_attribute(value)
        except WrongKind as error:
            raise BadArgument(f"{value!r:.60} can't be a constant: {error}") from error
        (output,) = self.emit(
            _CONSTANT.domain, _CONSTANT.op_type, outputs=((CONSTANT_ATTRIBUTE, kind),),
            attributes={CONSTANT_ATTRIBUTE: attribute}, metadata=metadata, after=after,
        )  # fmt: skip
        return output

    def tensor(
        self, value: Any, type: TypeNode = types.TENSOR_FLOAT,  # noqa: A002
        *, after: After = None,
    ) -> Output:  # fmt: skip
        """Record a tensor constant of a certain element type, unlike `constant`, which chooses it.

        Args:
            value: an array, number, bool or list of them.
            type: a tensor type, e.g. `types.TENSOR_INT64`.
            after: as for `constant`.

        Raises:
            BadArgument: `type` is not a tensor type, or cannot hold all of the values.
        """
        kind = need_tensor_type("type", type)
        try:
            wanted = typed_array(value, kind)
        except WrongKind as error:
            raise BadArgument(
                f"{value!r:.60} can't be a {kind.name}: it has to be {error}"
            ) from error
        return self.constant(wanted, after=after)

    def peer_id(
        self, peer: PeerId | str, *, peer_class: str | None = None, after: After = None
    ) -> Output:
        """Record a PeerId constant, also from base58btc text; `peer_class` as for `peer_ids`."""
        return self._fixed(self._peer(peer), peer_class, after)

    def peer_ids(
        self, peers: Iterable[PeerId | str], *, peer_class: str | None = None, after: After = None
    ) -> Output:
        """Record a PeerIdVec constant, e.g. the `peers` of a send to fixed peers. It may be empty.

        Args:
            peers: PeerIds, or their base58btc texts.
            peer_class: the class of these peers; a send to them needs it.
            after: as for `constant`.
        """
        return self._fixed(PeerIdVec(self._peer(peer) for peer in peers), peer_class, after)

    def _fixed(self, peers: PeerId | PeerIdVec, peer_class: str | None, after: After) -> Output:
        if peer_class is None:
            return self._constant(peers, after)
        return self._constant(peers, after, **{keys.PEER_CLASS_KEY: check_class(peer_class)})

    def address(self, address: Any, *, after: After = None) -> Output:
        """Record a multiaddr constant, from a multiaddr or its text."""
        return self.constant(self._address(address), after=after)

    def addresses(self, addresses: Iterable[Any], *, after: After = None) -> Output:
        """Record an AddressVec constant. It may be empty."""
        return self.constant(AddressVec(self._address(each) for each in addresses), after=after)

    def _peer(self, peer: PeerId | str) -> PeerId:
        return _parsed(PeerId, PeerId.parse, peer, "a PeerId")

    def _address(self, address: Any) -> Any:
        return _parsed(type(_ANY_ADDRESS), parse_address, address, "a multiaddr")

    # --- nodes -----------------------------------------------------------------------------

    def record(
        self, spec: OpSpec, inputs: Sequence[Output | None] = (),
        attributes: Mapping[str, Any] | None = None, *, slot: SlotUse | None = None,
        after: After = None, deadline: float = 0.0, variadic: int | Sequence[TypeNode] = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[Output, ...]:  # fmt: skip
        """Record one op of the op table and return its outputs in port order.

        Args:
            spec: the op's row.
            inputs: one value per port, None for an optional one; a variadic port takes the rest.
            attributes: by name; omitted ones take their defaults.
            slot, after, metadata: as for `emit`.
            deadline: seconds that the op may take; 0 for no deadline of its own.
            variadic: number of outputs of a variadic port, or their types.

        Raises:
            BadArgument: too few or too many inputs; an unknown, missing or invalid attribute.
        """
        own_ns = deadline_ns_of(f"deadline={deadline!r:.40} of {spec.op_type}", deadline)
        if own_ns:
            metadata = {**(metadata or {}), keys.DEADLINE_NS_KEY: str(own_ns)}
        required = sum(not port.optional for port in spec.inputs)
        bound = self.bound_inputs(spec.op_type, spec.inputs, inputs, required)

        def made(name: str, value: Any) -> Attribute:
            if name in spec.kinds:
                return schema_attribute(value, AttributeKind(spec.kinds[name]))
            default = spec.attributes[name]
            return table_attribute(name, value, None if default is opset.REQUIRED else default)

        given = checked_attributes(spec.op_type, spec.attributes, attributes or {}, made)
        known = type_variables(bound)
        count = variadic if isinstance(variadic, int) else len(variadic)
        if count > MAX_VARIADIC_OUTPUTS:
            raise BadArgument(
                f"{spec.op_type} with {count} outputs; at most {MAX_VARIADIC_OUTPUTS}"
            )
        ports: list[tuple[str, TypeNode]] = []
        for port in spec.outputs:
            kind = known.get(port.type, port.bound) if isinstance(port.type, str) else port.type
            if not port.variadic:
                ports.append((port.name, kind))
                continue
            kinds = [kind] * variadic if isinstance(variadic, int) else variadic
            ports.extend((f"{port.name}_{i}", each) for i, each in enumerate(kinds))
        values = [value for _, value in bound]
        while values and values[-1] is None:  # ONNX omits trailing optional inputs
            values.pop()
        return self.emit(
            spec.domain, spec.op_type, inputs=values, outputs=ports, attributes=given,
            metadata=metadata, slot=slot, after=after, opset_version=spec.version,
        )  # fmt: skip

    def bound_inputs(
        self, op_type: str, ports: Sequence[Port], inputs: Sequence[Output | None], required: int
    ) -> list[tuple[Port, Output | None]]:
        """Pair each input of an op with its port. Raises BadArgument if they do not fit."""
        for value in inputs:
            if value is not None:
                self.value_name(value)
        fixed = [port for port in ports if not port.variadic]
        rest = next((port for port in ports if port.variadic), None)
        if len(inputs) < required or (rest is None and len(inputs) > len(fixed)):
            raise BadArgument(
                f"{op_type} takes {_ports_text(ports)}, got {len(inputs)} "
                f"value{'' if len(inputs) == 1 else 's'}"
            )
        bound = list(zip(fixed, inputs, strict=False))
        if rest is not None:
            bound.extend((rest, value) for value in inputs[len(fixed) :])
        for port, value in bound:
            if value is None and not port.optional:
                raise BadArgument(f"input {port.name!r} of {op_type} can't be left out")
        return bound

    def emit(
        self, domain: str, op_type: str, *, inputs: Iterable[Output | None] = (),
        outputs: Sequence[tuple[str, TypeNode]] = (),
        attributes: Mapping[str, Attribute] | None = None,
        metadata: Mapping[str, str] | None = None, slot: SlotUse | None = None,
        after: After = None, opset_version: int = keys.BB_OPSET_VERSION,
        value_names: Sequence[str] = (),
    ) -> tuple[Output, ...]:  # fmt: skip
        """Record one node and return its outputs.

        Args:
            domain, op_type, opset_version: of the op that the node calls.
            inputs: values of this Graph, in port order; None for an omitted optional one.
            outputs: (port, type) of each output; values are named `<node name>.<port>`.
            attributes, metadata: of the node, beside those that every node has.
            slot: the slot that runs the op.
            after: values that must be there before the op fires.
            value_names: names of the output values, if the author chose them.

        Raises:
            ForeignOutput, BadArgument, DuplicateName, SlotConflict, GraphClosed.
        """
        self.check_open()
        self._admit(domain, op_type, slot, after)
        names = ["" if value is None else self.value_name(value) for value in inputs]
        waits = dict.fromkeys(self.value_name(value) for value in self._listed(after))
        meta = self._metadata(slot, metadata or {})
        path = "/".join((*self._scopes, op_type))
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        name = f"{path}_{number}"
        values = value_names or [f"{name}.{port}" for port, _ in outputs]
        values_out = [self.declare(v, kind) for v, (_, kind) in zip(values, outputs, strict=True)]
        node = OpNode(op_type, domain, name, names, values, attributes, after=waits, metadata=meta)
        node.source_line = self._source_line()
        self._function.append(node)
        self._opsets.add((domain, opset_version))
        return tuple(values_out)

    def annotate(self, value: Output, parameters: Mapping[str, Output]) -> None:
        """Annotate a value with the values that hold its scale, zero point and the like.

        The annotation is stored on the op that makes the value, or, for an input, on the first
        op that reads it; a value without any op gets none.

        Args:
            value: a value of this Graph.
            parameters: by ONNX's keys: `SCALE_TENSOR`, `ZERO_POINT_TENSOR`, ….
        """
        name = self.value_name(value)
        known = {key: self.value_name(each) for key, each in parameters.items()}
        node = self._function.producer(name)
        if node is None:
            nodes = self._function.nodes
            node = next((node for node in nodes if name in node.computes_with), None)
        if node is not None:
            text = annotation_text({**annotations_on(node), name: known})
            node.metadata[keys.QUANTIZATION_KEY] = text

    def _admit(self, domain: str, op_type: str, slot: SlotUse | None, after: After) -> None:
        """Refuse ops that are not allowed here; a Branch overrides this."""

    def _source_line(self) -> str:
        return author_line()

    def _metadata(self, slot: SlotUse | None, given: Mapping[str, str]) -> dict[str, str]:
        meta: dict[str, str] = {}
        if slot is not None:
            meta = self.recorder.slots.take(slot)
            self._slots.setdefault(slot.name, slot)
        meta.update(given)
        meta[keys.MODULE_INSTANCE_KEY] = "_".join((self.name, *self._scopes))
        return meta

    def declare(self, name: str, kind: TypeNode) -> Output:
        """Add a value. Raises DuplicateName if this Graph has one with that name."""
        if name in self._function.types:
            raise DuplicateName(f"{name!r} names an input or output already; choose another name")
        self._function.types[name] = ValueType.of(kind)
        return _OUTPUT_OF.get(kind, Output)(graph=self, name=name, type=kind)

    def value_name(self, value: object) -> str:
        """Return the name of a value of this Graph, or raise BadArgument or ForeignOutput."""
        if not isinstance(value, Output):
            raise self.error(
                BadArgument,
                f"{value!r:.80} ({type(value).__name__}) is not a recorded value; "
                "a literal becomes one with g.constant(…)",
            )
        if not self._holds(value.graph):
            raise self.error(
                ForeignOutput,
                f"{value.name!r} was recorded by {value.graph.title} and is not a value of "
                f"this Graph; {value.graph.way_out}",
            )
        return value.name

    def _holds(self, graph: Graph) -> bool:
        """Return True if the values of a Graph may be read in this one."""
        return graph is self

    @property
    def title(self) -> str:
        """A description of what this Graph records, for messages."""
        return f"Module {self.name!r}"

    @property
    def way_out(self) -> str:
        """A hint on how to use a value of this Graph in another one, for messages."""
        return "hand it in with .call().input(name, value), and take it back with .output(name)"

    @property
    def last_node(self) -> OpNode:
        """The node that was recorded last."""
        return self._function.nodes[-1]

    def check_open(self) -> None:
        """Raise GraphClosed after the recording, BranchMisuse while a branch of it is recorded."""
        if self._closed:
            raise self.error(
                GraphClosed, f"{self.title} has finished recording; record inside of its body"
            )
        if self._branch:
            raise self.error(
                BranchMisuse,
                f"{self._branch} is being recorded; give its ops the Graph that it gets as its "
                "first argument",
            )

    @contextmanager
    def recording_branch(self, title: str) -> Iterator[None]:
        """Refuse to record into this Graph inside the block, while a branch is recorded."""
        self._branch = title
        try:
            yield
        finally:
            self._branch = ""

    @contextmanager
    def with_module(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes recorded in the block with `<name>/`, for readers.

        The scope also distinguishes the calls of a Module that sends: the ports of a call in a
        scope of its own keep their identity when another call is added before it.
        """
        self._scopes.append(check_name("module scope", name))
        try:
            yield
        finally:
            self._scopes.pop()

    def call_name(self, module: str) -> str:
        """Return the name of the next call of a Module: its scopes, the Module, a counter.

        It is part of the identity of all ports inside, so the counter ignores other ops and the
        suffixes by which the recorder tells bodies apart.
        """
        path = ".".join((*self._scopes, module))
        number = self._calls[path]
        self._calls[path] += 1
        return f"{path}_{number}"

    def finish(self) -> Function:
        """Close the Graph and return its function."""
        self.check_open()
        self._closed = True
        function = self._function
        function.opset_imports = sorted_opsets(self._opsets)
        function.metadata[keys.HOME_KEY] = self.home
        for name, use in self._slots.items():
            if use.concrete is None:
                function.attributes.append(name)
            else:
                function.defaults[name] = Attribute.of(use.concrete.config)
                function.metadata[keys.CONCRETE_TYPE_SLOT_PREFIX + name] = use.concrete.type_name
            slot_id = self.recorder.slots.slot_id(name)
            function.metadata[keys.SLOT_ROLE_PREFIX + name] = f"{use.role}|{slot_id}"
        return function

    def _listed(self, after: object) -> Sequence[object]:
        if after is None:
            return ()
        if isinstance(after, Output):
            return (after,)
        if isinstance(after, list | tuple):
            return after
        raise BadArgument(f"after={after!r:.80} is neither a recorded value nor a list of them")


def deadline_ns_of(what: str, given: object) -> int:
    """Return seconds as nanoseconds. Raises BadArgument, beginning with `what`, out of range."""
    seconds = given if isinstance(given, int | float) else math.nan
    fits = 0 <= seconds <= MAX_DEADLINE_S and not 0 < seconds * NS_PER_S < 1
    if not fits or isinstance(given, bool):
        raise BadArgument(
            f"{what} has to be a number of seconds between 0 (none of its own) and "
            f"{MAX_DEADLINE_S:.0f}"
        )
    return round(seconds * NS_PER_S)


def _budget_ns(port: str, budget: object, hops: object) -> int:
    seconds = budget if isinstance(budget, int | float) else math.nan
    if not 1 / NS_PER_S <= seconds <= MAX_DEADLINE_S or isinstance(budget, bool):
        raise BadArgument(
            f"budget={budget!r:.40} of {port!r} has to be a number of seconds above 0, up to "
            f"{MAX_DEADLINE_S:.0f}, or None"
        )
    if hops is not None:
        raise BadArgument(f"{port!r} has hops and a budget; give one of them: each says the time")
    return round(seconds * NS_PER_S)


def _parsed(
    kind: type[Carrier], parse: Callable[[str], Carrier], given: object, what: str
) -> Carrier:
    try:
        parsed = parse(given) if isinstance(given, str) else given
    except DecodeError as error:
        raise BadArgument(str(error)) from error
    if not isinstance(parsed, kind):
        raise BadArgument(f"{given!r:.60} is neither {what} nor its text")
    return parsed


def need_tensor_type(name: str, given: object) -> TypeNode:
    """Return the tensor type that an argument names, or raise BadArgument."""
    kind = tensor_type(given)
    if kind is None:
        raise BadArgument(
            f"{name}={given!r:.60} is not a tensor type; use one of bbnode.dsl.types, e.g. "
            "types.TENSOR_FLOAT"
        )
    return kind


def as_graph(g: object, call: str) -> Graph:
    """Return `g`, or raise BadArgument, which shows `call`, if it is not a Graph."""
    if isinstance(g, Graph):
        return g
    shown = f"the value {g.name!r}" if isinstance(g, Output) else f"{g!r:.60}"
    raise BadArgument(f"the first argument is the Graph, got {shown}; write {call}")


# --- signatures ----------------------------------------------------------------------------


def _is_of_floats(kind: TypeNode) -> bool:
    return kind in (types.TENSOR, types.TENSOR_FLOAT, types.TENSOR_DOUBLE)


def _children(kinds: Sequence[TypeNode]) -> dict[str, Any]:
    return {"child_count": len(kinds), "child_types": ",".join(kind.id for kind in kinds)}


def _ports_text(ports: Sequence[Port]) -> str:
    if not ports:
        return "no values"
    listed = ", ".join(
        port.name + ("…" if port.variadic else "") + (" (optional)" if port.optional else "")
        for port in ports
    )
    return f"the values ({listed})"


def type_variables(bound: Sequence[tuple[Port, Output | None]]) -> dict[str, TypeNode]:
    """Return the types of an op's type variables; Any if its inputs disagree."""
    known: dict[str, TypeNode] = {}
    for port, value in bound:
        if value is not None and isinstance(port.type, str):
            same = known.setdefault(port.type, value.type)
            if same is not value.type:
                known[port.type] = types.meet(same, value.type) or types.ANY
    return known


def checked_attributes(
    op_type: str, known: Mapping[str, Any], given: Mapping[str, Any],
    make: Callable[[str, Any], Attribute],
) -> dict[str, Attribute]:  # fmt: skip
    """Return an op's attributes in the order of `known`: name to default, REQUIRED or LEFT_OUT.

    Raises BadArgument.
    """
    for name in given:
        if name not in known:
            raise BadArgument(f"{op_type} has no attribute {name!r}{hint(name, known)}")
    checked = {}
    for name, default in known.items():
        value = given.get(name, default)
        if value is opset.REQUIRED:
            raise BadArgument(f"{op_type} needs the attribute {name}=…")
        if value is LEFT_OUT:
            continue
        try:
            checked[name] = make(name, value)
        except WrongKind as error:
            raise BadArgument(f"{name}={value!r:.60} of {op_type} has to be {error}") from error
    return checked
