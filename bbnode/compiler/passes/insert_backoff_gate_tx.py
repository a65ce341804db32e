"""`insert_backoff_gate_tx`: nothing is sent to a peer that is backing off.

Rule: the splice is shared with its sisters; this file says which gate and where in the order.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.tx_chain import insert_tx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys


class InsertBackoffGateTx:
    """Puts a `BackoffGateTx` before every Send that carries a `peer` attribute.

    1. The gate goes between `PeerHealthGateTx` and the Send, and carries the same `peer`.
    2. The Send is stamped `backoff_tx_gated`; a stamped one is left alone.
    """

    name: ClassVar[str] = "insert_backoff_gate_tx"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_tx_gate(unit, keys.OP_BACKOFF_GATE_TX)}
