"""`expand_ops`: what the author left to defaults, written down.

Rule: a table of expanders by op; each reads a node and completes it in place, and running
it again changes nothing. Every op of our op table gets its attribute defaults; `ai.onnx` ops
keep theirs, since ONNX's own schemas define them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from onnx import AttributeProto

from bbnode.compiler.analysis import order
from bbnode.compiler.rewriting.inlining import references, resolve_defaults
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.compiler.wire_variants import expand_wire, expansion_failed
from bbnode.ir import keys, opset, plain, types
from bbnode.ir.opset import REQUIRED, OpSpec
from bbnode.ir.plain import Function, Node

# Attributes that an op may carry beside those of its row.
_COMMON_ATTRIBUTES = frozenset({keys.ATTR_PEER, keys.ATTR_DEADLINE_NS, keys.ATTR_PAYLOAD_TYPE})

_KIND_OF: dict[type, frozenset[int]] = {
    int: frozenset({AttributeProto.INT}),
    str: frozenset({AttributeProto.STRING}),
    float: frozenset({AttributeProto.FLOAT, AttributeProto.INT}),
}

# The field that holds the value of each kind of attribute.
_FIELD_OF = {
    AttributeProto.INT: "i",
    AttributeProto.INTS: "ints",
    AttributeProto.FLOAT: "f",
    AttributeProto.FLOATS: "floats",
    AttributeProto.STRING: "s",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSOR: "t",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPH: "g",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.TYPE_PROTOS: "type_protos",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
}
_NO_VALUE_FIELDS = frozenset({"name", "type", "doc_string", "ref_attr_name"})

Expander = Callable[[Node], int]


class ExpandOps:
    """Completes the attributes of every op of our op table.

    1. A reference to a defaulted attribute of the function becomes that default (`Constant` of
       a sub-Module). Calls that give another value were inlined; one that is left without a
       value is ExpansionFailed.
    2. A missing attribute takes its default; a missing required one, one of the wrong kind, one
       without its value, and one that the op does not have are ExpansionFailed.
    3. `Bundle` counts its parts, `Unbundle` its outputs; `Tee` and `Threshold` have to fit
       their outputs and inputs.
    4. A request says how many peers it asks at most, as far as the program says it
       (`cohort_size`, 0 where nothing does), and its `variant`: `one_shot` for a single peer,
       else `cohort`. Its quorum is not larger than that.
    5. A Send to one constant peer carries that `peer`: it is peer-routed, and gets TX gates.
    """

    name: ClassVar[str] = "expand_ops"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        expanded = 0
        for function in unit.bodies():
            expanded += resolve_defaults(function)
            made = order.producers(function)
            for node in function.node:
                _check_fields(node)
                _check_references(function, node)
                spec = opset.lookup_op(node.domain, node.op_type)
                if spec is None:
                    continue
                expanded += _fill_defaults(node, spec)
                expander = EXPANDERS.get((node.domain, node.op_type))
                if expander is not None:
                    expanded += expander(node)
                if plain.is_wire(node):
                    expanded += expand_wire(function, node, made)
        return {"expansion_count": expanded}


def _check_fields(node: Node) -> None:
    for attribute in node.attribute:
        kind = attribute.type
        field = _FIELD_OF.get(kind, "")
        held = {found.name for found, _ in attribute.ListFields()} - _NO_VALUE_FIELDS
        # An empty list is a value and leaves no field; so does a reference.
        may_be_empty = field.endswith("s") and field != "s"
        fits = held == {field} or (not held and (may_be_empty or attribute.ref_attr_name))
        if not field or not fits:
            name = AttributeProto.AttributeType.Name(kind)
            raise expansion_failed(
                node, f"attribute {attribute.name!r} is {name}, but holds no such value"
            )


def _check_references(function: Function, node: Node) -> None:
    for attribute in references(node) if node.attribute else ():
        raise expansion_failed(
            node,
            f"attribute {attribute.name!r} stands for {attribute.ref_attr_name!r} of "
            f"{function.name!r}, which has no value: no call gives one, and there is no default",
        )


def _fill_defaults(node: Node, spec: OpSpec) -> int:
    given = {attribute.name: attribute for attribute in node.attribute}
    is_open = node.domain in (keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN)
    for name in given:
        known = name in spec.attributes or name in _COMMON_ATTRIBUTES
        if not known and not name.startswith(keys.PREFIX) and not is_open:
            raise expansion_failed(node, f"it has no attribute {name!r}")
    filled = 0
    for name, default in spec.attributes.items():
        attribute = given.get(name)
        if attribute is None:
            if default is REQUIRED:
                raise expansion_failed(node, f"it needs the attribute {name!r}")
            node.set_attr(name, default)
            filled += 1
        elif default is not REQUIRED and not attribute.ref_attr_name:
            _check_kind(node, attribute, default)
    return filled


def _check_kind(node: Node, attribute: AttributeProto, default: Any) -> None:
    wanted = _KIND_OF.get(type(default))
    if wanted is not None and attribute.type not in wanted:
        got = AttributeProto.AttributeType.Name(attribute.type)
        raise expansion_failed(
            node, f"attribute {attribute.name!r} is {got}, it has to be {type(default).__name__}"
        )


def _expand_bundle(node: Node) -> int:
    return _count_parts(node, len(node.input))


def _expand_unbundle(node: Node) -> int:
    return _count_parts(node, len(node.output))


def _count_parts(node: Node, count: int) -> int:
    given = node.get_attr("child_count", 0)
    if given not in (0, count):
        raise expansion_failed(node, f"child_count is {given}, but it has {count} parts")
    listed = order.split_names(_text(node.get_attr("child_types", "")))
    if listed and len(listed) != count:
        raise expansion_failed(node, f"child_types lists {len(listed)} types for {count} parts")
    for type_id in listed:
        if types.type_by_id(type_id) is None:
            raise expansion_failed(node, f"child_types names the unknown type {type_id!r}")
    if given == count:
        return 0
    node.set_attr("child_count", count)
    return 1


def _expand_tee(node: Node) -> int:
    fanout = node.get_attr("fanout")
    if fanout != len(node.output):
        raise expansion_failed(node, f"fanout is {fanout}, but it has {len(node.output)} outputs")
    return 0


def _expand_threshold(node: Node) -> int:
    wanted = node.get_attr("n")
    if not isinstance(wanted, int) or not 0 < wanted <= len(node.input):
        raise expansion_failed(
            node, f"n is {wanted}, it has to be 1 to {len(node.input)}, its inputs"
        )
    return 0


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


EXPANDERS: dict[tuple[str, str], Expander] = {
    (keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE): _expand_bundle,
    (keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE): _expand_unbundle,
    (keys.SYSCALL_DOMAIN, "Tee"): _expand_tee,
    (keys.SYSCALL_DOMAIN, "Threshold"): _expand_threshold,
}
