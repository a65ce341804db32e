"""Wire ops: pairs of requests and responses, sends and their receivers, shared receivers.

Rule: as recorded, a request has exactly one response, and only Send-flavoured ops are
authored; as synthesised, a Recv-flavoured op names the send that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bbnode.compiler.analysis.order import rename_node
from bbnode.compiler.errors import (
    DanglingInput,
    Internal,
    TypeConstraintFailed,
    UnpairedWireRequest,
    Where,
)
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, OpNode, inherit, is_wire

# Ops that hand a request id on unchanged.
_TRANSPARENT = frozenset({"PassThrough", "Gate", "GateDispatch", "GateManyDispatch"})
REMOTE_REQ_ID_OUTPUT = 4  # output of SendReqBatched as recorded
REQ_ID_INPUT = 2  # input of SendResp (data, dest, req_id)


def check_pairs(function: Function) -> None:
    """Check the wire ops of a function, in order.

    Raises UnpairedWireRequest, TypeConstraintFailed (peers that are none) or DanglingInput (a
    later send of a port whose first send is missing) for the first malformed op.
    """
    wires = [node for node in function.nodes if is_wire(node)]
    if not wires:
        return
    answers: dict[str, str] = {}
    ports = {
        node.outputs[0]
        for node in wires
        if node.op_type == keys.OP_SEND and node.outputs and _joins(node) is None
    }
    for node in wires:
        joined = _joins(node)
        if joined is not None and (node.op_type != keys.OP_SEND or joined not in ports):
            raise DanglingInput(node_name=node.name, input_name=joined, where=Where.of(node))
        if node.op_type in keys.RECV_OPS:
            if node.metadata.get(keys.SYNTHESIZED_FROM_KEY) is None:
                raise _unpaired(
                    node, f"{node.op_type} is never authored; use what the send returns"
                )
        elif node.op_type == keys.OP_SEND_RESP:
            _take_answer(function, node, answers)
        elif node.op_type in keys.SEND_OPS:
            _check_peers(node, function.kind_of(node.inputs[1]) or types.ANY)
    for node in wires:
        # A request that was split before outputs only its id.
        is_split = len(node.outputs) < 2 and keys.SYNTHESIZED_FROM_KEY in node.metadata
        is_recorded = node.op_type == keys.OP_SEND_REQ_BATCHED and not is_split
        if is_recorded and node.name not in answers:
            raise _unpaired(node, "nothing answers the request")


def _joins(node: OpNode) -> str | None:
    """Return the value that the port's first send delivers, for a later send; else None."""
    return node.metadata.get(keys.FAN_IN_KEY)


def request_of(function: Function, response: OpNode) -> OpNode | None:
    """Return the SendReqBatched (or its RecvReq) whose request id a SendResp returns."""
    value = response.inputs[REQ_ID_INPUT]
    while (node := function.producers.get(value)) is not None:
        is_request = is_wire(node, keys.OP_SEND_REQ_BATCHED)
        if is_request and value == _output(node, REMOTE_REQ_ID_OUTPUT):
            return node
        if is_wire(node, keys.OP_RECV_REQ) and value == _output(node, 2):
            return node
        if node.domain != keys.SYSCALL_DOMAIN or node.op_type not in _TRANSPARENT:
            return None
        value = node.inputs[0]
    return None


def _output(node: OpNode, index: int) -> str:
    return node.outputs[index] if index < len(node.outputs) else ""


def _take_answer(function: Function, node: OpNode, answers: dict[str, str]) -> None:
    request = request_of(function, node)
    if request is None:
        raise _unpaired(
            node, f"{node.inputs[REQ_ID_INPUT]!r} is not the remote request id of any request"
        )
    if request.name in answers:
        raise _unpaired(request, f"both {answers[request.name]!r} and {node.name!r} answer it")
    answers[request.name] = node.name


def _check_peers(node: OpNode, kind: types.TypeNode) -> None:
    fits = types.meet(kind, types.PEER_ID_VEC) or types.meet(kind, types.PEER_ID)
    if fits is None:
        raise TypeConstraintFailed(
            op=node.name,
            detail=f"{node.inputs[1]!r} is {kind.name}, a send takes PeerIdVec or PeerId there",
            where=Where.of(node),
        )


def _unpaired(node: OpNode, detail: str) -> UnpairedWireRequest:
    return UnpairedWireRequest(node_name=node.name, detail=detail, where=Where.of(node))


# --- pairs of Send-flavoured and Recv-flavoured nodes -------------------------------------
# Rule: a pair has one index. A Recv holds it in `synthesized_from`, a Send in the name of its
# sentinel output, or in `synthesized_from` if it feeds the Recv of another Send (fan-in).
# A request is paired with both ends of its answer through the values that they share: the
# requester's `req_id` goes to RecvRespBatched, the receiver's to SendResp.
#

REQ_ID_OUTPUT = 2  # output of RecvReq (payload, sender, req_id)


@dataclass(frozen=True, slots=True)
class WirePair:
    """A sending and a receiving node."""

    send: OpNode
    recv: OpNode


def wire_pairs(nodes: Sequence[OpNode]) -> list[WirePair]:
    """Return all pairs, in the order of their Sends.

    A plain Send without a Recv is fire-and-forget and left out. Raises UnpairedWireRequest
    for a request or a response without its other end, and Internal for a Recv without a Send
    or an index that is used twice.
    """
    wire = [node for node in nodes if is_wire(node)]
    table = _Receivers(wire)
    pairs = []
    for node in wire:
        if node.op_type in keys.SEND_OPS:
            recv = table.fed_by(node)
            if recv is not None:
                pairs.append(WirePair(node, recv))
    fed = {pair.recv.name for pair in pairs}
    for node in wire:
        if node.op_type in keys.RECV_OPS and node.name not in fed:
            raise Internal(detail=f"nothing sends to {node.name!r}", where=Where.of(node))
    return pairs


class _Receivers:
    def __init__(self, wire: Sequence[OpNode]) -> None:
        self._by_index: dict[tuple[str, str], OpNode] = {}
        self._requests: dict[str, OpNode] = {}  # the receiver's req_id -> its RecvReq
        self._answers: dict[str, OpNode] = {}  # the requester's req_id -> RecvRespBatched
        for node in wire:
            if node.op_type not in keys.RECV_OPS:
                continue
            key = (node.op_type, node.metadata.get(keys.SYNTHESIZED_FROM_KEY) or "")
            if self._by_index.setdefault(key, node) is not node:
                raise Internal(
                    detail=f"{node.name!r} and {self._by_index[key].name!r} have one wire index"
                )
            if node.op_type == keys.OP_RECV_REQ and len(node.outputs) > REQ_ID_OUTPUT:
                self._requests[node.outputs[REQ_ID_OUTPUT]] = node
            if node.op_type == keys.OP_RECV_RESP_BATCHED and node.inputs:
                self._answers[node.inputs[0]] = node

    def fed_by(self, send: OpNode) -> OpNode | None:
        if send.op_type == keys.OP_SEND:
            index = send.metadata.get(keys.SYNTHESIZED_FROM_KEY) or _sentinel(send)
            return self._by_index.get((keys.OP_RECV, index or ""))
        if send.op_type == keys.OP_SEND_REQ_BATCHED:
            index = _sentinel(send) or send.metadata.get(keys.SYNTHESIZED_FROM_KEY)
            answer = self._answers.get(send.outputs[0]) if send.outputs else None
            if index is None and answer is not None:
                index = answer.metadata.get(keys.SYNTHESIZED_FROM_KEY)
            receiver = self._by_index.get((keys.OP_RECV_REQ, index or ""))
            return _paired(send, receiver, "no RecvReq receives the request")
        request = self._requests.get(send.inputs[REQ_ID_INPUT]) if len(send.inputs) > 2 else None
        index = (request or send).metadata.get(keys.SYNTHESIZED_FROM_KEY)
        receiver = self._by_index.get((keys.OP_RECV_RESP_BATCHED, index or ""))
        return _paired(send, receiver, "no request waits for the response")


def _sentinel(send: OpNode) -> str | None:
    for name in send.outputs:
        if name.startswith(keys.SEND_SENTINEL_PREFIX):
            return name.removeprefix(keys.SEND_SENTINEL_PREFIX)
    return None


def _paired(send: OpNode, recv: OpNode | None, detail: str) -> OpNode:
    if recv is None:
        raise UnpairedWireRequest(node_name=send.name, detail=detail, where=Where.of(send))
    return recv


# --- fan-in: several sends to one port of one class ---------------------------------------
# Rule: values arrive at ports. All that several ops send to one port of one class is one value
# there, made by one Recv, and its readers fire for each delivery. In the recorded program the
# later sends name the value that the port's first send delivers, in `fan_in`.
#


def fan_in_groups(nodes: Sequence[OpNode], destinations: Mapping[int, str]) -> list[list[int]]:
    """Return the indices of the sends that share a Recv, in program order, for each such Recv.

    Args:
        nodes: a function's nodes, in recorded order.
        destinations: class that each Send-flavoured op sends to, by node index.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, node in enumerate(nodes):
        if is_wire(node, keys.OP_SEND) and node.outputs and index in destinations:
            port = node.metadata.get(keys.FAN_IN_KEY) or node.outputs[0]
            groups.setdefault((port, destinations[index]), []).append(index)
    return [members for members in groups.values() if len(members) > 1]


def groups_of_sends(nodes: Sequence[OpNode]) -> dict[str, list[OpNode]]:
    """Map each send that shares a Recv to all sends that share it, in program order.

    The sends are still as recorded, and carry their `peer_class`.
    """
    destinations = {}
    for index, node in enumerate(nodes):
        home = node.metadata.get(keys.PEER_CLASS_KEY)
        if home is not None and not _has_sentinel(node):
            destinations[index] = home
    groups: dict[str, list[OpNode]] = {}
    for group in fan_in_groups(nodes, destinations):
        members = [nodes[index] for index in group]
        groups.update((member.name, members) for member in members)
    return groups


def join_values(function: Function, names: Mapping[str, str]) -> None:
    """Make the readers of later sends' values read those of the first send.

    Args:
        function: the body, in which no op makes the later sends' values any more.
        names: maps the value of a later send to the value of the first one.
    """
    if not names:
        return
    for node in function.nodes:
        rename_node(node, names)
    handed_out = [name for name in function.outputs if name in names]
    producers = function.producers
    function.extend(
        [_pass_through(producers[names[name]], names[name], name) for name in handed_out]
    )
    for name in names.keys() - set(handed_out):
        function.types.pop(name, None)


def _has_sentinel(node: OpNode) -> bool:
    return any(name.startswith(keys.SEND_SENTINEL_PREFIX) for name in node.outputs)


def _pass_through(maker: OpNode, source: str, name: str) -> OpNode:
    node = OpNode(
        domain=keys.SYSCALL_DOMAIN,
        op_type="PassThrough",
        name=f"{name}/PassThrough_joined",
        inputs=[source],
        outputs=[name],
        source_line=maker.source_line,
        made_by="synthesize_wire_recvs",
    )
    inherit(node, maker, (keys.HOME_CLASS_KEY, keys.MODULE_INSTANCE_KEY))
    return node
