"""Keeping the rows of a collection: the contract of a store, and the one in memory.

Rule: a store appends rows and notes removals. It never changes an array that it has given out:
growing replaces it, so that what a search or a snapshot holds stays as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bbnode.components.indexes.searchers import Floats, Ids

_LEAST_ROWS = 1024


class Store(ABC):
    """Rows: an id, a vector and packed metadata each."""

    @abstractmethod
    def vectors(self) -> Floats:
        """Return the vectors of all rows, float32 [N, D]."""

    @abstractmethod
    def append(self, ids: Ids, vectors: Floats, metadata: Sequence[bytes], next_id: int) -> None:
        """Keep rows; all of them are kept when this returns, or none when it raises.

        A row that has the id of an earlier one takes its place. `next_id` is the one that the next
        item is numbered with.
        """

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Note that the items of these ids are removed."""

    @abstractmethod
    def metadata(self, start: int, stop: int) -> Iterable[bytes]:
        """Return the packed metadata of rows, in order."""

    def kept_metadata(self, count: int) -> Callable[[], Sequence[bytes]]:
        """Return what gives the packed metadata of the first rows, whatever changes meanwhile."""
        kept = list(self.metadata(0, count))
        return lambda: kept

    def metadata_of(self, rows: Ids) -> list[bytes]:
        """Return the packed metadata of these rows."""
        count = len(rows)
        if count > 1 and int(rows[-1]) - int(rows[0]) == count - 1 and (np.diff(rows) == 1).all():
            return list(self.metadata(int(rows[0]), int(rows[-1]) + 1))
        return [data for row in rows.tolist() for data in self.metadata(row, row + 1)]

    @abstractmethod
    def rewrite(self, rows: Ids, ids: Ids) -> None:
        """Keep only these rows, in this order; `ids` are those of their items."""

    def close(self) -> None:  # noqa: B027 - memory has neither
        """Let go of files and locks."""

    def stats(self) -> dict[str, Any]:
        """Return what is to be told of it."""
        return {}


class MemoryStore(Store):
    """Rows in this process's memory."""

    def __init__(self, dimensions: int) -> None:
        self._held = np.empty((0, dimensions), np.float32)
        self._metadata: list[bytes] = []
        self._has_metadata = False

    def vectors(self) -> Floats:
        """As the contract says."""
        return self._held[: len(self._metadata)]

    def append(self, ids: Ids, vectors: Floats, metadata: Sequence[bytes], next_id: int) -> None:
        """As the contract says."""
        count = len(self._metadata)
        wanted = count + len(vectors)
        if wanted > len(self._held):
            # By half: doubling would leave half of the memory unused on average.
            room = max(wanted, count + count // 2, _LEAST_ROWS if count else 0)
            held = np.empty((room, self._held.shape[1]), np.float32)
            held[:count] = self._held[:count]
            self._held = held
        self._held[count:wanted] = vectors
        self._metadata.extend(metadata)
        self._has_metadata = self._has_metadata or any(metadata)

    def remove(self, ids: Ids) -> None:
        """As the contract says: nothing is noted, for nothing outlives the process."""

    def metadata(self, start: int, stop: int) -> Iterable[bytes]:
        """As the contract says."""
        return self._metadata[start:stop]

    def kept_metadata(self, count: int) -> Callable[[], Sequence[bytes]]:
        """As the contract says: the list only grows, or is replaced."""
        held = self._metadata
        return lambda: held[:count]

    def metadata_of(self, rows: Ids) -> list[bytes]:
        """As the contract says."""
        if not self._has_metadata:
            return [b""] * len(rows)
        held = self._metadata
        return [held[row] for row in rows.tolist()]

    def rewrite(self, rows: Ids, ids: Ids) -> None:
        """As the contract says."""
        self._held = self._held[rows]
        self._metadata = [self._metadata[row] for row in rows]
