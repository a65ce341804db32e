"""Sends that arrive as one: of one port, to one class.

Rule: a port is where values arrive. Whatever several ops send to one port of one class is one
value there, made by one Recv, and what reads it fires for each delivery. The recorded program
says it in `fan_in` of the later sends: what the port's first send delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.ir import keys, protos


def fan_in_groups(nodes: Sequence[NodeProto], destinations: Mapping[int, str]) -> list[list[int]]:
    """Indices of the sends that share a Recv, first one first; a send of its own is no group.

    Args:
        nodes: a function's nodes, in recorded order.
        destinations: class that each Send-flavoured op sends to, by node index.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, node in enumerate(nodes):
        if protos.is_wire(node, keys.OP_SEND) and node.output and index in destinations:
            port = protos.get_meta(node, keys.FAN_IN_KEY) or node.output[0]
            groups.setdefault((port, destinations[index]), []).append(index)
    return [members for members in groups.values() if len(members) > 1]


def groups_of_sends(nodes: Sequence[NodeProto]) -> dict[str, list[NodeProto]]:
    """By the name of each send that shares its Recv: all that do, first one first.

    The sends are still as recorded, and say their `peer_class`.
    """
    destinations = {}
    for index, node in enumerate(nodes):
        home = protos.get_meta(node, keys.PEER_CLASS_KEY)
        if home is not None and not _has_sentinel(node):
            destinations[index] = home
    found: dict[str, list[NodeProto]] = {}
    for group in fan_in_groups(nodes, destinations):
        members = [nodes[index] for index in group]
        found.update((member.name, members) for member in members)
    return found


def join_values(function: FunctionProto, names: Mapping[str, str]) -> None:
    """Let what reads the values of later sends read those of the first one.

    Args:
        function: the body, in which no op makes the later sends' values any more.
        names: by value of a later send, the value of the first one.
    """
    if not names:
        return
    nodes: list[NodeProto] = []
    for node in function.node:
        flow.rename_node(node, names)
        nodes.append(node)
    handed_out = [name for name in function.output if name in names]
    made = {value: node for node in nodes for value in node.output}
    nodes.extend(_pass_through(made[names[name]], names[name], name) for name in handed_out)
    flow.replace_nodes(function, nodes)
    gone = names.keys() - set(handed_out)
    kept = [info for info in function.value_info if info.name not in gone]
    fresh = FunctionProto(value_info=kept)
    del function.value_info[:]
    function.value_info.extend(fresh.value_info)


def _has_sentinel(node: NodeProto) -> bool:
    return any(name.startswith(keys.SEND_SENTINEL_PREFIX) for name in node.output)


def _pass_through(maker: NodeProto, source: str, name: str) -> NodeProto:
    node = NodeProto(
        domain=keys.SYSCALL_DOMAIN,
        op_type="PassThrough",
        name=f"{name}/PassThrough_joined",
        input=[source],
        output=[name],
    )
    for key in (keys.HOME_CLASS_KEY, keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY):
        text = protos.get_meta(maker, key)
        if text is not None:
            protos.set_meta(node, key, text)
    return node
