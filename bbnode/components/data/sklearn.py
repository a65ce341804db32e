"""The small data sets that come with scikit-learn, split and dealt to peers.

Rule: every peer computes the same split and the same deal from the same seed; so they agree on each
peer's examples without communication, and no two peers have the same example.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from bbnode.components.data.arrays import Features, Labels, MemoryDataSource, permutation
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_INT64, TypeNode

Rows = npt.NDArray[np.int64]
Dataset = Literal["digits", "iris", "wine", "breast_cancer"]
Split = Literal["train", "test"]
Partition = Literal["iid", "shards"]
_CHOICES = {"dataset": Dataset, "split": Split, "partition": Partition}

DIGITS_MAX = 16.0  # a pixel of scikit-learn's digits counts 0 .. 16 dots
SHARDS_PER_CLIENT = 2  # McMahan et al., 2017 (arXiv:1602.05629), section 3

# Streams of random bits that must not coincide for equal seeds.
_SPLIT, _DEAL, _SHUFFLE = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class SklearnDataSourceConfig:
    """Settings of `SklearnDataSource`.

    Attributes:
        dataset: which data set.
        split: the training part or the held-out part.
        test_fraction: part of the examples that is held out, of each class alike; 0 to 1.
        shard, shards: this peer's share of the split, counted from 0, and how many there are.
        partition: "iid" deals shuffled examples; "shards" sorts them by label, cuts two
            pieces per peer, and deals those, so that a peer sees few classes.
        batch_size: examples of a NextBatch; 0 is the whole share at once.
        seed: of deal and shuffling; the same on all peers.
        split_seed: of the split. Apart from `seed`, so that runs with different seeds are
            measured on the same held-out examples.
    """

    dataset: Dataset = "digits"
    split: Split = "train"
    test_fraction: float = 0.2
    shard: int = 0
    shards: int = 1
    partition: Partition = "iid"
    batch_size: int = 0
    seed: int = 0
    split_seed: int = 0


@register_component
class SklearnDataSource(MemoryDataSource):
    """Features [N, F] float32 scaled to [0, 1] by the training part, labels [N] int64."""

    TYPE_NAME: ClassVar[str] = "bbnode.SklearnDataSource"
    Config: ClassVar[type] = SklearnDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode]] = {
        "NextBatch.batch": TENSOR_FLOAT,
        "NextBatch.labels": TENSOR_INT64,
    }
    config: SklearnDataSourceConfig

    def __init__(self, config: SklearnDataSourceConfig) -> None:
        super().__init__(config)
        for name, choices in _CHOICES.items():
            value, known = getattr(config, name), get_args(choices)
            self.require(
                value in known, f"unknown {name} {value!r}; choose one of {', '.join(known)}"
            )
        self.require(
            0 <= config.shard < config.shards,
            f"shard {config.shard} of {config.shards}; shards count from 0 to shards - 1",
        )
        held_out, seed = config.test_fraction, config.split_seed
        self.require(0 < held_out < 1, f"test_fraction {held_out} is not between 0 and 1")
        self.require(seed >= 0, f"split_seed must not be negative ({seed})")

    def _order(self, epoch: int) -> Rows:
        seeds = (self.config.seed, _SHUFFLE, self.config.shard, epoch)
        return permutation(self.num_samples, *seeds)

    def load(self) -> tuple[Features, Labels]:
        features, labels = _fetch(self.config.dataset, self.TYPE_NAME)
        train, test = stratified_split(labels, self.config.test_fraction, self.config.split_seed)
        rows = train if self.config.split == "train" else test
        rows = deal(
            rows, labels, self.config.shard, self.config.shards, self.config.partition,
            self.config.seed,
        )  # fmt: skip
        if len(rows) == 0:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: shard {self.config.shard} of {self.config.shards} of "
                f"{self.config.dataset} is empty; use fewer shards"
            )
        if self.config.dataset == "digits":
            scaled = features / DIGITS_MAX
        else:
            low, high = features[train].min(axis=0), features[train].max(axis=0)
            scaled = (features - low) / np.where(high > low, high - low, 1.0)
        return scaled[rows].astype(np.float32), labels[rows].astype(np.int64)


def _fetch(dataset: str, component: str) -> tuple[npt.NDArray[np.float64], Rows]:
    try:
        datasets: Any = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise DataUnavailable(
            f"{component}: scikit-learn is not installed; run: pip install 'bbnode[demo]'"
        ) from error
    features, labels = getattr(datasets, f"load_{dataset}")(return_X_y=True)
    return np.asarray(features, np.float64), np.asarray(labels, np.int64)


def stratified_split(labels: Rows, test_fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of the training and the held-out part, ascending, split alike by class."""
    held_out: list[Rows] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = round(len(rows) * test_fraction)
        held_out.append(rows[permutation(len(rows), seed, _SPLIT, int(label))[:count]])
    test = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), test), test


def deal(rows: Rows, labels: Rows, shard: int, shards: int, partition: str, seed: int) -> Rows:
    """Return the rows of one of `shards` disjoint shares that cover `rows`, ascending."""
    if partition == "iid":
        shuffled = rows[permutation(len(rows), seed, _DEAL)]
        return np.sort(np.array_split(shuffled, shards)[shard])
    by_label = rows[np.argsort(labels[rows], kind="stable")]
    pieces = np.array_split(by_label, SHARDS_PER_CLIENT * shards)
    mine = permutation(len(pieces), seed, _DEAL)[SHARDS_PER_CLIENT * shard :][:SHARDS_PER_CLIENT]
    return np.sort(np.concatenate([pieces[int(index)] for index in mine]))
