"""The open file of items, its columns, and the batches that are read of it.

Rule: a file is streamed, never held whole, and each row is checked before anybody gets it; one that
is no item is named by its line (of text, counted from 1) or row (of arrays, counted from 0).
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import Array
from bbnode.components.data.data_file import DataFile
from bbnode.components.errors import DataUnavailable
from bbnode.ir.decoding import shown
from bbnode.ir.values import Scalar

Vectors: TypeAlias = npt.NDArray[np.float32]

READER: Final = "items"  # who reads, in the errors of shared readers
_VECTOR_NAMES: Final = ("vector", "vectors", "embedding", "embeddings")
_ID_NAMES: Final = ("id", "ids")
BATCH_BYTES: Final = 8 << 20  # of the vectors of one batch
_MAX_LISTED: Final = 12  # columns in an error


class ItemFileRefused(DataUnavailable):
    """A file of items can't be read, or has a row that is no item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLayout:
    """The columns of a file of items: fields of JSON, arrays of an .npz.

    Attributes:
        vector: names or patterns ("x*") of the columns of vectors: one of lists, or several of
            numbers; empty is one called vector, embedding or the like, or the only one of lists.
        text: the column of texts that an encoder makes vectors of, in place of `vector`.
        id: the column of ids; empty is one called id or ids, if there is one.
        metadata: the columns that are kept beside; None is all others.
        row_ids: there is no column of ids, also if one is called so.
    """

    vector: tuple[str, ...] = ()
    text: str = ""
    id: str = ""
    metadata: tuple[str, ...] | None = None
    row_ids: bool = False


@dataclass(slots=True, kw_only=True)
class ItemBatch:
    """Some items of a file, in its order.

    Attributes:
        rows: the number of each among all rows of the file, from 0; int64 [N].
        ids: int64 [N]; None where the file has none.
        vectors: float32 [N, D]; None where `texts` are there, one for each item.
        metadata: of each item; None where the file has none.
        skipped: what was wrong with rows before and among these, which were left out.
        place: the name of a row for people, by its number.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64] | None
    vectors: Vectors | None
    texts: list[str] | None
    metadata: list[dict[str, Scalar]] | None
    skipped: list[str] = field(default_factory=list)
    place: Callable[[int], str] = str

    def __len__(self) -> int:
        return len(self.rows)


class OpenItems:
    """An open file of items.

    Attributes:
        path: of the file.
        layout: which of its columns are what.
        count: its rows; None where only reading it to its end would tell.
        data: the file, for reads at offsets.
    """

    def __init__(self, path: Path, layout: ItemLayout, held: contextlib.ExitStack) -> None:
        """Open a file, which `held` closes. Raises ItemFileRefused."""
        self.path, self.layout = path, layout
        self.count: int | None = None
        self.data = held.enter_context(DataFile(path, READER))
        if not self.data.size:
            raise ItemFileRefused(f"{path} is empty")
        self._stream = held.enter_context(self.data.stream())

    def stream(self) -> BinaryIO:
        """Return the open file, at its beginning; there is one."""
        self._stream.seek(0)
        return self._stream

    def check_unchanged(self) -> None:
        """Raise DataUnavailable if the file was written to since it was opened."""
        self.data.check_unchanged()

    def refuse(self, what: str) -> ItemFileRefused:
        """Return the error of this file."""
        return ItemFileRefused(f"{self.path}: {what}")


class ItemColumns:
    """The columns of a file by what they are for, by the layout and by their names."""

    def __init__(
        self, file: OpenItems, names: Sequence[str], layout: ItemLayout, lists: set[str]
    ) -> None:
        """Choose among `names`; `lists` are those whose rows are lists. Raises ItemFileRefused."""
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise file.refuse(f"it has several columns {', '.join(map(shown, twice))}; rename them")
        self._file, self._names = file, names
        self.text = self._named(layout.text, "--text") if layout.text else ""
        self.vector = [] if self.text else self._vector(layout, lists)
        self.id = self._id(layout)
        taken = {*self.vector, self.id}
        if layout.metadata is None:
            self.metadata = [name for name in names if name not in taken]
        else:
            self.metadata = [self._named(name, "--metadata") for name in layout.metadata]

    def _vector(self, layout: ItemLayout, lists: set[str]) -> list[str]:
        if layout.vector:
            found: dict[str, None] = {}
            for pattern in layout.vector:
                matching = [n for n in self._names if fnmatch.fnmatchcase(n, pattern)]
                found.update(dict.fromkeys(matching or [self._named(pattern, "--vector")]))
            return list(found)
        by_name = [name for name in _VECTOR_NAMES if name in self._names]
        found_lists = [name for name in self._names if name in lists]
        if len(by_name) == 1 or len(found_lists) == 1:
            return [*by_name, *found_lists][:1]
        raise self._file.refuse(
            "which of its columns are the vectors? Name them with --vector (--vector embedding, "
            f"--vector 'x*'), or a column of texts with --text; it has {self._listed()}"
        )

    def _id(self, layout: ItemLayout) -> str | None:
        if layout.row_ids:
            return None
        if layout.id:
            return self._named(layout.id, "--id-column")
        return next((name for name in _ID_NAMES if name in self._names), None)

    def _named(self, name: str, option: str) -> str:
        if name in self._names:
            return name
        raise self._file.refuse(f"{option} {shown(name)}: there is {self._listed()}")

    def _listed(self) -> str:
        more = len(self._names) - _MAX_LISTED
        listed = ", ".join(map(shown, self._names[:_MAX_LISTED]))
        return f"{listed or 'no column'}{f' and {more} more' if more > 0 else ''}"


def not_finite(vector: Array) -> str:
    at = int(np.argmin(np.isfinite(vector)))
    return f"number {at} of the vector (from 0) is NaN, or too large for float32"


def ids_are_none(name: str, what: str) -> str:
    return (
        f"the id in {name} is {what}; ids are whole numbers from 0 to 2**63 - 1. Name another "
        "column with --id-column, or number the rows with --row-ids"
    )
