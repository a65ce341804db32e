"""The statistics of many peers' features, merged into those of all their examples together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.collecting import Told
from bbnode.components.aggregators.pooling import PoolingAggregator, PoolingConfig, need_tensor
from bbnode.components.data.statistics import Moments, merged_moments, read_label_counts
from bbnode.components.registry import register_component
from bbnode.ir import types
from bbnode.ir.decoding import shown
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Metadata, Value

_MAX_COUNT = 1 << 53  # up to here a float64 tells whole numbers apart


@dataclass(frozen=True, kw_only=True)
class PooledStatisticsConfig(PoolingConfig):
    """Settings of `PooledStatistics`.

    Attributes:
        max_abs: the largest absolute value of a feature that is believed.
        features: how many there are; others are refused. None: as many as more than half of the
            peers say.
    """

    max_abs: float = 1e12
    features: int | None = None


@register_component
class PooledStatistics(PoolingAggregator):
    """Merges what `DataSource.statistics` of each peer says, after checking it.

    A peer whose numbers fit each other is believed, as it is when it trains. The metadata of a
    result has `label_counts` where every peer said some.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledStatistics"
    Config: ClassVar[type] = PooledStatisticsConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_DOUBLE}
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = (types.TENSOR_DOUBLE, types.METADATA)
    config: PooledStatisticsConfig

    def __init__(self, config: PooledStatisticsConfig) -> None:
        super().__init__(config)
        self.require(0 < config.max_abs < math.inf, f"max_abs {config.max_abs} is not positive")
        self.require(
            config.features is None or config.features >= 1, "features has to be 1 or more"
        )

    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check statistics, and the number of examples that they are of."""
        moments = Moments.read(tensor, self.config.max_abs)
        samples = metadata.get("num_samples")
        if type(samples) is not int or not 1 <= samples <= self.config.max_samples:
            raise ValueError(
                f"num_samples is {shown(samples)}, not an integer in 1 .. "
                f"{self.config.max_samples} (max_samples)"
            )
        if moments.count % samples:
            raise ValueError(f"their count is {moments.count}, of {samples} examples")
        read_label_counts(metadata, samples)
        wanted = self.config.features
        if wanted is not None and len(moments.mean) != wanted:
            raise ValueError(self.misfit((len(moments.mean),), (wanted,)))

    def result_checked(self, tensor: Value) -> None:
        """Check saved statistics."""
        Moments.read(tensor)

    def sort(self, tensor: Any) -> tuple[int, ...]:
        """Return the number of features."""
        return (int(tensor.shape[1]),)

    def misfit(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Return why statistics of another number of features are refused."""
        return f"its statistics are of {found[0]} feature(s), not {wanted[0]}"

    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return the statistics of all examples, float64 [5, F]."""
        merged = merged_moments(Moments.read(tensor) for tensor, _ in parts).tensor()
        samples = [int(metadata["num_samples"]) for _, metadata in parts]
        labels = [
            read_label_counts(metadata, n) for (_, metadata), n in zip(parts, samples, strict=True)
        ]
        told: Told = {}
        if all(labels):
            longest = max(map(len, labels))
            padded = (each + [0] * (longest - len(each)) for each in labels)
            told["label_counts"] = ",".join(map(str, map(sum, zip(*padded, strict=True))))
        return merged, sum(samples), told


@dataclass(frozen=True, kw_only=True)
class PooledRangesConfig(PoolingConfig):
    """Settings of `PooledRanges`.

    Attributes:
        max_abs: the largest absolute value of a feature that is believed.
    """

    max_abs: float = 1e12


@register_component
class PooledRanges(PoolingAggregator):
    """Merges ranges of columns, float64 [3, C]: how many values there are, the least, the greatest.

    A column without values has the count 0 and both ends 0. The result has the same form.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledRanges"
    Config: ClassVar[type] = PooledRangesConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_DOUBLE}
    config: PooledRangesConfig

    def __init__(self, config: PooledRangesConfig) -> None:
        super().__init__(config)
        self.require(0 < config.max_abs < math.inf, f"max_abs {config.max_abs} is not positive")

    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check a peer's ranges."""
        counts = self._read(tensor)[0]
        most = self.config.max_samples
        if (counts > most).any():
            raise ValueError(f"it says {counts.max():.0f} values; {most} are most (max_samples)")

    def result_checked(self, tensor: Value) -> None:
        """Check saved ranges."""
        self._read(tensor)

    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return the ranges of all values; the examples are those of the fullest column."""
        counts, low, high = np.stack([tensor for tensor, _ in parts], axis=1)
        low = np.where(counts > 0, low, np.inf).min(axis=0)
        high = np.where(counts > 0, high, -np.inf).max(axis=0)
        total = counts.sum(axis=0)
        ends = (np.where(total > 0, end, 0.0) for end in (low, high))
        return np.stack([total, *ends]), int(counts.max(axis=1).sum()), {}

    def _read(self, tensor: Value) -> npt.NDArray[Any]:
        told = need_tensor(tensor, np.float64, rows=3)
        counts, low, high = told
        if not np.isfinite(told).all():
            raise ValueError("its ranges hold NaN or infinity")
        if (counts < 0).any() or (counts > _MAX_COUNT).any() or (counts % 1).any():
            raise ValueError("its counts are no whole numbers from 0 on")
        if (low > high).any() or told[1:, counts == 0].any():
            raise ValueError("a least value is above the greatest, or there is one of no values")
        if float(np.abs(told[1:]).max()) > self.config.max_abs:
            raise ValueError(f"a value is beyond {self.config.max_abs:g} (max_abs)")
        return told


@dataclass(frozen=True, kw_only=True)
class PooledCountsConfig(PoolingConfig):
    """Settings of `PooledCounts`.

    Attributes:
        rows: cells that each column's examples are counted in. 0: as many as more than half of the
            peers say.
        min_samples: the fewest examples that are believed of one peer.
    """

    rows: int = 0
    min_samples: int = 1


@register_component
class PooledCounts(PoolingAggregator):
    """Sums counts, int64 [R, C], exactly: in how many examples column c falls into the cell r.

    Each example is in one cell of each column, so that the sum of every column is the number of
    examples; a peer for which it is not is refused.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledCounts"
    Config: ClassVar[type] = PooledCountsConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_INT64}
    config: PooledCountsConfig

    def __init__(self, config: PooledCountsConfig) -> None:
        super().__init__(config)
        self.require(config.rows >= 0, f"rows {config.rows} is below 0")
        most = config.max_samples
        self.require(1 <= config.min_samples <= most, f"min_samples is not in 1 .. {most}")
        # The sum of all that can be believed fits into the counts' 64 bits.
        self.require(most * config.max_contributors < 1 << 62, "max_samples is too large")

    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check a peer's counts."""
        config = self.config
        rows = config.rows or (len(tensor) if isinstance(tensor, np.ndarray) and tensor.ndim else 1)
        counts = need_tensor(tensor, np.int64, rows=rows)
        # Each is checked before they are summed, so that no sum wraps around.
        if (counts < 0).any() or (counts > config.max_samples).any():
            raise ValueError(f"a count is below 0 or above {config.max_samples} (max_samples)")
        sums = counts.sum(axis=0)
        if (sums != sums[0]).any():
            raise ValueError("its columns count different numbers of examples")
        if not config.min_samples <= sums[0] <= config.max_samples:
            raise ValueError(
                f"it counts {sums[0]} examples, not {config.min_samples} .. {config.max_samples} "
                "(min_samples, max_samples)"
            )

    def result_checked(self, tensor: Value) -> None:
        """Check a saved sum."""
        if (need_tensor(tensor, np.int64, rows=self.config.rows or None) < 0).any():
            raise ValueError("a count is below 0")

    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return the sum."""
        total = np.stack([tensor for tensor, _ in parts]).sum(axis=0)
        return total, int(total[:, 0].sum()), {}
