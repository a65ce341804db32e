"""`Collection`: vectors with ids and metadata, and their search; no node is needed for it.

Rule: an item is a row of the store, and one id names one item. A removed or replaced item leaves a
dead row, until there are as many as living ones: then the collection is rebuilt without them. All
methods may be called from any thread.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import restoring
from bbnode.components.indexes import directory, filters
from bbnode.components.indexes.errors import (
    IndexMismatch,
    IndexUnavailable,
    InvalidSearch,
    ItemRefused,
    VectorRefused,
    WrongDimensions,
)
from bbnode.components.indexes.exact import FlatSearcher
from bbnode.components.indexes.searchers import (
    METRICS,
    Floats,
    Ids,
    Mask,
    Rows,
    Searcher,
    searcher_of,
)
from bbnode.components.indexes.stores import MemoryStore, Store
from bbnode.ir.caps import MAX_LIST_ITEMS
from bbnode.ir.decoding import shown, unpack
from bbnode.ir.values import MAX_INT64, MetadataVec, Scalar, SearchResults

MAX_DIMENSIONS: Final = 1 << 16
# Squares of longer vectors, and their sums, do not fit into float32.
MAX_LENGTH: Final = 1e18
_MAGIC: Final = b"BBIX\x01"
_HEAD: Final = struct.Struct("<I")
_MAX_HEAD_BYTES: Final = 4096
_MIN_DEAD: Final = 256  # rows; below, rebuilding is not worth it
_FIRST_ROWS: Final = 64
_MOST_WAITED_S: Final = 1.0  # by a snapshot, for a search in another thread


class Collection:
    """Vectors float32 [N, D] with ids and metadata, searched by a `Searcher`.

    Attributes:
        metric: "l2" (Euclidean distance), "ip" (minus the inner product) or "cosine" (1 - cosine).
        path: of the directory that holds it; None in memory.
        searcher: finds the nearest; exact if none is given.
    """

    def __init__(
        self, metric: str = "l2", dimensions: int = 0, searcher: Searcher | None = None
    ) -> None:
        """Return an empty collection in memory.

        Args:
            metric: see above.
            dimensions: of its vectors; 0: those of the first that are added or trained on.
            searcher: for this collection alone.

        Raises IndexMismatch for another metric, or dimensions out of 0 to MAX_DIMENSIONS.
        """
        if metric not in METRICS:
            raise IndexMismatch(f"metric {shown(metric)}; there are {', '.join(METRICS)}")
        if not 0 <= dimensions <= MAX_DIMENSIONS:
            raise IndexMismatch(f"dimensions {dimensions}; they are 0 to {MAX_DIMENSIONS}")
        self.metric = metric
        self.path: Path | None = None
        self.searcher = searcher or FlatSearcher()
        self._wanted_dimensions = dimensions
        # Held in this order: while the searcher is used, and while rows are looked at or changed.
        self._use, self._lock = threading.RLock(), threading.RLock()
        self._version = 0  # of the items
        self._closed = False
        self._directory: directory.DirectoryLock | None = None
        self._manifest: dict[str, Any] = {}
        self._store: Store | None = None
        self._filters = filters.FilterTable()
        self._next_id = 0
        self._forget()
        if dimensions:
            self._begin(dimensions)

    @classmethod
    def in_memory(cls, *, kind: str = "flat", metric: str = "l2", dimensions: int = 0) -> Self:
        """Return an empty collection of a kind of searcher. Raises IndexMismatch."""
        return cls(metric or "l2", dimensions, searcher_of(kind or "flat"))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        kind: str = "",
        metric: str = "",
        dimensions: int = 0,
        searcher: Searcher | None = None,
        create: bool = True,
    ) -> Self:
        """Return the collection in a directory, which is locked until `close`.

        A change is on disk when its method returns, and whole or not at all after a crash. Vectors
        are mapped from their file, and metadata read when they are told.

        Args:
            path: of the directory.
            kind: of the searcher; "": that of the directory, or "flat" for a new one.
            metric, dimensions: "" and 0: those of the directory, or "l2" and those of the first
                vectors for a new one.
            searcher: in place of a new one of that kind.
            create: make a new one where there is none.

        Raises:
            IndexInUse: another process, or this one, has it open.
            IndexMismatch: it has another metric or dimension, a newer format, or is no index.
            IndexDamaged: its files do not hold what was written to them.
            IndexUnavailable: they can't be read or written.
        """
        where = Path(path)
        if not create and not where.is_dir():
            raise IndexMismatch(f"there is no index in {where}")
        directory.refuse_foreign(where)
        held = directory.DirectoryLock(where)
        try:
            found = directory.manifest_of(where, create=create)
            known = found or {}
            if metric and metric != known.get("metric", metric):
                raise IndexMismatch(
                    f"the index {where} has the metric {known['metric']}, not {shown(metric)}"
                )
            there = known.get("dimensions", 0)
            if dimensions and there and dimensions != there:
                raise IndexMismatch(
                    f"the index {where} holds vectors of {there} numbers, not {dimensions}"
                )
            searcher = searcher or searcher_of(kind or known.get("kind", "flat"))
            made = cls(metric or known.get("metric", "l2"), 0, searcher)
            made._wanted_dimensions = dimensions
            made._open(where, held, found)
        except BaseException:
            held.close()
            raise
        return made

    def _open(
        self, path: Path, held: directory.DirectoryLock, found: dict[str, Any] | None
    ) -> None:
        self.path, self._directory = path, held
        manifest = found or directory.new_manifest(self.metric, 0, self.searcher.KIND)
        if found is None or found["kind"] != self.searcher.KIND:
            manifest["kind"] = self.searcher.KIND
            directory.write_manifest(path, manifest)
        self._manifest, self._next_id = manifest, manifest["next_id"]
        if not manifest["dimensions"]:
            if self._wanted_dimensions:
                self._begin(self._wanted_dimensions)
            return
        store = directory.DirectoryStore(path, manifest)
        self._store, self._next_id = store, store.next_id
        self._adopt(store.ids, store.alive)
        store.open_searcher(self.searcher, self._rows())

    # -- what it holds ------------------------------------------------------------------------

    @property
    def dimensions(self) -> int:
        """The length of its vectors; 0 as long as nothing says it."""
        return self._rows().dimensions

    @property
    def directory_id(self) -> str:
        """The id that the directory was given when it was made; empty in memory."""
        return str(self._manifest.get("id", ""))

    def __len__(self) -> int:
        """Return the number of items."""
        return self._count - self._dead

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and 0 <= item <= MAX_INT64 and bool(self.has([item])[0])

    @property
    def ids(self) -> Ids:
        """The ids of all items, int64 [N], in the order of adding."""
        with self._lock:
            return self._ids[: self._count][self._alive[: self._count]]

    def has(self, ids: Any) -> Mask:
        """Return of each id if there is such an item, bool [N]."""
        with self._lock:
            return self._rows_of(_as_ids(ids)) >= 0

    def vectors_of(self, ids: Any) -> Floats:
        """Return vectors, float32 [N, D]; with "cosine" of length 1. ItemRefused for no item."""
        with self._lock:
            return self._rows().vectors[self._known_rows(ids)]

    def metadata_of(self, ids: Any) -> MetadataVec:
        """Return the metadata of items. ItemRefused for an id that no item has."""
        with self._lock:
            return self._metadata(self._known_rows(ids))

    def batches(self, count: int = 4096) -> Iterator[tuple[Ids, Floats]]:
        """Return ids and vectors of all items, up to `count` at a time."""
        rows = self._rows()
        for start in range(0, len(rows), count):
            part = np.flatnonzero(rows.alive[start : start + count]) + start
            if len(part):
                yield rows.ids[part], rows.vectors[part]

    # -- changes ------------------------------------------------------------------------------

    def add(
        self,
        vectors: Any,
        metadata: Sequence[Mapping[str, Scalar]] | None = None,
        ids: Any | None = None,
    ) -> Ids:
        """Keep vectors [N, D] (or one: [D]) and return their ids, int64 [N].

        Args:
            vectors: of numbers; kept as float32.
            metadata: of each vector, or of none.
            ids: of each vector, from 0, no two alike; the item that has one of them is replaced.
                None: they are numbered on.

        Raises WrongDimensions, VectorRefused, ItemRefused; then nothing is added.
        """
        with self._use, self._lock:
            held = self._vectors(vectors, "vectors")
            count = len(held)
            if metadata and len(metadata) != count:
                raise ItemRefused(f"metadata of {len(metadata)} items for {count} vectors")
            blobs = [filters.packed(m) for m in metadata] if metadata else [b""] * count
            if ids is None:
                numbers, next_id = self._numbered(count)
            else:
                numbers, next_id = _as_ids(ids), self._next_id
                if len(numbers) != count:
                    raise ItemRefused(f"{len(numbers)} ids for {count} vectors")
                if len(np.unique(numbers)) != count:
                    raise ItemRefused("one id is given to two vectors; give each its own")
            if not count:
                return numbers
            if self._store is None:
                self._begin(held.shape[1])
            assert self._store is not None
            self.searcher.check_add(count)
            self._store.append(numbers, held, blobs, next_id)
            self._next_id, self._version = next_id, self._version + 1
            first = self._note_rows(numbers)
            self.searcher.add(first, held)
            self._compact_if_due()
            if (
                isinstance(self._store, directory.DirectoryStore)
                and self._store.searcher_is_behind()
            ):
                self._store.save_searcher(self.searcher)
            return numbers

    def remove(self, ids: Any) -> int:
        """Remove items and return how many there were; an id that no item has is passed over."""
        with self._use, self._lock:
            numbers = np.unique(_as_ids(ids))
            rows = self._rows_of(numbers)
            if self._store is None or not (rows >= 0).any():
                return 0
            self._store.remove(numbers[rows >= 0])
            gone, self._version = rows[rows >= 0], self._version + 1
            self._kill(gone)
            self._compact_if_due()
            return len(gone)

    def train(self, vectors: Any) -> None:
        """Fit the searcher to examples [N, D]; an exact search needs none.

        Raises WrongDimensions, VectorRefused.
        """
        with self._use, self._lock:
            held = self._vectors(vectors, "training vectors")
            if not len(held):
                raise WrongDimensions("training vectors [0, D]; give some")
            if self._store is None:
                self._begin(held.shape[1])
            self._version += 1
            self.searcher.train(held)
            self.flush()

    # -- search -------------------------------------------------------------------------------

    def search(
        self,
        queries: Any,
        k: int = 10,
        where: Mapping[str, Scalar] | None = None,
        *,
        within: Callable[[], Mask] | None = None,
    ) -> SearchResults:
        """Return the k nearest items of one query [D], or of each of [Q, D], nearest first.

        Of equal distances the lesser id. Metadata of hits are told if any of them has some.

        Args:
            queries: of numbers.
            k: 1 or more; there are fewer hits where fewer items match.
            where: which items count (`bbnode.components.indexes.filters`).
            within: returns which rows count besides, as `matching` does; nothing else is told of.

        Raises WrongDimensions, VectorRefused, InvalidSearch, FilterRefused, NotTrained.
        """
        with self._use:
            if type(k) is not int or k < 1:
                raise InvalidSearch(f"k is {shown(k)}; ask for 1 or more neighbours")
            asked = self._vectors(queries, "queries")
            single = np.ndim(queries) == 1
            allowed = self.matching(where) if where else None
            if within is not None:
                seen = within()
                allowed = seen if allowed is None else allowed & seen
            count = len(self) if allowed is None else int(np.count_nonzero(allowed))
            if len(asked) * min(k, count) > MAX_LIST_ITEMS:
                raise InvalidSearch(
                    f"{len(asked)} queries for {k} neighbours each; a search finds up to "
                    f"{MAX_LIST_ITEMS} in all: ask in several batches"
                )
            rows = self._rows()
            if not len(asked) or not count:
                numbers = np.full((len(asked), 0), -1, np.int64)
                distances = np.zeros((len(asked), 0), np.float32)
            else:
                numbers, distances = self.searcher.search(asked, int(k), rows, allowed)
            return self._results(rows, numbers, distances, int(k), single)

    def as_queries(self, queries: Any) -> Floats:
        """Return queries as they are searched for: float32 [Q, D], with "cosine" of length 1.

        Raises WrongDimensions, VectorRefused.
        """
        return self._vectors(queries, "queries")

    def matching(self, where: Mapping[str, Scalar]) -> Mask:
        """Return which rows are items that match a filter, bool. Raises FilterRefused.

        It is good for `search` until the collection changes.
        """
        wanted = filters.conditions(where)
        with self._use:
            rows = self._rows()
            if self._store is None or not wanted:
                return rows.alive
            found = self._filters.mask(wanted, len(rows), self._store.metadata)
            return found & rows.alive if rows.dead else found

    def ids_matching(self, where: Mapping[str, Scalar]) -> Ids:
        """Return the ids of all items that match a filter, int64 [M]. Raises FilterRefused."""
        return self.ids_within(lambda: self.matching(where))

    def ids_within(self, within: Callable[[], Mask]) -> Ids:
        """Return the ids of the rows that `within` says, int64 [M]."""
        with self._use:
            return self._ids[: self._count][within()]

    def _results(
        self, rows: Rows, numbers: Ids, distances: Floats, k: int, single: bool
    ) -> SearchResults:
        is_hit = numbers >= 0
        ids = rows.ids[numbers] if len(rows) else numbers
        if not is_hit.all():
            ids = np.where(is_hit, ids, -1)
            distances = np.where(is_hit, distances, np.float32(np.inf))
        order = np.lexsort((ids, distances))[:, :k]  # distances of items are finite
        numbers, ids, distances = (_in_order(each, order) for each in (numbers, ids, distances))
        found = numbers[numbers >= 0]
        if len(found) < numbers.size:
            most = int(np.count_nonzero(numbers >= 0, axis=1).max(initial=0))
            ids, distances = ids[:, :most], distances[:, :most]
        blobs = self._blobs(found)
        told = map(filters.unpacked, blobs) if any(blobs) else ()
        return SearchResults(ids[0] if single else ids, distances[0] if single else distances, told)

    # -- state --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return items, dead rows, dimensions, metric, searcher, and sizes in bytes."""
        with self._lock:
            rows = self._rows()
            return {
                "items": len(self),
                "dead_rows": self._dead,
                "dimensions": rows.dimensions,
                "metric": self.metric,
                "searcher": self.searcher.KIND,
                "vector_bytes": rows.vectors.nbytes,
                **self.searcher.stats(),
                **({} if self._store is None else self._store.stats()),
            }

    def freeze(self) -> Callable[[], bytes]:
        """Capture the state; the returned function makes it bytes for `restore`.

        The searcher's state comes along if nothing has changed by then; it is built anew, else.
        """
        with self._lock:
            rows, next_id, version = self._rows(), self._next_id, self._version
            metadata = self._store.kept_metadata(len(rows)) if self._store else list

        def made() -> bytes:
            state = self._dumped(version)
            # Dead rows only where the searcher's state, which is made of rows, comes along.
            saved = np.arange(len(rows)) if state else np.flatnonzero(rows.alive)
            blobs = metadata()
            kept = [blobs[row] for row in saved.tolist()]
            lengths = np.array([len(blob) for blob in kept], "<u4")
            head = msgpack.packb(
                {
                    "metric": self.metric,
                    "dimensions": rows.dimensions,
                    "next_id": next_id,
                    "rows": len(saved),
                    "metadata_bytes": int(lengths.sum()),
                    "searcher": self.searcher.KIND,
                    "searcher_bytes": len(state),
                }
            )
            alive = rows.alive[saved]
            parts = [rows.ids[saved].astype("<i8").tobytes(), alive.tobytes(), lengths.tobytes()]
            parts += kept
            vectors = rows.vectors[saved].astype("<f4", copy=False).tobytes()
            return b"".join([_MAGIC, _HEAD.pack(len(head)), head, *parts, vectors, state])

        return made

    def _dumped(self, version: int) -> bytes:
        """Return the searcher's state, if it is of that version and can be had now; else none."""
        if type(self.searcher).dump is Searcher.dump:
            return b""
        if not self._use.acquire(timeout=_MOST_WAITED_S):
            return b""
        try:
            return self.searcher.dump() if version == self._version else b""
        finally:
            self._use.release()

    def serialize(self) -> bytes:
        """Return all items, and the searcher's state."""
        return self.freeze()()

    def restore(self, data: bytes) -> None:
        """Take what `serialize` returned, in place of all items.

        ComponentError for any other bytes; the items are as they were, then.
        """
        with restoring("Collection"):
            self._restore(memoryview(data))

    def _restore(self, view: memoryview) -> None:
        start = len(_MAGIC) + _HEAD.size
        if bytes(view[: len(_MAGIC)]) != _MAGIC or len(view) < start:
            raise ValueError("it is no saved index of this version")
        (size,) = _HEAD.unpack_from(view, len(_MAGIC))
        packed = view[start : start + size]
        head = unpack(packed, max_bytes=_MAX_HEAD_BYTES, max_values=64, max_depth=1)
        names = ("dimensions", "next_id", "rows", "metadata_bytes", "searcher_bytes")
        numbers = [head[name] for name in names]
        if not all(type(number) is int and 0 <= number <= MAX_INT64 + 1 for number in numbers):
            raise ValueError("a size in it is none")
        dimensions, next_id, count, metadata_bytes, state_bytes = numbers
        if head["metric"] != self.metric or dimensions > MAX_DIMENSIONS:
            raise ValueError(f"it has the metric {shown(head['metric'])}, not {self.metric}")
        if self._wanted_dimensions and dimensions != self._wanted_dimensions:
            raise ValueError(
                f"its vectors have {dimensions} numbers, not {self._wanted_dimensions}"
            )
        ends = [start + size]
        parts = (8 * count, count, 4 * count, metadata_bytes, 4 * count * dimensions, state_bytes)
        for part in parts:
            ends.append(ends[-1] + part)
        if ends[-1] != len(view) or (count and not dimensions):
            raise ValueError(f"it has {len(view)} bytes and says {ends[-1]}")
        ids = np.frombuffer(view[ends[0] : ends[1]], "<i8").astype(np.int64)
        marks = np.frombuffer(view[ends[1] : ends[2]], np.uint8)
        alive = marks == 1
        lengths = np.frombuffer(view[ends[2] : ends[3]], "<u4").astype(np.int64)
        twice = len(np.unique(ids[alive])) < np.count_nonzero(alive)
        if int(lengths.sum()) != metadata_bytes or twice or (ids < 0).any() or (marks > 1).any():
            raise ValueError("its ids or metadata are not those of its items")
        stops = np.cumsum(lengths) + ends[3]
        blobs = [bytes(view[b - n : b]) for b, n in zip(stops, lengths, strict=True)]
        filters.check_packed(blobs)
        vectors = np.frombuffer(view[ends[4] : ends[5]], "<f4").reshape(count, dimensions)
        if not np.isfinite(vectors).all():
            raise ValueError("a vector in it is not finite")
        with self._use, self._lock:
            self._forget()
            self._next_id = next_id
            if dimensions:
                self._begin(dimensions)
            if self._store is not None and count:
                self._store.append(ids, vectors.astype(np.float32), blobs, next_id)
                self._adopt(ids, alive)
            state = bytes(view[ends[5] : ends[6]])
            if state and head["searcher"] == self.searcher.KIND:
                self.searcher.load(state, self._rows())
            elif count:
                self.searcher.rebuild(self._rows())

    def flush(self) -> None:
        """Keep the searcher's state in the directory, so that opening need not build it anew.

        Items are there without it. Raises IndexUnavailable.
        """
        with self._use, self._lock:
            if isinstance(self._store, directory.DirectoryStore):
                self._store.save_searcher(self.searcher)

    def verify(self) -> None:
        """Read all files of the directory and compare checksums. Raises IndexDamaged."""
        with self._use, self._lock:
            if isinstance(self._store, directory.DirectoryStore):
                self._store.verify()

    def close(self) -> None:
        """Keep the searcher's state, and let go of files and locks: it can't be used any more."""
        with self._use, self._lock:
            if self._directory is None or self._closed:
                return
            self._closed = True
            try:
                self.flush()
            finally:
                if self._store is not None:
                    self._store.close()
                self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- rows ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._version += 1
        self._store = None
        self._filters.clear()
        self._count = self._dead = 0
        self._ids = np.zeros(_FIRST_ROWS, np.int64)
        self._alive = np.zeros(_FIRST_ROWS, np.bool_)
        self._ascending = True  # ids of rows; then no table of them is needed
        self._row_of: dict[int, int] | None = None

    def _begin(self, dimensions: int) -> None:
        self._store = self._new_store(dimensions)
        self.searcher.begin(self.metric, dimensions)

    def _new_store(self, dimensions: int) -> Store:
        if self.path is None:
            return MemoryStore(dimensions)
        if self._closed:
            raise IndexUnavailable(f"the index {self.path} is closed; open it again")
        manifest = {**self._manifest, "dimensions": dimensions}
        made = directory.DirectoryStore(self.path, manifest, create=True)
        directory.write_manifest(self.path, manifest)
        self._manifest = manifest
        return made

    def _adopt(self, ids: Ids, alive: Mask) -> None:
        """Take the rows of a store."""
        self._ids, self._alive = ids, alive
        self._count = len(ids)
        self._dead = int(len(ids) - np.count_nonzero(alive))
        self._ascending = bool((np.diff(ids) > 0).all())
        self._row_of = None

    def _rows(self) -> Rows:
        with self._lock:
            count = self._count
            vectors = np.zeros((0, 0), np.float32) if self._store is None else self._store.vectors()
            return Rows(self.metric, vectors, self._ids[:count], self._alive[:count], self._dead)

    def _note_rows(self, ids: Ids) -> int:
        """Number new rows; those that had one of these ids are dead now. Return the first."""
        first, total = self._count, self._count + len(ids)
        replaced = self._rows_of(ids)
        if (replaced >= 0).any():
            self._kill(replaced[replaced >= 0])
        if total > len(self._ids):
            room = max(total, len(self._ids) * 3 // 2)
            # New arrays: a search may hold the old ones.
            self._ids = np.concatenate([self._ids[:first], np.zeros(room - first, np.int64)])
            self._alive = np.concatenate([self._alive[:first], np.zeros(room - first, np.bool_)])
        self._ids[first:total] = ids
        self._alive[first:total] = True
        if self._ascending:
            last = self._ids[first - 1] if first else -1
            self._ascending = bool(ids[0] > last and (np.diff(ids) > 0).all())
        if self._row_of is not None:
            self._row_of.update(zip(ids.tolist(), range(first, total), strict=True))
        self._count = total
        return first

    def _kill(self, rows: Ids) -> None:
        alive = self._alive.copy()  # a search or a snapshot may hold the old one
        alive[rows] = False
        self._alive = alive
        self._dead += len(rows)
        if self._row_of is not None:
            for number in self._ids[rows].tolist():
                del self._row_of[number]
        self.searcher.remove(rows)

    def _rows_of(self, ids: Ids) -> Ids:
        """Return the rows of items; -1 where there is none."""
        known = self._ids[: self._count]
        if self._ascending:
            at = np.searchsorted(known, ids)
            inside = at < self._count
            at[~inside] = 0
            if not self._count:
                return np.full(len(ids), -1, np.int64)
            return np.where(inside & (known[at] == ids) & self._alive[at], at, -1)
        if self._row_of is None:
            living = np.flatnonzero(self._alive[: self._count])
            self._row_of = dict(zip(known[living].tolist(), living.tolist(), strict=True))
        table = self._row_of
        return np.array([table.get(number, -1) for number in ids.tolist()], np.int64)

    def _known_rows(self, ids: Any) -> Ids:
        numbers = _as_ids(ids)
        rows = self._rows_of(numbers)
        if (rows < 0).any():
            raise ItemRefused(f"no item has the id {numbers[rows < 0][0]}")
        return rows

    def _metadata(self, rows: Ids) -> MetadataVec:
        return MetadataVec(map(filters.unpacked, self._blobs(rows)))

    def _blobs(self, rows: Ids) -> Sequence[bytes]:
        return () if self._store is None else self._store.metadata_of(rows)

    def _numbered(self, count: int) -> tuple[Ids, int]:
        """Return the next ids that no item has, and the one after them."""
        found: list[Ids] = []
        start, left = self._next_id, count
        while left:
            if start + left > MAX_INT64 + 1:
                raise ItemRefused("there are no ids left to number on with; give `ids`")
            tried = np.arange(start, start + left, dtype=np.int64)
            free = tried[self._rows_of(tried) < 0]
            found.append(free)
            start, left = start + left, left - len(free)
        return np.concatenate(found or [np.zeros(0, np.int64)]), start

    def _compact_if_due(self) -> None:
        if self._dead >= max(_MIN_DEAD, len(self)):
            self.compact()

    def compact(self) -> None:
        """Rebuild without dead rows, in the order of ids."""
        with self._use, self._lock:
            if self._store is None or not self._dead:
                return
            living = np.flatnonzero(self._alive[: self._count])
            living = living[np.argsort(self._ids[living])]
            ids = self._ids[living]
            self._store.rewrite(living, ids)
            self._version += 1
            self._adopt(ids, np.ones(len(ids), np.bool_))
            self._filters.clear()
            self.searcher.rebuild(self._rows())
            self.flush()

    # -- values -------------------------------------------------------------------------------

    def _vectors(self, given: Any, what: str) -> Floats:
        """Return float32 [N, D], checked; with "cosine" of length 1."""
        try:
            found = np.asarray(given)
        except ValueError as error:
            raise WrongDimensions(f"{what} of different lengths; all have one") from error
        if found.dtype.kind not in "fiu" and found.size:
            raise VectorRefused(f"{what} of {found.dtype}; give numbers, float32 at best")
        if found.ndim not in (1, 2) or not found.shape[-1]:
            raise WrongDimensions(f"{what} {list(found.shape)}; give [D], or [N, D]")
        found = found if found.ndim == 2 else found[None]
        known = self.dimensions
        if known and found.shape[1] != known:
            raise WrongDimensions(
                f"{what} of {found.shape[1]} numbers; this index holds vectors of {known}"
            )
        if found.shape[1] > MAX_DIMENSIONS:
            raise WrongDimensions(f"{what} of {found.shape[1]} numbers; up to {MAX_DIMENSIONS}")
        if found.dtype == np.float32:
            held = np.ascontiguousarray(found)
        else:
            with np.errstate(over="ignore"):
                held = np.ascontiguousarray(found, np.float32)
        squares = np.einsum("ij,ij->i", held, held, dtype=np.float64)
        # NaN and infinity make a length that is not below anything.
        good = squares <= MAX_LENGTH**2
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            raise VectorRefused(
                f"{what}: number {at} holds NaN or infinity, or is longer than {MAX_LENGTH:g}"
            )
        if self.metric != "cosine":
            return held
        if not squares.all():
            at = int(np.flatnonzero(squares == 0)[0])
            raise VectorRefused(
                f"{what}: number {at} is zero, which has no direction for the metric 'cosine'"
            )
        return np.asarray(held / np.sqrt(squares)[:, None], np.float32)


def _in_order(table: npt.NDArray[Any], order: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Return each row of a table in its order."""
    found: npt.NDArray[Any]
    if len(order) == 1:  # by itself it is several times faster than by a table of indices
        found = table[0, order[0]][None]
    else:
        found = table[np.arange(len(order))[:, None], order]
    return found


def _as_ids(given: Any) -> npt.NDArray[np.int64]:
    """Return int64 [N] of one id or several. Raises ItemRefused."""
    found = np.atleast_1d(np.asarray(given))
    if not found.size:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ItemRefused(f"ids {found.dtype} {list(found.shape)}; give integers [N]")
    if found.min() < 0 or found.max() > MAX_INT64:
        raise ItemRefused("an id is from 0 to 2**63 - 1")
    return found.astype(np.int64)
