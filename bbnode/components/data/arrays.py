"""A peer's own data from numpy files, mapped where they can be."""

from __future__ import annotations

import difflib
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.lib import format as npy

from bbnode.components.data import numbers, numpy_files
from bbnode.components.data.base import FEATURE_TYPES, Array, ByRow
from bbnode.components.data.data_file import UNREADABLE, DataFile, Room, told
from bbnode.components.data.description import DataDescription
from bbnode.components.data.numbers import ApartArrays, FileArray, Joined
from bbnode.components.data.numpy_files import SUFFIX
from bbnode.components.data.shared_schema import ColumnMeaning
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import host_setting, path_setting
from bbnode.ir import types
from bbnode.ir.types import TypeNode

_WANTED = "an .npz file, or a folder of .npy files"
_MOST_LISTED = 20  # names of arrays in an error

_Stored: TypeAlias = tuple[str, Array, DataFile]  # by name, with the file that it is mapped from


@dataclass(frozen=True, kw_only=True)
class ArrayDataSourceConfig(StandardizedConfig):
    """Settings of `ArrayDataSource`.

    Attributes:
        path: of an .npz file on this peer, or of a folder in which the array "x" is x.npy.
        features: name of the array of features; or of several, which are put side by side as
            columns.
        inputs: names of several arrays, in place of `features`: those of a model with several
            inputs, in its order. A batch is then a composite of them.
        labels: name of the array of labels.
        dtype: of the features. "auto": integers of 32 and 64 bits become int64 (tokens), all
            else float32; "keep": as stored; or a name, "float32", "uint8", ….
        missing: what is done where a feature is NaN: "refuse" names the row; "keep" gives it out,
            for programs that count missing values or train trees.
        max_memory_mib: that compressed arrays may take in memory, as they declare it; 0 is half of
            what this process may have. Arrays that are not compressed take none.
    """

    path: str = path_setting()
    features: str | tuple[str, ...] = "x"
    inputs: tuple[str, ...] = ()
    labels: str = "y"
    dtype: str = numbers.AUTO
    missing: Literal["refuse", "keep"] = "refuse"
    max_memory_mib: int = host_setting(0)


@register_component
class ArrayDataSource(StandardizedDataSource):
    """A peer's own data, from an .npz file or a folder of .npy files.

    Uncompressed ones (`numpy.savez`, `numpy.save`) are mapped: larger than memory is fine. Integer
    labels become int64, others float32; a program that only hands the latter on says so with
    `g.expect(labels, types.TENSOR_FLOAT)`, as it takes them for int64 where it computes nothing.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ArrayDataSource"
    Config: ClassVar[type] = ArrayDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        **StandardizedDataSource.storage,
        "NextBatch.batch": (*FEATURE_TYPES, types.COMPOSITE),
    }
    describes = "arrays"
    config: ArrayDataSourceConfig

    def __init__(self, config: ArrayDataSourceConfig) -> None:
        super().__init__(config)
        self.require_choice("missing", Literal["refuse", "keep"])
        self._widths: tuple[int, ...] = ()
        self.require(bool(self._features()), "`features` names no array")
        plain = config.features == ArrayDataSourceConfig.features and config.standardize == "none"
        self.require(
            plain or not config.inputs,
            "`inputs` are tensors of their own; leave out `features` and `standardize`",
        )
        self.require(len(set(config.inputs)) == len(config.inputs), "`inputs` names an array twice")
        known = ", ".join(numbers.DTYPES)
        self.require(
            config.dtype in numbers.DTYPES, f"unknown dtype {config.dtype!r}; choose one of {known}"
        )

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the arrays of features, if there are several."""
        names = self._features()
        return names if len(names) > 1 and not self.config.inputs else ()

    def columns(self) -> tuple[ColumnMeaning, ...] | None:
        """Return the arrays that are put side by side; None for a single one, and for `inputs`."""
        names = self.column_names()
        return tuple(
            ColumnMeaning(name=name, kind="number" if width == 1 else "list", width=width)
            for name, width in zip(names, self._widths, strict=True)
        ) or None  # fmt: skip

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the array of labels; classes have no names here."""
        return self.config.labels, ()

    def load(self) -> tuple[ByRow, ByRow]:
        path = Path(self.config.path)
        *stored, (name, array, file) = self._stored(path, self._names())
        labels = self._checked(path, name, array, file, is_label=True)
        return self._together(path, stored), labels

    def describe(self) -> DataDescription:
        """Return the names of the arrays, and the scaling."""
        made = super().describe()
        names = {
            "features": self.config.features,
            "inputs": self.config.inputs,
            "missing": self.config.missing,
        }
        # Of several inputs each has its own type, which the setting decides as in training.
        dtype = {"dtype": self.config.dtype} if self.config.inputs else {}
        return self.as_adopted(replace(made, settings={**made.settings, **names, **dtype}))

    def examples(self) -> ByRow:
        """Return the features of a file, which needs no labels, as in training.

        An .npy file is the only array of features. Raises DataUnavailable.
        """
        path = Path(self.config.path)
        names = self._features()
        if path.is_dir() or not _is_one_array(path, self.TYPE_NAME):
            return self.served(self._together(path, self._stored(path, names)))
        if len(names) > 1:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path} is one array, and the model takes {', '.join(names)}; "
                "write these into one file with numpy.savez"
            )
        file = DataFile(path, self.TYPE_NAME)
        array = numpy_files.read_array(path, self.TYPE_NAME)
        return self.served(self._together(path, [(names[0], array, file)]))

    def _stored(self, path: Path, names: Sequence[str]) -> list[_Stored]:
        try:
            if path.is_dir():
                return self._from_folder(path, names)
            return self._from_archive(path, names)
        except UNREADABLE as error:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: cannot read {path}: {told(error)}; set `path` to {_WANTED} "
                "that holds numbers"
            ) from error

    def _together(self, path: Path, stored: Sequence[_Stored]) -> ByRow:
        """Return arrays of features as one: alone, side by side, or apart as `inputs`."""
        features = [
            self._checked(path, name, array, file, is_label=False) for name, array, file in stored
        ]
        if len(features) == 1 and not self.config.inputs:
            return features[0]
        lengths = {len(part) for part in features}
        if len(lengths) > 1:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path}: the arrays {', '.join(self._features())} have "
                f"{', '.join(str(len(part)) for part in features)} rows; they have to have one each"
            )
        if self.config.inputs:
            return ApartArrays(dict(zip(self.config.inputs, features, strict=True)))
        self._widths = tuple(math.prod(part.shape[1:]) for part in features)
        kinds = {part.dtype for part in features}
        joined = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
        for (name, _, _), part in zip(stored, features, strict=True):
            if part.dtype != joined:
                FileArray(part, joined).refuse_misfits(self.TYPE_NAME, f"array {name!r}")
        return Joined(features, joined)

    def _features(self) -> tuple[str, ...]:
        names = self.config.inputs or self.config.features
        return (names,) if isinstance(names, str) and names else tuple(names)

    def _names(self) -> tuple[str, ...]:
        return (*self._features(), self.config.labels)

    def _from_folder(self, folder: Path, names: Sequence[str]) -> list[_Stored]:
        there = sorted(file.stem for file in folder.iterdir() if file.suffix == SUFFIX)
        self._refuse_missing(folder, there, names)
        found: list[_Stored] = []
        for name in names:
            file = DataFile(folder / f"{name}{SUFFIX}", self.TYPE_NAME)
            with file.stream() as opened:
                found.append((name, numpy_files.whole(file, opened), file))
        return found

    def _from_archive(self, path: Path, names: Sequence[str]) -> list[_Stored]:
        file = DataFile(path, self.TYPE_NAME)
        room = Room(self.TYPE_NAME, self.config.max_memory_mib)
        with file.stream() as opened:
            if opened.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise DataUnavailable(
                    f"{self.TYPE_NAME}: {path} is one array, of features or of labels; put "
                    f"{' and '.join(name + SUFFIX for name in self._names())} into a folder and "
                    "set `path` to that, or write both with numpy.savez"
                )
            opened.seek(0)
            with zipfile.ZipFile(opened) as archive:
                infos = {info.filename.removesuffix(SUFFIX): info for info in archive.infolist()}
                self._refuse_missing(path, sorted(infos), names)
                return [
                    (
                        name,
                        numpy_files.member(file, opened, archive, infos[name], room),
                        file,
                    )
                    for name in names
                ]

    def _refuse_missing(self, path: Path, there: Sequence[str], names: Sequence[str]) -> None:
        missing = [name for name in names if name not in there]
        if not missing:
            return
        more = len(there) - _MOST_LISTED
        listed = [*there[:_MOST_LISTED], *([f"{more} more"] if more > 0 else [])]
        near = difflib.get_close_matches(missing[0], there, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataUnavailable(
            f"{self.TYPE_NAME}: {path} has no array {', '.join(missing)}; it has "
            f"{', '.join(listed) or 'none'}{hint}; name them with `features` and `labels`"
        )

    def _checked(
        self, path: Path, name: str, array: Array, file: DataFile, *, is_label: bool
    ) -> FileArray:
        if array.ndim == 0 or array.dtype.kind not in numbers.NUMBERS:
            what = "labels" if is_label else "features"
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path}: {what} {name!r}, {array.dtype}{list(array.shape)}, "
                "are no array of examples; it has to hold numbers, one row for each example"
            )
        dtype = (
            numbers.label_dtype(array.dtype)
            if is_label
            else numbers.feature_dtype(self.config.dtype, array.dtype)
        )
        mapped = (file,) if isinstance(array, np.memmap) else ()
        made = FileArray(array, dtype, mapped)
        keeps = self.config.missing == "keep" and not is_label
        made.refuse_misfits(self.TYPE_NAME, f"array {name!r}", nan=keeps)
        return made


def _is_one_array(path: Path, component: str) -> bool:
    """Return True for an .npy file, by its first bytes."""
    prefix = npy.MAGIC_PREFIX
    with DataFile(path, component) as file:
        return file.read(0, min(file.size, len(prefix))) == prefix
