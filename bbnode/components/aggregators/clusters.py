"""Sums of k-means that many clients found in their examples, and a start of theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.collecting import Told
from bbnode.components.aggregators.pooling import PoolingAggregator, PoolingConfig, need_tensor
from bbnode.components.registry import register_component
from bbnode.ir import types
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Metadata, Value

# Columns of an answer before the sums.
IS_START: Final = 0
COUNT: Final = 1
INERTIA: Final = 2
FIRST_SUM: Final = 3

_START_STEPS: Final = 20  # of k-means over the clients' own centroids
# Rounding that a client's own sums may have, relative to the size of its values.
_SLACK: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class PooledClustersConfig(PoolingConfig):
    """Settings of `PooledClusters`.

    Attributes:
        clusters: how many there are.
        features: numbers of an example.
        seed: of the start.
        max_abs: the largest absolute value of a feature that is believed.
    """

    clusters: int
    features: int
    seed: int = 0
    max_abs: float = 1e12


@register_component
class PooledClusters(PoolingAggregator):
    """Merges partial sums of k-means, float64 [K, 3 + F].

    Columns are: 1 where the clusters are the client's own, for a start, else 0; the number of
    examples of each cluster; the sum of their squared distances from its centroid; and the sums of
    their features. Sums are added up. Clusters of the clients' own become K of all: k-means++
    (Arthur and Vassilvitskii, SODA 2007) and Lloyd's steps over their centroids, each of which
    counts for its examples (Guha et al., 2003, doi:10.1109/TKDE.2003.1198387).
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledClusters"
    Config: ClassVar[type] = PooledClustersConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_DOUBLE}
    config: PooledClustersConfig

    def __init__(self, config: PooledClustersConfig) -> None:
        super().__init__(config)
        self.require(min(config.clusters, config.features) >= 1, "clusters and features: 1 or more")
        self.require(config.seed >= 0, f"seed {config.seed} is below 0")
        self.require(0 < config.max_abs < math.inf, f"max_abs {config.max_abs} is not positive")

    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check a client's sums."""
        config = self.config
        told = self._read(tensor)
        counts, inertia, sums = told[:, COUNT], told[:, INERTIA], told[:, FIRST_SUM:]
        if (counts > config.max_samples).any() or not 1 <= counts.sum() <= config.max_samples:
            raise ValueError(
                f"it counts no examples, or more than {config.max_samples} (max_samples)"
            )
        most = config.max_abs * (1 + _SLACK)
        if (np.abs(sums) > counts[:, None] * most).any():
            raise ValueError(f"a mean is beyond {config.max_abs:g} (max_abs), or is of no examples")
        if (inertia > counts * config.features * (2 * most) ** 2).any():
            raise ValueError("its squared distances are larger than max_abs allows")

    def result_checked(self, tensor: Value) -> None:
        """Check a saved result."""
        self._read(tensor)

    def sort(self, tensor: Any) -> tuple[int, ...]:
        """Return 1 for the clusters of a start, else 0."""
        return (int(tensor[0, IS_START]),)

    def misfit(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Return why sums for a start, or for a step, are refused."""
        kinds = ("a step", "a start")
        return f"its sums are of {kinds[found[0]]}, and those of most of {kinds[wanted[0]]}"

    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return sums in the form of the contributions.

        Of a start, the sums of a cluster without examples are its centroid.
        """
        told = np.stack([tensor for tensor, _ in parts])
        samples = int(told[:, :, COUNT].sum())
        if not told[0, 0, IS_START]:
            return told.sum(axis=0), samples, {}
        rows = told.reshape(-1, told.shape[-1])
        rows = rows[rows[:, COUNT] > 0]
        weights, own = rows[:, COUNT], rows[:, INERTIA]
        points = rows[:, FIRST_SUM:] / weights[:, None]
        centroids, nearest = clustered(points, weights, self.config.clusters, self.config.seed)
        spread = own + weights * np.square(points - centroids[nearest]).sum(axis=1)
        clusters = self.config.clusters
        counts = np.bincount(nearest, weights, clusters)
        made = np.ones((clusters, told.shape[-1]))
        made[:, COUNT] = counts
        made[:, INERTIA] = np.bincount(nearest, spread, clusters)
        made[:, FIRST_SUM:] = centroids * np.maximum(counts, 1)[:, None]
        return made, samples, {}

    def _read(self, tensor: Value) -> npt.NDArray[Any]:
        told = need_tensor(tensor, np.float64)
        shape = (self.config.clusters, FIRST_SUM + self.config.features)
        if told.shape != shape:
            raise ValueError(f"its tensor has the shape {list(told.shape)}, not {list(shape)}")
        if not np.isfinite(told).all():
            raise ValueError("its sums hold NaN or infinity")
        flag, counts, inertia = told[:, IS_START], told[:, COUNT], told[:, INERTIA]
        if flag[0] not in (0, 1) or (flag != flag[0]).any():
            raise ValueError("its first column is neither 0 nor 1")
        if (counts < 0).any() or (counts % 1).any() or (inertia < 0).any():
            raise ValueError("a count is no whole number from 0 on, or squared distances are below")
        return told


def clustered(
    points: npt.NDArray[Any], weights: npt.NDArray[Any], clusters: int, seed: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return K centroids of weighted points [M, F], and the nearest one of each point.

    k-means++ (Arthur and Vassilvitskii, 2007), then steps of Lloyd until nothing moves, 20 at most.
    """
    random = np.random.default_rng(seed)
    chosen: list[npt.NDArray[Any]] = []
    squares = np.ones(len(points))
    for _ in range(clusters):
        sums = np.cumsum(squares * weights)
        at = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
        chosen.append(points[min(at, len(points) - 1)])
        found = np.square(points - chosen[-1]).sum(axis=1)
        squares = found if len(chosen) == 1 else np.minimum(squares, found)
    centroids = np.stack(chosen)
    for _ in range(_START_STEPS):
        nearest = _nearest(points, centroids)
        counts = np.bincount(nearest, weights, clusters)
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, points * weights[:, None])
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centroids)
        if (moved == centroids).all():
            break
        centroids = moved
    return centroids, _nearest(points, centroids)


def _nearest(points: npt.NDArray[Any], centroids: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    middle = centroids.mean(axis=0)
    near, far = centroids - middle, points - middle
    found: npt.NDArray[np.intp] = (np.square(near).sum(axis=1) - 2 * far @ near.T).argmin(axis=1)
    return found
