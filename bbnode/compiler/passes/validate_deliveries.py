"""`validate_deliveries`: a check that every op can fire.

Rule: it changes nothing. It runs before ops are fused and gates inserted, so that an error names
the ops that the author recorded.
"""

from __future__ import annotations

from bbnode.compiler.analysis.deliveries import find_fault
from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.errors import RuntimeIncomplete
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.flatten import MalformedFlow


class ValidateDeliveries(Pass):
    """Checks which executions the values of every partition are of.

    1. The values that an op reads or waits for exist in one execution, be it that of an invoke, a
       delivery, a request, a tick, an event or a join (NeverFires). The inputs of a Threshold that
       it waits for do, too.
    2. What a Collect gathers came over the wire in the execution that brings it
       (CollectNotReceived).
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        library = by_key(
            f for f in unit.program.functions if f.domain != keys.BACKEND_SUBGRAPH_DOMAIN
        )
        for home, main in unit.partitions.items():
            try:
                fault = find_fault(main, library, home=home)
            except MalformedFlow as error:
                raise RuntimeIncomplete(missing=str(error), target=main.name) from error
            if fault is not None:
                raise fault
        return {"partitions_looked_at": len(unit.partitions)}
