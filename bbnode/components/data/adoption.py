"""Examples of a data source in the order and with the numbers of the federation's reference.

Rule: only what `compare` says can be mapped is mapped here, by name, as examples are gathered: no
file is read twice, and the split of a source never depends on the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.data.partition import Rows
from bbnode.components.data.shared_schema import ColumnMeaning, SharedSchema
from bbnode.ir.values import Composite

Array = npt.NDArray[Any]

_ABSENT: Final = -1  # the place of a category that the source has not: 0 in each example


def places_of(reference: SharedSchema, own: SharedSchema) -> Rows | None:
    """Return for each place of the reference the own place, or -1; None where they are the same."""
    if reference.columns is None or own.columns is None or reference.columns == own.columns:
        return None
    begins: dict[str, int] = {}
    at = 0
    for each in own.columns:
        begins[each.name] = at
        at += each.width
    by_name = {each.name: each for each in own.columns}
    found: list[int] = []
    for each in reference.columns:
        mine = by_name[each.name]
        if each.kind == "one_hot":
            index = {value: place for place, value in enumerate(mine.categories)}
            inner = [index.get(value, _ABSENT) for value in each.categories]
        else:
            inner = list(range(each.width))
        found += [place if place < 0 else begins[each.name] + place for place in inner]
    made = np.array(found, np.int64)
    return None if np.array_equal(made, np.arange(at)) else made


def mapped_features(features: Any, reference: SharedSchema, own: SharedSchema) -> Any:
    """Return features by row as the reference has them."""
    parts: Mapping[str, Any] | None = getattr(features, "parts", None)
    if parts is not None:
        names = [name for name, _ in reference.inputs]
        same = not names or list(parts) == names
        return features if same else _Reordered({name: parts[name] for name in names})
    places = places_of(reference, own)
    codes = _codes(reference, own)
    if places is None and not codes:
        return features
    return _Replaced(features, places, codes)


def mapped_labels(labels: Any, reference: SharedSchema, own: SharedSchema) -> Any:
    """Return labels by row with the numbers of the reference, and of its type."""
    if own.label_kind == "class" and reference.label_kind == "number" and reference.labels:
        return _Recoded(labels, None, np.dtype(reference.labels.dtype))
    if not own.classes or not reference.classes or own.classes == reference.classes:
        return labels
    return _Recoded(labels, _numbers(own.classes, reference.classes), np.dtype(np.int64))


def in_force(reference: SharedSchema, own: SharedSchema) -> SharedSchema:
    """Return what the examples of a source mean after it has adopted a reference."""
    from dataclasses import replace

    columns = own.columns if reference.columns is None else reference.columns
    return replace(
        own,
        inputs=reference.inputs or own.inputs,
        columns=columns,
        label=own.label if reference.label is None else reference.label,
        label_kind=own.label_kind if reference.labels is None else reference.label_kind,
        classes=own.classes if reference.classes is None else reference.classes,
    )


def _codes(reference: SharedSchema, own: SharedSchema) -> dict[int, Rows]:
    """Return by place of the reference the new number of each own category, where they differ."""
    if reference.columns is None or own.columns is None:
        return {}
    by_name: dict[str, ColumnMeaning] = {each.name: each for each in own.columns}
    found: dict[int, Rows] = {}
    at = 0
    for each in reference.columns:
        mine = by_name[each.name].categories
        if each.kind == "category" and mine != each.categories[: len(mine)]:
            found[at] = _numbers(mine, each.categories)
        at += each.width
    return found


def _numbers(own: Sequence[str], reference: Sequence[str]) -> Rows:
    index = {name: number for number, name in enumerate(reference)}
    return np.array([index[name] for name in own], np.int64)


def _renumbered(values: Array, numbers: Rows) -> Array:
    """Return the new numbers of values; what is no number of a name stays what it is."""
    known = (values >= 0) & (values < len(numbers))  # False for NaN: a value that is missing
    at = np.where(known, values, 0).astype(np.int64)
    made: Array = np.where(known, numbers[at], values).astype(values.dtype)
    return made


class _Replaced:
    """Features with places moved, and numbers of categories replaced, as they are gathered."""

    def __init__(self, features: Any, places: Rows | None, codes: Mapping[int, Rows]) -> None:
        self._features, self._places, self._codes = features, places, codes
        self.dtype: np.dtype[Any] = features.dtype
        count = math.prod(features.shape[1:]) if places is None else len(places)
        self.shape: tuple[int, ...] = (
            features.shape if places is None else (features.shape[0], count)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Array:
        made: Array = np.asarray(self._features[rows])
        if self._places is not None:
            made = made[:, self._places]  # a copy; the last place stands for one that is absent
            made[:, self._places == _ABSENT] = 0
        elif self._codes:
            made = made.copy()
        for place, numbers in self._codes.items():
            made[:, place] = _renumbered(made[:, place], numbers)
        return made


class _Recoded:
    """Labels with other numbers, or of another type."""

    def __init__(self, labels: Any, numbers: Rows | None, dtype: np.dtype[Any]) -> None:
        self._labels, self._numbers = labels, numbers
        self.dtype = dtype
        self.shape: tuple[int, ...] = labels.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Array:
        found = np.asarray(self._labels[rows])
        if self._numbers is not None:
            found = _renumbered(found, self._numbers)
        made: Array = found.astype(self.dtype)
        return made


class _Reordered:
    """Several inputs in another order; a batch is a Composite of them."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        first = next(iter(self.parts.values()))
        self.shape: tuple[int, ...] = first.shape
        self.dtype: np.dtype[Any] = first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Composite:
        parts = (np.asarray(part[rows]).view() for part in self.parts.values())
        made = []
        for part in parts:
            part.flags.writeable = False
            made.append(part)
        return Composite(made)
