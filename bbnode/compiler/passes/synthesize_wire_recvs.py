"""`synthesize_wire_recvs`: the receiving half of every send.

Rule: the author writes sends; their receivers are made here and take over the names of the
values on the receiver's side, so that no reader has to change.
"""

from __future__ import annotations

from bbnode.compiler.analysis.wire import groups_of_sends, join_values, request_of
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import IncompatibleStorageOnEdge, UnresolvedPeerClass, Where
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, OpNode, ValueType, inherit, is_wire
from bbnode.ir.types import TypeNode

CORRELATION = {
    keys.OP_SEND: "none",
    keys.OP_RECV: "none",
    keys.OP_SEND_REQ_BATCHED: "request",
    keys.OP_RECV_REQ: "request",
    keys.OP_SEND_RESP: "response",
    keys.OP_RECV_RESP_BATCHED: "response",
}

# Metadata that a synthesised op takes over from its send.
_INHERITED = (
    keys.PORT_KEY,
    keys.PORT_SCOPE_KEY,
    keys.PEER_CLASS_KEY,
    keys.DEADLINE_NS_KEY,
    keys.DEADLINE_FROM_KEY,
    keys.MODULE_INSTANCE_KEY,
)
# Outputs of a SendReqBatched as recorded, by port.
_REQUEST_PORTS = ("req_id", "responses", "received", "sender", "remote_req_id")
_SEND_PORTS = ("received", "sender")


class SynthesizeWireRecvs(Pass):
    """Adds the receiving half of every send, on the class that it goes to.

    1. A Send number i keeps one output, `__send_sentinel_<i>`; its Recv has
       `synthesized_from = <i>` and makes `received` and `sender`. Sends of one port to one class
       feed one Recv, that of the first of them: the others carry its index in
       `synthesized_from`, and what reads what they deliver reads the values of that Recv. Sends
       of one port to several classes have a Recv on each.
    2. A SendReqBatched keeps `req_id`; its RecvReq makes the far side's values, its
       RecvRespBatched `responses`, with the request's `cohort_size`. Those three and the
       SendResp carry one `synthesized_from`.
    3. Recv and RecvReq say the `payload_type`, with its shape where one is known, and its
       `type_hash` when it is a leaf.
    4. Each wire op says its `wire_correlation`; synthesised ones take over port, peer class,
       deadline and source of their send.
    5. A payload that is received as another type than it is sent as is
       IncompatibleStorageOnEdge.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        count = 0
        if not unit.partitions:
            count = _Synthesis(unit.root).run()
        return {"wire_recvs_synthesized": count}


class _Synthesis:
    def __init__(self, root: Function) -> None:
        self._root = root
        self._known = root.kinds()
        self._fresh: dict[str, TypeNode] = {}
        self._nodes: list[OpNode] = []
        self._groups = groups_of_sends(root.nodes)
        self._delivered: dict[str, tuple[str, str]] = {}  # send -> received, sender
        self._joined: dict[str, str] = {}  # later send's value -> value of the group's first send
        self._index_of: dict[str, str] = {}
        self._made = 0

    def run(self) -> int:
        sends = [n for n in self._root.nodes if is_wire(n) and n.op_type in keys.SEND_OPS]
        responses = [n for n in sends if n.op_type == keys.OP_SEND_RESP]
        requests = {n.name: request_of(self._root, n) for n in responses}
        index_of = self._index_of
        starts = [n for n in sends if n.op_type != keys.OP_SEND_RESP]
        for index, node in enumerate(starts):
            index_of[node.name] = str(index)
        for node in self._root.nodes:
            self._nodes.append(node)
            if not is_wire(node):
                continue
            node.metadata[keys.WIRE_CORRELATION_KEY] = CORRELATION[node.op_type]
            if node.name in requests and node.op_type == keys.OP_SEND_RESP:
                self._number_response(node, requests[node.name], index_of)
            elif node.name in index_of and not _is_done(node):
                self._split(node, index_of[node.name])
        if self._made:
            self._root.nodes = self._nodes
            self._root.declare(self._fresh)
            join_values(self._root, self._joined)
        for node in sends:
            if node.op_type == keys.OP_SEND:
                node.metadata.pop(keys.FAN_IN_KEY, None)  # replaced by the indices from here on
        return self._made

    def _number_response(
        self, node: OpNode, request: OpNode | None, index_of: dict[str, str]
    ) -> None:
        if request is None:
            return
        index = request.metadata.get(keys.SYNTHESIZED_FROM_KEY)
        node.metadata[keys.SYNTHESIZED_FROM_KEY] = index or index_of[request.name]

    def _split(self, send: OpNode, index: str) -> None:
        if send.op_type == keys.OP_SEND:
            received, sender = self._outputs(send, _SEND_PORTS)
            sentinel = keys.SEND_SENTINEL_PREFIX + index
            send.outputs = (sentinel,)
            self._fresh[sentinel] = types.TRIGGER
            first = self._groups.get(send.name, [send])[0].name
            if first != send.name:
                send.metadata[keys.SYNTHESIZED_FROM_KEY] = self._index_of[first]
                values = (received, sender)
                self._joined.update(zip(values, self._delivered[first], strict=True))
                return
            self._delivered[send.name] = (received, sender)
            self._add_inbound(send, keys.OP_RECV, index, [received, sender])
            return
        req_id, responses, received, sender, remote_id = self._outputs(send, _REQUEST_PORTS)
        send.outputs = (req_id,)
        send.metadata[keys.SYNTHESIZED_FROM_KEY] = index
        self._add_inbound(send, keys.OP_RECV_REQ, index, [received, sender, remote_id])
        home = send.metadata.get(keys.HOME_CLASS_KEY) or keys.SELF_CLASS
        answer = self._add(send, keys.OP_RECV_RESP_BATCHED, index, home, [responses])
        answer.inputs = (req_id,)
        size = send.attr(keys.ATTR_COHORT_SIZE)
        if isinstance(size, int):
            answer.set_attr(keys.ATTR_COHORT_SIZE, size)

    def _outputs(self, send: OpNode, ports: tuple[str, ...]) -> list[str]:
        """Return the send's values by port; unnamed ones get the names the recorder would give."""
        spec_types = dict(zip(_REQUEST_PORTS, _REQUEST_TYPES, strict=True))
        names = []
        for position, port in enumerate(ports):
            name = send.outputs[position] if position < len(send.outputs) else ""
            name = name or f"{send.name}.{port}"
            if name not in self._known:
                kind = spec_types[port] or self._known.get(send.inputs[0], types.ANY)
                self._fresh[name] = self._known[name] = kind
            names.append(name)
        return names

    def _add_inbound(self, send: OpNode, op_type: str, index: str, names: list[str]) -> None:
        home = send.metadata.get(keys.PEER_CLASS_KEY)
        if home is None:
            raise UnresolvedPeerClass(
                node_name=send.name, peer_input=send.inputs[1], where=Where.of(send)
            )
        recv = self._add(send, op_type, index, home, names)
        members = self._groups.get(send.name, [send])
        payload = self._known[names[0]]
        for member in members:
            sent = self._known.get(member.inputs[0], types.ANY)
            both = types.meet(sent, payload)
            if both is None:
                raise IncompatibleStorageOnEdge(
                    send_node=member.name,
                    recv_node=recv.name,
                    sent=sent.name,
                    received=payload.name,
                    where=Where.of(member),
                )
            payload = both
        deadlines = [member.metadata.get(keys.DEADLINE_NS_KEY) or "" for member in members]
        if len(members) > 1 and all(map(is_natural, deadlines)):
            longest = max(members, key=lambda member: int(member.metadata[keys.DEADLINE_NS_KEY]))
            recv.metadata.pop(keys.DEADLINE_FROM_KEY, None)
            inherit(recv, longest, (keys.DEADLINE_NS_KEY, keys.DEADLINE_FROM_KEY))
        declared = self._root.types.get(names[0])
        known = ValueType.of(payload) if declared is None else declared.narrowed(payload)
        recv.set_attr(keys.ATTR_PAYLOAD_TYPE, known)
        if payload.is_leaf:
            recv.metadata[keys.TYPE_HASH_KEY] = str(payload.wire_hash)

    def _add(self, send: OpNode, op_type: str, index: str, home: str, names: list[str]) -> OpNode:
        node = OpNode(
            *(op_type, keys.WIRE_DOMAIN, f"{send.name}/{op_type}"),
            outputs=names,
            source_line=send.source_line,
            made_by=SynthesizeWireRecvs.name,
        )
        inherit(node, send, _INHERITED)
        node.metadata[keys.HOME_CLASS_KEY] = home
        node.metadata[keys.SYNTHESIZED_FROM_KEY] = index
        node.metadata[keys.WIRE_CORRELATION_KEY] = CORRELATION[op_type]
        self._nodes.append(node)
        self._made += 1
        return node


# Types of a request's ports; None stands for the type of the data.
_REQUEST_TYPES = (
    types.REQUEST_ID,
    types.RESPONSE_BATCH,
    None,
    types.PEER_ID,
    types.WIRE_REQUEST_ID,
)


def _is_done(send: OpNode) -> bool:
    if send.op_type == keys.OP_SEND_REQ_BATCHED:
        return send.metadata.get(keys.SYNTHESIZED_FROM_KEY) is not None
    return any(name.startswith(keys.SEND_SENTINEL_PREFIX) for name in send.outputs)
