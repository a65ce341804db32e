"""Standardisation of features, by statistics that are given or those of all peers together.

Rule: statistics are count, mean, sum of squared deviations from it, minimum and maximum of each
feature, in float64; those of parts are merged by Chan, Golub and LeVeque, 1979 (STAN-CS-79-773), so
that nothing cancels out. Features are those of a vector; the channels of an image (C, H, W); the
elements of anything else. What another peer says is checked before it counts.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext, offload
from bbnode.components.data.adoption import places_of
from bbnode.components.data.base import ByRow, SplitConfig, SplitDataSource
from bbnode.components.data.data_file import read_whole
from bbnode.components.data.description import DataDescription
from bbnode.components.data.schema import TensorSchema
from bbnode.components.data.shared_schema import Scaling, SharedSchema
from bbnode.components.errors import (
    DataUnavailable,
    StatisticsMissing,
    StatisticsRefused,
    UnsupportedByDataSource,
)
from bbnode.components.settings import path_setting
from bbnode.ir.decoding import shown
from bbnode.ir.values import Metadata, Value

Vector: TypeAlias = npt.NDArray[np.float64]

ROWS: Final = 5  # of the tensor: count, mean, squared deviations, minimum, maximum
MAX_LABELS: Final = 1024  # classes whose examples are counted
_MAX_FEATURES: Final = 1_000_000
_MAX_FILE_BYTES: Final = 64 << 20
_VALUES_AT_ONCE: Final = 1 << 20  # that one pass over the examples holds
_MAX_COUNT: Final = 1 << 53  # up to here a float64 tells whole numbers apart
# Rounding that a peer's own sums may have, relative to the size of its values.
_SLACK: Final = 1e-6


@dataclass(frozen=True)
class Moments:
    """Statistics of F features over `count` values of each.

    Attributes:
        count: of values.
        mean, squares, low, high: float64 [F]; `squares` are summed squared deviations from `mean`.
    """

    count: int
    mean: Vector
    squares: Vector
    low: Vector
    high: Vector

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Moments:
        """Return the statistics of an array [N, F] with N of 1 or more."""
        exact = values.astype(np.float64)
        mean = exact.mean(axis=0)
        return cls(
            len(exact), mean, np.square(exact - mean).sum(axis=0), exact.min(axis=0),
            exact.max(axis=0),
        )  # fmt: skip

    def merged(self, other: Moments) -> Moments:
        """Return the statistics of both together."""
        count = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / count
        return Moments(
            count,
            self.mean + delta * share,
            self.squares + other.squares + np.square(delta) * (self.count * share),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    @property
    def std(self) -> Vector:
        """The standard deviation of each feature, over all values (not of a sample)."""
        return np.sqrt(self.squares / self.count)

    def tensor(self) -> Vector:
        """Return them as float64 [5, F]."""
        count = np.full_like(self.mean, self.count)
        return np.stack([count, self.mean, self.squares, self.low, self.high])

    @classmethod
    def read(cls, tensor: Value, max_abs: float = math.inf) -> Moments:
        """Return what a peer's tensor says; ValueError, which says what is wrong with it."""
        if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float64:
            kind = tensor.dtype if isinstance(tensor, np.ndarray) else type(tensor).__name__
            raise ValueError(f"they are {kind}, not float64")
        if tensor.ndim != 2 or len(tensor) != ROWS or not 1 <= tensor.shape[1] <= _MAX_FEATURES:
            raise ValueError(f"they have the shape {list(tensor.shape)}, not [{ROWS}, F]")
        if not np.isfinite(tensor).all():
            raise ValueError("they hold NaN or infinity")
        counts, mean, squares, low, high = tensor
        count = float(counts[0])
        if not (counts == count).all() or not 1 <= count <= _MAX_COUNT or count % 1:
            raise ValueError(f"their count is {count:g}, or differs; it is one integer from 1")
        size = np.maximum(np.abs(low), np.abs(high))
        if float(size.max()) > max_abs:
            raise ValueError(f"a value is beyond {max_abs:g} (max_abs)")
        slack = _SLACK * size
        if (mean < low - slack).any() or (mean > high + slack).any() or (low > high).any():
            raise ValueError("a mean is not between minimum and maximum")
        # Popoviciu: no distribution between two ends has a larger variance than half at each.
        with np.errstate(over="ignore"):
            most = count * np.square((high - low) / 2 + slack)
        if (squares < 0).any() or (squares > most).any():
            raise ValueError("a variance is negative, or larger than minimum and maximum allow")
        return cls(int(count), mean, squares, low, high)


def read_label_counts(metadata: Metadata, num_samples: int) -> list[int]:
    """Return the counts of the labels 0, 1, …; ValueError for some that can't be."""
    told = metadata.get("label_counts", "")
    if not isinstance(told, str) or len(told) > 20 * MAX_LABELS:
        raise ValueError("label_counts is no list of numbers")
    parts = told.split(",") if told else []
    if len(parts) > MAX_LABELS or not all(
        part.isascii() and part.isdigit() and len(part) < 18 for part in parts
    ):
        raise ValueError("label_counts is no list of counts, or too long")
    counts = [int(part) for part in parts]
    if counts and sum(counts) != num_samples:
        raise ValueError(f"label_counts are {sum(counts)} together, not {num_samples}")
    return counts


@dataclass(frozen=True, kw_only=True)
class StandardizedConfig(SplitConfig):
    """Settings of sources whose features can be standardised.

    Attributes:
        standardize: "none"; "given": by `mean` and `std`; "federated": by the statistics of all
            peers, which a program such as `FederatedStatistics` sends, or the file `statistics`
            has. Nothing is given out before they are there.
        mean: subtracted from the values: one number for each feature, or one for all.
        std: what the difference is divided by: one number for each feature, or one for all.
        statistics: path of a file (JSON) with `mean` and `std`; statistics that a program sends
            are written to it.
    """

    standardize: Literal["none", "given", "federated"] = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    statistics: str = path_setting(default="")


class StandardizedDataSource(SplitDataSource):
    """A source of numbers: it measures its features, and gives them out standardised if wanted.

    The features are then float32. Its Config is a `StandardizedConfig`.
    """

    config: StandardizedConfig

    def __init__(self, config: StandardizedConfig) -> None:
        super().__init__(config)
        self.require_choice("standardize", Literal["none", "given", "federated"])
        given = config.standardize == "given"
        self.require(
            given == bool(config.mean) == bool(config.std),
            'standardize = "given" needs `mean` and `std`, and the others have neither',
        )
        self.require(
            all(math.isfinite(value) for value in config.mean)
            and all(0 < value < math.inf for value in config.std),
            "`mean` has to be finite numbers, and `std` positive ones",
        )
        # Mean and standard deviation that a program sent, in the order of the federation.
        self._received: tuple[Vector, Vector] | None = None
        self._raw: ByRow | None = None
        self._scale: tuple[Vector, Vector] | None = None  # those in use

    def served(self, features: ByRow) -> ByRow:
        """Return the features as batches have them, and keep those that were loaded."""
        self._raw = features
        wanted = self.config.standardize
        if wanted == "none":
            return features
        if features.dtype.kind not in "fiub":
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {features.dtype} features have no mean; leave standardize out"
            )
        what = "the statistics that were sent"
        try:
            if wanted == "given":
                what = "`mean` and `std`"
                count = self._feature_count()
                mean, std = (
                    np.array(each * count if len(each) == 1 else self._in_order(each))
                    for each in (self.config.mean, self.config.std)
                )
                self._scale = self._fitting(mean, std)
            elif (given := self._agreed_scaling()) is not None:
                what = "the scaling of the federation"
                self._scale = self._fitting(*given)
            elif self._received is not None:
                self._scale = self._fitting(*self._received)
            elif self.config.statistics and Path(self.config.statistics).exists():
                what = self.config.statistics
                self._scale = self._fitting(*self._of_file())
        except ValueError as error:
            raise DataUnavailable(f"{self.TYPE_NAME}: {what}: {error}") from error
        return _Standardized(features, self._scale_now)

    def meaning(self, features: ByRow, labels: ByRow) -> SharedSchema:
        """Return what the examples mean, with the scaling as far as it is there."""
        made = super().meaning(features, labels)
        config, by = self.config, self.config.standardize
        if by == "none":
            return replace(made, scaling=Scaling(by="none"))
        assert made.features is not None
        mean: Sequence[float] = config.mean
        std: Sequence[float] = config.std
        names: tuple[str, ...] | None = None
        if by == "federated" and self._received is not None:
            mean, std = (each.tolist() for each in self._received)
            names = () if self._reference is None else self._reference.places
        elif by == "federated" and config.statistics and Path(config.statistics).exists():
            found = self._read_file()
            mean, std, names = found[0].tolist(), found[1].tolist(), found[2]
        own = made.places
        if names and own and names != own and set(own) <= set(names):
            at = [names.index(name) for name in own]
            mean, std = ([each[place] for place in at] for each in (mean, std))
        return replace(
            made,
            features=TensorSchema(made.features.shape, np.dtype(np.float32).name),
            scaling=Scaling.of(by, mean, std, own),
        )

    def _agreed_scaling(self) -> tuple[Vector, Vector] | None:
        """Return mean and deviation that the reference gives, in its order."""
        scaling = None if self._reference is None else self._reference.scaling
        if scaling is None or scaling.by != "given" or not scaling.mean:
            return None
        count = self._feature_count()
        mean, std = (
            np.array(each * count if len(each) == 1 else each, np.float64)
            for each in (scaling.mean, scaling.std)
        )
        return mean, std

    def _in_order(self, values: Sequence[float]) -> Sequence[float]:
        """Return numbers of the own columns in the order of what was adopted; ValueError."""
        if self._reference is None or self._own is None:
            return values
        places = places_of(self._reference, self._own)
        if places is None:
            return values
        if len(values) != sum(each.width for each in self._own.columns or ()):
            raise ValueError(f"they are of {len(values)} feature(s)")
        if (places < 0).any():
            raise ValueError(
                "they lack the categories that only other peers have; give them for all, or one "
                "number for all features"
            )
        return [values[place] for place in places]

    def describe(self) -> DataDescription:
        """Return what the positions of an example mean, with the scaling that is in use.

        Raises StatisticsMissing where the statistics of all peers are not there yet.
        """
        made = super().describe()
        if self.config.standardize == "none":
            return made
        assert self._raw is not None  # `made` has loaded it
        mean, std = (each.ravel().tolist() for each in self._scale_now())
        settings = {**made.settings, "dtype": self._raw.dtype.name}
        scaling = {"standardize": "given", "mean": mean, "std": std}
        return replace(made, settings={**settings, **scaling})

    @offload(reads_only=True)
    def statistics(self, ctx: OpContext) -> tuple[Value, Metadata]:
        """Return the statistics of the features as loaded, float64 [5, F], and what they are of.

        The metadata has `num_samples` and, where labels are classes below 1024, `label_counts`: how
        many examples have the label 0, 1 and so on, as text with commas.

        Raises:
            DataUnavailable: a feature is not a finite number, or there are too many features.
        """
        data = self._data()
        assert self._raw is not None
        if self.schema().inputs:
            several = "statistics of several `inputs`"
            raise UnsupportedByDataSource(component=self.TYPE_NAME, op=several)
        features = self._feature_count()
        if features > _MAX_FEATURES:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {features} features are more than the {_MAX_FEATURES} that "
                "statistics are taken of; leave some out"
            )
        size = max(1, math.prod(self._raw.shape[1:]))
        step = max(1, _VALUES_AT_ONCE // size)
        found: Moments | None = None
        are_classes = len(data.labels.shape) == 1 and _are_classes(self.schema().label_range)
        counts = np.zeros(MAX_LABELS, np.int64) if are_classes else None
        for start in range(0, len(data), step):
            rows = np.arange(start, min(start + step, len(data)))
            rows = rows if data.rows is None else data.rows[rows]
            part = _by_feature(np.asarray(self._raw[rows]))
            bad = ~np.isfinite(part).all(axis=0)
            if bad.any():
                raise DataUnavailable(
                    f"{self.TYPE_NAME}: feature {int(bad.argmax())} has NaN or infinity in "
                    f"examples {start} to {start + len(rows) - 1}; clean the data"
                )
            moments = Moments.of(part)
            found = moments if found is None else found.merged(moments)
            if counts is not None:
                counts += np.bincount(np.asarray(data.labels[rows]), minlength=MAX_LABELS)
        assert found is not None
        told: dict[str, int | str] = {"num_samples": len(data)}
        if counts is not None:
            last = int(np.flatnonzero(counts)[-1])
            told["label_counts"] = ",".join(str(int(count)) for count in counts[: last + 1])
        return found.tensor(), Metadata(told)

    @offload
    def standardize(self, ctx: OpContext, statistics: Value) -> None:
        """Keep the statistics of all peers; from now on they apply where "federated" is set.

        Raises:
            StatisticsRefused: they can't be of this source's features.
            DataUnavailable: the file of the setting `statistics` can't be written.
        """
        self._data()
        try:
            moments = Moments.read(statistics)
            received = moments.mean.copy(), moments.std
            scale = self._fitting(*received)
        except ValueError as error:
            raise StatisticsRefused(
                f"{self.TYPE_NAME}: the statistics that were sent are refused: {error}"
            ) from error
        if self.config.statistics:
            self._write_file(moments)
        with self._lock:
            self._received = received
            if self.config.standardize == "federated":
                self._scale = scale

    def serialize(self) -> bytes:
        """Return the position, and the statistics that a program sent."""
        position = super().serialize()
        if self._received is None:
            return position
        mean, std = (each.astype("<f8").tobytes() for each in self._received)
        return bytes(msgpack.packb({"position": position, "mean": mean, "std": std}))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            state = msgpack.unpackb(data)
            if "position" not in state:
                super().restore(data)
                return
            mean, std = (np.frombuffer(state[name], "<f8") for name in ("mean", "std"))
            good = np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()
            if mean.shape != std.shape or not good:
                raise ValueError("its statistics are no numbers")
            super().restore(state["position"])
        self._received = mean.astype(np.float64), std.astype(np.float64)

    def _scale_now(self) -> tuple[Vector, Vector]:
        if self._scale is None:
            raise StatisticsMissing(
                f"{self.TYPE_NAME}: the statistics of all peers are not there yet; run a program "
                "that sends them (FederatedStatistics), or set `statistics` to a file that has "
                "them"
            )
        return self._scale

    def _feature_count(self) -> int:
        assert self._raw is not None
        shape = self._raw.shape[1:]
        return shape[0] if len(shape) == 3 else math.prod(shape)

    def _fitting(self, mean: Vector, std: Vector) -> tuple[Vector, Vector]:
        """Return mean and deviation so that they apply to a batch; ValueError if they can't."""
        assert self._raw is not None
        features = self._feature_count()
        for values in (mean, std):
            if values.size != features:
                raise ValueError(
                    f"they are of {values.size} feature(s), and the examples have {features}"
                )
        shape = self._raw.shape[1:]
        shape = (shape[0], 1, 1) if len(shape) == 3 else shape
        mean, std = (each.reshape(shape) for each in (mean, std))
        # A feature that never varies becomes 0.
        return mean, np.where(std > 0, std, 1.0)

    def _of_file(self) -> tuple[Vector, Vector]:
        """Return mean and deviation of the file in the order of the examples; ValueError."""
        mean, std, names = self._read_file()
        meaning = self._meaning or self._own
        wanted = () if meaning is None else meaning.places
        if names and wanted:
            if not set(wanted) <= set(names):
                absent = next(name for name in wanted if name not in names)
                raise ValueError(f"they are of other columns: {shown(absent)} is not among them")
            at = [names.index(name) for name in wanted]
            return mean[at], std[at]
        adopted = None if self._own is None else self._reference
        if not names and adopted and self._own and places_of(adopted, self._own) is not None:
            raise ValueError(
                "they name no columns, and those of this table are brought into another order; "
                'add "columns", a list of names, to the file'
            )
        return mean, std

    def _read_file(self) -> tuple[Vector, Vector, tuple[str, ...]]:
        path = Path(self.config.statistics)
        try:
            found = json.loads(read_whole(path, self.TYPE_NAME, _MAX_FILE_BYTES))
            mean, std = (np.array(found[name], np.float64) for name in ("mean", "std"))
            names = tuple(map(str, found.get("columns", ())))
            if names and (len(names) != mean.size or len(set(names)) != len(names)):
                raise ValueError("its columns are not one for each mean")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path} is no file of statistics: {shown(str(error))}; it is "
                'JSON: {"mean": […], "std": […]}'
            ) from error
        good = mean.ndim == std.ndim == 1 and np.isfinite(mean).all() and np.isfinite(std).all()
        if not good or (std < 0).any():
            raise DataUnavailable(
                f"{self.TYPE_NAME}: {path} holds no means and deviations, but NaN, infinity, "
                "negative deviations or nested lists"
            )
        return mean, std, names

    def _write_file(self, moments: Moments) -> None:
        path = Path(self.config.statistics)
        meaning = self._meaning or self._own
        names = () if meaning is None else meaning.places
        content = json.dumps(
            {
                **({"columns": list(names)} if len(names) == len(moments.mean) else {}),
                "count": moments.count,
                "mean": moments.mean.tolist(),
                "std": moments.std.tolist(),
                "minimum": moments.low.tolist(),
                "maximum": moments.high.tolist(),
            }
        )
        made = ""
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                made = file.name
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(made).replace(path)
        except (OSError, ValueError) as error:
            if made:
                Path(made).unlink(missing_ok=True)
            raise DataUnavailable(
                f"{self.TYPE_NAME}: cannot write {path}: {getattr(error, 'strerror', error)}; set "
                "`statistics` to a path that this node may write"
            ) from error


class _Standardized:
    """Features with mean and deviation taken out as they are gathered."""

    dtype = np.dtype(np.float32)

    def __init__(self, features: ByRow, scale: Callable[[], tuple[Vector, Vector]]) -> None:
        self.shape = features.shape
        self._features = features
        self._scale = scale

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, rows: Any, /) -> npt.NDArray[np.float32]:
        mean, std = self._scale()
        scaled = (np.asarray(self._features[rows]) - mean) / std
        return scaled.astype(np.float32)


def merged_moments(parts: Iterable[Moments]) -> Moments:
    """Return the statistics of all parts together, merged in their order; at least one."""
    first, *rest = parts
    for part in rest:
        first = first.merged(part)
    return first


def _by_feature(batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a batch as [values, F]."""
    if batch.ndim == 4:
        return batch.transpose(0, 2, 3, 1).reshape(-1, batch.shape[1])
    return batch.reshape(len(batch), -1)


def _are_classes(label_range: tuple[int, int] | None) -> bool:
    return label_range is not None and 0 <= label_range[0] <= label_range[1] < MAX_LABELS
