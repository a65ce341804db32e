"""Tables as a source: roles of columns, kinds of files, and what can't be used."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbnode.components import errors
from bbnode.components.data import arrow_files, columns, data_file, tables
from bbnode.components.data.tables import TableDataSource, TableDataSourceConfig
from tests.components.fakes import CTX

HOUSES = """rooms,area,color,sold,price
3,70.5,red,true,100.5
2,50,blue,false,80
4,90,red,false,120
3,60,green,true,95
"""


def source(path: Path, **config) -> TableDataSource:
    return TableDataSource(TableDataSourceConfig(path=str(path), **config))


def whole(path: Path, **config) -> tuple[list, list]:
    x, y = source(path, **config).next_batch(CTX)
    return x.tolist(), y.tolist()


def refused(path: Path, match: str, **config) -> None:
    with pytest.raises(errors.DataUnavailable, match=match) as caught:
        source(path, **config).next_batch(CTX)
    assert "\n" not in str(caught.value)


@pytest.fixture
def houses(tmp_path) -> Path:
    path = tmp_path / "houses.csv"
    path.write_text(HOUSES)
    return path


def written(path: Path, table: pa.Table) -> Path:
    match path.suffix:
        case ".csv":
            pyarrow.csv.write_csv(table, path)
        case ".tsv":
            pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter="\t"))
        case ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=2)
        case ".feather":
            pyarrow.feather.write_feather(table, path)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    return path


def hugging_face(folder: Path, table: pa.Table, files: int = 2, **state) -> Path:
    """Write what `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{at:05}-of-{files:05}.arrow" for at in range(files)]
    step = -(-len(table) // files)
    for at, name in enumerate(names):
        part = table.slice(at * step, step)
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, part.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=2)
    content = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")
    return folder


TABLE = pa.table({"a": [1, 2, 3, 4, 5], "b": [0.5, 1, 1.5, 2, 2.5], "y": ["n", "y", "y", "n", "y"]})


def test_tables_in_memory_and_small_ones_become_one_array(houses, tmp_path, monkeypatch) -> None:
    mapped = written(tmp_path / "t.arrow", TABLE)
    made = source(houses, label="price", ignore=("color",)), source(mapped, label="y")
    for features in (each._data().features for each in made):
        assert isinstance(features, np.ndarray)
        assert features.flags.c_contiguous
        assert not features.flags.writeable
    monkeypatch.setattr(tables, "_MOST_ARRANGED_BYTES", 0)
    lazy = source(mapped, label="y")
    assert not isinstance(lazy._data().features, np.ndarray)
    for (a, b), (c, d) in zip(made[1].epoch_batches(2), lazy.epoch_batches(2), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "feather", "arrow"])
def test_every_kind_of_file_gives_the_same(tmp_path, ending) -> None:
    made = source(written(tmp_path / f"t.{ending}", TABLE), label="y")
    x, y = made.next_batch(CTX)
    assert x.tolist() == [[1, 0.5], [2, 1], [3, 1.5], [4, 2], [5, 2.5]]
    assert (x.dtype, y.dtype, y.tolist()) == (np.float32, np.int64, [0, 1, 1, 0, 1])
    schema = made.schema()
    assert (schema.names, schema.label_name, schema.classes) == (("a", "b"), "y", ("n", "y"))
    assert (schema.features.shape, schema.label_range, schema.num_samples) == ((2,), (0, 1), 5)
    order = [n for _, labels in made.epoch_batches(2) for n in labels.tolist()]
    assert sorted(order) == [0, 0, 1, 1, 1]


def test_a_data_set_of_hugging_face_is_mapped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "_MOST_ARRANGED_BYTES", 0)
    features = {"y": {"names": ["no", "yes"], "_type": "ClassLabel"}, "a": {"_type": "Value"}}
    table = pa.table({"a": list(range(7)), "y": [0, 1, 0, 1, 1, 0, 1]}).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    made = source(hugging_face(tmp_path / "set", table), label="y", shards=2, shard=1)
    assert made.schema().classes == ("no", "yes")
    assert made.num_samples == 3
    (stored,) = made._data().features._parts
    assert len(stored._files) == 2
    x, y = made.next_batch(CTX)
    assert y.tolist() == [int(table["y"][int(n)].as_py()) for n in x[:, 0]]


def test_a_folder_of_files_of_one_kind_is_one_table(tmp_path) -> None:
    written(tmp_path / "b.parquet", TABLE)
    written(tmp_path / "a.parquet", TABLE.slice(0, 2))
    assert whole(tmp_path, label="y", features=("a",))[0] == [[1], [2], [1], [2], [3], [4], [5]]
    (tmp_path / "readme.txt").write_text("not data")
    written(tmp_path / "c.csv", TABLE)
    refused(tmp_path, r"has \.csv and \.parquet files")
    (tmp_path / "c.csv").unlink()
    written(tmp_path / "c.parquet", TABLE.select(["y", "a"]))
    refused(tmp_path, r"a\.parquet has the column 'b', and .*c\.parquet has not", label="y")
    assert whole(tmp_path, label="y", features=("a",))[0][-2:] == [[4], [5]]
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no data files")


def test_columns_have_roles(houses) -> None:
    x, y = whole(houses, label="price", ignore=("color",))
    assert x == [[3, 70.5, 1], [2, 50, 0], [4, 90, 0], [3, 60, 1]]
    assert y == [100.5, 80, 120, 95]
    x, y = whole(houses, label="sold", features=("area", "rooms"))
    assert (x[0], y) == ([70.5, 3], [1, 0, 0, 1])
    made = source(houses, label="color", features="rooms")
    assert made.next_batch(CTX)[1].tolist() == [2, 0, 2, 1]
    assert made.schema().classes == ("blue", "green", "red")


def test_strings_are_numbered_by_the_categories_that_are_given(houses) -> None:
    given_order = {"color": ("red", "green", "blue", "black")}
    _, y = whole(houses, label="color", features=("area",), categories=given_order)
    assert y == [0, 2, 0, 1]
    made = source(
        houses, label="price", features=("area", "color"), one_hot=("color",),
        categories=given_order,
    )  # fmt: skip
    assert made.next_batch(CTX)[0].tolist()[1] == [50, 0, 0, 1, 0]
    assert made.schema().names == (
        "area", "color=red", "color=green", "color=blue", "color=black"
    )  # fmt: skip
    x, _ = whole(houses, label="price", features=("color",), one_hot=("color",))
    assert x == [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    refused(houses, r"'color' .*line 2: row 0: it holds text, its first values are 'red', 'blue', "
            r"'green'; .*categories = \{ color = .*`ignore`", label="price")  # fmt: skip
    refused(
        houses, r"column 'color' .* row 1 has 'blue', which is none of its `categories` 'red', "
        r"'green' \(1 such row", label="price", categories={"color": ("red", "green")},
    )  # fmt: skip
    refused(houses, "'rooms'.*line 3: row 1 has '2', which is none", label="price",
            ignore=("color",), categories={"rooms": ("3",)})  # fmt: skip
    x, _ = whole(houses, label="price", features=("rooms",), categories={"rooms": ("4", "3", "2")})
    assert x == [[1], [2], [0], [1]]
    refused(houses, "'rooms'.*not of strings", label="price", one_hot=("rooms",),
            ignore=("color",))  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kind", "dtype", "shape"),
    [
        ([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int64()), "int64", (3,)),
        ([[1, 2, 3], [4, 5, 6]], pa.large_list(pa.int32()), "int64", (3,)),
        ([[1, 2, 3], [4, 5, 6]], pa.list_(pa.uint8()), "float32", (3,)),
        ([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float64(), 3), "float32", (3,)),
        ([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.float32())), "float32", (2, 1)),
    ],
)
def test_lists_are_vectors(tmp_path, values, kind, dtype, shape) -> None:
    table = pa.table({"x": pa.array(values * 3, kind), "label": [1, 2] * 3})
    made = source(written(tmp_path / "t.arrow", table))
    x, _ = made.next_batch(CTX)
    assert (x.dtype, x.shape) == (np.dtype(dtype), (6, *shape))
    np.testing.assert_array_equal(x, np.array(values * 3))
    assert made.schema().features.shape == shape
    beside = table.append_column("z", pa.array([0.5] * 6))
    x, _ = source(written(tmp_path / "u.arrow", beside)).next_batch(CTX)
    assert (x.dtype, x.shape) == (np.float32, (6, int(np.prod(shape)) + 1))
    labels = source(written(tmp_path / "v.arrow", beside), label="x", features=("z",))
    assert labels.next_batch(CTX)[1].shape == (6, *shape)


def test_sliced_lists_are_those_of_their_rows(tmp_path) -> None:
    array = pa.array([[9, 9], [1, 2], [3, 4], [5, 6]]).slice(1)
    column = columns.read_column(pa, "x", pa.chunked_array([array]), (), ())
    np.testing.assert_array_equal(column.values[np.arange(3)], [[1, 2], [3, 4], [5, 6]])
    fixed = pa.array([[9, 9], [1, 2], [3, 4]], pa.list_(pa.int64(), 2)).slice(1, 1)
    column = columns.read_column(pa, "x", pa.chunked_array([fixed]), (), ())
    np.testing.assert_array_equal(column.values[np.arange(1)], [[1, 2]])


def test_types_of_columns_become_numbers(tmp_path) -> None:
    table = pa.table({
        "dict": pa.array(["b", "a", "b"]).dictionary_encode(),
        "large": pa.array(["1", "2", "1"], pa.large_string()),
        "dec": pa.array([1, 2, 3], pa.decimal128(5, 2)),
        "half": pa.array(np.array([1, 2, 3], np.float16)),
        "flag": [True, False, True],
        "label": pa.array([7, 8, 9], pa.uint8()),
    })  # fmt: skip
    large = {"large": ("1", "2")}
    x, y = whole(written(tmp_path / "t.arrow", table), categories=large)
    assert x == [[0, 0, 1, 1, 1], [1, 1, 2, 2, 0], [0, 0, 3, 3, 1]]
    assert y == [7, 8, 9]
    kept = source(tmp_path / "t.arrow", features=("flag",), dtype="keep").next_batch(CTX)[0]
    assert kept.dtype == np.bool_
    ids = source(tmp_path / "t.arrow", features=("dict",), dtype="int64").next_batch(CTX)[0]
    assert (ids.dtype, ids.tolist()) == (np.int64, [[0], [1], [0]])


MISSING = "a,b,word,label\n1,10,x,0\n,20,y,1\n3,,,0\n5,30,y,\n"


def test_missing_values_are_refused_dropped_or_filled(tmp_path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(MISSING)
    two = {"features": ("a", "b")}
    words = {"categories": {"word": ("x", "y")}}
    refused(
        path,
        r"column 'a' .* row 1 has no value, and 1 row\(s\) .*\"drop\", \"mean\" or \"keep\"",
        **two,
    )
    refused(path, r"column 'word' .* row 2 has no value.* missing = \"drop\"$", features=("word",),
            **words)  # fmt: skip
    refused(
        path, "column 'word' .* row 2 has no value", missing="mean", features=("word",), **words
    )
    refused(path, "column 'label' .* row 3 has no value", missing="mean", **two)
    assert whole(path, missing="drop", **two) == ([[1, 10]], [0])
    assert whole(path, missing="drop", features=("b",)) == ([[10], [20]], [0, 1])
    gaps = {"a": [1, None, 3.0, float("nan")], "label": [1, 2, 3, 4]}
    x, y = whole(written(tmp_path / "g.arrow", pa.table(gaps)), missing="mean")
    assert (x, y) == ([[1], [2], [3], [2]], [1, 2, 3, 4])
    x, _ = whole(tmp_path / "g.arrow", missing="keep")
    np.testing.assert_array_equal(x, [[1], [np.nan], [3], [np.nan]])
    refused(path, "column 'label' .* row 3 has no value", missing="keep", **two)
    refused(tmp_path / "g.arrow", r"row 1 has no value, and 2 row\(s\)")
    only_drops = written(tmp_path / "d.arrow", pa.table({"a": [1, None], "label": [None, 1]}))
    refused(only_drops, "each row .* has a missing value", missing="drop")
    all_null = written(tmp_path / "n.arrow", pa.table({"a": pa.array([None, None], pa.float32()),
                                                       "label": [0, 1]}))  # fmt: skip
    refused(all_null, "column 'a' .* no value to take the mean of", missing="mean")


def test_means_are_those_of_the_training_part(tmp_path) -> None:
    values = [None, *(float(n) for n in range(1, 40))]
    table = pa.table({"a": values, "label": [n % 2 for n in range(40)]})
    path = written(tmp_path / "t.arrow", table)
    made = {split: source(path, missing="mean", split=split) for split in ("train", "test")}
    given_out = {float(n) for each in made.values() for n in each.next_batch(CTX)[0][:, 0]}
    (mean,) = given_out - set(values)
    train = made["train"].split_of(made["train"].load()[1])["train"]
    assert mean == pytest.approx(np.mean([row for row in train if row > 0]))


def test_dropped_rows_keep_their_numbers_in_what_is_told(tmp_path) -> None:
    table = pa.table({"a": [None, 1.0, 2.0, np.inf], "label": [0, 1, 2, 3]})
    refused(written(tmp_path / "t.arrow", table), r"column 'a', row 3: inf", missing="drop")


def test_words_among_numbers_are_told_and_can_be_missing_values(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,label\n1,0\n2,1\n?,1\n")
    refused(
        path,
        r"column 'a' .* line 4: row 2: it has words among numbers \('\?'\).*missing_words = "
        r"\[\"\?\"\]",
    )
    assert whole(path, missing_words=("?",), missing="drop") == ([[1], [2]], [0, 1])
    refused(path, "row 2 has no value", missing_words=("?",))
    table = pa.table({"a": ["x", "?", "y"], "label": [0, 1, 0]})
    written(tmp_path / "t.arrow", table)
    made = whole(tmp_path / "t.arrow", missing_words=("?",), missing="drop", one_hot=("a",))
    assert made[0] == [[1, 0], [0, 1]]


def test_too_many_strings_are_no_categories(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(columns, "MAX_CATEGORIES", 3)
    table = pa.table({"name": ["a", "b", "c", "d"], "label": [0, 1, 0, 1]})
    path = written(tmp_path / "t.arrow", table)
    refused(path, "4 different strings, too many for categories", one_hot=("name",))


@pytest.mark.parametrize(
    ("text", "match", "config"),
    [
        ("", "it is empty", {}),
        ("a,label\n", "'a' .* it has no rows", {}),
        ("a,label\n1,2\n3\n", r"t\.csv: line 3 has 1 value\(s\) \('3'\), and line 1 2", {}),
        ("a,b\n1,2\n", "no column 'label'; it has 'a', 'b'$", {}),
        ("a,Price\n1,2\n", r"no column 'price'; it has .* \(did you mean 'Price'\?\)",
         {"label": "price"}),
        ("a;label\n1;2\n", "it has 'a;label'; is the delimiter another one than ','", {}),
        ("label\n1\n", "no column besides the label", {}),
        ("a,a,label\n1,2,3\n", "several columns 'a'", {}),
        (",a,label\n0,1,2\n", r"column '' .* index of pandas; leave it out with ignore = \[''\]",
         {}),
        ("when,label\n2024-01-01,1\n", r"'when' .* date32.*set dates = \{ when = \"\" \}", {}),
        ("a,label\n2,1e400\n", "column 'label', line 2, row 0: inf", {}),
        ("a,label\n1,2\n", "no column 'b', 'c'", {"features": ("b", "a", "c")}),
        ("a,label\n1,2\n", "no column 'c'", {"ignore": ("c",)}),
    ],
)  # fmt: skip
def test_csv_files_that_cannot_be_used_are_refused(tmp_path, text, match, config) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    refused(path, match, **config)


def test_a_csv_file_is_read_as_it_is_written(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe;label\n1;ä\n2;b\n".encode("latin-1"))
    refused(
        path, r"cannot read.*not in the encoding 'utf8' \(byte 3\); set `encoding`", delimiter=";"
    )
    made = source(path, delimiter=";", encoding="latin-1")
    assert made.schema().names == ("größe",)
    assert made.schema().classes == ("b", "ä")
    path.write_bytes("a,label\n1,\xe4\n".encode("latin-1"))
    refused(path, "column 'label' .*line 2: row 0 has 1 bytes e4, .*`encoding`")
    path.write_bytes(b"\xef\xbb\xbfa,label\r\n1,2\r\n")
    assert whole(path) == ([[1]], [2])
    path.write_text("5.1,setosa\n4.9,other\n", encoding="utf-8")
    assert whole(path, header=False, label="f1")[1] == [1, 0]
    path.write_text('a,label\n1,"two\nlines"\n2,b\n')
    assert whole(path)[1] == [1, 0]


def test_columns_of_other_types_are_refused(tmp_path) -> None:
    table = pa.table({
        "bytes": [b"a", b"b"], "struct": [{"a": 1}, {"a": 2}], "ragged": [[1], [1, 2]],
        "gap": [[1, 2], None], "inner": [[1, None], [2, 3]], "words": [["a"], ["b"]],
        "empty": pa.array([[], []], pa.list_(pa.int64())), "nothing": pa.nulls(2),
        "time": pa.array([1, 2], pa.timestamp("s")), "label": [0, 1],
        "map": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
    })  # fmt: skip
    path = written(tmp_path / "t.arrow", table)
    for name, why in {
        "bytes": "holds bytes", "struct": "holds struct.*ImageFolderDataSource",
        "ragged": r"lists differ in length \(1, 2\)", "gap": "a list is missing",
        "inner": "a list has a missing value", "words": "lists of string, not of numbers",
        "empty": "its lists are empty", "nothing": "all of its values are missing",
        "time": r"holds timestamp\[s\]", "map": "holds map",
    }.items():  # fmt: skip
        refused(path, f"column '{name}' .*{why}", features=(name,))
    for name in ("bytes", "time"):
        refused(path, f"column '{name}'", features=("label",), label=name)


def test_paths_that_are_no_tables_are_refused(tmp_path) -> None:
    refused(tmp_path / "none.csv", "No such file")
    os.mkfifo(tmp_path / "pipe.csv")
    refused(tmp_path / "pipe.csv", "is a FIFO")
    refused(Path("/dev/zero"), "is a device")
    (tmp_path / "t.xlsx").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "t.xlsx", "neither its first bytes nor its ending.*set `path` to a .csv")
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(40))
    refused(tmp_path / "old.feather", "Feather version 1")


def test_folders_of_hugging_face_that_cannot_be_used_are_refused(tmp_path) -> None:
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refused(tmp_path / "dict", r"in splits \(train, test\); set `path` to one")
    moved = hugging_face(tmp_path / "moved", TABLE, _indices_data_files=[{"filename": "i.arrow"}])
    refused(moved, "flatten_indices")
    for name in ("../secret.arrow", "/etc/passwd", "", ".."):
        bad = hugging_face(tmp_path / "bad", TABLE, _data_files=[{"filename": name}])
        refused(bad, "names no files of this folder")
    for content in ("[]", "{", "{}", '{"_data_files": 3}', "\x00", "[" * 100_000):
        (bad / "state.json").write_text(content)
        refused(bad, "cannot read")
    many = [{"filename": f"{at}.arrow"} for at in range(arrow_files.MAX_FILES + 1)]
    refused(hugging_face(tmp_path / "many", TABLE, _data_files=many), "has 257 files, more than")


def test_tables_that_memory_cannot_hold_are_refused_before_they_are_read(
    tmp_path, monkeypatch
) -> None:
    table = pa.table({"a": np.zeros(1_000_000), "label": np.zeros(1_000_000)})
    paths = [tmp_path / "t.parquet", tmp_path / "t.feather", tmp_path / "t.csv"]
    pyarrow.parquet.write_table(table, paths[0])
    pyarrow.feather.write_feather(table, paths[1], compression="zstd", chunksize=100_000)
    pyarrow.csv.write_csv(table, paths[2])
    plain = written(tmp_path / "t.arrow", table.slice(0, 1000))
    assert max(path.stat().st_size for path in paths[:2]) < 200_000
    for path in paths:
        match = r"in memory, and max_memory_mib leaves 3 of 3; raise it, or write an uncompressed"
        refused(path, match, max_memory_mib=3)
    monkeypatch.setattr(data_file, "memory_limit", lambda: 3_000_000)  # the default
    for path in paths:
        refused(path, r"max_memory_mib leaves 2 of 2")
    assert source(plain, max_memory_mib=1).num_samples == 1000


LONG = "x" * (1 << 20)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_few_bytes_that_stand_for_many_take_few(tmp_path, ending) -> None:
    """20,000 rows of one text of 1 MiB: 20 GB, if each row had its own."""
    rows = 20_000
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [LONG])
    table = pa.table({"a": np.arange(rows), "t": text, "label": np.zeros(rows, np.int64)})
    path = tmp_path / f"t.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(table, path, store_schema=False, compression="zstd")
        assert path.stat().st_size < 300_000
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    made = source(path, max_memory_mib=64, categories={"t": (LONG,)})
    x, _ = made.next_batch(CTX)
    assert x[5].tolist() == [5, 0]
    assert pa.default_memory_pool().max_memory() < max(peak, before) + (128 << 20)


def test_lists_of_one_number_are_counted(tmp_path) -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4_000_000)), 4_000)
    table = pa.table({"x": values, "label": np.zeros(1000, np.int64)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    refused(tmp_path / "t.parquet", "takes 30 MiB in memory.*max_memory_mib", max_memory_mib=20)
    assert source(tmp_path / "t.parquet").num_samples == 1000


def test_files_of_one_folder_share_the_memory(tmp_path) -> None:
    table = pa.table({"a": np.zeros(200_000), "label": np.zeros(200_000)})
    for name in "abc":
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    refused(tmp_path, r"c\.parquet takes 3 MiB in memory, and max_memory_mib leaves 1 of 8",
            max_memory_mib=8)  # fmt: skip
    assert source(tmp_path, max_memory_mib=16).num_samples == 600_000


@pytest.mark.parametrize("kind", ["file", "stream", "dictionary"])
def test_a_batch_that_unpacks_to_much_is_refused_before(tmp_path, kind) -> None:
    table = pa.table({"a": np.zeros(8 << 20), "label": np.zeros(8 << 20, np.int64)})
    if kind == "dictionary":
        words = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), ["y" * (64 << 20)])
        table = pa.table({"a": words, "label": [0, 1]})
    path = tmp_path / "t.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, opened(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 100_000
    before = pa.default_memory_pool().max_memory()
    refused(path, "max_memory_mib leaves 32 of 32", max_memory_mib=32)
    assert pa.default_memory_pool().max_memory() == before


@pytest.mark.parametrize("seed", range(60))
def test_damaged_headers_are_refused_or_read(tmp_path, seed) -> None:
    path = tmp_path / "t.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, TABLE.schema, options=options) as writer,
    ):
        writer.write_table(TABLE)
    raw = bytearray(path.read_bytes())
    draws = np.random.default_rng(seed)
    for at in draws.integers(8, len(raw), 4):
        raw[at] = draws.integers(0, 256)
    path.write_bytes(raw)
    with contextlib.suppress(errors.DataUnavailable):
        source(path, label="y").next_batch(CTX)


def test_one_hot_of_many_categories_is_counted(tmp_path) -> None:
    rows = 4_000
    table = pa.table({"a": [f"v{i}" for i in range(rows)], "label": np.zeros(rows, np.int64)})
    path = written(tmp_path / "t.csv", table)
    refused(path, "takes 61 MiB.*one_hot of fewer", one_hot=("a",), max_memory_mib=32)


def test_an_epoch_over_a_mapped_table_holds_one_batch(tmp_path) -> None:
    rows = 20_000
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * 100, np.float32)), 100)
    path = tmp_path / "t.arrow"
    table = pa.table({"x": values, "label": np.zeros(rows, np.int64)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    made = source(path)
    assert made.num_samples == rows
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        total = sum(float(x[:, 0].sum()) for x, _ in made.epoch_batches(50))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == rows
    assert peak < 700_000  # of 8 MB: two batches of 20 kB, and the rows
    assert pa.total_allocated_bytes() - before < 100_000


def test_a_mapped_table_that_changes_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "_MOST_ARRANGED_BYTES", 0)
    path = written(tmp_path / "t.arrow", TABLE)
    made = source(path, label="y", batch_size=2)
    made.next_batch(CTX)
    written(path, TABLE)
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.DataUnavailable, match=r"t\.arrow changed while it was in use"):
        made.next_batch(CTX)


def test_without_pyarrow_the_command_is_named(houses, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    refused(houses, r"pyarrow is not installed; run: .+ install 'pyarrow>=18'")


@pytest.mark.parametrize(
    "config",
    [
        {"missing": "guess"}, {"label": ""}, {"dtype": "int7"}, {"features": ("a", "a")},
        {"features": ("a",), "ignore": ("a",)}, {"ignore": ("label",)}, {"delimiter": ";;"},
        {"delimiter": "\n"}, {"encoding": "utf9"}, {"encoding": ""}, {"categories": {"a": ()}},
        {"categories": {"a": ("x", "x")}}, {"shards": 0},
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(config) -> None:
    with pytest.raises(errors.InvalidComponentConfig):
        source(Path("t.csv"), **config)


def content(ending: str, tmp: Path) -> bytes:
    table = TABLE.append_column("v", pa.array([[1, 2]] * 5)).append_column("w", pa.array(["s"] * 5))
    if ending in ("csv",):
        return HOUSES.replace("price", "y").encode()
    return written(tmp / f"t.{ending}", table).read_bytes()


@pytest.mark.parametrize("ending", ["csv", "parquet", "feather", "arrow"])
@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_of_any_kind_are_data_or_a_clear_error(tmp_path, ending, data) -> None:
    good = content(ending, tmp_path)
    kind = data.draw(st.sampled_from(["any", "cut", "changed"]))
    if kind == "any":
        made = data.draw(st.binary(max_size=200))
    elif kind == "cut":
        made = good[: data.draw(st.integers(0, len(good)))]
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        put = data.draw(st.binary(min_size=1, max_size=4))
        made = good[:at] + put + good[at + len(put) :]
    path = tmp_path / f"any.{ending}"
    path.write_bytes(made)
    with contextlib.suppress(errors.DataUnavailable):
        x, y = source(path, label="y").next_batch(CTX)
        assert len(x) == len(y)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=20),
    st.sampled_from([0, 256]),
)
def test_chunks_gather_like_one_array(lengths, wanted, few) -> None:
    whole = np.arange(sum(lengths) * 2).reshape(-1, 2)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    rows = np.array([n % len(whole) for n in wanted], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_FEW_ROWS", few)
        np.testing.assert_array_equal(columns.Chunks(parts)[rows], whole[rows])
