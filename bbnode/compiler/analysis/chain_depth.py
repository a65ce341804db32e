"""The length of the chain behind a send: in hops, and in nanoseconds.

Rule: the depth of a send counts the remaining hops, its own included. `remaining_deadline_ns`
travels with a message and bounds everything that its delivery starts, so the first hop of a
chain needs the largest budget and the last one a single hop's.

The successors of an op are the ops that read its values or wait for them, and the next op of its
slot (the ops of a slot fire in program order). Of several successors the longest chain counts.
A request waits until its receivers have answered; the readers of the answers follow it, on the
requester's side. A send with its own budget ends the chains that lead to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bbnode.compiler.analysis.order import program_order
from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_onnx_op, is_wire

# More hops than any real chain has; multiplied by a day per hop it stays within 63 bits. It also
# stops the count where paths that fork and join would double it each time.
MAX_CHAIN_DEPTH = 100_000
MAX_DEADLINE_NS = (1 << 63) - 1  # what an ONNX integer attribute holds

# Attributes that hold an op's intended delay in ns, which is added to the time of the hops.
DELAY_ATTRIBUTES = ("delay_ns", "duration_ns")

# The outputs of a send from this index on live on the receiver's side, as do their readers.
_FIRST_REMOTE = {keys.OP_SEND: 0, keys.OP_SEND_REQ_BATCHED: 2}


@dataclass(frozen=True, slots=True)
class Span:
    """Length of a chain. `hops`: sends on its longest path; `ns`: time of its slowest path.

    `is_own`: the author set the time of the send that starts the chain.
    """

    hops: int = 0
    ns: int = 0
    is_own: bool = False

    def then(self, other: Span) -> Span:
        """Return the span of this chain followed by `other`."""
        return Span(
            min(self.hops + other.hops, MAX_CHAIN_DEPTH), min(self.ns + other.ns, MAX_DEADLINE_NS)
        )

    def longest(self, other: Span) -> Span:
        """Return the span of two chains that run in parallel."""
        if other is self or (other.hops <= self.hops and other.ns <= self.ns):
            return self
        return Span(max(self.hops, other.hops), max(self.ns, other.ns))


NOTHING = Span()


def spans_of_sends(
    function: Function,
    budget_ns: int,
    called_slots: Mapping[FunctionKey, Sequence[str]],
) -> dict[int, Span]:
    """Return the chain that begins with each Send-flavoured op of a function, by node index.

    Args:
        function: the body.
        budget_ns: what one hop may take.
        called_slots: slots that a call of each function uses.

    Raises:
        CyclicGraph: its ops wait for each other.
        ExpansionFailed: the author's `chain_depth` or `deadline_ns` is invalid.
    """
    nodes = list(function.nodes)
    if not any(_is_send(node) for node in nodes):
        return {}
    order: Sequence[int] = range(len(nodes))
    if not _is_sorted(function):
        order = program_order(nodes)
    chains = _Chains(budget_ns, called_slots, _joined(nodes))
    for index in reversed(order):
        chains.add(index, nodes[index])
    return chains.sends


def _is_sorted(function: Function) -> bool:
    """Return True if every op comes after its dependencies, as the recorder writes it."""
    available = set(function.inputs)
    for node in function.nodes:
        if not available.issuperset(node.reads):
            return False
        available.update(node.outputs)
    return True


class _Chains:
    """Walks a function backwards, so that the chains after a node are known when it is visited."""

    def __init__(
        self,
        budget_ns: int,
        called_slots: Mapping[FunctionKey, Sequence[str]],
        joined: Mapping[str, list[str]],
    ) -> None:
        self.sends: dict[int, Span] = {}
        self._hop = Span(1, budget_ns)
        self._called_slots = called_slots
        self._joined = joined
        self._behind: dict[str, Span] = {}  # value -> longest chain of its readers
        self._next: dict[str, Span] = {}  # slot -> chain that starts at its next op

    def add(self, index: int, node: OpNode) -> None:
        """Add a node; all nodes downstream of it have been added."""
        if _is_send(node):
            span = self._of_send(index, node)
        else:
            span = self._longest(node.outputs)
            delay = _delay(node)
            if delay:
                span = Span(0, delay).then(span)
        slots: Sequence[str] = ()
        slot = node.metadata.get(keys.SLOT_KEY)
        if not slot:
            slots = self._called_slots.get(call_key(node), ()) if self._called_slots else ()
        elif not is_onnx_op(node):  # backend ops have no effects and no order among them
            slots = (slot,)
        for slot in slots:
            span = span.longest(self._next.get(slot, NOTHING))
        if span is NOTHING:
            return
        for slot in slots:
            self._next[slot] = span
        behind = self._behind
        for name in node.reads:
            known = behind.get(name)
            behind[name] = span if known is None else known.longest(span)

    def _of_send(self, index: int, node: OpNode) -> Span:
        """Record the chain that starts at a send; return the longest that waits for it locally."""
        first = _FIRST_REMOTE.get(node.op_type, len(node.outputs))
        remote = list(node.outputs[first:])
        # A later send of a port delivers to the readers of the first one as well. Readers that
        # come before it in the program form a loop, which only the deadline ends.
        for name in remote[:1]:
            remote += self._joined.get(name, ())
        own = self._hop.then(self._longest(remote))
        depth = given_depth(node)
        if depth:
            own = Span(depth, min(depth * self._hop.ns, MAX_DEADLINE_NS))
        deadline = given_deadline(node)
        if deadline:
            own = Span(own.hops, deadline, is_own=True)
        budget = given_budget(node)
        if budget:
            self.sends[index] = Span(own.hops, budget, is_own=True)
            return self._longest(node.outputs[:first])
        self.sends[index] = own
        return own.then(self._longest(node.outputs[:first]))

    def _longest(self, names: Sequence[str]) -> Span:
        longest = NOTHING
        for name in names:
            span = self._behind.get(name)
            if span is not None:
                longest = span if longest is NOTHING else longest.longest(span)
        return longest


def given_depth(node: OpNode) -> int:
    """Return the author's `chain_depth` of a send, or 0. Raises ExpansionFailed."""
    text = node.metadata.get(keys.CHAIN_DEPTH_KEY)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) <= MAX_CHAIN_DEPTH):
        raise _unfit(node, f"chain_depth has to be 1 to {MAX_CHAIN_DEPTH}, not {text!r:.40}")
    return int(text[:20])


def given_budget(node: OpNode) -> int:
    """Return the author's `budget_ns` of a Send, or 0. Raises ExpansionFailed."""
    text = node.metadata.get(keys.BUDGET_NS_KEY)
    if text is None:
        return 0
    if node.op_type != keys.OP_SEND:
        raise _unfit(node, "budget_ns is for a Send; a request has a deadline")
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) <= MAX_DEADLINE_NS):
        raise _unfit(node, f"budget_ns has to be nanoseconds, 1 or more, not {text!r:.40}")
    return int(text[:20])


def given_deadline(node: OpNode) -> int:
    """Return the deadline stated on a send, in ns, or 0. Raises ExpansionFailed.

    The attribute of a request takes precedence over the stamp that a send gets with its depth.
    """
    if node.op_type == keys.OP_SEND_REQ_BATCHED:
        deadline = _held(node, keys.ATTR_DEADLINE_NS)
        if not isinstance(deadline, int) or deadline < 0:
            raise _unfit(
                node, f"deadline_ns has to be nanoseconds, 0 or more, not {deadline!r:.40}"
            )
        if deadline:
            return deadline
    text = node.metadata.get(keys.DEADLINE_NS_KEY)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= MAX_DEADLINE_NS):
        raise _unfit(node, f"deadline_ns has to be nanoseconds, 0 or more, not {text!r:.40}")
    return int(text[:20])


def _held(node: OpNode, name: str) -> object:
    """Return the value of an attribute, or 0 if it is missing, malformed or a reference.

    Nothing is validated yet at this point; `expand_ops` refuses malformed attributes.
    """
    attribute = node.attributes.get(name)
    return (
        0 if attribute is None or not attribute.kind or attribute.value is None else attribute.value
    )


def _is_send(node: OpNode) -> bool:
    return node.domain == keys.WIRE_DOMAIN and node.op_type in keys.SEND_OPS


def _delay(node: OpNode) -> int:
    if node.domain != keys.SYSCALL_DOMAIN or not node.attributes:
        return 0
    delays = (_held(node, name) for name in DELAY_ATTRIBUTES)
    return sum(delay for delay in delays if isinstance(delay, int) and delay > 0)


def _joined(nodes: Sequence[OpNode]) -> dict[str, list[str]]:
    """Map the value that a later send of a port delivers to the values of the port's first send."""
    firsts: dict[str, list[str]] = {}
    sends: dict[str, OpNode] = {}
    for node in nodes:
        if is_wire(node, keys.OP_SEND) and node.outputs:
            sends[node.outputs[0]] = node
            first = node.metadata.get(keys.FAN_IN_KEY)
            if first is not None and first in sends:
                firsts[node.outputs[0]] = [name for name in sends[first].outputs if name]
    return firsts


def _unfit(node: OpNode, reason: str) -> ExpansionFailed:
    return ExpansionFailed(
        op_type=node.op_type,
        domain=node.domain,
        reason=reason,
        node_name=node.name,
        where=Where.of(node),
    )
