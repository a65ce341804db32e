"""Own Python as a data source: what it may return, and what it may get wrong."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from bbnode.components import (
    DataUnavailable,
    InvalidComponentConfig,
    IterableDataSource,
    IterableDataSourceConfig,
    provide,
    withdraw,
)
from bbnode.components.registry import build_config, encode_config
from bbnode.components.settings import LocalSettingRefused
from bbnode.ir.errors import AuthorError
from tests.components.fakes import CTX

MODULE = """
import numpy as np

def arrays(n=4, scale=1.0):
    return np.arange(n * 2).reshape(n, 2) * scale, np.arange(n)

def examples(n=4):
    for i in range(n):
        yield np.full(3, i, np.float64), i % 2

def broken():
    raise RuntimeError("no disk today")

def broken_later():
    yield np.zeros(2), 0
    raise RuntimeError("the disk is gone")

def exits_later():
    yield np.zeros(2), 0
    raise SystemExit("enough")

number = 7
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_own_data.py").write_text(MODULE)
    (tmp_path / "my_bad_data.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_own_data", None)
    withdraw("mine")


def source(data=None, **config) -> IterableDataSource:
    if data is not None:
        provide("mine", data)
        config["provided"] = "mine"
    return IterableDataSource(IterableDataSourceConfig(**config))


class Dataset:
    """As PyTorch's: by number; counts what it is asked for."""

    def __init__(self, examples) -> None:
        self.examples = examples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int):
        self.asked.append(index)
        return self.examples[index]


def test_a_function_is_imported_and_called() -> None:
    batch, labels = source(factory="my_own_data:arrays", args={"n": 3, "scale": 2.0}).next_batch(
        CTX
    )
    assert (batch.dtype, labels.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(batch, np.arange(6).reshape(3, 2) * 2)
    batch, labels = source(factory="my_own_data:examples").next_batch(CTX)
    np.testing.assert_array_equal(batch[:, 0], [0, 1, 2, 3])
    assert labels.tolist() == [0, 1, 0, 1]


def test_a_dataset_is_asked_for_the_examples_of_a_batch() -> None:
    data = Dataset([(np.full((2, 2), i, np.float32), i) for i in range(10)])
    made = source(data, batch_size=4)
    made.on_data_loaded(CTX)
    data.asked.clear()
    batch, labels = made.next_batch(CTX)
    np.testing.assert_array_equal(batch[:, 0, 0], labels)
    assert len(data.asked) == 4
    assert made.schema().label_range == (0, 9)


def test_tokens_and_pixels_stay_integers_and_lists_become_arrays() -> None:
    batch, labels = source([([1, 2, 3], [0.5]), ([4, 5, 6], [1.5])]).next_batch(CTX)
    assert (batch.dtype, labels.dtype, labels.shape) == (np.int64, np.float32, (2, 1))
    pixels = source((np.ones((2, 3, 4, 4), np.uint8), np.ones(2, np.int32)))
    batch, labels = pixels.next_batch(CTX)
    assert (batch.dtype, labels.dtype) == (np.uint8, np.int64)


def test_batches_of_a_loader_are_taken_apart() -> None:
    def loader():
        memory = np.empty((2, 2))
        for i in range(3):
            memory[:] = i
            yield (memory, np.array([i, i])) if i < 2 else (memory[:1], np.array([i]))

    batch, labels = source(loader, batched=True).next_batch(CTX)
    assert batch[:, 0].tolist() == labels.tolist() == [0, 0, 1, 1, 2]


def test_splits_and_shares_work_as_for_files() -> None:
    data = [(np.full(1, i), i % 2) for i in range(100)]
    kept = [
        set(source(data, split="train", shard=i, shards=2).next_batch(CTX)[0].ravel().tolist())
        for i in range(2)
    ]
    held_out = set(source(data, split="test").next_batch(CTX)[0].ravel().tolist())
    assert [len(part) for part in (*kept, held_out)] == [40, 40, 20]
    assert len(kept[0] | kept[1] | held_out) == 100


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "gives no examples"),
        (iter([]), "gives no examples"),
        ([1, 2], r"gives 1 as item 0; each has to be a pair"),
        ([(1, 2, 3)], "gives a tuple of 3 as item 0"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], r"float32\[3\] in item 1, and float32\[2\] before"),
        ([(np.zeros(2), 0), (np.zeros(2), 0.5)], r"float32\[\] in item 1, and int64\[\] before"),
        (iter([(np.zeros(2), 0), (np.zeros(3), 0)]), r"float32\[3\] in item 1"),
        ([("text", 0)], "gives <U4 in item 0; examples are arrays of numbers"),
        ([([[1], [2, 3]], 0)], "failed: ValueError"),
        ([({"a": 1}, 0)], "gives object in item 0"),
        ((np.zeros((3, 2)), np.zeros(2)), r"3 example\(s\) and 2 label"),
        (np.zeros((2, 2, 2)), "gives ndarray as item 0"),
        ({"x": 1}, "returned a dict"),
        ("text", "returned a str"),
        (7, "returned 7; it has to be an iterable"),
    ],
)
def test_what_are_no_examples_is_named(data, match) -> None:
    with pytest.raises(DataUnavailable, match=match):
        source(data).next_batch(CTX)


def test_batches_that_are_none_are_named() -> None:
    with pytest.raises(DataUnavailable, match=r"item 0 is no batch: float32\[2\] and int64\[\]"):
        source([(np.zeros(2), 0)], batched=True).next_batch(CTX)
    with pytest.raises(DataUnavailable, match=r"item 0 is no batch"):
        source([(np.zeros((2, 2)), np.zeros(3))], batched=True).next_batch(CTX)


def test_an_endless_generator_is_bounded() -> None:
    endless = ((np.zeros(1 << 16), 0) for _ in itertools.count())
    with pytest.raises(DataUnavailable, match="more than 1 MiB of examples"):
        source(endless, max_mib=1).next_batch(CTX)
    wide = Dataset([(0, np.zeros(1 << 16))] * 20)
    with pytest.raises(DataUnavailable, match="labels of more than 1 MiB"):
        source(wide, max_mib=1).next_batch(CTX)


def test_what_the_users_code_raises_has_its_line() -> None:
    with pytest.raises(DataUnavailable, match=r"RuntimeError: no disk today \(.*data.py, line 12"):
        source(factory="my_own_data:broken").next_batch(CTX)
    with pytest.raises(DataUnavailable, match=r"RuntimeError: the disk is gone \(.*line 16"):
        source(factory="my_own_data:broken_later").next_batch(CTX)
    with pytest.raises(DataUnavailable, match=r"SystemExit: enough \(.*line 20"):
        source(factory="my_own_data:exits_later").next_batch(CTX)
    with pytest.raises(DataUnavailable, match=r"unexpected keyword argument 'm'"):
        source(factory="my_own_data:arrays", args={"m": 3}).next_batch(CTX)
    for factory, match in (
        ("my_own_data:array", r"has no function 'array'; did you mean 'arrays'\?"),
        ("my_own_data:number", "has no function 'number'"),
        ("not_installed:x", r"not_installed can't be imported: .*start bbnode in the directory"),
        ("my_bad_data:x", r"'nothing_of_this_name' \(my_bad_data.py:1\)"),
        ("nowhere/own.py:x", r"nowhere/own\.py: no such file"),
    ):
        with pytest.raises(DataUnavailable, match=match):
            source(factory=factory).next_batch(CTX)


def test_a_function_of_a_file_is_found(tmp_path) -> None:
    (tmp_path / "a_file_of_its_own.py").write_text(MODULE)
    made = source(factory=f"{tmp_path}/a_file_of_its_own.py:examples")
    assert made.num_samples == 4


def test_a_dataset_that_fails_later_is_named() -> None:
    data = Dataset([(np.zeros(1), i) for i in range(4)])
    made = source(data)
    made.on_data_loaded(CTX)
    data.examples = data.examples[:2]
    with pytest.raises(DataUnavailable, match="IndexError"):
        made.next_batch(CTX)


def test_nothing_was_provided() -> None:
    with pytest.raises(DataUnavailable, match="nothing was provided as 'other'; call provide"):
        source(provided="other").next_batch(CTX)
    with pytest.raises(AuthorError, match="1 to 128 characters"):
        provide("", [])


@pytest.mark.parametrize(
    "config",
    [
        {}, {"factory": "a:b", "provided": "c"}, {"factory": "a"}, {"factory": "a.py"},
        {"factory": "a/b:c"}, {"factory": ":f"}, {"factory": "a:f()"},
        {"provided": "x", "max_mib": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(config) -> None:
    with pytest.raises(InvalidComponentConfig):
        source(**config)


@pytest.mark.parametrize(
    "setting",
    [{"factory": "os:system"}, {"provided": "mine"}, {"args": {"command": "true"}}],
)
def test_an_artifact_cannot_say_what_is_imported(setting) -> None:
    stored = encode_config(IterableDataSourceConfig(**setting))
    with pytest.raises(LocalSettingRefused, match="names something of this machine"):
        build_config(IterableDataSource, "data", stored, {})


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (([[1.0], [1e300]], [0, 1]), r"gives 1e\+300, which no float32 holds"),
        (([[1.0], [2.0]], [0, 1 << 63]), "gives 9223372036854775808, which no int64 holds"),
        ([([1.0], 0), ([1e300], 1)], r"gives 1e\+300 in item 1, which no float32 holds"),
    ],
)
def test_numbers_that_no_type_of_the_batch_holds_are_refused(data, match) -> None:
    if isinstance(data, tuple):
        data = np.array(data[0]), np.array(data[1], np.uint64)
    with pytest.raises(DataUnavailable, match=match):
        source(data).next_batch(CTX)
