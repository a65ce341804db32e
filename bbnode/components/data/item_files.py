"""Files of items for an index, a batch at a time: vectors or texts, ids, and metadata.

Rule: a file is streamed, never held whole, and each row is checked before anybody gets it; one that
is no item is named by its line (of text, counted from 1) or row (of arrays, counted from 0).
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import decimal
import fnmatch
import io
import json
import math
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.components.data import arrow_files, numbers, numpy_files
from bbnode.components.data.base import Array
from bbnode.components.data.data_file import UNREADABLE, DataFile, told
from bbnode.components.errors import DataUnavailable
from bbnode.ir.decoding import shown
from bbnode.ir.values import MAX_INT64, Scalar

Vectors: TypeAlias = npt.NDArray[np.float32]

ENDINGS: Final = (
    ".npy", ".npz", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather",
    ".ipc", ".txt",
)  # fmt: skip
_READER: Final = "items"  # who reads, in the errors of shared readers
_VECTOR_NAMES: Final = ("vector", "vectors", "embedding", "embeddings")
_ID_NAMES: Final = ("id", "ids")
_MAX_LINE_BYTES: Final = 16 << 20  # of JSON, CSV and texts
_BATCH_BYTES: Final = 8 << 20  # of the vectors of one batch
_MAX_LISTED: Final = 12  # columns in an error
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_BOOLS: Final = {"true": True, "false": False, "True": True, "False": False}
_ABSENT: Final = object()


class ItemFileRefused(DataUnavailable):
    """A file of items can't be read, or has a row that is no item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLayout:
    """The columns of a file of items: fields of JSON, arrays of an .npz.

    Attributes:
        vector: names or patterns ("x*") of the columns of vectors: one of lists, or several of
            numbers; empty is one called vector, embedding or the like, or the only one of lists.
        text: the column of texts that an encoder makes vectors of, in place of `vector`.
        id: the column of ids; empty is one called id or ids, if there is one.
        metadata: the columns that are kept beside; None is all others.
        row_ids: there is no column of ids, also if one is called so.
    """

    vector: tuple[str, ...] = ()
    text: str = ""
    id: str = ""
    metadata: tuple[str, ...] | None = None
    row_ids: bool = False


@dataclass(slots=True, kw_only=True)
class ItemBatch:
    """Some items of a file, in its order.

    Attributes:
        rows: the number of each among all rows of the file, from 0; int64 [N].
        ids: int64 [N]; None where the file has none.
        vectors: float32 [N, D]; None where `texts` are there, one for each item.
        metadata: of each item; None where the file has none.
        skipped: what was wrong with rows before and among these, which were left out.
        place: the name of a row for people, by its number.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64] | None
    vectors: Vectors | None
    texts: list[str] | None
    metadata: list[dict[str, Scalar]] | None
    skipped: list[str] = field(default_factory=list)
    place: Callable[[int], str] = str

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class _FileRow:
    """One row of a file that is read row by row: what it holds by column."""

    row: int
    place: str
    values: Mapping[str, Any]


class ItemFile:
    """A file of items.

    Attributes:
        path: of the file.
        count: its rows; None where only reading it to its end would tell.
    """

    def __init__(self, path: Path, layout: ItemLayout | None = None) -> None:
        """Open a file and look at its columns. Raises ItemFileRefused."""
        self.path = path
        self.layout = layout or ItemLayout()
        self.count: int | None = None
        ending = path.suffix.lower()
        if ending not in ENDINGS:
            raise ItemFileRefused(
                f"{path} ends with {shown(ending)}; files of items end with {', '.join(ENDINGS)}"
            )
        if ending == ".txt" and not self.layout.text:
            raise ItemFileRefused(
                f"{path} has texts; give an encoder that makes vectors of them (--encoder DIR)"
            )
        self._ending = ending
        self._held = contextlib.ExitStack()
        with contextlib.ExitStack() as stack, self._reading():
            self._file = stack.enter_context(DataFile(path, _READER))
            if not self._file.size:
                raise ItemFileRefused(f"{path} is empty")
            self._stream = stack.enter_context(self._file.stream())
            self._read = self._reader()
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._held.close()

    def batches(self, size: int, *, skip_bad: bool = False) -> Iterator[ItemBatch]:
        """Yield the items by and by, at most `size` of them at a time.

        A row that is no item raises ItemFileRefused, which names it, once those before it have been
        yielded; with `skip_bad` it is left out and told in `skipped`. Afterwards `count` is known.
        """
        with self._reading():
            yield from self._read(size, skip_bad)

    def _reading(self) -> _Reading:
        return _Reading(self.path)

    def _reader(self) -> Callable[[int, bool], Iterator[ItemBatch]]:
        match self._ending:
            case ".npy" | ".npz":
                return _ItemArrays(self).batches
            case ".csv" | ".tsv":
                return _ItemRows(self, _Csv(self)).batches
            case ".jsonl" | ".ndjson":
                return _ItemRows(self, _JsonLines(self)).batches
            case ".txt":
                return _ItemRows(self, _TextLines(self)).batches
        return _ItemRows(self, _Arrow(self)).batches

    def check_unchanged(self) -> None:
        """Raise DataUnavailable if the file was written to since it was opened."""
        self._file.check_unchanged()

    @property
    def data(self) -> DataFile:
        """The open file, for reads at offsets."""
        return self._file

    def stream(self) -> BinaryIO:
        """Return the open file, at its beginning; there is one."""
        self._stream.seek(0)
        return self._stream

    def refuse(self, what: str) -> ItemFileRefused:
        """Return the error of this file."""
        return ItemFileRefused(f"{self.path}: {what}")


class _Reading:
    """Turns what readers raise for bytes that are not theirs into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ItemFileRefused):
            return
        if isinstance(error, DataUnavailable):
            text = str(error).removeprefix(f"{_READER}: ").partition("; set `path`")[0]
            raise ItemFileRefused(text) from error
        if isinstance(error, UnicodeDecodeError):
            raise ItemFileRefused(
                f"{self._path} is no UTF-8 ({told(error)}); convert it to UTF-8"
            ) from error
        if isinstance(error, (*UNREADABLE, csv.Error)) or _is_arrows(error):
            raise ItemFileRefused(f"{self._path} can't be read: {told(error)}") from error


def _is_arrows(error: BaseException) -> bool:
    return type(error).__module__.startswith("pyarrow")


# --- arrays ----------------------------------------------------------------------------------


class _ItemArrays:
    """An .npy file, which is the vectors, or the arrays of an .npz file by name."""

    def __init__(self, file: ItemFile) -> None:
        self._file = file
        arrays = self._opened()
        layout = file.layout
        columns = _Columns(file, list(arrays), layout, {n for n, a in arrays.items() if a.ndim > 1})
        self._text = columns.text
        self._vectors = [] if self._text else [arrays[name] for name in columns.vector]
        self._ids = None if columns.id is None else arrays[columns.id]
        self._metadata = {name: arrays[name] for name in columns.metadata}
        self._texts = arrays[self._text] if self._text else None
        self._check(arrays, columns)

    def _opened(self) -> dict[str, Array]:
        data, opened = self._file.data, self._file.stream()
        if self._file.path.suffix.lower() == numpy_files.SUFFIX:
            return {"vectors": numpy_files.whole(data, opened)}
        with zipfile.ZipFile(opened) as archive:
            return {
                info.filename.removesuffix(numpy_files.SUFFIX): numpy_files.member(
                    data, opened, archive, info, _READER
                )
                for info in archive.infolist()
                if info.filename.endswith(numpy_files.SUFFIX)
            }

    def _check(self, arrays: Mapping[str, Array], columns: _Columns) -> None:
        refuse = self._file.refuse
        used = [*columns.vector, *columns.metadata]
        used += [name for name in (columns.id, self._text) if name]
        for name in used:
            array = arrays[name]
            is_vector = name in columns.vector and not self._text
            kinds = numbers.NUMBERS if is_vector else f"{numbers.NUMBERS}U"
            if array.dtype.kind not in kinds or array.ndim != 1 + (is_vector and array.ndim > 1):
                wanted = "numbers, [N, D]" if is_vector else "numbers or texts, [N]"
                raise refuse(
                    f"the array {shown(name)} is {array.dtype}{list(array.shape)}, and not of "
                    f"{wanted}; choose arrays with --vector and --metadata"
                )
        if self._vectors and len(self._vectors) == 1 and self._vectors[0].ndim == 1:
            raise refuse(
                f"it holds one vector of {len(self._vectors[0])} numbers; save it as [1, D], with "
                "vector[None]"
            )
        lengths = {name: len(arrays[name]) for name in used}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{shown(name)} {count}" for name, count in lengths.items())
            raise refuse(f"its arrays have different lengths ({listed}); choose with --metadata")
        if self._ids is not None and self._ids.dtype.kind not in "iu":
            raise refuse(_ids_are_none(shown(columns.id), str(self._ids.dtype)))
        if self._texts is not None and self._texts.dtype.kind != "U":
            raise refuse(
                f"the array {shown(self._text)} is {self._texts.dtype}, and holds no texts"
            )
        self._file.count = next(iter(lengths.values()))
        if not self._file.count:
            raise refuse("it has no rows")

    def batches(self, size: int, skip_bad: bool) -> Iterator[ItemBatch]:
        wide = sum(4 * int(np.prod(part.shape[1:])) for part in self._vectors)
        size = min(size, max(1, _BATCH_BYTES // max(1, wide)))
        for start in range(0, self._file.count or 0, size):
            self._file.check_unchanged()
            rows = slice(start, start + size)
            parts = [part[rows].reshape(len(part[rows]), -1) for part in self._vectors]
            ids = None if self._ids is None else self._ids[rows]
            count = len(ids) if ids is not None else 0
            vectors = None
            bad: dict[int, str] = {}
            if parts:
                with np.errstate(over="ignore"):
                    vectors = np.concatenate(
                        [np.asarray(part, np.float32) for part in parts], axis=1
                    )
                count = len(vectors)
                finite = np.isfinite(vectors).all(axis=1)
                for at in np.flatnonzero(~finite).tolist():
                    bad[at] = _not_finite(vectors[at])
            texts = None if self._texts is None else self._texts[rows].tolist()
            count = count if texts is None else len(texts)
            if ids is not None:
                for at in np.flatnonzero((ids < 0) | (ids > MAX_INT64)).tolist():
                    bad[at] = f"the id {ids[at]} is none; ids are from 0 to 2**63 - 1"
            metadata = self._told(rows, count)
            made = ItemBatch(
                rows=np.arange(start, start + count),
                ids=None if ids is None else ids.astype(np.int64),
                vectors=vectors,
                texts=texts,
                metadata=metadata,
                place=lambda row: f"row {row}",
            )
            yield from _without(made, bad, self._file, skip_bad)

    def _told(self, rows: slice, count: int) -> list[dict[str, Scalar]] | None:
        if not self._metadata:
            return None
        columns = {name: array[rows].tolist() for name, array in self._metadata.items()}
        return [
            {name: values[at] for name, values in columns.items() if not _is_nan(values[at])}
            for at in range(count)
        ]


def _without(
    batch: ItemBatch, bad: Mapping[int, str], file: ItemFile, skip_bad: bool
) -> Iterator[ItemBatch]:
    """Yield the good items of a batch; those before the first bad one, and then its error."""
    if not bad:
        yield batch
        return
    first = min(bad)
    texts = [f"{batch.place(int(batch.rows[at]))}: {why}" for at, why in sorted(bad.items())]
    keep = np.ones(len(batch), np.bool_)
    keep[list(bad) if skip_bad else slice(first, None)] = False
    kept = np.flatnonzero(keep).tolist()
    made = ItemBatch(
        rows=batch.rows[keep],
        ids=None if batch.ids is None else batch.ids[keep],
        vectors=None if batch.vectors is None else batch.vectors[keep],
        texts=None if batch.texts is None else [batch.texts[at] for at in kept],
        metadata=None if batch.metadata is None else [batch.metadata[at] for at in kept],
        skipped=texts if skip_bad else [],
        place=batch.place,
    )
    if len(made) or made.skipped:
        yield made
    if not skip_bad:
        raise file.refuse(texts[0])


# --- rows ------------------------------------------------------------------------------------


class _Columns:
    """The columns of a file by what they are for, by the layout and by their names."""

    def __init__(
        self, file: ItemFile, names: Sequence[str], layout: ItemLayout, lists: set[str]
    ) -> None:
        """Choose among `names`; `lists` are those whose rows are lists. Raises ItemFileRefused."""
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise file.refuse(f"it has several columns {', '.join(map(shown, twice))}; rename them")
        self._file, self._names = file, names
        self.text = self._named(layout.text, "--text") if layout.text else ""
        self.vector = [] if self.text else self._vector(layout, lists)
        self.id = self._id(layout)
        taken = {*self.vector, self.id}
        if layout.metadata is None:
            self.metadata = [name for name in names if name not in taken]
        else:
            self.metadata = [self._named(name, "--metadata") for name in layout.metadata]

    def _vector(self, layout: ItemLayout, lists: set[str]) -> list[str]:
        if layout.vector:
            found: dict[str, None] = {}
            for pattern in layout.vector:
                matching = [n for n in self._names if fnmatch.fnmatchcase(n, pattern)]
                found.update(dict.fromkeys(matching or [self._named(pattern, "--vector")]))
            return list(found)
        by_name = [name for name in _VECTOR_NAMES if name in self._names]
        found_lists = [name for name in self._names if name in lists]
        if len(by_name) == 1 or len(found_lists) == 1:
            return [*by_name, *found_lists][:1]
        raise self._file.refuse(
            "which of its columns are the vectors? Name them with --vector (--vector embedding, "
            f"--vector 'x*'), or a column of texts with --text; it has {self._listed()}"
        )

    def _id(self, layout: ItemLayout) -> str | None:
        if layout.row_ids:
            return None
        if layout.id:
            return self._named(layout.id, "--id-column")
        return next((name for name in _ID_NAMES if name in self._names), None)

    def _named(self, name: str, option: str) -> str:
        if name in self._names:
            return name
        raise self._file.refuse(f"{option} {shown(name)}: there is {self._listed()}")

    def _listed(self) -> str:
        more = len(self._names) - _MAX_LISTED
        listed = ", ".join(map(shown, self._names[:_MAX_LISTED]))
        return f"{listed or 'no column'}{f' and {more} more' if more > 0 else ''}"


class _Source(ABC):
    """Records of a file, read one by one."""

    columns: _Columns | None = None  # None where each record has columns of its own

    @abstractmethod
    def records(self) -> Iterator[_FileRow | tuple[int, str, str]]:
        """Yield records, and rows that are none as number, place and what is wrong."""

    def scalar(self, name: str, value: Any) -> Any:
        """Return a value as an entry of metadata, `_ABSENT` for none; ValueError says why not."""
        return _scalar(name, value)


class _ItemRows:
    """Batches of the records of a source."""

    def __init__(self, file: ItemFile, source: _Source) -> None:
        self._file, self._source = file, source
        self._dimensions = 0

    def batches(self, size: int, skip_bad: bool) -> Iterator[ItemBatch]:
        rows: list[int] = []
        ids: list[int] = []
        vectors: list[Any] = []
        metadata: list[dict[str, Scalar]] = []
        skipped: list[str] = []
        places: dict[int, str] = {}
        texts = bool(self._file.layout.text)
        has_ids: bool | None = None

        def made() -> ItemBatch:
            batch = ItemBatch(
                rows=np.array(rows, np.int64),
                ids=np.array(ids, np.int64) if has_ids else None,
                vectors=None if texts else _stacked(vectors, self._dimensions),
                texts=list(vectors) if texts else None,
                metadata=list(metadata),
                skipped=list(skipped),
                place=dict(places).__getitem__,
            )
            for each in (rows, ids, vectors, metadata, skipped):
                each.clear()
            places.clear()
            return batch

        last = -1
        for record in self._source.records():
            try:
                if isinstance(record, tuple):
                    last, place, why = record
                    raise ValueError(why)  # noqa: TRY004 - whatever is wrong with a row
                last, place = record.row, record.place
                number, vector, told = self._item(record)
                if has_ids is None:
                    has_ids = number is not None
                elif has_ids != (number is not None):
                    raise ValueError(
                        "it has no id, as others have" if has_ids else "only it has an id"
                    )
            except ValueError as error:
                text = f"{place}: {error}"
                if not skip_bad:
                    if rows:
                        yield made()
                    raise self._file.refuse(text) from error
                skipped.append(text)
                continue
            rows.append(last)
            vectors.append(vector)
            metadata.append(told)
            places[last] = place
            if number is not None:
                ids.append(number)
            if len(rows) >= min(size, max(1, _BATCH_BYTES // (4 * max(1, self._dimensions)))):
                yield made()
        self._file.count = last + 1
        if last < 0:
            raise self._file.refuse("it has no rows")
        if rows or skipped:
            yield made()

    def _item(self, record: _FileRow) -> tuple[int | None, Any, dict[str, Scalar]]:
        values = record.values
        columns = self._source.columns
        if columns is None:
            lists = {name for name, value in values.items() if isinstance(value, list)}
            try:
                columns = _Columns(self._file, list(values), self._file.layout, lists)
            except ItemFileRefused as error:
                raise ValueError(str(error).removeprefix(f"{self._file.path}: ")) from error
        number = None if columns.id is None else _id(columns.id, values.get(columns.id))
        vector: Any
        if columns.text:
            vector = values.get(columns.text)
            if not isinstance(vector, str) or not vector.strip():
                raise ValueError(f"{shown(columns.text)} is {shown(vector)}, and no text")
        else:
            vector = self._vector(columns, values)
        told = {}
        for name in columns.metadata:
            value = self._source.scalar(name, values.get(name))
            if value is not _ABSENT:
                told[name] = value
        return number, vector, told

    def _vector(self, columns: _Columns, values: Mapping[str, Any]) -> Vectors:
        cells = [values.get(name) for name in columns.vector]
        if len(cells) > 1 and all(map(_is_numeral, cells)):
            with np.errstate(over="ignore"):
                vector = np.array(cells, np.float64).astype(np.float32)
        else:
            parts = [_floats(*each) for each in zip(columns.vector, cells, strict=True)]
            vector = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._dimensions = self._dimensions or len(vector)
        if len(vector) != self._dimensions:
            raise ValueError(
                f"a vector of {len(vector)} numbers; those before have {self._dimensions}"
            )
        if not np.isfinite(vector).all():
            raise ValueError(_not_finite(vector))
        return vector


def _stacked(vectors: list[Any], dimensions: int) -> Vectors:
    return np.stack(vectors) if vectors else np.zeros((0, dimensions), np.float32)


def _floats(name: str, value: Any) -> Vectors:
    """Return a vector [D] of what a cell holds. ValueError says why there is none."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"{shown(name)} is {shown(text)}, and no list of numbers"
                ) from None
        else:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"{shown(name)} is {shown(text)}, and no number") from None
    if value is None:
        raise ValueError(f"{shown(name)} has no value")
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty((0, 0))
    if array.dtype.kind not in "iufb" or array.ndim > 1 or not array.size:
        raise ValueError(f"{shown(name)} is {shown(value)}, and no list of numbers")
    with np.errstate(over="ignore"):
        return np.atleast_1d(array.astype(np.float32))


def _not_finite(vector: Array) -> str:
    at = int(np.argmin(np.isfinite(vector)))
    return f"number {at} of the vector (from 0) is NaN, or too large for float32"


def _id(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise ValueError(_ids_are_none(shown(name), shown(value)))
    return value


def _ids_are_none(name: str, what: str) -> str:
    return (
        f"the id in {name} is {what}; ids are whole numbers from 0 to 2**63 - 1. Name another "
        "column with --id-column, or number the rows with --row-ids"
    )


def _scalar(name: str, value: Any) -> Any:
    match value:
        case None:
            return _ABSENT
        case bool() | str() | bytes():
            return value
        case int() if -MAX_INT64 <= value <= MAX_INT64:
            return value
        case float():
            return _ABSENT if math.isnan(value) else value
        case decimal.Decimal():
            return float(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
    raise ValueError(
        f"{shown(name)} is {shown(value)}; metadata are numbers, texts, true and false. Name the "
        "columns to keep with --metadata, or none with --no-metadata"
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


class _JsonLines(_Source):
    """JSON objects, one a line."""

    def __init__(self, file: ItemFile) -> None:
        self._file = file

    def records(self) -> Iterator[_FileRow | tuple[int, str, str]]:
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
                    yield _FileRow(row, place, found)
                else:
                    yield row, place, "no JSON object, as {…}"
            row += 1


class _TextLines(_Source):
    """Texts, one a line."""

    def __init__(self, file: ItemFile) -> None:
        self._file = file
        self.columns = _Columns(file, [file.layout.text], file.layout, set())

    def records(self) -> Iterator[_FileRow | tuple[int, str, str]]:
        row = 0
        for number, line in _lines(self._file):
            if line.strip():
                yield _FileRow(row, f"line {number}", {self._file.layout.text: line})
                row += 1


def _lines(file: ItemFile) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1; refuses one that is too long."""
    stream, number = file.stream(), 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise file.refuse(f"line {number} is longer than {_MAX_LINE_BYTES} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise file.refuse(
                f"line {number} is no UTF-8 (byte {error.start + 1}); convert it to UTF-8"
            ) from error
        yield number, text.rstrip("\r\n")
    file.check_unchanged()


class _Csv(_Source):
    """Rows of CSV, whose first one names the columns.

    Metadata have one type in a column: a first pass looks whether all cells are integers, numbers,
    or true and false.
    """

    def __init__(self, file: ItemFile) -> None:
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
        self.columns = _Columns(file, self._names, file.layout, lists)
        self._types = self._found_types(self.columns.metadata)

    def scalar(self, name: str, value: Any) -> Any:
        if value is None or value == "":
            return _ABSENT
        return self._types[name](value)

    def records(self) -> Iterator[_FileRow | tuple[int, str, str]]:
        names = self._names
        for row, line, cells in self._cells():
            if len(cells) == len(names):
                yield _FileRow(row, f"line {line}", dict(zip(names, cells, strict=True)))
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
    return bool(_INTEGER.fullmatch(text)) and abs(int(text)) <= MAX_INT64


def _is_numeral(value: object) -> bool:
    return type(value) in (int, float) or (type(value) is str and bool(_NUMBER.fullmatch(value)))


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


class _Arrow(_Source):
    """Rows of Parquet and Arrow files."""

    def __init__(self, file: ItemFile) -> None:
        self._file = file
        self._pa = arrow_files.pyarrow(_READER)
        pa = self._pa
        begin = file.stream().read(6)
        if begin.startswith(b"PAR1"):
            opened = pa.parquet.ParquetFile(file.stream())
            schema, file.count = opened.schema_arrow, opened.metadata.num_rows
            self._batches: Callable[[], Iterator[Any]] = partial(
                opened.iter_batches, batch_size=_ARROW_ROWS
            )
        elif begin.startswith(b"ARROW1"):
            reader = pa.ipc.open_file(pa.memory_map(str(file.path)))
            schema = reader.schema
            self._batches = lambda: map(reader.get_batch, range(reader.num_record_batches))
        else:
            raise file.refuse("its first bytes are of no Parquet and no Arrow file")
        self._list_names = {each.name for each in schema if _is_list(pa.types, each.type)}
        columns = _Columns(file, schema.names, file.layout, self._list_names)
        self.columns = columns
        self._used = [*columns.vector, *columns.metadata, *filter(None, (columns.id, columns.text))]

    def records(self) -> Iterator[_FileRow | tuple[int, str, str]]:
        row = 0
        for whole in self._batches():
            for start in range(0, len(whole), _ARROW_ROWS):
                batch = whole.slice(start, _ARROW_ROWS)
                found = {name: self._column(name, batch.column(name)) for name in self._used}
                for at in range(len(batch)):
                    yield _FileRow(row, f"row {row}", {n: each[at] for n, each in found.items()})
                    row += 1

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


_ARROW_ROWS: Final = 4096  # that are read at once


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
