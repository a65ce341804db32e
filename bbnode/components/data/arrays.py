"""Data sources that hold all their examples in memory.

Rule: which example comes when is a pure function of (seed, epoch), by random bits that numpy
promises never to change; so the same config gives the same batches on every machine.
"""

from __future__ import annotations

import threading
import zipfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import ComponentError, DataSource, OpContext, offload
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import path_setting
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_INT64, TypeNode
from bbnode.ir.values import Value

Features: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.generic]

_MAX_COUNT = (1 << 63) - 1  # epochs and cursors are int64


def permutation(n: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 .. n-1 that depends on `seeds` alone.

    Sorts raw PCG64 outputs: numpy keeps the streams of its bit generators for ever, but not
    those of `Generator.permutation` (NEP 19).
    """
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


class MemoryDataSource(DataSource):
    """Batches over two arrays that a subclass loads; configs have `seed` and `batch_size`.

    `batch_size` is that of NextBatch: 0 gives the whole source as one batch, in its own
    order, and the same again each time. Otherwise NextBatch goes through the shuffled epochs.
    """

    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": TENSOR_FLOAT,
        "NextBatch.labels": (TENSOR_INT64, TENSOR_FLOAT),
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(
            config.batch_size >= 0 and config.seed >= 0,
            f"batch_size and seed must not be negative (batch_size {config.batch_size}, seed "
            f"{config.seed})",
        )
        self._loaded: tuple[Features, Labels] | None = None
        self._epoch = 0
        self._cursor = 0  # examples of the epoch that NextBatch has given out
        # A model that trains in a worker thread and a NextBatch may meet here.
        self._lock = threading.RLock()

    @abstractmethod
    def load(self) -> tuple[Features, Labels]:
        """Return features [N, ...] float32 and labels [N, ...]; DataUnavailable when that fails."""

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        return permutation(self.num_samples, self.config.seed, epoch)

    @property
    def num_samples(self) -> int:
        """The number of examples in this source, which is loaded for it."""
        return len(self._data()[0])

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Load, when the host prepares its components; else the first use does."""
        self._data()

    @offload(reads_only=True)
    def on_data_loaded(self, ctx: OpContext) -> None:
        """Return once the examples are in memory."""
        self._data()

    @offload
    def next_batch(self, ctx: OpContext) -> tuple[Value, Value]:
        """Return the next (batch [B, ...] float32, labels [B, ...]); the last may be short."""
        with self._lock:
            features, labels = self._data()
            if self.config.batch_size == 0:
                return features, labels
            rows = self._order(self._epoch)[self._cursor : self._cursor + self.config.batch_size]
            self._cursor += len(rows)
            if self._cursor >= self.num_samples:
                self._epoch, self._cursor = self._epoch + 1, 0
            return _take(features, rows), _take(labels, rows)

    def reset(self, ctx: OpContext) -> None:
        """Go back to the first batch of the first epoch."""
        with self._lock:
            self._epoch = self._cursor = 0

    def epoch_batches(self, batch_size: int) -> Sequence[tuple[Value, Value]]:
        """Return all batches of the next epoch, shuffled; one that NextBatch began is skipped."""
        if batch_size < 1:
            raise ComponentError(f"{self.TYPE_NAME}: a batch of {batch_size}; ask for 1 or more")
        with self._lock:
            features, labels = self._data()
            if self._cursor:
                self._epoch, self._cursor = self._epoch + 1, 0
            order = self._order(self._epoch)
            self._epoch += 1
        starts = range(0, len(order), batch_size)
        rows = [order[start : start + batch_size] for start in starts]
        return [(_take(features, r), _take(labels, r)) for r in rows]

    def serialize(self) -> bytes:
        """Return epoch and cursor; the data itself is loaded again."""
        return bytes(msgpack.packb({"epoch": self._epoch, "cursor": self._cursor}))

    def restore(self, data: bytes) -> None:
        """Continue at a saved position; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            state = msgpack.unpackb(data)
            epoch, cursor = state["epoch"], state["cursor"]
            if any(type(n) is not int or not 0 <= n <= _MAX_COUNT for n in (epoch, cursor)):
                raise ValueError(f"position {epoch!r}, {cursor!r} is not a count")
        self._epoch, self._cursor = epoch, cursor

    def _data(self) -> tuple[Features, Labels]:
        with self._lock:
            if self._loaded is None:
                features, labels = self.load()
                if len(features) == 0 or len(features) != len(labels):
                    raise DataUnavailable(
                        f"{self.TYPE_NAME}: {len(features)} example(s) and {len(labels)} label(s); "
                        "there has to be one label for each, and at least one example"
                    )
                features.flags.writeable = labels.flags.writeable = False
                self._loaded = features, labels
            return self._loaded


def _take(array: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    taken = array[rows]
    taken.flags.writeable = False
    return taken


def _archive(file: BinaryIO) -> Any:
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise TypeError("it is one array, not an archive; write it with numpy.savez")
    return loaded


@dataclass(frozen=True, kw_only=True)
class ArrayDataSourceConfig:
    """Settings of `ArrayDataSource`.

    Attributes:
        path: of an .npz file on this peer.
        features, labels: names of the two arrays in it.
        batch_size: examples of a NextBatch; 0 is all at once.
        seed: of the shuffling.
    """

    path: str = path_setting()
    features: str = "x"
    labels: str = "y"
    batch_size: int = 0
    seed: int = 0


@register_component
class ArrayDataSource(MemoryDataSource):
    """A peer's own data, from an .npz file; features become float32, integer labels int64.

    Other labels become float32; a program that only hands them on says so with
    `g.expect(labels, types.TENSOR_FLOAT)`, as it takes them for int64 where it computes nothing.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ArrayDataSource"
    Config: ClassVar[type] = ArrayDataSourceConfig
    config: ArrayDataSourceConfig

    def load(self) -> tuple[Features, Labels]:
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
