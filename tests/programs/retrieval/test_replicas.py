"""Items of an asker's, each on several shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import ComponentError, ItemPlacement, ItemPlacementConfig, values
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.placement.rendezvous import keepers
from bbnode.ir.peer import PeerId
from bbnode.programs import ShardedSearch
from bbnode.sim import LinkModel
from tests.components.fakes import Context
from tests.programs.retrieval.networks import NO_METADATA, Shards, nearest, vectors

ITEMS = vectors(120, 0)
QUERIES = vectors(4, 1)
IDS = np.arange(120) * 1000 + 7
PEERS = values.PeerIdVec(sorted(PeerId.from_seed(i) for i in range(10)))


def placed(count: int = 5, replicas: int = 2, **arguments: Any) -> Shards:
    program = ShardedSearch(k=5, replicas=replicas, **{"deadline_s": 1.0, **arguments})
    shards = Shards(program, count)
    told = values.MetadataVec([values.Metadata(n=n) for n in range(len(ITEMS))])
    added = shards.run("asker", "asker", vectors=ITEMS, metadata=told, ids=IDS)
    assert added["added"].tolist() == IDS.tolist()
    assert added["not_added"] == ()
    return shards


def held(shards: Shards) -> list[int]:
    return [len(node.component("index").collection) for node in shards.nodes if node.is_up]


def finds_all(shards: Shards) -> None:
    results = shards.search(QUERIES)["results"]
    np.testing.assert_array_equal(results.ids, IDS[nearest(ITEMS, QUERIES, 5)])
    assert [hit.metadata["n"] for hit in results.hits(1)] == ((results.ids[1] - 7) // 1000).tolist()


def test_an_item_is_on_two_shards_and_is_found_once() -> None:
    shards = placed()
    assert sum(held(shards)) == 240
    assert min(held(shards)) > 20
    finds_all(shards)


@pytest.mark.parametrize("gone", range(5))
def test_a_shard_that_dies_loses_nothing(gone: int) -> None:
    shards = placed()
    shards.net.crash(shards.nodes[gone])
    finds_all(shards)


def test_an_item_that_comes_again_replaces_the_old_one_everywhere() -> None:
    shards = placed()
    again = -ITEMS[:3]
    shards.run("asker", "asker", vectors=again, metadata=NO_METADATA, ids=IDS[:3])
    assert sum(held(shards)) == 240
    for vector, number in zip(again, IDS, strict=False):
        hit = shards.search(vector)["results"].hits()[0]
        assert (hit.id, hit.distance, hit.metadata) == (number, 0.0, values.Metadata())
    one = shards.run("asker", "asker", vectors=ITEMS[0], metadata=NO_METADATA, ids=IDS[0])
    assert one["added"] == IDS[0]
    assert shards.search(ITEMS[0])["results"].hits()[0].distance == 0.0


def test_what_is_removed_is_gone_from_all_and_who_did_not_hear_it_is_named() -> None:
    shards = placed()
    shards.net.set_link("asker", "shard-2", LinkModel(loss=1.0))
    gone = shards.run("asker", "asker", remove=IDS[:60])
    assert gone["removed"].tolist() == IDS[:60].tolist()
    assert gone["not_removed"] == (shards.peers[2],)
    assert sum(held(shards)) > 120
    shards.net.set_link("asker", "shard-2", LinkModel())
    assert shards.run("asker", "asker", remove=IDS[:60])["not_removed"] == ()
    assert sum(held(shards)) == 120
    assert set(shards.search(QUERIES)["results"].ids.ravel()) <= set(IDS[60:])


def test_a_restarted_shard_has_its_items() -> None:
    shards = placed()
    before = held(shards)
    for node in shards.nodes:
        node.checkpoint()
        shards.net.crash(node)
        shards.net.restart(node)
    assert held(shards) == before
    finds_all(shards)


@pytest.mark.parametrize(
    ("ids", "told", "problem"),
    [
        (np.arange(2), NO_METADATA, r"vectors \[3, 8\] with ids \[2\]"),
        (np.array([1, 1, 2]), NO_METADATA, "stands twice"),
        (np.array([-1, 1, 2]), NO_METADATA, "is negative"),
        (np.arange(3), values.MetadataVec([values.Metadata()]), "3 items with metadata of 1"),
    ],
)
def test_items_that_do_not_belong_together_are_refused(ids, told, problem) -> None:
    shards = Shards(ShardedSearch(replicas=1), 2)
    assert shards.run("asker", "asker", vectors=ITEMS[:3], metadata=told, ids=ids) == {}
    (failure,) = shards.asker.failures()
    assert failure.kind == "ComponentError"
    with pytest.raises(ComponentError, match=problem):
        ItemPlacement(ItemPlacementConfig()).placed(Context(), PEERS, ITEMS[:3], told, ids)


@given(st.integers(1, 10), st.integers(1, 12), st.lists(st.integers(0, 2**63 - 1), unique=True))
def test_who_goes_or_comes_moves_its_own_share_alone(count: int, replicas: int, ids: list) -> None:
    numbers, peers = np.array(ids, np.int64), PEERS[:count]
    kept = keepers(peers, numbers, replicas)
    assert kept.shape == (count, len(ids))
    assert (kept.sum(0) == min(count, replicas)).all()
    fewer = keepers(peers[1:], numbers, replicas)
    assert (fewer | ~kept[1:]).all()  # who had it keeps it


def test_shares_are_about_equal_and_settings_are_checked() -> None:
    share = keepers(PEERS, np.arange(4000), 3).mean(1)
    assert share.min() > 0.27
    assert share.max() < 0.33
    for wrong in (0, 65):
        with pytest.raises(InvalidComponentConfig, match="replicas"):
            ItemPlacement(ItemPlacementConfig(replicas=wrong))
    with pytest.raises(ComponentError, match="none of those that keep"):
        ItemPlacement(ItemPlacementConfig()).keep(
            Context(self_peer=PEERS[9]), PEERS[:2], ITEMS, NO_METADATA, IDS
        )
