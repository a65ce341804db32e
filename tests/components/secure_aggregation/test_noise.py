"""The noise of clients: its distribution, its privacy, and sums that carry it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.secure_aggregation import noise
from bbnode.components.secure_aggregation.errors import RingTooNarrow
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from tests.components.secure_aggregation.rounds import Play, play

COUNT = 200_000


@pytest.mark.parametrize("deviation", [0.3, 0.8, 3.0])
def test_small_noise_has_the_chances_of_the_discrete_gaussian(deviation: float) -> None:
    found = noise.drawn(COUNT, deviation, b"k" * 16)
    k = np.arange(-noise.margin(deviation), noise.margin(deviation) + 1)
    chances = np.exp(-(k**2) / (2 * deviation**2))
    expected = COUNT * chances / chances.sum()
    counts = np.array([(found == each).sum() for each in k])
    enough = expected > 10
    chi2 = ((counts - expected) ** 2 / expected)[enough].sum()
    assert chi2 < 3 * enough.sum() + 15
    assert counts[~enough].sum() <= 3 * expected[~enough].sum() + 20


def test_large_noise_has_its_deviation_and_is_cut_off() -> None:
    found = noise.drawn(COUNT, 20_000.5, b"q" * 16)
    assert found.std() == pytest.approx(20_000.5, rel=0.01)
    assert abs(found.mean()) < 5 * 20_000.5 / math.sqrt(COUNT)
    fourth = (found.astype(float) ** 4).mean() / 20_000.5**4
    assert fourth == pytest.approx(3, rel=0.05)
    assert np.abs(found).max() <= noise.margin(20_000.5)
    assert (np.abs(noise._tail(2.0)) >= 0).all()
    assert (np.diff(noise._tail(2.0)) >= 0).all()


def test_noise_follows_from_its_key() -> None:
    first = noise.drawn(1000, 5.0, b"1" * 16)
    np.testing.assert_array_equal(first, noise.drawn(1000, 5.0, b"1" * 16))
    assert (first != noise.drawn(1000, 5.0, b"2" * 16)).any()


def test_a_vector_is_scaled_down_to_its_norm() -> None:
    long = np.float32([3, 4])
    np.testing.assert_allclose(noise.clipped(long, 1.0), [0.6, 0.8])
    np.testing.assert_array_equal(noise.clipped(long, 5.0), long)


def config(**some: object) -> SecAggConfig:
    given = {"size": 100, "clients": 10, "equal_weights": True, "norm": 1.0, "client_noise": 2.0}
    return SecAggConfig(**{**given, **some})


def test_the_honest_who_stay_at_least_add_the_noise_that_is_asked_for() -> None:
    """With deviation z times the sensitivity, a Gaussian is 1/(2 z^2)-zCDP."""
    for asked in (0.5, 1.0, 4.0):
        plan = RoundPlan.of(config(client_noise=asked))
        assert plan.rho(plan.threshold) == pytest.approx(1 / (2 * asked**2), rel=1e-6)
        assert plan.rho(10) == pytest.approx(plan.rho(plan.threshold) * 4 / 7, rel=1e-6)


def test_little_noise_in_steps_costs_what_sums_of_discrete_gaussians_differ_by() -> None:
    """The formula of the paper, written out."""
    deviation, honest, size, length = 0.6, 3, 50, 2.0
    tau = 10 * sum(math.exp(-2 * math.pi**2 * 0.36 * k / (k + 1)) for k in (1, 2))
    one = math.sqrt(length**2 / (3 * 0.36) + 2 * tau * size)
    other = length / (math.sqrt(3) * 0.6) + tau * math.sqrt(size)
    found = noise.concentrated(length, deviation, honest, size)
    assert found == pytest.approx(min(one, other) ** 2 / 2, rel=1e-12)
    assert found > noise.concentrated(length * 10, deviation * 10, honest, size)


def test_the_ring_has_room_for_the_noise() -> None:
    plan = RoundPlan.of(config())
    ring = plan.ring
    assert ring.margin == noise.margin(plan.deviation) > 0
    assert 10 * (ring.levels + ring.margin) < 1 << (ring.bits - 1)
    assert plan.deviation <= noise.MAX_DEVIATION
    assert RoundPlan.of(config(size=1_000_000, clients=100)).ring.bits == 32


def test_a_sum_is_the_mean_and_noise() -> None:
    sums = []
    for asked in (0.0, 2.0):
        p: Play = play(10, size=4000, equal_weights=True, norm=1.0, client_noise=asked)
        p.weights = dict.fromkeys(p.weights, 1)
        sums.append(p.run()[0] * 10)
    wanted = sum(noise.clipped(v, 1.0) for v in p.vectors.values())
    np.testing.assert_allclose(sums[0], wanted, atol=1e-4)
    # 10 clients add noise, and 4 honest ones of them would be enough.
    step = p.plan.ring.clip / p.plan.ring.levels
    length = noise.sensitivity(1.0, 4000, 1 / step) * step
    assert (sums[1] - wanted).std() == pytest.approx(2.0 * length * math.sqrt(10 / 4), rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"norm": 0.0}, InvalidComponentConfig, "needs a norm"),
        ({"equal_weights": False}, InvalidComponentConfig, "equal weight"),
        ({"norm": math.nan}, InvalidComponentConfig, "norm=nan"),
        ({"norm": -1.0}, InvalidComponentConfig, "norm=-1.0"),
        ({"client_noise": math.inf}, InvalidComponentConfig, "client_noise=inf"),
        ({"levels": 1 << 24}, RingTooNarrow, "lower the levels or client_noise"),
        ({"client_noise": 1e9}, RingTooNarrow, "lower the levels or client_noise"),
    ],
)
def test_noise_that_can_not_be_is_refused(wrong: dict, error: type, why: str) -> None:
    with pytest.raises(error, match=why):
        RoundPlan.of(config(**wrong))
