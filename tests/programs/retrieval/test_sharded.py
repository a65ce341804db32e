"""A search over many shards finds what one index of all items would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import values
from bbnode.dsl import BadArgument, BadName
from bbnode.examples.custom_index import BruteForceIndex
from bbnode.programs import ShardedSearch
from bbnode.sim import LinkModel, S
from tests.programs.files import compiled
from tests.programs.retrieval.networks import NO_METADATA, Shards, distances, nearest, vectors

ITEMS = vectors(90, 0)
QUERIES = vectors(5, 1)


def spread(count: int = 3, **arguments: Any) -> Shards:
    made = Shards(ShardedSearch(**{"k": 4, **arguments}), count)
    for place, node in enumerate(made.nodes):
        made.fill(node, ITEMS[place::count])
    return made


def test_the_nearest_of_all_shards_are_found_with_who_has_them() -> None:
    shards = spread()
    found = shards.search(QUERIES)
    results = found["results"]
    assert found["missing"] == ()
    assert results.ids.shape == (5, 4)
    best = nearest(ITEMS, QUERIES, 4)
    for row in range(5):
        hits = results.hits(row)
        places = [3 * hit.id + shards.peers.index(hit.sender) for hit in hits]
        assert places == best[row].tolist()
        away = np.linalg.norm(ITEMS[places] - QUERIES[row], axis=1)
        np.testing.assert_allclose(distances(results, row), away, rtol=1e-5)
    one = shards.search(QUERIES[0])["results"]
    assert one.ids.shape == (4,)
    assert one.hits() == results.hits(0)


@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_the_metric_is_that_of_the_program(metric: str) -> None:
    shards = spread(2, metric=metric)
    hit = shards.search(QUERIES[0])["results"].hits()[0]
    products = ITEMS @ QUERIES[0]
    if metric == "cosine":
        products /= np.linalg.norm(ITEMS, axis=1) * np.linalg.norm(QUERIES[0])
    assert 2 * hit.id + shards.peers.index(hit.sender) == products.argmax()


def test_what_is_removed_is_found_no_more_and_metadata_comes_along() -> None:
    shards = Shards(ShardedSearch(k=2, filtered=True), 2)
    said = [values.MetadataVec([values.Metadata(n=n, even=n % 2 == 0) for n in range(3)])] * 2
    for node, told in zip(shards.nodes, said, strict=True):
        shards.fill(node, np.eye(3, dtype=np.float32), told)
    query = np.array([1, 0, 0], np.float32)
    every = shards.search(query, where=values.Metadata())["results"]
    assert [hit.metadata["n"] for hit in every.hits()] == [0, 0]
    even = shards.search(query, where=values.Metadata({"n >=": 1, "even": True}))["results"]
    assert [hit.metadata["n"] for hit in even.hits()] == [2, 2]
    removed = shards.run(shards.nodes[0], "shard", remove=np.array([0, 2, 77]))["removed"]
    assert removed.tolist() == [0, 2, 77]
    left = shards.search(query, where=values.Metadata({"even": True}))["results"]
    assert [(hit.sender, hit.id) for hit in left.hits()] == [
        (shards.peers[1], 0), (shards.peers[1], 2),
    ]  # fmt: skip


def test_a_node_is_asker_and_shard() -> None:
    shards = spread(2)
    both = shards.net.add("both", shards.artifact, ["asker", "shard"])
    shards.run(both, "shard", vectors=QUERIES[0], metadata=NO_METADATA)
    mine = shards.run(both, "asker", query=QUERIES[0])["results"].hits()[0]
    assert (mine.sender, mine.id) == (both.peer_id, 0)
    assert shards.search(QUERIES[0])["results"].hits()[0].sender == both.peer_id


def test_only_some_shards_are_asked() -> None:
    shards = spread(6, ask=2)
    asked = [{hit.sender for hit in shards.search(QUERIES[0])["results"].hits()} for _ in range(8)]
    assert all(len(each) <= 2 for each in asked)
    assert len(set().union(*asked)) > 2  # others each time


def test_an_index_without_items_and_a_shard_that_is_gone() -> None:
    shards = spread()
    shards.net.crash(shards.nodes[1])
    found = shards.search(QUERIES[0])
    assert {hit.sender for hit in found["results"].hits()} <= {shards.peers[0], shards.peers[2]}
    nothing = Shards(ShardedSearch(), 2).search(QUERIES)
    assert nothing["results"].ids.shape == (5, 0)
    assert nothing["missing"] == ()


def test_who_does_not_answer_is_named_and_too_few_answers_are_a_failure() -> None:
    shards = spread(deadline_s=2.0, quorum=2)
    shards.net.set_link("shard-1", "asker", LinkModel(loss=1.0))
    begun = shards.net.now_ns
    found = shards.search(QUERIES[0])
    assert found["missing"] == (shards.peers[1],)
    assert len(found["results"]) == 4
    assert 2 * S <= shards.net.now_ns - begun < 3 * S
    shards.net.set_link("shard-2", "asker", LinkModel(loss=1.0))
    assert shards.search(QUERIES[0]) == {}
    (failure,) = shards.asker.failures()
    assert failure.kind == "QuorumNotReached"


def test_without_any_shard_a_search_fails_and_says_why() -> None:
    shards = Shards(ShardedSearch(), 0)
    assert shards.search(QUERIES[0]) == {}
    (failure,) = shards.asker.failures()
    assert "search: 0 of 0 peers can be asked and 1 have to answer" in failure.detail


def test_a_query_of_another_width_is_refused_by_all() -> None:
    shards = spread()
    assert shards.search(QUERIES[0, :3]) == {}
    (failure,) = shards.asker.failures()
    assert "3" in failure.detail


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"k": 0}, "k=0 has to be an integer of at least 1"),
        ({"index": "bbnode.FedAvg"}, "index=.* has to be an Index"),
        ({"index": 3}, "index=3 has to be an Index"),
        ({"metric": "hamming"}, "metric='hamming' has to be one of l2, ip, cosine"),
        ({"index": BruteForceIndex, "metric": "ip"}, "metric='ip' has to be left out"),
        ({"filtered": 1}, "filtered=1 has to be True or False"),
        ({"quorum": 3, "ask": 2}, "quorum=3 has to be an integer between 0"),
        ({"deadline_s": 0}, "deadline_s=0 has to be a number above 0"),
        ({"selector": "bbnode.FlatIndex"}, "selector=.* has to be a PeerSelector"),
        ({"shard": "asker"}, "shard='asker' has to be another class"),
        ({"replicas": 2, "agree": 3}, "agree=3 has to be an integer from 1 to replicas=2"),
        ({"replicas": 2, "agree": 2, "ask": 3}, "agree=2 has to be 1 where"),
        ({"replicas": 2, "numbered": True}, "numbered=True has to be left out"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArgument, match=problem):
        compiled(ShardedSearch(**arguments))


def test_classes_have_the_names_that_are_given() -> None:
    with pytest.raises(BadName, match="'no class' is not a valid peer class"):
        compiled(ShardedSearch(asker="no class"))
    artifact = compiled(ShardedSearch(asker="reader", shard="library"))
    names = {f.name.partition("#")[0]: list(f.input) for f in artifact.functions}
    assert names["reader"] == ["query"]
    assert names["library"] == ["vectors", "metadata", "remove", "training"]
