"""A folder of images with one folder per class, decoded one batch at a time.

Rule: one pass over the folder, when it is loaded, lists the files and looks at the head of each, so
that a file that is no image, or a far too large one, is refused by its name before training begins.
Pixels are decoded when a batch asks for them; a bounded part stays in memory.
"""

from __future__ import annotations

import importlib
import os
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
from bbnode.components.data.description import DataDescription, settings_of
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import path_setting
from bbnode.ir.decoding import shown
from bbnode.ir.installation import install
from bbnode.ir.types import TENSOR_BY_ELEM, TENSOR_FLOAT, TENSOR_INT64, TypeNode

Pixels: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.int64]

# The formats that are decoded. Pillow knows many more; some of them run other programs.
FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_SUFFIXES: Final = frozenset(
    (".bmp", ".gif", ".jpg", ".jpeg", ".png", ".pbm", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
)
_MAX_FILES: Final = 5_000_000
_MAX_DEPTH: Final = 32  # folders inside a class
_MAX_SIDE: Final = 1 << 14  # pixels of an example's side


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
        max_pixels: of a file; larger images are refused before they are decoded.
        cache_mib: MiB of decoded images that stay in memory; 0 decodes each one every time.
    """

    path: str = path_setting()
    classes: tuple[str, ...] = ()
    size: tuple[int, int] = (224, 224)
    channels: int = 3
    dtype: Literal["float32", "uint8"] = "float32"
    max_pixels: int = 64_000_000
    cache_mib: int = 256


@register_component
class ImageFolderDataSource(StandardizedDataSource):
    """Images [N, channels, height, width] from class folders, labels [N] int64."""

    TYPE_NAME: ClassVar[str] = "bbnode.ImageFolderDataSource"
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
        except ImportError as error:
            raise DataUnavailable(
                f"{component}: images need the library Pillow; run: {install('pillow>=11')}"
            ) from error
        self._paths: list[str] = []
        self.classes: tuple[str, ...] = ()
        if labelled:
            labels = self._labelled()
        else:
            single = self._root.is_file()
            self._paths.extend([str(self._root)] if single else self._files(self._root, ()))
            labels = [0] * len(self._paths)
        self.labels = np.array(labels, np.int64)
        if not self._paths:
            raise DataUnavailable(f"{component}: the folders in {self._root} hold no images")
        for path in self._paths:
            self._open(path).close()
        self.shape = (len(labels), config.channels, *config.size)
        self.dtype = np.dtype(config.dtype)
        self._kept: OrderedDict[int, Pixels] = OrderedDict()
        self._room = (config.cache_mib << 20) // (config.channels * config.size[0] * config.size[1])
        self._lock = threading.Lock()

    @property
    def paths(self) -> tuple[str, ...]:
        """The file of each image."""
        return tuple(self._paths)

    def _labelled(self) -> list[int]:
        """List the images of the class folders; return their labels."""
        config, component = self._config, self._component
        folders = sorted(e.name for e in self._entries(self._root) if self._is_folder(e))
        self.classes = config.classes or tuple(folders)
        if not self.classes:
            raise DataUnavailable(
                f"{component}: {self._root} has no folders; it needs one for each class"
            )
        unknown = [name for name in folders if name not in self.classes]
        if unknown:
            raise DataUnavailable(
                f"{component}: the folder {shown(unknown[0])} in {self._root} is none of `classes`"
            )
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            if name not in folders:
                continue
            self._paths.extend(self._files(self._root / name, ()))
            labels.extend([label] * (len(self._paths) - len(labels)))
        return labels

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, rows: Any, /) -> npt.NDArray[Any]:
        batch = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for to, row in zip(batch, rows, strict=True):
            to[...] = self._image(int(row))
        return batch if self.dtype == np.uint8 else np.divide(batch, np.float32(255))

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
        """Yield what is in a folder, hidden entries aside."""
        try:
            with os.scandir(folder) as entries:
                yield from (entry for entry in entries if not entry.name.startswith("."))
        except (OSError, ValueError) as error:
            raise DataUnavailable(
                f"{self._component}: cannot read the folder {folder}: "
                f"{getattr(error, 'strerror', None) or error}; set `path` to a folder of class "
                "folders that this node may read"
            ) from error

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
        if me in above or depth >= _MAX_DEPTH:
            why = "leads back to itself" if me in above else f"is {_MAX_DEPTH} folders deep"
            raise DataUnavailable(f"{self._component}: {folder} {why}; remove that link or folder")
        for entry in sorted(self._entries(folder), key=lambda entry: entry.name):
            if self._is_folder(entry):
                yield from self._files(Path(entry.path), (*above, me), depth + 1)
            elif not entry.is_file():
                raise self._bad(entry.path, "is no regular file, or a link to nowhere; remove it")
            elif os.path.splitext(entry.name)[1].lower() not in _SUFFIXES:  # noqa: PTH122 (speed)
                raise self._bad(
                    entry.path, f"is no image by its name ({', '.join(sorted(_SUFFIXES))})"
                )
            else:
                if len(self._paths) >= _MAX_FILES:
                    raise DataUnavailable(
                        f"{self._component}: more than {_MAX_FILES} files in {self._root}"
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
        mode = "L" if self._config.channels == 1 else "RGB"
        with self._open(path) as image:
            if image.mode in ("F", "I"):
                raise self._bad(
                    path, f"has {image.mode} pixels, of no known range; use 8 or 16 bit"
                )
            try:
                plain = image
                if image.mode.startswith("I;16"):
                    deep = np.asarray(image, np.uint16)
                    plain = self._pillow.fromarray((deep >> 8).astype(np.uint8))
                scaled = plain.convert(mode).resize((width, height), self._pillow.BILINEAR)
                pixels = np.asarray(scaled, np.uint8)
            except Exception as error:  # its decoders raise what comes
                raise self._undecodable(path, error) from error
        return pixels.reshape(height, width, -1).transpose(2, 0, 1)

    def _undecodable(self, path: str, error: Exception) -> DataUnavailable:
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
        return DataUnavailable(f"{self._component}: {path} {what}")
