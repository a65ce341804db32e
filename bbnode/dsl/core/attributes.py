"""Checked attributes of recorded nodes, and constants that a program holds as attributes.

Rule: an attribute has the kind that the op's table or schema demands, and a value of another
kind is refused, not converted. Equal values give equal bytes. A constant tensor is a tensor; every
other carrier is its type's id, a NUL, and the payload that would also travel over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto, helper, numpy_helper

from bbnode.ir import codec, types, values
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.graph import Attribute, AttributeKind, Subgraph, Tensor, ValueType
from bbnode.ir.onnx_file import subgraph_of, type_of
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeKind, TypeNode

# Scalars of an `ai.bytesandbrains.*` attribute, by the Python type of the value.
_KIND_NAMES = {int: "an integer", str: "text", float: "a number", bytes: "bytes"}

# Minima of required integer attributes, whose kind no default in the op table reveals.
INTEGERS = {
    "n": 1, "period_ns": 1, "kind": 0, "delay_ns": 0, "duration_ns": 0, "phase": 1, "fanout": 1,
    "delta": None, "k": 1, "epochs": 1, "batch": 1, "quorum": 0, "deadline_ns": 0,
    "child_count": 0,
}  # fmt: skip
TEXTS = frozenset({"name", "queue", "slot", "group", "mode", "to"})

CONSTANT_ATTRIBUTE = "value"  # the attribute of `syscall.Constant`

_INT64 = range(-(1 << 63), 1 << 63)

_K = AttributeKind  # its numbers are those of the schemas
_LISTS = {_K.INTS: _K.INT, _K.FLOATS: _K.FLOAT, _K.STRINGS: _K.STRING}
_EXPECTED = {
    _K.INT: "an integer", _K.FLOAT: "a number", _K.STRING: "text", _K.TENSOR: "an array",
    _K.GRAPH: "an onnx.GraphProto", _K.TYPE_PROTO: "an onnx.TypeProto or a type",
    _K.INTS: "a list of integers", _K.FLOATS: "a list of numbers", _K.STRINGS: "a list of texts",
    _K.SPARSE_TENSOR: "an onnx.SparseTensorProto",
}  # fmt: skip


class WrongKind(ValueError):
    """An attribute's value does not fit; the message describes the values that do."""


def table_attribute(name: str, value: Any, default: Any) -> Attribute:
    """Return an attribute of an op in the op table; its `default`, if any, determines its kind.

    Raises WrongKind.
    """
    if name in INTEGERS or (type(default) is int):
        _need(value, int)
        least = INTEGERS.get(name)
        if least is not None and type(default) is int:
            least = min(least, default)  # Select has n=0 if it draws nothing
        if value not in _INT64 or (least is not None and value < least):
            raise WrongKind(f"an integer{'' if least is None else f' of at least {least}'}")
    elif name in TEXTS or isinstance(default, str):
        _need(value, str)
        if name in ("name", "queue", "slot") and not value:
            raise WrongKind("text that is not empty")
    elif type(value) not in _KIND_NAMES:
        raise WrongKind("an integer, a number, text or bytes")
    return Attribute.of(value)


def _need(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise WrongKind(_KIND_NAMES[kind])


def schema_attribute(value: Any, kind: AttributeKind) -> Attribute:
    """Return an attribute of the kind that an op's schema demands.

    numpy scalars and arrays are accepted as numbers and tensors, and a tensor type as an element
    type (`to=types.TENSOR_FLOAT`). Raises WrongKind.
    """
    expected = _EXPECTED.get(kind, "another kind of value")
    if kind not in _LISTS:
        return _scalar(value, kind, expected)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise WrongKind(expected)
    items = tuple(_scalar(item, _LISTS[kind], expected).value for item in value)
    return Attribute(kind, items)


def _scalar(value: Any, kind: AttributeKind, expected: str) -> Attribute:
    converted: Any = None
    if kind is _K.INT:
        if isinstance(value, TypeNode) and value.kind is TypeKind.TENSOR:
            converted = value.elem_type
        elif isinstance(value, int | np.integer) and int(value) in _INT64:
            converted = int(value)
    elif kind is _K.FLOAT:
        if isinstance(value, int | float | np.integer | np.floating) and value is not True:
            converted = float(value)
    elif kind is _K.TENSOR:
        converted = tensor_of(value, expected)
    elif kind is _K.GRAPH:
        converted = subgraph_of(value) if isinstance(value, GraphProto) else value
    elif kind is _K.TYPE_PROTO:
        converted = type_of(value) if isinstance(value, TypeProto) else value
        converted = ValueType.of(converted) if isinstance(converted, TypeNode) else converted
    else:
        converted = value
    if not isinstance(converted, _TAKEN.get(kind, ())):
        raise WrongKind(expected)
    return Attribute.of(converted)


_TAKEN: dict[AttributeKind, Any] = {
    _K.INT: int, _K.FLOAT: float, _K.STRING: str | bytes, _K.TENSOR: Tensor, _K.GRAPH: Subgraph,
    _K.TYPE_PROTO: ValueType, _K.SPARSE_TENSOR: SparseTensorProto,
}  # fmt: skip


def tensor_of(value: Any, expected: str = "an array") -> Tensor:
    """Return a tensor of an array, a scalar, or a list of numbers. Raises WrongKind.

    Python floats become float32 (what models compute in), ints int64, bools bool.
    """
    if isinstance(value, TensorProto):
        return Tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of unequal lengths
            raise WrongKind(f"{expected} ({error})") from error
        if array.dtype.kind == "U":
            array = array.astype(object)
        elif array.dtype == np.float64:
            array = array.astype(np.float32)
        elif array.dtype.kind == "i":
            array = array.astype(np.int64)
    if elem_type_of(array) is None:
        raise WrongKind(f"{expected} of numbers, bools or texts, not of dtype {array.dtype}")
    return Tensor.of(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


def elem_type_of(array: np.ndarray[Any, Any]) -> TypeNode | None:
    """Return the tensor type of an array, or None if its dtype has none."""
    if array.dtype.kind in "OU":
        return types.TENSOR_STRING if values.is_text(array) else None
    try:
        elem = helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
    except (KeyError, ValueError, TypeError):
        return None
    return types.TENSOR_BY_ELEM.get(elem)


def tensor_type(kind: object) -> TypeNode | None:
    """Return the tensor type that a type or an ONNX data type names, or None."""
    if isinstance(kind, TypeNode):
        return kind if kind.kind is TypeKind.TENSOR else None
    return types.TENSOR_BY_ELEM.get(kind) if isinstance(kind, int) else None


# --- constants -----------------------------------------------------------------------------


def constant_attribute(value: Any) -> tuple[Attribute, TypeNode]:
    """Return the attribute of a `syscall.Constant` and the type of the value that it emits.

    Takes arrays, numbers, bools and lists of them (tensors), PeerIds and lists of them,
    multiaddrs, and every registered carrier. Raises WrongKind.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(v, PeerId) for v in value):
        value = values.PeerIdVec(value)
    is_tensor = isinstance(value, TensorProto | np.ndarray | np.generic | bool | float | list)
    if is_tensor or type(value) in (
        int,
        tuple,
    ):  # `type`, since U64 derives from int and PeerIdVec from tuple
        tensor = tensor_of(value)
        kind = types.TENSOR_BY_ELEM.get(tensor.elem_type)
        if kind is None:
            name = TensorProto.DataType.Name(tensor.elem_type)
            raise WrongKind(f"a tensor of numbers or bools, not of {name}")
        return Attribute.of(tensor), kind
    try:
        node = values.type_of(value)
        payload = codec.encode_value(value)
        codec.decode_value(node, payload)  # refuse values that every peer would refuse
    except (AuthorError, DecodeError, ValueError, TypeError, OverflowError) as error:
        raise WrongKind(f"a tensor, a PeerId, a multiaddr or another carrier ({error})") from error
    return Attribute.of(node.id.encode() + b"\0" + payload), node


def typed_array(value: Any, kind: TypeNode) -> np.ndarray[Any, Any]:
    """Return numbers as an array of a tensor type; floats may be rounded, nothing else changes.

    Raises WrongKind if the values are not numbers, or the type cannot hold them.
    """
    try:
        source = (
            numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
        )
    except ValueError as error:  # lists of unequal lengths
        raise WrongKind(f"an array ({error})") from error
    if elem_type_of(source) in (None, types.TENSOR_STRING) or kind is types.TENSOR_STRING:
        raise WrongKind(f"an array of numbers or bools, not of dtype {source.dtype}")
    with np.errstate(all="ignore"):  # values that do not fit are detected below
        cast = source.astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if source.dtype.kind in "biu" or cast.dtype.kind in "biu":
            fits = np.array_equal(cast.astype(source.dtype), source)
        else:
            fits = np.array_equal(np.isfinite(cast), np.isfinite(source))
    if not fits:
        raise WrongKind("numbers that the type holds; choose a wider one")
    return cast
