"""A peer's own data from tables: columns with roles, through pyarrow."""

from __future__ import annotations

import codecs
import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from bbnode.components.data import arrow_files, columns, numbers, text_columns
from bbnode.components.data.arrow_files import OpenedTable, Reading
from bbnode.components.data.base import ByRow
from bbnode.components.data.columns import Column, Filled, OneHot
from bbnode.components.data.csv_files import CsvFormat
from bbnode.components.data.data_file import UNREADABLE, Room, named, told
from bbnode.components.data.description import DataDescription, settings_of
from bbnode.components.data.number_text import DECIMALS, THOUSANDS, NumberFormat
from bbnode.components.data.numbers import FileArray, Joined
from bbnode.components.data.partition import Rows
from bbnode.components.data.shared_schema import ColumnKind, ColumnMeaning
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.data.text_columns import UnsuitableColumn
from bbnode.components.errors import DataUnavailable
from bbnode.components.libraries import PYARROW, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.components.settings import host_setting, path_setting
from bbnode.ir.decoding import shown

logger = logging.getLogger(__name__)

Missing = Literal["refuse", "mean", "drop", "keep"]

# Columns of a mapped table that take no more are put side by side in memory, once: to gather a row
# from many columns of a file takes longer than to train on it.
_MOST_ARRANGED_BYTES = 1 << 28
_MOST_LISTED = 20  # columns in an error
# pandas writes its index as a column of one of these names.
_INDEX_NAMES = ("", "Unnamed: 0", "__index_level_0__")


@dataclass(frozen=True, kw_only=True)
class TableDataSourceConfig(StandardizedConfig):
    """Settings of `TableDataSource`.

    Attributes:
        path: of a .csv, .tsv, .parquet, .arrow or .feather file on this peer, of a folder of files
            of one of these kinds, or of a folder that `save_to_disk` of Hugging Face wrote.
        label: name of the column of labels. Integers, booleans and strings become int64, floats
            float32.
        features: name of the column of features, or names of several, in their order; empty is
            all others.
        ignore: names of columns that are not used.
        categories: the values of columns of strings, by column, in the order of their numbers from
            0. A column of features that has strings, and no categories here or in the file, is
            refused. Labels are then numbered by their sorted values. Connected peers number them as
            the federation does, whatever their files have.
        one_hot: names of columns of strings that become a column of 0 and 1 for each category;
            without `categories`, for each value in the file, sorted.
        missing: what is done where a value is missing (null or NaN). "refuse" names row and
            column; "mean" takes the mean of the training part, of columns of numbers; "drop"
            leaves out the row; "keep" gives NaN out, in columns of numbers, for programs that count
            missing values or train trees.
        missing_words: words that stand for a missing value in strings and CSV. In CSV these do by
            themselves: "", NA, N/A, n/a, #N/A, NaN, nan, NULL and null; but not where a column's
            `categories` list them.
        dtype: of the features. "auto": float32, but int64 for lists of integers of 32 and 64 bits
            (tokens); "keep": as stored; or a name, "float32", "uint8", ….
        delimiter: of CSV; empty is a comma, and a tab in .tsv files.
        encoding: of CSV: "utf8", "latin-1", …
        header: the first row of CSV names the columns; without, they are f0, f1, ….
        comment: lines of CSV that begin with it are left out: "#".
        skip_lines: lines above the heading of CSV that are left out.
        skip_rows: rows below the heading of CSV that are left out: 1 for a row of units.
        decimal: the mark before the fraction of numbers, "." or ",".
        thousands: the mark between groups of three digits: ",", ".", "'", " " (and the blanks that
            do not break a line) or "_"; empty for none.
        parentheses: numbers in parentheses are negative, as in accounts.
        units: by column, what stands before or behind each of its numbers: "€", "kg", "%". It is
            taken off, and nothing is divided: "12 %" is 12. A value without it is refused.
        numbers: names of columns that are quantities though they look like names: whole numbers
            that begin with 0, that have more digits than the type (they are rounded), or that are
            texts in a file with types.
        dates: columns of dates, times or durations that become days (since 1970-01-01 in UTC), with
            their form as of `strptime` ("%d.%m.%Y"); "" is ISO 8601, or what the file has as such.
        max_memory_mib: that all files may take in memory, as they declare it; 0 is half of what
            this process may have. Arrow files that are not compressed take none.
    """

    path: str = path_setting()
    label: str = "label"
    features: str | tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    one_hot: tuple[str, ...] = ()
    missing: Missing = "refuse"
    missing_words: tuple[str, ...] = ()
    dtype: str = numbers.AUTO
    delimiter: str = ""
    encoding: str = "utf8"
    header: bool = True
    comment: str = ""
    skip_lines: int = 0
    skip_rows: int = 0
    decimal: str = "."
    thousands: str = ""
    parentheses: bool = False
    numbers: tuple[str, ...] = ()
    dates: dict[str, str] = field(default_factory=dict)
    max_memory_mib: int = host_setting(0)


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """A column of features as it was loaded.

    Attributes:
        width: the number of positions of an example that it takes.
        is_plain: it holds single numbers, and no numbers of categories.
        fill: of missing values; None where there were none.
    """

    name: str
    categories: tuple[str, ...]
    width: int
    is_plain: bool
    fill: float | None

    @classmethod
    def of(cls, column: Column, part: ByRow) -> _Feature:
        """Return what to keep of a column, whose values in an example are `part`."""
        return cls(
            name=column.name,
            categories=column.categories,
            width=int(np.prod(part.shape[1:])),
            is_plain=not (column.categories or column.is_list),
            fill=part.fill if isinstance(part, Filled) else None,
        )

    def meaning(self, *, is_one_hot: bool, unit: str) -> ColumnMeaning:
        """Return what peers compare of it."""
        kind: ColumnKind = "number" if self.is_plain else "list"
        if self.categories:
            kind = "one_hot" if is_one_hot else "category"
        return ColumnMeaning(
            name=self.name, kind=kind, unit=unit, categories=self.categories, width=self.width
        )


@register_component
class TableDataSource(StandardizedDataSource):
    """A peer's own data, from CSV, Parquet, Arrow, or a data set of Hugging Face saved to disk.

    Features are the columns side by side, [N, columns]; or, if the only one is a column of lists of
    equal length, these, [N, length]. Arrow files, which data sets of Hugging Face consist of, are
    mapped: larger than memory is fine. Needs pyarrow.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TableDataSource"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (PYARROW,)
    Config: ClassVar[type] = TableDataSourceConfig
    describes = "table"
    config: TableDataSourceConfig

    def __init__(self, config: TableDataSourceConfig) -> None:
        super().__init__(config)
        self.require_choice("missing", Missing)
        self.require(bool(config.label), "`label` names no column")
        known = ", ".join(numbers.DTYPES)
        self.require(
            config.dtype in numbers.DTYPES,
            f"unknown dtype {shown(config.dtype)}; choose one of {known}",
        )
        features = self._features()
        twice = sorted({name for name in features if features.count(name) > 1})
        self.require(not twice, f"`features` names {', '.join(twice)} twice")
        both = sorted({*features, config.label} & set(config.ignore))
        self.require(not both, f"{', '.join(both)} can't be used and ignored")
        for name, values in config.categories.items():
            self.require(
                0 < len(values) == len(set(values)),
                f"`categories` of {shown(name)} have to be different values, one or more",
            )
        self.require(
            len(config.delimiter) <= 1 and config.delimiter not in ("\n", "\r", '"'),
            f"delimiter {shown(config.delimiter)} is not one character",
        )
        self.require(
            config.max_memory_mib >= 0, f"max_memory_mib is {config.max_memory_mib}, below 0"
        )
        self._require_marks()
        self.require(_is_encoding(config.encoding), f"unknown encoding {shown(config.encoding)}")
        self._units: dict[str, str] = {}
        self._names: tuple[str, ...] = ()
        self._classes: tuple[str, ...] = ()
        self._features_found: tuple[_Feature, ...] = ()

    def _require_marks(self) -> None:
        config = self.config
        self.require(
            config.decimal in DECIMALS and config.thousands in THOUSANDS,
            f"decimal {shown(config.decimal)} or thousands {shown(config.thousands)} is no mark of "
            "numbers",
        )
        self.require(
            config.decimal != config.thousands,
            f"decimal and thousands are both {shown(config.decimal)}; they differ in every number",
        )
        self.require(
            all(unit.strip() and not any(map(str.isdigit, unit)) for unit in config.units.values()),
            "`units` are texts without digits that stand beside a number",
        )
        self.require(
            min(config.skip_lines, config.skip_rows) >= 0,
            "skip_lines and skip_rows can't be below 0",
        )
        self.require(
            not config.comment or (config.comment.isprintable() and '"' not in config.comment),
            f"comment {shown(config.comment)} can't begin a line",
        )
        for name in (*config.units, *config.dates, *config.numbers):
            several = [
                key for key in ("units", "dates", "categories") if name in getattr(config, key)
            ]
            self.require(
                len(several) <= 1 and not (name in config.numbers and "units" not in several
                                           and several),
                f"{shown(name)} stands in {' and '.join(several)}; a column is one of these",
            )  # fmt: skip

    def column_units(self) -> dict[str, str]:
        """Return units by column, of the setting and of the file, of a loaded source."""
        return self._units

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the columns of features; "column=value" of those of `one_hot`."""
        return self._names

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the column of labels, and the names of its classes, if it has any."""
        return self.config.label, self._classes

    def load(self) -> tuple[ByRow, ByRow]:
        config = self.config
        opened = self._opened(self._wanted)
        # A column that only some of the files have may be left out.
        self._refuse_absent(Path(config.path), config.ignore, opened.there)
        self._tell_index(opened)
        self._units = {**opened.units, **config.units}
        label = config.label
        features = list(self._features() or (name for name in opened.names if name != label))
        found = {name: self._column(opened, name) for name in opened.names}
        for name in (*config.one_hot, *config.categories):
            if name in found and not found[name].categories:
                raise self._refusal(
                    opened,
                    name,
                    "it is not of strings, as `one_hot` and `categories` are; list its values in "
                    "`categories` if they are names",
                )
        self._tell_words(opened, found)
        kept = self._kept(opened, list(found.values()))
        labels = self._labels(opened, found[label], kept)
        parts = [self._filled(opened, found[name], labels, kept) for name in features]
        self._names = tuple(self._named([found[name] for name in features]))
        self._classes = found[label].categories
        self._features_found = tuple(
            _Feature.of(found[name], part) for name, part in zip(features, parts, strict=True)
        )
        made = self._side_by_side([found[name] for name in features], parts, opened, kept)
        dtype, as_it_is = made.dtype, isinstance(made, FileArray)
        size = dtype.itemsize * int(np.prod(made.shape))
        if opened.mapped and (as_it_is or size > _MOST_ARRANGED_BYTES):
            return made, labels
        arranged = Room(self.TYPE_NAME, config.max_memory_mib)  # beside what it is made of
        arranged.take(Path(config.path), size, "use fewer columns, or one_hot of fewer categories")
        # As one array, a row lies together; a table that is in memory takes less of it so.
        return numbers.in_memory(made), numbers.in_memory(labels)

    def describe(self) -> DataDescription:
        """Return the columns that are features in their order, their categories and scaling."""
        made = super().describe()
        found = self._features_found
        settings = {
            **settings_of("table", self.config),
            **made.settings,
            "features": tuple(each.name for each in found),
            "categories": {each.name: each.categories for each in found if each.categories},
        }
        if self.config.missing == "drop":  # of training; there, a row may be left out unseen
            settings["missing"] = "refuse"
        fills = self._fills() if self.config.missing == "mean" else {}
        return self.as_adopted(replace(made, kind="table", settings=settings, fills=fills))

    def columns(self) -> tuple[ColumnMeaning, ...]:
        """Return what the columns of features mean."""
        return tuple(
            each.meaning(
                is_one_hot=each.name in self.config.one_hot,
                unit=self.column_units().get(each.name, ""),
            )
            for each in self._features_found
        )

    def label_meaning(self) -> tuple[str | None, tuple[str, ...] | None]:
        """Return the name of the column of labels, and the names of its classes."""
        return self.config.label, self._classes

    def examples(self, fills: Mapping[str, float]) -> ByRow:
        """Return the features of all rows of a table, which needs no labels, as in training.

        Columns are found by their names; without `features` they are all of the file, in its order,
        and have to be numbers.

        Args:
            fills: by column, the number that stands for a missing value.

        Raises:
            DataUnavailable: a column is missing, or is another one than in training.
        """
        opened = self._opened(self._named_features)
        found = [self._unlabelled(opened, name, fills) for name in opened.names]
        parts = [self._gapless(opened, column, fills) for column in found]
        self._names = tuple(self._named(found))
        return self.served(numbers.in_memory(self._side_by_side(found, parts, opened, None)))

    def _named_features(
        self, path: Path, there: Sequence[str], index: Collection[str]
    ) -> Sequence[str]:
        names = self._features() or tuple(name for name in there if name not in index)
        self._refuse_absent(path, names, there)
        return names

    def _opened(
        self, used: Callable[[Path, Sequence[str], Collection[str]], Sequence[str]]
    ) -> OpenedTable:
        config = self.config
        made = CsvFormat(
            delimiter=config.delimiter, encoding=config.encoding, header=config.header,
            decimal=config.decimal, comment=config.comment, skip_lines=config.skip_lines,
            skip_rows=config.skip_rows, missing_words=config.missing_words,
        )  # fmt: skip
        reading = Reading(
            csv=made, marks=self._marks(), used=used, texts=config.categories,
            is_words=lambda name: name in (*config.one_hot, config.label), units=config.units,
            dates=config.dates, numbers=config.numbers,
        )  # fmt: skip
        room = Room(self.TYPE_NAME, config.max_memory_mib)
        return arrow_files.open_table(self.TYPE_NAME, Path(config.path), reading, room)

    def _marks(self) -> NumberFormat:
        config = self.config
        return NumberFormat(
            decimal=config.decimal, thousands=config.thousands, parentheses=config.parentheses
        )

    def _tell_index(self, opened: OpenedTable) -> None:
        if opened.index:
            logger.info(
                "%s: the index of %s is left out, as the file says: %s; name it in `features` to "
                "have it", self.TYPE_NAME, self.config.path, ", ".join(map(shown, opened.index)),
            )  # fmt: skip

    def _tell_words(self, opened: OpenedTable, found: Mapping[str, Column]) -> None:
        """Log which numbers words got that no setting lists."""
        for column in found.values():
            if not column.categories or column.name in self.config.categories:
                continue
            own = column.name in opened.declared or column.name in opened.classes
            logger.info(
                "%s: the words of column %s of %s are the numbers 0, 1, …, as %s: %s%s",
                self.TYPE_NAME, shown(column.name), self.config.path,
                "the file lists them" if own else "they are sorted",
                columns.listed(column.categories),
                "" if own else "; set `categories` alike on all peers",
            )  # fmt: skip

    def _unlabelled(self, opened: OpenedTable, name: str, fills: Mapping[str, float]) -> Column:
        """Return a column of features of a table that is not the one of the training."""
        pa = arrow_files.pyarrow(self.TYPE_NAME)
        has_words = name in self.config.categories
        kind = opened.table.column(name).type
        if pa.types.is_null(kind) and not has_words and (
            name in fills or self.config.missing == "keep"
        ):  # all of its values are missing  # fmt: skip
            cast = opened.table.column(name).cast(pa.float64())
            at = opened.table.column_names.index(name)
            opened = replace(opened, table=opened.table.set_column(at, name, cast))
        column = self._column(opened, name)
        if column.categories and not has_words:
            raise self._refusal(opened, name, "it holds words, and the model takes numbers there")
        return column

    def _gapless(self, opened: OpenedTable, column: Column, fills: Mapping[str, float]) -> ByRow:
        if column.name in self.config.one_hot and column.missing is None:
            return OneHot(column.values, len(column.categories))
        if column.missing is None:
            return column.values
        if column.name in fills:
            return Filled(column.values, column.missing, fills[column.name])
        if self.config.missing == "keep" and not (column.categories or column.is_list):
            return Filled(column.values, column.missing, math.nan)
        row = int(np.argmax(column.missing))
        raise self._refusal(
            opened, column.name,
            f"row {row} has no value, and {int(column.missing.sum())} "
            "row(s) in all (counted from 0); the training had none to learn from: fill them in, "
            "or leave these rows out", row,
        )  # fmt: skip

    def _fills(self) -> dict[str, float]:
        """Return the mean that stands for a missing value, of each column of plain numbers."""
        data = self._data()
        assert self._raw is not None
        rows = np.arange(len(self._raw))
        if self.config.split != "all":
            rows = self.split_of(data.labels)["train"]
        raw = np.asarray(self._raw[rows])
        fills: dict[str, float] = {}
        at = 0
        for each in self._features_found:
            if each.fill is not None:
                fills[each.name] = each.fill
            elif each.is_plain:  # none was missing
                fills[each.name] = math.fsum(raw[:, at].tolist()) / len(rows)
            at += each.width
        return fills

    def _side_by_side(
        self,
        found: Sequence[Column],
        parts: Sequence[ByRow],
        opened: OpenedTable,
        kept: Rows | None,
    ) -> FileArray | Joined:
        """Return columns as features: side by side, or the only one as it is if it has lists."""
        dtype = self._dtype(found, parts)
        arrays = [FileArray(part, dtype, opened.mapped, kept) for part in parts]
        for column, array in zip(found, arrays, strict=True):
            what = f"column {shown(column.name)}"
            rounded = column.name in self.config.numbers
            if column.name in self.config.dates:
                self._tell_rounded(column, dtype)

            def line_of(row: int) -> str:
                return opened.place(row)[1]

            if isinstance(part := array.stored, Filled) and part.is_whole:
                there = np.flatnonzero(~part.missing)
                FileArray(part.values, dtype, opened.mapped, there).refuse_misfits(
                    self.TYPE_NAME, what, rounded=rounded, line_of=line_of
                )
            array.refuse_misfits(
                self.TYPE_NAME, what, nan=self.config.missing == "keep", rounded=rounded,
                line_of=line_of,
            )  # fmt: skip
        return arrays[0] if len(arrays) == 1 and found[0].is_list else Joined(arrays, dtype)

    def _tell_rounded(self, column: Column, dtype: np.dtype[Any]) -> None:
        """Log how much of a moment's time of day the type of the features has no place for."""
        days = numbers.in_memory(FileArray(column.values, np.dtype(np.float64)))
        days = days[np.isfinite(days)]
        if dtype.kind == "f" and days.size:
            off = float(np.abs(days.astype(dtype).astype(np.float64) - days).max()) * 86_400
            if off >= 1:
                logger.warning(
                    "%s: column %s: days as %s are up to %.0f seconds off; set dtype = \"float64\""
                    " if that matters", self.TYPE_NAME, shown(column.name), dtype, off,
                )  # fmt: skip

    def _features(self) -> tuple[str, ...]:
        names = self.config.features
        return (names,) if isinstance(names, str) and names else tuple(names)

    def _wanted(self, path: Path, there: Sequence[str], index: Collection[str]) -> list[str]:
        """Return the names of the columns of features, and last that of the labels.

        Those in `index` are no features, unless they are named.
        """
        config = self.config
        given = (*self._features(), config.label, *config.one_hot,
                 *config.categories, *config.units, *config.numbers, *config.dates)  # fmt: skip
        self._refuse_absent(path, given, there)
        features = self._features() or tuple(
            name for name in there
            if name != config.label and name not in config.ignore and name not in index
        )  # fmt: skip
        if not features:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {named(path)} has no column besides the label "
                f"{shown(config.label)}; features need one or more"
            )
        indexes = [] if config.features else [name for name in features if name in _INDEX_NAMES]
        if indexes == [""] and there[-1] == "":
            raise DataUnavailable(
                f"{self.TYPE_NAME}: the last column of {named(path)} has no name, as where lines "
                'end with a delimiter; leave it out with ignore = [""], or name the `features`'
            )
        if indexes:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: the column {shown(indexes[0])} of {named(path)} looks like an "
                f"index of pandas; leave it out with ignore = [{shown(indexes[0])}], or name the "
                "`features`"
            )
        return [*features, config.label]

    def _refuse_absent(self, path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
        """Raise DataUnavailable unless the table at `path` has the columns, and each once."""
        config = self.config
        used = set(wanted) if self._features() else set(there) - set(config.ignore)
        twice = sorted(name for name, n in Counter(there).items() if n > 1 and name in used)
        if twice:
            remedy = (
                "name them, or set skip_lines if the table begins below" if twice == [""]
                else "rename them"
            )  # fmt: skip
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {named(path)} has several columns "
                f"{', '.join(map(shown, twice))}; {remedy}"
            )
        known = set(there)
        missing = [name for name in dict.fromkeys(wanted) if name not in known]
        if missing:
            near = difflib.get_close_matches(missing[0], there, n=1)
            hint = f" (did you mean {shown(near[0])}?)" if near else ""
            if len(there) == 1 and any(mark in there[0] for mark in (";", "\t", "|", ",")):
                hint = f"; is the delimiter another one than {shown(config.delimiter or ',')}?"
            more = len(there) - _MOST_LISTED
            listed = [*map(shown, there[:_MOST_LISTED]), *([f"{more} more"] if more > 0 else [])]
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {named(path)} has no column "
                f"{', '.join(map(shown, missing))}; it has {', '.join(listed) or 'none'}{hint}"
            )

    def _column(self, opened: OpenedTable, name: str) -> Column:
        pa = arrow_files.pyarrow(self.TYPE_NAME)
        column = opened.table.column(name)
        config = self.config
        given = config.categories.get(name, ())
        declared = name in opened.declared
        try:
            if (
                name == config.label
                and not (given or declared or name in config.one_hot)
                and text_columns.is_text(pa.types, column.type)
                and text_columns.looks_like_numbers(pa, column, self._marks(), config.missing_words)
            ):
                raise text_columns.refusal(
                    pa, name, column, self._marks(), config.missing_words,
                    "; if these are classes, name them in `categories`",
                )  # fmt: skip
            return columns.read_column(
                pa, name, column, given, config.missing_words, declared=declared,
                classes=opened.classes.get(name, ()),
            )  # fmt: skip
        except UnsuitableColumn as error:
            raise self._refusal(opened, name, str(error), error.row) from error
        except (*UNREADABLE, pa.lib.ArrowException) as error:
            raise self._refusal(opened, name, f"cannot be read: {told(error)}") from error

    def _refusal(
        self, opened: OpenedTable, name: str, why: str, row: int | None = None
    ) -> DataUnavailable:
        path, line = ("", "") if row is None else opened.place(row)
        return DataUnavailable(
            f"{self.TYPE_NAME}: column {shown(name)} of {path or self.config.path}{line}: {why}"
        )

    def _kept(self, opened: OpenedTable, found: Sequence[Column]) -> Rows | None:
        """Return the rows that are used; None is all. Refuses missing values as `missing` says."""
        how = self.config.missing
        with_gaps = [(each, each.missing) for each in found if each.missing is not None]
        if how == "drop" and with_gaps:
            kept = np.flatnonzero(~np.logical_or.reduce([missing for _, missing in with_gaps]))
            if len(kept) == 0:
                raise DataUnavailable(
                    f"{self.TYPE_NAME}: each row of {self.config.path} has a missing value, and "
                    '`missing` is "drop"; leave out the columns that are empty with `ignore`'
                )
            return kept
        for column, missing in with_gaps:
            can_fill = not (column.categories or column.is_list or column.name == self.config.label)
            if how in ("mean", "keep") and can_fill:
                continue
            more = ', "mean" or "keep"' if can_fill else ""
            row = int(np.argmax(missing))
            raise self._refusal(
                opened, column.name,
                f"row {row} has no value, and {int(missing.sum())} row(s) in "
                f'all (counted from 0); mend them, or set missing = "drop"{more}', row,
            )  # fmt: skip
        return None

    def _labels(self, opened: OpenedTable, column: Column, kept: Rows | None) -> FileArray:
        dtype = numbers.label_dtype(column.values.dtype)
        labels = FileArray(column.values, dtype, opened.mapped, kept)
        labels.refuse_misfits(
            self.TYPE_NAME, f"column {shown(column.name)}", line_of=lambda row: opened.place(row)[1]
        )
        return labels

    def _filled(
        self, opened: OpenedTable, column: Column, labels: FileArray, kept: Rows | None
    ) -> ByRow:
        """Return the values of a column of features, gaps filled, and one-hot if it is to be."""
        if column.name in self.config.one_hot:
            return OneHot(column.values, len(column.categories))
        if column.missing is None or kept is not None:
            return column.values
        if self.config.missing == "keep":
            return Filled(column.values, column.missing, math.nan)
        rows = None if self.config.split == "all" else self.split_of(labels)["train"]
        try:
            mean = columns.mean_of(column, rows)
        except UnsuitableColumn as error:
            raise self._refusal(opened, column.name, str(error)) from error
        return Filled(column.values, column.missing, mean)

    def _named(self, found: Sequence[Column]) -> Iterator[str]:
        for column in found:
            if column.name in self.config.one_hot:
                yield from (f"{column.name}={value}" for value in column.categories)
            else:
                yield column.name

    def _dtype(self, found: Sequence[Column], parts: Sequence[ByRow]) -> np.dtype[Any]:
        setting = self.config.dtype
        if setting == numbers.KEEP:
            return np.result_type(*(part.dtype.newbyteorder("=") for part in parts))
        if setting == numbers.AUTO and not (len(found) == 1 and found[0].is_list):
            return np.dtype(np.float32)
        return numbers.feature_dtype(setting, parts[0].dtype)


def _is_encoding(name: str) -> bool:
    try:
        return bool(name) and codecs.lookup(name) is not None
    except LookupError:
        return False
