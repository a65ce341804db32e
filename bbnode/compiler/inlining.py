"""Splicing one function's body into the place of a call.

Rule: everything the body makes is named `<call node>/<its name>`, so that two calls of one
function never meet; the call's own inputs and outputs keep the caller's names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.ir import keys, protos, types
from bbnode.ir.types import TypeNode


@dataclass(slots=True)
class Splice:
    """What one call becomes."""

    nodes: list[NodeProto] = field(default_factory=list)
    types: dict[str, TypeNode] = field(default_factory=dict)


def splice(call: NodeProto, callee: FunctionProto, caller_home: str) -> Splice:
    """The nodes that take the place of `call`.

    The call's `after` holds back every op of the body that no other op of the body holds back.
    A body whose Module names a home of its own keeps it, in metadata `home` on its nodes.
    """
    names = _value_names(call, callee)
    made = {name for node in callee.node for name in node.output if name}
    attributes = _call_attributes(call, callee)
    waits = flow.after_of(call)
    home = _own_home(callee, caller_home)
    out = Splice()
    for original in callee.node:
        node = NodeProto()
        node.CopyFrom(original)
        _resolve_references(node, attributes)
        is_first = not any(name in made for name in flow.reads(node))
        flow.rename_node(node, names)
        node.name = f"{call.name}/{original.name}"
        if waits and is_first:
            flow.set_after(node, [*waits, *flow.after_of(node)])
        if home is not None and protos.get_meta(node, keys.HOME_KEY) is None:
            protos.set_meta(node, keys.HOME_KEY, home)
        _inherit_slot(node, call)
        out.nodes.append(node)
    out.nodes.extend(_aliases(call, callee, names))
    for value, kind in protos.value_types(callee).items():
        renamed = names.get(value, "")
        if renamed:
            out.types[renamed] = types.meet(kind, out.types.get(renamed, types.ANY)) or kind
    return out


def _value_names(call: NodeProto, callee: FunctionProto) -> dict[str, str]:
    names = {
        formal: call.input[index] if index < len(call.input) else ""
        for index, formal in enumerate(callee.input)
    }
    made = [name for node in callee.node for name in node.output if name]
    local = set(made)
    for formal, actual in zip(callee.output, call.output, strict=False):
        if actual and formal in local and formal not in names:
            names[formal] = actual
    for name in made:
        names.setdefault(name, f"{call.name}/{name}")
    return names


def _aliases(call: NodeProto, callee: FunctionProto, names: dict[str, str]) -> list[NodeProto]:
    """Outputs that are a formal input, or a value given out twice: passed through."""
    nodes = []
    for index, (formal, actual) in enumerate(zip(callee.output, call.output, strict=False)):
        source = names.get(formal, formal)
        if actual and source != actual:
            node = NodeProto(
                domain=keys.SYSCALL_DOMAIN,
                op_type="PassThrough",
                name=f"{call.name}/PassThrough_out_{index}",
                input=[source],
                output=[actual],
            )
            for key in (keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY):
                text = protos.get_meta(call, key)
                if text is not None:
                    protos.set_meta(node, key, text)
            nodes.append(node)
    return nodes


def _call_attributes(call: NodeProto, callee: FunctionProto) -> dict[str, AttributeProto]:
    """What `ref_attr_name` in the body stands for: the call's attributes, else the defaults."""
    found = {attribute.name: attribute for attribute in callee.attribute_proto}
    found.update((attribute.name, attribute) for attribute in call.attribute)
    return found


def references(node: NodeProto) -> list[AttributeProto]:
    """Attributes, of the op and of those in its graphs, that stand for one of the function's."""
    found: list[AttributeProto] = []
    todo = [node]
    while todo:
        one = todo.pop()
        found.extend(attribute for attribute in one.attribute if attribute.ref_attr_name)
        if one.attribute and flow.is_graph_op(one):
            todo.extend(inner for graph in flow.nested_graphs(one) for inner in graph.node)
    return found


def _resolve_references(node: NodeProto, attributes: dict[str, AttributeProto]) -> int:
    resolved = 0
    for attribute in references(node) if node.attribute else ():
        given = attributes.get(attribute.ref_attr_name)
        if given is not None:
            name = attribute.name
            attribute.CopyFrom(given)
            attribute.name = name
            resolved += 1
    return resolved


def resolve_defaults(function: FunctionProto) -> int:
    """Replace references to the function's own defaulted attributes; gives how many."""
    defaults = {attribute.name: attribute for attribute in function.attribute_proto}
    if not defaults:
        return 0
    return sum(_resolve_references(node, defaults) for node in function.node)


def _own_home(callee: FunctionProto, caller_home: str) -> str | None:
    home = protos.get_meta(callee, keys.HOME_KEY)
    return None if home in (None, keys.SELF_CLASS, caller_home) else home


def _inherit_slot(node: NodeProto, call: NodeProto) -> None:
    """A plain ONNX body that is called through a backend slot runs on that slot."""
    if not flow.is_graph_op(node) or protos.get_meta(node, keys.SLOT_KEY) is not None:
        return
    for key in _SLOT_KEYS:
        text = protos.get_meta(call, key)
        if text is not None:
            protos.set_meta(node, key, text)


_SLOT_KEYS = (
    keys.SLOT_KEY,
    keys.SLOT_ID_KEY,
    keys.REQUIRED_TRAIT_KEY,
    keys.CONCRETE_TYPE_KEY,
    keys.INSTANCE_KEY,
)


def merge_opsets(into: FunctionProto, callee: FunctionProto, spliced: Splice) -> None:
    """Import what the spliced body needs; the caller checked that versions agree."""
    wanted = {entry.domain: entry.version for entry in callee.opset_import}
    if any(node.domain == keys.SYSCALL_DOMAIN for node in spliced.nodes):
        wanted.setdefault(keys.SYSCALL_DOMAIN, keys.BB_OPSET_VERSION)
    known = {entry.domain for entry in into.opset_import}
    for domain, version in wanted.items():
        if domain not in known:
            into.opset_import.append(onnx.helper.make_opsetid(domain, version))
