"""Errors for ops that need values of several executions, in terms of the author's program.

Rule: each message that arrives by `net_out` starts its own execution, and so does each request,
invoke, tick, event and join. Two executions never see each other's values. The rule itself is
the engine's (`bbnode.ir.slices`); here its findings become errors that say what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bbnode.compiler.errors import CollectNotReceived, CompileError, NeverFires, Where
from bbnode.ir import keys
from bbnode.ir.flatten import (
    ENGINE_DOMAIN,
    OP_DEPOSIT,
    OP_JOINED,
    OP_RELAY,
    FlatFunction,
    FlatOp,
    check_acyclic,
    check_values,
    flatten,
)
from bbnode.ir.graph import Function, FunctionKey, OpNode
from bbnode.ir.slices import Slice, cut_slices, find_apart, starts_executions

_SOURCES: Final[Mapping[str, str]] = {
    "Pulse": "the start of the node",
    "Interval": "each tick",
    "EventSource": "each event",
    "LifecyclePhase": "the phase",
}


def find_fault(
    main: Function, library: Mapping[FunctionKey, Function], *, home: str
) -> CompileError | None:
    """Return the error of an op that can never fire or gathers nothing; None if there is none.

    Raises `bbnode.ir.flatten.MalformedFlow` for a flow that the engine would refuse to install.
    """
    bodies = (main, *library.values())
    if not any(starts_executions(node) for body in bodies for node in body.nodes):
        return None  # everything runs in one execution, that of `invoke`
    flat = flatten(main, library)
    makers = check_values(flat)
    check_acyclic(flat, makers)
    slices, unreachable = cut_slices(flat, makers)
    apart = find_apart(flat, makers, unreachable)
    if apart is not None:
        (value_a, entry_a), (value_b, entry_b) = apart.first, apart.second
        return NeverFires(
            node_name=_name(apart.op),
            op_type=apart.op.node.op_type,
            value_a=value_a,
            execution_a=_execution(entry_a, flat, home),
            value_b=value_b,
            execution_b=_execution(entry_b, flat, home),
            where=Where.of(apart.op.node),
        )
    return _not_received(flat, slices, home)


def _not_received(flat: FlatFunction, slices: Iterable[Slice], home: str) -> CompileError | None:
    for piece in slices:
        if piece.source is not None and piece.source.domain == keys.WIRE_DOMAIN:
            continue
        for position in piece.positions:
            op = flat.ops[position]
            if op.is_a(ENGINE_DOMAIN, OP_DEPOSIT) and op.node.op_type == keys.OP_COLLECT:
                return CollectNotReceived(
                    node_name=_name(op),
                    value=op.inputs[0],
                    execution=_execution(piece, flat, home),
                    where=Where.of(op.node),
                )
    return None


def _name(op: FlatOp) -> str:
    if op.is_a(ENGINE_DOMAIN, OP_RELAY) or op.is_a(ENGINE_DOMAIN, OP_DEPOSIT):
        return op.name.rpartition("[")[0]  # the op that this relay serves
    return op.name


def _execution(entry: Slice, flat: FlatFunction, home: str) -> str:
    source = entry.source
    if source is None:
        inputs = ", ".join(repr(name) for name in flat.inputs)
        noun = "input" if len(flat.inputs) == 1 else "inputs"
        return f"the invoke of {home!r}" + (f" ({noun} {inputs})" if inputs else "")
    if source.is_a(ENGINE_DOMAIN, OP_JOINED):
        return f"what {source.name!r} gathered on {home!r}"
    if source.domain == keys.WIRE_DOMAIN:
        port = _port(source.node)
        what = "the request" if source.op_type == keys.OP_RECV_REQ else "the delivery of port"
        return f"{what} {port!r} on {home!r}"
    return f"{_SOURCES.get(source.op_type, 'each firing')} of {source.name!r} on {home!r}"


def _port(node: OpNode) -> str:
    return node.metadata.get(keys.PORT_KEY) or node.name
