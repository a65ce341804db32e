"""A peer's own data from tables: columns with roles, through pyarrow."""

from __future__ import annotations

import codecs
import difflib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from bbnode.components.data import arrow_files, columns, numbers
from bbnode.components.data.arrow_files import CsvFormat, OpenedTable
from bbnode.components.data.base import ByRow
from bbnode.components.data.columns import Column, Filled, OneHot, UnsuitableColumn
from bbnode.components.data.data_file import UNREADABLE, Room, told
from bbnode.components.data.description import DataDescription, settings_of
from bbnode.components.data.numbers import FileArray, Joined
from bbnode.components.data.partition import Rows
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import host_setting, path_setting
from bbnode.ir.decoding import shown

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
            0. Without, it is the sorted values in the file: peers with files of their own have to
            give them, or the numbers differ.
        one_hot: names of columns of strings that become a column of 0 and 1 for each category.
        missing: what is done where a value is missing (null or NaN). "refuse" names row and
            column; "mean" takes the mean of the training part, of columns of numbers; "drop"
            leaves out the row; "keep" gives NaN out, in columns of numbers, for programs that count
            missing values or train trees.
        missing_words: words that stand for a missing value in strings and CSV, besides "", NA, NaN,
            null and the like.
        dtype: of the features. "auto": float32, but int64 for lists of integers of 32 and 64 bits
            (tokens); "keep": as stored; or a name, "float32", "uint8", ….
        delimiter: of CSV; empty is a comma, and a tab in .tsv files.
        encoding: of CSV: "utf8", "latin-1", …
        header: the first row of CSV names the columns; without, they are f0, f1, ….
        max_memory_mib: that all files may take in memory, as they declare it; 0 is half of what
            this process may have. Arrow files that are not compressed take none.
    """

    path: str = path_setting()
    label: str = "label"
    features: str | tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    one_hot: tuple[str, ...] = ()
    missing: Missing = "refuse"
    missing_words: tuple[str, ...] = ()
    dtype: str = numbers.AUTO
    delimiter: str = ""
    encoding: str = "utf8"
    header: bool = True
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


@register_component
class TableDataSource(StandardizedDataSource):
    """A peer's own data, from CSV, Parquet, Arrow, or a data set of Hugging Face saved to disk.

    Features are the columns side by side, [N, columns]; or, if the only one is a column of lists of
    equal length, these, [N, length]. Arrow files, which data sets of Hugging Face consist of, are
    mapped: larger than memory is fine. Needs pyarrow.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TableDataSource"
    Config: ClassVar[type] = TableDataSourceConfig
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
        self.require(_is_encoding(config.encoding), f"unknown encoding {shown(config.encoding)}")
        self._names: tuple[str, ...] = ()
        self._classes: tuple[str, ...] = ()
        self._features_found: tuple[_Feature, ...] = ()

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the columns of features; "column=value" of those of `one_hot`."""
        return self._names

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the column of labels, and the names of its classes, if it has any."""
        return self.config.label, self._classes

    def load(self) -> tuple[ByRow, ByRow]:
        config = self.config
        opened = self._opened()
        wanted = self._wanted(opened.names)
        found = {name: self._column(opened, name) for name in dict.fromkeys(wanted)}
        for name in (*config.one_hot, *config.categories):
            if name in found and not found[name].categories:
                raise self._refusal(name, "it is not of strings, as `one_hot` and `categories` are")
        kept = self._kept(list(found.values()))
        *features, label = wanted
        labels = self._labels(opened, found[label], kept)
        parts = [self._filled(found[name], labels, kept) for name in features]
        self._names = tuple(self._named([found[name] for name in features]))
        self._classes = found[label].categories or opened.classes.get(label, ())
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
        return replace(made, kind="table", settings=settings, fills=fills)

    def examples(self, fills: Mapping[str, float]) -> ByRow:
        """Return the features of all rows of a table, which needs no labels, as in training.

        Columns are found by their names; without `features` they are all of the file, in its order,
        and have to be numbers.

        Args:
            fills: by column, the number that stands for a missing value.

        Raises:
            DataUnavailable: a column is missing, or is another one than in training.
        """
        opened = self._opened(texts=[*self.config.categories])
        names = self._features() or opened.names
        self._refuse_absent(names, opened.names)
        found = [self._unlabelled(opened, name, fills) for name in names]
        parts = [self._gapless(column, fills) for column in found]
        self._names = tuple(self._named(found))
        return self.served(numbers.in_memory(self._side_by_side(found, parts, opened, None)))

    def _opened(self, texts: Sequence[str] = ()) -> OpenedTable:
        config = self.config
        return arrow_files.open_table(
            self.TYPE_NAME,
            Path(config.path),
            CsvFormat(
                config.delimiter, config.encoding, config.header, config.missing_words, texts
            ),
            Room(self.TYPE_NAME, config.max_memory_mib),
        )

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
            raise self._refusal(name, f"it holds {kind}, and the model takes numbers there")
        return column

    def _gapless(self, column: Column, fills: Mapping[str, float]) -> ByRow:
        if column.name in self.config.one_hot and column.missing is None:
            return OneHot(column.values, len(column.categories))
        if column.missing is None:
            return column.values
        if column.name in fills:
            return Filled(column.values, column.missing, fills[column.name])
        if self.config.missing == "keep" and not (column.categories or column.is_list):
            return Filled(column.values, column.missing, math.nan)
        raise self._refusal(
            column.name,
            f"row {int(np.argmax(column.missing))} has no value, and {int(column.missing.sum())} "
            "row(s) in all (counted from 0); the training had none to learn from: fill them in, "
            "or leave these rows out",
        )

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
            array.refuse_misfits(
                self.TYPE_NAME, f"column {shown(column.name)}", nan=self.config.missing == "keep"
            )
        return arrays[0] if len(arrays) == 1 and found[0].is_list else Joined(arrays, dtype)

    def _features(self) -> tuple[str, ...]:
        names = self.config.features
        return (names,) if isinstance(names, str) and names else tuple(names)

    def _wanted(self, there: Sequence[str]) -> list[str]:
        """Return the names of the columns of features, and last that of the labels."""
        config = self.config
        given = (*self._features(), config.label, *config.ignore, *config.one_hot,
                 *config.categories)  # fmt: skip
        self._refuse_absent(given, there)
        features = self._features() or tuple(
            name for name in there if name != config.label and name not in config.ignore
        )
        if not features:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {config.path} has no column besides the label "
                f"{shown(config.label)}; features need one or more"
            )
        indexes = [] if config.features else [name for name in features if name in _INDEX_NAMES]
        if indexes:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: the column {shown(indexes[0])} of {config.path} looks like an "
                f"index of pandas; leave it out with ignore = [{shown(indexes[0])}], or name the "
                "`features`"
            )
        return [*features, config.label]

    def _refuse_absent(self, wanted: Sequence[str], there: Sequence[str]) -> None:
        """Raise DataUnavailable unless the table has the columns, and each once."""
        config = self.config
        times = Counter(there)  # there may be ten thousand of them
        twice = sorted(name for name, count in times.items() if count > 1)
        if twice:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {config.path} has several columns "
                f"{', '.join(map(shown, twice))}; rename them"
            )
        missing = [name for name in dict.fromkeys(wanted) if name not in times]
        if missing:
            near = difflib.get_close_matches(missing[0], there, n=1)
            hint = f" (did you mean {shown(near[0])}?)" if near else ""
            if len(there) == 1 and any(mark in there[0] for mark in (";", "\t", "|", ",")):
                hint = f"; is the delimiter another one than {shown(config.delimiter or ',')}?"
            more = len(there) - _MOST_LISTED
            listed = [*map(shown, there[:_MOST_LISTED]), *([f"{more} more"] if more > 0 else [])]
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {config.path} has no column "
                f"{', '.join(map(shown, missing))}; it has {', '.join(listed) or 'none'}{hint}"
            )

    def _column(self, opened: OpenedTable, name: str) -> Column:
        pa = arrow_files.pyarrow(self.TYPE_NAME)
        column = opened.table.column(name)
        given = self.config.categories.get(name, ())
        try:
            # The offsets of a broken file would be followed to anywhere.
            column.validate(full=True)
            return columns.read_column(pa, name, column, given, self.config.missing_words)
        except UnsuitableColumn as error:
            raise self._refusal(name, str(error)) from error
        except (*UNREADABLE, pa.lib.ArrowException) as error:
            raise self._refusal(name, f"cannot be read: {told(error)}") from error

    def _refusal(self, name: str, why: str) -> DataUnavailable:
        return DataUnavailable(
            f"{self.TYPE_NAME}: column {shown(name)} of {self.config.path}: {why}"
        )

    def _kept(self, found: Sequence[Column]) -> Rows | None:
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
            raise self._refusal(
                column.name,
                f"row {int(np.argmax(missing))} has no value, and {int(missing.sum())} row(s) in "
                f'all (counted from 0); mend them, or set missing = "drop"{more}',
            )
        return None

    def _labels(self, opened: OpenedTable, column: Column, kept: Rows | None) -> FileArray:
        dtype = numbers.label_dtype(column.values.dtype)
        labels = FileArray(column.values, dtype, opened.mapped, kept)
        labels.refuse_misfits(self.TYPE_NAME, f"column {shown(column.name)}")
        return labels

    def _filled(self, column: Column, labels: FileArray, kept: Rows | None) -> ByRow:
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
            raise self._refusal(column.name, str(error)) from error
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
