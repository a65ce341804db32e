"""How values become payload bytes and come back.

Rule: one strict codec per leaf type, found by wire hash. Encoding yields a list of
buffers so that a tensor is not copied here; decoding slices the input, and a tensor is
a read-only numpy view of it. Everything is bounded before anything is allocated:
children, depth, dimensions and lengths. msgpack carries scalars, without ext types.

Layouts (integers little-endian):
  tensor     u8 element type (onnx), u8 ndim, 6 zero bytes, ndim x u64 dims, raw bytes
  composite  u32 count, count x (u64 type hash, u64 length), bodies
  the rest   one msgpack object
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from bbnode.ir import types, values
from bbnode.ir.address import address_from_bytes
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

Buffer = bytes | memoryview

MAX_NDIM = 32  # numpy's own bound was 32 for decades; ONNX sets none
MAX_CHILDREN = 65_536  # of a composite: a cohort's answers travel in one
MAX_DEPTH = 16  # composites in composites
MAX_METADATA_ITEMS = 256
MAX_SCALAR_BYTES = 1 << 20  # one msgpack carrier; FACTS: one app event is 1 MiB at most
MAX_LIST_ITEMS = 65_536

# Copying so few bytes takes less time than making a view of them.
SMALL_BYTES = 512

_TENSOR_HEADER = struct.Struct("<BB6x")
_DIMENSIONS = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(MAX_NDIM + 1))
_HOST_IS_LITTLE = sys.byteorder == "little"
_COUNT = struct.Struct("<I")
_CHILD = struct.Struct("<QQ")


def encode_parts(value: Value, node: TypeNode | None = None) -> list[Buffer]:
    """The payload of `value` as buffers to be written one after the other.

    What is larger than SMALL_BYTES is not copied. `node`: its type, for who knows it.
    """
    parts: list[Buffer] = []
    _encode_into(value, values.type_of(value) if node is None else node, parts, 0)
    return parts


def encode_value(value: Value) -> bytes:
    """The payload of `value` as one bytes object (one copy)."""
    return b"".join(encode_parts(value))


def decode_value(node: TypeNode, payload: Buffer) -> Value:
    """Decode a payload of the leaf type `node`; tensors are views of `payload`.

    Raises DecodeError for anything that is not exactly one well-formed value.
    """
    return _decode(node, memoryview(payload), 0)


def register_codec(
    node: TypeNode,
    encode: Callable[[Any], list[Buffer]],
    decode: Callable[[memoryview], Any],
) -> None:
    """Add the codec of a leaf type that third parties registered."""
    _ENCODERS[node.id] = encode
    _DECODERS[node.id] = decode


def _encode_into(value: Value, node: TypeNode, parts: list[Buffer], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise DecodeError(f"composites nest deeper than {MAX_DEPTH}; flatten the value")
    if node.kind is TypeKind.TENSOR:
        parts.extend(_encode_tensor(np.asarray(value), node))
    elif node is types.COMPOSITE:
        _encode_children(list(value), parts, depth)
    elif node is types.RESPONSE_BATCH:
        head = Metadata(
            peers=msgpack.packb([p.to_bytes() for p, _ in value.responses]),
            missing=msgpack.packb([p.to_bytes() for p in value.missing]),
        )
        _encode_children([head, *(v for _, v in value.responses)], parts, depth)
    else:
        encoder = _ENCODERS.get(node.id)
        if encoder is None:
            raise DecodeError(f"no codec for {node.id}; add one with register_codec")
        parts.extend(encoder(value))


def _encode_children(children: Sequence[Value], parts: list[Buffer], depth: int) -> None:
    table = [_COUNT.pack(len(children))]
    bodies: list[Buffer] = []
    for child in children:
        node = values.type_of(child)
        start = len(bodies)
        _encode_into(child, node, bodies, depth + 1)
        size = sum(len(part) for part in bodies[start:])
        table.append(_CHILD.pack(node.wire_hash, size))
    parts.append(b"".join(table))
    parts.extend(bodies)


def _decode(node: TypeNode, view: memoryview, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise DecodeError(f"composites nest deeper than {MAX_DEPTH}")
    if node.kind is TypeKind.TENSOR:
        return _decode_tensor(node, view)
    if node is types.COMPOSITE:
        return Composite(_decode_children(view, depth))
    if node is types.RESPONSE_BATCH:
        return _decode_response_batch(_decode_children(view, depth))
    decoder = _DECODERS.get(node.id)
    if decoder is None:
        raise DecodeError(f"no codec for {node.id}")
    try:
        return decoder(view)
    except DecodeError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"payload of {len(view)} bytes is no {node.name}: {error}") from error


def _encode_tensor(array: np.ndarray[Any, Any], node: TypeNode) -> list[Buffer]:
    shape = array.shape
    ndim = len(shape)
    header = _TENSOR_HEADER.pack(node.elem_type, ndim) + _DIMENSIONS[ndim].pack(*shape)
    if array.nbytes <= SMALL_BYTES and _HOST_IS_LITTLE and array.dtype.isnative:
        return [header + array.tobytes()]
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dense = np.ascontiguousarray(little)
    return [header, dense.reshape(-1).view(np.uint8).data]


def _decode_tensor(node: TypeNode, view: memoryview) -> np.ndarray[Any, Any]:
    size = len(view)
    if size < _TENSOR_HEADER.size:
        raise DecodeError(f"a tensor payload of {size} bytes has no header")
    elem, ndim = _TENSOR_HEADER.unpack_from(view)
    if elem != node.elem_type:
        raise DecodeError(f"tensor of element type {elem} where {node.name} was announced")
    start = _TENSOR_HEADER.size + 8 * ndim
    if ndim > MAX_NDIM or size < start:
        raise DecodeError(f"tensor header announces {ndim} dimensions")
    shape = _DIMENSIONS[ndim].unpack_from(view, _TENSOR_HEADER.size)
    dtype = values.dtype_of(node)
    if math.prod(shape) * dtype.itemsize != size - start:
        raise DecodeError(f"tensor shape {list(shape)} does not fit its {size - start} bytes")
    little = dtype if _HOST_IS_LITTLE else dtype.newbyteorder("<")
    try:
        array: np.ndarray[Any, Any] = np.ndarray(shape, little, view, start)
    except (ValueError, OverflowError) as error:  # of dimensions beside one that is 0
        raise DecodeError(f"tensor shape {list(shape)} is beyond what an array has") from error
    if node is types.TENSOR_BOOL and bool((array.view(np.uint8) > 1).any()):
        raise DecodeError("a bool tensor holds bytes other than 0 and 1")
    if not _HOST_IS_LITTLE:
        array = array.astype(dtype)
    if not view.readonly:
        array.flags.writeable = False
    return array


def _decode_children(view: memoryview, depth: int) -> list[Value]:
    if len(view) < _COUNT.size:
        raise DecodeError("a composite payload has no count")
    (count,) = _COUNT.unpack_from(view)
    offset = _COUNT.size + count * _CHILD.size
    if count > MAX_CHILDREN or len(view) < offset:
        raise DecodeError(f"a composite announces {count} children in {len(view)} bytes")
    children = []
    for index in range(count):
        type_hash, size = _CHILD.unpack_from(view, _COUNT.size + index * _CHILD.size)
        node = types.type_by_hash(type_hash)
        if node is None:
            raise DecodeError(f"child {index} of a composite has unknown type {type_hash:#018x}")
        if size > len(view) - offset:
            raise DecodeError(f"child {index} of a composite is cut short")
        children.append(_decode(node, view[offset : offset + size], depth + 1))
        offset += size
    if offset != len(view):
        raise DecodeError(f"{len(view) - offset} bytes after the last child of a composite")
    return children


def _decode_response_batch(children: list[Value]) -> ResponseBatch:
    head = children[0] if children else None
    if not isinstance(head, Metadata) or set(head) != {"peers", "missing"}:
        raise DecodeError("a response batch has no head")
    peers = _peer_list(_unpack(memoryview(_need_bytes(head["peers"]))))
    missing = _peer_list(_unpack(memoryview(_need_bytes(head["missing"]))))
    if len(peers) != len(children) - 1:
        raise DecodeError("a response batch has not one answer per peer")
    return ResponseBatch(
        responses=tuple(zip(peers, children[1:], strict=True)), missing=tuple(missing)
    )


def _unpack(view: memoryview) -> Any:
    if len(view) > MAX_SCALAR_BYTES:
        raise DecodeError(f"a scalar payload of {len(view)} bytes; at most {MAX_SCALAR_BYTES}")
    return msgpack.unpackb(
        view,
        raw=False,
        strict_map_key=True,
        max_ext_len=0,
        max_array_len=MAX_LIST_ITEMS,
        max_map_len=MAX_METADATA_ITEMS,
    )


def _need_bytes(item: Any) -> bytes:
    if not isinstance(item, bytes):
        raise DecodeError(f"expected bytes, got {type(item).__name__}")
    return item


def _need_u64(item: Any) -> int:
    if type(item) is not int or not 0 <= item < 1 << 64:
        raise DecodeError(f"expected an unsigned 64-bit integer, got {item!r:.40}")
    return item


def _need_list(item: Any) -> list[Any]:
    if not isinstance(item, list):
        raise DecodeError(f"expected a list, got {type(item).__name__}")
    return item


def _peer_list(item: Any) -> list[PeerId]:
    return [PeerId.from_bytes(_need_bytes(raw)) for raw in _need_list(item)]


def _metadata(item: Any) -> Metadata:
    if not isinstance(item, dict) or not all(
        isinstance(v, bool | int | float | str | bytes) for v in item.values()
    ):
        raise DecodeError("metadata is not a map of scalars")
    return Metadata(item)


def _search_results(item: Any) -> values.SearchResults:
    pairs = [_need_list(pair) for pair in _need_list(item)]
    if any(len(pair) != 2 or not isinstance(pair[1], float) for pair in pairs):
        raise DecodeError("search results are not (id, distance) pairs")
    return values.SearchResults((_need_u64(pair[0]), pair[1]) for pair in pairs)


def _trigger(view: memoryview) -> values.Trigger:
    if len(view):
        raise DecodeError(f"a trigger carries no payload, got {len(view)} bytes")
    return values.TRIGGER


_ENCODERS: dict[str, Callable[[Any], list[Buffer]]] = {
    types.TRIGGER.id: lambda _: [],
    types.BYTES.id: lambda v: [v],
    types.PEER_ID.id: lambda v: [v.to_bytes()],
    types.MULTIADDRESS.id: lambda v: [v.to_bytes()],
    types.PEER_ID_VEC.id: lambda v: [msgpack.packb([p.to_bytes() for p in v])],
    types.ADDRESS_VEC.id: lambda v: [msgpack.packb([a.to_bytes() for a in v])],
    types.METADATA.id: lambda v: [msgpack.packb(dict(v))],
    types.SEARCH_RESULTS.id: lambda v: [msgpack.packb([[i, d] for i, d in v])],
}
_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    types.TRIGGER.id: _trigger,
    types.BYTES.id: bytes,
    types.PEER_ID.id: lambda view: PeerId.from_bytes(bytes(view)),
    types.MULTIADDRESS.id: lambda view: address_from_bytes(bytes(view)),
    types.PEER_ID_VEC.id: lambda view: values.PeerIdVec(_peer_list(_unpack(view))),
    types.ADDRESS_VEC.id: lambda view: values.AddressVec(
        address_from_bytes(_need_bytes(raw)) for raw in _need_list(_unpack(view))
    ),
    types.METADATA.id: lambda view: _metadata(_unpack(view)),
    types.SEARCH_RESULTS.id: lambda view: _search_results(_unpack(view)),
}


def _register_integers() -> None:
    for cls in (
        values.U64, values.RequestId, values.WireRequestId, values.CommandId,
        values.Timestamp, values.EventKind, values.CorrelationToken,
    ):  # fmt: skip
        node = values.type_of(cls(0))
        _ENCODERS[node.id] = lambda v: [msgpack.packb(int(v))]
        _DECODERS[node.id] = lambda view, cls=cls: cls(_need_u64(_unpack(view)))  # type: ignore[misc]


_register_integers()
