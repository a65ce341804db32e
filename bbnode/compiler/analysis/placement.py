"""The placement of each op of the root on a class of peer.

Rule: values have homes and only sends move them. An op that reads a value runs where the value
lives; an op that reads none runs where its slot is used, else at the Module's home. Constants,
and values computed from constants alone, have no home: they go wherever they are read. Each op
is placed once, when all its dependencies are, so the whole is linear.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from bbnode.compiler.analysis.order import topological
from bbnode.compiler.analysis.wire import fan_in_groups, request_of
from bbnode.compiler.errors import (
    AmbiguousHome,
    CrossClassDataflow,
    HomeContradicted,
    Internal,
    UnresolvedPeerClass,
    Where,
)
from bbnode.compiler.unit import HomeClaim
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_onnx_op, is_wire

_RANDOM_OPS = frozenset({"Bernoulli", "Multinomial"})  # beside those called Random…
_REMOTE_OUTPUTS = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}  # first remote output
INPUT = "function input"


class Placement:
    """Homes of the ops and values of one function; `solve` finds them.

    Attributes:
        nodes: the function's nodes.
        homes: class of each node, by index; None for a constant until `demand` is asked.
        destinations: class that each Send-flavoured node sends to, by index.
        placeless: True for each node without a home of its own.
    """

    def __init__(
        self,
        function: Function,
        called_slots: Mapping[FunctionKey, Sequence[str]],
        claims: Sequence[HomeClaim] = (),
    ) -> None:
        self._claims = claims
        self._called_homes = {
            claim.where.node_name: claim.home for claim in reversed(claims) if not claim.value
        }
        self.default = function.metadata.get(keys.HOME_KEY) or keys.SELF_CLASS
        self.nodes: list[OpNode] = list(function.nodes)
        self.order = topological(function)
        self.homes: list[str | None] = [None] * len(self.nodes)
        self.destinations: dict[int, str] = {}
        self.data = [node.computes_with for node in self.nodes]
        self.waits = [node.after for node in self.nodes]
        index_of = {node: index for index, node in enumerate(self.nodes)}
        self.maker = {name: index_of[node] for name, node in function.producers.items()}
        self.placeless = self._find_placeless()
        self._called_slots = called_slots
        self._value_homes = {
            name: function.home_of_input(name) or self.default for name in function.inputs
        }
        homes = self.homes  # a reference to `self` would make a cycle, and keep the root alive
        self._peers = PeerClasses(function, lambda node: homes[index_of[node]])
        self._slot_homes: dict[str, dict[str, None]] = {}
        self._pending: dict[str, list[int]] = {}  # slot -> ops that are not placed yet
        self._assumed: list[int] = []  # ops placed by their slot, or by default
        self._ready: list[tuple[int, int]] = []
        self._position = {index: at for at, index in enumerate(self.order)}

    def solve(self) -> None:
        """Place every op that has a home.

        Raises HomeContradicted, CrossClassDataflow, AmbiguousHome, UnresolvedPeerClass.
        """
        try:
            self._solve()
        except CrossClassDataflow:
            self._check_claims()  # its error is more specific, if it applies
            raise
        self._check_claims()

    def _check_claims(self) -> None:
        for claim in self._claims:
            lives_on = self._value_homes.get(claim.value)
            if lives_on not in (None, claim.home) and self._is_placed_value(claim.value):
                raise HomeContradicted(
                    called=claim.called,
                    home=claim.home,
                    value=claim.value,
                    lives_on=lives_on,
                    where=claim.where,
                )

    def _solve(self) -> None:
        missing, readers, free = self._dependencies()
        for index in self.order:
            if not self.placeless[index] and not missing[index] and index not in free:
                self._push(index)
        sources = [index for index in self.order if index in free]
        for index in sources:
            slots = self._slots_of(index)
            for slot in slots:
                self._pending.setdefault(slot, []).append(index)
            if not slots:
                self.homes[index] = self._own_default(index)
                self._push(index)
        self._run(missing, readers)
        for index in sources:  # ops that no slot places are at home; that may place others
            if self.homes[index] is None:
                self._assume(index, self._own_default(index))
                self._run(missing, readers)
        self._check_assumed()
        self._peers.confirm(self.destinations)
        for index, home in enumerate(self.homes):
            if home is None and not self.placeless[index]:
                raise Internal(detail=f"op {self.nodes[index].name!r} was not placed")

    def _find_placeless(self) -> list[bool]:
        placeless = [False] * len(self.nodes)
        anywhere: set[str] = set()  # values without a home
        for index in self.order:
            node = self.nodes[index]
            if self.waits[index]:
                continue
            if node.op_type == "Constant":
                placeless[index] = is_onnx_op(node) or node.domain == keys.SYSCALL_DOMAIN
            elif is_onnx_op(node) and self.data[index] and not _is_random(node):
                placeless[index] = anywhere.issuperset(self.data[index])
            if placeless[index]:
                anywhere.update(node.outputs)
        self._anywhere = anywhere
        return placeless

    def _is_placed_value(self, name: str) -> bool:
        return name not in self._anywhere

    def _dependencies(self) -> tuple[list[int], dict[str, list[int]], set[int]]:
        """Return the count of homed inputs per node, readers per value, ops without such inputs."""
        missing = [0] * len(self.nodes)
        readers: dict[str, list[int]] = {}
        free: set[int] = set()
        for index, node in enumerate(self.nodes):
            if self.placeless[index]:
                continue
            needed = {*self.data[index], *self.waits[index]} - self._anywhere
            if not needed and not _has_stamped_home(node):
                free.add(index)
            for name in needed:
                if name not in self._value_homes:
                    missing[index] += 1
                    readers.setdefault(name, []).append(index)
        return missing, readers, free

    def _push(self, index: int) -> None:
        heapq.heappush(self._ready, (self._position[index], index))

    def _run(self, missing: list[int], readers: dict[str, list[int]]) -> None:
        """Place all ops that can be placed now, in program order."""
        while self._ready:
            _, index = heapq.heappop(self._ready)
            home = self._place(index)
            for slot in self._slots_of(index):
                self._slot_homes.setdefault(slot, {})[home] = None
                for waiting in self._pending.pop(slot, ()):
                    if self.homes[waiting] is None:
                        self._assume(waiting, home)
            for name in self._home_outputs(index, home):
                for reader in readers.get(name, ()):
                    missing[reader] -= 1
                    if not missing[reader]:
                        self._push(reader)

    def _assume(self, index: int, home: str) -> None:
        self.homes[index] = home
        self._assumed.append(index)
        self._push(index)

    def _place(self, index: int) -> str:
        """Return the home of an op whose dependencies are all placed."""
        home = self.homes[index]
        if home is None and _has_stamped_home(self.nodes[index]):
            home = self.nodes[index].metadata.get(keys.HOME_CLASS_KEY)
        from_value = ""
        for name in self.nodes[index].reads:
            if name in self._anywhere:
                continue
            lives_on = self._value_homes[name]
            if home is None:
                home, from_value = lives_on, name
            elif home != lives_on:
                raise self._cross(index, from_value, home, name, lives_on)
        if home is None:
            raise Internal(detail=f"op {self.nodes[index].name!r} has nothing to place it")
        self.homes[index] = home
        return home

    def _home_outputs(self, index: int, home: str) -> list[str]:
        node = self.nodes[index]
        outputs = list(filter(None, node.outputs))
        for name in outputs:
            self._value_homes[name] = home
        if node.domain == keys.WIRE_DOMAIN and node.op_type in keys.SEND_OPS:
            remote = self._destination(index)
            if not _is_synthesized(node) and node.op_type in _REMOTE_OUTPUTS:
                for name in filter(None, node.outputs[_REMOTE_OUTPUTS[node.op_type] :]):
                    self._value_homes[name] = remote
        return outputs

    def _destination(self, index: int) -> str:
        node = self.nodes[index]
        known = node.metadata.get(keys.PEER_CLASS_KEY) if _is_synthesized(node) else None
        home = known or self._peers.destination(node)
        self.destinations[index] = home
        return home

    def _own_default(self, index: int) -> str:
        """Return the home of the Module that recorded the op or that it calls, else of the root."""
        node = self.nodes[index]
        called = self._called_homes.get(node.name)
        return called or node.metadata.get(keys.HOME_KEY) or self.default

    def _slots_of(self, index: int) -> Sequence[str]:
        node = self.nodes[index]
        slot = node.metadata.get(keys.SLOT_KEY)
        if slot is not None:
            return (slot,)
        return self._called_slots.get(call_key(node), ()) if self._called_slots else ()

    def _check_assumed(self) -> None:
        for index in self._assumed:
            for slot in self._slots_of(index):
                homes = self._slot_homes[slot]
                if len(homes) > 1:
                    node = self.nodes[index]
                    raise AmbiguousHome(
                        node_name=node.name,
                        slot=slot,
                        homes=tuple(sorted(homes)),
                        where=Where.of(node),
                    )

    def _cross(
        self, index: int, value_a: str, home_a: str, value_b: str, home_b: str
    ) -> CrossClassDataflow:
        node = self.nodes[index]
        # Name the value that the later message delivers, if it came from the other one's home.
        send, is_answer = self._delivery_behind(value_b), is_wire(node, keys.OP_SEND_RESP)
        if send is None or self.homes[send] != home_a:
            other = self._delivery_behind(value_a)
            if other is not None and self.homes[other] == home_b and not is_answer:
                value_a, value_b, home_a, home_b = value_b, value_a, home_b, home_a
                send = other
            else:
                send = None
        port = "" if send is None else self.nodes[send].metadata.get(keys.PORT_KEY, "")
        return CrossClassDataflow(
            port=port,
            brought_by="" if send is None else _CALLS[self.nodes[send].op_type],
            is_later=send is not None and self._depends_on(value_a, send),
            is_answer=is_answer and bool(port),
            node_name=node.name,
            home_a=home_a,
            home_b=home_b,
            value_a=value_a,
            value_b=value_b,
            producer_a=self._producer_name(value_a),
            producer_b=self._producer_name(value_b),
            where=Where.of(node),
        )

    def _delivery_behind(self, value: str) -> int | None:
        """Return the send whose delivery a value depends on; None without one."""
        seen, todo = {value}, [value]
        while todo:
            index = self.maker.get(todo.pop())
            if index is None:
                continue
            node = self.nodes[index]
            first = RECEIVED_OUTPUT.get(node.op_type) if is_wire(node) else None
            if first is not None:
                if seen.intersection(node.outputs[first:]):
                    return index
                continue
            fresh = [name for name in node.computes_with if name not in seen]
            seen.update(fresh)
            todo += fresh
        return None

    def _depends_on(self, value: str, index: int) -> bool:
        """Return True if a value depends on an output of the op."""
        seen, todo = {value}, [value]
        while todo:
            maker = self.maker.get(todo.pop())
            if maker == index:
                return True
            reads = () if maker is None else self.nodes[maker].reads
            fresh = [name for name in reads if name not in seen]
            seen.update(fresh)
            todo += fresh
        return False

    def _producer_name(self, value: str) -> str:
        index = self.maker.get(value)
        return INPUT if index is None else self.nodes[index].name

    def demand(self) -> dict[int, list[str]]:
        """Return the classes that read each placeless op, sorted; the home if none does."""
        wanted: dict[int, set[str]] = {i: set() for i, free in enumerate(self.placeless) if free}
        if not wanted:
            return {}
        for index in reversed(self.order):
            home = self.homes[index]
            classes = wanted.get(index, {home} if home is not None else set())
            if index in wanted and not classes:
                classes.add(self._own_default(index))
            for name in (*self.data[index], *self.waits[index]):
                made_by = self.maker.get(name)
                if made_by in wanted:
                    wanted[made_by].update(classes)
        return {index: sorted(classes) for index, classes in wanted.items()}


def _is_synthesized(node: OpNode) -> bool:
    return node.metadata.get(keys.SYNTHESIZED_FROM_KEY) is not None or any(
        name.startswith(keys.SEND_SENTINEL_PREFIX) for name in node.outputs
    )


def _has_stamped_home(node: OpNode) -> bool:
    """Return True for a Recv-flavoured op, which lives where `synthesize_wire_recvs` put it."""
    return bool(is_wire(node) and node.op_type in keys.RECV_OPS)


def _is_random(node: OpNode) -> bool:
    return node.op_type.startswith("Random") or node.op_type in _RANDOM_OPS


# --- the class of peer that a send goes to ------------------------------------------------
# Rule: the class follows from the source of the peers: a selector with `peer_class`, the `sender`
# of a received value, or a graph input named like the class. The search passes through ops that
# only rearrange peers (Slice, Concat, …) and through sends and bundles: a PeerId that was handed
# on to another class still means a peer of the class that it came from.
#

# Ops that output some or all peers of their first input (Concat: of all inputs).
_GRAPH_MOVERS = frozenset({"Identity", "Slice", "Gather", "Concat", "Squeeze", "Unsqueeze"})
_ANSWER_MOVERS = frozenset({"Peers", "Missing", "Usable", "Merge", keys.OP_UNBUNDLE})
_DECODED_ANSWERS = keys.role_domain("Codec"), "DecodeAll"
_SENDERS_OF_HITS = keys.SEARCH_DOMAIN, "Senders"
_SYSCALL_MOVERS = frozenset(
    {"PassThrough", "Gate", "GateDispatch", "GateManyDispatch", "Tee"}
    | {keys.OP_PEERS_FILTER, keys.OP_PEERS_WITHOUT}
)
_ALL_INPUTS = "Concat"
PEERS_INPUT = 1  # of Send and SendReqBatched
# The DSL call of each op, for messages.
_CALLS = {keys.OP_SEND: "net_out", keys.OP_SEND_REQ_BATCHED: "request"}
RECEIVED_OUTPUT = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}
SENDER_OUTPUT = {keys.OP_SEND: 1, keys.OP_SEND_REQ_BATCHED: 3}


class PeerClasses:
    """Peer classes in one function. `home_of` returns the home of a node that is placed."""

    def __init__(
        self,
        function: Function,
        home_of: Callable[[OpNode], str | None],
    ) -> None:
        self._function = function
        self._maker = function.producers
        self._home_of = home_of
        self._inputs = frozenset(function.inputs)
        self._joined: dict[str, list[OpNode]] = {}  # value delivered by several sends -> the sends

    def destination(self, send: OpNode) -> str:
        """Return the class that a Send-flavoured op sends to.

        Raises UnresolvedPeerClass if no source determines it, or two sources disagree.
        """
        if send.op_type == keys.OP_SEND_RESP:
            request = request_of(self._function, send)
            sources = {None} if request is None else {self._home_of(request)}
            peers = send.inputs[2]
        else:
            peers = send.inputs[PEERS_INPUT]
            sources = self._sources(peers)
        classes = sorted(name for name in sources if name)
        if len(classes) != 1 or len(sources) != 1:
            raise UnresolvedPeerClass(
                node_name=send.name,
                peer_input=peers,
                classes=tuple(classes) if len(classes) > 1 else (),
                where=Where.of(send),
            )
        return classes[0]

    def confirm(self, destinations: Mapping[int, str]) -> None:
        """Check again once all ops are placed: a port that several ops send to has several senders.

        Args:
            destinations: class that each Send-flavoured op sends to, by node index.

        Raises UnresolvedPeerClass when the senders are of several classes.
        """
        nodes = self._function.nodes
        for group in fan_in_groups(nodes, destinations):
            members = [nodes[index] for index in group]
            for node in members:
                self._joined.update((name, members) for name in node.outputs if name)
        if self._joined:
            for index in destinations:
                self.destination(nodes[index])

    def _sources(self, peers: str) -> set[str | None]:
        """Return the classes of all sources of a peers value, with None for an unknown one."""
        classes: set[str | None] = set()
        seen = {peers}
        todo = [peers]
        while todo:
            value = todo.pop()
            node = self._maker.get(value)
            if node is None:
                classes.add(value if value in self._inputs else None)
                continue
            moved = self._moved(node, value)
            if node.op_type == keys.OP_COLLECT and node.domain == keys.SYSCALL_DOMAIN:
                classes.update(self._senders_of(node.inputs[0]))
            elif moved is None:
                classes.add(self._said_by(node, value))
                classes.update(self._home_of(other) for other in self._joined.get(value, ()))
            else:
                todo.extend(name for name in moved if name not in seen)
                seen.update(moved)
        return classes

    def _senders_of(self, value: str) -> set[str | None]:
        """Return the classes of the peers whose deliveries a value depends on, else {None}."""
        classes: set[str | None] = set()
        seen = {value}
        todo = [value]
        while todo:
            value = todo.pop()
            node = self._maker.get(value)
            if node is None:
                continue
            at = RECEIVED_OUTPUT.get(node.op_type) if is_wire(node) else None
            if at is not None and value in node.outputs[at : at + 2]:  # or its sender
                received = node.outputs[at]
                classes.update(self._home_of(send) for send in self._joined.get(received, [node]))
                continue
            fresh = [name for name in (*node.computes_with, *node.after) if name not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return classes or {None}

    def _moved(self, node: OpNode, value: str) -> list[str] | None:
        """Return the inputs whose peers a node outputs as `value`; None if it moves no peers."""
        received = RECEIVED_OUTPUT.get(node.op_type) if is_wire(node) else None
        if received is not None and node.outputs[received : received + 1] == (value,):
            return [send.inputs[0] for send in self._joined.get(value, [node])]
        if is_wire(node, keys.OP_SEND_REQ_BATCHED) and node.outputs[1:2] == (value,):
            return [node.inputs[PEERS_INPUT]]  # the answering peers are among the requested ones
        if node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_UNBUNDLE:
            return self._bundled(node.inputs[0], node.outputs.index(value))
        return _moved(node)

    def _bundled(self, composite: str, position: int) -> list[str] | None:
        """Return the value bundled at a position of a composite; None if that is unknown."""
        seen: set[str] = set()
        while composite not in seen and (node := self._maker.get(composite)) is not None:
            seen.add(composite)
            if node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_BUNDLE:
                return list(node.inputs[position : position + 1]) or None
            moved = self._moved(node, composite)
            if moved is None or len(moved) != 1:
                return None
            composite = moved[0]
        return None

    def _said_by(self, node: OpNode, value: str) -> str | None:
        if not is_wire(node):
            return node.metadata.get(keys.PEER_CLASS_KEY)
        position = SENDER_OUTPUT.get(node.op_type)
        if position is None or position >= len(node.outputs) or node.outputs[position] != value:
            return None
        return self._home_of(node)


def _moved(node: OpNode) -> list[str] | None:
    """Return the inputs whose peers a node hands on; None if it is no such op."""
    if is_onnx_op(node) and node.op_type in _GRAPH_MOVERS:
        return list(node.inputs) if node.op_type == _ALL_INPUTS else list(node.inputs[:1])
    if node.domain == keys.SYSCALL_DOMAIN and node.op_type in _SYSCALL_MOVERS:
        return list(node.inputs[:1])
    if node.domain == keys.RESPONSES_DOMAIN and node.op_type in _ANSWER_MOVERS:
        return list(node.inputs[:1])
    if (node.domain, node.op_type) in (_DECODED_ANSWERS, _SENDERS_OF_HITS):
        return list(node.inputs[:1])
    if node.domain == keys.SYSCALL_DOMAIN and node.op_type == keys.OP_CHOOSE:
        return list(node.inputs[1:])
    return None
