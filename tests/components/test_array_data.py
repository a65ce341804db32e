"""Numpy files as a source: what is mapped, which types come out, and files that lie."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbnode.components import errors
from bbnode.components.data import data_file
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.data.numbers import FileArray
from tests.components.fakes import CTX


def source(path: Path, **config) -> ArrayDataSource:
    return ArrayDataSource(ArrayDataSourceConfig(path=str(path), **config))


def refused(path: Path, match: str, **config) -> None:
    with pytest.raises(errors.DataUnavailable, match=match) as caught:
        source(path, **config).next_batch(CTX)
    assert "\n" not in str(caught.value)


def stored(made: ArrayDataSource) -> np.ndarray:
    features = made._data().features
    assert isinstance(features, FileArray)
    return features.stored


@pytest.fixture
def folder(tmp_path) -> Path:
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    np.save(tmp_path / "y.npy", np.arange(10, dtype=np.int32))
    return tmp_path


def test_a_folder_of_npy_files_is_mapped(folder) -> None:
    made = source(folder)
    assert isinstance(stored(made), np.memmap)
    x, y = made.next_batch(CTX)
    np.testing.assert_array_equal(x, np.arange(20, dtype=np.float32).reshape(10, 2))
    np.testing.assert_array_equal(y, np.arange(10))
    assert (x.dtype, y.dtype, type(x)) == (np.float32, np.int64, np.ndarray)
    assert [len(b) for b, _ in made.epoch_batches(4)] == [4, 4, 2]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i8", "u1"])
def test_an_uncompressed_archive_is_mapped_and_a_compressed_one_read(
    tmp_path, dtype, order
) -> None:
    x = np.asarray(np.arange(24).reshape(6, 4), dtype, order=order)
    y = np.arange(6) / 2
    for name, save in (("s", np.savez), ("c", np.savez_compressed)):
        path = tmp_path / f"{name}.npz"
        save(path, x=x, y=y, other=np.ones(3))
        made = source(path)
        got, labels = made.next_batch(CTX)
        np.testing.assert_array_equal(got, x)
        np.testing.assert_array_equal(labels, y)
        assert labels.dtype == np.float32
        assert isinstance(stored(made), np.memmap) == (name == "s")


@pytest.mark.parametrize(
    ("stored_as", "setting", "given_out"),
    [
        ("float64", "auto", "float32"), ("float16", "auto", "float32"), ("int64", "auto", "int64"),
        ("int32", "auto", "int64"), ("uint8", "auto", "float32"), ("bool", "auto", "float32"),
        ("uint8", "keep", "uint8"), ("float64", "keep", "float64"), (">f8", "keep", "float64"),
        ("int64", "float32", "float32"), ("float32", "int64", "int64"), ("uint8", "int8", "int8"),
    ],
)  # fmt: skip
def test_types_are_those_of_the_settings(tmp_path, stored_as, setting, given_out) -> None:
    x = np.ones((4, 3)).astype(stored_as)
    np.savez(tmp_path / "d.npz", x=x, y=np.zeros(4, bool))
    made = source(tmp_path / "d.npz", dtype=setting)
    batch, labels = made.next_batch(CTX)
    assert (batch.dtype, labels.dtype) == (np.dtype(given_out), np.int64)
    assert batch.dtype.isnative
    schema = made.schema()
    assert (schema.features.dtype, schema.features.shape) == (given_out, (3,))
    assert (schema.labels.dtype, schema.label_range, schema.label_name) == ("int64", (0, 0), "y")


def test_several_arrays_are_put_side_by_side(tmp_path) -> None:
    np.savez(
        tmp_path / "d.npz", a=np.arange(4), b=np.arange(8.0).reshape(4, 1, 2), y=np.ones((4, 2))
    )
    made = source(tmp_path / "d.npz", features=("a", "b"))
    x, y = made.next_batch(CTX)
    np.testing.assert_array_equal(x, [[0, 0, 1], [1, 2, 3], [2, 4, 5], [3, 6, 7]])
    assert (x.dtype, y.shape) == (np.float32, (4, 2))
    assert (made.schema().names, made.schema().features.shape) == (("a", "b"), (3,))
    np.savez(tmp_path / "t.npz", a=np.arange(4), b=np.arange(8).reshape(4, 2), y=np.ones(4))
    assert source(tmp_path / "t.npz", features=("a", "b")).next_batch(CTX)[0].dtype == np.int64


def test_the_input_may_be_the_target(tmp_path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3)))
    x, y = source(tmp_path / "d.npz", labels="x").next_batch(CTX)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("values", "dtype", "why"),
    [
        ([[0, 1], [np.nan, 1]], "auto", r"array 'x', row 1\[0\]: nan is no float32 number"),
        ([[0, 1], [1, np.inf]], "auto", r"row 1\[1\]: inf"),
        ([[0, 1], [1, 1e300]], "auto", r"row 1\[1\]: 1e\+300 is no float32"),
        ([[0, 1], [1, 0.5]], "int64", r"row 1\[1\]: 0.5 is no int64"),
        ([[0, 1], [1, 256]], "uint8", r"row 1\[1\]: 256 is no uint8"),
        ([[0, 1], [-1, 2]], "uint8", r"row 1\[0\]: -1 is no uint8"),
    ],
)
def test_values_that_the_type_cannot_hold_are_refused_by_row(tmp_path, values, dtype, why) -> None:
    np.savez(tmp_path / "d.npz", x=np.array(values), y=np.zeros(2))
    refused(tmp_path / "d.npz", why, dtype=dtype)


def test_labels_that_int64_or_float32_cannot_hold_are_refused(tmp_path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones(2), y=np.array([0, 2**63], np.uint64))
    refused(tmp_path / "d.npz", "array 'y', row 1: 9223372036854775808 is no int64")
    np.savez(tmp_path / "d.npz", x=np.ones(2), y=np.array([0, np.nan]))
    refused(tmp_path / "d.npz", "array 'y', row 1: nan")


def test_files_that_cannot_be_used_are_refused(tmp_path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, features=np.ones((3, 2)), y=np.ones(3))
    refused(tmp_path / "none.npz", "none.npz: No such file or directory; set `path`")
    refused(Path(), "has no array x, y")
    refused(good, r"has no array x; it has features, y.*name them with `features`")
    refused(good, r"no array feature; .*\(did you mean 'features'\?\)", features="feature")
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04junk")
    refused(tmp_path / "junk.npz", "cannot read")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(tmp_path / "empty.npz", "cannot read")
    np.save(tmp_path / "bare.npy", np.ones(3))
    refused(tmp_path / "bare.npy", "one array.* put x.npy and y.npy into a folder")
    np.savez(tmp_path / "lengths.npz", x=np.ones((3, 2)), y=np.ones(2))
    refused(tmp_path / "lengths.npz", r"3 example\(s\) and 2 label")
    np.savez(tmp_path / "three.npz", x=np.ones((3, 2)), z=np.ones(2), y=np.ones(3))
    refused(tmp_path / "three.npz", "x, z have 3, 2 rows", features=("x", "z"))
    np.savez(tmp_path / "words.npz", x=np.array(["a", "b"]), y=np.ones(2))
    refused(tmp_path / "words.npz", "features 'x', <U1.*no array of examples")
    np.savez(tmp_path / "words.npz", x=np.ones(2), y=np.array(["a", "b"]))
    refused(tmp_path / "words.npz", "labels 'y'.*no array of examples")
    np.savez(tmp_path / "scalar.npz", x=np.float32(1), y=np.ones(2))
    refused(tmp_path / "scalar.npz", "no array of examples")
    np.savez(tmp_path / "none.npz", x=np.ones((0, 2)), y=np.ones(0))
    refused(tmp_path / "none.npz", r"0 example\(s\)")
    pickled = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "pickle.npz", allow_pickle=True, x=pickled, y=pickled)
    refused(tmp_path / "pickle.npz", "pickled Python objects")
    np.save(tmp_path / "x.npy", pickled, allow_pickle=True)
    np.save(tmp_path / "y.npy", np.ones(1))
    refused(tmp_path, "pickled Python objects")
    np.save(tmp_path / "x.npy", np.zeros(2, [("a", "f4")]))
    refused(tmp_path, "no array of examples")


def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    refused(tmp_path / "pipe.npz", "is a FIFO")
    refused(Path("/dev/zero"), "is a device")
    np.save(tmp_path / "y.npy", np.ones(2))
    (tmp_path / "x.npy").mkdir()
    refused(tmp_path, "x.npy is a folder")
    (tmp_path / "x.npy").rmdir()
    os.mkfifo(tmp_path / "x.npy")
    refused(tmp_path, "x.npy is a FIFO")
    refused(Path("\0"), "null")


def test_names_of_arrays_do_not_leave_the_folder(folder) -> None:
    inner = folder / "inner"
    inner.mkdir()
    refused(inner, r"has no array \.\./x, \.\./y", features="../x", labels="../y")


def member(path: Path, name: str, content: bytes, how: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "a", how) as archive:
        archive.writestr(f"{name}.npy", content)


def header(shape: str, descr: str = "<f4", length: int = 118) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(length - 1)
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.encode() + b"\n"


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header("(4, 1000000000000)") + b"1234", "declares 16000000000000 bytes.* and has 4"),
        (header("(9999999999, 9999999999, 9999999999)") + b"1234", "declares .* and has 4"),
        (header("(-1, 4)"), "negative"),
        (header("(2,)") + bytes(80), "declares 8 bytes of values and has 80"),
        (header("(2,", "<f4"), "cannot read"),
        (header("(2,)", "|O") + bytes(16), "pickled"),
        (
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(64),
            "header of an array has 4294967295 bytes",
        ),
        (b"\x93NUMPY\x03\x00\x76\x00\x00\x00" + bytes(64), "version"),
        (b"", "cannot read"),
    ],
)
def test_arrays_that_lie_about_their_size_are_refused(tmp_path, how, content, why) -> None:
    path = tmp_path / "lies.npz"
    member(path, "x", content, how)
    member(path, "y", header("(2,)") + bytes(8), how)
    refused(path, why)


def test_a_zip_bomb_is_refused_before_it_is_read(tmp_path, monkeypatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(3_000_000), y=np.zeros(2))
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    match = "takes 22 MiB in memory, and max_memory_mib leaves 19 of 19.*numpy.savez"
    refused(tmp_path / "bomb.npz", match, max_memory_mib=19)
    monkeypatch.setattr(data_file, "memory_limit", lambda: 20_000_000)
    refused(tmp_path / "bomb.npz", match)
    # All of its arrays together.
    np.savez_compressed(tmp_path / "two.npz", x=np.zeros((2_000_000, 1)), y=np.zeros(2_000_000))
    refused(tmp_path / "two.npz", "takes 15 MiB in memory, and max_memory_mib leaves 3 of 19")


def archive_bytes() -> bytes:
    made = io.BytesIO()
    np.savez(made, x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    return made.getvalue()


ARCHIVE = archive_bytes()


@given(
    st.one_of(
        st.binary(max_size=300),
        st.integers(0, len(ARCHIVE)).map(lambda n: ARCHIVE[:n]),
        st.tuples(st.integers(0, len(ARCHIVE) - 9), st.binary(min_size=1, max_size=8)).map(
            lambda cut: ARCHIVE[: cut[0]] + cut[1] + ARCHIVE[cut[0] + len(cut[1]) :]
        ),
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")  # numpy's, about headers of Python 2
def test_bytes_of_any_kind_are_data_or_a_clear_error(tmp_path, content: bytes) -> None:
    path = tmp_path / "any.npz"
    path.write_bytes(content)
    with contextlib.suppress(errors.DataUnavailable):
        x, y = source(path).next_batch(CTX)
        assert len(x) == len(y)


def test_a_file_that_changes_while_in_use_is_told_and_one_that_is_replaced_stays(folder) -> None:
    made = source(folder, batch_size=2)
    before = [made.next_batch(CTX) for _ in range(5)]
    np.save(folder / "new.npy", np.zeros((10, 2)))
    (folder / "new.npy").rename(folder / "x.npy")
    again = source(folder, batch_size=2)
    assert not any(again.next_batch(CTX)[0].any() for _ in range(5))
    made.reset(CTX)
    np.testing.assert_array_equal(before[0][0], made.next_batch(CTX)[0])
    with (folder / "x.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(errors.DataUnavailable, match=r"x\.npy changed while it was in use"):
        again.next_batch(CTX)
    (folder / "x.npy").unlink()
    made.next_batch(CTX)


@pytest.mark.parametrize("dtype", ["float8", "object", "complex64", "", "Float32"])
def test_types_that_are_none_are_refused(tmp_path, dtype) -> None:
    with pytest.raises(errors.InvalidComponentConfig, match="choose one of auto, keep, float32"):
        source(tmp_path, dtype=dtype)
    with pytest.raises(errors.InvalidComponentConfig, match="names no array"):
        source(tmp_path, features=())


def test_a_mapped_file_gives_disjoint_shares(folder) -> None:
    shares = [source(folder, shards=3, shard=i).next_batch(CTX)[1] for i in range(3)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(10))


def test_compressed_bytes_that_are_no_deflate_stream_are_refused(tmp_path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros(1000), y=np.zeros(1000))
    content = bytearray((tmp_path / "d.npz").read_bytes())
    at = content.index(b"x.npy") + 30
    content[at : at + 8] = zlib.compress(b"other")[:8]
    (tmp_path / "d.npz").write_bytes(content)
    refused(tmp_path / "d.npz", "cannot read")


def test_whole_numbers_that_lose_digits_side_by_side_are_refused(tmp_path) -> None:
    np.savez(tmp_path / "t.npz", x=np.array([1, 16777217]), z=np.array([0.5, 1.5]), y=np.arange(2))
    config = ArrayDataSourceConfig(path=str(tmp_path / "t.npz"), features=("x", "z"))
    with pytest.raises(errors.DataUnavailable, match="'x', row 1: 16777217 is no float32 number"):
        ArrayDataSource(config).next_batch(CTX)
