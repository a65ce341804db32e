"""`validate`: is the recorded program one at all?

Rule: looks, changes nothing. What it finds is the author's to mend, so it speaks of the ops
and values that the author wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from onnx import AttributeProto

from bbnode.compiler.analysis import order
from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.signatures import (
    Signature,
    imported_domain,
    opset_versions,
    signature_of,
)
from bbnode.compiler.analysis.wire import check_pairs
from bbnode.compiler.driver.seams import CALL_DOMAINS
from bbnode.compiler.errors import (
    DanglingCall,
    DanglingInput,
    DuplicateNodeName,
    DuplicateOutput,
    ExpansionFailed,
    MissingTypeInfo,
    OpsetNotImported,
    TypeConstraintFailed,
    UnknownOp,
    Where,
)
from bbnode.compiler.graph_checks import check_graphs
from bbnode.compiler.slot_checks import check_slot
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import plain
from bbnode.ir.plain import Function, FunctionKey, Node


class Validate:
    """Checks every function of the model.

    1. Each op is known (UnknownOp, DanglingCall), with as many inputs and outputs as it may
       have (TypeConstraintFailed), a required one not left out (DanglingInput), and no
       attribute given twice, or left out where ONNX asks for it (ExpansionFailed). Graphs inside
       of an op are what ONNX's own checker takes (UnknownOp, ExpansionFailed).
    2. Each value that is read or waited for is made by an op or is an input (DanglingInput).
    3. Each value is made once, and handed out once (DuplicateOutput), each op has a name of its own
       (DuplicateNodeName), and no name holds a comma (ExpansionFailed).
    4. Each request has its one response, each response its request, peers are peers, and no
       Recv is authored (UnpairedWireRequest, TypeConstraintFailed).
    5. Each function input declares a type (MissingTypeInfo).
    6. Slot metadata is well-formed (MalformedSlotMetadata).
    7. Ops do not wait for each other in a ring (CyclicGraph).
    8. The opset of each op is imported, and is the same op in the model's version of its domain
       (OpsetNotImported).
    """

    name: ClassVar[str] = "validate"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.bodies())
        nodes = 0
        imported = opset_versions(unit.program.opset_import)
        for function in unit.bodies():
            versions = opset_versions(function.opset_import, unit.program.opset_import)
            _check_inputs(function)
            _check_values(function)
            for node in function.node:
                _check_op(node, table, versions, imported)
                if order.is_graph_op(node) and order.nested_graphs(node):
                    check_graphs(node, versions, unit.program.ir_version)
                check_slot(node)
            order.topological(function)
            check_pairs(function)
            nodes += len(function.node)
        return {"nodes": nodes, "validation_errors": 0}


def _check_op(
    node: Node,
    table: Mapping[FunctionKey, Function],
    versions: Mapping[str, int],
    imported: Mapping[str, int],
) -> None:
    """`versions` are those of the node's function, `imported` those of the whole program."""
    signature = signature_of(node, table, versions)
    if signature is None:
        if node.domain in CALL_DOMAINS:
            raise DanglingCall(
                node_name=node.name, domain=node.domain, function=node.op_type, where=Where.of(node)
            )
        raise UnknownOp(
            node_name=node.name, op_type=node.op_type, domain=node.domain, where=Where.of(node)
        )
    if versions.get(imported_domain(node), 0) < signature.version:
        raise OpsetNotImported(
            domain=node.domain,
            version_used=signature.version,
            node_name=node.name,
            where=Where.of(node),
        )
    _check_versions(node, signature, versions, imported)
    for kind, count, most in (
        ("inputs", len(node.input), signature.max_inputs),
        ("outputs", len(node.output), signature.max_outputs),
    ):
        if count > most:
            detail = f"{node.op_type} has at most {most} {kind}, here are {count}"
            raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    if len(node.output) < signature.min_outputs:
        detail = f"{node.op_type} has at least {signature.min_outputs} outputs"
        raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    _check_attributes(node, signature)
    if plain.call_key(node) in table:
        return  # a call may leave inputs out: the body then sees an absent optional input
    if not node.input and not node.output:
        detail = f"{node.op_type} takes nothing and gives nothing; name an output of it"
        raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    for index, port in enumerate(signature.required_inputs):
        if index >= len(node.input) or not node.input[index]:
            raise DanglingInput(node_name=node.name, input_name=port, where=Where.of(node))


def _check_versions(
    node: Node, signature: Signature, versions: Mapping[str, int], imported: Mapping[str, int]
) -> None:
    """An op has to be the same in the model's version of its domain as in its function's."""
    domain = imported_domain(node)
    of_model = imported.get(domain)
    if of_model is None or of_model == versions.get(domain) or not order.is_graph_op(node):
        return
    other = signature_of(node, {}, imported)
    if other is None or other.version != signature.version:
        raise OpsetNotImported(
            domain=domain,
            version_used=versions[domain],
            version_imported=of_model,
            node_name=node.name,
            where=Where.of(node),
        )


def _check_separators(node: Node) -> None:
    """`after` and `control_after` list names with commas between them."""
    for name in (node.name, *node.output):
        if "," in name:
            raise ExpansionFailed(
                op_type=node.op_type,
                domain=node.domain,
                reason=f"the name {name!r} holds a comma, which separates names elsewhere",
                node_name=node.name,
                where=Where.of(node),
            )


def _check_attributes(node: Node, signature: Signature) -> None:
    names = [attribute.name for attribute in node.attribute]
    fault = ""
    if len(set(names)) < len(names):
        fault = f"the attribute {next(n for n in names if names.count(n) > 1)!r} is given twice"
    for name in signature.required_attributes:
        if name not in names:
            fault = f"the attribute {name!r} is missing"
    for attribute in node.attribute:
        is_tensor = attribute.type == AttributeProto.TENSOR and not attribute.ref_attr_name
        if is_tensor and not attribute.t.data_type:
            fault = f"the tensor of the attribute {attribute.name!r:.80} has no dtype"
    kinds = signature.attribute_kinds
    if kinds is not None:
        for attribute in node.attribute:
            if attribute.name not in kinds:
                known = ", ".join(sorted(kinds)) or "none"
                fault = f"it has no attribute {attribute.name!r:.80}; there is: {known}"
            elif attribute.type != kinds[attribute.name]:
                fault = (
                    f"the attribute {attribute.name!r} is of kind {attribute.type} "
                    f"and has to be of kind {kinds[attribute.name]} (AttributeProto.type)"
                )
    if fault:
        raise ExpansionFailed(
            op_type=node.op_type,
            domain=node.domain,
            reason=fault,
            node_name=node.name,
            where=Where.of(node),
        )


def _check_inputs(function: Function) -> None:
    for name in function.input:
        if name not in function.types:
            raise MissingTypeInfo(input_name=name, function=function.name)


def _check_values(function: Function) -> None:
    made: dict[str, str] = {}
    for name in function.input:
        if name in made:
            raise DuplicateOutput(value_name=name, node_a="function input", node_b="function input")
        made[name] = "function input"
    names: set[str] = set()
    for node in function.node:
        if not node.name or node.name in names:
            raise DuplicateNodeName(
                node_name=node.name, function=function.name, where=Where.of(node)
            )
        names.add(node.name)
        _check_separators(node)
        for value in node.output:
            if value in made:
                raise DuplicateOutput(
                    value_name=value, node_a=made[value], node_b=node.name, where=Where.of(node)
                )
            if value:
                made[value] = node.name
    for node in function.node:
        for value in order.reads(node):
            if value not in made:
                raise DanglingInput(node_name=node.name, input_name=value, where=Where.of(node))
    for value in function.output:
        if value not in made:
            raise DanglingInput(node_name=f"{function.name} (output)", input_name=value)
    if len(set(function.output)) < len(function.output):
        twice = next(v for v in function.output if function.output.count(v) > 1)
        raise DuplicateOutput(value_name=twice, node_a="function output", node_b="function output")
