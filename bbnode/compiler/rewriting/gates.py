"""The chain of gates behind an inbound receiver.

Rule: `rx_chain_head` on the receiver names the end of its chain, the value that all readers
read; a gate goes behind that end and becomes it. Three passes share this one splice.
"""

from __future__ import annotations

from functools import cache

from bbnode.compiler.analysis import order
from bbnode.compiler.unit import CompilationUnit
from bbnode.compiler.wire_stamps import rewire_input
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, Node

# What a gate takes over from the op it guards, for errors and for the seams.
INHERITED_KEYS = (keys.HOME_CLASS_KEY, keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY)


@cache
def gate_tag(gate: str) -> str:
    """`DedupGateRx` to `dedup_rx`: what names of a gate's node and value are made of."""
    return keys.snake_case(gate).replace("_gate", "")


def make_gate(gate: str, source: Node, read: str, made: str) -> Node:
    """A gate's node, with the stamp that says which wire op it guards."""
    node = Node(
        domain=keys.SYSCALL_DOMAIN,
        op_type=gate,
        name=f"{source.name}#{gate_tag(gate)}",
        input=[read],
        output=[made],
    )
    node.metadata[keys.GATE_SOURCES[gate]] = source.name
    plain.inherit(node, source, INHERITED_KEYS)
    return node


def insert_rx_gate(unit: CompilationUnit, gate: str) -> int:
    """Put one kind of gate at the end of every inbound chain that lacks it; gives how many."""
    return sum(_insert(main, gate) for main in unit.partitions.values())


def chain_head(recv: Node) -> str:
    """The value that readers of a receiver's payload read."""
    return recv.metadata.get(keys.RX_CHAIN_HEAD_KEY) or recv.output[0]


def _insert(main: Function, gate: str) -> int:
    gates: dict[str, Node] = {}  # end of a chain so far -> the gate behind it
    for node in main.node:
        if _lacks(node, gate):
            head = chain_head(node)
            end = f"{node.name}#{gate_tag(gate)}_out"
            gates[head] = make_gate(gate, node, head, end)
            node.metadata[keys.GATE_STAMPS[gate]] = "true"
            node.metadata[keys.RX_CHAIN_HEAD_KEY] = end
    if not gates:
        return 0
    ends = {head: added.output[0] for head, added in gates.items()}
    nodes: list[Node] = []
    for node in main.node:
        if not ends.keys().isdisjoint(order.reads(node)):
            if node.input and node.input[0] in ends:
                rewire_input(node, 0, ends[node.input[0]])
            order.rename_node(node, ends)
        nodes.append(node)
        nodes.extend(gates[name] for name in node.output if name in gates)
    main.node = nodes
    main.declare_as((end, head) for head, end in ends.items())
    return len(gates)


def _lacks(node: Node, gate: str) -> bool:
    return (
        plain.is_wire(node)
        and node.op_type in keys.INBOUND_OPS
        and bool(node.output and node.output[0])
        and node.metadata.get(keys.GATE_STAMPS[gate]) is None
    )
