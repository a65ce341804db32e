"""Values that ride in the program itself.

Rule: tensors are TensorProtos; every other carrier is its type's id, a NUL, and the payload
that would also travel over the wire.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from bbnode.dsl.core.attributes import WrongKind, elem_type_of, tensor_proto
from bbnode.ir import codec, types, values
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode

ATTRIBUTE = "value"


def constant_attribute(value: Any) -> tuple[AttributeProto, TypeNode]:
    """The attribute of a `syscall.Constant` and the type of what it emits.

    Takes arrays, numbers, bools and lists of them (tensors), PeerIds and lists of them,
    multiaddrs, and every registered carrier. Raises WrongKind.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(v, PeerId) for v in value):
        value = values.PeerIdVec(value)
    if isinstance(value, TensorProto | np.ndarray | np.generic | bool | float | list):
        return _tensor(value)
    if type(value) is int or type(value) is tuple:
        return _tensor(value)
    try:
        node = values.type_of(value)
        payload = codec.encode_value(value)
        codec.decode_value(node, payload)  # what no peer would take is refused here
    except (AuthorError, DecodeError, ValueError, TypeError, OverflowError) as error:
        raise WrongKind(f"a tensor, a PeerId, a multiaddr or another carrier ({error})") from error
    text = node.id.encode() + b"\0" + payload
    return onnx.helper.make_attribute(ATTRIBUTE, text), node


def typed_array(value: Any, kind: TypeNode) -> np.ndarray[Any, Any]:
    """Numbers as an array of a tensor type; floats may be rounded, nothing else is changed.

    Raises WrongKind: these are no numbers, or the type does not hold them.
    """
    try:
        given = (
            numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
        )
    except ValueError as error:  # lists of unequal lengths
        raise WrongKind(f"an array ({error})") from error
    if elem_type_of(given) is None:
        raise WrongKind(f"an array of numbers or bools, not of dtype {given.dtype}")
    with np.errstate(all="ignore"):  # what does not fit is found below
        made = given.astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if given.dtype.kind in "biu" or made.dtype.kind in "biu":
            fits = np.array_equal(made.astype(given.dtype), given)
        else:
            fits = np.array_equal(np.isfinite(made), np.isfinite(given))
    if not fits:
        raise WrongKind("numbers that the type holds; choose a wider one")
    return made


def _tensor(value: Any) -> tuple[AttributeProto, TypeNode]:
    tensor = tensor_proto(value)
    node = types.TENSOR_BY_ELEM.get(tensor.data_type)
    if node is None:
        name = TensorProto.DataType.Name(tensor.data_type)
        raise WrongKind(f"a tensor of numbers or bools, not of {name}")
    return onnx.helper.make_attribute(ATTRIBUTE, tensor), node
