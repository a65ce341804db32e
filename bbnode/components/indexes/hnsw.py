"""`HnswIndex`: approximate search in a graph of neighbours.

Malkov and Yashunin, 2018 (doi:10.1109/TPAMI.2018.2889473), as faiss implements it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np

from bbnode.components.indexes.approximate import MAX_THREADS, FaissSearcher
from bbnode.components.indexes.base import VectorIndex, VectorIndexConfig
from bbnode.components.indexes.searchers import Floats, Ids, Mask, Rows, Searcher
from bbnode.components.libraries import FAISS, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.components.settings import local_setting

MAX_LINKS: Final = 512
MAX_EXPANSION: Final = 1 << 16
# An exact search of n of N rows takes as long as one of the graph with ef where n^2 is about this
# times ef N: a step in the graph costs as much as 48 rows of a block, and ef N / n are made.
_ROWS_PER_STEP: Final = 48

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class HnswIndexConfig(VectorIndexConfig):
    """Settings of `HnswIndex`; those of every index, and:

    Attributes:
        m: links of an item on each level, twice as many on the lowest; 2 to 512. More find more,
            and take 8 m bytes an item.
        ef_construction: items that are looked at where a new one is linked; more find more, and
            adding takes longer in proportion.
        ef_search: items that are looked at in a search, at least k; more find more, and a search
            takes longer in proportion.
        dtype: of the graph's own copy of vectors; bfloat16 takes half of the memory. Distances are
            always those of the float32 vectors.
        threads: of one call; 0: as many as there are cores. Results do not depend on it.
    """

    m: int = 16
    ef_construction: int = 128
    ef_search: int = 64
    dtype: Precision = "float32"
    threads: int = local_setting(1)


class HnswSearcher(FaissSearcher):
    """Search in a graph; settings are those of `HnswIndexConfig`.

    Without `m` or `dtype` it takes those of a saved graph, and otherwise their defaults.
    `ef_construction`, `ef_search` and `threads` may be changed between calls.
    """

    KIND: ClassVar[str] = "hnsw"
    MAGIC: ClassVar[bytes] = b"BBHN\x01"

    def __init__(
        self,
        *,
        m: int | None = None,
        ef_construction: int = HnswIndexConfig.ef_construction,
        ef_search: int = HnswIndexConfig.ef_search,
        dtype: str | None = None,
        threads: int = HnswIndexConfig.threads,
    ) -> None:
        super().__init__(threads)
        self._takes_m, self._takes_dtype = m is None, dtype is None
        self._m = m or HnswIndexConfig.m
        self._dtype = dtype or HnswIndexConfig.dtype
        self.ef_construction, self.ef_search = ef_construction, ef_search
        self._settings = self.faiss.SearchParametersHNSW(efSearch=ef_search)

    def begin(self, metric: str, dimensions: int) -> None:
        """Begin an empty graph."""
        super().begin(metric, dimensions)
        if self._dtype == "float32":
            made = self.faiss.IndexHNSWFlat(dimensions, self._m, self.library_metric)
        else:
            kind = self.faiss.ScalarQuantizer.QT_bf16
            made = self.faiss.IndexHNSWSQ(dimensions, kind, self._m, self.library_metric)
        made.hnsw.efConstruction = self.ef_construction
        self.index = made

    def add(self, first: int, vectors: Floats) -> None:
        """Link rows."""
        self.limit_threads()
        # Levels are drawn from the number of the first row, so that a graph that was saved and
        # loaded in between grows as one that was not.
        self.index.hnsw.rng = self.faiss.RandomGenerator(first)
        self.index.add(vectors)

    def is_exact_better(self, k: int, count: int, total: int) -> bool:
        """Return True for few rows."""
        return count * count <= _ROWS_PER_STEP * max(self.ef_search, k) * total

    def candidates(self, queries: Floats, k: int, count: int, mask: Mask | None) -> Ids:
        """Return rows of a search that looks at more of them where a filter passes over some."""
        looked_at = max(self.ef_search, k) * int(self.index.ntotal) // count
        settings = self._settings
        if mask is not None or settings.efSearch != looked_at:
            settings = self.faiss.SearchParametersHNSW(efSearch=looked_at, sel=self.selector(mask))
            if mask is None:  # making it takes a third of the time of a search
                self._settings = settings
        found: Ids = self.index.search(queries, k, params=settings)[1]
        return found

    def written(self) -> Any:
        """Return the graph; the vectors are the rows'."""
        writer = self.faiss.VectorIOWriter()
        self.faiss.write_index(self.index, writer, self.faiss.IO_FLAG_SKIP_STORAGE)
        return self.faiss.vector_to_array(writer.data)

    def read(self, data: Any, rows: Rows) -> Any:
        """Return a graph over the rows."""
        reader = self.faiss.VectorIOReader()
        self.faiss.copy_array_to_vector(data, reader.data)
        found = self.faiss.read_index(reader, self.faiss.IO_FLAG_SKIP_STORAGE)
        if found.ntotal != len(rows):
            raise ValueError(f"it is a graph of {found.ntotal} rows, not {len(rows)}")
        if self._takes_m:
            self._m = int(found.hnsw.nb_neighbors(1))
        if self._takes_dtype:
            is_flat = isinstance(found, self.faiss.IndexHNSWFlat)
            self._dtype = "float32" if is_flat else "bfloat16"
        self.begin(rows.metric, rows.dimensions)
        if type(found) is not type(self.index) or found.hnsw.nb_neighbors(1) != self._m:
            raise ValueError("it is a graph of other settings")
        storage = self.faiss.downcast_index(self.index.storage)
        storage.add(np.ascontiguousarray(rows.vectors))
        # The storage belongs to the graph from now on.
        found.storage, found.own_fields = storage, True
        self.index.own_fields = False
        found.hnsw.efConstruction = self.ef_construction
        return found

    def stats(self) -> dict[str, Any]:
        """Return settings, and the bytes of links and of the graph's vectors."""
        links = self.index.hnsw.neighbors.size() * 4 if self.index else 0
        size = 4 if self._dtype == "float32" else 2
        rows = int(self.index.ntotal) if self.index else 0
        return {
            "m": self._m,
            "ef_construction": self.ef_construction,
            "ef_search": self.ef_search,
            "dtype": self._dtype,
            "graph_bytes": links + size * rows * self.dimensions,
            **super().stats(),
        }


@register_component
class HnswIndex(VectorIndex):
    """Follows links from item to item towards the query: fast, and finds nearly all of the nearest.

    It needs no training. A removed item stays a way to others until the index is compacted. The
    same sequence of calls gives the same results on the same processor; needs `faiss-cpu`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.HnswIndex"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (FAISS,)
    Config: ClassVar[type] = HnswIndexConfig
    config: HnswIndexConfig

    def make_searcher(self) -> Searcher:
        """Return a searcher of these settings."""
        given = self.config
        self.require(2 <= given.m <= MAX_LINKS, f"m is {given.m}, not 2 to {MAX_LINKS}")
        for name in ("ef_construction", "ef_search"):
            value = getattr(given, name)
            self.require(
                1 <= value <= MAX_EXPANSION, f"{name} is {value}, not 1 to {MAX_EXPANSION}"
            )
        self.require(
            0 <= given.threads <= MAX_THREADS, f"threads is {given.threads}, not 0 to {MAX_THREADS}"
        )
        return HnswSearcher(
            m=given.m,
            ef_construction=given.ef_construction,
            ef_search=given.ef_search,
            dtype=given.dtype,
            threads=given.threads,
        )
