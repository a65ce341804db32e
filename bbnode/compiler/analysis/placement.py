"""On which class of peer each op of the root runs.

Rule: values have homes and only sends move them. What reads a value runs where the value
lives; what reads none runs where its slot is used, else at the Module's home. Constants, and
what is computed from constants alone, have no home: they go wherever they are read. Each op
is looked at once, when all that it needs is placed, so the whole is linear.
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
_REMOTE_OUTPUTS = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}  # from here on: far side
INPUT = "function input"


class Placement:
    """Homes of the ops and values of one function; `solve` finds them.

    Attributes:
        nodes: the function's nodes.
        homes: class of each node, by index; None for a constant until `demand` is asked.
        destinations: class that each Send-flavoured node sends to, by index.
        placeless: whether a node has no home of its own.
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
        homes = self.homes  # not `self`: a ring would keep the whole root until the collector runs
        self._peers = PeerClasses(function, lambda node: homes[index_of[node]])
        self._slot_homes: dict[str, dict[str, None]] = {}
        self._pending: dict[str, list[int]] = {}  # by slot: ops that nothing places yet
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
            self._check_claims()  # says more of what is wrong, if it is that
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
        for index in sources:  # what no slot places is at home; that may place others
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
        """Per node how many homed values it needs; readers of each value; ops that need none."""
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
        """The home of one op whose needs are all placed."""
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
        made = list(filter(None, node.outputs))
        for name in made:
            self._value_homes[name] = home
        if node.domain == keys.WIRE_DOMAIN and node.op_type in keys.SEND_OPS:
            remote = self._destination(index)
            if not _is_synthesized(node) and node.op_type in _REMOTE_OUTPUTS:
                for name in filter(None, node.outputs[_REMOTE_OUTPUTS[node.op_type] :]):
                    self._value_homes[name] = remote
        return made

    def _destination(self, index: int) -> str:
        node = self.nodes[index]
        known = node.metadata.get(keys.PEER_CLASS_KEY) if _is_synthesized(node) else None
        found = known or self._peers.destination(node)
        self.destinations[index] = found
        return found

    def _own_default(self, index: int) -> str:
        """Home of the Module that recorded the op, or that it calls, or of the root."""
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
        # The one that a message brings last, if that came from where the other one lives.
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
        """Return the send whose message a value is made of, None if it is of none."""
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
        """Return True if a value is made of what an op gives."""
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
        """Return the classes that read each placeless op, sorted; home where nobody does."""
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
    """Recv-flavoured ops live where `synthesize_wire_recvs` put them."""
    return bool(is_wire(node) and node.op_type in keys.RECV_OPS)


def _is_random(node: OpNode) -> bool:
    return node.op_type.startswith("Random") or node.op_type in _RANDOM_OPS


# --- which class of peer a send goes to ---------------------------------------------------
# Rule: the class comes from where the peers come from: a selector that says `peer_class`, the
# `sender` of something received, or a graph input named like the class; ops that only move peers
# about (Slice, Concat, …) are looked through, and so are sends and bundles: a PeerId that was
# handed on to another class still means a peer of the class that it came from.
#

# Ops that hand on some or all of the peers of their first input (Concat: of all inputs).
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
# How an author writes them.
_CALLS = {keys.OP_SEND: "net_out", keys.OP_SEND_REQ_BATCHED: "request"}
RECEIVED_OUTPUT = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}
SENDER_OUTPUT = {keys.OP_SEND: 1, keys.OP_SEND_REQ_BATCHED: 3}


class PeerClasses:
    """Answers for one function. `home_of` gives the home of a node that is placed already."""

    def __init__(
        self,
        function: Function,
        home_of: Callable[[OpNode], str | None],
    ) -> None:
        self._function = function
        self._maker = function.producers
        self._home_of = home_of
        self._inputs = frozenset(function.inputs)
        self._joined: dict[str, list[OpNode]] = {}  # value that several sends deliver -> the sends

    def destination(self, send: OpNode) -> str:
        """Return the class that a Send-flavoured op sends to.

        Raises UnresolvedPeerClass when nothing says it, or two sources disagree.
        """
        if send.op_type == keys.OP_SEND_RESP:
            request = request_of(self._function, send)
            found = {None} if request is None else {self._home_of(request)}
            peers = send.inputs[2]
        else:
            peers = send.inputs[PEERS_INPUT]
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
        nodes = self._function.nodes
        for group in fan_in_groups(nodes, destinations):
            members = [nodes[index] for index in group]
            for node in members:
                self._joined.update((name, members) for name in node.outputs if name)
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
            node = self._maker.get(value)
            if node is None:
                found.add(value if value in self._inputs else None)
                continue
            moved = self._moved(node, value)
            if node.op_type == keys.OP_COLLECT and node.domain == keys.SYSCALL_DOMAIN:
                found.update(self._senders_of(node.inputs[0]))
            elif moved is None:
                found.add(self._said_by(node, value))
                found.update(self._home_of(other) for other in self._joined.get(value, ()))
            else:
                todo.extend(name for name in moved if name not in seen)
                seen.update(moved)
        return found

    def _senders_of(self, value: str) -> set[str | None]:
        """Classes of the peers whose deliveries a value is made of; None where it is of none."""
        found: set[str | None] = set()
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
                found.update(self._home_of(send) for send in self._joined.get(received, [node]))
                continue
            fresh = [name for name in (*node.computes_with, *node.after) if name not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return found or {None}

    def _moved(self, node: OpNode, value: str) -> list[str] | None:
        """The values whose peers a node hands on as `value`; None when it hands on none."""
        received = RECEIVED_OUTPUT.get(node.op_type) if is_wire(node) else None
        if received is not None and node.outputs[received : received + 1] == (value,):
            return [send.inputs[0] for send in self._joined.get(value, [node])]
        if is_wire(node, keys.OP_SEND_REQ_BATCHED) and node.outputs[1:2] == (value,):
            return [node.inputs[PEERS_INPUT]]  # those who answer are among those who are asked
        if node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_UNBUNDLE:
            return self._bundled(node.inputs[0], node.outputs.index(value))
        return _moved(node)

    def _bundled(self, composite: str, position: int) -> list[str] | None:
        """The value that was put at a position of a composite; None when that can't be seen."""
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
    """The inputs whose peers a node hands on; None when it is no such op."""
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
