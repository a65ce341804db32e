"""CSV files as people have them: read by pyarrow, and explained line by line where that fails.

Rule: what a file holds is never printed raw, and a fault is one of a line. One quick pass over the
bytes finds what pyarrow would read without a word (NUL bytes, a quote that never closes, numbers
that begin with 0); the file is looked through line by line only once something is wrong with it.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

import numpy as np

from bbnode.components.data.data_file import DataFile, Room
from bbnode.ir.decoding import shown

# Words that are a missing value in any column; pandas has the same.
MISSING: Final = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null",
)  # fmt: skip

_BLOCK_BYTES: Final = 1 << 20  # that pyarrow reads at once; a line has to fit
_MAX_BLOCK_BYTES: Final = 1 << 28
_HEAD_BYTES: Final = 1 << 16
_SCANNED_BYTES: Final = 1 << 22
_MARKS: Final = ",;\t|"
_BOMS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
_UNKEPT: Final = "\x00bbnode: the end of the file\x00"
_EXACT: Final = float(1 << 53)  # up to here a float64 tells whole numbers apart


class BadCsv(ValueError):
    """A CSV file can't be read; the text names the line, the likely cause and the remedy."""


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """The way a CSV file is written.

    Attributes:
        decimal: the mark before the fraction.
        comment: lines that begin with it are left out; "" for none.
        skip_lines: lines above the heading.
        skip_rows: rows below the heading.
        missing_words: missing values besides `MISSING`.
    """

    delimiter: str = ""
    encoding: str = "utf8"
    header: bool = True
    decimal: str = "."
    comment: str = ""
    skip_lines: int = 0
    skip_rows: int = 0
    missing_words: Sequence[str] = ()


@dataclass(frozen=True)
class CsvTable:
    """A CSV file that was read.

    Attributes:
        leading: the columns of whole numbers of which one begins with 0: the first such row, and
            its text.
        huge: the columns with whole numbers that no float64 tells apart, likewise.
    """

    table: Any
    leading: Mapping[str, tuple[int, str]]
    huge: Mapping[str, tuple[int, str]]


class CsvFile:
    """One CSV file: read as a table, or line by line."""

    def __init__(self, file: DataFile, how: CsvFormat) -> None:
        """Look at the beginning of the file. Raises BadCsv, UnicodeError, DataUnavailable."""
        self._file, self._how = file, how
        head = file.read(0, min(file.size, _HEAD_BYTES))
        for bom, encoding in _BOMS:
            if head.startswith(bom) and not _is_wide(how.encoding):
                raise BadCsv(
                    f'it is {encoding.upper()}, not {how.encoding}; set encoding = "{encoding}"'
                )
        if b"\0" in head and not _is_wide(how.encoding):
            raise BadCsv(_with_nul(head))
        self._whole: bytes | None = None
        self._original: bytes | None = None  # as UTF-8, with its comments
        if _is_wide(how.encoding):  # of which no byte is a comma or a digit by itself
            text = file.read(0, file.size).decode(how.encoding)
            self._whole = self._original = text.removeprefix("\ufeff").encode()
            head = self._whole[:_HEAD_BYTES]
        self._encoding = "utf8" if self._whole is not None else how.encoding
        head = head.removeprefix(codecs.BOM_UTF8)
        self._skipped = how.skip_lines
        self._delimiter = how.delimiter or ("\t" if file.path.suffix.lower() == ".tsv" else ",")
        said = re.match(rb'"?sep=(.)"?[^\r\n]*(?:\r\n|\r|\n)', head)
        if said and not how.skip_lines:  # as spreadsheets write and take it
            mark = chr(said[1][0])
            if how.delimiter not in ("", mark):
                raise BadCsv(
                    f"its first line says sep={shown(mark)}, and `delimiter` is "
                    f"{shown(how.delimiter)}; leave `delimiter` out"
                )
            self._delimiter, self._skipped = mark, 1
        if how.comment:
            self._without_comments()

    def _without_comments(self) -> None:
        raw = self._file.read(0, self._file.size) if self._whole is None else self._whole
        mark = re.escape(self._how.comment.encode(self._encoding))
        begin = rb"(?:(?<=\n)|(?<=\r)|\A(?:\xef\xbb\xbf)?)"
        line = begin + mark + rb"[^\r\n]*(?:\r\n|\r|\n|\Z)"
        if re.search(line, raw) is None:
            return
        # What stands in quotes is no comment.
        quoted = rb'"[^"]*"'
        self._whole = re.sub(
            quoted + rb"|" + line, lambda found: found[0] if found[0][:1] == b'"' else b"", raw
        )

    def read(
        self, pa: Any, room: Room, remedy: str, texts: Sequence[str], kept: Sequence[str]
    ) -> CsvTable:
        """Return the table. Raises BadCsv, UnicodeError, pyarrow's errors, DataUnavailable.

        Args:
            texts: names of columns that are texts, also where all that stands there are numbers.
            kept: words that are no missing values in these columns.
        """
        room.take(self._file.path, self._file.size, remedy)
        if self._file.size == 0:
            raise BadCsv("it is empty, and a table has a heading")
        has_zeros = self._scanned()
        try:
            table = self._table(pa, dict.fromkeys(texts, pa.string()))
        except pa.lib.ArrowInvalid as error:
            raise BadCsv(self._fault(str(error))) from error
        own = [name for name in texts if name in table.column_names]
        if own and not set(kept).isdisjoint((*MISSING, *self._how.missing_words)):
            words = [each for each in (*MISSING, *self._how.missing_words) if each not in kept]
            again = self._table(pa, dict.fromkeys(own, pa.string()), words, own)
            for name in own:
                table = table.set_column(table.column_names.index(name), name, again[name])
        # In one piece: rows are gathered from many blocks more slowly than it takes to join them.
        table = table.combine_chunks()
        return CsvTable(table, *self._identifiers(pa, table, has_zeros=has_zeros))

    def _table(
        self, pa: Any, types: Any, missing: Sequence[str] | None = None,
        columns: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        how = self._how
        block = _BLOCK_BYTES
        while True:
            try:
                with self.stream() as opened:
                    return pa.csv.read_csv(
                        opened,
                        read_options=pa.csv.ReadOptions(
                            encoding=self._encoding,
                            autogenerate_column_names=not how.header,
                            skip_rows=self._skipped,
                            skip_rows_after_names=how.skip_rows,
                            block_size=block,
                        ),
                        parse_options=pa.csv.ParseOptions(
                            delimiter=self._delimiter, newlines_in_values=True
                        ),
                        convert_options=pa.csv.ConvertOptions(
                            strings_can_be_null=True,
                            null_values=[*MISSING, *how.missing_words]
                            if missing is None
                            else missing,
                            column_types=types,
                            include_columns=list(columns),
                            decimal_point=how.decimal,
                        ),
                    )
            except pa.lib.ArrowInvalid as error:  # a line that is longer than a block
                if "straddling" not in str(error) or block >= _MAX_BLOCK_BYTES:
                    raise
                block *= 16

    def stream(self) -> BinaryIO:
        """Return the bytes of the file, without its comments."""
        if self._whole is None:
            return self._file.stream()
        return cast(BinaryIO, io.BytesIO(self._whole))

    def _scanned(self) -> bool:
        """Return whether a number may begin with 0. Raises BadCsv."""
        zeros, quotes = False, 0
        ends = np.frombuffer((self._delimiter + '\n\r" ').encode("latin-1", "replace"), np.uint8)
        with self.stream() as opened:
            last = b"\n"
            while block := opened.read(_SCANNED_BYTES):
                if b"\0" in block:
                    raise BadCsv(_with_nul(block))
                quotes += block.count(b'"')
                zeros = zeros or _has_leading_zero(last + block, ends)
                last = block[-2:]
        if quotes % 2 and (line := self._open_quote()):
            raise BadCsv(
                f"line {line}: a quote begins there and never closes; close it, or write a quote "
                "that belongs to a text twice"
            )
        return zeros

    def _identifiers(
        self, pa: Any, table: Any, *, has_zeros: bool
    ) -> tuple[dict[str, tuple[int, str]], dict[str, tuple[int, str]]]:
        """Return the columns whose whole numbers begin with 0, and those with too large ones."""
        pc = pa.compute
        whole = [
            field.name for field in table.schema if has_zeros and pa.types.is_integer(field.type)
        ]
        huge = []
        for at, field in enumerate(table.schema):
            if pa.types.is_floating(field.type):
                ends = pc.min_max(table.column(at))
                low, high = ends["min"].as_py(), ends["max"].as_py()
                if low is not None and max(-low, high) >= _EXACT:
                    huge.append(field.name)
        times = Counter(table.column_names)
        again = [name for name in (*whole, *huge) if times[name] == 1]
        if not again:
            return {}, {}
        texts = self._table(pa, dict.fromkeys(again, pa.string()), None, again)

        def found(names: Sequence[str], form: str) -> dict[str, tuple[int, str]]:
            made = {}
            for name in set(names) & set(again):
                row = pc.index(pc.match_substring_regex(texts[name], form), True).as_py()
                if row >= 0:
                    made[name] = row, texts[name][row].as_py()
            return made

        return found(whole, r"^\s*[+-]?0[0-9]+\s*$"), found(huge, r"^\s*[+-]?[0-9]{16,}\s*$")

    # Line by line, of files that something is wrong with.

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of the line where each row begins (from 1), and its cells.

        The heading comes first, if there is one. Blank lines are no rows.
        """
        with io.TextIOWrapper(
            self._file.stream() if self._original is None else io.BytesIO(self._original),
            self._encoding, errors="replace", newline="",
        ) as text:  # fmt: skip
            lines = _Lines(text, self._how.comment, self._skipped)
            reader = csv.reader(lines, delimiter=self._delimiter)
            while True:
                lines.first = 0
                try:
                    cells = next(reader, None)
                except csv.Error:  # a cell that is larger than its bound
                    return
                if cells is None:
                    return
                if cells:
                    cells[0] = cells[0].removeprefix("\ufeff")
                    yield lines.first, cells

    def line_of(self, row: int) -> int:
        """Return the number of the line of a row of the table; 0 if it can't be found."""
        wanted = row + self._how.header + self._how.skip_rows
        return next((line for at, (line, _) in enumerate(self.rows()) if at == wanted), 0)

    def _open_quote(self) -> int:
        """Return the line where a quote begins that never closes; 0 if there is none."""
        line = 0
        with io.TextIOWrapper(self.stream(), self._encoding, errors="replace", newline="") as text:
            lines = _Lines(text, self._how.comment, self._skipped, end=f"\n{_UNKEPT}\n")
            reader = csv.reader(lines, delimiter=self._delimiter)
            cells: list[str] = []
            while True:
                lines.first = 0
                try:
                    found = next(reader, None)
                except csv.Error:  # most likely a quote that took in half the file
                    return lines.first
                if found is None:
                    break
                if found:
                    cells, line = found, lines.first
        return 0 if cells == [_UNKEPT] else line

    def _fault(self, message: str) -> str:
        """Return what is wrong with the file, on one line, without pyarrow's copy of it."""
        wanted = 0
        names: list[str] = []
        first = 0
        odd: tuple[int, list[str]] | None = None
        for line, cells in self.rows():
            if not wanted:
                wanted, names, first = len(cells), cells, line
            elif len(cells) != wanted and odd is None:
                odd = line, cells
                break
        if not wanted:
            return "it is empty, and a table has a heading"
        if odd is None:
            if "straddling" in message:
                return (
                    f"one of its lines has more than {_MAX_BLOCK_BYTES >> 20} MiB; a quote that "
                    "never closes does that"
                )
            return "its lines do not fit each other; write it again as plain CSV"
        line, cells = odd
        listed = ", ".join(shown(cell) for cell in cells[:3]) + (", …" if len(cells) > 3 else "")
        what = f"line {line} has {len(cells)} value(s) ({listed}), and line {first} {wanted}"
        return f"{what}; {self._why(names, first, cells, wanted)}"

    def _why(self, names: list[str], first: int, cells: list[str], wanted: int) -> str:
        begin = names[0].strip()
        mark = self._delimiter
        if begin[:1] in ("#", "%", "!") or begin[:2] in ("//", "--"):
            length = 1 if begin[:1] in "#%!" else 2
            return (
                f'if lines that begin with "{begin[:length]}" are comments, set comment = '
                f'"{begin[:length]}"'
            )
        if cells[0].strip()[:1] == "#":
            return 'if lines that begin with "#" are comments, set comment = "#"'
        others = [each for each in _MARKS if each != mark and each in names[0]]
        if wanted == 1 and others:
            return f"is the delimiter {shown(others[0])}? Set `delimiter`"
        if len(cells) > wanted:
            if cells[-1] == "" and len(cells) == wanted + 1:
                return "it ends with a delimiter, and the heading does not; write both alike"
            if wanted == 1 or len([name for name in names if name.strip()]) < len(cells) // 2 + 1:
                return (
                    f"if the table begins below line {first}, set skip_lines to the number of "
                    "lines above the heading"
                )
            if mark == "," and all(re.fullmatch(r"\s*-?[\d.]*\s*", cell) for cell in cells):
                return (
                    "decimal commas without quotes can't be told from delimiters: write the file "
                    'again with delimiter = ";"'
                )
            return "put a value that holds the delimiter into quotes"
        return "a value is missing, or the line was cut off; complete or remove it"


class _Lines:
    """The lines of a text without those that are skipped; knows where a row begins."""

    def __init__(self, text: Iterable[str], comment: str, skipped: int, end: str = "") -> None:
        self._lines = enumerate(text, 1)
        self._comment, self._skipped, self._end = comment, skipped, end
        self.first = 0  # the line that was asked for first since this was set to 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        for number, line in self._lines:
            if number <= self._skipped:
                continue
            if self._comment and not self.first and line.startswith(self._comment):
                continue
            self.first = self.first or number
            return line
        if self._end:
            line, self._end = self._end, ""
            return line
        raise StopIteration


def _is_wide(encoding: str) -> bool:
    name = codecs.lookup(encoding).name
    return name.startswith(("utf-16", "utf-32", "utf-7"))


def _with_nul(head: bytes) -> str:
    """Return what a text with NUL bytes most likely is."""
    for encoding, where in (("utf-16-le", 1), ("utf-16-be", 0)):
        part = head[where::2]
        if part.count(0) > len(part) // 2:
            return f'it looks like {encoding.upper()}; set encoding = "{encoding}"'
    at = head.index(0)
    line = head.count(b"\n", 0, at) + 1
    return (
        f"it holds NUL bytes (line {line} of its beginning); it is damaged, or no text: write it "
        "again"
    )


def _has_leading_zero(block: bytes, ends: Any) -> bool:
    """Return whether a value begins with 0 and a digit."""
    values = np.frombuffer(block, np.uint8)
    at = np.flatnonzero(values[1:-1] == ord("0")) + 1
    at = at[(values[at + 1] - ord("0")) <= 9]  # of unsigned bytes
    return bool(np.isin(values[at - 1], ends).any())
