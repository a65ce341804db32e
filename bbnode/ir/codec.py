"""Codecs of values: to payload bytes, and back.

Rule: one strict codec per leaf type, looked up by wire hash. Encoding yields a list of buffers, so
that tensors are not copied; decoding slices the input, and a tensor is a read-only numpy view of
it. Everything is bounded before anything is allocated: children, depth, dimensions and lengths, and
the total of values in one payload. msgpack carries scalars, without ext types. Every exception of a
decoder becomes a DecodeError for its caller.

Layouts (integers little-endian):
  tensor     u8 element type (onnx), u8 ndim, 6 zero bytes, ndim x u64 dims, raw bytes (`packing`)
  texts      the head of a tensor, a u32 length for each text, all texts in UTF-8
  sequence   u32 count, count x u64 length, tensors
  optional   u8: 0 for nothing, or 1 and the value
  composite  u32 count, count x (u64 type hash, u64 length), bodies
  others     one msgpack object
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from bbnode.ir import decoding, types, values
from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import (
    MAX_BATCH_REASONS,
    MAX_CHILDREN,
    MAX_COMPOSITE_DEPTH,
    MAX_DIMENSIONS,
    MAX_INTEGER_BYTES,
    MAX_LIST_ITEMS,
    MAX_METADATA_ITEMS,
    MAX_PEER_LIST_BYTES,
    MAX_SCALAR_BYTES,
    MAX_SEARCH_BYTES,
    MAX_TEXTS,
    MAX_VALUES,
)
from bbnode.ir.decoding import Budget, refused, shown
from bbnode.ir.envelope import SMALL_BYTES
from bbnode.ir.errors import DecodeError
from bbnode.ir.packing import packed, unpacked
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import MAX_REFUSAL_BYTES, WireRefusal, refusal_of
from bbnode.ir.types import TypeKind, TypeNode
from bbnode.ir.values import (
    Composite,
    Metadata,
    OptionalValue,
    ResponseBatch,
    TensorSequence,
    Value,
)

Buffer = bytes | memoryview

_TENSOR = TypeKind.TENSOR  # needed for every value: the look-up of an enum member is slower
_new_array = np.ndarray
_TENSOR_HEADER = struct.Struct("<BB6x")
_HEADER_BYTES = _TENSOR_HEADER.size
_DIMENSIONS = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(MAX_DIMENSIONS + 1))
_HOST_IS_LITTLE = sys.byteorder == "little"
# Element types whose arrays equal the wire format, byte for byte.
_AS_ON_THE_WIRE = {
    node.elem_type: values.dtype_of(node)
    for node in types.registered_types()
    if _HOST_IS_LITTLE
    and node.kind is _TENSOR
    and node is not types.TENSOR_STRING
    and node.elem_type not in types.BITS_OF_ELEM
}
# The head of a composite: its number of children, and for each its type and length.
_COUNT = struct.Struct("<I")
_CHILD = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")  # the length of a tensor in a sequence


def encode_parts(value: Value, node: TypeNode | None = None) -> list[Buffer]:
    """Return the payload of `value` as buffers to write one after the other.

    Buffers larger than SMALL_BYTES are not copied. `node` is the value's type, if it is known.
    """
    if node is None:
        node = values.type_of(value)
    if node.elem_type and node.kind is _TENSOR and node is not types.TENSOR_STRING:
        return _encode_tensor(np.asarray(value), node)
    parts: list[Buffer] = []
    _encode_into(value, node, parts, 0)
    return parts


def encode_value(value: Value) -> bytes:
    """Return the payload of `value` as one bytes object (one copy)."""
    return b"".join(encode_parts(value))


def decode_value(node: TypeNode, payload: Buffer, budget: Budget | None = None) -> Value:
    """Decode a payload of the leaf type `node`; tensors are views of `payload`.

    `budget` bounds its content; by default, it is the budget of a payload from a peer. Raises
    DecodeError for anything but exactly one well-formed value within the budget.
    """
    try:
        if node.kind is _TENSOR and node is not types.TENSOR_STRING:
            return _decode_tensor(node, payload)
        return _decode(node, memoryview(payload), 0, Budget() if budget is None else budget)
    except DecodeError:
        raise
    except Exception as error:
        raise refused(f"payload of {len(payload)} bytes is not a {node.name}", error) from error


def register_codec(
    node: TypeNode,
    encode: Callable[[Any], list[Buffer]],
    decode: Callable[[memoryview], Any],
) -> None:
    """Register the codec of a third party's leaf type."""
    _ENCODERS[node.id] = encode
    _DECODERS[node.id] = lambda view, _: decode(view)


def _encode_into(value: Value, node: TypeNode, parts: list[Buffer], depth: int) -> None:
    if depth > MAX_COMPOSITE_DEPTH:
        raise DecodeError(f"composites nest deeper than {MAX_COMPOSITE_DEPTH}; flatten the value")
    if node.kind is _TENSOR:
        made = _encode_texts if node is types.TENSOR_STRING else _encode_tensor
        parts.extend(made(np.asarray(value), node))
    elif node.kind is TypeKind.OPTIONAL and node.element is not None:
        parts.append(b"\0" if value.value is None else b"\1")
        if value.value is not None:
            _encode_into(value.value, node.element, parts, depth + 1)
    elif isinstance(value, TensorSequence):
        _encode_sequence(value, parts, depth)
    elif node is types.COMPOSITE:
        _encode_children(list(value), parts, depth)
    elif node is types.RESPONSE_BATCH:
        head = {
            "peers": msgpack.packb([p.to_bytes() for p, _ in value.responses]),
            "missing": msgpack.packb([p.to_bytes() for p in value.missing]),
        }
        if value.reasons:  # left out if there are none, as nodes of before 0.2 do not know it
            rows = [[peer.to_bytes(), *astuple(why)] for peer, why in value.reasons]
            head["reasons"] = msgpack.packb(rows)
        _encode_children([Metadata(head), *(v for _, v in value.responses)], parts, depth)
    else:
        encoder = _ENCODERS.get(node.id)
        if encoder is None:
            raise DecodeError(f"no codec for {node.id}; add one with register_codec")
        parts.extend(encoder(value))


def _encode_sequence(value: TensorSequence, parts: list[Buffer], depth: int) -> None:
    if len(value) > MAX_CHILDREN:
        raise DecodeError(f"a sequence of {len(value)} tensors; at most {MAX_CHILDREN} travel")
    bodies: list[Buffer] = []
    table = [_COUNT.pack(len(value))]
    for tensor in value.tensors:
        start = len(bodies)
        _encode_into(tensor, values.type_of(tensor), bodies, depth + 1)
        table.append(_LENGTH.pack(sum(len(part) for part in bodies[start:])))
    parts.append(b"".join(table))
    parts.extend(bodies)


def _encode_texts(array: np.ndarray[Any, Any], node: TypeNode) -> list[Buffer]:
    if array.size > MAX_TEXTS:
        raise DecodeError(f"a tensor of {array.size} texts; at most {MAX_TEXTS} travel")
    try:
        texts = [str(text).encode() for text in array.flat]
    except UnicodeEncodeError as error:
        raise DecodeError("a text with half a surrogate pair has no UTF-8; take it out") from error
    shape = array.shape
    head = _tensor_head(node.elem_type, tuple(shape))
    lengths = struct.pack(f"<{len(texts)}I", *map(len, texts))
    return [b"".join((head, lengths, *texts))]


def _encode_children(children: Sequence[Value], parts: list[Buffer], depth: int) -> None:
    if len(children) > MAX_CHILDREN:
        raise DecodeError(f"a composite of {len(children)} values; at most {MAX_CHILDREN} travel")
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


def _decode(node: TypeNode, view: memoryview, depth: int, budget: Budget) -> Value:
    if depth > MAX_COMPOSITE_DEPTH:
        raise DecodeError(f"composites nest deeper than {MAX_COMPOSITE_DEPTH}")
    if node.kind is _TENSOR:
        return (
            _decode_texts(view, budget)
            if node is types.TENSOR_STRING
            else _decode_tensor(node, view)
        )
    if node.kind is TypeKind.OPTIONAL and node.element is not None:
        return _decode_optional(node.element, view, depth, budget)
    if node.kind is TypeKind.SEQUENCE and node.element in types.SEQUENCE_OF:
        return _decode_sequence(node.element, view, depth, budget)
    if node is types.COMPOSITE:
        return Composite(_decode_children(view, depth, budget))
    if node is types.RESPONSE_BATCH:
        return _decode_response_batch(view, depth, budget)
    decoder = _DECODERS.get(node.id)
    if decoder is None:
        raise DecodeError(f"no codec for {node.id}")
    return decoder(view, budget)


@lru_cache(256)
def _tensor_head(elem_type: int, shape: tuple[int, ...]) -> bytes:
    ndim = len(shape)
    if ndim > MAX_DIMENSIONS:
        raise DecodeError(f"a tensor of {ndim} dimensions; at most {MAX_DIMENSIONS} travel")
    return _TENSOR_HEADER.pack(elem_type, ndim) + _DIMENSIONS[ndim].pack(*shape)


def _encode_tensor(array: np.ndarray[Any, Any], node: TypeNode) -> list[Buffer]:
    elem = node.elem_type
    header = _tensor_head(elem, array.shape)
    if array.dtype is _AS_ON_THE_WIRE.get(elem):
        if array.nbytes <= SMALL_BYTES:
            return [header + array.tobytes()]
        little = array
    else:
        bits = types.BITS_OF_ELEM.get(elem)
        if bits is not None:
            return [header, packed(array, bits).data]
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dense = np.ascontiguousarray(little)
    return [header, dense.reshape(-1).view(np.uint8).data]


@lru_cache(256)
def _plain_head(head: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any], int] | None:
    """Return element type, shape, dtype and total size of a tensor from its head.

    None for malformed heads, and for tensors whose arrays differ from the wire format.
    """
    elem, ndim = _TENSOR_HEADER.unpack_from(head)
    dtype = _AS_ON_THE_WIRE.get(elem)
    if dtype is None or elem == types.TENSOR_BOOL.elem_type or ndim > MAX_DIMENSIONS:
        return None
    if len(head) != _HEADER_BYTES + 8 * ndim:
        return None
    shape = _DIMENSIONS[ndim].unpack_from(head, _HEADER_BYTES)
    return elem, shape, dtype, len(head) + math.prod(shape) * dtype.itemsize


def _decode_tensor(node: TypeNode, view: Buffer) -> np.ndarray[Any, Any]:
    size = len(view)
    if size < _HEADER_BYTES:
        raise DecodeError(f"a tensor payload of {size} bytes has no header")
    if type(view) is bytes and size <= SMALL_BYTES:
        start = _HEADER_BYTES + 8 * view[1]
        known = _plain_head(view[:start])
        if known is not None:
            elem, shape, plain, whole = known
            if elem == node.elem_type and whole == size:
                try:
                    return _new_array(shape, plain, view, start)
                except (ValueError, OverflowError):
                    pass  # the general path below raises the error
    elem, ndim = _TENSOR_HEADER.unpack_from(view)
    if elem != node.elem_type:
        raise DecodeError(f"tensor of element type {elem} where {node.name} was announced")
    start = _HEADER_BYTES + 8 * ndim
    if ndim > MAX_DIMENSIONS or size < start:
        raise DecodeError(f"tensor header announces {ndim} dimensions")
    shape = _DIMENSIONS[ndim].unpack_from(view, _HEADER_BYTES)
    dtype = _AS_ON_THE_WIRE.get(elem)
    if dtype is None:
        dtype = values.dtype_of(node)
        bits = types.BITS_OF_ELEM.get(elem)
        if bits is not None:
            return _decode_packed(memoryview(view)[start:], shape, bits, dtype)
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
    if type(view) is not bytes and not view.readonly:  # type: ignore[union-attr]
        array.flags.writeable = False
    return array


def _decode_packed(
    view: memoryview, shape: Sequence[int], bits: int, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    count = math.prod(shape)
    if -(-count * bits // 8) != len(view):
        raise DecodeError(f"tensor shape {list(shape)} does not fit its {len(view)} bytes")
    try:
        array = unpacked(np.frombuffer(view, np.uint8), count, bits, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise DecodeError(f"tensor of shape {list(shape)} and {bits} bits: {error}") from error
    array.flags.writeable = False
    return array


def _decode_texts(view: memoryview, budget: Budget) -> np.ndarray[Any, Any]:
    node, size = types.TENSOR_STRING, len(view)
    if size < _HEADER_BYTES:
        raise DecodeError(f"a tensor payload of {size} bytes has no header")
    elem, ndim = _TENSOR_HEADER.unpack_from(view)
    if view[2:_HEADER_BYTES] != bytes(6):
        raise DecodeError("a tensor header with bytes that mean nothing")
    start = _HEADER_BYTES + 8 * ndim
    if elem != node.elem_type or ndim > MAX_DIMENSIONS or size < start:
        raise DecodeError(f"tensor of element type {elem} and {ndim} dimensions, not of texts")
    shape = _DIMENSIONS[ndim].unpack_from(view, _HEADER_BYTES)
    count = math.prod(shape)
    if count > MAX_TEXTS or start + 4 * count > size:
        raise DecodeError(f"tensor shape {list(shape)} of texts does not fit its {size} bytes")
    if not count and max(shape) > MAX_TEXTS:
        raise DecodeError(f"tensor shape {list(shape)} is beyond what an array has")
    budget.take(count)
    at = start + 4 * count
    texts: list[str] = []
    for length in struct.unpack_from(f"<{count}I", view, start):
        if length > size - at:
            raise DecodeError("a text of a tensor is cut short")
        texts.append(str(view[at : at + length], "utf-8"))
        at += length
    if at != size:
        raise DecodeError(f"{size - at} bytes after the last text of a tensor")
    array: np.ndarray[Any, Any] = np.empty(count, object)
    array[:] = texts
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _decode_optional(
    element: TypeNode, view: memoryview, depth: int, budget: Budget
) -> OptionalValue:
    mark = bytes(view[:1])
    if mark == b"\0" and len(view) == 1:
        return OptionalValue(None, element)
    if mark != b"\1":
        raise DecodeError("an optional is neither nothing nor a value")
    budget.take(1)
    return OptionalValue(_decode(element, view[1:], depth + 1, budget), element)


def _decode_sequence(
    element: TypeNode, view: memoryview, depth: int, budget: Budget
) -> TensorSequence:
    if len(view) < _COUNT.size:
        raise DecodeError("a sequence has no count")
    (count,) = _COUNT.unpack_from(view)
    at = _COUNT.size + count * _LENGTH.size
    if count > MAX_CHILDREN or len(view) < at:
        raise DecodeError(f"a sequence announces {count} tensors in {len(view)} bytes")
    budget.take(count)
    tensors = []
    for index in range(count):
        (size,) = _LENGTH.unpack_from(view, _COUNT.size + index * _LENGTH.size)
        if size > len(view) - at:
            raise DecodeError(f"tensor {index} of a sequence is cut short")
        tensors.append(_decode(element, view[at : at + size], depth + 1, budget))
        at += size
    if at != len(view):
        raise DecodeError(f"{len(view) - at} bytes after the last tensor of a sequence")
    return TensorSequence(tensors, element)


def _decode_children(view: memoryview, depth: int, budget: Budget) -> list[Value]:
    count, offset = _count_of(view, MAX_CHILDREN, budget)
    return _decode_from(view, 0, count, offset, depth, budget)


def _count_of(view: memoryview, most: int, budget: Budget) -> tuple[int, int]:
    """Return the number of children of a composite, and the offset of the first one."""
    if len(view) < _COUNT.size:
        raise DecodeError("a composite payload has no count")
    (count,) = _COUNT.unpack_from(view)
    offset = _COUNT.size + count * _CHILD.size
    if count > most or len(view) < offset:
        raise DecodeError(f"a composite announces {count} children in {len(view)} bytes")
    budget.take(count)
    return count, offset


def _decode_from(
    view: memoryview, first: int, count: int, offset: int, depth: int, budget: Budget
) -> list[Value]:
    """Return the children from number `first` on, whose body starts at `offset`."""
    children = []
    for index in range(first, count):
        node, size = _child(view, index, offset)
        children.append(_decode(node, view[offset : offset + size], depth + 1, budget))
        offset += size
    if offset != len(view):
        raise DecodeError(f"{len(view) - offset} bytes after the last child of a composite")
    return children


def _child(view: memoryview, index: int, offset: int) -> tuple[TypeNode, int]:
    type_hash, size = _CHILD.unpack_from(view, _COUNT.size + index * _CHILD.size)
    node = types.type_by_hash(type_hash)
    if node is None:
        raise DecodeError(f"child {index} of a composite has unknown type {type_hash:#018x}")
    if size > len(view) - offset:
        raise DecodeError(f"child {index} of a composite is cut short")
    return node, size


def _decode_response_batch(view: memoryview, depth: int, budget: Budget) -> ResponseBatch:
    count, offset = _count_of(view, MAX_CHILDREN + 1, budget)
    if not count:
        raise DecodeError("a response batch has no head")
    # The head is a Metadata that may be larger than others: it has all PeerIds of a cohort.
    node, size = _child(view, 0, offset)
    if node is not types.METADATA:
        raise DecodeError("a response batch has no head")
    head = decoding.unpack(
        view[offset : offset + size], max_bytes=3 * MAX_PEER_LIST_BYTES, max_values=7, max_depth=1
    )
    if not isinstance(head, dict) or set(head) - {"reasons"} != {"peers", "missing"}:
        raise DecodeError("a response batch has no head")
    peers = _peer_list(_need_bytes(head["peers"]), budget)
    missing = _peer_list(_need_bytes(head["missing"]), budget)
    if len(peers) != count - 1:
        raise DecodeError("a response batch has not one answer per peer")
    answers = _decode_from(view, 1, count, offset + size, depth, budget)
    return ResponseBatch(
        responses=tuple(zip(peers, answers, strict=True)),
        missing=tuple(missing),
        reasons=_reasons(head["reasons"], missing, budget) if "reasons" in head else (),
    )


def _reasons(
    raw: Any, missing: list[PeerId], budget: Budget
) -> tuple[tuple[PeerId, WireRefusal], ...]:
    rows = decoding.unpack(
        _need_bytes(raw),
        max_bytes=MAX_BATCH_REASONS * (MAX_REFUSAL_BYTES + 40),
        max_values=1 + 5 * MAX_BATCH_REASONS,
        max_depth=2,
    )
    reasons = {}
    for row in _need_list(rows):
        peer, *fields = _need_list(row)
        budget.take(1)
        if len(fields) != len(WireRefusal.__dataclass_fields__):
            raise DecodeError("a reason in a response batch is malformed")
        reasons[PeerId.from_bytes(_need_bytes(peer))] = refusal_of(*fields)
    if len(reasons) != len(rows) or not reasons.keys() <= set(missing):
        raise DecodeError("a response batch has reasons for peers that are not missing, or twice")
    return tuple(reasons.items())


def _unpack_list(view: Buffer, each: int, max_bytes: int = MAX_SCALAR_BYTES) -> list[Any]:
    """Return a list whose items hold up to `each` values, counting the item and its content."""
    return _need_list(
        decoding.unpack(
            view,
            max_bytes=max_bytes,
            max_values=1 + each * MAX_LIST_ITEMS,
            max_depth=1 if each == 1 else 2,
        )
    )


def _need_bytes(item: Any) -> bytes:
    if not isinstance(item, bytes):
        raise DecodeError(f"expected bytes, got {shown(item)}")
    return item


def _need_u64(item: Any) -> int:
    if type(item) is not int or not 0 <= item < 1 << 64:
        raise DecodeError(f"expected an unsigned 64-bit integer, got {shown(item)}")
    return item


def _need_list(item: Any) -> list[Any]:
    if not isinstance(item, list):
        raise DecodeError(f"expected a list, got {shown(item)}")
    return item


def _peer_list(raw: Buffer, budget: Budget) -> list[PeerId]:
    items = _unpack_list(raw, 1, MAX_PEER_LIST_BYTES)
    budget.take(len(items))
    return [PeerId.from_bytes(_need_bytes(each)) for each in items]


def _address_list(raw: Buffer, budget: Budget) -> values.AddressVec:
    items = [_need_bytes(each) for each in _unpack_list(raw, 1)]
    budget.take_addresses(sum(map(len, items)))
    return values.AddressVec(map(address_from_bytes, items))


def _metadata(view: Buffer, budget: Budget) -> Metadata:
    item = decoding.unpack(
        view, max_bytes=MAX_SCALAR_BYTES, max_values=1 + 2 * MAX_METADATA_ITEMS, max_depth=1
    )
    return _metadata_of(item, budget)


def _metadata_of(item: Any, budget: Budget) -> Metadata:
    if not isinstance(item, dict) or len(item) > MAX_METADATA_ITEMS:
        raise DecodeError("metadata is not a map of scalars")
    budget.take(len(item))
    for name, value in item.items():
        if not isinstance(name, str) or not isinstance(value, values.SCALARS):
            raise DecodeError("metadata is not a map of scalars")
    return Metadata(item)


def _metadata_list(view: Buffer, budget: Budget) -> values.MetadataVec:
    items = _need_list(_unpack_searched(view, 2))
    budget.take(len(items))
    return values.MetadataVec(_metadata_of(item, budget) for item in items)


def _encode_search_results(found: values.SearchResults) -> list[Buffer]:
    row = [
        list(found.ids.shape),
        found.ids.astype("<i8", copy=False).tobytes(),
        found.distances.astype("<f4", copy=False).tobytes(),
        [dict(each) for each in found.metadata],
        [peer.to_bytes() for peer in found.senders],
    ]
    return [msgpack.packb(row)]


def _search_results(view: Buffer, budget: Budget) -> values.SearchResults:
    fields = _need_list(_unpack_searched(view, 3))
    if len(fields) != 5:
        raise DecodeError(f"search results of {len(fields)} fields, not 5")
    shape, metadata, senders = (_need_list(fields[place]) for place in (0, 3, 4))
    ids = np.frombuffer(_need_bytes(fields[1]), "<i8")
    distances = np.frombuffer(_need_bytes(fields[2]), "<f4")
    budget.take(len(ids) + len(metadata) + len(senders))
    if any(_need_u64(extent) > MAX_LIST_ITEMS for extent in shape):  # of empty ones too
        raise DecodeError(f"search results of more than {MAX_LIST_ITEMS} queries or hits")
    return values.SearchResults(
        ids.reshape(shape),
        distances.reshape(shape),
        (_metadata_of(item, budget) for item in metadata),
        (PeerId.from_bytes(_need_bytes(peer)) for peer in senders),
    )


def _unpack_searched(view: Buffer, depth: int) -> Any:
    return decoding.unpack(
        view, max_bytes=MAX_SEARCH_BYTES, max_values=2 * MAX_VALUES, max_depth=depth
    )


def _address(view: memoryview, budget: Budget) -> Value:
    budget.take_addresses(len(view))
    return address_from_bytes(bytes(view))


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
    types.METADATA_VEC.id: lambda v: [msgpack.packb([dict(each) for each in v])],
    types.SEARCH_RESULTS.id: _encode_search_results,
}
_DECODERS: dict[str, Callable[[memoryview, Budget], Any]] = {
    types.TRIGGER.id: lambda view, _: _trigger(view),
    types.BYTES.id: lambda view, _: bytes(view),
    types.PEER_ID.id: lambda view, _: PeerId.from_bytes(bytes(view)),
    types.MULTIADDRESS.id: _address,
    types.PEER_ID_VEC.id: lambda view, budget: values.PeerIdVec(_peer_list(view, budget)),
    types.ADDRESS_VEC.id: _address_list,
    types.METADATA.id: _metadata,
    types.METADATA_VEC.id: _metadata_list,
    types.SEARCH_RESULTS.id: _search_results,
}


def _add_integer(carrier: type[int]) -> None:
    node = values.type_of(carrier(0))

    def decode(view: memoryview) -> int:
        integer = decoding.unpack_scalar(view, max_bytes=MAX_INTEGER_BYTES)
        return carrier(_need_u64(integer))

    register_codec(node, lambda value: [msgpack.packb(int(value))], decode)


for _carrier in (
    values.U64, values.RequestId, values.WireRequestId, values.CommandId,
    values.Timestamp, values.EventKind, values.CorrelationToken,
):  # fmt: skip
    _add_integer(_carrier)


# --- estimates -------------------------------------------------------------------------

# Rough microseconds per byte of a payload: a PeerId has 36 bytes, addresses are parsed by slow
# code, and a Bytes is copied. Types of third parties have no estimate.
_COST_PER_BYTE: dict[str, float] = {
    types.TRIGGER.id: 0,
    types.PEER_ID.id: 1 / 32,
    types.BYTES.id: 1 / 512,
    types.PEER_ID_VEC.id: 1 / 16,
    types.MULTIADDRESS.id: 5,
    types.ADDRESS_VEC.id: 5,
    types.METADATA.id: 1 / 4,
    types.METADATA_VEC.id: 1 / 4,
    types.SEARCH_RESULTS.id: 1 / 8,
}
_COST_PER_BYTE_OF_OTHERS = 1 / 8
_COST_OF_CHILD = 3


def cost_of(node: TypeNode, payload: Buffer, most: int, depth: int = 0) -> int:
    """Estimate the microseconds that `decode_value` will take, up to somewhat beyond `most`.

    The estimate is the same on every machine. Nothing is decoded, and the estimate of a composite
    stops once it exceeds `most`.
    """
    if node is types.TENSOR_STRING or node.kind in (TypeKind.SEQUENCE, TypeKind.OPTIONAL):
        return 1 + (len(payload) >> 4)  # a short text takes about as long as a PeerId
    if node.kind is _TENSOR:
        # Tensors become views, but each byte of a bool is checked.
        return 1 if node is not types.TENSOR_BOOL else 1 + (len(payload) >> 10)
    if node is types.COMPOSITE or node is types.RESPONSE_BATCH:
        return _cost_of_children(memoryview(payload), most, depth)
    return 1 + int(len(payload) * _COST_PER_BYTE.get(node.id, _COST_PER_BYTE_OF_OTHERS))


def _cost_of_children(view: memoryview, most: int, depth: int) -> int:
    if len(view) < _COUNT.size or depth > MAX_COMPOSITE_DEPTH:
        return 1
    (count,) = _COUNT.unpack_from(view)
    offset = _COUNT.size + count * _CHILD.size
    if count > MAX_CHILDREN + 1 or len(view) < offset:
        return 1  # the decoder refuses it at once
    cost: int = 1 + _COST_OF_CHILD * count
    for index in range(count):
        if cost > most:
            break
        type_hash, size = _CHILD.unpack_from(view, _COUNT.size + index * _CHILD.size)
        node = types.type_by_hash(type_hash)
        if node is None or size > len(view) - offset:
            break
        cost += cost_of(node, view[offset : offset + size], most - cost, depth + 1)
        offset += size
    return cost
