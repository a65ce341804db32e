"""`validate`: a check that the recorded program is well-formed.

Rule: it changes nothing. The author has to fix its findings, so errors name the ops and values
that the author wrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import onnx
from onnx import FunctionProto

from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.order import topological
from bbnode.compiler.analysis.signatures import (
    Signature,
    canonical,
    schema_of,
    signature_of,
    versions_of,
    write_canonical_domains,
)
from bbnode.compiler.analysis.slots import check_slot
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
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    Function,
    FunctionKey,
    OpNode,
    Subgraph,
    call_key,
    is_onnx_op,
)
from bbnode.ir.onnx_file import node_proto


class Validate(Pass):
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

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.bodies())
        nodes = 0
        imported = versions_of(unit.program)
        for function in unit.bodies():
            versions = versions_of(function, unit.program)
            _check_inputs(function)
            _check_values(function)
            right: set[Hashable] = set()  # contents of ops that passed
            for node in function.nodes:
                content = _said(node)
                if content not in right:
                    _check_op(node, table, versions, imported)
                    right.add(content)
                if node.graphs and is_onnx_op(node):
                    check_graphs(node, versions, unit.program.ir_version)
                check_slot(node)
            topological(function)
            check_pairs(function)
            nodes += len(function.nodes)
        return {"nodes": nodes, "validation_errors": 0}


def _said(node: OpNode) -> Hashable:
    """Return everything that `_check_op` depends on, so that equal ops are checked once."""
    return (
        *(node.op_type, node.domain, node.overload, len(node.inputs)),
        *map(bool, (*node.inputs, *node.outputs)),
        *[(name, a.kind, _dtype(a)) for name, a in node.attributes.items()],
    )


def _dtype(attribute: Attribute) -> int:
    is_tensor = attribute.kind is AttributeKind.TENSOR and attribute.value is not None
    return attribute.value.elem_type if is_tensor else -1


def _check_op(
    node: OpNode,
    table: Mapping[FunctionKey, Function],
    versions: Mapping[str, int],
    imported: Mapping[str, int],
) -> None:
    """Check one op; `versions` are its function's opsets, `imported` the whole program's."""
    signature = signature_of(node, table, versions)
    if signature is None:
        if node.domain in CALL_DOMAINS:
            raise DanglingCall(
                node_name=node.name, domain=node.domain, function=node.op_type, where=Where.of(node)
            )
        raise UnknownOp(
            node_name=node.name, op_type=node.op_type, domain=node.domain, where=Where.of(node)
        )
    if versions.get(canonical(node.domain), 0) < signature.version:
        raise OpsetNotImported(
            domain=node.domain,
            version_used=signature.version,
            node_name=node.name,
            where=Where.of(node),
        )
    _check_versions(node, signature, versions, imported)
    for kind, count, most in (
        ("inputs", len(node.inputs), signature.max_inputs),
        ("outputs", len(node.outputs), signature.max_outputs),
    ):
        if count > most:
            detail = f"{node.op_type} has at most {most} {kind}, here are {count}"
            raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    if len(node.outputs) < signature.min_outputs:
        detail = f"{node.op_type} has at least {signature.min_outputs} outputs"
        raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    for name, port in zip(node.outputs, signature.required_outputs, strict=False):
        if not name:
            detail = f"{node.op_type} has to name its output {port!r}"
            raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    _check_attributes(node, signature)
    if call_key(node) in table:
        return  # a call may omit inputs: the body then sees an absent optional input
    if not node.inputs and not node.outputs:
        detail = f"{node.op_type} takes nothing and gives nothing; name an output of it"
        raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))
    for index, port in enumerate(signature.required_inputs):
        if index >= len(node.inputs) or not node.inputs[index]:
            raise DanglingInput(node_name=node.name, input_name=port, where=Where.of(node))
    if len(node.inputs) < signature.min_inputs:
        detail = f"{node.op_type} has at least {signature.min_inputs} inputs"
        raise TypeConstraintFailed(op=node.name, detail=detail, where=Where.of(node))


def _check_versions(
    node: OpNode, signature: Signature, versions: Mapping[str, int], imported: Mapping[str, int]
) -> None:
    """Check that an op is the same in the model's version of its domain as in its function's."""
    domain = canonical(node.domain)
    of_model = imported.get(domain)
    if of_model is None or of_model == versions.get(domain) or not is_onnx_op(node):
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


def _check_separators(node: OpNode) -> None:
    """Check that no name holds a comma, which separates names in `after` and `control_after`."""
    for name in (node.name, *node.outputs):
        if "," in name:
            raise ExpansionFailed(
                op_type=node.op_type,
                domain=node.domain,
                reason=f"the name {name!r} holds a comma, which separates names elsewhere",
                node_name=node.name,
                where=Where.of(node),
            )


def _check_attributes(node: OpNode, signature: Signature) -> None:
    fault = ""
    for name in signature.required_attributes:
        if name not in node.attributes:
            fault = f"the attribute {name!r} is missing"
    kinds = signature.attribute_kinds
    for name, attribute in node.attributes.items():
        if _dtype(attribute) == 0:
            fault = f"the tensor of the attribute {name!r:.80} has no dtype"
        if kinds is None:
            continue
        if name not in kinds:
            known = ", ".join(sorted(kinds)) or "none"
            fault = f"it has no attribute {name!r:.80}; there is: {known}"
        elif attribute.kind != kinds[name]:
            wanted = AttributeKind(kinds[name]).name
            fault = f"the attribute {name!r} is {attribute.kind.name} and has to be {wanted}"
    if fault:
        raise ExpansionFailed(
            op_type=node.op_type,
            domain=node.domain,
            reason=fault,
            node_name=node.name,
            where=Where.of(node),
        )


def _check_inputs(function: Function) -> None:
    for name in function.inputs:
        if name not in function.types:
            raise MissingTypeInfo(input_name=name, function=function.name)


def _check_values(function: Function) -> None:
    makers: dict[str, str] = {}
    for name in function.inputs:
        if name in makers:
            raise DuplicateOutput(value_name=name, node_a="function input", node_b="function input")
        makers[name] = "function input"
    names: set[str] = set()
    for node in function.nodes:
        if not node.name or node.name in names:
            raise DuplicateNodeName(
                node_name=node.name, function=function.name, where=Where.of(node)
            )
        names.add(node.name)
        _check_separators(node)
        for value in node.outputs:
            if value in makers:
                raise DuplicateOutput(
                    value_name=value, node_a=makers[value], node_b=node.name, where=Where.of(node)
                )
            if value:
                makers[value] = node.name
    for node in function.nodes:
        for value in node.reads:
            if value not in makers:
                raise DanglingInput(node_name=node.name, input_name=value, where=Where.of(node))
    for value in function.outputs:
        if value not in makers:
            raise DanglingInput(node_name=f"{function.name} (output)", input_name=value)
    if len(set(function.outputs)) < len(function.outputs):
        twice = next(v for v in function.outputs if function.outputs.count(v) > 1)
        raise DuplicateOutput(value_name=twice, node_a="function output", node_b="function output")


def check_graphs(node: OpNode, versions: Mapping[str, int], ir_version: int) -> None:
    """Check the graphs inside an op. Raises UnknownOp or ExpansionFailed, naming the outer op.

    Args:
        node: an op with graphs in its attributes.
        versions: opset versions by domain, upstream ONNX as "".
        ir_version: the model's.
    """
    for graph in node.graphs:
        _check_ops(node, graph, versions)
    context = onnx.checker.C.CheckerContext()
    context.ir_version = ir_version
    context.opset_imports = dict(versions)
    # Wrapped in a function of its own, the op may use outer values of any type.
    own = node.copy()
    write_canonical_domains([own])
    alone = FunctionProto(name="alone", domain="alone", node=[node_proto(own)])
    alone.input.extend(dict.fromkeys(node.computes_with))
    alone.output.extend(name for name in node.outputs if name)
    alone.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in versions.items())
    try:
        onnx.checker.check_function(alone, context)
    except onnx.checker.ValidationError as error:
        raise ExpansionFailed(
            op_type=node.op_type,
            domain=node.domain,
            reason=f"its graph is not valid: {str(error).strip().splitlines()[0]:.300}",
            node_name=node.name,
            where=Where.of(node),
        ) from error


def _check_ops(node: OpNode, graph: Subgraph, versions: Mapping[str, int]) -> None:
    for inner in graph.all_nodes():
        domain = canonical(inner.domain)
        if schema_of(domain, inner.op_type, versions.get(domain, 0)) is None:
            raise UnknownOp(
                node_name=f"{node.name} (its op {inner.name!r:.80})",
                op_type=inner.op_type,
                domain=inner.domain,
                where=Where.of(node),
            )
