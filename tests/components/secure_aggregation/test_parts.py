"""The parts of secure aggregation: the ring, the shares, the masks, the graph, the settings."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import neighbours_for
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.secure_aggregation import graph, masking, shamir
from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RingTooNarrow,
    UnmaskingFailed,
)
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from bbnode.components.secure_aggregation.ring import MOST_LEVELS, Ring
from bbnode.ir.peer import PeerId
from tests.components.secure_aggregation.rounds import drawing

PEERS = sorted(PeerId.from_seed(n) for n in range(60))

# -- the ring ------------------------------------------------------------------------------


def ring(**some: object) -> Ring:
    return Ring.fitting(**{"clip": 1.0, "levels": 0, "max_weight": 100, "clients": 10, **some})


def test_it_is_as_wide_as_sums_need() -> None:
    assert ring(levels=32, max_weight=1, clients=1000).bits == 16
    assert ring(levels=33, max_weight=1, clients=1000).bits == 32
    assert ring().bits == 32
    assert ring().levels == (2**31 - 1) // 1000
    wide = ring(max_weight=10_000, clients=1000)
    assert (wide.bits, wide.levels) == (64, MOST_LEVELS)
    assert ring(max_weight=1, clients=2).levels == MOST_LEVELS
    with pytest.raises(RingTooNarrow, match="needs 72 bits, and 64 are the most"):
        ring(levels=1 << 40, max_weight=1 << 20, clients=1 << 10)


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(2, 30),
    max_weight=st.integers(1, 1000),
    levels=st.sampled_from([0, 1, 7, 1000, 2**20]),
    clip=st.sampled_from([1e-6, 0.1, 1.0, 3.7, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sum_of_words_is_the_sum_of_quantised_values(
    clients: int, max_weight: int, levels: int, clip: float, seed: int
) -> None:
    made = Ring.fitting(clip=clip, levels=levels, max_weight=max_weight, clients=clients)
    random = np.random.default_rng(seed)
    # Extremes of one sign are what overflows first.
    vectors = np.concatenate(
        [random.normal(0, 2 * clip, (clients, 9)), np.full((clients, 1), clip * 1e9)], axis=1
    ).astype(np.float32)
    weights = random.integers(1, max_weight + 1, clients)
    weights[: clients // 2] = max_weight
    total = sum(made.words(v, int(w)) for v, w in zip(vectors, weights, strict=True))
    exact = np.zeros(10, object)
    for vector, weight in zip(vectors, weights, strict=True):
        clipped = np.clip(vector.astype(np.float64), -clip, clip)
        exact += int(weight) * np.rint(clipped * (made.levels / clip)).astype(np.int64)
    assert made.signed(total[:-1]).tolist() == exact.tolist()
    mean, weight = made.mean(total, clients)
    assert weight == weights.sum()
    np.testing.assert_allclose(mean[-1], clip, rtol=1e-6)


def test_a_mean_is_off_by_half_a_step_at_most() -> None:
    made = ring(levels=1000)
    x = np.random.default_rng(0).uniform(-1, 1, 10_000).astype(np.float32)
    mean, _ = made.mean(made.words(x, 100), 1)
    assert np.abs(mean - x).max() <= 0.5 / 1000 + 1e-7


def test_values_that_are_no_numbers_are_refused() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(NotMaskable, match="NaN or infinity"):
            ring().words(np.float32([0, bad]), 1)
    with pytest.raises(NotMaskable, match="tensor of floats"):
        ring().words(np.zeros(3, np.int64), 1)
    with pytest.raises(NotMaskable, match="a weight of 0"):
        ring().words(np.zeros(3, np.float32), 0)


def test_a_weight_above_the_largest_counts_as_that() -> None:
    assert (
        ring().words(np.float32([1]), 10**30).tolist()
        == ring().words(np.float32([1]), 100).tolist()
    )


def test_sums_that_no_clients_can_have_are_refused() -> None:
    made, words = ring(), ring().words(np.float32([1, -1]), 100)
    made.mean(words, 1)
    for contributors, sum_of in ((2, words - words + 1), (1, words * np.uint32(2))):
        with pytest.raises(UnmaskingFailed, match="weights of"):
            made.mean(sum_of, contributors)
    beyond = words.copy()
    beyond[0] += 1
    with pytest.raises(UnmaskingFailed, match="lies beyond"):
        made.mean(beyond, 1)


# -- shares --------------------------------------------------------------------------------


def test_the_field_is_the_one_of_the_first_prime_above_two_to_the_256() -> None:
    def probably_prime(n: int) -> bool:
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            x = pow(base, odd, n)
            if x in (1, n - 1):
                continue
            if all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert probably_prime(shamir.PRIME)
    assert not any(probably_prime((1 << 256) + k) for k in range(1, 297))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), secret=st.binary(min_size=32, max_size=32), count=st.integers(1, 12))
def test_any_threshold_shares_recover_and_one_fewer_says_nothing(
    data: st.DataObject, secret: bytes, count: int
) -> None:
    threshold = data.draw(st.integers(1, count))
    points = data.draw(st.permutations(range(1, 40)))[:count]
    shares = dict(
        zip(points, shamir.split(secret, points, threshold, drawing(secret)), strict=True)
    )
    chosen = data.draw(st.permutations(points))
    assert shamir.recover({p: shares[p] for p in chosen[:threshold]}) == secret
    # With one fewer, every other secret fits as well: there is a polynomial through both.
    fewer = {p: shares[p] for p in chosen[: threshold - 1]}
    other = int.from_bytes(hashlib.sha256(secret).digest(), "big")
    free = next(p for p in itertools.count(100) if p not in fewer)
    share = shamir.value_at({0: other, **fewer}, free)
    assert shamir.recover({**fewer, free: share}) == other.to_bytes(32, "big")


def test_shares_below_the_threshold_look_alike_for_any_secret() -> None:
    """The shares of two secrets, over many draws, have the same mean and spread."""
    means = []
    for secret in (bytes(32), b"\xff" * 32):
        drawn = [shamir.split(secret, [1, 2, 3], 3, drawing(n))[1] for n in range(400)]
        means.append(np.mean([share / shamir.PRIME for share in drawn]))
    assert np.abs(np.array(means) - 0.5).max() < 4 / math.sqrt(12 * 400)


def test_changed_shares_give_another_secret() -> None:
    shares = shamir.split(b"s" * 32, [1, 2, 3], 2, drawing(0))
    assert shamir.recover({1: shares[0], 2: shares[1] ^ 1}) != b"s" * 32
    assert shamir.recover({1: shamir.PRIME - 1}) is None  # no 32 bytes


def test_no_sharing_for_bad_points() -> None:
    for points, threshold in (([1, 1], 1), ([0, 1], 1), ([1, 2], 3), ([1], 0)):
        with pytest.raises(ValueError, match="no sharing"):
            shamir.split(bytes(32), points, threshold, drawing(0))


# -- masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
@pytest.mark.parametrize("size", [1, 33, 1 << 17])
def test_a_mask_is_the_key_stream_and_cancels(dtype: str, size: int) -> None:
    start = np.arange(size).astype(dtype)
    words = start.copy()
    masking.add_mask(words, b"k" * 16)
    stream = Cipher(algorithms.AES(b"k" * 16), modes.CTR(bytes(16))).encryptor()
    wanted = start + np.frombuffer(stream.update(bytes(start.nbytes)), dtype)
    np.testing.assert_array_equal(words, wanted)
    masking.add_mask(words, b"k" * 16, subtract=True)
    np.testing.assert_array_equal(words, start)


def test_both_sides_agree_and_keys_differ_by_purpose() -> None:
    one, other = b"1" * 32, b"2" * 32
    shared = masking.agreed(one, masking.public_key(other))
    assert shared == masking.agreed(other, masking.public_key(one))
    assert masking.derived(shared, b"a") != masking.derived(shared, b"b")


def test_a_key_of_low_order_is_weak() -> None:
    for public in (bytes(32), b"\x01" + bytes(31)):
        with pytest.raises(masking.WeakKey):
            masking.agreed(b"1" * 32, public)


def test_a_letter_opens_for_its_key_and_route_alone() -> None:
    sealed = masking.seal(b"k" * 16, b"letter", b"1->2")
    assert masking.unseal(b"k" * 16, sealed, b"1->2") == b"letter"
    assert masking.unseal(b"k" * 16, sealed, b"1->3") is None
    assert masking.unseal(b"x" * 16, sealed, b"1->2") is None
    assert masking.unseal(b"k" * 16, sealed[:-1] + b"!", b"1->2") is None
    assert masking.unseal(b"k" * 16, b"", b"1->2") is None


# -- the graph -----------------------------------------------------------------------------


def edges(made: graph.MaskGraph) -> dict[PeerId, list[PeerId]]:
    return {peer: made.neighbours(peer) for peer in PEERS}


def test_the_graph_is_regular_mutual_and_drawn() -> None:
    made = graph.MaskGraph(PEERS, 8, b"seed")
    near = edges(made)
    assert all(len(set(found)) == 8 and found == sorted(found) for found in near.values())
    assert all(
        one in near[other] and one != other for one, found in near.items() for other in found
    )
    assert near == edges(graph.MaskGraph(PEERS[::-1], 8, b"seed"))
    assert near != edges(graph.MaskGraph(PEERS, 8, b"another"))
    for degree in (0, 59, 60):
        complete = edges(graph.MaskGraph(PEERS, degree, b"seed"))
        assert complete == {one: [p for p in PEERS if p != one] for one in PEERS}


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([0, 2, 4, 8]), st.sets(st.sampled_from(range(60)), min_size=1), st.booleans()
)
def test_it_is_connected_where_a_walk_reaches_all(degree: int, some: set[int], few: bool) -> None:
    made = graph.MaskGraph(PEERS, degree, b"seed")
    among = {PEERS[n] for n in (some if few else set(range(60)) - some or some)}
    near = edges(made)
    reached, waiting = set(), {min(among)}
    while waiting:
        reached |= waiting
        waiting = {other for one in waiting for other in near[one]} & among - reached
    assert made.is_connected(among) == (reached == among)


@pytest.mark.parametrize(("clients", "corrupt", "degree"), [(100, 10, 22), (1000, 100, 66)])
def test_the_threshold_of_shares_bounds_the_corrupt_neighbours(
    clients: int, corrupt: int, degree: int
) -> None:
    """Recomputed with exact fractions of binomial coefficients."""
    threshold = graph.share_threshold(clients, corrupt, degree)

    def chance(least: int) -> float:
        ways = sum(
            math.comb(corrupt, k) * math.comb(clients - 1 - corrupt, degree - k)
            for k in range(least, min(corrupt, degree) + 1)
        )
        return clients * ways / math.comb(clients - 1, degree)

    bound = next(c for c in range(degree) if chance(c + 1) <= 2.0**-41)
    assert threshold == (degree + bound) // 2 + 1
    assert 2 * threshold > degree + bound


def test_neighbours_grow_with_the_logarithm_of_the_clients() -> None:
    found = [neighbours_for(n, corrupt=0.1, dropouts=0.05) for n in (100, 500, 4000)]
    assert found == [22, 56, 74]
    assert neighbours_for(10, corrupt=0.5, dropouts=0.4) == 0  # all of them
    for wrong in ({"corrupt": 1.0, "dropouts": 0}, {"corrupt": 0, "dropouts": -0.1}):
        with pytest.raises(ValueError, match="parts from 0 to below 1"):
            neighbours_for(10, **wrong)
    with pytest.raises(ValueError, match="1 clients"):
        neighbours_for(1, corrupt=0, dropouts=0)


# -- the settings --------------------------------------------------------------------------


def test_the_threshold_is_the_least_that_is_safe() -> None:
    for clients, wanted in ((2, 2), (3, 3), (4, 3), (10, 7), (100, 67)):
        assert RoundPlan.of(SecAggConfig(clients=clients)).threshold == wanted
    assert RoundPlan.of(SecAggConfig(clients=10, corrupt=0.0)).threshold == 6


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"clients": 1}, "clients=1 is outside 2"),
        ({"clients": 10**6}, "outside 2 .. 4096"),
        ({"size": 0}, "size=0"),
        ({"max_rounds": 0}, "max_rounds=0"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"levels": -1}, "levels=-1"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"clip": math.inf}, "clip=inf"),
        ({"corrupt": 1.0}, "corrupt=1.0"),
        ({"clients": 10, "threshold": 6}, "threshold=6 is outside 7 .. 10"),
        ({"clients": 10, "threshold": 11}, "threshold=11"),
        ({"clients": 10, "neighbours": 3}, "no even number"),
        ({"clients": 10, "neighbours": 10}, "no even number"),
        ({"clients": 100, "neighbours": 4}, "are not safe"),
        ({"members": ("nobody",)}, "members: not a PeerId"),
    ],
)
def test_settings_that_can_not_be_are_refused(wrong: dict, why: str) -> None:
    with pytest.raises(InvalidComponentConfig, match=why):
        RoundPlan.of(SecAggConfig(**wrong))


def test_all_that_both_sides_need_is_in_the_digest() -> None:
    changes = [
        {"size": 2},
        {"clients": 5},
        {"threshold": 4},
        {"clip": 2.0},
        {"levels": 9},
        {"equal_weights": False},
        {"equal_weights": False, "max_samples": 9},
        {"clients": 100, "corrupt": 0.1, "neighbours": 22},
        {"clients": 100, "corrupt": 0.1},
    ]
    digests = {RoundPlan.of(SecAggConfig(**change)).digest for change in [{}, *changes]}
    assert len(digests) == len(changes) + 1
    member = str(PeerId.from_seed(0))
    same = RoundPlan.of(SecAggConfig(members=(member,)))
    assert same.digest == RoundPlan.of(SecAggConfig()).digest
