"""`insert_peer_health_gate_rx`: blocked peers are not heard.

Rule: the splice is shared with its sisters; this file says which gate and where in the order.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.rewriting.gates import insert_rx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters
from bbnode.ir import keys


class InsertPeerHealthGateRx:
    """Puts a `PeerHealthGateRx` behind every Recv and RecvReq.

    1. The gate goes to the end of the chain that `rx_chain_head` names: behind dedup.
    2. The receiver is stamped `peer_health_rx_gated`; a stamped one is left alone.
    """

    name: ClassVar[str] = "insert_peer_health_gate_rx"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_rx_gate(unit, keys.OP_PEER_HEALTH_GATE_RX)}
