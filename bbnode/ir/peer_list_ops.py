"""The `ai.onnx` ops that also work on lists of peers and of addresses.

Rule: a list is a 1-d array of its elements, an element a scalar; the six ops below mean on them
what ONNX says they mean on such arrays. They have no backend: the engine runs them. The type of
a result never depends on a value: `Gather` takes a 1-d index and gives a list, and `Squeeze` is
the way from a list of one to its element.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.ir import types
from bbnode.ir.types import TypeNode

# List -> element.
ELEMENT_OF = {types.PEER_ID_VEC: types.PEER_ID, types.ADDRESS_VEC: types.MULTIADDRESS}
LIST_OF = {element: whole for whole, element in ELEMENT_OF.items()}

IDENTITY = "Identity"
SLICE = "Slice"
GATHER = "Gather"
CONCAT = "Concat"
SQUEEZE = "Squeeze"
UNSQUEEZE = "Unsqueeze"

_FROM_LIST = {list_type: list_type for list_type in ELEMENT_OF}
# Op -> type of its data input -> type of its output.
RESULT_TYPES: dict[str, dict[TypeNode, TypeNode]] = {
    IDENTITY: {kind: kind for kind in (*ELEMENT_OF, *LIST_OF)},
    SLICE: _FROM_LIST,
    GATHER: _FROM_LIST,
    CONCAT: _FROM_LIST,
    SQUEEZE: ELEMENT_OF,
    UNSQUEEZE: LIST_OF,
}


def data_inputs(op_type: str, count: int) -> range:
    """Return the positions of inputs that hold peers or addresses: all of Concat, else the first.

    Args:
        op_type: one of `RESULT_TYPES`.
        count: how many inputs the op has. The others are int64 tensors.
    """
    return range(count) if op_type == CONCAT else range(min(count, 1))


def is_peer_list_op(op_type: str, inputs: Sequence[TypeNode | None]) -> bool:
    """Return True if an `ai.onnx` op with inputs of these types (None: unknown) is one of ours.

    It is when any of its data inputs is a list or an element; `result_type` may still refuse it.
    """
    if op_type not in RESULT_TYPES:
        return False
    return any(
        inputs[index] in ELEMENT_OF or inputs[index] in LIST_OF
        for index in data_inputs(op_type, len(inputs))
    )


def result_type(op_type: str, inputs: Sequence[TypeNode | None]) -> TypeNode | None:
    """Return the type of the one output, or None when the op can't take data inputs of these types.

    Unknown types (None) are passed over: what is known decides.
    """
    known = {inputs[index] for index in data_inputs(op_type, len(inputs))} - {None}
    if len(known) != 1:
        return None
    (kind,) = known
    return None if kind is None else RESULT_TYPES.get(op_type, {}).get(kind)


def accepted(op_type: str) -> str:
    """Return the types that the data inputs may have, for a message."""
    return " or ".join(kind.name for kind in RESULT_TYPES[op_type])
