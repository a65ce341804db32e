"""Sends that arrive as one: of one port, to one class.

Rule: a port is where values arrive. Whatever several ops send to one port of one class is one
value there, made by one Recv, and what reads it fires for each delivery. The recorded program
says it in `fan_in` of the later sends: what the port's first send delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bbnode.compiler.analysis import order
from bbnode.ir import keys, plain
from bbnode.ir.plain import Function, Node


def fan_in_groups(nodes: Sequence[Node], destinations: Mapping[int, str]) -> list[list[int]]:
    """Indices of the sends that share a Recv, first one first; a send of its own is no group.

    Args:
        nodes: a function's nodes, in recorded order.
        destinations: class that each Send-flavoured op sends to, by node index.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, node in enumerate(nodes):
        if plain.is_wire(node, keys.OP_SEND) and node.output and index in destinations:
            port = node.metadata.get(keys.FAN_IN_KEY) or node.output[0]
            groups.setdefault((port, destinations[index]), []).append(index)
    return [members for members in groups.values() if len(members) > 1]


def groups_of_sends(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """By the name of each send that shares its Recv: all that do, first one first.

    The sends are still as recorded, and say their `peer_class`.
    """
    destinations = {}
    for index, node in enumerate(nodes):
        home = node.metadata.get(keys.PEER_CLASS_KEY)
        if home is not None and not _has_sentinel(node):
            destinations[index] = home
    found: dict[str, list[Node]] = {}
    for group in fan_in_groups(nodes, destinations):
        members = [nodes[index] for index in group]
        found.update((member.name, members) for member in members)
    return found


def join_values(function: Function, names: Mapping[str, str]) -> None:
    """Let what reads the values of later sends read those of the first one.

    Args:
        function: the body, in which no op makes the later sends' values any more.
        names: by value of a later send, the value of the first one.
    """
    if not names:
        return
    for node in function.node:
        order.rename_node(node, names)
    handed_out = [name for name in function.output if name in names]
    made = {value: node for node in function.node for value in node.output}
    function.node += [_pass_through(made[names[name]], names[name], name) for name in handed_out]
    gone = names.keys() - set(handed_out)
    for name in gone:
        function.types.pop(name, None)


def _has_sentinel(node: Node) -> bool:
    return any(name.startswith(keys.SEND_SENTINEL_PREFIX) for name in node.output)


def _pass_through(maker: Node, source: str, name: str) -> Node:
    node = Node(
        domain=keys.SYSCALL_DOMAIN,
        op_type="PassThrough",
        name=f"{name}/PassThrough_joined",
        input=[source],
        output=[name],
    )
    plain.inherit(
        node, maker, (keys.HOME_CLASS_KEY, keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY)
    )
    return node
