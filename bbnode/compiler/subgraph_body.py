"""A group of backend ops as a function of its own, and the call that takes its place.

Rule: the function is a pure ONNX graph in canonical form (names by position, no metadata of
ours, upstream domain ""), named by its content, so that equal graphs are one function
wherever they stand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bbnode.compiler.analysis import order
from bbnode.compiler.analysis.content_hash import HEX_DIGITS, AttributePrints, function_digest
from bbnode.compiler.opsets import import_used, write_canonical_domains
from bbnode.compiler.ordering import add_control
from bbnode.ir import keys
from bbnode.ir.plain import Function, Node, ValueType

NAME_PREFIX = "subgraph_"
# What the call says of the ops in it: their slot, and where they come from.
CALL_KEYS = frozenset(
    {
        keys.SLOT_KEY,
        keys.SLOT_ID_KEY,
        keys.REQUIRED_TRAIT_KEY,
        keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY,
        keys.HOME_CLASS_KEY,
        keys.MODULE_INSTANCE_KEY,
        keys.SOURCE_LINE_KEY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapsed:
    """One group, collapsed."""

    function: Function
    call: Node


def collapse(
    nodes: Sequence[Node],
    exposed: Collection[str],
    types: Mapping[str, ValueType],
    versions: Mapping[str, int],
    prints: AttributePrints,
) -> Collapsed:
    """Make one function of `nodes` (in topological order) and the call of it.

    Args:
        nodes: the group, with the constants that are copied into it first.
        exposed: values that are read outside of the group.
        types: declared types of values, as far as known.
        versions: opset versions by domain.
        prints: what is known of attributes.
    """
    made = {name: None for node in nodes for name in node.output if name}
    read = dict.fromkeys(name for node in nodes for name in order.data_reads(node))
    inputs = [name for name in read if name not in made]
    outputs = [name for name in made if name in exposed]
    if not outputs:  # nobody reads it; a graph has at least one output all the same
        outputs = list(made)[-1:]
    names = _canonical_names(inputs, outputs, made)
    function = Function(domain=keys.BACKEND_SUBGRAPH_DOMAIN)
    function.input = [names[name] for name in inputs]
    function.output = [names[name] for name in outputs]
    for index, original in enumerate(nodes):
        # Not copied whole: what waits and where it comes from stays with the call.
        node = original.copy()
        node.name = f"{original.op_type}_{index}"
        node.metadata = {}
        order.rename_node(node, names)
        function.node.append(node)
    write_canonical_domains(function.node)
    import_used(function, versions)
    for name, new in names.items():
        if name in types:
            function.types[new] = types[name]
    function.name = NAME_PREFIX + function_digest(function, prints).hex()[:HEX_DIGITS]
    return Collapsed(function=function, call=_call(function, nodes, inputs, outputs, made))


def _canonical_names(
    inputs: Sequence[str], outputs: Sequence[str], made: Collection[str]
) -> dict[str, str]:
    # Nested graphs may have any names of their own; exporters do not write these.
    names = {name: f"bb_in_{index}" for index, name in enumerate(inputs)}
    names.update((name, f"bb_out_{index}") for index, name in enumerate(outputs))
    for index, name in enumerate(made):
        names.setdefault(name, f"bb_v_{index}")
    return names


def _call(
    function: Function,
    nodes: Sequence[Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    made: Collection[str],
) -> Node:
    last = nodes[-1]  # never a copied constant: those come first
    call = Node(
        domain=function.domain,
        op_type=function.name,
        name=f"{last.name}#subgraph",
        input=list(inputs),
        output=list(outputs),
        metadata={key: text for key, text in last.metadata.items() if key in CALL_KEYS},
    )
    _inherit_waits(call, nodes, made)
    return call


def _inherit_waits(call: Node, nodes: Sequence[Node], made: Collection[str]) -> None:
    """The call waits for whatever its ops waited for outside of the group."""
    values: dict[str, None] = {}
    ops: dict[str, None] = {}
    for node in nodes:
        values.update(dict.fromkeys(order.after_of(node)))
        control = node.metadata.get(keys.CONTROL_AFTER_KEY)
        ops.update(dict.fromkeys(order.split_names(control)))
    if values:
        order.set_after(call, [name for name in values if name not in made])
    if ops:
        inside = {node.name for node in nodes}
        add_control(call, [name for name in ops if name not in inside])
