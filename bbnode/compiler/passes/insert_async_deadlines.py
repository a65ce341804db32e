"""`insert_async_deadlines`: nothing waits without a deadline.

Rule: an op that may finish in a later poll carries `deadline_ns`, and every op that carries it is
checked right before it fires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bbnode.compiler.analysis.chain_depth import DELAY_ATTRIBUTES, MAX_DEADLINE_NS
from bbnode.compiler.analysis.gate_contracts import is_checked_kind
from bbnode.compiler.analysis.order import program_order
from bbnode.compiler.rewriting.gates import INHERITED_KEYS, rewire_input
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys, opset, types
from bbnode.ir.flatten import is_join
from bbnode.ir.graph import (
    Attribute,
    Function,
    FunctionKey,
    OpNode,
    call_key,
    inherit,
    is_onnx_op,
    is_wire,
    make_node,
)

_INHERITED_KEYS = (*INHERITED_KEYS, keys.CONTROL_AFTER_KEY, keys.DEADLINE_FROM_KEY)
_ENTRIES = (keys.OP_RECV, keys.OP_RECV_REQ)


class _Bound(NamedTuple):
    """The time limit of an op: `source` is its `deadline_from`, "" if its author set it."""

    ns: int
    source: str


class InsertAsyncDeadlines(Pass):
    """Stamps deadlines and puts a `DeadlineCheck` before what carries one.

    1. An op that may suspend (each one that a component carries out may) carries
       `deadline_ns`: the one it has, else its `deadline_ns` attribute; else that of the Recv or
       RecvReq that it comes behind (with several, the longest), which is that of the send or
       request upstream; else the per-hop budget. What it delays on purpose (`After`, `Sleep`) is
       added to what is not its own.
    2. `deadline_from` of one behind a receiver is that of its send, else `chain`; of the others
       `nobody`, unless somebody gave the per-hop budget. A deadline with it gives way to what the
       execution has left, if something bounds that.
    3. RecvRespBatched takes the deadline of the SendReqBatched that it waits for, and the
       attribute `deadline_ns` of that one is never 0 afterwards.
    4. Every op that carries `deadline_ns` and is neither Recv-flavoured nor a gate has a
       `DeadlineCheck` right before it, which passes its first data input through; for an op
       without inputs it has none, and its output is one more value that the op waits for.
    5. The check waits for what the op waits for (`after`, `control_after`), so that it looks at
       the clock when the op is about to fire.
    6. Every function is treated so, backend subgraphs aside: nothing suspends in them.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        stamped = checks = 0
        upstream = _Upstream(unit)
        for function in unit.bodies():
            if function.domain != keys.BACKEND_SUBGRAPH_DOMAIN:
                stamped += _stamp(function, options, upstream.bounds.get(function, {}))
                checks += _insert_checks(function)
        return {"async_deadlines_stamped": stamped, "deadline_checks": checks}


class _Upstream:
    """The time limits, by op, of the messages that start the ops' executions.

    The ops of a function have the limit of its calls, if every call has one.
    """

    def __init__(self, unit: CompilationUnit) -> None:
        self._called: dict[FunctionKey, list[_Bound | None]] = {}
        self.bounds: dict[Function, dict[str, _Bound]] = {}
        for function in _callers_first(unit):
            self._walk(function)

    def _walk(self, function: Function) -> None:
        calls = self._called.get(function.key, [])
        around = _longest(calls) if all(calls) else None
        nodes = list(function.nodes)
        by_value: dict[str, _Bound] = {}
        by_node: dict[str, _Bound] = {}
        for at in program_order(nodes):
            node = nodes[at]
            if is_wire(node) and node.op_type in _ENTRIES:
                stamp = int(node.metadata.get(keys.DEADLINE_NS_KEY) or 0)
                source = node.metadata.get(keys.DEADLINE_FROM_KEY, keys.DEADLINE_FROM_CHAIN)
                bound = _Bound(stamp, source) if stamp else None
            else:
                before = [by_value.get(name) for name in node.reads]
                names = node.metadata.get(keys.CONTROL_AFTER_KEY, "")
                before += [by_node.get(name) for name in names.split(",") if name]
                bound = _longest(before) or around
            if node.domain == keys.MODULE_DOMAIN:
                self._called.setdefault(call_key(node), []).append(bound)
            # A join starts an execution of its own, which no message bounds.
            if bound is not None:
                by_node[node.name] = bound
                if not is_join(node):
                    by_value.update(dict.fromkeys(node.outputs, bound))
        self.bounds[function] = by_node


def _callers_first(unit: CompilationUnit) -> Iterator[Function]:
    table = {function.key: function for function in unit.program.functions}
    order: dict[Function, None] = {}
    for function in unit.bodies():
        _add_callees(function, table, order)
        order.setdefault(function)
    return reversed(order)


def _add_callees(
    function: Function, table: Mapping[FunctionKey, Function], order: dict[Function, None]
) -> None:
    for node in function.nodes:
        callee = table.get(call_key(node))
        if callee is not None and callee not in order:
            _add_callees(callee, table, order)
            order[callee] = None


def _longest(bounds: list[_Bound | None]) -> _Bound | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def _stamp(function: Function, options: CompileOptions, upstream: dict[str, _Bound]) -> int:
    source = "" if options.is_bounded else keys.DEADLINE_FROM_NOBODY
    hop = _Bound(options.per_hop_budget_ns, source)
    stamped = 0
    requests: dict[str, OpNode] = {}  # req_id value -> request
    for node in function.nodes:
        if is_onnx_op(node) or node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            continue
        if is_wire(node, keys.OP_SEND_REQ_BATCHED):
            _give(node, hop)
            if not node.attr(keys.ATTR_DEADLINE_NS, 0):
                node.set_attr(keys.ATTR_DEADLINE_NS, int(node.metadata[keys.DEADLINE_NS_KEY]))
            requests.update(dict.fromkeys(node.outputs, node))
        elif is_wire(node, keys.OP_RECV_RESP_BATCHED):
            request = requests.get(node.inputs[0] if node.inputs else "")
            if request is not None:
                if keys.DEADLINE_FROM_KEY not in request.metadata:
                    node.metadata.pop(keys.DEADLINE_FROM_KEY, None)
                inherit(node, request, (keys.DEADLINE_NS_KEY, keys.DEADLINE_FROM_KEY))
            else:
                _give(node, hop)
            stamped += 1
        elif _suspends(node):
            _give(node, upstream.get(node.name, hop))
            stamped += 1
    return stamped


def _suspends(node: OpNode) -> bool:
    spec = opset.lookup_op(node.domain, node.op_type)
    return spec is not None and spec.suspends


def _give(node: OpNode, otherwise: _Bound) -> None:
    """Stamp a deadline on an op: its own, else `otherwise` plus the op's intended delay."""
    if keys.DEADLINE_NS_KEY in node.metadata:
        return
    own = node.attr(keys.ATTR_DEADLINE_NS, 0)
    if isinstance(own, int) and own > 0:
        node.metadata[keys.DEADLINE_NS_KEY] = str(own)
        return
    delays = (node.attr(name, 0) for name in DELAY_ATTRIBUTES)
    delay = sum(d for d in delays if isinstance(d, int) and d > 0)
    node.metadata[keys.DEADLINE_NS_KEY] = str(min(otherwise.ns + delay, MAX_DEADLINE_NS))
    if otherwise.source:
        node.metadata[keys.DEADLINE_FROM_KEY] = otherwise.source


def _insert_checks(function: Function) -> int:
    nodes: list[OpNode] = []
    like: list[tuple[str, str]] = []
    triggers = []
    for node in function.nodes:
        if is_checked_kind(node):
            meta = node.metadata
            if keys.DEADLINE_NS_KEY in meta and keys.DEADLINE_STAMP_KEY not in meta:
                check = _make_check(node)
                nodes.append(check)
                if check.inputs:
                    like.append((check.outputs[0], check.inputs[0]))
                else:
                    triggers.append(check.outputs[0])
        nodes.append(node)
    if len(nodes) > len(function.nodes):
        function.nodes = nodes
        function.declare_as(like)
        function.declare(dict.fromkeys(triggers, types.TRIGGER))
    return len(like) + len(triggers)


def _make_check(node: OpNode) -> OpNode:
    output = f"{node.name}#deadline_out"
    port = next((index for index, name in enumerate(node.inputs) if name), None)
    deadline = Attribute.of(int(node.metadata[keys.DEADLINE_NS_KEY]))
    check = make_node(
        *(keys.OP_DEADLINE_CHECK, keys.SYSCALL_DOMAIN, f"{node.name}#deadline"),
        *(() if port is None else (node.inputs[port],), (output,)),
        *({keys.ATTR_DEADLINE_NS: deadline}, node.after),
        {keys.DEADLINE_CHECK_SOURCE_KEY: node.name},
        *(node.source_line, InsertAsyncDeadlines.name, "", "", b""),
    )
    inherit(check, node, _INHERITED_KEYS)
    if port is None:
        node.after = (*node.after, output)
    else:
        rewire_input(node, port, output)
    node.metadata[keys.DEADLINE_STAMP_KEY] = "true"
    return check
