"""Folders of images: labels by folder, decoded per batch, and files that are none."""

from __future__ import annotations

import io
import os
import struct
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bbnode.components import DataUnavailable, InvalidComponentConfig
from bbnode.components.data import images
from bbnode.components.data.images import ImageFolderDataSource, ImageFolderDataSourceConfig
from tests.components.fakes import CTX


def source(path: Path, **config) -> ImageFolderDataSource:
    config = {"size": (4, 6), **config}
    return ImageFolderDataSource(ImageFolderDataSourceConfig(path=str(path), **config))


def save(path: Path, grey: int, shape=(5, 7, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, grey, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            save(tmp_path / name / f"{number}.png", 100 * label + 40 * number, (5 + number, 7, 3))
    return tmp_path


def test_folders_are_labels_and_images_are_scaled(folder) -> None:
    save(folder / "dog" / "deeper" / "4.jpg", 50)
    (folder / "cat" / ".DS_Store").write_bytes(b"junk")
    (folder / "README.md").write_text("about")
    batch, labels = source(folder).next_batch(CTX)
    assert (batch.shape, batch.dtype) == ((7, 3, 4, 6), np.float32)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    np.testing.assert_allclose(batch[:6, 0, 0, 0] * 255, [0, 40, 80, 100, 140, 180], atol=1e-4)
    np.testing.assert_allclose(batch[6] * 255, 50, atol=2)
    schema = source(folder).schema()
    assert (schema.features.shape, schema.features.dtype) == ((3, 4, 6), "float32")
    assert (schema.label_range, schema.classes) == ((0, 1), ("cat", "dog"))


def test_colours_stand_in_channels(tmp_path) -> None:
    save_as = tmp_path / "a" / "x.png"
    save_as.parent.mkdir()
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[1, 2] = (10, 20, 30)
    Image.fromarray(pixels).save(save_as)
    batch, _ = source(tmp_path, dtype="uint8").next_batch(CTX)
    assert batch.dtype == np.uint8
    np.testing.assert_array_equal(batch[0], pixels.transpose(2, 0, 1))
    grey, _ = source(tmp_path, dtype="uint8", channels=1).next_batch(CTX)
    assert grey.shape == (1, 1, 4, 6)


def test_other_modes_are_converted(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 6), 300, np.uint16)).save(tmp_path / "a" / "deep.png")
    Image.new("P", (6, 4), 0).save(tmp_path / "a" / "palette.gif")
    Image.new("RGBA", (6, 4), (9, 9, 9, 0)).save(tmp_path / "a" / "see_through.png")
    batch, _ = source(tmp_path, dtype="uint8").next_batch(CTX)
    assert batch[:, 0, 0, 0].tolist() == [1, 0, 255]
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(tmp_path / "a" / "float.tiff")
    with pytest.raises(DataUnavailable, match=r"float\.tiff has fractions of no known range \(F\)"):
        source(tmp_path).next_batch(CTX)


def test_a_peer_without_a_class_has_the_labels_of_the_others(folder) -> None:
    for image in (folder / "cat").iterdir():
        image.unlink()
    (folder / "cat").rmdir()
    _, labels = source(folder, classes=("ant", "cat", "dog")).next_batch(CTX)
    assert set(labels.tolist()) == {2}
    with pytest.raises(DataUnavailable, match=r"folder 'dog' in .* is none of `classes`"):
        source(folder, classes=("ant", "cat")).next_batch(CTX)


def test_decoded_images_stay_within_the_bound(folder, monkeypatch) -> None:
    decoded: list[str] = []
    real = images._Folder._decoded
    monkeypatch.setattr(
        images._Folder, "_decoded", lambda self, path: decoded.append(path) or real(self, path)
    )
    data = source(folder)
    first = [x for x, _ in data.epoch_batches(4)]
    again = [x for x, _ in data.epoch_batches(4)]
    assert len(decoded) == 6
    assert sorted(map(np.sum, np.concatenate(first))) == sorted(map(np.sum, np.concatenate(again)))
    decoded.clear()
    data = source(folder, cache_mib=0)
    for _ in range(2):
        list(data.epoch_batches(4))
    assert len(decoded) == 12
    data._loaded.features._room = 2
    for _ in range(2):
        list(data.epoch_batches(4))
    assert len(data._loaded.features._kept) == 2


def bomb(width: int, height: int) -> bytes:
    """A PNG whose head claims a size, with hardly any pixels behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("side", [9_000, 11_000, 30_000])
def test_decompression_bombs_are_refused_by_their_heads(folder, side) -> None:
    (folder / "cat" / "bomb.png").write_bytes(bomb(side, side))
    data = source(folder)
    with pytest.raises(DataUnavailable, match=r"cat/bomb\.png has more than 64000000 pixels"):
        data.on_data_loaded(CTX)


@pytest.mark.parametrize(
    "content", [b"junk", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"%!PS-Adobe-3.0"]
)
def test_files_that_are_no_images_are_named(folder, content) -> None:
    (folder / "dog" / "broken.png").write_bytes(content)
    with pytest.raises(DataUnavailable, match=r"dog/broken\.png can't be decoded"):
        source(folder).on_data_loaded(CTX)


def test_a_truncated_image_is_named(folder) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(folder / "cat" / "cut.png")
    whole = (folder / "cat" / "cut.png").read_bytes()
    (folder / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = source(folder)
    data.on_data_loaded(CTX)
    with pytest.raises(DataUnavailable, match=r"cat/cut\.png can't be decoded: .*truncated"):
        data.next_batch(CTX)


def test_what_is_no_image_by_its_name_is_refused(folder) -> None:
    (folder / "cat" / "notes.txt").write_text("x")
    why = r'notes\.txt is no image by its name.*; remove it, or set skip = \["\*\.txt"\]'
    with pytest.raises(DataUnavailable, match=why):
        source(folder).on_data_loaded(CTX)
    assert source(folder, skip=("*.TXT",)).num_samples == 6
    (folder / "dog" / "empty.png").touch()
    with pytest.raises(DataUnavailable, match=r"empty\.png is empty \(0 bytes\); remove it"):
        source(folder, skip=("*.txt",)).on_data_loaded(CTX)


def test_links_in_rings_and_pipes_are_refused(folder) -> None:
    (folder / "cat" / "up").symlink_to(folder / "cat")
    with pytest.raises(DataUnavailable, match="leads back to itself"):
        source(folder).on_data_loaded(CTX)
    (folder / "cat" / "up").unlink()
    (folder / "cat" / "me.png").symlink_to("me.png")
    with pytest.raises(DataUnavailable, match=r"me\.png"):
        source(folder).on_data_loaded(CTX)
    (folder / "cat" / "me.png").unlink()
    os.mkfifo(folder / "cat" / "pipe.png")
    with pytest.raises(DataUnavailable, match=r"pipe\.png is no regular file"):
        source(folder).on_data_loaded(CTX)


def test_links_to_folders_elsewhere_are_followed(folder, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere / "0.png", 1)
    (folder / "eel").symlink_to(elsewhere)
    _, labels = source(folder).next_batch(CTX)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_folders_that_hold_nothing_are_refused(tmp_path) -> None:
    for path, match in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "has no folders"),
        (tmp_path / "nul\0", "null"),
    ):
        with pytest.raises(DataUnavailable, match=match):
            source(path).on_data_loaded(CTX)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataUnavailable, match="hold no images"):
        source(tmp_path).on_data_loaded(CTX)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataUnavailable, match="Not a directory"):
        source(tmp_path / "file").on_data_loaded(CTX)


@pytest.mark.parametrize(
    "config",
    [
        {"size": (0, 4)}, {"size": (4, 1 << 20)}, {"channels": 2}, {"dtype": "float64"},
        {"classes": ("a", "a")}, {"max_pixels": 0}, {"cache_mib": -1},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(tmp_path, config) -> None:
    with pytest.raises(InvalidComponentConfig):
        source(tmp_path, **config)


def test_without_pillow_it_is_named(folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataUnavailable, match=r"pip install 'pillow>="):
        source(folder).on_data_loaded(CTX)


def encoded(kind: str) -> bytes:
    noise = np.random.default_rng(1).integers(0, 255, (16, 16, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).save(written, kind)
    return written.getvalue()


WHOLE = {kind: encoded(kind) for kind in images.FORMATS}


@given(
    st.sampled_from(sorted(WHOLE)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    st.integers(1, 2000),
)
def test_any_bytes_are_an_image_or_refused_by_name(tmp_path_factory, kind, changes, size) -> None:
    content = bytearray(WHOLE[kind][:size])
    for at, value in changes:
        content[at % len(content)] = value
    path = tmp_path_factory.mktemp("images") / "a" / "x.png"
    path.parent.mkdir()
    path.write_bytes(content)
    batch, told = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what it overlooks
        try:
            batch, _ = source(path.parent.parent).next_batch(CTX)
        except DataUnavailable as error:
            told = str(error)
    if batch is None:
        assert "x.png" in told
        assert "\n" not in told
    else:
        assert batch.shape == (1, 3, 4, 6)
