"""Approximate search by faiss: what a graph and inverted lists have in common.

Rule: the library proposes rows, and their distances are computed anew in float64, so that a hit has
the distance that an exact index tells. Where an exact search takes no longer (few rows, few that a
filter allows, many neighbours), and where the library proposes too few rows, the search is exact:
there are always k hits if so many items match.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np

from bbnode.components.errors import BackendUnavailable
from bbnode.components.indexes.exact import FlatSearcher
from bbnode.components.indexes.searchers import (
    Floats,
    Ids,
    Mask,
    Rows,
    Searcher,
)
from bbnode.components.libraries import FAISS
from bbnode.ir.installation import install

MAX_THREADS: Final = 1024
_DIGEST_BYTES: Final = 32
_ROWS_AT_ONCE: Final = 1 << 16  # that are handed to the library; bounds its working memory
_NUMBERS_AT_ONCE: Final = 1 << 16  # of proposed vectors in float64: 512 KiB, as caches hold


def faiss_library(component: str) -> Any:
    """Return the module faiss. Raises BackendUnavailable where it can't be imported."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        command = install(FAISS.requirement)
        raise BackendUnavailable(
            f"{component} needs faiss, which can't be imported ({error}); {command}"
        ) from error


class FaissSearcher(Searcher):
    """Search by an index of faiss, checked against the rows themselves.

    Attributes:
        threads: of the library's next calls.
    """

    MAGIC: ClassVar[bytes]  # of a saved state; another one when its format changes

    def __init__(self, threads: int) -> None:
        """Begin without rows. `threads`: of one call; 0: as many as the machine has cores."""
        self.faiss = faiss_library(type(self).__name__)
        self.threads = threads or os.cpu_count() or 1
        self._exact = FlatSearcher()
        self.metric = ""
        self.dimensions = 0
        self.index: Any = None  # of the library; None: there is none yet

    @property
    def library_metric(self) -> int:
        """The library's metric; vectors of length 1 are as near by one as by the other."""
        found: int = (
            self.faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else self.faiss.METRIC_L2
        )
        return found

    @abstractmethod
    def is_exact_better(self, k: int, count: int, total: int) -> bool:
        """Return True if k of `count` rows, which a filter left of `total`, are found exactly."""

    @abstractmethod
    def candidates(self, queries: Floats, k: int, count: int, mask: Mask | None) -> Ids:
        """Return rows [Q, k or more] that may be nearest; -1 for none.

        Args:
            queries: float32 [Q, D].
            k: at most `count`.
            count: the number of rows that may be found.
            mask: which those are; None: all.
        """

    def begin(self, metric: str, dimensions: int) -> None:
        """Forget all rows and all training."""
        self.metric, self.dimensions = metric, dimensions
        self.index = None
        self._exact.begin(metric, dimensions)

    def remove(self, rows: Ids) -> None:
        """Do nothing: a dead row stays a way to others, and no search returns it."""

    def catch_up(self, rows: Rows) -> None:
        """Take rows that the library's index lacks."""
        known = int(self.index.ntotal)
        for start in range(known, len(rows), _ROWS_AT_ONCE):
            self.add(start, np.ascontiguousarray(rows.vectors[start : start + _ROWS_AT_ONCE]))

    def search(
        self, queries: Floats, k: int, rows: Rows, allowed: Mask | None
    ) -> tuple[Ids, Floats]:
        """Return rows and distances [Q, k or more]."""
        if allowed is None:
            mask, count = rows.alive if rows.dead else None, len(rows) - rows.dead
        else:
            mask, count = allowed, int(np.count_nonzero(allowed))
        wanted = min(k, count)
        if self.index is None or self.is_exact_better(wanted, count, len(rows)):
            return self._exact.search(queries, k, rows, allowed)
        self.limit_threads()
        numbers = self.candidates(queries, wanted, count, mask)
        distances = _distances(rows, numbers, queries)
        is_found = numbers >= 0
        if numbers.shape[1] >= wanted and is_found.all():
            return numbers, distances
        short = np.flatnonzero(np.count_nonzero(is_found, axis=1) < wanted)
        if not len(short):
            return numbers, distances
        found, far = self._exact.search(queries[short], k, rows, allowed)
        more = max(0, found.shape[1] - numbers.shape[1])
        numbers = np.pad(numbers, ((0, 0), (0, more)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, more)), constant_values=np.inf)
        numbers[short], distances[short] = -1, np.inf
        numbers[short, : found.shape[1]], distances[short, : found.shape[1]] = found, far
        return numbers, distances

    def limit_threads(self) -> None:
        """Set how many threads the library's next call from this thread has."""
        self.faiss.omp_set_num_threads(self.threads)

    def selector(self, mask: Mask | None) -> Any:
        """Return the library's filter of rows; None for all of them."""
        if mask is None:
            return None
        return self.faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))

    # -- state ----------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Return the library's index without what the rows tell; empty if there is none."""
        if self.index is None:
            return b""
        body: bytes = self.written().tobytes()
        return self.MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body

    def load(self, data: bytes, rows: Rows) -> None:
        """Take what `dump` returned; ValueError for anything else, which is not parsed.

        The library would trust a size or an offset in damaged bytes.
        """
        start = len(self.MAGIC) + _DIGEST_BYTES
        body = memoryview(data)[start:]
        digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
        if bytes(data[:start]) != self.MAGIC + digest:
            raise ValueError(f"it is no saved state of the kind {self.KIND}, or damaged")
        self.begin(rows.metric, rows.dimensions)
        try:
            found = self.read(np.frombuffer(body, np.uint8), rows)
        except (RuntimeError, AssertionError) as error:  # what faiss raises
            raise ValueError(f"it can't be read: {error}") from error
        if found.d != rows.dimensions or found.metric_type != self.library_metric:
            raise ValueError("it is of vectors of another length or metric")
        self.index = found

    @abstractmethod
    def written(self) -> Any:
        """Return the library's index as bytes, uint8 [N]."""

    @abstractmethod
    def read(self, data: Any, rows: Rows) -> Any:
        """Return the library's index of such bytes; ValueError if its settings are others."""

    def stats(self) -> dict[str, Any]:
        """Return the library and its version."""
        return {"library": f"faiss {self.faiss.__version__}", "threads": self.threads}


def _distances(rows: Rows, numbers: Ids, queries: Floats) -> Floats:
    """Return the distances of queries to their rows [Q, k], those of `exact_distances`; -1: inf."""
    found = np.empty(numbers.shape, np.float32)
    step = max(1, _NUMBERS_AT_ONCE // (numbers.shape[1] * rows.dimensions))
    for start in range(0, len(numbers), step):
        part = slice(start, start + step)
        near = rows.vectors.take(numbers[part], axis=0, mode="clip")  # of -1 the first row
        asked = queries[part].astype(np.float64)
        if rows.metric == "l2":
            off = near - asked[:, None]
            found[part] = np.sqrt(np.einsum("qkd,qkd->qk", off, off))
            continue
        inner = np.einsum("qkd,qd->qk", near.astype(np.float64), asked)
        found[part] = np.clip(1 - inner, 0, 2) if rows.metric == "cosine" else -inner
    found[numbers < 0] = np.inf
    return found
