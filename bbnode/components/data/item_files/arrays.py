"""Arrays of numpy's files as items: an .npy file is vectors, an .npz file columns by name."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bbnode.components.data import numbers, numpy_files
from bbnode.components.data.base import Array
from bbnode.components.data.data_file import Room
from bbnode.components.data.item_files.base import (
    BATCH_BYTES,
    READER,
    ItemBatch,
    ItemColumns,
    OpenItems,
    ids_are_none,
    not_finite,
)
from bbnode.ir.decoding import shown
from bbnode.ir.values import MAX_INT64, Scalar


class ItemArrays:
    """An .npy file, which is the vectors, or the arrays of an .npz file by name."""

    def __init__(self, file: OpenItems) -> None:
        self._file = file
        arrays = self._opened()
        layout = file.layout
        columns = ItemColumns(
            file, list(arrays), layout, {n for n, a in arrays.items() if a.ndim > 1}
        )
        self._text = columns.text
        self._vectors = [] if self._text else [arrays[name] for name in columns.vector]
        self._ids = None if columns.id is None else arrays[columns.id]
        self._metadata = {name: arrays[name] for name in columns.metadata}
        self._texts = arrays[self._text] if self._text else None
        self._check(arrays, columns)

    def _opened(self) -> dict[str, Array]:
        data, opened = self._file.data, self._file.stream()
        if self._file.path.suffix.lower() == numpy_files.SUFFIX:
            return {"vectors": numpy_files.whole(data, opened)}
        room = Room(READER)
        with zipfile.ZipFile(opened) as archive:
            return {
                info.filename.removesuffix(numpy_files.SUFFIX): numpy_files.member(
                    data, opened, archive, info, room
                )
                for info in archive.infolist()
                if info.filename.endswith(numpy_files.SUFFIX)
            }

    def _check(self, arrays: Mapping[str, Array], columns: ItemColumns) -> None:
        refuse = self._file.refuse
        used = [*columns.vector, *columns.metadata]
        used += [name for name in (columns.id, self._text) if name]
        for name in used:
            array = arrays[name]
            is_vector = name in columns.vector and not self._text
            kinds = numbers.NUMBERS if is_vector else f"{numbers.NUMBERS}U"
            if array.dtype.kind not in kinds or array.ndim != 1 + (is_vector and array.ndim > 1):
                wanted = "numbers, [N, D]" if is_vector else "numbers or texts, [N]"
                raise refuse(
                    f"the array {shown(name)} is {array.dtype}{list(array.shape)}, and not of "
                    f"{wanted}; choose arrays with --vector and --metadata"
                )
        if self._vectors and len(self._vectors) == 1 and self._vectors[0].ndim == 1:
            raise refuse(
                f"it holds one vector of {len(self._vectors[0])} numbers; save it as [1, D], with "
                "vector[None]"
            )
        lengths = {name: len(arrays[name]) for name in used}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{shown(name)} {count}" for name, count in lengths.items())
            raise refuse(f"its arrays have different lengths ({listed}); choose with --metadata")
        if self._ids is not None and self._ids.dtype.kind not in "iu":
            raise refuse(ids_are_none(shown(columns.id), str(self._ids.dtype)))
        if self._texts is not None and self._texts.dtype.kind != "U":
            raise refuse(
                f"the array {shown(self._text)} is {self._texts.dtype}, and holds no texts"
            )
        self._file.count = next(iter(lengths.values()))
        if not self._file.count:
            raise refuse("it has no rows")

    def batches(self, size: int, skip_bad: bool) -> Iterator[ItemBatch]:
        wide = sum(4 * int(np.prod(part.shape[1:])) for part in self._vectors)
        size = min(size, max(1, BATCH_BYTES // max(1, wide)))
        for start in range(0, self._file.count or 0, size):
            self._file.check_unchanged()
            rows = slice(start, start + size)
            parts = [part[rows].reshape(len(part[rows]), -1) for part in self._vectors]
            ids = None if self._ids is None else self._ids[rows]
            count = len(ids) if ids is not None else 0
            vectors = None
            bad: dict[int, str] = {}
            if parts:
                with np.errstate(over="ignore"):
                    vectors = np.concatenate(
                        [np.asarray(part, np.float32) for part in parts], axis=1
                    )
                count = len(vectors)
                finite = np.isfinite(vectors).all(axis=1)
                for at in np.flatnonzero(~finite).tolist():
                    bad[at] = not_finite(vectors[at])
            texts = None if self._texts is None else self._texts[rows].tolist()
            count = count if texts is None else len(texts)
            if ids is not None:
                for at in np.flatnonzero((ids < 0) | (ids > MAX_INT64)).tolist():
                    bad[at] = f"the id {ids[at]} is none; ids are from 0 to 2**63 - 1"
            metadata = self._told(rows, count)
            made = ItemBatch(
                rows=np.arange(start, start + count),
                ids=None if ids is None else ids.astype(np.int64),
                vectors=vectors,
                texts=texts,
                metadata=metadata,
                place=lambda row: f"row {row}",
            )
            yield from _without(made, bad, self._file, skip_bad)

    def _told(self, rows: slice, count: int) -> list[dict[str, Scalar]] | None:
        if not self._metadata:
            return None
        columns = {name: array[rows].tolist() for name, array in self._metadata.items()}
        return [
            {name: values[at] for name, values in columns.items() if not _is_nan(values[at])}
            for at in range(count)
        ]


def _without(
    batch: ItemBatch, bad: Mapping[int, str], file: OpenItems, skip_bad: bool
) -> Iterator[ItemBatch]:
    """Yield the good items of a batch; those before the first bad one, and then its error."""
    if not bad:
        yield batch
        return
    first = min(bad)
    texts = [f"{batch.place(int(batch.rows[at]))}: {why}" for at, why in sorted(bad.items())]
    keep = np.ones(len(batch), np.bool_)
    keep[list(bad) if skip_bad else slice(first, None)] = False
    kept = np.flatnonzero(keep).tolist()
    made = ItemBatch(
        rows=batch.rows[keep],
        ids=None if batch.ids is None else batch.ids[keep],
        vectors=None if batch.vectors is None else batch.vectors[keep],
        texts=None if batch.texts is None else [batch.texts[at] for at in kept],
        metadata=None if batch.metadata is None else [batch.metadata[at] for at in kept],
        skipped=texts if skip_bad else [],
        place=batch.place,
    )
    if len(made) or made.skipped:
        yield made
    if not skip_bad:
        raise file.refuse(texts[0])


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
