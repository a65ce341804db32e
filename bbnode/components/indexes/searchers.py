"""The seam between what an index holds and how it is searched.

Rule: a `Collection` keeps vectors in rows, numbered from 0 in the order of adding; a row never
changes, and a removed one is not used again until the collection is rebuilt. A `Searcher` finds
rows; it knows nothing of ids, metadata, files or peers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from bbnode.components.indexes.errors import IndexMismatch
from bbnode.ir.decoding import shown

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

# "l2": Euclidean distance. "ip": minus the inner product. "cosine": 1 - cosine of the angle.
Metric = Literal["l2", "ip", "cosine"]
METRICS: Final[tuple[str, ...]] = get_args(Metric)

# Of each kind of searcher its module and class, which is made without arguments.
SEARCHERS: Final[Mapping[str, str]] = {
    "flat": "bbnode.components.indexes.exact:FlatSearcher",
    "hnsw": "bbnode.components.indexes.hnsw:HnswSearcher",
    "ivf_pq": "bbnode.components.indexes.ivf_pq:IvfPqSearcher",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a collection at one moment; none of these arrays is changed later.

    Attributes:
        metric: one of METRICS. With "cosine" the vectors, and the queries of a search, have length
            1, so that the distance is 1 - their inner product.
        vectors: float32 [N, D], C order; they may be mapped from a file.
        ids: int64 [N], of the items.
        alive: bool [N]; False where the item was removed or replaced.
        dead: the number of rows that are not alive.
    """

    metric: str
    vectors: Floats
    ids: Ids
    alive: Mask
    dead: int

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        """Return the number of rows, dead ones included."""
        return len(self.ids)


class Searcher(ABC):
    """Finds the nearest rows. One collection owns it, and never calls two methods at once.

    Attributes:
        KIND: names the searcher in a directory; another kind there is built anew.
    """

    KIND: ClassVar[str]

    @abstractmethod
    def begin(self, metric: str, dimensions: int) -> None:
        """Forget all rows and all training, and expect rows of this metric and length from 0."""

    @abstractmethod
    def add(self, first: int, vectors: Floats) -> None:
        """Take rows first, first + 1, …: float32 [N, D]. Rows come in order and without a gap."""

    @abstractmethod
    def remove(self, rows: Ids) -> None:
        """Forget these rows, or note that they are dead in every `Rows` from now on.

        After a saved state was loaded, rows may be told that were removed before.
        """

    @abstractmethod
    def search(
        self, queries: Floats, k: int, rows: Rows, allowed: Mask | None
    ) -> tuple[Ids, Floats]:
        """Return (rows, distances), each [Q, at least k where so many are there].

        Args:
            queries: float32 [Q, D], C order; finite.
            k: 1 or more.
            rows: all rows.
            allowed: bool [N]; rows that may be found, none of them dead. None: all that are alive.

        A row of -1 fills the end of a line. The collection orders each line by (distance, id) and
        cuts it at k: who returns all rows that are as near as the k-th has ties by the lesser id.
        """

    def check_add(self, count: int) -> None:  # noqa: B027 - most take rows at any time
        """Raise NotTrained, before anything is kept, where `add` can't take rows now."""

    def train(self, vectors: Floats) -> None:  # noqa: B027 - an exact search has nothing to fit
        """Fit the searcher to examples [N, D], which are no rows; by default nothing is fitted.

        Rows that were added before stay in it.
        """

    def rebuild(self, rows: Rows) -> None:
        """Begin anew with all rows: after a compaction, or where no saved state is usable."""
        self.begin(rows.metric, rows.dimensions)
        if len(rows):
            self.add(0, rows.vectors)
            if rows.dead:
                self.remove(np.flatnonzero(~rows.alive))

    def dump(self) -> bytes:
        """Return the state, training and rows; empty: `rebuild` makes it again.

        It is called as of all rows that were added.
        """
        return b""

    def load(self, data: bytes, rows: Rows) -> None:
        """Take what `dump` returned; `rows` are those of that moment. ValueError for other bytes.

        It is never called with empty bytes; `rebuild` is, then.
        """
        raise ValueError(f"a searcher of the kind {self.KIND} has no saved state")

    def save(self, path: Path) -> bool:
        """Write the state to a new file of the directory; False: there is nothing to write."""
        data = self.dump()
        if data:
            path.write_bytes(data)
        return bool(data)

    def open(self, path: Path, rows: Rows) -> None:
        """Take what `save` wrote, mapped if it can be. ValueError or OSError for any other file."""
        self.load(path.read_bytes(), rows)

    def stamp(self) -> int:
        """Return a number that changes when the state does for another reason than `add`, `remove`.

        A directory saves the state again when it is closed, then.
        """
        return 0

    def stats(self) -> dict[str, Any]:
        """Return what is to be told of it: settings and sizes."""
        return {}


def searcher_of(kind: str) -> Searcher:
    """Return a new searcher of a kind, with its default settings. Raises IndexMismatch."""
    if kind not in SEARCHERS:
        raise IndexMismatch(f"there is no index of the kind {shown(kind)}; {', '.join(SEARCHERS)}")
    module, _, name = SEARCHERS[kind].partition(":")
    made: Searcher = getattr(import_module(module), name)()
    return made


def exact_distances(metric: str, vectors: Floats, query: Floats) -> npt.NDArray[np.float64]:
    """Return the distances of one query [D] to vectors [N, D], in float64.

    Each depends on its own vector alone, not on the others or on their number, so that an item has
    the same distance to the last bit in every index that holds it.
    """
    wide, asked = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        wide -= asked
        found: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
        return found
    inner: npt.NDArray[np.float64] = np.einsum("ij,j->i", wide, asked)
    return np.clip(1 - inner, 0, 2) if metric == "cosine" else -inner
