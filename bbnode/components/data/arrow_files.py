"""Files that pyarrow reads as a table: CSV, Parquet, Arrow IPC, and folders of these.

Rule: Arrow files are mapped, so that a table may be larger than memory; CSV and Parquet are read
into it. pyarrow is imported when the first file is opened.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.components.data.arrow_sizes import group_bytes, ipc_unpacked, text_columns
from bbnode.components.data.data_file import UNREADABLE, DataFile, Room, read_whole, told
from bbnode.components.errors import DataUnavailable
from bbnode.ir.installation import install

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
_NULLS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null",
)  # fmt: skip


@dataclass(frozen=True)
class CsvFormat:
    """The way a CSV file is written.

    `missing_words` are missing values besides the usual ones; the columns of `texts` are strings,
    also where all that stands there are numbers.
    """

    delimiter: str
    encoding: str
    header: bool
    missing_words: Sequence[str]
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class OpenedTable:
    """A pyarrow Table.

    Attributes:
        names: of its columns.
        mapped: the files that it is a view of.
        classes: names of classes by column, as Hugging Face keeps them.
    """

    table: Any
    names: tuple[str, ...]
    mapped: tuple[DataFile, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def pyarrow(component: str) -> Any:
    """Import pyarrow with the modules that are used. DataUnavailable where it is missing."""
    try:
        for module in ("pyarrow.compute", "pyarrow.csv", "pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(module)
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataUnavailable(
            f"{component}: pyarrow is not installed; run: {install('pyarrow>=18')}"
        ) from error


def open_table(component: str, path: Path, csv: CsvFormat, room: Room) -> OpenedTable:
    """Return the table in a file or folder. Raises DataUnavailable.

    Texts of Parquet are dictionaries in it: one that is repeated stands in memory once.
    """
    pa = pyarrow(component)
    opener = _Opener(component, pa, csv, room)
    try:
        files = opener.files_of(path)
        tables = [opener.read(file) for file in files]
        schemas = {table.schema.remove_metadata() for table in tables}
        if len(schemas) > 1:
            raise DataUnavailable(
                f"{component}: the files in {path} have different columns or types; keep one kind "
                "of table in the folder"
            )
        whole = pa.concat_tables(tables)
        classes = _class_names(whole.schema.metadata)
        return OpenedTable(whole, tuple(whole.column_names), tuple(opener.mapped), classes)
    except (*UNREADABLE, pa.lib.ArrowException) as error:
        raise DataUnavailable(
            f"{component}: cannot read {path}: {told(error)}{_hint(error, csv)}; set `path` to "
            f"{WANTED}"
        ) from error


def open_parquet(pa: Any, opened: Any) -> Any:
    """Return a ParquetFile that reads texts and bytes as dictionaries. Raises pyarrow's errors."""
    meta = pa.parquet.read_metadata(opened)
    opened.seek(0)
    return pa.parquet.ParquetFile(opened, metadata=meta, read_dictionary=text_columns(meta.schema))


class _Opener:
    def __init__(self, component: str, pa: Any, csv: CsvFormat, room: Room) -> None:
        self._component, self._pa, self._csv, self._room = component, pa, csv, room
        self.mapped: list[DataFile] = []

    def files_of(self, path: Path) -> list[Path]:
        """Return the data files at a path, in their order."""
        if not path.is_dir():
            return [path]
        if (path / "dataset_dict.json").exists():
            splits = self._json(path / "dataset_dict.json").get("splits")
            listed = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
            raise DataUnavailable(
                f"{self._component}: {path} is a data set in splits ({listed}); set `path` to one "
                "of these folders, and share out with `split` where there is but one"
            )
        if (path / "state.json").exists():
            found = self._hugging_face(path)
        else:
            found = sorted(each for each in path.iterdir() if each.suffix.lower() in ENDINGS)
            kinds = sorted({each.suffix.lower() for each in found})
            if len(kinds) != 1:
                raise DataUnavailable(
                    f"{self._component}: the folder {path} has {' and '.join(kinds) or 'no data'} "
                    f"files; set `path` to {WANTED}"
                )
        if len(found) > MAX_FILES:
            raise DataUnavailable(
                f"{self._component}: {path} has {len(found)} files, more than {MAX_FILES}; write "
                "them as fewer and larger ones"
            )
        return found

    def _hugging_face(self, folder: Path) -> list[Path]:
        state = self._json(folder / "state.json")
        if state.get("_indices_data_files"):
            raise DataUnavailable(
                f"{self._component}: {folder} keeps its rows in another order than it has; save "
                "it again after dataset.flatten_indices()"
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
        file = DataFile(path, self._component)
        begin = file.read(0, min(file.size, len(_ARROW)))
        if begin.startswith(_PARQUET):
            return self._parquet(file)
        if begin.startswith((_ARROW, _STREAM)):
            self.mapped.append(file)
            return self._ipc(file, is_file=begin.startswith(_ARROW))
        if begin.startswith(_FEATHER_1):
            raise ValueError("it is Feather version 1; write it again as version 2")
        if path.suffix.lower() in CSV:
            return self._csv_table(file)
        raise ValueError("neither its first bytes nor its ending are of a table")

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
            return self._pa.Table.from_batches(batches, parquet.schema_arrow)

    def _csv_table(self, file: DataFile) -> Any:
        csv, how = self._pa.csv, self._csv
        self._room.take(file.path, file.size, _MAPPED)
        by_ending = "\t" if file.path.suffix.lower() == ".tsv" else ","
        with file.stream() as opened:
            return csv.read_csv(
                opened,
                read_options=csv.ReadOptions(
                    encoding=how.encoding, autogenerate_column_names=not how.header
                ),
                parse_options=csv.ParseOptions(
                    delimiter=how.delimiter or by_ending, newlines_in_values=True
                ),
                convert_options=csv.ConvertOptions(
                    strings_can_be_null=True,
                    null_values=[*_NULLS, *how.missing_words],
                    column_types=dict.fromkeys(how.texts, self._pa.string()),
                ),
            )


def _hint(error: BaseException, csv: CsvFormat) -> str:
    if isinstance(error, UnicodeError):
        return f'; its text is not in the encoding {csv.encoding!r}, set `encoding` ("latin-1", …)'
    return ""


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
