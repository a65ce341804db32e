"""`Graph`: what a Module body records into.

Rule: this is the author's surface: ports, the wire, composites and constants. Ops of
components are recorded through slots, framework ops through `bbnode.dsl.syscalls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bbnode.dsl.attributes import WrongKind, tensor_type
from bbnode.dsl.constants import ATTRIBUTE, constant_attribute, typed_array
from bbnode.dsl.errors import BadArgument, DuplicateName, UnknownName
from bbnode.dsl.graph_core import GraphCore
from bbnode.dsl.names import check_class, check_name, hint
from bbnode.dsl.output import After, Output
from bbnode.dsl.record import record, spec_of
from bbnode.dsl.source import author_line
from bbnode.dsl.wire import Request, record_request, record_send
from bbnode.ir import keys, protos, types
from bbnode.ir.address import parse_address
from bbnode.ir.errors import DecodeError
from bbnode.ir.opset import OpSpec
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import AddressVec, PeerIdVec

if TYPE_CHECKING:
    from bbnode.dsl.recorder import ModelRecorder

_PASS_THROUGH = spec_of(keys.SYSCALL_DOMAIN, "PassThrough")
_CONSTANT = spec_of(keys.SYSCALL_DOMAIN, "Constant")
_BUNDLE = spec_of(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE)
_UNBUNDLE = spec_of(keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE)

_ANY_ADDRESS = parse_address("/ip4/127.0.0.1")  # what a multiaddr is, without its package

Carrier = TypeVar("Carrier")


class Graph(GraphCore):
    """One Module body in the making; a Module's `body` and `bootstrap` get it as argument."""

    def __init__(self, recorder: ModelRecorder, *, name: str, home: str) -> None:
        super().__init__(recorder, name=name, home=home)
        self._received: dict[str, Output] = {}
        self._request_ports: set[str] = set()

    def record(
        self,
        spec: OpSpec,
        inputs: Sequence[Output | None] = (),
        attributes: Mapping[str, Any] | None = None,
        *,
        after: After = None,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[Output, ...]:
        """Record one op of the op table; gives its outputs in port order."""
        return record(self, spec, inputs, attributes, after=after, metadata=metadata)

    # --- ports -----------------------------------------------------------------------------

    def input(self, name: str, type: TypeNode = types.ANY) -> Output:  # noqa: A002
        """A value handed in by who invokes or calls the Module.

        Args:
            name: of the input; it is also the name of the value.
            type: of the value, as far as it is known.

        Raises:
            BadName, DuplicateName: the name is none, or is taken.
            BadArgument: `type` is no type.
        """
        self.check_open()
        check_name("input", name, module=self.module_path)
        if not isinstance(type, TypeNode):
            raise self.error(
                BadArgument,
                f"type={type!r:.60} of input {name!r} is no type; use one of bbnode.dsl.types, "
                "e.g. types.TENSOR_FLOAT",
            )
        value = self.declare(name, type)
        self._function.input.append(name)
        return value

    def output(self, name: str, value: Output, *, after: After = None) -> None:
        """Hand a value out under a name (recorded as a `PassThrough`).

        Raises:
            BadName, DuplicateName: the name is none, or is taken.
        """
        check_name("output", name, module=self.module_path)
        self.value_name(value)
        self.emit(
            _PASS_THROUGH.domain,
            _PASS_THROUGH.op_type,
            inputs=(value,),
            outputs=(("value", value.type),),
            after=after,
            value_names=(name,),
        )
        self._function.output.append(name)

    # --- the wire --------------------------------------------------------------------------

    def net_out(
        self,
        port: str,
        peers: Output,
        value: Output,
        *,
        after: After = None,
        hops: int | None = None,
    ) -> Output:
        """Send `value` to `peers`; gives it as it lives on the class of those peers.

        A port is where values arrive. Several sends to one port of one class arrive as one
        value there: what reads it fires for each delivery, and its `.sender` is whoever sent
        that one. Sends of one port to several classes arrive on each of them; they carry one
        type. A class may send to itself.

        Args:
            port: where the value arrives; `lookup_output` finds the received value by it.
            peers: a PeerIdVec (of a selector, an input, a constant with a `peer_class`), or
                one PeerId such as the `.sender` of a received value.
            value: what to send.
            after: values that must be there before.
            hops: how many sends one after the other the time budget of this one has to cover,
                this one included; None: as many as the program shows.

        Returns:
            The received value; its `.sender` is the peer that sent it.

        Raises:
            DuplicateName: a request has that port.
            BadArgument: `hops` is none.
        """
        first = self._sent_port(port)
        received = record_send(self, port, peers, value, after=after, hops=hops, first=first)
        self._received.setdefault(port, received)
        return received

    def request(
        self,
        port: str,
        peers: Output,
        value: Output,
        *,
        quorum: int = 0,
        deadline: float = 0.0,
        after: After = None,
        hops: int | None = None,
    ) -> Request:
        """Ask `peers` and wait for their answers, as one batch.

        The execution waits until all have answered, or until the deadline when at least
        `quorum` have; with fewer the op fails.

        Args:
            port: a name for the request, of its own; `lookup_output` finds `received` by it.
            peers, value, after, hops: as for `net_out`.
            quorum: answers that are enough at the deadline; 0 for all.
            deadline: seconds to wait; 0 for the compiler's budget per hop, times the hops
                until the answer is there.

        Raises:
            DuplicateName: something has that port.
            BadArgument: `deadline`, `quorum` or `hops` is none.
        """
        self._new_port(port)
        made = record_request(
            self, port, peers, value, quorum=quorum, deadline=deadline, after=after, hops=hops
        )
        self._received[port] = made.received
        self._request_ports.add(port)
        return made

    def respond(self, request: Request, value: Output, *, after: After = None) -> None:
        """Answer a request, on the peers' class: the same as `request.respond(value)`."""
        if not isinstance(request, Request):
            raise self.error(BadArgument, f"{request!r:.60} is no request; g.request gives one")
        self.value_name(request.received)
        request.respond(value, after=after)

    def lookup_output(self, port: str) -> Output:
        """The value that the `net_out` or `request` of that name delivers.

        Of a port that is sent to several times: whatever arrives from any of the sends to the
        class of the first one. What arrives on another class is what that `net_out` gave.

        Raises:
            UnknownName: nothing was sent under that name yet.
        """
        found = self._received.get(port)
        if found is None:
            raise self.error(
                UnknownName, f"nothing was sent as {port!r}{hint(str(port), self._received)}"
            )
        return found

    def _new_port(self, port: str) -> None:
        check_name("port", port, module=self.module_path)
        if port in self._received:
            raise self.error(
                DuplicateName,
                f"port {port!r} is sent to already; give each request a name of its own",
            )

    def _sent_port(self, port: str) -> Output | None:
        """What the port's first send delivers, or None for the first one itself."""
        if port in self._request_ports:
            self._new_port(port)
        check_name("port", port, module=self.module_path)
        return self._received.get(port)

    # --- composites ------------------------------------------------------------------------

    def bundle(self, parts: Sequence[Output], *, after: After = None) -> Output:
        """Pack values into one that travels as one.

        Raises:
            BadArgument: `parts` is empty or no list.
        """
        self._need_items("bundle", parts, "values")
        for part in parts:
            self.value_name(part)
        attributes = {
            "child_count": len(parts),
            "child_types": ",".join(part.type.id for part in parts),
        }
        (composite,) = record(self, _BUNDLE, parts, attributes, after=after)
        return composite

    def unbundle(
        self, composite: Output, part_types: Sequence[TypeNode], *, after: After = None
    ) -> tuple[Output, ...]:
        """Take a composite apart; `part_types` are the types of its parts, in order.

        Raises:
            BadArgument: `part_types` is empty, or holds something that is no type.
        """
        self._need_items("unbundle", part_types, "types")
        for part in part_types:
            if not isinstance(part, TypeNode):
                raise self.error(
                    BadArgument, f"{part!r:.60} is no type; use bbnode.dsl.types, e.g. types.TENSOR"
                )
        attributes = {
            "child_count": len(part_types),
            "child_types": ",".join(part.id for part in part_types),
        }
        return record(self, _UNBUNDLE, (composite,), attributes, after=after, variadic=part_types)

    def _need_items(self, what: str, items: object, kind: str) -> None:
        if not isinstance(items, Sequence) or isinstance(items, str | bytes) or not items:
            raise self.error(
                BadArgument, f"g.{what} takes a list of one or more {kind}, got {items!r:.60}"
            )

    # --- constants -------------------------------------------------------------------------

    def constant(self, value: Any, *, after: After = None) -> Output:
        """A value that rides in the program.

        Args:
            value: an array, number, bool or list of them (a tensor: Python floats are
                float32, ints int64); a PeerId or a list of them; a multiaddr; or any other
                carrier of `bbnode.dsl.values`.
            after: values that must be there before; they also say on which class of peer the
                constant lives, where that is not the Module's home.

        Raises:
            BadArgument: it is no value.
        """
        try:
            attribute, kind = constant_attribute(value)
        except WrongKind as error:
            raise self.error(BadArgument, f"{value!r:.60} can't be a constant: {error}") from error
        (made,) = self.emit(
            _CONSTANT.domain,
            _CONSTANT.op_type,
            outputs=((ATTRIBUTE, kind),),
            attributes=(attribute,),
            after=after,
        )
        return made

    def tensor(
        self,
        value: Any,
        type: TypeNode = types.TENSOR_FLOAT,  # noqa: A002
        *,
        after: After = None,
    ) -> Output:
        """A tensor constant of the given element type, whatever Python's numbers would become.

        Args:
            value: an array, number, bool or list of them.
            type: a tensor type, e.g. `types.TENSOR_INT64`.
            after: as for `constant`.

        Raises:
            BadArgument: `type` is no tensor type, or holds not all of the values.
        """
        kind = tensor_type(type)
        if kind is None:
            raise self.error(
                BadArgument,
                f"type={type!r:.60} is no tensor type; use one of bbnode.dsl.types, e.g. "
                "types.TENSOR_FLOAT",
            )
        try:
            wanted = typed_array(value, kind)
        except WrongKind as error:
            raise self.error(
                BadArgument, f"{value!r:.60} can't be a {kind.name}: it has to be {error}"
            ) from error
        return self.constant(wanted, after=after)

    def peer_id(
        self, peer: PeerId | str, *, peer_class: str | None = None, after: After = None
    ) -> Output:
        """A PeerId, given as such or as base58btc text; `peer_class` as for `peer_ids`."""
        return self._fixed(self._peer(peer), peer_class, after)

    def peer_ids(
        self,
        peers: Iterable[PeerId | str],
        *,
        peer_class: str | None = None,
        after: After = None,
    ) -> Output:
        """A PeerIdVec, e.g. the `peers` of a send to fixed peers. It may be empty.

        Args:
            peers: as PeerIds or as base58btc text.
            peer_class: the class that they are peers of; a send to them needs it.
            after: as for `constant`.
        """
        return self._fixed(PeerIdVec(self._peer(peer) for peer in peers), peer_class, after)

    def _fixed(self, peers: PeerId | PeerIdVec, peer_class: str | None, after: After) -> Output:
        home = None if peer_class is None else check_class(peer_class, module=self.module_path)
        made = self.constant(peers, after=after)
        if home is not None:
            protos.set_meta(self.last_node, keys.PEER_CLASS_KEY, home)
        return made

    def address(self, address: Any, *, after: After = None) -> Output:
        """A multiaddr, given as such or as text."""
        return self.constant(self._address(address), after=after)

    def addresses(self, addresses: Iterable[Any], *, after: After = None) -> Output:
        """An AddressVec. It may be empty."""
        return self.constant(AddressVec(self._address(each) for each in addresses), after=after)

    def _peer(self, peer: PeerId | str) -> PeerId:
        parsed = self._parsed(PeerId.parse, peer) if isinstance(peer, str) else peer
        if not isinstance(parsed, PeerId):
            raise self.error(BadArgument, f"{peer!r:.60} is neither a PeerId nor its text")
        return parsed

    def _address(self, address: Any) -> Any:
        parsed = self._parsed(parse_address, address) if isinstance(address, str) else address
        if not isinstance(parsed, type(_ANY_ADDRESS)):
            raise self.error(BadArgument, f"{address!r:.60} is neither a multiaddr nor its text")
        return parsed

    def _parsed(self, parse: Callable[[str], Carrier], text: str) -> Carrier:
        try:
            return parse(text)
        except DecodeError as error:
            raise self.error(BadArgument, str(error)) from error


def as_graph(g: object, call: str) -> Graph:
    """`g` itself; BadArgument where it is no Graph. `call` says how to write it."""
    if isinstance(g, Graph):
        return g
    what = f"the first argument is the Graph, got {g!r:.60}; write {call}"
    if isinstance(g, Output):
        raise g.graph.error(BadArgument, what)
    raise BadArgument(what, module="", source=author_line())
