"""Collections in memory: exact results, items that come and go, saved states, bad input."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bbnode.components import (
    Collection,
    ComponentError,
    FilterRefused,
    IndexMismatch,
    InvalidSearch,
    ItemRefused,
    VectorRefused,
    WrongDimensions,
)
from bbnode.components.indexes.exact import FlatSearcher
from bbnode.ir.values import MAX_INT64, Metadata
from tests.patience import PATIENCE_S


def oracle(metric, vectors, query, alive, k):
    """The rows of the k nearest by plain float64, and their distances."""
    x, q = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        far = np.sqrt(((x - q) ** 2).sum(1))
    elif metric == "ip":
        far = -(x * q).sum(1)
    else:
        far = 1 - (x @ q) / np.linalg.norm(x, axis=1) / np.linalg.norm(q)
    far = far.astype(np.float32)
    order = [row for row in np.lexsort((np.arange(len(x)), far)) if alive[row]][:k]
    return order, far[order]


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(("n", "d", "k"), [(1, 3, 5), (300, 7, 10), (5000, 16, 10), (5000, 4, 300)])
def test_results_are_those_of_a_plain_loop(metric, n, d, k) -> None:
    rng = np.random.default_rng(n + k)
    vectors = (rng.standard_normal((n, d)) + 3).astype(np.float32)
    vectors[n // 2 :] = vectors[: n - n // 2]  # ties
    queries = (rng.standard_normal((3, d)) + 3).astype(np.float32)
    held = Collection(metric)
    assert held.add(vectors, [{"kind": i % 5} for i in range(n)]).tolist() == list(range(n))
    alive = np.ones(n, np.bool_)
    for where, kept in ((None, alive), ({"kind": 1}, np.arange(n) % 5 == 1)):
        for _ in range(2):
            found = held.search(queries, k, where)
            for at, query in enumerate(queries):
                rows, far = oracle(metric, vectors, query, alive & kept, k)
                ids = found.ids[at][found.ids[at] >= 0]
                np.testing.assert_allclose(found.distances[at][: len(ids)], far, atol=2e-7)
                if metric != "cosine":  # the direction is rounded when it is kept
                    assert ids.tolist() == rows
                    one = held.search(query, k, where)
                    assert one.ids.tolist() == rows
                    assert one.distances.tobytes() == found.distances[at][: len(rows)].tobytes()
            held.remove(np.flatnonzero(alive & (np.arange(n) % 7 == 0)))
            alive[np.arange(n) % 7 == 0] = False
        held.compact()


def test_vectors_far_from_zero_and_one_that_is_huge_change_nothing() -> None:
    rng = np.random.default_rng(5)
    vectors = (rng.standard_normal((4000, 8)) + 3000).astype(np.float32)
    vectors[17] = 1e15
    for metric in ("l2", "ip"):
        held = Collection(metric)
        held.add(vectors)
        found = held.search(vectors[5], 20)
        assert found.ids.tolist() == oracle(metric, vectors, vectors[5], np.ones(4000, bool), 20)[0]


def test_equal_distances_are_told_by_the_lesser_id_whatever_the_order_of_adding() -> None:
    held = Collection()
    held.add(np.ones((500, 2)), ids=np.arange(500)[::-1])
    assert held.search([1, 1], 3).ids.tolist() == [0, 1, 2]
    held.remove([1])
    held.add(np.ones((1, 2)), ids=[1])
    assert held.search([0, 0], 3).ids.tolist() == [0, 1, 2]


def test_items_are_replaced_removed_and_numbered_past_those_that_are_there() -> None:
    held = Collection()
    assert held.add([[1.0, 0]], ids=[1]).tolist() == [1]
    assert held.add([[2.0, 0], [3, 0]], [{"a": 1}, {}]).tolist() == [0, 2]
    assert held.add([[9.0, 0]], [{"a": 2}], ids=[0]).tolist() == [0]
    assert len(held) == 3
    assert 0 in held
    assert 7 not in held
    assert held.metadata_of([0, 1])[0] == Metadata(a=2)
    assert held.vectors_of([0]).tolist() == [[9, 0]]
    assert held.remove([0, 0, 44]) == 1
    assert held.remove(np.array(0)) == 0
    assert sorted(held.ids.tolist()) == [1, 2]
    with pytest.raises(ItemRefused, match="no item has the id 0"):
        held.vectors_of([0])
    assert held.add([[1.0, 1]]).tolist() == [3]
    # An id at the end of the range does not stop the numbering.
    held.add([[1.0, 1]], ids=[MAX_INT64])
    assert held.add([[1.0, 1]]).tolist() == [4]
    assert [b[0].tolist() for b in held.batches(2)]


def test_a_collection_that_loses_most_items_is_rebuilt() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1000, 4)).astype(np.float32)
    held = Collection()
    held.add(vectors, [{"n": i} for i in range(1000)])
    held.search(vectors[0], where={"n": 0})
    held.remove(np.arange(600))
    assert held.stats()["dead_rows"] == 0
    assert held.search(vectors[700], 1, {"n >=": 0}).hits()[0].metadata == Metadata(n=700)


def test_an_empty_collection_finds_nothing() -> None:
    held = Collection()
    assert held.search([1.0, 2], 5).ids.shape == (0,)
    assert held.search(np.ones((3, 2)), 5, {"a": 1}).ids.shape == (3, 0)
    assert held.add(np.zeros((0, 7))).shape == (0,)
    assert held.dimensions == 0
    assert held.remove([1]) == 0
    again = Collection()
    again.restore(held.serialize())
    assert len(again) == 0


def test_a_batch_of_no_queries_has_no_results() -> None:
    held = Collection()
    held.add(np.ones((3, 2)))
    assert held.search(np.ones((0, 2)), 5).ids.shape == (0, 0)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_a_saved_state_is_the_same_collection(metric) -> None:
    rng = np.random.default_rng(1)
    held = Collection(metric)
    held.add(rng.standard_normal((300, 5)), [{"n": i, "t": "x"} for i in range(300)])
    held.remove([3, 4])
    frozen = held.freeze()
    found = held.search(np.ones(5), 20, {"n >": 7})
    held.add(rng.standard_normal((2000, 5)))
    held.remove(np.arange(200))
    again = Collection(metric)
    again.restore(frozen())
    assert again.search(np.ones(5), 20, {"n >": 7}) == found
    assert len(again) == 298
    assert again.add(np.ones((1, 5))).tolist() == [300]


@pytest.mark.parametrize("change", ["cut", "longer", "magic", "head", "ids", "nan", "metric"])
def test_a_saved_state_that_is_not_ours_is_refused(change) -> None:
    held = Collection("ip" if change == "metric" else "l2")
    held.add(np.ones((3, 2)), [{"a": 1}] * 3)
    data = bytearray(held.serialize())
    at = data.index(b"\0\0\0\0\0\0\0\0")  # ids
    if change == "cut":
        data = data[:-1]
    elif change == "longer":
        data += b"x"
    elif change == "magic":
        data[0] ^= 1
    elif change == "head":
        data[12] ^= 0x80
    elif change == "ids":
        data[at] = 1
    elif change == "nan":
        data[-4:] = np.float32(np.nan).tobytes()
    again = Collection()
    again.add([[5.0, 6]])
    with pytest.raises(ComponentError, match="the saved state is not ours"):
        again.restore(bytes(data))
    assert len(again) == 1  # it is as it was


@pytest.mark.parametrize(
    ("vectors", "error", "told"),
    [
        ([[1.0, 2, 3]], WrongDimensions, "3 numbers; this index holds vectors of 2"),
        (np.ones((1, 1, 2)), WrongDimensions, r"give \[D\], or \[N, D\]"),
        (1.0, WrongDimensions, "give"),
        ([[1.0], [1.0, 2.0]], WrongDimensions, "different lengths"),
        ([[np.nan, 1]], VectorRefused, "number 0 holds NaN"),
        ([[0, 0], [np.inf, 1]], VectorRefused, "number 1 holds NaN"),
        ([[1e19, 1]], VectorRefused, "longer than"),
        ([[1e300, 1]], VectorRefused, "longer than"),
        ([["a", "b"]], VectorRefused, "give numbers"),
        ([[True, False]], VectorRefused, "give numbers"),
        ([[1j, 1]], VectorRefused, "give numbers"),
    ],
)
def test_bad_vectors_are_refused_and_nothing_changes(vectors, error, told) -> None:
    held = Collection(dimensions=2)
    for method in (held.add, held.search, held.train):
        with pytest.raises(error, match=told):
            method(vectors)
    assert len(held) == 0


def test_cosine_needs_a_direction() -> None:
    held = Collection("cosine")
    with pytest.raises(VectorRefused, match="number 1 is zero"):
        held.add([[1.0, 1], [0, 0]])
    held.add([[1e-20, 0], [0, 1e17]])
    assert held.search([3.0, 0.0], 2).distances.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda c: c.add([[1.0, 2]], ids=[1, 2]), ItemRefused, "2 ids for 1 vectors"),
        (lambda c: c.add([[1.0, 2]] * 2, ids=[1, 1]), ItemRefused, "given to two vectors"),
        (lambda c: c.add([[1.0, 2]], ids=[-1]), ItemRefused, "from 0"),
        (lambda c: c.add([[1.0, 2]], ids=[0.5]), ItemRefused, "give integers"),
        (lambda c: c.add([[1.0, 2]], ids=np.uint64([1 << 63])), ItemRefused, "from 0"),
        (lambda c: c.add([[1.0, 2]], [{}, {}]), ItemRefused, "metadata of 2 items for 1"),
        (lambda c: c.add([[1.0, 2]], [{"a": 1 << 64}]), ItemRefused, "64 bit"),
        (lambda c: c.add([[1.0, 2]], [{"a": "x" * (1 << 21)}]), ItemRefused, "metadata of 2097"),
        (lambda c: c.add([[1.0, 2]], [{str(i): 1 for i in range(257)}]), ItemRefused, "257"),
        (lambda c: c.search([1.0, 2], 0), InvalidSearch, "k is 0"),
        (lambda c: c.search([1.0, 2], True), InvalidSearch, "k is True"),
        (lambda c: c.search([1.0, 2], 1, {"a ~": 1}), FilterRefused, "no operator"),
        (lambda c: c.search(np.ones((65_537, 2)), 1), InvalidSearch, "several batches"),
        (lambda c: c.train(np.ones((0, 2))), WrongDimensions, "give some"),
    ],
)
def test_bad_calls_are_refused(call, error, told) -> None:
    held = Collection()
    held.add([[0.0, 1]])
    with pytest.raises(error, match=told):
        call(held)
    assert held.ids.tolist() == [0]


def test_a_collection_of_no_such_metric_or_size_is_refused() -> None:
    with pytest.raises(IndexMismatch, match="there are l2, ip, cosine"):
        Collection("L3")
    with pytest.raises(IndexMismatch, match="dimensions -1"):
        Collection(dimensions=-1)


def test_a_search_in_another_thread_holds_up_neither_a_snapshot_nor_facts() -> None:
    searching, go_on = threading.Event(), threading.Event()

    class Slow(FlatSearcher):
        def search(self, *arguments):
            searching.set()
            assert go_on.wait(PATIENCE_S)
            return super().search(*arguments)

    held = Collection(searcher=Slow())
    held.add(np.eye(3))
    found = []
    thread = threading.Thread(target=lambda: found.append(held.search(np.ones(3), 2)))
    thread.start()
    assert searching.wait(PATIENCE_S)
    assert len(held) == 3
    assert len(held.serialize()) > 0
    go_on.set()
    thread.join(PATIENCE_S)
    assert found[0].ids.tolist() == [0, 1]


def test_a_searchers_state_is_saved_with_what_it_is_of_or_not_at_all() -> None:
    class Stateful(FlatSearcher):
        KIND = "stateful"
        loaded = b""

        def dump(self) -> bytes:
            return b"state"

        def load(self, data, rows) -> None:
            self.begin(rows.metric, rows.dimensions)
            self.loaded = data
            self.rows = rows

    held = Collection(searcher=Stateful())
    held.add(np.eye(4))
    held.remove([2])
    again = Collection(searcher=Stateful())
    again.restore(held.serialize())
    assert again.searcher.loaded == b"state"
    assert again.searcher.rows.alive.tolist() == [True, True, False, True]
    assert again.ids.tolist() == [0, 1, 3]
    assert again.search(np.ones(4), 5) == held.search(np.ones(4), 5)
    frozen = held.freeze()
    held.add(np.ones((1, 4)))
    again = Collection(searcher=Stateful())
    again.restore(frozen())
    assert again.searcher.loaded == b""
    assert again.ids.tolist() == [0, 1, 3]
