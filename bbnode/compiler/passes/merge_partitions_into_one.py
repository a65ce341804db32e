"""`merge_partitions_into_one`: the compiled model.

Rule: one ModelProto is the whole artifact, and it is plain ONNX: `onnx.checker` reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from onnx import FunctionProto, GraphProto, ModelProto

from bbnode.compiler import flow
from bbnode.compiler.errors import Internal
from bbnode.compiler.function_table import FunctionKey
from bbnode.compiler.opsets import import_used, version, versions_of, write_canonical_domains
from bbnode.compiler.ordering import program_order
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys, protos

DEFAULT_GRAPH_NAME = "program"  # ONNX wants a name, and a hand-made model may have none


class MergePartitionsIntoOne:
    """Puts mains and shared functions into one model.

    1. `functions` are the mains in class order, then what they share, each key once; two
       functions of one key and different content are Internal. `unit.partitions` is empty.
    2. Nodes of every function are in topological order, and upstream ONNX is written "".
    3. Every function imports the opsets that its ops use, the model all of them (of several
       versions the highest), the default ONNX opset and the module domain.
    4. `graph` is empty but for the program's name.
    """

    name: ClassVar[str] = "merge_partitions_into_one"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        model = unit.model
        mains = [unit.partitions[home] for home in sorted(unit.partitions)]
        merged: dict[FunctionKey, FunctionProto] = {}
        for function in (*mains, *model.functions):
            key = protos.function_key(function)
            if merged.setdefault(key, function) is not function and merged[key] != function:
                raise Internal(detail=f"two functions {function.name!r} differ")
        _finish(model, merged.values())
        if mains:
            functions = list(merged.values())
            del model.functions[:]
            model.functions.extend(functions)
            unit.partitions = {}
        return {"functions": len(model.functions), "targets": len(mains)}


def _finish(model: ModelProto, functions: Collection[FunctionProto]) -> None:
    known = versions_of(model)
    imported = {
        "": version("", known),
        keys.MODULE_DOMAIN: keys.BB_OPSET_VERSION,
    }
    for function in functions:
        flow.reorder(function, program_order(function.node))
        write_canonical_domains(function.node)
        own = versions_of(function, model)
        for domain, used in import_used(function, own).items():
            imported[domain] = max(imported.get(domain, 0), used)
    del model.opset_import[:]
    model.opset_import.extend(protos.opset_imports(imported.items()))
    model.graph.CopyFrom(GraphProto(name=model.graph.name or DEFAULT_GRAPH_NAME))
