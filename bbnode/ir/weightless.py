"""Copies of a model without its large tensors, for what looks at ops and shapes alone.

Rule: a protobuf keeps all of its memory as long as any part of it is in use, and ONNX's checker,
converter and shape inference copy whatever they are given; so weights are taken away before, and a
graph that outlives them is a copy that never held them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from onnx import ModelProto, TensorProto, helper

# Sizes, axes and scales, which conversion and inference read, are smaller by far.
_LARGE_BYTES = 1 << 16
# Of one element in `raw_data`.
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


def parted(content: bytes) -> tuple[ModelProto, dict[str, TensorProto]]:
    """Return a model whose large initializers have no values, and these tensors by name.

    Each of them is a message of its own, whose memory goes when it goes. None is apart where
    `content` is written in an unusual way.

    Raises google.protobuf.message.DecodeError.
    """
    view = memoryview(content)
    large: dict[str, TensorProto] = {}
    try:
        light = b"".join(_light_model(view, large))
    except ValueError:
        return ModelProto.FromString(content), {}
    model = ModelProto.FromString(light)
    times = Counter(tensor.name for tensor in model.graph.initializer)
    if any(times[name] > 1 for name in large):
        return ModelProto.FromString(content), {}
    return model, large


def _light_model(view: memoryview, large: dict[str, TensorProto]) -> Iterator[Any]:
    """Yield the bytes of a model without the values of its large initializers, put into `large`."""
    graphs = 0
    for number, at, start, end in _fields(view):
        if number != _GRAPH:
            yield view[at:end]
            continue
        graphs += 1
        if graphs > 1:
            raise ValueError("graphs that are to be merged")
        yield from _counted(_GRAPH, _light_graph(view[start:end], large))


def _light_graph(view: memoryview, large: dict[str, TensorProto]) -> Iterator[Any]:
    for number, at, start, end in _fields(view):
        if number != _INITIALIZER or end - start < _LARGE_BYTES:
            yield view[at:end]
            continue
        tensor = view[start:end]
        data = [field for field in _fields(tensor) if field[0] == _RAW_DATA]
        if len(data) != 1 or data[0][3] - data[0][2] < _LARGE_BYTES:
            yield view[at:end]
            continue
        _, raw_at, _, raw_end = data[0]
        whole = TensorProto.FromString(tensor)  # type: ignore[arg-type]  # any buffer will do
        if whole.name in large:
            raise ValueError("two tensors of one name")
        large[whole.name] = whole
        yield from _counted(_INITIALIZER, [tensor[:raw_at], tensor[raw_end:]])


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


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, place, place of the content, and end of each field of a message.

    ValueError for what is no such field, or ends too early.
    """
    at, size = 0, len(view)
    while at < size:
        key, start = _varint(view, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, end = _varint(view, start)
        elif kind == _EIGHT_BYTES:
            end = start + 8
        elif kind == _FOUR_BYTES:
            end = start + 4
        elif kind == _COUNTED:
            length, start = _varint(view, start)
            end = start + length
        else:
            raise ValueError(f"a field of kind {kind}")
        if not number or end > size:
            raise ValueError("a field that ends too late")
        yield number, at, start, end
        at = end


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for index, byte in enumerate(view[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number without an end")


def without_weights(
    model: ModelProto, apart: Mapping[str, TensorProto] | None = None
) -> tuple[ModelProto, dict[str, TensorProto]]:
    """Return a copy whose large initializers are inputs, and these tensors of the model by name.

    `apart` has those of which the model has no values.
    """
    large: dict[str, TensorProto] = {}
    small = []
    times = Counter(tensor.name for tensor in model.graph.initializer)
    for given in model.graph.initializer:
        tensor = (apart or {}).get(given.name, given)
        outside = tensor.data_location == TensorProto.EXTERNAL
        # A name that stands there twice is for ONNX's checker to refuse.
        if outside or times[tensor.name] > 1 or _size(tensor) < _LARGE_BYTES:
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


def is_whole(tensor: TensorProto) -> bool:
    """Return True if `raw_data`, and nothing else, holds just as many values as a tensor declares.

    ONNX's checker has nothing against such a tensor; it copies it twice to find that out. False
    says nothing.
    """
    size = _BYTES_OF_ELEM.get(tensor.data_type)
    return (
        size is not None
        and all(dim >= 0 for dim in tensor.dims)
        and len(tensor.raw_data) == size * math.prod(tensor.dims)
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
    made = TensorProto()
    made.CopyFrom(tensor)
    return made


def _size(tensor: TensorProto) -> int:
    """Return the bytes of what a tensor declares; those it has are encoded to be counted."""
    size = _BYTES_OF_ELEM.get(tensor.data_type)
    return tensor.ByteSize() if size is None else size * math.prod(tensor.dims)


def _with_initializers(model: ModelProto, tensors: Iterable[TensorProto]) -> ModelProto:
    made = ModelProto()
    _copy(model, made, but="graph")
    _copy(model.graph, made.graph, but="initializer")
    made.graph.initializer.extend(tensors)
    return made


def _copy(given: Any, made: Any, *, but: str) -> None:
    """Copy all fields of a message but one."""
    for field, value in given.ListFields():
        if field.name == but:
            continue
        if hasattr(value, "extend"):
            getattr(made, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(made, field.name).CopyFrom(value)
        else:
            setattr(made, field.name, value)
