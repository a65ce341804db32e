"""Batches of items that are read row by row, each checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bbnode.components.data.item_files.base import (
    BATCH_BYTES,
    ItemBatch,
    ItemColumns,
    ItemFileRefused,
    OpenItems,
    Vectors,
    ids_are_none,
    not_finite,
)
from bbnode.components.data.item_files.sources import (
    ABSENT,
    INTEGER,
    FileRow,
    RowSource,
    is_numeral,
)
from bbnode.ir.decoding import shown
from bbnode.ir.values import MAX_INT64, Scalar


class ItemRows:
    """Batches of the records of a source."""

    def __init__(self, file: OpenItems, source: RowSource) -> None:
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
            if len(rows) >= min(size, max(1, BATCH_BYTES // (4 * max(1, self._dimensions)))):
                yield made()
        self._file.count = last + 1
        if last < 0:
            raise self._file.refuse("it has no rows")
        if rows or skipped:
            yield made()

    def _item(self, record: FileRow) -> tuple[int | None, Any, dict[str, Scalar]]:
        values = record.values
        columns = self._source.columns
        if columns is None:
            lists = {name for name, value in values.items() if isinstance(value, list)}
            try:
                columns = ItemColumns(self._file, list(values), self._file.layout, lists)
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
            if value is not ABSENT:
                told[name] = value
        return number, vector, told

    def _vector(self, columns: ItemColumns, values: Mapping[str, Any]) -> Vectors:
        cells = [values.get(name) for name in columns.vector]
        if len(cells) > 1 and all(map(is_numeral, cells)):
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
            raise ValueError(not_finite(vector))
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


def _id(name: str, value: Any) -> int:
    if isinstance(value, str) and INTEGER.fullmatch(value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise ValueError(ids_are_none(shown(name), shown(value)))
    return value
