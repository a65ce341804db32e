"""`insert_async_deadlines`: nothing waits without a deadline.

Rule: what may finish in a later poll carries `deadline_ns`, and what carries it is checked
right before it fires.
"""

from __future__ import annotations

from bbnode.compiler.analysis.gate_contracts import is_checked_kind
from bbnode.compiler.rewriting.gates import INHERITED_KEYS, rewire_input
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import Attribute, Function, OpNode, inherit, is_onnx_op, is_wire, make_node

# Attributes by which an op says that it takes a while on purpose, in ns: on top of the budget.
DELAY_ATTRIBUTES = ("delay_ns", "duration_ns")
_INHERITED_KEYS = (*INHERITED_KEYS, keys.CONTROL_AFTER_KEY)
MAX_DEADLINE_NS = (1 << 63) - 1  # what an ONNX integer attribute holds


class InsertAsyncDeadlines(Pass):
    """Stamps deadlines and puts a `DeadlineCheck` before what carries one.

    1. An op that may suspend (each one that a component carries out may) carries
       `deadline_ns`: the one it has, else its `deadline_ns` attribute, else the per-hop budget
       plus what it delays on purpose (`After`, `Sleep`).
    2. RecvRespBatched takes the deadline of the SendReqBatched that it waits for, and the
       attribute `deadline_ns` of that one is never 0 afterwards.
    3. Every op that carries `deadline_ns` and is neither Recv-flavoured nor a gate has a
       `DeadlineCheck` right before it, which passes its first data input through; for an op
       without inputs it has none, and its output is one more value that the op waits for.
    4. The check waits for what the op waits for (`after`, `control_after`), so that it looks at
       the clock when the op is about to fire.
    5. Every function is treated so, backend subgraphs aside: nothing suspends in them.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        stamped = checks = 0
        for function in unit.bodies():
            if function.domain != keys.BACKEND_SUBGRAPH_DOMAIN:
                stamped += _stamp(function, options.per_hop_budget_ns)
                checks += _insert_checks(function)
        return {"async_deadlines_stamped": stamped, "deadline_checks": checks}


def _stamp(function: Function, budget_ns: int) -> int:
    stamped = 0
    requests: dict[str, str] = {}  # req_id value -> deadline of the request
    for node in function.nodes:
        if is_onnx_op(node) or node.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            continue
        if is_wire(node, keys.OP_SEND_REQ_BATCHED):
            deadline = _deadline(node, budget_ns)
            node.metadata[keys.DEADLINE_NS_KEY] = deadline
            if not node.attr(keys.ATTR_DEADLINE_NS, 0):
                node.set_attr(keys.ATTR_DEADLINE_NS, int(deadline))
            requests.update((name, deadline) for name in node.outputs)
        elif is_wire(node, keys.OP_RECV_RESP_BATCHED):
            known = requests.get(node.inputs[0] if node.inputs else "")
            node.metadata[keys.DEADLINE_NS_KEY] = known or _deadline(node, budget_ns)
            stamped += 1
        elif _suspends(node):
            node.metadata[keys.DEADLINE_NS_KEY] = _deadline(node, budget_ns)
            stamped += 1
    return stamped


def _suspends(node: OpNode) -> bool:
    spec = opset.lookup_op(node.domain, node.op_type)
    return spec is not None and spec.suspends


def _deadline(node: OpNode, budget_ns: int) -> str:
    known = node.metadata.get(keys.DEADLINE_NS_KEY)
    if known is not None:
        return known
    own = node.attr(keys.ATTR_DEADLINE_NS, 0)
    if isinstance(own, int) and own > 0:
        return str(own)
    delays = (node.attr(name, 0) for name in DELAY_ATTRIBUTES)
    delay = sum(d for d in delays if isinstance(d, int) and d > 0)
    return str(min(budget_ns + delay, MAX_DEADLINE_NS))


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
    made = f"{node.name}#deadline_out"
    port = next((index for index, name in enumerate(node.inputs) if name), None)
    deadline = Attribute.of(int(node.metadata[keys.DEADLINE_NS_KEY]))
    check = make_node(
        *(keys.OP_DEADLINE_CHECK, keys.SYSCALL_DOMAIN, f"{node.name}#deadline"),
        *(() if port is None else (node.inputs[port],), (made,)),
        *({keys.ATTR_DEADLINE_NS: deadline}, node.after),
        {keys.DEADLINE_CHECK_SOURCE_KEY: node.name},
        *(node.source_line, InsertAsyncDeadlines.name, "", "", b""),
    )
    inherit(check, node, _INHERITED_KEYS)
    if port is None:
        node.after = (*node.after, made)
    else:
        rewire_input(node, port, made)
    node.metadata[keys.DEADLINE_STAMP_KEY] = "true"
    return check
