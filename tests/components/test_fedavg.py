from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import errors
from bbnode.components.aggregators.fedavg import FedAvg, FedAvgConfig, capped
from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.contracts import ComponentError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch
from tests.components.fakes import CTX, PEERS, Context, fedavg

RNG = np.random.default_rng(0)
TENSORS = [RNG.normal(size=1000).astype(np.float32) for _ in range(5)]
COUNTS = [359, 17, 1, 100_000, 360]


def give(aggregator: FedAvg, index: int, tensor=None, **metadata) -> None:
    known = {"num_samples": COUNTS[index], **metadata}
    aggregator.contribute(
        Context(source_peer=PEERS[index]),
        TENSORS[index] if tensor is None else tensor,
        Metadata(known),
    )


def test_the_mean_is_weighted_by_samples() -> None:
    aggregator = fedavg(max_share=1.0)
    for index in range(5):
        give(aggregator, index, loss=float(index))
    tensor, metadata = aggregator.aggregate(CTX)
    expected = np.average(np.asarray(TENSORS, np.float64), axis=0, weights=COUNTS)
    np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-6)
    assert tensor.dtype == np.float32
    assert dict(metadata) == {
        "num_samples": sum(COUNTS),
        "contributors": 5,
        "refused": 0,
        "loss": pytest.approx(np.average(range(5), weights=COUNTS)),
    }
    np.testing.assert_array_equal(aggregator.current_tensor(CTX), tensor)
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
def test_what_all_agree_on_is_the_mean_to_the_bit(peers: int) -> None:
    # Whole numbers up to 2^20: with weights rounded to float32, thirds of 12290 do not add up.
    agreed = np.concatenate([np.arange(12_000, 13_000), [0, 1, 1 << 20, -12_290]])
    aggregator = fedavg()
    for index in range(peers):
        give(aggregator, index, agreed.astype(np.float32), num_samples=7)
    np.testing.assert_array_equal(aggregator.aggregate(CTX)[0], agreed)


def test_every_order_of_arrival_gives_the_same_bits() -> None:
    results = set()
    aggregator = fedavg()
    for order in itertools.permutations(range(5)):
        for index in order:
            give(aggregator, index, loss=0.1 * index)
        tensor, metadata = aggregator.aggregate(CTX)
        results.add((tensor.tobytes(), metadata["loss"], metadata["num_samples"]))
    assert len(results) == 1


def test_another_backend_gives_the_same_mean() -> None:
    means = []
    for backend in (None, ReferenceBackend(ReferenceBackendConfig())):
        aggregator = fedavg()
        if backend is not None:
            aggregator.bind({"backend": backend})
        for index in range(5):
            give(aggregator, index)
        means.append(aggregator.aggregate(CTX)[0])
    np.testing.assert_allclose(means[0], means[1], rtol=1e-6)


def test_averages_of_averages_weigh_as_one() -> None:
    leaves = [fedavg(max_share=1.0), fedavg(max_share=1.0)]
    for index in range(5):
        give(leaves[index % 2], index)
    root, flat = fedavg(max_share=1.0), fedavg(max_share=1.0)
    for peer, leaf in zip(PEERS, leaves, strict=False):
        tensor, metadata = leaf.aggregate(CTX)
        root.contribute(Context(source_peer=peer), tensor, metadata)
    for index in range(5):
        give(flat, index)
    layered, summary = root.aggregate(CTX)
    np.testing.assert_allclose(layered, flat.aggregate(CTX)[0], rtol=1e-4, atol=1e-6)
    assert summary["num_samples"] == sum(COUNTS)


def test_a_second_contribution_replaces_the_first() -> None:
    aggregator = fedavg()
    give(aggregator, 0, np.full(3, 9, np.float32))
    give(aggregator, 0, np.full(3, 1, np.float32))
    tensor, metadata = aggregator.aggregate(CTX)
    np.testing.assert_array_equal(tensor, [1, 1, 1])
    assert metadata["contributors"] == 1


def test_without_a_sender_it_is_ones_own_contribution() -> None:
    aggregator = fedavg()
    aggregator.contribute(CTX, TENSORS[0], Metadata(num_samples=1))
    give(aggregator, 0, TENSORS[0])  # PEERS[0] is the node itself
    assert aggregator.aggregate(CTX)[1]["contributors"] == 1


def test_each_round_starts_empty() -> None:
    aggregator = fedavg()
    with pytest.raises(errors.NothingToAggregate, match="Contribute"):
        aggregator.aggregate(CTX)
    with pytest.raises(errors.NothingToAggregate):
        aggregator.current_tensor(CTX)
    give(aggregator, 0)
    aggregator.aggregate(CTX)
    with pytest.raises(errors.NothingToAggregate):
        aggregator.aggregate(CTX)


BAD = {
    "NaN": (np.array([1, np.nan], np.float32), {"num_samples": 5}, "NaN or infinity"),
    "inf": (np.array([1, np.inf], np.float32), {"num_samples": 5}, "NaN or infinity"),
    "zero": (np.ones(2, np.float32), {"num_samples": 0}, "num_samples is 0"),
    "negative": (np.ones(2, np.float32), {"num_samples": -3}, "num_samples is -3"),
    "absurd": (np.ones(2, np.float32), {"num_samples": 10**15}, "max_samples"),
    "float": (np.ones(2, np.float32), {"num_samples": 2.5}, "not an integer"),
    "bool": (np.ones(2, np.float32), {"num_samples": True}, "not an integer"),
    "missing": (np.ones(2, np.float32), {}, "num_samples is None"),
    "loss": (np.ones(2, np.float32), {"num_samples": 5, "loss": float("nan")}, "loss is nan"),
    "huge loss": (np.ones(2, np.float32), {"num_samples": 5, "loss": 1e308}, "loss is 1e+308"),
    "loss -inf": (np.ones(2, np.float32), {"num_samples": 5, "loss": -np.inf}, "loss is -inf"),
    "long loss": (np.ones(2, np.float32), {"num_samples": 5, "loss": 1 << 9999}, "beyond 64 bits"),
    "text": (np.ones(2, np.float32), {"num_samples": "\x1b[2J" * 9999}, "num_samples is str, not"),
    "huge": (np.array([1, 3e38], np.float32), {"num_samples": 5}, "beyond 1.67772e+07 (max_abs)"),
    "-huge": (np.array([-3e38, 1], np.float32), {"num_samples": 5}, "(max_abs)"),
    "dtype": (np.ones(2), {"num_samples": 5}, "float64, not float32"),
    "no tensor": ("weights", {"num_samples": 5}, "str, not float32"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_contribution_is_refused_and_named(kind: str) -> None:
    tensor, metadata, reason = BAD[kind]
    aggregator = fedavg()
    give(aggregator, 1, np.full(2, 7, np.float32))
    with pytest.raises(errors.ContributionRefused) as caught:
        aggregator.contribute(Context(source_peer=PEERS[0]), tensor, Metadata(metadata))
    assert reason in str(caught.value)
    assert str(PEERS[0]) in str(caught.value)
    assert caught.value.peer == str(PEERS[0])
    np.testing.assert_array_equal(aggregator.aggregate(CTX)[0], [7, 7])


def test_a_refused_contribution_does_not_replace_a_good_one() -> None:
    aggregator = fedavg()
    give(aggregator, 0, np.ones(2, np.float32))
    with pytest.raises(errors.ContributionRefused):
        give(aggregator, 0, np.array([np.nan, 1], np.float32))
    np.testing.assert_array_equal(aggregator.aggregate(CTX)[0], [1, 1])


def answer(value, **metadata) -> Composite:
    return Composite((np.asarray(value, np.float32), Metadata(metadata)))


def test_a_cohort_is_taken_without_its_bad_answers() -> None:
    aggregator, ctx = fedavg(), Context()
    batch = ResponseBatch(
        responses=(
            (PEERS[0], answer([2, 4], num_samples=1)),
            (PEERS[1], answer([np.nan, 0], num_samples=1)),
            (PEERS[2], Metadata(num_samples=1)),
            (PEERS[3], answer([4, 8], num_samples=3)),
            (PEERS[4], answer([4, 8, 9], num_samples=3)),
        ),
        missing=(PEERS[5],),
    )
    aggregator.contribute_all(ctx, batch)
    assert set(ctx.refused) == {PEERS[1], PEERS[2]}
    # A shape is wrong only in comparison with the others.
    tensor, metadata = aggregator.aggregate(ctx)
    assert set(ctx.refused) == {PEERS[1], PEERS[2], PEERS[4]}
    np.testing.assert_allclose(tensor, [3.5, 7.0])
    assert (metadata["contributors"], metadata["refused"], metadata["num_samples"]) == (2, 3, 4)
    assert metadata["refused_why"] == (
        f"{PEERS[1]}: its tensor holds NaN or infinity; "
        f"{PEERS[2]}: the answer is not a composite of (tensor, metadata); "
        f"{PEERS[4]}: its tensor has the shape [3], not [2]"
    )


def test_a_cohort_of_only_bad_answers_fails() -> None:
    aggregator = fedavg()
    batch = ResponseBatch(responses=((PEERS[1], answer([np.nan], num_samples=1)),))
    with pytest.raises(errors.ContributionRefused, match=str(PEERS[1])):
        aggregator.contribute_all(CTX, batch)


def test_shapes_without_a_majority_name_the_peers() -> None:
    aggregator = fedavg()
    give(aggregator, 1, np.ones(2, np.float32))
    give(aggregator, 0, np.ones(3, np.float32))
    with pytest.raises(errors.MismatchedShapes) as caught:
        aggregator.aggregate(CTX)
    assert caught.value.shapes == {str(PEERS[0]): (3,), str(PEERS[1]): (2,)}
    give(aggregator, 2, np.ones(4, np.float32))  # the next round is not haunted by this one
    assert aggregator.aggregate(CTX)[0].shape == (4,)


def test_any_shape_is_averaged() -> None:
    aggregator = fedavg()
    for index in range(3):
        give(aggregator, index, np.full((2, 3), index, np.float32))
    assert aggregator.aggregate(CTX)[0].shape == (2, 3)


def test_contributors_are_bounded_but_may_replace() -> None:
    aggregator = fedavg(max_contributors=2)
    give(aggregator, 0)
    give(aggregator, 1)
    with pytest.raises(errors.ContributionRefused, match="max_contributors"):
        give(aggregator, 2)
    give(aggregator, 1)
    assert aggregator.aggregate(CTX)[1]["contributors"] == 2


def test_the_state_comes_back() -> None:
    first, second = fedavg(), fedavg()
    give(first, 4)
    first.aggregate(CTX)
    batch = ResponseBatch(
        responses=(
            (PEERS[0], Composite((TENSORS[0], Metadata(num_samples=7, loss=0.5)))),
            (PEERS[1], answer([np.inf], num_samples=1)),
        )
    )
    first.contribute_all(CTX, batch)
    second.restore(first.serialize())
    np.testing.assert_array_equal(second.current_tensor(CTX), TENSORS[4])
    for aggregator in (first, second):
        give(aggregator, 2, loss=0.25)
    one, two = first.aggregate(CTX), second.aggregate(CTX)
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1] == two[1]
    assert one[1]["refused"] == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_bytes_that_are_no_state_are_refused(junk: bytes, at: int, byte: int) -> None:
    aggregator = fedavg()
    give(aggregator, 0, np.ones(4, np.float32))
    changed = bytearray(aggregator.serialize())
    changed[at % len(changed)] = byte
    for data in (junk, bytes(changed)):
        fresh = FedAvg(FedAvgConfig())
        try:
            fresh.restore(data)
        except ComponentError:
            continue
        fresh.serialize()  # what was taken up is whole


def test_settings_out_of_range_are_refused() -> None:
    bad: dict[str, list[Any]] = {
        "max_share": [0.0, -0.1, 1.01, math.nan],
        "max_abs": [0.0, -1.0, math.inf, math.nan],
        "shape": [(3, -1)],
    }
    for field in dataclasses.fields(FedAvgConfig):
        for value in bad.get(field.name, [0]):
            with pytest.raises(errors.InvalidComponentConfig):
                fedavg(**{field.name: value})


# --- members that lie -----------------------------------------------------------------------


def cohort(*answers: Composite) -> ResponseBatch:
    return ResponseBatch(responses=tuple(zip(PEERS, answers, strict=False)))


def test_nobody_has_more_than_its_share_whatever_it_says() -> None:
    aggregator = fedavg()
    aggregator.contribute_all(
        CTX,
        cohort(
            answer([0.0], num_samples=100, loss=1.0),
            answer([0.0], num_samples=300, loss=1.0),
            answer([8.0], num_samples=1_000_000, loss=3.0),
        ),
    )
    mean, stats = aggregator.aggregate(CTX)
    assert mean.tolist() == [4.0]
    assert dict(stats) == {
        "num_samples": 800, "contributors": 3, "refused": 0, "clipped": 1, "loss": 2.0,
    }  # fmt: skip


def test_two_peers_weigh_what_they_say() -> None:
    aggregator = fedavg()
    aggregator.contribute_all(
        CTX, cohort(answer([0.0], num_samples=1), answer([8.0], num_samples=3))
    )
    assert aggregator.aggregate(CTX)[0].tolist() == [6.0]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([5], 0.1, [5]),
        ([1, 9], 0.5, [1, 9]),
        ([1, 1, 9], 0.5, [1, 1, 2]),
        ([1, 1, 9], 1.0, [1, 1, 9]),
        ([4, 4, 4], 0.1, [4, 4, 4]),
        ([1, 2, 3], 0.1, [1, 1, 1]),
        ([10, 10, 10, 10, 100, 1000], 0.25, [10, 10, 10, 10, 20, 20]),
    ],
)
def test_counts_are_cut_to_a_share(counts, share, expected) -> None:
    assert capped(counts, share) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=40), st.floats(0.01, 1.0))
def test_no_count_is_more_than_the_share(counts: list[int], share: float) -> None:
    made = capped(counts, share)
    bound = max(share, 1 / len(counts))
    assert all(1 <= after <= before for before, after in zip(counts, made, strict=True))
    # A cut count is rounded down to whole samples, and the sum with it.
    assert max(made) <= bound * (sum(made) + len(made)) + 1e-6
    uncut = [n for n, m in zip(counts, made, strict=True) if n == m]
    assert made == [min(n, max(made)) for n in counts]
    assert uncut or len(set(made)) == 1


def test_a_liar_cannot_end_the_rounds_with_another_shape() -> None:
    aggregator = fedavg()
    good, other = answer([1.0, 2.0], num_samples=1), answer([1.0], num_samples=1)
    aggregator.contribute_all(CTX, cohort(good))
    aggregator.aggregate(CTX)
    # One of two: the shape of the last aggregate decides.
    aggregator.contribute_all(CTX, cohort(other, good))
    mean, stats = aggregator.aggregate(CTX)
    assert mean.tolist() == [1.0, 2.0]
    assert stats["refused_why"] == f"{PEERS[0]}: its tensor has the shape [1], not [2]"


def test_a_shape_that_is_configured_is_the_only_one() -> None:
    aggregator, ctx = fedavg(shape=(2,)), Context()
    good, other = answer([1.0, 2.0], num_samples=1), answer([1.0], num_samples=1)
    aggregator.contribute_all(ctx, cohort(other, other, good))
    assert aggregator.aggregate(ctx)[0].tolist() == [1.0, 2.0]
    assert ctx.refused == dict.fromkeys(PEERS[:2], "its tensor has the shape [1], not [2]")


def test_a_mean_that_is_not_finite_is_none() -> None:
    aggregator = fedavg()
    aggregator.contribute_all(CTX, cohort(answer([1.0], num_samples=1)))
    aggregator.aggregate(CTX)
    broken = fedavg()
    broken.bind({"backend": _Overflowing()})
    broken.restore(aggregator.serialize())
    broken.contribute_all(CTX, cohort(*[answer([2.0], num_samples=1)] * 2))
    with pytest.raises(errors.NonFiniteAggregate, match="max_abs"):
        broken.aggregate(CTX)
    assert broken.current_tensor(CTX).tolist() == [1.0]


class _Overflowing(ReferenceBackend):
    """A backend whose sums overflow."""

    def __init__(self) -> None:
        super().__init__(ReferenceBackendConfig())

    def prepare(self, model: Any) -> Any:
        class Graph:
            def run(self, inputs: Any) -> list[Any]:
                return [np.full_like(inputs[0], np.inf)]

        return Graph()


_LIES = st.sampled_from(
    [
        {"tensor": np.array([3e38, 0, 0], np.float32)},
        {"tensor": np.array([np.nan, 0, 0], np.float32)},
        {"tensor": np.array([0, -np.inf, 0], np.float32)},
        {"tensor": np.zeros((1, 3), np.float32)},
        {"tensor": np.zeros(0, np.float32)},
        {"tensor": np.zeros(3, np.float64)},
        {"tensor": Metadata(a=1)},
        {"num_samples": 10**9},
        {"num_samples": 0},
        {"num_samples": -1},
        {"num_samples": 1 << 80},
        {"num_samples": 1.0},
        {"num_samples": "9"},
        {"loss": 1e308},
        {"loss": math.nan},
        {"loss": "low"},
        {"whole": Composite(())},
        {"whole": np.zeros(3, np.float32)},
    ]
)
_HONEST = st.tuples(
    st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3),
    st.integers(1, 10**6),
    st.none() | st.floats(-1e6, 1e6),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    honest=st.lists(_HONEST, min_size=1, max_size=5),
    lies=st.lists(_LIES, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_lies_leave_the_mean_of_the_honest(honest: Any, lies: Any, order: Any) -> None:
    given_: list[Any] = []
    for values, count, loss in honest:
        known = {"num_samples": count} | ({} if loss is None else {"loss": loss})
        given_.append(Composite((np.array(values, np.float32), Metadata(known))))
    for lie in lies:
        known = {"num_samples": 7, "loss": 0.5}
        known |= {name: lie[name] for name in lie if name in known}
        tensor = lie.get("tensor", np.full(3, 5, np.float32))
        given_.append(lie.get("whole", Composite((tensor, Metadata(known)))))
    people = [PeerId.from_seed(n) for n in range(len(given_))]
    pairs = list(zip(people, given_, strict=True))
    results = []
    for _ in range(2):
        order.shuffle(pairs)
        aggregator, ctx = fedavg(shape=(3,)), Context()
        aggregator.contribute_all(ctx, ResponseBatch(responses=tuple(pairs)))
        mean, stats = aggregator.aggregate(ctx)
        assert set(ctx.refused) == set(people[len(honest) :])
        results.append((mean.tobytes(), dict(stats)))
    assert results[0] == results[1]
    counts = capped([count for _, count, _ in honest], 0.5)
    expected = np.average([values for values, _, _ in honest], axis=0, weights=counts)
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-3)
    assert stats["contributors"] == len(honest)
    assert stats["num_samples"] == sum(counts)
    assert all(math.isfinite(v) for v in stats.values() if isinstance(v, float))
    losses = [(loss, n) for (_, _, loss), n in zip(honest, counts, strict=True) if loss is not None]
    if losses:
        mean_loss = np.average([x for x, _ in losses], weights=[n for _, n in losses])
        assert stats["loss"] == pytest.approx(mean_loss, abs=1e-6)
