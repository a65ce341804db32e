"""Splicing one function's body into the place of a call.

Rule: everything the body makes is named `<call node>/<its name>`, so that two calls of one
function never meet; the call's own inputs and outputs keep the caller's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import AttributeProto, GraphProto

from bbnode.compiler.analysis import order
from bbnode.ir import keys, plain, types
from bbnode.ir.plain import Function, Node, Opset
from bbnode.ir.types import TypeNode


@dataclass(slots=True)
class Splice:
    """What one call becomes."""

    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TypeNode] = field(default_factory=dict)


def splice(call: Node, callee: Function, caller_home: str) -> Splice:
    """The nodes that take the place of `call`.

    The call's `after` holds back every op of the body that no other op of the body holds back.
    A body whose Module names a home of its own keeps it, in metadata `home` on its nodes.
    """
    names = _value_names(call, callee)
    made = {name for node in callee.node for name in node.output if name}
    attributes = _call_attributes(call, callee)
    waits = order.after_of(call)
    home = _own_home(callee, caller_home)
    out = Splice()
    for original in callee.node:
        node = original.copy()
        _resolve_references(node, attributes)
        is_first = not any(name in made for name in order.reads(node))
        order.rename_node(node, names)
        node.name = f"{call.name}/{original.name}"
        if waits and is_first:
            order.set_after(node, [*waits, *order.after_of(node)])
        if home is not None and node.metadata.get(keys.HOME_KEY) is None:
            node.metadata[keys.HOME_KEY] = home
        _inherit_slot(node, call)
        out.nodes.append(node)
    out.nodes.extend(_aliases(call, callee, names))
    for value, kind in callee.kinds().items():
        renamed = names.get(value, "")
        if renamed:
            out.types[renamed] = types.meet(kind, out.types.get(renamed, types.ANY)) or kind
    return out


def _value_names(call: Node, callee: Function) -> dict[str, str]:
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


def _aliases(call: Node, callee: Function, names: dict[str, str]) -> list[Node]:
    """Outputs that are a formal input, or a value given out twice: passed through."""
    nodes = []
    for index, (formal, actual) in enumerate(zip(callee.output, call.output, strict=False)):
        source = names.get(formal, formal)
        if actual and source != actual:
            node = Node(
                domain=keys.SYSCALL_DOMAIN,
                op_type="PassThrough",
                name=f"{call.name}/PassThrough_out_{index}",
                input=[source],
                output=[actual],
            )
            plain.inherit(node, call, (keys.MODULE_INSTANCE_KEY, keys.SOURCE_LINE_KEY))
            nodes.append(node)
    return nodes


def _call_attributes(call: Node, callee: Function) -> dict[str, AttributeProto]:
    """What `ref_attr_name` in the body stands for: the call's attributes, else the defaults."""
    found = {attribute.name: attribute for attribute in callee.attribute_proto}
    found.update((attribute.name, attribute) for attribute in call.attribute)
    return found


def references(node: Node) -> list[AttributeProto]:
    """Attributes, of the op and of those in its graphs, that stand for one of the function's."""
    if not node.attribute:
        return []
    found = [attribute for attribute in node.attribute if attribute.ref_attr_name]
    if order.is_graph_op(node):
        for graph in order.nested_graphs(node):
            found += _references_in(graph)
    return found


def _references_in(graph: GraphProto) -> list[AttributeProto]:
    return [a for inner in order.all_nodes(graph) for a in inner.attribute if a.ref_attr_name]


def _resolve_references(node: Node, values: Mapping[str, AttributeProto]) -> int:
    """Put values in the place of references to them; gives how many."""
    wanted = [a for a in references(node) if a.ref_attr_name in values]
    if not wanted:
        return 0
    for index, attribute in enumerate(node.attribute):
        given = values.get(attribute.ref_attr_name) if attribute.ref_attr_name else None
        if given is not None:
            node.attribute[index] = plain.renamed_attribute(given, attribute.name)

    def refers(graph: GraphProto) -> bool:
        return any(a.ref_attr_name in values for a in _references_in(graph))

    def resolve(graph: GraphProto) -> None:
        for attribute in _references_in(graph):
            given = values.get(attribute.ref_attr_name)
            if given is not None:
                name = attribute.name
                attribute.CopyFrom(given)
                attribute.name = name

    if order.is_graph_op(node):
        order.rewrite_graphs(node, refers, resolve)
    return len(wanted)


def resolve_defaults(function: Function) -> int:
    """Replace references to the function's own defaulted attributes; gives how many."""
    defaults = {attribute.name: attribute for attribute in function.attribute_proto}
    if not defaults:
        return 0
    return sum(_resolve_references(node, defaults) for node in function.node)


def _own_home(callee: Function, caller_home: str) -> str | None:
    home = callee.metadata.get(keys.HOME_KEY)
    return None if home in (None, keys.SELF_CLASS, caller_home) else home


def _inherit_slot(node: Node, call: Node) -> None:
    """A plain ONNX body that is called through a backend slot runs on that slot."""
    if not order.is_graph_op(node) or node.metadata.get(keys.SLOT_KEY) is not None:
        return
    plain.inherit(node, call, _SLOT_KEYS)


_SLOT_KEYS = (
    keys.SLOT_KEY,
    keys.SLOT_ID_KEY,
    keys.REQUIRED_TRAIT_KEY,
    keys.CONCRETE_TYPE_KEY,
    keys.INSTANCE_KEY,
)


def merge_opsets(into: Function, callee: Function, spliced: Splice) -> None:
    """Import what the spliced body needs; the caller checked that versions agree."""
    wanted = {entry.domain: entry.version for entry in callee.opset_import}
    if any(node.domain == keys.SYSCALL_DOMAIN for node in spliced.nodes):
        wanted.setdefault(keys.SYSCALL_DOMAIN, keys.BB_OPSET_VERSION)
    known = {entry.domain for entry in into.opset_import}
    for domain, version in wanted.items():
        if domain not in known:
            into.opset_import.append(Opset(domain, version))
