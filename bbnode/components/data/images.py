"""A folder of images with one folder per class, decoded one batch at a time.

Rule: one pass over the folder, when it is loaded, lists the files and looks at the head of each, so
that a file that is no image, or a far too large one, is refused by its name before training begins.
Pixels are decoded when a batch asks for them, as viewers show them: turned as the camera says, over
a background where they are transparent, the first one of several frames. A bounded part stays in
memory.
"""

from __future__ import annotations

import fnmatch
import importlib
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from bbnode.components.data.base import ByRow
from bbnode.components.data.data_file import named
from bbnode.components.data.description import DataDescription, settings_of
from bbnode.components.data.number_text import quoted
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.libraries import PILLOW, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.components.settings import path_setting
from bbnode.ir.decoding import shown
from bbnode.ir.installation import install
from bbnode.ir.types import TENSOR_BY_ELEM, TENSOR_FLOAT, TENSOR_INT64, TypeNode

logger = logging.getLogger(__name__)

Pixels: TypeAlias = npt.NDArray[np.uint8 | np.float32]  # a float from 0 to 1, where 8 bits are few
Rows: TypeAlias = npt.NDArray[np.int64]

# The formats that are decoded. Pillow knows many more; some of them run other programs.
FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_SUFFIXES: Final = frozenset(
    (".bmp", ".gif", ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".pbm", ".pgm", ".ppm", ".pnm",
     ".tif", ".tiff", ".webp")
)  # fmt: skip
# Folders that archives, file servers and systems leave behind, besides those that begin with a dot.
_NO_CLASSES: Final = frozenset(
    ("__macosx", "@eadir", "__pycache__", "lost+found", "$recycle.bin", "#recycle",
     "system volume information")
)  # fmt: skip
_MAX_FILES: Final = 5_000_000
_MAX_DEPTH: Final = 32  # folders inside a class
_MAX_SIDE: Final = 1 << 14  # pixels of an example's side
_MOST_LISTED: Final = 8  # names in a line of the log
_WHITE, _DEEP_WHITE = 255, 65_535  # of 8 and of 16 bits
_ORIENTATION: Final = 0x0112  # EXIF: the way a camera was held
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
# Modes that are converted; what others hold is of no known range, or has no colours to show.
_MODES: Final = frozenset(
    ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LA", "La", "PA", "RGBA", "RGBa",
     "I;16", "I;16L", "I;16B", "I;16N")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageFolderDataSourceConfig(StandardizedConfig):
    """Settings of `ImageFolderDataSource`, besides those of every source that can be split.

    Attributes:
        path: of a folder with one folder per class, named like the class.
        classes: names of the classes, in the order of their labels 0, 1, …, before peers agree.
            Empty: the names of the folders here, sorted. With them, a peer that has no images
            of a class has the same labels as the others.
        size: height and width to which every image is scaled.
        channels: 3 (red, green, blue) or 1 (grey).
        dtype: "float32", from 0 to 1, or "uint8".
        background: red, green and blue of what lies behind transparent pixels, 0 to 255 each.
        skip: patterns of names of files and folders that are left out: "*.txt".
        max_pixels: of a file; larger images are refused before they are decoded.
        cache_mib: MiB of decoded images that stay in memory; 0 decodes each one every time.
    """

    path: str = path_setting()
    classes: tuple[str, ...] = ()
    size: tuple[int, int] = (224, 224)
    channels: int = 3
    dtype: Literal["float32", "uint8"] = "float32"
    background: tuple[int, int, int] = (255, 255, 255)
    skip: tuple[str, ...] = ()
    max_pixels: int = 64_000_000
    cache_mib: int = 256


@register_component
class ImageFolderDataSource(StandardizedDataSource):
    """Images [N, channels, height, width] from class folders, labels [N] int64."""

    TYPE_NAME: ClassVar[str] = "bbnode.ImageFolderDataSource"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (PILLOW,)
    Config: ClassVar[type] = ImageFolderDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": (TENSOR_FLOAT, TENSOR_BY_ELEM[onnx.TensorProto.UINT8]),
        "NextBatch.labels": TENSOR_INT64,
    }
    describes = "images"
    config: ImageFolderDataSourceConfig

    def __init__(self, config: ImageFolderDataSourceConfig) -> None:
        super().__init__(config)
        self.require_choice("dtype", Literal["float32", "uint8"])
        self.require(
            all(1 <= side <= _MAX_SIDE for side in config.size),
            f"size {list(config.size)} is not height and width from 1 to {_MAX_SIDE}",
        )
        self.require(config.channels in (1, 3), f"channels {config.channels} is not 1 or 3")
        self.require(
            config.max_pixels >= 1 and config.cache_mib >= 0,
            "max_pixels has to be 1 or more, and cache_mib 0 or more",
        )
        self.require(
            all(0 <= each <= _WHITE for each in config.background),
            f"background {list(config.background)} is not red, green and blue from 0 to {_WHITE}",
        )
        self.require(all(config.skip), "`skip` has an empty pattern")
        self.require(
            len(set(config.classes)) == len(config.classes), "`classes` names a class twice"
        )
        self._classes: tuple[str, ...] = config.classes

    def load(self) -> tuple[ByRow, ByRow]:
        found = _Folder(self.config, self.TYPE_NAME)
        self._classes = found.classes
        return found, found.labels

    def describe(self) -> DataDescription:
        """Return what an image is scaled to, and the names of the classes."""
        made = super().describe()
        settings = {**settings_of("images", self.config), **made.settings}
        settings["dtype"] = self.config.dtype
        return self.as_adopted(replace(made, kind="images", settings=settings))

    def meaning(self, features: ByRow, labels: ByRow) -> SharedSchema:
        """Return what an image is made of, beside its size and channels; and the classes."""
        pixels = self.config.dtype
        reading = {
            "image mode": "gray" if self.config.channels == 1 else "RGB",
            "pixels": pixels,
            "pixel range": "0 to 255" if pixels == "uint8" else "0 to 1",
        }
        return replace(super().meaning(features, labels), reading=reading)

    def label_meaning(self) -> tuple[str | None, tuple[str, ...] | None]:
        """Return no label's name, and the names of the folders."""
        return None, self._classes

    def examples(self) -> tuple[ByRow, tuple[str, ...]]:
        """Return the images at `path`, one file or all in a folder, and the path of each.

        They need no class folders. Raises DataUnavailable.
        """
        found = _Folder(self.config, self.TYPE_NAME, labelled=False)
        return self.served(found), found.paths

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return no column, and the names of the classes."""
        return "", self._classes


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 (speed)


class _Folder:
    """The images of a folder, by row: NCHW.

    Attributes:
        classes: names of the labels.
        labels: of each image, int64 [N]; 0 where the images have none.
    """

    def __init__(
        self, config: ImageFolderDataSourceConfig, component: str, *, labelled: bool = True
    ) -> None:
        """List the files and check their heads. Raises DataUnavailable, which names the file."""
        self._config = config
        self._component = component
        self._root = Path(config.path)
        try:
            self._pillow: Any = importlib.import_module("PIL.Image")
            self._ops: Any = importlib.import_module("PIL.ImageOps")
        except ImportError as error:
            raise DataUnavailable(
                f"{component}: images need the library Pillow; run: {install(PILLOW.requirement)}"
            ) from error
        self._paths: list[str] = []
        self._left_out: list[str] = []  # the first of them
        self._left_count = 0
        self._count = 0  # of files that were listed
        self._skips = [re.compile(fnmatch.translate(each.casefold())) for each in config.skip]
        self.classes: tuple[str, ...] = ()
        if labelled:
            labels = self._labelled()
        else:
            single = self._root.is_file()
            self._paths.extend([str(self._root)] if single else self._files(self._root, ()))
            labels = [0] * len(self._paths)
        self.labels = np.array(labels, np.int64)
        if not self._paths:
            raise DataUnavailable(f"{component}: the folders in {named(self._root)} hold no images")
        self._tell_left_out()
        self._check_heads()
        self.shape = (len(labels), config.channels, *config.size)
        self.dtype = np.dtype(config.dtype)
        self._kept: OrderedDict[int, Pixels] = OrderedDict()
        self._room = (config.cache_mib << 20) // (config.channels * config.size[0] * config.size[1])
        self._lock = threading.Lock()

    @property
    def paths(self) -> tuple[str, ...]:
        """The file of each image."""
        return tuple(self._paths)

    def _tell_left_out(self) -> None:
        if self._left_out:
            more = self._left_count - len(self._left_out)
            logger.info(
                "%s: %d files and folders in %s are left out: %s%s", self._component,
                self._left_count, self._root,
                ", ".join(map(shown, self._left_out)), ", …" if more > 0 else "",
            )  # fmt: skip

    def _check_heads(self) -> None:
        """Look at the head of each file. Raises DataUnavailable."""
        several = []
        for path in self._paths:
            with self._open(path) as image:
                self._refuse_mode(path, image)
                # JPEG has pictures of other sizes behind the one that is shown, no frames.
                if image.format != "MPO" and getattr(image, "is_animated", False):
                    several.append(path)
        if several:
            logger.info(
                "%s: %d file(s) have several frames or pages; the first one is taken: %s%s",
                self._component, len(several), named(several[0]), ", …" if several[1:] else "",
            )  # fmt: skip

    def _refuse_mode(self, path: str, image: Any) -> None:
        if image.mode in _MODES or (image.mode == "I" and image.format == "PPM"):
            return
        what = {
            "I": "whole numbers of 32 bits, of no known range",
            "F": "fractions of no known range",
            "LAB": "colours in LAB",
        }.get(image.mode, f"pixels of the mode {shown(image.mode)}")
        raise self._bad(
            path, f"has {what} ({image.mode}); save it with 8 or 16 bits a colour, or remove it"
        )

    def _labelled(self) -> list[int]:
        """List the images of the class folders; return their labels."""
        config, component = self._config, self._component
        found = list(self._entries(self._root))
        folders = sorted(e.name for e in found if self._is_folder(e))
        of_folder = {name: list(self._files(self._root / name, ())) for name in folders}
        if not config.classes:  # an empty folder would move the numbers of those behind it
            for name in [name for name in folders if not of_folder[name]]:
                self._leave_out(f"{name} (empty)")
                folders.remove(name)
            if not folders and of_folder:
                raise DataUnavailable(
                    f"{component}: the folders in {named(self._root)} hold no images"
                )
        strange = [name for name in folders if not name.isprintable()]
        if strange:  # half a surrogate pair stands for a byte that is no UTF-8
            raise DataUnavailable(
                f"{component}: the name of the folder {shown(strange[0])} in {named(self._root)} "
                "can't be printed, or is no UTF-8, and classes have names; rename it"
            )
        self.classes = config.classes or tuple(folders)
        if not self.classes:
            raise DataUnavailable(
                f"{component}: {named(self._root)} has no folders; it needs one for each class"
            )
        unknown = [name for name in folders if name not in self.classes]
        if unknown:
            raise DataUnavailable(
                f"{component}: the folder {shown(unknown[0])} in {named(self._root)} is none of "
                "`classes`; add it there, remove it, or name it in `skip`"
            )
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            if name not in folders:
                continue
            self._paths.extend(of_folder[name])
            labels.extend([label] * len(of_folder[name]))
        return labels

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, rows: Any, /) -> npt.NDArray[Any]:
        batch = np.empty((len(rows), *self.shape[1:]), np.uint8)
        deep: dict[int, Pixels] = {}
        for at, row in enumerate(rows):
            image = self._image(int(row))
            if image.dtype == np.uint8:
                batch[at] = image
            elif self.dtype == np.uint8:
                batch[at] = np.rint(image * np.float32(_WHITE))
            else:
                deep[at] = image
        if self.dtype == np.uint8:
            return batch
        made = np.divide(batch, np.float32(_WHITE))
        for at, image in deep.items():
            made[at] = image
        return made

    def _image(self, row: int) -> Pixels:
        with self._lock:
            found = self._kept.get(row)
            if found is not None:
                self._kept.move_to_end(row)
                return found
        image = self._decoded(self._paths[row])
        if self._room:
            with self._lock:
                self._kept[row] = image
                if len(self._kept) > self._room:
                    self._kept.popitem(last=False)
        return image

    def _entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Yield what is in a folder, but for what is hidden, skipped, or of a system."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_left_out(entry.name):
                        self._leave_out(os.path.relpath(entry.path, self._root))
                    else:
                        yield entry
        except (OSError, ValueError) as error:
            raise DataUnavailable(
                f"{self._component}: cannot read the folder {named(folder)}: "
                f"{getattr(error, 'strerror', None) or error}; set `path` to a folder of class "
                "folders that this node may read"
            ) from error

    def _leave_out(self, name: str) -> None:
        self._left_count += 1
        if len(self._left_out) < _MOST_LISTED:
            self._left_out.append(name)

    def _is_left_out(self, name: str) -> bool:
        lower = name.casefold()
        if name in self._config.classes:
            return False
        return (
            name.startswith(".") or lower in _NO_CLASSES
            or any(each.match(lower) for each in self._skips)
        )  # fmt: skip

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:  # a ring of links, say
            raise self._bad(entry.path, f"can't be read: {error.strerror}; remove it") from error

    def _files(
        self, folder: Path, above: tuple[tuple[int, int], ...], depth: int = 0
    ) -> Iterator[str]:
        """Yield the images in a folder and in those below, in the order of their names."""
        found = folder.stat()
        me = found.st_dev, found.st_ino
        if me in above or depth > _MAX_DEPTH:
            deep = f"is more than {_MAX_DEPTH} folders below its class"
            why = "leads back to itself" if me in above else deep
            raise DataUnavailable(
                f"{self._component}: {named(folder)} {why}; remove that link or folder"
            )
        for entry in sorted(self._entries(folder), key=lambda entry: entry.name):
            if self._is_folder(entry):
                yield from self._files(Path(entry.path), (*above, me), depth + 1)
            elif not entry.is_file():
                raise self._bad(entry.path, "is no regular file, or a link to nowhere; remove it")
            elif (suffix := _suffix(entry.name)) not in _SUFFIXES:
                pattern = f"*{suffix}" if suffix else entry.name
                raise self._bad(
                    entry.path,
                    f"is no image by its name ({', '.join(sorted(_SUFFIXES))}); remove it, or set "
                    f"skip = [{quoted(pattern)}]",
                )
            else:
                self._count += 1
                if self._count > _MAX_FILES:
                    raise DataUnavailable(
                        f"{self._component}: more than {_MAX_FILES} files in {named(self._root)}; "
                        "give a part of them to another client"
                    )
                yield entry.path

    def _open(self, path: str) -> Any:
        """Return Pillow's image, of which only the head is read."""
        try:
            image = self._pillow.open(path, formats=FORMATS)
        except (self._pillow.DecompressionBombError, self._pillow.DecompressionBombWarning):
            raise self._too_large(path) from None
        except Exception as error:  # its decoders raise what comes
            raise self._undecodable(path, error) from error
        if image.width * image.height > self._config.max_pixels:
            image.close()
            raise self._too_large(path)
        return image

    def _decoded(self, path: str) -> Pixels:
        height, width = self._config.size
        with self._open(path) as image:
            self._refuse_mode(path, image)
            try:
                if image.mode.startswith("I"):
                    return self._deep(image)
                plain = self._plain(image)
                scaled = plain.resize((width, height), self._pillow.BILINEAR)
                pixels = np.asarray(scaled, np.uint8)
            except Exception as error:  # its decoders raise what comes
                raise self._undecodable(path, error) from error
        return pixels.reshape(height, width, -1).transpose(2, 0, 1)

    def _plain(self, image: Any) -> Any:
        """Return an image as viewers show it, grey or in colours, as `channels` says."""
        mode = "L" if self._config.channels == 1 else "RGB"
        image.load()  # PNG has what is behind the pixels only then
        if image.has_transparency_data:
            # Of premultiplied colours, "RGBa" and "La", Pillow converts to the plain kind alone.
            image = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode))
            top = image.convert("RGBA")
            behind = self._pillow.new("RGBA", top.size, (*self._config.background, _WHITE))
            shown_as = self._pillow.alpha_composite(behind, top).convert(mode)
        else:
            shown_as = image.convert(mode)
        return self._turned(image, shown_as)

    def _turned(self, image: Any, pixels: Any) -> Any:
        """Return pixels turned and mirrored as the file of the image says."""
        try:
            way = self._ways().get(image.getexif().get(_ORIENTATION, 1))
        except Exception:  # noqa: BLE001 - damaged: viewers show such an image as it lies
            return pixels
        return pixels if way is None else pixels.transpose(way)

    def _ways(self) -> dict[int, Any]:
        way = self._pillow.Transpose
        return {
            2: way.FLIP_LEFT_RIGHT, 3: way.ROTATE_180, 4: way.FLIP_TOP_BOTTOM, 5: way.TRANSPOSE,
            6: way.ROTATE_270, 7: way.TRANSVERSE, 8: way.ROTATE_90,
        }  # fmt: skip

    def _deep(self, image: Any) -> Pixels:
        """Return a grey image of up to 16 bits as floats from 0 to 1, scaled by its own white."""
        height, width = self._config.size
        white, is_negative, clear = _DEEP_WHITE, False, None
        image.load()
        if image.format == "TIFF":
            bits = image.tag_v2.get(_TIFF_BITS, (16,))
            white = (1 << int(bits[0] if isinstance(bits, tuple) else bits)) - 1
            is_negative = image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO
        clear = image.info.get("transparency")
        values = np.asarray(image).astype(np.float32) / np.float32(white)
        if is_negative:
            values = 1 - values
        if isinstance(clear, int):
            red, green, blue = self._config.background
            grey = (red * 299 + green * 587 + blue * 114) / 1000 / _WHITE
            values = np.where(np.asarray(image) == clear, np.float32(grey), values)
        plain = self._turned(image, self._pillow.fromarray(values.astype(np.float32)))
        scaled = np.asarray(plain.resize((width, height), self._pillow.BILINEAR), np.float32)
        grey_only = np.clip(scaled, 0, 1)[None]
        return np.repeat(grey_only, self._config.channels, axis=0)

    def _undecodable(self, path: str, error: Exception) -> DataUnavailable:
        if Path(path).stat().st_size == 0:
            return self._bad(path, "is empty (0 bytes); remove it, or copy it again")
        if type(error).__name__ == "UnidentifiedImageError":
            why = f"it is none of {', '.join(FORMATS)}"
        elif isinstance(error, OSError) and error.strerror:
            why = error.strerror
        else:
            why = shown(str(error))
        return self._bad(path, f"can't be decoded: {why}; mend or remove it")

    def _too_large(self, path: str) -> DataUnavailable:
        return self._bad(
            path,
            f"has more than {self._config.max_pixels} pixels; make it smaller, or raise max_pixels",
        )

    def _bad(self, path: str, what: str) -> DataUnavailable:
        return DataUnavailable(f"{self._component}: {named(path)} {what}")
