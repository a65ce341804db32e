"""Folders of images: labels by folder, decoded per batch, and files that are none."""

from __future__ import annotations

import io
import logging
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
from PIL import Image, ImageOps

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
        {"background": (0, 0, 256)}, {"skip": ("",)},
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


def stored(tmp_path: Path, image: Image.Image, name: str, **options) -> Path:
    (tmp_path / "a").mkdir(exist_ok=True)
    image.save(tmp_path / "a" / name, **options)
    return tmp_path


def first(path: Path, **config) -> np.ndarray:
    return source(path, **config).next_batch(CTX)[0][0]


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.tiff", "x.webp"])
@pytest.mark.parametrize("way", range(1, 9))
def test_images_stand_as_viewers_show_them(tmp_path, way, name) -> None:
    grey = np.arange(32, dtype=np.uint8).reshape(4, 8) * 8
    exif = Image.Exif()
    exif[0x0112] = way
    folder = stored(tmp_path, Image.fromarray(grey).convert("RGB"), name, exif=exif)
    with Image.open(folder / "a" / name) as image:
        wanted = ImageOps.exif_transpose(image).resize((6, 4), Image.BILINEAR)
    found = first(folder, dtype="uint8")
    np.testing.assert_array_equal(found, np.asarray(wanted.convert("RGB")).transpose(2, 0, 1))


def test_damaged_exif_turns_nothing(tmp_path) -> None:
    folder = stored(tmp_path, Image.new("RGB", (8, 4), "red"), "x.jpg", exif=b"Exif\0\0II*\0junk")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's
        assert first(folder, dtype="uint8").shape == (3, 4, 6)


# Mode, a colour of it, format, settings, and the red, green and blue that a viewer shows.
MODES = [
    ("RGBA", (10, 20, 30, 0), "png", {}, (255, 255, 255)),
    ("RGBA", (10, 20, 30, 0), "png", {"background": (0, 0, 9)}, (0, 0, 9)),
    ("RGBA", (10, 20, 30, 255), "png", {}, (10, 20, 30)),
    ("RGBA", (0, 0, 0, 51), "webp", {}, (204, 204, 204)),
    ("LA", (10, 0), "png", {}, (255, 255, 255)),
    ("PA", (0, 0), "tiff", {}, (255, 255, 255)),
    ("L", 77, "png", {"transparency": 77}, (255, 255, 255)),
    ("RGB", (1, 2, 3), "png", {"transparency": (1, 2, 3)}, (255, 255, 255)),
    ("P", 0, "png", {"transparency": 0}, (255, 255, 255)),
    ("P", 0, "gif", {"transparency": 0}, (255, 255, 255)),
    ("1", 1, "png", {}, (255, 255, 255)),
    ("CMYK", (0, 0, 0, 255), "tiff", {}, (0, 0, 0)),
    ("CMYK", (0, 255, 255, 0), "jpg", {}, (255, 0, 0)),
    ("I;16", 65535, "png", {}, (255, 255, 255)),
    ("I;16", 257, "tiff", {}, (1, 1, 1)),
    ("I;16", 5140, "pgm", {}, (20, 20, 20)),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "colour", "ending", "options", "wanted"), MODES)
def test_every_mode_is_shown_in_its_colours(
    tmp_path, mode, colour, ending, options, wanted
) -> None:
    options = dict(options)
    settings = {key: options.pop(key) for key in ("background",) if key in options}
    image = Image.new(mode, (6, 4), colour)
    folder = stored(tmp_path, image, f"x.{ending}", **options)
    found = first(folder, dtype="uint8", **settings)
    np.testing.assert_allclose(found[:, 0, 0], wanted, atol=2 if ending in ("jpg", "webp") else 0)
    grey = first(folder, dtype="uint8", channels=1, **settings)
    assert grey.shape == (1, 4, 6)


def test_sixteen_bits_become_floats_from_zero_to_one(tmp_path) -> None:
    folder = stored(tmp_path, Image.fromarray(np.full((4, 6), 300, np.uint16)), "x.png")
    np.testing.assert_allclose(first(folder), 300 / 65535, rtol=1e-6)
    Image.new("L", (6, 4), 51).save(folder / "a" / "y.png")
    batch, _ = source(folder).next_batch(CTX)
    np.testing.assert_allclose(batch[:, 0, 0, 0], [300 / 65535, 0.2], rtol=1e-6)


def test_white_of_tiff_files_is_what_their_tags_say(tmp_path) -> None:
    deep = Image.fromarray(np.full((4, 6), 1000, np.uint16))
    folder = stored(tmp_path, deep, "x.tiff", tiffinfo={262: 0})
    np.testing.assert_allclose(first(folder), 1 - 1000 / 65535, rtol=1e-5)


@pytest.mark.parametrize(("mode", "why"), [("I", "32 bits"), ("F", "fractions"), ("LAB", "LAB")])
def test_modes_without_known_colours_are_refused_when_the_source_is_loaded(
    tmp_path, mode, why
) -> None:
    folder = stored(tmp_path, Image.new(mode, (6, 4)), "x.tiff")
    with pytest.raises(DataUnavailable, match=rf"x\.tiff has .*{why}.*; save it with 8 or 16 bit"):
        source(folder).on_data_loaded(CTX)


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tiff"])
def test_the_first_frame_is_taken_and_the_log_says_so(tmp_path, caplog, ending) -> None:
    caplog.set_level(logging.INFO)
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue")]
    folder = stored(tmp_path, frames[0], f"x.{ending}", save_all=True, append_images=frames[1:])
    np.testing.assert_allclose(first(folder)[:, 0, 0], [1, 0, 0], atol=0.02)
    assert "1 file(s) have several frames" in caplog.text
    assert f"x.{ending}" in caplog.text


def test_folders_that_are_no_classes_are_left_out_and_named(folder, caplog) -> None:
    caplog.set_level(logging.INFO)
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir", "aaa_empty", "drafts"):
        (folder / name).mkdir()
    save(folder / "__MACOSX" / "x.png", 1)
    save(folder / "drafts" / "x.png", 1)
    save(folder / "cat" / "@eaDir" / "thumb.png", 1)
    (folder / "cat" / ".DS_Store").touch()
    made = source(folder, skip=("draft*",))
    assert made.next_batch(CTX)[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert made.schema().classes == ("cat", "dog")
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir", "aaa_empty (empty)", "drafts",
                 "cat/@eaDir", "cat/.DS_Store"):  # fmt: skip
        assert f"'{name}'" in caplog.text
    kept = source(folder, classes=("@eaDir", "aaa_empty", "cat", "dog"), skip=("drafts",))
    assert set(kept.next_batch(CTX)[1].tolist()) == {2, 3}


@pytest.mark.parametrize("name", ["Thumbs.db", "list.txt", "readme", "photo.heic"])
def test_files_that_are_no_images_are_named_with_what_leaves_them_out(folder, name) -> None:
    (folder / "cat" / name).touch()
    ending = Path(name).suffix.lower()
    pattern = f"*{ending}" if ending else name
    with pytest.raises(DataUnavailable) as caught:
        source(folder).on_data_loaded(CTX)
    assert f"cat/{name} is no image by its name" in str(caught.value)
    assert str(caught.value).endswith(f'remove it, or set skip = ["{pattern}"]')
    assert source(folder, skip=(pattern,)).num_samples == 6


def test_a_file_is_what_its_bytes_say_whatever_its_name(folder) -> None:
    Image.new("RGB", (6, 4), "white").save(folder / "cat" / "x.gif", "JPEG")
    assert source(folder).num_samples == 7


def test_names_that_cannot_be_printed_are_never_printed(folder) -> None:
    (folder / "cat" / "\x1b[2Jx.png").write_bytes(b"junk")
    with pytest.raises(DataUnavailable, match=r"cat/·\[2Jx\.png can't be decoded") as caught:
        source(folder).on_data_loaded(CTX)
    assert str(caught.value).isprintable()
    (folder / os.fsdecode(b"\xff")).mkdir()
    Image.new("L", (6, 4)).save(os.fsencode(folder) + b"/\xff/x.png")
    with pytest.raises(DataUnavailable, match=r"name of the folder '·' .* rename it") as caught:
        source(folder, skip=("*2Jx.png",)).on_data_loaded(CTX)
    assert str(caught.value).isprintable()
