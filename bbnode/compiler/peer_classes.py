"""Which class of peer a send goes to.

Rule: the class comes from where the peers come from: a selector that says `peer_class`, the
`sender` of something received, or a graph input named like the class; ops that only move peers
about (Slice, Concat, …) are looked through, and so are sends and bundles: a PeerId that was
handed on to another class still means a peer of the class that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bbnode.compiler.analysis.order import is_graph_op
from bbnode.compiler.analysis.wire import request_of
from bbnode.compiler.errors import UnresolvedPeerClass, Where
from bbnode.compiler.fan_in import fan_in_groups
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, Node

# Ops that hand on some or all of the peers of their first input (Concat: of all inputs).
_GRAPH_MOVERS = frozenset({"Identity", "Slice", "Gather", "Concat", "Squeeze", "Unsqueeze"})
_SYSCALL_MOVERS = frozenset({"PassThrough", "Gate", "GateDispatch", "GateManyDispatch", "Tee"})
_ALL_INPUTS = "Concat"
PEERS_INPUT = 1  # of Send and SendReqBatched
RECEIVED_OUTPUT = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}
SENDER_OUTPUT = {keys.OP_SEND: 1, keys.OP_SEND_REQ_BATCHED: 3}


class PeerClasses:
    """Answers for one function. `home_of` gives the home of a node that is placed already."""

    def __init__(
        self,
        function: Function,
        maker: Mapping[str, int],
        home_of: Callable[[int], str | None],
    ) -> None:
        self._function = function
        self._maker = dict(maker)
        self._home_of = home_of
        self._inputs = frozenset(function.input)
        self._joined: dict[str, list[int]] = {}  # value that several sends deliver -> the sends

    def destination(self, send: Node) -> str:
        """The class that a Send-flavoured op sends to.

        Raises UnresolvedPeerClass when nothing says it, or two sources disagree.
        """
        if send.op_type == keys.OP_SEND_RESP:
            request = request_of(self._function, send, self._maker)
            found = {None} if request is None else {self._home_of(self._maker[request.output[0]])}
            peers = send.input[2]
        else:
            peers = send.input[PEERS_INPUT]
            found = self._sources(peers)
        classes = sorted(name for name in found if name)
        if len(classes) != 1 or len(found) != 1:
            raise UnresolvedPeerClass(
                node_name=send.name,
                peer_input=peers,
                classes=tuple(classes) if len(classes) > 1 else (),
                where=Where.of(send),
            )
        return classes[0]

    def confirm(self, destinations: Mapping[int, str]) -> None:
        """Look again, when all ops are placed: what arrives at a port that several ops send to
        has several senders.

        Args:
            destinations: class that each Send-flavoured op sends to, by node index.

        Raises UnresolvedPeerClass when the senders are of several classes.
        """
        nodes = self._function.node
        groups = fan_in_groups(nodes, destinations)
        for members in groups:
            for index in members:
                self._joined.update((name, members) for name in nodes[index].output if name)
        if self._joined:
            for index in destinations:
                self.destination(nodes[index])

    def _sources(self, peers: str) -> set[str | None]:
        """Classes of all sources of a peers value; None for one that does not say."""
        found: set[str | None] = set()
        seen = {peers}
        todo = [peers]
        while todo:
            value = todo.pop()
            index = self._maker.get(value)
            if index is None:
                found.add(value if value in self._inputs else None)
                continue
            moved = self._moved(index, value)
            if moved is None:
                found.add(self._said_by(index, value))
                found.update(self._home_of(other) for other in self._joined.get(value, ()))
            else:
                todo.extend(name for name in moved if name not in seen)
                seen.update(moved)
        return found

    def _moved(self, index: int, value: str) -> list[str] | None:
        """The values whose peers a node hands on as `value`; None when it hands on none."""
        node = self._function.node[index]
        received = RECEIVED_OUTPUT.get(node.op_type) if plain.is_wire(node) else None
        if received is not None and node.output[received : received + 1] == [value]:
            sends = self._joined.get(value, [index])
            return [self._function.node[other].input[0] for other in sends]
        if node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_UNBUNDLE:
            return self._bundled(node.input[0], list(node.output).index(value))
        return _moved(node)

    def _bundled(self, composite: str, position: int) -> list[str] | None:
        """The value that was put at a position of a composite; None when that can't be seen."""
        seen: set[str] = set()
        while composite not in seen and (index := self._maker.get(composite)) is not None:
            seen.add(composite)
            node = self._function.node[index]
            if node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_BUNDLE:
                return list(node.input[position : position + 1]) or None
            moved = self._moved(index, composite)
            if moved is None or len(moved) != 1:
                return None
            composite = moved[0]
        return None

    def _said_by(self, index: int, value: str) -> str | None:
        node = self._function.node[index]
        if not plain.is_wire(node):
            return node.metadata.get(keys.PEER_CLASS_KEY)
        position = SENDER_OUTPUT.get(node.op_type)
        if position is None or position >= len(node.output) or node.output[position] != value:
            return None
        return self._home_of(index)


def _moved(node: Node) -> list[str] | None:
    """The inputs whose peers a node hands on; None when it is no such op."""
    if is_graph_op(node) and node.op_type in _GRAPH_MOVERS:
        return list(node.input) if node.op_type == _ALL_INPUTS else list(node.input[:1])
    if node.domain == keys.SYSCALL_DOMAIN and node.op_type in _SYSCALL_MOVERS:
        return list(node.input[:1])
    return None
