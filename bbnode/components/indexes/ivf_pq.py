"""`IvfPqIndex`: approximate search in inverted lists of short codes.

Jegou, Douze and Schmid, 2011 (doi:10.1109/TPAMI.2010.57), as faiss implements it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from bbnode.components.indexes.approximate import MAX_THREADS, FaissSearcher
from bbnode.components.indexes.base import VectorIndex, VectorIndexConfig
from bbnode.components.indexes.errors import TrainingRefused
from bbnode.components.indexes.searchers import Floats, Ids, Mask, Rows, Searcher
from bbnode.components.libraries import FAISS, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.components.settings import local_setting

MAX_LISTS: Final = 1 << 20
MAX_PART: Final = 1 << 10
MAX_RERANK: Final = 1 << 10
_BITS: Final = (4, 8)
_LISTS_PER_ROOT: Final = 4  # lists for each of the root of the number of examples
_LEAST_PER_LIST: Final = 39  # examples; with fewer, centroids follow single ones
_EXAMPLES_PER_LIST: Final = 256  # more examples of a list move its centroid little
_EXAMPLES_PER_WORD: Final = 64
_ITERATIONS: Final = 10  # of k-means, for centroids and for words
_SEED: Final = 1234
# Few rows: an exact search of them takes about as long as the look at the nearest centroids.
_FEW_ROWS: Final = 2048
_RERANK_COST: Final = 4  # rows of a block, for each that is fetched and computed anew


@dataclass(frozen=True, kw_only=True)
class IvfPqIndexConfig(VectorIndexConfig):
    """Settings of `IvfPqIndex`; those of every index, and:

    Attributes:
        lists: that items are sorted into, by the nearest of as many centroids; 0: four times the
            square root of the number of examples, and one for 39 examples at most.
        part: numbers of a vector that become one code; the largest divisor of the vector's length
            that is not above it.
        bits: of a code, 4 or 8; with 8 there are more words, which take twice the memory, longer
            training and longer searches, and find more with the same `rerank`.
        probes: lists that are looked at in a search; more find more, and a search takes longer in
            proportion.
        rerank: candidates for each of k, whose distances are computed from the vectors themselves.
        train_from: items from which on an index that nothing was trained on fits itself to them,
            in the next search; 0: never.
        threads: of one call; 0: as many as there are cores.
    """

    lists: int = 0
    part: int = 2
    bits: int = 4
    probes: int = 32
    rerank: int = 10
    train_from: int = 10_000
    threads: int = local_setting(1)


class IvfPqSearcher(FaissSearcher):
    """Search in inverted lists; settings are those of `IvfPqIndexConfig`.

    `lists`, `part` and `bits` count where it is trained; a saved state has those of its training.
    `probes`, `rerank` and `threads` may be changed between calls.
    """

    KIND: ClassVar[str] = "ivf_pq"
    MAGIC: ClassVar[bytes] = b"BBIV\x01"

    def __init__(
        self,
        *,
        lists: int = IvfPqIndexConfig.lists,
        part: int = IvfPqIndexConfig.part,
        bits: int = IvfPqIndexConfig.bits,
        probes: int = IvfPqIndexConfig.probes,
        rerank: int = IvfPqIndexConfig.rerank,
        train_from: int = IvfPqIndexConfig.train_from,
        threads: int = IvfPqIndexConfig.threads,
    ) -> None:
        super().__init__(threads)
        self._lists, self._part, self._bits = lists, part, bits
        self.probes, self.rerank, self._train_from = probes, rerank, train_from
        self._trainings = 0

    def add(self, first: int, vectors: Floats) -> None:
        """Sort rows into lists; rows that come before training wait for it."""
        # A search takes what is missing: rows before the first of these may be among that.
        if self.index is not None and self.index.ntotal == first:
            self.limit_threads()
            self.index.add(vectors)

    def train(self, vectors: Floats) -> None:
        """Fit centroids and codes to examples [N, D]. Raises TrainingRefused for too few."""
        words = 1 << self._bits
        least = max(words, self._lists)
        if len(vectors) < least:
            raise TrainingRefused(
                f"{len(vectors)} training vectors; {words} words of a code and {self._lists} lists "
                f"take {least} or more"
            )
        auto = min(_LISTS_PER_ROOT * int(len(vectors) ** 0.5), len(vectors) // _LEAST_PER_LIST)
        lists = self._lists or max(1, auto)
        faiss, kind = self.faiss, self.library_metric
        part = next(n for n in range(self._part, 0, -1) if self.dimensions % n == 0)
        flat = faiss.IndexFlat(self.dimensions, kind)
        make = faiss.IndexIVFPQ if self._bits == 8 else faiss.IndexIVFPQFastScan
        made = make(flat, self.dimensions, lists, self.dimensions // part, self._bits, kind)
        for fit, most in ((made.cp, _EXAMPLES_PER_LIST), (made.pq.cp, _EXAMPLES_PER_WORD)):
            fit.seed, fit.niter = _SEED, _ITERATIONS
            fit.min_points_per_centroid = 1  # which are too few is said above, not on stderr
            fit.max_points_per_centroid = most
        self.limit_threads()
        made.train(vectors)
        self.index = made
        self._trainings += 1

    def rebuild(self, rows: Rows) -> None:
        """Sort all rows into lists anew; what was trained stays."""
        if (
            self.index is not None
            and self.metric == rows.metric
            and self.dimensions == rows.dimensions
        ):
            self.index.reset()
            self._exact.begin(rows.metric, rows.dimensions)
            self.catch_up(rows)
        else:
            super().rebuild(rows)

    def search(
        self, queries: Floats, k: int, rows: Rows, allowed: Mask | None
    ) -> tuple[Ids, Floats]:
        """Return rows and distances [Q, k or more]; exact as long as there was no training."""
        if self.index is None and 0 < self._train_from <= len(rows) - rows.dead:
            self._train_on(rows)
        if self.index is not None and self.index.ntotal < len(rows):
            self.catch_up(rows)
        return super().search(queries, k, rows, allowed)

    def _train_on(self, rows: Rows) -> None:
        living = np.flatnonzero(rows.alive)
        most = _EXAMPLES_PER_LIST * max(
            self._lists or _LISTS_PER_ROOT * int(len(living) ** 0.5), 1 << self._bits
        )
        # Evenly over the order of adding.
        step = max(1, len(living) // most)
        chosen = living[::step]
        if len(chosen) >= max(1 << self._bits, self._lists):
            self.train(np.ascontiguousarray(rows.vectors[chosen]))

    def is_exact_better(self, k: int, count: int, total: int) -> bool:
        """Return True for fewer rows than a search looks at, or hardly more than it reranks."""
        lists = int(self.index.nlist)
        seen = total * min(self.probes, lists) // lists
        return count <= max(_FEW_ROWS, seen, _RERANK_COST * self.rerank * k)

    def candidates(self, queries: Floats, k: int, count: int, mask: Mask | None) -> Ids:
        """Return `rerank` rows for each of k, by their codes."""
        settings = self.faiss.SearchParametersIVF(nprobe=self.probes, sel=self.selector(mask))
        wanted = min(self.rerank * k, count)
        found: Ids = self.index.search(queries, wanted, params=settings)[1]
        return found

    def written(self) -> Any:
        """Return centroids, codes and lists."""
        return self.faiss.serialize_index(self.index)

    def read(self, data: Any, rows: Rows) -> Any:
        """Return the lists, as they were trained: settings count for the next training."""
        found = self.faiss.deserialize_index(data)
        kinds = (self.faiss.IndexIVFPQ, self.faiss.IndexIVFPQFastScan)
        if not isinstance(found, kinds) or found.ntotal > len(rows):
            raise ValueError("it is of other lists, or of more rows")
        return found

    def stamp(self) -> int:
        """Return how often it was trained, which a search may do."""
        return self._trainings

    def stats(self) -> dict[str, Any]:
        """Return settings, and whether there was training; then lists and bytes of codes."""
        told = {
            "trained": self.index is not None,
            "probes": self.probes,
            "rerank": self.rerank,
            **super().stats(),
        }
        if self.index is not None:
            told["lists"] = int(self.index.nlist)
            told["code_bytes"] = int(self.index.ntotal * self.index.code_size)
        return told


@register_component
class IvfPqIndex(VectorIndex):
    """Looks at the codes of items in the lists nearest to the query, then at the best vectors.

    The lists hold a byte for each `part` numbers of a vector, so that large indexes whose vectors
    stay in a mapped directory take little memory. Centroids and codes are fitted by training, or to
    the index's own items once there are `train_from`; before, a search is exact. The same sequence
    of calls gives the same results on the same processor; needs `faiss-cpu`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.IvfPqIndex"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (FAISS,)
    Config: ClassVar[type] = IvfPqIndexConfig
    config: IvfPqIndexConfig

    def make_searcher(self) -> Searcher:
        """Return a searcher of these settings."""
        given = self.config
        for name, least, most in (
            ("lists", 0, MAX_LISTS),
            ("part", 1, MAX_PART),
            ("probes", 1, MAX_LISTS),
            ("rerank", 1, MAX_RERANK),
            ("train_from", 0, 1 << 62),
            ("threads", 0, MAX_THREADS),
        ):
            value = getattr(given, name)
            self.require(least <= value <= most, f"{name} is {value}, not {least} to {most}")
        self.require(given.bits in _BITS, f"bits is {given.bits}, not 4 or 8")
        return IvfPqSearcher(
            lists=given.lists,
            part=given.part,
            bits=given.bits,
            probes=given.probes,
            rerank=given.rerank,
            train_from=given.train_from,
            threads=given.threads,
        )
