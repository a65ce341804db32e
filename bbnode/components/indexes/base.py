"""`VectorIndex`: the component over a `Collection`."""

from __future__ import annotations

import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Final

import numpy as np

from bbnode.components.contracts import ComponentError, Index, OpContext, offload
from bbnode.components.indexes.access import AccessConfig, AccessRules
from bbnode.components.indexes.collection import MAX_DIMENSIONS, Collection
from bbnode.components.indexes.errors import IndexMismatch, SearchRefused
from bbnode.components.indexes.exact import FlatSearcher
from bbnode.components.indexes.searchers import Mask, Metric, Searcher
from bbnode.components.indexes.summary import centroids_of
from bbnode.components.settings import host_setting, local_setting, path_setting
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TENSOR_FLOAT
from bbnode.ir.values import Metadata, MetadataVec, SearchResults, Value

# A saved state that begins so names a directory; no saved collection does.
_NAMES_DIRECTORY: Final = b"directory "
# Of a search that takes less than handing it to a thread does, 0.5 ms of a daemon's processor time.
_QUICK_ITEMS: Final = 1 << 12
_QUICK_NUMBERS: Final = 1 << 21
_MAX_CENTROIDS_KEPT: Final = 16  # for askers that may find different items


@dataclass(frozen=True, kw_only=True)
class VectorIndexConfig(AccessConfig):
    """Settings of every index: those of what other peers may search (`AccessConfig`), and these.

    Attributes:
        metric: "l2" (Euclidean distance), "ip" (minus the inner product) or "cosine" (1 - cosine);
            smaller is nearer.
        dimensions: of its vectors; 0: those of the first that are added or trained on.
        path: of a directory that holds the items (`bbnode index add`); "": they are in memory, and
            in the node's snapshots. A change of a directory is on disk before its op is done, and
            is not taken back with the node: an op that a crash cut short may be repeated, so give
            ids where an item must not be there twice.
        tell_centroids: other nodes may ask for the centres of what they may find of it, by which
            they choose whom to search; not where distances are rounded or noised. A centre of few
            items is close to their vectors.
        wipe_removed: write all files anew without removed and replaced items, each time before the
            op is done; otherwise that happens when there are as many as others are left. It takes
            as long as adding all items.
    """

    metric: Metric = "l2"
    dimensions: int = 0
    path: str = path_setting("")
    tell_centroids: bool = local_setting(True)
    wipe_removed: bool = host_setting(False)


def _is_quick(index: VectorIndex, query: Value, where: Metadata | None = None) -> bool:
    """Return True for one query among few items, all in memory and all to be found.

    Only of an exact search: one that keeps a state waits for who saves that.
    """
    held, config = index.in_memory, index.config
    return (
        held is not None
        and isinstance(held.searcher, FlatSearcher)
        and not (where or config.visible or config.visible_to)
        and np.ndim(query) == 1
        and len(held) <= _QUICK_ITEMS
        and len(held) * held.dimensions <= _QUICK_NUMBERS
    )


class VectorIndex(Index):
    """The contract over a `Collection`; a subclass says how it is searched.

    A search runs in a worker thread, if it is not among few items, as does what changes the index.
    Their errors are those of `Collection`.
    """

    Config: ClassVar[type] = VectorIndexConfig
    storage: ClassVar[Any] = {"*": TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(
            0 <= config.dimensions <= MAX_DIMENSIONS,
            f"dimensions is {config.dimensions}, not 0 to {MAX_DIMENSIONS}",
        )
        self._rules = AccessRules(config, self.require)
        self._searches = self._queries = self._refused = 0
        self._lock = threading.Lock()
        self._collection: Collection | None = None
        self._directory_id = ""  # that a snapshot names
        # Of a directory as well, which is opened with the first use: settings are refused now.
        searcher = self.make_searcher()
        if not config.path:
            self._collection = Collection(config.metric, config.dimensions, searcher)
        # By their number and a checksum of the items, until an item changes.
        self._centroids: dict[tuple[int, int], Value] = {}

    @abstractmethod
    def make_searcher(self) -> Searcher:
        """Return a new searcher with the settings of `config`."""

    @property
    def collection(self) -> Collection:
        """The items; a directory is opened with the first use.

        Raises what `Collection.open` does, and IndexMismatch when it is not the directory of the
        node's snapshot.
        """
        with self._lock:
            if self._collection is None:
                searcher, config = self.make_searcher(), self.config
                found = Collection.open(
                    config.path, metric=config.metric, dimensions=config.dimensions,
                    searcher=searcher,
                )  # fmt: skip
                if self._directory_id not in ("", found.directory_id):
                    found.close()
                    raise IndexMismatch(
                        f"{self.TYPE_NAME}: {config.path} is another index than the one of this "
                        "node's saved state; put that one back, or start without the state"
                    )
                self._collection, self._directory_id = found, found.directory_id
            return self._collection

    @property
    def in_memory(self) -> Collection | None:
        """The items, if they are in memory and not in a directory."""
        return None if self.config.path else self._collection

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Open the directory, when the host prepares its components; else the first use does."""
        _ = self.collection

    @offload
    def add(
        self,
        ctx: OpContext,
        vector: Value,
        metadata: MetadataVec | None = None,
        id: Value | None = None,
    ) -> Value:
        """Store vectors [D] or [N, D] and return their ids, int64 [] or [N]."""
        self._centroids = {}
        # An input of a program can't be left out: metadata of nothing are none.
        ids = self.collection.add(vector, metadata or None, id)
        self._wipe()
        return ids.reshape(()) if vector.ndim == 1 else ids

    @offload(reads_only=True, unless=_is_quick)
    def search(
        self, ctx: OpContext, query: Value, where: Metadata | None = None, *, k: int
    ) -> SearchResults:
        """Return the k nearest to a query [D], or to each of [Q, D], nearest first.

        Another peer finds what `config` lets it. Raises SearchRefused, besides what
        `Collection.search` does.
        """
        self._searches += 1
        queries = len(query) if query.ndim == 2 else 1
        self._queries += queries
        held, asker = self.collection, self._asker(ctx)
        if asker is None:
            return held.search(query, k, where)
        within = self._within(ctx, asker, queries, k, where)
        found = held.search(query, k, where, within=within)
        return self._rules.told(ctx, found, held.as_queries(query), held.metric)

    @offload
    def remove(self, ctx: OpContext, item: Value) -> None:
        """Remove the items with these ids, int64 [] or [N]; others are passed over."""
        self._centroids = {}
        self.collection.remove(item)
        self._wipe()

    def _wipe(self) -> None:
        """Leave nothing of removed and replaced items, if the settings say so."""
        if self.config.wipe_removed:
            self.collection.compact()

    @offload
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the index to examples [N, D]."""
        self.collection.train(training)

    @offload(reads_only=True)
    def centroids(self, ctx: OpContext, *, n: int) -> Value:
        """Return the centres of its items, float32 [C, 1 + D], with `n` at most.

        Another peer is told those of the items that it may find, which counts as a search of one
        query. Raises SearchRefused where the node's owner does not tell them, or not so exactly.
        """
        asker, config = self._asker(ctx), self.config
        within = None if asker is None else self._within(ctx, asker, 1, 1, None)
        exact = config.tell_centroids and not config.distance_noise
        if asker is not None and (not exact or config.round_distances is not None):
            raise SearchRefused("this index tells no centroids")
        held = self.collection
        ids = held.ids if within is None else held.ids_within(within)
        key = n, zlib.crc32(ids.tobytes())
        if key not in self._centroids:
            if len(self._centroids) >= _MAX_CENTROIDS_KEPT:
                self._centroids = {}
            self._centroids[key] = centroids_of(held, n, ids)
        return self._centroids[key]

    @staticmethod
    def _asker(ctx: OpContext) -> PeerId | None:
        """Return the other peer whose message this is about; None for this node's own program."""
        return None if ctx.source_peer == ctx.self_peer else ctx.source_peer

    def _within(
        self, ctx: OpContext, asker: PeerId, queries: int, k: int, where: Metadata | None
    ) -> Callable[[], Mask] | None:
        """Return what says which rows an asker may find; None: all.

        Raises SearchRefused, FilterRefused.
        """
        held, common = self.collection, self.config.visible or {}
        try:
            seen = self._rules.admit(ctx, asker, queries, k, where)
        except SearchRefused:
            self._refused += 1
            raise
        if not common and {} in seen:
            return None

        def within() -> Mask:
            any_of = reduce(np.logical_or, [held.matching(each) for each in seen])
            return np.logical_and(any_of, held.matching(common))

        return within

    def facts(self) -> dict[str, Any]:
        """Return what is shown of it; searches, queries and refused since the node started."""
        held = self._collection  # nothing is opened for it
        return {
            "items": 0 if held is None else len(held),
            "dimensions": self.config.dimensions if held is None else held.dimensions,
            "metric": self.config.metric,
            "kind": "" if held is None else held.searcher.KIND,
            "searches": self._searches,
            "queries": self._queries,
            "refused": self._refused,
        }

    def on_stop(self) -> None:
        """Close the directory, which another process, or this one, may open then."""
        with self._lock:
            if self.config.path and self._collection is not None:
                self._collection.close()

    def serialize(self) -> bytes:
        """Return all items; of a directory its id alone."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Capture the items; they are made bytes when they are asked for."""
        if self.config.path:
            named = _NAMES_DIRECTORY + self._directory_id.encode()
            return lambda: named
        return self.collection.freeze()

    def restore(self, data: bytes) -> None:
        """Take the items of a snapshot, or the id of the directory that they are in."""
        named = data.startswith(_NAMES_DIRECTORY)
        if not data:
            return
        self._centroids = {}
        if named != bool(self.config.path):
            where = "in a directory, and `path` is not set" if named else "in it, and `path` is set"
            raise ComponentError(
                f"{self.TYPE_NAME}: the saved state has its items {where}; set it as it was, or "
                "start without the state"
            )
        if not named:
            self.collection.restore(data)
            return
        with self.restoring():
            self._directory_id = data[len(_NAMES_DIRECTORY) :].decode("ascii")
