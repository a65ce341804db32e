"""The five gate passes: duplicate messages, blocked peers, peers in backoff.

Rule: a gate follows every inbound receiver (RX) or precedes every Send to a fixed peer (TX), in
the order of the passes. `rewriting/gates.py` inserts it.
"""

from __future__ import annotations

from typing import ClassVar

from bbnode.compiler.rewriting.gates import insert_rx_gate, insert_tx_gate
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys


class _RxGate(Pass):
    gate: ClassVar[str]

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_rx_gate(unit, self.gate, self.name)}


class _TxGate(Pass):
    gate: ClassVar[str]

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        return {"gates_inserted": insert_tx_gate(unit, self.gate, self.name)}


class InsertDedupGateRx(_RxGate):
    """Puts a `DedupGateRx` behind every Recv and RecvReq: a message that comes twice counts once.

    1. The gate is the first of the chain: it reads the payload, and all that read the payload or
       waited for it take the gate's value instead. The sender output stays as it is.
    2. The receiver is stamped `dedup_rx_gated` and its `rx_chain_head` names the end of the
       chain; a stamped receiver is left alone.
    """

    gate = keys.OP_DEDUP_GATE_RX


class InsertPeerHealthGateRx(_RxGate):
    """Puts a `PeerHealthGateRx` behind every Recv and RecvReq: blocked peers are not heard.

    1. The gate goes to the end of the chain that `rx_chain_head` names: behind dedup.
    2. The receiver is stamped `peer_health_rx_gated`; a stamped one is left alone.
    """

    gate = keys.OP_PEER_HEALTH_GATE_RX


class InsertBackoffGateRx(_RxGate):
    """Puts a `BackoffGateRx` behind every Recv and RecvReq: who fails is not heard for a while.

    1. The gate goes to the end of the chain that `rx_chain_head` names: it is the last.
    2. The receiver is stamped `backoff_rx_gated`; a stamped one is left alone.
    """

    gate = keys.OP_BACKOFF_GATE_RX


class InsertPeerHealthGateTx(_TxGate):
    """Puts a `PeerHealthGateTx` before every Send that carries a `peer` attribute.

    1. The gate carries the same `peer`, takes the data of the Send and what the Send waits for,
       and the Send reads the gate. Nothing is sent to a blocked peer.
    2. The Send is stamped `peer_health_tx_gated`; a stamped one is left alone.
    """

    gate = keys.OP_PEER_HEALTH_GATE_TX


class InsertBackoffGateTx(_TxGate):
    """Puts a `BackoffGateTx` before every Send that carries a `peer` attribute.

    1. The gate goes between `PeerHealthGateTx` and the Send, and carries the same `peer`. Nothing
       is sent to a peer that is backing off.
    2. The Send is stamped `backoff_tx_gated`; a stamped one is left alone.
    """

    gate = keys.OP_BACKOFF_GATE_TX
