"""Files of items for an index: what each kind gives, and rows that are no items."""

from __future__ import annotations

import datetime
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components.data.item_files.base import ItemBatch, ItemFileRefused, ItemLayout
from bbnode.components.data.item_files.file import ItemFile

ROWS = [
    {"id": 7, "title": 'Ωmega, "quoted"', "year": 1999, "zip": "01234", "vector": [0.5, 1.0]},
    {"id": 9, "title": "plain", "year": 2020, "zip": "94110", "vector": [-2.0, 3.25]},
]
METADATA = [{k: v for k, v in row.items() if k not in ("id", "vector")} for row in ROWS]


def read(path: Path, *, size: int = 100, skip_bad: bool = False, **layout: Any) -> ItemBatch:
    """All items of a file as one batch."""
    with ItemFile(path, ItemLayout(**layout)) as file:
        batches = list(file.batches(size, skip_bad=skip_bad))
    first = batches[0]
    for more in batches[1:]:
        for name in ("rows", "ids", "vectors"):
            if getattr(first, name) is not None:
                setattr(first, name, np.concatenate([getattr(first, name), getattr(more, name)]))
        for name in ("texts", "metadata"):
            if getattr(first, name) is not None:
                setattr(first, name, getattr(first, name) + getattr(more, name))
        first.skipped += more.skipped
    return first


def refused(path: Path, match: str, **layout: Any) -> None:
    with pytest.raises(ItemFileRefused, match=match) as caught:
        read(path, **layout)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def as_csv(path: Path) -> Path:
    path.write_text(
        "id,title,year,zip,x0,x1\n"
        '7,"Ωmega, ""quoted""",1999,01234,0.5,1\n'
        "9,plain,2020,94110,-2,3.25\n",
        encoding="utf-8",
    )
    return path


def as_parquet(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def as_arrow(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(ROWS)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array([0.5, 1, -2, 3.25], pa.float32()), 2)
    table = table.set_column(table.column_names.index("vector"), "vector", fixed)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def as_npz(path: Path) -> Path:
    columns = {name: np.array([row[name] for row in ROWS]) for name in ROWS[0]}
    np.savez(path, **{{"vector": "vectors"}.get(name, name): c for name, c in columns.items()})
    return path


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("name", "write", "layout"),
    [
        ("a.jsonl", lambda path: jsonl(path, ROWS), {}),
        ("ü ñ.csv", as_csv, {"vector": ("x*",)}),
        ("a.parquet", as_parquet, {}),
        ("a.arrow", as_arrow, {}),
        ("a.npz", as_npz, {}),
    ],
)
def test_each_kind_gives_the_same_items(
    tmp_path: Path, name: str, write: Any, layout: dict[str, Any], size: int
) -> None:
    found = read(write(tmp_path / name), size=size, **layout)
    assert found.ids is not None
    assert found.vectors is not None
    assert found.ids.dtype == np.int64
    assert found.ids.tolist() == [7, 9]
    assert found.vectors.dtype == np.float32
    assert found.vectors.tolist() == [row["vector"] for row in ROWS]
    assert found.metadata == METADATA
    assert found.rows.tolist() == [0, 1]


def test_an_array_alone_is_vectors(tmp_path: Path) -> None:
    vectors = np.arange(12, dtype=np.float64).reshape(4, 3)
    np.save(tmp_path / "v.npy", np.asfortranarray(vectors))
    with ItemFile(tmp_path / "v.npy") as file:
        assert file.count == 4
        batches = list(file.batches(3))
    assert [len(batch) for batch in batches] == [3, 1]
    assert np.array_equal(
        np.concatenate([b.vectors for b in batches if b.vectors is not None]), vectors
    )
    assert all(batch.ids is None and batch.metadata is None for batch in batches)


def test_columns_are_chosen(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", [{"id": "a7", "e": [1, 2], "f": [3, 4], "n": None, "t": "x"}]
    )
    found = read(path, vector=("f",), row_ids=True, metadata=("t", "id", "n"))
    assert found.ids is None
    assert found.vectors is not None
    assert found.vectors.tolist() == [[3, 4]]
    assert found.metadata == [{"t": "x", "id": "a7"}]
    found = read(path, text="t", row_ids=True, metadata=())
    assert (found.texts, found.vectors, found.metadata) == (["x"], None, [{}])
    refused(path, "which of its columns are the vectors", row_ids=True)
    refused(path, "--id-column 'ident': there is 'id', 'e'", vector=("f",), id="ident")
    refused(path, "whole numbers .* --row-ids", vector=("f",))
    refused(path, "'e' is a list of 2; metadata are numbers", vector=("f",), row_ids=True)


def test_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\ufeffone\r\n\n  \nzwei ü\n", encoding="utf-8")
    found = read(tmp_path / "t.txt", text="text")
    assert found.texts == ["one", "zwei ü"]
    assert found.metadata == [{"text": "one"}, {"text": "zwei ü"}]
    assert [found.place(row) for row in (0, 1)] == ["line 1", "line 4"]
    refused(tmp_path / "t.txt", "--encoder DIR")


def test_a_column_of_csv_has_one_type(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "v,whole,part,flag,mixed,blank,big\n"
        '"[1, 2]",1,1.5,true,1,,99999999999999999999\n'
        '"[3, 4]",,2,false,one,,1\n'
    )
    found = read(tmp_path / "t.csv")
    assert found.metadata == [
        {"whole": 1, "part": 1.5, "flag": True, "mixed": "1", "big": 1e20},
        {"part": 2.0, "flag": False, "mixed": "one", "big": 1.0},
    ]


def test_dates_are_texts_that_sort(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"v": [1.0], "on": datetime.date(2020, 1, 2), "price": float("nan")}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet").metadata == [{"on": "2020-01-02"}]


BAD_LINES = [
    ("no JSON", "{", "line 2: no JSON"),
    ("no object", "[1]", "line 2: no JSON object"),
    ("NaN", '{"vector": [1, NaN]}', "line 2: number 1 of the vector .* NaN"),
    ("beyond float32", '{"vector": [1e300, 1]}', "line 2: number 0 .* too large for float32"),
    ("another length", '{"vector": [1, 2, 3]}', "line 2: a vector of 3 numbers; .* have 2"),
    ("texts", '{"vector": ["1", "2"]}', "line 2: 'vector' is a list of 2, and no list of numbers"),
    ("ragged", '{"vector": [[1], [2, 3]]}', "line 2: 'vector' is a list"),
    ("empty", '{"vector": []}', "line 2: 'vector' is a list of 0"),
    ("no vector", '{"title": "x"}', "line 2: which of its columns"),
    ("an id", '{"id": 4, "vector": [1, 2]}', "line 2: only it has an id"),
    ("nested", '{"vector": [1, 2], "a": {"b": 1}}', "line 2: 'a' is a dict of 1; metadata"),
    ("large", '{"vector": [1, 2], "a": 9223372036854775808}', "line 2: 'a' is 9223372036854775808"),
]


@pytest.mark.parametrize(("line", "match"), [each[1:] for each in BAD_LINES], ids=lambda _: "")
def test_a_row_that_is_no_item_is_named(tmp_path: Path, line: str, match: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"vector": [1, 2]}}\n{line}\n{{"vector": [3, 4]}}\n')
    given = []
    with ItemFile(path) as file, pytest.raises(ItemFileRefused, match=match):
        given.extend(file.batches(100))
    assert [batch.rows.tolist() for batch in given] == [[0]]  # what was good came first
    found = read(path, skip_bad=True)
    assert found.vectors is not None
    assert found.vectors.tolist() == [[1, 2], [3, 4]]
    assert found.rows.tolist() == [0, 2]
    assert len(found.skipped) == 1


def test_rows_of_arrays_that_are_no_items_are_named(tmp_path: Path) -> None:
    vectors = np.ones((5, 2))
    vectors[3, 1] = np.nan
    np.save(tmp_path / "a.npy", vectors)
    refused(tmp_path / "a.npy", "row 3: number 1 of the vector")
    assert read(tmp_path / "a.npy", skip_bad=True).rows.tolist() == [0, 1, 2, 4]
    np.savez(tmp_path / "b.npz", vectors=np.ones((2, 2)), ids=[1, -1])
    refused(tmp_path / "b.npz", "row 1: the id -1")
    np.savez(tmp_path / "c.npz", vectors=np.ones((2, 2)), names=np.array(["a"]))
    refused(tmp_path / "c.npz", "different lengths")


def test_rows_of_tables_that_are_no_items_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in {
        "null": [[1.0, 2.0], None],
        "inner": [[1.0, 2.0], [1.0, None]],
        "nan": [[1.0, 2.0], [1.0, float("nan")]],
        "length": [[1.0, 2.0], [1.0]],
    }.items():
        parquet.write_table(pa.table({"vector": rows}), tmp_path / f"{name}.parquet")
        refused(tmp_path / f"{name}.parquet", "row 1: ")
        assert read(tmp_path / f"{name}.parquet", skip_bad=True).rows.tolist() == [0]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.npy", b"", "is empty"),
        ("a.npy", b"\x93NUMPY\x01\x00\x04\x00oops", "can't be read"),
        ("a.npz", b"PK\x03\x04", "can't be read"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"x,y\n", "it has no rows"),
        ("a.csv", b"a;b\n1;2\n", "divided by commas"),
        ("a.csv", b"x,x\n1,2\n", "several columns 'x'"),
        ("a.csv", b"x,y\n1,2\n3\n", "line 3: 1 cells; the first line has 2"),
        ("a.csv", b"x,y\n1,2\n3,no\n", "line 3: 'y' is 'no', and no number"),
        ("a.csv", b"x,y\n1,2\n3,\n", "line 3: 'y' is '', and no number"),
        ("a.csv", b"x,y\n1,nan\n", "line 2: number 1 of the vector"),
        ("a.csv", b"x,y\n1,\xff\n", "no UTF-8"),
        ("a.csv", b'x,y\n1,"2\n', "no CSV"),
        ("a.jsonl", b"\n \n", "it has no rows"),
        ("a.jsonl", b"\xff\n", "line 1 is no UTF-8"),
        ("a.parquet", b"PAR1 and no more", "can't be read"),
        ("a.parquet", b"something else", "no Parquet and no Arrow file"),
        ("a.bin", b"1", "files of items end with"),
    ],
)
def test_files_that_are_none_are_refused(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    layout = {"vector": ("x", "y")} if name.endswith("csv") and b"," in content else {}
    refused(tmp_path / name, match, **layout)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.npy", "No such file")
    (tmp_path / "folder.npy").mkdir()
    refused(tmp_path / "folder.npy", "is a folder")
    os.mkfifo(tmp_path / "fifo.npy")
    refused(tmp_path / "fifo.npy", "is a FIFO")
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], object), allow_pickle=True)
    refused(tmp_path / "o.npy", "pickled Python objects")
    np.save(tmp_path / "one.npy", np.ones(4))
    refused(tmp_path / "one.npy", r"save it as \[1, D\]")
    np.save(tmp_path / "t.npy", np.array([["a"]]))
    refused(tmp_path / "t.npy", "not of numbers")


def test_few_bytes_that_stand_for_many_are_read_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 rows with one text of 1 MiB: 10 GB at once, if a batch were of as many rows."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = 10_000
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * (1 << 20)])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * (2 * rows), pa.float32()), 2)
    table = pa.table({"vector": vectors, "note": text})
    path = tmp_path / "t.parquet"
    parquet.write_table(table, path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 300_000
    tracemalloc.start()
    try:
        with ItemFile(path) as file:
            first = next(file.batches(4))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert first.metadata[0] == {"note": "x" * (1 << 20)}
    assert peak < 256 << 20
    monkeypatch.setattr("bbnode.components.data.item_files.sources.memory_limit", lambda: 1 << 10)
    refused(path, "row group 0 takes")


def test_a_batch_of_items_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * (1 << 21), pa.float32()), 2)
    table = pa.table({"vector": vectors})
    path = tmp_path / "t.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    monkeypatch.setattr("bbnode.components.data.item_files.sources.memory_limit", lambda: 1 << 20)
    refused(path, "its batches unpack to 8 MiB")
