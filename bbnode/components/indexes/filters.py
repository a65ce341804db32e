"""Filters of items by their metadata, and the metadata of items as they are kept.

Rule: a filter is a Metadata, every entry of which has to hold. The name of an entry may end with an
operator after a space:

    {"language": "en", "year >=": 2020, "kind !=": "draft", "tag in": '["a", "b"]'}

Operators are ==, !=, <, <=, >, >=, `in` and `not in`; the last two take a list as JSON. An item
without the entry matches only != and `not in`. Numbers compare by value (an int with a float, too),
bools only with bools, texts and bytes only with their own kind, by code point or byte; NaN is equal
to nothing. Where the kinds differ, no order holds and nothing is equal.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.indexes.errors import FilterRefused, IndexDamaged, ItemRefused
from bbnode.components.indexes.searchers import Mask
from bbnode.ir.caps import MAX_METADATA_ITEMS, MAX_SCALAR_BYTES
from bbnode.ir.decoding import shown
from bbnode.ir.values import Metadata, Scalar

_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_LISTS: Final = ("in", "not in")
OPERATORS: Final = ("==", "!=", *_ORDERS, *_LISTS)
_MAX_LISTED: Final = 10_000  # values of one list
_MAX_COLUMNS: Final = 32  # names that are kept by column; four bytes an item each
_MAX_MASKS: Final = 16  # filters whose result is kept; a byte an item each
_ABSENT: Final = object()
_NO_ENTRIES: Final[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of a filter.

    Attributes:
        name: of the metadata entry.
        operator: one of OPERATORS.
        operand: of an order a scalar; of the others what `_key` makes of a value, or a set of them.
    """

    name: str
    operator: str
    operand: Any

    def holds(self, value: Any) -> bool:
        """Return True if an item with this value matches; `_ABSENT` for one without the entry."""
        if value is _ABSENT:
            return self.operator in ("!=", "not in")
        if self.operator in _ORDERS:
            same = _kind(value) == _kind(self.operand)
            return same and bool(_ORDERS[self.operator](value, self.operand))
        if self.operator in _LISTS:
            return (_key(value) in self.operand) == (self.operator == "in")
        return bool((_key(value) == self.operand) == (self.operator == "=="))


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _key(value: Any) -> tuple[type, Any]:
    """Return what is equal for equal scalars alone. A NaN equals nothing."""
    if value != value:
        return object, object()
    return _kind(value), value


def conditions(where: Mapping[str, Scalar]) -> tuple[Condition, ...]:
    """Return the conditions of a filter. Raises FilterRefused."""
    return tuple(_condition(name, value) for name, value in where.items())


def _condition(given: str, value: Scalar) -> Condition:
    name, sign = given, "=="
    words = given.rsplit(" ", 2)
    if len(words) == 3 and words[1:] == ["not", "in"]:
        name, sign = words[0], "not in"
    elif len(words) > 1 and words[-1] in OPERATORS:
        name, sign = given[: -len(words[-1]) - 1], words[-1]
    elif len(words) > 1 and words[-1] and not any(c.isalnum() or c == "_" for c in words[-1]):
        raise FilterRefused(
            f"the filter {shown(given)} ends with {shown(words[-1])}, which is no operator; there "
            f"are {', '.join(OPERATORS)}"
        )
    name = name.strip()
    if not name:
        raise FilterRefused(f"the filter {shown(given)} names no entry; write 'name {sign}'")
    if sign in _LISTS:
        return Condition(name, sign, frozenset(map(_key, _listed(given, value))))
    if sign in _ORDERS and isinstance(value, bool):
        raise FilterRefused(f"the filter {shown(given)} orders by a bool; use == or !=")
    return Condition(name, sign, value if sign in _ORDERS else _key(value))


def _listed(given: str, value: Scalar) -> list[Any]:
    def refuse(number: str) -> Any:
        raise ValueError(f"{number} is no JSON")

    try:
        found = json.loads(value, parse_constant=refuse) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(
        isinstance(e, bool | int | float | str) for e in found
    ):
        raise FilterRefused(
            f"the filter {shown(given)} takes a JSON list of texts, numbers and bools, such as "
            f'\'["a", "b"]\', not {shown(value)}'
        )
    if len(found) > _MAX_LISTED:
        raise FilterRefused(f"the filter {shown(given)} lists {len(found)} values of {_MAX_LISTED}")
    return found


# --- metadata as they are kept ---------------------------------------------------------------


def packed(metadata: Mapping[str, Scalar]) -> bytes:
    """Return metadata as an index keeps them; empty for none. Raises ItemRefused."""
    if not metadata:
        return b""
    if len(metadata) > MAX_METADATA_ITEMS:
        raise ItemRefused(f"metadata of {len(metadata)} entries; an item has {MAX_METADATA_ITEMS}")
    try:
        data: bytes = msgpack.packb(dict(metadata))
    except (OverflowError, ValueError, TypeError) as error:
        raise ItemRefused(f"metadata can't be kept: {error}; integers have 64 bit") from error
    if len(data) > MAX_SCALAR_BYTES:
        raise ItemRefused(f"metadata of {len(data)} bytes; an item has {MAX_SCALAR_BYTES}")
    return data


def unpacked(data: bytes | memoryview) -> Metadata:
    """Return what was packed. Raises IndexDamaged."""
    with _readable():
        return Metadata(_entries(data) if len(data) else None)


def check_packed(blobs: Iterable[bytes]) -> None:
    """Raise IndexDamaged unless each was packed here."""
    with _readable():
        for blob in blobs:
            if blob and not _SCALARS.issuperset(map(type, _entries(blob).values())):
                raise ValueError("it holds what is no scalar")


_SCALARS: Final = frozenset((bool, int, float, str, bytes))


def _entries(data: bytes | memoryview) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(data, max_ext_len=0, max_array_len=0)
    return found


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever msgpack makes of damaged bytes
        raise IndexDamaged(f"the metadata of an item can't be read: {error}") from error


# --- columns and masks -----------------------------------------------------------------------


@dataclass(slots=True)
class _Column:
    """The values of one entry: the number of each row's value, 0 for none.

    Values that are equal, as 1 and 1.0, may have several numbers.
    """

    codes: npt.NDArray[np.int32]
    numbers: dict[tuple[type, Any], int]
    values: list[Any]

    def number_of(self, value: Any) -> int:
        key = value.__class__, value
        found = self.numbers.get(key)
        if found is None:
            if value != value:
                key = _Column, None  # one NaN stands for all
            found = self.numbers.setdefault(key, len(self.values) + 1)
            if found > len(self.values):
                self.values.append(value)
        return found

    def mask(self, condition: Condition) -> Mask:
        holds = [condition.holds(_ABSENT), *map(condition.holds, self.values)]
        return np.array(holds, np.bool_)[self.codes]


class FilterTable:
    """Masks of filters over the rows of an index, kept for filters that come again."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._masks: dict[tuple[Condition, ...], Mask] = {}

    def clear(self) -> None:
        """Forget all rows: they have other numbers now."""
        self._columns.clear()
        self._masks.clear()

    def mask(
        self, wanted: tuple[Condition, ...], count: int, read: Callable[[int, int], Iterable[bytes]]
    ) -> Mask:
        """Return which of the rows 0 .. count - 1 match all conditions; not to be written to.

        `read(start, stop)` gives the packed metadata of rows.
        """
        known = self._masks.pop(wanted, None)
        if known is None or len(known) != count:
            known = np.ones(count, np.bool_)
            self._extend({each.name for each in wanted}, count, read)
            for each in wanted:
                known &= self._columns[each.name].mask(each)
            known.flags.writeable = False
        self._masks[wanted] = known
        while len(self._masks) > _MAX_MASKS:
            del self._masks[next(iter(self._masks))]
        while len(self._columns) > _MAX_COLUMNS:
            del self._columns[next(iter(self._columns))]
        return known

    def _extend(
        self, names: set[str], count: int, read: Callable[[int, int], Iterable[bytes]]
    ) -> None:
        for name in sorted(names):
            empty = _Column(np.zeros(0, np.int32), {}, [])
            self._columns[name] = self._columns.pop(name, empty)  # the last one used goes last
        behind = {n: self._columns[n] for n in names if len(self._columns[n].codes) < count}
        if not behind:
            return
        start = min(len(column.codes) for column in behind.values())
        held: dict[str, list[int]] = {name: [] for name in behind}
        todo = [(name, behind[name].number_of, held[name].append) for name in behind]
        with _readable():
            for data in read(start, count):
                found = _entries(data) if data else _NO_ENTRIES
                for name, number_of, append in todo:
                    append(number_of(found[name]) if name in found else 0)
        for name, column in behind.items():
            fresh = np.array(held[name][len(column.codes) - start :], np.int32)
            column.codes = np.concatenate([column.codes, fresh])
