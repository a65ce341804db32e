"""Copies of a model without its large tensors, for code that needs ops and shapes alone.

Rule: a protobuf keeps all of its memory while any part of it is in use, and ONNX's checker,
converter and shape inference copy their input; so weights are removed before, and a graph that
outlives them is a copy that never contained them.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from bbnode.ir.pieces import Content, InMemory

# Sizes, axes and scales, which conversion and inference read, are smaller by far.
_LARGE_BYTES = 1 << 16
# Bytes of one element in `raw_data`.
_BYTES_OF_ELEM: dict[int, int] = {
    TensorProto.FLOAT: 4, TensorProto.DOUBLE: 8, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2,
    TensorProto.INT8: 1, TensorProto.UINT8: 1, TensorProto.INT16: 2, TensorProto.UINT16: 2,
    TensorProto.INT32: 4, TensorProto.UINT32: 4, TensorProto.INT64: 8, TensorProto.UINT64: 8,
}  # fmt: skip
# Fields with a tensor's values, or with what tells where they are, that stand beside `raw_data`.
_ELSEWHERE = (
    "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data",
    "external_data",
)  # fmt: skip


# Numbers of fields in onnx.proto, and how protobuf writes a field.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose values stay at their source and are read on demand.

    Attributes:
        described: name, element type, dimensions and notes; no values.
        source: what they are read from.
        start: their place in it; there are as many bytes as the tensor declares.
    """

    described: TensorProto
    source: Content
    start: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values, little-endian as ONNX has them."""
        return helper.tensor_dtype_to_np_dtype(self.described.data_type)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return tuple(self.described.dims)

    def array(self) -> npt.NDArray[Any]:
        """Return the values, which are those of the caller, or read anew. Raises NotRead."""
        size = self.dtype.itemsize * math.prod(self.shape)
        if isinstance(self.source, InMemory) and sys.byteorder == "little":
            data = self.source.read(self.start, self.start + size)
            return np.frombuffer(data, self.dtype).reshape(self.shape)
        # In pages of its own, which are freed with the array; a heap might keep them.
        values = np.frombuffer(mmap.mmap(-1, size), self.dtype).reshape(self.shape)
        self.read_into(values)
        return values

    def read_into(self, place: npt.NDArray[Any]) -> None:
        """Fill a dense array of the same size; cast the values if it has another dtype.

        Raises NotRead.
        """
        if place.dtype != self.dtype:
            place[...] = self.array()
            return
        self.source.read_into(self.start, place.reshape(-1).view(np.uint8).data)
        if sys.byteorder == "big":
            place.byteswap(inplace=True)

    def whole(self) -> TensorProto:
        """Return the tensor with its values. Raises NotRead."""
        made = copied(self.described)
        size = self.dtype.itemsize * math.prod(self.shape)
        made.raw_data = bytes(self.source.read(self.start, self.start + size))
        return made


def parted(content: Content) -> tuple[ModelProto, dict[str, StoredTensor]]:
    """Return a model whose large initializers have no values, and these tensors by name.

    None is apart where `content` is written in an unusual way; then it is read whole.

    Raises google.protobuf.message.DecodeError, NotRead.
    """
    large: dict[str, StoredTensor] = {}
    try:
        light = b"".join(_light_model(content, large))
    except ValueError:
        return _whole(content), {}
    model = ModelProto.FromString(light)
    times = Counter(tensor.name for tensor in model.graph.initializer)
    if any(times[name] > 1 for name in large):
        return _whole(content), {}
    return model, large


def _whole(content: Content) -> ModelProto:
    return ModelProto.FromString(content.read(0, content.size))  # type: ignore[arg-type]


def _light_model(content: Content, large: dict[str, StoredTensor]) -> Iterator[Any]:
    """Yield the bytes of a model without the values of its large initializers, put into `large`."""
    graphs = kept = 0
    for number, at, start, end in _fields(content, 0, content.size):
        if number != _GRAPH:
            continue
        graphs += 1
        if graphs > 1:
            raise ValueError("graphs that are to be merged")
        yield content.read(kept, at)
        yield from _counted(_GRAPH, _light_graph(content, start, end, large))
        kept = end
    yield content.read(kept, content.size)


def _light_graph(
    content: Content, start: int, end: int, large: dict[str, StoredTensor]
) -> Iterator[Any]:
    kept = start
    for number, at, first, last in _fields(content, start, end):
        if number != _INITIALIZER or last - first < _LARGE_BYTES:
            continue
        data = [field for field in _fields(content, first, last) if field[0] == _RAW_DATA]
        if len(data) != 1 or data[0][3] - data[0][2] < _LARGE_BYTES:
            continue
        _, raw_at, raw_start, raw_end = data[0]
        around = b"".join((content.read(first, raw_at), content.read(raw_end, last)))
        tensor = TensorProto.FromString(around)
        if not is_whole(tensor, raw_end - raw_start):
            continue
        if tensor.name in large:
            raise ValueError("two tensors of one name")
        large[tensor.name] = StoredTensor(tensor, content, raw_start)
        yield content.read(kept, at)
        yield from _counted(_INITIALIZER, [around])
        kept = last
    yield content.read(kept, end)


def _counted(number: int, parts: Iterable[Any]) -> Iterator[Any]:
    """Yield a field that holds these bytes."""
    parts = list(parts)
    yield bytes([number << 3 | _COUNTED])
    rest = sum(map(len, parts))
    while rest > 0x7F:
        yield bytes([rest & 0x7F | 0x80])
        rest >>= 7
    yield bytes([rest])
    yield from parts


def _fields(content: Content, at: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, place, place of the content, and end of each field of a message.

    The message stands from `at` to `size`. ValueError for what is no such field, or ends too early.
    """
    while at < size:
        key, start = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, end = _varint(content, start)
        elif kind == _EIGHT_BYTES:
            end = start + 8
        elif kind == _FOUR_BYTES:
            end = start + 4
        elif kind == _COUNTED:
            length, start = _varint(content, start)
            end = start + length
        else:
            raise ValueError(f"a field of kind {kind}")
        if not number or end > size:
            raise ValueError("a field that ends too late")
        yield number, at, start, end
        at = end


def _varint(content: Content, at: int) -> tuple[int, int]:
    """Return a varint and the offset of its end."""
    value = 0
    for index, byte in enumerate(content.glance(at, _MAX_VARINT_BYTES)):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number without an end")


def without_weights(
    model: ModelProto, apart: Container[str] = ()
) -> tuple[ModelProto, dict[str, TensorProto]]:
    """Return a copy whose large initializers are inputs, and these tensors of the model by name.

    `apart` names those of which the model has no values.
    """
    large: dict[str, TensorProto] = {}
    small = []
    times = Counter(tensor.name for tensor in model.graph.initializer)
    for tensor in model.graph.initializer:
        outside = tensor.data_location == TensorProto.EXTERNAL
        # ONNX's checker refuses duplicate names.
        if outside or times[tensor.name] > 1 or not (tensor.name in apart or is_large(tensor)):
            small.append(tensor)
        else:
            large[tensor.name] = tensor
    light = _with_initializers(model, small)
    fed = {port.name for port in light.graph.input}
    light.graph.input.extend(
        helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        for name, tensor in large.items()
        if name not in fed
    )
    return light, large


def is_large(tensor: TensorProto) -> bool:
    """Return True for a tensor that declares much; what it has is encoded to be counted."""
    size = _BYTES_OF_ELEM.get(tensor.data_type)
    declared = tensor.ByteSize() if size is None else size * math.prod(tensor.dims)
    return declared >= _LARGE_BYTES


def is_whole(tensor: TensorProto, raw_bytes: int | None = None) -> bool:
    """Return True if `raw_data`, and nothing else, holds just as many values as a tensor declares.

    ONNX's checker has nothing against such a tensor; it copies it twice to find that out. False
    says nothing. `raw_bytes` is the size of `raw_data` where that is elsewhere.
    """
    size = _BYTES_OF_ELEM.get(tensor.data_type)
    return (
        size is not None
        and all(dim >= 0 for dim in tensor.dims)
        and (len(tensor.raw_data) if raw_bytes is None else raw_bytes)
        == size * math.prod(tensor.dims)
        and tensor.data_location == TensorProto.DEFAULT
        and not tensor.HasField("segment")
        and not any(getattr(tensor, name) for name in _ELSEWHERE)
    )


def without_values(model: ModelProto, names: Container[str]) -> ModelProto:
    """Return a copy in which the initializers of these names have no values."""
    return _with_initializers(
        model,
        (described(each) if each.name in names else each for each in model.graph.initializer),
    )


def described(tensor: TensorProto) -> TensorProto:
    """Return name, element type and dimensions of a tensor, without its values."""
    made = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.doc_string:
        made.doc_string = tensor.doc_string
    made.metadata_props.extend(tensor.metadata_props)
    return made


def copied(tensor: TensorProto) -> TensorProto:
    """Return a copy of a tensor that keeps nothing else of its model in memory."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    return copy


def _with_initializers(model: ModelProto, tensors: Iterable[TensorProto]) -> ModelProto:
    made = ModelProto()
    _copy(model, made, but="graph")
    _copy(model.graph, made.graph, but="initializer")
    made.graph.initializer.extend(tensors)
    return made


def _copy(given: Any, made: Any, *, but: str) -> None:
    """Copy all fields of a message but one."""
    for field, value in given.ListFields():
        if field.name != but:
            copy_field(field.name, value, made)


def copy_field(name: str, value: Any, into: Any) -> None:
    """Copy the value of a field into a message where it is empty."""
    if hasattr(value, "extend"):
        getattr(into, name).extend(value)
    elif hasattr(value, "CopyFrom"):
        getattr(into, name).CopyFrom(value)
    else:
        setattr(into, name, value)
