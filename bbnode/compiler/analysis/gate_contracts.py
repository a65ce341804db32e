"""Contracts on the gates and checks of a compiled partition: an extensible list.

Rule: the author of a pass that inserts ops registers a contract for them here, and
`validate_runtime_complete` enforces it; that pass itself is never edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bbnode.compiler.errors import PassInvariantBroken
from bbnode.compiler.rewriting.gates import is_peer_routed
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition main, indexed once for all contracts.

    Attributes:
        main: the function.
        receivers: its Recv and RecvReq nodes.
        peer_sends: its Sends that carry a `peer` attribute.
        timed: its nodes that carry `deadline_ns` and need a check.
        guards: (gate or check op type, name of the node it guards).
    """

    main: Function
    receivers: tuple[OpNode, ...]
    peer_sends: tuple[OpNode, ...]
    timed: tuple[OpNode, ...]
    guards: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, main: Function) -> PartitionView:
        """Index a main in one walk."""
        receivers, sends, timed = [], [], []
        guards: set[tuple[str, str]] = set()
        for node in main.nodes:
            if node.domain == keys.WIRE_DOMAIN:
                if node.op_type in keys.INBOUND_OPS:
                    receivers.append(node)
                elif is_peer_routed(node):
                    sends.append(node)
            elif node.domain == keys.SYSCALL_DOMAIN:
                key = _SOURCE_KEYS.get(node.op_type)
                source = node.metadata.get(key) if key else None
                if source is not None:
                    guards.add((node.op_type, source))
            if is_checked_kind(node) and node.metadata.get(keys.DEADLINE_NS_KEY) is not None:
                timed.append(node)
        return cls(main, tuple(receivers), tuple(sends), tuple(timed), frozenset(guards))

    def unguarded(self, op_type: str, nodes: tuple[OpNode, ...]) -> Iterator[str]:
        """Yield a message for each of `nodes` that no `op_type` guards."""
        for node in nodes:
            if (op_type, node.name) not in self.guards:
                yield f"{node.op_type} {node.name!r} has no {op_type}"


def is_checked_kind(node: OpNode) -> bool:
    """Return True if a node that carries `deadline_ns` needs a check before it."""
    if node.domain == keys.WIRE_DOMAIN:
        return node.op_type not in keys.RECV_OPS
    if node.domain == keys.SYSCALL_DOMAIN:
        return node.op_type not in keys.GATE_OPS and node.op_type != keys.OP_DEADLINE_CHECK
    return True


_SOURCE_KEYS = {**keys.GATE_SOURCES, keys.OP_DEADLINE_CHECK: keys.DEADLINE_CHECK_SOURCE_KEY}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateContract:
    """One rule: `missing` yields a message for each thing that a partition lacks."""

    name: str
    missing: Callable[[PartitionView], Iterator[str]]


_CONTRACTS: dict[str, GateContract] = {}


def register_gate_contract(contract: GateContract) -> GateContract:
    """Register a contract. Raises PassInvariantBroken if another one has its name."""
    known = _CONTRACTS.setdefault(contract.name, contract)
    if known is not contract:
        raise PassInvariantBroken(
            pass_name=contract.name, detail="a gate contract of that name is registered already"
        )
    return contract


def unregister_gate_contract(name: str) -> None:
    """Remove a contract, if it is registered."""
    _CONTRACTS.pop(name, None)


def gate_contracts() -> tuple[GateContract, ...]:
    """Return all contracts, in registration order."""
    return tuple(_CONTRACTS.values())


def _guards(op_type: str, of: Callable[[PartitionView], tuple[OpNode, ...]]) -> None:
    register_gate_contract(
        GateContract(name=op_type, missing=lambda view: view.unguarded(op_type, of(view)))
    )


for _gate in (keys.OP_DEDUP_GATE_RX, keys.OP_PEER_HEALTH_GATE_RX, keys.OP_BACKOFF_GATE_RX):
    _guards(_gate, lambda view: view.receivers)
for _gate in (keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX):
    _guards(_gate, lambda view: view.peer_sends)
_guards(keys.OP_DEADLINE_CHECK, lambda view: view.timed)
