"""`derive_wire_deadlines`: how long a hop may take, before anything is measured.

Rule: the static bound of a send; at run time what is left of an inbound deadline comes first.
"""

from __future__ import annotations

from typing import ClassVar

from onnx import NodeProto

from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, protos

# More hops than any chain has; keeps depth times budget within 63 bits.
MAX_CHAIN_DEPTH = 100_000


class DeriveWireDeadlines:
    """Stamps `deadline_ns` on every Send-flavoured op of the root.

    1. `deadline_ns` = `chain_depth` times the per-hop budget; a missing `chain_depth` is 1.
    2. A request that brings its own `deadline_ns` attribute (not 0) keeps that one.
    3. A `chain_depth` that is no number from 1 to `MAX_CHAIN_DEPTH`, or a negative deadline,
       is ExpansionFailed.
    """

    name: ClassVar[str] = "derive_wire_deadlines"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        stamped = 0
        for function in unit.bodies():
            for node in function.node:
                if protos.is_wire(node) and node.op_type in keys.SEND_OPS:
                    deadline = _own_deadline(node) or _depth(node) * options.per_hop_budget_ns
                    protos.set_meta(node, keys.DEADLINE_NS_KEY, str(deadline))
                    stamped += 1
        return {"deadlines_stamped": stamped}


def _own_deadline(node: NodeProto) -> int:
    if node.op_type != keys.OP_SEND_REQ_BATCHED:
        return 0
    given = protos.get_attr(node, keys.ATTR_DEADLINE_NS, 0)
    if not isinstance(given, int) or given < 0:
        raise _unfit(node, f"deadline_ns has to be nanoseconds, 0 or more, not {given!r:.40}")
    return given


def _depth(node: NodeProto) -> int:
    text = protos.get_meta(node, keys.CHAIN_DEPTH_KEY)
    if text is None:
        return 1
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) <= MAX_CHAIN_DEPTH):
        raise _unfit(node, f"chain_depth has to be 1 to {MAX_CHAIN_DEPTH}, not {text!r:.40}")
    return int(text[:20])


def _unfit(node: NodeProto, reason: str) -> ExpansionFailed:
    return ExpansionFailed(
        op_type=node.op_type,
        domain=node.domain,
        reason=reason,
        node_name=node.name,
        where=Where.of(node),
    )
