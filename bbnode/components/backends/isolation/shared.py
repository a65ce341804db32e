"""Values in shared memory, and the messages that say where they stand.

Rule: a message is a few bytes on a socket; all else, also its head (msgpack), stands in a region of
shared memory that the message brings along or that an earlier one brought. A region never shrinks,
so that no read of it can fail. A reader copies the head before it looks at it and believes nothing
that it says.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.ir.decoding import shown, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.types import TypeNode, type_by_id
from bbnode.ir.values import OptionalValue, TensorSequence, Value, dtype_of, is_text, type_of

# kind, whether a region comes along, number of the graph, where the head is, bytes of the head.
_MESSAGE: Final = struct.Struct("<BBxxIQQ")
_ALIGN: Final = 64
_MIN_REGION: Final = 1 << 16
# A region that is larger is given back after each call.
KEPT_BYTES: Final = 64 << 20
_MAX_HEAD_BYTES: Final = 64 << 20
_MAX_HEAD_VALUES: Final = 4 << 20
_MAX_HEAD_DEPTH: Final = 8
_MAX_AXES: Final = 1024
_MAX_NESTED: Final = 2  # an optional sequence of tensors

# Kinds of messages: to the child, and from it.
PREPARE, RUN, MADE, REFUSED, NO_MEMORY = 1, 2, 3, 4, 5

Bytes = npt.NDArray[np.uint8]


class Region:
    """One piece of shared memory, mapped."""

    __slots__ = ("_map", "bytes", "fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, size: int) -> Region:
        """Return a region of at least `size` bytes. Raises OSError."""
        fd = os.memfd_create("bbnode-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = max(_MIN_REGION, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def received(cls, fd: int, max_bytes: int) -> Region:
        """Return the region of a descriptor that came along; DecodeError if it may shrink."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= max_bytes:
                raise DecodeError(f"shared memory of {size} bytes with the seals {seals}")
            return cls(fd, size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise DecodeError(f"a descriptor is no shared memory: {error}") from error
        except DecodeError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap and close the memory, as soon as nothing here reads it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.bytes = np.empty(0, np.uint8)
        with suppress(BufferError):  # a value still reads it; the map goes with the last one
            self._map.close()


class Writer:
    """Values that are to be written to a region: their sizes first, then their bytes."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Bytes]] = []
        self._end = 0

    def add(self, value: Value, depth: int = 0) -> list[Any]:
        """Return the description of a value, for the head; DecodeError if it nests too deep."""
        _check_depth(depth)
        if isinstance(value, TensorSequence):
            return [
                "sequence",
                _element_of(value.type),
                [self.add(each, depth + 1) for each in value],
            ]
        if isinstance(value, OptionalValue):
            inner = None if value.value is None else self.add(value.value, depth + 1)
            return ["optional", _element_of(value.type), inner]
        array = np.asarray(value)
        kind = type_of(array).id
        if is_text(array):
            texts = [str(each).encode() for each in array.reshape(-1)]
            lengths = np.array([len(each) for each in texts], np.int64)
            joined = np.frombuffer(b"".join(texts), np.uint8)
            return ["texts", list(array.shape), self._place(lengths), self._place(joined)]
        return ["tensor", kind, list(array.shape), self._place(array)]

    def write(self, take: Callable[[int], Region], head: bytes) -> tuple[Region, int]:
        """Write all values and `head` to the region of `take(size)`; return it and head's place."""
        at = self._end
        region = take(at + len(head))
        for begin, flat in self._parts:
            region.bytes[begin : begin + len(flat)] = flat
        region.bytes[at : at + len(head)] = np.frombuffer(head, np.uint8)
        return region, at

    def _place(self, array: npt.NDArray[Any]) -> list[int]:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin, self._end = self._end, -(-(self._end + len(flat)) // _ALIGN) * _ALIGN
        self._parts.append((begin, flat))
        return [begin, len(flat)]


def read_value(
    region: Bytes,
    described: Any,
    *,
    copy: bool,
    place: npt.NDArray[Any] | None = None,
    depth: int = 0,
) -> Value:
    """Return the value of a description; DecodeError for one that can't be.

    Args:
        region: the shared memory.
        described: what `Writer.add` returned, by somebody else.
        copy: False for a view of the memory.
        place: where a tensor is to be written instead; of its dtype and shape.
        depth: of sequences and optionals around it.
    """
    _check_depth(depth)
    match described:
        case ["tensor", str(kind), list(shape), [int(begin), int(length)]]:
            node = type_by_id(kind)
            if node is None or not node.elem_type:
                raise DecodeError(f"a tensor of type {shown(kind)}")
            try:
                dtype = dtype_of(node)
            except KeyError as error:
                raise DecodeError(f"a tensor of type {shown(kind)}") from error
            if dtype.hasobject:
                raise DecodeError("a tensor of texts among those of numbers")
            dims = _dims(shape)
            flat = _cut(region, begin, length)
            if math.prod(dims) * dtype.itemsize != length or (begin % _ALIGN and length):
                raise DecodeError(f"{length} bytes for a tensor {dims} of {dtype}")
            view = flat.view(dtype).reshape(dims)
            if place is not None:
                if place.dtype != dtype or place.shape != dims:
                    raise DecodeError(f"{dtype}{list(dims)} for a place of {place.dtype}")
                place[...] = view
                return place
            return view.copy() if copy else view
        case ["texts", list(shape), [int(at), int(count)], [int(begin), int(length)]]:
            dims = _dims(shape)
            if math.prod(dims) * 8 != count:
                raise DecodeError(f"{count} bytes of lengths for texts {dims}")
            lengths = _cut(region, at, count).tobytes()
            joined = _cut(region, begin, length).tobytes()
            return _texts(np.frombuffer(lengths, np.int64), joined).reshape(dims)
        case ["sequence", str(kind), list(each)]:
            tensors = [read_value(region, part, copy=copy, depth=depth + 1) for part in each]
            return TensorSequence(tensors, _element(kind))
        case ["optional", str(kind), inner]:
            held = None if inner is None else read_value(region, inner, copy=copy, depth=depth + 1)
            return OptionalValue(held, _element(kind))
        case _:
            raise DecodeError(f"a value described as {shown(described)}")


def _check_depth(depth: int) -> None:
    if depth > _MAX_NESTED:
        raise DecodeError(f"values nest deeper than {_MAX_NESTED}")


def _texts(lengths: npt.NDArray[np.int64], joined: bytes) -> npt.NDArray[Any]:
    if (lengths < 0).any() or (lengths > len(joined)).any() or lengths.sum() != len(joined):
        raise DecodeError(f"{len(joined)} bytes of texts for other lengths")
    made = np.empty(len(lengths), object)
    end = 0
    for at, length in enumerate(lengths.tolist()):
        begin, end = end, end + length
        try:
            made[at] = joined[begin:end].decode()
        except UnicodeDecodeError as error:
            raise DecodeError("a text that is not UTF-8") from error
    return made


def _dims(shape: Sequence[Any]) -> tuple[int, ...]:
    if len(shape) > _MAX_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise DecodeError(f"a shape that can't be, of {len(shape)} axes")
    return tuple(shape)


def _cut(region: Bytes, begin: int, length: int) -> Bytes:
    if begin < 0 or length < 0 or begin + length > len(region):
        raise DecodeError(f"bytes {begin} to {begin + length} of {len(region)}")
    return region[begin : begin + length]


def _element_of(node: TypeNode) -> str:
    return "" if node.element is None else node.element.id


def _element(kind: str) -> TypeNode:
    node = type_by_id(kind)
    if node is None:
        raise DecodeError(f"an element of type {shown(kind)}")
    return node


def read_settings(raw: bytes) -> dict[str, Any]:
    """Return a table of settings, as either end begins with; raises DecodeError."""
    found = unpack(raw, max_bytes=1 << 16, max_values=64, max_depth=1)
    if not isinstance(found, dict):
        raise DecodeError(f"{shown(found)} is no table of settings")
    return found


class ChildLine:
    """One end of a line between two processes: a socket, and a region in each direction."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._sock = sock
        self._max_bytes = max_bytes
        self._mine: Region | None = None
        self._theirs: Region | None = None

    def send(self, kind: int, graph: int, head: Mapping[str, Any], writer: Writer) -> None:
        """Send a message. Raises OSError, and MemoryError for more than the bound."""
        before = self._mine
        raw = bytes(msgpack.packb(head))
        region, at = writer.write(self._take, raw)
        message = _MESSAGE.pack(kind, region is not before, graph, at, len(raw))
        if region is before:
            self._sock.sendall(message)
        else:
            socket.send_fds(self._sock, [message], [region.fd])

    def receive(self) -> tuple[int, int, Any, Bytes]:
        """Return kind, graph, head and the region of the next message.

        Raises EOFError, OSError (TimeoutError among them), and DecodeError.
        """
        raw, fds, _, _ = socket.recv_fds(self._sock, _MESSAGE.size, 1)
        if len(raw) != _MESSAGE.size:
            for fd in fds:
                os.close(fd)
            raise EOFError
        kind, brings, graph, at, length = _MESSAGE.unpack(raw)
        for fd in fds:
            if self._theirs is not None:
                self._theirs.close()
            self._theirs = Region.received(fd, self._max_bytes)
        if self._theirs is None or bool(brings) != bool(fds):
            raise DecodeError("a message without its shared memory")
        head = _cut(self._theirs.bytes, at, length).tobytes()
        found = unpack(
            head, max_bytes=_MAX_HEAD_BYTES, max_values=_MAX_HEAD_VALUES, max_depth=_MAX_HEAD_DEPTH
        )
        return kind, graph, found, self._theirs.bytes

    def trim(self) -> None:
        """Release this end's region if it is large, once the other end has read it."""
        if self._mine is not None and self._mine.size > KEPT_BYTES:
            self._mine.close()
            self._mine = None

    def forget(self) -> None:
        """Release the other end's region if it is large, once it has been read."""
        if self._theirs is not None and self._theirs.size > KEPT_BYTES:
            self._theirs.close()
            self._theirs = None

    def close(self) -> None:
        """Close the socket and both regions."""
        self._sock.close()
        for region in (self._mine, self._theirs):
            if region is not None:
                region.close()

    def _take(self, size: int) -> Region:
        if size > self._max_bytes:
            raise MemoryError(f"{size} bytes to hand over, at most {self._max_bytes} are taken")
        if self._mine is None or self._mine.size < size:
            if self._mine is not None:
                self._mine.close()
            self._mine = Region.create(size)
        return self._mine
