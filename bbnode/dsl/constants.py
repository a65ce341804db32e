"""Values that ride in the program itself.

Rule: tensors are TensorProtos; every other carrier is its type's id, a NUL, and the payload
that would also travel over the wire.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from bbnode.dsl.attributes import WrongKind, tensor_proto
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


def _tensor(value: Any) -> tuple[AttributeProto, TypeNode]:
    tensor = tensor_proto(value)
    node = types.TENSOR_BY_ELEM.get(tensor.data_type)
    if node is None:
        name = TensorProto.DataType.Name(tensor.data_type)
        raise WrongKind(f"a tensor of numbers or bools, not of {name}")
    return onnx.helper.make_attribute(ATTRIBUTE, tensor), node
