"""`expand_ops`: what the author left to defaults, written down.

Rule: a table of expanders by op; each reads a node and completes it in place, and running
it again changes nothing. Every op of our op table gets its attribute defaults; `ai.onnx` ops
keep theirs, since ONNX's own schemas define them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from onnx import AttributeProto, FunctionProto, NodeProto

from bbnode.compiler import flow
from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.compiler.function_table import is_bootstrap
from bbnode.compiler.inlining import resolve_defaults
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, opset, protos, types
from bbnode.ir.opset import REQUIRED, OpSpec

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

Made = Mapping[str, int]
Expander = Callable[[NodeProto], int]


class ExpandOps:
    """Completes the attributes of every op of our op table.

    1. A reference to a defaulted attribute of the function becomes that default (`Constant` of
       a sub-Module); in functions that are still called it stays, for the call to give.
    2. A missing attribute takes its default; a missing required one, one of the wrong kind, one
       without its value, and one that the op does not have are ExpansionFailed.
    3. `Bundle` counts its parts, `Unbundle` its outputs; `Tee` and `Threshold` have to fit
       their outputs and inputs.
    4. A request's quorum is not larger than the cohort, where its size is known.
    """

    name: ClassVar[str] = "expand_ops"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        expanded = 0
        for index, function in enumerate(unit.bodies()):
            if index == 0 or is_bootstrap(function):
                expanded += resolve_defaults(function)
            made = flow.producers(function)
            for node in function.node:
                _check_fields(node)
                spec = opset.lookup_op(node.domain, node.op_type)
                if spec is None:
                    continue
                expanded += _fill_defaults(node, spec)
                expander = EXPANDERS.get((node.domain, node.op_type))
                if expander is not None:
                    expanded += expander(node)
                if protos.is_wire(node, keys.OP_SEND_REQ_BATCHED):
                    _check_quorum(function, node, made)
        return {"expansion_count": expanded}


def _check_fields(node: NodeProto) -> None:
    for attribute in node.attribute:
        kind = attribute.type
        field = _FIELD_OF.get(kind, "")
        held = {found.name for found, _ in attribute.ListFields()} - _NO_VALUE_FIELDS
        # An empty list is a value and leaves no field; so does a reference.
        may_be_empty = field.endswith("s") and field != "s"
        fits = held == {field} or (not held and (may_be_empty or attribute.ref_attr_name))
        if not field or not fits:
            name = AttributeProto.AttributeType.Name(kind)
            raise _failed(node, f"attribute {attribute.name!r} is {name}, but holds no such value")


def _fill_defaults(node: NodeProto, spec: OpSpec) -> int:
    given = {attribute.name: attribute for attribute in node.attribute}
    is_open = node.domain in (keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN)
    for name in given:
        known = name in spec.attributes or name in _COMMON_ATTRIBUTES
        if not known and not name.startswith(keys.PREFIX) and not is_open:
            raise _failed(node, f"it has no attribute {name!r}")
    filled = 0
    for name, default in spec.attributes.items():
        attribute = given.get(name)
        if attribute is None:
            if default is REQUIRED:
                raise _failed(node, f"it needs the attribute {name!r}")
            protos.set_attr(node, name, default)
            filled += 1
        elif default is not REQUIRED and not attribute.ref_attr_name:
            _check_kind(node, attribute, default)
    return filled


def _check_kind(node: NodeProto, attribute: AttributeProto, default: Any) -> None:
    wanted = _KIND_OF.get(type(default))
    if wanted is not None and attribute.type not in wanted:
        got = AttributeProto.AttributeType.Name(attribute.type)
        raise _failed(
            node, f"attribute {attribute.name!r} is {got}, it has to be {type(default).__name__}"
        )


def _expand_bundle(node: NodeProto) -> int:
    return _count_parts(node, len(node.input))


def _expand_unbundle(node: NodeProto) -> int:
    return _count_parts(node, len(node.output))


def _count_parts(node: NodeProto, count: int) -> int:
    given = protos.get_attr(node, "child_count", 0)
    if given not in (0, count):
        raise _failed(node, f"child_count is {given}, but it has {count} parts")
    listed = flow.split_names(_text(protos.get_attr(node, "child_types", "")))
    if listed and len(listed) != count:
        raise _failed(node, f"child_types lists {len(listed)} types for {count} parts")
    for type_id in listed:
        if types.type_by_id(type_id) is None:
            raise _failed(node, f"child_types names the unknown type {type_id!r}")
    if given == count:
        return 0
    protos.set_attr(node, "child_count", count)
    return 1


def _expand_tee(node: NodeProto) -> int:
    fanout = protos.get_attr(node, "fanout")
    if fanout != len(node.output):
        raise _failed(node, f"fanout is {fanout}, but it has {len(node.output)} outputs")
    return 0


def _expand_threshold(node: NodeProto) -> int:
    wanted = protos.get_attr(node, "n")
    if not isinstance(wanted, int) or not 0 < wanted <= len(node.input):
        raise _failed(node, f"n is {wanted}, it has to be 1 to {len(node.input)}, its inputs")
    return 0


def _check_quorum(function: FunctionProto, node: NodeProto, made: Made) -> None:
    quorum = protos.get_attr(node, keys.ATTR_QUORUM, 0)
    if quorum < 0:
        raise _failed(node, f"quorum is {quorum}, it has to be 0 (all) or more")
    size = cohort_size(function, node.input[1], made)
    if size is not None and quorum > size:
        raise _failed(node, f"quorum is {quorum}, but only {size} peers are asked")


def cohort_size(function: FunctionProto, peers: str, made: Made) -> int | None:
    """How many peers a value names, where the program says so: `Sample` n, or one sender."""
    index = made.get(peers)
    if index is None:
        return None
    node = function.node[index]
    if node.op_type == "Sample" and protos.is_role(node):
        count = protos.get_attr(node, "n")
        return count if isinstance(count, int) else None
    is_sender = protos.is_wire(node) and peers in node.output
    return 1 if is_sender else None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _failed(node: NodeProto, reason: str) -> ExpansionFailed:
    return ExpansionFailed(
        op_type=node.op_type,
        domain=node.domain,
        reason=reason,
        node_name=node.name,
        where=Where.of(node),
    )


EXPANDERS: dict[tuple[str, str], Expander] = {
    (keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE): _expand_bundle,
    (keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE): _expand_unbundle,
    (keys.SYSCALL_DOMAIN, "Tee"): _expand_tee,
    (keys.SYSCALL_DOMAIN, "Threshold"): _expand_threshold,
}
