"""The program that `_retrieval_daemons` times: ShardedSearch, whose shards say what they took."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any, ClassVar

import numpy as np

from bbnode.components import FlatIndex, Index, OpContext, offload, register_component, values
from bbnode.components.indexes.base import VectorIndexConfig
from bbnode.programs import ShardedSearch

DIMENSIONS = 128


@dataclass(frozen=True, kw_only=True)
class TimedIndexConfig(VectorIndexConfig):
    """Settings of `TimedIndex`: how many random vectors it begins with."""

    items: int = 25_000


@register_component
class TimedIndex(FlatIndex):
    """A FlatIndex of random vectors; the metadata of its hits says what the search took."""

    TYPE_NAME: ClassVar[str] = "bench.TimedIndex"
    Config: ClassVar[type] = TimedIndexConfig

    def __init__(self, config: TimedIndexConfig) -> None:
        super().__init__(config)
        rng = np.random.default_rng(0)
        self.collection.add(rng.normal(size=(config.items, DIMENSIONS)).astype(np.float32))

    @offload(reads_only=True)
    def search(
        self, ctx: OpContext, query: Any, where: values.Metadata | None = None, *, k: int
    ) -> values.SearchResults:
        """Return what FlatIndex finds, with `took_ns` and `cpu_ns`."""
        begun, cpu = perf_counter_ns(), thread_time_ns()
        found = self.collection.search(query, k, where)
        took = values.Metadata(took_ns=perf_counter_ns() - begun, cpu_ns=thread_time_ns() - cpu)
        return values.SearchResults(found.ids, found.distances, [took] * len(found))


@dataclass(kw_only=True, eq=False)
class TimedSearch(ShardedSearch):
    """A search over shards that say how long their own searches took."""

    index: type[Index] = TimedIndex
