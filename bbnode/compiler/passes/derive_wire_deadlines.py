"""`derive_wire_deadlines`: the static deadline of each send.

Rule: it is an upper bound; at run time the rest of an inbound deadline takes precedence.
"""

from __future__ import annotations

from bbnode.compiler.analysis.chain_depth import MAX_CHAIN_DEPTH, spans_of_sends
from bbnode.compiler.analysis.slots import slots_of_calls
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys

__all__ = ["MAX_CHAIN_DEPTH", "DeriveWireDeadlines"]


class DeriveWireDeadlines(Pass):
    """Stamps `chain_depth` and `deadline_ns` on every Send-flavoured op.

    1. `chain_depth` is the number of hops from the send to the end of its chain, its own hop
       included (`chain_depth.py`); one that the author gave stays.
    2. `deadline_ns` is `chain_depth` times the per-hop budget. Where requests behind the send
       bring deadlines of their own, or `After` and `Sleep` their delays, those count as they
       are, and the slowest path decides.
    3. A request that brings its own `deadline_ns` attribute (not 0) keeps that one.
    4. A Send that begins a budget of its own (`budget_ns`) takes that as `deadline_ns`, and what
       comes before it does not count what comes after it.
    5. `deadline_from` is `nobody` where neither the author of the send nor one of a per-hop budget
       said how long: the budget is then the default.
    6. A `chain_depth` that is no number from 1 to `MAX_CHAIN_DEPTH`, a negative deadline, or a
       `budget_ns` that is no positive number or not on a Send, is ExpansionFailed.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        called_slots = slots_of_calls(unit.program.functions[1:])
        stamped = deepest = 0
        for function in unit.bodies():
            spans = spans_of_sends(function, options.per_hop_budget_ns, called_slots)
            for index, span in spans.items():
                meta = function.nodes[index].metadata
                meta.setdefault(keys.CHAIN_DEPTH_KEY, str(span.hops))
                meta[keys.DEADLINE_NS_KEY] = str(span.ns)
                if not options.is_bounded and not span.is_own:
                    meta[keys.DEADLINE_FROM_KEY] = keys.DEADLINE_FROM_NOBODY
                deepest = max(deepest, span.hops)
            stamped += len(spans)
        return {"deadlines_stamped": stamped, "deepest_chain": deepest}
