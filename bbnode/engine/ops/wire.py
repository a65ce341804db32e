"""The wire ops that run inside an execution.

Rule: an op says what has to travel; resolving, correlating and packing happen in
`wire/outbound.py` and `cohorts.py`. Recv and RecvReq never fire: they are entries.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine.errors import InvalidOperand
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.ops.declared import told
from bbnode.engine.services import Services
from bbnode.ir import codec, keys
from bbnode.ir.address import parse_site_suffix
from bbnode.ir.envelope import CorrelationKind, SlotFill, make_fill
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TRIGGER as TRIGGER_TYPE
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER, PeerIdVec, RequestId, Value, WireRequestId, type_of

WIRE = keys.WIRE_DOMAIN
_ONE_WAY = CorrelationKind.NONE  # looked up once: every message asks


@binds(WIRE, keys.OP_SEND)
def _send(build: OpBuild) -> Fire:
    build.arity(2, 1)
    data_at, peers_at = build.inputs
    packer = _packer(build)
    op = build.op
    name = build.flat.name
    # A later send of a port lands where another op of this very execution may send as well:
    # under the execution's own id the receiver would take the two for one message.
    is_joined = keys.SYNTHESIZED_FROM_KEY in build.node.metadata
    # What has a budget of its own travels alone: an envelope has the tightest of all in it.
    budget_ns = build.meta_int(keys.BUDGET_NS_KEY, 0)
    hops = build.meta_int(keys.CHAIN_DEPTH_KEY, 1)
    has_own_id = is_joined or budget_ns > 0

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        values = frame.values
        to = values[peers_at]
        peers = (to,) if type(to) is PeerId else destinations(name, to)
        if peers:
            outbound, known_as = rt.outbound, frame.wire_out_id
            remaining_ns = budget_ns or outbound.remaining_ns(frame, op, hops, packer.site)
            found = outbound.send(
                frame,
                op,
                peers,
                packer.fill(values[data_at]),
                _ONE_WAY,
                outbound.another_id(frame) if has_own_id else outbound.one_way_id(frame),
                remaining_ns,
                frame.chain or (frame.wire_out_id if has_own_id else 0),
            )
            if not found:
                frame.wire_out_id = known_as  # nothing went out under it
        return TRIGGER

    return fire


@binds(WIRE, keys.OP_SEND_REQ_BATCHED)
def _send_req_batched(build: OpBuild) -> Fire:
    build.arity(2, 1)
    data_at, peers_at = build.inputs
    packer = _packer(build)
    op = build.op
    quorum = build.attr_int("quorum", 0)
    # The compiler writes a deadline into the attribute in any case.
    stamped_ns = build.attr_int("deadline_ns", 0)
    own_ns = 0 if op.deadline_ns and op.deadline_from else stamped_ns or op.deadline_ns
    hops = build.meta_int(keys.CHAIN_DEPTH_KEY, 1)
    site = build.linker.response_site_of(build)
    name = build.node.metadata.get(keys.PORT_KEY) or build.flat.name

    def fire(frame: Frame) -> Any:
        values = frame.values
        peers = destinations(name, values[peers_at])
        rt: Services = frame.rt
        budget_ns = (
            own_ns or rt.outbound.remaining_ns(frame, op, hops, packer.site) or rt.outbound.wait_ns
        )
        request = rt.cohorts.open(
            frame, op, name, peers, packer.fill(values[data_at]), quorum, budget_ns, site
        )
        return RequestId(request)

    return fire


@binds(WIRE, keys.OP_SEND_RESP)
def _send_resp(build: OpBuild) -> Fire:
    build.arity(3, 1)
    data_at, dest_at, request_at = build.inputs
    packer = _packer(build)
    op = build.op
    hops = build.meta_int(keys.CHAIN_DEPTH_KEY, 1)
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        values = frame.values
        request = values[request_at]
        if not isinstance(request, WireRequestId):
            raise InvalidOperand(f"{name}: {type(request).__name__} is not a request to answer")
        peers = destinations(name, values[dest_at])
        rt.outbound.send(
            frame,
            op,
            peers,
            packer.fill(values[data_at]),
            CorrelationKind.RESPONSE,
            int(request),
            rt.outbound.remaining_ns(frame, op, hops, packer.site),
        )
        if request == frame.wire_req_id and frame.source_peer in peers:
            frame.debt = None  # paid
        return TRIGGER

    def skip(frame: Frame, _reason: str) -> bool:
        """Let the requester know that there will be no answer."""
        frame.rt.executor.skip_answer(frame)
        return True

    op.skip = skip
    return fire


@binds(WIRE, keys.OP_RECV_RESP_BATCHED)
def _recv_resp_batched(build: OpBuild) -> Fire:
    build.arity(1, 1)
    build.meta_int(keys.SITE_ID_KEY)
    (request_at,) = build.inputs
    op = build.op
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        request = frame.values[request_at]
        if not isinstance(request, RequestId):
            raise InvalidOperand(f"{name}: {type(request).__name__} does not name a request")
        return frame.rt.cohorts.collect(frame, op, int(request))

    return fire


def destinations(name: str, value: Value) -> tuple[PeerId, ...]:
    """Return the peers that a value names, each once. Raises InvalidOperand."""
    if isinstance(value, PeerId):
        return (value,)
    if isinstance(value, PeerIdVec):
        return tuple(dict.fromkeys(value))
    raise InvalidOperand(f"{name}: {type(value).__name__} is not a list of peers")


class _Packer:
    """Turns a value into a fill for one site."""

    __slots__ = ("_declared", "_name", "_suffix", "_trigger_only", "site")

    def __init__(
        self, name: str, suffix: bytes, trigger_only: bool, declared: TypeNode | None
    ) -> None:
        self._name = name
        self._suffix = suffix
        self._declared = declared
        self.site = parse_site_suffix(suffix) or 0  # 0: no site, of which nothing is measured
        self._trigger_only = trigger_only

    def fill(self, value: Value) -> SlotFill:
        """Return the fill of a value; raises InvalidOperand for one of another type."""
        if self._trigger_only:
            # Whatever it was here: a Trigger arrives, and the receiver declares one.
            return SlotFill(
                dest_suffix=self._suffix, trigger_only=True, type_hash=TRIGGER_TYPE.wire_hash
            )
        node = type_of(value)
        declared = self._declared
        if node is not declared and declared is not None and not node.is_a(declared):
            raise InvalidOperand(
                f"{self._name}: expected {declared.name}, got {told(value, node)}; the program "
                "declares what travels here"
            )
        parts = tuple(codec.encode_parts(value, node))
        fill: SlotFill = make_fill(self._suffix, b"", parts, False, node.wire_hash)
        return fill


def _packer(build: OpBuild) -> _Packer:
    found = [
        build.node.attr(name)
        for name in build.node.attributes
        if name.startswith(keys.DEST_SUFFIX_PREFIX)
    ]
    if len(found) != 1 or not found[0] or not isinstance(found[0], bytes):
        raise build.wrong(f"needs one attribute {keys.DEST_SUFFIX_PREFIX}<value>")
    transport = build.node.metadata.get(keys.WIRE_TRANSPORT_KEY)
    declared = build.types.get(build.flat.inputs[0])
    name = build.node.metadata.get(keys.PORT_KEY) or build.flat.name
    return _Packer(name, found[0], transport == keys.TRANSPORT_TRIGGER_ONLY, declared)
