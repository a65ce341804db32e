from __future__ import annotations

from decimal import localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from bbnode.components.data import partition
from bbnode.components.data.partition import deal, permutation, split_rows

LABELS = nps.arrays(np.int64, st.integers(1, 60), elements=st.integers(-3, 6))
PARTITIONS = st.sampled_from(["iid", "shards", "dirichlet", "quantity"])
SEEDS = st.integers(0, 2**64)
ALPHAS = st.sampled_from([1e-6, 0.01, 0.3, 1.0, 7.5, 1e6])


@given(LABELS, PARTITIONS, st.integers(1, 20), SEEDS, ALPHAS)
def test_every_example_goes_to_exactly_one_peer(labels, kind, shards, seed, alpha) -> None:
    if len(labels) < shards:
        with pytest.raises(ValueError, match="use fewer shards"):
            deal(labels, kind, shards, seed, alpha)
        return
    shares = deal(labels, kind, shards, seed, alpha)
    assert len(shares) == shards
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    for share in shares:
        np.testing.assert_array_equal(share, np.sort(share))
        assert len(share) > 0 or (kind == "shards" and len(labels) < 2 * shards)
    sizes = [len(share) for share in shares]
    if kind != "quantity":
        assert max(sizes) - min(sizes) <= (2 if kind == "shards" else 1)


@given(LABELS, PARTITIONS, st.integers(1, 5), SEEDS)
def test_the_deal_depends_on_its_arguments_alone(labels, kind, shards, seed) -> None:
    if len(labels) >= shards:
        one = deal(labels, kind, shards, seed, 0.5)
        with localcontext() as context:
            context.prec = 3  # whatever the program around it does with decimals
            two = deal(labels.copy(), kind, shards, seed, 0.5)
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)


def test_deals_are_what_they_always_were() -> None:
    # Peers of different versions must agree on the deal: these numbers never change.
    assert permutation(8, 0, 1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
    assert sorted(permutation(1000, 3).tolist()) == list(range(1000))
    labels = np.arange(12) % 3
    assert {
        kind: [share.tolist() for share in deal(labels, kind, 3, 5, 0.5)]
        for kind in ("iid", "shards", "dirichlet", "quantity")
    } == {
        "iid": [[4, 6, 7, 9], [0, 1, 8, 11], [2, 3, 5, 10]],
        "shards": [[0, 2, 3, 5], [6, 8, 9, 11], [1, 4, 7, 10]],
        "dirichlet": [[0, 3, 6, 9], [2, 5, 8, 11], [1, 4, 7, 10]],
        "quantity": [[4, 7], [9], [0, 1, 2, 3, 5, 6, 8, 10, 11]],
    }
    mixed = deal(labels, "dirichlet", 3, 6, 20.0)
    assert [share.tolist() for share in mixed] == [[1, 5, 6, 9], [2, 3, 4, 11], [0, 7, 8, 10]]


def few(labels, shares) -> float:
    """The mean number of classes that fill nine tenths of a share."""
    needed = []
    for share in shares:
        counts = np.sort(np.bincount(labels[share], minlength=10))[::-1]
        needed.append(int(np.searchsorted(np.cumsum(counts), 0.9 * len(share))) + 1)
    return float(np.mean(needed))


def test_small_alphas_give_few_classes_and_large_ones_the_mix_of_all() -> None:
    labels = np.repeat(np.arange(10), 200)
    mixed = [few(labels, deal(labels, "dirichlet", 20, 0, alpha)) for alpha in (0.1, 1, 10, 1000)]
    assert mixed == sorted(mixed)
    assert mixed[0] < 3
    assert mixed[-1] > 8.5


def test_small_alphas_give_sizes_that_differ() -> None:
    labels = np.zeros(2000, np.int64)
    spread = [
        float(np.std([len(share) for share in deal(labels, "quantity", 20, 0, alpha)]))
        for alpha in (0.1, 1, 10, 1000)
    ]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 100 > 10 > spread[-1]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_variates_have_the_moments_of_a_dirichlet_distribution(alpha: float) -> None:
    draws = partition._Draws(3)
    found = np.array([draws.weights([alpha, 2 * alpha]) for _ in range(1500)], float)
    first = found[:, 0] / found.sum(axis=1)
    variance = (1 / 3) * (2 / 3) / (3 * alpha + 1)
    assert abs(first.mean() - 1 / 3) < 4 * np.sqrt(variance / 1500)
    assert abs(first.var() - variance) < 0.2 * variance


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), st.data())
def test_what_is_apportioned_adds_up_and_has_room(pairs, data) -> None:
    weights, room = zip(*pairs, strict=True)
    total = data.draw(st.integers(0, sum(room)))
    given_out = partition._apportion(total, weights, room)
    assert sum(given_out) == total
    assert all(0 <= n <= most for n, most in zip(given_out, room, strict=True))


@pytest.mark.parametrize(
    ("labels", "kind", "shards", "why"),
    [
        (np.ones(9, np.float32), "dirichlet", 2, "float32 labels are no classes; use"),
        (np.ones((9, 4), np.int64), "dirichlet", 2, r"labels of shape \[4\]"),
        (np.ones((9, 4), np.int64), "shards", 2, r"labels of shape \[4\]"),
        (np.arange(2000), "dirichlet", 1000, "2000000 draws"),
    ],
)
def test_labels_that_cannot_be_dealt_by_are_refused(labels, kind, shards, why) -> None:
    with pytest.raises(ValueError, match=why):
        deal(labels, kind, shards, 0, 0.5)


def test_real_labels_can_be_dealt_in_their_order() -> None:
    labels = np.linspace(9, 1, 40, dtype=np.float32)
    for share in deal(labels, "shards", 4, 0, 0.5):
        assert len(share) == 10


@given(
    LABELS, st.floats(0.01, 0.6), st.floats(0, 0.39), SEEDS, st.booleans(),
)  # fmt: skip
def test_a_split_is_a_partition(labels, test, validation, seed, by_class) -> None:
    parts = split_rows(len(labels), labels if by_class else None, test, validation, seed)
    assert list(parts) == ["train", "test", "validation"]
    np.testing.assert_array_equal(
        np.sort(np.concatenate(list(parts.values()))), np.arange(len(labels))
    )
    for rows in parts.values():
        np.testing.assert_array_equal(rows, np.sort(rows))


def test_classes_are_split_alike() -> None:
    labels = np.array([0] * 50 + [1] * 5 + [-2] * 1)
    parts = split_rows(56, labels, 0.2, 0.4, 3)
    assert np.bincount(labels[parts["test"]] + 2, minlength=4).tolist() == [0, 0, 10, 1]
    assert np.bincount(labels[parts["validation"]] + 2, minlength=4).tolist() == [0, 0, 20, 2]
    # The test part is the same whatever is taken for validation.
    np.testing.assert_array_equal(parts["test"], split_rows(56, labels, 0.2, 0.0, 3)["test"])


def test_numbers_that_are_no_classes_are_split_as_a_whole() -> None:
    years = np.arange(1900, 2000)
    assert len(split_rows(100, years, 0.2, 0.0, 0)["test"]) == 20
    assert len(split_rows(100, years / 7, 0.2, 0.0, 0)["test"]) == 20
