"""Shards with approximate indexes, which their owners set, find nearly what exact ones do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import HnswIndex, IvfPqIndex
from bbnode.programs import ShardedSearch
from tests.programs.retrieval.networks import Shards, nearest, vectors

pytest.importorskip("faiss")

ITEMS, QUERIES, K, COUNT = vectors(6000, 0, clusters=40), vectors(30, 1, clusters=40), 10, 2


@pytest.mark.parametrize(
    ("index", "config"),
    [
        (HnswIndex, {"ef_search": 20, "m": 12, "threads": 2}),
        (IvfPqIndex, {"lists": 32, "probes": 4, "train_from": 2000}),
    ],
)
def test_two_shards_find_what_all_items_would_give(index: Any, config: dict[str, Any]) -> None:
    shards = Shards(ShardedSearch(k=K, index=index), COUNT, config=config)
    for place, node in enumerate(shards.nodes):
        assert shards.fill(node, ITEMS[place::COUNT]).shape == (len(ITEMS) // COUNT,)
    found = shards.search(QUERIES)
    assert found["missing"] == ()
    best = nearest(ITEMS, QUERIES, K)
    right = 0
    for row in range(len(QUERIES)):
        hits = found["results"].hits(row)
        places = [COUNT * hit.id + shards.peers.index(hit.sender) for hit in hits]
        right += len(np.intersect1d(places, best[row]))
    assert right >= 0.95 * best.size
