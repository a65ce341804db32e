"""Queries go to the shards whose items are near."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import values
from bbnode.dsl import BadArgument
from bbnode.programs import RoutedSearch
from bbnode.sim import LinkModel, S
from tests.programs.files import compiled
from tests.programs.retrieval.networks import Shards, nearest, vectors

SHARDS, CLUSTERS = 10, 20
ITEMS = vectors(2000, 0, clusters=CLUSTERS)
QUERIES = vectors(40, 1, clusters=CLUSTERS)
BEST = nearest(ITEMS, QUERIES, 10)


def by_cluster() -> list[np.ndarray]:
    """Places of the items of each shard: two clusters each."""
    centres = 6 * np.random.default_rng(7).normal(size=(CLUSTERS, ITEMS.shape[1]))
    of = np.linalg.norm(ITEMS[:, None] - centres[None], axis=2).argmin(axis=1)
    return [np.flatnonzero(of % SHARDS == shard) for shard in range(SHARDS)]


def routed(*, learn: bool = True, config: Any = None, **arguments: Any) -> Shards:
    shards = Shards(RoutedSearch(**{"centroids": 4, **arguments}), SHARDS, config=config)
    for node, places in zip(shards.nodes, by_cluster(), strict=True):
        shards.fill(node, ITEMS[places])
    if learn:
        shards.run("asker", "asker", refresh=values.TRIGGER)
    return shards


def recall(shards: Shards) -> tuple[float, float]:
    """The part of the true neighbours that is found, and how many shards had a hit."""
    places = by_cluster()
    found, asked = 0, 0
    for query, best in zip(QUERIES, BEST, strict=True):
        hits = shards.search(query)["results"].hits()
        mine = {int(places[shards.peers.index(hit.sender)][hit.id]) for hit in hits}
        found += len(mine & set(best.tolist()))
        asked += len({hit.sender for hit in hits})
    return found / BEST.size, asked / len(QUERIES)


@pytest.mark.parametrize(("ask", "least"), [(1, 0.95), (2, 0.99)])
def test_few_shards_have_nearly_all_that_is_near(ask: int, least: float) -> None:
    shards = routed(ask=ask, untold=0)
    found, asked = recall(shards)
    assert found >= least
    assert asked <= ask


def test_all_shards_find_all_and_none_is_asked_before_it_is_known() -> None:
    shards = routed(ask=SHARDS)
    assert recall(shards)[0] == 1.0
    blind = routed(learn=False, ask=1)
    assert recall(blind)[0] == 1.0  # nothing is known, so that all are asked


def test_what_is_told_is_asked_for_again_and_again() -> None:
    shards = routed(ask=1, untold=0, learn=False, refresh_s=20.0)
    selector = shards.asker.component("shards")
    assert selector.told == {}
    shards.net.run(until=shards.net.now_ns + 21 * S)
    assert set(selector.told) == set(shards.peers)
    assert all(rows.shape == (4, 9) for rows in selector.told.values())
    assert sum(rows[:, 0].sum() for rows in selector.told.values()) == len(ITEMS)
    far = np.full(8, 90, np.float32)
    shards.fill(shards.nodes[3], np.tile(far, (50, 1)))
    shards.net.run(until=shards.net.now_ns + 21 * S)
    hit = shards.search(far)["results"].hits()[0]
    assert (hit.sender, hit.distance) == (shards.peers[3], 0.0)


def test_a_batch_goes_to_the_union_of_what_its_queries_want() -> None:
    shards = routed(ask=1, untold=0)
    results = shards.search(QUERIES)["results"]
    places = by_cluster()
    right = 0
    for row, best in enumerate(BEST):
        hits = results.hits(row)
        right += len(
            {int(places[shards.peers.index(h.sender)][h.id]) for h in hits} & set(best.tolist())
        )
    assert right / BEST.size > 0.99
    few = routed(ask=1, untold=0, most=2).search(QUERIES)["results"]
    assert len(set(few.senders)) <= 2


def test_an_owner_who_does_not_tell_is_drawn_besides() -> None:
    shards = routed(ask=1, untold=1, learn=False)
    secret = shards.add(config={"tell_centroids": False})
    shards.fill(secret, QUERIES[:1])
    told = shards.run("asker", "asker", refresh=values.TRIGGER)["told"]
    assert set(told) == set(shards.peers[:-1])
    assert shards.search(QUERIES[0])["results"].hits()[0].sender == secret.peer_id
    assert secret.component("index").config.tell_centroids is False


def test_what_was_told_is_kept_by_a_restart_and_for_who_is_late() -> None:
    shards = routed(ask=1, untold=0)
    before = dict(shards.asker.component("shards").told)
    shards.asker.checkpoint()
    shards.net.crash(shards.asker)
    shards.net.restart(shards.asker)
    after = shards.asker.component("shards").told
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[peer], before[peer]) for peer in after)
    shards.net.set_link("shard-2", "asker", LinkModel(loss=1.0))
    told = shards.run("asker", "asker", refresh=values.TRIGGER)["told"]
    assert len(told) == SHARDS - 1
    assert len(shards.asker.component("shards").told) == SHARDS


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ask": 0}, "ask=0 has to be an integer of at least 1"),
        ({"centroids": 257}, "centroids=257 has to be at most 256"),
        ({"refresh_s": -1}, "refresh_s=-1 has to be a number of at least 0"),
        ({"metric": "hamming"}, "metric='hamming' has to be one of l2, ip, cosine"),
        ({"replicas": 2}, "replicas=2 has to be 0"),
        ({"selector": "bbnode.ConnectedView"}, "selector=.* has to be left out"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArgument, match=problem):
        compiled(RoutedSearch(**arguments))
