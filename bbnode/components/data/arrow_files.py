"""Files that pyarrow reads as a table: CSV, Parquet, Arrow IPC, and folders of these.

Rule: Arrow files are mapped, so that a table may be larger than memory; CSV and Parquet are read
into it. pyarrow is imported when the first file is opened.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bbnode.components.data import arrow_sizes, number_text, text_columns
from bbnode.components.data.arrow_sizes import group_bytes, ipc_unpacked
from bbnode.components.data.csv_files import BadCsv, CsvFile, CsvFormat, CsvTable
from bbnode.components.data.data_file import UNREADABLE, DataFile, Room, named, read_whole, told
from bbnode.components.data.number_text import NumberFormat
from bbnode.components.data.text_columns import UnsuitableColumn
from bbnode.components.errors import DataUnavailable
from bbnode.components.libraries import PYARROW
from bbnode.ir.decoding import shown
from bbnode.ir.installation import install

logger = logging.getLogger(__name__)

WANTED = (
    "a .csv, .tsv, .parquet, .arrow or .feather file, a folder of one kind of these, or a data set "
    "of Hugging Face that was saved to disk"
)
CSV = (".csv", ".tsv")
# Data files in a folder are those with one of these endings; what a single file is, its first
# bytes say.
ENDINGS = (*CSV, ".parquet", ".pq", ".arrow", ".feather", ".ipc")
MAX_FILES = 256  # of one table; each stays open
MAX_JSON_BYTES = 1 << 24  # of state.json and the like
_BATCH_ROWS = 1 << 14  # of Parquet that are read at once
_MAPPED = "raise it, or write an uncompressed .arrow file, which is mapped"

_PARQUET, _ARROW, _FEATHER_1, _STREAM = b"PAR1", b"ARROW1", b"FEA1", b"\xff\xff\xff\xff"
# Keys of a column's metadata under which files keep its unit.
_UNIT_KEYS = (b"unit", b"units")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The columns of a table that are used, and the way their texts are read.

    Attributes:
        csv: the way CSV is written.
        marks: of numbers that are texts.
        used: returns the names of the columns that are used, in their order, of all those of a file
            at a path and those that are an index of it; raises DataUnavailable where one is
            missing.
        texts: by name of a column that is a text, also where it looks like numbers, its values.
        is_words: returns whether a column of texts may stay one.
        units: by column, what stands beside each number.
        dates: by column, the form of its dates.
        numbers: columns of whole numbers that are quantities, whatever they look like.
    """

    csv: CsvFormat
    marks: NumberFormat
    used: Callable[[Path, Sequence[str], Collection[str]], Sequence[str]]
    texts: Mapping[str, Sequence[str]]
    is_words: Callable[[str], bool]
    units: Mapping[str, str]
    dates: Mapping[str, str]
    numbers: Collection[str]


@dataclass(frozen=True)
class FilePart:
    """One file of a table: its rows, and how to find them in it."""

    path: Path
    count: int
    csv: CsvFile | None = None


@dataclass(frozen=True)
class OpenedTable:
    """A pyarrow Table of the columns that are used.

    Attributes:
        names: of its columns.
        there: names of all columns that some of the files have.
        mapped: the files that it is a view of.
        classes: names of classes by column, as Hugging Face keeps them.
        declared: columns of which the file itself lists the categories.
        units: by column, as the file keeps them.
        index: columns that are left out, for the file says that they are its index.
    """

    table: Any
    names: tuple[str, ...]
    there: tuple[str, ...]
    mapped: tuple[DataFile, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()
    units: Mapping[str, str] = field(default_factory=dict)
    index: tuple[str, ...] = ()
    parts: tuple[FilePart, ...] = ()

    def place(self, row: int) -> tuple[str, str]:
        """Return the file of a row and, of a CSV file, ", line N"; "" where nobody knows."""
        for part in self.parts:
            if row < part.count:
                line = part.csv.line_of(row) if part.csv is not None else 0
                return named(part.path), f", line {line}" if line else ""
            row -= part.count
        return "", ""


def pyarrow(component: str) -> Any:
    """Import pyarrow with the modules that are used. DataUnavailable where it is missing."""
    try:
        for module in ("pyarrow.compute", "pyarrow.csv", "pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(module)
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataUnavailable(
            f"{component}: pyarrow is not installed; run: {install(PYARROW.requirement)}"
        ) from error


def open_table(component: str, path: Path, reading: Reading, room: Room) -> OpenedTable:
    """Return the table in a file or folder. Raises DataUnavailable.

    Texts of Parquet are dictionaries in it: one that is repeated stands in memory once. Columns of
    several files are put together by their names, as the type that holds them all.
    """
    pa = pyarrow(component)
    opener = _Opener(component, pa, reading, room)
    at = path
    try:
        tables = [opener.read(at := file) for file in opener.files_of(path)]
        parts = opener.parts
        joined = _joined(pa, component, tables, [part.path for part in parts])
        metadata = next((table.schema.metadata for table in tables if table.schema.metadata), None)
        whole = joined.replace_schema_metadata(metadata)
        return OpenedTable(
            whole, tuple(whole.column_names), tuple(opener.there), tuple(opener.mapped),
            _class_names(metadata), frozenset(opener.declared), opener.units,
            tuple(opener.index), tuple(parts),
        )  # fmt: skip
    except UnicodeError as error:
        raise DataUnavailable(
            f"{component}: cannot read {named(at)}: its text is not in the encoding "
            f"{shown(reading.csv.encoding)}{_byte_of(error)}; set `encoding` "
            '("cp1252", "latin-1", …)'
        ) from error
    except BadCsv as error:
        raise DataUnavailable(f"{component}: cannot read {named(at)}: {error}") from error
    except (*UNREADABLE, pa.lib.ArrowException) as error:
        raise DataUnavailable(
            f"{component}: cannot read {named(at)}: {told(error)}; set `path` to {WANTED}"
        ) from error


def open_parquet(pa: Any, opened: Any) -> Any:
    """Return a ParquetFile that reads texts and bytes as dictionaries. Raises pyarrow's errors."""
    meta = pa.parquet.read_metadata(opened)
    opened.seek(0)
    return pa.parquet.ParquetFile(
        opened, metadata=meta, read_dictionary=arrow_sizes.text_columns(meta.schema)
    )


class _Opener:
    def __init__(self, component: str, pa: Any, reading: Reading, room: Room) -> None:
        self._component, self._pa, self._reading, self._room = component, pa, reading, room
        self.mapped: list[DataFile] = []
        self.declared: set[str] = set()
        self.units: dict[str, str] = {}
        self.index: list[str] = []
        self.there: dict[str, None] = {}
        self.parts: list[FilePart] = []

    def files_of(self, path: Path) -> list[Path]:
        """Return the data files at a path, in their order."""
        if not path.is_dir():
            return [path]
        if (path / "dataset_dict.json").exists():
            splits = self._json(path / "dataset_dict.json").get("splits")
            listed = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
            raise DataUnavailable(
                f"{self._component}: {named(path)} is a data set in splits ({listed}); set `path` "
                "to one of these folders, and share out with `split` where there is but one"
            )
        if (path / "state.json").exists():
            found = self._hugging_face(path)
        else:
            there = sorted(each for each in path.iterdir() if each.suffix.lower() in ENDINGS)
            found = [each for each in there if not each.name.startswith(".")]
            if len(found) < len(there):  # such as "._1.csv", of a stick that was in a Mac
                logger.info(
                    "%s: hidden files in %s are left out: %s", self._component, named(path),
                    ", ".join(shown(each.name) for each in there if each not in found)[:1000],
                )  # fmt: skip
            kinds = sorted({each.suffix.lower() for each in found})
            if len(kinds) != 1:
                raise DataUnavailable(
                    f"{self._component}: the folder {named(path)} has "
                    f"{' and '.join(kinds) or 'no data'} files; set `path` to {WANTED}"
                )
        if len(found) > MAX_FILES:
            raise DataUnavailable(
                f"{self._component}: {named(path)} has {len(found)} files, more than {MAX_FILES}; "
                "write them as fewer and larger ones"
            )
        return found

    def _hugging_face(self, folder: Path) -> list[Path]:
        state = self._json(folder / "state.json")
        if state.get("_indices_data_files"):
            raise DataUnavailable(
                f"{self._component}: {named(folder)} keeps its rows in another order than it has; "
                "save it again after dataset.flatten_indices()"
            )
        names = [each["filename"] for each in state["_data_files"]]
        if not names or any(Path(name).name != name or name in ("", "..") for name in names):
            raise ValueError("state.json names no files of this folder")
        return [folder / name for name in names]

    def _json(self, path: Path) -> dict[str, Any]:
        found = json.loads(read_whole(path, self._component, MAX_JSON_BYTES))
        if not isinstance(found, dict):
            raise TypeError(f"{path.name} is no JSON object")
        return found

    def read(self, path: Path) -> Any:
        """Return the columns of a file that are used, numbers and dates read out of texts."""
        file = DataFile(path, self._component)
        begin = file.read(0, min(file.size, len(_ARROW)))
        if begin.startswith(_PARQUET):
            return self._used(self._parquet(file), FilePart(path, 0))
        if begin.startswith((_ARROW, _STREAM)):
            self.mapped.append(file)
            table = self._ipc(file, is_file=begin.startswith(_ARROW))
            self.declared.update(
                each.name for each in table.schema if self._pa.types.is_dictionary(each.type)
            )
            return self._used(table, FilePart(path, 0))
        if begin.startswith(_FEATHER_1):
            raise ValueError("it is Feather version 1; write it again as version 2")
        if path.suffix.lower() in CSV:
            return self._csv_table(file)
        raise ValueError("neither its first bytes nor its ending are of a table")

    def _used(self, table: Any, part: FilePart, read: CsvTable | None = None) -> Any:
        """Return the columns that are used, in their order. Raises DataUnavailable."""
        part = replace(part, count=len(table))
        self.parts.append(part)
        index = [each for each in _index_names(table.schema.metadata) if each in table.column_names]
        used = list(dict.fromkeys(self._reading.used(part.path, table.column_names, index)))
        self.there.update(dict.fromkeys(table.column_names))
        self.index = [name for name in index if name not in used]
        for name in used:
            field = table.schema.field(name)
            for key in _UNIT_KEYS:
                if field.metadata and key in field.metadata:
                    self.units[name] = field.metadata[key].decode("utf-8", "replace")
        table = table.select(used)
        for at, name in enumerate(used):
            column = table.column(at)
            try:
                column.validate(full=True)  # a broken file's offsets would be followed to anywhere
                made = self._resolved(name, column, read)
            except UnsuitableColumn as error:
                line = ""
                if part.csv is not None and error.row is not None:
                    found = part.csv.line_of(error.row)
                    line = f", line {found}" if found else ""
                raise DataUnavailable(
                    f"{self._component}: column {shown(name)} of {named(part.path)}{line}: {error}"
                ) from error
            except (*UNREADABLE, self._pa.lib.ArrowException) as error:
                raise DataUnavailable(
                    f"{self._component}: column {shown(name)} of {named(part.path)}: cannot be "
                    f"read: {told(error)}"
                ) from error
            if made is not column:
                table = table.set_column(at, name, made)
        return table

    def _resolved(self, name: str, column: Any, read: CsvTable | None) -> Any:
        """Return a column with its texts as numbers, where they are. Raises UnsuitableColumn."""
        how, pa = self._reading, self._pa
        words = how.csv.missing_words
        if name in how.dates:
            return text_columns.as_days(pa, column, how.dates[name], words)
        is_text = text_columns.is_text(pa.types, column.type)
        if name in how.units and not (is_text or pa.types.is_null(column.type)):
            raise UnsuitableColumn(
                f"`units` says {shown(how.units[name])}, and it holds {column.type} without it; "
                "leave it out of `units` if its numbers are of that unit all the same"
            )
        if read is not None and name not in how.numbers:
            for rows, why in ((read.leading, number_text.leading_zeros), (read.huge, too_large)):
                if name in rows:
                    row, text = rows[name]
                    raise UnsuitableColumn(f"row {row} has {shown(text)}: {why(name)}", row)
        if read is not None and pa.types.is_binary(column.type):
            raise _undecoded(column, how.csv.encoding)
        if not is_text or name in how.texts:
            return column
        wanted = name in how.numbers or name in how.units
        if not wanted and (read is None or name in self.declared):
            found = None  # a file that has types of its own means texts by texts
        else:
            found = text_columns.as_numbers(
                pa, name, column, how.marks, how.units.get(name, ""), words, must=wanted,
                exact=name not in how.numbers,
            )  # fmt: skip
        if found is not None:
            return found
        if name not in self.declared and not how.is_words(name):
            raise text_columns.refusal(pa, name, column, how.marks, words)
        return column

    def _ipc(self, file: DataFile, *, is_file: bool) -> Any:
        # Of plain files, nothing is unpacked.
        self._room.take(file.path, ipc_unpacked(file, is_file=is_file), _MAPPED)
        source = self._pa.memory_map(str(file.path))
        if is_file:
            opened = self._pa.ipc.open_file(source)
            batches = [opened.get_batch(at) for at in range(opened.num_record_batches)]
        else:
            opened = self._pa.ipc.open_stream(source)
            batches = list(opened)
        return self._pa.Table.from_batches(batches, opened.schema)

    def _parquet(self, file: DataFile) -> Any:
        with file.stream() as opened:
            parquet = open_parquet(self._pa, opened)
            meta = parquet.metadata
            declared = sum(
                group_bytes(meta.row_group(at), meta.schema) for at in range(meta.num_row_groups)
            )
            # Runs of one value take next to nothing in the file, and their place in memory.
            self._room.take(file.path, declared, _MAPPED)
            read, batches = 0, []
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
                batches.append(batch)
                read += batch.nbytes
                if read > declared:  # which is then a lie, or a guess
                    self._room.take(file.path, read - declared, _MAPPED)
                    declared = read
            own = meta.schema.to_arrow_schema()  # which says what is a dictionary by itself
            self.declared.update(
                each.name for each in own if self._pa.types.is_dictionary(each.type)
            )
            table = self._pa.Table.from_batches(batches, parquet.schema_arrow)
            return table.replace_schema_metadata(own.metadata)

    def _csv_table(self, file: DataFile) -> Any:
        how = self._reading
        made = CsvFile(file, how.csv)
        texts = [*how.texts, *how.units, *(name for name, form in how.dates.items() if form)]
        kept = [word for words in how.texts.values() for word in words]
        read = made.read(self._pa, self._room, _MAPPED, texts, kept)
        _tell_totals(self._component, self._pa, read.table, file.path)
        return self._used(read.table, FilePart(file.path, 0, made), read)


def _tell_totals(component: str, pa: Any, table: Any, path: Path) -> None:
    """Log that the last row looks like a sum of the others, which only a column's word shows."""
    for column in table.columns if len(table) > 1 else ():
        if text_columns.is_text(pa.types, column.type):
            word = str(column[len(table) - 1].as_py() or "")
            if word.strip(" :").casefold() in number_text.TOTALS:
                logger.warning(
                    "%s: the last row of %s has %s and is taken as an example; remove it if it is "
                    "a total", component, path, shown(word),
                )  # fmt: skip


def too_large(name: str) -> str:
    """Return why whole numbers that a float64 can't tell apart are refused."""
    return (
        "whole numbers beyond 9007199254740992 lose their last digits; leave the column out with "
        f"`ignore`, or set numbers = [{number_text.quoted(name)}] if it is a quantity"
    )


def _undecoded(column: Any, encoding: str) -> UnsuitableColumn:
    """Return the refusal of a column of CSV that pyarrow leaves as bytes, for they are no UTF-8."""
    for row, value in enumerate(column.to_pylist()):
        try:
            (value or b"").decode("utf-8")
        except UnicodeDecodeError:
            return UnsuitableColumn(
                f"row {row} has {shown(value)}, text that is not in the encoding "
                f'{shown(encoding)}; set `encoding` ("cp1252", "latin-1", …)', row
            )  # fmt: skip
    return UnsuitableColumn("it holds bytes; leave it out with `ignore`")


def _joined(pa: Any, component: str, tables: Sequence[Any], paths: Sequence[Path]) -> Any:
    """Return tables as one: columns by name, each of the type that holds all of its values."""
    first = tables[0].column_names
    for table, path in zip(tables[1:], paths[1:], strict=True):
        for here, there, one, other in (
            (table.column_names, first, path, paths[0]), (first, table.column_names, paths[0], path)
        ):  # fmt: skip
            known = set(there)
            more = [name for name in here if name not in known]
            if more:
                raise DataUnavailable(
                    f"{component}: {named(one)} has the column {shown(more[0])}, and "
                    f"{named(other)} has not; "
                    "leave it out with `ignore` or `features`, or put the files into folders of "
                    "their own"
                )
    if len(tables) == 1:
        return tables[0]
    made = []
    for name in first:
        columns = [table.column(name) for table in tables]
        kind = columns[0].type
        for column, path in zip(columns[1:], paths[1:], strict=True):
            both = _common(pa, kind, column.type)
            if both is None:
                before = next(p for c, p in zip(columns, paths, strict=True) if c.type == kind or
                              not pa.types.is_null(c.type))  # fmt: skip
                raise DataUnavailable(
                    f"{component}: column {shown(name)} is {_noun(pa.types, column.type)} in "
                    f"{named(path)} and {_noun(pa.types, kind)} in {named(before)}; write it alike "
                    "in all files"
                )
            kind = both
        try:
            chunks = [
                chunk
                for column in columns
                for chunk in (column if column.type == kind else column.cast(kind)).chunks
            ]
        except pa.lib.ArrowException as error:
            raise DataUnavailable(
                f"{component}: column {shown(name)} of the files in {paths[0].parent} cannot be "
                f"read as {kind}: {told(error)}"
            ) from error
        made.append(pa.chunked_array(chunks, kind))
    return pa.table(made, names=first)


def _common(pa: Any, one: Any, other: Any) -> Any:
    """Return the type that holds values of both types; None where there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if text_columns.is_text(pa.types, one) and text_columns.is_text(pa.types, other):
        if pa.types.is_dictionary(one) and pa.types.is_dictionary(other):
            return pa.dictionary(pa.int32(), pa.large_string())
        return pa.large_string()
    kinds = pa.types.is_integer(one), pa.types.is_integer(other)
    if all(kinds):  # the signed type of 64 bits, as far as it reaches
        return pa.int64()
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    try:
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.lib.ArrowException:
        return None
    is_number = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (one, other)]
    if all(is_number) and any(kinds):
        return pa.float64()
    return found


def _noun(types: Any, kind: Any) -> str:
    if text_columns.is_text(types, kind):
        return "text"
    if types.is_integer(kind):
        return "whole numbers"
    return "numbers" if types.is_floating(kind) else str(kind)[:80]


def _byte_of(error: UnicodeError) -> str:
    return f" (byte {error.start + 1})" if isinstance(error, UnicodeDecodeError) else ""


def _index_names(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """Return the columns that pandas wrote as the index of a table, as its metadata say."""
    try:
        kept = json.loads((metadata or {}).get(b"pandas", b"{}"))
        return [name for name in kept.get("index_columns", []) if isinstance(name, str)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return []


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return the names of ClassLabel columns, which Hugging Face keeps in the schema's metadata."""
    found: dict[str, tuple[str, ...]] = {}
    try:
        kept = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        features = kept.get("info", {}).get("features", {})
        for column, feature in features.items():
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                names = feature.get("names")
                if isinstance(names, list) and all(isinstance(name, str) for name in names):
                    found[column] = tuple(names)
    except (ValueError, AttributeError, RecursionError):
        return {}  # names are an extra; the numbers are what counts
    return found
