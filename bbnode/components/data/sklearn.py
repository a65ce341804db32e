"""The small data sets that come with scikit-learn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import Array, SplitConfig, SplitDataSource
from bbnode.components.data.partition import Rows, Split
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_INT64, TypeNode

Dataset = Literal["digits", "iris", "wine", "breast_cancer"]

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
    Config: ClassVar[type] = SklearnDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": TENSOR_FLOAT,
        "NextBatch.labels": TENSOR_INT64,
    }
    config: SklearnDataSourceConfig

    def __init__(self, config: SklearnDataSourceConfig) -> None:
        super().__init__(config)
        self.require_choice("dataset", Dataset)

    def load(self) -> tuple[Array, Array]:
        features, labels = _fetch(self.config.dataset, self.TYPE_NAME)
        if self.config.dataset == "digits":
            scaled = features / DIGITS_MAX
        else:
            train = features[self.split_of(labels)["train"]]
            low, high = train.min(axis=0), train.max(axis=0)
            scaled = (features - low) / np.where(high > low, high - low, 1.0)
        return scaled.astype(np.float32), labels


def _fetch(dataset: str, component: str) -> tuple[npt.NDArray[np.float64], Rows]:
    try:
        datasets: Any = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise DataUnavailable(
            f"{component}: scikit-learn is not installed; run: pip install 'scikit-learn>=1.7.2'"
        ) from error
    features, labels = getattr(datasets, f"load_{dataset}")(return_X_y=True)
    return np.asarray(features, np.float64), np.asarray(labels, np.int64)
