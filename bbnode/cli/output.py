"""The output of commands: data on stdout, notes and errors on stderr.

Rule: nothing else in the package prints. A JSON object says what it is in its first key, as in
"schema": "bbnode/status/1"; the number grows when a key changes its meaning, not when one is
added. Some texts come from peers and artifacts: their control characters are removed here.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import traceback as tb
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bbnode.ir.texts import escaped_json, printable
from bbnode.ir.texts import short_peer as short_peer

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
# Layout of help and configuration texts, which is kept; fields go through `cell`.
_LAYOUT = "\n\t"
# Spreadsheets compute texts that begin with these (OWASP, CSV injection).
_FORMULA_STARTS = ("=", "+", "-", "@")
# The running command, for the schema of its output.
_command = "bbnode"


def begin(command: str) -> None:
    """Name the command whose output follows."""
    global _command
    _command = command


def schema(name: str) -> str:
    """Return the value of an object's `schema` key."""
    return f"bbnode/{name}/{SCHEMA_VERSION}"


def data(text: str) -> None:
    """Print data: one line, or several of ours.

    It is flushed at once: a reader of a pipe or file sees what a running command has printed.
    """
    sys.stdout.write(printable(text, keep=_LAYOUT) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line for people, kept out of the data."""
    sys.stderr.write(printable(text, keep=_LAYOUT) + "\n")


def error(message: str, *more: str) -> None:
    """Print one line that says what is wrong and what to do, and further lines that belong to it.

    In the journal they have the priority of an error, as a failed start of a service needs.
    """
    lines = [f"error: {' '.join(message.split())}", *more]
    _write_error("\n".join(printable(line) for line in lines))


def show_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does, in the journal as an error; for `sys.excepthook`."""
    _write_error("".join(tb.format_exception(kind, error, trace)).rstrip("\n"))


def _write_error(text: str) -> None:
    # Checked first: the import is not free.
    if "JOURNAL_STREAM" in os.environ:
        from bbnode.daemon.observing import logs

        if logs.is_journal(sys.stderr):
            text = logs.with_priority("ERROR", text)
    sys.stderr.write(f"{text}\n")


def json_object(
    value: Mapping[str, Any], *, indent: int | None = 2, name: str | None = None
) -> None:
    """Print one JSON object with its schema; `indent` None is one line.

    The schema is that of `name`, default the command's; one that is in `value` already stays.
    """
    with_schema = {"schema": schema(name or _command), **value}
    data(json_text(with_schema, indent=indent))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that is safe on a terminal."""
    return escaped_json(json.dumps(value, indent=indent, ensure_ascii=False))


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as CSV, with a quote before each text that a spreadsheet would compute.

    Numbers are written in full; None and NaN are empty.
    """
    csv_to(csv.writer(sys.stdout, lineterminator="\n"), columns, rows)


def csv_to(writer: Any, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows as `csv_table` does, by a `csv.writer`."""
    writer.writerow([_csv_cell(name) for name in columns])
    writer.writerows([_csv_cell(item) for item in row] for row in rows)


def _csv_cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return "" if math.isnan(value) else repr(value)
        case int():
            return str(value)
    text = printable(str(value))
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: "1 address", "2 addresses"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def console() -> Console:
    """Return a Rich console on stdout; without a terminal, as wide as its text and uncoloured."""
    from rich.console import Console

    return Console(
        width=None if sys.stdout.isatty() else 200, highlight=False, emoji=False, markup=False
    )


# Characters of a column: the gap, and the longest word that may be cut for it, as a digest may.
_GAP_CHARS = 3
_WORD_CHARS = 16


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, out: Console
) -> None:
    """Print a titled table; nothing at all without rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell(value)) for value in row))
    out.print(shown)


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return ", ".join(cell(item) for item in value) or "-"
        case Mapping():
            return ", ".join(f"{cell(name)}={cell(item)}" for name, item in value.items()) or "-"
        case _:
            return printable(str(value))


def describe(value: Mapping[str, Any], *, out: Console, short: bool = False) -> None:
    """Print any JSON object: plain values as lines, lists of objects and objects as tables.

    If a table does not fit, each of its rows becomes a table with a line per column. With `short`,
    tables have only the ends of PeerIds; lines have them in full, to be copied.
    """
    plain = {k: v for k, v in value.items() if not _is_table(v) and not isinstance(v, Mapping)}
    table("", ("", ""), [(_words(name), item) for name, item in plain.items()], out=out)
    shown = short_peer if short else str
    for name, item in value.items():
        if _is_table(item):
            columns = list(dict.fromkeys(key for row in item for key in row))
            rows = [[row.get(key) for key in columns] for row in item]
            rows = [[shown(cell(each)) for each in row] for row in rows]
            _table_or_blocks(_words(name), [_words(key) for key in columns], rows, out=out)
        elif isinstance(item, Mapping) and item:
            own = {key: each for key, each in item.items() if not _is_table(each)}
            rows = [[key, shown(cell(each))] for key, each in own.items()]
            table(_words(name), ("", ""), rows, out=out)
            inner = {f"{name}: {key}": c for key, c in item.items() if _is_table(c)}
            describe(inner, out=out, short=short)


def _table_or_blocks(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, out: Console
) -> None:
    """Print a table, or one per row if its columns would be cut within words."""
    widths = (
        max(map(_longest_word, (name, *(row[n] for row in rows)))) for n, name in enumerate(columns)
    )
    if sum(min(width, _WORD_CHARS) + _GAP_CHARS for width in widths) <= out.width:
        table(title, columns, rows, out=out)
        return
    for row in rows:
        table(f"{title}: {row[0]}", ("", ""), list(zip(columns, row, strict=True)), out=out)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _is_table(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)
    )


def _words(name: str) -> str:
    # Keys may be names of slots and classes.
    return printable(name.replace("_", " "))
