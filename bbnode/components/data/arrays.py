"""A peer's own data from numpy files."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from bbnode.components.data.base import Array, SplitConfig, SplitDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import path_setting


def _archive(file: BinaryIO) -> Any:
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise TypeError("it is one array, not an archive; write it with numpy.savez")
    return loaded


@dataclass(frozen=True, kw_only=True)
class ArrayDataSourceConfig(SplitConfig):
    """Settings of `ArrayDataSource`.

    Attributes:
        path: of an .npz file on this peer.
        features, labels: names of the two arrays in it.
    """

    path: str = path_setting()
    features: str = "x"
    labels: str = "y"


@register_component
class ArrayDataSource(SplitDataSource):
    """A peer's own data, from an .npz file; features become float32, integer labels int64.

    Other labels become float32; a program that only hands them on says so with
    `g.expect(labels, types.TENSOR_FLOAT)`, as it takes them for int64 where it computes nothing.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ArrayDataSource"
    Config: ClassVar[type] = ArrayDataSourceConfig
    config: ArrayDataSourceConfig

    def load(self) -> tuple[Array, Array]:
        path = Path(self.config.path)
        try:
            # Without pickle: a data file must not be able to run code.
            with path.open("rb") as file, _archive(file) as archive:
                missing = {self.config.features, self.config.labels} - set(archive.files)
                if missing:
                    raise DataUnavailable(
                        f"{self.TYPE_NAME}: {path} has no array {', '.join(sorted(missing))}; "
                        f"it has {', '.join(archive.files) or 'none'}"
                    )
                features = np.asarray(archive[self.config.features])
                labels = np.asarray(archive[self.config.labels])
        except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: cannot read {path}: {error}; set `path` to an .npz file "
                "that holds numbers"
            ) from error
        if features.ndim == 0 or labels.ndim == 0 or features.dtype.kind not in "fiub":
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path}: features {features.dtype}{list(features.shape)} and "
                f"labels {labels.dtype}{list(labels.shape)} are no arrays of examples"
            )
        whole = labels.dtype.kind in "iub"
        return features.astype(np.float32), labels.astype(np.int64 if whole else np.float32)
