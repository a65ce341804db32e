"""Filling an index from files of items, so that the same files again add nothing twice.

Rule: an item that is there as it is in the file is passed over. Ids that a file has say which item
is meant: another vector under one of them replaces it. Ids that are only the numbers of rows do
not, for those of another file are the same: they replace nothing unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bbnode.components.data.item_files.base import ItemBatch
from bbnode.components.data.item_files.file import ItemFile
from bbnode.components.indexes.collection import Collection
from bbnode.components.indexes.errors import ItemRefused, VectorRefused, WrongDimensions
from bbnode.components.indexes.searchers import Floats, Ids, Mask
from bbnode.ir.values import MAX_INT64, Metadata, Scalar

# Items of one batch: what an interrupt waits for, and what a crash loses.
_BATCH_ITEMS: Final = 4096
_BATCH_TEXTS: Final = 256  # an encoder takes longer for each
_SAME: Final = 1e-5  # of vectors that were brought to length 1; others are compared exactly

Encode = Callable[[Sequence[str]], Floats]
# Adds vectors [N, D] with metadata, under ids or numbered on.
Add = Callable[[Floats, Sequence[Mapping[str, Scalar]] | None, Ids | None], Any]


class IdTaken(ItemRefused):
    """The number of a row is the id of another item."""


@dataclass(slots=True)
class FilledCounts:
    """Counts of what became of the rows of files.

    Attributes:
        rows: that were read, those that were skipped included.
        added, replaced, present: items that are new, that took the place of another one, and that
            were there as they are.
        skipped: rows that were no items.
        told: what was wrong with those of the last batch.
    """

    rows: int = 0
    added: int = 0
    replaced: int = 0
    present: int = 0
    skipped: int = 0
    told: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """The rows whose items are in the index now."""
        return self.added + self.replaced + self.present


class Filler:
    """Adds the items of files to one index, a batch at a time."""

    def __init__(
        self,
        index: Collection | Add,
        *,
        encode: Encode | None = None,
        first_id: int | None = None,
        replace: bool = False,
        skip_bad: bool = False,
    ) -> None:
        """Make a filler.

        Args:
            index: a collection; or what adds to an index that can't be read from here. There,
                nothing is known of what is in it: an item is added or replaced, and not compared.
            encode: makes vectors of texts, float32 [N, D].
            first_id: of the first row, of files without ids; rows of further files follow. None:
                0 in a collection; elsewhere the index numbers them.
            replace: rows without ids replace other items that have their numbers.
            skip_bad: rows that are no items are left out and told, rather than an error.
        """
        self._known = index if isinstance(index, Collection) else None
        self._add: Add = index.add if isinstance(index, Collection) else index
        self._encode = encode
        self._first_id = 0 if first_id is None and self._known is not None else first_id
        self._replace, self._skip_bad = replace, skip_bad
        self.filled = FilledCounts()

    def add(self, file: ItemFile) -> Iterator[FilledCounts]:
        """Add the items of a file; yields the counts so far after each batch that is kept.

        Raises ItemFileRefused and ItemRefused with the row that is no item, IdTaken, and what the
        index raises. What was kept before is in the index, then.
        """
        size = _BATCH_ITEMS if self._encode is None else _BATCH_TEXTS
        for batch in file.batches(size, skip_bad=self._skip_bad):
            self.filled.told = list(batch.skipped)
            self.filled.rows += len(batch) + len(batch.skipped)
            self.filled.skipped += len(batch.skipped)
            if len(batch):
                self._keep(file, batch)
            yield self.filled
        if self._first_id is not None:
            self._first_id += file.count or 0

    def _keep(self, file: ItemFile, batch: ItemBatch) -> None:
        vectors = batch.vectors
        if vectors is None:
            assert self._encode is not None, "texts are only read for an encoder"
            vectors = self._encode(batch.texts or [])
        ids = batch.ids
        if ids is None and self._first_id is not None:
            if self._first_id > MAX_INT64 - int(batch.rows[-1]):
                raise ItemRefused(f"{file.path}: there are no ids left from {self._first_id} on")
            ids = batch.rows + self._first_id
        wanted = np.ones(len(batch), np.bool_)
        there = same = np.zeros(len(batch), np.bool_)
        if ids is not None:
            # Of rows with one id the last counts, in one batch as in several.
            _, from_behind = np.unique(ids[::-1], return_index=True)
            wanted[:] = False
            wanted[len(ids) - 1 - from_behind] = True
        if self._known is not None and ids is not None:
            dimensions = self._known.dimensions
            if dimensions and vectors.shape[1] != dimensions:
                raise WrongDimensions(
                    f"{file.path}: vectors of {vectors.shape[1]} numbers; this index holds "
                    f"vectors of {dimensions}"
                )
            there = self._known.has(ids) & wanted
            same_vector, same = self._compared(self._known, ids, vectors, batch, there)
            taken = there & ~same_vector
            if batch.ids is None and not self._replace and taken.any():
                raise self._taken(self._known, file, batch, ids, int(np.flatnonzero(taken)[0]))
        write = np.flatnonzero(wanted & ~same)
        bad = self._written(file, batch, vectors, ids, write) if len(write) else []
        self.filled.present += int(same.sum())
        self.filled.replaced += int((~wanted).sum() + (there & ~same).sum() - there[bad].sum())
        self.filled.added += int((wanted & ~there).sum() - (~there[bad]).sum())
        self.filled.skipped += len(bad)

    def _written(
        self, file: ItemFile, batch: ItemBatch, vectors: Floats, ids: Ids | None, rows: Ids
    ) -> list[int]:
        """Add some rows of a batch; return those that the index refuses, where they are skipped.

        What an index refuses of a batch it does not name by its line: then they are given one by
        one, until the one that it is.
        """
        told = batch.metadata
        try:
            self._add(
                vectors[rows],
                None if told is None else [told[row] for row in rows],
                None if ids is None else ids[rows],
            )
        except (VectorRefused, ItemRefused) as error:
            if len(rows) == 1:
                text = f"{batch.place(int(batch.rows[rows[0]]))}: {error}"
                if not self._skip_bad:
                    raise type(error)(f"{file.path}: {text}") from error
                self.filled.told.append(text)
                return [int(rows[0])]
            parts = (
                self._written(file, batch, vectors, ids, rows[n : n + 1]) for n in range(len(rows))
            )
            return [row for part in parts for row in part]
        return []

    def _compared(
        self, known: Collection, ids: Ids, vectors: Floats, batch: ItemBatch, there: Mask
    ) -> tuple[Mask, Mask]:
        """Return of each row that is there if the vector is the same, and if all of it is."""
        same_vector, same = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
        if not there.any():
            return same_vector, same
        held, given = known.vectors_of(ids[there]), vectors[there]
        if known.metric == "cosine":
            with np.errstate(invalid="ignore", divide="ignore"):
                given = (
                    given / np.sqrt(np.einsum("ij,ij->i", given, given, dtype=np.float64))[:, None]
                )
            same_vector[there] = (np.abs(held - given) <= _SAME).all(axis=1)
        else:
            same_vector[there] = (held == given).all(axis=1)
        same[there] = same_vector[there]
        metadata = known.metadata_of(ids[there])
        for row, kept in zip(np.flatnonzero(there).tolist(), metadata, strict=True):
            same[row] &= kept == Metadata({} if batch.metadata is None else batch.metadata[row])
        return same_vector, same

    def _taken(
        self, known: Collection, file: ItemFile, batch: ItemBatch, ids: Ids, row: int
    ) -> IdTaken:
        free = int(known.ids.max()) + 1
        place = batch.place(int(batch.rows[row]))
        return IdTaken(
            f"{file.path}, {place}: the id {ids[row]} is that of another item. Its rows have no "
            "ids of their own: number them from one that is free on (--first-id "
            f"{free}), name a column of ids (--id-column), or replace what is there (--replace)"
        )
