"""The small data sets that come with scikit-learn.

Rule: their files are read where pip put them, and scikit-learn is not imported: that takes seconds
and 100 MB for 200 KB of numbers, in each daemon of a machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import Array, SplitConfig, SplitDataSource
from bbnode.components.data.description import DataDescription
from bbnode.components.data.partition import Rows, Split
from bbnode.components.errors import DataUnavailable
from bbnode.components.libraries import SKLEARN, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.ir.installation import install
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_INT64, TypeNode

Dataset = Literal["digits", "iris", "wine", "breast_cancer"]

# The file of each, and its lines before the first row: a head with counts and names.
_FILES: Mapping[Dataset, tuple[str, int]] = {
    "digits": ("digits.csv.gz", 0),
    "iris": ("iris.csv", 1),
    "wine": ("wine_data.csv", 1),
    "breast_cancer": ("breast_cancer.csv", 1),
}
DIGITS_MAX = 16.0  # a pixel of scikit-learn's digits counts 0 .. 16 dots


@dataclass(frozen=True, kw_only=True)
class SklearnDataSourceConfig(SplitConfig):
    """Settings of `SklearnDataSource`.

    Attributes:
        dataset: which data set.
    """

    dataset: Dataset = "digits"
    split: Split = "train"


@register_component
class SklearnDataSource(SplitDataSource):
    """Features [N, F] float32 scaled to [0, 1] by the training part, labels [N] int64."""

    TYPE_NAME: ClassVar[str] = "bbnode.SklearnDataSource"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (SKLEARN,)
    Config: ClassVar[type] = SklearnDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": TENSOR_FLOAT,
        "NextBatch.labels": TENSOR_INT64,
    }
    config: SklearnDataSourceConfig

    def __init__(self, config: SklearnDataSourceConfig) -> None:
        super().__init__(config)
        self.require_choice("dataset", Dataset)

        self._scale: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None

    def load(self) -> tuple[Array, Array]:
        features, labels = _fetch(self.config.dataset, self.TYPE_NAME)
        if self.config.dataset == "digits":
            low, size = np.zeros(features.shape[1]), np.full(features.shape[1], DIGITS_MAX)
        else:
            train = features[self.split_of(labels)["train"]]
            low, high = train.min(axis=0), train.max(axis=0)
            size = np.where(high > low, high - low, 1.0)
        self._scale = low, size
        return ((features - low) / size).astype(np.float32), labels

    def describe(self) -> DataDescription:
        """Return what the positions of an example mean: the files' numbers, and their scaling."""
        made = super().describe()
        assert self._scale is not None  # `made` has loaded it
        low, size = (each.tolist() for each in self._scale)
        scaling = {"standardize": "given", "mean": low, "std": size}
        return replace(made, settings={"dtype": "float64", **scaling})


def _fetch(dataset: Dataset, component: str) -> tuple[npt.NDArray[np.float64], Rows]:
    """Return features and labels: the last column of each row."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataUnavailable(
            f"{component}: scikit-learn is not installed; run: {install(SKLEARN.requirement)}"
        )
    name, header_lines = _FILES[dataset]
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / name
    try:
        rows = np.loadtxt(path, delimiter=",", skiprows=header_lines, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataUnavailable(
            f"{component}: {path} can't be read ({error}); install scikit-learn anew: "
            f"{install(SKLEARN.requirement, again=True)}"
        ) from error
    return rows[:, :-1], rows[:, -1].astype(np.int64)
