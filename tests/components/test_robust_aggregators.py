"""Robust aggregators beside the papers' formulas in plain numpy, and under attack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bbnode.components as c
from bbnode.components import errors
from bbnode.components.aggregators import columns
from bbnode.components.aggregators.collecting import CollectingAggregator
from bbnode.components.aggregators.fedavg import capped
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch
from tests.components.fakes import Context, fedavg

PEOPLE = tuple(sorted(PeerId.from_seed(n) for n in range(40)))
SERVER = PeerId.from_seed(99)
CTX = Context(self_peer=SERVER)
SIZE = 300


def built(cls: type[CollectingAggregator], **config: Any) -> CollectingAggregator:
    if cls is c.FedAvg:
        return fedavg(**config)
    return cls(cls.Config(**config))


def result(
    aggregator: CollectingAggregator,
    tensors: Sequence[np.ndarray],
    counts: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    own: np.ndarray | None = None,
    ctx: Context = CTX,
) -> tuple[np.ndarray, Metadata]:
    """What it makes of tensors of peers in PeerId order, answered in `order`."""
    counts = counts or [10] * len(tensors)
    answers = tuple(
        (PEOPLE[at], Composite((tensors[at], Metadata(num_samples=counts[at]))))
        for at in (order or range(len(tensors)))
    )
    aggregator.contribute_all(ctx, ResponseBatch(responses=answers))
    if own is not None:
        aggregator.contribute(ctx, own, Metadata(num_samples=1))
    return aggregator.aggregate(ctx)


def vectors(count: int, seed: int = 0, shape: tuple[int, ...] = (SIZE,)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=shape)
    return [(middle + 0.3 * rng.normal(size=shape)).astype(np.float32) for _ in range(count)]


# --- the formulas, in float64 -----------------------------------------------------------------


def trimmed(x: np.ndarray, f: int) -> np.ndarray:
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def distances(x: np.ndarray) -> np.ndarray:
    return np.array([[np.sum((a - b) ** 2) for b in x] for a in x])


def scores(squared: np.ndarray, f: int) -> list[float]:
    n = len(squared)
    return [sum(sorted(np.delete(squared[i], i))[: max(n - f - 2, 1)]) for i in range(n)]


def multikrum(x: np.ndarray, f: int) -> np.ndarray:
    best = np.argsort(scores(distances(x), f), kind="stable")[: len(x) - f - 2]
    return x[best].mean(axis=0)


def bulyan(x: np.ndarray, f: int) -> np.ndarray:
    rest, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        best = rest[int(np.argmin(scores(distances(x[rest]), f)))]
        rest.remove(best)
        chosen.append(best)
    kept = x[sorted(chosen)]
    near = np.argsort(np.abs(kept - np.median(kept, axis=0)), axis=0)[: len(x) - 4 * f]
    return np.take_along_axis(kept, near, axis=0).mean(axis=0)


def weiszfeld(x: np.ndarray, weights: np.ndarray, nu: float = 1e-6) -> np.ndarray:
    v = np.average(x, axis=0, weights=weights)
    for _ in range(200):
        v = np.average(x, axis=0, weights=weights / np.maximum(nu, np.linalg.norm(x - v, axis=1)))
    return v


def norm_clipped(x: np.ndarray, weights: np.ndarray, most: float) -> np.ndarray:
    short = [each * min(1, most / np.linalg.norm(each)) for each in x]
    return np.average(short, axis=0, weights=weights)


def fltrust(x: np.ndarray, own: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(own)
    sizes = np.linalg.norm(x, axis=1)
    trust = np.maximum(x @ own / (sizes * length), 0)
    return (trust / sizes) @ x * length / trust.sum()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 23, 40])
def test_the_median_is_numpys(count: int) -> None:
    x = vectors(count)
    tensor, told = result(built(c.Median), x)
    np.testing.assert_allclose(tensor, np.median(x, axis=0), atol=1e-6)
    assert told["contributors"] == count
    if count % 2:
        np.testing.assert_array_equal(tensor, np.median(x, axis=0))


@pytest.mark.parametrize(("count", "f"), [(3, 1), (4, 1), (10, 3), (11, 5), (40, 8), (5, 0)])
def test_the_trimmed_mean_is_of_the_middle(count: int, f: int) -> None:
    x = vectors(count)
    tensor, _ = result(built(c.TrimmedMean, byzantine=f), x)
    np.testing.assert_allclose(tensor, trimmed(np.float64(x), f), atol=1e-6)


@pytest.mark.parametrize(("count", "f"), [(5, 1), (9, 3), (20, 4), (3, 0)])
def test_krum_is_one_of_them_and_multikrum_their_mean(count: int, f: int) -> None:
    x = vectors(count)
    tensor, told = result(built(c.Krum, byzantine=f), x)
    best = int(np.argmin(scores(distances(np.float64(x)), f)))
    np.testing.assert_array_equal(tensor, x[best])
    assert told["chosen"] == str(PEOPLE[best])
    tensor, _ = result(built(c.MultiKrum, byzantine=f), x)
    np.testing.assert_allclose(tensor, multikrum(np.float64(x), f), atol=1e-6)


@pytest.mark.parametrize(("count", "f"), [(7, 1), (11, 2), (20, 4), (5, 0)])
def test_bulyan_follows_the_paper(count: int, f: int) -> None:
    x = vectors(count)
    tensor, told = result(built(c.Bulyan, byzantine=f), x)
    np.testing.assert_allclose(tensor, bulyan(np.float64(x), f), atol=1e-6)
    assert str(told["left_out"]).count("12D3") == (2 * f if "12D3" in str(PEOPLE[0]) else 0)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 30])
def test_the_geometric_median_is_weiszfelds(count: int) -> None:
    x, counts = vectors(count), [1 + 7 * n % 13 for n in range(count)]
    tensor, _ = result(built(c.GeometricMedian, max_share=0.4), x, counts)
    weights = np.array(capped(counts, 0.4), float)
    np.testing.assert_allclose(tensor, weiszfeld(np.float64(x), weights), atol=2e-6)


def test_norm_clipping_shortens_the_long_ones() -> None:
    x, counts = vectors(6), [3, 1, 4, 1, 5, 9]
    x[2] *= 100
    tensor, told = result(built(c.NormClipping, max_norm=2.0, max_share=1.0), x, counts)
    np.testing.assert_allclose(tensor, norm_clipped(np.float64(x), np.array(counts), 2), atol=1e-6)
    assert (told["shortened"], told["max_norm"]) == (6, 2.0)
    tensor, told = result(built(c.NormClipping, max_share=1.0), x, counts)
    middle = float(np.median(np.linalg.norm(np.float64(x), axis=1)))
    np.testing.assert_allclose(
        tensor, norm_clipped(np.float64(x), np.array(counts), middle), atol=2e-6
    )
    assert told["shortened"] == 3


def test_fltrust_weighs_by_the_way_of_its_own() -> None:
    x, own = vectors(6), vectors(7)[6]
    x[1], x[4] = -5 * x[1], 50 * x[4]
    tensor, told = result(built(c.FLTrust), x, own=own)
    np.testing.assert_allclose(tensor, fltrust(np.float64(x), np.float64(own)), atol=1e-6)
    assert told["trusted"] == 5


def test_fltrust_says_what_it_misses() -> None:
    x = vectors(3)
    with pytest.raises(errors.NothingToAggregate, match="change of its own"):
        result(built(c.FLTrust), x)
    with pytest.raises(errors.NobodyTrusted, match="none of 3"):
        result(built(c.FLTrust), x, own=-x[0])
    with pytest.raises(errors.NobodyTrusted, match="length is 0"):
        result(built(c.FLTrust), x, own=np.zeros_like(x[0]))
    x[0][:] = 0  # a contribution of no length has no direction
    assert result(built(c.FLTrust), x, own=vectors(1)[0])[1]["trusted"] == 2


def test_distances_survive_a_liar_that_is_the_first() -> None:
    x = vectors(9)
    x[0] = np.full(SIZE, 1e7, np.float32)
    found = columns.squared_distances(x)
    np.testing.assert_allclose(found[1:, 1:], distances(np.float64(x))[1:, 1:], rtol=1e-4)
    same = [np.full(SIZE, 3, np.float32)] * 5
    assert not columns.squared_distances(same).any()


# --- all of them ------------------------------------------------------------------------------

ALL: dict[str, tuple[type[CollectingAggregator], dict[str, Any], int]] = {
    # name: class, settings for 2 liars, and the least number of contributors
    "FedAvg": (c.FedAvg, {}, 1),
    "Median": (c.Median, {}, 1),
    "TrimmedMean": (c.TrimmedMean, {"byzantine": 2}, 5),
    "Krum": (c.Krum, {"byzantine": 2}, 7),
    "MultiKrum": (c.MultiKrum, {"byzantine": 2}, 7),
    "Bulyan": (c.Bulyan, {"byzantine": 2}, 11),
    "GeometricMedian": (c.GeometricMedian, {}, 1),
    "NormClipping": (c.NormClipping, {}, 1),
    "FLTrust": (c.FLTrust, {}, 1),
}
WITH_LEAST = {name: row for name, row in ALL.items() if row[2] > 1}


def own_of(name: str, tensors: Sequence[np.ndarray]) -> np.ndarray | None:
    return np.mean(tensors, axis=0, dtype=np.float32) if name == "FLTrust" else None


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(12)),
    counts=st.lists(st.integers(1, 1000), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
def test_the_order_of_arrival_changes_no_bit(
    name: str, order: list[int], counts: list[int], seed: int
) -> None:
    cls, config, _ = ALL[name]
    x = vectors(12, seed, shape=(5, 7))
    own = own_of(name, x)
    first = result(built(cls, **config), x, counts, own=own)
    other = result(built(cls, **config), x, counts, order, own=own)
    assert first[0].tobytes() == other[0].tobytes()
    assert first[0].shape == (5, 7)
    assert dict(first[1]) == dict(other[1])
    assert not first[0].flags.writeable


@pytest.mark.parametrize("name", ALL)
def test_blocks_of_columns_join_without_a_seam(name: str) -> None:
    cls, config, _ = ALL[name]
    x = vectors(12, shape=(70_000,))
    # The distances that Krum and others choose by are of the whole vectors.
    parts = [[each[:n] for each in x] for n in (70_000, 40_001)]
    whole, cut = (result(built(cls, **config), p, own=own_of(name, p))[0] for p in parts)
    if name in ("FedAvg", "Median", "TrimmedMean"):
        np.testing.assert_array_equal(whole[:40_001], cut)
    assert np.abs(whole - np.median(x, axis=0)).max() < 2


@pytest.mark.parametrize("name", ALL)
def test_what_all_agree_on_is_the_result(name: str) -> None:
    cls, config, _ = ALL[name]
    agreed = vectors(1)[0]
    tensor, _ = result(built(cls, **config), [agreed] * 11, own=own_of(name, [agreed]))
    np.testing.assert_allclose(tensor, agreed, rtol=1e-6)


@pytest.mark.parametrize("name", WITH_LEAST)
def test_too_few_for_so_many_liars_is_an_error_of_its_own(name: str) -> None:
    cls, config, least = ALL[name]
    with pytest.raises(errors.NotEnoughContributions, match="byzantine") as caught:
        result(built(cls, **config), vectors(least - 1))
    assert (caught.value.available, caught.value.needed) == (least - 1, least)
    assert result(built(cls, **config), vectors(least))[1]["contributors"] == least


def test_too_few_says_who_was_refused_and_why() -> None:
    tensors = vectors(5)
    tensors[2] = np.full_like(tensors[2], np.nan)
    with pytest.raises(errors.NotEnoughContributions) as caught:
        result(built(c.Krum, byzantine=1), tensors)
    assert str(caught.value).endswith(f"(refused: {PEOPLE[2]}: its tensor holds NaN or infinity)")


def bad(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def spoil(tensor: np.ndarray) -> np.ndarray:
        made = tensor.copy()
        made.flat[-1] = value
        return made

    return spoil


LIES: dict[str, tuple[Callable[[np.ndarray], Any], Any, str]] = {
    "NaN": (bad(math.nan), 10, "NaN or infinity"),
    "infinity": (bad(-math.inf), 10, "NaN or infinity"),
    "huge": (bad(3e38), 10, "max_abs"),
    "another shape": (lambda tensor: tensor[:-1], 10, "shape"),
    "another type": (np.float64, 10, "float64, not float32"),
    "negative count": (lambda tensor: tensor, -5, "num_samples is -5"),
    "no samples": (lambda tensor: tensor, 0, "num_samples is 0"),
    "absurd count": (lambda tensor: tensor, 10**12, "max_samples"),
    "count of text": (lambda tensor: tensor, "many", "not an integer"),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_by_name_with_the_reason(name: str, lie: str) -> None:
    cls, config, _ = ALL[name]
    spoil, count, why = LIES[lie]
    x = vectors(14)
    own = own_of(name, x)
    honest, _ = result(built(cls, **config), x[:12], own=own)
    counts = [10] * 12 + [count, 10]
    told_of: list[Any] = [*x[:12], spoil(x[12]), x[3]]
    ctx = replace(CTX, refused={})
    order = [*range(13), 3]  # the fourth answers twice
    tensor, told = result(built(cls, **config), told_of, counts, order, own, ctx)
    assert tensor.tobytes() == honest.tobytes()
    assert told["refused"] == 2
    assert f"{PEOPLE[12]}: " in str(told["refused_why"])
    assert why in str(told["refused_why"])
    assert f"{PEOPLE[3]}: it has answered in this round already" in str(told["refused_why"])
    assert PEOPLE[3] in ctx.refused


# Who withstands what: six liars of twenty, and each rule is told of six (Bulyan takes 27 for six).
# A rule withstands an attack when its result is no farther from the mean of the honest than one
# of them is.
ATTACKS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "sign flip": lambda honest, _: np.repeat(-4 * honest.mean(axis=0)[None], 6, axis=0),
    "large noise": lambda honest, rng: rng.normal(scale=100, size=(6, honest.shape[1])),
    "far away": lambda honest, _: np.full((6, honest.shape[1]), 1e6),
    "a little is enough": lambda honest, _: np.repeat(
        (honest.mean(axis=0) - 1.0 * honest.std(axis=0))[None], 6, axis=0
    ),
}
WITHSTANDS = {
    "FedAvg": {"a little is enough"},
    "Median": set(ATTACKS),
    "TrimmedMean": set(ATTACKS),
    "Krum": set(ATTACKS),
    "MultiKrum": set(ATTACKS),
    "GeometricMedian": set(ATTACKS),
    "NormClipping": {"large noise", "far away", "a little is enough"},
    "FLTrust": set(ATTACKS),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", WITHSTANDS)
def test_who_withstands_which_attack(name: str, attack: str) -> None:
    cls, config, _ = ALL[name]
    rng = np.random.default_rng(5)
    middle = rng.normal(size=SIZE)
    honest = middle + 0.5 * rng.normal(size=(14, SIZE))
    lies = ATTACKS[attack](honest, rng)
    config = {**config, "byzantine": 6} if "byzantine" in config else config
    x = [each.astype(np.float32) for each in (*lies, *honest)]
    own = own_of(name, x[6:9])
    tensor, _ = result(built(cls, **config), x, own=own)
    away = np.linalg.norm(tensor - honest.mean(axis=0))
    alone = np.linalg.norm(honest[0] - honest.mean(axis=0))
    assert (away <= 1.05 * alone) == (attack in WITHSTANDS[name]), away / alone


def test_bulyan_keeps_a_liar_out_of_single_coordinates() -> None:
    # Krum's own fault: one coordinate may be far off while the rest is in the midst.
    x = vectors(11)
    for at in (4, 5):
        x[at] = np.mean(x, axis=0, dtype=np.float32)
        x[at][7] += 3
    honest = np.mean([each[7] for n, each in enumerate(x) if n not in (4, 5)])
    krum, _ = result(built(c.Krum, byzantine=2), x)
    tensor, _ = result(built(c.Bulyan, byzantine=2), x)
    assert abs(krum[7] - honest) > 2
    assert abs(tensor[7] - honest) < 0.5


def test_liars_claim_no_weight_and_no_loss() -> None:
    x = vectors(12)
    aggregator = built(c.Median)
    answers = tuple(
        (PEOPLE[at], Composite((each, Metadata(num_samples=n, loss=loss))))
        for at, (each, n, loss) in enumerate(
            zip(x, [1_000_000, *[10] * 11], [1e30, *[0.5] * 11], strict=True)
        )
    )
    aggregator.contribute_all(CTX, ResponseBatch(responses=answers))
    _, told = aggregator.aggregate(CTX)
    assert (told["num_samples"], told["loss"]) == (120, 0.5)


def test_the_state_of_a_robust_aggregator_comes_back() -> None:
    x = vectors(7)
    one, two = built(c.Krum), built(c.Krum)
    answers = (
        (PEOPLE[at], Composite((each, Metadata(num_samples=3)))) for at, each in enumerate(x)
    )
    one.contribute_all(CTX, ResponseBatch(responses=tuple(answers)))
    frozen = one.freeze()
    made, _ = one.aggregate(CTX)
    two.restore(frozen())
    np.testing.assert_array_equal(two.aggregate(CTX)[0], made)
    np.testing.assert_array_equal(two.current_tensor(CTX), made)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (c.TrimmedMean, {"byzantine": -1}),
        (c.Krum, {"byzantine": 600}),
        (c.Krum, {"max_abs": 1e20}),
        (c.MultiKrum, {"selected": -1}),
        (c.GeometricMedian, {"smoothing": 0.0}),
        (c.GeometricMedian, {"iterations": 0}),
        (c.GeometricMedian, {"max_share": 0.0}),
        (c.NormClipping, {"max_norm": math.nan}),
        (c.NormClipping, {"max_share": 2.0}),
        (c.FLTrust, {"max_abs": 1e30}),
    ],
)
def test_settings_out_of_range_are_refused(cls: Any, config: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidComponentConfig):
        built(cls, **config)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_networks_sort_every_input_of_zeros_and_ones(count: int) -> None:
    # What sorts these sorts everything (Knuth, 5.3.4, theorem Z).
    bits = np.array(list(itertools.product([0, 1], repeat=count)), np.float32).T
    for first, last in ((0, count - 1), ((count - 1) // 2, count // 2)):
        made = columns.between(list(bits), first, last)
        kept = np.sort(bits, axis=0)[first : last + 1]
        np.testing.assert_allclose(made, kept.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(
        columns.near_median(list(bits), 1), np.round(np.sort(bits, axis=0)[count // 2]), atol=1
    )
