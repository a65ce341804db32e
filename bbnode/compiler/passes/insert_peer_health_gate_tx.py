"""`insert_peer_health_gate_tx`: nothing is sent to a blocked peer.

Rule: the splice is shared with its sisters; this file says which gate and where in the order.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.tx_chain import insert_tx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys


class InsertPeerHealthGateTx:
    """Puts a `PeerHealthGateTx` before every Send that carries a `peer` attribute.

    1. The gate carries the same `peer`, takes the data of the Send and what the Send waits for,
       and the Send reads the gate.
    2. The Send is stamped `peer_health_tx_gated`; a stamped one is left alone.
    """

    name: ClassVar[str] = "insert_peer_health_gate_tx"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_tx_gate(unit, keys.OP_PEER_HEALTH_GATE_TX)}
