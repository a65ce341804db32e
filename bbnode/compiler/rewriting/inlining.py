"""Inlining: the body of a function in place of a call.

Rule: every value of the body is named `<call node>/<its name>`, so that two calls of one
function never collide; the call's own inputs and outputs keep the caller's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bbnode.compiler.analysis.order import rename_node
from bbnode.ir import keys, types
from bbnode.ir.graph import (
    Attribute,
    Function,
    OpNode,
    Opset,
    ValueType,
    inherit,
    is_onnx_op,
    is_wire,
)
from bbnode.ir.types import TypeNode


@dataclass(slots=True)
class Splice:
    """The nodes and types that replace a call; `shaped` holds types with shape or denotation."""

    nodes: list[OpNode] = field(default_factory=list)
    types: dict[str, TypeNode] = field(default_factory=dict)
    names: dict[str, str] = field(
        default_factory=dict
    )  # the body's value -> its name in the caller
    shaped: list[tuple[str, ValueType]] = field(default_factory=list)


def splice(call: OpNode, callee: Function, caller_home: str) -> Splice:
    """Return the nodes that replace `call`.

    Every op of the body that depends on no other op of it inherits the call's `after`. A wire op
    of the body gets this call into its `port_scope`. The nodes of a body whose Module declares a
    home keep it in their metadata `home`.
    """
    names = _value_names(call, callee)
    local = {name for node in callee.nodes for name in node.outputs if name}
    attributes = {**callee.defaults, **call.attributes}
    waits = call.after
    home = _own_home(callee, caller_home)
    out = Splice(names=names)
    for original in callee.nodes:
        node = original.copy()
        _resolve_references(node, attributes)
        is_first = not any(name in local for name in node.reads)
        rename_node(node, names)
        node.name = f"{call.name}/{original.name}"
        if waits and is_first:
            node.after = (*waits, *node.after)
        if home is not None and node.metadata.get(keys.HOME_KEY) is None:
            node.metadata[keys.HOME_KEY] = home
        if is_wire(node):
            node.metadata[keys.PORT_SCOPE_KEY] = _scope(call, node)
        _inherit_slot(node, call)
        out.nodes.append(node)
    out.nodes.extend(_aliases(call, callee, names))
    for value, kind in callee.kinds().items():
        renamed = names.get(value, "")
        if renamed:
            out.types[renamed] = types.meet(kind, out.types.get(renamed, types.ANY)) or kind
    for value, declared in callee.types.items():
        if names.get(value) and (declared.shape is not None or declared.denotation):
            out.shaped.append((names[value], declared))
    return out


def _value_names(call: OpNode, callee: Function) -> dict[str, str]:
    names = {
        formal: call.inputs[index] if index < len(call.inputs) else ""
        for index, formal in enumerate(callee.inputs)
    }
    values = [name for node in callee.nodes for name in node.outputs if name]
    local = set(values)
    for formal, actual in zip(callee.outputs, call.outputs, strict=False):
        if actual and formal in local and formal not in names:
            names[formal] = actual
    for name in values:
        names.setdefault(name, f"{call.name}/{name}")
    return names


def _aliases(call: OpNode, callee: Function, names: dict[str, str]) -> list[OpNode]:
    """Return PassThroughs for outputs that are a formal input or a duplicate of another output."""
    nodes = []
    for index, (formal, actual) in enumerate(zip(callee.outputs, call.outputs, strict=False)):
        source = names.get(formal, formal)
        if actual and source != actual:
            node = OpNode(
                domain=keys.SYSCALL_DOMAIN,
                op_type="PassThrough",
                name=f"{call.name}/PassThrough_out_{index}",
                inputs=[source],
                outputs=[actual],
                source_line=call.source_line,
                made_by="inline_for_partition",
            )
            inherit(node, call, (keys.MODULE_INSTANCE_KEY,))
            nodes.append(node)
    return nodes


def references(node: OpNode) -> set[str]:
    """Return the parameters that the attributes of an op, and of ops in its graphs, refer to."""
    parameters = {a.reference for a in node.attributes.values()}
    for graph in node.graphs:
        parameters.update(
            a.reference for each in graph.all_nodes() for a in each.attributes.values()
        )
    return parameters - {""}


def _resolve_references(node: OpNode, values: Mapping[str, Attribute]) -> int:
    """Replace references to parameters by their values; return the count."""
    wanted = references(node) & values.keys() if node.attributes else None
    if not wanted:
        return 0

    def refers(node: OpNode) -> bool:
        return any(a.reference in values for a in node.attributes.values() if a.reference)

    def resolve(node: OpNode) -> None:
        node.attributes = {
            name: values.get(a.reference, a) if a.reference else a
            for name, a in node.attributes.items()
        }

    resolve(node)
    node.change_graphs(refers, resolve)
    return len(wanted)


def resolve_defaults(function: Function) -> int:
    """Replace references to the function's own defaulted attributes; return the count."""
    if not function.defaults:
        return 0
    return sum(_resolve_references(node, function.defaults) for node in function.nodes)


def home_of(function: Function) -> str | None:
    """Return the home that a Module declares; None if it lives wherever it is called."""
    home = function.metadata.get(keys.HOME_KEY)
    return None if home == keys.SELF_CLASS else home


def _own_home(callee: Function, caller_home: str) -> str | None:
    home = home_of(callee)
    return None if home == caller_home else home


def _scope(call: OpNode, node: OpNode) -> str:
    """Return the call path to a wire op's port: this call before those in the body."""
    name = call.metadata.get(keys.CALL_KEY) or call.name
    inner = node.metadata.get(keys.PORT_SCOPE_KEY)
    return f"{name}/{inner}" if inner else name


def _inherit_slot(node: OpNode, call: OpNode) -> None:
    """Set the call's slot on a node: a plain ONNX body runs on the backend slot of its call."""
    if not is_onnx_op(node) or node.metadata.get(keys.SLOT_KEY) is not None:
        return
    inherit(node, call, _SLOT_KEYS)


_SLOT_KEYS = (
    keys.SLOT_KEY,
    keys.SLOT_ID_KEY,
    keys.REQUIRED_TRAIT_KEY,
    keys.CONCRETE_TYPE_KEY,
    keys.INSTANCE_KEY,
)


def merge_opsets(into: Function, callee: Function, spliced: Splice) -> None:
    """Import the opsets of the spliced body; the caller has checked that versions agree."""
    wanted = {entry.domain: entry.version for entry in callee.opset_imports}
    if any(node.domain == keys.SYSCALL_DOMAIN for node in spliced.nodes):
        wanted.setdefault(keys.SYSCALL_DOMAIN, keys.BB_OPSET_VERSION)
    known = {entry.domain for entry in into.opset_imports}
    for domain, version in wanted.items():
        if domain not in known:
            into.opset_imports.append(Opset(domain, version))
