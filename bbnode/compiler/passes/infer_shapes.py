"""`infer_shapes`: propagation of declared shapes and of models' parameter shapes.

Rule: a program that declares no shape and names no model is left alone, at no cost. Shapes that
follow from models are stated for peers to compare and declare nothing: a whole network may work
with another model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.analysis.order import topological
from bbnode.compiler.errors import ShapeContradiction
from bbnode.compiler.typing.shapes import FunctionShapes, sends_by_port
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.components.contracts import Model, ModelShapes
from bbnode.components.registry import build_config, component_class, known_types
from bbnode.ir import keys
from bbnode.ir.crossing import with_size
from bbnode.ir.errors import BbnodeError
from bbnode.ir.graph import Function, FunctionKey, OpNode, Program, is_wire

# Added to a number of parameters to get another one: large and odd, to avoid coincidences.
_MOVED_BY = 1_000_003


class InferShapes(Pass):
    """Follows shapes through the program; does nothing where none is known.

    1. What is declared of one value, and what ONNX's inference finds for it, node by node, agrees;
       else it is ShapeContradiction, with the lines of both. A length says more than a name
       (`dim_param`), a name more than nothing.
    2. Ops that pass a value on, sends among them, pass its shape on; a call's values have the
       shapes of the callee's inputs and outputs.
    3. What the program hands out, and what a send delivers, declares the shape that was found; the
       node checks what arrives. Where several sends share a port, only the author says it.
    4. All other values keep what the author declared.
    5. Where the program says the settings of models, so that the numbers of their parameters and
       the shapes of their outputs are known, each send carries the shape of what it sends as
       `crossing_shape`, as far as that follows; the program's `model_size.<slot>` are the numbers,
       with `,fixed` where another one contradicts the program, as its slices or constants do. A
       vector that a model takes and that has another size is ShapeContradiction.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bodies = unit.bodies()
        if unit.partitions:
            return {"shapes_found": 0, "sends_sized": 0}
        models = _models(bodies)
        count = sized = 0
        if any(t.shape is not None for b in bodies for t in b.types.values()):
            for body, shapes in _solved(bodies, unit.program, {}):
                _declare(body, shapes)
                count += len(shapes.found)
        if models:
            texts = _crossings(bodies, unit.program, models)
            for node in (node for body in bodies for node in body.nodes):
                if not texts.get(id(node)):
                    node.metadata.pop(
                        keys.CROSSING_SHAPE_KEY, None
                    )  # stale stamp of a part compiled before
                else:
                    node.metadata[keys.CROSSING_SHAPE_KEY] = texts[id(node)]
                    sized += 1
            if sized:
                _state(unit.program, models, _fixed(bodies, unit.program, models, texts))
        return {"shapes_found": count, "sends_sized": sized}


def _solved(
    bodies: Sequence[Function], program: Program, models: Mapping[str, ModelShapes]
) -> list[tuple[Function, FunctionShapes]]:
    """Return each function with its shapes, callees first. Raises ShapeContradiction."""
    table = by_key(bodies)
    calls = {key: [k for _, k in calls_of(body, table)] for key, body in table.items()}
    solved: dict[FunctionKey, FunctionShapes] = {}
    for key in callees_first(table, calls):
        body = table[key]
        shapes = solved[key] = FunctionShapes(body, program, models)
        nodes = [body.nodes[index] for index in topological(body)]
        shapes.solve(nodes, solved, sends_by_port(body.nodes))
    return [(table[key], shapes) for key, shapes in solved.items()]


def _declare(body: Function, shapes: FunctionShapes) -> None:
    """Declare the shapes of a function's outputs and deliveries."""
    wanted = [*body.inputs, *body.outputs]
    for node in body.nodes:
        if is_wire(node, keys.OP_SEND):
            wanted += node.outputs[:1]
        elif is_wire(node, keys.OP_SEND_REQ_BATCHED):
            wanted += node.outputs[2:3]
    for name in wanted:
        declared, shape = body.types.get(name), shapes.found.get(name)
        if declared is not None and declared.kind is not None and shape is not None:
            body.types[name] = declared.narrowed(shape=shape)


def _crossings(
    bodies: Sequence[Function], program: Program, models: Mapping[str, ModelShapes]
) -> dict[int, str]:
    """Return the shape of the value that each send sends, by the node's id; "" if unknown.

    The shape of a shared port is known if its sends agree. Raises ShapeContradiction.
    """
    texts_by_send: dict[int, str] = {}
    for body, shapes in _solved(bodies, program, models):
        shared = sends_by_port(body.nodes)
        for node in body.nodes:
            if is_wire(node, *keys.SEND_OPS) and node.inputs:
                members: Sequence[OpNode] = shared.get(node.name, (node,))
                texts = {shapes.crossing(each.inputs[0]) for each in members if each.inputs}
                texts_by_send[id(node)] = texts.pop() if len(texts) == 1 else ""
    return texts_by_send


def _fixed(
    bodies: Sequence[Function], program: Program, models: Mapping[str, ModelShapes],
    texts: Mapping[int, str],
) -> set[int]:  # fmt: skip
    """Return the parameter counts that the program depends on, so that no node may change them.

    Models of one size are taken for copies of one. Another size is tried in their place: it must
    contradict nothing, and crossing values must keep their shape or take the new size.
    """
    fixed = set()
    for size in sorted({each.parameters for each in models.values()}):
        other = size + _MOVED_BY
        tried = {
            slot: replace(each, parameters=other) if each.parameters == size else each
            for slot, each in models.items()
        }
        try:
            moved = _crossings(bodies, program, tried)
        except ShapeContradiction:
            fixed.add(size)
            continue
        for key, text in texts.items():
            if moved[key] not in (text, with_size(text, size, other)):
                fixed.add(size)
    return fixed


def _state(program: Program, models: Mapping[str, ModelShapes], fixed: Collection[int]) -> None:
    """Stamp the parameter counts on the program, and mark those that no node may change."""
    for slot, each in sorted(models.items()):
        mark = keys.MODEL_SIZE_FIXED if each.parameters in fixed else ""
        program.metadata[keys.MODEL_SIZE_PREFIX + slot] = f"{each.parameters}{mark}"


def _models(bodies: Sequence[Function]) -> dict[str, ModelShapes]:
    """Return the shapes of each model whose settings are in the program, by slot."""
    by_slot: dict[str, ModelShapes | None] = {}
    known: dict[tuple[object, bytes], ModelShapes | None] = {}
    for body in bodies:
        for slot, attribute in body.defaults.items():
            name = body.metadata.get(keys.CONCRETE_TYPE_SLOT_PREFIX + slot, "")
            stored = attribute.value
            if slot in by_slot or name not in known_types() or not isinstance(stored, bytes):
                continue
            cls = component_class(name)
            if not issubclass(cls, Model):
                continue
            of = cls.shapes_of
            key = getattr(of, "__func__", of), stored
            if key not in known:
                try:
                    known[key] = of(build_config(cls, slot, stored, {}))
                except BbnodeError:
                    known[key] = None  # the node reports why it can't be made
            by_slot[slot] = known[key]
    return {slot: shapes for slot, shapes in by_slot.items() if shapes is not None}
