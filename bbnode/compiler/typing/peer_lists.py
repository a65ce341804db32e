"""Types of the `ai.onnx` ops that move peers and addresses (`bbnode/ir/peer_list_ops.py`).

Rule: the values at its data ports, on either side, determine if such an op works on a list of
peers or on a tensor. An op on peers is run by the engine and not by a backend, and ONNX's schemas
do not apply to its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto

from bbnode.ir import keys, peer_list_ops, types
from bbnode.ir.graph import OpNode
from bbnode.ir.peer_list_ops import ELEMENT_OF, LIST_OF, RESULT_TYPES
from bbnode.ir.types import TypeNode

KindOf = Callable[[str], TypeNode | None]  # the known type of a value


class Works(Enum):
    """The kinds of values that an op works on."""

    ON_PEERS = auto()
    ON_TENSORS = auto()
    OPEN = auto()  # not determined yet


def may_move_peers(node: OpNode) -> bool:
    """Return True if an op is one of those that work on lists of peers as well."""
    return node.op_type in RESULT_TYPES and node.domain in ("", keys.ONNX_DOMAIN)


def moves_peers(node: OpNode, kind_of: KindOf) -> bool:
    """Return True if an op works on peers or addresses, once types are known."""
    return may_move_peers(node) and works(node, kind_of) is Works.ON_PEERS


def works(node: OpNode, kind_of: KindOf) -> Works:
    """Return the kind that an op that `may_move_peers` works on, by the types at its data ports."""
    kinds = [kind_of(name) for name in _data_values(node)]
    if any(kind in ELEMENT_OF or kind in LIST_OF for kind in kinds):
        return Works.ON_PEERS
    # ONNX's schemas accept or refuse any other concrete type.
    if any(kind is not None and kind is not types.ANY for kind in kinds):
        return Works.ON_TENSORS
    return Works.OPEN


def narrowings(node: OpNode, kind_of: KindOf) -> Iterator[tuple[str, TypeNode]]:
    """Yield the types that the values of an op on peers must have, from the known ones."""
    results = RESULT_TYPES[node.op_type]
    reads = peer_list_ops.data_inputs(node.op_type, len(node.inputs))
    known = [_told(kind_of(name)) if name else None for name in node.inputs]
    output = next((name for name in node.outputs if name), "")
    result_kind = peer_list_ops.result_type(node.op_type, known)
    if result_kind is None and output and not any(known[index] for index in reads):
        result_kind = _told(kind_of(output))  # only the output is known, and determines the inputs
    source = next((kind for kind, result in results.items() if result is result_kind), None)
    for index, name in enumerate(node.inputs):
        if not name:
            continue
        if index not in reads:
            yield name, types.TENSOR_INT64
        elif source is not None:
            yield name, source
    if output and result_kind is not None:
        yield output, result_kind


def refusal(node: OpNode, kind_of: KindOf) -> str | None:
    """Describe a wrong type at the data inputs of an op on peers; None if there is none."""
    known = [_told(kind_of(name)) if name else None for name in node.inputs]
    reads = peer_list_ops.data_inputs(node.op_type, len(known))
    names = list(dict.fromkeys(kind.name for i in reads if (kind := known[i]) is not None))
    if not names or peer_list_ops.result_type(node.op_type, known) is not None:
        return None
    takes = peer_list_ops.accepted(node.op_type)
    return f"{node.op_type} takes {takes} (one kind of them), and reads {' and '.join(names)}"


def _told(kind: TypeNode | None) -> TypeNode | None:
    return None if kind is types.ANY else kind


def _data_values(node: OpNode) -> Iterator[str]:
    for index in peer_list_ops.data_inputs(node.op_type, len(node.inputs)):
        if node.inputs[index]:
            yield node.inputs[index]
    yield from filter(None, node.outputs[:1])
