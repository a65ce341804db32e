"""The running mean: as FedAvg's, in any order, and with the memory of its sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import FedAvg, RunningMean, RunningMeanConfig, errors
from bbnode.components.aggregators.fedavg import capped
from bbnode.components.aggregators.running import _settled
from bbnode.ir.values import Composite, Metadata, ResponseBatch
from tests.components.fakes import CTX, PEERS, Context, fedavg

SHAPE = (3, 7001)


def running(**config: Any) -> RunningMean:
    return RunningMean(RunningMeanConfig(**{"shape": SHAPE, **config}))


def give(to: FedAvg, at: int, tensor: np.ndarray, samples: int, **more: float) -> None:
    context = Context(source_peer=PEERS[at])
    to.contribute(context, tensor, Metadata({"num_samples": samples, **more}))


def tensors(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=SHAPE).astype(np.float32) for _ in PEERS]


COUNTS = st.lists(st.integers(1, 2000) | st.just(1_000_000), min_size=8, max_size=8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(counts=COUNTS, order=st.permutations(range(8)), share=st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_in_any_order_it_is_the_capped_mean_to_the_bit(
    counts: list[int], order: list[int], share: float
) -> None:
    x = tensors()
    made = []
    for at in (range(8), order):
        mean = running(max_share=share)
        for n in at:
            give(mean, n, x[n], counts[n], loss=float(n))
        made.append(mean.aggregate(CTX))
    assert made[0][0].tobytes() == made[1][0].tobytes()
    assert dict(made[0][1]) == dict(made[1][1])
    weights = capped(counts, share)
    expected = np.average(np.float64(x), axis=0, weights=weights)
    np.testing.assert_allclose(made[0][0], expected, atol=1e-6)
    assert made[0][1]["num_samples"] == sum(weights)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.floats(0.05, 0.99))
def test_who_is_settled_is_never_cut_later(counts: list[int], share: float) -> None:
    for known in range(1, len(counts) + 1):
        limit = _settled(counts[:known], share)
        final = capped(counts, share)
        for count, kept in zip(counts[:known], final, strict=False):
            assert kept == count or count > limit


def test_nothing_is_kept_of_what_was_added() -> None:
    x, mean = tensors(), running()
    for n, each in enumerate(x):
        give(mean, n, each, 10)
    assert all(not any(part.tensor.strides) for part in mean._sent_in.contributions.values())
    given_back, told = mean.aggregate(CTX)
    assert told["contributors"] == len(PEERS)
    assert given_back.base is not None
    assert given_back.base.nbytes <= given_back.nbytes + 8
    with pytest.raises(errors.NothingToAggregate):
        mean.aggregate(CTX)


def test_lies_leave_the_sum_alone() -> None:
    x, mean = tensors(), running()
    give(mean, 0, x[0], 10)
    bad = x[1].copy()
    bad[2, -1] = np.nan
    for tensor, samples, why in (
        (bad, 10, "NaN"),
        (x[1][:2], 10, "shape"),
        (x[1] + 100, 10, "max_abs"),
        (x[1], -1, "num_samples"),
        (x[1], 10**9, "max_samples"),
    ):
        with pytest.raises(errors.ContributionRefused, match=why):
            give(mean, 1, tensor, samples)
    with pytest.raises(errors.ContributionRefused, match="already"):
        give(mean, 0, x[3], 10)
    np.testing.assert_allclose(mean.aggregate(CTX)[0], x[0], atol=1e-7)


def test_answers_and_its_own_join_the_sum() -> None:
    x, mean, ctx = tensors(), running(max_share=1.0), Context()
    give(mean, 1, x[1], 3)
    mean.contribute(ctx, x[0], Metadata(num_samples=2))
    said = [(PEERS[n], Composite((x[n], Metadata(num_samples=5)))) for n in (1, 2)]
    mean.contribute_all(ctx, ResponseBatch(responses=tuple(said)))
    tensor, told = mean.aggregate(ctx)
    np.testing.assert_allclose(
        tensor, np.average(np.float64(x[:3]), axis=0, weights=[2, 3, 5]), atol=1e-6
    )
    assert "one-way already" in str(told["refused_why"])
    assert PEERS[1] in ctx.refused


def test_its_state_comes_back_in_the_midst_of_a_round() -> None:
    x, one, two = tensors(), running(), running()
    counts = [10, 20, 900, 30, 40, 50, 60, 70]
    for n in range(4):
        give(one, n, x[n], counts[n], loss=0.5)
    assert sum(any(part.tensor.strides) for part in one._sent_in.contributions.values()) == 1
    two.restore(one.serialize())
    assert two.serialize() == one.serialize()
    for each in (one, two):
        for n in range(4, 8):
            give(each, n, x[n], counts[n])
    with pytest.raises(errors.ContributionRefused, match="already"):
        give(two, 2, x[2], 1)
    first, second = one.aggregate(CTX), two.aggregate(CTX)
    assert first[0].tobytes() == second[0].tobytes()
    assert dict(first[1]) == dict(second[1])
    # A state of FedAvg is one of it without a sum, and of another size it is refused.
    plain = fedavg()
    plain.restore(FedAvg(FedAvg.Config()).serialize())
    running().restore(plain.serialize())
    other = running(shape=(5,), max_share=1.0)
    give(other, 1, np.ones(5, np.float32), 1)
    with pytest.raises(errors.ComponentError, match="values"):
        running().restore(other.serialize())


def test_its_bits_bound_its_settings() -> None:
    with pytest.raises(errors.InvalidComponentConfig, match="shape"):
        running(shape=None)
    with pytest.raises(errors.InvalidComponentConfig, match=r"above 2\^46"):
        running(max_abs=1e9)
    # The largest sum that its settings allow does not overflow.
    mean = running(shape=(2,), max_contributors=8, max_samples=1000, max_share=1.0)
    for n in range(8):
        give(mean, n, np.array([64, -64], np.float32), 1000)
    np.testing.assert_array_equal(mean.aggregate(CTX)[0], [64, -64])
