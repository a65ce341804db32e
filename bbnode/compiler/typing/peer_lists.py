"""Types of the `ai.onnx` ops that move peers and addresses about (`bbnode/ir/peer_list_ops.py`).

Rule: whether such an op works on a list of peers or on a tensor is said by the values at its data
ports, on either side. One on peers is no backend's work: the engine runs it, and ONNX's schemas
say nothing about its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto

from bbnode.ir import keys, peer_list_ops, types
from bbnode.ir.graph import OpNode
from bbnode.ir.peer_list_ops import ELEMENT_OF, LIST_OF, RESULT_TYPES
from bbnode.ir.types import TypeNode

KindOf = Callable[[str], TypeNode | None]  # what is known of a value's type


class Works(Enum):
    """The kinds of values that an op works on."""

    ON_PEERS = auto()
    ON_TENSORS = auto()
    OPEN = auto()  # nothing says it yet


def may_move_peers(node: OpNode) -> bool:
    """Return True if an op is one of those that work on lists of peers as well."""
    return node.op_type in RESULT_TYPES and node.domain in ("", keys.ONNX_DOMAIN)


def moves_peers(node: OpNode, kind_of: KindOf) -> bool:
    """Return True if an op works on peers or addresses, once types are known."""
    return may_move_peers(node) and works(node, kind_of) is Works.ON_PEERS


def works(node: OpNode, kind_of: KindOf) -> Works:
    """Return what an op that `may_move_peers` works on, as its data ports say it."""
    kinds = [kind_of(name) for name in _data_values(node)]
    if any(kind in ELEMENT_OF or kind in LIST_OF for kind in kinds):
        return Works.ON_PEERS
    # A concrete type that is neither is for ONNX's schemas to take or refuse.
    if any(kind is not None and kind is not types.ANY for kind in kinds):
        return Works.ON_TENSORS
    return Works.OPEN


def narrowings(node: OpNode, kind_of: KindOf) -> Iterator[tuple[str, TypeNode]]:
    """Return types that the values of an op on peers have to be, from those that are known."""
    results = RESULT_TYPES[node.op_type]
    reads = peer_list_ops.data_inputs(node.op_type, len(node.inputs))
    known = [_told(kind_of(name)) if name else None for name in node.inputs]
    made = next((name for name in node.outputs if name), "")
    given = peer_list_ops.result_type(node.op_type, known)
    if given is None and made and not any(known[index] for index in reads):
        given = _told(kind_of(made))  # only what comes out is known: it says what goes in
    source = next((kind for kind, result in results.items() if result is given), None)
    for index, name in enumerate(node.inputs):
        if not name:
            continue
        if index not in reads:
            yield name, types.TENSOR_INT64
        elif source is not None:
            yield name, source
    if made and given is not None:
        yield made, given


def refusal(node: OpNode, kind_of: KindOf) -> str | None:
    """Return what is wrong with the types at the data inputs of an op on peers, or None."""
    known = [_told(kind_of(name)) if name else None for name in node.inputs]
    reads = peer_list_ops.data_inputs(node.op_type, len(known))
    got = list(dict.fromkeys(kind.name for i in reads if (kind := known[i]) is not None))
    if not got or peer_list_ops.result_type(node.op_type, known) is not None:
        return None
    takes = peer_list_ops.accepted(node.op_type)
    return f"{node.op_type} takes {takes} (one kind of them), and reads {' and '.join(got)}"


def _told(kind: TypeNode | None) -> TypeNode | None:
    return None if kind is types.ANY else kind


def _data_values(node: OpNode) -> Iterator[str]:
    for index in peer_list_ops.data_inputs(node.op_type, len(node.inputs)):
        if node.inputs[index]:
            yield node.inputs[index]
    yield from filter(None, node.outputs[:1])
