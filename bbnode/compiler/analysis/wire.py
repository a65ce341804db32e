"""Do the wire ops of a function fit together?

Rule: as recorded, a request has exactly one response, and only Send-flavoured ops are
authored; as synthesised, a Recv-flavoured op names the send that it belongs to.
"""

from __future__ import annotations

from bbnode.compiler.analysis import order
from bbnode.compiler.errors import (
    DanglingInput,
    TypeConstraintFailed,
    UnpairedWireRequest,
    Where,
)
from bbnode.ir import keys, plain, types
from bbnode.ir.plain import Function, Node

# Ops behind which a request id is still the same one.
_TRANSPARENT = frozenset({"PassThrough", "Gate", "GateDispatch", "GateManyDispatch"})
REMOTE_REQ_ID_OUTPUT = 4  # of SendReqBatched as recorded
REQ_ID_INPUT = 2  # of SendResp


def check_pairs(function: Function) -> None:
    """Look at the wire ops of a function, in their order.

    Raises UnpairedWireRequest, TypeConstraintFailed (peers that are none) or DanglingInput (a
    later send of a port whose first send is not there) on the first that does not fit.
    """
    wires = [node for node in function.node if plain.is_wire(node)]
    if not wires:
        return
    made = order.producers(function)
    known = function.kinds()
    answers: dict[str, str] = {}
    ports = {
        node.output[0]
        for node in wires
        if node.op_type == keys.OP_SEND and node.output and _joins(node) is None
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
            _take_answer(function, node, made, answers)
        elif node.op_type in keys.SEND_OPS:
            _check_peers(node, known.get(node.input[1], types.ANY))
    for node in wires:
        is_recorded = node.op_type == keys.OP_SEND_REQ_BATCHED and len(node.output) > 1
        if is_recorded and node.name not in answers:
            raise _unpaired(node, "nothing answers the request")


def _joins(node: Node) -> str | None:
    """What the first send of the port delivers, on a later send of it; else None."""
    return node.metadata.get(keys.FAN_IN_KEY)


def request_of(function: Function, response: Node, made: dict[str, int]) -> Node | None:
    """The SendReqBatched (or its RecvReq) whose request id a SendResp gives back."""
    value = response.input[REQ_ID_INPUT]
    while (index := made.get(value)) is not None:
        node = function.node[index]
        is_request = plain.is_wire(node, keys.OP_SEND_REQ_BATCHED)
        if is_request and value == _output(node, REMOTE_REQ_ID_OUTPUT):
            return node
        if plain.is_wire(node, keys.OP_RECV_REQ) and value == _output(node, 2):
            return node
        if node.domain != keys.SYSCALL_DOMAIN or node.op_type not in _TRANSPARENT:
            return None
        value = node.input[0]
    return None


def _output(node: Node, index: int) -> str:
    return node.output[index] if index < len(node.output) else ""


def _take_answer(
    function: Function, node: Node, made: dict[str, int], answers: dict[str, str]
) -> None:
    request = request_of(function, node, made)
    if request is None:
        raise _unpaired(
            node, f"{node.input[REQ_ID_INPUT]!r} is not the remote request id of any request"
        )
    if request.name in answers:
        raise _unpaired(request, f"both {answers[request.name]!r} and {node.name!r} answer it")
    answers[request.name] = node.name


def _check_peers(node: Node, kind: types.TypeNode) -> None:
    fits = types.meet(kind, types.PEER_ID_VEC) or types.meet(kind, types.PEER_ID)
    if fits is None:
        raise TypeConstraintFailed(
            op=node.name,
            detail=f"{node.input[1]!r} is {kind.name}, a send takes PeerIdVec or PeerId there",
            where=Where.of(node),
        )


def _unpaired(node: Node, detail: str) -> UnpairedWireRequest:
    return UnpairedWireRequest(node_name=node.name, detail=detail, where=Where.of(node))
