"""Files that are read row by row: lines of JSON, lines of text, CSV, Parquet and Arrow."""

from __future__ import annotations

import contextlib
import csv
import datetime
import decimal
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from bbnode.components.data import arrow_files
from bbnode.components.data.arrow_sizes import group_bytes, ipc_unpacked
from bbnode.components.data.data_file import memory_limit, told
from bbnode.components.data.item_files.base import READER, ItemColumns, OpenItems
from bbnode.ir.decoding import shown
from bbnode.ir.values import MAX_INT64, Scalar

_MAX_LINE_BYTES: Final = 16 << 20  # of JSON, CSV and texts
_ARROW_ROWS: Final = 4096  # that are read at once
_WORDS_BYTES: Final = 1 << 26  # of texts at once, if each row had the longest of a dictionary
INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_BOOLS: Final = {"true": True, "false": False, "True": True, "False": False}
ABSENT: Final = object()


@dataclass(slots=True)
class FileRow:
    """One row of a file that is read row by row: what it holds by column."""

    row: int
    place: str
    values: Mapping[str, Any]


class RowSource(ABC):
    """Records of a file, read one by one."""

    columns: ItemColumns | None = None  # None where each record has columns of its own

    @abstractmethod
    def records(self) -> Iterator[FileRow | tuple[int, str, str]]:
        """Yield records, and rows that are none as number, place and what is wrong."""

    def scalar(self, name: str, value: Any) -> Any:
        """Return a value as an entry of metadata, `ABSENT` for none; ValueError says why not."""
        return _scalar(name, value)


def _scalar(name: str, value: Any) -> Any:
    match value:
        case None:
            return ABSENT
        case bool() | str() | bytes():
            return value
        case int() if -MAX_INT64 <= value <= MAX_INT64:
            return value
        case float():
            return ABSENT if math.isnan(value) else value
        case decimal.Decimal():
            return float(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
    raise ValueError(
        f"{shown(name)} is {shown(value)}; metadata are numbers, texts, true and false. Name the "
        "columns to keep with --metadata, or none with --no-metadata"
    )


class JsonLines(RowSource):
    """JSON objects, one a line."""

    def __init__(self, file: OpenItems) -> None:
        self._file = file

    def records(self) -> Iterator[FileRow | tuple[int, str, str]]:
        row = 0
        for number, line in _lines(self._file):
            place = f"line {number}"
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield row, place, f"no JSON: {told(error)}"
            else:
                if isinstance(found, dict):
                    yield FileRow(row, place, found)
                else:
                    yield row, place, "no JSON object, as {…}"
            row += 1


class TextLines(RowSource):
    """Texts, one a line."""

    def __init__(self, file: OpenItems) -> None:
        self._file = file
        self.columns = ItemColumns(file, [file.layout.text], file.layout, set())

    def records(self) -> Iterator[FileRow | tuple[int, str, str]]:
        row = 0
        for number, line in _lines(self._file):
            if line.strip():
                yield FileRow(row, f"line {number}", {self._file.layout.text: line})
                row += 1


def _lines(file: OpenItems) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1; refuses one that is too long."""
    stream, number = file.stream(), 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise file.refuse(
                f"line {number} is longer than {_MAX_LINE_BYTES} bytes; is it one item a line? "
                "Shorten its texts, or leave it out"
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise file.refuse(
                f"line {number} is no UTF-8 (byte {error.start + 1}); convert it to UTF-8"
            ) from error
        yield number, text.rstrip("\r\n")
    file.check_unchanged()


class Csv(RowSource):
    """Rows of CSV, whose first one names the columns.

    Metadata have one type in a column: a first pass looks whether all cells are integers, numbers,
    or true and false.
    """

    def __init__(self, file: OpenItems) -> None:
        self._file = file
        self._delimiter = "\t" if file.path.suffix.lower() == ".tsv" else ","
        with self._reader() as reader:
            self._names: list[str] = next(reader, [])
            first: list[str] = next(reader, [])
        if not first:
            raise file.refuse("it has no rows; the first line names the columns")
        lists = {n for n, v in zip(self._names, first, strict=False) if v.lstrip().startswith("[")}
        if len(self._names) == 1 and any(mark in self._names[0] for mark in ";\t|"):
            raise file.refuse(
                f"its first line is {shown(self._names[0])}; columns are divided by "
                f"{'tabs' if self._delimiter == chr(9) else 'commas'} here, in a .tsv file by tabs"
            )
        self.columns = ItemColumns(file, self._names, file.layout, lists)
        self._types = self._found_types(self.columns.metadata)

    def scalar(self, name: str, value: Any) -> Any:
        if value is None or value == "":
            return ABSENT
        return self._types[name](value)

    def records(self) -> Iterator[FileRow | tuple[int, str, str]]:
        names = self._names
        for row, line, cells in self._cells():
            if len(cells) == len(names):
                yield FileRow(row, f"line {line}", dict(zip(names, cells, strict=True)))
            else:
                yield row, f"line {line}", f"{len(cells)} cells; the first line has {len(names)}"

    def _cells(self) -> Iterator[tuple[int, int, list[str]]]:
        with self._reader() as reader:
            next(reader)
            row = 0
            for cells in reader:
                if cells:
                    yield row, reader.line_num, cells
                    row += 1
        self._file.check_unchanged()

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        # The bound of the csv module's own, 128 KiB, is less than a long text or vector takes.
        csv.field_size_limit(_MAX_LINE_BYTES)
        text = io.TextIOWrapper(self._file.stream(), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=self._delimiter, strict=True)
        try:
            yield reader
        except csv.Error as error:
            raise self._file.refuse(f"line {reader.line_num}: no CSV: {told(error)}") from error
        finally:
            text.detach()

    def _found_types(self, names: Sequence[str]) -> dict[str, Callable[[str], Scalar]]:
        places = {name: self._names.index(name) for name in names}
        kinds: dict[str, list[tuple[Callable[[str], bool], Callable[[str], Scalar]]]] = {
            name: [(_is_bool, _BOOLS.__getitem__), (_is_integer, int), (_is_number, float)]
            for name in names
        }
        self._file.count = 0
        for _, _, cells in self._cells():
            self._file.count += 1
            for name, left in kinds.items():
                cell = cells[places[name]] if places[name] < len(cells) else ""
                if left and cell:
                    left[:] = [kind for kind in left if kind[0](cell)]
        return {name: left[0][1] if left else str for name, left in kinds.items()}


def _is_bool(text: str) -> bool:
    return text in _BOOLS


def _is_integer(text: str) -> bool:
    return bool(INTEGER.fullmatch(text)) and abs(int(text)) <= MAX_INT64


def is_numeral(value: object) -> bool:
    return type(value) in (int, float) or (type(value) is str and bool(_NUMBER.fullmatch(value)))


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


class ArrowRows(RowSource):
    """Rows of Parquet and Arrow files."""

    def __init__(self, file: OpenItems) -> None:
        self._file = file
        self._pa = arrow_files.pyarrow(READER)
        pa = self._pa
        begin = file.stream().read(6)
        if begin.startswith(b"PAR1"):
            opened = arrow_files.open_parquet(pa, file.stream())
            schema, meta = opened.schema_arrow, opened.metadata
            file.count = meta.num_rows
            for at in range(meta.num_row_groups):  # of which one is in memory at a time
                declared = group_bytes(meta.row_group(at), meta.schema)
                if declared > memory_limit():
                    raise file.refuse(
                        f"its row group {at} takes {declared >> 20} MiB, over half of the memory "
                        "that there is; write it in smaller row groups"
                    )
            self._batches: Callable[[], Iterator[Any]] = partial(
                opened.iter_batches, batch_size=_ARROW_ROWS
            )
        elif begin.startswith(b"ARROW1"):
            unpacked = ipc_unpacked(file.data, is_file=True)
            if unpacked > memory_limit():
                raise file.refuse(
                    f"its batches unpack to {unpacked >> 20} MiB, over half of the memory that "
                    "there is; write it uncompressed"
                )
            reader = pa.ipc.open_file(pa.memory_map(str(file.path)))
            schema = reader.schema
            self._batches = lambda: map(reader.get_batch, range(reader.num_record_batches))
        else:
            raise file.refuse("its first bytes are of no Parquet and no Arrow file")
        self._list_names = {each.name for each in schema if _is_list(pa.types, each.type)}
        columns = ItemColumns(file, schema.names, file.layout, self._list_names)
        self.columns = columns
        self._used = [*columns.vector, *columns.metadata, *filter(None, (columns.id, columns.text))]

    def records(self) -> Iterator[FileRow | tuple[int, str, str]]:
        row = 0
        for whole in self._batches():
            at_once = self._rows_at_once(whole)
            for start in range(0, len(whole), at_once):
                batch = whole.slice(start, at_once)
                found = {name: self._column(name, batch.column(name)) for name in self._used}
                for at in range(len(batch)):
                    yield FileRow(row, f"row {row}", {n: each[at] for n, each in found.items()})
                    row += 1

    def _rows_at_once(self, batch: Any) -> int:
        """Return how many rows become Python's values at once: a dictionary repeats its words."""
        widest = 1
        types = self._pa.types
        for name in self._used:
            column = batch.column(name)
            kind = column.type.value_type if types.is_dictionary(column.type) else None
            if kind is not None and (types.is_string(kind) or types.is_binary(kind)):
                sizes = self._pa.compute.binary_length(column.dictionary)
                widest = max(widest, self._pa.compute.max(sizes).as_py() or 0)
        return max(1, min(_ARROW_ROWS, _WORDS_BYTES // widest))

    def _column(self, name: str, column: Any) -> Sequence[Any]:
        # The offsets of a broken file would be followed to anywhere.
        column.validate(full=True)
        types = self._pa.types
        if name in self._list_names and not column.null_count:
            values = column.flatten()
            numbers_alone = types.is_floating(values.type) or types.is_integer(values.type)
            if types.is_fixed_size_list(column.type):
                lengths = {column.type.list_size}
            else:
                lengths = set(np.diff(column.offsets.to_numpy(zero_copy_only=False)).tolist())
            if numbers_alone and not values.null_count and len(lengths) == 1 and min(lengths):
                rows = values.to_numpy(zero_copy_only=False).reshape(len(column), lengths.pop())
                return list(rows)
        listed: list[Any] = column.to_pylist()
        return listed


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
