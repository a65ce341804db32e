from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from bbnode.components import errors
from bbnode.components.contracts import ComponentError, is_offloaded, only_reads
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.data.sklearn import SklearnDataSource, SklearnDataSourceConfig, _fetch
from tests.components.fakes import CTX


def digits(**config) -> SklearnDataSource:
    return SklearnDataSource(SklearnDataSourceConfig(**config))


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(20.0).reshape(10, 2), y=np.arange(10, dtype=np.int32))
    return path


def array_source(path, **config) -> ArrayDataSource:
    return ArrayDataSource(ArrayDataSourceConfig(path=str(path), **config))


def test_digits_are_scaled_and_split_by_class() -> None:
    train, test = digits(), digits(split="test")
    (x, y), (tx, ty) = train.next_batch(CTX), test.next_batch(CTX)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert len(x) + len(tx) == 1797
    assert x.shape[1:] == (64,)
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert set(np.unique(x * 16)) <= set(range(17))
    share = np.bincount(ty) / (np.bincount(y) + np.bincount(ty))
    assert np.all(abs(share - 0.2) < 0.01)
    assert train.num_samples == len(x)
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 0


def test_shards_hold_few_classes_and_iid_all() -> None:
    for shard in range(4):
        _, labels = digits(shard=shard, shards=4, partition="shards").next_batch(CTX)
        assert len(np.unique(labels)) <= 6
        _, labels = digits(shard=shard, shards=4).next_batch(CTX)
        assert len(np.unique(labels)) == 10


def test_the_held_out_part_stays_when_the_seed_changes() -> None:
    (a, _), (b, _) = (digits(split="test", seed=s).next_batch(CTX) for s in (0, 1))
    np.testing.assert_array_equal(a, b)
    (c, _) = digits(split="test", split_seed=1).next_batch(CTX)
    assert not np.array_equal(a, c)
    (d, _), (e, _) = (digits(shards=2, seed=s).next_batch(CTX) for s in (0, 1))
    assert not np.array_equal(d, e)


@pytest.mark.parametrize("dataset", ["iris", "wine", "breast_cancer"])
def test_other_sets_are_scaled_by_their_training_part(dataset: str) -> None:
    x, y = digits(dataset=dataset).next_batch(CTX)
    assert x.min() == 0.0
    assert x.max() == 1.0
    assert x.dtype == np.float32
    assert len(x) == len(y)


def test_epochs_are_shuffled_whole_and_repeatable(npz) -> None:
    one, two = array_source(npz, seed=4), array_source(npz, seed=4)
    orders = []
    for _ in range(5):
        batches = one.epoch_batches(4)
        assert [len(x) for x, _ in batches] == [4, 4, 2]
        order = np.concatenate([y for _, y in batches])
        np.testing.assert_array_equal(np.sort(order), np.arange(10))
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches])[:, 0], order * 2)
        np.testing.assert_array_equal(order, np.concatenate([y for _, y in two.epoch_batches(4)]))
        orders.append(tuple(order))
    assert len(set(orders)) == 5
    one.reset(CTX)
    assert tuple(np.concatenate([y for _, y in one.epoch_batches(10)])) == orders[0]


def test_clients_of_one_seed_shuffle_apart() -> None:
    a, b = digits(shard=0, shards=2), digits(shard=1, shards=2)
    assert a.num_samples == b.num_samples
    assert not np.array_equal(a._order(0), b._order(0))


def test_next_batch_goes_through_the_epochs_and_survives_a_restart(npz) -> None:
    def numbers(source: ArrayDataSource, count: int) -> list[int]:
        return [int(n) for _ in range(count) for n in source.next_batch(CTX)[1]]

    whole, first = array_source(npz, batch_size=4), array_source(npz, batch_size=4)
    expected = numbers(whole, 6)
    assert sorted(expected[:10]) == list(range(10)) == sorted(expected[10:])
    got = numbers(first, 2)
    second = array_source(npz, batch_size=4)
    second.restore(first.serialize())
    assert got + numbers(second, 4) == expected
    # A model that trains starts a new epoch, whatever NextBatch has left.
    assert sum(len(x) for x, _ in first.epoch_batches(3)) == 10


def test_the_whole_source_is_one_batch_in_its_own_order(npz) -> None:
    source = array_source(npz)
    for _ in range(2):
        x, y = source.next_batch(CTX)
        np.testing.assert_array_equal(y, np.arange(10))
        assert (x.dtype, y.dtype) == (np.float32, np.int64)


def test_loading_is_left_to_a_worker_thread() -> None:
    source = digits()
    assert source._loaded is None
    assert is_offloaded(SklearnDataSource.next_batch)
    assert is_offloaded(SklearnDataSource.on_data_loaded)
    source.on_data_loaded(CTX)
    assert source._loaded is not None


def test_the_bootstrap_loads_and_leaves_the_state_alone() -> None:
    source = digits(batch_size=8)
    before = source.serialize()
    assert is_offloaded(SklearnDataSource.bootstrap)
    assert only_reads(SklearnDataSource.bootstrap)
    source.bootstrap(CTX)
    assert source._loaded is not None
    assert source.serialize() == before


def test_without_scikit_learn_the_command_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(errors.DataUnavailable, match=r"pip install 'scikit-learn>=1.7.2'"):
        digits().next_batch(CTX)


@pytest.mark.parametrize("dataset", ["digits", "iris", "wine", "breast_cancer"])
def test_the_files_hold_what_scikit_learn_loads_of_them(dataset) -> None:
    features, labels = _fetch(dataset, "test")
    expected = getattr(datasets, f"load_{dataset}")(return_X_y=True)
    np.testing.assert_array_equal(features, expected[0])
    np.testing.assert_array_equal(labels, expected[1])
    assert labels.dtype == np.int64


def test_loading_does_not_import_scikit_learn() -> None:
    # Its import takes seconds, in each daemon of a machine.
    program = (
        "import sys\n"
        "from bbnode.components.data.sklearn import SklearnDataSource, SklearnDataSourceConfig\n"
        "assert SklearnDataSource(SklearnDataSourceConfig()).num_samples > 0\n"
        "assert not {'sklearn', 'scipy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("content", [None, b"not gzip", b"\x1f\x8b\x08\x00"])
def test_a_broken_installation_of_scikit_learn_is_named(monkeypatch, tmp_path, content) -> None:
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    if content is not None:
        (folder / "digits.csv.gz").write_bytes(content)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.DataUnavailable, match=r"digits\.csv\.gz can't be read"):
        digits().next_batch(CTX)


@pytest.mark.parametrize(
    "config",
    [
        {"dataset": "mnist"}, {"shard": 4, "shards": 4}, {"shard": -1}, {"test_fraction": 0.0},
        {"test_fraction": 1.5}, {"split": "validation"}, {"split": "half"},
        {"partition": "by hand"}, {"alpha": 0.0}, {"alpha": float("nan")},
        {"validation_fraction": 0.8}, {"validation_fraction": -0.1},
        {"batch_size": -1}, {"seed": -1}, {"split_seed": -1},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(config) -> None:
    with pytest.raises(errors.InvalidComponentConfig):
        digits(**config)


def test_more_shards_than_examples_is_refused() -> None:
    with pytest.raises(errors.DataUnavailable, match="is empty; use fewer shards"):
        digits(dataset="iris", shard=149, shards=150).next_batch(CTX)


def test_bad_batches_and_bad_states_are_refused(npz) -> None:
    with pytest.raises(ComponentError, match="a batch of 0"):
        array_source(npz).epoch_batches(0)
    for data in (b"\xc1", b"\x80", b"\x01", b"\x82\xa5epoch\xff\xa6cursor\x00"):
        with pytest.raises(ComponentError):
            array_source(npz).restore(data)


def test_whole_numbers_are_classes_unless_a_node_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "numbers.npz"
    np.savez(path, x=np.zeros((4, 1), np.float32), y=np.array([3, 1, 2, 5]))
    auto = ArrayDataSource(ArrayDataSourceConfig(path=str(path)))
    assert auto.schema().labels.dtype == "int64"
    config = ArrayDataSourceConfig(path=str(path), label_dtype="float32", split="train")
    source = ArrayDataSource(config)
    assert (source.schema().labels.dtype, source.schema().label_range) == ("float32", None)
    for _, labels in source.epoch_batches(2):
        assert labels.dtype == np.float32
        assert not labels.flags.writeable
    with pytest.raises(ComponentError, match="unknown label_dtype 'int8'"):
        ArrayDataSource(ArrayDataSourceConfig(path=str(path), label_dtype="int8"))  # type: ignore[arg-type]
