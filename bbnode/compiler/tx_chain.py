"""The chain of gates before a Send to one fixed peer.

Rule: a Send that names its peer in the attribute `peer` is guarded; one that takes its peers
from a value is not, since there the wire op itself looks at each peer. A gate takes the
Send's data input and hands it on.
"""

from __future__ import annotations

from bbnode.compiler.analysis import order
from bbnode.compiler.rewriting.gates import gate_tag, make_gate
from bbnode.compiler.unit import CompilationUnit
from bbnode.compiler.wire_stamps import rewire_input
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, Node


def insert_tx_gate(unit: CompilationUnit, gate: str) -> int:
    """Put one kind of gate right before every Send to a fixed peer that lacks it."""
    return sum(_insert(main, gate) for main in unit.partitions.values())


def is_peer_routed(node: Node) -> bool:
    """Whether a node is a Send to the peer in its `peer` attribute."""
    return (
        plain.is_wire(node, keys.OP_SEND)
        and bool(node.input)
        and node.find_attr(keys.ATTR_PEER) is not None
    )


def _insert(main: Function, gate: str) -> int:
    nodes: list[Node] = []
    made: list[tuple[str, str]] = []
    for node in main.node:
        if is_peer_routed(node) and node.metadata.get(keys.GATE_STAMPS[gate]) is None:
            read = node.input[0]
            end = f"{node.name}#{gate_tag(gate)}_gated"
            guard = make_gate(gate, node, read, end)
            # Bytes of the PeerId: a string attribute, as the Send has it.
            guard.set_attr(keys.ATTR_PEER, node.get_attr(keys.ATTR_PEER))
            order.set_after(guard, order.after_of(node))
            rewire_input(node, 0, end)
            node.metadata[keys.GATE_STAMPS[gate]] = "true"
            nodes.append(guard)
            made.append((end, read))
        nodes.append(node)
    if made:
        main.node = nodes
        main.declare_as(made)
    return len(made)
