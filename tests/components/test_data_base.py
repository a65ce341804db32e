"""The base of data sources: lazy epochs, splits and shares, schemas, positions."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import DataSource, errors
from bbnode.components.data.base import MemoryDataSource, SplitConfig, SplitDataSource
from bbnode.components.data.schema import DataSchema, TensorSchema
from bbnode.ir import types
from tests.components.fakes import CTX


@dataclass(frozen=True)
class Plain:
    batch_size: int = 0
    seed: int = 0


class Squares(SplitDataSource):
    """Example i has the feature i and the label i mod 5."""

    TYPE_NAME: ClassVar[str] = "test.Squares"
    size = 200

    def load(self):
        return np.arange(self.size, dtype=np.float32)[:, None], np.arange(self.size) % 5


def squares(**config) -> Squares:
    return Squares(SplitConfig(**config))


def held(source: DataSource) -> set[int]:
    return {int(n) for n in source.next_batch(CTX)[0][:, 0]}


class Gathering:
    """Values that count the rows they are asked for."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.most, self.total = values, 0, 0
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows):
        self.most, self.total = max(self.most, len(rows)), self.total + len(rows)
        return self.values[rows]


class Counted(MemoryDataSource):
    TYPE_NAME: ClassVar[str] = "test.Counted"

    def __init__(self, config: Plain) -> None:
        super().__init__(config)
        self.gathering = Gathering(np.zeros((1000, 3), np.uint8))

    def load(self):
        return self.gathering, np.zeros(1000, np.int64)


def test_an_epoch_gathers_one_batch_at_a_time() -> None:
    source = Counted(Plain())
    batches = source.epoch_batches(64)
    assert source.gathering.total == 0
    assert len(batches) == 16
    sizes = [len(x) for x, _ in batches]
    assert sizes == [64] * 15 + [1000 - 15 * 64]
    assert (source.gathering.most, source.gathering.total) == (64, 1000)
    assert [len(x) for x, _ in batches[-2:]] == [64, 40]
    with pytest.raises(IndexError):
        batches[16]


def test_the_memory_of_an_epoch_is_one_batch(tmp_path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((4000, 1000), np.float32))  # 16 MB

    class Mapped(MemoryDataSource):
        TYPE_NAME: ClassVar[str] = "test.Mapped"

        def load(self):
            return np.load(path, mmap_mode="r"), np.zeros(4000, np.int64)

    source = Mapped(Plain())
    assert source.num_samples == 4000
    tracemalloc.start()
    try:
        total = sum(float(x[:, 0].sum()) for x, _ in source.epoch_batches(50))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 4000
    # Two batches of 200 kB, as the next one is gathered before the last one is let go, and rows.
    assert peak < 700_000


def test_batches_are_read_only_and_the_same_when_asked_again() -> None:
    batches = squares(seed=3).epoch_batches(32)
    for (a, b), (c, d) in zip(batches, batches, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
        assert not a.flags.writeable
        assert not b.flags.writeable
        assert type(a) is np.ndarray


def test_an_epoch_goes_on_while_another_thread_takes_batches() -> None:
    source = squares(batch_size=7)
    whole = sorted(float(n) for x, _ in squares().epoch_batches(16) for n in x[:, 0])
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            source.next_batch(CTX)

    other = threading.Thread(target=take)
    other.start()
    try:
        for _ in range(20):
            assert sorted(float(n) for x, _ in source.epoch_batches(16) for n in x[:, 0]) == whole
    finally:
        stop.set()
        other.join()


@given(
    st.sampled_from(["iid", "shards", "dirichlet", "quantity"]), st.integers(1, 6),
    st.integers(0, 99), st.floats(0.05, 0.5), st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_splits_and_shares_are_disjoint_and_whole(kind, shards, seed, test, validation) -> None:
    common = {"test_fraction": test, "validation_fraction": validation, "seed": seed}
    parts = []
    for split in ("train", "test", "validation") if validation else ("train", "test"):
        parts += [
            held(squares(split=split, partition=kind, shard=shard, shards=shards, **common))
            for shard in range(shards)
        ]
    assert sum(map(len, parts)) == Squares.size
    assert set().union(*parts) == set(range(Squares.size))


def test_the_split_is_that_of_its_seed_whatever_else_changes() -> None:
    reference = held(squares(split="test"))
    others = {"seed": 5, "batch_size": 0, "validation_fraction": 0.3}
    assert held(squares(split="test", **others)) == reference
    assert held(squares(split="test", split_seed=1)) != reference


def test_a_state_of_a_larger_source_goes_on_with_the_next_epoch() -> None:
    first = squares(batch_size=60)
    for _ in range(3):
        first.next_batch(CTX)
    second = squares(batch_size=60, split="test")  # 40 examples; the cursor is at 180
    second.restore(first.serialize())
    assert len(second.next_batch(CTX)[0]) == 40
    assert second._epoch == 2


def test_the_schema_tells_shapes_types_and_labels() -> None:
    source = squares(split="test")
    assert source.schema() == DataSchema(
        features=TensorSchema((1,), "float32"), labels=TensorSchema((), "int64"),
        num_samples=40, label_range=(0, 4),
    )  # fmt: skip
    assert str(source.schema().features) == "float32[1]"
    assert source.schema() is source.schema()


def test_an_authors_own_source_has_a_schema_only_if_it_says_so() -> None:
    class Own(DataSource):
        TYPE_NAME: ClassVar[str] = "test.Own"
        num_samples = 1

        def next_batch(self, ctx): ...
        def reset(self, ctx): ...
        def on_data_loaded(self, ctx): ...
        def epoch_batches(self, batch_size): ...

    assert Own(Plain()).schema() is None


def test_a_source_may_give_any_tensor_but_strings() -> None:
    kinds = MemoryDataSource.storage["NextBatch.batch"]
    assert kinds[:2] == (types.TENSOR_FLOAT, types.TENSOR_INT64)
    assert types.TENSOR_BY_ELEM[2] in kinds  # uint8
    assert types.TENSOR_STRING not in kinds


def test_what_cannot_be_shared_out_is_refused() -> None:
    def refused(match: str, **config) -> None:
        with pytest.raises(errors.DataUnavailable, match=match):
            squares(**config).num_samples  # noqa: B018

    refused(r"test.Squares: shard 0 of 300: 200 example\(s\) for 300 peers", shards=300)
    refused(r"split 'test': 40 example\(s\) for 50 peers", split="test", shards=50)
    refused("the split 'test' of 200 example.* is empty", split="test", test_fraction=1e-4)

    class Odd(Squares):
        size = 3

    def count(shard: int) -> int:
        return Odd(SplitConfig(shard=shard, shards=3, partition="shards", seed=0)).num_samples

    with pytest.raises(errors.DataUnavailable, match="of 3 is empty; use fewer shards"):
        [count(shard) for shard in range(3)]
