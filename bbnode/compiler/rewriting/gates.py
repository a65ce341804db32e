"""The chains of gates: after an inbound receiver, and before a Send to one fixed peer.

Rule: `rx_chain_head` on a receiver names the end of its chain, the value that all readers read; a
gate is added after that end and becomes the new end. A Send that names its peer in the attribute
`peer` is guarded; one that takes its peers from a value is not, since there the wire op itself
checks each peer. A gate takes the Send's data input and hands it on.

The destination of a Send's payload is stamped under the name of its data input, so a pass that
inserts an op before a Send must rename input and stamps together (`rewire_input`).
"""

from __future__ import annotations

from functools import cache

from bbnode.compiler.analysis.order import rename_node
from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import address, keys
from bbnode.ir.graph import Function, OpNode, inherit

# Metadata that a gate takes over from the op it guards, for errors and for the seam checks.
INHERITED_KEYS = (keys.HOME_CLASS_KEY, keys.MODULE_INSTANCE_KEY)


@cache
def gate_tag(gate: str) -> str:
    """Return the tag in the names of a gate's node and value: `DedupGateRx` to `dedup_rx`."""
    return keys.snake_case(gate).replace("_gate", "")


def make_gate(gate: str, source: OpNode, read: str, made: str, made_by: str) -> OpNode:
    """Return a gate's node, stamped with the wire op that it guards."""
    node = OpNode(
        domain=keys.SYSCALL_DOMAIN,
        op_type=gate,
        name=f"{source.name}#{gate_tag(gate)}",
        inputs=[read],
        outputs=[made],
        source_line=source.source_line,
        made_by=made_by,
    )
    node.metadata[keys.GATE_SOURCES[gate]] = source.name
    inherit(node, source, INHERITED_KEYS)
    return node


def insert_rx_gate(unit: CompilationUnit, gate: str, made_by: str) -> int:
    """Append one kind of gate to every inbound chain that lacks it; return the count."""
    return sum(_insert_rx(main, gate, made_by) for main in unit.partitions.values())


def chain_head(recv: OpNode) -> str:
    """Return the value that readers of a receiver's payload read."""
    return recv.metadata.get(keys.RX_CHAIN_HEAD_KEY) or recv.outputs[0]


def _insert_rx(main: Function, gate: str, made_by: str) -> int:
    gates: dict[str, OpNode] = {}  # previous end of a chain -> the gate after it
    for node in main.nodes:
        if node.domain == keys.WIRE_DOMAIN and _lacks(node, gate):
            head = chain_head(node)
            end = f"{node.name}#{gate_tag(gate)}_out"
            gates[head] = make_gate(gate, node, head, end, made_by)
            node.metadata[keys.GATE_STAMPS[gate]] = "true"
            node.metadata[keys.RX_CHAIN_HEAD_KEY] = end
    if not gates:
        return 0
    ends = {head: added.outputs[0] for head, added in gates.items()}
    nodes: list[OpNode] = []
    heads = frozenset(ends)
    for node in main.nodes:
        if not heads.isdisjoint(node.reads):
            if node.inputs and node.inputs[0] in ends:
                rewire_input(node, 0, ends[node.inputs[0]])
            rename_node(node, ends)
        nodes.append(node)
        if not heads.isdisjoint(node.outputs):
            nodes.extend(gates[name] for name in node.outputs if name in gates)
    main.nodes = nodes
    main.declare_as((end, head) for head, end in ends.items())
    return len(gates)


def _lacks(node: OpNode, gate: str) -> bool:
    return (
        node.op_type in keys.INBOUND_OPS
        and bool(node.outputs and node.outputs[0])
        and node.metadata.get(keys.GATE_STAMPS[gate]) is None
    )


def insert_tx_gate(unit: CompilationUnit, gate: str, made_by: str) -> int:
    """Put one kind of gate before every Send to a fixed peer that lacks it; return the count."""
    return sum(_insert_tx(main, gate, made_by) for main in unit.partitions.values())


def is_peer_routed(node: OpNode) -> bool:
    """Return True if a node is a Send to the peer in its `peer` attribute."""
    is_send = node.op_type == keys.OP_SEND and node.domain == keys.WIRE_DOMAIN
    return is_send and bool(node.inputs) and keys.ATTR_PEER in node.attributes


def _insert_tx(main: Function, gate: str, made_by: str) -> int:
    nodes: list[OpNode] = []
    renamed: list[tuple[str, str]] = []
    for node in main.nodes:
        if is_peer_routed(node) and node.metadata.get(keys.GATE_STAMPS[gate]) is None:
            read = node.inputs[0]
            end = f"{node.name}#{gate_tag(gate)}_gated"
            guard = make_gate(gate, node, read, end, made_by)
            # The bytes of the PeerId, as a string attribute, like that of the Send.
            guard.set_attr(keys.ATTR_PEER, node.attr(keys.ATTR_PEER))
            guard.after = node.after
            rewire_input(node, 0, end)
            node.metadata[keys.GATE_STAMPS[gate]] = "true"
            nodes.append(guard)
            renamed.append((end, read))
        nodes.append(node)
    if renamed:
        main.nodes = nodes
        main.declare_as(renamed)
    return len(renamed)


def stamp_destination(send: OpNode, value_name: str, site: int) -> None:
    """Stamp the destination of a Send's data input: the value and the site on the receiver."""
    data = send.inputs[0]
    send.metadata[keys.DEST_SITE_NAME_PREFIX + data] = value_name
    if destination_of(send) != address.site_suffix(site):  # set_attr would move it to the end
        send.set_attr(keys.DEST_SUFFIX_PREFIX + data, address.site_suffix(site))


def destination_of(send: OpNode) -> bytes | None:
    """Return the `/site/<id>` bytes of the destination of a Send's data input, or None."""
    suffix = send.attr(keys.DEST_SUFFIX_PREFIX + send.inputs[0]) if send.inputs else None
    return suffix if isinstance(suffix, bytes) else None


def rewire_input(node: OpNode, index: int, name: str) -> None:
    """Make a node read another value at one port, and rename a Send's destination stamps."""
    old = node.inputs[index]
    node.inputs = (*node.inputs[:index], name, *node.inputs[index + 1 :])
    if node.domain != keys.WIRE_DOMAIN or index != 0:
        return
    names = {
        keys.DEST_SITE_NAME_PREFIX + old: keys.DEST_SITE_NAME_PREFIX + name,
        keys.DEST_SUFFIX_PREFIX + old: keys.DEST_SUFFIX_PREFIX + name,
    }
    node.metadata = {names.get(key, key): text for key, text in node.metadata.items()}
    node.attributes = {names.get(key, key): value for key, value in node.attributes.items()}
