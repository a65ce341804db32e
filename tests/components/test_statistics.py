"""Standardised features, and the statistics behind them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    ComponentError,
    ContributionRefused,
    DataUnavailable,
    InvalidComponentConfig,
    IterableDataSource,
    IterableDataSourceConfig,
    MismatchedShapes,
    NothingToAggregate,
    PooledStatistics,
    PooledStatisticsConfig,
    StatisticsMissing,
    StatisticsRefused,
    TextDataSource,
    TextDataSourceConfig,
    provide,
    withdraw,
)
from bbnode.components.data.statistics import Moments, merged_moments, read_label_counts
from bbnode.components.registry import build_config, encode_config
from bbnode.components.settings import LocalSettingRefused
from bbnode.ir.values import Composite, Metadata, ResponseBatch
from tests.components.fakes import CTX, PEERS, Context

X = np.array([[1, 10, 5], [2, 30, 5], [3, 20, 5], [6, 40, 5]], np.float32)
Y = np.array([0, 2, 2, 1])


@pytest.fixture
def npz(tmp_path) -> Path:
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    return tmp_path / "data.npz"


def source(path: Path, **config) -> ArrayDataSource:
    return ArrayDataSource(ArrayDataSourceConfig(path=str(path), **config))


def of(values: np.ndarray, labels: np.ndarray, **config) -> IterableDataSource:
    provide("measured", (values, labels))
    made = IterableDataSource(IterableDataSourceConfig(provided="measured", **config))
    made.on_data_loaded(CTX)
    withdraw("measured")
    return made


arrays = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 30), st.just(3)),
    elements=st.floats(-1e6, 1e6, width=32),
)


@given(st.lists(arrays, min_size=1, max_size=5))
def test_merged_parts_are_the_whole(parts) -> None:
    whole = np.concatenate(parts)
    merged = merged_moments(Moments.of(part) for part in parts)
    assert merged.count == len(whole)
    scale = np.abs(whole).max() + 1
    np.testing.assert_allclose(merged.mean, whole.mean(axis=0), atol=1e-12 * scale)
    np.testing.assert_allclose(merged.std, whole.std(axis=0), atol=1e-7 * scale)
    np.testing.assert_array_equal(merged.high, whole.max(axis=0))
    again = Moments.read(merged.tensor())
    np.testing.assert_array_equal(again.tensor(), merged.tensor())


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=6)))
def test_any_tensor_of_a_peer_is_read_or_refused(tensor) -> None:
    try:
        moments = Moments.read(tensor, 1e12)
    except ValueError:
        return
    assert np.isfinite(moments.std).all()
    assert np.isfinite(moments.merged(moments).tensor()).all()


@given(st.text("0123456789,- ٣", max_size=30), st.integers(1, 100))
def test_any_label_counts_are_read_or_refused(told, samples) -> None:
    try:
        counts = read_label_counts(Metadata(label_counts=told), samples)
    except ValueError:
        return
    assert sum(counts) in (0, samples)


def test_a_large_mean_does_not_cancel_the_deviation_out() -> None:
    x = np.random.default_rng(0).normal(1e9, 1e-2, (5000, 2))
    merged = merged_moments(Moments.of(part) for part in np.array_split(x, 37))
    np.testing.assert_allclose(merged.std, x.std(axis=0), rtol=1e-6)


def test_a_source_measures_its_own_share(npz) -> None:
    tensor, metadata = source(npz).statistics(CTX)
    np.testing.assert_allclose(tensor[0], 4)
    np.testing.assert_allclose(tensor[1], X.mean(axis=0))
    np.testing.assert_allclose(tensor[2], X.var(axis=0) * 4)
    assert dict(metadata) == {"num_samples": 4, "label_counts": "1,1,2"}
    tensor, metadata = source(npz, shard=1, shards=2).statistics(CTX)
    assert (tensor[0, 0], metadata["num_samples"]) == (2, 2)


def test_features_are_measured_as_they_are_loaded(npz) -> None:
    given_ = source(npz, standardize="given", mean=(1, 2, 3), std=(4, 5, 6))
    np.testing.assert_array_equal(given_.statistics(CTX)[0], source(npz).statistics(CTX)[0])


def test_channels_of_images_and_elements_of_others() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (300, 3, 8, 8)).astype(np.uint8)
    images = of(pixels, np.zeros(300, np.int64), standardize="federated")
    tensor, _ = images.statistics(CTX)
    assert tensor.shape == (5, 3)
    assert tensor[0, 0] == 300 * 64
    np.testing.assert_allclose(tensor[1], pixels.mean(axis=(0, 2, 3)))
    images.standardize(CTX, tensor)
    batch, _ = images.next_batch(CTX)
    assert (batch.shape, batch.dtype) == (pixels.shape, np.float32)
    np.testing.assert_allclose(batch.std(axis=(0, 2, 3)), 1, rtol=1e-5)
    assert of(np.ones((4, 2, 5)), np.zeros(4)).statistics(CTX)[0].shape == (5, 10)
    numbers = of(np.arange(4.0), np.zeros(4), standardize="given", mean=(1.5,), std=(2,))
    assert numbers.statistics(CTX)[0].shape == (5, 1)
    np.testing.assert_allclose(numbers.next_batch(CTX)[0], (np.arange(4) - 1.5) / 2)


def test_labels_that_are_no_classes_are_not_counted() -> None:
    for labels in (np.ones(2, np.float32), np.array([-1, 0]), np.array([0, 1024]),
                   np.zeros((2, 2), np.int64)):  # fmt: skip
        assert "label_counts" not in of(np.ones((2, 2)), labels).statistics(CTX)[1]


def test_given_numbers_and_files_standardise(npz, tmp_path) -> None:
    data = source(npz, standardize="given", mean=(3, 25, 0), std=(1, 5, 5))
    batch, _ = data.next_batch(CTX)
    np.testing.assert_allclose(batch, (X - [3, 25, 0]) / [1, 5, 5])
    assert batch.dtype == np.float32
    (tmp_path / "s.json").write_text(json.dumps({"mean": [3, 25, 0], "std": [1, 5, 0]}))
    data = source(npz, standardize="federated", statistics=str(tmp_path / "s.json"))
    np.testing.assert_allclose(data.next_batch(CTX)[0], (X - [3, 25, 0]) / [1, 5, 1])


def test_nothing_is_given_out_before_the_statistics_are_there(npz) -> None:
    data = source(npz, standardize="federated", batch_size=2)
    data.on_data_loaded(CTX)
    assert data.num_samples == 4
    assert data.schema().features.dtype == "float32"
    with pytest.raises(StatisticsMissing, match="run a program that sends them"):
        data.next_batch(CTX)
    with pytest.raises(StatisticsMissing):
        list(data.epoch_batches(2))
    data.standardize(CTX, data.statistics(CTX)[0])
    assert len(data.next_batch(CTX)[0]) == 2


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (np.zeros((5, 3)), "their count is 0"),
        (Moments.of(np.ones((4, 2))).tensor(), r"of 2 feature\(s\), and the examples have 3"),
        (Moments.of(np.ones((4, 1))).tensor(), r"of 1 feature\(s\), and the examples have 3"),
        (np.ones((5, 3), np.float32), "they are float32"),
        (np.full((5, 3), np.nan), "NaN"),
        ("x", "they are str"),
    ],
)
def test_statistics_that_cannot_be_ours_are_refused(npz, tmp_path, tensor, match) -> None:
    kept = tmp_path / "s.json"
    data = source(npz, standardize="federated", statistics=str(kept))
    with pytest.raises(StatisticsRefused, match=match):
        data.standardize(CTX, tensor)
    assert not kept.exists()
    with pytest.raises(StatisticsMissing):
        data.next_batch(CTX)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 100_000, b"[]", b'{"mean": [1]}', b'{"mean": ["a"], "std": [1]}',
     b'{"mean": [NaN, 1, 1], "std": [1, 1, 1]}', b'{"mean": [1, 2], "std": [1, 2]}',
     b'{"mean": [1, 1, 1], "std": [-1, 1, 1]}', b'{"mean": [[1]], "std": [[1]]}',
     b'{"mean": 1, "std": 1}'],
)  # fmt: skip
def test_a_file_of_garbage_is_refused(npz, tmp_path, content) -> None:
    (tmp_path / "s.json").write_bytes(content)
    data = source(npz, standardize="federated", statistics=str(tmp_path / "s.json"))
    with pytest.raises(DataUnavailable, match=r"s\.json"):
        data.next_batch(CTX)


def test_a_file_that_cannot_be_written_is_named(npz, tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    data = source(npz, statistics=str(tmp_path / "none" / "s.json"))
    with pytest.raises(DataUnavailable, match=r"cannot write .*none"):
        data.standardize(CTX, data.statistics(CTX)[0])
    waits = source(npz, standardize="federated", statistics=str(tmp_path / "fifo"))
    with pytest.raises(DataUnavailable, match="is a FIFO"):
        waits.next_batch(CTX)


def test_what_was_sent_survives_a_restart_and_other_states_are_refused(npz) -> None:
    first = source(npz, standardize="federated", batch_size=2)
    first.standardize(CTX, first.statistics(CTX)[0])
    first.next_batch(CTX)
    second = source(npz, standardize="federated", batch_size=2)
    second.restore(first.serialize())
    np.testing.assert_array_equal(first.next_batch(CTX)[0], second.next_batch(CTX)[0])
    plain = source(npz, batch_size=2)
    plain.restore(source(npz).serialize())
    for bad in (b"\x81\xa8position\xc4\x00", b"junk", first.serialize()[:-3]):
        with pytest.raises(ComponentError, match="not ours"):
            source(npz, standardize="federated").restore(bad)


def test_nan_in_the_data_is_named(tmp_path) -> None:
    made = of(np.array([[1, 2], [np.inf, 3]]), np.zeros(2))
    with pytest.raises(DataUnavailable, match="feature 0 has NaN or infinity in examples 0 to 1"):
        made.statistics(CTX)


def test_a_source_of_text_has_no_statistics(tmp_path) -> None:
    text = TextDataSource(TextDataSourceConfig(path=str(tmp_path / "t")))
    with pytest.raises(ComponentError, match="bind a source of numbers"):
        text.statistics(CTX)
    with pytest.raises(ComponentError, match="bind a source of numbers"):
        text.standardize(CTX, np.ones((5, 1)))


@pytest.mark.parametrize(
    "config",
    [
        {"standardize": "yes"}, {"standardize": "given"}, {"mean": (1,)}, {"std": (1,)},
        {"standardize": "given", "mean": (1,)}, {"standardize": "federated", "mean": (1,)},
        {"standardize": "given", "mean": (1,), "std": (0,)},
        {"standardize": "given", "mean": (float("nan"),), "std": (1,)},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(npz, config) -> None:
    with pytest.raises(InvalidComponentConfig):
        source(npz, **config)


def test_an_artifact_may_ask_for_standardised_features_and_names_no_file() -> None:
    stored = encode_config(ArrayDataSourceConfig(path="", standardize="federated"))
    config = build_config(ArrayDataSource, "data", stored, {"path": "x.npz"})
    assert config.standardize == "federated"
    stored = encode_config(ArrayDataSourceConfig(path="x", statistics="/etc/passwd"))
    with pytest.raises(LocalSettingRefused):
        build_config(ArrayDataSource, "data", stored, {"path": "x.npz"})


# --- merging -------------------------------------------------------------------------------


def pool(**config) -> PooledStatistics:
    return PooledStatistics(PooledStatisticsConfig(**config))


def said(values: np.ndarray, labels=None) -> Composite:
    return Composite(
        of(values, np.zeros(len(values)) if labels is None else labels).statistics(CTX)
    )


def answers(*parts: Composite) -> ResponseBatch:
    return ResponseBatch(responses=tuple(zip(PEERS, parts, strict=False)))


def test_rounds_do_not_mix_and_give_way() -> None:
    made = pool(max_rounds=2)
    for execution in (1, 2, 3):
        part = said(np.full((execution, 2), float(execution)))
        made.contribute_all(Context(execution=execution), answers(part))
    with pytest.raises(NothingToAggregate):
        made.aggregate(Context(execution=1))
    assert made.aggregate(Context(execution=2))[1]["num_samples"] == 2
    assert made.aggregate(Context(execution=3))[0][1].tolist() == [3.0, 3.0]
    assert made.current_tensor(CTX)[1].tolist() == [3.0, 3.0]


def test_the_order_of_arrival_does_not_matter() -> None:
    parts = [said(np.random.default_rng(i).normal(size=(i + 3, 2))) for i in range(4)]
    one, two = pool(), pool()
    for made, order in ((one, [0, 1, 2, 3]), (two, [3, 1, 0, 2])):
        for i in order:
            made.contribute(Context(source_peer=PEERS[i]), *parts[i])
    assert one.aggregate(CTX)[0].tobytes() == two.aggregate(CTX)[0].tobytes()


def test_the_majority_says_how_many_features_there_are() -> None:
    ctx = Context()
    made = pool()
    wide = said(np.ones((2, 3)))
    made.contribute_all(ctx, answers(wide, wide, said(np.ones((2, 2)))))
    tensor, metadata = made.aggregate(ctx)
    assert (tensor.shape, metadata["contributors"], metadata["refused"]) == ((5, 3), 2, 1)
    assert ctx.refused == {PEERS[2]: "its statistics are of 2 feature(s), not 3"}
    made.contribute_all(CTX, answers(wide, said(np.ones((2, 2)))))
    with pytest.raises(MismatchedShapes):
        made.aggregate(CTX)
    with pytest.raises(ContributionRefused, match=r"of 3 feature\(s\), not 2"):
        pool(features=2).contribute(CTX, *wide)


def test_too_many_and_only_bad_contributions_are_refused() -> None:
    made = pool(max_contributors=1)
    part = said(np.ones((2, 2)))
    made.contribute(Context(source_peer=PEERS[0]), *part)
    made.contribute(Context(source_peer=PEERS[0]), *part)
    with pytest.raises(ContributionRefused, match="max_contributors"):
        made.contribute(Context(source_peer=PEERS[1]), *part)
    with pytest.raises(ContributionRefused, match="not a composite"):
        pool().contribute_all(CTX, answers(Composite((np.ones(2),))))
    with pytest.raises(ContributionRefused, match="its metadata is int"):
        pool().contribute(CTX, part[0], 3)


def test_label_counts_add_up_where_all_have_them() -> None:
    made = pool()
    x = np.ones((3, 1))
    a, b = said(x, np.array([0, 0, 3])), said(x, np.array([1, 1, 0]))
    made.contribute_all(CTX, answers(a, b))
    assert made.aggregate(CTX)[1]["label_counts"] == "3,2,0,1"
    made.contribute_all(CTX, answers(a, said(x)))
    assert "label_counts" not in made.aggregate(CTX)[1]


def test_waiting_contributions_survive_a_restart() -> None:
    one, two = pool(), pool()
    assert one.serialize() == b""
    part = said(np.array([[1.0], [3.0]]))
    ctx = Context()
    one.contribute_all(ctx, answers(part, Composite((np.ones(2), Metadata()))))
    two.restore(one.serialize())
    (a, said_a), (b, said_b) = one.aggregate(ctx), two.aggregate(ctx)
    assert (a.tobytes(), said_a) == (b.tobytes(), said_b)
    assert said_a["refused"] == 1
    two.restore(one.serialize())
    np.testing.assert_array_equal(two.current_tensor(CTX), a)
    with pytest.raises(ComponentError, match="not ours"):
        pool().restore(b"junk")


@pytest.mark.parametrize(
    "config", [{"max_samples": 0}, {"max_abs": 0}, {"max_rounds": 0}, {"features": 0}]
)
def test_bounds_that_make_no_sense_are_refused(config) -> None:
    with pytest.raises(InvalidComponentConfig):
        pool(**config)
