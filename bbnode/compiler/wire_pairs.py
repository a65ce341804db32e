"""Which Send-flavoured node feeds which Recv-flavoured one.

Rule: a pair has one index. A Recv says it in `synthesized_from`, a Send in the name of its
sentinel output, or in `synthesized_from` where it feeds the Recv of another Send (fan-in).
A request is paired with both ends of its answer through the values that they share: the
requester's `req_id` goes to RecvRespBatched, the receiver's to SendResp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbnode.compiler.errors import Internal, UnpairedWireRequest, Where
from bbnode.ir import keys, plain
from bbnode.ir.plain import Node

REQ_ID_INPUT = 2  # of SendResp (data, dest, req_id)
REQ_ID_OUTPUT = 2  # of RecvReq (payload, sender, req_id)


@dataclass(frozen=True, slots=True)
class WirePair:
    """A sending and a receiving node."""

    send: Node
    recv: Node


def wire_pairs(nodes: Sequence[Node]) -> list[WirePair]:
    """All pairs, in the order of their Sends.

    A plain Send without a Recv is fire-and-forget and left out. Raises UnpairedWireRequest
    for a request or a response that misses its other end, and Internal for a Recv that
    nothing feeds or an index that is used twice.
    """
    wire = [node for node in nodes if plain.is_wire(node)]
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
    def __init__(self, wire: Sequence[Node]) -> None:
        self._by_index: dict[tuple[str, str], Node] = {}
        self._requests: dict[str, Node] = {}  # the receiver's req_id -> its RecvReq
        self._answers: dict[str, Node] = {}  # the requester's req_id -> RecvRespBatched
        for node in wire:
            if node.op_type not in keys.RECV_OPS:
                continue
            key = (node.op_type, node.metadata.get(keys.SYNTHESIZED_FROM_KEY) or "")
            if self._by_index.setdefault(key, node) is not node:
                raise Internal(
                    detail=f"{node.name!r} and {self._by_index[key].name!r} have one wire index"
                )
            if node.op_type == keys.OP_RECV_REQ and len(node.output) > REQ_ID_OUTPUT:
                self._requests[node.output[REQ_ID_OUTPUT]] = node
            if node.op_type == keys.OP_RECV_RESP_BATCHED and node.input:
                self._answers[node.input[0]] = node

    def fed_by(self, send: Node) -> Node | None:
        if send.op_type == keys.OP_SEND:
            index = send.metadata.get(keys.SYNTHESIZED_FROM_KEY) or _sentinel(send)
            return self._by_index.get((keys.OP_RECV, index or ""))
        if send.op_type == keys.OP_SEND_REQ_BATCHED:
            index = _sentinel(send) or send.metadata.get(keys.SYNTHESIZED_FROM_KEY)
            answer = self._answers.get(send.output[0]) if send.output else None
            if index is None and answer is not None:
                index = answer.metadata.get(keys.SYNTHESIZED_FROM_KEY)
            found = self._by_index.get((keys.OP_RECV_REQ, index or ""))
            return _paired(send, found, "no RecvReq receives the request")
        request = self._requests.get(send.input[REQ_ID_INPUT]) if len(send.input) > 2 else None
        index = (request or send).metadata.get(keys.SYNTHESIZED_FROM_KEY)
        found = self._by_index.get((keys.OP_RECV_RESP_BATCHED, index or ""))
        return _paired(send, found, "no request waits for the response")


def _sentinel(send: Node) -> str | None:
    for name in send.output:
        if name.startswith(keys.SEND_SENTINEL_PREFIX):
            return name.removeprefix(keys.SEND_SENTINEL_PREFIX)
    return None


def _paired(send: Node, recv: Node | None, detail: str) -> Node:
    if recv is None:
        raise UnpairedWireRequest(node_name=send.name, detail=detail, where=Where.of(send))
    return recv
