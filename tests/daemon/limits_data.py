"""Limits of data: files, columns, statistics, and what is predicted; each with what reaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    DataUnavailable,
    ImageFolderDataSource,
    ImageFolderDataSourceConfig,
    TableDataSource,
    TableDataSourceConfig,
)
from bbnode.components.data import arrow_sizes, columns, csv_files, images
from bbnode.components.data.arrow_sizes import _FlatTable
from bbnode.components.data.description import DataDescription
from bbnode.components.data.item_files.base import ItemFileRefused
from bbnode.components.data.schema import TensorSchema
from bbnode.components.data.statistics import Moments, read_label_counts
from bbnode.components.encoders.files import _EncoderReader
from bbnode.components.errors import ComponentError
from bbnode.daemon.predicting import inputs
from bbnode.daemon.predicting.inputs import ExamplesRefused, Given
from bbnode.ir.values import Metadata
from tests.components.fakes import CTX
from tests.components.test_item_files import read as read_items
from tests.daemon.limits_reach import Place, Reach, refusing


def _table(path: Path) -> TableDataSource:
    made = TableDataSource(TableDataSourceConfig(path=str(path), label="y"))
    made.on_data_loaded(CTX)
    return made


def _array(path: Path, **settings: Any) -> ArrayDataSource:
    made = ArrayDataSource(ArrayDataSourceConfig(path=str(path), **settings))
    made.on_data_loaded(CTX)
    return made


def _lowered(place: Place, module: Any, name: str, value: int) -> None:
    """Lower a bound: that it is read from there is what the same without it shows."""
    place.patch.setattr(module, name, value)


def _line_of_csv(most: int, place: Place) -> None:
    """A line of 256 MiB takes seconds, and a GiB: it is read with the bound, and not below it."""
    path = place.folder / "t.csv"
    path.write_text("x,y\n0" + " " * (2 << 20) + ",1\n2,0\n")
    _table(path)
    _lowered(place, csv_files, "_MAX_BLOCK_BYTES", 1 << 20)
    with pytest.raises(DataUnavailable, match="more than 1 MiB; a quote that never closes"):
        _table(path)
    assert most == 256 << 20


def _description_of_files(most: int, place: Place) -> None:
    place.sparse(most + 1, "state.json")
    with pytest.raises(DataUnavailable, match=f"more than {most}"):
        _table(place.folder)


def _header_of_batch(most: int, place: Place) -> None:
    """A header that says one byte more, in a file that is that long."""
    for at, head in ((0, b"\xff" * 4), (None, b"")):
        path = place.sparse(most + 4096, "t.arrow")
        said = (most + 1).to_bytes(4, "little")
        with path.open("r+b") as file:
            file.write(head + said if at == 0 else b"ARROW1\0\0")
            if at is None:
                file.seek(-10, 2)
                file.write(said + b"ARROW1")
        with pytest.raises(DataUnavailable, match=f"more than {most}; write it again"):
            _table(path)


def _entries(most: int) -> None:
    count = (most + 1).to_bytes(4, "little")
    vtable = bytes((6, 0, 8, 0, 4, 0)) + bytes(2)
    data = bytes((12, 0, 0, 0)) + vtable + (8).to_bytes(4, "little") + (4).to_bytes(4, "little")
    table = _FlatTable.root(data + count)
    with pytest.raises(ValueError, match=f"more than {most}; write it again as several"):
        table.structs(0, arrow_sizes._BLOCK)


def _batches(most: int, place: Place) -> None:
    """A stream of four batches, of which reading a million takes seconds."""
    pa = pytest.importorskip("pyarrow")
    path, table = place.folder / "t.arrow", pa.table({"x": [1.0] * 4, "y": [0] * 4})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    _table(path)
    _lowered(place, arrow_sizes, "_MAX_MESSAGES", 4)
    with pytest.raises(DataUnavailable, match="more than 4 batches of rows; write it again"):
        _table(path)
    assert most == 1 << 20


def _axes(levels: int) -> None:
    pa = pytest.importorskip("pyarrow")
    value: Any = 1.0
    for _ in range(levels):
        value = [value]
    found = columns._lists(pa, pa.array([value]))
    assert found.shape == (1,) * (levels + 1)


def _images(folder: Path) -> None:
    made = ImageFolderDataSource(ImageFolderDataSourceConfig(path=str(folder)))
    made.on_data_loaded(CTX)


def _image(folder: Path, name: str) -> None:
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True, exist_ok=True)
    image.new("L", (2, 2)).save(folder / name)


def _folders(most: int, place: Place) -> None:
    _image(place.folder / "other", "a.png")
    deep = place.folder / "class"
    for _ in range(most):
        deep /= "f"
    _image(deep, "a.png")
    _images(place.folder)
    _image(deep / "f", "a.png")
    with pytest.raises(DataUnavailable, match=f"more than {most} folders below its class; remove"):
        _images(place.folder)


def _files(most: int, place: Place) -> None:
    for name in ("a.png", "b.png"):
        _image(place.folder / "one", name)
        _image(place.folder / "two", name)
    _lowered(place, images, "_MAX_FILES", 4)
    _images(place.folder)
    _lowered(place, images, "_MAX_FILES", 3)
    with pytest.raises(DataUnavailable, match=r"more than 3 files .*to another client"):
        _images(place.folder)
    assert most == 5_000_000


def _line_of_items(most: int, place: Place) -> None:
    begin, end = b'{"id": 1, "vector": [1.0], "a": "', b'"}\n'
    path = place.folder / "items.jsonl"
    for more in (0, 1):
        path.write_bytes(begin + b"x" * (most + more - len(begin) - len(end)) + end)
        if not more:
            read_items(path)
            continue
        with pytest.raises(ItemFileRefused, match=f"longer than {most} bytes; is it one item"):
            read_items(path)
    (place.folder / "items.csv").write_bytes(b"id,x0,a\n1,1," + b"x" * (most + 1) + b"\n")
    with pytest.raises(ItemFileRefused, match="field larger than field limit"):
        read_items(place.folder / "items.csv", vector=("x0",))


def _npy(place: Place, size: int) -> None:
    said = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"
    np.save(place.folder / "y.npy", np.array([0, 1]))
    path = place.folder / "x.npy"
    header = said + b" " * (size - len(said) - 1) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + header + bytes(16))
    _array(place.folder)


def _header_of_array(most: int, place: Place) -> None:
    refusing(DataUnavailable, lambda n: _npy(place, n), f"more than the {most}")(most)


def _measured(place: Place, x: Any, y: Any) -> Metadata:
    np.savez(place.folder / "data.npz", x=x, y=y)
    _, said = _array(place.folder / "data.npz").statistics(CTX)
    return said


def _labels(most: int, place: Place) -> None:
    x = np.zeros((2, 1), np.float32)
    counts = str(_measured(place, x, np.array([0, most - 1]))["label_counts"])
    assert len(read_label_counts(Metadata({"label_counts": counts}), 2)) == most
    assert "label_counts" not in _measured(place, x, np.array([0, most]))
    with pytest.raises(ValueError, match="too long"):
        read_label_counts(Metadata({"label_counts": counts.replace("0", "0,0", 1)}), 2)


def _features(most: int, place: Place) -> None:
    with pytest.raises(DataUnavailable, match=f"more than the {most}"):
        _measured(place, np.zeros((2, most + 1), np.float32), np.array([0, 1]))
    tensor = np.zeros((5, most + 1))
    tensor[0] = 1
    Moments.read(tensor[:, :most])
    with pytest.raises(ValueError, match="shape"):
        Moments.read(tensor)


def _statistics(most: int, place: Place) -> None:
    np.savez(place.folder / "data.npz", x=np.zeros((2, 1), np.float32), y=np.array([0, 1]))
    path = place.sparse(most + 1, "statistics.json")
    with pytest.raises(DataUnavailable, match=f"more than {most}; is it"):
        _array(place.folder / "data.npz", standardize="federated", statistics=str(path))


def _encoder(most: int, place: Place) -> None:
    path = place.folder / "config.json"
    reader = _EncoderReader.__new__(_EncoderReader)
    reader._component = "bbnode.TextEncoder"
    for more in (0, 1):
        path.write_text(json.dumps({"a": "x" * (most + more - 9)}))
        assert path.stat().st_size == most + more
        if not more:
            assert reader._json(path, dict)
            continue
        with pytest.raises(ComponentError, match=f"more than {most}"):
            reader._json(path, dict)


def _predicted(most: int, place: Place) -> None:
    """A file of a GiB is seen by its size; standard input has none, and is read that far."""
    data = DataDescription(kind="text", features=TensorSchema(dtype="int64", shape=(4,)))
    with pytest.raises(ComponentError, match=f"more than {most}"):
        inputs._lines(data, Given(path=str(place.sparse(most + 1, "t.txt"))))
    asked = []

    def read(size: int) -> bytes:
        asked.append(size)
        return b"x" * min(size, 9)

    inputs._lines(data, Given(path="-", read_stdin=read))
    assert asked == [most + 1]
    _lowered(place, inputs, "_MAX_TEXT_BYTES", 8)
    with pytest.raises(ExamplesRefused, match="more than 8 bytes; split it"):
        inputs._lines(data, Given(path="-", read_stdin=read))


REACHED: dict[str, Reach] = {
    "components.data.csv_files._MAX_BLOCK_BYTES": _line_of_csv,
    "components.data.arrow_files.MAX_JSON_BYTES": _description_of_files,
    "components.data.arrow_sizes._MAX_HEADER_BYTES": _header_of_batch,
    "components.data.arrow_sizes._MAX_ENTRIES": _entries,
    "components.data.arrow_sizes._MAX_MESSAGES": _batches,
    "components.data.columns._MOST_AXES": refusing(
        columns.UnsuitableColumn, _axes, "nested more than"
    ),
    "components.data.images._MAX_DEPTH": _folders,
    "components.data.images._MAX_FILES": _files,
    "components.data.item_files.sources._MAX_LINE_BYTES": _line_of_items,
    "components.data.numpy_files._MOST_HEADER_BYTES": _header_of_array,
    "components.data.statistics.MAX_LABELS": _labels,
    "components.data.statistics._MAX_FEATURES": _features,
    "components.data.statistics._MAX_FILE_BYTES": _statistics,
    "components.encoders.files._MAX_JSON_BYTES": _encoder,
    "daemon.predicting.inputs._MAX_TEXT_BYTES": _predicted,
}
