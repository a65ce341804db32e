"""`infer_shapes`: declared shapes, followed through the program.

Rule: a program that declares no shape is left alone, and costs nothing.
"""

from __future__ import annotations

from bbnode.compiler.analysis.functions import by_key, callees_first, calls_of
from bbnode.compiler.analysis.order import topological
from bbnode.compiler.typing.shapes import FunctionShapes, sends_by_port
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.graph import FunctionKey, is_wire


class InferShapes(Pass):
    """Follows declared shapes through the program; does nothing where none is declared.

    1. What is declared of one value, and what ONNX's inference finds for it, node by node, agrees;
       else it is ShapeContradiction, with the lines of both. A length says more than a name
       (`dim_param`), a name more than nothing.
    2. Ops that pass a value on, sends among them, pass its shape on; a call's values have the
       shapes of the callee's inputs and outputs.
    3. What the program hands out, and what a send delivers, declares the shape that was found; the
       node checks what arrives. Where several sends share a port, only the author says it.
    4. All other values keep what the author declared.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bodies = unit.bodies()
        if unit.partitions or not any(
            t.shape is not None for b in bodies for t in b.types.values()
        ):
            return {"shapes_found": 0}
        table = by_key(bodies)
        calls = {key: [k for _, k in calls_of(body, table)] for key, body in table.items()}
        solved: dict[FunctionKey, FunctionShapes] = {}
        count = 0
        for key in callees_first(table, calls):
            body = table[key]
            shapes = solved[key] = FunctionShapes(body, unit.program)
            nodes = [body.nodes[index] for index in topological(body)]
            shapes.solve(nodes, solved, sends_by_port(body.nodes))
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
            count += len(shapes.found)
        return {"shapes_found": count}
