"""Attributes of recorded nodes, checked, and values that ride in a program as attributes.

Rule: an attribute has the kind that the op's table or schema demands, and a value of another
kind is refused rather than bent. Equal values make equal bytes. A constant tensor is a
TensorProto; every other carrier is its type's id, a NUL, and the payload that would also travel
over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.defs import OpSchema

from bbnode.ir import codec, types, values
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeKind, TypeNode

# Scalars of an `ai.bytesandbrains.*` attribute, by the Python type of the value.
_KIND_NAMES = {int: "an integer", str: "text", float: "a number", bytes: "bytes"}

# Least values of integer attributes; the op table names no default to tell the kind from.
INTEGERS = {
    "n": 1, "period_ns": 1, "kind": 0, "delay_ns": 0, "duration_ns": 0, "phase": 1, "fanout": 1,
    "delta": None, "k": 1, "epochs": 1, "batch": 1, "quorum": 0, "deadline_ns": 0,
    "child_count": 0,
}  # fmt: skip
TEXTS = frozenset({"name", "queue", "slot", "group", "mode", "to"})

CONSTANT_ATTRIBUTE = "value"  # of `syscall.Constant`

_INT64 = range(-(1 << 63), 1 << 63)

_A = OpSchema.AttrType
_LISTS = {_A.INTS: _A.INT, _A.FLOATS: _A.FLOAT, _A.STRINGS: _A.STRING}
_EXPECTED = {
    _A.INT: "an integer", _A.FLOAT: "a number", _A.STRING: "text", _A.TENSOR: "an array",
    _A.GRAPH: "an onnx.GraphProto", _A.TYPE_PROTO: "an onnx.TypeProto or a type",
    _A.INTS: "a list of integers", _A.FLOATS: "a list of numbers", _A.STRINGS: "a list of texts",
    _A.SPARSE_TENSOR: "an onnx.SparseTensorProto",
}  # fmt: skip


class WrongKind(ValueError):
    """An attribute's value does not fit; the text says which values do."""


def table_attribute(name: str, value: Any, default: Any) -> AttributeProto:
    """An attribute of an op of the op table; `default` tells its kind where it has one.

    Raises WrongKind.
    """
    if isinstance(value, AttributeProto):
        return value
    if name in INTEGERS or (type(default) is int):
        _need(value, int)
        least = INTEGERS.get(name)
        if least is not None and type(default) is int:
            least = min(least, default)  # Select has n=0 where it draws nothing
        if value not in _INT64 or (least is not None and value < least):
            raise WrongKind(f"an integer{'' if least is None else f' of at least {least}'}")
    elif name in TEXTS or isinstance(default, str):
        _need(value, str)
        if name in ("name", "queue", "slot") and not value:
            raise WrongKind("text that is not empty")
    elif type(value) not in _KIND_NAMES:
        raise WrongKind("an integer, a number, text or bytes")
    return helper.make_attribute(name, value)


def _need(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise WrongKind(_KIND_NAMES[kind])


def schema_attribute(name: str, value: Any, kind: OpSchema.AttrType) -> AttributeProto:
    """An attribute of an `ai.onnx` op, of the kind its schema gives.

    numpy scalars and arrays are taken where a number or a tensor is due, and a tensor type
    where an element type is (`to=types.TENSOR_FLOAT`). Raises WrongKind.
    """
    if kind in _LISTS:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise WrongKind(_EXPECTED[kind])
        items = [_scalar(item, _LISTS[kind], _EXPECTED[kind]) for item in value]
        return helper.make_attribute(name, items, attr_type=_PROTO_TYPE[kind])
    scalar = _scalar(value, kind, _EXPECTED.get(kind, "another kind of value"))
    return helper.make_attribute(name, scalar, attr_type=_PROTO_TYPE[kind])


def _scalar(value: Any, kind: OpSchema.AttrType, expected: str) -> Any:
    if kind is _A.INT:
        if isinstance(value, TypeNode) and value.kind is TypeKind.TENSOR:
            return value.elem_type
        if isinstance(value, int | np.integer) and int(value) in _INT64:
            return int(value)
    elif kind is _A.FLOAT:
        if isinstance(value, int | float | np.integer | np.floating) and value is not True:
            return float(value)
    elif kind is _A.STRING:
        if isinstance(value, str | bytes):
            return value
    elif kind is _A.TENSOR:
        return tensor_proto(value, expected)
    elif kind is _A.GRAPH:
        if isinstance(value, GraphProto):
            return value
    elif kind is _A.SPARSE_TENSOR:
        if isinstance(value, onnx.SparseTensorProto):
            return value
    elif kind is _A.TYPE_PROTO:
        if isinstance(value, TypeProto):
            return value
        if isinstance(value, TypeNode):
            return types.type_to_proto(value)
    raise WrongKind(expected)


_PROTO_TYPE = {
    _A.INT: AttributeProto.INT, _A.FLOAT: AttributeProto.FLOAT, _A.STRING: AttributeProto.STRING,
    _A.TENSOR: AttributeProto.TENSOR, _A.GRAPH: AttributeProto.GRAPH,
    _A.TYPE_PROTO: AttributeProto.TYPE_PROTO, _A.SPARSE_TENSOR: AttributeProto.SPARSE_TENSOR,
    _A.INTS: AttributeProto.INTS, _A.FLOATS: AttributeProto.FLOATS,
    _A.STRINGS: AttributeProto.STRINGS,
}  # fmt: skip


def tensor_proto(value: Any, expected: str = "an array") -> TensorProto:
    """A TensorProto of an array, a scalar, or a list of numbers; WrongKind for anything else.

    Python floats become float32 (what models compute in), ints int64, bools bool.
    """
    if isinstance(value, TensorProto):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of unequal lengths
            raise WrongKind(f"{expected} ({error})") from error
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        elif array.dtype.kind == "i":
            array = array.astype(np.int64)
    if elem_type_of(array) is None:
        raise WrongKind(f"{expected} of numbers or bools, not of dtype {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return numpy_helper.from_array(native)


def elem_type_of(array: np.ndarray[Any, Any]) -> TypeNode | None:
    """The tensor type of an array, or None when such tensors are no values."""
    try:
        elem = helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
    except (KeyError, ValueError, TypeError):
        return None
    return types.TENSOR_BY_ELEM.get(elem)


def tensor_type(given: object) -> TypeNode | None:
    """The tensor type that a type or an ONNX data type names, or None."""
    if isinstance(given, TypeNode):
        return given if given.kind is TypeKind.TENSOR else None
    return types.TENSOR_BY_ELEM.get(given) if isinstance(given, int) else None


# --- constants -----------------------------------------------------------------------------


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
    return helper.make_attribute(CONSTANT_ATTRIBUTE, text), node


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
    return helper.make_attribute(CONSTANT_ATTRIBUTE, tensor), node
