"""`validate_bootstrap_composition`: a check of the bootstraps and their calls.

Rule: it changes nothing, and runs while every bootstrap is still beside its Module.
"""

from __future__ import annotations

from bbnode.compiler.analysis.functions import (
    by_key,
    called_from,
    callees_first,
    calls_of,
    is_bootstrap,
)
from bbnode.compiler.errors import (
    BootstrapCompositionCycle,
    BootstrapCompositionGap,
    CyclicGraph,
    SourceInBootstrap,
    Where,
    WireOpInBootstrap,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.graph import Function, FunctionKey, call_key, is_wire
from bbnode.ir.slices import starts_executions


class ValidateBootstrapComposition(Pass):
    """Checks the call graph of the bootstraps.

    1. What a bootstrap calls under a bootstrap's name is in the model
       (BootstrapCompositionGap).
    2. Bootstraps do not call each other in a ring (BootstrapCompositionCycle).
    3. Neither a bootstrap nor what it calls sends: it runs on one node (WireOpInBootstrap).
    4. Nor does it hold an op that starts executions, other than a Pulse: that would never do so
       (SourceInBootstrap).
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.bodies())
        bootstraps = [function for function in unit.bodies() if is_bootstrap(function)]
        calls: dict[FunctionKey, list[FunctionKey]] = {}
        for function in bootstraps:
            _check_gaps(function, table)
            callees = [key for _, key in calls_of(function, table)]
            calls[function.key] = [key for key in callees if is_bootstrap(table[key])]
        try:
            callees_first(calls, calls)
        except CyclicGraph as error:
            raise BootstrapCompositionCycle(path=error.involves) from error
        for function in (*bootstraps, *called_from(unit.program, bootstraps)):
            for node in function.nodes:
                if is_wire(node):
                    raise WireOpInBootstrap(
                        node_name=node.name, function=function.name, where=Where.of(node)
                    )
                if starts_executions(node) and node.op_type != keys.OP_PULSE:
                    raise SourceInBootstrap(
                        node_name=node.name,
                        op_type=node.op_type,
                        function=function.name,
                        where=Where.of(node),
                    )
        return {"bootstraps": len(bootstraps)}


def _check_gaps(parent: Function, table: dict[FunctionKey, Function]) -> None:
    for node in parent.nodes:
        is_child = node.domain == keys.MODULE_DOMAIN and node.op_type.endswith(
            keys.BOOTSTRAP_SUFFIX
        )
        if is_child and call_key(node) not in table:
            raise BootstrapCompositionGap(
                parent=parent.name, child=node.op_type, where=Where.of(node)
            )
