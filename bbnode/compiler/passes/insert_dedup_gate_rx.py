"""`insert_dedup_gate_rx`: a message that comes twice counts once.

Rule: the splice is shared with its sisters; this file says which gate and where in the order.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.rewriting.gates import insert_rx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys


class InsertDedupGateRx:
    """Puts a `DedupGateRx` behind every Recv and RecvReq.

    1. The gate is the first of the chain: it reads the payload, and all that read the payload or
       waited for it take the gate's value instead. The sender output stays as it is.
    2. The receiver is stamped `dedup_rx_gated` and its `rx_chain_head` names the end of the
       chain; a stamped receiver is left alone.
    """

    name: ClassVar[str] = "insert_dedup_gate_rx"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_rx_gate(unit, keys.OP_DEDUP_GATE_RX)}
