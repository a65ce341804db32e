"""Who may search what: the owner's settings against peers that try to get around them."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ComponentError,
    FilterRefused,
    FlatIndex,
    InvalidComponentConfig,
    InvalidSearch,
    SearchRefused,
    VectorIndexConfig,
)
from bbnode.components.registry import ConfigTypeMismatch, build_config, encode_config
from bbnode.components.settings import LocalSettingRefused
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, MetadataVec, SearchResults
from bbnode.programs import ShardedSearch
from bbnode.sim import S
from tests.components.fakes import PEERS, Context
from tests.programs.retrieval.networks import Shards

ITEMS = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
TOLD = MetadataVec(
    [Metadata(n=i, public=i % 2 == 0, salary=1000 + i, group="ab"[i % 3 > 0]) for i in range(200)]
)
QUERY = np.float32([0.1, 0.2, 0.3, 0.4])


@dataclasses.dataclass
class Asked(Context):
    """A search that another peer asked for."""

    source_peer: PeerId | None = PEERS[3]
    source_classes: tuple[str, ...] = ("asker",)
    slot: str = "index"
    key: bytes = b"of this node"

    def sign(self, body: bytes) -> bytes:
        return hashlib.sha512(self.key + body).digest()


ASKED = Asked()
OWN = Context()


def index(**settings: Any) -> FlatIndex:
    made = FlatIndex(VectorIndexConfig(**settings))
    made.add(OWN, ITEMS, TOLD)
    return made


def ids(found: SearchResults) -> list[int]:
    return found.ids.tolist()


def test_nothing_is_restricted_where_the_owner_says_nothing() -> None:
    made = index()
    assert made.search(ASKED, QUERY, k=7) == made.search(OWN, QUERY, k=7)


def test_what_is_not_visible_has_no_part_in_an_answer() -> None:
    made = index(visible={"public": True})
    seen = FlatIndex(VectorIndexConfig())
    even = np.arange(0, 200, 2)
    seen.add(OWN, ITEMS[even], MetadataVec([TOLD[i] for i in even]), even)
    for where in (None, Metadata(group="a"), Metadata({"n >": 50}), Metadata(public=False)):
        for k in (1, 10, 500):
            assert made.search(ASKED, QUERY, where, k=k) == seen.search(OWN, QUERY, where, k=k)
    # Nor does what is refused tell how many there are: 100 are seen, of 200.
    batch = np.repeat(QUERY[None], 400, 0)
    assert len(made.search(ASKED, batch, k=1000)) == 400 * 100
    with pytest.raises(InvalidSearch):
        index().search(OWN, batch, k=1000)
    # The node's own program sees everything, and so does a search that the node asks itself for.
    assert len(made.search(OWN, QUERY, k=500)) == 200
    own = dataclasses.replace(ASKED, source_peer=ASKED.self_peer)
    assert len(made.search(own, QUERY, k=500)) == 200


def test_filters_go_by_peer_then_by_class_then_for_everyone_else() -> None:
    made = index(
        visible_to={
            str(PEERS[1]): {"n <": 10},
            str(PEERS[2]): "none",
            "auditor": {},
            "asker": {"n <": 100},
            "guest": {"n >=": 190},
            "banned": "none",
            "*": {"n": 7},
        }
    )

    def seen(peer: PeerId, *classes: str) -> int:
        asked = dataclasses.replace(ASKED, source_peer=peer, source_classes=classes)
        return len(made.search(asked, QUERY, k=500))

    assert seen(PEERS[1], "auditor") == 10
    assert seen(PEERS[3], "asker") == 100
    assert seen(PEERS[3], "asker", "guest") == 110
    assert seen(PEERS[3], "asker", "auditor") == 200
    assert seen(PEERS[3], "asker", "banned") == 100
    assert seen(PEERS[3]) == 1
    for peer, classes in ((PEERS[2], ("auditor",)), (PEERS[3], ("banned",))):
        with pytest.raises(SearchRefused, match="tells you nothing"):
            seen(peer, *classes)
    assert made.facts()["refused"] == 2


def test_whom_no_entry_names_is_told_nothing() -> None:
    made = index(visible_to={"auditor": {}})
    with pytest.raises(SearchRefused):
        made.search(ASKED, QUERY, k=1)


def test_visible_counts_for_those_with_a_filter_of_their_own_too() -> None:
    made = index(visible={"public": True}, visible_to={"asker": {"n <": 10}})
    assert sorted(ids(made.search(ASKED, QUERY, k=500))) == [0, 2, 4, 6, 8]


def test_hidden_entries_are_not_told_and_not_filtered_by() -> None:
    made = index(hidden_metadata=("salary", "group"))
    found = made.search(ASKED, QUERY, k=3)
    assert [set(each) for each in found.metadata] == [{"n", "public"}] * 3
    assert set(made.search(OWN, QUERY, k=1).metadata[0]) == {"n", "public", "salary", "group"}
    for where in (
        {"salary >": 1100},
        {"salary": 0},
        {"salary in": "[]"},
        {"group !=": "a", "n": 1},
    ):
        with pytest.raises(SearchRefused, match="is not filtered by") as told:
            made.search(ASKED, QUERY, Metadata(where), k=3)
        assert "11" not in str(told.value)
    # An entry that no item has is refused in the same words: a hidden name is not confirmed.
    with pytest.raises(FilterRefused):
        made.search(ASKED, QUERY, Metadata({"salary ~": 1}), k=3)
    everything = index(hidden_metadata=("salary", "group", "n", "public"))
    assert everything.search(ASKED, QUERY, k=3).metadata == ()


def test_k_and_batches_have_their_bounds() -> None:
    made = index(max_k=5, max_queries=3)
    made.search(ASKED, ITEMS[:3], k=5)
    with pytest.raises(SearchRefused, match="6 neighbours; this index tells 5"):
        made.search(ASKED, QUERY, k=6)
    with pytest.raises(SearchRefused, match="4 queries; this index takes 3"):
        made.search(ASKED, ITEMS[:4], k=5)
    made.search(OWN, ITEMS[:4], k=6)


def test_each_peer_has_its_rate_which_comes_back_with_time() -> None:
    made = index(searches_per_min=6, queries_per_min=20)

    def ask(at_s: float, peer: PeerId = PEERS[3], queries: int = 1) -> bool:
        asked = dataclasses.replace(ASKED, source_peer=peer, now_ns=int(at_s * 1e9))
        try:
            made.search(asked, ITEMS[:queries], k=1)
        except SearchRefused:
            return False
        return True

    assert [ask(0) for _ in range(8)] == [True] * 6 + [False] * 2
    assert ask(0, PEERS[4])
    assert not ask(9.9)
    assert ask(10.1)
    assert not ask(10.1)
    assert not ask(0)  # a clock that goes back gives nothing
    assert [ask(1000) for _ in range(7)] == [True] * 6 + [False]  # what is saved up has its bound
    # A batch counts each of its queries.
    assert ask(2000, queries=15)
    assert not ask(2000, queries=6)
    assert ask(2000, queries=5)
    assert not ask(3000, queries=21)
    assert made.facts()["refused"] > 0
    made.search(OWN, ITEMS[:100], k=1)


def test_a_refused_search_does_not_count_and_asking_on_does_not_lock_out() -> None:
    made = index(searches_per_min=60, max_k=5)
    for _ in range(100):
        with pytest.raises(SearchRefused, match="neighbours"):
            made.search(ASKED, QUERY, k=6)
    made.search(ASKED, QUERY, k=5)


def test_what_is_kept_of_peers_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("bbnode.components.indexes.access.MAX_BOOK_PEERS", 10)
    made = index(searches_per_min=1)
    for number in range(50):
        made.search(dataclasses.replace(ASKED, source_peer=PeerId.from_seed(number)), QUERY, k=1)
    assert len(made._rules._buckets) == 10
    with pytest.raises(SearchRefused):
        made.search(dataclasses.replace(ASKED, source_peer=PeerId.from_seed(49)), QUERY, k=1)


def test_distances_are_rounded_and_still_nearest_first() -> None:
    made = index(round_distances=1)
    found = made.search(ASKED, ITEMS[:5], k=50)
    exact = index().search(OWN, ITEMS[:5], k=50)
    assert np.allclose(found.distances, np.round(exact.distances.astype(float), 1))
    for row in range(5):
        pairs = list(zip(found.distances[row].tolist(), found.ids[row].tolist(), strict=True))
        assert pairs == sorted(pairs)  # of equal distances the lesser id: no order is left to read
        told = {hit.id: hit.metadata for hit in found.hits(row)}
        assert all(metadata["n"] == number for number, metadata in told.items())
    assert made.search(OWN, QUERY, k=5) == index().search(OWN, QUERY, k=5)
    coarse = index(round_distances=-1).search(ASKED, QUERY, k=5)
    assert coarse.distances.tolist() == [0] * 5


def noisy_by_id(made: FlatIndex, query: Any, asked: Context = ASKED) -> dict[int, float]:
    return {hit.id: hit.distance for hit in made.search(asked, np.float32(query), k=200).hits()}


def test_noise_has_the_deviation_that_is_set_and_no_mean() -> None:
    made = index(distance_noise=0.01, metric="ip")
    exact = noisy_by_id(index(metric="ip"), QUERY)
    found = made.search(ASKED, QUERY, k=200)
    assert (np.diff(found.distances) >= 0).all()
    off = [told - exact[number] for number, told in noisy_by_id(made, QUERY).items()]
    assert statistics.stdev(off) == pytest.approx(0.01, rel=0.15)
    assert abs(statistics.mean(off)) < 0.003


def test_noise_is_the_same_however_often_and_by_whomever_it_is_asked() -> None:
    made, again = index(distance_noise=0.05), index(distance_noise=0.05)
    first = made.search(ASKED, QUERY, k=20)
    for asked in (ASKED, dataclasses.replace(ASKED, source_peer=PEERS[5], now_ns=10**12)):
        assert made.search(asked, QUERY, k=20) == first
        assert again.search(asked, QUERY, k=20) == first  # another life of the node
    batch = made.search(ASKED, np.stack([QUERY, QUERY]), k=20)
    assert batch.distances.tolist() == [first.distances.tolist()] * 2
    other = noisy_by_id(made, QUERY, dataclasses.replace(ASKED, key=b"x"))
    assert other == noisy_by_id(made, QUERY)  # the secret is read once
    fresh = noisy_by_id(index(distance_noise=0.05), QUERY, dataclasses.replace(ASKED, key=b"x"))
    assert fresh != other
    # With "cosine" a longer query is the same question.
    cosine = index(distance_noise=0.05, metric="cosine")
    np.testing.assert_array_equal(
        cosine.search(ASKED, QUERY, k=9).distances, cosine.search(ASKED, 4 * QUERY, k=9).distances
    )


def test_queries_that_differ_a_little_do_not_average_the_noise_out() -> None:
    made, exact = index(distance_noise=0.1, metric="ip"), noisy_by_id(index(metric="ip"), QUERY)
    tries = [
        noisy_by_id(made, QUERY + np.float32(1e-6) * np.random.default_rng(i).standard_normal(4))
        for i in range(60)
    ]
    left = [
        statistics.mean(found[number] for found in tries) - true for number, true in exact.items()
    ]
    # Half of the variance is the item's own: 0.1 / sqrt(2) stays, where 0.1 / sqrt(60) would.
    assert statistics.stdev(left) == pytest.approx(0.1 / 2**0.5, rel=0.2)


def test_no_distance_tells_by_being_impossible_that_it_is_noise() -> None:
    assert min(noisy_by_id(index(distance_noise=3.0), QUERY).values()) == 0
    found = noisy_by_id(index(distance_noise=3.0, metric="cosine"), QUERY).values()
    assert (min(found), max(found)) == (0, 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"searches_per_min": -1.0}, "searches_per_min is -1"),
        ({"queries_per_min": float("nan")}, "queries_per_min is nan"),
        ({"searches_per_min": 0.5}, "or from 1"),
        ({"distance_noise": float("inf")}, "distance_noise is inf"),
        ({"max_k": -1}, "max_k is -1"),
        ({"round_distances": 12}, "round_distances is 12"),
        ({"visible": {"a ~": 1}}, "no operator"),
        ({"visible_to": {"asker": {"a <": True}}}, "orders by a bool"),
        ({"visible_to": {str(PEERS[0])[:-1] + "!": {}}}, "no PeerId; copy it whole"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, told) -> None:
    with pytest.raises(InvalidComponentConfig, match=told):
        FlatIndex(VectorIndexConfig(**settings))


def test_centroids_are_those_of_what_the_asker_may_find() -> None:
    made = index(visible_to={"asker": {"n <": 10}, "auditor": {}}, searches_per_min=3)
    told = made.centroids(ASKED, n=4)
    seen = FlatIndex(VectorIndexConfig())
    seen.add(OWN, ITEMS[:10])
    np.testing.assert_array_equal(told, seen.centroids(OWN, n=4))
    assert told[:, 0].sum() == 10
    auditor = dataclasses.replace(ASKED, source_peer=PEERS[4], source_classes=("auditor",))
    assert made.centroids(auditor, n=4)[:, 0].sum() == 200
    assert made.centroids(OWN, n=4)[:, 0].sum() == 200
    made.centroids(ASKED, n=4)
    made.centroids(ASKED, n=4)
    with pytest.raises(SearchRefused, match="per minute"):
        made.centroids(ASKED, n=4)
    with pytest.raises(SearchRefused, match="tells you nothing"):
        made.centroids(dataclasses.replace(ASKED, source_classes=()), n=4)


@pytest.mark.parametrize(
    "settings", [{"tell_centroids": False}, {"distance_noise": 0.1}, {"round_distances": 2}]
)
def test_centroids_are_not_told_where_distances_are_not_exact(settings) -> None:
    made = index(**settings)
    with pytest.raises(SearchRefused, match="tells no centroids"):
        made.centroids(ASKED, n=4)
    assert len(made.centroids(OWN, n=4)) == 4


# --- in a network ----------------------------------------------------------------------------


def network(count: int = 1, **config: Any) -> Shards:
    made = Shards(ShardedSearch(k=4, filtered=True), count, config=config)
    for node in made.nodes:
        made.fill(node, np.pad(ITEMS, ((0, 0), (0, 4))), TOLD)
    return made


def ask(shards: Shards, where: Metadata | None = None, node: Any = None) -> dict[str, Any]:
    query = np.pad(QUERY, (0, 4))
    return shards.run(node or shards.asker, "asker", query=query, where=where or Metadata())


def test_a_peer_is_told_what_its_class_may_see_and_another_what_it_may_itself() -> None:
    other = PeerId.from_seed("x")
    shards = network(visible_to={"asker": {"public": True}, str(other): {"n": 5}})
    found = ask(shards, Metadata({"public ==": False}))
    assert (len(found["results"]), found["missing"]) == (0, ())
    assert all(hit.metadata["public"] for hit in ask(shards)["results"].hits())


def test_a_peer_that_is_told_nothing_sees_the_shard_missing_and_the_shard_says_why() -> None:
    shards = network()
    closed = shards.add(config={"visible_to": {"auditor": {}}})
    shards.fill(closed, np.ones((3, 8), np.float32))
    found = ask(shards)
    assert found["missing"] == (closed.peer_id,)
    assert {hit.sender for hit in found["results"].hits()} == {shards.peers[0]}
    (failure,) = closed.failures()
    assert "this index tells you nothing" in str(failure)


def test_a_filter_by_a_hidden_entry_is_refused_across_the_network() -> None:
    shards = network(hidden_metadata=["salary"])
    assert all("salary" not in hit.metadata for hit in ask(shards)["results"].hits())
    ask(shards, Metadata({"salary >": 1100}))
    assert "is not filtered by 'salary'" in str(shards.nodes[0].failures()[-1])


def test_a_rate_holds_by_the_clock_of_the_node() -> None:
    shards = network(searches_per_min=3)
    answered = [len(ask(shards).get("missing", (1,))) == 0 for _ in range(5)]
    assert answered == [True] * 3 + [False] * 2
    shards.net.run(until=shards.net.now_ns + 61 * S)
    assert len(ask(shards)["missing"]) == 0


def test_a_program_cannot_bring_settings_of_access() -> None:
    with pytest.raises(LocalSettingRefused, match="max_k"):
        build_config(FlatIndex, "index", encode_config(VectorIndexConfig(max_k=3)), {})
    given = {"visible_to": {"asker": {"a": True, "b": 1}, "x": "none"}, "hidden_metadata": ["c"]}
    taken = build_config(FlatIndex, "index", encode_config(VectorIndexConfig()), given)
    assert taken.visible_to == given["visible_to"]
    assert taken.visible_to["asker"]["a"] is True
    with pytest.raises(ConfigTypeMismatch, match="visible_to"):
        build_config(FlatIndex, "index", b"", {"visible_to": {"asker": "everything"}})
    assert issubclass(SearchRefused, ComponentError)
