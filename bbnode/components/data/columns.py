"""Columns of Arrow tables as numpy arrays: views of the mapped file wherever the layout allows.

Rule: a column of N rows is values [N, ...] that are gathered by row, and a mask of those that are
missing (null or NaN). Strings become numbers of categories.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.components.data import number_text
from bbnode.components.data.base import Array, ByRow
from bbnode.components.data.partition import Rows
from bbnode.components.data.text_columns import UnsuitableColumn, Words
from bbnode.ir.decoding import shown

Mask = npt.NDArray[np.bool_]

MAX_CATEGORIES = 10_000  # of a column of strings that are found in the file
_MOST_AXES = 16  # of one example
_MOST_LISTED = 5  # values in an error
_ROWS_AT_ONCE = 1 << 16
_FEW_ROWS = 256  # that are gathered one by one: quicker than part by part


class Chunks:
    """Values that lie in several arrays, one after the other."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._lengths = np.array([len(part) for part in parts])
        self._ends = np.cumsum(self._lengths)
        self.dtype: np.dtype[Any] = parts[0].dtype
        self.shape: tuple[int, ...] = (int(self._ends[-1]), *parts[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        if len(self._parts) == 1:
            one: Array = self._parts[0][rows]
            return one
        made: Array = np.empty((len(rows), *self.shape[1:]), self.dtype)
        inside = np.searchsorted(self._ends, rows, side="right")
        local = rows - (self._ends - self._lengths)[inside]
        if len(rows) <= _FEW_ROWS:  # mostly in as many parts
            for at, (index, row) in enumerate(zip(inside.tolist(), local.tolist(), strict=True)):
                made[at] = self._parts[index][row]
            return made
        order = np.argsort(inside, kind="stable")
        touched, begins = np.unique(inside[order], return_index=True)
        for index, mine in zip(touched.tolist(), np.split(order, begins[1:]), strict=True):
            made[mine] = self._parts[index][local[mine]]
        return made


class Filled:
    """Values of which the missing ones are all the same."""

    def __init__(self, values: ByRow, missing: Mask, fill: float) -> None:
        self.values, self.missing, self.fill = values, missing, fill
        self.is_whole = values.dtype.kind in "iu"
        self.dtype = np.dtype(np.float64)
        self.shape = values.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        made: Array = self.values[rows].astype(np.float64)
        made[self.missing[rows]] = self.fill
        return made


class OneHot:
    """Numbers of categories as a row of zeros with a one, uint8 [N, categories]."""

    def __init__(self, codes: ByRow, count: int) -> None:
        self._codes = codes
        self.dtype = np.dtype(np.uint8)
        self.shape = (len(codes), count)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        made: Array = self._codes[rows][:, None] == np.arange(self.shape[1])
        return made.astype(self.dtype)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        values: those that are missing are there as well, and mean nothing.
        missing: None where none is.
        categories: what the numbers stand for, of a column of strings.
        is_list: each row is a list of numbers.
    """

    name: str
    values: ByRow
    missing: Mask | None
    categories: tuple[str, ...] = ()
    is_list: bool = False


def read_column(
    pa: Any, name: str, column: Any, categories: Sequence[str], missing_words: Sequence[str],
    *, declared: bool = False, classes: Sequence[str] = (),
) -> Column:  # fmt: skip
    """Return a column of a pyarrow Table (a ChunkedArray) as values.

    Raises UnsuitableColumn.

    Args:
        categories: those that the user gives, empty for none.
        missing_words: strings that stand for a missing value.
        declared: the column is a dictionary that lists its categories in their order.
        classes: names of the numbers 0, 1, … of a column of integers; -1 is then a missing value.
    """
    kind = column.type
    types = pa.types
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not chunks:
        raise UnsuitableColumn("it has no rows")
    while isinstance(kind, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in chunks]
        kind = kind.storage_type
    encoded = types.is_dictionary(kind)
    kind = kind.value_type if encoded else kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _strings(pa, name, chunks, categories, missing_words, declared and encoded)
    if encoded and _is_number(types, kind):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    elif encoded and _is_bytes(types, kind):
        raise UnsuitableColumn(_unsuitable(types, kind, name))
    elif encoded:  # a few may stand for any number
        raise UnsuitableColumn(f"it holds {str(kind)[:80]} as a dictionary; write them out")
    if classes and types.is_integer(kind):
        return _classes(name, chunks, classes, categories)
    if categories:
        raise UnsuitableColumn(f"`categories` are given for it, and it holds {kind}, not strings")
    if types.is_null(kind):
        raise UnsuitableColumn("all of its values are missing; leave it out with `ignore`")
    if types.is_decimal(kind):
        chunks = [_of_decimals(pa, chunk) for chunk in chunks]
        whole = all(pa.types.is_integer(chunk.type) for chunk in chunks)
        kind = pa.int64() if whole else pa.float64()
        chunks = [chunk.cast(kind) for chunk in chunks]
    if _is_list(types, kind):
        parts = _all_lists(pa, chunks)
        return Column(name, Chunks(parts), _nans(parts), is_list=True)
    if not _is_number(types, kind):
        raise UnsuitableColumn(_unsuitable(types, kind, name))
    missing = _nulls(chunks)
    parts = [_numbers(pa, chunk) for chunk in chunks]
    nans = _nans(parts)
    if nans is not None:
        missing = nans if missing is None else missing | nans
    return Column(name, Chunks(parts), missing)


def _of_decimals(pa: Any, chunk: Any) -> Any:
    """Return decimals as float64, or as int64 where they are whole numbers."""
    if chunk.type.scale <= 0:
        with contextlib.suppress(pa.lib.ArrowInvalid):  # more digits than int64 has
            return chunk.cast(pa.int64())
    return chunk.cast(pa.float64())


def _classes(
    name: str, chunks: Sequence[Any], classes: Sequence[str], given: Sequence[str]
) -> Column:
    """Return a column of numbers of classes; of those that are given, where some are."""
    numbers = [chunk.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
    at = 0
    for part in numbers:
        wrong = (part < -1) | (part >= len(classes))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UnsuitableColumn(
                f"row {at + row} has {int(part[row])}, and the file names {len(classes)} classes "
                f"({listed(classes)})", at + row
            )  # fmt: skip
        at += len(part)
    missing = np.concatenate([part == -1 for part in numbers])
    categories = tuple(classes)
    if given and tuple(given) != categories:
        number = {value: index for index, value in enumerate(given)}
        codes = np.array([number.get(value, -2) for value in classes], np.int64)
        for part in numbers:
            strange = (part >= 0) & (codes[part] == -2)
            if strange.any():
                raise UnsuitableColumn(
                    f"it has {shown(classes[int(part[np.argmax(strange)])])}, which is none of its "
                    f"`categories` {listed(given)}"
                )
        numbers, categories = [codes[part] for part in numbers], tuple(given)
    return Column(name, Chunks(numbers), missing if missing.any() else None, categories)


def mean_of(column: Column, rows: Rows | None) -> float:
    """Return the mean of what is there in `rows` (None is all), the same on every machine."""
    chosen = np.arange(len(column.values)) if rows is None else rows
    if column.missing is not None:
        chosen = chosen[~column.missing[chosen]]
    if len(chosen) == 0:
        raise UnsuitableColumn("there is no value to take the mean of")
    sums = (
        math.fsum(column.values[chosen[start : start + _ROWS_AT_ONCE]].tolist())
        for start in range(0, len(chosen), _ROWS_AT_ONCE)
    )
    return math.fsum(sums) / len(chosen)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_bytes(types: Any, kind: Any) -> bool:
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def _unsuitable(types: Any, kind: Any, name: str) -> str:
    if _is_bytes(types, kind):
        return (
            "it holds bytes; of a CSV file, its text is in another `encoding`, such as "
            '"cp1252" or "latin-1"; else leave it out with `ignore`'
        )
    if number_text.is_moment(types, kind):
        return (
            f'it holds {kind}; set dates = {{ {number_text.key_of(name)} = "" }} to have it as '
            "days (since 1970-01-01), make numbers of it first, or leave it out with `ignore`"
        )
    if types.is_struct(kind):
        return (
            f"it holds {str(kind)[:80]}; leave it out with `ignore` (images: save them to folders "
            "for bbnode.ImageFolderDataSource)"
        )
    return f"it holds {str(kind)[:80]}, and no numbers, strings or lists of numbers"


def _numbers(pa: Any, chunk: Any) -> Array:
    if chunk.null_count:
        chunk = chunk.fill_null(pa.scalar(0, pa.int8()).cast(chunk.type))
    array: Array = chunk.to_numpy(zero_copy_only=False)
    return array


def _all_lists(pa: Any, chunks: Sequence[Any]) -> list[Array]:
    """Return the lists of each chunk. Raises UnsuitableColumn, with the first row that differs."""
    parts: list[Array] = []
    at = 0
    for chunk in chunks:
        try:
            part = _lists(pa, chunk)
        except UnsuitableColumn as error:
            if error.row is None:
                raise
            row = at + error.row
            raise UnsuitableColumn(f"row {row}: {error}", row) from error
        if parts and part.shape[1:] != parts[0].shape[1:]:
            why = _lengths_differ({part.shape[1:], parts[0].shape[1:]})
            raise UnsuitableColumn(f"row {at}: {why}", at)
        parts.append(part)
        at += len(chunk)
    return parts


def _lists(pa: Any, chunk: Any, depth: int = 0) -> Array:
    """Return lists of equal length as an array [N, length, ...], without a copy."""
    if depth >= _MOST_AXES:
        raise UnsuitableColumn(f"its lists are nested more than {_MOST_AXES} times; flatten them")
    if chunk.null_count:
        row = None if depth else int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        raise UnsuitableColumn("a list is missing; leave such rows out of the file", row)
    kind = chunk.type
    count = len(chunk)
    # `flatten` leaves out what lies before and behind the rows of a slice.
    inner = chunk.flatten()
    if pa.types.is_fixed_size_list(kind):
        length = kind.list_size
    else:
        lengths = np.diff(chunk.offsets.to_numpy())
        length = int(lengths[0])
        if (lengths != length).any():
            raise UnsuitableColumn(
                _lengths_differ({(int(each),) for each in np.unique(lengths)}),
                None if depth else int(np.argmax(lengths != length)),
            )
    if length == 0:
        raise UnsuitableColumn("its lists are empty")
    if _is_list(pa.types, inner.type):
        values = _lists(pa, inner, depth + 1)
    elif _is_number(pa.types, inner.type):
        if inner.null_count:
            raise UnsuitableColumn("a list has a missing value; leave such rows out of the file")
        values = inner.to_numpy(zero_copy_only=False)
    else:
        raise UnsuitableColumn(f"it holds lists of {str(inner.type)[:80]}, not of numbers")
    if len(values) != count * length:
        raise UnsuitableColumn("its lists are not as long as the file says")
    return values.reshape(count, length, *values.shape[1:])


def _lengths_differ(shapes: set[tuple[int, ...]]) -> str:
    ordered = sorted(shapes)
    listed = ", ".join(str(shape[0]) for shape in ordered[:_MOST_LISTED])
    return (
        f"its lists differ in length ({listed}{', …' if len(ordered) > _MOST_LISTED else ''}); "
        "cut or pad them to one length"
    )


def _strings(
    pa: Any, name: str, chunks: Sequence[Any], given: Sequence[str], missing_words: Sequence[str],
    declared: bool,
) -> Column:  # fmt: skip
    absent = [word for word in missing_words if word not in given]
    parts = [Words.of(pa, chunk, absent) for chunk in chunks]
    categories = tuple(given) or (_declared(parts) if declared else _found(parts))
    numbers, gaps, at = [], [], 0
    unknown: list[tuple[int, str]] = []  # the first one of each chunk
    count = 0
    for part in parts:
        codes = pa.compute.index_in(part.words, value_set=pa.array(categories, part.words.type))
        there = part.by_row(part.words.is_valid()).fill_null(False)
        mine = part.by_row(codes)
        strange = pa.compute.and_(mine.is_null(), there)
        mask = strange.to_numpy(zero_copy_only=False)
        if mask.any():
            row = int(np.argmax(mask))
            count += int(mask.sum())
            unknown.append((at + row, part.words[part.places[row].as_py()].as_py()))
        numbers.append(_numbers(pa, mine).astype(np.int64))
        gaps.append(~there.to_numpy(zero_copy_only=False))
        at += len(mask)
    if unknown:
        row, value = unknown[0]
        raise UnsuitableColumn(
            f"row {row} has {shown(value)}, which is none of its `categories` "
            f"{listed(categories)} ({count} such row(s))", row
        )  # fmt: skip
    missing = np.concatenate(gaps)
    return Column(name, Chunks(numbers), missing if missing.any() else None, categories)


def _declared(parts: Sequence[Words]) -> tuple[str, ...]:
    """Return the categories that a file lists, in its order, used or not."""
    lists = [part.words.drop_null().to_pylist() for part in parts]
    longest: list[str] = max(lists, key=len)
    for each in lists:
        if each != longest[: len(each)]:
            raise UnsuitableColumn(
                f"parts of the file list other categories ({listed(each)}; {listed(longest)}); "
                "name them in their order in `categories`"
            )
    if len(longest) > MAX_CATEGORIES:
        raise UnsuitableColumn(_too_many(len(longest)))
    if not longest:
        raise UnsuitableColumn("all of its values are missing; leave it out with `ignore`")
    return tuple(dict.fromkeys(longest))


def _too_many(count: int) -> str:
    return (
        f"it has {count} different strings, too many for categories; leave it out with `ignore`, "
        "or name those that count in `categories`"
    )


def _found(parts: Sequence[Words]) -> tuple[str, ...]:
    """Return the different strings of a column, sorted."""
    different: set[str] = set()
    for part in parts:
        used = part.words.take(part.places.unique().drop_null()).drop_null().unique()
        if len(used) <= MAX_CATEGORIES:
            different.update(used.to_pylist())
        if max(len(used), len(different)) > MAX_CATEGORIES:
            raise UnsuitableColumn(_too_many(max(len(used), len(different))))
    if not different:
        raise UnsuitableColumn("all of its values are missing; leave it out with `ignore`")
    return tuple(sorted(different))


def listed(categories: Sequence[str]) -> str:
    """Return the first few categories, as a message may show them."""
    more = len(categories) - _MOST_LISTED
    first = ", ".join(shown(each) for each in categories[:_MOST_LISTED])
    return f"{first} and {more} more" if more > 0 else first


def _nulls(chunks: Sequence[Any]) -> Mask | None:
    if not any(chunk.null_count for chunk in chunks):
        return None
    return np.concatenate([chunk.is_null().to_numpy(zero_copy_only=False) for chunk in chunks])


def _nans(parts: Sequence[Array]) -> Mask | None:
    """Return the rows that hold NaN; None where there are none."""
    if parts[0].dtype.kind != "f":
        return None
    masks: list[Mask] = []
    for part in parts:
        inner = tuple(range(1, part.ndim))
        masks += [
            np.asarray(np.isnan(part[start : start + _ROWS_AT_ONCE]).any(axis=inner))
            for start in range(0, len(part), _ROWS_AT_ONCE)
        ]
    mask = np.concatenate(masks)
    return mask if mask.any() else None
