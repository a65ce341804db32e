"""`merge_partitions_into_one`: the compiled model.

Rule: one ModelProto is the whole artifact, and it is plain ONNX: `onnx.checker` reads it.
"""

from __future__ import annotations

from collections.abc import Collection

from bbnode.compiler.analysis.content_hash import same
from bbnode.compiler.analysis.order import program_order, reorder
from bbnode.compiler.analysis.signatures import (
    import_used,
    version,
    versions_of,
    write_canonical_domains,
)
from bbnode.compiler.errors import Internal
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, Program, sorted_opsets


class MergePartitionsIntoOne(Pass):
    """Puts mains and shared functions into one model.

    1. `functions` are the mains in class order, then what they share, each key once; two
       functions of one key and different content are Internal. `unit.partitions` is empty.
    2. Nodes of every function are in topological order, and upstream ONNX is written "".
    3. Every function imports the opsets that its ops use, the model all of them (the program's
       own version, which is the highest that anything imports, else the highest of them), the
       default ONNX opset and the module domain.
    4. `graph` is empty but for the program's name.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        program = unit.program
        mains = [unit.partitions[home] for home in sorted(unit.partitions)]
        merged: dict[FunctionKey, Function] = {}
        for function in (*mains, *program.functions):
            key = function.key
            if merged.setdefault(key, function) is not function and not same(
                merged[key], function, unit.prints
            ):
                raise Internal(detail=f"two functions {function.name!r} differ")
        _finish(program, merged.values())
        program.name = unit.program_name
        if mains:
            program.functions = list(merged.values())
            unit.partitions = {}
        return {"functions": len(program.functions), "targets": len(mains)}


def _finish(program: Program, functions: Collection[Function]) -> None:
    known = versions_of(program)
    imported = {
        "": version("", known),
        keys.MODULE_DOMAIN: keys.BB_OPSET_VERSION,
    }
    for function in functions:
        reorder(function, program_order(function.nodes, given=function.inputs))
        write_canonical_domains(function.nodes)
        function.types = dict(sorted(function.types.items()))
        own = versions_of(function, program)
        for domain, used in import_used(function, own).items():
            # `validate` has checked the ops in the program's own version, and in no other.
            imported[domain] = known.get(domain) or max(imported.get(domain, 0), used)
    program.opset_imports = sorted_opsets(imported.items())
