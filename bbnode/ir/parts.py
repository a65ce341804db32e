"""Parts of an artifact that ONNX tools run: one fused graph as a model of its own.

Rule: the part is the very graph that a node's backend runs, with the ports of the function; what
a caller says of their types is added, so that a session can be opened on it.
"""

from __future__ import annotations

from onnx import ModelProto

from bbnode.ir import keys
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import (
    Function,
    OpNode,
    Program,
    Subgraph,
    ValueNote,
    ValueType,
    annotations_on,
    call_key,
    is_onnx_domain,
    is_onnx_op,
    sorted_opsets,
)
from bbnode.ir.onnx_file import annotated, ir_version_for, joined_extras, model_of, program_of
from bbnode.ir.types import is_onnx


class NoSuchPart(AuthorError):
    """The artifact has no function that can be run alone, under that name."""


def part_names(program: Program) -> list[str]:
    """Return the names of the functions that `extract_part` takes, in the program's order."""
    return [function.name for function in program.functions if _runs_alone(function)]


def extract_part(artifact: ModelProto | Program, name: str) -> ModelProto:
    """Return one function of an artifact as an ONNX model with a main graph.

    Its inputs and outputs are those of the function, in order; the doc string of each is the name
    of the value that the first call of it hands in or takes.

    Args:
        artifact: a compiled model, or its graph; not changed.
        name: of the function (`subgraph_…`), or of an op that calls it.

    Raises:
        NoSuchPart: there is none of that name, or it does not consist of ONNX ops alone.
        OutOfBounds: the artifact is damaged.
    """
    program = artifact if isinstance(artifact, Program) else program_of(artifact)
    calls = [(caller, node) for caller in program.functions for node in caller.nodes]
    function = _function(program, calls, name)
    graph = Subgraph(name=function.name)
    graph.inputs, graph.outputs = list(function.inputs), list(function.outputs)
    graph.types = {value: known for value, known in function.types.items() if _is_leaf(known)}
    graph.nodes = [node.copy() for node in function.nodes]
    for caller, call in calls:
        if call_key(call) == function.key:
            _note_ports(graph, caller, call)
            break
    held = {}
    for node in graph.nodes:
        held.update(annotations_on(node))
        node.metadata.clear()
    has_devices = any(node.extras for node in graph.nodes)
    extras = joined_extras(program.extras, b"") if has_devices else b""
    imported = (*program.opset_imports, *function.opset_imports)
    versions = {"" if is_onnx_domain(o.domain) else o.domain: o.version for o in imported}
    used = {"", *("" if is_onnx_domain(n.domain) else n.domain for n in graph.all_nodes())}
    return model_of(
        Program(
            ir_version=ir_version_for(extras, keys.FRAMEWORK_IR_VERSION),
            producer_name=keys.PRODUCER_NAME,
            name=function.name,
            graph=annotated(graph, held) if held else graph,
            opset_imports=sorted_opsets((d, v) for d, v in versions.items() if d in used),
            extras=extras,
        )
    )


def _function(program: Program, calls: list[tuple[Function, OpNode]], name: str) -> Function:
    called = {call_key(node) for _, node in calls if node.name == name}
    for function in program.functions:
        if function.name == name or function.key in called:
            if _runs_alone(function):
                return function
            raise NoSuchPart(
                f"{name!r:.80} holds ops that only a node carries out; {_choices(program)}"
            )
    raise NoSuchPart(f"there is no function or call {name!r:.80}; {_choices(program)}")


def _choices(program: Program) -> str:
    names = part_names(program)
    return f"what runs alone: {', '.join(names[:8])}" if names else "nothing in it runs alone"


def _runs_alone(function: Function) -> bool:
    return bool(function.nodes) and all(
        is_onnx_op(node) and not any(a.reference for a in node.attributes.values())
        for node in function.all_nodes()
    )


def _note_ports(graph: Subgraph, caller: Function, call: OpNode) -> None:
    for ports, given in ((graph.inputs, call.inputs), (graph.outputs, call.outputs)):
        for inner, outer in zip(ports, given, strict=False):
            graph.notes[inner] = ValueNote(doc_string=outer)
            known = caller.types.get(outer)
            if known is not None and _is_leaf(known):
                graph.types.setdefault(inner, known)


def _is_leaf(known: ValueType) -> bool:
    """A type that ONNX's tools know; an abstract tensor is none, it is inferred."""
    return known.kind is None or (known.kind.is_leaf and is_onnx(known.kind))
