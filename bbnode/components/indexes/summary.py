"""The centres of what an index holds, by which others choose whom to search.

Rule: they are a function of the items alone, and tell nothing else of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.clusters import clustered
from bbnode.components.errors import ComponentError
from bbnode.components.indexes.collection import Collection
from bbnode.components.indexes.searchers import Ids

MAX_CENTROIDS: Final = 256
# Of a larger index every so many-th item counts: centres are hardly more exact with more.
_SAMPLE: Final = 8192


def centroids_of(held: Collection, n: int, ids: Ids | None = None) -> npt.NDArray[np.float32]:
    """Return up to `n` centres of items, each after the number of its items, [C, 1 + D].

    `ids` are those of the items; None: all.

    k-means over all of them, or over an even sample of 8,192. Raises ComponentError for an n that
    is not 1 to 256.
    """
    if not 1 <= n <= MAX_CENTROIDS:
        raise ComponentError(f"{n} centroids of an index; it tells 1 to {MAX_CENTROIDS}")
    ids = held.ids if ids is None else ids
    if not len(ids):
        return np.zeros((0, 1 + held.dimensions), np.float32)
    step = -(-len(ids) // _SAMPLE)
    points: Any = held.vectors_of(np.sort(ids)[::step]).astype(np.float64)
    centres, nearest = clustered(points, np.ones(len(points)), min(n, len(points)), seed=0)
    counts = np.bincount(nearest, minlength=len(centres)) * (len(ids) / len(points))
    rows = np.column_stack([np.round(counts), centres])[counts > 0]
    made: npt.NDArray[np.float32] = rows.astype(np.float32)
    made.flags.writeable = False
    return made
