"""`insert_backoff_gate_rx`: peers that fail are not heard for a while.

Rule: the splice is shared with its sisters; this file says which gate and where in the order.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.rewriting.gates import insert_rx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys


class InsertBackoffGateRx:
    """Puts a `BackoffGateRx` behind every Recv and RecvReq.

    1. The gate goes to the end of the chain that `rx_chain_head` names: it is the last.
    2. The receiver is stamped `backoff_rx_gated`; a stamped one is left alone.
    """

    name: ClassVar[str] = "insert_backoff_gate_rx"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_rx_gate(unit, keys.OP_BACKOFF_GATE_RX)}
