"""One bad shard spoils no search: not by what it answers, and not by being silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.components import (
    PENDING,
    CentroidSelector,
    CentroidSelectorConfig,
    ComponentError,
    concrete,
    register_component,
    values,
)
from bbnode.components.errors import UnsupportedSelection
from bbnode.components.indexes.flat import FlatIndex
from bbnode.ir.peer import PeerId
from bbnode.ir.values import ResponseBatch
from bbnode.programs import RoutedSearch, ShardedSearch
from bbnode.sim import S, SimNode, steps
from tests.components.fakes import Context, Peers
from tests.programs.files import compiled
from tests.programs.retrieval.networks import NO_METADATA, D, Shards, nearest, vectors

ITEMS = vectors(60, 0)
QUERIES = vectors(3, 1)
K = 4
LIE: list[Callable[[np.ndarray], Any]] = []  # what the lying index answers to a query


@register_component
class LyingIndex(FlatIndex):
    TYPE_NAME: ClassVar[str] = "test.LyingIndex"

    def search(self, ctx: Any, query: Any, where: Any = None, *, k: int) -> Any:
        return LIE[-1](query)

    def centroids(self, ctx: Any, *, n: int) -> Any:
        return LIE[-1](np.zeros(D, np.float32))


def beside_a_liar(lie: Callable[[np.ndarray], Any], **arguments: Any) -> tuple[Shards, SimNode]:
    """Two honest shards with all items, and one that answers as it likes."""
    LIE[:] = [lie]
    shards = Shards(ShardedSearch(k=K, deadline_s=2.0, **arguments), 2)
    for place, node in enumerate(shards.nodes):
        shards.fill(node, ITEMS[place::2])
    liar = compiled(ShardedSearch(k=K, deadline_s=2.0, index=LyingIndex, **arguments))
    return shards, shards.add(artifact=liar)


def rows(query: np.ndarray, far: float, *, width: int = K, queries: int | None = None) -> Any:
    """Hits for each query, all at one distance."""
    leading = query.shape[:-1] if queries is None else (queries,)
    ids = np.broadcast_to(np.arange(width), (*leading, width))
    return values.SearchResults(ids, np.full(ids.shape, far))


LIES: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "NaN": (lambda q: rows(q, np.nan), "NaN"),
    "minus infinity": (lambda q: rows(q, -np.inf), "minus infinity"),
    "answers for more queries": (lambda q: rows(q, 0.0, queries=7), "search results"),
    "no queries": (lambda q: rows(q, 0.0, queries=0), "search results"),
    "too many hits": (lambda q: rows(q, 0.0, width=K + 1), "asked were 4"),
    # A batch of these is more than an envelope takes, so that it does not even come.
    "a hundred thousand hits": (lambda q: rows(q, 0.0, width=100_000), ""),
    "one id again and again": (
        lambda q: values.SearchResults(
            np.ones((*q.shape[:-1], K), int), np.zeros((*q.shape[:-1], K))
        ),
        "twice",
    ),
    "not nearest first": (
        lambda q: values.SearchResults(
            np.broadcast_to([1, 2], (*q.shape[:-1], 2)),
            np.broadcast_to([2.0, 1.0], (*q.shape[:-1], 2)),
        ),
        "nearest first",
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("query", [QUERIES, QUERIES[0]], ids=["batch", "one"])
def test_an_answer_that_can_not_be_true_is_left_out_and_named(lie: str, query: Any) -> None:
    made, reason = LIES[lie]
    shards, liar = beside_a_liar(made)
    found = shards.search(query)
    results = found["results"]
    assert found["missing"] == (liar.peer_id,)
    assert set(results.senders) == set(shards.peers[:2])
    best = nearest(ITEMS, np.atleast_2d(query), K)
    for row in range(results.queries):
        places = [2 * h.id + shards.peers.index(h.sender) for h in results.hits(row)]
        assert places == best[row].tolist()
    assert not reason or any(reason in why for why in refusals(shards, liar))


def refusals(shards: Shards, of: SimNode) -> list[str]:
    told = [step.attributes for step in shards.asker.seen(steps.Telemetry)]
    return [s["reason"] for s in told if "reason" in s and s.get("peer") == of.peer_id]


def test_empty_answers_and_infinite_distances_are_no_lies() -> None:
    for honest in (lambda q: rows(q, np.inf), lambda q: rows(q, 0.0, width=0)):
        shards, _ = beside_a_liar(honest)
        found = shards.search(QUERIES)
        assert found["missing"] == ()
        assert found["results"].ids.shape == (3, K)
        assert set(found["results"].senders) == set(shards.peers[:2])


def test_who_calls_all_its_items_near_has_no_more_than_its_share() -> None:
    spoilt, liar = beside_a_liar(lambda q: rows(q, 0.0))
    assert set(spoilt.search(QUERIES[0])["results"].senders) == {liar.peer_id}
    shards, liar = beside_a_liar(lambda q: rows(q, 0.0), share=1, ask=0)
    by = [hit.sender for hit in shards.search(QUERIES[0])["results"].hits()]
    assert by.count(liar.peer_id) == 1
    assert len(by) == 3


def test_a_shard_that_never_answers_costs_the_deadline_and_no_more() -> None:
    def silent(query: np.ndarray) -> Any:
        return PENDING

    shards, liar = beside_a_liar(silent)
    begun = shards.net.now_ns
    found = shards.search(QUERIES)
    assert found["missing"] == (liar.peer_id,)
    assert len(found["results"]) == 3 * K
    assert shards.net.now_ns - begun < 2.1 * S


def test_a_shard_that_breaks_is_named_at_once() -> None:
    def broken(query: np.ndarray) -> Any:
        raise ComponentError("out of order")

    shards, liar = beside_a_liar(broken)
    begun = shards.net.now_ns
    assert shards.search(QUERIES)["missing"] == (liar.peer_id,)
    assert shards.net.now_ns - begun < S


def test_large_metadata_of_a_liar_stop_nobody() -> None:
    def heavy(query: np.ndarray) -> Any:
        told = [values.Metadata(text="x" * 1_000_000)] * K
        return values.SearchResults(np.arange(K), np.full(K, 50.0), told)

    shards, _ = beside_a_liar(heavy)
    results = shards.search(QUERIES[0])["results"]
    assert set(results.senders) == set(shards.peers[:2])
    assert results.metadata == () or all(not each for each in results.metadata)


def test_where_two_of_three_agree_one_liar_changes_nothing() -> None:
    """It claims other items' ids, at distance 0 and with metadata of its own."""

    def claims(query: np.ndarray) -> Any:
        told = [values.Metadata(mine=True)] * K
        return values.SearchResults(np.arange(K), np.zeros(K), told)

    LIE[:] = [claims]
    program = {"k": K, "replicas": 3, "agree": 2, "deadline_s": 2.0}
    shards = Shards(ShardedSearch(**program), 4)
    liar = shards.add(artifact=compiled(ShardedSearch(**program, index=LyingIndex)))
    shards.run("asker", "asker", vectors=ITEMS, metadata=NO_METADATA, ids=np.arange(len(ITEMS)))
    for query in QUERIES:
        results = shards.search(query)["results"]
        assert results.ids.tolist() == nearest(ITEMS, query[None], K)[0].tolist()
        away = np.linalg.norm(ITEMS[results.ids] - query, axis=1)
        np.testing.assert_allclose(results.distances, away, rtol=1e-5)
        assert liar.peer_id not in results.senders
        assert not any(results.metadata)
    LIE[:] = [lambda query: rows(query, 0.0, width=0)]  # it denies them
    for query in QUERIES:
        found = shards.search(query)["results"].ids.tolist()
        assert found == nearest(ITEMS, query[None], K)[0].tolist()


# -- centroids ------------------------------------------------------------------------------------


def everywhere(count: int) -> np.ndarray:
    draws = np.random.default_rng(5).normal(size=(count, D)).astype(np.float32)
    return np.column_stack([np.ones(count, np.float32), draws])


def test_a_shard_that_is_everywhere_is_named_and_asked_as_one_that_tells_nothing() -> None:
    LIE[:] = [lambda _: everywhere(1000)]
    shards = Shards(RoutedSearch(k=K, ask=1, untold=0, centroids=8, refresh_s=0), 3)
    for place, node in enumerate(shards.nodes):
        shards.fill(node, ITEMS[place::3])
    liar = shards.add(artifact=compiled(RoutedSearch(k=K, index=LyingIndex, refresh_s=0)))
    shards.run("asker", "asker", refresh=values.TRIGGER)
    assert set(shards.asker.component("shards").told) == set(shards.peers[:3])
    assert refusals(shards, liar) == ["1000 centroids of 8; up to 8 count"]
    for query in QUERIES:
        assert liar.peer_id not in shards.search(query)["results"].senders


A, B, C = (PeerId.from_seed(i) for i in range(3))


@pytest.mark.parametrize(
    "answer",
    [
        everywhere(5),
        np.full((2, 3), np.nan, np.float32),
        np.full((2, 3), np.inf, np.float32),
        np.full((2, 3), -1, np.float32),
        np.zeros((2, 0), np.float32),
        np.zeros((2, 1 << 17), np.float32),
        np.zeros(4, np.float32),
        np.zeros((2, 3), np.float64),
        values.Metadata(),
        b"no",
    ],
)
def test_centroids_that_are_none_are_refused_and_forgotten(answer: Any) -> None:
    selector = CentroidSelector(CentroidSelectorConfig(max_centroids=4))
    good = np.array([[3, 0, 1]], np.float32)
    selector.observed(Context(), ResponseBatch(responses=((A, good), (B, good))))
    ctx = Context()
    selector.observed(ctx, ResponseBatch(responses=((B, answer),)))
    assert set(ctx.refused) == {B}
    assert set(selector.told) == {A}


def test_the_selector_says_what_it_can_not_do() -> None:
    selector = CentroidSelector(CentroidSelectorConfig(untold=0))
    ctx = Context(peer_class="shard", peers=Peers({"shard": [A, B, C]}))
    query = np.zeros(2, np.float32)
    assert len(selector.select(ctx, query, mode="near_key", n=1)) == 3  # nothing is known
    told = [np.array([[1, x, 0]], np.float32) for x in (0, 5)]
    selector.observed(ctx, ResponseBatch(responses=((A, told[0]), (B, told[1]))))
    assert selector.select(ctx, query, mode="near_key", n=1) == (A,)
    assert selector.select(ctx, np.zeros((0, 2), np.float32), mode="near_key", n=1) == ()
    assert len(selector.select(ctx, np.zeros(3, np.float32), mode="near_key", n=1)) == 3
    for key in (None, b"key", np.zeros((1, 2, 2), np.float32), np.zeros(2, np.int64)):
        with pytest.raises(UnsupportedSelection, match="query of floats"):
            selector.select(ctx, key, mode="near_key", n=1)
    with pytest.raises(UnsupportedSelection, match="1 or more"):
        selector.select(ctx, query, mode="near_key", n=0)
    for wrong in (b"x", b"\x82\xa5draws\x00\xa4told\x91\x93\xc4\x01a\x03\xc4\x00"):
        with pytest.raises(ComponentError):
            CentroidSelector(CentroidSelectorConfig()).restore(wrong)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_the_nearest_centre_is_that_of_the_metric(metric: str) -> None:
    selector = CentroidSelector(CentroidSelectorConfig(metric=metric, untold=0))
    ctx = Context(peer_class="shard", peers=Peers({"shard": [A, B, C]}))
    centres = {A: [10.0, 0.0], B: [1.0, 0.2], C: [0.0, 3.0]}
    told = tuple((p, np.array([[1, *centres[p]]], np.float32)) for p in sorted(centres))
    selector.observed(ctx, ResponseBatch(responses=told))
    (found,) = selector.select(ctx, np.array([1, 0.25], np.float32), mode="near_key", n=1)
    assert found == {"l2": B, "ip": A, "cosine": B}[metric]


def test_centroids_of_an_index_add_up_and_are_bounded() -> None:
    index = FlatIndex(FlatIndex.Config())
    assert index.centroids(Context(), n=4).shape == (0, 1)
    index.add(Context(), ITEMS)
    made = index.centroids(Context(), n=5)
    assert made.shape == (5, 1 + D)
    assert made[:, 0].sum() == len(ITEMS)
    np.testing.assert_allclose(made[:, :1].T @ made[:, 1:] / 60, ITEMS.mean(0)[None], atol=1e-5)
    assert index.centroids(Context(), n=256).shape[0] <= 60
    for wrong in (0, 257):
        with pytest.raises(ComponentError, match="1 to 256"):
            index.centroids(Context(), n=wrong)
    ctx = Context(source_peer=A)
    quiet = FlatIndex(FlatIndex.Config(tell_centroids=False))
    with pytest.raises(ComponentError, match="tells no centroids"):
        quiet.centroids(ctx, n=4)
    assert np.array_equal(index.centroids(ctx, n=4), index.centroids(ctx, n=4))
    assert concrete(FlatIndex).role == "Index"
