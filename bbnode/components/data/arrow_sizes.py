"""Sizes that Arrow IPC and Parquet files declare, read before anything is unpacked.

Rule: a few kilobytes may stand for as much memory as their headers say; so the headers are read
first, by hand where pyarrow shows them only once it has unpacked what follows. What does not look
like a header raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from bbnode.components.data.data_file import DataFile

_MAX_HEADER_BYTES: Final = 64 << 20  # of one message or footer
_MAX_ENTRIES: Final = 1 << 20  # of one vector in these
_MAX_MESSAGES: Final = 1 << 20
_CONTINUES: Final = 0xFFFFFFFF
_TRAILER: Final = 10  # the length of the footer, and "ARROW1"
_STREAM_AT: Final = 8  # where messages begin in a file with a footer
# Arrow's flatbuffers (format/Message.fbs, format/File.fbs): numbers of fields and of header types.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DICTIONARY_DATA = 1
_BUFFERS, _COMPRESSION = 2, 3
_DICTIONARIES, _RECORD_BATCHES = 2, 3
_BUFFER: Final = struct.Struct("<qq")  # offset, length
_BLOCK: Final = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of body

# Bytes of a value in memory, by Parquet's physical type; of BYTE_ARRAY, without its bytes.
_PARQUET_BYTES: Final = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8,
                         "BYTE_ARRAY": 4}  # fmt: skip


def ipc_unpacked(file: DataFile, *, is_file: bool) -> int:
    """Return the bytes that the compressed buffers of an Arrow file say they unpack to."""
    blocks = _footer_blocks(file) if is_file else _stream_blocks(file)
    return sum(_unpacked(file, *block) for block in blocks)


def group_bytes(group: Any, schema: Any) -> int:
    """Return the bytes of memory that a row group of a Parquet file declares.

    Texts and bytes count as they lie in the file: they are to be read as dictionaries.
    """
    total = 0
    for at in range(group.num_columns):
        chunk, column = group.column(at), schema.column(at)
        width = _PARQUET_BYTES.get(column.physical_type, max(8, column.length))
        total += max(chunk.num_values * width, chunk.total_uncompressed_size)
    return total


def text_columns(schema: Any) -> list[str]:
    """Return the paths of columns of texts and bytes, which may be read as dictionaries."""
    columns = [schema.column(at) for at in range(len(schema))]
    return [
        column.path
        for column in columns
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
    ]


class _FlatTable:
    """A table of a flatbuffer: fields by number, each checked to lie within it."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        vtable = at - self._int("<i", at)
        self._vtable, self._size = vtable, self._int("<H", vtable)

    @classmethod
    def root(cls, data: bytes) -> _FlatTable:
        made = cls.__new__(cls)
        made._data = data
        return cls(data, made._int("<I", 0))

    def number(self, field: int, form: str) -> int:
        at = self._place(field)
        return self._int(form, at) if at else 0

    def table(self, field: int) -> _FlatTable | None:
        at = self._place(field)
        return _FlatTable(self._data, at + self._int("<I", at)) if at else None

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        at = self._place(field)
        if not at:
            return []
        begin = at + self._int("<I", at)
        count = self._int("<I", begin)
        end = begin + 4 + count * form.size
        if count > _MAX_ENTRIES:
            raise ValueError(
                f"a header lists {count} columns or batches, more than {_MAX_ENTRIES}; write it "
                "again as several files"
            )
        if end > len(self._data):
            raise ValueError("a header lists more than it holds")
        return list(form.iter_unpack(self._data[begin + 4 : end]))

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot + 2 > self._size:
            return 0
        offset = self._int("<H", self._vtable + slot)
        return self._at + offset if offset else 0

    def _int(self, form: str, at: int) -> int:
        if not 0 <= at <= len(self._data) - struct.calcsize(form):
            raise ValueError("a header points beyond itself")
        found: int = struct.unpack_from(form, self._data, at)[0]
        return found


def _footer_blocks(file: DataFile) -> Iterator[tuple[int, int]]:
    """Yield where the metadata and the body of each message begin, by the footer of a file."""
    if file.size < _TRAILER:
        raise ValueError("it ends before its footer")
    length = int.from_bytes(file.read(file.size - _TRAILER, 4), "little")
    if length > file.size - _TRAILER:
        raise ValueError("its footer is longer than it is")
    _check_header(length)
    footer = _FlatTable.root(file.read(file.size - _TRAILER - length, length))
    for field in (_DICTIONARIES, _RECORD_BATCHES):
        for offset, metadata, _ in footer.structs(field, _BLOCK):
            yield offset, offset + metadata


def _stream_blocks(file: DataFile) -> Iterator[tuple[int, int]]:
    """Yield the same of the messages of a stream, one behind the other."""
    at = 0
    for _ in range(_MAX_MESSAGES):
        if at + 4 > file.size:
            return
        length, begin = _metadata(file, at)
        if length == 0:
            return
        body = begin + length
        yield at, body
        message = _FlatTable.root(file.read(begin, length))
        size = message.number(_BODY_LENGTH, "<q")
        if size < 0:
            raise ValueError("a message has a body of negative length")
        at = body + size
    raise ValueError(
        f"it has more than {_MAX_MESSAGES} batches of rows; write it again with larger ones"
    )


def _metadata(file: DataFile, at: int) -> tuple[int, int]:
    """Return length and place of a message's flatbuffer."""
    if not 0 <= at <= file.size - 4:
        raise ValueError("a message lies beyond the file")
    length = int.from_bytes(file.read(at, 4), "little")
    begin = at + 4
    if length == _CONTINUES:
        if begin + 4 > file.size:
            raise ValueError("it ends within a message")
        length, begin = int.from_bytes(file.read(begin, 4), "little"), begin + 4
    if begin + length > file.size:
        raise ValueError("the header of a message is longer than the file")
    _check_header(length)
    return length, begin


def _check_header(length: int) -> None:
    if length > _MAX_HEADER_BYTES:
        raise ValueError(
            f"a header has {length} bytes, more than {_MAX_HEADER_BYTES}; write it again as "
            "several files, or with fewer columns"
        )


def _unpacked(file: DataFile, at: int, body: int) -> int:
    length, begin = _metadata(file, at)
    if not length:
        return 0
    message = _FlatTable.root(file.read(begin, length))
    kind = message.number(_HEADER_TYPE, "<B")
    header = message.table(_HEADER) if kind in (_DICTIONARY_BATCH, _RECORD_BATCH) else None
    batch = header.table(_DICTIONARY_DATA) if header and kind == _DICTIONARY_BATCH else header
    if batch is None or batch.table(_COMPRESSION) is None:
        return 0
    total = 0
    for offset, size in batch.structs(_BUFFERS, _BUFFER):
        if size < 8:
            continue  # empty
        place = body + offset
        if not 0 <= place <= file.size - 8:
            raise ValueError("a buffer lies beyond the file")
        said = int.from_bytes(file.read(place, 8), "little", signed=True)
        if said < -1:
            raise ValueError("a buffer says that it unpacks to less than nothing")
        total += max(said, 0)  # -1: this one is not compressed
    return total
